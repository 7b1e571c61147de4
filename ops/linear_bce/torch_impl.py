"""Binary cross-entropy over a dense layer, a chunk of labels at a time: logits, loss or slopes, and products of the slopes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from jagged.ops._shared.label_loss import LossOptions, LossOutputs, loss_dtype, slope_scales
from jagged.ops.linear_bce.spec import Inputs, chunk_of


class Chunk(NamedTuple):
    """Labels side by side: which, and their logits `[B, C]`, of which those of positives have the other sign.

    Logits are the numbers of `storage` but for its last, which is there for positives of other chunks: so nothing waits for their
    count. `places` `[P]` are the positives' in it.
    """

    labels: slice
    logits: Tensor
    storage: Tensor
    places: Tensor

    def negate_positives(self) -> None:
        """Give the numbers of positives the other sign; a positive that is there twice writes the same twice."""
        self.storage.index_put_((self.places,), self.storage[self.places].neg_())


def forward(x: Inputs, o: LossOptions) -> LossOutputs:
    """Return the loss."""
    dtype = loss_dtype(x.features.dtype)
    loss, row_weight = x.features.new_zeros((), dtype=dtype), x.row_weight.to(dtype)
    for chunk in _chunks(x, x.features):
        # Beyond 40 the logarithm of 1 + exp(z) is z in every dtype.
        terms = torch.nn.functional.softplus(chunk.logits, threshold=40)
        if o.label_smoothing:
            terms.sub_(chunk.logits, alpha=0.5 * o.label_smoothing)
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
    counts = (x.row_weight != 0)[:, None]
    # Features of rows that do not count enter no product, where zero times what is no number would.
    counting = torch.where(counts, features, 0)
    scale, unscale = slope_scales(features, x.row_weight, x.label_weight, grads.loss)
    # Where slopes need not be in the middle of few numbers, they have all factors, and products none.
    factor = unscale if features.dtype == torch.float16 else None
    row_weight = (x.row_weight.to(dtype) * (scale if factor is not None else unscale))[:, None]
    found = {
        name: torch.empty_like(getattr(x, name), dtype=wanted[name], memory_format=torch.contiguous_format) for name in wanted
    }
    of_features = torch.zeros_like(features, dtype=dtype) if "features" in wanted else None
    # A GPU's products have sums in float32, and round once. Elsewhere sums of weights' gradients have more bits than these: half
    # as many bytes at once as of logits.
    is_direct = factor is None and wanted.get("weight") == features.dtype and (features.is_cuda or features.dtype == dtype)
    rows = chunk_of(features.shape[1], weight.shape[0], torch.finfo(dtype).bits // 4)
    for chunk in _chunks(x, counting):
        slopes = chunk.logits.sigmoid_()
        if o.label_smoothing:
            slopes -= 0.5 * o.label_smoothing
        chunk.negate_positives()
        slopes *= row_weight
        if x.label_weight is not None:
            slopes *= x.label_weight[chunk.labels].to(dtype)
        slopes.masked_fill_(~counts, 0)
        if "bias" in found:
            _write(found["bias"][chunk.labels], slopes.sum(0), factor)
        slopes = slopes.to(features.dtype)
        if "weight" in found and is_direct:
            torch.mm(slopes.t(), counting, out=found["weight"][chunk.labels])
        elif "weight" in found:
            for piece, of_piece in zip(found["weight"][chunk.labels].split(rows), slopes.t().split(rows), strict=True):
                _write(piece, _product(of_piece, counting, dtype), factor)
        if of_features is not None:
            of_features += _product(slopes, weight[chunk.labels], dtype)
    if of_features is not None:
        _write(found["features"], of_features, factor)
    return found


def _write(place: Tensor, values: Tensor, factor: Tensor | None) -> None:
    """Write values times a factor, rounded once."""
    if factor is None:
        place.copy_(values)
    else:
        torch.mul(values, factor, out=place)


def _chunks(x: Inputs, features: Tensor) -> Iterator[Chunk]:
    """Yield the labels in chunks of equal size, but for the last."""
    dtype = loss_dtype(features.dtype)
    num_labels, batch_size = x.weight.shape[0], features.shape[0]
    if not (num_labels and batch_size):
        return
    size = chunk_of(batch_size, num_labels, torch.finfo(dtype).bits // 8)
    for first in range(0, num_labels, size):
        labels = slice(first, min(first + size, num_labels))
        count = labels.stop - first
        storage = features.new_empty(batch_size * count + 1, dtype=dtype)
        logits = storage[:-1].view(batch_size, count)
        _product(features, x.weight[labels].t(), dtype, out=logits)
        if x.bias is not None:
            logits += x.bias[labels].to(dtype)
        is_here = (x.positives >= first) & (x.positives < labels.stop)
        chunk = Chunk(labels, logits, storage, torch.where(is_here, x.rows * count + x.positives - first, batch_size * count))
        chunk.negate_positives()
        yield chunk


def _product(left: Tensor, right: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Return `left @ right`, of which nothing is rounded to fewer bits than sums have."""
    if left.dtype == dtype:
        return torch.mm(left, right, out=out)
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=dtype, out=out)
    return torch.mm(left.to(dtype), right.to(dtype), out=out)
