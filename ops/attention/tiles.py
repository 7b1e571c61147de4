"""What the attention kernels share: tiles of rows, which keys a query sees, and the tiles in which any or all of them are seen.

A sample has `query_length` queries and `key_length` keys. Query i stands at key position `i + key_length - query_length`: the
last query at the last key. The last positions, from `history` on, may be targets, the first `num_contextual` may be contextual.
An option that is absent is None, so that nothing of it is compiled.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

# For exponentials to base 2, and back.
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


class Place(NamedTuple):
    """Of a program: its query head, where its sample's rows begin and how many there are, and what its queries see."""

    head: Any
    start: Any
    key_start: Any
    query_length: Any
    key_length: Any
    shift: Any
    history: Any
    window: Any
    num_contextual: Any
    num_targets: Any


@triton.jit
def rows_of(
    tensor, length, row_stride, USE_TMA: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Return what `load_tile` loads a sample's rows from: a pointer, or a descriptor for the tensor memory accelerator."""
    if USE_TMA:
        shape = [tl.maximum(length, 1), HEAD_DIM]
        return tl.make_tensor_descriptor(tensor, shape, [row_stride.to(tl.int64), 1], [BLOCK, BLOCK_D])
    else:
        return tensor


@triton.jit
def load_tile(
    rows_source, first, length, row_stride, IS_WHOLE: tl.constexpr, USE_TMA: tl.constexpr,
    BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Load rows `first ..` of a sample, `[BLOCK, BLOCK_D]`.

    Rows that it does not have are zeros by TMA. By pointers its last row stands in for them, unless the tile `IS_WHOLE`.
    """
    if USE_TMA:
        return rows_source.load([first, 0])
    else:
        return load_by_pointers(rows_source, first, length, row_stride, IS_WHOLE, BLOCK, HEAD_DIM, BLOCK_D)


@triton.jit
def load_by_pointers(
    tensor, first, length, row_stride, IS_WHOLE: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Load rows `first ..` of a sample, `[BLOCK, BLOCK_D]`; unless the tile is whole, the last row stands in for missing ones."""
    rows = tl.arange(0, BLOCK)
    columns = tl.arange(0, BLOCK_D)
    if IS_WHOLE:
        tensor += tl.cast(first, tl.int64) * row_stride
    else:
        rows = tl.minimum(first + rows, length - 1)
    places = tensor + (rows.to(tl.int64)[:, None] * row_stride + columns[None, :])
    return tl.load(places) if HEAD_DIM == BLOCK_D else tl.load(places, mask=columns[None, :] < HEAD_DIM, other=0.0)


@triton.jit
def store_tile(tensor, tile, first, length, row_stride, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store the rows of `[BLOCK, BLOCK_D]` that the sample has, from row `first` of it on."""
    rows = first + tl.arange(0, BLOCK)
    columns = tl.arange(0, BLOCK_D)
    places = tensor + rows.to(tl.int64)[:, None] * row_stride + columns[None, :]
    mask = (rows < length)[:, None]
    if HEAD_DIM != BLOCK_D:
        mask = mask & (columns[None, :] < HEAD_DIM)
    tl.store(places, tile.to(tensor.dtype.element_ty), mask=mask)


@triton.jit
def history_end(num_targets, sample, key_length):
    """Return where the targets of a sample begin; without targets that is its end."""
    if num_targets is not None:
        targets = tl.load(num_targets + sample).to(tl.int64)
        key_length -= tl.minimum(tl.maximum(targets, 0), key_length).to(tl.int32)
    return key_length


@triton.jit
def visible(positions, keys, history, window, num_contextual, num_targets, IS_CAUSAL: tl.constexpr):
    """Tell which keys are seen from which positions; the two broadcast. Positions past the end see anything."""
    rows = positions
    if num_targets is not None:
        # Targets all stand right after the history.
        rows = tl.minimum(positions, history)
    if IS_CAUSAL:
        seen = keys <= rows
        if num_targets is not None:
            seen = seen & (keys < history)
    else:
        seen = keys < history
    if window is not None:
        near = rows - keys < window
        if not IS_CAUSAL:
            near = near & (keys - rows < window)
        if num_contextual is not None:
            near = near | (keys < num_contextual)
        seen = seen & near
    if num_contextual is not None:
        seen = seen | ((positions < num_contextual) & (keys < history))
    if num_targets is not None:
        seen = seen | (keys == positions)
    return seen


@triton.jit
def key_ranges(first, last, history, window, num_contextual, num_targets, IS_CAUSAL: tl.constexpr, BLOCK: tl.constexpr):
    """Return the key tiles that the positions `first .. last` need, as `edge_tile` takes them.

    `whole_begin, whole_end`: keys in whole tiles, seen from every position. Around them are tiles that need a mask:
    `prefix_tiles` from key 0 on, `low_tiles` from `low` on, `high_tiles` from `whole_end` on, the rest of `edge_tiles` from
    `diagonal` on.
    """
    from_row, to_row = first, last
    if num_targets is not None:
        from_row, to_row = tl.minimum(first, history), tl.minimum(last, history)
    low = first * 0
    whole_begin = low
    high = history
    whole_end = history
    if IS_CAUSAL:
        high = tl.minimum(to_row + 1, history)
        whole_end = tl.minimum(from_row + 1, history)
    if window is not None:
        if not IS_CAUSAL:
            high = tl.minimum(to_row + window, history)
            whole_end = tl.minimum(from_row + window, history)
        low = tl.maximum(from_row - window + 1, 0) // BLOCK * BLOCK
        whole_begin = tl.cdiv(tl.maximum(to_row - window + 1, 0), BLOCK) * BLOCK
    if num_contextual is not None:
        is_contextual = first < num_contextual
        high = tl.where(is_contextual, history, high)
        low = tl.where(is_contextual, 0, low)
    high = tl.maximum(high, 0)
    whole_end = tl.maximum(whole_end, 0) // BLOCK * BLOCK
    is_none_whole = whole_begin >= whole_end
    whole_begin = tl.where(is_none_whole, low, whole_begin)
    whole_end = tl.where(is_none_whole, low, whole_end)

    prefix_tiles = first * 0
    if window is not None and num_contextual is not None:
        prefix_tiles = tl.cdiv(tl.minimum(num_contextual, low), BLOCK)
    low_tiles = (whole_begin - low) // BLOCK
    high_tiles = tl.cdiv(tl.maximum(high - whole_end, 0), BLOCK)
    diagonal = high
    edge_tiles = prefix_tiles + low_tiles + high_tiles
    if num_targets is not None:
        diagonal = tl.maximum(tl.maximum(first, history) // BLOCK, tl.cdiv(high, BLOCK)) * BLOCK
        edge_tiles += tl.cdiv(tl.maximum(last + 1 - diagonal, 0), BLOCK) * (last >= history).to(tl.int32)
    return whole_begin, whole_end, prefix_tiles, low, low_tiles, high_tiles, diagonal, edge_tiles


@triton.jit
def query_ranges(
    first, last, shift, query_length, history, window, num_contextual, num_targets, IS_CAUSAL: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Return the query tiles that see the keys `first .. last`, as `key_ranges` key tiles; `shift` is query 0's position."""
    last_history = tl.minimum(last, history - 1)
    low = first * 0
    whole_begin = low
    high = query_length
    whole_end = query_length
    if IS_CAUSAL:
        low = first - shift
        whole_begin = last - shift
    if window is not None:
        if not IS_CAUSAL:
            low = first - window + 1 - shift
            whole_begin = last - window + 1 - shift
        # Where the window reaches past the history, it reaches all targets.
        high = tl.where(last_history + window > history, query_length, tl.minimum(last_history + window - shift, query_length))
        whole_end = tl.where(first + window > history, query_length, tl.minimum(first + window - shift, query_length))
        if num_contextual is not None:
            is_contextual = first < num_contextual
            high = tl.where(is_contextual, query_length, high)
            if not IS_CAUSAL:
                low = tl.where(is_contextual, 0, low)
    low = tl.maximum(low, 0) // BLOCK * BLOCK
    whole_begin = tl.cdiv(tl.maximum(whole_begin, 0), BLOCK) * BLOCK
    whole_end = tl.maximum(tl.minimum(whole_end, query_length), 0) // BLOCK * BLOCK
    is_none_whole = whole_begin >= whole_end
    if num_targets is not None:
        # Targets among the keys hide themselves from all queries but one.
        is_none_whole = is_none_whole | (last >= history)
        high = tl.where(first >= history, low, high)
    whole_begin = tl.where(is_none_whole, low, whole_begin)
    whole_end = tl.where(is_none_whole, low, whole_end)

    prefix_tiles = first * 0
    if num_contextual is not None:
        prefix_tiles = tl.cdiv(tl.maximum(tl.minimum(num_contextual - shift, low), 0), BLOCK)
    low_tiles = (whole_begin - low) // BLOCK
    high_tiles = tl.cdiv(tl.maximum(high - whole_end, 0), BLOCK)
    diagonal = high
    edge_tiles = prefix_tiles + low_tiles + high_tiles
    if num_targets is not None:
        prefix_tiles = tl.where(first >= history, 0, prefix_tiles)
        edge_tiles = prefix_tiles + low_tiles + high_tiles
        begin = tl.maximum(tl.maximum(first, history) - shift, 0) // BLOCK
        covered = tl.cdiv(tl.maximum(high, whole_end), BLOCK)
        diagonal = tl.where(first >= history, begin, tl.maximum(begin, covered)) * BLOCK
        edge_tiles += tl.cdiv(tl.maximum(last + 1 - shift - diagonal, 0), BLOCK) * (last >= history).to(tl.int32)
    return whole_begin, whole_end, prefix_tiles, low, low_tiles, high_tiles, diagonal, edge_tiles


@triton.jit
def edge_tile(index, whole_end, prefix_tiles, low, low_tiles, high_tiles, diagonal, BLOCK: tl.constexpr):
    """Return where the `index`-th tile that needs a mask begins."""
    after_prefix = index - prefix_tiles
    after_low = after_prefix - low_tiles
    after_high = after_low - high_tiles
    first = tl.where(after_low < 0, low + after_prefix * BLOCK, whole_end + after_low * BLOCK)
    first = tl.where(after_prefix < 0, index * BLOCK, first)
    return tl.where(after_high >= 0, diagonal + after_high * BLOCK, first)
