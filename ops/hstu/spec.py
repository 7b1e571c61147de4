"""The operators of an HSTU block around its attention: what it reads, and what becomes of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from jagged.ops._shared.linear import COLUMN_SUMS, Rows, Summing
from jagged.ops._shared.operator import Differentiable, Operator, operator

Wanted = Mapping[str, torch.dtype]

#: The widest group of the kernels that normalise.
WIDEST = 1024


class Inputs(NamedTuple):
    """Rows `[N, D]`; weight `[4 * H * d, D]` of gates, values, queries and keys in this order, bias `[4 * H * d]`."""

    x: Differentiable
    weight: Differentiable
    bias: Differentiable


class Options(NamedTuple):
    """H, and whether backward makes the product again, which else is kept."""

    num_heads: int
    recompute: bool = False


class Outputs(NamedTuple):
    """`[N, H, d]` each, and what SiLU is applied to, `[N, 4 * H * d]`, empty where it is made again."""

    u: Tensor
    v: Tensor
    q: Tensor
    k: Tensor
    before: Tensor


class Slopes(NamedTuple):
    """Gradients of gates, values, queries and keys, `[N, H, d]`, and what SiLU was applied to."""

    grad_u: Tensor
    grad_v: Tensor
    grad_q: Tensor
    grad_k: Tensor
    before: Tensor


class NoOptions(NamedTuple):
    """None."""


class Before(NamedTuple):
    """The gradient before SiLU, `[N, 4 * H * d]`, and its sums over rows, float32 at least."""

    grad: Tensor
    sums: Tensor


class OutputInputs(NamedTuple):
    """What was attended, and gates, `[N, W]`; rows to add to `[N, D]`; the norm's weight and bias `[W]`; weight `[D, W]`, or
    `[D, 3 W]` behind `concat`, and bias `[D]`; a seed."""

    attended: Differentiable
    gate: Differentiable
    residual: Differentiable
    norm_weight: Differentiable
    norm_bias: Differentiable | None
    weight: Differentiable
    bias: Differentiable
    dropout_seed: Tensor | None = None


class OutputOptions(NamedTuple):
    """How a row is normalised: what is added, groups of columns, whether their mean is taken off; and what follows."""

    eps: float
    num_groups: int = 1
    centred: bool = True
    concat: bool = False
    dropout_p: float = 0.0


class Added(NamedTuple):
    """`[N, D]`."""

    output: Tensor


class GateSlopes(NamedTuple):
    """The gradient of what the product reads, `[N, W]` or `[N, 3 W]`, and what that was made of."""

    grad: Tensor
    attended: Tensor
    gate: Tensor
    norm_weight: Tensor
    norm_bias: Tensor | None
    dropout_seed: Tensor | None


class GateGradients(NamedTuple):
    """Gradients, those of the norm's parameters in float32 at least, and what the product reads."""

    of_attended: Tensor
    of_gate: Tensor
    of_norm_weight: Tensor
    of_norm_bias: Tensor
    gated: Tensor


def _shapes(x: Inputs, o: Options) -> Outputs:
    total, columns = x.x.shape[0], x.weight.shape[0]
    u, v, q, k = (x.x.new_empty(total, o.num_heads, columns // (4 * o.num_heads)) for _ in range(4))
    return Outputs(u, v, q, k, x.x.new_empty((0,) if o.recompute else (total, columns)))


def _of_projection(grads: Outputs, x: Inputs, out: Outputs, o: Options, wanted: Wanted, backend: str) -> dict[str, Tensor]:
    before = torch.nn.functional.linear(x.x, x.weight, x.bias.to(x.x.dtype)) if o.recompute else out.before
    # Of a part that nobody has read there is none.
    u, v, q, k = (x.x.new_zeros(of.shape) if grad is None else grad for grad, of in zip(grads[:4], out[:4], strict=True))
    grad, sums = PROJECTION_GRADIENT(Slopes(u, v, q, k, before), NoOptions(), backend)
    found = {}
    if "x" in wanted:
        found["x"] = grad @ x.weight
    if "weight" in wanted:
        found["weight"] = grad.T @ x.x
    if "bias" in wanted:
        found["bias"] = sums.to(wanted["bias"])
    return found


def _of_output(grads: Added, x: OutputInputs, out: Added, o: OutputOptions, wanted: Wanted, backend: str) -> dict[str, Tensor]:
    grad = grads.output.to(x.weight.dtype)
    found = GATE_GRADIENTS(
        GateSlopes(grad @ x.weight, x.attended, x.gate, x.norm_weight, x.norm_bias, x.dropout_seed), o, backend
    )
    every = {
        "attended": found.of_attended,
        "gate": found.of_gate,
        "residual": grads.output,
        "norm_weight": found.of_norm_weight,
        "norm_bias": found.of_norm_bias,
    }
    if "weight" in wanted:
        every["weight"] = grad.T @ found.gated
    if "bias" in wanted:
        every["bias"] = COLUMN_SUMS(Rows(grads.output), Summing(wanted["bias"]), backend).sums
    return {name: every[name].to(dtype) for name, dtype in wanted.items()}


def _gradient_shapes(x: GateSlopes, o: OutputOptions) -> GateGradients:
    exact = torch.promote_types(x.norm_weight.dtype, torch.float32)
    weight, bias = (x.norm_weight.new_empty(x.norm_weight.shape, dtype=exact) for _ in range(2))
    return GateGradients(
        x.attended.new_empty(x.attended.shape), x.gate.new_empty(x.gate.shape), weight, bias, x.grad.new_empty(x.grad.shape)
    )


_TORCH, _TRITON = "jagged.ops.hstu.torch_impl", "jagged.ops.hstu.launch"

PROJECTION: Operator[Inputs, Options, Outputs] = operator(
    "hstu_projection",
    Inputs,
    Options,
    Outputs,
    shapes=_shapes,
    torch=f"{_TORCH}:projection",
    triton=f"{_TRITON}:projection",
    gradient=_of_projection,
    is_first_order=True,
    saved=lambda o: Inputs._fields if o.recompute else ("x", "weight", "before"),
    # The bias is read in its own dtype, so that its gradient is not rounded to autocast's on the way.
    autocast=("x", "weight"),
)
PROJECTION_GRADIENT: Operator[Slopes, NoOptions, Before] = operator(
    "hstu_projection_gradient",
    Slopes,
    NoOptions,
    Before,
    shapes=lambda x, o: Before(
        x.before.new_empty(x.before.shape),
        x.before.new_empty(x.before.shape[1:], dtype=torch.promote_types(x.before.dtype, torch.float32)),
    ),
    torch=f"{_TORCH}:projection_gradient",
    triton=f"{_TRITON}:projection_gradient",
)
OUTPUT: Operator[OutputInputs, OutputOptions, Added] = operator(
    "hstu_output",
    OutputInputs,
    OutputOptions,
    Added,
    shapes=lambda x, o: Added(
        x.residual.new_empty(x.residual.shape, dtype=torch.promote_types(x.residual.dtype, x.weight.dtype))
    ),
    torch=f"{_TORCH}:output",
    triton=f"{_TRITON}:output",
    gradient=_of_output,
    is_first_order=True,
    saved=("attended", "gate", "norm_weight", "norm_bias", "weight", "dropout_seed"),
    autocast=("attended", "gate", "weight"),
)
GATE_GRADIENTS: Operator[GateSlopes, OutputOptions, GateGradients] = operator(
    "hstu_gate_gradients",
    GateSlopes,
    OutputOptions,
    GateGradients,
    shapes=_gradient_shapes,
    torch=f"{_TORCH}:gate_gradients",
    triton=f"{_TRITON}:gate_gradients",
)
