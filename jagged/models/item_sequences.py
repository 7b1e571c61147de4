"""What models of each user's items have in common: the item table, what hidden states are scored against, an output layer."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from jagged.data.batches import keyed
from jagged.models.side_features import EventFeatures, ItemFeatures
from jagged.models.validation import validate_features
from jagged.modules import (
    GroupSparseHead,
    HistoryCache,
    JaggedPooling,
    LayerNorm,
    PositionalEncoding,
    ScheduledEmbeddingCollection,
    SplitEmbeddingCollection,
    with_values,
)

FEATURE, TIMES = "item_id", "timestamp"
Positions = Literal["end", "start"] | None

# It looks at values, so it stays a call where TorchRec's pipelines trace the model.
torch.fx.wrap("validate_features")


class ItemSequenceModel(nn.Module):
    """A model of jagged histories of items, whose hidden states are scored against the item table.

    Items are looked up, side features and places are added, then come the subclass's blocks and a layer norm.

    Args:
        config: the subclass's arguments, as plain values; `num_items`, `embedding_dim`, `num_layers`, `max_seq_len` and `dropout`
            among them.
        make_block: makes one of the `num_layers` blocks, called as `block(x, times=times)`, with `times` None without time
            buckets.
        takes_times: whether features have the times of their rows, too.
        num_rows: rows of the item table; None for `num_items`.
        num_positions: places that have a vector of their own; None for `max_seq_len`.
        positions: as of `SASRec`.
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
        positions: Positions = "end",
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
        if positions not in (*get_args(get_args(Positions)[0]), None):
            raise ValueError(
                f"positions: got {positions!r}, expected 'end' or 'start', where places are counted from, or None for none"
            )
        places = config["max_seq_len"] if num_positions is None else num_positions
        self.positions = (
            None if positions is None else PositionalEncoding(places, width, from_end=positions == "end", device=device)
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

    def event_rows(
        self, features: KeyedJaggedTensor, *, num_targets: int | Tensor | None = None, behind: Tensor | None = None
    ) -> JaggedTensor:
        """Return the rows `[sum L, D]` that blocks read: what is looked up, with side features and places.

        Args:
            features: as of `forward`.
            num_targets: how many of each sample's last rows are candidates, which all stand right behind the history, one number
                or `[B]`; None for none.
            behind: `[B]`, how many rows of each sample stand before these, as those that a `HistoryCache` has; None for none.
        """
        x = self.item_embeddings(features)[FEATURE]
        if self.item_features is not None:
            x = with_values(x, x.values() + self.item_features(features[FEATURE].values()).to(x.values().dtype))
        if self.event_embeddings is not None:
            x = with_values(x, x.values() + self.event_embeddings(features).to(x.values().dtype))
        if self.positions is not None:
            x = self.positions(x, num_targets, behind)
        else:
            # A lookup is float32 whatever the model's dtype, which places would have brought.
            x = with_values(x, x.values().to(torch.promote_types(x.values().dtype, self.norm.weight.dtype)))
        return with_values(x, self.embedding_dropout(x.values()))

    def _encoded(self, features: KeyedJaggedTensor) -> JaggedTensor:
        x = self.event_rows(features)
        times = features[TIMES].values() if self.takes_times else None
        for block in self.blocks:
            x = block(x, times=times)
        return with_values(x, self.norm(x.values()))

    def final_hidden(self, features: KeyedJaggedTensor) -> Tensor:
        """Return the hidden state `[B, D]` of each sample's last row; zeros for an empty sample.

        With an output layer a 1 stands behind it, which its biases are multiplied by, and a 0 for an empty sample.
        """
        return self._final(self(features))

    @torch.no_grad()
    def final_hidden_cached(self, features: KeyedJaggedTensor, users: Sequence[Hashable] | Tensor, cache: HistoryCache) -> Tensor:
        """Return what `final_hidden` does in evaluation; of each history only what `cache` does not know is computed.

        The last event of each history is computed in any case. What is new is cached.

        Args:
            features: as of `final_hidden`: whole histories, best on the CPU, where they are compared.
            users: one for each sample, each once, as of `HistoryCache.match`.
            cache: `HistoryCache(model.blocks, model=model, max_bytes=...)` of this model, which has `positions` "start" or None.

        Raises:
            ValueError: a cache of another model; a model in training; users that do not fit; what `final_hidden` refuses.
        """
        if cache.model is not self or cache.blocks != [*self.blocks]:
            raise ValueError("cache: got one of another model, expected HistoryCache(model.blocks, model=model, max_bytes=...)")
        times = TIMES if self.takes_times else None
        validate_features(features, FEATURE, self.config["num_items"], False, times, self.event_features)
        keys = (FEATURE, *([TIMES] if self.takes_times else []), *self.event_features)
        history = features[FEATURE]
        events = torch.stack([features[key].values() for key in keys], 1).to(torch.int64)
        batch = cache.match(users, JaggedTensor(events, offsets=history.offsets()), least_new=1)
        device = self.norm.weight.device
        rows = events.index_select(0, batch.rows.to(events.device)).to(device)
        lengths = batch.offsets.diff().repeat(len(keys))
        offsets = nn.functional.pad(lengths.cumsum(0), (1, 0))
        new = keyed(rows.T.flatten(), lengths.to(device), offsets.to(device), keys)
        encoded, _ = cache.encode(
            batch,
            self.event_rows(new, behind=batch.known.to(device)).values(),
            times=new[TIMES].values() if self.takes_times else None,
        )
        return self._final(with_values(new[FEATURE], self.norm(encoded)))

    def _final(self, states: JaggedTensor) -> Tensor:
        hidden = cast(Tensor, self.last(states))
        if self.output is None:
            return hidden
        has_rows = states.lengths() > 0
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
