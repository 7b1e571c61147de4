"""Group-sparse linear layers with the zeros of their weights written down."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def group_sparse_linear(
    features: Tensor, weight: Tensor, supports: Tensor, sizes: Sequence[int], bias: Tensor | None = None
) -> Tensor:
    group = torch.repeat_interleave(torch.tensor(sizes, dtype=torch.int64)).to(supports.device)
    if supports.dim() == 1:
        supports = supports.long()[:, None] + torch.arange(weight.shape[1], device=supports.device)
    dense = weight.new_zeros(weight.shape[0], features.shape[1]).scatter(1, supports.long()[group], weight)
    logits = features @ dense.T
    return logits if bias is None else logits + bias


def group_sparse_bce(
    logits: Tensor,
    targets: Tensor,
    label_weight: Tensor | None = None,
    row_mask: Tensor | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """The loss of the whole matrix of logits; `targets` is as large."""
    targets = (1 - label_smoothing) * targets.to(logits.dtype) + label_smoothing / 2
    losses = torch.nn.functional.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    if label_weight is not None:
        losses = losses * label_weight.to(losses.dtype)
    rows = losses.sum(1)
    rows = rows if row_mask is None else rows[row_mask]
    return rows.sum() / max(rows.shape[0], 1)


def group_sparse_cross_entropy(logits: Tensor, targets: Tensor, row_mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of a softmax over the whole matrix of logits, rows' log-sum-exp, and the sum of their positives' logits."""
    mask = torch.ones(logits.shape[0], dtype=torch.bool, device=logits.device) if row_mask is None else row_mask
    # Of no labels the sum of exponentials is 0.
    lse = torch.where(mask, torch.cat([logits, logits.new_full((logits.shape[0], 1), -torch.inf)], 1).logsumexp(1), 0)
    target = torch.where(mask, (logits * targets.to(logits.dtype)).sum(1), 0)
    counts = targets.sum(1).to(logits.dtype)
    counted = mask & (counts > 0)
    loss = (lse[counted] - target[counted] / counts[counted]).sum() / max(int(counted.sum()), 1)
    return loss, lse, target
