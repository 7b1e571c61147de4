"""Dropout's numbers, each found from a seed and a place and kept nowhere: the same by every backend."""

from __future__ import annotations

import torch
from torch import Tensor

BITS = 2**32 - 1


def hashed(x: Tensor) -> Tensor:
    """Mix 32 bits, held in int64: lowbias32. The low half of a product is right though the whole overflows."""
    x = x ^ (x >> 16)
    x = x.mul_(0x7FEB352D).bitwise_and_(BITS)
    x ^= x >> 15
    x = x.mul_(0x846CA68B).bitwise_and_(BITS)
    x ^= x >> 16
    return x


def threshold(probability: float) -> int:
    """Return from which 32-bit number on a place is kept."""
    return min(round(probability * 2**32), BITS)


def keeps(seed: Tensor, num_rows: int, num_columns: int, probability: float) -> Tensor:
    """Tell which places of a matrix are kept, `[rows, columns]`."""
    low, high = seed.flatten() & BITS, (seed.flatten() >> 32) & BITS
    rows, columns = (torch.arange(of, device=seed.device) for of in (num_rows, num_columns))
    mixed = hashed((rows & BITS) ^ low)[:, None] ^ hashed((columns + high) & BITS)
    return hashed(mixed) >= threshold(probability)
