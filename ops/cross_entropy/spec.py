"""The operator of linear cross-entropy: what all losses over it are made of, one number of each for a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from jagged.ops._shared.operator import Differentiable, operator

#: Bytes that chunks may take beside the gradients.
MEMORY_BUDGET = 256 * 2**20


class Inputs(NamedTuple):
    """Hidden states `[N, D]`, weights `[V, D]`, targets `[N]`, and of each item, `[V]`, bias, scale and share in `smoothed`.

    The scale is `inverse_norms(weight)`, or there is none: the gradient of weight counts what it depends on.
    """

    hidden: Differentiable
    weight: Differentiable
    target: Tensor
    bias: Differentiable | None = None
    item_scale: Tensor | None = None
    smoothing: Tensor | None = None


class Options(NamedTuple):
    """How logits are shaped, rows with which target do not count, and which way backward takes."""

    temperature: float = 1.0
    softcap: float | None = None
    ignore_index: int = -100
    hidden_eps: float | None = None
    weight_eps: float | None = None
    strategy: str = "auto"
    memory_budget: int = MEMORY_BUDGET


class Outputs(NamedTuple):
    """Of each row, `[N]`, float32 or float64: log-sum-exp, the target's logit, and the sum of all logits by `smoothing`.

    All are 0 in ignored rows; the logit of what is no item is NaN. Without `smoothing` the sums are empty.
    """

    lse: Tensor
    target_logit: Tensor
    smoothed: Tensor


def _shapes(x: Inputs, o: Options) -> Outputs:
    lse = x.hidden.new_empty(x.target.shape, dtype=torch.promote_types(x.hidden.dtype, torch.float32))
    return Outputs(lse, torch.empty_like(lse), lse.new_empty(0 if x.smoothing is None else x.target.shape))


# Backward computes the logits again from the tensors as autocast has cast them, and accumulates each gradient for the dtype that
# its input had before: master weights get no rounding on the way.
LINEAR_CROSS_ENTROPY = operator(
    "linear_cross_entropy",
    Inputs,
    Options,
    Outputs,
    shapes=_shapes,
    torch="jagged.ops.cross_entropy.torch_impl:forward,backward",
    triton="jagged.ops.cross_entropy.triton.launch:forward,backward",
    saved=(*Inputs._fields, "lse"),
    autocast=("hidden", "weight"),
)


class GradientInputs(NamedTuple):
    """What the gradient of some items' weights is made of: log-sum-exps and gradients of what forward gave of rows, each `[N]`.

    A target that is none of the items, and not ignored, is a row of which another item is the target.
    """

    hidden: Tensor
    weight: Tensor
    target: Tensor
    lse: Tensor
    grad_lse: Tensor | None = None
    grad_target: Tensor | None = None
    grad_smoothed: Tensor | None = None
    bias: Tensor | None = None
    item_scale: Tensor | None = None
    smoothing: Tensor | None = None


class Gradient(NamedTuple):
    """Of the items' weights, `[V, D]`, at least float32."""

    gradient: Tensor


def gradient_by(backward: Callable[..., dict[str, Tensor]], x: GradientInputs, o: Options) -> Gradient:
    """Return the weights' gradient by an implementation's backward pass."""
    given = Inputs(x.hidden, x.weight, x.target, x.bias, x.item_scale, x.smoothing)
    grads = Outputs._make((x.grad_lse, x.grad_target, x.grad_smoothed))
    out = Outputs(x.lse, x.lse, x.lse)
    return Gradient(backward(grads, given, out, o, {"weight": x.lse.dtype})["weight"])


WEIGHT_GRADIENT = operator(
    "linear_cross_entropy_weight_gradient",
    GradientInputs,
    Options,
    Gradient,
    shapes=lambda x, o: Gradient(torch.empty_like(x.weight, dtype=x.lse.dtype)),
    torch="jagged.ops.cross_entropy.torch_impl:weight_gradient",
    triton="jagged.ops.cross_entropy.triton.launch:weight_gradient",
)
