"""Score a whole catalogue for many users in bounded memory, and rank it by one rule on every device.

A score and its item make one int64 key: the score's bits, reordered so that integers compare as the floats do, above the item
id counted down. Keys are unique, so "higher score first, smaller item id first among equal scores" is plain integer order: ranks
and best items come out the same on a CPU and a GPU, and however users and items are cut into tiles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

DEFAULT_MAX_BYTES = 256 * 2**20

# fp32 score, int64 key, one temporary of up to four bytes, and what top-k works in on a GPU.
_BYTES_PER_SCORE = 18
# Fewer users than this share each pass over the item table only where memory forces it.
_MIN_USERS = 16
# On a CPU the scores should stay in the cache between the passes over them.
_CPU_TILE_BYTES = 4 * 2**20
_MIN_BYTES = 2**16

_EXCLUDED = torch.iinfo(torch.int64).min
_ID_MASK = 2**32 - 1


@dataclass(frozen=True)
class Ranked:
    """A catalogue ranked for B users.

    Attributes:
        items: `[B, k]` int64, the best items in order; -1 where fewer than k are left.
        scores: `[B, k]` fp32 their scores, descending; -inf where there is no item.
        ranks: `[B]` int64 0-based rank of each user's target, or None without targets.
    """

    items: Tensor
    scores: Tensor
    ranks: Tensor | None

    @property
    def strange(self) -> Tensor:
        """How many items have a score that is NaN or infinite: a scalar int64 tensor, 0 for a sound model."""
        return ((self.items >= 0) & ~torch.isfinite(self.scores)).sum()


@torch.no_grad()
def rank_catalogue(
    hidden: Tensor,
    item_weight: Tensor,
    k: int,
    *,
    targets: Tensor | None = None,
    viewed: tuple[Tensor, Tensor] | None = None,
    filter_viewed: Sequence[bool] = (False,),
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> list[Ranked]:
    """Rank all items for each user by the inner product of hidden state and item weight.

    The rank of a target is the number of items with a strictly higher score plus the number of items with an equal score and a
    smaller id. Scores are fp32 whatever the dtype of the inputs and whatever autocast or TF32 setting is active.

    Args:
        hidden: `[B, D]` users' hidden states.
        item_weight: `[V, D]` item table.
        k: how many best items to return.
        targets: `[B]` int64 item ids whose ranks are wanted. A negative one is no item of the catalogue: rank `MISS`.
        viewed: values `[S]` int64 and offsets `[B + 1]` of items to take out, per user; negative values are passed over. A
            user's own target is never taken out.
        filter_viewed: the protocols wanted: False leaves viewed items in, True takes them out. Scores are computed once.
        max_bytes: bound on everything that grows with users times items.

    Returns:
        One `Ranked` for each entry of `filter_viewed`. Nothing here waits for a GPU.

    Raises:
        ValueError: shapes that do not fit, `filter_viewed` without `viewed`, or `max_bytes` below 64 KiB.
    """
    _check(hidden, item_weight, targets, viewed, filter_viewed, max_bytes)
    num_users, (num_items, dim) = len(hidden), item_weight.shape
    device = hidden.device
    width = min(k, num_items)
    protocols = sorted(set(filter_viewed))
    best = {out: hidden.new_full((num_users, k), _EXCLUDED, dtype=torch.int64) for out in protocols}
    ranks = {out: torch.zeros(num_users, dtype=torch.int64, device=device) for out in protocols}
    # A table in another dtype is converted tile by tile.
    item_bytes = 16 + (0 if item_weight.dtype == torch.float32 else 4 * dim)
    step, tile = _plan(num_users, num_items, max_bytes, item_bytes, device)
    cells = torch.empty(step * tile + 1, dtype=torch.int64, device=device)
    viewed_rows = None
    if viewed is not None and True in protocols:
        values, offsets = viewed
        viewed_rows = torch.repeat_interleave(torch.arange(num_users, device=device), offsets.diff(), output_size=values.numel())
    with torch.autocast(device.type, enabled=False), _ieee_matmul():
        for first in range(0, num_users, step):
            rows = slice(first, min(first + step, num_users))
            queries = hidden[rows].float()
            wanted = None if targets is None else targets[rows]
            tiles = [(low, min(low + tile, num_items)) for low in range(0, num_items, tile)]
            target_keys = torch.full((len(queries),), _EXCLUDED, dtype=torch.int64, device=device)
            if wanted is not None and len(tiles) > 1:
                for low, high in tiles:
                    target_keys = _pick(_keys(queries, item_weight, low, high, cells), wanted, low, target_keys)
            for low, high in tiles:
                keys = _keys(queries, item_weight, low, high, cells)
                if wanted is not None and len(tiles) == 1:
                    target_keys = _pick(keys, wanted, low, target_keys)
                for out in protocols:
                    if out and viewed is not None and viewed_rows is not None:
                        _exclude(cells, keys, viewed[0], viewed_rows - first, wanted, low)
                    if wanted is not None:
                        ranks[out][rows] += (keys > target_keys[:, None]).sum(1)
                    top = torch.topk(keys, min(width, high - low), dim=1).values
                    if len(tiles) > 1:
                        top = torch.topk(torch.cat([best[out][rows], top], 1), k, dim=1).values
                    best[out][rows, : top.shape[1]] = top
    missing = None if targets is None else targets < 0
    result = []
    for out in filter_viewed:
        items, scores = _decode(best[out])
        rank = None if missing is None else ranks[out].masked_fill(missing, torch.iinfo(torch.int64).max)
        result.append(Ranked(items, scores, rank))
    return result


def _keys(queries: Tensor, item_weight: Tensor, low: int, high: int, cells: Tensor) -> Tensor:
    """Keys of items `low` to `high`, `[u, high - low]`, in the memory of `cells`, whose last element stays free."""
    scores = queries @ item_weight[low:high].float().T
    # -0.0 and 0.0 are equal scores and must have equal bits.
    bits = scores.add_(0.0).view(torch.int32)
    flip = bits >> 31
    bits.bitwise_xor_(flip.bitwise_and_(0x7FFFFFFF))
    del flip
    keys = cells[: scores.numel()].view(scores.shape)
    keys.copy_(bits).bitwise_left_shift_(32)
    return keys.add_(torch.arange(_ID_MASK - low, _ID_MASK - high, -1, device=keys.device))


def _decode(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Items and scores of keys; an excluded one is item -1 with score -inf."""
    excluded = keys == _EXCLUDED
    bits = (keys >> 32).to(torch.int32)
    scores = bits.bitwise_xor_((bits >> 31).bitwise_and_(0x7FFFFFFF)).view(torch.float32)
    return (_ID_MASK - (keys & _ID_MASK)).masked_fill(excluded, -1), scores.masked_fill(excluded, -torch.inf)


def _pick(keys: Tensor, targets: Tensor, low: int, found: Tensor) -> Tensor:
    """The targets' keys where they lie in this tile, `found` elsewhere."""
    column = targets - low
    inside = (column >= 0) & (column < keys.shape[1])
    here = keys.gather(1, column.clamp(0, keys.shape[1] - 1)[:, None]).squeeze(1)
    return torch.where(inside, here, found)


def _exclude(cells: Tensor, keys: Tensor, values: Tensor, rows: Tensor, targets: Tensor | None, low: int) -> None:
    """Overwrite the keys of viewed items that lie in this tile; all others are written to the spare cell behind the keys."""
    users, width = keys.shape
    column = values - low
    inside = (rows >= 0) & (rows < users) & (column >= 0) & (column < width)
    if targets is not None:
        inside &= values != targets[rows.clamp(0, users - 1)]
    cells.index_fill_(0, torch.where(inside, rows * width + column, keys.numel()), _EXCLUDED)


def _plan(num_users: int, num_items: int, max_bytes: int, item_bytes: int, device: torch.device) -> tuple[int, int]:
    """Users and items of a tile: whole catalogues as long as `_MIN_USERS` users of them fit, and tiles of items beyond."""
    row = num_items * _BYTES_PER_SCORE
    budget = max_bytes - num_items * item_bytes
    users = budget // max(row, 1)
    if users >= min(num_users, _MIN_USERS):
        if device.type == "cpu":
            users = min(users, max(_CPU_TILE_BYTES // max(row, 1), _MIN_USERS))
        return max(min(users, num_users), 1), max(num_items, 1)
    users = max(min(num_users, _MIN_USERS), 1)
    return users, max(max_bytes // (users * _BYTES_PER_SCORE + item_bytes), 1)


@contextmanager
def _ieee_matmul() -> Iterator[None]:
    """Multiply fp32 matrices in fp32: TF32 or bf16 passes, where the caller allowed them, would reorder close scores."""
    backends: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


def _check(
    hidden: Tensor,
    item_weight: Tensor,
    targets: Tensor | None,
    viewed: tuple[Tensor, Tensor] | None,
    filter_viewed: Sequence[bool],
    max_bytes: int,
) -> None:
    if hidden.dim() != 2 or item_weight.dim() != 2 or hidden.shape[1] != item_weight.shape[1]:
        raise ValueError(
            f"hidden, item_weight: got shapes {tuple(hidden.shape)} and {tuple(item_weight.shape)}, expected [B, D] and [V, D]"
        )
    if targets is not None and targets.shape != hidden.shape[:1]:
        raise ValueError(f"targets: got shape {tuple(targets.shape)}, expected ({len(hidden)},), one item for each user")
    if True in filter_viewed and viewed is None:
        raise ValueError("filter_viewed: taking viewed items out needs them; make the loader with with_viewed=True")
    if viewed is not None and viewed[1].shape != (len(hidden) + 1,):
        raise ValueError(f"viewed: got offsets of shape {tuple(viewed[1].shape)}, expected ({len(hidden) + 1},)")
    if max_bytes < _MIN_BYTES:
        raise ValueError(f"max_bytes: got {max_bytes}, expected at least {_MIN_BYTES} (64 KiB)")
