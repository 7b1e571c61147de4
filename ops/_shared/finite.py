"""Whether all numbers of a tensor are finite."""

from __future__ import annotations

import torch
from torch import Tensor


def all_finite(x: Tensor) -> Tensor:
    """Return whether there is neither NaN nor infinity in a tensor of floats: `[]` bool on its device.

    It reads once and writes nothing. `torch.isfinite(x).all()` writes as many numbers and three masks, which beside the gradients
    of 2.5 million rows of 64 columns were 1.1 GB.
    """
    if not x.numel():
        return torch.ones((), dtype=torch.bool, device=x.device)
    # NaN is larger than all.
    return torch.linalg.vector_norm(x, torch.inf).isfinite()
