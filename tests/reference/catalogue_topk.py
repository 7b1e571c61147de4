"""The best items by sorting every row's whole list of scores."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def catalogue_topk(
    hidden: Tensor, weight: Tensor, k: int, *, exclude: tuple[Tensor, Tensor] | None = None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return float64 scores and ids; by score descending, NaN last, then by id, without the excluded items."""
    logits = hidden.double() @ weight.double().T
    if bias is not None:
        logits = logits + bias.double()
    scores, ids = [], []
    for row, line in enumerate(logits.tolist()):
        out: set[int] = set()
        if exclude is not None:
            out = set(exclude[0][exclude[1][row] : exclude[1][row + 1]].tolist())
        left = [item for item in range(len(line)) if item not in out]
        best = sorted(left, key=lambda item: (math.isnan(line[item]), -line[item], item))[:k]
        scores.append([line[item] for item in best] + [-math.inf] * (k - len(best)))
        ids.append(best + [-1] * (k - len(best)))
    shape = (hidden.shape[0], k)
    return torch.tensor(scores, dtype=torch.float64).view(shape), torch.tensor(ids, dtype=torch.int64).view(shape)
