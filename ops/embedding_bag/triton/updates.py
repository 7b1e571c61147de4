"""What becomes of the sum of a row's gradients: it is stored, or the row and the optimizer's states are updated by it."""

from __future__ import annotations

import triton
import triton.language as tl

from jagged.ops._shared.device import rounded_at_random, rounded_product
from jagged.ops.embedding_bag.triton.columns import FIRST_ROW, START, WIDTH

# Numbers of a row of lanes.
NUMBERS = tl.constexpr(128)
# Widths that programs may have: powers of two from 4 on, to `MOST_COLUMNS`, or where an update needs a whole row to 8,192.
NUM_WIDTHS = tl.constexpr(12)


@triton.jit
def decayed(grad, old, weight_decay, KIND: tl.constexpr):
    """Return gradients with the weights' share, which adam takes apart from them."""
    if KIND == "adam" or KIND == "rowwise_adam":
        return grad
    return grad + weight_decay * old


@triton.jit
def by_row(x, tile):
    """Return a number of each row in a form that goes with tiles `[rows, columns]` and `[lanes, pieces, columns]`."""
    return x[:, None] if len(tile.shape) == 2 else x[:, None, None]


@triton.jit
def sum_of_lanes(x, lanes):
    """Sum a number of each of a warp's lanes over groups of `lanes`, a power of two; all of a group get the same bits."""
    for i in tl.static_range(5):
        other = tl.gather(x, tl.arange(0, 32) ^ (1 << i), 0)
        x = tl.where(lanes > (1 << i), x + other, x)
    return x


@triton.jit
def updated(
    grad, square, old, first, second, element, row, corrections, rate, numbers, mask, row_mask, KIND: tl.constexpr,
):  # fmt: skip
    """Return new weights and store new states; `grad` has the weights' share, `square` is the mean of its squares by row."""
    eps, beta1, beta2, weight_decay, rest1, rest2 = numbers
    if KIND == "sgd":
        new = old - rate * grad
    elif KIND == "adagrad":
        state = tl.load(first + element, mask=mask, other=0.0) + grad * grad
        tl.store(first + element, state, mask=mask)
        new = old - rate * grad / (tl.sqrt_rn(state) + eps)
    elif KIND == "rowwise_adagrad":
        state = tl.load(first + row, mask=row_mask, other=0.0) + square
        new = old - rate * grad / by_row(tl.sqrt_rn(state) + eps, grad)
    else:
        mean = beta1 * tl.load(first + element, mask=mask, other=0.0) + rest1 * grad
        tl.store(first + element, mean, mask=mask)
        unbiased = mean / tl.load(corrections)
        correction = tl.load(corrections + 1)
        if KIND == "adam":
            variance = beta2 * tl.load(second + element, mask=mask, other=0.0) + rest2 * grad * grad
            tl.store(second + element, variance, mask=mask)
            divisor = tl.sqrt_rn(variance / correction) + eps
        else:
            variance = beta2 * tl.load(second + row, mask=row_mask, other=0.0) + rest2 * square
            divisor = by_row(tl.sqrt_rn(variance / correction) + eps, grad)
        new = old - rate * (unbiased / divisor + weight_decay * old)
    return new


@triton.constexpr_function
def columns_by(schedule):
    """Return the columns of a schedule, which is (columns' exponent - 2, whether rows begin at multiples of 4 elements)."""
    return 4 << (schedule // 2)


@triton.jit
def schedule_of(width, WHOLE_ROWS: tl.constexpr):
    """Return the schedule of rows of some width."""
    exponent = (width * 0).to(tl.int32)
    for i in tl.static_range(1, NUM_WIDTHS if WHOLE_ROWS else 6):
        exponent += (width > (2 << i)).to(tl.int32)
    return exponent * 2 + (width % 4 == 0).to(tl.int32)


@triton.jit
def apply_sums(
    sums, old, is_stored, row, element, in_row, weights, first, second, step, corrections, rate, width, numbers,
    KIND: tl.constexpr, IS_STOCHASTIC: tl.constexpr, lanes=None,
):  # fmt: skip
    """Store sums of gradients, `[rows, columns]`, or update weights and states by them; `old` are the weights.

    With `lanes` sums are `[32, pieces, columns]`: that many of a warp's lanes have parts of one row.
    """
    BY_ROW: tl.constexpr = KIND == "rowwise_adagrad" or KIND == "rowwise_adam"
    mask = by_row(is_stored, sums) & in_row
    new = sums
    if KIND != "none":
        sums = tl.where(mask, decayed(sums, old, numbers[3], KIND), 0.0)
        square = tl.zeros(row.shape, tl.float32)
        if BY_ROW:
            squares = rounded_product(sums, sums)
            square = tl.sum(squares, 1) if lanes is None else sum_of_lanes(tl.sum(tl.sum(squares, 2), 1), lanes)
            square /= width
        new = updated(
            sums, square, old, first, second, element, row, corrections, rate, numbers, mask, is_stored, KIND
        )  # fmt: skip
        if KIND == "rowwise_adagrad":
            tl.store(first + row, tl.load(first + row, mask=is_stored, other=0.0) + square, mask=is_stored)
        if KIND == "rowwise_adam":
            variance = numbers[2] * tl.load(second + row, mask=is_stored, other=0.0) + numbers[5] * square
            tl.store(second + row, variance, mask=is_stored)
    if IS_STOCHASTIC:
        tl.store(weights + element, rounded_at_random(new, element, tl.load(step)), mask=mask)
    else:
        tl.store(weights + element, new.to(weights.dtype.element_ty), mask=mask)


@triton.jit(noinline=True)
def joined_run(
    parts_of_runs, first_slot, last_slot, key, weights, first, second, step, corrections, rate, fields, row_stride, eps, beta1,
    beta2, weight_decay, rest1, rest2, KIND: tl.constexpr, IS_STOCHASTIC: tl.constexpr, SCHEDULE: tl.constexpr,
):  # fmt: skip
    """Add the parts of one row's lookups up, in their order, and store or apply the sum."""
    COLUMNS: tl.constexpr = columns_by(SCHEDULE)
    BY_ROW: tl.constexpr = KIND == "rowwise_adagrad" or KIND == "rowwise_adam"
    start, width, first_row = tl.load(fields + START), tl.load(fields + WIDTH), tl.load(fields + FIRST_ROW)
    numbers = (eps, beta1, beta2, weight_decay, rest1, rest2)
    row = tl.zeros((1,), tl.int64) + key.to(tl.int64)
    for part in range(0, 1 if BY_ROW else (width + COLUMNS - 1) // COLUMNS):
        columns = part * COLUMNS + tl.arange(0, COLUMNS)
        in_row = (columns < width)[None, :]
        element = (start + (row - first_row) * width)[:, None] + columns[None, :]
        total = tl.zeros((1, COLUMNS), tl.float32)
        for slot in range(first_slot, last_slot + 1):
            # What lies beside it in memory may have been read before this was written: not from the L1.
            part_of_run = parts_of_runs + slot * row_stride + columns[None, :]
            total += tl.load(part_of_run, mask=in_row, other=0.0, cache_modifier=".cg")
        old, learning_rate = total, 0.0
        if KIND != "none":
            old = tl.load(weights + element, mask=in_row, other=0.0).to(tl.float32)
            learning_rate = tl.load(rate)
        apply_sums(
            total, old, row >= 0, row, element, in_row, weights, first, second, step, corrections, learning_rate, width, numbers,
            KIND, IS_STOCHASTIC,
        )  # fmt: skip
