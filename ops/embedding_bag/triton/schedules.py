"""Schedules: how a program of one warp lays bags, their lookups and columns over its lanes and registers.

A row of lanes holds 128 numbers, four of each lane, so that a load brings 16 bytes: some columns of a lookup's row, side by side
as many lookups of one bag as there is room for, or as the bag is likely to have, and side by side some bags. In registers come
further lookups of the same bags, whose loads are under way together; their rows add up within a lane, and those of a bag's lanes
once, at its end. Bags that stand side by side go in step: the longest of them sets the pace, so only those of one lookup or few
do. Others are taken one after the other, the ids of the next while rows of this one are under way.

Every schedule that a layout may need is a branch of one kernel, compiled in; which one a feature takes is decided on the device
from the lengths of the batch at hand. Programs take units of work in turn from a counter, features of one schedule after another.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from jagged.ops._shared.sizes import cdiv
from jagged.ops.embedding_bag.fields import FEATURE
from jagged.ops.embedding_bag.layout import PART_COLUMNS
from jagged.ops.embedding_bag.plans import MOST_STEPS as STEPS_OF_PLAN
from jagged.ops.embedding_bag.triton.columns import (
    BATCH_FIELDS,
    CLASS_BEGIN,
    CLASS_END,
    FIELDS,
    FIRST_BAG,
    OUTPUT_BEGIN,
    OUTPUT_COLUMN,
    OUTPUT_STRIDE,
    PLACE_FEATURE,
    PLACE_WIDTH,
)

# Columns are 4 to 128, a power of two; wider rows take several programs.
FEWEST_COLUMNS, MOST_COLUMNS = tl.constexpr(4), tl.constexpr(128)
# How many lookups bags have: one, few, some, many.
NUM_KINDS = tl.constexpr(4)
# Of small batches: columns of a program, and kinds.
SMALL_COLUMNS, SMALL_KINDS = tl.constexpr(PART_COLUMNS), (0, NUM_KINDS.value - 1)
# A schedule's number is (columns' exponent - 2, kind, whether rows begin at multiples of 4 elements).
NUM_SCHEDULES = tl.constexpr(6 * 4 * 2)
# Bits of a number that has the schedule and above it the bags of a unit.
SCHEDULE_BITS, SCHEDULE_MASK = tl.constexpr(8), tl.constexpr(255)
# Turns of a unit, about, of kinds that go in step. Few, so that programs end together; many beside what it takes to find a unit.
IN_STEP_TURNS = tl.constexpr(8)
# Lookups that a slice of a bag has at least, and most slices of one: where a feature's mean is twice as long, its bags are cut.
SLICE, MOST_SLICES = tl.constexpr(1024), tl.constexpr(256)
# Of a group whose bags are cut: how many slices each bag has, and where their sums and their counts of arrivals begin.
NUM_SLICES, SUMS_BEGIN, ARRIVALS_BEGIN, SLICE_FIELDS = map(tl.constexpr, range(4))
# Programs of the map: groups that it takes at once.
BLOCK_GROUPS = 2048
# Steps that a plan may ask for.
PLANNED_STEPS = tl.constexpr(STEPS_OF_PLAN)


class Known(NamedTuple):
    """What launches know of a layout; the schedules that its features may take, and those of small batches, have a bit each."""

    used: int
    used_by_small: int
    num_parts: int
    # Each once.
    widths: tuple[int, ...]
    widest: int
    # Of the tables up to the last one that is read.
    num_rows: int
    # Of each feature's table, the fewest first; and the sums of the first ones, none of them first.
    rows: tuple[int, ...]
    sums_of_rows: tuple[int, ...]
    is_aligned: bool
    has_means: bool


def known_of(layout: Tensor) -> Known:
    """Return what is known of a layout `[F, fields]` on the host."""
    # The tensor keeps it: no table of ours holds layouts, and no other layout comes to lie at its place.
    known: Known | None = layout.__dict__.get("known")
    if known is None:
        widths = layout[:, FEATURE.width].tolist()
        of_small = schedules_of(set(widths), SMALL_KINDS, SMALL_COLUMNS.value)
        num_parts = sum(cdiv(width, SMALL_COLUMNS.value) for width in widths)
        num_rows = int((layout[:, FEATURE.rows] + layout[:, FEATURE.first_row]).max()) if widths else 0
        rows = sorted(layout[:, FEATURE.rows].tolist())
        known = layout.__dict__["known"] = Known(
            schedules_of(set(widths)), of_small, num_parts, tuple(sorted(set(widths))), max(widths, default=0), num_rows,
            tuple(rows), (0, *accumulate(rows)),
            all(width % 4 == 0 for width in widths), bool(layout[:, FEATURE.is_mean].any()),
        )  # fmt: skip
    return known


def schedules_of(widths: set[int], kinds: Iterable[int] = range(NUM_KINDS.value), most_columns: int = MOST_COLUMNS.value) -> int:
    """Return the schedules of these widths and kinds, a bit for each."""
    used = 0
    for width in widths:
        exponent = max(2, (min(width, most_columns) - 1).bit_length())
        for kind in kinds:
            used |= 1 << (((exponent - 2) * NUM_KINDS.value + kind) * 2 + int(width % 4 == 0))
    return used


@triton.constexpr_function
def numbers_by(kind, is_wide):
    """Return the numbers of a row of lanes; of single lookups two rows, or four that are wide, to keep loads under way."""
    return (256, 128, 128, 128)[kind] * (2 if kind == 0 and is_wide else 1)


@triton.constexpr_function
def most_lanes_by(kind):
    """Return the most lookups of a bag that stand side by side."""
    return (1, 4, 32, 32)[kind]


@triton.constexpr_function
def kind_by(schedule):
    """Return the kind of bags that a schedule is for."""
    return schedule // 2 % 4


@triton.constexpr_function
def is_of_many(schedule):
    """Return whether a schedule is for bags of many lookups, of which it takes one at a time."""
    return kind_by(schedule) == 3


@triton.constexpr_function
def is_in_step(schedule):
    """Return whether a schedule is for bags of one lookup or few, some of which stand side by side."""
    return kind_by(schedule) < 2


@triton.constexpr_function
def columns_by(schedule):
    """Return the columns of a schedule."""
    return 4 << (schedule // 8)


@triton.constexpr_function
def is_wide(schedule):
    """Return whether rows of a schedule are wide and begin at multiples of 4 elements."""
    return schedule % 2 == 1 and columns_by(schedule) >= 32


@triton.constexpr_function
def groups_by(schedule):
    """Return the lookups that stand side by side, of all bags."""
    return numbers_by(kind_by(schedule), is_wide(schedule)) // columns_by(schedule)


@triton.constexpr_function
def lanes_by(schedule):
    """Return the lookups of one bag that stand side by side."""
    return min(128 // columns_by(schedule), most_lanes_by(kind_by(schedule)))


@triton.constexpr_function
def unroll_by(schedule):
    """Return the lookups of a bag that are in registers."""
    return (1, 2, max(1, min(4, columns_by(schedule) // 4)), 8 if is_wide(schedule) else 4)[kind_by(schedule)]


@triton.constexpr_function
def turn_by(schedule):
    """Return the lookups of a bag that one turn of the loop takes."""
    return lanes_by(schedule) * unroll_by(schedule)


@triton.jit
def columns_of(width):
    """Return the columns of a program, and their exponent less 2."""
    columns = (width * 0 + FEWEST_COLUMNS).to(tl.int32)
    exponent = (width * 0).to(tl.int32)
    for i in tl.static_range(1, 6):
        is_wider = width > (FEWEST_COLUMNS << (i - 1))
        columns = tl.where(is_wider, FEWEST_COLUMNS << i, columns)
        exponent = tl.where(is_wider, i, exponent)
    return columns, exponent


@triton.jit
def kind_of(lookups, bags):
    """Return the kind of bags with so many lookups in all: by the mean length, above 1.5, 6 and 12."""
    return (lookups * 2 > bags * 3).to(tl.int32) + (lookups > bags * 6).to(tl.int32) + (lookups > bags * 12).to(tl.int32)


@triton.jit
def turns_of(exponent, kind, is_vector):
    """Return how many bags a schedule takes at once, and the lookups of each: `turn_by`, of schedules known when it runs."""
    at_once, turn = tl.zeros_like(kind), tl.zeros_like(kind)
    is_wide = (exponent >= 3) & (is_vector != 0)
    for i in tl.static_range(NUM_KINDS):
        lanes = tl.minimum(32 >> exponent, most_lanes_by(i))
        if i == 0:
            groups, unroll = tl.where(is_wide, numbers_by(0, True), numbers_by(0, False)) >> (exponent + 2), 1
        elif i == 1:
            groups, unroll = numbers_by(i, False) >> (exponent + 2), 2
        elif i == 2:
            groups, unroll = lanes, tl.minimum(1 << exponent, 4)
        else:
            groups, unroll = lanes, tl.where(is_wide, 8, 4)
        at_once = tl.where(kind == i, groups // lanes, at_once)
        turn = tl.where(kind == i, lanes * unroll, turn)
    return at_once, turn


@triton.jit
def sum_of_counts(packed):
    """Add up four numbers of 16 bits."""
    return ((packed & 0xFFFF) + ((packed >> 16) & 0xFFFF) + ((packed >> 32) & 0xFFFF) + ((packed >> 48) & 0xFFFF)).to(tl.int32)


@triton.jit(
    do_not_specialize=["first_place", "num_groups", "num_bags", "num_programs", "unit_turns", "sums_room", "arrivals_room"]
)
def embedding_bags_map_kernel(
    layout, first_bags, offsets, order, ends, schedules, slices, arrivals, counter, first_place, num_groups, num_bags,
    num_programs, unit_turns, sums_room, arrivals_room, BLOCK: tl.constexpr, plan=None,
):  # fmt: skip
    """For each group of bags of one width its schedule and the bags of its units; in which order groups are taken.

    Groups of one schedule follow one another (of each `BLOCK` groups), those with most to read first: programs that run together
    shall run the same code, for a multiprocessor's cache of instructions holds few schedules. `ends` counts units in that order.
    The layout has groups in the order of their classes, from `first_place` on; the kinds of a class, which depend on the batch,
    are counted, those of many lookups first.

    A group has the bags from `first_bags` on, or `num_bags` each. The counter begins behind the units that programs begin with.
    Groups of very long bags have no bags in a unit, but a slice of one: `slices` `[groups, SLICE_FIELDS]` gets how many,
    and where their sums and their counts of arrivals begin, which are set to 0; of other groups `slices` says nothing. Units of
    kinds that do not go in step have about `unit_turns` turns. Where `plan` has a number that is not negative, kind (two bits)
    and steps (above them) are those.
    """
    tl.store(counter, num_programs)
    total, total_sums, total_arrivals = tl.zeros((), tl.int64), tl.zeros((), tl.int64), tl.zeros((), tl.int64)
    for start in range(0, num_groups, BLOCK):
        place = start + tl.arange(0, BLOCK)
        exists = place < num_groups
        of_place = layout + (first_place + place).to(tl.int64) * FIELDS
        group = tl.load(of_place + PLACE_FEATURE, mask=exists, other=0).to(tl.int32)
        width = tl.load(of_place + PLACE_WIDTH, mask=exists, other=1).to(tl.int32)
        # Where groups of the same class begin and end, of those that are here.
        class_begin = tl.maximum(tl.load(of_place + CLASS_BEGIN, mask=exists, other=0).to(tl.int32), start)
        class_end = tl.minimum(tl.load(of_place + CLASS_END, mask=exists, other=0).to(tl.int32), start + BLOCK)
        if first_bags is None:
            first = group.to(tl.int64) * num_bags
            last = first + num_bags
        else:
            first = tl.load(first_bags + group, mask=exists, other=0).to(tl.int64)
            last = tl.load(first_bags + group + 1, mask=exists, other=0).to(tl.int64)
        bags = tl.where(exists, last - first, 0)
        lookups = tl.load(offsets + last, mask=exists, other=0) - tl.load(offsets + first, mask=exists, other=0)
        lookups = tl.maximum(lookups, 0).to(tl.int64)
        columns, exponent = columns_of(width)
        kind = kind_of(lookups, bags)
        if plan is not None:
            planned = tl.load(plan + group, mask=exists, other=-1)
            kind = tl.where(planned < 0, kind, planned % NUM_KINDS)
        # Shifts for powers of two, and float32 for what only divides work up: 64-bit divisions take most of this kernel's time.
        is_vector = (width % 4 == 0).to(tl.int32)
        at_once, turn = turns_of(exponent, kind, is_vector)
        turns = tl.where(kind < 2, IN_STEP_TURNS, unit_turns).to(tl.float32)
        # Bags of no more lookups than a turn takes are one turn, others as many more as they are longer.
        of_bag = 1 + lookups.to(tl.float32) / tl.maximum(turn.to(tl.float32) * bags.to(tl.float32), 1.0)
        steps = tl.maximum(turns / of_bag, 1.0).to(tl.int32)
        if plan is not None:
            of_plan = tl.minimum(tl.maximum(planned // NUM_KINDS, 1), PLANNED_STEPS)
            steps = tl.where(planned < 0, steps, of_plan)
        parts = (width + columns - 1) >> (exponent + 2)
        is_sliced = (kind == NUM_KINDS - 1) & (lookups >= bags * (2 * SLICE)) & (bags > 0)
        cuts = tl.full((BLOCK,), 1, tl.int64)
        if tl.max(is_sliced.to(tl.int32), 0) > 0:
            cuts = tl.minimum(lookups // tl.maximum(bags * SLICE, 1), MOST_SLICES)
            sums, counted = tl.where(is_sliced, bags * cuts * width, 0), tl.where(is_sliced, bags * parts, 0)
            sums_end, counted_end = total_sums + tl.cumsum(sums, 0), total_arrivals + tl.cumsum(counted, 0)
            total_sums += tl.sum(sums, 0)
            total_arrivals += tl.sum(counted, 0)
            # There is room for all slices of as many lookups as there are; wrong offsets may tell of more.
            is_sliced &= (sums_end <= sums_room) & (counted_end <= arrivals_room)
            cuts, steps = tl.where(is_sliced, cuts, 1), tl.where(is_sliced, 1, steps)
            of_group = slices + group.to(tl.int64) * SLICE_FIELDS
            tl.store(of_group + NUM_SLICES, cuts, mask=is_sliced)
            tl.store(of_group + SUMS_BEGIN, sums_end - sums, mask=is_sliced)
            tl.store(of_group + ARRIVALS_BEGIN, counted_end - counted, mask=is_sliced)
        of_unit = at_once * steps
        units = tl.where(bags > 0, ((bags - 1).to(tl.int32) // of_unit + 1).to(tl.int64) * parts * cuts, 0)
        schedule = (exponent * NUM_KINDS + kind) * 2 + is_vector
        tl.store(schedules + group, schedule | (tl.where(is_sliced, 0, of_unit) << SCHEDULE_BITS), mask=exists)
        # The kinds of a class, counted in 16 bits each. What stands at other places goes through memory.
        shift = (kind * -16 + (NUM_KINDS * 16 - 16)).to(tl.int64)
        own = tl.where(exists, tl.full((BLOCK,), 1, tl.int64) << shift, 0)
        counted_here = tl.cumsum(own, 0)
        tl.store(ends + place, counted_here, mask=exists)
        tl.debug_barrier()
        before = tl.load(ends + class_begin - 1, mask=exists & (class_begin > start), other=0)
        of_class = tl.load(ends + class_end - 1, mask=exists, other=0) - before
        tl.debug_barrier()
        earlier = sum_of_counts(of_class & ((tl.full((BLOCK,), 1, tl.int64) << shift) - 1))
        rank = (((counted_here - own - before) >> shift) & 0xFFFF).to(tl.int32)
        target = class_begin + earlier + rank
        tl.store(order + target, group, mask=exists)
        tl.store(ends + target, units, mask=exists)
        tl.debug_barrier()
        units = tl.load(ends + place, mask=exists, other=0)
        tl.debug_barrier()
        tl.store(ends + place, total + tl.cumsum(units, 0), mask=exists)
        total += tl.sum(units, 0)
    total_arrivals = tl.minimum(total_arrivals, arrivals_room)
    for start in range(0, total_arrivals, BLOCK):
        place = start + tl.arange(0, BLOCK)
        tl.store(arrivals + place, tl.zeros((BLOCK,), tl.int32), mask=place < total_arrivals)


@triton.jit
def take_unit(counter):
    """Return the number of the next unit of work. Who takes it changes nothing that is computed."""
    return tl.atomic_add(counter, 1, sem="relaxed")


@triton.jit
def group_of(ends, unit, num_groups, STRIDE: tl.constexpr = 1):
    """Return the group that a unit of work belongs to, and the units before it.

    Each turn looks at 32 places at once and leaves a 32nd of the groups: of a thousand groups it takes two, where halving takes
    ten loads that wait for one another.
    """
    low = tl.zeros((), tl.int32)
    size = low + num_groups
    while size > 1:
        size = (size + 31) // 32
        place = low + (tl.arange(0, 32) + 1) * size - 1
        is_before = tl.load(ends + place * STRIDE, mask=place < num_groups, other=2**62) <= unit
        low += tl.sum(is_before.to(tl.int32), 0) * size
    return low, tl.load(ends + (low - 1) * STRIDE, mask=low > 0, other=0)


@triton.jit
def span_of(offsets, bag, exists, num_lookups):
    """Return where the lookups of bags begin and end; wrong offsets never lead outside of the lookups."""
    begin = tl.load(offsets + bag, mask=exists, other=0)
    end = tl.load(offsets + bag + 1, mask=exists, other=0)
    # Both on both sides: their difference, and where the step after this one ends, shall fit into 32 bits.
    return tl.minimum(tl.maximum(begin, 0), num_lookups), tl.minimum(tl.maximum(end, 0), num_lookups)


@triton.jit
def bags_of(bag, offsets, layout, batches, feature_of_bag, num_lookups, num_all_bags, num_bags, output_stride):
    """Return for some bags where their lookups begin and end, their features, and where their output begins."""
    exists = bag < num_all_bags
    begin, end = span_of(offsets, bag, exists, num_lookups)
    if batches is None:
        feature = bag // num_bags
        source = (bag - feature * num_bags) * output_stride
        source += tl.load(layout + feature * FIELDS + OUTPUT_COLUMN, mask=exists, other=0)
    else:
        feature = tl.load(feature_of_bag + bag, mask=exists, other=0).to(tl.int64)
        of_batch = batches + feature * BATCH_FIELDS
        stride = tl.load(of_batch + OUTPUT_STRIDE, mask=exists, other=0)
        source = (bag - tl.load(of_batch + FIRST_BAG, mask=exists, other=0)) * stride
        source += tl.load(of_batch + OUTPUT_BEGIN, mask=exists, other=0)
    return begin, end, feature, source, exists
