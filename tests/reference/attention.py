"""Attention on padded tensors, in whatever dtype it is given: the oracle of jagged attention."""

from __future__ import annotations

import torch
from torch import Tensor


def padded_attention(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, *, causal: bool = False, scale: float | None = None
) -> Tensor:
    """`[S, H, D]` each -> `[S, H, D]`, through `[B, H, L, D]` with `L` the longest sample."""
    lengths = offsets.diff()
    longest = int(lengths.max()) if lengths.numel() else 0
    if longest == 0:
        return v * (q * k).sum()
    inside = torch.arange(longest, device=q.device) < lengths[:, None]
    padded = []
    for x in (q, k, v):
        dense = x.new_zeros(*inside.shape, *x.shape[1:])
        dense[inside] = x
        padded.append(dense.transpose(1, 2))
    query, key, value = padded
    scores = query @ key.transpose(2, 3) * (q.shape[2] ** -0.5 if scale is None else scale)
    visible = inside[:, None, None, :].expand_as(scores)
    if causal:
        visible = visible & torch.ones(longest, longest, dtype=torch.bool, device=q.device).tril()
    # A sample without rows has nothing to attend to; its padding must not put NaN into the others' gradients.
    scores = scores.masked_fill(~visible, -torch.inf).masked_fill(~visible.any(-1, keepdim=True), 0)
    # The softmax in float32 at least, and from the log-sum-exp, whose rounding is the price of keeping no probabilities.
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    weights = (scores - scores.logsumexp(-1, keepdim=True)).exp().to(value.dtype)
    return (weights @ value).transpose(1, 2)[inside]
