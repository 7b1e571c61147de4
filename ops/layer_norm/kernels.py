"""Layer normalisation as Triton kernels: several rows a program, each read once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged.ops._shared.launch import Launcher
from jagged.ops._shared.matrices import split
from jagged.ops._shared.sizes import cdiv, next_power_of_2
from jagged.ops.layer_norm import torch_impl
from jagged.ops.layer_norm.spec import WIDEST, Epsilon, Found, Inputs, Options, Outputs, Slopes

# Elements of a tile and warps, forward and backward; backward's programs of a multiprocessor.
ELEMENTS, NUM_WARPS = 4096, 4
ELEMENTS_BACKWARD, NUM_WARPS_BACKWARD, PROGRAMS = 1024, 2, 8


@triton.jit
def normalised(rows, exists, eps, WIDTH: tl.constexpr):
    """Return (rows - mean) / sqrt(variance + eps), and 1 / sqrt(variance + eps) of each row."""
    centred = tl.where(exists, rows - (tl.sum(rows, 1) / WIDTH)[:, None], 0.0)
    inverse = 1.0 / tl.sqrt_rn(tl.sum(centred * centred, 1) / WIDTH + eps)
    return centred * inverse[:, None], inverse


@triton.jit(do_not_specialize=["num_rows"])
def layer_norm_kernel(
    x, weight, bias, output, num_rows, row_stride, eps, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr
):
    """output[n] = (x[n] - mean) / sqrt(variance + eps) * weight + bias, of `BLOCK_N` rows, in float32."""
    row = (tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    column = tl.arange(0, BLOCK_D)
    column_exists = column < WIDTH
    exists = (row < num_rows) & column_exists[None, :]
    rows = tl.load(x + row * row_stride + column[None, :], mask=exists, other=0.0).to(tl.float32)
    normal, _ = normalised(rows, exists, eps, WIDTH)
    factor = tl.load(weight + column, mask=column_exists, other=0.0).to(tl.float32)
    term = tl.load(bias + column, mask=column_exists, other=0.0).to(tl.float32)
    result = normal * factor[None, :] + term[None, :]
    tl.store(output + row * WIDTH + column[None, :], result.to(output.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["num_rows", "rows_of_part"])
def layer_norm_gradients_kernel(
    grad, x, weight, residual, of_x, parts, num_rows, rows_of_part, grad_row_stride, row_stride, residual_row_stride, eps,
    WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """of_x = residual + (s - mean(s) - z mean(s z)) / sqrt(variance + eps), with s = grad * weight and z the normalised row.

    parts[p] has the sums of grad * z and of grad over a part of the rows, in float32.
    """
    first = tl.program_id(0).to(tl.int64) * rows_of_part
    end = tl.minimum(first + rows_of_part, num_rows)
    column = tl.arange(0, BLOCK_D)
    column_exists = column < WIDTH
    factor = tl.load(weight + column, mask=column_exists, other=0.0).to(tl.float32)[None, :]
    of_weight = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    of_bias = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for start in range(first, end, BLOCK_N):
        row = (start + tl.arange(0, BLOCK_N))[:, None]
        exists = (row < end) & column_exists[None, :]
        rows = tl.load(x + row * row_stride + column[None, :], mask=exists, other=0.0).to(tl.float32)
        slopes = tl.load(grad + row * grad_row_stride + column[None, :], mask=exists, other=0.0).to(tl.float32)
        normal, inverse = normalised(rows, exists, eps, WIDTH)
        of_weight += slopes * normal
        of_bias += slopes
        scaled = slopes * factor
        along = (tl.sum(scaled * normal, 1) / WIDTH)[:, None]
        result = (scaled - (tl.sum(scaled, 1) / WIDTH)[:, None] - normal * along) * inverse[:, None]
        if residual is not None:
            result += tl.load(residual + row * residual_row_stride + column[None, :], mask=exists, other=0.0).to(tl.float32)
        tl.store(of_x + row * WIDTH + column[None, :], result.to(of_x.dtype.element_ty), mask=exists)
    parts += tl.program_id(0).to(tl.int64) * (2 * WIDTH) + column
    tl.store(parts, tl.sum(of_weight, 0), mask=column_exists)
    tl.store(parts + WIDTH, tl.sum(of_bias, 0), mask=column_exists)


_launch = Launcher(layer_norm_kernel)
_launch_gradients = Launcher(layer_norm_gradients_kernel)


def tile(width: int, elements: int) -> tuple[int, int] | None:
    """Return rows and columns of a tile; None for rows that are too wide for one program."""
    if not 0 < width <= WIDEST:
        return None
    columns = next_power_of_2(width)
    return max(1, elements // columns), columns


def layer_norm(x: Inputs, o: Options) -> Outputs:
    """Launch `layer_norm_kernel`."""
    (num_rows, width), chosen = x.x.shape, tile(x.x.shape[1], ELEMENTS)
    if chosen is None or not num_rows:
        return torch_impl.layer_norm(x, o)
    rows, output = _adjacent(x.x), x.x.new_empty(x.x.shape, dtype=o.dtype)
    _launch(
        (cdiv(num_rows, chosen[0]),),
        rows, x.weight.contiguous(), x.bias.contiguous(), output, num_rows, rows.stride(0), o.eps, WIDTH=width, BLOCK_N=chosen[0],
        BLOCK_D=chosen[1], num_warps=NUM_WARPS,
    )  # fmt: skip
    return Outputs(output)


def gradients(x: Slopes, o: Epsilon) -> Found:
    """Launch `layer_norm_gradients_kernel`, whose parts are added up in float32."""
    (num_rows, width), chosen = x.x.shape, tile(x.x.shape[1], ELEMENTS_BACKWARD)
    if chosen is None or not num_rows:
        return torch_impl.gradients(x, o)
    grad, rows, of_x = _adjacent(x.grad), _adjacent(x.x), x.x.new_empty(x.x.shape)
    residual = None if x.residual is None else _adjacent(x.residual)
    num_parts, rows_of_part = split(num_rows, chosen[0], 1, PROGRAMS, rows.device)
    parts = rows.new_empty(num_parts, 2, width, dtype=torch.float32)
    _launch_gradients(
        (num_parts,),
        grad, rows, x.weight.contiguous(), residual, of_x, parts, num_rows, rows_of_part, grad.stride(0), rows.stride(0),
        0 if residual is None else residual.stride(0), o.eps,
        WIDTH=width, BLOCK_N=chosen[0], BLOCK_D=chosen[1], num_warps=NUM_WARPS_BACKWARD,
    )  # fmt: skip
    # Of an operator no two outputs may share memory.
    of_weight, of_bias = (parts[:, of].sum(0).to(x.weight.dtype) for of in range(2))
    return Found(of_x, of_weight, of_bias)


def _adjacent(rows: Tensor) -> Tensor:
    return rows if rows.stride(1) == 1 else rows.contiguous()
