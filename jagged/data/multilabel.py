"""Rows with many labels of a long tail, whose best attainable precision is known because their probabilities are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from jagged.data.histories import spread
from jagged.data.xmc import MAX_IDS, MultiLabelRows

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

#: Of precision at k.
CUTS = (1, 3, 5)
# Inputs of a group that raise all of its labels, and inputs that raise one label alone.
_SHARED, _OWN = 4, 2
#: Of a group, at least: inputs beside the shared ones are enough for labels to differ.
MIN_INPUTS = 10
# How many labels a row has that none of its inputs raises, on average.
_BACKGROUND = 0.3
# How often labels come without their inputs: 1 / (rank + this share of all labels) to this power.
_POWER, _FLATTENED = 2.5, 0.02
# The weights of shared and of own inputs lie evenly between these.
_WEIGHTS = {"shared": (2.0, 3.0), "own": (3.0, 5.0)}
# Groups that rows are about: the power of an even number, so the first groups are the more frequent ones.
_SKEW = 3.0
# Rows of two groups, inputs that are drawn of a group at least and beyond it, the share of shared ones among them, inputs of no
# group that are drawn, and the values that inputs have.
_TWO_GROUPS, _FEWEST, _SPAN, _SHARE_OF_SHARED, _NOISE, _VALUES = 0.35, 5, 8, 0.4, 3, (0.5, 1.5)
# Pairs of a row and a label that are looked at together, at most, where a row has no more.
_PAIRS = 1 << 20


class LabelModel:
    """The generating distribution of rows and their labels.

    Every label and every input belongs to one group. A row is about one or two groups, some of which are much more frequent than
    others: most of its inputs are theirs, a few are any. Values lie evenly in 0.5 to 1.5.

    The log-odds of a label are a sum: those of its background, and weight times value of the row's inputs that raise it. Four
    inputs raise all labels of a group, by weights of 2 to 3. Two others of the group raise one label, or it and a few more, by
    weights of 3 to 5. Background probabilities fall with the rank of the label by a power of 2.5, after Zipf and
    Mandelbrot. So some labels come often, most seldom, and a seldom one comes where its own inputs are. Given its inputs, a row's
    labels are independent of one another.

    Args:
        num_labels, num_features, num_groups: how many.
        rng: draws groups, ranks and weights.

    Attributes:
        group: int64 `[num_labels]`, the group of each label.
        shared: int64 `[num_groups, 4]`, the inputs that raise all labels of a group.
        background: float64 `[num_labels]`, the probability of each label in a row without any of its inputs.
        input_offsets: int64 `[num_features + 1]`, where each input's labels begin.
        input_labels: int64 `[nnz]`, the labels that each input raises.
        input_weights: float64 `[nnz]`, by how much, of log-odds.
    """

    def __init__(self, num_labels: int, num_features: int, num_groups: int, rng: np.random.Generator) -> None:
        self.num_labels, self.num_features, self.num_groups = num_labels, num_features, num_groups
        # Sorted uniform numbers, not a library shuffle: the same sample under every numpy version.
        mixed = np.argsort(rng.random(num_labels), kind="stable")
        self.group: IntArray = np.empty(num_labels, dtype=np.int64)
        self.group[mixed] = np.arange(num_labels) % num_groups
        weight = (np.arange(num_labels) + 1.0 + _FLATTENED * num_labels) ** -_POWER
        self.background: FloatArray = np.empty(num_labels)
        self.background[np.argsort(rng.random(num_labels), kind="stable")] = _BACKGROUND * weight / weight.sum()
        # Of group g the inputs `order[bounds[g] : bounds[g + 1]]`, of which the first are shared.
        self.order = np.argsort(rng.random(num_features), kind="stable")
        self.bounds: IntArray = np.arange(num_groups + 1) * num_features // num_groups
        self.shared: IntArray = self.order[self.bounds[:-1, None] + np.arange(_SHARED)]
        first, others = self.bounds[self.group] + _SHARED, np.diff(self.bounds)[self.group] - _SHARED
        one = np.floor(others * rng.random(num_labels)).astype(np.int64)
        # The second one is another: at least one and less than a whole turn further.
        two = (one + 1 + np.floor((others - 1) * rng.random(num_labels)).astype(np.int64)) % others
        own = self.order[first[:, None] + np.stack((one, two), axis=1)]
        inputs = np.concatenate((self.shared[self.group].ravel(), own.ravel()))
        labels = np.concatenate((np.repeat(np.arange(num_labels), _SHARED), np.repeat(np.arange(num_labels), _OWN)))
        weights = np.concatenate(
            (
                _between(_WEIGHTS["shared"], rng.random((num_groups, _SHARED)))[self.group].ravel(),
                _between(_WEIGHTS["own"], rng.random(num_labels * _OWN)),
            )
        )
        by_input = np.argsort(inputs, kind="stable")
        self.input_labels: IntArray = labels[by_input]
        self.input_weights: FloatArray = weights[by_input]
        self.input_offsets: IntArray = np.concatenate(
            (np.zeros(1, np.int64), np.cumsum(np.bincount(inputs, minlength=num_features)))
        )

    def raised(self, rows: MultiLabelRows) -> Iterator[tuple[int, int, IntArray, IntArray, FloatArray]]:
        """Labels that rows' inputs raise, some rows at a time.

        Args:
            rows: whose labels do not matter.

        Yields:
            The first row and the one behind the last. Of each raised label, by row and label: its row, counted from the first,
            int64 `[n]`; the label, int64 `[n]`; and its probability, float64 `[n]`.
        """
        counts = np.diff(self.input_offsets)[rows.feature_ids]
        before = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))[rows.feature_offsets]
        begin = 0
        while begin < len(rows):
            end = min(len(rows), max(begin + 1, int(np.searchsorted(before, before[begin] + _PAIRS, side="right")) - 1))
            here = slice(int(rows.feature_offsets[begin]), int(rows.feature_offsets[end]))
            row = np.repeat(np.arange(end - begin), np.diff(rows.feature_offsets[begin : end + 1]))
            pairs = spread(self.input_offsets[rows.feature_ids[here]], counts[here])
            keys = np.repeat(row, counts[here]) * self.num_labels + self.input_labels[pairs]
            added = np.repeat(rows.feature_values[here].astype(np.float64), counts[here]) * self.input_weights[pairs]
            keys, pair = np.unique(keys, return_inverse=True)
            of_row, label = np.divmod(keys, self.num_labels)
            odds = self.background[label] / (1 - self.background[label]) * np.exp(np.bincount(pair, added, len(keys)))
            yield begin, end, of_row, label, odds / (1 + odds)
            begin = end

    def draw(self, count: int, rng: np.random.Generator) -> MultiLabelRows:
        """Rows with their labels, which ascend as inputs do."""
        row, inputs = self._inputs(count, rng)
        values = _between(_VALUES, rng.random(len(inputs))).astype(np.float32)
        none = np.zeros(count + 1, dtype=np.int64)
        sizes = self.num_features, self.num_labels
        bare = MultiLabelRows(inputs.astype(np.int32), values, _offsets(row, count), none[:0].astype(np.int32), none, *sizes)
        keys = [self._without_inputs(count, rng)]
        for begin, _, of_row, label, probability in self.raised(bare):
            # A label comes of its background or of its inputs, and the two are independent.
            base = self.background[label]
            comes = rng.random(len(label)) < (probability - base) / (1 - base)
            keys.append((begin + of_row[comes]) * self.num_labels + label[comes])
        row, labels = np.divmod(np.unique(np.concatenate(keys)), self.num_labels)
        return MultiLabelRows(
            bare.feature_ids, values, bare.feature_offsets, labels.astype(np.int32), _offsets(row, count), *sizes
        )

    def _inputs(self, count: int, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
        """The row and the number of each input, int64 `[nnz]` each, by row and number."""
        # Of the first group always, of the second in some rows.
        groups = np.floor(self.num_groups * rng.random((2, count)) ** _SKEW).astype(np.int64).ravel()
        draws = _FEWEST + np.floor(_SPAN * rng.random(2 * count)).astype(np.int64)
        draws[count:] *= rng.random(count) < _TWO_GROUPS
        group, row = np.repeat(groups, draws), np.repeat(np.tile(np.arange(count), 2), draws)
        kind, place = rng.random((2, len(row)))
        size = np.diff(self.bounds)[group]
        place = np.where(kind < _SHARE_OF_SHARED, _SHARED * place, _SHARED + (size - _SHARED) * place)
        of_group = self.order[self.bounds[group] + np.floor(place).astype(np.int64)]
        noise = np.floor(self.num_features * rng.random(count * _NOISE)).astype(np.int64)
        row = np.concatenate((row, np.repeat(np.arange(count), _NOISE)))
        # What is drawn twice is there once.
        keys = np.unique(row * self.num_features + np.concatenate((of_group, noise)))
        row, inputs = np.divmod(keys, self.num_features)
        return row, inputs

    def _without_inputs(self, count: int, rng: np.random.Generator) -> IntArray:
        """Labels that come of their background, each with its probability: row times labels plus label, int64 `[n]`."""
        # As many visits of each label as a Poisson process makes, with the rate at which it comes at least once with its
        # probability. The visits of all labels are one process, so only those that come are drawn.
        rates = -np.log1p(-self.background)
        total = float(rates.sum())
        terms = np.exp(-total) * np.cumprod(np.concatenate(([1.0], total / np.arange(1, 32))))
        visits = np.searchsorted(np.cumsum(terms), rng.random(count), side="right")
        row = np.repeat(np.arange(count), visits)
        label = np.searchsorted(np.cumsum(rates / total)[:-1], rng.random(len(row)), side="right")
        return np.asarray(row * self.num_labels + label, dtype=np.int64)


@dataclass(frozen=True)
class LabelTruth:
    """What is true of rows of `synthetic_labels`.

    Attributes:
        model: what they are drawn from.
    """

    model: LabelModel

    @property
    def groups(self) -> IntArray:
        """The group of each label, int64 `[num_labels]`."""
        return self.model.group

    def probabilities(self, rows: MultiLabelRows) -> FloatArray:
        """The probability of every label for some rows, float64 `[n, num_labels]`; `rows.take` makes it few.

        Raises:
            ValueError: rows of another number of features or labels, or values that are not positive.
        """
        self._check(rows)
        result = np.tile(self.model.background, (len(rows), 1))
        for begin, _, of_row, label, probability in self.model.raised(rows):
            result[begin + of_row, label] = probability
        return result

    def top(self, rows: MultiLabelRows, k: int) -> tuple[IntArray, FloatArray]:
        """The k most probable labels of each row, the most probable first, and their probabilities: int64 and float64 `[n, k]`.

        Of equal ones the smaller label comes first. Time and memory are those of the labels that the rows' inputs raise; there is
        no array of rows by labels.

        Args:
            rows: of the sample, or some of them (`rows.take`).
            k: 1 to the number of labels.

        Raises:
            ValueError: k out of range, rows of another number of features or labels, or values that are not positive.
        """
        self._check(rows)
        if not 1 <= k <= self.model.num_labels:
            raise ValueError(f"k: got {k}, expected 1 to {self.model.num_labels}")
        # Inputs only raise, so of labels without any no other can be among the first k.
        often = np.argsort(-self.model.background, kind="stable")[:k]
        labels, probabilities = np.empty((len(rows), k), dtype=np.int64), np.empty((len(rows), k))
        for begin, end, of_row, label, probability in self.model.raised(rows):
            count = end - begin
            bare = (np.arange(count)[:, None] * self.model.num_labels + often).ravel()
            bare = bare[~np.isin(bare, of_row * self.model.num_labels + label)]
            of_row = np.concatenate((of_row, bare // self.model.num_labels))
            label = np.concatenate((label, bare % self.model.num_labels))
            probability = np.concatenate((probability, self.model.background[bare % self.model.num_labels]))
            order = np.lexsort((label, -probability, of_row))
            first = order[_places(of_row[order], count, k)]
            labels[begin:end], probabilities[begin:end] = label[first], probability[first]
        return labels, probabilities

    def figures(self, part: MultiLabelRows) -> dict[str, float]:
        """What ranking by the true probabilities reaches on some rows in expectation: no other ranking has more.

        `p@k`, for k of 1, 3 and 5, is the share of the first k labels that a row has, over the rows that have a label, as
        `jagged.label_metrics.LabelMetrics` counts them: expected hits over k times the expected number of such rows. The
        expectations are over the labels, given the rows' inputs: the labels that were drawn are not looked at.

        Args:
            part: the train or the test rows, or some of them (`rows.take`).

        Returns:
            By "p@1", "p@3" and "p@5", in 0 to 1.

        Raises:
            ValueError: no rows, rows of another number of features or labels, or values that are not positive.
        """
        if not len(part):
            raise ValueError("part: got no rows, expected at least one")
        _, probabilities = self.top(part, max(CUTS))
        # Labels of a row are independent, so it has none with the product of what each one lacks.
        lacks = np.log1p(-self.model.background)
        with_labels = 0.0
        for begin, end, of_row, label, probability in self.model.raised(part):
            more = np.bincount(of_row, np.log1p(-probability) - lacks[label], end - begin)
            with_labels -= float(np.expm1(lacks.sum() + more).sum())
        return {f"p@{k}": float(probabilities[:, :k].sum()) / (k * with_labels) for k in CUTS}

    def _check(self, rows: MultiLabelRows) -> None:
        found, expected = (rows.num_features, rows.num_labels), (self.model.num_features, self.model.num_labels)
        if found != expected:
            raise ValueError(f"rows: got {found} features and labels, expected {expected} as in the sample")
        if (rows.feature_values <= 0).any():
            raise ValueError("rows: got a value that is not positive, expected rows of the sample")


def synthetic_labels(
    seed: int = 0,
    *,
    num_rows: int = 5000,
    num_test_rows: int = 1000,
    num_labels: int = 2000,
    num_features: int = 4000,
    num_groups: int = 100,
) -> tuple[MultiLabelRows, MultiLabelRows, LabelTruth]:
    """Generate rows with sparse inputs and labels of a long tail, and what is true of them.

    See `LabelModel` for what labels depend on. Time and memory grow with the rows and with the labels of a group, not with rows
    times labels. `write_xmc` makes files of the two parts.

    Args:
        seed: the sample is a function of it and of the sizes.
        num_rows, num_test_rows: of the two parts, at least 1 each. Both are drawn alike.
        num_labels: at least 5, and at least one for each group.
        num_features: at least 10 for each group.
        num_groups: at least 1.

    Returns:
        The training rows, the test rows, and the truth of both.

    Raises:
        ValueError: sizes out of range.
    """
    if (
        min(num_rows, num_test_rows, num_groups) < 1
        or not max(CUTS[-1], num_groups) <= num_labels <= MAX_IDS
        or not MIN_INPUTS * num_groups <= num_features <= MAX_IDS
    ):
        raise ValueError(
            f"sizes: got num_rows={num_rows}, num_test_rows={num_test_rows}, num_labels={num_labels}, "
            f"num_features={num_features}, num_groups={num_groups}, expected at least 1 row in each part and 1 group, at least "
            f"{CUTS[-1]} labels and one for each group, at least {MIN_INPUTS} features for each group, and at most {MAX_IDS:,}"
        )
    rng = np.random.Generator(np.random.PCG64(seed))
    model = LabelModel(num_labels, num_features, num_groups, rng)
    return model.draw(num_rows, rng), model.draw(num_test_rows, rng), LabelTruth(model)


def _places(rows: IntArray, count: int, k: int) -> IntArray:
    """Where the first k of each row's elements lie, int64 `[count, k]`; rows ascend."""
    return np.asarray(np.searchsorted(rows, np.arange(count))[:, None] + np.arange(k))


def _offsets(rows: IntArray, count: int) -> IntArray:
    """Where each row's elements begin, int64 `[count + 1]`; rows ascend."""
    return np.asarray(np.searchsorted(rows, np.arange(count + 1)), dtype=np.int64)


def _between(bounds: tuple[float, float], chance: FloatArray) -> FloatArray:
    """Numbers that lie evenly between two, one for each number in 0 to 1."""
    low, high = bounds
    return np.asarray(low + (high - low) * chance)
