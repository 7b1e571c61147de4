"""The linear layer of many rows beside PyTorch's: forward, both passes, and the gradient of the bias by itself.

    python -m benchmarks.linear
    python -m benchmarks.linear --tiles                    # elements of a tile, warps and programs, too; nothing is saved
    python -m benchmarks.linear --device cpu               # to try it, few rows; nothing is saved

Microseconds of the GPU by replays of a CUDA graph. `bias` is the gradient of the bias alone, as each way makes it: PyTorch's is
`Tensor.sum`. `read_us` is the time of as many bytes as the gradient of the output has at the speed of a copy.
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
from jagged.ops._shared.linear import COLUMN_SUMS, Rows, Summing
from jagged.ops.linear import linear

ROWS, WIDTHS = (1_024, 8_192, 65_536, 614_400, 2_457_600), ((64, 64), (64, 192), (256, 256))
DTYPES = (torch.bfloat16, torch.float32)
TILES = ((2048, 4096, 8192), (32, 64, 128), (4, 8), (4, 6, 8, 12))


def column_sums(rows: Tensor) -> Tensor:
    """Ours, in the dtype of the rows."""
    return COLUMN_SUMS(Rows(rows), Summing(rows.dtype)).sums


def measured(rows: int, widths: tuple[int, int], dtype: torch.dtype, device: str, copy: float) -> dict[str, Any]:
    """Both ways, after they were compared."""
    wide, out = widths
    generator = torch.Generator(device).manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator).to(dtype)

    x, slope, weight = drawn(rows, wide).requires_grad_(), drawn(rows, out), (drawn(out, wide) / wide**0.5).requires_grad_()
    leaves = x, weight, drawn(out).requires_grad_()
    ways: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor], Tensor]]] = {
        "jagged": (linear, column_sums),
        "torch": (torch.nn.functional.linear, lambda of: of.sum(0)),
    }
    both = {name: (layer(*leaves), *torch.autograd.grad(layer(*leaves), leaves, slope)) for name, (layer, _) in ways.items()}
    for ours, theirs in zip(both["jagged"], both["torch"], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3 * rows**0.5, rtol=2e-2)
    exact = sum(part.double().sum(0) for part in slope.split(2**16))
    row: dict[str, Any] = {"read_us": slope.numel() * slope.itemsize / copy / 1e3}
    for name, (layer, sums) in ways.items():
        error = (sums(slope).double() - exact).abs().max()
        passes: dict[str, Callable[[], Any]] = {
            "forward": lambda layer=layer: layer(*leaves),
            "both": lambda layer=layer: torch.autograd.grad(layer(*leaves), leaves, slope),
            "bias": lambda sums=sums: sums(slope),
        }
        row[name] = {of: time_of(work, device) for of, work in passes.items()} | {"bias_error": float(error)}
    return row | {"times": times(row, ("forward", "both", "bias"))}


def sweep_of(rows: int, width: int, dtype: torch.dtype) -> None:
    """Print the times of other tiles, the shortest first."""
    kernels: Any = importlib.import_module("jagged.ops._shared.column_sums")
    slope = torch.randn(rows, width, device="cuda").to(dtype)
    found = []
    for elements, columns, warps, programs in itertools.product(*TILES):
        kernels.ELEMENTS, kernels.COLUMNS, kernels.NUM_WARPS, kernels.PROGRAMS = elements, columns, warps, programs
        time = replay_us(lambda: column_sums(slope))["median"]
        found.append((time, f"{elements} elements, {columns} columns, {warps} warps, {programs} programs"))
    print(f"{rows:,} x {width}, {dtype}", *(f"  {time:.1f} us: {of}" for time, of in sorted(found)[:8]), sep="\n", flush=True)


def sweep() -> None:
    """Print them for some sizes."""
    for rows, width, dtype in itertools.product(ROWS[2:4], (64, 192), DTYPES):
        sweep_of(rows, width, dtype)


def cases(is_cuda: bool) -> Mapping[str, Case]:
    """By rows, widths and dtype."""
    return {
        f"{rows:,} x {widths[0]} to {widths[1]}, {str(dtype).removeprefix('torch.')}": partial(measured, rows, widths, dtype)
        for rows, widths, dtype in itertools.product(ROWS if is_cuda else (1_000,), WIDTHS, DTYPES)
    }


def main() -> None:
    """Measure all cases, and save what came out."""
    row_kernels.main("linear", __doc__, cases, sweep, lambda row: f"; to read {row['read_us']:.1f} us")


if __name__ == "__main__":
    main()
