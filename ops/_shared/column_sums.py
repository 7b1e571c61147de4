"""Sums of columns as a Triton kernel: several rows a program, each read once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged.ops._shared import linear
from jagged.ops._shared.launch import Launcher
from jagged.ops._shared.linear import Rows, Summing, Sums
from jagged.ops._shared.matrices import split
from jagged.ops._shared.sizes import cdiv, next_power_of_2

# Elements of a tile, its most columns, warps, and a multiprocessor's programs; the most columns of a tile of parts, which are few
# rows, so that programs come from the columns.
ELEMENTS, COLUMNS, NUM_WARPS, PROGRAMS = 4096, 64, 8, 6
COLUMNS_OF_PARTS = 8


@triton.jit(do_not_specialize=["num_rows", "rows_of_part"])
def column_sums_kernel(
    rows, sums, num_rows, rows_of_part, num_columns, row_stride, column_stride, BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr
):
    """sums[p] is the sum of a part of the rows, of `BLOCK_F` columns, added up in float32."""
    first = tl.program_id(1).to(tl.int64) * rows_of_part
    end = tl.minimum(first + rows_of_part, num_rows)
    column = tl.program_id(0).to(tl.int64) * BLOCK_F + tl.arange(0, BLOCK_F)
    column_exists = column < num_columns
    total = tl.zeros([BLOCK_N, BLOCK_F], tl.float32)
    for start in range(first, end, BLOCK_N):
        row = (start + tl.arange(0, BLOCK_N))[:, None]
        exists = (row < end) & column_exists[None, :]
        total += tl.load(rows + row * row_stride + column[None, :] * column_stride, mask=exists, other=0.0).to(tl.float32)
    sums += tl.program_id(1).to(tl.int64) * num_columns + column
    tl.store(sums, tl.sum(total, 0).to(sums.dtype.element_ty), mask=column_exists)


_launch = Launcher(column_sums_kernel)


def tile(width: int, most: int) -> tuple[int, int]:
    """Return rows and columns of a tile of at most so many columns."""
    columns = min(most, next_power_of_2(width))
    return ELEMENTS // columns, columns


def column_sums(x: Rows, o: Summing) -> Sums:
    """Launch `column_sums_kernel` on the rows, and on the sums of their parts."""
    rows = x.rows
    if not rows.numel():
        return linear.column_sums(x, o)
    num_rows, width = rows.shape
    height, columns = tile(width, COLUMNS)
    num_parts, rows_of_part = split(num_rows, height, cdiv(width, columns), PROGRAMS, rows.device)
    sums = rows.new_empty(width, dtype=o.dtype)
    if num_parts == 1:
        _add(rows, sums, 1, num_rows, COLUMNS)
    else:
        parts = rows.new_empty(num_parts, width, dtype=torch.float32)
        _add(rows, parts, num_parts, rows_of_part, COLUMNS)
        _add(parts, sums, 1, num_parts, COLUMNS_OF_PARTS)
    return Sums(sums)


def _add(rows: Tensor, sums: Tensor, num_parts: int, rows_of_part: int, most_columns: int) -> None:
    num_rows, width = rows.shape
    height, columns = tile(width, most_columns)
    _launch(
        # Columns first, of which there may be more than a grid's second dimension takes.
        (cdiv(width, columns), num_parts),
        rows, sums, num_rows, rows_of_part, width, *rows.stride(), BLOCK_N=height, BLOCK_F=columns, num_warps=NUM_WARPS,
    )  # fmt: skip
