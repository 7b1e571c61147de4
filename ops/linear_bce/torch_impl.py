"""Binary cross-entropy over a dense layer, a chunk of labels at a time: logits, loss or slopes, and products of the slopes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from jagged.ops._shared.label_loss import LossOptions, LossOutputs, loss_dtype, slope_scales
from jagged.ops.linear_bce.spec import Inputs, chunk_of


class Chunk(NamedTuple):
    """Labels side by side: which, their logits `[B, C]` times their signs, and the signs: -1 for positives and 1 for others."""

    labels: slice
    signed: Tensor
    signs: Tensor


def forward(x: Inputs, o: LossOptions) -> LossOutputs:
    """Return the loss."""
    dtype = loss_dtype(x.features.dtype)
    loss, row_weight = x.features.new_zeros((), dtype=dtype), x.row_weight.to(dtype)
    for chunk in _chunks(x):
        terms = torch.nn.functional.logsigmoid(-chunk.signed).neg_().sub_(chunk.signed, alpha=0.5 * o.label_smoothing)
        of_rows = terms.sum(1) if x.label_weight is None else terms @ x.label_weight[chunk.labels].to(dtype)
        # Of rows that do not count, nothing counts, not even what is no number.
        loss += torch.where(row_weight != 0, of_rows, 0) @ row_weight
    return LossOutputs(loss)


def backward(
    grads: LossOutputs, x: Inputs, out: LossOutputs, o: LossOptions, wanted: Mapping[str, torch.dtype]
) -> dict[str, Tensor]:
    """Return the gradients that are wanted, of logits that are computed again."""
    assert grads.loss is not None
    if not (x.features.shape[0] and x.weight.shape[0]):
        return {name: torch.zeros_like(getattr(x, name), dtype=dtype) for name, dtype in wanted.items()}
    features, weight, dtype = x.features, x.weight, loss_dtype(x.features.dtype)
    counts = x.row_weight != 0
    # Features of rows that do not count enter no product, where zero times what is no number would.
    counting = torch.where(counts[:, None], features, 0)
    scale, unscale = slope_scales(features, x.row_weight, x.label_weight, grads.loss)
    row_weight = (x.row_weight.to(dtype) * scale)[:, None]
    found = {name: torch.zeros_like(getattr(x, name), dtype=dtype if name == "features" else wanted[name]) for name in wanted}
    # Of weights' sums as many bytes as of logits.
    rows = chunk_of(features.shape[1], weight.shape[0], torch.finfo(dtype).bits // 8)
    for chunk in _chunks(x):
        slopes = torch.sigmoid(chunk.signed).sub_(0.5 * o.label_smoothing).mul_(chunk.signs).mul_(row_weight)
        if x.label_weight is not None:
            slopes *= x.label_weight[chunk.labels].to(dtype)
        slopes = torch.where(counts[:, None], slopes, 0)
        if "bias" in found:
            found["bias"][chunk.labels] = slopes.sum(0) * unscale
        slopes = slopes.to(features.dtype)
        if "weight" in found:
            # Sums have more bits than the gradient: in pieces, of which the memory is small.
            for piece, of_piece in zip(found["weight"][chunk.labels].split(rows), slopes.t().split(rows), strict=True):
                piece.copy_(_product(of_piece, counting, dtype).mul_(unscale))
        if "features" in found:
            found["features"] += _product(slopes, weight[chunk.labels], dtype)
    if "features" in found:
        found["features"] = (found["features"] * unscale).to(wanted["features"])
    return found


def _chunks(x: Inputs) -> Iterator[Chunk]:
    """Yield the labels in chunks of equal size, but for the last."""
    dtype = loss_dtype(x.features.dtype)
    num_labels, batch_size = x.weight.shape[0], x.features.shape[0]
    if not (num_labels and batch_size):
        return
    size = chunk_of(batch_size, num_labels, torch.finfo(dtype).bits // 8)
    for first in range(0, num_labels, size):
        labels = slice(first, min(first + size, num_labels))
        logits = _product(x.features, x.weight[labels].t(), dtype)
        if x.bias is not None:
            logits += x.bias[labels].to(dtype)
        # A positive of another chunk goes to a column to spare, so that nothing waits for their count.
        count = labels.stop - labels.start
        signs = logits.new_ones(batch_size, count + 1)
        column = torch.where((x.positives >= labels.start) & (x.positives < labels.stop), x.positives - labels.start, count)
        signs.index_put_((x.rows, column), signs.new_full((), -1.0))
        signs = signs[:, :count]
        yield Chunk(labels, logits.mul_(signs), signs)


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `left @ right`, of which nothing is rounded to fewer bits than sums have."""
    if left.dtype == dtype:
        return left @ right
    return torch.mm(left, right, out_dtype=dtype) if left.is_cuda else left.to(dtype) @ right.to(dtype)
