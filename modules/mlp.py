"""Multilayer perceptrons over jagged rows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from jagged.modules.jagged_module import JaggedModule
from jagged.modules.jagged_tensor import with_values
from jagged.ops import ACTIVATIONS, Activation, jagged_linear


class JaggedMLP(JaggedModule):
    """A multilayer perceptron on every row, which may also see features of the row's sample.

    With context features the first layer is that of rows with their sample's features beside them; these are projected once a
    sample, not once a row.

    Args:
        in_features: width of rows in.
        layer_sizes: widths of the layers; the last is the width of rows out. No activation follows it.
        context_features: width C of the samples' features; None for none.
        activation: `"relu"`, `"silu"`, `"gelu"` or None, after every layer but the last.
        dropout: probability, applied after every activation.
        device: where parameters live; `"meta"` allocates nothing.

    Shape:
        JaggedTensor with values `[sum L, in_features]` and, with context features, a tensor `[B, C]` in; JaggedTensor with values
        `[sum L, layer_sizes[-1]]` out.

    Raises:
        ValueError: no layer, an unknown activation, a context where none is expected or none where one is.
    """

    shown = ("activation",)

    def __init__(
        self,
        in_features: int,
        layer_sizes: Sequence[int],
        *,
        context_features: int | None = None,
        activation: Activation | None = "relu",
        dropout: float = 0.0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if not layer_sizes:
            raise ValueError("layer_sizes: expected the width of at least one layer, got none")
        if activation is not None and activation not in ACTIVATIONS:
            raise ValueError(f"activation: got {activation!r}, expected one of {', '.join(map(repr, ACTIVATIONS))} or None")
        self.activation = activation
        widths = [in_features, *layer_sizes]
        self.layers = nn.ModuleList(nn.Linear(a, b, device=device) for a, b in itertools.pairwise(widths))
        self.context_projection = None
        if context_features is not None:
            self.context_projection = nn.Linear(context_features, widths[1], bias=False, device=device)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: JaggedTensor, context: Tensor | None = None) -> JaggedTensor:
        """Transform each row."""
        if (context is None) != (self.context_projection is None):
            expected = "[B, C]" if self.context_projection is not None else "None, as there are no context_features"
            raise ValueError(f"context: expected {expected}, got {None if context is None else list(context.shape)}")
        projected = None if self.context_projection is None else self.context_projection(context)
        values, last = x.values(), len(self.layers) - 1
        for k, layer in enumerate(cast("list[nn.Linear]", self.layers)):
            activation = self.activation if k < last else None
            values = jagged_linear(values, x.offsets(), layer.weight, layer.bias, None if k else projected, activation)
            if k < last:
                values = self.dropout(values)
        return with_values(x, values)
