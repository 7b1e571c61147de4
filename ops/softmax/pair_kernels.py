"""`jagged2_softmax` as Triton kernels: softmax over the rows or the columns of samples' blocks.

A program owns some vectors of one sample, rows or columns, and takes them a tile at a time. The tile is a half and a quarter as
long for shorter samples and holds more vectors instead, so that as many threads have work.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged.ops._shared.device import find_segment, pairs_before
from jagged.ops._shared.kernels import pair_starts
from jagged.ops.softmax.tiles import (
    statistics,
    store_gradients,
    store_softmax,
    store_softmax_gradients,
    store_weights,
    sum_of_products,
)

# Vectors of a program: finding them takes as many instructions as normalising a dozen.
OWN_VECTORS = 64


class Tile(NamedTuple):
    """Steps, vectors and lanes of a tile; the same for vectors that it does not hold; how Triton runs it.

    Left to itself the assembler spills registers to fit one more program, or takes all that there are.
    """

    steps: int
    vectors: int
    lanes: int
    long_steps: int
    long_vectors: int
    long_lanes: int
    num_warps: int
    max_registers: int


def softmax2_tile(num_pairs: int, batch_size: int, by_columns: bool, is_wide: bool) -> Tile:
    """Choose from shapes alone, as if blocks were square; `is_wide` where addresses are computed in int64."""
    if by_columns:
        return Tile(128, 16, 1, 256, 8, 1, 8, 128 if is_wide else 80)
    if num_pairs <= 64**2 * batch_size:
        return Tile(16, 8, 8, 8, 1, 64, 2, 80)
    return Tile(16, 4, 32, 8, 2, 64, 4, 80)


@triton.jit
def find_vectors(
    tile, num_tiles, a_offsets, b_offsets, pair_offsets, num_samples, num_pairs, IS_SQUARE: tl.constexpr,
    BY_COLUMNS: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """Return where a tile's block begins, its first vector and the one after its last, the block's rows, columns, and next tile.

    Sample b owns the tiles from `offsets[b] // OWN + b` on, with the offsets of its vectors.
    """
    offsets = b_offsets if BY_COLUMNS else a_offsets
    sample = find_segment(offsets, tile, num_samples, OWN)
    rows = (tl.load(a_offsets + sample + 1) - tl.load(a_offsets + sample)).to(tl.int32)
    columns = (tl.load(b_offsets + sample + 1) - tl.load(b_offsets + sample)).to(tl.int32)
    count = columns if BY_COLUMNS else rows
    first = (tile - (tl.load(offsets + sample) // OWN).to(tl.int32) - sample) * OWN
    start = tl.full((), -1, tl.int64)
    if (first >= 0) & (first < count) & (rows > 0) & (columns > 0):
        if pair_offsets is None:
            start = pairs_before(a_offsets, b_offsets, sample, IS_SQUARE, 512)
        else:
            start = tl.load(pair_offsets + sample).to(tl.int64)
    # Only wrong offsets, or scores that are too few, put a block outside.
    inside = (start >= 0) & (rows.to(tl.int64) * columns <= num_pairs - start)
    if not inside:
        # Vectors without elements may be any number: on to the last tile of their sample. Wrong offsets end the search.
        last = tl.minimum((tl.load(offsets + sample + 1) // OWN).to(tl.int32) + sample, num_tiles)
        tile = tl.where(last < tile, num_tiles, tile + (last - tile) // tl.num_programs(0) * tl.num_programs(0))
    return start, first, tl.where(inside, tl.minimum(first + OWN, count), first), rows, columns, tile + tl.num_programs(0)


@triton.jit
def count_tiles(offsets, num_samples, OWN: tl.constexpr):
    """Number of tiles. A batch has fewer than 2^30; wrong offsets do not let a tile's index overflow."""
    return tl.minimum((tl.load(offsets + num_samples) // OWN).to(tl.int32) + num_samples, 2**30)


@triton.jit
def hidden_zero(begin, LANES: tl.constexpr):
    """0, which a stride between elements that are not neighbours takes on in a loop over vectors.

    The compiler takes it for one that changes. Strides that do not change make it keep all addresses in registers meanwhile.
    """
    return begin >> 31 if LANES == 1 else 0


@triton.jit
def softmax_of_short(
    values, output, first, end, length, vector_stride, element_stride, output_vector_stride, output_element_stride,
    STEPS: tl.constexpr, VECTORS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Softmax of the vectors `first .. end`, of at most `STEPS * LANES` elements."""
    for begin in range(first, end, VECTORS):
        vectors = begin + tl.arange(0, VECTORS)
        zero = hidden_zero(begin, LANES)
        store_softmax(
            values, output, vectors, vectors < end, length, vector_stride, element_stride + zero, output_vector_stride,
            output_element_stride + zero, STEPS, LANES,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_samples", "num_pairs"])
def jagged2_softmax_forward_kernel(
    scores, a_offsets, b_offsets, pair_offsets, output, num_samples, num_pairs, stride,
    BY_COLUMNS: tl.constexpr, OWN: tl.constexpr, INDEX: tl.constexpr, STEPS: tl.constexpr, VECTORS: tl.constexpr,
    LANES: tl.constexpr, LONG_STEPS: tl.constexpr, LONG_VECTORS: tl.constexpr, LONG_LANES: tl.constexpr,
):  # fmt: skip
    """Softmax of some rows, or columns, of one block after the other."""
    WIDTH: tl.constexpr = STEPS * LANES
    IS_SQUARE: tl.constexpr = b_offsets is None
    b_offsets = a_offsets if IS_SQUARE else b_offsets
    stride = tl.cast(stride, INDEX)
    num_tiles = count_tiles(b_offsets if BY_COLUMNS else a_offsets, num_samples, OWN)
    tile = tl.program_id(0)
    while tile < num_tiles:
        start, first, end, rows, columns, tile = find_vectors(
            tile, num_tiles, a_offsets, b_offsets, pair_offsets, num_samples, num_pairs, IS_SQUARE, BY_COLUMNS, OWN
        )
        values = scores + start * stride
        weights = output + start
        width = columns.to(INDEX)
        if BY_COLUMNS:
            length, by_vector, by_element, to_vector, to_element = rows, stride, width * stride, 1, width
        else:
            length, by_vector, by_element, to_vector, to_element = columns, width * stride, stride, width, 1
        if length <= WIDTH // 4:
            softmax_of_short(
                values, weights, first, end, length, by_vector, by_element, to_vector, to_element, STEPS // 4, VECTORS * 4, LANES
            )
        elif length <= WIDTH // 2:
            softmax_of_short(
                values, weights, first, end, length, by_vector, by_element, to_vector, to_element, STEPS // 2, VECTORS * 2, LANES
            )
        elif length <= WIDTH:
            softmax_of_short(
                values, weights, first, end, length, by_vector, by_element, to_vector, to_element, STEPS, VECTORS, LANES
            )
        else:
            for begin in range(first, end, LONG_VECTORS):
                vectors = begin + tl.arange(0, LONG_VECTORS)
                exist = vectors < end
                largest, weight = statistics(
                    values, vectors, exist, 0, length, by_vector, by_element, LONG_STEPS, LONG_LANES
                )  # fmt: skip
                store_weights(
                    values, weights, vectors, exist, largest, weight, 0, length, by_vector, by_element, to_vector, to_element,
                    LONG_STEPS, LONG_LANES,
                )  # fmt: skip


@triton.jit
def gradients_of_short(
    grad, weights, output, first, end, length, vector_stride, element_stride, weights_vector_stride, weights_element_stride,
    STEPS: tl.constexpr, VECTORS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Gradients of the vectors `first .. end`, of at most `STEPS * LANES` elements."""
    for begin in range(first, end, VECTORS):
        vectors = begin + tl.arange(0, VECTORS)
        zero = hidden_zero(begin, LANES)
        store_softmax_gradients(
            grad, weights, output, vectors, vectors < end, length, vector_stride, element_stride + zero, weights_vector_stride,
            weights_element_stride + zero, STEPS, LANES,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_samples", "num_pairs"])
def jagged2_softmax_backward_kernel(
    grad, weights, a_offsets, b_offsets, pair_offsets, output, num_samples, num_pairs, stride,
    BY_COLUMNS: tl.constexpr, OWN: tl.constexpr, INDEX: tl.constexpr, STEPS: tl.constexpr, VECTORS: tl.constexpr,
    LANES: tl.constexpr, LONG_STEPS: tl.constexpr, LONG_VECTORS: tl.constexpr, LONG_LANES: tl.constexpr,
):  # fmt: skip
    """Gradients of some rows, or columns, of one block after the other."""
    WIDTH: tl.constexpr = STEPS * LANES
    IS_SQUARE: tl.constexpr = b_offsets is None
    b_offsets = a_offsets if IS_SQUARE else b_offsets
    stride = tl.cast(stride, INDEX)
    num_tiles = count_tiles(b_offsets if BY_COLUMNS else a_offsets, num_samples, OWN)
    tile = tl.program_id(0)
    while tile < num_tiles:
        start, first, end, rows, columns, tile = find_vectors(
            tile, num_tiles, a_offsets, b_offsets, pair_offsets, num_samples, num_pairs, IS_SQUARE, BY_COLUMNS, OWN
        )
        upstream = grad + start * stride
        probabilities = weights + start
        gradients = output + start
        width = columns.to(INDEX)
        if BY_COLUMNS:
            length, by_vector, by_element, to_vector, to_element = rows, stride, width * stride, 1, width
        else:
            length, by_vector, by_element, to_vector, to_element = columns, width * stride, stride, width, 1
        if length <= WIDTH // 4:
            gradients_of_short(
                upstream, probabilities, gradients, first, end, length, by_vector, by_element, to_vector, to_element,
                STEPS // 4, VECTORS * 4, LANES,
            )  # fmt: skip
        elif length <= WIDTH // 2:
            gradients_of_short(
                upstream, probabilities, gradients, first, end, length, by_vector, by_element, to_vector, to_element,
                STEPS // 2, VECTORS * 2, LANES,
            )  # fmt: skip
        elif length <= WIDTH:
            gradients_of_short(
                upstream, probabilities, gradients, first, end, length, by_vector, by_element, to_vector, to_element,
                STEPS, VECTORS, LANES,
            )  # fmt: skip
        else:
            for begin in range(first, end, LONG_VECTORS):
                vectors = begin + tl.arange(0, LONG_VECTORS)
                exist = vectors < end
                products = sum_of_products(
                    upstream, probabilities, vectors, exist, 0, length, by_vector, by_element, to_vector, to_element,
                    LONG_STEPS, LONG_LANES,
                )  # fmt: skip
                store_gradients(
                    upstream, probabilities, gradients, vectors, exist, products, 0, length, by_vector, by_element, to_vector,
                    to_element, LONG_STEPS, LONG_LANES,
                )  # fmt: skip


def jagged2_softmax_forward(
    scores: Tensor, a_offsets: Tensor, b_offsets: Tensor | None, pair_offsets: Tensor | None, by_columns: bool
) -> Tensor:
    """Launch `jagged2_softmax_forward_kernel`: `[sum La_i * Lb_i]`."""
    output = torch.empty(scores.shape, dtype=scores.dtype, device=scores.device)
    _launch(jagged2_softmax_forward_kernel, (scores,), a_offsets, b_offsets, pair_offsets, output, by_columns)
    return output


def jagged2_softmax_backward(
    grad: Tensor, weights: Tensor, a_offsets: Tensor, b_offsets: Tensor | None, pair_offsets: Tensor | None, by_columns: bool
) -> Tensor:
    """Launch `jagged2_softmax_backward_kernel`: `[sum La_i * Lb_i]`."""
    weights = weights.contiguous()
    output = torch.empty_like(weights)
    _launch(jagged2_softmax_backward_kernel, (grad, weights), a_offsets, b_offsets, pair_offsets, output, by_columns)
    return output


def _launch(kernel, inputs, a_offsets, b_offsets, pair_offsets, output, by_columns):
    batch_size, num_pairs = a_offsets.shape[0] - 1, output.shape[0]
    if not batch_size or not num_pairs:
        return
    a_offsets = a_offsets.contiguous()
    if b_offsets is not None:
        b_offsets = b_offsets.contiguous()
    if pair_offsets is None:
        pair_offsets = pair_starts(a_offsets, a_offsets if b_offsets is None else b_offsets)
    else:
        pair_offsets = pair_offsets.contiguous()
    stride = inputs[0].stride(0)
    is_wide = num_pairs * max(stride, 1) >= 2**31
    tile = softmax2_tile(num_pairs, batch_size, by_columns, is_wide)
    # As many vectors as square blocks can have at most, and all that the list has to spare. Of others programs take several.
    programs = math.isqrt(num_pairs * batch_size) // OWN_VECTORS + batch_size
    kernel[(programs,)](
        *inputs, a_offsets, b_offsets, pair_offsets, output, batch_size, num_pairs, stride, BY_COLUMNS=by_columns,
        OWN=OWN_VECTORS, INDEX=tl.int64 if is_wide else tl.int32, STEPS=tile.steps, VECTORS=tile.vectors, LANES=tile.lanes,
        LONG_STEPS=tile.long_steps, LONG_VECTORS=tile.long_vectors, LONG_LANES=tile.long_lanes, num_warps=tile.num_warps,
        maxnreg=tile.max_registers,
    )  # fmt: skip
