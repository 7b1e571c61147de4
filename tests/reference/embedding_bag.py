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


def dequantised(tables: Sequence[Tensor], scales: Sequence[Tensor]) -> list[Tensor]:
    """Tables `[rows, width]` of bytes as the numbers that they stand for, in the dtype of scales `[rows, 2]`."""
    return [table.to(of.dtype) * of[:, :1] + of[:, 1:] for table, of in zip(tables, scales, strict=True)]


def gradients_of_rows(
    num_tables: int,
    features: Sequence[tuple[int, bool]],
    indices: Tensor,
    offsets: Tensor,
    grads: Sequence[Tensor],
    per_sample_weights: Tensor | None = None,
) -> list[dict[int, Tensor]]:
    """For each table the rows that are read and their gradients; `grads` are those of the features' bags, `[B_f, width]`."""
    ends, bag = offsets.tolist(), 0
    of_tables: list[dict[int, Tensor]] = [{} for _ in range(num_tables)]
    for (table, is_mean), grad in zip(features, grads, strict=True):
        for of_bag in grad:
            begin, end = ends[bag], ends[bag + 1]
            for place in range(begin, end):
                part = of_bag / (end - begin) if is_mean else of_bag
                if per_sample_weights is not None:
                    part = part * per_sample_weights[place].to(part.dtype)
                row = int(indices[place])
                of_tables[table][row] = of_tables[table].get(row, 0) + part
            bag += 1
    return of_tables


def updated_row(
    kind: str,
    row: Tensor,
    first: Tensor,
    second: Tensor,
    grad: Tensor,
    step: int,
    *,
    learning_rate: float,
    eps: float,
    betas: tuple[float, float],
    weight_decay: float,
    is_decoupled: bool = False,
    max_norm: float | None = None,
    missed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """A row after one update, and its states: numbers for each element, one number for the row, or anything where unused.

    `missed` is after how many updates that did not read it the row makes up for what they would have done to it.
    """
    old = row
    square = (grad**2).mean() if kind.startswith("rowwise_") else grad**2
    if kind == "sgd":
        row = old - learning_rate * (grad + weight_decay * old)
    elif kind.endswith("adagrad"):
        if not is_decoupled:
            grad = grad + weight_decay * old
            square = (grad**2).mean() if kind.startswith("rowwise_") else grad**2
        first = first + square
        row = old - learning_rate * grad / (first.sqrt() + eps)
        if is_decoupled:
            row = row - learning_rate * weight_decay * old
    else:
        first, second = betas[0] ** missed * first, betas[1] ** missed * second
        old = (1 - learning_rate * weight_decay) ** missed * old
        first, second = betas[0] * first + (1 - betas[0]) * grad, betas[1] * second + (1 - betas[1]) * square
        mean, variance = first / (1 - betas[0] ** step), second / (1 - betas[1] ** step)
        change = mean / (variance.sqrt() + eps) + weight_decay * old
        if kind.endswith("lamb"):
            norms = float((old**2).sum()) ** 0.5, float((change**2).sum()) ** 0.5
            if norms[0] and norms[1]:
                change = norms[0] / norms[1] * change
        row = old - learning_rate * change
    if max_norm is not None:
        norm = float((row**2).sum()) ** 0.5
        if norm > max_norm:
            row = row * (max_norm / norm)
    return row, first, second
