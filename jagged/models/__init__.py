"""Ranking models on KeyedJaggedTensors, the module that trains them, and the registry that builds them by name."""

from __future__ import annotations

from typing import Any

from jagged.versions import warn_of_problems

# Before torchrec is imported: versions that do not fit fail there, and not by saying why.
warn_of_problems()

from jagged.models.heads import build_head  # noqa: E402
from jagged.models.sasrec import SASRec  # noqa: E402
from jagged.models.task import TrainTask  # noqa: E402

_MODELS = {"sasrec": SASRec}

__all__ = ["SASRec", "TrainTask", "build", "build_head"]


def build(name: str, **config: Any) -> SASRec:
    """Build a model by name, as `model.json` of a run directory records it.

    Raises:
        ValueError: an unknown name; the message lists the known ones.
    """
    if name not in _MODELS:
        raise ValueError(f"model: got {name!r}, expected one of {', '.join(sorted(_MODELS))}")
    return _MODELS[name](**config)
