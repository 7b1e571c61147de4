"""Tensors of a batch in one piece of memory: one message from a worker, one page-locked block, one copy to a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

# Where each tensor begins: kernels load 16 bytes at once, and rows of memory have 64.
_ALIGNMENT = 64


@dataclass(frozen=True, eq=False)
class Packed:
    """Tensors of any types and shapes, one behind the other.

    Attributes:
        memory: uint8 `[bytes]`.
        places: of each tensor its type, its shape and its first byte.
    """

    memory: Tensor
    places: Mapping[str, tuple[torch.dtype, tuple[int, ...], int]]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Packed:
        """A copy of tensors on the host."""
        places, end = {}, 0
        for name, tensor in tensors.items():
            places[name] = tensor.dtype, tuple(tensor.shape), end
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        packed = cls(torch.empty(end, dtype=torch.uint8), places)
        for name, view in packed.tensors().items():
            view.copy_(tensors[name])
        return packed

    def tensors(self) -> dict[str, Tensor]:
        """The tensors as views of the memory."""
        found = {}
        for name, (dtype, shape, begin) in self.places.items():
            end = begin + prod(shape) * dtype.itemsize
            found[name] = self.memory[begin:end].view(dtype).view(shape)
        return found

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Packed:
        """The same with another memory."""
        return replace(self, memory=change(self.memory))

    def pin_memory(self) -> Packed:
        """The same in page-locked memory; `DataLoader` asks for it."""
        return self.mapped(lambda memory: memory.pin_memory())
