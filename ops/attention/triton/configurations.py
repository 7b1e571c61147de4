"""Tile sizes of the attention kernels. Nothing else decides how they are launched.

One table serves compute capabilities 8.0 to 10.0: every row compiles for each of them, and spills nothing but what the tests of
ahead-of-time compilation name.
"""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

import torch


class Tiles(NamedTuple):
    """Rows that a program owns, rows that it visits at a time, and how Triton runs it.

    `max_registers` of a thread, None for as many as the assembler likes; fewer may let one more program onto a multiprocessor.
    They were measured on compute capability 9.0 and hold there.
    `tma` loads the visited rows, which a GPU of compute capability 9.0 and rows that begin at 16 bytes allow.
    """

    own: int
    visit: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    tma: bool = False


class Configuration(NamedTuple):
    """`forward` and `dq` own queries and visit keys, `dkv` owns keys and visits queries.

    `apart`: most samples have one tile, which is found without a search (`find_tile`).
    """

    forward: Tiles
    dq: Tiles
    dkv: Tiles
    apart: bool = False


# What decides beside shapes: biases need registers, by distance alone or by time alone fewer than several or those of pairs
# ("biased"), and "pointwise" weights need none for a softmax.
Kind = Literal["plain", "distances", "times", "biased", "pointwise"]

# Mean lengths up to which a batch is short, or medium; above it is long.
BORDERS = {"short": 32, "medium": 96}

# (bytes of an element, head width rounded up to a power of two, how long samples are). Medium ones have a row where it pays, and
# long ones a second, "pointers", where the first needs TMA. Others are rows of their `Kind`. Values of another width than keys
# have the row of the wider, or "unequal", whatever lengths and kind, where that spills.
TABLE = {
    (2, 16, "short"): Configuration(Tiles(32, 32, 2, 2), Tiles(32, 32, 2, 2), Tiles(32, 32, 4, 2), True),
    (2, 32, "short"): Configuration(Tiles(32, 32, 2, 2), Tiles(32, 32, 2, 2), Tiles(32, 32, 2, 2), True),
    (2, 64, "short"): Configuration(Tiles(32, 32, 2, 2), Tiles(32, 32, 2, 2), Tiles(32, 32, 2, 2), True),
    (2, 128, "short"): Configuration(Tiles(32, 32, 2, 2), Tiles(32, 32, 4, 2), Tiles(32, 32, 4, 2), True),
    (2, 256, "short"): Configuration(Tiles(32, 32, 4, 2, 255), Tiles(32, 32, 4, 2), Tiles(32, 32, 8, 2), True),
    (2, 64, "medium"): Configuration(Tiles(64, 32, 4, 2, 80), Tiles(64, 32, 4, 3), Tiles(64, 32, 4, 3, 128), True),
    (2, 128, "medium"): Configuration(Tiles(64, 32, 4, 2, 128), Tiles(64, 32, 4, 2), Tiles(64, 32, 4, 3), True),
    (2, 16, "long"): Configuration(Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2)),
    (2, 32, "long"): Configuration(Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2)),
    (2, 64, "long"): Configuration(Tiles(64, 64, 4, 3), Tiles(64, 32, 4, 3), Tiles(64, 32, 4, 3, 128)),
    (2, 128, "long"): Configuration(Tiles(64, 64, 4, 3, tma=True), Tiles(64, 32, 4, 4, tma=True), Tiles(64, 64, 4, 2, tma=True)),
    (2, 128, "pointers"): Configuration(Tiles(64, 64, 4, 3), Tiles(128, 32, 8, 3), Tiles(64, 32, 4, 3)),
    (2, 64, "distances"): Configuration(Tiles(64, 32, 4, 3), Tiles(64, 32, 4, 3, 128), Tiles(64, 32, 4, 3, 168)),
    (2, 64, "times"): Configuration(Tiles(64, 64, 4, 3, 128), Tiles(64, 32, 4, 3, 168), Tiles(64, 32, 4, 2, 168)),
    (2, 64, "biased"): Configuration(Tiles(64, 32, 4, 3), Tiles(64, 32, 4, 3, 168), Tiles(64, 32, 4, 2, 168)),
    (2, 64, "pointwise"): Configuration(Tiles(64, 32, 4, 3), Tiles(64, 32, 4, 3), Tiles(64, 32, 4, 3, 128)),
    (2, 128, "biased"): Configuration(Tiles(64, 32, 4, 3), Tiles(64, 32, 4, 2), Tiles(64, 32, 4, 2)),
    (2, 256, "long"): Configuration(Tiles(128, 64, 8, 2), Tiles(64, 16, 4, 3, tma=True), Tiles(32, 64, 4, 2)),
    (2, 256, "pointers"): Configuration(Tiles(64, 64, 8, 2), Tiles(64, 32, 8, 2), Tiles(32, 64, 8, 2)),
    (2, 256, "unequal"): Configuration(Tiles(32, 32, 4, 2, 255), Tiles(32, 32, 4, 2), Tiles(32, 16, 4, 2)),
    (4, 16, "short"): Configuration(Tiles(32, 16, 4, 2), Tiles(32, 16, 4, 2), Tiles(32, 16, 4, 2), True),
    (4, 32, "short"): Configuration(Tiles(32, 16, 4, 2), Tiles(32, 16, 4, 2), Tiles(32, 32, 8, 2), True),
    (4, 64, "short"): Configuration(Tiles(32, 32, 8, 2), Tiles(32, 16, 4, 2), Tiles(16, 16, 4, 1), True),
    (4, 128, "short"): Configuration(Tiles(32, 16, 8, 2, 128), Tiles(16, 16, 4, 2), Tiles(16, 16, 4, 2, 255), True),
    (4, 256, "short"): Configuration(Tiles(16, 16, 8, 1), Tiles(16, 16, 8, 2, 255), Tiles(16, 16, 8, 1), True),
    (4, 16, "long"): Configuration(Tiles(64, 32, 8, 2), Tiles(64, 32, 4, 2), Tiles(32, 16, 4, 2)),
    (4, 32, "long"): Configuration(Tiles(64, 32, 8, 2), Tiles(64, 32, 8, 2, 128), Tiles(32, 32, 8, 2)),
    (4, 64, "long"): Configuration(Tiles(32, 32, 8, 2), Tiles(32, 32, 8, 2), Tiles(32, 32, 8, 2)),
    (4, 128, "long"): Configuration(Tiles(32, 16, 8, 2, 128), Tiles(16, 16, 4, 2), Tiles(16, 16, 4, 2)),
    (4, 256, "long"): Configuration(Tiles(16, 16, 8, 1), Tiles(16, 16, 8, 2, 255), Tiles(16, 16, 8, 1)),
}


def padded_width(head_dim: int) -> int:
    """Return the width of a tile that holds `head_dim` columns: a power of two, at least the 16 that a matrix unit takes."""
    return max(16, 1 << (head_dim - 1).bit_length())


def configuration(
    head_dim: int,
    dtype: torch.dtype,
    total: int,
    batch_size: int,
    *,
    allows_tma: bool,
    kind: Kind = "plain",
    value_dim: int | None = None,
) -> Configuration:
    """Choose from shapes alone: at most three variants for each head width and dtype, however lengths change.

    Rows of a width that is no multiple of 16 need not begin at 16 bytes; such rows reach shared memory through registers, which
    the large tiles have none to spare for; nor have those for long samples without a row for their biases. Values are as wide as
    keys unless `value_dim` says how wide.
    """
    for length, border in BORDERS.items():
        if total <= border * batch_size:
            return _row(head_dim, value_dim or head_dim, dtype, length, allows_tma, kind)
    return _row(head_dim, value_dim or head_dim, dtype, "long", allows_tma, kind)


@functools.cache
def _row(head_dim: int, value_dim: int, dtype: torch.dtype, length: str, allows_tma: bool, kind: Kind) -> Configuration:
    size, width = dtype.itemsize, padded_width(max(head_dim, value_dim))
    if padded_width(head_dim) != padded_width(value_dim) and (size, width, "unequal") in TABLE:
        return TABLE[size, width, "unequal"]
    if kind in ("distances", "times", "biased") and length != "short":
        length = next((row for row in (kind, "biased") if (size, width, row) in TABLE), "short")
    if kind == "pointwise" and length == "long":
        length = "pointwise"
    is_odd = head_dim % 16 or value_dim % 16
    chosen = TABLE.get((size, width, "short" if is_odd else length), TABLE[size, width, "long"])
    return TABLE[size, width, "pointers"] if chosen.dq.tma and not allows_tma else chosen
