"""Which sample a row is of, from right offsets and wrong ones, in eager calls and compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from jagged.ops import row_positions, sample_of_row
from jagged.ops._shared.offsets import covering, searched
from tests.places import PLACE, Place

pytestmark = pytest.mark.skipif(PLACE.name == "interpret", reason="plain PyTorch, without a kernel")


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.sampled_from([torch.int32, torch.int64]))
def test_rows_are_of_the_sample_that_has_them(place: Place, lengths: list[int], dtype: torch.dtype) -> None:
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=dtype, device=place.device)
    expected = [sample for sample, length in enumerate(lengths) for _ in range(length)]
    total = len(expected)
    assert sample_of_row(offsets, total).tolist() == expected
    assert searched(covering(offsets, total), total).tolist() == expected


@given(st.lists(st.integers(-3, 9), min_size=2, max_size=6), st.integers(0, 9))
def test_wrong_offsets_lead_to_no_sample_that_is_not_there(place: Place, offsets: list[int], total: int) -> None:
    given_ = torch.tensor(offsets, device=place.device)
    for samples in (sample_of_row(given_, total), searched(covering(given_, total), total)):
        assert samples.shape == (total,)
        assert bool(((samples >= 0) & (samples < len(offsets) - 1)).all())


def test_positions_are_counted_from_the_start_unless_asked(place: Place) -> None:
    offsets = torch.tensor([0, 0, 3, 3, 5], device=place.device)
    assert row_positions(offsets, 5).tolist() == [0, 1, 2, 0, 1]
    assert row_positions(offsets, 5, from_end=True).tolist() == [2, 1, 0, 1, 0]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize(
    "function",
    [
        lambda values, offsets: sample_of_row(offsets, values.shape[0]),
        lambda values, offsets: row_positions(offsets, values.shape[0]),
        lambda values, offsets: row_positions(offsets, values.shape[0], from_end=True),
    ],
    ids=["sample_of_row", "row_positions", "from_end"],
)
def test_inductor_searches_where_views_begin(place: Place, function: Any, view: bool) -> None:
    """Offsets that are a view of a longer tensor, too: Inductor up to torch 2.12 took the longer tensor's."""

    def call(values: Tensor, longer: Tensor) -> Any:
        return function(values, longer[2:] if view else longer)

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, dynamic=True)
    for lengths in ([2, 1, 0, 4], [1, 1, 5, 2, 1]):
        ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], device=place.device)
        longer = torch.cat([ends.new_full((2,), -7), ends]) if view else ends
        values = torch.arange(sum(lengths), device=place.device) % 3
        for found, expected in zip(*(torch.utils._pytree.tree_leaves(f(values, longer)) for f in (compiled, call)), strict=True):
            assert torch.equal(found, expected)
