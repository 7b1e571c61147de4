"""The conversions sample by sample, in plain loops."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def samples(values: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    return list(values.split(list(lengths))) if lengths else []


def to_dense(values: Tensor, lengths: Sequence[int], length: int, padding_value: float) -> Tensor:
    dense = values.new_full((len(lengths), length, *values.shape[1:]), padding_value)
    for b, sample in enumerate(samples(values, lengths)):
        kept = sample[:length]
        dense[b, : kept.shape[0]] = kept
    return dense


def to_jagged(dense: Tensor, lengths: Sequence[int]) -> Tensor:
    pieces = [dense.new_zeros(0, *dense.shape[2:])]
    for b, rows in enumerate(lengths):
        kept = dense[b, :rows]
        pieces += [kept, dense.new_zeros(rows - kept.shape[0], *dense.shape[2:])]
    return torch.cat(pieces)


def concat(values: Sequence[Tensor], lengths: Sequence[Sequence[int]]) -> Tensor:
    parts = [samples(part, part_lengths) for part, part_lengths in zip(values, lengths, strict=True)]
    pieces = [sample for of_one_batch_entry in zip(*parts, strict=True) for sample in of_one_batch_entry]
    return torch.cat([values[0][:0], *pieces])


def truncate(values: Tensor, lengths: Sequence[int], length: int, keep: str) -> Tensor:
    pieces = [s[:length] if keep == "first" else s[max(len(s) - length, 0) :] for s in samples(values, lengths)]
    return torch.cat([values[:0], *pieces])


def slice_rows(values: Tensor, lengths: Sequence[int], start: Sequence[int], length: int) -> Tensor:
    pieces = [sample[first : first + length] for sample, first in zip(samples(values, lengths), start, strict=True)]
    return torch.cat([values[:0], *pieces])


def index_select(values: Tensor, lengths: Sequence[int], indices: Sequence[int]) -> Tensor:
    pieces = samples(values, lengths)
    return torch.cat([values[:0], *(pieces[index] for index in indices)])


def unique(values: Tensor, lengths: Sequence[int]) -> tuple[Tensor, list[int], Tensor]:
    """Distinct ids, how many each sample has, and where each row's id is."""
    found, counts, inverse = [values[:0]], [], [torch.zeros(0, dtype=torch.int64, device=values.device)]
    for sample in samples(values, lengths):
        ids, places = torch.unique(sample, return_inverse=True)
        inverse.append(places + sum(counts))
        found.append(ids)
        counts.append(len(ids))
    return torch.cat(found), counts, torch.cat(inverse)
