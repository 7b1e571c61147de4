"""Softmax of tiles of vectors and its gradient: the device functions that the kernels of both softmaxes call.

Both normalise vectors of equal length inside a sample: the columns of `[L, T]`, or the rows or columns of `[La, Lb]`. A tile is
STEPS blocks `[VECTORS, LANES]` side by side: `STEPS * LANES` elements of each vector. Where elements lie side by side in memory,
a few lanes share a vector and take several steps, so that the sum over it takes few shuffles and no other warp; a single block of
that width would be spread over all warps. Where vectors lie side by side there is one block, and one step.

Vectors that a tile holds are read once and written once; longer ones are read twice, the second time mostly from a cache. Strides
are what addresses are computed in: int32 where every element of a block is in its reach, else int64.
"""

import triton
import triton.language as tl

from jagged.ops._shared.device import exp_of_difference, rounded_product


@triton.jit
def load_vectors(
    tensor, vectors, exist, first, end, vector_stride, element_stride, OTHER: tl.constexpr, STEPS: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Load the blocks of a tile from element `first` on, in float32; `OTHER` where a vector or an element does not exist."""
    blocks = ()
    for step in tl.static_range(STEPS):
        elements = first + step * LANES + tl.arange(0, LANES)
        places = tensor + (vectors * vector_stride)[:, None] + (elements * element_stride)[None, :]
        mask = exist[:, None] & (elements < end)[None, :]
        blocks += (tl.load(places, mask=mask, other=OTHER).to(tl.float32),)  # type: ignore[assignment]
    return blocks


@triton.jit
def store_vectors(
    tensor, blocks, vectors, exist, first, end, vector_stride, element_stride, STEPS: tl.constexpr, LANES: tl.constexpr
):
    """Store the vectors and elements of a tile that exist."""
    for step in tl.static_range(STEPS):
        elements = first + step * LANES + tl.arange(0, LANES)
        places = tensor + (vectors * vector_stride)[:, None] + (elements * element_stride)[None, :]
        tl.store(places, blocks[step].to(tensor.dtype.element_ty), mask=exist[:, None] & (elements < end)[None, :])


@triton.jit
def largest_of(blocks, STEPS: tl.constexpr):
    """Largest element of each vector of a tile, `[VECTORS]`."""
    largest = blocks[0]
    for step in tl.static_range(1, STEPS):
        largest = tl.maximum(largest, blocks[step])
    return tl.max(largest, 1)


@triton.jit
def sum_of(blocks, STEPS: tl.constexpr):
    """Sum of each vector of a tile, `[VECTORS]`."""
    total = blocks[0]
    for step in tl.static_range(1, STEPS):
        total += blocks[step]
    return tl.sum(total, 1)


@triton.jit
def weights_of(blocks, shift, ACCURATE: tl.constexpr, STEPS: tl.constexpr):
    """Exponentials of a tile's elements relative to `shift` `[VECTORS]`."""
    weights = ()
    for step in tl.static_range(STEPS):
        weights += (exp_of_difference(blocks[step] - shift[:, None], ACCURATE),)  # type: ignore[assignment]
    return weights


@triton.jit
def scaled(blocks, factor, STEPS: tl.constexpr):
    """A tile times a factor `[VECTORS]`."""
    products = ()
    for step in tl.static_range(STEPS):
        products += (blocks[step] * factor[:, None],)  # type: ignore[assignment]
    return products


@triton.jit
def products_of(grads, weights, STEPS: tl.constexpr):
    """Sum of gradient times weight of each vector of a tile, `[VECTORS]`."""
    products = ()
    for step in tl.static_range(STEPS):
        products += (rounded_product(grads[step], weights[step]),)  # type: ignore[assignment]
    return sum_of(products, STEPS)


@triton.jit
def gradients_of(grads, weights, total, STEPS: tl.constexpr):
    """weight * (gradient - sum of products) of a tile's elements."""
    gradients = ()
    for step in tl.static_range(STEPS):
        gradients += (weights[step] * (grads[step] - total[:, None]),)  # type: ignore[assignment]
    return gradients


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
        tile = load_vectors(values, vectors, exist, first, end, vector_stride, element_stride, float("-inf"), STEPS, LANES)
        tile_largest = largest_of(tile, STEPS)
        tile_weight = sum_of(weights_of(tile, finite(tile_largest), ACCURATE, STEPS), STEPS)
        largest, weight = merge(largest, weight, tile_largest, tile_weight, ACCURATE)
    return largest, weight


@triton.jit
def store_weights(
    values, output, vectors, exist, largest, weight, begin, end, vector_stride, element_stride, output_vector_stride,
    output_element_stride, STEPS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Write the softmax of the elements `begin .. end` of vectors whose statistics are known."""
    ACCURATE: tl.constexpr = values.dtype.element_ty == tl.float32
    factor = 1.0 / tl.where(exist, weight, 1.0)
    for first in range(begin, end, STEPS * LANES):
        tile = load_vectors(values, vectors, exist, first, end, vector_stride, element_stride, float("-inf"), STEPS, LANES)
        tile = scaled(weights_of(tile, finite(largest), ACCURATE, STEPS), factor, STEPS)
        store_vectors(output, tile, vectors, exist, first, end, output_vector_stride, output_element_stride, STEPS, LANES)


@triton.jit
def store_softmax(
    values, output, vectors, exist, length, vector_stride, element_stride, output_vector_stride, output_element_stride,
    STEPS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Write the softmax of vectors that a tile holds."""
    ACCURATE: tl.constexpr = values.dtype.element_ty == tl.float32
    tile = load_vectors(values, vectors, exist, 0, length, vector_stride, element_stride, float("-inf"), STEPS, LANES)
    weights = weights_of(tile, finite(largest_of(tile, STEPS)), ACCURATE, STEPS)
    weights = scaled(weights, 1.0 / tl.where(exist, sum_of(weights, STEPS), 1.0), STEPS)
    store_vectors(output, weights, vectors, exist, 0, length, output_vector_stride, output_element_stride, STEPS, LANES)


@triton.jit
def sum_of_products(
    grad, weights, vectors, exist, begin, end, vector_stride, element_stride, weights_vector_stride, weights_element_stride,
    STEPS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Sum of gradient times weight over the elements `begin .. end` of vectors."""
    total = tl.zeros(vectors.shape, tl.float32)
    for first in range(begin, end, STEPS * LANES):
        upstream = load_vectors(grad, vectors, exist, first, end, vector_stride, element_stride, 0.0, STEPS, LANES)
        weight = load_vectors(
            weights, vectors, exist, first, end, weights_vector_stride, weights_element_stride, 0.0, STEPS, LANES
        )  # fmt: skip
        total += products_of(upstream, weight, STEPS)
    return total


@triton.jit
def store_gradients(
    grad, weights, output, vectors, exist, total, begin, end, vector_stride, element_stride, weights_vector_stride,
    weights_element_stride, STEPS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Write the gradients of the elements `begin .. end`, whose sums of products are known; the output lies as the weights do."""
    for first in range(begin, end, STEPS * LANES):
        upstream = load_vectors(grad, vectors, exist, first, end, vector_stride, element_stride, 0.0, STEPS, LANES)
        weight = load_vectors(
            weights, vectors, exist, first, end, weights_vector_stride, weights_element_stride, 0.0, STEPS, LANES
        )  # fmt: skip
        tile = gradients_of(upstream, weight, total, STEPS)
        store_vectors(output, tile, vectors, exist, first, end, weights_vector_stride, weights_element_stride, STEPS, LANES)


@triton.jit
def store_softmax_gradients(
    grad, weights, output, vectors, exist, length, vector_stride, element_stride, weights_vector_stride, weights_element_stride,
    STEPS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Write the gradients of vectors that a tile holds."""
    upstream = load_vectors(grad, vectors, exist, 0, length, vector_stride, element_stride, 0.0, STEPS, LANES)
    weight = load_vectors(weights, vectors, exist, 0, length, weights_vector_stride, weights_element_stride, 0.0, STEPS, LANES)
    tile = gradients_of(upstream, weight, products_of(upstream, weight, STEPS), STEPS)
    store_vectors(output, tile, vectors, exist, 0, length, weights_vector_stride, weights_element_stride, STEPS, LANES)
