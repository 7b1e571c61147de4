"""Sampled linear cross-entropy in plain PyTorch: gathered rows and logits of a few draws at a time, products by the BLAS."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from jagged.ops._shared.offsets import sample_of_row
from jagged.ops._shared.sizes import cdiv
from jagged.ops.sampled_cross_entropy.draws import Source, draw_ids, log_probability
from jagged.ops.sampled_cross_entropy.spec import (
    Inputs,
    Options,
    Outputs,
    Pairs,
    PairsInputs,
    inputs_of,
    loss_dtype,
    num_touched,
)
from jagged.ops.sampled_cross_entropy.touched import compacted, is_first_of_item

# Of the gathered rows and of the logits of one step, each: they stay in the processor's cache.
CHUNK_BYTES = 4 * 1024 * 1024


class Chunk(NamedTuple):
    """Some negatives of some draws: rows `[draws, R, D]`, items `[draws, places, D]`, logits `[draws, R, places]`."""

    rows: slice
    hidden: Tensor
    ids: Tensor
    items: Tensor
    logits: Tensor


def forward(x: Inputs, o: Options) -> Outputs:
    """Compute losses, and what backward needs of them."""
    target, is_bce = x.target, o.loss == "bce"
    known = _known(x, o)
    rows = _prepare(x.hidden, known)
    maximum = rows.new_full(target.shape, -torch.inf)
    total, kept = torch.zeros_like(maximum), torch.zeros_like(maximum)
    direction = torch.zeros_like(rows) if o.with_direction else rows.new_empty(0)
    for chunk in _chunks(rows, x, o):
        span = chunk.rows
        kept[span] += _flat((chunk.logits != -torch.inf).sum(2), span)
        if is_bce:
            total[span] += _flat(_softplus(chunk.logits).sum(2), span)
            if o.with_direction:
                direction[span] += _flat(chunk.logits.sigmoid() @ chunk.items, span)
            continue
        highest = torch.maximum(maximum[span], _flat(chunk.logits.amax(2), span))
        # A row of -inf alone has no maximum to subtract.
        shift = highest.masked_fill(highest == -torch.inf, 0)
        weights = chunk.logits.sub_(_blocks(shift, chunk.logits.shape[:2])[:, :, None]).exp_()
        rescale = (maximum[span] - shift).exp_()
        total[span] = total[span] * rescale + _flat(weights.sum(2), span)
        maximum[span] = highest
        if o.with_direction:
            direction[span] = direction[span] * rescale[:, None] + _flat(weights @ chunk.items, span)
    if not is_bce:
        if o.with_direction:
            direction /= total.masked_fill(total == 0, 1)[:, None]
        total = total.log_().add_(maximum.masked_fill(maximum == -torch.inf, 0))
    item = torch.where(known, target, 0).to(torch.int64)
    logit = (rows * x.weight[item].to(rows.dtype)).sum(1) * o.scale
    return Outputs(*_row_results(o, total, kept, logit, x.target_correction, known, target != o.ignore_index), direction)


def _row_results(
    o: Options, total: Tensor, kept: Tensor, logit: Tensor, correction: Tensor | None, known: Tensor, valid: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    has_negatives = known & (kept > 0)
    if o.loss == "bce":
        loss = total + o.positive_weight * _softplus(-logit)
        lse = torch.zeros_like(loss)
        share, pull = torch.ones_like(loss), -o.positive_weight * torch.sigmoid(-logit)
    else:
        if correction is not None:
            logit = logit - correction
        negatives = total + (o.num_negatives / kept).log() if o.renormalise else total
        # Without a negative the denominator is the positive alone.
        lse = torch.where(has_negatives, negatives, logit)
        if o.is_inside:
            lse = torch.where(has_negatives, torch.logaddexp(negatives, logit), logit)
        difference = torch.where(has_negatives, negatives - logit, -torch.inf)
        share = torch.sigmoid(difference)
        if o.loss == "refined":
            loss = torch.where(has_negatives, share * difference, 0)
        elif o.is_inside:
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


def backward(grads: Outputs, x: Inputs, out: Outputs, o: Options, wanted: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
    """Compute gradients; negatives are drawn again.

    Where weight's is sparse it has `num_touched` rows, and `touched` says of which items: the drawn ones and the targets, in
    ascending order, and what is left repeats the last of them with zeros.
    """
    statistic, share = out.statistic, out.share
    known = _known(x, o)
    rows = _prepare(x.hidden, known)
    item = torch.where(known, x.target, 0).to(torch.int64)
    # A log-sum-exp may be all that has a gradient.
    grad_loss = torch.zeros_like(share) if grads.losses is None else grads.losses
    grad_logit, grad_statistic = _slopes_of_rows(grad_loss, grads.lse, statistic, share, out.pull, known, o)
    part = share if x.sample_weight is None else share * x.sample_weight.abs()
    direction = out.direction if o.filter_eps is None else torch.zeros_like(rows)
    found = {}
    grad_weight, items = None, item.new_empty(0)
    if "weight" in wanted:
        num_grads = x.weight.shape[0]
        if o.is_sparse:
            num_grads = num_touched(x, o)
            items = found["touched"] = _touched(x, o, known, item, num_grads)
        # An item that is drawn often is a long sum, one entry after the other: too long for float32.
        grad_weight = torch.zeros(num_grads, x.weight.shape[1], dtype=torch.float64, device=x.weight.device)
    if grad_weight is not None or o.filter_eps is not None:
        for chunk in _chunks(rows, x, o):
            shape = chunk.logits.shape[:2]
            weights = _slopes(chunk, statistic, part, o)
            if o.filter_eps is not None:
                direction[chunk.rows] += _flat(weights @ chunk.items, chunk.rows)
            if grad_weight is not None:
                weights.mul_(_blocks(grad_statistic[chunk.rows], shape)[:, :, None])
                _add_rows(
                    grad_weight, _places(chunk.ids.flatten(), items), (weights.transpose(1, 2) @ chunk.hidden).flatten(0, 1)
                )
    if grad_weight is not None:
        _add_rows(grad_weight, _places(item, items), grad_logit[:, None] * rows)
        found["weight"] = grad_weight.to(wanted["weight"])
    if "hidden" in wanted:
        grad_hidden = grad_statistic[:, None] * direction
        grad_hidden.addcmul_(grad_logit[:, None], x.weight[item].to(rows.dtype))
        found["hidden"] = grad_hidden.to(wanted["hidden"])
    return found


def pairs(x: PairsInputs, o: Options) -> Pairs:
    """Compute the weights' gradient in factors; negatives are drawn again."""
    given = inputs_of(x)
    known = _known(given, o)
    rows = _prepare(x.hidden, known)
    grad_logit, grad_statistic = _slopes_of_rows(x.grad_losses, x.grad_lse, x.statistic, x.share, x.pull, known, o)
    part = x.share if x.sample_weight is None else x.share * x.sample_weight.abs()
    items = torch.full((x.target.shape[0], o.num_negatives + 1), -1, dtype=torch.int32, device=rows.device)
    factors = rows.new_zeros(items.shape)
    first = 0
    for chunk in _chunks(rows, given, o):
        span, shape = chunk.rows, chunk.logits.shape
        first = 0 if first == o.num_negatives else first
        places = slice(first, first + shape[2])
        # A row without a gradient of its negatives names none.
        counts = (chunk.logits > -torch.inf) & _blocks(x.statistic[span] < torch.inf, shape)[:, :, None]
        items[span, places] = _flat(torch.where(counts, chunk.ids[:, None, :], -1), span).to(torch.int32)
        weights = _slopes(chunk, x.statistic, part, o) * _blocks(grad_statistic[span], shape)[:, :, None]
        factors[span, places] = _flat(weights.masked_fill_(~counts, 0), span)
        first += shape[2]
    items[:, -1] = torch.where(known, x.target, -1)
    factors[:, -1] = grad_logit
    return Pairs(items, factors)


class Slices:
    """The gradient of some items' weights at a time, by pairs of all items that are sorted once; waits for the device.

    Room behind, and how much there may be at a time, are the kernels'.
    """

    def __init__(self, x: PairsInputs, o: Options, _room: int | None) -> None:
        found = pairs(x, o)
        items, order = found.items.flatten().sort(stable=True)
        # Only these stay: the row and the factor of each pair, by item, and where items begin.
        self._rows = (order // found.items.shape[1]).to(torch.int32)
        self._factors = found.factors.flatten()[order]
        num_items, self._width = x.weight.shape
        self._begins = torch.searchsorted(items, torch.arange(num_items + 1, dtype=items.dtype, device=items.device))
        self._hidden = _prepare(x.hidden, _known(inputs_of(x), o))

    def gradient(self, first: int, last: int, _behind: int) -> Tensor:
        """Return that of the items from `first` to before `last`, `[last - first, D]`."""
        hidden, device, step = self._hidden, self._hidden.device, max(1, CHUNK_BYTES // (8 * self._width))
        gradient = torch.empty(last - first, self._width, dtype=hidden.dtype, device=device)
        for begin in range(first, last, step):
            end = min(begin + step, last)
            # As in a whole gradient float32 is too short for long sums.
            of_some = torch.zeros(end - begin, self._width, dtype=torch.float64, device=device)
            start, stop = int(self._begins[begin]), int(self._begins[end])
            counts = self._begins[begin : end + 1].diff()
            places = torch.arange(end - begin, device=device).repeat_interleave(counts, output_size=stop - start)
            for pair in range(start, stop, step):
                some = slice(pair, min(pair + step, stop))
                of_places = places[some.start - start : some.stop - start]
                _add_rows(of_some, of_places, self._factors[some, None] * hidden[self._rows[some].long()])
            gradient[begin - first : end - first] = of_some
        return gradient

    def named(self, first: int, last: int) -> Tensor:
        """Return which of them have pairs, `[last - first]` bool."""
        return self._begins[first : last + 1].diff() > 0


def _slopes_of_rows(
    grad_loss: Tensor, grad_lse: Tensor | None, statistic: Tensor, share: Tensor, pull: Tensor, known: Tensor, o: Options
) -> tuple[Tensor, Tensor]:
    """Return the gradients of rows' target logits and statistics, times the scale."""
    grad_logit, grad_statistic = grad_loss * pull, grad_loss * share
    if grad_lse is not None:
        through = share if o.is_inside else (statistic < torch.inf).to(share.dtype)
        grad_logit, grad_statistic = grad_logit + grad_lse * (1 - through), grad_statistic + grad_lse * through
    return torch.where(known, grad_logit * o.scale, 0), torch.where(known, grad_statistic * o.scale, 0)


def _slopes(chunk: Chunk, statistic: Tensor, part: Tensor, o: Options) -> Tensor:
    """Return the derivatives of rows' statistics by the logits of a chunk, in whose place they stand."""
    shape = chunk.logits.shape[:2]
    if o.loss == "bce":
        weights = chunk.logits.sigmoid_()
    else:
        weights = chunk.logits.sub_(_blocks(statistic[chunk.rows], shape)[:, :, None]).exp_()
    if o.filter_eps is not None:
        weights.masked_fill_(weights * _blocks(part[chunk.rows], shape)[:, :, None] < o.filter_eps, 0)
    return weights


def _touched(x: Inputs, o: Options, known: Tensor, item: Tensor, count: int) -> Tensor:
    """Return `count` items in ascending order: those that rows draw and their targets, and the last of these again."""
    per_draw, num_items, device = o.rows_per_draw, x.weight.shape[0], item.device
    draws = cdiv(item.shape[0], per_draw)
    ids = draw_ids(_source(x, o), torch.arange(draws, device=device), torch.arange(o.num_negatives, device=device), num_items)
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


def _source(x: Inputs, o: Options) -> Source:
    return Source(x.ids, x.log_q, x.probability, x.seed, o.kind, o.num_negatives, o.rows_per_draw)


def _known(x: Inputs, o: Options) -> Tensor:
    """Tell which rows have a target."""
    return (x.target >= 0) & (x.target < x.weight.shape[0]) & (x.target != o.ignore_index)


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


def _chunks(rows: Tensor, x: Inputs, o: Options) -> Iterator[Chunk]:
    """Yield the negatives of all rows with their logits: times the scale, corrected, -inf where a negative does not count."""
    (num_rows, width), num_items = rows.shape, x.weight.shape[0]
    per_draw, source = o.rows_per_draw, _source(x, o)
    draws = cdiv(num_rows, per_draw)
    elements = CHUNK_BYTES // rows.element_size()
    places_step = min(o.num_negatives, max(1, elements // max(per_draw, width)))
    draws_step = max(1, elements // (max(per_draw, width) * places_step))
    members = None
    if x.excluded is not None and x.exclude_offsets is not None:
        members = _members(x.excluded, x.exclude_offsets, num_rows, num_items)
    for first_draw in range(0, draws, draws_step):
        last_draw = min(first_draw + draws_step, draws)
        span = slice(first_draw * per_draw, min(last_draw * per_draw, num_rows))
        shape = (last_draw - first_draw, per_draw)
        hidden, targets = _blocks(rows[span], shape), _blocks(x.target[span], shape)
        groups = torch.arange(first_draw, last_draw, device=rows.device)
        for first in range(0, o.num_negatives, places_step):
            places = torch.arange(first, min(first + places_step, o.num_negatives), device=rows.device)
            ids = draw_ids(source, groups, places, num_items)
            outside = (ids < 0) | (ids >= num_items)
            ids = ids.masked_fill(outside, 0)
            items = x.weight[ids]
            if o.casts_weight:
                # A table that is not cast as a whole: its rows have been, where the losses were computed.
                items = items.to(x.hidden.dtype)
            items = items.to(rows.dtype).masked_fill_(outside[..., None], 0)
            logits = torch.bmm(hidden, items.transpose(1, 2)).mul_(o.scale)
            if o.is_corrected:
                log_q = log_probability(source, ids, groups, places, num_items, rows.dtype)
                logits.sub_((log_q + math.log(o.num_negatives)).expand(ids.shape)[:, None, :])
            hidden_negatives = outside[:, None, :]
            if o.mask_hits:
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
