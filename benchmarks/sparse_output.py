"""Output layers of groups of labels beside dense layers of equal FLOPs.

    python -m benchmarks.sparse_output                       # some minutes on one GPU
    python -m benchmarks.sparse_output --only layers         # this part; others in the file stay
    python -m benchmarks.sparse_output --sizes 0.67          # sizes whose name has this; others in the file stay

`layers`: logits, the gradient of weights and the gradient of features of `group_sparse_linear`, bfloat16, each alone, beside a
dense layer that has as many inputs as a group reads columns, and so as many weights and FLOPs. One group in seventeen is short,
as one is for each coarse cluster when labels are grouped; columns of a group are random. The dense layer's labels are rounded up
to a multiple of 64, as odd rows of logits would make it slower. Useful bytes are those of weights and logits, once each.

Beside them `loss`: binary cross-entropy of all labels by `group_sparse_bce`, forward, and with all gradients; five positives a
row; and `softmax`: the same by `group_sparse_cross_entropy`.

`labels`, `sparsity` and `groups`: the same along the number of labels, the columns that a group reads and the labels of a group,
as the figures 4 and 5 of the HASTE paper have them, with the bytes of weights and supports of its figure 3. `adjacent`: the sizes
of `layers`, where groups read blocks of adjacent columns, drawn at random.

`steps`: loss, all gradients and an update by SGD (ours in the backward pass), beside the same of a dense layer of all features,
unfused and by `linear_bce`, and beside a step of an encoder of DistilBERT's size; and the most memory that a step of a whole head
takes, births of slots too.

Each of ours is checked against float64 on some groups (the gradient of features: all of a layer with fewer labels) before it is
timed. A time is the median of bursts of about ten milliseconds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.common import environment, other_parts, replay_us, save
from benchmarks.sparse_steps import STEPS, Step, head_bytes, positives_of, steps_of
from jagged.ops import group_sparse_bce, group_sparse_cross_entropy, group_sparse_linear, trust_values

PASSES = ("forward", "weight", "features")
# A result may err by as much, relative to the largest number of its kind.
TOLERANCE = 2e-2


class Size(NamedTuple):
    """Labels, samples, features, labels of a group and columns that it reads; asked times of the three passes in milliseconds.

    `adjacent`: whether a group's columns are a block.
    """

    labels: int
    batch: int
    features: int
    group: int
    width: int
    asked: tuple[float, ...] = ()
    adjacent: bool = False

    def __str__(self) -> str:
        kind = ", adjacent" if self.adjacent else ""
        return f"{self.labels / 1e6:g} M, {self.batch}, {self.features}, {self.group}, {self.width}{kind}"


SIZES = (
    Size(8_620_000, 64, 768, 32, 32, (0.66, 0.55, 0.75)),
    Size(2_810_000, 64, 768, 32, 32, (0.215, 0.18, 0.25)),
    Size(8_620_000, 128, 384, 16, 64, (1.5, 1.2, 2.2)),
    Size(670_000, 128, 384, 16, 64, (0.12, 0.11, 0.19)),
)
# Sizes along one number.
CURVES = {
    "labels": tuple(Size(labels, 64, 768, 32, 32) for labels in (65_536, 262_144, 1_048_576, 2_810_000, 8_620_000)),
    "sparsity": tuple(Size(670_000, 64, 768, 32, width) for width in (32, 64, 96, 128)),
    "groups": tuple(Size(670_000, 64, 768, group, 64) for group in (1, 2, 4, 8, 16, 32, 64, 128)),
    "adjacent": tuple(size._replace(asked=(), adjacent=True) for size in SIZES),
}
PARTS = ("layers", *CURVES, "steps")


class Layer(NamedTuple):
    """What a layer and its gradients take; `grad` has the strides of the logits."""

    features: Tensor
    weight: Tensor
    supports: Tensor
    group_offsets: Tensor
    grad: Tensor


def layer_of(size: Size, seed: int = 0, device: str = "cuda") -> Layer:
    """Random numbers, and groups of which one in seventeen is short."""
    generator = torch.Generator(device).manual_seed(seed)
    groups = max(1, size.labels // size.group)
    sizes = torch.full((groups,), size.group, device=device)
    short = torch.rand(groups, generator=generator, device=device) < 1 / 17
    sizes = torch.where(short, torch.randint(1, size.group + 1, (groups,), generator=generator, device=device), sizes)
    offsets = torch.nn.functional.pad(sizes.cumsum(0), (1, 0))
    labels, pieces = int(offsets[-1]), []
    for first in range(0, groups, 20_000):
        some = min(20_000, groups - first)
        if size.adjacent:
            blocks = torch.randint(size.features // size.width, (some,), generator=generator, device=device)
            pieces.append((blocks * size.width).to(torch.int32))
        else:
            drawn = torch.rand(some, size.features, generator=generator, device=device)
            pieces.append(drawn.topk(size.width).indices.sort(1).values.to(torch.int32))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    weight = normal(labels, size.width).mul_(size.width**-0.5)
    return Layer(normal(size.batch, size.features), weight, torch.cat(pieces), offsets, normal(labels, size.batch).t())


def columns_of(layer: Layer) -> Tensor:
    """The columns `[K, F]` that groups read, int64."""
    columns = layer.supports.long()
    return columns if columns.dim() == 2 else columns[:, None] + torch.arange(layer.weight.shape[1], device=columns.device)


def passes(layer: Layer) -> dict[str, Callable[[], Callable[[], Any]]]:
    """What each pass prepares, which returns what is timed."""

    def forward() -> Callable[[], Any]:
        return lambda: group_sparse_linear(*layer[:4])

    def backward(name: str) -> Callable[[], Callable[[], Any]]:
        def prepare() -> Callable[[], Any]:
            leaf = getattr(layer, name).detach().requires_grad_()
            logits = group_sparse_linear(*layer._replace(**{name: leaf})[:4])
            return lambda: torch.autograd.grad(logits, leaf, layer.grad, retain_graph=True)

        return prepare

    return {"forward": forward, "weight": backward("weight"), "features": backward("features")}


def dense_passes(size: Size, device: str = "cuda") -> dict[str, Callable[[], Callable[[], Any]]]:
    """The same of a dense layer of `size.width` inputs."""
    labels = -(-size.labels // 64) * 64
    of = {"device": device, "dtype": torch.bfloat16}
    features, weight = torch.randn(size.batch, size.width, **of), torch.randn(labels, size.width, **of)
    grad = torch.randn(size.batch, labels, **of)
    return {
        "forward": lambda: lambda: features @ weight.t(),
        "weight": lambda: lambda: grad.t() @ features,
        "features": lambda: lambda: grad @ weight,
    }


def loss_passes(
    size: Size, layer: Layer, loss_of: Callable[..., Tensor], device: str = "cuda"
) -> dict[str, Callable[[], Callable[[], Any]]]:
    """A loss, and the loss with the gradients of features, weight and bias."""
    positives, offsets = positives_of(size.batch, layer.weight.shape[0], device)
    bias = torch.full_like(layer.weight[:, 0], -14.0)

    def both() -> Callable[[], Any]:
        leaves = [tensor.detach().requires_grad_() for tensor in (layer.features, layer.weight, bias)]

        def step() -> Any:
            loss = loss_of(*leaves[:2], *layer[2:4], positives, offsets, leaves[2])
            return torch.autograd.grad(loss, leaves)

        return step

    return {"forward": lambda: lambda: loss_of(*layer[:4], positives, offsets, bias), "both": both}


def errors_of(size: Size, layer: Layer) -> dict[str, float]:
    """The largest error of each pass against float64, over the largest number, on ten groups and on a layer of 1,000."""

    def relative(ours: Tensor, exact: Tensor) -> float:
        return float((ours.double() - exact).abs().max() / exact.abs().max())

    features = layer.features.double()
    logits = group_sparse_linear(*layer[:4])
    weight = layer.weight.detach().requires_grad_()
    (of_weight,) = torch.autograd.grad(group_sparse_linear(layer.features, weight, *layer[2:4]), weight, layer.grad)
    errors = {"forward": 0.0, "weight": 0.0}
    for group in torch.linspace(0, layer.supports.shape[0] - 1, 10).long().tolist():
        labels = slice(*layer.group_offsets[group : group + 2].tolist())
        gathered = features[:, columns_of(layer)[group]]
        errors["forward"] = max(errors["forward"], relative(logits[:, labels], gathered @ layer.weight[labels].double().t()))
        exact = layer.grad[:, labels].double().t() @ gathered
        errors["weight"] = max(errors["weight"], relative(of_weight[labels], exact))
    few = layer_of(size._replace(labels=1000 * size.group), device=str(layer.weight.device))
    dense = torch.zeros(few.weight.shape[0], size.features, dtype=torch.float64, device=few.weight.device)
    group_of = torch.repeat_interleave(few.group_offsets.diff())
    dense.scatter_(1, columns_of(few)[group_of], few.weight.double())
    leaf = few.features.detach().requires_grad_()
    (of_features,) = torch.autograd.grad(group_sparse_linear(leaf, *few[1:4]), leaf, few.grad)
    return {**errors, "features": relative(of_features, few.grad.double() @ dense)}


def measure(size: Size, sustained: float = 0.0, device: str = "cuda") -> dict[str, Any]:
    """Times of the three passes of ours and of the dense layer, errors, and the bytes that each has to move and to keep."""
    layer = layer_of(size, device=device)
    found: dict[str, Any] = {"size": size._asdict(), "labels": layer.weight.shape[0], "groups": layer.supports.shape[0]}
    kept = {name: getattr(layer, name).nbytes for name in ("weight", "supports", "group_offsets")}
    found["bytes"] = kept | {"dense": 2 * layer.weight.shape[0] * size.features}
    found["errors"] = errors_of(size, layer)
    wrong = {name: error for name, error in found["errors"].items() if not error < TOLERANCE}
    if wrong:
        raise SystemExit(f"{size}: errors {wrong}, expected below {TOLERANCE}")
    found["gigabytes"] = (layer.weight.numel() + layer.grad.numel()) * 2 / 1e9
    with trust_values():
        found["jagged"] = _times(passes(layer), sustained)
        for name, loss_of in (("loss", group_sparse_bce), ("softmax", group_sparse_cross_entropy)):
            found[name] = _times(loss_passes(size, layer, loss_of, device), sustained)
    del layer
    found["dense"] = _times(dense_passes(size, device), sustained)
    found["asked_ms"] = dict(zip(PASSES, size.asked, strict=False))
    return found


def _times(ways: dict[str, Callable[[], Callable[[], Any]]], sustained: float = 0.0) -> dict[str, Any]:
    return {name: replay_us(prepare=prepare, sustained=sustained) for name, prepare in ways.items()}


def measure_step(step: Step, device: str = "cuda") -> dict[str, Any]:
    """Times of the ways of a step, and the most memory that one of a whole head takes."""
    found: dict[str, Any] = {"head_bytes": head_bytes(step, device)}
    layer = layer_of(Size(*step), device=device)
    for name, prepare in steps_of(step, layer, device).items():
        try:
            with trust_values():
                found[name] = replay_us(prepare=prepare)
        except torch.OutOfMemoryError as error:
            # Of a dense layer of all features; ours has to fit.
            if name == "jagged":
                raise
            found[name] = {"failed": str(error).splitlines()[0][:200]}
        torch.cuda.empty_cache()
    return found


def line_of(size: Size, found: dict[str, Any]) -> str:
    """One line of the log."""
    parts = []
    for name in PASSES:
        ours, dense = (found[who][name]["median"] / 1e3 for who in ("jagged", "dense"))
        speed = found["gigabytes"] / ours
        parts.append(f"{name} {ours:.3f} (asked {found['asked_ms'].get(name)}, dense {dense:.3f}, {speed:.2f} TB/s)")
    losses = (
        f"{loss} {' / '.join(format(found[loss][name]['median'] / 1e3, '.3f') for name in ('forward', 'both'))}"
        for loss in ("loss", "softmax")
    )
    return f"{size}: {'; '.join(parts)}; {', '.join(losses)} ms"


def line_of_step(step: Step, found: dict[str, Any]) -> str:
    """One line of the log."""
    ms = {name: of["median"] / 1e3 for name, of in found.items() if "median" in of}
    times = ", ".join(f"{name} {of:.3f}" for name, of in ms.items())
    share = ms["jagged"] / (ms["jagged"] + ms["encoder"])
    memory = " / ".join(f"{of / 1e9:.2f}" for of in found["head_bytes"].values())
    return f"{step}: {times} ms; {share:.0%} of a step with the encoder; a head's step {memory} GB"


def main() -> None:
    """Measure and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to measure")
    parser.add_argument("--sizes", nargs="*", default=[""], help="sizes whose name has one of these words")
    options = parser.parse_args()
    facts = environment()
    result = {"environment": facts, **other_parts("sparse_output", facts)}
    for part in options.only:
        for size in SIZES if part == "layers" else STEPS if part == "steps" else CURVES[part]:
            if not any(word in str(size) for word in options.sizes):
                continue
            rows = result.setdefault(part, {})
            if isinstance(size, Step):
                rows[str(size)] = found = measure_step(size)
                print(f"{part}: {line_of_step(size, found)}", flush=True)
            else:
                rows[str(size)] = found = measure(size, 0.5 if part == "layers" else 0.0)
                print(f"{part}: {line_of(size, found)}", flush=True)
            torch.cuda.empty_cache()
            # Kept from row to row: a run may be cut off.
            path = save("sparse_output", result)
    print(path)


if __name__ == "__main__":
    main()
