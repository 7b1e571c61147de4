"""Backward pass of linear cross-entropy in chunks of items: logits and their gradients in buffers, products by the BLAS.

Logits are computed again once, not once for each side, and wide products are the BLAS's: faster for wide hidden states, for the
memory of the buffers. Each chunk of weight's gradient is written once; hidden's is added up in float32.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged.ops._shared.launch import Launcher
from jagged.ops._shared.sizes import cdiv
from jagged.ops.cross_entropy.strategy import DIRECT_MULTIPLE, MULTIPLE
from jagged.ops.cross_entropy.triton.arguments import Items, Rows
from jagged.ops.cross_entropy.triton.logits import load_rows, logit_gradients, logits_of_products

BLOCK_ROWS, BLOCK_ITEMS = 4, 512
# Numbers of a product from which on the BLAS has work for a whole GPU. Smaller ones it may split, and join the sums in 16 bits.
WHOLE_PRODUCT = 2**22


@triton.jit(do_not_specialize=["num_rows", "first_item", "last_item"])
def linear_cross_entropy_logit_gradients_kernel(
    products, target, row_shift, grad_softmax, grad_target, grad_smoothed, bias, item_scale, smoothing, gradients, num_rows,
    first_item, last_item, products_stride, gradients_stride, inverse_temperature, softcap, ACCURATE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of logits of the items from `first_item` on, from products in float32; they may take their place."""
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    item = first_item + column
    row_exists, exists = row < num_rows, item < last_item
    mask = row_exists[:, None] & exists[None, :]
    tile = tl.load(products + row.to(tl.int64)[:, None] * products_stride + column[None, :], mask=mask, other=0.0)
    row_target, shift, of_softmax, of_target = load_rows(target, row_shift, grad_softmax, grad_target, row, num_rows)
    logits = logits_of_products(tile, item, exists, bias, item_scale, softcap, 1)
    scores = logit_gradients(
        logits, item, exists, row, row_exists, row_target, shift, of_softmax, of_target, grad_smoothed, smoothing, softcap,
        inverse_temperature, ACCURATE,
    )  # fmt: skip
    # In one buffer no thread may write where another has yet to read.
    tl.debug_barrier()
    address = gradients + row.to(tl.int64)[:, None] * gradients_stride + column[None, :]
    tl.store(address, scores.to(gradients.dtype.element_ty), mask=mask)


_launch_logit_gradients = Launcher(linear_cross_entropy_logit_gradients_kernel)


def backward_chunked(
    rows: Rows, items: Items, chunk_items: int, wanted: Mapping[str, torch.dtype], *, on_hopper: bool
) -> dict[str, Tensor]:
    """Return the gradients that are wanted, of at least one row.

    On Hopper its kernel computes logits and their gradients, and nothing keeps the logits.
    """
    weight, (num_items, width) = items.weight, items.weight.shape
    hidden, num_rows = rows.hidden, rows.hidden.shape[0]
    weight_dtype = wanted.get("weight")
    # Of rows that begin at odd elements the BLAS has slow products alone.
    multiple = DIRECT_MULTIPLE if on_hopper else MULTIPLE
    columns = cdiv(chunk_items, multiple) * multiple
    products = None if on_hopper else hidden.new_empty(num_rows, columns, dtype=torch.float32)
    buffer = products if products is not None and hidden.dtype == torch.float32 else hidden.new_empty(num_rows, columns)
    grad_hidden = hidden.new_zeros(num_rows if "hidden" in wanted else 0, width, dtype=torch.float32)
    grad_weight = hidden.new_empty(num_items if weight_dtype else 0, width, dtype=weight_dtype)
    grad_bias = hidden.new_empty(num_items if "bias" in wanted else 0, dtype=torch.float32)
    # Products that the BLAS itself may round: of which nothing is to be scaled.
    is_plain = on_hopper and rows.inverse_scale is None and weight_dtype == hidden.dtype
    rounded = weight_dtype not in (None, torch.float32)
    most_rounded = min(chunk_items, cdiv(WHOLE_PRODUCT, width)) if is_plain else chunk_items
    sums = hidden.new_empty(most_rounded if rounded else 0, width, dtype=torch.float32)
    for first in range(0, num_items, chunk_items):
        last = min(first + chunk_items, num_items)
        gradients, part = buffer[:, : last - first], weight[first:last]
        if products is None:
            from jagged.ops.cross_entropy.hopper.logits import logit_gradients as logit_gradients_on_hopper

            logit_gradients_on_hopper(rows, weight, first, last, items.temperature, buffer)
        else:
            _logit_gradients(rows, items, products[:, : last - first], gradients, first, last)
        if "bias" in wanted:
            torch.sum(gradients, 0, dtype=torch.float32, out=grad_bias[first:last])
        scale = None if items.scale is None else items.scale[first:last, None]
        if scale is not None:
            # Not the gradients: those times the scale of a short row would be too large for float16.
            part = (part * scale).to(part.dtype)
        if "hidden" in wanted:
            _add_product(gradients, part, grad_hidden, beta=1)
        if weight_dtype:
            is_rounded = rounded and not (is_plain and (last - first) * width >= WHOLE_PRODUCT)
            out = sums[: last - first] if is_rounded else grad_weight[first:last]
            _add_product(gradients.t(), hidden, out, beta=0)
            if scale is not None:
                out.mul_(scale)
            if rows.inverse_scale is not None:
                out.mul_(rows.inverse_scale)
            if is_rounded:
                grad_weight[first:last] = out
    del products, buffer, sums, gradients
    if rows.inverse_scale is not None:
        grad_hidden.mul_(rows.inverse_scale)
        grad_bias.mul_(rows.inverse_scale)
    found = {"hidden": grad_hidden, "weight": grad_weight, "bias": grad_bias}
    return {name: found[name].to(dtype) for name, dtype in wanted.items()}


def _logit_gradients(rows: Rows, items: Items, products: Tensor, gradients: Tensor, first: int, last: int) -> None:
    _add_product(rows.hidden, items.weight[first:last].t(), products, beta=0)
    _launch_logit_gradients(
        (cdiv(products.shape[0], BLOCK_ROWS), cdiv(last - first, BLOCK_ITEMS)),
        products, *rows[1:-1], *items[1:4], gradients, products.shape[0], first, last, products.stride(0), gradients.stride(0),
        1 / items.temperature, items.softcap, ACCURATE=rows.hidden.dtype == torch.float32, BLOCK_N=BLOCK_ROWS,
        BLOCK_V=BLOCK_ITEMS,
    )  # fmt: skip


def _add_product(left: Tensor, right: Tensor, out: Tensor, *, beta: int) -> None:
    """out = beta * out + left @ right, added up in the dtype of `out`."""
    if left.is_cuda and left.dtype != out.dtype:
        torch.ops.aten.addmm.dtype_out(out, left, right, out.dtype, beta=beta, out=out)
    else:
        torch.addmm(out, left.to(out.dtype), right.to(out.dtype), beta=beta, out=out)
