"""Sums, products and activations in PyTorch's own operators, for programs that are exported."""

from __future__ import annotations

import torch
from torch import Tensor

from jagged.ops._shared.offsets import sample_of_row
from jagged.ops._shared.padded import rows_of
from jagged.ops.elementwise.spec import (
    Activating,
    Combination,
    Combined,
    Crossed,
    Crossing,
    Hidden,
    Lookups,
    Nothing,
    Operands,
    sum_dtype,
)


def combine(x: Operands, o: Combination) -> Combined:
    """Combine each row with its operand."""
    operand = _operands(x.dense, x.offsets, o.total)
    if x.values is None:
        return Combined(operand)
    return Combined(operand * x.values if o.operation == "mul" else operand + x.values)


def cross(x: Crossed, o: Crossing) -> Combined:
    """Multiply the columns that the sample has, then those of the row."""
    factor = torch.cat([_operands(x.context, x.offsets, x.values.shape[0]), x.own], 1)
    product = x.values * factor
    if x.residual is not None:
        return Combined(product + x.residual)
    return Combined(product + factor if o.adds_factor else product)


def activate(x: Hidden, o: Activating) -> Combined:
    """Add each sample's context to its rows and apply an activation."""
    dtype = torch.promote_types(x.values.dtype, torch.float32)
    before = _operands(x.context, x.offsets, x.values.shape[0]).to(dtype) + x.values
    return Combined(getattr(torch.nn.functional, o.activation)(before).to(x.values.dtype))


def add_rows(x: Lookups, o: Nothing) -> Combined:
    """Add rows of a table, as a lookup finds them."""
    rows = torch.nn.functional.embedding(x.places, x.table).to(sum_dtype(x))
    return Combined(rows if x.values is None else rows + x.values)


def _operands(dense: Tensor, offsets: Tensor, total: int) -> Tensor:
    """Return for each row what it meets out of `[B, F]` or `[B, L, F]`: `[total, F]`; past L there are zeros."""
    return rows_of(dense, offsets, total) if dense.dim() == 3 else dense.index_select(0, sample_of_row(offsets, total))
