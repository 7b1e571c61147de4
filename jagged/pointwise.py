"""Metrics of rows that have a label each: AUC, logloss, error; exact, with ties, weights and masks, merged over processes."""

from __future__ import annotations

import torch
from torch import Tensor


class PointwiseMetrics:
    """Figures of one task over all rows that were added.

    With labels of 0 and 1 alone:

    * `auc`: the weighted share of pairs of a positive and a negative that the scores order right, half of a tied pair's; left out
      where all labels are alike.
    * `logloss`: mean of `-y log p - (1 - y) log(1 - p)`, p the logit's sigmoid, in float64.
    * `calibration`: the sum of p divided by the sum of labels; left out without positives.

    With other labels `mse`, the mean squared difference of logit and label. `rows` is how many were counted.

    Rows are kept, 24 bytes each on the CPU.

    Args:
        name: of the task, for messages.
    """

    def __init__(self, name: str = "scores") -> None:
        self._name = name
        self._kept: list[Tensor] = []

    def update(self, logits: Tensor, labels: Tensor, mask: Tensor | None = None, weights: Tensor | None = None) -> None:
        """Add rows.

        Args:
            logits, labels: `[N]`.
            mask: bool `[N]`, which rows count; None for all.
            weights: `[N]`, not negative; None for 1.

        Raises:
            ValueError: shapes that differ.
        """
        given = {"labels": labels, "mask": mask, "weights": weights}
        for what, tensor in given.items():
            if tensor is not None and (tensor.shape != logits.shape or logits.dim() != 1):
                raise ValueError(
                    f"{self._name}: {what}: got shape {tuple(tensor.shape)}, logits {tuple(logits.shape)}, expected [N] of both"
                )
        weights = torch.ones_like(logits, dtype=torch.float32) if weights is None else weights
        rows = torch.stack([x.detach().to("cpu", torch.float64) for x in (logits, labels, weights)])
        self._kept.append(rows if mask is None else rows[:, mask.cpu().bool()])

    def all_gather(self) -> None:
        """Take in the rows of all processes of the `torch.distributed` group, each of which must call."""
        rows = self._rows().contiguous()
        everyones: list[Tensor | None] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everyones, rows)
        self._kept = [of for of in everyones if of is not None]

    def compute(self) -> dict[str, float]:
        """All figures by name.

        Raises:
            ValueError: no row was added, or a score is NaN or infinite.
        """
        logits, labels, weights = self._rows()
        total = weights.sum()
        if not total:
            raise ValueError(f"{self._name}: no row has a label to evaluate")
        if not torch.isfinite(logits).all():
            raise ValueError(f"{self._name}: scores are NaN or infinite; train again with a smaller learning_rate")
        if not (torch.isfinite(labels).all() and torch.isfinite(weights).all() and (weights >= 0).all()):
            raise ValueError(f"{self._name}: labels or weights are NaN, infinite or negative; mask the rows without a label")
        figures = {"rows": float(len(logits))}
        if not ((labels == 0) | (labels == 1)).all():
            return {"mse": float((weights * (logits - labels).square()).sum() / total), **figures}
        losses = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, weights, reduction="sum")
        figures = {"logloss": float(losses / total), **figures}
        positives, negatives = weights * labels, weights * (1 - labels)
        if positives.sum():
            figures = {"calibration": float((weights * logits.sigmoid()).sum() / positives.sum()), **figures}
        if positives.sum() and negatives.sum():
            figures = {"auc": _auc(logits, positives, negatives), **figures}
        return figures

    def _rows(self) -> Tensor:
        return torch.cat(self._kept, 1) if self._kept else torch.zeros(3, 0, dtype=torch.float64)


def _auc(scores: Tensor, positives: Tensor, negatives: Tensor) -> float:
    """Pairs in order, by weight; rows of one score are taken together."""
    _, place = torch.unique(scores, return_inverse=True)
    count = int(place.max()) + 1
    up, down = (torch.zeros(count, dtype=torch.float64).scatter_add_(0, place, of) for of in (positives, negatives))
    below = down.cumsum(0) - down
    return float((up * (below + down / 2)).sum() / (up.sum() * down.sum()))
