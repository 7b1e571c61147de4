"""Group-sparse linear layers with the zeros of their weights written down."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def group_sparse_linear(
    features: Tensor, weight: Tensor, supports: Tensor, sizes: Sequence[int], bias: Tensor | None = None
) -> Tensor:
    group = torch.repeat_interleave(torch.tensor(sizes, dtype=torch.int64)).to(supports.device)
    dense = weight.new_zeros(weight.shape[0], features.shape[1]).scatter(1, supports.long()[group], weight)
    logits = features @ dense.T
    return logits if bias is None else logits + bias
