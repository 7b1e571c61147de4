"""What backward's kernels need of rows, brought into the form that they read fastest, once and not for each tile."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged.ops._shared.device import load_tile
from jagged.ops._shared.launch import Launcher
from jagged.ops._shared.losses import side_by_side
from jagged.ops._shared.matrices import aligned
from jagged.ops._shared.sizes import cdiv
from jagged.ops.cross_entropy.spec import Inputs, Options
from jagged.ops.cross_entropy.triton.arguments import Rows
from jagged.ops.cross_entropy.triton.logits import LOG2_E

BLOCK_ROWS, BLOCK_WIDTH = 16, 256


@triton.jit(do_not_specialize=["num_rows", "num_items", "lse_stride", "target_stride", "smoothed_stride", "ignore_index"])
def linear_cross_entropy_rows_kernel(
    hidden, target, lse, grad_lse, grad_target, grad_smoothed, inverse_scale, clean, items, vectors, num_rows, num_items,
    lse_stride, target_stride, smoothed_stride, hidden_stride, inverse_temperature, ignore_index, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Rows of `Rows`: hidden states, targets, and the vectors of shifts and gradients, one after the other.

    Gradients of a mean are one number for all rows, of the stride 0.
    """
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    exists = row < num_rows
    item = tl.load(target + row, mask=exists, other=0)
    valid = exists & (item != ignore_index)
    scale = inverse_temperature / tl.load(inverse_scale) if inverse_scale is not None else inverse_temperature
    tl.store(items + row, tl.where(valid & (item >= 0) & (item < num_items), item, -1).to(tl.int32), mask=exists)
    # Of rows that do not count exponentials are 0, whatever their logits.
    shift = tl.load(lse + row, mask=valid, other=float("inf"))
    if hidden.dtype.element_ty != tl.float32:
        shift *= LOG2_E
    tl.store(vectors + row, shift, mask=exists)
    place = vectors + tl.cast(num_rows, tl.int64)
    tl.store(place + row, tl.load(grad_lse + row * lse_stride, mask=valid, other=0.0) * scale, mask=exists)
    place += num_rows
    tl.store(place + row, tl.load(grad_target + row * target_stride, mask=valid, other=0.0) * scale, mask=exists)
    if grad_smoothed is not None:
        place += num_rows
        tl.store(place + row, tl.load(grad_smoothed + row * smoothed_stride, mask=valid, other=0.0) * scale, mask=exists)
    for start in range(0, WIDTH, BLOCK_D):
        column = start + tl.arange(0, BLOCK_D)
        address = clean + row.to(tl.int64)[:, None] * WIDTH + column[None, :]
        tile = load_tile(hidden, row, hidden_stride, valid, start, WIDTH, BLOCK_D)
        tl.store(address, tile, mask=exists[:, None] & (column < WIDTH)[None, :])


_launch_rows = Launcher(linear_cross_entropy_rows_kernel)


def prepare_rows(
    x: Inputs,
    o: Options,
    lse: Tensor,
    grad_lse: Tensor,
    grad_target: Tensor,
    grad_smoothed: Tensor | None,
    inverse_scale: Tensor | None,
) -> Rows:
    """Return `Rows` of hidden states and targets of any strides, and of vectors `[N]` float32, gradients also of any."""
    hidden, num_rows = aligned(x.hidden), x.hidden.shape[0]
    grad_lse, grad_target = side_by_side(grad_lse), side_by_side(grad_target)
    grad_smoothed = None if grad_smoothed is None else side_by_side(grad_smoothed)
    clean = hidden.new_empty(*hidden.shape)
    items = x.target.new_empty(num_rows, dtype=torch.int32)
    vectors = lse.new_empty(3 if grad_smoothed is None else 4, num_rows)
    _launch_rows(
        (cdiv(num_rows, BLOCK_ROWS),),
        hidden, x.target.contiguous(), lse, grad_lse, grad_target, grad_smoothed, inverse_scale, clean, items, vectors, num_rows,
        x.weight.shape[0], grad_lse.stride(0), grad_target.stride(0), 0 if grad_smoothed is None else grad_smoothed.stride(0),
        hidden.stride(0), 1 / o.temperature, o.ignore_index, BLOCK_N=BLOCK_ROWS, BLOCK_D=BLOCK_WIDTH, WIDTH=hidden.shape[1],
    )  # fmt: skip
    shift, of_softmax, of_target, *of_smoothed = vectors.unbind()
    return Rows(clean, items, shift, of_softmax, of_target, of_smoothed[0] if of_smoothed else None, inverse_scale)
