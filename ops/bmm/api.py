"""Public products of a jagged tensor with a dense or a second jagged one. Each is the other's gradient, so any order is right."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jagged.ops._shared.autograd import apply_in_backward
from jagged.ops._shared.registration import define_operator, resolve_backend
from jagged.ops._shared.validation import FLOATS, check_offsets, check_same, check_tensor, holds
from jagged.ops.bmm import torch_impl

_jagged_dense_bmm = define_operator(
    "jagged_dense_bmm",
    "(Tensor values, Tensor offsets, Tensor dense, str backend) -> Tensor",
    torch_impl=torch_impl.jagged_dense_bmm,
    triton_impl="jagged.ops.bmm.kernels:jagged_dense_bmm",
    fake=lambda values, offsets, dense, backend: values.new_empty(values.shape[0], dense.shape[2]),
)
_jagged_jagged_bmm = define_operator(
    "jagged_jagged_bmm",
    "(Tensor a, Tensor b, Tensor offsets, str backend) -> Tensor",
    torch_impl=torch_impl.jagged_jagged_bmm,
    triton_impl="jagged.ops.bmm.kernels:jagged_jagged_bmm",
    fake=lambda a, b, offsets, backend: a.new_empty(offsets.shape[0] - 1, a.shape[1], b.shape[1]),
)


class JaggedDenseBmmFunction(torch.autograd.Function):
    """Rows times their sample's matrix."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, offsets: Tensor, dense: Tensor, backend: str) -> Tensor:
        ctx.save_for_backward(values, offsets, dense)
        ctx.backend = backend
        return _jagged_dense_bmm(values, offsets, dense, backend)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        values, offsets, dense = ctx.saved_tensors
        grad_values = grad_dense = None
        if ctx.needs_input_grad[0]:
            grad_values = apply_in_backward(JaggedDenseBmmFunction, grad, offsets, dense.transpose(1, 2), ctx.backend)
        if ctx.needs_input_grad[2]:
            grad_dense = apply_in_backward(JaggedJaggedBmmFunction, values, grad, offsets, ctx.backend)
        return grad_values, None, grad_dense, None


class JaggedJaggedBmmFunction(torch.autograd.Function):
    """Sum of a sample's outer products."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, offsets: Tensor, backend: str) -> Tensor:
        ctx.save_for_backward(a, b, offsets)
        ctx.backend = backend
        return _jagged_jagged_bmm(a, b, offsets, backend)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b, offsets = ctx.saved_tensors
        grad_a = grad_b = None
        if ctx.needs_input_grad[0]:
            grad_a = apply_in_backward(JaggedDenseBmmFunction, b, offsets, grad.transpose(1, 2), ctx.backend)
        if ctx.needs_input_grad[1]:
            grad_b = apply_in_backward(JaggedDenseBmmFunction, a, offsets, grad, ctx.backend)
        return grad_a, grad_b, None, None


def jagged_dense_bmm(values: Tensor, offsets: Tensor, dense: Tensor, *, backend: str | None = None) -> Tensor:
    """Multiply each sample's rows by a matrix of its own: `out[s] = values[s] @ dense[b]` for the rows s of sample b.

    Args:
        values: `[S, D]`, float32, bfloat16, float16 or float64 (computed by PyTorch on every device).
        offsets: `[B + 1]`, int32 or int64, from 0 to S.
        dense: `[B, D, T]`, the dtype of values.
        backend: `"torch"`, `"triton"`, or None to choose by device.

    Returns:
        `[S, T]` in the dtype of `values`; sums are accumulated in float32 (float64 for float64).

    Raises:
        ValueError: shapes that do not fit, tensors on different devices, an unknown backend.
        TypeError: dtypes other than those above, or different ones.

    Source:
        Xu et al., Enhancing Performance and Scalability of Large-Scale Recommendation Systems with Jagged Flash Attention,
        RecSys 2024, Table 1.

    Example:
        >>> import torch
        >>> from jagged.ops import jagged_dense_bmm
        >>> values, offsets = torch.tensor([[1., 2.], [3., 4.], [5., 6.]]), torch.tensor([0, 2, 3])
        >>> jagged_dense_bmm(values, offsets, torch.tensor([[[1.], [1.]], [[1.], [-1.]]]))
        tensor([[ 3.],
                [ 7.],
                [-1.]])
    """
    check_tensor("values", values, "[S, D]", FLOATS)
    check_tensor("dense", dense, "[B, D, T]", FLOATS)
    check_offsets(offsets, values, total=values.shape[0])
    check_same("dense", dense, "values", values)
    if not (holds(dense.shape[0] == offsets.shape[0] - 1) and holds(dense.shape[1] == values.shape[1])):
        raise ValueError(
            f"dense: expected shape [{offsets.shape[0] - 1}, {values.shape[1]}, T], a matrix for each sample of the offsets "
            f"with a row for each column of values, got {list(dense.shape)}"
        )
    return JaggedDenseBmmFunction.apply(values, offsets, dense, resolve_backend(backend, values))


def jagged_jagged_bmm(a: Tensor, b: Tensor, offsets: Tensor, *, backend: str | None = None) -> Tensor:
    """Add up the outer products of each sample's rows: `out[b] = a[rows].T @ b[rows]`.

    Args:
        a: `[S, D]`, float32, bfloat16, float16 or float64 (computed by PyTorch on every device).
        b: `[S, T]`, the dtype of a.
        offsets: `[B + 1]`, int32 or int64, from 0 to S.
        backend: `"torch"`, `"triton"`, or None to choose by device.

    Returns:
        `[B, D, T]` in the dtype of `a`, zeros for an empty sample; sums are accumulated in float32 (float64 for float64), of
        long samples in chunks whose sums are added in a fixed order.

    Raises:
        ValueError: shapes that do not fit, tensors on different devices, an unknown backend.
        TypeError: dtypes other than those above, or different ones.

    Source:
        Xu et al., Enhancing Performance and Scalability of Large-Scale Recommendation Systems with Jagged Flash Attention,
        RecSys 2024, Table 1.

    Example:
        >>> import torch
        >>> from jagged.ops import jagged_jagged_bmm
        >>> a, b = torch.tensor([[1., 2.], [3., 4.], [5., 6.]]), torch.tensor([[1.], [1.], [2.]])
        >>> jagged_jagged_bmm(a, b, torch.tensor([0, 2, 3]))
        tensor([[[ 4.],
                 [ 6.]],
        <BLANKLINE>
                [[10.],
                 [12.]]])
    """
    check_tensor("a", a, "[S, D]", FLOATS)
    check_tensor("b", b, "[S, T]", FLOATS)
    check_offsets(offsets, a, total=a.shape[0])
    check_same("b", b, "a", a)
    if not holds(b.shape[0] == a.shape[0]):
        raise ValueError(f"b: expected shape [{a.shape[0]}, T], a row for each row of a, got {list(b.shape)}")
    return JaggedJaggedBmmFunction.apply(a, b, offsets, resolve_backend(backend, a))
