"""Claims and exchanges in plain PyTorch: what a CPU runs, and any device without Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from jagged.ops.host_rows.spec import Claiming, Claims, Inputs, Nothing, Options, Seating, Seats


def exchange(x: Inputs, o: Options) -> Nothing:
    """Copy the rows that leave to the table, then those that come to their slots."""
    leaves, comes = x.leaving >= 0, x.coming >= 0
    given = x.cached[x.slots[leaves]].view(-1, x.table.shape[1])
    x.table[_lines(x, x.leaving[leaves])] = given.to(x.table.device)
    taken = x.table[_lines(x, x.coming[comes])].view(-1, x.cached.shape[1])
    x.cached[x.slots[comes]] = taken.to(x.cached.device)
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
    missed = rows[is_missed].unique()
    x.slot_of_row[missed] = -2
    x.missed[: missed.shape[0]] = missed.int()
    # One lookup speaks for each row.
    speaks = torch.zeros_like(x.slot_of_row).scatter_(0, rows[is_missed], pool[is_missed].int())[missed]
    x.totals[0], x.totals[1] = missed.shape[0], is_hit.sum()
    x.totals[2:] = speaks.bincount(minlength=x.totals.shape[0] - 2)
    return Nothing()


def seat(x: Seats, o: Seating) -> Nothing:
    """Give the first free slots to the rows that come."""
    slots = x.ring[x.is_free & (x.order <= x.coming.shape[0])]
    old = x.row_of_slot[slots].long()
    leaves = x.is_dirty[slots] & (old >= 0)
    x.slots.copy_(slots)
    for rows, lines, numbers in ((old, x.leaving_lines, x.leaving_rows), (x.coming, x.coming_lines, x.coming_rows)):
        of_lines, of_rows = begins(x.tables, rows, o.width, o.line)
        lines.copy_(of_lines)
        numbers.copy_(of_rows)
    x.leaving_lines.masked_fill_(~leaves, -1)
    x.leaving_rows.masked_fill_(~leaves, -1)
    x.slot_of_row[old[old >= 0]] = -1
    x.slot_of_row[x.coming] = slots.to(x.slot_of_row.dtype)
    x.row_of_slot[slots] = x.coming.to(x.row_of_slot.dtype)
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
