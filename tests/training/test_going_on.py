"""A run goes on by its directory alone."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from jagged.config import SECTIONS, ConfigError, ModelOptions, TrainConfig, option
from jagged.data import SequenceDataset, split_leave_one_out
from jagged.models import SASRec, register
from jagged.models.pretrained import from_pretrained
from jagged.runs.recommending import Recommender
from jagged.runs.training import train
from jagged.training import TrainingError, TrainingInterrupted
from tests.training.support import STEPS_PER_EPOCH, at_step, cut_off, kill_self, outcome, run, tiny_config, tiny_dataset


@pytest.fixture(scope="module")
def dataset() -> SequenceDataset:
    return tiny_dataset()


def test_a_stopped_run_needs_neither_options_nor_data(
    dataset: SequenceDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path / "whole", dataset, head="sampled", num_negatives=5)
    with monkeypatch.context() as patch:
        at_step(patch, 7, kill_self(signal.SIGTERM))
        with pytest.raises(TrainingInterrupted):
            run(tmp_path / "stopped", dataset, head="sampled", num_negatives=5)
    # The directory may be moved.
    (tmp_path / "stopped").rename(tmp_path / "moved")
    result = train(resume=tmp_path / "moved", progress=False)
    assert (result.directory, result.steps) == (tmp_path / "moved", 3 * STEPS_PER_EPOCH)
    assert outcome(tmp_path / "moved") == outcome(tmp_path / "whole")
    # What may change is given beside it.
    longer = TrainConfig.load(tmp_path / "moved" / "config.json", {"training.max_epochs": 4})
    assert train(longer, resume=str(tmp_path / "moved"), progress=False).epochs == 4


def test_a_run_that_has_no_checkpoint_yet_starts_as_it_was_told(dataset: SequenceDataset, tmp_path: Path) -> None:
    cut_off(2, lambda: run(tmp_path / "run", dataset, seed=3))
    assert not (tmp_path / "run" / "manifest.json").exists()
    train(resume=tmp_path / "run", progress=False)
    run(tmp_path / "whole", dataset, seed=3)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


def test_a_refused_change_leaves_the_configuration(dataset: SequenceDataset, tmp_path: Path) -> None:
    run(tmp_path, dataset, max_epochs=1)
    before = (tmp_path / "config.json").read_bytes()
    with pytest.raises(TrainingError) as error:
        run(tmp_path, dataset, resume=True, max_epochs=2, head="scalable", batch_size=4)
    assert str(error.value) == (
        f"{tmp_path}/checkpoints/step-{STEPS_PER_EPOCH:08d}: cannot go on with other options: head.type=scalable "
        "(was cross-entropy), training.batch_size=4 (was 8); give those it had, or choose another output"
    )
    assert (tmp_path / "config.json").read_bytes() == before


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        train(resume=tmp_path)
    assert str(error.value) == f"resume: {tmp_path} holds no run; to start one there give its configuration, too"
    with pytest.raises(ConfigError) as error:
        train(tiny_config(tmp_path / "a"), resume=tmp_path / "b")
    assert str(error.value) == f"resume: got {tmp_path}/b, expected config.output ({tmp_path}/a)"


class _SmallOptions(ModelOptions):
    name: Literal["small"] = option("small", "the model to train")
    width: int = option(8, "width of everything", ge=1)


class _Small(SASRec):
    def __init__(self, num_items: int, *, max_seq_len: int, width: int, device: Any = None) -> None:
        super().__init__(num_items, embedding_dim=width, num_heads=1, num_layers=1, max_seq_len=max_seq_len, device=device)
        self.config = {"num_items": num_items, "max_seq_len": max_seq_len, "width": width}


def test_a_registered_model_is_trained_with_its_own_options(
    dataset: SequenceDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import jagged.models

    monkeypatch.setitem(SECTIONS, "model", [*SECTIONS["model"]])
    monkeypatch.setattr(jagged.models, "_MODELS", dict(jagged.models._MODELS))
    register("small", _Small, _SmallOptions)
    training = {"max_epochs": 1, "tensorboard": False}
    config = TrainConfig(output=tmp_path, device="cpu", model={"name": "small", "width": 4}, training=training)
    train(config, dataset, progress=False)
    assert json.loads((tmp_path / "config.json").read_text())["model"] == {"name": "small", "width": 4}
    opened = from_pretrained(tmp_path)
    assert type(opened.model) is _Small
    assert opened.model.item_weight.shape == (split_leave_one_out(dataset).train.num_items, 4)
    # What recommends from it is written down by that name, too.
    Recommender.from_pretrained(tmp_path).save_pretrained(tmp_path / "copy")
    copied = from_pretrained(tmp_path / "copy").model
    assert type(copied) is _Small
    assert torch.equal(copied.item_weight, opened.model.item_weight)
