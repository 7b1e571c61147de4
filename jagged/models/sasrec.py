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
from jagged.modules import (
    GroupSparseHead,
    JaggedPooling,
    JaggedTransformerBlock,
    PositionalEncoding,
    ScheduledEmbeddingCollection,
    SplitEmbeddingCollection,
    with_values,
)

FEATURE, TIMES = "item_id", "timestamp"

# It looks at values, so it stays a call where TorchRec's pipelines trace the model.
torch.fx.wrap("validate_features")


class SASRec(nn.Module):
    """Self-attentive sequential recommendation on jagged histories.

    The item table is looked up and scored against. With an output layer of its own (`output`) the table is looked up alone.

    Args:
        num_items: size of the catalogue.
        embedding_dim: width D of item embeddings and hidden states.
        num_heads: attention heads; divides `embedding_dim`.
        num_layers: transformer blocks.
        max_seq_len: positions; rows further back than that share the last one.
        dropout: probability, on the embeddings and inside the blocks.
        num_time_buckets: add to the scores of attention a learned number for each head and bucket of the time between rows, two
            buckets an octave (`jagged.ops.jagged_attention`: `time_bias`); None for none.
        output: the items' weights for scores, of few inputs each: a head of `loss="softmax"` that reads `embedding_dim` features,
            without projections; None: the item table, or what the next three say.
        output_fan_in: inputs of an item that has no dense layer, of an output layer that is to be loaded; None for none.
        output_dense_items, output_groups: how many items read all inputs, and groups of the others, of such a layer.
        device: where parameters live; `"meta"` allocates nothing.

    Attributes:
        takes_times: whether features have the times of their rows, too.
        output: as given, or made.

    Shape:
        KeyedJaggedTensor of at least one sample with the key `"item_id"` in, and with time buckets the key `"timestamp"` of as
        many rows; JaggedTensor with values `[sum L, D]` out, one hidden state a row.

    Raises:
        ValueError: ids outside the catalogue or offsets that do not fit them, named before any kernel runs. On a GPU this
            waits for the device; `jagged.ops.trust_values` goes without. At first: an output layer that does not fit.

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
        output: GroupSparseHead | None = None,
        output_fan_in: int | None = None,
        output_dense_items: int = 0,
        output_groups: int = 0,
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
        if output is None and output_fan_in is not None:
            output = GroupSparseHead.shaped(
                embedding_dim,
                num_items,
                0,
                num_head_labels=output_dense_items,
                num_groups=output_groups,
                fan_in=output_fan_in,
                loss="softmax",
                device=device,
            )
        self.output = output
        if output is not None:
            _check_output(output, num_items, embedding_dim)
            self.config |= {
                "output_fan_in": output.fan_in,
                "output_dense_items": output.num_head_labels,
                "output_groups": output.num_groups,
            }

    @property
    def item_table(self) -> Tensor:
        """The item table `[num_items, D]`, which is looked up."""
        return self.item_embeddings.embeddings[FEATURE].weight

    @property
    def item_weight(self) -> Tensor:
        """What `final_hidden` is scored against: the item table `[num_items, D]`.

        Where a `ScheduledEmbeddingCollection` has the table, it is what its `scored` returns.

        With an output layer `[num_items, D + 1]`, made anew by each call: the layer that scores as this one, and the biases.
        """
        if self.output is None:
            rows = self.item_embeddings
            return rows.scored(FEATURE) if isinstance(rows, ScheduledEmbeddingCollection) else self.item_table
        weight, bias = self.output.dense()
        return torch.cat([weight, bias[:, None]], 1)

    def reset_parameters(self) -> None:
        """Draw new weights in every part."""
        nn.init.normal_(self.item_table, std=self.item_table.shape[1] ** -0.5)
        self.positions.reset_parameters()
        for block in self.blocks:
            cast(JaggedTransformerBlock, block).reset_parameters()
        self.norm.reset_parameters()
        if self.output is not None:
            self.output.reset_parameters()

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
        """Return the hidden state `[B, D]` of each sample's last row; zeros for an empty sample.

        With an output layer a 1 stands behind it, which its biases are multiplied by, and a 0 for an empty sample.
        """
        hidden = cast(Tensor, self.last(self(features)))
        if self.output is None:
            return hidden
        has_rows = features[FEATURE].lengths() > 0
        return torch.cat([hidden, has_rows.to(hidden.dtype)[:, None]], 1)


def _check_output(output: GroupSparseHead, num_items: int, width: int) -> None:
    if (output.num_labels, output.input_dim) != (num_items, width):
        raise ValueError(
            f"output: got a head of {output.num_labels} labels that reads {output.input_dim} features, expected {num_items} and "
            f"{width}, num_items and embedding_dim"
        )
    has_projections = any(isinstance(module, nn.Linear) for module in output.modules())
    if output.loss != "softmax" or output.adjacent or output.optimizer is not None or has_projections:
        raise ValueError(
            "output: expected a head of loss='softmax', without projections and an optimizer, and not adjacent, got another one"
        )
