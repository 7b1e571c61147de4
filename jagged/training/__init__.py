"""Training on TorchRec's engine, checkpoints that resume bit for bit, and the directory that a run leaves.

Everything is loaded on first use: the errors and the manifest need no torch, only training needs torchrec. The run from a
configuration is `jagged.train`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jagged.training.callbacks import Callback as Callback
    from jagged.training.callbacks import Progress as Progress
    from jagged.training.errors import CheckpointError as CheckpointError
    from jagged.training.errors import TrainingError as TrainingError
    from jagged.training.errors import TrainingInterrupted as TrainingInterrupted
    from jagged.training.forecast import Forecast as Forecast
    from jagged.training.rewiring import Rewiring as Rewiring
    from jagged.training.trainer import Trainer as Trainer
    from jagged.training.trainer import TrainResult as TrainResult

_WHERE = {
    "Callback": "callbacks",
    "CheckpointError": "errors",
    "Forecast": "forecast",
    "Progress": "callbacks",
    "Rewiring": "rewiring",
    "TrainResult": "trainer",
    "Trainer": "trainer",
    "TrainingError": "errors",
    "TrainingInterrupted": "errors",
}

__all__ = list(_WHERE)


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        value = getattr(importlib.import_module(f"jagged.training.{_WHERE[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'jagged.training' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
