"""Tile sizes of the kernels. Nothing else decides how they are launched.

Both kernels take the same row, because a logit must have the same bits in both. Loops over a wide row have two stages: with
three, the assembler inside Triton 3.6 gives wrong logits on 9.0 where such a loop has two to four steps, CUDA 13's right ones.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

#: Items of a tile: as many as an int64 has bits for those that a row must not get.
TILE_ITEMS = 64


class Configuration(NamedTuple):
    """Rows of a tile, columns of a step of its logits, and how Triton runs it.

    Where `step` holds the whole width, the rows that a program owns stay on chip.
    """

    rows: int
    step: int
    num_warps: int
    num_stages: int


# Bytes of an element of hidden: {width of the hidden states at most: tile}; the last serves every larger width too.
CONFIGURATIONS: dict[int, dict[int, Configuration]] = {
    2: {
        64: Configuration(128, 64, 4, 3),
        128: Configuration(128, 128, 4, 3),
        256: Configuration(128, 256, 8, 2),
        512: Configuration(128, 128, 8, 2),
    },
    # Products in IEEE float32 keep both operands of a step in registers: short steps, small tiles.
    4: {512: Configuration(64, 16, 8, 2)},
}


def configuration(width: int, dtype: torch.dtype) -> Configuration:
    """Return the tile for a width of the hidden states and their dtype."""
    table = CONFIGURATIONS[dtype.itemsize]
    return table[min((limit for limit in table if width <= limit), default=max(table))]
