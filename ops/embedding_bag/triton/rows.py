"""Sums of the gradients of rows whose lookups were brought together by counting, and what becomes of them.

Groups of lanes take a row each and walk through its lookups side by side, as forward's schedules of few lookups do; which rows a
program takes is known from the tables alone. Rows of very many lookups are summed in slices by programs of their own, the last of
which adds the slices up in their order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from jagged.ops.embedding_bag.layout import FEWEST_TURNS as _FEWEST_TURNS
from jagged.ops.embedding_bag.layout import MOST_TURNS as _MOST_TURNS
from jagged.ops.embedding_bag.triton.columns import BY_WIDTH, FIELDS, FIRST_READER, FIRST_ROW, ROWS, START, UNIT_END, WIDTH
from jagged.ops.embedding_bag.triton.counting import FIRST_SLOT, LONG, LONG_FIELDS, LONG_ROW, LONG_TABLE
from jagged.ops.embedding_bag.triton.schedules import group_of, take_unit
from jagged.ops.embedding_bag.triton.updates import (
    NUM_WIDTHS,
    NUMBERS,
    RULE_NUMBERS,
    apply_sums,
    by_row,
    columns_by,
    joined_run,
    schedule_of,
    state_of_rows,
)

FEWEST_TURNS, MOST_TURNS = tl.constexpr(_FEWEST_TURNS), tl.constexpr(_MOST_TURNS)
# How many times as many columns as `row_columns` a warp takes of a row that an update needs whole: 2^6 at most.
MOST_WIDE = tl.constexpr(7)
# Lookups of a slice that are in registers.
SLICE_UNROLL = tl.constexpr(4)


@triton.jit
def known_sources(source, is_live, most_source, ALIGNED: tl.constexpr):
    """Return sources without sign, and which lookups are live whose sources are within the gradient."""
    # Wrong offsets leave sources that nothing was written to.
    unsigned: tl.constexpr = tl.uint32 if source.dtype == tl.int32 else tl.uint64
    source = source.to(unsigned, bitcast=True)
    is_live &= source <= most_source.to(unsigned)
    if ALIGNED:
        # It is; said so that the compiler sees it, and makes loads of 16 bytes.
        source = source // 4 * 4
    return source, is_live


@triton.jit
def sum_of_lookups(grad, source, factors, place, is_live, most_source, columns, in_row, ALIGNED: tl.constexpr):
    """Sum the gradients of lookups `[unrolled, groups]`, whose sources are known, over the first axis: `[groups, columns]`."""
    shape: tl.constexpr = [place.shape[0], place.shape[1], columns.shape[0]]
    source, is_live = known_sources(source, is_live, most_source, ALIGNED)
    source = tl.broadcast_to(source[:, :, None], shape).to(tl.uint64)
    mask = tl.broadcast_to(is_live[:, :, None], shape) & in_row[None, None, :]
    tile = tl.load(grad + (source + columns[None, None, :].to(tl.uint64)), mask=mask, other=0.0).to(tl.float32)
    if factors is not None:
        tile *= tl.load(factors + place, mask=is_live, other=0.0)[:, :, None]
    return tl.sum(tile, 0)


@triton.jit
def elements_of(row, width):
    """Return the first elements of rows, from their table's on: a product of unsigned 32-bit numbers is one instruction."""
    return row.to(tl.uint32).to(tl.uint64) * width.to(tl.uint32).to(tl.uint64)


@triton.jit
def limit_of(begin, end):
    """Return where the lookups end that are summed here: rows of very many have none."""
    return tl.where(end - begin <= LONG, end, begin)


@triton.jit
def weights_of(weights, row, is_read, width, in_row, KIND: tl.constexpr):
    """Return the rows' weights where an update needs them; `weights` are those of row 0, `[lanes, pieces, columns]`."""
    old = tl.zeros(in_row.shape, tl.float32)
    if KIND != "none":
        mask = by_row(is_read, in_row) & in_row
        old = tl.load(weights + by_row(elements_of(row, width), in_row), mask=mask, other=0.0).to(tl.float32)
    return old


@triton.jit
def gradients_of(grad, source, factors, place, is_live, most_source, in_row, ALIGNED: tl.constexpr):
    """Return the gradients of a lookup of each lane's row, `[lanes, pieces, columns]`."""
    source, is_live = known_sources(source, is_live, most_source, ALIGNED)
    tile = tl.load(grad + by_row(source, in_row), mask=by_row(is_live, in_row) & in_row, other=0.0).to(tl.float32)
    if factors is not None:
        tile *= by_row(tl.load(factors + place, mask=is_live, other=0.0), in_row)
    return tile


@triton.constexpr_function
def row_columns(is_aligned):
    """Return the columns of a row that a warp takes: 8 a lane as two loads of 16 bytes, or 4 loads of one column each."""
    return 32 * (8 if is_aligned else 4)


@triton.jit
def lanes_of(width, part, ALIGNED: tl.constexpr, WIDE: tl.constexpr):
    """Return the exponent of how many lanes have a row, and which columns `[32, pieces, together]` of a part each of them has."""
    COLUMNS: tl.constexpr = row_columns(ALIGNED)
    # Columns of a lane that are loaded together, and how many times it does.
    TOGETHER: tl.constexpr = 4 if ALIGNED else 1
    PIECES: tl.constexpr = (COLUMNS // 32 // TOGETHER) << WIDE
    # Two lanes also where one would do: 16 bytes of each of 32 rows, twice, are twice as many requests to the L1.
    exponent = (width > COLUMNS // 64).to(tl.int32)
    for i in tl.static_range(1, 5):
        exponent += (width > ((COLUMNS // 32) << i)).to(tl.int32)
    lanes = 1 << exponent
    columns = (tl.arange(0, 32) & (lanes - 1))[:, None] * TOGETHER + tl.arange(0, PIECES)[None, :] * (lanes * TOGETHER)
    return exponent, tl.cast(part * COLUMNS, tl.int32) + columns[:, :, None] + tl.arange(0, TOGETHER)[None, None, :]


@triton.jit
def widening_of(width, ALIGNED: tl.constexpr):
    """Return the exponent of how many times `row_columns` a row has that is taken whole."""
    wide = tl.zeros((), tl.int32)
    for i in tl.static_range(MOST_WIDE - 1):
        wide += (width > (row_columns(ALIGNED) << i)).to(tl.int32)
    return wide


# Called and not inlined: what one branch computes holds no registers in another.
@triton.jit(noinline=True)
def rows_unit(
    grad, sources, factors, bounds, weights, first, second, last_step, step, corrections, rate, fields, unit, part, grad_size,
    eps, beta1, beta2, weight_decay, rest1, rest2, max_norm, KIND: tl.constexpr, IS_STOCHASTIC: tl.constexpr,
    IS_DECOUPLED: tl.constexpr, ALIGNED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Sum, and store or apply, the gradients of a unit's rows of no more than `LONG` lookups.

    Groups of lanes, as many lanes as a row needs, take rows one after the other, two lookups a step, in step with the other
    groups. All that is known of a row is known in each of its lanes, so nothing moves between lanes. Lookups of a row stand
    behind those of the row before: the sources of the next step, of this row or the next one, are under way while the gradients
    of this step are.
    """
    numbers = (eps, beta1, beta2, weight_decay, rest1, rest2, max_norm)
    start, rows = tl.load(fields + START), tl.load(fields + ROWS)
    width, first_row = tl.load(fields + WIDTH), tl.load(fields + FIRST_ROW)
    rows, width = rows.to(tl.int32), width.to(tl.int32)
    start = start // 16 * 16
    if ALIGNED:
        # It is; said so that the compiler sees it, and makes loads of 16 bytes.
        width = width // 4 * 4
    exponent, columns = lanes_of(width, part, ALIGNED, WIDE)
    lanes, groups = 1 << exponent, 32 >> exponent
    turns = tl.minimum(lanes * FEWEST_TURNS, MOST_TURNS)
    in_row = columns < width
    grad += columns
    most_source = grad_size - width
    learning_rate = 0.0
    if KIND != "none":
        learning_rate = tl.load(rate)
    row = (unit * groups).to(tl.int32) * turns + (tl.arange(0, 32) >> exponent) * turns
    last = tl.minimum(row + turns, rows)
    begin, end = tl.load(bounds + row, mask=row < last, other=0), tl.load(bounds + row + 1, mask=row < last, other=0)
    after = tl.load(bounds + row + 2, mask=row + 1 < last, other=0)
    limit = limit_of(begin, end)
    old = weights_of(weights + start + columns, row, limit > begin, width, in_row, KIND)
    state = state_of_rows(first, second, first_row + row, limit > begin, KIND)
    total = tl.zeros(in_row.shape, tl.float32)
    place = begin
    source = tl.load(sources + place, mask=place < limit, other=0)
    second_source = tl.load(sources + place + 1, mask=place + 1 < limit, other=0)
    while turns > 0:
        is_more = place + 2 < limit
        following = tl.where(is_more, place + 2, end)
        # Behind the last lookup there is room for two more.
        next_source, next_second_source = tl.load(sources + following), tl.load(sources + following + 1)
        tile = gradients_of(grad, source, factors, place, place < limit, most_source, in_row, ALIGNED)
        second_tile = gradients_of(
            grad, second_source, factors, place + 1, place + 1 < limit, most_source, in_row, ALIGNED
        )  # fmt: skip
        total = total + tile + second_tile
        if tl.max(is_more.to(tl.int32), 0) == 0:
            is_read = limit > begin
            if tl.max(is_read.to(tl.int32), 0) != 0:
                element = start + by_row(elements_of(row, width), in_row).to(tl.int64) + columns
                apply_sums(
                    total, old, state, is_read, first_row + row, element, in_row, weights, first, second, last_step, step,
                    corrections, learning_rate, width, numbers, KIND, IS_STOCHASTIC, IS_DECOUPLED, lanes,
                )  # fmt: skip
            turns -= 1
            row += 1
            begin, end = end, tl.where(row < last, after, end)
            after = tl.load(bounds + row + 2, mask=row + 1 < last, other=0)
            limit = limit_of(begin, end)
            old = weights_of(weights + start + columns, row, limit > begin, width, in_row, KIND)
            state = state_of_rows(first, second, first_row + row, limit > begin, KIND)
            total = tl.zeros(in_row.shape, tl.float32)
        place, source, second_source = following, next_source, next_second_source


@triton.jit(do_not_specialize=["grad_size", "num_tables", "most_counted", *RULE_NUMBERS])
def embedding_bags_counted_rows_kernel(
    grad, sources, factors, bounds, weights, first, second, last_step, step, corrections, rate, tables, counter, grad_size,
    num_tables, most_counted, eps, beta1, beta2, weight_decay, rest1, rest2, max_norm, KIND: tl.constexpr,
    IS_STOCHASTIC: tl.constexpr, IS_DECOUPLED: tl.constexpr, WHOLE_ROWS: tl.constexpr, ALIGNED: tl.constexpr,
    USED: tl.constexpr,
):  # fmt: skip
    """Take units of all tables' rows, tables of one width after another; `USED` has a bit for each exponent
    by which they are wider than `row_columns` where an update needs whole rows."""
    COLUMNS: tl.constexpr = row_columns(ALIGNED)
    num_units = tl.load(tables + (num_tables - 1) * FIELDS + UNIT_END)
    unit = tl.program_id(0).to(tl.int64)
    while unit < num_units:
        next_unit = take_unit(counter)
        place, before = group_of(tables + UNIT_END, unit, num_tables, FIELDS)
        table = tl.load(tables + place * FIELDS + BY_WIDTH)
        fields = tables + table * FIELDS
        width = tl.load(fields + WIDTH)
        parts = (width + COLUMNS - 1) // COLUMNS
        part = (unit - before) % parts
        is_read = tl.load(fields + FIRST_READER) < tl.load(fields + FIELDS + FIRST_READER)
        # Updates that need whole rows take all of their columns at once.
        is_own = is_read & (tl.load(fields + ROWS) <= most_counted) & ((part == 0) | (not WHOLE_ROWS))
        wide = tl.zeros((), tl.int32)
        if WHOLE_ROWS:
            wide = widening_of(width, ALIGNED)
        for i in tl.static_range(MOST_WIDE):
            if (USED >> i) & 1:  # noqa: SIM102
                if is_own & (wide == i):
                    rows_unit(
                        grad, sources, factors, bounds + tl.load(fields + FIRST_ROW) + table, weights, first, second, last_step,
                        step, corrections, rate, fields, (unit - before) // parts, part, grad_size, eps, beta1, beta2,
                        weight_decay, rest1, rest2, max_norm, KIND, IS_STOCHASTIC, IS_DECOUPLED, ALIGNED, i,
                    )  # fmt: skip
        unit = next_unit


@triton.jit(noinline=True)
def sum_of_slice(
    grad, sources, factors, begin, length, result, width, grad_size, ALIGNED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store the sum of a slice of a row's lookups."""
    GROUPS: tl.constexpr = NUMBERS // COLUMNS
    for column in range(0, width.to(tl.int32), COLUMNS):
        columns = column + tl.arange(0, COLUMNS)
        total = tl.zeros((GROUPS, COLUMNS), tl.float32)
        lookup = tl.arange(0, SLICE_UNROLL)[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :]
        source = tl.load(sources + begin + lookup, mask=lookup < length, other=0)
        for _ in range(0, length, GROUPS * SLICE_UNROLL):
            # Sources of the next lookups are under way while these ones' gradients are.
            following = lookup + GROUPS * SLICE_UNROLL
            next_source = tl.load(sources + begin + following, mask=following < length, other=0)
            total += sum_of_lookups(
                grad, source, factors, begin + lookup, lookup < length, grad_size - width, columns, columns < width, ALIGNED
            )  # fmt: skip
            lookup, source = following, next_source
        tl.store(result + columns, tl.sum(total, 0), mask=columns < width)


@triton.jit(do_not_specialize=["grad_size", "row_stride", *RULE_NUMBERS])
def embedding_bags_long_rows_kernel(
    grad, sources, factors, bounds, long_rows, sums_of_slices, arrivals, weights, first, second, last_step, step, corrections,
    rate, tables, counters, grad_size, row_stride, eps, beta1, beta2, weight_decay, rest1, rest2, max_norm, KIND: tl.constexpr,
    IS_STOCHASTIC: tl.constexpr, IS_DECOUPLED: tl.constexpr, WHOLE_ROWS: tl.constexpr, ALIGNED: tl.constexpr,
    USED: tl.constexpr,
):  # fmt: skip
    """Sum the slices of rows of more than `LONG` lookups; the last program of a row adds them up, in their order."""
    num_slices = tl.load(counters + 1)
    for slot in range(tl.program_id(0).to(tl.int64), num_slices, tl.num_programs(0)):
        of_slot = long_rows + slot * LONG_FIELDS
        row, table, first_slot = tl.load(of_slot + LONG_ROW), tl.load(of_slot + LONG_TABLE), tl.load(of_slot + FIRST_SLOT)
        fields = tables + table * FIELDS
        width, first_row = tl.load(fields + WIDTH), tl.load(fields + FIRST_ROW)
        of_row = bounds + first_row + table + row
        begin, end = tl.load(of_row).to(tl.int64), tl.load(of_row + 1).to(tl.int64)
        num_own = (end - begin + LONG - 1) // LONG
        begin += (slot - first_slot) * LONG
        length = tl.minimum(end - begin, LONG).to(tl.int32)
        result = sums_of_slices + slot * (row_stride // 4 * 4)
        found = schedule_of(width, WHOLE_ROWS)
        for i in tl.static_range(6):
            if (USED >> (2 * i)) & (3 if i < 5 else -1):  # noqa: SIM102
                if tl.minimum(found // 2, 5) == i:
                    sum_of_slice(grad, sources, factors, begin, length, result, width, grad_size, ALIGNED, columns_by(2 * i))
        # All lanes have written before one tells it.
        tl.debug_barrier()
        if tl.atomic_add(arrivals + first_slot, 1, sem="acq_rel") == num_own - 1:
            for i in tl.static_range(2 * NUM_WIDTHS):
                if (USED >> i) & 1:  # noqa: SIM102
                    if found == i:
                        joined_run(
                            sums_of_slices, first_slot, num_own, 0, 0, 1, first_row + row, weights, first, second,
                            last_step, step, corrections, rate, fields, row_stride, eps, beta1, beta2, weight_decay, rest1,
                            rest2, max_norm, KIND, IS_STOCHASTIC, IS_DECOUPLED, WHOLE_ROWS, 1, i,
                        )  # fmt: skip
