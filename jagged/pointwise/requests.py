"""What ranks the candidates of a request: NDCG, reciprocal rank and hits, means over requests that have a positive.

Candidates with one score are in no order. A figure is the mean over all orders of them, as if one were drawn.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

import numpy as np

from jagged.pointwise.storage import Columns
from jagged.pointwise.sums import ExactSum, FloatArray, IntArray, before, folded, running, starts_of

# Places of tied candidates that are looked at at once.
_PLACES = 1 << 16


def request_figures(chunks: Iterable[Columns], ks: Sequence[int], rows: int) -> tuple[dict[str, float], bool]:
    """`ndcg@k`, `mrr` and `hit_rate@k`, each request by the mean weight of its rows.

    `ndcg` takes labels as gains, and is NaN where one is negative; a label above 0 is a positive of the two others.

    Args:
        chunks: rows in ascending order of `request`, then descending of `score`, then ascending of `label` and `weight`, with
            these columns; every request belongs to one.
        ks: the cut-offs.
        rows: at most so many rows are there, of one request too.

    Returns:
        The figures, NaN where no request has a positive; and whether a request has several candidates.
    """
    depth = min(max(ks), rows)
    discounts = 1 / np.log2(np.arange(depth, dtype=np.float64) + 2)
    ideal = _Ideal(ks, discounts)
    weight, mrr = ExactSum(), ExactSum()
    sums = {name: [ExactSum() for _ in ks] for name in ("ndcg", "hit_rate")}
    negative = several = False

    def seen() -> Iterator[Columns]:
        nonlocal negative
        for chunk in chunks:
            negative = negative or bool((chunk["label"] < 0).any())
            ideal.add(chunk)
            yield chunk
        ideal.end()

    for requests in _requests(seen(), ks, discounts):
        several = several or bool((requests["count"] > 1).any())
        of = {name: values[requests["positives"] > 0] for name, values in requests.items()}
        if not len(of["count"]):
            continue
        best = ideal.take(len(of["count"]))
        mean_weight = of["weight"] / of["count"]
        firsts = np.stack([of[name] for name in ("above", "tied", "hits")], 1)
        # Few differ: most requests have one candidate of the best positive's score.
        distinct, place = np.unique(firsts, axis=0, return_inverse=True)
        place = place.reshape(-1)
        weight.add(mean_weight)
        mrr.add(mean_weight * np.array([reciprocal_rank(*one) for one in distinct.tolist()], np.float64)[place])
        for number, k in enumerate(ks):
            gains = np.minimum(of[f"dcg_{number}"] / best[:, number], 1.0)
            sums["ndcg"][number].add(mean_weight * gains)
            hits = np.array([hit(*one, k) for one in distinct.tolist()], np.float64)[place]
            sums["hit_rate"][number].add(mean_weight * hits)
    total = weight.value

    def mean(of: ExactSum) -> float:
        return of.value / total if total else math.nan

    ndcg = {f"ndcg@{k}": math.nan if negative else mean(of) for k, of in zip(ks, sums["ndcg"], strict=True)}
    hit_rate = {f"hit_rate@{k}": mean(of) for k, of in zip(ks, sums["hit_rate"], strict=True)}
    return {**ndcg, "mrr": mean(mrr), **hit_rate}, several


def _requests(chunks: Iterable[Columns], ks: Sequence[int], discounts: FloatArray) -> Iterator[Columns]:
    """Of each request `count`, `weight`, `positives`, `dcg_0` and so on by cut-off, and of the best score that a positive has.

    That is how many candidates are `above`, how many are `tied` there, and how many of these are `hits`.
    """
    depth = len(discounts)
    # Sums of the first discounts: a tied candidate has the mean of those of its places.
    until = np.concatenate([[0.0], np.cumsum(discounts)])
    alone = np.append(discounts, 0.0)

    def candidates() -> Iterator[Columns]:
        for rows in chunks:
            yield {
                "request": rows["request"],
                "score": rows["score"],
                "count": np.ones(len(rows["score"]), np.int64),
                "positives": (rows["label"] > 0).astype(np.int64),
                "gain": rows["label"],
                "weight": rows["weight"],
            }

    def places(runs: Columns, starts: IntArray) -> Columns:
        count, positives = runs["count"], runs["positives"]
        above = before(running(count, starts), starts)
        is_best = (positives > 0) & (before(running(positives, starts), starts) == 0)
        found = {
            "above": np.where(is_best, above, 0),
            "tied": np.where(is_best, count, 0),
            "hits": np.where(is_best, positives, 0),
        }
        for number, k in enumerate(ks):
            first, last = (np.minimum(of, min(k, depth)) for of in (above, above + count))
            # As for the ideal order, so that this one has 1.
            one = np.where(above < min(k, depth), alone[np.minimum(above, depth)], 0.0)
            discount = np.where(count == 1, one, (until[last] - until[first]) / count)
            found[f"dcg_{number}"] = runs["gain"] * discount
        return found

    runs = ({name: of for name, of in run.items() if name != "score"} for run in folded(candidates(), ("request", "score")))
    return folded(runs, ("request",), places)


class _Ideal:
    """DCG of the best order of each request that has a positive, of which it needs the largest labels alone."""

    def __init__(self, ks: Sequence[int], discounts: FloatArray) -> None:
        self._ks, self._discounts = ks, discounts
        self._request, self._label = np.zeros(0, np.int64), np.zeros(0)
        self._ready: deque[FloatArray] = deque()

    def add(self, rows: Columns) -> None:
        """Rows of requests in ascending order, those of one request in any."""
        if not len(rows["label"]):
            return
        chosen = rows["label"] > 0
        request = np.concatenate([self._request, rows["request"][chosen]])
        label = np.concatenate([self._label, rows["label"][chosen]])
        order = np.lexsort((-label, request))
        request, label = request[order], label[order]
        starts = starts_of(request)
        place = np.arange(len(request)) - np.repeat(starts, np.diff(starts, append=len(request)))
        kept = place < len(self._discounts)
        request, label, place = request[kept], label[kept], place[kept]
        # The last one may go on.
        is_open = request == rows["request"][-1]
        self._finish(request[~is_open], label[~is_open], place[~is_open])
        self._request, self._label = request[is_open], label[is_open]

    def end(self) -> None:
        """No row comes any more."""
        self._finish(self._request, self._label, np.arange(len(self._label)))

    def take(self, count: int) -> FloatArray:
        """`[count, ks]` of the next requests."""
        taken: list[FloatArray] = []
        while count:
            block = self._ready.popleft()
            taken.append(block[:count])
            count -= len(taken[-1])
            if len(taken[-1]) < len(block):
                self._ready.appendleft(block[len(taken[-1]) :])
        return np.concatenate([np.zeros((0, len(self._ks))), *taken])

    def _finish(self, request: IntArray, label: FloatArray, place: IntArray) -> None:
        if not len(request):
            return
        starts = starts_of(request)
        ends = np.append(starts[1:], len(request)) - 1
        gains = label * self._discounts[place]
        self._ready.append(np.stack([running(np.where(place < k, gains, 0.0), starts)[ends] for k in self._ks], 1))


@lru_cache(maxsize=1 << 16)
def reciprocal_rank(above: int, tied: int, hits: int) -> float:
    """Mean over all orders of `1 / rank` of the first of `hits` among `tied` candidates, `above` others before them."""
    total, left = 0.0, 1.0
    for first in range(0, tied - hits + 1, _PLACES):
        place = np.arange(first, min(first + _PLACES, tied - hits + 1), dtype=np.float64)
        # That a place has a hit where none before it has one.
        chance = hits / (tied - place)
        none = left * np.cumprod(1 - chance)
        total += float((np.concatenate([[left], none[:-1]]) * chance / (above + place + 1)).sum())
        left = float(none[-1])
    return total


@lru_cache(maxsize=1 << 16)
def hit(above: int, tied: int, hits: int, k: int) -> float:
    """Chance that one of `hits` among `tied` candidates is among the first `k`, `above` others before them."""
    places = min(k - above, tied)
    if places <= 0:
        return 0.0
    if places + hits > tied:
        return 1.0
    # Of both ways to draw, the places' and the hits', the shorter one.
    fewer, more = sorted((places, hits))
    drawn = np.arange(fewer, dtype=np.float64)
    return float(1 - np.prod((tied - more - drawn) / (tied - drawn)))
