"""Linear layers of many rows, whose parameters stay in `torch.nn.Linear`."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooked

from jagged.modules.layer_norm import LayerNorm
from jagged.ops import linear


def apply_layer(layer: nn.Module, x: Tensor) -> Tensor:
    """Return `layer(x)`: of a plain `torch.nn.Linear` on a GPU by `jagged.ops.linear`, whose sums over many rows are fast.

    The layer stays PyTorch's, so that what exchanges layers by their type finds it, as quantisation does. It is called where
    something else stands in its place, where anybody has changed or watches its calls, and where a program is traced or compiled.
    """
    if not isinstance(layer, nn.Linear) or not are_plain(x, layer):
        return cast(Tensor, layer(x))
    return linear(x, layer.weight, layer.bias)


def normalised(norm: nn.Module, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return `norm(rows)`, and the rows, to which what is made of it is added: a `LayerNorm` adds up the gradients of both."""
    if isinstance(norm, LayerNorm) and are_plain(rows, norm):
        return norm.with_residual(rows)
    return cast(Tensor, norm(rows)), rows


def are_plain(x: Tensor, *parts: nn.Module) -> bool:
    """Return whether a kernel may compute in place of modules of PyTorch's, from their parameters.

    It may on a GPU, where nobody has changed or watches their calls, and makes no program of them.
    """
    return _is_run_on_gpu(x) and all(map(_is_plain, parts))


def _is_run_on_gpu(x: Tensor) -> bool:
    """Whether it is a tensor of a GPU, and nobody makes a program of what is done with it."""
    return isinstance(x, Tensor) and x.is_cuda and not torch.compiler.is_compiling() and torch._C._get_tracing_state() is None


# By type the call that a kernel stands for. Types derived from these may do anything.
_FORWARDS: dict[type[nn.Module], Any] = {
    kind: kind.forward for kind in (nn.Linear, nn.Dropout, nn.GroupNorm, nn.RMSNorm, LayerNorm)
}


def _is_plain(part: nn.Module) -> bool:
    forward = _FORWARDS.get(type(part))
    if forward is None or getattr(part.forward, "__func__", None) is not forward:
        return False
    own = part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks
    of_all = (
        hooked._global_forward_hooks,
        hooked._global_forward_pre_hooks,
        hooked._global_backward_hooks,
        hooked._global_backward_pre_hooks,
    )
    return part._compiled_call_impl is None and not any(own) and not any(of_all)


class Layers(nn.Sequential):
    """`torch.nn.Sequential` with `apply_layer` of each."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply one after the other."""
        for layer in self:
            x = apply_layer(layer, x)
        return x
