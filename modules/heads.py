"""Heads: from hidden states to a loss."""

from __future__ import annotations

from typing import NamedTuple

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

    Shape:
        hidden: JaggedTensor with values `[sum L, D]`; weight: `[num_items, D]`; targets: `[sum L]`, int32 or int64.
    """

    def __init__(self, *, ignore_index: int = -100) -> None:
        super().__init__()
        self.ignore_index = ignore_index

    def forward(self, hidden: JaggedTensor, weight: Tensor, targets: Tensor) -> HeadOutput:
        """Return the mean loss over the rows that count (0 where none does) and the targets' scores."""
        losses, lse = linear_cross_entropy(
            hidden.values(), weight, targets, ignore_index=self.ignore_index, reduction="none", return_lse=True
        )
        rows = (targets != self.ignore_index).sum().clamp(min=1)
        return HeadOutput(losses.sum() / rows, (lse - losses).detach())

    def extra_repr(self) -> str:
        """Show the option."""
        return f"ignore_index={self.ignore_index}"
