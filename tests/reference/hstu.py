"""Padded twin of the block of HSTU, with the parameter names of the jagged one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.reference.transformer import score_bias


class PaddedHSTUBlock(nn.Module):
    def __init__(
        self,
        embedding_dim: int,
        num_heads: int,
        head_dim: int,
        max_distance: int | None,
        num_time_buckets: int | None,
        normalizer: float | None,
    ) -> None:
        super().__init__()
        self.num_heads, self.normalizer = num_heads, normalizer
        width = num_heads * head_dim
        self.relative_bias = None if max_distance is None else nn.Parameter(torch.zeros(num_heads, 2 * max_distance + 1))
        self.time_bias = None if num_time_buckets is None else nn.Parameter(torch.zeros(num_heads, num_time_buckets))
        self.input_norm = nn.LayerNorm(embedding_dim, eps=1e-6)
        self.uvqk_projection = nn.Linear(embedding_dim, 4 * width)
        self.attention_norm = nn.LayerNorm(width, eps=1e-6)
        self.output_projection = nn.Linear(width, embedding_dim)

    def forward(self, x: Tensor, visible: Tensor, positions: Tensor, times: Tensor, lengths: Tensor) -> Tensor:
        """`x` is `[B, L, D]`; `visible` `[B, L, L]` is true where a row may look; `positions` and `times` are `[B, L]`."""
        parts = nn.functional.silu(self.uvqk_projection(self.input_norm(x))).chunk(4, 2)
        u, v, q, k = (part.unflatten(2, (self.num_heads, -1)) for part in parts)
        scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[3] ** -0.5
        scores = scores + score_bias(self.relative_bias, self.time_bias, positions, times)
        weights = nn.functional.silu(scores) * visible[:, None]
        rows = lengths.clamp(min=1)[:, None, None] if self.normalizer is None else self.normalizer
        attended = torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2) / rows
        return x + self.output_projection(self.attention_norm(attended) * u.flatten(2))
