"""Products of a jagged tensor with a dense or a second jagged one as Triton kernels: each wide element is read or written once.

Both kernels walk the same list of chunks of at most C rows that stay in one sample; it needs no memory. Sample b owns chunk 0 as
such, and the later ones are numbered through: chunk k >= 1 of sample b has the number `offsets[b] // C + k - 1`, below `S // C`.
The sample of a number n is the one that contains row `(n + 1) C - 1`: with `start = q C + r`, that row of chunk k is
`(q + k) C - 1`, between `start + (k - 1) C` and `start + k C - 1`, and the latter lies in chunk k - 1, which is full.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from jagged.ops._shared.device import dot, find_segment, load_segment, rounded_product
from jagged.ops._shared.launch import Launcher, bound
from jagged.ops._shared.matrices import products_of
from jagged.ops._shared.sizes import cdiv
from jagged.ops.bmm import configurations
from jagged.ops.bmm.spec import DenseInputs, JaggedInputs, Options, Rows, Sums

REDUCE_ELEMENTS = 1024


@triton.jit
def load_chunk(offsets, index, num_later, batch_size, total, chunk):
    """Return sample, number of its first chunk, its first row and end, and the row that chunk `index` begins with (int64 all).

    The later chunks come first. One that does not exist begins at the end of its sample.
    """
    if index < num_later:
        sample = find_segment(offsets, (index.to(tl.int64) + 1) * chunk - 1, batch_size).to(tl.int64)
        start, end = load_segment(offsets, sample, total)
        place = index - start // chunk + 1
        # Only wrong offsets lead before the sample's second chunk.
        first = tl.where(place < 1, end, start + place * chunk)
    else:
        sample = (index - num_later).to(tl.int64)
        start, end = load_segment(offsets, sample, total)
        first = start
    return sample, start, end, first


@triton.jit
def split_columns(tile, COLUMNS: tl.constexpr):
    """Return the columns of `[N, COLUMNS]` one by one; 1, 2, 4 or 8 of them."""
    N: tl.constexpr = tile.shape[0]
    if COLUMNS == 1:
        return (tl.reshape(tile, [N]),)
    elif COLUMNS == 2:
        return tl.split(tile)
    elif COLUMNS == 4:
        even, odd = tl.split(tl.reshape(tile, [N, 2, 2]))
        c0, c2 = tl.split(even)
        c1, c3 = tl.split(odd)
        return c0, c1, c2, c3
    else:
        even, odd = tl.split(tl.reshape(tile, [N, 2, 2, 2]))
        even_even, even_odd = tl.split(even)
        odd_even, odd_odd = tl.split(odd)
        c0, c4 = tl.split(even_even)
        c2, c6 = tl.split(even_odd)
        c1, c5 = tl.split(odd_even)
        c3, c7 = tl.split(odd_odd)
        return c0, c1, c2, c3, c4, c5, c6, c7


@triton.jit
def join_columns(columns, COLUMNS: tl.constexpr):
    """Return `[N, COLUMNS]` of its columns: the way back of `split_columns`."""
    N: tl.constexpr = columns[0].shape[0]
    if COLUMNS == 1:
        joined = columns[0]
    elif COLUMNS == 2:
        joined = tl.join(columns[0], columns[1])
    elif COLUMNS == 4:
        joined = tl.join(tl.join(columns[0], columns[2]), tl.join(columns[1], columns[3]))
    else:
        even = tl.join(tl.join(columns[0], columns[4]), tl.join(columns[2], columns[6]))
        odd = tl.join(tl.join(columns[1], columns[5]), tl.join(columns[3], columns[7]))
        joined = tl.join(even, odd)
    return tl.reshape(joined, [N, COLUMNS])


@triton.jit
def load_strided(pointer, index, index_stride, index_exists, column, column_stride, column_exists):
    """Load `[INDEX, COLUMN]`, zeros where an index or a column is not there."""
    addresses = pointer + index[:, None] * index_stride + column[None, :] * column_stride
    return tl.load(addresses, mask=index_exists[:, None] & column_exists[None, :], other=0.0)


@triton.jit(do_not_specialize=["num_later", "batch_size", "total"])
def jagged_dense_bmm_kernel(
    values, offsets, dense, bias, output, num_later, batch_size, total, values_stride, values_column_stride, dense_batch_stride,
    dense_stride, dense_column_stride, D: tl.constexpr, T: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr, VECTOR: tl.constexpr, USE_DOT: tl.constexpr, PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """output[s] = values[s] @ dense[sample of s] + bias[sample of s], for at most BLOCK_M rows of one and BLOCK_T columns."""
    COLUMN_BLOCKS: tl.constexpr = (T + BLOCK_T - 1) // BLOCK_T
    program = tl.program_id(0)
    sample, _, end, first = load_chunk(offsets, program // COLUMN_BLOCKS, num_later, batch_size, total, BLOCK_M)
    if first >= end:
        return
    row = first + tl.arange(0, BLOCK_M)
    column = program % COLUMN_BLOCKS * BLOCK_T + tl.arange(0, BLOCK_T)
    row_exists = row < end
    column_exists = column < T
    dense += sample * dense_batch_stride
    # Behind the products they would take registers that the assembler does not have.
    addresses = output + row[:, None] * T + column[None, :]
    mask = row_exists[:, None] & column_exists[None, :]
    if USE_DOT or BLOCK_D <= 8:
        result = tl.zeros([BLOCK_M, BLOCK_T], tl.float32)
        if USE_DOT:
            for start in tl.range(0, D, BLOCK_D, num_stages=NUM_STAGES):
                inner = start + tl.arange(0, BLOCK_D)
                left = load_strided(values, row, values_stride, row_exists, inner, values_column_stride, inner < D)
                right = load_strided(dense, inner, dense_stride, inner < D, column, dense_column_stride, column_exists)
                result = dot(left, right, result, PRECISION)
        else:
            inner = tl.arange(0, BLOCK_D)
            # Read as it lies when it comes transposed from a gradient: the few inner elements of a column are adjacent.
            right = load_strided(dense, column, dense_column_stride, column_exists, inner, dense_stride, inner < D)
            rights = split_columns(right, BLOCK_D)
            for d in tl.static_range(D):
                left = tl.load(values + row * values_stride + d * values_column_stride, mask=row_exists, other=0.0)
                left = tl.broadcast_to(left.to(tl.float32)[:, None], [BLOCK_M, BLOCK_T])
                result = tl.fma(left, tl.broadcast_to(rights[d].to(tl.float32)[None, :], [BLOCK_M, BLOCK_T]), result)
        if bias is not None:
            result += tl.load(bias + sample * T + column, mask=column_exists, other=0.0).to(tl.float32)[None, :]
        tl.store(addresses, result.to(output.dtype.element_ty), mask=mask)
    else:
        # What one load brings to a thread is added up there; the threads' sums meet once, after the walk.
        LANES: tl.constexpr = BLOCK_D // VECTOR
        sums = (tl.zeros([BLOCK_M, LANES], tl.float32),) * BLOCK_T
        for start in tl.range(0, D, BLOCK_D, num_stages=NUM_STAGES):
            inner = start + tl.arange(0, BLOCK_D)
            left = load_strided(values, row, values_stride, row_exists, inner, values_column_stride, inner < D).to(tl.float32)
            right = load_strided(dense, inner, dense_stride, inner < D, column, dense_column_stride, column_exists)
            rights = split_columns(right, BLOCK_T)
            new_sums = ()
            for t in tl.static_range(BLOCK_T):
                product = rounded_product(left, tl.broadcast_to(rights[t][None, :], [BLOCK_M, BLOCK_D]))
                new_sums += (sums[t] + tl.sum(tl.reshape(product, [BLOCK_M, LANES, VECTOR]), 2),)  # type: ignore[assignment]
            sums = new_sums
        for t in tl.static_range(T):
            result = tl.sum(sums[t], 1)
            if bias is not None:
                result += tl.load(bias + sample * T + t).to(tl.float32)
            tl.store(output + row * T + t, result.to(output.dtype.element_ty), mask=row_exists)


@triton.jit(do_not_specialize=["num_later", "batch_size", "total", "chunk"])
def jagged_jagged_bmm_kernel(
    a, b, offsets, output, partial, num_later, batch_size, total, chunk, a_stride, a_column_stride, b_stride, b_column_stride,
    D: tl.constexpr, T: tl.constexpr, D_STRIDE: tl.constexpr, T_STRIDE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, USE_DOT: tl.constexpr, PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """output[sample] = a[rows].T @ b[rows], a block of it; of a sample with several chunks partial[slot] for each of them.

    Later chunks use their numbers as slots. Chunk 0 of a sample that has more uses `S // C + offsets[b] // C`: two such samples
    begin more than C rows apart, and none within the last C rows.
    """
    D_BLOCKS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    T_BLOCKS: tl.constexpr = (T + BLOCK_T - 1) // BLOCK_T
    index = tl.program_id(0) // (D_BLOCKS * T_BLOCKS)
    block = tl.program_id(0) % (D_BLOCKS * T_BLOCKS)
    sample, sample_start, sample_end, first = load_chunk(offsets, index, num_later, batch_size, total, chunk)
    if (index < num_later) & (first >= sample_end):
        return
    end = tl.minimum(first + chunk, sample_end)
    d = block % D_BLOCKS * BLOCK_D + tl.arange(0, BLOCK_D)
    t = block // D_BLOCKS * BLOCK_T + tl.arange(0, BLOCK_T)
    d_exists = d < D
    t_exists = t < T
    if USE_DOT:
        result = tl.zeros([BLOCK_D, BLOCK_T], tl.float32)
        for start in tl.range(first, end, BLOCK_M, num_stages=NUM_STAGES):
            row = start + tl.arange(0, BLOCK_M)
            left = load_strided(a, row, a_stride, row < end, d, a_column_stride, d_exists)
            right = load_strided(b, row, b_stride, row < end, t, b_column_stride, t_exists)
            result = dot(tl.trans(left), right, result, PRECISION)
    else:
        sums = (tl.zeros([BLOCK_D], tl.float32),) * BLOCK_T
        for start in tl.range(first, end, BLOCK_M, num_stages=NUM_STAGES):
            row = start + tl.arange(0, BLOCK_M)
            left = load_strided(a, row, a_stride, row < end, d, a_column_stride, d_exists).to(tl.float32)
            new_sums = ()
            for column in tl.static_range(BLOCK_T):
                exists = (row < end) & (column < T)
                right = tl.load(b + row * b_stride + column * b_column_stride, mask=exists, other=0.0).to(tl.float32)
                product = rounded_product(left, tl.broadcast_to(right[:, None], [BLOCK_M, BLOCK_D]))
                new_sums += (sums[column] + tl.sum(product, 0),)  # type: ignore[assignment]
            sums = new_sums
        result = join_columns(sums, BLOCK_T)
    within = d[:, None] * D_STRIDE + t[None, :] * T_STRIDE
    mask = d_exists[:, None] & t_exists[None, :]
    if sample_end - sample_start <= chunk:
        tl.store(output + sample * (D * T) + within, result.to(output.dtype.element_ty), mask=mask)
    else:
        slot = tl.where(index < num_later, index, num_later + sample_start // chunk)
        tl.store(partial + slot * (D * T) + within, result, mask=mask)


@triton.jit(do_not_specialize=["num_later", "batch_size", "total", "chunk"])
def jagged_jagged_bmm_reduce_kernel(
    partial, offsets, output, num_later, batch_size, total, chunk, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """output[sample] = the sum of its chunks' slots, in their order, for the sample whose chunk 1 could have this number."""
    number = tl.program_id(0).to(tl.int64)
    sample, start, end, first = load_chunk(offsets, number, num_later, batch_size, total, chunk)
    if (number != start // chunk) | (first >= end):
        return
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = element < SIZE
    result = tl.load(partial + (num_later + number) * SIZE + element, mask=mask)
    for slot in range(number, number + (end - start - 1) // chunk):
        result += tl.load(partial + slot * SIZE + element, mask=mask)
    tl.store(output + sample * SIZE + element, result.to(output.dtype.element_ty), mask=mask)


_launch_dense = Launcher(jagged_dense_bmm_kernel)
_launch_jagged = Launcher(jagged_jagged_bmm_kernel)
_launch_reduce = Launcher(jagged_jagged_bmm_reduce_kernel)


@functools.cache
def _dense_launch(d: int, t: int, dtype: torch.dtype, precision: str) -> tuple[configurations.Configuration, Callable[..., None]]:
    chosen = configurations.dense_configuration(d, t, dtype.itemsize)
    return chosen, bound(
        _launch_dense, D=d, T=t, BLOCK_M=chosen.rows, BLOCK_D=chosen.block_d, BLOCK_T=chosen.block_t, VECTOR=16 // dtype.itemsize,
        USE_DOT=chosen.use_dot, PRECISION=precision, NUM_STAGES=chosen.num_stages, num_warps=chosen.num_warps,
    )  # fmt: skip


@functools.cache
def _jagged_launch(
    d: int, t: int, strides: tuple[int, int], dtype: torch.dtype, precision: str
) -> tuple[configurations.Configuration, Callable[..., None]]:
    chosen = configurations.jagged_configuration(d, t, dtype.itemsize)
    return chosen, bound(
        _launch_jagged, D=d, T=t, D_STRIDE=strides[0], T_STRIDE=strides[1], BLOCK_M=chosen.rows, BLOCK_D=chosen.block_d,
        BLOCK_T=chosen.block_t, USE_DOT=chosen.use_dot, PRECISION=precision, NUM_STAGES=chosen.num_stages,
        num_warps=chosen.num_warps,
    )  # fmt: skip


def jagged_dense_bmm(x: DenseInputs, o: Options) -> Rows:
    """Launch `jagged_dense_bmm_kernel`."""
    values, offsets, dense, bias = x
    total, (batch_size, d, t) = values.shape[0], dense.shape
    if batch_size == 0 or (d == 0 and bias is None):
        return Rows(values.new_zeros(total, t))
    output = values.new_empty(total, t)
    if total and t:
        chosen, launch = _dense_launch(d, t, values.dtype, products_of(values.dtype))
        num_later = total // chosen.rows
        if bias is not None:
            bias = bias.contiguous()
        launch(
            ((batch_size + num_later) * cdiv(t, chosen.block_t),),
            values, offsets.contiguous(), dense, bias, output, num_later, batch_size, total, *values.stride(), *dense.stride(),
        )  # fmt: skip
    return Rows(output)


def jagged_jagged_bmm(x: JaggedInputs, o: Options) -> Sums:
    """Launch `jagged_jagged_bmm_kernel`, and the sum over chunks where a sample may have several."""
    a, b, offsets = x
    (total, d), t, batch_size = a.shape, b.shape[1], offsets.shape[0] - 1
    output = a.new_empty(batch_size, d, t)
    if not (batch_size and d and t):
        return Sums(output)
    strides = (t, 1)
    if d < t:
        # The narrower side is the second one; the output is written transposed.
        a, b, d, t, strides = b, a, t, d, (1, t)
    chosen, launch = _jagged_launch(d, t, strides, a.dtype, products_of(a.dtype))
    chunk = configurations.chunk_of(d, t, total, batch_size, a.element_size())
    # No sample is longer than all together.
    num_later = total // chunk if total > chunk else 0
    partial = a.new_empty(2 * num_later * d * t, dtype=torch.float32)
    offsets = offsets.contiguous()
    launch(
        ((batch_size + num_later) * cdiv(d, chosen.block_d) * cdiv(t, chosen.block_t),),
        a, b, offsets, output, partial, num_later, batch_size, total, chunk, *a.stride(), *b.stride(),
    )  # fmt: skip
    if num_later:
        _launch_reduce(
            (num_later, cdiv(d * t, REDUCE_ELEMENTS)),
            partial, offsets, output, num_later, batch_size, total, chunk, SIZE=d * t, BLOCK=REDUCE_ELEMENTS,
        )  # fmt: skip
    return Sums(output)
