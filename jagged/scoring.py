"""Rank a whole catalogue for many users in bounded memory, by one rule on every device: `jagged.ops.catalogue_topk`'s.

Higher scores come first, smaller item ids first among equal scores. The best items come from that operator; the ranks of targets
are counted here, from scores in tiles of users and items, for all protocols at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jagged.metrics import MISS
from jagged.ops import catalogue_topk

DEFAULT_MAX_BYTES = 256 * 2**20

# A score and three comparisons.
_BYTES_PER_SCORE = 8
# Fewer users than this share each pass over the item table only where memory forces it.
_MIN_USERS = 16
# On a CPU the scores should stay in the cache between the passes over them.
_CPU_TILE_BYTES = 2 * 2**20
_MIN_BYTES = 2**16


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
        """How many of the best items have a score that is NaN or infinite: a scalar int64 tensor, 0 for sound hidden states.

        Items of NaN come last, so those of a table that has some need not be among the best.
        """
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
    smaller id. Scores are fp32 whatever the dtype of the inputs and whatever autocast or TF32 setting is active. Best items and
    ranks come from two computations of the scores, which may differ in the last bits.

    Args:
        hidden: `[B, D]` users' hidden states.
        item_weight: `[V, D]` item table.
        k: how many best items to return.
        targets: `[B]` int64 item ids whose ranks are wanted. A negative one is no item of the catalogue: rank `MISS`.
        viewed: values `[S]` int64 and offsets `[B + 1]` of items to take out, per user; negative values are passed over. A
            user's own target is never taken out.
        filter_viewed: the protocols wanted: False leaves viewed items in, True takes them out.
        max_bytes: bound on everything that grows with users times items.

    Returns:
        One `Ranked` for each entry of `filter_viewed`. Nothing here waits for a GPU.

    Raises:
        ValueError: shapes that do not fit, `filter_viewed` without `viewed`, or `max_bytes` below 64 KiB.
    """
    _check(hidden, item_weight, targets, viewed, filter_viewed, max_bytes)
    queries = hidden.float()
    # Halves are converted tile by tile.
    table = item_weight if item_weight.dtype in (torch.float32, torch.bfloat16, torch.float16) else item_weight.float()
    excluded = None if viewed is None else _without_targets(viewed, targets)
    with torch.autocast(hidden.device.type, enabled=False), _ieee_matmul():
        best = {
            out: catalogue_topk(queries, table, k, exclude=excluded if out else None, max_bytes=max_bytes)
            for out in set(filter_viewed)
        }
        ranks = None if targets is None else _ranks(queries, table, targets, excluded, set(filter_viewed), max_bytes)
    return [Ranked(best[out][1], best[out][0], None if ranks is None else ranks[out]) for out in filter_viewed]


def _without_targets(viewed: tuple[Tensor, Tensor], targets: Tensor | None) -> tuple[Tensor, Tensor]:
    """Viewed items with -1, which is no item, in the place of users' own targets."""
    values, offsets = viewed
    return (values if targets is None else values.masked_fill(values == targets[_users_of(viewed)], -1)), offsets


def _users_of(viewed: tuple[Tensor, Tensor]) -> Tensor:
    values, offsets = viewed
    return torch.repeat_interleave(torch.arange(len(offsets) - 1, device=values.device), offsets.diff(), output_size=len(values))


def _ranks(
    queries: Tensor,
    item_weight: Tensor,
    targets: Tensor,
    excluded: tuple[Tensor, Tensor] | None,
    protocols: set[bool],
    max_bytes: int,
) -> dict[bool, Tensor]:
    """`[B]` ranks of the targets for each protocol; `MISS` where a target is no item or its score is NaN."""
    num_users, (num_items, dim) = len(queries), item_weight.shape
    ranks = {out: torch.zeros(num_users, dtype=torch.int64, device=queries.device) for out in protocols}
    item_bytes = 4 * dim if item_weight.dtype != torch.float32 else 0
    step, tile = _plan(num_users, num_items, max_bytes, item_bytes, queries.device)
    # The last cell takes what is written nowhere.
    cells = torch.empty(step * tile + 1, device=queries.device)
    users = None if excluded is None or True not in protocols else _users_of(excluded)
    tiles = [(low, min(low + tile, num_items)) for low in range(0, num_items, tile)]
    for first in range(0, num_users, step):
        rows = slice(first, min(first + step, num_users))
        target = targets[rows]
        of_target = torch.full(target.shape, torch.nan, device=queries.device)
        if len(tiles) > 1:
            for low, high in tiles:
                of_target = _pick(_scores(queries[rows], item_weight, low, high, cells), target, low, of_target)
        for low, high in tiles:
            scores = _scores(queries[rows], item_weight, low, high, cells)
            if len(tiles) == 1:
                of_target = _pick(scores, target, low, of_target)
            for out in sorted(protocols):
                if out and excluded is not None and users is not None:
                    _exclude(cells, scores, excluded[0], users - first, low)
                ranks[out][rows] += _before(scores, of_target, target, low)
        for rank in ranks.values():
            rank[rows] = rank[rows].masked_fill(of_target.isnan(), MISS)
    return ranks


def _scores(queries: Tensor, item_weight: Tensor, low: int, high: int, cells: Tensor) -> Tensor:
    """Scores of items `low` to `high`, `[u, high - low]`, in the memory of `cells`."""
    scores = cells[: len(queries) * (high - low)].view(len(queries), high - low)
    return torch.mm(queries, item_weight[low:high].float().T, out=scores)


def _pick(scores: Tensor, targets: Tensor, low: int, found: Tensor) -> Tensor:
    """The targets' scores where they lie in this tile, `found` elsewhere."""
    column = targets - low
    inside = (column >= 0) & (column < scores.shape[1])
    here = scores.gather(1, column.clamp(0, scores.shape[1] - 1)[:, None]).squeeze(1)
    return torch.where(inside, here, found)


def _exclude(cells: Tensor, scores: Tensor, values: Tensor, rows: Tensor, low: int) -> None:
    """Overwrite the scores of viewed items that lie in this tile with NaN, which is before nothing."""
    users, width = scores.shape
    column = values - low
    inside = (rows >= 0) & (rows < users) & (column >= 0) & (column < width)
    cells.index_fill_(0, torch.where(inside, rows * width + column, scores.numel()), torch.nan)


def _before(scores: Tensor, of_target: Tensor, targets: Tensor, low: int) -> Tensor:
    """How many items of a tile come before each user's target."""
    smaller = torch.arange(low, low + scores.shape[1], device=scores.device) < targets[:, None]
    tied = (scores == of_target[:, None]).logical_and_(smaller)
    del smaller
    return tied.logical_or_(scores > of_target[:, None]).sum(1)


def _plan(num_users: int, num_items: int, max_bytes: int, item_bytes: int, device: torch.device) -> tuple[int, int]:
    """Users and items of a tile: whole catalogues as long as `_MIN_USERS` users of them fit, and tiles of items beyond."""
    row = num_items * _BYTES_PER_SCORE
    # A result of comparisons and the ids they compare with.
    item_bytes += 8
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
