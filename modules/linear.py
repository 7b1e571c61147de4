"""Linear layers of many rows, whose parameters stay in `torch.nn.Linear`."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from jagged.ops import linear

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def apply_layer(layer: nn.Module, x: Tensor) -> Tensor:
    """Return `layer(x)`: of a plain `torch.nn.Linear` by `jagged.ops.linear`, whose sums over many rows are fast.

    The layer stays PyTorch's, so that what exchanges layers by their type finds it, as quantisation does. What stands in its
    place then, has hooks or is parametrised, is called.
    """
    if type(layer) is not nn.Linear or any(getattr(layer, name) for name in _HOOKS) or _has_global_hooks():
        return cast(Tensor, layer(x))
    return linear(x, layer.weight, layer.bias)


def _has_global_hooks() -> bool:
    hooks = torch.nn.modules.module
    return any(getattr(hooks, f"_global{name}") for name in _HOOKS)


class Layers(nn.Sequential):
    """`torch.nn.Sequential` with `apply_layer` of each."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply one after the other."""
        for layer in self:
            x = apply_layer(layer, x)
        return x
