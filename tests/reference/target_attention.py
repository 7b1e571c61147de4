"""Padded twin of target attention, with the parameter names of the jagged one: every row has its target beside it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

ACTIVATIONS = {"relu": nn.ReLU, "silu": nn.SiLU, "gelu": nn.GELU}


class PaddedTargetAttention(nn.Module):
    def __init__(self, embedding_dim: int, layer_sizes: Sequence[int], activation: str, softmax: bool) -> None:
        super().__init__()
        widths = [4 * embedding_dim, *layer_sizes, 1]
        hidden = [nn.Linear(a, b) for a, b in itertools.pairwise(widths[:-1])]
        self.layers = nn.ModuleList([*hidden, nn.Linear(widths[-2], 1, bias=not softmax)])
        self.activation, self.softmax = ACTIVATIONS[activation](), softmax

    def forward(self, rows: Tensor, filled: Tensor, targets: Tensor) -> Tensor:
        """`[B, L, D]`, which of them exist `[B, L]`, and `[B, n, D]` -> `[B, n, D]`; L is at least 1."""
        h, t = torch.broadcast_tensors(rows[:, None], targets[:, :, None])
        x = torch.cat([h, t, h - t, h * t], 3)
        for layer in self.layers[:-1]:
            x = self.activation(layer(x))
        weights = self.layers[-1](x).squeeze(3)  # [B, n, L]
        if self.softmax:
            weights = weights.masked_fill(~filled[:, None], torch.finfo(weights.dtype).min).softmax(2).to(weights.dtype)
        return weights.masked_fill(~filled[:, None], 0) @ rows
