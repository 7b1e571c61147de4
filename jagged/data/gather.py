"""What a loader's worker does: gather some samples' events. On its own, so that a spawned worker need not load torchrec."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
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

    def __init__(
        self,
        part: SequencePart,
        max_seq_len: int,
        with_viewed: bool,
        with_times: bool = False,
        with_features: Sequence[str] = (),
    ) -> None:
        self.part = part
        self.with_times = with_times
        self.with_features = with_features
        self.max_seq_len = max_seq_len
        self.num_items = part.num_items
        self.with_viewed = with_viewed

    def __getitem__(self, samples: Any) -> Tensor:
        # With them may come how many rows of each are to be kept, which is handed on.
        samples, *kept = samples if isinstance(samples, tuple) else (samples,)
        part, training = self.part, self.part.target is None
        chosen = torch.from_numpy(samples)
        start, end = part.start[chosen], part.end[chosen]
        stop = torch.maximum(end - 1, start) if training else end
        # A history loses what the model has no row for before it is cut; of training's events it has all.
        lacking = not training and part.numbers is not None
        whole = self.with_viewed or lacking
        first = start if whole else torch.maximum(start, stop - self.max_seq_len)
        lengths = stop - first
        rows = ranges(first, lengths)
        items = part.items(rows)
        targets = part.items(rows + 1 if part.target is None else part.target[chosen])
        if lacking:
            known, lengths = known_items(items, lengths)
            rows, items = rows[known], items[known]
        # Here on the host a look at the ids costs nothing; on a GPU models would have to wait for it.
        name = f"{part.dataset.directory}: item_id"
        validate_ids(targets, self.num_items, name=name, ignore_index=-1 if lacking else None)
        validate_ids(items, self.num_items, name=name)
        viewed = [_jagged(items, lengths)] if self.with_viewed else []
        if whole:
            recent = lengths.clamp(max=self.max_seq_len)
            last = ranges(lengths.cumsum(0) - recent, recent)
            rows, items, lengths = rows[last], items[last], recent
        values = [items, seconds(part.dataset, rows)] if self.with_times else [items]
        values += [part.feature(name, rows) for name in self.with_features]
        histories = [_jagged(torch.cat(values), lengths.repeat(len(values))), *viewed]
        pieces = [part.user[chosen], targets, *chain.from_iterable(histories), *map(torch.from_numpy, kept)]
        return torch.cat([torch.tensor([len(piece) for piece in pieces]), *pieces])


def seconds(dataset: SequenceDataset, rows: Tensor) -> Tensor:
    """Times of events, int64: those of a calendar in seconds, numbers as they are."""
    assert dataset.timestamps is not None
    times = dataset.timestamps[rows]
    return times if dataset.time_kind == "number" else times.div(1_000_000, rounding_mode="floor")


def known_items(items: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Which items of samples are not negative, bool `[S]`, and how many of them each sample has, int64 `[B]`."""
    known = items >= 0
    samples = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    return known, torch.bincount(samples[known], minlength=len(lengths))


def only_with_parent(_: int) -> None:
    """End a worker whose parent is gone by now: torch watches from later on, and would watch the init process."""
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() == 1 != parent.pid:
        os._exit(1)


def _jagged(values: Tensor, lengths: Tensor) -> list[Tensor]:
    offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return [values, lengths, offsets]
