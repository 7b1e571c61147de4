"""Kernels that several families launch, where pair blocks begin and the mean of losses; what their own call is in `device`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged.ops._shared import losses
from jagged.ops._shared.launch import Launcher, bound
from jagged.ops._shared.offsets import Pairs, Plain, Starts

# Samples of one step of the scan.
OFFSETS_BLOCK = 1024
# In larger batches where blocks begin is written down once; in smaller ones every program adds it up for itself.
SCANNED_SAMPLES = 2048


@triton.jit(do_not_specialize=["num_samples"])
def pair_offsets_kernel(a_offsets, b_offsets, pair_offsets, num_samples, BLOCK: tl.constexpr):
    """Running sum of the samples' products of lengths, by one program: one launch where PyTorch needs seven."""
    before = tl.full((), 0, tl.int64)
    tl.store(pair_offsets, before)
    for first in range(0, num_samples, BLOCK):
        sample = first + tl.arange(0, BLOCK)
        exists = sample < num_samples
        a_length = tl.load(a_offsets + sample + 1, mask=exists, other=0) - tl.load(a_offsets + sample, mask=exists, other=0)
        b_length = tl.load(b_offsets + sample + 1, mask=exists, other=0) - tl.load(b_offsets + sample, mask=exists, other=0)
        pairs = a_length.to(tl.int64) * b_length.to(tl.int64)
        tl.store(pair_offsets + sample + 1, before + tl.cumsum(pairs, 0), mask=exists)
        before += tl.sum(pairs, 0)


_launch_pair_offsets = Launcher(pair_offsets_kernel)


def pair_offsets(x: Pairs, o: Plain) -> Starts:
    """Launch `pair_offsets_kernel`."""
    a_offsets, b_offsets = x.a_offsets.contiguous(), x.b_offsets.contiguous()
    starts = torch.empty(a_offsets.shape, dtype=torch.int64, device=a_offsets.device)
    _launch_pair_offsets((1,), a_offsets, b_offsets, starts, a_offsets.shape[0] - 1, BLOCK=OFFSETS_BLOCK)
    return Starts(starts)


def pair_starts(a_offsets: Tensor, b_offsets: Tensor) -> Tensor | None:
    """Return `pair_offsets` for a kernel that takes them, or None where it is to add them up by `pairs_before`."""
    is_scanned = a_offsets.shape[0] - 1 > SCANNED_SAMPLES
    return pair_offsets(Pairs(a_offsets, b_offsets), Plain()).starts if is_scanned else None


@triton.jit(do_not_specialize=["num_rows", "ignore_index"])
def mean_loss_kernel(losses, less, target, mean, counted, num_rows, ignore_index, BLOCK: tl.constexpr):
    """Mean of the rows that are not ignored, by one program: whatever losses so many rows have took far longer."""
    total = tl.zeros([BLOCK], tl.float32)
    number = tl.zeros([BLOCK], tl.int32)
    for first in range(0, num_rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        exists = row < num_rows
        loss = tl.load(losses + row, mask=exists, other=0.0)
        if less is not None:
            loss -= tl.load(less + row, mask=exists, other=0.0)
        total += loss
        number += (exists & (tl.load(target + row, mask=exists, other=0) != ignore_index)).to(tl.int32)
    count = tl.maximum(tl.sum(number), 1).to(tl.float32)
    tl.store(mean, tl.sum(total) / count)
    tl.store(counted, count)


_launch_mean_loss = bound(Launcher(mean_loss_kernel), BLOCK=4096, num_warps=16)


def mean_loss(x: losses.Rows, o: losses.Options) -> losses.Mean:
    """Launch `mean_loss_kernel`."""
    of_rows, less, target = x
    out = losses.Mean(of_rows.new_empty(()), of_rows.new_empty(()))
    less = None if less is None else less.contiguous()
    _launch_mean_loss((1,), of_rows.contiguous(), less, target.contiguous(), *out, of_rows.shape[0], o.ignore_index)
    return out
