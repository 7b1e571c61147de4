"""Cross-entropy over the whole matrix of logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    temperature: float = 1.0,
    normalize: bool = False,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    class_weight: Tensor | None = None,
    sample_weight: Tensor | None = None,
    reduction: str = "mean",
) -> tuple[Tensor, Tensor]:
    """Return loss and log-sum-exp in float32 (float64 for float64); the logits are in the dtype of the inputs."""
    valid = target != ignore_index
    hidden = hidden.masked_fill(~valid[:, None], 0)
    if normalize:
        hidden, weight = F.normalize(hidden, dim=1), F.normalize(weight, dim=1)
    logits = F.linear(hidden, weight, bias)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits / temperature
    lse = torch.where(valid, logits.logsumexp(1), 0)
    known = torch.where(valid, target, 0).long()
    of_item = logits.new_ones(weight.shape[0]) if class_weight is None else class_weight.to(logits.dtype)
    of_row = of_item[known] * valid
    losses = (1 - label_smoothing) * of_row * (lse - logits.gather(1, known[:, None]).squeeze(1))
    if label_smoothing:
        losses = losses + label_smoothing / weight.shape[0] * (valid * ((lse[:, None] - logits) * of_item).sum(1))
    losses = losses + z_loss * lse.square()
    if sample_weight is not None:
        losses, of_row = losses * sample_weight, of_row * sample_weight.to(logits.dtype)
    if reduction == "none":
        return losses, lse
    norm = of_row.sum()
    return losses.sum() / (torch.where(norm == 0, 1, norm) if reduction == "mean" else 1), lse
