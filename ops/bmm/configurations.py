"""Tile sizes of the products of a jagged tensor with one dense or jagged operand. Nothing else decides how they are launched.

Every row compiles without a spill for compute capabilities 8.0, 9.0 and 10.0.
"""

from __future__ import annotations

from typing import NamedTuple

# Float32 up to this width of the narrow side is added up in registers, where the matrix instructions would round to TF32.
NARROW = 8
# An output tile that is split at fewer rows than this costs more in its partial sums than it gains.
MIN_CHUNK = 512
# A workspace takes at most so much of the inputs and outputs.
WORKSPACE_SHARE = 0.01


class Configuration(NamedTuple):
    """Rows, columns of the first (D) and of the second operand (T) of a tile, matrix instructions or not, how Triton runs it."""

    rows: int
    block_d: int
    block_t: int
    use_dot: bool
    num_warps: int
    num_stages: int


def dense_configuration(d: int, t: int, itemsize: int) -> Configuration:
    """Choose for `[S, D] x [B, D, T] -> [S, T]`."""
    if itemsize == 2:
        # One step of the matrix instructions is 16 wide inside and 8 wide outside.
        if d <= NARROW:
            return Configuration(16, _power(d), _power(t, 1, 1024), False, 2, 1)
        if d <= 16:
            return Configuration(32, 16, _power(t, 8, 256), True, 4, 1)
        if t <= 16:
            # Rows of an odd width are loaded element by element, for which two warps have no registers.
            return Configuration(64, _power(d, 16, 128), _power(t, 8), True, 4 if d % 8 else 2, 3)
        return Configuration(32, _power(d, 16, 64), _power(t, 8, 128), True, 4, 3)
    if d <= NARROW:
        return Configuration(16, _power(d), _power(t, 1, 256), False, 4, 1)
    if t <= NARROW:
        return Configuration(16, _power(d, 16, 128), _power(t), False, 4, 1)
    return Configuration(32, _power(d, 16, 32), _power(t, 16, 64), True, 4, 2)


def jagged_configuration(d: int, t: int, itemsize: int) -> Configuration:
    """Choose for `[S, D] x [S, T] -> [B, D, T]`, where T is the narrower side."""
    if itemsize == 2:
        if t <= 16:
            return Configuration(16, _power(d, 16, 512), 16, True, 4, 3)
        return Configuration(32, _power(d, 16, 64), _power(t, 16, 64), True, 8 if min(d, t) >= 64 else 4, 3)
    if t <= NARROW:
        # Each thread has the same four columns of every row: no thread waits for another.
        return Configuration(4, _power(d, 16, 512), _power(t), False, 4, 4)
    return Configuration(16, _power(d, 16, 64), _power(t, 16, 64), True, 4, 2)


def chunk_of(d: int, t: int, total: int, batch_size: int, itemsize: int) -> int:
    """Return after how many rows a sample is split: its partial sums, `2 (total // chunk) D T` in float32, fit their share."""
    moved = (total * (d + t) + batch_size * d * t) * itemsize
    needed = int(2 * total * d * t * 4 / max(1.0, WORKSPACE_SHARE * moved)) + 1
    return max(MIN_CHUNK, -(-needed // 64) * 64)


def _power(size: int, least: int = 1, most: int = 1 << 30) -> int:
    """Return the next power of two, held between two of them."""
    return min(most, max(least, 1 << (size - 1).bit_length()))
