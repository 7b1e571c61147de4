"""Transformer blocks over jagged sequences."""

from __future__ import annotations

from typing import Literal, cast

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from jagged.modules.attention import JaggedSelfAttention
from jagged.modules.history_cache import CachedKeys, CachedShape
from jagged.modules.jagged_module import JaggedModule
from jagged.modules.jagged_tensor import with_values
from jagged.modules.layer_norm import LayerNorm
from jagged.modules.linear import Layers, normalised
from jagged.modules.recompute import computed_again
from jagged.ops import Window


class JaggedTransformerBlock(JaggedModule):
    """A transformer block: attention and a feed-forward network, each added to its input and normalised.

    Args:
        embedding_dim: width D of rows in and out.
        num_heads: attention heads; divides `embedding_dim`.
        hidden_dim: width of the feed-forward network; None for `embedding_dim`, as in SASRec.
        dropout: probability, applied to the output of both parts.
        norm: `"pre"` normalises the input of each part, `"post"` the sum of its input and output.
        num_key_heads, causal, window, num_contextual, rotary, max_distance, num_time_buckets, attention_dropout: as for
            `JaggedSelfAttention`. For learned positions a `PositionalEncoding` stands before the first block.
        recompute: activation checkpointing of the feed-forward network: its input alone is kept, and it is computed again in the
            backward pass. Under bfloat16's autocast a block then keeps a quarter less, where `hidden_dim` is `embedding_dim`. A
            compiled step keeps what its compiler chooses, CUDA graphs have no dropout with it, and `torch.func` refuses it.
        device: where parameters live; `"meta"` allocates nothing.

    Shape:
        JaggedTensor with values `[sum L, D]` in and out. `num_targets`: how many of each sample's last rows are targets, one
        number or a tensor `[B]`, int32 or int64; None for no targets. `times`: int64 `[sum L]` where there are time buckets.

    Raises:
        ValueError: another `norm`, or what `JaggedSelfAttention` refuses.

    Source:
        Vaswani et al., Attention Is All You Need, NeurIPS 2017 (`"post"`); Xiong et al., On Layer Normalization in the
        Transformer Architecture, ICML 2020 (`"pre"`).
    """

    shown = ("norm", "recompute")
    # Of blocks that were kept before there was the option.
    recompute: bool = False

    def __init__(
        self,
        embedding_dim: int,
        num_heads: int,
        *,
        hidden_dim: int | None = None,
        dropout: float = 0.0,
        norm: Literal["pre", "post"] = "pre",
        num_key_heads: int | None = None,
        causal: bool = True,
        window: Window | None = None,
        num_contextual: int = 0,
        rotary: bool = False,
        max_distance: int | None = None,
        num_time_buckets: int | None = None,
        attention_dropout: float = 0.0,
        recompute: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if norm not in ("pre", "post"):
            raise ValueError(f"norm: expected 'pre' or 'post', got {norm!r}")
        self.norm, self.recompute = norm, recompute
        # Behind an addition the output is the residual itself.
        is_read = norm == "pre"
        hidden_dim = embedding_dim if hidden_dim is None else hidden_dim
        self.attention_norm = LayerNorm(embedding_dim, autocast_output=is_read, device=device)
        self.attention = JaggedSelfAttention(
            embedding_dim,
            num_heads,
            num_key_heads=num_key_heads,
            causal=causal,
            window=window,
            num_contextual=num_contextual,
            rotary=rotary,
            max_distance=max_distance,
            num_time_buckets=num_time_buckets,
            attention_dropout=attention_dropout,
            device=device,
        )
        self.feed_forward_norm = LayerNorm(embedding_dim, autocast_output=is_read, device=device)
        self.feed_forward = Layers(
            nn.Linear(embedding_dim, hidden_dim, device=device),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(hidden_dim, embedding_dim, device=device),
        )
        self.dropout = nn.Dropout(dropout)

    def cached_shape(self) -> CachedShape:
        """As of `JaggedSelfAttention`."""
        return self.attention.cached_shape()

    def forward(
        self,
        x: JaggedTensor,
        num_targets: int | Tensor | None = None,
        times: Tensor | None = None,
        cached: CachedKeys | None = None,
    ) -> JaggedTensor:
        """Attend, then transform each row."""
        values = x.values()
        if self.norm == "pre":
            normal, values = normalised(self.attention_norm, values)
            attended = self.attention(with_values(x, normal), num_targets, times, cached)
            values = values + self.dropout(attended.values())
            values = self._transformed(values)
        else:
            attended = self.attention(x, num_targets, times, cached)
            values = self.attention_norm(values + self.dropout(attended.values()))
            values = self._transformed(values)
        return with_values(x, values)

    def _transformed(self, values: Tensor) -> Tensor:
        """The second part, of which with `recompute` nothing but the rows is kept."""
        if not self.recompute:
            return self._feed_forward(values)
        return cast(Tensor, computed_again((self.feed_forward, self.dropout), self._feed_forward, values))

    def _feed_forward(self, values: Tensor) -> Tensor:
        if self.norm == "pre":
            normal, values = normalised(self.feed_forward_norm, values)
            return values + cast(Tensor, self.dropout(self.feed_forward(normal)))
        return cast(Tensor, self.feed_forward_norm(values + self.dropout(self.feed_forward(values))))
