"""Padded twins of the attention modules and the transformer block, with the parameter names of the jagged ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.reference.attention import time_buckets


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, bias: Tensor | float = 0.0, keep: Tensor | float = 1.0) -> Tensor:
    """`[B, Lq, H, W]`, twice `[B, Lk, Hkv, W]` and `[B, Lq, Lk]` -> `[B, Lq, H * W]`; zeros where nothing is visible.

    `bias` `[B, H, Lq, Lk]` is added to the scores, weights are multiplied by `keep`, of the same shape.
    """
    query, key, value = (x.repeat_interleave(q.shape[2] // x.shape[2], 2).transpose(1, 2) for x in (q, k, v))
    scores = query @ key.transpose(2, 3) * q.shape[3] ** -0.5 + bias
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).masked_fill(~visible[:, None], -torch.inf)
    seeing = visible.any(-1)[:, None, :, None]
    weights = scores.masked_fill(~seeing, 0).softmax(-1).masked_fill(~seeing, 0)
    return ((weights * keep).to(value.dtype) @ value).transpose(1, 2).flatten(2)


def score_bias(relative_bias: Tensor | None, time_bias: Tensor | None, positions: Tensor, times: Tensor) -> Tensor | float:
    """`[B, H, L, L]` from `[H, 2 * M + 1]`, `[H, T]`, positions and times `[B, L]`."""
    bias: Tensor | float = 0.0
    if relative_bias is not None:
        furthest = relative_bias.shape[1] // 2
        distances = (positions[:, :, None] - positions[:, None]).clamp(-furthest, furthest)
        bias = bias + relative_bias[:, distances + furthest].transpose(0, 1)
    if time_bias is not None:
        buckets = time_buckets(times[:, :, None] - times[:, None]).clamp(max=time_bias.shape[1] - 1)
        bias = bias + time_bias[:, buckets].transpose(0, 1)
    return bias


def turn(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary positions by complex numbers: `[B, L, H, W]` and `[B, L]`; an odd last column stays."""
    pairs = x.shape[3] // 2
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    rates = 10_000 ** -(torch.arange(pairs, dtype=wide.dtype, device=x.device) / max(pairs, 1))
    angles = positions[:, :, None, None] * rates
    numbers = torch.view_as_complex(wide[..., : 2 * pairs].unflatten(3, (pairs, 2)).contiguous())
    turned = torch.view_as_real(numbers * torch.polar(torch.ones_like(angles), angles)).flatten(3)
    return torch.cat([turned, wide[..., 2 * pairs :]], 3).to(x.dtype)


class PaddedSelfAttention(nn.Module):
    def __init__(
        self,
        embedding_dim: int,
        num_heads: int,
        num_key_heads: int,
        rotary: bool,
        max_distance: int | None = None,
        num_time_buckets: int | None = None,
    ) -> None:
        super().__init__()
        self.heads, self.rotary = [num_heads, num_key_heads, num_key_heads], rotary
        self.relative_bias = None if max_distance is None else nn.Parameter(torch.zeros(num_heads, 2 * max_distance + 1))
        self.time_bias = None if num_time_buckets is None else nn.Parameter(torch.zeros(num_heads, num_time_buckets))
        self.qkv_projection = nn.Linear(embedding_dim, embedding_dim // num_heads * sum(self.heads))
        self.output_projection = nn.Linear(embedding_dim, embedding_dim)

    def forward(
        self, x: Tensor, visible: Tensor, positions: Tensor, times: Tensor | None = None, keep: Tensor | float = 1.0
    ) -> Tensor:
        """`x` is `[B, L, D]`; `visible` `[B, L, L]` is true where a row may look; `positions` and `times` are `[B, L]`."""
        q, k, v = self.qkv_projection(x).unflatten(2, (sum(self.heads), -1)).split(self.heads, 2)
        if self.rotary:
            q, k = turn(q, positions), turn(k, positions)
        bias = score_bias(self.relative_bias, self.time_bias, positions, positions if times is None else times)
        return self.output_projection(attend(q, k, v, visible, bias, keep))


class PaddedCrossAttention(nn.Module):
    def __init__(self, embedding_dim: int, num_heads: int, key_dim: int, num_key_heads: int) -> None:
        super().__init__()
        self.num_heads, self.num_key_heads = num_heads, num_key_heads
        self.q_projection = nn.Linear(embedding_dim, embedding_dim)
        self.kv_projection = nn.Linear(key_dim, embedding_dim // num_heads * num_key_heads * 2)
        self.output_projection = nn.Linear(embedding_dim, embedding_dim)

    def forward(self, queries: Tensor, memory: Tensor, visible: Tensor, keep: Tensor | float = 1.0) -> Tensor:
        """`[B, Lq, D]`, `[B, Lk, key_dim]` and `[B, Lq, Lk]`."""
        q = self.q_projection(queries).unflatten(2, (self.num_heads, -1))
        k, v = self.kv_projection(memory).unflatten(2, (2 * self.num_key_heads, -1)).chunk(2, 2)
        return self.output_projection(attend(q, k, v, visible, keep=keep))


class PaddedTransformerBlock(nn.Module):
    def __init__(self, embedding_dim: int, num_heads: int, num_key_heads: int, rotary: bool, norm: str, *biases: int) -> None:
        super().__init__()
        self.norm = norm
        self.attention_norm = nn.LayerNorm(embedding_dim)
        self.attention = PaddedSelfAttention(embedding_dim, num_heads, num_key_heads, rotary, *biases)
        self.feed_forward_norm = nn.LayerNorm(embedding_dim)
        self.feed_forward = nn.Sequential(
            nn.Linear(embedding_dim, embedding_dim), nn.GELU(), nn.Identity(), nn.Linear(embedding_dim, embedding_dim)
        )

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        """As the attention's."""
        if self.norm == "post":
            x = self.attention_norm(x + self.attention(x, *others))
            return self.feed_forward_norm(x + self.feed_forward(x))
        x = x + self.attention(self.attention_norm(x), *others)
        return x + self.feed_forward(self.feed_forward_norm(x))
