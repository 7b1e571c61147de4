"""The operators of linear layers whose labels lie in groups that each read a few columns of the features."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from jagged.ops._shared.label_loss import LossOptions, LossOutputs, loss_dtype
from jagged.ops._shared.operator import Differentiable, Operator, operator


class Inputs(NamedTuple):
    """Features `[B, H]`, weights `[L, F]`, each group's columns `[K, F]`, offsets of its labels `[K + 1]`, and a bias `[L]`."""

    features: Differentiable
    weight: Differentiable
    supports: Tensor
    group_offsets: Tensor
    bias: Differentiable | None = None


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


def _softmax_shapes(x: SoftmaxInputs, o: Options) -> SoftmaxOutputs:
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
