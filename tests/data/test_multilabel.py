from __future__ import annotations

import dataclasses
import hashlib
import math
import tracemalloc
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from jagged.data import LabelTruth, MultiLabelRows, read_xmc, synthetic_labels, write_xmc

Sample = tuple[MultiLabelRows, MultiLabelRows, LabelTruth]
ARRAYS = ("feature_ids", "feature_values", "feature_offsets", "labels", "label_offsets")
FINGERPRINT = "4300519cc28f49adedec191c68bc21d6ddf20254602918074b1654ff1a11f82d"


@pytest.fixture(scope="module")
def sample() -> Sample:
    return synthetic_labels()


def fingerprint(*parts: MultiLabelRows) -> str:
    digest = hashlib.sha256()
    for part in parts:
        for name in ARRAYS:
            digest.update(getattr(part, name).tobytes())
    return digest.hexdigest()


def has(rows: MultiLabelRows) -> npt.NDArray[np.bool_]:
    """Which labels each row has, bool `[n, num_labels]`."""
    result = np.zeros((len(rows), rows.num_labels), dtype=np.bool_)
    result[np.repeat(np.arange(len(rows)), np.diff(rows.label_offsets)), rows.labels] = True
    return result


def test_the_sample_is_a_function_of_its_seed(sample: Sample) -> None:
    train, test, truth = sample
    again_train, again_test, again = synthetic_labels(0)
    other_train, other_test, _ = synthetic_labels(1)
    assert fingerprint(train, test) == fingerprint(again_train, again_test) != fingerprint(other_train, other_test)
    assert truth.figures(test) == again.figures(again_test)
    assert fingerprint(train, test) == FINGERPRINT


def test_its_sizes(sample: Sample) -> None:
    train, test, truth = sample
    assert (len(train), len(test), train.num_labels, train.num_features) == (5000, 1000, 2000, 4000)
    assert 8 < len(train.feature_ids) / len(train) < 16
    assert 2 < len(train.labels) / len(train) < 6
    assert 0.05 < (np.diff(train.label_offsets) == 0).mean() < 0.3
    assert np.bincount(truth.groups).tolist() == [20] * 100
    for ids, offsets in ((train.feature_ids, train.feature_offsets), (train.labels, train.label_offsets)):
        ascends = np.diff(ids.astype(np.int64)) > 0
        ascends[offsets[1:-1][(offsets[1:-1] > 0) & (offsets[1:-1] < len(ids))] - 1] = True
        assert ascends.all()
    assert 0.5 <= train.feature_values.min() < train.feature_values.max() <= 1.5


@pytest.mark.parametrize("sizes", [{}, {"num_labels": 20_000, "num_features": 20_000, "num_groups": 800}])
def test_labels_have_a_long_tail(sizes: dict[str, int]) -> None:
    train, _, _ = synthetic_labels(2, **sizes)
    counts = np.sort(np.bincount(train.labels, minlength=train.num_labels))[::-1]
    head = counts[: train.num_labels // 20].sum() / counts.sum()
    assert head > 0.35
    # Half of the labels have next to none.
    assert counts[train.num_labels // 2 :].sum() / counts.sum() < 0.1


def test_the_truth_reaches_its_figures_and_frequency_does_not(sample: Sample) -> None:
    train, test, truth = sample
    for part in (train, test):
        labels, probabilities = truth.top(part, 5)
        hits = np.take_along_axis(has(part), labels, axis=1)
        expected = 1 - np.prod(1 - truth.probabilities(part), axis=1)
        for k, (name, promised) in zip((1, 3, 5), truth.figures(part).items(), strict=True):
            assert name == f"p@{k}"
            first = probabilities[:, :k]
            assert promised == pytest.approx(first.sum() / (k * expected.sum()), rel=1e-9)
            # As figures of a model are: of the rows that have a label.
            with_labels = has(part).any(1).sum()
            variance = (first * (1 - first)).sum() / k**2 + promised**2 * (expected * (1 - expected)).sum()
            assert abs(hits[:, :k].sum() / (k * with_labels) - promised) < 4 * math.sqrt(variance) / expected.sum()
    often = np.argsort(-np.bincount(train.labels, minlength=train.num_labels), kind="stable")
    by_frequency = has(test)[:, often[0]].sum() / has(test).any(1).sum()
    assert truth.figures(test)["p@1"] > by_frequency + 0.4
    assert 0.7 < truth.figures(test)["p@1"] < 0.95
    assert by_frequency < 0.25


def test_probabilities_are_those_of_the_stated_sum(sample: Sample) -> None:
    _, test, truth = sample
    model, few = truth.model, test.take(np.array([0, 7, 990]))
    found = truth.probabilities(few)
    for row in range(3):
        log_odds = np.log(model.background / (1 - model.background))
        for place in range(few.feature_offsets[row], few.feature_offsets[row + 1]):
            feature = int(few.feature_ids[place])
            for pair in range(model.input_offsets[feature], model.input_offsets[feature + 1]):
                log_odds[model.input_labels[pair]] += float(few.feature_values[place]) * model.input_weights[pair]
        np.testing.assert_allclose(found[row], 1 / (1 + np.exp(-log_odds)), rtol=1e-12)


def test_labels_are_drawn_by_their_probabilities() -> None:
    """Of all pairs with a probability within a band so many come true, also of labels that no input raises."""
    train, _, truth = synthetic_labels(3, num_rows=20_000, num_test_rows=1, num_labels=60, num_features=120, num_groups=6)
    probabilities, comes = truth.probabilities(train), has(train)
    raised = probabilities > truth.model.background
    for chosen in (raised, ~raised):
        edges = np.quantile(probabilities[chosen], np.linspace(0, 1, 9))
        band = np.searchsorted(edges[1:-1], probabilities)
        for number in range(8):
            here = chosen & (band == number)
            if here.any():
                expected, variance = probabilities[here].sum(), (probabilities[here] * (1 - probabilities[here])).sum()
                assert abs(comes[here].sum() - expected) < 4.5 * math.sqrt(variance)
    # Labels are independent given the inputs: what is left of two labels of a group is not correlated.
    left = (comes - probabilities) / np.sqrt(probabilities * (1 - probabilities))
    of_group = np.flatnonzero(truth.groups == 0)
    products = left[:, of_group[0]] * left[:, of_group[1]]
    assert abs(products.mean()) < 4.5 * products.std() / math.sqrt(len(products))


def test_the_first_ones_are_those_of_all_probabilities(sample: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    _, test, truth = sample
    few = test.take(np.arange(200))
    expected = np.argsort(-truth.probabilities(few), axis=1, kind="stable")[:, :40]
    labels, probabilities = truth.top(few, 40)
    np.testing.assert_array_equal(labels, expected)
    np.testing.assert_array_equal(probabilities, np.take_along_axis(truth.probabilities(few), expected, axis=1))
    # In other pieces, and with rows whose inputs raise nothing or that have none.
    monkeypatch.setattr("jagged.data.multilabel._PAIRS", 150)
    np.testing.assert_array_equal(truth.top(few, 40)[0], expected)
    none = few.feature_ids[:0], few.feature_values[:0], np.zeros(3, np.int64), few.labels[:0], np.zeros(3, np.int64)
    labels, probabilities = truth.top(MultiLabelRows(*none, few.num_features, few.num_labels), 3)
    often = np.argsort(-truth.model.background, kind="stable")[:3]
    assert labels.tolist() == [often.tolist()] * 2
    np.testing.assert_array_equal(probabilities, np.tile(truth.model.background[often], (2, 1)))


def test_labels_of_a_group_share_inputs(sample: Sample) -> None:
    model = sample[2].model
    inputs: list[set[int]] = [set() for _ in range(model.num_labels)]
    for feature in range(model.num_features):
        for label in model.input_labels[model.input_offsets[feature] : model.input_offsets[feature + 1]]:
            inputs[label].add(feature)
    assert {len(of) for of in inputs} == {6}
    for group in range(0, 100, 10):
        members, others = np.flatnonzero(model.group == group), np.flatnonzero(model.group != group)
        assert set(model.shared[group]) == set.intersection(*(inputs[label] for label in members))
        assert not set.union(*(inputs[label] for label in members)) & set.union(*(inputs[label] for label in others))
    assert len({frozenset(of) for of in inputs}) > 1900
    assert (model.input_weights > 0).all()


def test_files_of_it_are_read_again_equal(sample: Sample, tmp_path: Path) -> None:
    for part in sample[:2]:
        write_xmc(part, tmp_path / "part.txt")
        read = read_xmc(tmp_path / "part.txt", progress=False)
        assert fingerprint(read) == fingerprint(part)
        assert (read.num_features, read.num_labels) == (4000, 2000)
        assert sample[2].figures(read) == sample[2].figures(part)


def test_many_labels_take_no_array_of_rows_by_labels() -> None:
    sizes = {"num_rows": 4000, "num_test_rows": 500, "num_labels": 100_000, "num_features": 40_000, "num_groups": 4000}
    tracemalloc.start()
    try:
        _, test, truth = synthetic_labels(**sizes)
        figures = truth.figures(test)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # An array of all rows and labels would take 3.2 GB.
    assert peak < 200 << 20
    assert 0.5 < figures["p@1"] < 0.95


def test_small_samples() -> None:
    train, test, truth = synthetic_labels(num_rows=1, num_test_rows=1, num_labels=5, num_features=10, num_groups=1)
    assert (len(train), len(test)) == (1, 1)
    assert all(0 < value <= 1 for value in truth.figures(test).values())


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_rows": 0},
        {"num_test_rows": 0},
        {"num_groups": 0},
        {"num_labels": 4, "num_groups": 1},
        {"num_labels": 99},
        {"num_features": 999},
        {"num_labels": 2**31},
        {"num_features": 2**31},
    ],
)
def test_sizes_out_of_range(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="sizes: got num_rows="):
        synthetic_labels(**sizes)


def test_what_figures_refuse(sample: Sample) -> None:
    _, test, truth = sample
    with pytest.raises(ValueError, match="part: got no rows, expected at least one"):
        truth.figures(test.take(np.zeros(0, np.int64)))
    with pytest.raises(
        ValueError, match=r"rows: got \(4000, 2001\) features and labels, expected \(4000, 2000\) as in the sample"
    ):
        truth.figures(dataclasses.replace(test, num_labels=2001))
    with pytest.raises(ValueError, match="rows: got a value that is not positive"):
        truth.probabilities(dataclasses.replace(test, feature_values=-test.feature_values))
    for k in (0, 2001):
        with pytest.raises(ValueError, match=f"k: got {k}, expected 1 to 2000"):
            truth.top(test, k)
