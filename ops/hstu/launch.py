"""Launches of an HSTU block's kernels."""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from jagged.ops._shared.hashing import threshold
from jagged.ops._shared.launch import Launcher
from jagged.ops._shared.matrices import gpu, split
from jagged.ops._shared.sizes import cdiv, next_power_of_2
from jagged.ops.hstu import torch_impl
from jagged.ops.hstu.configurations import (
    GATE_ELEMENTS,
    GATE_PROGRAMS,
    GATE_WARPS,
    LEAST_CAPABILITY,
    SILU_COLUMNS,
    SILU_ELEMENTS,
    SILU_PROGRAMS,
    SILU_WARPS,
    Configuration,
    gate_gradients_tile,
    product_configuration,
)
from jagged.ops.hstu.kernels import (
    hstu_gate_gradients_kernel,
    hstu_gate_kernel,
    hstu_output_kernel,
    hstu_projection_gradient_kernel,
    hstu_projection_kernel,
)
from jagged.ops.hstu.spec import (
    WIDEST,
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

_launch_projection = Launcher(hstu_projection_kernel)
_launch_projection_gradient = Launcher(hstu_projection_gradient_kernel)
_launch_gate = Launcher(hstu_gate_kernel)
_launch_gate_gradients = Launcher(hstu_gate_gradients_kernel)
_launch_output = Launcher(hstu_output_kernel)


def projection(x: Inputs, o: Options) -> Outputs:
    """Launch Hopper's kernel where it serves, or `hstu_projection_kernel`.

    float32, widths that no tile divides and older GPUs have PyTorch's product.
    """
    rows, weight, bias = x
    (total, width), columns = rows.shape, weight.shape[0]
    chosen = _configuration(rows, width, columns // 4)
    if chosen is None or not total:
        return torch_impl.projection(x, o)
    u, v, q, k = (rows.new_empty(total, o.num_heads, columns // (4 * o.num_heads)) for _ in range(4))
    before = rows.new_empty(0) if o.recompute else rows.new_empty(total, columns)
    hopper = _hopper()
    if hopper is not None and hopper.supports(rows, weight):
        hopper.project(rows, weight, bias.contiguous(), u, v, q, k, None if o.recompute else before)
        return Outputs(u, v, q, k, before)
    tiles = cdiv(total, chosen.rows) * (columns // chosen.columns)
    _launch_projection(
        (min(tiles, chosen.programs * gpu(rows.device).multiprocessors),),
        _descriptor(rows, chosen.rows, chosen.inner), _descriptor(weight, chosen.columns, chosen.inner), bias.contiguous(),
        u, v, q, k, None if o.recompute else _descriptor(before, chosen.rows, chosen.columns // 2), total, OUT=columns // 4,
        IN=width, BLOCK_M=chosen.rows, BLOCK_N=chosen.columns, BLOCK_K=chosen.inner, NUM_STAGES=chosen.num_stages,
        num_warps=chosen.num_warps,
    )  # fmt: skip
    return Outputs(u, v, q, k, before)


@functools.cache
def _hopper() -> ModuleType | None:
    """Return the kernels in Gluon; None where this Triton has not that experimental language."""
    try:
        import jagged.ops.hstu.hopper as module
    except ImportError:
        return None
    return module


def projection_gradient(x: Slopes, o: NoOptions) -> Before:
    """Launch `hstu_projection_gradient_kernel`, whose parts are added up in float32."""
    before = x.before
    (total, columns), grad = before.shape, before.new_empty(before.shape)
    if not before.numel():
        return torch_impl.projection_gradient(x, o)
    out = columns // 4
    block = min(SILU_COLUMNS, next_power_of_2(out))
    blocks, rows = 4 * cdiv(out, block), max(1, SILU_ELEMENTS // block)
    num_parts, rows_of_part = split(total, rows, blocks, SILU_PROGRAMS, before.device)
    parts = before.new_empty(num_parts, columns, dtype=torch.float32)
    _launch_projection_gradient(
        (num_parts, blocks),
        *(given.contiguous() for given in x[:4]), before, grad, parts, total, rows_of_part, OUT=out, BLOCK_M=rows, BLOCK_N=block,
        num_warps=SILU_WARPS,
    )  # fmt: skip
    return Before(grad, parts.sum(0))


def output(x: OutputInputs, o: OutputOptions) -> Added:
    """Launch `hstu_gate_kernel` and `hstu_output_kernel`; PyTorch's product where `projection` has it, too."""
    gated = _gated(x, o)
    if gated is None:
        return torch_impl.output(x, o)
    (total, width), out, residual = gated.shape, x.weight.shape[0], _adjacent(x.residual)
    chosen = _configuration(gated, width, out)
    if chosen is None or not total:
        return Added(residual + torch.nn.functional.linear(gated, x.weight, x.bias.to(gated.dtype)))
    made = residual.new_empty(residual.shape, dtype=torch.promote_types(residual.dtype, gated.dtype))
    tiles = cdiv(total, chosen.rows) * (out // chosen.columns)
    _launch_output(
        (min(tiles, chosen.programs * gpu(gated.device).multiprocessors),),
        _descriptor(gated, chosen.rows, chosen.inner), _descriptor(x.weight, chosen.columns, chosen.inner), x.bias.contiguous(),
        residual, made, total, residual.stride(0), OUT=out, IN=width, BLOCK_M=chosen.rows, BLOCK_N=chosen.columns,
        BLOCK_K=chosen.inner, NUM_STAGES=chosen.num_stages, num_warps=chosen.num_warps,
    )  # fmt: skip
    return Added(made)


def _gated(x: OutputInputs, o: OutputOptions) -> Tensor | None:
    """Launch `hstu_gate_kernel`; None for groups that are too wide for one program."""
    total, columns = x.attended.shape
    width = columns // o.num_groups
    if not 0 < width <= WIDEST:
        return None
    made = x.attended.new_empty(total, 3 * columns if o.concat else columns)
    if not total:
        return made
    attended, gate, block = _adjacent(x.attended), _adjacent(x.gate), next_power_of_2(width)
    rows = max(1, GATE_ELEMENTS // block)
    _launch_gate(
        (cdiv(total, rows), o.num_groups),
        attended, gate, x.norm_weight.contiguous(), _vector(x.norm_bias), x.dropout_seed, made, total, attended.stride(0),
        gate.stride(0), o.eps, *_dropout(o), WIDTH=width, NUM_GROUPS=o.num_groups, CENTRED=o.centred, CONCAT=o.concat,
        BLOCK_N=rows, BLOCK_D=block, num_warps=GATE_WARPS,
    )  # fmt: skip
    return made


def gate_gradients(x: GateSlopes, o: OutputOptions) -> GateGradients:
    """Launch `hstu_gate_gradients_kernel`, whose parts are added up in float32."""
    total, columns = x.attended.shape
    width = columns // o.num_groups
    if not 0 < width <= WIDEST or not total:
        return torch_impl.gate_gradients(x, o)
    attended, gate, grad, block = _adjacent(x.attended), _adjacent(x.gate), x.grad.contiguous(), next_power_of_2(width)
    of_attended, of_gate, gated = (of.new_empty(of.shape) for of in (x.attended, x.gate, grad))
    rows, num_warps = gate_gradients_tile(block, x.attended.itemsize)
    num_parts, rows_of_part = split(total, rows, o.num_groups, GATE_PROGRAMS, grad.device)
    parts = grad.new_empty(num_parts, 2, columns, dtype=torch.float32)
    _launch_gate_gradients(
        (num_parts, o.num_groups),
        grad, attended, gate, x.norm_weight.contiguous(), _vector(x.norm_bias), x.dropout_seed, of_attended, of_gate, gated,
        parts, total, rows_of_part, attended.stride(0), gate.stride(0), o.eps, *_dropout(o), WIDTH=width,
        NUM_GROUPS=o.num_groups, CENTRED=o.centred, CONCAT=o.concat, BLOCK_N=rows, BLOCK_D=block, num_warps=num_warps,
    )  # fmt: skip
    return GateGradients(of_attended, of_gate, parts[:, 0].sum(0), parts[:, 1].sum(0), gated)


def _dropout(o: OutputOptions) -> tuple[int, float]:
    return (threshold(o.dropout_p) if o.dropout_p else 0), 1 / (1 - o.dropout_p)


def _vector(vector: Tensor | None) -> Tensor | None:
    return None if vector is None else vector.contiguous()


def _configuration(rows: Tensor, in_features: int, out_features: int) -> Configuration | None:
    if rows.dtype.itemsize != 2 or gpu(rows.device).capability < LEAST_CAPABILITY:
        return None
    return product_configuration(in_features, out_features)


def _adjacent(rows: Tensor) -> Tensor:
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _descriptor(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Describe a matrix, or a copy whose columns are adjacent and whose rows begin every 16 bytes."""
    is_aligned = matrix.stride(1) == 1 and matrix.stride(0) * matrix.itemsize % 16 == 0 and matrix.data_ptr() % 16 == 0
    matrix = matrix if is_aligned else matrix.clone(memory_format=torch.contiguous_format)
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns])
