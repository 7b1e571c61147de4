"""Layer normalisation of many narrow rows beside PyTorch's: forward, and forward and backward.

    python -m benchmarks.layer_norm
    python -m benchmarks.layer_norm --tiles                # elements of a tile, warps and programs, too; nothing is saved
    python -m benchmarks.layer_norm --device cpu           # to try it, few rows; nothing is saved

Rows in float32, as residuals are in mixed precision, or in bfloat16; an output in bfloat16 is what a product reads: PyTorch's is
float32 and cast behind. Microseconds of the GPU by replays of a CUDA graph; `copy_us` is the time of as many bytes at the speed
of a copy, each read or written once: the rows and the output forward; both gradients and the rows backward.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import row_kernels
from benchmarks.common import replay_us
from benchmarks.row_kernels import Case, time_of, times
from jagged.ops.layer_norm import layer_norm

ROWS, WIDTHS = (65_536, 1_048_576), (32, 64, 128, 256, 512)
DTYPES = ((torch.float32, torch.bfloat16), (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16))
TILES = ((1024, 2048, 4096, 8192), (2, 4, 8), (2, 4, 8))


def theirs(x: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
    """PyTorch's, as autocast calls it."""
    return torch.nn.functional.layer_norm(x.float(), x.shape[1:], weight, bias).to(dtype)


def measured(rows: int, width: int, dtypes: tuple[torch.dtype, torch.dtype], device: str, copy: float) -> dict[str, Any]:
    """Both ways, after they were compared."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(rows, width, device=device, generator=generator).to(dtypes[0]).requires_grad_()
    weight, bias = (torch.randn(width, device=device, generator=generator).requires_grad_() for _ in range(2))
    slope = torch.randn(rows, width, device=device, generator=generator).to(dtypes[1])
    ways: dict[str, Callable[[], Tensor]] = {
        "jagged": lambda: layer_norm(x, weight, bias, dtype=dtypes[1]),
        "torch": lambda: theirs(x, weight, bias, dtypes[1]),
    }
    both = {name: (way(), torch.autograd.grad(way(), (x, weight, bias), slope)) for name, way in ways.items()}
    torch.testing.assert_close(both["jagged"][0], both["torch"][0])
    for ours, other in zip(both["jagged"][1], both["torch"][1], strict=True):
        torch.testing.assert_close(ours, other, atol=1e-4 * rows**0.5, rtol=2e-2)
    moved = x.numel() * (x.itemsize + slope.itemsize), x.numel() * (2 * x.itemsize + slope.itemsize)
    row: dict[str, Any] = {"copy_us": {"forward": moved[0] / copy / 1e3, "both": sum(moved) / copy / 1e3}}
    for name, way in ways.items():
        passes = {
            "forward": way,
            "both": lambda way=way: torch.autograd.grad(way(), (x, weight, bias), slope),
        }  # type: ignore[dict-item]
        row[name] = {of: time_of(work, device) for of, work in passes.items()}
    return row | {"times": times(row, ("forward", "both"))}


def sweep_of(rows: int, width: int) -> None:
    """Print the times of other tiles."""
    kernels: Any = importlib.import_module("jagged.ops.layer_norm.kernels")
    x, slope = torch.randn(rows, width, device="cuda"), torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
    weight, bias = torch.randn(2, width, device="cuda")
    leaves = [of.requires_grad_() for of in (x, weight, bias)]
    for elements, warps, programs in itertools.product(*TILES):
        kernels.ELEMENTS = kernels.ELEMENTS_BACKWARD = elements
        kernels.NUM_WARPS = kernels.NUM_WARPS_BACKWARD = warps
        kernels.PROGRAMS = programs

        def backward() -> Callable[[], Any]:
            output = layer_norm(*leaves, dtype=torch.bfloat16)
            return lambda: torch.autograd.grad(output, leaves, slope, retain_graph=True)

        forward = replay_us(lambda: layer_norm(*leaves, dtype=torch.bfloat16))["median"]
        behind = replay_us(prepare=backward)["median"]
        print(
            f"{rows:,} x {width}, {elements} elements, {warps} warps, {programs} programs: {forward:.1f}, {behind:.1f} us",
            flush=True,
        )


def sweep() -> None:
    """Print them for all widths."""
    for width in WIDTHS:
        sweep_of(ROWS[1], width)


def cases(is_cuda: bool) -> Mapping[str, Case]:
    """By rows, width and dtypes."""
    chosen = itertools.product(ROWS if is_cuda else (1_000,), WIDTHS, DTYPES)
    return {
        f"{rows:,} x {width}, {' to '.join(str(of).removeprefix('torch.') for of in dtypes)}": partial(
            measured, rows, width, dtypes
        )
        for rows, width, dtypes in chosen
    }


def main() -> None:
    """Measure all cases, and save what came out."""
    row_kernels.main("layer_norm", __doc__, cases, sweep, lambda row: "")


if __name__ == "__main__":
    main()
