"""The operator of linear cross-entropy: what all losses over it are made of, one number of each for a row."""

from __future__ import annotations

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
