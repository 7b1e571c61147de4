"""Norms of items: what their products are divided by, and what the gradient of weight loses with it."""

from __future__ import annotations

import torch
from torch import Tensor

NORM_AT_LEAST = 1e-12
# Elements at a time of what needs a copy in the accumulator's dtype.
ELEMENTS = 2**23


def inverse_norms(weight: Tensor) -> Tensor:
    """Return 1 by the L2 norm of each row, `[V]` float32 or float64."""
    norms = torch.linalg.vector_norm(weight, dim=1, dtype=torch.promote_types(weight.dtype, torch.float32))
    return norms.clamp_(min=NORM_AT_LEAST).reciprocal_()


def less_radial(grad: Tensor, weight: Tensor, item_scale: Tensor) -> Tensor:
    """Return a gradient by rows without its part along the rows, which a change of their lengths alone would be."""
    rows = max(1, ELEMENTS // max(1, weight.shape[1]))
    for of_grad, of_weight, scale in zip(grad.split(rows), weight.split(rows), item_scale.split(rows), strict=True):
        direction = of_weight.to(scale.dtype) * scale[:, None]
        # A row shorter than the least norm is divided by a constant.
        along = torch.where(scale < 1 / NORM_AT_LEAST, (of_grad * direction).sum(1), 0)[:, None]
        of_grad.sub_(torch.where(along == 0, 0, along * direction))
    return grad
