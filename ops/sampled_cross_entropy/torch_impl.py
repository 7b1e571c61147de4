"""Sampled linear cross-entropy in plain PyTorch: gathered rows and logits of a few draws at a time, products by the BLAS."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from jagged.ops._shared.offsets import sample_of_row
from jagged.ops._shared.sizes import cdiv
from jagged.ops.sampled_cross_entropy.draws import Source, draw_ids, log_probability
from jagged.ops.sampled_cross_entropy.touched import compacted, is_first_of_item

# Of the gathered rows and of the logits of one step, each: they stay in the processor's cache.
CHUNK_BYTES = 4 * 1024 * 1024


class Rules(NamedTuple):
    """What is computed, as both implementations take it from the operators.

    `loss` is "softmax", "refined" or "bce"; `is_corrected` subtracts log(ns q) from the negatives; `is_inside` has the positive
    in the denominator; `positive_weight` is bce's beta.
    """

    loss: str
    is_corrected: bool
    is_inside: bool
    mask_hits: bool
    renormalise: bool
    scale: float
    positive_weight: float
    ignore_index: int


class Chunk(NamedTuple):
    """Some negatives of some draws: rows `[draws, R, D]`, items `[draws, places, D]`, logits `[draws, R, places]`."""

    rows: slice
    hidden: Tensor
    ids: Tensor
    items: Tensor
    logits: Tensor


@torch.no_grad()
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
    """Return loss, log-sum-exp, statistic, share and pull of each row, `[N]`, and its direction, `[N, D]` or empty.

    The statistic is the log-sum-exp of the row's negatives, or for bce their sum of softplus; infinity where a row has no
    gradient from negatives. Share and pull are the derivatives of the loss by the statistic and by the positive's logit. The
    direction is the derivative of the statistic by the hidden state, without the scale.
    """
    source = Source(ids, log_q, probability, seed, kind, count, rows_per_draw)
    rules = Rules(loss, is_corrected, is_inside, mask_hits, renormalise, scale, positive_weight, ignore_index)
    is_bce = loss == "bce"
    with torch.autocast(hidden.device.type, enabled=False):
        known = (target >= 0) & (target < weight.shape[0]) & (target != ignore_index)
        rows = _prepare(hidden, known)
        maximum = rows.new_full(target.shape, -torch.inf)
        total, kept = torch.zeros_like(maximum), torch.zeros_like(maximum)
        direction = torch.zeros_like(rows) if with_direction else rows.new_empty(0)
        for chunk in _chunks(rows, weight, target, source, rules, excluded, exclude_offsets):
            span = chunk.rows
            kept[span] += _flat((chunk.logits != -torch.inf).sum(2), span)
            if is_bce:
                total[span] += _flat(_softplus(chunk.logits).sum(2), span)
                if with_direction:
                    direction[span] += _flat(chunk.logits.sigmoid() @ chunk.items, span)
                continue
            highest = torch.maximum(maximum[span], _flat(chunk.logits.amax(2), span))
            # A row of -inf alone has no maximum to subtract.
            shift = highest.masked_fill(highest == -torch.inf, 0)
            weights = chunk.logits.sub_(_blocks(shift, chunk.logits.shape[:2])[:, :, None]).exp_()
            rescale = (maximum[span] - shift).exp_()
            total[span] = total[span] * rescale + _flat(weights.sum(2), span)
            maximum[span] = highest
            if with_direction:
                direction[span] = direction[span] * rescale[:, None] + _flat(weights @ chunk.items, span)
        if not is_bce:
            if with_direction:
                direction /= total.masked_fill(total == 0, 1)[:, None]
            total = total.log_().add_(maximum.masked_fill(maximum == -torch.inf, 0))
        item = torch.where(known, target, 0).to(torch.int64)
        logit = (rows * weight[item].to(rows.dtype)).sum(1) * scale
        outputs = _row_results(rules, total, kept, logit, target_correction, known, target != ignore_index, count)
        return *outputs, direction


def _row_results(
    rules: Rules, total: Tensor, kept: Tensor, logit: Tensor, correction: Tensor | None, known: Tensor, valid: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    has_negatives = known & (kept > 0)
    if rules.loss == "bce":
        loss = total + rules.positive_weight * _softplus(-logit)
        lse = torch.zeros_like(loss)
        share, pull = torch.ones_like(loss), -rules.positive_weight * torch.sigmoid(-logit)
    else:
        if correction is not None:
            logit = logit - correction
        negatives = total + (count / kept).log() if rules.renormalise else total
        # Without a negative the denominator is the positive alone.
        lse = torch.where(has_negatives, negatives, logit)
        if rules.is_inside:
            lse = torch.where(has_negatives, torch.logaddexp(negatives, logit), logit)
        difference = torch.where(has_negatives, negatives - logit, -torch.inf)
        share = torch.sigmoid(difference)
        if rules.loss == "refined":
            loss = torch.where(has_negatives, share * difference, 0)
        elif rules.is_inside:
            loss = _softplus(difference)
        else:
            loss, share = torch.where(has_negatives, difference, 0), has_negatives.to(loss_dtype(logit.dtype))
        pull = -share
    # An item that does not exist has no logit; NaN says so in the loss.
    missing = torch.where(valid, torch.nan, 0.0).to(loss.dtype)
    loss, lse = (torch.where(known, x, missing) for x in (loss, lse))
    statistic = torch.where(has_negatives, total, torch.inf)
    return loss, lse, statistic, share * known, torch.where(known, pull, 0)


def _softplus(x: Tensor) -> Tensor:
    # PyTorch's own threshold, 20, is for float32.
    return F.softplus(x, threshold=40.0)


def loss_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of losses and accumulators."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@torch.no_grad()
def sampled_linear_cross_entropy_backward(
    grad_loss: Tensor,
    grad_lse: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    ids: Tensor | None,
    log_q: Tensor | None,
    probability: Tensor | None,
    seed: Tensor | None,
    excluded: Tensor | None,
    exclude_offsets: Tensor | None,
    statistic: Tensor,
    share: Tensor,
    pull: Tensor,
    direction: Tensor,
    sample_weight: Tensor | None,
    kind: str,
    count: int,
    rows_per_draw: int,
    loss: str,
    is_corrected: bool,
    is_inside: bool,
    mask_hits: bool,
    scale: float,
    ignore_index: int,
    filter_eps: float | None,
    hidden_grad_dtype: torch.dtype | None,
    weight_grad_dtype: torch.dtype | None,
    num_touched: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of hidden and weight, empty where no dtype asks for one; negatives are drawn again.

    With `num_touched` weight's has that many rows, and the last result says of which items: the drawn ones and the targets,
    in ascending order, and what is left repeats the last of them with zeros.
    """
    source = Source(ids, log_q, probability, seed, kind, count, rows_per_draw)
    rules = Rules(loss, is_corrected, is_inside, mask_hits, False, scale, 1.0, ignore_index)
    with torch.autocast(hidden.device.type, enabled=False):
        known = (target >= 0) & (target < weight.shape[0]) & (target != ignore_index)
        rows = _prepare(hidden, known)
        item = torch.where(known, target, 0).to(torch.int64)
        grad_logit, grad_statistic = grad_loss * pull, grad_loss * share
        if grad_lse is not None:
            through = share if is_inside else (statistic < torch.inf).to(share.dtype)
            grad_logit, grad_statistic = grad_logit + grad_lse * (1 - through), grad_statistic + grad_lse * through
        grad_logit, grad_statistic = (torch.where(known, x * scale, 0) for x in (grad_logit, grad_statistic))
        part = share if sample_weight is None else share * sample_weight.abs()
        # An item that is drawn often is a long sum, one entry after the other: too long for float32.
        grad_weight, items = None, item.new_empty(0, dtype=torch.int64)
        if weight_grad_dtype and num_touched is not None:
            items = _touched(source, known, item, weight.shape[0], num_touched)
        if weight_grad_dtype:
            shape = weight.shape if num_touched is None else (num_touched, weight.shape[1])
            grad_weight = torch.zeros(shape, dtype=torch.float64, device=weight.device)
        if filter_eps is not None:
            direction = torch.zeros_like(rows)
        if grad_weight is not None or filter_eps is not None:
            for chunk in _chunks(rows, weight, target, source, rules, excluded, exclude_offsets):
                shape = chunk.logits.shape[:2]
                if loss == "bce":
                    weights = chunk.logits.sigmoid_()
                else:
                    weights = chunk.logits.sub_(_blocks(statistic[chunk.rows], shape)[:, :, None]).exp_()
                if filter_eps is not None:
                    weights.masked_fill_(weights * _blocks(part[chunk.rows], shape)[:, :, None] < filter_eps, 0)
                    direction[chunk.rows] += _flat(weights @ chunk.items, chunk.rows)
                if grad_weight is not None:
                    weights.mul_(_blocks(grad_statistic[chunk.rows], shape)[:, :, None])
                    _add_rows(
                        grad_weight, _places(chunk.ids.flatten(), items), (weights.transpose(1, 2) @ chunk.hidden).flatten(0, 1)
                    )
        if grad_weight is not None:
            _add_rows(grad_weight, _places(item, items), grad_logit[:, None] * rows)
        grad_hidden = rows.new_empty(0)
        if hidden_grad_dtype:
            grad_hidden = grad_statistic[:, None] * direction
            grad_hidden.addcmul_(grad_logit[:, None], weight[item].to(rows.dtype))
        empty = hidden.new_empty(0)
        return (
            grad_hidden.to(hidden_grad_dtype) if hidden_grad_dtype else empty,
            empty if grad_weight is None else grad_weight.to(weight_grad_dtype),
            items,
        )


def _touched(source: Source, known: Tensor, item: Tensor, num_items: int, count: int) -> Tensor:
    """Return `count` items in ascending order: those that rows draw and their targets, and the last of these again."""
    per_draw, device = source.rows_per_draw, item.device
    draws = cdiv(item.shape[0], per_draw)
    ids = draw_ids(source, torch.arange(draws, device=device), torch.arange(source.num_negatives, device=device), num_items)
    is_live = _blocks(known, (draws, per_draw)).any(1)
    counts = is_live[:, None] & (ids >= 0) & (ids < num_items)
    keys = torch.cat([torch.where(counts, ids, num_items).flatten(), torch.where(known, item, num_items)]).sort().values
    return compacted(keys, is_first_of_item(keys, num_items), count)[0]


def _places(ids: Tensor, items: Tensor) -> Tensor:
    """Return where ids stand among the items of a sparse gradient, and themselves if there are none."""
    # Ids that are not there count for nothing and add zeros.
    return torch.searchsorted(items, ids).clamp_(max=items.shape[0] - 1) if items.shape[0] else ids


def _add_rows(matrix: Tensor, index: Tensor, rows: Tensor) -> None:
    rows = rows.to(matrix.dtype)
    # On a GPU index_add_ adds in any order, and index_put_ sorts first.
    if matrix.is_cuda:
        matrix.index_put_((index,), rows, accumulate=True)
    else:
        matrix.index_add_(0, index, rows)


def _prepare(hidden: Tensor, known: Tensor) -> Tensor:
    """Hidden states in the dtype of the arithmetic, zeros in rows without a loss, whatever stands there."""
    return torch.where(known[:, None], hidden, 0).to(loss_dtype(hidden.dtype))


def _blocks(x: Tensor, shape: tuple[int, ...] | torch.Size) -> Tensor:
    """Rows as `[draws, R, ...]`, with zeros past the last."""
    missing = shape[0] * shape[1] - x.shape[0]
    if missing:
        x = torch.cat([x, x.new_zeros(missing, *x.shape[1:])])
    return x.view(*shape[:2], *x.shape[1:])


def _flat(blocks: Tensor, rows: slice) -> Tensor:
    return blocks.flatten(0, 1)[: rows.stop - rows.start]


def _chunks(
    rows: Tensor,
    weight: Tensor,
    target: Tensor,
    source: Source,
    rules: Rules,
    excluded: Tensor | None,
    exclude_offsets: Tensor | None,
) -> Iterator[Chunk]:
    """Yield the negatives of all rows with their logits: times the scale, corrected, -inf where a negative does not count."""
    (num_rows, width), num_items = rows.shape, weight.shape[0]
    per_draw = source.rows_per_draw
    draws = cdiv(num_rows, per_draw)
    elements = CHUNK_BYTES // rows.element_size()
    places_step = min(source.num_negatives, max(1, elements // max(per_draw, width)))
    draws_step = max(1, elements // (max(per_draw, width) * places_step))
    members = None if excluded is None or exclude_offsets is None else _members(excluded, exclude_offsets, num_rows, num_items)
    for first_draw in range(0, draws, draws_step):
        last_draw = min(first_draw + draws_step, draws)
        span = slice(first_draw * per_draw, min(last_draw * per_draw, num_rows))
        shape = (last_draw - first_draw, per_draw)
        hidden, targets = _blocks(rows[span], shape), _blocks(target[span], shape)
        groups = torch.arange(first_draw, last_draw, device=rows.device)
        for first in range(0, source.num_negatives, places_step):
            places = torch.arange(first, min(first + places_step, source.num_negatives), device=rows.device)
            ids = draw_ids(source, groups, places, num_items)
            outside = (ids < 0) | (ids >= num_items)
            ids = ids.masked_fill(outside, 0)
            items = weight[ids].to(rows.dtype).masked_fill_(outside[..., None], 0)
            logits = torch.bmm(hidden, items.transpose(1, 2)).mul_(rules.scale)
            if rules.is_corrected:
                log_q = log_probability(source, ids, groups, places, num_items, rows.dtype)
                logits.sub_((log_q + math.log(source.num_negatives)).expand(ids.shape)[:, None, :])
            hidden_negatives = outside[:, None, :]
            if rules.mask_hits:
                hidden_negatives = hidden_negatives | (ids[:, None, :] == targets[:, :, None])
            if members is not None:
                row = groups[:, None, None] * per_draw + torch.arange(per_draw, device=rows.device)[:, None]
                # Rows past the last belong to no list.
                key = row.clamp(max=num_rows) * num_items + ids[:, None, :]
                hidden_negatives = hidden_negatives | (members[torch.searchsorted(members, key)] == key)
            yield Chunk(span, hidden, ids, items, logits.masked_fill_(hidden_negatives, -torch.inf))


def _members(excluded: Tensor, offsets: Tensor, num_rows: int, num_items: int) -> Tensor:
    """Return a sorted number for each pair of a row and an item of its list, and one past the last."""
    excluded = excluded.to(torch.int64)
    rows = sample_of_row(offsets, excluded.shape[0])
    inside = (excluded >= 0) & (excluded < num_items)
    inside &= _covered(offsets, excluded.shape[0])
    past = (num_rows + 1) * num_items
    keys = torch.where(inside, rows * num_items + excluded, past)
    return torch.cat([keys, keys.new_full((1,), past)]).sort().values


def _covered(offsets: Tensor, total: int) -> Tensor:
    place = torch.arange(total, device=offsets.device)
    return (place >= offsets[0]) & (place < offsets[-1])
