"""`ScheduledEmbeddingBagCollection` split over processes by TorchRec, with our operator on every shard."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.dist_data import KJTAllToAll
from torchrec.distributed.embedding_sharding import (
    BaseEmbeddingDist,
    BaseSparseFeaturesDist,
    EmbeddingSharding,
    EmbeddingShardingContext,
    EmbeddingShardingInfo,
)
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionContext,
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from torchrec.distributed.sharding.dp_sharding import DpPooledEmbeddingSharding
from torchrec.distributed.sharding.rw_sharding import RwSparseFeaturesDist
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingDist
from torchrec.distributed.types import (
    Awaitable,
    LazyAwaitable,
    NoWait,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardedTensor,
    ShardingEnv,
)
from torchrec.modules.embedding_configs import PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from jagged.modules.bag_collection import on_device
from jagged.modules.embedding_bags import ScheduledEmbeddingBagCollection
from jagged.modules.embedding_bags_shards import ShardLookup, optimizers_of
from jagged.modules.table_sharding import (
    DATA_PARALLEL,
    FUSED,
    ROW_WISE,
    TablesSharder,
    checked_keys,
    checked_plan,
    draw_shards,
    make_copies_alike,
)


class _CopiedSharding(DpPooledEmbeddingSharding):  # type: ignore[misc]
    """Copies of tables with a fused optimizer: each process looks up the ids of all, so that all update alike."""

    def create_input_dist(self, device: torch.device | None = None) -> _ToAll:
        return _ToAll(self._env.process_group, len(self.feature_names()), self._device)

    def create_output_dist(self, device: torch.device | None = None) -> _OwnBags:
        return _OwnBags(self._env.process_group)


class _ToAll(BaseSparseFeaturesDist):  # type: ignore[misc]
    """The ids of every process to all processes."""

    def __init__(self, pg: dist.ProcessGroup, num_features: int, device: torch.device) -> None:
        super().__init__()
        self._order = list(range(num_features)) * pg.size()
        self._order_tensor = torch.tensor(self._order, dtype=torch.int32, device=device)
        self._dist = KJTAllToAll(pg, [num_features] * pg.size())

    def forward(self, features: KeyedJaggedTensor) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        return self._dist(features.permute(self._order, self._order_tensor))


class _ToRows(BaseSparseFeaturesDist):  # type: ignore[misc]
    """Ids to the processes that have their rows; FBGEMM's kernel that deals them out does not run for a batch of no samples."""

    def __init__(self, rows: RwSparseFeaturesDist) -> None:
        super().__init__()
        self._rows = rows

    def forward(self, features: KeyedJaggedTensor) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        lengths = features.lengths()
        if lengths.numel():
            return self._rows(features)
        keys = features.keys() * self._rows._world_size
        nothing = KeyedJaggedTensor(keys, features.values(), features.weights_or_none(), lengths=lengths, stride=0)
        return self._rows._dist(nothing)


class _OwnBags(BaseEmbeddingDist):  # type: ignore[misc]
    """Of the bags of all processes those of this one; its gradients go to all."""

    def __init__(self, pg: dist.ProcessGroup) -> None:
        super().__init__()
        self._pg = pg

    def forward(self, pooled: Tensor, sharding_ctx: EmbeddingShardingContext) -> Awaitable[Tensor]:
        return NoWait(_OwnRows.apply(pooled, sharding_ctx.batch_size_per_rank, self._pg))  # type: ignore[no-untyped-call]


class _OwnRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pooled: Tensor, sizes: list[int], pg: dist.ProcessGroup) -> Tensor:
        ctx.sizes, ctx.pg = sizes, pg
        return pooled.split(sizes)[pg.rank()].clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        count, sizes = len(ctx.sizes), ctx.sizes
        everyones = grad.new_empty(sum(sizes), grad.shape[1])
        # The mean of the processes' losses, as DistributedDataParallel has it.
        copies = (grad / count).repeat(count, 1)
        dist.all_to_all_single(everyones, copies, sizes, [len(grad)] * count, group=ctx.pg)
        return everyones, None, None


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
        optimizers = optimizers_of(module)
        self._is_fused = optimizers is not None
        # The base class makes the lookups.
        self._make_lookup = functools.partial(ShardLookup, env=env, device=device, optimizers=optimizers)
        super().__init__(module, table_name_to_parameter_sharding, env, device=device, **options)
        del self._make_lookup
        self._output = module._embedding_names, module._widths, module._output_dtype
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
        make_copies_alike(self.embedding_bags, plan, env.process_group)

    def _create_lookups(self) -> None:
        for sharding, sharding_type in zip(self._embedding_shardings, self._sharding_types, strict=True):
            self._lookups.append(self._make_lookup(sharding, sharding_type))

    @classmethod
    def create_embedding_bag_sharding(cls, sharding_infos: list[EmbeddingShardingInfo], *args: Any, **kwargs: Any) -> Any:
        """Let tables of one dtype stand side by side, so that one launch reads them."""
        ordered = sorted(sharding_infos, key=lambda info: info.embedding_config.data_type.value)
        sharding = ordered[0].param_sharding
        if sharding.sharding_type == DATA_PARALLEL and sharding.compute_kernel == FUSED:
            return _CopiedSharding(ordered, *args)
        return super().create_embedding_bag_sharding(ordered, *args, **kwargs)

    def init_data_parallel(self) -> None:
        """Sum dense gradients over the processes; there are none with a fused optimizer."""
        if not self._is_fused:
            super().init_data_parallel()

    def _create_input_dist(self, input_feature_names: list[str]) -> None:
        super()._create_input_dist(input_feature_names)
        for place, sharding_type in enumerate(self._sharding_types):
            if sharding_type == ROW_WISE:
                self._input_dists[place] = _ToRows(self._input_dists[place])

    def _create_output_dist(self) -> None:
        super()._create_output_dist()
        for place, (sharding, sharding_type) in enumerate(zip(self._embedding_shardings, self._sharding_types, strict=True)):
            if sharding_type == ROW_WISE and dist.get_backend(sharding._pg) != "nccl":
                self._output_dists[place] = _exchanged_sums(sharding, self._device)
        if self._is_fused:
            # Until states are made: TorchRec 1.6 would now wrap the lookups of copies, as `init_data_parallel` does later ones'.
            self._kept_shardings: list[Any] = self._embedding_shardings
            self._embedding_shardings: list[Any] = []

    def _initialize_torch_state(self, *args: Any, **kwargs: Any) -> None:
        if self._is_fused:
            self._embedding_shardings = self._kept_shardings
        super()._initialize_torch_state(*args, **kwargs)

    def reset_parameters(self) -> None:
        """Draw new tables by their `init_fn`; copies of a data-parallel one are alike."""
        draw_shards(self._embedding_bag_configs, self.embedding_bags, self.module_sharding_plan, self._env.process_group)

    @staticmethod
    def _pre_load_state_dict_hook(
        self: ShardedScheduledEmbeddingBagCollection, state_dict: dict[str, Any], prefix: str, *args: Any
    ) -> None:
        # TorchRec takes the width of the first shard of all for that of the shards here.
        here: dict[str, Tensor] = {}
        for name in self._table_names:
            key = f"{prefix}embedding_bags.{name}.weight"
            if isinstance(state_dict.get(key), ShardedTensor):
                parts = [shard.tensor for shard in state_dict.pop(key).local_shards()]
                here[key] = torch.cat(parts) if parts else torch.empty(0)
        ShardedEmbeddingBagCollection._pre_load_state_dict_hook(self, state_dict, prefix, *args)
        state_dict.update(here)

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
        self._keys = checked_keys(features, self._embedding_bag_configs, self._keys)
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
                columns = on_device(tuple(widths), values.device)
                values = values / ctx.divisor.repeat_interleave(columns, 1, output_size=sum(widths))
            return KeyedTensor(keys=names, length_per_key=widths, values=values.to(dtype))

        awaitable.callbacks.append(finished)
        return awaitable

    @property
    def unsharded_module_type(self) -> type[ScheduledEmbeddingBagCollection]:
        """What was sharded."""
        return ScheduledEmbeddingBagCollection


def _exchanged_sums(sharding: EmbeddingSharding, device: torch.device) -> TwPooledEmbeddingDist:
    """Sums of the processes' parts where there is no reduce-scatter of batches of several sizes, as with gloo."""
    processes, dims = sharding._world_size, sharding.embedding_dims()

    def added(parts: Tensor) -> Tensor:
        return parts.view(len(parts), processes, sum(dims)).sum(1)

    return TwPooledEmbeddingDist(
        sharding._pg, [sum(dims)] * processes, [dims] * processes, device, [added], sharding.qcomm_codecs_registry
    )


class ScheduledEmbeddingBagCollectionSharder(TablesSharder, EmbeddingBagCollectionSharder):  # type: ignore[misc]
    """Lets `DistributedModelParallel` split `ScheduledEmbeddingBagCollection` over processes, with its operator on every shard.

    TorchRec plans, and moves ids and pooled embeddings between processes. Each of them looks up all that it has of one sharding
    type and data type in one launch. Output, order of its features and names of parameters are those of the unsharded module,
    and so are gradients and updates, of the mean of the processes' losses. Shards begin with the module's tables and states of
    its optimizer, or, if it is on the meta device, with new ones.

    * Table-wise, column-wise and row-wise a process updates what it has. Of `rowwise_adagrad` and `rowwise_adam` the states of a
      column shard are those of its own columns, so that updates differ from the unsharded module's.
    * Data-parallel tables are copies. Without an optimizer their gradients are averaged; with one each process looks up the ids
      of all, so that all copies are updated alike.

    Args:
        qcomm_codecs_registry: how TorchRec compresses what it sends.

    Raises:
        ValueError: when a collection is sharded, another sharding type or compute kernel, frozen tables, an optimizer of
            `apply_optimizer_in_backward`, or several column shards in one process of several widths or of no multiple of 16. In
            forward, keys that are missing or not those of the first batch in their order, no weights, or batches of several
            sizes in one KeyedJaggedTensor.

    Shape:
        As `ScheduledEmbeddingBagCollection`, for the samples of each process, which can be none. The weights of ids get no
        gradient.

    Example:
        >>> import torch.distributed as dist
        >>> from torch import nn
        >>> from torchrec.distributed import DistributedModelParallel
        >>> from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
        >>> from torchrec.distributed.types import ShardingPlan
        >>> from torchrec.modules.embedding_configs import EmbeddingBagConfig
        >>> from jagged.modules import ScheduledEmbeddingBagCollection, ScheduledEmbeddingBagCollectionSharder
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> table = EmbeddingBagConfig(name="item", embedding_dim=8, num_embeddings=100, feature_names=["clicked"])
        >>> bags, sharder = ScheduledEmbeddingBagCollection([table]), ScheduledEmbeddingBagCollectionSharder()
        >>> plan = construct_module_sharding_plan(bags, {"item": row_wise()}, sharder, device_type="cpu", local_size=1)
        >>> model = nn.ModuleDict({"bags": bags})
        >>> model = DistributedModelParallel(model, plan=ShardingPlan({"bags": plan}), sharders=[sharder])
        >>> type(model.module["bags"]).__name__
        'ShardedScheduledEmbeddingBagCollection'
        >>> dist.destroy_process_group()
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

    def shard(
        self,
        module: ScheduledEmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedScheduledEmbeddingBagCollection:
        """Return this process's part of a collection."""
        return ShardedScheduledEmbeddingBagCollection(
            module,
            checked_plan(module, params),
            env,
            device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            module_fqn=module_fqn,
        )
