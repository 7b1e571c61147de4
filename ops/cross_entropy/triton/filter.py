"""Which tiles a filtered gradient is made of: those where the gradient of some logit reaches a threshold.

Items are taken in the order of the mean row's logits, so that those with weight come together. One walk computes the logits of
all tiles and marks each with its largest gradient. Of the marks come lists, for each block of either side, of the tiles that
count: the kernels of the gradients go along them and never see the others.

On Hopper the walk is that of the forward pass (`hopper/logits.py`), over copies of some items at a time in their order.

Where many tiles count, the walk and the lists cost more than they save. So a sample of the tiles is marked first, and the device
decides by how many of it count: either the marks, the lists and the gradients along them are computed, or the exact gradients
are. What is not to be computed is launched too, and its programs return at once. What is small is exact unasked: there deciding
alone would cost what a filter may not.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged.ops._shared.device import dot, load_tile, logits_of_tiles
from jagged.ops._shared.launch import Launcher
from jagged.ops._shared.matrices import split
from jagged.ops._shared.sizes import cdiv, next_power_of_2
from jagged.ops.cross_entropy.triton.arguments import Filter, Items, Kept, Rows, constants, tile_for
from jagged.ops.cross_entropy.triton.logits import load_rows, logit_gradients, logits_of_products

# Programs of a walk for each multiprocessor.
PROGRAMS = 8
# Marks that a program of the lists reads at once.
BLOCK_MARKS = 1024
# Of the mean row's logits.
BLOCK_ITEMS, BLOCK_COLUMNS = 64, 128
# Of the copy of some items in their order.
COPY_BYTES = 32 * 2**20
# Multiplications of rows with items from which a filter is considered. Of fewer, sorting, a sample and launches that return at
# once would take more than a few hundredths of the exact gradients; what they take of more is in the internals.
LEAST_WORK = 2**39
# The sample: how long blocks of rows and of items are, no program owning more, and of how many of each one is marked.
SAMPLED_ROWS, SAMPLED_ITEMS = 128, 256
ONE_IN_ROWS, ONE_IN_ITEMS = 8, 16


class Costs(NamedTuple):
    """What a filter costs in times of one exact gradient: its marks, and gradients of hidden and weight if it keeps all tiles."""

    marks: float
    hidden: float
    weight: float


# What was measured on Hopper (internals: 0.5, 1.5 and 1.9) and a fifth more: there lists are walked by the kernels for every GPU,
# which take longer than the exact ones. Elsewhere both are the same kernels, and what lists cost is an assumption.
COSTS, COSTS_ON_HOPPER = Costs(0.6, 1.1, 1.1), Costs(0.6, 1.8, 2.3)
# Of the exact gradients' time the filter may be estimated to take.
MARGIN = 0.8


class Marks(NamedTuple):
    """The largest size of a gradient in each tile of `rows` by `items`, infinite for NaN: `[row tiles, item tiles]` float32."""

    largest: Tensor
    rows: int
    items: int


@triton.jit(do_not_specialize=["num_items"])
def linear_cross_entropy_mean_logits_kernel(
    mean, weight, bias, item_scale, logits, num_items, weight_stride, WIDTH: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Logits of one row, a block of items, in one reading of the weights."""
    item = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    exists = item < num_items
    total = tl.zeros((BLOCK_V,), tl.float32)
    for first in tl.static_range(0, WIDTH, BLOCK_D):
        column = first + tl.arange(0, BLOCK_D)
        tile = load_tile(weight, item, weight_stride, exists, first, WIDTH, BLOCK_D)
        total += tl.sum(tile.to(tl.float32) * tl.load(mean + column, mask=column < WIDTH, other=0.0)[None, :], 1)
    if item_scale is not None:
        total *= tl.load(item_scale + item, mask=exists, other=0.0)
    if bias is not None:
        total += tl.load(bias + item, mask=exists, other=0.0)
    tl.store(logits + item, total, mask=exists)


@triton.jit(do_not_specialize=["num_rows", "num_items", "items_per_part"])
def linear_cross_entropy_marks_kernel(
    hidden, target, row_shift, grad_softmax, grad_target, grad_smoothed, weight, bias, item_scale, smoothing, order, pays, marks,
    num_rows, num_items, hidden_stride, weight_stride, items_per_part, inverse_temperature, softcap,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Marks of the tiles of a block of rows and one part of the items; none where a filter does not pay."""
    if pays is not None and tl.load(pays) == 0:
        return
    ACCURATE: tl.constexpr = hidden.dtype.element_ty == tl.float32
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_exists = row < num_rows
    row_target, shift, of_softmax, of_target = load_rows(target, row_shift, grad_softmax, grad_target, row, num_rows)
    if WIDTH <= BLOCK_K:
        hidden_tile = load_tile(hidden, row, hidden_stride, row_exists, 0, WIDTH, BLOCK_K)
    marks += tl.program_id(0).to(tl.int64) * tl.cdiv(num_items, BLOCK_V)
    first = tl.program_id(1) * items_per_part
    # The sum of the first and the length may pass 2^31.
    for start in range(first, first + tl.minimum(items_per_part, num_items - first), BLOCK_V):
        place = start + tl.arange(0, BLOCK_V)
        exists = place < num_items
        item = tl.load(order + place, mask=exists, other=0)
        if WIDTH <= BLOCK_K:
            weight_tile = load_tile(weight, item, weight_stride, exists, 0, WIDTH, BLOCK_K)
            products = dot(hidden_tile, tl.trans(weight_tile), None, PRECISION)
        else:
            products = logits_of_tiles(
                hidden, row, hidden_stride, row_exists, weight, item, weight_stride, exists, WIDTH, BLOCK_N, BLOCK_V, BLOCK_K,
                PRECISION,
            )  # fmt: skip
        logits = logits_of_products(products, item, exists, bias, item_scale, softcap, 1)
        gradients = logit_gradients(
            logits, item, exists, row, row_exists, row_target, shift, of_softmax, of_target, grad_smoothed, smoothing, softcap,
            inverse_temperature, ACCURATE,
        )  # fmt: skip
        sizes = tl.where(gradients == gradients, tl.abs(gradients), float("inf"))
        tl.store(marks + start // BLOCK_V, tl.max(tl.where(exists[None, :], sizes, 0.0), None))


@triton.jit(do_not_specialize=["num_own", "num_other", "own_stride", "other_stride"])
def linear_cross_entropy_kept_tiles_kernel(
    marks, threshold, pays, tiles, counts, num_own, num_other, own_stride, other_stride, OWN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """List, in their order, the tiles of the other side where any of a block's `OWN` tiles has the threshold or more.

    None where a filter does not pay, as there are no marks.
    """
    if pays is not None:
        num_other *= tl.load(pays)
    block = tl.program_id(0)
    tiles += block.to(tl.int64) * num_other
    least = tl.load(threshold)
    count = tl.zeros((), tl.int32)
    for start in range(0, num_other, BLOCK):
        other = start + tl.arange(0, BLOCK)
        largest = tl.zeros((BLOCK,), tl.float32)
        for i in tl.static_range(OWN):
            own = block * OWN + i
            address = marks + own.to(tl.int64) * own_stride + other.to(tl.int64) * other_stride
            largest = tl.maximum(largest, tl.load(address, mask=(other < num_other) & (own < num_own), other=0.0))
        is_kept = ((other < num_other) & ((largest < least) == 0)).to(tl.int32)
        tl.store(tiles + count + tl.cumsum(is_kept, 0) - 1, other, mask=is_kept > 0)
        count += tl.sum(is_kept, 0)
    tl.store(counts + block, count)


_launch_mean_logits = Launcher(linear_cross_entropy_mean_logits_kernel)
_launch_marks = Launcher(linear_cross_entropy_marks_kernel)
_launch_kept_tiles = Launcher(linear_cross_entropy_kept_tiles_kernel)


def filter_of(rows: Rows, items: Items, of_hidden: float | None, of_weight: float | None, *, on_hopper: bool) -> Filter | None:
    """Decide whether the gradients of at least one row are filtered; None where both are exact whatever the logits.

    `of_hidden` and `of_weight` are shares of the largest row's gradient, None for a gradient that is exact or not wanted.
    """
    (num_rows, width), num_items = rows.hidden.shape, len(items.weight)
    if (of_hidden is None and of_weight is None) or num_rows * num_items * width < LEAST_WORK:
        return None
    # In the kernels' units: those of the gradients that they are given.
    highest = rows.grad_softmax.abs().amax()
    hidden_least, weight_least = (None if share is None else highest * share for share in (of_hidden, of_weight))
    filtering = Filter(_order(rows, items), hidden_least, weight_least, None)
    return filtering._replace(pays=_pays(rows, items, filtering, on_hopper=on_hopper))


def kept_tiles(rows: Rows, items: Items, filtering: Filter, *, on_hopper: bool) -> tuple[Kept | None, Kept | None]:
    """Return the tiles of the gradients of hidden and of weight, None for an exact one; none where the filter does not pay."""
    order, pays = filtering.order, filtering.pays
    if on_hopper:
        marks = _marks_on_hopper(rows, items, order, pays)
        _mark_targets(marks, rows, order)
    else:
        marks = _marks(rows, items, order, pays)
    return _kept(marks, rows, items, filtering)


def _pays(rows: Rows, items: Items, filtering: Filter, *, on_hopper: bool) -> Tensor:
    """Decide on the device whether a filter is worth its while, by the tiles that count of evenly spaced ones; `[1]` int32."""
    costs = COSTS_ON_HOPPER if on_hopper else COSTS
    order, num_items = filtering.order, len(filtering.order)
    sampled = _evenly(len(rows.hidden), SAMPLED_ROWS, ONE_IN_ROWS, order.device)
    by_row = {name: of.index_select(0, sampled) for name, of in zip(Rows._fields[:6], rows[:6], strict=True) if of is not None}
    some_rows = rows._replace(**by_row)
    some = filtering._replace(order=order.index_select(0, _evenly(num_items, SAMPLED_ITEMS, ONE_IN_ITEMS, order.device)))
    marks = (_marks_on_hopper if on_hopper else _marks)(some_rows, items, some.order, None)
    kept = _kept(marks, some_rows, items, some)
    # Of each side as much as all its targets keep at most, each a tile of its own: the sample on Hopper does not see them.
    limit, estimate = -costs.marks, None
    for of, cost in zip(kept, costs[1:], strict=True):
        if of is None:
            continue
        limit += MARGIN - cost * min(1.0, SAMPLED_ROWS * SAMPLED_ITEMS / num_items) * on_hopper
        share = of.counts.sum(dtype=torch.float32) * (cost / of.tiles.numel())
        estimate = share if estimate is None else estimate + share
    assert estimate is not None
    return (estimate < limit).to(torch.int32).reshape(1)


def _evenly(count: int, block: int, one_in: int, device: torch.device) -> Tensor:
    """Return the places of one in `one_in` blocks, of at least four where there are so many; all where no block is whole."""
    blocks = count // block
    if blocks == 0:
        return torch.arange(count, device=device)
    step = max(1, min(one_in, blocks // 4))
    first = torch.arange(step // 2, blocks, step, device=device) * block
    return (first[:, None] + torch.arange(block, device=device)).flatten()


def _kept(marks: Marks, rows: Rows, items: Items, filtering: Filter) -> tuple[Kept | None, Kept | None]:
    """Return the tiles of hidden's gradient and of weight's that reach their thresholds, None without one."""
    hidden = weight = None
    if filtering.of_hidden is not None:
        block = tile_for("backward_hidden", rows.hidden, is_scaled=items.scale is not None).rows
        lists = _lists(marks.largest, filtering.of_hidden, filtering.pays, marks.rows, block)
        hidden = Kept(filtering.order, *lists, marks.items)
    if filtering.of_weight is not None:
        block = tile_for("backward_weight", rows.hidden, is_scaled=items.scale is not None).items
        lists = _lists(marks.largest.t(), filtering.of_weight, filtering.pays, marks.items, block)
        weight = Kept(filtering.order, *lists, marks.rows)
    return hidden, weight


def _lists(largest: Tensor, threshold: Tensor, pays: Tensor | None, own: int, block: int) -> tuple[Tensor, Tensor, int]:
    """Return lists of tiles, their lengths, and of how many own rows a block is: those of a mark, or of a program's `block`."""
    marks_of_block = max(1, block // own)
    num_own, num_other = largest.shape
    blocks = cdiv(num_own, marks_of_block)
    tiles = torch.empty(blocks, num_other, dtype=torch.int32, device=largest.device)
    counts = tiles.new_empty(blocks)
    _launch_kept_tiles(
        (blocks,), largest, threshold, pays, tiles, counts, num_own, num_other, *largest.stride(), OWN=marks_of_block,
        BLOCK=BLOCK_MARKS,
    )  # fmt: skip
    return tiles, counts, own * marks_of_block


def _marks(rows: Rows, items: Items, order: Tensor, pays: Tensor | None) -> Marks:
    """Return marks of the tiles of hidden's gradient, of the items in `order`; of any content where a filter does not pay."""
    hidden, weight, num_items = rows.hidden, items.weight, len(order)
    tile = tile_for("backward_hidden", hidden, is_scaled=items.scale is not None)
    blocks = cdiv(hidden.shape[0], tile.rows)
    num_parts, items_per_part = split(num_items, tile.items, blocks, PROGRAMS, hidden.device)
    largest = hidden.new_empty(blocks, cdiv(num_items, tile.items), dtype=torch.float32)
    _launch_marks(
        (blocks, num_parts),
        *rows[:6], *items[:4], order, pays, largest, hidden.shape[0], num_items, hidden.stride(0), weight.stride(0),
        items_per_part, 1 / items.temperature, items.softcap, **constants(tile, hidden),
    )  # fmt: skip
    return Marks(largest, tile.rows, tile.items)


def _marks_on_hopper(rows: Rows, items: Items, order: Tensor, pays: Tensor | None) -> Marks:
    """Return marks of the tiles of forward's walk, as `_marks` does, but without the targets."""
    from jagged.ops.cross_entropy.hopper.copies import copy_in_order
    from jagged.ops.cross_entropy.hopper.logits import GROUP_N, mark_tiles, walk_of

    hidden, weight = rows.hidden, items.weight
    (num_rows, width), num_items = hidden.shape, len(order)
    walk = walk_of(width, marks=True)
    block, step = GROUP_N.value, 2 * walk.items
    num_tiles = 2 * cdiv(num_items, step)
    largest = hidden.new_empty(cdiv(num_rows, block * walk.groups) * walk.groups, num_tiles, dtype=torch.float32)
    most = max(1, COPY_BYTES // (width * weight.element_size() * step)) * step
    copy = weight.new_empty(min(most, num_items), width)
    for first in range(0, num_items, most):
        some = copy[: min(most, num_items - first)]
        copy_in_order(weight, order[first : first + len(some)], pays, some)
        mark_tiles(rows, some, items.temperature, largest[:, first // walk.items :], pays)
    return Marks(largest[: cdiv(num_rows, block), : cdiv(num_items, walk.items)], block, walk.items)


def _mark_targets(marks: Marks, rows: Rows, order: Tensor) -> None:
    """Make the marks of tiles that have a target of their rows infinite."""
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), dtype=order.dtype, device=order.device)
    tile_row = torch.arange(len(rows.target), device=order.device) // marks.rows
    # Rows without a target name the first tile, which counts if any does.
    tile_item = torch.where(rows.target < 0, 0, place[rows.target.clamp(min=0)] // marks.items)
    marks.largest.index_put_((tile_row, tile_item), marks.largest.new_full((), float("inf")))


def _order(rows: Rows, items: Items) -> Tensor:
    """Return the items by falling logit of the mean row, `[V]` int32: those that any row gives weight to come together."""
    mean, weight = rows.hidden.mean(0, dtype=torch.float32), items.weight
    num_items, width = weight.shape
    logits = mean.new_empty(num_items)
    _launch_mean_logits(
        (cdiv(num_items, BLOCK_ITEMS),), mean, weight, items.bias, items.scale, logits, num_items, weight.stride(0), WIDTH=width,
        BLOCK_V=BLOCK_ITEMS, BLOCK_D=min(BLOCK_COLUMNS, next_power_of_2(width)),
    )  # fmt: skip
    return logits.argsort(descending=True, stable=True).to(torch.int32)
