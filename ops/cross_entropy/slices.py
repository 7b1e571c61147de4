"""The weights' gradient in slices of items, for tables that an optimizer updates: no gradient of the whole table is stored.

Backward hands over what gradients of logits are made of, which is a vector of each row, beside hidden states. The optimizer asks
for a slice when it comes to it, and again where it needs a norm first and there was no memory to keep the slice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from jagged.ops._shared.validation import autocast_dtype
from jagged.ops._shared.versions import Unchanged, apart_from
from jagged.ops.cross_entropy.spec import LINEAR_CROSS_ENTROPY, WEIGHT_GRADIENT, GradientInputs, Inputs, Options

#: Takes a gradient in slices.
Taker = Callable[["WeightSlices"], None]


class WeightSlices:
    """The gradient of `weight` `[V, D]` by one call of `linear_cross_entropy`, slice by slice.

    Attributes:
        row_bytes: of an item's gradient.
        room: bytes that slices may take.
        unchanged: what it is made of, but for the table, of which the update knows.
    """

    def __init__(self, x: GradientInputs, o: Options, backend: str | None) -> None:
        self._x, self._o, self._backend = x, o, backend
        self.row_bytes = x.weight.shape[1] * max(4, x.weight.element_size())
        self.room = o.memory_budget
        self.unchanged = Unchanged({name: of for name, of in x._asdict().items() if name != "weight"})

    def __call__(self, first: int, last: int, behind: int) -> Tensor:
        """Return the gradient of the items from `first` to before `last`, `[last - first, D]`, at least float32.

        It has no room behind: beside what a slice takes here, a copy is nothing.
        """
        x, ignored = self._x, self._o.ignore_index
        target = x.target - first
        # The targets of other slices are no items of this one, but their rows count.
        outside = -1 if ignored != -1 else -2
        target = torch.where((target >= 0) & (target < last - first), target, outside)
        target = torch.where(x.target == ignored, ignored, target)
        bias, scale, smoothing = (None if vector is None else vector[first:last] for vector in x[-3:])
        weight = x.weight[first:last].to(x.hidden.dtype)
        part = x._replace(weight=weight, target=target, bias=bias, item_scale=scale, smoothing=smoothing)
        with torch.autocast(x.hidden.device.type, enabled=False):
            gradient: Tensor = WEIGHT_GRADIENT(part, self._o, self._backend).gradient
        return gradient

    def anew(self) -> WeightSlices:
        """Return the same of the tensors as they are now."""
        return WeightSlices(self._x, self._o, self._backend)

    def forget(self) -> None:
        """Nothing: it keeps nothing of one step."""

    def named(self, first: int, last: int) -> None:
        """All items have a gradient."""

    def is_finite(self) -> Tensor:
        """Return whether the rows that count have finite hidden states, log-sum-exps and gradients: `[]` bool."""
        x = self._x
        counts = x.target != self._o.ignore_index
        vectors = [x.lse, *(grad for grad in (x.grad_lse, x.grad_target, x.grad_smoothed) if grad is not None)]
        found = [torch.isfinite(x.hidden).all(1), *map(torch.isfinite, vectors)]
        return (torch.stack(found).all(0) | ~counts).all()


def slices_taker(x: Inputs, o: Options) -> Taker | None:
    """Return what takes the gradient of a table in slices; None where nothing does, or where the whole fits the memory budget."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    if x.weight.nbytes <= o.memory_budget or (x.bias is not None and x.bias.requires_grad):
        # The bias's gradient is made with the weights', and backward returns it at once.
        return None
    taker: Taker | None = getattr(x.weight.grad_fn, "take_slices", None)
    return taker


def with_slices(x: Inputs, o: Options, backend: str | None, take: Taker) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the operator does of each row, in whose backward pass the gradient of the weights is handed over."""
    outputs = LINEAR_CROSS_ENTROPY(x._replace(weight=x.weight.detach()), o, backend)
    return _Slices.apply(x.weight, *outputs, take, x, o, backend)  # type: ignore[no-any-return]


class _Slices(torch.autograd.Function):
    """The outputs as they are; they depend on the weights, whose own node comes after this one."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, lse: Tensor, target_logit: Tensor, smoothed: Tensor, take: Taker, x: Inputs, o: Options,
        backend: str | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.take, ctx.o, ctx.backend = take, o, backend
        cast = None if x.hidden.dtype == torch.float64 else autocast_dtype(x.hidden.device.type)
        hidden = x.hidden.detach() if cast is None else x.hidden.detach().to(cast)
        hidden = apart_from(hidden, x.weight)
        vectors = (None if vector is None else vector.detach() for vector in x[3:])
        ctx.save_for_backward(hidden, x.weight.detach(), x.target, lse.detach(), *vectors)
        return lse.clone(), target_logit.clone(), smoothed.clone()

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_lse: Tensor | None, grad_target: Tensor | None, grad_smoothed: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, target, lse, bias, item_scale, smoothing = ctx.saved_tensors
        grads = grad_lse, grad_target, None if smoothing is None else grad_smoothed
        if any(grad is not None for grad in grads):
            x = GradientInputs(hidden, weight, target, lse, *grads, bias, item_scale, smoothing)
            ctx.take(WeightSlices(x, ctx.o, ctx.backend))
        return None, grad_lse, grad_target, grad_smoothed, *(None,) * 4
