"""Training on TorchRec's engine, checkpoints that resume bit for bit, and the directory that a run leaves.

Everything is loaded on first use: the errors and the manifest need no torch, only training needs torchrec.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jagged.training.errors import CheckpointError as CheckpointError
    from jagged.training.errors import TrainingError as TrainingError
    from jagged.training.errors import TrainingInterrupted as TrainingInterrupted
    from jagged.training.forecast import Forecast as Forecast
    from jagged.training.runner import TrainResult as TrainResult
    from jagged.training.runner import train as train

_WHERE = {
    "CheckpointError": "errors",
    "Forecast": "forecast",
    "TrainResult": "runner",
    "TrainingError": "errors",
    "TrainingInterrupted": "errors",
    "train": "runner",
}

__all__ = ["CheckpointError", "Forecast", "TrainResult", "TrainingError", "TrainingInterrupted", "train"]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        value = getattr(importlib.import_module(f"jagged.training.{_WHERE[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'jagged.training' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
