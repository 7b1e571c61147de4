"""What every benchmark shares: the machine it ran on, the limits of that machine, and where results go."""

from __future__ import annotations

import functools
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent


def environment(device: str | None = None) -> dict[str, Any]:
    """Versions and hardware, with the copy and matmul limits of a GPU measured now; on `device` `"cpu"` without a GPU's."""
    import triton

    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "torchrec": _version("torchrec"),
        "fbgemm_gpu": _version("fbgemm_gpu"),
        "device": f"CPU, {torch.get_num_threads()} threads",
        "processor": _processor(),
    }
    if device != "cpu" and torch.cuda.is_available():
        facts["device"] = torch.cuda.get_device_name()
        facts["copy_gb_per_s"] = round(_copy_speed(), 1)
        facts["bf16_matmul_tflops"] = round(_matmul_speed(), 1)
    return facts


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def result_path(name: str, facts: dict[str, Any]) -> Path:
    """`results/<device>/<name>.json`."""
    device: str = facts["device"].lower().replace("nvidia ", "").replace(",", "").replace(" ", "-")
    return ROOT / "results" / device / f"{name}.json"


def save(name: str, result: dict[str, Any]) -> Path:
    """Write `results/<device>/<name>.json` and return its path."""
    path = result_path(name, result["environment"])
    path.parent.mkdir(parents=True, exist_ok=True)
    # Replaced at once, so that a run that is cut off leaves a whole file.
    path.with_suffix(".part").write_text(json.dumps(result, indent=2) + "\n")
    path.with_suffix(".part").replace(path)
    return path


def other_parts(name: str, facts: dict[str, Any]) -> dict[str, Any]:
    """The parts of a result file that were measured with the same versions on the same kind of machine."""
    path = result_path(name, facts)
    if not path.exists():
        return {}
    measured = ("copy_gb_per_s", "bf16_matmul_tflops")
    former = json.loads(path.read_text())
    same = all(former["environment"].get(fact) == value for fact, value in facts.items() if fact not in measured)
    return {title: part for title, part in former.items() if title != "environment"} if same else {}


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
) -> dict[str, float]:
    """Microseconds of GPU time a call, from replays of a CUDA graph of several calls; eager calls where one cannot be captured.

    Short calls are repeated more often than long ones: about a millisecond a replay and ten in all.

    Args:
        function: what is timed.
        prepare: in place of it, what runs on the capturing stream before the capture and returns what is timed: a forward pass
            that returns its backward.
        cold: write over the L2 cache before each call; the time of writing, measured alone, is taken off.

    Returns:
        median, smallest and largest, and `captured`: whether a graph was replayed.
    """
    # One stream for all: memory that another freed is not given back for this one.
    stream = _stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        timed = prepare() if prepare is not None else function
        assert timed is not None
        rough = event_us(timed, 1, 1)[0]
        captured = not _synchronises(timed)
    torch.cuda.synchronize()
    if cold:
        rough += _flush_us()
    calls = min(20, max(2, round(1_000 / rough)))
    repeats = min(20, max(5, round(10_000 / rough / calls)))
    before = _spoiled().zero_ if cold else lambda: None
    if captured:
        try:
            times = _graph_us(timed, calls, repeats, before)
        except RuntimeError:
            torch.cuda.synchronize()
            captured = False
    if not captured:
        times = event_us(timed, repeats, 1, before)
    elif cold:
        times = [value - _flush_us() for value in times]
    return {**spread(times), "captured": captured}


def _synchronises(function: Callable[[], Any]) -> bool:
    """Whether a call waits for the device; to try a capture of one that does would leave the allocator in it."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        function()
    except RuntimeError:
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


@functools.cache
def _stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


@functools.cache
def _spoiled() -> torch.Tensor:
    """Five times the L2 cache of the largest GPU that there is."""
    return torch.zeros(2**28, dtype=torch.uint8, device="cuda")


@functools.cache
def _flush_us() -> float:
    return statistics.median(_graph_us(_spoiled().zero_, 20, 20, lambda: None))


def _graph_us(work: Callable[[], Any], calls: int, repeats: int, before: Callable[[], Any]) -> list[float]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=_stream()):
        for _ in range(calls):
            before()
            work()
    return event_us(graph.replay, repeats, calls)


def event_us(work: Callable[[], Any], repeats: int, calls: int, before: Callable[[], Any] = lambda: None) -> list[float]:
    """Microseconds of GPU time a call between events, of `work` that makes `calls` calls, after two that warm up."""
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


def _median_us(work: Callable[[], Any]) -> float:
    return statistics.median(event_us(work, 20, 1))


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _copy_speed() -> float:
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / _median_us(lambda: target.copy_(source)) / 1e3


def _matmul_speed() -> float:
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / _median_us(lambda: a @ b) / 1e6


def _processor() -> str:
    """The model of the CPU, where Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(package: str) -> str | None:
    try:
        return str(__import__(package).__version__)
    except (ImportError, AttributeError):
        return None
