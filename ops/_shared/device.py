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
    if INTERPRETED:
        # The interpreter's product takes the bits of bfloat16 for integers; in float32 the products are the same.
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, accumulator, input_precision=PRECISION)
