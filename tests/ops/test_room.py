"""Gradients that are to be one tensor are copied behind the largest of them only where that is allowed."""

from __future__ import annotations

import pytest
import torch

from jagged.ops._shared.room import joined, zeros_with_room
from tests.places import PLACE

DEVICE = torch.device(PLACE.device)


def numbers(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(1, count + 1, device=DEVICE).to(dtype)


def with_room(room: int) -> torch.Tensor:
    return zeros_with_room(4, 3, room, torch.float32, DEVICE).copy_(numbers(12).view(4, 3))


@pytest.mark.parametrize("place", [0, 1, 2])
def test_behind_the_largest(place: int) -> None:
    large, others = with_room(4), [numbers(5), numbers(4).view(2, 2)]
    given = [*others[:place], large, *others[place:]]
    whole, begins = joined(given)
    assert whole.data_ptr() == large.data_ptr()
    assert whole.shape == (21,)
    for begin, of in zip(begins, given, strict=True):
        assert torch.equal(whole[begin : begin + of.numel()], of.flatten())
    # What is behind all of them is room still.
    more, begins = joined([numbers(1), whole])
    assert (more.data_ptr(), begins, more.numel()) == (large.data_ptr(), [21, 0], 22)


@pytest.mark.parametrize("why", ["little room", "nobody said so", "dtype"])
def test_beside_it(why: str) -> None:
    large = torch.zeros(7, 3, device=DEVICE)[:4].copy_(numbers(12).view(4, 3)) if why == "nobody said so" else with_room(3)
    other = numbers(10 if why == "little room" else 5, torch.float64 if why == "dtype" else torch.float32)
    behind = torch.as_strided(large, (9,), (1,), 12).clone()
    whole, begins = joined([other, large])
    assert begins == [0, other.numel()]
    assert torch.equal(whole, torch.cat([other, large.flatten()]))
    assert torch.equal(torch.as_strided(large, (9,), (1,), 12), behind)


def test_through_a_sparse_tensor() -> None:
    """Which autograd makes of the gradient on its way."""
    large = with_room(2)
    sparse = torch.sparse_coo_tensor(torch.arange(4, device=DEVICE)[None], large, (9, 3), check_invariants=False)
    data = large.data_ptr()
    del large
    whole, _ = joined([sparse._values(), numbers(6)])
    assert whole.data_ptr() == data
