"""Layers and mixtures of groups, one product at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def grouped_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, relu: bool = False) -> Tensor:
    """Each group's layer by itself."""
    groups = []
    for place, matrix in enumerate(weight):
        product = (x if x.dim() == 2 else x[:, place]) @ matrix.T
        groups.append(product if bias is None else product + bias[place])
    output = torch.stack(groups, 1)
    return output.relu() if relu else output


def mix_groups(groups: Tensor, weights: Tensor) -> Tensor:
    """Every mixture as a sum over the groups."""
    return (weights[..., None] * groups[:, None]).sum(2)
