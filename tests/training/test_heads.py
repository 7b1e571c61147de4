"""Runs with every head: they are built as configured, learn, and go on as if nothing had been."""

from __future__ import annotations

import dataclasses
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from jagged.config import ConfigError
from jagged.data import SequenceDataset
from jagged.evaluation import evaluate_protocols
from jagged.models import NextItemTask, build, build_head
from jagged.models.pretrained import save_pretrained
from jagged.modules import (
    CutCrossEntropyHead,
    GroupSparseHead,
    InBatchSampler,
    MixedSampler,
    PopularitySampler,
    SampledCrossEntropyHead,
    ScalableCrossEntropyHead,
    UniformSampler,
)
from jagged.runs import Run, training
from jagged.runs.recommending import Recommender
from jagged.training import CheckpointError, TrainingError, TrainingInterrupted
from jagged.training.engine import Engine
from jagged.training.processes import process_group
from tests.training.support import at_step, flat_config, kill_self, outcome, run, tiny_dataset

HEADS: dict[str, dict[str, Any]] = {
    "uniform": {"num_negatives": 16, "sampled_loss": "gbce"},
    "popularity": {"sampler": "popularity", "num_negatives": 16, "correction": "both", "negatives_per": "batch"},
    "in-batch": {"sampler": "in-batch", "sampled_loss": "refined"},
    "mixed": {"sampler": "mixed", "num_negatives": 16},
    "scalable": {"head": "scalable", "num_buckets": 8, "rows_per_bucket": 16, "items_per_bucket": 16},
    "group-sparse": {"head": "group-sparse", "fan_in": 4, "group_size": 8, "rewire_every": 2, "rewire_until": 1.0},
}


@pytest.fixture(scope="module")
def dataset() -> SequenceDataset:
    return tiny_dataset()


def test_heads_are_built_as_configured() -> None:
    counts = torch.tensor([3, 0, 1])
    smoothed = build_head(flat_config(label_smoothing=0.3), counts)
    assert isinstance(smoothed, CutCrossEntropyHead)
    assert smoothed.label_smoothing == 0.3
    options: dict[str, Any] = {"head": "sampled", "seed": 4}
    kinds = {"uniform": UniformSampler, "popularity": PopularitySampler, "in-batch": InBatchSampler, "mixed": MixedSampler}
    for name, kind in kinds.items():
        drawn = {} if name == "in-batch" else {"num_negatives": 7}
        head = build_head(flat_config(sampler=name, **drawn, **options), counts)
        assert isinstance(head, SampledCrossEntropyHead)
        assert type(head.sampler) is kind
        assert (head.loss, head.correction) == ("softmax", "none" if name == "uniform" else "negatives")
        if name in ("uniform", "popularity"):
            assert (head.sampler.count, head.sampler.rows_per_draw, head.sampler.seed.item()) == (7, 1, 4)
            shared = build_head(flat_config(sampler=name, negatives_per="batch", **drawn, **options), counts)
            assert isinstance(shared, SampledCrossEntropyHead)
            assert shared.sampler.rows_per_draw is None
    buckets = build_head(flat_config(head="scalable", num_buckets=2, rows_per_bucket=3, items_per_bucket=4), counts)
    assert isinstance(buckets, ScalableCrossEntropyHead)
    assert (buckets.num_buckets, buckets.rows_per_bucket, buckets.items_per_bucket) == (2, 3, 4)
    gbce = build_head(flat_config(sampled_loss="gbce", gbce_t=0.1, **options), counts)
    assert isinstance(gbce, SampledCrossEntropyHead)
    assert (gbce.loss, gbce.gbce_t) == ("gbce", 0.1)


@pytest.mark.parametrize("name", list(HEADS))
def test_a_resumed_run_draws_what_it_would_have_drawn(
    dataset: SequenceDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    options = {"head": "sampled", "max_epochs": 2, "learning_rate": 1e-2, **HEADS[name]}
    result = run(tmp_path / "whole", dataset, **options)
    assert result.history[-1]["loss"] < result.history[0]["loss"]
    with monkeypatch.context() as patch:
        at_step(patch, 7, kill_self(signal.SIGTERM))
        with pytest.raises(TrainingInterrupted):
            run(tmp_path / "stopped", dataset, **options)
    run(tmp_path / "stopped", dataset, resume=True, **options)
    assert outcome(tmp_path / "stopped") == outcome(tmp_path / "whole")


def test_a_run_with_an_output_layer_ranks_as_it_was_tested(
    dataset: SequenceDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inputs change as the options say; the run's directory opens, gives its figures again, and recommends what scores best."""
    steps: list[tuple[float, int]] = []
    original = GroupSparseHead.rewire

    def rewire(self: GroupSparseHead, fraction: float, **options: Any) -> int:
        steps.append((fraction, options["step"]))
        return original(self, fraction, **options)

    monkeypatch.setattr(GroupSparseHead, "rewire", rewire)
    options = {"max_epochs": 2, "rewire_fraction": 0.2, **HEADS["group-sparse"], "rewire_until": 0.5}
    result = run(tmp_path / "a", dataset, **options)
    assert steps == [(0.2, step) for step in range(2, result.steps // 2 + 1, 2)]
    assert steps
    opened = Run.open(tmp_path / "a")
    assert opened.model.config["output_fan_in"] == 4
    assert opened.model.output.num_head_labels == round(0.02 * len(opened.items))
    split = opened.split(dataset)
    again = evaluate_protocols(
        opened.model, opened.loader(split.test, with_viewed=True), train_counts=opened.train_counts(), progress=False
    )
    assert again == result.metrics.test
    recommender = Recommender.from_pretrained(tmp_path / "a")
    ids = opened.items.decode(np.arange(5)).to_pylist()
    found = recommender.recommend({"u": ids}, k=3, filter_viewed=False)
    features = KeyedJaggedTensor.from_lengths_sync(["item_id"], torch.arange(5), torch.tensor([5], dtype=torch.int32))
    with torch.no_grad():
        scores, items = opened.model.output.topk(opened.model(features).values()[-1:], 3)
    assert found["item_id"].to_pylist() == opened.items.decode(items[0].numpy()).to_pylist()
    np.testing.assert_allclose(found["score"].to_numpy(), scores[0].numpy(), rtol=1e-5)
    # What is alike is so by the item table.
    alike = recommender.similar(ids[:1], k=1)
    table = torch.nn.functional.normalize(opened.model.item_table.detach(), dim=1)
    best = (table[:1] @ table.T).index_fill(1, torch.tensor([0]), -2).max(1)
    assert alike["similar_item_id"].to_pylist() == opened.items.decode(best.indices.numpy()).to_pylist()
    np.testing.assert_allclose(alike["score"].to_numpy(), best.values.numpy(), rtol=1e-5)
    opened.model.output.supports[0, 0] = 99
    save_pretrained(opened.model, tmp_path / "c", items=opened.items)
    message = "model.safetensors: found supports out of range, expected those of a trained head; copy the directory again"
    with pytest.raises(CheckpointError, match=f"{re.escape(message)}$"):
        Recommender.from_pretrained(tmp_path / "c")
    run(tmp_path / "b", dataset, **{**options, "rewire_fraction": 0.0})
    assert len(steps) == result.steps // 4


def test_an_output_layer_that_a_configuration_cannot_have() -> None:
    with pytest.raises(ConfigError, match=r"^head\.fan_in: got 65, expected at most model\.embedding_dim \(64\)$"):
        flat_config(head="group-sparse", fan_in=65, embedding_dim=64)


def test_a_checkpoint_without_the_seed_is_refused() -> None:
    model = build("sasrec", num_items=5, embedding_dim=8)
    config = flat_config(embedding_dim=8, head="sampled")
    with process_group(torch.device("cpu")) as processes:
        engine = Engine(NextItemTask(model, head=build_head(config, torch.ones(5))), config.trainer, "32-true", processes)
        state = engine.state_tensors()
        engine.load_state_tensors(state, 0)
        del state["task.head.sampler.seed"]
        with pytest.raises(CheckpointError, match=r"weights do not fit the task: .*head\.sampler\.seed"):
            engine.load_state_tensors(state, 0)


def test_scalable_heads_train_in_one_process(dataset: SequenceDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def two(device: torch.device) -> Iterator[Any]:
        with process_group(device) as processes:
            yield dataclasses.replace(processes, world_size=2)

    monkeypatch.setattr(training, "process_group", two)
    with pytest.raises(TrainingError) as caught:
        run(tmp_path, dataset, head="scalable")
    assert str(caught.value) == "head: scalable trains in one process; start one, or take head=cross-entropy or head=sampled"
    with pytest.raises(TrainingError) as caught:
        run(tmp_path / "other", dataset, model={"name": "bert4rec", "embedding_dim": 8})
    assert str(caught.value) == "model: bert4rec trains in one process; start one, or take model=sasrec or model=hstu"
    model = build("sasrec", num_items=5, embedding_dim=8)
    task = NextItemTask(model, head=ScalableCrossEntropyHead(2, 2, 2))
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - the whole message follows
        task.split(None, None)  # type: ignore[arg-type]
    assert str(refused.value) == (
        "head: expected a CutCrossEntropyHead or SampledCrossEntropyHead, the ones for several processes, got "
        "ScalableCrossEntropyHead; take one process, or one of those"
    )
    with pytest.raises(ValueError, match=r"label_smoothing: got 0\.1 and a head"):
        NextItemTask(model, label_smoothing=0.1, head=task.head)
