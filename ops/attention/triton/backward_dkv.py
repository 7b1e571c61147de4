"""The second kernel of the backward pass: gradients of keys and values."""

import triton
import triton.language as tl

from jagged.ops._shared.device import dot
from jagged.ops.attention.triton.biases import HIDDEN, Biases, bias_numbers
from jagged.ops.attention.triton.forward import UNSPECIALIZED
from jagged.ops.attention.triton.masks import Sight, edge_tile, query_ranges
from jagged.ops.attention.triton.samples import (
    Rows,
    find_others,
    find_rows,
    load_by_pointers,
    load_rows,
    of_head,
    rows_source,
    sample_of,
    store_rows,
    stride_of_values,
)
from jagged.ops.attention.triton.scores import (
    Dropout,
    Rules,
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
def member_and_first(step, begin, span, GROUP: tl.constexpr):
    """Return the head of a group, and what it visits from `begin` on, of one `step` of a loop over all heads' spans in a row."""
    member = 0
    if GROUP > 1:
        member = (step - begin) // span
        step -= member * span
    return member, step


@triton.jit
def of_member(source, member, head_stride, GROUP: tl.constexpr):
    """Return where a head of the group has its rows; of a group of one that is the source, which may be a descriptor."""
    if GROUP > 1:
        return source + member.to(tl.int64) * head_stride
    else:
        return source


@triton.jit
def accumulate_dkv(
    sums, k, v, queries, upstream, statistics, member, first_query, first_key, query_head_stride, grad_head_stride, total, factor,
    sample, rules,
    IS_EDGE: tl.constexpr, IS_CAUSAL: tl.constexpr, GROUP: tl.constexpr, USE_TMA: tl.constexpr, HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what one tile of queries gives to the gradients of a tile of keys and values. Scores are held transposed."""
    ACCURATE: tl.constexpr = k.dtype == tl.float32
    grad_key, grad_value = sums
    sample = of_head(sample, sample.head + member)
    query_length = sample.query_length
    queries = Rows(of_member(queries.source, member, query_head_stride, GROUP), queries.stride)
    upstream = Rows(of_member(upstream.source, member, grad_head_stride, GROUP), upstream.stride)
    row = (first_query + tl.arange(0, BLOCK_M))[None, :]
    column = (first_key + tl.arange(0, BLOCK_N))[:, None]
    row_lse, row_delta = None, None
    q = load_rows(queries, first_query, query_length, not IS_EDGE, USE_TMA, BLOCK_M, HEAD_DIM, BLOCK_D)
    if statistics is not None:
        row_lse, row_delta = load_statistics(
            of_member(statistics, member, total * 2, GROUP), first_query + tl.arange(0, BLOCK_M), query_length, not IS_EDGE
        )  # fmt: skip
    products, capped = tile_products(
        k, q, row, column, first_query, first_key, factor, sample, rules,
        IS_EDGE, IS_CAUSAL, statistics is None, INPUT_PRECISION,
    )  # fmt: skip
    if IS_EDGE:
        products = tl.where(row < query_length, products, HIDDEN if statistics is None else float("-inf"))
    common = tile_bias(row, column, first_query, first_key, sample, rules)
    weights, slopes = weights_and_slopes(products, row_lse, common, factor, ACCURATE)
    keep = None
    if rules.dropout.seed is not None:
        keep = kept(row, column, sample, rules.dropout)
        weights = tl.where(keep, weights, 0.0)
    do = load_rows(upstream, first_query, query_length, not IS_EDGE, USE_TMA, BLOCK_M, VALUE_DIM, BLOCK_DV)
    grad_value = dot(weights.to(do.dtype), do, grad_value, INPUT_PRECISION)
    grad_weights = dot(v, tl.trans(do), None, INPUT_PRECISION)
    grad_scores = score_gradients(slopes, grad_weights, row_delta, keep, rules.dropout)
    grad_products = less_capped(grad_scores, capped, rules)
    return dot(grad_products.to(q.dtype), q, grad_key, INPUT_PRECISION), grad_value


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_backward_dkv_kernel(
    grad, query, key, value, statistics, offsets, key_offsets, num_targets, grad_key, grad_value,
    num_samples, total, key_total, scale, window, reach, num_contextual, prefix, cap_factor,
    grad_row_stride, grad_head_stride, query_row_stride, query_head_stride, key_row_stride, key_head_stride,
    value_row_stride, value_head_stride, output_row_stride,
    relative_bias, max_distance, time_bias, num_buckets, q_times, k_times, bias, bias_offsets, bias_rows, bias_keys,
    bias_batch_stride, bias_head_stride, bias_row_stride, bias_key_stride, dropout_seed, dropout_threshold, kept_scale,
    normalizer,
    IS_CAUSAL: tl.constexpr, GROUP: tl.constexpr, APART: tl.constexpr, USE_TMA: tl.constexpr, HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of one tile of keys and values, from all `GROUP` query heads that share them."""
    IS_POINTWISE: tl.constexpr = statistics is None
    ACCURATE: tl.constexpr = query.dtype.element_ty == tl.float32
    own_offsets = offsets if key_offsets is None else key_offsets
    index, key_start, key_length, first_key = find_rows(own_offsets, num_samples, key_total, BLOCK_N, APART)
    if first_key >= key_length:
        return
    other_offsets = None if key_offsets is None else offsets
    start, query_length = find_others(other_offsets, index, total, key_start, key_length)
    key_head = tl.program_id(1).to(tl.int64)
    sample = sample_of(index, key_head * GROUP, start, query_length, key_start, key_length, num_targets)
    numbers = bias_numbers(
        bias, bias_offsets, sample, scale, max_distance, num_buckets, total, key_total,
        bias_batch_stride, bias_head_stride, bias_row_stride, bias_key_stride, bias_rows, bias_keys,
    )  # fmt: skip
    rules = Rules(
        Sight(window, reach, num_contextual, prefix, num_targets), Biases(relative_bias, time_bias, q_times, k_times, bias),
        numbers, Dropout(dropout_seed, dropout_threshold, kept_scale), cap_factor,
    )  # fmt: skip
    factor = score_factor(scale, IS_POINTWISE, ACCURATE)
    key += key_start * key_row_stride + key_head * key_head_stride
    value += key_start * value_row_stride + key_head * value_head_stride
    query += start * query_row_stride + sample.head * query_head_stride
    grad += start * grad_row_stride + sample.head * grad_head_stride
    if not IS_POINTWISE:
        statistics += (sample.head * total + start) * 2

    k = load_by_pointers(Rows(key, key_row_stride), first_key, key_length, False, BLOCK_N, HEAD_DIM, BLOCK_D)
    v = load_by_pointers(Rows(value, value_row_stride), first_key, key_length, False, BLOCK_N, VALUE_DIM, BLOCK_DV)
    total_grad_key = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    total_grad_value = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    ranges = query_ranges(first_key, sample, rules.sight, IS_CAUSAL, BLOCK_N, BLOCK_M)
    queries = Rows(rows_source(query, query_length, query_row_stride, USE_TMA, BLOCK_M, HEAD_DIM, BLOCK_D), query_row_stride)
    upstream = Rows(rows_source(grad, query_length, grad_row_stride, USE_TMA, BLOCK_M, VALUE_DIM, BLOCK_DV), grad_row_stride)
    for step in range(0, ranges.edge_tiles * GROUP):
        member, edge = member_and_first(step, 0, ranges.edge_tiles, GROUP)
        total_grad_key, total_grad_value = accumulate_dkv(
            (total_grad_key, total_grad_value), k, v, queries, upstream, statistics, member, edge_tile(edge, ranges, BLOCK_M),
            first_key, query_head_stride, grad_head_stride, total, factor, sample, rules,
            True, IS_CAUSAL, GROUP, USE_TMA, HEAD_DIM, VALUE_DIM, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, INPUT_PRECISION,
        )  # fmt: skip
    span = tl.cdiv(ranges.whole_end - ranges.whole_begin, BLOCK_M) * BLOCK_M
    for step in range(ranges.whole_begin, ranges.whole_begin + span * GROUP, BLOCK_M):
        member, first_query = member_and_first(step, ranges.whole_begin, span, GROUP)
        total_grad_key, total_grad_value = accumulate_dkv(
            (total_grad_key, total_grad_value), k, v, queries, upstream, statistics, member, first_query,
            first_key, query_head_stride, grad_head_stride, total, factor, sample, rules,
            False, IS_CAUSAL, GROUP, USE_TMA, HEAD_DIM, VALUE_DIM, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, INPUT_PRECISION,
        )  # fmt: skip
    gain = 1.0
    if IS_POINTWISE:
        gain = pointwise_factor(normalizer, key_length)
    if dropout_seed is not None:
        total_grad_value *= kept_scale
    total_grad_key *= scale * gain
    total_grad_value *= gain
    grad_key += key_start * output_row_stride + key_head * HEAD_DIM
    value_stride = stride_of_values(output_row_stride, HEAD_DIM, VALUE_DIM)
    grad_value += key_start * value_stride + key_head * VALUE_DIM
    store_rows(Rows(grad_key, output_row_stride), total_grad_key, first_key, key_length, BLOCK_N, HEAD_DIM, BLOCK_D)
    store_rows(Rows(grad_value, value_stride), total_grad_value, first_key, key_length, BLOCK_N, VALUE_DIM, BLOCK_DV)
