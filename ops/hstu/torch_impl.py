"""The products of an HSTU block in plain PyTorch: the CPU path and the float64 path, and widths that no kernel takes."""

from __future__ import annotations

import torch
from torch import Tensor

from jagged.ops._shared.hashing import keeps
from jagged.ops.hstu.spec import (
    Added,
    Before,
    GateGradients,
    GateSlopes,
    Inputs,
    NoOptions,
    Options,
    OutputInputs,
    OutputOptions,
    Outputs,
    Slopes,
)


def projection(x: Inputs, o: Options) -> Outputs:
    """PyTorch's layer, SiLU, and a copy of each part."""
    before = torch.nn.functional.linear(x.x, x.weight, x.bias.to(x.x.dtype))
    parts = torch.nn.functional.silu(before).unflatten(1, (4, o.num_heads, -1)).unbind(1)
    # Of an operator no two outputs may share memory.
    u, v, q, k = (part.clone(memory_format=torch.contiguous_format) for part in parts)
    return Outputs(u, v, q, k, before.new_empty(0) if o.recompute else before)


def projection_gradient(x: Slopes, o: NoOptions) -> Before:
    """PyTorch's gradient of SiLU."""
    exact = torch.promote_types(x.before.dtype, torch.float32)
    given = torch.stack(x[:4], 1).flatten(1).to(exact)
    grad = torch.ops.aten.silu_backward(given, x.before.to(exact))
    return Before(grad.to(x.before.dtype), grad.sum(0))


def output(x: OutputInputs, o: OutputOptions) -> Added:
    """What the product reads, PyTorch's layer, and the sum."""
    rows = gated(x.attended, x.gate, x.norm_weight, x.norm_bias, x.dropout_seed, o)
    return Added(x.residual + torch.nn.functional.linear(rows, x.weight, x.bias.to(rows.dtype)))


def gated(
    attended: Tensor, gate: Tensor, weight: Tensor, bias: Tensor | None, dropout_seed: Tensor | None, o: OutputOptions
) -> Tensor:
    """Return `norm(attended) * gate`, behind gate and attended if `concat`, after dropout, of PyTorch's operations."""
    normal, _ = _normalised(attended, weight, o)
    scaled = normal * weight if bias is None else normal * weight + bias
    exact, dtype = scaled.dtype, attended.dtype
    rows = (scaled * gate.to(exact)).to(dtype)
    rows = torch.cat([gate, attended, rows], 1) if o.concat else rows
    kept = _kept(rows, dropout_seed, o)
    return rows if kept is None else (rows.to(exact) * kept).to(dtype)


def gate_gradients(x: GateSlopes, o: OutputOptions) -> GateGradients:
    """Compute by the formulas of the kernel."""
    normal, inverse = _normalised(x.attended, x.norm_weight, o)
    scaled = normal * x.norm_weight if x.norm_bias is None else normal * x.norm_weight + x.norm_bias
    exact = scaled.dtype
    grad, gate, width = x.grad.to(exact), x.gate.to(exact), x.attended.shape[1]
    if (kept := _kept(grad, x.dropout_seed, o)) is not None:
        grad = grad * kept
    slope = grad[:, -width:]
    through = slope * gate
    groups = (-1, o.num_groups, width // o.num_groups)
    of_normal, z = (through * x.norm_weight).view(groups), normal.view(groups)
    of_attended = of_normal - z * (of_normal * z).mean(2, keepdim=True)
    if o.centred:
        of_attended = of_attended - of_normal.mean(2, keepdim=True)
    of_attended, of_gate = (of_attended * inverse).flatten(1), slope * scaled
    if o.concat:
        of_gate, of_attended = of_gate + grad[:, :width], of_attended + grad[:, width : 2 * width]
    made = gated(x.attended, x.gate, x.norm_weight, x.norm_bias, x.dropout_seed, o)
    sums = (through * normal).sum(0), through.sum(0)
    return GateGradients(of_attended.to(x.attended.dtype), of_gate.to(x.gate.dtype), *sums, made)


def _normalised(rows: Tensor, weight: Tensor, o: OutputOptions) -> tuple[Tensor, Tensor]:
    """Return rows over the root of their mean square in groups, if `centred` less their mean, and 1 / the root `[N, G, 1]`."""
    exact = torch.promote_types(torch.promote_types(rows.dtype, weight.dtype), torch.float32)
    wide = rows.to(exact).view(rows.shape[0], o.num_groups, rows.shape[1] // o.num_groups)
    if o.centred:
        wide = wide - wide.mean(2, keepdim=True)
    inverse = (wide.square().mean(2, keepdim=True) + o.eps).rsqrt()
    return (wide * inverse).flatten(1), inverse


def _kept(rows: Tensor, seed: Tensor | None, o: OutputOptions) -> Tensor | None:
    """Return by what dropout multiplies each number: 0, or the reciprocal of the share that stays."""
    if seed is None:
        return None
    num_rows, num_columns = rows.shape
    exact = torch.promote_types(rows.dtype, torch.float32)
    return keeps(seed, num_rows, num_columns, o.dropout_p).to(exact) / (1 - o.dropout_p)
