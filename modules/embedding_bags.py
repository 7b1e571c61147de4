"""Pooled embeddings of many features: TorchRec's EmbeddingBagCollection in one launch."""

from __future__ import annotations

import functools
import os
from collections.abc import MutableMapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, DataType, EmbeddingBagConfig, PoolingType, pooling_type_to_str
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from jagged.modules.bag_collection import BagCollection, KeyOrder, Lookups, Part
from jagged.modules.cached_tables import checked_cache
from jagged.modules.table_storage import Table
from jagged.modules.trained_tables import TablesPart, TrainedTables, gather, optimizer_maker, share_of, write_back
from jagged.ops import BagLayout, BagOptimizerKind, BagPlan, PlanMismatch

DTYPES = {DataType.FP32: torch.float32, DataType.FP16: torch.float16, DataType.BF16: torch.bfloat16}
OUTPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class ScheduledEmbeddingBagCollection(TrainedTables, BagCollection):
    """TorchRec's `EmbeddingBagCollection` with all tables of a dtype looked up in one launch.

    Takes the same configurations, gives the same KeyedTensor and has the same parameters, `embedding_bags.<table>.weight`, so
    that a state dict of the one loads into the other. The parameters are views of one tensor for each data type of the
    configurations; moving, converting, copying, pickling and loading keep them so. Copy values into a parameter: a tensor given
    to its `.data` is not looked up. Save a single table as `weight.clone()`: `torch.save` writes all of the tensor that a view
    belongs to.

    Where the KeyedJaggedTensor's keys are the tables' features in the tables' order, forward reads it as it is and never waits
    for the device. For another order ids are copied first. If keys are left out, or read by several tables, or tables are of
    several data types, the number of ids to copy has to be read from the device, unless the KeyedJaggedTensor knows its lengths
    per key (`features.sync()`). Of keys that stand twice the last one is read, as TorchRec does.

    Args:
        tables: of float32, float16 or bfloat16 (which TorchRec's keeps as float16); sums or means. `init_fn` initialises.
        is_weighted: every id has a weight, which gets a gradient; for sums only.
        device: where tables are; `"meta"` allocates nothing. None: the default device.
        optimizer: `"sgd"`, `"adagrad"`, `"rowwise_adagrad"`, `"adam"`, `"rowwise_adam"`, `"lamb"` or `"rowwise_lamb"`: the
            backward pass updates the rows that were read and leaves no gradients; see `jagged.ops.BagOptimizer`. None: parameters
            get dense gradients.
        optimizer_options: `learning_rate`, and any of `eps`, `betas`, `weight_decay`, `stochastic_rounding`,
            `decoupled_weight_decay`, `max_norm`, `state_dtype`, `decay_missed_steps`.
        output_dtype: of the pooled embeddings.
        plan: schedules that `jagged tune-bags` has measured, or their file, by the features' names in the output; None, or one
            without features: the lengths of each batch choose, as for features that the plan does not have. Followed on a GPU.
        plan_mismatch: what a plan for tables of other shapes, or in forward for another GPU, does: `"refuse"` raises, `"warn"`
            warns once and does without.
        cache_bytes: keep tables and optimizer states in the host's memory, and on the device only what this budget in bytes has
            room for: the rows that a batch needs, and the most frequent ones. Results are the same; see the guide. None: all is
            on the device.
        cache_interval: after how many lookups the most frequent rows are chosen anew.

    Raises:
        ValueError: no tables, two of one name, another data type or pooling, weighted means, options of the optimizer that are
            unknown, missing or out of their ranges, a file that is no plan, a plan that does not fit; in forward, keys or weights
            that are missing, batches of several sizes without inverse indices, and on a CPU lengths, ids and inverse indices
            that are wrong.
        OSError: a plan that cannot be read.
        TypeError: another output dtype, or dtype of the optimizer's states.

    Shape:
        KeyedJaggedTensor of int32 or int64 ids in, also with a batch size for each key and of no samples; keys that no table
        reads are ignored. KeyedTensor `[B, sum of the features' widths]` out, in the order of the tables and of their features; a
        feature of several tables is named `feature@table`.

    Source:
        Pan et al., RecFlex: Enabling Feature Heterogeneity-Aware Optimization for Deep Recommendation Models with Flexible
        Schedules, SC 2024.

    Example:
        >>> import torch
        >>> from torchrec.modules.embedding_configs import EmbeddingBagConfig
        >>> from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
        >>> from jagged.modules import ScheduledEmbeddingBagCollection
        >>> bags = ScheduledEmbeddingBagCollection([
        ...     EmbeddingBagConfig(name="item", embedding_dim=8, num_embeddings=100, feature_names=["clicked", "bought"]),
        ...     EmbeddingBagConfig(name="shop", embedding_dim=3, num_embeddings=10, feature_names=["shop"]),
        ... ])
        >>> features = KeyedJaggedTensor(
        ...     keys=["clicked", "bought", "shop"],
        ...     values=torch.tensor([5, 99, 7, 5, 3, 4]),
        ...     lengths=torch.tensor([2, 1, 0, 1, 1, 1]),
        ... )
        >>> pooled = bags(features)
        >>> pooled.keys(), pooled.values().shape, pooled["bought"][0].count_nonzero().item()
        (['clicked', 'bought', 'shop'], torch.Size([2, 19]), 0)
    """

    def __init__(
        self,
        tables: list[EmbeddingBagConfig],
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        *,
        optimizer: BagOptimizerKind | None = None,
        optimizer_options: dict[str, Any] | None = None,
        output_dtype: torch.dtype = torch.float32,
        cache_bytes: int | None = None,
        cache_interval: int = 100,
        plan: BagPlan | str | os.PathLike[str] | None = None,
        plan_mismatch: PlanMismatch = "refuse",
    ) -> None:
        super().__init__()
        check_tables(tables, is_weighted, output_dtype)
        self._describe(tables, is_weighted, output_dtype)
        self._kind = optimizer
        self._optimizer = optimizer_maker(optimizer, optimizer_options)
        self._cache = checked_cache(cache_bytes, cache_interval, device)
        self.embedding_bags = nn.ModuleDict()
        self._parts: list[TablesPart] = []
        self._places = []
        self._make_parts(self._home(device))
        self._plan_with(plan, plan_mismatch)
        self.register_state_dict_pre_hook(write_back)
        self.register_load_state_dict_pre_hook(write_back)
        self.register_load_state_dict_post_hook(gather)
        self.reset_parameters()

    def _make_parts(self, device: torch.device | str | None) -> None:
        configs = self._embedding_bag_configs
        data_types = list(dict.fromkeys(table.data_type for table in configs))
        made: dict[str, nn.EmbeddingBag] = {}
        for data_type in data_types:
            own = [table for table in configs if table.data_type == data_type]
            layout = BagLayout(
                rows=tuple(table.num_embeddings for table in own),
                widths=tuple(table.embedding_dim for table in own),
                tables=tuple(i for i, table in enumerate(own) for _ in table.feature_names),
                means=tuple(table.pooling == PoolingType.MEAN for table in own for _ in table.feature_names),
            )
            views = layout.views(torch.empty(layout.num_elements, dtype=DTYPES[data_type], device=device))
            for table, view in zip(own, views, strict=True):
                made[table.name] = nn.EmbeddingBag(
                    table.num_embeddings,
                    table.embedding_dim,
                    mode=pooling_type_to_str(table.pooling),
                    include_last_offset=True,
                    _weight=view,
                )
            storage = self._storage_of(layout, [made[table.name] for table in own], share_of(own, self._embedding_bag_configs))
            features = [name for table in own for name in table.feature_names]
            self._parts.append(TablesPart([table.name for table in own], storage, layout, features, KeyOrder(features)))
        counts = [0] * len(data_types)
        for table in configs:
            self.embedding_bags[table.name] = made[table.name]
            part = data_types.index(table.data_type)
            for _ in table.feature_names:
                self._places.append((part, counts[part]))
                counts[part] += 1

    @property
    def _modules_of_tables(self) -> MutableMapping[str, Table]:
        return cast("MutableMapping[str, Table]", self.embedding_bags)

    def _lookups_of(self, part: Part, features: KeyedJaggedTensor) -> Lookups:
        find = functools.partial(super()._lookups_of, part, features)
        return self._lookups_by(find, part, features, is_weighted=self._is_weighted)

    def _pooled(self, number: int, features: KeyedJaggedTensor) -> Tensor:
        """The output of one part: `[B, W]`, or flat where features have batches of their own."""
        part = self._parts[number]
        ids, offsets, weights, batch_sizes = self._lookups_of(part, features)
        tables, dtype = part.tables, self._output_dtype
        pooled = tables.lookup(
            part.layout,
            ids,
            offsets,
            per_sample_weights=weights,
            batch_sizes=batch_sizes,
            output_dtype=dtype if dtype in (torch.float32, tables.dtype) else torch.float32,
            schedules=None if self._plan is None else self._schedules_on(tables.device)[number],
        )
        return pooled if pooled.dtype == dtype else pooled.to(dtype)

    def reset_parameters(self) -> None:
        """Draw new tables by their `init_fn`; nothing on the meta device."""
        self._draw(self._embedding_bag_configs)

    def extra_repr(self) -> str:
        """Show the options; the tables follow as modules."""
        return self._shown() if self._kind is None else self._shown(f"optimizer={self._kind!r}")


def check_tables(
    tables: list[EmbeddingBagConfig], is_weighted: bool, output_dtype: torch.dtype, *, of_any_type: bool = False
) -> None:
    """Refuse bags that there is no operator for."""
    check_configs(tables, output_dtype, of_any_type=of_any_type)
    for table in tables:
        if table.pooling not in (PoolingType.SUM, PoolingType.MEAN):
            raise ValueError(f"tables: expected SUM or MEAN pooling, got {table.pooling.name} for {table.name!r}")
        if is_weighted and table.pooling == PoolingType.MEAN:
            raise ValueError(f"is_weighted: only sums are weighted, but {table.name!r} has MEAN pooling")


def check_configs(tables: Sequence[BaseEmbeddingConfig], output_dtype: torch.dtype, *, of_any_type: bool) -> None:
    """Refuse tables that there is no operator for, however they are read."""
    if not tables:
        raise ValueError("tables: expected at least one, got none")
    if output_dtype not in OUTPUT_DTYPES:
        raise TypeError(f"output_dtype: expected one of {', '.join(map(str, OUTPUT_DTYPES))}, got {output_dtype}")
    names = set()
    for table in tables:
        if table.name in names:
            raise ValueError(f"tables: expected names of their own, got {table.name!r} twice")
        names.add(table.name)
        if table.data_type not in DTYPES and not of_any_type:
            expected = ", ".join(data_type.name for data_type in DTYPES)
            raise ValueError(f"tables: expected a data type of {expected}, got {table.data_type.name} for {table.name!r}")
