"""Products over the pairs of rows of each sample, in plain loops over samples."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def pair_scores(a: Tensor, b: Tensor, a_lengths: Sequence[int], b_lengths: Sequence[int]) -> Tensor:
    if not a_lengths:
        return a.new_zeros(0)
    samples = zip(a.split(list(a_lengths)), b.split(list(b_lengths)), strict=True)
    return torch.cat([(rows @ columns.T).flatten() for rows, columns in samples])


def pair_sums(scores: Tensor, b: Tensor, a_lengths: Sequence[int], b_lengths: Sequence[int]) -> Tensor:
    if not a_lengths:
        return b.new_zeros(0, b.shape[1])
    areas = [rows * columns for rows, columns in zip(a_lengths, b_lengths, strict=True)]
    samples = zip(scores.split(areas), b.split(list(b_lengths)), a_lengths, strict=True)
    return torch.cat([block.view(rows, part.shape[0]) @ part for block, part, rows in samples])
