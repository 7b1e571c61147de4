"""GPU time of our operators in another version of jagged and in this one, in one run: rows of the benchmarks' own sizes.

    python -m benchmarks.before_after --tree build/before                         # every family
    python -m benchmarks.before_after --tree build/before --only attention        # this one
    python -m benchmarks.before_after --tree build/before --quick                 # few rows of each

Each version is measured in a process of its own (benchmarks/trees.py), in turns: other version, this one, and the same again. A
row's time is the least of its rounds. Rows that took longer by more than a limit are measured so again, with twice the rounds.
Results are not checked here: the benchmarks do. A row that only one version can do has no ratio.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import math
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks import attention, cross_entropy, embedding_bags, jagged_ops
from benchmarks.attention_cases import ours as our_attention
from benchmarks.common import ROOT, environment, other_parts, save, some_of
from benchmarks.cross_entropy_cases import METHODS, our_topk
from benchmarks.embedding_cases import Ours
from benchmarks.jagged_cases import CASES
from benchmarks.trees import hand_over, measured, tree_of

# What is timed, by way: prepares the work that is timed.
Ways = dict[str, Callable[[], Callable[[], Any]]]
Rows = Iterator[tuple[str, Callable[[str], Ways]]]

ALLOWED = 1.03
ROUNDS = 2
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


def rows_of(family: str, quick: bool, names: list[str] | None) -> dict[str, Callable[[str], Ways]]:
    """The rows of a family, or those of them that are named."""
    return {name: make for name, make in FAMILIES[family][0](quick) if names is None or name in names}


def measure(wanted: dict[str, list[str] | None], quick: bool, device: str = "cuda") -> dict[str, Any]:
    """Microseconds by family, row and way, or why not."""
    found: dict[str, Any] = {}
    for family, names in wanted.items():
        time_it = FAMILIES[family][1]
        of_family = found.setdefault(family, {})
        for name, make in rows_of(family, quick, names).items():
            try:
                of_family[name] = {way: time_it(prepare)["median"] for way, prepare in make(device).items()}
            except Exception as error:
                # Another version may lack what this one can do; which rows failed is told at the end.
                of_family[name] = {"failed": f"{type(error).__name__}: {error}"[:300]}
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
    return found


def warm(wanted: dict[str, list[str] | None], quick: bool) -> None:
    """Compile the rows' kernels in several processes; Triton keeps them on disk."""
    tasks = [(family, quick, name) for family, names in wanted.items() for name in rows_of(family, quick, names)]
    with ProcessPoolExecutor(min(WARMING, os.cpu_count() or 1), multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_warm_row, tasks))


def _warm_row(task: tuple[str, bool, str]) -> None:
    family, quick, name = task
    try:
        for prepare in rows_of(family, quick, [name])[name]("cuda").values():
            prepare()()
        torch.cuda.synchronize()
    except Exception:  # It is named when it is measured.
        return
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def compare(rounds: list[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    """By family and row: the least time of each version's rounds and their ratio, by way; and reasons of failures."""
    found: dict[str, Any] = {}
    for family in rounds[0][0]:
        for name in rounds[0][0][family]:
            both = [[of[version][family][name] for of in rounds] for version in (0, 1)]
            row = found.setdefault(family, {}).setdefault(name, {})
            for version, of in zip(("before", "after"), both, strict=True):
                if reasons := [one["failed"] for one in of if "failed" in one]:
                    row.setdefault("failed", {})[version] = reasons[0]
            for way in [] if "failed" in row else both[0][0]:
                before, after = (min(one[way] for one in of) for of in both)
                row[way] = {"before": before, "after": after, "ratio": after / before}
    return found


def longer(found: dict[str, Any]) -> dict[str, list[str]]:
    """Rows that took longer than allowed, by family."""
    slow = {
        family: [name for name, row in rows.items() if any(of["ratio"] > ALLOWED for way, of in row.items() if way != "failed")]
        for family, rows in found.items()
    }
    return {family: names for family, names in slow.items() if names}


def told(found: dict[str, Any]) -> Iterator[str]:
    """Lines for people: of each family the mean ratio, and what took longer or failed."""
    for family, rows in found.items():
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


def in_turns(tree: Path, wanted: dict[str, list[str] | None], quick: bool, rounds: int, compiles: bool) -> list[tuple[Any, Any]]:
    """What `measure` gives in processes of both versions, in turns; the first compile what there is, if kernels are new."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "rows.json").write_text(json.dumps(wanted))
        words = ["--rows", str(Path(folder) / "rows.json"), *(["--quick"] if quick else [])]
        found = []
        for place in range(rounds):
            # What the first round compiled is on disk.
            every = [*words, "--warm"] if place == 0 and compiles else words
            found.append(tuple(measured("benchmarks.before_after", version, every) for version in (tree, None)))
        return [(before, after) for before, after in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", help="a folder with jagged, ops and modules of another version")
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=list(FAMILIES), help="families to measure")
    parser.add_argument("--cases", nargs="+", help="rows whose name has one of these, commas aside")
    parser.add_argument("--quick", action="store_true", help="few rows of each family")
    parser.add_argument("--json", help=argparse.SUPPRESS)
    parser.add_argument("--rows", help=argparse.SUPPRESS)
    parser.add_argument("--warm", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("found no NVIDIA GPU")
    if options.json:
        wanted = json.loads(Path(options.rows).read_text())
        if options.warm:
            warm(wanted, options.quick)
        hand_over(options.json, measure(wanted, options.quick))
        return
    try:
        tree = tree_of(options.tree or "")
    except ValueError as error:
        parser.error(f"--tree: {error}")
    facts = environment()
    result = {"environment": facts, **other_parts("before_after", facts)}
    failed = []
    for family in options.only:
        begun = time.perf_counter()
        names = {family: dict.fromkeys(rows_of(family, options.quick, None))}
        chosen = {of: list(rows) for of, rows in (some_of(names, options.cases) if options.cases else names).items()}
        if not chosen:
            continue
        rounds = in_turns(tree, chosen, options.quick, ROUNDS, True)
        found = compare(rounds)
        if slow := longer(found):
            again = compare(in_turns(tree, slow, options.quick, 2 * ROUNDS, False))
            for of, rows in again.items():
                found[of] |= rows
        result[family] = {**result.get(family, {}), **found[family]}
        path = save("before_after", result)
        print(f"--- {family}: {time.perf_counter() - begun:.0f} s, saved in {path.relative_to(ROOT)}", flush=True)
        print("\n".join(told(found)), flush=True)
        failed += [f"{of}: {name}" for of, rows in longer(found).items() for name in rows]
        failed += [f"{family}: {name}" for name, row in found[family].items() if "after" in row.get("failed", {})]
    if failed:
        sys.exit("\n".join([f"longer than {ALLOWED} times or failed:", *failed]))


if __name__ == "__main__":
    main()
