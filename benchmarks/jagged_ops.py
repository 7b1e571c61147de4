"""Jagged operators beside padding and beside FBGEMM-GPU's kernels: time forward and backward, memory, useful bytes a second.

    python -m benchmarks.jagged_ops                              # Table 1 of the Jagged Flash Attention paper, then the sweeps
    python -m benchmarks.jagged_ops --only table host            # these parts; others that the result file has stay
    python -m benchmarks.jagged_ops --quick                      # the table in bfloat16; float32 in the file stays
    python -m benchmarks.jagged_ops --device cpu                 # two threads, beside padding

The table's sizes: 1,024 samples, lengths uniform on 0..100, D = 1024, T = 4. `padded` copies the rows into zeros by an index
that is made once, computes, and takes the rows out; the gradients of both copies use the same index. `sll` are the Triton
kernels of FBGEMM-GPU, `fbgemm` its C++ operators, `copy` is a copy that reads and writes as many bytes as the operator must.
Every implementation is checked against float64, gradients too, before it is timed; one that is wrong or fails gets the reason
in place of a time. Times are medians of bursts of about ten milliseconds; ours have in the table beside them `sustained`, the
mean under seconds of work without a pause, at the clock that the power then leaves. `host` is the host's time of eager calls on
a small batch (`benchmarks/host_time.py` has more of them).
"""

from __future__ import annotations

import argparse
import functools
import gc
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import ROOT, environment, host_us, other_parts, replay_us, save, spread
from benchmarks.jagged_cases import CASES, Case, Function, Workload

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# What may be had of the speed of a copy.
ATTAINABLE = 0.82


@dataclass(frozen=True)
class Size:
    """A workload that has not been made: lengths uniform on 0..longest, and `declared` as the maximum that peers are told."""

    samples: int
    longest: int
    d: int = 256
    t: int = 4
    dtype: str = "bf16"
    declared: int = 0

    def workload(self, device: str) -> Workload:
        return Workload.uniform(self.samples, self.longest, self.d, self.t, DTYPES[self.dtype], device, self.declared)


@dataclass(frozen=True)
class Part:
    """Sizes of which every case is measured: `by` names what tells them apart."""

    by: str
    sizes: dict[str, Size]
    cases: Sequence[str] = tuple(CASES)
    cold: bool = False


def parts(dtypes: Sequence[str]) -> dict[str, Part]:
    """The paper's table, then what grows with the length, the batch and the declared maximum; sweeps in the first dtype."""
    sweep = functools.partial(Size, dtype=dtypes[0])
    declared = ("jagged_dense_bmm", "jagged_jagged_bmm", "jagged_softmax", "jagged_dense_add")
    means = {mean: sweep(65_536 // mean, 2 * mean) for mean in (8, 64, 512, 4096)}
    batches = {samples: sweep(samples, 100) for samples in (16, 128, 1024, 8192)}
    maxima = {longest: sweep(1024, 100, declared=longest) for longest in (100, 400, 1600)}
    return {
        "table": Part("dtype", {name: Size(1024, 100, 1024, dtype=name) for name in dtypes}, cold=True),
        "host": Part("dtype", {dtypes[0]: sweep(64, 40, 64)}),
        "max_length": Part("declared maximum length", _named(maxima), declared),
        "mean_length": Part("mean length, 65,536 rows in all", _named(means)),
        "batch_size": Part("samples", _named(batches)),
    }


CPU_PARTS = {"cpu": Part("dtype", {"fp32": Size(256, 200, 64, dtype="fp32")})}


def _named(sizes: dict[int, Size]) -> dict[str, Size]:
    return {str(key): size for key, size in sizes.items()}


@dataclass
class Reference:
    """Results and gradients in float64 for given gradients of the results, and how far off an implementation may be.

    That is three times as far as padding in the tested dtype is, and two roundings.
    """

    upstream: list[Tensor]
    forward: list[tuple[Tensor, float]]
    backward: list[tuple[Tensor, float]]

    @staticmethod
    def of(case: Case) -> Reference:
        with torch.no_grad():
            upstream = [torch.randn_like(x) for x in _tensors(case.padded(*case.inputs))]
        exact_inputs = [x.detach().double().requires_grad_() for x in case.inputs]
        exact = _run(case.padded, exact_inputs, [x.double() for x in upstream])
        low = _run(case.padded, case.inputs, upstream)
        eps = torch.finfo(case.inputs[0].dtype).eps

        def budgets(exact: list[Tensor], low: list[Tensor]) -> list[tuple[Tensor, float]]:
            return [(x, 3 * _largest(y.double() - x) + 2 * eps * _largest(x)) for x, y in zip(exact, low, strict=True)]

        return Reference(upstream, *(budgets(*way) for way in zip(exact, low, strict=True)))


def _tensors(results: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)


def _run(function: Function, inputs: Sequence[Tensor], upstream: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    outputs = _tensors(function(*inputs))
    gradients = torch.autograd.grad(outputs, inputs, upstream)
    return [x.detach() for x in outputs], list(gradients)


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def _compare(found: list[Tensor], expected: list[tuple[Tensor, float]]) -> None:
    for tensor, (exact, allowed) in zip(found, expected, strict=True):
        if tensor.shape != exact.shape:
            raise ArithmeticError(f"wrong: shape {list(tensor.shape)} in place of {list(exact.shape)}")
        error = _largest(tensor.double() - exact)
        if not error <= allowed:
            raise ArithmeticError(f"wrong: off by {error:.3g}, allowed {allowed:.3g}")


def _reason(error: Exception) -> str:
    """The error in a line."""
    line = (str(error).strip().splitlines() or [""])[0]
    return line if isinstance(error, ArithmeticError) else f"{type(error).__name__}: {line[:160]}"


def check(case: Case) -> tuple[dict[str, Any], Reference, dict[str, Function]]:
    """Start a case's row with its facts and with what is wrong in each implementation; return those whose results are right."""
    item = case.inputs[0].element_size()
    row: dict[str, Any] = {
        "bytes_forward": case.elements_forward * item,
        "bytes_backward": case.elements_backward * item,
        "formula": f"({case.formula}) x {item}",
        "flops": case.flops,
        "padded_flops": case.padded_flops,
    }
    reference = Reference.of(case)
    right = {}
    for name, function in case.implementations.items():
        # Peers fail in any way, which must not end the run of the others; ours is named at its end.
        row[name] = {}
        try:
            with torch.no_grad():
                _compare(_tensors(function(*case.inputs)), reference.forward)
        except Exception as error:
            row[name]["failed"] = _reason(error)
            continue
        right[name] = function
        try:
            _compare(_run(function, case.inputs, reference.upstream)[1], reference.backward)
        except Exception as error:
            row[name]["backward"] = {"failed": _reason(error)}
    return row, reference, right


def measure(case: Case, time_it: Callable[[Case, Function, Reference, bool], dict[str, Any]]) -> dict[str, Any]:
    """Check every implementation of a case and time those that are right, the backward where its gradients are."""
    row, reference, right = check(case)
    for name, function in right.items():
        try:
            row[name] |= time_it(case, function, reference, not row[name])
        except Exception as error:
            row[name] = {"failed": _reason(error)}
    return row


def time_on_gpu(
    case: Case, function: Function, reference: Reference, with_backward: bool, *, cold: bool, sustained: float
) -> dict[str, Any]:
    """Times by graph replay, and memory, of one implementation that is right; `sustained` of ours is as in `replay_us`."""
    seconds = sustained if function is case.ours else 0.0
    figures = _memory(case, function, reference, with_backward)

    def forward() -> Any:
        with torch.no_grad():
            return function(*case.inputs)

    def backward() -> Callable[[], Any]:
        outputs = _tensors(function(*case.inputs))
        return lambda: torch.autograd.grad(outputs, case.inputs, reference.upstream, retain_graph=True)

    figures["forward"] = replay_us(forward, sustained=seconds)
    if cold:
        figures["forward_cold"] = replay_us(forward, cold=True)
    if with_backward:
        figures["backward"] = replay_us(prepare=backward, sustained=seconds)
        if cold:
            figures["backward_cold"] = replay_us(prepare=backward, cold=True)
    return figures


def _memory(case: Case, function: Function, reference: Reference, with_backward: bool) -> dict[str, Any]:
    """Most memory beyond the inputs, and as a ratio, inputs counted, to inputs and results (gradients are a backward's)."""

    def peak(work: Callable[[], list[Tensor]], inputs: int) -> tuple[int, float]:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        needed = sum(_bytes(x) for x in work())
        most = torch.cuda.max_memory_allocated() - before
        return most, (inputs + most) / (inputs + needed)

    def forward() -> list[Tensor]:
        with torch.no_grad():
            return _tensors(function(*case.inputs))

    inputs = sum(map(_bytes, case.inputs))
    figures: dict[str, Any] = {}
    figures["peak_bytes_forward"], figures["peak_ratio_forward"] = peak(forward, inputs)
    if with_backward:
        inputs += sum(map(_bytes, reference.upstream))
        both = peak(lambda: [x for of in _run(function, case.inputs, reference.upstream) for x in of], inputs)
        figures["peak_bytes_both"], figures["peak_ratio_both"] = both
    return figures


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


@functools.cache
def copy_us(moved: int, cold: bool) -> dict[str, float]:
    """A copy that reads and writes so many bytes together."""
    source = torch.ones(max(moved // 2, 1), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return replay_us(lambda: target.copy_(source), cold=cold)


def measure_on_gpu(case: Case, copy_gb_per_s: float, cold: bool, sustained: float = 0.0) -> dict[str, Any]:
    """Every implementation, a copy, and the time that the bytes need."""
    row = measure(case, functools.partial(time_on_gpu, cold=cold, sustained=sustained))
    ways = {"forward": row["bytes_forward"], "backward": row["bytes_backward"]}
    for name in case.implementations:
        if "forward" in row[name]:
            microseconds = row[name]["forward"]["median"]
            row[name]["gb_per_s"] = row["bytes_forward"] / microseconds / 1e3
            row[name]["tflop_per_s"] = row["flops"] / microseconds / 1e6
    row["ideal_us"] = {way: moved / (ATTAINABLE * copy_gb_per_s) / 1e3 for way, moved in ways.items()}
    row["copy"] = {way: copy_us(moved, False) for way, moved in ways.items()}
    if cold:
        row["copy"] |= {f"{way}_cold": copy_us(moved, True) for way, moved in ways.items()}
    return row


def time_on_host(case: Case, function: Function, reference: Reference, with_backward: bool) -> dict[str, Any]:
    """Host time of eager calls on a small batch."""

    def forward() -> None:
        with torch.no_grad():
            function(*case.inputs)

    figures = {"forward": host_us(forward)}
    if with_backward:
        figures["forward_backward"] = host_us(lambda: _run(function, case.inputs, reference.upstream))
    return figures


def measure_on_cpu(case: Case, seconds: float) -> dict[str, Any]:
    """Every implementation by the wall clock, in turns, so that what else the machine does falls on all alike."""
    row, reference, right = check(case)
    calls: dict[tuple[str, str], Callable[[], Any]] = {}
    for name, function in right.items():
        calls[name, "forward"] = torch.no_grad()(functools.partial(function, *case.inputs))
        if "backward" not in row[name]:
            calls[name, "forward_backward"] = functools.partial(_run, function, case.inputs, reference.upstream)
    times: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    begun, rounds = time.perf_counter(), 0
    while rounds < 6 or time.perf_counter() - begun < seconds:
        for key, call in calls.items():
            start = time.perf_counter()
            call()
            times[key].append((time.perf_counter() - start) * 1e6)
        rounds += 1
    for (name, way), of in times.items():
        # The first call warms up.
        row[name][way] = {**spread(of[1:]), "calls": len(of) - 1}
    return row


def warm(found: dict[str, Part]) -> None:
    """Compile every Triton kernel, ours and the peers', in as many processes as there are cores; Triton keeps them on disk."""
    tasks: dict[tuple[str, str, int], list[Size]] = {}
    for part in found.values():
        for size in part.sizes.values():
            for name in part.cases:
                tasks.setdefault((name, size.dtype, size.d), []).append(size)
    # Products take the longest: first.
    order = sorted(tasks, key=lambda task: ("jagged_out" not in task[0], "bmm" not in task[0]))
    workers = min(os.cpu_count() or 1, 16, len(order))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(warm_case, task[0], tasks[task]): task for task in order}
        for future in as_completed(futures):
            if (error := future.exception()) is not None:
                print(f"warming {futures[future]}: {type(error).__name__}: {error}", flush=True)


def warm_case(name: str, sizes: list[Size]) -> None:
    """Run a case's Triton kernels once, forward and backward."""
    register_peers()
    for size in sizes:
        case = CASES[name](size.workload("cuda"))
        for who in ("jagged", "sll"):
            try:
                outputs = _tensors(case.implementations[who](*case.inputs))
                torch.autograd.grad(outputs, case.inputs, [torch.ones_like(x) for x in outputs])
            except Exception:  # What fails is found and named when it is measured.
                continue
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def register_peers() -> bool:
    """Whether FBGEMM-GPU is installed; its operators are then there."""
    try:
        import fbgemm_gpu.sll  # noqa: F401
    except ImportError:
        return False
    return True


def run(title: str, part: Part, device: str, measured: Callable[[Case], dict[str, Any]]) -> dict[str, Any]:
    """Measure every case at every size of a part; print as it goes."""
    result: dict[str, Any] = {"distinguished_by": part.by, "sizes": {}, "by": {}}
    for key, size in part.sizes.items():
        workload = size.workload(device)
        result["sizes"][key] = {
            **{"samples": size.samples, "lengths": f"uniform on 0..{size.longest}", "declared": workload.longest},
            **{"rows": workload.total, "pairs": workload.pairs, "D": size.d, "T": size.t, "dtype": size.dtype},
        }
        result["by"][key] = {}
        for name in part.cases:
            result["by"][key][name] = row = measured(CASES[name](workload))
            print(f"{title} {key} {name}: {_line(row)}", flush=True)
    return result


def _line(row: dict[str, Any]) -> str:
    def shown(of: Any) -> str | None:
        if not isinstance(of, dict):
            return None
        if "failed" in of:
            return str(of["failed"])
        if "median" in of:
            return f"{of['median']:.1f}"
        ways = {way: shown(of[way]) for way in ("forward", "backward", "forward_backward") if way in of}
        return " / ".join(value for value in ways.values() if value is not None)

    return "; ".join(f"{name} {text}" for name, of in row.items() if (text := shown(of)) and name != "ideal_us") + " us"


def ours_failed(result: dict[str, Any]) -> list[str]:
    """Where our own operator failed or was wrong."""
    found = []
    for title, part in result.items():
        for key, cases in part.get("by", {}).items():
            for name, row in cases.items():
                ours = row.get("jagged", {})
                reason = ours.get("failed") or ours.get("backward", {}).get("failed")
                if reason is not None:
                    found.append(f"{title} {key} {name}: {reason}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", metavar="PART", help=f"of {', '.join(parts(['bf16']))}; cuda alone")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="of the table; the first of the sweeps")
    parser.add_argument("--quick", action="store_true", help="the table in the first dtype alone")
    parser.add_argument("--sustained", type=float, default=2.0, help="seconds of work without a pause, in the table; 0 for none")
    parser.add_argument("--seconds", type=float, default=4.0, help="a case on a CPU")
    options = parser.parse_args()
    device = options.device
    if options.quick:
        options.only, options.dtypes = ["table"], options.dtypes[:1]
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("found no NVIDIA GPU; --device cpu measures the PyTorch implementations")
    found = parts(options.dtypes) if device == "cuda" else CPU_PARTS
    if options.only:
        if not set(options.only) <= set(found):
            parser.error(f"--only: got {' '.join(options.only)}, expected some of {', '.join(found)}")
        found = {name: part for name, part in found.items() if name in options.only}
    if not register_peers():
        print("fbgemm_gpu is not installed: no peers but padding")
    begun = time.perf_counter()

    def elapsed(what: str) -> None:
        print(f"--- {what}: {time.perf_counter() - begun:.0f} s since the start", flush=True)

    if device == "cpu":
        torch.set_num_threads(2)
    else:
        warm(found)
        elapsed("kernels are compiled")
    # What is loaded by now stays; else each collection looks through all of it.
    gc.freeze()
    facts = environment(device)
    print(facts, flush=True)
    result = {"environment": facts, **(other_parts("jagged_ops", facts) if options.only else {})}
    for title, part in found.items():
        if device == "cpu":
            measured = functools.partial(measure_on_cpu, seconds=options.seconds)
        elif title == "host":
            measured = functools.partial(measure, time_it=time_on_host)
        else:
            seconds = options.sustained if title == "table" else 0.0
            measured = functools.partial(measure_on_gpu, copy_gb_per_s=facts["copy_gb_per_s"], cold=part.cold, sustained=seconds)
        former = result.get(title, {}) if options.quick else {}
        result[title] = run(title, part, device, measured)
        for kind in ("sizes", "by"):
            result[title][kind] = {**former.get(kind, {}), **result[title][kind]}
        path = save("jagged_ops", result)
        gc.collect()
        elapsed(f"{title}, saved in {path.relative_to(ROOT)}")
    if failed := ours_failed(result):
        sys.exit("\n".join(["jagged failed:", *failed]))


if __name__ == "__main__":
    main()
