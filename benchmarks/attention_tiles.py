"""How long one kernel of attention takes with other tiles: what rows of its table are chosen by, on the GPU at hand.

    python -m benchmarks.attention_tiles --list                                # cases
    python -m benchmarks.attention_tiles "256 x 1024 x 4 x 64: both biases" dq # tiles like the shipped but for one thing
    python -m benchmarks.attention_tiles "256 x 1024 x 4 x 64: both biases" dq --tiles 64,16,4,3,168 64,32,8,2

Tiles are as in `jagged/ops/attention/triton/configurations.py`: rows of its own, rows that it visits, warps, stages, and at
most so many registers; TMA as the shipped have it. Times are the kernel's alone, from a profile; the other kernels keep their
tiles. Nothing is saved: what is faster goes into the table, and the benchmark then measures it.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.attention import parts
from benchmarks.attention_cases import Size, Workload, ours
from benchmarks.common import spread
from jagged.ops.attention.triton import launch
from jagged.ops.attention.triton.configurations import Configuration, Tiles

KERNELS = {"forward": "attention_forward_kernel", "dq": "attention_backward_dq_kernel", "dkv": "attention_backward_dkv_kernel"}
PROFILES, CALLS = 5, 4


def sizes() -> dict[str, Size]:
    """Every case of the benchmark by name."""
    return {name: size for part in parts().values() for name, (size, _) in part.items()}


def tiles_of(text: str) -> Tiles:
    """Read `own,visit,warps,stages[,registers]`."""
    numbers = [int(number) for number in text.split(",")]
    if not 4 <= len(numbers) <= 5:
        raise argparse.ArgumentTypeError(f"{text!r} has {len(numbers)} numbers; expected own,visit,warps,stages[,registers]")
    return Tiles(*numbers)


def neighbours(tiles: Tiles) -> list[Tiles]:
    """Return tiles that differ from these in one thing, or in the limit of registers."""
    changed = [tiles._replace(own=tiles.own * 2), tiles._replace(own=tiles.own // 2)]
    changed += [tiles._replace(visit=tiles.visit * 2), tiles._replace(visit=tiles.visit // 2)]
    changed += [tiles._replace(num_warps=warps) for warps in (2, 4, 8)]
    changed += [tiles._replace(num_stages=stages) for stages in (2, 3, 4)]
    changed += [tiles._replace(max_registers=registers) for registers in (None, 128, 168)]
    return [x for x in dict.fromkeys(changed) if x != tiles and 16 <= x.own <= 128 and 16 <= x.visit <= 128]


@contextlib.contextmanager
def replaced(kernel: str, tiles: Tiles | None) -> Iterator[list[Tiles]]:
    """Give one kernel other tiles, unless they are None; the list gets those that would have been chosen."""
    configuration, chosen = launch.configuration, []

    def choose(*arguments: Any, **options: Any) -> Configuration:
        own = configuration(*arguments, **options)
        chosen.append(getattr(own, kernel))
        return own if tiles is None else own._replace(**{kernel: tiles})

    launch.configuration = choose
    try:
        yield chosen
    finally:
        launch.configuration = configuration


def kernel_us(call: Callable[[], Any], name: str) -> dict[str, float]:
    """Microseconds of a kernel: median, smallest and largest of several profiles."""
    call()
    torch.cuda.synchronize()
    means = []
    for _ in range(PROFILES):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(CALLS):
                call()
            torch.cuda.synchronize()
        means += [event.device_time_total / event.count for event in profile.key_averages() if event.key == name]
    if not means:
        raise RuntimeError(f"{name} was not launched: on this GPU the case takes kernels of their own, which have no such tiles")
    return spread(means)


def measure(size: Size, kernel: str, candidates: list[Tiles]) -> Iterator[tuple[Tiles, dict[str, float] | str]]:
    """Time the shipped tiles, then the candidates, or the shipped ones' neighbours; a reason in place of a time of what fails."""
    case = ours(Workload(size, "cuda"))
    call = case.forward if kernel == "forward" else case.backward()
    with replaced(kernel, None) as chosen:
        shipped_us = kernel_us(call, KERNELS[kernel])
    shipped = chosen[-1]
    yield shipped, shipped_us
    for tiles in [x._replace(tma=shipped.tma) for x in candidates] or neighbours(shipped):
        try:
            with replaced(kernel, tiles):
                yield tiles, kernel_us(call, KERNELS[kernel])
        except Exception as error:  # whatever a compiler says of tiles that it cannot have
            yield tiles, f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:100]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="names of cases")
    parser.add_argument("case", nargs="?", choices=sizes(), metavar="case", help="of `python -m benchmarks.attention`")
    parser.add_argument("kernel", nargs="?", choices=KERNELS)
    parser.add_argument("--tiles", nargs="+", type=tiles_of, default=[], metavar="OWN,VISIT,WARPS,STAGES[,REGISTERS]")
    options = parser.parse_args()
    if options.list:
        print("\n".join(sizes()))
        return
    if options.case is None or options.kernel is None:
        parser.error("a case and a kernel are needed; --list names the cases")
    if not torch.cuda.is_available():
        parser.error("tiles are measured on a GPU, and PyTorch sees none here")
    shipped = None
    for tiles, us in measure(sizes()[options.case], options.kernel, options.tiles):
        named = ",".join(str(number) for number in tiles[:5] if number is not None)
        if isinstance(us, str):
            print(f"{named:18} {us}", flush=True)
            continue
        shipped = shipped or us["median"]
        of_shipped = us["median"] / shipped
        print(f"{named:18} {us['median']:8.1f} us ({us['min']:.1f} to {us['max']:.1f})  {of_shipped:.2f} of shipped", flush=True)


if __name__ == "__main__":
    main()
