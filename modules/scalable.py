"""Cross-entropy over buckets of rows and items that score one another high."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchrec.sparse.jagged_tensor import JaggedTensor

from jagged.modules.heads import HeadOutput, target_logits, targets_of
from jagged.modules.jagged_module import JaggedModule
from jagged.modules.jagged_tensor import may_be_empty
from jagged.ops import catalogue_topk


class ScalableCrossEntropyHead(JaggedModule):
    """Cross-entropy of the rows and items with high scores alone. Has no parameters: the item table is passed.

    Each bucket has a random mixture of the hidden states as its centre, and holds the rows and the items of the highest products
    with it. A row's loss in a bucket is the cross-entropy of its target and the bucket's items, and its loss is the largest of
    its buckets'. Rows that are in no bucket have none. With buckets that hold everything it is the cross-entropy over all items.
    The centres come from torch's random state, in evaluation as well.

    Args:
        num_buckets: number of buckets.
        rows_per_bucket: rows in each; the authors take this and `num_buckets` as about twice the square root of the batch's rows.
        items_per_bucket: items in each.
        max_bytes: bound on the memory of scores; backward computes again what exceeds it.
        ignore_index: rows with this target are in no bucket.

    Raises:
        ValueError: numbers below 1.

    Shape:
        hidden: JaggedTensor with values `[sum L, D]`; weight: `[num_items, D]`; targets: `[sum L]`, int32 or int64, or a
        JaggedTensor of the rows' own items, whose targets are then the items of the next rows. Memory grows with
        `num_buckets * (rows_per_bucket + items_per_bucket) * D` and `num_buckets * sum L`.

    Source:
        Mezentsev et al., Scalable Cross-Entropy Loss for Sequential Recommendations with Large Item Catalogs, RecSys 2024.

    Example:
        >>> import torch
        >>> from torchrec.sparse.jagged_tensor import JaggedTensor
        >>> from jagged.modules import ScalableCrossEntropyHead
        >>> items = JaggedTensor(values=torch.tensor([5, 6, 7, 8]), offsets=torch.tensor([0, 3, 4]))
        >>> hidden = JaggedTensor(values=torch.zeros(4, 16), offsets=items.offsets())
        >>> ScalableCrossEntropyHead(2, 4, 100)(hidden, torch.zeros(100, 16), items).loss.exp()
        tensor(100.0000)
    """

    shown = ("num_buckets", "rows_per_bucket", "items_per_bucket", "max_bytes", "ignore_index")

    def __init__(
        self,
        num_buckets: int,
        rows_per_bucket: int,
        items_per_bucket: int,
        *,
        max_bytes: int = 256 * 2**20,
        ignore_index: int = -100,
    ) -> None:
        super().__init__()
        self.num_buckets, self.rows_per_bucket, self.items_per_bucket = num_buckets, rows_per_bucket, items_per_bucket
        self.max_bytes, self.ignore_index = max_bytes, ignore_index
        for name in ("num_buckets", "rows_per_bucket", "items_per_bucket", "max_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")

    def forward(self, hidden: JaggedTensor, weight: Tensor, targets: Tensor | JaggedTensor) -> HeadOutput:
        """Return the mean loss over the rows that are in a bucket (0 where none is) and the targets' scores."""
        targets = targets_of(targets, self.ignore_index)
        counted = targets != self.ignore_index
        # Nothing of an ignored row may come into a centre.
        values = torch.where(counted[:, None], hidden.values(), 0).to(weight.dtype)
        logits = target_logits(values, weight, targets, self.ignore_index)
        mixture = torch.randn(self.num_buckets, values.shape[0], device=values.device, dtype=values.dtype)
        if may_be_empty(values):
            # A row that is ignored, so that there is something to put into buckets.
            values = torch.cat([values, values.new_zeros(1, values.shape[1])])
            counted = torch.cat([counted, counted.new_zeros(1)])
            targets = torch.cat([targets, targets.new_full((1,), self.ignore_index)])
        with torch.no_grad(), torch.autocast(values.device.type, enabled=False):
            centres = nn.functional.normalize(mixture @ values[: mixture.shape[1]], dim=1)
            unwanted = torch.where(counted, 0.0, -torch.inf)
            _, rows = catalogue_topk(centres, values, self.rows_per_bucket, bias=unwanted)
            _, items = catalogue_topk(centres, weight.detach(), self.items_per_bucket)
        losses = self._losses(values, weight, targets, rows.clamp(min=0), items)
        # A place behind the last row takes what belongs to none.
        places = torch.where((rows >= 0) & counted[rows], rows, values.shape[0]).flatten()
        largest = losses.new_zeros(values.shape[0] + 1).scatter_reduce(0, places, losses.flatten(), "amax")
        selected = torch.zeros_like(largest).scatter_(0, places, 1.0)[:-1]
        return HeadOutput(largest[:-1].sum() / selected.sum().clamp(min=1), logits)

    def _losses(self, values: Tensor, weight: Tensor, targets: Tensor, rows: Tensor, items: Tensor) -> Tensor:
        """Return the loss of each bucket's rows `[num_buckets, rows]`."""
        inside = targets.clamp(0, len(weight) - 1)
        dtype = torch.promote_types(values.dtype, torch.float32)
        positive = (values.to(dtype) * weight[inside]).sum(1)
        # In ignored rows any finite number will do: their maximum is taken, too, and differentiated.
        positive = positive.masked_fill((inside != targets) & (targets != self.ignore_index), torch.nan)
        of_rows, of_items = values[rows], weight[items.clamp(min=0)]
        # Scores, the mask, and what the log-sum-exp and its gradient make of them.
        buckets = max(1, self.max_bytes // (4 * 4 * rows.shape[1] * (items.shape[1] + 1)))
        chunks = [x.split(buckets) for x in (of_rows, of_items, positive[rows], targets[rows], items)]
        if len(chunks[0]) == 1:
            return _bucket_losses(*(of[0] for of in chunks))
        parts = [
            cast(Tensor, checkpoint(_bucket_losses, *chunk, use_reentrant=False, preserve_rng_state=False))
            for chunk in zip(*chunks, strict=True)
        ]
        return torch.cat(parts)


def _bucket_losses(rows: Tensor, items: Tensor, positive: Tensor, targets: Tensor, ids: Tensor) -> Tensor:
    scores = (rows @ items.mT).to(positive.dtype)
    scores = scores.masked_fill((ids[:, None] == targets[..., None]) | (ids[:, None] < 0), -torch.inf)
    return torch.cat([positive[..., None], scores], -1).logsumexp(-1) - positive
