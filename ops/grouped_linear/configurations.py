"""Tiles of layers and mixtures of groups. Nothing else decides how they are launched.

Layers compile without a spill for compute capabilities 9.0 and 10.0, mixtures for 8.0, too. Layers' tiles are those that were the
fastest of six on an H200, of 65,536 rows in bfloat16; one kernel takes 128 x 256 or 128 x 128 of them. Those of float32 are the
same tiles with as many bytes a step, and have not been measured.
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
    num_warps: int
    num_stages: int
    programs: int
    # Whether a tile is written in two halves of its columns.
    halves: bool = False


def linear_configuration(in_features: int, out_features: int, itemsize: int, capability: int) -> Configuration | None:
    """Choose for `[N, in] x [out, in]` of each group, of 2 or 4 bytes a number; None where no tile divides both widths.

    A tile of columns is of one group, and no tile reads over the end of a group's rows.
    """
    if in_features % 16 or out_features % 16:
        return None
    inner = _divisor(in_features, 128 // itemsize)
    is_wide, columns = out_features % 256 == 0 and out_features >= 512, _divisor(out_features, 128)
    if itemsize == 4:
        # Three steps of a wide tile and all of it in float32 are more than the shared memory of a multiprocessor. For capability
        # 10.0 Triton 3.7 gives each half shared memory of its own, so that there two steps are left.
        if is_wide:
            return Configuration(128, 256, inner, 8, 3 if capability == 9 else 2, 1, halves=True)
        return Configuration(128, columns, inner, 8 if columns == 128 else 4, 4, 1 if columns == 128 else 2)
    if is_wide:
        return Configuration(128, 256, inner, 8, 3, 1)
    return Configuration(128, columns, inner, 8 if columns == 128 else 4, 4, 2)


def mix_tile(width: int) -> tuple[int, int] | None:
    """Choose rows and columns of a mixture's tile; None for rows that are too wide for one program."""
    if width > WIDEST_MIXTURE:
        return None
    columns = max(16, 1 << (width - 1).bit_length())
    return max(1, MIX_ELEMENTS // columns), columns


def _divisor(size: int, most: int) -> int:
    """Return the largest power of two up to `most`, at least 16, that divides a multiple of 16."""
    return min(most, size & -size)
