"""What autograd Functions of several families share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class _NoContext:
    """Takes what a forward keeps for a backward that will not come."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep nothing."""


def apply_in_backward(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """Return `function.apply(*arguments)` where the gradient may be differentiated again, otherwise its forward without a graph.

    Applying a function costs the host more than calling its operator.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return function.apply(*arguments)
    return function.forward(_NoContext(), *arguments)


class FirstOrderFunction(torch.autograd.Function):
    """Hand gradients on; differentiating them again is an error, where a constant would be silently wrong.

    `once_differentiable` says nothing where the incoming gradient is a constant, as in a gradient penalty.
    """

    @staticmethod
    def forward(ctx: Any, name: str, *grads: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients as they are."""
        ctx.name = name
        return tuple(grad.view_as(grad) for grad in grads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        """Refuse."""
        raise RuntimeError(f"{ctx.name} has no second derivative; for one, use torch's own operations on padded tensors")


def first_order(name: str, grads: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Return the gradients of a backward so that differentiating them raises an error that names the function."""
    grads = tuple(grads)
    # A compiled backward is refused a second derivative by the compiler itself.
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return grads
    return FirstOrderFunction.apply(name, *(grad.detach().requires_grad_() for grad in grads))
