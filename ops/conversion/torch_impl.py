"""The conversions in plain PyTorch: the CPU path and the float64 path."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from jagged.ops._shared.offsets import position_of_row, sample_of_row


def to_dense(values: Tensor, offsets: Tensor, length: int, padding_value: float) -> Tensor:
    """Gather each sample's first `length` rows: `[S, *F] -> [B, length, *F]`."""
    total, batch_size = values.shape[0], offsets.shape[0] - 1
    position = torch.arange(length, device=values.device)
    start, end = offsets[:-1, None], offsets[1:, None]
    row = start + position
    outside = (row >= end) | (row < 0) | (row >= total)
    if total == 0:
        return values.new_full((batch_size, length, *values.shape[1:]), padding_value)
    dense = values[row.clamp(0, total - 1)]
    return dense.masked_fill_(_over_features(outside, dense), padding_value)


def to_jagged(dense: Tensor, offsets: Tensor, total: int) -> Tensor:
    """Gather the rows that samples have: `[B, L, *F] -> [total, *F]`; rows past L are zero."""
    batch_size, length, *features = dense.shape
    if batch_size * length == 0:
        return dense.new_zeros(total, *features)
    sample = sample_of_row(offsets, total)
    position = position_of_row(offsets, sample)
    outside = (position < 0) | (position >= length)
    values = dense[sample, position.clamp(0, length - 1)]
    return values.masked_fill_(_over_features(outside, values), 0)


def concat(values: Sequence[Tensor], offsets: Tensor) -> Tensor:
    """Put the rows of every part behind one another, sample by sample: `[sum S_k, *F]`."""
    joined = values[0].new_empty(sum(part.shape[0] for part in values), *values[0].shape[1:])
    for k, part in enumerate(values):
        joined[_rows_in_whole(offsets, k, part.shape[0])] = part
    return joined


def split(values: Tensor, offsets: Tensor, totals: Sequence[int]) -> list[Tensor]:
    """Take the parts out again that `concat` put behind one another."""
    return [values[_rows_in_whole(offsets, k, total)] for k, total in enumerate(totals)]


def truncate(values: Tensor, offsets: Tensor, total: int, keep_last: bool) -> Tensor:
    """Take out one of two parts, the first or the last: `[S, *F] -> [total, *F]`."""
    return values[_rows_in_whole(offsets, int(keep_last), total)]


def truncate_backward(grad: Tensor, offsets: Tensor, total: int, keep_last: bool) -> Tensor:
    """Put gradients of the kept rows back into `[total, *F]`; dropped rows get zero."""
    whole = grad.new_zeros(total, *grad.shape[1:])
    whole[_rows_in_whole(offsets, int(keep_last), grad.shape[0])] = grad
    return whole


def _rows_in_whole(offsets: Tensor, part: int, total: int) -> Tensor:
    """Return for each row of a part its row `[S_k]` in the concatenation of all parts, whose offsets are `[K, B + 1]`."""
    start = offsets[:part, 1:].sum(0) + offsets[part:, :-1].sum(0)
    sample = sample_of_row(offsets[part], total)
    return start[sample] + position_of_row(offsets[part], sample)


def _over_features(mask: Tensor, like: Tensor) -> Tensor:
    return mask.reshape(mask.shape + (1,) * (like.dim() - mask.dim()))
