"""Forward of sampled cross-entropy: rows that draw for themselves gather theirs, rows that share a draw share what is gathered.

Beside the loss a row keeps the sum of its negatives' weights times their slopes, so that the gradient of the hidden states
gathers nothing again.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged.ops._shared.device import dot, exp_of_difference, load_tile, logits_of_tiles, rounded_product
from jagged.ops._shared.matrices import aligned, float32_products, gpu
from jagged.ops._shared.sizes import cdiv
from jagged.ops.sampled_cross_entropy.draws import Source, feistel_bits, log_uniform_scale
from jagged.ops.sampled_cross_entropy.negatives import (
    draw_for_row,
    draw_items,
    is_in_lists,
    load_target,
    log_expected,
    rows_of_unit,
    slope,
    softplus,
    store_results,
)
from jagged.ops.sampled_cross_entropy.tiles import SHARED_ROWS, BlockTile, RowTile, block_tile_of, row_tile_of

# Sizes and numbers that vary from call to call, of all kernels.
VARYING = [
    "num_rows", "num_items", "num_negatives", "num_excluded", "rows_per_draw", "rows_per_unit", "parameter", "ignore_index",
    "first_unit", "first_row", "num_entries", "num_pairs",
]  # fmt: skip


@triton.jit(do_not_specialize=VARYING)
def sampled_forward_rows_kernel(
    hidden, weight, target, ids, log_q, probability, seed, target_correction, excluded, exclude_offsets, sample_weight,
    loss, lse, statistic, share, pull, direction, num_rows, num_items, num_negatives, num_excluded, hidden_stride,
    weight_stride, rows_per_draw, parameter, offset, scale, positive_weight, ignore_index, filter_eps,
    KIND: tl.constexpr, LOSS: tl.constexpr, IS_CORRECTED: tl.constexpr, IS_INSIDE: tl.constexpr, MASK_HITS: tl.constexpr,
    RENORMALISE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One row: its loss and one tile of columns of its direction. With `filter_eps` the filtered direction alone.

    Every lane of a tile of negatives keeps a maximum and sums of its own, so that only the products are reduced in the loop.
    """
    ACCURATE: tl.constexpr = hidden.dtype.element_ty == tl.float32
    IS_BCE: tl.constexpr = LOSS == "bce"
    FILTERS: tl.constexpr = filter_eps is not None
    row = tl.program_id(0)
    first_column = tl.program_id(1) * BLOCK_D
    group = row // rows_per_draw
    row_target, valid = load_target(target, row, row >= 0, num_items, ignore_index)
    known = row_target >= 0
    column = tl.arange(0, BLOCK_D)
    row_hidden = hidden + row.to(tl.int64) * hidden_stride
    if WIDTH <= BLOCK_D:
        hidden_tile = tl.load(row_hidden + column, mask=known & (column < WIDTH), other=0.0).to(tl.float32)
    if FILTERS:
        row_statistic = tl.load(statistic + row)
        part = tl.load(share + row)
        if sample_weight is not None:
            part *= tl.abs(tl.load(sample_weight + row))
    maximum = tl.full((BLOCK_J,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_J,), tl.float32)
    kept = tl.zeros((BLOCK_J,), tl.int32)
    gradient = tl.zeros((BLOCK_J, BLOCK_D), tl.float32)
    place = tl.arange(0, BLOCK_J)
    item, exists = draw_for_row(
        ids, probability, seed, excluded, exclude_offsets, group, place, row, row_target, num_negatives, num_items, num_excluded,
        parameter, KIND, MASK_HITS,
    )  # fmt: skip
    if WIDTH <= BLOCK_D:
        weight_tile = load_tile(weight, item, weight_stride, exists, 0, WIDTH, BLOCK_D)
    # A row without a loss gathers nothing.
    for start in range(0, tl.where(known, num_negatives, 0), BLOCK_J):
        # The next tile is drawn and on its way while this one is used; loops that draw are not pipelined by the compiler.
        next_place = start + BLOCK_J + tl.arange(0, BLOCK_J)
        next_item, next_exists = draw_for_row(
            ids, probability, seed, excluded, exclude_offsets, group, next_place, row, row_target, num_negatives, num_items,
            num_excluded, parameter, KIND, MASK_HITS,
        )  # fmt: skip
        if WIDTH <= BLOCK_D:
            next_tile = load_tile(weight, next_item, weight_stride, next_exists, 0, WIDTH, BLOCK_D)
            values = weight_tile.to(tl.float32)
            logits = tl.sum(rounded_product(values, hidden_tile[None, :]), 1)
        else:
            logits = tl.zeros((BLOCK_J,), tl.float32)
            for step in range(0, WIDTH, BLOCK_D):
                hidden_tile = tl.load(row_hidden + step + column, mask=step + column < WIDTH, other=0.0).to(tl.float32)
                tile = load_tile(weight, item, weight_stride, exists, step, WIDTH, BLOCK_D)
                logits += tl.sum(rounded_product(tile, hidden_tile[None, :]), 1)
            if direction is not None:
                values = load_tile(weight, item, weight_stride, exists, first_column, WIDTH, BLOCK_D).to(tl.float32)
        logits *= scale
        if IS_CORRECTED:
            logits -= log_expected(log_q, item, group, place, exists, num_negatives, offset, KIND)
        logits = tl.where(exists, logits, float("-inf"))
        kept += exists.to(tl.int32)
        if FILTERS:
            weights = slope(logits, row_statistic, IS_BCE, ACCURATE)
            weights = tl.where(weights * part < filter_eps, 0.0, weights)
        elif IS_BCE:
            total += tl.where(exists, softplus(logits), 0.0)
            weights = slope(logits, 0.0, IS_BCE, ACCURATE)
        else:
            highest = tl.maximum(maximum, logits)
            # A lane of -inf alone has no maximum to subtract.
            shift = tl.where(highest == float("-inf"), 0.0, highest)
            rescale = exp_of_difference(maximum - shift, ACCURATE)
            weights = exp_of_difference(logits - shift, ACCURATE)
            total = total * rescale + weights
            maximum = highest
            if direction is not None:
                gradient *= rescale[:, None]
        if direction is not None:
            gradient += weights[:, None] * values
        place, item, exists = next_place, next_item, next_exists
        if WIDTH <= BLOCK_D:
            weight_tile = next_tile
    if LOSS == "bce" or FILTERS:
        lanes = tl.full((BLOCK_J,), 1.0, tl.float32)
        row_total = tl.sum(total, 0)
        inverse = 1.0
    else:
        highest = tl.max(maximum, 0)
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        lanes = exp_of_difference(maximum - shift, ACCURATE)
        row_total = tl.sum(rounded_product(total, lanes), 0)
        # Without a negative the gradient is zero as it stands.
        row_total = tl.where(row_total == 0, 1.0, row_total)
        inverse = 1.0 / row_total
        row_total = shift + tl.log(row_total)
    if direction is not None:
        place = direction + row.to(tl.int64) * WIDTH + first_column + column
        tl.store(place, tl.sum(rounded_product(gradient, lanes[:, None]), 0) * inverse, mask=first_column + column < WIDTH)
    if not FILTERS and tl.program_id(1) == 0:
        logit = 0.0
        source = weight + tl.maximum(row_target, 0).to(tl.int64) * weight_stride
        for step in range(0, WIDTH, BLOCK_D):
            mask = known & (step + column < WIDTH)
            hidden_tile = tl.load(row_hidden + step + column, mask=mask, other=0.0).to(tl.float32)
            logit += tl.sum(rounded_product(hidden_tile, tl.load(source + step + column, mask=mask, other=0.0)), 0)
        store_results(
            loss, lse, statistic, share, pull, row, row >= 0, valid, known, row_total, tl.sum(kept, 0), logit * scale,
            target_correction, num_negatives, positive_weight, LOSS, IS_INSIDE, RENORMALISE,
        )  # fmt: skip


@triton.jit(do_not_specialize=VARYING)
def sampled_forward_blocks_kernel(
    hidden, weight, target, ids, log_q, probability, seed, target_correction, excluded, exclude_offsets, sample_weight,
    loss, lse, statistic, share, pull, direction, num_rows, num_items, num_negatives, num_excluded, hidden_stride,
    weight_stride, rows_per_draw, parameter, offset, scale, positive_weight, ignore_index, filter_eps,
    KIND: tl.constexpr, LOSS: tl.constexpr, IS_CORRECTED: tl.constexpr, IS_INSIDE: tl.constexpr, MASK_HITS: tl.constexpr,
    RENORMALISE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of rows of one draw, as `sampled_forward_rows_kernel` does one row: products of matrices over gathered items."""
    ACCURATE: tl.constexpr = hidden.dtype.element_ty == tl.float32
    IS_BCE: tl.constexpr = LOSS == "bce"
    FILTERS: tl.constexpr = filter_eps is not None
    group, first, last = rows_of_unit(tl.program_id(0), rows_per_draw, BLOCK_N, num_rows)
    first_column = tl.program_id(1) * BLOCK_D
    row = first + tl.arange(0, BLOCK_N)
    in_unit = row < last
    row_target, valid = load_target(target, row, in_unit, num_items, ignore_index)
    known = row_target >= 0
    if WIDTH <= BLOCK_K:
        hidden_tile = load_tile(hidden, row, hidden_stride, known, 0, WIDTH, BLOCK_K)
    if FILTERS:
        row_statistic = tl.load(statistic + row, mask=in_unit, other=float("inf"))
        part = tl.load(share + row, mask=in_unit, other=0.0)
        if sample_weight is not None:
            part *= tl.abs(tl.load(sample_weight + row, mask=in_unit, other=0.0))
    maximum = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_N,), tl.float32)
    kept = tl.zeros((BLOCK_N,), tl.int32)
    gradient = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for start in range(0, tl.where(tl.max(row_target, 0) >= 0, num_negatives, 0), BLOCK_J):
        place = start + tl.arange(0, BLOCK_J)
        item, item_exists = draw_items(
            ids, probability, seed, group, place, place < num_negatives, num_negatives, num_items, parameter, KIND
        )
        if WIDTH <= BLOCK_K:
            weight_tile = load_tile(weight, item, weight_stride, item_exists, 0, WIDTH, BLOCK_K)
            logits = dot(hidden_tile, tl.trans(weight_tile), None, PRECISION)
        else:
            logits = logits_of_tiles(
                hidden, row, hidden_stride, known, weight, item, weight_stride, item_exists, WIDTH, BLOCK_N, BLOCK_J, BLOCK_K,
                PRECISION,
            )  # fmt: skip
            if direction is not None:
                weight_tile = load_tile(weight, item, weight_stride, item_exists, first_column, WIDTH, BLOCK_D)
        logits *= scale
        if IS_CORRECTED:
            logits -= log_expected(log_q, item, group, place, item_exists, num_negatives, offset, KIND)[None, :]
        exists = item_exists[None, :] & known[:, None]
        if MASK_HITS:
            exists &= item[None, :] != row_target[:, None]
        if excluded is not None:
            exists &= ~is_in_lists(item[None, :], excluded, exclude_offsets, row[:, None], in_unit[:, None], num_excluded)
        logits = tl.where(exists, logits, float("-inf"))
        kept += tl.sum(exists.to(tl.int32), 1)
        if FILTERS:
            weights = slope(logits, row_statistic[:, None], IS_BCE, ACCURATE)
            weights = tl.where(weights * part[:, None] < filter_eps, 0.0, weights)
        elif IS_BCE:
            total += tl.sum(tl.where(exists, softplus(logits), 0.0), 1)
            weights = slope(logits, 0.0, IS_BCE, ACCURATE)
        else:
            highest = tl.maximum(maximum, tl.max(logits, 1))
            # A row of -inf alone has no maximum to subtract.
            shift = tl.where(highest == float("-inf"), 0.0, highest)
            rescale = exp_of_difference(maximum - shift, ACCURATE)
            weights = exp_of_difference(logits - shift[:, None], ACCURATE)
            total = total * rescale + tl.sum(weights, 1)
            maximum = highest
            if direction is not None:
                gradient *= rescale[:, None]
        if direction is not None:
            gradient = dot(weights.to(weight_tile.dtype), weight_tile, gradient, PRECISION)
    if not IS_BCE and not FILTERS:
        # Without a negative the gradient is zero as it stands.
        total = tl.where(total == 0, 1.0, total)
        if direction is not None:
            gradient *= (1.0 / total)[:, None]
        total = tl.where(maximum == float("-inf"), 0.0, maximum) + tl.log(total)
    if direction is not None:
        column = first_column + tl.arange(0, BLOCK_D)
        address = direction + row.to(tl.int64)[:, None] * WIDTH + column[None, :]
        tl.store(address, gradient, mask=in_unit[:, None] & (column < WIDTH)[None, :])
    if not FILTERS and tl.program_id(1) == 0:
        logit = tl.zeros((BLOCK_N,), tl.float32)
        for step in range(0, WIDTH, BLOCK_K):
            tile = load_tile(hidden, row, hidden_stride, known, step, WIDTH, BLOCK_K)
            logit += tl.sum(rounded_product(tile, load_tile(weight, row_target, weight_stride, known, step, WIDTH, BLOCK_K)), 1)
        store_results(
            loss, lse, statistic, share, pull, row, in_unit, valid, known, total, kept, logit * scale, target_correction,
            num_negatives, positive_weight, LOSS, IS_INSIDE, RENORMALISE,
        )  # fmt: skip


def sampled_linear_cross_entropy_forward(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    ids: Tensor | None,
    log_q: Tensor | None,
    probability: Tensor | None,
    seed: Tensor | None,
    target_correction: Tensor | None,
    excluded: Tensor | None,
    exclude_offsets: Tensor | None,
    kind: str,
    count: int,
    rows_per_draw: int,
    loss: str,
    is_corrected: bool,
    is_inside: bool,
    mask_hits: bool,
    renormalise: bool,
    scale: float,
    positive_weight: float,
    ignore_index: int,
    with_direction: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return what the PyTorch implementation returns, in float32."""
    num_rows, width = hidden.shape
    outputs = [hidden.new_empty(num_rows, dtype=torch.float32) for _ in range(5)]
    row_loss, lse, statistic, share, pull = outputs
    direction = hidden.new_empty(hidden.shape if with_direction else 0, dtype=torch.float32)
    if num_rows == 0:
        return row_loss, lse, statistic, share, pull, direction
    source = Source(ids, log_q, probability, seed, kind, count, rows_per_draw)
    call = call_of(hidden, weight, target, source, excluded, exclude_offsets, scale, ignore_index, is_corrected, mask_hits, loss)
    wide = direction if width == call["WIDTH"] or not with_direction else direction.new_empty(num_rows, call["WIDTH"])
    launch_rows(
        call, target_correction=target_correction, sample_weight=None, outputs=outputs,
        direction=wide if with_direction else None, positive_weight=positive_weight, filter_eps=None,
        IS_INSIDE=is_inside, RENORMALISE=renormalise,
    )  # fmt: skip
    if with_direction:
        direction = wide[:, :width].contiguous()
    return row_loss, lse, statistic, share, pull, direction


def call_of(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    source: Source,
    excluded: Tensor | None,
    exclude_offsets: Tensor | None,
    scale: float,
    ignore_index: int,
    is_corrected: bool,
    mask_hits: bool,
    loss: str,
) -> dict[str, Any]:
    """Return the arguments that all kernels have in common, by name."""
    hidden, weight = aligned(hidden), aligned(weight)
    num_items, count = weight.shape[0], source.num_negatives
    # What the logarithms of all negatives' expected counts have in common.
    offset = math.log(count)
    if source.kind == "log_uniform":
        offset -= math.log(math.log1p(num_items))
    elif source.log_q is None:
        offset -= math.log(num_items)
    tensors = {
        "target": target, "ids": source.ids, "log_q": source.log_q, "probability": source.probability, "seed": source.seed,
        "excluded": excluded, "exclude_offsets": exclude_offsets,
    }  # fmt: skip
    return {
        **{name: None if tensor is None else tensor.contiguous() for name, tensor in tensors.items()},
        "hidden": hidden, "weight": weight, "num_rows": hidden.shape[0], "num_items": num_items, "num_negatives": count,
        "num_excluded": 0 if excluded is None else excluded.shape[0], "hidden_stride": hidden.stride(0),
        "weight_stride": weight.stride(0), "rows_per_draw": source.rows_per_draw, "offset": offset,
        "parameter": parameter_of(source.kind, num_items),
        "scale": scale, "ignore_index": ignore_index, "KIND": source.kind, "LOSS": loss, "IS_CORRECTED": is_corrected,
        "MASK_HITS": mask_hits, "WIDTH": hidden.shape[1],
    }  # fmt: skip


def parameter_of(kind: str, num_items: int) -> int:
    """Return the number of the catalogue that a kind of draws needs in kernels."""
    parameters = {"log_uniform": log_uniform_scale, "permuted": feistel_bits}
    return parameters[kind](num_items) if kind in parameters else 0


def launch_rows(call: dict[str, Any], *, outputs: list[Tensor], direction: Tensor | None, **others: Any) -> None:
    """Launch the forward kernel for rows that draw for themselves, or for blocks of rows that share a draw."""
    hidden, width, per_draw = call["hidden"], call["WIDTH"], call["rows_per_draw"]
    names = ("loss", "lse", "statistic", "share", "pull")
    arguments = {**call, **dict(zip(names, outputs, strict=True)), "direction": direction, **others}
    tile: RowTile | BlockTile
    if shares_gathers(per_draw):
        tile = block_tile_of(width, hidden.dtype, gpu(hidden.device).capability, per_draw)
        units = cdiv(call["num_rows"], per_draw) * cdiv(per_draw, tile.rows)
        columns = 1 if direction is None else cdiv(width, tile.columns)
        launch(sampled_forward_blocks_kernel, (units, columns), arguments, **block_constants(tile))
    else:
        tile = row_tile_of(width, hidden.dtype)
        columns = 1 if direction is None else cdiv(width, tile.columns)
        launch(
            sampled_forward_rows_kernel, (call["num_rows"], columns), arguments, BLOCK_J=tile.negatives, BLOCK_D=tile.columns,
            num_warps=tile.num_warps,
        )  # fmt: skip


def launch(kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any], **constants: Any) -> None:
    """Launch a kernel with those of the arguments that it has."""
    names = set(kernel.arg_names) - constants.keys()
    kernel[grid](**{name: arguments[name] for name in names}, **constants)


def shares_gathers(rows_per_draw: int) -> bool:
    """Tell whether so many rows share a draw that their logits are products of matrices."""
    return rows_per_draw >= SHARED_ROWS


def block_constants(tile: BlockTile) -> dict[str, Any]:
    """Return a tile as the kernels for shared draws take it."""
    return {
        "BLOCK_N": tile.rows, "BLOCK_J": tile.negatives, "BLOCK_D": tile.columns, "BLOCK_K": tile.step,
        "PRECISION": float32_products(),
        "num_warps": tile.num_warps, "num_stages": tile.num_stages,
    }  # fmt: skip
