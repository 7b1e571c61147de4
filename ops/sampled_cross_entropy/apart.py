"""The weights' gradient apart from the losses, for tables whose rows an optimizer updates, which makes none of the whole table.

A row with ns negatives adds a multiple of its hidden state to the gradient of ns + 1 items. Their gradients, `[N * (ns + 1), D]`
or `[V, D]`, are far larger than what they are made of: items, factors and hidden states.

*In factors*, where most rows of the table are in few of these or in none: items, factors and hidden states are a lookup's ids,
its weights and the gradients of its bags, so that whatever updates the rows of lookups takes them as one more.

*In slices*, where rows of a large table are in many: the update draws the items again when it comes to it, sorts what rows add
by item, and makes the gradients of some items at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from jagged.ops._shared.backends import resolve_backend
from jagged.ops._shared.versions import Unchanged, apart_from
from jagged.ops.sampled_cross_entropy.spec import (
    SAMPLED_LINEAR_CROSS_ENTROPY,
    SAMPLED_PAIRS,
    Inputs,
    Options,
    Pairs,
    PairsInputs,
    loss_dtype,
)

#: Takes what the weights' gradient is made of.
Taker = Callable[[PairsInputs], None]


def taker_in_factors(weight: Tensor, o: Options, backend: str | None) -> Taker | None:
    """Return what hands the gradient of a table over in factors; None where nobody takes it."""
    take: Callable[[Tensor, Tensor, Tensor], None] | None = _taker(weight, "take_pairs")
    if take is None:
        return None

    def hand_over(x: PairsInputs) -> None:
        pairs: Pairs = SAMPLED_PAIRS(x, o, backend)
        # Hidden states `[N, D]`, items and factors `[N, ns + 1]`; -1 is no item.
        take(x.hidden, pairs.items, pairs.factors)

    return hand_over


def taker_in_slices(weight: Tensor, o: Options, room: int | None, backend: str | None) -> Taker | None:
    """Return what hands the gradient of a table over in slices; None where nobody takes it.

    `room` is how many bytes slices may take, None for as many as all have.
    """
    take: Callable[[ItemSlices], None] | None = _taker(weight, "take_slices")
    if take is None:
        return None

    def hand_over(x: PairsInputs) -> None:
        # Changed in place for the next loss, before what several have handed over is updated.
        seed = None if x.seed is None else x.seed.clone()
        take(ItemSlices(x._replace(hidden=apart_from(x.hidden, x.weight), seed=seed), o, room, backend))

    return hand_over


def _taker(weight: Tensor, name: str) -> Any:
    return getattr(weight.grad_fn, name, None) if torch.is_grad_enabled() else None


class MadeSlices(Protocol):
    """An implementation of a gradient in slices, of which all is sorted that rows add."""

    def gradient(self, first: int, last: int, behind: int) -> Tensor:
        """Return that of the items from `first` to before `last`, `[last - first, D]`, at least float32.

        Where it can, with room for `behind` numbers behind.
        """

    def named(self, first: int, last: int) -> Tensor:
        """Return which of them have one, `[last - first]` bool."""


class ItemSlices:
    """The gradient of `weight` `[V, D]` by one call of `sampled_linear_cross_entropy`, slice by slice.

    Attributes:
        row_bytes: of an item's gradient.
        room: bytes that slices may take; None for as many as they need.
        unchanged: what it is made of, but for the table, of which the update knows.
    """

    def __init__(self, x: PairsInputs, o: Options, room: int | None, backend: str | None) -> None:
        self._x, self._o, self._backend = x, o, backend
        self.row_bytes = x.weight.shape[1] * loss_dtype(x.hidden.dtype).itemsize
        self.room = room
        self._made: MadeSlices | None = None
        self.unchanged = Unchanged({name: of for name, of in x._asdict().items() if name != "weight"})

    def __call__(self, first: int, last: int, behind: int) -> Tensor:
        """Return the gradient of the items from `first` to before `last`, `[last - first, D]`, at least float32.

        What rows add is sorted by item with the first slice, for all of them. There is room for `behind` numbers behind.
        """
        with torch.no_grad(), torch.autocast(self._x.hidden.device.type, enabled=False):
            return self._slices.gradient(first, last, behind)

    def named(self, first: int, last: int) -> Tensor:
        """Return which of these items a row has drawn, or has as its target, `[last - first]` bool."""
        with torch.no_grad():
            return self._slices.named(first, last)

    @property
    def _slices(self) -> MadeSlices:
        if self._made is None:
            self._made = _implementation(self._backend, self._x)(self._x, self._o, self.room)
        return self._made

    def forget(self) -> None:
        """Let go of what rows add; it will be sorted again."""
        self._made = None

    def anew(self) -> ItemSlices:
        """Return the same with nothing sorted."""
        return ItemSlices(self._x, self._o, self.room, self._backend)

    def is_finite(self) -> Tensor:
        """Return whether the rows that count have finite hidden states, losses and gradients: `[]` bool."""
        x = self._x
        # What stands in other rows is nobody's, nor in those whose target is no item.
        counts = (x.target != self._o.ignore_index) & (x.target >= 0) & (x.target < x.weight.shape[0])
        # Infinity is the statistic of a row without negatives.
        found = [torch.isfinite(x.hidden).all(1), ~torch.isnan(x.statistic), torch.isfinite(x.pull), torch.isfinite(x.share)]
        found += [torch.isfinite(grad) for grad in (x.grad_losses, x.grad_lse) if grad is not None]
        return (torch.stack(found).all(0) | ~counts).all()


def _implementation(backend: str | None, x: PairsInputs) -> Callable[[PairsInputs, Options, int | None], MadeSlices]:
    if resolve_backend(backend, x.hidden) == "torch":
        from jagged.ops.sampled_cross_entropy import torch_impl

        return torch_impl.Slices
    from jagged.ops.sampled_cross_entropy.triton import launch

    return launch.slices


def with_weights_apart(x: Inputs, o: Options, backend: str | None, take: Taker) -> tuple[Tensor, Tensor]:
    """Return losses and log-sum-exps, `[N]`, in whose backward pass the gradient of the weights is handed over."""
    out = SAMPLED_LINEAR_CROSS_ENTROPY(x._replace(weight=x.weight.detach()), o, backend)
    losses, lse = _Apart.apply(x.weight, out.losses, out.lse, take, x, out.statistic, out.share, out.pull)
    return losses, lse


class _Apart(torch.autograd.Function):
    """The losses as they are; they depend on the weights, whose own node comes after this one."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, losses: Tensor, lse: Tensor, take: Taker, x: Inputs, statistic: Tensor, share: Tensor,
        pull: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.take = take
        # The update reads them when backward is over.
        statistic, share, pull = statistic.detach(), share.detach(), pull.detach()
        given = PairsInputs(losses, statistic, share, pull, x.hidden.detach(), x.weight.detach(), x.target, None, *x[3:7], *x[8:])
        ctx.save_for_backward(*given[1:])
        return losses.clone(), lse.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_losses: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_losses is not None or grad_lse is not None:
            x = PairsInputs(None, *ctx.saved_tensors)  # type: ignore[arg-type]
            grad = torch.zeros_like(x.share) if grad_losses is None else grad_losses
            ctx.take(x._replace(grad_losses=grad, grad_lse=grad_lse))
        return None, grad_losses, grad_lse, *(None,) * 5
