"""Claims and exchanges in plain PyTorch: what a CPU runs, and any device without Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from jagged.ops.host_rows.spec import Claiming, Claims, Inputs, Nothing, Options, Seating, Seats


def exchange(x: Inputs, o: Options) -> Nothing:
    """Copy the rows that leave to the table, then those that come to their slots."""
    count = None if x.num_rows is None else int(x.num_rows)
    slots, leaving, coming = x.slots[:count], x.leaving[:count], x.coming[:count]
    leaves, comes = leaving >= 0, coming >= 0
    given = x.cached[slots[leaves]].view(-1, x.table.shape[1])
    x.table[_lines(x, leaving[leaves])] = given.to(x.table.device)
    taken = x.table[_lines(x, coming[comes])].view(-1, x.cached.shape[1])
    x.cached[slots[comes]] = taken.to(x.cached.device)
    return Nothing()


def _lines(x: Inputs, begins: Tensor) -> Tensor:
    """Return all lines of rows that begin at some."""
    step = torch.arange(x.cached.shape[1] // x.table.shape[1])
    return (begins.to(x.table.device).long()[:, None] + step).flatten()


def claim(x: Claims, o: Claiming) -> Nothing:
    """Find the rows, count them, and list those that are missed."""
    places = torch.arange(x.indices.shape[0], dtype=x.ends.dtype, device=x.ends.device)
    # Whatever wrong offsets say, no feature is read that is not there.
    features = torch.searchsorted(x.ends, places, right=True).clamp_(max=x.ends.shape[0] - 1)
    first, count, first_slot, pool = x.of_features[features].unbind(1)
    is_known = (x.indices >= 0) & (x.indices < count)
    rows = first + torch.where(is_known, x.indices, 0)
    x.rows.copy_(torch.where(is_known, rows, x.slot_of_row.shape[0] - 1))
    x.counts.scatter_add_(0, rows, is_known.int())
    slots = x.slot_of_row[rows]
    is_hit, is_missed = is_known & (slots >= 0), is_known & (slots < 0)
    used = (first_slot + slots)[is_hit]
    x.used[used] = o.number
    if o.changes:
        x.is_dirty[used] = True
    # In order.
    missed = rows[is_missed].unique()
    x.missed[: missed.shape[0]] = missed.int()
    # One lookup speaks for each row.
    speaks = torch.zeros_like(x.slot_of_row).scatter_(0, rows[is_missed], pool[is_missed].int())[missed]
    x.found[0], x.found[1] = missed.shape[0], is_hit.sum()
    x.found[2 : 2 + o.num_pools] = speaks.bincount(minlength=o.num_pools)
    return Nothing()


def seat(x: Seats, o: Seating) -> Nothing:
    """Give the first free slots to the rows that come, if there are enough."""
    totals: list[int] = x.totals.tolist()
    num_pools, needed = len(totals) // 2 - 1, totals[2 + o.pool]
    begin = sum(totals[2 : 2 + o.pool])
    ring = x.ring.roll(-o.cursor)
    slots = ring[x.used[ring] < o.oldest][:needed]
    fits = slots.shape[0] == needed
    x.totals[2 + num_pools + o.pool] = needed if fits else 0
    if not fits:
        return Nothing()
    coming, old = x.coming[begin : begin + needed].long(), x.row_of_slot[slots].long()
    leaves = x.is_dirty[slots] & (old >= 0)
    leaving = [of.masked_fill(~leaves, -1) for of in begins(x.tables, old, o.width, o.line)]
    lines, rows = begins(x.tables, coming, o.width, o.line)
    x.seated[:, :needed] = torch.stack([slots, leaving[0], lines, leaving[1], rows])
    x.slot_of_row[old[old >= 0]] = -1
    x.slot_of_row[coming] = slots.to(x.slot_of_row.dtype)
    x.row_of_slot[slots] = coming.to(x.row_of_slot.dtype)
    x.used[slots] = o.number
    x.is_dirty[slots] = o.changes
    x.written.add_(leaves.sum())
    return Nothing()


def begins(tables: Tensor, rows: Tensor, width: int, line: int) -> tuple[Tensor, Tensor]:
    """Return the lines of the host's storage at which rows begin, and their numbers among the states of rows."""
    firsts, starts, first_rows = tables
    of_rows = torch.searchsorted(firsts, rows, right=True).sub_(1).clamp_(min=0)
    within = rows - firsts[of_rows]
    return starts[of_rows] // line + within * (width // line), first_rows[of_rows] + within
