"""Lookups of each row brought together by a stable sort, and summed in that order: for tables of any number of rows.

A lookup has a key, its row among those of all tables, and a source, the element of the incoming gradient that its bag begins at.
After the sort, runs of equal keys are the lookups of a row. Programs take a block of sorted lookups each, whichever tables they
are of: groups of lanes, as many as a row needs, walk over a part of them, two lookups of a row at once, and sum the gradients in
their order. Where a run ends, its sum is stored as the row's gradient, or updates the row at once. A run belongs to the group
that it begins with, which goes on beyond its part, and beyond the block's end up to that of the next one. A run that goes through
a whole block after the one that it begins in is long: each block sums its part, and another kernel joins them. One that goes
through very many blocks has as many parts: those of a whole group of blocks are added up first, each group by a program.
"""

from __future__ import annotations

import triton
import triton.language as tl

from jagged.ops.embedding_bag.triton.columns import FIELDS, FIRST_ROW, IS_MEAN, ROWS, START, WIDTH
from jagged.ops.embedding_bag.triton.rows import (
    MOST_WIDE,
    elements_of,
    gradients_of,
    lanes_of,
    row_columns,
    weights_of,
    widening_of,
)
from jagged.ops.embedding_bag.triton.schedules import bags_of, group_of, span_of
from jagged.ops.embedding_bag.triton.updates import (
    NUM_WIDTHS,
    RULE_NUMBERS,
    apply_sums,
    by_row,
    joined_run,
    schedule_of,
    state_of_rows,
)

# Bags, and lookups of each, that a program of the kernel of keys takes at once.
BLOCK_BAGS, BLOCK_LOOKUPS = 16, 16
# From so many bags on, of one lookup and a half in the mean at most, it takes `BLOCK_LOOKUPS` times as many.
MANY_SINGLES = 1 << 16
# Sorted lookups of a block, for batches of fewer lookups than these, and of others: few where blocks are few, for all to begin
# at once.
BLOCKS, MOST_LOOKUPS = ((1 << 15, 8), (1 << 17, 16), (7 << 17, 32), (1 << 20, 64)), tl.constexpr(128)
# Blocks that a program which joins parts looks at together, programs for each multiprocessor, and their warps: the row that most
# lookups name is waited for.
JOINED_BLOCKS, JOINING, JOINING_WARPS = 16, 8, 4
# Blocks of a group, from so many blocks on, and columns whose parts are loaded together.
GROUPED_BLOCKS, FEWEST_GROUPED, GROUPED_COLUMNS, GROUPING_WARPS = 64, 2048, 128, 4
# As many as no batch has.
NO_GROUP = 1 << 30
# What no row's key is.
NO_KEY = tl.constexpr(-2)


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


@triton.jit
def store_none(keys, sources, begin, end, no_row, PLACES: tl.constexpr):
    """Store that the lookups from `begin` to `end` are of no row; all programs together."""
    for start in range(begin + tl.program_id(0) * PLACES, end, tl.num_programs(0) * PLACES):
        place = start + tl.arange(0, PLACES)
        tl.store(keys + place, (place * 0 + no_row).to(keys.dtype.element_ty), mask=place < end)
        tl.store(sources + place, (place * 0).to(sources.dtype.element_ty), mask=place < end)


@triton.jit(do_not_specialize=["num_lookups", "num_all_bags", "num_bags", "output_stride", "no_row", "most_counted"])
def embedding_bags_lookups_kernel(
    indices, offsets, scales, layout, batches, feature_of_bag, keys, sources, factors, num_lookups, num_all_bags, num_bags,
    output_stride, no_row, most_counted, BAGS: tl.constexpr, LOOKUPS: tl.constexpr, SINGLES: tl.constexpr,
):  # fmt: skip
    """Key, source and factor of every lookup of some bags: `BAGS` together, `LOOKUPS` of each at a time.

    With `SINGLES` a program has `LOOKUPS` times as many bags, which have a lane each where none has more than one lookup, as
    those of sequences. An id that its table does not have gets the key `no_row`, and so do all of tables of no more than
    `most_counted` rows, and those that are in no bag: all lie before the first bag or behind the last one, whatever offsets are,
    for each bag begins where the one before it ends.
    """
    ALL: tl.constexpr = BAGS * LOOKUPS if SINGLES else BAGS
    begin_of_all, _ = span_of(offsets, 0, True, num_lookups)
    _, end_of_all = span_of(offsets, num_all_bags - 1, True, num_lookups)
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
    store_none(keys, sources, 0, begin_of_all, no_row, BAGS * LOOKUPS)
    store_none(keys, sources, end_of_all, num_lookups, no_row, BAGS * LOOKUPS)


def block_size(num_lookups: int) -> int:
    """Return how many sorted lookups a program takes."""
    return next((size for most, size in BLOCKS if num_lookups < most), MOST_LOOKUPS.value)


@triton.jit
def sum_of_groups(total, lanes):
    """Sum tiles `[32, pieces, columns]` over a warp's groups of `lanes`; all groups get the same."""
    lane = tl.arange(0, 32)[:, None, None] + tl.zeros(total.shape, tl.int32)
    for i in tl.static_range(5):
        total = tl.where(lanes <= (1 << i), total + tl.gather(total, lane ^ (1 << i), 0), total)
    return total


# Called and not inlined: what one branch computes holds no registers in another.
@triton.jit(noinline=True)
def sorted_rows(
    grad, sources, factors, keys, parts_of_runs, weights, first, second, last_step, step, corrections, rate, fields, length, room,
    skipped, came_in, goes_on, extends, row_stride, part, grad_size, eps, beta1, beta2, weight_decay, rest1, rest2, max_norm,
    KIND: tl.constexpr, IS_STOCHASTIC: tl.constexpr, IS_DECOUPLED: tl.constexpr, ALIGNED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Sum, and store or apply, the gradients of the rows whose runs begin among `length` sorted lookups of one table in a block.

    Places count from the first of these; from it on there are `room` lookups. Of the block's first and last run `skipped` is the
    key of one that belongs to the block before, `extends` of one that ends in the next block, `came_in` and `goes_on` of long
    ones, whose sums are parts. A run that is all of these lookups is summed by all groups.
    """
    numbers = (eps, beta1, beta2, weight_decay, rest1, rest2, max_norm)
    start, width, first_row = tl.load(fields + START), tl.load(fields + WIDTH).to(tl.int32), tl.load(fields + FIRST_ROW)
    start = start // 16 * 16
    if ALIGNED:
        # It is; said so that the compiler sees it, and makes loads of 16 bytes.
        width = width // 4 * 4
    exponent, columns = lanes_of(width, part, ALIGNED, WIDE)
    lanes, groups = 1 << exponent, 32 >> exponent
    in_row = columns < width
    grad += columns
    row_stride, most_source = row_stride // 4 * 4, grad_size - width
    learning_rate = 0.0
    if KIND != "none":
        learning_rate = tl.load(rate)
    group = tl.arange(0, 32) >> exponent
    own = (length + groups - 1) // groups
    place, first_key = group * own, tl.load(keys)
    last = tl.minimum(place + own, length)
    is_alive = place < last
    is_one = (first_key == tl.load(keys + length - 1)) & (first_key != skipped) & (first_key != extends)
    # The first run may be another's.
    key = tl.load(keys + place, mask=is_alive, other=NO_KEY)
    not_own = tl.load(keys + place - 1, mask=is_alive & (place > 0), other=skipped)
    not_own = tl.where(is_one, NO_KEY, not_own)
    is_alive &= tl.load(keys + last - 1, mask=is_alive, other=NO_KEY) != not_own
    total = tl.zeros(in_row.shape, tl.float32)
    # Of a turn's two lookups, and the one behind them: loaded a turn ahead.
    second_key = tl.load(keys + place + 1, mask=is_alive & (place + 1 < room), other=NO_KEY)
    third_key = tl.load(keys + place + 2, mask=is_alive & (place + 2 < room), other=NO_KEY)
    source = tl.load(sources + place, mask=is_alive, other=0)
    second_source = tl.load(sources + place + 1, mask=is_alive & (place + 1 < room), other=0)
    is_more = tl.max(is_alive.to(tl.int32), 0)
    while is_more != 0:
        is_own = is_alive & (key != not_own)
        stop = tl.where(is_one, last, tl.where(key == goes_on, length, room))
        is_same = (second_key == key) & (place + 1 < stop)
        following = place + 1 + is_same.to(tl.int32)
        next_key = tl.where(is_same, third_key, second_key)
        is_end = (next_key != key) | (following >= stop)
        # A group ends with its part, or with the run that goes on beyond it.
        goes_beyond = is_own & (is_end == 0)
        will_live = is_alive & ((following < last) | goes_beyond)
        is_more = tl.max(will_live.to(tl.int32), 0)
        is_last = tl.where(is_one, (group == 0) & (is_more == 0), is_own & is_end)
        # All loads of a turn are under way together.
        tile = gradients_of(grad, source, factors, place, is_own, most_source, in_row, ALIGNED)
        second_tile = gradients_of(
            grad, second_source, factors, place + 1, is_own & is_same, most_source, in_row, ALIGNED
        )  # fmt: skip
        row = (key.to(tl.int64) - first_row).to(tl.int32)
        old = weights_of(weights + start + columns, row, is_last, width, in_row, KIND)
        state = state_of_rows(first, second, key.to(tl.int64), is_last, KIND)
        second_key = tl.load(keys + following + 1, mask=will_live & (following + 1 < room), other=NO_KEY)
        third_key = tl.load(keys + following + 2, mask=will_live & (following + 2 < room), other=NO_KEY)
        source = tl.load(sources + following, mask=will_live, other=0)
        second_source = tl.load(sources + following + 1, mask=will_live & (following + 1 < room), other=0)
        total = total + tile + second_tile
        if tl.max(is_last.to(tl.int32), 0) != 0:
            if is_one:
                total = sum_of_groups(total, lanes)
            is_part = is_last & ((key == came_in) | (key == goes_on))
            # Of a block the run that came in has the first place, and the one that goes on from here has the second.
            of_run = parts_of_runs + by_row((key != came_in).to(tl.int64) * row_stride, in_row) + columns
            tl.store(of_run, total, mask=by_row(is_part, in_row) & in_row)
            element = start + by_row(elements_of(row, width), in_row).to(tl.int64) + columns
            apply_sums(
                total, old, state, is_last & (is_part == 0), key.to(tl.int64), element, in_row, weights, first, second, last_step,
                step, corrections, learning_rate, width, numbers, KIND, IS_STOCHASTIC, IS_DECOUPLED, lanes,
            )  # fmt: skip
            total = tl.where(by_row(is_last, in_row), 0.0, total)
        place, key, is_alive = following, next_key, will_live


@triton.jit(do_not_specialize=["num_lookups", "size", "no_row", "grad_size", "num_tables", "row_stride", *RULE_NUMBERS])
def embedding_bags_rows_kernel(
    grad, sources, factors, keys, parts_of_runs, weights, first, second, last_step, step, corrections, rate, tables, num_lookups,
    size, no_row, grad_size, num_tables, row_stride, eps, beta1, beta2, weight_decay, rest1, rest2, max_norm, KIND: tl.constexpr,
    IS_STOCHASTIC: tl.constexpr, IS_DECOUPLED: tl.constexpr, WHOLE_ROWS: tl.constexpr, ALIGNED: tl.constexpr,
    USED: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Take a block of `size` sorted lookups, `MOST` at most, of one table after the other."""
    COLUMNS: tl.constexpr = row_columns(ALIGNED)
    block = tl.program_id(0).to(tl.int64)
    begin = block * size
    limit = tl.minimum(begin + size, num_lookups)
    first_key, last_key = tl.load(keys + begin), tl.load(keys + limit - 1)
    before = tl.load(keys + begin - 1, mask=begin > 0, other=NO_KEY)
    after = tl.load(keys + limit, mask=limit < num_lookups, other=NO_KEY)
    # A block before these, and one behind: a run that goes through all of a block which it does not begin in is long.
    earlier = tl.load(keys + begin - size - 1, mask=begin > size, other=NO_KEY)
    later = tl.load(keys + limit + size, mask=limit + size < num_lookups, other=NO_KEY)
    comes, goes = before == first_key, after == last_key
    is_long_before = (earlier == first_key) | (after == first_key)
    is_long_behind = (later == last_key) | (before == last_key)
    skipped, came_in = tl.where(is_long_before, NO_KEY, first_key), tl.where(is_long_before, first_key, NO_KEY)
    extends, goes_on = tl.where(is_long_behind, NO_KEY, last_key), tl.where(is_long_behind, last_key, NO_KEY)
    skipped, came_in = tl.where(comes, skipped, NO_KEY), tl.where(comes, came_in, NO_KEY)
    extends, goes_on = tl.where(goes, extends, NO_KEY), tl.where(goes, goes_on, NO_KEY)
    parts_of_runs += 2 * block * (row_stride // 4 * 4)
    key = first_key
    while begin < limit:
        end = limit
        if key < no_row:
            table, _ = group_of(tables + FIELDS + FIRST_ROW, key, num_tables, FIELDS)
            fields = tables + table.to(tl.int64) * FIELDS
            next_row = tl.load(fields + FIELDS + FIRST_ROW)
            if last_key >= next_row:
                ahead = begin + tl.arange(0, MOST)
                in_table = tl.load(keys + ahead, mask=ahead < limit, other=last_key) < next_row
                end = begin + tl.sum(in_table.to(tl.int32), 0)
            width = tl.load(fields + WIDTH)
            # Updates that need whole rows take all of their columns at once.
            parts, wide = (width + COLUMNS - 1) // COLUMNS, tl.zeros((), tl.int32)
            if WHOLE_ROWS:
                parts, wide = parts * 0 + 1, widening_of(width, ALIGNED)
            own_factors = factors
            if factors is not None:
                own_factors = factors + begin
            for i in tl.static_range(MOST_WIDE):
                if (USED >> i) & 1:  # noqa: SIM102
                    if wide == i:
                        for part in range(0, parts):
                            sorted_rows(
                                grad, sources + begin, own_factors, keys + begin, parts_of_runs, weights, first, second,
                                last_step, step, corrections, rate, fields, (end - begin).to(tl.int32),
                                tl.minimum(num_lookups - begin, 1 << 20).to(tl.int32), skipped, came_in, goes_on, extends,
                                row_stride, part, grad_size, eps, beta1, beta2, weight_decay, rest1, rest2, max_norm, KIND,
                                IS_STOCHASTIC, IS_DECOUPLED, ALIGNED, i,
                            )  # fmt: skip
        begin = end
        key = tl.load(keys + begin, mask=begin < limit, other=0)


@triton.jit(do_not_specialize=["num_lookups", "size", "no_row", "num_tables", "row_stride"])
def embedding_bags_groups_kernel(
    keys, parts_of_runs, tables, num_lookups, size, no_row, num_tables, row_stride, BLOCKS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add up the parts of `BLOCKS` blocks all of whose lookups are of a run that came in, in place of the first part."""
    first = tl.program_id(0).to(tl.int64) * BLOCKS
    begin = first * size
    last = begin + BLOCKS * size - 1
    key = tl.load(keys + begin)
    before = tl.load(keys + begin - 1, mask=begin > 0, other=NO_KEY)
    after = tl.load(keys + last, mask=last < num_lookups, other=NO_KEY)
    if (before == key) & (after == key) & (key < no_row):
        table, _ = group_of(tables + FIELDS + FIRST_ROW, key, num_tables, FIELDS)
        width = tl.load(tables + table.to(tl.int64) * FIELDS + WIDTH).to(tl.int32)
        row_stride = row_stride // 4 * 4
        parts_of_runs += 2 * first * row_stride
        part = 2 * tl.arange(0, BLOCKS).to(tl.int64) * row_stride
        for column in range(0, width, COLUMNS):
            columns = column + tl.arange(0, COLUMNS)
            tile = tl.load(parts_of_runs + part[:, None] + columns[None, :], mask=(columns < width)[None, :], other=0.0)
            tl.store(parts_of_runs + columns, tl.sum(tile, 0), mask=columns < width)


@triton.jit(do_not_specialize=["num_lookups", "size", "no_row", "group", "num_tables", "row_stride", *RULE_NUMBERS])
def embedding_bags_join_kernel(
    keys, parts_of_runs, weights, first, second, last_step, step, corrections, rate, tables, num_lookups, size, no_row, group,
    num_tables, row_stride, eps, beta1, beta2, weight_decay, rest1, rest2, max_norm, KIND: tl.constexpr,
    IS_STOCHASTIC: tl.constexpr, IS_DECOUPLED: tl.constexpr, WHOLE_ROWS: tl.constexpr, USED: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Join the parts of long runs, each found at the first end of a block that it goes across; `BLOCKS` ends are looked at.

    Those of a `group` of blocks all of whose lookups are of one run have been added up; more than there are: of none.
    """
    num_blocks = (num_lookups + size - 1) // size
    for start in range(tl.program_id(0) * BLOCKS, num_blocks, tl.num_programs(0) * BLOCKS):
        block = start + tl.arange(0, BLOCKS)
        place = block.to(tl.int64) * size
        exists = (block > 0) & (place < num_lookups)
        key = tl.load(keys + place, mask=exists, other=0)
        is_found = exists & (key < no_row) & (tl.load(keys + place - 1, mask=exists, other=NO_KEY) == key)
        is_found &= tl.load(keys + place - size - 1, mask=is_found & (block > 1), other=NO_KEY) != key
        is_found &= tl.load(keys + place + size, mask=is_found & (place + size < num_lookups), other=NO_KEY) == key
        while tl.max(is_found.to(tl.int32), 0) != 0:
            found = tl.min(tl.where(is_found, block, 2**31 - 1), 0)
            is_found &= block != found
            of_run = tl.load(keys + found.to(tl.int64) * size)
            # Blocks that begin in the run, found in steps that are doubled until one is too long, and then halved.
            num_own, ahead, is_growing = found.to(tl.int64) * 0 + 1, found.to(tl.int64) * 0 + 1, True
            while ahead > 0:
                other = (found + num_own + ahead - 1) * size
                is_same = tl.load(keys + other, mask=other < num_lookups, other=NO_KEY) == of_run
                num_own = tl.where(is_same, num_own + ahead, num_own)
                is_growing &= is_same
                ahead = tl.where(is_growing, ahead * 2, ahead // 2)
            # Groups all of whose lookups are of the run have one part each. Before them are the part that goes on from the block
            # before, and those of the first blocks; behind them are the last ones'.
            end = (found + num_own) * size
            is_whole = tl.load(keys + end - 1, mask=end <= num_lookups, other=NO_KEY) == of_run
            first_group = (found + group - 1) // group
            num_groups = tl.maximum((found + num_own - 1 + is_whole.to(tl.int64)) // group - first_group, 0)
            head, num_parts = first_group * group - found + 1, num_own + 1 - num_groups * (group - 1)
            table, _ = group_of(tables + FIELDS + FIRST_ROW, of_run, num_tables, FIELDS)
            fields = tables + table.to(tl.int64) * FIELDS
            schedule = schedule_of(tl.load(fields + WIDTH), WHOLE_ROWS)
            for i in tl.static_range(2 * NUM_WIDTHS):
                if (USED >> i) & 1:  # noqa: SIM102
                    if schedule == i:
                        joined_run(
                            parts_of_runs, found.to(tl.int64) * 2 - 1, num_parts.to(tl.int32), head, num_groups.to(tl.int32),
                            group, of_run, weights, first, second, last_step, step, corrections, rate, fields, row_stride,
                            eps, beta1, beta2, weight_decay, rest1, rest2, max_norm, KIND, IS_STOCHASTIC, IS_DECOUPLED,
                            WHOLE_ROWS, 2, i,
                        )  # fmt: skip
