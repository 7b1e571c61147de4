"""Attention in plain PyTorch: samples of like lengths side by side, in pieces of bounded memory.

Samples are sorted by the powers of two above their two lengths and cut into chunks of one such class; a chunk is padded to its
own longest sample, and its queries are taken block by block, with the keys that any of them sees. So the count of PyTorch calls
follows the work, not the number of samples, and no more than `_CHUNK_SCORES` scores exist at a time (or one query row of each
head, if that is more).

The query heads that share a key head lie side by side: queries are `[Sq * Hkv, G * D]`, with `G = H / Hkv`, and pad as keys do.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# 1 MiB in float32: the scores of a chunk stay in the L2 cache between the passes over them.
_CHUNK_SCORES = 2**18
# Below this length padding costs less than the PyTorch calls of another chunk.
_SHORTEST_CLASS = 8


@dataclass
class _Mask:
    """Which keys a query sees, as `jagged_attention` says it; a window of 0 is none."""

    num_targets: Tensor | None  # [B]
    causal: bool
    window: int
    num_contextual: int


@dataclass
class _Side:
    """The queries or the keys of a chunk, padded side by side."""

    rows: Tensor  # [n * Hkv * longest] index of (row, key head) in the flattened [S * Hkv]; past a sample's end its last row
    valid: Tensor  # [rows of the chunk * Hkv] the places of `rows` that hold a row
    longest: int

    def pad(self, x: Tensor, width: int) -> Tensor:
        """`[S * Hkv, G * width] -> [n * Hkv, longest * G, width]`."""
        return x.index_select(0, self.rows).view(-1, self.longest * x.shape[1] // width, width)

    def unpad_into(self, target: Tensor, x: Tensor) -> None:
        """`[n * Hkv, longest * G, width]` into its rows of `[S * Hkv, G * width]`."""
        rows = x.view(-1, target.shape[1])
        target.index_copy_(0, self.rows.index_select(0, self.valid), rows.index_select(0, self.valid))


@dataclass
class _Chunk:
    """`n` samples of `Hkv` key heads, each with `group` query heads."""

    queries: _Side
    keys: _Side
    shift: Tensor  # [n, 1, 1, 1, 1] position of the first query
    history: Tensor  # [n, 1, 1, 1, 1] number of keys that are no targets
    group: int
    query_block: int

    @property
    def sides(self) -> tuple[_Side, _Side, _Side]:
        """Those of q, k and v."""
        return self.queries, self.keys, self.keys

    def blocks(self, mask: _Mask) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yield blocks of padded query rows, the keys that any of them sees, and which of those are hidden from which row.

        The last is `[n, 1, queries, 1, keys]`, or 1 for `queries` where all are alike.
        """
        for first in range(0, self.queries.longest, self.query_block):
            last = min(first + self.query_block, self.queries.longest)
            position = self.shift + torch.arange(first, last, device=self.shift.device)[:, None, None]
            # Targets look back from the end of the history.
            place = position if mask.num_targets is None else torch.minimum(position, self.history)
            end = torch.minimum(place + 1, self.history) if mask.causal else self.history
            if mask.window:
                begin, context_end = place - (mask.window - 1), end.clamp(max=mask.num_contextual)
                end = torch.minimum(end, place + mask.window)
            if mask.num_contextual:
                sees_all = position < mask.num_contextual
                end = torch.where(sees_all, self.history, end)
                if mask.window:
                    begin = begin.masked_fill_(sees_all, 0)
            # The keys that any row sees, and one at least, though it be hidden from all.
            low, high = 0, self.keys.longest
            if mask.causal or mask.window:
                stop = end if mask.num_targets is None else torch.maximum(end, position + 1)
                high = min(max(int(stop.max()), mask.num_contextual, 1), high)
            if mask.window and not mask.num_contextual:
                low = min(max(int(begin.min()), 0), high - 1)
            key = torch.arange(low, high, device=self.shift.device)
            hidden = key >= end
            if mask.window:
                hidden = hidden | (key < begin)
                if mask.num_contextual:
                    hidden &= key >= context_end
            if mask.num_targets is not None:
                hidden = hidden & (key != position)
            yield slice(first * self.group, last * self.group), slice(low, high), hidden

    def scores(self, query: Tensor, key: Tensor, hidden: Tensor) -> Tensor:
        """Scores of a block of scaled queries, minus infinity where a key is hidden: `[n * Hkv, queries * group, keys]`."""
        scores = torch.bmm(query, key.transpose(1, 2))
        by_head = scores.view(self.shift.shape[0], -1, query.shape[1] // self.group, self.group, key.shape[1])
        # Eight times as fast as to fill the scores themselves.
        limit = scores.new_full(hidden.shape, torch.inf).masked_fill_(hidden, -torch.inf)
        torch.minimum(by_head, limit, out=by_head)
        return scores


def _chunks(q: Tensor, k: Tensor, q_offsets: Tensor, k_offsets: Tensor | None, mask: _Mask) -> Iterator[_Chunk]:
    """Yield chunks that hold every sample with queries and keys."""
    heads, group = k.shape[1], q.shape[1] // k.shape[1]
    sides = [q_offsets.to(torch.int64).clamp(0, q.shape[0])]
    if k_offsets is not None:
        sides.append(k_offsets.to(torch.int64).clamp(0, k.shape[0]))
    limits = torch.stack(sides)
    lengths, starts = limits.diff(), limits[:, :-1]
    targets = lengths.new_zeros(lengths.shape[1]) if mask.num_targets is None else mask.num_targets.to(torch.int64)
    history = lengths[-1] - torch.minimum(targets.clamp(min=0), lengths[-1])

    kept = (lengths > 0).all(0).nonzero().flatten()
    order = kept[lengths[-1, kept].argsort(stable=True)]
    powers = _SHORTEST_CLASS << torch.arange(64 - _SHORTEST_CLASS.bit_length(), device=lengths.device)
    classes = torch.searchsorted(powers, lengths[:, order])
    classes, by_class = (classes[0] * 64 + classes[-1]).sort(stable=True)
    order = order[by_class]
    lengths, starts, history = lengths[:, order], starts[:, order], history[order]
    sizes = classes.unique_consecutive(return_counts=True)[1].tolist()
    for low, high in itertools.pairwise([0, *itertools.accumulate(sizes)]):
        bounds = lengths[:, low:high].amax(1).tolist()
        step = max(1, _CHUNK_SCORES // (heads * group * bounds[0] * bounds[-1]))
        for first in range(low, high, step):
            part = slice(first, min(first + step, high))
            padded = [_side(start, length, heads) for start, length in zip(starts[:, part], lengths[:, part], strict=True)]
            row_of_scores = (part.stop - first) * heads * group * padded[-1].longest
            yield _Chunk(
                queries=padded[0],
                keys=padded[-1],
                shift=(lengths[-1, part] - lengths[0, part]).view(-1, 1, 1, 1, 1),
                history=history[part].view(-1, 1, 1, 1, 1),
                group=group,
                query_block=min(padded[0].longest, max(1, _CHUNK_SCORES // row_of_scores)),
            )


def _side(start: Tensor, length: Tensor, heads: int) -> _Side:
    longest = int(length.max())
    position = torch.arange(longest, device=start.device)
    rows = start[:, None] + torch.minimum(position, length[:, None] - 1)
    exists = (position < length[:, None])[:, None].expand(-1, heads, -1)
    return _Side(
        rows=(rows[:, None] * heads + torch.arange(heads, device=start.device)[:, None]).flatten(),
        valid=exists.flatten().nonzero().flatten(),
        longest=longest,
    )


def _flat(x: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """`[S, G * Hkv, D] -> [S * Hkv, G * D]`."""
    return x.reshape(x.shape[0] * heads, x.shape[1] // heads * x.shape[2]).to(dtype)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor | None,
    num_targets: Tensor | None,
    causal: bool,
    window: int,
    num_contextual: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return output `[Sq, H, D]` and log-sum-exp `[H, Sq]` (natural logarithm, float32 or float64)."""
    dtype, (heads, width) = torch.promote_types(q.dtype, torch.float32), k.shape[1:]
    mask = _Mask(num_targets, causal, window, num_contextual)
    # What sees no key stays as it is here, and so do rows that no sample covers, which only wrong offsets have.
    output = torch.zeros_like(_flat(q, heads, dtype))
    lse = output.new_full((output.shape[0], output.shape[1] // width), -torch.inf)
    with torch.autocast(q.device.type, enabled=False):
        flat = [_flat(x, heads, dtype) for x in (q, k, v)]
        for chunk in _chunks(q, k, q_offsets, k_offsets, mask):
            query, key, value = (side.pad(x, width) for side, x in zip(chunk.sides, flat, strict=True))
            query *= scale
            result, sums = torch.empty_like(query), query.new_empty(*query.shape[:2], 1)
            for rows, keys, hidden in chunk.blocks(mask):
                scores = chunk.scores(query[:, rows], key[:, keys], hidden)
                # Where no key is seen the largest score is minus infinity, from which nothing can be subtracted.
                largest = scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(dtype).min)
                weights = scores.sub_(largest).exp_()
                total = weights.sum(-1, keepdim=True)
                torch.bmm(weights, value[:, keys], out=result[:, rows])
                # A sum has the 1 of its largest score in it, or nothing.
                result[:, rows] /= total.clamp(min=1)
                sums[:, rows] = total.log_().add_(largest)
            chunk.queries.unpad_into(output, result)
            chunk.queries.unpad_into(lse, sums)
    return output.view(q.shape).to(q.dtype), lse.view(q.shape[:2]).t().contiguous()


def backward(
    grad: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    lse: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor | None,
    num_targets: Tensor | None,
    causal: bool,
    window: int,
    num_contextual: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q `[Sq, H, D]`, k and v `[Sk, Hkv, D]`."""
    heads, width = k.shape[1:]
    mask = _Mask(num_targets, causal, window, num_contextual)
    with torch.autocast(q.device.type, enabled=False):
        flat = [_flat(x, heads, lse.dtype) for x in (q, grad, output, k, v)]
        # An infinite log-sum-exp gives no weight to any key: here to rows that see none, below to those past a sample's end.
        flat_lse = _flat(lse.t()[..., None], heads, lse.dtype)
        flat_lse = flat_lse.masked_fill(flat_lse == -torch.inf, torch.inf)
        flat_grad_lse = None if grad_lse is None else _flat(grad_lse.t()[..., None], heads, lse.dtype)
        grads = [torch.zeros_like(x) for x in (flat[0], *flat[3:])]
        for chunk in _chunks(q, k, q_offsets, k_offsets, mask):
            query, upstream, result = (chunk.queries.pad(x, width) for x in flat[:3])
            key, value = (chunk.keys.pad(x, width) for x in flat[3:])
            query *= scale
            sums = torch.full_like(query[..., :1], torch.inf)
            valid = chunk.queries.valid
            sums.view(-1, chunk.group)[valid] = flat_lse[chunk.queries.rows[valid]]
            delta = (upstream * result).sum(-1, keepdim=True)
            if flat_grad_lse is not None:
                delta -= chunk.queries.pad(flat_grad_lse, 1)
            grad_query, grad_key, grad_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
            for rows, keys, hidden in chunk.blocks(mask):
                weights = chunk.scores(query[:, rows], key[:, keys], hidden).sub_(sums[:, rows]).exp_()
                grad_value[:, keys].baddbmm_(weights.transpose(1, 2), upstream[:, rows])
                grad_scores = torch.bmm(upstream[:, rows], value[:, keys].transpose(1, 2))
                grad_scores.sub_(delta[:, rows]).mul_(weights)
                torch.bmm(grad_scores, key[:, keys], out=grad_query[:, rows])
                grad_key[:, keys].baddbmm_(grad_scores.transpose(1, 2), query[:, rows])
            grad_query *= scale
            for side, target, part in zip(chunk.sides, grads, (grad_query, grad_key, grad_value), strict=True):
                side.unpad_into(target, part)
    return tuple(x.view(like.shape).to(like.dtype) for x, like in zip(grads, (q, k, v), strict=True))  # type: ignore[return-value]
