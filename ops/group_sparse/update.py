"""The update of a layer from its gradients, in PyTorch's operations, where no kernel makes it: it has gradients in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from jagged.ops._shared.label_loss import loss_dtype
from jagged.ops._shared.rounding import rounded
from jagged.ops.group_sparse.spec import (
    FeatureGradient,
    LossInputs,
    SoftmaxInputs,
    SoftmaxUpdateInputs,
    SoftmaxUpdatingInputs,
    UpdateInputs,
    UpdateOptions,
    UpdatingInputs,
)

Layer = UpdateInputs | SoftmaxUpdateInputs

# Numbers that are changed at once: a few copies of so many in float32.
PIECE_ELEMENTS = 2**24


def loss_inputs(x: UpdatingInputs | UpdateInputs) -> LossInputs:
    """Return what the loss alone is made of."""
    return LossInputs(**{name: getattr(x, name) for name in LossInputs._fields})


def softmax_inputs(x: SoftmaxUpdatingInputs | SoftmaxUpdateInputs) -> SoftmaxInputs:
    """Return what the softmax alone is made of."""
    return SoftmaxInputs(**{name: getattr(x, name) for name in SoftmaxInputs._fields})


def may_change(x: Layer) -> Tensor:
    """Return whether all that the gradients come from are numbers, `[]` (bool); else nothing is to change."""
    if isinstance(x, UpdateInputs):
        return x.loss.isfinite() & x.grad.isfinite()
    # A row whose logits are all -inf has no gradient.
    return (x.grad_lse.isfinite() & x.grad_target.isfinite() & (x.lse.isfinite() | (x.lse == -torch.inf))).all()


def update_by(make: Callable[[Mapping[str, torch.dtype]], dict[str, Tensor]], x: Layer, o: UpdateOptions) -> FeatureGradient:
    """Return the gradient of features, and change weights and biases by theirs; `make` makes those that are wanted."""
    wide = loss_dtype(x.features.dtype)
    wanted = {"weight": wide}
    if o.of_features:
        wanted["features"] = x.features.dtype
    if o.changes_bias:
        wanted["bias"] = wide
    found, counts = make(wanted), may_change(x)
    _change(x, o, counts, x.weight, x.weight_momentum, found["weight"], o.weight_decay, 0)
    if o.changes_bias:
        assert x.bias is not None
        momentum = None if x.bias_momentum is None else x.bias_momentum[:, None]
        _change(x, o, counts, x.bias[:, None], momentum, found["bias"][:, None], 0.0, x.weight.numel())
    return FeatureGradient(found["features"] if o.of_features else x.features.new_empty(0))


def _change(
    x: Layer, o: UpdateOptions, counts: Tensor, values: Tensor, states: Tensor | None, gradient: Tensor, decay: float, first: int
) -> None:
    """Change `[L, n]` values and states in place, piece by piece; `first` counts the first one for rounding."""
    rate, width = x.learning_rate.to(gradient.dtype), values.shape[1]
    rows = max(1, PIECE_ELEMENTS // max(1, width))
    for begin in range(0, values.shape[0], rows):
        some = slice(begin, min(begin + rows, values.shape[0]))
        old, slope = values[some].to(gradient.dtype), gradient[some]
        if decay:
            slope = slope + decay * old
        if states is not None:
            slope = o.momentum * states[some].to(gradient.dtype) + slope
            states[some] = torch.where(counts, slope.to(states.dtype), states[some])
        at = first + torch.arange(some.start * width, some.stop * width, device=values.device).view(-1, width)
        new = rounded(old - rate * slope, values.dtype, stochastic=o.stochastic_rounding, step=x.step, element=at)
        values[some] = torch.where(counts, new, values[some])
