"""What scores say as probabilities: logloss, normalised entropy and calibration, with the bins of their pictures."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from jagged.pointwise.storage import Columns
from jagged.pointwise.sums import ExactSum, FloatArray, folded


class CalibrationBin(NamedTuple):
    """Rows of neighbouring scores.

    Attributes:
        weight: the sum of their weights.
        predicted, observed: weighted means of their probabilities, the scores' sigmoids, and of their labels.
    """

    weight: float
    predicted: float
    observed: float


class Histogram(NamedTuple):
    """Weights of rows by bins of their scores, all of one width, from the smallest score to the largest.

    Attributes:
        edges: `[bins + 1]`, of the scores before any sigmoid.
        positives, others: `[bins]`, weights of rows with a label above 0, and of all others.
    """

    edges: list[float]
    positives: list[float]
    others: list[float]


class Probabilities:
    """Sums over rows with labels 0 and 1, exact, and the figures that follow from them.

    Args:
        training_mean: mean label of the rows that the model was trained on, between 0 and 1; None where it is not known.
    """

    def __init__(self, training_mean: float | None = None) -> None:
        self._training_mean = training_mean
        self._weight, self._clicks, self._loss, self._predicted = ExactSum(), ExactSum(), ExactSum(), ExactSum()

    def add(self, rows: Columns) -> None:
        """Add rows with the columns `score`, `label` and `weight`."""
        score, label, weight = rows["score"], rows["label"], rows["weight"]
        # -log of the probability of the label that the row has; that of a score for 0 is that of its opposite for 1.
        against = np.where(label == 1, -score, score)
        self._weight.add(weight)
        self._clicks.add(weight * label)
        self._loss.add(weight * (np.maximum(against, 0.0) + np.log1p(np.exp(-np.abs(against)))))
        self._predicted.add(weight * sigmoid(score))

    def figures(self) -> dict[str, float]:
        """`calibration`, `logloss`, `ne` and, where it is known what training saw, `ne_of_training`."""
        weight, clicks = self._weight.value, self._clicks.value
        if not weight:
            logloss = rate = math.nan
        else:
            logloss, rate = self._loss.value / weight, clicks / weight
        found = {
            "calibration": _ratio(self._predicted.value, clicks),
            "logloss": logloss,
            "ne": _ratio(logloss, _cross_entropy(rate, rate)),
        }
        if self._training_mean is not None:
            found["ne_of_training"] = _ratio(logloss, _cross_entropy(rate, self._training_mean))
        return found


def calibration_bins(chunks: Iterable[Columns], total: float, count: int) -> list[CalibrationBin]:
    """Bins of about the same weight, in ascending order of scores; rows of one score are in one bin, so there may be fewer.

    Args:
        chunks: rows in ascending order of `score`, then of `label` and `weight`, with these columns.
        total: weight of all rows.
        count: bins.
    """
    sums = np.zeros((count, 3))
    passed = 0.0

    def products() -> Iterable[Columns]:
        for rows in chunks:
            label = rows["weight"] * rows["label"]
            yield {"score": rows["score"], "weight": rows["weight"], "label": label}

    for runs in folded(products(), ("score",)):
        weights = runs["weight"]
        until = np.cumsum(np.concatenate([[passed], weights]))
        passed = float(until[-1])
        # A run is where its middle is.
        place = np.minimum(((until[:-1] + weights / 2) / total * count).astype(np.int64), count - 1)
        np.add.at(sums, place, np.stack([weights, weights * sigmoid(runs["score"]), runs["label"]], 1))
    return [
        CalibrationBin(weight, predicted / weight, observed / weight) for weight, predicted, observed in sums.tolist() if weight
    ]


def histogram(chunks: Iterable[Columns], low: float, high: float, bins: int) -> Histogram:
    """Weights by bins of scores.

    Args:
        chunks: rows with the columns `score`, `label` and `weight`; in another order sums may differ in their last bits.
        low, high: the smallest and the largest score.
        bins: how many, of one width.
    """
    positives, others = np.zeros(bins), np.zeros(bins)
    # Halves, because the difference of two doubles may be none.
    width = high / 2 - low / 2
    for rows in chunks:
        share = (rows["score"] / 2 - low / 2) / width if width else np.zeros(len(rows["score"]))
        place = np.minimum((share * bins).astype(np.int64), bins - 1)
        up = rows["label"] > 0
        # One after the other, so that chunks do not matter.
        np.add.at(positives, place[up], rows["weight"][up])
        np.add.at(others, place[~up], rows["weight"][~up])
    edges = 2 * np.linspace(low / 2, high / 2, bins + 1)
    return Histogram(edges.tolist(), positives.tolist(), others.tolist())


def sigmoid(score: FloatArray) -> FloatArray:
    """`1 / (1 + exp(-score))` without overflow."""
    small = np.exp(-np.abs(score))
    return np.where(score >= 0, 1.0, small) / (1 + small)


def _cross_entropy(rate: float, predicted: float) -> float:
    """Of labels with a mean `rate` where each is predicted as `predicted`; 0 where all are alike and predicted so."""
    terms = [share * -math.log(chance) for share, chance in ((rate, predicted), (1 - rate, 1 - predicted)) if share > 0]
    return sum(terms)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
