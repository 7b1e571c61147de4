"""Shorter histories: the latest rows of each sample, and a random part of long ones."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor

from jagged.modules import StochasticLength, latest_rows
from tests.places import PLACE, Place
from tests.strategies import Jagged, jagged_batches, jagged_of

pytestmark = pytest.mark.skipif(PLACE.name == "interpret", reason="modules run on the place's own backend")


def rows_of(batch: Jagged) -> JaggedTensor:
    return JaggedTensor(torch.arange(batch.total, device=PLACE.device), offsets=batch.offsets)


@given(jagged_batches(longest=12), st.integers(0, 9), st.data())
def test_latest_rows(place: Place, batch: Jagged, length: int, data: st.DataObject) -> None:
    each = st.lists(st.integers(0, 9), min_size=batch.batch_size, max_size=batch.batch_size)
    numbers = each.map(lambda n: torch.tensor(n, dtype=torch.int32, device=place.device))
    targets: Any = data.draw(st.one_of(st.none(), st.integers(0, 5), numbers))
    every = [0 if targets is None else targets] * batch.batch_size if not isinstance(targets, Tensor) else targets.tolist()
    parts = rows_of(batch).to_dense()
    # Of a sample that has fewer rows than targets all are targets.
    expected = [part[max(0, len(part) - min(n, len(part)) - length) :] for part, n in zip(parts, every, strict=True)]
    total = sum(map(len, expected))
    for given_ in (None, total):
        found = latest_rows(rows_of(batch), length, targets, given_)
        assert found.values().tolist() == [row for part in expected for row in part.tolist()]
        assert found.offsets().diff().tolist() == [len(part) for part in expected]
        assert found.offsets().dtype == batch.offsets.dtype


def test_gradients_of_dropped_rows_are_zero(place: Place) -> None:
    values = torch.ones(7, 2, device=place.device, requires_grad=True)
    found = latest_rows(JaggedTensor(values, offsets=jagged_of((4, 0, 3)).offsets), 2)
    (gradient,) = torch.autograd.grad(found.values().sum(), values)
    assert gradient[:, 0].tolist() == [0, 0, 1, 1, 0, 1, 1]


@given(jagged_batches(longest=40), st.integers(0, 2**31), st.data())
def test_rows_that_are_kept(place: Place, batch: Jagged, seed: int, data: st.DataObject) -> None:
    """So many of each sample as told, in their order, the same of the same seed."""
    lengths = torch.tensor([data.draw(st.integers(0, length + 2)) for length in batch.lengths], dtype=batch.offsets.dtype)
    counts = [min(int(wanted), length) for wanted, length in zip(lengths, batch.lengths, strict=True)]
    module, x = StochasticLength(50).to(place.device), rows_of(batch)

    def run(total: int | None) -> tuple[list[int], list[int]]:
        torch.manual_seed(seed)
        kept = module(x, lengths, total)
        assert kept.rows.dtype == torch.int64
        return kept.rows.tolist(), kept.offsets.diff().tolist()

    rows, found = run(None)
    assert found == counts
    assert (rows, found) == run(sum(counts))
    starts = [0, *batch.offsets.tolist()]
    at = 0
    for sample, count in enumerate(counts):
        part = rows[at : at + count]
        assert part == sorted(set(part))
        assert all(starts[sample + 1] <= row < starts[sample + 1] + batch.lengths[sample] for row in part)
        at += count


def test_every_row_is_kept_as_often_as_any_other(place: Place) -> None:
    torch.manual_seed(0)
    x, module = rows_of(jagged_of((8, 0, 20))), StochasticLength(50).to(place.device)
    lengths, found = torch.tensor([2, 0, 5]), torch.zeros(28)
    for _ in range(800):
        found.index_add_(0, module(x, lengths, 7).rows.cpu(), torch.ones(7))
    # A quarter of 800 is 200, with a standard deviation of 12.
    assert bool(((found - 200).abs() < 60).all())


def test_which_samples_are_shortened() -> None:
    """`1 - N^alpha / n^2` of them: of N = 100 and alpha = 1.5, 1,000 / 80^2 of those with 80 rows stay whole."""
    torch.manual_seed(0)
    module = StochasticLength(100, 1.5)
    lengths = torch.tensor([80, 40, 31, 3, 0]).repeat(4_000, 1)
    drawn = module.draw(lengths)
    assert drawn.dtype == lengths.dtype
    whole = (drawn == lengths).double().mean(0)
    assert abs(float(whole[0]) - 1_000 / 6_400) < 0.03
    assert abs(float(whole[1]) - 1_000 / 1_600) < 0.03
    assert whole[2:].tolist() == [1, 1, 1]
    assert set(drawn[:, 0].tolist()) == {31, 80}
    assert torch.equal(StochasticLength(100, 2.0).draw(lengths), lengths)
    assert torch.equal(module.eval().draw(lengths), lengths)


def test_nothing_is_dropped_in_evaluation(place: Place) -> None:
    x = rows_of(jagged_of((60, 0, 3)))
    module = StochasticLength(30, 1.0).to(place.device)
    assert len(module(x).rows) < 63
    kept = module.eval()(x)
    assert torch.equal(kept.rows, x.values())
    assert torch.equal(kept.offsets, x.offsets())


@pytest.mark.gpu
def test_with_a_total_nothing_waits(place: Place) -> None:
    x, lengths = rows_of(jagged_of((60, 0, 3))), torch.tensor([5, 0, 3], device=place.device)
    module = StochasticLength(30, 1.0).to(place.device)
    module(x, lengths, 8)
    torch.cuda.set_sync_debug_mode("error")
    try:
        module(x, lengths, 8)
        latest_rows(x, 2, lengths, 12)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_messages() -> None:
    x = JaggedTensor(torch.arange(4), offsets=torch.tensor([0, 1, 4]))
    for run, message in (
        (lambda: latest_rows(x, -1), "length: expected 0 or more, got -1"),
        (lambda: latest_rows(x, 1, torch.zeros(3)), "num_targets: expected [2], one for each sample, got [3]"),
        (lambda: StochasticLength(0), "longest: expected 1 or more, got 0"),
        (lambda: StochasticLength(9, 2.1), "alpha: expected above 0 and at most 2, got 2.1"),
        (lambda: StochasticLength(9)(x, torch.zeros(3)), "lengths: expected [2], one for each sample, got [3]"),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            run()  # type: ignore[no-untyped-call]
    assert repr(StochasticLength(9)) == "StochasticLength(longest=9, alpha=1.7)"
