"""Forward pass of linear cross-entropy: tiles of logits live in registers and go into a running maximum and sum.

A program owns a block of rows and walks the items; where the blocks are too few to fill the GPU the walk is split, and the parts'
results are joined in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from jagged.ops._shared.device import dot, exp_of_difference, load_tile, logits_of_tiles, rounded_product
from jagged.ops._shared.launch import Launcher
from jagged.ops._shared.matrices import aligned, split
from jagged.ops._shared.sizes import cdiv
from jagged.ops.cross_entropy import hopper
from jagged.ops.cross_entropy.spec import Inputs, Options, Outputs
from jagged.ops.cross_entropy.triton.arguments import constants, tile_for
from jagged.ops.cross_entropy.triton.logits import LOG2_E, exponentials, logits_of_products

JOIN_ROWS, JOIN_WIDTH = 16, 128
# Programs a launch aims at, by multiprocessor.
PROGRAMS = 8


@triton.jit
def add_tile(
    maximum, total, smoothed, hidden, hidden_tile, row, hidden_stride, valid, weight, weight_stride, start, num_items, bias,
    item_scale, smoothing, inverse_temperature, softcap, IS_WHOLE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take the items from `start` on into the rows' maximum, sum of exponentials relative to it, and smoothed sum of logits."""
    ACCURATE: tl.constexpr = hidden.dtype.element_ty == tl.float32
    item = start + tl.arange(0, BLOCK_V)
    exists = tl.full((BLOCK_V,), True, tl.int1) if IS_WHOLE else item < num_items
    if hidden_tile is not None:
        weight_tile = load_tile(weight, item, weight_stride, exists, 0, WIDTH, BLOCK_K)
        products = dot(hidden_tile, tl.trans(weight_tile), None, PRECISION)
    else:
        products = logits_of_tiles(
            hidden, row, hidden_stride, valid, weight, item, weight_stride, exists, WIDTH, BLOCK_N, BLOCK_V, BLOCK_K, PRECISION
        )
    logits = logits_of_products(products, item, exists, bias, item_scale, softcap, 1)
    if smoothing is not None:
        share = tl.load(smoothing + item, mask=exists, other=0.0) * inverse_temperature
        smoothed += tl.sum(rounded_product(logits, tl.zeros_like(logits) + share[None, :]), 1)
    if not IS_WHOLE:
        logits = tl.where(exists[None, :], logits, float("-inf"))
    # In units of `exponentials`.
    rate = inverse_temperature if ACCURATE else inverse_temperature * LOG2_E
    highest = tl.maximum(maximum, tl.max(logits, 1) * rate)
    # A row of -inf alone has no maximum to subtract.
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    kept = exp_of_difference(maximum - shift, True) if ACCURATE else tl.exp2(maximum - shift)
    total = total * kept + tl.sum(exponentials(logits, shift[:, None], inverse_temperature, ACCURATE), 1)
    return highest, total, smoothed


@triton.jit(do_not_specialize=["num_rows", "num_items", "items_per_part", "ignore_index"])
def linear_cross_entropy_forward_kernel(
    hidden, weight, target, bias, item_scale, smoothing, part_maximum, part_sum, part_smoothed, num_rows, num_items,
    hidden_stride, weight_stride, items_per_part, ignore_index, inverse_temperature, softcap, BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Maximum of the logits and sum of exponentials relative to it, for a block of rows over one part of the items."""
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(1)
    exists = row < num_rows
    valid = exists & (tl.load(target + row, mask=exists, other=0) != ignore_index)
    hidden_tile = None
    if WIDTH <= BLOCK_K:
        hidden_tile = load_tile(hidden, row, hidden_stride, valid, 0, WIDTH, BLOCK_K)
    maximum = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_N,), tl.float32)
    smoothed = tl.zeros((BLOCK_N,), tl.float32)
    first = part * items_per_part
    # The sum of the first and the length may pass 2^31.
    last = tl.minimum(first.to(tl.int64) + items_per_part, num_items).to(tl.int32)
    whole = first + (last - first) // BLOCK_V * BLOCK_V
    for start in range(first, whole, BLOCK_V):
        maximum, total, smoothed = add_tile(
            maximum, total, smoothed, hidden, hidden_tile, row, hidden_stride, valid, weight, weight_stride, start, num_items,
            bias, item_scale, smoothing, inverse_temperature, softcap, True, WIDTH, BLOCK_N, BLOCK_V, BLOCK_K, PRECISION,
        )  # fmt: skip
    if whole < last:
        maximum, total, smoothed = add_tile(
            maximum, total, smoothed, hidden, hidden_tile, row, hidden_stride, valid, weight, weight_stride, whole, num_items,
            bias, item_scale, smoothing, inverse_temperature, softcap, False, WIDTH, BLOCK_N, BLOCK_V, BLOCK_K, PRECISION,
        )  # fmt: skip
    place = part.to(tl.int64) * num_rows + row
    tl.store(part_maximum + place, maximum, mask=exists)
    tl.store(part_sum + place, total, mask=exists)
    if smoothing is not None:
        tl.store(part_smoothed + place, smoothed, mask=exists)


@triton.jit(do_not_specialize=["num_rows", "num_items", "num_parts", "ignore_index"])
def linear_cross_entropy_join_kernel(
    hidden, weight, target, bias, item_scale, part_maximum, part_sum, part_smoothed, lse, target_logit, smoothed, num_rows,
    num_items, num_parts, hidden_stride, weight_stride, ignore_index, inverse_temperature, softcap, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Log-sum-exp of a block of rows from its parts, the rows' smoothed sums, and the logits of their targets."""
    ACCURATE: tl.constexpr = hidden.dtype.element_ty == tl.float32
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
    all_smoothed = tl.zeros((BLOCK_N,), tl.float32)
    for part in range(0, num_parts):
        place = tl.cast(part, tl.int64) * num_rows + row
        less = tl.load(part_maximum + place, mask=exists, other=float("-inf")) - shift
        total += (exp_of_difference(less, True) if ACCURATE else tl.exp2(less)) * tl.load(
            part_sum + place, mask=exists, other=0.0
        )
        if part_smoothed is not None:
            all_smoothed += tl.load(part_smoothed + place, mask=exists, other=0.0)
    product = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, WIDTH, BLOCK_D):
        hidden_tile = load_tile(hidden, row, hidden_stride, known, start, WIDTH, BLOCK_D).to(tl.float32)
        product += tl.sum(rounded_product(hidden_tile, load_tile(weight, item, weight_stride, known, start, WIDTH, BLOCK_D)), 1)
    logit = logits_of_products(product[:, None], item, known, bias, item_scale, softcap, 0) * inverse_temperature
    logit = tl.sum(logit, 1)
    log_sum = shift + tl.log(total) if ACCURATE else (shift + tl.log2(total)) / LOG2_E
    tl.store(lse + row, tl.where(valid, log_sum, 0.0), mask=exists)
    # An item that does not exist has no logit; NaN says so in the loss.
    tl.store(target_logit + row, tl.where(known, logit, tl.where(valid, float("nan"), 0.0)), mask=exists)
    if part_smoothed is not None:
        tl.store(smoothed + row, tl.where(valid, all_smoothed, 0.0), mask=exists)


_launch_forward = Launcher(linear_cross_entropy_forward_kernel)
_launch_join = Launcher(linear_cross_entropy_join_kernel)


def forward(x: Inputs, o: Options) -> Outputs:
    """Launch the kernels for Hopper, or `linear_cross_entropy_forward_kernel`, then `linear_cross_entropy_join_kernel`."""
    num_rows, num_items = x.hidden.shape[0], x.weight.shape[0]
    lse = x.hidden.new_empty(num_rows, dtype=torch.float32)
    out = Outputs(lse, torch.empty_like(lse), lse.new_empty(0 if x.smoothing is None else num_rows))
    if num_rows == 0:
        return out
    hidden, weight, target = aligned(x.hidden), aligned(x.weight), x.target.contiguous()
    bias, item_scale, smoothing = (None if vector is None else vector.contiguous() for vector in x[3:])
    part_smoothed = None
    if hopper.supports(x._replace(hidden=hidden, weight=weight), o) is None:
        from jagged.ops.cross_entropy.hopper.logits import logits_in_parts

        part_maximum, part_sum = logits_in_parts(hidden, weight, o.temperature)
    else:
        tile = tile_for("forward", hidden)
        row_blocks = cdiv(num_rows, tile.rows)
        num_parts, items_per_part = split(num_items, tile.items, row_blocks, PROGRAMS, hidden.device)
        # Each by itself begins at 16 bytes, whatever the number of rows.
        part_maximum, part_sum = lse.new_empty(num_parts, num_rows), lse.new_empty(num_parts, num_rows)
        if smoothing is not None:
            part_smoothed = torch.empty_like(part_sum)
        _launch_forward(
            (row_blocks, num_parts),
            hidden, weight, target, bias, item_scale, smoothing, part_maximum, part_sum, part_smoothed, num_rows, num_items,
            hidden.stride(0), weight.stride(0), items_per_part, o.ignore_index, 1 / o.temperature, o.softcap,
            **constants(tile, hidden),
        )  # fmt: skip
    _launch_join(
        (cdiv(num_rows, JOIN_ROWS),),
        hidden, weight, target, bias, item_scale, part_maximum, part_sum, part_smoothed, *out, num_rows, num_items,
        part_sum.shape[0], hidden.stride(0), weight.stride(0), o.ignore_index, 1 / o.temperature, o.softcap,
        BLOCK_N=JOIN_ROWS, BLOCK_D=JOIN_WIDTH, WIDTH=hidden.shape[1],
    )  # fmt: skip
    return out
