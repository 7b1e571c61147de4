"""The model of rows with sets of labels, on the trainer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from jagged.config import TrainerConfig
from jagged.data import LabelBatch, MultiLabelRows, label_loader, synthetic_labels
from jagged.label_metrics import LabelMetrics, propensities
from jagged.models import MultiLabelTask, SparseEncoder
from jagged.models.pretrained import load_task
from jagged.modules import GroupSparseHead
from jagged.training import Callback, Progress, Rewiring, Trainer, TrainingError, TrainingInterrupted, TrainResult
from jagged.training.checkpoint import latest_checkpoint, load_checkpoint
from tests.places import PLACE
from tests.processes import told_by
from tests.training.support import at_step, kill_self

pytestmark = pytest.mark.skipif(PLACE.name != "cpu", reason="the trainer on a CPU")

ROWS, TEST, TRUTH = synthetic_labels(num_rows=600, num_test_rows=200, num_labels=200, num_features=600, num_groups=20)


def counts_of(rows: MultiLabelRows) -> Tensor:
    return torch.bincount(torch.from_numpy(rows.labels).long(), minlength=rows.num_labels)


def task_of(dropout: float = 0.2, **options: Any) -> MultiLabelTask:
    torch.manual_seed(0)
    counts = counts_of(ROWS)
    head = GroupSparseHead(64, counts, len(ROWS), fan_in=24, group_size=4, head=0.05, **options)
    weights = 1 / propensities(counts, len(ROWS))
    return MultiLabelTask(SparseEncoder(ROWS.num_features, 64, dropout=dropout), head, label_weights=weights.float())


def config_of(output: Path, **options: Any) -> TrainerConfig:
    common = {"max_epochs": 3, "checkpoint_seconds": 0.0, "device": "cpu", "tensorboard": False, "learning_rate": 0.01}
    return TrainerConfig(**{**common, "output": str(output), **options})


def train(
    output: Path, *callbacks: Callback, resume: bool = False, task: MultiLabelTask | None = None, **options: Any
) -> TrainResult:
    config = config_of(output, **options)
    trainer = Trainer(task or task_of(), config, callbacks=callbacks)
    loaders = label_loader(ROWS, 50, shuffle=True), label_loader(TEST, 64), label_loader(TEST, 64)
    return trainer.fit(*loaders, resume=resume, progress=False)


def test_a_batch_has_its_rows_features_and_labels() -> None:
    part = ROWS.take(np.array([5, 0, 7]))
    batch = LabelBatch.of(part)
    assert len(batch) == 3
    assert batch.features.keys() == ["features"]
    assert batch.features.values().tolist() == part.feature_ids.tolist()
    assert batch.features.weights().tolist() == part.feature_values.tolist()
    assert batch.features.lengths().tolist() == np.diff(part.feature_offsets).tolist()
    assert batch.labels.values().tolist() == part.labels.tolist()
    assert batch.labels.offsets().tolist() == part.label_offsets.tolist()
    # Batches share no memory with what they are of.
    batch.features.weights().zero_()
    assert part.feature_values.any()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_gives_every_row_once(workers: int) -> None:
    loader = label_loader(TEST, 64, num_workers=workers)
    batches = list(loader)
    assert len(loader) == len(batches) == 4
    assert torch.cat([batch.labels.values() for batch in batches]).tolist() == TEST.labels.tolist()
    torch.manual_seed(0)
    shuffled = [batch.labels.offsets().shape[0] - 1 for batch in label_loader(TEST, 64, shuffle=True, drop_last=True)]
    assert shuffled == [64] * 3


def test_the_encoder_is_a_weighted_sum_and_a_layer() -> None:
    encoder = SparseEncoder(ROWS.num_features, 8)
    batch = LabelBatch.of(ROWS.take(np.arange(3)))
    table = next(encoder.table.parameters())
    dense = torch.zeros(3, ROWS.num_features)
    rows = torch.repeat_interleave(batch.features.lengths())
    dense.index_put_((rows, batch.features.values()), batch.features.weights(), accumulate=True)
    torch.testing.assert_close(encoder(batch.features), encoder.mlp(dense @ table))


def test_it_learns_and_its_figures_are_those_of_label_metrics(tmp_path: Path) -> None:
    task = task_of(dropout=0.0)
    before = task.evaluate(label_loader(TEST, 64), "test", progress=False)
    result = train(tmp_path / "run", Rewiring(0.05, every=10, until=24), task=task)
    figures = result.metrics.test
    metrics = LabelMetrics(200, task.label_weights, task.ks)
    positives = LabelBatch.of(TEST).labels
    found = task.predict(LabelBatch.of(TEST))
    assert found["labels"].shape == (200, 10)
    assert bool((found["probabilities"].diff(dim=1) <= 0).all())
    metrics.update(found["labels"], positives.values(), positives.offsets())
    expected = metrics.compute()
    again = task.evaluate(label_loader(TEST, 7), "test", progress=False)
    assert dict(again["labels"]) == pytest.approx(expected)
    assert figures["labels"]["p@1"] == pytest.approx(expected["p@1"])
    assert again["all"]["loss"] < before["all"]["loss"]
    # Of 0.7 that the truth reaches, and of what the most frequent labels do.
    assert expected["p@1"] > before["labels"]["p@1"] + 0.1
    assert {"p@1", "psp@1", "ndcg@5", "recall@10"} <= set(expected)


def test_probabilities_are_those_of_the_head_s_loss(tmp_path: Path) -> None:
    """One for all labels of a row where the loss is a softmax, one each where it is not."""
    task = task_of(dropout=0.0, loss="softmax")
    train(tmp_path / "run", task=task, max_epochs=1)
    found = task.predict(LabelBatch.of(TEST), k=200)
    torch.testing.assert_close(found["probabilities"].sum(1), torch.ones(200))
    each = task_of(dropout=0.0).predict(LabelBatch.of(TEST), k=200)
    assert bool((each["probabilities"].sum(1) > 1.01).any()) or bool((each["probabilities"].sum(1) < 0.99).any())


SGD: dict[str, Any] = {"optimizer": "sgd", "optimizer_options": {"learning_rate": 0.5, "momentum": 0.9}}


@pytest.mark.parametrize(("by", "options"), [("random", {}), ("gradient", {}), ("random", SGD)])
def test_a_run_that_goes_on_ends_as_one_that_was_not_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str, options: dict[str, Any]
) -> None:
    """With dropout, shuffled rows, new inputs before the stop and in the first step after it, and the optimizers' states."""
    new: dict[str, Any] = {"fraction": 0.2, "every": 6, "until": 30, "by": by}

    def one(name: str, **more: Any) -> TrainResult:
        return train(tmp_path / name, Rewiring(**new), task=task_of(**options), schedule="cosine", **more)

    one("whole")
    with monkeypatch.context() as patch:
        at_step(patch, 17, kill_self(15))
        with pytest.raises(TrainingInterrupted):
            one("stopped")
    one("stopped", resume=True)
    whole, stopped = (load_task(tmp_path / name, task_of()).state_dict() for name in ("whole", "stopped"))
    assert whole.keys() == stopped.keys()
    for name, value in whole.items():
        assert torch.equal(value, stopped[name]), name
    assert bool((whole["head.born"] > 0).any())


def test_a_head_with_an_optimizer_of_its_own(tmp_path: Path) -> None:
    """Its rate has the run's schedule, no clipping sees it, and it learns; nothing of it is in AdamW."""
    task, rates = task_of(dropout=0.0, **SGD), []

    class Look(Callback):
        def on_step(self, progress: Progress) -> None:
            assert task.head.optimizer is not None
            rates.append(float(task.head.optimizer.learning_rate))
            assert task.head.weight.grad is None

    before = task.head.weight.detach().clone()
    result = train(tmp_path / "run", Look(), task=task, schedule="linear", warmup_steps=4, gradient_clip_norm=1e-9)
    # Twelve steps an epoch, each rate that of the step after it.
    peaks = [min(1.0, (step + 1) / 4) * (1 - max(0, step - 4) / 32) for step in range(1, 37)]
    assert rates == pytest.approx([0.5 * peak for peak in peaks], abs=1e-7)
    assert bool((task.head.weight - before).abs().max() > 0.01)
    newest = latest_checkpoint(tmp_path / "run/checkpoints")
    assert newest is not None
    kept = {name for name in load_checkpoint(newest)[0] if name.startswith("optimizer.")}
    assert {name for name in kept if name.endswith((".head", ".head.weight", ".head.bias"))} == {
        f"optimizer.{key}.head" for key in ("learning_rate", "step", "weight_momentum", "bias_momentum")
    }
    assert result.metrics.test["labels"]["p@1"] > 0


def test_a_head_of_its_own_optimizer_is_refused_where_several_batches_make_a_step(tmp_path: Path) -> None:
    with pytest.raises(TrainingError) as raised:
        train(tmp_path / "run", task=task_of(**SGD), accumulate=2)
    assert str(raised.value) == (
        "task: head is updated in the backward pass, by the gradient of one batch, but 2 batches make a step here; make the head "
        "without an optimizer, or train in one process without accumulation"
    )


def test_inputs_by_gradient_are_those_of_the_last_training_batch(tmp_path: Path) -> None:
    """Not of a validation's, and not other ones than a call of `rewire` would choose."""
    seen: list[int] = []
    rewiring = Rewiring(0.2, every=4, until=20, protected=0, by="gradient")

    class Look(Callback):
        def on_step(self, progress: Progress) -> None:
            head = progress.task.head  # type: ignore[attr-defined]
            batch = rewiring._batches[head]
            assert not batch[0].requires_grad
            seen.append(batch[0].shape[0])
            self.expected = copy.deepcopy(head)
            if progress.state.step in (4, 16):
                self.expected.rewire(0.2, step=progress.state.step, protected=0, by="gradient", batch=batch)

    class Compare(Callback):
        def on_step(self, progress: Progress) -> None:
            if progress.state.step in (4, 16):
                head = progress.task.head  # type: ignore[attr-defined]
                assert torch.equal(head.supports, look.expected.supports)
                assert torch.equal(head.weight, look.expected.weight)
                assert int((head.born == progress.state.step).sum()) == round(0.2 * head.born.numel())

    look, task = Look(), task_of()
    train(tmp_path, look, rewiring, Compare(), task=task, validate_every="3 steps")
    assert set(seen) == {50}
    assert len(seen) == 36
    assert rewiring._batches == {}
    assert not task.head._forward_pre_hooks
    # A user's own head may be told rows that do not count; which weights matter to the others it does not know.
    handle = task.head.register_forward_pre_hook(rewiring._keep, with_kwargs=True)
    hidden, positives = torch.zeros(2, task.head.weight.shape[1] * 2), LabelBatch.of(ROWS.take(np.arange(2))).labels
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        task.train().head(hidden, positives, row_mask=torch.tensor([True, False]))
    assert str(raised.value) == "by: got 'gradient' and a head that is called with row_mask; take 'random', or leave the rows out"
    handle.remove()


def test_slots_change_until_they_may_no_longer(tmp_path: Path) -> None:
    born: list[set[int]] = []

    class Look(Callback):
        def on_step(self, progress: Progress) -> None:
            head = progress.task.head  # type: ignore[attr-defined]
            state = progress.optimizer_of(head.weight).state[head.weight]
            fresh = head.born == progress.state.step
            of_labels = fresh.repeat_interleave(head.group_offsets.diff(), 0)
            assert not state["exp_avg"][of_labels].any()
            assert not head.weight[of_labels].any()
            born.append({int(step) for step in head.born.unique() if step > 0})

    train(tmp_path, Rewiring(0.1, every=10, until=20, protected=0), Look(), max_epochs=3)
    assert len(born) == 36
    assert born[8] == set()
    assert born[9] == {10}
    assert 20 in born[19]
    assert born[-1] == born[19]


def test_no_rows_and_wrong_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^the test part has no rows to evaluate; give more data$"):
        task_of().evaluate([], "test", progress=False)
    for wrong, message in (
        ({"fraction": 2.0}, "fraction: expected a number in [0, 1], got 2.0"),
        ({"every": 0}, "every: expected at least 1 step, got 0"),
        ({"by": "weight"}, "by: got 'weight', expected 'random' or 'gradient'"),
    ):
        with pytest.raises(ValueError) as raised:  # noqa: PT011
            Rewiring(**{"fraction": 0.1, "every": 5, "until": 10, **wrong})
        assert str(raised.value) == message


def test_two_processes_train_as_one_does(tmp_path: Path) -> None:
    """Each has half of every batch; slots change alike, and figures are of all rows."""
    found = told_by("tests.models.multilabel_processes", tmp_path)
    assert found["changed"] >= 100
    assert all(distance < 1e-5 for distance in found["distances"].values()), found["distances"]
    assert found["distances"]["head.supports"] == found["distances"]["head.born"] == 0
    one, first, second = found["figures"]
    assert first == second
    assert first == pytest.approx(one, rel=1e-4)
