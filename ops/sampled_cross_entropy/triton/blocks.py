"""Rows that share a draw: logits are products of matrices, computed once for the losses and once for each gradient.

A draw is made once, into a list of items with their corrections, so that the kernels that multiply know nothing of its kind. A
program owns a block of rows, or of negatives, and walks the other side; where the blocks leave the GPU idle the walk is cut into
parts, whose results are added in their order. All tiles are rows by negatives, see `docs/internals/cross_entropy.md`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from jagged.ops._shared.device import dot, exp_of_difference, load_tile, logits_of_tiles, rounded_product
from jagged.ops.sampled_cross_entropy.triton.negatives import (
    LOG2_E,
    VARYING,
    counted,
    draw_items,
    load_target,
    log_expected,
    rows_of_unit,
    slopes_of_products,
    softplus,
    store_results,
)

# Slopes are at most 1, and small ones would lose digits in float16.
HALF_SCALE = tl.constexpr(16384.0)


@triton.jit(do_not_specialize=VARYING)
def sampled_draw_kernel(
    weight, ids, log_q, probability, seed, items, corrections, gathered, num_items, num_negatives, weight_stride, parameter,
    offset, KIND: tl.constexpr, IN_POWERS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Items of a draw, -1 where there is none; the logarithms of their expected counts, their weights, where these are wanted."""
    group = tl.program_id(0)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_draw = place < num_negatives
    item, exists = draw_items(ids, probability, seed, group, place, in_draw, num_negatives, num_items, parameter, KIND)
    address = group.to(tl.int64) * num_negatives + place
    tl.store(items + address, tl.where(exists, item, -1), mask=in_draw)
    if corrections is not None:
        correction = log_expected(log_q, item, group, place, exists, num_negatives, offset, KIND)
        if IN_POWERS:
            correction *= LOG2_E
        tl.store(corrections + address, correction, mask=in_draw)
    if gathered is not None:
        for start in range(0, WIDTH, BLOCK_D):
            column = start + tl.arange(0, BLOCK_D)
            tile = load_tile(weight, item, weight_stride, exists, start, WIDTH, BLOCK_D)
            target = gathered + address[:, None] * WIDTH + column[None, :]
            tl.store(target, tile.to(gathered.dtype.element_ty), mask=in_draw[:, None] & (column < WIDTH)[None, :])


@triton.jit(do_not_specialize=VARYING)
def sampled_forward_blocks_kernel(
    hidden, table, target, items, corrections, excluded, exclude_offsets, part_maximum, part_sum, part_kept, num_rows, num_items,
    num_negatives, num_excluded, hidden_stride, table_stride, rows_per_draw, places_per_part, scale, ignore_index,
    LOSS: tl.constexpr, IN_POWERS: tl.constexpr, MASK_HITS: tl.constexpr, IS_GATHERED: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Maximum of a block of rows' logits over a part of their draw and sum of exponentials relative to it, or of softplus."""
    IS_BCE: tl.constexpr = LOSS == "bce"
    group, first, last = rows_of_unit(tl.program_id(0), rows_per_draw, BLOCK_N, num_rows)
    part = tl.program_id(1)
    row = first + tl.arange(0, BLOCK_N)
    in_unit = row < last
    row_target, _valid = load_target(target, row, in_unit, num_items, ignore_index)
    known = row_target >= 0
    if WIDTH <= BLOCK_K:
        hidden_tile = load_tile(hidden, row, hidden_stride, known, 0, WIDTH, BLOCK_K)
    first_of_draw = group.to(tl.int64) * num_negatives
    if IS_GATHERED:
        table += first_of_draw * table_stride
    maximum = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_N,), tl.float32)
    kept = tl.zeros((BLOCK_N,), tl.int32)
    rate = scale * LOG2_E if IN_POWERS else scale
    first_place = part * places_per_part
    # Rows without a loss gather nothing.
    end = tl.where(tl.max(row_target, 0) >= 0, tl.minimum(first_place + places_per_part, num_negatives), 0)
    for start in range(first_place, end, BLOCK_J):
        place = start + tl.arange(0, BLOCK_J)
        in_draw = place < num_negatives
        item = tl.load(items + first_of_draw + place, mask=in_draw, other=-1)
        source = place if IS_GATHERED else item
        exists = in_draw if IS_GATHERED else item >= 0
        if WIDTH <= BLOCK_K:
            tile = load_tile(table, source, table_stride, exists, 0, WIDTH, BLOCK_K)
            products = dot(hidden_tile, tl.trans(tile), None, PRECISION)
        else:
            products = logits_of_tiles(
                hidden, row, hidden_stride, known, table, source, table_stride, exists, WIDTH, BLOCK_N, BLOCK_J, BLOCK_K,
                PRECISION,
            )  # fmt: skip
        logits = products * rate
        if corrections is not None:
            logits -= tl.load(corrections + first_of_draw + place, mask=in_draw, other=0.0)[None, :]
        counts = counted(item, row, in_unit, row_target, excluded, exclude_offsets, num_excluded, MASK_HITS)
        if part_kept is not None:
            kept += tl.sum(counts.to(tl.int32), 1)
        if IS_BCE:
            total += tl.sum(tl.where(counts, softplus(logits), 0.0), 1)
        else:
            logits = tl.where(counts, logits, float("-inf"))
            highest = tl.maximum(maximum, tl.max(logits, 1))
            # A row of -inf alone has no maximum to subtract.
            shift = tl.where(highest == float("-inf"), 0.0, highest)
            less = maximum - shift
            differences = logits - shift[:, None]
            if IN_POWERS:
                total = total * tl.exp2(less) + tl.sum(tl.exp2(differences), 1)
            else:
                total = total * exp_of_difference(less, True) + tl.sum(exp_of_difference(differences, True), 1)
            maximum = highest
    address = part.to(tl.int64) * num_rows + row
    tl.store(part_maximum + address, maximum, mask=in_unit)
    tl.store(part_sum + address, total, mask=in_unit)
    if part_kept is not None:
        tl.store(part_kept + address, kept, mask=in_unit)


@triton.jit(do_not_specialize=VARYING)
def sampled_results_kernel(
    hidden, weight, target, target_correction, part_maximum, part_sum, part_kept, loss, lse, statistic, share, pull, num_rows,
    num_items, num_negatives, num_parts, hidden_stride, weight_stride, scale, positive_weight, ignore_index, LOSS: tl.constexpr,
    IN_POWERS: tl.constexpr, IS_INSIDE: tl.constexpr, RENORMALISE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Losses of rows from the parts of their draw, and what backward needs of them."""
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    exists = row < num_rows
    row_target, valid = load_target(target, row, exists, num_items, ignore_index)
    known = row_target >= 0
    maximum = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    for part in range(0, num_parts):
        address = tl.cast(part, tl.int64) * num_rows + row
        maximum = tl.maximum(maximum, tl.load(part_maximum + address, mask=exists, other=float("-inf")))
    shift = tl.where(maximum == float("-inf"), 0.0, maximum)
    total = tl.zeros((BLOCK_N,), tl.float32)
    kept = tl.zeros((BLOCK_N,), tl.int32)
    for part in range(0, num_parts):
        address = tl.cast(part, tl.int64) * num_rows + row
        part_total = tl.load(part_sum + address, mask=exists, other=0.0)
        if LOSS != "bce":
            less = tl.load(part_maximum + address, mask=exists, other=float("-inf")) - shift
            part_total *= tl.exp2(less) if IN_POWERS else exp_of_difference(less, True)
        total += part_total
        if part_kept is not None:
            kept += tl.load(part_kept + address, mask=exists, other=0)
    if LOSS != "bce":
        if part_kept is None:
            # The largest exponential is 1; NaN comes from a negative, too.
            kept = (total != 0).to(tl.int32)
        total = tl.log(tl.where(total == 0, 1.0, total)) + (shift * (1 / LOG2_E) if IN_POWERS else shift)
    logit = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, WIDTH, BLOCK_D):
        tile = load_tile(hidden, row, hidden_stride, known, start, WIDTH, BLOCK_D)
        logit += tl.sum(rounded_product(tile, load_tile(weight, row_target, weight_stride, known, start, WIDTH, BLOCK_D)), 1)
    store_results(
        loss, lse, statistic, share, pull, row, exists, valid, known, total, kept, logit * scale, target_correction,
        num_negatives, positive_weight, LOSS, IS_INSIDE, RENORMALISE,
    )  # fmt: skip


@triton.jit(do_not_specialize=VARYING)
def sampled_prepare_kernel(
    hidden, target, statistic, share, sample_weight, clean, row_target, shift, part, num_rows, num_items, hidden_stride,
    ignore_index, IN_POWERS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """What backward's products need of rows, once: no load waits for another one, and what ignored rows hold is gone."""
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    exists = row < num_rows
    item, _valid = load_target(target, row, exists, num_items, ignore_index)
    known = item >= 0
    tl.store(row_target + row, item, mask=exists)
    row_shift = tl.load(statistic + row, mask=known, other=float("inf"))
    if IN_POWERS:
        row_shift *= LOG2_E
    tl.store(shift + row, row_shift, mask=exists)
    if part is not None:
        row_part = tl.load(share + row, mask=known, other=0.0)
        if sample_weight is not None:
            row_part *= tl.abs(tl.load(sample_weight + row, mask=known, other=0.0))
        tl.store(part + row, row_part, mask=exists)
    for start in range(0, WIDTH, BLOCK_D):
        column = start + tl.arange(0, BLOCK_D)
        address = clean + row.to(tl.int64)[:, None] * WIDTH + column[None, :]
        tile = load_tile(hidden, row, hidden_stride, known, start, WIDTH, BLOCK_D)
        tl.store(address, tile, mask=exists[:, None] & (column < WIDTH)[None, :])


@triton.jit(do_not_specialize=VARYING)
def sampled_directions_kernel(
    clean, table, items, corrections, excluded, exclude_offsets, row_target, shift, part, directions, num_rows, num_negatives,
    num_excluded, table_stride, rows_per_draw, places_per_part, scale, filter_eps, LOSS: tl.constexpr, MASK_HITS: tl.constexpr,
    IS_GATHERED: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Derivative of rows' statistics by their hidden states, less the scale, from a part of their draw: one tile of columns."""
    ACCURATE: tl.constexpr = clean.dtype.element_ty == tl.float32
    IS_HALF: tl.constexpr = clean.dtype.element_ty == tl.float16
    group, first, last = rows_of_unit(tl.program_id(0), rows_per_draw, BLOCK_N, num_rows)
    part_of_walk = tl.program_id(1)
    first_column = tl.program_id(2) * BLOCK_D
    row = first + tl.arange(0, BLOCK_N)
    in_unit = row < last
    target = tl.load(row_target + row, mask=in_unit, other=-1)
    row_shift = tl.load(shift + row, mask=in_unit, other=float("inf"))
    row_part = None
    if part is not None:
        row_part = tl.load(part + row, mask=in_unit, other=0.0)
    if WIDTH <= BLOCK_K:
        hidden_tile = load_tile(clean, row, WIDTH, in_unit, 0, WIDTH, BLOCK_K)
    first_of_draw = group.to(tl.int64) * num_negatives
    if IS_GATHERED:
        table += first_of_draw * table_stride
    gradient = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    first_place = part_of_walk * places_per_part
    end = tl.where(tl.max(target, 0) >= 0, tl.minimum(first_place + places_per_part, num_negatives), 0)
    for start in range(first_place, end, BLOCK_J):
        place = start + tl.arange(0, BLOCK_J)
        in_draw = place < num_negatives
        item = tl.load(items + first_of_draw + place, mask=in_draw, other=-1)
        source = place if IS_GATHERED else item
        exists = in_draw if IS_GATHERED else item >= 0
        tile = load_tile(table, source, table_stride, exists, first_column, WIDTH, BLOCK_D)
        if WIDTH <= BLOCK_K:
            products = dot(hidden_tile, tl.trans(tile), None, PRECISION)
        else:
            products = logits_of_tiles(
                clean, row, WIDTH, in_unit, table, source, table_stride, exists, WIDTH, BLOCK_N, BLOCK_J, BLOCK_K, PRECISION
            )
        correction = None
        if corrections is not None:
            correction = tl.load(corrections + first_of_draw + place, mask=in_draw, other=0.0)
        counts = counted(item, row, in_unit, target, excluded, exclude_offsets, num_excluded, MASK_HITS)
        weights = slopes_of_products(
            products, counts, correction, row_shift, row_part, scale, filter_eps, LOSS == "bce", ACCURATE
        )
        if IS_HALF:
            weights *= HALF_SCALE
        gradient = dot(weights.to(tile.dtype), tile, gradient, PRECISION)
    if IS_HALF:
        gradient *= 1 / HALF_SCALE
    column = first_column + tl.arange(0, BLOCK_D)
    address = directions + (part_of_walk.to(tl.int64) * num_rows + row)[:, None] * WIDTH + column[None, :]
    tl.store(address, gradient, mask=in_unit[:, None] & (column < WIDTH)[None, :])


@triton.jit(do_not_specialize=VARYING)
def sampled_sums_kernel(
    clean, weight, items, corrections, excluded, exclude_offsets, row_target, shift, part, grad_statistic, inverse_scale, sums,
    num_rows, num_negatives, num_excluded, weight_stride, rows_per_draw, rows_per_unit, scale, filter_eps, first_unit,
    LOSS: tl.constexpr, MASK_HITS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_J: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What a tile of a draw's negatives gets from one part of the rows that share it: one tile of columns of `sums`."""
    ACCURATE: tl.constexpr = clean.dtype.element_ty == tl.float32
    unit = tl.program_id(0)
    group, first, last = rows_of_unit(first_unit + unit, rows_per_draw, rows_per_unit, num_rows)
    place = tl.program_id(1) * BLOCK_J + tl.arange(0, BLOCK_J)
    first_column = tl.program_id(2) * BLOCK_D
    in_draw = place < num_negatives
    place_in_list = group.to(tl.int64) * num_negatives + place
    item = tl.load(items + place_in_list, mask=in_draw, other=-1)
    correction = None
    if corrections is not None:
        correction = tl.load(corrections + place_in_list, mask=in_draw, other=0.0)
    inverse = 1.0 if inverse_scale is None else tl.load(inverse_scale)
    if WIDTH <= BLOCK_K:
        weight_tile = load_tile(weight, item, weight_stride, item >= 0, 0, WIDTH, BLOCK_K).to(clean.dtype.element_ty)
    gradient = tl.zeros((BLOCK_J, BLOCK_D), tl.float32)
    for start in range(first, last, BLOCK_N):
        row = start + tl.arange(0, BLOCK_N)
        in_unit = row < last
        target = tl.load(row_target + row, mask=in_unit, other=-1)
        row_shift = tl.load(shift + row, mask=in_unit, other=float("inf"))
        row_grad = tl.load(grad_statistic + row, mask=in_unit, other=0.0) / inverse
        row_part = None
        if part is not None:
            row_part = tl.load(part + row, mask=in_unit, other=0.0)
        hidden_tile = load_tile(clean, row, WIDTH, in_unit, first_column, WIDTH, BLOCK_D)
        if WIDTH <= BLOCK_K:
            products = dot(hidden_tile, tl.trans(weight_tile), None, PRECISION)
        else:
            products = logits_of_tiles(
                clean, row, WIDTH, in_unit, weight, item, weight_stride, item >= 0, WIDTH, BLOCK_N, BLOCK_J, BLOCK_K, PRECISION
            )
        counts = counted(item, row, in_unit, target, excluded, exclude_offsets, num_excluded, MASK_HITS)
        weights = slopes_of_products(
            products, counts, correction, row_shift, row_part, scale, filter_eps, LOSS == "bce", ACCURATE
        )
        weights *= row_grad[:, None]
        gradient = dot(tl.trans(weights.to(hidden_tile.dtype)), hidden_tile, gradient, PRECISION)
    column = first_column + tl.arange(0, BLOCK_D)
    address = sums + (unit.to(tl.int64) * num_negatives + place)[:, None] * WIDTH + column[None, :]
    tl.store(address, gradient * inverse, mask=in_draw[:, None] & (column < WIDTH)[None, :])
