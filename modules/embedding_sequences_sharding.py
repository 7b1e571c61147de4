"""`ScheduledEmbeddingCollection` split over processes by TorchRec, with our operator on every shard."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torchrec.distributed.embedding import (
    EmbeddingCollectionContext,
    EmbeddingCollectionSharder,
    ShardedEmbeddingCollection,
)
from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.types import Awaitable, LazyAwaitable, ParameterSharding, QuantizedCommCodecs, ShardingEnv
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from jagged.modules.bag_collection import lengths_per_key
from jagged.modules.embedding_bags_shards import SequenceShardLookup, ShardedTables, optimizers_of
from jagged.modules.embedding_sequences import ScheduledEmbeddingCollection
from jagged.modules.table_sharding import (
    COLUMN_WISE,
    DATA_PARALLEL,
    TablesSharder,
    check_replicas,
    checked_keys,
    checked_plan,
    draw_shards,
    keep_for_readers,
    make_copies_alike,
    update_of,
)


class _Context(EmbeddingCollectionContext):  # type: ignore[misc]
    """TorchRec's, and the lengths of a batch by key; TorchRec's own are those of what was sent."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: dict[str, Tensor] = {}

    def record_stream(self, stream: torch.Stream) -> None:
        super().record_stream(stream)
        for of_key in self.lengths.values():
            of_key.record_stream(stream)


class ShardedScheduledEmbeddingCollection(ShardedTables, ShardedEmbeddingCollection):  # type: ignore[misc]
    """A `ScheduledEmbeddingCollection` of which each process has shards; `ScheduledEmbeddingCollectionSharder` makes it."""

    def __init__(
        self,
        module: ScheduledEmbeddingCollection,
        table_name_to_parameter_sharding: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        **options: Any,
    ) -> None:
        device = torch.device("cpu") if device is None else device
        # The base class makes the lookups.
        self._make_lookup = functools.partial(SequenceShardLookup, env=env, device=device, optimizers=optimizers_of(module))
        super().__init__(module, table_name_to_parameter_sharding, env, device=device, **options)
        del self._make_lookup
        named = zip(module.embedding_configs(), module.embedding_names_by_table(), strict=True)
        # For each name in the output its key.
        self._features = {name: key for table, names in named for name, key in zip(names, table.feature_names, strict=True)}
        self._output_dtype = module._output_dtype
        self._keys: list[str] | None = None
        make_copies_alike(self.embeddings, self.module_sharding_plan, env)

    def _create_lookups(self) -> None:
        for sharding_type, sharding in self._sharding_type_to_sharding.items():
            self._lookups.append(self._make_lookup(sharding, sharding_type))

    @classmethod
    def create_embedding_sharding(
        cls, sharding_type: str, sharding_infos: list[EmbeddingShardingInfo], *args: Any, **kwargs: Any
    ) -> Any:
        """Let tables of one dtype stand side by side, so that one launch reads them."""
        ordered = sorted(sharding_infos, key=lambda info: info.embedding_config.data_type.value)
        return super().create_embedding_sharding(sharding_type, ordered, *args, **kwargs)

    def reset_parameters(self) -> None:
        """Draw new tables by their `init_fn`; copies of a data-parallel one are alike."""
        draw_shards(self._embedding_configs, self.embeddings, self.module_sharding_plan, self._env)

    def create_context(self) -> _Context:
        """What is kept of a batch between its steps."""
        return _Context()

    def input_dist(self, ctx: _Context, features: KeyedJaggedTensor) -> Awaitable[Awaitable[KJTList]]:
        """Send ids to the processes that have their rows."""
        features = maybe_td_to_kjt(features, None)
        self._keys = checked_keys(features, self._embedding_configs, self._keys)
        sent = _as_sent(features)
        of_keys = zip(features.keys(), features.lengths().split(features.stride_per_key()), strict=True)
        # Of keys that stand twice TorchRec sends the first one.
        ctx.lengths = dict(reversed([*of_keys]))
        return super().input_dist(ctx, sent)

    def output_dist(self, ctx: _Context, output: list[Tensor]) -> LazyAwaitable[dict[str, JaggedTensor]]:
        """Send rows back."""
        return self._as_unsharded(super().output_dist(ctx, output), ctx)

    def compute_and_output_dist(self, ctx: _Context, input: KJTList) -> LazyAwaitable[dict[str, JaggedTensor]]:
        """Look up and send rows back."""
        return self._as_unsharded(super().compute_and_output_dist(ctx, input), ctx)

    def _as_unsharded(
        self, awaitable: LazyAwaitable[dict[str, JaggedTensor]], ctx: _Context
    ) -> LazyAwaitable[dict[str, JaggedTensor]]:
        """The features in the order of the tables, with the samples that there are."""

        def finished(found: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
            rows = {}
            for name, key in self._features.items():
                values, ids = found[name].values().to(self._output_dtype), found[name].weights_or_none()
                rows[name] = JaggedTensor(values, weights=ids, lengths=ctx.lengths[key])
            return rows

        keep_for_readers(awaitable._awaitables_per_sharding)
        awaitable.callbacks.append(finished)
        return awaitable

    @property
    def unsharded_module_type(self) -> type[ScheduledEmbeddingCollection]:
        """What was sharded."""
        return ScheduledEmbeddingCollection


def _as_sent(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """What is sent: ids alone, of one batch size for all keys and of one sample at least, for TorchRec and FBGEMM take no other.

    Where a batch is not so, each key's ids are cut into as many pieces. A row goes by its id, whatever the sample, so that no
    process has to know what the others' batches are like.
    """
    if features.lengths().numel() and not features.variable_stride_per_key():
        if features.weights_or_none() is None and features.inverse_indices_or_none() is None:
            return features
        return KeyedJaggedTensor(
            features.keys(),
            features.values(),
            lengths=features.lengths_or_none(),
            offsets=features.offsets_or_none(),
            stride=features.stride(),
            length_per_key=features.length_per_key_or_none(),
        )
    totals = lengths_per_key(features)
    # As many lengths as there were: the kernel that deals ids out walks through those of a length one after the other.
    count = max(1, features.lengths().numel() // len(totals))
    of_keys = torch.tensor(totals, dtype=features.lengths().dtype, device=features.device())[:, None]
    lengths = of_keys // count + (torch.arange(count, device=of_keys.device) < of_keys % count)
    return KeyedJaggedTensor(features.keys(), features.values(), lengths=lengths.view(-1), stride=count, length_per_key=totals)


def _check_rows(module: ScheduledEmbeddingCollection, params: Mapping[str, ParameterSharding]) -> None:
    """Refuse copies that would part, and column shards of several widths, for TorchRec sends rows of one width."""
    widths: dict[int, str] = {}
    for name, sharding in params.items():
        if sharding.sharding_type == DATA_PARALLEL and update_of(module) is not None:
            raise ValueError(
                f"params: expected no data-parallel tables with an optimizer, got {name!r}: each process would update its own, "
                "so that their copies part; shard it table-wise, column-wise or row-wise, or leave the optimizer out"
            )
        if sharding.sharding_type == COLUMN_WISE:
            widths |= {shard.shard_sizes[1]: name for shard in sharding.sharding_spec.shards}
    if len(widths) > 1:
        found = ", ".join(f"{width} of {name!r}" for width, name in sorted(widths.items()))
        raise ValueError(
            f"params: expected column shards of one width in all tables of a collection, got {found}; split all alike, or shard "
            "the others table-wise or row-wise"
        )


class ScheduledEmbeddingCollectionSharder(TablesSharder, EmbeddingCollectionSharder):  # type: ignore[misc]
    """Lets `DistributedModelParallel` split `ScheduledEmbeddingCollection` over processes, with its operator on every shard.

    TorchRec plans, and moves ids and rows between processes. Each of them looks up all that it has of one sharding type and data
    type in one launch. Output, order of its features and names of parameters are those of the unsharded module, and so are
    gradients and updates, of the mean of the processes' losses. Shards begin with the module's tables and states of its
    optimizer, or, if it is on the meta device, with new ones. Tables that several collections share are refused: each would
    have its own.

    * Table-wise, column-wise and row-wise a process updates what it has. Of `rowwise_adagrad` and `rowwise_adam` the states of a
      column shard are those of its own columns, so that updates differ from the unsharded module's.
    * Data-parallel tables are copies, whose gradients are averaged. With an optimizer they are refused.
    * Under `DMPCollection` replicas begin with the first one's shards, and `sync` averages shards and states.

    An optimizer that `apply_optimizer_in_backward` gave all parameters is the optimizer of the shards: SGD, Adagrad,
    RowWiseAdagrad, Adam, LAMB, PartialRowWiseAdam or PartialRowWiseLAMB, of PyTorch or TorchRec.

    Args:
        qcomm_codecs_registry: how TorchRec compresses what it sends.

    Raises:
        ValueError: when a collection is sharded, another sharding type or compute kernel, frozen tables, an optimizer of
            `apply_optimizer_in_backward` that has no counterpart, data-parallel tables with an optimizer, column shards of
            several widths, or several of a table in one process that have no multiple of 16 numbers. Under `DMPCollection` its
            strategy `FULLY_SHARDED`, or `decay_missed_steps`. In forward, keys that are missing or not those of the first batch
            in their order, or another number of lengths than the sum of the sizes.

    Shape:
        As `ScheduledEmbeddingCollection`, for the samples of each process, which can be none, or with a batch size for each key
        in any process. Weights of ids and inverse indices are not sent.

    Example:
        >>> import torch.distributed as dist
        >>> from torch import nn
        >>> from torchrec.distributed import DistributedModelParallel
        >>> from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
        >>> from torchrec.distributed.types import ShardingPlan
        >>> from torchrec.modules.embedding_configs import EmbeddingConfig
        >>> from jagged.modules import ScheduledEmbeddingCollection, ScheduledEmbeddingCollectionSharder
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> table = EmbeddingConfig(name="item", embedding_dim=8, num_embeddings=100, feature_names=["clicked"])
        >>> rows, sharder = ScheduledEmbeddingCollection([table]), ScheduledEmbeddingCollectionSharder()
        >>> plan = construct_module_sharding_plan(rows, {"item": row_wise()}, sharder, device_type="cpu", local_size=1)
        >>> model = nn.ModuleDict({"rows": rows})
        >>> model = DistributedModelParallel(model, plan=ShardingPlan({"rows": plan}), sharders=[sharder])
        >>> type(model.module["rows"]).__name__
        'ShardedScheduledEmbeddingCollection'
        >>> dist.destroy_process_group()
    """

    def __init__(self, qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None) -> None:
        super().__init__(qcomm_codecs_registry=qcomm_codecs_registry)

    @property
    def module_type(self) -> type[ScheduledEmbeddingCollection]:
        """What is sharded: this type and no subclass."""
        return ScheduledEmbeddingCollection

    @property
    def sharded_module_type(self) -> type[ShardedScheduledEmbeddingCollection]:
        """What it becomes."""
        return ShardedScheduledEmbeddingCollection

    def shard(
        self,
        module: ScheduledEmbeddingCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedScheduledEmbeddingCollection:
        """Return this process's part of a collection."""
        plan = checked_plan(module, params)
        check_replicas(module, env)
        _check_rows(module, plan)
        return ShardedScheduledEmbeddingCollection(
            module, plan, env, device, qcomm_codecs_registry=self.qcomm_codecs_registry, module_fqn=module_fqn
        )
