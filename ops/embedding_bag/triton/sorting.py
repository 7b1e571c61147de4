"""Lookups of each row brought together by a stable sort, and summed in that order: for tables of any number of rows.

A lookup has a key, its row among those of all tables, and a source, the element of the incoming gradient that its bag begins at.
After the sort, runs of equal keys are the lookups of a row. Programs take some hundred sorted lookups of a table each: groups of
lanes walk over a part of them, two lookups at once, regardless of where runs begin, and sum the gradients in their order. Where a
run ends, its sum is stored as the row's gradient, or updates the row at once. A run belongs to the group that it begins with,
which goes on beyond its part to the run's end; a row with thousands of lookups is summed in blocks, which another kernel joins.
"""

from __future__ import annotations

import triton
import triton.language as tl

from jagged.ops.embedding_bag.triton.columns import BY_WIDTH, FIELDS, FIRST_ROW, IS_MEAN, ROWS, START, WIDTH
from jagged.ops.embedding_bag.triton.schedules import MOST_COLUMNS, bags_of, group_of, span_of, take_unit
from jagged.ops.embedding_bag.triton.updates import (
    NUM_WIDTHS,
    NUMBERS,
    apply_sums,
    columns_by,
    joined_run,
    schedule_of,
    state_of_rows,
)

# Bags, and lookups of each, that a program of the kernel of keys takes at once.
BLOCK_BAGS, BLOCK_LOOKUPS = 16, 16
# From so many bags on, of one lookup and a half in the mean at most, it takes `BLOCK_LOOKUPS` times as many.
MANY_SINGLES = 1 << 16
# Sorted lookups that a group of lanes takes, and of a block, at whose end a row's sum is cut, so that none has very many of them:
# in batches of fewer than `MANY_LOOKUPS`, and in others.
STREAM, SPLIT, MANY_LOOKUPS = (16, 32), (64, 128), 1 << 18
# Tables that the kernel of the units takes at once.
BLOCK_TABLES = 1024
# Programs that join what was cut, for each multiprocessor, and their warps: the row that most lookups name is waited for.
JOINING, JOINING_WARPS = 4, 4


@triton.jit
def store_lookups(
    bag, indices, offsets, scales, layout, batches, feature_of_bag, keys, sources, factors, num_lookups, num_all_bags, num_bags,
    output_stride, no_row, most_counted, LOOKUPS: tl.constexpr,
):  # fmt: skip
    """Store key, source and factor of every lookup of some bags, `LOOKUPS` of each at a time."""
    begin, end, feature, source, exists = bags_of(
        bag, offsets, layout, batches, feature_of_bag, num_lookups, num_all_bags, num_bags, output_stride
    )
    fields = layout + feature * FIELDS
    rows = tl.load(fields + ROWS, mask=exists, other=0)
    rows = tl.where(rows > most_counted, rows, 0)
    first_row = tl.load(fields + FIRST_ROW, mask=exists, other=0)
    is_mean = tl.load(fields + IS_MEAN, mask=exists, other=0) != 0
    factor = tl.where(is_mean, 1 / tl.maximum(end - begin, 1).to(tl.float32), 1.0)
    for step in range(0, tl.max(end - begin, 0), LOOKUPS):
        place = begin[:, None] + step + tl.arange(0, LOOKUPS)[None, :]
        is_live = place < end[:, None]
        row = tl.load(indices + place, mask=is_live, other=0).to(tl.int64)
        key = tl.where((row >= 0) & (row < rows[:, None]), first_row[:, None] + row, no_row)
        tl.store(keys + place, key.to(keys.dtype.element_ty), mask=is_live)
        tl.store(sources + place, (source[:, None] + tl.zeros_like(row)).to(sources.dtype.element_ty), mask=is_live)
        if factors is not None:
            of_place = factor[:, None] + tl.zeros((bag.shape[0], LOOKUPS), tl.float32)
            if scales is not None:
                of_place *= tl.load(scales + place, mask=is_live, other=0.0).to(tl.float32)
            tl.store(factors + place, of_place, mask=is_live)


@triton.jit(do_not_specialize=["num_lookups", "num_all_bags", "num_bags", "output_stride", "no_row", "most_counted"])
def embedding_bags_lookups_kernel(
    indices, offsets, scales, layout, batches, feature_of_bag, keys, sources, factors, num_lookups, num_all_bags, num_bags,
    output_stride, no_row, most_counted, BAGS: tl.constexpr, LOOKUPS: tl.constexpr, SINGLES: tl.constexpr,
):  # fmt: skip
    """Key, source and factor of every lookup of some bags: `BAGS` together, `LOOKUPS` of each at a time.

    With `SINGLES` a program has `LOOKUPS` times as many bags, which have a lane each where none has more than one lookup, as
    those of sequences. An id that its table does not have gets the key `no_row`, and so do all of tables of no more than
    `most_counted` rows.
    """
    ALL: tl.constexpr = BAGS * LOOKUPS if SINGLES else BAGS
    first = tl.program_id(0).to(tl.int64) * ALL
    is_single = False
    if SINGLES:
        bag = first + tl.arange(0, ALL)
        begin, end = span_of(offsets, bag, bag < num_all_bags, num_lookups)
        is_single = tl.max(end - begin, 0) <= 1
        if is_single:
            store_lookups(
                bag, indices, offsets, scales, layout, batches, feature_of_bag, keys, sources, factors, num_lookups,
                num_all_bags, num_bags, output_stride, no_row, most_counted, 1,
            )  # fmt: skip
    if not is_single:
        for start in range(0, ALL, BAGS):
            store_lookups(
                first + start + tl.arange(0, BAGS), indices, offsets, scales, layout, batches, feature_of_bag, keys, sources,
                factors, num_lookups, num_all_bags, num_bags, output_stride, no_row, most_counted, LOOKUPS,
            )  # fmt: skip


@triton.jit
def unit_of(width, STREAM: tl.constexpr, SPLIT: tl.constexpr):
    """Return the lookups of a unit: `STREAM` for each group of lanes, no more than a block."""
    groups = (width * 0 + 1).to(tl.int64)
    for i in tl.static_range(0, 5):
        groups = tl.where(width <= (4 << i), tl.maximum(groups, 32 >> i), groups)
    return tl.minimum(groups * STREAM, SPLIT)


@triton.jit(do_not_specialize=["num_tables", "num_programs"])
def embedding_bags_rows_map_kernel(
    tables, begins, ends, block_ends, counter, num_tables, num_programs,
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
        table = tl.load(tables + place.to(tl.int64) * FIELDS + BY_WIDTH, mask=exists, other=0)
        lookups = tl.load(begins + table + 1, mask=exists, other=0) - tl.load(begins + table, mask=exists, other=0)
        width = tl.load(tables + table.to(tl.int64) * FIELDS + WIDTH, mask=exists, other=1)
        unit = unit_of(width, STREAM, SPLIT)
        units = (lookups + unit - 1) // unit
        if not WHOLE_ROWS:
            units *= (width + MOST_COLUMNS - 1) // MOST_COLUMNS
        tl.store(ends + place, total + tl.cumsum(units, 0), mask=exists)
        total += tl.sum(units, 0)


@triton.jit
def rows_at(
    grad, factors, weights, first, second, key, source, place, is_own, is_last, start, first_row, width, columns, most_source,
    KIND: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Load for one sorted lookup of each group of lanes the row of the gradient; where a run ends, its weights and state, too."""
    if ALIGNED:
        # It is; said so that the compiler sees it, and makes loads of 16 bytes.
        source = source // 4 * 4
    in_row = (columns < width)[None, :]
    # Where wrong offsets put features over one another, key and source may be of two of them, whose widths differ.
    is_within = is_own & (source <= most_source)
    tile = tl.load(grad + (source.to(tl.int64)[:, None] + columns[None, :]), mask=is_within[:, None] & in_row, other=0.0)
    tile = tile.to(tl.float32)
    if factors is not None:
        tile *= tl.load(factors + place, mask=is_own, other=0.0)[:, None]
    old = tile
    if KIND != "none":
        element = start + (key.to(tl.int64) - first_row) * width
        old = tl.load(weights + (element[:, None] + columns[None, :]), mask=is_last[:, None] & in_row, other=0.0).to(tl.float32)
    return tile, old, state_of_rows(first, second, key.to(tl.int64), is_last, KIND)


# Called and not inlined: what one branch computes holds no registers in another.
@triton.jit(noinline=True)
def row_unit(
    grad, sources, factors, keys, offset, room, unit, block, parts_of_runs, weights, first, second, last_step, step,
    corrections, rate, fields, row_stride, part, grad_size, eps, beta1, beta2, weight_decay, rest1, rest2, max_norm,
    SPLIT: tl.constexpr, KIND: tl.constexpr, IS_STOCHASTIC: tl.constexpr, IS_DECOUPLED: tl.constexpr, ALIGNED: tl.constexpr,
    SCHEDULE: tl.constexpr,
):  # fmt: skip
    """Sum, and store or apply, the gradients of the rows whose runs begin in a unit of `unit` lookups.

    Places count from the unit's first; before it the table has `offset` lookups, and from it on `room`.
    """
    COLUMNS: tl.constexpr = columns_by(SCHEDULE)
    GROUPS: tl.constexpr = NUMBERS // COLUMNS if COLUMNS < NUMBERS else 1
    numbers = (eps, beta1, beta2, weight_decay, rest1, rest2, max_norm)
    start, width, first_row = tl.load(fields + START), tl.load(fields + WIDTH), tl.load(fields + FIRST_ROW)
    if SCHEDULE % 2:
        # It is; said so that the compiler sees it, and makes loads of 16 bytes.
        width = width // 4 * 4
        start = start // 16 * 16
    row_stride, most_source = row_stride // 4 * 4, grad_size - width
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
    # Keys and sources of a turn's two lookups, the key before them and the one after: they are loaded a turn ahead.
    key_before = tl.load(keys + place - 1, mask=is_alive & (place > 0), other=-3)
    key0 = tl.load(keys + place, mask=is_alive & (place < limit), other=-3)
    key1 = tl.load(keys + place + 1, mask=is_alive & (place + 1 < limit), other=-3)
    key_after = tl.load(keys + place + 2, mask=is_alive & (place + 2 < limit), other=-3)
    source0 = tl.load(sources + place, mask=is_alive & (place < limit), other=0)
    source1 = tl.load(sources + place + 1, mask=is_alive & (place + 1 < limit), other=0)
    is_more = tl.max(is_alive.to(tl.int32), 0)
    while is_more != 0:
        is_own0 = is_alive & (place < limit) & ((place < last) | (key0 == last_key)) & (key0 != not_own)
        is_own1 = is_alive & (place + 1 < limit) & ((place + 1 < last) | (key1 == last_key)) & (key1 != not_own)
        is_first0, is_first1 = key_before != key0, key0 != key1
        is_last0, is_last1 = is_own0 & (key1 != key0), is_own1 & (key_after != key1)
        # All loads of a turn are under way together.
        tile0, old0, state0 = rows_at(
            grad, factors, weights, first, second, key0, source0, place, is_own0, is_last0, start, first_row, width, columns,
            most_source, KIND, ALIGNED,
        )  # fmt: skip
        tile1, old1, state1 = rows_at(
            grad, factors, weights, first, second, key1, source1, place + 1, is_own1, is_last1, start, first_row, width, columns,
            most_source, KIND, ALIGNED,
        )  # fmt: skip
        next1 = tl.load(keys + place + 3, mask=is_alive & (place + 3 < limit), other=-3)
        next_after = tl.load(keys + place + 4, mask=is_alive & (place + 4 < limit), other=-3)
        source0 = tl.load(sources + place + 2, mask=is_alive & (place + 2 < limit), other=0)
        source1 = tl.load(sources + place + 3, mask=is_alive & (place + 3 < limit), other=0)
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
                total, old1 if i else old0, state1 if i else state0, is_whole, row, element, in_row, weights, first, second,
                last_step, step, corrections, learning_rate, width, numbers, KIND, IS_STOCHASTIC, IS_DECOUPLED,
            )  # fmt: skip
        # A group ends with its part, or with the run that goes on beyond it.
        place += 2
        key_before, key0, key1, key_after = key1, key_after, next1, next_after
        is_alive &= (place < last) | (is_own1 & (is_last1 == 0))
        is_more = tl.max(is_alive.to(tl.int32), 0)


@triton.jit(
    do_not_specialize=[
        "grad_size",
        "num_tables",
        "row_stride",
        "eps",
        "beta1",
        "beta2",
        "weight_decay",
        "rest1",
        "rest2",
        "max_norm",
    ]
)
def embedding_bags_rows_kernel(
    grad, sources, factors, keys, parts_of_runs, weights, first, second, last_step, step, corrections, rate, tables, begins,
    ends, block_ends, counter, grad_size, num_tables, row_stride, eps, beta1, beta2, weight_decay, rest1, rest2, max_norm,
    STREAM: tl.constexpr, SPLIT: tl.constexpr, KIND: tl.constexpr, IS_STOCHASTIC: tl.constexpr, IS_DECOUPLED: tl.constexpr,
    WHOLE_ROWS: tl.constexpr, ALIGNED: tl.constexpr, USED: tl.constexpr,
):  # fmt: skip
    """Take units of all tables' sorted lookups; the rows whose runs begin there are this program's."""
    num_units = tl.load(ends + num_tables - 1)
    unit = tl.program_id(0).to(tl.int64)
    while unit < num_units:
        next_unit = take_unit(counter)
        place, before = group_of(ends, unit, num_tables)
        table = tl.load(tables + place * FIELDS + BY_WIDTH)
        fields = tables + table * FIELDS
        width = tl.load(fields + WIDTH)
        parts = 1 if WHOLE_ROWS else (width + MOST_COLUMNS - 1) // MOST_COLUMNS
        lookups = unit_of(width, STREAM, SPLIT)
        offset = (unit - before) // parts * lookups
        begin = tl.load(begins + table) + offset
        room = tl.load(begins + table + 1) - begin
        block = tl.load(block_ends + table - 1, mask=table > 0, other=0) + offset // SPLIT
        own_factors = factors
        if factors is not None:
            own_factors = factors + begin
        found = schedule_of(width, WHOLE_ROWS)
        for i in tl.static_range(2 * NUM_WIDTHS):
            if (USED >> i) & 1:  # noqa: SIM102
                if found == i:
                    row_unit(
                        grad, sources + begin, own_factors, keys + begin, offset, room, lookups.to(tl.int32), block,
                        parts_of_runs, weights, first, second, last_step, step, corrections, rate, fields, row_stride,
                        (unit - before) % parts, grad_size, eps, beta1, beta2, weight_decay, rest1, rest2, max_norm, SPLIT,
                        KIND, IS_STOCHASTIC, IS_DECOUPLED, ALIGNED, i,
                    )  # fmt: skip
        unit = next_unit


@triton.jit(do_not_specialize=["num_tables", "row_stride", "eps", "beta1", "beta2", "weight_decay", "rest1", "rest2", "max_norm"])
def embedding_bags_join_kernel(
    keys, parts_of_runs, weights, first, second, last_step, step, corrections, rate, tables, begins, block_ends, num_tables,
    row_stride, eps, beta1, beta2, weight_decay, rest1, rest2, max_norm, SPLIT: tl.constexpr, KIND: tl.constexpr,
    IS_STOCHASTIC: tl.constexpr, IS_DECOUPLED: tl.constexpr, WHOLE_ROWS: tl.constexpr, USED: tl.constexpr,
):  # fmt: skip
    """Join the parts of rows that are read by more than a block of lookups: at the first end of a block that each goes across."""
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
            # The part that goes on from the block before, this block's, and those of the blocks that follow, in steps of 32.
            num_parts, found_all = block * 0 + 2, True
            while found_all:
                ahead = place + (num_parts - 1 + tl.arange(0, 32)) * SPLIT
                same = (ahead < last_place) & (tl.load(keys + ahead, mask=ahead < last_place, other=-2) == key)
                num_same = tl.sum(same.to(tl.int32), 0)
                num_parts += num_same
                found_all = num_same == 32
            found = schedule_of(tl.load(fields + WIDTH), WHOLE_ROWS)
            for i in tl.static_range(2 * NUM_WIDTHS):
                if (USED >> i) & 1:  # noqa: SIM102
                    if found == i:
                        joined_run(
                            parts_of_runs, block * 2 - 1, num_parts, key, weights, first, second, last_step, step,
                            corrections, rate, fields, row_stride, eps, beta1, beta2, weight_decay, rest1, rest2, max_norm, KIND,
                            IS_STOCHASTIC, IS_DECOUPLED, WHOLE_ROWS, 2, i,
                        )  # fmt: skip
