"""SASRec on padded tensors, in plain torch: the twin that the jagged model must agree with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class PaddedBlock(nn.Module):
    def __init__(self, embedding_dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(embedding_dim)
        self.qkv_projection = nn.Linear(embedding_dim, 3 * embedding_dim)
        self.output_projection = nn.Linear(embedding_dim, embedding_dim)
        self.feed_forward_norm = nn.LayerNorm(embedding_dim)
        self.feed_forward = nn.Sequential(
            nn.Linear(embedding_dim, embedding_dim), nn.GELU(), nn.Dropout(dropout), nn.Linear(embedding_dim, embedding_dim)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        """`x` is `[B, L, D]`; `visible` `[B, 1, L, L]` is true where a row may look."""
        qkv = self.qkv_projection(self.attention_norm(x)).unflatten(2, (3, self.num_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        x = x + self.dropout(self.output_projection(attended.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class PaddedSASRec(nn.Module):
    """Left-padded: the most recent item stands in the last column."""

    def __init__(
        self, num_items: int, embedding_dim: int, num_heads: int, num_layers: int, max_seq_len: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.item_weight = nn.Parameter(torch.randn(num_items, embedding_dim) * 0.02)
        self.positions = nn.Parameter(torch.randn(max_seq_len, embedding_dim) * 0.02)
        self.embedding_dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(PaddedBlock(embedding_dim, num_heads, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(embedding_dim)

    def forward(self, items: Tensor, filled: Tensor) -> Tensor:
        """Hidden states `[B, L, D]` of items `[B, L]`; `filled` is false in padding."""
        length = items.shape[1]
        x = nn.functional.embedding(items, self.item_weight) + self.positions[:length].flip(0)
        x = self.embedding_dropout(x)
        order = torch.arange(length, device=items.device)
        # Padding rows look at themselves, so that no row of the softmax is empty; nothing reads what they become.
        visible = (order[:, None] >= order) & (filled[:, None, :] | (order[:, None] == order))
        for block in self.blocks:
            x = block(x, visible[:, None])
        return self.norm(x)

    def loss(self, items: Tensor, filled: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy over the rows that are not padding; targets `[B, L]`."""
        logits = self(items, filled)[filled] @ self.item_weight.T
        return nn.functional.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets[filled])


def left_padded(values: Tensor, lengths: Sequence[int], length: int) -> tuple[Tensor, Tensor]:
    """Padded values `[B, length]` and which of them are real."""
    padded = values.new_zeros(len(lengths), length)
    filled = torch.zeros(len(lengths), length, dtype=torch.bool, device=values.device)
    for b, sample in enumerate(values.split(list(lengths)) if lengths else ()):
        if sample.shape[0]:
            padded[b, -sample.shape[0] :] = sample
            filled[b, -sample.shape[0] :] = True
    return padded, filled


def twin_names(num_layers: int) -> dict[str, str]:
    """Map the jagged model's parameter names to the twin's."""
    names = {
        "item_embeddings.embeddings.item_id.weight": "item_weight",
        "positions.weight": "positions",
        "norm.weight": "norm.weight",
        "norm.bias": "norm.bias",
    }
    for k in range(num_layers):
        for part in ("attention_norm", "feed_forward_norm", "feed_forward.0", "feed_forward.3"):
            for kind in ("weight", "bias"):
                names[f"blocks.{k}.{part}.{kind}"] = f"blocks.{k}.{part}.{kind}"
        for part in ("qkv_projection", "output_projection"):
            for kind in ("weight", "bias"):
                names[f"blocks.{k}.attention.{part}.{kind}"] = f"blocks.{k}.{part}.{kind}"
    return names
