"""Gradients of the biases, which the kernel that owns queries sums up over all pairs of queries and keys.

Sums over many programs must not depend on their order: those of a tile are formed in float32, then added to memory
exactly.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from jagged.ops._shared.device import INTERPRETED
from jagged.ops.attention.triton.biases import (
    FIRST_BUCKET,
    FLOAT_BUCKETS,
    HAS_PTX,
    bits_of_time,
    bucket_range,
    find_pairs,
    is_far,
)

# Rows of which gradients of tables are summed together: with most layouts of scores one warp has all of them.
BAND = tl.constexpr(16)
# Lanes of a warp: as many sums along diagonals as a band has in one tensor.
LANES = tl.constexpr(32)
# Most copies of a table's sums, which programs take in turn: atomic additions to one address come one after the other.
MOST_COPIES = 8
# Buckets of a tile from which their sums are no longer formed one after the other.
FEW = tl.constexpr(4)
# Exponents of a float32 in eights, and one more.
BINS = tl.constexpr(33)


class GradientNumbers(NamedTuple):
    """Strides of the tables' bins, and where the gradients of a sample's pairs begin and how they lie."""

    relative_stride: Any
    time_stride: Any
    first_pair: Any
    head_stride: Any
    row_stride: Any


class BiasGradients(NamedTuple):
    """Where gradients of biases go: of tables as `add_exactly` has them, of pairs as they are."""

    relative: Any
    of_time: Any
    pairs: Any
    numbers: Any


@triton.jit
def find_gradients(grad_bias, bias_offsets, sample, max_distance, num_buckets, rows, keys):
    """Return the numbers of a sample's `BiasGradients`; those of pairs lie as contiguous biases do."""
    num_heads = tl.num_programs(1)
    head_stride = rows.to(tl.int64) * keys
    first_pair, row_stride, _, _ = find_pairs(grad_bias, bias_offsets, sample, num_heads * head_stride, keys, 1, rows, keys)
    return GradientNumbers(
        num_heads * (2 * max_distance + 1), num_heads * num_buckets, first_pair, head_stride, row_stride
    )  # fmt: skip


@triton.jit
def own_copy(copies, stride):
    """Return how far from the first the copy of a table's sums begins that a program adds to."""
    return (tl.program_id(0) % copies * BINS).to(tl.int64) * stride


@triton.jit
def add_sums(of_distance, of_time, sample, numbers, bias_grads, BLOCK_T: tl.constexpr):
    """Add what a program has collected: sums of distances at and past the ends of the table, and of buckets."""
    if bias_grads.relative is not None:
        below, above = of_distance
        stride, last = bias_grads.numbers.relative_stride, 2 * numbers.max_distance
        first_entry = sample.head * (last + 1)
        add_exactly(bias_grads.relative, stride, first_entry, tl.sum(tl.sum(below, 1), 0), True)
        add_exactly(bias_grads.relative, stride, first_entry + last, tl.sum(tl.sum(above, 1), 0), True)
    if bias_grads.of_time is not None:
        bucket = tl.arange(0, BLOCK_T)
        histogram, run, bucket_of_run = of_time
        sums = tl.sum(add_to_bucket(histogram, tl.sum(run, 1), bucket_of_run), 0)
        entries = sample.head * numbers.num_buckets + bucket
        add_exactly(bias_grads.of_time, bias_grads.numbers.time_stride, entries, sums, bucket < numbers.num_buckets)


@triton.jit
def add_exactly(bins, stride, entries, numbers, mask):
    """Add float32 numbers to sums that do not depend on the order of their terms: each number to that of its exponent's bin.

    A bin has eight exponents. Its numbers are multiples of the same power of two, of at most 31 bits, and 64 bits hold the sum of
    2^32 of them without an error. One bin more counts infinities and NaN. Entries of a bin lie `stride` behind those of the bin
    before. Numbers below 2^-126 are taken for 0.
    """
    bits = numbers.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) & 255
    whole = ((bits & 0x7FFFFF) | 0x800000) << (exponent & 7)
    whole = tl.where(exponent == 255, 1, tl.where(bits < 0, -whole, whole))
    its_bin = (exponent + (exponent == 255).to(tl.int32)) >> 3
    addresses = bins + its_bin.to(tl.int64) * stride + entries
    tl.atomic_add(addresses, whole.to(tl.int64), mask=mask & (exponent > 0), sem="relaxed")


@triton.jit(do_not_specialize=["entries"])
def sum_bins_kernel(bins, table, entries, COPIES: tl.constexpr, BLOCK: tl.constexpr):
    """Round the exact sums of `add_exactly`, `[COPIES, BINS, entries]`, to `table`."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    its_bin = tl.arange(0, 64)[:, None]
    is_there = (its_bin < BINS) & (entry < entries)[None, :]
    whole = tl.zeros([64, BLOCK], tl.int64)
    for copy in tl.static_range(COPIES):
        whole += tl.load(bins + (its_bin + copy * BINS).to(tl.int64) * entries + entry[None, :], mask=is_there, other=0)
    # 2 to the power of 8 bin - 150.
    unit = ((its_bin.to(tl.int64) * 8 - 150 + 1023) << 52).to(tl.float64, bitcast=True)
    terms = tl.where(its_bin < BINS - 1, whole.to(tl.float64) * unit, tl.where(whole == 0, 0.0, float("nan")))
    tl.store(table + entry, tl.sum(terms, 0).to(tl.float32).to(table.dtype.element_ty), mask=entry < entries)


@triton.jit
def no_sums(ROWS: tl.constexpr, NUM_BUCKETS: tl.constexpr):
    """Where a program's sums for the tables' gradients begin, by distance and by bucket."""
    BANDS: tl.constexpr = ROWS // BAND
    in_threads = tl.zeros([BANDS, LANES], tl.float32)
    return (in_threads, in_threads), (tl.zeros([BANDS, NUM_BUCKETS], tl.float32), in_threads, tl.program_id(0) * 0)


@triton.jit
def add_relative_gradient(sums, grad_scores, first_query, first_key, sample, rules, bias_grads):
    """Add a tile's sums along its diagonals, on each of which queries and keys are one distance apart.

    Those nearer than the table's ends go to memory; the others are collected in `sums`, as is all of a far tile.
    """
    below, above = sums
    if is_far(first_query, first_key, sample, rules, grad_scores.shape[1]):
        above += sums_in_threads(grad_scores)
    else:
        below, above = add_diagonals(below, above, grad_scores, first_query, first_key, sample, rules, bias_grads)
    return below, above


@triton.jit
def band_sums(tile):
    """Sums of bands of rows, `[BANDS]`."""
    return tl.sum(tl.reshape(tile, [tile.shape[0] // BAND, BAND * tile.shape[1]]), 1)


@triton.jit
def sums_in_threads(tile):
    """Sums of what each thread has of a band where scores are products, `[BANDS, LANES]`.

    By additions: with float32, whose products Tensor Cores do not compute, `tl.sum` of such a view was wrong in Triton 3.6.
    """
    if INTERPRETED:
        return tl.sum(by_lanes(tile), 2)
    else:
        numbers = unstack(by_lanes(tile))
        sums = numbers[0]
        for i in tl.static_range(1, len(numbers)):
            sums += numbers[i]
        return sums


@triton.jit
def by_lanes(tile):
    """View a tile as `[BANDS, LANES, numbers]`: even and odd columns, then upper and lower 8 rows of bands, then columns 8 apart.

    As Tensor Cores lay out sums, lane 4 r + c // 2 has row r and column c of every block of 8 x 8, and nothing moves.
    """
    BLOCKS: tl.constexpr = tile.shape[1] // 8
    blocks = tl.reshape(tile, [tile.shape[0] // BAND, 2, 8, BLOCKS, 4, 2])
    return tl.reshape(tl.permute(blocks, 0, 2, 4, 5, 1, 3), [tile.shape[0] // BAND, LANES, 4 * BLOCKS])


@triton.jit
def add_diagonals(below, above, grad_scores, first_query, first_key, sample, rules, bias_grads):
    """`add_relative_gradient` of a tile with several distances."""
    farthest = rules.numbers.max_distance
    BANDS: tl.constexpr = grad_scores.shape[0] // BAND
    KEYS: tl.constexpr = grad_scores.shape[1]
    of_targets = grad_scores
    if rules.sight.num_targets is not None:
        row = tl.arange(0, BANDS * BAND)
        is_target = (first_query + sample.shift + row > sample.history)[:, None]
        of_targets = tl.where(is_target, grad_scores, 0.0)
        grad_scores = tl.where(is_target, 0.0, grad_scores)
    middle = sample.head * (2 * farthest + 1) + farthest
    least = first_query + sample.shift - first_key - KEYS
    sums = sum_diagonals(grad_scores)
    if (least >= -farthest) & (least + (BANDS * BAND + KEYS) <= farthest):
        add_between_ends(sums, least, middle, bias_grads, BANDS, KEYS)
    else:
        below, above = add_at_ends(below, above, sums, least, middle, farthest, bias_grads, KEYS)
    if rules.sight.num_targets is not None:
        column = tl.arange(0, KEYS)
        apart = sample.history - tl.minimum(first_key + column, sample.history)
        entries = middle + tl.minimum(apart, farthest)
        mask = first_key + column < sample.key_length
        add_exactly(bias_grads.relative, bias_grads.numbers.relative_stride, entries, tl.sum(of_targets, 0), mask)
    return below, above


@triton.jit
def diagonals_of_threads(BANDS: tl.constexpr):
    """Return which diagonal is each thread's first in `sum_diagonals`, counted from the least distance, and which of 4 eights."""
    thread = tl.arange(0, BANDS * LANES)
    pair = thread % 4
    return thread // LANES * BAND + (thread // 4 + 8 - 2 * pair) % 8 + 8 * pair, pair


@triton.jit
def add_between_ends(sums, least, middle, bias_grads, BANDS: tl.constexpr, KEYS: tl.constexpr):
    """Add the sums of a tile of which no distance is past either end of the table."""
    diagonal, eight = diagonals_of_threads(BANDS)
    entries = middle + least + diagonal
    for i in tl.static_range(len(sums)):
        mask = 4 * i + eight < KEYS // 8 + 2
        add_exactly(bias_grads.relative, bias_grads.numbers.relative_stride, entries + LANES * i, sums[i], mask)


@triton.jit
def add_at_ends(below, above, sums, least, middle, farthest, bias_grads, KEYS: tl.constexpr):
    """Add the sums of any tile; what is at or past an end of the table is collected in `below` and `above`."""
    diagonal, eight = diagonals_of_threads(below.shape[0])
    apart = least + diagonal
    for i in tl.static_range(len(sums)):
        own = tl.where(4 * i + eight < KEYS // 8 + 2, sums[i], 0.0)
        is_between = (apart < farthest) & (apart > -farthest)
        outside = tl.where(is_between, 0.0, own)
        above += tl.reshape(tl.where(apart > 0, outside, 0.0), above.shape)
        below += tl.reshape(tl.where(apart > 0, 0.0, outside), below.shape)
        add_exactly(bias_grads.relative, bias_grads.numbers.relative_stride, middle + apart, own, is_between)
        apart += LANES
    return below, above


@triton.jit
def sum_diagonals(tile):
    """Sums of a tile's bands along their diagonals: tensors of a number a thread, as `diagonals_of_threads` says.

    A band is blocks of 8 x 8, two of them high. Row r and column c of block (a, k) have distance 8 (a - k) + r - c, so blocks of
    the same m = a - k are added up first. As Tensor Cores lay scores out, lane 4 r + c // 2 has row r and column c of every
    block: nothing moves so far. With t = (r - c) mod 8, distances left are 8 m + t, or 8 (m - 1) + t where r < c. Numbers of one
    column and eight distances from 8 m on thus come from two neighbouring m, of which a lane takes one. Odd columns' move to the
    lane whose even column has the same t; then each t is in 4 lanes, and two exchanges leave each of them a fourth of the eights.
    """
    BANDS: tl.constexpr = tile.shape[0] // BAND
    BLOCKS: tl.constexpr = tile.shape[1] // 8
    numbers = unstack(by_lanes(tile))
    even, odd = add_blocks(numbers, 0), add_blocks(numbers, 2 * BLOCKS)
    lane = tl.broadcast_to(tl.arange(0, LANES)[None, :], [BANDS, LANES])
    row, pair = lane // 4, lane % 4
    is_even_before, is_odd_before = row < 2 * pair, (row + 1) % 8 < 2 * pair + 1
    eights = ()
    last_even = tl.zeros([BANDS, LANES], tl.float32)
    last_odd = last_even
    for i in tl.static_range(BLOCKS + 1):
        moved = tl.gather(odd[i], (lane + 4) % LANES, 1)
        eights += (tl.where(is_even_before, even[i], last_even) + tl.where(is_odd_before, moved, last_odd),)
        last_even, last_odd = even[i], moved
    eights += (tl.where(is_even_before, 0.0, last_even) + tl.where(is_odd_before, 0.0, last_odd),)
    halves = exchange(eights, pair % 2 == 1, (row + 2 - 4 * (pair % 2)) % 8 * 4 + (pair ^ 1))
    fourths = exchange(halves, pair // 2 == 1, (row + 4) % 8 * 4 + (pair ^ 2))
    sums = ()
    for i in tl.static_range(len(fourths)):
        sums += (tl.reshape(fourths[i], [BANDS * LANES]),)
    return sums


@triton.jit
def unstack(tile):
    """Return the tensors along the last of three dimensions, at most 256.

    The lowest bit of the index goes first. Where it tells warps apart, numbers move between them once, while they are together.
    """
    tensors = (tile,)
    for _ in tl.static_range(8):
        if tensors[0].shape[2] > 1:
            lows, highs = (), ()
            for i in tl.static_range(len(tensors)):
                it = tensors[i]
                low, high = tl.split(tl.reshape(it, [it.shape[0], it.shape[1], it.shape[2] // 2, 2]))
                lows += (low,)
                highs += (high,)
            tensors = lows + highs
    flat = ()
    for i in tl.static_range(len(tensors)):
        flat += (tl.reshape(tensors[i], [tile.shape[0], tile.shape[1]]),)
    return flat


@triton.jit
def add_blocks(numbers, first):
    """Add up a band's blocks that lie on one diagonal, from the least distance on; `first` is the upper left one's number."""
    BLOCKS: tl.constexpr = len(numbers) // 4
    sums = (numbers[first + BLOCKS - 1],)
    for i in tl.static_range(1, BLOCKS):
        sums += (numbers[first + BLOCKS - 1 - i] + numbers[first + 2 * BLOCKS - i],)
    sums += (numbers[first + BLOCKS],)
    return sums


@triton.jit
def exchange(numbers, is_second, other):
    """Add what lane `other` has: of each two numbers one lane is left the first, the other one the second; both a single one."""
    sums = ()
    for i in tl.static_range(0, len(numbers) - 1, 2):
        sent = tl.where(is_second, numbers[i], numbers[i + 1])
        sums += (tl.where(is_second, numbers[i + 1], numbers[i]) + tl.gather(sent, other, 1),)
    if len(numbers) % 2 == 1:
        sums += (numbers[len(numbers) - 1] + tl.gather(numbers[len(numbers) - 1], other, 1),)
    return sums


@triton.jit
def either(one, other):
    """Bits of both, for a reduction."""
    return one | other


@triton.jit
def is_equal(numbers, number):
    """1.0 where two floats are equal, by one instruction."""
    if INTERPRETED or not HAS_PTX:
        return (numbers == number).to(tl.float32)
    else:
        code: tl.constexpr = "set.eq.f32.f32 $0, $1, $2;"
        return tl.inline_asm_elementwise(code, "=f,f,f", [numbers, number], tl.float32, is_pure=True, pack=1)


@triton.jit
def add_time_gradient(sums, grad_scores, rows, keys, first_query, first_key, sample, rules, IS_WHOLE: tl.constexpr):
    """Add a tile's sums by bucket; most tiles have few, since buckets grow with the time.

    Tiles of one bucket are collected in `run` until there comes another one.
    """
    histogram, run, bucket_of_run = sums
    ROWS: tl.constexpr = grad_scores.shape[0]
    KEYS: tl.constexpr = grad_scores.shape[1]
    least, largest = bucket_range(first_query, first_key, sample, rules, ROWS, KEYS)
    if least == largest:
        if least != bucket_of_run:
            histogram = add_to_bucket(histogram, tl.sum(run, 1), bucket_of_run)
            run = tl.zeros_like(run)
            bucket_of_run = least
        run += sums_in_threads(grad_scores)
    else:
        bits = bits_of_time(rows, keys, first_query, first_key, sample, rules, IS_WHOLE)
        buckets = ((bits >> 22) % (FLOAT_BUCKETS // 2)).to(tl.int32) - FIRST_BUCKET
        buckets = tl.minimum(tl.maximum(buckets, least), largest)
        buckets -= least
        # A bit for each bucket that occurs, the same one for those 32 apart; of few buckets all may occur.
        left = (2 << tl.minimum(largest - least, FEW)) - 1
        if largest - least > FEW:
            occurring = tl.full([ROWS, KEYS], 1, tl.int32) << (buckets & 31)
            left = tl.reduce(tl.reshape(occurring, [ROWS * KEYS]), 0, either)
        as_floats = buckets.to(tl.float32)
        while left != 0:
            lowest = ((left & -left).to(tl.uint32).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
            for bucket in range(lowest, largest - least + 1, 32):
                of_bucket = band_sums(grad_scores * is_equal(as_floats, bucket * 1.0))
                histogram = add_to_bucket(histogram, of_bucket, least + bucket)
            left &= left - 1
    return histogram, run, bucket_of_run


@triton.jit
def add_to_bucket(histogram, sums, bucket):
    """Add bands' sums to those of a bucket."""
    own = tl.arange(0, histogram.shape[1])[None, :]
    return histogram + tl.where(own == bucket, sums[:, None], 0.0)


@triton.jit
def add_bias_gradients(
    of_distance, of_time, grad_scores, rows, keys, first_query, first_key, sample, rules, bias_grads, IS_WHOLE: tl.constexpr
):  # fmt: skip
    """Take the gradients of a tile of scores into those of the biases: sums by distance and by bucket, and each by itself."""
    if bias_grads.relative is not None:
        of_distance = add_relative_gradient(of_distance, grad_scores, first_query, first_key, sample, rules, bias_grads)
    if bias_grads.of_time is not None:
        of_time = add_time_gradient(of_time, grad_scores, rows, keys, first_query, first_key, sample, rules, IS_WHOLE)
    if bias_grads.pairs is not None:
        numbers = bias_grads.numbers
        at = numbers.first_pair + sample.head * numbers.head_stride + rows.to(tl.int64) * numbers.row_stride + keys
        mask = (rows < rules.numbers.rows) & (keys < rules.numbers.keys)
        tl.store(bias_grads.pairs + at, grad_scores.to(bias_grads.pairs.dtype.element_ty), mask=mask)
    return of_distance, of_time
