"""GPU time of our operators in another version of jagged and in this one, in one run: rows of the benchmarks' own sizes.

    python -m benchmarks.before_after --tree build/before                         # every family
    python -m benchmarks.before_after --tree build/before --only attention        # this one
    python -m benchmarks.before_after --tree build/before --quick                 # few rows of each

Each version is a process (benchmarks/trees.py) that makes a row's tensors and times it when it is asked to: other version, this
one, and then this one first. A row's time is the median of its rounds. The first round is not counted: on a GPU that has rested
what runs first is up to 10 % faster than anything after it, so that of two copies of one version the first won, by the least of
their rounds. A row that took longer by more than a limit is measured in more rounds. Results are not checked here: the benchmarks
do. A row that only one version can do has no ratio.
"""

from __future__ import annotations

import argparse
import functools
import gc
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from benchmarks import attention, cross_entropy, embedding_bags, jagged_ops
from benchmarks.attention_cases import ours as our_attention
from benchmarks.common import ROOT, environment, other_parts, save, some_of
from benchmarks.cross_entropy_cases import METHODS, our_topk
from benchmarks.embedding_cases import Ours
from benchmarks.jagged_cases import CASES
from benchmarks.trees import Version, serve, tree_of

# What is timed, by way: prepares the work that is timed.
Ways = dict[str, Callable[[], Callable[[], Any]]]
Rows = Iterator[tuple[str, Callable[[str], Ways]]]

ALLOWED = 1.03
# The second and third are for rows that still took longer; all rounds of a row count but one before them.
ROUNDS = (2, 4, 12)
# Parts of each benchmark. Steps and whole models are no operators, and the CCE- paper's losses take minutes.
ATTENTION_PARTS = ("table", "skew", "options", "biases", "paper")
LOSS_PARTS = ("full", "filter", "sampled", "scaling", "topk")
BAG_PARTS = ("models", "sizes", "mlperf", "mixed", "many", "optimizers")
WARMING = 16


def jagged_rows(quick: bool) -> Rows:
    """The jagged operators at all sizes but the host's."""
    for title, part in jagged_ops.parts(["bf16"] if quick else ["bf16", "fp32"]).items():
        if title == "host" or (quick and title != "table"):
            continue
        for key, size in part.sizes.items():
            for name in part.cases:
                yield f"{title} {key}: {name}", functools.partial(_jagged, size, name)


def _jagged(size: jagged_ops.Size, name: str, device: str) -> Ways:
    case = CASES[name](size.workload(device))

    def backward() -> Callable[[], Any]:
        results = case.ours(*case.inputs)
        outputs = [results] if isinstance(results, torch.Tensor) else list(results)
        upstream = [torch.ones_like(x) for x in outputs]
        return lambda: torch.autograd.grad(outputs, case.inputs, upstream, retain_graph=True)

    return {"forward": lambda: torch.no_grad()(functools.partial(case.ours, *case.inputs)), "backward": backward}


def attention_rows(quick: bool) -> Rows:
    """Attention and HSTU attention."""
    for title, part in _chosen(attention.parts(), attention.QUICK if quick else None, ATTENTION_PARTS).items():
        for name, (size, _) in part.items():
            yield f"{title}: {name}", functools.partial(_attention, size)


def _attention(size: Any, device: str) -> Ways:
    made = our_attention(attention.Workload(size, device))
    return {"forward": lambda: made.forward, "backward": made.backward}


def loss_rows(quick: bool) -> Rows:
    """Cross-entropy over all and over sampled items, and the best items."""
    for title, part in _chosen(cross_entropy.parts(), cross_entropy.QUICK if quick else None, LOSS_PARTS).items():
        for name, case in part.items():
            methods = [who for who in case.methods if who.startswith("jagged")]
            for who in methods:
                yield f"{title}: {name}" + f", {who}" * (len(methods) > 1), functools.partial(_loss, case, who)


def _loss(case: cross_entropy.Case, who: str, device: str) -> Ways:
    w = cross_entropy.Workload(case.size, device)
    if case.size.k:
        return {"forward": lambda: functools.partial(our_topk, w)}
    passes = cross_entropy.Pass(w, METHODS[who].make(w))
    return {way: passes.prepare(way) for way in case.ways}


def bag_rows(quick: bool) -> Rows:
    """Embedding bags."""
    for title, part in _chosen(embedding_bags.parts(), embedding_bags.QUICK if quick else None, BAG_PARTS).items():
        for name, case in part.items():
            yield f"{title}: {name}", functools.partial(_bags, case)


def _bags(case: embedding_bags.Case, device: str) -> Ways:
    w = embedding_bags.Workload(case.shape, list(case.sizes), device)
    lookup, batch, grad = Ours(w, case.kind), w.batches[0], w.gradient(case.sizes[0])

    def backward() -> Callable[[], Any]:
        output = lookup.forward(batch)
        return lambda: lookup.backward(output, grad)

    ways: Ways = {"forward": lambda: lambda: lookup.forward(batch), "backward": backward}
    return {way: ways[way] for way in case.ways}


def _chosen(parts: dict[str, Any], quick: dict[str, tuple[str, ...]] | None, titles: tuple[str, ...]) -> dict[str, Any]:
    found = {title: parts[title] for title in titles}
    if quick is None:
        return found
    return {title: {name: found[title][name] for name in names} for title, names in quick.items() if title in found}


FAMILIES: dict[str, tuple[Callable[[bool], Rows], Callable[..., dict[str, Any]]]] = {
    "jagged_ops": (jagged_rows, embedding_bags.time_on_gpu),
    "attention": (attention_rows, attention.time_on_gpu),
    "cross_entropy": (loss_rows, cross_entropy.time_on_gpu),
    "embedding_bags": (bag_rows, embedding_bags.time_on_gpu),
}


def rows_of(family: str, quick: bool, names: list[str] | None = None) -> dict[str, Callable[[str], Ways]]:
    """The rows of a family, or those of them that are named."""
    return {name: make for name, make in FAMILIES[family][0](quick) if names is None or name in names}


class Rounds:
    """One version's part, in a process of its own: the rows that it can make, and the one that it has made."""

    def __init__(self, quick: bool, device: str = "cuda") -> None:
        self.device = device
        self.rows = {family: rows_of(family, quick) for family in FAMILIES}
        self.family = ""
        self.ways: Ways = {}

    def answer(self, request: list[Any]) -> Any:
        """What a method returns that is named with its arguments; in place of what fails `{"failed": why}`."""
        what, *given = request
        try:
            return {"warm": self.warm, "make": self.make, "time": self.time, "drop": self.drop}[what](*given)
        except Exception as error:
            # Another version may lack what this one can do; which rows failed is told at the end.
            return {"failed": f"{type(error).__name__}: {error}"[:300]}

    def warm(self, family: str, names: list[str]) -> None:
        """Compile rows' kernels in several processes; Triton keeps them on disk."""
        with ProcessPoolExecutor(min(WARMING, os.cpu_count() or 1), multiprocessing.get_context("spawn")) as pool:
            list(pool.map(_warm_row, [self.rows[family][name] for name in names]))

    def make(self, family: str, name: str) -> None:
        """Make a row's tensors."""
        self.family, self.ways = family, self.rows[family][name](self.device)

    def time(self) -> dict[str, float]:
        """Time the row that was made: microseconds by way."""
        time_it = FAMILIES[self.family][1]
        return {way: time_it(prepare)["median"] for way, prepare in self.ways.items()}

    def drop(self) -> None:
        """Free the row's tensors."""
        self.ways = {}
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()


def _warm_row(make: Callable[[str], Ways]) -> None:
    try:
        for prepare in make("cuda").values():
            prepare()()
        torch.cuda.synchronize()
    except Exception:  # It is named when it is measured.
        return
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def compared(versions: Sequence[Version], family: str, name: str) -> dict[str, Any]:
    """Of each way the median of the other version, `before`, of this one, `after`, and their ratio; or why there is none."""
    try:
        if failed := _failures([version.ask(["make", family, name]) for version in versions]):
            return failed
        if failed := _failures([version.ask(["time"]) for version in versions]):
            return failed
        times: list[list[Any]] = []
        for more in ROUNDS:
            for _ in range(more):
                # What ran just before leaves a GPU warm.
                order = (0, 1) if len(times) % 2 == 0 else (1, 0)
                answers = {which: versions[which].ask(["time"]) for which in order}
                times.append([answers[0], answers[1]])
                if failed := _failures(times[-1]):
                    return failed
            row = {}
            for way in times[0][0]:
                before, after = (statistics.median(of[which][way] for of in times) for which in (0, 1))
                row[way] = {"before": before, "after": after, "ratio": after / before}
            if not is_longer(row):
                break
        return row
    finally:
        for version in versions:
            version.ask(["drop"])


def _failures(answers: Sequence[Any]) -> dict[str, Any]:
    found = {which: of["failed"] for which, of in zip(("before", "after"), answers, strict=True) if of and "failed" in of}
    return {"failed": found} if found else {}


def is_longer(row: dict[str, Any]) -> bool:
    """Whether a row took longer than allowed."""
    return any(of["ratio"] > ALLOWED for way, of in row.items() if way != "failed")


def told(family: str, rows: dict[str, Any]) -> Iterator[str]:
    """Lines for people: the mean ratio of a family, and what took longer or failed."""
    ratios = {(name, way): of for name, row in rows.items() for way, of in row.items() if way != "failed"}
    if ratios:
        mean = math.exp(sum(math.log(of["ratio"]) for of in ratios.values()) / len(ratios))
        yield f"{family}: {len(ratios)} times, {mean:.3f} of those before on the geometric mean"
    for (name, way), of in sorted(ratios.items(), key=lambda item: -item[1]["ratio"]):
        if of["ratio"] > ALLOWED:
            yield f"  longer: {name}, {way}: {of['before']:.1f} to {of['after']:.1f} us, {of['ratio']:.3f}"
    for name, row in rows.items():
        for version, reason in row.get("failed", {}).items():
            yield f"  failed {version}: {name}: {reason}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", help="a folder with jagged, ops and modules of another version")
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=list(FAMILIES), help="families to measure")
    parser.add_argument("--cases", nargs="+", help="rows whose name has one of these, commas aside")
    parser.add_argument("--quick", action="store_true", help="few rows of each family")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("found no NVIDIA GPU")
    if options.serve:
        serve(Rounds(options.quick).answer)
        return
    try:
        tree = tree_of(options.tree or "")
    except ValueError as error:
        parser.error(f"--tree: {error}")
    facts = environment()
    result = {"environment": facts, **other_parts("before_after", facts)}
    slow = []
    words = ["--quick"] if options.quick else []
    with Version("benchmarks.before_after", tree, words) as other, Version("benchmarks.before_after", None, words) as this:
        for family in options.only:
            begun = time.perf_counter()
            every = {family: dict.fromkeys(rows_of(family, options.quick))}
            names = list((some_of(every, options.cases) if options.cases else every).get(family, []))
            if not names:
                continue
            for version in (other, this):
                if failed := version.ask(["warm", family, names]):
                    print(f"kernels were not compiled before: {failed['failed']}", flush=True)
            print(f"--- {family}: {len(names)} rows, compiled in {time.perf_counter() - begun:.0f} s", flush=True)
            found: dict[str, Any] = {}
            for name in names:
                found[name] = compared((other, this), family, name)
                # Kept from row to row: a run may be cut off.
                result[family] = {**result.get(family, {}), **found}
                path = save("before_after", result)
            print("\n".join(told(family, found)), flush=True)
            print(f"--- {family}: {time.perf_counter() - begun:.0f} s, saved in {path.relative_to(ROOT)}", flush=True)
            slow += [f"{family}: {name}" for name, row in found.items() if is_longer(row) or "after" in row.get("failed", {})]
    if slow:
        sys.exit("\n".join([f"longer than {ALLOWED} times or failed:", *slow]))


if __name__ == "__main__":
    main()
