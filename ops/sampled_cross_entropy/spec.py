"""What sampled cross-entropy takes and gives: one operator for the losses of rows; weights of rows and means are PyTorch's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from jagged.ops._shared.operator import Differentiable, operator
from jagged.ops._shared.sizes import cdiv

Loss = Literal["softmax", "refined", "bce", "gbce"]
Correction = Literal["none", "negatives", "both"]
Positive = Literal["inside", "outside"]


class Inputs(NamedTuple):
    """Hidden states `[N, D]`, item weights `[V, D]`, targets `[N]`; then negatives as `draws.Source` has them.

    `target_correction` `[N]` is what targets' logits lose; `sample_weight` `[N]` is what a filter weighs rows by.
    """

    hidden: Differentiable
    weight: Differentiable
    target: Tensor
    ids: Tensor | None = None
    log_q: Tensor | None = None
    probability: Tensor | None = None
    seed: Tensor | None = None
    target_correction: Tensor | None = None
    excluded: Tensor | None = None
    exclude_offsets: Tensor | None = None
    sample_weight: Tensor | None = None


class Options(NamedTuple):
    """Negatives as `draws.Source` has them, and what is computed.

    `loss` is "softmax", "refined" or "bce"; `is_corrected` subtracts log(ns q) from the negatives; `is_inside` has the positive
    in the denominator; `positive_weight` is bce's beta; `is_sparse` says it of the weights' gradient; `casts_weight` whether
    autocast does.
    """

    kind: str
    num_negatives: int
    rows_per_draw: int
    loss: str = "softmax"
    is_corrected: bool = False
    is_inside: bool = True
    mask_hits: bool = True
    renormalise: bool = False
    scale: float = 1.0
    positive_weight: float = 1.0
    ignore_index: int = -100
    filter_eps: float | None = None
    is_sparse: bool = False
    casts_weight: bool = True
    with_direction: bool = True


class Outputs(NamedTuple):
    """Loss, log-sum-exp, statistic, share and pull of each row, `[N]`, and its direction, `[N, D]` or empty; at least float32.

    The statistic is the log-sum-exp of the row's negatives, or for bce their sum of softplus; infinity where a row has no
    gradient from negatives. Share and pull are the derivatives of the loss by the statistic and by the positive's logit. The
    direction is the derivative of the statistic by the hidden state, without the scale.
    """

    losses: Tensor
    lse: Tensor
    statistic: Tensor
    share: Tensor
    pull: Tensor
    direction: Tensor


class PairsInputs(NamedTuple):
    """Gradients of the losses `[N]`, what forward found of rows, `[N]`, then `Inputs` but for the targets' correction."""

    grad_losses: Tensor
    statistic: Tensor
    share: Tensor
    pull: Tensor
    hidden: Tensor
    weight: Tensor
    target: Tensor
    grad_lse: Tensor | None = None
    ids: Tensor | None = None
    log_q: Tensor | None = None
    probability: Tensor | None = None
    seed: Tensor | None = None
    excluded: Tensor | None = None
    exclude_offsets: Tensor | None = None
    sample_weight: Tensor | None = None


class Pairs(NamedTuple):
    """The weights' gradient in factors: row n adds `factors[n, j] * hidden[n]` to that of `items[n, j]`, both `[N, ns + 1]`.

    The last is a row's target. Items are int32, -1 where there is none; factors have the dtype of losses.
    """

    items: Tensor
    factors: Tensor


def inputs_of(x: PairsInputs) -> Inputs:
    """Return what forward was given."""
    return Inputs(x.hidden, x.weight, x.target, x.ids, x.log_q, x.probability, x.seed, None, *x[-3:])


def loss_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of losses and accumulators."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def num_touched(x: Inputs, o: Options) -> int:
    """Return how many rows a sparse gradient has: no more items than negatives and targets."""
    num_rows = x.hidden.shape[0]
    return min(x.weight.shape[0], cdiv(num_rows, o.rows_per_draw) * o.num_negatives + num_rows)


def _shapes(x: Inputs, o: Options) -> Outputs:
    dtype = loss_dtype(x.hidden.dtype)
    rows = [x.hidden.new_empty(x.target.shape, dtype=dtype) for _ in range(5)]
    return Outputs._make([*rows, x.hidden.new_empty(x.hidden.shape if o.with_direction else 0, dtype=dtype)])


def _gradient_shapes(grads: Outputs, x: Inputs, out: Outputs, o: Options, wanted: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
    found = {name: x.hidden.new_empty(getattr(x, name).shape, dtype=dtype) for name, dtype in wanted.items()}
    if o.is_sparse and "weight" in wanted:
        count = num_touched(x, o)
        found["weight"] = found["weight"].new_empty(count, x.weight.shape[1])
        found["touched"] = x.hidden.new_empty(count, dtype=torch.int64)
    return found


def _finish(found: Mapping[str, Any], x: Inputs, o: Options, wanted: Mapping[str, torch.dtype]) -> Mapping[str, Any]:
    if not o.is_sparse or "weight" not in wanted:
        return found
    # Not coalesced: places that no item needs repeat one, with zeros.
    weight = torch.sparse_coo_tensor(found["touched"][None], found["weight"], x.weight.shape, check_invariants=False)
    return {**found, "weight": weight}


SAMPLED_LINEAR_CROSS_ENTROPY = operator(
    "sampled_linear_cross_entropy",
    Inputs,
    Options,
    Outputs,
    shapes=_shapes,
    torch="jagged.ops.sampled_cross_entropy.torch_impl:forward,backward",
    triton="jagged.ops.sampled_cross_entropy.triton.launch:forward,backward",
    saved=(*(name for name in Inputs._fields if name != "target_correction"), *Outputs._fields[2:]),
    autocast=lambda o: ("hidden", "weight") if o.casts_weight else ("hidden",),
    gradient_shapes=_gradient_shapes,
    extra=("touched",),
    finish=_finish,
)

SAMPLED_PAIRS = operator(
    "sampled_linear_cross_entropy_pairs",
    PairsInputs,
    Options,
    Pairs,
    shapes=lambda x, o: Pairs(
        x.hidden.new_empty(x.target.shape[0], o.num_negatives + 1, dtype=torch.int32),
        x.hidden.new_empty(x.target.shape[0], o.num_negatives + 1, dtype=loss_dtype(x.hidden.dtype)),
    ),
    torch="jagged.ops.sampled_cross_entropy.torch_impl:pairs",
    triton="jagged.ops.sampled_cross_entropy.triton.launch:pairs",
)
