"""The operators of softmax, by samples' rows and by the rows or columns of their blocks.

Each has a gradient, `weights * (grad - sum(weights * grad))`, that is an operator too, with a gradient of its own: all orders are
right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jagged.ops._shared.operator import Differentiable, Operator, operator


class Inputs(NamedTuple):
    """Scores `[S, T]`, and offsets `[B + 1]`."""

    values: Differentiable
    offsets: Tensor


class PairInputs(NamedTuple):
    """Scores `[P]` of blocks with the rows of `a_offsets` and the columns of `b_offsets`, None for square ones."""

    values: Differentiable
    a_offsets: Tensor
    b_offsets: Tensor | None
    pair_offsets: Tensor | None


class Options(NamedTuple):
    """None."""


class PairOptions(NamedTuple):
    """Whether columns sum to 1, not rows."""

    by_columns: bool


class Weights(NamedTuple):
    """In the shape and dtype of the scores."""

    weights: Tensor


class BackwardInputs(NamedTuple):
    """The gradient of the weights, and what they were."""

    grad: Differentiable
    weights: Differentiable
    offsets: Tensor


class PairBackwardInputs(NamedTuple):
    """The gradient of the weights, and what they were."""

    grad: Differentiable
    weights: Differentiable
    a_offsets: Tensor
    b_offsets: Tensor | None
    pair_offsets: Tensor | None


class Gradient(NamedTuple):
    """Of the scores."""

    scores: Tensor


def _of_values(
    grads: Weights, x: Any, out: Weights, o: Any, wanted: Mapping[str, torch.dtype], backend: str
) -> dict[str, Tensor]:
    backward: Any = SOFTMAX_BACKWARD if isinstance(x, Inputs) else PAIR_SOFTMAX_BACKWARD
    inputs: Any = BackwardInputs if isinstance(x, Inputs) else PairBackwardInputs
    return {"values": backward(inputs(grads.weights, out.weights, *x[1:]), o, backend).scores}


def _of_backward(operator_: Callable[[], Any]) -> Callable[..., dict[str, Tensor]]:
    def gradient(grads: Gradient, x: Any, out: Any, o: Any, wanted: Mapping[str, torch.dtype], backend: str) -> dict[str, Tensor]:
        backward, upstream = operator_(), grads.scores

        def sums(values: Tensor) -> Tensor:
            # Weights of 1 leave the sum of each vector taken from its elements.
            ones = torch.ones_like(x.weights)
            return values - backward(x._replace(grad=values, weights=ones), o, backend).scores

        found = {}
        if "grad" in wanted:
            # It is symmetric in the gradient.
            found["grad"] = backward(x._replace(grad=upstream), o, backend).scores
        if "weights" in wanted:
            found["weights"] = upstream * (x.grad - sums(x.weights * x.grad)) - x.grad * sums(x.weights * upstream)
        return found

    return gradient


SOFTMAX = operator(
    "jagged_softmax",
    Inputs,
    Options,
    Weights,
    shapes=lambda x, o: Weights(x.values.new_empty(x.values.shape)),
    torch="jagged.ops.softmax.torch_impl:softmax",
    triton="jagged.ops.softmax.kernels:softmax",
    gradient=_of_values,
    saved=("offsets", "weights"),
)
SOFTMAX_BACKWARD: Operator[BackwardInputs, Options, Gradient] = operator(
    "jagged_softmax_backward",
    BackwardInputs,
    Options,
    Gradient,
    shapes=lambda x, o: Gradient(x.weights.new_empty(x.weights.shape)),
    torch="jagged.ops.softmax.torch_impl:softmax_backward",
    triton="jagged.ops.softmax.kernels:softmax_backward",
    gradient=_of_backward(lambda: SOFTMAX_BACKWARD),
    saved=("grad", "weights", "offsets"),
)
PAIR_SOFTMAX = operator(
    "jagged2_softmax",
    PairInputs,
    PairOptions,
    Weights,
    shapes=lambda x, o: Weights(x.values.new_empty(x.values.shape)),
    torch="jagged.ops.softmax.torch_impl:pair_softmax",
    triton="jagged.ops.softmax.pair_kernels:pair_softmax",
    gradient=_of_values,
    saved=("a_offsets", "b_offsets", "pair_offsets", "weights"),
)
PAIR_SOFTMAX_BACKWARD: Operator[PairBackwardInputs, PairOptions, Gradient] = operator(
    "jagged2_softmax_backward",
    PairBackwardInputs,
    PairOptions,
    Gradient,
    shapes=lambda x, o: Gradient(x.weights.new_empty(x.weights.shape)),
    torch="jagged.ops.softmax.torch_impl:pair_softmax_backward",
    triton="jagged.ops.softmax.pair_kernels:pair_softmax_backward",
    gradient=_of_backward(lambda: PAIR_SOFTMAX_BACKWARD),
    saved=("grad", "weights", "a_offsets", "b_offsets", "pair_offsets"),
)
