"""Sums, products and differences in plain PyTorch: the CPU path and the float64 path."""

from __future__ import annotations

import torch
from torch import Tensor

from jagged.ops._shared.offsets import position_of_row, sample_of_row, scan_pairs


def combine(values: Tensor | None, dense: Tensor, offsets: Tensor, total: int, operation: str) -> Tensor:
    """Combine each row with its operand out of `[B, F]` or `[B, L, F]`: `[total, F]`. No values give the operands alone."""
    if dense.numel() == 0:
        operand = dense.new_zeros(total, dense.shape[-1])
    else:
        sample = sample_of_row(offsets, total)
        if dense.dim() == 2:
            operand = dense[sample]
        else:
            position = position_of_row(offsets, sample)
            outside = (position < 0) | (position >= dense.shape[1])
            operand = dense[sample, position.clamp_(0, dense.shape[1] - 1)].masked_fill_(outside[:, None], 0)
    # In place in a tensor of our own: the result is contiguous whatever the strides of the values.
    if values is None:
        return operand
    if operation == "mul":
        return operand.mul_(values)
    if operation == "add":
        return operand.add_(values)
    return _activate(_accurate(operand).add_(values), operation).to(values.dtype)


def collect(values: Tensor, factor: Tensor | None, offsets: Tensor, length: int | None) -> Tensor:
    """Sum the rows (times their factors) of each sample, or put them into `[B, length, F]`, zero where there is none."""
    batch_size, (total, num_features) = offsets.shape[0] - 1, values.shape
    if length is None:
        terms = values.double()
        return _sum(terms if factor is None else terms * factor, offsets).to(values.dtype)
    if total == 0:
        return values.new_zeros(batch_size, length, num_features)
    row = offsets[:-1, None] + torch.arange(length, device=values.device)
    outside = (row >= offsets[1:, None]) | (row < 0) | (row >= total)
    row.clamp_(0, total - 1)
    dense = values[row]
    if factor is not None:
        dense.mul_(factor[row])
    return dense.masked_fill_(outside[..., None], 0)


def activate_backward(grad: Tensor, saved: Tensor, context: Tensor, offsets: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Return the gradients of the rows and of their context `[B, F]`; `saved` is relu's output, of others the input."""
    terms = _accurate(grad)
    if activation == "relu":
        terms = terms.masked_fill(saved <= 0, 0)
    else:
        z = _accurate(combine(None, context, offsets, grad.shape[0], "add")).add_(saved)
        backward = torch.ops.aten.silu_backward if activation == "silu" else torch.ops.aten.gelu_backward
        terms = backward(terms, z)
    return terms.to(grad.dtype).contiguous(), _sum(terms.double(), offsets).to(grad.dtype)


def pairwise_difference(values: Tensor, offsets: Tensor, total: int) -> Tensor:
    """Return the differences of all pairs within a sample: `[S] -> [total]`."""
    row, column = _pairs(offsets, values.shape[0], total)
    return values[row].sub_(values[column])


def pairwise_difference_backward(grad: Tensor, offsets: Tensor, num_rows: int) -> Tensor:
    """Return row sums minus column sums of each sample's block: `[P] -> [num_rows]`."""
    row, column = _pairs(offsets, num_rows, grad.shape[0])
    terms = grad.double()
    sums = terms.new_zeros(num_rows)
    if num_rows:
        sums.index_add_(0, row, terms).index_add_(0, column, terms, alpha=-1)
    return sums.to(grad.dtype)


def _pairs(offsets: Tensor, num_rows: int, total: int) -> tuple[Tensor, Tensor]:
    """Return row and column, as rows of the values, of every pair.

    A pair's row is the number of rows whose pairs begin before it: marks and their running sum, which cost less than a search of
    every pair and, unlike `repeat_interleave`, write only inside, whatever the offsets say.
    """
    if num_rows == 0 or total == 0:
        none = torch.zeros(total, dtype=torch.int64, device=offsets.device)
        return none, none
    sample = sample_of_row(offsets, num_rows)
    start = offsets.to(torch.int64)[sample]
    position = torch.arange(num_rows, device=offsets.device) - start
    first_pair = scan_pairs(offsets, offsets, "torch")[sample] + position * offsets.diff()[sample]
    marks = torch.zeros(total, dtype=torch.int64, device=offsets.device)
    marks.index_add_(0, first_pair.clamp(0, total - 1), torch.ones_like(first_pair))
    row = marks.cumsum_(0).sub_(1).clamp_(0, num_rows - 1)
    column = (start - first_pair)[row].add_(torch.arange(total, device=offsets.device))
    return row, column.clamp_(0, num_rows - 1)


def _sum(terms: Tensor, offsets: Tensor) -> Tensor:
    """Sum rows one by one, which in float32 would lose digits in long samples."""
    sums = terms.new_zeros(offsets.shape[0] - 1, terms.shape[1])
    if sums.numel():
        sums.index_add_(0, sample_of_row(offsets, terms.shape[0]), terms)
    return sums


def _activate(x: Tensor, activation: str) -> Tensor:
    if activation == "relu":
        return x.relu_()
    return torch.nn.functional.silu(x) if activation == "silu" else torch.nn.functional.gelu(x)


def _accurate(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
