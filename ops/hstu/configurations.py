"""Tiles of an HSTU block's products and of the passes over rows around them."""

from __future__ import annotations

from typing import NamedTuple

# Major compute capability from which tiles are loaded by descriptors; before it they take registers, which are not there.
LEAST_CAPABILITY = 9
# Blocks of rows whose tiles are neighbours: what they read of weights and rows is in the L2 together.
BAND = 8
# Of a pass over rows: elements of a tile and warps. Backward has programs of a multiprocessor, too, and as many bytes a warp as
# leave its sums in registers.
GATE_ELEMENTS, GATE_WARPS = 2048, 4
GATE_ELEMENTS_BACKWARD, GATE_BYTES_BACKWARD, GATE_PROGRAMS = 512, 1024, 16
# Of the gradient behind SiLU: columns and elements of a tile at most, programs of a multiprocessor.
SILU_COLUMNS, SILU_ELEMENTS, SILU_WARPS, SILU_PROGRAMS = 128, 2048, 4, 8


class Configuration(NamedTuple):
    """Rows, columns and inner columns of a tile, how Triton runs it, and programs at once on a multiprocessor."""

    rows: int
    columns: int
    inner: int
    num_warps: int
    num_stages: int
    programs: int


def product_configuration(in_features: int, out_features: int) -> Configuration | None:
    """Choose for `[N, in] x [out, in]` in 16 bits; None where no tile divides both widths."""
    if in_features % 16 or out_features % 16:
        return None
    columns, inner = _divisor(out_features, 256), _divisor(in_features, 64)
    if columns == 256:
        return Configuration(128, columns, inner, 8, 3, 1)
    return Configuration(128, columns, inner, 4 if columns < 128 else 8, 3, 2)


def gate_gradients_tile(columns: int, itemsize: int) -> tuple[int, int]:
    """Return rows and warps of a tile of that many columns, a power of two, of numbers of that many bytes."""
    rows = max(1, GATE_ELEMENTS_BACKWARD // columns)
    num_warps = max(1, rows * columns * itemsize // GATE_BYTES_BACKWARD)
    # Rows of several warps take registers for sums across these, too.
    return rows, 4 if columns > GATE_ELEMENTS_BACKWARD else num_warps


def _divisor(size: int, most: int) -> int:
    """Return the largest power of two up to `most`, at least 16, that divides a multiple of 16."""
    return min(most, size & -size)
