"""The exchange as a Triton kernel, which reads and writes the host's memory by itself."""

from __future__ import annotations

import triton
import triton.language as tl

from jagged.ops._shared.launch import Launcher
from jagged.ops._shared.sizes import cdiv, next_power_of_2
from jagged.ops.host_rows.spec import Inputs, Nothing, Options

# Bytes of one program's tile of each direction, 64 a thread: four accesses of 16 bytes under way hide the link's latency.
TILE_BYTES = 8192
MOST_ROWS, MOST_COLUMNS = 256, 1024


@triton.jit(do_not_specialize=["num_exchanges", "num_slots", "num_lines"])
def exchange_rows_kernel(
    cached, slots, leaving, coming, table, num_exchanges, num_slots, num_lines,
    WIDTH: tl.constexpr, LINE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Exchange some rows. Those that leave and those that come are others, so that both directions go at once."""
    place = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = place < num_exchanges
    slot = tl.load(slots + place, mask=exists, other=-1).to(tl.int64)
    old = tl.load(leaving + place, mask=exists, other=-1).to(tl.int64)
    new = tl.load(coming + place, mask=exists, other=-1).to(tl.int64)
    is_slot = (slot >= 0) & (slot < num_slots)
    last = num_lines - WIDTH // LINE
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
    width, count = x.cached.shape[1], x.slots.shape[0]
    columns = min(next_power_of_2(width), MOST_COLUMNS)
    rows = max(1, min(TILE_BYTES // x.cached.element_size() // columns, MOST_ROWS))
    _launch_exchange_rows(
        (cdiv(count, rows),), x.cached, x.slots, x.leaving, x.coming, x.table, count, x.cached.shape[0], x.table.shape[0],
        WIDTH=width, LINE=x.table.shape[1], ROWS=rows, COLUMNS=columns,
    )  # fmt: skip
    return Nothing()
