"""Functions that Triton kernels of several families call."""

import triton
import triton.language as tl

from jagged.ops._shared.registration import INTERPRETED as _INTERPRETED

INTERPRETED = tl.constexpr(_INTERPRETED)


@triton.jit
def find_segment(segment_offsets, index, num_segments):
    """Return the segment that contains `index`: the largest b with `segment_offsets[b] <= index`. Scalar or a block.

    Empty segments are passed over. `index` must lie below the last offset.
    """
    low = tl.zeros_like(index)
    high = tl.zeros_like(index) + num_segments
    # Invariant: segment_offsets[low] <= index < segment_offsets[high]; the count of steps does not depend on the data.
    width = num_segments
    while width > 1:
        middle = (low + high) // 2
        right = tl.load(segment_offsets + middle) <= index
        low = tl.where(right, middle, low)
        high = tl.where(right, high, middle)
        width = (width + 1) // 2
    return low


@triton.jit
def load_segment(offsets, segment, total):
    """Return start and end row (int64) of a segment, held inside `[0, total]` whatever the offsets say."""
    total = total.to(tl.int64)
    start = tl.load(offsets + segment).to(tl.int64)
    end = tl.load(offsets + segment + 1).to(tl.int64)
    start = tl.minimum(tl.maximum(start, 0), total)
    end = tl.minimum(tl.maximum(end, start), total)
    return start, end


@triton.jit
def dot(left, right, accumulator, PRECISION: tl.constexpr):
    """Return `left @ right`, added to `accumulator` unless that is None, in float32."""
    ACCURATE: tl.constexpr = left.dtype == tl.float32 and PRECISION == "ieee"
    if INTERPRETED:
        # The interpreter's product takes the bits of bfloat16 for integers; in float32 the products are the same.
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    if accumulator is not None and ACCURATE:
        # A sum of tiles' sums errs less than one long sum. An addition would be folded into the product, hence the fma.
        one = tl.full(accumulator.shape, 1.0, tl.float32)
        return tl.fma(accumulator, one, tl.dot(left, right, input_precision=PRECISION))
    return tl.dot(left, right, accumulator, input_precision=PRECISION)


@triton.jit
def rounded_product(left, right):
    """Return `left * right` in float32, rounded before anything is added to it; for sums over a dimension.

    A product that is contracted into the sum rounds once in the thread that holds it and twice in the others, so that threads
    with copies of the same sum differ in the last bit, and what is stored depends on which of them comes last.
    """
    # An fma is not contracted again, and its sum with 0 is not folded away because of the zeros' signs.
    return tl.fma(left.to(tl.float32), right.to(tl.float32), tl.zeros(left.shape, tl.float32))


@triton.jit
def exp_of_difference(difference, ACCURATE: tl.constexpr):
    """e to the power of a difference that is not far above 0, as softmax needs it.

    `ACCURATE` is for float32 inputs: the argument is reduced to a power of 2 and a remainder of at most ln(2) / 2 before it meets
    the fast instruction, so that the product with log2(e) adds no error that grows with the argument (Cody and Waite's way).
    Inputs of 16 bits carry larger errors of their own.
    """
    LOG2_E: tl.constexpr = 1.4426950408889634
    # ln(2) in two parts; the product of the first with a whole number below 2^14 is exact.
    LN_2_HIGH: tl.constexpr = 0.693359375
    LN_2_LOW: tl.constexpr = -2.12194440e-4
    if ACCURATE:
        # Below -104 the result is 0; NaN stays NaN.
        difference = tl.where(difference < -104.0, -104.0, difference)
        whole = tl.floor(difference * LOG2_E + 0.5)
        remainder = difference - whole * LN_2_HIGH - whole * LN_2_LOW
        return tl.exp2(remainder * LOG2_E) * tl.exp2(whole)
    return tl.exp2(difference * LOG2_E)
