"""The softmaxes sample by sample, in plain loops."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def softmax(values: Tensor, lengths: Sequence[int]) -> Tensor:
    samples = values.split(list(lengths)) if lengths else ()
    return torch.cat([values[:0], *(torch.softmax(sample, 0) for sample in samples)])


def softmax2(scores: Tensor, a_lengths: Sequence[int], b_lengths: Sequence[int], dim: int) -> Tensor:
    blocks = scores.split([a * b for a, b in zip(a_lengths, b_lengths, strict=True)]) if a_lengths else ()
    shaped = (block.reshape(a, b) for block, a, b in zip(blocks, a_lengths, b_lengths, strict=True))
    return torch.cat([scores[:0], *(torch.softmax(block, dim).flatten() for block in shaped)])
