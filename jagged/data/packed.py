"""Tensors of a batch in one piece of memory: one message from a worker, one page-locked block, one copy to a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jagged.data.slots import Lease, Slot, received

# Where each tensor begins: kernels load 16 bytes at once, and rows of memory have 64.
_ALIGNMENT = 64
#: How names of lengths end, and those of counts.
LENGTHS, COUNTS = ".lengths", ".counts"


@dataclass(frozen=True, eq=False)
class Packed:
    """Tensors of any types and shapes, one behind the other.

    Attributes:
        memory: uint8 `[bytes]`.
        places: of each tensor its type, its shape and its first byte. Lengths that are all 1, as of keys with one id each, have
            no bytes, which -1 says: nobody changes lengths in their place, of which a KeyedJaggedTensor has kept the offsets.
        counts: numbers that stay on the host wherever the memory is, where who cuts a tensor would have to wait for the device.
        slot: the worker's slot that the memory is in, or the reader's lease of it; None where the memory is the tensors' own.
    """

    memory: Tensor
    places: Mapping[str, tuple[torch.dtype, tuple[int, ...], int]]
    counts: Mapping[str, list[int]] = field(default_factory=dict)
    slot: Slot | Lease | None = None

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], allocate: Callable[[int], tuple[Tensor, Any]] | None = None) -> Packed:
        """A copy of tensors on the host.

        Args:
            tensors: which; one whose name ends with `COUNTS`, of whole numbers, becomes one of the counts, without that end.
            allocate: gives memory of so many bytes, and its slot; None for new memory.
        """
        places, end = {}, 0
        counts = {name.removesuffix(COUNTS): tensors[name].tolist() for name in tensors if name.endswith(COUNTS)}
        tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(COUNTS)}
        for name, tensor in tensors.items():
            is_ones = name.endswith(LENGTHS) and bool((tensor == 1).all())
            places[name] = tensor.dtype, tuple(tensor.shape), -1 if is_ones else end
            end += 0 if is_ones else -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        memory, slot = (torch.empty(end, dtype=torch.uint8), None) if allocate is None else allocate(end)
        packed = cls(memory, places, counts, slot)
        for name, view in packed.tensors().items():
            if places[name][2] >= 0:
                view.copy_(tensors[name])
        return packed

    def tensors(self) -> dict[str, Tensor]:
        """The tensors, as views of the memory."""
        # One call for each: a batch has dozens of them, and the process that makes them is the one that launches kernels.
        of_type = {dtype: self.memory.view(dtype) for dtype in {dtype for dtype, _, _ in self.places.values()}}
        found, first = {}, self.memory.storage_offset()
        for name, (dtype, shape, begin) in self.places.items():
            if begin < 0:
                found[name] = _ones(shape, dtype, self.memory.device)
                continue
            strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
            found[name] = of_type[dtype].as_strided(shape, strides, (first + begin) // dtype.itemsize)
        return found

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Packed:
        """The same with another memory."""
        return replace(self, memory=change(self.memory), slot=None)

    def pin_memory(self) -> Packed:
        """The same in page-locked memory; `DataLoader` asks for it in a thread of its own, before it hands a batch out."""
        return self.mapped(lambda memory: memory.pin_memory())

    def __reduce__(self) -> tuple[Any, ...]:
        """What a message has: of memory in a slot its size alone, once the reader has the slot."""
        if not isinstance(self.slot, Slot):
            return Packed, (self.memory, self.places, self.counts)
        return _received, (self.slot.key, self.slot.to_send(), len(self.memory), self.places, self.counts)


def _received(
    key: tuple[int, int, int], memory: Tensor | None, count: int, places: Mapping[str, Any], counts: Mapping[str, list[int]]
) -> Packed:
    memory, lease = received(key, memory, count)
    return Packed(memory, places, counts, lease)


def _ones(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.ones(shape, dtype=dtype, device=device)
    # NumPy fills them in one thread: PyTorch's wait long for cores on which workers gather.
    return torch.from_numpy(np.ones(shape, dtype=torch.empty(0, dtype=dtype).numpy().dtype))
