"""What attention kernels add to scores and do to weights: three kinds of bias, with their gradients, dropout and SiLU.

`biases` is a tuple `(scale, relative_bias, max_distance, time_bias, num_buckets, q_times, k_times, first_time, bias, first_pair,
bias_head_stride, bias_row_stride, bias_key_stride, bias_rows, bias_keys)`, `place` a tuple `(head, start, key_start, query_length, key_length,
shift, history)`. A tensor that is absent is None, so that nothing of it is compiled. Index tensors of rows and keys broadcast
against each other, whichever of them lies along which dimension of a tile.
"""

import triton
import triton.language as tl

from jagged.ops._shared.device import exp_of_difference

# The score of a hidden key before SiLU, whose value and slope there are 0; minus infinity would give NaN.
HIDDEN = tl.constexpr(-1e30)


@triton.jit
def first_time_of(k_times, key_start, key_length):
    """Return the time of a sample's first key, from which its times are counted."""
    if k_times is not None:
        return tl.load(k_times + key_start, mask=key_length > 0, other=0)
    else:
        return key_start * 0


@triton.jit
def pairs_of(bias, bias_offsets, sample, query_length, key_length, batch_stride, row_stride, key_stride, rows, keys):
    """Return where a sample's biases begin, the stride of their rows, and how many rows and keys of them there are."""
    first = sample * 0
    row_stride = first + row_stride
    if bias_offsets is not None:
        first = tl.load(bias_offsets + sample) * key_stride
        row_stride = key_length.to(tl.int64) * key_stride
        rows, keys = query_length, key_length
    elif bias is not None:
        first = sample * batch_stride
        rows, keys = tl.minimum(query_length, rows), tl.minimum(key_length, keys)
    return first, row_stride, rows, keys


@triton.jit
def load_times(times, rows, length, first_time):
    """Times since `first_time` as two floats, multiples of 2^24 and what is left, whose differences are exact."""
    time = tl.load(times + tl.minimum(rows, length - 1)) - first_time
    high = time >> 24
    return high.to(tl.float32) * 16777216.0, (time - (high << 24)).to(tl.float32)


@triton.jit
def distances(positions, keys, history, num_targets):
    """From keys to queries, where all targets stand right behind the history."""
    if num_targets is not None:
        positions, keys = tl.minimum(positions, history), tl.minimum(keys, history)
    return positions - keys


@triton.jit
def time_buckets(rows, keys, place, q_times, k_times, first_time, num_buckets):
    """Two buckets an octave of the time between a query and a key: its float's exponent and first bit."""
    head, start, key_start, query_length, key_length, shift, history = place
    q_high, q_low = load_times(q_times + start, rows, query_length, first_time)
    k_high, k_low = load_times(k_times + key_start, keys, key_length, first_time)
    apart = tl.abs((q_high - k_high) + (q_low - k_low))
    bucket = (apart.to(tl.int32, bitcast=True) >> 22) - 253
    return tl.minimum(tl.maximum(bucket, 0), num_buckets - 1)


@triton.jit
def biased_scores(products, rows, keys, place, num_targets, biases):
    """Return scaled products of queries and keys, and their biases."""
    (
        scale, relative_bias, max_distance, time_bias, num_buckets, q_times, k_times, first_time,
        bias, first_pair, bias_head_stride, bias_row_stride, bias_key_stride, bias_rows, bias_keys,
    ) = biases  # fmt: skip
    head, start, key_start, query_length, key_length, shift, history = place
    scores = products * scale
    if relative_bias is not None:
        apart = distances(rows + shift, keys, history, num_targets)
        apart = tl.minimum(tl.maximum(apart, -max_distance), max_distance) + max_distance
        scores += tl.load(relative_bias + head * (2 * max_distance + 1) + apart).to(tl.float32)
    if time_bias is not None:
        bucket = time_buckets(rows, keys, place, q_times, k_times, first_time, num_buckets)
        scores += tl.load(time_bias + head * num_buckets + bucket).to(tl.float32)
    if bias is not None:
        at = first_pair + head * bias_head_stride + rows.to(tl.int64) * bias_row_stride + keys.to(tl.int64) * bias_key_stride
        scores += tl.load(bias + at, mask=(rows < bias_rows) & (keys < bias_keys), other=0.0).to(tl.float32)
    return scores


@triton.jit
def fixed_point(sums, per_unit):
    """As a whole number of units, whose sum does not depend on the order of its terms."""
    return (sums.to(tl.float64) * per_unit).to(tl.int64)


@triton.jit
def add_relative_gradient(
    below, above, grad_scores, first_query, first_key, place, num_targets, max_distance, grad_relative_bias, per_unit
):
    """Add a tile's sums along its diagonals, on each of which queries and keys are one distance apart.

    Column c is turned up by c rows, which makes rows of diagonals. Those nearer than `max_distance` go to memory; the others are
    collected in `below` and `above`, which belong to the ends of the table.
    """
    head, start, key_start, query_length, key_length, shift, history = place
    ROWS: tl.constexpr = grad_scores.shape[0]
    tl.static_assert(ROWS >= grad_scores.shape[1])
    row = tl.arange(0, ROWS)
    column = tl.arange(0, grad_scores.shape[1])
    of_targets = grad_scores
    if num_targets is not None:
        is_target = (first_query + shift + row > history)[:, None]
        of_targets = tl.where(is_target, grad_scores, 0.0)
        grad_scores = tl.where(is_target, 0.0, grad_scores)
    place_in_column = row[:, None] + column[None, :]
    diagonals = tl.gather(grad_scores, place_in_column % ROWS, 0)
    table = grad_relative_bias + head * (2 * max_distance + 1) + max_distance
    for turn in tl.static_range(2):
        sums = tl.sum(tl.where((place_in_column >= ROWS) == (turn == 1), diagonals, 0.0), 1)
        apart = first_query + shift - first_key + row - turn * ROWS
        is_above = apart >= max_distance
        is_below = (apart <= -max_distance) & (apart < max_distance)
        above += tl.where(is_above, sums, 0.0)
        below += tl.where(is_below, sums, 0.0)
        is_between = (apart < max_distance) & (apart > -max_distance)
        tl.atomic_add(table + apart, fixed_point(sums, per_unit), mask=is_between, sem="relaxed")
    if num_targets is not None:
        apart = history - tl.minimum(first_key + column, history)
        apart = tl.minimum(apart, max_distance)
        sums = tl.sum(of_targets, 0)
        tl.atomic_add(table + apart, fixed_point(sums, per_unit), mask=first_key + column < key_length, sem="relaxed")
    return below, above


@triton.jit
def add_time_gradient(histogram, grad_scores, buckets):
    """Add a tile's sums by bucket; most tiles have few, since buckets grow with the time."""
    lowest = tl.min(tl.min(buckets, 1), 0)
    highest = tl.max(tl.max(buckets, 1), 0)
    own = tl.arange(0, histogram.shape[0])
    if lowest == highest:
        histogram += tl.where(own == lowest, tl.sum(tl.sum(grad_scores, 1), 0), 0.0)
    else:
        for bucket in range(lowest, highest + 1):
            sums = tl.sum(tl.sum(tl.where(buckets == bucket, grad_scores, 0.0), 1), 0)
            histogram += tl.where(own == bucket, sums, 0.0)
    return histogram


@triton.jit
def add_bias_gradients(
    histogram, below, above, grad_scores, rows, keys, first_query, first_key, place, num_targets, biases, bias_grads
):
    """Take the gradients of a tile of scores into those of the biases: sums by distance and by bucket, and each by itself."""
    grad_relative_bias, grad_time_bias, grad_bias, first_pair, head_stride, row_stride, per_unit = bias_grads
    if grad_relative_bias is not None:
        below, above = add_relative_gradient(
            below, above, grad_scores, first_query, first_key, place, num_targets, biases[2], grad_relative_bias, per_unit
        )
    if grad_time_bias is not None:
        buckets = time_buckets(rows, keys, place, biases[5], biases[6], biases[7], biases[4])
        histogram = add_time_gradient(histogram, grad_scores, buckets)
    if grad_bias is not None:
        at = first_pair + place[0] * head_stride + rows.to(tl.int64) * row_stride + keys
        mask = (rows < biases[13]) & (keys < biases[14])
        tl.store(grad_bias + at, grad_scores.to(grad_bias.dtype.element_ty), mask=mask)
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
def kept(rows, keys, place, dropout_seed, dropout_threshold):
    """Tell which weights dropout leaves; a pair's number depends on nothing but the seed, its query, its head and its key."""
    head, start, key_start, query_length, key_length, shift, history = place
    seed = tl.load(dropout_seed)
    low, high = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    of_row = hashed(hashed((start + rows).to(tl.uint32) ^ low) + head.to(tl.uint32) * 0x9E3779B9)
    of_key = hashed(keys.to(tl.uint32) + high)
    return hashed(of_row ^ of_key) >= dropout_threshold.to(tl.uint32)


@triton.jit
def sigmoid(scores, ACCURATE: tl.constexpr):
    """Exactly 0 far below 0, as the score of a hidden key is."""
    if ACCURATE:
        odds = exp_of_difference(tl.minimum(-scores, 88.0), True)
        return tl.where(scores < -88.0, 0.0, 1.0 / (1.0 + odds))
    return 1.0 / (1.0 + tl.exp(-scores))
