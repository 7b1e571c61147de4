"""What every benchmark shares: the machine it ran on, the limits of that machine, and where results go."""

from __future__ import annotations

import functools
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent


def environment() -> dict[str, Any]:
    """Versions and hardware, with the copy and matmul limits of a GPU measured now."""
    import triton

    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "torchrec": _version("torchrec"),
        "fbgemm_gpu": _version("fbgemm_gpu"),
        "device": "cpu",
    }
    if torch.cuda.is_available():
        facts["device"] = torch.cuda.get_device_name()
        facts["copy_gb_per_s"] = round(_copy_speed(), 1)
        facts["bf16_matmul_tflops"] = round(_matmul_speed(), 1)
    return facts


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def save(name: str, result: dict[str, Any]) -> Path:
    """Write `results/<device>/<name>.json` and return its path."""
    device = result["environment"]["device"].lower().replace("nvidia ", "").replace(" ", "-")
    path = ROOT / "results" / device / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    return path


def seconds_of(function: Callable[[], Any]) -> tuple[float, Any]:
    """Wall-clock seconds of one call, the device's work included, and what it returned."""
    _wait()
    start = time.perf_counter()
    value = function()
    _wait()
    return time.perf_counter() - start, value


def replay_us(
    function: Callable[[], Any] | None = None,
    *,
    prepare: Callable[[], Callable[[], Any]] | None = None,
    cold: bool = False,
    calls: int = 10,
    repeats: int = 20,
) -> dict[str, float]:
    """Microseconds of GPU time a call, from replays of a CUDA graph of several calls; eager calls where one cannot be captured.

    Args:
        function: what is timed.
        prepare: in place of it, what runs on the capturing stream before the capture and returns what is timed: a forward pass
            that returns its backward.
        cold: write over the L2 cache before each call; the time of writing is measured alone and taken off.
        calls: in a graph.
        repeats: replays.

    Returns:
        median, smallest and largest, and `captured`: whether a graph was replayed.
    """
    # One stream for all: memory that another freed is not given back for this one, and pools of graphs go when they are told to.
    stream = _stream()
    gc.collect()
    torch.cuda.empty_cache()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        timed = prepare() if prepare is not None else function
        assert timed is not None
        for _ in range(3):
            timed()
    torch.cuda.synchronize()
    spoiled = torch.empty(2**28 if cold else 1, dtype=torch.uint8, device="cuda")

    def flush() -> None:
        if cold:
            spoiled.zero_()

    def replays(work: Callable[[], Any]) -> list[float]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(calls):
                flush()
                work()
        return _event_us(graph.replay, repeats, calls)

    try:
        times, captured = replays(timed), True
    except RuntimeError:
        torch.cuda.synchronize()
        times, captured = _event_us(timed, repeats, 1, before=flush), False
    if cold and captured:
        flushing = statistics.median(replays(lambda: None))
        times = [value - flushing for value in times]
    return {**spread(times), "captured": captured}


@functools.cache
def _stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def _event_us(work: Callable[[], Any], repeats: int, calls: int, before: Callable[[], Any] = lambda: None) -> list[float]:
    times = []
    for _ in range(repeats + 2):
        before()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return times[2:]


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _gpu_median_ms(function: Callable[[], Any], repeats: int = 20) -> float:
    times = []
    for _ in range(repeats + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[3:])


def _copy_speed() -> float:
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / _gpu_median_ms(lambda: target.copy_(source)) / 1e6


def _matmul_speed() -> float:
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / _gpu_median_ms(lambda: a @ b) / 1e9


def _version(package: str) -> str | None:
    try:
        return str(__import__(package).__version__)
    except (ImportError, AttributeError):
        return None
