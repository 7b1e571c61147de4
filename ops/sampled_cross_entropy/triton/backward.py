"""Backward of sampled cross-entropy, deterministic and without atomics: entries sorted by item, one program an item.

An entry is what one item gets from one place: a negative of a row, of a part of the rows that share a draw, or a row's target.
The entries' items are drawn again and sorted, so that those of an item lie side by side; a program walks them in their order, and
items with many are cut into chunks of fixed length whose sums are added in their order. The list has a fixed size, whatever the
draws: what does not count has an item past the last. Where it would pass `ENTRY_BYTES_AT_MOST`, rows are taken in ranges, one
after the other, whose sums are added in float32. Ranges of rows have sizes that shapes alone give; ranges of items would not, and
each of them would draw everything again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from jagged.ops._shared.device import WAYS, find_tile, load_segment, load_tile, rounded_product
from jagged.ops.sampled_cross_entropy.triton.negatives import (
    VARYING,
    draw_for_row,
    load_target,
    log_expected,
    rows_of_unit,
    slope,
)


@triton.jit(do_not_specialize=VARYING)
def sampled_backward_rows_kernel(
    grad_loss, grad_lse, weight, target, statistic, share, pull, direction, grad_logit, grad_statistic, grad_hidden, num_rows,
    num_items, num_parts, loss_stride, lse_stride, weight_stride, direction_stride, scale, ignore_index,
    IS_INSIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Gradients of rows' target logits and statistics, times the scale; with them the gradient of hidden states.

    `direction` is a sum of parts `[num_parts, N, direction_stride]`. Gradients of a mean are one number for all rows, of the
    stride 0.
    """
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    exists = row < num_rows
    row_target, _ = load_target(target, row, exists, num_items, ignore_index)
    known = row_target >= 0
    row_share = tl.load(share + row, mask=known, other=0.0)
    row_grad = tl.load(grad_loss + row * loss_stride, mask=known, other=0.0)
    to_logit = row_grad * tl.load(pull + row, mask=known, other=0.0)
    to_statistic = row_grad * row_share
    if grad_lse is not None:
        through = row_share
        if not IS_INSIDE:
            through = tl.where(tl.load(statistic + row, mask=known, other=0.0) == float("inf"), 0.0, 1.0)
        row_grad = tl.load(grad_lse + row * lse_stride, mask=known, other=0.0)
        to_logit += row_grad * (1.0 - through)
        to_statistic += row_grad * through
    to_logit *= scale
    to_statistic *= scale
    tl.store(grad_logit + row, to_logit, mask=exists)
    tl.store(grad_statistic + row, to_statistic, mask=exists)
    if grad_hidden is not None:
        for start in range(0, WIDTH, BLOCK_D):
            item_tile = load_tile(weight, row_target, weight_stride, known, start, WIDTH, BLOCK_D).to(tl.float32)
            direction_tile = load_tile(direction, row, direction_stride, known, start, WIDTH, BLOCK_D)
            for part in range(1, num_parts):
                place = tl.cast(part, tl.int64) * num_rows + row
                direction_tile += load_tile(direction, place, direction_stride, known, start, WIDTH, BLOCK_D)
            column = start + tl.arange(0, BLOCK_D)
            gradient = to_logit[:, None] * item_tile + to_statistic[:, None] * direction_tile
            address = grad_hidden + row.to(tl.int64)[:, None] * WIDTH + column[None, :]
            tl.store(address, gradient.to(grad_hidden.dtype.element_ty), mask=exists[:, None] & (column < WIDTH)[None, :])


@triton.jit(do_not_specialize=VARYING)
def sampled_pairs_kernel(
    hidden, weight, target, ids, log_q, probability, seed, excluded, exclude_offsets, sample_weight, statistic, share,
    grad_logit, grad_statistic, items, factors, num_items, num_negatives, num_excluded, hidden_stride, weight_stride,
    rows_per_draw, parameter, offset, scale, ignore_index, filter_eps, KIND: tl.constexpr, LOSS: tl.constexpr,
    IS_CORRECTED: tl.constexpr, MASK_HITS: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr, BLOCK_J: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Items and factors of a part of a row's negatives, `[N, ns + 1]`, whose logits are computed again; and of its target.

    The gradient of item i is the sum over its entries of factor times the row's hidden state. -1 is no item.
    """
    ACCURATE: tl.constexpr = hidden.dtype.element_ty == tl.float32
    row = tl.program_id(0)
    row_target, _ = load_target(target, row, row >= 0, num_items, ignore_index)
    row_statistic, to_statistic = tl.load(statistic + row), tl.load(grad_statistic + row)
    # A row without a gradient of its negatives names none.
    live_target = tl.where(row_statistic < float("inf"), row_target, -1)
    column = tl.arange(0, BLOCK_D)
    row_hidden = hidden + row.to(tl.int64) * hidden_stride
    if WIDTH <= BLOCK_D:
        hidden_tile = tl.load(row_hidden + column, mask=(live_target >= 0) & (column < WIDTH), other=0.0).to(tl.float32)
    if filter_eps is not None:
        part = tl.load(share + row)
        if sample_weight is not None:
            part *= tl.abs(tl.load(sample_weight + row))
    first, begin = row.to(tl.int64) * (num_negatives + 1), tl.program_id(1) * PART
    for start in range(begin, tl.minimum(begin + PART, num_negatives), BLOCK_J):
        place = start + tl.arange(0, BLOCK_J)
        item, exists = draw_for_row(
            ids, probability, seed, excluded, exclude_offsets, row // rows_per_draw, place, row, live_target, num_negatives,
            num_items, num_excluded, parameter, KIND, MASK_HITS,
        )  # fmt: skip
        logits = tl.zeros((BLOCK_J,), tl.float32)
        for step in range(0, WIDTH, BLOCK_D):
            if WIDTH > BLOCK_D:
                hidden_tile = tl.load(row_hidden + step + column, mask=step + column < WIDTH, other=0.0).to(tl.float32)
            tile = load_tile(weight, item, weight_stride, exists, step, WIDTH, BLOCK_D)
            logits += tl.sum(rounded_product(tile, hidden_tile[None, :]), 1)
        logits *= scale
        if IS_CORRECTED:
            group = row // rows_per_draw
            logits -= log_expected(log_q, item, group, place, exists, num_negatives, offset, KIND)
        weights = slope(tl.where(exists, logits, float("-inf")), row_statistic, LOSS == "bce", ACCURATE)
        if filter_eps is not None:
            weights = tl.where(weights * part < filter_eps, 0.0, weights)
        in_draw = place < num_negatives
        tl.store(items + first + place, tl.where(exists, item, -1), mask=in_draw)
        tl.store(factors + first + place, tl.where(exists, weights * to_statistic, 0.0), mask=in_draw)
    if tl.program_id(1) == 0:
        tl.store(items + first + num_negatives, row_target)
        tl.store(factors + first + num_negatives, tl.load(grad_logit + row, mask=row_target >= 0, other=0.0))


@triton.jit(do_not_specialize=VARYING)
def sampled_keys_kernel(
    target, ids, probability, seed, excluded, exclude_offsets, items, statistic, keys, num_rows, num_items, num_negatives,
    num_excluded, rows_per_draw, rows_per_unit, parameter, ignore_index, first_unit, first_row, num_pairs, KIND: tl.constexpr,
    MASK_HITS: tl.constexpr, UNITS_ARE_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The items of a unit's negatives and of its rows' targets; `num_items` where an entry does not count."""
    unit = tl.program_id(0)
    group, first, last = rows_of_unit(first_unit + unit, rows_per_draw, rows_per_unit, num_rows)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_draw = place < num_negatives
    if UNITS_ARE_ROWS:
        row = tl.minimum(first, num_rows - 1)
        row_target, _valid = load_target(target, row, row >= 0, num_items, ignore_index)
        # A row without a gradient of its negatives gathers nothing.
        is_live = (first < last) & (tl.load(statistic + row) < float("inf"))
        item, exists = draw_for_row(
            ids, probability, seed, excluded, exclude_offsets, group, place, row, tl.where(is_live, row_target, -1),
            num_negatives, num_items, num_excluded, parameter, KIND, MASK_HITS,
        )  # fmt: skip
    else:
        item = tl.load(items + group.to(tl.int64) * num_negatives + place, mask=in_draw & (first < last), other=-1)
        exists = item >= 0
    tl.store(keys + unit.to(tl.int64) * num_negatives + place, tl.where(exists, item, num_items), mask=in_draw)
    # The programs of a unit share its rows' targets.
    for start in range(first + tl.program_id(1) * BLOCK, last, tl.num_programs(1) * BLOCK):
        rows = start + tl.arange(0, BLOCK)
        targets, _counted = load_target(target, rows, rows < last, num_items, ignore_index)
        place_of_row = keys + num_pairs + (rows - first_row).to(tl.int64)
        tl.store(place_of_row, tl.where(targets >= 0, targets, num_items), mask=rows < last)


@triton.jit(do_not_specialize=VARYING)
def sampled_offsets_kernel(keys, entry_offsets, num_items, num_entries, BLOCK: tl.constexpr):
    """Where each item's entries begin among sorted keys, `[V + 1]`; past the last item, where those that count end.

    First where the items of a program begin and end, 32 places a step, then each item between them: loads that wait for one
    another are what a search costs.
    """
    first = tl.program_id(0).to(tl.int64) * BLOCK
    bound = first + tl.arange(0, 2) * BLOCK
    low = tl.zeros((2,), tl.int32)
    width = num_entries
    while width > 0:
        step = tl.cdiv(width, WAYS)
        # Of each of 32 parts the last place: parts that end below the bound are passed.
        place = low[:, None] + ((tl.arange(0, WAYS) + 1) * step - 1)[None, :]
        exists = place < num_entries
        is_below = exists & (tl.load(keys + place, mask=exists, other=0) < bound[:, None])
        low += tl.sum(is_below.to(tl.int32), 1) * step
        width = step - 1
    begin, end = tl.min(low, 0), tl.max(low, 0)
    item = first + tl.arange(0, BLOCK)
    low = tl.zeros((BLOCK,), tl.int32)
    place = first_not_below(keys, item, low + begin, low + end, end - begin)
    tl.store(entry_offsets + item, place, mask=item <= num_items)


@triton.jit
def first_not_below(keys, bound, low, high, length):
    """The first places from `low` on whose keys are not below a bound, `high` where none is; `length` is the longest way."""
    while length > 0:
        middle = low + (high - low) // 2
        is_open = low < high
        is_below = is_open & (tl.load(keys + middle, mask=is_open, other=0) < bound)
        low = tl.where(is_below, middle + 1, low)
        high = tl.where(is_below, high, middle)
        length = length // 2
    return low


@triton.jit(do_not_specialize=VARYING)
def sampled_items_kernel(
    hidden, weight, log_q, sample_weight, statistic, share, grad_logit, grad_statistic, sums, keys, touched, entries,
    entry_offsets, first_sums, other_sums, grad_weight, num_items, first_item, num_negatives, hidden_stride, weight_stride,
    rows_per_draw, offset, scale, filter_eps, first_row, num_entries, num_pairs, division, shift_of_division, KIND: tl.constexpr,
    LOSS: tl.constexpr, IS_CORRECTED: tl.constexpr, ADDS: tl.constexpr, BY_ENTRY: tl.constexpr, ROUNDS: tl.constexpr,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One tile of columns of an item's gradient from a chunk of its entries; of items with several chunks a sum for each.

    Without `sums` an entry is a row, whose logit is computed again; with them a negative's part is a row of `sums`.
    With `touched`, the items that have a gradient, items are places in it. Of some items' weights the first is `first_item`.
    `BY_ENTRY` has a program for each entry, of which those at the beginning of a chunk work, in place of one for each item.
    `ROUNDS` rounds weights to the dtype of hidden states, as the forward pass had them.
    """
    ACCURATE: tl.constexpr = hidden.dtype.element_ty == tl.float32
    index = tl.program_id(0)
    first_column = tl.program_id(1) * BLOCK_D
    place = tl.arange(0, BLOCK_E)
    if BY_ENTRY:
        item = tl.load(keys + index).to(tl.int64)
        # Before it is known whether this program works.
        entry = tl.load(entries + index + place, mask=index + place < num_entries, other=0).to(tl.int32)
        counts = item < num_items
        item = tl.where(counts, item, 0)
        begin, end = load_segment(entry_offsets, item, num_entries)
        length, start = end - begin, index - begin
        start = tl.where(counts & (start % CHUNK == 0), start, length)
        # Where `find_tile` puts this chunk, if it is not its item's first.
        index = (begin // CHUNK + start // CHUNK - 1).to(tl.int32)
    else:
        item, begin, length, start = find_tile(entry_offsets, index, num_items, num_entries, CHUNK, True)
        # Of the chunks before those of the first item none is its first one.
        start = tl.where((index < num_entries // CHUNK) & (start == 0), length, start)
    if start < length:
        column = tl.arange(0, BLOCK_D)
        source = item
        if touched is not None:
            source = tl.load(touched + item)
        item_row = weight + source * weight_stride
        if sums is None and WIDTH <= BLOCK_D:
            item_tile = item_values(item_row + column, column < WIDTH, hidden, ROUNDS)
        count = (tl.minimum(start + CHUNK, length) - start).to(tl.int32)
        run = entries + begin + start
        if not BY_ENTRY:
            entry = tl.load(run + place, mask=place < count, other=0).to(tl.int32)
        row, is_pair = row_of_entry(entry, num_pairs, first_row, division, shift_of_division)
        next_entry = tl.load(run + BLOCK_E + place, mask=BLOCK_E + place < count, other=0).to(tl.int32)
        if sums is None:
            hidden_tile = load_tile(hidden, row, hidden_stride, place < count, first_column, WIDTH, BLOCK_D)
        gradient = tl.zeros((BLOCK_E, BLOCK_D), tl.float32)
        for step in range(0, count, BLOCK_E):
            exists = step + place < count
            # The next rows are on their way while these are used, and the entries after them.
            next_row, next_is_pair = row_of_entry(next_entry, num_pairs, first_row, division, shift_of_division)
            after = step + 2 * BLOCK_E + place
            after_entry = tl.load(run + after, mask=after < count, other=0).to(tl.int32)
            is_target = exists & (is_pair == 0)
            is_pair &= exists
            factor = tl.load(grad_logit + row, mask=is_target, other=0.0)
            if sums is None:
                next_exists = step + BLOCK_E + place < count
                next_tile = load_tile(hidden, next_row, hidden_stride, next_exists, first_column, WIDTH, BLOCK_D)
                values = hidden_tile.to(tl.float32)
                hidden_tile = next_tile
                row_statistic = tl.load(statistic + row, mask=is_pair, other=float("inf"))
                to_statistic = tl.load(grad_statistic + row, mask=is_pair, other=0.0)
                if WIDTH <= BLOCK_D:
                    logits = tl.sum(rounded_product(values, item_tile[None, :]), 1)
                else:
                    logits = tl.zeros((BLOCK_E,), tl.float32)
                    for other_column in range(0, WIDTH, BLOCK_D):
                        in_row = other_column + column < WIDTH
                        item_tile = item_values(item_row + other_column + column, in_row, hidden, ROUNDS)
                        tile = load_tile(hidden, row, hidden_stride, exists, other_column, WIDTH, BLOCK_D)
                        logits += tl.sum(rounded_product(tile, item_tile[None, :]), 1)
                logits *= scale
                if IS_CORRECTED:
                    items = tl.zeros((BLOCK_E,), tl.int32) + (source + first_item).to(tl.int32)
                    in_draw = entry - (row - first_row) * num_negatives
                    group = row // rows_per_draw
                    logits -= log_expected(log_q, items, group, in_draw, is_pair, num_negatives, offset, KIND)
                weights = slope(tl.where(is_pair, logits, float("-inf")), row_statistic, LOSS == "bce", ACCURATE)
                if filter_eps is not None:
                    part = tl.load(share + row, mask=is_pair, other=0.0)
                    if sample_weight is not None:
                        part *= tl.abs(tl.load(sample_weight + row, mask=is_pair, other=0.0))
                    weights = tl.where(weights * part < filter_eps, 0.0, weights)
                factor += weights * to_statistic
            else:
                values = load_tile(hidden, row, hidden_stride, is_target, first_column, WIDTH, BLOCK_D).to(tl.float32)
                gradient += load_tile(sums, entry, WIDTH, is_pair, first_column, WIDTH, BLOCK_D)
            gradient += factor[:, None] * values
            entry, row, is_pair = next_entry, next_row, next_is_pair
            next_entry = after_entry
        total = tl.sum(gradient, 0)
        column += first_column
        in_row = column < WIDTH
        if length > CHUNK:
            first = begin // CHUNK
            place_of_sum = other_sums + index.to(tl.int64) * WIDTH
            if start == 0:
                place_of_sum = first_sums + first * WIDTH
            tl.store(place_of_sum + column, total, mask=in_row)
        else:
            store_item(grad_weight + item * WIDTH + column, total, in_row, ADDS)


@triton.jit
def item_values(address, mask, hidden, ROUNDS: tl.constexpr):
    """Weights of an item in float32, rounded on the way as a cast of the table would."""
    values = tl.load(address, mask=mask, other=0.0)
    if ROUNDS:
        values = values.to(hidden.dtype.element_ty)
    return values.to(tl.float32)


@triton.jit
def row_of_entry(entry, num_pairs, first_row, division, shift_of_division):
    """The rows of entries, int32, and which of them are negatives. Of units that are no rows the negatives' are not used.

    The quotient of an entry by the number of negatives is exact, see `division_by`, and takes a sixth of a division.
    """
    is_pair = entry < num_pairs
    factor = division.to(tl.uint32) + 2147483648
    twice = (entry * 2).to(tl.uint32)
    quotient = (tl.umulhi(twice, tl.zeros_like(twice) + factor) >> shift_of_division.to(tl.uint32)).to(tl.int32)
    return first_row + tl.where(is_pair, quotient, entry - num_pairs), is_pair


def division_by(divisor: int) -> tuple[int, int]:
    """Return a factor, less 2^31, and a shift: `(2 n (factor + 2^31) >> 32) >> shift` is `n // divisor` for n below 2^31.

    The factor is `2^(31 + shift) / divisor` rounded up, whose error times n stays below `2^(31 + shift) / divisor`.
    """
    shift = (divisor - 1).bit_length()
    return -(-(2 ** (31 + shift)) // divisor) - 2**31, shift


@triton.jit
def store_item(address, total, mask, ADDS: tl.constexpr):
    """Write an item's gradient, or add to what earlier ranges of rows gave it."""
    if ADDS:
        total += tl.load(address, mask=mask, other=0.0)
    tl.store(address, total.to(address.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=VARYING)
def sampled_join_kernel(
    entry_offsets, first_sums, other_sums, grad_weight, num_items, num_entries, ADDS: tl.constexpr, WIDTH: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The gradient of an item with several chunks, by the program of its second chunk: their sums in their order."""
    index = tl.program_id(0)
    item, begin, length, start = find_tile(entry_offsets, index, num_items, num_entries, CHUNK, True)
    if (start == CHUNK) & (length > CHUNK):
        column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
        in_row = column < WIDTH
        others = ((length - 1) // CHUNK).to(tl.int32)
        total = tl.zeros((BLOCK_C, BLOCK_D), tl.float32)
        for step in range(0, others, BLOCK_C):
            chunk = step + tl.arange(0, BLOCK_C)
            total += load_tile(other_sums, index + chunk, WIDTH, chunk < others, tl.program_id(1) * BLOCK_D, WIDTH, BLOCK_D)
        first = tl.load(first_sums + begin // CHUNK * WIDTH + column, mask=in_row, other=0.0)
        store_item(grad_weight + item * WIDTH + column, first + tl.sum(total, 0), in_row, ADDS)
