"""Backward pass of embedding bags: each row's lookups are brought together by a stable sort and summed in that order.

A lookup has a key, its row among those of all tables, and a source, the element of the incoming gradient that its bag begins at.
After the sort, runs of equal keys are the lookups of a row. Programs take some hundred sorted lookups of a table each: groups of
lanes walk over a part of them, two lookups at once, regardless of where runs begin, and sum the gradients in their order. Where a
run ends, its sum is stored as the row's gradient, or updates the row at once. A run belongs to the group that it begins with,
which goes on beyond its part to the run's end; a row with thousands of lookups is summed in blocks, which another kernel joins.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged.ops._shared.device import rounded_product
from jagged.ops._shared.matrices import gpu
from jagged.ops.embedding_bag.optimizers import STATES
from jagged.ops.embedding_bag.plans import PROGRAMS
from jagged.ops.embedding_bag.schedules import group_of, known_of, span_of, take_unit

# Bags, and lookups of each, that a program of the kernel of keys takes at once.
BLOCK_BAGS, BLOCK_LOOKUPS = 16, 16
# Sorted lookups that a group of lanes takes, and of a block, at whose end a row's sum is cut, so that none has very many of them.
STREAM, SPLIT = 64, 1024
# Columns of a program; of updates with one number a row all columns, up to 8,192.
MOST_COLUMNS = tl.constexpr(128)
# Numbers of a row of lanes.
NUMBERS = tl.constexpr(128)
# Widths that programs may have: 4 to 8,192, powers of two.
NUM_WIDTHS = tl.constexpr(12)
# Tables that the kernel of the units takes at once.
BLOCK_TABLES = 1024
# Programs that join what was cut, for each multiprocessor.
JOINING = 16
SAMPLE_BAGS, SAMPLE_LOOKUPS, SAMPLE_COLUMNS = 4, 4, 32


@triton.jit
def bags_of(
    bag, offsets, layout, batches, feature_of_bag, num_lookups, num_all_bags, num_bags, output_stride, FIELDS: tl.constexpr
):  # fmt: skip
    """Return for some bags where their lookups begin and end, their features' fields, and where their output begins."""
    exists = bag < num_all_bags
    begin, end = span_of(offsets, bag, exists, num_lookups)
    if batches is None:
        feature = bag // num_bags
        source = (bag - feature * num_bags) * output_stride
        source += tl.load(layout + feature * FIELDS + 3, mask=exists, other=0)
    else:
        feature = tl.load(feature_of_bag + bag, mask=exists, other=0)
        width = tl.load(layout + feature * FIELDS + 2, mask=exists, other=0)
        source = (bag - tl.load(batches + feature * 3, mask=exists, other=0)) * width
        source += tl.load(batches + feature * 3 + 2, mask=exists, other=0)
    return begin, end, layout + feature * FIELDS, source, exists


@triton.jit(do_not_specialize=["num_lookups", "num_all_bags", "num_bags", "output_stride", "num_rows"])
def embedding_bags_lookups_kernel(
    indices, offsets, scales, layout, batches, feature_of_bag, keys, sources, factors, num_lookups, num_all_bags, num_bags,
    output_stride, num_rows, FIELDS: tl.constexpr, BAGS: tl.constexpr, LOOKUPS: tl.constexpr,
):  # fmt: skip
    """Key, source and factor of every lookup of some bags; an id that its table does not have gets the key `num_rows`."""
    bag = tl.program_id(0).to(tl.int64) * BAGS + tl.arange(0, BAGS)
    begin, end, fields, source, exists = bags_of(
        bag, offsets, layout, batches, feature_of_bag, num_lookups, num_all_bags, num_bags, output_stride, FIELDS
    )
    rows = tl.load(fields + 1, mask=exists, other=0)
    first_row = tl.load(fields + 5, mask=exists, other=0)
    is_mean = tl.load(fields + 4, mask=exists, other=0) != 0
    factor = tl.where(is_mean, 1 / tl.maximum(end - begin, 1).to(tl.float32), 1.0)
    for step in range(0, tl.max(end - begin, 0), LOOKUPS):
        place = begin[:, None] + step + tl.arange(0, LOOKUPS)[None, :]
        is_live = place < end[:, None]
        row = tl.load(indices + place, mask=is_live, other=0).to(tl.int64)
        key = tl.where((row >= 0) & (row < rows[:, None]), first_row[:, None] + row, num_rows)
        tl.store(keys + place, key.to(keys.dtype.element_ty), mask=is_live)
        tl.store(sources + place, (source[:, None] + tl.zeros_like(row)).to(sources.dtype.element_ty), mask=is_live)
        if factors is not None:
            of_place = factor[:, None] + tl.zeros((BAGS, LOOKUPS), tl.float32)
            if scales is not None:
                of_place *= tl.load(scales + place, mask=is_live, other=0.0).to(tl.float32)
            tl.store(factors + place, of_place, mask=is_live)


@triton.jit
def mixed(x):
    """Return 32 bits of a hash of 63-bit integers, as `torch_impl.mixed`."""
    x = (x ^ (x >> 32)) & 0xFFFFFFFF
    x = (x * 0x85EBCA6B) & 0xFFFFFFFF
    x ^= x >> 13
    x = (x * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ (x >> 16)


@triton.jit
def rounded(new, element, step):
    """Round to bfloat16 up or down, by a number that depends on the step and on the element."""
    bits = new.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    cut = (bits + (mixed(element + (step << 40)) & 0xFFFF)) & 0xFFFF0000
    # What is not finite stays as it is.
    cut = tl.where((bits & 0x7F800000) == 0x7F800000, bits, cut)
    return cut.to(tl.uint32).to(tl.float32, bitcast=True).to(tl.bfloat16)


@triton.jit
def decayed(grad, old, weight_decay, KIND: tl.constexpr):
    """Return gradients with the weights' share, which adam takes apart from them."""
    if KIND == "adam" or KIND == "rowwise_adam":
        return grad
    return grad + weight_decay * old


@triton.jit
def updated(
    grad, square, old, first, second, element, row, corrections, rate, numbers, mask, row_mask, KIND: tl.constexpr,
):  # fmt: skip
    """Return new weights and store new states; `grad` has the weights' share, `square` is the mean of its squares by row."""
    eps, beta1, beta2, weight_decay, rest1, rest2 = numbers
    if KIND == "sgd":
        new = old - rate * grad
    elif KIND == "adagrad":
        state = tl.load(first + element, mask=mask, other=0.0) + grad * grad
        tl.store(first + element, state, mask=mask)
        new = old - rate * grad / (tl.sqrt_rn(state) + eps)
    elif KIND == "rowwise_adagrad":
        state = tl.load(first + row, mask=row_mask, other=0.0) + square
        new = old - rate * grad / (tl.sqrt_rn(state) + eps)[:, None]
    else:
        mean = beta1 * tl.load(first + element, mask=mask, other=0.0) + rest1 * grad
        tl.store(first + element, mean, mask=mask)
        unbiased = mean / tl.load(corrections)
        correction = tl.load(corrections + 1)
        if KIND == "adam":
            variance = beta2 * tl.load(second + element, mask=mask, other=0.0) + rest2 * grad * grad
            tl.store(second + element, variance, mask=mask)
            divisor = tl.sqrt_rn(variance / correction) + eps
        else:
            variance = beta2 * tl.load(second + row, mask=row_mask, other=0.0) + rest2 * square
            divisor = (tl.sqrt_rn(variance / correction) + eps)[:, None]
        new = old - rate * (unbiased / divisor + weight_decay * old)
    return new


@triton.constexpr_function
def columns_by(schedule):
    """Return the columns of a schedule, which is (columns' exponent - 2, whether rows begin at multiples of 4 elements)."""
    return 4 << (schedule // 2)


@triton.jit
def schedule_of(width, WHOLE_ROWS: tl.constexpr):
    """Return the schedule of rows of some width."""
    exponent = (width * 0).to(tl.int32)
    for i in tl.static_range(1, NUM_WIDTHS if WHOLE_ROWS else 6):
        exponent += (width > (2 << i)).to(tl.int32)
    return exponent * 2 + (width % 4 == 0).to(tl.int32)


@triton.jit
def unit_of(width, STREAM: tl.constexpr, SPLIT: tl.constexpr):
    """Return the lookups of a unit: `STREAM` for each group of lanes, no more than a block."""
    groups = (width * 0 + 1).to(tl.int64)
    for i in tl.static_range(0, 5):
        groups = tl.where(width <= (4 << i), tl.maximum(groups, 32 >> i), groups)
    return tl.minimum(groups * STREAM, SPLIT)


@triton.jit(do_not_specialize=["num_tables", "num_programs"])
def embedding_bags_rows_map_kernel(
    tables, begins, ends, block_ends, counter, num_tables, num_programs, FIELDS: tl.constexpr,
    STREAM: tl.constexpr, SPLIT: tl.constexpr, WHOLE_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For each table after how many blocks of `SPLIT` lookups it ends, and, in the order by width, after how many units.

    Programs that run together shall run the same code, for a multiprocessor's cache of instructions holds few schedules.
    """
    tl.store(counter, num_programs)
    total, total_blocks = tl.zeros((), tl.int64), tl.zeros((), tl.int64)
    for start in range(0, num_tables, BLOCK):
        place = start + tl.arange(0, BLOCK)
        exists = place < num_tables
        lookups = tl.load(begins + place + 1, mask=exists, other=0) - tl.load(begins + place, mask=exists, other=0)
        blocks = (lookups + SPLIT - 1) // SPLIT
        tl.store(block_ends + place, total_blocks + tl.cumsum(blocks, 0), mask=exists)
        total_blocks += tl.sum(blocks, 0)
        table = tl.load(tables + place.to(tl.int64) * FIELDS + 3, mask=exists, other=0)
        lookups = tl.load(begins + table + 1, mask=exists, other=0) - tl.load(begins + table, mask=exists, other=0)
        width = tl.load(tables + table.to(tl.int64) * FIELDS + 2, mask=exists, other=1)
        unit = unit_of(width, STREAM, SPLIT)
        units = (lookups + unit - 1) // unit
        if not WHOLE_ROWS:
            units *= (width + MOST_COLUMNS - 1) // MOST_COLUMNS
        tl.store(ends + place, total + tl.cumsum(units, 0), mask=exists)
        total += tl.sum(units, 0)


@triton.jit
def lookups_at(
    grad, sources, factors, keys, weights, place, is_alive, last, last_key, not_own, limit, start, first_row, width, columns,
    KIND: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Load one sorted lookup of each group of lanes, and its rows of the gradient and, where a run ends, of the weights.

    Returns keys, whether a run begins and ends here and is the group's, and both rows, `[groups, columns]`.
    """
    exists = is_alive & (place < limit)
    key = tl.load(keys + place, mask=exists, other=-1)
    is_first = tl.load(keys + place - 1, mask=exists & (place > 0), other=-3) != key
    is_own = exists & ((place < last) | (key == last_key)) & (key != not_own)
    is_last = is_own & (tl.load(keys + place + 1, mask=exists & (place + 1 < limit), other=-3) != key)
    source = tl.load(sources + place, mask=is_own, other=0)
    if ALIGNED:
        # It is; said so that the compiler sees it, and makes loads of 16 bytes.
        source = source // 4 * 4
    in_row = (columns < width)[None, :]
    tile = tl.load(grad + (source.to(tl.int64)[:, None] + columns[None, :]), mask=is_own[:, None] & in_row, other=0.0)
    tile = tile.to(tl.float32)
    if factors is not None:
        tile *= tl.load(factors + place, mask=is_own, other=0.0)[:, None]
    old = tile
    if KIND != "none":
        element = start + (key.to(tl.int64) - first_row) * width
        old = tl.load(weights + (element[:, None] + columns[None, :]), mask=is_last[:, None] & in_row, other=0.0).to(tl.float32)
    return key, is_first, is_own, is_last, tile, old


@triton.jit
def apply_sums(
    sums, old, is_stored, row, element, in_row, weights, first, second, step, corrections, rate, width, numbers,
    KIND: tl.constexpr, IS_STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Store sums `[rows, columns]` of gradients, or update weights and states by them; `old` are the weights."""
    BY_ROW: tl.constexpr = KIND == "rowwise_adagrad" or KIND == "rowwise_adam"
    mask = is_stored[:, None] & in_row
    new = sums
    if KIND != "none":
        sums = tl.where(mask, decayed(sums, old, numbers[3], KIND), 0.0)
        square = tl.zeros(row.shape, tl.float32)
        if BY_ROW:
            square = tl.sum(rounded_product(sums, sums), 1) / width
        new = updated(
            sums, square, old, first, second, element, row, corrections, rate, numbers, mask, is_stored, KIND
        )  # fmt: skip
        if KIND == "rowwise_adagrad":
            tl.store(first + row, tl.load(first + row, mask=is_stored, other=0.0) + square, mask=is_stored)
        if KIND == "rowwise_adam":
            variance = numbers[2] * tl.load(second + row, mask=is_stored, other=0.0) + numbers[5] * square
            tl.store(second + row, variance, mask=is_stored)
    if IS_STOCHASTIC:
        tl.store(weights + element, rounded(new, element, tl.load(step)), mask=mask)
    else:
        tl.store(weights + element, new.to(weights.dtype.element_ty), mask=mask)


# Called and not inlined: what one branch computes holds no registers in another.
@triton.jit(noinline=True)
def row_unit(
    grad, sources, factors, keys, offset, room, unit, block, parts_of_runs, weights, first, second, step, corrections, rate,
    fields, row_stride, part, eps, beta1, beta2, weight_decay, rest1, rest2, SPLIT: tl.constexpr, KIND: tl.constexpr,
    IS_STOCHASTIC: tl.constexpr, ALIGNED: tl.constexpr, SCHEDULE: tl.constexpr,
):  # fmt: skip
    """Sum, and store or apply, the gradients of the rows whose runs begin in a unit of `unit` lookups.

    Places count from the unit's first; before it the table has `offset` lookups, and from it on `room`.
    """
    COLUMNS: tl.constexpr = columns_by(SCHEDULE)
    GROUPS: tl.constexpr = NUMBERS // COLUMNS if COLUMNS < NUMBERS else 1
    numbers = (eps, beta1, beta2, weight_decay, rest1, rest2)
    start, width, first_row = tl.load(fields), tl.load(fields + 2), tl.load(fields + 5)
    if SCHEDULE % 2:
        # It is; said so that the compiler sees it, and makes loads of 16 bytes.
        width = width // 4 * 4
        start = start // 16 * 16
    row_stride = row_stride // 4 * 4
    columns = (part * COLUMNS).to(tl.int32) + tl.arange(0, COLUMNS)
    in_row = (columns < width)[None, :]
    in_block = (offset % SPLIT).to(tl.int32)
    # Where the block ends or the table does.
    limit = tl.minimum(room, SPLIT - in_block).to(tl.int32)
    # Rows of which the blocks before and after have lookups too: their sums are parts.
    came_in = tl.load(keys - 1, mask=(in_block == 0) & (offset > 0), other=-2)
    goes_on = tl.load(keys + limit, mask=limit < room, other=-2)
    is_cut = (came_in == tl.load(keys)) | (goes_on == tl.load(keys + limit - 1))
    # Each group's part of the unit. The first run may be another's, the last one goes on.
    own = (unit + GROUPS - 1) // GROUPS
    place = tl.arange(0, GROUPS) * own
    last = tl.minimum(place + own, tl.minimum(unit, limit))
    is_alive = place < last
    last_key = tl.load(keys + last - 1, mask=is_alive, other=-1)
    before = tl.load(keys + place - 1, mask=is_alive & ((place > 0) | (in_block > 0)), other=-2)
    not_own = tl.where(before == tl.load(keys + place, mask=is_alive, other=-1), before, -2)
    is_alive &= last_key != not_own
    learning_rate = 0.0
    if KIND != "none":
        learning_rate = tl.load(rate)
    total = tl.zeros((GROUPS, COLUMNS), tl.float32)
    is_more = tl.max(is_alive.to(tl.int32), 0)
    while is_more != 0:
        # All loads of a turn are under way together.
        key0, is_first0, _, is_last0, tile0, old0 = lookups_at(
            grad, sources, factors, keys, weights, place, is_alive, last, last_key, not_own, limit, start, first_row, width,
            columns, KIND, ALIGNED,
        )  # fmt: skip
        key1, is_first1, is_own1, is_last1, tile1, old1 = lookups_at(
            grad, sources, factors, keys, weights, place + 1, is_alive, last, last_key, not_own, limit, start, first_row, width,
            columns, KIND, ALIGNED,
        )  # fmt: skip
        for i in tl.static_range(2):
            key, is_first, is_last = (key1, is_first1, is_last1) if i else (key0, is_first0, is_last0)
            total = tl.where(is_first[:, None], 0.0, total) + (tile1 if i else tile0)
            is_whole = is_last
            if is_cut:
                is_part = is_last & ((key == came_in) | (key == goes_on))
                is_whole &= is_part == 0
                # Of a block the run that came in has the first place, and the one that goes on from here has the second.
                slot = block * 2 + (key != came_in).to(tl.int64)
                kept = parts_of_runs + (slot[:, None] * row_stride + columns[None, :])
                tl.store(kept, total, mask=is_part[:, None] & in_row)
            row = key.to(tl.int64)
            element = (start + (row - first_row) * width)[:, None] + columns[None, :]
            apply_sums(
                total, old1 if i else old0, is_whole, row, element, in_row, weights, first, second, step, corrections,
                learning_rate, width, numbers, KIND, IS_STOCHASTIC,
            )  # fmt: skip
        # A group ends with its part, or with the run that goes on beyond it.
        place += 2
        is_alive &= (place < last) | (is_own1 & (is_last1 == 0))
        is_more = tl.max(is_alive.to(tl.int32), 0)


@triton.jit(do_not_specialize=["num_tables", "row_stride", "eps", "beta1", "beta2", "weight_decay", "rest1", "rest2"])
def embedding_bags_rows_kernel(
    grad, sources, factors, keys, parts_of_runs, weights, first, second, step, corrections, rate, tables, begins,
    ends, block_ends, counter, num_tables, row_stride, eps, beta1, beta2, weight_decay, rest1, rest2,
    FIELDS: tl.constexpr, STREAM: tl.constexpr, SPLIT: tl.constexpr, KIND: tl.constexpr, IS_STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr, USED: tl.constexpr,
):  # fmt: skip
    """Take units of all tables' sorted lookups; the rows whose runs begin there are this program's."""
    BY_ROW: tl.constexpr = KIND == "rowwise_adagrad" or KIND == "rowwise_adam"
    num_units = tl.load(ends + num_tables - 1)
    unit = tl.program_id(0).to(tl.int64)
    while unit < num_units:
        next_unit = take_unit(counter)
        place, before = group_of(ends, unit, num_tables)
        table = tl.load(tables + place * FIELDS + 3)
        fields = tables + table * FIELDS
        width = tl.load(fields + 2)
        parts = 1 if BY_ROW else (width + MOST_COLUMNS - 1) // MOST_COLUMNS
        lookups = unit_of(width, STREAM, SPLIT)
        offset = (unit - before) // parts * lookups
        begin = tl.load(begins + table) + offset
        room = tl.load(begins + table + 1) - begin
        block = tl.load(block_ends + table - 1, mask=table > 0, other=0) + offset // SPLIT
        own_factors = factors
        if factors is not None:
            own_factors = factors + begin
        found = schedule_of(width, BY_ROW)
        for i in tl.static_range(2 * NUM_WIDTHS):
            if (USED >> i) & 1:  # noqa: SIM102
                if found == i:
                    row_unit(
                        grad, sources + begin, own_factors, keys + begin, offset, room, lookups.to(tl.int32), block,
                        parts_of_runs, weights, first, second, step, corrections, rate, fields, row_stride,
                        (unit - before) % parts, eps, beta1, beta2, weight_decay, rest1, rest2, SPLIT, KIND, IS_STOCHASTIC,
                        ALIGNED, i,
                    )  # fmt: skip
        unit = next_unit


@triton.jit(noinline=True)
def joined_run(
    parts_of_runs, first_slot, last_slot, key, weights, first, second, step, corrections, rate, fields, row_stride, eps, beta1,
    beta2, weight_decay, rest1, rest2, KIND: tl.constexpr, IS_STOCHASTIC: tl.constexpr, SCHEDULE: tl.constexpr,
):  # fmt: skip
    """Add the parts of one row's lookups up, in their order, and store or apply the sum."""
    COLUMNS: tl.constexpr = columns_by(SCHEDULE)
    BY_ROW: tl.constexpr = KIND == "rowwise_adagrad" or KIND == "rowwise_adam"
    start, width, first_row = tl.load(fields), tl.load(fields + 2), tl.load(fields + 5)
    numbers = (eps, beta1, beta2, weight_decay, rest1, rest2)
    row = tl.zeros((1,), tl.int64) + key.to(tl.int64)
    for part in range(0, 1 if BY_ROW else (width + COLUMNS - 1) // COLUMNS):
        columns = part * COLUMNS + tl.arange(0, COLUMNS)
        in_row = (columns < width)[None, :]
        element = (start + (row - first_row) * width)[:, None] + columns[None, :]
        total = tl.zeros((1, COLUMNS), tl.float32)
        for slot in range(first_slot, last_slot + 1):
            total += tl.load(parts_of_runs + slot * row_stride + columns[None, :], mask=in_row, other=0.0)
        old = total
        if KIND != "none":
            old = tl.load(weights + element, mask=in_row, other=0.0).to(tl.float32)
        learning_rate = 0.0
        if KIND != "none":
            learning_rate = tl.load(rate)
        apply_sums(
            total, old, row >= 0, row, element, in_row, weights, first, second, step, corrections, learning_rate, width, numbers,
            KIND, IS_STOCHASTIC,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_tables", "row_stride", "eps", "beta1", "beta2", "weight_decay", "rest1", "rest2"])
def embedding_bags_join_kernel(
    keys, parts_of_runs, weights, first, second, step, corrections, rate, tables, begins, block_ends, num_tables, row_stride, eps,
    beta1, beta2, weight_decay, rest1, rest2, FIELDS: tl.constexpr, SPLIT: tl.constexpr, KIND: tl.constexpr,
    IS_STOCHASTIC: tl.constexpr, USED: tl.constexpr,
):  # fmt: skip
    """Join the parts of rows that are read by more than a block of lookups: at the first end of a block that each goes across."""
    BY_ROW: tl.constexpr = KIND == "rowwise_adagrad" or KIND == "rowwise_adam"
    num_blocks = tl.load(block_ends + num_tables - 1)
    for block in range(tl.program_id(0).to(tl.int64), num_blocks, tl.num_programs(0)):
        table, before = group_of(block_ends, block, num_tables)
        fields = tables + table * FIELDS
        first_place, last_place = tl.load(begins + table), tl.load(begins + table + 1)
        place = first_place + (block - before) * SPLIT
        key = tl.load(keys + place)
        goes_across = (block > before) & (tl.load(keys + place - 1, mask=block > before, other=-2) == key)
        is_later = goes_across & (block > before + 1)
        is_later &= tl.load(keys + place - SPLIT - 1, mask=is_later, other=-2) == key
        if goes_across & (is_later == 0):
            last_block = block
            place += SPLIT
            while (place < last_place) & (tl.load(keys + place, mask=place < last_place, other=-2) == key):
                last_block += 1
                place += SPLIT
            found = schedule_of(tl.load(fields + 2), BY_ROW)
            for i in tl.static_range(2 * NUM_WIDTHS):
                if (USED >> i) & 1:  # noqa: SIM102
                    if found == i:
                        joined_run(
                            parts_of_runs, block * 2 - 1, last_block * 2, key, weights, first, second, step, corrections, rate,
                            fields, row_stride, eps, beta1, beta2, weight_decay, rest1, rest2, KIND, IS_STOCHASTIC, i,
                        )  # fmt: skip


@triton.jit(do_not_specialize=["num_lookups", "num_all_bags", "num_bags", "output_stride"])
def embedding_bags_samples_kernel(
    grad, weights, indices, offsets, layout, batches, feature_of_bag, result, num_lookups, num_all_bags, num_bags, output_stride,
    FIELDS: tl.constexpr, BAGS: tl.constexpr, LOOKUPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Products of the rows of some bags with the gradients of their sums."""
    bag = tl.program_id(0).to(tl.int64) * BAGS + tl.arange(0, BAGS)
    begin, end, fields, source, exists = bags_of(
        bag, offsets, layout, batches, feature_of_bag, num_lookups, num_all_bags, num_bags, output_stride, FIELDS
    )
    table = tl.load(fields, mask=exists, other=0)
    rows = tl.load(fields + 1, mask=exists, other=0)
    width = tl.load(fields + 2, mask=exists, other=0)
    for step in range(0, tl.max(end - begin, 0), LOOKUPS):
        place = begin[:, None] + step + tl.arange(0, LOOKUPS)[None, :]
        is_live = place < end[:, None]
        row = tl.load(indices + place, mask=is_live, other=0).to(tl.int64)
        is_known = is_live & (row >= 0) & (row < rows[:, None])
        of_row = weights + table[:, None] + row * width[:, None]
        total = tl.zeros((BAGS, LOOKUPS), tl.float32)
        for column in range(0, tl.max(width, 0), COLUMNS):
            columns = column + tl.arange(0, COLUMNS)
            in_row = columns[None, :] < width[:, None]
            of_bag = tl.load(grad + source[:, None] + columns[None, :], mask=in_row & exists[:, None], other=0.0).to(tl.float32)
            mask = is_known[:, :, None] & in_row[:, None, :]
            tile = tl.load(of_row[:, :, None] + columns[None, None, :], mask=mask, other=0.0).to(tl.float32)
            total += tl.sum(rounded_product(tile, tl.broadcast_to(of_bag[:, None, :], [BAGS, LOOKUPS, COLUMNS])), 2)
        tl.store(result + place, total.to(result.dtype.element_ty), mask=is_live)


def _bags(layout: Tensor, offsets: Tensor, batches: Tensor | None, grad: Tensor) -> tuple[Tensor | None, int, int, int]:
    """Return the feature of each bag where batches differ, the bags of all and of one, and the stride of the gradient's rows."""
    num_all = offsets.shape[0] - 1
    if batches is None:
        return None, num_all, max(1, grad.shape[0]), grad.shape[1]
    features = torch.arange(layout.shape[0], dtype=torch.int32, device=grad.device)
    return features.repeat_interleave(batches[:, 1], output_size=num_all), num_all, 1, 0


def _sums_by_row(
    grad: Tensor,
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    device_layout: Tensor,
    layout: Tensor,
    batches: Tensor | None,
    weights: Tensor,
    first: Tensor | None,
    second: Tensor | None,
    step: Tensor | None,
    rate: Tensor | None,
    kind: str,
    numbers: tuple[float, float, float, float],
    *,
    is_stochastic: bool,
) -> None:
    """Sum the gradients of each row that was read, and store them in `weights`, or update weights and states by them."""
    num_features, fields = layout.shape
    num_lookups, device = indices.shape[0], grad.device
    feature_of_bag, num_all, num_bags, stride = _bags(layout, offsets, batches, grad)
    if not num_lookups or not num_all:
        return
    tables = device_layout[num_features:]
    num_tables = tables.shape[0] - 1 - known_of(layout).num_parts
    num_rows = int((layout[:, 5] + layout[:, 1]).max())
    narrow, wide = torch.int32, torch.int64
    keys = torch.full((num_lookups,), num_rows, dtype=narrow if num_rows < 2**31 - 1 else wide, device=device)
    sources = torch.empty(num_lookups, dtype=narrow if grad.numel() < 2**31 else wide, device=device)
    has_factors = per_sample_weights is not None or bool(layout[:, 4].any())
    factors = torch.empty(num_lookups, dtype=torch.float32, device=device) if has_factors else None
    embedding_bags_lookups_kernel[(triton.cdiv(num_all, BLOCK_BAGS),)](
        indices, offsets, per_sample_weights, device_layout, batches, feature_of_bag, keys, sources, factors, num_lookups,
        num_all, num_bags, stride, num_rows, FIELDS=fields, BAGS=BLOCK_BAGS, LOOKUPS=BLOCK_LOOKUPS, num_warps=4,
    )  # fmt: skip
    keys, order = keys.sort(stable=True)
    sources = sources[order]
    factors = None if factors is None else factors[order]
    begins = torch.searchsorted(keys, tables[:, 5].to(keys.dtype))
    ends, block_ends = (torch.empty(num_tables, dtype=wide, device=device) for _ in range(2))
    counter = torch.empty(1, dtype=wide, device=device)
    programs = min(PROGRAMS * gpu(device).multiprocessors, num_lookups)
    is_by_row = kind.startswith("rowwise")
    embedding_bags_rows_map_kernel[(1,)](
        tables, begins, ends, block_ends, counter, num_tables, programs, FIELDS=fields, STREAM=STREAM,
        SPLIT=SPLIT, WHOLE_ROWS=is_by_row, BLOCK=BLOCK_TABLES, num_warps=16,
    )  # fmt: skip
    corrections = None
    if step is not None and "adam" in kind:
        # Near 0 for betas near 1, which float32 has no digits for.
        corrections = torch.stack([1 - torch.pow(beta, step.double()) for beta in numbers[1:3]]).float()
    # Of each block of lookups the part of a row that came in, and of one that goes on. A table's last block may be short.
    row_stride = triton.cdiv(int(layout[:, 2].max()), 4) * 4
    is_split = num_lookups > SPLIT
    parts_of_runs = torch.zeros(2 * (num_lookups // SPLIT + num_tables) if is_split else 0, row_stride, device=device)
    options = {
        "FIELDS": fields,
        "SPLIT": SPLIT,
        "KIND": kind,
        "IS_STOCHASTIC": is_stochastic and weights.dtype == torch.bfloat16,
        "USED": used_widths(layout, is_by_row=is_by_row),
        "num_warps": 1,
    }
    state = (weights, first, second, step, corrections, rate, tables, begins)
    scalars = (num_tables, row_stride, *numbers, 1 - numbers[1], 1 - numbers[2])
    embedding_bags_rows_kernel[(programs,)](
        grad, sources, factors, keys, parts_of_runs, *state, ends, block_ends, counter, *scalars,
        STREAM=STREAM, ALIGNED=not bool((layout[:, 2] % 4).any()), **options,
    )  # fmt: skip
    if is_split:
        embedding_bags_join_kernel[(JOINING * gpu(device).multiprocessors,)](
            keys, parts_of_runs, *state, block_ends, *scalars, **options
        )


def used_widths(layout: Tensor, *, is_by_row: bool) -> int:
    """Return the schedules that rows of a layout `[F, fields]` on the host take, a bit for each."""
    used = 0
    for width in set(layout[:, 2].tolist()):
        exponent = min(max(2, (width - 1).bit_length()), NUM_WIDTHS.value + 1 if is_by_row else 7)
        used |= 1 << ((exponent - 2) * 2 + int(width % 4 == 0))
    return used


def embedding_bags_weights_backward(
    grad: Tensor,
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    device_layout: Tensor,
    layout: Tensor,
    batches: Tensor | None,
    host_batches: Tensor | None,
    num_elements: int,
    weights_dtype: torch.dtype,
) -> Tensor:
    """Return the gradient of the storage, `[num_elements]`."""
    result = grad.new_zeros(num_elements, dtype=weights_dtype)
    _sums_by_row(
        grad, indices, offsets, per_sample_weights, device_layout, layout, batches, result, None, None, None, None, "none",
        (0.0, 0.0, 0.0, 0.0), is_stochastic=False,
    )  # fmt: skip
    return result


def embedding_bags_update(
    weights: Tensor,
    first: Tensor,
    second: Tensor,
    step: Tensor,
    learning_rate: Tensor,
    grad: Tensor,
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    device_layout: Tensor,
    layout: Tensor,
    batches: Tensor | None,
    host_batches: Tensor | None,
    kind: str,
    eps: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    stochastic_rounding: bool,
) -> None:
    """Change the rows that were read, and their states, in place; `step` counts this update already."""
    widest, most = int(layout[:, 2].max()), MOST_COLUMNS.value << (NUM_WIDTHS.value - 6)
    if kind.startswith("rowwise") and widest > most:
        raise ValueError(f"layout: expected at most {most:,} columns for {kind} on a GPU, got {widest:,}; take {kind[8:]}")
    has_first, has_second = (bool(of) for of in STATES[kind])
    _sums_by_row(
        grad, indices, offsets, per_sample_weights, device_layout, layout, batches, weights, first if has_first else None,
        second if has_second else None, step, learning_rate, kind, (eps, beta1, beta2, weight_decay),
        is_stochastic=stochastic_rounding,
    )  # fmt: skip


def embedding_bags_samples_backward(
    grad: Tensor,
    weights: Tensor,
    indices: Tensor,
    offsets: Tensor,
    device_layout: Tensor,
    layout: Tensor,
    batches: Tensor | None,
    host_batches: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return the gradient of the per-sample weights, `[S]`."""
    result = torch.zeros(indices.shape[0], dtype=dtype, device=grad.device)
    feature_of_bag, num_all, num_bags, stride = _bags(layout, offsets, batches, grad)
    if num_all and len(result):
        embedding_bags_samples_kernel[(triton.cdiv(num_all, SAMPLE_BAGS),)](
            grad, weights, indices, offsets, device_layout, batches, feature_of_bag, result, len(result), num_all, num_bags,
            stride, FIELDS=layout.shape[1], BAGS=SAMPLE_BAGS, LOOKUPS=SAMPLE_LOOKUPS, COLUMNS=SAMPLE_COLUMNS, num_warps=2,
        )  # fmt: skip
    return result
