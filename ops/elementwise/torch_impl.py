"""Sums, products and differences in plain PyTorch: the CPU path and the float64 path."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from jagged.ops._shared.blocks import chunks, extended
from jagged.ops._shared.offsets import sample_of_row, scan_pairs
from jagged.ops._shared.padding import to_dense, to_jagged
from jagged.ops.elementwise.spec import (
    Activating,
    Collected,
    Collection,
    Combination,
    Combined,
    Crossed,
    Crossing,
    Differences,
    Factors,
    Hidden,
    Lookups,
    Nothing,
    Operands,
    Result,
    Scores,
    Sums,
    Table,
    Terms,
    Total,
    sum_dtype,
)


def combine(x: Operands, o: Combination) -> Combined:
    """Combine each row with its operand."""
    operand = _operands(x.dense, x.offsets, o.total)
    # In place in a tensor of our own: the result is contiguous whatever the strides of the values.
    if x.values is not None:
        operand = operand.mul_(x.values) if o.operation == "mul" else operand.add_(x.values)
    return Combined(operand)


def collect(x: Factors, o: Collection) -> Collected:
    """Sum the rows (times their factors) of each sample, or put them into `[B, length, F]`, zero where there is none."""
    values, factor, offsets = x
    if o.length is not None:
        return Collected(to_dense(values if factor is None else values * factor, offsets, o.length, 0))
    terms = values.double()
    return Collected(_sum(terms if factor is None else terms * factor, offsets).to(values.dtype))


def cross(x: Crossed, o: Crossing) -> Combined:
    """Multiply the columns that the sample has, then those of the row, each where the result is."""
    values, context, own, offsets, residual = x
    of_sample, width, output = _operands(context, offsets, values.shape[0]), context.shape[1], values.new_empty(values.shape)
    for part, factor in ((slice(None, width), of_sample), (slice(width, None), own)):
        torch.mul(values[:, part], factor, out=output[:, part])
        if residual is not None or o.adds_factor:
            output[:, part] += factor if residual is None else residual[:, part]
    return Combined(output)


def add_rows(x: Lookups, o: Nothing) -> Combined:
    """Add rows of a table, as a lookup finds them."""
    rows = torch.nn.functional.embedding(x.places, x.table).to(sum_dtype(x))
    return Combined(rows if x.values is None else rows.add_(x.values))


def index_sums(x: Terms, o: Table) -> Sums:
    """Sum the terms of each row, in float32 at least; those of -1 belong to none."""
    if not x.terms.numel():
        return Sums(x.terms.new_zeros(o.num_rows, x.terms.shape[1], dtype=o.dtype))
    sums = torch.ops.aten.embedding_dense_backward(_accurate(x.terms), x.places, o.num_rows, -1, False)
    return Sums(sums.to(o.dtype))


def activate(x: Hidden, o: Activating) -> Combined:
    """Add each sample's context to its rows and apply an activation."""
    operand = _accurate(_operands(x.context, x.offsets, x.values.shape[0])).add_(x.values)
    return Combined(_activate(operand, o.activation).to(x.values.dtype))


def activate_backward(
    grads: Combined, x: Hidden, out: Combined, o: Activating, wanted: Mapping[str, torch.dtype]
) -> dict[str, Tensor]:
    """Return the gradients of the rows and of their context; relu has kept its output, the others the rows."""
    grad = grads.output
    terms = _accurate(grad)
    if o.activation == "relu":
        terms = terms.masked_fill(out.output <= 0, 0)
    else:
        z = _accurate(_operands(x.context, x.offsets, grad.shape[0])).add_(x.values)
        backward = torch.ops.aten.silu_backward if o.activation == "silu" else torch.ops.aten.gelu_backward
        terms = backward(terms, z)
    found = {}
    if "values" in wanted:
        found["values"] = terms.to(grad.dtype).contiguous()
    if "context" in wanted:
        found["context"] = _sum(terms.double(), x.offsets).to(grad.dtype)
    return found


def pairwise_difference(x: Scores, o: Total) -> Result:
    """Return the differences of all pairs within a sample: `[S] -> [total]`."""
    values, offsets = x
    if values.is_cpu:
        num_rows, output = values.shape[0], values.new_empty(o.total + 1)
        for chunk in chunks(offsets, offsets, o.total, a_total=num_rows, b_total=num_rows):
            row = values[chunk.a_rows]
            output.scatter_(0, chunk.pairs, (row[:, :, None] - row[:, None, :]).flatten())
        return Result(output[:-1])
    rows, columns = _pairs(offsets, values.shape[0], o.total)
    return Result(values[rows].sub_(values[columns]))


def pairwise_difference_backward(x: Differences, o: Total) -> Result:
    """Return row sums minus column sums of each sample's block: `[P] -> [total]`."""
    grad, offsets = x
    num_rows = o.total
    if grad.is_cpu:
        filled, output = extended(grad, 0), grad.new_zeros(num_rows + 1)
        for chunk in chunks(offsets, offsets, grad.shape[0], a_total=num_rows, b_total=num_rows):
            block = chunk.blocks(filled).to(torch.promote_types(grad.dtype, torch.float32))
            places = torch.where(chunk.a_exists, chunk.a_rows, num_rows)
            output.scatter_(0, places.flatten(), (block.sum(2) - block.sum(1)).flatten().to(output.dtype))
        return Result(output[:-1])
    rows, columns = _pairs(offsets, num_rows, grad.shape[0])
    terms = grad.double()
    sums = terms.new_zeros(num_rows)
    if num_rows:
        sums.index_add_(0, rows, terms).index_add_(0, columns, terms, alpha=-1)
    return Result(sums.to(grad.dtype))


def _operands(dense: Tensor, offsets: Tensor, total: int) -> Tensor:
    """Return for each row what it meets out of `[B, F]` or `[B, L, F]`: `[total, F]`, in memory of its own."""
    if dense.dim() == 3:
        return to_jagged(dense, offsets, total)
    if dense.numel() == 0:
        return dense.new_zeros(total, dense.shape[1])
    return dense.index_select(0, sample_of_row(offsets, total))


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
