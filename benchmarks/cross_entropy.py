"""Cross-entropy over a catalogue, over all items and over sampled ones, and the best items of a row, beside their peers.

    python -m benchmarks.cross_entropy                                    # every part
    python -m benchmarks.cross_entropy --only full --cases 256000         # cases whose name has this; others in the file stay
    python -m benchmarks.cross_entropy --only full --without cut liger    # what these gave before stays
    python -m benchmarks.cross_entropy --quick                            # a few cases and no slow peers, in minutes
    python -m benchmarks.cross_entropy --device cpu                       # two threads, small sizes

`full`: three sizes, our ways of a backward pass beside cut-cross-entropy, Liger, `torch.compile` and plain PyTorch. `filter`: the
backward pass with small gradients left out, on logits as after training. `sampled`: negatives of each row, of blocks of rows and
of the batch, beside gathered rows. `scaling`: items, widths and negatives, one at a time, beside the time that a copy of the
gradients' bytes takes. `papers`: the loss of one step at the sizes of the CCE- paper's six data sets. `steps`: all of that step,
SASRec's body and the optimizer with it (`benchmarks/sasrec_steps.py`). `topk`: the best items.

All get the same tensors. Ours is checked against float64 on some rows and some items, a peer against ours in the Euclidean norm.
What is wrong, fails or does not fit gets the reason in place of a time. Useful work is 2 P D FLOPs forward, with P products of a
row and an item, and 4 P D backward: logits that a backward pass computes again do not count. `both` is a forward and a backward
pass in one; a `backward` is timed alone, on a graph that is kept. Inputs require gradients in a forward pass too, as in training:
Liger computes them there. Memory is that beyond hidden states, weights and targets.

A time is the median of bursts of about ten milliseconds. Three parts have beside it `sustained`, the mean under seconds of work
without a pause, at the clock that the power then leaves.

Catalogues, batch sizes, lengths and numbers of negatives of `papers` and `steps` are those of SASRec in the paper and its
repository (Zhelnin et al., Faster and Memory-Efficient Training of Sequential Recommendation Models for Large Catalogs, 2025;
On-Point-RND/MemoryEfficientSRS): those of CE with CE-'s negatives, and those of CCE-. Ids are synthetic and no row is padding.
"""

from __future__ import annotations

import argparse
import functools
import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.common import ROOT, environment, event_us, lasting, other_parts, replay_us, save, seconds_of, some_of, spread
from benchmarks.cross_entropy_cases import (
    DTYPES,
    METHODS,
    TOPK,
    Checked,
    Loss,
    Method,
    Size,
    Workload,
    our_loss,
    reference,
)
from benchmarks.sasrec_steps import StepWorkload, measure_step
from jagged.ops import linear_cross_entropy_strategy

MOST_BYTES = 110e9
# A peer may differ from ours by as much, in the Euclidean norm and relative to ours.
AGREEMENT = {"loss": 0.01, "hidden": 0.1, "weight": 0.1}
# From so many seconds a call, one that has been called before is timed without more calls that warm up.
SLOW = 0.3

Timer = Callable[[Callable[[], Callable[[], Any]]], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """What is measured of a size.

    Args:
        size: of the workload.
        methods: names; the first of a family is ours and what others of the family are compared with.
        ways: `"forward"`, `"both"` or `"backward"`; of a training step `"step"`.
        asked: milliseconds of these ways, and under `"memory"` the MB that both passes may take beyond their results.
        along: for a sweep: its name and the number at this point.
        length: of the sequences whose training step is measured; 0 for the loss alone.
    """

    size: Size
    methods: tuple[str, ...]
    ways: tuple[str, ...] = ("forward", "both")
    asked: dict[str, float] = field(default_factory=dict)
    along: tuple[str, int] | None = None
    length: int = 0


Part = dict[str, Case]

FULL = {
    (25600, 1_000_000, 256): {"forward": 28.0, "both": 120.0, "memory": 64.0},
    (8192, 100_000, 64): {"forward": 0.34, "both": 1.45, "memory": 16.0},
    (8192, 256_000, 2304): {"forward": 17.0, "both": 62.0, "memory": 350.0},
}
# cut-cross-entropy last: its locks may wait for ever, and what was measured before is saved.
FULL_METHODS = ("jagged", "jagged_fused", "jagged_chunked", "liger", "compiled", "eager", "cut")
FILTER_METHODS = ("jagged", "jagged_filtered", "cut", "cut_filtered")
# How many times as fast a backward pass is asked to be with a filter, at least, whatever the logits.
FILTER_ASKED = 1 / 1.03
SAMPLED = {
    "1,023 a row": (Size(25600, 1_000_000, 256, "fp16", 1023), {"forward": 4.0, "both": 14.0}),
    "511 a row": (Size(8192, 100_000, 64, "fp16", 511), {"forward": 0.18, "both": 0.6}),
    "8,192 of the batch": (Size(25600, 1_000_000, 256, "fp16", 8192, None), {"forward": 0.45, "both": 1.8}),
    "1,024 of 128 rows": (Size(25600, 1_000_000, 256, "fp16", 1024, 128), {}),
    "8,192 of a large table": (Size(25600, 10_000_000, 256, "fp16", 8192, None), {}),
}


class Dataset(NamedTuple):
    """Items, and batch, length and negatives of two settings: those of the paper's CE, with CE-'s negatives, and of its CCE-."""

    items: int
    small: tuple[int, int, int]
    large: tuple[int, int, int]


DATASETS = {
    "Megamarket": Dataset(1_660_000, (16, 128, 255), (5120, 320, 1023)),
    "Zvuk": Dataset(893_000, (64, 96, 256), (1024, 128, 2047)),
    "30Music": Dataset(909_000, (32, 128, 511), (256, 720, 4095)),
    "Gowalla": Dataset(309_000, (256, 64, 512), (1024, 320, 511)),
    "Beauty": Dataset(176_000, (1024, 32, 512), (1024, 32, 511)),
    "MovieLens-20M": Dataset(15_000, (64, 512, 1511), (256, 512, 511)),
}
# Parts with times under work that lasts, and the cases of each part that `--quick` measures, without these peers.
LASTING_PARTS = ("full", "filter", "sampled")
QUICK = {
    "full": ("8,192 x 100,000 x 64", "25,600 x 1,000,000 x 256"),
    "filter": ("8,192 x 100,000 x 64, popularity", "25,600 x 1,000,000 x 256, popularity"),
    "sampled": ("8,192 x 100,000 x 64: 511 a row", "25,600 x 1,000,000 x 256: 8,192 of the batch"),
    "topk": ("k = 100",),
}
QUICK_WITHOUT = ("liger", "eager", "cut", "cut_filtered", "jagged_fused", "jagged_chunked")
# With a gradient of the whole table, and of the items drawn alone.
SPARSE = ("jagged_sampled", "jagged_sparse")
# CE, CCE and their sampled kin.
PAPER_METHODS = ("jagged", "eager", "jagged_sampled", "gathered")


def parts() -> dict[str, Part]:
    """The cases of each part by name."""
    full: Part = {_title(size): Case(Size(*size), FULL_METHODS, asked=asked) for size, asked in FULL.items()}
    filtered: Part = {
        f"{_title(size)}, {logits}": Case(Size(*size, logits=logits), methods, ("backward",))
        for size, logits, methods in (
            ((25600, 1_000_000, 256), "popularity", FILTER_METHODS),
            ((8192, 100_000, 64), "popularity", FILTER_METHODS),
            *(((25600, 1_000_000, 256), logits, FILTER_METHODS[:2]) for logits in ("clustered", "normal")),
            *(((25600, 1_000_000, 64), logits, FILTER_METHODS[:2]) for logits in ("popularity", "clustered", "normal")),
            ((25600, 400_000, 128), "sasrec", FILTER_METHODS[:2]),
        )
    }
    sampled: Part = {
        f"{_title((size.rows, size.items, size.width))}: {name}": Case(size, (*SPARSE, "gathered"), asked=asked)
        for name, (size, asked) in SAMPLED.items()
    }
    scaling: Part = {}
    for items in (10_000, 100_000, 1_000_000, 10_000_000):
        along = "items", items
        scaling[f"all items, {items:,} items"] = Case(Size(8192, items, 128), ("jagged",), along=along)
        scaling[f"511 negatives, {items:,} items"] = Case(Size(8192, items, 128, negatives=511), SPARSE, along=along)
    for width in (32, 64, 128, 256, 512):
        along = "width", width
        scaling[f"all items, width {width}"] = Case(Size(8192, 1_000_000, width), ("jagged",), along=along)
        scaling[f"511 negatives, width {width}"] = Case(
            Size(8192, 1_000_000, width, negatives=511), ("jagged_sampled",), along=along
        )
    for count in (64, 256, 1024, 4096, 8192):
        scaling[f"{count:,} negatives"] = Case(
            Size(8192, 1_000_000, 128, negatives=count), ("jagged_sampled",), along=("negatives", count)
        )
    papers: Part = {
        f"{name}, {batch:,} x {length}, {negatives:,}": Case(
            Size(batch * length, of.items, 256, "fp16", negatives), PAPER_METHODS, ("both",)
        )
        for name, of in DATASETS.items()
        for batch, length, negatives in (of.small, of.large)
    }
    steps: Part = {
        f"{name}, {batch:,} x {length}, {negatives:,}": Case(
            Size(batch * length, of.items, 256, "bf16", negatives), PAPER_METHODS, ("step",), length=length
        )
        for name, of in DATASETS.items()
        for batch, length, negatives in (of.small, of.large)
    }
    topk: Part = {f"k = {k:,}": Case(Size(2048, 1_000_000, 256, k=k), tuple(TOPK), ("forward",)) for k in (10, 100, 1000)}
    return {
        "full": full,
        "filter": filtered,
        "sampled": sampled,
        "scaling": scaling,
        "papers": papers,
        "steps": steps,
        "topk": topk,
    }


def cpu_parts() -> dict[str, Part]:
    """Small sizes."""
    cases: Part = {
        "512 x 20,000 x 64": Case(Size(512, 20_000, 64, "fp32"), ("jagged", "eager")),
        "512 x 20,000 x 64: 255 a row": Case(Size(512, 20_000, 64, "fp32", 255), ("jagged_sampled", "gathered")),
        "512 x 20,000 x 64: k = 10": Case(Size(512, 20_000, 64, "fp32", k=10), tuple(TOPK), ("forward",)),
    }
    return {"cpu": cases}


def _title(size: tuple[int, ...]) -> str:
    return " x ".join(f"{number:,}" for number in size)


class Pass:
    """A forward and a backward pass of a loss. The gradients are those of the sum over rows, which no dtype is too coarse for."""

    def __init__(self, w: Workload, loss: Loss) -> None:
        self.inputs, self.loss, self.rows = (w.hidden, w.weight), loss, w.size.rows
        self.upstream: Tensor | None = None

    def forward(self) -> Tensor:
        """The mean loss."""
        return self.loss(*self.inputs)

    def _gradients(self, loss: Tensor, keep: bool) -> tuple[Tensor, ...]:
        if self.upstream is None:
            self.upstream = torch.full_like(loss.detach(), self.rows)
        return torch.autograd.grad(loss, self.inputs, self.upstream, retain_graph=keep)

    def both(self) -> tuple[Tensor, ...]:
        """The mean loss and the gradients."""
        loss = self.forward()
        return loss.detach(), *self._gradients(loss, False)

    def backward(self) -> Callable[[], tuple[Tensor, ...]]:
        """What computes the gradients, again and again."""
        loss = self.forward()
        return lambda: self._gradients(loss, True)

    def prepare(self, way: str) -> Callable[[], Callable[[], Any]]:
        """What returns the work that is timed."""
        return self.backward if way == "backward" else lambda: {"forward": self.forward, "both": self.both}[way]


def flops(size: Size, family: str) -> dict[str, int]:
    """Useful work."""
    products = size.products[family] * size.width
    return {"forward": 2 * products, "backward": 4 * products, "both": 6 * products}


def measure(case: Case, device: str, time_it: Timer, keep: Callable[[dict[str, Any]], Any] = lambda row: None) -> dict[str, Any]:
    """Check each method, and time those that are right; `keep` what there is after each."""
    if case.length:
        return measure_steps(case, device, time_it, keep)
    w = Workload(case.size, device)
    itemsize = DTYPES[case.size.dtype].itemsize
    row: dict[str, Any] = {
        "size": case.size.described,
        "formula": "2 P D FLOPs forward, 4 P D backward, P products of a row and an item",
        "products": {family: count for family, count in case.size.products.items() if count},
        # What both passes must write: no time and no memory can be less.
        "gradient_bytes": (case.size.rows + case.size.items) * case.size.width * itemsize,
        "asked": case.asked,
        **({"along": list(case.along)} if case.along else {}),
        **({"trained_to_a_loss_of": w.loss} if w.loss is not None else {}),
    }
    if "jagged" in case.methods and not case.size.k:
        size, dtype = case.size, DTYPES[case.size.dtype]
        row["strategy"] = linear_cross_entropy_strategy(size.rows, size.items, size.width, dtype, device=w.device)._asdict()
    expected: dict[str, tuple[Tensor, ...]] = {}
    known: dict[str, Any] = {}
    for name in case.methods:
        if case.size.k:
            row[name] = measure_topk(name, w, time_it)
        else:
            row[name] = measure_method(METHODS[name], w, expected, known, case.ways, time_it)
        release(w)
        keep(row)
    return row


def measure_steps(case: Case, device: str, time_it: Timer, keep: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """The same of a training step."""
    w = StepWorkload(case.size, case.length, device)
    row: dict[str, Any] = {"size": {**case.size.described, "length": case.length}, "asked": case.asked}
    expected: dict[str, float] = {}
    for name in case.methods:
        try:
            row[name] = measure_step(w, METHODS[name], expected, time_it)
        except Exception as error:
            row[name] = {"failed": _reason(error)}
        release(w)
        keep(row)
    return row


def measure_method(
    method: Method,
    w: Workload,
    expected: dict[str, tuple[Tensor, ...]],
    known: dict[str, Any],
    ways: tuple[str, ...],
    time_it: Timer,
) -> dict[str, Any]:
    """Times, rates and memory, or why not; the first of a family leaves its results in `expected`.

    `known` holds what float64 gave for the family. Peers fail in any way, which must not end the run.
    """
    family = method.family
    figures: dict[str, Any] = {}
    try:
        if family not in expected and (method.options is None or method.approximates):
            return {"failed": "ours failed: nothing to compare with"}
        passes = Pass(w, method.make(w))
        found = tuple(x.to_dense() if x.is_sparse else x for x in passes.both())
        if method.options is not None and not method.approximates:
            figures["errors"] = accuracy(w, method, found, known)
        if family in expected:
            figures["difference"] = difference(found, expected[family], method.approximates)
        else:
            expected[family] = found
        del found
        if w.device.type == "cuda":
            figures |= memory(w, passes)
        work = flops(w.size, family)
        for way in ways:
            microseconds = time_it(passes.prepare(way))
            figures[way] = {**microseconds, "tflop_per_s": work[way] / microseconds["median"] / 1e6}
        return figures
    except Exception as error:
        return {**figures, "failed": _reason(error)}


def accuracy(w: Workload, method: Method, found: tuple[Tensor, ...], known: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Largest errors of our results against float64, beside those of plain products in the tested dtype.

    Raises:
        ArithmeticError: an error of more than three times the latter and two roundings, or 1e-5 of the largest number.
    """
    assert method.options is not None
    with torch.no_grad():
        options = {**method.options, "reduction": "none", "return_lse": True}
        losses, lse = our_loss(w, method.family, w.hidden, w.weight, **options)
    if method.family not in known:
        known[method.family] = [reference(w, method.family, lse, dtype) for dtype in (torch.float64, w.hidden.dtype)]
    exact, plain = known[method.family]
    ours = Checked(losses[w.checked_rows], found[1][w.checked_rows], found[2][w.checked_items])
    mean = abs(float(found[0]) - float(losses.double().mean()))
    if not mean <= 1e-3 * float(losses.double().mean().abs()):
        raise ArithmeticError(f"wrong: the mean loss is off by {mean:.3g}")
    errors = {}
    for name in Checked._fields:
        right = getattr(exact, name).double()
        error, of_plain = (float((getattr(of, name).double() - right).abs().max()) for of in (ours, plain))
        # Of float32 numbers: an exponential of a large logit has an error of several roundings.
        rounding = max(1e-5, 2 * torch.finfo(w.hidden.dtype).eps)
        allowed = 3 * of_plain + rounding * float(right.abs().max())
        if not error <= allowed:
            raise ArithmeticError(f"wrong: {name} is off by {error:.3g}, allowed {allowed:.3g}")
        errors[name] = {"largest": error, f"plain_{w.size.dtype}": of_plain}
    return errors


def difference(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], approximates: bool) -> dict[str, float]:
    """Of loss and gradients, relative to the norm of what is expected.

    Raises:
        ArithmeticError: not a number, or more than `AGREEMENT` of what is not said to be approximate.
    """
    apart = {}
    for (name, allowed), x, right in zip(AGREEMENT.items(), found, expected, strict=True):
        apart[name] = of = relative(x, right)
        if not of <= (float("inf") if approximates and name != "loss" else allowed):
            raise ArithmeticError(f"wrong: {name} differs from ours by {of:.3g} of its norm, allowed {allowed}")
    return apart


def relative(found: Tensor, expected: Tensor) -> float:
    """Euclidean norm of the difference over that of what is expected, some rows at a time."""
    if found.shape != expected.shape:
        raise ArithmeticError(f"wrong: shape {list(found.shape)} in place of {list(expected.shape)}")
    apart, size = (torch.zeros((), dtype=torch.float64, device=expected.device) for _ in range(2))
    for x, right in zip(found.reshape(-1).split(2**27), expected.reshape(-1).split(2**27), strict=True):
        apart += (x.float() - right.float()).square().sum(dtype=torch.float64)
        size += right.float().square().sum(dtype=torch.float64)
    return float((apart / size).sqrt()) if float(size) else float(apart.sqrt())


def memory(w: Workload, passes: Pass) -> dict[str, int]:
    """Bytes of the inputs and of the results, and most bytes beyond the inputs in a forward pass and in both passes."""

    def peak(work: Callable[[], Any]) -> int:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        return torch.cuda.max_memory_allocated() - before

    inputs = [*passes.inputs, w.target]
    figures = {
        "input_bytes": sum(x.nbytes for x in inputs),
        "output_bytes": sum(_bytes_of(x) for x in passes.both()[1:]),
        "peak_bytes_forward": peak(passes.forward),
        "peak_bytes_both": peak(passes.both),
    }
    return figures | {"beyond_bytes_both": figures["peak_bytes_both"] - figures["output_bytes"]}


def _bytes_of(gradient: Tensor) -> int:
    if not gradient.is_sparse:
        return gradient.nbytes
    return gradient._indices().nbytes + gradient._values().nbytes


def measure_topk(name: str, w: Workload, time_it: Timer) -> dict[str, Any]:
    """Time of the best items, or why not."""
    figures: dict[str, Any] = {}
    try:
        work = functools.partial(TOPK[name], w)
        figures["errors"] = topk_accuracy(w, *work(), exact=name == "jagged")
        if w.device.type == "cuda":
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            work()
            figures["peak_bytes_forward"] = torch.cuda.max_memory_allocated() - before
        microseconds = time_it(lambda: work)
        rate = flops(w.size, "all")["forward"] / microseconds["median"] / 1e6
        return figures | {"forward": {**microseconds, "tflop_per_s": rate}}
    except Exception as error:
        return {**figures, "failed": _reason(error)}


def topk_accuracy(w: Workload, scores: Tensor, ids: Tensor, *, exact: bool) -> dict[str, float]:
    """How far scores are from those of their ids in float64, and ids below the k-th best score, at most and over some rows.

    Raises:
        ArithmeticError: an id twice, or an error of more than float32 sums have; two roundings where scores are not `exact`.
    """
    rows, k = w.checked_rows, w.size.k
    right = torch.cat(
        [(w.hidden[rows].double() @ of_items.double().t()) for of_items in w.weight.detach().split(2**18)], 1
    ).detach()
    scores, ids = scores[rows].double(), ids[rows]
    if bool((ids.sort(1).values.diff(dim=1) == 0).any()) or ids.shape != (len(rows), k):
        raise ArithmeticError(f"wrong: ids {list(ids.shape)} with some twice, or not {k} a row")
    of_ids = right.gather(1, ids)
    errors = {
        "scores": float((scores - of_ids).abs().max()),
        "below": float((right.topk(k).values[:, -1:] - of_ids).clamp(min=0).max()),
    }
    allowed = float(right.abs().max()) * (1e-4 if exact else max(1e-4, 2 * torch.finfo(w.hidden.dtype).eps))
    for name, error in errors.items():
        if not error <= allowed:
            raise ArithmeticError(f"wrong: {name} off by {error:.3g}, allowed {allowed:.3g}")
    return errors


def _reason(error: Exception) -> str:
    """The error in a line."""
    if isinstance(error, torch.OutOfMemoryError):
        return f"needs more than {MOST_BYTES / 1e9:.0f} GB"
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed"
    line = (str(error).strip().splitlines() or [""])[0]
    return line if isinstance(error, ArithmeticError) else f"{type(error).__name__}: {line[:160]}"


def release(w: Workload) -> None:
    """Give back what a method left on a GPU."""
    if w.device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def time_on_gpu(prepare: Callable[[], Callable[[], Any]], sustained: float = 0.0) -> dict[str, Any]:
    """Microseconds a call: up to a tenth of a second by replays of a CUDA graph, else by events; what is slow is called seldom.

    `sustained` is as in `replay_us`.
    """
    timed = prepare()
    first = seconds_of(timed)[0]
    if first > SLOW:
        times = [first] if first > 3 * SLOW else [seconds_of(timed)[0] for _ in range(3)]
        return {**spread([seconds * 1e6 for seconds in times]), "captured": False}
    # The first calls of all load kernels and start threads.
    rough = min(seconds_of(timed)[0] for _ in range(3))
    if rough < 0.1:
        # A graph that lives keeps its leaves on the stream it was made on, and no other could be captured.
        del timed
        return replay_us(prepare=prepare, sustained=sustained)
    figures = {**spread(event_us(timed, 3, 1)), "captured": False}
    return figures | lasting(timed, 1, sustained) if sustained else figures


def time_on_cpu(prepare: Callable[[], Callable[[], Any]], seconds: float) -> dict[str, Any]:
    """Microseconds a call by the wall clock, the first left out."""
    timed = prepare()
    timed()
    times: list[float] = []
    while len(times) < 3 or sum(times) < seconds * 1e6:
        times.append(seconds_of(timed)[0] * 1e6)
    return spread(times)


def summary(title: str, rows: dict[str, Any]) -> dict[str, Any]:
    """How many times as fast a backward pass is with a filter."""
    ratios: dict[str, Any] = {}
    if title == "filter":
        for name, row in rows.items():
            times = {who: row.get(who, {}).get("backward", {}).get("median") for who in FILTER_METHODS}
            pairs = {who: (times[who], times[f"{who}_filtered"]) for who in ("jagged", "cut")}
            ratios[name] = {who: exact / filtered for who, (exact, filtered) in pairs.items() if exact and filtered}
    return ratios


def run(
    title: str,
    part: Part,
    device: str,
    time_it: Timer,
    former: dict[str, Any] | None = None,
    saved: Callable[[dict[str, Any]], Any] = lambda result: None,
) -> dict[str, Any]:
    """Measure every case of a part after the `former` rows; print, and hand on for saving, as it goes."""
    # Rows of cases that are no more go.
    cases = {**part, **parts().get(title, {}), **cpu_parts().get(title, {})}
    rows: dict[str, Any] = {name: row for name, row in (former or {}).items() if name in cases}
    result: dict[str, Any] = {"rows": rows, "summary": summary(title, rows)}

    def keep(row: dict[str, Any]) -> None:
        # What other methods gave before stays.
        others = {who: of for who, of in rows.get(name, {}).items() if who in {**METHODS, **TOPK} and who not in case.methods}
        rows[name] = {**row, **others}
        result["summary"] = summary(title, rows)
        saved(result)

    for name, case in part.items():
        begun = time.perf_counter()
        row = measure(case, device, time_it, keep)
        print(f"{title}, {name} ({time.perf_counter() - begun:.1f} s): {_line(row)}", flush=True)
    # In the order of the parts, whichever cases were measured last.
    order = [name for name in {**parts(), **cpu_parts()}.get(title, {}) if name in rows]
    result["rows"] = {**{name: rows[name] for name in order}, **rows}
    for name, ratios in result["summary"].items():
        said = ", ".join(f"{who} {ratio:.2f} times as fast" for who, ratio in ratios.items())
        print(f"{title}, {name}: {said}; asked {FILTER_ASKED}", flush=True)
    return result


def _line(row: dict[str, Any]) -> str:
    shown = []
    for name, of in ((name, row[name]) for name in {**METHODS, **TOPK} if name in row):
        words = [
            f"{way} {of[way]['median'] / 1e3:.4g} ms {of[way]['tflop_per_s']:.3g} TF"
            for way in ("forward", "both", "backward")
            if way in of
        ]
        if "beyond_bytes_both" in of:
            words.append(f"{of['beyond_bytes_both'] / 1e6:.0f} MB")
        if "step" in of:
            words.append(f"step {of['step']['median'] / 1e3:.4g} ms, {of.get('peak_bytes_step', 0) / 1e9:.3g} GB")
        if "difference" in of:
            words.append("apart " + "/".join(f"{apart:.1g}" for apart in of["difference"].values()))
        if "failed" in of:
            words.append(of["failed"])
        shown.append(f"{name} {' / '.join(words)}")
    if row["asked"]:
        shown.append("asked " + " / ".join(f"{way} {bound:g}" for way, bound in row["asked"].items()))
    return "; ".join(shown)


def ours_failed(result: dict[str, Any]) -> list[str]:
    """Where one of our own operators failed or was wrong."""
    return [
        f"{title}, {name}, {who}: {of['failed']}"
        for title, part in result.items()
        for name, row in part.get("rows", {}).items()
        for who, of in row.items()
        if who.startswith("jagged") and "failed" in of
    ]


def save_part(result: dict[str, Any], title: str, part: dict[str, Any]) -> Path:
    """Write the result file with what a part has so far, so that a run that is cut off leaves what it measured."""
    return save("cross_entropy", {**result, title: part})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", choices=parts(), help="parts to measure; cuda alone")
    parser.add_argument(
        "--cases", nargs="+", help="cases whose name has one of these, commas aside; others that the result file has stay"
    )
    parser.add_argument("--without", nargs="+", default=[], choices=[*METHODS, "plain"], help="methods to leave out")
    parser.add_argument("--quick", action="store_true", help="a few cases, without slow peers")
    parser.add_argument(
        "--sustained", type=float, default=2.0, help=f"seconds of work without a pause, in {', '.join(LASTING_PARTS)}; 0 for none"
    )
    parser.add_argument("--seconds", type=float, default=0.5, help="a direction of a method on a CPU")
    options = parser.parse_args()
    device = options.device
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("found no NVIDIA GPU; --device cpu measures the PyTorch implementation")
    found = parts() if device == "cuda" else cpu_parts()
    if options.only:
        if device == "cpu":
            parser.error("--only: got --device cpu, which has one part; leave it out")
        found = {title: part for title, part in found.items() if title in options.only}
    if options.quick and device == "cuda":
        options.without = [*options.without, *QUICK_WITHOUT]
        found = {title: {name: found[title][name] for name in names} for title, names in QUICK.items() if title in found}
    if options.cases and not (found := some_of(found, options.cases)):
        parser.error(f"--cases: no case has {' or '.join(map(repr, options.cases))} in its name")
    for part in found.values():
        for name, case in part.items():
            part[name] = replace(case, methods=tuple(method for method in case.methods if method not in options.without))
    if device == "cpu":
        torch.set_num_threads(2)
    facts = environment(device) | {"cut_cross_entropy": _installed("cut-cross-entropy"), "liger": _installed("liger-kernel")}
    print(facts, flush=True)
    if device == "cuda":
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, MOST_BYTES / total))
    others = other_parts("cross_entropy", facts) if options.only or options.cases or options.without else {}
    result = {"environment": facts, **others}
    begun = time.perf_counter()
    for title, part in found.items():
        former = others.get(title, {}).get("rows", {}) if options.cases or options.without else {}
        time_it: Timer = functools.partial(time_on_gpu, sustained=options.sustained if title in LASTING_PARTS else 0.0)
        if device == "cpu":
            time_it = functools.partial(time_on_cpu, seconds=options.seconds)
        result[title] = run(title, part, device, time_it, former, functools.partial(save_part, result, title))
        path = save("cross_entropy", result)
        print(f"--- {title}: {time.perf_counter() - begun:.0f} s since the start, saved in {path.relative_to(ROOT)}", flush=True)
    if failed := ours_failed({title: part for title, part in result.items() if title in found}):
        sys.exit("\n".join(["jagged failed:", *failed]))


def _installed(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
