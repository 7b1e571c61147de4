"""Samplers: their tables, their seeds, and the probabilities that they give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from jagged.modules import (
    InBatchSampler,
    LogUniformSampler,
    MixedSampler,
    PopularitySampler,
    Sampler,
    UniformSampler,
)
from jagged.ops import Draw, drawn_negatives
from tests.places import PLACE, Place

ITEMS = 9

pytestmark = pytest.mark.skipif(PLACE.name == "interpret", reason="modules run on the place's own backend")

BUILDERS: dict[str, Callable[..., Sampler]] = {
    "uniform": lambda **kw: UniformSampler(ITEMS, 4, **kw),
    "log-uniform": lambda **kw: LogUniformSampler(ITEMS, 4, **kw),
    "popularity": lambda **kw: PopularitySampler(torch.arange(ITEMS), 4, **kw),
    "mixed": lambda **kw: MixedSampler(
        InBatchSampler(torch.arange(ITEMS), device=kw.get("device")), UniformSampler(ITEMS, 4, rows_per_draw=None, **kw)
    ),
}


def ids_of(sampler: Sampler, targets: Tensor) -> Tensor:
    negatives = sampler(targets).negatives
    return drawn_negatives(negatives, len(targets), ITEMS) if isinstance(negatives, Draw) else negatives


@settings(max_examples=200)
@given(
    st.lists(st.one_of(st.integers(0, 4), st.floats(0, 1e6, width=32)), min_size=1, max_size=40),
    st.sampled_from([0.0, 0.75, 1.0]),
)
def test_the_alias_table_has_the_probabilities(counts: list[float], power: float) -> None:
    counts = [*counts, 1.0]
    sampler = PopularitySampler(torch.tensor(counts, dtype=torch.float64), 4, power=power)
    kept, alias = sampler.alias_probability.double(), sampler.alias.long()
    weights = torch.tensor([count**power if count else 0.0 for count in counts], dtype=torch.float64)
    q = weights / weights.sum()
    assert bool(((kept >= 0) & (kept <= 1)).all())
    found = (kept / len(q)).scatter_add(0, alias, (1 - kept) / len(q))
    # The table is rounded to float32.
    torch.testing.assert_close(found, q, rtol=0, atol=2.0**-23)
    never = q == 0
    assert not kept[never].any()
    assert not never[alias[kept < 1]].any()
    torch.testing.assert_close(sampler.log_q[~never].double(), q[~never].log(), rtol=2.0**-22, atol=2.0**-22)
    assert bool((sampler.log_q[never] == sampler.log_q[~never].min()).all())


@pytest.mark.parametrize("name", list(BUILDERS))
def test_training_draws_by_torchs_random_state_and_evaluation_by_the_seed(place: Place, name: str) -> None:
    sampler, targets = BUILDERS[name](seed=5).to(place.device), torch.arange(8, device=place.device)
    torch.manual_seed(3)
    first, second = ids_of(sampler, targets), ids_of(sampler, targets)
    assert not torch.equal(first, second)
    other = BUILDERS[name](seed=6).to(place.device)
    torch.manual_seed(3)
    assert torch.equal(ids_of(other, targets), first)
    sampler.eval()
    other.eval()
    fixed = ids_of(sampler, targets)
    assert torch.equal(ids_of(sampler, targets), fixed)
    assert not torch.equal(ids_of(other, targets), fixed)
    other.load_state_dict(sampler.state_dict())
    assert torch.equal(ids_of(other, targets), fixed)


def test_a_draw_outlives_the_next_one(place: Place) -> None:
    """Gradient accumulation: two forwards before the first one's backward, which draws again."""
    sampler, targets = BUILDERS["uniform"]().to(place.device), torch.arange(8, device=place.device)
    draw = cast(Draw, sampler(targets).negatives)
    before = drawn_negatives(draw, 8, ITEMS)
    sampler(targets)
    assert torch.equal(drawn_negatives(draw, 8, ITEMS), before)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("ignored", [-100, 2])
def test_in_batch_negatives_are_the_targets_that_count(place: Place, dtype: torch.dtype, ignored: int) -> None:
    counts = torch.tensor([5, 1, 0, 4], device=place.device)
    targets = torch.tensor([0, ignored, 3, 0], dtype=dtype, device=place.device)
    negatives, log_q, target_log_q = InBatchSampler(counts)(targets, ignore_index=ignored)
    assert negatives.tolist() == [0, -1, 3, 0]
    assert log_q is not None
    # How often each is expected among three rows.
    torch.testing.assert_close(len(targets) * log_q.exp()[[0, 2, 3]], 3 * torch.tensor([0.5, 0.4, 0.5], device=place.device))
    assert target_log_q is not None
    assert torch.equal(target_log_q[[0, 2, 3]], log_q[[0, 2, 3]])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_tables_are_float32_under_another_default_dtype(dtype: torch.dtype) -> None:
    counts, targets = torch.arange(1, ITEMS + 1), torch.tensor([0, 3, -100, 8])
    expected = InBatchSampler(counts)(targets)
    torch.set_default_dtype(dtype)
    try:
        sampler = InBatchSampler(counts)
        found = sampler(targets)
        mixed = MixedSampler(sampler, UniformSampler(ITEMS, 4, rows_per_draw=None))(targets)
    finally:
        torch.set_default_dtype(torch.float32)
    assert sampler.log_q is not None
    assert sampler.log_q.dtype == torch.float32
    for ours, wanted in zip(found, expected, strict=True):
        assert torch.equal(cast(Tensor, ours), cast(Tensor, wanted))
        assert cast(Tensor, ours).dtype == cast(Tensor, wanted).dtype
    assert mixed.negative_log_q is not None
    assert mixed.negative_log_q.dtype == torch.float32


def test_in_batch_of_nothing_and_of_ignored_rows(place: Place) -> None:
    for sampler in (InBatchSampler(), InBatchSampler(torch.ones(4))):
        for targets in (torch.zeros(0, dtype=torch.int64), torch.full((3,), -100)):
            negatives, log_q, target_log_q = sampler.to(place.device)(targets.to(place.device))
            assert negatives.tolist() == [-1] * max(len(targets), 1)
            assert all(x is None or bool(torch.isfinite(x).all()) for x in (log_q, target_log_q))
    assert InBatchSampler()(torch.tensor([1])).negative_log_q is None


@pytest.mark.parametrize(
    ("drawn", "q"),
    [
        (lambda: UniformSampler(3, 5, rows_per_draw=None), [1 / 3, 1 / 3, 1 / 3]),
        (lambda: PopularitySampler(torch.tensor([3, 0, 1]), 5, rows_per_draw=None), [0.75, 0.25, 0.25]),
        (lambda: LogUniformSampler(3, 5, rows_per_draw=None), [0.5, 0.29248125, 0.20751875]),
    ],
    ids=["uniform", "popularity", "log-uniform"],
)
def test_a_mixture_has_the_probabilities_of_both(place: Place, drawn: Callable[[], Any], q: list[float]) -> None:
    sampler = MixedSampler(InBatchSampler(torch.tensor([1, 2, 7])), drawn()).to(place.device)
    targets = torch.tensor([2, -100, 0, 2, 1], device=place.device)
    negatives, log_q, target_log_q = sampler(targets)
    assert negatives[:5].tolist() == [2, -1, 0, 2, 1]
    assert len(negatives) == 10
    assert log_q is not None
    assert target_log_q is not None
    # Four rows that count and five draws.
    expected = 4 * torch.tensor([0.1, 0.2, 0.7]) + 5 * torch.tensor(q)
    counted = negatives >= 0
    torch.testing.assert_close(10 * log_q.exp()[counted].cpu(), expected[negatives[counted].cpu()])
    assert torch.equal(target_log_q[counted[:5]], log_q[:5][counted[:5]])


@pytest.mark.parametrize("name", list(BUILDERS))
def test_meta_device(name: str) -> None:
    built = BUILDERS[name](seed=3, device="meta")
    assert all(buffer.is_meta for buffer in built.buffers())
    there = BUILDERS[name](seed=7)
    built = built.to_empty(device="cpu")
    built.load_state_dict(there.state_dict())
    targets = torch.arange(8)
    assert torch.equal(ids_of(built.eval(), targets), ids_of(there.eval(), targets))
    (built.drawn if isinstance(built, MixedSampler) else built).reset_parameters()
    assert built.state_dict()["drawn.seed" if name == "mixed" else "seed"].item() == 3


def test_other_counts_take_the_place_of_the_first() -> None:
    popularity, in_batch = PopularitySampler(torch.ones(3, device="meta"), 4), InBatchSampler(torch.ones(3, device="meta"))
    for sampler in (popularity, in_batch):
        sampler.to_empty(device="cpu")
        sampler.set_counts(torch.tensor([2, 1, 1]))
        assert sampler.log_q.exp().tolist() == [0.5, 0.25, 0.25]
        with pytest.raises(ValueError, match=r"counts: expected .* got "):
            sampler.set_counts(torch.ones(4))


def test_messages() -> None:
    shared, in_batch = UniformSampler(4, 2, rows_per_draw=None), InBatchSampler(torch.ones(4))
    for call, message in [
        (lambda: UniformSampler(0, 2), "num_items: expected from 1 to 2\\^31 - 1 items, got 0"),
        (lambda: UniformSampler(2, 0), "count: expected at least one negative, got 0"),
        (lambda: UniformSampler(2, 3, replacement=False), "count: expected at most 2, the number of items, without replacement"),
        (lambda: LogUniformSampler(2, 3, rows_per_draw=0), "rows_per_draw: expected at least 1, or None"),
        (lambda: PopularitySampler(torch.zeros(3), 2), "counts: expected numbers of at least 0, one of them above 0"),
        (lambda: PopularitySampler(torch.tensor([1.0, -1.0]), 2), "counts: expected numbers of at least 0"),
        (lambda: PopularitySampler(torch.tensor([1.0, torch.inf]), 2), "counts: expected numbers of at least 0"),
        (lambda: PopularitySampler(torch.ones(3, 3), 2), r"counts: expected shape \[V\], one number per item, got \[3, 3\]"),
        (lambda: PopularitySampler(torch.ones(3), 2, power=-1), "power: expected a number of at least 0, got -1"),
        (lambda: InBatchSampler(torch.zeros(3)), "counts: expected numbers of at least 0"),
        (lambda: MixedSampler(InBatchSampler(), shared), "in_batch: expected a sampler with counts, got one without"),
        (lambda: MixedSampler(in_batch, UniformSampler(4, 2)), "drawn: expected one draw for the batch, with replacement, got"),
        (
            lambda: MixedSampler(in_batch, UniformSampler(4, 2, rows_per_draw=None, replacement=False)),
            "drawn: expected one draw for the batch, with replacement, got",
        ),
        (lambda: MixedSampler(in_batch, UniformSampler(5, 2, rows_per_draw=None)), "drawn: expected 4 items, as in_batch has"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


def test_shown_with_their_options() -> None:
    assert repr(PopularitySampler(torch.ones(3), 2)) == "PopularitySampler(num_items=3, count=2, rows_per_draw=1, power=1.0)"
    assert repr(InBatchSampler(torch.ones(3))) == "InBatchSampler(num_items=3)"
    assert "UniformSampler(num_items=9, count=4, rows_per_draw=None, replacement=True)" in repr(BUILDERS["mixed"]())
