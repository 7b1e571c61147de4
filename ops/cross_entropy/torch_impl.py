"""Linear cross-entropy in plain PyTorch: tiles of logits in one bounded buffer, matrix products by the BLAS."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# A tile of logits stays in the processor's cache between the passes over it.
TILE_BYTES = 8 * 1024 * 1024
TILE_ROWS = 2048


@torch.no_grad()
def linear_cross_entropy_forward(hidden: Tensor, weight: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exp and the target's logit of each row, `[N]` both, 0 in ignored rows."""
    with torch.autocast(hidden.device.type, enabled=False):
        valid = target != ignore_index
        rows = _prepare(hidden, valid)
        maximum = rows.new_full(target.shape, -torch.inf)
        total = rows.new_zeros(target.shape)
        target_logit = torch.full_like(total, torch.nan)
        for items, row_tiles, buffer in _tiles(rows, weight):
            part = weight[items].to(rows.dtype)
            for tile in row_tiles:
                logits = _logits(rows[tile], part, buffer)
                column, inside = _column_of_target(target[tile], items)
                picked = logits.gather(1, column).squeeze(1)
                target_logit[tile] = torch.where(inside, picked, target_logit[tile])
                highest = torch.maximum(maximum[tile], logits.amax(1))
                # A row of -inf alone has no maximum to subtract.
                shift = highest.masked_fill(highest == -torch.inf, 0)
                added = logits.sub_(shift[:, None]).exp_().sum(1)
                total[tile] = total[tile] * (maximum[tile] - shift).exp_() + added
                maximum[tile] = highest
        lse = total.log_().add_(maximum.masked_fill(maximum == -torch.inf, 0))
        return lse.masked_fill_(~valid, 0), target_logit.masked_fill_(~valid, 0)


@torch.no_grad()
def linear_cross_entropy_backward(
    grad_loss: Tensor,
    grad_lse: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    lse: Tensor,
    ignore_index: int,
    hidden_grad_dtype: torch.dtype | None,
    weight_grad_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of hidden and weight, empty where no dtype asks for one; the logits are computed again."""
    with torch.autocast(hidden.device.type, enabled=False):
        valid = target != ignore_index
        rows = _prepare(hidden, valid)
        grad_target = grad_loss.masked_fill(~valid, 0)
        grad_softmax = grad_target if grad_lse is None else (grad_loss + grad_lse).masked_fill_(~valid, 0)
        grad_hidden = torch.zeros_like(rows) if hidden_grad_dtype else hidden.new_empty(0)
        grad_weight = hidden.new_empty(weight.shape if weight_grad_dtype else 0, dtype=weight_grad_dtype)
        for items, row_tiles, buffer in _tiles(rows, weight):
            part = weight[items].to(rows.dtype)
            grad_part = torch.zeros_like(part) if weight_grad_dtype else None
            for tile in row_tiles:
                scores = _logits(rows[tile], part, buffer).sub_(lse[tile, None]).exp_().mul_(grad_softmax[tile, None])
                column, inside = _column_of_target(target[tile], items)
                scores.scatter_(1, column, scores.gather(1, column).sub_((grad_target[tile] * inside)[:, None]))
                if hidden_grad_dtype:
                    grad_hidden[tile].addmm_(scores, part)
                if grad_part is not None:
                    grad_part.addmm_(scores.t(), rows[tile])
            if grad_part is not None:
                grad_weight[items] = grad_part
        if hidden_grad_dtype:
            grad_hidden = grad_hidden.to(hidden_grad_dtype)
        return grad_hidden, grad_weight


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


def _logits(rows: Tensor, part: Tensor, buffer: Tensor) -> Tensor:
    shape = (rows.shape[0], part.shape[0])
    return torch.mm(rows, part.t(), out=buffer[: shape[0] * shape[1]].view(shape))


def _column_of_target(target: Tensor, items: slice) -> tuple[Tensor, Tensor]:
    """Return the column `[rows, 1]` of each target among the items, held inside, and whether it truly is there."""
    column = target.to(torch.int64) - items.start
    inside = (column >= 0) & (column < items.stop - items.start)
    return column.clamp_(0, items.stop - items.start - 1)[:, None], inside
