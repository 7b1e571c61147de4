"""A cross layer's last step as a Triton kernel: one pass over its rows, which reads what belongs to their sample there."""

from __future__ import annotations

import triton
import triton.language as tl

from jagged.ops._shared.device import find_tile
from jagged.ops._shared.launch import Launcher
from jagged.ops._shared.sizes import cdiv
from jagged.ops.elementwise.kernels import block_sizes
from jagged.ops.elementwise.spec import Combined, Crossed, Crossing


@triton.jit(do_not_specialize=["total", "num_samples"])
def cross_kernel(
    values, context, own, residual, offsets, output, total, num_samples, num_features, num_context, row_stride, feature_stride,
    context_row_stride, context_feature_stride, own_row_stride, own_feature_stride, residual_row_stride,
    residual_feature_stride, ADDS_FACTOR: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_FEATURES: tl.constexpr,
):  # fmt: skip
    """output[s] = values[s] * x + residual[s], with x = [context[sample of s], own[s]]; or + x, or + nothing."""
    sample, start, sample_length, first = find_tile(offsets, tl.program_id(0), num_samples, total, BLOCK_ROWS)
    if first >= sample_length:
        return
    position = first + tl.arange(0, BLOCK_ROWS)
    feature = (tl.program_id(1) * BLOCK_FEATURES + tl.arange(0, BLOCK_FEATURES)).to(tl.int64)[None, :]
    row_exists = (position < sample_length)[:, None]
    exists = row_exists & (feature < num_features)
    row = (start + position)[:, None]
    is_own = feature >= num_context
    of_sample = tl.load(
        context + sample * context_row_stride + feature * context_feature_stride, mask=feature < num_context, other=0.0
    )
    of_row = tl.load(own + row * own_row_stride + (feature - num_context) * own_feature_stride, mask=exists & is_own, other=0.0)
    factor = tl.where(is_own, of_row.to(tl.float32), tl.broadcast_to(of_sample.to(tl.float32), (BLOCK_ROWS, BLOCK_FEATURES)))
    result = tl.load(values + row * row_stride + feature * feature_stride, mask=exists, other=0.0).to(tl.float32) * factor
    if residual is not None:
        result += tl.load(residual + row * residual_row_stride + feature * residual_feature_stride, mask=exists, other=0.0)
    elif ADDS_FACTOR:
        result += factor
    tl.store(output + row * num_features + feature, result.to(output.dtype.element_ty), mask=exists)


_launch_cross = Launcher(cross_kernel)


def cross(x: Crossed, o: Crossing) -> Combined:
    """Launch `cross_kernel`."""
    values, context, own, offsets, residual = x
    (total, num_features), num_samples = values.shape, context.shape[0]
    output = values.new_empty(values.shape)
    if total and num_features and num_samples:
        block_rows, block_features, num_warps = block_sizes("cross", num_features)
        _launch_cross(
            (total // block_rows + num_samples, cdiv(num_features, block_features)),
            values, context, own, residual, offsets.contiguous(), output, total, num_samples, num_features, context.shape[1],
            *values.stride(), *context.stride(), *own.stride(), *(residual.stride() if residual is not None else (0, 0)),
            ADDS_FACTOR=o.adds_factor, BLOCK_ROWS=block_rows, BLOCK_FEATURES=block_features, num_warps=num_warps,
        )  # fmt: skip
    return Combined(output)
