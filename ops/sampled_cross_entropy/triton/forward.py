"""Forward of sampled cross-entropy: rows that draw for themselves, each by a program; of rows that share a draw see `blocks`.

Beside the loss such a row keeps the sum of its negatives' weights times their slopes, so that the gradient of the hidden states
gathers nothing again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from jagged.ops._shared.device import exp_of_difference, load_tile, rounded_product
from jagged.ops.sampled_cross_entropy.triton.negatives import (
    VARYING,
    draw_for_row,
    load_target,
    log_expected,
    slope,
    softplus,
    store_results,
)


@triton.jit(do_not_specialize=VARYING)
def sampled_forward_rows_kernel(
    hidden, weight, target, ids, log_q, probability, seed, target_correction, excluded, exclude_offsets, sample_weight,
    loss, lse, statistic, share, pull, direction, num_rows, num_items, num_negatives, num_excluded, hidden_stride,
    weight_stride, rows_per_draw, parameter, offset, scale, positive_weight, ignore_index, filter_eps,
    KIND: tl.constexpr, LOSS: tl.constexpr, IS_CORRECTED: tl.constexpr, IS_INSIDE: tl.constexpr, MASK_HITS: tl.constexpr,
    RENORMALISE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One row: its loss and one tile of columns of its direction. With `filter_eps` the filtered direction alone.

    Every lane of a tile of negatives keeps a maximum and sums of its own, so that only the products are reduced in the loop.
    """
    ACCURATE: tl.constexpr = hidden.dtype.element_ty == tl.float32
    IS_BCE: tl.constexpr = LOSS == "bce"
    FILTERS: tl.constexpr = filter_eps is not None
    row = tl.program_id(0)
    first_column = tl.program_id(1) * BLOCK_D
    group = row // rows_per_draw
    row_target, valid = load_target(target, row, row >= 0, num_items, ignore_index)
    known = row_target >= 0
    column = tl.arange(0, BLOCK_D)
    row_hidden = hidden + row.to(tl.int64) * hidden_stride
    if WIDTH <= BLOCK_D:
        hidden_tile = tl.load(row_hidden + column, mask=known & (column < WIDTH), other=0.0).to(tl.float32)
    if FILTERS:
        row_statistic = tl.load(statistic + row)
        part = tl.load(share + row)
        if sample_weight is not None:
            part *= tl.abs(tl.load(sample_weight + row))
    maximum = tl.full((BLOCK_J,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_J,), tl.float32)
    kept = tl.zeros((BLOCK_J,), tl.int32)
    gradient = tl.zeros((BLOCK_J, BLOCK_D), tl.float32)
    place = tl.arange(0, BLOCK_J)
    item, exists = draw_for_row(
        ids, probability, seed, excluded, exclude_offsets, group, place, row, row_target, num_negatives, num_items, num_excluded,
        parameter, KIND, MASK_HITS,
    )  # fmt: skip
    if WIDTH <= BLOCK_D:
        weight_tile = load_tile(weight, item, weight_stride, exists, 0, WIDTH, BLOCK_D)
    # A row without a loss gathers nothing.
    for start in range(0, tl.where(known, num_negatives, 0), BLOCK_J):
        # The next tile is drawn and on its way while this one is used; loops that draw are not pipelined by the compiler.
        next_place = start + BLOCK_J + tl.arange(0, BLOCK_J)
        next_item, next_exists = draw_for_row(
            ids, probability, seed, excluded, exclude_offsets, group, next_place, row, row_target, num_negatives, num_items,
            num_excluded, parameter, KIND, MASK_HITS,
        )  # fmt: skip
        if WIDTH <= BLOCK_D:
            next_tile = load_tile(weight, next_item, weight_stride, next_exists, 0, WIDTH, BLOCK_D)
            values = weight_tile.to(tl.float32)
            logits = tl.sum(rounded_product(values, hidden_tile[None, :]), 1)
        else:
            logits = tl.zeros((BLOCK_J,), tl.float32)
            for step in range(0, WIDTH, BLOCK_D):
                hidden_tile = tl.load(row_hidden + step + column, mask=step + column < WIDTH, other=0.0).to(tl.float32)
                tile = load_tile(weight, item, weight_stride, exists, step, WIDTH, BLOCK_D)
                logits += tl.sum(rounded_product(tile, hidden_tile[None, :]), 1)
            if direction is not None:
                values = load_tile(weight, item, weight_stride, exists, first_column, WIDTH, BLOCK_D).to(tl.float32)
        logits *= scale
        if IS_CORRECTED:
            logits -= log_expected(log_q, item, group, place, exists, num_negatives, offset, KIND)
        logits = tl.where(exists, logits, float("-inf"))
        kept += exists.to(tl.int32)
        if FILTERS:
            weights = slope(logits, row_statistic, IS_BCE, ACCURATE)
            weights = tl.where(weights * part < filter_eps, 0.0, weights)
        elif IS_BCE:
            total += tl.where(exists, softplus(logits), 0.0)
            weights = slope(logits, 0.0, IS_BCE, ACCURATE)
        else:
            highest = tl.maximum(maximum, logits)
            # A lane of -inf alone has no maximum to subtract.
            shift = tl.where(highest == float("-inf"), 0.0, highest)
            rescale = exp_of_difference(maximum - shift, ACCURATE)
            weights = exp_of_difference(logits - shift, ACCURATE)
            total = total * rescale + weights
            maximum = highest
            if direction is not None:
                gradient *= rescale[:, None]
        if direction is not None:
            gradient += weights[:, None] * values
        place, item, exists = next_place, next_item, next_exists
        if WIDTH <= BLOCK_D:
            weight_tile = next_tile
    if LOSS == "bce" or FILTERS:
        lanes = tl.full((BLOCK_J,), 1.0, tl.float32)
        row_total = tl.sum(total, 0)
        inverse = 1.0
    else:
        highest = tl.max(maximum, 0)
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        lanes = exp_of_difference(maximum - shift, ACCURATE)
        row_total = tl.sum(rounded_product(total, lanes), 0)
        # Without a negative the gradient is zero as it stands.
        row_total = tl.where(row_total == 0, 1.0, row_total)
        inverse = 1.0 / row_total
        row_total = shift + tl.log(row_total)
    if direction is not None:
        place = direction + row.to(tl.int64) * WIDTH + first_column + column
        tl.store(place, tl.sum(rounded_product(gradient, lanes[:, None]), 0) * inverse, mask=first_column + column < WIDTH)
    if not FILTERS and tl.program_id(1) == 0:
        logit = 0.0
        source = weight + tl.maximum(row_target, 0).to(tl.int64) * weight_stride
        for step in range(0, WIDTH, BLOCK_D):
            mask = known & (step + column < WIDTH)
            hidden_tile = tl.load(row_hidden + step + column, mask=mask, other=0.0).to(tl.float32)
            logit += tl.sum(rounded_product(hidden_tile, tl.load(source + step + column, mask=mask, other=0.0)), 0)
        store_results(
            loss, lse, statistic, share, pull, row, row >= 0, valid, known, row_total, tl.sum(kept, 0), logit * scale,
            target_correction, num_negatives, positive_weight, LOSS, IS_INSIDE, RENORMALISE,
        )  # fmt: skip
