"""Which rows a tile meets on Hopper, and in which order: what the loading warp finds out, and tells the groups of each visit.

What a query sees, and which tiles meet, is defined in `triton/masks.py` for the kernels of both kinds.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jagged.ops._shared.ring import await_left
from jagged.ops.attention.triton.masks import edge_tile

# A tile begins at a multiple of that many rows, so that the word of a visit has room for whether anything in it may be hidden.
LEAST_ROWS = gl.constexpr(64)


@gluon.jit
def number_of_visits(ranges, BLOCK: gl.constexpr):
    """Return how many tiles are met. One that meets none visits a tile of which it sees nothing."""
    return gl.maximum(ranges.edge_tiles + (ranges.whole_end - ranges.whole_begin) // BLOCK, 1)


@gluon.jit
def row_of_visit(index, ranges, FROM_LAST: gl.constexpr, BLOCK: gl.constexpr):
    """Return where the tile of a visit begins: first those in which something may be hidden, in or against their order."""
    edge = ranges.edge_tiles - 1 - index if FROM_LAST else index
    whole = ranges.whole_begin + (index - ranges.edge_tiles) * BLOCK
    return gl.where(index < ranges.edge_tiles, edge_tile(edge, ranges, BLOCK), whole)


@gluon.jit
def may_hide(index, ranges):
    """Whether anything of a visit may be hidden."""
    return (index < ranges.edge_tiles) | (ranges.whole_begin >= ranges.whole_end)


@gluon.jit
def announce(words, ring, visit, row, index, ranges):
    """Write for a visit where its rows begin, and whether any may be hidden, as soon as all groups have left the ring's place."""
    word = row + may_hide(index, ranges).to(gl.int32)
    await_left(ring, visit)
    words.index(visit % ring.full.shape[0]).store(gl.full([1], 0, gl.int32, gl.BlockedLayout([1], [32], [1], [0])) + word)


@gluon.jit
def visited(words, ring, visit):
    """Return where the rows of a visit begin, and whether any may be hidden. The visit has come, and has not been left."""
    word = gl.sum(words.index(visit % ring.full.shape[0]).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
    return word // LEAST_ROWS * LEAST_ROWS, word % LEAST_ROWS != 0
