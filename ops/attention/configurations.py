"""Tile sizes of the attention kernels. Nothing else decides how they are launched.

One table serves compute capabilities 8.0 to 10.0: every row compiles without a spill for each of them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Tiles(NamedTuple):
    """Rows that a program owns, rows that it visits at a time, and how Triton runs it."""

    own: int
    visit: int
    num_warps: int
    num_stages: int


class Configuration(NamedTuple):
    """`forward` and `dq` own queries and visit keys, `dkv` owns keys and visits queries."""

    forward: Tiles
    dq: Tiles
    dkv: Tiles


# Batches whose mean length is at most this take the tiles for short samples.
SHORT = 32

# (bytes of an element, head width rounded up to a power of two, short samples)
TABLE = {
    (2, 16, True): Configuration(Tiles(32, 32, 2, 2), Tiles(32, 32, 2, 2), Tiles(32, 32, 4, 2)),
    (2, 32, True): Configuration(Tiles(32, 32, 2, 2), Tiles(32, 32, 2, 2), Tiles(32, 32, 2, 2)),
    (2, 64, True): Configuration(Tiles(32, 32, 2, 2), Tiles(32, 32, 2, 2), Tiles(32, 32, 2, 2)),
    (2, 128, True): Configuration(Tiles(32, 32, 2, 2), Tiles(32, 32, 4, 2), Tiles(32, 32, 4, 2)),
    (2, 16, False): Configuration(Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2)),
    (2, 32, False): Configuration(Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2)),
    (2, 64, False): Configuration(Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2)),
    (2, 128, False): Configuration(Tiles(64, 64, 4, 3), Tiles(128, 32, 8, 3), Tiles(64, 64, 8, 2)),
    (4, 16, True): Configuration(Tiles(32, 16, 4, 2), Tiles(32, 16, 4, 2), Tiles(32, 16, 4, 2)),
    (4, 32, True): Configuration(Tiles(32, 16, 4, 2), Tiles(32, 16, 4, 2), Tiles(32, 32, 4, 2)),
    (4, 64, True): Configuration(Tiles(32, 32, 8, 2), Tiles(32, 16, 4, 2), Tiles(16, 16, 4, 1)),
    (4, 128, True): Configuration(Tiles(32, 16, 8, 2), Tiles(16, 16, 4, 2), Tiles(16, 16, 4, 1)),
    (4, 16, False): Configuration(Tiles(64, 32, 4, 2), Tiles(64, 32, 4, 2), Tiles(64, 32, 4, 2)),
    (4, 32, False): Configuration(Tiles(64, 32, 4, 2), Tiles(64, 32, 4, 2), Tiles(32, 32, 4, 2)),
    (4, 64, False): Configuration(Tiles(32, 32, 8, 2), Tiles(32, 32, 8, 2), Tiles(32, 32, 8, 2)),
    (4, 128, False): Configuration(Tiles(32, 16, 8, 2), Tiles(16, 16, 4, 2), Tiles(16, 16, 4, 1)),
}


def padded_width(head_dim: int) -> int:
    """Return the width of a tile that holds `head_dim` columns: a power of two, at least the 16 that a matrix unit takes."""
    return max(16, 1 << (head_dim - 1).bit_length())


def configuration(head_dim: int, dtype: torch.dtype, total: int, batch_size: int) -> Configuration:
    """Choose from shapes alone: at most two variants for each head width and dtype, however lengths change.

    Rows of a width that is no multiple of 16 need not begin at 16 bytes; such rows reach shared memory through registers, which
    the large tiles have none to spare for.
    """
    return TABLE[dtype.itemsize, padded_width(head_dim), head_dim % 16 != 0 or total <= SHORT * batch_size]
