"""A model of one's own on a table: from a csv file through splits and loaders to a trained and resumed run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

from jagged.config import TrainerConfig
from jagged.data import Dataset
from jagged.data.parts import Batch, Split
from jagged.models import Task, TaskOutput, TaskScores
from jagged.models.pretrained import load_task
from jagged.training import Callback, Progress, Trainer


class Clicks(Task):
    """Clicks from user, candidate, the mean of the history's items, and numbers; rows without a label count nothing."""

    def __init__(self, split: Split) -> None:
        super().__init__()
        rows = split.encoders.sizes
        self.features = EmbeddingBagCollection(tables=[table("user_id", rows), table("tags", rows)])
        self.items = EmbeddingBagCollection(tables=[table("item_id", rows)])
        self.seen = EmbeddingBagCollection(tables=[table("item_id", rows)])
        self.mlp = nn.Sequential(nn.Linear(4 * 8 + 2, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, batch: Batch) -> TaskOutput:
        pooled = [self.features(batch.features), self.items(batch.candidates), self.seen(batch.history)]
        x = torch.cat([*(one.values() for one in pooled), batch.numbers, batch.numbers_missing.float()], 1)
        logits, labels, mask = self.mlp(x).squeeze(1), batch.labels[:, 0], batch.label_mask[:, 0]
        each = nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        loss = (each * mask).sum() / mask.sum().clamp(min=1)
        return TaskOutput(loss, {"click": TaskScores(logits, labels, mask)})


def table(name: str, rows: dict[str, int]) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(name=name, embedding_dim=8, num_embeddings=rows[name], feature_names=[name])


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Split:
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("table") / "impressions.csv"
    lines = ["user_id;item_id;timestamp;tags;price;click"]
    for time in range(2_000):
        user, item = rng.integers(30), rng.integers(20)
        label = "" if rng.random() < 0.1 else int(item % 3 == 0)
        lines.append(f"u{user};i{item};{1_700_000_000 + time};a|t{item % 4};{'NA' if time % 7 == 0 else item / 2};{label}")
    path.write_text("\n".join(lines) + "\n")
    dataset = Dataset.from_table(path, history="events", directory=path.parent / "dataset", progress=False)
    found: Split = dataset.split(by="time", valid=0.2, test=0.2)
    return found


def loaders(split: Split, num_workers: int = 0) -> tuple[Any, Any, Any]:
    train = split.train.loader(batch_size=64, shuffle=True, max_history=10, num_workers=num_workers)
    return train, split.valid.loader(batch_size=100, max_history=10), split.test.loader(batch_size=100, max_history=10)


def trained(split: Split, output: Path, *callbacks: Callback, resume: bool = False, num_workers: int = 0) -> Any:
    torch.manual_seed(0)
    task = Clicks(split)
    config = TrainerConfig(output=str(output), max_epochs=4, learning_rate=0.02, monitor="click/auc", device="cpu")
    result = Trainer(task, config, callbacks=callbacks).fit(*loaders(split, num_workers), resume=resume, progress=False)
    return task, result


class Stop(Callback):
    def on_step(self, progress: Progress) -> None:
        if progress.state.step == 25:
            raise KeyboardInterrupt


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_of_a_loader_are_those_of_the_part(split: Split, num_workers: int) -> None:
    order = iter(range(len(split.train)))
    for batch in split.train.loader(batch_size=300, num_workers=num_workers, max_history=3):
        expected = split.train.gather([next(order) for _ in range(len(batch))], max_history=3)
        assert torch.equal(batch.rows, expected.rows)
        for name in ("features", "candidates", "history"):
            found, wanted = getattr(batch, name), getattr(expected, name)
            assert (found.keys(), found.stride()) == (wanted.keys(), wanted.stride())
            assert torch.equal(found.values(), wanted.values())
            assert torch.equal(found.lengths(), wanted.lengths())
        for name in ("numbers", "numbers_missing", "labels", "label_mask", "weights", "times", "history_times"):
            assert torch.equal(getattr(batch, name), getattr(expected, name))
    assert next(order, None) is None


def test_a_model_learns_from_a_table_and_goes_on_after_a_stop(split: Split, tmp_path: Path) -> None:
    task, result = trained(split, tmp_path / "run")
    assert result.metrics.test.click["auc"] > 0.95
    with pytest.raises(KeyboardInterrupt):
        trained(split, tmp_path / "other", Stop())
    again, resumed = trained(split, tmp_path / "other", resume=True, num_workers=2)
    assert resumed.metrics.test.click == result.metrics.test.click
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in task.state_dict().items())
    opened = load_task(tmp_path / "run", Clicks(split))
    batch = split.test.gather([0, 1, 2])
    assert torch.equal(opened.predict(batch)["click"], task.eval().predict(batch)["click"])
