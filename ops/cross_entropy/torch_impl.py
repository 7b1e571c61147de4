"""Linear cross-entropy in plain PyTorch: tiles of logits in one bounded buffer, matrix products by the BLAS."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from jagged.ops.cross_entropy.norms import less_radial
from jagged.ops.cross_entropy.spec import Gradient, GradientInputs, Inputs, Options, Outputs, gradient_by

# A tile of logits stays in the processor's cache between the passes over it.
TILE_BYTES = 8 * 1024 * 1024
TILE_ROWS = 2048


def forward(x: Inputs, o: Options) -> Outputs:
    """Take the items tile by tile into each row's maximum and sum of exponentials relative to it."""
    target, smoothing = x.target, x.smoothing
    valid = target != o.ignore_index
    rows = _prepare(x.hidden, valid)
    maximum = rows.new_full(target.shape, -torch.inf)
    total = rows.new_zeros(target.shape)
    smoothed = rows.new_zeros(target.shape if smoothing is not None else 0)
    target_logit = torch.full_like(total, torch.nan)
    for items, row_tiles, buffer in _tiles(rows, x.weight):
        part, part_bias = _items(x, items, rows.dtype)
        for tile in row_tiles:
            logits = _logits(rows[tile], part, part_bias, o.softcap, buffer).div_(o.temperature)
            column, inside = _column_of_target(target[tile], items)
            picked = logits.gather(1, column).squeeze(1)
            target_logit[tile] = torch.where(inside, picked, target_logit[tile])
            if smoothing is not None:
                smoothed[tile] += logits @ smoothing[items]
            highest = torch.maximum(maximum[tile], logits.amax(1))
            # A row of -inf alone has no maximum to subtract.
            shift = highest.masked_fill(highest == -torch.inf, 0)
            added = logits.sub_(shift[:, None]).exp_().sum(1)
            total[tile] = total[tile] * (maximum[tile] - shift).exp_() + added
            maximum[tile] = highest
    lse = total.log_().add_(maximum.masked_fill(maximum == -torch.inf, 0))
    if smoothing is not None:
        smoothed.masked_fill_(~valid, 0)
    return Outputs(lse.masked_fill_(~valid, 0), target_logit.masked_fill_(~valid, 0), smoothed)


def backward(grads: Outputs, x: Inputs, out: Outputs, o: Options, wanted: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
    """Return the gradients that are wanted; the logits are computed again.

    Exact whatever the filter: here nothing is saved by leaving tiles out. The buffer is of one size.
    """
    target, smoothing, item_scale = x.target, x.smoothing, x.item_scale
    valid = target != o.ignore_index
    rows = _prepare(x.hidden, valid)
    of_softmax, of_target, of_smoothed = (
        torch.zeros_like(out.lse) if grad is None or not len(grad) else grad.masked_fill(~valid, 0).div_(o.temperature)
        for grad in grads
    )
    found = {}
    if "hidden" in wanted:
        grad_hidden = torch.zeros_like(rows)
    if "weight" in wanted:
        found["weight"] = torch.empty(x.weight.shape, dtype=wanted["weight"], device=x.weight.device)
    if "bias" in wanted:
        grad_bias = rows.new_zeros(x.weight.shape[0])
    # In ignored rows the exponentials are then 0, whatever a bias makes of their logits.
    shift = out.lse.masked_fill(~valid, torch.inf)
    for items, row_tiles, buffer in _tiles(rows, x.weight):
        part, part_bias = _items(x, items, rows.dtype)
        grad_part = torch.zeros_like(part) if "weight" in wanted else None
        for tile in row_tiles:
            logits, slope = _logits(rows[tile], part, part_bias, None, buffer), None
            if o.softcap is not None:
                # Of the tanh itself: near 1 one more rounding is much of what is left.
                slope = 1 - logits.div_(o.softcap).tanh_().square()
                logits.mul_(o.softcap)
            scores = logits.div_(o.temperature).sub_(shift[tile, None]).exp_().mul_(of_softmax[tile, None])
            column, inside = _column_of_target(target[tile], items)
            scores.scatter_add_(1, column, (of_target[tile] * inside)[:, None])
            if smoothing is not None:
                scores.addr_(of_smoothed[tile], smoothing[items])
            if slope is not None:
                scores.mul_(slope)
            if "bias" in wanted:
                grad_bias[items] += scores.sum(0)
            if "hidden" in wanted:
                grad_hidden[tile].addmm_(scores, part)
            if grad_part is not None:
                grad_part.addmm_(scores.t(), rows[tile])
        if grad_part is not None:
            found["weight"][items] = grad_part if item_scale is None else grad_part.mul_(item_scale[items, None])
    if item_scale is not None and "weight" in wanted:
        less_radial(found["weight"], x.weight, item_scale)
    if "hidden" in wanted:
        found["hidden"] = grad_hidden.to(wanted["hidden"])
    if "bias" in wanted:
        found["bias"] = grad_bias.to(wanted["bias"])
    return found


def weight_gradient(x: GradientInputs, o: Options) -> Gradient:
    """Return the gradient of the weights alone."""
    return gradient_by(backward, x, o)


def _items(x: Inputs, items: slice, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Return the weights of a range of items at their scale, and their biases, in the dtype of the arithmetic."""
    part = x.weight[items].to(dtype)
    if x.item_scale is not None:
        part = part * x.item_scale[items, None]
    return part, None if x.bias is None else x.bias[items].to(dtype)


def _prepare(hidden: Tensor, valid: Tensor) -> Tensor:
    """Hidden states in the dtype of the arithmetic, zeros in ignored rows, whatever stands there."""
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    return torch.where(valid[:, None], hidden, 0).to(dtype)


def _tiles(rows: Tensor, weight: Tensor) -> Iterator[tuple[slice, list[slice], Tensor]]:
    """Yield each range of items with the ranges of rows and a buffer for the logits of one range by the other."""
    num_rows, num_items = rows.shape[0], weight.shape[0]
    tile_rows = max(1, min(num_rows, TILE_ROWS))
    tile_items = max(1, min(num_items, TILE_BYTES // (rows.element_size() * tile_rows)))
    buffer = rows.new_empty(tile_rows * tile_items)
    row_tiles = [slice(start, min(start + tile_rows, num_rows)) for start in range(0, num_rows, tile_rows)]
    for start in range(0, num_items, tile_items):
        yield slice(start, min(start + tile_items, num_items)), row_tiles, buffer


def _logits(rows: Tensor, part: Tensor, part_bias: Tensor | None, softcap: float | None, buffer: Tensor) -> Tensor:
    """Logits before the temperature."""
    shape = (rows.shape[0], part.shape[0])
    logits = torch.mm(rows, part.t(), out=buffer[: shape[0] * shape[1]].view(shape))
    if part_bias is not None:
        logits.add_(part_bias)
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def _column_of_target(target: Tensor, items: slice) -> tuple[Tensor, Tensor]:
    """Return the column `[rows, 1]` of each target among the items, held inside, and whether it truly is there."""
    column = target.to(torch.int64) - items.start
    inside = (column >= 0) & (column < items.stop - items.start)
    return column.clamp_(0, items.stop - items.start - 1)[:, None], inside
