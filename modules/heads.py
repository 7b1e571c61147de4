"""Heads: from hidden states to a loss."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from jagged.ops import linear_cross_entropy


class HeadOutput(NamedTuple):
    """What a head returns: `loss`, a scalar, and `logits` `[N]`, the score of each row's target (no gradient)."""

    loss: Tensor
    logits: Tensor


class CutCrossEntropyHead(nn.Module):
    """Cross-entropy of every row over all items, without the logits in memory. Has no parameters: the item table is passed.

    Args:
        ignore_index: rows with this target have no loss.
        label_smoothing: share of the target's probability that is spread evenly over all items, in [0, 1).

    Raises:
        ValueError: `label_smoothing` outside [0, 1).

    Shape:
        hidden: JaggedTensor with values `[sum L, D]`; weight: `[num_items, D]`; targets: `[sum L]`, int32 or int64.
    """

    def __init__(self, *, ignore_index: int = -100, label_smoothing: float = 0.0) -> None:
        super().__init__()
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"label_smoothing: expected a number in [0, 1), got {label_smoothing}")
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing

    def forward(self, hidden: JaggedTensor, weight: Tensor, targets: Tensor) -> HeadOutput:
        """Return the mean loss over the rows that count (0 where none does) and the targets' scores."""
        losses, lse = linear_cross_entropy(
            hidden.values(), weight, targets, ignore_index=self.ignore_index, reduction="none", return_lse=True
        )
        counted = targets != self.ignore_index
        logits = lse - losses
        if self.label_smoothing:
            # The mean logit over all items is one product with the mean item: no logits are needed for it.
            mean_logits = (hidden.values() * weight.mean(0)).sum(1)
            losses = losses + self.label_smoothing * torch.where(counted, logits - mean_logits, 0.0)
        return HeadOutput(losses.sum() / counted.sum().clamp(min=1), logits.detach())

    def extra_repr(self) -> str:
        """Show the options."""
        return f"ignore_index={self.ignore_index}, label_smoothing={self.label_smoothing}"
