"""The ranking model with experts that its tasks share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

from jagged.models.features import RankingInputs
from jagged.models.ranking import RankingModel


class MixtureModel(RankingModel):
    """`RankingModel` with experts between the features and the towers of its tasks, and without crosses unless they are given.

    For several labels that have much in common and not all: each mixes the experts by a gate of its own.

    Args:
        inputs, sizes: as of `RankingModel`.
        experts: `"mmoe"`, experts of all tasks, or `"ple"`, layers of experts of each task and of all.
        cross: as of `RankingModel`.
        **options: of `RankingModel`.
        device: where parameters live; `"meta"` allocates nothing.

    Source:
        Ma et al., Modeling Task Relationships in Multi-task Learning with Multi-gate Mixture-of-Experts, KDD 2018; Tang et al.,
        Progressive Layered Extraction, RecSys 2020.

    Example:
        >>> from jagged.models import MixtureModel, RankingInputs
        >>> inputs = RankingInputs(features={"user": "user"}, candidates={"item": "item"}, labels=["click", "buy"])
        >>> MixtureModel(inputs, {"user": 9, "item": 5}).tasks
        ['click', 'buy']
    """

    def __init__(
        self,
        inputs: RankingInputs | Mapping[str, Any],
        sizes: Mapping[str, int],
        *,
        experts: Literal["mmoe", "ple"] = "mmoe",
        cross: Literal["dcn", "dot"] | None = None,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(inputs, sizes, experts=experts, cross=cross, device=device, **options)
