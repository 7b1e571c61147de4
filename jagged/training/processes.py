"""The processes of a run: one alone, or those that torchrun started; the same code for both."""

from __future__ import annotations

import atexit
import gc
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, Store
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from jagged.artifacts import CheckpointError
from jagged.config import ConfigError
from jagged.data import DataError
from jagged.training.errors import TrainingError

Result = TypeVar("Result")


@dataclass(frozen=True)
class Processes:
    """This process among those of the run.

    Attributes:
        rank, world_size: as torch.distributed has them.
        device: where this process computes.
        group, host_group: all processes, for tensors on `device` and for tensors on the CPU.
    """

    rank: int
    world_size: int
    device: torch.device
    group: dist.ProcessGroup
    host_group: dist.ProcessGroup

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and speaks."""
        return self.rank == 0

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process; every process must ask. Free with one process, else it waits for all."""
        if self.world_size == 1:
            return flag
        flags = torch.tensor([float(flag)], device=self.device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        return bool(flags.item())

    def all(self, thing: Any) -> list[Any]:
        """A thing that can be pickled of every process, by rank."""
        everyones: list[Any] = [thing] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(everyones, thing, group=self.host_group)
        return everyones

    def in_first(self, work: Callable[[], Result]) -> Result | None:
        """Do a piece of work in the first process alone, whose result is None elsewhere; what it refuses ends all of them.

        Raises:
            TrainingError: in the others, with the text of the first one's refusal.
        """
        refusal: Exception | None = None
        result: Result | None = None
        if self.is_first:
            try:
                result = work()
            except (ConfigError, DataError, TrainingError, CheckpointError) as error:
                refusal = error
        # The others would wait for the first one, and then tell that it is gone.
        told = self.all(None if refusal is None else str(refusal))[0]
        if told is not None:
            raise refusal or TrainingError(told)
        return result

    def sum(self, values: list[float]) -> list[float]:
        """Element-wise sum over the processes."""
        if self.world_size == 1:
            return values
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return [float(value) for value in total.tolist()]

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensor of every process, on the CPU, by rank; shapes and dtypes alike."""
        if self.world_size == 1:
            return [tensor]
        everyones = [torch.empty_like(tensor, device=self.device) for _ in range(self.world_size)]
        dist.all_gather(everyones, tensor.to(self.device))
        return [one.cpu() for one in everyones]


def resolve_device(name: str) -> torch.device:
    """The device that `auto`, `cpu` or `cuda` means in this process.

    Raises:
        TrainingError: `cuda` without a usable GPU.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise TrainingError("device: got cuda, but torch finds no usable GPU; `jagged doctor` says why, device=cpu goes without")
    device = torch.device(
        "cuda", int(os.environ.get("LOCAL_RANK", "0")) if "WORLD_SIZE" in os.environ else torch.cuda.current_device()
    )
    torch.cuda.set_device(device)
    return device


@cache
def _take_care_of_garbage() -> None:
    """Let a group that is in a cycle, as those of earlier runs are, be collected neither in forked children nor too late.

    Its destructor waits for its threads. A child, a loader's worker, does not have these, and crashes. An interpreter that is
    ending ends each thread that asks for it, and a thread of C++ that is ended so aborts the process.
    """
    enabled: list[bool] = []

    def hold() -> None:
        enabled.append(gc.isenabled())
        gc.disable()

    def go_on(*, in_child: bool) -> None:
        if in_child:
            gc.freeze()
        if enabled.pop():
            gc.enable()

    # Not in the child alone: what comes there before, as of Python's own threading, would collect.
    os.register_at_fork(before=hold, after_in_parent=partial(go_on, in_child=False), after_in_child=partial(go_on, in_child=True))
    atexit.register(gc.collect)


@contextmanager
def process_group(device: torch.device) -> Iterator[Processes]:
    """The process group of the run: the caller's or torchrun's, else one of this process alone, which needs no network.

    A group that was made here is taken down at the end, one that was found is left alone.
    """
    _take_care_of_garbage()
    if dist.is_initialized():
        processes = _processes(device)
        try:
            yield processes
        finally:
            if processes.host_group is not processes.group:
                dist.destroy_process_group(processes.host_group)
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        store, rank, world_size = _torchruns_store()
        # A second run in the same processes must not find the addresses of the first one's group: it would wait for them.
        dist.init_process_group(backend, store=PrefixStore(f"jagged/{next(_groups)}", store), rank=rank, world_size=world_size)
    else:
        with _loopback():
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        yield _processes(device)
    finally:
        dist.destroy_process_group()


_groups = itertools.count()


@cache
def _torchruns_store() -> tuple[Store, int, int]:
    """The store of the processes that torchrun started, with this one's rank and their number; the same for all runs in them."""
    store, rank, world_size = next(rendezvous("env://"))
    return store, rank, world_size


def _processes(device: torch.device) -> Processes:
    group = dist.group.WORLD
    assert group is not None
    alone = group.size() == 1 or device.type == "cpu"
    return Processes(group.rank(), group.size(), device, group, group if alone else dist.new_group(backend="gloo"))


@contextmanager
def _loopback() -> Iterator[None]:
    """Keep gloo from looking up the host's name, which can take half a minute where no name server answers."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        yield
        return
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        yield
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]
