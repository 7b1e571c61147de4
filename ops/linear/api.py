"""The public linear layer."""

from __future__ import annotations

from torch import Tensor

from jagged.ops._shared.linear import linear_rows
from jagged.ops._shared.validation import FLOATS, check_factors, check_tensor, holds


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, backend: str | None = None) -> Tensor:
    """A linear layer on every row: `x @ weight.T + bias`.

    It is `torch.nn.functional.linear`, whose gradient of the bias is a sum over all rows that takes up to 11 times as long as
    to read them. On a GPU this sum is a kernel here, and all products are PyTorch's. Below 8,192 rows, unless rows, weight and
    bias all want a gradient, in float64, on a CPU, and where a program is traced, transformed, compiled or exported, it is
    PyTorch's function alone.

    Args:
        x: `[..., in]`, float32, bfloat16, float16 or float64.
        weight: `[out, in]`.
        bias: `[out]`, or None. All of one dtype; under `torch.autocast`, but in float64, of any and cast to autocast's.
        backend: of the sums over rows: `"torch"`, `"triton"`, or None to choose by device.

    Returns:
        `[..., out]`. Gradients of x, weight and bias, of every order. The sums over rows are float32's, rounded once to the dtype
        of the bias, in one order always.

    Raises:
        ValueError: shapes or devices that do not fit, a backend that cannot serve these.
        TypeError: dtypes other than those above, or that differ.

    Example:
        >>> import torch
        >>> from jagged.ops.linear import linear
        >>> linear(torch.randn(5, 8), torch.randn(4, 8), torch.zeros(4)).shape
        torch.Size([5, 4])
    """
    check_tensor("x", x, "[*, in]", FLOATS)
    check_tensor("weight", weight, "[out, in]", FLOATS)
    if not holds(weight.shape[1] == x.shape[-1]):
        raise ValueError(
            f"weight: expected shape [out, {x.shape[-1]}], as x {list(x.shape)} has columns, got {list(weight.shape)}"
        )
    check_factors("weight", weight, "x", x)
    if bias is not None:
        check_tensor("bias", bias, "[out]", FLOATS)
        if not holds(bias.shape[0] == weight.shape[0]):
            raise ValueError(
                f"bias: expected shape [{weight.shape[0]}], as weight {list(weight.shape)} has rows, got {list(bias.shape)}"
            )
        check_factors("bias", bias, "x", x)
    return linear_rows(x, weight, bias, backend)
