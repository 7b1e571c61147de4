"""Tile schedules: which program works on which sample, from shapes alone on the host and from offsets on the device."""

from __future__ import annotations

import torch
from torch import Tensor


def tile_offsets(offsets: Tensor, block: int) -> Tensor:
    """Return `[B + 1]` (int32): where each sample's tiles of `block` rows begin in the list of all tiles.

    Sample b owns tiles `tile_offsets[b] .. tile_offsets[b + 1] - 1`; an empty sample owns none.
    """
    tiles = offsets.new_zeros(offsets.shape[0], dtype=torch.int32)
    counts = (offsets.diff().clamp_(min=0) + (block - 1)) // block
    torch.cumsum(counts, 0, dtype=torch.int32, out=tiles[1:])
    return tiles


def max_tiles(total: int, batch_size: int, block: int) -> int:
    """Return the most tiles of `block` rows that `batch_size` samples of `total` rows together can need."""
    return total // block + min(batch_size, total)
