"""Tile sizes of group-sparse linear layers. Nothing else decides how they are launched.

Every row compiles for compute capabilities 8.0, 9.0 and 10.0 without a spill in 16 bits, but for a few numbers that a loop keeps,
and in the backward pass of losses for up to 41 of a thread, which the assembler puts aside where one program more fits then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

from jagged.ops._shared.sizes import cdiv, next_power_of_2

# Programs that add up the gradient of features, for each multiprocessor.
PROGRAMS = 4
# The most programs of a multiprocessor whose sums are in shared memory: each has sums of all columns.
MOST_PROGRAMS = 4
# Programs that walk the labels for their log-sum-exp, for each multiprocessor.
SOFTMAX_PROGRAMS = 16


class Configuration(NamedTuple):
    """Groups of a program; labels, slots and samples of a tile; and how Triton runs it."""

    groups: int
    block_l: int
    block_f: int
    block_b: int
    num_warps: int
    num_stages: int


def forward_configuration(num_labels: int, num_groups: int, batch_size: int, width: int, itemsize: int) -> Configuration:
    """Choose for `[L, F] x [F, B]`, group by group."""
    if itemsize == 2:
        block_l, block_f, block_b = _labels(num_labels, num_groups, 64), _power(width, 64), 128 if batch_size > 64 else 64
        return Configuration(_groups(num_groups), block_l, block_f, block_b, _warps(block_l, block_f, block_b, width), 3)
    return Configuration(_groups(num_groups), _labels(num_labels, num_groups, 32), _power(width, 32), 32, 4, 1)


def weight_configuration(num_labels: int, num_groups: int, batch_size: int, width: int, itemsize: int) -> Configuration:
    """Choose for `[L, B] x [B, F]`, group by group."""
    if itemsize == 2:
        block_l, block_f, block_b = _labels(num_labels, num_groups, 64), _power(width, 64), 128 if batch_size > 64 else 64
        return Configuration(_groups(num_groups), block_l, block_f, block_b, _warps(block_l, block_f, block_b, width), 3)
    return Configuration(_groups(num_groups), _labels(num_labels, num_groups, 32), _power(width, 32), 32, 4, 1)


def feature_configuration(num_labels: int, num_groups: int, batch_size: int, width: int, itemsize: int) -> Configuration:
    """Choose for `[F, L] x [L, B]`, group by group; the groups of a program follow from the count of parts."""
    if itemsize == 2:
        block_l, block_f = _labels(num_labels, num_groups, 64), _power(width, 64)
        return Configuration(0, block_l, block_f, 64, 8 if block_l * block_f >= 4096 else 4, 1)
    return Configuration(0, _labels(num_labels, num_groups, 32), _power(width, 32), 32, 4, 1)


def shared_feature_configuration(
    num_labels: int, num_groups: int, batch_size: int, width: int, itemsize: int, num_features: int, available: tuple[int, int]
) -> tuple[Configuration, int]:
    """Choose for the same with sums in shared memory, and programs of a multiprocessor: 0 where they do not fit.

    `available` are the bytes of a program and of a multiprocessor.
    """
    block_l, block_f = _labels(num_labels, num_groups, 64), _power(width, 64)
    for block_b in (64, 32, 16) if itemsize == 2 else ():
        chosen = Configuration(0, block_l, block_f, min(block_b, _power(batch_size, 64)), 4, 1)
        chosen, programs = _with_sums(chosen, 1, num_features, available, (3, 2), bytes_ahead)
        if programs:
            # Few labels a group are little work between two waits for all threads.
            return chosen._replace(num_warps=min(2 if block_l == 16 else 4, _warps_of_sums(chosen))), programs
    return Configuration(0, block_l, block_f, 64, 4, 1), 0


def bytes_ahead(chosen: Configuration, groups: int, num_tiles: int = 1) -> int:
    """Return the shared memory that Triton needs for tiles of so many groups on their way, their columns and offsets."""
    tiles = 2 * chosen.block_l * (chosen.block_f + chosen.block_b)
    return (groups + 1) * tiles + groups * (4 * chosen.block_f + 16) + 64


def loss_bytes_ahead(chosen: Configuration, groups: int, num_tiles: int, updated: int = 0) -> int:
    """Return the same for the backward pass of a loss: twice weights, features, and slopes on their way between threads.

    Of each weight an update has so many bytes more on their way, `updated`.
    """
    weights, samples = 2 * chosen.block_l * chosen.block_f, 2 * chosen.block_b * num_tiles
    of_group = 2 * weights + chosen.block_f * samples + 8 * chosen.block_f + 4 * chosen.block_l + 40
    of_group += updated * chosen.block_l * (chosen.block_f + 1)
    return groups * of_group + 2 * weights + chosen.block_l * samples + 128


def _with_sums(
    chosen: Configuration, num_tiles: int, num_features: int, available: tuple[int, int], depths: tuple[int, ...],
    bytes_of: Callable[[Configuration, int, int], int],
) -> tuple[Configuration, int]:  # fmt: skip
    """Return how many programs of a multiprocessor have room for sums, and the configuration with as many groups on their way
    as these programs then have room for.

    A multiprocessor takes 1 KiB of each program for itself. Offsets and tiles are copied one behind the other, so that a group
    on its way is two of Triton's stages.
    """

    def programs(groups: int) -> int:
        size = 4 * num_features * chosen.block_b * num_tiles + bytes_of(chosen, groups, num_tiles)
        return min(available[1] // (size + 1024), MOST_PROGRAMS) if size <= available[0] else 0

    most = programs(depths[-1])
    groups = next(groups for groups in depths if programs(groups) == most)
    return chosen._replace(num_stages=2 * groups + 1), most


def bce_forward_configuration(num_labels: int, num_groups: int, batch_size: int, width: int, itemsize: int) -> Configuration:
    """Choose for the losses of logits that are not stored, of at most 64 samples a tile."""
    chosen = forward_configuration(num_labels, num_groups, batch_size, width, itemsize)
    if itemsize == 4:
        return chosen
    block_l = min(chosen.block_l, 32)
    num_warps = 4 if block_l * chosen.block_f == 2048 else _warps(block_l, chosen.block_f, 64, width)
    return chosen._replace(block_l=block_l, block_b=64, num_warps=num_warps)


def loss_backward_configuration(num_labels: int, num_groups: int, batch_size: int, width: int, itemsize: int) -> Configuration:
    """Choose for the gradients of a loss: three products of each tile, logits among them."""
    if itemsize == 2 and width <= 64:
        block_l, block_f = _labels(num_labels, num_groups, 32), _power(width, 64)
        block_b = 64 if block_f == 64 and block_l < 32 else 32
        return Configuration(0, block_l, block_f, block_b, 2 if block_f < 64 else 4, 3)
    return Configuration(0, 16, _power(width, 64), 16, 4, 1)


def softmax_forward_configuration(num_labels: int, num_groups: int, batch_size: int, width: int, itemsize: int) -> Configuration:
    """Choose for the log-sum-exp of logits that are not stored: a thread holds its part of a tile three times over."""
    return bce_forward_configuration(num_labels, num_groups, batch_size, width, itemsize)._replace(groups=0, num_warps=4)


def has_one_tile(num_labels: int, num_groups: int, batch_size: int, width: int, itemsize: int) -> bool:
    """Return whether one tile of the backward pass of a loss has all slots of a group, as its updates need."""
    return width <= loss_backward_configuration(num_labels, num_groups, batch_size, width, itemsize).block_f


def loss_tiles(batch_size: int, width: int, chosen: Configuration) -> int:
    """Return the tiles of samples in a block of `loss_backward_configuration`'s: two where the batch has more than one."""
    return 2 if batch_size > chosen.block_b and width <= chosen.block_f else 1


class Pass(NamedTuple):
    """One launch of the backward pass of a loss: tiles, and those of a block of samples; programs of a multiprocessor.

    A program makes the gradients of the block's weights, or adds to sums of features, or both, and walks all blocks of samples
    or has one.
    """

    chosen: Configuration
    num_tiles: int
    programs: int
    of_weight: bool
    of_features: bool
    in_shared_memory: bool
    walks: bool

    def blocks(self, batch_size: int) -> int:
        """Return how many programs share a part of the groups."""
        return 1 if self.walks else cdiv(batch_size, self.chosen.block_b * self.num_tiles)


def loss_passes(
    num_labels: int, num_groups: int, batch_size: int, width: int, itemsize: int, num_features: int, available: tuple[int, int],
    *, of_weight: bool, of_features: bool, updated: int = 0,
) -> list[Pass]:  # fmt: skip
    """Choose for all gradients of a loss: one pass where a program's sums can be of all samples, or else one for each kind.

    Gradients of weights are in the last one, and a group's are one program's, so that it may update them. `available` are the
    bytes of shared memory of a program and of a multiprocessor; `updated` those of a weight and its state where it is updated.
    """
    sizes = num_labels, num_groups, batch_size, width, itemsize
    chosen = loss_backward_configuration(*sizes)
    num_tiles = loss_tiles(batch_size, width, chosen)
    in_l2 = Pass(chosen, num_tiles, PROGRAMS, of_weight, of_features, False, batch_size > chosen.block_b * num_tiles)
    if not of_features or itemsize > 2 or width > 64:
        return [in_l2] if of_weight or of_features else []
    whole = chosen._replace(block_b=_power(batch_size, 64))
    whole = whole._replace(num_warps=_warps_of_sums(whole))
    num_tiles = cdiv(batch_size, whole.block_b)
    if of_weight and num_tiles <= 2:
        bytes_of = functools.partial(loss_bytes_ahead, updated=updated)
        tiles, programs = _with_sums(whole, num_tiles, num_features, available, (3, 2, 1), bytes_of)
        if programs:
            return [Pass(tiles, num_tiles, programs, True, True, True, False)]
    for block_b in (64, 32, 16):
        part = whole._replace(block_b=min(block_b, whole.block_b))
        part = part._replace(num_warps=_warps_of_sums(part))
        tiles, programs = _with_sums(part, 1, num_features, available, (3, 2, 1), loss_bytes_ahead)
        if programs:
            of_sums = Pass(tiles, 1, programs, False, True, True, False)
            return [of_sums, in_l2._replace(of_features=False)] if of_weight else [of_sums]
    return [in_l2]


def _warps_of_sums(chosen: Configuration) -> int:
    """Return warps of which each thread has 16 numbers of a tile's sums or more: of fewer some have the same ones."""
    return max(1, min(4, chosen.block_f * chosen.block_b // 512))


def _groups(num_groups: int) -> int:
    """Return the groups of a program: several where there are enough for all multiprocessors of any GPU."""
    return 16 if num_groups >= 2**16 else 8 if num_groups >= 2**14 else 1


def _warps(block_l: int, block_f: int, block_b: int, width: int) -> int:
    """Return the warps of a tile: as few as hold it, so that more tiles are under way; addresses of odd rows take more."""
    tile, both = block_l * block_b, (block_l + block_f) * block_b
    warps = 8 if tile > 4096 else 4 if tile == 4096 else 2 if both > 4096 else 1
    return warps if width % 16 == 0 else min(8, 2 * warps)


def _labels(num_labels: int, num_groups: int, largest: int) -> int:
    """Return the labels of a tile: as many as groups have on average, which shapes alone tell."""
    return _power(cdiv(num_labels, num_groups), largest)


def _power(size: int, largest: int) -> int:
    """Return the smallest power of two of at least `size`, from 16, one step of the matrix instructions, to `largest`."""
    return min(max(next_power_of_2(size), 16), largest)
