"""Runs on rows with sets of labels, and SASRec with an output layer, on a GPU: what they learn is what they learn on a CPU."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import jagged
from jagged.data import LabelBatch, synthetic_labels
from jagged.data.moving import moved
from jagged.models import MultiLabelModel
from jagged.runs import Run
from jagged.runs.labels import LabelRun
from jagged.training import TrainingInterrupted
from tests.runs.test_label_runs import ROWS, TEST, config_of
from tests.training.support import at_step, kill_self, outcome, run, tiny_dataset

pytestmark = pytest.mark.gpu

OUTPUT: dict[str, Any] = {
    "head": "group-sparse", "fan_in": 4, "group_size": 8, "rewire_every": 2, "rewire_until": 1.0, "dropout": 0.0, "max_epochs": 2,
}  # fmt: skip


@pytest.mark.parametrize("loss", ["bce", "softmax"])
def test_a_run_on_the_gpu_is_one_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: str) -> None:
    of_rows = MultiLabelModel.of

    def same_at_first(rows: Any, *, device: Any = None, **options: Any) -> MultiLabelModel:
        """Weights are drawn where a model is made, and each device draws others."""
        return of_rows(rows, device="cpu", **options).to(device)

    monkeypatch.setattr(MultiLabelModel, "of", same_at_first)
    losses, best = {}, {}
    # Of groups by features sums in another order may make others.
    head = {"loss": loss, "grouping": "frequency"}
    for name, device, precision in (("cpu", "cpu", "32-true"), ("gpu", "cuda", "32-true"), ("mixed", "cuda", "bf16-mixed")):
        config = config_of(tmp_path / name, head=head, device=device, precision=precision)
        losses[name] = [row["loss"] for row in jagged.train(config, (ROWS, TEST), progress=False).history]
        opened = [LabelRun.open(tmp_path / name, device=where) for where in ("cpu", "cuda")]
        found = [of.predict(TEST, k=5, progress=False) for of in opened]
        likely = [of["probability"].to_numpy() for of in found]
        np.testing.assert_allclose(likely[0], likely[1], atol=1e-4)
        best[name] = likely[0]
    assert losses["gpu"] == pytest.approx(losses["cpu"], rel=1e-2)
    assert losses["mixed"] == pytest.approx(losses["cpu"], rel=3e-2)
    assert float(np.abs(best["gpu"] - best["cpu"]).mean()) < 0.02


def test_a_run_on_the_gpu_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = jagged.train(config_of(tmp_path / "whole", device="cuda"), (ROWS, TEST), progress=False)
    with monkeypatch.context() as patch:
        at_step(patch, 9, kill_self(signal.SIGTERM))
        with pytest.raises(TrainingInterrupted):
            jagged.train(config_of(tmp_path / "stopped", device="cuda"), (ROWS, TEST), progress=False)
    again = jagged.train(config_of(tmp_path / "stopped", device="cuda"), (ROWS, TEST), resume=True, progress=False)
    assert [row["loss"] for row in again.history] == pytest.approx([row["loss"] for row in whole.history], rel=1e-3)


@pytest.mark.parametrize("loss", ["bce", "softmax"])
def test_gradients_are_those_of_the_cpu(loss: Any) -> None:
    rows, _, _ = synthetic_labels(num_rows=60, num_test_rows=1, num_labels=80, num_features=100, num_groups=8)
    model = MultiLabelModel.of(rows, embedding_dim=16, fan_in=4, group_size=4, grouping="random", dense_share=0.1, loss=loss)
    model(LabelBatch.of(rows)).loss.backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert len(expected) == len(list(model.parameters()))
    model.zero_grad()
    model.cuda()
    # A batch of its own: a KeyedJaggedTensor that was read keeps its parts where they were.
    model(moved(LabelBatch.of(rows), torch.device("cuda"))).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad.cpu(), expected[name], atol=1e-4, rtol=1e-3)


def test_an_output_layer_on_the_gpu_is_one_on_the_cpu(tmp_path: Path) -> None:
    dataset = tiny_dataset()
    losses = {}
    for name, device, precision in (("cpu", "cpu", "32-true"), ("gpu", "cuda", "32-true"), ("mixed", "cuda", "bf16-mixed")):
        result = run(tmp_path / name, dataset, device=device, precision=precision, **OUTPUT)
        losses[name] = [row["loss"] for row in result.history]
    assert losses["gpu"] == pytest.approx(losses["cpu"], rel=1e-3)
    assert losses["mixed"] == pytest.approx(losses["cpu"], rel=2e-2)
    opened = [Run.open(tmp_path / "gpu", device=device).model for device in ("cpu", "cuda")]
    torch.testing.assert_close(opened[0].item_weight, opened[1].item_weight.cpu())
    figures = [outcome(tmp_path / name)["metrics"]["test"]["all_items"]["ndcg@10"] for name in ("cpu", "gpu")]
    assert figures[0] == pytest.approx(figures[1], abs=0.05)
