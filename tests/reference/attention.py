"""Attention on padded tensors, in whatever dtype it is given: the oracle of jagged attention."""

from __future__ import annotations

import torch
from torch import Tensor


def visible_keys(
    q_lengths: Tensor,
    k_lengths: Tensor,
    *,
    causal: bool = False,
    window: int | None = None,
    num_targets: int | Tensor | None = None,
    num_contextual: int = 0,
) -> Tensor:
    """Tell which keys a query sees, `[B, longest Lq, longest Lk]`; both are at least 1, and padding neither sees nor is seen."""
    device = q_lengths.device
    query = torch.arange(max([1, *q_lengths.tolist()]), device=device)[None, :, None]
    key = torch.arange(max([1, *k_lengths.tolist()]), device=device)[None, None, :]
    q_lengths, k_lengths = q_lengths[:, None, None], k_lengths[:, None, None]
    targets = torch.as_tensor(0 if num_targets is None else num_targets, device=device).expand(q_lengths.shape[0])
    history = k_lengths - targets[:, None, None].clamp(min=0).minimum(k_lengths)

    position = query + k_lengths - q_lengths
    place = position.minimum(history)
    seen = torch.ones_like(position == key)
    if causal:
        seen = seen & (key <= place)
    if window is not None:
        seen = seen & (((place - key).abs() < window) | (key < num_contextual))
    if num_contextual:
        seen = seen | (position < num_contextual)
    seen = seen & (key < history)
    if num_targets is not None:
        seen = seen | (position == key)
    return seen & (query < q_lengths) & (key < k_lengths)


def padded_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor | None = None,
    *,
    causal: bool = False,
    window: int | None = None,
    num_targets: int | Tensor | None = None,
    num_contextual: int = 0,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`[Sq, H, D]`, twice `[Sk, Hkv, D]` -> output `[Sq, H, D]` and log-sum-exp `[H, Sq]`, through `[B, H, Lq, Lk]` scores."""
    q_lengths = q_offsets.diff()
    k_lengths = q_lengths if k_offsets is None else k_offsets.diff()
    options = {"causal": causal, "window": window, "num_targets": num_targets, "num_contextual": num_contextual}
    visible = visible_keys(q_lengths, k_lengths, **options)[:, None]  # type: ignore[arg-type]
    queries = torch.arange(visible.shape[2], device=q.device) < q_lengths[:, None]
    keys = torch.arange(visible.shape[3], device=q.device) < k_lengths[:, None]
    padded = []
    for x, inside in ((q, queries), (k, keys), (v, keys)):
        dense = x.new_zeros(*inside.shape, *x.shape[1:])
        dense[inside] = x
        padded.append(dense.repeat_interleave(q.shape[1] // x.shape[1], 2).transpose(1, 2))
    query, key, value = padded
    scores = query @ key.transpose(2, 3) * (q.shape[2] ** -0.5 if scale is None else scale)
    # Where nothing is seen, finite scores keep NaN out of the gradients.
    seeing = visible.any(-1, keepdim=True)
    scores = scores.masked_fill(~visible, -torch.inf).masked_fill(~seeing, 0)
    # The softmax in float32 at least, and from the log-sum-exp, whose rounding is the price of keeping no probabilities.
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    lse = scores.logsumexp(-1, keepdim=True)
    weights = (scores - lse).exp().masked_fill(~seeing, 0).to(value.dtype)
    lse = lse.masked_fill(~seeing, -torch.inf).squeeze(-1)
    return (weights @ value).transpose(1, 2)[queries], lse.transpose(1, 2)[queries].t()
