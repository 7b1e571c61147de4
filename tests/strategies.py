"""What hypothesis draws: jagged batches with everything that breaks kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.places import PLACE

LONGEST = {"cpu": 150, "interpret": 40, "gpu": 700}[PLACE.name]


@dataclass(frozen=True)
class Jagged:
    """Lengths of a batch and its offsets on the place's device."""

    lengths: tuple[int, ...]
    offsets: Tensor

    @property
    def total(self) -> int:
        return sum(self.lengths)

    @property
    def batch_size(self) -> int:
        return len(self.lengths)


def jagged_of(lengths: tuple[int, ...], dtype: torch.dtype = torch.int64) -> Jagged:
    offsets = torch.zeros(len(lengths) + 1, dtype=dtype)
    offsets[1:] = torch.tensor(lengths, dtype=dtype).cumsum(0)
    return Jagged(lengths, offsets.to(PLACE.device))


def lengths(max_batch: int = 6, longest: int = LONGEST) -> st.SearchStrategy[tuple[int, ...]]:
    """Lengths that include 0, an empty batch, and one sample much longer than the rest."""
    short = st.lists(st.integers(0, 7), max_size=max_batch)
    with_long = st.tuples(short, st.integers(longest // 2, longest), short).map(lambda t: [*t[0], t[1], *t[2]])
    return st.one_of(short, with_long).map(tuple)


def jagged_batches(max_batch: int = 6, longest: int = LONGEST) -> st.SearchStrategy[Jagged]:
    return st.builds(jagged_of, lengths(max_batch, longest), st.sampled_from([torch.int32, torch.int64]))


def float_dtypes() -> st.SearchStrategy[torch.dtype]:
    return st.sampled_from(PLACE.dtypes)


def seeds() -> st.SearchStrategy[int]:
    return st.integers(0, 2**31 - 1)


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int, *, strided: bool = False) -> Tensor:
    """Normal values, exactly representable in `dtype`; `strided` leaves gaps between rows and between elements."""
    generator = torch.Generator().manual_seed(seed)
    if strided and len(shape) > 1:
        wide = (*shape[:-1], 2 * shape[-1] + 1)
        return torch.randn(wide, generator=generator).to(dtype).to(PLACE.device)[..., 1 : 2 * shape[-1] + 1 : 2]
    return torch.randn(shape, generator=generator).to(dtype).to(PLACE.device)
