"""The linear layer of rows, which several families have: its operators, and the choice between them and PyTorch's own layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from jagged.ops._shared.operator import Differentiable, Operator, operator

Wanted = Mapping[str, torch.dtype]
#: Rows from which on the sums of their columns are made by a kernel; of fewer PyTorch's take the GPU as long, and the host less.
LEAST_ROWS = 8_192


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


def layer(x: Inputs, o: NoOptions) -> Outputs:
    """Compute the layer by PyTorch, on every device."""
    bias = None if x.bias is None else x.bias.to(x.x.dtype)
    return Outputs(torch.nn.functional.linear(x.x, x.weight, bias))


def column_sums(x: Rows, o: Summing) -> Sums:
    """Compute the sums by PyTorch, which adds 16 bits up in float32."""
    return Sums(x.rows.sum(0, dtype=torch.promote_types(x.rows.dtype, o.dtype)).to(o.dtype))


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


_TORCH = "jagged.ops._shared.linear"

LINEAR: Operator[Inputs, NoOptions, Outputs] = operator(
    "linear",
    Inputs,
    NoOptions,
    Outputs,
    shapes=lambda x, o: Outputs(x.x.new_empty(x.x.shape[0], x.weight.shape[0])),
    torch=f"{_TORCH}:layer",
    # The product is PyTorch's; what kernels there are is in the gradient.
    triton=f"{_TORCH}:layer",
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
    triton="jagged.ops._shared.column_sums:column_sums",
    gradient=_of_sums,
    saved=(),
)


def linear_rows(x: Tensor, weight: Tensor, bias: Tensor | None, backend: str | None = None) -> Tensor:
    """Return `x @ weight.T + bias` for x `[..., in]`: PyTorch's function, or where the sums of columns have a kernel `LINEAR`."""
    if backend is None and not _has_slow_sum(x, weight, bias):
        return torch.nn.functional.linear(x, weight, bias)
    rows = x.flatten(0, -2) if x.dim() > 1 else x[None]
    output = LINEAR(Inputs(rows, weight, bias), NoOptions(), backend).output
    return output if x.dim() == 2 else output.view(*x.shape[:-1], weight.shape[0])


def _is_on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def _has_slow_sum(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the gradient of the bias will be a sum that PyTorch makes slowly; a compiler fuses it by itself."""
    if bias is None or not _is_on_gpu(x) or x.dtype == torch.float64:
        return False
    # PyTorch's layer has forward mode and rules for transforms. It is what modes and tracers know, and these may not know how
    # many rows there are.
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state() is not None:
        return False
    if forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    # The operator keeps rows and weight, whichever gradients are asked for.
    if not torch.is_grad_enabled() or not all(of.requires_grad and type(of) in (Tensor, Parameter) for of in (x, weight, bias)):
        return False
    return x.numel() >= LEAST_ROWS * max(x.shape[-1], 1)
