"""Ranking metrics against a slow float64 reference written out user by user."""

from __future__ import annotations

import copy
import itertools
import json
import math
import pickle
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jagged.config import TrainConfig
from jagged.data import SequencePart
from jagged.metrics import (
    MISS,
    WITHHELD,
    Best,
    Figures,
    RankingMetrics,
    RunMetrics,
    TrainCounts,
    cut_offs,
    in_words,
    is_slice_group,
    sampled_figures,
    shown_figure,
    slice_group,
)

KS = (1, 3, 4)

FIGURES = Figures({"all_items": {"ndcg@10": 0.25, "mrr@7": 0.5}, "click": {"auc": 0.75}})


@st.composite
def worlds(draw):
    """Ranks and shown items of some users, and training counts."""
    num_items = draw(st.integers(1, 12))
    num_train = draw(st.integers(1, 9))
    had = draw(st.lists(st.integers(0, num_train), min_size=num_items, max_size=num_items))
    users = draw(
        st.lists(
            st.tuples(
                st.one_of(st.integers(0, num_items - 1), st.just(MISS)),
                st.permutations(range(num_items)),
                st.integers(0, num_items),
            ),
            min_size=1,
            max_size=15,
        )
    )
    ranks = [rank for rank, _, _ in users]
    top = [([*order[:kept], *[-1] * max(KS)])[: max(KS)] for _, order, kept in users]
    return num_items, TrainCounts(torch.tensor(had), num_train), ranks, top


def reference(num_items, counts, ranks, top):
    had, num_train = counts.users_per_item.tolist(), counts.num_users
    result = {}
    for k in KS:
        result[f"ndcg@{k}"] = sum(1 / math.log2(rank + 2) for rank in ranks if rank < k) / len(ranks)
        result[f"recall@{k}"] = sum(1 for rank in ranks if rank < k) / len(ranks)
        result[f"mrr@{k}"] = sum(1 / (rank + 1) for rank in ranks if rank < k) / len(ranks)
        trained = {item for item in range(num_items) if had[item]}
        shown = {item for row in top for item in row[:k] if item >= 0}
        result[f"coverage@{k}"] = len(shown & trained) / max(len(trained), 1)
        slots = []
        for row in top:
            for item in row[:k]:
                if item < 0:
                    continue
                if had[item] == 0:
                    slots.append(1.0)
                else:
                    slots.append(math.log2(num_train / had[item]) / math.log2(num_train) if num_train > 1 else 0.0)
        result[f"surprisal@{k}"] = sum(slots) / max(len(slots), 1)
    return result


@given(worlds(), st.lists(st.integers(0, 15), max_size=4))
def test_matches_the_reference_whatever_the_batches_and_processes(world, cuts):
    num_items, counts, ranks, top = world
    whole = RankingMetrics(num_items, counts, KS)
    whole.update(torch.tensor(ranks), torch.tensor(top))
    expected = reference(num_items, counts, ranks, top)
    got = whole.compute()
    assert list(got) == [f"{name}@{k}" for name in ("ndcg", "recall", "mrr", "coverage", "surprisal") for k in KS]
    assert got == pytest.approx(expected, rel=1e-13, abs=1e-13)

    cuts = sorted({0, len(ranks), *(min(cut, len(ranks)) for cut in cuts)})
    parts = [RankingMetrics(num_items, counts, KS) for _ in range(2)]
    for index, (first, last) in enumerate(itertools.pairwise(cuts)):
        ids = torch.tensor(top[first:last])
        parts[index % 2].update(torch.tensor(ranks[first:last]), ids)
    parts[0].merge(parts[1])
    assert parts[0].num_users == len(ranks)
    assert parts[0].compute() == got  # to the last bit


def test_known_values():
    metrics = RankingMetrics(4, TrainCounts(torch.tensor([4, 2, 1, 0]), 4), ks=(2,))
    metrics.update(torch.tensor([0, 1, 2]), torch.tensor([[0, 1], [2, 3], [0, 3]]))
    assert metrics.compute() == pytest.approx(
        {
            "ndcg@2": (1 + 1 / math.log2(3)) / 3,
            "recall@2": 2 / 3,
            "mrr@2": 1.5 / 3,
            "coverage@2": 1.0,
            "surprisal@2": (0 + 0.5 + 1 + 1 + 0 + 1) / 6,
        }
    )


def test_an_empty_batch_changes_nothing_and_no_user_at_all_is_an_error():
    metrics = RankingMetrics(3, TrainCounts(torch.tensor([1, 1, 0]), 2), KS)
    metrics.update(torch.zeros(0, dtype=torch.int64), torch.zeros(0, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match="no user has a held-out target"):
        metrics.compute()


@pytest.mark.parametrize("ks", [(), (0, 5), (5, 5)])
def test_bad_cut_offs_are_refused(ks):
    with pytest.raises(ValueError, match="ks: got"):
        RankingMetrics(3, TrainCounts(torch.tensor([1, 1, 0]), 2), ks)


def test_bad_shapes_are_refused():
    counts = TrainCounts(torch.tensor([1, 1, 0]), 2)
    with pytest.raises(ValueError, match=r"got shape \(3,\), expected \(4,\)"):
        RankingMetrics(4, counts)
    metrics = RankingMetrics(3, counts, (2, 5))
    with pytest.raises(ValueError, match="expected \\[B\\] and \\[B, 3\\]"):
        metrics.update(torch.zeros(2, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="expected \\[B\\] and \\[B, 2\\]"):
        RankingMetrics(3, counts, (2,)).update(torch.zeros(2, dtype=torch.int64), torch.zeros(2, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match="other: got 3 items"):
        metrics.merge(RankingMetrics(3, counts, (4,)))


@given(
    st.lists(st.lists(st.integers(0, 5), max_size=6), max_size=8),
    st.integers(1, 9),
    st.none() | st.sets(st.integers(0, 5)),
)
def test_training_counts_are_of_distinct_users(histories, chunk_users, known):
    """Rows cover some of each user's events; a chunk's border must not matter."""
    item_ids = torch.tensor([5, *(item for history in histories for item in history), 5])
    lengths = torch.tensor([len(history) for history in histories], dtype=torch.int64)
    end = 1 + torch.cumsum(lengths, 0)
    dataset = SimpleNamespace(item_ids=item_ids, num_items=6, num_events=len(item_ids), num_users=len(histories))
    order = list(range(6)) if known is None else sorted(known, reverse=True)
    numbers = None if known is None else torch.tensor([order.index(item) if item in known else -1 for item in range(6)])
    part = SequencePart(dataset, torch.arange(len(histories)), end - lengths, end, numbers=numbers)
    counts = TrainCounts.from_part(part, chunk_users=chunk_users)
    assert counts.users_per_item.tolist() == [sum(item in history for history in histories) for item in order]
    assert counts.num_users == sum(bool(history) for history in histories)


def test_training_counts_are_saved(tmp_path):
    assert TrainCounts.load(tmp_path) is None
    TrainCounts(torch.tensor([3, 0, 1]), 7).save(tmp_path)
    loaded = TrainCounts.load(tmp_path)
    assert loaded.users_per_item.tolist() == [3, 0, 1]
    assert loaded.num_users == 7


def test_figures_are_found_by_plain_names():
    assert FIGURES.all_items["ndcg@10"] == FIGURES["all_items"]["ndcg@10"] == 0.25
    assert FIGURES.click == {"auc": 0.75}
    assert list(FIGURES) == ["all_items", "click"]
    assert FIGURES == {"all_items": {"ndcg@10": 0.25, "mrr@7": 0.5}, "click": {"auc": 0.75}}
    assert FIGURES != {"all_items": {"ndcg@10": 0.25, "mrr@7": 0.5}}
    assert {"all_items", "click", "to_json"} <= set(dir(FIGURES))
    assert repr(FIGURES.click) == "Group({'auc': 0.75})"
    assert repr(FIGURES) == "Figures({'all_items': {'ndcg@10': 0.25, 'mrr@7': 0.5}, 'click': {'auc': 0.75}})"


def test_a_name_that_figures_do_not_have_is_answered_with_those_they_have():
    expected = "group of figures: got 'unseen', expected all_items or click"
    with pytest.raises(AttributeError) as attribute:
        _ = FIGURES.unseen
    assert str(attribute.value) == expected
    with pytest.raises(KeyError) as key:
        FIGURES["unseen"]
    assert key.value.args == (expected,)
    with pytest.raises(KeyError) as key:
        FIGURES.all_items["ndcg@5"]
    assert key.value.args == ("metric: got 'ndcg@5', expected ndcg@10 or mrr@7",)
    with pytest.raises(AttributeError) as attribute:
        _ = RunMetrics().test.all_items
    assert str(attribute.value) == "group of figures: got 'all_items', expected none: there are no figures"
    assert not hasattr(FIGURES, "unseen")
    assert FIGURES.get("unseen") is None
    assert "unseen" not in FIGURES


def test_figures_of_drawn_negatives_say_so_and_withhold_what_they_cannot_tell():
    given = {"all": {"loss": 0.5}, "buy": {"auc": 0.75, "ne": 0.9, "calibration": 1.1, "rows": 10.0}}
    figures = sampled_figures(given)
    assert figures == {"sampled": {"loss": 0.5}, "sampled_buy": {"auc": 0.75, "rows": 10.0}}
    for name in WITHHELD:
        for same in (figures, Figures(figures.to_json()), pickle.loads(pickle.dumps(figures))):
            with pytest.raises(KeyError) as key:
                same.sampled_buy[name]
            assert key.value.args == (
                f"metric: got '{name}', expected auc or rows; ne and calibration are withheld: "
                "with drawn negatives the share of positives is what was chosen, not what users do",
            )
        with pytest.raises(KeyError) as key:
            Figures({"buy": {"auc": 0.75}}).buy[name]
        assert key.value.args == (f"metric: got '{name}', expected auc",)
    with pytest.raises(KeyError) as key:
        figures.sampled_buy["mse"]
    assert key.value.args == ("metric: got 'mse', expected auc or rows",)
    words = {
        "sampled": "against drawn negatives",
        "sampled_buy": "buy, against drawn negatives",
        "all_items": "seen items left in",
    }
    assert {name: in_words(name) for name in words} == words
    assert [in_words("click"), in_words("sampledx")] == ["click", "sampledx"]


def test_what_is_not_defined_is_nan_null_and_a_dash():
    figures = Figures({"click": {"auc": math.nan, "rows": 2.0}, "click[device=3]": {"auc": None, "rows": 1.0}})
    content = figures.to_json()
    assert content == {"click": {"auc": None, "rows": 2.0}, "click[device=3]": {"auc": None, "rows": 1.0}}
    assert figures.click.to_json() == content["click"]
    for same in (figures, Figures(json.loads(json.dumps(content, allow_nan=False))), pickle.loads(pickle.dumps(figures))):
        assert math.isnan(same["click"]["auc"])
        assert math.isnan(same["click[device=3]"]["auc"])
        assert same == figures == content
        assert same.click == {"auc": math.nan, "rows": 2.0}
        assert same.click != {"auc": 0.5, "rows": 2.0}
        assert same.click != {"rows": 2.0}
        assert same.click != 3
    assert repr(figures) == "Figures({'click': {'auc': -, 'rows': 2.0}, 'click[device=3]': {'auc': -, 'rows': 1.0}})"
    assert str(figures.click) == "Group({'auc': -, 'rows': 2.0})"
    assert [shown_figure(value) for value in (math.nan, None, 0.0, 0.12345)] == ["-", "-", "0.0000", "0.1235"]
    assert [is_slice_group(name) for name in (slice_group("click", "device=3"), "click", "sampled_click[a=1]")] == [
        True,
        False,
        True,
    ]
    metrics = RunMetrics("click/auc", Best(3, 12, 0.5, "click"), figures, figures)
    assert RunMetrics.from_json(json.loads(json.dumps(metrics.to_json(), allow_nan=False))) == metrics


def test_figures_do_not_change():
    given_groups = {"all_items": {"ndcg@10": 0.25}}
    figures = Figures(given_groups)
    given_groups["all_items"]["ndcg@10"] = 1.0
    figures.to_json()["all_items"]["ndcg@10"] = 1.0
    assert figures.all_items["ndcg@10"] == 0.25
    with pytest.raises(AttributeError):
        figures.all_items = {}
    with pytest.raises(TypeError):
        figures.all_items["ndcg@10"] = 1.0


def test_figures_are_copied_pickled_and_written_as_plain_json():
    for same in (copy.deepcopy(FIGURES), pickle.loads(pickle.dumps(FIGURES))):
        assert isinstance(same, Figures)
        assert same.all_items["mrr@7"] == 0.5
        assert same == FIGURES
    metrics = RunMetrics("mrr@7", Best(3, 12, 0.5, "all_items"), Figures({"all_items": {"mrr@7": 0.5}}), FIGURES)
    content = metrics.to_json()
    assert content == {
        "monitor": "mrr@7",
        "best": {"epoch": 3, "step": 12, "value": 0.5, "group": "all_items"},
        "valid": {"all_items": {"mrr@7": 0.5}},
        "test": {"all_items": {"ndcg@10": 0.25, "mrr@7": 0.5}, "click": {"auc": 0.75}},
    }
    assert RunMetrics.from_json(json.loads(json.dumps(content))) == metrics
    assert (metrics.best.epoch, metrics.test.click["auc"]) == (3, 0.75)


def test_the_monitored_cut_off_joins_the_usual_ones():
    assert cut_offs("ndcg@10") == (5, 10, 20)
    assert cut_offs("mrr@7") == (5, 7, 10, 20)
    assert cut_offs("recall@100") == (5, 10, 20, 100)


def test_every_metric_can_be_monitored():
    metrics = RankingMetrics(3, TrainCounts(torch.tensor([1, 1, 0]), 2), (1, 123))
    metrics.update(torch.tensor([0]), torch.tensor([[0, 1, 2]]))
    assert [TrainConfig(training={"monitor": name}).training.monitor for name in metrics.compute()] == list(metrics.compute())
