"""Rows into a dense tensor and back, in plain PyTorch. Each is one gather."""

from __future__ import annotations

import torch
from torch import Tensor

from jagged.ops._shared.offsets import covering


def to_dense(values: Tensor, offsets: Tensor, length: int, padding_value: float) -> Tensor:
    """Gather each sample's first `length` rows: `[S, *F] -> [B, length, *F]`; wrong offsets give rows of the values."""
    total, features = values.shape[0], values.shape[1:]
    limits = offsets.to(torch.int64).clamp(0, total)
    row = limits[:-1, None] + torch.arange(length, device=values.device)
    # A copy of the values with one row of padding costs less than a mask over the result.
    row = torch.where(row < limits[1:, None], row, total)
    padded = torch.cat([values, values.new_full((1, *features), padding_value)])
    return padded.index_select(0, row.flatten()).view(offsets.shape[0] - 1, length, *features)


def to_jagged(dense: Tensor, offsets: Tensor, total: int) -> Tensor:
    """Gather the rows that samples have: `[B, L, *F] -> [total, *F]`; rows past L are zero."""
    batch_size, length, *features = dense.shape
    if batch_size * length == 0:
        return dense.new_zeros(total, *features)
    offsets = covering(offsets, total)
    lengths, first = offsets.diff(), torch.arange(batch_size, device=offsets.device) * length
    sample = torch.repeat_interleave(lengths, output_size=total)
    row = (first - offsets[:-1]).index_select(0, sample).add_(torch.arange(total, device=offsets.device))
    rows = dense.reshape(batch_size * length, *features)
    # A mask costs more than the gather; elsewhere than on a CPU, asking whether one is needed would synchronise.
    if offsets.is_cpu and int(lengths.max()) <= length:
        return rows.index_select(0, row)
    outside = row >= (first + length).index_select(0, sample)
    values = rows.index_select(0, row.masked_fill_(outside, 0))
    return values.masked_fill_(outside.view(-1, *[1] * len(features)), 0)
