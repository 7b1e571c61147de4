"""Public linear layers on rows, with a context of each sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from jagged.ops._shared.backends import resolve_backend
from jagged.ops._shared.linear import linear_rows
from jagged.ops._shared.validation import FLOATS, check_tensor, holds
from jagged.ops.elementwise.api import check_operand, check_rows
from jagged.ops.elementwise.spec import ACTIVATE, COMBINE, CROSS, Activating, Combination, Crossed, Crossing, Hidden, Operands

Activation = Literal["relu", "silu", "gelu"]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "silu": F.silu, "gelu": F.gelu}


def jagged_linear(
    values: Tensor,
    offsets: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    context: Tensor | None = None,
    activation: Activation | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """A linear layer on every row, with a context of the row's sample added and an activation applied.

    `activation(values @ weight.T + bias + context[sample of the row])`. The matrix product is PyTorch's own; context and
    activation are one further pass. With `context = features @ context_weight.T` this is a linear layer on rows that each have
    their sample's features beside them, without these copies.

    Args:
        values: `[S, in]`, float32, bfloat16, float16 or float64 (computed by PyTorch on every device).
        offsets: `[B + 1]`, int32 or int64, from 0 to S.
        weight: `[out, in]`.
        bias: `[out]`, or None.
        context: `[B, out]`, or None. All of the dtype and device of `values`; under `torch.autocast` they are cast to its dtype.
        activation: `"relu"`, `"silu"`, `"gelu"` (the exact one) or None.
        backend: for context and activation: `"torch"`, `"triton"`, or None to choose by device.

    Returns:
        `[S, out]`. Gradients for values, weight, bias and context; with both a context and an activation of the first order only.

    Raises:
        ValueError: shapes or devices that do not fit, an unknown activation.
        TypeError: dtypes other than those above, or that differ.
        RuntimeError: a second derivative of context and activation.

    Example:
        >>> import torch
        >>> from jagged.ops import jagged_linear
        >>> values, offsets = torch.randn(5, 8), torch.tensor([0, 2, 5])
        >>> jagged_linear(values, offsets, torch.randn(4, 8), context=torch.randn(2, 4), activation="silu").shape
        torch.Size([5, 4])
    """
    check_tensor("values", values, "[S, in]", FLOATS)
    check_rows(values, offsets)
    _check_layer(values, values.shape[1], offsets, weight, bias, context, ("weight", "bias"))
    _check_activation(activation)
    return _linear(values, offsets, weight, bias, context, activation, resolve_backend(backend, values))


def jagged_mlp(
    values: Tensor,
    offsets: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None,
    context: Tensor | None = None,
    activation: Activation | None = "relu",
    *,
    backend: str | None = None,
) -> Tensor:
    """Several linear layers on every row, an activation between them, and a context of the row's sample added in the first.

    Args:
        values: `[S, in]`, float32, bfloat16, float16 or float64 (computed by PyTorch on every device).
        offsets: `[B + 1]`, int32 or int64, from 0 to S.
        weights: of each layer `[out_k, in_k]`, as `torch.nn.Linear` keeps them; `in_k` is the layer before's `out`.
        biases: of each layer `[out_k]` or None; None for no biases.
        context: `[B, out_0]`, or None.
        activation: `"relu"`, `"silu"`, `"gelu"` (the exact one) or None, after every layer but the last.
        backend: for context and activation: `"torch"`, `"triton"`, or None to choose by device.

    Returns:
        `[S, out]` of the last layer. Gradients as of `jagged_linear`.

    Raises:
        ValueError: no layer, shapes or devices that do not fit, an unknown activation.
        TypeError: dtypes that are not supported, or that differ.
        RuntimeError: a second derivative of context and activation.

    Example:
        >>> import torch
        >>> from jagged.ops import jagged_mlp
        >>> values, offsets = torch.randn(5, 8), torch.tensor([0, 2, 5])
        >>> jagged_mlp(values, offsets, [torch.randn(16, 8), torch.randn(1, 16)], context=torch.randn(2, 16)).shape
        torch.Size([5, 1])
    """
    if not weights:
        raise ValueError("weights: expected one for each layer, got none")
    biases = [None] * len(weights) if biases is None else biases
    if len(biases) != len(weights):
        raise ValueError(f"biases: expected one (or None) for each of the {len(weights)} layers, got {len(biases)}")
    check_tensor("values", values, "[S, in]", FLOATS)
    check_rows(values, offsets)
    width = values.shape[1]
    for k, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        _check_layer(values, width, offsets, weight, bias, None if k else context, (f"weights[{k}]", f"biases[{k}]"))
        width = weight.shape[0]
    _check_activation(activation)
    chosen, last = resolve_backend(backend, values), len(weights) - 1
    for k, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        values = _linear(values, offsets, weight, bias, None if k else context, activation if k < last else None, chosen)
    return values


def jagged_cross(
    values: Tensor,
    offsets: Tensor,
    context: Tensor,
    own: Tensor,
    residual: Tensor | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """The last step of a cross layer on rows whose first columns are their sample's: `values * x + residual` in one pass.

    x has the context of the row's sample and the row's own columns side by side, and is read from there: no row gets a copy of
    its sample's features. Of the first layer the residual is x itself.

    Args:
        values: `[S, F]`, what the layer makes, `W x_l + b`; float32, bfloat16, float16 or float64 (computed by PyTorch on every
            device).
        offsets: `[B + 1]`, int32 or int64, from 0 to S.
        context: `[B, C]`.
        own: `[S, F - C]`.
        residual: `[S, F]`, x_l, or None for x. All of the dtype and device of `values`; under `torch.autocast` of any
            floating-point dtypes.

    Returns:
        `[S, F]` in the dtype of `values`, of several dtypes in the widest. Gradients of any order; those of `context` are sums
        over the samples' rows, in one order always.

    Raises:
        ValueError: shapes or devices that do not fit.
        TypeError: dtypes other than those above, or that differ.

    Source:
        Wang et al., DCN V2: Improved Deep & Cross Network and Practical Lessons for Web-scale Learning to Rank Systems, WWW
        2021, equation 1.

    Example:
        >>> import torch
        >>> from jagged.ops import jagged_cross
        >>> offsets, context, own = torch.tensor([0, 2, 3]), torch.tensor([[2.0], [3.0]]), torch.tensor([[5.0], [6.0], [7.0]])
        >>> jagged_cross(torch.ones(3, 2), offsets, context, own)
        tensor([[ 4., 10.],
                [ 4., 12.],
                [ 6., 14.]])
    """
    check_tensor("values", values, "[S, F]", FLOATS)
    check_rows(values, offsets)
    total, width = values.shape
    num_samples = offsets.shape[0] - 1
    check_tensor("context", context, "[B, C]", FLOATS)
    if not holds(context.shape[1] <= width):
        raise ValueError(
            f"context: expected at most {width} columns, as many as values {list(values.shape)}, got {context.shape[1]}"
        )
    shapes = {"context": [num_samples, context.shape[1]], "own": [total, width - context.shape[1]], "residual": [total, width]}
    for name, tensor in (("context", context), ("own", own), ("residual", residual)):
        if tensor is None:
            continue
        check_tensor(name, tensor, "[B, C]" if name == "context" else "[S, F]", FLOATS)
        if not all(holds(got == expected) for got, expected in zip(tensor.shape, shapes[name], strict=True)):
            raise ValueError(f"{name}: expected shape {shapes[name]}, got {list(tensor.shape)}")
        check_operand(name, tensor, values)
    return CROSS(Crossed(values, context, own, offsets, residual), Crossing(residual is None), backend).output


def _linear(
    values: Tensor,
    offsets: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    context: Tensor | None,
    activation: Activation | None,
    backend: str,
) -> Tensor:
    hidden = linear_rows(values, weight, bias)
    if context is None:
        return hidden if activation is None else ACTIVATIONS[activation](hidden)
    # Another dtype only under autocast.
    context = context.to(hidden.dtype)
    if activation is None:
        return COMBINE(Operands(hidden, context, offsets), Combination(hidden.shape[0], "add"), backend).output
    return ACTIVATE(Hidden(hidden, context, offsets), Activating(activation), backend).output


def _check_layer(
    values: Tensor, width: int, offsets: Tensor, weight: Tensor, bias: Tensor | None, context: Tensor | None, names: Sequence[str]
) -> None:
    """Check the tensors of a layer that meets rows of a width; `names` are those of weight and bias."""
    check_tensor(names[0], weight, "[out, in]", FLOATS)
    num_outputs = weight.shape[0]
    shapes = [num_outputs, width], [num_outputs], [offsets.shape[0] - 1, num_outputs]
    for name, tensor, shape in zip((*names, "context"), (weight, bias, context), shapes, strict=True):
        if tensor is None:
            continue
        check_tensor(name, tensor, "[out]" if len(shape) == 1 else "[out, in]" if tensor is weight else "[B, out]", FLOATS)
        if not all(holds(got == expected) for got, expected in zip(tensor.shape, shape, strict=True)):
            raise ValueError(f"{name}: expected shape {shape}, got {list(tensor.shape)}")
        check_operand(name, tensor, values)


def _check_activation(activation: str | None) -> None:
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(f"activation: got {activation!r}, expected one of {', '.join(map(repr, ACTIVATIONS))} or None")
