"""How long each kernel of embedding bags takes in a pass, with constants as they are or others, on the GPU at hand.

    python -m benchmarks.embedding_kernels A E mlperf:8192 --way forward
    python -m benchmarks.embedding_kernels D --optimizer adam --set counting.BLOCK_PLACES=2048 launch.FEWEST_TURNS=12

Cases are shapes of `python -m benchmarks.embedding_bags`, of 512 samples where no number follows. Constants are those of
modules of `jagged.ops.embedding_bag.triton`, integers that another module imports by name in each of them. Rows or outputs are
checked first. Times are microseconds: the pass by replays of a graph, and of it the kernels by a profile. Nothing is saved:
what is faster goes into the module, and the benchmark then measures it.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from typing import Any

import torch
import triton.language as tl

from benchmarks.common import replay_us
from benchmarks.embedding_cases import SHAPES, Ours, Workload, check_output, check_rows
from jagged.ops.embedding_bag.optimizers import STATES, Kind

CALLS = 5
# What all names of our kernels have.
COMMON = "embedding_bags_", "_kernel"


def case_of(text: str) -> tuple[str, int]:
    """Read `shape[:samples]`."""
    shape, _, samples = text.partition(":")
    if shape not in SHAPES or not (samples or "512").isdigit():
        raise argparse.ArgumentTypeError(f"{text!r}: expected SHAPE or SHAPE:SAMPLES of shapes {', '.join(SHAPES)}")
    return shape, int(samples or 512)


def setting_of(text: str) -> tuple[str, str, int]:
    """Read `module.NAME=value`."""
    name, _, value = text.partition("=")
    module, _, constant = name.rpartition(".")
    if not module or not value.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r}: expected module.NAME=NUMBER")
    return module, constant, int(value)


def change(module: str, name: str, value: int) -> None:
    """Give a constant of `jagged.ops.embedding_bag.triton` another value, before any kernel is compiled.

    Raises:
        ValueError: no such module, or no such integer in it.
    """
    try:
        of = importlib.import_module(f"jagged.ops.embedding_bag.triton.{module}")
    except ModuleNotFoundError:
        raise ValueError(f"--set {module}.{name}: found no module {module} in jagged.ops.embedding_bag.triton") from None
    old = getattr(of, name, None)
    if not isinstance(old.value if isinstance(old, tl.constexpr) else old, int):
        raise ValueError(f"--set {module}.{name}: expected the name of an integer of that module, found {old!r}")
    setattr(of, name, tl.constexpr(value) if isinstance(old, tl.constexpr) else value)


def kernels_us(call: Callable[[], Any]) -> dict[str, float]:
    """Microseconds of each kernel in a call, the longest first."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
    times = {event.key: event.device_time_total / CALLS for event in profile.key_averages() if event.device_time_total}
    return dict(sorted(times.items(), key=lambda item: -item[1]))


def measure(shape: str, samples: int, way: str, kind: Kind | None) -> tuple[float, dict[str, float]]:
    """Return microseconds of a pass that was right, and of its kernels."""
    w = Workload(shape, [samples], "cuda")
    ours, batch = Ours(w, kind), w.batches[0]
    output = ours.forward(batch)
    check_output(w, output.detach())
    if way == "forward":
        call: Callable[[], Any] = lambda: ours.forward(batch)  # noqa: E731
    else:
        grad = w.gradient(samples)
        ours.backward(output, grad)
        check_rows(w, grad, kind, ours.table)
        call = lambda: ours.backward(output, grad)  # noqa: E731
    return replay_us(call)["median"], kernels_us(call)


def line(case: tuple[str, int], total: float, kernels: dict[str, float]) -> str:
    """Words for a case's times: the pass, then its kernels."""
    names = [name.removeprefix(COMMON[0]).removesuffix(COMMON[1])[:40] for name in kernels]
    said = ", ".join(f"{name} {us:.1f}" for name, us in zip(names, kernels.values(), strict=True) if us >= total / 200)
    return f"{case[0]}, {case[1]:,} samples: {total:.1f} us: {said}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", type=case_of, metavar="SHAPE[:SAMPLES]")
    parser.add_argument("--way", choices=("forward", "backward"), default="backward")
    parser.add_argument("--optimizer", choices=(*STATES, "none"), default="sgd", help="in the backward pass; none: gradients")
    parser.add_argument("--set", nargs="+", type=setting_of, default=[], metavar="MODULE.NAME=NUMBER", dest="settings")
    options = parser.parse_args()
    try:
        for setting in options.settings:
            change(*setting)
    except ValueError as error:
        parser.error(str(error))
    if not torch.cuda.is_available():
        parser.error("kernels are measured on a GPU, and PyTorch sees none here")
    for case in options.cases:
        kind = None if options.optimizer == "none" else options.optimizer
        print(line(case, *measure(*case, options.way, kind)), flush=True)


if __name__ == "__main__":
    main()
