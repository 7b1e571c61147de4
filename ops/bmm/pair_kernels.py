"""Products over the pairs of rows of each sample as Triton kernels: scores of pairs, and sums of rows weighted by scores.

A program owns a tile of rows of one sample and meets the other side in tiles that hold all of it in most samples, so that rows
come from memory once. A side of at most half a tile is met with half of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged.ops._shared.device import dot, find_tile, load_segment, pairs_before
from jagged.ops._shared.kernels import pair_starts
from jagged.ops._shared.launch import Launcher, bound
from jagged.ops._shared.matrices import float32_products
from jagged.ops._shared.sizes import cdiv
from jagged.ops.bmm.spec import PairInputs, PairOptions, Scores, WeightedInputs, WeightedOptions, WeightedSums

# A second grid dimension of a launch has at most so many programs.
MAX_GRID = 65535
# Lengths of samples that small tiles serve, and of those whose programs divide the columns.
SHORT, LONG = 16, 512


class ScoresConfiguration(NamedTuple):
    """Rows of a, rows of b, columns of both in one step, and how Triton runs it."""

    rows: int
    columns: int
    step: int
    num_warps: int
    num_stages: int


class SumsConfiguration(NamedTuple):
    """Rows of the output, terms and columns of one product, terms that stay on chip, columns of a program, how Triton runs it."""

    rows: int
    chunk: int
    step: int
    terms: int
    columns: int
    num_warps: int
    num_stages: int


def scores_configuration(dtype: torch.dtype, is_wide: bool, a_mean: float, b_mean: float) -> ScoresConfiguration:
    """Choose from the lengths that a pair's sample has on average; `is_wide` where rows are read 16 bytes at a time."""
    rows = 32 if a_mean <= SHORT else 64
    # Float32 and loads of single elements leave a tile fewer registers.
    fits = dtype.itemsize == 2 and is_wide
    columns = 32 if b_mean <= SHORT else 128 if fits else 64
    return ScoresConfiguration(rows, columns, 64 if fits else 32, 4, 3 if is_wide else 1)


def sums_configuration(dtype: torch.dtype, is_wide: bool, output_mean: float, mean: float) -> SumsConfiguration:
    """Choose from the lengths that a pair's sample has on average; `is_wide` where rows are read 16 bytes at a time."""
    rows = 32 if output_mean <= SHORT else 64
    columns = 128 if mean > LONG else 512
    if dtype.itemsize == 2:
        return SumsConfiguration(rows, 32, 64, 128 if is_wide else 64, columns, 4, 3 if is_wide else 1)
    # The weights of all terms would leave no registers.
    return SumsConfiguration(rows, 16, 64, 0, columns, 4, 3 if is_wide else 1)


@triton.jit
def find_block(a_offsets, b_offsets, pair_offsets, sample, IS_SQUARE: tl.constexpr):
    """Return where a sample's block of pairs begins (int64); without `pair_offsets` it is added up here."""
    if pair_offsets is None:
        return pairs_before(a_offsets, b_offsets, sample, IS_SQUARE)
    else:
        return tl.load(pair_offsets + sample)


@triton.jit
def load_rows(
    tensor, first_row, length, stride, first_column,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """Load rows of a sample, `[BLOCK, BLOCK_COLUMNS]` from a column on; zeros where a row or a column is not there."""
    row = first_row + tl.arange(0, BLOCK)
    column = first_column + tl.arange(0, BLOCK_COLUMNS)
    mask = (row < length)[:, None]
    if WIDTH % BLOCK_COLUMNS:
        mask = mask & (column < WIDTH)[None, :]
    return tl.load(tensor + row.to(INDEX)[:, None] * stride + column[None, :], mask=mask, other=0.0)


@triton.jit
def store_scores(
    a, b, scores, first_row, first_column, a_length, b_length, a_stride, b_stride,
    WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
    INDEX: tl.constexpr,
):  # fmt: skip
    """Compute a tile of a sample's scores and store it."""
    products = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, WIDTH, BLOCK_K):
        a_tile = load_rows(a, first_row, a_length, a_stride, start, WIDTH, BLOCK_M, BLOCK_K, INDEX)
        b_tile = load_rows(b, first_column, b_length, b_stride, start, WIDTH, BLOCK_N, BLOCK_K, INDEX)
        products = dot(a_tile, tl.trans(b_tile), products, PRECISION)
    row = first_row + tl.arange(0, BLOCK_M)[:, None]
    column = first_column + tl.arange(0, BLOCK_N)[None, :]
    exists = (row < a_length) & (column < b_length)
    tl.store(scores + row.to(INDEX) * b_length + column, products.to(scores.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["num_samples", "a_total", "b_total", "num_pairs"])
def pair_scores_kernel(
    a, b, scores, a_offsets, b_offsets, pair_offsets, num_samples, a_total, b_total, num_pairs, a_stride, b_stride,
    IS_SQUARE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """Scores of a tile of rows of a against the rows of b: all of them, or every so many tiles for a grid's second dimension."""
    sample, a_start, a_length, first_row = find_tile(a_offsets, tl.program_id(0), num_samples, a_total, BLOCK_M)
    a_length, first_row = a_length.to(tl.int32), first_row.to(tl.int32)
    b_start, b_end = load_segment(b_offsets, sample, b_total)
    b_length = (b_end - b_start).to(tl.int32)
    first_pair = find_block(a_offsets, b_offsets, pair_offsets, sample, IS_SQUARE)
    # Only wrong offsets, or a wrong number of pairs, put a block outside.
    outside = (first_pair < 0) | (first_pair + a_length.to(tl.int64) * b_length > num_pairs)
    if outside | (first_row >= a_length):
        return
    a += a_start * a_stride
    b += b_start * b_stride
    scores += first_pair
    if b_length <= BLOCK_N // 2:
        if tl.program_id(1) == 0:
            store_scores(
                a, b, scores, first_row, 0, a_length, b_length, a_stride, b_stride,
                WIDTH, BLOCK_M, BLOCK_N // 2, BLOCK_K, PRECISION, INDEX,
            )  # fmt: skip
    else:
        # Rows are constant in the loop. As the compiler does not know it, no address of a score waits in a register meanwhile.
        row_tiles = tl.cdiv(a_length, BLOCK_M)
        num_tiles = row_tiles * tl.cdiv(b_length, BLOCK_N)
        for tile in range(first_row // BLOCK_M + tl.program_id(1) * row_tiles, num_tiles, tl.num_programs(1) * row_tiles):
            store_scores(
                a, b, scores, tile % row_tiles * BLOCK_M, tile // row_tiles * BLOCK_N, a_length, b_length, a_stride, b_stride,
                WIDTH, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION, INDEX,
            )  # fmt: skip


@triton.jit
def load_weights(
    scores, first_row, first_term, output_length, length, stride,
    TRANSPOSED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """Load scores of a sample as the weights `[BLOCK_M, BLOCK_K]` of rows of the output; zeros where a pair is not there."""
    row = first_row + tl.arange(0, BLOCK_M)[:, None]
    term = first_term + tl.arange(0, BLOCK_K)[None, :]
    pair = term.to(INDEX) * output_length + row if TRANSPOSED else row.to(INDEX) * length + term
    return tl.load(scores + pair * stride, mask=(row < output_length) & (term < length), other=0.0)


@triton.jit
def store_rows(
    tensor, tile, first_row, length, first_column, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_COLUMNS: tl.constexpr
):  # fmt: skip
    """Store the rows of `[BLOCK, BLOCK_COLUMNS]` that the sample has, from a column on."""
    row = first_row + tl.arange(0, BLOCK)
    column = first_column + tl.arange(0, BLOCK_COLUMNS)
    mask = (row < length)[:, None]
    if WIDTH % BLOCK_COLUMNS:
        mask = mask & (column < WIDTH)[None, :]
    tl.store(tensor + row.to(tl.int64)[:, None] * WIDTH + column[None, :], tile.to(tensor.dtype.element_ty), mask=mask)


@triton.jit
def store_sums(
    scores, values, output, first_row, output_length, length, scores_stride, stride, first_column, last_column,
    TRANSPOSED: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    TERMS: tl.constexpr, PRECISION: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """Sums of at most TERMS terms: their weights stay on chip while rows pass by, columns by columns."""
    weights = ()
    for k in tl.static_range(TERMS // BLOCK_K):
        weights += (  # type: ignore[assignment]
            load_weights(
                scores, first_row, k * BLOCK_K, output_length, length, scores_stride, TRANSPOSED, BLOCK_M, BLOCK_K, INDEX
            ),
        )
    for column in range(first_column, last_column, BLOCK_D):
        sums = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        for k in tl.static_range(TERMS // BLOCK_K):
            tile = load_rows(values, k * BLOCK_K, length, stride, column, WIDTH, BLOCK_K, BLOCK_D, INDEX)
            sums = dot(weights[k], tile, sums, PRECISION)
        store_rows(output, sums, first_row, output_length, column, WIDTH, BLOCK_M, BLOCK_D)


@triton.jit(do_not_specialize=["num_samples", "output_total", "total", "num_pairs"])
def pair_sums_kernel(
    scores, values, output, output_offsets, offsets, pair_offsets, num_samples, output_total, total, num_pairs, scores_stride,
    stride, IS_SQUARE: tl.constexpr, TRANSPOSED: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, TERMS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
    INDEX: tl.constexpr,
):  # fmt: skip
    """Some columns of a tile of rows of the output, which are the rows of each block of scores or, transposed, its columns."""
    # Programs of one tile of rows follow one another, so that its scores are still in the cache.
    PARTS: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    first_column = tl.program_id(0) % PARTS * COLUMNS
    sample, output_start, output_length, first_row = find_tile(
        output_offsets, tl.program_id(0) // PARTS, num_samples, output_total, BLOCK_M
    )
    if first_row >= output_length:
        return
    start, end = load_segment(offsets, sample, total)
    output_length, first_row, length = output_length.to(tl.int32), first_row.to(tl.int32), (end - start).to(tl.int32)
    first_pair = find_block(output_offsets, offsets, pair_offsets, sample, IS_SQUARE)
    # Only wrong offsets, or a wrong number of scores, put a block outside: its sums have no terms.
    outside = (first_pair < 0) | (first_pair + output_length.to(tl.int64) * length > num_pairs)
    length = tl.where(outside, 0, length)
    scores += first_pair * scores_stride
    values += start * stride
    output += output_start * WIDTH
    last_column = tl.minimum(first_column + COLUMNS, WIDTH)
    if length <= TERMS // 2:
        store_sums(
            scores, values, output, first_row, output_length, length, scores_stride, stride, first_column, last_column,
            TRANSPOSED, WIDTH, BLOCK_M, BLOCK_K, BLOCK_D, TERMS // 2, PRECISION, INDEX,
        )  # fmt: skip
    elif length <= TERMS:
        store_sums(
            scores, values, output, first_row, output_length, length, scores_stride, stride, first_column, last_column,
            TRANSPOSED, WIDTH, BLOCK_M, BLOCK_K, BLOCK_D, TERMS, PRECISION, INDEX,
        )  # fmt: skip
    else:
        # As in `pair_scores_kernel`, rows are constant in the outer loop and the compiler does not know it.
        row_tiles = tl.cdiv(output_length, BLOCK_M)
        num_tiles = row_tiles * tl.cdiv(last_column - first_column, BLOCK_D)
        for place in range(first_row // BLOCK_M, num_tiles, row_tiles):
            row = place % row_tiles * BLOCK_M
            column = first_column + place // row_tiles * BLOCK_D
            sums = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
            for term in range(0, length, BLOCK_K):
                weights = load_weights(
                    scores, row, term, output_length, length, scores_stride, TRANSPOSED, BLOCK_M, BLOCK_K, INDEX
                )
                tile = load_rows(values, term, length, stride, column, WIDTH, BLOCK_K, BLOCK_D, INDEX)
                sums = dot(weights, tile, sums, PRECISION)
            store_rows(output, sums, row, output_length, column, WIDTH, BLOCK_M, BLOCK_D)


_launch_scores = Launcher(pair_scores_kernel)
_launch_sums = Launcher(pair_sums_kernel)


@functools.cache
def _scores_launch(
    chosen: ScoresConfiguration, is_square: bool, width: int, precision: str, index: tl.dtype
) -> Callable[..., None]:
    return bound(
        _launch_scores, IS_SQUARE=is_square, WIDTH=width, BLOCK_M=chosen.rows, BLOCK_N=chosen.columns, BLOCK_K=chosen.step,
        PRECISION=precision, INDEX=index, num_warps=chosen.num_warps, num_stages=chosen.num_stages,
    )  # fmt: skip


@functools.cache
def _sums_launch(
    chosen: SumsConfiguration, is_square: bool, transposed: bool, width: int, precision: str, index: tl.dtype
) -> Callable[..., None]:
    return bound(
        _launch_sums, IS_SQUARE=is_square, TRANSPOSED=transposed, WIDTH=width, BLOCK_M=chosen.rows, BLOCK_K=chosen.chunk,
        BLOCK_D=chosen.step, TERMS=chosen.terms, COLUMNS=chosen.columns, PRECISION=precision, INDEX=index,
        num_warps=chosen.num_warps, num_stages=chosen.num_stages,
    )  # fmt: skip


def pair_scores(x: PairInputs, o: PairOptions) -> Scores:
    """Launch `pair_scores_kernel`."""
    a, b, a_offsets, b_offsets = x
    (num_pairs,) = o
    (a_total, width), b_total, batch_size = a.shape, b.shape[0], a_offsets.shape[0] - 1
    scores = a.new_empty(num_pairs)
    # Of a width of 0 the scores are zeros, computed by the same kernel; without rows there are none.
    if batch_size == 0 or a_total == 0 or num_pairs == 0:
        return Scores(scores)
    a_offsets, b_offsets = a_offsets.contiguous(), b_offsets.contiguous()
    a, b = _readable(a), _readable(b)
    a_stride, b_stride = a.stride(0), b.stride(0)
    is_wide = (width | a_stride | b_stride) % 16 == 0
    chosen = scores_configuration(a.dtype, is_wide, num_pairs / max(b_total, 1), num_pairs / a_total)
    # A row of a meets so many tiles of b on average. Where these are many, as in long samples, they are spread over programs;
    # programs to spare are then no more than whole tiles.
    parts = min(max(num_pairs // (a_total * chosen.columns), 1), MAX_GRID)
    launch = _scores_launch(
        chosen, _is_square(a_offsets, b_offsets), width, _precision(a.dtype),
        _index(num_pairs, a_total * a_stride, b_total * b_stride),
    )  # fmt: skip
    launch(
        (a_total // chosen.rows + batch_size, parts),
        a, b, scores, a_offsets, b_offsets, pair_starts(a_offsets, b_offsets), batch_size, a_total, b_total, num_pairs,
        a_stride, b_stride,
    )  # fmt: skip
    return Scores(scores)


def pair_sums(x: WeightedInputs, o: WeightedOptions) -> WeightedSums:
    """Launch `pair_sums_kernel`: `[P], [Sb, D] -> [Sa, D]`, or with transposed blocks `[Sa, D] -> [Sb, D]`."""
    scores, values, a_offsets, b_offsets = x
    output_total, transposed = o
    (total, width), batch_size = values.shape, a_offsets.shape[0] - 1
    a_offsets, b_offsets = a_offsets.contiguous(), b_offsets.contiguous()
    output_offsets, offsets = (b_offsets, a_offsets) if transposed else (a_offsets, b_offsets)
    output = values.new_empty(output_total, width)
    if not (batch_size and output_total and width):
        return WeightedSums(output)
    values = _readable(values)
    num_pairs, scores_stride, stride = scores.shape[0], scores.stride(0), values.stride(0)
    is_wide = (width | stride) % 16 == 0
    chosen = sums_configuration(values.dtype, is_wide, num_pairs / max(total, 1), num_pairs / output_total)
    programs = (output_total // chosen.rows + batch_size) * cdiv(width, chosen.columns)
    launch = _sums_launch(
        chosen, _is_square(a_offsets, b_offsets), transposed, width, _precision(values.dtype),
        _index(num_pairs * scores_stride, total * stride),
    )  # fmt: skip
    launch(
        (programs,),
        scores, values, output, output_offsets, offsets, pair_starts(a_offsets, b_offsets), batch_size, output_total, total,
        num_pairs, scores_stride, stride,
    )  # fmt: skip
    return WeightedSums(output)


def _is_square(a_offsets: Tensor, b_offsets: Tensor) -> bool:
    return a_offsets.data_ptr() == b_offsets.data_ptr()


def _readable(values: Tensor) -> Tensor:
    """The kernels take any stride of rows, and columns side by side."""
    return values if values.stride(1) == 1 else values.contiguous()


def _precision(dtype: torch.dtype) -> str:
    """Float32 as the sum of two TF32 numbers and its products of three on NVIDIA's matrix instructions, as exact as float32's."""
    if dtype != torch.float32:
        return "ieee"
    if float32_products() == "tf32":
        return "tf32"
    return "ieee" if torch.version.hip else "tf32x3"


def _index(*elements: int) -> tl.dtype:
    """Return what counts the elements of a sample, given those of whole tensors; int64 costs a tile its registers."""
    # A tile reaches past the end of its sample by less than itself, behind a mask.
    return tl.int32 if max(elements) < 2**30 else tl.int64
