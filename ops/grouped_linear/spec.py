"""The operators of linear layers of groups, and of mixtures of groups.

The gradients of each are made of operators, so all orders are right.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from jagged.ops._shared.linear import COLUMN_SUMS, Rows, Summing
from jagged.ops._shared.matrices import float32_products
from jagged.ops._shared.operator import Differentiable, Operator, operator

Wanted = Mapping[str, torch.dtype]
# Of gradients of weights as one product: numbers that all columns times all columns may be, and rows from which it is faster on
# an H200, in 16 bits and in TF32 (`benchmarks/results/h200/grouped_linear_tiles.json`; of one row of two groups from 16,384).
MOST_WEIGHTS, LEAST_ROWS, LEAST_ROWS_TF32 = 2**18, 16_384, 4_096


class Inputs(NamedTuple):
    """Rows `[N, in]`, which all groups read, or `[N, G, in]`; weights `[G, out, in]`; biases `[G, out]`."""

    x: Differentiable
    weight: Differentiable
    bias: Differentiable | None = None


class Options(NamedTuple):
    """Whether a ReLU follows."""

    relu: bool = False


class Outputs(NamedTuple):
    """`[N, G, out]`, its rows side by side."""

    output: Tensor


class Slopes(NamedTuple):
    """A gradient behind a ReLU, and what the ReLU gave, `[N, F]` both."""

    grad: Differentiable
    kept: Tensor


class Before(NamedTuple):
    """The gradient before the ReLU, `[N, F]`, and its sums `[F]`."""

    before: Tensor
    sums: Tensor


class NoOptions(NamedTuple):
    """None."""


class MixInputs(NamedTuple):
    """Groups' rows `[N, G, D]`, and for each mixture what they count `[N, T, G]`."""

    groups: Differentiable
    weights: Differentiable


class Mixtures(NamedTuple):
    """`[N, T, D]`."""

    mixtures: Tensor


class MixSlopes(NamedTuple):
    """Gradients of mixtures `[N, T, D]`, and what they were made of."""

    grad: Differentiable
    groups: Differentiable
    weights: Differentiable


class MixGradients(NamedTuple):
    """Gradients of the groups `[N, G, D]` and of what they count `[N, T, G]`."""

    of_groups: Tensor
    of_weights: Tensor


def _of_linear(grads: Outputs, x: Inputs, out: Outputs, o: Options, wanted: Wanted, backend: str) -> dict[str, Tensor]:
    grad, shape = grads.output, grads.output.shape[1:]
    rows, weight, found = x.x, x.weight, {}
    # Once, as it is a copy where columns do not lie side by side.
    flat = grad.flatten(1)
    if o.relu:
        flat, sums = RELU_GRADIENT(Slopes(flat, out.output.flatten(1)), NoOptions(), backend)
    elif "bias" in wanted:
        sums = COLUMN_SUMS(Rows(flat), Summing(wanted["bias"]), backend).sums
    if "bias" in wanted:
        found["bias"] = sums.view(shape)
    if rows.dim() == 2:
        if "x" in wanted:
            found["x"] = flat @ weight.flatten(0, 1)
        if "weight" in wanted:
            found["weight"] = (flat.T @ rows).view(weight.shape)
        return found
    grad = flat.view(grad.shape)
    if "x" in wanted:
        found["x"] = GROUPED_LINEAR(Inputs(grad, weight.transpose(1, 2)), Options(), backend).output
    if "weight" in wanted:
        found["weight"] = _of_weights(grad, rows)
    return found


def _of_weights(grad: Tensor, rows: Tensor) -> Tensor:
    """Return `[G, out, in]`, sums over all rows of `grad [N, G, out]` times `rows [N, G, in]`.

    A batched product of few narrow groups leaves most of a GPU idle, as each tile walks over all rows by itself: 784 us for two
    groups of 64 x 128 and 65,536 rows in TF32. Of one product of all columns with all columns the library splits the rows, and
    the blocks of a group with itself are taken from it (43 us).
    """
    num_groups, out, width = *grad.shape[1:], rows.shape[2]
    if num_groups > 1 and num_groups**2 * out * width <= MOST_WEIGHTS and _has_rows(grad, _least_rows(grad)):
        every = grad.flatten(1).T @ rows.flatten(1)
        return every.view(num_groups, out, num_groups, width).diagonal(dim1=0, dim2=2).permute(2, 0, 1).contiguous()
    return torch.bmm(grad.permute(1, 2, 0), rows.transpose(0, 1))


def _has_rows(grad: Tensor, least: float) -> bool:
    """Whether there are so many; not where a graph's data tells how many."""
    if least == math.inf:
        return False
    rows = grad.shape[0]
    if torch.compiler.is_compiling() or isinstance(rows, torch.SymInt):
        from torch.fx.experimental.symbolic_shapes import guard_or_false

        return bool(guard_or_false(rows >= least))
    return rows >= least


def _least_rows(grad: Tensor) -> float:
    """From how many rows on one product of all groups is faster, which has as many times the work."""
    if not grad.is_cuda or grad.dtype.itemsize > 4:
        return math.inf
    if grad.dtype.itemsize == 2:
        return LEAST_ROWS
    # Exact products of float32 take as long as their work.
    return LEAST_ROWS_TF32 if _has_tf32() else math.inf


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_tf32() -> bool:
    """Whether PyTorch's products of float32 are TF32's; which a compiler cannot trace, and is a question of time alone."""
    return float32_products() == "tf32"


def _of_relu_gradient(grads: Before, x: Slopes, out: Before, o: NoOptions, wanted: Wanted, backend: str) -> dict[str, Tensor]:
    given = [of for of in grads if of is not None]
    return {"grad": sum(given[1:], given[0]).masked_fill(x.kept <= 0, 0)}


def _of_mix(grads: Mixtures, x: MixInputs, out: Mixtures, o: NoOptions, wanted: Wanted, backend: str) -> dict[str, Tensor]:
    found = MIX_GRADIENTS(MixSlopes(grads.mixtures, *x), o, backend)
    return {name: of for name, of in zip(MixInputs._fields, found, strict=True) if name in wanted}


def _of_mix_gradients(
    grads: MixGradients, x: MixSlopes, out: MixGradients, o: NoOptions, wanted: Wanted, backend: str
) -> dict[str, Tensor]:
    # Each of both is linear in two of three, so that the gradients are the same two operators.
    groups = torch.zeros_like(x.groups) if grads.of_groups is None else grads.of_groups
    weights = torch.zeros_like(x.weights) if grads.of_weights is None else grads.of_weights
    found = dict(zip(MixInputs._fields, MIX_GRADIENTS(MixSlopes(x.grad, groups, weights), o, backend), strict=True))
    if "grad" in wanted:
        parts = [
            MIX_GROUPS(inputs, o, backend).mixtures for inputs in (MixInputs(groups, x.weights), MixInputs(x.groups, weights))
        ]
        found["grad"] = parts[0] + parts[1]
    return {name: found[name] for name in wanted}


_TORCH = "jagged.ops.grouped_linear.torch_impl"

GROUPED_LINEAR: Operator[Inputs, Options, Outputs] = operator(
    "grouped_linear",
    Inputs,
    Options,
    Outputs,
    shapes=lambda x, o: Outputs(x.x.new_empty(x.x.shape[0], *x.weight.shape[:2])),
    torch=f"{_TORCH}:grouped_linear",
    triton="jagged.ops.grouped_linear.launch:grouped_linear",
    gradient=_of_linear,
    # Where the output is 0, ReLU's slope is, so that nothing before it is kept.
    saved=lambda o: ("x", "weight", "output") if o.relu else ("x", "weight"),
    autocast=Inputs._fields,
)
RELU_GRADIENT: Operator[Slopes, NoOptions, Before] = operator(
    "grouped_relu_gradient",
    Slopes,
    NoOptions,
    Before,
    shapes=lambda x, o: Before(x.grad.new_empty(x.grad.shape), x.grad.new_empty(x.grad.shape[1:])),
    torch=f"{_TORCH}:relu_gradient",
    triton="jagged.ops.grouped_linear.launch:relu_gradient",
    gradient=_of_relu_gradient,
    saved=("kept",),
)
MIX_GROUPS: Operator[MixInputs, NoOptions, Mixtures] = operator(
    "mix_groups",
    MixInputs,
    NoOptions,
    Mixtures,
    shapes=lambda x, o: Mixtures(x.groups.new_empty(*x.weights.shape[:2], x.groups.shape[2])),
    torch=f"{_TORCH}:mix_groups",
    triton="jagged.ops.grouped_linear.mix_kernels:mix_groups",
    gradient=_of_mix,
    saved=MixInputs._fields,
    autocast=MixInputs._fields,
)
MIX_GRADIENTS: Operator[MixSlopes, NoOptions, MixGradients] = operator(
    "mix_groups_gradients",
    MixSlopes,
    NoOptions,
    MixGradients,
    shapes=lambda x, o: MixGradients(x.groups.new_empty(x.groups.shape), x.weights.new_empty(x.weights.shape)),
    torch=f"{_TORCH}:mix_gradients",
    triton="jagged.ops.grouped_linear.mix_kernels:mix_gradients",
    gradient=_of_mix_gradients,
    saved=MixSlopes._fields,
)
