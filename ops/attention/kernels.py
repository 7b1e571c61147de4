"""Kernels as the compiler of a package launches them, whose numbers come in types of its own."""

import triton
import triton.language as tl

from jagged.ops.attention.triton.biases import prepare_biases_kernel
from jagged.ops.attention.triton.forward import attention_forward_kernel


@triton.jit
def packaged_forward_kernel(
    query, key, value, offsets, key_offsets, num_targets, output, lse, num_samples, total, key_total, scale, window,
    reach, num_contextual, prefix, cap_factor,
    query_row_stride, query_head_stride, key_row_stride, key_head_stride, value_row_stride, value_head_stride,
    output_row_stride,
    relative_bias, max_distance, time_bias, num_buckets, q_times, k_times, bias, bias_offsets, bias_rows, bias_keys,
    bias_batch_stride, bias_head_stride, bias_row_stride, bias_key_stride, normalizer,
    IS_CAUSAL: tl.constexpr, GROUP: tl.constexpr, APART: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, INPUT_PRECISION: tl.constexpr,
):  # fmt: skip
    """`attention_forward_kernel`, without dropout and descriptors.

    Numbers of a graph are 32 or 64 bits wide, as the compiler knows of their sizes, or constants; floats are float64.
    """
    attention_forward_kernel(
        query, key, value, offsets, key_offsets, num_targets, output, lse, tl.cast(num_samples, tl.int32),
        tl.cast(total, tl.int32), tl.cast(key_total, tl.int32), tl.cast(scale, tl.float32),
        None if window is None else tl.cast(window, tl.int32), None if reach is None else tl.cast(reach, tl.int32),
        None if num_contextual is None else tl.cast(num_contextual, tl.int32),
        None if prefix is None else tl.cast(prefix, tl.int32),
        None if cap_factor is None else tl.cast(cap_factor, tl.float32),
        query_row_stride, query_head_stride, key_row_stride, key_head_stride, value_row_stride, value_head_stride,
        output_row_stride, relative_bias, tl.cast(max_distance, tl.int32), time_bias, tl.cast(num_buckets, tl.int32),
        q_times, k_times, bias, bias_offsets, tl.cast(bias_rows, tl.int32), tl.cast(bias_keys, tl.int32),
        tl.cast(bias_batch_stride, tl.int64), tl.cast(bias_head_stride, tl.int64), tl.cast(bias_row_stride, tl.int64),
        bias_key_stride, None, 0, 1.0, tl.cast(normalizer, tl.float32),
        IS_CAUSAL, GROUP, APART, False, HEAD_DIM, VALUE_DIM, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, INPUT_PRECISION,
    )  # fmt: skip


@triton.jit
def packaged_biases_kernel(
    relative, of_time, wide_relative, wide_time, max_distance, num_buckets, inverse_scale, blocks, num_heads,
    key_times, key_offsets, key_split, key_total, query_times, query_offsets, query_split, query_total, num_samples,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """`prepare_biases_kernel`, of numbers as those of `packaged_forward_kernel`."""
    prepare_biases_kernel(
        relative, of_time, wide_relative, wide_time, tl.cast(max_distance, tl.int32), tl.cast(num_buckets, tl.int32),
        tl.cast(inverse_scale, tl.float32), tl.cast(blocks, tl.int32), tl.cast(num_heads, tl.int32), key_times, key_offsets,
        key_split, tl.cast(key_total, tl.int32), query_times, query_offsets, query_split, tl.cast(query_total, tl.int32),
        tl.cast(num_samples, tl.int32), BLOCK,
    )  # fmt: skip
