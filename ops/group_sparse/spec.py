"""The operator of linear layers whose labels lie in groups that each read a few columns of the features."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

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
    """`[B, L]`."""

    logits: Tensor


GROUP_SPARSE: Operator[Inputs, Options, Outputs] = operator(
    "group_sparse_linear",
    Inputs,
    Options,
    Outputs,
    shapes=lambda x, o: Outputs(x.features.new_empty(x.features.shape[0], x.weight.shape[0])),
    torch="jagged.ops.group_sparse.torch_impl:forward,backward",
    triton="jagged.ops.group_sparse.kernels:forward,backward",
    saved=Inputs._fields,
    autocast=("features", "weight", "bias"),
)
