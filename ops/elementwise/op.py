"""Public sums, products, differences and linear layers, their gradients and their operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from jagged.ops._shared.autograd import apply_in_backward, first_order
from jagged.ops._shared.offsets import scan_pairs
from jagged.ops._shared.registration import define_operator, resolve_backend
from jagged.ops._shared.validation import FLOATS, check_offsets, check_same, check_tensor, holds, resolve_total
from jagged.ops.elementwise import torch_impl

Activation = Literal["relu", "silu", "gelu"]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "silu": F.silu, "gelu": F.gelu}

_combine = define_operator(
    "jagged_dense_combine",
    "(Tensor? values, Tensor dense, Tensor offsets, SymInt total, str operation, str backend) -> Tensor",
    torch_impl=torch_impl.combine,
    triton_impl="jagged.ops.elementwise.kernels:combine",
    fake=lambda values, dense, offsets, total, operation, backend: dense.new_empty(total, dense.shape[-1]),
)
_collect = define_operator(
    "jagged_dense_collect",
    "(Tensor values, Tensor? factor, Tensor offsets, SymInt? length, str backend) -> Tensor",
    torch_impl=torch_impl.collect,
    triton_impl="jagged.ops.elementwise.kernels:collect",
    fake=lambda values, factor, offsets, length, backend: values.new_empty(
        offsets.shape[0] - 1, *(() if length is None else (length,)), values.shape[1]
    ),
)
_activate_backward = define_operator(
    "jagged_activate_backward",
    "(Tensor grad, Tensor saved, Tensor context, Tensor offsets, str activation, str backend) -> (Tensor, Tensor)",
    torch_impl=torch_impl.activate_backward,
    triton_impl="jagged.ops.elementwise.kernels:activate_backward",
    fake=lambda grad, saved, context, offsets, activation, backend: (
        grad.new_empty(grad.shape),
        context.new_empty(context.shape),
    ),
)
_pairwise_difference = define_operator(
    "jagged_pairwise_difference",
    "(Tensor values, Tensor offsets, SymInt total, str backend) -> Tensor",
    torch_impl=torch_impl.pairwise_difference,
    triton_impl="jagged.ops.elementwise.kernels:pairwise_difference",
    fake=lambda values, offsets, total, backend: values.new_empty(total),
)
_pairwise_difference_backward = define_operator(
    "jagged_pairwise_difference_backward",
    "(Tensor grad, Tensor offsets, SymInt num_rows, str backend) -> Tensor",
    torch_impl=torch_impl.pairwise_difference_backward,
    triton_impl="jagged.ops.elementwise.kernels:pairwise_difference_backward",
    fake=lambda grad, offsets, num_rows, backend: grad.new_empty(num_rows),
)


class AddFunction(torch.autograd.Function):
    """Add each row's dense operand to its values, which may be None for zeros; the dense gradient is collected."""

    @staticmethod
    def forward(ctx: Any, values: Tensor | None, dense: Tensor, offsets: Tensor, total: int, backend: str) -> Tensor:
        ctx.save_for_backward(offsets)
        ctx.length, ctx.backend = _length(dense), backend
        return _combine(values, dense, offsets, total, "add", backend)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (offsets,) = ctx.saved_tensors
        grad_dense = None
        if ctx.needs_input_grad[1]:
            grad_dense = apply_in_backward(CollectFunction, grad, None, offsets, ctx.length, ctx.backend)
        return grad if ctx.needs_input_grad[0] else None, grad_dense, None, None, None


class MulFunction(torch.autograd.Function):
    """Multiply values by each row's dense operand."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, dense: Tensor, offsets: Tensor, backend: str) -> Tensor:
        ctx.save_for_backward(values, dense, offsets)
        ctx.backend = backend
        return _combine(values, dense, offsets, values.shape[0], "mul", backend)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        values, dense, offsets = ctx.saved_tensors
        grad_values = grad_dense = None
        if ctx.needs_input_grad[0]:
            grad_values = apply_in_backward(MulFunction, grad, dense, offsets, ctx.backend)
        if ctx.needs_input_grad[1]:
            grad_dense = apply_in_backward(CollectFunction, grad, values, offsets, _length(dense), ctx.backend)
        return grad_values, grad_dense, None, None


class CollectFunction(torch.autograd.Function):
    """Sum the rows of each sample, or put them into a dense tensor of a length; times their factors unless these are None."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, factor: Tensor | None, offsets: Tensor, length: int | None, backend: str) -> Tensor:
        ctx.save_for_backward(values if factor is not None else None, factor, offsets)
        ctx.total, ctx.backend = values.shape[0], backend
        return _collect(values, factor, offsets, length, backend)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        values, factor, offsets = ctx.saved_tensors
        if factor is None:
            return apply_in_backward(AddFunction, None, grad, offsets, ctx.total, ctx.backend), None, None, None, None
        grads = [
            apply_in_backward(MulFunction, other, grad, offsets, ctx.backend) if wanted else None
            for wanted, other in zip(ctx.needs_input_grad, (factor, values), strict=False)
        ]
        return *grads, None, None, None


class ActivateFunction(torch.autograd.Function):
    """Add a sample's context to each of its rows and apply an activation."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, context: Tensor, offsets: Tensor, activation: str, backend: str) -> Tensor:
        output = _combine(values, context, offsets, values.shape[0], activation, backend)
        # Where relu's output is positive its slope is one, so the values need not be kept.
        ctx.save_for_backward(output if activation == "relu" else values, context, offsets)
        ctx.activation, ctx.backend = activation, backend
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = first_order(
            "jagged_linear with context and activation",
            _activate_backward(grad, *ctx.saved_tensors, ctx.activation, ctx.backend),
        )
        wanted = (x if need else None for x, need in zip(grads, ctx.needs_input_grad, strict=False))
        return *wanted, None, None, None


class PairwiseDifferenceFunction(torch.autograd.Function):
    """Differences of all pairs within samples."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, offsets: Tensor, total: int, backend: str) -> Tensor:
        ctx.save_for_backward(offsets)
        ctx.num_rows, ctx.backend = values.shape[0], backend
        return _pairwise_difference(values, offsets, total, backend)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (offsets,) = ctx.saved_tensors
        grad_values = apply_in_backward(PairwiseDifferenceBackwardFunction, grad, offsets, ctx.num_rows, ctx.backend)
        return grad_values, None, None, None


class PairwiseDifferenceBackwardFunction(torch.autograd.Function):
    """The gradient of `PairwiseDifferenceFunction`, itself differentiable."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, offsets: Tensor, num_rows: int, backend: str) -> Tensor:
        ctx.save_for_backward(offsets)
        ctx.total, ctx.backend = grad.shape[0], backend
        return _pairwise_difference_backward(grad, offsets, num_rows, backend)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (offsets,) = ctx.saved_tensors
        return apply_in_backward(PairwiseDifferenceFunction, grad, offsets, ctx.total, ctx.backend), None, None, None


def jagged_dense_add(values: Tensor, offsets: Tensor, dense: Tensor, *, backend: str | None = None) -> Tensor:
    """Add a dense operand to a jagged tensor: one row a sample, or row p to row p.

    Args:
        values: `[S, F]`, float32, bfloat16, float16 or float64 (computed by PyTorch on every device).
        offsets: `[B + 1]`, int32 or int64, from 0 to S.
        dense: `[B, F]`, added to every row of its sample, or `[B, L, F]`, whose row `dense[b, p]` is added to row p of sample b.
            A sample's rows past L meet nothing and keep their values; a sample's dense rows past its length are not read.
            `[B, 1, F]` is one of these, of one row. Of the dtype and device of `values`.
        backend: `"torch"`, `"triton"`, or None to choose by device.

    Returns:
        `[S, F]` in the dtype of `values`. Gradients of any order.

    Raises:
        ValueError: wrong shapes or devices.
        TypeError: dtypes other than those above, or that differ.

    Source:
        `jagged_dense_elementwise_add` of FBGEMM, with a jagged result.

    Example:
        >>> import torch
        >>> from jagged.ops import jagged_dense_add
        >>> values, offsets = torch.tensor([[1.], [2.], [3.]]), torch.tensor([0, 2, 3])
        >>> jagged_dense_add(values, offsets, torch.tensor([[10.], [20.]])).flatten()
        tensor([11., 12., 23.])
        >>> jagged_dense_add(values, offsets, torch.tensor([[[10.]], [[20.]]])).flatten()
        tensor([11.,  2., 23.])
    """
    _check_dense(values, offsets, dense)
    return AddFunction.apply(values, dense, offsets, values.shape[0], resolve_backend(backend, values))


def jagged_dense_mul(values: Tensor, offsets: Tensor, dense: Tensor, *, backend: str | None = None) -> Tensor:
    """Multiply a jagged tensor by a dense operand: one row a sample, or row p by row p.

    Args:
        values: `[S, F]`, float32, bfloat16, float16 or float64 (computed by PyTorch on every device).
        offsets: `[B + 1]`, int32 or int64, from 0 to S.
        dense: `[B, F]`, for every row of its sample, or `[B, L, F]`, whose row `dense[b, p]` multiplies row p of sample b. A
            dense row that is missing counts as zero, as in `jagged_dense_add`: a sample's rows past L become 0. `[B, 1, F]` is
            one of these, of one row. Of the dtype and device of `values`.
        backend: `"torch"`, `"triton"`, or None to choose by device.

    Returns:
        `[S, F]` in the dtype of `values`. Gradients of any order.

    Raises:
        ValueError: wrong shapes or devices.
        TypeError: dtypes other than those above, or that differ.

    Source:
        `jagged_dense_elementwise_mul` of FBGEMM, which treats missing rows alike.

    Example:
        >>> import torch
        >>> from jagged.ops import jagged_dense_mul
        >>> values, offsets = torch.tensor([[1.], [2.], [3.]]), torch.tensor([0, 2, 3])
        >>> jagged_dense_mul(values, offsets, torch.tensor([[10.], [20.]])).flatten()
        tensor([10., 20., 60.])
        >>> jagged_dense_mul(values, offsets, torch.tensor([[[10.]], [[20.]]])).flatten()
        tensor([10.,  0., 60.])
    """
    _check_dense(values, offsets, dense)
    return MulFunction.apply(values, dense, offsets, resolve_backend(backend, values))


def jagged_pairwise_difference(
    values: Tensor, offsets: Tensor, total: int | None = None, *, backend: str | None = None
) -> Tensor:
    """Differences of all pairs of rows within each sample, as pairwise ranking losses take them.

    Args:
        values: `[S]`, float32, bfloat16, float16 or float64 (computed by PyTorch on every device): a score a row.
        offsets: `[B + 1]`, int32 or int64, from 0 to S.
        total: number of pairs, `sum L_i^2`, the last of `pair_offsets(offsets)`; None reads it from there, which synchronises
            once with the device.
        backend: `"torch"`, `"triton"`, or None to choose by device.

    Returns:
        `[total]` in the dtype of `values`: sample b has a block `L_b x L_b` from `pair_offsets(offsets)[b]` on, row by row, whose
        entry (i, j) is `values_i - values_j`. Gradients of any order.

    Raises:
        ValueError: wrong shapes or devices; no `total` in a compiled or captured call.
        TypeError: dtypes other than those above.

    Example:
        >>> import torch
        >>> from jagged.ops import jagged_pairwise_difference
        >>> jagged_pairwise_difference(torch.tensor([1., 4., 9.]), torch.tensor([0, 2, 3]))
        tensor([ 0., -3.,  3.,  0.,  0.])
    """
    check_tensor("values", values, "[S]", FLOATS)
    _check_rows(values, offsets)
    backend = resolve_backend(backend, values)
    if total is None:
        total = resolve_total(total, scan_pairs(offsets, offsets, backend))
    return PairwiseDifferenceFunction.apply(values, offsets, total, backend)


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
    _check_rows(values, offsets)
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
    _check_rows(values, offsets)
    width = values.shape[1]
    for k, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        _check_layer(values, width, offsets, weight, bias, None if k else context, (f"weights[{k}]", f"biases[{k}]"))
        width = weight.shape[0]
    _check_activation(activation)
    chosen, last = resolve_backend(backend, values), len(weights) - 1
    for k, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        values = _linear(values, offsets, weight, bias, None if k else context, activation if k < last else None, chosen)
    return values


def _linear(
    values: Tensor,
    offsets: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    context: Tensor | None,
    activation: Activation | None,
    backend: str,
) -> Tensor:
    hidden = F.linear(values, weight, bias)
    if context is None:
        return hidden if activation is None else ACTIVATIONS[activation](hidden)
    # Another dtype only under autocast.
    context = context.to(hidden.dtype)
    if activation is None:
        return AddFunction.apply(hidden, context, offsets, hidden.shape[0], backend)
    return ActivateFunction.apply(hidden, context, offsets, activation, backend)


def _length(dense: Tensor) -> int | None:
    """Return L of `[B, L, F]`; None of `[B, F]`."""
    return dense.shape[1] if dense.dim() == 3 else None


def _check_rows(values: Tensor, offsets: Tensor) -> None:
    check_offsets(offsets, values, total=values.shape[0])
    if not holds((offsets.shape[0] > 1) | (values.shape[0] == 0)):
        raise ValueError(f"offsets: expected shape [B + 1] with samples for the {values.shape[0]} rows of values, got [1]")


def _check_dense(values: Tensor, offsets: Tensor, dense: Tensor) -> None:
    check_tensor("values", values, "[S, F]", FLOATS)
    _check_rows(values, offsets)
    if not isinstance(dense, Tensor) or dense.dim() != 3:
        check_tensor("dense", dense, "[B, F]")
    check_same("dense", dense, "values", values)
    batch_size, num_features = offsets.shape[0] - 1, values.shape[1]
    if not (holds(dense.shape[0] == batch_size) and holds(dense.shape[-1] == num_features)):
        raise ValueError(
            f"dense: expected [{batch_size}, {num_features}] or [{batch_size}, L, {num_features}], with the samples of the "
            f"offsets and the features of values, got {list(dense.shape)}"
        )


def _check_layer(
    values: Tensor, width: int, offsets: Tensor, weight: Tensor, bias: Tensor | None, context: Tensor | None, names: Sequence[str]
) -> None:
    """Check the tensors of a layer that meets rows of a width; `names` are those of weight and bias."""
    check_tensor(names[0], weight, "[out, in]", FLOATS)
    num_outputs = weight.shape[0]
    shapes = [num_outputs, width], [num_outputs], [offsets.shape[0] - 1, num_outputs]
    device = values.device.type
    autocast = device in ("cpu", "cuda") and torch.is_autocast_enabled(device)
    for name, tensor, shape in zip((*names, "context"), (weight, bias, context), shapes, strict=True):
        if tensor is None:
            continue
        check_tensor(name, tensor, "[out]" if len(shape) == 1 else "[out, in]" if tensor is weight else "[B, out]", FLOATS)
        if not all(holds(got == expected) for got, expected in zip(tensor.shape, shape, strict=True)):
            raise ValueError(f"{name}: expected shape {shape}, got {list(tensor.shape)}")
        # Autocast takes other dtypes, not other devices.
        if not autocast or tensor.device != values.device:
            check_same(name, tensor, "values", values)


def _check_activation(activation: str | None) -> None:
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(f"activation: got {activation!r}, expected one of {', '.join(map(repr, ACTIVATIONS))} or None")
