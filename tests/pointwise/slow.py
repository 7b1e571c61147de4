"""The figures of rows as their definitions say, in loops: what the streamed ones are compared with."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st

from jagged.pointwise import PointwiseMetrics

NAN = math.nan


class Row(NamedTuple):
    score: float
    label: float
    weight: float
    kept: bool
    user: int
    request: int
    device: int


CLASSES, WEIGHTS = st.integers(0, 1), st.sampled_from([0.0, 0.3, 1.0, 2.5])
# As many candidates have 120 orders.
_MOST = 5


def rows(labels: Any = CLASSES, weights: Any = WEIGHTS) -> Any:
    """Lists of rows; few scores and ids, so that most are tied and in groups."""
    scores = st.sampled_from([-40.0, -1.5, -0.0, 0.0, 0.25, 2.0])
    ids, devices = st.integers(-1, 2), st.sampled_from([7, -3, 2**40])
    return st.lists(st.builds(Row, scores, labels, weights, st.booleans(), ids, ids, devices), max_size=14).map(_split)


def _split(given: list[Row]) -> list[Row]:
    """Large requests as several."""
    seen: Counter[int] = Counter()
    result = []
    for row in given:
        result.append(row._replace(request=row.request + 10 * (seen[row.request] // _MOST)))
        seen[row.request] += 1
    return result


def add(metrics: PointwiseMetrics, given: Sequence[Row], users: bool = True, requests: bool = True, slices: bool = True) -> None:
    """Give rows to metrics as one batch."""
    score, label, weight, kept, user, request, device = zip(*given, strict=True) if given else [()] * 7
    ids = [torch.tensor(of, dtype=torch.int64) for of in (user, request, device)]
    metrics.update(
        torch.tensor(score, dtype=torch.float64),
        torch.tensor(label, dtype=torch.float64),
        torch.tensor(kept, dtype=torch.bool),
        torch.tensor(weight, dtype=torch.float64),
        users=ids[0] if users else None,
        requests=ids[1] if requests else None,
        slices={"device": ids[2]} if slices else None,
    )


def counted(given: Sequence[Row]) -> list[Row]:
    return [row for row in given if row.kept and row.weight > 0]


def auc(given: Sequence[Row]) -> float:
    pairs = right = 0.0
    for up in given:
        for down in given:
            if up.label == 1 and down.label == 0:
                pairs += up.weight * down.weight
                right += up.weight * down.weight * (1.0 if up.score > down.score else 0.5 if up.score == down.score else 0.0)
    return right / pairs if pairs else NAN


def gauc(given: Sequence[Row], key: str) -> tuple[float, float]:
    total = weighted = everything = 0.0
    for value in {getattr(row, key) for row in given}:
        group = [row for row in given if getattr(row, key) == value]
        weight = sum(row.weight for row in group)
        everything += weight
        if not math.isnan(auc(group)):
            total += weight
            weighted += weight * auc(group)
    return weighted / total if total else NAN, (everything - total) / everything if everything else NAN


def in_every_order(candidates: Sequence[Row], k: int) -> tuple[float, float, float]:
    """NDCG, reciprocal rank and hit, each the mean over all orders of the candidates that the scores allow."""
    found = []
    for order in itertools.permutations(range(len(candidates))):
        ranked = [candidates[place].label for place in sorted(order, key=lambda place: -candidates[place].score)]
        first = next(place for place, label in enumerate(ranked) if label > 0)
        dcg = sum(label / math.log2(place + 2) for place, label in enumerate(ranked[:k]))
        best = sum(label / math.log2(place + 2) for place, label in enumerate(sorted(ranked, reverse=True)[:k]))
        found.append((dcg / best, 1 / (first + 1), float(first < k)))
    ndcg, mrr, hits = (math.fsum(of) / len(found) for of in zip(*found, strict=True))
    return ndcg, mrr, hits


def by_request(given: Sequence[Row], ks: Sequence[int]) -> dict[str, float]:
    requests = [[row for row in given if row.request == value] for value in sorted({row.request for row in given})]
    ranked = [of for of in requests if any(row.label > 0 for row in of)]
    weights = [sum(row.weight for row in of) / len(of) for of in ranked]
    several = any(len(of) > 1 for of in requests)
    by_k = {k: [in_every_order(of, k) for of in ranked] for k in ks}

    def mean(of: Sequence[float]) -> float:
        return sum(map(lambda x, w: x * w, of, weights)) / sum(weights) if weights and several else NAN

    return {
        **{f"ndcg@{k}": mean([ndcg for ndcg, _, _ in by_k[k]]) for k in ks},
        "mrr": mean([mrr for _, mrr, _ in by_k[ks[0]]]),
        **{f"hit_rate@{k}": mean([hits for _, _, hits in by_k[k]]) for k in ks},
    }


def probabilities(given: Sequence[Row], training_mean: float) -> dict[str, float]:
    total = sum(row.weight for row in given)
    clicks = sum(row.weight * row.label for row in given)
    loss = sum(row.weight * math.log1p(math.exp(-row.score if row.label else row.score)) for row in given) / total
    rate = clicks / total
    entropy = -sum(share * math.log(share) for share in (rate, 1 - rate) if share)
    of_training = -rate * math.log(training_mean) - (1 - rate) * math.log(1 - training_mean)
    predicted = sum(row.weight / (1 + math.exp(-row.score)) for row in given)
    return {
        "calibration": predicted / clicks if clicks else NAN,
        "logloss": loss,
        "ne": loss / entropy if entropy else NAN,
        "ne_of_training": loss / of_training,
    }
