"""What each mask and bias costs causal attention, with softmax and with HSTU's SiLU: the part `masks` of `benchmarks.attention`.

    python -m benchmarks.attention --only masks
    python -m benchmarks.attention --only masks --device cpu    # to try it, a few rows; nothing is saved

bfloat16, 4 heads of 32, 64 and 128, samples of one length. Targets are 1 to 20 at each sample's end; times are sorted and lie
within a day, in seconds; tables of biases are float32 and have their gradients as queries, keys and values have theirs. All stand
beside `causal` of the same size, width and kind: `ratio` of the times, and for masks `per_pair`, the ratio of the times of a pair
that is seen, counted by the mask's definition. Times are microseconds of the GPU by replays of a CUDA graph: `forward` without
gradients, `both` forward and backward; what is called backward is their difference.

Before it is timed, output and gradients of the first sample are compared with float64; the gradients of tables, which are sums
over all samples, with those where no other sample has a gradient of its output.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

from benchmarks.attention_cases import time_buckets
from benchmarks.common import replay_us, seconds_of, spread, try_once
from jagged.ops import jagged_attention, jagged_hstu_attention

HEADS = 4
DAY = 86_400
KINDS = ("SiLU", "softmax")
CAUSAL = "causal"


class Variant(NamedTuple):
    """What causal attention has beside; `targets` is the most of a sample, `distances` and `buckets` are columns of tables."""

    targets: int = 0
    window: int | None = None
    num_contextual: int = 0
    global_prefix: int = 0
    distances: int = 0
    buckets: int = 0

    @property
    def is_mask(self) -> bool:
        """Whether other pairs are seen."""
        return self.distances == self.buckets == 0 and self != Variant()


VARIANTS = {
    CAUSAL: Variant(),
    "targets": Variant(targets=20),
    "window of 512": Variant(window=512),
    "window of 1,024": Variant(window=1_024),
    "window of 512, prefix of 32": Variant(window=512, global_prefix=32),
    "8 contextual": Variant(num_contextual=8),
    "relative bias": Variant(distances=401),
    "time bias": Variant(buckets=32),
    "both biases": Variant(distances=401, buckets=32),
}
# Samples, their rows and the heads' widths; on a CPU to try it.
SIZES = {"cuda": ((64, 4_096), (256, 1_024)), "cpu": ((2, 600),)}
WIDTHS = {"cuda": (32, 64, 128), "cpu": (8,)}
# At most so many times causal attention's time of a pair, forward and backward.
MOST_A_PAIR = (1.10, 1.10)
# At most so many times causal attention's time, forward and backward: where a head is wider than `NARROW`, and where it is not.
NARROW = 32
MOST_WITH_BIAS = {"relative bias": (1.15, 1.25), "time bias": (1.25, 1.4), "both biases": (1.35, 1.6)}
MOST_WITH_BIAS_NARROW = {"relative bias": (1.4, 1.6), "time bias": (1.4, 1.6), "both biases": (1.7, 2.0)}
# Ours may be off by as much from float64, in the Euclidean norm and relative to it: several roundings of bfloat16.
AGREEMENT = 0.02


class Case(NamedTuple):
    """A variant of a size, a width and a kind."""

    samples: int
    rows: int
    width: int
    kind: str
    variant: str

    @property
    def name(self) -> str:
        return f"{self.samples} x {self.rows:,} x {HEADS} x {self.width}, {self.kind}: {self.variant}"

    @property
    def beside(self) -> Case:
        return self._replace(variant=CAUSAL)


def cases(device: str = "cuda") -> dict[str, Case]:
    """All by name; causal attention before what is beside it."""
    found = [
        Case(samples, rows, width, kind, variant)
        for samples, rows in SIZES[device]
        for width in WIDTHS[device]
        for kind in KINDS
        for variant in VARIANTS
    ]
    return {case.name: case for case in found}


def chosen(device: str, words: list[str] | None) -> dict[str, Case]:
    """The cases whose name has one of these words, commas aside, each behind the one it is beside."""
    everything = cases(device)

    def plain(name: str) -> str:
        return name.replace(",", "")

    named = {name for name in everything if words is None or any(plain(word) in plain(name) for word in words)}
    named |= {everything[name].beside.name for name in named}
    return {name: case for name, case in everything.items() if name in named}


def seen(rows: int, targets: int, variant: Variant) -> Tensor:
    """`[rows, rows]`, whether a query of a sample sees a key."""
    position, key = torch.arange(rows)[:, None], torch.arange(rows)
    history = rows - targets
    stands = position.clamp(max=history)
    found = key <= stands
    if variant.window is not None:
        found &= (stands - key < variant.window) | (key < max(variant.num_contextual, variant.global_prefix))
    return ((found | (position < variant.num_contextual)) & (key < history)) | ((key == position) & (key >= history))


def seen_pairs(lengths: Tensor, targets: Tensor, variant: Variant) -> int:
    """How many pairs of a query and a key that it sees samples of these lengths have, from the numbers of each row alone."""
    total = 0
    for rows, of_these in zip(lengths.tolist(), targets.tolist(), strict=True):
        position, history = torch.arange(rows), rows - of_these
        stands = position.clamp(max=history)
        # The window holds keys from `first` on; of a prefix those before it are seen too.
        first = torch.zeros_like(position) if variant.window is None else (stands - variant.window + 1).clamp(min=0)
        counts = (stands.clamp(max=history - 1) - first + 1).clamp(min=0)
        counts += first.clamp(max=max(variant.num_contextual, variant.global_prefix))
        counts = torch.where(position < variant.num_contextual, history, counts)
        total += int(counts.sum()) + of_these
    return total


class Workload:
    """Tensors of a case: `inputs` are queries, keys, values and tables of biases, `names` what they are called."""

    def __init__(self, case: Case, device: str) -> None:
        self.case, self.device, self.variant = case, device, VARIANTS[case.variant]
        generator = torch.Generator().manual_seed(0)
        of, total = self.variant, case.samples * case.rows
        self.lengths = torch.full((case.samples,), case.rows)
        self.targets = torch.zeros_like(self.lengths)
        if of.targets:
            self.targets = torch.randint(1, of.targets + 1, (case.samples,), generator=generator)
        self.offsets = (torch.arange(case.samples + 1) * case.rows).to(device)
        times = torch.randint(0, DAY, (case.samples, case.rows), generator=generator).sort(dim=1).values.flatten()
        self.times = times.to(device) if of.buckets else None
        numbers = torch.Generator(device).manual_seed(0)
        q, k, v, self.upstream = (
            torch.randn(total, HEADS, case.width, generator=numbers, device=device).bfloat16() for _ in range(4)
        )
        columns = {"relative_bias": of.distances, "time_bias": of.buckets}
        tables = {name: torch.randn(HEADS, count, generator=numbers, device=device) for name, count in columns.items() if count}
        self.names = ("q", "k", "v", *tables)
        self.inputs = tuple(x.requires_grad_() for x in (q, k, v, *tables.values()))
        self.options: dict[str, Any] = {name: getattr(of, name) for name in ("window", "num_contextual", "global_prefix")}
        self.options["num_targets"] = self.targets.to(device) if of.targets else None

    @property
    def pairs(self) -> int:
        return seen_pairs(self.lengths, self.targets, self.variant)

    def attend(self) -> Tensor:
        """Ours, of the inputs."""
        q, k, v, *tables = self.inputs
        options = {**self.options, **dict(zip(self.names[3:], tables, strict=True)), "causal": True}
        if self.case.kind == "SiLU":
            return jagged_hstu_attention(q, k, v, self.offsets, times=self.times, **options)
        return jagged_attention(q, k, v, self.offsets, q_times=self.times, **options)

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self.attend()

    def both(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.attend(), self.inputs, self.upstream)

    def errors(self) -> dict[str, float]:
        """How far output and gradients are from float64, relative to it, where the first sample alone has an upstream gradient.

        Raises:
            ArithmeticError: more than `AGREEMENT`.
        """
        rows = self.case.rows
        exact = self._exact()
        output = self.attend()
        upstream = torch.zeros_like(self.upstream)
        upstream[:rows] = self.upstream[:rows]
        gradients = torch.autograd.grad(output, self.inputs, upstream)
        found = {"output": output.detach()[:rows]}
        found |= {name: x[:rows] if x.dim() == 3 else x for name, x in zip(self.names, gradients, strict=True)}
        errors = {name: float((x.double() - exact[name]).norm() / exact[name].norm()) for name, x in found.items()}
        for name, error in errors.items():
            if not error <= AGREEMENT:
                raise ArithmeticError(f"{self.case.name}: {name} is off by {error:.2g} of its norm, allowed {AGREEMENT}")
        return errors

    def _exact(self) -> dict[str, Tensor]:
        """Output and gradients of the first sample, by plain products in float64."""
        rows, of, targets = self.case.rows, self.variant, int(self.targets[0])
        q, k, v = (x.detach()[:rows].double().requires_grad_() for x in self.inputs[:3])
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.case.width**-0.5
        places = {}
        for name, table in zip(self.names[3:], self.inputs[3:], strict=True):
            if name == "relative_bias":
                # Targets stand right behind the history.
                stands, furthest = torch.arange(rows, device=self.device).clamp(max=rows - targets), of.distances // 2
                places[name] = furthest + (stands[:, None] - stands).clamp(-furthest, furthest)
            else:
                assert self.times is not None
                times = self.times[:rows]
                places[name] = time_buckets(times[:, None] - times, of.buckets)
            scores = scores + table.detach().double()[:, places[name]]
        hidden = ~seen(rows, targets, of).to(self.device)
        if self.case.kind == "SiLU":
            weights = (silu(scores) / rows).masked_fill(hidden, 0)
        else:
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        output = torch.einsum("hqk,khd->qhd", weights, v)
        *gradients, of_scores = torch.autograd.grad(output, (q, k, v, scores), self.upstream[:rows].double())
        exact = {"output": output.detach(), **dict(zip("qkv", gradients, strict=True))}
        for name, place in places.items():
            # A column's is the sum over its pairs; a gradient through the look-up would add equal places one by one.
            columns = of_scores.new_zeros(HEADS, of.distances if name == "relative_bias" else of.buckets)
            exact[name] = columns.scatter_add_(1, place.flatten().expand(HEADS, -1), of_scores.flatten(1))
        return exact


Timer = Callable[[Callable[[], Any]], dict[str, Any]]


def measure(w: Workload, time_it: Timer) -> dict[str, Any]:
    """Check a case and time it."""
    row: dict[str, Any] = {"size": w.case._asdict(), "pairs": w.pairs, "errors": w.errors()}
    row["forward"], row["both"] = time_it(w.forward), time_it(w.both)
    row["us"] = {"forward": row["forward"]["median"], "backward": row["both"]["median"] - row["forward"]["median"]}
    return row


def bars(case: Case) -> dict[str, float]:
    """The most that a case may take, forward and backward: masks a pair, biases as a whole; nothing for causal attention."""
    of_biases = MOST_WITH_BIAS_NARROW if case.width <= NARROW else MOST_WITH_BIAS
    most = MOST_A_PAIR if VARIANTS[case.variant].is_mask else of_biases.get(case.variant, ())
    return dict(zip(("forward", "backward"), most, strict=False))


def compared(rows: dict[str, Any], case: Case) -> dict[str, Any]:
    """How a case stands to causal attention, and to what is asked of it."""
    if case.variant == CAUSAL:
        return {}
    mine, its = rows[case.name], rows[case.beside.name]
    ratio = {way: us / its["us"][way] for way, us in mine["us"].items()}
    found: dict[str, Any] = {"ratio": ratio, "asked": bars(case)}
    judged = ratio
    if VARIANTS[case.variant].is_mask:
        judged = found["per_pair"] = {way: times * its["pairs"] / mine["pairs"] for way, times in ratio.items()}
    found["met"] = all(judged[way] <= bar for way, bar in found["asked"].items())
    return found


def run(
    found: dict[str, Case],
    device: str,
    time_it: Timer,
    saved: Callable[[dict[str, Any]], Any] = lambda part: None,
    former: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Measure every case after the `former` rows; print, and hand on for saving, as it goes."""
    rows: dict[str, Any] = dict(former or {})
    for name, case in found.items():
        try:
            row = rows[name] = measure(Workload(case, device), time_it)
        except (ArithmeticError, RuntimeError) as error:
            rows[name] = {"failed": (str(error).strip().splitlines() or [type(error).__name__])[0]}
            print(f"masks, {name}: {rows[name]['failed']}", flush=True)
            continue
        if "us" in rows.get(case.beside.name, {}):
            row |= compared(rows, case)
        print(f"masks, {name}: {_line(row)}", flush=True)
        saved({"rows": rows})
    return {"rows": rows}


def failed(part: dict[str, Any]) -> list[str]:
    """Where ours failed or was wrong."""
    return [f"masks, {name}: {row['failed']}" for name, row in part["rows"].items() if "failed" in row]


def _line(row: dict[str, Any]) -> str:
    def pair(of: dict[str, float]) -> str:
        return " / ".join(f"{value:.2f}" for value in of.values())

    said = [f"{row['us']['forward']:.1f} / {row['us']['backward']:.1f} us, {row['pairs']:,} pairs"]
    if "ratio" in row:
        said.append(f"{pair(row['ratio'])} of causal")
    if "per_pair" in row:
        said.append(f"{pair(row['per_pair'])} a pair")
    if "asked" in row:
        said.append(f"asked {pair(row['asked'])}: {'met' if row['met'] else 'NOT MET'}")
    return "; ".join([*said, f"off by {max(row['errors'].values()):.1e} at most"])


def warm(found: dict[str, Case]) -> None:
    """Compile the kernels of all cases in as many processes as there are cores; Triton keeps them on disk."""
    workers = max(1, min(os.cpu_count() or 1, 16, len(found)))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(warm_case, case): name for name, case in found.items()}
        for future in as_completed(futures):
            if (error := future.exception()) is not None:
                print(f"warming {futures[future]}: {type(error).__name__}: {error}", flush=True)


def warm_case(case: Case) -> None:
    """Run a case once, forward and backward."""

    def run() -> None:
        w = Workload(case, "cuda")
        w.forward()
        w.both()

    try_once(run)


def time_on_gpu(call: Callable[[], Any]) -> dict[str, Any]:
    """By replays of a graph, behind a call that compiles and chooses what there is to choose."""
    call()
    torch.cuda.synchronize()
    return replay_us(call)


def time_on_cpu(call: Callable[[], Any], calls: int = 3) -> dict[str, Any]:
    """By the wall clock, the first call left out."""
    call()
    times = [seconds_of(call)[0] * 1e6 for _ in range(calls)]
    return {**spread(times), "median": statistics.median(times)}
