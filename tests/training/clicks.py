"""A small task of one's own, its data and a callback with a state, which tests of the trainer share."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from jagged.config import TrainerConfig
from jagged.models import Task, TaskOutput, TaskScores
from jagged.training import Callback, Progress, Trainer, TrainResult

ROWS, BATCH = 44, 8
STEPS_PER_EPOCH = 6


class Clicks(Task):
    """Clicks from two features that are looked up in tables; two tasks where `both`."""

    def __init__(self, dropout: float = 0.0, both: bool = False) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=key, embedding_dim=4, num_embeddings=20, feature_names=[key]) for key in ("user", "item")
        ]
        self.tables = EmbeddingBagCollection(tables=tables)
        self.mlp = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Dropout(dropout), nn.Linear(6, 1))
        self.both = both

    def forward(self, batch: Mapping[str, Any]) -> TaskOutput:
        logits = self.mlp(self.tables(batch["features"]).values()).squeeze(1)
        labels, mask, weights = batch["label"], batch.get("mask"), batch.get("weight")
        each = nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        scores = TaskScores(logits, labels, mask, weights)
        counted = torch.ones_like(each) if weights is None else weights
        counted = counted if mask is None else counted * mask
        loss = (each * counted).sum() / counted.sum().clamp(min=1e-12)
        return TaskOutput(loss, {"click": scores, **({"buy": TaskScores(-logits, labels)} if self.both else {})})


class Rows(Dataset[Any]):
    """Rows whose label follows from user and item; some noise is drawn when a row is read, as an augmentation would."""

    def __init__(self, count: int = ROWS, seed: int = 0, noise: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.users, self.items = torch.randint(20, (2, count), generator=generator)
        self.labels = ((self.users + self.items) % 3 == 0).float()
        self.noise = noise

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor, Tensor]:
        item = self.items[row]
        if self.noise:
            item = torch.where(torch.rand(()) < self.noise, torch.randint(20, ()), item)
        return self.users[row], item, self.labels[row]


def collate(rows: Any) -> dict[str, Any]:
    users, items, labels = (torch.stack(column) for column in zip(*rows, strict=True))
    lengths = torch.ones(2 * len(rows), dtype=torch.int64)
    features = KeyedJaggedTensor(keys=["user", "item"], values=torch.cat([users, items]), lengths=lengths)
    return {"features": features, "label": labels}


def loader(rows: Rows | None = None, *, shuffle: bool = False, **options: Any) -> DataLoader[Any]:
    return DataLoader(rows or Rows(), batch_size=BATCH, shuffle=shuffle, collate_fn=collate, **options)


def config(output: Path | str, **options: Any) -> TrainerConfig:
    common = {"max_epochs": 2, "checkpoint_seconds": 0.0, "device": "cpu", "tensorboard": False, "learning_rate": 0.01}
    return TrainerConfig(**{**common, "output": str(output), **options})


class Told(Callback):
    """Keeps, as its state, every call that it got."""

    def __init__(self) -> None:
        self.calls: list[list[Any]] = []

    def on_step(self, progress: Progress) -> None:
        self.calls.append(["step", progress.state.step])

    def on_epoch(self, progress: Progress) -> None:
        self.calls.append(["epoch", progress.state.epoch + 1, progress.state.step])

    def on_validation(self, progress: Progress, figures: Mapping[str, Mapping[str, float]]) -> None:
        self.calls.append(["validation", progress.state.step, figures["click"]["auc"]])

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.calls = [list(call) for call in state["calls"]]


def train(
    output: Path | str,
    *callbacks: Callback,
    resume: bool = False,
    workers: int = 0,
    both: bool = False,
    noise: float = 0.2,
    **options: Any,
) -> TrainResult:
    """A run on rows that are shuffled and augmented, of a task with dropout; each process has rows of its own."""
    torch.manual_seed(1)
    task = Clicks(dropout=0.3, both=both)
    own = 10 * (dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0")))
    rows = Rows(seed=own, noise=noise), Rows(30, own + 1), Rows(30, own + 2)
    parts = loader(rows[0], shuffle=True, num_workers=workers), loader(rows[1]), loader(rows[2])
    trainer = Trainer(task, config(output, **options), callbacks=callbacks)
    return trainer.fit(*parts, resume=resume, progress=False)
