"""Tile sizes of the kernels. Nothing else decides how they are launched.

Every row compiles for compute capabilities 8.0, 9.0 and 10.0 without a spill; widths above the last row's go in steps of its
columns.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import torch

from jagged.ops._shared.sizes import next_power_of_2

# From this number of rows that share a draw on, logits are products of matrices.
SHARED_ROWS = 16


class RowConfiguration(NamedTuple):
    """Negatives (or entries) of one row (or item) at a time, columns of its gradient, and how Triton runs it."""

    negatives: int
    columns: int
    num_warps: int


class BlockConfiguration(NamedTuple):
    """Rows and negatives of a tile of logits, columns of its gradient, columns of a step of its logits, how Triton runs it."""

    rows: int
    negatives: int
    columns: int
    step: int
    num_warps: int
    num_stages: int


# {width at most: tile}; forward, one row a program.
ROW_TILES: dict[int, RowConfiguration] = {
    32: RowConfiguration(64, 32, 2),
    64: RowConfiguration(64, 64, 2),
    128: RowConfiguration(32, 128, 2),
    256: RowConfiguration(8, 256, 1),
    512: RowConfiguration(16, 256, 4),
}
# The rows that differ on a major compute capability.
ROW_EXCEPTIONS: dict[int, dict[int, RowConfiguration]] = {10: {256: RowConfiguration(16, 256, 2)}}
# Gradient of the weights, one item a program: few entries an item, so few at a time, and one warp, which waits for no other.
ITEM_TILES: dict[int, RowConfiguration] = {
    32: RowConfiguration(16, 32, 1),
    64: RowConfiguration(8, 64, 1),
    128: RowConfiguration(2, 128, 1),
    256: RowConfiguration(2, 256, 1),
    512: RowConfiguration(8, 256, 2),
}
# Kernel and bytes of an element: {width at most: tile}, for rows that share a draw.
BLOCK_TILES: dict[tuple[str, int], dict[int, BlockConfiguration]] = {
    ("forward", 2): {
        64: BlockConfiguration(128, 64, 64, 64, 4, 3),
        128: BlockConfiguration(128, 64, 128, 128, 4, 3),
        256: BlockConfiguration(256, 64, 256, 256, 8, 2),
        512: BlockConfiguration(128, 64, 64, 64, 4, 4),
    },
    ("directions", 2): {
        64: BlockConfiguration(128, 64, 64, 64, 4, 3),
        128: BlockConfiguration(128, 64, 128, 128, 8, 3),
        256: BlockConfiguration(128, 64, 256, 256, 8, 3),
        512: BlockConfiguration(64, 64, 256, 128, 8, 2),
    },
    ("sums", 2): {
        64: BlockConfiguration(64, 64, 64, 64, 4, 3),
        128: BlockConfiguration(64, 64, 128, 128, 4, 2),
        256: BlockConfiguration(64, 64, 256, 256, 4, 2),
        512: BlockConfiguration(64, 64, 256, 128, 8, 2),
    },
    # Products in IEEE float32 keep both operands of a step in registers: short steps, small tiles.
    ("forward", 4): {512: BlockConfiguration(64, 64, 32, 32, 8, 2)},
    ("directions", 4): {
        64: BlockConfiguration(64, 32, 64, 64, 8, 2),
        128: BlockConfiguration(64, 16, 128, 128, 8, 2),
        256: BlockConfiguration(32, 16, 256, 16, 8, 2),
    },
    ("sums", 4): {
        64: BlockConfiguration(64, 32, 64, 64, 8, 2),
        128: BlockConfiguration(16, 64, 128, 128, 8, 2),
        256: BlockConfiguration(16, 32, 256, 16, 8, 2),
    },
}

# The same for all kernels where lists, a filter or softplus take registers.
SMALL_BLOCK_TILES: dict[int, dict[int, BlockConfiguration]] = {
    2: {
        64: BlockConfiguration(64, 32, 64, 64, 4, 3),
        128: BlockConfiguration(64, 32, 128, 128, 8, 2),
        256: BlockConfiguration(64, 32, 256, 256, 8, 2),
        512: BlockConfiguration(64, 32, 256, 128, 8, 2),
    },
    4: {
        64: BlockConfiguration(32, 32, 64, 64, 8, 2),
        128: BlockConfiguration(16, 32, 128, 16, 8, 2),
        256: BlockConfiguration(16, 16, 256, 16, 8, 2),
    },
}

# From this number of rows of a draw on, the tiles above; below it those that differ, by kernel, bytes of an element and width.
MANY_ROWS = 256
FEW_ROWS_TILES: dict[tuple[str, int, int], BlockConfiguration] = {
    ("forward", 2, 256): BlockConfiguration(128, 128, 256, 256, 8, 2),
    ("directions", 2, 256): BlockConfiguration(64, 64, 256, 256, 4, 2),
}

# Major compute capability: rows that differ there, by kernel, bytes of an element and width.
EXCEPTIONS: dict[int, dict[tuple[str, int, int], BlockConfiguration]] = {
    8: {
        ("forward", 2, 128): BlockConfiguration(128, 64, 128, 128, 8, 3),
        ("forward", 2, 256): BlockConfiguration(128, 64, 256, 256, 8, 2),
        ("forward", 2, 512): BlockConfiguration(64, 64, 128, 128, 8, 3),
        ("forward", 4, 512): BlockConfiguration(64, 32, 32, 32, 8, 2),
        ("directions", 2, 256): BlockConfiguration(64, 64, 256, 256, 8, 2),
        ("sums", 2, 256): BlockConfiguration(64, 64, 256, 256, 8, 2),
    },
    10: {
        ("directions", 2, 64): BlockConfiguration(64, 64, 64, 64, 4, 3),
        ("forward", 2, 512): BlockConfiguration(128, 64, 128, 128, 8, 3),
        ("forward", 4, 512): BlockConfiguration(64, 32, 32, 32, 8, 2),
    },
}


def _limit(width: int, table: Mapping[int, object]) -> int:
    return min((limit for limit in table if width <= limit), default=max(table))


@functools.cache
def row_configuration(width: int, dtype: torch.dtype, capability: int) -> RowConfiguration:
    """Return the tile of the forward of one row; float32 takes half the negatives in the same registers."""
    limit = _limit(width, ROW_TILES)
    tile = ROW_EXCEPTIONS.get(capability, {}).get(limit, ROW_TILES[limit])
    return tile._replace(negatives=tile.negatives // 2) if dtype.itemsize == 4 else tile


@functools.cache
def item_configuration(width: int) -> RowConfiguration:
    """Return the tile of the gradient of one item."""
    return ITEM_TILES[_limit(width, ITEM_TILES)]


@functools.cache
def block_configuration(
    kernel: str, width: int, dtype: torch.dtype, capability: int, rows_per_draw: int, *, is_plain: bool = True
) -> BlockConfiguration:
    """Return the tile of a kernel for rows that share a draw; draws of fewer rows have lower tiles.

    `is_plain` says that the loss is a softmax, without lists and a filter.
    """
    table = BLOCK_TILES[kernel, dtype.itemsize] if is_plain else SMALL_BLOCK_TILES[dtype.itemsize]
    limit = _limit(width, table)
    # GPUs of capability 12 have the matrix instructions and the shared memory of the eighth generation.
    exceptions = EXCEPTIONS.get(8 if capability > 10 else capability, {}) if is_plain else {}
    if is_plain and capability == 9 and rows_per_draw < MANY_ROWS:
        exceptions = FEW_ROWS_TILES
    tile = exceptions.get((kernel, dtype.itemsize, limit), table[limit])
    return tile._replace(rows=max(SHARED_ROWS, min(tile.rows, next_power_of_2(rows_per_draw))))
