"""Forward pass of embedding bags: kernels that take units of bags, each feature's by its schedule, and what they do with one.

Programs take the units of all features one by one, features of one schedule after another, so that those that run together run
the same code and read the same few tables. Small batches, for which the map that says so would be the longest part, are dealt out
by number instead.
"""

from __future__ import annotations

import triton
import triton.language as tl

from jagged.ops._shared.device import rounded_product
from jagged.ops.embedding_bag.triton.columns import (
    BATCH_FIELDS,
    FIELDS,
    FIRST_BAG,
    FIRST_ROW,
    IS_MEAN,
    NUM_BAGS,
    OUTPUT_BEGIN,
    OUTPUT_COLUMN,
    OUTPUT_STRIDE,
    PART_FEATURE,
    PART_NUMBER,
    PART_WIDTH,
    ROWS,
    START,
    WIDTH,
)
from jagged.ops.embedding_bag.triton.schedules import (
    ARRIVALS_BEGIN,
    NUM_KINDS,
    NUM_SCHEDULES,
    NUM_SLICES,
    SCHEDULE_BITS,
    SCHEDULE_MASK,
    SLICE_FIELDS,
    SMALL_COLUMNS,
    SUMS_BEGIN,
    columns_by,
    columns_of,
    group_of,
    groups_by,
    is_in_step,
    is_of_many,
    lanes_by,
    span_of,
    take_unit,
    turn_by,
    unroll_by,
)


@triton.jit
def place_of(offsets, bag, last, num_lookups):
    """Return where the lookups of a bag begin, which is where those before it end; wrong offsets stay within the lookups."""
    return tl.minimum(tl.maximum(tl.load(offsets + bag, mask=bag <= last, other=0), 0), num_lookups)


@triton.jit
def scale_and_bias(pair, exists):
    """Return what values of quantised rows are multiplied by and what is added; 0 for rows that are not there.

    Both come as one number of 64 bits: half the loads, and fewer registers than two loads or a third dimension take.
    """
    both = tl.load(pair, mask=exists, other=0)
    return both.to(tl.int32).to(tl.float32, bitcast=True), (both >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def sum_of_rows(
    values, row_scales, first_row, ids, scales, place, is_live, rows, stride, columns, VECTOR: tl.constexpr,
):  # fmt: skip
    """Sum rows over the second axis of ids `[groups, unrolled]`: `[groups, columns]` in float32.

    Ids outside of the table count as zeros. `stride` is the rows' width. With `row_scales`, of which the table's begin at
    `first_row`, values are those of quantised rows. Lookups in registers are the second axis, for of axes that are not contiguous
    the first gets the lanes that are left: the other way round each step would add up across lanes.
    """
    if VECTOR:
        # It is; said so that the compiler sees it, and makes loads of 16 bytes.
        stride = stride // 4 * 4
    # In the tile's shape from here on, so that ids move to its lanes as they are, not as addresses of twice their size. Without
    # signs, for then the product of 32-bit factors is one instruction, and negative ids are large ones.
    shape: tl.constexpr = [ids.shape[0], ids.shape[1], columns.shape[0]]
    unsigned: tl.constexpr = tl.uint32 if ids.dtype == tl.int32 else tl.uint64
    ids = tl.where(is_live, ids, -1).to(unsigned, bitcast=True)
    if row_scales is not None:
        # Rows that are not there have a bias of 0, too.
        row_scale, row_bias = scale_and_bias(row_scales + first_row + ids.to(tl.int64), ids < rows.to(unsigned))
        if scales is not None:
            # Once for a lookup, not for each of its columns.
            scale = tl.load(scales + place, mask=is_live, other=0.0).to(tl.float32)
            row_scale, row_bias = row_scale * scale, row_bias * scale
    ids = tl.broadcast_to(ids[:, :, None], shape)
    mask = (columns < stride)[None, None, :] & (ids < rows.to(unsigned))
    element = ids.to(tl.uint64) * stride.to(unsigned).to(tl.uint64) + columns[None, None, :].to(tl.uint64)
    tile = tl.load(values + element, mask=mask, other=0.0).to(tl.float32)
    if row_scales is not None:
        # An fma, which the sum contracts no further; see the products below.
        tile = tl.fma(tile, tl.broadcast_to(row_scale[:, :, None], shape), tl.broadcast_to(row_bias[:, :, None], shape))
    elif scales is not None:
        # Rounded before it is summed, so that all lanes that have a sum have the same bits.
        scale = tl.load(scales + place, mask=is_live, other=0.0).to(tl.float32)
        tile = rounded_product(tile, tl.broadcast_to(scale[:, :, None], shape))
    return tl.sum(tile, 1)


@triton.jit
def feature_of(
    weights, indices, offsets, output, layout, batches, feature, num_bags, output_stride, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Return a feature's table, its first row, rows, width, whether means are taken, offsets, bags, output, its rows' stride."""
    fields = layout + feature * FIELDS
    table = weights + tl.load(fields + START) // 16 * 16
    rows, width = tl.load(fields + ROWS), tl.load(fields + WIDTH)
    is_mean, first_row = tl.load(fields + IS_MEAN), tl.load(fields + FIRST_ROW)
    if indices.dtype.element_ty == tl.int32:
        rows = tl.minimum(rows, 2**31 - 1).to(tl.int32)
    if batches is None:
        offsets += feature.to(tl.int64) * num_bags
        column = tl.load(fields + OUTPUT_COLUMN)
    else:
        of_batch = batches + feature * BATCH_FIELDS
        offsets += tl.load(of_batch + FIRST_BAG)
        num_bags = tl.load(of_batch + NUM_BAGS)
        column = tl.load(of_batch + OUTPUT_BEGIN)
        output_stride = tl.load(of_batch + OUTPUT_STRIDE)
    if ALIGNED:
        # All widths are multiples of 4, and so is what is counted in them; said so that the compiler sees it, for stores of 16.
        width, column, output_stride = width // 4 * 4, column // 4 * 4, output_stride // 4 * 4
    output += column
    return table, first_row, rows, width, is_mean, offsets, num_bags, output, output_stride


# Called and not inlined: what one branch computes holds no registers in another.
@triton.jit(noinline=True)
def pool_unit(
    weights, row_scales, indices, offsets, scales, output, layout, batches, feature, unit, unit_bags, num_lookups, num_bags,
    output_stride, ALIGNED: tl.constexpr, MEANS: tl.constexpr, SCHEDULE: tl.constexpr,
):  # fmt: skip
    """Pool the bags of one unit, as many in step as stand side by side.

    Ids of the next step, of these bags or the next ones, are under way while the rows of this step are, and so are the next ones'
    offsets.
    """
    COLUMNS: tl.constexpr = columns_by(SCHEDULE)
    LANES: tl.constexpr = lanes_by(SCHEDULE)
    GROUPS: tl.constexpr = groups_by(SCHEDULE)
    BAGS: tl.constexpr = GROUPS // LANES
    TURN: tl.constexpr = turn_by(SCHEDULE)
    table, first_row, rows, width, is_mean, offsets, num_bags, of_feature, output_stride = feature_of(
        weights, indices, offsets, output, layout, batches, feature, num_bags, output_stride, ALIGNED
    )
    parts = (width + COLUMNS - 1) // COLUMNS
    columns = (unit % parts * COLUMNS).to(tl.int32) + tl.arange(0, COLUMNS)
    bag = unit // parts * unit_bags
    last = tl.minimum(bag + unit_bags, num_bags)
    of_lookups, of_sums = tl.arange(0, GROUPS) // LANES, tl.arange(0, BAGS)
    step = tl.arange(0, GROUPS)[:, None] % LANES + tl.arange(0, TURN // LANES)[None, :] * LANES
    begin, end = span_of(offsets + bag, of_lookups, of_lookups < last - bag, num_lookups)
    next_begin, next_end = span_of(offsets + bag + BAGS, of_lookups, of_lookups < last - bag - BAGS, num_lookups)
    ids = tl.load(indices + begin[:, None] + step, mask=step < (end - begin)[:, None], other=0)
    longest, taken = tl.max(end - begin, 0), tl.zeros((), offsets.dtype.element_ty)
    total = tl.zeros((GROUPS, COLUMNS), tl.float32)
    while bag < last:
        is_done = taken + TURN >= longest
        following, following_end = tl.where(is_done, next_begin, begin + taken + TURN), tl.where(is_done, next_end, end)
        next_ids = tl.load(indices + following[:, None] + step, mask=step < (following_end - following)[:, None], other=0)
        place = begin[:, None] + taken + step
        total += sum_of_rows(
            table, row_scales, first_row, ids, scales, place, place < end[:, None], rows, width, columns, SCHEDULE % 2
        )  # fmt: skip
        ids = next_ids
        taken += TURN
        if is_done:
            sums = tl.sum(tl.reshape(total, (BAGS, LANES, COLUMNS)), 1)
            left = (last - bag).to(tl.int32)
            if MEANS:  # noqa: SIM102
                if is_mean != 0:
                    first, after = span_of(offsets + bag, of_sums, of_sums < left, num_lookups)
                    sums /= tl.maximum(after - first, 1).to(tl.float32)[:, None]
            address = of_feature + (bag + of_sums).to(tl.int64)[:, None] * output_stride + columns[None, :]
            tl.store(address, sums.to(output.dtype.element_ty), mask=(of_sums < left)[:, None] & (columns < width)[None, :])
            total = tl.zeros((GROUPS, COLUMNS), tl.float32)
            bag += BAGS
            begin, end = next_begin, next_end
            longest, taken = tl.max(end - begin, 0), tl.zeros((), offsets.dtype.element_ty)
            next_begin, next_end = span_of(offsets + bag + BAGS, of_lookups, of_lookups < last - bag - BAGS, num_lookups)


@triton.jit(noinline=True)
def pool_in_turn(
    weights, row_scales, indices, offsets, scales, output, layout, batches, feature, unit, unit_bags, num_lookups, num_bags,
    output_stride, ALIGNED: tl.constexpr, MEANS: tl.constexpr, SCHEDULE: tl.constexpr,
):  # fmt: skip
    """Pool the bags of one unit one after the other.

    Their lookups lie one behind the other: ids of the next step, of this bag or the next one, are under way while the rows of
    this step are, and so is the end of the bag after.
    """
    COLUMNS: tl.constexpr = columns_by(SCHEDULE)
    GROUPS: tl.constexpr = groups_by(SCHEDULE)
    UNROLL: tl.constexpr = unroll_by(SCHEDULE)
    table, first_row, rows, width, is_mean, offsets, num_bags, of_feature, output_stride = feature_of(
        weights, indices, offsets, output, layout, batches, feature, num_bags, output_stride, ALIGNED
    )
    parts = (width + COLUMNS - 1) // COLUMNS
    columns = (unit % parts * COLUMNS).to(tl.int32) + tl.arange(0, COLUMNS)
    bag = unit // parts * unit_bags
    last = tl.minimum(bag + unit_bags, num_bags)
    step = tl.arange(0, GROUPS)[:, None] + tl.arange(0, UNROLL)[None, :] * GROUPS
    begin, end = place_of(offsets, bag, last, num_lookups), place_of(offsets, bag + 1, last, num_lookups)
    end_after = place_of(offsets, bag + 2, last, num_lookups)
    place = begin
    ids = tl.load(indices + place + step, mask=place + step < num_lookups, other=0)
    total = tl.zeros((GROUPS, COLUMNS), tl.float32)
    while bag < last:
        is_done = place + UNROLL * GROUPS >= end
        following = tl.where(is_done, end, place + UNROLL * GROUPS)
        if place < end:
            next_ids = tl.load(indices + following + step, mask=step < num_lookups - following, other=0)
            total += sum_of_rows(
                table, row_scales, first_row, ids, scales, place + step, step < end - place, rows, width, columns, SCHEDULE % 2
            )  # fmt: skip
            ids = next_ids
        if is_done:
            sums = tl.zeros((COLUMNS,), tl.float32)
            # Many bags are empty, and sums over lanes take as long as a step.
            if begin < end:
                sums = tl.sum(total, 0)
                if MEANS:  # noqa: SIM102
                    if is_mean != 0:
                        sums /= (end - begin).to(tl.float32)
            address = of_feature + bag * output_stride + columns
            tl.store(address, sums.to(output.dtype.element_ty), mask=columns < width)
            total = tl.zeros((GROUPS, COLUMNS), tl.float32)
            bag += 1
            begin, end = end, end_after
            end_after = place_of(offsets, bag + 2, last, num_lookups)
        place = following


@triton.jit(noinline=True)
def pool_slice(
    weights, row_scales, indices, offsets, scales, output, layout, batches, slices, sums_of_slices, arrivals, feature, unit,
    num_lookups, num_bags, output_stride, ALIGNED: tl.constexpr, MEANS: tl.constexpr,
    SCHEDULE: tl.constexpr,
):  # fmt: skip
    """Pool some lookups of one bag; the last program of the bag adds all sums up, in the slices' order, whichever it is."""
    COLUMNS: tl.constexpr = columns_by(SCHEDULE)
    GROUPS: tl.constexpr = groups_by(SCHEDULE)
    UNROLL: tl.constexpr = unroll_by(SCHEDULE)
    table, first_row, rows, width, is_mean, offsets, num_bags, of_feature, output_stride = feature_of(
        weights, indices, offsets, output, layout, batches, feature, num_bags, output_stride, ALIGNED
    )
    num_slices = tl.load(slices + feature * SLICE_FIELDS + NUM_SLICES)
    parts = (width + COLUMNS - 1) // COLUMNS
    part, slice_, bag = unit % parts, unit // parts % num_slices, unit // parts // num_slices
    columns = (part * COLUMNS).to(tl.int32) + tl.arange(0, COLUMNS)
    in_row = columns < width
    address = of_feature + bag * output_stride
    begin, end = span_of(offsets + bag, 0, True, num_lookups)
    length = tl.maximum(end - begin, 0).to(tl.int64)
    first = begin + length * slice_ // num_slices
    # Places from the slice's first on are 32-bit numbers.
    count = (begin + length * (slice_ + 1) // num_slices - first).to(tl.int32)
    own_scales = scales
    if scales is not None:
        own_scales = scales + first
    lane = tl.arange(0, GROUPS)[:, None] + tl.arange(0, UNROLL)[None, :] * GROUPS
    sums = tl.zeros((GROUPS, COLUMNS), tl.float32)
    for step in range(0, count, UNROLL * GROUPS):
        ids = tl.load(indices + first + step + lane, mask=lane < count - step, other=0)
        sums += sum_of_rows(
            table, row_scales, first_row, ids, own_scales, step + lane, lane < count - step, rows, width, columns, SCHEDULE % 2
        )  # fmt: skip
    of_bag = sums_of_slices + tl.load(slices + feature * SLICE_FIELDS + SUMS_BEGIN) + bag * num_slices * width + columns
    tl.store(of_bag + slice_ * width, tl.sum(sums, 0), mask=in_row)
    # All lanes have written before one tells it.
    tl.debug_barrier()
    arrival = arrivals + tl.load(slices + feature * SLICE_FIELDS + ARRIVALS_BEGIN) + bag * parts + part
    if tl.atomic_add(arrival, 1, sem="acq_rel") == num_slices - 1:
        total = tl.zeros((COLUMNS,), tl.float32)
        for other in range(0, num_slices):
            # What lies beside it in memory may have been read before this was written: not from the L1.
            total += tl.load(of_bag + other * width, mask=in_row, other=0.0, cache_modifier=".cg")
        if MEANS:  # noqa: SIM102
            if is_mean != 0:
                total /= tl.maximum(length, 1).to(tl.float32)
        tl.store(address + columns, total.to(output.dtype.element_ty), mask=in_row)


@triton.jit(do_not_specialize=["num_features", "num_lookups", "num_bags", "output_stride"])
def embedding_bags_forward_kernel(
    weights, row_scales, indices, offsets, scales, output, layout, batches, order, ends, schedules, slices, sums_of_slices,
    arrivals, counter, num_features, num_lookups, num_bags, output_stride, USED: tl.constexpr,
    ALIGNED: tl.constexpr, MEANS: tl.constexpr,
):  # fmt: skip
    """Take units of all features; `USED` has a bit for each schedule that is compiled.

    Units are taken from both ends of their order in turn, so that wide rows of many lookups, which wait for memory, are read
    beside narrow and few ones, which do not.
    """
    num_units = tl.load(ends + num_features - 1)
    number = tl.program_id(0).to(tl.int64)
    while number < num_units:
        following = take_unit(counter)
        unit = tl.where(number % 2 == 0, number // 2, num_units - 1 - number // 2)
        place, before = group_of(ends, unit, num_features)
        feature = tl.load(order + place)
        found = tl.load(schedules + feature)
        for i in tl.static_range(NUM_SCHEDULES):
            if (USED >> i) & 1:
                if (found & SCHEDULE_MASK == i) & (found != i):
                    if is_in_step(i):
                        pool_unit(
                            weights, row_scales, indices, offsets, scales, output, layout, batches, feature, unit - before,
                            found >> SCHEDULE_BITS, num_lookups, num_bags, output_stride, ALIGNED, MEANS, i,
                        )  # fmt: skip
                    else:
                        pool_in_turn(
                            weights, row_scales, indices, offsets, scales, output, layout, batches, feature, unit - before,
                            found >> SCHEDULE_BITS, num_lookups, num_bags, output_stride, ALIGNED, MEANS, i,
                        )  # fmt: skip
                if is_of_many(i):  # noqa: SIM102
                    if found == i:
                        pool_slice(
                            weights, row_scales, indices, offsets, scales, output, layout, batches, slices, sums_of_slices,
                            arrivals, feature, unit - before, num_lookups, num_bags, output_stride, ALIGNED, MEANS, i,
                        )  # fmt: skip
        number = following


@triton.jit(do_not_specialize=["first_part", "units", "unit_bags", "num_lookups", "num_bags", "output_stride"])
def embedding_bags_small_kernel(
    weights, row_scales, indices, offsets, scales, output, layout, first_part, units, unit_bags, num_lookups, num_bags,
    output_stride, USED: tl.constexpr, ALIGNED: tl.constexpr, MEANS: tl.constexpr,
):  # fmt: skip
    """Pool one of the `units` of a part of a feature, of `unit_bags` bags; parts stand in the layout from `first_part` on.

    Bags go in step where the feature has one lookup in the mean: there each program takes as many as stand side by side, and
    those that are left without bags end.
    """
    program = tl.program_id(0)
    unit = (program % units).to(tl.int64)
    of_part = layout + (first_part + program // units).to(tl.int64) * FIELDS
    feature, part, width = tl.load(of_part + PART_FEATURE), tl.load(of_part + PART_NUMBER), tl.load(of_part + PART_WIDTH)
    first = offsets + feature * num_bags
    is_long = (tl.load(first + num_bags) - tl.load(first)) * 2 > num_bags * 3
    _, exponent = columns_of(tl.minimum(width, SMALL_COLUMNS))
    found = (exponent * NUM_KINDS + tl.where(is_long, NUM_KINDS - 1, 0)) * 2 + (width % 4 == 0).to(tl.int32)
    parts = (width + SMALL_COLUMNS - 1) // SMALL_COLUMNS
    for i in tl.static_range(NUM_SCHEDULES):
        if (USED >> i) & 1:  # noqa: SIM102
            if found == i:
                if is_in_step(i):
                    side_by_side = tl.maximum(unit_bags, groups_by(i) // lanes_by(i))
                    if unit * side_by_side < num_bags:
                        pool_unit(
                            weights, row_scales, indices, offsets, scales, output, layout, None, feature, unit * parts + part,
                            side_by_side, num_lookups, num_bags, output_stride, ALIGNED, MEANS, i,
                        )  # fmt: skip
                else:
                    pool_in_turn(
                        weights, row_scales, indices, offsets, scales, output, layout, None, feature, unit * parts + part,
                        unit_bags, num_lookups, num_bags, output_stride, ALIGNED, MEANS, i,
                    )  # fmt: skip
