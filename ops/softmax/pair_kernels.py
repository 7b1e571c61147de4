"""`jagged2_softmax` as Triton kernels: softmax over the rows or the columns of samples' blocks.

A program owns a tile of vectors of one sample, rows or columns. The tile is a half and a quarter as long for shorter samples.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from jagged.ops._shared.device import find_segment, pairs_before
from jagged.ops._shared.kernels import pair_starts
from jagged.ops._shared.launch import Launcher, bound
from jagged.ops.softmax.spec import Gradient, PairBackwardInputs, PairInputs, PairOptions, Weights
from jagged.ops.softmax.vectors import (
    statistics,
    store_gradients,
    store_softmax,
    store_softmax_gradients,
    store_weights,
    sum_of_products,
)


class Configuration(NamedTuple):
    """Vectors of a tile, which are a program's; its steps and lanes; how Triton runs it.

    Left to itself the assembler takes more registers than it needs, or spills some to fit one more program.
    """

    vectors: int
    steps: int
    lanes: int
    num_warps: int
    max_registers: int | None


# Sixteen threads take a row in steps; of columns, which lie beside one another, each has some elements.
ROWS = Configuration(16, 8, 16, 4, 80)
COLUMNS = Configuration(16, 1, 128, 4, None)


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


@triton.jit(do_not_specialize=["num_samples", "num_pairs"])
def jagged2_softmax_forward_kernel(
    scores, a_offsets, b_offsets, pair_offsets, output, num_samples, num_pairs, stride,
    BY_COLUMNS: tl.constexpr, INDEX: tl.constexpr, VECTORS: tl.constexpr, STEPS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Softmax of some rows, or columns, of one block after the other."""
    IS_SQUARE: tl.constexpr = b_offsets is None
    b_offsets = a_offsets if IS_SQUARE else b_offsets
    stride = tl.cast(stride, INDEX)
    num_tiles = count_tiles(b_offsets if BY_COLUMNS else a_offsets, num_samples, VECTORS)
    tile = tl.program_id(0)
    while tile < num_tiles:
        start, first, end, rows, columns, tile = find_vectors(
            tile, num_tiles, a_offsets, b_offsets, pair_offsets, num_samples, num_pairs, IS_SQUARE, BY_COLUMNS, VECTORS
        )
        values = scores + start * stride
        weights = output + start
        width = columns.to(INDEX)
        if BY_COLUMNS:
            length, by_vector, by_element, to_vector, to_element = rows, stride, width * stride, 1, width
        else:
            length, by_vector, by_element, to_vector, to_element = columns, width * stride, stride, width, 1
        vectors = first + tl.arange(0, VECTORS)
        exist = vectors < end
        # Only a tile of this block knows its length.
        length = tl.where(first < end, length, 0)
        HALF_STEPS: tl.constexpr = max(STEPS // 2, 1)
        HALF_LANES: tl.constexpr = LANES * STEPS // 2 // HALF_STEPS
        QUARTER_STEPS: tl.constexpr = max(STEPS // 4, 1)
        QUARTER_LANES: tl.constexpr = LANES * STEPS // 4 // QUARTER_STEPS
        if length <= LANES * STEPS // 4:
            store_softmax(
                values, weights, vectors, exist, length, by_vector, by_element, to_vector, to_element, QUARTER_STEPS,
                QUARTER_LANES,
            )  # fmt: skip
        elif length <= LANES * STEPS // 2:
            store_softmax(
                values, weights, vectors, exist, length, by_vector, by_element, to_vector, to_element, HALF_STEPS, HALF_LANES
            )  # fmt: skip
        elif length <= LANES * STEPS:
            store_softmax(values, weights, vectors, exist, length, by_vector, by_element, to_vector, to_element, STEPS, LANES)
        else:
            largest, weight = statistics(values, vectors, exist, 0, length, by_vector, by_element, STEPS, LANES)
            store_weights(
                values, weights, vectors, exist, largest, weight, 0, length, by_vector, by_element, to_vector, to_element, STEPS,
                LANES,
            )  # fmt: skip


@triton.jit(do_not_specialize=["num_samples", "num_pairs"])
def jagged2_softmax_backward_kernel(
    grad, weights, a_offsets, b_offsets, pair_offsets, output, num_samples, num_pairs, stride,
    BY_COLUMNS: tl.constexpr, INDEX: tl.constexpr, VECTORS: tl.constexpr, STEPS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Gradients of some rows, or columns, of one block after the other."""
    IS_SQUARE: tl.constexpr = b_offsets is None
    b_offsets = a_offsets if IS_SQUARE else b_offsets
    stride = tl.cast(stride, INDEX)
    num_tiles = count_tiles(b_offsets if BY_COLUMNS else a_offsets, num_samples, VECTORS)
    tile = tl.program_id(0)
    while tile < num_tiles:
        start, first, end, rows, columns, tile = find_vectors(
            tile, num_tiles, a_offsets, b_offsets, pair_offsets, num_samples, num_pairs, IS_SQUARE, BY_COLUMNS, VECTORS
        )
        upstream = grad + start * stride
        probabilities = weights + start
        gradients = output + start
        width = columns.to(INDEX)
        if BY_COLUMNS:
            length, by_vector, by_element, to_vector, to_element = rows, stride, width * stride, 1, width
        else:
            length, by_vector, by_element, to_vector, to_element = columns, width * stride, stride, width, 1
        vectors = first + tl.arange(0, VECTORS)
        exist = vectors < end
        # Only a tile of this block knows its length.
        length = tl.where(first < end, length, 0)
        HALF_STEPS: tl.constexpr = max(STEPS // 2, 1)
        HALF_LANES: tl.constexpr = LANES * STEPS // 2 // HALF_STEPS
        QUARTER_STEPS: tl.constexpr = max(STEPS // 4, 1)
        QUARTER_LANES: tl.constexpr = LANES * STEPS // 4 // QUARTER_STEPS
        if length <= LANES * STEPS // 4:
            store_softmax_gradients(
                upstream, probabilities, gradients, vectors, exist, length, by_vector, by_element, to_vector, to_element,
                QUARTER_STEPS, QUARTER_LANES,
            )  # fmt: skip
        elif length <= LANES * STEPS // 2:
            store_softmax_gradients(
                upstream, probabilities, gradients, vectors, exist, length, by_vector, by_element, to_vector, to_element,
                HALF_STEPS, HALF_LANES,
            )  # fmt: skip
        elif length <= LANES * STEPS:
            store_softmax_gradients(
                upstream,
                probabilities,
                gradients,
                vectors,
                exist,
                length,
                by_vector,
                by_element,
                to_vector,
                to_element,
                STEPS,
                LANES,
            )
        else:
            products = sum_of_products(
                upstream, probabilities, vectors, exist, 0, length, by_vector, by_element, to_vector, to_element, STEPS, LANES
            )  # fmt: skip
            store_gradients(
                upstream, probabilities, gradients, vectors, exist, products, 0, length, by_vector, by_element, to_vector,
                to_element, STEPS, LANES,
            )  # fmt: skip


_launch_forward = Launcher(jagged2_softmax_forward_kernel)
_launch_backward = Launcher(jagged2_softmax_backward_kernel)


def pair_softmax(x: PairInputs, o: PairOptions) -> Weights:
    """Launch `jagged2_softmax_forward_kernel`."""
    output = x.values.new_empty(*x.values.shape)
    _launch(_launch_forward, (x.values,), x, output, o.by_columns)
    return Weights(output)


def pair_softmax_backward(x: PairBackwardInputs, o: PairOptions) -> Gradient:
    """Launch `jagged2_softmax_backward_kernel`."""
    weights = x.weights.contiguous()
    output = torch.empty_like(weights)
    _launch(_launch_backward, (x.grad, weights), x, output, o.by_columns)
    return Gradient(output)


def _launch(launch, values, x, output, by_columns):
    a_offsets, b_offsets, pair_offsets = x.a_offsets, x.b_offsets, x.pair_offsets
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
    stride = values[0].stride(0)
    tile = COLUMNS if by_columns else ROWS
    # As many vectors as square blocks can have at most, and all that the list has to spare. Of others programs take several.
    programs = math.isqrt(num_pairs * batch_size) // tile.vectors + batch_size
    launch = _with_tile(launch, by_columns, tl.int32 if num_pairs * max(stride, 1) < 2**31 else tl.int64)
    launch((programs,), *values, a_offsets, b_offsets, pair_offsets, output, batch_size, num_pairs, stride)


@functools.cache
def _with_tile(launch, by_columns, index):
    tile = COLUMNS if by_columns else ROWS
    return bound(
        launch, BY_COLUMNS=by_columns, INDEX=index, VECTORS=tile.vectors, STEPS=tile.steps, LANES=tile.lanes,
        num_warps=tile.num_warps, maxnreg=tile.max_registers,
    )  # fmt: skip
