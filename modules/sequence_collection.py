"""What collections of embeddings that are not pooled have in common: the ids of a KeyedJaggedTensor in, rows by feature out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Proxy
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollectionInterface, get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from jagged.modules.bag_collection import (
    Lookups,
    Part,
    as_leaf,
    between_graphs,
    lengths_per_key,
    lookups_of,
    name_features,
    refuse_malformed,
    refuse_scripting,
    refuse_unknown_ids,
)


class SequenceCollection(EmbeddingCollectionInterface):  # type: ignore[misc]
    """Tables in parts, each of which one launch looks up; a subclass has the tables, and says how a part is looked up."""

    _parts: Sequence[Part]
    # For each part the names of its features in the output.
    _names: list[list[str]]

    def _describe(self, tables: list[EmbeddingConfig], need_indices: bool, output_dtype: torch.dtype) -> None:
        name_features(tables)
        self._embedding_configs = tables
        self._need_indices = need_indices
        self._output_dtype = output_dtype
        self._names_by_table = get_embedding_names_by_table(tables)

    def _looked_up(self, number: int, ids: Tensor, offsets: Tensor, **options: Any) -> Tensor:
        """The rows of one part in the output's dtype, flat, one feature after the other."""
        raise NotImplementedError

    @between_graphs
    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Return the rows of every feature."""
        if isinstance(features, Proxy):
            return cast("dict[str, JaggedTensor]", as_leaf(self, features))
        features = maybe_td_to_kjt(features, None)
        try:
            rows = {
                name: of
                for number, names in enumerate(self._names)
                for name, of in zip(names, self._rows(number, features), strict=True)
            }
        except ValueError:
            # The operator knows no keys.
            if features.values().is_cpu:
                refuse_malformed(features)
                refuse_unknown_ids(features, self._embedding_configs)
            raise
        lists = _lists_of(features)
        return {
            name: self._with_rows(lists[feature], rows[name])
            for table, names in zip(self._embedding_configs, self._names_by_table, strict=True)
            for feature, name in zip(table.feature_names, names, strict=True)
        }

    def __prepare_scriptable__(self) -> SequenceCollection:
        """Refuse `torch.jit.script`, of the collection or of a model that holds it."""
        refuse_scripting(self)

    def _rows(self, number: int, features: KeyedJaggedTensor) -> list[Tensor]:
        """The rows of each feature of a part."""
        part = self._parts[number]
        ids, offsets, _, sizes = self._lookups_of(part, features)
        totals = None
        if len(part.features) > 1:
            of_keys = dict(zip(features.keys(), lengths_per_key(features), strict=True))
            totals = [of_keys[name] for name in part.features]
        found = self._looked_up(number, ids, offsets, batch_sizes=sizes, sequence_totals=totals)
        return part.layout.split(found, [ids.shape[0]] if totals is None else totals)[1]

    def _lookups_of(self, part: Part, features: KeyedJaggedTensor) -> Lookups:
        return lookups_of(features, part.order, None)

    def _with_rows(self, ids: JaggedTensor, rows: Tensor) -> JaggedTensor:
        return JaggedTensor(
            rows,
            weights=ids.values() if self._need_indices else None,
            lengths=ids.lengths_or_none(),
            offsets=ids.offsets_or_none(),
        )

    def need_indices(self) -> bool:
        """Tell whether the JaggedTensors have the ids as weights."""
        return self._need_indices

    def embedding_dim(self) -> int:
        """The width of all tables."""
        return self._embedding_configs[0].embedding_dim

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The tables."""
        return self._embedding_configs

    def embedding_names_by_table(self) -> list[list[str]]:
        """For each table the names of its features in the output."""
        return self._names_by_table

    def _shown(self, *options: str) -> str:
        """What a collection shows of itself; `options` are its own."""
        shown = [f"features={sum(map(len, self._names))}", f"width={self.embedding_dim()}", f"need_indices={self._need_indices}"]
        shown += options
        shown += [f"output_dtype={self._output_dtype}"] if self._output_dtype != torch.float32 else []
        return ", ".join(shown)


def _lists_of(features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
    """The ids of each key, of a batch without samples too; of a single key without waiting for the device.

    That key's lengths are those of the batch, if it has any: else who asks for them makes them of the offsets.
    """
    keys, values = features.keys(), features.values()
    if len(keys) == 1:
        return {keys[0]: JaggedTensor(values, lengths=features.lengths_or_none(), offsets=features.offsets())}
    lengths = features.lengths()
    of_keys = zip(keys, values.split(lengths_per_key(features)), lengths.split(features.stride_per_key()), strict=True)
    return {key: JaggedTensor(ids, lengths=of) for key, ids, of in of_keys}
