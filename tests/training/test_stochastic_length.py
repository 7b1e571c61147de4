"""Training with stochastic length: the task trains on drawn rows, runs repeat and go on, and figures are of whole histories."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import jagged
from jagged.config import ConfigError, TrainConfig, load_config
from jagged.data import BatchLoader, SequenceDataset, split_leave_one_out, synthetic_sessions
from jagged.models import NextItemTask, build
from jagged.models.pretrained import from_pretrained
from jagged.training.engine import _Step
from tests.training.support import cut_off, outcome, run

LENGTH, ALPHA = 24, 0.9
OPTIONS: dict[str, Any] = {"stochastic_length": ALPHA, "max_seq_len": LENGTH, "name": "hstu"}


@pytest.fixture(scope="module")
def dataset() -> SequenceDataset:
    return synthetic_sessions(0, num_users=40, num_items=96, mean_length=20)[0]


def loader_of(dataset: SequenceDataset, **options: Any) -> BatchLoader:
    given = {"batch_size": 8, "max_seq_len": LENGTH, "shuffle": True, "seed": 0, "stochastic_length": ALPHA}
    return BatchLoader(split_leave_one_out(dataset).train, **{**given, **options})


def task_of(dataset: SequenceDataset, name: str = "hstu", **options: Any) -> NextItemTask:
    torch.manual_seed(0)
    items = split_leave_one_out(dataset).train.num_items
    return NextItemTask(build(name, num_items=items, embedding_dim=8, dropout=0.0, max_seq_len=LENGTH, **options))


@pytest.mark.parametrize("name", ["hstu", "sasrec", "bert4rec"])
def test_a_task_trains_on_as_many_rows_as_were_drawn(dataset: SequenceDataset, name: str) -> None:
    batch = next(iter(loader_of(dataset)))
    assert batch.kept is not None
    assert batch.num_kept is not None
    assert batch.num_kept < len(batch.targets)
    task = task_of(dataset, name)
    torch.manual_seed(3)
    shorter = task.shortened(batch)
    assert shorter.features["item_id"].lengths().tolist() == batch.kept.tolist()
    torch.manual_seed(3)
    again = task.shortened(batch)
    assert torch.equal(again.targets, shorter.targets)
    torch.manual_seed(4)
    assert not torch.equal(task.shortened(batch).features.values(), shorter.features.values())
    # What is drawn is drawn once.
    assert task.shortened(shorter) is shorter
    torch.manual_seed(3)
    loss, scores = task(batch)
    rows = len(scores["next_item"].labels)
    assert rows == batch.num_kept + (len(batch) if name == "bert4rec" else 0)
    if name != "bert4rec":
        torch.testing.assert_close(loss, task(shorter).loss)
        assert torch.equal(scores["next_item"].labels, shorter.targets)


def test_in_evaluation_histories_are_whole(dataset: SequenceDataset) -> None:
    batch, whole = next(iter(loader_of(dataset))), next(iter(loader_of(dataset, stochastic_length=None)))
    task = task_of(dataset).eval()
    assert torch.equal(batch.features.values(), whole.features.values())
    assert task.shortened(batch) is batch
    assert torch.equal(task(batch).loss, task(whole).loss)
    assert torch.equal(task.predict(batch)["hidden"], task.predict(whole)["hidden"])


def test_times_and_targets_are_those_of_the_rows(dataset: SequenceDataset) -> None:
    """Every pair of neighbours that is trained on is one of the user's sequence, in its order and with its times."""
    loader, train = loader_of(dataset, with_times=True), split_leave_one_out(dataset).train
    task, times = task_of(dataset, num_time_buckets=8), dataset.timestamps
    assert times is not None
    torch.manual_seed(0)
    for batch in loader:
        shorter = task.shortened(batch)
        parts = [shorter.features[key].to_dense() for key in ("item_id", "timestamp")]
        targets = shorter.targets.split(shorter.features["item_id"].lengths().tolist())
        for user, items, when, following in zip(batch.users.tolist(), *parts, targets, strict=True):
            place = int((train.user == user).nonzero())
            first, last = int(train.start[place]), int(train.end[place])
            every = list(zip(train.items(torch.arange(first, last)).tolist(), times[first:last].tolist(), strict=True))
            at = -1
            for pair in zip(items.tolist(), when.tolist(), strict=True):
                at = every.index(pair, at + 1)
            assert at < len(every) - 1
            assert following.tolist() == [*items.tolist()[1:], every[-1][0]]


def test_graphs_are_of_what_is_trained_on(dataset: SequenceDataset) -> None:
    batch, task = next(iter(loader_of(dataset))), task_of(dataset)
    processes: Any = SimpleNamespace(device=torch.device("cpu"), world_size=1)
    step, seen = _Step(task, "32-true", processes, graphs=False), []

    def replayed(given: Any) -> tuple[torch.Tensor, None]:
        seen.append(given)
        return torch.zeros(()), None

    step._graphs = replayed  # type: ignore[assignment]
    _, (_, rows) = step(batch)
    assert (len(seen[0].targets), seen[0].kept) == (batch.num_kept, None)
    assert rows == batch.num_kept


def test_runs_repeat_and_go_on(dataset: SequenceDataset, tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", dataset, **{**OPTIONS, "stochastic_length": None})
    first = run(tmp_path / "first", dataset, **OPTIONS)
    assert from_pretrained(first.directory).config.training.stochastic_length == ALPHA  # type: ignore[union-attr]
    run(tmp_path / "second", dataset, num_workers=1, **OPTIONS)
    assert outcome(tmp_path / "first") == outcome(tmp_path / "second")
    assert outcome(tmp_path / "first")["weights"] != outcome(whole.directory)["weights"]
    # In the middle of an epoch, behind a checkpoint.
    options = {**OPTIONS, "checkpoint_every": 2}
    cut_off(8, lambda: run(tmp_path / "cut", dataset, **options))
    run(tmp_path / "cut", dataset, resume=True, **options)
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "first")


def test_runs_take_budgets_and_accumulate(dataset: SequenceDataset, tmp_path: Path) -> None:
    options = {**OPTIONS, "max_tokens": 64, "accumulate": 2}
    results = [run(tmp_path / name, dataset, **options) for name in ("a", "b")]
    steps = run(tmp_path / "whole", dataset, **{**options, "stochastic_length": None}).steps
    assert outcome(results[0].directory) == outcome(results[1].directory)
    assert results[0].steps < steps


def test_figures_are_of_whole_histories(dataset: SequenceDataset, tmp_path: Path) -> None:
    result = run(tmp_path / "run", dataset, **OPTIONS)
    found = jagged.evaluate(result.directory, device="cpu", progress=False).metrics["all_items"]["ndcg@10"]
    assert found == from_pretrained(result.directory).metrics["test"]["all_items"]["ndcg@10"]
    # And of any alpha the same, as it is no part of the model.
    model = from_pretrained(result.directory).model
    assert "stochastic_length" not in model.config


def test_options_out_of_range_are_refused() -> None:
    for alpha in (0.0, 2.1):
        with pytest.raises(ConfigError) as refused:
            TrainConfig(training={"stochastic_length": alpha})
        assert str(refused.value) == (
            f"training.stochastic_length: got {alpha}, expected a number, above 0 and at most 2, or none"
        )


@pytest.mark.parametrize("name", ["dlrm-hstu", "ranking", "din"])
def test_models_of_requests_refuse_it(name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(None, {"model.name": name, "training.stochastic_length": ALPHA})
    assert str(refused.value) == (
        "training.stochastic_length: belongs to model.name sasrec, hstu or bert4rec, not to ranking, dlrm, dcnv2, wukong, mmoe, "
        "dlrm-hstu or din"
    )
