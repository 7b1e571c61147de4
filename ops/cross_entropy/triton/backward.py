"""Backward pass of linear cross-entropy with nothing but the gradients in memory: logits are computed again for each side.

A program owns a block of rows (gradient of hidden) or of items (gradient of weight) and walks the other side; where the blocks
are too few to fill the GPU the walk is split, and the parts' gradients are added in a fixed order.

With a filter a program walks a list of tiles instead (`filter.py`), whose items have places in an order.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged.ops._shared.device import dot, load_tile, logits_of_tiles
from jagged.ops._shared.launch import Launcher
from jagged.ops._shared.matrices import split
from jagged.ops._shared.sizes import cdiv
from jagged.ops.cross_entropy.triton.arguments import Filter, Items, Kept, Rows, constants, tile_for
from jagged.ops.cross_entropy.triton.filter import kept_tiles
from jagged.ops.cross_entropy.triton.logits import load_rows, logit_gradients, logits_of_products

# Programs a launch aims at, by multiprocessor; each part of a gradient is written and read, so fewer than forward's.
PROGRAMS = 2


@triton.jit
def steps_of(counts, block, steps_per_part, num_steps, OWN_BLOCKS: tl.constexpr, PER_TILE: tl.constexpr):
    """Return the first and the last of the steps of a program's part, of all or of those in its block's list."""
    part = tl.program_id(1)
    if counts is not None:
        num_steps = tl.load(counts + block // OWN_BLOCKS) * PER_TILE
        steps_per_part = tl.cdiv(num_steps, tl.num_programs(1))
    first = tl.minimum(part * steps_per_part, num_steps)
    # The sum of the first and the length may pass 2^31.
    return first, first + tl.minimum(steps_per_part, num_steps - first)


@triton.jit
def start_of(step, tiles, list_stride, block, OWN_BLOCKS: tl.constexpr, PER_TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Return where a step begins on the other side."""
    if tiles is not None:
        of_block = tiles + (block // OWN_BLOCKS).to(tl.int64) * list_stride
        step = tl.load(of_block + step // PER_TILE) * PER_TILE + step % PER_TILE
    return step * BLOCK


@triton.jit(do_not_specialize=["num_rows", "num_items", "steps_per_part", "list_stride"])
def linear_cross_entropy_backward_hidden_kernel(
    hidden, target, row_shift, grad_softmax, grad_target, grad_smoothed, inverse_scale, weight, bias, item_scale, smoothing,
    order, tiles, counts, pays, grad_hidden, num_rows, num_items, hidden_stride, weight_stride, list_stride, steps_per_part,
    inverse_temperature, softcap, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
    OWN_BLOCKS: tl.constexpr, PER_TILE: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient of a block of rows from one part of the items: one tile of columns of `grad_hidden[part]`."""
    # Of a gradient that is launched exact and filtered, one of the two is computed.
    if pays is not None and tl.load(pays) == (1 if counts is None else 0):
        return
    ACCURATE: tl.constexpr = hidden.dtype.element_ty == tl.float32
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(1)
    first_column = tl.program_id(2) * BLOCK_D
    row_exists = row < num_rows
    row_target, shift, of_softmax, of_target = load_rows(target, row_shift, grad_softmax, grad_target, row, num_rows)
    if WIDTH <= BLOCK_K:
        hidden_tile = load_tile(hidden, row, hidden_stride, row_exists, 0, WIDTH, BLOCK_D)
    gradient = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    block = tl.program_id(0)
    first, last = steps_of(counts, block, steps_per_part, tl.cdiv(num_items, BLOCK_V), OWN_BLOCKS, PER_TILE)
    for step in range(first, last):
        item = start_of(step, tiles, list_stride, block, OWN_BLOCKS, PER_TILE, BLOCK_V) + tl.arange(0, BLOCK_V)
        exists = item < num_items
        if order is not None:
            item = tl.load(order + item, mask=exists, other=0)
        weight_tile = load_tile(weight, item, weight_stride, exists, first_column, WIDTH, BLOCK_D)
        if WIDTH <= BLOCK_K:
            products = dot(hidden_tile, tl.trans(weight_tile), None, PRECISION)
        else:
            products = logits_of_tiles(
                hidden, row, hidden_stride, row_exists, weight, item, weight_stride, exists, WIDTH, BLOCK_N, BLOCK_V, BLOCK_K,
                PRECISION,
            )  # fmt: skip
        logits = logits_of_products(products, item, exists, bias, item_scale, softcap, 1)
        # Past the last item the exponential of 0 may overflow, where all true logits are far below.
        logits = tl.where(exists[None, :], logits, float("-inf") if softcap is None else -softcap)
        scores = logit_gradients(
            logits, item, exists, row, row_exists, row_target, shift, of_softmax, of_target, grad_smoothed, smoothing, softcap,
            inverse_temperature, ACCURATE,
        )  # fmt: skip
        if item_scale is not None:
            # Of the weights, which are at most 1 then: scores times the scale of a short row would be too large for float16.
            scale = tl.load(item_scale + item, mask=exists, other=0.0)
            weight_tile = (weight_tile.to(tl.float32) * scale[:, None]).to(weight_tile.dtype)
        gradient = dot(scores.to(weight_tile.dtype), weight_tile, gradient, PRECISION)
    column = first_column + tl.arange(0, BLOCK_D)
    address = grad_hidden + (part.to(tl.int64) * num_rows + row)[:, None] * WIDTH + column[None, :]
    if inverse_scale is not None:
        gradient *= tl.load(inverse_scale)
    tl.store(address, gradient.to(grad_hidden.dtype.element_ty), mask=row_exists[:, None] & (column < WIDTH)[None, :])


@triton.jit(do_not_specialize=["num_rows", "num_items", "steps_per_part", "list_stride"])
def linear_cross_entropy_backward_weight_kernel(
    hidden, target, row_shift, grad_softmax, grad_target, grad_smoothed, inverse_scale, weight, bias, item_scale, smoothing,
    order, tiles, counts, pays, grad_weight, grad_bias, num_rows, num_items, hidden_stride, weight_stride, list_stride,
    steps_per_part, inverse_temperature, softcap, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr, OWN_BLOCKS: tl.constexpr, PER_TILE: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient of a block of items from one part of the rows: one tile of columns of `grad_weight[part]`; and `grad_bias[part]`.

    With lists, of the items at a block of places.
    """
    # Of a gradient that is launched exact and filtered, one of the two is computed.
    if pays is not None and tl.load(pays) == (1 if counts is None else 0):
        return
    ACCURATE: tl.constexpr = hidden.dtype.element_ty == tl.float32
    place = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    part = tl.program_id(1)
    first_column = tl.program_id(2) * BLOCK_D
    exists = place < num_items
    # Places past the last item repeat it and are not stored: zeros there could overflow, far above the log-sum-exp.
    source = tl.minimum(place, num_items - 1)
    item = place
    if order is not None:
        source = tl.load(order + source)
        item = tl.where(exists, source, num_items)
    if WIDTH <= BLOCK_K:
        weight_tile = load_tile(weight, source, weight_stride, source >= 0, 0, WIDTH, BLOCK_D)
    gradient = tl.zeros((BLOCK_V, BLOCK_D), tl.float32)
    of_bias = tl.zeros((BLOCK_V,), tl.float32)
    block = tl.program_id(0)
    first, last = steps_of(counts, block, steps_per_part, tl.cdiv(num_rows, BLOCK_N), OWN_BLOCKS, PER_TILE)
    for step in range(first, last):
        row = start_of(step, tiles, list_stride, block, OWN_BLOCKS, PER_TILE, BLOCK_N) + tl.arange(0, BLOCK_N)
        row_exists = row < num_rows
        row_target, shift, of_softmax, of_target = load_rows(target, row_shift, grad_softmax, grad_target, row, num_rows)
        hidden_tile = load_tile(hidden, row, hidden_stride, row_exists, first_column, WIDTH, BLOCK_D)
        if WIDTH <= BLOCK_K:
            products = dot(hidden_tile, tl.trans(weight_tile), None, PRECISION)
        else:
            products = logits_of_tiles(
                hidden, row, hidden_stride, row_exists, weight, source, weight_stride, source >= 0, WIDTH, BLOCK_N, BLOCK_V,
                BLOCK_K, PRECISION,
            )  # fmt: skip
        logits = logits_of_products(products, source, source >= 0, bias, item_scale, softcap, 1)
        scores = logit_gradients(
            logits, item, exists, row, row_exists, row_target, shift, of_softmax, of_target, grad_smoothed, smoothing, softcap,
            inverse_temperature, ACCURATE,
        )  # fmt: skip
        if grad_bias is not None:
            of_bias += tl.sum(scores, 0)
        gradient = dot(tl.trans(scores.to(hidden_tile.dtype)), hidden_tile, gradient, PRECISION)
    if inverse_scale is not None:
        inverse = tl.load(inverse_scale)
        gradient *= inverse
        of_bias *= inverse
    if item_scale is not None:
        gradient *= tl.load(item_scale + source)[:, None]
    column = first_column + tl.arange(0, BLOCK_D)
    stored = part.to(tl.int64) * num_items + item
    tl.store(
        grad_weight + stored[:, None] * WIDTH + column[None, :],
        gradient.to(grad_weight.dtype.element_ty),
        mask=exists[:, None] & (column < WIDTH)[None, :],
    )
    if grad_bias is not None and first_column == 0:
        tl.store(grad_bias + stored, of_bias, mask=exists)


_launch_hidden = Launcher(linear_cross_entropy_backward_hidden_kernel)
_launch_weight = Launcher(linear_cross_entropy_backward_weight_kernel)


def backward_fused(
    rows: Rows, items: Items, filtering: Filter | None, wanted: Mapping[str, torch.dtype], *, on_hopper: bool
) -> dict[str, Tensor]:
    """Return the gradients that are wanted.

    Those with a filter are launched twice, exact and along its tiles, and the device knows which of the two writes them. The
    exact ones come first: if they are the ones, the host launches the rest meanwhile.
    """
    hidden_dtype, weight_dtype, has_bias = wanted.get("hidden"), wanted.get("weight"), "bias" in wanted
    pays = None if filtering is None else filtering.pays
    unless_hidden = None if filtering is None or filtering.of_hidden is None else pays
    unless_weight = None if filtering is None or filtering.of_weight is None else pays
    hidden = weight = bias = None
    if on_hopper:
        from jagged.ops.cross_entropy.hopper.backward import gradient
    if hidden_dtype is not None:
        if on_hopper:
            hidden = gradient(rows, items, hidden_dtype, owns_items=False, unless=unless_hidden)
        else:
            hidden = _grad_hidden(rows, items, None, hidden_dtype, unless_hidden)
    if weight_dtype is not None and on_hopper:
        weight = gradient(rows, items, weight_dtype, owns_items=True, unless=unless_weight)
    elif weight_dtype is not None or has_bias:
        weight, bias = _grad_weight(rows, items, None, weight_dtype, has_bias, unless_weight)
    if filtering is not None:
        of_hidden, of_weight = kept_tiles(rows, items, filtering, on_hopper=on_hopper)
        if of_hidden is not None and hidden_dtype is not None:
            hidden = _grad_hidden(rows, items, of_hidden, hidden_dtype, pays, hidden)
        if of_weight is not None:
            weight, bias = _grad_weight(rows, items, of_weight, weight_dtype, has_bias, pays, (weight, bias))
    found = {"hidden": hidden, "weight": weight, "bias": bias if bias is None else bias.to(wanted["bias"])}
    return {name: found_one for name, found_one in found.items() if found_one is not None and name in wanted}


def _lists(kept: Kept | None, block: int, step: int) -> tuple[tuple[Tensor | None, ...], int, dict[str, int]]:
    """Return order, tiles and counts, the stride of the lists, and how many blocks share one and steps a tile has."""
    if kept is None:
        return (None, None, None), 0, {"OWN_BLOCKS": 1, "PER_TILE": 1}
    sizes = {"OWN_BLOCKS": kept.own // block, "PER_TILE": kept.other // step}
    return (kept.order, kept.tiles, kept.counts), kept.tiles.stride(0), sizes


def _grad_hidden(
    rows: Rows, items: Items, kept: Kept | None, dtype: torch.dtype, pays: Tensor | None, exact: Tensor | None = None
) -> Tensor:
    """Return hidden's gradient; of `kept` tiles it is written over the `exact` one where that `pays`."""
    hidden, weight, (num_rows, width) = rows.hidden, items.weight, rows.hidden.shape
    tile = tile_for("backward_hidden", hidden, is_scaled=items.scale is not None)
    blocks, columns = cdiv(num_rows, tile.rows), cdiv(width, tile.columns)
    num_parts, items_per_part = split(weight.shape[0], tile.items, blocks * columns, PROGRAMS, hidden.device)
    parts = _parts(num_parts, (num_rows, width), hidden, dtype, exact)
    lists, list_stride, sizes = _lists(kept, tile.rows, tile.items)
    _launch_hidden(
        (blocks, num_parts, columns),
        *rows, *items[:4], *lists, pays, parts, num_rows, weight.shape[0], hidden.stride(0), weight.stride(0), list_stride,
        items_per_part // tile.items, 1 / items.temperature, items.softcap, **constants(tile, hidden), **sizes,
        BLOCK_D=tile.columns,
    )  # fmt: skip
    return _join(parts, dtype, pays, exact)


def _grad_weight(
    rows: Rows,
    items: Items,
    kept: Kept | None,
    dtype: torch.dtype | None,
    has_grad_bias: bool,
    pays: Tensor | None,
    exact: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of weight and, in float32, of bias; those of `kept` tiles as `_grad_hidden` does."""
    hidden, weight, (num_items, width) = rows.hidden, items.weight, items.weight.shape
    dtype = dtype or weight.dtype
    tile = tile_for("backward_weight", hidden, is_scaled=items.scale is not None)
    blocks, columns = cdiv(num_items, tile.items), cdiv(width, tile.columns)
    num_parts, rows_per_part = split(hidden.shape[0], tile.rows, blocks * columns, PROGRAMS, hidden.device)
    parts = _parts(num_parts, (num_items, width), weight, dtype, exact[0])
    bias_parts = _parts(num_parts, (num_items,), weight, torch.float32, exact[1]) if has_grad_bias else None
    lists, list_stride, sizes = _lists(kept, tile.items, tile.rows)
    if hidden.shape[0] == 0:
        parts.zero_()
        if bias_parts is not None:
            bias_parts.zero_()
    else:
        _launch_weight(
            (blocks, num_parts, columns),
            *rows, *items[:4], *lists, pays, parts, bias_parts, hidden.shape[0], num_items, hidden.stride(0), weight.stride(0),
            list_stride, rows_per_part // tile.rows, 1 / items.temperature, items.softcap, **constants(tile, hidden), **sizes,
            BLOCK_D=tile.columns,
        )  # fmt: skip
    grad_bias = None if bias_parts is None else _join(bias_parts, torch.float32, pays, exact[1])
    return _join(parts, dtype, pays, exact[0]), grad_bias


def _parts(num_parts: int, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype, exact: Tensor | None) -> Tensor:
    """Return room for the parts of a gradient; that of a single one is the gradient itself, or what it is written over."""
    if num_parts == 1:
        return (like.new_empty(shape, dtype=dtype) if exact is None else exact)[None]
    return like.new_empty(num_parts, *shape, dtype=torch.float32)


def _join(parts: Tensor, dtype: torch.dtype, pays: Tensor | None, exact: Tensor | None) -> Tensor:
    if parts.shape[0] == 1:
        return parts[0]
    joined = parts.sum(0).to(dtype)
    return joined if exact is None or pays is None else torch.where(pays > 0, joined, exact)
