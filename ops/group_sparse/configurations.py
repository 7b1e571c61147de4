"""Tile sizes of group-sparse linear layers. Nothing else decides how they are launched.

Every row compiles without a spill for compute capabilities 8.0, 9.0 and 10.0.
"""

from __future__ import annotations

from typing import NamedTuple

from jagged.ops._shared.sizes import cdiv, next_power_of_2

# Programs that add up the gradient of features, for each multiprocessor.
PROGRAMS = 2


class Configuration(NamedTuple):
    """Labels, slots and samples of a tile, and how Triton runs it."""

    block_l: int
    block_f: int
    block_b: int
    num_warps: int
    num_stages: int


def forward_configuration(num_labels: int, num_groups: int, width: int, itemsize: int) -> Configuration:
    """Choose for `[L, F] x [F, B]`, group by group."""
    if itemsize == 2:
        return Configuration(_labels(num_labels, num_groups, 64), _power(width, 64), 64, 4, 3)
    return Configuration(_labels(num_labels, num_groups, 32), _power(width, 32), 32, 8, 2)


def weight_configuration(num_labels: int, num_groups: int, width: int, itemsize: int) -> Configuration:
    """Choose for `[L, B] x [B, F]`, group by group."""
    if itemsize == 2:
        return Configuration(_labels(num_labels, num_groups, 64), _power(width, 64), 64, 4, 2)
    return Configuration(_labels(num_labels, num_groups, 32), _power(width, 32), 32, 8, 2)


def feature_configuration(num_labels: int, num_groups: int, width: int, itemsize: int) -> Configuration:
    """Choose for `[F, L] x [L, B]`, group by group."""
    if itemsize == 2:
        return Configuration(_labels(num_labels, num_groups, 64), _power(width, 64), 64, 8, 1)
    return Configuration(_labels(num_labels, num_groups, 32), _power(width, 32), 64, 8, 1)


def _labels(num_labels: int, num_groups: int, largest: int) -> int:
    """Return the labels of a tile: as many as groups have on average, which shapes alone tell."""
    return _power(cdiv(num_labels, num_groups), largest)


def _power(size: int, largest: int) -> int:
    """Return the smallest power of two of at least `size`, from 16, one step of the matrix instructions, to `largest`."""
    return min(max(next_power_of_2(size), 16), largest)
