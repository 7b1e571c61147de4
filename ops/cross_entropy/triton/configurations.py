"""Tile sizes of the kernels. Nothing else decides how they are launched.

Every row compiles for compute capabilities 8.0, 9.0 and 10.0, and spills nothing but what the tests of ahead-of-time compilation
name; those for 8 fit into the 99 KiB of shared memory that 8.6 and 8.9 have. Tiles were measured on 9.0.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch


class Configuration(NamedTuple):
    """Rows and items of a tile, columns of its gradient, columns of a step of its logits, and how Triton runs it.

    Where `step` holds the whole width, the side that a program owns stays on chip.
    """

    rows: int
    items: int
    columns: int
    step: int
    num_warps: int
    num_stages: int


# kernel and bytes of an element: {width of the hidden states at most: tile}; the last serves every larger width too.
CONFIGURATIONS: dict[tuple[str, int], dict[int, Configuration]] = {
    ("forward", 2): {
        64: Configuration(128, 64, 64, 64, 4, 3),
        128: Configuration(128, 64, 128, 128, 4, 3),
        256: Configuration(128, 256, 256, 64, 8, 3),
        512: Configuration(128, 256, 128, 64, 8, 3),
    },
    ("backward_hidden", 2): {
        64: Configuration(64, 64, 64, 64, 4, 3),
        128: Configuration(128, 64, 128, 128, 8, 3),
        256: Configuration(128, 64, 256, 256, 8, 3),
        512: Configuration(64, 64, 256, 128, 8, 2),
    },
    ("backward_weight", 2): {
        64: Configuration(64, 64, 64, 64, 4, 3),
        128: Configuration(64, 64, 128, 128, 4, 2),
        256: Configuration(64, 64, 256, 256, 4, 2),
        512: Configuration(64, 64, 256, 128, 8, 2),
    },
    # Products in IEEE float32 keep both operands of a step in registers: short steps, small tiles.
    ("forward", 4): {512: Configuration(64, 64, 32, 32, 8, 2)},
    ("backward_hidden", 4): {
        64: Configuration(64, 32, 64, 64, 8, 2),
        128: Configuration(64, 16, 128, 128, 8, 2),
        256: Configuration(32, 16, 256, 16, 8, 2),
    },
    ("backward_weight", 4): {
        64: Configuration(64, 32, 64, 64, 8, 2),
        128: Configuration(16, 64, 128, 128, 8, 2),
        256: Configuration(16, 32, 256, 16, 8, 2),
    },
}


# Major compute capability: rows that differ there, by kernel, bytes of an element and width.
EXCEPTIONS: dict[int, dict[tuple[str, int, int], Configuration]] = {
    8: {
        ("forward", 2, 128): Configuration(128, 64, 128, 128, 8, 3),
        ("forward", 2, 256): Configuration(128, 64, 256, 256, 8, 2),
        ("forward", 2, 512): Configuration(128, 64, 128, 128, 8, 3),
        ("backward_hidden", 2, 256): Configuration(64, 64, 256, 256, 8, 2),
        ("backward_weight", 2, 256): Configuration(64, 64, 256, 256, 8, 2),
    },
    # There the large tiles of forward spill.
    10: {
        ("forward", 2, 256): Configuration(128, 64, 256, 256, 8, 2),
        ("forward", 2, 512): Configuration(128, 64, 128, 128, 8, 3),
    },
}

# Rows that differ where weights are multiplied by the inverse of their norms, which takes registers.
SCALED: dict[tuple[str, int, int], Configuration] = {
    ("backward_hidden", 2, 128): Configuration(64, 64, 128, 128, 8, 3),
    ("backward_hidden", 2, 256): Configuration(64, 32, 256, 256, 8, 2),
    ("backward_weight", 2, 256): Configuration(64, 64, 256, 256, 8, 2),
}


@functools.cache
def configuration(kernel: str, width: int, dtype: torch.dtype, capability: int, *, is_scaled: bool = False) -> Configuration:
    """Return the tile for a kernel, a width of the hidden states, their dtype and a major compute capability."""
    table = CONFIGURATIONS[kernel, dtype.itemsize]
    row = min((limit for limit in table if width <= limit), default=max(table))
    # GPUs of capability 12 have the matrix instructions and the shared memory of the eighth generation.
    exceptions = EXCEPTIONS.get(8 if capability > 10 else capability, {})
    key = (kernel, dtype.itemsize, row)
    return SCALED[key] if is_scaled and key in SCALED else exceptions.get(key, table[row])
