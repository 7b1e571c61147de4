"""Padded twins of the attention modules and the transformer block, with the parameter names of the jagged ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """`[B, Lq, H, W]`, twice `[B, Lk, Hkv, W]` and `[B, Lq, Lk]` -> `[B, Lq, H * W]`; zeros where nothing is visible."""
    query, key, value = (x.repeat_interleave(q.shape[2] // x.shape[2], 2).transpose(1, 2) for x in (q, k, v))
    scores = query @ key.transpose(2, 3) * q.shape[3] ** -0.5
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).masked_fill(~visible[:, None], -torch.inf)
    seeing = visible.any(-1)[:, None, :, None]
    weights = scores.masked_fill(~seeing, 0).softmax(-1).masked_fill(~seeing, 0).to(value.dtype)
    return (weights @ value).transpose(1, 2).flatten(2)


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
    def __init__(self, embedding_dim: int, num_heads: int, num_key_heads: int, rotary: bool) -> None:
        super().__init__()
        self.heads, self.rotary = [num_heads, num_key_heads, num_key_heads], rotary
        self.qkv_projection = nn.Linear(embedding_dim, embedding_dim // num_heads * sum(self.heads))
        self.output_projection = nn.Linear(embedding_dim, embedding_dim)

    def forward(self, x: Tensor, visible: Tensor, positions: Tensor) -> Tensor:
        """`x` is `[B, L, D]`; `visible` `[B, L, L]` is true where a row may look; `positions` `[B, L]` are for rotary ones."""
        q, k, v = self.qkv_projection(x).unflatten(2, (sum(self.heads), -1)).split(self.heads, 2)
        if self.rotary:
            q, k = turn(q, positions), turn(k, positions)
        return self.output_projection(attend(q, k, v, visible))


class PaddedCrossAttention(nn.Module):
    def __init__(self, embedding_dim: int, num_heads: int, key_dim: int, num_key_heads: int) -> None:
        super().__init__()
        self.num_heads, self.num_key_heads = num_heads, num_key_heads
        self.q_projection = nn.Linear(embedding_dim, embedding_dim)
        self.kv_projection = nn.Linear(key_dim, embedding_dim // num_heads * num_key_heads * 2)
        self.output_projection = nn.Linear(embedding_dim, embedding_dim)

    def forward(self, queries: Tensor, memory: Tensor, visible: Tensor) -> Tensor:
        """`[B, Lq, D]`, `[B, Lk, key_dim]` and `[B, Lq, Lk]`."""
        q = self.q_projection(queries).unflatten(2, (self.num_heads, -1))
        k, v = self.kv_projection(memory).unflatten(2, (2 * self.num_key_heads, -1)).chunk(2, 2)
        return self.output_projection(attend(q, k, v, visible))


class PaddedTransformerBlock(nn.Module):
    def __init__(self, embedding_dim: int, num_heads: int, num_key_heads: int, rotary: bool, norm: str) -> None:
        super().__init__()
        self.norm = norm
        self.attention_norm = nn.LayerNorm(embedding_dim)
        self.attention = PaddedSelfAttention(embedding_dim, num_heads, num_key_heads, rotary)
        self.feed_forward_norm = nn.LayerNorm(embedding_dim)
        self.feed_forward = nn.Sequential(
            nn.Linear(embedding_dim, embedding_dim), nn.GELU(), nn.Identity(), nn.Linear(embedding_dim, embedding_dim)
        )

    def forward(self, x: Tensor, visible: Tensor, positions: Tensor) -> Tensor:
        """As the attention's."""
        if self.norm == "post":
            x = self.attention_norm(x + self.attention(x, visible, positions))
            return self.feed_forward_norm(x + self.feed_forward(x))
        x = x + self.attention(self.attention_norm(x), visible, positions)
        return x + self.feed_forward(self.feed_forward_norm(x))
