"""Side features of items and of events in models of users' items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from jagged.data.vocabulary import FIRST

if TYPE_CHECKING:
    # A model alone needs no tables.
    from jagged.data.item_table import ItemTable


class EventFeatures(nn.Module):
    """Vectors of events from their side features: the sum of an embedding of each.

    Args:
        embedding_dim: width D.
        rows: by name of a feature the rows of its table, 2 or more. Row 0 is that of a missing value, and row 1 that of a value
            which training has not seen: both begin as zeros, so that they add nothing where no step has read them.
        device: where parameters live; `"meta"` allocates nothing.

    Shape:
        KeyedJaggedTensor with a key for each feature, of the same lengths, in; float `[sum L, D]` out.
    """

    def __init__(self, embedding_dim: int, rows: Mapping[str, int], *, device: torch.device | str | None = None) -> None:
        super().__init__()
        if wrong := [name for name, count in rows.items() if count < FIRST] or [*([] if rows else ["none"])]:
            found = f"{rows[wrong[0]]} rows of {wrong[0]!r}" if rows else "no feature"
            raise ValueError(f"rows: got {found}, expected features with {FIRST} rows or more: of missing and of unseen values")
        self.rows = dict(rows)
        self.embeddings = nn.ModuleList(nn.Embedding(count, embedding_dim, device=device) for count in self.rows.values())
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new weights."""
        for table in self.embeddings:
            weight = cast(nn.Embedding, table).weight
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
            nn.init.zeros_(weight[:FIRST])

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Return a vector of each event."""
        parts = [table(features[name].values()) for name, table in zip(self.rows, self.embeddings, strict=True)]
        return torch.stack(parts).sum(0)


class ItemFeatures(nn.Module):
    """Vectors of items from their side features: of each feature the mean of its values' embeddings, and a projection of numbers.

    What items have is in buffers, so that a batch has no more than items. Items with the same values of a feature share a set,
    and a step makes a vector of each set, however many rows there are: of fixed sizes, as CUDA graphs need them, and with nothing
    padded. Make it by `of`, which fills the buffers; the constructor makes the sizes, which a state dict fills.

    Args:
        num_items: size of the catalogue.
        embedding_dim: width D.
        ids: by name of a feature the numbers of its values, of its sets, and of the values of all sets together.
        numbers: names of the numbers.
        device: where parameters live; `"meta"` allocates nothing.

    Attributes:
        config: the arguments, as plain values.

    Shape:
        Integer ids `[N]` in, from 0 to `num_items`, of which the last is no item and has no features; float `[N, D]` out.
    """

    numbers: Tensor

    def __init__(
        self,
        num_items: int,
        embedding_dim: int,
        *,
        ids: Mapping[str, Sequence[int]] | None = None,
        numbers: Sequence[str] = (),
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        sizes = {name: list(of) for name, of in (ids or {}).items()}
        if not sizes and not numbers:
            raise ValueError("ids, numbers: got none of both, expected a feature")
        self.config: dict[str, Any] = {
            "num_items": num_items,
            "embedding_dim": embedding_dim,
            "ids": sizes,
            "numbers": list(numbers),
        }
        self.embeddings = nn.ModuleList()
        for place, (values, sets, members) in enumerate(sizes.values()):
            self.embeddings.append(nn.Embedding(values, embedding_dim, device=device))
            for name, length in (("set_of_item", num_items + 1), ("offsets", sets + 1), ("values", members)):
                self.register_buffer(f"{name}_{place}", torch.zeros(length, dtype=torch.int64, device=device))
        self.register_buffer("numbers", torch.zeros(num_items + 1, len(numbers), device=device))
        self.projection = nn.Linear(len(numbers), embedding_dim, bias=False, device=device) if numbers else None
        self.reset_parameters()

    @classmethod
    def of(cls, table: ItemTable, embedding_dim: int, *, device: torch.device | str | None = None) -> ItemFeatures:
        """The features of a catalogue's table."""
        sizes = {name: (one.num_values, len(one.offsets) - 1, len(one.values)) for name, one in table.ids.items()}
        made = cls(table.num_items, embedding_dim, ids=sizes, numbers=table.number_names, device=device)
        for place, one in enumerate(table.ids.values()):
            for name in ("set_of_item", "offsets", "values"):
                made.get_buffer(f"{name}_{place}").copy_(getattr(one, name))
        made.numbers.copy_(table.numbers)
        return made

    def reset_parameters(self) -> None:
        """Draw new weights; buffers stay as they are."""
        width = self.config["embedding_dim"]
        for table in self.embeddings:
            nn.init.normal_(cast(nn.Embedding, table).weight, std=width**-0.5)
        if self.projection is not None:
            nn.init.normal_(self.projection.weight, std=(width * self.projection.in_features) ** -0.5)

    def forward(self, ids: Tensor) -> Tensor:
        """Return a vector of each id."""
        parts = []
        for place, table in enumerate(self.embeddings):
            values, offsets = self.get_buffer(f"values_{place}"), self.get_buffer(f"offsets_{place}")
            of_sets = F.embedding_bag(values, cast(nn.Embedding, table).weight, offsets, mode="mean", include_last_offset=True)
            parts.append(F.embedding(self.get_buffer(f"set_of_item_{place}")[ids], of_sets))
        if self.projection is not None:
            parts.append(self.projection(self.numbers[ids]))
        return torch.stack(parts).sum(0)

    def damage(self) -> str | None:
        """What of the buffers is out of range, as of a damaged file; None where nothing is."""
        for place, (values, sets, members) in enumerate(self.config["ids"].values()):
            of_item, offsets = self.get_buffer(f"set_of_item_{place}"), self.get_buffer(f"offsets_{place}")
            limits = [(f"set_of_item_{place}", of_item, sets), (f"values_{place}", self.get_buffer(f"values_{place}"), values)]
            for name, tensor, end in limits:
                if bool(((tensor < 0) | (tensor >= end)).any()):
                    return name
            if int(offsets[0]) != 0 or int(offsets[-1]) != members or bool((offsets.diff() < 0).any()):
                return f"offsets_{place}"
        return None if bool(torch.isfinite(self.numbers).all()) else "numbers"
