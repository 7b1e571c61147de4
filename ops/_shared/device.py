"""Functions that Triton kernels of several families call."""

import triton
import triton.language as tl

from jagged.ops._shared.backends import INTERPRETED as _INTERPRETED

INTERPRETED = tl.constexpr(_INTERPRETED)


# Places that one step of a search looks at: a warp's lanes, whose count of them needs no shared memory.
WAYS = tl.constexpr(32)


@triton.jit
def find_segments(segment_offsets, index, num_segments):
    """Return the segments that contain a block of indexes: for each the largest b with `segment_offsets[b] <= index`.

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
def find_segment(segment_offsets, index, num_segments, BLOCK: tl.constexpr = 0, HAS_SPARE: tl.constexpr = True):
    """Return the segment that contains a scalar `index`, as `find_segments`; with a BLOCK the one that owns tile `index`.

    Segment b then owns the tiles from `segment_offsets[b] // BLOCK + b` on, or without one to spare for each from
    `segment_offsets[b] // BLOCK` on. One step looks at 32 places at once: loads that wait for one another are what a search
    costs, and 1,024 segments need two instead of ten.
    """
    low = tl.program_id(0) * 0
    width = num_segments
    while width > 1:
        step = tl.cdiv(width, WAYS)
        place = tl.arange(0, WAYS) * step
        first = tl.load(segment_offsets + low + place, mask=place < width, other=0)
        if BLOCK:
            first = first // BLOCK + low + place if HAS_SPARE else first // BLOCK
        passed = tl.sum(((place < width) & (first <= index)).to(tl.int32), 0)
        # The first place is always passed, unless offsets are wrong; then too the search stays inside.
        passed_by = (tl.maximum(passed, 1) - 1) * step
        low += passed_by
        width = tl.minimum(step, width - passed_by)
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
def find_tile(offsets, index, num_samples, total, BLOCK: tl.constexpr, APART: tl.constexpr = False):
    """Return the sample that owns tile `index`, its first row, its length, and where in it the tile begins; all are int64.

    Sample b owns the tiles from `offsets[b] // BLOCK + b` on: enough of them and at least one, so `total // BLOCK + num_samples`
    programs serve all, without a list in memory. A tile to spare begins at the end of its sample or past it. `APART` puts the
    samples' first tiles after all others, where they are found without a search: faster where most samples have no other.
    """
    if APART:
        others = (total // BLOCK).to(tl.int32)
        sample = index - others
        if index < others:
            sample = find_segment(offsets, index, num_samples, BLOCK, False)
    else:
        sample = find_segment(offsets, index, num_samples, BLOCK)
    start, end = load_segment(offsets, sample, total)
    length = end - start
    tile = tl.where(index < others, index - start // BLOCK + 1, 0) if APART else index - start // BLOCK - sample
    # Only wrong offsets lead before the sample or far past it.
    return sample.to(tl.int64), start, length, tl.where((tile < 0) | (tile > length // BLOCK), length, tile * BLOCK)


@triton.jit
def pairs_before(a_offsets, b_offsets, sample, IS_SQUARE: tl.constexpr = False, BLOCK: tl.constexpr = 1024):
    """Return how many pairs the samples before one have, where its block of pairs begins (int64).

    Each program adds them up anew, which in a batch of few thousand samples costs less than a launch that writes them down.
    `IS_SQUARE` says that both offsets are the same, and reads them once.
    """
    pairs = tl.zeros([BLOCK], tl.int64)
    for first in range(0, sample.to(tl.int32), BLOCK):
        index = first + tl.arange(0, BLOCK)
        before = index < sample
        rows = tl.load(a_offsets + index + 1, mask=before, other=0) - tl.load(a_offsets + index, mask=before, other=0)
        columns = rows
        if not IS_SQUARE:
            columns = tl.load(b_offsets + index + 1, mask=before, other=0) - tl.load(b_offsets + index, mask=before, other=0)
        # A product of unsigned 32-bit numbers is one instruction, of 64-bit ones four.
        pairs += rows.to(tl.uint32).to(tl.int64) * columns.to(tl.uint32).to(tl.int64)
    return tl.sum(pairs, 0)


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
def load_tile(pointer, index, stride, exists, first_column, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows `index` of a matrix, `[BLOCK, BLOCK_D]` from a column on; zeros where a row or a column is not there."""
    column = first_column + tl.arange(0, BLOCK_D)
    address = pointer + index.to(tl.int64)[:, None] * stride + column[None, :]
    mask = exists[:, None]
    if WIDTH % BLOCK_D:
        mask &= (column < WIDTH)[None, :]
    return tl.load(address, mask=mask, other=0.0)


@triton.jit
def logits_of_tiles(
    left, left_index, left_stride, left_exists, right, right_index, right_stride, right_exists,
    WIDTH: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """left @ right.T, `[BLOCK_L, BLOCK_R]`, in steps of `BLOCK_K` columns, in the dtype of left."""
    logits = tl.zeros((BLOCK_L, BLOCK_R), tl.float32)
    for start in range(0, WIDTH, BLOCK_K):
        left_tile = load_tile(left, left_index, left_stride, left_exists, start, WIDTH, BLOCK_K)
        right_tile = load_tile(right, right_index, right_stride, right_exists, start, WIDTH, BLOCK_K)
        logits = dot(left_tile, tl.trans(right_tile.to(left_tile.dtype)), logits, PRECISION)
    return logits


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


@triton.jit
def mixed(x):
    """Return 32 bits of a hash of 63-bit integers, as `rounding.mixed`."""
    # In 32 bits a product is one instruction, in 64 several.
    x = (x ^ (x >> 32)).to(tl.uint32)
    x *= 0x85EBCA6B
    x ^= x >> 13
    x *= 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def rounded_at_random(new, element, step):
    """Round to bfloat16 up or down, by a number that depends on the step and on the element, as `rounding.rounded`."""
    bits = new.to(tl.uint32, bitcast=True)
    cut = (bits + (mixed(element + (step << 40)) & 0xFFFF)) & 0xFFFF0000
    # What is not finite stays as it is.
    cut = tl.where((bits & 0x7F800000) == 0x7F800000, bits, cut)
    return cut.to(tl.float32, bitcast=True).to(tl.bfloat16)
