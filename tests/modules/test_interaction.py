"""TimeEncoding against plain torch, by hand, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec.sparse.jagged_tensor import JaggedTensor

from jagged.modules import TimeEncoding
from tests.places import PLACE, Place
from tests.reference.attention import time_buckets
from tests.strategies import jagged_of

pytestmark = pytest.mark.skipif(PLACE.name == "interpret", reason="modules run on the place's own backend")


@given(
    st.lists(st.one_of(st.integers(-5, 50), st.integers(0, 2**62)), max_size=20), st.integers(1, 130),
    st.sampled_from([torch.int32, torch.int64]),
)  # fmt: skip
def test_times_are_counted_as_in_attention(place: Place, since: list[int], count: int, dtype: Any) -> None:
    since = [x % 2**31 for x in since] if dtype == torch.int32 else since
    encoding = TimeEncoding(count, 1).to(place.device)
    with torch.no_grad():
        encoding.weight.copy_(torch.arange(count)[:, None])
    offsets = torch.tensor([0, len(since) // 2, len(since)], device=place.device)
    x = JaggedTensor(values=torch.zeros(len(since), 1, device=place.device), offsets=offsets)
    times = torch.tensor([-x for x in since], dtype=dtype, device=place.device)
    found = encoding(x, times, torch.zeros(2, dtype=dtype, device=place.device)).values().flatten().tolist()
    assert found == time_buckets(torch.tensor(since, dtype=dtype).clamp(min=0)).clamp(max=count - 1).tolist()


def test_times_are_before_the_samples_own(place: Place) -> None:
    encoding = TimeEncoding(9, 1).to(place.device)
    with torch.no_grad():
        encoding.weight.copy_(torch.arange(9)[:, None])
    x = JaggedTensor(values=torch.full((4, 1), 10.0, device=place.device), offsets=jagged_of((3, 0, 1)).offsets)
    times, now = (torch.tensor(x, device=place.device) for x in ([7, 9, 10], [10, 5, 2]))
    times = torch.cat([times, times.new_tensor([1])])
    assert encoding(x, times, now).values().flatten().tolist() == [14.0, 11.0, 10.0, 11.0]


def test_meta_device_and_reset() -> None:
    module = TimeEncoding(3, 4, device="meta")
    assert module.weight.is_meta
    module = module.to_empty(device="cpu")
    with torch.no_grad():
        module.weight.fill_(torch.nan)
    module.reset_parameters()
    assert torch.isfinite(module.weight).all()


def test_repr() -> None:
    assert repr(TimeEncoding(3, 4)) == "TimeEncoding(num_buckets=3, embedding_dim=4)"


def test_messages() -> None:
    def said(call: Any) -> str:
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole line is compared
            call()
        return str(caught.value)

    jagged = JaggedTensor(values=torch.zeros(3, 2, 4), offsets=torch.tensor([0, 1, 3]))
    rows = JaggedTensor(values=torch.zeros(3, 4), offsets=torch.tensor([0, 1, 3]))
    times = TimeEncoding(3, 4)
    assert said(lambda: TimeEncoding(0, 4)) == "num_buckets: expected 1 or more, got 0"
    assert said(lambda: times(jagged, torch.zeros(3), torch.zeros(2))) == (
        "x: expected values [sum L, D] with D = 4, got [3, 2, 4]; the module's width is set where it is built"
    )
    assert said(lambda: times(rows, torch.zeros(2), torch.zeros(2))) == (
        "times: expected 3 rows, as many as x has, got 2; each row has a time"
    )
    assert said(lambda: times(rows, torch.zeros(3), torch.zeros(3))) == (
        "now: expected 2 samples, as many as x has, got 3; each sample has a time"
    )
