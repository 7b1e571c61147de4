"""Heads: from hidden states to a loss."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from jagged.modules.split import RowSplit
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
        split: where given, `weight` is this process's block of the item table's rows. Each process scores the hidden states of
            all against its block, and gets the log-sum-exps over the others' blocks for its own rows. Every process of the
            group must call, and call backward, with however few rows; gradients are those of the sum of their losses.

    Raises:
        ValueError: `label_smoothing` outside [0, 1).

    Shape:
        hidden: JaggedTensor with values `[sum L, D]`; weight: `[num_items, D]`; targets: `[sum L]`, int32 or int64.
    """

    def __init__(self, *, ignore_index: int = -100, label_smoothing: float = 0.0, split: RowSplit | None = None) -> None:
        super().__init__()
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"label_smoothing: expected a number in [0, 1), got {label_smoothing}")
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.split = split

    def forward(self, hidden: JaggedTensor, weight: Tensor, targets: Tensor) -> HeadOutput:
        """Return the mean loss over the rows that count (0 where none does) and the targets' scores."""
        values, counted = hidden.values(), targets != self.ignore_index
        if self.split is None:
            losses, lse = linear_cross_entropy(
                values, weight, targets, ignore_index=self.ignore_index, reduction="none", return_lse=True
            )
            logits = lse - losses
            # The mean logit over all items is one product with the mean item: no logits are needed for it.
            mean_logits = (values * weight.mean(0)).sum(1) if self.label_smoothing else None
        else:
            lse, logits, mean_logits = self._score_together(self.split, values, weight, targets)
            losses = torch.where(counted, lse - logits, 0.0)
        if mean_logits is not None:
            losses = losses + self.label_smoothing * torch.where(counted, logits - mean_logits, 0.0)
        return HeadOutput(losses.sum() / counted.sum().clamp(min=1), logits.detach())

    def _score_together(
        self, split: RowSplit, hidden: Tensor, weight: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return log-sum-exp, target's logit and, for smoothing, mean logit `[N]` of each row, from all blocks."""
        counts = split.counts(len(targets))
        every, wanted = split.gather(hidden, counts), split.gather(targets, counts)
        counted, local = wanted != self.ignore_index, wanted - split.block().start
        if len(weight):
            # -1 and not ignore_index, which may be the number of a row of this block.
            within = torch.where(counted, local.clamp(0, len(weight) - 1), -1)
            losses, lse = linear_cross_entropy(every, weight, within, ignore_index=-1, reduction="none", return_lse=True)
            parts = [lse, torch.where(counted & (local == within), lse - losses, 0.0)]
        else:
            # No logits: a log-sum-exp of -inf and a sum of 0, with the (empty, zero) gradients that the other processes' have.
            logits = every @ weight.T
            parts = [logits.logsumexp(1), logits.sum(1)]
        if self.label_smoothing:
            parts.append((every * weight.sum(0)).sum(1) / split.num_rows)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        lse, logits, *means = split.scatter(torch.stack([part.to(dtype) for part in parts], 1), counts).unbind(2)
        nowhere = (targets != self.ignore_index) & ((targets < 0) | (targets >= split.num_rows))
        return lse.logsumexp(0), logits.sum(0).masked_fill(nowhere, torch.nan), means[0].sum(0) if means else None

    def extra_repr(self) -> str:
        """Show the options."""
        shown = f"ignore_index={self.ignore_index}, label_smoothing={self.label_smoothing}"
        return shown if self.split is None else f"{shown}, {self.split}"
