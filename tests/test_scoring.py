"""Catalogue ranking against sorting every user's scores by (score descending, item id ascending)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jagged.metrics import MISS
from jagged.scoring import rank_catalogue
from tests.memory import PeakMemory


def reference(hidden, weight, k, targets=None, viewed=None, take_out=False):
    """Items, scores and target ranks by sorting in Python; float64 scores, rounded to fp32."""
    values, offsets = viewed if viewed is not None else (None, None)
    items, scores, ranks = [], [], []
    for user, row in enumerate((hidden.double() @ weight.double().T).float().tolist()):
        seen = set(values[offsets[user] : offsets[user + 1]].tolist()) if take_out else set()
        target = None if targets is None else int(targets[user])
        order = sorted((item for item in range(len(row)) if item not in seen or item == target), key=lambda i: (-row[i], i))
        ranks.append(order.index(target) if target is not None and target >= 0 else MISS)
        items.append([*order[:k], *[-1] * (k - len(order))])
        scores.append([*(row[item] for item in order[:k]), *[-torch.inf] * (k - len(order))])
    return items, scores, ranks


def integers(seed, *shape, low=-2, high=3, dtype=torch.float32):
    """Small whole numbers: every order of summation gives the same score, and many scores are equal."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@st.composite
def problems(draw):
    seed = draw(st.integers(0, 2**31))
    users, items, dim = draw(st.integers(0, 40)), draw(st.integers(1, 300)), draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(-1, items, (users,), generator=generator)
    lengths = torch.randint(0, min(2 * items, 400), (users,), generator=generator) * torch.randint(
        0, 2, (users,), generator=generator
    )
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    values = torch.randint(-1, items, (int(offsets[-1]),), generator=generator)
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]))
    weight = integers(seed, items, dim, dtype=dtype)
    return integers(seed + 1, users, dim), weight, targets, (values, offsets), draw(st.integers(1, 25))


@given(problems())
def test_ranks_and_best_items_with_ties(problem):
    hidden, weight, targets, viewed, k = problem
    both = rank_catalogue(hidden, weight, k, targets=targets, viewed=viewed, filter_viewed=(False, True))
    for ranked, take_out in zip(both, (False, True), strict=True):
        items, scores, ranks = reference(hidden, weight, k, targets, viewed, take_out)
        assert ranked.ranks.tolist() == ranks
        assert ranked.items.tolist() == items
        assert ranked.scores.tolist() == scores
        alone = rank_catalogue(hidden, weight, k, targets=targets, viewed=viewed, filter_viewed=(take_out,))[0]
        assert torch.equal(alone.ranks, ranked.ranks)
        assert torch.equal(alone.items, ranked.items)
    untargeted = rank_catalogue(hidden, weight, k, viewed=viewed, filter_viewed=(True,))[0]
    assert untargeted.ranks is None
    assert untargeted.items.tolist() == reference(hidden, weight, k, None, viewed, True)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_bytes", [2**16, 2**18, 2**20])
def test_memory_is_bounded_and_chunks_change_nothing(max_bytes, dtype):
    """At 64 KiB items are tiled too; unbounded, one tile holds everything."""
    users, items, k = 150, 3000, 20
    hidden, weight = integers(0, users, 4), integers(1, items, 4, dtype=dtype)
    targets = torch.arange(users) * 19
    values, offsets = torch.arange(users * 5) % items, torch.arange(0, users * 5 + 1, 5)
    arguments = {"targets": targets, "viewed": (values, offsets), "filter_viewed": (False, True)}
    whole = rank_catalogue(hidden, weight, k, max_bytes=2**40, **arguments)
    with PeakMemory() as memory:
        cut = rank_catalogue(hidden, weight, k, max_bytes=max_bytes, **arguments)
    # Inputs and results, which grow with users alone or with what they have viewed.
    given = weight.nbytes + hidden.nbytes + 2 * (2 * targets.nbytes + 12 * users * k) + 8 * values.nbytes
    assert 0.5 * max_bytes < memory.peak < max_bytes + given
    for one, other in zip(whole, cut, strict=True):
        assert torch.equal(one.ranks, other.ranks)
        assert torch.equal(one.items, other.items)
        assert torch.equal(one.scores, other.scores)


def test_zero_scores_of_either_sign_are_equal():
    """-0.0 must not rank behind 0.0: all scores are equal, so items rank by id."""
    weight = torch.tensor([[-1.0], [1.0], [-1.0], [1.0]])
    ranked = rank_catalogue(torch.zeros(2, 1), weight, 4, targets=torch.tensor([3, 0]))[0]
    assert ranked.items.tolist() == [[0, 1, 2, 3]] * 2
    assert ranked.ranks.tolist() == [3, 0]


def test_extreme_scores_keep_their_order():
    scores = torch.tensor([-torch.inf, -3e38, -1.0, -1e-45, 0.0, 1e-45, 1.0, 3e38, torch.inf])
    order = torch.randperm(len(scores), generator=torch.Generator().manual_seed(0))
    ranked = rank_catalogue(torch.ones(1, 1), scores[order, None], len(scores))[0]
    assert ranked.scores[0].tolist() == sorted(scores.tolist(), reverse=True)
    assert torch.equal(order[ranked.items[0]], torch.arange(len(scores) - 1, -1, -1))


@pytest.mark.parametrize("precision", ["high", "medium"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_autocast_and_reduced_matmul_precision_do_not_reach_the_scores(device, precision):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, 96, generator=generator).to(device)
    weight = torch.randn(500, 96, generator=generator).to(device)
    plain = rank_catalogue(hidden, weight, 10)[0]
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        with torch.autocast(device, dtype=torch.bfloat16):
            other = rank_catalogue(hidden, weight, 10)[0]
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.equal(plain.scores, other.scores)
    exact = (hidden.double() @ weight.double().T).topk(10).values
    assert (plain.scores - exact).abs().max() < 1e-4


def test_bad_arguments_are_refused():
    hidden, weight = torch.zeros(2, 3), torch.zeros(5, 3)
    offsets = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"expected \[B, D\] and \[V, D\]"):
        rank_catalogue(hidden, torch.zeros(5, 4), 1)
    with pytest.raises(ValueError, match="targets: got shape"):
        rank_catalogue(hidden, weight, 1, targets=torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="with_viewed=True"):
        rank_catalogue(hidden, weight, 1, filter_viewed=(True,))
    with pytest.raises(ValueError, match="viewed: got offsets"):
        rank_catalogue(hidden, weight, 1, viewed=(offsets, offsets[:2]))
    with pytest.raises(ValueError, match="64 KiB"):
        rank_catalogue(hidden, weight, 1, max_bytes=1000)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.gpu
def test_gpu_ranks_as_the_cpu_does_without_waiting():
    hidden, weight = integers(0, 300, 6), integers(1, 4000, 6)
    targets = torch.arange(300) * 13
    values, offsets = torch.arange(300 * 7) % 4000, torch.arange(0, 300 * 7 + 1, 7)
    expected = rank_catalogue(hidden, weight, 20, targets=targets, viewed=(values, offsets), filter_viewed=(False, True))
    for max_bytes in (2**16, 2**20, 2**28):
        on_gpu = [x.cuda() for x in (hidden, weight, targets, values, offsets)]
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            ranked = rank_catalogue(
                on_gpu[0],
                on_gpu[1],
                20,
                targets=on_gpu[2],
                viewed=(on_gpu[3], on_gpu[4]),
                filter_viewed=(False, True),
                max_bytes=max_bytes,
            )
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for one, other in zip(expected, ranked, strict=True):
            assert torch.equal(one.ranks, other.ranks.cpu())
            assert torch.equal(one.items, other.items.cpu())
            assert torch.equal(one.scores, other.scores.cpu())
