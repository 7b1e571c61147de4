"""Sums, products and differences as Triton kernels: each element read once and written once.

A program stays in one sample. Its sample is found by one search of scalars, and everything else is then arithmetic: addresses
are one base plus multiples of a row's stride, so accesses are 16 bytes wide, and an operand of one row a sample is read once a
tile. A search for each row, which would leave no tile half empty, reads that operand again for every row.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged.ops._shared.device import find_tile, load_segment, pairs_before, rounded_product
from jagged.ops._shared.kernels import pair_starts
from jagged.ops._shared.launch import Launcher
from jagged.ops._shared.sizes import cdiv, next_power_of_2
from jagged.ops.elementwise.spec import (
    Activating,
    Collected,
    Collection,
    Combination,
    Combined,
    Differences,
    Factors,
    Hidden,
    Operands,
    Result,
    Scores,
    Total,
)


class Configuration(NamedTuple):
    """Elements of a tile, the most features and rows it may have, the most warps that share it, and loads under way at a time."""

    elements: int
    features: int
    rows: int
    num_warps: int
    num_stages: int = 1


# Nothing else decides how the kernels are launched. `sum_rows` walks over a chunk of a sample, tile by tile.
CONFIGURATIONS = {
    "combine": Configuration(elements=8192, features=1024, rows=64, num_warps=8),
    "cross": Configuration(elements=4096, features=512, rows=64, num_warps=8),
    "add_rows": Configuration(elements=4096, features=512, rows=64, num_warps=8),
    "to_rows": Configuration(elements=8192, features=1024, rows=64, num_warps=8),
    "sum_rows": Configuration(elements=2048, features=256, rows=64, num_warps=2, num_stages=3),
    "sum_parts": Configuration(elements=4096, features=64, rows=64, num_warps=4),
}
# Rows that one program sums up; longer samples are split.
CHUNK = 256
# Rows and columns of a tile of pairs: addresses that stay in registers are what larger ones pay with fewer programs at once.
PAIR_ROWS, PAIR_COLUMNS, PAIR_WARPS = 32, 32, 4


@functools.cache
def block_sizes(kernel: str, num_features: int) -> tuple[int, int, int]:
    """Return rows, features and warps of a kernel's tile for a number of features."""
    tile = CONFIGURATIONS[kernel]
    block_features = min(next_power_of_2(num_features), tile.features)
    # Odd widths load element by element and would spill: half of it.
    elements = tile.elements if num_features % 16 == 0 else tile.elements // 2
    block_rows = max(1, min(elements // block_features, tile.rows))
    return block_rows, block_features, max(1, min(tile.num_warps, block_rows * block_features // 512))


@triton.jit
def widened(x):
    """Return numbers as they are computed with: integers as they are, others in float32."""
    return x if x.dtype.is_int() else x.to(tl.float32)


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """Return relu, silu or (exact) gelu of `x`. NaN stays NaN."""
    if ACTIVATION == "relu":
        return tl.where(x < 0, 0.0, x)
    if ACTIVATION == "silu":
        return x * tl.sigmoid(x)
    return x * (0.5 + 0.5 * tl.erf(x * 0.7071067811865476))


@triton.jit
def activation_slope(x, ACTIVATION: tl.constexpr):
    """Return the derivative of an activation at `x`; of relu, where its output is `x`."""
    if ACTIVATION == "relu":
        return tl.where(x <= 0, 0.0, 1.0)
    if ACTIVATION == "silu":
        gate = tl.sigmoid(x)
        return gate * (1 + x * (1 - gate))
    # The normal distribution and its density.
    return 0.5 + 0.5 * tl.erf(x * 0.7071067811865476) + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)


@triton.jit(do_not_specialize=["total", "num_samples", "length"])
def combine_kernel(
    values, dense, offsets, output, total, num_samples, length, num_features, row_stride, feature_stride,
    dense_sample_stride, dense_row_stride, dense_feature_stride, OPERATION: tl.constexpr, PER_ROW: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_FEATURES: tl.constexpr,
):  # fmt: skip
    """output[offsets[b] + p] = values[offsets[b] + p] combined with dense[b], or dense[b, p], or 0 past the dense rows."""
    sample, start, sample_length, first = find_tile(offsets, tl.program_id(0), num_samples, total, BLOCK_ROWS)
    if first >= sample_length:
        return
    position = first + tl.arange(0, BLOCK_ROWS)
    feature = (tl.program_id(1) * BLOCK_FEATURES + tl.arange(0, BLOCK_FEATURES)).to(tl.int64)
    feature_exists = (feature < num_features)[None, :]
    exists = (position < sample_length)[:, None] & feature_exists
    row = (start + position)[:, None]
    dense += sample * dense_sample_stride + feature[None, :] * dense_feature_stride
    if PER_ROW:
        filled = exists & (position < length)[:, None]
        tile = widened(tl.load(dense + position[:, None] * dense_row_stride, mask=filled, other=0))
    else:
        tile = widened(tl.load(dense, mask=feature_exists, other=0))
        tile = tl.broadcast_to(tile, (BLOCK_ROWS, BLOCK_FEATURES))
    if OPERATION != "repeat":
        x = widened(tl.load(values + row * row_stride + feature[None, :] * feature_stride, mask=exists, other=0))
        if OPERATION == "mul":
            tile *= x
        else:
            tile += x
            if OPERATION != "add":
                tile = activated(tile, OPERATION)
    tl.store(output + row * num_features + feature[None, :], tile.to(output.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["total", "length"])
def to_rows_kernel(
    values, factor, offsets, dense, total, length, num_features, row_stride, feature_stride, factor_row_stride,
    factor_feature_stride, HAS_FACTOR: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_FEATURES: tl.constexpr,
):  # fmt: skip
    """dense[b, p] = values[offsets[b] + p] (times its factor), or 0 where sample b has no row p."""
    tiles = tl.cdiv(length, BLOCK_ROWS)
    sample = (tl.program_id(0) // tiles).to(tl.int64)
    position = tl.program_id(0) % tiles * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    feature = (tl.program_id(1) * BLOCK_FEATURES + tl.arange(0, BLOCK_FEATURES)).to(tl.int64)[None, :]
    start, end = load_segment(offsets, sample, total)
    row = (start + position)[:, None]
    exists = (position < length)[:, None] & (feature < num_features)
    filled = exists & (row < end)
    tile = tl.load(values + row * row_stride + feature * feature_stride, mask=filled, other=0.0)
    if HAS_FACTOR:
        other = tl.load(factor + row * factor_row_stride + feature * factor_feature_stride, mask=filled, other=0.0)
        tile = (tile.to(tl.float32) * other.to(tl.float32)).to(dense.dtype.element_ty)
    tl.store(dense + (sample * length + position)[:, None] * num_features + feature, tile, mask=exists)


@triton.jit(do_not_specialize=["total", "num_samples"])
def sum_rows_kernel(
    values, factor, context, offsets, order, terms, sums, parts, total, num_samples, num_features, row_stride, feature_stride,
    factor_row_stride, factor_feature_stride, context_row_stride, context_feature_stride, OPERATION: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_FEATURES: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Sum of a chunk of a sample's rows: as they are ("copy"), times their factors ("mul"), or gradients of an activation.

    With an `order` a sample's rows are values[order[start]] .. values[order[end - 1]].

    Gradients are also stored, in `terms`; there `factor` is what the activation saved, and sample b's context was added to it.

    A sample of c > 1 chunks keeps its sums in the parts 2 * (start // CHUNK) .. + c - 1. No other sample has these: the next one
    starts more than (c - 1) * CHUNK rows later, hence at a part at least 2 * (c - 1) >= c further. The last chunk begins below
    `total`, so start // CHUNK + c - 1 <= (total - 1) // CHUNK, and no part lies past 2 * ((total - 1) // CHUNK).
    """
    sample, start, length, first = find_tile(offsets, tl.program_id(0), num_samples, total, CHUNK)
    # An empty sample has one program, for its zeros.
    if (first >= length) & (first > 0):
        return
    feature = (tl.program_id(1) * BLOCK_FEATURES + tl.arange(0, BLOCK_FEATURES)).to(tl.int64)[None, :]
    feature_exists = feature < num_features
    values += feature * feature_stride
    if OPERATION != "copy":
        factor += feature * factor_feature_stride
    if (OPERATION == "silu") | (OPERATION == "gelu"):
        shift = tl.load(
            context + sample * context_row_stride + feature * context_feature_stride, mask=feature_exists, other=0.0
        ).to(tl.float32)
    total_sum = tl.zeros((BLOCK_ROWS, BLOCK_FEATURES), tl.float32)
    end = tl.minimum(first + CHUNK, length)
    for begin in tl.range(first, end, BLOCK_ROWS, num_stages=NUM_STAGES):
        position = begin + tl.arange(0, BLOCK_ROWS)
        row = (start + position)[:, None]
        exists = (position < end)[:, None] & feature_exists
        if order is not None:
            row = tl.load(order + row, mask=(position < end)[:, None], other=0)
        term = tl.load(values + row * row_stride, mask=exists, other=0.0).to(tl.float32)
        if OPERATION != "copy":
            other = tl.load(factor + row * factor_row_stride, mask=exists, other=0.0).to(tl.float32)
            if OPERATION != "mul":
                if OPERATION != "relu":
                    other += shift
                other = activation_slope(other, OPERATION)
            term = rounded_product(term, other)
            if OPERATION != "mul":
                tl.store(terms + row * num_features + feature, term.to(terms.dtype.element_ty), mask=exists)
        total_sum += term
    result = tl.sum(total_sum, 0)[None, :]
    if length <= CHUNK:
        tl.store(sums + sample * num_features + feature, result.to(sums.dtype.element_ty), mask=feature_exists)
    else:
        part = 2 * (start // CHUNK) + first // CHUNK
        tl.store(parts + part * num_features + feature, result, mask=feature_exists)


@triton.jit(do_not_specialize=["total"])
def sum_parts_kernel(
    parts, offsets, sums, total, num_features, CHUNK: tl.constexpr, BLOCK_PARTS: tl.constexpr, BLOCK_FEATURES: tl.constexpr
):  # fmt: skip
    """Sum of the parts of a sample of several chunks."""
    sample = tl.program_id(0).to(tl.int64)
    start, end = load_segment(offsets, sample, total)
    length = end - start
    if length <= CHUNK:
        return
    feature = (tl.program_id(1) * BLOCK_FEATURES + tl.arange(0, BLOCK_FEATURES)).to(tl.int64)[None, :]
    feature_exists = feature < num_features
    first_part = 2 * (start // CHUNK)
    num_parts = tl.cdiv(length, CHUNK)
    total_sum = tl.zeros((BLOCK_PARTS, BLOCK_FEATURES), tl.float32)
    for begin in range(0, num_parts, BLOCK_PARTS):
        part = begin + tl.arange(0, BLOCK_PARTS).to(tl.int64)[:, None]
        total_sum += tl.load(
            parts + (first_part + part) * num_features + feature, mask=(part < num_parts) & feature_exists, other=0.0
        )
    result = tl.sum(total_sum, 0)[None, :]
    tl.store(sums + sample * num_features + feature, result.to(sums.dtype.element_ty), mask=feature_exists)


@triton.jit
def first_pair_of(offsets, starts, sample, length, total):
    """Return where a sample's block of pairs begins (int64), and its length, or 0 where wrong offsets put the block outside.

    Without `starts` the pairs before it are added up here.
    """
    first_pair = pairs_before(offsets, offsets, sample, IS_SQUARE=True) if starts is None else tl.load(starts + sample)
    return first_pair, tl.where((first_pair < 0) | (first_pair + length * length > total), 0, length)


@triton.jit(do_not_specialize=["num_rows", "num_samples", "total"])
def pairwise_difference_kernel(
    values, offsets, starts, output, num_rows, num_samples, total, stride, INDEX: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some rows of a sample's block of pairs. Blocks begin anywhere, so their rows are stored element by element."""
    sample, start, length, first = find_tile(offsets, tl.program_id(0), num_samples, num_rows, BLOCK_ROWS)
    if first >= length:
        return
    first_pair, length = first_pair_of(offsets, starts, sample, length, total)
    output += first_pair + first * length
    length, left = length.to(INDEX), (length - first).to(INDEX)
    row = tl.arange(0, BLOCK_ROWS)[:, None]
    column = tl.arange(0, BLOCK_COLUMNS)[None, :]
    row_exists = row < left
    of_rows = widened(tl.load(values + (start + first) * stride + row.to(INDEX) * stride, mask=row_exists, other=0))
    values += start * stride
    place = row * length + column
    for begin in range(0, length, BLOCK_COLUMNS):
        exists = column < length - begin
        of_columns = widened(tl.load(values + column.to(INDEX) * stride, mask=exists, other=0))
        tl.store(output + place, (of_rows - of_columns).to(output.dtype.element_ty), mask=row_exists & exists)
        values += tl.cast(stride, tl.int64) * BLOCK_COLUMNS
        output += BLOCK_COLUMNS


@triton.jit(do_not_specialize=["num_rows", "num_samples", "total"])
def pairwise_difference_backward_kernel(
    grad, offsets, starts, grad_values, num_rows, num_samples, total, stride, INDEX: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sums of some rows of a sample's block of pairs, less the sums of the same columns; each goes over the block once."""
    sample, start, length, first = find_tile(offsets, tl.program_id(0), num_samples, num_rows, BLOCK_ROWS)
    if first >= length:
        return
    first_pair, length = first_pair_of(offsets, starts, sample, length, total)
    rows = grad + (first_pair + first * length) * stride
    columns = grad + (first_pair + first) * stride
    grad_values += start + first
    step = length * stride * BLOCK_COLUMNS
    length, left = length.to(INDEX), (length - first).to(INDEX)
    row = tl.arange(0, BLOCK_ROWS)
    other = tl.arange(0, BLOCK_COLUMNS)
    row_exists = row < left
    in_rows = (row[:, None] * length + other[None, :]) * stride
    in_columns = (other[:, None] * length + row[None, :]) * stride
    of_rows = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    of_columns = tl.zeros((BLOCK_COLUMNS, BLOCK_ROWS), tl.float32)
    for begin in range(0, length, BLOCK_COLUMNS):
        exists = other < length - begin
        of_rows += tl.load(rows + in_rows, mask=row_exists[:, None] & exists[None, :], other=0.0).to(tl.float32)
        of_columns += tl.load(columns + in_columns, mask=exists[:, None] & row_exists[None, :], other=0.0).to(tl.float32)
        rows += tl.cast(stride, tl.int64) * BLOCK_COLUMNS
        columns += step
    tl.store(grad_values + row, tl.sum(of_rows, 1) - tl.sum(of_columns, 0), mask=row_exists)


_launch_combine = Launcher(combine_kernel)
_launch_to_rows = Launcher(to_rows_kernel)
_launch_sum_rows = Launcher(sum_rows_kernel)
_launch_sum_parts = Launcher(sum_parts_kernel)
_launch_pairwise_difference = Launcher(pairwise_difference_kernel)
_launch_pairwise_difference_backward = Launcher(pairwise_difference_backward_kernel)


def combine(x: Operands, o: Combination) -> Combined:
    """Launch `combine_kernel`; no values repeat the dense rows as samples have them."""
    total, operation = o
    return Combined(_combine(*x, total, "repeat" if x.values is None else operation))


def activate(x: Hidden, o: Activating) -> Combined:
    """Launch `combine_kernel`."""
    return Combined(_combine(*x, x.values.shape[0], o.activation))


def _combine(values: Tensor | None, dense: Tensor, offsets: Tensor, total: int, operation: str) -> Tensor:
    (_, *length, num_features), strides = dense.shape, dense.stride()
    num_samples = offsets.shape[0] - 1
    output = dense.new_empty(total, num_features)
    if total and num_features and num_samples:
        block_rows, block_features, num_warps = block_sizes("combine", num_features)
        row_stride, feature_stride = (0, 0) if values is None else values.stride()
        _launch_combine(
            (total // block_rows + num_samples, cdiv(num_features, block_features)),
            values, dense, offsets.contiguous(), output, total, num_samples, length[0] if length else 1, num_features,
            row_stride, feature_stride, strides[0], strides[1], strides[-1], OPERATION=operation, PER_ROW=bool(length),
            BLOCK_ROWS=block_rows, BLOCK_FEATURES=block_features, num_warps=num_warps,
        )  # fmt: skip
    return output


def collect(x: Factors, o: Collection) -> Collected:
    """Launch `to_rows_kernel` for `[B, length, F]`, or sum each sample's rows."""
    values, factor, offsets = x
    (length,) = o
    num_samples, (total, num_features) = offsets.shape[0] - 1, values.shape
    if length is None:
        sums = values.new_empty(num_samples, num_features)
        sum_rows(values, factor, None, offsets, None, sums, "copy" if factor is None else "mul")
        return Collected(sums)
    dense = values.new_empty(num_samples, length, num_features)
    if dense.numel():
        block_rows, block_features, num_warps = block_sizes("to_rows", num_features)
        _launch_to_rows(
            (num_samples * cdiv(length, block_rows), cdiv(num_features, block_features)),
            values, factor, offsets.contiguous(), dense, total, length, num_features, *values.stride(),
            *(factor.stride() if factor is not None else (0, 0)), HAS_FACTOR=factor is not None, BLOCK_ROWS=block_rows,
            BLOCK_FEATURES=block_features, num_warps=num_warps,
        )  # fmt: skip
    return Collected(dense)


def activate_backward(
    grads: Combined, x: Hidden, out: Combined, o: Activating, wanted: Mapping[str, torch.dtype]
) -> dict[str, Tensor]:
    """Launch `sum_rows_kernel` over the gradients of an activation, which it stores too."""
    grad = grads.output
    terms, sums = grad.new_empty(*grad.shape), grad.new_empty(*x.context.shape)
    saved = out.output if o.activation == "relu" else x.values
    sum_rows(grad, saved, x.context, x.offsets, terms, sums, o.activation)
    found = {"values": terms, "context": sums}
    return {name: found[name] for name in wanted}


def sum_rows(
    values: Tensor,
    factor: Tensor | None,
    context: Tensor | None,
    offsets: Tensor,
    terms: Tensor | None,
    sums: Tensor,
    operation: str,
    order: Tensor | None = None,
) -> None:
    """Launch `sum_rows_kernel` and, where samples may be long, `sum_parts_kernel`."""
    if not sums.numel():
        return
    (num_samples, num_features), total = sums.shape, values.shape[0]
    offsets = offsets.contiguous()
    # One row where no sample can have a second chunk: the kernel is the same for all batches.
    parts = sums.new_empty(2 * (max(total - 1, 0) // CHUNK) + 1, num_features, dtype=torch.float32)
    block_rows, block_features, num_warps = block_sizes("sum_rows", num_features)
    _launch_sum_rows(
        (total // CHUNK + num_samples, cdiv(num_features, block_features)),
        values, factor, context, offsets, order, terms, sums, parts, total, num_samples, num_features, *values.stride(),
        *(factor.stride() if factor is not None else (0, 0)), *(context.stride() if context is not None else (0, 0)),
        OPERATION=operation, CHUNK=CHUNK, BLOCK_ROWS=block_rows, BLOCK_FEATURES=block_features,
        NUM_STAGES=CONFIGURATIONS["sum_rows"].num_stages, num_warps=num_warps,
    )  # fmt: skip
    if total > CHUNK:
        block_parts, block_features, num_warps = block_sizes("sum_parts", num_features)
        _launch_sum_parts(
            (num_samples, cdiv(num_features, block_features)),
            parts, offsets, sums, total, num_features, CHUNK=CHUNK, BLOCK_PARTS=block_parts, BLOCK_FEATURES=block_features,
            num_warps=num_warps,
        )  # fmt: skip


def pairwise_difference(x: Scores, o: Total) -> Result:
    """Launch `pairwise_difference_kernel`: `[S] -> [total]`."""
    values, offsets = x
    (total,) = o
    num_samples, num_rows, (stride,) = offsets.shape[0] - 1, values.shape[0], values.stride()
    output = values.new_empty(total)
    if num_samples and num_rows and total:
        offsets = offsets.contiguous()
        _launch_pairwise_difference(
            (num_rows // PAIR_ROWS + num_samples,),
            values, offsets, pair_starts(offsets, offsets), output, num_rows, num_samples, total, stride,
            INDEX=_index(num_rows, stride), BLOCK_ROWS=PAIR_ROWS, BLOCK_COLUMNS=PAIR_COLUMNS, num_warps=PAIR_WARPS,
        )  # fmt: skip
    return Result(output)


def pairwise_difference_backward(x: Differences, o: Total) -> Result:
    """Launch `pairwise_difference_backward_kernel`: `[P] -> [total]`."""
    grad, offsets = x
    (num_rows,) = o
    num_samples, (stride,) = offsets.shape[0] - 1, grad.stride()
    grad_values = grad.new_empty(num_rows)
    if num_samples and num_rows:
        offsets = offsets.contiguous()
        _launch_pairwise_difference_backward(
            (num_rows // PAIR_ROWS + num_samples,),
            grad, offsets, pair_starts(offsets, offsets), grad_values, num_rows, num_samples, grad.shape[0], stride,
            INDEX=_index(num_rows, stride), BLOCK_ROWS=PAIR_ROWS, BLOCK_COLUMNS=PAIR_COLUMNS, num_warps=PAIR_WARPS,
        )  # fmt: skip
    return Result(grad_values)


def _index(longest: int, stride: int) -> tl.dtype:
    """Return what counts the elements of a tile of pairs, so many lines of at most `longest`; int64 takes twice the registers."""
    return tl.int32 if (max(PAIR_ROWS, PAIR_COLUMNS) + 1) * longest * max(stride, 1) < 2**31 else tl.int64
