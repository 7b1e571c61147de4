"""Launches for rows that share a draw: the draws' lists, losses, and both sides' products in backward."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from jagged.ops._shared.launch import Launcher
from jagged.ops._shared.matrices import gpu
from jagged.ops._shared.sizes import cdiv
from jagged.ops.sampled_cross_entropy.spec import Outputs
from jagged.ops.sampled_cross_entropy.triton.blocks import (
    sampled_directions_kernel,
    sampled_draw_kernel,
    sampled_forward_blocks_kernel,
    sampled_prepare_kernel,
    sampled_results_kernel,
    sampled_sums_kernel,
)
from jagged.ops.sampled_cross_entropy.triton.call import Call, block_constants, parts_of
from jagged.ops.sampled_cross_entropy.triton.configurations import BlockConfiguration, block_configuration

# From this number of rows that share a draw on, its items' weights are copied side by side before they are multiplied.
GATHERED_ROWS = 1024
# Of those copies, where they only save time.
GATHERED_BYTES_AT_MOST = 1024 * 1024 * 1024
DRAW_BLOCK, RESULT_BLOCK, ROW_BLOCK, ROW_WIDTH = 32, 16, 16, 128
# What a part of a walk costs beside its steps, in steps: forward starts a loop, the others write sums too.
FORWARD_OVERHEAD, GRADIENT_OVERHEAD = 1, 4

_launch_draw = Launcher(sampled_draw_kernel)
_launch_forward = Launcher(sampled_forward_blocks_kernel)
_launch_results = Launcher(sampled_results_kernel)
_launch_prepare = Launcher(sampled_prepare_kernel)
_launch_directions = Launcher(sampled_directions_kernel)
_launch_sums = Launcher(sampled_sums_kernel)


class Lists(NamedTuple):
    """All draws, written out.

    `items` `[draws, ns]` int32, -1 where an id is no item; `corrections` `[draws, ns]` float32, in powers of two where
    `in_powers`; `table` with its rows' stride: the weights, or copies of the draws' items if `is_gathered`.
    """

    items: Tensor
    corrections: Tensor | None
    table: Tensor
    table_stride: int
    is_gathered: bool
    in_powers: bool


class Rows(NamedTuple):
    """What the gradients' products take of rows.

    `clean` `[N, width]` are hidden states with zeros in rows without a loss; `row_target` is int32, -1 in those; `shift` is the
    statistic, in powers of two where the lists are; `part` what a filter multiplies slopes by.
    """

    clean: Tensor
    row_target: Tensor
    shift: Tensor
    part: Tensor | None


def draw_lists(c: Call) -> Lists:
    """Make all draws."""
    x, o, width, dtype = c.x, c.o, c.width, c.x.hidden.dtype
    draws, count = cdiv(c.num_rows, o.rows_per_draw), o.num_negatives
    items = torch.empty(draws, count, dtype=torch.int32, device=x.weight.device)
    saves_time = o.rows_per_draw >= GATHERED_ROWS and draws * count * width * dtype.itemsize <= GATHERED_BYTES_AT_MOST
    # Weights of another dtype than hidden states are converted on the way.
    is_gathered = saves_time or x.weight.dtype != dtype
    gathered = torch.empty(draws * count, width, dtype=dtype, device=x.weight.device) if is_gathered else None
    lists = Lists(
        items,
        torch.empty(draws, count, dtype=torch.float32, device=x.weight.device) if o.is_corrected else None,
        x.weight if gathered is None else gathered,
        c.weight_stride if gathered is None else width,
        is_gathered,
        dtype != torch.float32 and o.loss != "bce",
    )
    _launch_draw(
        (draws, cdiv(count, DRAW_BLOCK)),
        x.weight, x.ids, x.log_q, x.probability, x.seed, items, lists.corrections, gathered, c.num_items, count, c.weight_stride,
        c.parameter, c.offset, KIND=o.kind, IN_POWERS=lists.in_powers, WIDTH=width, BLOCK=DRAW_BLOCK, BLOCK_D=ROW_WIDTH,
    )  # fmt: skip
    return lists


def block_results(c: Call, lists: Lists, out: Outputs) -> None:
    """Fill loss, log-sum-exp, statistic, share and pull of rows."""
    x, o, num_rows, device = c.x, c.o, c.num_rows, c.x.hidden.device
    tile = _tile("forward", c)
    blocks = cdiv(num_rows, o.rows_per_draw) * cdiv(o.rows_per_draw, tile.rows)
    num_parts, places = parts_of(o.num_negatives, tile.negatives, blocks, FORWARD_OVERHEAD, tile.num_warps, device)
    maximum, total = torch.empty(2, num_parts, num_rows, dtype=torch.float32, device=device).unbind()
    # How many negatives are left is asked for only by those who divide by it, and for bce by those that have none.
    counts = o.renormalise or o.loss == "bce"
    kept = torch.empty(num_parts, num_rows, dtype=torch.int32, device=device) if counts else None
    constants = block_constants(tile)
    del constants["BLOCK_D"]
    _launch_forward(
        (blocks, num_parts),
        x.hidden, lists.table, x.target, lists.items, lists.corrections, x.excluded, x.exclude_offsets, maximum, total, kept,
        num_rows, c.num_items, o.num_negatives, c.num_excluded, c.hidden_stride, lists.table_stride, o.rows_per_draw, places,
        o.scale, o.ignore_index, LOSS=o.loss, IN_POWERS=lists.in_powers, MASK_HITS=o.mask_hits, IS_GATHERED=lists.is_gathered,
        WIDTH=c.width, **constants,
    )  # fmt: skip
    _launch_results(
        (cdiv(num_rows, RESULT_BLOCK),),
        x.hidden, x.weight, x.target, x.target_correction, maximum, total, kept, *out[:5], num_rows, c.num_items,
        o.num_negatives, num_parts, c.hidden_stride, c.weight_stride, o.scale, o.positive_weight, o.ignore_index, LOSS=o.loss,
        IN_POWERS=lists.in_powers, IS_INSIDE=o.is_inside, RENORMALISE=o.renormalise, WIDTH=c.width, BLOCK_N=RESULT_BLOCK,
        BLOCK_D=ROW_WIDTH,
    )  # fmt: skip


def prepare_rows(c: Call, lists: Lists, out: Outputs) -> Rows:
    """Prepare rows for `block_directions` and `block_sums`."""
    x, o, num_rows, device = c.x, c.o, c.num_rows, c.x.hidden.device
    rows = Rows(
        torch.empty(num_rows, c.width, dtype=x.hidden.dtype, device=device),
        torch.empty(num_rows, dtype=torch.int32, device=device),
        torch.empty(num_rows, dtype=torch.float32, device=device),
        None if o.filter_eps is None else torch.empty(num_rows, dtype=torch.float32, device=device),
    )
    _launch_prepare(
        (cdiv(num_rows, ROW_BLOCK),),
        x.hidden, x.target, out.statistic, out.share, x.sample_weight, *rows, num_rows, c.num_items, c.hidden_stride,
        o.ignore_index, IN_POWERS=lists.in_powers, WIDTH=c.width, BLOCK_N=ROW_BLOCK, BLOCK_D=ROW_WIDTH,
    )  # fmt: skip
    return rows


def block_directions(c: Call, lists: Lists, rows: Rows) -> Tensor:
    """Return the rows' directions, `[parts, N, width]` float32, to be added."""
    x, o, device = c.x, c.o, c.x.hidden.device
    tile = _tile("directions", c)
    columns = cdiv(c.width, tile.columns)
    blocks = cdiv(c.num_rows, o.rows_per_draw) * cdiv(o.rows_per_draw, tile.rows)
    num_parts, places = parts_of(o.num_negatives, tile.negatives, blocks * columns, GRADIENT_OVERHEAD, tile.num_warps, device)
    directions = torch.empty(num_parts, c.num_rows, c.width, dtype=torch.float32, device=device)
    _launch_directions(
        (blocks, num_parts, columns),
        rows.clean, lists.table, lists.items, lists.corrections, x.excluded, x.exclude_offsets, rows.row_target, rows.shift,
        rows.part, directions, c.num_rows, o.num_negatives, c.num_excluded, lists.table_stride, o.rows_per_draw, places, o.scale,
        o.filter_eps, LOSS=o.loss, MASK_HITS=o.mask_hits, IS_GATHERED=lists.is_gathered, WIDTH=c.width, **block_constants(tile),
    )  # fmt: skip
    return directions


def rows_of_parts(c: Call) -> int:
    """Return how many rows of a draw one program of `block_sums` walks."""
    tile, per_draw = _tile("sums", c), c.o.rows_per_draw
    blocks = cdiv(c.o.num_negatives, tile.negatives) * cdiv(c.width, tile.columns) * cdiv(c.num_rows, per_draw)
    return parts_of(per_draw, tile.rows, blocks, GRADIENT_OVERHEAD, tile.num_warps, c.x.hidden.device)[1]


def block_sums(
    c: Call, lists: Lists, rows: Rows, grad_statistic: Tensor, inverse_scale: Tensor | None, first_unit: int, num_units: int,
    rows_per_unit: int,
) -> Tensor:  # fmt: skip
    """Return what the negatives of each unit get from its rows, `[units * ns, width]`, float32."""
    x, o, count, tile = c.x, c.o, c.o.num_negatives, _tile("sums", c)
    sums = torch.empty(num_units * count, c.width, dtype=torch.float32, device=x.hidden.device)
    _launch_sums(
        (num_units, cdiv(count, tile.negatives), cdiv(c.width, tile.columns)),
        rows.clean, x.weight, lists.items, lists.corrections, x.excluded, x.exclude_offsets, rows.row_target, rows.shift,
        rows.part, grad_statistic, inverse_scale, sums, c.num_rows, count, c.num_excluded, c.weight_stride, o.rows_per_draw,
        rows_per_unit, o.scale, o.filter_eps, first_unit, LOSS=o.loss, MASK_HITS=o.mask_hits, WIDTH=c.width,
        **block_constants(tile),
    )  # fmt: skip
    return sums


def _tile(kernel: str, c: Call) -> BlockConfiguration:
    # Forward leaves nothing out.
    filters = c.o.filter_eps is not None and kernel != "forward"
    hidden, is_plain = c.x.hidden, c.o.loss != "bce" and c.x.excluded is None and not filters
    capability = gpu(hidden.device).capability
    return block_configuration(kernel, c.width, hidden.dtype, capability, c.o.rows_per_draw, is_plain=is_plain)
