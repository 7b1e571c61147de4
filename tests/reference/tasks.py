"""The losses of tasks row by row, request by request and pair by pair, in plain loops; each returns `(total, count)`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


def binary(logits: Tensor, labels: Tensor, counted: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    total = count = logits.new_zeros(())
    for s, y, w in ((logits[i], labels[i].to(logits.dtype), weights[i].to(logits.dtype)) for i in places(counted)):
        # The sigmoid's derivative loses digits for large logits, as the difference of sigmoid and label does in PyTorch's loss.
        total = total - w * (y * s.sigmoid().log() + (1 - y) * torch.nn.functional.logsigmoid(-s))
        count = count + w
    return total, count


def focal(
    logits: Tensor, labels: Tensor, counted: Tensor, weights: Tensor, *, gamma: float = 2.0, alpha: float | None = None
) -> tuple[Tensor, Tensor]:
    total = count = logits.new_zeros(())
    up, down = (1.0, 1.0) if alpha is None else (alpha, 1 - alpha)
    for s, y, w in ((logits[i], labels[i].to(logits.dtype), weights[i].to(logits.dtype)) for i in places(counted)):
        # `1 - p`, and the derivative of a sigmoid, would have lost the digits in float64 that ours is compared by.
        log_p, log_q = (torch.nn.functional.logsigmoid(x) for x in (s, -s))
        p, q = log_p.exp(), log_q.exp()
        total = total - w * (up * y * q**gamma * log_p + down * (1 - y) * p**gamma * log_q)
        count = count + w
    return total, count


def listwise(
    logits: Tensor, labels: Tensor, counted: Tensor, weights: Tensor, lengths: Sequence[int], *, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    total = count = logits.new_zeros(())
    for rows in requests(counted, weights, lengths):
        y = labels[rows].to(logits.dtype)
        if not rows or not y.any():
            continue
        weight = weights[rows].to(logits.dtype).mean()
        total = total - weight * (y / y.sum() * (logits[rows] / temperature).log_softmax(0)).sum()
        count = count + weight
    return total, count


def pairwise(logits: Tensor, labels: Tensor, counted: Tensor, weights: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    total = count = logits.new_zeros(())
    for rows in requests(counted, weights, lengths):
        losses = [
            torch.logaddexp(logits.new_zeros(()), logits[j] - logits[i]) for i in rows for j in rows if labels[i] > labels[j]
        ]
        if losses:
            weight = weights[rows].to(logits.dtype).mean()
            total, count = total + weight * torch.stack(losses).mean(), count + weight
    return total, count


def places(counted: Tensor) -> list[int]:
    return [i for i, counts in enumerate(counted.tolist()) if counts]


def requests(counted: Tensor, weights: Tensor, lengths: Sequence[int]) -> Iterator[list[int]]:
    """The rows of each request that count: those with a label and a weight."""
    start = 0
    for length in lengths:
        yield [i for i in range(start, start + length) if counted[i] and weights[i] != 0]
        start += length
