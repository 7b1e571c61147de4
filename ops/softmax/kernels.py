"""The softmaxes as Triton kernels.

Both functions normalise vectors of equal length inside a sample's block: the columns of `[L, T]`, or the rows or columns of
`[La, Lb]`. Kernels see a tile `[vectors, elements]` with a stride for each and reduce over the elements, so that one set of
device functions serves all; which stride is 1 decides how threads lie. Vectors that a tile holds are read once and written
once; longer ones are read twice, the second time mostly from a cache.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged.ops._shared.device import exp_of_difference, find_segment, load_segment, rounded_product
from jagged.ops._shared.offsets import pair_offsets as offsets_of_pairs

# Elements of a tile by warp: 8 a thread, with which the kernels need 40 to 80 registers; with 32 they would need all.
WARP_ELEMENTS = 256
# Below so many elements of the columns that a program takes, long samples are not split, which saves a launch.
SERIAL_ELEMENTS = 2**18
CHUNK_ELEMENTS = 2**13
# Every chunk reads what all chunks of its sample found; that stays linear in the rows by never having more chunks than this.
MAX_CHUNKS = 1024
# In batches at most this large every program adds up where blocks begin, which saves PyTorch's six launches; the work of all
# programs together grows with the batch's square.
SCANNED_SAMPLES = 2048
# Pairs that a program of `jagged2_softmax` normalises, at least.
PROGRAM_PAIRS = 4096
SCAN = tl.constexpr(1024)


class Tile(NamedTuple):
    """Vectors and elements of a tile; the same for vectors of more elements, taken tile by tile; how Triton runs it."""

    vectors: int
    elements: int
    long_vectors: int
    long_elements: int
    num_warps: int


def softmax_tile(total: int, batch_size: int, num_features: int) -> Tile:
    """Choose for `jagged_softmax` from shapes alone: samples of up to twice the mean length fit into one tile."""
    vectors = min(triton.next_power_of_2(num_features), 16)
    elements = min(max(triton.next_power_of_2(2 * total // batch_size), 32), 8 * WARP_ELEMENTS // vectors)
    num_warps = max(vectors * elements // WARP_ELEMENTS, 4)
    return Tile(vectors, elements, vectors, num_warps * WARP_ELEMENTS // vectors, num_warps)


def softmax2_tile(num_pairs: int, batch_size: int, by_columns: bool) -> Tile:
    """Choose for `jagged2_softmax` from shapes alone, as if blocks were square. Neighbours in memory are columns."""
    elements = max(triton.next_power_of_2(2 * math.isqrt(num_pairs // batch_size)), 32)
    if by_columns:
        elements = min(elements, 128)
        return Tile(16, elements, 16, elements, 16 * elements // WARP_ELEMENTS)
    elements = min(elements, 4 * WARP_ELEMENTS)
    return Tile(4 * WARP_ELEMENTS // elements, elements, 1, 2 * WARP_ELEMENTS, 4)


@triton.jit
def places(tensor, vectors, elements, vector_stride, element_stride):
    """Pointers to a tile `[vectors, elements]`."""
    return tensor + vectors.to(tl.int64)[:, None] * vector_stride + elements.to(tl.int64)[None, :] * element_stride


@triton.jit
def finite(largest):
    """What is subtracted before exp: 0 for a vector of -inf alone, which ends as 0 / 0 but must not spoil the rest of a sum."""
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def merge(largest, weight, more_largest, more_weight, ACCURATE: tl.constexpr):
    """Join the statistics of two parts of vectors: the largest element, and the sum of exponentials relative to it."""
    now = tl.maximum(largest, more_largest)
    shift = finite(now)
    weight = weight * exp_of_difference(largest - shift, ACCURATE)
    return now, weight + more_weight * exp_of_difference(more_largest - shift, ACCURATE)


@triton.jit
def statistics(values, vectors, exist, begin, end, vector_stride, element_stride, BLOCK: tl.constexpr):
    """Largest of the elements `begin .. end` of vectors, and sum of exponentials relative to it."""
    ACCURATE: tl.constexpr = values.dtype.element_ty == tl.float32
    largest = tl.full(vectors.shape, float("-inf"), tl.float32)
    weight = tl.zeros(vectors.shape, tl.float32)
    for first in range(begin, end, BLOCK):
        elements = first + tl.arange(0, BLOCK)
        mask = exist[:, None] & (elements < end)[None, :]
        tile = tl.load(places(values, vectors, elements, vector_stride, element_stride), mask=mask, other=float("-inf"))
        tile = tile.to(tl.float32)
        tile_largest = tl.max(tile, 1)
        tile_weight = tl.sum(exp_of_difference(tile - finite(tile_largest)[:, None], ACCURATE), 1)
        largest, weight = merge(largest, weight, tile_largest, tile_weight, ACCURATE)
    return largest, weight


@triton.jit
def store_weights(
    values, output, vectors, exist, largest, weight, begin, end, vector_stride, element_stride, output_vector_stride,
    output_element_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the softmax of the elements `begin .. end` of vectors whose statistics are known."""
    ACCURATE: tl.constexpr = values.dtype.element_ty == tl.float32
    shift = finite(largest)[:, None]
    factor = (1.0 / tl.where(exist, weight, 1.0))[:, None]
    for first in range(begin, end, BLOCK):
        elements = first + tl.arange(0, BLOCK)
        mask = exist[:, None] & (elements < end)[None, :]
        tile = tl.load(places(values, vectors, elements, vector_stride, element_stride), mask=mask, other=float("-inf"))
        tile = exp_of_difference(tile.to(tl.float32) - shift, ACCURATE) * factor
        target = places(output, vectors, elements, output_vector_stride, output_element_stride)
        tl.store(target, tile.to(output.dtype.element_ty), mask=mask)


@triton.jit
def softmax_of_tile(
    values, output, vectors, exist, length, vector_stride, element_stride, output_vector_stride, output_element_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Softmax of vectors that a tile holds."""
    ACCURATE: tl.constexpr = values.dtype.element_ty == tl.float32
    elements = tl.arange(0, BLOCK)
    mask = exist[:, None] & (elements < length)[None, :]
    tile = tl.load(places(values, vectors, elements, vector_stride, element_stride), mask=mask, other=float("-inf"))
    tile = tile.to(tl.float32)
    tile = exp_of_difference(tile - finite(tl.max(tile, 1))[:, None], ACCURATE)
    tile *= (1.0 / tl.where(exist, tl.sum(tile, 1), 1.0))[:, None]
    target = places(output, vectors, elements, output_vector_stride, output_element_stride)
    tl.store(target, tile.to(output.dtype.element_ty), mask=mask)


@triton.jit
def sum_of_products(
    grad, weights, vectors, exist, begin, end, vector_stride, element_stride, weights_vector_stride, weights_element_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum of gradient times weight over the elements `begin .. end` of vectors."""
    total = tl.zeros(vectors.shape, tl.float32)
    for first in range(begin, end, BLOCK):
        elements = first + tl.arange(0, BLOCK)
        mask = exist[:, None] & (elements < end)[None, :]
        upstream = tl.load(places(grad, vectors, elements, vector_stride, element_stride), mask=mask, other=0.0)
        weight = tl.load(places(weights, vectors, elements, weights_vector_stride, weights_element_stride), mask=mask, other=0.0)
        total += tl.sum(rounded_product(upstream, weight), 1)
    return total


@triton.jit
def store_gradients(
    grad, weights, output, vectors, exist, total, begin, end, vector_stride, element_stride, weights_vector_stride,
    weights_element_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write weight * (gradient - sum of products) for the elements `begin .. end`; the output lies as the weights do."""
    for first in range(begin, end, BLOCK):
        elements = first + tl.arange(0, BLOCK)
        mask = exist[:, None] & (elements < end)[None, :]
        upstream = tl.load(places(grad, vectors, elements, vector_stride, element_stride), mask=mask, other=0.0).to(tl.float32)
        weight = tl.load(places(weights, vectors, elements, weights_vector_stride, weights_element_stride), mask=mask, other=0.0)
        tile = weight.to(tl.float32) * (upstream - total[:, None])
        target = places(output, vectors, elements, weights_vector_stride, weights_element_stride)
        tl.store(target, tile.to(output.dtype.element_ty), mask=mask)


@triton.jit
def gradients_of_tile(
    grad, weights, output, vectors, exist, length, vector_stride, element_stride, weights_vector_stride, weights_element_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of vectors that a tile holds."""
    elements = tl.arange(0, BLOCK)
    mask = exist[:, None] & (elements < length)[None, :]
    upstream = tl.load(places(grad, vectors, elements, vector_stride, element_stride), mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(places(weights, vectors, elements, weights_vector_stride, weights_element_stride), mask=mask, other=0.0)
    weight = weight.to(tl.float32)
    tile = weight * (upstream - tl.sum(rounded_product(upstream, weight), 1)[:, None])
    target = places(output, vectors, elements, weights_vector_stride, weights_element_stride)
    tl.store(target, tile.to(output.dtype.element_ty), mask=mask)


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
    vectors = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    exist = vectors < num_features
    start, length, first, _ = find_chunk(offsets, slot, num_samples, total, chunk)
    if first < length:
        values += start * row_stride
        end = tl.minimum(first + chunk, length)
        largest, weight = statistics(values, vectors, exist, first, end, feature_stride, row_stride, LONG_L)
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
    vectors = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    exist = vectors < num_features
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
                    tl.minimum(first + chunk, length), feature_stride, row_stride, 1, num_features, LONG_L,
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
            softmax_of_tile(values, output, vectors, exist, length, feature_stride, row_stride, 1, num_features, BLOCK_L)
        else:
            largest, weight = statistics(values, vectors, exist, 0, length, feature_stride, row_stride, LONG_L)
            store_weights(
                values, output, vectors, exist, largest, weight, 0, length, feature_stride, row_stride, 1, num_features, LONG_L
            )


@triton.jit(do_not_specialize=["num_samples", "total", "chunk"])
def jagged_softmax_products_kernel(
    grad, weights, offsets, part_total, num_samples, total, chunk, num_features, row_stride, feature_stride,
    BLOCK_V: tl.constexpr, LONG_L: tl.constexpr,
):  # fmt: skip
    """Sum of gradient times weight of each column of one chunk of a long sample."""
    slot = tl.program_id(0)
    vectors = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    exist = vectors < num_features
    start, length, first, _ = find_chunk(offsets, slot, num_samples, total, chunk)
    if first < length:
        products = sum_of_products(
            grad + start * row_stride, weights + start * num_features, vectors, exist, first,
            tl.minimum(first + chunk, length), feature_stride, row_stride, 1, num_features, LONG_L,
        )  # fmt: skip
        tl.store(part_total + slot.to(tl.int64) * num_features + vectors, products, mask=exist)


@triton.jit(do_not_specialize=["num_samples", "total", "chunk", "num_slots"])
def jagged_softmax_backward_kernel(
    grad, weights, offsets, part_total, output, num_samples, total, chunk, num_slots, num_features, row_stride,
    feature_stride, IS_SPLIT: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_L: tl.constexpr, LONG_L: tl.constexpr,
):  # fmt: skip
    """Gradients of some columns of one sample, or, if long samples are split, of one chunk of one."""
    program = tl.program_id(0)
    vectors = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    exist = vectors < num_features
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
                    products, first, tl.minimum(first + chunk, length), feature_stride, row_stride, 1, num_features, LONG_L,
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
            gradients_of_tile(grad, weights, output, vectors, exist, length, feature_stride, row_stride, 1, num_features, BLOCK_L)
        else:
            products = sum_of_products(
                grad, weights, vectors, exist, 0, length, feature_stride, row_stride, 1, num_features, LONG_L
            )
            store_gradients(
                grad, weights, output, vectors, exist, products, 0, length, feature_stride, row_stride, 1, num_features, LONG_L
            )


@triton.jit
def scan_areas(a_offsets, b_offsets, first, num_samples):
    """Return sample indexes `[SCAN]` from `first` on and the running sum (int64) of their blocks' areas."""
    index = first + tl.arange(0, SCAN)
    exists = index < num_samples
    rows = tl.load(a_offsets + index + 1, mask=exists, other=0) - tl.load(a_offsets + index, mask=exists, other=0)
    columns = tl.load(b_offsets + index + 1, mask=exists, other=0) - tl.load(b_offsets + index, mask=exists, other=0)
    return index, tl.cumsum(rows.to(tl.int64) * columns.to(tl.int64), 0)


@triton.jit
def find_block(a_offsets, b_offsets, pair_offsets, num_samples, num_pairs, QUANTUM: tl.constexpr):
    """Return where this program's block begins, its rows and columns (int64), and the program's place among the block's.

    Sample b owns the programs from `pair_offsets[b] // QUANTUM + b` on; without pair offsets these are added up here.
    """
    program = tl.program_id(0)
    if pair_offsets is None:
        sample = program * 0
        start = tl.zeros([], tl.int64)
        before = tl.zeros([], tl.int64)
        for first in range(0, num_samples, SCAN):
            index, ends = scan_areas(a_offsets, b_offsets, first, num_samples)
            ends += before
            passed = (index + 1 < num_samples) & (ends // QUANTUM + index + 1 <= program)
            sample += tl.sum(passed.to(tl.int32), 0)
            start = tl.maximum(start, tl.max(tl.where(passed, ends, 0), 0))
            before = tl.max(ends, 0)
    else:
        sample = program * 0
        high = num_samples
        width = num_samples
        while width > 1:
            middle = (sample + high) // 2
            right = tl.load(pair_offsets + middle) // QUANTUM + middle <= program
            sample = tl.where(right, middle, sample)
            high = tl.where(right, high, middle)
            width = (width + 1) // 2
        start = tl.load(pair_offsets + sample).to(tl.int64)
    place = program - start // QUANTUM - sample
    num_pairs = num_pairs.to(tl.int64)
    rows = tl.load(a_offsets + sample + 1).to(tl.int64) - tl.load(a_offsets + sample)
    columns = tl.load(b_offsets + sample + 1).to(tl.int64) - tl.load(b_offsets + sample)
    # Only wrong offsets make a difference here: whatever they say, the block lies inside the scores.
    start = tl.minimum(tl.maximum(start, 0), num_pairs)
    left = num_pairs - start
    rows = tl.minimum(tl.maximum(rows, 0), left)
    columns = tl.minimum(tl.maximum(columns, 0), left)
    if rows * columns > left:
        rows = left // columns
    return start, rows, columns, place


@triton.jit
def own_vectors(place, num_vectors, length, BLOCK_V: tl.constexpr, QUANTUM: tl.constexpr):
    """Return the first vector of a program and the one after its last: whole tiles of vectors, `QUANTUM` pairs or more.

    So a block of n pairs needs no more than `n // QUANTUM + 1` programs, which is what it owns.
    """
    held = tl.minimum(tl.maximum(length, 1), QUANTUM).to(tl.int32)
    own = BLOCK_V * tl.cdiv(QUANTUM, held * BLOCK_V)
    first = place * own
    # Only wrong offsets lead before the block.
    first = tl.where((first < 0) | (length == 0), num_vectors, first)
    return first, tl.minimum(first + own, num_vectors)


@triton.jit(do_not_specialize=["num_samples", "num_pairs"])
def jagged2_softmax_forward_kernel(
    scores, a_offsets, b_offsets, pair_offsets, output, num_samples, num_pairs, stride,
    BY_COLUMNS: tl.constexpr, QUANTUM: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_L: tl.constexpr,
    LONG_V: tl.constexpr, LONG_L: tl.constexpr,
):  # fmt: skip
    """Softmax of some rows, or columns, of one block."""
    start, rows, columns, place = find_block(a_offsets, b_offsets, pair_offsets, num_samples, num_pairs, QUANTUM)
    scores += start * stride
    output += start
    if BY_COLUMNS:
        count, length = columns, rows
        vector_stride, element_stride, output_vector, output_element = stride, columns * stride, 1, columns
    else:
        count, length = rows, columns
        vector_stride, element_stride, output_vector, output_element = columns * stride, stride, columns, 1
    if length <= BLOCK_L:
        begin, end = own_vectors(place, count, length, BLOCK_V, QUANTUM)
        for first in range(begin, end, BLOCK_V):
            vectors = first + tl.arange(0, BLOCK_V)
            softmax_of_tile(
                scores, output, vectors, vectors < end, length, vector_stride, element_stride, output_vector, output_element,
                BLOCK_L,
            )  # fmt: skip
    else:
        begin, end = own_vectors(place, count, length, LONG_V, QUANTUM)
        for first in range(begin, end, LONG_V):
            vectors = first + tl.arange(0, LONG_V)
            exist = vectors < end
            largest, weight = statistics(scores, vectors, exist, 0, length, vector_stride, element_stride, LONG_L)
            store_weights(
                scores, output, vectors, exist, largest, weight, 0, length, vector_stride, element_stride, output_vector,
                output_element, LONG_L,
            )  # fmt: skip


@triton.jit(do_not_specialize=["num_samples", "num_pairs"])
def jagged2_softmax_backward_kernel(
    grad, weights, a_offsets, b_offsets, pair_offsets, output, num_samples, num_pairs, stride,
    BY_COLUMNS: tl.constexpr, QUANTUM: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_L: tl.constexpr,
    LONG_V: tl.constexpr, LONG_L: tl.constexpr,
):  # fmt: skip
    """Gradients of some rows, or columns, of one block."""
    start, rows, columns, place = find_block(a_offsets, b_offsets, pair_offsets, num_samples, num_pairs, QUANTUM)
    grad += start * stride
    weights += start
    output += start
    if BY_COLUMNS:
        count, length = columns, rows
        vector_stride, element_stride, weights_vector, weights_element = stride, columns * stride, 1, columns
    else:
        count, length = rows, columns
        vector_stride, element_stride, weights_vector, weights_element = columns * stride, stride, columns, 1
    if length <= BLOCK_L:
        begin, end = own_vectors(place, count, length, BLOCK_V, QUANTUM)
        for first in range(begin, end, BLOCK_V):
            vectors = first + tl.arange(0, BLOCK_V)
            gradients_of_tile(
                grad, weights, output, vectors, vectors < end, length, vector_stride, element_stride, weights_vector,
                weights_element, BLOCK_L,
            )  # fmt: skip
    else:
        begin, end = own_vectors(place, count, length, LONG_V, QUANTUM)
        for first in range(begin, end, LONG_V):
            vectors = first + tl.arange(0, LONG_V)
            exist = vectors < end
            products = sum_of_products(
                grad, weights, vectors, exist, 0, length, vector_stride, element_stride, weights_vector, weights_element, LONG_L
            )
            store_gradients(
                grad, weights, output, vectors, exist, products, 0, length, vector_stride, element_stride, weights_vector,
                weights_element, LONG_L,
            )  # fmt: skip


def jagged_softmax_forward(values: Tensor, offsets: Tensor) -> Tensor:
    """Launch `jagged_softmax_forward_kernel`, after `jagged_softmax_statistics_kernel` where samples may be long: `[S, T]`."""
    output = torch.empty(values.shape, dtype=values.dtype, device=values.device)
    batch_size = offsets.shape[0] - 1
    if not batch_size or not values.numel():
        return output
    tile, chunk, slots = _division(values, batch_size)
    total, num_features = values.shape
    feature_tiles = triton.cdiv(num_features, tile.vectors)
    strides = values.stride()
    largest = weight = None
    with torch.cuda.device_of(values):
        if slots:
            largest, weight = torch.empty(2, slots, num_features, dtype=torch.float32, device=values.device)
            jagged_softmax_statistics_kernel[(slots, feature_tiles)](
                values, offsets, largest, weight, batch_size, total, chunk, num_features, *strides,
                BLOCK_V=tile.vectors, LONG_L=tile.long_elements, num_warps=tile.num_warps,
            )  # fmt: skip
        jagged_softmax_forward_kernel[(slots + batch_size, feature_tiles)](
            values, offsets, largest, weight, output, batch_size, total, chunk, slots, num_features, *strides,
            IS_SPLIT=slots > 0, BLOCK_V=tile.vectors, BLOCK_L=tile.elements, LONG_L=tile.long_elements, num_warps=tile.num_warps,
        )  # fmt: skip
    return output


def jagged_softmax_backward(grad: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """Launch `jagged_softmax_backward_kernel`, after `jagged_softmax_products_kernel` where samples may be long: `[S, T]`."""
    weights = weights.contiguous()
    output = torch.empty_like(weights)
    batch_size = offsets.shape[0] - 1
    if not batch_size or not weights.numel():
        return output
    tile, chunk, slots = _division(weights, batch_size)
    total, num_features = weights.shape
    feature_tiles = triton.cdiv(num_features, tile.vectors)
    strides = grad.stride()
    products = None
    with torch.cuda.device_of(weights):
        if slots:
            products = torch.empty(slots, num_features, dtype=torch.float32, device=weights.device)
            jagged_softmax_products_kernel[(slots, feature_tiles)](
                grad, weights, offsets, products, batch_size, total, chunk, num_features, *strides,
                BLOCK_V=tile.vectors, LONG_L=tile.long_elements, num_warps=tile.num_warps,
            )  # fmt: skip
        jagged_softmax_backward_kernel[(slots + batch_size, feature_tiles)](
            grad, weights, offsets, products, output, batch_size, total, chunk, slots, num_features, *strides,
            IS_SPLIT=slots > 0, BLOCK_V=tile.vectors, BLOCK_L=tile.elements, LONG_L=tile.long_elements, num_warps=tile.num_warps,
        )  # fmt: skip
    return output


def _division(values: Tensor, batch_size: int) -> tuple[Tile, int, int]:
    """Return the tile, the rows of a chunk, and the slots for chunks: none where long samples are not split."""
    total, num_features = values.shape
    tile = softmax_tile(total, batch_size, num_features)
    chunk = max(CHUNK_ELEMENTS // tile.vectors, triton.next_power_of_2(triton.cdiv(total, MAX_CHUNKS)))
    is_serial = total * tile.vectors <= SERIAL_ELEMENTS and total <= batch_size * tile.elements
    return tile, chunk, 0 if is_serial else 2 * (total // chunk)


def jagged2_softmax_forward(
    scores: Tensor, a_offsets: Tensor, b_offsets: Tensor | None, pair_offsets: Tensor | None, by_columns: bool
) -> Tensor:
    """Launch `jagged2_softmax_forward_kernel`: `[sum La_i * Lb_i]`."""
    output = torch.empty(scores.shape, dtype=scores.dtype, device=scores.device)
    if scores.shape[0] and a_offsets.shape[0] > 1:
        with torch.cuda.device_of(scores):
            _launch2(jagged2_softmax_forward_kernel, (scores,), a_offsets, b_offsets, pair_offsets, output, by_columns)
    return output


def jagged2_softmax_backward(
    grad: Tensor, weights: Tensor, a_offsets: Tensor, b_offsets: Tensor | None, pair_offsets: Tensor | None, by_columns: bool
) -> Tensor:
    """Launch `jagged2_softmax_backward_kernel`: `[sum La_i * Lb_i]`."""
    weights = weights.contiguous()
    output = torch.empty_like(weights)
    if weights.shape[0] and a_offsets.shape[0] > 1:
        with torch.cuda.device_of(weights):
            _launch2(jagged2_softmax_backward_kernel, (grad, weights), a_offsets, b_offsets, pair_offsets, output, by_columns)
    return output


def _launch2(kernel, inputs, a_offsets, b_offsets, pair_offsets, output, by_columns):
    batch_size, num_pairs = a_offsets.shape[0] - 1, output.shape[0]
    b_offsets = a_offsets if b_offsets is None else b_offsets
    if pair_offsets is None and batch_size > SCANNED_SAMPLES:
        pair_offsets = offsets_of_pairs(a_offsets, b_offsets)
    tile = softmax2_tile(num_pairs, batch_size, by_columns)
    kernel[(num_pairs // PROGRAM_PAIRS + batch_size,)](
        *inputs, a_offsets, b_offsets, pair_offsets, output, batch_size, num_pairs, inputs[0].stride(0),
        BY_COLUMNS=by_columns, QUANTUM=PROGRAM_PAIRS, BLOCK_V=tile.vectors, BLOCK_L=tile.elements,
        LONG_V=tile.long_vectors, LONG_L=tile.long_elements, num_warps=tile.num_warps,
    )  # fmt: skip
