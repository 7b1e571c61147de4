"""Sums, products and differences in plain PyTorch: the CPU path and the float64 path."""

from __future__ import annotations

import torch
from torch import Tensor

from jagged.ops._shared.blocks import chunks, extended
from jagged.ops._shared.offsets import sample_of_row, scan_pairs
from jagged.ops._shared.padding import to_dense, to_jagged


def combine(values: Tensor | None, dense: Tensor, offsets: Tensor, total: int, operation: str) -> Tensor:
    """Combine each row with its operand out of `[B, F]` or `[B, L, F]`: `[total, F]`. No values give the operands alone."""
    if dense.dim() == 3:
        operand = to_jagged(dense, offsets, total)
    elif dense.numel() == 0:
        operand = dense.new_zeros(total, dense.shape[1])
    else:
        operand = dense.index_select(0, sample_of_row(offsets, total))
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
    if length is not None:
        return to_dense(values if factor is None else values * factor, offsets, length, 0)
    terms = values.double()
    return _sum(terms if factor is None else terms * factor, offsets).to(values.dtype)


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
    if values.is_cpu:
        num_rows, output = values.shape[0], values.new_empty(total + 1)
        for chunk in chunks(offsets, offsets, total, a_total=num_rows, b_total=num_rows):
            row = values[chunk.a_rows]
            output.scatter_(0, chunk.pairs, (row[:, :, None] - row[:, None, :]).flatten())
        return output[:-1]
    row, column = _pairs(offsets, values.shape[0], total)
    return values[row].sub_(values[column])


def pairwise_difference_backward(grad: Tensor, offsets: Tensor, num_rows: int) -> Tensor:
    """Return row sums minus column sums of each sample's block: `[P] -> [num_rows]`."""
    if grad.is_cpu:
        filled, output = extended(grad, 0), grad.new_zeros(num_rows + 1)
        for chunk in chunks(offsets, offsets, grad.shape[0], a_total=num_rows, b_total=num_rows):
            block = chunk.blocks(filled).to(torch.promote_types(grad.dtype, torch.float32))
            places = torch.where(chunk.a_exists, chunk.a_rows, num_rows)
            output.scatter_(0, places.flatten(), (block.sum(2) - block.sum(1)).flatten().to(output.dtype))
        return output[:-1]
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
