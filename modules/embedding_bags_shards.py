"""The shards that one process has of a collection of embeddings, as TorchRec looks them up, saves and updates them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor, nn
from torchrec.distributed.batched_embedding_kernel import BaseBatchedEmbeddingBag, EmbeddingFusedOptimizer
from torchrec.distributed.composable.table_batched_embedding_slice import TableBatchedEmbeddingSlice
from torchrec.distributed.embedding_lookup import GroupedEmbeddingsLookup, GroupedPooledEmbeddingsLookup
from torchrec.distributed.embedding_sharding import EmbeddingSharding
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig
from torchrec.distributed.train_pipeline.runtime_forwards import EmbeddingPipelinedForward, InSyncEmbeddingPipelinedForward
from torchrec.distributed.types import ShardingEnv, ShardingType
from torchrec.modules.embedding_configs import PoolingType
from torchrec.optim.fused import EmptyFusedOptimizer, FusedOptimizer, FusedOptimizerModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from jagged.modules.embedding_bags import DTYPES
from jagged.modules.table_sharding import DATA_PARALLEL, ROW_WISE, ROWS_OF_HOSTS, update_of
from jagged.modules.table_storage import states_of_tables
from jagged.modules.trained_tables import TrainedTables
from jagged.ops import BagLayout, BagOptimizer, JointUpdate, embedding_bags


class Optimizers(NamedTuple):
    """What shards take over of the unsharded module's fused optimizers."""

    make: Callable[[BagLayout, torch.device], BagOptimizer]
    # By table and name; none of a module on the meta device.
    states: dict[str, dict[str, Tensor]]


def optimizers_of(module: TrainedTables) -> Optimizers | None:
    """What a module's shards take over; None where it has no fused optimizer."""
    update = update_of(module)
    if update is None:
        return None
    states: dict[str, dict[str, Tensor]] = {}
    for part in module._parts:
        if part.tables.optimizer is not None:
            states.update(zip(part.names, states_of_tables(part.tables.optimizer), strict=True))
    return Optimizers(update, states)


class TableShard(NamedTuple):
    """A part of a table that a process has.

    Attributes:
        table: its name.
        weight: `[rows, width]`, a view.
        states: by name views of its optimizer's states, as `TrainedTables.optimizer_states` has them; nothing without one.
    """

    table: str
    weight: Tensor
    states: dict[str, Tensor]


class ShardedTables:
    """What sharded collections tell of the shards that this process has, and when they may be looked up."""

    _lookups: list[Any]
    training: bool

    def compute_and_output_dist(self, ctx: Any, input: Any) -> Any:
        """Look up and send back, unless a train pipeline asks for it before the tables' last update.

        Raises:
            RuntimeError: in training, TorchRec's semi-synchronous pipeline, which looks up a batch before the backward pass of
                the one before, or its fused pipeline, which looks up after that pass, beside the optimizer's step, where tables
                are updated by that step.
        """
        forward: Any = getattr(self, "forward", None)
        if self.training and isinstance(forward, EmbeddingPipelinedForward):
            if not isinstance(forward, InSyncEmbeddingPipelinedForward):
                raise RuntimeError(
                    "train pipeline: expected one that looks up after the update before, got the semi-synchronous one, whose "
                    "rows are a step old; use TrainPipelineSparseDist"
                )
            if any(bags.optimizer is None or bags.updates.holds for bags in self.storages):
                raise RuntimeError(
                    "train pipeline: expected one that looks up after the update before, got the fused one, which looks up "
                    "beside the optimizer's step, and tables that this step updates; use TrainPipelineSparseDist, or give the "
                    "collection an optimizer, whose updates are not held"
                )
        return super().compute_and_output_dist(ctx, input)  # type: ignore[misc]

    @property
    def storages(self) -> list[_Bags]:
        """What has the shards: one for each sharding type and data type of which this process has any."""
        return [bags for lookup in self._lookups for bags in lookup._emb_modules]

    @property
    def optimizers(self) -> list[BagOptimizer]:
        """The fused optimizers of the shards. A schedule fills their `learning_rate`, a tensor."""
        return [bags.optimizer for bags in self.storages if bags.optimizer is not None]

    def shards(self) -> list[TableShard]:
        """The shards of this process, with views of weights and states."""
        return [shard for bags in self.storages for shard in bags.shards()]


class _Averaged(SplitTableBatchedEmbeddingBagsCodegen):  # type: ignore[misc]
    """What `DMPCollection` averages over replicas. It asks kernels of FBGEMM's type alone; nothing else is that kernel's."""

    def __init__(self, bags: _Bags) -> None:
        nn.Module.__init__(self)
        # No child, for it is the parent.
        self.__dict__["_bags"] = bags

    def split_embedding_weights(self) -> list[Tensor]:
        """The storage, whose layout is the same in all replicas."""
        return [self._bags.weights.detach()]

    def get_optimizer_state(self) -> list[dict[str, Tensor]]:
        """The optimizer's states of that storage, by the one name that is asked for; the number of steps is the same anyway."""
        optimizer = self._bags.optimizer
        return [] if optimizer is None else [{"sum": getattr(optimizer, name)} for name in optimizer.states_of]


class _Bags(BaseBatchedEmbeddingBag):  # type: ignore[misc]
    """The shards that a process has of tables of one dtype, in one storage; dense gradients."""

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        pg: dist.ProcessGroup,
        device: torch.device,
        sharding_type: str,
        optimizers: Optimizers | None,
    ) -> None:
        super().__init__(config, pg, device)
        tables = config.embedding_tables
        # Where rows are split, bags are parts of the whole ones: their sums are divided when they have come together.
        is_whole = sharding_type not in (ROW_WISE, *ROWS_OF_HOSTS)
        means = [table.pooling == PoolingType.MEAN and is_whole for table in tables for _ in table.feature_names]
        self.layout = BagLayout(
            # A process can have no rows of a small table. No id of the table is sent there.
            rows=tuple(max(1, rows) for rows in self._local_rows),
            widths=tuple(self._local_cols),
            tables=tuple(self._feature_table_map),
            means=tuple(means),
            sequences=tuple(table.pooling == PoolingType.NONE for table in tables for _ in table.feature_names),
        )
        storage = torch.zeros(self.layout.num_elements, dtype=DTYPES[config.data_type], device=device)
        self.weights = nn.Parameter(storage, requires_grad=optimizers is None)
        self.optimizer: BagOptimizer | None = None
        self._leaf = storage.requires_grad_() if optimizers is not None else None
        self._param_per_table = dict(self._parameters_of_tables())
        if sharding_type != DATA_PARALLEL:
            self._averaged = _Averaged(self)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return embedding_bags(
            self.weights if self._leaf is None else self._leaf,
            self.layout,
            features.values(),
            features.offsets(),
            optimizer=self.optimizer,
            **self._options(features),
        )

    def _options(self, features: KeyedJaggedTensor) -> dict[str, Any]:
        return {
            "per_sample_weights": features.weights() if self._config.is_weighted else None,
            "batch_sizes": features.stride_per_key() if features.variable_stride_per_key() else None,
            "sequence_totals": features.length_per_key() if self.layout.has_sequences else None,
        }

    @property
    def emb_module(self) -> _Bags:
        """What has `split_embedding_weights`."""
        return self

    def split_embedding_weights(self) -> list[Tensor]:
        """Each shard `[rows, width]`."""
        views = self.layout.views(self.weights.detach())
        return [view[:rows] for view, rows in zip(views, self._local_rows, strict=True)]

    def states(self) -> list[dict[str, Tensor]]:
        """For each shard its states by name."""
        return [{} for _ in self._local_rows]

    def shards(self) -> list[TableShard]:
        """Each shard with its states."""
        of_shards = zip(self._config.embedding_tables, self.split_embedding_weights(), self.states(), strict=True)
        return [TableShard(table.name, weight, states) for table, weight, states in of_shards]

    def named_parameters(self, prefix: str = "", *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The storage, by a name that no other one of the lookup has."""
        name = "/".join(table.name for table in self._config.embedding_tables) + ".weight"
        yield f"{prefix}.{name}" if prefix else name, self.weights

    def _parameters_of_tables(self) -> Iterator[tuple[str, TableBatchedEmbeddingSlice]]:
        """For each table its parameter, in which column shards of one process stand one below the other."""
        first = 0
        for name, of_table in groupby(self._config.embedding_tables, key=lambda table: table.name):
            count, width, start = len(list(of_table)), self._local_cols[first], self.layout.starts[first]
            rows = count * self._local_rows[first]
            yield name, TableBatchedEmbeddingSlice(self.weights, start, start + rows * width, rows, width)
            first += count


class _FusedBags(_Bags, FusedOptimizerModule):  # type: ignore[misc]
    """The same, whose rows that were read are updated in the backward pass."""

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        pg: dist.ProcessGroup,
        device: torch.device,
        sharding_type: str,
        optimizers: Optimizers,
    ) -> None:
        super().__init__(config, pg, device, sharding_type, optimizers)
        self.optimizer = optimizers.make(self.layout, self.weights.device)
        self.updates = JointUpdate(self.weights, self.optimizer)
        for table, own in zip(config.embedding_tables, self.states(), strict=True):
            whole, offsets = optimizers.states.get(table.name, {}), getattr(table.local_metadata, "shard_offsets", (0, 0))
            for name, state in own.items() if whole else ():
                # A row's state has no columns, and the number of steps no rows.
                place = tuple(slice(begin, begin + size) for begin, size in zip(offsets, state.shape, strict=False))
                state.copy_(whole[name][place])
        self._fused = _CopiesOptimizer(self) if sharding_type == DATA_PARALLEL else EmbeddingFusedOptimizer(config, self, pg)
        for name, weight in self._fused.params.items():
            # One for all shards, so that a checkpoint fits any plan.
            self._fused.state[weight][name.replace(".weight", ".step")] = self.optimizer.step
        for parameter in self._param_per_table.values():
            # By this TorchRec knows what no other optimizer is to update.
            parameter._in_backward_optimizers = [EmptyFusedOptimizer()]

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        if not self.updates.holds:
            return super().forward(features)
        return self.updates.embedding_bags(self.layout, features.values(), features.offsets(), **self._options(features))

    def hold(self, holds: bool) -> None:
        """Let the backward pass keep gradients for `updates.step`, or update by itself again; what is kept is dropped."""
        self.updates.drop()
        self.updates.holds = holds

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
        """For each shard what is split as its table is, by TorchRec's names."""
        names = {"first": "momentum1", "second": "second", "last": "last"}
        return [{names[name]: state for name, state in of.items() if name in names} for of in self.states()]

    def get_learning_rate(self) -> float:
        """What `param_groups` begin with."""
        assert self.optimizer is not None
        return float(self.optimizer.learning_rate)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Take over what a schedule has set in `param_groups`."""
        assert self.optimizer is not None
        self.optimizer.learning_rate.fill_(learning_rate)


class _CopiesOptimizer(FusedOptimizer):  # type: ignore[misc]
    """The optimizer of tables of which every process has a copy: their states are whole, and so is what is saved of them."""

    def __init__(self, bags: _FusedBags) -> None:
        self._bags = bags
        parameters = bags._param_per_table
        states = {
            parameter: {f"{name}.{of}": state for of, state in own.items()}
            for (name, parameter), own in zip(parameters.items(), bags.get_optimizer_state(), strict=True)
        }
        groups = [{"params": list(parameters.values()), "lr": bags.get_learning_rate()}]
        super().__init__({f"{name}.weight": parameter for name, parameter in parameters.items()}, states, groups)

    def step(self, closure: Any = None) -> None:
        self._bags.set_learning_rate(self.param_groups[0]["lr"])

    def zero_grad(self, set_to_none: bool = False) -> None:
        self._bags.set_learning_rate(self.param_groups[0]["lr"])


class _OneLaunch:
    """A lookup of all tables that a process has by one sharding type: a launch for each dtype."""

    _make: Callable[[GroupedEmbeddingConfig], _Bags]

    def _merged(
        self, sharding: EmbeddingSharding, sharding_type: str, pg: Any, device: torch.device, optimizers: Optimizers | None
    ) -> list[GroupedEmbeddingConfig]:
        """The tables by dtype, whose kernels are ours until `_forget`."""
        kernel: Any = _Bags if optimizers is None else _FusedBags
        # No attribute of a module can be set before it is one.
        self.__dict__["_make"] = lambda config: kernel(config, pg, device, sharding_type, optimizers)
        here = sharding._grouped_embedding_configs_per_rank[sharding._rank]
        return [
            dataclasses.replace(groups[0], embedding_tables=[table for group in groups for table in group.embedding_tables])
            for _, of_dtype in groupby(here, key=lambda group: group.data_type)
            for groups in [list(of_dtype)]
        ]

    def _forget(self) -> None:
        # It holds the whole module's states.
        del self.__dict__["_make"]

    def _create_embedding_kernel(self, config: GroupedEmbeddingConfig, *_: Any) -> _Bags:
        return self._make(config)


class ShardLookup(_OneLaunch, GroupedPooledEmbeddingsLookup):  # type: ignore[misc]
    """Of pooled embeddings, sums and means together."""

    def __init__(
        self,
        sharding: EmbeddingSharding,
        sharding_type: str,
        env: ShardingEnv,
        device: torch.device,
        optimizers: Optimizers | None,
    ) -> None:
        pg = getattr(sharding, "_pg", env.process_group)
        super().__init__(
            self._merged(sharding, sharding_type, pg, device, optimizers),
            device,
            pg,
            scale_weight_gradients=sharding_type != DATA_PARALLEL,
            sharding_type=ShardingType(sharding_type),
            env=env,
        )
        self._forget()

    def forward(self, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Look up; where features have batch sizes of their own, flat, process after process."""
        if not sparse_features.variable_stride_per_key() or not self._emb_modules:
            return super().forward(sparse_features)
        parts = sparse_features.split(self._feature_splits)
        bags: list[Tensor] = []
        for module, features, pooled in zip(self._emb_modules, parts, self._forward(parts), strict=True):
            of_features = zip(features.stride_per_key_per_rank(), module.layout.feature_widths, strict=True)
            bags += pooled.split([size * width for sizes, width in of_features for size in sizes])
        processes = len(sparse_features.stride_per_key_per_rank()[0])
        return torch.cat([of for process in range(processes) for of in bags[process::processes]])

    @property
    def module(self) -> ShardLookup:
        """As in DistributedDataParallel, whose place it takes for copies with a fused optimizer."""
        return self


class SequenceShardLookup(_OneLaunch, GroupedEmbeddingsLookup):  # type: ignore[misc]
    """Of rows that are not pooled."""

    def __init__(
        self,
        sharding: EmbeddingSharding,
        sharding_type: str,
        env: ShardingEnv,
        device: torch.device,
        optimizers: Optimizers | None,
    ) -> None:
        pg = getattr(sharding, "_pg", env.process_group)
        super().__init__(self._merged(sharding, sharding_type, pg, device, optimizers), pg, device, env)
        self._forget()
