"""Schedules: how a program of one warp lays bags, their lookups and columns over its registers.

A program takes some bags at once, of each some lookups at once, and some columns of their rows; the product is `TILE` numbers.
Short bags want many bags and long ones many lookups: all loads of a step are under way together. Every schedule that a layout may
need is a branch of one kernel, compiled in; which branch a group of bags takes is decided on the device, from the lengths of the
batch at hand.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

# Numbers that a program's 32 threads hold: 16 each.
TILE = tl.constexpr(512)
# Columns are 4 to 128, a power of two; wider rows take several programs.
FEWEST_COLUMNS, MOST_COLUMNS = tl.constexpr(4), tl.constexpr(128)
# Lookups at once are 1, 4 or 16, and no more than fit.
NUM_UNROLLS = tl.constexpr(3)
# A schedule's number is (columns' exponent - 2, lookups' place, whether rows begin at multiples of 4 elements).
NUM_SCHEDULES = tl.constexpr(6 * 3 * 2)
# Programs of the map: groups that it takes at once.
BLOCK_GROUPS = 512
# Programs that walk over the work, for each multiprocessor.
PROGRAMS = 32


def used_schedules(layout: Tensor) -> int:
    """Return the schedules that features of a layout `[F, fields]` on the host may take, a bit for each."""
    key = layout.data_ptr(), layout.shape[0]
    if key not in _used:
        _used[key] = layout, _schedules_of(set(layout[:, 2].tolist()))
    return _used[key][1]


# By address; the tensor is kept, so that no other can come to lie there.
_used: dict[tuple[int, int], tuple[Tensor, int]] = {}


def _schedules_of(widths: set[int]) -> int:
    used = 0
    for width in widths:
        exponent = max(2, min(7, (width - 1).bit_length()))
        for unroll in range(NUM_UNROLLS.value):
            used |= 1 << (((exponent - 2) * NUM_UNROLLS.value + unroll) * 2 + int(width % 4 == 0))
    return used


@triton.constexpr_function
def columns_by(schedule):
    """Return the columns of a schedule."""
    return FEWEST_COLUMNS.value << (schedule // (2 * NUM_UNROLLS.value))


@triton.constexpr_function
def lookups_by(schedule):
    """Return the lookups at once of a schedule."""
    columns = FEWEST_COLUMNS.value << (schedule // (2 * NUM_UNROLLS.value))
    return min(1 << (2 * (schedule // 2 % NUM_UNROLLS.value)), TILE.value // columns)


@triton.jit
def columns_of(width):
    """Return the columns of a program, and their exponent less 2."""
    columns = tl.full(width.shape, FEWEST_COLUMNS, tl.int64)
    exponent = tl.zeros(width.shape, tl.int32)
    for i in tl.static_range(1, 6):
        is_wider = width > (FEWEST_COLUMNS << (i - 1))
        columns = tl.where(is_wider, FEWEST_COLUMNS << i, columns)
        exponent = tl.where(is_wider, i, exponent)
    return columns, exponent


@triton.jit(do_not_specialize=["num_groups", "num_bags", "width_stride"])
def embedding_bags_map_kernel(
    widths, width_stride, first_bags, offsets, ends, schedules, num_groups, num_bags, BLOCK: tl.constexpr,
    WHOLE_ROWS: tl.constexpr,
):  # fmt: skip
    """For each group of bags of one width its schedule, and after how many items of work it ends.

    A group has the bags from `first_bags` on, or `num_bags` each. An item is a program's bags and columns, or all columns.
    """
    total = tl.zeros((), tl.int64)
    for start in range(0, num_groups, BLOCK):
        group = start + tl.arange(0, BLOCK)
        exists = group < num_groups
        width = tl.load(widths + group.to(tl.int64) * width_stride, mask=exists, other=1)
        if first_bags is None:
            first = group.to(tl.int64) * num_bags
            last = first + num_bags
        else:
            first = tl.load(first_bags + group, mask=exists, other=0).to(tl.int64)
            last = tl.load(first_bags + group + 1, mask=exists, other=0).to(tl.int64)
        bags = tl.where(exists, last - first, 0)
        lookups = tl.load(offsets + last, mask=exists, other=0) - tl.load(offsets + first, mask=exists, other=0)
        columns, exponent = columns_of(width)
        # By the mean length: a step of more lookups than most bags have would be idle in part.
        unroll = (lookups * 2 > bags * 3).to(tl.int32) + (lookups > bags * 8).to(tl.int32)
        rows = tl.full(columns.shape, TILE, tl.int64) // columns
        per_item = rows // tl.minimum(tl.where(unroll == 0, 1, tl.where(unroll == 1, 4, 16)), rows)
        items = (bags + per_item - 1) // per_item
        if not WHOLE_ROWS:
            items *= (width + columns - 1) // columns
        tl.store(schedules + group, (exponent * NUM_UNROLLS + unroll) * 2 + (width % 4 == 0).to(tl.int32), mask=exists)
        tl.store(ends + group, total + tl.cumsum(items, 0), mask=exists)
        total += tl.sum(items, 0)


@triton.jit
def group_of(ends, item, num_groups):
    """Return the group that an item of work belongs to, by halving, and the items before it."""
    low = tl.zeros((), tl.int32)
    high = low + num_groups
    while low < high:
        middle = (low + high) // 2
        is_after = tl.load(ends + middle) <= item
        low = tl.where(is_after, middle + 1, low)
        high = tl.where(is_after, high, middle)
    return low, tl.load(ends + low - 1, mask=low > 0, other=0)


@triton.jit
def span_of(offsets, bag, exists, num_lookups):
    """Return where the lookups of bags begin and end; wrong offsets never lead outside of the lookups."""
    begin = tl.load(offsets + bag, mask=exists, other=0).to(tl.int64)
    end = tl.load(offsets + bag + 1, mask=exists, other=0).to(tl.int64)
    return tl.maximum(begin, 0), tl.minimum(end, num_lookups)


@triton.jit
def pooled(
    values, ids, scales, begin, end, rows, stride, column, BAGS: tl.constexpr, UNROLL: tl.constexpr, COLUMNS: tl.constexpr,
    VECTOR: tl.constexpr, ARE_ROWS: tl.constexpr,
):  # fmt: skip
    """Sum, for some bags, the rows of their lookups from `begin` to `end`: `[BAGS, COLUMNS]` in float32.

    `ids` are rows of `values`, of which those outside of `0 .. rows` count as zeros, or elements where rows begin.
    """
    if VECTOR:
        # It is; said so that the compiler sees it, and makes loads of 16 bytes.
        stride = stride // 4 * 4
    offset = tl.arange(0, UNROLL)
    columns = column + tl.arange(0, COLUMNS)
    total = tl.zeros((BAGS, UNROLL, COLUMNS), tl.float32)
    longest = tl.max(end - begin, 0)
    for step in range(0, longest, UNROLL):
        place = begin[:, None] + step + offset[None, :]
        is_live = place < end[:, None]
        row = tl.load(ids + place, mask=is_live, other=0).to(tl.int64)
        if ARE_ROWS:
            is_live &= (row >= 0) & (row < rows)
            row *= stride
        elif VECTOR:
            row = row // 4 * 4
        mask = is_live[:, :, None] & (columns < stride)[None, None, :]
        tile = tl.load(values + row[:, :, None] + columns[None, None, :], mask=mask, other=0.0).to(tl.float32)
        if scales is not None:
            tile *= tl.load(scales + place, mask=is_live, other=0.0).to(tl.float32)[:, :, None]
        total += tile
    return tl.sum(total, 1)
