"""What every kernel of sampled cross-entropy does with negatives: draw, correct, mask; and what a row's sums become.

A tensor that is absent is None, so that nothing of it is compiled. `draws` makes the same numbers in PyTorch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from jagged.ops._shared.device import exp_of_difference, load_segment
from jagged.ops.sampled_cross_entropy import draws

DRAWS, KEYS = tl.constexpr(draws.DRAWS), tl.constexpr(draws.KEYS)
FEISTEL_ROUNDS = tl.constexpr(draws.FEISTEL_ROUNDS)
PHILOX_A, PHILOX_B = tl.constexpr(draws.PHILOX_A), tl.constexpr(draws.PHILOX_B)
PHILOX_KEY_A, PHILOX_KEY_B = tl.constexpr(draws.PHILOX_KEY_A), tl.constexpr(draws.PHILOX_KEY_B)
PHILOX_ROUNDS = tl.constexpr(draws.PHILOX_ROUNDS)
HASH_A, HASH_B = tl.constexpr(draws.HASH_A), tl.constexpr(draws.HASH_B)
LOG_BITS = tl.constexpr(draws.LOG_BITS)
EXP2 = tl.constexpr(draws.EXP2)
EXP2_TERMS = tl.constexpr(len(draws.EXP2))
LOG2_E = tl.constexpr(1.4426950408889634)
# Sizes and numbers that vary from call to call, of all kernels.
VARYING = [
    "num_rows", "num_items", "num_negatives", "num_excluded", "num_parts", "rows_per_draw", "rows_per_unit", "places_per_part",
    "parameter", "ignore_index", "first_unit", "first_row", "first_item", "num_entries", "num_pairs",
    "division", "shift_of_division", "loss_stride", "lse_stride",
]  # fmt: skip
# Entries of a row's list that are compared at once.
LIST_BLOCK = tl.constexpr(32)


@triton.jit
def draw_items(
    ids, probability, seed, group, place, exists, num_negatives, num_items, parameter, KIND: tl.constexpr
):  # fmt: skip
    """Return the items (int32) at some places of a draw and whether they exist; 0 where they do not.

    `parameter` is log2(V + 1) in units of 2^-26 for log-uniform draws, the bits of half an id for permuted ones.
    """
    if KIND == "given":
        item = tl.load(ids + group.to(tl.int64) * num_negatives + place, mask=exists, other=-1)
    else:
        key = tl.load(seed)
        if KIND == "permuted":
            item = permuted(key, group, tl.where(exists, place, 0), num_items, parameter)
        else:
            first, second, _, _ = philox(key, place, group, DRAWS)
            if KIND == "log_uniform":
                item = log_uniform(first, parameter, num_items)
            else:
                item = tl.umulhi(first, tl.cast(num_items, tl.uint32)).to(tl.int32)
            if KIND == "popularity":
                # 24 bits are exact in float32.
                coin = (second >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08
                is_kept = coin < tl.load(probability + item, mask=exists, other=1.0)
                item = tl.where(is_kept, item, tl.load(ids + item, mask=exists, other=0))
    exists = exists & (item >= 0) & (item < num_items)
    return tl.where(exists, item, 0).to(tl.int32), exists


@triton.jit
def draw_for_row(
    ids, probability, seed, excluded, exclude_offsets, group, place, row, row_target, num_negatives, num_items, num_excluded,
    parameter, KIND: tl.constexpr, MASK_HITS: tl.constexpr,
):  # fmt: skip
    """`draw_items` for one row, without its target and its list; nothing where the row has no target."""
    exists = (place < num_negatives) & (row_target >= 0)
    item, exists = draw_items(ids, probability, seed, group, place, exists, num_negatives, num_items, parameter, KIND)
    if MASK_HITS:
        exists &= item != row_target
    if excluded is not None:
        exists &= ~is_in_list(item, excluded, exclude_offsets, row, num_excluded)
    return item, exists


@triton.jit
def philox(seed, place, group, PURPOSE: tl.constexpr):
    """Four random numbers of 32 bits for each counter (place, group, purpose, 0).

    The rounds are a loop that ends on a condition, which the compiler does not repeat in every thread that wants the numbers:
    as one expression a warp would compute each of them 32 times.
    """
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    c0 = place.to(tl.uint32)
    c1 = tl.zeros_like(c0) + group.to(tl.uint32)
    c2, c3 = tl.full(c0.shape, PURPOSE, tl.uint32), tl.zeros_like(c0)
    step = tl.full((), 0, tl.int32)
    while step < PHILOX_ROUNDS:
        high, low = tl.umulhi(c0, tl.full(c0.shape, PHILOX_A, tl.uint32)), c0 * PHILOX_A
        c0, c1 = tl.umulhi(c2, tl.full(c0.shape, PHILOX_B, tl.uint32)) ^ c1 ^ k0, c2 * PHILOX_B
        c2, c3 = high ^ c3 ^ k1, low
        k0 += PHILOX_KEY_A
        k1 += PHILOX_KEY_B
        step += 1
    return c0, c1, c2, c3


@triton.jit
def log_uniform(number, log_items, num_items):
    """floor(2^(u log2(V + 1))) - 1 for u = number / 2^32."""
    exponent = number.to(tl.uint64) * tl.cast(log_items, tl.uint64)
    whole = exponent >> (LOG_BITS + 32)
    fraction = (exponent >> LOG_BITS).to(tl.uint32)
    power = tl.full(number.shape, EXP2[EXP2_TERMS - 1], tl.uint32)
    for step in tl.static_range(EXP2_TERMS - 1):
        power = tl.umulhi(power, fraction) + tl.full(number.shape, EXP2[EXP2_TERMS - 2 - step], tl.uint32)
    power = tl.umulhi(power, fraction)
    item = ((power.to(tl.uint64) + 4294967296) >> (32 - whole)).to(tl.int64) - 1
    return tl.minimum(item, num_items - 1).to(tl.int32)


@triton.jit
def permuted(key, group, place, num_items, bits):
    """Places below V moved by a permutation of the items that belongs to the draw."""
    k0, k1, k2, k3 = philox(key, tl.zeros_like(group), group, KEYS)
    limit = tl.cast(num_items, tl.uint32)
    item = feistel(place.to(tl.uint32), k0, k1, k2, k3, bits)
    # A place that is inside comes back inside, at the latest as itself.
    while tl.max((item >= limit).to(tl.int32), 0) > 0:
        item = tl.where(item >= limit, feistel(item, k0, k1, k2, k3, bits), item)
    return item.to(tl.int32)


@triton.jit
def feistel(number, k0, k1, k2, k3, bits):
    """Numbers of twice so many bits moved by a permutation that the keys choose."""
    shift = tl.cast(bits, tl.uint32)
    low = (tl.full(number.shape, 1, tl.uint32) << shift) - 1
    left, right = number >> shift, number & low
    for step in tl.static_range(FEISTEL_ROUNDS):
        if step % 4 == 0:
            key = k0
        elif step % 4 == 1:
            key = k1
        elif step % 4 == 2:
            key = k2
        else:
            key = k3
        mixed = right ^ (key + (step * PHILOX_KEY_A) % 4294967296)
        mixed = (mixed ^ (mixed >> 16)) * HASH_A
        mixed = (mixed ^ (mixed >> 15)) * HASH_B
        left, right = right, left ^ ((mixed ^ (mixed >> 15)) & low)
    return (left << shift) | right


@triton.jit
def log_expected(log_q, item, group, place, exists, num_negatives, offset, KIND: tl.constexpr):
    """Logarithm of how often each negative is expected in a draw; `offset` holds what all of them have in common."""
    if KIND == "given" and log_q is not None:
        return offset + tl.load(log_q + group.to(tl.int64) * num_negatives + place, mask=exists, other=0.0).to(tl.float32)
    elif KIND == "popularity":
        return offset + tl.load(log_q + item, mask=exists, other=0.0)
    elif KIND == "log_uniform":
        # log((k + 2) / (k + 1)) = 2 artanh(1 / (2k + 3)), a series that is short and loses nothing for large k.
        z = 1.0 / (2.0 * item.to(tl.float32) + 3.0)
        square = z * z
        series = 1 / 3 + square * (1 / 5 + square * (1 / 7 + square * (1 / 9 + square * (1 / 11 + square * (1 / 13)))))
        return offset + tl.log(2.0 * (z + z * square * series))
    else:
        return tl.full(item.shape, 0.0, tl.float32) + offset


@triton.jit
def is_in_list(item, excluded, exclude_offsets, row, num_excluded):
    """Whether items, `[BLOCK]`, are in the list of one row."""
    start, end = load_segment(exclude_offsets, row, num_excluded)
    found = tl.zeros(item.shape, tl.int32)
    for first in range(0, (end - start).to(tl.int32), LIST_BLOCK):
        place = start + first + tl.arange(0, LIST_BLOCK)
        entry = tl.load(excluded + place, mask=place < end, other=-1)
        found |= tl.max((item[:, None] == entry[None, :]).to(tl.int32), 1)
    return found > 0


@triton.jit
def is_in_lists(item, excluded, exclude_offsets, row, row_exists, num_excluded):
    """Whether items are in the lists of rows; `[BLOCK_N, 1]` and `[1, BLOCK_J]`, or the other way round."""
    total = num_excluded.to(tl.int64)
    start = tl.load(exclude_offsets + row, mask=row_exists, other=0).to(tl.int64)
    end = tl.load(exclude_offsets + row + 1, mask=row_exists, other=0).to(tl.int64)
    start = tl.minimum(tl.maximum(start, 0), total)
    end = tl.minimum(tl.maximum(end, start), total)
    longest = tl.max(tl.max(end - start, 1), 0).to(tl.int32)
    found = item < row.to(tl.int32) * 0
    for step in range(0, longest):
        entry = tl.load(excluded + start + step, mask=start + step < end, other=-1)
        found |= item == entry
    return found


@triton.jit
def load_target(target, row, exists, num_items, ignore_index):
    """Return rows' targets, -1 where there is none, and which rows have a loss at all."""
    item = tl.load(target + row, mask=exists, other=-1)
    valid = exists & (item != ignore_index)
    return tl.where(valid & (item >= 0) & (item < num_items), item, -1).to(tl.int32), valid


@triton.jit
def sigmoid(x, ACCURATE: tl.constexpr):
    """1 / (1 + exp(-x))."""
    small = exp_of_difference(-tl.abs(x), ACCURATE)
    return tl.where(x >= 0, 1.0, small) / (1.0 + small)


@triton.jit
def softplus(x):
    """log(1 + exp(x))."""
    small = exp_of_difference(-tl.abs(x), True)
    # log(1 + small) with what the sum loses put back.
    one_more = 1.0 + small
    return tl.maximum(x, 0.0) + tl.log(one_more) + (small - (one_more - 1.0)) / one_more


@triton.jit
def slope(logits, statistic, IS_BCE: tl.constexpr, ACCURATE: tl.constexpr):
    """Derivative of rows' statistics by the logits of their negatives; 0 where the logit is -inf or the statistic infinite."""
    return sigmoid(logits, ACCURATE) if IS_BCE else exp_of_difference(logits - statistic, ACCURATE)


@triton.jit
def counted(item, row, row_exists, row_target, excluded, exclude_offsets, num_excluded, MASK_HITS: tl.constexpr):
    """Which of the items `[BLOCK_J]` of a shared draw, -1 where there is none, are negatives of rows: `[BLOCK_N, BLOCK_J]`."""
    counts = tl.broadcast_to((item >= 0)[None, :], (row.shape[0], item.shape[0]))
    if MASK_HITS:
        counts &= item[None, :] != row_target[:, None]
    if excluded is not None:
        counts &= ~is_in_lists(item[None, :], excluded, exclude_offsets, row[:, None], row_exists[:, None], num_excluded)
    return counts


@triton.jit
def slopes_of_products(
    products, counts, correction, shift, part, scale, filter_eps, IS_BCE: tl.constexpr, ACCURATE: tl.constexpr
):  # fmt: skip
    """`slope` of a tile of a shared draw, 0 where `counts` is False; `shift` and `correction` are as `blocks` prepares them.

    Unless `ACCURATE` both are powers of two, so that a logit takes one fma and one instruction for the exponential. The
    rounding of the shift is the same for a whole row.
    """
    if IS_BCE:
        weights = sigmoid(products * scale, ACCURATE)
    else:
        rate = scale if ACCURATE else scale * LOG2_E
        logits = products * rate - shift[:, None]
        if correction is not None:
            logits -= correction[None, :]
        weights = exp_of_difference(logits, True) if ACCURATE else tl.exp2(logits)
    weights = tl.where(counts, weights, 0.0)
    if filter_eps is not None:
        weights = tl.where(weights * part[:, None] < filter_eps, 0.0, weights)
    return weights


@triton.jit
def store_results(
    loss, lse, statistic, share, pull, row, exists, valid, known, total, kept, logit, target_correction, num_negatives,
    positive_weight, LOSS: tl.constexpr, IS_INSIDE: tl.constexpr, RENORMALISE: tl.constexpr,
):  # fmt: skip
    """Loss of rows, their log-sum-exp and what backward needs, from the statistic over the negatives that are kept."""
    has_negatives = known & (kept > 0)
    if LOSS == "bce":
        row_loss = total + positive_weight * softplus(-logit)
        row_lse = tl.zeros_like(row_loss)
        row_share = tl.where(known, 1.0, 0.0)
        row_pull = -positive_weight * sigmoid(-logit, True)
    else:
        if target_correction is not None:
            logit -= tl.load(target_correction + row, mask=known, other=0.0)
        negatives = total
        if RENORMALISE:
            negatives += tl.log(num_negatives / tl.maximum(kept, 1).to(tl.float32))
        # Without a negative the denominator is the positive alone.
        difference = tl.where(has_negatives, negatives - logit, 0.0)
        row_share = tl.where(has_negatives, sigmoid(difference, True), 0.0)
        row_loss = tl.where(has_negatives, difference, 0.0)
        row_lse = tl.where(has_negatives, negatives, logit)
        if LOSS == "refined":
            row_loss *= row_share
        elif IS_INSIDE:
            row_loss = tl.where(has_negatives, softplus(difference), 0.0)
            row_lse = logit + row_loss
        else:
            row_share = tl.where(has_negatives, 1.0, 0.0)
        row_pull = -row_share
    # An item that does not exist has no logit; NaN says so in the loss.
    missing = tl.where(valid, float("nan"), 0.0)
    tl.store(loss + row, tl.where(known, row_loss, missing), mask=exists)
    tl.store(lse + row, tl.where(known, row_lse, missing), mask=exists)
    tl.store(statistic + row, tl.where(has_negatives, total, float("inf")), mask=exists)
    tl.store(share + row, tl.where(known, row_share, 0.0), mask=exists)
    tl.store(pull + row, tl.where(known, row_pull, 0.0), mask=exists)


@triton.jit
def rows_of_unit(unit, rows_per_draw, rows_per_unit, num_rows):
    """Return the draw of a unit, its first row and the row past its last; units are parts of the rows of one draw."""
    parts = tl.cdiv(rows_per_draw, rows_per_unit)
    group = unit // parts
    first = group * rows_per_draw + unit % parts * rows_per_unit
    last = tl.minimum(tl.minimum(first + rows_per_unit, (group + 1) * rows_per_draw), num_rows)
    return group, first, last
