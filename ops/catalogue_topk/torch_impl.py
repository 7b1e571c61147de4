"""The best items of a catalogue in plain PyTorch: tiles of keys in one bounded buffer, matrix products by the BLAS."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from jagged.ops._shared.offsets import sample_of_row
from jagged.ops.catalogue_topk.keys import ID_MASK, NO_ITEM, decode, reorder_, restore

# Score, int64 key, a temporary and what top-k or the sort works in, by bytes of a score.
_BYTES_PER_SCORE = {4: 18, 8: 48}
# Fewer rows than this share each pass over the item table only where memory forces it.
_MIN_ROWS = 16
# On a CPU the keys should stay in the cache between the passes over them.
_CPU_TILE_BYTES = 4 * 2**20


@torch.no_grad()
def catalogue_topk(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    exclude_ids: Tensor | None,
    exclude_offsets: Tensor | None,
    k: int,
    max_bytes: int,
) -> tuple[Tensor, Tensor]:
    """Return scores and ids `[N, k]` of the best items; -inf and -1 where fewer are left."""
    num_rows, num_items = hidden.shape[0], weight.shape[0]
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    scores = hidden.new_full((num_rows, k), -torch.inf, dtype=dtype)
    ids = hidden.new_full((num_rows, k), -1, dtype=torch.int64)
    if num_rows * num_items == 0:
        return scores, ids
    best_of_rows = _best_keys if dtype == torch.float32 else _best_by_sorting
    # A table in another dtype is converted tile by tile.
    item_bytes = 16 + (0 if weight.dtype == dtype else dtype.itemsize * weight.shape[1])
    step, tile = _plan(num_rows, num_items, max_bytes, item_bytes, dtype.itemsize, hidden.device)
    excluded = None
    if exclude_ids is not None and exclude_offsets is not None and exclude_ids.numel():
        excluded = exclude_ids.to(torch.int64), sample_of_row(exclude_offsets, exclude_ids.shape[0])
    with torch.autocast(hidden.device.type, enabled=False):
        # One cell more than a tile has, for what is written nowhere.
        cells = torch.empty(step * tile + 1, dtype=torch.int64, device=hidden.device)
        for first in range(0, num_rows, step):
            queries = hidden[first : first + step].to(dtype)
            of_rows = None if excluded is None else _rows_of(excluded, first, queries.shape[0])
            best = best_of_rows(_tiles(queries, weight, bias, of_rows, tile, cells), k)
            width = best[0].shape[1]
            scores[first : first + step, :width], ids[first : first + step, :width] = best
    return scores, ids


def _best_keys(tiles: Iterator[tuple[int, Tensor]], k: int) -> tuple[Tensor, Tensor]:
    best = None
    for _, keys in tiles:
        top = torch.topk(keys, min(k, keys.shape[1]), dim=1).values
        if best is not None:
            top = torch.cat([best, top], 1)
            top = torch.topk(top, min(k, top.shape[1]), dim=1).values
        best = top
    assert best is not None
    return decode(best)


def _best_by_sorting(tiles: Iterator[tuple[int, Tensor]], k: int) -> tuple[Tensor, Tensor]:
    """A float64 score and an id do not fit into one integer: a stable sort keeps smaller ids first."""
    best = None
    for low, order in tiles:
        top, ids = torch.sort(order, dim=1, stable=True, descending=True)
        top, ids = top[:, :k].contiguous(), ids[:, :k] + low
        if best is not None:
            top, ids = torch.cat([best[0], top], 1), torch.cat([best[1], ids], 1)
            top, place = torch.sort(top, dim=1, stable=True, descending=True)
            top, ids = top[:, :k].contiguous(), ids.gather(1, place[:, :k])
        best = top, ids
    assert best is not None
    none = best[0] == NO_ITEM
    return restore(best[0]).masked_fill_(none, -torch.inf), best[1].masked_fill(none, -1)


def _tiles(
    queries: Tensor, weight: Tensor, bias: Tensor | None, excluded: tuple[Tensor, Tensor] | None, tile: int, cells: Tensor
) -> Iterator[tuple[int, Tensor]]:
    """Yield the first item of each tile and its keys `[rows, items]`, of float64 reordered scores, in the memory of `cells`."""
    num_rows, num_items = queries.shape[0], weight.shape[0]
    for low in range(0, num_items, tile):
        high = min(low + tile, num_items)
        keys = cells[: num_rows * (high - low)].view(num_rows, high - low)
        part = weight[low:high].to(queries.dtype).t()
        if queries.dtype == torch.float64:
            order = reorder_(_logits(queries, part, bias, low, keys.view(torch.float64)))
            assert order.data_ptr() == keys.data_ptr()
        else:
            keys.copy_(reorder_(_logits(queries, part, bias, low, None))).bitwise_left_shift_(32)
            keys.add_(torch.arange(ID_MASK - low, ID_MASK - high, -1, device=keys.device))
        if excluded is not None:
            ids, rows = excluded
            column = ids - low
            inside = (column >= 0) & (column < high - low) & (rows >= 0) & (rows < num_rows)
            cells.index_fill_(0, torch.where(inside, rows * (high - low) + column, keys.numel()), NO_ITEM)
        yield low, keys


def _logits(queries: Tensor, part: Tensor, bias: Tensor | None, low: int, out: Tensor | None) -> Tensor:
    logits = torch.mm(queries, part, out=out)
    return logits if bias is None else logits.add_(bias[low : low + part.shape[1]].to(logits.dtype))


def _rows_of(excluded: tuple[Tensor, Tensor], first: int, count: int) -> tuple[Tensor, Tensor]:
    """Return the excluded ids and their rows counted from `first`; on a CPU only those of `count` rows."""
    ids, rows = excluded
    if rows.is_cpu:
        low, high = torch.searchsorted(rows, torch.tensor([first, first + count])).tolist()
        ids, rows = ids[low:high], rows[low:high]
    return ids, rows - first


def _plan(
    num_rows: int, num_items: int, max_bytes: int, item_bytes: int, score_bytes: int, device: torch.device
) -> tuple[int, int]:
    """Rows and items of a tile: whole catalogues as long as `_MIN_ROWS` rows of them fit, and tiles of items beyond."""
    per_score = _BYTES_PER_SCORE[score_bytes]
    of_row = num_items * per_score
    rows = (max_bytes - num_items * item_bytes) // of_row
    if rows >= min(num_rows, _MIN_ROWS):
        if device.type == "cpu":
            rows = min(rows, max(_CPU_TILE_BYTES // of_row, _MIN_ROWS))
        return min(rows, num_rows), num_items
    rows = min(num_rows, _MIN_ROWS)
    return rows, max(max_bytes // (rows * per_score + item_bytes), 1)
