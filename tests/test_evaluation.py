"""Evaluation of whole catalogues against ranking user by user; protocols, modes, processes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from jagged.evaluation import PROTOCOLS, EvaluationError, Popularity, evaluate_model, evaluate_protocols
from jagged.metrics import TrainCounts

NUM_ITEMS, DIM = 60, 6


def keyed(rows):
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    values = torch.tensor([item for row in rows for item in row], dtype=torch.int64)
    return KeyedJaggedTensor.from_lengths_sync(["item_id"], values, lengths)


@dataclass
class Batch:
    features: KeyedJaggedTensor
    targets: torch.Tensor
    viewed: KeyedJaggedTensor | None

    def to(self, device, non_blocking=False):
        return replace(self, features=self.features.to(device), targets=self.targets.to(device))


class MeanOfHistory(nn.Module):
    """The mean item vector of the history, through dropout and a matrix product that autocast would round."""

    def __init__(self, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.item_weight = nn.Parameter(torch.randn(NUM_ITEMS, DIM, generator=generator))
        self.mix = nn.Linear(DIM, DIM, bias=False)
        self.frozen = nn.Dropout(0.5).eval()
        self.dropout = nn.Dropout(0.5)
        with torch.no_grad():
            self.mix.weight.copy_(torch.randn(DIM, DIM, generator=generator))

    def final_hidden(self, features):
        rows = features.to_dict()["item_id"].to_dense()
        means = [self.item_weight[row].mean(0) if len(row) else torch.zeros(DIM) for row in rows]
        return self.mix(self.dropout(torch.stack(means) if means else torch.zeros(0, DIM)))


def users(count=50, seed=0):
    """Histories (some empty), targets (some of them seen before)."""
    generator = torch.Generator().manual_seed(seed)
    histories = [torch.randint(NUM_ITEMS, (length,), generator=generator).tolist() for length in (i % 7 for i in range(count))]
    targets = torch.randint(NUM_ITEMS, (count,), generator=generator).tolist()
    for user in range(0, count, 5):
        if histories[user]:
            targets[user] = histories[user][0]
    return histories, targets


def batches(histories, targets, size, with_viewed=True):
    result = []
    for first in range(0, len(targets), size):
        rows = histories[first : first + size]
        # Viewed items include the target itself: it must stay in the ranking nevertheless.
        seen = keyed([[*row, target] for row, target in zip(rows, targets[first : first + size], strict=True)])
        result.append(Batch(keyed(rows), torch.tensor(targets[first : first + size]), seen if with_viewed else None))
    return result


def counts(seed=0):
    return TrainCounts(torch.randint(0, 9, (NUM_ITEMS,), generator=torch.Generator().manual_seed(seed)), 9)


def reference(model, histories, targets, take_out, k):
    """NDCG@k, Recall@k, MRR@k and Coverage@k with one sort a user."""
    model = model.eval()
    ndcg = recall = mrr = 0.0
    shown = set()
    with torch.no_grad():
        for history, target in zip(histories, targets, strict=True):
            scores = (model.final_hidden(keyed([history]))[0].double() @ model.item_weight.double().T).float().tolist()
            left = [item for item in range(NUM_ITEMS) if not take_out or item == target or item not in history]
            order = sorted(left, key=lambda item: (-scores[item], item))
            rank = order.index(target)
            shown |= set(order[:k])
            if rank < k:
                ndcg, recall, mrr = ndcg + 1 / math.log2(rank + 2), recall + 1, mrr + 1 / (rank + 1)
    trained = {item for item in range(NUM_ITEMS) if counts().users_per_item[item]}
    return [ndcg / len(targets), recall / len(targets), mrr / len(targets), len(shown & trained) / len(trained)]


@pytest.mark.parametrize("size", [1, 7, 50])
def test_both_protocols_match_ranking_user_by_user(size):
    histories, targets = users()
    model = MeanOfHistory()
    results = evaluate_protocols(model, batches(histories, targets, size), train_counts=counts(), ks=(5, 10))
    assert list(results) == ["seen items left in", "seen items taken out"]
    for take_out in (False, True):
        got = results[PROTOCOLS[take_out]]
        for k in (5, 10):
            figures = [got[f"{name}@{k}"] for name in ("ndcg", "recall", "mrr", "coverage")]
            assert figures == pytest.approx(reference(model, histories, targets, take_out, k), rel=1e-12)
        one = evaluate_model(model, batches(histories, targets, size), train_counts=counts(), ks=(5, 10), filter_viewed=take_out)
        assert one == got
    assert results["seen items left in"] != results["seen items taken out"]


def test_modes_are_restored_also_after_a_failure():
    histories, targets = users(9)
    model = MeanOfHistory().train()
    model.frozen.eval()
    evaluate_model(model, batches(histories, targets, 4), train_counts=counts())
    assert (model.training, model.dropout.training, model.frozen.training) == (True, True, False)
    with pytest.raises(ValueError, match="with_viewed=True"):
        evaluate_model(model, batches(histories, targets, 4, with_viewed=False), train_counts=counts(), filter_viewed=True)
    assert (model.training, model.dropout.training, model.frozen.training) == (True, True, False)
    assert model.item_weight.requires_grad


def test_autocast_outside_changes_nothing():
    histories, targets = users()
    model = MeanOfHistory()
    plain = evaluate_model(model, batches(histories, targets, 20), train_counts=counts())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert evaluate_model(model, batches(histories, targets, 20), train_counts=counts()) == plain


def test_users_without_events_rank_items_by_id():
    got = evaluate_model(MeanOfHistory(), batches([[], []], [0, 3], 2), train_counts=counts(), ks=(3, 5))
    assert got["recall@3"] == 0.5
    assert got["mrr@5"] == (1 + 1 / 4) / 2


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["table", "hidden"])
def test_scores_that_are_no_numbers_are_an_error(value, where):
    histories, targets = users(9)
    model = MeanOfHistory()
    with torch.no_grad():
        (model.item_weight if where == "table" else model.mix.weight)[3, 2] = value
    with pytest.raises(EvaluationError, match="NaN or infinite"):
        evaluate_model(model, batches(histories, targets, 4), train_counts=counts())


def test_popularity_ranks_by_training_users():
    train_counts = TrainCounts(torch.tensor([1, 5, 0, 5, 2]), 6)
    got = evaluate_model(Popularity(train_counts), batches([[0], [1], []], [3, 3, 2], 2), train_counts=train_counts, ks=(2, 3))
    assert got["recall@2"] == pytest.approx(2 / 3)
    assert got["mrr@2"] == pytest.approx((1 / 2 + 1 / 2) / 3)
    taken_out = evaluate_model(
        Popularity(train_counts), batches([[0], [1], []], [3, 3, 2], 2), train_counts=train_counts, ks=(2, 3), filter_viewed=True
    )
    assert taken_out["mrr@2"] == pytest.approx((1 / 2 + 1) / 3)
