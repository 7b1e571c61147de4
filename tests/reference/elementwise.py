"""Sums, products, differences and linear layers sample by sample, in plain loops."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS = {None: lambda x: x, "relu": F.relu, "silu": F.silu, "gelu": F.gelu}


def repeated(dense: Tensor, lengths: Sequence[int]) -> Tensor:
    """Each row's operand out of `[B, F]` or `[B, L, F]`, zero where there is none."""
    pieces = [dense.new_zeros(0, dense.shape[-1])]
    for b, rows in enumerate(lengths):
        if dense.dim() == 2:
            pieces.append(dense[b].expand(rows, -1))
        else:
            kept = dense[b, :rows]
            pieces += [kept, dense.new_zeros(rows - kept.shape[0], dense.shape[-1])]
    return torch.cat(pieces)


def dense_add(values: Tensor, lengths: Sequence[int], dense: Tensor) -> Tensor:
    return values + repeated(dense, lengths)


def dense_mul(values: Tensor, lengths: Sequence[int], dense: Tensor) -> Tensor:
    return values * repeated(dense, lengths)


def cross(values: Tensor, lengths: Sequence[int], context: Tensor, own: Tensor, residual: Tensor | None) -> Tensor:
    factor = torch.cat([repeated(context, lengths), own], 1)
    return values * factor + (factor if residual is None else residual)


def pairwise_difference(values: Tensor, lengths: Sequence[int]) -> Tensor:
    samples = values.split(list(lengths)) if lengths else ()
    return torch.cat([values[:0], *((sample[:, None] - sample[None, :]).flatten() for sample in samples)])


def linear(
    values: Tensor, lengths: Sequence[int], weight: Tensor, bias: Tensor | None, context: Tensor | None, activation: str | None
) -> Tensor:
    hidden = F.linear(values, weight, bias)
    return ACTIVATIONS[activation](hidden if context is None else hidden + repeated(context, lengths))
