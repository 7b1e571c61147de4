"""Linear cross-entropy as Triton kernels: tiles of logits live in registers and are computed again in backward.

Each kernel owns a block of its output (rows, or items) and walks the other side; where the blocks are too few to fill the GPU
the walk is split, and the parts' results are added afterwards in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged.ops._shared.device import dot, exp_of_difference, load_tile, logits_of_tiles, rounded_product
from jagged.ops._shared.matrices import aligned, device_properties, inverse_scale_of
from jagged.ops.cross_entropy.tiles import Tile, tile_of

JOIN_ROWS, JOIN_WIDTH = 16, 128
# Programs a launch aims at, by multiprocessor: backward keeps fewer in flight, and each part of a gradient is written and read.
FORWARD_PROGRAMS, BACKWARD_PROGRAMS = 4, 2


@triton.jit(do_not_specialize=["num_rows", "num_items", "items_per_part", "ignore_index"])
def linear_cross_entropy_forward_kernel(
    hidden, weight, target, part_maximum, part_sum, num_rows, num_items, hidden_stride, weight_stride, items_per_part,
    ignore_index, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Maximum of the logits and sum of exponentials relative to it, for a block of rows over one part of the items."""
    ACCURATE: tl.constexpr = hidden.dtype.element_ty == tl.float32
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(1)
    exists = row < num_rows
    valid = exists & (tl.load(target + row, mask=exists, other=0) != ignore_index)
    if WIDTH <= BLOCK_K:
        hidden_tile = load_tile(hidden, row, hidden_stride, valid, 0, WIDTH, BLOCK_K)
    maximum = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_N,), tl.float32)
    first_item = part * items_per_part
    for start in range(first_item, tl.minimum(first_item + items_per_part, num_items), BLOCK_V):
        item = start + tl.arange(0, BLOCK_V)
        item_exists = item < num_items
        if WIDTH <= BLOCK_K:
            weight_tile = load_tile(weight, item, weight_stride, item_exists, 0, WIDTH, BLOCK_K)
            logits = dot(hidden_tile, tl.trans(weight_tile), None, PRECISION)
        else:
            logits = logits_of_tiles(
                hidden, row, hidden_stride, valid, weight, item, weight_stride, item_exists, WIDTH,
                BLOCK_N, BLOCK_V, BLOCK_K, PRECISION,
            )  # fmt: skip
        logits = tl.where(item_exists[None, :], logits, float("-inf"))
        highest = tl.maximum(maximum, tl.max(logits, 1))
        # A row of -inf alone has no maximum to subtract.
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        total = total * exp_of_difference(maximum - shift, ACCURATE) + tl.sum(
            exp_of_difference(logits - shift[:, None], ACCURATE), 1
        )
        maximum = highest
    place = part.to(tl.int64) * num_rows + row
    tl.store(part_maximum + place, maximum, mask=exists)
    tl.store(part_sum + place, total, mask=exists)


@triton.jit(do_not_specialize=["num_rows", "num_items", "num_parts", "ignore_index"])
def linear_cross_entropy_join_kernel(
    hidden, weight, target, part_maximum, part_sum, lse, target_logit, num_rows, num_items, num_parts, hidden_stride,
    weight_stride, ignore_index, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Log-sum-exp of a block of rows from its parts, and the logits of the rows' targets."""
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    exists = row < num_rows
    item = tl.load(target + row, mask=exists, other=0)
    valid = exists & (item != ignore_index)
    known = valid & (item >= 0) & (item < num_items)
    maximum = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    for part in range(0, num_parts):
        place = tl.cast(part, tl.int64) * num_rows + row
        maximum = tl.maximum(maximum, tl.load(part_maximum + place, mask=exists, other=float("-inf")))
    shift = tl.where(maximum == float("-inf"), 0.0, maximum)
    total = tl.where(exists, 0.0, 1.0)
    for part in range(0, num_parts):
        place = tl.cast(part, tl.int64) * num_rows + row
        scale = exp_of_difference(tl.load(part_maximum + place, mask=exists, other=float("-inf")) - shift, True)
        total += scale * tl.load(part_sum + place, mask=exists, other=0.0)
    logit = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, WIDTH, BLOCK_D):
        hidden_tile = load_tile(hidden, row, hidden_stride, known, start, WIDTH, BLOCK_D).to(tl.float32)
        logit += tl.sum(rounded_product(hidden_tile, load_tile(weight, item, weight_stride, known, start, WIDTH, BLOCK_D)), 1)
    tl.store(lse + row, tl.where(valid, shift + tl.log(total), 0.0), mask=exists)
    # An item that does not exist has no logit; NaN says so in the loss.
    tl.store(target_logit + row, tl.where(known, logit, tl.where(valid, float("nan"), 0.0)), mask=exists)


@triton.jit
def load_rows(
    target, lse, grad_loss, grad_lse, row, num_rows, num_items, ignore_index, scale, HAS_GRAD_LSE: tl.constexpr
):  # fmt: skip
    """What backward needs of rows: whether they count, target, log-sum-exp, gradients of softmax and target's logit.

    Gradients are multiplied by `scale` and zero in ignored rows; the target is -1 where no such item exists.
    """
    exists = row < num_rows
    item = tl.load(target + row, mask=exists, other=0)
    valid = exists & (item != ignore_index)
    item = tl.where((item >= 0) & (item < num_items), item, -1).to(tl.int32)
    row_lse = tl.load(lse + row, mask=valid, other=0.0)
    grad_target = tl.load(grad_loss + row, mask=valid, other=0.0) * scale
    grad_softmax = grad_target
    if HAS_GRAD_LSE:
        grad_softmax += tl.load(grad_lse + row, mask=valid, other=0.0) * scale
    return valid, item, row_lse, grad_softmax, grad_target


@triton.jit(do_not_specialize=["num_rows", "num_items", "items_per_part", "ignore_index"])
def linear_cross_entropy_backward_hidden_kernel(
    grad_loss, grad_lse, hidden, weight, target, lse, inverse_scale, grad_hidden, num_rows, num_items, hidden_stride,
    weight_stride, items_per_part, ignore_index, HAS_GRAD_LSE: tl.constexpr, HAS_SCALE: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient of a block of rows from one part of the items: one tile of columns of `grad_hidden[part]`."""
    ACCURATE: tl.constexpr = hidden.dtype.element_ty == tl.float32
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(1)
    first_column = tl.program_id(2) * BLOCK_D
    inverse = tl.load(inverse_scale) if HAS_SCALE else 1.0
    valid, row_target, row_lse, grad_softmax, grad_target = load_rows(
        target, lse, grad_loss, grad_lse, row, num_rows, num_items, ignore_index, 1 / inverse, HAS_GRAD_LSE
    )
    if WIDTH <= BLOCK_K:
        hidden_tile = load_tile(hidden, row, hidden_stride, valid, 0, WIDTH, BLOCK_D)
    gradient = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    first_item = part * items_per_part
    for start in range(first_item, tl.minimum(first_item + items_per_part, num_items), BLOCK_V):
        item = start + tl.arange(0, BLOCK_V)
        item_exists = item < num_items
        weight_tile = load_tile(weight, item, weight_stride, item_exists, first_column, WIDTH, BLOCK_D)
        if WIDTH <= BLOCK_K:
            logits = dot(hidden_tile, tl.trans(weight_tile), None, PRECISION)
        else:
            logits = logits_of_tiles(
                hidden, row, hidden_stride, valid, weight, item, weight_stride, item_exists, WIDTH,
                BLOCK_N, BLOCK_V, BLOCK_K, PRECISION,
            )  # fmt: skip
        # Past the last item the logit is 0 and its exponential may overflow, when all true logits are far below.
        logits = tl.where(item_exists[None, :], logits, float("-inf"))
        scores = exp_of_difference(logits - row_lse[:, None], ACCURATE) * grad_softmax[:, None]
        # Before the rounding to the weights' dtype, where the difference is small for a target that is well predicted.
        scores = tl.where(row_target[:, None] == item[None, :], scores - grad_target[:, None], scores)
        gradient = dot(scores.to(weight_tile.dtype), weight_tile, gradient, PRECISION)
    column = first_column + tl.arange(0, BLOCK_D)
    address = grad_hidden + (part.to(tl.int64) * num_rows + row)[:, None] * WIDTH + column[None, :]
    gradient = (gradient * inverse).to(grad_hidden.dtype.element_ty)
    tl.store(address, gradient, mask=(row < num_rows)[:, None] & (column < WIDTH)[None, :])


@triton.jit(do_not_specialize=["num_rows", "num_items", "rows_per_part", "ignore_index"])
def linear_cross_entropy_backward_weight_kernel(
    grad_loss, grad_lse, hidden, weight, target, lse, inverse_scale, grad_weight, num_rows, num_items, hidden_stride,
    weight_stride, rows_per_part, ignore_index, HAS_GRAD_LSE: tl.constexpr, HAS_SCALE: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient of a block of items from one part of the rows: one tile of columns of `grad_weight[part]`."""
    ACCURATE: tl.constexpr = hidden.dtype.element_ty == tl.float32
    item = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    part = tl.program_id(1)
    first_column = tl.program_id(2) * BLOCK_D
    item_exists = item < num_items
    # Places past the last item repeat it and are not stored: zeros there could overflow, far above the log-sum-exp.
    source = tl.minimum(item, num_items - 1)
    inverse = tl.load(inverse_scale) if HAS_SCALE else 1.0
    if WIDTH <= BLOCK_K:
        weight_tile = load_tile(weight, source, weight_stride, source >= 0, 0, WIDTH, BLOCK_D)
    gradient = tl.zeros((BLOCK_V, BLOCK_D), tl.float32)
    first_row = part * rows_per_part
    for start in range(first_row, tl.minimum(first_row + rows_per_part, num_rows), BLOCK_N):
        row = start + tl.arange(0, BLOCK_N)
        valid, row_target, row_lse, grad_softmax, grad_target = load_rows(
            target, lse, grad_loss, grad_lse, row, num_rows, num_items, ignore_index, 1 / inverse, HAS_GRAD_LSE
        )
        hidden_tile = load_tile(hidden, row, hidden_stride, valid, first_column, WIDTH, BLOCK_D)
        if WIDTH <= BLOCK_K:
            logits = dot(weight_tile, tl.trans(hidden_tile), None, PRECISION)
        else:
            logits = logits_of_tiles(
                weight, source, weight_stride, source >= 0, hidden, row, hidden_stride, valid, WIDTH,
                BLOCK_V, BLOCK_N, BLOCK_K, PRECISION,
            )  # fmt: skip
        scores = exp_of_difference(logits - row_lse[None, :], ACCURATE) * grad_softmax[None, :]
        scores = tl.where(row_target[None, :] == item[:, None], scores - grad_target[None, :], scores)
        gradient = dot(scores.to(hidden_tile.dtype), hidden_tile, gradient, PRECISION)
    column = first_column + tl.arange(0, BLOCK_D)
    address = grad_weight + (part.to(tl.int64) * num_items + item)[:, None] * WIDTH + column[None, :]
    gradient = (gradient * inverse).to(grad_weight.dtype.element_ty)
    tl.store(address, gradient, mask=item_exists[:, None] & (column < WIDTH)[None, :])


def linear_cross_entropy_forward(hidden: Tensor, weight: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exp and the target's logit of each row, `[N]` float32 both, 0 in ignored rows."""
    num_rows, num_items = hidden.shape[0], weight.shape[0]
    lse = hidden.new_empty(num_rows, dtype=torch.float32)
    target_logit = torch.empty_like(lse)
    if num_rows == 0:
        return lse, target_logit
    hidden, weight, target = aligned(hidden), aligned(weight), target.contiguous()
    tile = _tile("forward", hidden.shape[1], hidden)
    row_blocks = triton.cdiv(num_rows, tile.rows)
    num_parts, items_per_part = _split(num_items, tile.items, row_blocks, FORWARD_PROGRAMS, hidden.device)
    part_maximum, part_sum = lse.new_empty(2, num_parts, num_rows).unbind()
    with torch.cuda.device_of(hidden):
        linear_cross_entropy_forward_kernel[(row_blocks, num_parts)](
            hidden, weight, target, part_maximum, part_sum, num_rows, num_items, hidden.stride(0), weight.stride(0),
            items_per_part, ignore_index, **_constants(tile, hidden),
        )  # fmt: skip
        linear_cross_entropy_join_kernel[(triton.cdiv(num_rows, JOIN_ROWS),)](
            hidden, weight, target, part_maximum, part_sum, lse, target_logit, num_rows, num_items, num_parts,
            hidden.stride(0), weight.stride(0), ignore_index, BLOCK_N=JOIN_ROWS, BLOCK_D=JOIN_WIDTH, WIDTH=hidden.shape[1],
        )  # fmt: skip
    return lse, target_logit


def linear_cross_entropy_backward(
    grad_loss: Tensor,
    grad_lse: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    lse: Tensor,
    ignore_index: int,
    hidden_grad_dtype: torch.dtype | None,
    weight_grad_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of hidden and weight, empty where no dtype asks for one."""
    num_rows, num_items, grad_width = hidden.shape[0], weight.shape[0], hidden.shape[1]
    grad_loss = grad_loss.contiguous()
    grad_lse = None if grad_lse is None else grad_lse.contiguous()
    hidden, weight, target = aligned(hidden), aligned(weight), target.contiguous()
    needs_scale = hidden.dtype == torch.float16 and num_rows > 0
    inverse_scale = inverse_scale_of(grad_loss, grad_lse, target != ignore_index) if needs_scale else None
    width = hidden.shape[1]
    inputs = (grad_loss, grad_lse, hidden, weight, target, lse, inverse_scale)
    sizes = (num_rows, num_items, hidden.stride(0), weight.stride(0))
    flags = {"HAS_GRAD_LSE": grad_lse is not None, "HAS_SCALE": inverse_scale is not None}
    grad_hidden, grad_weight = hidden.new_empty(0), hidden.new_empty(0)
    with torch.cuda.device_of(hidden):
        if hidden_grad_dtype is not None:
            tile = _tile("backward_hidden", width, hidden)
            blocks, columns = triton.cdiv(num_rows, tile.rows), triton.cdiv(width, tile.columns)
            num_parts, items_per_part = _split(num_items, tile.items, blocks * columns, BACKWARD_PROGRAMS, hidden.device)
            parts = _empty_parts(num_parts, (num_rows, width), hidden, hidden_grad_dtype)
            if parts.numel():
                linear_cross_entropy_backward_hidden_kernel[(blocks, num_parts, columns)](
                    *inputs, parts, *sizes, items_per_part, ignore_index, **flags, **_constants(tile, hidden),
                    BLOCK_D=tile.columns,
                )  # fmt: skip
            grad_hidden = _join(parts, grad_width, hidden_grad_dtype)
        if weight_grad_dtype is not None:
            tile = _tile("backward_weight", width, hidden)
            blocks, columns = triton.cdiv(num_items, tile.items), triton.cdiv(width, tile.columns)
            num_parts, rows_per_part = _split(num_rows, tile.rows, blocks * columns, BACKWARD_PROGRAMS, hidden.device)
            parts = _empty_parts(num_parts, (num_items, width), weight, weight_grad_dtype)
            if num_rows == 0:
                parts.zero_()
            elif parts.numel():
                linear_cross_entropy_backward_weight_kernel[(blocks, num_parts, columns)](
                    *inputs, parts, *sizes, rows_per_part, ignore_index, **flags, **_constants(tile, hidden),
                    BLOCK_D=tile.columns,
                )  # fmt: skip
            grad_weight = _join(parts, grad_width, weight_grad_dtype)
    return grad_hidden, grad_weight


def _split(length: int, block: int, blocks: int, programs: int, device: torch.device) -> tuple[int, int]:
    """Return how many parts of a walk over `length` give each multiprocessor `programs`, and the length of a part.

    `blocks` programs make the walk together, in steps of `block`.
    """
    steps = max(1, triton.cdiv(length, block))
    wanted = triton.cdiv(programs * device_properties(device)[0], max(1, blocks))
    steps_per_part = triton.cdiv(steps, min(steps, wanted))
    return triton.cdiv(steps, steps_per_part), steps_per_part * block


def _tile(kernel: str, width: int, hidden: Tensor) -> Tile:
    return tile_of(kernel, width, hidden.dtype, device_properties(hidden.device)[1])


def _empty_parts(num_parts: int, shape: tuple[int, int], like: Tensor, dtype: torch.dtype) -> Tensor:
    return like.new_empty(num_parts, *shape, dtype=dtype if num_parts == 1 else torch.float32)


def _join(parts: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    if parts.shape[0] == 1:
        return parts[0, :, :width].contiguous()
    return parts[:, :, :width].sum(0).to(dtype)


def _constants(tile: Tile, hidden: Tensor) -> dict[str, int | bool | str]:
    return {
        "BLOCK_N": tile.rows,
        "BLOCK_V": tile.items,
        "BLOCK_K": tile.step,
        "WIDTH": hidden.shape[1],
        "PRECISION": "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32",
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
