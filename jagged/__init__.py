"""Ranking models on TorchRec's KeyedJaggedTensor that never pad.

Everything is loaded on first use, so that ``import jagged`` and ``jagged --help`` cost nothing and need neither triton nor
torchrec.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from jagged.config import MultiLabelConfig as MultiLabelConfig
    from jagged.config import RankingConfig as RankingConfig
    from jagged.config import TrainConfig as TrainConfig
    from jagged.diagnosis import doctor as doctor
    from jagged.runs.evaluating import evaluate as evaluate
    from jagged.runs.exporting import export as export
    from jagged.runs.predicting import predict as predict
    from jagged.runs.ranking.predicting import Ranker as Ranker
    from jagged.runs.recommending import Recommender as Recommender
    from jagged.runs.recommending import recommend as recommend
    from jagged.runs.reporting import report as report
    from jagged.runs.training import train as train
    from jagged.tuning import tune as tune

_WHERE = {
    "MultiLabelConfig": "jagged.config",
    "Ranker": "jagged.runs.ranking.predicting",
    "RankingConfig": "jagged.config",
    "TrainConfig": "jagged.config",
    "Recommender": "jagged.runs.recommending",
    "doctor": "jagged.diagnosis",
    "evaluate": "jagged.runs.evaluating",
    "export": "jagged.runs.exporting",
    "predict": "jagged.runs.predicting",
    "recommend": "jagged.runs.recommending",
    "report": "jagged.runs.reporting",
    "train": "jagged.runs.training",
    "tune": "jagged.tuning",
}
_SUBPACKAGES = ("data", "models", "modules", "ops", "runs", "training")

__all__ = [
    "MultiLabelConfig",
    "Ranker",
    "RankingConfig",
    "Recommender",
    "TrainConfig",
    "doctor",
    "evaluate",
    "export",
    "predict",
    "recommend",
    "report",
    "train",
    "tune",
]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        value = getattr(importlib.import_module(_WHERE[name]), name)
        globals()[name] = value
        return value
    if name in _SUBPACKAGES:
        return importlib.import_module(f"jagged.{name}")
    raise AttributeError(f"module 'jagged' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_SUBPACKAGES, "__version__"])
