"""Embeddings of many features, not pooled: TorchRec's EmbeddingCollection in one launch."""

from __future__ import annotations

import functools
from collections.abc import MutableMapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from jagged.modules.bag_collection import KeyOrder, Lookups, Part
from jagged.modules.cached_tables import checked_cache
from jagged.modules.embedding_bags import DTYPES, check_configs
from jagged.modules.sequence_collection import SequenceCollection
from jagged.modules.table_storage import Table
from jagged.modules.trained_tables import TablesPart, TrainedTables, gather, optimizer_maker, share_of, write_back
from jagged.ops import BagLayout, BagOptimizerKind


class ScheduledEmbeddingCollection(TrainedTables, SequenceCollection):
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
        cache_bytes: keep tables and optimizer states in the host's memory, and on the device only what this budget in bytes has
            room for: the rows that a batch needs, and the most frequent ones. Results are the same; see the guide. None: all is
            on the device.
        cache_interval: after how many lookups the most frequent rows are chosen anew.

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
        cache_bytes: int | None = None,
        cache_interval: int = 100,
    ) -> None:
        super().__init__()
        check_tables(tables, output_dtype)
        self._describe(tables, need_indices, output_dtype)
        self._kind = optimizer
        self._optimizer = optimizer_maker(optimizer, optimizer_options)
        self._cache = checked_cache(cache_bytes, cache_interval, device)
        self.embeddings = nn.ModuleDict()
        self._parts: list[TablesPart] = []
        self._names = []
        self._make_parts(self._home(device))
        self.register_state_dict_pre_hook(write_back)
        self.register_load_state_dict_pre_hook(write_back)
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
            storage = self._storage_of(layout, [made[table.name] for table in own], share_of(own, self._embedding_configs))
            features = [name for table in own for name in table.feature_names]
            self._parts.append(TablesPart([table.name for table in own], storage, layout, features, KeyOrder(features)))
            self._names.append([name for table, names in named if table.data_type == data_type for name in names])
        for table in self._embedding_configs:
            self.embeddings[table.name] = made[table.name]

    @property
    def _modules_of_tables(self) -> MutableMapping[str, Table]:
        return cast("MutableMapping[str, Table]", self.embeddings)

    def _lookups_of(self, part: Part, features: KeyedJaggedTensor) -> Lookups:
        return self._lookups_by(functools.partial(super()._lookups_of, part, features), part, features)

    def _looked_up(self, number: int, ids: Tensor, offsets: Tensor, **options: Any) -> Tensor:
        part, dtype = self._parts[number], self._output_dtype
        given = dtype if dtype in (torch.float32, part.tables.dtype) else torch.float32
        return part.tables.lookup(part.layout, ids, offsets, output_dtype=given, **options).to(dtype)

    def use_gather_select(self) -> bool:
        """Tell TorchRec's sharding that rows are not looked up once for ids that stand twice."""
        return False

    def use_gather_select_per_sharding(self) -> dict[str, bool] | None:
        """The same for each sharding type."""
        return None

    def reset_parameters(self) -> None:
        """Draw new tables by their `init_fn`; nothing on the meta device."""
        self._draw(self._embedding_configs)

    def extra_repr(self) -> str:
        """Show the options; the tables follow as modules."""
        return self._shown() if self._kind is None else self._shown(f"optimizer={self._kind!r}")


def check_tables(tables: list[EmbeddingConfig], output_dtype: torch.dtype, *, of_any_type: bool = False) -> None:
    """Refuse sequences that there is no operator for."""
    check_configs(tables, output_dtype, of_any_type=of_any_type)
    first = tables[0]
    for table in tables:
        if table.embedding_dim != first.embedding_dim:
            raise ValueError(
                f"tables: expected one embedding_dim, {first.embedding_dim} of {first.name!r}, got {table.embedding_dim} for "
                f"{table.name!r}; make a collection for each width"
            )
