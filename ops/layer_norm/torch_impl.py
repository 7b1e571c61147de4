"""Layer normalisation in plain PyTorch: the CPU path and the float64 path, and rows that are too wide for the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from jagged.ops.layer_norm.spec import Epsilon, Found, Inputs, Options, Outputs, Slopes


def layer_norm(x: Inputs, o: Options) -> Outputs:
    """PyTorch's, in float32 at least."""
    exact = torch.promote_types(x.x.dtype, torch.float32)
    rows, weight, bias = x.x.to(exact), x.weight.to(exact), x.bias.to(exact)
    return Outputs(torch.nn.functional.layer_norm(rows, rows.shape[1:], weight, bias, o.eps).to(o.dtype))


def gradients(x: Slopes, o: Epsilon) -> Found:
    """PyTorch's backward pass, which reads the mean and the spread of each row."""
    exact = torch.promote_types(x.x.dtype, torch.float32)
    rows, weight = x.x.to(exact), x.weight.to(exact)
    if not rows.numel():
        return Found(torch.zeros_like(x.x), torch.zeros_like(x.weight), torch.zeros_like(x.weight))
    shape = list(rows.shape[1:])
    _, mean, spread = torch.ops.aten.native_layer_norm(rows, shape, weight, weight, o.eps)
    found = torch.ops.aten.native_layer_norm_backward(
        x.grad.to(exact), rows, shape, mean, spread, weight, weight, [True, True, True]
    )
    of_x = found[0] if x.residual is None else found[0] + x.residual
    return Found(of_x.to(x.x.dtype), found[1].to(x.weight.dtype), found[2].to(x.weight.dtype))


def gradients_of(
    grad: Tensor, x: Tensor, weight: Tensor, residual: Tensor | None = None, *, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Make the same of operations that PyTorch differentiates."""
    exact = torch.promote_types(x.dtype, torch.float32)
    grad, rows, wide = grad.to(exact), x.to(exact), weight.to(exact)
    centred = rows - rows.mean(1, keepdim=True)
    inverse = (centred.square().mean(1, keepdim=True) + eps).rsqrt()
    normal, scaled = centred * inverse, grad * wide
    of_rows = (scaled - scaled.mean(1, keepdim=True) - normal * (scaled * normal).mean(1, keepdim=True)) * inverse
    if residual is not None:
        of_rows = of_rows + residual
    return of_rows.to(x.dtype), (grad * normal).sum(0).to(weight.dtype), grad.sum(0).to(weight.dtype)
