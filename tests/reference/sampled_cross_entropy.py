"""Sampled cross-entropy written out row by row: every negative's logit stands in a matrix, and no draw is made."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def kept_negatives(
    ids: Tensor, target: Tensor, num_items: int, *, mask_hits: bool, exclude: list[list[int]] | None = None
) -> Tensor:
    """Return which of the negatives `[N, ns]` count."""
    kept = (ids >= 0) & (ids < num_items)
    if mask_hits:
        kept &= ids != target[:, None]
    for row, items in enumerate(exclude or []):
        for item in items:
            kept[row] &= ids[row] != item
    return kept


def sampled_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    ids: Tensor,
    *,
    log_q: Tensor | None = None,
    target_log_q: Tensor | None = None,
    exclude: list[list[int]] | None = None,
    loss: str = "softmax",
    correction: str = "none",
    positive: str = "inside",
    mask_hits: bool = True,
    renormalise: bool = False,
    gbce_t: float = 0.75,
    scale: float = 1.0,
    ignore_index: int = -100,
    sample_weight: Tensor | None = None,
    reduction: str = "mean",
) -> tuple[Tensor, Tensor, Tensor]:
    """Return loss, log-sum-exp and the targets' logits; `ids` and `log_q` are `[N, ns]`, whoever shares them.

    Logits are products in the dtype of the inputs; what follows is float32, or float64 for float64.
    """
    count, num_items = ids.shape[1], weight.shape[0]
    valid = target != ignore_index
    kept = kept_negatives(ids, target, num_items, mask_hits=mask_hits, exclude=exclude)
    hidden = hidden.masked_fill(~valid[:, None], 0)
    every = F.linear(hidden, weight)
    every = (every if every.dtype == torch.float64 else every.float()) * scale
    negative = every.gather(1, ids.clamp(0, num_items - 1).long())
    positive_logit = every.gather(1, torch.where(valid, target, 0).long()[:, None]).squeeze(1)
    if correction != "none":
        negative = negative - math.log(count) - (-math.log(num_items) if log_q is None else log_q.to(negative.dtype))
    if renormalise:
        negative = negative + (count / kept.sum(1, keepdim=True).clamp(min=1).to(negative.dtype)).log()
    if correction == "both":
        of_target = -math.log(num_items) if target_log_q is None else target_log_q.to(negative.dtype)
        positive_logit = positive_logit - math.log(count) - of_target
    if loss in ("bce", "gbce"):
        alpha = count / (num_items - 1) if num_items > 1 else 1.0
        beta = alpha * (gbce_t * (1 - 1 / alpha) + 1 / alpha) if loss == "gbce" else 1.0
        rows = beta * -F.logsigmoid(positive_logit) - torch.where(kept, F.logsigmoid(-negative), 0).sum(1)
        lse = torch.zeros_like(rows)
    else:
        masked = negative.masked_fill(~kept, -1e30)
        everything = torch.cat([positive_logit[:, None], masked], 1)
        inside = everything.logsumexp(1)
        # With nothing left the positive alone is the denominator.
        outside = torch.where(kept.any(1), masked.logsumexp(1), positive_logit)
        lse = inside if positive == "inside" and loss == "softmax" else outside
        rows = lse - positive_logit
        if loss == "refined":
            rows = rows * (1 - (positive_logit - inside).exp()).detach()
    rows, lse, positive_logit = (torch.where(valid, x, 0) for x in (rows, lse, positive_logit))
    weights = valid.to(rows.dtype)
    if sample_weight is not None:
        weights = torch.where(valid, sample_weight, 0).to(rows.dtype)
    rows = rows * weights
    if reduction == "none":
        return rows, lse, positive_logit
    total = weights.sum()
    return rows.sum() / (torch.where(total == 0, 1, total) if reduction == "mean" else 1), lse, positive_logit
