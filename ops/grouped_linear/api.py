"""Public linear layers of groups, and mixtures of what groups give."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from jagged.ops._shared.validation import FLOATS, check_factors, check_tensor, holds
from jagged.ops.grouped_linear.spec import GROUPED_LINEAR, MIX_GROUPS, Inputs, MixInputs, NoOptions, Options


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: Literal["relu"] | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """Linear layers of groups, each with weights of its own, as one product: `activation(W_g x_ng + b_g)`.

    Experts, the towers of tasks and tokens are such groups. On GPUs of compute capability 9.0 and up, in 16 bits and with widths
    that are multiples of 16, bias and ReLU are part of the product's kernel; products alone and others are PyTorch's. Under
    `torch.autocast` all are cast to its dtype.

    Args:
        x: `[N, in]`, which all groups read, or `[N, G, in]`, float32, bfloat16, float16 or float64.
        weight: `[G, out, in]`.
        bias: `[G, out]`, or None. All of the dtype and device of `x`.
        activation: `"relu"` or None.
        backend: `"torch"`, `"triton"`, or None to choose by device.

    Returns:
        `[N, G, out]`, contiguous. Gradients of x, weight and bias, of every order. ReLU's slope at 0 is 0.

    Raises:
        ValueError: shapes or devices that do not fit, another activation.
        TypeError: dtypes other than those above, or that differ.

    Example:
        >>> import torch
        >>> from jagged.ops import grouped_linear
        >>> hidden = grouped_linear(torch.randn(5, 8), torch.randn(3, 16, 8), activation="relu")
        >>> grouped_linear(hidden, torch.randn(3, 4, 16), torch.randn(3, 4)).shape
        torch.Size([5, 3, 4])
    """
    check_tensor("weight", weight, "[G, out, in]", FLOATS)
    num_groups, num_outputs, width = weight.shape
    is_matrix = isinstance(x, Tensor) and x.dim() == 2
    check_tensor("x", x, "[N, in]" if is_matrix else "[N, G, in]", FLOATS)
    if not holds(x.shape[-1] == width) or (x.dim() == 3 and not holds(x.shape[1] == num_groups)):
        raise ValueError(
            f"x: expected shape [N, {width}] or [N, {num_groups}, {width}], as weight {list(weight.shape)} has it, "
            f"got {list(x.shape)}"
        )
    check_factors("weight", weight, "x", x)
    if bias is not None:
        check_tensor("bias", bias, "[G, out]", FLOATS)
        if not (holds(bias.shape[0] == num_groups) and holds(bias.shape[1] == num_outputs)):
            raise ValueError(f"bias: expected shape {[num_groups, num_outputs]}, got {list(bias.shape)}")
        check_factors("bias", bias, "x", x)
    if activation not in ("relu", None):
        raise ValueError(f"activation: got {activation!r}, expected 'relu' or None")
    return GROUPED_LINEAR(Inputs(x, weight, bias), Options(activation == "relu"), backend).output


def mix_groups(groups: Tensor, weights: Tensor, *, backend: str | None = None) -> Tensor:
    """Mix the rows of groups, each row by weights of its own: `sum_g weights[n, t, g] groups[n, g]`.

    Gates of experts do that, t being a task. On a GPU up to 4 mixtures of up to 1,024 columns are one pass over the groups, and
    so are both gradients; others are PyTorch's batched product.

    Args:
        groups: `[N, G, D]`, float32, bfloat16, float16 or float64.
        weights: `[N, T, G]`, of the dtype and device of `groups`. Under `torch.autocast` both are cast to its dtype.
        backend: `"torch"`, `"triton"`, or None to choose by device.

    Returns:
        `[N, T, D]`, sums in float32. Gradients of both, of every order.

    Raises:
        ValueError: shapes or devices that do not fit.
        TypeError: dtypes other than those above, or that differ.

    Example:
        >>> import torch
        >>> from jagged.ops import mix_groups
        >>> mix_groups(torch.randn(5, 3, 8), torch.randn(5, 2, 3).softmax(2)).shape
        torch.Size([5, 2, 8])
    """
    check_tensor("groups", groups, "[N, G, D]", FLOATS)
    check_tensor("weights", weights, "[N, T, G]", FLOATS)
    if not (holds(weights.shape[0] == groups.shape[0]) and holds(weights.shape[2] == groups.shape[1])):
        raise ValueError(
            f"weights: expected shape [{groups.shape[0]}, T, {groups.shape[1]}], as groups {list(groups.shape)} have it, "
            f"got {list(weights.shape)}"
        )
    check_factors("weights", weights, "groups", groups)
    return MIX_GROUPS(MixInputs(groups, weights), NoOptions(), backend).mixtures
