"""Features that are not pooled: each of their ids is a bag of its own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby

import torch
from torch import Tensor

from jagged.ops._shared.validation import holds, validation_is_on
from jagged.ops.embedding_bag.layout import BagLayout


def one_by_one(
    layout: BagLayout, indices: Tensor, offsets: Tensor, batch_sizes: Sequence[int] | None, totals: Sequence[int] | None
) -> tuple[tuple[int, ...], Tensor]:
    """Return how many bags each feature has, and their offsets, where each id of a sequence is a bag.

    Args:
        offsets: `[sum of batch_sizes + 1]`, of samples.
        totals: number of ids of each sequence; None: read from offsets.

    Raises:
        ValueError: totals that sequences do not have, as far as the host knows.
    """
    assert layout.sequences is not None
    num_features, num_ids = layout.num_features, indices.shape[0]
    sizes = [(offsets.shape[0] - 1) // num_features] * num_features if batch_sizes is None else list(batch_sizes)
    firsts = [0, *accumulate(sizes)]
    places = [feature for feature, is_sequence in enumerate(layout.sequences) if is_sequence]
    are_read = totals is not None and validation_is_on(offsets)
    if totals is None or are_read:
        if num_features == 1:
            found = [num_ids]
        else:
            ends = offsets[firsts].clamp(0, num_ids).tolist()
            found = [max(0, ends[place + 1] - ends[place]) for place in places]
        totals = found if totals is None else totals
        if list(totals) != found:
            raise ValueError(f"sequence_totals: expected {found}, the ids of each sequence by offsets, got {list(totals)}")
    are_counts = len(totals) == len(places) and all(holds(total >= 0) for total in totals)
    if not are_counts or not holds(sum(totals) <= num_ids):
        raise ValueError(
            f"sequence_totals: expected {len(places)} numbers, one for each sequence, of at least 0 and of {num_ids} together at "
            f"most, as there are ids, got {list(totals)}"
        )
    for place, total in zip(places, totals, strict=True):
        sizes[place] = total
    if len(places) == num_features:
        if not holds(sum(totals) == num_ids):
            raise ValueError(f"sequence_totals: expected {num_ids} together, as there are ids, got {sum(totals)}")
        return tuple(sizes), torch.arange(num_ids + 1, dtype=offsets.dtype, device=offsets.device)
    parts = []
    for is_sequence, of_run in groupby(range(num_features), key=layout.sequences.__getitem__):
        run = list(of_run)
        begin, end = firsts[run[0]], firsts[run[-1] + 1]
        if is_sequence:
            count = sum(sizes[feature] for feature in run)
            parts.append(torch.arange(count, dtype=offsets.dtype, device=offsets.device) + offsets[begin])
        else:
            parts.append(offsets[begin:end])
    return tuple(sizes), torch.cat([*parts, offsets[-1:]])
