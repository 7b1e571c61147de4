"""`ScheduledEmbeddingBagCollection` split over processes by TorchRec, with our operator on every shard."""

from __future__ import annotations

import copy
import functools
import operator
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.dist_data import KJTAllToAll, PooledEmbeddingsAllToAll, VariableBatchPooledEmbeddingsAllToAll
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
    VariableBatchEmbeddingBagCollectionAwaitable,
)
from torchrec.distributed.sharding.dp_sharding import DpPooledEmbeddingSharding
from torchrec.distributed.sharding.grid_sharding import GridPooledEmbeddingSharding
from torchrec.distributed.sharding.rw_sharding import RwSparseFeaturesDist
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingDist
from torchrec.distributed.sharding.twrw_sharding import (
    TwRwPooledEmbeddingDist,
    TwRwPooledEmbeddingSharding,
    TwRwSparseFeaturesDist,
)
from torchrec.distributed.types import (
    Awaitable,
    LazyAwaitable,
    LazyGetItemMixin,
    NoWait,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardedTensor,
    ShardingEnv,
)
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import reorder_inverse_indices
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from jagged.modules.bag_collection import Lookups, bags_of, on_device, refuse_uneven, refuse_wrong_inverse
from jagged.modules.embedding_bags import ScheduledEmbeddingBagCollection
from jagged.modules.embedding_bags_shards import ShardedTables, ShardLookup, optimizers_of
from jagged.modules.table_sharding import (
    DATA_PARALLEL,
    FUSED,
    GRID_SHARD,
    OF_HOSTS,
    ROW_WISE,
    ROWS_OF_HOSTS,
    SHARDING_TYPES,
    TablesSharder,
    check_hosts,
    check_replicas,
    checked_keys,
    checked_plan,
    draw_shards,
    keep_for_readers,
    make_copies_alike,
)

# Kinds of a process's first batch; the largest of all processes' counts.
_PLAIN, _VARIED, _REFUSED = range(3)
# By it TorchRec makes exchanges of both kinds.
_VARIED_CONTEXT = EmbeddingShardingContext(variable_batch_per_feature=True)


class _CopiedSharding(DpPooledEmbeddingSharding):  # type: ignore[misc]
    """Copies of tables with a fused optimizer: each process looks up the ids of all, so that all update alike."""

    def create_input_dist(self, device: torch.device | None = None) -> _ToAll:
        return _ToAll(self._env.process_group, len(self.feature_names()), self._device)

    def create_output_dist(self, device: torch.device | None = None) -> _OwnBags:
        return _OwnBags(self._env.process_group, self.embedding_dims())


class _GridSharding(GridPooledEmbeddingSharding):  # type: ignore[misc]
    """TorchRec's, where features can have batch sizes of their own: as table-row-wise, with columns put together."""

    def uncombined_embedding_dims(self) -> list[int]:
        return list(self._embedding_dims)

    def uncombined_embedding_names(self) -> list[str]:
        return list(self._embedding_names)

    def create_output_dist(self, device: torch.device | None = None) -> TwRwPooledEmbeddingDist:
        output, of_one_size = TwRwPooledEmbeddingSharding.create_output_dist(self, device), super().create_output_dist(device)
        for made in (output, of_one_size):
            made._create_output_dist_modules(_VARIED_CONTEXT)
        output._cross_dist = of_one_size._cross_dist
        return output


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

    def __init__(self, rows: RwSparseFeaturesDist | TwRwSparseFeaturesDist) -> None:
        super().__init__()
        self._rows = rows

    def forward(self, features: KeyedJaggedTensor) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        lengths = features.lengths()
        if lengths.numel():
            return self._rows(features)
        if isinstance(self._rows, TwRwSparseFeaturesDist):
            keys = [features.keys()[place % len(features.keys())] for place in self._rows._sf_staggered_shuffle]
        else:
            keys = features.keys() * self._rows._world_size
        sizes: dict[str, Any] = {"stride": 0}
        if features.variable_stride_per_key():
            sizes = {"stride_per_key_per_rank": [[0]] * len(keys)}
        return self._rows._dist(KeyedJaggedTensor(keys, features.values(), features.weights_or_none(), lengths, **sizes))


class _OwnBags(BaseEmbeddingDist):  # type: ignore[misc]
    """Of the bags of all processes those of this one; its gradients go to all."""

    def __init__(self, pg: dist.ProcessGroup, widths: list[int]) -> None:
        super().__init__()
        self._pg, self._widths = pg, widths

    def forward(self, pooled: Tensor, sharding_ctx: EmbeddingShardingContext) -> Awaitable[Tensor]:
        sizes = sharding_ctx.batch_size_per_rank
        if sharding_ctx.variable_batch_per_feature:
            # Flat, process after process.
            of_processes = sharding_ctx.batch_size_per_rank_per_feature
            sizes = [sum(map(operator.mul, of_features, self._widths)) for of_features in of_processes]
        return NoWait(_OwnRows.apply(pooled, sizes, self._pg))  # type: ignore[no-untyped-call]


class _OwnRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pooled: Tensor, sizes: list[int], pg: dist.ProcessGroup) -> Tensor:
        ctx.sizes, ctx.pg = sizes, pg
        return pooled.split(sizes)[pg.rank()].clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        count, sizes = len(ctx.sizes), ctx.sizes
        everyones = grad.new_empty(sum(sizes), *grad.shape[1:])
        # The mean of the processes' losses, as DistributedDataParallel has it.
        copies = torch.cat([grad / count] * count)
        dist.all_to_all_single(everyones, copies, sizes, [len(grad)] * count, group=ctx.pg)
        return everyones, None, None


def _fbgemm_selects(samples: int, widths: list[int], device: torch.device) -> bool:
    """Whether FBGEMM's kernel gives samples their rows: not where there are none; on a GPU it reads four numbers at a time."""
    return samples > 0 and (device.type == "cpu" or not any(width % 4 for width in widths))


class _OfSamples(LazyGetItemMixin[str, Tensor], LazyAwaitable[KeyedTensor]):  # type: ignore[misc]
    """The pooled embeddings of samples, from rows of batches of several sizes, where FBGEMM's kernel does not select them."""

    def __init__(self, rows: VariableBatchEmbeddingBagCollectionAwaitable) -> None:
        super().__init__()
        self._rows = rows

    def _wait_impl(self) -> KeyedTensor:
        rows = self._rows
        sizes, widths = rows._batch_size_per_feature_pre_a2a, rows._uncombined_embedding_dims
        flat = torch.cat([part.wait() for part in rows._awaitables])
        _, inverse = rows._inverse_indices
        order = rows._inverse_indices_permute_indices
        of_features = (inverse if order is None else inverse[order]).view(len(widths), -1)
        parts = flat.split(list(map(operator.mul, sizes, widths)))
        # Also of no samples: the backward pass sends what other processes wait for.
        of_samples = [part.view(-1, width)[of] for part, width, of in zip(parts, widths, of_features, strict=True)]
        for resized in getattr(rows, "_resize_awaitables", None) or ():
            resized.wait()
        values = rows._permute_op(torch.cat(of_samples, 1))
        return KeyedTensor(rows._embedding_names, rows._embedding_dims, values)


class ShardedScheduledEmbeddingBagCollection(ShardedTables, ShardedEmbeddingBagCollection):  # type: ignore[misc]
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
        self._features = list(dict.fromkeys(name for table in self._embedding_bag_configs for name in table.feature_names))
        # Whether features have batch sizes of their own where they are exchanged; unknown before the first batch.
        self._is_varied: bool | None = None
        of_rows = {name for name, sharding in plan.items() if sharding.sharding_type in (ROW_WISE, *ROWS_OF_HOSTS)}
        # For each feature of the output, if it is a mean that is a sum until all its rows have come together, its key.
        self._undivided = [
            feature if table.pooling == PoolingType.MEAN and table.name in of_rows else None
            for table in self._embedding_bag_configs
            for feature in table.feature_names
        ]
        # TorchRec would divide the features of other sharding types too.
        self._has_mean_pooling_callback = False
        if module.device.type == "cpu":
            # As TorchRec does with tables on a GPU.
            self.load_state_dict(module.state_dict())
        make_copies_alike(self.embedding_bags, plan, env)

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
        if sharding.sharding_type == GRID_SHARD:
            return _GridSharding(ordered, *args, qcomm_codecs_registry=kwargs["qcomm_codecs_registry"])
        return super().create_embedding_bag_sharding(ordered, *args, **kwargs)

    def init_data_parallel(self) -> None:
        """Sum dense gradients over the processes; there are none with a fused optimizer."""
        if not self._is_fused:
            super().init_data_parallel()

    def _create_input_dist(self, input_feature_names: list[str]) -> None:
        super()._create_input_dist(input_feature_names)
        for place, sharding_type in enumerate(self._sharding_types):
            if sharding_type in (ROW_WISE, *ROWS_OF_HOSTS):
                self._input_dists[place] = _ToRows(self._input_dists[place])

    def _create_output_dist(self) -> None:
        super()._create_output_dist()
        if not _has_reduce_scatter(self._env.process_group):
            self._exchange_sums()
        if self._is_fused:
            # Until states are made: TorchRec 1.6 would now wrap the lookups of copies, as `init_data_parallel` does later ones'.
            self._kept_shardings: list[Any] = self._embedding_shardings
            self._embedding_shardings: list[Any] = []

    def _exchange_sums(self) -> None:
        """Let processes exchange their parts of sums, and add them up."""
        for place, (sharding, sharding_type) in enumerate(zip(self._embedding_shardings, self._sharding_types, strict=True)):
            if sharding_type == ROW_WISE:
                self._output_dists[place] = _ExchangedSums(sharding, self._device)
            elif sharding_type in ROWS_OF_HOSTS:
                of_hosts = self._output_dists[place]
                if of_hosts._cross_dist is None:
                    of_hosts._create_output_dist_modules(_VARIED_CONTEXT)
                of_hosts._intra_dist = of_hosts._variable_intra_dist = _HostSums(of_hosts)

    def _initialize_torch_state(self, *args: Any, **kwargs: Any) -> None:
        if self._is_fused:
            self._embedding_shardings = self._kept_shardings
        super()._initialize_torch_state(*args, **kwargs)

    def reset_parameters(self) -> None:
        """Draw new tables by their `init_fn`; copies of a data-parallel one are alike."""
        draw_shards(self._embedding_bag_configs, self.embedding_bags, self.module_sharding_plan, self._env)

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
        try:
            self._check(features)
        except ValueError:
            if self._is_varied is None:
                # The others ask what this process has.
                self._of_all(_REFUSED)
            raise
        features, rows = self._as_exchanged(features)
        if any(self._undivided):
            of_keys = dict(zip(features.keys(), features.lengths().clamp(min=1).split(features.stride_per_key()), strict=True))
            divisors = {name: of_keys[name] if rows is None else of_keys[name][rows[name]] for name in self._features}
            ones = torch.ones_like(divisors[self._features[0]])
            ctx.divisor = torch.stack([ones if key is None else divisors[key] for key in self._undivided], 1)
        return super().input_dist(ctx, features)

    def _check(self, features: KeyedJaggedTensor) -> None:
        self._keys = checked_keys(features, self._embedding_bag_configs, self._keys)
        if self._is_weighted and features.weights_or_none() is None:
            raise ValueError("features: expected weights, as is_weighted says, got none; give KeyedJaggedTensor weights")
        if _has_own_sizes(features):
            refuse_uneven(features)
            # Rows without samples are no fault: this process may have none where others do.
            refuse_wrong_inverse(features, self._features, is_needed=features.inverse_indices_or_none() is None)

    def _as_exchanged(self, features: KeyedJaggedTensor) -> tuple[KeyedJaggedTensor, dict[str, Tensor] | None]:
        """A batch as all processes exchange theirs, and, where features have batch sizes of their own, each sample's rows.

        No process knows what the others' batches are like, and to ask costs an exchange; so they ask once, of the first batch.
        """
        own = _has_own_sizes(features)
        if self._is_varied is None:
            found = self._of_all(_VARIED if own else _PLAIN)
            if found == _REFUSED:
                raise ValueError("features: another process refused its first batch; the error there says why")
            self._is_varied = found == _VARIED
            if self._is_varied and _has_reduce_scatter(self._env.process_group):
                # What is exchanged then is as many bytes, and each process may have as many samples as it likes.
                self._exchange_sums()
        if not own and not self._is_varied:
            return features, None
        sizes = features.stride_per_key()
        if (inverse := features.inverse_indices_or_none()) is None:
            samples = torch.arange(sizes[features.keys().index(self._features[0])], device=features.device())
            of_features = samples.expand(len(self._features), -1)
        else:
            of_features = reorder_inverse_indices(inverse, self._features)
        rows = dict(zip(self._features, of_features, strict=True))
        if not self._is_varied:
            return _of_samples(features, rows), None
        varied = KeyedJaggedTensor(
            features.keys(),
            features.values(),
            features.weights_or_none(),
            features.lengths(),
            stride_per_key_per_rank=[[size] for size in sizes],
            length_per_key=features.length_per_key_or_none(),
            # Of these keys in this order always, for TorchRec looks at those of the first batch alone.
            inverse_indices=(self._features, of_features),
        )
        return varied, rows

    def _of_all(self, kind: int) -> int:
        """The largest of the processes' kinds of a batch."""
        found = torch.tensor(kind, device=self._device)
        dist.all_reduce(found, dist.ReduceOp.MAX, self._env.process_group)
        return int(found)

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
        keep_for_readers(awaitable._awaitables)
        names, widths, dtype = self._output
        if ctx.variable_batch_per_feature:
            samples, parts = ctx.inverse_indices[1].shape[-1], awaitable._uncombined_embedding_dims
            if not _fbgemm_selects(samples, parts, self._device):
                awaitable = _OfSamples(awaitable)

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


def _has_reduce_scatter(processes: dist.ProcessGroup) -> bool:
    """Whether sums of rows' parts, of batches of one size, are made on the way."""
    return bool(dist.get_backend(processes) == "nccl")


def _has_own_sizes(features: KeyedJaggedTensor) -> bool:
    """Whether the rows of features are other ones than the samples."""
    return features.variable_stride_per_key() or features.inverse_indices_or_none() is not None


def _of_samples(features: KeyedJaggedTensor, rows: dict[str, Tensor]) -> KeyedJaggedTensor:
    """The bags of each sample, those that samples share several times; none of keys that no table reads."""
    keys, firsts = features.keys(), accumulate(features.stride_per_key(), initial=0)
    of_keys = {key: first + rows[key] for key, first in zip(keys, firsts, strict=False) if key in rows}
    bags = torch.cat(list(of_keys.values()))
    lengths = features.lengths()[bags]
    lookups = Lookups(features.values(), features.offsets(), features.weights_or_none(), None)
    ids, _, weights, _ = bags_of(lookups, bags, int(lengths.sum()))
    of_samples = dict(zip(of_keys, lengths.view(len(of_keys), -1), strict=True))
    none = torch.zeros_like(of_samples[next(iter(of_keys))])
    lengths = torch.cat([of_samples.get(key, none) for key in keys])
    return KeyedJaggedTensor(keys, ids, weights, lengths, stride=len(none))


class _ExchangedSums(TwPooledEmbeddingDist):  # type: ignore[misc]
    """Sums of the processes' parts without a reduce-scatter: of batches of several sizes, and with gloo of all."""

    def __init__(self, sharding: EmbeddingSharding, device: torch.device) -> None:
        self._processes, self._width = sharding._world_size, sum(sharding.embedding_dims())
        dims = [sharding.embedding_dims()] * self._processes
        widths = [self._width] * self._processes
        super().__init__(sharding._pg, widths, dims, device, qcomm_codecs_registry=sharding.qcomm_codecs_registry)

    def forward(self, local_embs: Tensor, sharding_ctx: EmbeddingShardingContext) -> Awaitable[Tensor]:
        is_varied = sharding_ctx.variable_batch_per_feature
        if is_varied:
            # Every process has a part of every feature.
            sizes = sharding_ctx.batch_size_per_feature_pre_a2a * self._processes
            sharding_ctx = copy.copy(sharding_ctx)
            sharding_ctx.batch_size_per_feature_pre_a2a = sizes
        awaitable = super().forward(local_embs, sharding_ctx)

        def added(parts: Tensor) -> Tensor:
            if is_varied:
                return parts.view(self._processes, -1).sum(0)
            return parts.view(len(parts), self._processes, self._width).sum(1)

        awaitable.callbacks.append(added)
        return awaitable


class _HostSums(nn.Module):
    """The same of the parts of a host's processes."""

    def __init__(self, output: TwRwPooledEmbeddingDist) -> None:
        super().__init__()
        hosts, device, codecs = output._intra_pg, output._device, output._cross_codecs
        self._rank, self._processes = hosts.rank(), hosts.size()
        widths = output._emb_dim_per_node_per_feature[output._rank // self._processes]
        self._width = sum(widths)
        self._of_one_size = PooledEmbeddingsAllToAll(hosts, [self._width] * self._processes, device, codecs=codecs)
        self._varied = VariableBatchPooledEmbeddingsAllToAll(hosts, [widths] * self._processes, device, codecs=codecs)

    def forward(
        self,
        local_embs: Tensor,
        input_splits: list[int] | None = None,
        batch_size_per_rank_per_feature: list[list[int]] | None = None,
        embedding_dims: list[int] | None = None,
    ) -> Awaitable[Tensor]:
        if (sizes := batch_size_per_rank_per_feature) is None:
            parts = self._of_one_size(local_embs, input_splits).wait()
            return NoWait(parts.view(len(parts), self._processes, self._width).sum(1))
        # None of a host without tables.
        own = sizes[self._rank] if sizes else []
        return NoWait(self._varied(local_embs, sizes, own * self._processes).wait().view(self._processes, -1).sum(0))


class ScheduledEmbeddingBagCollectionSharder(TablesSharder, EmbeddingBagCollectionSharder):  # type: ignore[misc]
    """Lets `DistributedModelParallel` split `ScheduledEmbeddingBagCollection` over processes, with its operator on every shard.

    TorchRec plans, and moves ids and pooled embeddings between processes. Each of them looks up all that it has of one sharding
    type and data type in one launch. Output, order of its features and names of parameters are those of the unsharded module,
    and so are gradients and updates, of the mean of the processes' losses. Shards begin with the module's tables and states of
    its optimizer, or, if it is on the meta device, with new ones.

    * Table-wise, column-wise and row-wise a process updates what it has. Of `rowwise_adagrad` and `rowwise_adam` the states of a
      column shard are those of its own columns, so that updates differ from the unsharded module's.
    * Table-column-wise the processes of one host have columns of a table each, table-row-wise rows. In a grid each host has
      columns, of which its processes have rows each. `LOCAL_WORLD_SIZE`, which torchrun sets, says how many processes a host has.
      A planner chooses a grid only where its constraints name it.
    * Data-parallel tables are copies. Without an optimizer their gradients are averaged; with one each process looks up the ids
      of all, so that all copies are updated alike.
    * The first batch says whether keys are exchanged with batch sizes of their own: if they have them in any process. All
      processes run it together. Later batches of the other kind give the same, at more cost, but for rows of bags that no sample
      has: where bags of samples are exchanged they are not read, and so not moved by momentum.
    * Under `DMPCollection` replicas begin with the first one's shards, and `sync` averages shards and states.

    An optimizer that `apply_optimizer_in_backward` gave all parameters is the optimizer of the shards: SGD, Adagrad,
    RowWiseAdagrad, Adam, LAMB, PartialRowWiseAdam or PartialRowWiseLAMB, of PyTorch or TorchRec.

    Args:
        qcomm_codecs_registry: how TorchRec compresses what it sends.

    Raises:
        ValueError: when a collection is sharded, another sharding type or compute kernel, frozen tables, an optimizer of
            `apply_optimizer_in_backward` that has no counterpart, several column shards in one process of several widths or of
            no multiple of 16, or of the sharding types of hosts shards that do not fit the hosts, a table of one row in a grid,
            or a group that is not all processes. Under `DMPCollection` its strategy `FULLY_SHARDED`, or `decay_missed_steps`. In
            forward, before anything is sent, keys that are missing or not those of the first batch in their order, no weights,
            batches of several sizes without inverse indices, inverse indices that a feature does not have, another number of
            lengths than the sum of the sizes, and on a CPU wrong inverse indices; a first batch that another process refuses.

    Shape:
        As `ScheduledEmbeddingBagCollection`, for the samples of each process, which can be none; with a batch size for each key
        `[B, sum of the features' widths]`, of `[keys, B]` inverse indices. The weights of ids get no gradient.

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

    _types = (*SHARDING_TYPES, *OF_HOSTS)

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
        plan = checked_plan(module, params, self._types)
        check_replicas(module, env)
        check_hosts(module.embedding_bag_configs(), plan, env)
        return ShardedScheduledEmbeddingBagCollection(
            module,
            plan,
            env,
            device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            module_fqn=module_fqn,
        )
