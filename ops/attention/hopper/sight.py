"""Which keys a query sees on Hopper, and which tiles meet: what the three kernels share. `triton/masks.py` has the definition.

Query i stands at position `i + key_length - query_length`. Positions from `history` on are targets, whose keys nobody but their
own query sees. Without targets, which only causal queries have here, the history has all keys.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def history_of(num_targets, sample, key_length):
    """Return how many of a sample's keys stand before its targets, of which there are no more than keys."""
    history = key_length
    if num_targets is not None:
        targets = gl.load(num_targets + sample).to(gl.int64)
        history -= gl.minimum(gl.maximum(targets, 0), key_length).to(gl.int32)
    return history


@gluon.jit
def sees(positions, keys, history, IS_CAUSAL: gl.constexpr, HAS_TARGETS: gl.constexpr):
    """Tell which keys are seen from which positions; the two broadcast. Positions past the end see keys past it."""
    if not IS_CAUSAL:
        return keys < history
    elif not HAS_TARGETS:
        return keys <= positions
    else:
        return (keys <= positions) & ((keys < history) | (keys == positions))


@gluon.jit
def key_tiles(
    first_query, query_length, key_length, history,
    IS_CAUSAL: gl.constexpr, HAS_TARGETS: gl.constexpr, ROWS: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    """Return how many key tiles `ROWS` queries visit, at least one, and how many of them, the first, every query sees whole.

    The third result is how many lie in the history, the fourth how many that nobody sees lie between those and the others, which
    hold targets that are among the queries.
    """
    first = first_query + key_length - query_length
    end = gl.minimum(first + ROWS, key_length)
    seen = history
    seen_by_all = history
    if IS_CAUSAL:
        seen = gl.maximum(gl.minimum(end, history), 0)
        seen_by_all = gl.maximum(gl.minimum(first + 1, history), 0)
    near = (seen + BLOCK - 1) // BLOCK
    tiles = near
    skipped = 0
    if HAS_TARGETS:
        diagonal = gl.maximum(gl.maximum(first, history) // BLOCK, near)
        tiles += gl.maximum((end + BLOCK - 1) // BLOCK - diagonal, 0)
        skipped = diagonal - near
    return gl.maximum(tiles, 1), seen_by_all // BLOCK, near, skipped


@gluon.jit
def key_of_tile(index, near, skipped, HAS_TARGETS: gl.constexpr, BLOCK: gl.constexpr):
    """Return where the `index`-th tile of `key_tiles` begins."""
    if HAS_TARGETS:
        index += gl.where(index >= near, skipped, 0)
    return index * BLOCK


@gluon.jit
def query_tiles(
    first_key, query_length, key_length, history,
    IS_CAUSAL: gl.constexpr, HAS_TARGETS: gl.constexpr, ROWS: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    """Return the first query that `ROWS` keys meet, where the queries end that do, and how many tiles that is, at least one."""
    shift = key_length - query_length
    first = 0
    end = query_length
    if IS_CAUSAL:
        first = gl.maximum(first_key - shift, 0) // BLOCK * BLOCK
    if HAS_TARGETS:
        end = gl.where(first_key >= history, gl.minimum(first_key + ROWS - shift, query_length), query_length)
    return first, end, gl.maximum((end - first + BLOCK - 1) // BLOCK, 1)


@gluon.jit
def hides(first_key, first_position, history, HAS_TARGETS: gl.constexpr, ROWS: gl.constexpr):
    """Whether any of `ROWS` keys may be hidden from a causal query, or a later one, at a position."""
    is_hidden = first_position < first_key + ROWS - 1
    if HAS_TARGETS:
        is_hidden = is_hidden | (first_key + ROWS > history)
    return is_hidden
