"""Arithmetic on offsets, on device and without synchronisation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from jagged.ops._shared.operator import operator
from jagged.ops._shared.validation import check_offsets, check_same


def covering(offsets: Tensor, total: int) -> Tensor:
    """Return offsets `[B + 1]` (int64), B at least 1, moved where they are wrong: from 0 to `total`, never falling."""
    rising = offsets.to(torch.int64).clamp(0, total).cummax(0).values
    # Writing a number into a tensor of a GPU would synchronise.
    return torch.cat([rising.new_zeros(1), rising[1:-1], rising.new_full((1,), total)])


def sample_of_row(offsets: Tensor, total: int) -> Tensor:
    """Return the sample each row belongs to, without synchronisation. Plain PyTorch on every device.

    Args:
        offsets: `[B + 1]`, int32 or int64, ending at `total`.
        total: number of rows.

    Returns:
        `[total]`, int64; rows that no sample covers get the last one's index, so that wrong offsets never lead outside the batch.

    Example:
        >>> import torch
        >>> from jagged.ops import sample_of_row
        >>> sample_of_row(torch.tensor([0, 3, 3, 5]), total=5)
        tensor([0, 0, 0, 2, 2])
    """
    # On a CPU repeating samples is several times faster than a search.
    if offsets.is_cpu and offsets.shape[0] > 1:
        return torch.repeat_interleave(covering(offsets, total).diff(), output_size=total)
    if torch.compiler.is_compiling():
        return searched(covering(offsets, total), total)
    rows = torch.arange(total, device=offsets.device, dtype=offsets.dtype)
    samples = torch.searchsorted(offsets[1:].contiguous(), rows, right=True)
    return samples.clamp_(max=max(offsets.shape[0] - 2, 0))


def searched(offsets: Tensor, total: int) -> Tensor:
    """Return `sample_of_row` of offsets as `covering` gives them, for a compiler.

    Up to torch 2.12 Inductor searches a view, `offsets[1:]` say, from the first number of the tensor on that it is a view of, and
    tells nobody (PyTorch's issue 160964); a copy is a view to it. What `covering` concatenates is a tensor of its own.
    """
    return torch.searchsorted(offsets, torch.arange(total, device=offsets.device), right=True) - 1


def position_of_row(offsets: Tensor, samples: Tensor) -> Tensor:
    """Return the place `[total]` (int64) of each row inside its sample, given the row's sample."""
    rows = torch.arange(samples.shape[0], device=samples.device)
    return rows - offsets.to(torch.int64).index_select(0, samples)


def row_positions(offsets: Tensor, total: int, *, from_end: bool = False) -> Tensor:
    """Return the place of each row inside its sample, without synchronisation. Plain PyTorch on every device.

    Args:
        offsets: `[B + 1]`, int32 or int64, ending at `total`.
        total: number of rows.
        from_end: count from the sample's last row, which gets 0, instead of from its first.

    Returns:
        `[total]`, int64, never negative.

    Raises:
        ValueError, TypeError: offsets of another rank or dtype.

    Example:
        >>> import torch
        >>> from jagged.ops import row_positions
        >>> row_positions(torch.tensor([0, 3, 3, 5]), total=5)
        tensor([0, 1, 2, 0, 1])
        >>> row_positions(torch.tensor([0, 3, 3, 5]), total=5, from_end=True)
        tensor([2, 1, 0, 1, 0])
    """
    check_offsets(offsets, offsets, total=total)
    samples = sample_of_row(offsets, total)
    if not from_end:
        return position_of_row(offsets, samples).clamp_(min=0)
    last = offsets[1:].to(torch.int64) - 1
    return (last[samples] - torch.arange(total, device=offsets.device)).clamp_(min=0)


def uniform_offsets(batch_size: int, length: int, like: Tensor) -> Tensor:
    """Return the offsets `[B + 1]` of samples that all have `length` rows, in the dtype and on the device of `like`."""
    if length and not torch.compiler.is_compiling():
        return torch.arange(0, batch_size * length + 1, length, device=like.device, dtype=like.dtype)
    return torch.arange(batch_size + 1, device=like.device, dtype=like.dtype) * length


def stacked_offsets(parts: Sequence[Tensor | int], like: Tensor) -> Tensor:
    """Return the offsets `[K, B + 1]` of parts, each given by its own, or by the rows that all its samples have."""
    size = like.shape[0] - 1
    return torch.stack([part if isinstance(part, Tensor) else uniform_offsets(size, part, like) for part in parts])


class Pairs(NamedTuple):
    """Offsets `[B + 1]` of the rows and of the columns of blocks of pairs."""

    a_offsets: Tensor
    b_offsets: Tensor


class Plain(NamedTuple):
    """None."""


class Starts(NamedTuple):
    """Where blocks begin, `[B + 1]`, int64."""

    starts: Tensor


def scan(x: Pairs, o: Plain) -> Starts:
    """Add up products of lengths in plain PyTorch."""
    pairs = x.a_offsets.diff().to(torch.int64) * x.b_offsets.diff()
    return Starts(torch.cat([pairs.new_zeros(1), pairs.cumsum(0)]))


_PAIR_OFFSETS = operator(
    "pair_offsets",
    Pairs,
    Plain,
    Starts,
    shapes=lambda x, o: Starts(x.a_offsets.new_empty(x.a_offsets.shape, dtype=torch.int64)),
    torch="jagged.ops._shared.offsets:scan",
    triton="jagged.ops._shared.kernels:pair_offsets",
)


def scan_pairs(a_offsets: Tensor, b_offsets: Tensor, backend: str | None) -> Tensor:
    """Return `pair_offsets` of offsets that have been checked."""
    return _PAIR_OFFSETS(Pairs(a_offsets, b_offsets), Plain(), backend).starts


def pair_offsets(a_offsets: Tensor, b_offsets: Tensor | None = None) -> Tensor:
    """Return where each sample's block of pairs begins: sample b has a block `La_b x Lb_b`, stored row by row.

    Args:
        a_offsets: `[B + 1]`, int32 or int64: the blocks' rows.
        b_offsets: `[B + 1]`, of the same dtype: their columns; None for square blocks of `a_offsets`.

    Returns:
        `[B + 1]`, int64 whatever the dtype of the offsets: the number of pairs grows with the lengths' squares.

    Raises:
        ValueError, TypeError: offsets of another rank or dtype, or of different batch sizes or devices.

    Example:
        >>> import torch
        >>> from jagged.ops import pair_offsets
        >>> pair_offsets(torch.tensor([0, 2, 3]), torch.tensor([0, 3, 5]))
        tensor([0, 6, 8])
    """
    check_offsets(a_offsets, a_offsets, "a_offsets")
    b_offsets = a_offsets if b_offsets is None else b_offsets
    if b_offsets is not a_offsets:
        check_offsets(b_offsets, a_offsets, "b_offsets")
        check_same("b_offsets", b_offsets, "a_offsets", a_offsets)
        if b_offsets.shape != a_offsets.shape:
            raise ValueError(f"b_offsets: expected {list(a_offsets.shape)} as a_offsets, got {list(b_offsets.shape)}")
    return scan_pairs(a_offsets, b_offsets, None)
