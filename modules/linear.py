"""Linear layers of many rows, whose parameters stay in `torch.nn.Linear`."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooked

from jagged.ops import linear

_FORWARD = nn.Linear.forward


def apply_layer(layer: nn.Module, x: Tensor) -> Tensor:
    """Return `layer(x)`: of a plain `torch.nn.Linear` on a GPU by `jagged.ops.linear`, whose sums over many rows are fast.

    The layer stays PyTorch's, so that what exchanges layers by their type finds it, as quantisation does. It is called where
    something else stands in its place, where anybody has changed or watches its calls, and where a program is traced or compiled.
    """
    if not _is_run_on_gpu(x) or not _is_plain(layer):
        return cast(Tensor, layer(x))
    return linear(x, cast(nn.Linear, layer).weight, cast(nn.Linear, layer).bias)


def _is_run_on_gpu(x: Tensor) -> bool:
    """Whether it is a tensor of a GPU, and nobody makes a program of what is done with it."""
    return isinstance(x, Tensor) and x.is_cuda and not torch.compiler.is_compiling() and torch._C._get_tracing_state() is None


def _is_plain(layer: nn.Module) -> bool:
    if type(layer) is not nn.Linear or getattr(layer.forward, "__func__", None) is not _FORWARD:
        return False
    own = layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks
    of_all = (
        hooked._global_forward_hooks,
        hooked._global_forward_pre_hooks,
        hooked._global_backward_hooks,
        hooked._global_backward_pre_hooks,
    )
    return layer._compiled_call_impl is None and not any(own) and not any(of_all)


class Layers(nn.Sequential):
    """`torch.nn.Sequential` with `apply_layer` of each."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply one after the other."""
        for layer in self:
            x = apply_layer(layer, x)
        return x
