"""Backward pass of linear cross-entropy with nothing but the gradients in memory: logits are computed again for each side.

A program owns a block of rows (gradient of hidden) or of items (gradient of weight) and walks the other side; where the blocks
are too few to fill the GPU the walk is split, and the parts' gradients are added in a fixed order.

With a filter, tiles whose gradients of logits are all small are left out. The kernel of hidden's gradient says which those are,
so that of weight's need not compute their logits. Items are then visited in an order that has similar ones together.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged.ops._shared.device import dot, load_tile, logits_of_tiles
from jagged.ops._shared.matrices import split
from jagged.ops.cross_entropy.launch import Filter, Items, Rows, constants, hopper_serves, tile_for
from jagged.ops.cross_entropy.logits import load_rows, logit_gradients, logits_of_products

# Programs a launch aims at, by multiprocessor; each part of a gradient is written and read, so fewer than forward's.
PROGRAMS = 2
# Of hidden states; a thread has no registers for a wider gradient.
WIDEST_ON_HOPPER = 256


@triton.jit
def is_small(gradients, threshold):
    """Whether all are below the threshold in size; NaN is not."""
    is_large = (tl.abs(gradients) < threshold) == 0
    return tl.max(is_large.to(tl.int32), None) == 0


@triton.jit(do_not_specialize=["num_rows", "num_items", "items_per_part", "ignore_index"])
def linear_cross_entropy_backward_hidden_kernel(
    hidden, target, row_shift, grad_softmax, grad_target, grad_smoothed, inverse_scale, weight, bias, item_scale, smoothing,
    thresholds, order, is_kept, grad_hidden, num_rows, num_items, hidden_stride, weight_stride, items_per_part,
    inverse_temperature, softcap, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
    WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient of a block of rows from one part of the items: one tile of columns of `grad_hidden[part]`."""
    ACCURATE: tl.constexpr = hidden.dtype.element_ty == tl.float32
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(1)
    first_column = tl.program_id(2) * BLOCK_D
    row_exists = row < num_rows
    row_target, shift, of_softmax, of_target = load_rows(target, row_shift, grad_softmax, grad_target, row, num_rows)
    if WIDTH <= BLOCK_K:
        hidden_tile = load_tile(hidden, row, hidden_stride, row_exists, 0, WIDTH, BLOCK_D)
    if thresholds is not None:
        threshold = tl.load(thresholds)
        threshold_of_weight = tl.load(thresholds + 1)
    gradient = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    first = part * items_per_part
    # The sum of the first and the length may pass 2^31.
    for start in range(first, first + tl.minimum(items_per_part, num_items - first), BLOCK_V):
        item = start + tl.arange(0, BLOCK_V)
        exists = item < num_items
        if order is not None:
            item = tl.load(order + item, mask=exists, other=0)
        weight_tile = load_tile(weight, item, weight_stride, exists, first_column, WIDTH, BLOCK_D)
        if WIDTH <= BLOCK_K:
            products = dot(hidden_tile, tl.trans(weight_tile), None, PRECISION)
        else:
            products = logits_of_tiles(
                hidden, row, hidden_stride, row_exists, weight, item, weight_stride, exists, WIDTH, BLOCK_N, BLOCK_V, BLOCK_K,
                PRECISION,
            )  # fmt: skip
        logits = logits_of_products(products, item, exists, bias, item_scale, softcap, 1)
        # Past the last item the exponential of 0 may overflow, where all true logits are far below.
        logits = tl.where(exists[None, :], logits, float("-inf") if softcap is None else -softcap)
        scores = logit_gradients(
            logits, item, exists, row, row_exists, row_target, shift, of_softmax, of_target, grad_smoothed, smoothing, softcap,
            inverse_temperature, ACCURATE,
        )  # fmt: skip
        wanted = True
        if thresholds is not None:
            wanted = is_small(scores, threshold) == 0
            if is_kept is not None:
                place = is_kept + tl.program_id(0).to(tl.int64) * tl.cdiv(num_items, BLOCK_V) + start // BLOCK_V
                # Programs of other columns find and write the same.
                tl.store(place, (is_small(scores, threshold_of_weight) == 0).to(tl.int8))
        if wanted:
            if item_scale is not None:
                # Of the weights, which are at most 1 then: scores times the scale of a short row would be too large for float16.
                scale = tl.load(item_scale + item, mask=exists, other=0.0)
                weight_tile = (weight_tile.to(tl.float32) * scale[:, None]).to(weight_tile.dtype)
            gradient = dot(scores.to(weight_tile.dtype), weight_tile, gradient, PRECISION)
    column = first_column + tl.arange(0, BLOCK_D)
    address = grad_hidden + (part.to(tl.int64) * num_rows + row)[:, None] * WIDTH + column[None, :]
    if inverse_scale is not None:
        gradient *= tl.load(inverse_scale)
    tl.store(address, gradient.to(grad_hidden.dtype.element_ty), mask=row_exists[:, None] & (column < WIDTH)[None, :])


@triton.jit
def add_rows(
    gradient, of_bias, weight_tile, start, item, source, item_exists, hidden, target, row_shift, grad_softmax, grad_target,
    grad_smoothed, weight, bias, item_scale, smoothing, num_rows, hidden_stride, weight_stride, inverse_temperature, softcap,
    threshold, first_column, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr, HAS_GRAD_BIAS: tl.constexpr,
):  # fmt: skip
    """Take the rows from `start` on into the gradients of a block of items and of their biases."""
    ACCURATE: tl.constexpr = hidden.dtype.element_ty == tl.float32
    row = start + tl.arange(0, BLOCK_N)
    row_exists = row < num_rows
    row_target, shift, of_softmax, of_target = load_rows(target, row_shift, grad_softmax, grad_target, row, num_rows)
    hidden_tile = load_tile(hidden, row, hidden_stride, row_exists, first_column, WIDTH, BLOCK_D)
    if WIDTH <= BLOCK_K:
        products = dot(hidden_tile, tl.trans(weight_tile), None, PRECISION)
    else:
        products = logits_of_tiles(
            hidden, row, hidden_stride, row_exists, weight, source, weight_stride, source >= 0, WIDTH, BLOCK_N, BLOCK_V, BLOCK_K,
            PRECISION,
        )  # fmt: skip
    logits = logits_of_products(products, source, source >= 0, bias, item_scale, softcap, 1)
    scores = logit_gradients(
        logits, item, item_exists, row, row_exists, row_target, shift, of_softmax, of_target, grad_smoothed, smoothing, softcap,
        inverse_temperature, ACCURATE,
    )  # fmt: skip
    wanted = True
    if threshold is not None:
        wanted = is_small(scores, threshold) == 0
    if wanted:
        if HAS_GRAD_BIAS:
            of_bias += tl.sum(scores, 0)
        gradient = dot(tl.trans(scores.to(hidden_tile.dtype)), hidden_tile, gradient, PRECISION)
    return gradient, of_bias


@triton.jit(do_not_specialize=["num_rows", "num_items", "rows_per_part", "ignore_index"])
def linear_cross_entropy_backward_weight_kernel(
    hidden, target, row_shift, grad_softmax, grad_target, grad_smoothed, inverse_scale, weight, bias, item_scale, smoothing,
    thresholds, order, is_kept, grad_weight, grad_bias, num_rows, num_items, hidden_stride, weight_stride, rows_per_part,
    inverse_temperature, softcap, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
    KEPT_N: tl.constexpr, KEPT_V: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient of a block of items from one part of the rows: one tile of columns of `grad_weight[part]`, and `grad_bias[part]`.

    `is_kept` has a byte for each tile of `KEPT_N` rows and `KEPT_V` items.
    """
    place = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    part = tl.program_id(1)
    first_column = tl.program_id(2) * BLOCK_D
    exists = place < num_items
    # Places past the last item repeat it and are not stored: zeros there could overflow, far above the log-sum-exp.
    source = tl.minimum(place, num_items - 1)
    item = place
    if order is not None:
        source = tl.load(order + source)
        item = tl.where(exists, source, num_items)
    threshold = None
    if thresholds is not None and is_kept is None:
        threshold = tl.load(thresholds + 1)
    weight_tile = None
    if WIDTH <= BLOCK_K:
        weight_tile = load_tile(weight, source, weight_stride, source >= 0, 0, WIDTH, BLOCK_D)
    gradient = tl.zeros((BLOCK_V, BLOCK_D), tl.float32)
    of_bias = tl.zeros((BLOCK_V,), tl.float32)
    first = part * rows_per_part
    for start in range(first, tl.minimum(first + rows_per_part, num_rows), BLOCK_N):
        wanted = True
        if is_kept is not None:
            kept = is_kept + tl.cast(start // KEPT_N, tl.int64) * tl.cdiv(num_items, KEPT_V) + place // KEPT_V
            wanted = tl.max(tl.load(kept, mask=exists, other=0), 0) > 0
        if wanted:
            gradient, of_bias = add_rows(
                gradient, of_bias, weight_tile, start, item, source, exists, hidden, target, row_shift, grad_softmax,
                grad_target, grad_smoothed, weight, bias, item_scale, smoothing, num_rows, hidden_stride, weight_stride,
                inverse_temperature, softcap, threshold, first_column, BLOCK_N, BLOCK_V, BLOCK_D, BLOCK_K, WIDTH, PRECISION,
                grad_bias is not None,
            )  # fmt: skip
    if inverse_scale is not None:
        inverse = tl.load(inverse_scale)
        gradient *= inverse
        of_bias *= inverse
    if item_scale is not None:
        gradient *= tl.load(item_scale + source)[:, None]
    column = first_column + tl.arange(0, BLOCK_D)
    stored = part.to(tl.int64) * num_items + item
    tl.store(
        grad_weight + stored[:, None] * WIDTH + column[None, :],
        gradient.to(grad_weight.dtype.element_ty),
        mask=exists[:, None] & (column < WIDTH)[None, :],
    )
    if grad_bias is not None and first_column == 0:
        tl.store(grad_bias + stored, of_bias, mask=exists)


def backward_fused(
    rows: Rows,
    items: Items,
    filter: Filter | None,
    hidden_dtype: torch.dtype | None,
    weight_dtype: torch.dtype | None,
    has_grad_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of hidden, weight and bias, empty where they are not wanted."""
    hidden, weight = rows.hidden, items.weight
    num_rows, num_items, width = hidden.shape[0], weight.shape[0], hidden.shape[1]
    options = (filter, *items[1:4], items.softcap, has_grad_bias or None)
    if num_rows and width <= WIDEST_ON_HOPPER and hopper_serves((hidden, weight), options):
        from jagged.ops.cross_entropy.hopper_backward import gradient

        grad_hidden, grad_weight = (
            gradient(rows, items, dtype, owns_items=owns_items) if dtype else hidden.new_empty(0)
            for dtype, owns_items in ((hidden_dtype, False), (weight_dtype, True))
        )
        return grad_hidden, grad_weight, hidden.new_empty(0, dtype=torch.float32)
    inputs = (*rows, *items[:4])
    sizes = (num_rows, num_items, hidden.stride(0), weight.stride(0))
    shaping = (1 / items.temperature, items.softcap)
    thresholds, order = (None, None) if filter is None else filter
    tile, kept_tile = (
        tile_for(kernel, hidden, is_scaled=items.scale is not None) for kernel in ("backward_weight", "backward_hidden")
    )
    grad_hidden, grad_weight, grad_bias, is_kept = (
        hidden.new_empty(0),
        hidden.new_empty(0),
        hidden.new_empty(0, dtype=torch.float32),
        None,
    )
    needs_items = weight_dtype is not None or has_grad_bias
    if hidden_dtype is not None:
        blocks, columns = triton.cdiv(num_rows, kept_tile.rows), triton.cdiv(width, kept_tile.columns)
        num_parts, items_per_part = split(num_items, kept_tile.items, blocks * columns, PROGRAMS, hidden.device)
        parts = _empty_parts(num_parts, (num_rows, width), hidden, hidden_dtype)
        if filter is not None and needs_items:
            is_kept = hidden.new_empty(blocks, triton.cdiv(num_items, kept_tile.items), dtype=torch.int8)
        if parts.numel():
            linear_cross_entropy_backward_hidden_kernel[(blocks, num_parts, columns)](
                *inputs, thresholds, order, is_kept, parts, *sizes, items_per_part, *shaping,
                **constants(kept_tile, hidden), BLOCK_D=kept_tile.columns,
            )  # fmt: skip
        grad_hidden = _join(parts, hidden_dtype)
    if needs_items:
        blocks, columns = triton.cdiv(num_items, tile.items), triton.cdiv(width, tile.columns)
        num_parts, rows_per_part = split(num_rows, tile.rows, blocks * columns, PROGRAMS, hidden.device)
        parts = _empty_parts(num_parts, (num_items, width), weight, weight_dtype or weight.dtype)
        bias_parts = parts.new_empty(num_parts, num_items, dtype=torch.float32) if has_grad_bias else None
        if num_rows == 0:
            parts.zero_()
            if bias_parts is not None:
                bias_parts.zero_()
        elif parts.numel():
            linear_cross_entropy_backward_weight_kernel[(blocks, num_parts, columns)](
                *inputs, thresholds, order, is_kept, parts, bias_parts, *sizes, rows_per_part, *shaping,
                **constants(tile, hidden), BLOCK_D=tile.columns, KEPT_N=kept_tile.rows, KEPT_V=kept_tile.items,
            )  # fmt: skip
        grad_weight = _join(parts, weight_dtype or weight.dtype)
        if bias_parts is not None:
            grad_bias = bias_parts.sum(0)
    return grad_hidden, grad_weight, grad_bias


def _empty_parts(num_parts: int, shape: tuple[int, int], like: Tensor, dtype: torch.dtype) -> Tensor:
    return like.new_empty(num_parts, *shape, dtype=dtype if num_parts == 1 else torch.float32)


def _join(parts: Tensor, dtype: torch.dtype) -> Tensor:
    return parts[0] if parts.shape[0] == 1 else parts.sum(0).to(dtype)
