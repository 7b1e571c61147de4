"""Positions of rows within their sample."""

from __future__ import annotations

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from jagged.modules.jagged_tensor import with_values
from jagged.ops import row_positions


class PositionalEncoding(nn.Module):
    """Add a learned vector for each row's place in its sample, counted from the sample's last row.

    Counted from the end, the most recent event always has the same position, however long the history; this is what
    left-padded models do. Rows further back than `max_length` share the last vector.

    Args:
        max_length: number of positions.
        embedding_dim: width D of rows.
        device: where parameters live; `"meta"` allocates nothing.

    Shape:
        JaggedTensor with values `[sum L, D]` in and out.
    """

    def __init__(self, max_length: int, embedding_dim: int, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(max_length, embedding_dim, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new vectors from a normal distribution of standard deviation 0.02."""
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: JaggedTensor) -> JaggedTensor:
        """Add the positions' vectors."""
        values = x.values()
        positions = row_positions(x.offsets(), values.shape[0], from_end=True).clamp(max=self.weight.shape[0] - 1)
        return with_values(x, values + nn.functional.embedding(positions, self.weight))

    def extra_repr(self) -> str:
        """Show the sizes."""
        return f"max_length={self.weight.shape[0]}, embedding_dim={self.weight.shape[1]}"
