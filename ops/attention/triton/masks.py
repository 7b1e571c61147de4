"""Which keys a query sees, and the tiles in which any or all of them are seen.

Of a sample's positions the first `num_contextual` may be contextual, and those from `history` on are targets. An option that is
absent is None, so that nothing of it is compiled.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Sight(NamedTuple):
    """What queries see, beside `IS_CAUSAL`; `num_targets` only tells whether there are targets.

    A query sees the keys less than `window` positions before it and, unless it is causal, less than `reach` behind it; a `reach`
    of None is the window. Keys before `prefix` are in every window; without one, contextual keys all stand where their last does.
    """

    window: Any
    reach: Any
    num_contextual: Any
    prefix: Any
    num_targets: Any


class Ranges(NamedTuple):
    """Tiles to visit. `whole_begin, whole_end`: rows of whole tiles, where nothing is hidden.

    Around them are tiles that need a mask, as `edge_tile` finds them: `prefix_tiles` from row 0 on, `low_tiles` from `low` on,
    `high_tiles` from `whole_end` on, the rest of `edge_tiles` from `diagonal` on.
    """

    whole_begin: Any
    whole_end: Any
    prefix_tiles: Any
    low: Any
    low_tiles: Any
    high_tiles: Any
    diagonal: Any
    edge_tiles: Any


@triton.jit
def reach_of(sight):
    """Return how far a query sees ahead, of a sight with a window that is not causal."""
    return sight.window if sight.reach is None else sight.reach


@triton.jit
def visible(positions, keys, history, sight, IS_CAUSAL: tl.constexpr):
    """Tell which keys are seen from which positions; the two broadcast. Positions past the end see anything."""
    rows = positions
    if sight.num_targets is not None:
        # Targets all stand right after the history.
        rows = tl.minimum(positions, history)
    if IS_CAUSAL:
        if sight.num_targets is None:
            seen = keys <= positions
        elif sight.window is None:
            seen = keys <= tl.minimum(positions, history - 1)
        else:
            # A window needs the rows' places in any case, and registers are scarce beside it.
            seen = (keys <= rows) & (keys < history)
    else:
        seen = keys < history
    if sight.window is not None:
        places = keys
        if sight.num_contextual is not None and sight.prefix is None:
            places = tl.maximum(keys, sight.num_contextual - 1)
        near = rows - places < sight.window
        if not IS_CAUSAL:
            near = near & (keys - rows < reach_of(sight))
        if sight.prefix is not None:
            near = near | (keys < sight.prefix)
        seen = seen & near
    if sight.num_contextual is not None:
        seen = seen | ((positions < sight.num_contextual) & (keys < history))
    if sight.num_targets is not None:
        seen = seen | (keys == positions)
    return seen


@triton.jit
def masked(scores, rows, keys, sample, sight, IS_CAUSAL: tl.constexpr, HIDDEN_SCORE: tl.constexpr):
    """Scores, and `HIDDEN_SCORE` where a query does not see a key."""
    return tl.where(visible(rows + sample.shift, keys, sample.history, sight, IS_CAUSAL), scores, HIDDEN_SCORE)


@triton.jit
def key_ranges(first_query, sample, sight, IS_CAUSAL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the key tiles that a tile of queries needs."""
    first = first_query + sample.shift
    last = tl.minimum(first_query + ROWS, sample.query_length) - 1 + sample.shift
    history, window, num_contextual = sample.history, sight.window, sight.num_contextual
    from_row, to_row = first, last
    if sight.num_targets is not None:
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
            high = tl.minimum(to_row + reach_of(sight), history)
            whole_end = tl.minimum(from_row + reach_of(sight), history)
        low = tl.maximum(from_row - window + 1, 0)
        whole_begin = tl.maximum(to_row - window + 1, 0)
        if num_contextual is not None and sight.prefix is None:
            # Who sees the last contextual key sees them all.
            low = tl.where(low < num_contextual, 0, low)
            whole_begin = tl.where(whole_begin < num_contextual, 0, whole_begin)
        low = low // BLOCK * BLOCK
        whole_begin = tl.cdiv(whole_begin, BLOCK) * BLOCK
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
    if window is not None and sight.prefix is not None:
        prefix_tiles = tl.cdiv(tl.minimum(sight.prefix, low), BLOCK)
    low_tiles = (whole_begin - low) // BLOCK
    high_tiles = tl.cdiv(tl.maximum(high - whole_end, 0), BLOCK)
    diagonal = high
    edge_tiles = prefix_tiles + low_tiles + high_tiles
    if sight.num_targets is not None:
        diagonal = tl.maximum(tl.maximum(first, history) // BLOCK, tl.cdiv(high, BLOCK)) * BLOCK
        edge_tiles += tl.cdiv(tl.maximum(last + 1 - diagonal, 0), BLOCK) * (last >= history).to(tl.int32)
    return Ranges(whole_begin, whole_end, prefix_tiles, low, low_tiles, high_tiles, diagonal, edge_tiles)


@triton.jit
def query_ranges(first_key, sample, sight, IS_CAUSAL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the query tiles that see a tile of keys."""
    first, last = first_key, tl.minimum(first_key + ROWS, sample.key_length) - 1
    history, query_length, shift = sample.history, sample.query_length, sample.shift
    window, num_contextual = sight.window, sight.num_contextual
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
            low = first - reach_of(sight) + 1 - shift
            whole_begin = last - reach_of(sight) + 1 - shift
        nearest, farthest = last_history, first
        if num_contextual is not None and sight.prefix is None:
            nearest, farthest = tl.maximum(nearest, num_contextual - 1), tl.maximum(farthest, num_contextual - 1)
        # Where the window reaches past the history, it reaches all targets.
        high = tl.where(nearest + window > history, query_length, tl.minimum(nearest + window - shift, query_length))
        whole_end = tl.where(farthest + window > history, query_length, tl.minimum(farthest + window - shift, query_length))
        if sight.prefix is not None:
            is_in_prefix = first < sight.prefix
            high = tl.where(is_in_prefix, query_length, high)
            if IS_CAUSAL:
                whole_end = tl.where(last < sight.prefix, query_length, whole_end)
            else:
                low = tl.where(is_in_prefix, 0, low)
    low = tl.maximum(low, 0) // BLOCK * BLOCK
    whole_begin = tl.cdiv(tl.maximum(whole_begin, 0), BLOCK) * BLOCK
    whole_end = tl.maximum(tl.minimum(whole_end, query_length), 0) // BLOCK * BLOCK
    is_none_whole = whole_begin >= whole_end
    if sight.num_targets is not None:
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
    if sight.num_targets is not None:
        prefix_tiles = tl.where(first >= history, 0, prefix_tiles)
        edge_tiles = prefix_tiles + low_tiles + high_tiles
        begin = tl.maximum(tl.maximum(first, history) - shift, 0) // BLOCK
        covered = tl.cdiv(tl.maximum(high, whole_end), BLOCK)
        diagonal = tl.where(first >= history, begin, tl.maximum(begin, covered)) * BLOCK
        edge_tiles += tl.cdiv(tl.maximum(last + 1 - shift - diagonal, 0), BLOCK) * (last >= history).to(tl.int32)
    return Ranges(whole_begin, whole_end, prefix_tiles, low, low_tiles, high_tiles, diagonal, edge_tiles)


@triton.jit
def edge_tile(index, ranges, BLOCK: tl.constexpr):
    """Return where the `index`-th tile that needs a mask begins."""
    after_prefix = index - ranges.prefix_tiles
    after_low = after_prefix - ranges.low_tiles
    after_high = after_low - ranges.high_tiles
    first = tl.where(after_low < 0, ranges.low + after_prefix * BLOCK, ranges.whole_end + after_low * BLOCK)
    first = tl.where(after_prefix < 0, index * BLOCK, first)
    return tl.where(after_high >= 0, ranges.diagonal + after_high * BLOCK, first)
