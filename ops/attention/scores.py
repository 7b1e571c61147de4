"""What attention kernels add to scores and do to weights: three kinds of bias, with their gradients, dropout and SiLU.

A tensor that is absent is None, so that nothing of it is compiled. Index tensors of rows and keys broadcast against each other,
whichever of them lies along which dimension of a tile.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from jagged.ops._shared.device import INTERPRETED, exp_of_difference, find_tile

HAS_PTX = tl.constexpr(torch.version.hip is None)
# Half the score of a hidden key before SiLU, whose value and slope there are 0; minus infinity would give NaN.
HIDDEN = tl.constexpr(-1e30)
# Entries that `expand_tables_kernel` adds at either end of a relative bias: at least the rows and the keys of a tile.
PADDING = tl.constexpr(256)
# Rows of which gradients of tables are summed together: with most layouts of scores one warp has all of them.
BAND = tl.constexpr(16)
# Rows that have one least and one largest time: `split_times_kernel`.
SPAN = tl.constexpr(32)
# Copies of a relative bias's gradient, which programs take in turn: atomic additions to one address come one after the other.
COPIES = tl.constexpr(16)
# A float's sign, exponent and first bit; and of those the exponent and bit from which buckets of 1 and more count.
FLOAT_BUCKETS, FIRST_BUCKET = tl.constexpr(1024), tl.constexpr(253)


class Biases(NamedTuple):
    """What is added to scores.

    `relative` and `of_time` are what `expand_tables_kernel` makes of the tables, over the scores' scale; `pairs` of a sample
    begin at `first_pair`.
    """

    inverse_scale: Any
    relative: Any
    max_distance: Any
    of_time: Any
    num_buckets: Any
    q_times: Any
    k_times: Any
    q_bounds: Any
    k_bounds: Any
    pairs: Any
    first_pair: Any
    head_stride: Any
    row_stride: Any
    key_stride: Any
    rows: Any
    keys: Any


class BiasGradients(NamedTuple):
    """Where gradients of biases go: of tables as whole numbers of units, `units` of which are 1; of pairs as they are.

    `units` is None where none is wanted.
    """

    relative: Any
    of_time: Any
    pairs: Any
    first_pair: Any
    head_stride: Any
    row_stride: Any
    units: Any


class Dropout(NamedTuple):
    """A weight is left where its number reaches `threshold`, and then multiplied by `kept_scale`; none without a `seed`."""

    seed: Any
    threshold: Any
    kept_scale: Any


@triton.jit(do_not_specialize=["num_samples", "total", "key_total"])
def split_times_kernel(times, offsets, key_times, key_offsets, split, num_samples, total, key_total):
    """Times since the first key's of their sample, as two floats in one number: multiples of 2^24, and what is left.

    Differences of either are exact, and their sum is the float nearest to the difference of times. Behind the rows' numbers lie
    the least and the largest time of each tile of SPAN rows, in the order of `find_tile`.
    """
    tile = tl.program_id(0)
    sample, start, length, first = find_tile(offsets, tile, num_samples, total, SPAN)
    if first >= length:
        return
    first_key = tl.load(key_offsets + sample)
    has_keys = (first_key >= 0) & (first_key < key_total)
    row = start + tl.minimum(first + tl.arange(0, SPAN), length - 1)
    time = tl.load(times + row) - tl.load(key_times + first_key, mask=has_keys, other=0)
    high = time >> 24
    low = (time - (high << 24)).to(tl.float32).to(tl.int32, bitcast=True)
    high = (high.to(tl.float32) * 16777216.0).to(tl.int32, bitcast=True)
    packed = (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)
    tl.store(split + row, packed)
    bounds = split + total + 2 * tile.to(tl.int64)
    tl.store(bounds, tl.min(time, 0))
    tl.store(bounds + 1, tl.max(time, 0))


@triton.jit(do_not_specialize=["max_distance", "num_buckets"])
def expand_tables_kernel(
    relative, of_time, wide_relative, wide_time, max_distance, num_buckets, inverse_scale, BLOCK: tl.constexpr
):  # fmt: skip
    """Tables in float32 over the scale of scores, in which a tile's distances and every float have an entry without a comparison.

    `wide_relative`, `[H, 2 * max_distance + 1 + 2 * PADDING]`, repeats the table's ends; `wide_time`, `[H, FLOAT_BUCKETS]`, has
    the bias of any time apart at its float's leading bits.
    """
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(1).to(tl.int64)
    if relative is not None:
        width = 2 * max_distance + 1
        own = tl.minimum(tl.maximum(entry - PADDING, 0), width - 1)
        bias = tl.load(relative + head * width + own).to(tl.float32) * inverse_scale
        width += 2 * PADDING
        tl.store(wide_relative + head * width + entry, bias, mask=entry < width)
    if of_time is not None:
        bucket = tl.minimum(tl.maximum(entry % (FLOAT_BUCKETS // 2) - FIRST_BUCKET, 0), num_buckets - 1)
        bias = tl.load(of_time + head * num_buckets + bucket).to(tl.float32) * inverse_scale
        tl.store(wide_time + head * FLOAT_BUCKETS + entry, bias, mask=entry < FLOAT_BUCKETS)


@triton.jit
def pairs_of(bias, bias_offsets, sample, query_length, key_length, batch_stride, row_stride, key_stride, rows, keys):
    """Return where a sample's biases begin, the stride of their rows, and how many rows and keys of them there are.

    A jagged bias has one row of all pairs; a sample's rows end with it, whatever the offsets say.
    """
    first = sample * 0
    row_stride = first + row_stride
    if bias_offsets is not None:
        pair = tl.minimum(tl.maximum(tl.load(bias_offsets + sample), 0), keys.to(tl.int64))
        rows = tl.minimum(query_length, (keys - pair) // tl.maximum(key_length, 1)).to(tl.int32)
        first = pair * key_stride
        row_stride = key_length.to(tl.int64) * key_stride
        keys = key_length
    elif bias is not None:
        first = sample * batch_stride
        rows, keys = tl.minimum(query_length, rows), tl.minimum(key_length, keys)
    return first, row_stride, rows, keys


@triton.jit
def load_in_place(places):
    """Load from read-only tables in the layout in which a tile is needed.

    A plain load of so many numbers gets a layout of its own, and each tile then goes through shared memory. This is also free
    to leave a loop in which it always loads the same.
    """
    if INTERPRETED or not HAS_PTX:
        return tl.load(places)
    elif places.dtype.element_ty == tl.float32:
        return tl.inline_asm_elementwise("ld.global.nc.f32 $0, [$1];", "=f,l", [places], tl.float32, is_pure=True, pack=1)
    else:
        return tl.inline_asm_elementwise("ld.global.nc.b64 $0, [$1];", "=l,l", [places], tl.int64, is_pure=True, pack=1)


@triton.jit
def load_times(times, rows, length):
    """Load the two floats that `split_times_kernel` made of rows' times; a sample's last row stands in for missing ones."""
    packed = load_in_place(times + tl.minimum(rows, length - 1))
    high = (packed >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return high, packed.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def bounds_of(times, total, start, sample):
    """Return where the bounds of a sample's times begin; None without times."""
    bounds = None
    if times is not None:
        bounds = times + total + 2 * (start // SPAN + sample)
    return bounds


@triton.jit
def load_bounds(bounds, first, length, ROWS: tl.constexpr):
    """Load the least and the largest time of a tile, or of rows that contain it."""
    place = bounds + first // SPAN * 2
    least, largest = load_in_place(place), load_in_place(place + 1)
    for tile in tl.static_range(SPAN, ROWS, SPAN):
        place = bounds + tl.minimum(first + tile, length - 1) // SPAN * 2
        least, largest = tl.minimum(least, load_in_place(place)), tl.maximum(largest, load_in_place(place + 1))
    return least, largest


@triton.jit
def distances(rows, keys, place):
    """From keys to queries, where all targets stand right behind the history."""
    positions = rows + place.shift
    if place.num_targets is not None:
        positions, keys = tl.minimum(positions, place.history), tl.minimum(keys, place.history)
    return positions - keys


@triton.jit
def bits_of_time(rows, keys, place, biases):
    """The bits of the time from a key to a query as a float."""
    q_high, q_low = load_times(biases.q_times + place.start, rows, place.query_length)
    k_high, k_low = load_times(biases.k_times + place.key_start, keys, place.key_length)
    return ((q_high - k_high) + (q_low - k_low)).to(tl.uint32, bitcast=True)


@triton.jit
def time_buckets(bits, num_buckets):
    """Two buckets an octave of the time between a query and a key: its float's exponent and first bit."""
    bucket = ((bits >> 22) % (FLOAT_BUCKETS // 2)).to(tl.int32) - FIRST_BUCKET
    return tl.minimum(tl.maximum(bucket, 0), num_buckets - 1)


@triton.jit
def bucket_range(first_query, first_key, place, biases, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Return the least and the largest bucket that pairs of a tile may have."""
    q_least, q_largest = load_bounds(biases.q_bounds, first_query, place.query_length, ROWS)
    k_least, k_largest = load_bounds(biases.k_bounds, first_key, place.key_length, KEYS)
    least = tl.maximum(tl.maximum(q_least - k_largest, k_least - q_largest), 0).to(tl.float32)
    largest = tl.maximum(q_largest - k_least, k_largest - q_least).to(tl.float32)
    least = time_buckets(least.to(tl.uint32, bitcast=True), biases.num_buckets)
    return least, time_buckets(largest.to(tl.uint32, bitcast=True), biases.num_buckets)


@triton.jit
def relative_biases(rows, keys, first_query, first_key, place, biases):
    """Load a tile's, or the one bias that all of it has. Of an address only what the tile shares is computed for each tile."""
    ROWS: tl.constexpr = rows.shape[0] * rows.shape[1]
    KEYS: tl.constexpr = keys.shape[0] * keys.shape[1]
    tl.static_assert(ROWS + KEYS <= PADDING)
    farthest = biases.max_distance
    table = biases.relative + place.head * (2 * farthest + 1 + 2 * PADDING) + PADDING + farthest
    if distances(first_query, first_key + KEYS - 1, place) >= farthest:
        bias = (rows * 0 + keys * 0).to(tl.float32) + tl.load(table + farthest)
    elif place.num_targets is not None:
        bias = load_in_place(table + tl.minimum(tl.maximum(distances(rows, keys, place), -farthest), farthest))
    else:
        apart = tl.minimum(tl.maximum(first_query + place.shift - first_key, -farthest - ROWS), farthest + KEYS)
        bias = load_in_place(table + apart + ((rows - first_query).to(tl.int64) - (keys - first_key).to(tl.int64)))
    return bias


@triton.jit
def time_biases(rows, keys, first_query, first_key, place, biases):
    """Load a tile's, or the one bias that all of it has."""
    ROWS: tl.constexpr = rows.shape[0] * rows.shape[1]
    KEYS: tl.constexpr = keys.shape[0] * keys.shape[1]
    table = biases.of_time + place.head * FLOAT_BUCKETS
    least, largest = bucket_range(first_query, first_key, place, biases, ROWS, KEYS)
    if least == largest:
        bias = (rows * 0 + keys * 0).to(tl.float32) + load_in_place(table + FIRST_BUCKET + least)
    else:
        bias = load_in_place(table + (bits_of_time(rows, keys, place, biases) >> 22))
    return bias


@triton.jit
def biases_of(rows, keys, first_query, first_key, place, biases):
    """Return a tile's biases over the scale of scores, where sums of products begin; None without any.

    Loads under a condition are not begun ahead of their loop's turn, which would take each number through shared memory.
    """
    bias = None
    if biases.relative is not None:
        bias = relative_biases(rows, keys, first_query, first_key, place, biases)
    if biases.of_time is not None:
        of_time = time_biases(rows, keys, first_query, first_key, place, biases)
        bias = of_time if biases.relative is None else bias + of_time
    if biases.pairs is not None:
        at = biases.first_pair + place.head * biases.head_stride
        at += rows.to(tl.int64) * biases.row_stride + keys.to(tl.int64) * biases.key_stride
        mask = (rows < biases.rows) & (keys < biases.keys)
        of_pairs = tl.load(biases.pairs + at, mask=mask, other=0.0).to(tl.float32) * biases.inverse_scale
        bias = of_pairs if biases.relative is None and biases.of_time is None else bias + of_pairs
    return bias


@triton.jit
def fixed_point(sums, per_unit):
    """As a whole number of units, whose sum does not depend on the order of its terms."""
    return (sums.to(tl.float64) * per_unit).to(tl.int64)


@triton.jit
def add_relative_gradient(below, above, grad_scores, first_query, first_key, place, farthest, bias_grads):
    """Add a tile's sums along its diagonals, on each of which queries and keys are one distance apart.

    Those nearer than `farthest` go to memory; the others are collected in `below` and `above`, which belong to the ends of the
    table, as is all of a tile that has no nearer ones.
    """
    if distances(first_query, first_key + grad_scores.shape[1] - 1, place) >= farthest:
        above += tl.where(tl.arange(0, 2 * BAND)[None, :] == 0, band_sums(grad_scores)[:, None], 0.0)
    else:
        below, above = add_diagonals(below, above, grad_scores, first_query, first_key, place, farthest, bias_grads)
    return below, above


@triton.jit
def band_sums(tile):
    """Sums of bands of rows."""
    return tl.sum(tl.reshape(tile, [tile.shape[0] // BAND, BAND * tile.shape[1]]), 1)


@triton.jit
def add_diagonals(below, above, grad_scores, first_query, first_key, place, farthest, bias_grads):
    """`add_relative_gradient` of a tile with several distances.

    Within each band of rows column c is turned up by c rows, which makes rows of diagonals: a number that came round `wraps`
    times is `wraps * BAND` nearer. Two such distances of a row lie side by side when they go to memory.
    """
    BANDS: tl.constexpr = grad_scores.shape[0] // BAND
    KEYS: tl.constexpr = grad_scores.shape[1]
    column = tl.arange(0, KEYS)
    of_targets = grad_scores
    if place.num_targets is not None:
        row = tl.arange(0, BANDS * BAND)
        is_target = (first_query + place.shift + row > place.history)[:, None]
        of_targets = tl.where(is_target, grad_scores, 0.0)
        grad_scores = tl.where(is_target, 0.0, grad_scores)
    turned = (tl.arange(0, BAND)[:, None] + column[None, :])[None, :, :]
    bands = tl.reshape(grad_scores, [BANDS, BAND, KEYS])
    diagonals = tl.gather(bands, tl.broadcast_to(turned % BAND, bands.shape), 1)
    lane = tl.arange(0, 2 * BAND)[None, :]
    place_in_tile = tl.arange(0, BANDS)[:, None] * BAND + lane % BAND - lane // BAND * BAND
    table = bias_grads.relative + place.head * (2 * farthest + 1) + farthest
    for wraps in tl.static_range(0, KEYS // BAND + 1, 2):
        once = tl.sum(tl.where(turned // BAND == wraps, diagonals, 0.0), 2)
        again = tl.sum(tl.where(turned // BAND == wraps + 1, diagonals, 0.0), 2)
        sums = tl.reshape(tl.trans(tl.join(once, again), 0, 2, 1), [BANDS, 2 * BAND])
        apart = first_query + place.shift - first_key + place_in_tile - wraps * BAND
        is_above = apart >= farthest
        is_below = (apart <= -farthest) & (apart < farthest)
        above += tl.where(is_above, sums, 0.0)
        below += tl.where(is_below, sums, 0.0)
        is_between = (apart < farthest) & (apart > -farthest) & (lane // BAND + wraps <= KEYS // BAND)
        tl.atomic_add(table + apart, fixed_point(sums, bias_grads.units), mask=is_between, sem="relaxed")
    if place.num_targets is not None:
        apart = place.history - tl.minimum(first_key + column, place.history)
        sums = fixed_point(tl.sum(of_targets, 0), bias_grads.units)
        mask = first_key + column < place.key_length
        tl.atomic_add(table + tl.minimum(apart, farthest), sums, mask=mask, sem="relaxed")
    return below, above


@triton.jit
def either(one, other):
    """Bits of both, for a reduction."""
    return one | other


@triton.jit
def add_time_gradient(histogram, grad_scores, rows, keys, first_query, first_key, place, biases):
    """Add a tile's sums by bucket; most tiles have few, since buckets grow with the time."""
    ROWS: tl.constexpr = grad_scores.shape[0]
    KEYS: tl.constexpr = grad_scores.shape[1]
    own = tl.arange(0, histogram.shape[1])[None, :]
    least, largest = bucket_range(first_query, first_key, place, biases, ROWS, KEYS)
    if least == largest:
        histogram += tl.where(own == least, band_sums(grad_scores)[:, None], 0.0)
    else:
        buckets = time_buckets(bits_of_time(rows, keys, place, biases), biases.num_buckets)
        # A bit for each bucket that occurs, the same one for those 64 apart.
        bits = tl.where(grad_scores == 0.0, 0, tl.full([ROWS, KEYS], 1, tl.int64) << (buckets & 63))
        left = tl.reduce(tl.reduce(bits, 1, either), 0, either)
        while left != 0:
            lowest = (left & -left).to(tl.uint64).to(tl.float32).to(tl.int32, bitcast=True) >> 23
            for bucket in range(lowest - 127, biases.num_buckets, 64):
                sums = band_sums(tl.where(buckets == bucket, grad_scores, 0.0))
                histogram += tl.where(own == bucket, sums[:, None], 0.0)
            left &= left - 1
    return histogram


@triton.jit
def add_bias_gradients(histogram, below, above, grad_scores, rows, keys, first_query, first_key, place, biases, bias_grads):
    """Take the gradients of a tile of scores into those of the biases: sums by distance and by bucket, and each by itself."""
    if bias_grads.relative is not None:
        below, above = add_relative_gradient(
            below, above, grad_scores, first_query, first_key, place, biases.max_distance, bias_grads
        )
    if bias_grads.of_time is not None:
        histogram = add_time_gradient(histogram, grad_scores, rows, keys, first_query, first_key, place, biases)
    if bias_grads.pairs is not None:
        at = bias_grads.first_pair + place.head * bias_grads.head_stride + rows.to(tl.int64) * bias_grads.row_stride + keys
        mask = (rows < biases.rows) & (keys < biases.keys)
        tl.store(bias_grads.pairs + at, grad_scores.to(bias_grads.pairs.dtype.element_ty), mask=mask)
    return histogram, below, above


@triton.jit
def hashed(number):
    """A permutation of the 32-bit numbers whose every bit depends on every bit (Wellons, "lowbias32")."""
    number ^= number >> 16
    number *= 0x7FEB352D
    number ^= number >> 15
    number *= 0x846CA68B
    return number ^ (number >> 16)


@triton.jit
def kept(rows, keys, place, dropout):
    """Tell which weights dropout leaves; a pair's number depends on nothing but the seed, its query, its head and its key."""
    seed = tl.load(dropout.seed)
    low, high = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    of_row = hashed(hashed((place.start + rows).to(tl.uint32) ^ low) + place.head.to(tl.uint32) * 0x9E3779B9)
    of_key = hashed(keys.to(tl.uint32) + high)
    return hashed(of_row ^ of_key) >= dropout.threshold.to(tl.uint32)


@triton.jit
def silu(halves, ACCURATE: tl.constexpr):
    """Return SiLU and its slope at scores given as halves, `h = s / 2`; both exactly 0 where a key is hidden.

    With t = tanh(h) they are h (1 + t) and (1 + t) (1 + h (1 - t)) / 2. 16-bit weights take t from NVIDIA's `tanh.approx`, of at
    most 2^-11 relative error: one instruction where an exponential and a reciprocal are many.
    """
    if ACCURATE or INTERPRETED or not HAS_PTX:
        # 1 + t, without the error of a difference far below 0, nor an infinite exponential, of which the interpreter warns.
        share = tl.where(halves < -44.0, 0.0, 2.0 / (1.0 + exp_of_difference(tl.minimum(-2.0 * halves, 88.0), ACCURATE)))
        return halves * share, share * (0.5 + halves * (1.0 - 0.5 * share))
    else:
        tanh = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [halves], tl.float32, is_pure=True, pack=1)
        rest = 0.5 + 0.5 * (halves - halves * tanh)
        return halves * tanh + halves, rest * tanh + rest
