from __future__ import annotations

from dataclasses import replace

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jagged.data import DataError, SequenceDataset, SequencePart, SequenceSplit, leaks, split_global_time, split_leave_one_out
from jagged.data import splits as splits_module
from jagged.data.splits import ranges
from tests.data import oracle

EVENT = st.tuples(st.integers(0, 9), st.integers(-20, 20))
USERS = st.lists(
    st.one_of(st.lists(EVENT, max_size=4), st.lists(EVENT, min_size=40, max_size=60)), min_size=1, max_size=12
).filter(any)


def timed(users: list[list[tuple[int, int]]]) -> SequenceDataset:
    users = [sorted(user, key=lambda event: event[1]) for user in users]
    return oracle.dataset([[item for item, _ in user] for user in users], [[time for _, time in user] for user in users])


def rows(part: SequencePart) -> dict[int, tuple[list[int], int | None]]:
    """`{user: (events of the range, target event)}`."""
    targets = part.target.tolist() if part.target is not None else [None] * len(part)
    return {
        user: (list(range(start, end)), target)
        for user, start, end, target in zip(part.user.tolist(), part.start.tolist(), part.end.tolist(), targets, strict=True)
    }


@given(USERS)
def test_leave_one_out(users: list[list[tuple[int, int]]]) -> None:
    dataset = timed(users)
    split = split_leave_one_out(dataset)
    train, valid, test = rows(split.train), rows(split.valid), rows(split.test)
    offsets = dataset.offsets.tolist()
    for user in range(dataset.num_users):
        events = list(range(offsets[user], offsets[user + 1]))
        if len(events) >= 3:
            assert test[user] == (events[:-1], events[-1])
            assert valid[user] == (events[:-2], events[-2])
            kept = events[:-2]
        else:
            assert user not in test
            assert user not in valid
            kept = events
        assert train.get(user, ([], None))[0] == (kept if len(kept) >= 2 else [])
    check_notes(split)
    assert split.notes["users_without_targets"] == dataset.num_users - len(test)
    assert not any(leaks(split).values())


def check_notes(split: SequenceSplit) -> None:
    dataset = split.train.dataset
    trained = {int(dataset.item_ids[event]) for events, _ in rows(split.train).values() for event in events}
    assert split.notes["items_unseen_in_training"] == dataset.num_items - len(trained)
    assert split.notes["users_without_training"] == dataset.num_users - len(split.train)
    counts = split.train.item_counts().tolist()
    kept = sorted(trained)
    assert split.items.ids.equals(dataset.items.decode(kept))
    everything = torch.arange(dataset.num_events)
    known = [kept.index(item) if item in trained else -1 for item in dataset.item_ids.tolist()]
    for part in (split.train, split.valid, split.test):
        assert part.num_items == len(kept)
        assert part.items(everything).tolist() == known
        missing = {
            "unknown_items": dataset.num_items - len(kept),
            "unknown_targets": sum(target is not None and known[target] < 0 for _, target in rows(part).values()),
            "unknown_history_events": sum(known[event] < 0 for events, _ in rows(part).values() for event in events),
        }
        # Where all are known nothing is mapped, and nothing to be counted.
        assert (part.numbers is None) == (len(kept) == dataset.num_items)
        assert part.unknown() == ({} if part.numbers is None else missing)
    for item in range(dataset.num_items):
        assert counts[item] == sum(int(dataset.item_ids[e]) == item for events, _ in rows(split.train).values() for e in events)


@given(USERS, st.floats(0.05, 0.45), st.floats(0.05, 0.45))
def test_global_time(users: list[list[tuple[int, int]]], valid_fraction: float, test_fraction: float) -> None:
    dataset = timed(users)
    assert dataset.timestamps is not None
    times, offsets = dataset.timestamps.tolist(), dataset.offsets.tolist()
    ordered, total = sorted(times), len(times)
    valid_time = ordered[int(total * (1 - valid_fraction - test_fraction))]
    test_time = ordered[int(total * (1 - test_fraction))]
    train, valid, test = {}, {}, {}
    for user in range(dataset.num_users):
        events = list(range(offsets[user], offsets[user + 1]))
        before = [event for event in events if times[event] < valid_time]
        if len(before) >= 2:
            train[user] = (before, None)
        for part, first, last in ((valid, valid_time, test_time), (test, test_time, max(times) + 1)):
            window = [event for event in events if first <= times[event] < last]
            if window and window[0] > events[0]:
                part[user] = (events[: events.index(window[0])], window[0])
    if not (train and valid and test):
        with pytest.raises(DataError, match=r"no (training|validation|test) sample"):
            split_global_time(dataset, valid_fraction, test_fraction)
        return
    split = split_global_time(dataset, valid_fraction, test_fraction)
    assert (rows(split.train), rows(split.valid), rows(split.test)) == (train, valid, test)
    assert (split.notes["valid_time"], split.notes["test_time"]) == (valid_time, test_time)
    assert split.notes["users_without_targets"] == dataset.num_users - len(valid.keys() | test.keys())
    check_notes(split)
    assert not any(leaks(split).values())


def test_global_time_splits_real_sizes() -> None:
    generator = torch.Generator().manual_seed(0)
    users = [list(zip([0] * 30, torch.randint(0, 10_000, (30,), generator=generator).tolist(), strict=True)) for _ in range(100)]
    split = split_global_time(timed(users), 0.1, 0.2)
    trained = int((split.train.end - split.train.start).sum())
    assert abs(trained - 2100) < 40


def test_extreme_times_do_not_overflow() -> None:
    low, high = -(2**63), 2**63 - 1
    dataset = timed([[(0, low), (1, low), (2, high), (0, high)] for _ in range(3)] + [[(0, low), (1, low), (1, 0)]] * 5)
    split = split_global_time(dataset, 0.15, 0.2)
    assert (split.notes["valid_time"], split.notes["test_time"]) == (0, high)
    assert not any(leaks(split).values())


def test_global_time_needs_times_and_windows() -> None:
    with pytest.raises(DataError) as error:
        split_global_time(oracle.dataset([[1, 2, 3]]))
    # The dataset's directory, a temporary one, would say nothing.
    assert str(error.value) == (
        "global-time split: found events without times, expected times; read a table with a time column, or split leave-one-out"
    )
    with pytest.raises(DataError, match="no training sample"):
        split_global_time(oracle.dataset([[1, 2, 3]], [[5, 5, 5]]))
    for fractions in ((0.0, 0.1), (0.5, 0.5), (1.5, 0.1), (float("nan"), 0.1)):
        with pytest.raises(ValueError, match="valid_fraction, test_fraction"):
            split_global_time(oracle.dataset([[1, 2, 3]], [[1, 2, 3]]), *fractions)


@pytest.fixture
def split() -> SequenceSplit:
    generator = torch.Generator().manual_seed(0)
    users = [list(zip(range(12), torch.randint(0, 1000, (12,), generator=generator).tolist(), strict=True)) for _ in range(20)]
    return split_global_time(timed(users), 0.2, 0.2)


def test_each_leak_is_found(split: SequenceSplit) -> None:
    train, valid, test = split.train, split.valid, split.test
    assert valid.target is not None
    assert test.target is not None
    assert not any(leaks(split).values())
    everything = split.train.dataset.offsets[train.user + 1]

    found = leaks(replace(split, train=replace(train, end=everything)))
    assert found["training_after_cut"] == int((everything - train.end).sum()) > 0
    assert found["targets_in_training"] > 0

    one = train.end.clone()
    user = int(test.user[0])
    position = train.user.tolist().index(user)
    one[position] = test.target[0] + 1
    found = leaks(replace(split, train=replace(train, end=one)))
    assert found["targets_in_training"] == 1 + int(user in valid.user.tolist())

    found = leaks(replace(split, test=replace(test, end=test.target + 1)))
    assert found["targets_in_history"] == len(test)
    assert {name for name, count in found.items() if count} == {"targets_in_history"}

    shared = [i for i, user in enumerate(test.user.tolist()) if user in valid.user.tolist()]
    twice = torch.tensor(shared)
    found = leaks(
        replace(split, test=SequencePart(test.dataset, *(t[twice] for t in (valid.user, valid.start, valid.end, valid.target))))
    )
    assert found["targets_in_both"] == len(shared)

    double = torch.cat([torch.arange(len(test)), torch.tensor([0, 0, 1])])
    parts = (test.user, test.start, test.end, test.target)
    found = leaks(replace(split, test=SequencePart(test.dataset, *(t[double] for t in parts))))
    assert found["duplicated_users"] == 3

    found = leaks(replace(split, valid=replace(valid, user=valid.user.roll(1))))
    assert found["foreign_events"] == len(valid)

    found = leaks(replace(split, valid=replace(valid, target=valid.start)))
    assert found["history_after_target"] > 0


def test_items_that_training_does_not_have_are_told() -> None:
    # Items 5 and 7 are held out of all users, 6 is in the training events of a user with too few.
    split = split_leave_one_out(oracle.dataset([[1, 2, 3, 5], [2, 1, 7, 2], [3, 1, 7, 5], [6]]))
    assert split.items.ids.to_pylist() == [1, 2, 3]
    assert split.test.sample(1, 0).numbers is split.test.numbers is not None
    assert not any(leaks(split).values())
    found = leaks(split.numbered(None))
    assert {name: count for name, count in found.items() if count} == {"unsupported_items": 3}
    tampered = split.test.numbers.clone()
    tampered[(tampered < 0).nonzero()[0]] = 3
    found = leaks(replace(split, test=replace(split.test, numbers=tampered)))
    assert {name: count for name, count in found.items() if count} == {"unsupported_items": 1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"user": torch.tensor([9])}, "user: got 9 to 9"),
        ({"user": torch.tensor([0, 0])}, "start: got torch.int64"),
        ({"start": torch.tensor([-1])}, "0 <= start <= end <= 3"),
        ({"end": torch.tensor([4])}, "0 <= start <= end <= 3"),
        ({"start": torch.tensor([3])}, "0 <= start <= end <= 3"),
        ({"end": torch.tensor([2], dtype=torch.int32)}, "end: got torch.int32"),
        ({"target": torch.tensor([3])}, "target: got 3 to 3"),
        ({"numbers": torch.tensor([0, 1])}, r"numbers: got torch.int64 \(2,\), expected int64 \[3\] of -1 or more"),
        ({"numbers": torch.tensor([0, 1, -2])}, r"numbers: got torch.int64 \(3,\), expected int64 \[3\] of -1 or more"),
    ],
)
def test_a_part_out_of_range_is_refused(change: dict[str, torch.Tensor], message: str) -> None:
    part = {"user": torch.tensor([0]), "start": torch.tensor([0]), "end": torch.tensor([2])}
    with pytest.raises(ValueError, match=message):
        SequencePart(oracle.dataset([[1, 2, 3]]), **{**part, **change})


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 5))))
def test_ranges(pairs: list[tuple[int, int]]) -> None:
    got = ranges(torch.tensor([s for s, _ in pairs], dtype=torch.int64), torch.tensor([n for _, n in pairs], dtype=torch.int64))
    assert got.tolist() == [s + i for s, n in pairs for i in range(n)]


@hypothesis.settings(max_examples=20)
@given(USERS, st.integers(1, 7))
def test_counting_in_pieces_is_counting_at_once(users: list[list[tuple[int, int]]], size: int) -> None:
    dataset = timed(users)
    part = split_leave_one_out(dataset).train
    whole = part.item_counts()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(splits_module, "_CHUNK", size)
        assert torch.equal(part.item_counts(), whole)
