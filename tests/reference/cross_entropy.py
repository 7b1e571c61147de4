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
    """Return loss and log-sum-exp in float32 (float64 for float64); the logits are in the dtype of the inputs.

    Who keeps no logits computes them twice, once for the log-sum-exp and once for its gradient. The two sums may come in two
    orders, so that what rounding leaves of the first is not what it leaves of the second. Here one order is the other's reverse.
    """
    valid = target != ignore_index
    hidden = hidden.masked_fill(~valid[:, None], 0)
    if normalize:
        hidden, weight = F.normalize(hidden, dim=1), F.normalize(weight, dim=1)
    logits = _scaled(F.linear(hidden, weight, bias), softcap, temperature)
    lse = logits.logsumexp(1)
    if hidden.dtype != torch.bfloat16 and hidden.dtype != torch.float16:
        again = _scaled(F.linear(hidden.flip(1), weight.flip(1), bias), softcap, temperature).logsumexp(1).detach()
        shares = (logits.detach() - again[:, None]).exp()
        weighted = (logits.masked_fill(shares == 0, 0) * shares).sum(1)
        lse = again + weighted - weighted.detach()
    lse = torch.where(valid, lse, 0)
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


def _scaled(products: Tensor, softcap: float | None, temperature: float) -> Tensor:
    logits = products if products.dtype == torch.float64 else products.float()
    return (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / temperature
