"""Claims of missed rows, and their exchange, as Triton kernels; the latter read and write the host's memory by themselves."""

from __future__ import annotations

import triton
import triton.language as tl

from jagged.ops._shared.launch import Launcher
from jagged.ops._shared.matrices import gpu
from jagged.ops._shared.sizes import cdiv, next_power_of_2
from jagged.ops.host_rows.spec import Claiming, Claims, Inputs, Nothing, Options, Seating, Seats, rows_of_block

# Bytes of one program's tile of each direction, and programs for each multiprocessor, of one warp: what is under way then is what
# the link holds, and other work has room beside it. Rows come in the order of their addresses: the fewer are under way, the
# nearer they are to one another in the host's memory, and the fewer pages the GPU has to find.
TILE_BYTES, PROGRAMS = 2048, 1
MOST_ROWS, MOST_COLUMNS = 256, 1024
# Lookups of one program, slots, rows that are looked at together, and counts that are summed up together.
LOOKUPS, SLOTS, ROWS, TOGETHER = 512, 512, 2048, 1024


@triton.jit(do_not_specialize=["num_exchanges", "num_slots", "num_lines"])
def exchange_rows_kernel(
    cached, slots, leaving, coming, num_rows, table, num_exchanges, num_slots, num_lines,
    WIDTH: tl.constexpr, LINE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Exchange rows. Those that leave and those that come are others, so that both directions go at once."""
    last = num_lines - WIDTH // LINE
    if num_rows is not None:
        num_exchanges = tl.minimum(num_exchanges, tl.load(num_rows))
    for begin in range(tl.program_id(0) * ROWS, num_exchanges, tl.num_programs(0) * ROWS):
        place = begin + tl.arange(0, ROWS)
        exists = place < num_exchanges
        slot = tl.load(slots + place, mask=exists, other=-1).to(tl.int64)
        old = tl.load(leaving + place, mask=exists, other=-1).to(tl.int64)
        new = tl.load(coming + place, mask=exists, other=-1).to(tl.int64)
        is_slot = (slot >= 0) & (slot < num_slots)
        leaves = is_slot & (old >= 0) & (old <= last)
        comes = is_slot & (new >= 0) & (new <= last)
        for first in range(0, WIDTH, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            in_row = (column < WIDTH)[None, :]
            of_slots = cached + slot[:, None] * WIDTH + column[None, :]
            # The link is the slow part: asked first.
            taken = tl.load(table + new[:, None] * LINE + column[None, :], mask=comes[:, None] & in_row)
            given = tl.load(of_slots, mask=leaves[:, None] & in_row)
            tl.store(table + old[:, None] * LINE + column[None, :], given, mask=leaves[:, None] & in_row)
            tl.store(of_slots, taken, mask=comes[:, None] & in_row)


_launch_exchange_rows = Launcher(exchange_rows_kernel)


def exchange(x: Inputs, o: Options) -> Nothing:
    """Launch `exchange_rows_kernel`."""
    # Here, as a compiler has no answer while it traces.
    if x.cached.is_cuda and not x.table.is_pinned():
        raise ValueError("table: expected pinned memory, which a GPU reads, got pageable; pass table.pin_memory()")
    width, count = x.cached.shape[1], x.slots.shape[0]
    columns = min(next_power_of_2(width), MOST_COLUMNS)
    rows = max(1, min(TILE_BYTES // x.cached.element_size() // columns, MOST_ROWS))
    programs = min(cdiv(count, rows), PROGRAMS * gpu(x.cached.device).multiprocessors)
    _launch_exchange_rows(
        (programs,), x.cached, x.slots, x.leaving, x.coming, x.num_rows, x.table, count, x.cached.shape[0], x.table.shape[0],
        WIDTH=width, LINE=x.table.shape[1], ROWS=rows, COLUMNS=columns, num_warps=1,
    )  # fmt: skip
    return Nothing()


@triton.jit
def num_up_to(value, sorted_numbers, count, STEPS: tl.constexpr):
    """How many of some sorted numbers are no larger than each value."""
    found = tl.zeros(value.shape, tl.int32)
    above = found + count
    for _ in range(STEPS):
        middle = (found + above) // 2
        is_more = (middle < count) & (tl.load(sorted_numbers + middle, mask=middle < count, other=0) <= value)
        found = tl.where(is_more, middle + 1, found)
        above = tl.where(is_more, above, middle)
    return found


@triton.jit
def maximum(first, second):
    """The larger one, as a scan takes it."""
    return tl.maximum(first, second)


@triton.jit(do_not_specialize=["num_lookups", "num_features", "no_row", "num_pools", "number"])
def claim_rows_kernel(
    indices, ends, of_features, slot_of_row, counts, used, is_dirty, rows, found, num_lookups, num_features, no_row, num_pools,
    number, CHANGES: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr, LOOKUPS: tl.constexpr,
):  # fmt: skip
    """Find the rows of some lookups. Of those that miss one row the first to set its bit counts it.

    Lookups are sorted, and the last one of a row speaks for all of them: frequent rows would be one addition after the other.
    """
    bits = found + 2 + 2 * num_pools
    blocks = bits + (no_row + 31) // 32
    place = tl.program_id(0).to(tl.int64) * LOOKUPS + tl.arange(0, LOOKUPS)
    exists = place < num_lookups
    # Whatever wrong offsets say, no feature is read that is not there.
    feature = tl.minimum(num_up_to(place, ends, num_features, STEPS), num_features - 1)
    reads = of_features + feature * 4
    id = tl.load(indices + place, mask=exists, other=-1).to(tl.int64)
    is_known = (id >= 0) & (id < tl.load(reads + 1))
    row = tl.load(reads) + tl.where(is_known, id, 0)
    tl.store(rows + place, tl.where(is_known, row, no_row).to(tl.int32), mask=exists)
    lookup = tl.sort(tl.where(is_known, row << STEPS | feature, no_row.to(tl.int64) << STEPS))
    row = lookup >> STEPS
    reads = of_features + (lookup - (row << STEPS)) * 4
    number_of = tl.arange(0, LOOKUPS)
    is_end = (number_of == LOOKUPS - 1) | (row != tl.gather(row, tl.minimum(number_of + 1, LOOKUPS - 1), 0))
    # Behind the lookup that speaks for the row before.
    begin = tl.associative_scan(tl.where(is_end, number_of + 1, 0), 0, maximum)
    begin = tl.where(number_of > 0, tl.gather(begin, tl.maximum(number_of - 1, 0), 0), 0)
    many = number_of + 1 - begin
    is_known = is_end & (row < no_row)
    tl.atomic_add(counts + row, many, mask=is_known, sem="relaxed")
    slot = tl.load(slot_of_row + row, mask=is_known, other=-1)
    is_hit = is_known & (slot >= 0)
    at = tl.load(reads + 2) + slot
    tl.store(used + at, number, mask=is_hit)
    if CHANGES:
        tl.store(is_dirty + at, 1, mask=is_hit)
    is_missed = is_known & (slot < 0)
    bit = (row * 0 + 1 << row % 32).to(tl.int32)
    before = tl.atomic_or(bits + row // 32, bit, mask=is_missed, sem="relaxed")
    is_first = is_missed & (before & bit == 0)
    tl.atomic_add(blocks + row // BLOCK, 1, mask=is_first, sem="relaxed")
    tl.atomic_add(found, tl.sum(is_first.to(tl.int32)), sem="relaxed")
    tl.atomic_add(found + 1, tl.sum(tl.where(is_hit, many, 0)), sem="relaxed")
    pool = tl.load(reads + 3)
    for number_of_pool in range(num_pools):
        of_pool = is_first & (pool == number_of_pool)
        tl.atomic_add(found + 2 + number_of_pool, tl.sum(of_pool.to(tl.int32)), sem="relaxed")


@triton.jit
def sum_of(numbers, count, TOGETHER: tl.constexpr):
    """Sum of the first of some numbers."""
    total = count * 0
    for first in range(0, count, TOGETHER):
        at = first + tl.arange(0, TOGETHER)
        total += tl.sum(tl.load(numbers + at, mask=at < count, other=0))
    return total


@triton.jit(do_not_specialize=["no_row", "num_totals"])
def list_rows_kernel(
    found, missed, no_row, num_totals, BLOCK: tl.constexpr, ROWS: tl.constexpr, TOGETHER: tl.constexpr
):  # fmt: skip
    """List the rows of a block whose bits are set, in order, behind those of the blocks before it."""
    bits = found + num_totals
    blocks = bits + (no_row + 31) // 32
    block = tl.program_id(0)
    if tl.load(blocks + block) == 0:
        return
    place = sum_of(blocks, block, TOGETHER)
    for first in range(0, BLOCK, ROWS):
        row = block.to(tl.int64) * BLOCK + first + tl.arange(0, ROWS)
        is_set = tl.load(bits + row // 32, mask=row < no_row, other=0) >> (row % 32).to(tl.int32) & 1
        tl.store(missed + place + tl.cumsum(is_set, 0) - 1, row.to(tl.int32), mask=is_set == 1)
        place += tl.sum(is_set)


_launch_claim_rows, _launch_list_rows = Launcher(claim_rows_kernel), Launcher(list_rows_kernel)


def claim(x: Claims, o: Claiming) -> Nothing:
    """Launch `claim_rows_kernel`, and `list_rows_kernel` for what it finds."""
    count, num_features, num_rows = x.indices.shape[0], x.ends.shape[0], x.counts.shape[0]
    block = rows_of_block(num_rows)
    of_lookups = (x.indices, x.ends, x.of_features, x.slot_of_row, x.counts, x.used, x.is_dirty, x.rows, x.found)
    _launch_claim_rows(
        (cdiv(count, LOOKUPS),), *of_lookups, count, num_features, num_rows, o.num_pools, o.number,
        CHANGES=o.changes, STEPS=num_features.bit_length(), BLOCK=block, LOOKUPS=LOOKUPS,
    )  # fmt: skip
    _launch_list_rows(
        (cdiv(num_rows, block),), x.found, x.missed, num_rows, 2 + 2 * o.num_pools, BLOCK=block, ROWS=ROWS, TOGETHER=TOGETHER
    )
    return Nothing()


@triton.jit
def line_of(row, tables, num_tables, LINES: tl.constexpr, LINE: tl.constexpr, STEPS: tl.constexpr):
    """Line of the host's storage at which a row begins, and its number among the states of rows."""
    of_table = tables + tl.maximum(num_up_to(row, tables, num_tables, STEPS) - 1, 0)
    within = row - tl.load(of_table)
    return tl.load(of_table + num_tables) // LINE + within * LINES, tl.load(of_table + 2 * num_tables) + within


@triton.jit
def free_slots(ring, used, num_ring, cursor, oldest, SLOTS: tl.constexpr):
    """Some slots of a ring from its cursor on, and whether their rows may leave."""
    place = tl.program_id(0).to(tl.int64) * SLOTS + tl.arange(0, SLOTS)
    exists = place < num_ring
    at = cursor + place
    slot = tl.load(ring + tl.where(at < num_ring, at, at - num_ring), mask=exists, other=0)
    return slot, exists & (tl.load(used + slot, mask=exists, other=0) < oldest)


@triton.jit(do_not_specialize=["num_ring", "cursor", "oldest"])
def count_slots_kernel(ring, used, free, num_ring, cursor, oldest, SLOTS: tl.constexpr):
    """Count free slots: so each program of the next kernel knows how many are before its own, and whether they are enough."""
    _, is_free = free_slots(ring, used, num_ring, cursor, oldest, SLOTS)
    tl.store(free + tl.program_id(0), tl.sum(is_free.to(tl.int32)))


@triton.jit(do_not_specialize=["num_ring", "num_seats", "num_pools", "num_tables", "pool", "cursor", "oldest", "number"])
def seat_rows_kernel(
    ring, coming, totals, tables, slot_of_row, row_of_slot, used, is_dirty, seated, written, free,
    num_ring, num_seats, num_pools, num_tables, pool, cursor, oldest, number,
    CHANGES: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr, STEPS: tl.constexpr, SLOTS: tl.constexpr,
    TOGETHER: tl.constexpr,
):  # fmt: skip
    """Give some slots to the rows that come, if all of them have one, and say which rows leave. No row does both."""
    needed = tl.load(totals + 2 + pool)
    fits = sum_of(free, tl.num_programs(0), TOGETHER) >= needed
    if tl.program_id(0) == 0:
        tl.store(totals + 2 + num_pools + pool, tl.where(fits, needed, 0))
    slot, is_free = free_slots(ring, used, num_ring, cursor, oldest, SLOTS)
    at = (sum_of(free, tl.program_id(0), TOGETHER) + tl.cumsum(is_free.to(tl.int32), 0) - 1).to(tl.int64)
    takes = is_free & (at < needed) & fits
    new = tl.load(coming + sum_of(totals + 2, pool, 16) + at, mask=takes, other=0).to(tl.int64)
    old = tl.load(row_of_slot + slot, mask=takes, other=-1).to(tl.int64)
    leaves = takes & (old >= 0) & (tl.load(is_dirty + slot, mask=takes, other=0) != 0)
    tl.store(seated + at, slot, mask=takes)
    line, row = line_of(old, tables, num_tables, LINES, LINE, STEPS)
    tl.store(seated + num_seats + at, tl.where(leaves, line, -1), mask=takes)
    tl.store(seated + 3 * num_seats + at, tl.where(leaves, row, -1), mask=takes)
    line, row = line_of(new, tables, num_tables, LINES, LINE, STEPS)
    tl.store(seated + 2 * num_seats + at, line, mask=takes)
    tl.store(seated + 4 * num_seats + at, row, mask=takes)
    tl.store(slot_of_row + old, -1, mask=takes & (old >= 0))
    tl.store(slot_of_row + new, slot.to(tl.int32), mask=takes)
    tl.store(row_of_slot + slot, new.to(tl.int32), mask=takes)
    tl.store(used + slot, number, mask=takes)
    tl.store(is_dirty + slot, CHANGES, mask=takes)
    tl.atomic_add(written, tl.sum(leaves.to(tl.int64)), sem="relaxed")


_launch_count_slots, _launch_seat_rows = Launcher(count_slots_kernel), Launcher(seat_rows_kernel)


def seat(x: Seats, o: Seating) -> Nothing:
    """Launch `count_slots_kernel` and `seat_rows_kernel`."""
    num_ring, num_tables, num_pools = x.ring.shape[0], x.tables.shape[1], x.totals.shape[0] // 2 - 1
    programs = cdiv(num_ring, SLOTS)
    free = x.totals.new_empty(programs)
    _launch_count_slots((programs,), x.ring, x.used, free, num_ring, o.cursor, o.oldest, SLOTS=SLOTS)
    _launch_seat_rows(
        (programs,), *x, free, num_ring, x.seated.shape[1], num_pools, num_tables, o.pool, o.cursor, o.oldest, o.number,
        CHANGES=o.changes, LINES=o.width // o.line, LINE=o.line, STEPS=num_tables.bit_length(), SLOTS=SLOTS, TOGETHER=TOGETHER,
    )  # fmt: skip
    return Nothing()
