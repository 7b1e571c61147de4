"""AUC: of all rows, exact or by bins of scores, and the mean of groups' AUCs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np

from jagged.pointwise.storage import Columns
from jagged.pointwise.sums import ExactSum, FloatArray, IntArray, before, folded, running


def auc(chunks: Iterable[Columns]) -> float:
    """The weighted share of pairs of a positive and a negative in which the positive has the higher score; half of a tied pair's.

    Args:
        chunks: rows in ascending order of `score`, then of `label` and `weight`, with these columns.

    Returns:
        NaN where all labels are alike.
    """
    for groups in _groups({**rows, "group": np.zeros(len(rows["score"]), np.int64)} for rows in chunks):
        if len(groups["up"]):
            return float(_aucs(groups)[0])
    return math.nan


def grouped_auc(chunks: Iterable[Columns], key: str) -> tuple[float, float]:
    """The mean AUC of the groups that have both classes, each by the sum of its weights; and the others' share of all weight.

    A group whose scores are all alike has 0.5, for all of its pairs are tied.

    Args:
        chunks: rows in ascending order of `key`, then of `score`, `label` and `weight`, with these columns.

    Returns:
        The mean, NaN where no group has both classes; the share, NaN where there are no rows.
    """
    mean, counted, left, everything = ExactSum(), ExactSum(), ExactSum(), ExactSum()
    for groups in _groups({**rows, "group": rows[key]} for rows in chunks):
        aucs, weights = _aucs(groups), groups["up"] + groups["down"]
        both = ~np.isnan(aucs)
        mean.add(aucs[both] * weights[both])
        counted.add(weights[both])
        left.add(weights[~both])
        everything.add(weights)
    return _ratio(mean.value, counted.value), _ratio(left.value, everything.value)


def binned_auc(up: FloatArray, down: FloatArray) -> tuple[float, float]:
    """AUC of which only the bins of the scores are known, and how far from the exact one it may be.

    Pairs within a bin count half, as tied ones do. At worst all of them are in order, or none is.

    Args:
        up, down: `[bins]` float64, weights of positives and of negatives by bin, in ascending order of scores.

    Returns:
        Both NaN where all labels are alike.
    """
    positives, negatives = float(np.cumsum(up)[-1]), float(np.cumsum(down)[-1])
    below = np.cumsum(down) - down
    pairs = positives * negatives
    right, shared = math.fsum(up * (below + down / 2)), math.fsum(up * down)
    return min(_ratio(right, pairs), 1.0), _ratio(shared / 2, pairs)


def _groups(chunks: Iterable[Columns]) -> Iterator[Columns]:
    """Of each `group` the weights of its positives and negatives, `up` and `down`, and of the pairs that are `right`."""

    def classes() -> Iterator[Columns]:
        for rows in chunks:
            up, down = rows["weight"] * rows["label"], rows["weight"] * (1 - rows["label"])
            yield {"group": rows["group"], "score": rows["score"], "up": up, "down": down}

    def pairs(runs: Columns, starts: IntArray) -> Columns:
        below = before(running(runs["down"], starts), starts)
        return {"right": runs["up"] * (below + runs["down"] / 2)}

    # First rows of one score become one, then groups.
    runs = ({name: run[name] for name in ("group", "up", "down")} for run in folded(classes(), ("group", "score")))
    return folded(runs, ("group",), pairs)


def _aucs(groups: Columns) -> FloatArray:
    """`[G]`, NaN where a group has one class."""
    pairs = groups["up"] * groups["down"]
    # Sums of weights are rounded, so that a perfect order could be a little better than that.
    return np.minimum(np.divide(groups["right"], pairs, out=np.full(len(pairs), math.nan), where=pairs > 0), 1.0)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
