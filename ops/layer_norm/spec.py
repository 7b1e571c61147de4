"""The operators of layer normalisation: the rows, and their gradients."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from jagged.ops._shared.operator import Differentiable, Operator, operator

Wanted = Mapping[str, torch.dtype]

#: The widest row of the kernels.
WIDEST = 1024


class Inputs(NamedTuple):
    """Rows `[N, D]`; weight and bias `[D]`."""

    x: Differentiable
    weight: Differentiable
    bias: Differentiable


class Options(NamedTuple):
    """What is added to the variance, and the output's dtype."""

    eps: float
    dtype: torch.dtype


class Outputs(NamedTuple):
    """`[N, D]`."""

    output: Tensor


class Slopes(NamedTuple):
    """The gradient of the output `[N, D]`, in its dtype, what it was made of, and a gradient of the rows to add to theirs."""

    grad: Differentiable
    x: Differentiable
    weight: Differentiable
    residual: Differentiable | None = None


class Epsilon(NamedTuple):
    """What is added to the variance."""

    eps: float


class Found(NamedTuple):
    """Gradients of the rows `[N, D]`, of weight and bias `[D]`."""

    of_x: Tensor
    of_weight: Tensor
    of_bias: Tensor


def _of_layer_norm(grads: Outputs, x: Inputs, out: Outputs, o: Options, wanted: Wanted, backend: str) -> dict[str, Tensor]:
    found = LAYER_NORM_GRADIENTS(Slopes(grads.output, x.x, x.weight), Epsilon(o.eps), backend)
    return {name: of for name, of in zip(Inputs._fields, found, strict=True) if name in wanted}


def _of_gradients(grads: Found, x: Slopes, out: Found, o: Epsilon, wanted: Wanted, backend: str) -> dict[str, Tensor]:
    from jagged.ops.layer_norm.torch_impl import gradients_of

    # A derivative of these is rare, so PyTorch makes it.
    primals = [of for of in x if of is not None]
    values, pull = torch.func.vjp(partial(gradients_of, eps=o.eps), *primals)  # type: ignore[misc]
    given = tuple(torch.zeros_like(of) if grad is None else grad for grad, of in zip(grads, values, strict=True))
    return {name: of for name, of in zip(Slopes._fields[: len(primals)], pull(given), strict=True) if name in wanted}


_TORCH, _TRITON = "jagged.ops.layer_norm.torch_impl", "jagged.ops.layer_norm.kernels"

LAYER_NORM: Operator[Inputs, Options, Outputs] = operator(
    "layer_norm",
    Inputs,
    Options,
    Outputs,
    shapes=lambda x, o: Outputs(x.x.new_empty(x.x.shape, dtype=o.dtype)),
    torch=f"{_TORCH}:layer_norm",
    triton=f"{_TRITON}:layer_norm",
    gradient=_of_layer_norm,
    saved=("x", "weight"),
)
LAYER_NORM_GRADIENTS: Operator[Slopes, Epsilon, Found] = operator(
    "layer_norm_gradients",
    Slopes,
    Epsilon,
    Found,
    shapes=lambda x, o: Found(x.x.new_empty(x.x.shape), *(x.weight.new_empty(x.weight.shape) for _ in range(2))),
    torch=f"{_TORCH}:gradients",
    triton=f"{_TRITON}:gradients",
    gradient=_of_gradients,
    saved=Slopes._fields,
)
