"""The weights' gradient in factors, for tables whose rows an optimizer updates: no row of a gradient is stored for a pair.

A row with ns negatives adds a multiple of its hidden state to the gradient of ns + 1 items. With draws of each row's own, nearly
all of these differ, so that their gradients, `[N * (ns + 1), D]` or `[V, D]`, are far larger than what they are made of: items,
factors and the hidden states. Those are a lookup's ids, its weights and the gradients of its bags, so that whatever updates the
rows of lookups takes them as one more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from jagged.ops.sampled_cross_entropy.spec import (
    SAMPLED_LINEAR_CROSS_ENTROPY,
    SAMPLED_PAIRS,
    Inputs,
    Options,
    Pairs,
    PairsInputs,
)

#: Takes the hidden states `[N, D]`, items and factors `[N, ns + 1]`; -1 is no item.
Taker = Callable[[Tensor, Tensor, Tensor], None]


def pairs_taker(weight: Tensor) -> Taker | None:
    """Return what takes the gradient of a table in factors; None where nothing does."""
    if not torch.is_grad_enabled():
        return None
    taker: Taker | None = getattr(weight.grad_fn, "take_pairs", None)
    return taker


def with_pairs(x: Inputs, o: Options, backend: str | None, take: Taker) -> tuple[Tensor, Tensor]:
    """Return losses and log-sum-exps, `[N]`, in whose backward pass the gradient of the weights is handed over."""
    out = SAMPLED_LINEAR_CROSS_ENTROPY(x._replace(weight=x.weight.detach()), o, backend)
    losses, lse = _Pairs.apply(x.weight, out.losses, out.lse, take, x, o, backend, out.statistic, out.share, out.pull)
    return losses, lse


class _Pairs(torch.autograd.Function):
    """The losses as they are; they depend on the weights, whose own node comes after this one."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, losses: Tensor, lse: Tensor, take: Taker, x: Inputs, o: Options, backend: str | None,
        statistic: Tensor, share: Tensor, pull: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.take, ctx.o, ctx.backend = take, o, backend
        given = PairsInputs(losses, statistic, share, pull, x.hidden.detach(), x.weight.detach(), x.target, None, *x[3:7], *x[8:])
        ctx.save_for_backward(*given[1:])
        return losses.clone(), lse.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_losses: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_losses is not None or grad_lse is not None:
            x = PairsInputs(None, *ctx.saved_tensors)  # type: ignore[arg-type]
            grad = torch.zeros_like(x.share) if grad_losses is None else grad_losses
            pairs: Pairs = SAMPLED_PAIRS(x._replace(grad_losses=grad, grad_lse=grad_lse), ctx.o, ctx.backend)
            ctx.take(x.hidden, pairs.items, pairs.factors)
        return None, grad_losses, grad_lse, *(None,) * 7
