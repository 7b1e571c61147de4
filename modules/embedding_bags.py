"""Pooled embeddings of many features: TorchRec's EmbeddingBagCollection in one launch."""

from __future__ import annotations

import copy
import functools
import os
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType, pooling_type_to_str
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from jagged.modules.backward_updates import checked_options, load_state
from jagged.modules.bag_collection import BagCollection, KeyOrder
from jagged.modules.table_storage import TableStorage
from jagged.ops import BagLayout, BagOptimizer, BagOptimizerKind, BagPlan, PlanMismatch, embedding_bags

DTYPES = {DataType.FP32: torch.float32, DataType.FP16: torch.float16, DataType.BF16: torch.bfloat16}
OUTPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
OPTIONS = ("optimizer", "optimizer_options", "output_dtype", "plan", "plan_mismatch")
OPTIMIZER_OPTIONS = (
    "learning_rate", "eps", "betas", "weight_decay", "stochastic_rounding", "decoupled_weight_decay", "max_norm", "state_dtype",
    "decay_missed_steps",
)  # fmt: skip


class _Part(NamedTuple):
    """The tables of one dtype, and the features that read them, in the order of the tables."""

    names: list[str]
    tables: TableStorage
    features: list[str]
    order: KeyOrder

    @property
    def layout(self) -> BagLayout:
        """Where the tables lie."""
        return self.tables.layout


class ScheduledEmbeddingBagCollection(BagCollection):
    """TorchRec's `EmbeddingBagCollection` with all tables of a dtype looked up in one launch.

    Takes the same configurations, gives the same KeyedTensor and has the same parameters, `embedding_bags.<table>.weight`, so
    that a state dict of the one loads into the other. The parameters are views of one tensor for each data type of the
    configurations; moving, converting, copying, pickling and loading keep them so. Save a single table as `weight.clone()`:
    `torch.save` writes all of the tensor that a view belongs to.

    Where the KeyedJaggedTensor's keys are the tables' features in the tables' order, forward reads it as it is and never waits
    for the device. For another order ids are copied first. If keys are left out, or read by several tables, or tables are of
    several data types, the number of ids to copy has to be read from the device, unless the KeyedJaggedTensor knows its lengths
    per key (`features.sync()`).

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
        plan: schedules that `jagged tune` has measured, or their file, by the features' names in the output; None: the lengths of
            each batch choose, as for features that the plan does not have. Followed on a GPU.
        plan_mismatch: what a plan for tables of other shapes, or in forward for another GPU, does: `"refuse"` raises, `"warn"`
            warns once and does without.

    Raises:
        ValueError: no tables, two of one name, another data type or pooling, weighted means, options of the optimizer that are
            unknown, missing or out of their ranges, a file that is no plan, a plan that does not fit; in forward, keys that are
            missing or batches of several sizes without inverse indices.
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
        plan: BagPlan | str | os.PathLike[str] | None = None,
        plan_mismatch: PlanMismatch = "refuse",
    ) -> None:
        super().__init__()
        check_tables(tables, is_weighted, output_dtype)
        self._describe(tables, is_weighted, output_dtype)
        self._kind = optimizer
        self._optimizer = _optimizer_maker(optimizer, optimizer_options)
        self.embedding_bags = nn.ModuleDict()
        self._parts: list[_Part] = []
        self._places = []
        self._make_parts(device)
        self._plan_with(plan, plan_mismatch)
        self.register_load_state_dict_post_hook(_gather)
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
            storage = TableStorage(layout, [made[table.name] for table in own], self._optimizer)
            features = [name for table in own for name in table.feature_names]
            self._parts.append(_Part([table.name for table in own], storage, features, KeyOrder(features)))
        counts = [0] * len(data_types)
        for table in configs:
            self.embedding_bags[table.name] = made[table.name]
            part = data_types.index(table.data_type)
            for _ in table.feature_names:
                self._places.append((part, counts[part]))
                counts[part] += 1

    def _pooled(self, number: int, features: KeyedJaggedTensor) -> Tensor:
        """The output of one part: `[B, W]`, or flat where features have batches of their own."""
        part = self._parts[number]
        ids, offsets, weights, batch_sizes = self._lookups(part, features)
        tables = part.tables
        storage = tables.weights()
        learns = tables.optimizer is not None and tables.learns()
        dtype = self._output_dtype
        pooled = embedding_bags(
            storage,
            tables.layout,
            ids,
            offsets,
            per_sample_weights=weights,
            batch_sizes=batch_sizes,
            optimizer=tables.optimizer if learns else None,
            output_dtype=dtype if dtype in (torch.float32, storage.dtype) else torch.float32,
            schedules=None if self._plan is None else self._schedules_on(storage.device)[number],
        )
        if learns and pooled.grad_fn is not None:
            pooled.grad_fn.register_prehook(tables.check_all_learn)
        elif weights is not None and weights.requires_grad:
            tables.watch(storage, pooled)
        return pooled if pooled.dtype == dtype else pooled.to(dtype)

    @property
    def device(self) -> torch.device:
        """Where the tables are."""
        return self._parts[0].tables.device

    @property
    def optimizers(self) -> list[BagOptimizer]:
        """The fused optimizers, one for each data type in the order in which it first occurs; none on the meta device.

        A schedule fills their `learning_rate`, a tensor.
        """
        return [part.tables.optimizer for part in self._parts if part.tables.optimizer is not None]

    def optimizer_state_dict(self) -> dict[str, Tensor]:
        """The fused optimizers' tensors, for a checkpoint beside the state dict, which has the tables alone."""
        states = (optimizer.state().items() for optimizer in self.optimizers)
        return {f"{number}.{name}": state for number, of in enumerate(states) for name, state in of}

    def load_optimizer_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Copy what `optimizer_state_dict` gave into the optimizers.

        Raises:
            ValueError: other names or shapes than this module's, as of a checkpoint without `decay_missed_steps` where the
                optimizer has it.
        """
        load_state(self.optimizer_state_dict(), state_dict, "tables")

    def reset_parameters(self) -> None:
        """Draw new tables by their `init_fn`; nothing on the meta device."""
        with torch.no_grad():
            for table in self._embedding_bag_configs:
                weight = cast(Tensor, self.embedding_bags[table.name].weight)
                if not weight.is_meta and table.init_fn is not None:
                    table.init_fn(weight)

    def _gather(self) -> None:
        for part in self._parts:
            part.tables.gather()

    def _apply(self, fn: Any, recurse: bool = True) -> ScheduledEmbeddingBagCollection:
        # All that there is to move are the children's parameters.
        if recurse:
            for part in self._parts:
                part.tables.apply(fn)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ScheduledEmbeddingBagCollection:
        # A parameter by itself would be copied out of the storage, and then once more into the copy's.
        for part in self._parts:
            for parameter, copied in part.tables.copies():
                memo.setdefault(id(parameter), copied)
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._gather()

    def extra_repr(self) -> str:
        """Show the options; the tables follow as modules."""
        return self._shown() if self._kind is None else self._shown(f"optimizer={self._kind!r}")


def replace_embedding_bags(module: nn.Module, **options: Any) -> nn.Module:
    """Exchange every `EmbeddingBagCollection` in a model for a `ScheduledEmbeddingBagCollection` with the same weights.

    The new modules take over the parameters themselves, whose values are copied once, table after table, into one storage: an
    optimizer that was made before, names and state dicts stay right. Subclasses, which may do something else, stay as they are.

    Args:
        module: a model, changed in place, or an `EmbeddingBagCollection`.
        options: `optimizer`, `optimizer_options`, `output_dtype`, `plan` and `plan_mismatch` of
            `ScheduledEmbeddingBagCollection`.

    Returns:
        The model; for an `EmbeddingBagCollection` what takes its place.

    Raises:
        TypeError: another option.
        ValueError: a collection that `ScheduledEmbeddingBagCollection` does not take.

    Example:
        >>> from torch import nn
        >>> from torchrec.modules.embedding_configs import EmbeddingBagConfig
        >>> from torchrec.modules.embedding_modules import EmbeddingBagCollection
        >>> from jagged.modules import replace_embedding_bags
        >>> table = EmbeddingBagConfig(name="item", embedding_dim=8, num_embeddings=100, feature_names=["clicked"])
        >>> model = nn.ModuleDict({"bags": EmbeddingBagCollection([table]), "over": nn.Linear(8, 1)})
        >>> type(replace_embedding_bags(model)["bags"]).__name__
        'ScheduledEmbeddingBagCollection'
    """
    if unknown := [name for name in options if name not in OPTIONS]:
        raise TypeError(f"{unknown[0]}: not an option; expected one of {', '.join(OPTIONS)}")
    return _replaced(module, options, {})


def _replaced(module: nn.Module, options: dict[str, Any], done: dict[nn.Module, nn.Module]) -> nn.Module:
    """The module in a module's place, the same one wherever the model has it."""
    if module not in done:
        done[module] = _scheduled(module, options) if type(module) is EmbeddingBagCollection else module
        if done[module] is module:
            for name, child in module._modules.items():
                if child is not None:
                    module._modules[name] = _replaced(child, options, done)
    return done[module]


def _scheduled(module: EmbeddingBagCollection, options: dict[str, Any]) -> ScheduledEmbeddingBagCollection:
    made = ScheduledEmbeddingBagCollection(module.embedding_bag_configs(), module.is_weighted(), "meta", **options)
    for name, bag in module.embedding_bags.items():
        made.embedding_bags[name].weight = bag.weight
    made._gather()
    return made.train(module.training)


def check_tables(
    tables: list[EmbeddingBagConfig], is_weighted: bool, output_dtype: torch.dtype, *, of_any_type: bool = False
) -> None:
    """Refuse what there is no operator for."""
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
        if table.pooling not in (PoolingType.SUM, PoolingType.MEAN):
            raise ValueError(f"tables: expected SUM or MEAN pooling, got {table.pooling.name} for {table.name!r}")
        if is_weighted and table.pooling == PoolingType.MEAN:
            raise ValueError(f"is_weighted: only sums are weighted, but {table.name!r} has MEAN pooling")


def _optimizer_maker(kind: BagOptimizerKind | None, options: dict[str, Any] | None) -> functools.partial[BagOptimizer] | None:
    checked = checked_options(kind, options, OPTIMIZER_OPTIONS)
    if kind is None or checked is None:
        return None
    maker = functools.partial(_bag_optimizer, kind, checked)
    # So that what is wrong shows now, on the meta device too.
    maker(BagLayout((1,), (1,)), torch.device("cpu"))
    return maker


def _bag_optimizer(kind: BagOptimizerKind, options: dict[str, Any], layout: BagLayout, device: torch.device) -> BagOptimizer:
    return BagOptimizer(kind, layout, device=device, **options)


def _gather(module: ScheduledEmbeddingBagCollection, _: Any) -> None:
    # Loading may have assigned parameters.
    module._gather()
