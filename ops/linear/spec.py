"""The operators of the linear layer: the rows, and sums of columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from jagged.ops._shared.operator import Differentiable, Operator, operator

Wanted = Mapping[str, torch.dtype]


class Inputs(NamedTuple):
    """Rows `[N, in]`, weight `[out, in]`, bias `[out]`, which may have another dtype."""

    x: Differentiable
    weight: Differentiable
    bias: Differentiable | None = None


class NoOptions(NamedTuple):
    """None."""


class Outputs(NamedTuple):
    """`[N, out]`."""

    output: Tensor


class Rows(NamedTuple):
    """Rows `[N, F]`, of any strides."""

    rows: Differentiable


class Summing(NamedTuple):
    """The dtype of the sums."""

    dtype: torch.dtype


class Sums(NamedTuple):
    """`[F]`."""

    sums: Tensor


def _of_linear(grads: Outputs, x: Inputs, out: Outputs, o: NoOptions, wanted: Wanted, backend: str) -> dict[str, Tensor]:
    grad, found = grads.output, {}
    if "x" in wanted:
        found["x"] = grad @ x.weight
    if "weight" in wanted:
        found["weight"] = grad.T @ x.x
    if "bias" in wanted:
        found["bias"] = COLUMN_SUMS(Rows(grad), Summing(wanted["bias"]), backend).sums
    return found


def _of_sums(grads: Sums, x: Rows, out: Sums, o: Summing, wanted: Wanted, backend: str) -> dict[str, Tensor]:
    return {"rows": grads.sums.to(wanted["rows"]).expand(x.rows.shape)}


_TORCH = "jagged.ops.linear.torch_impl"

LINEAR: Operator[Inputs, NoOptions, Outputs] = operator(
    "linear",
    Inputs,
    NoOptions,
    Outputs,
    shapes=lambda x, o: Outputs(x.x.new_empty(x.x.shape[0], x.weight.shape[0])),
    torch=f"{_TORCH}:linear",
    # The product is PyTorch's; what kernels there are is in the gradient.
    triton=f"{_TORCH}:linear",
    gradient=_of_linear,
    saved=("x", "weight"),
    # The bias is cast inside, so that its gradient is not rounded to autocast's dtype on the way.
    autocast=("x", "weight"),
)
COLUMN_SUMS: Operator[Rows, Summing, Sums] = operator(
    "column_sums",
    Rows,
    Summing,
    Sums,
    shapes=lambda x, o: Sums(x.rows.new_empty(x.rows.shape[1:], dtype=o.dtype)),
    torch=f"{_TORCH}:column_sums",
    triton="jagged.ops.linear.kernels:column_sums",
    gradient=_of_sums,
    saved=(),
)
