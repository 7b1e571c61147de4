"""Tiles on their way through shared memory on Hopper: one warp sends rows of matrices by TMA, groups of warps read them.

A ring has places, and a place two barriers: `full` hears when the bytes have come (one arrival, and their number), `empty` when
they have been read (an arrival of each group that reads). Visit n of N places is the `n // N`-th to place `n % N`. A barrier
completes once for each visit to its place. To wait for completion k, counted from 0, is to wait for parity `k & 1`, and a wait
for completion -1 of a new barrier returns at once: a place not yet used is empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# Of rows of 64 columns of 16 bits or more, in shared memory.
LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


class Ring(NamedTuple):
    """Places in shared memory and their barriers."""

    tiles: Any
    full: Any
    empty: Any


def rows_descriptor(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Describe a matrix of 16-bit elements for loads of tiles, zeros past its end; rows begin at multiples of 16 bytes."""
    return descriptor(matrix, matrix.shape, matrix.stride(), [rows, columns], LAYOUT)


def descriptor(base: Tensor, shape: Sequence[int], strides: Sequence[int], block: list[int], layout: Any) -> TensorDescriptor:
    """Return a descriptor without its own checks, of which a launch repeats those that matter and `supports` makes the others."""
    made = TensorDescriptor.__new__(TensorDescriptor)
    made.base, made.shape, made.strides, made.block_shape, made.layout = base, shape, strides, block, layout
    return made


@gluon.jit
def make_ring(source, PLACES: gl.constexpr, READERS: gl.constexpr, TILES: gl.constexpr = None):
    """Return room for that many tiles of a descriptor, each of which that many groups read; or for more `TILES` than places."""
    full = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(PLACES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=READERS)
    shape: gl.constexpr = [PLACES if TILES is None else TILES] + source.block_type.shape  # noqa: RUF005
    return Ring(gl.allocate_shared_memory(source.dtype, shape, source.layout), full, empty)


@gluon.jit
def await_left(ring, visit):
    """Wait until all groups have left the place that a visit is to use."""
    mbarrier.wait(ring.empty.index(visit % ring.full.shape[0]), (visit // ring.full.shape[0] & 1) ^ 1)


@gluon.jit
def begin_tile(source, row, column, ring, visit):
    """Begin to copy the tile that begins there into a visit's place, which all groups have left."""
    place = visit % ring.full.shape[0]
    mbarrier.expect(ring.full.index(place), source.block_type.nbytes)
    tma.async_copy_global_to_shared(source, [row, column], ring.full.index(place), ring.tiles.index(place))


@gluon.jit
def send_tile(source, row, column, ring, visit):
    """Copy the tile that begins there into the ring's next place as soon as all groups have left it."""
    await_left(ring, visit)
    begin_tile(source, row, column, ring, visit)


@gluon.jit
def await_tile(ring, visit):
    """Wait until what a visit brings is there, and return it."""
    place = visit % ring.full.shape[0]
    mbarrier.wait(ring.full.index(place), visit // ring.full.shape[0] & 1)
    return ring.tiles.index(place)


@gluon.jit
def leave_tile(ring, visit):
    """Tell that this group has read what a visit brought. Of ordinary loads the values have to have been used before."""
    mbarrier.arrive(ring.empty.index(visit % ring.full.shape[0]), count=1)
