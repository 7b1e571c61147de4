"""`PointwiseMetrics`: takes rows that have a score and a label each, over batches and processes, and gives their figures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jagged.pointwise.pairs import auc, binned_auc, grouped_auc
from jagged.pointwise.probabilities import CalibrationBin, Histogram, Probabilities, calibration_bins, histogram
from jagged.pointwise.requests import request_figures
from jagged.pointwise.storage import LIMIT, AnyArray, Columns, SortedRows
from jagged.pointwise.sums import ExactSum, folded

_NUMBERS = ("score", "label", "weight")
#: Equal rows alone are in no order, so that figures depend neither on batches nor on processes.
_ORDER = ("score", "label", "weight")


class PointwiseMetrics:
    """Figures of one task over all rows that were added.

    With labels of 0 and 1 alone:

    * `auc`: the weighted share of pairs of a positive and a negative that the scores order right, half of a tied pair's. With
      `bins` it is that of binned scores, and `auc_bound` is how far from it the exact one may be.
    * `gauc`: the mean AUC of users (of requests, where no users are given), each by the sum of its weights, over those that have
      both classes; `gauc_left_out` is the others' share of the weight. Where users or requests are given.
    * `logloss`: mean of `-y log p - (1 - y) log(1 - p)`, p the logit's sigmoid, in float64.
    * `ne`: logloss divided by that of always predicting the mean label of these very rows; `ne_of_training`: by that of always
      predicting `training_mean`, where it is given.
    * `calibration`: the sum of p divided by the sum of labels.

    With other labels `mse`, the mean squared difference of logit and label.

    With `probabilities=False` scores only order rows, and no probability can be read from them, as of
    `jagged.models.ListwiseLoss`: then there are no `logloss`, `ne`, `ne_of_training`, `calibration` and `mse`.

    Where requests are given, and one has several candidates, each request that has a label above 0 counts by the mean weight of
    its rows. Tied candidates count as the mean over all of their orders:

    * `ndcg@k` with labels as gains, `mrr`, the mean of `1 / rank` of the best ranked positive, and `hit_rate@k`, the share of
      requests with a positive among the first k.

    Where rows were left out at a known rate when the table was made, negatives for example, and `update` is given the rates, each
    row weighs as many as it stands for, 1 / rate, in all figures but `rows` and those of requests, whose candidates are those
    that are there: so figures estimate those of all rows.

    `rows` is how many were counted. Masked rows and those of weight 0 change nothing. Where slices are given,
    `values_left_out[name]` is how many of a slice's values have no figures of their own. A figure that these rows do not define,
    as an AUC of positives alone, is NaN.

    Rows wait in memory, 24 bytes each and 8 more for each id; beyond `limit` of them in a temporary directory on disk, and are
    read in chunks. The same rows give the same bits, whatever the batches, the limit and the processes; with `bins`, and in
    `score_histogram`, weights that are not whole numbers are added in the order of the rows, whose last bits may differ. On
    another kind of CPU those of logarithms may.

    Args:
        name: of the task, for messages.
        ks: cut-offs of `ndcg@k` and `hit_rate@k`.
        bins: of scores between the smallest and the largest, all of one width before any sigmoid, for an AUC without sorting;
            None for the exact one. (Sigmoids crowd near 0 where positives are rare, where logits do not.)
        training_mean: mean label in training, between 0 and 1.
        probabilities: whether the sigmoid of a score is a probability.
        max_slices: values of each slice that have figures of their own, those with the most rows.
        limit: rows that wait in memory.

    Raises:
        ValueError: an option out of its range.
    """

    def __init__(
        self,
        name: str = "scores",
        *,
        ks: Sequence[int] = (10,),
        bins: int | None = None,
        training_mean: float | None = None,
        probabilities: bool = True,
        max_slices: int = 20,
        limit: int = LIMIT,
    ) -> None:
        if not ks or min(ks) < 1 or len(set(ks)) != len(ks):
            raise ValueError(f"{name}: ks: got {tuple(ks)}, expected distinct cut-offs of at least 1, for example (5, 10)")
        for what, value, least in (("bins", bins, 1), ("max_slices", max_slices, 0), ("limit", limit, 1)):
            if value is not None and value < least:
                raise ValueError(f"{name}: {what}: got {value}, expected {least} or more")
        if training_mean is not None and not 0 < training_mean < 1:
            raise ValueError(f"{name}: training_mean: got {training_mean}, expected a number between 0 and 1, neither of both")
        self._name, self._ks, self._bins, self._training_mean = name, tuple(sorted(ks)), bins, training_mean
        self._max_slices, self._limit, self._has_probabilities = max_slices, limit, probabilities
        # What ids rows have, by the names of `update`; None until a batch has said it.
        self._ids: tuple[str, ...] | None = None
        self._rows = self._new_rows(())
        self._bad_scores = self._bad_numbers = self._graded = False
        self._low, self._high = math.inf, -math.inf
        # What was found of all rows, until there are more.
        self._frequent: dict[str, tuple[list[int], int]] = {}
        self._several: bool | None = None

    def update(
        self,
        logits: Tensor,
        labels: Tensor,
        mask: Tensor | None = None,
        weights: Tensor | None = None,
        *,
        users: Tensor | None = None,
        requests: Tensor | None = None,
        slices: Mapping[str, Tensor] | None = None,
        rates: Tensor | None = None,
    ) -> None:
        """Add rows.

        Args:
            logits, labels: `[N]`.
            mask: bool `[N]`, which rows count; None for all.
            weights: `[N]`, not negative; None for 1.
            users, requests: int64 `[N]`, whose rows they are and which request's candidates; None where it is not known.
            slices: by name int64 `[N]`, a value for each row.
            rates: float `[N]`, above 0 and at most 1, at which rate rows like each were kept; None for 1.

        Raises:
            ValueError: shapes that differ, ids that are not int64, rates out of range, a slice of a name that cannot stand in
                that of a figure, or other ids than batches before had.
            DataError: the temporary directory has no room.
        """
        # The order of a mapping says nothing.
        slices = dict(sorted((slices or {}).items()))
        ids = {"users": users, "requests": requests, **{f"slices[{name}]": of for name, of in slices.items()}}
        given = {"labels": labels, "mask": mask, "weights": weights, "rates": rates, **ids}
        for what, tensor in given.items():
            if tensor is not None and (tensor.shape != logits.shape or logits.dim() != 1):
                raise ValueError(
                    f"{self._name}: {what}: got shape {tuple(tensor.shape)}, logits {tuple(logits.shape)}, expected [N] of both"
                )
        for name in slices:
            if not name or set(name) & set("[]=/"):
                raise ValueError(f"{self._name}: slices: got the name {name!r}, expected one without '[', ']', '=' and '/'")
        for what, tensor in ids.items():
            if tensor is not None and tensor.dtype != torch.int64:
                raise ValueError(f"{self._name}: {what}: got {tensor.dtype}, expected torch.int64")
        known = {what: tensor for what, tensor in ids.items() if tensor is not None}
        self._expect((*known, *(() if rates is None else ("rates",))))

        kept = slice(None) if mask is None else mask.detach().cpu().bool().numpy()
        score, label = (_numbers(of)[kept] for of in (logits, labels))
        weight = np.ones(len(score)) if weights is None else _numbers(weights)[kept]
        self._bad_scores = self._bad_scores or not np.isfinite(score).all()
        fine = np.isfinite(label) & np.isfinite(weight) & (weight >= 0)
        self._bad_numbers = self._bad_numbers or not fine.all()
        counted = np.isfinite(score) & fine & (weight > 0)
        columns = {"score": score, "label": label, "weight": weight}
        for what, tensor in known.items():
            columns[self._column(what)] = tensor.detach().cpu().numpy()[kept]
        if rates is not None:
            columns["rate"] = rate = _numbers(rates)[kept]
            if not ((rate > 0) & (rate <= 1)).all():
                raise ValueError(
                    f"{self._name}: rates: got {rate.min()} to {rate.max()}, expected above 0 and at most 1; give 1 for rows of "
                    "which all were kept"
                )
        columns = {name: values[counted] for name, values in columns.items()}
        if len(columns["score"]):
            self._graded = self._graded or not ((columns["label"] == 0) | (columns["label"] == 1)).all()
            self._low = min(self._low, float(columns["score"].min()))
            self._high = max(self._high, float(columns["score"].max()))
            self._rows.add(columns)
            self._frequent, self._several = {}, None

    def all_gather(self) -> None:
        """Take in the rows of all processes of the `torch.distributed` group, each of which must call; in pieces.

        Raises:
            ValueError: processes have rows with different ids; in every process.
            DataError: the temporary directory has no room.
        """
        flags = self._bad_scores, self._bad_numbers, self._graded
        everyones = _gathered((self._ids, flags, self._low, self._high))
        found = list(dict.fromkeys(ids for ids, *_ in everyones if ids is not None))
        if len(found) > 1:
            told = " and ".join(", ".join(ids) or "none" for ids in found)
            raise ValueError(f"{self._name}: got rows with other ids in other processes: {told}; expected the same in each")
        self._bad_scores, self._bad_numbers, self._graded = (any(of) for of in zip(*(of[1] for of in everyones), strict=True))
        self._low, self._high = min(of[2] for of in everyones), max(of[3] for of in everyones)
        self._ids = found[0] if found else None
        own, self._rows = self._rows, self._new_rows(self._ids or ())
        pieces = own.chunks()
        while arriving := [rows for rows in _gathered(next(pieces, None)) if rows is not None]:
            for rows in arriving:
                self._rows.add(rows)
        own.close()
        self._frequent, self._several = {}, None

    def compute(self) -> dict[str, float]:
        """All figures of all rows, by name.

        Raises:
            ValueError: no row was added, a score is NaN or infinite, or a label or weight is, or a weight is negative.
        """
        self._check()
        left_out = {f"values_left_out[{name}]": float(self._values(column)[1]) for name, column in self._slices()}
        return {**self._figures(None), **left_out}

    def compute_slices(self) -> dict[str, dict[str, float]]:
        """By slice and value, as `device=3`, the figures that `compute` has of the rows of that value.

        Of each slice the `max_slices` values with the most rows, the most frequent first, of equally frequent ones the smallest.

        Raises:
            ValueError: as `compute`.
        """
        self._check()
        return {
            f"{name}={value}": self._figures((column, value))
            for name, column in self._slices()
            for value in self._values(column)[0]
        }

    def calibration_bins(self, count: int = 10) -> list[CalibrationBin]:
        """Mean prediction beside mean label of `count` bins of about the same weight, by ascending score, for a picture.

        Rows of one score are in one bin, so there may be fewer.

        Raises:
            ValueError: as `compute`; or labels that are not 0 and 1, or scores that are no probabilities.
        """
        self._check()
        if not self._has_probabilities:
            raise ValueError(
                f"{self._name}: got probabilities=False, expected True; scores that only order rows have no calibration"
            )
        if self._graded:
            raise ValueError(
                f"{self._name}: labels are not 0 and 1 alone, so that scores are no probabilities; there is no calibration"
            )
        total = ExactSum()
        for rows in self._weighed(columns=("weight",)):
            total.add(rows["weight"])
        return calibration_bins(self._weighed(_ORDER, _NUMBERS), total.value, count)

    def score_histogram(self, bins: int = 50) -> Histogram:
        """Weights of positives and of other rows by bins of their scores, before any sigmoid, for a picture.

        Raises:
            ValueError: as `compute`.
        """
        self._check()
        return histogram(self._weighed(columns=_NUMBERS), self._low, self._high, bins)

    def _figures(self, where: tuple[str, int] | None) -> dict[str, float]:
        """Of all rows, or of those with a value in a column. Names are those of all rows."""
        by_request = self._of_requests(where)
        if self._graded and not self._has_probabilities:
            rows = sum(len(chunk["weight"]) for chunk in self._rows.chunks(columns=("weight",), where=where))
            return {**by_request, "rows": float(rows)}
        if self._graded:
            weights, errors, rows = ExactSum(), ExactSum(), 0
            for chunk in self._weighed(columns=_NUMBERS, where=where):
                weights.add(chunk["weight"])
                errors.add(chunk["weight"] * np.square(chunk["score"] - chunk["label"]))
                rows += len(chunk["score"])
            return {"mse": errors.value / weights.value, **by_request, "rows": float(rows)}

        probabilities, rows = Probabilities(self._training_mean), 0

        def seen(chunks: Iterator[Columns]) -> Iterator[Columns]:
            nonlocal rows
            for chunk in chunks:
                probabilities.add(chunk)
                rows += len(chunk["score"])
                yield chunk

        if self._bins is None:
            figures = {"auc": auc(seen(self._weighed(_ORDER, _NUMBERS, where)))}
        else:
            chunks = seen(self._weighed(columns=_NUMBERS, where=where))
            _, up, down = histogram(chunks, self._low, self._high, self._bins)
            figures = dict(zip(("auc", "auc_bound"), binned_auc(np.array(up), np.array(down)), strict=True))
        key = next((self._column(what) for what in ("users", "requests") if what in (self._ids or ())), None)
        if key is not None:
            of_groups = grouped_auc(self._weighed((key, *_ORDER), (key, *_NUMBERS), where), key)
            figures |= zip(("gauc", "gauc_left_out"), of_groups, strict=True)
        if self._has_probabilities:
            figures |= probabilities.figures()
        return {**figures, **by_request, "rows": float(rows)}

    def _weighed(
        self, by: Sequence[str] = (), columns: Sequence[str] = (), where: tuple[str, int] | None = None
    ) -> Iterator[Columns]:
        """Rows in chunks as of `SortedRows.chunks`, each with the weight of all that it stands for."""
        if "rates" not in (self._ids or ()):
            yield from self._rows.chunks(by, columns, where)
            return
        # Rows that differ in nothing else would be in no order.
        for rows in self._rows.chunks((*by, "rate") if by else by, (*columns, "rate"), where):
            yield {**rows, "weight": rows["weight"] / rows["rate"]}

    def _of_requests(self, where: tuple[str, int] | None) -> dict[str, float]:
        """Nothing where all requests have one candidate; NaN where it is only those of a slice."""
        if "requests" not in (self._ids or ()) or (where is not None and not self._has_several()):
            return {}
        figures, several = self._ranked(where)
        if where is None:
            self._several = several
        return figures if several else {} if where is None else dict.fromkeys(figures, math.nan)

    def _has_several(self) -> bool:
        """Whether a request has several candidates; it is known where `compute` was called."""
        if self._several is None:
            self._several = self._ranked(None)[1]
        return self._several

    def _ranked(self, where: tuple[str, int] | None) -> tuple[dict[str, float], bool]:
        order = ("request", "-score", "label", "weight")
        return request_figures(self._rows.chunks(order, ("request", *_NUMBERS), where), self._ks, len(self._rows))

    def _check(self) -> None:
        if self._bad_scores:
            raise ValueError(f"{self._name}: scores are NaN or infinite; train again with a smaller learning_rate")
        if self._bad_numbers:
            raise ValueError(f"{self._name}: labels or weights are NaN, infinite or negative; mask the rows without a label")
        if not len(self._rows):
            raise ValueError(f"{self._name}: no row has a label to evaluate")

    def _slices(self) -> list[tuple[str, str]]:
        """Names of slices, and their columns."""
        return [(what[7:-1], self._column(what)) for what in self._ids or () if what.startswith("slices[")]

    def _values(self, column: str) -> tuple[list[int], int]:
        """The most frequent values of a column, and how many others there are."""
        if column not in self._frequent:
            values, counts, distinct = np.zeros(0, np.int64), np.zeros(0, np.int64), 0
            chunks = (
                {"value": rows[column], "count": np.ones(len(rows[column]), np.int64)}
                for rows in self._rows.chunks((column,), (column,))
            )
            for found in folded(chunks, ("value",)):
                distinct += len(found["value"])
                values, counts = (np.concatenate(pair) for pair in ((values, found["value"]), (counts, found["count"])))
                most = np.lexsort((values, -counts))[: self._max_slices]
                values, counts = values[most], counts[most]
            self._frequent[column] = values.tolist(), distinct - len(values)
        return self._frequent[column]

    def _expect(self, ids: tuple[str, ...]) -> None:
        if self._ids is None:
            self._ids = ids
            self._rows = self._new_rows(ids)
        elif self._ids != ids:
            told, before = (", ".join(of) or "none" for of in (ids, self._ids))
            raise ValueError(f"{self._name}: got the ids {told}, expected those of the batches before: {before}")

    def _new_rows(self, ids: Sequence[str]) -> SortedRows:
        types: dict[str, type[np.generic]] = dict.fromkeys(_NUMBERS, np.float64)
        names = {"users": "user", "requests": "request", "rates": "rate"}
        # The names of slices are the user's, and may not be such as a table has.
        self._columns = {what: names.get(what, f"slice_{number}") for number, what in enumerate(ids)}
        types |= {column: np.float64 if what == "rates" else np.int64 for what, column in self._columns.items()}
        return SortedRows(types, self._limit)

    def _column(self, what: str) -> str:
        return self._columns[what]


def _numbers(tensor: Tensor) -> AnyArray:
    # -0.0 becomes 0.0: they are one score, also where a table on disk sorts them.
    return tensor.detach().to("cpu", torch.float64).numpy() + 0.0


def _gathered(own: object) -> list[Any]:
    everyones: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyones, own)
    return everyones
