"""What a loader's worker does: gather some samples' events. On its own, so that a spawned worker need not load torchrec."""

from __future__ import annotations

import multiprocessing
import os
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from jagged.data.dataset import SequenceDataset
from jagged.data.splits import SequencePart, ranges
from jagged.ops import validate_ids


class BatchSource(Dataset[Tensor]):
    """Builds the batch of some samples as one tensor: a worker then shares one piece of memory a batch, not seven."""

    def __init__(self, part: SequencePart, max_seq_len: int, with_viewed: bool, with_times: bool = False) -> None:
        self.part = part
        self.with_times = with_times
        self.max_seq_len = max_seq_len
        self.with_viewed = with_viewed

    def __getitem__(self, samples: Any) -> Tensor:
        part = self.part
        chosen = torch.from_numpy(samples)
        start, end = part.start[chosen], part.end[chosen]
        items = part.dataset.item_ids
        stop = end if part.target is not None else torch.maximum(end - 1, start)
        first = torch.maximum(start, stop - self.max_seq_len)
        rows = ranges(first, stop - first)
        targets = items[part.target[chosen]] if part.target is not None else items[rows + 1]
        values = [items[rows], seconds(part.dataset, rows)] if self.with_times else [items[rows]]
        histories = [_jagged(torch.cat(values), (stop - first).repeat(len(values)))]
        if self.with_viewed:
            histories.append(_jagged(items[ranges(start, end - start)], end - start))
        # Here on the host a look at the ids costs nothing; on a GPU models would have to wait for it.
        for ids in (targets, values[0], *(viewed for viewed, _, _ in histories[1:])):
            validate_ids(ids, part.dataset.num_items, name=f"{part.dataset.directory}: item_id")
        pieces = [part.user[chosen], targets, *chain.from_iterable(histories)]
        return torch.cat([torch.tensor([len(piece) for piece in pieces]), *pieces])


def seconds(dataset: SequenceDataset, rows: Tensor) -> Tensor:
    """Times of events, int64: those of a calendar in seconds, numbers as they are."""
    assert dataset.timestamps is not None
    times = dataset.timestamps[rows]
    return times if dataset.time_kind == "number" else times.div(1_000_000, rounding_mode="floor")


def only_with_parent(_: int) -> None:
    """End a worker whose parent is gone by now: torch watches from later on, and would watch the init process."""
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() == 1 != parent.pid:
        os._exit(1)


def _jagged(values: Tensor, lengths: Tensor) -> list[Tensor]:
    offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return [values, lengths, offsets]
