"""Public layer normalisation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jagged.ops._shared.eager import is_eager
from jagged.ops._shared.validation import FLOATS, check_device, check_number, check_tensor, holds
from jagged.ops.layer_norm.spec import LAYER_NORM, LAYER_NORM_GRADIENTS, WIDEST, Epsilon, Inputs, Options, Slopes


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
    if backend is None and not _has_kernel(x):
        # What every program knows, with derivatives of every kind.
        exact = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), given)
        wide = x.to(exact), rows.shape[1:], weight.to(exact), bias.to(exact)
        return torch.nn.functional.layer_norm(*wide, eps).to(given)
    output = LAYER_NORM(Inputs(rows, weight, bias), Options(eps, given), backend).output
    return output if x.dim() == 2 else output.view(x.shape)


def layer_norm_and_residual(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float = 1e-5,
    *,
    dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Normalise rows as `layer_norm` does, and return the rows, too, to which what is made of the normalised ones is added.

    A residual block reads its rows twice. Its two gradients of them are added up here where that of the norm is computed, which
    spares reading and writing all rows once more. Programs that are traced, transformed, compiled or exported, and rows whose
    `layer_norm` is PyTorch's, have an addition of PyTorch's there.

    Args:
        x: rows, as all others as of `layer_norm`.
        weight: as there.
        bias: as there.
        eps: as there.
        dtype: of the normalised rows, as there.
        backend: as there.

    Returns:
        normalised rows, and x. Gradients of x, weight and bias, of every order.

    Raises:
        ValueError: as `layer_norm`.
        TypeError: as `layer_norm`.

    Example:
        >>> import torch
        >>> from jagged.ops.layer_norm import layer_norm_and_residual
        >>> normal, rows = layer_norm_and_residual(torch.randn(5, 8), torch.ones(8), torch.zeros(8))
        >>> (rows + normal.relu()).shape
        torch.Size([5, 8])
    """
    is_asked = isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled()
    if not (is_asked and is_eager() and (backend is not None or _has_kernel(x))):
        return layer_norm(x, weight, bias, eps, dtype=dtype, backend=backend), x
    with torch.no_grad():
        normal = layer_norm(x, weight, bias, eps, dtype=dtype, backend=backend)
    found: tuple[Tensor, Tensor] = _WithResidual.apply(x, weight, bias, normal, eps, backend)
    return found


def _has_kernel(x: Tensor) -> bool:
    """Whether rows are normalised by the kernels where nobody says by which backend."""
    return x.is_cuda and x.dtype != torch.float64 and x.dim() > 0 and x.shape[-1] <= WIDEST


class _WithResidual(torch.autograd.Function):
    """Hands on what has been normalised, and the rows; adds up the gradients of both."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, normal: Tensor, eps: float, backend: str | None
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        ctx.set_materialize_grads(False)
        ctx.eps, ctx.backend = eps, backend
        return normal, x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad, residual = grads
        x, weight = ctx.saved_tensors
        if grad is None:
            return residual, None, None, None, None, None
        rows = [None if of is None else of.flatten(0, -2) if of.dim() > 1 else of[None] for of in (grad, x, residual)]
        found = LAYER_NORM_GRADIENTS(Slopes(rows[0], rows[1], weight, rows[2]), Epsilon(ctx.eps), ctx.backend)  # type: ignore[arg-type]
        return found.of_x.view(x.shape), found.of_weight, found.of_bias, None, None, None
