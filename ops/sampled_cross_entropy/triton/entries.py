"""Launches of the weights' gradient: entries are drawn, sorted by item and added up, one range of rows after the other."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from jagged.ops._shared.launch import Launcher
from jagged.ops._shared.matrices import inverse_scale_of
from jagged.ops._shared.room import zeros_with_room
from jagged.ops._shared.sizes import cdiv
from jagged.ops.sampled_cross_entropy.spec import num_touched
from jagged.ops.sampled_cross_entropy.touched import compacted, is_first_of_item
from jagged.ops.sampled_cross_entropy.triton.backward import (
    division_by,
    sampled_items_kernel,
    sampled_join_kernel,
    sampled_keys_kernel,
    sampled_offsets_kernel,
)
from jagged.ops.sampled_cross_entropy.triton.call import Call
from jagged.ops.sampled_cross_entropy.triton.configurations import item_configuration
from jagged.ops.sampled_cross_entropy.triton.shared_draws import Lists, Rows, block_sums, rows_of_parts

# Of the list of entries and of the sums that parts of rows have; a range of rows costs a pass over float32 gradients of all items
# it meets, so few ranges are worth memory.
ENTRY_BYTES_AT_MOST = 1024 * 1024 * 1024
# Of one entry while it is sorted: the item before and after, its place, and the sort's own copies of both.
ENTRY_BYTES = 36
# Of a number in the gradient of the whole table that ranges share where a sparse one is wanted.
TABLE_BYTES = 4
# Entries of an item that one program adds up.
CHUNK = 1024
KEY_BLOCK, OFFSETS_BLOCK, JOIN_BLOCK = 256, 256, 16

_launch_keys = Launcher(sampled_keys_kernel)
_launch_offsets = Launcher(sampled_offsets_kernel)
_launch_items = Launcher(sampled_items_kernel)
_launch_join = Launcher(sampled_join_kernel)


class Slopes(NamedTuple):
    """What entries take of rows, `[N]`: their statistics and shares, and the gradients of their target logits and statistics."""

    statistic: Tensor
    share: Tensor
    grad_logit: Tensor
    grad_statistic: Tensor


class Range(NamedTuple):
    """Units, parts of the rows that share a draw or single rows, whose entries are added up together."""

    first_unit: int
    num_units: int
    rows_per_unit: int
    first_row: int
    last_row: int


def weight_gradient(c: Call, lists: Lists | None, rows: Rows | None, slopes: Slopes, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the gradient of the weights as wide as the kernels have them; a sparse one is of the items `touched`."""
    x, o, num_rows, width, count, per_draw = c.x, c.o, c.num_rows, c.width, c.o.num_negatives, c.o.rows_per_draw
    device = x.hidden.device
    # Without shared gathers every row is a unit of its own.
    per_unit = rows_of_parts(c) if c.shares else 1
    parts = cdiv(per_draw, per_unit)
    num_units = cdiv(num_rows, per_draw) * parts if c.shares else num_rows
    unit_bytes = (count + per_unit) * ENTRY_BYTES + (4 * width * count if c.shares else 0)
    most_bytes = ENTRY_BYTES_AT_MOST
    if o.is_sparse:
        # Ranges share a gradient of the whole table: not worth it for less than that takes, while 32 bits count the entries.
        most_bytes = max(most_bytes, min(TABLE_BYTES * width * c.num_items, (2**31 - 1) // (count + per_unit) * unit_bytes))
    units = min(num_units, max(1, most_bytes // unit_bytes))
    is_whole = units == num_units
    most_touched = num_touched(x, o) if o.is_sparse else 0
    # An update of the table adds the gradients of its lookups to it, of as many rows where all that is scored was looked up.
    shape = most_touched if o.is_sparse and is_whole else c.num_items, width, num_rows if o.is_sparse else 0
    grad_weight = zeros_with_room(*shape, dtype if is_whole else torch.float32, device)
    inverse_scale = None
    if c.shares and x.hidden.dtype == torch.float16:
        inverse_scale = inverse_scale_of(x.target != o.ignore_index, slopes.grad_statistic)
    touched = None
    # Of several ranges the items are not known before the last: these share a gradient of the whole table.
    is_touched = None if is_whole or not o.is_sparse else torch.zeros(c.num_items, dtype=torch.bool, device=device)
    for first_unit in range(0, num_units, units):
        last_unit = min(first_unit + units, num_units)
        first, last = (min(num_rows, unit // parts * per_draw + unit % parts * per_unit) for unit in (first_unit, last_unit))
        span = Range(first_unit, last_unit - first_unit, per_unit, first, last)
        keys, entries = torch.sort(entry_keys(c, lists, slopes.statistic, span), stable=True)
        sums = None
        if lists is not None and rows is not None:
            sums = block_sums(c, lists, rows, slopes.grad_statistic, inverse_scale, *span[:3])
        if is_touched is None and o.is_sparse and most_touched < c.num_items:
            touched, place = compacted(keys, is_first_of_item(keys, c.num_items), most_touched)
            keys = torch.where(keys < c.num_items, place, most_touched).to(torch.int32)
        offsets = _add_entries(c, slopes, span, keys, entries, sums, touched, grad_weight, adds=not is_whole)
        if is_touched is not None:
            is_touched |= offsets.diff() > 0
        elif o.is_sparse and touched is None:
            touched = _each_or_another(offsets.diff() > 0)
    if is_touched is not None and most_touched == c.num_items:
        touched = _each_or_another(is_touched)
    elif is_touched is not None:
        items = torch.arange(c.num_items, device=device)
        touched, place = compacted(items, is_touched, most_touched)
        grad_weight = grad_weight[touched].masked_fill_((items[:most_touched] > place[-1])[:, None], 0)
    grad_weight = grad_weight if is_whole else grad_weight.to(dtype)
    return {"weight": grad_weight} if touched is None else {"weight": grad_weight, "touched": touched}


def _each_or_another(is_touched: Tensor) -> Tensor:
    """Return for every item itself, if it has a gradient, and else one that has; 0 where none has."""
    items = torch.arange(is_touched.shape[0], device=is_touched.device)
    return torch.where(is_touched, items, torch.where(is_touched, items, 0).amax())


def entry_keys(c: Call, lists: Lists | None, statistic: Tensor, span: Range) -> Tensor:
    """Draw the items of a range's entries: of its units' negatives, then of its rows' targets; V where one does not count."""
    x, o, count = c.x, c.o, c.o.num_negatives
    num_pairs = span.num_units * count
    keys = torch.empty(num_pairs + span.last_row - span.first_row, dtype=torch.int32, device=x.hidden.device)
    _launch_keys(
        (span.num_units, cdiv(count, KEY_BLOCK)),
        x.target, x.ids, x.probability, x.seed, x.excluded, x.exclude_offsets, None if lists is None else lists.items, statistic,
        keys, c.num_rows, c.num_items, count, c.num_excluded, o.rows_per_draw, span.rows_per_unit, c.parameter, o.ignore_index,
        span.first_unit, span.first_row, num_pairs, KIND=o.kind, MASK_HITS=o.mask_hits, UNITS_ARE_ROWS=lists is None,
        BLOCK=KEY_BLOCK,
    )  # fmt: skip
    return keys


def _add_entries(
    c: Call, slopes: Slopes, span: Range, keys: Tensor, entries: Tensor, sums: Tensor | None, touched: Tensor | None,
    grad_weight: Tensor, *, adds: bool,
) -> Tensor:  # fmt: skip
    """Add entries to the gradients of their items, `keys`, in ascending order; of places in `touched` if that is given.

    Return where each item's entries begin, and the last one's end.
    """
    x, o, width, num_items = c.x, c.o, c.width, grad_weight.shape[0]
    num_entries = keys.shape[0]
    entry_offsets = keys.new_empty(num_items + 1)
    _launch_offsets((cdiv(num_items + 1, OFFSETS_BLOCK),), keys, entry_offsets, num_items, num_entries, BLOCK=OFFSETS_BLOCK)
    tile = item_configuration(width)
    # Chunks that are not the first of their item, counted as if every item had all its entries in common.
    others, columns = num_entries // CHUNK, cdiv(width, tile.columns)
    first_sums, other_sums = (slopes.share.new_empty(others, width) for _ in range(2))
    by_entry = num_entries < others + num_items
    _launch_items(
        (num_entries if by_entry else others + num_items, columns),
        x.hidden, x.weight, x.log_q, x.sample_weight, *slopes, sums, keys, touched, entries, entry_offsets, first_sums,
        other_sums, grad_weight, num_items, o.num_negatives, c.hidden_stride, c.weight_stride, o.rows_per_draw, c.offset,
        o.scale, o.filter_eps, span.first_row, num_entries, span.num_units * o.num_negatives, *division_by(o.num_negatives),
        KIND=o.kind, LOSS=o.loss, IS_CORRECTED=o.is_corrected, ADDS=adds, BY_ENTRY=by_entry, WIDTH=width, CHUNK=CHUNK,
        BLOCK_E=tile.negatives, BLOCK_D=tile.columns, num_warps=tile.num_warps,
    )  # fmt: skip
    if others:
        _launch_join(
            (others, columns), entry_offsets, first_sums, other_sums, grad_weight, num_items, num_entries, ADDS=adds,
            WIDTH=width, CHUNK=CHUNK, BLOCK_C=JOIN_BLOCK, BLOCK_D=tile.columns,
        )  # fmt: skip
    return entry_offsets
