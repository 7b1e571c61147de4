"""Cross-entropy over the whole matrix of logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, *, ignore_index: int = -100, reduction: str = "mean"
) -> tuple[Tensor, Tensor]:
    """Return loss and log-sum-exp in float32 (float64 for float64); the logits are in the dtype of the inputs."""
    valid = target != ignore_index
    logits = F.linear(hidden.masked_fill(~valid[:, None], 0), weight)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    lse = torch.where(valid, logits.logsumexp(1), 0)
    loss = lse - torch.where(valid, logits.gather(1, torch.where(valid, target, 0).long()[:, None]).squeeze(1), 0)
    if reduction == "none":
        return loss, lse
    return loss.sum() / (valid.sum().clamp(min=1) if reduction == "mean" else 1), lse
