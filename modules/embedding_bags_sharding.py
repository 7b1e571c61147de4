"""`ScheduledEmbeddingBagCollection` split over processes by TorchRec, with our operator on every shard."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.batched_embedding_kernel import BaseBatchedEmbeddingBag, EmbeddingFusedOptimizer
from torchrec.distributed.composable.table_batched_embedding_slice import TableBatchedEmbeddingSlice
from torchrec.distributed.embedding_lookup import GroupedPooledEmbeddingsLookup
from torchrec.distributed.embedding_sharding import EmbeddingSharding, EmbeddingShardingInfo
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, GroupedEmbeddingConfig, KJTList
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionContext,
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingDist
from torchrec.distributed.types import (
    Awaitable,
    LazyAwaitable,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingEnv,
    ShardingType,
)
from torchrec.modules.embedding_configs import PoolingType
from torchrec.optim.fused import EmptyFusedOptimizer, FusedOptimizer, FusedOptimizerModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from jagged.modules.embedding_bags import DTYPES, ScheduledEmbeddingBagCollection
from jagged.ops import BagLayout, BagOptimizer, embedding_bags
from jagged.ops.embedding_bag.optimizers import STATES

TABLE_WISE, COLUMN_WISE = ShardingType.TABLE_WISE.value, ShardingType.COLUMN_WISE.value
ROW_WISE, DATA_PARALLEL = ShardingType.ROW_WISE.value, ShardingType.DATA_PARALLEL.value
SHARDING_TYPES = [TABLE_WISE, COLUMN_WISE, ROW_WISE, DATA_PARALLEL]
FUSED, DENSE = EmbeddingComputeKernel.FUSED.value, EmbeddingComputeKernel.DENSE.value


class _Optimizers(NamedTuple):
    """What shards take over of the unsharded module's fused optimizers."""

    make: Callable[[BagLayout, torch.device], BagOptimizer]
    # By table and name; none of a module on the meta device.
    states: dict[str, dict[str, Tensor]]


class _Bags(BaseBatchedEmbeddingBag):  # type: ignore[misc]
    """The shards that a process has of tables of one dtype, in one storage; dense gradients."""

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        pg: dist.ProcessGroup,
        device: torch.device,
        sharding_type: str,
        optimizers: _Optimizers | None,
    ) -> None:
        super().__init__(config, pg, device)
        tables = config.embedding_tables
        # Row-wise, bags are parts of the whole ones: their sums are divided where they have come together.
        means = [table.pooling == PoolingType.MEAN and sharding_type != ROW_WISE for table in tables for _ in table.feature_names]
        self.layout = BagLayout(
            # A process can have no rows of a small table. No id is sent there.
            rows=tuple(max(1, rows) for rows in self._local_rows),
            widths=tuple(self._local_cols),
            tables=tuple(self._feature_table_map),
            means=tuple(means),
        )
        storage = torch.empty(self.layout.num_elements, dtype=DTYPES[config.data_type], device=device)
        self.weights = nn.Parameter(storage, requires_grad=optimizers is None)
        self.optimizer: BagOptimizer | None = None
        self._leaf = storage.requires_grad_() if optimizers is not None else None
        self._param_per_table = dict(self._parameters_of_tables())

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return embedding_bags(
            self.weights if self._leaf is None else self._leaf,
            self.layout,
            features.values(),
            features.offsets(),
            per_sample_weights=features.weights() if self._config.is_weighted else None,
            optimizer=self.optimizer,
        )

    @property
    def emb_module(self) -> _Bags:
        """What has `split_embedding_weights`."""
        return self

    def split_embedding_weights(self) -> list[Tensor]:
        """Each shard `[rows, width]`."""
        views = self.layout.views(self.weights.detach())
        return [view[:rows] for view, rows in zip(views, self._local_rows, strict=True)]

    def named_parameters(self, prefix: str = "", *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The storage, by a name that no other one of the lookup has."""
        name = "/".join(table.name for table in self._config.embedding_tables) + ".weight"
        yield f"{prefix}.{name}" if prefix else name, self.weights

    def _parameters_of_tables(self) -> Iterator[tuple[str, nn.Parameter]]:
        """For each table its parameter, in which column shards of one process stand one below the other."""
        first = 0
        for name, of_table in groupby(self._config.embedding_tables, key=lambda table: table.name):
            shards = list(of_table)
            rows, width, start = self._local_rows[first], self._local_cols[first], self.layout.starts[first]
            for number, shard in enumerate(shards):
                if shard.local_cols != width or self.layout.starts[first + number] != start + number * rows * width:
                    raise ValueError(
                        f"plan: expected column shards of {name!r} in one process to have the same width, a multiple of 16, got "
                        f"{[shard.local_cols for shard in shards]}; give each process one"
                    )
            count = len(shards) * rows
            yield name, TableBatchedEmbeddingSlice(self.weights, start, start + count * width, count, width)
            first += len(shards)


class _FusedBags(_Bags, FusedOptimizerModule):  # type: ignore[misc]
    """The same, whose rows that were read are updated in the backward pass."""

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        pg: dist.ProcessGroup,
        device: torch.device,
        sharding_type: str,
        optimizers: _Optimizers,
    ) -> None:
        super().__init__(config, pg, device, sharding_type, optimizers)
        self.optimizer = optimizers.make(self.layout, self.weights.device)
        for table, own in zip(config.embedding_tables, self.states(), strict=True):
            whole, (row, column) = optimizers.states.get(table.name, {}), table.local_metadata.shard_offsets
            for name, state in own.items() if whole else ():
                place = [slice(begin, begin + size) for begin, size in zip((row, column), state.shape, strict=False)]
                state.copy_(whole[name][place] if name in ("first", "second") else whole[name])
        self._fused = EmbeddingFusedOptimizer(config, self, pg)
        for parameter in self._param_per_table.values():
            # By this TorchRec knows what no other optimizer is to update.
            parameter._in_backward_optimizers = [EmptyFusedOptimizer()]

    @property
    def fused_optimizer(self) -> FusedOptimizer:
        """The states as TorchRec's checkpoints have them."""
        return self._fused

    def states(self) -> list[dict[str, Tensor]]:
        """For each shard its states by name."""
        assert self.optimizer is not None
        of_shards = zip(states_of_tables(self.optimizer), self._local_rows, strict=True)
        return [{name: state[:rows] if state.ndim else state for name, state in of.items()} for of, rows in of_shards]

    def get_optimizer_state(self) -> list[dict[str, Tensor]]:
        """For each shard what TorchRec saves."""
        return [
            {name: state if state.ndim else state.view(1) for name, state in of.items() if name != "learning_rate"}
            if "first" in of
            else {}
            for of in self.states()
        ]

    def get_learning_rate(self) -> float:
        """What `param_groups` begin with."""
        assert self.optimizer is not None
        return float(self.optimizer.learning_rate)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Take over what a schedule has set in `param_groups`."""
        assert self.optimizer is not None
        self.optimizer.learning_rate.fill_(learning_rate)


def states_of_tables(optimizer: BagOptimizer) -> list[dict[str, Tensor]]:
    """For each table views of an optimizer's tensors, `[rows, width]`, `[rows]` and `[]`, by name."""
    layout = optimizer.layout
    states: list[dict[str, Tensor]] = [{} for _ in layout.rows]
    for name, of in zip(("first", "second"), STATES[optimizer.rule.kind], strict=True):
        if of:
            whole = getattr(optimizer, name)
            for table, state in zip(states, layout.views(whole) if of == "element" else whole.split(layout.rows), strict=True):
                table[name] = state
    return [{**state, "step": optimizer.step, "learning_rate": optimizer.learning_rate} for state in states]


class _Lookup(GroupedPooledEmbeddingsLookup):  # type: ignore[misc]
    """All tables that a process has by one sharding type: a launch for each dtype, sums and means together."""

    def __init__(
        self, sharding: EmbeddingSharding, sharding_type: str, env: ShardingEnv, device: torch.device, optimizers: _Optimizers | None
    ) -> None:
        # Data-parallel tables are copies, which must change alike: their gradients are summed over the processes.
        optimizers = None if sharding_type == DATA_PARALLEL else optimizers
        kernel = _Bags if optimizers is None else _FusedBags
        # No attribute of a module can be set before it is one.
        self.__dict__["_make"] = lambda config, pg: kernel(config, pg, device, sharding_type, optimizers)
        merged = [
            dataclasses.replace(groups[0], embedding_tables=[table for group in groups for table in group.embedding_tables])
            for _, of_dtype in groupby(sharding._grouped_embedding_configs, key=lambda group: group.data_type)
            for groups in [list(of_dtype)]
        ]
        super().__init__(
            merged,
            device,
            getattr(sharding, "_pg", env.process_group),
            scale_weight_gradients=sharding_type != DATA_PARALLEL,
            sharding_type=ShardingType(sharding_type),
            env=env,
        )

    def _create_embedding_kernel(self, config: GroupedEmbeddingConfig, device: Any, pg: Any, *_: Any) -> _Bags:
        made: _Bags = self._make(config, pg)
        return made


class ShardedScheduledEmbeddingBagCollection(ShardedEmbeddingBagCollection):  # type: ignore[misc]
    """A `ScheduledEmbeddingBagCollection` of which each process has shards; `ScheduledEmbeddingBagCollectionSharder` makes it."""

    def __init__(
        self,
        module: ScheduledEmbeddingBagCollection,
        table_name_to_parameter_sharding: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        **options: Any,
    ) -> None:
        device = torch.device("cpu") if device is None else device
        # The base class makes the lookups.
        self._make_lookup = functools.partial(_Lookup, env=env, device=device, optimizers=_optimizers_of(module))
        super().__init__(module, table_name_to_parameter_sharding, env, device=device, **options)
        del self._make_lookup
        self._output = [name for name in module._embedding_names], module._widths, module._output_dtype
        plan = self.module_sharding_plan
        self._keys: list[str] | None = None
        # For each feature of the output, if it is a mean that is a sum until all its rows have come together, its key.
        self._undivided = [
            feature if table.pooling == PoolingType.MEAN and plan[table.name].sharding_type == ROW_WISE else None
            for table in self._embedding_bag_configs
            for feature in table.feature_names
        ]
        # TorchRec would divide the features of other sharding types too.
        self._has_mean_pooling_callback = False
        if module.device.type == "cpu":
            # As TorchRec does with tables on a GPU.
            self.load_state_dict(module.state_dict())
        for name, sharding in plan.items():
            if sharding.sharding_type == DATA_PARALLEL:
                dist.broadcast(self.embedding_bags[name].weight.data, src=0, group=env.process_group)

    def _create_lookups(self) -> None:
        for sharding, sharding_type in zip(self._embedding_shardings, self._sharding_types, strict=True):
            self._lookups.append(self._make_lookup(sharding, sharding_type))

    @classmethod
    def create_embedding_bag_sharding(cls, sharding_infos: list[EmbeddingShardingInfo], *args: Any, **kwargs: Any) -> Any:
        """Let tables of one dtype stand side by side, so that one launch reads them."""
        ordered = sorted(sharding_infos, key=lambda info: info.embedding_config.data_type.value)
        return super().create_embedding_bag_sharding(ordered, *args, **kwargs)

    def _create_output_dist(self) -> None:
        super()._create_output_dist()
        for place, (sharding, sharding_type) in enumerate(zip(self._embedding_shardings, self._sharding_types, strict=True)):
            if sharding_type == ROW_WISE and dist.get_backend(sharding._pg) != "nccl":
                self._output_dists[place] = _exchanged_sums(sharding, self._device)

    def reset_parameters(self) -> None:
        """Draw new tables by their `init_fn`; copies of a data-parallel one are alike."""
        for table in self._embedding_bag_configs:
            weight = self.embedding_bags[table.name].weight
            if weight.numel():
                table.init_fn(weight)
            if self.module_sharding_plan[table.name].sharding_type == DATA_PARALLEL:
                dist.broadcast(weight.data, src=0, group=self._env.process_group)

    def input_dist(self, ctx: EmbeddingBagCollectionContext, features: KeyedJaggedTensor) -> Awaitable[Awaitable[KJTList]]:
        """Send ids to the processes that have their rows."""
        features = maybe_td_to_kjt(features, None)
        self._check(features)
        if any(self._undivided):
            lengths = features.lengths().view(len(features.keys()), -1).clamp(min=1)
            ones = torch.ones_like(lengths[0])
            of_keys = dict(zip(features.keys(), lengths, strict=True))
            ctx.divisor = torch.stack([ones if key is None else of_keys[key] for key in self._undivided], 1)
        return super().input_dist(ctx, features)

    def _check(self, features: KeyedJaggedTensor) -> None:
        keys = features.keys()
        if self._keys is None:
            wanted = [name for table in self._embedding_bag_configs for name in table.feature_names]
            if missing := sorted(set(wanted) - set(keys)):
                raise ValueError(f"features: expected a key for every feature of the tables, got none for {', '.join(missing)}")
            self._keys = keys
        if keys != self._keys:
            raise ValueError(f"features: expected the keys of the first batch in their order, {self._keys}, got {keys}")
        if features.variable_stride_per_key() or features.inverse_indices_or_none() is not None:
            raise ValueError("features: expected one batch size for all keys where tables are sharded, got one for each")
        if self._is_weighted and features.weights_or_none() is None:
            raise ValueError("features: expected weights, as is_weighted says, got none; give KeyedJaggedTensor weights")

    def output_dist(self, ctx: EmbeddingBagCollectionContext, output: list[Tensor]) -> LazyAwaitable[KeyedTensor]:
        """Send pooled embeddings back."""
        return self._as_unsharded(super().output_dist(ctx, output), ctx)

    def compute_and_output_dist(self, ctx: EmbeddingBagCollectionContext, input: KJTList) -> LazyAwaitable[KeyedTensor]:
        """Look up and send pooled embeddings back."""
        return self._as_unsharded(super().compute_and_output_dist(ctx, input), ctx)

    def _as_unsharded(
        self, awaitable: LazyAwaitable[KeyedTensor], ctx: EmbeddingBagCollectionContext
    ) -> LazyAwaitable[KeyedTensor]:
        """The features in the order of the tables, means divided."""
        names, widths, dtype = self._output

        def finished(pooled: KeyedTensor) -> KeyedTensor:
            values = pooled.values()
            if pooled.keys() != names:
                of_names = dict(zip(pooled.keys(), values.split(pooled.length_per_key(), 1), strict=True))
                values = torch.cat([of_names[name] for name in names], 1)
            if ctx.divisor is not None:
                counts = torch.tensor(widths, device=values.device)
                values = values / ctx.divisor.repeat_interleave(counts, 1, output_size=sum(widths))
            return KeyedTensor(keys=names, length_per_key=widths, values=values.to(dtype))

        awaitable.callbacks.append(finished)
        return awaitable

    @property
    def unsharded_module_type(self) -> type[ScheduledEmbeddingBagCollection]:
        """What was sharded."""
        return ScheduledEmbeddingBagCollection


def _optimizers_of(module: ScheduledEmbeddingBagCollection) -> _Optimizers | None:
    if module._optimizer is None:
        return None
    states: dict[str, dict[str, Tensor]] = {}
    for part in module._parts:
        if part.tables.optimizer is not None:
            states.update(zip(part.names, states_of_tables(part.tables.optimizer), strict=True))
    return _Optimizers(module._optimizer, states)


def _exchanged_sums(sharding: EmbeddingSharding, device: torch.device) -> TwPooledEmbeddingDist:
    """Sums of the processes' parts where there is no reduce-scatter of batches of several sizes, as with gloo."""
    processes, dims = sharding._world_size, sharding.embedding_dims()

    def added(parts: Tensor) -> Tensor:
        return parts.view(len(parts), processes, sum(dims)).sum(1)

    return TwPooledEmbeddingDist(
        sharding._pg, [sum(dims)] * processes, [dims] * processes, device, [added], sharding.qcomm_codecs_registry
    )


class ScheduledEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder):  # type: ignore[misc]
    """Lets `DistributedModelParallel` split `ScheduledEmbeddingBagCollection` over processes, with its operator on every shard.

    TorchRec plans, and moves ids and pooled embeddings between processes. Each process looks up all its tables of one sharding
    type and data type in one launch. The output, its order and the names of the parameters are those of the unsharded module.
    Shards begin with the module's tables and optimizer's states; of a module on the meta device they are made anew.

    As everywhere in TorchRec the processes' losses are averaged. Tables of a module with an optimizer are updated in the backward
    pass of the process that has them. Data-parallel tables of any module get dense gradients.

    Args:
        qcomm_codecs_registry: how TorchRec compresses what it sends.

    Raises:
        ValueError: in `shard` ...

    Example:
        >>> 1
        1
    """

    def __init__(self, qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None) -> None:
        super().__init__(qcomm_codecs_registry=qcomm_codecs_registry)

    @property
    def module_type(self) -> type[ScheduledEmbeddingBagCollection]:
        """What is sharded: this type and no subclass."""
        return ScheduledEmbeddingBagCollection

    @property
    def sharded_module_type(self) -> type[ShardedScheduledEmbeddingBagCollection]:
        """What it becomes."""
        return ShardedScheduledEmbeddingBagCollection

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Table-wise, column-wise, row-wise and data-parallel, on every device."""
        return SHARDING_TYPES

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """What a planner may reckon with; whether gradients are dense is for the module to say."""
        return [DENSE if sharding_type == DATA_PARALLEL else FUSED]

    def shard(
        self,
        module: ScheduledEmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedScheduledEmbeddingBagCollection:
        """Return this process's part of a collection."""
        for name, parameter in module.named_parameters():
            if hasattr(parameter, "_optimizer_classes"):
                raise ValueError(
                    f"module: got an optimizer of apply_optimizer_in_backward for {name!r}; name one in "
                    "ScheduledEmbeddingBagCollection(optimizer=...)"
                )
            if not parameter.requires_grad:
                raise ValueError(f"module: expected tables that require a gradient, got {name!r} frozen; use torch.no_grad")
        kernels = {}
        for name, sharding in params.items():
            if sharding.sharding_type not in SHARDING_TYPES or sharding.compute_kernel not in (FUSED, DENSE):
                raise ValueError(
                    f"params: expected a sharding type of {', '.join(SHARDING_TYPES)} and the compute kernel {FUSED} or {DENSE} "
                    f"for {name!r}, got {sharding.sharding_type} and {sharding.compute_kernel}"
                )
            is_dense = module._optimizer is None or sharding.sharding_type == DATA_PARALLEL
            kernels[name] = dataclasses.replace(sharding, compute_kernel=DENSE if is_dense else FUSED)
        return ShardedScheduledEmbeddingBagCollection(
            module, kernels, env, device, qcomm_codecs_registry=self.qcomm_codecs_registry, module_fqn=module_fqn
        )

    def reshard(self, *_: Any, **__: Any) -> ShardedScheduledEmbeddingBagCollection:
        """Refused.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("reshard: tables cannot move while they train; save a checkpoint and shard anew")
