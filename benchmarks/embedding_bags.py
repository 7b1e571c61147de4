"""Embedding bags of many tables beside FBGEMM's table-batched embeddings, and the collection of them beside TorchRec's.

    python -m benchmarks.embedding_bags                               # every part
    python -m benchmarks.embedding_bags --only models --cases A B     # cases whose name has one of these; others in the file stay
    python -m benchmarks.embedding_bags --without fbgemm_v2           # what these gave before stays
    python -m benchmarks.embedding_bags --quick                       # a few cases, in minutes
    python -m benchmarks.embedding_bags --device cpu                  # two threads

`models`: RecFlex's five models, 512 samples, forward and backward with SGD. `sizes`: other batches. `queries`: 128 batches of the
sizes that the paper's queries have. `mlperf`: 26 tables of width 64 and up to ten million rows. `mixed`: 66 tables of widths 4 to
128. `many`: 10,000 features. `optimizers`: Adagrad with a number a row, and Adam. `host`: after what time a call of the module
returns. `model`: module and perceptron, inference and training (`benchmarks/embedding_models.py`). `tuning`: forward by a
plan that is tuned, by one whose classes are tuned each alone, and without a plan, where the lengths of each batch choose
(`benchmarks/embedding_plans.py`).

All get the same float32 tables, int32 ids and gradients, and FBGEMM is spared its check of ids. Each is checked against float64
on some bags and, after one update, on some rows of twenty features; outputs of peers against all of ours, too. What is wrong or
fails gets the reason in place of a time. Times are the GPU's, by replays of a graph; a backward is timed alone, on a graph that
is kept, and updates the tables in every replay. They are medians of bursts of about ten milliseconds; three parts have beside
them `sustained`, the mean under seconds of work without a pause, at the clock that the power then leaves. FBGEMM's second
version has the backward pass of the first, and its versions are spared the batches of `queries` that have no samples.

`of_limit` is the share of a time that its bytes would take at the speed of a copy, rows that are read, output, ids and offsets
counted once; `gathered_gb_per_s` the rate of the rows of all lookups, most of which come from the L2 cache.
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

from benchmarks.common import ROOT, environment, other_parts, replay_us, save, seconds_of, some_of, spread
from benchmarks.cross_entropy import relative
from benchmarks.embedding_cases import (
    METHODS,
    MODELS,
    Lookup,
    Method,
    Workload,
    check_output,
    check_rows,
    query_sizes,
    rows_before,
    traffic,
)
from benchmarks.embedding_models import COLLECTIONS, measure_model
from benchmarks.embedding_plans import PLANS
from jagged.ops.embedding_bag.optimizers import Kind

# A peer's output may differ from ours by as much, in the Euclidean norm and relative to ours.
AGREEMENT = 1e-5

Timer = Callable[[Callable[[], Callable[[], Any]]], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """What is measured of a shape.

    Args:
        shape: a key of `embedding_cases.SHAPES`.
        sizes: of the batches; several are looked up one after the other.
        methods: names; the first is ours.
        ways: of methods `"forward"`, `"backward"` or `"both"`; of modules those of `embedding_models`.
        kind: of the optimizer; None for gradients.
        asked: milliseconds of these ways.
        group: of cases whose ratios are averaged.
        plans: whether the methods are plans of our operator.
    """

    shape: str
    sizes: tuple[int, ...]
    methods: tuple[str, ...]
    ways: tuple[str, ...] = ("forward", "backward")
    kind: Kind | None = "sgd"
    asked: dict[str, float] = field(default_factory=dict)
    group: str = ""
    plans: bool = False


Part = dict[str, Case]

KERNELS = ("jagged", "fbgemm", "fbgemm_v2")
MODULES = tuple(COLLECTIONS)
# Parts with times under work that lasts, and the cases of each part that `--quick` measures.
LASTING_PARTS = ("models", "mlperf", "mixed")
QUICK = {"models": ("A", "D"), "mixed": ("512 samples",), "optimizers": ("A, row-wise Adagrad",), "host": ("A, 8 samples",)}
# Of all that results have.
NAMES = {**METHODS, **COLLECTIONS, **PLANS}
MODEL_WAYS = ("forward", "forward_gpu", "step", "step_gpu")
ASKED = {
    "A": {"forward": 0.26, "backward": 0.95},
    "B": {"forward": 0.10, "backward": 0.36},
    "C": {"forward": 0.21, "backward": 0.80},
    "D": {"forward": 0.10, "backward": 0.42},
    "E": {"forward": 0.20, "backward": 0.44},
}
HOST_ASKED = {"host": 0.150}


class Ratio(NamedTuple):
    """How many times as fast as a peer ours is asked to be.

    Args:
        by: `"mean"` of each group of cases, or every `"case"`.
        way: of the part's ways.
        who: a peer, or `"better"`, the faster of FBGEMM's two versions.
        times: at least.
    """

    by: str
    way: str
    who: str
    times: float


_LEAST = Ratio("case", "forward", "better", 1.0)
_KERNELS_ASKED = (Ratio("mean", "forward", "fbgemm", 3.2), Ratio("mean", "forward", "fbgemm_checked", 3.2), _LEAST)
RATIOS: dict[str, tuple[Ratio, ...]] = {
    **dict.fromkeys(("models", "sizes", "queries"), _KERNELS_ASKED),
    **dict.fromkeys(("mlperf", "mixed", "many"), (_LEAST,)),
    "model": tuple(Ratio("mean", way, "torchrec_fused", 1.85 if way.startswith("forward") else 1.5) for way in MODEL_WAYS),
    # Against no plan nothing is asked: a plan that is none would be as fast, and pass by the noise.
    "tuning": (Ratio("case", "forward", "alone", 1.0),),
    "cpu": tuple(Ratio("case", way, "per_table", 1 / 1.2) for way in ("forward", "both")),
}


def parts() -> dict[str, Part]:
    """The cases of each part by name."""
    kernels = (*KERNELS, "fbgemm_checked")
    models: Part = {name: Case(name, (512,), kernels, asked=ASKED[name], group="512 samples") for name in MODELS}
    sizes: Part = {
        f"{name}, {_samples(size)}": Case(name, (size,), KERNELS, ("forward",), group=_samples(size))
        for size in (1, 8, 64, 2560)
        for name in MODELS
    }
    queries = tuple(query_sizes())
    return {
        "models": models,
        "sizes": sizes,
        "queries": {name: Case(name, queries, KERNELS, ("forward",), group="queries") for name in MODELS},
        "mlperf": {f"{size:,} samples": Case("mlperf", (size,), KERNELS) for size in (512, 8192)},
        "mixed": {f"{size:,} samples": Case("mixed", (size,), KERNELS) for size in (512, 2048)},
        "many": {"10,000 features": Case("D x 10", (512,), KERNELS)},
        "optimizers": {
            f"A, {words}": Case("A", (512,), ("jagged", "fbgemm"), ("backward",), kind)
            for kind, words in (("rowwise_adagrad", "row-wise Adagrad"), ("adam", "Adam"))
        },
        "host": {"A, 8 samples": Case("A", (8,), MODULES, ("host",), asked=HOST_ASKED)},
        # A thousand small launches and sorts take seconds to measure: TorchRec's plain collection once.
        "model": {
            name: Case(name, (512,), MODULES if name == "A" else MODULES[:2], MODEL_WAYS, group="models") for name in MODELS
        },
        "tuning": {name: Case(name, (512,), tuple(PLANS), ("forward",), group="models", plans=True) for name in MODELS},
    }


def _samples(size: int) -> str:
    return f"{size:,} sample{'s' * (size > 1)}"


def cpu_parts() -> dict[str, Part]:
    """The models on a CPU, with dense gradients."""
    return {
        "cpu": {f"{name}, 32 samples": Case(name, (32,), ("jagged", "per_table"), ("forward", "both"), None) for name in MODELS}
    }


def measure(
    case: Case,
    device: str,
    time_it: Timer,
    copy: float | None = None,
    keep: Callable[[dict[str, Any]], Any] = lambda row: None,
    settle: Callable[[int], Any] = lambda methods: None,
) -> dict[str, Any]:
    """Check each method, and time those that are right; `keep` what there is after each.

    Args:
        case: what is measured.
        device: where.
        time_it: how.
        copy: GB/s of a copy, for the limit.
        keep: what is done with a row that is not whole yet.
        settle: is called with the number of methods after the last one; until then `time_it` may leave its figures empty.
    """
    w = Workload(case.shape, list(case.sizes), device)
    row: dict[str, Any] = {
        "shape": case.shape,
        "features": w.layout.num_features,
        "width": w.layout.width,
        "table_bytes": w.weights.nbytes,
        "samples": case.sizes[0] if len(case.sizes) == 1 else list(case.sizes),
        "ids": sum(len(batch.indices) for batch in w.batches),
        "optimizer": case.kind,
        "asked": case.asked,
        "group": case.group,
    }
    is_model = bool({"host", "step"} & {*case.ways})
    if not is_model:
        row["bytes"] = traffic(w, case.kind)
        if copy:
            row["limit_us"] = {way: of["once"] / copy / 1e3 for way, of in row["bytes"].items() if way in case.ways}
    expected: dict[str, Tensor] = {}
    # The same for all methods, and made once.
    grad = w.gradient(case.sizes[0]) if len(case.sizes) == 1 else None
    for name in case.methods:
        figures: dict[str, Any] = {}
        try:
            if is_model:
                figures |= measure_model(w, COLLECTIONS[name], case.ways, expected, time_it)
            elif grad is None:
                figures |= measure_queries(METHODS[name], w, case.kind, time_it)
            else:
                measure_lookup((PLANS if case.plans else METHODS)[name], w, case, grad, expected, time_it, figures)
        except Exception as error:
            # Peers fail in any way, which must not end the run; what was right before stays.
            figures["failed"] = reason(error)
        row[name] = figures
        _add_rates(row, name)
        release(w)
        keep(row)
    settle(len(case.methods))
    for name in case.methods:
        _add_rates(row, name)
    return row


def measure_lookup(
    method: Method,
    w: Workload,
    case: Case,
    grad: Tensor,
    expected: dict[str, Tensor],
    time_it: Timer,
    figures: dict[str, Any],
) -> None:
    """Put errors and times of a method into `figures`; the first method leaves its output in `expected`.

    Raises:
        ArithmeticError: an output or an update that is wrong.
    """
    batch = w.batches[0]
    lookup = method.make(w, case.kind)
    figures |= getattr(lookup, "facts", {})
    # Of a first call, which compiles.
    figures["first_seconds"], output = seconds_of(lambda: lookup.forward(batch))
    figures["errors"] = {"output": check_output(w, output.detach())}
    right = expected.setdefault("output", output.detach())
    figures["difference"] = apart = relative(output.detach(), right)
    if not apart <= AGREEMENT:
        raise ArithmeticError(f"wrong: differs from ours by {apart:.3g} of its norm, allowed {AGREEMENT}")
    ways = [way for way in case.ways if way in method.ways]
    # Before the tables are changed.
    if "forward" in ways:
        figures["forward"] = time_it(lambda: lambda: lookup.forward(batch))
    if set(ways) - {"forward"}:
        before = rows_before(w)
        lookup.backward(output, grad)
        figures["errors"]["rows"] = check_rows(w, grad, case.kind, lookup.table, before)
    del output
    for way in ways:
        if way != "forward":
            figures[way] = time_it(_backward(lookup, w, grad) if way == "backward" else _both(lookup, w, grad))


def _backward(lookup: Lookup, w: Workload, grad: Tensor) -> Callable[[], Callable[[], Any]]:
    def prepare() -> Callable[[], Any]:
        output = lookup.forward(w.batches[0])
        return lambda: lookup.backward(output, grad)

    return prepare


def _both(lookup: Lookup, w: Workload, grad: Tensor) -> Callable[[], Callable[[], Any]]:
    return lambda: lambda: lookup.backward(lookup.forward(w.batches[0]), grad)


def measure_queries(method: Method, w: Workload, kind: Kind | None, time_it: Timer) -> dict[str, Any]:
    """Errors in the smallest and the largest batch and in one between, and the time of all batches.

    Raises:
        ArithmeticError: an output that is wrong.
    """
    lookup = method.make(w, kind)
    order = sorted(range(len(w.sizes)), key=lambda place: w.sizes[place])
    order = order if method.empty else [place for place in order if w.sizes[place]]
    checked = (order[0], order[len(order) // 2], order[-1])
    errors = [check_output(w, lookup.forward(w.batches[place]).detach(), place) for place in checked]
    batches = [w.batches[place] for place in sorted(order)]

    def forward() -> None:
        for batch in batches:
            lookup.forward(batch)

    return {"errors": {"output": max(errors)}, "batches": len(batches), "forward": time_it(lambda: forward)}


def _add_rates(row: dict[str, Any], name: str) -> None:
    """How a method's times stand to the limit and to the bytes it gathers."""
    of = row[name]
    for way, moved in row.get("bytes", {}).items():
        if median := of.get(way, {}).get("median"):
            of[way]["gathered_gb_per_s"] = moved["gathered"] / median / 1e3
            if "limit_us" in row:
                of[way]["of_limit"] = row["limit_us"][way] / median


def reason(error: Exception) -> str:
    """The error in a line."""
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
    """Microseconds a call by replays of a CUDA graph; `sustained` is as in `replay_us`."""
    return replay_us(prepare=prepare, sustained=sustained)


class InTurns:
    """Wall-clock times on a CPU, of what is to be compared in turns: the speed of a virtual machine drifts.

    Args:
        seconds: of each, at least three calls.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._waiting: list[tuple[Callable[[], Any], dict[str, Any]]] = []

    def later(self, prepare: Callable[[], Callable[[], Any]]) -> dict[str, Any]:
        """Return a dictionary that `take` will put microseconds a call into."""
        self._waiting.append((prepare(), {}))
        return self._waiting[-1][1]

    def take(self, methods: int) -> None:
        """Time what is waiting of so many methods, one after the other with the same ways: each way's calls in turns."""
        waiting, self._waiting = self._waiting, []
        ways = max(1, len(waiting) // methods)
        for way in range(ways):
            compared = waiting[way::ways]
            # First calls are left out.
            for timed, _ in compared:
                timed()
            times: list[list[float]] = [[] for _ in compared]
            while any(len(of) < 3 or sum(of) < self.seconds * 1e6 for of in times):
                for (timed, _), of in zip(compared, times, strict=True):
                    start = time.perf_counter()
                    # What it returns is freed at once, which is part of a call: of a thousand tables it takes milliseconds.
                    timed()
                    of.append((time.perf_counter() - start) * 1e6)
            for (_, figures), of in zip(compared, times, strict=True):
                figures |= spread(of)


def summary(rows: dict[str, Any]) -> dict[str, Any]:
    """How many times as fast as each peer ours is, by case and way, and on the mean of each group of cases.

    `better` is the faster of FBGEMM's two versions.
    """
    by_case: dict[str, dict[str, dict[str, float]]] = {}
    groups: dict[str, dict[str, dict[str, list[float]]]] = {}
    for name, row in rows.items():
        for way, ours in row.get("jagged", {}).items():
            if not (isinstance(ours, dict) and "median" in ours):
                continue
            times = {who: of[way]["median"] for who, of in row.items() if who != "jagged" and who in NAMES and way in of}
            if versions := [times[who] for who in ("fbgemm", "fbgemm_v2") if who in times]:
                times["better"] = min(versions)
            ratios = {who: took / ours["median"] for who, took in times.items()}
            by_case.setdefault(name, {})[way] = ratios
            if row["group"]:
                for who, ratio in ratios.items():
                    groups.setdefault(row["group"], {}).setdefault(way, {}).setdefault(who, []).append(ratio)
    means = {
        group: {way: {who: sum(of) / len(of) for who, of in by.items()} for way, by in ways.items()}
        for group, ways in groups.items()
    }
    return {"cases": by_case, "means": means}


def run(
    title: str,
    part: Part,
    device: str,
    time_it: Timer,
    copy: float | None = None,
    former: dict[str, Any] | None = None,
    saved: Callable[[dict[str, Any]], Any] = lambda result: None,
    settle: Callable[[int], Any] = lambda methods: None,
) -> dict[str, Any]:
    """Measure every case of a part after the `former` rows; print, and hand on for saving, as it goes."""
    rows: dict[str, Any] = dict(former or {})
    asked = [ratio._asdict() for ratio in RATIOS.get(title, ())]
    result: dict[str, Any] = {"rows": rows, "summary": summary(rows), "asked_ratios": asked}

    def keep(row: dict[str, Any]) -> None:
        # What other methods gave before stays.
        others = {
            who: of for who, of in rows.get(name, {}).items() if who in NAMES and who not in case.methods and who not in row
        }
        rows[name] = {**row, **others}
        result["summary"] = summary(rows)
        saved(result)

    for name, case in part.items():
        begun = time.perf_counter()
        row = measure(case, device, time_it, copy, keep, settle)
        keep(row)
        print(f"{title}, {name} ({time.perf_counter() - begun:.1f} s): {_line(row)}", flush=True)
    # In the order of the parts, whichever cases were measured last.
    order = [name for name in {**parts(), **cpu_parts()}.get(title, {}) if name in rows]
    result["rows"] = {**{name: rows[name] for name in order}, **rows}
    for group, ways in result["summary"]["means"].items():
        for way, ratios in ways.items():
            said = ", ".join(f"{who} {ratio:.2f}" for who, ratio in ratios.items())
            print(f"{title}, {group}, {way}: times as fast on the mean: {said}", flush=True)
    return result


def _line(row: dict[str, Any]) -> str:
    shown = []
    for name, of in ((name, row[name]) for name in NAMES if name in row):
        words = []
        for way, figures in of.items():
            if isinstance(figures, dict) and "median" in figures:
                said = f"{way} {figures['median'] / 1e3:.4g} ms"
                if "of_limit" in figures:
                    said += f" ({figures['of_limit']:.0%} of the limit, {figures['gathered_gb_per_s'] / 1e3:.3g} TB/s gathered)"
                words.append(said + " eager" * (figures.get("captured") is False))
        if "failed" in of:
            words.append(of["failed"])
        shown.append(f"{name} {' / '.join(words)}")
    if row["asked"]:
        shown.append("asked " + " / ".join(f"{way} {bound:g}" for way, bound in row["asked"].items()))
    return "; ".join(shown)


def ours_failed(result: dict[str, Any]) -> list[str]:
    """Where our operator or module failed or was wrong."""
    return [
        f"{title}, {name}: {row['jagged']['failed']}"
        for title, part in result.items()
        for name, row in part.get("rows", {}).items()
        if "failed" in row.get("jagged", {})
    ]


def save_part(result: dict[str, Any], title: str, part: dict[str, Any]) -> Path:
    """Write the result file with what a part has so far, so that a run that is cut off leaves what it measured."""
    return save("embedding_bags", {**result, title: part})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", choices=parts(), help="parts to measure; cuda alone")
    parser.add_argument("--cases", nargs="+", help="cases whose name has one of these; others that the result file has stay")
    parser.add_argument("--without", nargs="+", default=[], choices=list(NAMES), help="methods to leave out")
    parser.add_argument("--quick", action="store_true", help="a few cases")
    parser.add_argument(
        "--sustained", type=float, default=2.0, help=f"seconds of work without a pause, in {', '.join(LASTING_PARTS)}; 0 for none"
    )
    parser.add_argument("--seconds", type=float, default=2.5, help="a way of a method on a CPU")
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
        found = {title: {name: found[title][name] for name in names} for title, names in QUICK.items() if title in found}
    if options.cases and not (found := some_of(found, options.cases)):
        parser.error(f"--cases: no case has {' or '.join(map(repr, options.cases))} in its name")
    for title, part in found.items():
        left = {name: tuple(method for method in case.methods if method not in options.without) for name, case in part.items()}
        found[title] = {name: replace(case, methods=left[name]) for name, case in part.items() if left[name]}
    turns = InTurns(options.seconds)
    if device == "cpu":
        torch.set_num_threads(2)
    facts = environment(device)
    print(facts, flush=True)
    if device == "cuda":
        torch.cuda.empty_cache()
    some = options.cases or options.without or options.quick
    others = other_parts("embedding_bags", facts) if options.only or some else {}
    result = {"environment": facts, **others}
    begun = time.perf_counter()
    for title, part in found.items():
        former = others.get(title, {}).get("rows", {}) if some else {}
        time_it: Timer = functools.partial(time_on_gpu, sustained=options.sustained if title in LASTING_PARTS else 0.0)
        if device == "cpu":
            time_it = turns.later
        saved = functools.partial(save_part, result, title)
        result[title] = run(title, part, device, time_it, facts.get("copy_gb_per_s"), former, saved, turns.take)
        path = save("embedding_bags", result)
        print(f"--- {title}: {time.perf_counter() - begun:.0f} s since the start, saved in {path.relative_to(ROOT)}", flush=True)
    if failed := ours_failed({title: part for title, part in result.items() if title in found}):
        sys.exit("\n".join(["jagged failed:", *failed]))


if __name__ == "__main__":
    main()
