"""Tiles of layers and mixtures of groups; `launch.py` says which layers have a kernel.

Layers compile without a spill for compute capabilities 9.0 and 10.0, mixtures for 8.0, too. The tile of layers was the fastest of
twelve in bfloat16 on an H200, or within 3 % of it, at 4,096 and 65,536 rows of 256, 512 and 1,024 columns, shared and of groups;
at 65,536 shared rows of 1,024 columns 128 x 256 takes 5 % less (`benchmarks/results/h200/grouped_linear_tiles.json`).
"""

from __future__ import annotations

from typing import NamedTuple

# Major compute capability from which tiles are loaded by descriptors; before it they take registers, which are not there.
LEAST_CAPABILITY = 9
# Of mixtures: rows of a tile times its columns; the most mixtures, and columns, that a program takes.
MIX_ELEMENTS, MOST_MIXTURES, WIDEST_MIXTURE = 2048, 4, 1024
MIX_WARPS, MIX_STAGES = 4, 3
# Of the gradient behind a ReLU: columns and elements of a tile at most, programs of a multiprocessor.
RELU_COLUMNS, RELU_ELEMENTS, RELU_PROGRAMS, RELU_WARPS = 256, 2048, 8, 4


class Configuration(NamedTuple):
    """Rows, columns and inner columns of a tile, how Triton runs it, and programs at once on a multiprocessor."""

    rows: int
    columns: int
    inner: int
    num_warps: int = 4
    num_stages: int = 3
    programs: int = 2


def linear_configuration(in_features: int, out_features: int) -> Configuration | None:
    """Choose for `[N, in] x [out, in]` of each group, in 16 bits; None where no tile divides both widths.

    A tile of columns is of one group, and no tile reads over the end of a group's rows.
    """
    if in_features % 16 or out_features % 16:
        return None
    return Configuration(128, _divisor(out_features, 128), _divisor(in_features, 64))


def mix_tile(width: int) -> tuple[int, int] | None:
    """Choose rows and columns of a mixture's tile; None for rows that are too wide for one program."""
    if width > WIDEST_MIXTURE:
        return None
    columns = max(16, 1 << (width - 1).bit_length())
    return max(1, MIX_ELEMENTS // columns), columns


def _divisor(size: int, most: int) -> int:
    """Return the largest power of two up to `most`, at least 16, that divides a multiple of 16."""
    return min(most, size & -size)
