"""Evaluation of whole catalogues against ranking user by user; protocols, modes, processes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.multiprocessing import spawn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from jagged.config import ConfigError, TrainConfig
from jagged.data import BatchLoader, SequenceBatch, read_events, split_leave_one_out
from jagged.evaluation import (
    PROTOCOLS,
    EvaluationError,
    Popularity,
    evaluate_model,
    evaluate_protocols,
    popularity_metrics,
    rank_batches,
)
from jagged.metrics import RankingMetrics, TrainCounts
from jagged.models import SASRec
from jagged.models.pretrained import save_pretrained
from jagged.runs.evaluating import evaluate

NUM_ITEMS, DIM = 60, 6


def keyed(rows):
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    values = torch.tensor([item for row in rows for item in row], dtype=torch.int64)
    return KeyedJaggedTensor.from_lengths_sync(["item_id"], values, lengths)


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
        wanted = torch.tensor(targets[first : first + size])
        result.append(SequenceBatch(keyed(rows), wanted, torch.arange(len(wanted)), seen if with_viewed else None))
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
    assert list(results) == ["all_items", "unseen_items"]
    for take_out in (False, True):
        got = results[PROTOCOLS[take_out]]
        for k in (5, 10):
            figures = [got[f"{name}@{k}"] for name in ("ndcg", "recall", "mrr", "coverage")]
            assert figures == pytest.approx(reference(model, histories, targets, take_out, k), rel=1e-12)
        one = evaluate_model(model, batches(histories, targets, size), train_counts=counts(), ks=(5, 10), filter_viewed=take_out)
        assert one == got
    assert results.all_items != results.unseen_items


def test_any_cut_offs_may_be_asked_for_also_beyond_the_catalogue():
    histories, targets = users()
    model = MeanOfHistory()
    ks = (1, 7, 59, 60, 61, 10**9)
    results = evaluate_protocols(model, batches(histories, targets, 9), train_counts=counts(), ks=ks)
    for take_out in (False, True):
        got = results[PROTOCOLS[take_out]]
        assert list(got) == [f"{name}@{k}" for name in ("ndcg", "recall", "mrr", "coverage", "surprisal") for k in ks]
        for k in ks:
            figures = [got[f"{name}@{k}"] for name in ("ndcg", "recall", "mrr", "coverage")]
            assert figures == pytest.approx(reference(model, histories, targets, take_out, k), rel=1e-12)
        assert got["recall@1000000000"] == 1


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


def write_events(path, histories):
    path.write_text("\n".join(" ".join([f"u{user}", *items]) for user, items in enumerate(histories)) + "\n")
    return path


def random_histories(count=40, items=30, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [[f"i{n}" for n in torch.randint(items, (user % 8 + 1,), generator=generator).tolist()] for user in range(count)]


def write_run(directory, data, *, keep_events=True):
    """A run's directory with random weights, as training leaves it."""
    dataset = read_events(data)
    split = split_leave_one_out(dataset)
    torch.manual_seed(1)
    model = SASRec(split.train.num_items, embedding_dim=8, num_heads=1, num_layers=1, max_seq_len=4)
    save_pretrained(
        model,
        directory,
        items=split.items,
        config=TrainConfig.load(None, {"data.max_seq_len": 4, "evaluation.eval_batch_size": 7}),
        split={"name": split.name, "fingerprint": dataset.fingerprint},
        train_counts=TrainCounts.from_part(split.train),
    )
    if keep_events:
        dataset.save(directory / "dataset")
    return model.eval(), dataset, split


def test_a_runs_directory_is_evaluated(tmp_path):
    data = write_events(tmp_path / "events.txt", random_histories())
    model, _, split = write_run(tmp_path / "run", data)
    for part in ("valid", "test"):
        loader = BatchLoader(getattr(split, part), batch_size=100, max_seq_len=4, shuffle=False, seed=0, with_viewed=True)
        expected = evaluate_protocols(model, loader, train_counts=TrainCounts.from_part(split.train))
        got = evaluate(tmp_path / "run", part=part)
        assert got.metrics == {protocol: pytest.approx(figures, rel=1e-9) for protocol, figures in expected.items()}
        assert (got.part, got.split, got.num_users, got.num_items) == (part, "leave-one-out", len(split.test), 28)
        assert got.same_data is True
    assert list(evaluate(tmp_path / "run", filter_viewed=True).metrics) == ["unseen_items"]
    assert evaluate(tmp_path / "run", data) == got
    lines = str(got).splitlines()
    assert lines[0] == "test part (leave-one-out): 30 users, all 28 items ranked for each"
    note = "note: 1 items are unknown to the model: 2 targets count as misses, 2 events are left out of histories"
    assert lines[1] == note
    assert lines[2] == "metric             seen items left in    seen items taken out"
    assert lines[3] == f"ndcg@5       {got.metrics.all_items['ndcg@5']:>24.4f}{got.metrics.unseen_items['ndcg@5']:>24.4f}"
    assert len(lines) == 3 + 15


@pytest.mark.parametrize("own", [True, False])
def test_items_that_the_model_does_not_know_leave_histories_and_are_missed_as_targets(tmp_path, own):
    histories = random_histories()
    for user in range(0, 40, 3):
        if len(histories[user]) > 2:
            # For validation and for the test alone: training has neither.
            histories[user][-2:] = ["late", "later"]
    model, _, _ = write_run(tmp_path / "run", write_events(tmp_path / "events.txt", histories))
    other = random_histories(seed=5)
    for user in range(0, 40, 3):
        other[user][-1] = "new"
        other[user][0] = "newer"
    evaluated = histories if own else other
    got = evaluate(tmp_path / "run", None if own else write_events(tmp_path / "o.txt", other), filter_viewed=True, ks=(5,))

    trained = {item for row in histories if len(row) > 1 for item in (row if len(row) < 3 else row[:-2])}
    items = [item for item in dict.fromkeys(item for row in histories for item in row) if item in trained]
    assert (len(items), len(model.item_weight)) == (got.num_items, got.num_items)
    assert {"late", "later"}.isdisjoint(trained)
    catalogue = set(items)
    unknown = len({item for history in evaluated for item in history} - catalogue)
    hits, users, unknown_targets, unknown_events = 0.0, 0, 0, 0
    for history in evaluated:
        if len(history) < 3:
            continue
        seen = history[:-1]
        users += 1
        unknown_events += sum(item not in catalogue for item in seen)
        unknown_targets += history[-1] not in catalogue
        known = [items.index(item) for item in seen if item in catalogue]
        with torch.no_grad():
            # What the model knows of a history is cut to its last four.
            scores = (model.final_hidden(keyed([known[-4:]])) @ model.item_weight.T)[0].tolist()
        if history[-1] not in catalogue:
            continue
        target = items.index(history[-1])
        order = sorted((n for n in range(len(items)) if n not in {*known} - {target}), key=lambda n: (-scores[n], n))
        hits += order.index(target) < 5
    assert got.metrics.unseen_items["recall@5"] == pytest.approx(hits / users)
    assert hits
    assert unknown_targets
    assert unknown_events
    assert got.same_data is own
    assert got.notes["unknown_items"] == unknown
    assert (got.notes["unknown_targets"], got.notes["unknown_history_events"]) == (unknown_targets, unknown_events)
    foreign = [] if own else ["note: these events are not those the model was trained on"]
    counted = f"{unknown_targets} targets count as misses, {unknown_events} events are left out of histories"
    notes = [line for line in str(got).splitlines() if line.startswith("note:")]
    assert notes == [*foreign, f"note: {unknown} items are unknown to the model: {counted}"]


def test_what_cannot_be_evaluated_is_named(tmp_path):
    data = write_events(tmp_path / "events.txt", random_histories())
    write_run(tmp_path / "run", data, keep_events=False)
    with pytest.raises(ConfigError, match=r"holds no events \(dataset/\); name the events file"):
        evaluate(tmp_path / "run")
    assert evaluate(tmp_path / "run", data).same_data is True
    with pytest.raises(ConfigError, match="part: got 'train', expected 'valid' or 'test'"):
        evaluate(tmp_path / "run", data, part="train")
    short = write_events(tmp_path / "short.txt", [["i1", "i2"], ["i3"]])
    for given, where in ((short, str(short)), (read_events(short), "SequenceDataset(2 users, 3 items, 3 events)")):
        with pytest.raises(EvaluationError) as error:
            evaluate(tmp_path / "run", given)
        assert str(error.value) == f"{where}: no user has a held-out event in the test part; users need at least 3 events"


def test_popularity_of_a_split_matches_ranking_by_counting(tmp_path):
    histories = random_histories(count=80, seed=3)
    dataset = read_events(write_events(tmp_path / "events.txt", histories))
    results = popularity_metrics(split_leave_one_out(dataset), ks=(3,), batch_size=16)
    items = dataset.items.ids.to_pylist()
    trained = [history[:-2] if len(history) >= 3 else history for history in histories]
    counts = {item: sum(item in history for history in trained if len(history) > 1) for item in items}
    for take_out in (False, True):
        hits = users = 0
        for history in histories:
            if len(history) < 3:
                continue
            users += 1
            left = [item for item in items if not take_out or item == history[-1] or item not in history[:-1]]
            hits += sorted(left, key=lambda item: (-counts[item], items.index(item))).index(history[-1]) < 3
        assert results[PROTOCOLS[take_out]]["recall@3"] == pytest.approx(hits / users)
        assert hits


def _one_of_two(rank, directory):
    torch.distributed.init_process_group("gloo", init_method=f"file://{directory}/meet", rank=rank, world_size=2)
    dataset = read_events(directory / "events.txt", progress=False)
    split = split_leave_one_out(dataset)
    train_counts = TrainCounts.from_part(split.train)
    torch.manual_seed(0)
    model = SASRec(split.train.num_items, embedding_dim=8, num_heads=1, num_layers=1, max_seq_len=4)
    options = {"batch_size": 4, "max_seq_len": 4, "shuffle": False, "seed": 0, "with_viewed": True}
    whole = evaluate_protocols(model, BatchLoader(split.test, **options), train_counts=train_counts, all_processes=False)
    shared = evaluate_protocols(model, BatchLoader(split.test, rank=rank, world_size=2, **options), train_counts=train_counts)
    (directory / f"{rank}.txt").write_text("same" if shared == whole else f"{shared} {whole}")
    torch.distributed.destroy_process_group()


def test_two_processes_return_the_figures_of_one(tmp_path):
    write_events(tmp_path / "events.txt", random_histories(count=50))
    spawn(_one_of_two, (tmp_path,), nprocs=2)
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)] == ["same", "same"]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.gpu
def test_on_a_gpu_no_batch_waits_and_the_figures_are_the_cpus(tmp_path):
    model, _, split = write_run(tmp_path / "run", write_events(tmp_path / "events.txt", random_histories(count=300)))
    train_counts = TrainCounts.from_part(split.train)
    options = {"batch_size": 32, "max_seq_len": 4, "shuffle": False, "seed": 0, "with_viewed": True}
    expected = evaluate_protocols(model, BatchLoader(split.test, **options), train_counts=train_counts)
    model = model.cuda()
    loader = BatchLoader(split.test, pin_memory=True, **options)
    metrics = [RankingMetrics(split.train.num_items, train_counts, device="cuda") for _ in range(2)]
    batches = rank_batches(model, loader, 20)
    try:
        for results in batches:
            for metric, result in zip(metrics, results, strict=True):
                metric.update(result.ranks, result.items)
            # The first batch may still compile and allocate.
            torch.cuda.set_sync_debug_mode("error")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for metric, figures in zip(metrics, expected.values(), strict=True):
        assert metric.compute() == pytest.approx(figures, abs=0.02)
    assert evaluate(tmp_path / "run", device="cuda").metrics == {
        protocol: pytest.approx(figures, abs=0.02) for protocol, figures in expected.items()
    }
