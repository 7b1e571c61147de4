"""Samples padded to the longest one, in PyTorch's own operators, for programs that are exported.

Nothing looks at a value but for the length of the longest sample, which is a size that nobody knows before the program runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jagged.ops._shared.offsets import position_of_row, sample_of_row
from jagged.ops._shared.padding import to_dense


def longest(offsets: Tensor) -> int:
    """Return the length of the longest sample, 2 at least: what a traced program asks when it runs."""
    # Inductor asks of what it multiplies whether there is one row.
    length = offsets.diff().max().clamp(min=2).item()
    assert not isinstance(length, float)
    torch._check(length >= 2)
    return length


def pad(values: Tensor, offsets: Tensor, length: int) -> Tensor:
    """Return `[B, length, *F]` of rows `[S, *F]`, zeros where there is none."""
    return to_dense(values, offsets, length, 0)


def unpad(dense: Tensor, offsets: Tensor, total: int) -> Tensor:
    """Return the rows `[total, *F]` of samples `[B, L, *F]` that were padded to the longest one."""
    sample, length = sample_of_row(offsets, total), dense.shape[1]
    place = sample * length + position_of_row(offsets, sample).clamp(0, length - 1)
    return dense.flatten(0, 1).index_select(0, place)


def rows_of(dense: Tensor, offsets: Tensor, total: int) -> Tensor:
    """Return the rows `[total, *F]` of dense samples `[B, L, *F]`, zeros past their end."""
    sample, length = sample_of_row(offsets, total), dense.shape[1]
    position = position_of_row(offsets, sample)
    # A row of zeros more: there may be none.
    rows = torch.cat([dense.flatten(0, 1), dense.new_zeros(1, *dense.shape[2:])])
    return rows.index_select(0, torch.where(position < length, sample * length + position, rows.shape[0] - 1))
