from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from jagged.data import leaks, split_global_time, split_leave_one_out, synthetic_sessions
from jagged.data.synthetic import SessionModel
from tests.data import oracle

FINGERPRINT = "25d8e21579a195073b6e5956ee9e15f2ee6c079199477b71fb73c29be5c8c35a"


def test_the_sample_is_a_function_of_its_seed() -> None:
    (one, reached), (same, reached_again), (other, _) = synthetic_sessions(3), synthetic_sessions(3), synthetic_sessions(4)
    assert one.fingerprint == same.fingerprint != other.fingerprint
    assert reached == reached_again
    assert synthetic_sessions(0)[0].fingerprint == FINGERPRINT


def test_its_size_and_ids() -> None:
    dataset, reached = synthetic_sessions()
    assert (dataset.num_users, dataset.num_items) == (3000, 600)
    assert 14 < dataset.num_events / dataset.num_users < 18
    assert (int(dataset.lengths.min()), int(dataset.lengths.max())) == (5, 50)
    assert dataset.users.ids[0].as_py() == "user_0001"
    assert all(name[0].isalpha() and "-" in name for name in dataset.items.ids.to_pylist())
    assert 0.4 < reached.ndcg10 < 0.65
    assert reached.popularity_ndcg10 < 0.1
    for split in (split_leave_one_out(dataset), split_global_time(dataset)):
        assert not any(leaks(split).values())


def test_times_ascend() -> None:
    dataset, _ = synthetic_sessions(1, num_users=50)
    for events in oracle.histories(dataset).values():
        times = [time for _, time in events]
        assert all(a < b for a, b in itertools.pairwise(times))  # type: ignore[operator]


def test_draws_follow_the_stated_distribution() -> None:
    rng = np.random.Generator(np.random.PCG64(0))
    model = SessionModel(100, rng)
    count = 200_000
    last, before = np.full(count, 3), np.full(count, 50)
    expected = model.next_probabilities(last[:1], before[:1])[0]
    assert expected.sum() == pytest.approx(1.0)
    drawn = np.bincount(model.draw(last, before, rng), minlength=100)
    deviation = (drawn - count * expected) / np.sqrt(count * expected * (1 - expected))
    assert np.abs(deviation).max() < 4.5


def test_the_bound_is_the_expectation_and_none_passes_it() -> None:
    """Ranking by the true distribution reaches what that distribution promises, and wrong or older knowledge reaches less."""
    dataset, reached = synthetic_sessions(5, num_users=3000)
    model = SessionModel(600, np.random.Generator(np.random.PCG64(5)))
    names = {model.name(item): item for item in range(600)}
    of_dense = [names[name] for name in dataset.items.ids.to_pylist()]
    split = split_leave_one_out(dataset)
    assert split.test.target is not None
    promised, best, first_order = [], [], []
    gain = 1 / np.log2(np.arange(10) + 2)
    for end, target in zip(split.test.end.tolist(), split.test.target.tolist(), strict=True):
        last, before, truth = (of_dense[int(dataset.item_ids[i])] for i in (end - 1, end - 2, target))
        exact = model.next_probabilities(np.array([last]), np.array([before]))[0]
        blind = model.next_probabilities(np.array([last]), np.array([(before + 300) % 600]))[0]
        promised.append(float((np.sort(exact)[::-1][:10] * gain).sum()))
        for scores, out in ((exact, best), (blind, first_order)):
            rank = list(np.argsort(-scores, kind="stable")).index(truth)
            out.append(1 / math.log2(rank + 2) if rank < 10 else 0.0)
    assert np.mean(best) == pytest.approx(reached.ndcg10)
    error = np.std(np.array(best) - np.array(promised)) / math.sqrt(len(best))
    assert abs(reached.ndcg10 - np.mean(promised)) < 4 * error
    assert np.mean(first_order) < reached.ndcg10 - 0.05


def test_popularity_is_ranked_by_training_counts() -> None:
    dataset, reached = synthetic_sessions(2, num_users=200)
    split = split_leave_one_out(dataset)
    assert split.test.target is not None
    counts = split.train.item_counts().tolist()
    model = SessionModel(600, np.random.Generator(np.random.PCG64(2)))
    names = dataset.items.ids.to_pylist()
    by_name = dict(zip(names, counts, strict=True))
    order = sorted((model.name(item) for item in range(600)), key=lambda name: -by_name.get(name, 0))
    ranks = [order.index(names[int(dataset.item_ids[t])]) for t in split.test.target.tolist()]
    assert reached.popularity_ndcg10 == pytest.approx(np.mean([1 / math.log2(r + 2) if r < 10 else 0 for r in ranks]))


@pytest.mark.parametrize("sizes", [{"num_users": 0}, {"num_items": 50}, {"mean_length": 5}, {"max_length": 10}])
def test_sizes_out_of_range(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="sizes: got"):
        synthetic_sessions(**sizes)
