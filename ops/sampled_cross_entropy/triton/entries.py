"""Launches of the weights' gradient: entries are drawn, sorted by item and added up, one range of rows after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from jagged.ops._shared.launch import Launcher
from jagged.ops._shared.matrices import aligned, inverse_scale_of
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
# Of a number in the gradient of the whole table, or its slices, that ranges share.
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


class Sorted(NamedTuple):
    """A range's entries by item: their items, if they are still there, themselves, and where each item's begin."""

    span: Range
    keys: Tensor | None
    entries: Tensor
    offsets: Tensor


def weight_gradient(c: Call, lists: Lists | None, rows: Rows | None, slopes: Slopes, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the gradient of the weights as wide as the kernels have them; a sparse one is of the items `touched`."""
    x, o, num_rows, width, per_draw = c.x, c.o, c.num_rows, c.width, c.o.rows_per_draw
    device = x.hidden.device
    # Without shared gathers every row is a unit of its own.
    per_unit = rows_of_parts(c) if c.shares else 1
    parts = cdiv(per_draw, per_unit)
    num_units = cdiv(num_rows, per_draw) * parts if c.shares else num_rows
    # Ranges share a gradient of the whole table.
    units = min(num_units, _units_at_once(c, per_unit, TABLE_BYTES * width * c.num_items if o.is_sparse else 0))
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
        offsets = _item_offsets(keys, grad_weight.shape[0])
        _add_entries(c, slopes, Sorted(span, keys, entries, offsets), sums, touched, grad_weight, adds=not is_whole)
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


class Slices:
    """The gradient of some items' weights at a time, by entries of all items that are sorted once. Each row is a unit.

    Args:
        c: of rows that draw for themselves, with weights as they are.
        slopes: of its rows.
        width: of the weights.
        room: bytes of gradients that there are at a time, None for all.
    """

    def __init__(self, c: Call, slopes: Slopes, width: int, room: int | None) -> None:
        self._c, self._slopes, self._width = c, slopes, width
        whole = TABLE_BYTES * c.width * c.num_items
        self._ranges = list(self._sorted(_units_at_once(c, 1, whole if room is None else min(room, whole))))

    def _sorted(self, step: int) -> Iterator[Sorted]:
        c = self._c
        for first in range(0, c.num_rows, step):
            last = min(first + step, c.num_rows)
            span = Range(first, last - first, 1, first, last)
            keys, entries = torch.sort(entry_keys(c, None, self._slopes.statistic, span), stable=True)
            offsets = _item_offsets(keys, c.num_items)
            # An update needs its memory for gradients.
            yield Sorted(span, None, entries.to(torch.int32), offsets)
            del keys, entries

    def gradient(self, first: int, last: int, behind: int) -> Tensor:
        """Return that of the items from `first` to before `last`, `[last - first, width]`, with room for `behind` numbers."""
        c = self._c
        weight = aligned(c.x.weight[first:last])
        of_slice = c._replace(x=c.x._replace(weight=weight), num_items=last - first, weight_stride=weight.stride(0))
        gradient = zeros_with_room(last - first, c.width, cdiv(behind, c.width), torch.float32, weight.device)
        for one in self._ranges:
            of_items = one._replace(offsets=one.offsets[first : last + 1])
            adds = len(self._ranges) > 1
            _add_entries(of_slice, self._slopes, of_items, None, None, gradient, first_item=first, adds=adds)
        return narrowed(gradient, self._width)

    def named(self, first: int, last: int) -> Tensor:
        """Return which of them have entries, `[last - first]` bool."""
        found = torch.zeros(last - first, dtype=torch.bool, device=self._slopes.share.device)
        for one in self._ranges:
            found |= one.offsets[first : last + 1].diff() > 0
        return found


def narrowed(matrix: Tensor, width: int) -> Tensor:
    """Return a matrix of the kernels' width without the columns that only fill it up."""
    return matrix if matrix.shape[1] == width else matrix[:, :width].contiguous()


def _units_at_once(c: Call, per_unit: int, shared_bytes: int) -> int:
    """Return how many units' entries are sorted at once: at least one's.

    `shared_bytes` are of the gradients that all ranges add to: ranges are not worth it for less than these take, while 32 bits
    count the entries.
    """
    count = c.o.num_negatives
    unit_bytes = (count + per_unit) * ENTRY_BYTES + (4 * c.width * count if c.shares else 0)
    most_bytes = max(ENTRY_BYTES_AT_MOST, min(shared_bytes, (2**31 - 1) // (count + per_unit) * unit_bytes))
    return max(1, most_bytes // unit_bytes)


def _item_offsets(keys: Tensor, num_items: int) -> Tensor:
    """Return where each item's entries begin among sorted keys, and where the last one's end."""
    offsets = keys.new_empty(num_items + 1)
    _launch_offsets((cdiv(num_items + 1, OFFSETS_BLOCK),), keys, offsets, num_items, keys.shape[0], BLOCK=OFFSETS_BLOCK)
    return offsets


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
    c: Call, slopes: Slopes, of: Sorted, sums: Tensor | None, touched: Tensor | None, grad_weight: Tensor, *, adds: bool,
    first_item: int = 0,
) -> None:  # fmt: skip
    """Add entries to the gradients of their items, in ascending order; of places in `touched` if that is given.

    Where the call has the weights of some items alone, `first_item` is the first of these, and offsets are theirs.
    """
    x, o, width, num_items = c.x, c.o, c.width, grad_weight.shape[0]
    span, keys, entries, entry_offsets = of
    num_entries = entries.shape[0]
    tile = item_configuration(width)
    # Chunks that are not the first of their item, counted as if every item had all its entries in common.
    others, columns = num_entries // CHUNK, cdiv(width, tile.columns)
    first_sums, other_sums = (slopes.share.new_empty(others, width) for _ in range(2))
    by_entry = keys is not None and num_entries < others + num_items
    _launch_items(
        (num_entries if by_entry else others + num_items, columns),
        x.hidden, x.weight, x.log_q, x.sample_weight, *slopes, sums, keys, touched, entries, entry_offsets, first_sums,
        other_sums, grad_weight, num_items, first_item, o.num_negatives, c.hidden_stride, c.weight_stride, o.rows_per_draw,
        c.offset, o.scale, o.filter_eps, span.first_row, num_entries, span.num_units * o.num_negatives,
        *division_by(o.num_negatives), KIND=o.kind, LOSS=o.loss, IS_CORRECTED=o.is_corrected, ADDS=adds, BY_ENTRY=by_entry,
        ROUNDS=o.casts_weight, WIDTH=width, CHUNK=CHUNK, BLOCK_E=tile.negatives, BLOCK_D=tile.columns, num_warps=tile.num_warps,
    )  # fmt: skip
    if others:
        _launch_join(
            (others, columns), entry_offsets, first_sums, other_sums, grad_weight, num_items, num_entries, ADDS=adds,
            WIDTH=width, CHUNK=CHUNK, BLOCK_C=JOIN_BLOCK, BLOCK_D=tile.columns,
        )  # fmt: skip
