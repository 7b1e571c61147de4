"""Sums with rows of a table as a Triton kernel: one pass, of two dtypes too, that makes no copy of the rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from jagged.ops._shared.launch import Launcher
from jagged.ops._shared.sizes import cdiv
from jagged.ops.elementwise.kernels import block_sizes, sum_rows
from jagged.ops.elementwise.spec import Combined, Lookups, Nothing, Sums, Table, Terms, sum_dtype


@triton.jit(do_not_specialize=["total", "table_rows"])
def add_rows_kernel(
    values, table, places, output, total, table_rows, num_features, row_stride, feature_stride, table_row_stride,
    table_feature_stride, BLOCK_ROWS: tl.constexpr, BLOCK_FEATURES: tl.constexpr,
):  # fmt: skip
    """output[n] = values[n] + table[places[n]]; a row that the table does not have counts as zeros."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    feature = (tl.program_id(1) * BLOCK_FEATURES + tl.arange(0, BLOCK_FEATURES)).to(tl.int64)[None, :]
    row_exists, feature_exists = row < total, feature < num_features
    place = tl.load(places + row, mask=row_exists, other=-1).to(tl.int64)
    found = ((place >= 0) & (place < table_rows))[:, None] & feature_exists
    exists = row_exists[:, None] & feature_exists
    row, place = row[:, None], place[:, None]
    result = tl.load(table + place * table_row_stride + feature * table_feature_stride, mask=found, other=0.0).to(tl.float32)
    if values is not None:
        result += tl.load(values + row * row_stride + feature * feature_stride, mask=exists, other=0.0).to(tl.float32)
    tl.store(output + row * num_features + feature, result.to(output.dtype.element_ty), mask=exists)


_launch_add_rows = Launcher(add_rows_kernel)


def add_rows(x: Lookups, o: Nothing) -> Combined:
    """Launch `add_rows_kernel`."""
    values, table, places = x
    total, (table_rows, num_features) = places.shape[0], table.shape
    output = table.new_empty(total, num_features, dtype=sum_dtype(x))
    if total and num_features:
        block_rows, block_features, num_warps = block_sizes("add_rows", num_features)
        _launch_add_rows(
            (cdiv(total, block_rows), cdiv(num_features, block_features)),
            values, table, places.contiguous(), output, total, table_rows, num_features,
            *(values.stride() if values is not None else (0, 0)), *table.stride(), BLOCK_ROWS=block_rows,
            BLOCK_FEATURES=block_features, num_warps=num_warps,
        )  # fmt: skip
    return Combined(output)


def index_sums(x: Terms, o: Table) -> Sums:
    """Sum the terms of each row, in one order always, by `sum_rows_kernel` on sorted places.

    PyTorch's gradient of a lookup adds up in another order each time.
    """
    narrow = torch.int16 if o.num_rows < 2**15 else torch.int32 if o.num_rows < 2**31 else torch.int64
    places = x.places.long().clamp(-1, o.num_rows).to(narrow)
    places, order = torch.sort(places, stable=True)
    # Those that the table does not have stand before its first row and behind its last.
    firsts = torch.arange(o.num_rows + 1, dtype=narrow, device=places.device)
    sums = x.terms.new_empty(o.num_rows, x.terms.shape[1], dtype=o.dtype)
    sum_rows(x.terms, None, None, torch.searchsorted(places, firsts), None, sums, "copy", order)
    return Sums(sums)
