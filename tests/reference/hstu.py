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
        concat_ua: bool = False,
        norm: str = "layer",
    ) -> None:
        super().__init__()
        self.num_heads, self.normalizer, self.concat_ua = num_heads, normalizer, concat_ua
        width = num_heads * head_dim
        self.relative_bias = None if max_distance is None else nn.Parameter(torch.zeros(num_heads, 2 * max_distance + 1))
        self.time_bias = None if num_time_buckets is None else nn.Parameter(torch.zeros(num_heads, num_time_buckets))
        self.input_norm: nn.Module = (nn.RMSNorm if norm == "rms" else nn.LayerNorm)(embedding_dim, eps=1e-6)
        self.uvqk_projection = nn.Linear(embedding_dim, 4 * width)
        self.attention_norm: nn.Module
        if norm == "group":
            self.attention_norm = nn.GroupNorm(num_heads, width, eps=1e-6)
        else:
            self.attention_norm = (nn.RMSNorm if norm == "rms" else nn.LayerNorm)(width, eps=1e-6)
        self.output_projection = nn.Linear(3 * width if concat_ua else width, embedding_dim)

    def forward(self, x: Tensor, visible: Tensor, positions: Tensor, times: Tensor, lengths: Tensor) -> Tensor:
        """`x` is `[B, L, D]`; `visible` `[B, L, L]` is true where a row may look; `positions` and `times` are `[B, L]`."""
        parts = nn.functional.silu(self.uvqk_projection(self.input_norm(x))).chunk(4, 2)
        u, v, q, k = (part.unflatten(2, (self.num_heads, -1)) for part in parts)
        scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[3] ** -0.5
        scores = scores + score_bias(self.relative_bias, self.time_bias, positions, times)
        weights = nn.functional.silu(scores) * visible[:, None]
        rows = lengths.clamp(min=1)[:, None, None] if self.normalizer is None else self.normalizer
        attended = torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2) / rows
        # Group norm has its groups in the second dimension.
        normal, u = self.attention_norm(attended.flatten(0, 1)).view_as(attended), u.flatten(2)
        gated = torch.cat([u, attended, normal * u], 2) if self.concat_ua else normal * u
        return x + self.output_projection(gated)
