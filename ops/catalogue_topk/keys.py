"""One order of scored items on every device, as the order of integers.

The bits of scores are reordered so that integers compare as the floats do. NaN comes after every number, an item that a row must
not get after that, as the least integer. For the kernels a score and its item make one int64 key, the score's bits above the
item id counted down. Keys are unique, so "higher score first, smaller id first among equal scores" is plain integer order, and
the best items are the same however rows and items are cut.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: The key of no item: below that of any score.
NO_ITEM = torch.iinfo(torch.int64).min
ID_MASK = 2**32 - 1
# The bits of a negative NaN are below those of -inf in the order, whatever its payload.
_NAN = math.copysign(math.nan, -1.0)


def reorder_(scores: Tensor) -> Tensor:
    """Return the bits of float32 or float64 scores as integers of the same order, in their memory."""
    # -0.0 and 0.0 are equal scores and must have equal bits.
    torch.nan_to_num(scores.add_(0.0), nan=_NAN, posinf=torch.inf, neginf=-torch.inf, out=scores)
    bits = scores.view(torch.int32 if scores.dtype == torch.float32 else torch.int64)
    info = torch.iinfo(bits.dtype)
    return bits.bitwise_xor_((bits >> (info.bits - 1)).bitwise_and_(info.max))


def restore(order: Tensor) -> Tensor:
    """Return the scores that `reorder_` gave these integers for."""
    info = torch.iinfo(order.dtype)
    bits = order ^ ((order >> (info.bits - 1)) & info.max)
    return bits.view(torch.float32 if order.dtype == torch.int32 else torch.float64)


def decode(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return scores (float32) and ids of keys; -inf and -1 where there is no item."""
    none = keys == NO_ITEM
    scores = restore((keys >> 32).to(torch.int32))
    return scores.masked_fill_(none, -torch.inf), (ID_MASK - (keys & ID_MASK)).masked_fill_(none, -1)
