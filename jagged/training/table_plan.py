"""Tables of which each process has rows: planned and sharded by TorchRec, updated row by row, kept under their names."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.types import ModuleSharder, ShardingPlan
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from jagged.config import TrainerConfig
from jagged.config.options import LoopOptions
from jagged.models import NextItemTask
from jagged.modules import (
    HeldUpdates,
    RowSplit,
    ScheduledEmbeddingBagCollection,
    ScheduledEmbeddingBagCollectionSharder,
    ScheduledEmbeddingCollection,
    ScheduledEmbeddingCollectionSharder,
    replace_embeddings,
)
from jagged.modules.embedding_bags_shards import ShardedTables
from jagged.modules.table_sharding import ROW_WISE, TABLE_WISE
from jagged.modules.table_storage import states_of_tables
from jagged.modules.trained_tables import TrainedTables, optimizer_maker
from jagged.ops import BagLayout, BagOptimizer
from jagged.training.errors import TrainingError
from jagged.training.optimizer import table_names
from jagged.training.processes import Processes
from jagged.training.table_updates import KINDS, row_options

# By `table_plan`, the sharding types of TorchRec's planner. Of columns some optimizers would take other means and norms than of
# rows, and of copies each process would have all.
_TYPES = {"planned": [TABLE_WISE, ROW_WISE], "table-wise": [TABLE_WISE], "row-wise": [ROW_WISE]}
# Of GPUs by their names: what our lookup reads of tables, GB/s, and how many times as long the backward pass takes, with SGD.
# Of MLPerf's tables and 8,192 samples, from `benchmarks/results`; a test compares them.
MEASURED = {"NVIDIA H200": (3525, 4.45), "NVIDIA H100 80GB HBM3": (2619, 3.71)}
# The share of memory that is left to all else than tables.
_RESERVED = 0.4
_COLLECTIONS = (EmbeddingBagCollection, EmbeddingCollection, ScheduledEmbeddingBagCollection, ScheduledEmbeddingCollection)


def check_plan(task: nn.Module, config: LoopOptions, world_size: int) -> bool:
    """Whether each process has rows of a task's tables.

    Raises:
        TrainingError: that is asked for where it cannot be.
    """
    if config.table_plan == "replicated":
        return False
    if world_size == 1:
        _refuse(config, "one process", "several", "start them by torchrun, or take replicated")
    if isinstance(task, NextItemTask):
        _refuse(config, "a NextItemTask", "a task with collections of tables", "its item table is split without it: leave it out")
    if config.table_optimizer not in KINDS:
        _refuse(
            config, f"table_optimizer {config.table_optimizer}", f"one of {', '.join(KINDS)}", "adamw moves all rows in each step"
        )
    if config.table_gradient_bytes is not None:
        found = f"table_gradient_bytes {config.table_gradient_bytes}"
        _refuse(config, found, "none", "no table whose rows are shared out has a whole gradient: leave it out")
    collections = _collections(task)
    if not collections:
        _refuse(config, f"a {type(task).__name__}", "a task with collections of tables", "leave it out")
    inside = {f"{path}.{name}": of for path, part in collections.items() for name, of in part.named_parameters()}
    if others := sorted(table_names(task) - inside.keys()):
        _refuse(config, f"the table {others[0]}", "tables of TorchRec's collections or ours", "put it into one, or leave it out")
    for name, parameter in inside.items():
        if not parameter.requires_grad:
            _refuse(config, f"the frozen table {name}", "tables that all learn", "leave it out")
    tied = [name for name, of in task.named_parameters(remove_duplicate=False) if name not in inside and _is_in(of, inside)]
    if tied or len({id(of) for of in inside.values()}) < len(inside):
        _refuse(
            config, f"a table of several places{': ' + tied[0] if tied else ''}", "tables of one collection each", "leave it out"
        )
    return True


def _refuse(config: LoopOptions, found: str, expected: str, cure: str) -> NoReturn:
    raise TrainingError(f"table_plan: got {config.table_plan} with {found}, expected {expected}; {cure}")


def _is_in(parameter: nn.Parameter, tables: Mapping[str, nn.Parameter]) -> bool:
    return any(parameter is of for of in tables.values())


def _collections(task: nn.Module) -> dict[str, nn.Module]:
    # Subclasses may do something else.
    return {path: part for path, part in task.named_modules() if type(part) in _COLLECTIONS}


def sharders() -> list[ModuleSharder[Any]]:
    """Those of our collections."""
    return [ScheduledEmbeddingBagCollectionSharder(), ScheduledEmbeddingCollectionSharder()]


def plan_tables(task: nn.Module, config: LoopOptions, processes: Processes) -> ShardingPlan:
    """Which process has which rows, by TorchRec's planner, of the collections by their paths; every process must call.

    Collections of TorchRec are planned as ours that take their places.

    Raises:
        TrainingError: tables that do not fit into the processes' memory.
    """
    # Neither moved nor exchanged here: a forecast plans what is not trained yet.
    alike = nn.ModuleList(_on_meta(part) for part in _collections(task).values())
    tables = {table.name for part in alike for table in _configs(part)}
    constraints = {name: ParameterConstraints(sharding_types=_TYPES[config.table_plan]) for name in tables}

    def made() -> ShardingPlan:
        planner = EmbeddingShardingPlanner(
            _topology(processes),
            constraints=constraints,
            storage_reservation=FixedPercentageStorageReservation(_RESERVED),
            debug=False,
        )
        try:
            return planner.plan(alike, sharders())
        except PlannerError as error:
            # Behind its first sentence it tells of itself.
            said = str(error).partition(". ")[0]
            raise TrainingError(
                f"table_plan: got {config.table_plan} for {processes.world_size} processes, of which TorchRec's planner says: "
                f"{said}; start more, or take row-wise"
            ) from None

    # Not the planner's own way, in which the others would wait for a first process that found none.
    with _quiet("torchrec.distributed.planner"):
        plan: Any = processes.all(processes.in_first(made))[0]
    return ShardingPlan({path: plan.plan[str(number)] for number, path in enumerate(_collections(task))})


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Without warnings of a package's loggers, which are for who writes topologies by hand."""
    loggers = [logging.getLogger(of) for of in logging.Logger.manager.loggerDict if f"{of}.".startswith(f"{name}.")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def _topology(processes: Processes) -> Topology:
    device, hosts = processes.device, get_local_size(processes.world_size)
    options: dict[str, Any] = {"ddr_cap": psutil.virtual_memory().total // hosts}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        options["hbm_cap"] = properties.total_memory
        if properties.name in MEASURED:
            gigabytes, multiple = MEASURED[properties.name]
            # In bytes a millisecond.
            options |= {"hbm_mem_bw": gigabytes * 1e6, "bwd_compute_multiplier": multiple}
    return Topology(processes.world_size, device.type, local_world_size=hosts, **options)


def _on_meta(part: nn.Module) -> nn.Module:
    if isinstance(part, (EmbeddingBagCollection, ScheduledEmbeddingBagCollection)):
        return ScheduledEmbeddingBagCollection(part.embedding_bag_configs(), part.is_weighted(), "meta")
    assert isinstance(part, (EmbeddingCollection, ScheduledEmbeddingCollection))
    return ScheduledEmbeddingCollection(part.embedding_configs(), "meta")


def _configs(part: nn.Module) -> Any:
    return part.embedding_bag_configs() if isinstance(part, ScheduledEmbeddingBagCollection) else part.embedding_configs()  # type: ignore[operator]


def splits_of(plan: ShardingPlan, task: nn.Module, processes: Processes) -> dict[str, RowSplit]:
    """By the name of each table's parameter which process has which rows."""
    splits = {}
    for path, of_tables in plan.plan.items():
        for name, table in task.get_submodule(path).named_parameters():
            blocks, sharding = [slice(0, 0)] * processes.world_size, of_tables[_table_of(name)]  # type: ignore[index]
            for rank, shard in zip(sharding.ranks, sharding.sharding_spec.shards, strict=True):
                begin = shard.shard_offsets[0]
                blocks[rank] = slice(begin, begin + shard.shard_sizes[0])
            splits[f"{path}.{name}"] = RowSplit(len(table), processes.group, processes.host_group, blocks)
    return splits


def _table_of(name: str) -> str:
    """The table of a parameter `embedding_bags.item.weight`."""
    return name.split(".")[-2]


class ShardedUpdates:
    """A task's tables, of which each process has rows that it updates row by row.

    First the collections are exchanged for ours, and planned; then DistributedModelParallel shards them by `plan`; then `begin`
    is called.

    Args:
        task: its tables are whole yet, and alike in every process.
        config: how tables are updated and planned.
        processes: several.

    Attributes:
        plan: of the collections by their paths in the task.
        splits: by the name of a table's parameter who has which of its rows.
    """

    def __init__(self, task: nn.Module, config: TrainerConfig, processes: Processes) -> None:
        self._task, self._processes = task, processes
        self.plan = plan_tables(task, config, processes)
        replace_embeddings(task)
        make = optimizer_maker(KINDS[config.table_optimizer], row_options(config))
        assert make is not None
        self._make = make
        self._whole: dict[str, TrainedTables] = {}
        self._sharded: dict[str, Any] = {}
        self._held: HeldUpdates | None = None
        self.splits = splits_of(self.plan, task, processes)
        self._named = {
            name: (path, _table_of(name)) for path in self.plan.plan for name in self.splits if name.startswith(f"{path}.")
        }
        for path in self.plan.plan:
            part = task.get_submodule(path)
            assert isinstance(part, TrainedTables)
            self._whole[path] = part
            # Shards make the states of their rows; whole ones are never there.
            part._optimizer = make

    def begin(self) -> None:
        """Take the sharded collections in the task, and let go of whole tables."""
        for path, part in self._whole.items():
            sharded = self._task.get_submodule(path)
            assert isinstance(sharded, ShardedTables)
            self._sharded[path] = sharded
            for module in sharded.modules():
                if type(module) is nn.Module and "weight" in module._parameters:
                    module.__class__ = _Guarded
            part.stop_updating()
            part.to("meta")
        self._held = HeldUpdates(self._task)

    @property
    def names(self) -> set[str]:
        """Of the parameters that are updated here."""
        return set(self._named)

    @property
    def optimizers(self) -> list[BagOptimizer]:
        """Those of this process's rows."""
        return [optimizer for part in self._sharded.values() for optimizer in part.optimizers]

    def check(self) -> None:
        """Nothing: who reads a table beside its collection is refused there."""

    def weights(self) -> dict[str, Tensor]:
        """By name views of this process's rows."""
        return {name: self._weight(name) for name in self._named}

    def states(self) -> dict[str, dict[str, Tensor]]:
        """By name views of the states of this process's rows, and the number of steps; every process must call."""
        here = {(path, of.table): of.states for path, part in self._sharded.items() for of in part.shards()}
        steps = self._processes.all({name: int(here[of]["step"]) for name, of in self._named.items() if of in here})
        found = {}
        for name, of in self._named.items():
            if of in here:
                found[name] = here[of]
            else:
                states = {key: state[:0] if state.dim() else state for key, state in self._empty(name).items()}
                states["step"].fill_(max(counts.get(name, 0) for counts in steps))
                found[name] = states
        return found

    def norm(self) -> Tensor:
        """The L2 norm of the gradients that are held, in all processes: `[]` float32."""
        assert self._held is not None
        square = self._held.norm().to(self._processes.device, torch.float64).square()
        dist.all_reduce(square, group=self._processes.group)
        return square.sqrt().float()

    def step(self, scale: Tensor | None) -> None:
        """Update the rows by what is held; where it is not finite in one process, none does."""
        assert self._held is not None
        scale = torch.ones((), device=self._processes.device) if scale is None else scale
        # What is not finite makes the sum so, without a wait for the device.
        of_all = torch.where(self._held.is_finite().to(scale.device), scale, torch.nan)
        dist.all_reduce(of_all, group=self._processes.group)
        self._held.step(torch.where(torch.isfinite(of_all), scale, torch.nan))

    def drop(self) -> None:
        """Forget what is held."""
        assert self._held is not None
        self._held.drop()

    def end(self) -> None:
        """Nothing: `unsharded` gives the task whole tables, in which all processes must take part."""

    @contextmanager
    def removed(self) -> Iterator[None]:
        """The task without its sharded collections, whose own ways of telling parameters know of shards."""
        with self._in_place({path: nn.Module() for path in self._sharded}):
            yield

    @contextmanager
    def unsharded(self, *, stays: bool = False) -> Iterator[None]:
        """The task with whole tables; every process must enter.

        Args:
            stays: they stay there, and nothing is trained any more.
        """
        for part in self._whole.values():
            part.to_empty(device=self._processes.device)
        for name, weight in self.weights().items():
            path, table = self._named[name]
            whole: Any = self._whole[path]._modules_of_tables[table].weight
            whole.data.copy_(self.splits[name].whole(weight))
        with self._in_place(self._whole, stays=stays):
            yield
        if not stays:
            for part in self._whole.values():
                part.to("meta")

    @contextmanager
    def _in_place(self, parts: Mapping[str, nn.Module], *, stays: bool = False) -> Iterator[None]:
        for path, part in parts.items():
            self._task.set_submodule(path, part.train(self._task.training))
        try:
            yield
        finally:
            for path, sharded in self._sharded.items() if not stays else ():
                self._task.set_submodule(path, sharded)

    def _weight(self, name: str) -> Tensor:
        path, table = self._named[name]
        own = [shard.weight for shard in self._sharded[path].shards() if shard.table == table]
        if own:
            return own[0]
        like: Any = self._whole[path]._modules_of_tables[table].weight
        return torch.empty(0, like.shape[1], dtype=like.dtype, device=self._processes.device)

    def _empty(self, name: str) -> dict[str, Tensor]:
        """States of a table of one row."""
        return states_of_tables(self._make(BagLayout((1,), (self._weight(name).shape[1],)), self._processes.device))[0]


class _Guarded(nn.Module):
    """What has the rows of a table that a process has. Who would read them for the table is told so."""

    @property
    def weight(self) -> NoReturn:
        """Refused."""
        raise TrainingError(
            "table_plan: a table was read beside its collection, expected lookups alone, as each process has rows of it; "
            "take replicated"
        )
