"""Lookups of small batches sorted by their rows: chunks of them by a program each, and then each lookup put at its rank.

A sort by digits takes a dozen launches, which are most of a small batch's time. Here a chunk is sorted in registers, and a second
kernel counts for each lookup how many of every other chunk stand before it. Lookups of a table stand together, and tables in the
order of their rows, or nearly so: most chunks lie before another one or behind it, and only the others are searched.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Most lookups that are sorted so: of few tables, of each table where there are many, and of all. Many of one table are in many
# chunks that each of them is searched for.
MOST_OF_FEW, MOST_OF_TABLE, MOST_OF_ALL = 1 << 14, 256, 1 << 18
# Lookups of a chunk, a power of two.
CHUNK = 512
# Places that a pair, of key and place, has room for; and what is behind all pairs.
PLACES, NO_PAIR = tl.constexpr(1 << 20), tl.constexpr(2**63 - 1)
# Lookups of a program that ranks them, chunks that it looks at together, and warps of both.
RANKED, CHUNKS_TOGETHER, WARPS = 128, tl.constexpr(32), 4


def is_merged(num_lookups: int, num_tables: int) -> bool:
    """Return whether a batch is sorted in chunks."""
    return num_lookups <= min(max(MOST_OF_FEW, MOST_OF_TABLE * num_tables), MOST_OF_ALL)


@triton.jit(do_not_specialize=["num_lookups"])
def embedding_bags_chunk_sort_kernel(keys, pairs, num_lookups, CHUNK: tl.constexpr):
    """Sort the lookups of a chunk by key and place, of which `pairs` `[chunks, CHUNK]` are made."""
    place = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    exists = place < num_lookups
    pair = tl.load(keys + place, mask=exists, other=0).to(tl.int64) * PLACES + place
    tl.store(pairs + place, tl.sort(tl.where(exists, pair, NO_PAIR)))


@triton.jit
def num_below(pairs, size, pair, CHUNK: tl.constexpr):
    """Return how many of `size` sorted pairs are below each of some others."""
    count, step = tl.zeros(pair.shape, tl.int32), size * 0 + CHUNK
    while step > 0:
        is_within = count + step <= size
        other = tl.load(pairs + (count + step - 1), mask=is_within, other=NO_PAIR)
        count = tl.where(is_within & (other < pair), count + step, count)
        step //= 2
    return count


@triton.jit(do_not_specialize=["num_lookups"])
def embedding_bags_merge_kernel(
    pairs, sources, factors, sorted_keys, sorted_sources, sorted_factors, num_lookups, CHUNK: tl.constexpr, RANKED: tl.constexpr
):  # fmt: skip
    """Put keys, sources and factors of some lookups of a chunk where all chunks' order has them."""
    begin = tl.program_id(0) * RANKED
    chunk, num_chunks = begin // CHUNK, (num_lookups + CHUNK - 1) // CHUNK
    at = begin + tl.arange(0, RANKED)
    exists = at < num_lookups
    pair = tl.load(pairs + at, mask=exists, other=NO_PAIR)
    lowest, highest = tl.load(pairs + begin), tl.load(pairs + tl.minimum(begin + RANKED, num_lookups) - 1)
    rank = at - chunk * CHUNK
    for start in range(0, num_chunks, CHUNKS_TOGETHER):
        other = start + tl.arange(0, CHUNKS_TOGETHER)
        size = tl.minimum(num_lookups - other * CHUNK, CHUNK)
        is_other = (size > 0) & (other != chunk)
        least = tl.load(pairs + other * CHUNK, mask=is_other, other=NO_PAIR)
        most = tl.load(pairs + other * CHUNK + size - 1, mask=is_other, other=NO_PAIR)
        rank += tl.sum(tl.where(is_other & (most < lowest), size, 0), 0)
        is_met = is_other & (most >= lowest) & (least <= highest)
        while tl.max(is_met.to(tl.int32), 0) != 0:
            found = tl.min(tl.where(is_met, other, 2**31 - 1), 0)
            is_met &= other != found
            of_found = tl.minimum(num_lookups - found * CHUNK, CHUNK)
            rank += num_below(pairs + found * CHUNK, of_found, pair, CHUNK)
    place = (pair % PLACES).to(tl.int32)
    tl.store(sorted_keys + rank, (pair // PLACES).to(sorted_keys.dtype.element_ty), mask=exists)
    tl.store(sorted_sources + rank, tl.load(sources + place, mask=exists, other=0), mask=exists)
    if factors is not None:
        tl.store(sorted_factors + rank, tl.load(factors + place, mask=exists, other=0.0), mask=exists)
