"""The best items of a catalogue in plain PyTorch: tiles of scores in one bounded buffer, products and top-k by PyTorch.

`torch.topk` leaves open which of several equal scores it takes, and takes NaN first. On a CPU it is asked for one score more
than is wanted: where the last one wanted is above that one and the first is a number, its choice is the only one there is. Rows
without that certainty, and all rows elsewhere, go through integers of the scores' order (`_best`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from jagged.ops._shared.offsets import sample_of_row
from jagged.ops.catalogue_topk.keys import reorder_, restore
from jagged.ops.catalogue_topk.spec import Best, Inputs, Options

# Bytes that `_best` takes by score, beside an integer of the score's own width and another one on the way to it.
_EXACT_BYTES = 12
# Rows and items of a tile from which on the BLAS gains little; rows that share a pass over the item table wherever it is cut.
_ENOUGH_ROWS, _ENOUGH_ITEMS, _FEWEST_ROWS = 256, 4096, 16


@torch.no_grad()
def catalogue_topk(x: Inputs, o: Options) -> Best:
    """Tile by tile, for as many rows at a time as the bound on memory has room for."""
    hidden, weight, bias, exclude_ids, exclude_offsets = x
    k, max_bytes = o
    num_rows, num_items = hidden.shape[0], weight.shape[0]
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    scores = hidden.new_full((num_rows, k), -torch.inf, dtype=dtype)
    ids = hidden.new_full((num_rows, k), -1, dtype=torch.int64)
    if num_rows * num_items == 0:
        return Best(scores, ids)
    # Ids of the items of a tile, and a table in another dtype is converted tile by tile.
    item_bytes = 8 + (0 if weight.dtype == dtype else dtype.itemsize * weight.shape[1])
    step, tile, exact_rows = _plan(num_rows, num_items, max_bytes, item_bytes, dtype.itemsize)
    excluded = None
    if exclude_ids is not None and exclude_offsets is not None and exclude_ids.numel():
        excluded = exclude_ids.to(torch.int64), sample_of_row(exclude_offsets, exclude_ids.shape[0])
    # One cell more than a tile has, for what is written nowhere.
    cells = torch.empty(step * tile + 1, dtype=dtype, device=hidden.device)
    for first in range(0, num_rows, step):
        queries = hidden[first : first + step].to(dtype)
        of_rows = None if excluded is None else _rows_of(excluded, first, queries.shape[0])
        best = None
        for low in range(0, num_items, tile):
            part = weight[low : low + tile].to(dtype).t()
            shape = queries.shape[0], part.shape[1]
            logits = torch.mm(queries, part, out=cells[: shape[0] * shape[1]].view(shape))
            if bias is not None:
                logits.add_(bias[low : low + tile].to(dtype))
            of_tile = None if of_rows is None else (of_rows[0] - low, of_rows[1])
            top, item = _best_of_tile(cells, shape, of_tile, min(k, shape[1]), exact_rows)
            item += low
            if best is not None:
                # Among equal scores the earlier tiles' ids are smaller, and each tile's own are in order.
                top, item = torch.cat([best[0], top], 1), torch.cat([best[1], item], 1)
                top, place = _best(top, min(k, top.shape[1]))
                item = item.gather(1, place)
            best = top, item
        assert best is not None
        none = best[0] == torch.iinfo(best[0].dtype).min
        width = none.shape[1]
        scores[first : first + step, :width] = restore(best[0]).masked_fill_(none, -torch.inf)
        ids[first : first + step, :width] = best[1].masked_fill_(none, -1)
    return Best(scores, ids)


def _best_of_tile(
    cells: Tensor, shape: tuple[int, int], excluded: tuple[Tensor, Tensor] | None, k: int, exact_rows: int
) -> tuple[Tensor, Tensor]:
    """Return the k best scores `[rows, k]` of a tile, reordered, and their columns; the least integer for no item.

    `excluded` are columns and rows of what is no item of a row; `exact_rows` is how many rows `_best` may take at once.
    """
    num_rows, width = shape
    scores = cells[: num_rows * width].view(shape)
    if cells.is_cpu and k < width:
        _fill(cells, shape, excluded, -torch.inf)
        top, column = scores.topk(k + 1, dim=1)
        is_sure = ~top[:, 0].isnan() & (top[:, k - 1] > top[:, k])
        column, place = column[:, :k].sort(dim=1)
        top, place = reorder_(top.gather(1, place)).sort(dim=1, descending=True, stable=True)
        column = column.gather(1, place)
        unsure = is_sure.logical_not_().nonzero().flatten()
    else:
        top = reorder_(scores.new_empty(num_rows, k))
        column = torch.empty_like(top, dtype=torch.int64)
        unsure = torch.arange(num_rows, device=cells.device)
    for rows in unsure.split(exact_rows) if unsure.numel() else ():
        some = torch.empty(len(rows) * width + 1, dtype=cells.dtype, device=cells.device)
        torch.index_select(scores, 0, rows, out=some[:-1].view(-1, width))
        order = reorder_(some)
        if excluded is not None:
            # Rows that are not among these are none.
            place_of_row = rows.new_full((num_rows + 1,), -1).index_copy_(0, rows, torch.arange(len(rows), device=rows.device))
            place = place_of_row[torch.where((excluded[1] >= 0) & (excluded[1] < num_rows), excluded[1], num_rows)]
            _fill(order, (len(rows), width), (excluded[0], place), torch.iinfo(order.dtype).min)
        top[rows], column[rows] = _best(order[:-1].view(-1, width), k)
    return top, column


def _best(order: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest integers of each row and their columns; of equal ones those of the smallest columns, these first."""
    border = order.topk(k, dim=1).values[:, -1:]
    chosen, is_border = order > border, order == border
    missing = k - chosen.sum(1, keepdim=True)
    chosen |= is_border & (is_border.cumsum(1, dtype=torch.int32) <= missing)
    width = order.shape[1]
    left = torch.arange(width, 0, -1, dtype=torch.int32, device=order.device)
    column = width - torch.where(chosen, left, 0).topk(k, dim=1).values.to(torch.int64)
    top, place = order.gather(1, column).sort(dim=1, descending=True, stable=True)
    return top, column.gather(1, place)


def _fill(cells: Tensor, shape: tuple[int, int], excluded: tuple[Tensor, Tensor] | None, value: float) -> None:
    """Set the cells of some columns and rows of a tile; those outside it fall into the cell after it."""
    if excluded is not None:
        (column, row), (num_rows, width) = excluded, shape
        inside = (column >= 0) & (column < width) & (row >= 0) & (row < num_rows)
        cells.index_fill_(0, torch.where(inside, row * width + column, num_rows * width), value)


def _rows_of(excluded: tuple[Tensor, Tensor], first: int, count: int) -> tuple[Tensor, Tensor]:
    """Return the excluded ids and their rows counted from `first`; on a CPU only those of `count` rows."""
    ids, rows = excluded
    if rows.is_cpu:
        low, high = torch.searchsorted(rows, torch.tensor([first, first + count])).tolist()
        ids, rows = ids[low:high], rows[low:high]
    return ids, rows - first


def _plan(num_rows: int, num_items: int, max_bytes: int, item_bytes: int, score_bytes: int) -> tuple[int, int, int]:
    """Return rows and items of a tile, and rows that `_best` takes at once.

    A tile is the whole catalogue where enough rows of it fit into one half of the memory; the other half is for `_best`.
    """
    exact_bytes = 2 * score_bytes + _EXACT_BYTES
    by_score = score_bytes + exact_bytes
    enough = min(num_rows, max(_FEWEST_ROWS, min(_ENOUGH_ROWS, max_bytes // (by_score * _ENOUGH_ITEMS))))
    rows = max_bytes // 2 // (num_items * score_bytes)
    exact_rows = (max_bytes // 2 - num_items * item_bytes) // (num_items * exact_bytes)
    if rows >= enough and exact_rows >= 1:
        return min(rows, num_rows), num_items, exact_rows
    return enough, max(max_bytes // (enough * by_score + item_bytes), 1), enough
