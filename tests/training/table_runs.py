"""A tiny table and runs of a ranking model on it, which tests of kills, damage and full disks share."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jagged.config import RankingConfig, merge
from jagged.data import Dataset
from jagged.runs.training import train
from jagged.training import TrainResult
from tests.models.shops import rows
from tests.training.support import outcome

# 7 steps an epoch, about 10 ms a step.
STEPS_PER_EPOCH = 7
NAMES = ("request", "user", "item", "time", "weight", "type", "age", "price", "tags", "click", "buy")
WORDS = {
    "label": ("click", "buy"), "candidate": "item", "user": "user", "time": "time", "request": "request", "weight": "weight",
    "ids": ("type", "tags"), "numbers": ("age", "price"), "candidate_columns": "price", "event_labels": "click",
}  # fmt: skip


# Of a table without labels, beside whose rows items are drawn.
DRAWN = {
    "label": (), "negatives": 3, "request": None, "weight": None, "ids": ("type",), "numbers": ("price",), "event_labels": (),
    "request_columns": ("type",),
}  # fmt: skip


def shop_file(path: Path, seed: int = 0, names: Sequence[str] = NAMES) -> Path:
    """A csv file of 60 requests, written by no library that starts threads."""
    found = rows(seed)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        for values in zip(*(found[name] for name in names), strict=True):
            writer.writerow("|".join(value) if isinstance(value, list) else value for value in values)
    return path


def table_config(output: Path, table: Path, **options: Any) -> RankingConfig:
    """Histories of the table's own earlier rows, two tasks, dropout; options by section: `training={"num_workers": 2}`."""
    model = {"name": "ranking", "embedding_dim": 4, "layer_sizes": (8, 4), "dropout": 0.2, "num_time_buckets": 4}
    training = {"batch_size": 8, "max_epochs": 3, "checkpoint_seconds": 0.0, "tensorboard": False, "patience": 9}
    tiny = {"output": str(output), "device": "cpu", "data": {"path": str(table), **WORDS}, "model": model, "training": training}
    return RankingConfig(**merge(tiny, options))


def train_table(output: Path, table: Path, *, resume: bool = False, **options: Any) -> TrainResult:
    return train(table_config(output, table, **options), resume=resume, progress=False)


def table_outcome(directory: Path) -> dict[str, Any]:
    """As `outcome`, and which data the run keeps."""
    return outcome(directory) | {"data": Dataset.load(directory / "dataset").fingerprint}
