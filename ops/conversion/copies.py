"""Rows in pages as a Triton kernel: whole rows are copied, and one look-up finds those of a tile."""

from __future__ import annotations

import functools
import math

import triton
import triton.language as tl

from jagged.ops._shared.device import find_tile, load_segment
from jagged.ops._shared.launch import Launcher
from jagged.ops._shared.sizes import cdiv, next_power_of_2
from jagged.ops.conversion.spec import Pages, Paging, Taken

# Bytes of a program's tile, of one warp: each thread has eight accesses of 16 bytes under way. On an H200 278,528 rows of 2 KB
# take 287 us, which is 4.0 TB/s, with 16 KB and four warps 304. Two warps take 286; their kernel spills on compute capability 10.
TILE_BYTES = 4_096
MOST_COLUMNS = 1024
NUM_WARPS = 1


@functools.cache
def block_sizes(page_rows: int, columns: int, itemsize: int) -> tuple[int, int]:
    """Return rows and columns of a tile. Rows divide a page, so that no tile lies in two."""
    block_columns = min(next_power_of_2(columns), MOST_COLUMNS)
    most = max(1, TILE_BYTES // (block_columns * itemsize))
    # The largest power of two that divides a page.
    return min(page_rows & -page_rows, most), block_columns


@triton.jit(do_not_specialize=["pages_of_sample", "pool_rows", "num_samples", "num_rows", "num_joined"])
def extend_pages_kernel(
    pool, pages, first, second, joined, offsets, kept_offsets, joined_offsets, first_stride, second_stride, pages_of_sample,
    pool_rows, num_samples, num_rows, num_joined,
    WIDTH: tl.constexpr, PAGE_ROWS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Put new rows behind those in pages. Of sample b, whose rows begin at j in `joined` and at o among the new ones:

        joined[j + p] = pool[place(b, p)]       for p < known = rows of b in `joined` - new rows of b
        joined[j + p] = new[o + p - known]      for the others, and so is pool[place(b, p)] for p < known + kept
        place(b, p) = pages[b, p // PAGE_ROWS] * PAGE_ROWS + p % PAGE_ROWS

    A new row has one half, or two side by side. Nobody reads a row of the pool that another program writes: a page is one
    sample's. Wrong numbers lead to no row outside of the tensors.
    """
    sample, start, length, position = find_tile(joined_offsets, tl.program_id(0), num_samples, num_joined, BLOCK_ROWS)
    if position >= length:
        return
    own_start, own_end = load_segment(offsets, sample, num_rows)
    known = length - (own_end - own_start)
    COLUMNS: tl.constexpr = WIDTH if second is None else 2 * WIDTH
    within = tl.arange(0, BLOCK_ROWS)
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
    page = position // PAGE_ROWS
    page = tl.load(pages + sample * pages_of_sample + page, mask=page < pages_of_sample, other=-1).to(tl.int64)
    place = page * PAGE_ROWS + position % PAGE_ROWS + within
    is_in_pool = (place >= 0) & (place < pool_rows)
    in_pool = pool + place[:, None] * COLUMNS + column
    in_joined = joined + (start + position + within)[:, None] * COLUMNS + column
    at = position + within
    # Whole tiles of known rows are nearly all of them, and have one load.
    if position + BLOCK_ROWS <= known:
        mask = is_in_pool[:, None] & (column < COLUMNS)
        tl.store(in_joined, tl.load(in_pool, mask=mask), mask=mask)
    else:
        is_known = at < known
        row = own_start + at - known
        is_new = (row >= own_start) & (row < own_end)
        tile = tl.load(in_pool, mask=(is_known & is_in_pool)[:, None] & (column < COLUMNS), other=0)
        own = tl.load(first + row[:, None] * first_stride + column, mask=is_new[:, None] & (column < WIDTH), other=0)
        if second is not None:
            is_second = is_new[:, None] & (column >= WIDTH) & (column < COLUMNS)
            other = tl.load(second + row[:, None] * second_stride + (column - WIDTH), mask=is_second, other=0)
            own = tl.where(column < WIDTH, own, other)
        tl.store(in_joined, tl.where(is_known[:, None], tile, own), mask=(at < length)[:, None] & (column < COLUMNS))
        kept = known + tl.load(kept_offsets + sample + 1) - tl.load(kept_offsets + sample)
        is_kept = is_new & (at < kept) & is_in_pool
        tl.store(in_pool, own, mask=is_kept[:, None] & (column < COLUMNS))


_launch_extend_pages = Launcher(extend_pages_kernel)


def extend_pages(x: Pages, o: Paging) -> Taken:
    """Launch `extend_pages_kernel`."""
    features = x.pool.shape[1:]
    joined = x.pool.new_empty(o.total, *features)
    columns = math.prod(features)
    if joined.numel():
        width = columns if x.second is None else columns // 2
        # Of projections the halves are views with adjacent numbers in each row.
        first = x.first.reshape(-1, width)
        first = first if first.stride(1) == 1 or width == 1 else first.contiguous()
        second = None
        if x.second is not None:
            second = x.second.reshape(-1, width)
            second = second if second.stride(1) == 1 or width == 1 else second.contiguous()
        num_samples, pages_of_sample = x.pages.shape
        block_rows, block_columns = block_sizes(o.page_rows, columns, x.pool.element_size())
        _launch_extend_pages(
            (o.total // block_rows + num_samples, cdiv(columns, block_columns)),
            x.pool, x.pages.contiguous(), first, second, joined, x.offsets.contiguous(), x.kept_offsets.contiguous(),
            x.joined_offsets.contiguous(), first.stride(0), 0 if second is None else second.stride(0), pages_of_sample,
            x.pool.shape[0], num_samples, first.shape[0], o.total,
            WIDTH=width, PAGE_ROWS=o.page_rows, BLOCK_ROWS=block_rows, BLOCK_COLUMNS=block_columns, num_warps=NUM_WARPS,
        )  # fmt: skip
    return Taken(joined)
