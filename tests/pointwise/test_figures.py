"""All figures of rows against their definitions in loops: by user, by request and by slice, with ties, weights and masks."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jagged.pointwise import PointwiseMetrics, storage
from tests.pointwise.slow import NAN, Row, add, auc, by_request, counted, gauc, probabilities, rows

KS = (1, 2, 5)


def figures(given_rows: Sequence[Row], key: str = "user", requests: bool = True) -> dict[str, float]:
    """As `compute` should have them, in its order."""
    left = counted(given_rows)
    mean, left_out = gauc(left, key)
    several = len({row.request for row in left}) < len(left)
    return {
        "auc": auc(left),
        "gauc": mean,
        "gauc_left_out": left_out,
        **probabilities(left, 0.3),
        **(by_request(left, KS) if requests and several else {}),
        "rows": float(len(left)),
    }


def same(found: dict[str, float], wanted: dict[str, float]) -> None:
    assert list(found) == list(wanted)
    for name in wanted:
        assert found[name] == pytest.approx(wanted[name], rel=1e-9, abs=1e-12, nan_ok=True), name


@given(rows(), st.integers(1, 3), st.sampled_from(["both", "users", "requests"]))
def test_against_loops(given_rows: list[Row], parts: int, ids: str) -> None:
    metrics = PointwiseMetrics("click", ks=KS, training_mean=0.3)
    for part in range(parts):
        add(metrics, given_rows[part::parts], users=ids != "requests", requests=ids != "users")
    if not counted(given_rows):
        for method in (metrics.compute, metrics.compute_slices, metrics.calibration_bins, metrics.score_histogram):
            with pytest.raises(ValueError, match=r"^click: no row has a label to evaluate$"):
                method()
        return
    key = "request" if ids == "requests" else "user"
    found = metrics.compute()
    assert found.pop("values_left_out[device]") == 0
    wanted = figures(given_rows, key, ids != "users")
    same(found, wanted)
    # A slice has the names of the whole, and so NaN where each request has one candidate in it.
    slices = metrics.compute_slices()
    devices = [row.device for row in counted(given_rows)]
    values = sorted(set(devices), key=lambda value: (-devices.count(value), value))
    assert list(slices) == [f"device={value}" for value in values]
    for value in values:
        of = [row for row in given_rows if row.device == value]
        expected = figures(of, key, ids != "users")
        same(slices[f"device={value}"], {name: expected.get(name, NAN) for name in wanted})


@given(rows(st.sampled_from([0.0, 0.5, 1.0, 3.0])))
def test_labels_as_gains(given_rows: list[Row]) -> None:
    # A label that is no class, and a request of several candidates.
    given_rows = [*given_rows, Row(0.0, 3.0, 1.0, True, 0, 99, 7), Row(1.0, 0.0, 1.0, True, 0, 99, 7)]
    left = counted(given_rows)
    metrics = PointwiseMetrics(ks=KS)
    add(metrics, given_rows, users=False)
    found = metrics.compute()
    mse = sum(row.weight * (row.score - row.label) ** 2 for row in left) / sum(row.weight for row in left)
    same(found, {"mse": mse, **by_request(left, KS), "rows": float(len(left)), "values_left_out[device]": 0.0})


def test_a_negative_gain_leaves_ndcg_alone_undefined() -> None:
    metrics = PointwiseMetrics(ks=(2,))
    metrics.update(torch.tensor([1.0, 0.0]), torch.tensor([2.0, -1.0]), requests=torch.tensor([5, 5]))
    assert math.isnan(metrics.compute()["ndcg@2"])
    assert (metrics.compute()["mrr"], metrics.compute()["hit_rate@2"]) == (1.0, 1.0)


def test_requests_of_one_candidate_have_no_figures() -> None:
    metrics = PointwiseMetrics()
    metrics.update(torch.tensor([1.0, 0.0]), torch.tensor([1, 0]), requests=torch.tensor([0, 1]))
    assert list(metrics.compute()) == ["auc", "gauc", "gauc_left_out", "calibration", "logloss", "ne", "rows"]
    assert metrics.compute()["gauc_left_out"] == 1.0


def test_constant_scores_have_half_of_all_pairs() -> None:
    metrics = PointwiseMetrics(ks=(1,))
    ids = torch.arange(1000) // 10
    metrics.update(torch.zeros(1000), torch.arange(1000) % 10 == 3, users=ids, requests=ids)
    found = metrics.compute()
    assert (found["auc"], found["gauc"], found["gauc_left_out"]) == (0.5, 0.5, 0.0)
    assert found["hit_rate@1"] == pytest.approx(0.1, rel=1e-12)
    assert found["mrr"] == pytest.approx(sum(1 / rank for rank in range(1, 11)) / 10, rel=1e-12)


def test_a_perfect_order_has_exactly_one() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(2, (5000,), generator=generator)
    weights = torch.rand(5000, generator=generator)
    scores = labels + torch.rand(5000, generator=generator) / 2
    ids = torch.randint(300, (5000,), generator=generator)
    metrics = PointwiseMetrics(ks=(1, 3, 50))
    metrics.update(scores, labels, None, weights, users=ids, requests=ids)
    found = metrics.compute()
    assert [found[name] for name in ("auc", "gauc", "ndcg@1", "ndcg@3", "ndcg@50", "mrr", "hit_rate@1")] == pytest.approx(
        [1.0] * 7, rel=1e-12
    )
    assert all(value <= 1 for name, value in found.items() if name.startswith(("auc", "gauc", "ndcg")))


@pytest.mark.parametrize("places", [3, storage.CHUNK])
def test_many_tied_candidates(places: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first hit of h among t places: its rank has the mean that drawing without replacement gives."""
    from jagged.pointwise import requests

    monkeypatch.setattr(requests, "_PLACES", places)
    requests.reciprocal_rank.cache_clear()
    for above, tied, hits in [(0, 1, 1), (2, 7, 2), (5, 40, 3), (1, 9, 9), (0, 300, 1)]:
        chances = [math.comb(tied - place - 1, hits - 1) / math.comb(tied, hits) for place in range(tied)]
        mean = sum(chance / (above + place + 1) for place, chance in enumerate(chances))
        assert requests.reciprocal_rank(above, tied, hits) == pytest.approx(mean, rel=1e-12)
        for k in (1, 3, 8, 100):
            among = sum(chance for place, chance in enumerate(chances) if above + place < k)
            assert requests.hit(above, tied, hits, k) == pytest.approx(among, rel=1e-12, abs=1e-15)


def bits(metrics: PointwiseMetrics) -> Any:
    pictures = [[*map(tuple, metrics.calibration_bins(3))], metrics.score_histogram(4)]
    return repr([metrics.compute(), metrics.compute_slices(), *pictures])


def drawn(seed: int, count: int = 400) -> list[Row]:
    """Rows whose weights round in every sum; a big group and small ones, some ties."""
    generator = random.Random(seed)
    ids = [0, 0, 0, *range(1, 40)]
    return [
        Row(
            round(generator.gauss(0, 2), 1),
            generator.randrange(2),
            generator.random() * 10 ** generator.randrange(-6, 7),
            generator.random() < 0.95,
            generator.choice(ids),
            generator.choice(ids),
            generator.choice([1, 1, 2]),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("seed", range(3))
def test_the_same_bits_whatever_the_chunks_the_batches_and_the_disk(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given_rows = drawn(seed)
    found = set()
    for chunk, limit, batch in [(1 << 18, 1 << 22, 400), (1, 1 << 22, 7), (7, 1 << 22, 50), (64, 90, 33), (1 << 18, 1, 100)]:
        monkeypatch.setattr(storage, "CHUNK", chunk)
        metrics = PointwiseMetrics(ks=(1, 3, 200), training_mean=0.4, limit=limit)
        for first in range(0, len(given_rows), batch):
            add(metrics, given_rows[first : first + batch])
        found.add(bits(metrics))
        assert metrics._rows.is_on_disk is (limit < 400)
    assert len(found) == 1


@settings(max_examples=10)
@given(rows())
def test_any_order_of_rows_has_the_same_bits(given_rows: list[Row]) -> None:
    if not counted(given_rows):
        return
    found = set()
    for seed in range(3):
        random.Random(seed).shuffle(given_rows)
        metrics = PointwiseMetrics(ks=KS)
        add(metrics, given_rows)
        found.add(repr([metrics.compute(), metrics.compute_slices()]))
    assert len(found) == 1


@given(rows(), rows(weights=st.just(0.0)))
def test_rows_of_weight_0_and_masked_ones_change_nothing(given_rows: list[Row], nothing: list[Row]) -> None:
    if not counted(given_rows):
        return
    found = []
    masked = [row._replace(kept=False, weight=5.0, label=9.0, score=NAN) for row in nothing]
    for one in (given_rows, [*nothing[::2], *given_rows, *nothing[1::2]], [*masked, *given_rows]):
        metrics = PointwiseMetrics(ks=KS)
        add(metrics, one)
        found.append(repr([metrics.compute(), metrics.compute_slices()]))
    assert found[0] == found[1] == found[2]


# Binned AUC.


@given(rows(), st.integers(1, 9))
def test_the_exact_auc_is_within_the_bound_of_the_binned_one(given_rows: list[Row], bins: int) -> None:
    left = counted(given_rows)
    if not left:
        return
    metrics = PointwiseMetrics(bins=bins)
    add(metrics, given_rows)
    found = metrics.compute()
    assert list(found)[:2] == ["auc", "auc_bound"]
    exact = auc(left)
    if math.isnan(exact):
        assert math.isnan(found["auc"])
        assert math.isnan(found["auc_bound"])
        return
    low, high = min(row.score for row in left), max(row.score for row in left)
    place = {row: min(int((row.score - low) / (high - low) * bins), bins - 1) if high > low else 0 for row in left}
    assert found["auc"] == pytest.approx(auc([row._replace(score=float(place[row])) for row in left]), rel=1e-9)
    up, down = ([row for row in left if row.label == label] for label in (1, 0))
    shared = sum(a.weight * b.weight for a in up for b in down if place[a] == place[b])
    pairs = sum(row.weight for row in up) * sum(row.weight for row in down)
    assert found["auc_bound"] == pytest.approx(shared / pairs / 2, rel=1e-9, abs=1e-15)
    assert abs(found["auc"] - exact) <= found["auc_bound"] + 1e-12


def test_many_bins_are_nearly_exact() -> None:
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(20_000, generator=generator) * 3 - 5
    labels = torch.rand(20_000, generator=generator) < scores.sigmoid()
    found = []
    for bins in (None, 100, 10_000):
        metrics = PointwiseMetrics(bins=bins)
        metrics.update(scores, labels)
        found.append(metrics.compute())
    exact, few, many = found
    assert 0 < many["auc_bound"] < 5e-4 < few["auc_bound"] < 5e-2
    for binned in (few, many):
        assert abs(binned["auc"] - exact["auc"]) <= binned["auc_bound"]
        assert {name: binned[name] for name in ("logloss", "ne", "calibration")} == {
            name: exact[name] for name in ("logloss", "ne", "calibration")
        }


def test_extreme_scores_have_bins_too() -> None:
    metrics = PointwiseMetrics(bins=4)
    metrics.update(torch.tensor([-1.7e308, 1.7e308, 0.0, 1.0], dtype=torch.float64), torch.tensor([0, 1, 0, 1]))
    assert metrics.compute()["auc"] == 1 - 0.5 / 4
    assert metrics.score_histogram(2).others == [1.0, 1.0]


# Pictures.


@given(rows(), st.integers(1, 5))
def test_bins_of_calibration(given_rows: list[Row], count: int) -> None:
    left = counted(given_rows)
    if not left:
        return
    metrics = PointwiseMetrics()
    add(metrics, given_rows)
    bins: dict[int, list[Row]] = {}
    total, passed = sum(row.weight for row in left), 0.0
    for score in sorted({row.score for row in left}):
        tied = [row for row in left if row.score == score]
        weight = sum(row.weight for row in tied)
        middle = (passed + weight / 2) / total * count
        if abs(middle - round(middle)) < 1e-9:
            # Which side of an edge it is on is a question of rounding.
            return
        bins.setdefault(int(middle), []).extend(tied)
        passed += weight
    found = metrics.calibration_bins(count)
    assert len(found) == len(bins)
    for one, (_, of) in zip(found, sorted(bins.items()), strict=True):
        weight = sum(row.weight for row in of)
        predicted = sum(row.weight / (1 + math.exp(-row.score)) for row in of) / weight
        observed = sum(row.weight * row.label for row in of) / weight
        assert tuple(one) == pytest.approx((weight, predicted, observed), rel=1e-9)


def test_bins_of_calibration_have_equal_weights() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(10_000, generator=generator)
    metrics = PointwiseMetrics()
    metrics.update(scores, torch.rand(10_000, generator=generator) < scores.sigmoid())
    bins = metrics.calibration_bins(20)
    assert [one.weight for one in bins] == pytest.approx([500] * 20, abs=1)
    assert all(abs(one.predicted - one.observed) < 0.1 for one in bins)
    assert [one.predicted for one in bins] == sorted(one.predicted for one in bins)


def test_histogram_of_scores() -> None:
    metrics = PointwiseMetrics()
    weights = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])
    metrics.update(torch.tensor([0.0, 0.9, 1.0, 3.0, 4.0]), torch.tensor([0, 1, 1, 0, 1]), None, weights)
    found = metrics.score_histogram(4)
    assert found == ([0.0, 1.0, 2.0, 3.0, 4.0], [2.0, 4.0, 0.0, 16.0], [1.0, 0.0, 0.0, 8.0])


def test_labels_that_are_no_classes_have_no_calibration() -> None:
    metrics = PointwiseMetrics("stars")
    metrics.update(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))
    with pytest.raises(ValueError, match=r"^stars: labels are not 0 and 1 alone"):
        metrics.calibration_bins()
    assert metrics.score_histogram(1).positives == [2.0]


# Slices.


def test_only_the_most_frequent_values_have_figures() -> None:
    metrics = PointwiseMetrics(max_slices=2)
    codes = torch.tensor([5, 5, 5, 3, 3, 4, 4, 9])
    other = torch.zeros(8, dtype=torch.int64)
    metrics.update(torch.arange(8.0), torch.arange(8) % 2, slices={"device": codes, "page type": other})
    assert list(metrics.compute_slices()) == ["device=5", "device=3", "page type=0"]
    found = metrics.compute()
    assert (found["values_left_out[device]"], found["values_left_out[page type]"]) == (2.0, 0.0)
    none = PointwiseMetrics(max_slices=0)
    none.update(torch.arange(8.0), torch.arange(8) % 2, slices={"device": codes})
    assert none.compute_slices() == {}
    assert none.compute()["values_left_out[device]"] == 4.0


def test_the_entropy_is_that_of_the_slice() -> None:
    metrics = PointwiseMetrics()
    labels = torch.tensor([1, 0, 1, 1, 1, 0])
    metrics.update(torch.zeros(6), labels, slices={"day": torch.tensor([0, 0, 1, 1, 1, 1])})
    slices = metrics.compute_slices()
    assert slices["day=0"]["ne"] == pytest.approx(1.0, rel=1e-12)
    assert slices["day=1"]["ne"] == pytest.approx(math.log(2) / -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)), rel=1e-12)


def test_names_of_slices_may_be_such_as_a_table_could_not_have() -> None:
    metrics = PointwiseMetrics(limit=1)
    codes = torch.tensor([1, 2])
    metrics.update(
        torch.tensor([1.0, 0.0]), torch.tensor([1, 0]), slices={"rowid": codes, "A": codes, "a": codes, 'x"; --': codes}
    )
    assert [name.partition("=")[0] for name in metrics.compute_slices()][::2] == ["A", "a", "rowid", 'x"; --']


# What is refused.

IDS = torch.tensor([0, 1])


@pytest.mark.parametrize(
    ("ids", "line"),
    [
        ({"users": torch.tensor([0])}, "click: users: got shape (1,), logits (2,), expected [N] of both"),
        ({"requests": torch.zeros(2)}, "click: requests: got torch.float32, expected torch.int64"),
        ({"slices": {"a": torch.zeros(2, dtype=torch.int32)}}, "click: slices[a]: got torch.int32, expected torch.int64"),
        ({"slices": {"a/b": IDS}}, "click: slices: got the name 'a/b', expected one without '[', ']', '=' and '/'"),
        ({"slices": {"": IDS}}, "click: slices: got the name '', expected one without '[', ']', '=' and '/'"),
    ],
)
def test_ids_that_are_none(ids: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=r"^click: ") as error:
        PointwiseMetrics("click").update(torch.zeros(2), torch.zeros(2), **ids)
    assert str(error.value) == line


def test_slices_may_come_in_any_order() -> None:
    metrics = PointwiseMetrics()
    for names in ("ab", "ba"):
        metrics.update(torch.tensor([0.0, 1.0]), IDS, slices={name: IDS + ord(name) for name in names})
    assert list(metrics.compute_slices()) == ["a=97", "a=98", "b=98", "b=99"]


def test_every_batch_has_the_same_ids() -> None:
    metrics = PointwiseMetrics("click")
    metrics.update(torch.zeros(2), torch.zeros(2), users=IDS)
    with pytest.raises(ValueError, match=r"^click: got the ids none, expected those of the batches before: users$"):
        metrics.update(torch.zeros(2), torch.zeros(2))


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"ks": ()}, "click: ks: got (), expected distinct cut-offs of at least 1, for example (5, 10)"),
        ({"ks": (3, 3)}, "click: ks: got (3, 3), expected distinct cut-offs of at least 1, for example (5, 10)"),
        ({"bins": 0}, "click: bins: got 0, expected 1 or more"),
        ({"max_slices": -1}, "click: max_slices: got -1, expected 0 or more"),
        ({"limit": 0}, "click: limit: got 0, expected 1 or more"),
        ({"training_mean": 1.0}, "click: training_mean: got 1.0, expected a number between 0 and 1, neither of both"),
        ({"training_mean": NAN}, "click: training_mean: got nan, expected a number between 0 and 1, neither of both"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=r"^click: ") as error:
        PointwiseMetrics("click", **options)
    assert str(error.value) == line
