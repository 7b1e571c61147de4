"""Claims of missed rows, and their exchange, as Triton kernels; the latter read and write the host's memory by themselves."""

from __future__ import annotations

import triton
import triton.language as tl

from jagged.ops._shared.launch import Launcher
from jagged.ops._shared.matrices import gpu
from jagged.ops._shared.sizes import cdiv, next_power_of_2
from jagged.ops.host_rows.spec import Claiming, Claims, Inputs, Nothing, Options, Seating, Seats

# Bytes of one program's tile of each direction, and programs for each multiprocessor, of one warp: what is under way then is what
# the link holds, and other work has room beside it. Rows come in the order of their addresses: the fewer are under way, the
# nearer they are to one another in the host's memory, and the fewer pages the GPU has to find.
TILE_BYTES, PROGRAMS = 2048, 1
MOST_ROWS, MOST_COLUMNS = 256, 1024
# Lookups of one program, and slots.
LOOKUPS, SLOTS = 512, 256


@triton.jit(do_not_specialize=["num_exchanges", "num_slots", "num_lines"])
def exchange_rows_kernel(
    cached, slots, leaving, coming, table, num_exchanges, num_slots, num_lines,
    WIDTH: tl.constexpr, LINE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Exchange rows. Those that leave and those that come are others, so that both directions go at once."""
    last = num_lines - WIDTH // LINE
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
        (programs,), x.cached, x.slots, x.leaving, x.coming, x.table, count, x.cached.shape[0], x.table.shape[0],
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


@triton.jit(do_not_specialize=["num_lookups", "num_features", "no_row", "number"])
def claim_rows_kernel(
    indices, ends, of_features, slot_of_row, counts, used, is_dirty, rows, missed, totals, num_lookups, num_features, no_row,
    number, CHANGES: tl.constexpr, STEPS: tl.constexpr, LOOKUPS: tl.constexpr,
):  # fmt: skip
    """Find the rows of some lookups. Of those that miss one row the first to lower its slot from -1 to -2 lists it."""
    place = tl.program_id(0).to(tl.int64) * LOOKUPS + tl.arange(0, LOOKUPS)
    exists = place < num_lookups
    feature = num_up_to(place, ends, num_features, STEPS)
    # Whatever wrong offsets say, no feature is read that is not there.
    reads = of_features + tl.minimum(feature, num_features - 1) * 4
    id = tl.load(indices + place, mask=exists, other=-1).to(tl.int64)
    is_known = (id >= 0) & (id < tl.load(reads + 1))
    row = tl.load(reads) + tl.where(is_known, id, 0)
    tl.store(rows + place, tl.where(is_known, row, no_row).to(tl.int32), mask=exists)
    tl.atomic_add(counts + row, 1, mask=is_known, sem="relaxed")
    slot = tl.load(slot_of_row + row, mask=is_known, other=-1)
    is_hit = is_known & (slot >= 0)
    at = tl.load(reads + 2) + slot
    tl.store(used + at, number, mask=is_hit)
    if CHANGES:
        tl.store(is_dirty + at, 1, mask=is_hit)
    is_missed = is_known & (slot < 0)
    before = tl.atomic_min(slot_of_row + row, -2, mask=is_missed, sem="relaxed")
    speaks = (is_missed & (before == -1)).to(tl.int32)
    begin = tl.atomic_add(totals, tl.sum(speaks), sem="relaxed")
    tl.store(missed + begin + tl.cumsum(speaks, 0) - 1, row.to(tl.int32), mask=speaks == 1)
    tl.atomic_add(totals + 1, tl.sum(is_hit.to(tl.int32)), sem="relaxed")
    tl.atomic_add(totals + 2 + tl.load(reads + 3), 1, mask=speaks == 1, sem="relaxed")


_launch_claim_rows = Launcher(claim_rows_kernel)


def claim(x: Claims, o: Claiming) -> Nothing:
    """Launch `claim_rows_kernel`."""
    count, num_features = x.indices.shape[0], x.ends.shape[0]
    _launch_claim_rows(
        (cdiv(count, LOOKUPS),), *x, count, num_features, x.slot_of_row.shape[0] - 1, o.number,
        CHANGES=o.changes, STEPS=num_features.bit_length(), LOOKUPS=LOOKUPS,
    )  # fmt: skip
    return Nothing()


@triton.jit
def line_of(row, tables, num_tables, LINES: tl.constexpr, LINE: tl.constexpr, STEPS: tl.constexpr):
    """Line of the host's storage at which a row begins, and its number among the states of rows."""
    of_table = tables + tl.maximum(num_up_to(row, tables, num_tables, STEPS) - 1, 0)
    within = row - tl.load(of_table)
    return tl.load(of_table + num_tables) // LINE + within * LINES, tl.load(of_table + 2 * num_tables) + within


@triton.jit(do_not_specialize=["num_ring", "num_coming", "num_tables", "number"])
def seat_rows_kernel(
    ring, is_free, order, coming, tables, slot_of_row, row_of_slot, used, is_dirty,
    slots, leaving_lines, coming_lines, leaving_rows, coming_rows, written, num_ring, num_coming, num_tables, number,
    CHANGES: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr, STEPS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Give some slots to the rows that come, and say which rows leave. No row does both."""
    place = tl.program_id(0).to(tl.int64) * SLOTS + tl.arange(0, SLOTS)
    exists = place < num_ring
    at = tl.load(order + place, mask=exists, other=0) - 1
    takes = exists & (tl.load(is_free + place, mask=exists, other=0) != 0) & (at < num_coming)
    slot = tl.load(ring + place, mask=takes, other=0)
    new = tl.load(coming + at, mask=takes, other=0)
    old = tl.load(row_of_slot + slot, mask=takes, other=-1).to(tl.int64)
    leaves = takes & (old >= 0) & (tl.load(is_dirty + slot, mask=takes, other=0) != 0)
    tl.store(slots + at, slot, mask=takes)
    line, row = line_of(new, tables, num_tables, LINES, LINE, STEPS)
    tl.store(coming_lines + at, line, mask=takes)
    tl.store(coming_rows + at, row, mask=takes)
    line, row = line_of(old, tables, num_tables, LINES, LINE, STEPS)
    tl.store(leaving_lines + at, tl.where(leaves, line, -1), mask=takes)
    tl.store(leaving_rows + at, tl.where(leaves, row, -1), mask=takes)
    tl.store(slot_of_row + old, -1, mask=takes & (old >= 0))
    tl.store(slot_of_row + new, slot.to(tl.int32), mask=takes)
    tl.store(row_of_slot + slot, new.to(tl.int32), mask=takes)
    tl.store(used + slot, number, mask=takes)
    tl.store(is_dirty + slot, CHANGES, mask=takes)
    tl.atomic_add(written, tl.sum(leaves.to(tl.int64)), sem="relaxed")


_launch_seat_rows = Launcher(seat_rows_kernel)


def seat(x: Seats, o: Seating) -> Nothing:
    """Launch `seat_rows_kernel`."""
    num_ring, num_tables = x.ring.shape[0], x.tables.shape[1]
    _launch_seat_rows(
        (cdiv(num_ring, SLOTS),), *x, num_ring, x.coming.shape[0], num_tables, o.number,
        CHANGES=o.changes, LINES=o.width // o.line, LINE=o.line, STEPS=num_tables.bit_length(), SLOTS=SLOTS,
    )  # fmt: skip
    return Nothing()
