"""Transformer blocks over jagged sequences."""

from __future__ import annotations

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from jagged.modules.attention import JaggedSelfAttention
from jagged.modules.jagged_tensor import with_values


class JaggedTransformerBlock(nn.Module):
    """A pre-norm transformer block: attention and a feed-forward network, each normalised before and added after.

    Args:
        embedding_dim: width D of rows in and out.
        num_heads: attention heads; divides `embedding_dim`.
        hidden_dim: width of the feed-forward network; None for `embedding_dim`, as in SASRec.
        dropout: probability, applied to the output of both parts.
        causal: a row sees itself and the rows before it only.
        device: where parameters live; `"meta"` allocates nothing.

    Shape:
        JaggedTensor with values `[sum L, D]` in and out.
    """

    def __init__(
        self,
        embedding_dim: int,
        num_heads: int,
        *,
        hidden_dim: int | None = None,
        dropout: float = 0.0,
        causal: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        hidden_dim = embedding_dim if hidden_dim is None else hidden_dim
        self.attention_norm = nn.LayerNorm(embedding_dim, device=device)
        self.attention = JaggedSelfAttention(embedding_dim, num_heads, causal=causal, device=device)
        self.feed_forward_norm = nn.LayerNorm(embedding_dim, device=device)
        self.feed_forward = nn.Sequential(
            nn.Linear(embedding_dim, hidden_dim, device=device),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(hidden_dim, embedding_dim, device=device),
        )
        self.dropout = nn.Dropout(dropout)

    def reset_parameters(self) -> None:
        """Draw new weights in every part."""
        self.attention_norm.reset_parameters()
        self.attention.reset_parameters()
        self.feed_forward_norm.reset_parameters()
        for layer in self.feed_forward:
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()

    def forward(self, x: JaggedTensor) -> JaggedTensor:
        """Attend, then transform each row."""
        values = x.values()
        attended = self.attention(with_values(x, self.attention_norm(values)))
        values = values + self.dropout(attended.values())
        values = values + self.dropout(self.feed_forward(self.feed_forward_norm(values)))
        return with_values(x, values)
