"""Arithmetic on offsets in plain PyTorch, on device and without synchronisation."""

from __future__ import annotations

import torch
from torch import Tensor


def sample_of_row(offsets: Tensor, total: int) -> Tensor:
    """Return the sample `[total]` (int64) each row belongs to; rows that no sample covers get the last one's index.

    A search rather than `repeat_interleave`, so that offsets with wrong values never lead outside the batch.
    """
    rows = torch.arange(total, device=offsets.device, dtype=offsets.dtype)
    samples = torch.searchsorted(offsets[1:].contiguous(), rows, right=True)
    return samples.clamp_(max=max(offsets.shape[0] - 2, 0))


def position_of_row(offsets: Tensor, samples: Tensor) -> Tensor:
    """Return the place `[total]` (int64) of each row inside its sample, given the row's sample."""
    rows = torch.arange(samples.shape[0], device=samples.device)
    return rows - offsets.to(torch.int64)[samples]


def uniform_offsets(batch_size: int, length: int, like: Tensor) -> Tensor:
    """Return the offsets `[B + 1]` of samples that all have `length` rows, in the dtype and on the device of `like`."""
    return torch.arange(batch_size + 1, device=like.device, dtype=like.dtype) * length
