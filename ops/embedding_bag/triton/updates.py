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
# Arguments of kernels that say by which numbers a rule updates rows.
RULE_NUMBERS = "eps", "beta1", "beta2", "weight_decay", "rest1", "rest2", "max_norm"
# Numbers of a run's parts that are loaded together where they are joined, by the stride of the parts: programs that also sum
# lookups have few registers for it, and longer parts.
JOINED = tl.constexpr((256, 4096))


@triton.constexpr_function
def takes_whole_rows(kind, has_max_norm, has_last):
    """Return whether an update needs all columns of a row at once: for sums over them, or for a number that one row has."""
    return kind.startswith("rowwise_") or kind == "lamb" or has_max_norm or has_last


@triton.constexpr_function
def is_by_square(kind):
    """Return whether a state has one number a row, of the mean of its squares."""
    return kind.startswith("rowwise_")


@triton.jit
def state_of_rows(first, second, row, mask, KIND: tl.constexpr):
    """Return the number that each row's state has, where a kind has one, else zeros; to be loaded beside the weights."""
    state = tl.zeros(row.shape, tl.float32)
    if KIND == "rowwise_adagrad":
        state = tl.load(first + row, mask=mask, other=0.0).to(tl.float32)
    elif KIND == "rowwise_adam" or KIND == "rowwise_lamb":
        state = tl.load(second + row, mask=mask, other=0.0).to(tl.float32)
    return state


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
def sum_of_squares(x, lanes):
    """Sum the squares of each row of a tile, whose columns beyond it are 0."""
    squares = rounded_product(x, x)
    return tl.sum(squares, 1) if lanes is None else sum_of_lanes(tl.sum(tl.sum(squares, 2), 1), lanes)


@triton.jit
def norm_of(x, mask, lanes):
    """Return the L2 norm of each row."""
    return tl.sqrt_rn(sum_of_squares(tl.where(mask, x, 0.0), lanes))


@triton.jit
def power(log2, exponent):
    """Return powers of a number of which the logarithm is known, -inf for 0, by whole numbers."""
    return tl.where(exponent > 0, tl.exp2(log2 * tl.maximum(exponent, 1.0)), 1.0)


@triton.jit
def updated(
    grad, state, old, first, second, last_step, element, row, corrections, rate, numbers, mask, row_mask, lanes,
    KIND: tl.constexpr, IS_DECOUPLED: tl.constexpr,
):  # fmt: skip
    """Return new weights and store new states; `grad` has the weights' share, `state` is the new number of each row, if any.

    With `last_step` rows have betas of their own.
    """
    eps, beta1, beta2, weight_decay, rest1, rest2, max_norm = numbers
    if KIND == "sgd":
        new = old - rate * grad
    elif KIND == "adagrad" or KIND == "rowwise_adagrad":
        if KIND == "adagrad":
            squares = tl.load(first + element, mask=mask, other=0.0).to(tl.float32) + grad * grad
            tl.store(first + element, squares, mask=mask)
            new = old - rate * grad / (tl.sqrt_rn(squares) + eps)
        else:
            tl.store(first + row, state, mask=row_mask)
            new = old - rate * grad / by_row(tl.sqrt_rn(state) + eps, grad)
        if IS_DECOUPLED:
            new -= rate * weight_decay * old
    else:
        of_mean = beta1 if last_step is None else by_row(beta1, grad)
        mean = of_mean * tl.load(first + element, mask=mask, other=0.0).to(tl.float32) + rest1 * grad
        tl.store(first + element, mean, mask=mask)
        unbiased = mean / tl.load(corrections)
        correction = tl.load(corrections + 1)
        if is_by_square(KIND):
            tl.store(second + row, state, mask=row_mask)
            divisor = by_row(tl.sqrt_rn(state / correction) + eps, grad)
        else:
            of_variance = beta2 if last_step is None else by_row(beta2, grad)
            variance = of_variance * tl.load(second + element, mask=mask, other=0.0).to(tl.float32) + rest2 * grad * grad
            tl.store(second + element, variance, mask=mask)
            divisor = tl.sqrt_rn(variance / correction) + eps
        change = unbiased / divisor + weight_decay * old
        if KIND == "lamb" or KIND == "rowwise_lamb":
            of_old, of_change = norm_of(old, mask, lanes), norm_of(change, mask, lanes)
            are_above = (of_old > 0.0) & (of_change > 0.0)
            change *= by_row(tl.where(are_above, of_old, 1.0) / tl.where(are_above, of_change, 1.0), grad)
        new = old - rate * change
    if max_norm is not None:
        norm = norm_of(new, mask, lanes)
        new *= by_row(tl.where(norm > max_norm, max_norm / tl.maximum(norm, max_norm), 1.0), grad)
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
    sums, old, state, is_stored, row, element, in_row, weights, first, second, last_step, step, corrections, rate, width, numbers,
    KIND: tl.constexpr, IS_STOCHASTIC: tl.constexpr, IS_DECOUPLED: tl.constexpr, lanes=None,
):  # fmt: skip
    """Store sums of gradients, `[rows, columns]`, or update weights and states by them; `old` are the weights
    and `state` what `state_of_rows` has loaded.

    `"rowwise_norm"` stores nothing but the sum of each row's squares, in `first`. With `lanes` sums are `[32, pieces, columns]`:
    that many of a warp's lanes have parts of one row.
    """
    mask = by_row(is_stored, sums) & in_row
    new = sums
    if KIND == "rowwise_norm":
        tl.store(first + row, sum_of_squares(tl.where(mask, sums, 0.0), lanes), mask=is_stored)
    elif KIND != "none":
        eps, beta1, beta2, weight_decay, rest1, rest2, max_norm = numbers
        if last_step is not None:
            # What updates that did not read the row would have made of it.
            missed = (tl.load(step) - 1 - tl.load(last_step + row, mask=is_stored, other=0)).to(tl.float32)
            beta1 *= power(tl.load(corrections + 2), missed)
            beta2 *= power(tl.load(corrections + 3), missed)
            old *= by_row(power(tl.load(corrections + 4), missed), old)
        if not IS_DECOUPLED:
            sums += weight_decay * old
        sums = tl.where(mask, sums, 0.0)
        if is_by_square(KIND):
            square = sum_of_squares(sums, lanes) / width
            # Said how it is rounded, so that states of any dtype have the same update.
            state = state + square if KIND == "rowwise_adagrad" else tl.fma(state, beta2 + tl.zeros_like(state), rest2 * square)
        new = updated(
            sums, state, old, first, second, last_step, element, row, corrections, rate,
            (eps, beta1, beta2, weight_decay, rest1, rest2, max_norm), mask, is_stored, lanes, KIND, IS_DECOUPLED,
        )  # fmt: skip
        if last_step is not None:
            tl.store(last_step + row, tl.load(step) + tl.zeros_like(row), mask=is_stored)
    if IS_STOCHASTIC:
        tl.store(weights + element, rounded_at_random(new, element, tl.load(step)), mask=mask)
    elif KIND != "rowwise_norm":
        tl.store(weights + element, new.to(weights.dtype.element_ty), mask=mask)


@triton.constexpr_function
def parts_together(columns, stride):
    """Return how many parts of a run are loaded together."""
    return max(1, JOINED[stride - 1] // columns)


@triton.jit(noinline=True)
def joined_run(
    parts_of_runs, first_slot, num_parts, head, num_groups, group, key, weights, first, second, last_step, step, corrections,
    rate, fields, row_stride, eps, beta1, beta2, weight_decay, rest1, rest2, max_norm, KIND: tl.constexpr,
    IS_STOCHASTIC: tl.constexpr, IS_DECOUPLED: tl.constexpr, WHOLE_ROWS: tl.constexpr, STRIDE: tl.constexpr,
    SCHEDULE: tl.constexpr,
):  # fmt: skip
    """Add the parts of one row's lookups up, several at once, and store or apply the sum.

    They are in `first_slot`, the next one, and every `STRIDE`-th from there on; but behind the first `head` parts are
    `num_groups`, each of which stands for `group` of them.
    """
    COLUMNS: tl.constexpr = columns_by(SCHEDULE)
    # A row with 50,000 lookups has 400 parts: one after the other each would be waited for.
    TOGETHER: tl.constexpr = parts_together(COLUMNS, STRIDE)
    start, width, first_row = tl.load(fields + START), tl.load(fields + WIDTH), tl.load(fields + FIRST_ROW)
    numbers = (eps, beta1, beta2, weight_decay, rest1, rest2, max_norm)
    row = tl.zeros((1,), tl.int64) + key.to(tl.int64)
    for part in range(0, 1 if WHOLE_ROWS else (width + COLUMNS - 1) // COLUMNS):
        columns = part * COLUMNS + tl.arange(0, COLUMNS)
        in_row = (columns < width)[None, :]
        element = (start + (row - first_row) * width)[:, None] + columns[None, :]
        old, learning_rate = tl.zeros((1, COLUMNS), tl.float32), 0.0
        state = state_of_rows(first, second, row, row >= 0, KIND)
        if KIND != "none":
            old = tl.load(weights + element, mask=in_row, other=0.0).to(tl.float32)
            learning_rate = tl.load(rate)
        totals = tl.zeros((TOGETHER, COLUMNS), tl.float32)
        for begin in range(0, num_parts, TOGETHER):
            number = begin + tl.arange(0, TOGETHER)
            number_of_all = number + tl.minimum(tl.maximum(number - head, 0), num_groups) * (group - 1)
            slot = first_slot + tl.maximum(number_of_all * STRIDE - (STRIDE - 1), 0)
            # What lies beside it in memory may have been read before this was written: not from the L1.
            part_of_run = parts_of_runs + (slot[:, None] * row_stride + columns[None, :])
            totals += tl.load(part_of_run, mask=(number < num_parts)[:, None] & in_row, other=0.0, cache_modifier=".cg")
        apply_sums(
            tl.sum(totals, 0)[None, :], old, state, row >= 0, row, element, in_row, weights, first, second, last_step, step,
            corrections, learning_rate, width, numbers, KIND, IS_STOCHASTIC, IS_DECOUPLED,
        )  # fmt: skip
