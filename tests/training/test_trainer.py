"""A task of one's own from the first step to the directory: validations, monitors, callbacks, stopping, going on, opening."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from jagged.artifacts import CheckpointError
from jagged.metrics import Figures, RunMetrics
from jagged.models import Task, TaskOutput, TaskScores, register
from jagged.models.pretrained import load_task, save_task
from jagged.pointwise import PointwiseMetrics
from jagged.training import Callback, Progress, Trainer, TrainingError, TrainingInterrupted, TrainResult
from jagged.training.checkpoint import latest_checkpoint, list_checkpoints, load_checkpoint
from jagged.training.engine import Engine
from jagged.training.loop import Loop
from tests.test_docs import ROOT, blocks
from tests.training.clicks import STEPS_PER_EPOCH, Clicks, Rows, Told, config, loader, train
from tests.training.support import outcome, run, tiny_dataset

EVERY_STEP = [["step", step] for step in range(1, 2 * STEPS_PER_EPOCH + 1)]


def test_the_guide_learns_and_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = blocks(ROOT / "docs/guides/your-own-model.md", "python")[0]
    assert len(first.text.splitlines()) <= 40
    names: dict[str, Any] = {"__name__": "__page__"}
    exec(first.text, names)
    assert names["result"].metrics.test.click["auc"] > 0.9
    batch = names["collate"](list(names["rows"][3600:]))
    metrics = PointwiseMetrics()
    metrics.update(names["task"].predict(batch)["click"].logit(), batch["label"])
    assert metrics.compute()["auc"] == pytest.approx(names["result"].metrics.test.click["auc"])


def steps_told(told: Told, what: str = "validation") -> list[int]:
    return [call[1] if what != "epoch" else call[2] for call in told.calls if call[0] == what]


# What a run is made of.


@pytest.mark.parametrize(
    ("every", "validated"),
    [
        ("1 epoch", [6, 12, 18]),
        ("2 epochs", [12, 18]),
        ("5 epochs", [18]),
        ("4 steps", [4, 8, 12, 16, 18]),
        ("6 steps", [6, 12, 18]),
        ("7 steps", [7, 14, 18]),
        ("100 steps", [18]),
    ],
)
def test_when_it_is_validated(tmp_path: Path, every: str, validated: list[int]) -> None:
    told = Told()
    result = train(tmp_path, told, max_epochs=3, validate_every=every)
    assert steps_told(told) == [row["step"] for row in result.history] == validated
    assert [row["epoch"] for row in result.history] == [-(-step // STEPS_PER_EPOCH) for step in validated]
    assert steps_told(told, "epoch") == [6, 12, 18]
    assert (result.epochs, result.steps) == (3, 18)
    # A checkpoint can be read at each one that is left.
    assert load_checkpoint(list_checkpoints(tmp_path / "checkpoints")[-1])[1]["step"] == 18


def test_losses_of_the_history_are_means_over_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a run is stopped between two looks at the losses."""
    losses: list[float] = []
    original = Engine.steps

    def steps(self: Engine, batches: Iterator[Any], left: int | None = None) -> Iterator[Any]:
        for trained in original(self, batches, left):
            losses.append(float(trained.loss) * trained.rows)  # type: ignore[arg-type]
            yield trained

    monkeypatch.setattr(Engine, "steps", steps)
    result = train(tmp_path, Stop(9), max_epochs=3)
    assert [row["step"] for row in result.history] == [6, 9]
    assert result.history[0]["loss"] == pytest.approx(sum(losses[:6]) / 44, rel=1e-12)
    assert result.history[1]["loss"] == pytest.approx(sum(losses[6:]) / 24, rel=1e-12)


def test_patience_counts_validations(tmp_path: Path) -> None:
    told = Told()
    result = train(tmp_path, told, max_epochs=5, validate_every="2 steps", patience=3, monitor="click/rows")
    # The number of rows is never better than the first time.
    assert steps_told(told) == [2, 4, 6, 8]
    assert (result.steps, result.metrics.best.step) == (8, 2)  # type: ignore[union-attr]
    assert result.stopped == ""


@pytest.mark.parametrize(("goal", "chosen"), [("auto", max), ("max", max), ("min", min)])
def test_the_goal_of_a_metric(tmp_path: Path, goal: str, chosen: Any) -> None:
    result = train(tmp_path, max_epochs=4, monitor="auc", monitor_goal=goal, learning_rate=0.1)
    values = [row["valid"]["click"]["auc"] for row in result.history]
    assert len(set(values)) > 1
    assert result.best_metric == chosen(values) == [row["monitored"] for row in result.history][values.index(chosen(values))]
    assert result.metrics.valid.click["auc"] == chosen(values)


@pytest.mark.parametrize("monitor", ["loss", "all/loss", "click/logloss"])
def test_less_is_better_for_losses(tmp_path: Path, monitor: str) -> None:
    result = train(tmp_path, max_epochs=3, monitor=monitor)
    assert result.best_metric == min(row["monitored"] for row in result.history)


def test_an_ambiguous_monitor_leaves_a_checkpoint_to_go_on_from(tmp_path: Path) -> None:
    undisturbed, told, resumed = Told(), Told(), Told()
    train(tmp_path / "right", undisturbed, both=True, monitor="buy/auc")
    with pytest.raises(TrainingError) as error:
        train(tmp_path / "run", told, both=True, monitor="auc")
    checkpoint = tmp_path / "run/checkpoints/step-00000006"
    assert str(error.value) == (
        "monitor: got 'auc', expected one of click/auc, buy/auc; "
        f"the last checkpoint, {checkpoint}, is whole: resume with another monitor"
    )
    assert list_checkpoints(tmp_path / "run/checkpoints") == [checkpoint]
    assert steps_told(told, "epoch") == [6]
    train(tmp_path / "run", resumed, both=True, monitor="buy/auc", resume=True)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "right")
    assert resumed.calls == undisturbed.calls


def test_an_unknown_monitor_names_all(tmp_path: Path) -> None:
    with pytest.raises(TrainingError) as error:
        train(tmp_path, monitor="click/ndcg", validate_every="3 steps")
    assert str(error.value) == (
        "monitor: got 'click/ndcg', expected one of all/loss, click/auc, click/calibration, click/logloss, click/ne, click/rows; "
        f"the last checkpoint, {tmp_path / 'checkpoints/step-00000003'}, is whole: resume with another monitor"
    )
    # Once something was chosen by a metric, it stays.
    train(tmp_path, monitor="click/auc", validate_every="3 steps", resume=True)
    with pytest.raises(TrainingError) as error:
        train(tmp_path, monitor="loss", validate_every="3 steps", resume=True)
    newest = latest_checkpoint(tmp_path / "checkpoints")
    assert str(error.value) == (
        f"{newest}: cannot go on with other options: monitor=loss (was click/auc); give those it had, or choose another output"
    )


# Callbacks.


class Stop(Callback):
    def __init__(self, step: int, when: str = "step") -> None:
        self.step, self.when = step, when

    def on_step(self, progress: Progress) -> None:
        self._stop("step", progress)

    def on_epoch(self, progress: Progress) -> None:
        self._stop("epoch", progress)

    def on_validation(self, progress: Progress, figures: Mapping[str, Mapping[str, float]]) -> None:
        self._stop("validation", progress)

    def _stop(self, when: str, progress: Progress) -> None:
        if (when, progress.state.step) == (self.when, self.step):
            progress.stop(f"enough at {self.step}")
            progress.stop("said too late")


class Named(Callback):
    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls

    def on_step(self, progress: Progress) -> None:
        self.calls.append(f"{self.name} step {progress.state.step}")

    def on_epoch(self, progress: Progress) -> None:
        self.calls.append(f"{self.name} epoch {progress.state.epoch}")

    def on_validation(self, progress: Progress, figures: Mapping[str, Mapping[str, float]]) -> None:
        self.calls.append(f"{self.name} validation {sorted(figures)}")

    def on_stop(self, progress: Progress) -> None:
        self.calls.append(f"{self.name} stop")


def test_callbacks_come_in_order(tmp_path: Path) -> None:
    calls: list[str] = []
    train(tmp_path, Named("a", calls), Named("b", calls), max_epochs=1, validate_every="4 steps")
    each = ["step 1", "step 2", "step 3", "step 4", "validation ['all', 'click']", "step 5", "step 6", "epoch 0",
            "validation ['all', 'click']", "stop"]  # fmt: skip
    assert calls == [f"{name} {what}" for what in each for name in "ab"]


@pytest.mark.parametrize(
    ("when", "step", "epochs", "validated"),
    [
        ("step", 2, 0, [2]),
        ("step", 6, 1, [6]),
        ("step", 8, 1, [6, 8]),
        ("epoch", 6, 1, [6]),
        ("validation", 6, 1, [6]),
        ("step", 12, 2, [6, 12]),
    ],
)
def test_a_callback_ends_the_run(tmp_path: Path, when: str, step: int, epochs: int, validated: list[int]) -> None:
    told = Told()
    result = train(tmp_path, Stop(step, when), told, max_epochs=3)
    assert result.stopped == f"enough at {step}"
    assert load_checkpoint(list_checkpoints(tmp_path / "checkpoints")[-1])[1]["stopped"] == result.stopped
    assert steps_told(told) == validated
    assert [row["epoch"] for row in result.history] == [-(-at // STEPS_PER_EPOCH) for at in validated]
    assert (result.steps, result.epochs) == (step, epochs)
    assert steps_told(told, "epoch") == [6 * (epoch + 1) for epoch in range(epochs)]
    assert set(result.metrics.test) == {"all", "click"}
    assert json.loads((tmp_path / "metrics.json").read_text()) == result.metrics.to_json()
    # It has come to its end.
    again = train(tmp_path, told, max_epochs=3, resume=True)
    assert (again.steps, again.stopped, again.history) == (result.steps, result.stopped, result.history)


def test_a_stop_between_epochs_that_are_validated(tmp_path: Path) -> None:
    result = train(tmp_path, Stop(6, "epoch"), max_epochs=3, validate_every="2 epochs")
    assert [(row["epoch"], row["step"]) for row in result.history] == [(1, 6)]
    assert (result.epochs, result.stopped) == (1, "enough at 6")


def test_a_callback_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(TrainingError):
        train(tmp_path, Told(), Raises(8), checkpoint_every=1)
    newest = latest_checkpoint(tmp_path / "checkpoints")
    with pytest.raises(TrainingError) as error:
        train(tmp_path, Named("a", []), checkpoint_every=1, resume=True)
    assert str(error.value) == (
        f"{newest}: holds the state of a callback Told, found Named; resume with those it was trained with"
    )


class Raises(Callback):
    """Fails after a step, as a machine may."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, progress: Progress) -> None:
        if progress.state.step == self.step:
            raise TrainingError("the machine is gone")


class Signalled(Raises):
    def on_step(self, progress: Progress) -> None:
        if progress.state.step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


# Going on, bit for bit.


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[Any]]:
    told = Told()
    directory = tmp_path_factory.mktemp("undisturbed") / "run"
    train(directory, told)
    return outcome(directory), told.calls


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_goes_on_after_every_step(tmp_path: Path, workers: int) -> None:
    """It fails after each step in turn, the step done and not yet in a checkpoint, in one chain of runs."""
    whole, told = Told(), Told()
    train(tmp_path / "whole", whole, workers=workers, checkpoint_every=1)
    for step in range(1, 2 * STEPS_PER_EPOCH + 1):
        with pytest.raises(TrainingError, match=r"^the machine is gone$"):
            train(tmp_path / "run", Told(), Raises(step), workers=workers, checkpoint_every=1, resume=True)
        found = [path.name for path in list_checkpoints(tmp_path / "run/checkpoints")]
        assert found[-1:] == ([f"step-{step - 1:08d}"] if step > 1 else [])
    train(tmp_path / "run", told, workers=workers, checkpoint_every=1, resume=True)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")
    assert told.calls == whole.calls
    assert steps_told(told, "step") == list(range(1, 13))


@pytest.mark.parametrize("step", range(1, 2 * STEPS_PER_EPOCH + 1))
def test_a_run_goes_on_after_any_step(undisturbed: tuple[dict[str, Any], list[Any]], tmp_path: Path, step: int) -> None:
    with pytest.raises(TrainingError, match=r"^the machine is gone$"):
        train(tmp_path, Told(), Raises(step), checkpoint_every=1)
    told = Told()
    train(tmp_path, told, resume=True)
    assert (outcome(tmp_path), told.calls) == undisturbed


@pytest.mark.parametrize("every", ["1 epoch", "4 steps"])
@pytest.mark.parametrize("step", [2, 4, 6, 8, 12])
def test_a_signal_after_a_step(tmp_path: Path, step: int, every: str) -> None:
    """The step is finished, and a validation that was due is made by the run that goes on."""
    whole, told = Told(), Told()
    train(tmp_path / "whole", whole, validate_every=every)
    with pytest.raises(TrainingInterrupted):
        train(tmp_path / "run", Told(), Signalled(step), validate_every=every)
    train(tmp_path / "run", told, validate_every=every, resume=True)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")
    assert told.calls == whole.calls


def test_a_signal_in_the_validation_that_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"max_epochs": 4, "monitor": "click/rows", "patience": 1}
    whole = train(tmp_path / "whole", **options)
    original = Loop._evaluate

    def evaluate(self: Loop, *arguments: Any) -> Any:
        if self.state.step == 12:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(Loop, "_evaluate", evaluate)
        with pytest.raises(TrainingInterrupted):
            train(tmp_path / "run", **options)
    resumed = train(tmp_path / "run", resume=True, **options)
    assert (resumed.epochs, resumed.steps) == (whole.epochs, whole.steps) == (2, 12)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


def test_accumulation_goes_on(tmp_path: Path) -> None:
    """Steps of 4 and 2 batches."""
    whole, told = Told(), Told()
    assert train(tmp_path / "whole", whole, accumulate=4, validate_every="3 steps").steps == 4
    with pytest.raises(TrainingError):
        train(tmp_path / "run", Told(), Raises(4), accumulate=4, validate_every="3 steps", checkpoint_every=1)
    train(tmp_path / "run", told, accumulate=4, validate_every="3 steps", resume=True)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")
    assert told.calls == whole.calls


# Messages.


class Bare(nn.Module):
    kept = predict = None


class NoModule:
    kept = predict = evaluate = __call__ = None


@pytest.mark.parametrize(
    ("task", "found"),
    [
        (nn.Linear(1, 1), "Linear without kept, predict, evaluate"),
        (Bare(), "Bare without evaluate"),
        (NoModule(), "NoModule that is no nn.Module"),
        (Clicks, "type that is no nn.Module"),
        (None, "NoneType without kept, predict, evaluate"),
    ],
)
def test_what_is_no_task_is_refused(tmp_path: Path, task: Any, found: str) -> None:
    with pytest.raises(TypeError) as error:
        Trainer(task, config(tmp_path))
    assert str(error.value) == (
        f"task: got a {found}, expected a RankingTask; derive it from jagged.models.Task, which has all but forward"
    )


@pytest.mark.parametrize("name", ["train", "valid", "test"])
def test_batches_that_cannot_come_again_are_refused(tmp_path: Path, name: str) -> None:
    parts = {"train": loader(), "valid": loader(), "test": loader(), name: iter([1])}
    with pytest.raises(TypeError) as error:
        Trainer(Clicks(), config(tmp_path / "run")).fit(**parts)
    assert str(error.value) == (
        f"{name}: got a list_iterator, expected batches that can be iterated again and have a length: "
        "a DataLoader or a list of batches"
    )


def test_parts_that_are_missing(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"^valid: got a NoneType, expected batches"):
        Trainer(Clicks(), config(tmp_path / "run")).fit(loader(), None)
    with pytest.raises(TrainingError) as error:
        Trainer(Clicks(), config(tmp_path / "other")).fit([], loader())
    assert str(error.value) == "train: got 0 batches in the 1 processes, expected the same number in each, 1 or more"
    result = Trainer(Clicks(), config(tmp_path / "third", max_epochs=1)).fit(loader(), loader(), progress=False)
    assert result.metrics.test.to_json() == {}


# Evaluation and prediction.


def test_figures_are_those_of_one_large_batch() -> None:
    """The loss is the mean over rows that count; batches of none, whose mean may be NaN, change nothing."""
    task = Clicks(dropout=0.5)
    batches = list(loader(Rows(40)))
    for batch in batches:
        batch["weight"], batch["mask"] = torch.rand(8) * 3, torch.rand(8) < 0.6
    batches[1]["mask"] = torch.zeros(8, dtype=torch.bool)
    batches[1]["weight"][:] = float("nan")
    rows = [rows for i, rows in enumerate(batches) if i != 1]
    logits = torch.cat([task.eval()(batch).scores["click"].logits.detach() for batch in rows])
    task.train()
    labels, weights, mask = (torch.cat([batch[key] for batch in rows]) for key in ("label", "weight", "mask"))
    losses = nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    figures = task.evaluate(batches, "valid", progress=False)
    assert figures["all"]["loss"] == pytest.approx(float((losses * weights)[mask].sum() / weights[mask].sum()), rel=1e-6)
    assert figures.click["rows"] == int(mask.sum())
    metrics = PointwiseMetrics()
    metrics.update(logits, labels, mask, weights)
    assert figures.click.to_json() == pytest.approx(metrics.compute())
    assert all(module.training for module in task.modules())


class Sliced(Clicks):
    """Says whose rows they are, of which request, and on which of three devices; cut-offs of its own."""

    def forward(self, batch: Mapping[str, Any]) -> TaskOutput:
        loss, scores = super().forward(batch)
        users, items = batch["features"].values().view(2, -1)
        ids = {"users": users % 3, "requests": users % 4, "slices": {"device": items % 3}}
        return TaskOutput(loss, {name: dataclasses.replace(of, **ids) for name, of in scores.items()})

    def metrics_of(self, name: str) -> PointwiseMetrics:
        return PointwiseMetrics(name, ks=(2,), training_mean=0.25, max_slices=2)


def test_figures_by_user_request_and_slice() -> None:
    batches = list(loader(Rows(40)))
    task = Sliced(both=True)
    figures = task.evaluate(batches, "valid", progress=False)
    names = [
        "auc",
        "gauc",
        "gauc_left_out",
        "calibration",
        "logloss",
        "ne",
        "ne_of_training",
        "ndcg@2",
        "mrr",
        "hit_rate@2",
        "rows",
    ]
    slices = [name for name in figures if "[" in name]
    assert list(figures)[:3] == ["all", "click", "buy"]
    assert len(slices) == 4
    assert [name.partition("[")[0] for name in slices] == ["click", "click", "buy", "buy"]
    assert [*figures.click] == [*figures.buy] == [*names, "values_left_out[device]"]
    assert figures.click["values_left_out[device]"] == 1.0
    for name in slices:
        assert [*figures[name]] == names
        value = int(name.partition("=")[2].removesuffix("]"))
        metrics = PointwiseMetrics(ks=(2,), training_mean=0.25)
        for batch in batches:
            of = task.eval()(batch).scores[name.partition("[")[0]]
            assert of.users is not None
            assert of.requests is not None
            assert of.slices is not None
            metrics.update(of.logits, of.labels, of.slices["device"] == value, users=of.users, requests=of.requests)
        assert figures[name] == metrics.compute()
    # Figures without ids are as they were.
    plain = Clicks(both=True)
    plain.load_state_dict(task.state_dict())
    without = plain.evaluate(batches, "valid", progress=False)
    assert list(without) == ["all", "click", "buy"]
    assert without.click == {name: figures.click[name] for name in ("auc", "calibration", "logloss", "ne", "rows")}


def test_drawn_negatives_withhold_in_slices_too() -> None:
    class Drawn:
        sampled = True

        def to(self, *_: Any, **__: Any) -> Drawn:
            return self

    figures = Sliced().evaluate([{**batch, "drawn": Drawn()} for batch in loader(Rows(40))], "valid", progress=False)
    kept = ["auc", "gauc", "gauc_left_out", "logloss", "ndcg@2", "mrr", "hit_rate@2", "rows"]
    slices = [name for name in figures if "[" in name]
    assert [name.partition("[")[0] for name in slices] == ["sampled_click"] * 2
    assert all([*figures[name]] == kept for name in slices)
    with pytest.raises(KeyError, match="ne and calibration are withheld"):
        figures[slices[0]]["ne_of_training"]


def test_slices_in_a_run(tmp_path: Path) -> None:
    """A short name is of all rows; a slice is monitored by its whole name. What was read is what was written."""
    torch.manual_seed(0)
    parts = loader(), loader(Rows(30, 1)), loader(Rows(30, 2))
    slice_name = next(name for name in Sliced().evaluate(parts[1], "valid", progress=False) if "[" in name)
    for monitor, group in (("ndcg@2", "click"), (f"{slice_name}/ndcg@2", slice_name)):
        trainer = Trainer(Sliced(), config(tmp_path / group, monitor=monitor))
        result = trainer.fit(*parts, progress=False)
        assert result.metrics.best is not None
        assert result.metrics.best.group == group
        assert result.best_metric == result.metrics.valid[group]["ndcg@2"]
        written = json.loads((tmp_path / group / "metrics.json").read_text())
        assert RunMetrics.from_json(written) == result.metrics
        assert Figures(written["test"]) == result.metrics.test


def nobody(rows: Rows) -> Rows:
    rows.labels = torch.zeros_like(rows.labels)
    return rows


def test_a_monitor_that_is_not_defined_is_refused(tmp_path: Path) -> None:
    parts, told = (loader(), loader(nobody(Rows(30, 1)))), Told()
    with pytest.raises(TrainingError) as error:
        Trainer(Clicks(), config(tmp_path / "run", monitor="auc"), callbacks=[Told()]).fit(*parts, progress=False)
    assert str(error.value) == (
        "monitor: click/auc is not defined for the validation part, as an AUC is not where all labels are alike; "
        f"give a part for which it is; the last checkpoint, {tmp_path / 'run/checkpoints/step-00000006'}, is whole: "
        "resume with another monitor"
    )
    # By another one the run goes on, and writes null for what is not defined.
    trainer = Trainer(Clicks(), config(tmp_path / "run", monitor="logloss", tensorboard=True), callbacks=[told])
    result = trainer.fit(*parts, resume=True, progress=False)
    # A callback that keeps such a figure is in a checkpoint as well.
    assert math.isnan(told.calls[-1][2])
    assert latest_checkpoint(tmp_path / "run/checkpoints") is not None
    [[_, kept]] = load_checkpoint(latest_checkpoint(tmp_path / "run/checkpoints"))[1]["callbacks"]  # type: ignore[arg-type]
    assert kept["calls"][-1] == ["validation", 12, None]
    assert math.isnan(result.metrics.valid.click["auc"])
    assert math.isnan(result.history[0]["valid"]["click"]["auc"])
    rows = [json.loads(line) for line in (tmp_path / "run/history.jsonl").read_text().splitlines()]
    assert [row["valid"]["click"]["auc"] for row in rows] == [None, None]
    content = json.loads((tmp_path / "run/metrics.json").read_text())
    assert content["valid"]["click"]["ne"] is None
    assert RunMetrics.from_json(content) == result.metrics


@pytest.mark.parametrize("name", ["click[device=3]", "a[]"])
def test_a_task_that_has_the_name_of_a_slice(name: str) -> None:
    class Named(Clicks):
        def forward(self, batch: Mapping[str, Any]) -> TaskOutput:
            loss, scores = super().forward(batch)
            return TaskOutput(loss, {name: scores["click"]})

    with pytest.raises(ValueError, match=r"^task: got the name ") as error:
        Named().evaluate(loader(), "valid", progress=False)
    assert str(error.value) == f"task: got the name {name!r}, expected another: so ends the name of a slice's figures"


def test_nothing_to_evaluate() -> None:
    with pytest.raises(ValueError, match=r"^the valid part has no rows with a label to evaluate; give more data$"):
        Clicks().evaluate([], "valid")


def test_predictions_are_probabilities_without_dropout() -> None:
    task = Clicks(dropout=0.9, both=True)
    batch = next(iter(loader()))
    found = task.predict(batch)
    assert not found["click"].requires_grad
    assert task.training
    torch.testing.assert_close(found["click"], task.eval()(batch).scores["click"].logits.sigmoid().detach())
    torch.testing.assert_close(found["buy"], 1 - found["click"])


@pytest.mark.parametrize(
    ("mask", "weights", "rows"),
    [
        (None, None, 3),
        ([True, False, True], None, 2),
        (None, [1.0, 2.0, 4.0], 7.0),
        ([True, False, True], [1.0, 2.0, 4.0], 5.0),
        ([True, False, True], [1.0, float("nan"), 4.0], 5.0),
    ],
)
def test_rows_of_scores(mask: Any, weights: Any, rows: float) -> None:
    made = [None if given is None else torch.tensor(given) for given in (mask, weights)]
    scores = TaskScores(torch.zeros(3), torch.zeros(3), *made)
    assert TaskOutput(torch.tensor(0.0), {"a": scores, "b": TaskScores(torch.zeros(9), torch.zeros(9))}).rows() == rows


# The directory.


class Registered(Task):
    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.config = {"width": width}
        self.line = nn.Linear(width, 1)
        self.register_buffer("seen", torch.tensor(3))


class Tied(Task):
    """Two names of one weight, and a `config` that is nothing to be written."""

    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.config = object()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.second.weight = self.first.weight


def equal(a: nn.Module, b: nn.Module) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_a_task_comes_back(tmp_path: Path) -> None:
    for number, make in enumerate((Clicks, Registered, Tied)):
        task = make()
        save_task(task, tmp_path / str(number))
        other = make()
        opened = load_task(tmp_path / str(number), other)
        assert opened is other
        assert not opened.training
        assert equal(opened, task)


def test_a_registered_task_is_built_by_name(tmp_path: Path) -> None:
    register("tests.registered", Registered)
    task = Registered(width=5)
    save_task(task, tmp_path)
    opened = load_task(tmp_path)
    assert type(opened) is Registered
    assert opened.config == {"width": 5}
    assert equal(opened, task)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    save_task(Tied(), tmp_path / "tied")
    with pytest.raises(CheckpointError) as error:
        load_task(tmp_path / "tied")
    assert str(error.value) == (
        f"{tmp_path}/tied/model.json: expected a registered model's name and arguments; give load_task the task"
    )
    with pytest.raises(CheckpointError) as error:
        load_task(tmp_path / "tied", Clicks())
    assert str(error.value) == (
        f"{tmp_path}/tied/model.safetensors: first.bias: found F32 [2], expected none by Clicks; copy it again"
    )
    with pytest.raises(CheckpointError) as error:
        load_task(tmp_path / "tied", Tied(3))
    assert str(error.value) == (
        f"{tmp_path}/tied/model.safetensors: first.bias: found F32 [2], expected F32 [3] by Tied; copy it again"
    )
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError) as error:
        load_task(tmp_path / "empty", Tied())
    assert str(error.value) == (
        f"{tmp_path}/empty/manifest.json: missing: the directory was not written to its end, or is none of this library's"
    )


@pytest.mark.parametrize("file", ["model.safetensors", "model.json", "manifest.json"])
def test_a_damaged_file_is_named(tmp_path: Path, file: str) -> None:
    save_task(Tied(), tmp_path)
    content = bytearray((tmp_path / file).read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / file).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"^{re.escape(str(tmp_path / file))}: "):
        load_task(tmp_path, Tied())


def test_a_run_is_opened(tmp_path: Path) -> None:
    result = train(tmp_path, max_epochs=1)
    task = load_task(tmp_path, Clicks())
    figures = task.evaluate(loader(Rows(30, 2)), "test", progress=False)
    assert figures.to_json() == result.metrics.test.to_json()
    listed = set(json.loads((tmp_path / "manifest.json").read_text())["files"])
    assert listed == {"model.safetensors", "model.json", "config.json", "metrics.json", "history.jsonl"}


def test_weights_that_are_one_are_trained_and_kept(tmp_path: Path) -> None:
    class Twice(Tied):
        def forward(self, batch: Tensor) -> TaskOutput:
            logits = self.second(self.first(batch)).sum(1)
            labels = (batch[:, 0] > 0).float()
            loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
            return TaskOutput(loss, {"click": TaskScores(logits, labels)})

    batches = list(torch.randn(6, 8, 2, generator=torch.Generator().manual_seed(0)))
    Trainer(Twice(), config(tmp_path, max_epochs=1)).fit(batches, batches, progress=False)
    opened = load_task(tmp_path, Twice())
    assert opened.second.weight is opened.first.weight


# Validations of some users.


def test_a_validation_of_some_users_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from jagged.runs.training import train as train_sasrec
    from tests.training.support import tiny_config

    def lines(name: str, **options: Any) -> tuple[list[str], TrainResult]:
        result = train_sasrec(tiny_config(tmp_path / name, max_epochs=1, **options), tiny_dataset())
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch ")], result

    told, result = lines("some", validate_users=7)
    assert re.fullmatch(
        r"epoch 1: loss \d\.\d{4}, validation ndcg@10 \d\.\d{4} \(seen items left in of 7 of 40 users\), the best so far", told[0]
    )
    again, _ = lines("again", validate_users=7)
    assert again == told
    assert outcome(tmp_path / "again") == outcome(tmp_path / "some")
    all_of_them, _ = lines("all", validate_users=40)
    assert re.search(r"\(seen items left in\), the best so far$", all_of_them[0])
    assert result.metrics.valid.to_json() != run(tmp_path / "whole", tiny_dataset(), max_epochs=1).metrics.valid.to_json()
