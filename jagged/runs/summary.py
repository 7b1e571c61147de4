"""What `jagged train` says at its end: what was read, what was reached, where it lies, and what to do next."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from jagged.artifacts import CheckpointError, errors_as, read_json
from jagged.config import TrainConfig
from jagged.metrics import IN_WORDS, RunMetrics
from jagged.models.pretrained import CONFIG, METRICS, SPLIT


def summary_lines(directory: str | os.PathLike[str]) -> list[str]:
    """Sum up a run that was trained to its end, in lines to print. Reads small files alone, neither model nor events.

    Args:
        directory: the run's directory.

    Raises:
        CheckpointError: the directory holds no finished run.
        ConfigError: its configuration cannot be read.
    """
    path = Path(directory)
    with errors_as(CheckpointError):
        split, metrics = read_json(path / SPLIT), RunMetrics.from_json(read_json(path / METRICS))
    source = TrainConfig.load(path / CONFIG).data.path or "the built-in sample"
    reached = ", ".join(f"{group[metrics.monitor]:.4f} with {IN_WORDS[name]}" for name, group in metrics.test.items())
    best, name = metrics.best, shlex.quote(str(path))
    assert best is not None
    return [
        f"read     {split['users']:,} users, {split['items']:,} items, {split['events']:,} events from {source}",
        f"reached  test {metrics.monitor} {reached}; {split['name']}, {split['test']:,} users, all items ranked for each",
        f"kept     {path}: weights of epoch {best.epoch}, validation {metrics.monitor} {best.value:.4f} "
        f"with {IN_WORDS[best.group]}",
        f"next     jagged evaluate {name}",
        f"         jagged recommend {name} histories.csv",
    ]
