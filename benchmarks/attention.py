"""Jagged attention beside FlashAttention-2 and -4, FBGEMM-GPU, padding, FlexAttention and nested tensors.

    python -m benchmarks.attention                        # every part
    python -m benchmarks.attention --only table skew      # these parts; others that the result file has stay
    python -m benchmarks.attention --quick                # a few cases of three parts, in minutes
    python -m benchmarks.attention --device cpu           # two threads, beside padding

`table`: five sizes, full and causal. `paper`: time and memory against the maximum length, 2^18 rows with padding, as in Figure 2
of the Jagged Flash Attention paper. `skew`: lognormal lengths beside equal ones of the same work. `options`: windows, targets,
grouped heads, cross-attention, wide heads. `biases`: biases with their gradients, dropout, and HSTU's weights. `masks`: what each
mask and bias costs beside causal attention at three widths, with both kinds of weights, as `benchmarks.attention_masks` says.

All get the same values, each in the layout that suits it, made before anything is timed: padding and packing cost peers nothing.
Ours is checked against float64 on samples from the shortest to the longest, output and gradients; a peer must agree with ours on
every row. What is wrong, fails, needs more than 60 GB or takes over a second gets the reason in place of a time. Useful work is
4 P H D FLOPs forward, with P pairs of a query and a key that it sees, and 2.5 times that backward, which must compute the scores
again: no padding and no masked tile counts. A backward is timed alone, on a graph that is kept.

A time is the median of bursts of about ten milliseconds. Ours and FlashAttention's have beside it `sustained`, the mean under
seconds of work without a pause, at the clock that the power then leaves.
"""

from __future__ import annotations

import argparse
import functools
import gc
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import attention_masks
from benchmarks.attention_cases import (
    PEERS,
    Implementation,
    Mask,
    Size,
    Terms,
    Workload,
    ours,
    ours_with_padding,
)
from benchmarks.attention_reference import reference, rows_of, some_samples
from benchmarks.common import (
    ROOT,
    environment,
    event_us,
    lasting,
    other_parts,
    replay_us,
    save,
    seconds_of,
    some_of,
    spread,
    try_once,
)
from benchmarks.tables import PAPER_CLAIMS

# The milliseconds, forward and backward, of full attention.
ASKED_MS = {
    (1024, 128, 4, 64): (0.050, 0.140),
    (512, 512, 4, 64): (0.21, 0.56),
    (256, 1024, 4, 64): (0.25, 0.72),
    (128, 2048, 4, 128): (0.74, 2.3),
    (64, 8192, 4, 128): (5.2, 16.0),
}


class Case(NamedTuple):
    """A case of `biases`.

    Args:
        terms: what it has beside the products of queries and keys.
        peers: who else can do it.
        beside: the case whose time its own is compared with.
        asked: at most so many times as long, forward and backward; empty where nothing is asked.
    """

    terms: Terms
    peers: tuple[str, ...] = ()
    beside: str = "plain"
    asked: tuple[float, ...] = ()


WITH_BIAS = (1.25, 1.35)
# At least 1.2 times the rate.
HSTU = (1 / 1.2, 1 / 1.2)
BIASES = {
    "plain": Case(Terms(), ("padded_efficient", "flex")),
    "relative bias": Case(Terms(distances=401), ("padded_efficient", "flex"), asked=WITH_BIAS),
    "time bias": Case(Terms(buckets=32), ("padded_efficient",), asked=WITH_BIAS),
    "time bias, 64 buckets": Case(Terms(buckets=64), asked=WITH_BIAS),
    "both biases": Case(Terms(distances=401, buckets=32), ("padded_efficient",), asked=WITH_BIAS),
    "bias of pairs": Case(Terms(pairs=True), ("padded_efficient",)),
    "dropout": Case(Terms(dropout=0.1)),
    "HSTU": Case(Terms(pointwise=True), asked=HSTU),
    "HSTU, both biases": Case(Terms(distances=401, buckets=32, pointwise=True), beside="both biases", asked=HSTU),
}
TABLE_PEERS = ("fa2", "fa4", "fa4_deterministic", "sll", "padded_math", "padded_flash", "padded_cudnn", "flex", "nested")
PAPER_PEERS = ("padded_math", "padded_flash", "sll_dense", "sll")
# What is compiled when it is first called, and kept on disk; FlashAttention-4 keeps nothing.
COMPILED = ("jagged", "sll", "sll_dense", "flex")
# Whose times under work that lasts are measured beside those of bursts.
LASTING = ("jagged", "fa2", "fa4", "fa4_deterministic")
# Cases of each part that `--quick` measures.
QUICK = {
    "table": ("256 x 1024 x 4 x 64 full", "128 x 2048 x 4 x 128 causal", "64 x 8192 x 4 x 128 full"),
    "options": ("128 x 2048 x 4 x 128: causal", "128 x 2048 x 4 x 128: 8 heads, 2 key heads"),
    "biases": ("256 x 1024 x 4 x 64: plain", "256 x 1024 x 4 x 64: both biases"),
}
MOST_BYTES = 60e9
MOST_SECONDS = 1.0
# A peer may differ from ours by as much, in the Euclidean norm and relative to ours.
AGREEMENT = 0.05

Part = dict[str, tuple[Size, tuple[str, ...]]]
Timer = Callable[[Callable[[], Callable[[], Any]]], dict[str, float]]


def parts() -> dict[str, Part]:
    """The cases of each part by name, and the peers of each."""
    table: Part = {}
    for row in ASKED_MS:
        for mask in (Mask(), Mask(causal=True)):
            table[f"{' x '.join(map(str, row))} {'causal' if mask.causal else 'full'}"] = Size(*row, mask), TABLE_PEERS
    skew: Part = {}
    for samples, median, heads, width in ((512, 256, 4, 64), (64, 2048, 4, 128)):
        for mask in (Mask(), Mask(causal=True)):
            skewed = Size(samples, median, heads, width, mask, lengths="lognormal")
            for size in (skewed, same_work(skewed)):
                skew[f"median {median} {'causal' if mask.causal else 'full'} {size.lengths}"] = size, ("fa2",)
    options: Part = {}
    for samples, length, heads, width in ((256, 1024, 4, 64), (128, 2048, 4, 128)):
        sized = functools.partial(Size, samples, length, heads)
        for name, of in {
            "full": sized(width),
            "causal": sized(width, Mask(causal=True)),
            "window of 256, causal": sized(width, Mask(causal=True, window=256)),
            "16 targets, causal": sized(width, Mask(causal=True, num_targets=16)),
            "8 contextual, causal": sized(width, Mask(causal=True, num_contextual=8)),
            "one key head": sized(width, key_heads=1),
            "8 heads, 2 key heads": Size(samples, length, 8, width, key_heads=2),
            "16 queries a sample": sized(width, queries=16),
            "head width 256": sized(256),
        }.items():
            options[f"{samples} x {length} x {heads} x {width}: {name}"] = of, ("fa2", "fa4")
    biases: Part = {}
    for samples, length, heads, width in ((256, 1024, 4, 64), (1024, 128, 4, 64)):
        for name, case in BIASES.items():
            size = Size(samples, length, heads, width, Mask(causal=True), terms=case.terms)
            biases[f"{samples} x {length} x {heads} x {width}: {name}"] = size, case.peers
    lengths = [2**power for power in range(7, 14)]
    paper: Part = {str(length): (Size(2**18 // length, length, 4, 64), PAPER_PEERS) for length in lengths}
    # The longest samples of FBGEMM-GPU last: what its kernels might spoil comes before them.
    return {"table": table, "skew": skew, "options": options, "biases": biases, "paper": paper}


def cpu_parts() -> dict[str, Part]:
    """Two small sizes, full and causal."""
    return {
        "cpu": {
            f"{' x '.join(map(str, row))} {'causal' if causal else 'full'}": (
                Size(*row, Mask(causal=causal), dtype="fp32"),
                ("padded",),
            )
            for row in ((64, 128, 4, 64), (8, 512, 4, 64))
            for causal in (False, True)
        }
    }


def same_work(skewed: Size) -> Size:
    """Equal lengths of the same `sum L^2`, in as many samples or nearly."""
    work = int((skewed.draw() ** 2).sum())
    length = round((work / skewed.samples) ** 0.5)
    return Size(round(work / length**2), length, skewed.heads, skewed.width, skewed.mask, lengths="equal", dtype=skewed.dtype)


def accuracy(w: Workload, found: dict[str, Tensor]) -> dict[str, dict[str, float]]:
    """Largest errors of our results against float64, beside those of plain products in the tested dtype.

    Raises:
        ArithmeticError: an error of more than three times the latter and two roundings.
    """
    samples = some_samples(w)
    exact, low = (reference(w, samples, dtype) for dtype in (torch.float64, w.q.dtype))
    rows = {
        **dict.fromkeys(("output", "q"), rows_of(w.query_lengths, samples)),
        **dict.fromkeys(("k", "v"), rows_of(w.key_lengths, samples)),
    }
    parts = {name: found[name][of] for name, of in rows.items()}
    if w.biases:
        # The gradient of a table is a sum over all samples: over these alone where no other has a gradient of its output.
        implementation = ours(w)
        implementation.upstream = torch.zeros_like(w.upstream)
        implementation.upstream[rows["q"]] = w.upstream[rows["q"]]
        of_these = dict(implementation.results())
        parts |= {name: of_these[name] for name in w.biases}
    if "bias" in parts:
        parts["bias"] = parts["bias"][:, rows_of(w.query_lengths * w.key_lengths, samples)]
    errors = {}
    for name, x in parts.items():
        error = _largest(x.double() - exact[name])
        plain = _largest(low[name].double() - exact[name])
        allowed = 3 * plain + 2 * torch.finfo(w.q.dtype).eps * _largest(exact[name])
        if not error <= allowed:
            raise ArithmeticError(f"wrong: {name} is off by {error:.3g}, allowed {allowed:.3g}")
        errors[name] = {"largest": error, f"plain_{w.size.dtype}": plain}
    return errors


def _largest(x: Tensor) -> float:
    return float(x.abs().max())


def difference(found: Tensor, expected: Tensor) -> float:
    """Relative to the norm of what is expected.

    Raises:
        ArithmeticError: the shapes differ, or more than `AGREEMENT`.
    """
    if found.shape != expected.shape:
        raise ArithmeticError(f"wrong: shape {list(found.shape)} in place of {list(expected.shape)}")
    size = float(torch.linalg.vector_norm(expected, dtype=torch.float32))
    apart = float(torch.linalg.vector_norm(found.float() - expected, dtype=torch.float32)) / (size or 1.0)
    if not apart <= AGREEMENT:
        raise ArithmeticError(f"wrong: differs from ours by {apart:.3g} of its norm, allowed {AGREEMENT}")
    return apart


def _reason(error: Exception) -> str:
    """The error in a line."""
    if isinstance(error, torch.OutOfMemoryError):
        return f"needs more than {MOST_BYTES / 1e9:.0f} GB"
    line = (str(error).strip().splitlines() or [""])[0]
    return line if isinstance(error, ArithmeticError) else f"{type(error).__name__}: {line[:160]}"


def measure(w: Workload, peers: tuple[str, ...], time_it: Timer, long_timer: Timer | None = None) -> dict[str, Any]:
    """Check ours and each peer, and time those that are right, those of `LASTING` by `long_timer` if there is one."""
    timers = dict.fromkeys(LASTING, long_timer or time_it)
    row: dict[str, Any] = {
        "size": w.size.described,
        **{"queries": w.q.shape[0], "keys": w.k.shape[0], "pairs": w.pairs, "longest": int(w.key_lengths.max())},
        "flops": {"forward": w.flops, "backward": round(2.5 * w.flops)},
        "formula": "forward 4 P H D, P pairs of a query and a key that it sees; backward 2.5 times that",
    }
    try:
        implementation = ours(w)
        expected = dict(implementation.results())
        row["jagged"] = {"errors": accuracy(w, expected)}
        row["jagged"] |= _figures(implementation, row["flops"], timers["jagged"])
        with_padding: dict[str, Tensor] = {}
        if not w.mask.causal and any(name.startswith("padded") for name in peers):
            with_padding = dict(ours_with_padding(w).results())
    except Exception as error:
        # Without ours there is nothing to compare the others with.
        row["jagged"] = {"failed": _reason(error)}
        return row
    for name in peers:
        row[name] = measure_peer(PEERS[name], w, expected, with_padding, row["flops"], timers.get(name, time_it))
        _release(w)
    return row


def measure_peer(
    make: Callable[[Workload], Implementation],
    w: Workload,
    expected: dict[str, Tensor],
    with_padding: dict[str, Tensor],
    flops: dict[str, int],
    time_it: Timer,
) -> dict[str, Any]:
    """Times of a peer in the directions in which it agrees with us. Peers fail in any way, which must not end the run."""
    figures: dict[str, Any] = {"difference": {}}
    try:
        implementation = make(w)
        right = with_padding if implementation.sees_padding else expected
        results = implementation.results()
        name, output = next(results)
        figures["difference"][name] = difference(output, right[name])
        del output
    except Exception as error:
        return {"failed": _reason(error)}
    try:
        for name, gradient in results:
            figures["difference"][name] = difference(gradient, right[name])
        return figures | _figures(implementation, flops, time_it)
    except Exception as error:
        reason = _reason(error)
    # What the failure left is freed when its exception is.
    _release(w)
    try:
        return figures | _figures(implementation, {"forward": flops["forward"]}, time_it) | {"backward": {"failed": reason}}
    except Exception as error:
        return {"failed": _reason(error)}


def _release(w: Workload) -> None:
    gc.collect()
    if w.device.type == "cuda":
        torch.cuda.empty_cache()


def _figures(implementation: Implementation, flops: dict[str, int], time_it: Timer) -> dict[str, Any]:
    """Times of the directions of which `flops` are given, the rate of useful work, and memory."""
    figures: dict[str, Any] = {}
    if implementation.upstream.is_cuda:
        figures |= memory(implementation, "backward" in flops)
    prepare = {"forward": lambda: implementation.forward, "backward": implementation.backward}
    for way, count in flops.items():
        microseconds = time_it(prepare[way])
        figures[way] = {**microseconds, "tflop_per_s": count / microseconds["median"] / 1e6}
    return figures


def memory(implementation: Implementation, with_backward: bool) -> dict[str, int]:
    """Bytes of the inputs, and most bytes beyond them in a forward pass and in both passes, results counted."""

    def peak(work: Callable[[], Any]) -> int:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        return torch.cuda.max_memory_allocated() - before

    figures = {
        "input_bytes": sum(x.numel() * x.element_size() for x in implementation.inputs),
        "peak_bytes_forward": peak(implementation.forward),
    }
    if with_backward:
        figures["peak_bytes_both"] = peak(lambda: implementation.backward()())
    return figures


def time_on_gpu(prepare: Callable[[], Callable[[], Any]], sustained: float = 0.0) -> dict[str, Any]:
    """Microseconds a call: up to a few milliseconds, where the host's share shows, by replays of a CUDA graph, else by events.

    `sustained` is as in `replay_us`.
    """
    timed = prepare()
    rough = seconds_of(timed)[0]
    if rough > MOST_SECONDS:
        raise TimeoutError(f"takes {rough:.1f} s a call")
    # The first calls of all load kernels and start threads.
    rough = min(seconds_of(timed)[0] for _ in range(3))
    if rough < 3e-3:
        return replay_us(prepare=prepare, sustained=sustained)
    calls, repeats = max(1, round(10e-3 / rough)), 3 if rough > 50e-3 else 7

    def several() -> None:
        for _ in range(calls):
            timed()

    figures = {**spread(event_us(several, repeats, calls)), "captured": False}
    return figures | lasting(several, calls, sustained) if sustained else figures


def time_on_cpu(prepare: Callable[[], Callable[[], Any]], seconds: float) -> dict[str, float]:
    """Microseconds a call by the wall clock, the first left out."""
    timed = prepare()
    timed()
    times: list[float] = []
    while len(times) < 3 or sum(times) < seconds * 1e6:
        times.append(seconds_of(timed)[0] * 1e6)
    return spread(times)


def warm(found: dict[str, Part]) -> None:
    """Compile what is compiled at the first call in as many processes as there are cores; Triton keeps kernels on disk."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    tasks = [
        (name, size)
        for part in found.values()
        for size, peers in part.values()
        for name in ("jagged", *peers)
        # FlexAttention is compiled for every number of rows at once.
        if name in COMPILED and (name != "flex" or size.samples in (1024, 128))
    ]
    tasks.sort(key=lambda task: task[0] != "flex")
    workers = min(os.cpu_count() or 1, 16, len(tasks))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(warm_case, *task): task for task in tasks}
        for future in as_completed(futures):
            if (error := future.exception()) is not None:
                print(f"warming {futures[future]}: {type(error).__name__}: {error}", flush=True)


def warm_case(name: str, size: Size) -> None:
    """Run an implementation once, forward and backward."""

    def run() -> None:
        w = Workload(size, "cuda")
        implementation = ours(w) if name == "jagged" else PEERS[name](w)
        implementation.forward()
        implementation.backward()()

    try_once(run)


def summary(title: str, part: dict[str, Any]) -> dict[str, Any]:
    """What a part shows in a few numbers."""
    if title == "paper":
        return {name: ratios for name in PAPER_CLAIMS if (ratios := paper_ratios(part, name))}
    if title == "skew":
        names = [name.removesuffix(" lognormal") for name in part if name.endswith(" lognormal")]
        return {
            name: {
                way: skewed[way]["tflop_per_s"] / equal[way]["tflop_per_s"]
                for way in ("forward", "backward")
                if "tflop_per_s" in (skewed := part[f"{name} lognormal"]["jagged"]).get(way, {})
                and "tflop_per_s" in (equal := part[f"{name} equal"]["jagged"]).get(way, {})
            }
            for name in names
        }
    if title == "biases":
        return {name: row["compared"]["ratio"] for name, row in part.items() if "compared" in row}
    return {}


def paper_ratios(part: dict[str, Any], peer: str) -> dict[str, float]:
    """The largest ratios of a peer's time and memory, inputs counted, to ours over all lengths."""
    ratios: dict[str, list[float]] = {"forward": [], "backward": [], "memory_forward": [], "memory_both": []}
    for row in part.values():
        mine, its = row["jagged"], row.get(peer, {})
        for way in ("forward", "backward"):
            if "median" in its.get(way, {}) and "median" in mine.get(way, {}):
                ratios[way].append(its[way]["median"] / mine[way]["median"])
        for way in ("forward", "both"):
            if f"peak_bytes_{way}" in its and f"peak_bytes_{way}" in mine:
                bytes_of = [of["input_bytes"] + of[f"peak_bytes_{way}"] for of in (its, mine)]
                ratios[f"memory_{way}"].append(bytes_of[0] / bytes_of[1])
    return {name: max(of) for name, of in ratios.items() if of}


def run(
    title: str,
    part: Part,
    device: str,
    time_it: Timer,
    saved: Callable[[dict[str, Any]], Any] = lambda rows: None,
    long_timer: Timer | None = None,
    former: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Measure every case of a part after the `former` rows; print, and hand on for saving, as it goes."""
    rows: dict[str, Any] = dict(former or {})
    for name, (size, peers) in part.items():
        begun = time.perf_counter()
        rows[name] = row = measure(Workload(size, device), peers, time_it, long_timer)
        if title == "table":
            row["asked_ms"] = _asked(row, size)
        if title == "biases":
            row |= compared(rows, name)
        print(f"{title}, {name} ({time.perf_counter() - begun:.1f} s): {_line(row)}", flush=True)
        saved({"rows": rows, "summary": {}})
    result = {"rows": rows, "summary": summary(title, rows)}
    for name, ratios in result["summary"].items():
        claim = f"; the paper claims {PAPER_CLAIMS[name]}" if title == "paper" else ""
        if title == "biases":
            beside = rows[name]["compared"]
            asked = " and ".join(f"{bound:.2f}" for bound in beside["asked"].values())
            claim = f" of the time of {beside['with']}" + (f"; asked at most {asked}" if asked else "")
        print(f"{title}, {name}: {', '.join(f'{way} {ratio:.2f}' for way, ratio in ratios.items())}{claim}", flush=True)
    return result


def _asked(row: dict[str, Any], size: Size) -> dict[str, float]:
    """The issue's bounds: milliseconds of full attention; FlashAttention-2's times over 1.5 and 1.35 of causal attention."""
    if not size.mask.causal:
        return dict(zip(("forward", "backward"), ASKED_MS[size.samples, size.length, size.heads, size.width], strict=True))
    peer = row.get("fa2", {})
    speed = {"forward": 1.5, "backward": 1.35}
    return {way: peer[way]["median"] / 1e3 / times for way, times in speed.items() if "median" in peer.get(way, {})}


def compared(rows: dict[str, Any], name: str) -> dict[str, Any]:
    """How many times as long as another case a case of `biases` takes, what was asked, and that as milliseconds."""
    size, case = name.split(": ")
    beside, ways = BIASES[case].beside, ("forward", "backward")
    if beside == case:
        return {}
    mine, its = ({way: rows[of]["jagged"].get(way, {}).get("median") for way in ways} for of in (name, f"{size}: {beside}"))
    asked = dict(zip(ways, BIASES[case].asked, strict=False))
    ratios = {way: mine[way] / its[way] for way in ways if mine[way] and its[way]}
    return {
        "compared": {"with": beside, "ratio": ratios, "asked": asked},
        "asked_ms": {way: bound * its[way] / 1e3 for way, bound in asked.items() if its[way]},
    }


def _line(row: dict[str, Any]) -> str:
    shown = []
    for name in ("jagged", *PEERS):
        of = row.get(name, {})
        if "failed" in of:
            shown.append(f"{name} {of['failed']}")
        elif of:
            ways = [
                str(figure["failed"]) if "failed" in figure else f"{figure['median'] / 1e3:.4g} ms {figure['tflop_per_s']:.3g} TF"
                for figure in (of[way] for way in ("forward", "backward"))
            ]
            shown.append(f"{name} {' / '.join(ways)}")
    errors = row["jagged"].get("errors", {})
    ratios = [of["largest"] / plain for of in errors.values() if (plain := list(of.values())[1])]
    if ratios:
        shown.append(f"our errors {statistics.median(ratios):.2f} (at most {max(ratios):.2f}) of plain products'")
    return "; ".join(shown)


def ours_failed(result: dict[str, Any]) -> list[str]:
    """Where our own operator failed or was wrong."""
    return [
        f"{title}, {name}: {row['jagged']['failed']}"
        for title, part in result.items()
        for name, row in part.get("rows", {}).items()
        if "failed" in row.get("jagged", {})
    ] + attention_masks.failed(result.get("masks", {"rows": {}}))


def save_part(result: dict[str, Any], title: str, part: dict[str, Any]) -> Path:
    """Write the result file with what a part has so far, so that a run that is cut off leaves what it measured."""
    return save("attention", {**result, title: part})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", choices=(*parts(), "masks"), help="parts to measure; on a CPU masks alone")
    parser.add_argument("--cases", nargs="+", help="cases whose name has one of these; others that the result file has stay")
    parser.add_argument("--quick", action="store_true", help="a few cases of three parts")
    parser.add_argument("--without", nargs="+", default=[], choices=PEERS, help="peers to leave out")
    parser.add_argument(
        "--sustained", type=float, default=2.0, help="seconds of work without a pause, in the table and the options; 0 for none"
    )
    parser.add_argument("--seconds", type=float, default=0.5, help="a direction of an implementation on a CPU")
    options = parser.parse_args()
    device = options.device
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("found no NVIDIA GPU; --device cpu measures the PyTorch implementation")
    if device == "cpu" and options.only:
        if options.only != ["masks"]:
            parser.error("--only: got --device cpu, which has one part beside masks; leave it out")
        attention_masks.run(attention_masks.chosen(device, options.cases), device, attention_masks.time_on_cpu)
        return
    found = parts() if device == "cuda" else cpu_parts()
    masks: dict[str, attention_masks.Case] = {}
    if device == "cuda" and not options.quick and "masks" in (options.only or ["masks"]):
        masks = attention_masks.chosen(device, options.cases)
    if options.only:
        found = {title: part for title, part in found.items() if title in options.only}
    if options.quick and device == "cuda":
        found = {title: {name: found[title][name] for name in names} for title, names in QUICK.items() if title in found}
    if options.cases and not (found := some_of(found, options.cases)) and not masks:
        parser.error(f"--cases: no case has {' or '.join(map(repr, options.cases))} in its name")
    for title, part in found.items():
        left_out = {*options.without}
        found[title] = {
            name: (size, tuple(peer for peer in peers if peer not in left_out)) for name, (size, peers) in part.items()
        }
    begun = time.perf_counter()

    def elapsed(what: str) -> None:
        print(f"--- {what}: {time.perf_counter() - begun:.0f} s since the start", flush=True)

    if device == "cpu":
        torch.set_num_threads(2)
        time_it: Timer = functools.partial(time_on_cpu, seconds=options.seconds)
    else:
        if found:
            warm(found)
        if masks:
            attention_masks.warm(masks)
        elapsed("kernels are compiled")
        time_it = time_on_gpu
    facts = environment(device)
    print(facts, flush=True)
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(MOST_BYTES / torch.cuda.get_device_properties(0).total_memory)
        # Thrown away: the first capture of all finds libraries and threads that have yet to begin.
        measure(Workload(Size(64, 128, 4, 64), "cuda"), (), time_it)
    some = options.cases or options.quick or options.without
    others = other_parts("attention", facts) if options.only or some else {}
    result = {"environment": facts, **others}
    for title, part in found.items():
        lasts = device == "cuda" and title in ("table", "options")
        long_timer = functools.partial(time_on_gpu, sustained=options.sustained) if lasts else None
        former = others.get(title, {}).get("rows", {}) if some else {}
        saved = functools.partial(save_part, result, title)
        result[title] = run(title, part, device, time_it, saved, long_timer, former)
        path = save("attention", result)
        elapsed(f"{title}, saved in {path.relative_to(ROOT)}")
    if masks:
        former = others.get("masks", {}).get("rows", {}) if some else {}
        saved = functools.partial(save_part, result, "masks")
        result["masks"] = attention_masks.run(masks, device, attention_masks.time_on_gpu, saved, former)
        path = save("attention", result)
        elapsed(f"masks, saved in {path.relative_to(ROOT)}")
    if failed := ours_failed(result):
        sys.exit("\n".join(["jagged failed:", *failed]))


if __name__ == "__main__":
    main()
