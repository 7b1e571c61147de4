"""Splits into training, validation and test: index views of a dataset, and the checks that nothing leaks between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from jagged.data.dataset import SequenceDataset
from jagged.data.errors import refuse
from jagged.data.vocabulary import FIRST, MISSING, UNSEEN, Vocabulary

_CHUNK = 1 << 22


@dataclass(frozen=True)
class SequencePart:
    """Samples as ranges of a dataset's events; nothing is copied.

    Attributes:
        dataset: whose events these are.
        user: int64 `[n]`, the dense user id of each sample.
        start: int64 `[n]`, the first event of each sample's history.
        end: int64 `[n]`, the event after its last.
        target: int64 `[n]`, the event held out, or None for training, where every event but the first of a range is a target.
        numbers: int64 `[dataset.num_items]`, the row that a model has for each item of the dataset, -1 where it has none; None
            where it has all of them, in the dataset's order.
        features: by name of a side feature of events the row that a model has for each number of the dataset, int64: that of a
            missing value is at 0.
    """

    dataset: SequenceDataset
    user: Tensor
    start: Tensor
    end: Tensor
    target: Tensor | None = None
    numbers: Tensor | None = None
    features: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("user", "start", "end", "target"):
            value = getattr(self, name)
            if value is not None and (value.dtype != torch.int64 or value.shape != self.user.shape or value.dim() != 1):
                raise ValueError(f"{name}: got {value.dtype} {tuple(value.shape)}, expected int64 [{self.user.numel()}]")
        if len(self):
            events = self.dataset.num_events
            if int(self.start.min()) < 0 or int(self.end.max()) > events or bool((self.start > self.end).any()):
                raise ValueError(f"start, end: expected 0 <= start <= end <= {events}")
            if int(self.user.min()) < 0 or int(self.user.max()) >= self.dataset.num_users:
                raise ValueError(
                    f"user: got {int(self.user.min())} to {int(self.user.max())}, expected 0 to {self.dataset.num_users - 1}"
                )
            if self.target is not None and (int(self.target.min()) < 0 or int(self.target.max()) >= events):
                raise ValueError(f"target: got {int(self.target.min())} to {int(self.target.max())}, expected 0 to {events - 1}")
        numbers, items = self.numbers, self.dataset.num_items
        if numbers is not None and (numbers.dtype != torch.int64 or numbers.shape != (items,) or bool((numbers < -1).any())):
            raise ValueError(f"numbers: got {numbers.dtype} {tuple(numbers.shape)}, expected int64 [{items}] of -1 or more")

    def __len__(self) -> int:
        return self.user.numel()

    @property
    def lengths(self) -> Tensor:
        """Events of each sample's range, int64 `[n]`."""
        return self.end - self.start

    @property
    def num_items(self) -> int:
        """Rows of the model that the part's items need."""
        if self.numbers is None:
            return self.dataset.num_items
        return int(self.numbers.max()) + 1 if len(self.numbers) else 0

    def items(self, events: Tensor) -> Tensor:
        """The model's row of the item of each event, int64 `[n]`; -1 where it has none."""
        ids = self.dataset.item_ids[events]
        # Unlike an index, this refuses negative ids.
        return ids if self.numbers is None else self.numbers.index_select(0, ids)

    def feature(self, name: str, events: Tensor) -> Tensor:
        """The model's row of the side feature of each event, int64 `[n]`."""
        return self.features[name].index_select(0, self.dataset.features[name][events])

    def unknown(self) -> dict[str, int]:
        """Count what the model has no row for; nothing where it has all items.

        `unknown_items` of the dataset, `unknown_targets`, and `unknown_history_events` in the histories of all samples.
        """
        if self.numbers is None:
            return {}
        unknown = self.numbers < 0
        return {
            "unknown_items": int(unknown.sum()),
            "unknown_targets": 0 if self.target is None else int((self.items(self.target) < 0).sum()),
            "unknown_history_events": int(self.item_counts()[unknown].sum()),
        }

    def sample(self, count: int, seed: int) -> SequencePart:
        """At most `count` of the samples, drawn by a seed, in their order; all of them where there are no more."""
        if count >= len(self):
            return self
        drawn = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))[:count].sort().values
        target = None if self.target is None else self.target[drawn]
        return replace(self, user=self.user[drawn], start=self.start[drawn], end=self.end[drawn], target=target)

    def item_counts(self) -> Tensor:
        """How often each item of the dataset occurs in the ranges, int64 `[dataset.num_items]`; in training, its popularity."""
        return self.counts(self.dataset.item_ids, self.dataset.num_items)

    def counts(self, values: Tensor, size: int) -> Tensor:
        """How often each number occurs in the ranges, int64 `[size]`, of numbers `[S]` of the dataset's events."""
        counts = torch.zeros(size, dtype=torch.int64)
        covered = self.lengths.cumsum(0)
        position = 0
        while position < len(self):
            base = int(covered[position - 1]) if position else 0
            until = max(int(torch.searchsorted(covered, base + _CHUNK, right=True)), position + 1)
            events = ranges(self.start[position:until], self.lengths[position:until])
            counts += torch.bincount(values[events], minlength=size)
            position = until
        return counts


@dataclass(frozen=True)
class SequenceSplit:
    """A dataset's training, validation and test parts.

    The items are those of the training part's events: `numbers` of the parts has no row for any other. An event of another one is
    left out of histories, and as a target it is a miss.

    `notes` counts what a reader of the metrics should know: `items_unseen_in_training`, users without a target, and for a
    global-time split the two times `valid_time` and `test_time`.
    """

    train: SequencePart
    valid: SequencePart
    test: SequencePart
    name: str
    notes: dict[str, int] = field(default_factory=dict)

    @property
    def items(self) -> Vocabulary:
        """The ids of the items, by row of a model."""
        items, numbers = self.train.dataset.items, self.train.numbers
        return items if numbers is None else Vocabulary(items.decode(numbers.argsort()[int((numbers < 0).sum()) :]))

    @property
    def feature_values(self) -> dict[str, Vocabulary]:
        """By name of a side feature of events the values that a model has rows for, from the row `FIRST` on."""
        dataset = self.train.dataset
        kept = {name: (rows[1:] >= FIRST).nonzero().squeeze(1) for name, rows in self.train.features.items()}
        return {name: Vocabulary(dataset.feature_values(name).decode(of)) for name, of in kept.items()}

    def numbered(self, numbers: Tensor | None, features: Mapping[str, Tensor] | None = None) -> SequenceSplit:
        """The same parts with other `numbers`, and `features` where these are given."""
        others: dict[str, Any] = {"numbers": numbers} | ({} if features is None else {"features": features})
        parts = {name: replace(getattr(self, name), **others) for name in ("train", "valid", "test")}
        return replace(self, **parts)


def split_leave_one_out(dataset: SequenceDataset) -> SequenceSplit:
    """Hold out each user's last event for the test and the one before it for validation; train on the rest.

    A user with fewer than 3 events is used for training alone (one with a single event has nothing to predict and is in no part).
    The history of a test target includes the validation event. Both kinds of users are counted in `notes`.
    """
    start, end = dataset.offsets[:-1], dataset.offsets[1:]
    length = end - start
    user = torch.arange(dataset.num_users)
    held_out = length >= 3
    train_end = torch.where(held_out, end - 2, end)
    notes = {"users_without_targets": int((~held_out).sum())}
    chosen = held_out.nonzero().squeeze(1)
    valid = SequencePart(dataset, chosen, start[chosen], end[chosen] - 2, end[chosen] - 2)
    test = SequencePart(dataset, chosen, start[chosen], end[chosen] - 1, end[chosen] - 1)
    return _finish(dataset, user, start, train_end, valid, test, "leave-one-out", notes)


def split_global_time(dataset: SequenceDataset, valid_fraction: float = 0.1, test_fraction: float = 0.1) -> SequenceSplit:
    """Train on the events before one time, validate on those before a second, test on the rest.

    The two times are quantiles of all events' times: at most `1 - valid_fraction - test_fraction` of the events lie before the
    validation time, at most `1 - test_fraction` before the test time; events of one time stay on one side. In each window a
    user's first event is the target and everything before it is the history, so a test history may include validation events. A
    user whose first event of all falls in a window has no history and no target there. Users without a target in either window
    are counted in `notes`.

    Raises:
        DataError: the dataset has no times, or all training, validation or test events fall on one side.
        ValueError: fractions out of (0, 1) or with a sum of 1 or more.
    """
    if not (0 < valid_fraction < 1 and 0 < test_fraction < 1 and valid_fraction + test_fraction < 1):
        raise ValueError(
            f"valid_fraction, test_fraction: got {valid_fraction}, {test_fraction}, expected positive with a sum below 1"
        )
    times = dataset.timestamps
    if times is None:
        raise refuse(
            "global-time split",
            "events without times",
            "times",
            "read a table with a time column, or split leave-one-out",
        )
    total = dataset.num_events
    valid_time = _quantile(times, int(total * (1 - valid_fraction - test_fraction)))
    test_time = _quantile(times, int(total * (1 - test_fraction)))
    start, end = dataset.offsets[:-1], dataset.offsets[1:]
    valid_from = _first_at(times, start, end, valid_time)
    test_from = _first_at(times, start, end, test_time)
    user = torch.arange(dataset.num_users)
    in_valid = ((valid_from < test_from) & (valid_from > start)).nonzero().squeeze(1)
    in_test = ((test_from < end) & (test_from > start)).nonzero().squeeze(1)
    valid = SequencePart(dataset, in_valid, start[in_valid], valid_from[in_valid], valid_from[in_valid])
    test = SequencePart(dataset, in_test, start[in_test], test_from[in_test], test_from[in_test])
    targeted = torch.zeros(dataset.num_users, dtype=torch.bool)
    targeted[in_valid] = targeted[in_test] = True
    notes = {"users_without_targets": int((~targeted).sum()), "valid_time": valid_time, "test_time": test_time}
    split = _finish(dataset, user, start, valid_from, valid, test, "global-time", notes)
    for name, part in (("training", split.train), ("validation", valid), ("test", test)):
        if not len(part):
            raise refuse(
                "global-time split",
                f"no {name} sample with validation from time {valid_time} and test from {test_time}",
                "some in each part",
                "change the fractions, or split leave-one-out",
            )
    return split


def leaks(split: SequenceSplit) -> dict[str, int]:
    """Count what must never be in a split; every count is zero for the splits made here.

    * `targets_in_training`: validation and test targets that are events of a training range;
    * `targets_in_both`: events that are targets of validation and of test;
    * `targets_in_history`: samples whose history reaches their own target or beyond it;
    * `history_after_target`: samples whose history ends later in time than their target (zero without times);
    * `training_after_cut`: training events at or after the validation time of a global-time split;
    * `duplicated_users`: samples beyond a user's first in one part;
    * `foreign_events`: samples with a range or a target outside their user's own events;
    * `unsupported_items`: items that a part has a number for and no training event has.
    """
    dataset, times = split.train.dataset, split.train.dataset.timestamps
    result = dict.fromkeys(
        (
            "targets_in_training",
            "targets_in_both",
            "targets_in_history",
            "history_after_target",
            "training_after_cut",
            "duplicated_users",
            "foreign_events",
            "unsupported_items",
        ),
        0,
    )
    unseen, numbered = split.train.item_counts() == 0, torch.zeros(dataset.num_items, dtype=torch.bool)
    starts, ends = split.train.start.sort().values, split.train.end.sort().values
    for part in (split.train, split.valid, split.test):
        result["duplicated_users"] += len(part) - part.user.unique().numel()
        numbered |= torch.ones_like(unseen) if part.numbers is None else part.numbers >= 0
        first, last = dataset.offsets[part.user], dataset.offsets[part.user + 1]
        foreign = (part.start < first) | (part.end > last)
        if part.target is not None:
            foreign |= (part.target < first) | (part.target >= last)
            # An event is inside a range when more ranges have begun by then than have ended, however they overlap.
            begun = torch.searchsorted(starts, part.target, right=True)
            ended = torch.searchsorted(ends, part.target, right=True)
            result["targets_in_training"] += int((begun > ended).sum())
            result["targets_in_history"] += int((part.end > part.target).sum())
            if times is not None:
                some = part.end > part.start
                result["history_after_target"] += int((times[part.end[some] - 1] > times[part.target[some]]).sum())
        result["foreign_events"] += int(foreign.sum())
    result["unsupported_items"] = int((unseen & numbered).sum())
    if split.valid.target is not None and split.test.target is not None:
        result["targets_in_both"] = int(torch.isin(split.test.target, split.valid.target).sum())
    if times is not None and "valid_time" in split.notes:
        train = split.train
        result["training_after_cut"] = int(
            (train.end - _first_at(times, train.start, train.end, split.notes["valid_time"])).sum()
        )
    return result


def ranges(start: Tensor, lengths: Tensor) -> Tensor:
    """The indices `start[i], start[i] + 1, ... start[i] + lengths[i] - 1` of all i in a row, int64 `[sum lengths]`."""
    before = lengths.cumsum(0) - lengths
    total = int(lengths.sum())
    return torch.arange(total) + torch.repeat_interleave(start - before, lengths, output_size=total)


def _finish(
    dataset: SequenceDataset,
    user: Tensor,
    start: Tensor,
    train_end: Tensor,
    valid: SequencePart,
    test: SequencePart,
    name: str,
    notes: dict[str, int],
) -> SequenceSplit:
    # A range of one event has no next item to learn.
    useful = (train_end - start >= 2).nonzero().squeeze(1)
    train = SequencePart(dataset, user[useful], start[useful], train_end[useful])
    notes["users_without_training"] = dataset.num_users - len(train)
    seen = train.item_counts() > 0
    notes["items_unseen_in_training"] = int((~seen).sum())
    features = {name: _rows_of_seen(train, name) for name in dataset.features}
    numbers = None if seen.all() else torch.where(seen, seen.cumsum(0) - 1, -1)
    return SequenceSplit(train, valid, test, name, notes).numbered(numbers, features)


def _rows_of_seen(train: SequencePart, name: str) -> Tensor:
    """The row of each number of a side feature: missing ones share one, and those that training has not seen another.

    The last event of a range is a target alone: what it has besides is not read.
    """
    read = replace(train, end=torch.maximum(train.end - 1, train.start))
    seen = read.counts(train.dataset.features[name], len(train.dataset.feature_values(name)) + 1) > 0
    rows = torch.where(seen[1:], seen[1:].cumsum(0) + FIRST - 1, UNSEEN)
    return torch.cat([torch.tensor([MISSING]), rows])


def _quantile(times: Tensor, rank: int) -> int:
    """The time with `rank` events or fewer before it and more than `rank` up to it, without sorting a copy of all times."""
    pieces = times.split(_CHUNK)
    low, high = (int(value) for value in torch.aminmax(times))
    while low < high:
        middle = low + (high - low) // 2
        if sum(int((piece <= middle).sum()) for piece in pieces) > rank:
            high = middle
        else:
            low = middle + 1
    return low


def _first_at(times: Tensor, start: Tensor, end: Tensor, moment: int) -> Tensor:
    """For each range the first event at or after a moment (its end if there is none), by bisection in all ranges at once."""
    low, high = start.clone(), end.clone()
    for _ in range(int((end - start).max()).bit_length() if len(start) else 0):
        open_ = low < high
        middle = (low + high) // 2
        before = open_ & (times[middle.clamp(max=len(times) - 1)] < moment)
        low = torch.where(before, middle + 1, low)
        high = torch.where(open_ & ~before, middle, high)
    return low
