"""Launches of layers of groups, and of the way back through their ReLU."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from jagged.ops._shared.launch import Launcher
from jagged.ops._shared.matrices import gpu, split
from jagged.ops._shared.sizes import cdiv, next_power_of_2
from jagged.ops.grouped_linear import torch_impl
from jagged.ops.grouped_linear.configurations import (
    LEAST_CAPABILITY,
    RELU_COLUMNS,
    RELU_ELEMENTS,
    RELU_PROGRAMS,
    RELU_WARPS,
    linear_configuration,
)
from jagged.ops.grouped_linear.kernels import grouped_linear_kernel, grouped_relu_gradient_kernel
from jagged.ops.grouped_linear.spec import Before, Inputs, NoOptions, Options, Outputs, Slopes

_launch_linear = Launcher(grouped_linear_kernel)
_launch_relu_gradient = Launcher(grouped_relu_gradient_kernel)


def grouped_linear(x: Inputs, o: Options) -> Outputs:
    """Launch `grouped_linear_kernel`.

    Products alone, float32, widths that no tile divides, and GPUs that load no tiles by themselves are the library's: the kernel
    is there for the bias and the ReLU, which are passes of their own otherwise.
    """
    rows, weight, bias = x
    num_groups, out_features, in_features = weight.shape
    if rows.dim() == 2:
        # All groups' columns are those of one layer.
        num_groups, out_features = 1, num_groups * out_features
    chosen, (multiprocessors, capability, _) = None, gpu(rows.device)
    if (bias is not None or o.relu) and rows.dtype.itemsize == 2 and capability >= LEAST_CAPABILITY:
        chosen = linear_configuration(in_features, out_features)
    if chosen is None or not rows.shape[0] or not weight.numel():
        return torch_impl.grouped_linear(x, o)
    output = rows.new_empty(rows.shape[0], *weight.shape[:2])
    read = _aligned(rows.reshape(rows.shape[0], num_groups * in_features))
    row_blocks = cdiv(rows.shape[0], chosen.rows)
    tiles = num_groups * row_blocks * (out_features // chosen.columns)
    _launch_linear(
        (min(tiles, chosen.programs * multiprocessors),),
        _descriptor(read, chosen.rows, chosen.inner),
        _descriptor(_aligned(weight.contiguous().view(-1, in_features)), chosen.columns, chosen.inner),
        None if bias is None else bias.contiguous(),
        _descriptor(output.view(output.shape[0], -1), chosen.rows, chosen.columns // 2),
        row_blocks, num_groups, OUT=out_features, IN=in_features, RELU=o.relu, BLOCK_M=chosen.rows, BLOCK_N=chosen.columns,
        BLOCK_K=chosen.inner, NUM_STAGES=chosen.num_stages, num_warps=chosen.num_warps,
    )  # fmt: skip
    return Outputs(output)


def relu_gradient(x: Slopes, o: NoOptions) -> Before:
    """Launch `grouped_relu_gradient_kernel`, whose parts are added up in float32."""
    grad, kept = x
    (num_rows, num_features), before = grad.shape, grad.new_empty(grad.shape)
    if not grad.numel():
        return Before(before, grad.new_zeros(num_features))
    columns = min(RELU_COLUMNS, next_power_of_2(num_features))
    column_blocks, rows = cdiv(num_features, columns), max(1, RELU_ELEMENTS // columns)
    num_parts, rows_of_part = split(num_rows, rows, column_blocks, RELU_PROGRAMS, grad.device)
    parts = grad.new_empty(num_parts, num_features, dtype=torch.float32)
    _launch_relu_gradient(
        (num_parts, column_blocks),
        grad, kept, before, parts, num_rows, rows_of_part, num_features, *grad.stride(), *kept.stride(), BLOCK_M=rows,
        BLOCK_N=columns, num_warps=RELU_WARPS,
    )  # fmt: skip
    return Before(before, parts.sum(0).to(grad.dtype))


def _aligned(matrix: Tensor) -> Tensor:
    """Return a matrix that a descriptor takes: its columns adjacent, its rows and itself every 16 bytes."""
    is_aligned = matrix.stride(1) == 1 and matrix.stride(0) * matrix.itemsize % 16 == 0 and matrix.data_ptr() % 16 == 0
    return matrix if is_aligned else matrix.clone(memory_format=torch.contiguous_format)


def _descriptor(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns])
