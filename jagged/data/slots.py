"""Shared memory that workers write batches into, used again when nobody reads it any more."""

from __future__ import annotations

import os
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

# Slots of a worker beside the batches that it makes ahead: what training, and a pipeline before it, still read.
_HANDED_OUT = 4
# cudaHostRegisterPortable: page-locked for every device.
_PORTABLE = 1


class Slots:
    """A worker's shared memory, in pieces that hold a batch each.

    New shared memory costs more than what is written into it: each page is given to the worker, and then to the reader, when it
    is touched first. And a thread of the reader that copies batches into page-locked memory holds up the one that launches
    kernels, by Python's lock. So a slot is sent once, from then on its number alone; the reader has the driver lock its pages
    where that is asked for, and batches are views of it. A slot is free when the last of these is gone and a GPU has copied it.
    Where none is free, as for who keeps a list of batches, a batch is sent in memory of its own.

    Args:
        loader: a number of the loader.
        num_workers: how many workers write.
        prefetch: batches that each makes ahead.
        is_locked: whether the reader page-locks them.
    """

    def __init__(self, loader: int, num_workers: int, prefetch: int, *, is_locked: bool) -> None:
        self.loader = loader
        # True from when a worker takes a slot to when the reader has done with it.
        self.taken = torch.zeros(num_workers, prefetch + _HANDED_OUT, dtype=torch.bool).share_memory_()
        self._own: dict[int, Slot] = {}
        _READERS[loader] = Reader(self.taken.numpy(), is_locked)

    def allocate(self, count: int) -> tuple[Tensor, Slot | None]:
        """So many bytes and their slot; without one in no worker, or where none is free."""
        worker = get_worker_info()
        free = [] if worker is None else np.flatnonzero(~self.taken[worker.id].numpy()).tolist()
        if worker is None or not free:
            return torch.empty(count, dtype=torch.uint8), None
        number = next((one for one in free if one in self._own and len(self._own[one].memory) >= count), free[0])
        if number not in self._own or len(self._own[number].memory) < count:
            # With room for batches that are a little larger.
            memory = torch.empty(count + count // 4, dtype=torch.uint8).share_memory_()
            self._own[number] = Slot((self.loader, worker.id, number), memory)
        self.taken[worker.id, number] = True
        return self._own[number].memory[:count], self._own[number]


@dataclass(eq=False)
class Slot:
    """A piece of shared memory, in the worker that writes into it.

    Attributes:
        key: numbers of loader, worker and slot.
        memory: uint8 `[bytes]`, all of it.
        is_sent: whether the reader has it.
    """

    key: tuple[int, int, int]
    memory: Tensor
    is_sent: bool = False

    def to_send(self) -> Tensor | None:
        """The memory the first time, then None."""
        if self.is_sent:
            return None
        self.is_sent = True
        return self.memory


@dataclass(eq=False)
class Lease:
    """A batch in a slot, in the process that reads it.

    Attributes:
        place: numbers of worker and slot.
        mapped: the slot's memory.
        copies: what is to pass before the slot is free: of each stream that copies, its place when the last view was gone.
    """

    place: tuple[int, int]
    mapped: _Mapped
    copies: list[torch.cuda.Event] = field(default_factory=list)


class _Mapped:
    """A slot's memory here, page-locked if asked for and possible, as long as anything reads it."""

    def __init__(self, memory: Tensor, is_locked: bool) -> None:
        self.array: npt.NDArray[np.uint8] = memory.numpy()
        self.is_locked = False
        if is_locked:
            pointer = memory.data_ptr()
            # An error is no failure: a system may have a limit.
            self.is_locked = int(torch.cuda.cudart().cudaHostRegister(pointer, memory.nbytes, _PORTABLE)) == 0
            if self.is_locked:
                weakref.finalize(self, _unlock, os.getpid(), pointer, memory)


def _unlock(process: int, pointer: int, memory: Tensor) -> None:
    """Unlock what this process, and none that it was copied to, has locked; `memory` is given so that it is there until then."""
    if os.getpid() == process:
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaHostUnregister(pointer)


class Reader:
    """What the process that reads a loader's slots knows of them.

    Args:
        taken: of `Slots`.
        is_locked: as `Slots` has it.
    """

    def __init__(self, taken: npt.NDArray[np.bool_], is_locked: bool) -> None:
        self.taken, self.is_locked = taken, is_locked
        self.mapped: dict[tuple[int, int], _Mapped] = {}
        # Leases whose last view is gone, and those of them that wait for copies.
        self._returned: deque[Lease] = deque()
        self._waiting: list[Lease] = []

    def received(self, place: tuple[int, int], memory: Tensor | None, count: int) -> tuple[Tensor, Lease | None]:
        """The first `count` bytes of a slot, and their lease; without one where they are not page-locked, but should be."""
        self.free()
        if memory is not None:
            self.mapped[place] = _Mapped(memory, self.is_locked)
        lease = Lease(place, self.mapped[place])
        # All views of the tensor hold this array, and nothing else does.
        array = lease.mapped.array[:count]
        weakref.finalize(array, self._returned.append, lease).atexit = False
        return torch.from_numpy(array), lease if lease.mapped.is_locked == self.is_locked else None

    def free(self) -> None:
        """Give slots back whose batches are gone and copied."""
        returned = [self._returned.popleft() for _ in range(len(self._returned))]
        if returned and torch.cuda.is_initialized():
            # Who copied tensors of a batch one by one did so on this stream.
            events = [stream.record_event() for stream in {torch.cuda.current_stream(), *_STREAMS}]
            for lease in returned:
                lease.copies += events
        self._waiting += returned
        done = [lease for lease in self._waiting if all(event.query() for event in lease.copies)]
        self._waiting = [lease for lease in self._waiting if lease not in done]
        for lease in done:
            self.taken[lease.place] = False


#: Those on which batches were copied. A batch that was made of another one's tensors does not know whose memory it has.
_STREAMS: set[torch.cuda.Stream] = set()


def copied_to(device: torch.device) -> None:
    """Say that a batch was copied to a device on its current stream."""
    if device.type == "cuda":
        _STREAMS.add(torch.cuda.current_stream(device))


#: By the loader's number.
_READERS: dict[int, Reader] = {}


def received(key: tuple[int, int, int], memory: Tensor | None, count: int) -> tuple[Tensor, Any]:
    """What `Reader.received` gives for a loader's slot."""
    return _READERS[key[0]].received(key[1:], memory, count)


def forget(loader: int) -> None:
    """Give back the memory of a loader's slots, of each when nothing reads it any more."""
    _READERS.pop(loader, None)
