"""SASRec: a causal transformer over each user's items."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from jagged.models.validation import validate_features
from jagged.modules import JaggedPooling, JaggedTransformerBlock, PositionalEncoding, SplitEmbeddingCollection, with_values

FEATURE, TIMES = "item_id", "timestamp"

# It looks at values, so it stays a call where TorchRec's pipelines trace the model.
torch.fx.wrap("validate_features")


class SASRec(nn.Module):
    """Self-attentive sequential recommendation on jagged histories; the item table is looked up and scored against.

    Args:
        num_items: size of the catalogue.
        embedding_dim: width D of item embeddings and hidden states.
        num_heads: attention heads; divides `embedding_dim`.
        num_layers: transformer blocks.
        max_seq_len: positions; rows further back than that share the last one.
        dropout: probability, on the embeddings and inside the blocks.
        num_time_buckets: add to the scores of attention a learned number for each head and bucket of the time between rows, two
            buckets an octave (`jagged.ops.jagged_attention`: `time_bias`); None for none.
        device: where parameters live; `"meta"` allocates nothing.

    Attributes:
        takes_times: whether features have the times of their rows, too.

    Shape:
        KeyedJaggedTensor of at least one sample with the key `"item_id"` in, and with time buckets the key `"timestamp"` of as
        many rows; JaggedTensor with values `[sum L, D]` out, one hidden state a row.

    Raises:
        ValueError: ids outside the catalogue or offsets that do not fit them, named before any kernel runs. On a GPU this
            waits for the device; `jagged.ops.trust_values` goes without.

    Source:
        Kang and McAuley, Self-Attentive Sequential Recommendation, ICDM 2018; trained here with cross-entropy over the whole
        catalogue in place of binary cross-entropy on sampled items.
    """

    def __init__(
        self,
        num_items: int,
        *,
        embedding_dim: int = 64,
        num_heads: int = 2,
        num_layers: int = 2,
        max_seq_len: int = 50,
        dropout: float = 0.2,
        num_time_buckets: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.takes_times = num_time_buckets is not None
        self.config: dict[str, Any] = {
            "num_items": num_items,
            "embedding_dim": embedding_dim,
            "num_heads": num_heads,
            "num_layers": num_layers,
            "max_seq_len": max_seq_len,
            "dropout": dropout,
            "num_time_buckets": num_time_buckets,
        }
        self.item_embeddings = EmbeddingCollection(
            tables=[
                EmbeddingConfig(
                    name=FEATURE,
                    embedding_dim=embedding_dim,
                    num_embeddings=num_items,
                    feature_names=[FEATURE],
                    init_fn=partial(nn.init.normal_, std=embedding_dim**-0.5),
                )
            ],
            device=torch.device(device) if device is not None else None,
        )
        self.positions = PositionalEncoding(max_seq_len, embedding_dim, device=device)
        self.embedding_dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            JaggedTransformerBlock(embedding_dim, num_heads, dropout=dropout, num_time_buckets=num_time_buckets, device=device)
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(embedding_dim, device=device)
        self.last = JaggedPooling(embedding_dim, "last")

    @property
    def item_weight(self) -> Tensor:
        """The item table `[num_items, D]`, which the head scores against."""
        return self.item_embeddings.embeddings[FEATURE].weight

    def reset_parameters(self) -> None:
        """Draw new weights in every part."""
        nn.init.normal_(self.item_weight, std=self.item_weight.shape[1] ** -0.5)
        self.positions.reset_parameters()
        for block in self.blocks:
            cast(JaggedTransformerBlock, block).reset_parameters()
        self.norm.reset_parameters()

    def forward(self, features: KeyedJaggedTensor) -> JaggedTensor:
        """Return the hidden state of every row; the one of row i knows rows 0..i of its sample."""
        # TorchRec's own collection takes no batch without samples; a split one has to, where other processes have some.
        is_split = isinstance(self.item_embeddings, SplitEmbeddingCollection)
        validate_features(features, FEATURE, self.config["num_items"], is_split, TIMES if self.takes_times else None)
        x = self.positions(self.item_embeddings(features)[FEATURE])
        x = with_values(x, self.embedding_dropout(x.values()))
        times = features[TIMES].values() if self.takes_times else None
        for block in self.blocks:
            x = block(x, times=times)
        return with_values(x, self.norm(x.values()))

    def final_hidden(self, features: KeyedJaggedTensor) -> Tensor:
        """Return the hidden state `[B, D]` of each sample's last row; zeros for an empty sample."""
        return cast(Tensor, self.last(self(features)))
