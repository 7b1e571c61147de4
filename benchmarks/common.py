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


def some_of(parts: dict[str, dict[str, Any]], words: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The cases of each part whose name has one of these words, commas aside; parts that have none are left out."""

    def plain(name: str) -> str:
        return name.replace(",", "")

    chosen = {
        title: {name: case for name, case in part.items() if any(plain(of) in plain(name) for of in words)}
        for title, part in parts.items()
    }
    return {title: part for title, part in chosen.items() if part}


def peak_bytes() -> int:
    """The most memory that was allocated since the statistics were reset, and all that CUDA graphs keep for their replays.

    What a graph frees within itself counts as not allocated, but nothing else may have it.
    """
    pools = [of for of in torch.cuda.memory_snapshot() if tuple(of["segment_pool_id"]) != (0, 0)]
    return torch.cuda.max_memory_allocated() + sum(of["total_size"] - of["allocated_size"] for of in pools)


def seconds_of(function: Callable[[], Any]) -> tuple[float, Any]:
    """Wall-clock seconds of one call, the device's work included, and what it returned."""
    _wait()
    start = time.perf_counter()
    value = function()
    _wait()
    return time.perf_counter() - start, value


def host_us(call: Callable[[], Any], calls: int = 1_000, rounds: int = 3) -> dict[str, float]:
    """Microseconds of the host's time a call, of so many calls in a row for which the device is not waited.

    That holds where the device needs less time for a call than the host: a queue that is full makes the host wait.
    """
    return host_us_in_turns([call], calls, rounds)[0]


def host_us_in_turns(several: Sequence[Callable[[], Any]], calls: int = 1_000, rounds: int = 3) -> list[dict[str, float]]:
    """`host_us` of several calls, whose rounds come in turns: a host's clock changes by a third within a minute."""
    times: list[list[float]] = [[] for _ in several]
    for call in several:
        for _ in range(20):
            call()
    for _ in range(rounds):
        for call, of in zip(several, times, strict=True):
            _wait()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            of.append((time.perf_counter() - start) / calls * 1e6)
    _wait()
    return [spread(of) for of in times]


def eager_us(call: Callable[[], Any], calls: int = 100) -> dict[str, float]:
    """Microseconds of an eager call: the mean of so many in a row up to the end of the last, and the median of single ones.

    Returns:
        mean; `host`, the part after which the calls had returned; `synchronised`, one call and its end.
    """
    for _ in range(5):
        call()
    _wait()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    returned = time.perf_counter()
    _wait()
    ended = time.perf_counter()
    single = statistics.median(seconds_of(call)[0] for _ in range(20))
    return {"mean": (ended - start) / calls * 1e6, "host": (returned - start) / calls * 1e6, "synchronised": single * 1e6}


def try_once(run: Callable[[], Any]) -> None:
    """Compile what a run needs by running it on the GPU, and leave no memory taken. What fails is named when it is measured."""
    try:
        run()
        torch.cuda.synchronize()
    except Exception:  # Not here: another process measures.
        return
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def replay_us(
    function: Callable[[], Any] | None = None,
    *,
    prepare: Callable[[], Callable[[], Any]] | None = None,
    cold: bool = False,
    sustained: float = 0.0,
) -> dict[str, Any]:
    """Microseconds of GPU time a call, from replays of a CUDA graph of several calls; eager calls where one cannot be captured.

    Short calls are repeated more often than long ones: about a millisecond a replay and ten in all, a burst.

    Args:
        function: what is timed.
        prepare: in place of it, what runs on the capturing stream before the capture and returns what is timed: a forward pass
            that returns its backward.
        cold: write over the L2 cache before each call; the time of writing, measured alone, is taken off.
        sustained: seconds of work without a pause that are measured after the burst; 0 for none.

    Returns:
        median, smallest and largest, `captured`: whether a graph was replayed, and `sustained` as `sustained_us` has it.
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
    work = timed
    if captured:
        try:
            work = _graph_of(timed, calls, before).replay
        except RuntimeError:
            torch.cuda.synchronize()
            captured = False
    if captured:
        times = event_us(work, repeats, calls)
        if cold:
            times = [value - _flush_us() for value in times]
    else:
        times = event_us(timed, repeats, 1, before)
    figures = {**spread(times), "captured": captured}
    if sustained:
        figures |= lasting(work, calls if captured else 1, sustained)
    return figures


def lasting(work: Callable[[], Any], calls: int, seconds: float) -> dict[str, Any]:
    """What is known of a burst that has just ended, its clock, and the figures of `sustained_us`."""
    clock = {"sm_mhz": of["sm_mhz"]} if (of := gpu_state()) else {}
    return {**clock, "sustained": sustained_us(work, calls, seconds)}


def sustained_us(work: Callable[[], Any], calls: int, seconds: float) -> dict[str, float]:
    """Mean microseconds a call of `work`, which makes `calls` calls, under at least so many seconds of work without a pause.

    There is always more work waiting than the GPU is at, so that it never rests.

    Returns:
        mean, `seconds` that were measured, and of the second half of them the mean clock of the multiprocessors, `sm_mhz`, and
        the mean power, `watts`, where NVML tells them.
    """
    rough = statistics.median(event_us(work, 3, 1))
    several = max(1, round(50_000 / rough))

    def chunk() -> torch.cuda.Event:
        for _ in range(several):
            work()
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        return end

    begun = torch.cuda.Event(enable_timing=True)
    begun.record()
    former, ends = chunk(), 1
    states: list[dict[str, float]] = []
    while True:
        last = chunk()
        ends += 1
        former.synchronize()
        states.append(gpu_state())
        if begun.elapsed_time(former) >= seconds * 1e3:
            break
        former = last
    last.synchronize()
    milliseconds = begun.elapsed_time(last)
    settled = [state for state in states[len(states) // 2 :] if state]
    means = {name: statistics.mean(state[name] for state in settled) for name in settled[0]} if settled else {}
    return {"mean": milliseconds * 1e3 / (ends * several * calls), "seconds": milliseconds / 1e3, **means}


def gpu_state() -> dict[str, float]:
    """The clock of the multiprocessors now, in MHz, and the power in watts; empty where NVML is not to be had."""
    try:
        return {"sm_mhz": torch.cuda.clock_rate(), "watts": torch.cuda.power_draw() / 1e3}
    except Exception:  # NVML fails in ways of its own, and no time depends on it.
        return {}


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
    return statistics.median(event_us(_graph_of(_spoiled().zero_, 20, lambda: None).replay, 20, 20))


def _graph_of(work: Callable[[], Any], calls: int, before: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=_stream()):
        for _ in range(calls):
            before()
            work()
    return graph


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
