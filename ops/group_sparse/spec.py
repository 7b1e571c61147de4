"""The operators of linear layers whose labels lie in groups that each read a few columns of the features."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from jagged.ops._shared.label_loss import LossOptions, LossOutputs, loss_dtype
from jagged.ops._shared.operator import Differentiable, Operator, operator


class Inputs(NamedTuple):
    """Features `[B, H]`, weights `[L, F]`, each group's columns, offsets of its labels `[K + 1]`, and a bias `[L]`.

    Columns are `[K, F]`, or `[K]`: the first of F adjacent ones.
    """

    features: Differentiable
    weight: Differentiable
    supports: Tensor
    group_offsets: Tensor
    bias: Differentiable | None = None


def columns_of_groups(x: Any) -> Tensor:
    """Return the columns `[K, F]` that groups of a layer read, side by side in memory."""
    if x.supports.dim() == 2:
        return x.supports.contiguous()
    width = x.weight.shape[1]
    first = x.supports.to(torch.int32).clamp(0, x.features.shape[1] - width)
    return first[:, None] + torch.arange(width, dtype=torch.int32, device=first.device)


class Options(NamedTuple):
    """None."""


class Outputs(NamedTuple):
    """`[B, L]`, a label's numbers side by side."""

    logits: Tensor


GROUP_SPARSE: Operator[Inputs, Options, Outputs] = operator(
    "group_sparse_linear",
    Inputs,
    Options,
    Outputs,
    shapes=lambda x, o: Outputs(x.features.new_empty(x.weight.shape[0], x.features.shape[0]).t()),
    torch="jagged.ops.group_sparse.torch_impl:forward,backward",
    triton="jagged.ops.group_sparse.kernels:forward,backward",
    saved=Inputs._fields,
    autocast=("features", "weight", "bias"),
)


class LossInputs(NamedTuple):
    """A layer as in `Inputs`; positives, rows and their weights as in `LabelSets`; and what labels weigh, `[L]`.

    `positive_offsets` `[K + 1]` says which positives are of labels of which group.
    """

    features: Differentiable
    weight: Differentiable
    supports: Tensor
    group_offsets: Tensor
    positives: Tensor
    rows: Tensor
    row_weight: Tensor
    positive_offsets: Tensor
    bias: Differentiable | None = None
    label_weight: Tensor | None = None


GROUP_SPARSE_BCE: Operator[LossInputs, LossOptions, LossOutputs] = operator(
    "group_sparse_bce",
    LossInputs,
    LossOptions,
    LossOutputs,
    shapes=lambda x, o: LossOutputs(x.features.new_empty((), dtype=loss_dtype(x.features.dtype))),
    torch="jagged.ops.group_sparse.torch_impl:bce_forward,bce_backward",
    triton="jagged.ops.group_sparse.bce_kernels:forward,backward",
    saved=LossInputs._fields,
    autocast=("features", "weight", "bias"),
)


class UpdatingInputs(NamedTuple):
    """As `LossInputs`; and an optimizer's tensors, of which a layer without momentum has no states.

    `step_before` is a compiled graph's copy of `step` at forward.
    """

    features: Differentiable
    weight: Differentiable
    supports: Tensor
    group_offsets: Tensor
    positives: Tensor
    rows: Tensor
    row_weight: Tensor
    positive_offsets: Tensor
    bias: Differentiable | None
    label_weight: Tensor | None
    weight_momentum: Tensor | None
    bias_momentum: Tensor | None
    step: Tensor
    learning_rate: Tensor
    step_before: Tensor | None


class UpdatingOptions(NamedTuple):
    """The loss's, 0 of a softmax; an update's `Rule`; how often the weights had changed at forward, None in a compiled graph."""

    label_smoothing: float
    momentum: float
    weight_decay: float
    stochastic_rounding: bool
    version: int | None


class UpdateInputs(NamedTuple):
    """The gradient of the loss, the loss, and what it was made of; `step` counts this update already."""

    grad: Tensor
    loss: Tensor
    features: Tensor
    weight: Tensor
    supports: Tensor
    group_offsets: Tensor
    positives: Tensor
    rows: Tensor
    row_weight: Tensor
    positive_offsets: Tensor
    bias: Tensor | None
    label_weight: Tensor | None
    weight_momentum: Tensor | None
    bias_momentum: Tensor | None
    step: Tensor
    learning_rate: Tensor


class UpdateOptions(NamedTuple):
    """As `UpdatingOptions`; whether biases change, too, and whether the gradient of features is wanted."""

    label_smoothing: float
    momentum: float
    weight_decay: float
    stochastic_rounding: bool
    changes_bias: bool
    of_features: bool


class FeatureGradient(NamedTuple):
    """`[B, H]`, in the dtype of the features, or empty where it is not wanted."""

    gradient: Tensor


GROUP_SPARSE_BCE_UPDATE: Operator[UpdateInputs, UpdateOptions, FeatureGradient] = operator(
    "group_sparse_bce_update",
    UpdateInputs,
    UpdateOptions,
    FeatureGradient,
    shapes=lambda x, o: FeatureGradient(x.features.new_empty(x.features.shape if o.of_features else 0)),
    torch="jagged.ops.group_sparse.torch_impl:bce_update",
    triton="jagged.ops.group_sparse.bce_kernels:update",
    mutates=("weight", "bias", "weight_momentum", "bias_momentum"),
)


def _updated(
    update: Operator[Any, UpdateOptions, FeatureGradient], inputs: Any, x: Any, o: UpdatingOptions,
    wanted: dict[str, torch.dtype], backend: str, loss: str,
) -> dict[str, Tensor]:  # fmt: skip
    """Return the gradient of features, and change weights and biases in place of theirs."""
    message = (
        "weight: it has changed since the loss was computed, whose gradient needs it as it was; call backward of one loss before "
        f"the next is computed, or put all rows into one call of {loss}"
    )
    if x.step_before is not None:
        torch._assert_async(torch.eq(x.step, x.step_before), message)
    elif x.weight._version != o.version:
        raise RuntimeError(message)
    of_features = "features" in wanted
    x.step.add_(1)
    gradient = update(inputs, UpdateOptions(*o[:-1], "bias" in wanted, of_features), backend).gradient
    # Kernels count no change of their own.
    torch.autograd.graph.increment_version(x.weight)
    return {"features": gradient} if of_features else {}


def _update_of_bce(
    grads: LossOutputs, x: UpdatingInputs, out: LossOutputs, o: UpdatingOptions, wanted: dict[str, torch.dtype], backend: str
) -> dict[str, Tensor]:
    assert grads.loss is not None
    inputs = UpdateInputs(grads.loss, out.loss, *x[:-1])
    return _updated(GROUP_SPARSE_BCE_UPDATE, inputs, x, o, wanted, backend, "group_sparse_bce")


# What updates change: that of a batch before must not be taken for a mistake.
_UPDATED = ("weight", "bias", "weight_momentum", "bias_momentum", "step", "learning_rate")


GROUP_SPARSE_BCE_UPDATING: Operator[UpdatingInputs, UpdatingOptions, LossOutputs] = operator(
    "group_sparse_bce_updating",
    UpdatingInputs,
    UpdatingOptions,
    LossOutputs,
    shapes=lambda x, o: LossOutputs(x.features.new_empty((), dtype=loss_dtype(x.features.dtype))),
    torch="jagged.ops.group_sparse.torch_impl:updating_forward",
    triton="jagged.ops.group_sparse.bce_kernels:updating_forward",
    gradient=_update_of_bce,
    is_first_order=True,
    unchecked=_UPDATED,
    title="group_sparse_bce",
)


class SoftmaxInputs(NamedTuple):
    """A layer as in `Inputs`; positives and rows as in `LabelSets`, `positive_offsets` as in `LossInputs`; rows that count `[B]`.

    A label that a row has twice is one of its positives.
    """

    features: Differentiable
    weight: Differentiable
    supports: Tensor
    group_offsets: Tensor
    positives: Tensor
    rows: Tensor
    positive_offsets: Tensor
    bias: Differentiable | None = None
    row_mask: Tensor | None = None


class SoftmaxOutputs(NamedTuple):
    """Of each row, `[B]`, float32 or float64: log-sum-exp of all logits, and the sum of its positives'. Both are 0 where masked.

    Without labels the log-sum-exp is -inf.
    """

    lse: Tensor
    target: Tensor


def _softmax_shapes(x: Any, o: Options) -> SoftmaxOutputs:
    lse = x.features.new_empty(x.features.shape[0], dtype=loss_dtype(x.features.dtype))
    return SoftmaxOutputs(lse, lse.new_empty(lse.shape))


GROUP_SPARSE_SOFTMAX: Operator[SoftmaxInputs, Options, SoftmaxOutputs] = operator(
    "group_sparse_cross_entropy",
    SoftmaxInputs,
    Options,
    SoftmaxOutputs,
    shapes=_softmax_shapes,
    torch="jagged.ops.group_sparse.torch_impl:softmax_forward,softmax_backward",
    triton="jagged.ops.group_sparse.softmax_kernels:forward,backward",
    saved=(*SoftmaxInputs._fields, "lse"),
    autocast=("features", "weight", "bias"),
)


class SoftmaxUpdatingInputs(NamedTuple):
    """As `SoftmaxInputs`; and an optimizer's tensors, as in `UpdatingInputs`."""

    features: Differentiable
    weight: Differentiable
    supports: Tensor
    group_offsets: Tensor
    positives: Tensor
    rows: Tensor
    positive_offsets: Tensor
    bias: Differentiable | None
    row_mask: Tensor | None
    weight_momentum: Tensor | None
    bias_momentum: Tensor | None
    step: Tensor
    learning_rate: Tensor
    step_before: Tensor | None


class SoftmaxUpdateInputs(NamedTuple):
    """The gradients of what the softmax gave, its log-sum-exp, and what it was made of; `step` counts this update already."""

    grad_lse: Tensor
    grad_target: Tensor
    lse: Tensor
    features: Tensor
    weight: Tensor
    supports: Tensor
    group_offsets: Tensor
    positives: Tensor
    rows: Tensor
    positive_offsets: Tensor
    bias: Tensor | None
    row_mask: Tensor | None
    weight_momentum: Tensor | None
    bias_momentum: Tensor | None
    step: Tensor
    learning_rate: Tensor


GROUP_SPARSE_SOFTMAX_UPDATE: Operator[SoftmaxUpdateInputs, UpdateOptions, FeatureGradient] = operator(
    "group_sparse_cross_entropy_update",
    SoftmaxUpdateInputs,
    UpdateOptions,
    FeatureGradient,
    shapes=lambda x, o: FeatureGradient(x.features.new_empty(x.features.shape if o.of_features else 0)),
    torch="jagged.ops.group_sparse.torch_impl:softmax_update",
    triton="jagged.ops.group_sparse.softmax_kernels:update",
    mutates=("weight", "bias", "weight_momentum", "bias_momentum"),
)


def _update_of_softmax(
    grads: SoftmaxOutputs, x: SoftmaxUpdatingInputs, out: SoftmaxOutputs, o: UpdatingOptions, wanted: dict[str, torch.dtype],
    backend: str,
) -> dict[str, Tensor]:  # fmt: skip
    of_lse, of_target = (torch.zeros_like(out.lse) if grad is None else grad for grad in grads)
    inputs = SoftmaxUpdateInputs(of_lse, of_target, out.lse, *x[:-1])
    return _updated(GROUP_SPARSE_SOFTMAX_UPDATE, inputs, x, o, wanted, backend, "group_sparse_cross_entropy")


GROUP_SPARSE_SOFTMAX_UPDATING: Operator[SoftmaxUpdatingInputs, UpdatingOptions, SoftmaxOutputs] = operator(
    "group_sparse_cross_entropy_updating",
    SoftmaxUpdatingInputs,
    UpdatingOptions,
    SoftmaxOutputs,
    shapes=lambda x, o: _softmax_shapes(x, Options()),
    torch="jagged.ops.group_sparse.torch_impl:softmax_updating_forward",
    triton="jagged.ops.group_sparse.softmax_kernels:updating_forward",
    gradient=_update_of_softmax,
    is_first_order=True,
    unchecked=_UPDATED,
    title="group_sparse_cross_entropy",
)
