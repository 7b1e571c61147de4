"""Rounding of new weights to bfloat16, up or down at random, as all updates have it."""

from __future__ import annotations

import torch
from torch import Tensor


def rounded(new: Tensor, dtype: torch.dtype, *, stochastic: bool, step: Tensor, element: Tensor) -> Tensor:
    """Return new weights in a dtype; to bfloat16 rounded up or down by a number that depends on the step and on the element.

    `element` (int64, of a shape that broadcasts to that of `new`) counts what one optimizer changes.
    """
    if not stochastic or dtype != torch.bfloat16:
        return new.to(dtype)
    bits = new.float().view(torch.int32).long() & 0xFFFFFFFF
    noise = mixed(element + (step << 40)) & 0xFFFF
    cut = (bits + noise) & 0xFFFF0000
    cut = torch.where(new.isfinite(), cut, bits)
    return torch.where(cut >= 2**31, cut - 2**32, cut).to(torch.int32).view(torch.float32).to(dtype)


def mixed(x: Tensor) -> Tensor:
    """Return 32 bits of a hash of 63-bit integers: two rounds of a multiplication by an odd number and a shift (Murmur3's)."""
    x = (x ^ (x >> 32)) & 0xFFFFFFFF
    for factor, shift in ((0x85EBCA6B, 13), (0xC2B2AE35, 16)):
        x = (x * factor) & 0xFFFFFFFF
        x = x ^ (x >> shift)
    return x
