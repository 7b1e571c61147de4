"""Pooling: from the rows of each sample to one vector."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from jagged.modules.jagged_module import JaggedModule
from jagged.modules.jagged_tensor import may_be_empty
from jagged.ops import jagged_jagged_bmm, jagged_softmax

KINDS = ("sum", "mean", "max", "last", "softmax")


class JaggedPooling(JaggedModule):
    """Pool the rows of each sample into one vector; an empty sample gets zeros.

    Args:
        embedding_dim: width D of rows.
        kind: `"sum"`, `"mean"`, `"max"`, `"last"` (the sample's last row) or `"softmax"`: a learned score a row, its softmax
            over the sample's rows the weights of a sum.
        device: where parameters live; `"meta"` allocates nothing. Only `"softmax"` has parameters.

    Raises:
        ValueError: another kind.

    Shape:
        JaggedTensor with values `[sum L, D]` in, `[B, D]` out.
    """

    shown = ("embedding_dim", "kind")

    def __init__(self, embedding_dim: int, kind: str = "mean", *, device: torch.device | str | None = None) -> None:
        super().__init__()
        if kind not in KINDS:
            raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
        self.embedding_dim = embedding_dim
        self.kind = kind
        # A bias would move all scores of a sample alike, which the softmax does not see.
        self.score = nn.Linear(embedding_dim, 1, bias=False, device=device) if kind == "softmax" else None

    def forward(self, x: JaggedTensor) -> Tensor:
        """Return one vector a sample."""
        values, offsets = x.values(), x.offsets()
        lengths = offsets.diff()[:, None]
        if self.kind == "last":
            if may_be_empty(values):
                # What the samples of a batch without rows read, before it is hidden.
                values = torch.cat([values, values.new_zeros(1, values.shape[1])])
            return values[(offsets[1:] - 1).clamp(min=0)].masked_fill(lengths == 0, 0.0)
        if self.kind == "max":
            largest = torch.segment_reduce(values, "max", offsets=offsets, axis=0, unsafe=True)
            return largest.masked_fill(lengths == 0, 0.0)
        weights = values.new_ones(values.shape[0], 1) if self.score is None else jagged_softmax(self.score(values), offsets)
        pooled = jagged_jagged_bmm(values, weights, offsets).squeeze(2)
        return pooled / lengths.clamp(min=1) if self.kind == "mean" else pooled
