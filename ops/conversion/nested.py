"""PyTorch's nested tensors as values and offsets."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jagged.ops._shared.offsets import sample_of_row


def from_nested(nested: Tensor, total: int | None = None) -> tuple[Tensor, Tensor]:
    """Return the values and offsets of a nested tensor, without the rows that lie between its samples.

    Args:
        nested: `[B, j, *F]` of the layout `torch.jagged`, ragged in its first dimension past the batch.
        total: number of rows of all samples, for a tensor with holes (`nested_tensor_from_jagged(values, offsets, lengths)`),
            whose rows are gathered; None reads it, which synchronises once with the device.

    Returns:
        Values `[S, *F]`, differentiable, and offsets `[B + 1]`, int64.

    Raises:
        TypeError: no nested tensor.
        ValueError: another layout, or samples that are ragged in another dimension.

    Source:
        `torch.nested`, PyTorch 2.11.

    Example:
        >>> import torch
        >>> from jagged.ops import from_nested
        >>> nested = torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(0, 3), torch.zeros(4, 3)], layout=torch.jagged)
        >>> values, offsets = from_nested(nested)
        >>> values.shape, offsets
        (torch.Size([6, 3]), tensor([0, 2, 2, 6]))
    """
    if not isinstance(nested, Tensor) or not nested.is_nested:
        kind = f"a tensor {list(nested.shape)}" if isinstance(nested, Tensor) else type(nested).__name__
        raise TypeError(f"nested: expected a nested tensor [B, j, *F], got {kind}")
    if nested.layout != torch.jagged:
        raise ValueError(f"nested: expected layout torch.jagged, got {nested.layout}; make it with layout=torch.jagged")
    jagged: Any = nested
    if jagged._ragged_idx != 1:
        raise ValueError(
            f"nested: expected dimension 1 to be the ragged one, got {jagged._ragged_idx}; pass nested.transpose(...)"
        )
    values, offsets, lengths = jagged.values(), jagged.offsets().to(torch.int64), jagged.lengths()
    if lengths is None:
        return values, offsets
    compact = torch.cat([offsets.new_zeros(1), lengths.to(torch.int64).cumsum(0)])
    total = int(compact[-1]) if total is None else total
    samples = sample_of_row(compact, total)
    rows = torch.arange(total, device=values.device) + (offsets[:-1] - compact[:-1]).index_select(0, samples)
    return values.index_select(0, rows), compact
