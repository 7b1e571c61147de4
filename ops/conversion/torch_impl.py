"""The conversions between jagged tensors in plain PyTorch: the CPU path and the float64 path."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from jagged.ops._shared.offsets import sample_of_row


def concat(values: Sequence[Tensor], offsets: Tensor) -> Tensor:
    """Put the rows of every part behind one another, sample by sample: `[sum S_k, *F]`."""
    joined = values[0].new_empty(sum(part.shape[0] for part in values), *values[0].shape[1:])
    for k, part in enumerate(values):
        joined.index_copy_(0, _rows_in_whole(offsets, k, part.shape[0]), part)
    return joined


def split(values: Tensor, offsets: Tensor, totals: Sequence[int]) -> list[Tensor]:
    """Take the parts out again that `concat` put behind one another."""
    return [values.index_select(0, _rows_in_whole(offsets, k, total)) for k, total in enumerate(totals)]


def truncate(values: Tensor, offsets: Tensor, total: int, keep_last: bool) -> Tensor:
    """Take out one of two parts, the first or the last: `[S, *F] -> [total, *F]`."""
    return values.index_select(0, _rows_in_whole(offsets, int(keep_last), total))


def truncate_backward(grad: Tensor, offsets: Tensor, total: int, keep_last: bool) -> Tensor:
    """Put gradients of the kept rows back into `[total, *F]`; dropped rows get zero."""
    whole = grad.new_zeros(total, *grad.shape[1:])
    return whole.index_copy_(0, _rows_in_whole(offsets, int(keep_last), grad.shape[0]), grad)


def _rows_in_whole(offsets: Tensor, part: int, total: int) -> Tensor:
    """Return for each row of a part its row `[S_k]` in the concatenation of all parts, whose offsets are `[K, B + 1]`."""
    before = offsets[:part, 1:].sum(0) + offsets[part + 1 :, :-1].sum(0)
    rows = before.index_select(0, sample_of_row(offsets[part], total))
    return rows.add_(torch.arange(total, device=offsets.device))
