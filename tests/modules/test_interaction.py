"""CrossNet, DotInteraction and TimeEncoding against plain torch, by hand, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchrec.modules.crossnet import CrossNet as TorchRecsCrossNet
from torchrec.modules.crossnet import LowRankCrossNet
from torchrec.sparse.jagged_tensor import JaggedTensor

from jagged.modules import CrossNet, DotInteraction, TimeEncoding
from tests.oracle import check_three_way
from tests.places import PLACE, Place
from tests.reference.attention import time_buckets
from tests.reference.conversion import to_dense, to_jagged
from tests.strategies import Jagged, jagged_batches, jagged_of, random_tensor, seeds

pytestmark = pytest.mark.skipif(PLACE.name == "interpret", reason="modules run on the place's own backend")


@pytest.mark.parametrize("rank", [None, 3])
def test_cross_net_is_torchrecs(place: Place, rank: int | None) -> None:
    torch.manual_seed(0)
    ours = CrossNet(7, 2, rank=rank).double().to(place.device)
    theirs = (TorchRecsCrossNet(7, 2) if rank is None else LowRankCrossNet(7, 2, rank)).double().to(place.device)
    with torch.no_grad():
        for place_, layer in enumerate(ours.layers):
            last = layer if rank is None else layer[1]
            theirs.bias[place_].copy_(last.bias[:, None] if theirs.bias[place_].dim() == 2 else last.bias)
            if rank is None:
                theirs.kernels[place_].copy_(layer.weight)
            else:
                theirs.V_kernels[place_].copy_(layer[0].weight)
                theirs.W_kernels[place_].copy_(layer[1].weight)
    x = torch.randn(5, 7, dtype=torch.float64, device=place.device)
    torch.testing.assert_close(ours(x), theirs(x))
    assert ours(x[:, None])[:, 0].equal(ours(x))
    assert ours(x[:0]).shape == (0, 7)


def test_cross_net_by_hand(place: Place) -> None:
    net = CrossNet(2, 2).to(place.device)
    with torch.no_grad():
        for layer in net.layers:
            layer.weight.copy_(torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
            layer.bias.fill_(1.0)
    # (2, 3) -> (2 * 4 + 2, 3 * 3 + 3) = (10, 12) -> (2 * 13 + 10, 3 * 11 + 12)
    assert net(torch.tensor([[2.0, 3.0]], device=place.device)).tolist() == [[36.0, 45.0]]


@settings(max_examples=30)
@given(jagged_batches(longest=30), seeds(), st.integers(1, 4), st.integers(0, 3))
def test_dots_are_those_of_padded_rows(place: Place, batch: Jagged, seed: int, n: int, m: int) -> None:
    """With the sample's vectors beside each row's: the upper triangle, without what these give with one another."""
    width, longest = 5, max([1, *batch.lengths])

    def ours(rows: Tensor, context: Tensor) -> Tensor:
        x = JaggedTensor(values=rows, offsets=batch.offsets)
        return DotInteraction()(x, context if m else None).values()

    def padded(rows: Tensor, context: Tensor) -> Tensor:
        dense = to_dense(rows.flatten(1), batch.lengths, longest, 0.0).unflatten(2, (n, width))
        both = torch.cat([dense, context[:, None].expand(-1, longest, -1, -1)], 2)
        every = both @ both.transpose(2, 3)
        own = [every[:, :, i, j] for i in range(n) for j in range(i + 1, n)]
        theirs = [every[:, :, i, n + j] for i in range(n) for j in range(m)]
        stacked = torch.stack([*own, *theirs], 2) if own or theirs else every.new_zeros(*every.shape[:2], 0)
        return to_jagged(stacked, batch.lengths)

    inputs = [
        random_tensor((batch.total, n, width), torch.float32, seed),
        random_tensor((batch.batch_size, m, width), torch.float32, seed + 1),
    ]
    check_three_way(ours, padded, inputs, requires_grad=[n + m > 1, m > 0])


def test_dots_of_a_tensor(place: Place) -> None:
    x = torch.randn(3, 4, 6, device=place.device)
    found = DotInteraction()(x)
    expected = [(x[:, i] * x[:, j]).sum(1) for i in range(4) for j in range(i + 1, 4)]
    torch.testing.assert_close(found, torch.stack(expected, 1))
    assert DotInteraction()(x[:, :1]).shape == (3, 0)
    jagged = JaggedTensor(values=x, offsets=jagged_of((2, 0, 1)).offsets)
    assert DotInteraction()(jagged).values().equal(found)


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


@pytest.mark.parametrize("build", [lambda d: CrossNet(4, 2, rank=2, device=d), lambda d: TimeEncoding(3, 4, device=d)])
def test_meta_device_and_reset(build: Any) -> None:
    module = build("meta")
    assert all(parameter.is_meta for parameter in module.parameters())
    module = module.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(torch.nan)
    module.reset_parameters()
    assert all(torch.isfinite(parameter).all() for parameter in module.parameters())


def test_repr() -> None:
    assert repr(CrossNet(4, 1)).startswith("CrossNet(\n  in_features=4, rank=None\n")
    assert repr(TimeEncoding(3, 4)) == "TimeEncoding(num_buckets=3, embedding_dim=4)"


def test_messages() -> None:
    def said(call: Any) -> str:
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole line is compared
            call()
        return str(caught.value)

    jagged = JaggedTensor(values=torch.zeros(3, 2, 4), offsets=torch.tensor([0, 1, 3]))
    rows = JaggedTensor(values=torch.zeros(3, 4), offsets=torch.tensor([0, 1, 3]))
    dots, times = DotInteraction(), TimeEncoding(3, 4)
    assert said(lambda: CrossNet(4, 0)) == "num_layers: expected 1 or more, got 0; without layers nothing is crossed"
    assert said(lambda: CrossNet(4, rank=0)) == "rank: expected 1 or more, got 0; use None for whole matrices"
    assert said(lambda: CrossNet(4)(torch.zeros(2, 3))) == "x: expected values [*, D] with D = 4, got [2, 3]"
    assert said(lambda: dots(rows)) == "x: expected values [sum L, n, d], got [3, 4]; a row has n vectors of one width"
    assert said(lambda: dots(torch.zeros(2, 1, 4), torch.zeros(2, 1, 4))) == (
        "context: expected None, got [2, 1, 4]; rows of a JaggedTensor have samples"
    )
    assert said(lambda: dots(jagged, torch.zeros(2, 1, 3))) == (
        "context: expected vectors [B, m, d] with d = 4, as wide as those of x, got [2, 1, 3]"
    )
    assert said(lambda: dots(jagged, torch.zeros(1, 1, 4))) == (
        "context: expected 2 samples, as many as x has, got 1; each sample has its own vectors"
    )
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
