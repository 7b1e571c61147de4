"""Metrics of rows against a double loop over pairs and against formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from jagged.pointwise import PointwiseMetrics

NAN = float("nan")
# Few scores, so that most are tied.
ROW = st.tuples(
    st.sampled_from([-40.0, -1.5, 0.0, 0.25, 2.0, 40.0]), st.integers(0, 1), st.sampled_from([0.0, 0.5, 1.0, 3.0]), st.booleans()
)


def figures(rows: list[Any], parts: int = 1, weighted: bool = True, masked: bool = True) -> dict[str, float]:
    metrics = PointwiseMetrics("click")
    for part in range(parts):
        columns = [list(column) for column in zip(*rows[part::parts], strict=True)] or [[], [], [], []]
        logits, labels = torch.tensor(columns[0], dtype=torch.float64), torch.tensor(columns[1])
        weights, mask = (
            torch.tensor(columns[2]) if weighted else None,
            torch.tensor(columns[3], dtype=torch.bool) if masked else None,
        )
        metrics.update(logits, labels, mask, weights)
    return metrics.compute()


def expected(rows: list[tuple[float, int, float]]) -> dict[str, float]:
    pairs = right = 0.0
    for score, label, weight in rows:
        for other, other_label, other_weight in rows:
            if label == 1 and other_label == 0:
                pairs += weight * other_weight
                right += weight * other_weight * (1.0 if score > other else 0.5 if score == other else 0.0)
    total = sum(weight for *_, weight in rows)
    clicks = sum(weight for _, label, weight in rows if label)
    probability = {score: 1 / (1 + math.exp(-score)) for score, *_ in rows}
    # log(1 - p) of a score is log p of its opposite.
    loss = sum(weight * math.log1p(math.exp(-score if label else score)) for score, label, weight in rows)
    rate = clicks / total
    entropy = -sum(share * math.log(share) for share in (rate, 1 - rate) if share)
    return {
        "auc": right / pairs if pairs else NAN,
        "calibration": sum(weight * probability[score] for score, _, weight in rows) / clicks if clicks else NAN,
        "logloss": loss / total,
        "ne": loss / total / entropy if entropy else NAN,
        "rows": float(sum(weight > 0 for *_, weight in rows)),
    }


@given(st.lists(ROW, min_size=1, max_size=14), st.integers(1, 3), st.booleans(), st.booleans())
def test_against_loops(rows: list[Any], parts: int, weighted: bool, masked: bool) -> None:
    counted = [(score, label, weight if weighted else 1.0) for score, label, weight, kept in rows if kept or not masked]
    if not sum(weight for *_, weight in counted):
        with pytest.raises(ValueError, match=r"^click: ") as error:
            figures(rows, parts, weighted, masked)
        assert str(error.value) == "click: no row has a label to evaluate"
        return
    found, wanted = figures(rows, parts, weighted, masked), expected(counted)
    assert list(found) == list(wanted)
    for name in wanted:
        assert found[name] == pytest.approx(wanted[name], rel=1e-9, abs=1e-15, nan_ok=True), name


def test_many_rows_with_few_scores() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(5, (20_000,), generator=generator).float()
    labels = torch.rand(20_000, generator=generator) < scores / 8
    metrics = PointwiseMetrics()
    metrics.update(scores, labels)
    up, down = ([int((scores[labels == kind] == value).sum()) for value in range(5)] for kind in (True, False))
    right = sum(up[i] * (sum(down[:i]) + down[i] / 2) for i in range(5))
    assert metrics.compute()["auc"] == pytest.approx(right / (sum(up) * sum(down)), rel=1e-12)


@pytest.mark.parametrize("label", [0, 1])
def test_labels_all_alike_leave_figures_undefined(label: int) -> None:
    metrics = PointwiseMetrics("click", training_mean=0.25)
    metrics.update(torch.tensor([1.0, -1.0]), torch.tensor([label, label]))
    found = metrics.compute()
    assert {name for name, value in found.items() if math.isnan(value)} == {"auc", "ne"} | (
        {"calibration"} if not label else set()
    )
    # What training saw is known, so a prediction of it has an entropy here, too.
    assert found["ne_of_training"] == pytest.approx(found["logloss"] / -math.log(0.25 if label else 0.75), rel=1e-12)


def test_other_labels_have_an_error() -> None:
    metrics = PointwiseMetrics()
    metrics.update(
        torch.tensor([1.0, 3.0, 7.0]),
        torch.tensor([2.0, 5.0, -1.0]),
        torch.tensor([True, True, False]),
        torch.tensor([1.0, 3.0, 9.0]),
    )
    assert metrics.compute() == {"mse": (1 * 1 + 3 * 4) / 4, "rows": 2.0}


NO_ROW = "click: no row has a label to evaluate"
SCORES = "click: scores are NaN or infinite; train again with a smaller learning_rate"
LABELS = "click: labels or weights are NaN, infinite or negative; mask the rows without a label"


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ([torch.tensor([0.0, NAN]), torch.tensor([0.0, 1.0])], SCORES),
        ([torch.tensor([0.0, float("inf")]), torch.tensor([0.0, 1.0])], SCORES),
        ([torch.tensor([0.0, 1.0]), torch.tensor([0.0, NAN])], LABELS),
        ([torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0]), None, torch.tensor([1.0, NAN])], LABELS),
        ([torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0]), None, torch.tensor([2.0, -1.0])], LABELS),
        ([torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0]), torch.tensor([False, False])], NO_ROW),
    ],
)  # fmt: skip
def test_what_is_no_number_is_refused(given: list[Tensor], line: str) -> None:
    metrics = PointwiseMetrics("click")
    metrics.update(*given)
    with pytest.raises(ValueError, match=r"^click: ") as error:
        metrics.compute()
    assert str(error.value) == line


def test_masked_rows_may_be_no_numbers() -> None:
    metrics = PointwiseMetrics()
    metrics.update(torch.tensor([0.0, NAN, 1.0]), torch.tensor([0.0, NAN, 1.0]), torch.tensor([True, False, True]))
    assert metrics.compute()["auc"] == 1.0


def test_nothing_added() -> None:
    with pytest.raises(ValueError, match=r"^scores: no row has a label to evaluate$"):
        PointwiseMetrics().compute()


def test_shapes_that_differ() -> None:
    with pytest.raises(ValueError, match=r"^click: ") as error:
        PointwiseMetrics("click").update(torch.zeros(3), torch.zeros(3), torch.zeros(2, dtype=torch.bool))
    assert str(error.value) == "click: mask: got shape (2,), logits (3,), expected [N] of both"
    with pytest.raises(ValueError, match=r"^click: ") as error:
        PointwiseMetrics("click").update(torch.zeros(3, 1), torch.zeros(3, 1))
    assert str(error.value) == "click: labels: got shape (3, 1), logits (3, 1), expected [N] of both"
