"""Softmax of tiles of vectors and its gradient: the device functions that the kernels of both softmaxes call.

Both normalise vectors of equal length inside a sample: the columns of `[L, T]`, or the rows or columns of `[La, Lb]`. A tile is
`[STEPS, VECTORS, LANES]`: `STEPS * LANES` elements of each vector. What lies side by side in memory comes last or, with one lane,
is the vectors, so that a warp's threads lie there. The fewer lanes share a vector, the fewer shuffles a sum over it takes.

Vectors that a tile holds are read once and written once; longer ones are read twice, the second time mostly from a cache. Strides
are what addresses are computed in: int32 where every element of a block is in its reach, else int64.
"""

import triton
import triton.language as tl

from jagged.ops._shared.device import exp_of_difference, rounded_product


@triton.jit
def elements_from(first, STEPS: tl.constexpr, LANES: tl.constexpr):
    """Indexes of elements, `[STEPS, 1, LANES]`."""
    return first + tl.arange(0, STEPS)[:, None, None] * LANES + tl.arange(0, LANES)[None, None, :]


@triton.jit
def places(tensor, vectors, elements, vector_stride, element_stride):
    """Pointers to a tile of `vectors` `[VECTORS]` and `elements` `[STEPS, 1, LANES]`."""
    return (tensor + vectors * vector_stride)[None, :, None] + elements * element_stride


@triton.jit
def load_tile(tensor, vectors, exist, elements, end, vector_stride, element_stride, OTHER: tl.constexpr):
    """Load a tile in float32; `OTHER` where a vector or an element does not exist."""
    mask = exist[None, :, None] & (elements < end)
    return tl.load(places(tensor, vectors, elements, vector_stride, element_stride), mask=mask, other=OTHER).to(tl.float32)


@triton.jit
def store_tile(tensor, tile, vectors, exist, elements, end, vector_stride, element_stride):
    """Store the vectors and elements of a tile that exist."""
    mask = exist[None, :, None] & (elements < end)
    tl.store(places(tensor, vectors, elements, vector_stride, element_stride), tile.to(tensor.dtype.element_ty), mask=mask)


@triton.jit
def largest_of(tile):
    """Largest element of each vector of a tile, `[VECTORS]`."""
    return tl.max(tl.max(tile, 0), 1)


@triton.jit
def sum_of(tile):
    """Sum of each vector of a tile, `[VECTORS]`."""
    return tl.sum(tl.sum(tile, 0), 1)


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
def statistics(
    values, vectors, exist, begin, end, vector_stride, element_stride, STEPS: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """Largest of the elements `begin .. end` of vectors, and sum of exponentials relative to it."""
    ACCURATE: tl.constexpr = values.dtype.element_ty == tl.float32
    largest = tl.full(vectors.shape, float("-inf"), tl.float32)
    weight = tl.zeros(vectors.shape, tl.float32)
    for first in range(begin, end, STEPS * LANES):
        elements = elements_from(first, STEPS, LANES)
        tile = load_tile(values, vectors, exist, elements, end, vector_stride, element_stride, float("-inf"))
        tile_largest = largest_of(tile)
        tile_weight = sum_of(exp_of_difference(tile - finite(tile_largest)[None, :, None], ACCURATE))
        largest, weight = merge(largest, weight, tile_largest, tile_weight, ACCURATE)
    return largest, weight


@triton.jit
def store_weights(
    values, output, vectors, exist, largest, weight, begin, end, vector_stride, element_stride, output_vector_stride,
    output_element_stride, STEPS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Write the softmax of the elements `begin .. end` of vectors whose statistics are known."""
    ACCURATE: tl.constexpr = values.dtype.element_ty == tl.float32
    shift = finite(largest)[None, :, None]
    factor = (1.0 / tl.where(exist, weight, 1.0))[None, :, None]
    for first in range(begin, end, STEPS * LANES):
        elements = elements_from(first, STEPS, LANES)
        tile = load_tile(values, vectors, exist, elements, end, vector_stride, element_stride, float("-inf"))
        tile = exp_of_difference(tile - shift, ACCURATE) * factor
        store_tile(output, tile, vectors, exist, elements, end, output_vector_stride, output_element_stride)


@triton.jit
def store_softmax(
    values, output, vectors, exist, length, vector_stride, element_stride, output_vector_stride, output_element_stride,
    STEPS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Write the softmax of vectors that a tile holds."""
    ACCURATE: tl.constexpr = values.dtype.element_ty == tl.float32
    elements = elements_from(0, STEPS, LANES)
    tile = load_tile(values, vectors, exist, elements, length, vector_stride, element_stride, float("-inf"))
    tile = exp_of_difference(tile - finite(largest_of(tile))[None, :, None], ACCURATE)
    tile *= (1.0 / tl.where(exist, sum_of(tile), 1.0))[None, :, None]
    store_tile(output, tile, vectors, exist, elements, length, output_vector_stride, output_element_stride)


@triton.jit
def sum_of_products(
    grad, weights, vectors, exist, begin, end, vector_stride, element_stride, weights_vector_stride, weights_element_stride,
    STEPS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Sum of gradient times weight over the elements `begin .. end` of vectors."""
    total = tl.zeros(vectors.shape, tl.float32)
    for first in range(begin, end, STEPS * LANES):
        elements = elements_from(first, STEPS, LANES)
        upstream = load_tile(grad, vectors, exist, elements, end, vector_stride, element_stride, 0.0)
        weight = load_tile(weights, vectors, exist, elements, end, weights_vector_stride, weights_element_stride, 0.0)
        total += sum_of(rounded_product(upstream, weight))
    return total


@triton.jit
def store_gradients(
    grad, weights, output, vectors, exist, total, begin, end, vector_stride, element_stride, weights_vector_stride,
    weights_element_stride, STEPS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Write weight * (gradient - sum of products) for the elements `begin .. end`; the output lies as the weights do."""
    for first in range(begin, end, STEPS * LANES):
        elements = elements_from(first, STEPS, LANES)
        upstream = load_tile(grad, vectors, exist, elements, end, vector_stride, element_stride, 0.0)
        weight = load_tile(weights, vectors, exist, elements, end, weights_vector_stride, weights_element_stride, 0.0)
        tile = weight * (upstream - total[None, :, None])
        store_tile(output, tile, vectors, exist, elements, end, weights_vector_stride, weights_element_stride)


@triton.jit
def store_softmax_gradients(
    grad, weights, output, vectors, exist, length, vector_stride, element_stride, weights_vector_stride, weights_element_stride,
    STEPS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Write the gradients of vectors that a tile holds."""
    elements = elements_from(0, STEPS, LANES)
    upstream = load_tile(grad, vectors, exist, elements, length, vector_stride, element_stride, 0.0)
    weight = load_tile(weights, vectors, exist, elements, length, weights_vector_stride, weights_element_stride, 0.0)
    tile = weight * (upstream - sum_of(rounded_product(upstream, weight))[None, :, None])
    store_tile(output, tile, vectors, exist, elements, length, weights_vector_stride, weights_element_stride)
