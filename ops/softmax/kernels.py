"""`jagged_softmax` as Triton kernels: softmax over the rows of samples, whose columns are the vectors of a tile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged.ops._shared.device import find_segment, load_segment
from jagged.ops._shared.launch import Launcher, bound
from jagged.ops._shared.sizes import cdiv, next_power_of_2
from jagged.ops.softmax.spec import BackwardInputs, Gradient, Inputs, Options, Weights
from jagged.ops.softmax.vectors import (
    merge,
    statistics,
    store_gradients,
    store_softmax,
    store_softmax_gradients,
    store_weights,
    sum_of_products,
)

# Elements of a tile by warp: 8 a thread, with which the kernels need 40 to 80 registers; with 32 they would need all.
WARP_ELEMENTS = 256
# Below so many elements of the columns that a program takes, long samples are not split, which saves a launch.
SERIAL_ELEMENTS = 2**18
CHUNK_ELEMENTS = 2**13
# Every chunk reads what all chunks of its sample found; that stays linear in the rows by never having more chunks than this.
MAX_CHUNKS = 1024


class Configuration(NamedTuple):
    """Vectors and elements of a tile; its elements where vectors have more, taken tile by tile; how Triton runs it."""

    vectors: int
    elements: int
    long_elements: int
    num_warps: int


def softmax_configuration(total: int, batch_size: int, num_features: int) -> Configuration:
    """Choose for `jagged_softmax` from shapes alone: samples of up to twice the mean length fit into one tile."""
    vectors = min(next_power_of_2(num_features), 16)
    elements = min(max(next_power_of_2(2 * total // batch_size), 32), 8 * WARP_ELEMENTS // vectors)
    num_warps = max(vectors * elements // WARP_ELEMENTS, 4)
    return Configuration(vectors, elements, num_warps * WARP_ELEMENTS // vectors, num_warps)


@triton.jit
def own_columns(num_features, row_stride, feature_stride, BLOCK_V: tl.constexpr):
    """Return a program's columns, which of them exist, and the strides of values and of contiguous rows, in int64."""
    columns = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    strides = tl.cast(row_stride, tl.int64), tl.cast(feature_stride, tl.int64), tl.cast(num_features, tl.int64)
    return columns, columns < num_features, strides[0], strides[1], strides[2]


@triton.jit
def find_chunk(offsets, slot, num_samples, total, chunk):
    """Return start and length of a sample, the row in it where the slot's chunk begins, and the sample's first slot.

    A sample of two or more chunks owns the slots from `2 * (offsets[b] // chunk)` on: as many as it has chunks come before the
    next one's, and all before `2 * (total // chunk)`. A slot to spare gets a chunk that begins past the end of a sample.
    """
    sample = find_segment(offsets, (slot // 2 + 1).to(tl.int64) * chunk - 1, num_samples)
    start, end = load_segment(offsets, sample, total)
    length = end - start
    first_slot = 2 * (start // chunk)
    first = (slot - first_slot) * chunk
    # Only wrong offsets lead before the sample.
    first = tl.where((length > chunk) & (first >= 0), first, length)
    return start, length, first, first_slot


@triton.jit(do_not_specialize=["num_samples", "total", "chunk"])
def jagged_softmax_statistics_kernel(
    values, offsets, part_largest, part_weight, num_samples, total, chunk, num_features, row_stride, feature_stride,
    BLOCK_V: tl.constexpr, LONG_L: tl.constexpr,
):  # fmt: skip
    """Largest and sum of exponentials of each column of one chunk of a long sample."""
    slot = tl.program_id(0)
    vectors, exist, row_stride, feature_stride, _ = own_columns(num_features, row_stride, feature_stride, BLOCK_V)
    start, length, first, _ = find_chunk(offsets, slot, num_samples, total, chunk)
    if first < length:
        values += start * row_stride
        end = tl.minimum(first + chunk, length)
        largest, weight = statistics(values, vectors, exist, first, end, feature_stride, row_stride, 1, LONG_L)
        place = slot.to(tl.int64) * num_features + vectors
        tl.store(part_largest + place, largest, mask=exist)
        tl.store(part_weight + place, weight, mask=exist)


@triton.jit(do_not_specialize=["num_samples", "total", "chunk", "num_slots"])
def jagged_softmax_forward_kernel(
    values, offsets, part_largest, part_weight, output, num_samples, total, chunk, num_slots, num_features, row_stride,
    feature_stride, IS_SPLIT: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_L: tl.constexpr, LONG_L: tl.constexpr,
):  # fmt: skip
    """Softmax of some columns of one sample, or, if long samples are split, of one chunk of one."""
    ACCURATE: tl.constexpr = values.dtype.element_ty == tl.float32
    program = tl.program_id(0)
    vectors, exist, row_stride, feature_stride, width = own_columns(num_features, row_stride, feature_stride, BLOCK_V)
    sample = program
    if IS_SPLIT:
        # The long ones come first.
        if program < num_slots:
            start, length, first, first_slot = find_chunk(offsets, program, num_samples, total, chunk)
            if first < length:
                largest = tl.full([BLOCK_V], float("-inf"), tl.float32)
                weight = tl.zeros([BLOCK_V], tl.float32)
                for slot in range(first_slot, first_slot + tl.cdiv(length, chunk)):
                    place = slot * num_features + vectors
                    more_largest = tl.load(part_largest + place, mask=exist, other=0.0)
                    more_weight = tl.load(part_weight + place, mask=exist, other=0.0)
                    largest, weight = merge(largest, weight, more_largest, more_weight, ACCURATE)
                store_weights(
                    values + start * row_stride, output + start * num_features, vectors, exist, largest, weight, first,
                    tl.minimum(first + chunk, length), feature_stride, row_stride, 1, width, 1, LONG_L,
                )  # fmt: skip
        sample = tl.maximum(program - num_slots, 0)
    start, end = load_segment(offsets, sample, total)
    length = end - start
    values += start * row_stride
    output += start * num_features
    mine = length > 0
    if IS_SPLIT:
        mine = (program >= num_slots) & (length > 0) & (length <= chunk)
    if mine:
        if length <= BLOCK_L:
            store_softmax(values, output, vectors, exist, length, feature_stride, row_stride, 1, width, 1, BLOCK_L)
        else:
            largest, weight = statistics(values, vectors, exist, 0, length, feature_stride, row_stride, 1, LONG_L)
            store_weights(
                values, output, vectors, exist, largest, weight, 0, length, feature_stride, row_stride, 1, width, 1, LONG_L
            )


@triton.jit(do_not_specialize=["num_samples", "total", "chunk"])
def jagged_softmax_products_kernel(
    grad, weights, offsets, part_total, num_samples, total, chunk, num_features, row_stride, feature_stride,
    BLOCK_V: tl.constexpr, LONG_L: tl.constexpr,
):  # fmt: skip
    """Sum of gradient times weight of each column of one chunk of a long sample."""
    slot = tl.program_id(0)
    vectors, exist, row_stride, feature_stride, width = own_columns(num_features, row_stride, feature_stride, BLOCK_V)
    start, length, first, _ = find_chunk(offsets, slot, num_samples, total, chunk)
    if first < length:
        products = sum_of_products(
            grad + start * row_stride, weights + start * num_features, vectors, exist, first,
            tl.minimum(first + chunk, length), feature_stride, row_stride, 1, width, 1, LONG_L,
        )  # fmt: skip
        tl.store(part_total + slot.to(tl.int64) * num_features + vectors, products, mask=exist)


@triton.jit(do_not_specialize=["num_samples", "total", "chunk", "num_slots"])
def jagged_softmax_backward_kernel(
    grad, weights, offsets, part_total, output, num_samples, total, chunk, num_slots, num_features, row_stride,
    feature_stride, IS_SPLIT: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_L: tl.constexpr, LONG_L: tl.constexpr,
):  # fmt: skip
    """Gradients of some columns of one sample, or, if long samples are split, of one chunk of one."""
    program = tl.program_id(0)
    vectors, exist, row_stride, feature_stride, width = own_columns(num_features, row_stride, feature_stride, BLOCK_V)
    sample = program
    if IS_SPLIT:
        if program < num_slots:
            start, length, first, first_slot = find_chunk(offsets, program, num_samples, total, chunk)
            if first < length:
                products = tl.zeros([BLOCK_V], tl.float32)
                for slot in range(first_slot, first_slot + tl.cdiv(length, chunk)):
                    products += tl.load(part_total + slot * num_features + vectors, mask=exist, other=0.0)
                store_gradients(
                    grad + start * row_stride, weights + start * num_features, output + start * num_features, vectors, exist,
                    products, first, tl.minimum(first + chunk, length), feature_stride, row_stride, 1, width, 1, LONG_L,
                )  # fmt: skip
        sample = tl.maximum(program - num_slots, 0)
    start, end = load_segment(offsets, sample, total)
    length = end - start
    grad += start * row_stride
    weights += start * num_features
    output += start * num_features
    mine = length > 0
    if IS_SPLIT:
        mine = (program >= num_slots) & (length > 0) & (length <= chunk)
    if mine:
        if length <= BLOCK_L:
            store_softmax_gradients(
                grad, weights, output, vectors, exist, length, feature_stride, row_stride, 1, width, 1, BLOCK_L
            )
        else:
            products = sum_of_products(grad, weights, vectors, exist, 0, length, feature_stride, row_stride, 1, width, 1, LONG_L)
            store_gradients(
                grad, weights, output, vectors, exist, products, 0, length, feature_stride, row_stride, 1, width, 1, LONG_L
            )


_launch_statistics = Launcher(jagged_softmax_statistics_kernel)
_launch_forward = Launcher(jagged_softmax_forward_kernel)
_launch_products = Launcher(jagged_softmax_products_kernel)
_launch_backward = Launcher(jagged_softmax_backward_kernel)


@functools.cache
def _with_tile(launch: Callable[..., None], tile: Configuration, is_split: bool) -> Callable[..., None]:
    return bound(
        launch,
        IS_SPLIT=is_split,
        BLOCK_V=tile.vectors,
        BLOCK_L=tile.elements,
        LONG_L=tile.long_elements,
        num_warps=tile.num_warps,
    )


def softmax(x: Inputs, o: Options) -> Weights:
    """Launch `jagged_softmax_forward_kernel`, after `jagged_softmax_statistics_kernel` where samples may be long."""
    values, offsets = x
    output = values.new_empty(*values.shape)
    batch_size = offsets.shape[0] - 1
    if not batch_size or not values.numel():
        return Weights(output)
    offsets = offsets.contiguous()
    tile, chunk, slots = _division(values, batch_size)
    total, num_features = values.shape
    feature_tiles = cdiv(num_features, tile.vectors)
    strides = values.stride()
    largest = weight = None
    if slots:
        largest, weight = torch.empty(2, slots, num_features, dtype=torch.float32, device=values.device)
        _launch_statistics(
            (slots, feature_tiles), values, offsets, largest, weight, batch_size, total, chunk, num_features, *strides,
            BLOCK_V=tile.vectors, LONG_L=tile.long_elements, num_warps=tile.num_warps,
        )  # fmt: skip
    _with_tile(_launch_forward, tile, slots > 0)(
        (slots + batch_size, feature_tiles),
        values, offsets, largest, weight, output, batch_size, total, chunk, slots, num_features, *strides,
    )  # fmt: skip
    return Weights(output)


def softmax_backward(x: BackwardInputs, o: Options) -> Gradient:
    """Launch `jagged_softmax_backward_kernel`, after `jagged_softmax_products_kernel` where samples may be long."""
    grad, weights, offsets = x
    weights = weights.contiguous()
    output = torch.empty_like(weights)
    batch_size = offsets.shape[0] - 1
    if not batch_size or not weights.numel():
        return Gradient(output)
    offsets = offsets.contiguous()
    tile, chunk, slots = _division(weights, batch_size)
    total, num_features = weights.shape
    feature_tiles = cdiv(num_features, tile.vectors)
    strides = grad.stride()
    products = None
    if slots:
        products = torch.empty(slots, num_features, dtype=torch.float32, device=weights.device)
        _launch_products(
            (slots, feature_tiles), grad, weights, offsets, products, batch_size, total, chunk, num_features, *strides,
            BLOCK_V=tile.vectors, LONG_L=tile.long_elements, num_warps=tile.num_warps,
        )  # fmt: skip
    _with_tile(_launch_backward, tile, slots > 0)(
        (slots + batch_size, feature_tiles),
        grad, weights, offsets, products, output, batch_size, total, chunk, slots, num_features, *strides,
    )  # fmt: skip
    return Gradient(output)


def _division(values: Tensor, batch_size: int) -> tuple[Configuration, int, int]:
    """Return the tile, the rows of a chunk, and the slots for chunks: none where long samples are not split."""
    total, num_features = values.shape
    tile = softmax_configuration(total, batch_size, num_features)
    chunk = max(CHUNK_ELEMENTS // tile.vectors, next_power_of_2(cdiv(total, MAX_CHUNKS)))
    is_serial = total * tile.vectors <= SERIAL_ELEMENTS and total <= batch_size * tile.elements
    return tile, chunk, 0 if is_serial else 2 * (total // chunk)
