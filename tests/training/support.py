"""A tiny data set and run that the tests of training share."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jagged.config import TrainConfig, leaves, merge, nested
from jagged.data import SequenceDataset, synthetic_sessions
from jagged.runs.training import train
from jagged.training import TrainResult
from jagged.training.engine import Engine, Trained

# 40 users in batches of 8: 5 steps an epoch, about 10 ms a step.
TINY: dict[str, Any] = {
    "embedding_dim": 8,
    "num_layers": 1,
    "dropout": 0.2,
    "batch_size": 8,
    "max_epochs": 3,
    "checkpoint_seconds": 0.0,
    "tensorboard": False,
    "device": "cpu",
    "max_seq_len": 12,
}
STEPS_PER_EPOCH = 5


def tiny_dataset(seed: int = 0) -> SequenceDataset:
    return synthetic_sessions(seed, num_users=40, num_items=96, mean_length=8)[0]


def flat_config(**options: Any) -> TrainConfig:
    """A configuration from options by their plain names: `head`, `sampled_loss`, `dropout`."""
    return TrainConfig(**_sections(options))


def tiny_config(output: Path | str, **options: Any) -> TrainConfig:
    return TrainConfig(**merge(_sections(TINY), _sections({"output": str(output), **options})))


def _sections(options: dict[str, Any]) -> dict[str, Any]:
    names = {name.rpartition(".")[2]: name for name in leaves()} | {"sampled_loss": "head.loss"}
    return nested({names.get(name, name): value for name, value in options.items()})


def run(output: Path | str, dataset: SequenceDataset, *, resume: bool = False, **options: Any) -> TrainResult:
    return train(tiny_config(output, **options), dataset, resume=resume, progress=False)


def outcome(directory: Path | str) -> dict[str, Any]:
    """What a finished run must agree in with another one: everything but times and where it lies."""
    directory = Path(directory)
    history = [json.loads(line) for line in (directory / "history.jsonl").read_text().splitlines()]
    return {
        "weights": hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest(),
        "metrics": json.loads((directory / "metrics.json").read_text()),
        "history": [{name: value for name, value in row.items() if "second" not in name} for row in history],
    }


def at_step(monkeypatch: pytest.MonkeyPatch, step: int, action: Any) -> None:
    """Let `action(engine)` happen between the given step (from 1, of this process) and the bookkeeping for it."""
    original = Engine.steps
    taken = 0

    def steps(self: Engine, batches: Iterator[Any], left: int | None = None) -> Iterator[Trained]:
        nonlocal taken
        for result in original(self, batches, left):
            taken += 1
            if taken == step:
                action(self)
            yield result

    monkeypatch.setattr(Engine, "steps", steps)


def cut_off(step: int, start: Callable[[], Any]) -> None:
    """Start what trains, and end it at a step by an error, as a power cut does."""

    def fail(_: Any) -> None:
        raise KeyError("power cut")

    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, step, fail)
        with pytest.raises(KeyError, match="power cut"):
            start()


def kill_self(number: int) -> Any:
    return lambda _: os.kill(os.getpid(), number)
