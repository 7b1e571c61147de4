"""What collections of quantised tables have in common: their buffers, how they are made of float tables, and how they move."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, DataType

from jagged.modules.bag_collection import KeyOrder
from jagged.modules.embedding_bags import OUTPUT_DTYPES
from jagged.modules.trained_tables import TrainedTables
from jagged.ops import BagLayout, embedding_bags, quantize_rows

# What a qconfig may name; all mean 8 bits for each number.
BYTES = (torch.int8, torch.uint8, torch.qint8, torch.quint8)

_Config = TypeVar("_Config", bound=BaseEmbeddingConfig)


class QuantizedPart(NamedTuple):
    """All tables of a collection, and the features that read them, in the order of the tables."""

    layout: BagLayout
    features: list[str]
    order: KeyOrder


class QuantizedTables(nn.Module):
    """The one part of a collection whose tables, of all data types, are bytes with a scale and a bias for each row."""

    weights: Tensor
    scales: Tensor
    _parts: list[QuantizedPart]

    def _make_tables(
        self,
        tables: Sequence[BaseEmbeddingConfig],
        device: torch.device | str | None,
        *,
        means: tuple[bool, ...] | None = None,
        sequences: tuple[bool, ...] | None = None,
    ) -> None:
        layout = BagLayout(
            rows=tuple(table.num_embeddings for table in tables),
            widths=tuple(table.embedding_dim for table in tables),
            tables=tuple(place for place, table in enumerate(tables) for _ in table.feature_names),
            means=means,
            sequences=sequences,
        )
        features = [name for table in tables for name in table.feature_names]
        self._parts = [QuantizedPart(layout, features, KeyOrder(features))]
        self.register_buffer("weights", torch.zeros(layout.num_elements, dtype=torch.uint8, device=device))
        self.register_buffer("scales", torch.zeros(layout.first_rows[-1], 2, dtype=torch.float32, device=device))

    def _quantise(self, tables: Iterable[Tensor]) -> None:
        """Take over float tables, one after the other."""
        layout = self._parts[0].layout
        for table, weights, scales in zip(tables, layout.views(self.weights), self.scales.split(layout.rows), strict=True):
            made = quantize_rows(table.detach().reshape(-1), BagLayout((table.shape[0],), (table.shape[1],)))
            for own, new in zip((weights, scales), made, strict=True):
                own.copy_(new.view(own.shape))

    def _lookup(self, number: int, ids: Tensor, offsets: Tensor, dtype: torch.dtype, **options: Any) -> Tensor:
        """What `embedding_bags` reads of a part, in a dtype that the operator may not have."""
        found = embedding_bags(
            self.weights,
            self._parts[number].layout,
            ids,
            offsets,
            scales=self.scales,
            output_dtype=torch.float32 if dtype == torch.float64 else dtype,
            **options,
        )
        return found if found.dtype == dtype else found.to(dtype)

    @property
    def device(self) -> torch.device:
        """Where the tables are."""
        return self.weights.device

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        # A model's `.half()` moves nothing, and scales in less than float32 would add an error of their own.
        super()._apply(lambda tensor: _as_before(tensor, fn(tensor)), recurse)
        return self


def write_cached_back(module: nn.Module) -> None:
    """Let the parameters of a float collection have what updates made of them, also where rows are cached."""
    if isinstance(module, TrainedTables):
        module.write_back()


def of_bytes(tables: list[_Config]) -> list[_Config]:
    """Return configurations of the quantised tables; the caller's are those of float tables."""
    tables = copy.deepcopy(tables)
    for table in tables:
        table.data_type = DataType.INT8
    return tables


def output_dtype_of(module: nn.Module) -> torch.dtype:
    """Return the dtype that a float collection's quantised one gives: of its `qconfig`, where it has one, or its own.

    Raises:
        ValueError: a `qconfig` of other weights than bytes, for a table or for all.
    """
    qconfig: Any = getattr(module, "qconfig", None)
    if qconfig is None:
        own: torch.dtype = getattr(module, "_output_dtype", torch.float32)
        return own
    of_tables = {"all tables": qconfig.weight().dtype, **(getattr(qconfig, "per_table_weight_dtype", None) or {})}
    for name, of_weights in of_tables.items():
        if of_weights not in BYTES:
            raise ValueError(f"qconfig: expected weights of torch.int8, got {of_weights} for {name}")
    dtype: torch.dtype = qconfig.activation().dtype
    return dtype if dtype in OUTPUT_DTYPES else torch.float32


def _as_before(tensor: Tensor, changed: Tensor) -> Tensor:
    """What a function made of a tensor, in the tensor's dtype and without what another one has lost."""
    return changed if changed.dtype == tensor.dtype else tensor.to(changed.device)
