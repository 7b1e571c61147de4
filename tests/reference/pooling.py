"""Padded twins of pooling and interaction: rows `[B, L, D]` and a mask `[B, L]` of those that exist."""

from __future__ import annotations

import torch
from torch import Tensor


def padded_pooling(rows: Tensor, filled: Tensor, kind: str, score: Tensor) -> Tensor:
    """Pool `[B, L, D]` to `[B, D]`; `score` `[D]` is used by "softmax" alone."""
    empty = ~filled.any(1, keepdim=True)
    mask = filled[:, :, None]
    if rows.shape[1] == 0:
        return rows.sum(1)
    if kind == "max":
        return rows.masked_fill(~mask, -torch.inf).amax(1).masked_fill(empty, 0.0)
    if kind == "last":
        last = (filled.sum(1) - 1).clamp(min=0)
        return rows[torch.arange(rows.shape[0], device=rows.device), last].masked_fill(empty, 0.0)
    if kind == "softmax":
        scores = (rows @ score).masked_fill(~filled, torch.finfo(rows.dtype).min)
        return (scores.softmax(1)[:, :, None] * rows.masked_fill(~mask, 0.0)).sum(1)
    total = rows.masked_fill(~mask, 0.0).sum(1)
    return total / filled.sum(1, keepdim=True).clamp(min=1) if kind == "mean" else total


def padded_interaction(rows: Tensor, filled: Tensor, targets: Tensor, softmax: bool, scale: float) -> Tensor:
    """`[B, L, D]` and `[B, T, D]` to `[B, T, D]`."""
    rows = rows.masked_fill(~filled[:, :, None], 0.0)
    scores = rows @ targets.transpose(1, 2) * scale
    if softmax and rows.shape[1]:
        scores = scores.masked_fill(~filled[:, :, None], torch.finfo(rows.dtype).min).softmax(1)
    return scores.transpose(1, 2) @ rows
