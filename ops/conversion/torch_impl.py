"""The conversions between jagged tensors in plain PyTorch: the CPU path."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from jagged.ops._shared import padding
from jagged.ops._shared.offsets import position_of_row, sample_of_row, stacked_offsets
from jagged.ops.conversion.spec import (
    Both,
    Dense,
    Joined,
    Padded,
    Padding,
    Pages,
    Paging,
    Pair,
    Part,
    Parts,
    Pieces,
    Plain,
    Rows,
    Selection,
    Taken,
    Total,
    Totals,
)


def to_dense(x: Rows, o: Padding) -> Padded:
    """Pad samples to one length."""
    return Padded(padding.to_dense(*x, *o))


def to_jagged(x: Dense, o: Total) -> Taken:
    """Take samples' rows; those past the dense length are zero."""
    return Taken(padding.to_jagged(*x, *o))


def concat(x: Parts, o: Plain) -> Taken:
    """Put the rows of every part behind one another, sample by sample."""
    values, offsets = x
    joined = values[0].new_empty(sum(part.shape[0] for part in values), *values[0].shape[1:])
    for k, part in enumerate(values):
        joined.index_copy_(0, _rows_in_whole(offsets, k, part.shape[0]), part)
    return Taken(joined)


def split(x: Rows, o: Totals) -> Pieces:
    """Take the parts out again that `concat` put behind one another."""
    pieces = [x.values.index_select(0, _rows_in_whole(x.offsets, k, total)) for k, total in enumerate(o.totals)]
    return Pieces(tuple(pieces))


def concat_two(x: Pair, o: Plain) -> Joined:
    """Put the rows of two parts behind one another, sample by sample."""
    flat = [part if offsets is not None else part.flatten(0, 1) for part, offsets in zip(x[:2], x[2:], strict=True)]
    stacked = _stacked(x[2:], [part.shape[0] for part in flat])
    return Joined(concat(Parts(tuple(flat), stacked), o).rows, stacked[0] + stacked[1])


def split_two(x: Both, o: Totals) -> Pieces:
    """Take both parts out again."""
    return split(Rows(x.values, _stacked(x[1:], o.totals)), o)


def take_part(x: Rows, o: Part) -> Taken:
    """Take one part out."""
    return Taken(x.values.index_select(0, _rows_in_whole(x.offsets, o.part, o.total)))


def put_part(x: Rows, o: Part) -> Taken:
    """Put one part where it stands among the rows of all; the others' are zero."""
    whole = x.values.new_zeros(o.total, *x.values.shape[1:])
    return Taken(whole.index_copy_(0, _rows_in_whole(x.offsets, o.part, x.values.shape[0]), x.values))


def index_select(x: Selection, o: Total) -> Taken:
    """Take the rows of the selected samples."""
    if not x.values.shape[0] or not x.indices.shape[0]:
        return Taken(x.values.new_zeros(o.total, *x.values.shape[1:]))
    return Taken(x.values.index_select(0, _selected_rows(x, o.total, x.values.shape[0])))


def index_select_backward(x: Selection, o: Total) -> Taken:
    """Add up the rows of the selected samples where they came from."""
    sums = torch.zeros(
        o.total, *x.values.shape[1:], dtype=torch.promote_types(x.values.dtype, torch.float32), device=x.values.device
    )
    if o.total and x.indices.shape[0]:
        sums.index_add_(0, _selected_rows(x, x.values.shape[0], o.total), x.values.to(sums.dtype))
    return Taken(sums.to(x.values.dtype))


def extend_pages(x: Pages, o: Paging) -> Taken:
    """Put new rows behind those in pages, and the first of them into pages, too."""
    samples = sample_of_row(x.joined_offsets, o.total)
    positions = position_of_row(x.joined_offsets, samples)
    known = x.joined_offsets.diff() - x.offsets.diff()
    is_known = positions < known[samples]
    is_kept = ~is_known & (positions < (known + x.kept_offsets.diff())[samples])
    pages = x.pages.to(torch.int64)

    def places(chosen: Tensor) -> Tensor:
        at = positions[chosen]
        return pages[samples[chosen], at // o.page_rows] * o.page_rows + at % o.page_rows

    joined = x.pool.new_empty(o.total, *x.pool.shape[1:])
    joined[is_known] = x.pool.index_select(0, places(is_known))
    # What is not in pages are the new rows, in their order.
    joined[~is_known] = x.first if x.second is None else torch.stack((x.first, x.second), 1)
    x.pool.index_copy_(0, places(is_kept), joined[is_kept])
    return Taken(joined)


def _stacked(offsets: Sequence[Tensor | None], totals: Sequence[int]) -> Tensor:
    """Return the offsets `[K, B + 1]` of parts of which some have none, because their samples are of one length."""
    like = next(of for of in offsets if of is not None)
    parts = [total // max(like.shape[0] - 1, 1) if of is None else of for of, total in zip(offsets, totals, strict=True)]
    return stacked_offsets(parts, like)


def _rows_in_whole(offsets: Tensor, part: int, total: int) -> Tensor:
    """Return for each row of a part its row `[S_k]` in the concatenation of all parts, whose offsets are `[K, B + 1]`."""
    before = offsets[:part, 1:].sum(0) + offsets[part + 1 :, :-1].sum(0)
    rows = before.index_select(0, sample_of_row(offsets[part], total))
    return rows.add_(torch.arange(total, device=offsets.device))


def _selected_rows(x: Selection, num_selected: int, num_rows: int) -> Tensor:
    """Return for each selected row the row `[num_selected]` of all samples that it is; wrong offsets give one of these."""
    samples = sample_of_row(x.new_offsets, num_selected)
    starts = x.offsets[:-1].to(torch.int64).index_select(0, x.indices)
    return starts.index_select(0, samples).add_(position_of_row(x.new_offsets, samples)).clamp_(0, num_rows - 1)
