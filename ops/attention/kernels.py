"""Attention as Triton kernels: FlashAttention-2's tiling over a jagged batch, and a backward of two passes without atomics.

A program owns a tile of rows of one sample and one head. Key tiles that every row sees whole are visited without a mask; the few
at the edges of what is seen come after them, with one.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged.ops._shared.device import dot, exp_of_difference, find_tile, load_segment, rounded_product
from jagged.ops.attention.configurations import Tiles, configuration, padded_width
from jagged.ops.attention.tiles import (
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

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def in_score_units(number, ACCURATE: tl.constexpr):
    """Scores of 16-bit inputs are held times log2(e), so that exp2 needs no product; float32 keeps natural units."""
    return number if ACCURATE else number * LOG2_E


@triton.jit
def softmax_weights(products, largest, factor, ACCURATE: tl.constexpr):
    """e to the power of `products * factor - largest`, scores in their units."""
    difference = products * factor - largest
    return exp_of_difference(difference, True) if ACCURATE else tl.exp2(difference)


@triton.jit
def attend(
    weighted, weight, largest, query, key, value, first_query, first_key, shift, key_length, history, window, num_contextual,
    num_targets, key_stride, value_stride, factor,
    IS_EDGE: tl.constexpr, IS_CAUSAL: tl.constexpr, USE_TMA: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, INPUT_PRECISION: tl.constexpr,
):  # fmt: skip
    """Take one tile of keys into the running softmax of a query tile: weighted values, sum of weights, largest score."""
    ACCURATE: tl.constexpr = query.dtype == tl.float32
    k = load_tile(key, first_key, key_length, key_stride, not IS_EDGE, USE_TMA, BLOCK_N, HEAD_DIM, BLOCK_D)
    products = dot(query, tl.trans(k), None, INPUT_PRECISION)
    if IS_EDGE:
        positions = (first_query + shift + tl.arange(0, BLOCK_M))[:, None]
        keys = (first_key + tl.arange(0, BLOCK_N))[None, :]
        seen = visible(positions, keys, history, window, num_contextual, num_targets, IS_CAUSAL)
        products = tl.where(seen, products, float("-inf"))
    now_largest = tl.maximum(largest, tl.max(products, 1) * factor)
    reference = now_largest
    if IS_EDGE:
        # A row that has seen no key yet.
        reference = tl.where(now_largest == float("-inf"), 0.0, now_largest)
    correction = softmax_weights(largest, reference, 1.0, ACCURATE)
    weights = softmax_weights(products, reference[:, None], factor, ACCURATE)
    weight = weight * correction + tl.sum(weights, 1)
    v = load_tile(value, first_key, key_length, value_stride, not IS_EDGE, USE_TMA, BLOCK_N, HEAD_DIM, BLOCK_D)
    weighted = dot(weights.to(v.dtype), v, weighted * correction[:, None], INPUT_PRECISION)
    return weighted, weight, now_largest


@triton.jit(do_not_specialize=["num_samples", "total", "key_total", "window", "num_contextual"])
def attention_forward_kernel(
    query, key, value, offsets, key_offsets, num_targets, output, lse, num_samples, total, key_total, scale, window,
    num_contextual,
    query_row_stride, query_head_stride, key_row_stride, key_head_stride, value_row_stride, value_head_stride,
    output_row_stride,
    IS_CAUSAL: tl.constexpr, GROUP: tl.constexpr, APART: tl.constexpr, USE_TMA: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, INPUT_PRECISION: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of one tile of queries."""
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
    query += start * query_row_stride + head * query_head_stride
    key += key_start * key_row_stride + head // GROUP * key_head_stride
    value += key_start * value_row_stride + head // GROUP * value_head_stride
    output += start * output_row_stride + head * HEAD_DIM
    lse += head * total + start
    ACCURATE: tl.constexpr = query.dtype.element_ty == tl.float32
    factor = in_score_units(scale, ACCURATE)

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
            weighted, weight, largest, q, keys, values, first_query, first_key, shift, key_length, history, window,
            num_contextual, num_targets, key_row_stride, value_row_stride, factor,
            False, IS_CAUSAL, USE_TMA, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, INPUT_PRECISION,
        )  # fmt: skip
    for index in range(0, edge_tiles):
        first_key = edge_tile(index, whole_end, prefix_tiles, low, low_tiles, high_tiles, diagonal, BLOCK_N)
        weighted, weight, largest = attend(
            weighted, weight, largest, q, keys, values, first_query, first_key, shift, key_length, history, window,
            num_contextual, num_targets, key_row_stride, value_row_stride, factor,
            True, IS_CAUSAL, USE_TMA, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, INPUT_PRECISION,
        )  # fmt: skip
    # A query that sees no key has an output of zeros and a log-sum-exp of -inf.
    divisor = tl.where(weight == 0.0, 1.0, weight)
    store_tile(output, weighted / divisor[:, None], first_query, query_length, output_row_stride, BLOCK_M, HEAD_DIM, BLOCK_D)
    rows = first_query + tl.arange(0, BLOCK_M)
    natural_largest = largest if ACCURATE else largest * LN_2
    tl.store(lse + rows, natural_largest + tl.log(divisor), mask=rows < query_length)


@triton.jit
def accumulate_dq(
    grad_query, query, upstream, key, value, row_lse, row_delta, first_query, first_key, shift, key_length, history, window,
    num_contextual, num_targets, key_stride, value_stride, factor,
    IS_EDGE: tl.constexpr, IS_CAUSAL: tl.constexpr, USE_TMA: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, INPUT_PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what one tile of keys gives to the gradient of a query tile."""
    ACCURATE: tl.constexpr = query.dtype == tl.float32
    k = load_tile(key, first_key, key_length, key_stride, not IS_EDGE, USE_TMA, BLOCK_N, HEAD_DIM, BLOCK_D)
    v = load_tile(value, first_key, key_length, value_stride, not IS_EDGE, USE_TMA, BLOCK_N, HEAD_DIM, BLOCK_D)
    products = dot(query, tl.trans(k), None, INPUT_PRECISION)
    if IS_EDGE:
        positions = (first_query + shift + tl.arange(0, BLOCK_M))[:, None]
        keys = (first_key + tl.arange(0, BLOCK_N))[None, :]
        seen = visible(positions, keys, history, window, num_contextual, num_targets, IS_CAUSAL)
        products = tl.where(seen, products, float("-inf"))
    weights = softmax_weights(products, row_lse[:, None], factor, ACCURATE)
    grad_weights = dot(upstream, tl.trans(v), None, INPUT_PRECISION)
    grad_scores = (weights * (grad_weights - row_delta[:, None])).to(k.dtype)
    return dot(grad_scores, k, grad_query, INPUT_PRECISION)


@triton.jit
def load_lse(lse, rows, length, ACCURATE: tl.constexpr):
    """Load log-sum-exps in the scores' units; infinite for queries past the end or without keys, which so weigh nothing."""
    row_lse = tl.load(lse + rows, mask=rows < length, other=float("inf"))
    return in_score_units(tl.where(row_lse == float("-inf"), float("inf"), row_lse), ACCURATE)


@triton.jit(do_not_specialize=["num_samples", "total", "key_total", "window", "num_contextual"])
def attention_backward_dq_kernel(
    grad, grad_lse, query, key, value, output, lse, offsets, key_offsets, num_targets, grad_query, delta,
    num_samples, total, key_total, scale, window, num_contextual,
    grad_row_stride, grad_head_stride, query_row_stride, query_head_stride, key_row_stride, key_head_stride,
    value_row_stride, value_head_stride, output_row_stride,
    IS_CAUSAL: tl.constexpr, GROUP: tl.constexpr, APART: tl.constexpr, USE_TMA: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, INPUT_PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient of one tile of queries, and `delta` for the dkv kernel.

    `delta` is each row's dot product of output and its gradient, less the gradient of its log-sum-exp: a score's gradient is its
    weight times (gradient of the weight - delta).
    """
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
    grad += start * grad_row_stride + head * grad_head_stride
    query += start * query_row_stride + head * query_head_stride
    key += key_start * key_row_stride + head // GROUP * key_head_stride
    value += key_start * value_row_stride + head // GROUP * value_head_stride
    output += start * output_row_stride + head * HEAD_DIM
    grad_query += start * output_row_stride + head * HEAD_DIM
    lse += head * total + start
    delta += head * total + start
    ACCURATE: tl.constexpr = query.dtype.element_ty == tl.float32
    factor = in_score_units(scale, ACCURATE)

    upstream = load_by_pointers(grad, first_query, query_length, grad_row_stride, False, BLOCK_M, HEAD_DIM, BLOCK_D)
    result = load_by_pointers(output, first_query, query_length, output_row_stride, False, BLOCK_M, HEAD_DIM, BLOCK_D)
    row_delta = tl.sum(rounded_product(upstream, result), 1)
    rows = first_query + tl.arange(0, BLOCK_M)
    if grad_lse is not None:
        row_delta -= tl.load(grad_lse + head * total + start + rows, mask=rows < query_length, other=0.0)
    tl.store(delta + rows, row_delta, mask=rows < query_length)
    row_lse = load_lse(lse, rows, query_length, ACCURATE)

    q = load_by_pointers(query, first_query, query_length, query_row_stride, False, BLOCK_M, HEAD_DIM, BLOCK_D)
    keys = rows_of(key, key_length, key_row_stride, USE_TMA, BLOCK_N, HEAD_DIM, BLOCK_D)
    values = rows_of(value, key_length, value_row_stride, USE_TMA, BLOCK_N, HEAD_DIM, BLOCK_D)
    total_grad = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    last_query = tl.minimum(first_query + BLOCK_M, query_length) - 1
    whole_begin, whole_end, prefix_tiles, low, low_tiles, high_tiles, diagonal, edge_tiles = key_ranges(
        first_query + shift, last_query + shift, history, window, num_contextual, num_targets, IS_CAUSAL, BLOCK_N
    )
    for first_key in range(whole_begin, whole_end, BLOCK_N):
        total_grad = accumulate_dq(
            total_grad, q, upstream, keys, values, row_lse, row_delta, first_query, first_key, shift, key_length, history,
            window, num_contextual, num_targets, key_row_stride, value_row_stride, factor,
            False, IS_CAUSAL, USE_TMA, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, INPUT_PRECISION,
        )  # fmt: skip
    for index in range(0, edge_tiles):
        first_key = edge_tile(index, whole_end, prefix_tiles, low, low_tiles, high_tiles, diagonal, BLOCK_N)
        total_grad = accumulate_dq(
            total_grad, q, upstream, keys, values, row_lse, row_delta, first_query, first_key, shift, key_length, history,
            window, num_contextual, num_targets, key_row_stride, value_row_stride, factor,
            True, IS_CAUSAL, USE_TMA, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, INPUT_PRECISION,
        )  # fmt: skip
    total_grad *= scale
    store_tile(grad_query, total_grad, first_query, query_length, output_row_stride, BLOCK_M, HEAD_DIM, BLOCK_D)


@triton.jit
def member_and_tile(step, num_tiles, GROUP: tl.constexpr):
    """Return the head of a group, and its tile, that come in one step of a loop over all tiles of all heads."""
    member, tile = 0, step
    if GROUP > 1:
        member, tile = step // num_tiles, step % num_tiles
    return member, tile


@triton.jit
def of_member(source, member, head_stride, GROUP: tl.constexpr):
    """Return where a head of the group has its rows; of a group of one that is the source, which may be a descriptor."""
    if GROUP > 1:
        return source + member.to(tl.int64) * head_stride
    else:
        return source


@triton.jit
def accumulate_dkv(
    grad_key, grad_value, k, v, query, upstream, lse, delta, first_query, first_key, shift, query_length, history, window,
    num_contextual, num_targets, query_stride, grad_stride, factor,
    IS_EDGE: tl.constexpr, IS_CAUSAL: tl.constexpr, USE_TMA: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, INPUT_PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what one tile of queries gives to the gradients of a tile of keys and values. Scores are held transposed."""
    ACCURATE: tl.constexpr = k.dtype == tl.float32
    rows = first_query + tl.arange(0, BLOCK_M)
    q = load_tile(query, first_query, query_length, query_stride, False, USE_TMA, BLOCK_M, HEAD_DIM, BLOCK_D)
    row_lse = load_lse(lse, rows, query_length, ACCURATE)
    products = dot(k, tl.trans(q), None, INPUT_PRECISION)
    if IS_EDGE:
        keys = (first_key + tl.arange(0, BLOCK_N))[:, None]
        seen = visible((shift + rows)[None, :], keys, history, window, num_contextual, num_targets, IS_CAUSAL)
        products = tl.where(seen, products, float("-inf"))
    weights = softmax_weights(products, row_lse[None, :], factor, ACCURATE)
    do = load_tile(upstream, first_query, query_length, grad_stride, False, USE_TMA, BLOCK_M, HEAD_DIM, BLOCK_D)
    grad_value = dot(weights.to(do.dtype), do, grad_value, INPUT_PRECISION)
    row_delta = tl.load(delta + rows, mask=rows < query_length, other=0.0)
    grad_weights = dot(v, tl.trans(do), None, INPUT_PRECISION)
    grad_scores = (weights * (grad_weights - row_delta[None, :])).to(q.dtype)
    return dot(grad_scores, q, grad_key, INPUT_PRECISION), grad_value


@triton.jit(do_not_specialize=["num_samples", "total", "key_total", "window", "num_contextual"])
def attention_backward_dkv_kernel(
    grad, query, key, value, lse, delta, offsets, key_offsets, num_targets, grad_key, grad_value,
    num_samples, total, key_total, scale, window, num_contextual,
    grad_row_stride, grad_head_stride, query_row_stride, query_head_stride, key_row_stride, key_head_stride,
    value_row_stride, value_head_stride, output_row_stride,
    IS_CAUSAL: tl.constexpr, GROUP: tl.constexpr, APART: tl.constexpr, USE_TMA: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, INPUT_PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of one tile of keys and values, from all `GROUP` query heads that share them."""
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
    head = tl.program_id(1).to(tl.int64)
    key += key_start * key_row_stride + head * key_head_stride
    value += key_start * value_row_stride + head * value_head_stride
    ACCURATE: tl.constexpr = query.dtype.element_ty == tl.float32
    factor = in_score_units(scale, ACCURATE)

    k = load_by_pointers(key, first_key, key_length, key_row_stride, False, BLOCK_N, HEAD_DIM, BLOCK_D)
    v = load_by_pointers(value, first_key, key_length, value_row_stride, False, BLOCK_N, HEAD_DIM, BLOCK_D)
    total_grad_key = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    total_grad_value = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    last_key = tl.minimum(first_key + BLOCK_N, key_length) - 1
    whole_begin, whole_end, prefix_tiles, low, low_tiles, high_tiles, diagonal, edge_tiles = query_ranges(
        first_key, last_key, shift, query_length, history, window, num_contextual, num_targets, IS_CAUSAL, BLOCK_M
    )
    head *= GROUP
    query += start * query_row_stride + head * query_head_stride
    grad += start * grad_row_stride + head * grad_head_stride
    lse += head * total + start
    delta += head * total + start
    queries = rows_of(query, query_length, query_row_stride, USE_TMA, BLOCK_M, HEAD_DIM, BLOCK_D)
    upstream = rows_of(grad, query_length, grad_row_stride, USE_TMA, BLOCK_M, HEAD_DIM, BLOCK_D)
    for step in range(0, edge_tiles * GROUP):
        member, index = member_and_tile(step, edge_tiles, GROUP)
        first_query = edge_tile(index, whole_end, prefix_tiles, low, low_tiles, high_tiles, diagonal, BLOCK_M)
        total_grad_key, total_grad_value = accumulate_dkv(
            total_grad_key, total_grad_value, k, v, of_member(queries, member, query_head_stride, GROUP),
            of_member(upstream, member, grad_head_stride, GROUP), of_member(lse, member, total, GROUP),
            of_member(delta, member, total, GROUP), first_query, first_key, shift, query_length, history, window,
            num_contextual, num_targets, query_row_stride, grad_row_stride, factor,
            True, IS_CAUSAL, USE_TMA, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, INPUT_PRECISION,
        )  # fmt: skip
    whole_tiles = tl.cdiv(whole_end - whole_begin, BLOCK_M)
    for step in range(0, whole_tiles * GROUP):
        member, index = member_and_tile(step, whole_tiles, GROUP)
        total_grad_key, total_grad_value = accumulate_dkv(
            total_grad_key, total_grad_value, k, v, of_member(queries, member, query_head_stride, GROUP),
            of_member(upstream, member, grad_head_stride, GROUP), of_member(lse, member, total, GROUP),
            of_member(delta, member, total, GROUP), whole_begin + index * BLOCK_M, first_key, shift, query_length, history,
            window, num_contextual, num_targets, query_row_stride, grad_row_stride, factor,
            False, IS_CAUSAL, USE_TMA, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, INPUT_PRECISION,
        )  # fmt: skip
    total_grad_key *= scale
    head //= GROUP
    grad_key += key_start * output_row_stride + head * HEAD_DIM
    grad_value += key_start * output_row_stride + head * HEAD_DIM
    store_tile(grad_key, total_grad_key, first_key, key_length, output_row_stride, BLOCK_N, HEAD_DIM, BLOCK_D)
    store_tile(grad_value, total_grad_value, first_key, key_length, output_row_stride, BLOCK_N, HEAD_DIM, BLOCK_D)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor | None,
    num_targets: Tensor | None,
    causal: bool,
    window: int,
    num_contextual: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Launch `attention_forward_kernel`: output `[Sq, H, D]` and log-sum-exp `[H, Sq]`, natural logarithm, float32."""
    total, heads, head_dim = q.shape
    q, k, v = _readable(q), _readable(k), _readable(v)
    output = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(heads, total, dtype=torch.float32, device=q.device)
    chosen = configuration(head_dim, q.dtype, total, q_offsets.shape[0] - 1, allows_tma=_allow_tma(k, v))
    tiles = chosen.forward
    grid = _grid(q, q_offsets, tiles)
    if grid[0]:
        attention_forward_kernel[grid](
            q, k, v, q_offsets, k_offsets, num_targets, output, lse, q_offsets.shape[0] - 1, total, k.shape[0], scale,
            window or None, num_contextual or None, *_strides(q, k, v), output.stride(0),
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
    causal: bool,
    window: int,
    num_contextual: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch `attention_backward_dq_kernel`, then `attention_backward_dkv_kernel`: gradients of q, k and v, contiguous."""
    total, heads, head_dim = q.shape
    grad, q, k, v = _readable(grad), _readable(q), _readable(k), _readable(v)
    grad_q, grad_k, grad_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    delta = torch.empty_like(lse)
    batch_size = q_offsets.shape[0] - 1
    # A loop over heads moves a pointer, which it could not do with a descriptor.
    allows_tma = heads == k.shape[1] and _allow_tma(grad, q, k, v)
    chosen = configuration(head_dim, q.dtype, total, batch_size, allows_tma=allows_tma)
    scalars = batch_size, total, k.shape[0], scale, window or None, num_contextual or None, *_strides(grad, q, k, v)
    if (grid := _grid(q, q_offsets, chosen.dq))[0]:
        attention_backward_dq_kernel[grid](
            grad, None if grad_lse is None else grad_lse.contiguous(), q, k, v, output, lse, q_offsets, k_offsets, num_targets,
            grad_q, delta, *scalars, output.stride(0),
            BLOCK_M=chosen.dq.own, BLOCK_N=chosen.dq.visit, **_constants(q, k, causal, chosen.apart, chosen.dq),
        )  # fmt: skip
    if (grid := _grid(k, q_offsets, chosen.dkv))[0]:
        attention_backward_dkv_kernel[grid](
            grad, q, k, v, lse, delta, q_offsets, k_offsets, num_targets, grad_k, grad_v, *scalars, grad_k.stride(0),
            BLOCK_M=chosen.dkv.visit, BLOCK_N=chosen.dkv.own, **_constants(q, k, causal, chosen.apart, chosen.dkv),
        )  # fmt: skip
    return grad_q, grad_k, grad_v


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
    tf32 = q.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    if tiles.tma:
        # Descriptors lie in memory that Triton asks for at each launch, from an allocator that belongs to the thread.
        triton.set_allocator(_allocate)
    limited = tiles.max_registers is not None and _is_hopper_or_later(q.device)
    return {
        "IS_CAUSAL": causal,
        "APART": apart,
        "USE_TMA": tiles.tma,
        "GROUP": q.shape[1] // k.shape[1],
        "HEAD_DIM": q.shape[2],
        "BLOCK_D": padded_width(q.shape[2]),
        "INPUT_PRECISION": "tf32" if tf32 else "ieee",
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
        **({"maxnreg": tiles.max_registers} if limited else {}),
    }


def _allow_tma(*tensors: Tensor) -> bool:
    """Whether the GPU has TMA, and every row of every head begins at 16 bytes."""
    return _is_hopper_or_later(tensors[0].device) and all(
        x.data_ptr() % 16 == 0 and all(stride * x.itemsize % 16 == 0 for stride in x.stride()[:2]) for x in tensors
    )


@functools.cache
def _is_hopper_or_later(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def _allocate(size: int, alignment: int, stream: int | None) -> Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")
