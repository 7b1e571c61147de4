"""Attention over jagged sequences."""

from __future__ import annotations

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from jagged.modules.jagged_tensor import with_values
from jagged.ops import jagged_attention


class JaggedSelfAttention(nn.Module):
    """Multi-head softmax self-attention within each sample: projections, `jagged_attention`, output projection.

    Args:
        embedding_dim: width D of rows in and out.
        num_heads: attention heads; divides `embedding_dim`.
        causal: a row sees itself and the rows before it; otherwise all rows of its sample.
        device: where parameters live; `"meta"` allocates nothing.

    Shape:
        JaggedTensor with values `[sum L, D]` in and out.

    Raises:
        ValueError: `num_heads` does not divide `embedding_dim`.
    """

    def __init__(
        self, embedding_dim: int, num_heads: int, *, causal: bool = True, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        if num_heads < 1 or embedding_dim % num_heads:
            raise ValueError(f"num_heads: expected a divisor of embedding_dim {embedding_dim}, got {num_heads}")
        self.num_heads = num_heads
        self.causal = causal
        self.qkv_projection = nn.Linear(embedding_dim, 3 * embedding_dim, device=device)
        self.output_projection = nn.Linear(embedding_dim, embedding_dim, device=device)

    def reset_parameters(self) -> None:
        """Draw new weights, torch's defaults for linear layers."""
        self.qkv_projection.reset_parameters()
        self.output_projection.reset_parameters()

    def forward(self, x: JaggedTensor) -> JaggedTensor:
        """Attend within each sample."""
        values = x.values()
        # [sum L, 3, H, D]: q, k and v are views of one projection, which the kernels take as they stand.
        qkv = self.qkv_projection(values).unflatten(1, (3, self.num_heads, -1))
        attended = jagged_attention(qkv[:, 0], qkv[:, 1], qkv[:, 2], x.offsets(), causal=self.causal)
        return with_values(x, self.output_projection(attended.flatten(1)))

    def extra_repr(self) -> str:
        """Show what the children do not."""
        return f"num_heads={self.num_heads}, causal={self.causal}"
