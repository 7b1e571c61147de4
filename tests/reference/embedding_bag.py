"""Embedding bags written out, one row after the other; and the updates of rows, by their formulas."""

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
    """For each feature, a table and whether to take means: its pooled bags `[B_f, width]`, in float32 at least."""
    ends, bag, outputs = offsets.tolist(), 0, []
    dtype = torch.promote_types(tables[0].dtype, torch.float32) if tables else torch.float32
    wide = [table.to(dtype) for table in tables]
    for (table, is_mean), size in zip(features, batch_sizes, strict=True):
        first = ends[bag]
        rows = wide[table][indices[first : ends[bag + size]].long()]
        if per_sample_weights is not None:
            rows = rows * per_sample_weights[first : ends[bag + size], None].to(dtype)
        bags = [rows.new_zeros(0, rows.shape[1])]
        for begin, end in zip(ends[bag : bag + size], ends[bag + 1 : bag + size + 1], strict=True):
            pooled = rows.new_zeros(rows.shape[1])
            for row in rows[begin - first : end - first].unbind():
                pooled = pooled + row
            bags.append((pooled / (end - begin) if is_mean and end > begin else pooled)[None])
        outputs.append(torch.cat(bags))
        bag += size
    return outputs
