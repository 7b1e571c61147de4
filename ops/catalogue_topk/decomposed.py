"""The best items of a catalogue in PyTorch's own operators, for programs that are exported."""

from __future__ import annotations

import torch
from torch import Tensor

from jagged.ops._shared.offsets import sample_of_row
from jagged.ops.catalogue_topk.keys import restore
from jagged.ops.catalogue_topk.spec import Best, Inputs, Options
from jagged.ops.catalogue_topk.torch_impl import best_of

# Items of a tile, of which a program has as many as there are: their scores are in memory at a time.
_LEAST_TILE, _MOST_TILES = 2**16, 16


def catalogue_topk(x: Inputs, o: Options) -> Best:
    """Tile by tile of a catalogue whose size is known; the bound on memory has no say."""
    dtype = torch.float64 if x.hidden.dtype == torch.float64 else torch.float32
    kind = torch.int64 if dtype == torch.float64 else torch.int32
    queries, (rows, items) = x.hidden.to(dtype), (x.hidden.shape[0], x.weight.shape[0])
    none, device = torch.iinfo(kind).min, queries.device
    best = torch.full((rows, o.k), none, dtype=kind, device=device)
    ids = torch.full((rows, o.k), -1, dtype=torch.int64, device=device)
    tile = max(_LEAST_TILE, -(-items // _MOST_TILES)) if isinstance(items, int) else items
    for low in range(0, items, tile) if isinstance(items, int) else (0,):
        here = slice(low, low + tile)
        scores = queries @ x.weight[here].to(dtype).t()
        if x.bias is not None:
            scores = scores + x.bias[here].to(dtype)
        order = _without(_reordered(scores, kind), x, low)
        # Among equal scores the ids of earlier tiles are smaller.
        best, place = best_of(torch.cat([best, order], 1), o.k)
        columns = torch.arange(low, low + order.shape[1], device=device)
        ids = torch.cat([ids, columns.expand(rows, -1)], 1).gather(1, place)
    is_none = best == none
    return Best(restore(best).masked_fill(is_none, -torch.inf), ids.masked_fill(is_none, -1))


def _reordered(scores: Tensor, kind: torch.dtype) -> Tensor:
    """Return integers of the scores' order, as `reorder_` does: NaN last, and one zero."""
    info = torch.iinfo(kind)
    bits = torch.where(scores == 0, 0.0, scores).view(kind)
    return torch.where(scores.isnan(), info.min + 1, bits ^ ((bits >> (info.bits - 1)) & info.max))


def _without(order: Tensor, x: Inputs, low: int) -> Tensor:
    """Return a tile in which the items that its rows must not get are none."""
    if x.exclude_ids is None or x.exclude_offsets is None:
        return order
    rows, width = order.shape
    column = x.exclude_ids.to(torch.int64) - low
    # What lies outside falls into a column more.
    column = torch.where((column >= 0) & (column < width), column, width)
    row = sample_of_row(x.exclude_offsets, x.exclude_ids.shape[0])
    wider = torch.cat([order, order.new_zeros(rows, 1)], 1)
    return wider.index_put((row, column), order.new_full((), torch.iinfo(order.dtype).min))[:, :width]
