"""What sharders of collections of embeddings have in common: what they take and refuse, and tables that are drawn anew."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.comm import get_topology_group_world_size
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import Awaitable, ParameterSharding, ShardingEnv, ShardingEnv2D, ShardingStrategy, ShardingType
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from jagged.modules.backward_updates import in_backward_optimizer
from jagged.modules.trained_tables import TrainedTables, optimizer_maker
from jagged.ops import BagLayout, BagOptimizer

TABLE_WISE, COLUMN_WISE = ShardingType.TABLE_WISE.value, ShardingType.COLUMN_WISE.value
ROW_WISE, DATA_PARALLEL = ShardingType.ROW_WISE.value, ShardingType.DATA_PARALLEL.value
TABLE_COLUMN_WISE, TABLE_ROW_WISE = ShardingType.TABLE_COLUMN_WISE.value, ShardingType.TABLE_ROW_WISE.value
GRID_SHARD = ShardingType.GRID_SHARD.value
SHARDING_TYPES = (TABLE_WISE, COLUMN_WISE, ROW_WISE, DATA_PARALLEL)
# Those whose shards lie in hosts, and of them those whose rows are split over a host's processes.
OF_HOSTS = (TABLE_COLUMN_WISE, TABLE_ROW_WISE, GRID_SHARD)
ROWS_OF_HOSTS = (TABLE_ROW_WISE, GRID_SHARD)
FUSED, DENSE = EmbeddingComputeKernel.FUSED.value, EmbeddingComputeKernel.DENSE.value


class TablesSharder:
    """What a sharder tells TorchRec's planner."""

    _types: tuple[str, ...] = SHARDING_TYPES

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """What a planner may choose from, on every device."""
        return list(self._types)

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """What a planner may reckon with; whether gradients are dense is for the module to say."""
        return [DENSE if sharding_type == DATA_PARALLEL else FUSED]

    def reshard(self, *_: Any, **__: Any) -> Any:
        """Refused.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("reshard: tables cannot move while they train; save a checkpoint and shard anew")


def keep_for_readers(parts: Sequence[Awaitable[Tensor]]) -> None:
    """Keep the memory of what was looked up until the stream that waits for it has read it.

    TorchRec's fused pipeline looks up on another stream. In evaluation the host lets go of rows that are still being read, and
    the next batch's lookup would get their memory.
    """
    for part in parts:
        # What other processes have sent is put together by who waits.
        received = getattr(getattr(part, "_tensor_awaitable", None), "tensor", None)
        # First of all: other callbacks read as well.
        part.callbacks.insert(0, functools.partial(_kept, received))


def _kept(received: Tensor | None, rows: Tensor) -> Tensor:
    for read in (received, rows):
        if isinstance(read, Tensor) and read.device.type != "cpu":
            read.record_stream(torch.get_device_module(read.device).current_stream())
    return rows


def checked_plan(
    module: TrainedTables, params: dict[str, ParameterSharding], types: Sequence[str] = SHARDING_TYPES
) -> dict[str, ParameterSharding]:
    """Return a plan for a collection's tables, with the compute kernel that goes by its optimizer.

    Args:
        module: the collection.
        params: the plan by table.
        types: what it may name.

    Raises:
        ValueError: tables that several collections share, or whose rows are cached, frozen tables, an optimizer of
            `apply_optimizer_in_backward` that has no counterpart or stands beside the collection's own, another sharding type or
            compute kernel, or column shards in one process that are not one parameter.
    """
    if any(part.tables.is_shared for part in module._parts):
        raise ValueError(
            "module: expected tables of one collection, got some that several share, of which each would have its own when they "
            "are sharded; give every collection its own tables, or train in one process"
        )
    if module._cache is not None:
        raise ValueError(
            "module: expected tables that are on the device as a whole, got some with cache_bytes; leave it out, for shards of "
            "several processes need less memory each"
        )
    kernel = DENSE if update_of(module) is None else FUSED
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            raise ValueError(f"module: expected tables that require a gradient, got {name!r} frozen; use torch.no_grad")
    for name, sharding in params.items():
        if sharding.sharding_type not in types or sharding.compute_kernel not in (FUSED, DENSE):
            raise ValueError(
                f"params: expected a sharding type of {', '.join(types)} and the compute kernel {FUSED} or {DENSE} "
                f"for {name!r}, got {sharding.sharding_type} and {sharding.compute_kernel}"
            )
        _check_widths(name, sharding)
    return {name: dataclasses.replace(sharding, compute_kernel=kernel) for name, sharding in params.items()}


def update_of(module: TrainedTables) -> functools.partial[BagOptimizer] | None:
    """What makes the optimizer of a collection's shards: its own, or that of `apply_optimizer_in_backward`; None without one.

    Raises:
        ValueError: both, or one that has no counterpart here.
    """
    applied = in_backward_optimizer(module)
    if applied is None:
        return module._optimizer
    if module._optimizer is not None:
        raise ValueError(
            f"module: got an optimizer of apply_optimizer_in_backward beside {type(module).__name__}(optimizer=...), expected "
            "one; leave one of them out"
        )
    return optimizer_maker(*applied)


def _check_widths(name: str, sharding: ParameterSharding) -> None:
    """Refuse column shards of one process that are not one parameter: without gaps, one below the other."""
    if sharding.sharding_type not in (COLUMN_WISE, TABLE_COLUMN_WISE, GRID_SHARD):
        return
    sizes: dict[int, list[list[int]]] = {}
    for rank, shard in zip(sharding.ranks, sharding.sharding_spec.shards, strict=True):
        sizes.setdefault(rank, []).append(shard.shard_sizes)
    for rank, of_rank in sizes.items():
        widths = [width for _, width in of_rank]
        if len(of_rank) > 1 and (len(set(widths)) > 1 or of_rank[0][0] * widths[0] % BagLayout.alignment):
            raise ValueError(
                "params: expected several column shards in one process to have the same width, a multiple of "
                f"{BagLayout.alignment}, got {widths} of {name!r} in process {rank}; give each process one"
            )


def check_hosts(tables: Sequence[BaseEmbeddingConfig], plan: Mapping[str, ParameterSharding], env: ShardingEnv) -> None:
    """Refuse shards that do not lie in hosts as TorchRec takes for granted, which would look up other rows, or wait for ever.

    Raises:
        ValueError: a group that is not all processes, a table of one row in a grid, columns of a table-column-wise table in
            several hosts, or rows that are not in equal blocks in all processes of a host, in a grid for each shard of columns.
    """
    of_hosts = [table for table in tables if plan[table.name].sharding_type in OF_HOSTS]
    if not of_hosts:
        return
    if env.world_size != dist.get_world_size():
        raise ValueError(
            f"env: expected a group of all {dist.get_world_size()} processes, of which TorchRec makes the hosts' groups, got "
            f"{env.world_size}, and {plan[of_hosts[0].name].sharding_type} of {of_hosts[0].name!r}; shard it table-wise, "
            "column-wise or row-wise"
        )
    size = get_topology_group_world_size(env.world_size)
    for table in of_hosts:
        sharding, rows = plan[table.name], table.num_embeddings
        ranks, shards = sharding.ranks, sharding.sharding_spec.shards
        found = [(rank, *shard.shard_offsets, *shard.shard_sizes) for rank, shard in zip(ranks, shards, strict=True)]
        hosts = [rank // size for rank in ranks]
        if sharding.sharding_type == TABLE_COLUMN_WISE:
            if len(set(hosts)) > 1:
                raise ValueError(
                    f"params: expected {TABLE_COLUMN_WISE} shards of {table.name!r} in one host of {size} processes, got them in "
                    f"processes {ranks}; place them in one host, or shard it {COLUMN_WISE}"
                )
            continue
        if sharding.sharding_type == GRID_SHARD and rows == 1 < size:
            raise ValueError(
                f"params: expected {GRID_SHARD} of tables of 2 rows or more, got {table.name!r} of 1, whose states TorchRec puts "
                f"elsewhere in each process; shard it {COLUMN_WISE} or {TABLE_ROW_WISE}"
            )
        block, expected = math.ceil(rows / size), []
        for first in range(0, len(found), size):
            _, _, column, _, width = found[first]
            for place in range(size):
                begin = min(rows, place * block)
                expected.append((hosts[first] * size + place, begin, column, min(block, rows - begin), width))
        if found != expected or (sharding.sharding_type == TABLE_ROW_WISE and len(found) != size):
            raise ValueError(
                f"params: expected {sharding.sharding_type} shards of {table.name!r} in all {size} processes of a host in their "
                f"order, {block} rows each as far as there are, got (process, first row, first column, rows, columns) {found}; "
                "plan with LOCAL_WORLD_SIZE as each host's number of processes, and the planner's local_world_size alike"
            )


def check_replicas(module: TrainedTables, env: ShardingEnv) -> None:
    """Refuse what `DMPCollection` would let part in its replicas, and not tell.

    Raises:
        ValueError: its strategy `FULLY_SHARDED`, or an optimizer that decays missed steps.
    """
    if not isinstance(env, ShardingEnv2D):
        return
    if env.sharding_strategy == ShardingStrategy.FULLY_SHARDED:
        raise ValueError(
            "env: expected a strategy of DMPCollection by which sync() averages replicas, got FULLY_SHARDED, by which FBGEMM's "
            "kernels alone average themselves; take DEFAULT or PER_MODULE"
        )
    update = update_of(module)
    if update is not None and update(BagLayout((1,), (1,)), torch.device("cpu")).last is not None:
        raise ValueError(
            "module: expected an optimizer without decay_missed_steps under DMPCollection, got one with it: sync() averages "
            "weights and states, while rows have missed other steps in each replica; leave it out"
        )


def checked_keys(features: KeyedJaggedTensor, tables: Sequence[BaseEmbeddingConfig], first: list[str] | None) -> list[str]:
    """Return the keys of a batch, which are those of the first one; None: this is the first.

    Raises:
        ValueError: keys that are missing or in another order.
    """
    keys: list[str] = features.keys()
    if first is None:
        wanted = {name for table in tables for name in table.feature_names}
        if missing := sorted(wanted - set(keys)):
            raise ValueError(f"features: expected a key for every feature of the tables, got none for {', '.join(missing)}")
        first = keys
    if keys != first:
        raise ValueError(f"features: expected the keys of the first batch in their order, {first}, got {keys}")
    return keys


def draw_shards(
    tables: Sequence[BaseEmbeddingConfig],
    modules: nn.ModuleDict,
    plan: Mapping[str, ParameterSharding],
    env: ShardingEnv,
) -> None:
    """Draw new tables by their `init_fn`; copies of a data-parallel one are alike, and so are replicas."""
    for table in tables:
        weight: Any = modules[table.name].weight
        if table.init_fn is not None and weight.numel():
            table.init_fn(weight)
    make_copies_alike(modules, plan, env)


def make_copies_alike(modules: nn.ModuleDict, plan: Mapping[str, ParameterSharding], env: ShardingEnv) -> None:
    """Give every process the first one's copies of data-parallel tables, and of replicas every one the first one's shards."""
    replicas = env.replica_pg if isinstance(env, ShardingEnv2D) else None
    for name, sharding in plan.items():
        group = env.process_group if sharding.sharding_type == DATA_PARALLEL else replicas
        if group is not None:
            weight: Any = modules[name].weight
            dist.broadcast(weight.data, group_src=0, group=group)
