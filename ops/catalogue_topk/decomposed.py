"""The best items of a catalogue in PyTorch's own operators, for programs that are exported."""

from __future__ import annotations

import torch
from torch import Tensor

from jagged.ops._shared.offsets import sample_of_row
from jagged.ops.catalogue_topk.keys import ID_MASK, NO_ITEM, restore
from jagged.ops.catalogue_topk.spec import Best, Inputs, Options

# Items of a tile, of which a program has as many as there are: their scores are in memory at a time.
_LEAST_TILE, _MOST_TILES = 2**16, 16


def catalogue_topk(x: Inputs, o: Options) -> Best:
    """Tile by tile of a catalogue whose size is known; the bound on memory has no say.

    A score and its item make one key, as in the kernels: keys are unique, so that there is one choice alone of the best. Those of
    float64 have no room for the item; they are sorted, equal ones in their order.
    """
    is_wide, items, k = x.hidden.dtype == torch.float64, x.weight.shape[0], o.k
    best = torch.full((x.hidden.shape[0], k), NO_ITEM, dtype=torch.int64, device=x.hidden.device)
    ids = torch.full_like(best, -1)
    tile = max(_LEAST_TILE, -(-items // _MOST_TILES)) if isinstance(items, int) else items
    for low in range(0, items, tile) if isinstance(items, int) else (0,):
        keys = _keys(x, low, tile)
        # A column more takes what is left out of other tiles.
        whole = _without(torch.cat([best, keys, torch.full_like(best[:, :1], NO_ITEM)], 1), x, low, k)
        if is_wide:
            whole, place = (of[:, :k] for of in whole.sort(dim=1, descending=True, stable=True))
            best, ids = whole, torch.where(place < k, ids.gather(1, place.clamp(max=k - 1)), place + (low - k))
        else:
            best = whole.topk(k, dim=1).values
    is_none = best == NO_ITEM
    if not is_wide:
        ids = ID_MASK - (best & ID_MASK)
    scores = restore(best if is_wide else (best >> 32).to(torch.int32))
    return Best(scores.masked_fill(is_none, -torch.inf), ids.masked_fill(is_none, -1))


def _keys(x: Inputs, low: int, tile: int) -> Tensor:
    """Return int64 of the order of a tile's scores, as `reorder_` has it: NaN last, and one zero."""
    is_wide, here = x.hidden.dtype == torch.float64, slice(low, low + tile)
    dtype, kind = (torch.float64, torch.int64) if is_wide else (torch.float32, torch.int32)
    scores = x.hidden.to(dtype) @ x.weight[here].to(dtype).t()
    if x.bias is not None:
        scores = scores + x.bias[here].to(dtype)
    info = torch.iinfo(kind)
    bits = torch.where(scores == 0, 0.0, scores).view(kind)
    order = torch.where(scores.isnan(), info.min + 1, bits ^ ((bits >> (info.bits - 1)) & info.max)).to(torch.int64)
    columns = torch.arange(low, low + order.shape[1], device=order.device)
    return order if is_wide else (order << 32) | (ID_MASK - columns)


def _without(whole: Tensor, x: Inputs, low: int, k: int) -> Tensor:
    """Return k keys and those of the items from `low` on, without those of items that rows must not get."""
    if x.exclude_ids is None or x.exclude_offsets is None:
        return whole
    place, last = x.exclude_ids.to(torch.int64) - low, whole.shape[1] - 1
    column = torch.where((place >= 0) & (place < last - k), place + k, last)
    row = sample_of_row(x.exclude_offsets, x.exclude_ids.shape[0])
    return whole.index_put((row, column), whole.new_full((), NO_ITEM))
