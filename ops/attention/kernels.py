"""Attention as Triton kernels: FlashAttention-2's tiling over a jagged batch, and a backward of two passes without
floating-point atomics.

A program owns a tile of rows of one sample and one head. Key tiles that every row sees whole are visited without a mask; the few
at the edges of what is seen come after them, with one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged.ops._shared.device import dot, exp_of_difference, find_tile, load_segment, rounded_product
from jagged.ops._shared.matrices import float32_products
from jagged.ops.attention.bias_gradients import (
    BINS,
    MOST_COPIES,
    BiasGradients,
    add_bias_gradients,
    add_exactly,
    add_to_bucket,
    no_sums,
    sum_bins_kernel,
)
from jagged.ops.attention.configurations import Kind, Tiles, configuration, is_specialised, padded_width
from jagged.ops.attention.scores import (
    FLOAT_BUCKETS,
    HIDDEN,
    MOST_BUCKETS,
    PADDING,
    SPAN,
    Biases,
    Dropout,
    biases_of,
    bounds_of,
    common_bias,
    kept,
    less_common,
    pairs_of,
    prepare_biases_kernel,
    silu,
)
from jagged.ops.attention.tiles import (
    LN_2,
    LOG2_E,
    Place,
    edge_tile,
    history_end,
    key_ranges,
    load_by_pointers,
    load_tile,
    query_ranges,
    rows_of,
    store_tile,
    visible,
)

# Numbers that change from batch to batch.
UNSPECIALIZED = [
    "num_samples", "total", "key_total", "window", "num_contextual", "max_distance", "num_buckets", "bias_rows", "bias_keys",
    "bias_batch_stride", "bias_head_stride", "bias_row_stride", "dropout_threshold", "relative_copies", "time_copies",
]  # fmt: skip


@triton.jit
def in_score_units(number, ACCURATE: tl.constexpr):
    """Scores of 16-bit inputs are held times log2(e), so that exp2 needs no product; float32 keeps natural units.

    Those of pointwise weights are held as halves.
    """
    return number if ACCURATE else number * LOG2_E


@triton.jit
def softmax_weights(products, largest, factor, ACCURATE: tl.constexpr):
    """e to the power of `products * factor - largest`, scores in their units."""
    difference = products * factor - largest
    return exp_of_difference(difference, True) if ACCURATE else tl.exp2(difference)


@triton.jit
def masked(scores, rows, keys, place, IS_CAUSAL: tl.constexpr, HIDDEN_SCORE: tl.constexpr = float("-inf")):
    """Scores, and `HIDDEN_SCORE` where a query does not see a key."""
    seen = visible(
        rows + place.shift, keys, place.history, place.window, place.num_contextual, place.num_targets, IS_CAUSAL
    )  # fmt: skip
    return tl.where(seen, scores, HIDDEN_SCORE)


@triton.jit
def attend(
    weighted, weight, largest, query, key, value, first_query, first_key, key_stride, value_stride, factor,
    place, biases, dropout,
    IS_EDGE: tl.constexpr, IS_CAUSAL: tl.constexpr, IS_POINTWISE: tl.constexpr, USE_TMA: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, INPUT_PRECISION: tl.constexpr,
):  # fmt: skip
    """Take one tile of keys into the running softmax of a query tile: weighted values, sum of weights, largest score.

    A pointwise weight needs neither of the last two.
    """
    ACCURATE: tl.constexpr = query.dtype == tl.float32
    rows = (first_query + tl.arange(0, BLOCK_M))[:, None]
    keys = (first_key + tl.arange(0, BLOCK_N))[None, :]
    k = load_tile(key, first_key, place.key_length, key_stride, not IS_EDGE, USE_TMA, BLOCK_N, HEAD_DIM, BLOCK_D)
    bias = biases_of(rows, keys, first_query, first_key, place, biases, not IS_EDGE)
    common = common_bias(first_query, first_key, place, biases, BLOCK_M, BLOCK_N)
    products = dot(query, tl.trans(k), bias, INPUT_PRECISION)
    if IS_POINTWISE:
        products = less_common(products * factor, common, -factor)
        if bias is not None:
            # A bias that is minus infinity, or becomes it where it is divided by the scale.
            products = tl.maximum(products, HIDDEN)
        if IS_EDGE:
            products = masked(products, rows, keys, place, IS_CAUSAL, HIDDEN)
        weights, _ = silu(products, ACCURATE)
    else:
        if IS_EDGE:
            products = masked(products, rows, keys, place, IS_CAUSAL)
        now_largest = tl.maximum(largest, less_common(tl.max(products, 1) * factor, common, -factor))
        reference = now_largest
        if IS_EDGE or bias is not None:
            # A row that has seen no key yet, or none whose bias is a number.
            reference = tl.where(now_largest == float("-inf"), 0.0, now_largest)
        correction = softmax_weights(largest, reference, 1.0, ACCURATE)
        weights = softmax_weights(products, less_common(reference, common, factor)[:, None], factor, ACCURATE)
        weight = weight * correction + tl.sum(weights, 1)
        largest = now_largest
        if dropout.seed is not None:
            weights = tl.where(kept(rows, keys, place, dropout), weights, 0.0)
    v = load_tile(value, first_key, place.key_length, value_stride, not IS_EDGE, USE_TMA, BLOCK_N, HEAD_DIM, BLOCK_D)
    if not IS_POINTWISE:
        weighted *= correction[:, None]
    weighted = dot(weights.to(v.dtype), v, weighted, INPUT_PRECISION)
    return weighted, weight, largest


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_forward_kernel(
    query, key, value, offsets, key_offsets, num_targets, output, lse, num_samples, total, key_total, scale, window,
    num_contextual,
    query_row_stride, query_head_stride, key_row_stride, key_head_stride, value_row_stride, value_head_stride,
    output_row_stride,
    relative_bias, max_distance, time_bias, num_buckets, q_times, k_times, bias, bias_offsets, bias_rows, bias_keys,
    bias_batch_stride, bias_head_stride, bias_row_stride, bias_key_stride, dropout_seed, dropout_threshold, kept_scale,
    normalizer,
    IS_CAUSAL: tl.constexpr, GROUP: tl.constexpr, APART: tl.constexpr, USE_TMA: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, INPUT_PRECISION: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of one tile of queries; without a place for the latter the weights are pointwise, by SiLU."""
    IS_POINTWISE: tl.constexpr = lse is None
    sample, start, query_length, first_query = find_tile(offsets, tl.program_id(0), num_samples, total, BLOCK_M, APART)
    query_length, first_query = query_length.to(tl.int32), first_query.to(tl.int32)
    if first_query >= query_length:
        return
    key_start, key_length = start, query_length
    if key_offsets is not None:
        key_start, key_end = load_segment(key_offsets, sample, key_total)
        key_length = (key_end - key_start).to(tl.int32)
    shift = key_length - query_length
    history = history_end(num_targets, sample, key_length)
    head = tl.program_id(1).to(tl.int64)
    place = Place(
        head, start, key_start, query_length, key_length, shift, history, window, num_contextual, num_targets
    )  # fmt: skip
    first_pair, bias_row_stride, bias_rows, bias_keys = pairs_of(
        bias, bias_offsets, sample, query_length, key_length, bias_batch_stride, bias_row_stride, bias_key_stride,
        bias_rows, bias_keys,
    )  # fmt: skip
    biases = Biases(
        1.0 / scale, relative_bias, max_distance, time_bias, num_buckets, q_times, k_times,
        bounds_of(q_times, total, start, sample), bounds_of(k_times, key_total, key_start, sample),
        bias, first_pair, bias_head_stride, bias_row_stride, bias_key_stride, bias_rows, bias_keys,
    )  # fmt: skip
    dropout = Dropout(dropout_seed, dropout_threshold, kept_scale)
    ACCURATE: tl.constexpr = query.dtype.element_ty == tl.float32
    factor = scale * 0.5 if IS_POINTWISE else in_score_units(scale, ACCURATE)
    query += start * query_row_stride + head * query_head_stride
    key += key_start * key_row_stride + head // GROUP * key_head_stride
    value += key_start * value_row_stride + head // GROUP * value_head_stride
    output += start * output_row_stride + head * HEAD_DIM
    if not IS_POINTWISE:
        lse += head * total + start

    q = load_by_pointers(query, first_query, query_length, query_row_stride, False, BLOCK_M, HEAD_DIM, BLOCK_D)
    keys = rows_of(key, key_length, key_row_stride, USE_TMA, BLOCK_N, HEAD_DIM, BLOCK_D)
    values = rows_of(value, key_length, value_row_stride, USE_TMA, BLOCK_N, HEAD_DIM, BLOCK_D)
    weighted = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    last_query = tl.minimum(first_query + BLOCK_M, query_length) - 1
    whole_begin, whole_end, prefix_tiles, low, low_tiles, high_tiles, diagonal, edge_tiles = key_ranges(
        first_query + shift, last_query + shift, history, window, num_contextual, num_targets, IS_CAUSAL, BLOCK_N
    )
    for first_key in range(whole_begin, whole_end, BLOCK_N):
        weighted, weight, largest = attend(
            weighted, weight, largest, q, keys, values, first_query, first_key, key_row_stride, value_row_stride, factor,
            place, biases, dropout,
            False, IS_CAUSAL, IS_POINTWISE, USE_TMA, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, INPUT_PRECISION,
        )  # fmt: skip
    for index in range(0, edge_tiles):
        first_key = edge_tile(index, whole_end, prefix_tiles, low, low_tiles, high_tiles, diagonal, BLOCK_N)
        weighted, weight, largest = attend(
            weighted, weight, largest, q, keys, values, first_query, first_key, key_row_stride, value_row_stride, factor,
            place, biases, dropout,
            True, IS_CAUSAL, IS_POINTWISE, USE_TMA, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, INPUT_PRECISION,
        )  # fmt: skip
    # A query that sees no key has an output of zeros and a log-sum-exp of -inf.
    divisor = tl.where(weight == 0.0, 1.0, weight)
    result = weighted * pointwise_factor(normalizer, key_length) if IS_POINTWISE else weighted / divisor[:, None]
    if dropout.seed is not None:
        result *= kept_scale
    store_tile(output, result, first_query, query_length, output_row_stride, BLOCK_M, HEAD_DIM, BLOCK_D)
    if not IS_POINTWISE:
        rows = first_query + tl.arange(0, BLOCK_M)
        natural_largest = largest if ACCURATE else largest * LN_2
        tl.store(lse + rows, natural_largest + tl.log(divisor), mask=rows < query_length)


@triton.jit
def pointwise_factor(normalizer, key_length):
    """What weights are multiplied by: the reciprocal of `normalizer`, or of the number of keys where that is 0."""
    return 1.0 / tl.where(normalizer > 0.0, normalizer, tl.maximum(key_length, 1).to(tl.float32))


@triton.jit
def weights_and_slopes(products, row_lse, common, factor, ACCURATE: tl.constexpr):
    """Weights of a tile of scores, and what a weight changes by with its own score: of a softmax the weight itself.

    A softmax's scores are still without what all have in `common`.
    """
    if row_lse is None:
        weights, slopes = silu(products, ACCURATE)
    else:
        weights = softmax_weights(products, less_common(row_lse, common, factor), factor, ACCURATE)
        slopes = weights
    return weights, slopes


@triton.jit
def score_gradients(slopes, grad_weights, row_delta, keep, dropout):
    """Gradients of scores from those of weights; `keep` tells which weights dropout left."""
    if row_delta is None:
        return grad_weights * slopes
    else:
        if keep is not None:
            grad_weights = tl.where(keep, grad_weights * dropout.kept_scale, 0.0)
        return slopes * (grad_weights - row_delta)


@triton.jit
def accumulate_dq(
    sums, query, upstream, key, value, row_lse, row_delta, first_query, first_key, key_stride, value_stride, factor,
    place, biases, dropout, bias_grads, gain,
    IS_EDGE: tl.constexpr, IS_CAUSAL: tl.constexpr, USE_TMA: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, INPUT_PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what one tile of keys gives to the gradients of a query tile and of the biases."""
    ACCURATE: tl.constexpr = query.dtype == tl.float32
    grad_query, of_distance, of_time = sums
    rows = (first_query + tl.arange(0, BLOCK_M))[:, None]
    keys = (first_key + tl.arange(0, BLOCK_N))[None, :]
    k = load_tile(key, first_key, place.key_length, key_stride, not IS_EDGE, USE_TMA, BLOCK_N, HEAD_DIM, BLOCK_D)
    v = load_tile(value, first_key, place.key_length, value_stride, not IS_EDGE, USE_TMA, BLOCK_N, HEAD_DIM, BLOCK_D)
    bias = biases_of(rows, keys, first_query, first_key, place, biases, not IS_EDGE)
    common = common_bias(first_query, first_key, place, biases, BLOCK_M, BLOCK_N)
    products = dot(query, tl.trans(k), bias, INPUT_PRECISION)
    if row_lse is None:
        products = less_common(products * factor, common, -factor)
        if bias is not None:
            # A bias that is minus infinity, or becomes it where it is divided by the scale.
            products = tl.maximum(products, HIDDEN)
    if IS_EDGE:
        products = masked(
            products, rows, keys, place, IS_CAUSAL, HIDDEN if row_lse is None else float("-inf")
        )  # fmt: skip
    _, slopes = weights_and_slopes(products, row_lse, common, factor, ACCURATE)
    grad_weights = dot(upstream, tl.trans(v), None, INPUT_PRECISION)
    keep = None
    if dropout.seed is not None:
        keep = kept(rows, keys, place, dropout)
    grad_scores = score_gradients(slopes, grad_weights, row_delta, keep, dropout)
    of_distance, of_time = add_bias_gradients(
        of_distance, of_time, grad_scores * gain, rows, keys, first_query, first_key, place, biases, bias_grads, not IS_EDGE
    )
    grad_query = dot(grad_scores.to(k.dtype), k, grad_query, INPUT_PRECISION)
    return grad_query, of_distance, of_time


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_backward_dq_kernel(
    grad, grad_lse, query, key, value, output, lse, offsets, key_offsets, num_targets, grad_query, statistics,
    num_samples, total, key_total, scale, window, num_contextual,
    grad_row_stride, grad_head_stride, query_row_stride, query_head_stride, key_row_stride, key_head_stride,
    value_row_stride, value_head_stride, output_row_stride,
    relative_bias, max_distance, time_bias, num_buckets, q_times, k_times, bias, bias_offsets, bias_rows, bias_keys,
    bias_batch_stride, bias_head_stride, bias_row_stride, bias_key_stride, dropout_seed, dropout_threshold, kept_scale,
    normalizer,
    grad_relative_bias, relative_copies, grad_time_bias, time_copies, grad_bias,
    IS_CAUSAL: tl.constexpr, GROUP: tl.constexpr, APART: tl.constexpr, USE_TMA: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, INPUT_PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Gradients of one tile of queries and of its biases, and `statistics` for the dkv kernel: what it subtracts in each row.

    That is the log-sum-exp in the scores' units, from scores, and delta, from gradients of weights. Delta is the row's dot
    product of output and its gradient, less the gradient of its log-sum-exp: a score's gradient is its weight times (gradient of
    the weight - delta).
    """
    IS_POINTWISE: tl.constexpr = lse is None
    sample, start, query_length, first_query = find_tile(offsets, tl.program_id(0), num_samples, total, BLOCK_M, APART)
    query_length, first_query = query_length.to(tl.int32), first_query.to(tl.int32)
    if first_query >= query_length:
        return
    key_start, key_length = start, query_length
    if key_offsets is not None:
        key_start, key_end = load_segment(key_offsets, sample, key_total)
        key_length = (key_end - key_start).to(tl.int32)
    shift = key_length - query_length
    history = history_end(num_targets, sample, key_length)
    head = tl.program_id(1).to(tl.int64)
    place = Place(
        head, start, key_start, query_length, key_length, shift, history, window, num_contextual, num_targets
    )  # fmt: skip
    all_rows, all_keys = bias_rows, bias_keys
    first_pair, bias_row_stride, bias_rows, bias_keys = pairs_of(
        bias, bias_offsets, sample, query_length, key_length, bias_batch_stride, bias_row_stride, bias_key_stride,
        bias_rows, bias_keys,
    )  # fmt: skip
    biases = Biases(
        1.0 / scale, relative_bias, max_distance, time_bias, num_buckets, q_times, k_times,
        bounds_of(q_times, total, start, sample), bounds_of(k_times, key_total, key_start, sample),
        bias, first_pair, bias_head_stride, bias_row_stride, bias_key_stride, bias_rows, bias_keys,
    )  # fmt: skip
    dropout = Dropout(dropout_seed, dropout_threshold, kept_scale)
    ACCURATE: tl.constexpr = query.dtype.element_ty == tl.float32
    factor = scale * 0.5 if IS_POINTWISE else in_score_units(scale, ACCURATE)
    pairs_of_head = all_rows.to(tl.int64) * all_keys
    grad_first_pair, pair_row_stride, _, _ = pairs_of(
        grad_bias, bias_offsets, sample, query_length, key_length, tl.num_programs(1) * pairs_of_head, all_keys, 1,
        all_rows, all_keys,
    )  # fmt: skip
    relative_stride, time_stride = tl.num_programs(1) * (2 * max_distance + 1), tl.num_programs(1) * num_buckets
    if grad_relative_bias is not None:
        grad_relative_bias += (tl.program_id(0) % relative_copies * BINS).to(tl.int64) * relative_stride
    if grad_time_bias is not None:
        grad_time_bias += (tl.program_id(0) % time_copies * BINS).to(tl.int64) * time_stride
    bias_grads = BiasGradients(
        grad_relative_bias, relative_stride, grad_time_bias, time_stride, grad_bias, grad_first_pair, pairs_of_head,
        pair_row_stride,
    )  # fmt: skip
    grad += start * grad_row_stride + head * grad_head_stride
    query += start * query_row_stride + head * query_head_stride
    key += key_start * key_row_stride + head // GROUP * key_head_stride
    value += key_start * value_row_stride + head // GROUP * value_head_stride
    if not IS_POINTWISE:
        output += start * output_row_stride + head * HEAD_DIM
    grad_query += start * output_row_stride + head * HEAD_DIM
    if not IS_POINTWISE:
        lse += head * total + start
        statistics += (head * total + start) * 2

    upstream = load_by_pointers(grad, first_query, query_length, grad_row_stride, False, BLOCK_M, HEAD_DIM, BLOCK_D)
    row_lse, row_delta, gain = None, None, 1.0
    if IS_POINTWISE:
        rows = first_query + tl.arange(0, BLOCK_M)
        gain = pointwise_factor(normalizer, key_length)
        upstream = tl.where((rows < query_length)[:, None], upstream, 0.0)
    else:
        result = load_by_pointers(output, first_query, query_length, output_row_stride, False, BLOCK_M, HEAD_DIM, BLOCK_D)
        row_delta = tl.sum(rounded_product(upstream, result), 1)
        rows = first_query + tl.arange(0, BLOCK_M)
        if grad_lse is not None:
            row_delta -= tl.load(grad_lse + head * total + start + rows, mask=rows < query_length, other=0.0)
        row_lse = load_lse(lse, rows, query_length, ACCURATE)
        places = statistics + rows[:, None] * 2 + tl.arange(0, 2)[None, :]
        tl.store(places, tl.join(row_lse, row_delta), mask=(rows < query_length)[:, None])
        row_lse = row_lse[:, None]
        row_delta = row_delta[:, None]

    q = load_by_pointers(query, first_query, query_length, query_row_stride, False, BLOCK_M, HEAD_DIM, BLOCK_D)
    keys = rows_of(key, key_length, key_row_stride, USE_TMA, BLOCK_N, HEAD_DIM, BLOCK_D)
    values = rows_of(value, key_length, value_row_stride, USE_TMA, BLOCK_N, HEAD_DIM, BLOCK_D)
    total_grad = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    of_distance, of_time = no_sums(BLOCK_M, BLOCK_T)
    last_query = tl.minimum(first_query + BLOCK_M, query_length) - 1
    whole_begin, whole_end, prefix_tiles, low, low_tiles, high_tiles, diagonal, edge_tiles = key_ranges(
        first_query + shift, last_query + shift, history, window, num_contextual, num_targets, IS_CAUSAL, BLOCK_N
    )
    for first_key in range(whole_begin, whole_end, BLOCK_N):
        total_grad, of_distance, of_time = accumulate_dq(
            (total_grad, of_distance, of_time), q, upstream, keys, values, row_lse, row_delta, first_query, first_key,
            key_row_stride, value_row_stride, factor, place, biases, dropout, bias_grads, gain,
            False, IS_CAUSAL, USE_TMA, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, INPUT_PRECISION,
        )  # fmt: skip
    for index in range(0, edge_tiles):
        first_key = edge_tile(index, whole_end, prefix_tiles, low, low_tiles, high_tiles, diagonal, BLOCK_N)
        total_grad, of_distance, of_time = accumulate_dq(
            (total_grad, of_distance, of_time), q, upstream, keys, values, row_lse, row_delta, first_query, first_key,
            key_row_stride, value_row_stride, factor, place, biases, dropout, bias_grads, gain,
            True, IS_CAUSAL, USE_TMA, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, INPUT_PRECISION,
        )  # fmt: skip
    total_grad *= scale * gain
    store_tile(grad_query, total_grad, first_query, query_length, output_row_stride, BLOCK_M, HEAD_DIM, BLOCK_D)
    if grad_relative_bias is not None:
        below, above = of_distance
        first_entry = head * (2 * max_distance + 1)
        add_exactly(grad_relative_bias, relative_stride, first_entry, tl.sum(tl.sum(below, 1), 0), True)
        add_exactly(grad_relative_bias, relative_stride, first_entry + 2 * max_distance, tl.sum(tl.sum(above, 1), 0), True)
    if grad_time_bias is not None:
        bucket = tl.arange(0, BLOCK_T)
        histogram, run, bucket_of_run = of_time
        sums = tl.sum(add_to_bucket(histogram, tl.sum(run, 1), bucket_of_run), 0)
        add_exactly(grad_time_bias, time_stride, head * num_buckets + bucket, sums, bucket < num_buckets)


@triton.jit
def load_lse(lse, rows, length, ACCURATE: tl.constexpr):
    """Load log-sum-exps in the scores' units; infinite for queries past the end or without keys, which so weigh nothing."""
    row_lse = tl.load(lse + rows, mask=rows < length, other=float("inf"))
    return in_score_units(tl.where(row_lse == float("-inf"), float("inf"), row_lse), ACCURATE)


@triton.jit
def load_statistics(statistics, rows, length, IS_WHOLE: tl.constexpr):
    """Load what `attention_backward_dq_kernel` left of each row; unless the tile is whole, the last stands in for missing ones.

    Each pair is loaded twice: where a tile has fewer numbers than the program has threads, Triton would have every thread load
    all that it needs for itself.
    """
    if not IS_WHOLE:
        rows = tl.minimum(rows, length - 1)
    twice = tl.load(statistics + rows[:, None] * 2 + (tl.arange(0, 4) % 2)[None, :])
    row_lse, row_delta = tl.split(tl.reshape(twice, [rows.shape[0], 2, 2]))
    row_lse, _ = tl.split(row_lse)
    row_delta, _ = tl.split(row_delta)
    return row_lse[None, :], row_delta[None, :]


@triton.jit
def member_and_place(position, begin, span, GROUP: tl.constexpr):
    """Return the head of a group, and its place from `begin` on, of one `position` of a loop over all heads' spans in a row."""
    member = 0
    if GROUP > 1:
        member = (position - begin) // span
        position -= member * span
    return member, position


@triton.jit
def of_member(source, member, head_stride, GROUP: tl.constexpr):
    """Return where a head of the group has its rows; of a group of one that is the source, which may be a descriptor."""
    if GROUP > 1:
        return source + member.to(tl.int64) * head_stride
    else:
        return source


@triton.jit
def accumulate_dkv(
    grad_key, grad_value, k, v, query, upstream, statistics, member, first_query, first_key,
    query_row_stride, query_head_stride, grad_row_stride, grad_head_stride, total, factor, place, biases, dropout,
    IS_EDGE: tl.constexpr, IS_CAUSAL: tl.constexpr, GROUP: tl.constexpr, USE_TMA: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, INPUT_PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what one tile of queries gives to the gradients of a tile of keys and values. Scores are held transposed."""
    ACCURATE: tl.constexpr = k.dtype == tl.float32
    place = Place(
        place.head + member, place.start, place.key_start, place.query_length, place.key_length, place.shift, place.history,
        place.window, place.num_contextual, place.num_targets,
    )  # fmt: skip
    query_length = place.query_length
    query = of_member(query, member, query_head_stride, GROUP)
    upstream = of_member(upstream, member, grad_head_stride, GROUP)
    rows = first_query + tl.arange(0, BLOCK_M)
    keys = (first_key + tl.arange(0, BLOCK_N))[:, None]
    row_lse, row_delta = None, None
    q = load_tile(query, first_query, query_length, query_row_stride, not IS_EDGE, USE_TMA, BLOCK_M, HEAD_DIM, BLOCK_D)
    if statistics is not None:
        row_lse, row_delta = load_statistics(of_member(statistics, member, total * 2, GROUP), rows, query_length, not IS_EDGE)
    bias = biases_of(rows[None, :], keys, first_query, first_key, place, biases, not IS_EDGE)
    common = common_bias(first_query, first_key, place, biases, BLOCK_M, BLOCK_N)
    products = dot(k, tl.trans(q), bias, INPUT_PRECISION)
    if statistics is None:
        products = less_common(products * factor, common, -factor)
        if bias is not None:
            # A bias that is minus infinity, or becomes it where it is divided by the scale.
            products = tl.maximum(products, HIDDEN)
    if IS_EDGE:
        hidden: tl.constexpr = HIDDEN if statistics is None else float("-inf")
        products = masked(products, rows[None, :], keys, place, IS_CAUSAL, hidden)
        products = tl.where((rows < query_length)[None, :], products, hidden)
    weights, slopes = weights_and_slopes(products, row_lse, common, factor, ACCURATE)
    keep = None
    if dropout.seed is not None:
        keep = kept(rows[None, :], keys, place, dropout)
        weights = tl.where(keep, weights, 0.0)
    do = load_tile(upstream, first_query, query_length, grad_row_stride, not IS_EDGE, USE_TMA, BLOCK_M, HEAD_DIM, BLOCK_D)
    grad_value = dot(weights.to(do.dtype), do, grad_value, INPUT_PRECISION)
    grad_weights = dot(v, tl.trans(do), None, INPUT_PRECISION)
    grad_scores = score_gradients(slopes, grad_weights, row_delta, keep, dropout)
    return dot(grad_scores.to(q.dtype), q, grad_key, INPUT_PRECISION), grad_value


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_backward_dkv_kernel(
    grad, query, key, value, statistics, offsets, key_offsets, num_targets, grad_key, grad_value,
    num_samples, total, key_total, scale, window, num_contextual,
    grad_row_stride, grad_head_stride, query_row_stride, query_head_stride, key_row_stride, key_head_stride,
    value_row_stride, value_head_stride, output_row_stride,
    relative_bias, max_distance, time_bias, num_buckets, q_times, k_times, bias, bias_offsets, bias_rows, bias_keys,
    bias_batch_stride, bias_head_stride, bias_row_stride, bias_key_stride, dropout_seed, dropout_threshold, kept_scale,
    normalizer,
    IS_CAUSAL: tl.constexpr, GROUP: tl.constexpr, APART: tl.constexpr, USE_TMA: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, INPUT_PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of one tile of keys and values, from all `GROUP` query heads that share them."""
    IS_POINTWISE: tl.constexpr = statistics is None
    own_offsets = offsets if key_offsets is None else key_offsets
    sample, key_start, key_length, first_key = find_tile(own_offsets, tl.program_id(0), num_samples, key_total, BLOCK_N, APART)
    key_length, first_key = key_length.to(tl.int32), first_key.to(tl.int32)
    if first_key >= key_length:
        return
    start, query_length = key_start, key_length
    if key_offsets is not None:
        start, end = load_segment(offsets, sample, total)
        query_length = (end - start).to(tl.int32)
    shift = key_length - query_length
    history = history_end(num_targets, sample, key_length)
    key_head = tl.program_id(1).to(tl.int64)
    key += key_start * key_row_stride + key_head * key_head_stride
    value += key_start * value_row_stride + key_head * value_head_stride
    head = key_head * GROUP
    place = Place(
        head, start, key_start, query_length, key_length, shift, history, window, num_contextual, num_targets
    )  # fmt: skip
    first_pair, bias_row_stride, bias_rows, bias_keys = pairs_of(
        bias, bias_offsets, sample, query_length, key_length, bias_batch_stride, bias_row_stride, bias_key_stride,
        bias_rows, bias_keys,
    )  # fmt: skip
    biases = Biases(
        1.0 / scale, relative_bias, max_distance, time_bias, num_buckets, q_times, k_times,
        bounds_of(q_times, total, start, sample), bounds_of(k_times, key_total, key_start, sample),
        bias, first_pair, bias_head_stride, bias_row_stride, bias_key_stride, bias_rows, bias_keys,
    )  # fmt: skip
    dropout = Dropout(dropout_seed, dropout_threshold, kept_scale)
    ACCURATE: tl.constexpr = query.dtype.element_ty == tl.float32
    factor = scale * 0.5 if IS_POINTWISE else in_score_units(scale, ACCURATE)

    k = load_by_pointers(key, first_key, key_length, key_row_stride, False, BLOCK_N, HEAD_DIM, BLOCK_D)
    v = load_by_pointers(value, first_key, key_length, value_row_stride, False, BLOCK_N, HEAD_DIM, BLOCK_D)
    total_grad_key = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    total_grad_value = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    last_key = tl.minimum(first_key + BLOCK_N, key_length) - 1
    whole_begin, whole_end, prefix_tiles, low, low_tiles, high_tiles, diagonal, edge_tiles = query_ranges(
        first_key, last_key, shift, query_length, history, window, num_contextual, num_targets, IS_CAUSAL, BLOCK_M
    )
    query += start * query_row_stride + head * query_head_stride
    grad += start * grad_row_stride + head * grad_head_stride
    if not IS_POINTWISE:
        statistics += (head * total + start) * 2
    queries = rows_of(query, query_length, query_row_stride, USE_TMA, BLOCK_M, HEAD_DIM, BLOCK_D)
    upstream = rows_of(grad, query_length, grad_row_stride, USE_TMA, BLOCK_M, HEAD_DIM, BLOCK_D)
    for step in range(0, edge_tiles * GROUP):
        member, index = member_and_place(step, 0, edge_tiles, GROUP)
        first_query = edge_tile(index, whole_end, prefix_tiles, low, low_tiles, high_tiles, diagonal, BLOCK_M)
        total_grad_key, total_grad_value = accumulate_dkv(
            total_grad_key, total_grad_value, k, v, queries, upstream, statistics, member, first_query, first_key,
            query_row_stride, query_head_stride, grad_row_stride, grad_head_stride, total, factor, place, biases, dropout,
            True, IS_CAUSAL, GROUP, USE_TMA, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, INPUT_PRECISION,
        )  # fmt: skip
    span = tl.cdiv(whole_end - whole_begin, BLOCK_M) * BLOCK_M
    for position in range(whole_begin, whole_begin + span * GROUP, BLOCK_M):
        member, first_query = member_and_place(position, whole_begin, span, GROUP)
        total_grad_key, total_grad_value = accumulate_dkv(
            total_grad_key, total_grad_value, k, v, queries, upstream, statistics, member, first_query, first_key,
            query_row_stride, query_head_stride, grad_row_stride, grad_head_stride, total, factor, place, biases, dropout,
            False, IS_CAUSAL, GROUP, USE_TMA, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, INPUT_PRECISION,
        )  # fmt: skip
    gain = 1.0
    if IS_POINTWISE:
        gain = pointwise_factor(normalizer, key_length)
    if dropout.seed is not None:
        total_grad_value *= kept_scale
    total_grad_key *= scale * gain
    total_grad_value *= gain
    grad_key += key_start * output_row_stride + key_head * HEAD_DIM
    grad_value += key_start * output_row_stride + key_head * HEAD_DIM
    store_tile(grad_key, total_grad_key, first_key, key_length, output_row_stride, BLOCK_N, HEAD_DIM, BLOCK_D)
    store_tile(grad_value, total_grad_value, first_key, key_length, output_row_stride, BLOCK_N, HEAD_DIM, BLOCK_D)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor | None,
    num_targets: Tensor | None,
    relative_bias: Tensor | None,
    time_bias: Tensor | None,
    q_times: Tensor | None,
    k_times: Tensor | None,
    bias: Tensor | None,
    bias_offsets: Tensor | None,
    dropout_seed: Tensor | None,
    causal: bool,
    window: int,
    num_contextual: int,
    scale: float,
    dropout_p: float,
    pointwise: bool,
    normalizer: float,
) -> tuple[Tensor, Tensor]:
    """Launch `attention_forward_kernel`: output `[Sq, H, D]` and log-sum-exp `[H, Sq]`, natural logarithm, float32.

    Pointwise weights have no log-sum-exp; then it is empty. Here and in `backward`, where no key is hidden but by `causal` and
    nothing is added to scores or done to weights, the kernels for Hopper serve the samples that are long enough for them.
    """
    total, heads, head_dim = q.shape
    q, k, v = _readable(q), _readable(k), _readable(v)
    q_offsets, k_offsets, num_targets, bias_offsets = _contiguous(q_offsets, k_offsets, num_targets, bias_offsets)
    options = num_targets, relative_bias, time_bias, bias, dropout_seed, window, num_contextual
    if _hopper_serves((q, k, v), q_offsets, options):
        from jagged.ops.attention import hopper

        return hopper.forward(q, k, v, q_offsets, k_offsets, causal, scale, pointwise, normalizer)
    output = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((0,) if pointwise else (heads, total), dtype=torch.float32, device=q.device)
    kind = _kind(pointwise, relative_bias, time_bias, bias)
    chosen = configuration(head_dim, q.dtype, total, q_offsets.shape[0] - 1, allows_tma=_allow_tma(k, v), kind=kind)
    tiles = chosen.forward
    grid = _grid(q, q_offsets, tiles)
    if grid[0]:
        attention_forward_kernel[grid](
            q, k, v, q_offsets, k_offsets, num_targets, output, None if pointwise else lse, q_offsets.shape[0] - 1, total,
            k.shape[0], scale, window or None, num_contextual or None, *_strides(q, k, v), output.stride(0),
            **_extras(
                q_offsets, k_offsets, relative_bias, time_bias, q_times, k_times, bias, bias_offsets, dropout_seed, dropout_p,
                normalizer, scale,
            ),
            BLOCK_M=tiles.own, BLOCK_N=tiles.visit, **_constants(q, k, causal, chosen.apart, tiles),
        )  # fmt: skip
    return output, lse


def backward(
    grad: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    lse: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor | None,
    num_targets: Tensor | None,
    relative_bias: Tensor | None,
    time_bias: Tensor | None,
    q_times: Tensor | None,
    k_times: Tensor | None,
    bias: Tensor | None,
    bias_offsets: Tensor | None,
    dropout_seed: Tensor | None,
    causal: bool,
    window: int,
    num_contextual: int,
    scale: float,
    dropout_p: float,
    pointwise: bool,
    normalizer: float,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Launch `attention_backward_dq_kernel`, then `attention_backward_dkv_kernel`: contiguous gradients of q, k, v and biases."""
    total, heads, head_dim = q.shape
    grad, q, k, v = _readable(grad), _readable(q), _readable(k), _readable(v)
    grad_lse, q_offsets, k_offsets, num_targets, bias_offsets = _contiguous(
        grad_lse, q_offsets, k_offsets, num_targets, bias_offsets
    )
    options = num_targets, relative_bias, time_bias, bias, dropout_seed, window, num_contextual, pointwise
    if _hopper_serves((q, k, v, grad), q_offsets, options):
        from jagged.ops.attention import hopper_backward

        of_rows = hopper_backward.backward(grad, grad_lse, q, k, v, output, lse, q_offsets, k_offsets, causal, scale)
        return *of_rows, q.new_empty(0), q.new_empty(0), q.new_empty(0)
    grad_q, grad_k, grad_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    row_lse = None if pointwise else lse
    statistics = None if pointwise else torch.empty(*lse.shape, 2, dtype=torch.float32, device=q.device)
    batch_size = q_offsets.shape[0] - 1
    # A loop over heads moves a pointer, which it could not do with a descriptor.
    allows_tma = heads == k.shape[1] and _allow_tma(grad, q, k, v)
    kind = _kind(pointwise, relative_bias, time_bias, bias)
    chosen = configuration(head_dim, q.dtype, total, batch_size, allows_tma=allows_tma, kind=kind)
    scalars = batch_size, total, k.shape[0], scale, window or None, num_contextual or None, *_strides(grad, q, k, v)
    extras = _extras(
        q_offsets, k_offsets, relative_bias, time_bias, q_times, k_times, bias, bias_offsets, dropout_seed, dropout_p, normalizer,
        scale,
    )  # fmt: skip
    relative, time, pairs = (x if want else None for x, want in zip((relative_bias, time_bias, bias), wanted, strict=True))
    relative_sums, time_sums = (
        None if x is None else torch.zeros((_copies(x), BINS.value, *x.shape), dtype=torch.int64, device=x.device)
        for x in (relative, time)
    )
    grad_bias = None if pairs is None else torch.zeros(pairs.shape, dtype=pairs.dtype, device=pairs.device)
    if (grid := _grid(q, q_offsets, chosen.dq))[0]:
        attention_backward_dq_kernel[grid](
            grad, grad_lse, q, k, v, output, row_lse, q_offsets, k_offsets,
            num_targets, grad_q, statistics, *scalars, output.stride(0), **extras, grad_relative_bias=relative_sums,
            relative_copies=0 if relative is None else _copies(relative), grad_time_bias=time_sums,
            time_copies=0 if time is None else _copies(time), grad_bias=grad_bias,
            BLOCK_M=chosen.dq.own, BLOCK_N=chosen.dq.visit,
            BLOCK_T=1 if time is None else triton.next_power_of_2(min(time.shape[1], MOST_BUCKETS)),
            **_constants(q, k, causal, chosen.apart, chosen.dq),
        )  # fmt: skip
    if (grid := _grid(k, q_offsets, chosen.dkv))[0]:
        attention_backward_dkv_kernel[grid](
            grad, q, k, v, statistics, q_offsets, k_offsets, num_targets, grad_k, grad_v, *scalars, grad_k.stride(0),
            **extras, BLOCK_M=chosen.dkv.visit, BLOCK_N=chosen.dkv.own, **_constants(q, k, causal, chosen.apart, chosen.dkv),
        )  # fmt: skip

    of_pairs = q.new_empty(0) if grad_bias is None else grad_bias
    of_distances, of_times = (
        q.new_empty(0) if sums is None or table is None else _rounded(sums, table)
        for sums, table in ((relative_sums, relative), (time_sums, time))
    )
    return grad_q, grad_k, grad_v, of_distances, of_times, of_pairs


def _copies(table: Tensor) -> int:
    """Return how many copies of a table's sums programs take in turn; large tables have few additions to one entry."""
    copies = max(1, min(MOST_COPIES, 2**16 // max(1, table.numel())))
    return 1 << (copies.bit_length() - 1)


def _rounded(sums: Tensor, table: Tensor) -> Tensor:
    """Launch `sum_bins_kernel`: the gradient of a table."""
    gradient = torch.empty(table.shape, dtype=table.dtype, device=table.device)
    if gradient.numel():
        sum_bins_kernel[(triton.cdiv(gradient.numel(), 16),)](sums, gradient, gradient.numel(), COPIES=sums.shape[0], BLOCK=16)
    return gradient


def _prepare_biases(
    relative_bias: Tensor | None,
    time_bias: Tensor | None,
    q_times: Tensor | None,
    k_times: Tensor | None,
    q_offsets: Tensor,
    k_offsets: Tensor | None,
    scale: float,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Launch `prepare_biases_kernel`: what the other kernels read of tables and times."""
    table = time_bias if relative_bias is None else relative_bias
    if table is None:
        return None, None, None, None
    relative, time, q_times, k_times = _contiguous(relative_bias, time_bias, q_times, k_times)
    heads, num_samples = table.shape[0], q_offsets.shape[0] - 1
    wide_relative, wide_time, q_split, k_split = None, None, None, None
    widths, tiles, key_total = [0], 0, 0
    if relative is not None:
        widths.append(relative.shape[1] + 2 * PADDING.value)
        wide_relative = torch.empty(heads, 2, widths[-1], dtype=torch.float32, device=table.device)
    if time is not None and q_times is not None and k_times is not None:
        wide_time = torch.empty(heads, FLOAT_BUCKETS.value, dtype=torch.float32, device=table.device)
        widths.append(FLOAT_BUCKETS.value)
        is_same = k_offsets is None and q_times.data_ptr() == k_times.data_ptr()
        key_total = k_times.shape[0]
        k_split, q_split = (x.new_empty(x.shape[0] + x.shape[0] // SPAN.value + num_samples) for x in (k_times, q_times))
        tiles = k_split.shape[0] - key_total
        if is_same:
            q_times, q_split = None, k_split
        else:
            tiles += q_split.shape[0] - q_times.shape[0]
    blocks = triton.cdiv(max(widths), 256)
    prepare_biases_kernel[(blocks * heads + tiles,)](
        relative, time, wide_relative, wide_time, 0 if relative is None else relative.shape[1] // 2,
        0 if time is None else time.shape[1], 1 / scale, blocks, heads, k_times,
        q_offsets if k_offsets is None else k_offsets, k_split, key_total, q_times, q_offsets, q_split,
        0 if q_times is None else q_times.shape[0], num_samples, BLOCK=256, num_warps=1,
    )  # fmt: skip
    return wide_relative, wide_time, q_split, k_split


def _extras(
    q_offsets: Tensor,
    k_offsets: Tensor | None,
    relative_bias: Tensor | None,
    time_bias: Tensor | None,
    q_times: Tensor | None,
    k_times: Tensor | None,
    bias: Tensor | None,
    bias_offsets: Tensor | None,
    dropout_seed: Tensor | None,
    dropout_p: float,
    normalizer: float,
    scale: float,
) -> dict[str, Any]:
    """Arguments of all three kernels; a jagged bias `[H, P]` is one row of `P` pairs for each head."""
    wide_relative, wide_time, q_times, k_times = _prepare_biases(
        relative_bias, time_bias, q_times, k_times, q_offsets, k_offsets, scale
    )
    dense = None if bias is None else bias if bias.dim() == 4 else bias[None, :, None]
    strides = (0, 0, 0, 0) if dense is None else dense.stride()
    return {
        "relative_bias": wide_relative,
        "max_distance": 0 if relative_bias is None else relative_bias.shape[1] // 2,
        "time_bias": wide_time,
        "num_buckets": 0 if time_bias is None else time_bias.shape[1],
        "q_times": q_times,
        "k_times": k_times,
        "bias": bias,
        "bias_offsets": bias_offsets,
        "bias_rows": 0 if dense is None else dense.shape[2],
        "bias_keys": 0 if dense is None else dense.shape[3],
        **{f"bias_{name}_stride": stride for name, stride in zip(("batch", "head", "row", "key"), strides, strict=True)},
        "dropout_seed": dropout_seed,
        "dropout_threshold": min(round(dropout_p * 2**32), 2**32 - 1),
        "kept_scale": 1 / (1 - dropout_p),
        "normalizer": normalizer,
    }


def _kind(pointwise: bool, relative_bias: Tensor | None, time_bias: Tensor | None, bias: Tensor | None) -> Kind:
    match relative_bias is not None, time_bias is not None, bias is not None:
        case False, False, False:
            return "pointwise" if pointwise else "plain"
        case True, False, False:
            return "distances"
        case False, True, False:
            return "times"
    return "biased"


def _contiguous(*tensors: Any) -> Iterator[Any]:
    """Tensors that the kernels read as if their elements lay side by side; None stays."""
    return (None if x is None else x.contiguous() for x in tensors)


def _readable(x: Tensor) -> Tensor:
    """The kernels take any stride of rows and heads, and columns side by side."""
    return x if x.stride(2) == 1 else x.contiguous()


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:2]]


def _grid(rows: Tensor, offsets: Tensor, tiles: Tiles) -> tuple[int, int]:
    """Programs enough for every tile of `find_tile`'s list, and for each head; none where there is nothing to do."""
    batch_size = offsets.shape[0] - 1
    return (rows.shape[0] // tiles.own + batch_size if batch_size and rows.numel() else 0, rows.shape[1])


def _constants(q: Tensor, k: Tensor, causal: bool, apart: bool, tiles: Tiles) -> dict[str, Any]:
    if tiles.tma:
        # Descriptors lie in memory that Triton asks for at each launch, from an allocator that belongs to the thread.
        triton.set_allocator(_allocate)
    limited = tiles.max_registers is not None and _capability(q.device) == (9, 0)
    return {
        "IS_CAUSAL": causal,
        "APART": apart,
        "USE_TMA": tiles.tma,
        "GROUP": q.shape[1] // k.shape[1],
        "HEAD_DIM": q.shape[2],
        "BLOCK_D": padded_width(q.shape[2]),
        "INPUT_PRECISION": float32_products() if q.dtype == torch.float32 else "ieee",
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
        **({"maxnreg": tiles.max_registers} if limited else {}),
    }


def _allow_tma(*tensors: Tensor) -> bool:
    """Whether the GPU has TMA, and every row of every head begins at 16 bytes."""
    return _capability(tensors[0].device) >= (9, 0) and all(
        x.data_ptr() % 16 == 0 and all(stride * x.itemsize % 16 == 0 for stride in x.stride()[:2]) for x in tensors
    )


def _hopper_serves(rows: Sequence[Tensor], q_offsets: Tensor, options: Iterable[Tensor | int | None]) -> bool:
    """Whether the kernels for Hopper can and should take `rows`, of which queries and keys are the first, if `options` are none.

    The GPU has to be one, for their matrix instructions are no other's, and descriptors have to be able to tell of the rows.
    """
    q, k, *_ = rows
    if any(isinstance(x, Tensor) or x for x in options) or not k.numel() or not _allow_tma(*rows):
        return False
    is_long = is_specialised(q.shape[2], q.dtype, q.shape[0], q_offsets.shape[0] - 1)
    return is_long and _capability(q.device) == (9, 0) and _has_gluon()


@functools.cache
def _has_gluon() -> bool:
    """Whether this Triton has the experimental parts that the kernels for Hopper are written in."""
    try:
        import jagged.ops.attention.hopper_backward  # noqa: F401
    except ImportError:
        return False
    return True


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of an NVIDIA GPU; 0.0 of anything else."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" and torch.version.hip is None else (0, 0)


def _allocate(size: int, alignment: int, stream: int | None) -> Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")
