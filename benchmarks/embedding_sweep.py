"""Embedding bags over batch sizes, seeds and distributions of ids, beside FBGEMM's table-batched embeddings.

    python -m benchmarks.embedding_sweep                                # every case that the result file does not have
    python -m benchmarks.embedding_sweep --seconds 500                  # stop after so many; the next run goes on
    python -m benchmarks.embedding_sweep --shapes A B --again           # measured again
    python -m benchmarks.embedding_sweep --again --without fbgemm fbgemm_v2    # what these gave before stays
    python -m benchmarks.embedding_sweep --device cpu                   # to try it: batches of one sample, nothing is saved

RecFlex's five models and the shapes `"production"`, `"mlperf"` and `"mixed"` of `embedding_cases`, the last as many tables and
widths as Meta published; uniform ids and Zipf's with an exponent of 1.05. A case is a batch. Forward is timed for our operator
and both versions of FBGEMM, the backward pass with SGD and with Adagrad of a number a row for ours and for the first version.

Tables are float32, made once for a shape, and read and updated by all methods; their values are drawn anew before each update.
Ids are int32. Each method is checked in each case as in `benchmarks/embedding_bags.py`, against float64 of some bags and rows,
and timed as there: the GPU's time by replays of a graph, medians of bursts.

The summary says how many times as fast as FBGEMM ours is, forward against the better of its versions, by `all`, distribution,
shape and both; how the time of a lookup changes between neighbouring batch sizes; and what is asked and whether it holds.
`of_copy` is the share of the better version's time that its bytes would take at the speed of a copy, each read or written once.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, cast

import torch

from benchmarks import embedding_bags
from benchmarks.common import ROOT, environment, other_parts, save, seconds_of, spread
from benchmarks.embedding_bags import Timer, measure_lookup, reason, time_on_gpu
from benchmarks.embedding_cases import METHODS, MODELS, Batch, Lookup, Workload, batch_of, traffic
from jagged.ops.embedding_bag.optimizers import Kind

SHAPES = (*MODELS, "production", "mlperf", "mixed")
DISTRIBUTIONS = ("uniform", "zipf")
NEIGHBOURS = tuple(range(448, 641, 32))
SIZES = (1, 8, 64, 300, *NEIGHBOURS, 1024, 2560, 4096)
# Batches with other seeds than 0, too.
SEEDS = {size: range(5) for size in (64, 512, 4096)}
KINDS: dict[str, tuple[str, ...]] = {
    "forward": ("jagged", "fbgemm", "fbgemm_v2"),
    "sgd": ("jagged", "fbgemm"),
    "rowwise_adagrad": ("jagged", "fbgemm"),
}
UPDATES: tuple[Kind, ...] = ("sgd", "rowwise_adagrad")
# Backward, times as fast as FBGEMM, and the change of the time of a lookup from a batch size to the next.
MEDIAN_ASKED, LEAST_ASKED, CHANGE_ASKED = 1.5, 1.1, 0.10
# Forward, times as fast as the better version, where that stands below a share of copy speed; elsewhere as fast.
FORWARD_ASKED, COPY_SHARE = 1.2, 0.65
# Milliseconds of the backward pass with SGD, 512 samples with uniform ids.
ASKED_MS = {"A": 0.638, "B": 0.246, "C": 0.581, "D": 0.343, "E": 0.439}
# Seconds between savings of a run that goes on.
PAUSE = 10.0


class Case(NamedTuple):
    """A batch of a shape."""

    shape: str
    distribution: str
    size: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.shape}, {self.distribution}, {self.size:,} sample{'s' * (self.size > 1)}, seed {self.seed}"


def cases(
    shapes: Iterable[str] = SHAPES, distributions: Iterable[str] = DISTRIBUTIONS, sizes: Iterable[int] = SIZES
) -> list[Case]:
    """The cases of each shape one after the other."""
    return [
        Case(shape, distribution, size, seed)
        for shape, distribution, size in itertools.product(shapes, distributions, sizes)
        for seed in SEEDS.get(size, (0,))
    ]


class Tables:
    """Tables of a shape, and the implementations that read and update them, each made where it is first needed.

    Args:
        shape: a key of `embedding_cases.SHAPES`.
        most: samples of the largest batch.
        device: where.
    """

    def __init__(self, shape: str, most: int, device: str) -> None:
        self.workload = Workload(shape, [], device, shared=True)
        self.grad = self.workload.gradient(most)
        self._lookups: dict[tuple[str, str], Lookup] = {}

    def take(self, case: Case) -> Batch:
        """Make a case's batch the workload's only one."""
        w = self.workload
        batch = batch_of(case.shape, case.size, case.seed, device=str(w.device), zipf=case.distribution == "zipf")
        w.sizes, w.batches = [case.size], [batch]
        return batch

    def lookup(self, method: str, kind: Any) -> Lookup:
        """An implementation with the states of its first update."""
        if (method, kind) not in self._lookups:
            self._lookups[method, kind] = METHODS[method].make(self.workload, kind)
            if self.workload.device.type == "cuda":
                # Tables that FBGEMM made for itself, before a part of their memory is taken.
                torch.cuda.empty_cache()
        found: Any = self._lookups[method, kind]
        found.reset()
        return found  # type: ignore[no-any-return]


def measure(case: Case, tables: Tables, pairs: list[tuple[str, str]], time_it: Timer) -> dict[str, Any]:
    """Check and time pairs of a key of `KINDS` and a method.

    Returns:
        facts of the case, and microseconds or a reason by kind and method.
    """
    batch, w = tables.take(case), tables.workload
    bytes_of = {kind: traffic(w, kind) for kind in UPDATES}
    row: dict[str, Any] = {
        **case._asdict(),
        "lookups": len(batch.indices),
        "bytes": {"forward": bytes_of["sgd"]["forward"]["once"]} | {kind: bytes_of[kind]["backward"]["once"] for kind in UPDATES},
    }
    # Of forward passes, which all read the same tables.
    outputs: dict[str, Any] = {}
    w.draw()
    for kind, method in pairs:
        way = "forward" if kind == "forward" else "backward"
        optimizer: Kind = "sgd" if kind == "forward" else cast("Kind", kind)
        if way == "backward":
            # Hundreds of updates by the same gradient leave numbers beside which one update is too small to be checked.
            w.draw()
        made = METHODS[method]._replace(make=lambda _, kind, method=method: tables.lookup(method, kind))  # type: ignore[misc]
        of = embedding_bags.Case(case.shape, (case.size,), (method,), (way,), optimizer)
        figures: dict[str, Any] = {}
        try:
            measure_lookup(made, w, of, tables.grad[: case.size], outputs if way == "forward" else {}, time_it, figures)
            found = figures[way]
            times = {name: _rounded(found[name]) for name in ("median", "min", "max")}
            row.setdefault(kind, {})[method] = times | ({} if found.get("captured", True) else {"captured": False})
        except Exception as error:
            # Peers fail in any way, which must not end the run.
            row.setdefault(kind, {})[method] = {"failed": reason(error)}
    return row


def _rounded(number: float) -> float:
    """Four digits."""
    return float(f"{number:.4g}")


def missing(row: dict[str, Any], wanted: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The pairs of a kind and a method whose time a row does not have; what failed is tried again."""
    return [(kind, method) for kind, method in wanted if "median" not in row.get(kind, {}).get(method, {})]


def run(
    chosen: list[Case],
    wanted: list[tuple[str, str]],
    rows: dict[str, Any],
    device: str,
    time_it: Timer,
    *,
    again: bool = False,
    seconds: float = math.inf,
    keep: Callable[[], Any] = lambda: None,
) -> int:
    """Measure what `rows` do not have, or with `again` all that is wanted, and put it there.

    Args:
        chosen: cases.
        wanted: pairs of a key of `KINDS` and a method.
        rows: of former runs by the cases' names; changed.
        device: where.
        time_it: how.
        again: measure what there is, too.
        seconds: no case begins after so many.
        keep: is called after every case.

    Returns:
        how many cases are left.
    """
    begun = time.perf_counter()
    todo = [(case, pairs) for case in chosen if (pairs := wanted if again else missing(rows.get(case.name, {}), wanted))]
    left = len(todo)
    for shape, of_shape in itertools.groupby(todo, key=lambda of: of[0].shape):
        several = list(of_shape)
        tables = None
        for case, pairs in several:
            if time.perf_counter() - begun >= seconds:
                return left
            if tables is None:
                most = max(case.size for case, _ in several)
                took, tables = seconds_of(functools.partial(Tables, shape, most, device))
                print(f"{shape}: tables made in {took:.1f} s", flush=True)
            start = time.perf_counter()
            found, former = measure(case, tables, pairs, time_it), rows.get(case.name, {})
            # What other methods gave before stays.
            rows[case.name] = {**former, **found, **{kind: former.get(kind, {}) | found.get(kind, {}) for kind in KINDS}}
            left -= 1
            print(f"{case.name} ({time.perf_counter() - start:.1f} s): {_line(rows[case.name])}", flush=True)
            if device == "cuda":
                torch.cuda.empty_cache()
            keep()
        tables = None
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    return left


def _line(row: dict[str, Any]) -> str:
    return "; ".join(
        f"{kind} "
        + ", ".join(
            f"{who} {of['failed'] if 'failed' in of else format(of['median'] / 1e3, '.4g')}" for who, of in row[kind].items()
        )
        for kind in KINDS
        if row.get(kind)
    )


def median_of(row: dict[str, Any], kind: str, method: str) -> float | None:
    """Microseconds; None of what was not measured or failed."""
    found: float | None = row.get(kind, {}).get(method, {}).get("median")
    return found


def ratio_of(row: dict[str, Any], kind: str) -> float | None:
    """How many times as fast as FBGEMM ours is, forward as the better version; None where one of them has no time."""
    ours = median_of(row, kind, "jagged")
    peers = [of for method in KINDS[kind][1:] if (of := median_of(row, kind, method)) is not None]
    return min(peers) / ours if ours is not None and peers else None


def summary(rows: dict[str, Any], copy: float | None = None) -> dict[str, Any]:
    """Ratios, changes and times, with what is asked of them and whether it holds.

    Args:
        rows: by the cases' names.
        copy: GB/s of a copy. Without it every forward pass counts as one below the share of copy speed.
    """
    found: dict[str, Any] = {}
    for kind in KINDS:
        ratios = {name: ratio for name, row in rows.items() if (ratio := ratio_of(row, kind)) is not None}
        if not ratios:
            continue
        of = found[kind] = {"times_as_fast": _groups(rows, ratios)}
        if kind == "forward":
            of |= _forward(rows, ratios, copy)
        else:
            of |= _backward(ratios, _changes(rows, kind))
    if times := _at_512(rows):
        found["512 samples"] = times
    return found


def _groups(rows: dict[str, Any], values: dict[str, float]) -> dict[str, Any]:
    """Median, largest and smallest value, and the case of that, of all cases, of each distribution, each shape and both."""
    groups: dict[str, list[str]] = {}
    for name in values:
        shape, distribution = rows[name]["shape"], rows[name]["distribution"]
        for group in ("all", distribution, shape, f"{shape}, {distribution}"):
            groups.setdefault(group, []).append(name)
    found = {}
    for group in sorted(groups, key=[*("all", *DISTRIBUTIONS), *_shapes_and_distributions()].index):
        names = groups[group]
        numbers = spread([values[name] for name in names])
        found[group] = {
            "median": _rounded(numbers["median"]),
            "worst": _rounded(numbers["min"]),
            "worst_case": min(names, key=values.__getitem__),
            "best": _rounded(numbers["max"]),
            "cases": len(names),
        }
    return found


def _shapes_and_distributions() -> list[str]:
    return [group for shape in SHAPES for group in (shape, *(f"{shape}, {distribution}" for distribution in DISTRIBUTIONS))]


def _backward(ratios: dict[str, float], changes: dict[str, Any]) -> dict[str, Any]:
    """Changes of the time of a lookup, cases below what is asked, and whether it holds."""
    below = {name: _rounded(ratio) for name, ratio in ratios.items() if ratio < LEAST_ASKED}
    jumps = {group: of for group, of in changes.items() if of["change"] > CHANGE_ASKED}
    return {
        "changes": changes,
        "asked": {"median": MEDIAN_ASKED, "least": LEAST_ASKED, "change": CHANGE_ASKED},
        "below": below,
        "jumps": list(jumps),
        "met": statistics.median(ratios.values()) >= MEDIAN_ASKED and not below and not jumps,
    }


def _changes(rows: dict[str, Any], kind: str) -> dict[str, Any]:
    """The largest change of our time of a lookup between neighbouring sizes, up or down, by shape and distribution."""
    lookup_us: dict[tuple[str, str], dict[int, float]] = {}
    for row in rows.values():
        took = median_of(row, kind, "jagged")
        if took is not None and row["size"] in NEIGHBOURS and not row["seed"]:
            lookup_us.setdefault((row["shape"], row["distribution"]), {})[row["size"]] = took / row["lookups"]
    found = {}
    for (shape, distribution), of in lookup_us.items():
        pairs = [(a, b) for a, b in itertools.pairwise(NEIGHBOURS) if a in of and b in of]
        changes = {pair: max(of[pair[0]], of[pair[1]]) / min(of[pair[0]], of[pair[1]]) - 1 for pair in pairs}
        if changes:
            largest = max(changes, key=changes.__getitem__)
            found[f"{shape}, {distribution}"] = {"change": round(changes[largest], 4), "between": "{} and {}".format(*largest)}
    return found


def _forward(rows: dict[str, Any], ratios: dict[str, float], copy: float | None) -> dict[str, Any]:
    """How near to the speed of a copy the better version comes, cases below what is asked, and whether it holds."""
    shares, below = {}, {}
    for name, ratio in ratios.items():
        ours, asked = median_of(rows[name], "forward", "jagged"), FORWARD_ASKED
        assert ours is not None
        if copy:
            shares[name] = rows[name]["bytes"]["forward"] / copy / 1e3 / (ratio * ours)
            asked = FORWARD_ASKED if shares[name] < COPY_SHARE else 1.0
        if ratio < asked:
            below[name] = {"ratio": _rounded(ratio), "asked": asked} | ({"of_copy": round(shares[name], 3)} if copy else {})
    of_copy = {group: of["median"] for group, of in _groups(rows, shares).items()}
    asked_of = {"below_share": COPY_SHARE, "times": FORWARD_ASKED, "else": 1.0}
    return {"of_copy": of_copy, "asked": asked_of, "below": below, "met": not below}


def _at_512(rows: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds of our backward pass with SGD over seeds; uniform ids have to keep to what is asked."""
    found: dict[str, Any] = {}
    for shape, asked in ASKED_MS.items():
        for distribution in DISTRIBUTIONS:
            of = [
                took / 1e3
                for row in rows.values()
                if (row["shape"], row["distribution"], row["size"]) == (shape, distribution, 512)
                and (took := median_of(row, "sgd", "jagged")) is not None
            ]
            if of:
                numbers = {name: _rounded(number) for name, number in spread(of).items()}
                bound = {"asked": asked, "met": max(of) <= asked} if distribution == "uniform" else {}
                found[f"{shape}, {distribution}"] = {**numbers, "seeds": len(of), **bound}
    return found


def lines(found: dict[str, Any]) -> list[str]:
    """A summary in words."""
    said = []
    for kind in (kind for kind in KINDS if kind in found):
        of = found[kind]
        for group in ("all", *DISTRIBUTIONS, *SHAPES):
            if ratio := of["times_as_fast"].get(group):
                said.append(
                    f"{kind}, {group}: {ratio['median']:.2f} times as fast, worst {ratio['worst']:.2f}: {ratio['worst_case']}"
                )
        jumps = "".join(f"; {of['changes'][group]['change']:.0%} in {group}" for group in of.get("jumps", ()))
        said.append(f"{kind}: asked {of['asked']}, {'met' if of['met'] else 'not met'}, {len(of['below'])} cases below{jumps}")
    for name, of in found.get("512 samples", {}).items():
        asked = f", asked {of['asked']}, {'met' if of['met'] else 'not met'}" if "asked" in of else ""
        said.append(
            f"512 samples, {name}: {of['median']:.4g} ms, {of['min']:.4g} to {of['max']:.4g} of {of['seeds']} seeds{asked}"
        )
    return said


def time_on_cpu(prepare: Callable[[], Callable[[], Any]]) -> dict[str, Any]:
    """Microseconds of one call by the wall clock."""
    return spread([seconds_of(prepare())[0] * 1e6])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, help="all of them; on a CPU D")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--distributions", nargs="+", choices=DISTRIBUTIONS, default=DISTRIBUTIONS)
    parser.add_argument("--sizes", nargs="+", type=int, choices=SIZES, help="of batches: all of them; on a CPU 1")
    parser.add_argument("--without", nargs="+", default=[], choices=KINDS["forward"], help="methods to leave out")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no case begins after so many")
    parser.add_argument("--again", action="store_true", help="measure the cases that the result file has, too")
    options = parser.parse_args()
    device, on_cpu = options.device, options.device == "cpu"
    if not on_cpu and not torch.cuda.is_available():
        parser.error("found no NVIDIA GPU; --device cpu tries it without")
    chosen = cases(
        [shape for shape in SHAPES if shape in (options.shapes or (("D",) if on_cpu else SHAPES))],
        options.distributions,
        [size for size in SIZES if size in (options.sizes or ((1,) if on_cpu else SIZES))],
    )
    wanted = [
        (kind, method) for kind in KINDS if kind in options.kinds for method in KINDS[kind] if method not in options.without
    ]
    facts = environment(device)
    print(facts, flush=True)
    former = {} if on_cpu else other_parts("embedding_sweep", facts)
    rows: dict[str, Any] = former.get("cases", {})
    copy = facts.get("copy_gb_per_s")
    saved = time.perf_counter()

    def keep() -> None:
        nonlocal saved
        if not on_cpu and time.perf_counter() - saved >= PAUSE:
            write()
            saved = time.perf_counter()

    def write() -> None:
        ordered = {case.name: rows[case.name] for case in cases() if case.name in rows}
        path = save("embedding_sweep", {"environment": facts, "summary": summary(ordered, copy), "cases": ordered})
        print(f"{len(ordered)} cases saved in {path.relative_to(ROOT)}", flush=True)

    timer = time_on_cpu if on_cpu else time_on_gpu
    try:
        left = run(chosen, wanted, rows, device, timer, again=options.again, seconds=options.seconds, keep=keep)
    finally:
        if not on_cpu and rows:
            write()
    print("\n".join(lines(summary(rows, copy))))
    print(f"{left} of {len(chosen)} cases are left")
    chosen_names = {case.name for case in chosen}
    failed = [
        f"{name}, {kind}: {row[kind]['jagged']['failed']}"
        for name, row in rows.items()
        for kind in KINDS
        if name in chosen_names and "failed" in row.get(kind, {}).get("jagged", {})
    ]
    if failed:
        sys.exit("\n".join(["jagged failed:", *failed]))


if __name__ == "__main__":
    main()
