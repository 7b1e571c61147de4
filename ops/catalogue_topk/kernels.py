"""The best items of a catalogue as Triton kernels: tiles of logits live in registers, and only few of them are written.

1. For each row and each tile of 64 items the largest logit: one number of 64.
2. Each row's k tiles with the largest of these, smaller tiles first among equals. The k best items lie in them: were one of
   them in another tile, each of the k chosen tiles would hold an item before it, its largest (of an equal score at least, and
   then of a smaller id, because all ids of a smaller tile are smaller), and it would not be among the k best.
3. All logits of the chosen tiles again, as keys, of which top-k takes the best. (Row, tile) pairs are sorted by tile, so that a
   program computes one tile of items for the rows that chose it, with the products of step 1 and so its bits.

Rows are taken in chunks whose numbers fit into `max_bytes`. Where k tiles are much of the catalogue, all tiles are chosen and
steps 1 and 2 fall away.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged.ops._shared.device import dot, find_tile, load_tile, logits_of_tiles
from jagged.ops._shared.launch import Launcher
from jagged.ops._shared.matrices import aligned, float32_products, split
from jagged.ops._shared.offsets import sample_of_row
from jagged.ops._shared.sizes import cdiv
from jagged.ops.catalogue_topk.configurations import TILE_ITEMS, configuration
from jagged.ops.catalogue_topk.keys import ID_MASK, decode
from jagged.ops.catalogue_topk.spec import Best, Inputs, Options

# Programs the first kernel's launch aims at, by multiprocessor.
PROGRAMS = 4
# All tiles are chosen where k tiles are at least one of so many.
CHOSEN_OF = 2
# Bytes by (row, tile): a key and what top-k works in; by chosen pair: the keys of its items, itself, its sort, and top-k's.
_TILE_BYTES, _PAIR_BYTES = 16, 8 * TILE_ITEMS + 64

_TILE_BITS = TILE_ITEMS.bit_length() - 1
_LARGEST = torch.iinfo(torch.int64).max


@triton.jit
def reordered(score):
    """Bits of float32 scores as int32 numbers of the same order; zeros of either sign are equal, NaN is below -inf."""
    bits = score.to(tl.int32, bitcast=True)
    bits = tl.where(score == 0.0, 0, bits)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    # What a negative NaN's bits become.
    return tl.where(score == score, bits, -2143289345)


@triton.jit
def has_bit(bits, place):
    """Tell `[rows, items]` whether each row's int64 has a bit set, in halves: shifts of int64 take twice the registers."""
    low = bits.to(tl.int32)
    high = (bits >> 32).to(tl.int32)
    half = tl.where((place < 32)[None, :], low[:, None], high[:, None])
    return ((half >> (place & 31)[None, :]) & 1) != 0


@triton.jit
def find_hits(hit_offsets, hit_tiles, row, tile, exists):
    """Return for each row the place of its first hit in `tile` or a later one, and the end of its hits."""
    low = tl.load(hit_offsets + row, mask=exists, other=0)
    end = tl.load(hit_offsets + row + 1, mask=exists, other=0)
    high = end
    while tl.max(high - low, 0) > 0:
        searching = low < high
        middle = (low + high) // 2
        is_before = searching & (tl.load(hit_tiles + middle, mask=searching, other=0) < tile)
        low = tl.where(is_before, middle + 1, low)
        high = tl.where(searching & (is_before == 0), middle, high)
    return low, end


@triton.jit(do_not_specialize=["num_rows", "num_items", "num_tiles", "tiles_per_part"])
def catalogue_topk_maximum_kernel(
    hidden, weight, bias, hit_offsets, hit_tiles, hit_bits, keys, num_rows, num_items, num_tiles, hidden_stride, weight_stride,
    tiles_per_part, HAS_BIAS: tl.constexpr, HAS_HITS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Key of each tile for a block of rows over one part of the tiles: its largest logit above its index counted down."""
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    exists = row < num_rows
    column = tl.arange(0, BLOCK_V)
    first = tl.program_id(1) * tiles_per_part
    if WIDTH <= BLOCK_K:
        hidden_tile = load_tile(hidden, row, hidden_stride, exists, 0, WIDTH, BLOCK_K)
    if HAS_HITS:
        hit, end = find_hits(hit_offsets, hit_tiles, row, first, exists)
        hit_tile = tl.load(hit_tiles + hit, mask=hit < end, other=num_tiles)
    for tile in range(first, tl.minimum(first + tiles_per_part, num_tiles)):
        # Places past the last item repeat it, which leaves the largest logit as it is.
        last = tl.minimum(num_items - tile * BLOCK_V, BLOCK_V) - 1
        item = tile * BLOCK_V + tl.minimum(column, last)
        if WIDTH <= BLOCK_K:
            weight_tile = load_tile(weight, item, weight_stride, item >= 0, 0, WIDTH, BLOCK_K).to(hidden_tile.dtype)
            logits = dot(hidden_tile, tl.trans(weight_tile), None, PRECISION)
        else:
            logits = logits_of_tiles(
                hidden, row, hidden_stride, exists, weight, item, weight_stride, item >= 0, WIDTH, BLOCK_N, BLOCK_V, BLOCK_K,
                PRECISION,
            )  # fmt: skip
        if HAS_BIAS:
            logits += tl.load(bias + item).to(tl.float32)[None, :]
        # One bit for each item that is not there, or not for this row.
        gone = tl.zeros((BLOCK_N,), tl.int64)
        if HAS_HITS:
            is_hit = hit_tile == tile
            if tl.max(is_hit.to(tl.int32), 0) > 0:
                gone = tl.load(hit_bits + hit, mask=is_hit, other=0)
                hit += is_hit.to(tl.int64)
                hit_tile = tl.load(hit_tiles + hit, mask=hit < end, other=num_tiles)
                # Where the last item is gone its repetitions are too.
                last_bit = last.to(tl.int64)
                gone |= tl.where(((gone >> last_bit) & 1) != 0, -2 << last_bit, 0)
                # A maximum passes over NaN, and is NaN where there is nothing else.
                logits = tl.where(has_bit(gone, column), float("nan"), logits)
        order = tl.where(gone == -1, -2147483648, reordered(tl.max(logits, 1)))
        key = (order.to(tl.int64) << 32) | (4294967295 - tl.cast(tile, tl.int64))
        tl.store(keys + row.to(tl.int64) * num_tiles + tile, key, mask=exists)


@triton.jit(do_not_specialize=["num_items", "num_tiles", "num_pairs", "tiles_per_row"])
def catalogue_topk_items_kernel(
    hidden, weight, bias, hit_offsets, hit_tiles, hit_bits, tile_offsets, pairs, keys, num_items, num_tiles, num_pairs,
    tiles_per_row, hidden_stride, weight_stride, HAS_BIAS: tl.constexpr, HAS_HITS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Keys `[num_pairs, BLOCK_V]` of one tile's items for a block of the rows that chose it.

    Pair p is a tile that row `p // tiles_per_row` chose; `pairs` has them by tile, those of each from its `tile_offsets` on.
    """
    tile, start, length, begin = find_tile(tile_offsets, tl.program_id(0), num_tiles, num_pairs, BLOCK_N)
    if begin >= length:
        return
    place = begin + tl.arange(0, BLOCK_N)
    exists = place < length
    pair = tl.load(pairs + start + place, mask=exists, other=0)
    row = pair // tiles_per_row
    column = tl.arange(0, BLOCK_V)
    item = tile * BLOCK_V + column
    source = tl.minimum(item, num_items - 1)
    if WIDTH <= BLOCK_K:
        hidden_tile = load_tile(hidden, row, hidden_stride, exists, 0, WIDTH, BLOCK_K)
        weight_tile = load_tile(weight, source, weight_stride, source >= 0, 0, WIDTH, BLOCK_K).to(hidden_tile.dtype)
        logits = dot(hidden_tile, tl.trans(weight_tile), None, PRECISION)
    else:
        logits = logits_of_tiles(
            hidden, row, hidden_stride, exists, weight, source, weight_stride, source >= 0, WIDTH, BLOCK_N, BLOCK_V, BLOCK_K,
            PRECISION,
        )  # fmt: skip
    if HAS_BIAS:
        logits += tl.load(bias + source).to(tl.float32)[None, :]
    key = (reordered(logits).to(tl.int64) << 32) | (4294967295 - item)[None, :]
    is_there = (item < num_items)[None, :]
    if HAS_HITS:
        hit, end = find_hits(hit_offsets, hit_tiles, row, tile, exists)
        is_hit = hit < end
        is_hit &= tl.load(hit_tiles + hit, mask=is_hit, other=0) == tile
        gone = tl.load(hit_bits + hit, mask=is_hit, other=0)
        is_there = is_there & (has_bit(gone, column) == 0)
    key = tl.where(is_there, key, -9223372036854775808)
    tl.store(keys + pair[:, None] * BLOCK_V + column[None, :], key, mask=exists[:, None])


_launch_maximum = Launcher(catalogue_topk_maximum_kernel)
_launch_items = Launcher(catalogue_topk_items_kernel)


def catalogue_topk(x: Inputs, o: Options) -> Best:
    """Launch both kernels for as many rows at a time as the bound on memory has room for."""
    hidden, weight, bias, exclude_ids, exclude_offsets = x
    k, max_bytes = o
    num_rows, num_items = hidden.shape[0], weight.shape[0]
    scores = hidden.new_full((num_rows, k), -torch.inf, dtype=torch.float32)
    ids = hidden.new_full((num_rows, k), -1, dtype=torch.int64)
    if num_rows * num_items == 0:
        return Best(scores, ids)
    hidden, weight = aligned(hidden), aligned(weight)
    bias = None if bias is None else bias.contiguous()
    hits = None
    if exclude_ids is not None and exclude_offsets is not None and exclude_ids.numel():
        hits = hits_of_rows(exclude_ids, exclude_offsets, num_rows, num_items)
    num_tiles = cdiv(num_items, TILE_ITEMS)
    chooses = k * CHOSEN_OF < num_tiles
    tiles_per_row = k if chooses else num_tiles
    of_row = tiles_per_row * _PAIR_BYTES + (num_tiles * _TILE_BYTES if chooses else 0)
    step = max(1, max_bytes // of_row)
    # Whole blocks of rows where there are several.
    block = configuration(hidden.shape[1], hidden.dtype).rows
    step = step // block * block or step
    for first in range(0, num_rows, step):
        rows = slice(first, min(first + step, num_rows))
        of_rows = (None, None, None) if hits is None else (hits[0][first:], *hits[1:])
        inputs = (hidden[rows], weight, bias, *of_rows)
        chosen = None
        if chooses:
            best_tiles = torch.topk(_tile_keys(inputs), k, dim=1, sorted=False).values
            chosen = (ID_MASK - best_tiles.bitwise_and_(ID_MASK)).to(torch.int32)
        best = torch.topk(_keys(inputs, chosen), min(k, tiles_per_row * TILE_ITEMS), dim=1).values
        scores[rows, : best.shape[1]], ids[rows, : best.shape[1]] = decode(best)
    return Best(scores, ids)


def _tile_keys(inputs: tuple[Any, ...]) -> Tensor:
    """Return the key of each tile `[n, tiles]`: its largest logit, reordered, above its index counted down."""
    hidden, weight = inputs[:2]
    num_rows, num_items = hidden.shape[0], weight.shape[0]
    tile = configuration(hidden.shape[1], hidden.dtype)
    num_tiles, row_blocks = cdiv(num_items, TILE_ITEMS), cdiv(num_rows, tile.rows)
    num_parts, tiles_per_part = split(num_tiles, 1, row_blocks, PROGRAMS, hidden.device)
    keys = hidden.new_empty(num_rows, num_tiles, dtype=torch.int64)
    _launch_maximum(
        (row_blocks, num_parts), *inputs, keys, num_rows, num_items, num_tiles, hidden.stride(0), weight.stride(0),
        tiles_per_part, **_constants(inputs),
    )  # fmt: skip
    return keys


def _keys(inputs: tuple[Any, ...], chosen: Tensor | None) -> Tensor:
    """Return the keys `[n, tiles * TILE_ITEMS]` of all items in the chosen tiles of each row; None chooses all."""
    hidden, weight = inputs[:2]
    num_rows, num_items = hidden.shape[0], weight.shape[0]
    num_tiles = cdiv(num_items, TILE_ITEMS)
    if chosen is None:
        tiles_per_row = num_tiles
        tile_offsets = torch.arange(num_tiles + 1, device=hidden.device) * num_rows
        pairs = torch.arange(num_rows * num_tiles, device=hidden.device).view(num_rows, num_tiles).t().flatten()
    else:
        tiles_per_row = chosen.shape[1]
        by_tile, pairs = torch.sort(chosen.flatten(), stable=True)
        tile_offsets = torch.searchsorted(by_tile, torch.arange(num_tiles + 1, dtype=torch.int32, device=hidden.device))
    keys = hidden.new_empty(num_rows, tiles_per_row * TILE_ITEMS, dtype=torch.int64)
    block = configuration(hidden.shape[1], hidden.dtype).rows
    _launch_items(
        (pairs.numel() // block + num_tiles,), *inputs, tile_offsets, pairs, keys, num_items, num_tiles, pairs.numel(),
        tiles_per_row, hidden.stride(0), weight.stride(0), **_constants(inputs),
    )  # fmt: skip
    return keys


def _constants(inputs: tuple[Any, ...]) -> dict[str, Any]:
    hidden, _, bias, hits, *_ = inputs
    tile = configuration(hidden.shape[1], hidden.dtype)
    return {
        "HAS_BIAS": bias is not None,
        "HAS_HITS": hits is not None,
        "BLOCK_N": tile.rows,
        "BLOCK_V": TILE_ITEMS,
        "BLOCK_K": tile.step,
        "WIDTH": hidden.shape[1],
        "PRECISION": float32_products(),
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def hits_of_rows(ids: Tensor, offsets: Tensor, num_rows: int, num_items: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return which items a row must not get, by tile: a hit is a (row, tile) pair with one bit set for each such item.

    Returns:
        Where the hits of each row begin `[num_rows + 1]` (int64), and of each hit its tile (int32) and its bits (int64), `[M]`
        as many as ids, of which the first are hits, by row and by tile.
    """
    ids = ids.to(torch.int64)
    known = (ids >= 0) & (ids < num_items)
    key = torch.where(known, (sample_of_row(offsets, ids.shape[0]) << 32) + ids, _LARGEST).sort().values
    bit = torch.ones_like(key) << (key & (TILE_ITEMS - 1))
    # An item that repeats has one bit.
    is_first = key.diff(prepend=key.new_full((1,), -1)) != 0
    bit = torch.where(is_first & (key != _LARGEST), bit, 0)
    pair = key >> _TILE_BITS
    hit_of_key = (pair.diff(prepend=pair.new_full((1,), -1)) != 0).cumsum(0) - 1
    first_key = torch.searchsorted(hit_of_key, torch.arange(ids.shape[0] + 1, device=ids.device))
    # Sums of different bits; that they overflow on the way does not show in their differences.
    bits_before = torch.cat([bit.new_zeros(1), bit.cumsum(0)])
    bits = bits_before[first_key].diff()
    pair = torch.cat([pair, pair.new_full((1,), _LARGEST)])[first_key[:-1]]
    row_bits = 32 - _TILE_BITS
    hit_offsets = torch.searchsorted(pair, torch.arange(num_rows + 1, device=ids.device) << row_bits)
    return hit_offsets, (pair & (2**row_bits - 1)).to(torch.int32), bits
