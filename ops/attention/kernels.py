"""Attention as Triton kernels: FlashAttention-2's tiling over a jagged batch, and a backward of two passes without atomics.

A program owns a tile of rows of one sample and one head. Rows past the end of a sample repeat its last row wherever they are
loaded, so that only keys need a mask, and only in the tile that holds the end or the diagonal.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged.ops._shared.device import dot, exp_of_difference, find_tile, rounded_product
from jagged.ops.attention.configurations import Tiles, configuration, padded_width

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def in_score_units(number, ACCURATE: tl.constexpr):
    """Scores of 16-bit inputs are held times log2(e), so that exp2 needs no product; float32 keeps natural units."""
    return number if ACCURATE else number * LOG2_E


@triton.jit
def softmax_weight(difference, ACCURATE: tl.constexpr):
    """e to the power of a difference of scores in their units."""
    return exp_of_difference(difference, True) if ACCURATE else tl.exp2(difference)


@triton.jit
def load_tile(tensor, first, length, row_stride, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load rows `first ..` of a sample, `[BLOCK, BLOCK_D]`; its last row stands in for rows past its end."""
    rows = tl.minimum(first + tl.arange(0, BLOCK), length - 1).to(tl.int64)
    columns = tl.arange(0, BLOCK_D)
    places = tensor + rows[:, None] * row_stride + columns[None, :]
    return tl.load(places) if HEAD_DIM == BLOCK_D else tl.load(places, mask=columns[None, :] < HEAD_DIM, other=0.0)


@triton.jit
def store_tile(tensor, tile, first, length, row_stride, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store the rows of `[BLOCK, BLOCK_D]` that the sample has, from row `first` of it on."""
    rows = first + tl.arange(0, BLOCK)
    columns = tl.arange(0, BLOCK_D)
    places = tensor + rows.to(tl.int64)[:, None] * row_stride + columns[None, :]
    mask = (rows < length)[:, None]
    if HEAD_DIM != BLOCK_D:
        mask = mask & (columns[None, :] < HEAD_DIM)
    tl.store(places, tile.to(tensor.dtype.element_ty), mask=mask)


@triton.jit
def visible(queries, keys, length, IS_CAUSAL: tl.constexpr):
    """Tell which keys exist and may be seen; `queries` and `keys` are positions in the sample that broadcast."""
    # With causal, a query past the end is never used, and for the others the diagonal comes before the end.
    return keys <= queries if IS_CAUSAL else keys < length


@triton.jit
def key_limits(first_query, length, IS_CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return how many keys every query of a tile sees in whole key tiles, and how many any of them sees."""
    if IS_CAUSAL:
        whole = (first_query + 1) // BLOCK_N * BLOCK_N
        end = tl.minimum(first_query + BLOCK_M, length)
    else:
        whole = length // BLOCK_N * BLOCK_N
        end = length
    return whole, end


@triton.jit
def attend(
    weighted, weight, largest, query, key, value, first_query, begin, end, length, key_stride, value_stride, factor,
    MASKED: tl.constexpr, IS_CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, INPUT_PRECISION: tl.constexpr,
):  # fmt: skip
    """Take the keys `begin .. end` into the running softmax of a query tile: weighted values, sum of weights, largest score."""
    ACCURATE: tl.constexpr = query.dtype == tl.float32
    for first_key in range(begin, end, BLOCK_N):
        k = load_tile(key, first_key, length, key_stride, BLOCK_N, HEAD_DIM, BLOCK_D)
        scores = dot(query, tl.trans(k), None, INPUT_PRECISION) * factor
        if MASKED:
            queries = (first_query + tl.arange(0, BLOCK_M))[:, None]
            keys = (first_key + tl.arange(0, BLOCK_N))[None, :]
            scores = tl.where(visible(queries, keys, length, IS_CAUSAL), scores, float("-inf"))
        # Every query sees the first key, so the largest score is finite from the first tile on.
        now_largest = tl.maximum(largest, tl.max(scores, 1))
        correction = softmax_weight(largest - now_largest, ACCURATE)
        weights = softmax_weight(scores - now_largest[:, None], ACCURATE)
        weight = weight * correction + tl.sum(weights, 1)
        v = load_tile(value, first_key, length, value_stride, BLOCK_N, HEAD_DIM, BLOCK_D)
        weighted = dot(weights.to(v.dtype), v, weighted * correction[:, None], INPUT_PRECISION)
        largest = now_largest
    return weighted, weight, largest


@triton.jit(do_not_specialize=["num_samples", "total"])
def attention_forward_kernel(
    query, key, value, offsets, output, lse, num_samples, total, scale,
    query_row_stride, query_head_stride, key_row_stride, key_head_stride, value_row_stride, value_head_stride,
    output_row_stride,
    IS_CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, INPUT_PRECISION: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of one tile of queries."""
    _, start, length, first_query = find_tile(offsets, tl.program_id(0), num_samples, total, BLOCK_M)
    length, first_query = length.to(tl.int32), first_query.to(tl.int32)
    if first_query >= length:
        return
    head = tl.program_id(1).to(tl.int64)
    query += start * query_row_stride + head * query_head_stride
    key += start * key_row_stride + head * key_head_stride
    value += start * value_row_stride + head * value_head_stride
    output += start * output_row_stride + head * HEAD_DIM
    lse += head * total + start
    ACCURATE: tl.constexpr = query.dtype.element_ty == tl.float32
    factor = in_score_units(scale, ACCURATE)

    q = load_tile(query, first_query, length, query_row_stride, BLOCK_M, HEAD_DIM, BLOCK_D)
    weighted = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    whole, end = key_limits(first_query, length, IS_CAUSAL, BLOCK_M, BLOCK_N)
    weighted, weight, largest = attend(
        weighted, weight, largest, q, key, value, first_query, 0, whole, length, key_row_stride, value_row_stride, factor,
        False, IS_CAUSAL, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, INPUT_PRECISION,
    )  # fmt: skip
    weighted, weight, largest = attend(
        weighted, weight, largest, q, key, value, first_query, whole, end, length, key_row_stride, value_row_stride, factor,
        True, IS_CAUSAL, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, INPUT_PRECISION,
    )  # fmt: skip
    store_tile(output, weighted / weight[:, None], first_query, length, output_row_stride, BLOCK_M, HEAD_DIM, BLOCK_D)
    rows = first_query + tl.arange(0, BLOCK_M)
    natural_largest = largest if ACCURATE else largest * LN_2
    tl.store(lse + rows, natural_largest + tl.log(weight), mask=rows < length)


@triton.jit
def accumulate_dq(
    grad_query, query, upstream, key, value, lse, delta, first_query, begin, end, length, key_stride, value_stride, factor,
    MASKED: tl.constexpr, IS_CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, INPUT_PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what the keys `begin .. end` give to the gradient of a query tile."""
    ACCURATE: tl.constexpr = query.dtype == tl.float32
    for first_key in range(begin, end, BLOCK_N):
        k = load_tile(key, first_key, length, key_stride, BLOCK_N, HEAD_DIM, BLOCK_D)
        v = load_tile(value, first_key, length, value_stride, BLOCK_N, HEAD_DIM, BLOCK_D)
        scores = dot(query, tl.trans(k), None, INPUT_PRECISION) * factor
        if MASKED:
            queries = (first_query + tl.arange(0, BLOCK_M))[:, None]
            keys = (first_key + tl.arange(0, BLOCK_N))[None, :]
            scores = tl.where(visible(queries, keys, length, IS_CAUSAL), scores, float("-inf"))
        weights = softmax_weight(scores - lse[:, None], ACCURATE)
        grad_weights = dot(upstream, tl.trans(v), None, INPUT_PRECISION)
        grad_scores = (weights * (grad_weights - delta[:, None])).to(k.dtype)
        grad_query = dot(grad_scores, k, grad_query, INPUT_PRECISION)
    return grad_query


@triton.jit(do_not_specialize=["num_samples", "total"])
def attention_backward_dq_kernel(
    grad, query, key, value, output, lse, offsets, grad_query, delta, num_samples, total, scale,
    grad_row_stride, grad_head_stride, query_row_stride, query_head_stride, key_row_stride, key_head_stride,
    value_row_stride, value_head_stride, output_row_stride,
    IS_CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, INPUT_PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient of one tile of queries, and `delta`, each row's dot product of output and its gradient, for the dkv kernel."""
    _, start, length, first_query = find_tile(offsets, tl.program_id(0), num_samples, total, BLOCK_M)
    length, first_query = length.to(tl.int32), first_query.to(tl.int32)
    if first_query >= length:
        return
    head = tl.program_id(1).to(tl.int64)
    grad += start * grad_row_stride + head * grad_head_stride
    query += start * query_row_stride + head * query_head_stride
    key += start * key_row_stride + head * key_head_stride
    value += start * value_row_stride + head * value_head_stride
    output += start * output_row_stride + head * HEAD_DIM
    grad_query += start * output_row_stride + head * HEAD_DIM
    lse += head * total + start
    delta += head * total + start
    ACCURATE: tl.constexpr = query.dtype.element_ty == tl.float32
    factor = in_score_units(scale, ACCURATE)

    upstream = load_tile(grad, first_query, length, grad_row_stride, BLOCK_M, HEAD_DIM, BLOCK_D)
    result = load_tile(output, first_query, length, output_row_stride, BLOCK_M, HEAD_DIM, BLOCK_D)
    row_delta = tl.sum(rounded_product(upstream, result), 1)
    rows = first_query + tl.arange(0, BLOCK_M)
    tl.store(delta + rows, row_delta, mask=rows < length)
    row_lse = in_score_units(tl.load(lse + tl.minimum(rows, length - 1)), ACCURATE)

    q = load_tile(query, first_query, length, query_row_stride, BLOCK_M, HEAD_DIM, BLOCK_D)
    total_grad = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    whole, end = key_limits(first_query, length, IS_CAUSAL, BLOCK_M, BLOCK_N)
    total_grad = accumulate_dq(
        total_grad, q, upstream, key, value, row_lse, row_delta, first_query, 0, whole, length, key_row_stride,
        value_row_stride, factor, False, IS_CAUSAL, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, INPUT_PRECISION,
    )  # fmt: skip
    total_grad = accumulate_dq(
        total_grad, q, upstream, key, value, row_lse, row_delta, first_query, whole, end, length, key_row_stride,
        value_row_stride, factor, True, IS_CAUSAL, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, INPUT_PRECISION,
    )  # fmt: skip
    total_grad *= scale
    store_tile(grad_query, total_grad, first_query, length, output_row_stride, BLOCK_M, HEAD_DIM, BLOCK_D)


@triton.jit
def accumulate_dkv(
    grad_key, grad_value, k, v, query, upstream, lse, delta, first_key, begin, end, length, query_stride, grad_stride, factor,
    MASKED: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, INPUT_PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what the queries `begin .. end` give to the gradients of a tile of keys and values. Scores are held transposed."""
    ACCURATE: tl.constexpr = k.dtype == tl.float32
    for first_query in range(begin, end, BLOCK_M):
        rows = first_query + tl.arange(0, BLOCK_M)
        q = load_tile(query, first_query, length, query_stride, BLOCK_M, HEAD_DIM, BLOCK_D)
        # An infinite log-sum-exp leaves queries past the end without weight.
        row_lse = in_score_units(tl.load(lse + rows, mask=rows < length, other=float("inf")), ACCURATE)
        scores = dot(k, tl.trans(q), None, INPUT_PRECISION) * factor
        if MASKED:
            keys = (first_key + tl.arange(0, BLOCK_N))[:, None]
            scores = tl.where(keys <= rows[None, :], scores, float("-inf"))
        weights = softmax_weight(scores - row_lse[None, :], ACCURATE)
        do = load_tile(upstream, first_query, length, grad_stride, BLOCK_M, HEAD_DIM, BLOCK_D)
        grad_value = dot(weights.to(do.dtype), do, grad_value, INPUT_PRECISION)
        row_delta = tl.load(delta + rows, mask=rows < length, other=0.0)
        grad_weights = dot(v, tl.trans(do), None, INPUT_PRECISION)
        grad_scores = (weights * (grad_weights - row_delta[None, :])).to(q.dtype)
        grad_key = dot(grad_scores, q, grad_key, INPUT_PRECISION)
    return grad_key, grad_value


@triton.jit(do_not_specialize=["num_samples", "total"])
def attention_backward_dkv_kernel(
    grad, query, key, value, lse, delta, offsets, grad_key, grad_value, num_samples, total, scale,
    grad_row_stride, grad_head_stride, query_row_stride, query_head_stride, key_row_stride, key_head_stride,
    value_row_stride, value_head_stride, output_row_stride,
    IS_CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, INPUT_PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of one tile of keys and values."""
    _, start, length, first_key = find_tile(offsets, tl.program_id(0), num_samples, total, BLOCK_N)
    length, first_key = length.to(tl.int32), first_key.to(tl.int32)
    if first_key >= length:
        return
    head = tl.program_id(1).to(tl.int64)
    grad += start * grad_row_stride + head * grad_head_stride
    query += start * query_row_stride + head * query_head_stride
    key += start * key_row_stride + head * key_head_stride
    value += start * value_row_stride + head * value_head_stride
    grad_key += start * output_row_stride + head * HEAD_DIM
    grad_value += start * output_row_stride + head * HEAD_DIM
    lse += head * total + start
    delta += head * total + start
    ACCURATE: tl.constexpr = query.dtype.element_ty == tl.float32
    factor = in_score_units(scale, ACCURATE)

    k = load_tile(key, first_key, length, key_row_stride, BLOCK_N, HEAD_DIM, BLOCK_D)
    v = load_tile(value, first_key, length, value_row_stride, BLOCK_N, HEAD_DIM, BLOCK_D)
    total_grad_key = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    total_grad_value = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    below = 0
    if IS_CAUSAL:
        diagonal = first_key // BLOCK_M * BLOCK_M
        below = tl.minimum((first_key + BLOCK_N + BLOCK_M - 2) // BLOCK_M * BLOCK_M, length)
        total_grad_key, total_grad_value = accumulate_dkv(
            total_grad_key, total_grad_value, k, v, query, grad, lse, delta, first_key, diagonal, below, length,
            query_row_stride, grad_row_stride, factor, True, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, INPUT_PRECISION,
        )  # fmt: skip
    total_grad_key, total_grad_value = accumulate_dkv(
        total_grad_key, total_grad_value, k, v, query, grad, lse, delta, first_key, below, length, length,
        query_row_stride, grad_row_stride, factor, False, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, INPUT_PRECISION,
    )  # fmt: skip
    total_grad_key *= scale
    store_tile(grad_key, total_grad_key, first_key, length, output_row_stride, BLOCK_N, HEAD_DIM, BLOCK_D)
    store_tile(grad_value, total_grad_value, first_key, length, output_row_stride, BLOCK_N, HEAD_DIM, BLOCK_D)


def forward(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Launch `attention_forward_kernel`: output `[S, H, D]` and log-sum-exp `[H, S]`, natural logarithm, float32."""
    total, heads, head_dim = q.shape
    q, k, v = _readable(q), _readable(k), _readable(v)
    output = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(heads, total, dtype=torch.float32, device=q.device)
    tiles = configuration(head_dim, q.dtype, total, offsets.shape[0] - 1).forward
    grid = _grid(q, offsets, tiles)
    if grid[0]:
        with torch.cuda.device_of(q):
            attention_forward_kernel[grid](
                q, k, v, offsets, output, lse, offsets.shape[0] - 1, total, scale, *_strides(q, k, v), output.stride(0),
                BLOCK_M=tiles.own, BLOCK_N=tiles.visit, **_constants(q, causal, tiles),
            )  # fmt: skip
    return output, lse


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, lse: Tensor, offsets: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch `attention_backward_dq_kernel`, then `attention_backward_dkv_kernel`: gradients `[S, H, D]` of q, k and v."""
    total, _, head_dim = q.shape
    grad, q, k, v = _readable(grad), _readable(q), _readable(k), _readable(v)
    grad_q, grad_k, grad_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    delta = torch.empty_like(lse)
    chosen = configuration(head_dim, q.dtype, total, offsets.shape[0] - 1)
    scalars = offsets.shape[0] - 1, total, scale, *_strides(grad, q, k, v), output.stride(0)
    if _grid(q, offsets, chosen.dq)[0]:
        with torch.cuda.device_of(q):
            attention_backward_dq_kernel[_grid(q, offsets, chosen.dq)](
                grad, q, k, v, output, lse, offsets, grad_q, delta, *scalars,
                BLOCK_M=chosen.dq.own, BLOCK_N=chosen.dq.visit, **_constants(q, causal, chosen.dq),
            )  # fmt: skip
            attention_backward_dkv_kernel[_grid(q, offsets, chosen.dkv)](
                grad, q, k, v, lse, delta, offsets, grad_k, grad_v, *scalars,
                BLOCK_M=chosen.dkv.visit, BLOCK_N=chosen.dkv.own, **_constants(q, causal, chosen.dkv),
            )  # fmt: skip
    return grad_q, grad_k, grad_v


def _readable(x: Tensor) -> Tensor:
    """The kernels take any stride of rows and heads, and columns side by side."""
    return x if x.stride(2) == 1 else x.contiguous()


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:2]]


def _grid(q: Tensor, offsets: Tensor, tiles: Tiles) -> tuple[int, int]:
    """Programs enough for every tile of `find_tile`'s list, and for each head; none where there is nothing to do."""
    batch_size = offsets.shape[0] - 1
    return (q.shape[0] // tiles.own + batch_size if batch_size and q.numel() else 0, q.shape[1])


def _constants(q: Tensor, causal: bool, tiles: Tiles) -> dict[str, Any]:
    tf32 = q.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    return {
        "IS_CAUSAL": causal,
        "HEAD_DIM": q.shape[2],
        "BLOCK_D": padded_width(q.shape[2]),
        "INPUT_PRECISION": "tf32" if tf32 else "ieee",
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }
