"""SASRec: a causal transformer over each user's items."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from jagged.models.item_sequences import ItemSequenceModel, Positions
from jagged.models.side_features import ItemFeatures
from jagged.modules import GroupSparseHead, JaggedTransformerBlock


class SASRec(ItemSequenceModel):
    """Self-attentive sequential recommendation on jagged histories.

    The item table is looked up and scored against. With an output layer of its own (`output`) the table is looked up alone.

    Args:
        num_items: size of the catalogue.
        embedding_dim: width D of item embeddings and hidden states.
        num_heads: attention heads; divides `embedding_dim`.
        num_layers: transformer blocks.
        max_seq_len: positions; rows that are further away share the last one.
        dropout: probability, on the embeddings and inside the blocks.
        num_time_buckets: add to the scores of attention a learned number for each head and bucket of the time between rows, two
            buckets an octave (`jagged.ops.jagged_attention`: `time_bias`); None for none.
        positions: `"end"` counts places from the last event, which has the same one however long the history; `"start"` from the
            first, so that what an event becomes does not depend on later ones, and a `HistoryCache` can keep it; None adds no
            vector of places.
        item_features: side features of the items, added to what is looked up: made by `ItemFeatures.of`, or the `config` of such
            whose weights are to be loaded; None for none. Scores stay products with the item table alone.
        event_features: side features of events, as what a user did to the item, by name with the rows of their tables: 2 and one
            for each value, as of `EventFeatures`. An embedding of each is added to what is looked up.
        output: the items' weights for scores, of few inputs each: a head of `loss="softmax"` that reads `embedding_dim` features,
            without projections; None: the item table, or what the next three say.
        output_fan_in: inputs of an item that has no dense layer, of an output layer that is to be loaded; None for none.
        output_dense_items, output_groups: how many items read all inputs, and groups of the others, of such a layer.
        device: where parameters live; `"meta"` allocates nothing.

    Attributes:
        takes_times: whether features have the times of their rows, too.
        item_features, output: as given, or made.
        event_features: names of the side features of events that batches have, too, with the rows of their tables.

    Shape:
        KeyedJaggedTensor of at least one sample with the key `"item_id"` in, with time buckets the key `"timestamp"`, and a key
        for each feature of events, of as many rows; JaggedTensor with values `[sum L, D]` out, one hidden state a row.

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
        positions: Positions = "end",
        item_features: ItemFeatures | Mapping[str, Any] | None = None,
        event_features: Mapping[str, int] | None = None,
        output: GroupSparseHead | None = None,
        output_fan_in: int | None = None,
        output_dense_items: int = 0,
        output_groups: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        config = {
            "num_items": num_items,
            "embedding_dim": embedding_dim,
            "num_heads": num_heads,
            "num_layers": num_layers,
            "max_seq_len": max_seq_len,
            "dropout": dropout,
            "num_time_buckets": num_time_buckets,
            "positions": positions,
        }
        super().__init__(
            config,
            lambda: JaggedTransformerBlock(
                embedding_dim, num_heads, dropout=dropout, num_time_buckets=num_time_buckets, device=device
            ),
            takes_times=num_time_buckets is not None,
            positions=positions,
            item_features=item_features,
            event_features=event_features,
            output=output,
            output_fan_in=output_fan_in,
            output_dense_items=output_dense_items,
            output_groups=output_groups,
            device=device,
        )
