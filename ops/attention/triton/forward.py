"""The forward kernel: output and log-sum-exp of tiles of queries."""

import triton
import triton.language as tl

from jagged.ops._shared.device import dot
from jagged.ops.attention.triton.biases import Biases, bias_numbers, less_common
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
)
from jagged.ops.attention.triton.scores import (
    LN_2,
    Dropout,
    Rules,
    kept,
    pointwise_factor,
    score_factor,
    silu,
    softmax_weights,
    tile_bias,
    tile_products,
)

# Numbers that change from batch to batch.
UNSPECIALIZED = [
    "num_samples", "total", "key_total", "window", "reach", "num_contextual", "prefix", "max_distance", "num_buckets",
    "bias_rows", "bias_keys", "bias_batch_stride", "bias_head_stride", "bias_row_stride", "dropout_threshold", "relative_copies",
    "time_copies",
]  # fmt: skip


@triton.jit
def attend(
    state, query, keys, values, first_query, first_key, factor, sample, rules,
    IS_EDGE: tl.constexpr, IS_CAUSAL: tl.constexpr, IS_POINTWISE: tl.constexpr, USE_TMA: tl.constexpr, HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):  # fmt: skip
    """Take one tile of keys into the running softmax of a query tile: weighted values, sum of weights, largest score.

    A pointwise weight needs neither of the last two.
    """
    ACCURATE: tl.constexpr = query.dtype == tl.float32
    HAS_BIAS: tl.constexpr = (
        rules.biases.relative is not None or rules.biases.of_time is not None or rules.biases.pairs is not None
    )  # fmt: skip
    weighted, weight, largest = state
    row = (first_query + tl.arange(0, BLOCK_M))[:, None]
    column = (first_key + tl.arange(0, BLOCK_N))[None, :]
    k = load_rows(keys, first_key, sample.key_length, not IS_EDGE, USE_TMA, BLOCK_N, HEAD_DIM, BLOCK_D)
    products, _ = tile_products(
        query, k, row, column, first_query, first_key, factor, sample, rules, IS_EDGE, IS_CAUSAL, IS_POINTWISE, INPUT_PRECISION
    )  # fmt: skip
    if IS_POINTWISE:
        weights, _ = silu(products, ACCURATE)
    else:
        common = tile_bias(row, column, first_query, first_key, sample, rules)
        now_largest = tl.maximum(largest, less_common(tl.max(products, 1) * factor, common, -factor))
        reference = now_largest
        if IS_EDGE or HAS_BIAS:
            # A row that has seen no key yet, or none whose bias is a number.
            reference = tl.where(now_largest == float("-inf"), 0.0, now_largest)
        correction = softmax_weights(largest, reference, 1.0, ACCURATE)
        weights = softmax_weights(products, less_common(reference, common, factor)[:, None], factor, ACCURATE)
        weight = weight * correction + tl.sum(weights, 1)
        largest = now_largest
        if rules.dropout.seed is not None:
            weights = tl.where(kept(row, column, sample, rules.dropout), weights, 0.0)
    v = load_rows(values, first_key, sample.key_length, not IS_EDGE, USE_TMA, BLOCK_N, VALUE_DIM, BLOCK_DV)
    if not IS_POINTWISE:
        weighted *= correction[:, None]
    weighted = dot(weights.to(v.dtype), v, weighted, INPUT_PRECISION)
    return weighted, weight, largest


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_forward_kernel(
    query, key, value, offsets, key_offsets, num_targets, output, lse, num_samples, total, key_total, scale, window,
    reach, num_contextual, prefix, cap_factor,
    query_row_stride, query_head_stride, key_row_stride, key_head_stride, value_row_stride, value_head_stride,
    output_row_stride,
    relative_bias, max_distance, time_bias, num_buckets, q_times, k_times, bias, bias_offsets, bias_rows, bias_keys,
    bias_batch_stride, bias_head_stride, bias_row_stride, bias_key_stride, dropout_seed, dropout_threshold, kept_scale,
    normalizer,
    IS_CAUSAL: tl.constexpr, GROUP: tl.constexpr, APART: tl.constexpr, USE_TMA: tl.constexpr, HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of one tile of queries; without a place for the latter the weights are pointwise, by SiLU."""
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
    query += start * query_row_stride + head * query_head_stride
    key += key_start * key_row_stride + head // GROUP * key_head_stride
    value += key_start * value_row_stride + head // GROUP * value_head_stride
    output += start * output_row_stride + head * VALUE_DIM
    if not IS_POINTWISE:
        lse += head * total + start

    q = load_by_pointers(
        Rows(query, query_row_stride), first_query, query_length, False, BLOCK_M, HEAD_DIM, BLOCK_D
    )  # fmt: skip
    keys = Rows(rows_source(key, key_length, key_row_stride, USE_TMA, BLOCK_N, HEAD_DIM, BLOCK_D), key_row_stride)
    values = Rows(rows_source(value, key_length, value_row_stride, USE_TMA, BLOCK_N, VALUE_DIM, BLOCK_DV), value_row_stride)
    weighted = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    ranges = key_ranges(first_query, sample, rules.sight, IS_CAUSAL, BLOCK_M, BLOCK_N)
    for first_key in range(ranges.whole_begin, ranges.whole_end, BLOCK_N):
        weighted, weight, largest = attend(
            (weighted, weight, largest), q, keys, values, first_query, first_key, factor, sample, rules,
            False, IS_CAUSAL, IS_POINTWISE, USE_TMA, HEAD_DIM, VALUE_DIM, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, INPUT_PRECISION,
        )  # fmt: skip
    for step in range(0, ranges.edge_tiles):
        weighted, weight, largest = attend(
            (weighted, weight, largest), q, keys, values, first_query, edge_tile(step, ranges, BLOCK_N), factor, sample, rules,
            True, IS_CAUSAL, IS_POINTWISE, USE_TMA, HEAD_DIM, VALUE_DIM, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, INPUT_PRECISION,
        )  # fmt: skip
    # A query that sees no key has an output of zeros and a log-sum-exp of -inf.
    divisor = tl.where(weight == 0.0, 1.0, weight)
    result = weighted * pointwise_factor(normalizer, key_length) if IS_POINTWISE else weighted / divisor[:, None]
    if dropout_seed is not None:
        result *= kept_scale
    store_rows(Rows(output, output_row_stride), result, first_query, query_length, BLOCK_M, VALUE_DIM, BLOCK_DV)
    if not IS_POINTWISE:
        row = first_query + tl.arange(0, BLOCK_M)
        natural_largest = largest if ACCURATE else largest * LN_2
        tl.store(lse + row, natural_largest + tl.log(divisor), mask=row < query_length)
