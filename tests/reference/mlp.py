"""A multilayer perceptron on padded rows with their sample's features beside them, in plain torch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

ACTIVATIONS = {None: nn.Identity, "relu": nn.ReLU, "silu": nn.SiLU, "gelu": nn.GELU}


class PaddedMLP(nn.Module):
    def __init__(self, in_features: int, layer_sizes: Sequence[int], context_features: int, activation: str | None) -> None:
        super().__init__()
        widths = [in_features + context_features, *layer_sizes]
        layers: list[nn.Module] = []
        for a, b in itertools.pairwise(widths):
            layers += [nn.Linear(a, b), ACTIVATIONS[activation]()]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        """`x` is `[B, L, in_features]`, `context` `[B, context_features]`."""
        return self.layers(torch.cat([x, context[:, None].expand(-1, x.shape[1], -1)], 2))
