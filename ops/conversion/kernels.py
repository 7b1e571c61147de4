"""The conversions as Triton kernels: pure data movement, each element read once and written once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged.ops._shared.device import find_segments, load_segment

# Elements of one program's tile: 16 a thread with 4 warps. Odd widths load element by element and would spill: half of it.
TILE_ELEMENTS = 2048
MAX_BLOCK_FEATURES = 1024


@triton.jit(do_not_specialize=["length", "total"])
def to_dense_kernel(
    values, offsets, dense, length, total, num_features, values_stride, padding_value,
    BLOCK_ROWS: tl.constexpr, BLOCK_FEATURES: tl.constexpr,
):  # fmt: skip
    """dense[b, p] = values[offsets[b] + p], or the padding value where sample b has no row p. A program stays in one sample."""
    tiles = tl.cdiv(length, BLOCK_ROWS)
    sample = (tl.program_id(0) // tiles).to(tl.int64)
    position = tl.program_id(0) % tiles * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    feature = tl.program_id(1) * BLOCK_FEATURES + tl.arange(0, BLOCK_FEATURES)
    start, end = load_segment(offsets, sample, total)
    source = start + position
    filled = (position < length) & (source < end)
    feature_exists = feature < num_features
    tile = tl.load(
        values + source[:, None] * values_stride + feature[None, :],
        mask=filled[:, None] & feature_exists[None, :],
        other=padding_value,
    )
    row = sample * length + position
    mask = (position < length)[:, None] & feature_exists[None, :]
    tl.store(dense + row[:, None] * num_features + feature[None, :], tile, mask=mask)


@triton.jit(do_not_specialize=["num_rows", "length", "batch_size"])
def to_jagged_kernel(
    dense, offsets, values, num_rows, length, batch_size, num_features, sample_stride, row_stride,
    BLOCK_ROWS: tl.constexpr, BLOCK_FEATURES: tl.constexpr,
):  # fmt: skip
    """values[offsets[b] + p] = dense[b, p], or zero where p lies past the dense length."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    feature = tl.program_id(1) * BLOCK_FEATURES + tl.arange(0, BLOCK_FEATURES)
    row_exists = row < num_rows
    sample = find_segments(offsets, row, batch_size)
    position = row - tl.load(offsets + sample).to(tl.int64)
    filled = row_exists & (position >= 0) & (position < length)
    feature_exists = feature < num_features
    tile = tl.load(
        dense + sample[:, None] * sample_stride + position[:, None] * row_stride + feature[None, :],
        mask=filled[:, None] & feature_exists[None, :],
        other=0,
    )
    tl.store(values + row[:, None] * num_features + feature[None, :], tile, mask=row_exists[:, None] & feature_exists[None, :])


@triton.jit(do_not_specialize=["num_rows", "batch_size", "source_rows", "target_rows"])
def copy_rows_kernel(
    source, target, row_offsets, source_starts, target_starts, num_rows, batch_size, source_rows, target_rows, num_features,
    source_stride, BLOCK_ROWS: tl.constexpr, BLOCK_FEATURES: tl.constexpr,
):  # fmt: skip
    """target[target_starts[b] + p] = source[source_starts[b] + p] for every row p of sample b of `row_offsets`."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    feature = tl.program_id(1) * BLOCK_FEATURES + tl.arange(0, BLOCK_FEATURES)
    sample = find_segments(row_offsets, row, batch_size)
    position = row - tl.load(row_offsets + sample).to(tl.int64)
    from_row = tl.load(source_starts + sample).to(tl.int64) + position
    to_row = tl.load(target_starts + sample).to(tl.int64) + position
    exists = (row < num_rows) & (from_row >= 0) & (from_row < source_rows) & (to_row >= 0) & (to_row < target_rows)
    mask = exists[:, None] & (feature < num_features)[None, :]
    tile = tl.load(source + from_row[:, None] * source_stride + feature[None, :], mask=mask)
    tl.store(target + to_row[:, None] * num_features + feature[None, :], tile, mask=mask)


def to_dense(values: Tensor, offsets: Tensor, length: int, padding_value: float) -> Tensor:
    """Launch `to_dense_kernel`: `[S, *F] -> [B, length, *F]`."""
    rows = _as_rows(values)
    batch_size = offsets.shape[0] - 1
    dense = values.new_empty(batch_size, length, *values.shape[1:])
    if dense.numel():
        block_rows, block_features, (tiles, feature_tiles) = _tiles(length, rows.shape[1])
        to_dense_kernel[(batch_size * tiles, feature_tiles)](
            rows, offsets, dense, length, rows.shape[0], rows.shape[1], rows.stride(0), padding_value,
            BLOCK_ROWS=block_rows, BLOCK_FEATURES=block_features,
        )  # fmt: skip
    return dense


def to_jagged(dense: Tensor, offsets: Tensor, total: int) -> Tensor:
    """Launch `to_jagged_kernel`: `[B, L, *F] -> [total, *F]`."""
    batch_size, length, *features = dense.shape
    if dense.numel() == 0:
        return dense.new_zeros(total, *features)
    rows = dense.reshape(batch_size, length, -1)
    rows = rows if rows.stride(2) == 1 else rows.contiguous()
    values = dense.new_empty(total, *features)
    if values.numel():
        block_rows, block_features, grid = _tiles(total, rows.shape[2])
        to_jagged_kernel[grid](
            rows, offsets, values, total, length, batch_size, rows.shape[2], rows.stride(0), rows.stride(1),
            BLOCK_ROWS=block_rows, BLOCK_FEATURES=block_features,
        )  # fmt: skip
    return values


def concat(values: Sequence[Tensor], offsets: Sequence[Tensor]) -> Tensor:
    """Launch `copy_rows_kernel` once a part, into one tensor `[sum S_k, *F]`."""
    joined = values[0].new_empty(sum(part.shape[0] for part in values), *values[0].shape[1:])
    starts = _starts_in_whole(offsets)
    for part, part_offsets, start in zip(values, offsets, starts, strict=True):
        _copy_rows(part, joined, part_offsets, part.shape[0], source_starts=part_offsets, target_starts=start)
    return joined


def split(values: Tensor, offsets: Sequence[Tensor], totals: Sequence[int]) -> list[Tensor]:
    """Launch `copy_rows_kernel` once a part, out of one tensor."""
    parts = [values.new_empty(total, *values.shape[1:]) for total in totals]
    for part, part_offsets, start in zip(parts, offsets, _starts_in_whole(offsets), strict=True):
        _copy_rows(values, part, part_offsets, part.shape[0], source_starts=start, target_starts=part_offsets)
    return parts


def truncate(values: Tensor, offsets: Tensor, new_offsets: Tensor, total: int, keep_last: bool) -> Tensor:
    """Launch `copy_rows_kernel` over the kept rows: `[S, *F] -> [total, *F]`."""
    kept = values.new_empty(total, *values.shape[1:])
    _copy_rows(values, kept, new_offsets, total, _kept_starts(offsets, new_offsets, keep_last), new_offsets)
    return kept


def truncate_backward(grad: Tensor, offsets: Tensor, new_offsets: Tensor, total: int, keep_last: bool) -> Tensor:
    """Launch `copy_rows_kernel` over the kept rows, into zeros `[total, *F]`."""
    whole = grad.new_zeros(total, *grad.shape[1:])
    _copy_rows(grad, whole, new_offsets, grad.shape[0], new_offsets, _kept_starts(offsets, new_offsets, keep_last))
    return whole


def _copy_rows(
    source: Tensor, target: Tensor, offsets: Tensor, num_rows: int, source_starts: Tensor, target_starts: Tensor
) -> None:
    source_rows = _as_rows(source)
    if num_rows == 0 or source.numel() == 0:
        return
    num_features = source_rows.shape[1]
    block_rows, block_features, grid = _tiles(num_rows, num_features)
    copy_rows_kernel[grid](
        source_rows, target, offsets, source_starts, target_starts, num_rows, offsets.shape[0] - 1, source_rows.shape[0],
        target.shape[0], num_features, source_rows.stride(0), BLOCK_ROWS=block_rows, BLOCK_FEATURES=block_features,
    )  # fmt: skip


def _starts_in_whole(offsets: Sequence[Tensor]) -> list[Tensor]:
    """Return for each part the row `[B]` of the concatenation where each sample of it begins."""
    starts = [torch.stack([part[:-1] for part in offsets]).sum(0)]
    for part in offsets[:-1]:
        starts.append(starts[-1] + part.diff())
    return starts


def _kept_starts(offsets: Tensor, new_offsets: Tensor, keep_last: bool) -> Tensor:
    return offsets[1:] - new_offsets.diff() if keep_last else offsets


def _as_rows(values: Tensor) -> Tensor:
    """View `[S, *F]` as `[S, F]` with adjacent features; copies only where no such view exists."""
    rows = values.reshape(values.shape[0], math.prod(values.shape[1:]))
    return rows if rows.stride(1) == 1 or rows.shape[1] <= 1 else rows.contiguous()


def _tiles(num_rows: int, num_features: int) -> tuple[int, int, tuple[int, int]]:
    block_features = min(triton.next_power_of_2(num_features), MAX_BLOCK_FEATURES)
    elements = TILE_ELEMENTS if num_features % 16 == 0 else TILE_ELEMENTS // 2
    block_rows = max(1, min(elements // block_features, 128, triton.next_power_of_2(num_rows)))
    return block_rows, block_features, (triton.cdiv(num_rows, block_rows), triton.cdiv(num_features, block_features))
