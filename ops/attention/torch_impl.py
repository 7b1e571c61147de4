"""Attention in plain PyTorch: samples of like length side by side, in pieces of bounded memory.

Samples sorted by length are cut into chunks, never across a power of two; a chunk is padded to its own longest sample, and its
queries are taken block by block. So the count of PyTorch calls follows the work, not the number of samples, and no more than
`_CHUNK_SCORES` scores exist at a time (or one query row of each head, if that is more).
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
_SHORTEST_BUCKET = 8


@dataclass
class _Chunk:
    """Samples padded side by side: `n` samples of `H` heads and `longest` rows."""

    rows: Tensor  # [n * H, longest] index of (row, head) in the flattened [S * H]; past the end of a sample its last row
    lengths: Tensor  # [n * H, 1, 1]
    valid: Tensor  # [rows of the chunk * H] the places in the flattened [n * H * longest] that hold a row
    longest: int
    query_block: int

    def pad(self, x: Tensor) -> Tensor:
        """`[S * H, D] -> [n * H, longest, D]`."""
        return x.index_select(0, self.rows.flatten()).view(*self.rows.shape, x.shape[1])

    def unpad_into(self, target: Tensor, x: Tensor) -> None:
        """`[n * H, longest, D]` into its rows of `[S * H, D]`."""
        target.index_copy_(0, self.rows.flatten()[self.valid], x.flatten(0, 1).index_select(0, self.valid))

    def scores(self, q: Tensor, k: Tensor, first: int, causal: bool, scale: float) -> Tensor:
        """Scores of the query rows from `first` on, minus infinity where a key is out of reach: `[n * H, queries, keys]`."""
        last = min(first + self.query_block, self.longest)
        keys = last if causal else self.longest
        scores = torch.bmm(q[:, first:last], k[:, :keys].transpose(1, 2)).mul_(scale)
        positions = torch.arange(keys, device=q.device)
        # With causal, a key past the end of a sample is also past the diagonal of every row inside it.
        hidden = positions > torch.arange(first, last, device=q.device)[:, None] if causal else positions >= self.lengths
        return scores.masked_fill_(hidden, -torch.inf)


def _chunks(offsets: Tensor, total: int, heads: int) -> Iterator[_Chunk]:
    limits = offsets.to(torch.int64).clamp(0, total)
    lengths, order = limits.diff().sort()
    starts = limits[:-1][order]
    powers = (_SHORTEST_BUCKET << power for power in range(total.bit_length()))
    bounds = [0, *(bound for bound in powers if bound < total), total]
    edges = torch.searchsorted(lengths, torch.tensor(bounds, device=lengths.device), right=True).tolist()
    head = torch.arange(heads, device=offsets.device)[:, None]
    for low, high in itertools.pairwise(edges):
        while low < high:
            bound = int(lengths[high - 1])
            count = min(max(1, _CHUNK_SCORES // (heads * bound * bound)), high - low)
            start, length = starts[low : low + count], lengths[low : low + count]
            longest = int(length[-1])
            position = torch.arange(longest, device=offsets.device)
            rows = start[:, None] + torch.minimum(position, length[:, None] - 1)
            inside = (position < length[:, None])[:, None].expand(-1, heads, -1)
            yield _Chunk(
                rows=(rows[:, None] * heads + head).flatten(0, 1),
                lengths=length.repeat_interleave(heads)[:, None, None],
                valid=inside.flatten().nonzero().flatten(),
                longest=longest,
                query_block=min(longest, max(1, _CHUNK_SCORES // (count * heads * longest))),
            )
            low += count


def _flat(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.reshape(-1, x.shape[-1]).to(dtype)


def forward(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return output `[S, H, D]` and log-sum-exp `[H, S]` (natural logarithm, float32 or float64)."""
    total, heads, width = q.shape
    dtype = torch.promote_types(q.dtype, torch.float32)
    # Rows that no sample covers, which only wrong offsets have, are zeros.
    output = q.new_zeros(total * heads, width, dtype=dtype)
    lse = output.new_zeros(total * heads, 1)
    with torch.autocast(q.device.type, enabled=False):
        flat = [_flat(x, dtype) for x in (q, k, v)]
        for chunk in _chunks(offsets, total, heads):
            query, key, value = (chunk.pad(x) for x in flat)
            result, sums = torch.empty_like(query), query.new_empty(*query.shape[:2], 1)
            for first in range(0, chunk.longest, chunk.query_block):
                part = slice(first, first + chunk.query_block)
                scores = chunk.scores(query, key, first, causal, scale)
                largest = scores.amax(-1, keepdim=True)
                weights = scores.sub_(largest).exp_()
                sums[:, part] = weights.sum(-1, keepdim=True)
                torch.bmm(weights, value[:, : weights.shape[2]], out=result[:, part])
                result[:, part] /= sums[:, part]
                sums[:, part] = sums[:, part].log().add_(largest)
            chunk.unpad_into(output, result)
            chunk.unpad_into(lse, sums)
    return output.view(q.shape).to(q.dtype), lse.view(total, heads).t().contiguous()


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, lse: Tensor, offsets: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, each `[S, H, D]`."""
    total, heads, width = q.shape
    grads = [lse.new_zeros(total * heads, width) for _ in range(3)]
    with torch.autocast(q.device.type, enabled=False):
        flat = [_flat(x, lse.dtype) for x in (q, k, v, grad, output)]
        flat_lse = lse.t().reshape(-1, 1)
        for chunk in _chunks(offsets, total, heads):
            query, key, value, upstream, result = (chunk.pad(x) for x in flat)
            # Rows past the end of a sample repeat its last one; an infinite log-sum-exp gives them no weight.
            sums = torch.full_like(query[..., :1], torch.inf)
            sums.view(-1)[chunk.valid] = flat_lse.view(-1)[chunk.rows.flatten()[chunk.valid]]
            delta = (upstream * result).sum(-1, keepdim=True)
            grad_query, grad_key, grad_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
            for first in range(0, chunk.longest, chunk.query_block):
                part = slice(first, first + chunk.query_block)
                weights = chunk.scores(query, key, first, causal, scale).sub_(sums[:, part]).exp_()
                keys = weights.shape[2]
                grad_value[:, :keys].baddbmm_(weights.transpose(1, 2), upstream[:, part])
                grad_scores = torch.bmm(upstream[:, part], value[:, :keys].transpose(1, 2))
                grad_scores.sub_(delta[:, part]).mul_(weights).mul_(scale)
                torch.bmm(grad_scores, key[:, :keys], out=grad_query[:, part])
                grad_key[:, :keys].baddbmm_(grad_scores.transpose(1, 2), query[:, part])
            for target, part_grad in zip(grads, (grad_query, grad_key, grad_value), strict=True):
                chunk.unpad_into(target, part_grad)
    return tuple(x.view(q.shape).to(q.dtype) for x in grads)  # type: ignore[return-value]
