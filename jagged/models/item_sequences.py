"""What models of each user's items have in common: the item table, what hidden states are scored against, an output layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from jagged.models.side_features import EventFeatures, ItemFeatures
from jagged.models.validation import validate_features
from jagged.modules import (
    GroupSparseHead,
    JaggedPooling,
    LayerNorm,
    PositionalEncoding,
    ScheduledEmbeddingCollection,
    SplitEmbeddingCollection,
    with_values,
)

FEATURE, TIMES = "item_id", "timestamp"

# It looks at values, so it stays a call where TorchRec's pipelines trace the model.
torch.fx.wrap("validate_features")


class ItemSequenceModel(nn.Module):
    """A model of jagged histories of items, whose hidden states are scored against the item table.

    Items are looked up, side features and places from the end are added, then come the subclass's blocks and a layer norm.

    Args:
        config: the subclass's arguments, as plain values; `num_items`, `embedding_dim`, `num_layers`, `max_seq_len` and `dropout`
            among them.
        make_block: makes one of the `num_layers` blocks, called as `block(x, times=times)`, with `times` None without time
            buckets.
        takes_times: whether features have the times of their rows, too.
        num_rows: rows of the item table; None for `num_items`.
        num_positions: places from the end that have a vector of their own; None for `max_seq_len`.
        item_features, event_features, output, output_fan_in, output_dense_items, output_groups: as of `SASRec`.
        device: where parameters live; `"meta"` allocates nothing.

    Attributes:
        config: the arguments.
        takes_times: as above.
        item_features, output: as given, or made.
        event_features: names of the side features of events that batches have, too, with the rows of their tables.
    """

    def __init__(
        self,
        config: dict[str, Any],
        make_block: Callable[[], nn.Module],
        *,
        takes_times: bool = False,
        num_rows: int | None = None,
        num_positions: int | None = None,
        item_features: ItemFeatures | Mapping[str, Any] | None = None,
        event_features: Mapping[str, int] | None = None,
        output: GroupSparseHead | None = None,
        output_fan_in: int | None = None,
        output_dense_items: int = 0,
        output_groups: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.config, self.takes_times = config, takes_times
        num_items, width = config["num_items"], config["embedding_dim"]
        self.item_embeddings = EmbeddingCollection(
            tables=[
                EmbeddingConfig(
                    name=FEATURE,
                    embedding_dim=width,
                    num_embeddings=num_items if num_rows is None else num_rows,
                    feature_names=[FEATURE],
                    init_fn=partial(nn.init.normal_, std=width**-0.5),
                )
            ],
            device=torch.device(device) if device is not None else None,
        )
        if item_features is not None and not isinstance(item_features, ItemFeatures):
            item_features = ItemFeatures(**item_features, device=device)
        self.item_features = item_features
        if item_features is not None:
            _check_item_features(item_features, num_items, width)
            self.config |= {"item_features": item_features.config}
        self.event_features = dict(event_features or {})
        if taken := {FEATURE, TIMES}.intersection(self.event_features):
            found = f"got {taken.pop()!r}, expected another name"
            raise ValueError(f"event_features: {found}: batches have another thing under this key")
        self.event_embeddings: EventFeatures | None = None
        if self.event_features:
            self.event_embeddings = EventFeatures(width, self.event_features, device=device)
            self.config |= {"event_features": self.event_features}
        self.positions = PositionalEncoding(
            config["max_seq_len"] if num_positions is None else num_positions, width, device=device
        )
        self.embedding_dropout = nn.Dropout(config["dropout"])
        self.blocks = nn.ModuleList(make_block() for _ in range(config["num_layers"]))
        self.norm = LayerNorm(width, device=device)
        self.last = JaggedPooling(width, "last")
        if output is None and output_fan_in is not None:
            output = GroupSparseHead.shaped(
                width,
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
            _check_output(output, num_items, width)
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
        table = self.item_embeddings.embeddings[FEATURE].weight
        nn.init.normal_(table, std=table.shape[1] ** -0.5)
        parts: list[Any] = [self.positions, *self.blocks, self.norm, self.item_features, self.event_embeddings, self.output]
        for part in parts:
            if part is not None:
                part.reset_parameters()

    def forward(self, features: KeyedJaggedTensor) -> JaggedTensor:
        """Return the hidden state of every row."""
        # TorchRec's own collection takes no batch without samples; a split one has to, where other processes have some.
        is_split = isinstance(self.item_embeddings, SplitEmbeddingCollection)
        validate_features(
            features, FEATURE, self.config["num_items"], is_split, TIMES if self.takes_times else None, self.event_features
        )
        return self._encoded(features)

    def learned(self, features: KeyedJaggedTensor, targets: Tensor) -> tuple[JaggedTensor, Tensor]:
        """Return the hidden states that a loss is made of, and what each is to predict: the item that follows.

        Args:
            features: as of `forward`.
            targets: `[sum L]`, the item that follows each row.
        """
        return self(features), targets

    def _encoded(self, features: KeyedJaggedTensor) -> JaggedTensor:
        x = self.item_embeddings(features)[FEATURE]
        if self.item_features is not None:
            x = with_values(x, x.values() + self.item_features(features[FEATURE].values()).to(x.values().dtype))
        if self.event_embeddings is not None:
            x = with_values(x, x.values() + self.event_embeddings(features).to(x.values().dtype))
        x = self.positions(x)
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


def _check_item_features(features: ItemFeatures, num_items: int, width: int) -> None:
    found = features.config["num_items"], features.config["embedding_dim"]
    if found != (num_items, width):
        raise ValueError(
            f"item_features: got those of {found[0]} items, {found[1]} wide, expected {num_items} and {width}, num_items and "
            "embedding_dim"
        )


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
