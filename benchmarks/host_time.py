"""The host's part of eager calls: of each operator on a small batch beside FBGEMM-GPU's, and of calls of a common size.

    python -m benchmarks.host_time                         # both parts
    python -m benchmarks.host_time --tree build/before     # another version of jagged beside this one (benchmarks/trees.py)
    python -m benchmarks.host_time --device cpu            # two threads: whole calls, as nothing runs beside them

`operators`: 64 samples of mean length 20, bfloat16, forward, forward with backward, and both on one thread: under
`torch.autograd.set_multithreading_enabled(False)` the thread of the calls runs backward too. The host's time of a call is that of
a thousand calls in a row, for which the device is not waited, divided; an operator's implementations come in turns. Kernels that
would take longer than their calls are told by `gpu_us`. `sll` are the Triton kernels of FBGEMM-GPU, `fbgemm` its C++ operators.
What is wrong or fails gets the reason.

`eager`: the mean of a hundred calls in a row up to the end of the last, beside the replay of a CUDA graph of the same call and
beside one call that is waited for; ways and implementations come in turns, and the round with the median of the means is kept.
`ratio` is the mean over the replay.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from benchmarks import attention_cases, cross_entropy_cases
from benchmarks.common import ROOT, eager_us, environment, host_us_in_turns, replay_us, save, some_of
from benchmarks.cross_entropy import Pass
from benchmarks.jagged_cases import CASES
from benchmarks.jagged_ops import Size, _run, check, register_peers
from benchmarks.trees import hand_over, measured, tree_of

SMALL = Size(64, 40, 64)
SMALL_ATTENTION = attention_cases.Size(64, 40, 4, 64)
EAGER_ATTENTION = {"256 x 1024 x 4 x 64": attention_cases.Size(256, 1024, 4, 64)}
EAGER_LOSSES = {
    "8,192 x 100,000 x 64, 511 negatives a row": ("jagged_sampled", cross_entropy_cases.Size(8192, 100_000, 64, "fp16", 511)),
    "8,192 x 100,000 x 64": ("jagged", cross_entropy_cases.Size(8192, 100_000, 64)),
    "1,024 x 10,000 x 64": ("jagged", cross_entropy_cases.Size(1024, 10_000, 64)),
}
ATTENTION_PEERS = {"operators": ("sll", "fa2"), "eager": ("fa2", "fa4")}
WAYS = ("forward", "forward_backward", "one_thread")
ROUNDS = 2
# Of the operators' calls in turns.
TURNS = 5
# In a row: on a CPU, and on a GPU; a tenth of them of the common sizes.
CALLS = (20, 1_000)

Calls = dict[str, Callable[[], Any]]


class Row(NamedTuple):
    """What one implementation of a case is called for, by way; or why it is not."""

    case: str
    who: str
    calls: Calls
    failed: str | None = None


def operators(device: str, peers: bool) -> Iterator[Row]:
    """Each operator on the small batch, and who else has it."""
    workload = SMALL.workload(device)
    for name, build in CASES.items():
        case = build(workload)
        if not case.peers:
            continue
        found, reference, right = check(case)
        for who in ("jagged", *(case.peers if peers else ())):
            if who not in right:
                yield Row(name, who, {}, found[who]["failed"])
                continue
            calls: Calls = {"forward": torch.no_grad()(functools.partial(right[who], *case.inputs))}
            if "backward" not in found[who]:
                calls |= _on_threads(functools.partial(_run, right[who], case.inputs, reference.upstream))
            yield Row(name, who, calls)
    yield from attention("jagged_attention", SMALL_ATTENTION, device, ATTENTION_PEERS["operators"] if peers else ())


def eager(device: str, peers: bool) -> Iterator[Row]:
    """Calls of a common size."""
    for name, size in EAGER_ATTENTION.items():
        yield from attention(f"attention, {name}", size, device, ATTENTION_PEERS["eager"] if peers else ())
    for name, (method, of) in EAGER_LOSSES.items():
        w = cross_entropy_cases.Workload(of, device)
        passes = Pass(w, cross_entropy_cases.METHODS[method].make(w))
        yield Row(f"cross-entropy, {name}", "jagged", {"forward": passes.forward, **_on_threads(passes.both)})


def attention(name: str, size: attention_cases.Size, device: str, peers: tuple[str, ...]) -> Iterator[Row]:
    """Ours and some peers; peers fail in any way, which must not end the run."""
    w = attention_cases.Workload(size, device)
    for who in ("jagged", *peers):
        try:
            made = attention_cases.ours(w) if who == "jagged" else attention_cases.PEERS[who](w)
            made.backward()()
        except Exception as error:
            yield Row(name, who, {}, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200])
            continue
        yield Row(name, who, {"forward": made.forward, **_on_threads(functools.partial(_both, made))})


def _on_threads(both: Callable[[], Any]) -> Calls:
    """The ways of a call with backward."""

    def alone() -> Any:
        with torch.autograd.set_multithreading_enabled(False):
            return both()

    return {"forward_backward": both, "one_thread": alone}


def _both(made: attention_cases.Implementation) -> Any:
    return torch.autograd.grad(made.call(*made.inputs), made.inputs, made.upstream)


def figures_of(title: str, calls: dict[tuple[str, str], Callable[[], Any]], on_gpu: bool) -> dict[tuple[str, str], Any]:
    """Times of a case's calls, as the part has them, by implementation and way; in place of a call that fails why."""
    found: dict[tuple[str, str], Any] = {}
    for key, call in calls.items():
        try:
            gpu = replay_us(call) if on_gpu else None
            call()
            found[key] = {"gpu_us": gpu["median"]} if gpu else {}
            if title == "eager":
                found[key] = {"graph": gpu["median"]} if gpu and gpu["captured"] else {}
        except Exception as error:
            if key[0] == "jagged":
                raise
            found[key] = {"failed": f"{type(error).__name__}: {error}"[:200]}
    right = {key: call for key, call in calls.items() if "failed" not in found[key]}
    if title == "operators":
        for key, figures in zip(right, host_us_in_turns([*right.values()], CALLS[on_gpu], TURNS), strict=True):
            found[key] = figures | found[key]
        return found
    rounds = [{key: eager_us(call, CALLS[on_gpu] // 10) for key, call in right.items()} for _ in range(TURNS)]
    for key in right:
        means = sorted((of[key] for of in rounds), key=lambda of: of["mean"])
        kept = means[len(means) // 2]
        found[key] = kept | found[key] | ({"ratio": kept["mean"] / found[key]["graph"]} if "graph" in found[key] else {})
    return found


PARTS: dict[str, Callable[[str, bool], Iterator[Row]]] = {"operators": operators, "eager": eager}


def measure(titles: list[str], device: str, peers: bool, words: list[str]) -> dict[str, Any]:
    """Rows of parts by case, implementation and way; with `words`, of cases whose name has one of them."""
    result: dict[str, Any] = {}
    for title in titles:
        rows = result.setdefault(title, {})
        for case, of_case in itertools.groupby(PARTS[title](device, peers), key=lambda row: row.case):
            made = list(of_case)
            if words and not some_of({title: {case: None}}, words):
                continue
            of = rows[case] = {row.who: {"failed": row.failed} if row.failed else {} for row in made}
            calls = {(row.who, way): call for row in made for way, call in row.calls.items()}
            for (who, way), figures in figures_of(title, calls, device == "cuda").items():
                of[who][way] = figures
            gc.collect()
    return result


def with_former(result: dict[str, Any], rounds: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """Put `before` and `after` into each row that another version has too: the least of the rounds, of each way."""
    for title, rows in result.items():
        for case, row in rows.items():
            for place, name in enumerate(("before", "after")):
                found = [of[place][title][case]["jagged"] for of in rounds if case in of[place].get(title, {})]
                least = {
                    way: min(of[way].get("median", of[way].get("mean")) for of in found)
                    for way in WAYS
                    if found and all(way in of for of in found)
                }
                if least:
                    row[name] = least


def time_of(figures: dict[str, Any]) -> float | None:
    """What is compared of a way."""
    return figures.get("median", figures.get("mean"))


def ratios(row: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Our times as multiples of each peer's and of another version's."""
    ours = {way: time_of(row.get("jagged", {}).get(way, {})) for way in WAYS}
    found: dict[str, dict[str, float]] = {}
    for who, of in row.items():
        if who in ("jagged", "after"):
            continue
        its, mine = (of, row["after"]) if who == "before" else ({way: time_of(of[way]) for way in WAYS if way in of}, ours)
        found[who] = {way: mine[way] / its[way] for way in WAYS if mine.get(way) and its.get(way)}
    return found


def line(case: str, row: dict[str, Any]) -> str:
    """A case in words."""
    shown = []
    for who, of in row.items():
        if who == "ratios":
            continue
        words = []
        for way in (way for way in WAYS if way in of):
            figures = {"median": of[way]} if isinstance(of[way], float) else of[way]
            time = time_of(figures)
            said = f"{time:.1f}" if time is not None else figures["failed"]
            said += f" (GPU {figures['gpu_us']:.1f})" if "gpu_us" in figures else ""
            if "graph" in figures:
                said += f" (graph {figures['graph']:.1f}, {figures['ratio']:.2f} times; single {figures['synchronised']:.1f})"
            words.append(said)
        shown.append(f"{who} {' / '.join(words) if words else of.get('failed', '')}")
    for who, of in row.get("ratios", {}).items():
        shown.append(f"times {who}'s: {' / '.join(f'{ratio:.2f}' for ratio in of.values())}")
    return f"{case}: {'; '.join(shown)}"


def summary(rows: dict[str, Any]) -> dict[str, Any]:
    """Of all cases: our median and largest ratio to each peer, by way."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows.values():
        for who, of in row["ratios"].items():
            for way, ratio in of.items():
                found.setdefault(who, {}).setdefault(way, []).append(ratio)
    return {
        who: {way: {"median": statistics.median(of), "largest": max(of)} for way, of in ways.items()}
        for who, ways in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to measure")
    parser.add_argument("--cases", nargs="+", default=[], help="cases whose name has one of these")
    parser.add_argument("--tree", help="a folder with another version of jagged, to be measured beside this one")
    parser.add_argument("--json", help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = options.device
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("found no NVIDIA GPU; --device cpu measures whole calls there")
    if device == "cpu":
        torch.set_num_threads(2)
    try:
        tree = tree_of(options.tree) if options.tree else None
    except ValueError as error:
        parser.error(f"--tree: {error}")
    # What is loaded by now stays; else each collection looks through all of it.
    gc.freeze()
    if options.json:
        hand_over(options.json, measure(options.only, device, False, options.cases))
        return
    if not register_peers():
        print("fbgemm_gpu is not installed: no peers of the operators")
    facts = environment(device)
    found = measure(options.only, device, True, options.cases)
    if tree is not None:
        words = ["--device", device, "--only", *options.only, *(["--cases", *options.cases] if options.cases else [])]
        versions = (tree, None)
        rounds = [tuple(measured("benchmarks.host_time", of, words) for of in versions) for _ in range(ROUNDS)]
        with_former(found, [(before, after) for before, after in rounds])
    result: dict[str, Any] = {"environment": facts}
    for title, rows in found.items():
        for case, row in rows.items():
            row["ratios"] = ratios(row)
            print(f"{title}, {line(case, row)} us", flush=True)
        result[title] = {"rows": rows, "summary": summary(rows)}
        for who, ways in result[title]["summary"].items():
            said = ", ".join(f"{way} {of['median']:.2f}, at most {of['largest']:.2f}" for way, of in ways.items())
            print(f"{title}: our time as a multiple of {who}'s, median: {said}", flush=True)
    if not options.cases and options.only == list(PARTS):
        print(f"saved in {save('host_time', result).relative_to(ROOT)}")
    if failed := [case for rows in found.values() for case, row in rows.items() if "failed" in row["jagged"]]:
        sys.exit(f"jagged failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
