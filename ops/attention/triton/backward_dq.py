"""The first kernel of the backward pass: gradients of queries and of biases, and what the second kernel subtracts."""

import triton
import triton.language as tl

from jagged.ops._shared.device import dot, rounded_product
from jagged.ops.attention.triton.bias_gradients import (
    BiasGradients,
    add_bias_gradients,
    add_sums,
    find_gradients,
    no_sums,
    own_copy,
)
from jagged.ops.attention.triton.biases import Biases, bias_numbers
from jagged.ops.attention.triton.forward import UNSPECIALIZED
from jagged.ops.attention.triton.masks import Sight, edge_tile, key_ranges
from jagged.ops.attention.triton.samples import (
    Rows,
    find_others,
    find_rows,
    load_by_pointers,
    load_rows,
    rows_source,
    sample_of,
    store_rows,
    stride_of_values,
)
from jagged.ops.attention.triton.scores import (
    Dropout,
    Rules,
    in_score_units,
    kept,
    less_capped,
    pointwise_factor,
    score_factor,
    score_gradients,
    tile_bias,
    tile_products,
    weights_and_slopes,
)


@triton.jit
def accumulate_dq(
    sums, query, upstream, keys, values, row_lse, row_delta, first_query, first_key, factor, sample, rules, bias_grads, gain,
    IS_EDGE: tl.constexpr, IS_CAUSAL: tl.constexpr, USE_TMA: tl.constexpr, HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what one tile of keys gives to the gradients of a query tile and of the biases."""
    ACCURATE: tl.constexpr = query.dtype == tl.float32
    grad_query, of_distance, of_time = sums
    row = (first_query + tl.arange(0, BLOCK_M))[:, None]
    column = (first_key + tl.arange(0, BLOCK_N))[None, :]
    k = load_rows(keys, first_key, sample.key_length, not IS_EDGE, USE_TMA, BLOCK_N, HEAD_DIM, BLOCK_D)
    v = load_rows(values, first_key, sample.key_length, not IS_EDGE, USE_TMA, BLOCK_N, VALUE_DIM, BLOCK_DV)
    products, capped = tile_products(
        query, k, row, column, first_query, first_key, factor, sample, rules,
        IS_EDGE, IS_CAUSAL, row_lse is None, INPUT_PRECISION,
    )  # fmt: skip
    common = tile_bias(row, column, first_query, first_key, sample, rules)
    _, slopes = weights_and_slopes(products, row_lse, common, factor, ACCURATE)
    grad_weights = dot(upstream, tl.trans(v), None, INPUT_PRECISION)
    keep = None
    if rules.dropout.seed is not None:
        keep = kept(row, column, sample, rules.dropout)
    grad_scores = score_gradients(slopes, grad_weights, row_delta, keep, rules.dropout)
    of_distance, of_time = add_bias_gradients(
        of_distance, of_time, grad_scores * gain, row, column, first_query, first_key, sample, rules, bias_grads, not IS_EDGE
    )  # fmt: skip
    grad_products = less_capped(grad_scores, capped, rules)
    grad_query = dot(grad_products.to(k.dtype), k, grad_query, INPUT_PRECISION)
    return grad_query, of_distance, of_time


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_backward_dq_kernel(
    grad, grad_lse, query, key, value, output, lse, offsets, key_offsets, num_targets, grad_query, statistics,
    num_samples, total, key_total, scale, window, reach, num_contextual, prefix, cap_factor,
    grad_row_stride, grad_head_stride, query_row_stride, query_head_stride, key_row_stride, key_head_stride,
    value_row_stride, value_head_stride, output_row_stride,
    relative_bias, max_distance, time_bias, num_buckets, q_times, k_times, bias, bias_offsets, bias_rows, bias_keys,
    bias_batch_stride, bias_head_stride, bias_row_stride, bias_key_stride, dropout_seed, dropout_threshold, kept_scale,
    normalizer,
    grad_relative_bias, relative_copies, grad_time_bias, time_copies, grad_bias,
    IS_CAUSAL: tl.constexpr, GROUP: tl.constexpr, APART: tl.constexpr, USE_TMA: tl.constexpr, HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    INPUT_PRECISION: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Gradients of one tile of queries and of its biases, and `statistics` for the dkv kernel: what it subtracts in each row.

    That is the log-sum-exp in the scores' units, from scores, and delta, from gradients of weights. Delta is the row's dot
    product of output and its gradient, less the gradient of its log-sum-exp: a score's gradient is its weight times (gradient of
    the weight - delta).
    """
    IS_POINTWISE: tl.constexpr = lse is None
    ACCURATE: tl.constexpr = query.dtype.element_ty == tl.float32
    index, start, query_length, first_query = find_rows(offsets, num_samples, total, BLOCK_M, APART)
    if first_query >= query_length:
        return
    key_start, key_length = find_others(key_offsets, index, key_total, start, query_length)
    head = tl.program_id(1).to(tl.int64)
    sample = sample_of(index, head, start, query_length, key_start, key_length, num_targets)
    numbers = bias_numbers(
        bias, bias_offsets, sample, scale, max_distance, num_buckets, total, key_total,
        bias_batch_stride, bias_head_stride, bias_row_stride, bias_key_stride, bias_rows, bias_keys,
    )  # fmt: skip
    rules = Rules(
        Sight(window, reach, num_contextual, prefix, num_targets), Biases(relative_bias, time_bias, q_times, k_times, bias),
        numbers, Dropout(dropout_seed, dropout_threshold, kept_scale), cap_factor,
    )  # fmt: skip
    factor = score_factor(scale, IS_POINTWISE, ACCURATE)
    grad_numbers = find_gradients(grad_bias, bias_offsets, sample, max_distance, num_buckets, bias_rows, bias_keys)
    if grad_relative_bias is not None:
        grad_relative_bias += own_copy(relative_copies, grad_numbers.relative_stride)
    if grad_time_bias is not None:
        grad_time_bias += own_copy(time_copies, grad_numbers.time_stride)
    bias_grads = BiasGradients(grad_relative_bias, grad_time_bias, grad_bias, grad_numbers)
    grad += start * grad_row_stride + head * grad_head_stride
    query += start * query_row_stride + head * query_head_stride
    key += key_start * key_row_stride + head // GROUP * key_head_stride
    value += key_start * value_row_stride + head // GROUP * value_head_stride
    grad_query += start * output_row_stride + head * HEAD_DIM

    upstream = load_by_pointers(Rows(grad, grad_row_stride), first_query, query_length, False, BLOCK_M, VALUE_DIM, BLOCK_DV)
    row = first_query + tl.arange(0, BLOCK_M)
    row_lse, row_delta, gain = None, None, 1.0
    if IS_POINTWISE:
        gain = pointwise_factor(normalizer, key_length)
        upstream = tl.where((row < query_length)[:, None], upstream, 0.0)
    else:
        result_stride = stride_of_values(output_row_stride, HEAD_DIM, VALUE_DIM)
        output += start * result_stride + head * VALUE_DIM
        lse += head * total + start
        statistics += (head * total + start) * 2
        result = load_by_pointers(
            Rows(output, result_stride), first_query, query_length, False, BLOCK_M, VALUE_DIM, BLOCK_DV
        )  # fmt: skip
        row_delta = tl.sum(rounded_product(upstream, result), 1)
        if grad_lse is not None:
            row_delta -= tl.load(grad_lse + head * total + start + row, mask=row < query_length, other=0.0)
        row_lse = load_lse(lse, row, query_length, ACCURATE)
        addresses = statistics + row[:, None] * 2 + tl.arange(0, 2)[None, :]
        tl.store(addresses, tl.join(row_lse, row_delta), mask=(row < query_length)[:, None])
        row_lse = row_lse[:, None]
        row_delta = row_delta[:, None]

    q = load_by_pointers(
        Rows(query, query_row_stride), first_query, query_length, False, BLOCK_M, HEAD_DIM, BLOCK_D
    )  # fmt: skip
    keys = Rows(rows_source(key, key_length, key_row_stride, USE_TMA, BLOCK_N, HEAD_DIM, BLOCK_D), key_row_stride)
    values = Rows(rows_source(value, key_length, value_row_stride, USE_TMA, BLOCK_N, VALUE_DIM, BLOCK_DV), value_row_stride)
    total_grad = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    of_distance, of_time = no_sums(BLOCK_M, BLOCK_T)
    ranges = key_ranges(first_query, sample, rules.sight, IS_CAUSAL, BLOCK_M, BLOCK_N)
    for first_key in range(ranges.whole_begin, ranges.whole_end, BLOCK_N):
        total_grad, of_distance, of_time = accumulate_dq(
            (total_grad, of_distance, of_time), q, upstream, keys, values, row_lse, row_delta, first_query, first_key,
            factor, sample, rules, bias_grads, gain,
            False, IS_CAUSAL, USE_TMA, HEAD_DIM, VALUE_DIM, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, INPUT_PRECISION,
        )  # fmt: skip
    for step in range(0, ranges.edge_tiles):
        total_grad, of_distance, of_time = accumulate_dq(
            (total_grad, of_distance, of_time), q, upstream, keys, values, row_lse, row_delta, first_query,
            edge_tile(step, ranges, BLOCK_N), factor, sample, rules, bias_grads, gain,
            True, IS_CAUSAL, USE_TMA, HEAD_DIM, VALUE_DIM, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, INPUT_PRECISION,
        )  # fmt: skip
    total_grad *= scale * gain
    store_rows(Rows(grad_query, output_row_stride), total_grad, first_query, query_length, BLOCK_M, HEAD_DIM, BLOCK_D)
    add_sums(of_distance, of_time, sample, numbers, bias_grads, BLOCK_T)


@triton.jit
def load_lse(lse, rows, length, ACCURATE: tl.constexpr):
    """Load log-sum-exps in the scores' units; infinite for queries past the end or without keys, which so weigh nothing."""
    row_lse = tl.load(lse + rows, mask=rows < length, other=float("inf"))
    return in_score_units(tl.where(row_lse == float("-inf"), float("inf"), row_lse), ACCURATE)
