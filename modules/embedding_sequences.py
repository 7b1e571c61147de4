"""Embeddings of many features, not pooled: TorchRec's EmbeddingCollection in one launch."""

from __future__ import annotations

from collections.abc import MutableMapping
from itertools import groupby
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollectionInterface, get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from jagged.modules.bag_collection import KeyOrder, as_leaf, lengths_per_key, lookups_of, refuse_malformed, refuse_unknown_ids
from jagged.modules.embedding_bags import DTYPES, OUTPUT_DTYPES
from jagged.modules.table_storage import Table, TableStorage
from jagged.modules.trained_tables import TablesPart, TrainedTables, gather, optimizer_maker
from jagged.ops import BagLayout, BagOptimizerKind


class ScheduledEmbeddingCollection(TrainedTables, EmbeddingCollectionInterface):  # type: ignore[misc]
    """TorchRec's `EmbeddingCollection` with all tables of a dtype looked up in one launch.

    Takes the same configurations, gives the same dictionary of JaggedTensors and has the same parameters,
    `embeddings.<table>.weight`, so that a state dict of the one loads into the other. The parameters are views of one tensor for
    each data type of the configurations; moving, converting, copying, pickling and loading keep them so. Copy values into a
    parameter: a tensor given to its `.data` is not looked up. Of keys that stand twice the last one is read, as TorchRec does.

    Where the KeyedJaggedTensor has one key, forward never waits for the device. With several it has to know how many ids each has
    (`features.sync()` ahead of time), as TorchRec's does.

    Args:
        tables: of float32, float16 or bfloat16 (which TorchRec's keeps as float16), all of one width. `init_fn` initialises.
        device: where tables are; `"meta"` allocates nothing. None: the default device.
        need_indices: the JaggedTensors' weights are the ids.
        optimizer: as of `ScheduledEmbeddingBagCollection`: the backward pass updates the rows that were read, once each, and
            leaves no gradients. None: parameters get dense gradients.
        optimizer_options: `learning_rate`, and the optimizer's others.
        output_dtype: of the rows.

    Raises:
        ValueError: no tables, two of one name, several widths, another data type, options of the optimizer that are unknown or
            missing; in forward, keys that are missing, ids out of range and offsets that are wrong where they are on the CPU.
        TypeError: another output dtype.
        RuntimeError: in forward, tables with an optimizer in one of several processes, which has to be sharded.

    Shape:
        KeyedJaggedTensor of int32 or int64 ids in, also with a batch size for each key and of no samples; keys that no table
        reads are ignored. For each feature a JaggedTensor of rows `[its ids, embedding_dim]` out, in the order of the tables and
        of their features; a feature of several tables is named `feature@table`.

    Example:
        >>> import torch
        >>> from torchrec.modules.embedding_configs import EmbeddingConfig
        >>> from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
        >>> from jagged.modules import ScheduledEmbeddingCollection
        >>> tables = [EmbeddingConfig(name="item", embedding_dim=8, num_embeddings=100, feature_names=["clicked", "bought"])]
        >>> features = KeyedJaggedTensor(
        ...     keys=["clicked", "bought"], values=torch.tensor([5, 99, 7, 5]), lengths=torch.tensor([2, 1, 0, 1])
        ... )
        >>> rows = ScheduledEmbeddingCollection(tables)(features)
        >>> {name: (list(of.values().shape), of.lengths().tolist()) for name, of in rows.items()}
        {'clicked': ([3, 8], [2, 1]), 'bought': ([1, 8], [0, 1])}
    """

    def __init__(
        self,
        tables: list[EmbeddingConfig],
        device: torch.device | str | None = None,
        need_indices: bool = False,
        *,
        optimizer: BagOptimizerKind | None = None,
        optimizer_options: dict[str, Any] | None = None,
        output_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        _check_tables(tables, output_dtype)
        for table in tables:
            # As TorchRec's does, in the caller's configuration too.
            table.feature_names = table.feature_names or [table.name]
        self._embedding_configs = tables
        self._need_indices = need_indices
        self._output_dtype = output_dtype
        self._names_by_table = get_embedding_names_by_table(tables)
        self._kind = optimizer
        self._optimizer = optimizer_maker(optimizer, optimizer_options)
        self.embeddings = nn.ModuleDict()
        self._parts: list[TablesPart] = []
        # For each part the names of its features in the output.
        self._names: list[list[str]] = []
        self._make_parts(device)
        self.register_load_state_dict_post_hook(gather)
        self.reset_parameters()

    def _make_parts(self, device: torch.device | str | None) -> None:
        made: dict[str, nn.Embedding] = {}
        named = list(zip(self._embedding_configs, self._names_by_table, strict=True))
        for data_type in dict.fromkeys(table.data_type for table in self._embedding_configs):
            own = [table for table in self._embedding_configs if table.data_type == data_type]
            readers = [place for place, table in enumerate(own) for _ in table.feature_names]
            layout = BagLayout(
                rows=tuple(table.num_embeddings for table in own),
                widths=tuple(table.embedding_dim for table in own),
                tables=tuple(readers),
                sequences=(True,) * len(readers),
            )
            views = layout.views(torch.empty(layout.num_elements, dtype=DTYPES[data_type], device=device))
            for table, view in zip(own, views, strict=True):
                made[table.name] = nn.Embedding(table.num_embeddings, table.embedding_dim, _weight=view)
            storage = TableStorage(layout, [made[table.name] for table in own], self._optimizer)
            features = [name for table in own for name in table.feature_names]
            self._parts.append(TablesPart([table.name for table in own], storage, layout, features, KeyOrder(features)))
            self._names.append([name for table, names in named if table.data_type == data_type for name in names])
        for table in self._embedding_configs:
            self.embeddings[table.name] = made[table.name]

    @property
    def _modules_of_tables(self) -> MutableMapping[str, Table]:
        return cast("MutableMapping[str, Table]", self.embeddings)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Return the rows of every feature."""
        if isinstance(features, Proxy):
            return cast("dict[str, JaggedTensor]", as_leaf(self, features))
        features = maybe_td_to_kjt(features, None)
        try:
            rows = {
                name: of
                for number, part in enumerate(self._parts)
                for name, of in zip(self._names[number], self._rows(part, features), strict=True)
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

    def _rows(self, part: TablesPart, features: KeyedJaggedTensor) -> list[Tensor]:
        """The rows of each feature of a part."""
        ids, offsets, _, sizes = lookups_of(features, part.order, None)
        totals = None
        if len(part.features) > 1:
            of_keys = dict(zip(features.keys(), lengths_per_key(features), strict=True))
            totals = [of_keys[name] for name in part.features]
        dtype = self._output_dtype
        found = part.tables.lookup(
            part.layout,
            ids,
            offsets,
            batch_sizes=sizes,
            sequence_totals=totals,
            output_dtype=dtype if dtype in (torch.float32, part.tables.dtype) else torch.float32,
        )
        _, rows = part.layout.split(found, [ids.shape[0]] if totals is None else totals)
        return [of.to(dtype) for of in rows]

    def _with_rows(self, ids: JaggedTensor, rows: Tensor) -> JaggedTensor:
        return JaggedTensor(
            rows, weights=ids.values() if self._need_indices else None, lengths=ids.lengths(), offsets=ids.offsets_or_none()
        )

    def need_indices(self) -> bool:
        """Tell whether the JaggedTensors have the ids as weights."""
        return self._need_indices

    def use_gather_select(self) -> bool:
        """Tell TorchRec's sharding that rows are not looked up once for ids that stand twice."""
        return False

    def use_gather_select_per_sharding(self) -> dict[str, bool] | None:
        """The same for each sharding type."""
        return None

    def embedding_dim(self) -> int:
        """The width of all tables."""
        return self._embedding_configs[0].embedding_dim

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The tables."""
        return self._embedding_configs

    def embedding_names_by_table(self) -> list[list[str]]:
        """For each table the names of its features in the output."""
        return self._names_by_table

    def reset_parameters(self) -> None:
        """Draw new tables by their `init_fn`; nothing on the meta device."""
        self._draw(self._embedding_configs)

    def extra_repr(self) -> str:
        """Show the options; the tables follow as modules."""
        shown = [f"features={sum(map(len, self._names))}", f"width={self.embedding_dim()}", f"need_indices={self._need_indices}"]
        shown += [] if self._kind is None else [f"optimizer={self._kind!r}"]
        shown += [f"output_dtype={self._output_dtype}"] if self._output_dtype != torch.float32 else []
        return ", ".join(shown)


def _lists_of(features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
    """The ids of each key, of a batch without samples too; of a single key without waiting for the device."""
    keys, values, lengths = features.keys(), features.values(), features.lengths()
    if len(keys) == 1:
        return {keys[0]: JaggedTensor(values, lengths=lengths, offsets=features.offsets())}
    of_keys = zip(keys, values.split(lengths_per_key(features)), lengths.split(features.stride_per_key()), strict=True)
    return {key: JaggedTensor(ids, lengths=of) for key, ids, of in of_keys}


def _check_tables(tables: list[EmbeddingConfig], output_dtype: torch.dtype) -> None:
    if not tables:
        raise ValueError("tables: expected at least one, got none")
    if output_dtype not in OUTPUT_DTYPES:
        raise TypeError(f"output_dtype: expected one of {', '.join(map(str, OUTPUT_DTYPES))}, got {output_dtype}")
    for name, of_name in groupby(sorted(table.name for table in tables)):
        if len(list(of_name)) > 1:
            raise ValueError(f"tables: expected names of their own, got {name!r} twice")
    first = tables[0]
    for table in tables:
        if table.data_type not in DTYPES:
            expected = ", ".join(data_type.name for data_type in DTYPES)
            raise ValueError(f"tables: expected a data type of {expected}, got {table.data_type.name} for {table.name!r}")
        if table.embedding_dim != first.embedding_dim:
            raise ValueError(
                f"tables: expected one embedding_dim, {first.embedding_dim} of {first.name!r}, got {table.embedding_dim} for "
                f"{table.name!r}; make a collection for each width"
            )
