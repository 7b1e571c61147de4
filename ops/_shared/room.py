"""Room behind a large gradient, to which small ones are copied where all are to be one tensor, so that it is not copied."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor


def zeros_with_room(rows: int, width: int, room: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros `[rows, width]`, behind which there is room for so many more rows, to which `joined` may write."""
    whole = torch.zeros(rows + room, width, dtype=dtype, device=device)
    # A storage is one object in Python as long as it lives, whichever tensors share it.
    whole.untyped_storage().has_room = True  # type: ignore[attr-defined]
    return whole[:rows]


def _room_of(gradient: Tensor) -> int:
    """Return how many numbers there is room for behind a gradient."""
    storage = gradient.untyped_storage()
    if not getattr(storage, "has_room", False):
        return 0
    return int(storage.nbytes()) // gradient.element_size() - int(gradient.storage_offset()) - gradient.numel()


def joined(gradients: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
    """Return contiguous gradients as one flat tensor, and where each begins in it: behind the largest one, if there is room.

    What has several dtypes is brought to one that holds them.
    """
    sizes = [of.numel() for of in gradients]
    largest = max(range(len(sizes)), key=sizes.__getitem__)
    dtype = functools.reduce(torch.promote_types, (of.dtype for of in gradients))
    one, size = gradients[largest], sum(sizes)
    if one.dtype != dtype or _room_of(one) < size - sizes[largest]:
        return torch.cat([of.flatten() for of in gradients]), [0, *accumulate(sizes[:-1])]
    whole, begins, begin = one.as_strided((size,), (1,)), [0] * len(sizes), sizes[largest]
    for place, of in enumerate(gradients):
        if place != largest:
            whole[begin : begin + sizes[place]].copy_(of.flatten())
            begins[place] = begin
            begin += sizes[place]
    return whole, begins
