"""Tile sizes of group-sparse linear layers. Nothing else decides how they are launched.

Every row compiles for compute capabilities 8.0, 9.0 and 10.0 without a spill in 16 bits, but for a few numbers that a loop keeps,
and in losses and the gradients of weights and of features of adjacent columns for up to 42 of a thread, under 8.0 64, which the
assembler puts aside where one program more fits then.
"""

from __future__ import annotations

from typing import NamedTuple

from jagged.ops._shared.sizes import cdiv, next_power_of_2

# Programs that add up the gradient of features, for each multiprocessor; of losses, where registers hold so many.
PROGRAMS = 4
# The most programs of a multiprocessor whose sums are in shared memory: each has sums of all columns.
MOST_PROGRAMS = 4
# Programs that walk the labels for their log-sum-exp, for each multiprocessor.
SOFTMAX_PROGRAMS = 16
# Sums of a loss's gradient of features, beyond which it is made apart from that of weights, by programs of some samples each.
MOST_SUM_BYTES = 2**28
# Slots of a tile in both passes of a softmax in float32, at most.
LOSS_SLOTS = 64


class Configuration(NamedTuple):
    """Groups of a program; labels, slots and samples of a tile; and how Triton runs it."""

    groups: int
    block_l: int
    block_f: int
    block_b: int
    num_warps: int
    num_stages: int


def forward_configuration(num_labels: int, num_groups: int, batch_size: int, width: int, itemsize: int) -> Configuration:
    """Choose for `[L, F] x [F, B]`, group by group.

    In 16 bits a tile has all slots up to 128: of further ones nothing is loaded ahead.
    """
    if itemsize == 2:
        block_l, block_f, block_b = _labels(num_labels, num_groups, 64), _power(width, 128), 128 if batch_size > 64 else 64
        block_b = block_b if width <= 64 else 64
        return Configuration(_groups(num_groups), block_l, block_f, block_b, _warps(block_l, block_f, block_b, width), 3)
    return Configuration(_groups(num_groups), _labels(num_labels, num_groups, 32), _power(width, 32), 32, 4, 1)


def weight_configuration(num_labels: int, num_groups: int, batch_size: int, width: int, itemsize: int) -> Configuration:
    """Choose for `[L, B] x [B, F]`, group by group."""
    if itemsize == 2:
        block_l, block_f = _labels(num_labels, num_groups, 64), _power(width, 64)
        num_warps = _warps(block_l, block_f, 64, width)
        if batch_size > 64 and width % 16 == 0:
            num_warps = max(1, block_l * block_f // 1024)
        return Configuration(_groups(num_groups), block_l, block_f, 64, num_warps, 3)
    return Configuration(_groups(num_groups), _labels(num_labels, num_groups, 32), _power(width, 32), 32, 4, 1)


def weight_tiles(batch_size: int, chosen: Configuration) -> int:
    """Return the tiles of samples in a block of `weight_configuration`'s: two where the batch has more than one, in 16 bits.

    One of twice the size takes more registers: their addresses differ by a constant.
    """
    return 2 if chosen.block_b == 64 and batch_size > chosen.block_b else 1


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

    `available` are the bytes of a program and of a multiprocessor, which takes 1 KiB of each program for itself. As many groups
    are on their way as the programs that fit have room for. Offsets and tiles are copied one behind the other, so that a group on
    its way is two of Triton's stages.
    """
    block_l, block_f = _labels(num_labels, num_groups, 64), _power(width, 64)
    for block_b in (64, 32, 16) if itemsize == 2 else ():
        chosen = Configuration(0, block_l, block_f, min(block_b, _power(batch_size, 64)), 4, 1)
        programs = {}
        for groups in (3, 2):
            size = 4 * num_features * chosen.block_b + bytes_ahead(chosen, groups)
            programs[groups] = min(available[1] // (size + 1024), MOST_PROGRAMS) if size <= available[0] else 0
        if programs[2]:
            groups = 3 if programs[3] == programs[2] else 2
            # Few labels a group are little work between two waits for all threads. Of less than 16 numbers of a tile's sums a
            # thread, some have the same ones.
            num_warps = max(1, min(2 if block_l == 16 else 4, block_f * chosen.block_b // 512))
            return chosen._replace(num_warps=num_warps, num_stages=2 * groups + 1), programs[2]
    return Configuration(0, block_l, block_f, 64, 4, 1), 0


def adjacent_feature_configuration(num_labels: int, num_groups: int, batch_size: int, width: int, itemsize: int) -> Configuration:
    """Choose for the same of groups that read adjacent columns, whose sum is in registers, with five groups ahead, or two."""
    if itemsize == 2:
        block_l, block_f = _labels(num_labels, num_groups, 64), _power(width, 64)
        num_warps, num_stages = (4, 5) if block_l == 64 else (2, 11)
        return Configuration(0, block_l, block_f, min(64, _power(batch_size, 64)), num_warps, num_stages)
    return Configuration(0, _labels(num_labels, num_groups, 32), _power(width, 32), 32, 4, 1)


def bytes_ahead(chosen: Configuration, groups: int) -> int:
    """Return the shared memory that Triton needs for tiles of so many groups on their way, their columns and offsets."""
    tiles = 2 * chosen.block_l * (chosen.block_f + chosen.block_b)
    return (groups + 1) * tiles + groups * (4 * chosen.block_f + 16) + 64


def bce_forward_configuration(num_labels: int, num_groups: int, batch_size: int, width: int, itemsize: int) -> Configuration:
    """Choose for the losses of logits that are not stored, of at most 64 samples a tile."""
    chosen = forward_configuration(num_labels, num_groups, batch_size, width, itemsize)
    if itemsize == 4:
        return chosen
    block_l = min(chosen.block_l, 32)
    num_warps = 4 if block_l * chosen.block_f == 2048 else _warps(block_l, chosen.block_f, 64, width)
    return chosen._replace(block_l=block_l, block_b=64, num_warps=num_warps)


def loss_backward_configuration(
    num_labels: int, num_groups: int, batch_size: int, width: int, itemsize: int, capability: int
) -> Configuration:
    """Choose for the gradients of a loss: three products of each tile, logits among them.

    A tile has all slots of a group up to 128. It is of 32 labels where registers hold that, which the matrix instructions of
    capabilities 9 and 10 (major) leave free, and addresses of even rows. Otherwise logits are computed again for each 64 slots.
    """
    if itemsize == 2 and width <= 64:
        block_l, block_f = _labels(num_labels, num_groups, 32), _power(width, 64)
        block_b = 64 if block_f == 64 and block_l < 32 else 32
        return Configuration(0, block_l, block_f, block_b, 2 if block_f < 64 else 4, 3)
    has_registers, is_even = capability in (9, 10), width % 16 == 0
    if itemsize == 2 and (has_registers or is_even):
        block_l = _labels(num_labels, num_groups, 32 if has_registers and is_even else 16)
        return Configuration(0, block_l, 128, 32, 4 if has_registers else 8, 3)
    return Configuration(0, 16, _power(width, LOSS_SLOTS), 16, 4, 1)


def softmax_backward_configuration(
    num_labels: int, num_groups: int, batch_size: int, width: int, itemsize: int, capability: int
) -> Configuration:
    """Choose for the gradients of a softmax, which has more numbers of rows: capability 8 has registers for 32 samples."""
    chosen = loss_backward_configuration(num_labels, num_groups, batch_size, width, itemsize, capability)
    return chosen if capability in (9, 10) else chosen._replace(block_b=min(chosen.block_b, 32))


def softmax_forward_configuration(num_labels: int, num_groups: int, batch_size: int, width: int, itemsize: int) -> Configuration:
    """Choose for the log-sum-exp of logits that are not stored: a thread holds its part of a tile three times over.

    In float32 it adds as many products at once as the backward pass: a probability is of a logit and of this sum of logits, and
    of large ones it shows in which order products were added.
    """
    chosen = bce_forward_configuration(num_labels, num_groups, batch_size, width, itemsize)
    if itemsize == 2 and width % 16 == 0:
        return chosen._replace(groups=0, num_warps=2 if chosen.block_l * chosen.block_f <= 2048 else 4)
    # Addresses of odd rows leave no registers for more slots.
    return chosen._replace(groups=0, block_f=_power(width, LOSS_SLOTS), num_warps=4)


def has_one_tile(num_labels: int, num_groups: int, batch_size: int, width: int, itemsize: int, capability: int) -> bool:
    """Return whether one tile of the backward pass of a loss has all slots of a group, as its updates need."""
    return width <= loss_backward_configuration(num_labels, num_groups, batch_size, width, itemsize, capability).block_f


def loss_tiles(batch_size: int, width: int, chosen: Configuration) -> int:
    """Return the tiles of samples in a block of `loss_backward_configuration`'s: two where the batch has more than one."""
    return 2 if batch_size > chosen.block_b and width <= chosen.block_f else 1


def loss_programs(chosen: Configuration) -> int:
    """Return the programs of a multiprocessor in the backward pass of a loss: as many as its registers hold.

    A program more would run alone at the end, and has sums of its own in the L2. A tile of 2,048 features or more takes all
    registers that a thread can have.
    """
    return PROGRAMS if chosen.block_f * chosen.block_b < 2048 else 2


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
