"""What attention kernels add to scores: biases by distance, by time, and of every pair.

A tensor that is absent is None, so that nothing of it is compiled. Index tensors of rows and keys broadcast against each other,
whichever of them lies along which dimension of a tile.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from jagged.ops._shared.device import INTERPRETED, find_tile

HAS_PTX = tl.constexpr(torch.version.hip is None)
# Biases below it hide their keys.
HIDDEN = tl.constexpr(-1e30)
# Entries that `expand_tables` adds at either end of a relative bias: at least the rows and the keys of a tile.
PADDING = tl.constexpr(256)
# Rows that have one least and one largest time: `split_times`.
SPAN = tl.constexpr(32)
# More than what two roundings to float32 move a number by, relative to it.
ROUNDING = tl.constexpr(2.0**-22)
# A float's sign, exponent and first bit; and of those the exponent and bit from which buckets of 1 and more count.
FLOAT_BUCKETS, FIRST_BUCKET = tl.constexpr(1024), tl.constexpr(253)
# Buckets that a float's exponent can tell apart.
MOST_BUCKETS = FLOAT_BUCKETS.value // 2 - FIRST_BUCKET.value


class BiasNumbers(NamedTuple):
    """Sizes of tables and of times, and where the biases of a sample's pairs begin and how they lie."""

    inverse_scale: Any
    max_distance: Any
    num_buckets: Any
    num_queries: Any
    num_keys: Any
    first_pair: Any
    head_stride: Any
    row_stride: Any
    key_stride: Any
    rows: Any
    keys: Any


class Biases(NamedTuple):
    """What is added to scores; `relative`, `of_time` and times are what `prepare_biases_kernel` makes of them."""

    relative: Any
    of_time: Any
    q_times: Any
    k_times: Any
    pairs: Any


@triton.jit(do_not_specialize=["max_distance", "num_buckets", "blocks", "num_samples", "key_total", "query_total"])
def prepare_biases_kernel(
    relative, of_time, wide_relative, wide_time, max_distance, num_buckets, inverse_scale, blocks, num_heads,
    key_times, key_offsets, key_split, key_total, query_times, query_offsets, query_split, query_total, num_samples,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Make what the other kernels read of tables and times; programs first share the tables, then tiles of keys, then of queries.

    Tables are in float32 over the scale of scores, and have an entry for every distance in a tile and every float, without a
    comparison: `wide_relative`, `[H, 2, 2 * max_distance + 1 + 2 * PADDING]`, repeats the table's ends and has it a second time
    from the last distance to the first; `wide_time`, `[H, FLOAT_BUCKETS]`, has the bias of any time apart at its float's leading
    bits. A head's tables are shared by `blocks` programs. Queries of None are the keys.
    """
    index = tl.program_id(0)
    table_programs = blocks * num_heads
    if index < table_programs:
        entry = index % blocks * BLOCK + tl.arange(0, BLOCK)
        expand_tables(
            relative, of_time, wide_relative, wide_time, max_distance, num_buckets, inverse_scale, index // blocks, entry
        )
    elif of_time is not None:
        tile = index - table_programs
        key_tiles = key_total // SPAN + num_samples
        if tile < key_tiles:
            split_times(key_times, key_offsets, key_times, key_offsets, key_split, tile, num_samples, key_total, key_total)
        elif query_times is not None:
            split_times(
                query_times, query_offsets, key_times, key_offsets, query_split, tile - key_tiles, num_samples, query_total,
                key_total,
            )  # fmt: skip


@triton.jit
def over_scale(bias, inverse_scale):
    """Biases as sums of products begin at them; those below `HIDDEN` hide their keys, and would overflow."""
    bias = bias.to(tl.float32)
    return tl.where(bias < HIDDEN, float("-inf"), bias) * inverse_scale


@triton.jit
def expand_tables(relative, of_time, wide_relative, wide_time, max_distance, num_buckets, inverse_scale, head, entry):
    """Write some entries of a head's tables, of each table that has them."""
    head = head.to(tl.int64)
    if relative is not None:
        width = 2 * max_distance + 1
        own = tl.minimum(tl.maximum(entry - PADDING, 0), width - 1)
        bias = over_scale(tl.load(relative + head * width + own), inverse_scale)
        width += 2 * PADDING
        wide_relative += 2 * head * width
        tl.store(wide_relative + entry, bias, mask=entry < width)
        tl.store(wide_relative + 2 * width - 1 - entry, bias, mask=entry < width)
    if of_time is not None:
        bucket = tl.minimum(tl.maximum(entry % (FLOAT_BUCKETS // 2) - FIRST_BUCKET, 0), num_buckets - 1)
        bias = over_scale(tl.load(of_time + head * num_buckets + bucket), inverse_scale)
        tl.store(wide_time + head * FLOAT_BUCKETS + entry, bias, mask=entry < FLOAT_BUCKETS)


@triton.jit
def split_times(times, offsets, key_times, key_offsets, split, tile, num_samples, total, key_total):
    """Write times since the first key's of their sample, as two floats in one number: multiples of 2^24, and what is left.

    Differences of either are exact, and their sum is the float nearest to the difference of times. Behind the rows' numbers lie
    two floats for each tile of SPAN rows, in the order of `find_tile`: no time of it is below the one or above the other.
    """
    sample, start, length, first = find_tile(offsets, tile, num_samples, total, SPAN)
    if first < length:
        first_key = tl.load(key_offsets + sample)
        has_keys = (first_key >= 0) & (first_key < key_total)
        row = start + tl.minimum(first + tl.arange(0, SPAN), length - 1)
        time = tl.load(times + row) - tl.load(key_times + first_key, mask=has_keys, other=0)
        high = time >> 24
        low = (time - (high << 24)).to(tl.float32)
        tl.store(split + row, packed_pair(high.to(tl.float32) * 16777216.0, low))
        least, largest = tl.min(time, 0).to(tl.float32), tl.max(time, 0).to(tl.float32)
        least -= tl.abs(least) * ROUNDING
        largest += tl.abs(largest) * ROUNDING
        tl.store(split + total + tile, packed_pair(least, largest))


@triton.jit
def packed_pair(high, low):
    """Two floats in one number."""
    return (high.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (low.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def pair_of_floats(packed):
    """Undo `packed_pair`."""
    return (packed >> 32).to(tl.int32).to(tl.float32, bitcast=True), packed.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def find_pairs(bias, bias_offsets, sample, batch_stride, row_stride, key_stride, rows, keys):
    """Return where a sample's biases begin, the stride of their rows, and how many rows and keys of them there are.

    A jagged bias has one row of all pairs; a sample's rows end with it, whatever the offsets say.
    """
    first = sample.index * 0
    row_stride = first + row_stride
    if bias_offsets is not None:
        pair = tl.minimum(tl.maximum(tl.load(bias_offsets + sample.index), 0), keys.to(tl.int64))
        rows = tl.minimum(sample.query_length, (keys - pair) // tl.maximum(sample.key_length, 1)).to(tl.int32)
        first = pair * key_stride
        row_stride = sample.key_length.to(tl.int64) * key_stride
        keys = sample.key_length
    elif bias is not None:
        first = sample.index * batch_stride
        rows, keys = tl.minimum(sample.query_length, rows), tl.minimum(sample.key_length, keys)
    return first, row_stride, rows, keys


@triton.jit
def bias_numbers(
    bias, bias_offsets, sample, scale, max_distance, num_buckets, num_queries, num_keys,
    batch_stride, head_stride, row_stride, key_stride, rows, keys,
):  # fmt: skip
    """Return the numbers of a sample's biases."""
    first, row_stride, rows, keys = find_pairs(bias, bias_offsets, sample, batch_stride, row_stride, key_stride, rows, keys)
    return BiasNumbers(
        1.0 / scale, max_distance, num_buckets, num_queries, num_keys, first, head_stride, row_stride, key_stride, rows, keys
    )  # fmt: skip


@triton.jit
def load_in_place(addresses):
    """Load from read-only tables in the layout in which a tile is needed.

    A plain load of so many numbers gets a layout of its own, and each tile then goes through shared memory. This is also free
    to leave a loop in which it always loads the same.
    """
    if INTERPRETED or not HAS_PTX:
        return tl.load(addresses)
    elif addresses.dtype.element_ty == tl.float32:
        return tl.inline_asm_elementwise("ld.global.nc.f32 $0, [$1];", "=f,l", [addresses], tl.float32, is_pure=True, pack=1)
    else:
        return tl.inline_asm_elementwise("ld.global.nc.b64 $0, [$1];", "=l,l", [addresses], tl.int64, is_pure=True, pack=1)


@triton.jit
def load_times(times, first, rows, length, IS_WHOLE: tl.constexpr):
    """Load the two floats that `split_times` made of rows' times; unless `IS_WHOLE`, the last row stands in for missing ones."""
    addresses = times + first + (rows - first).to(tl.int64) if IS_WHOLE else times + tl.minimum(rows, length - 1)
    return pair_of_floats(load_in_place(addresses))


@triton.jit
def load_bounds(times, total, index, start, first, length, ROWS: tl.constexpr):
    """Load two numbers between which the times of a tile lie, and maybe those of rows beside it."""
    bounds = times + total + (start // SPAN + index)
    least, largest = pair_of_floats(load_in_place(bounds + first // SPAN))
    for tile in tl.static_range(SPAN, ROWS, SPAN):
        other = pair_of_floats(load_in_place(bounds + tl.minimum(first + tile, length - 1) // SPAN))
        least, largest = tl.minimum(least, other[0]), tl.maximum(largest, other[1])
    return least, largest


@triton.jit
def distances(rows, keys, sample, rules):
    """From keys to queries, where all targets stand right behind the history."""
    positions = rows + sample.shift
    if rules.sight.num_targets is not None:
        positions, keys = tl.minimum(positions, sample.history), tl.minimum(keys, sample.history)
    return positions - keys


@triton.jit
def bits_of_time(rows, keys, first_query, first_key, sample, rules, IS_WHOLE: tl.constexpr):
    """The bits of the time from a key to a query as a float. No row is missing of those visited, the columns, if `IS_WHOLE`."""
    ARE_KEYS_VISITED: tl.constexpr = rows.shape[1] == 1
    q_times, k_times = rules.biases.q_times + sample.start, rules.biases.k_times + sample.key_start
    q_high, q_low = load_times(q_times, first_query, rows, sample.query_length, IS_WHOLE and not ARE_KEYS_VISITED)
    k_high, k_low = load_times(k_times, first_key, keys, sample.key_length, IS_WHOLE and ARE_KEYS_VISITED)
    return ((q_high - k_high) + (q_low - k_low)).to(tl.uint32, bitcast=True)


@triton.jit
def time_buckets(bits, num_buckets):
    """Two buckets an octave of the time between a query and a key: its float's exponent and first bit."""
    bucket = ((bits >> 22) % (FLOAT_BUCKETS // 2)).to(tl.int32) - FIRST_BUCKET
    return tl.minimum(tl.maximum(bucket, 0), num_buckets - 1)


@triton.jit
def bucket_range(first_query, first_key, sample, rules, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Return the least and the largest bucket that pairs of a tile may have. Bounds may be too wide, by roundings."""
    numbers = rules.numbers
    q_least, q_largest = load_bounds(
        rules.biases.q_times, numbers.num_queries, sample.index, sample.start, first_query, sample.query_length, ROWS
    )  # fmt: skip
    k_least, k_largest = load_bounds(
        rules.biases.k_times, numbers.num_keys, sample.index, sample.key_start, first_key, sample.key_length, KEYS
    )  # fmt: skip
    least = tl.maximum(tl.maximum(q_least - k_largest, k_least - q_largest), 0.0) * (1.0 - ROUNDING)
    largest = tl.maximum(q_largest - k_least, k_largest - q_least) * (1.0 + ROUNDING)
    least = time_buckets(least.to(tl.uint32, bitcast=True), numbers.num_buckets)
    return least, time_buckets(largest.to(tl.uint32, bitcast=True), numbers.num_buckets)


@triton.jit
def is_far(first_query, first_key, sample, rules, KEYS: tl.constexpr):
    """Whether all queries of a tile are so far behind all of its keys that they share the last bias of the table."""
    return distances(first_query, first_key + KEYS - 1, sample, rules) >= rules.numbers.max_distance


@triton.jit
def relative_biases(rows, keys, first_query, first_key, sample, rules):
    """Load a tile's biases by distance. Of an address only what the tile shares is computed for each tile.

    What is added along a tile's columns the compiler folds into the loads, what is subtracted it does not. With queries as rows
    the distance falls along the columns, and it is the second, mirrored half of `table` that is read.
    """
    ROWS: tl.constexpr = rows.shape[0] * rows.shape[1]
    KEYS: tl.constexpr = keys.shape[0] * keys.shape[1]
    farthest = rules.numbers.max_distance
    table = relative_table(sample, rules)
    if rules.sight.num_targets is not None:
        bias = load_in_place(table + tl.minimum(tl.maximum(distances(rows, keys, sample, rules), -farthest), farthest))
    else:
        apart = tl.minimum(tl.maximum(first_query + sample.shift - first_key, -farthest - ROWS), farthest + KEYS)
        query, key = (rows - first_query).to(tl.int64), (keys - first_key).to(tl.int64)
        if rows.shape[1] == 1:
            bias = load_in_place((table + 2 * (farthest + PADDING) + 1 - apart - query) + key)
        else:
            bias = load_in_place((table + apart - key) + query)
    return bias


@triton.jit
def relative_table(sample, rules):
    """Return where the bias of distance 0 stands."""
    reach = rules.numbers.max_distance + PADDING
    return rules.biases.relative + 2 * sample.head * (2 * reach + 1) + reach


@triton.jit
def biases_of(rows, keys, first_query, first_key, sample, rules, IS_WHOLE: tl.constexpr):
    """Return a tile's biases over the scale of scores, where sums of products begin, less its `common_bias`; None without any.

    Loads under a condition are not begun ahead of their loop's turn, which would take each number through shared memory.
    """
    ROWS: tl.constexpr = rows.shape[0] * rows.shape[1]
    KEYS: tl.constexpr = keys.shape[0] * keys.shape[1]
    tl.static_assert(ROWS + KEYS <= PADDING)
    bias = None
    if rules.biases.relative is not None or rules.biases.of_time is not None or rules.biases.pairs is not None:
        bias = tl.zeros([rows.shape[0] * keys.shape[0], rows.shape[1] * keys.shape[1]], tl.float32)
    if rules.biases.pairs is not None:
        at = rules.numbers.first_pair + sample.head * rules.numbers.head_stride
        at += rows.to(tl.int64) * rules.numbers.row_stride + keys.to(tl.int64) * rules.numbers.key_stride
        mask = (rows < rules.numbers.rows) & (keys < rules.numbers.keys)
        bias += over_scale(tl.load(rules.biases.pairs + at, mask=mask, other=0.0), rules.numbers.inverse_scale)
    if rules.biases.relative is not None:  # noqa: SIM102
        if not is_far(first_query, first_key, sample, rules, KEYS):
            near = relative_biases(rows, keys, first_query, first_key, sample, rules)
            bias = near if rules.biases.pairs is None else bias + near
    if rules.biases.of_time is not None:
        least, largest = bucket_range(first_query, first_key, sample, rules, ROWS, KEYS)
        if least != largest:
            bits = bits_of_time(rows, keys, first_query, first_key, sample, rules, IS_WHOLE)
            of_time = load_in_place(rules.biases.of_time + sample.head * FLOAT_BUCKETS + (bits >> 22))
            bias = of_time if rules.biases.relative is None and rules.biases.pairs is None else bias + of_time
    return bias


@triton.jit
def common_bias(first_query, first_key, sample, rules, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Return what all of a tile's biases have in common, over the scale of scores, which costs a score nothing; None without any.

    Most tiles are farther than a table of distances, or have one bucket of time. `biases_of` adds what this leaves out; they are
    two functions because Triton 3.6 returns no tuple with None in it.
    """
    common = None
    if rules.biases.relative is not None:
        farthest = load_in_place(relative_table(sample, rules) + rules.numbers.max_distance)
        common = tl.where(is_far(first_query, first_key, sample, rules, KEYS), farthest, 0.0)
    if rules.biases.of_time is not None:
        least, largest = bucket_range(first_query, first_key, sample, rules, ROWS, KEYS)
        of_time = load_in_place(rules.biases.of_time + sample.head * FLOAT_BUCKETS + FIRST_BUCKET + least)
        of_time = tl.where(least == largest, of_time, 0.0)
        common = of_time if common is None else common + of_time
    return common


@triton.jit
def less_common(subtrahend, common, factor):
    """What remains to be subtracted from scores for which a bias that all have in `common` was not added."""
    if common is None:
        return subtrahend
    else:
        return subtrahend - common * factor
