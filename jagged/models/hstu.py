"""HSTU for next items: gated attention without softmax over each user's items."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from jagged.models.item_sequences import ItemSequenceModel, Positions
from jagged.models.side_features import ItemFeatures
from jagged.modules import GroupSparseHead, HSTUBlock


class HSTU(ItemSequenceModel):
    """Hierarchical sequential transduction units on jagged histories, for the next item.

    Blocks of `HSTUBlock`, whose scores know the distance between rows and, with time buckets, the time between them. A row's sum
    over the history is divided by `max_seq_len`, so that what a row becomes does not depend on how many follow it.

    Args:
        num_items: size of the catalogue.
        embedding_dim: width D of item embeddings and hidden states.
        num_heads: attention heads; divides `embedding_dim`, unless `head_dim` is given.
        num_layers: blocks.
        max_seq_len: positions, distances, and what sums are divided by; rows that are further away share the last position.
        dropout: probability, on the embeddings and inside the blocks.
        head_dim: width of a head; None for `embedding_dim // num_heads`.
        num_time_buckets: of the time between rows, two buckets an octave; None for none.
        positions, item_features, event_features, output, output_fan_in, output_dense_items, output_groups: as of `SASRec`.
        device: where parameters live; `"meta"` allocates nothing.

    Attributes:
        takes_times: whether features have the times of their rows, too.
        item_features, output: as given, or made.
        event_features: names of the side features of events that batches have, too, with the rows of their tables.

    Shape:
        As `SASRec`: the key `"item_id"` in, and with time buckets `"timestamp"`; JaggedTensor with values `[sum L, D]` out.

    Raises:
        ValueError: as `SASRec`, and what `HSTUBlock` refuses.

    Source:
        Zhai et al., Actions Speak Louder than Words: Trillion-Parameter Sequential Transducers for Generative Recommendations,
        ICML 2024. A layer norm stands before the scores, and the loss is the head's.

    Example:
        >>> import torch
        >>> from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
        >>> from jagged.models import HSTU
        >>> history = KeyedJaggedTensor(["item_id"], torch.tensor([3, 1, 2]), lengths=torch.tensor([1, 2]))
        >>> HSTU(10, embedding_dim=8)(history).values().shape
        torch.Size([3, 8])
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
        head_dim: int | None = None,
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
            "head_dim": head_dim,
            "num_time_buckets": num_time_buckets,
            "positions": positions,
        }
        super().__init__(
            config,
            lambda: HSTUBlock(
                embedding_dim,
                num_heads,
                head_dim=head_dim,
                max_distance=max_seq_len,
                num_time_buckets=num_time_buckets,
                dropout=dropout,
                normalizer=max_seq_len,
                device=device,
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
