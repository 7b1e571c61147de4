"""Public layer normalisation."""

from __future__ import annotations

import torch
from torch import Tensor

from jagged.ops._shared.validation import FLOATS, check_device, check_number, check_tensor, holds
from jagged.ops.layer_norm.spec import LAYER_NORM, WIDEST, Inputs, Options


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float = 1e-5,
    *,
    dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """Normalise rows: `(x - mean) / sqrt(variance + eps) * weight + bias`, over the last dimension.

    It is `torch.nn.functional.layer_norm`, which has a block of threads for each row; here a program takes several rows, as those
    of a jagged batch are many and narrow, and writes the dtype that is asked for. On a GPU rows of up to 1,024 columns are one
    pass over them, and so is backward; wider ones, float64, and rows on a CPU are PyTorch's. Autocast changes nothing.

    Args:
        x: `[..., D]`, float32, bfloat16, float16 or float64.
        weight: `[D]`, of the dtype of `x` or float32.
        bias: `[D]`, of the dtype of `weight`.
        eps: added to the variance, above 0.
        dtype: of the output, one of those of `x`, and float64 of float64 alone; None for that of `x`. All is computed in float32,
            of float64 in float64.
        backend: `"torch"`, `"triton"`, or None to choose by device.

    Returns:
        `[..., D]`, contiguous. Gradients of x, weight and bias, of every order. Backward reads x once more: nothing else is kept.

    Raises:
        ValueError: shapes or devices that do not fit, an `eps` that is not above 0.
        TypeError: dtypes other than those above.

    Example:
        >>> import torch
        >>> from jagged.ops.layer_norm import layer_norm
        >>> layer_norm(torch.randn(5, 8), torch.ones(8), torch.zeros(8), dtype=torch.bfloat16).dtype
        torch.bfloat16

    Source:
        Ba, Kiros and Hinton, "Layer Normalization", 2016.
    """
    if not isinstance(x, Tensor) or x.is_nested or x.dim() < 1:
        check_tensor("x", x, "[N, D]", FLOATS)
    rows = x.flatten(0, -2) if x.dim() > 1 else x[None]
    check_tensor("x", rows, "[N, D]", FLOATS)
    check_number("eps", eps, eps > 0, "above 0")
    for name, of in {"weight": weight, "bias": bias}.items():
        check_tensor(name, of, "[D]", FLOATS)
        if not holds(of.shape[0] == rows.shape[1]):
            raise ValueError(f"{name}: expected shape [{rows.shape[1]}], as x {list(x.shape)} has columns, got {list(of.shape)}")
        check_device(name, of, "x", x)
        if of.dtype not in (x.dtype, torch.float32) or (of.dtype != x.dtype and x.dtype == torch.float64):
            raise TypeError(f"{name}: got {of.dtype}, expected {x.dtype}, as x has it, or torch.float32")
    if bias.dtype != weight.dtype:
        raise TypeError(f"bias: got {bias.dtype}, expected {weight.dtype}, as weight has it")
    of_rows = [of for of in FLOATS if (of == torch.float64) == (x.dtype == torch.float64)]
    if dtype is not None and dtype not in of_rows:
        raise TypeError(f"dtype: got {dtype} for rows in {x.dtype}, expected {' or '.join(map(str, of_rows))}")
    given = dtype or x.dtype
    if backend is None and not (x.is_cuda and x.dtype != torch.float64 and rows.shape[1] <= WIDEST):
        # What every program knows, with derivatives of every kind.
        exact = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), given)
        wide = x.to(exact), rows.shape[1:], weight.to(exact), bias.to(exact)
        return torch.nn.functional.layer_norm(*wide, eps).to(given)
    output = LAYER_NORM(Inputs(rows, weight, bias), Options(eps, given), backend).output
    return output if x.dim() == 2 else output.view(x.shape)
