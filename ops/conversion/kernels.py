"""The conversions as Triton kernels: pure data movement, each element read once and written once."""

from __future__ import annotations

import functools
import math
import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged.ops._shared.device import find_segments, find_tile, load_segment
from jagged.ops._shared.launch import Launcher
from jagged.ops._shared.sizes import cdiv, next_power_of_2
from jagged.ops.conversion.spec import (
    Both,
    Dense,
    Joined,
    Padded,
    Padding,
    Pair,
    Part,
    Parts,
    Pieces,
    Plain,
    Rows,
    Selection,
    Taken,
    Total,
    Totals,
)

# Elements of one program's tile: 16 a thread. Odd widths load element by element and would spill: half of it.
TILE_ELEMENTS = 2048
NUM_WARPS = 4
# Of `to_jagged_kernel` with 16 bits an element: each thread has four accesses of 16 bytes under way.
TO_JAGGED_WARPS = 2
MAX_BLOCK_FEATURES = 1024
# Of the offsets that `copy_two_kernel` writes.
BLOCK_OFFSETS: tl.constexpr = tl.constexpr(512)


def block_sizes(num_rows: int, num_features: int) -> tuple[int, int]:
    """Return rows and features of a tile."""
    most, block_features = _most_rows(num_features)
    return most if num_rows >= most else next_power_of_2(num_rows), block_features


@functools.cache
def _most_rows(num_features: int) -> tuple[int, int]:
    block_features = min(next_power_of_2(num_features), MAX_BLOCK_FEATURES)
    elements = TILE_ELEMENTS if num_features % 16 == 0 else TILE_ELEMENTS // 2
    return max(1, min(elements // block_features, 128)), block_features


def to_jagged_warps(num_features: int, itemsize: int) -> int:
    """Return the warps of a tile of `to_jagged_kernel`."""
    return TO_JAGGED_WARPS if itemsize <= 2 and num_features % 16 == 0 else NUM_WARPS


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
    padding = padding_value.to(tl.int64).to(tl.float64, bitcast=True) if values.dtype.element_ty == tl.float64 else padding_value
    source = start + position
    filled = (position < length) & (source < end)
    feature_exists = feature < num_features
    tile = tl.load(
        values + source[:, None] * values_stride + feature[None, :],
        mask=filled[:, None] & feature_exists[None, :],
        other=padding,
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


@triton.jit(do_not_specialize=["num_parts", "part", "batch_size", "part_rows", "whole_rows"])
def copy_part_kernel(
    source, target, offsets, num_parts, part, batch_size, part_rows, whole_rows, num_features, source_stride,
    INTO_WHOLE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_FEATURES: tl.constexpr,
):  # fmt: skip
    """Copy a part's rows to where they stand in the concatenation of all parts, whose offsets are `[K, B + 1]`; or from there.

    Before row p of part k stand the other samples' rows of all parts, and its own sample's of the earlier parts: it is row
    `sum over j of offsets[j, b + (j < k)] + p`.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    feature = tl.program_id(1) * BLOCK_FEATURES + tl.arange(0, BLOCK_FEATURES)
    num_offsets = batch_size + 1
    sample = find_segments(offsets + part * num_offsets, row, batch_size)
    in_whole = row - tl.load(offsets + part * num_offsets + sample)
    for other in range(num_parts):
        in_whole += tl.load(offsets + other * num_offsets + sample + (other < part).to(tl.int32))
    exists = (row < part_rows) & (in_whole >= 0) & (in_whole < whole_rows)
    mask = exists[:, None] & (feature < num_features)[None, :]
    from_row, to_row = (row, in_whole) if INTO_WHOLE else (in_whole, row)
    tile = tl.load(source + from_row[:, None] * source_stride + feature[None, :], mask=mask)
    tl.store(target + to_row[:, None] * num_features + feature[None, :], tile, mask=mask)


@triton.jit
def _start_of(offsets, sample, rows, batch_size):
    """Return where samples of a part begin: as its offsets say, or at each `rows / batch_size` where it has none."""
    if offsets is None:
        return sample.to(tl.int64) * (rows // tl.maximum(batch_size, 1))
    else:
        return tl.load(offsets + sample).to(tl.int64)


@triton.jit
def _copy_rows(
    block, part, part_offsets, part_rows, part_stride, other_offsets, other_rows, whole, whole_rows, whole_stride, batch_size,
    num_features, IS_SECOND: tl.constexpr, INTO_WHOLE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_FEATURES: tl.constexpr,
):  # fmt: skip
    """Copy one block of one of two parts' rows: row r of sample b stands `other_offsets[b]` rows later in the whole, or as many
    as the other part has to the end of b if that comes first."""
    first_row = block.to(tl.int64) * BLOCK_ROWS
    row = first_row + tl.arange(0, BLOCK_ROWS)
    feature = tl.program_id(1) * BLOCK_FEATURES + tl.arange(0, BLOCK_FEATURES)
    if part_offsets is None:
        # Of 64 bits only one number is divided.
        length = part_rows // batch_size
        in_first_sample = (first_row % length).to(tl.int32) + tl.arange(0, BLOCK_ROWS)
        sample = tl.minimum(first_row // length + in_first_sample // length, batch_size - 1)
    else:
        sample = find_segments(part_offsets, row, batch_size)
    in_whole = row + _start_of(other_offsets, sample + IS_SECOND, other_rows, batch_size)
    exists = (row < part_rows) & (in_whole >= 0) & (in_whole < whole_rows)
    mask = exists[:, None] & (feature < num_features)[None, :]
    in_part = part + row[:, None] * part_stride + feature[None, :]
    in_both = whole + in_whole[:, None] * whole_stride + feature[None, :]
    if INTO_WHOLE:
        tl.store(in_both, tl.load(in_part, mask=mask), mask=mask)
    else:
        tl.store(in_part, tl.load(in_both, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["first_rows", "second_rows", "batch_size"])
def copy_two_kernel(
    first, second, whole, first_offsets, second_offsets, whole_offsets, first_rows, second_rows, batch_size, num_features,
    first_stride, second_stride, whole_stride,
    INTO_WHOLE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_FEATURES: tl.constexpr,
):  # fmt: skip
    """Copy two parts' rows to where they stand in their concatenation, or from there; a part without offsets is dense.

    Programs are blocks of the first part, then of the second, then of the offsets of the whole, which are the sums of the parts'.
    """
    block = tl.program_id(0)
    first_blocks, second_blocks = tl.cdiv(first_rows, BLOCK_ROWS), tl.cdiv(second_rows, BLOCK_ROWS)
    whole_rows = first_rows.to(tl.int64) + second_rows
    if block < first_blocks:
        _copy_rows(
            block, first, first_offsets, first_rows, first_stride, second_offsets, second_rows, whole, whole_rows, whole_stride,
            batch_size, num_features, 0, INTO_WHOLE, BLOCK_ROWS, BLOCK_FEATURES,
        )  # fmt: skip
    elif block < first_blocks + second_blocks:
        _copy_rows(
            block - first_blocks, second, second_offsets, second_rows, second_stride, first_offsets, first_rows, whole,
            whole_rows, whole_stride, batch_size, num_features, 1, INTO_WHOLE, BLOCK_ROWS, BLOCK_FEATURES,
        )  # fmt: skip
    elif INTO_WHOLE:
        sample = (block - first_blocks - second_blocks) * BLOCK_OFFSETS + tl.arange(0, BLOCK_OFFSETS)
        exists = sample <= batch_size
        sample = tl.minimum(sample, batch_size)
        start = _start_of(first_offsets, sample, first_rows, batch_size)
        start += _start_of(second_offsets, sample, second_rows, batch_size)
        tl.store(whole_offsets + sample, start, mask=exists)


@triton.jit(do_not_specialize=["source_rows", "target_rows", "num_samples"])
def select_samples_kernel(
    source, source_offsets, target, target_offsets, samples, copies, source_rows, target_rows, num_samples, num_features,
    source_stride, IS_SUM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_FEATURES: tl.constexpr,
):  # fmt: skip
    """target[b] = source[samples[b]]; or for sums, target[b] = sum over k from copies[b] on of source[samples[k]]."""
    sample, start, length, first = find_tile(target_offsets, tl.program_id(0), num_samples, target_rows, BLOCK_ROWS)
    if first >= length:
        return
    position = first + tl.arange(0, BLOCK_ROWS)
    feature = tl.program_id(1) * BLOCK_FEATURES + tl.arange(0, BLOCK_FEATURES)
    exists = (position < length)[:, None] & (feature < num_features)[None, :]
    if IS_SUM:
        WIDE: tl.constexpr = tl.float64 if source.dtype.element_ty == tl.float64 else tl.float32
        total = tl.zeros((BLOCK_ROWS, BLOCK_FEATURES), WIDE)
        # Loads under way from one step to the next would spill registers.
        for k in tl.range(tl.load(copies + sample), tl.load(copies + sample + 1), num_stages=1):
            row = tl.load(source_offsets + tl.load(samples + k)).to(tl.int64) + position
            inside = exists & ((row >= 0) & (row < source_rows))[:, None]
            total += tl.load(source + row[:, None] * source_stride + feature[None, :], mask=inside, other=0).to(WIDE)
        tile = total.to(target.dtype.element_ty)
    else:
        row = tl.load(source_offsets + tl.load(samples + sample)).to(tl.int64) + position
        inside = exists & ((row >= 0) & (row < source_rows))[:, None]
        tile = tl.load(source + row[:, None] * source_stride + feature[None, :], mask=inside, other=0)
    tl.store(target + (start + position)[:, None] * num_features + feature[None, :], tile, mask=exists)


_launch_to_dense = Launcher(to_dense_kernel)
_launch_to_jagged = Launcher(to_jagged_kernel)
_launch_copy_part = Launcher(copy_part_kernel)
_launch_copy_two = Launcher(copy_two_kernel)
_launch_select_samples = Launcher(select_samples_kernel)


def to_dense(x: Rows, o: Padding) -> Padded:
    """Launch `to_dense_kernel`."""
    values, offsets = x
    length, padding_value = o
    rows = _as_rows(values)
    total, num_features = rows.shape
    batch_size = offsets.shape[0] - 1
    padded = values.new_empty(batch_size, length, *values.shape[1:])
    if padded.numel():
        block_rows, block_features = block_sizes(length, num_features)
        if values.dtype == torch.float64:
            # A kernel takes a float in 32 bits, hence the bits of one of 64.
            (padding_value,) = struct.unpack("q", struct.pack("d", padding_value))
        _launch_to_dense(
            (batch_size * cdiv(length, block_rows), cdiv(num_features, block_features)),
            rows, offsets.contiguous(), padded, length, total, num_features, rows.stride(0), padding_value,
            BLOCK_ROWS=block_rows, BLOCK_FEATURES=block_features, num_warps=NUM_WARPS,
        )  # fmt: skip
    return Padded(padded)


def to_jagged(x: Dense, o: Total) -> Taken:
    """Launch `to_jagged_kernel`."""
    dense, offsets = x
    (total,) = o
    batch_size, length, *features = dense.shape
    if dense.numel() == 0:
        return Taken(dense.new_zeros(total, *features))
    rows = dense if dense.dim() == 3 else dense.reshape(batch_size, length, -1)
    sample_stride, row_stride, feature_stride = rows.stride()
    if feature_stride != 1:
        rows = rows.contiguous()
        sample_stride, row_stride, _ = rows.stride()
    values = dense.new_empty(total, *features)
    if total:
        num_features = rows.shape[2]
        block_rows, block_features = block_sizes(total, num_features)
        _launch_to_jagged(
            (cdiv(total, block_rows), cdiv(num_features, block_features)),
            rows, offsets.contiguous(), values, total, length, batch_size, num_features, sample_stride, row_stride,
            BLOCK_ROWS=block_rows, BLOCK_FEATURES=block_features,
            num_warps=to_jagged_warps(num_features, dense.element_size()),
        )  # fmt: skip
    return Taken(values)


def concat(x: Parts, o: Plain) -> Taken:
    """Launch `copy_part_kernel` once a part, into one tensor."""
    values, offsets = x
    joined = values[0].new_empty(sum(part.shape[0] for part in values), *values[0].shape[1:])
    offsets = offsets.contiguous()
    for k, part in enumerate(values):
        _copy_part(part, joined, offsets, k, into_whole=True)
    return Taken(joined)


def split(x: Rows, o: Totals) -> Pieces:
    """Launch `copy_part_kernel` once a part, out of one tensor."""
    features, offsets = x.values.shape[1:], x.offsets.contiguous()
    pieces = tuple([x.values.new_empty(total, *features) for total in o.totals])
    rows = x.values if x.values.dim() == 1 else _as_rows(x.values)
    for k, piece in enumerate(pieces):
        _copy_part(rows, piece, offsets, k, into_whole=False)
    return Pieces(pieces)


def concat_two(x: Pair, o: Plain) -> Joined:
    """Launch `copy_two_kernel`, which also makes the offsets."""
    first, second, first_offsets, second_offsets = x
    if first_offsets is None:
        first = first.flatten(0, 1)
    if second_offsets is None:
        second = second.flatten(0, 1)
    whole = first.new_empty(first.shape[0] + second.shape[0], *first.shape[1:])
    like = second_offsets if first_offsets is None else first_offsets
    offsets = torch.empty_like(like, memory_format=torch.contiguous_format)  # type: ignore[arg-type]
    _copy_two(first, second, whole, first_offsets, second_offsets, offsets, into_whole=True)
    return Joined(whole, offsets)


def split_two(x: Both, o: Totals) -> Pieces:
    """Launch `copy_two_kernel` out of one tensor."""
    values, first_offsets, second_offsets = x
    first, second = [values.new_empty(total, *values.shape[1:]) for total in o.totals]
    _copy_two(first, second, values, first_offsets, second_offsets, None, into_whole=False)
    return Pieces((first, second))


def take_part(x: Rows, o: Part) -> Taken:
    """Launch `copy_part_kernel` out of the rows of all parts."""
    kept = x.values.new_empty(o.total, *x.values.shape[1:])
    _copy_part(x.values, kept, x.offsets.contiguous(), o.part, into_whole=False)
    return Taken(kept)


def put_part(x: Rows, o: Part) -> Taken:
    """Launch `copy_part_kernel` into zeros."""
    whole = x.values.new_zeros(o.total, *x.values.shape[1:])
    _copy_part(x.values, whole, x.offsets.contiguous(), o.part, into_whole=True)
    return Taken(whole)


def index_select(x: Selection, o: Total) -> Taken:
    """Launch `select_samples_kernel`."""
    return Taken(_select(x.values, x.offsets, x.new_offsets, x.indices.contiguous(), None, o.total))


def index_select_backward(x: Selection, o: Total) -> Taken:
    """Launch `select_samples_kernel` over the places where each sample was selected, which a sort brings together."""
    indices, places = x.indices.sort(stable=True)
    copies = torch.searchsorted(indices, torch.arange(x.offsets.shape[0], device=indices.device, dtype=indices.dtype))
    return Taken(_select(x.values, x.new_offsets, x.offsets, places, copies, o.total))


def _select(
    source: Tensor, source_offsets: Tensor, target_offsets: Tensor, samples: Tensor, copies: Tensor | None, total: int
) -> Tensor:
    target = source.new_empty(total, *source.shape[1:])
    num_samples = target_offsets.shape[0] - 1
    if target.numel() and num_samples:
        rows = _as_rows(source)
        source_rows, num_features = rows.shape
        block_rows, block_features = block_sizes(total, num_features)
        _launch_select_samples(
            (total // block_rows + num_samples, cdiv(num_features, block_features)),
            rows, source_offsets.contiguous(), target, target_offsets.contiguous(), samples, copies, source_rows, total,
            num_samples, num_features, rows.stride(0), IS_SUM=copies is not None, BLOCK_ROWS=block_rows,
            BLOCK_FEATURES=block_features, num_warps=NUM_WARPS,
        )  # fmt: skip
    return target


def _copy_part(source: Tensor, target: Tensor, offsets: Tensor, part: int, *, into_whole: bool) -> None:
    if source.numel() == 0 or target.numel() == 0:
        return
    if source.dim() == 1:
        source_rows, num_features = source.shape[0], 1
    else:
        source = _as_rows(source)
        source_rows, num_features = source.shape
    target_rows = target.shape[0]
    part_rows, whole_rows = (source_rows, target_rows) if into_whole else (target_rows, source_rows)
    num_parts, num_offsets = offsets.shape
    block_rows, block_features = block_sizes(part_rows, num_features)
    _launch_copy_part(
        (cdiv(part_rows, block_rows), cdiv(num_features, block_features)),
        source, target, offsets, num_parts, part, num_offsets - 1, part_rows, whole_rows, num_features,
        source.stride(0), INTO_WHOLE=into_whole, BLOCK_ROWS=block_rows, BLOCK_FEATURES=block_features,
        num_warps=NUM_WARPS,
    )  # fmt: skip


def _copy_two(
    first: Tensor, second: Tensor, whole: Tensor, first_offsets: Tensor | None, second_offsets: Tensor | None,
    whole_offsets: Tensor | None, *, into_whole: bool,
) -> None:  # fmt: skip
    if first.dim() == 1:
        num_features = 1
    else:
        first, second, whole = _as_rows(first), _as_rows(second), _as_rows(whole)
        num_features = whole.shape[1]
    first_rows, second_rows = first.shape[0], second.shape[0]
    if first_offsets is not None:
        first_offsets = first_offsets.contiguous()
        batch_size = first_offsets.shape[0] - 1
    if second_offsets is not None:
        second_offsets = second_offsets.contiguous()
        batch_size = second_offsets.shape[0] - 1
    block_rows, block_features = block_sizes(max(first_rows, second_rows), num_features)
    blocks = cdiv(first_rows, block_rows) + cdiv(second_rows, block_rows)
    if whole_offsets is not None:
        blocks += cdiv(batch_size + 1, BLOCK_OFFSETS.value)
    _launch_copy_two(
        (blocks, max(cdiv(num_features, block_features), 1)),
        first, second, whole, first_offsets, second_offsets, whole_offsets, first_rows, second_rows, batch_size, num_features,
        first.stride(0), second.stride(0), whole.stride(0), INTO_WHOLE=into_whole, BLOCK_ROWS=block_rows,
        BLOCK_FEATURES=block_features, num_warps=NUM_WARPS,
    )  # fmt: skip


def _as_rows(values: Tensor) -> Tensor:
    """View `[S, *F]` as `[S, F]` with adjacent features; copies only where no such view exists."""
    rows = values if values.dim() == 2 else values.reshape(values.shape[0], math.prod(values.shape[1:]))
    return rows if rows.stride(1) == 1 or rows.shape[1] <= 1 else rows.contiguous()
