"""Mixtures of experts beside a loop over small perceptrons: forward, and forward and backward.

    python -m benchmarks.experts
    python -m benchmarks.experts --only "16 experts" --seconds 60
    python -m benchmarks.experts --device cpu       # to try it, few rows; nothing is saved

`MMoE` of E experts and two tasks, and a tower for each task, beside the same weights in a Python loop: `nn.Sequential` of each
expert, `torch.stack`, gates one by one, towers one by one. Both are checked against each other first. Weights are float32;
products are bfloat16 under autocast, or TF32.

Microseconds of the GPU by replays of a CUDA graph, so that the loop's launches cost it nothing on the host; `eager_us` is the
time of calls one after the other with the host's part. `product_us` is the time of one expert's largest product in the loop,
`of_matmul` the share of the run's matmul limit that our products would take alone (of bfloat16; TF32's is half of it).
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.common import ROOT, environment, event_us, other_parts, replay_us, save, seconds_of, spread
from jagged.models import GroupedLinear, GroupedMLP, MMoE

EXPERTS, BATCHES = (8, 16, 32), (4_096, 16_384, 65_536)
WIDTHS = {"256, 256, 128": (256, (256, 128)), "512, 512, 256": (512, (512, 256)), "1,024, 1,024, 512": (1024, (1024, 512))}
PRODUCTS = ("bfloat16", "tf32")
TASKS, TOWER = 2, (64, 1)
# The error of outputs and gradients, from those in float32, that our way may have of the loop's: where a value is nearly 0, a
# rounding decides whether ReLU lets its gradient pass.
AGREEMENT = 1.5
ASKED = {"product_us": 50, "times": 2.0, "else": 1.0, "of_matmul": 0.75}


class Case(NamedTuple):
    """A mixture, the rows of a batch, and what products are computed in."""

    experts: int
    widths: str
    rows: int
    products: str

    @property
    def name(self) -> str:
        return f"{self.experts} experts, widths {self.widths}, {self.rows:,} rows, {self.products}"


class Ours(nn.Module):
    """Experts, gates and towers as batched products."""

    def __init__(self, case: Case, device: str) -> None:
        super().__init__()
        wide, sizes = WIDTHS[case.widths]
        self.mixture = MMoE(wide, sizes, case.experts, TASKS, device=device)
        self.towers = GroupedMLP(sizes[-1], TOWER, TASKS, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return self.towers(self.mixture(x)).squeeze(2)  # type: ignore[no-any-return]


class Loop(nn.Module):
    """The same weights, an expert, a gate and a tower after the other."""

    def __init__(self, ours: Ours) -> None:
        super().__init__()
        self.experts = nn.ModuleList(_apart(ours.mixture.experts, last=True))
        self.gates = nn.ModuleList(_linears(ours.mixture.gates))
        self.towers = nn.ModuleList(_apart(ours.towers, last=False))

    def forward(self, x: Tensor) -> Tensor:
        found = torch.stack([expert(x) for expert in self.experts], 1)
        tasks = []
        for gate, tower in zip(self.gates, self.towers, strict=True):
            weights = gate(x).softmax(1).to(found.dtype)
            tasks.append(tower(torch.bmm(weights[:, None], found).squeeze(1)).squeeze(1))
        return torch.stack(tasks, 1)


def _linears(of: GroupedLinear) -> list[nn.Linear]:
    assert of.bias is not None
    layers = []
    for weight, bias in zip(of.weight, of.bias, strict=True):
        layer = nn.Linear(of.in_features, of.out_features, device=weight.device)
        layer.load_state_dict({"weight": weight, "bias": bias})
        layers.append(layer)
    return layers


def _apart(of: GroupedMLP, *, last: bool) -> list[nn.Sequential]:
    """Each perceptron by itself."""
    by_layer = [_linears(layer) for layer in of.layers]  # type: ignore[arg-type]
    found = []
    for layers in zip(*by_layer, strict=True):
        steps: list[nn.Module] = list(itertools.chain.from_iterable((layer, nn.ReLU()) for layer in layers))
        found.append(nn.Sequential(*(steps if last else steps[:-1])))
    return found


def flops_of(case: Case) -> int:
    """Of the products of a forward pass."""
    wide, sizes = WIDTHS[case.widths]
    experts = sum(a * b for a, b in itertools.pairwise([wide, *sizes]))
    towers = sum(a * b for a, b in itertools.pairwise([sizes[-1], *TOWER]))
    gates = wide * case.experts + case.experts * sizes[-1]
    return 2 * case.rows * (case.experts * experts + TASKS * (towers + gates))


def measure(case: Case, device: str, limit: float | None) -> dict[str, Any]:
    """Check and time both ways."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high" if case.products == "tf32" else "highest")
    is_16 = case.products == "bfloat16"
    ours = Ours(case, device)
    ways: dict[str, nn.Module] = {"jagged": ours, "loop": Loop(ours)}
    x = torch.randn(case.rows, ours.mixture.experts.layers[0].in_features, device=device, requires_grad=True)
    grad = torch.randn(case.rows, TASKS, device=device)

    def forward(model: nn.Module, is_exact: bool = False) -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=is_16 and not is_exact):
            found: Tensor = model(x).float()
        return found

    def both(model: nn.Module, is_exact: bool = False) -> tuple[Tensor, ...]:
        return torch.autograd.grad(forward(model, is_exact), [x, *model.parameters()], grad)

    _check(lambda model, is_exact: (forward(model, is_exact).detach(), both(model, is_exact)[0]), ways)
    row: dict[str, Any] = {**case._asdict(), "flops": flops_of(case)}
    for name, model in ways.items():
        times = {}
        for way, function in (("forward", forward), ("both", both)):
            call = _call(function, model)
            times[way] = _time(call, device)
            if device == "cuda":
                times[way]["eager_us"] = spread(event_us(call, 5, 1))["median"]
            if limit and name == "jagged":
                work = row["flops"] * (1 if way == "forward" else 3)
                most = limit * (1 if is_16 else 0.5)
                times[way]["of_matmul"] = round(work / most / 1e6 / times[way]["median"], 3)
        row[name] = times
    row["product_us"] = _time(_product(case, device), device)["median"]
    row["times"] = {way: round(row["loop"][way]["median"] / row["jagged"][way]["median"], 3) for way in ("forward", "both")}
    return row


def _call(function: Callable[[nn.Module], Any], model: nn.Module) -> Callable[[], Any]:
    return lambda: function(model)


def _product(case: Case, device: str) -> Callable[[], Any]:
    """The largest product of one expert."""
    wide, sizes = WIDTHS[case.widths]
    dtype = torch.bfloat16 if case.products == "bfloat16" else torch.float32
    x = torch.randn(case.rows, wide, device=device, dtype=dtype)
    layer = nn.Linear(wide, max(sizes), device=device, dtype=dtype).requires_grad_(False)
    return lambda: layer(x)


def _check(results: Callable[[nn.Module, bool], tuple[Tensor, Tensor]], ways: dict[str, nn.Module]) -> None:
    """Refuse a way whose results are further from those in float32 than the loop's."""
    found = {name: results(model, False) for name, model in ways.items()}
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    exact = results(ways["loop"], True)
    torch.set_float32_matmul_precision(precision)
    for ours, loop, right in zip(found["jagged"], found["loop"], exact, strict=True):
        errors = [float((of - right).norm() / right.norm()) for of in (ours, loop)]
        if not errors[0] <= AGREEMENT * errors[1] + 1e-5:
            raise ArithmeticError(
                f"errors of the two ways: {errors[0]:.3g} and {errors[1]:.3g}, expected at most {AGREEMENT} times"
            )


def _time(function: Callable[[], Any], device: str) -> dict[str, Any]:
    if device == "cuda":
        return replay_us(function)
    return spread([seconds_of(function)[0] * 1e6])


def main() -> None:
    """Measure all cases, or some, and save what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", default=[""], help="parts of cases' names")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no case begins after so many")
    options = parser.parse_args()
    facts, begun = environment(options.device), time.perf_counter()
    rows = {} if options.device == "cpu" else other_parts("experts", facts).get("mmoe", {})
    batches = BATCHES if options.device == "cuda" else (64,)
    for experts, widths, count, products in itertools.product(EXPERTS, WIDTHS, batches, PRODUCTS):
        case = Case(experts, widths, count, products)
        if not any(part in case.name for part in options.only) or time.perf_counter() - begun > options.seconds:
            continue
        row = rows[case.name] = measure(case, options.device, facts.get("bf16_matmul_tflops"))
        print(f"{case.name}: {row['times']}, {row['jagged']}, product {row['product_us']:.1f} us", flush=True)
        if options.device == "cuda":
            path = save("experts", {"environment": facts, "asked": ASKED, "mmoe": rows})
            torch.cuda.empty_cache()
    if options.device == "cuda":
        print(f"saved in {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
