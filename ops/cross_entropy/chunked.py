"""Backward pass of linear cross-entropy in chunks of items: gradients of logits in a buffer, products with them by the BLAS.

Logits are computed again once, not once for each side, and wide products are the BLAS's: faster for wide hidden states, for the
memory of a buffer. Each chunk of weight's gradient is written once; hidden's is added up in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged.ops._shared.device import dot, load_tile, logits_of_tiles
from jagged.ops._shared.matrices import split
from jagged.ops.cross_entropy.launch import Items, Rows, constants, tile_for
from jagged.ops.cross_entropy.logits import load_rows, logit_gradients, logits_of_products

PROGRAMS = 2


@triton.jit(do_not_specialize=["num_rows", "first_item", "last_item", "items_per_part"])
def linear_cross_entropy_logit_gradients_kernel(
    hidden, target, row_shift, grad_softmax, grad_target, grad_smoothed, weight, bias, item_scale, smoothing, gradients,
    num_rows, hidden_stride, weight_stride, gradients_stride, first_item, last_item, items_per_part,
    inverse_temperature, softcap, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the logits of a block of rows and one part of the items `first_item` to `last_item`, in their dtype."""
    ACCURATE: tl.constexpr = hidden.dtype.element_ty == tl.float32
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_exists = row < num_rows
    row_target, shift, of_softmax, of_target = load_rows(target, row_shift, grad_softmax, grad_target, row, num_rows)
    if WIDTH <= BLOCK_K:
        hidden_tile = load_tile(hidden, row, hidden_stride, row_exists, 0, WIDTH, BLOCK_K)
    first = first_item + tl.program_id(1) * items_per_part
    for start in range(first, tl.minimum(first + items_per_part, last_item), BLOCK_V):
        item = start + tl.arange(0, BLOCK_V)
        exists = item < last_item
        if WIDTH <= BLOCK_K:
            products = dot(
                hidden_tile, tl.trans(load_tile(weight, item, weight_stride, exists, 0, WIDTH, BLOCK_K)), None, PRECISION
            )
        else:
            products = logits_of_tiles(
                hidden, row, hidden_stride, row_exists, weight, item, weight_stride, exists, WIDTH, BLOCK_N, BLOCK_V, BLOCK_K,
                PRECISION,
            )  # fmt: skip
        logits = logits_of_products(products, item, exists, bias, item_scale, softcap, 1)
        scores = logit_gradients(
            logits, item, exists, row, row_exists, row_target, shift, of_softmax, of_target, grad_smoothed, smoothing, softcap,
            inverse_temperature, ACCURATE,
        )  # fmt: skip
        address = gradients + row.to(tl.int64)[:, None] * gradients_stride + (item - first_item)[None, :]
        tl.store(address, scores.to(gradients.dtype.element_ty), mask=row_exists[:, None] & exists[None, :])


def backward_chunked(
    rows: Rows,
    items: Items,
    chunk_items: int,
    hidden_dtype: torch.dtype | None,
    weight_dtype: torch.dtype | None,
    has_grad_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of hidden, weight and bias, empty where they are not wanted."""
    weight, (num_items, width) = items.weight, items.weight.shape
    hidden, num_rows = rows.hidden, rows.hidden.shape[0]
    buffer = hidden.new_empty(num_rows, chunk_items)
    grad_hidden = hidden.new_zeros(num_rows if hidden_dtype else 0, width, dtype=torch.float32)
    grad_weight = hidden.new_empty(num_items if weight_dtype else 0, width, dtype=weight_dtype)
    grad_bias = hidden.new_empty(num_items if has_grad_bias else 0, dtype=torch.float32)
    product = hidden.new_empty(chunk_items, width, dtype=torch.float32) if weight_dtype not in (None, torch.float32) else None
    for first in range(0, num_items, chunk_items):
        last = min(first + chunk_items, num_items)
        gradients, part = buffer[:, : last - first], weight[first:last]
        _logit_gradients(rows, items, gradients, first, last)
        if has_grad_bias:
            torch.sum(gradients, 0, dtype=torch.float32, out=grad_bias[first:last])
        if items.scale is not None:
            # Products are with hidden states and with weights at their scale.
            gradients.mul_(items.scale[first:last])
        if hidden_dtype:
            _add_product(gradients, part, grad_hidden, beta=1)
        if weight_dtype:
            out = grad_weight[first:last] if product is None else product[: last - first]
            _add_product(gradients.t(), hidden, out, beta=0)
            if rows.inverse_scale is not None:
                out.mul_(rows.inverse_scale)
            if product is not None:
                grad_weight[first:last] = out
    del buffer, product, gradients
    if rows.inverse_scale is not None:
        grad_hidden.mul_(rows.inverse_scale)
        grad_bias.mul_(rows.inverse_scale)
    return grad_hidden.to(hidden_dtype or torch.float32), grad_weight, grad_bias


def _logit_gradients(rows: Rows, items: Items, gradients: Tensor, first: int, last: int) -> None:
    hidden, weight = rows.hidden, items.weight
    tile = tile_for("logit_gradients", hidden)
    blocks = triton.cdiv(hidden.shape[0], tile.rows)
    num_parts, items_per_part = split(last - first, tile.items, blocks, PROGRAMS, hidden.device)
    linear_cross_entropy_logit_gradients_kernel[(blocks, num_parts)](
        *rows[:-1], *items[:4], gradients, hidden.shape[0], hidden.stride(0), weight.stride(0), gradients.stride(0), first, last,
        items_per_part, 1 / items.temperature, items.softcap,
        **constants(tile, hidden),
    )  # fmt: skip


def _add_product(left: Tensor, right: Tensor, out: Tensor, *, beta: int) -> None:
    """out = beta * out + left @ right, added up in the dtype of `out`."""
    if left.is_cuda and left.dtype != out.dtype:
        torch.ops.aten.addmm.dtype_out(out, left, right, out.dtype, beta=beta, out=out)
    else:
        torch.addmm(out, left.to(out.dtype), right.to(out.dtype), beta=beta, out=out)
