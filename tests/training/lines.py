"""A task of one line in float64, with weights and masks, whose steps plain torch can take too."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from jagged.models import Task, TaskOutput, TaskScores

DIM = 3


class Line(Task):
    """Its loss is the mean over rows, or the weighted mean over those with a mask."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.line = nn.Linear(DIM, 1, dtype=torch.float64)

    def forward(self, batch: dict[str, Tensor]) -> TaskOutput:
        logits = self.line(batch["x"]).squeeze(1)
        scores = TaskScores(logits, batch["y"], batch.get("mask"), batch.get("weight"))
        counted = torch.ones_like(logits) if scores.weights is None else scores.weights
        counted = counted if scores.mask is None else counted * scores.mask
        return TaskOutput(((logits - batch["y"]).square() * counted).sum() / counted.sum().clamp(min=1e-9), {"y": scores})


def batch(rows: int, seed: int, *, weights: bool, masks: bool, empty: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = {"x": torch.randn(rows, DIM, generator=generator, dtype=torch.float64), "y": torch.rand(rows, generator=generator)}
    made["y"] = made["y"].double()
    if weights:
        made["weight"] = torch.rand(rows, generator=generator).double() * 3
    if masks:
        made["mask"] = torch.rand(rows, generator=generator) < (0.0 if empty else 0.6)
    return made


def joined(batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {key: torch.cat([one[key] for one in batches]) for key in batches[0]}
