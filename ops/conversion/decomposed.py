"""Conversions in PyTorch's own operators, for programs that are exported."""

from __future__ import annotations

import torch
from torch import Tensor

from jagged.ops._shared.offsets import sample_of_row
from jagged.ops._shared.padded import rows_of
from jagged.ops.conversion.spec import Both, Dense, Joined, Pair, Part, Parts, Pieces, Plain, Rows, Taken, Total, Totals


def to_jagged(x: Dense, o: Total) -> Taken:
    """Take samples' rows; those past the dense length are zero."""
    return Taken(rows_of(x.dense, x.offsets, o.total))


def concat(x: Parts, o: Plain) -> Taken:
    """Put the rows of every part behind one another, sample by sample."""
    places = [_rows_in_whole(x.offsets, part, rows.shape[0]) for part, rows in enumerate(x.values)]
    rows = torch.cat(x.values)
    return Taken(torch.zeros_like(rows).index_copy(0, torch.cat(places), rows))


def split(x: Rows, o: Totals) -> Pieces:
    """Take the parts out again that `concat` put behind one another."""
    places = [_rows_in_whole(x.offsets, part, total) for part, total in enumerate(o.totals)]
    return Pieces(tuple([x.values.index_select(0, rows) for rows in places]))


def concat_two(x: Pair, o: Plain) -> Joined:
    """Put the rows of two parts behind one another, sample by sample."""
    parts = [part if offsets is not None else part.flatten(0, 1) for part, offsets in zip(x[:2], x[2:], strict=True)]
    stacked = _stacked(x[2:], [part.shape[0] for part in parts])
    return Joined(concat(Parts(tuple(parts), stacked), o).rows, stacked[0] + stacked[1])


def split_two(x: Both, o: Totals) -> Pieces:
    """Take both parts out again."""
    return split(Rows(x.values, _stacked(x[1:], list(o.totals))), o)


def take_part(x: Rows, o: Part) -> Taken:
    """Take one part out."""
    return Taken(x.values.index_select(0, _rows_in_whole(x.offsets, o.part, o.total)))


def _stacked(offsets: tuple[Tensor | None, ...], totals: list[int]) -> Tensor:
    """Return the offsets `[2, B + 1]` of parts of which one may have none, because its samples are of one length."""
    like = next(of for of in offsets if of is not None)
    samples = torch.arange(like.shape[0], device=like.device, dtype=like.dtype)
    # How long a dense part's samples are nobody knows before the program runs.
    each = [total // (like.shape[0] - 1) for total in totals]
    return torch.stack([samples * length if of is None else of for of, length in zip(offsets, each, strict=True)])


def _rows_in_whole(offsets: Tensor, part: int, total: int) -> Tensor:
    """Return for each row of a part its row `[S_k]` among those of all parts, whose offsets are `[K, B + 1]`."""
    before = offsets[:part, 1:].sum(0) + offsets[part + 1 :, :-1].sum(0)
    rows = torch.arange(total, device=offsets.device)
    return before.index_select(0, sample_of_row(offsets[part], total)) + rows
