"""Tensors of a batch in one piece of memory: one message from a worker, one page-locked block, one copy to a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

# Where each tensor begins: kernels load 16 bytes at once, and rows of memory have 64.
_ALIGNMENT = 64
#: How names of lengths end.
LENGTHS = ".lengths"


@dataclass(frozen=True, eq=False)
class Packed:
    """Tensors of any types and shapes, one behind the other.

    Attributes:
        memory: uint8 `[bytes]`.
        places: of each tensor its type, its shape and its first byte. Lengths that are all 1, as of keys with one id each, have
            no bytes, which -1 says: nobody changes lengths in their place, of which a KeyedJaggedTensor has kept the offsets.
        slot: of `Slots`, in which the memory is; None where it is the tensors' own.
    """

    memory: Tensor
    places: Mapping[str, tuple[torch.dtype, tuple[int, ...], int]]
    slot: Slot | None = None

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], allocate: Callable[[int], tuple[Tensor, Any]] | None = None) -> Packed:
        """A copy of tensors on the host.

        Args:
            tensors: which.
            allocate: gives memory of so many bytes, and its slot; None for new memory.
        """
        places, end = {}, 0
        for name, tensor in tensors.items():
            is_ones = name.endswith(LENGTHS) and bool((tensor == 1).all())
            places[name] = tensor.dtype, tuple(tensor.shape), -1 if is_ones else end
            end += 0 if is_ones else -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        memory, slot = (torch.empty(end, dtype=torch.uint8), None) if allocate is None else allocate(end)
        packed = cls(memory, places, slot)
        for name, (_, _, begin) in places.items():
            if begin >= 0:
                packed._view(name).copy_(tensors[name])
        return packed

    def tensors(self) -> dict[str, Tensor]:
        """The tensors, as views of the memory."""
        return {name: self._view(name) for name in self.places}

    def _view(self, name: str) -> Tensor:
        dtype, shape, begin = self.places[name]
        if begin < 0:
            return torch.ones(shape, dtype=dtype, device=self.memory.device)
        return self.memory[begin : begin + prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Packed:
        """The same with another memory."""
        return replace(self, memory=change(self.memory), slot=None)

    def pin_memory(self) -> Packed:
        """The same in page-locked memory; `DataLoader` asks for it in a thread of its own, before it hands a batch out."""
        return self.mapped(lambda memory: memory.pin_memory())

    def __reduce__(self) -> tuple[Any, ...]:
        """What a message has: of memory in a slot its size alone, once the reader has the slot."""
        if self.slot is None:
            return Packed, (self.memory, self.places)
        return _received, (self.slot.key, self.slot.to_send(), len(self.memory), self.places)


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


#: The memory of workers' slots in the process that reads them, by loader, worker and number.
_MAPPED: dict[tuple[int, int, int], Tensor] = {}


def _received(key: tuple[int, int, int], memory: Tensor | None, count: int, places: Mapping[str, Any]) -> Packed:
    if memory is not None:
        # Where the memory stays mapped, the next batch in this slot finds it so.
        _MAPPED[key] = memory
    memory = _MAPPED[key]
    return Packed(memory[:count], places, Slot(key, memory, is_sent=True))


def forget(loader: int) -> None:
    """Give back the memory of a loader's slots."""
    for key in [key for key in _MAPPED if key[0] == loader]:
        del _MAPPED[key]


class Slots:
    """Shared memory of a worker that is used again and again, in turns.

    New shared memory costs more than what is written into it: each page is given to the worker, and then to the reader,
    when it is touched first. To send memory costs the reader several messages, in a thread that shares Python's lock with the
    one that launches kernels; so a slot is sent once, and from then on its number. A slot is free when the batch in it was
    copied, which `DataLoader` does before it hands a batch out; and it lets a worker be `prefetch` batches ahead of those that
    it has handed out.

    Args:
        loader: a number of the loader.
        prefetch: as `DataLoader` was told.
    """

    def __init__(self, loader: int, prefetch: int) -> None:
        self.loader = loader
        self._slots: list[Slot | None] = [None] * (prefetch + 1)
        self._next = 0

    def allocate(self, count: int) -> tuple[Tensor, Slot | None]:
        """So many bytes and their slot; in no worker new memory without one."""
        worker = get_worker_info()
        if worker is None:
            return torch.empty(count, dtype=torch.uint8), None
        number, self._next = self._next, (self._next + 1) % len(self._slots)
        slot = self._slots[number]
        if slot is None or len(slot.memory) < count:
            # With room for batches that are a little larger.
            memory = torch.empty(count + count // 4, dtype=torch.uint8).share_memory_()
            slot = self._slots[number] = Slot((self.loader, worker.id, number), memory)
        return slot.memory[:count], slot
