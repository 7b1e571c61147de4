"""Embedding bags written out: one bag after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def embedding_bags(
    tables: Sequence[Tensor],
    features: Sequence[tuple[int, bool]],
    indices: Tensor,
    offsets: Tensor,
    batch_sizes: Sequence[int],
    per_sample_weights: Tensor | None = None,
) -> list[Tensor]:
    """For each feature, a table and whether to take means: its pooled bags `[B_f, width]`."""
    ends, bag, outputs = offsets.tolist(), 0, []
    for (table, is_mean), size in zip(features, batch_sizes, strict=True):
        bags = []
        for _ in range(size):
            ids = indices[ends[bag] : ends[bag + 1]]
            rows = tables[table][ids.long()]
            if per_sample_weights is not None:
                rows = rows * per_sample_weights[ends[bag] : ends[bag + 1], None].to(rows.dtype)
            pooled = rows.sum(0)
            bags.append(pooled / len(ids) if is_mean and len(ids) else pooled)
            bag += 1
        outputs.append(torch.stack(bags) if bags else tables[table][:0])
    return outputs
