"""The slow definition of a table at points in time: plain Python over rows, written from what the documentation says."""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

Row = dict[str, Any]
Part = list[int]

#: The columns of the tables that tests draw, by what they are for.
SCALAR_IDS = ("user", "item", "place", "kind")
EVENT_IDS = ("item", "place", "kind")


def single(value: float) -> float:
    """A number as float32 holds it."""
    return struct.unpack("f", struct.pack("f", value))[0]


def without_duplicates(rows: Sequence[Row]) -> list[int]:
    """Numbers of the rows that have no equal before them."""
    return [i for i, row in enumerate(rows) if not any(rows[j] == row for j in range(i))]


def core(rows: Sequence[Row], kept: Iterable[int], least: Mapping[str, int]) -> list[int]:
    """Of some rows those whose user and item have enough of them, until none goes."""
    kept = list(kept)
    while True:
        counts = {key: Counter(rows[i][key] for i in kept) for key in least}
        left = [i for i in kept if all(rows[i][key] is not None and counts[key][rows[i][key]] >= n for key, n in least.items())]
        if left == kept:
            return kept
        kept = left


def history(rows: Sequence[Row], kept: Iterable[int], row: int, delay: int, ties: str) -> list[int]:
    """The events that a row may know, oldest first."""
    user, time = rows[row]["user"], rows[row]["time"]
    if user is None:
        return []
    found = [
        i
        for i in kept
        if i != row
        and rows[i]["user"] == user
        and (rows[i]["time"] < time - delay or (ties == "before" and rows[i]["time"] == time and i < row))
    ]
    return sorted(found, key=lambda i: (rows[i]["time"], i))


def may_be_drawn(rows: Sequence[Row], kept: Iterable[int], train: Iterable[int], row: int) -> Counter[Any]:
    """The items that may be a row's negatives, each as often as training had it before the row's time."""
    user, item, time = (rows[row][name] for name in ("user", "item", "time"))
    if item is None:
        return Counter()
    had = {rows[i]["item"] for i in kept if user is not None and rows[i]["user"] == user and rows[i]["time"] <= time}
    before = Counter(rows[i]["item"] for i in train if rows[i]["item"] is not None and rows[i]["time"] < time)
    return Counter({one: count for one, count in before.items() if one not in had and one != item})


def history_beside(row: Row, events: Sequence[Row], kept: Iterable[int], delay: int) -> list[int]:
    """The events of a table beside the rows that a row may know, oldest first."""
    if row["user"] is None:
        return []
    found = [i for i in kept if events[i]["who"] == row["user"] and events[i]["at"] < row["time"] - delay]
    return sorted(found, key=lambda i: (events[i]["at"], i))


def codes(rows: Sequence[Row], kept: Iterable[int], columns: Sequence[str]) -> list[Any]:
    """The ids of columns that share a table, in the order in which they first appear."""
    found: dict[Any, None] = {}
    for i in kept:
        for column in columns:
            value = rows[i][column]
            for one in value if isinstance(value, list) else [value]:
                if one is not None:
                    found.setdefault(one)
    return list(found)


def by_time(rows: Sequence[Row], kept: Sequence[int], valid: float, test: float) -> tuple[Part, Part, Part]:
    """Parts by the times of requests."""

    def moment(i: int) -> int:
        request = rows[i]["request"]
        return max(rows[j]["time"] for j in kept if j == i or (request is not None and rows[j]["request"] == request))

    moments = {i: moment(i) for i in kept}
    ordered = sorted(moments.values())

    def cut(share: float) -> float:
        rank = math.floor(len(kept) * (1 - Fraction(str(share))))
        return ordered[rank] if rank < len(kept) else math.inf

    first, second = cut(round(valid + test, 6)), cut(test)
    return (
        [i for i in kept if moments[i] < first],
        [i for i in kept if first <= moments[i] < second],
        [i for i in kept if moments[i] >= max(first, second)],
    )


def leave_one_out(rows: Sequence[Row], kept: Sequence[int]) -> tuple[Part, Part, Part]:
    """The last request of each user, the one before it, and the rest; a row without a request is one."""
    train, valid, test = [], [], []
    for user in {rows[i]["user"] for i in kept}:
        mine = sorted((i for i in kept if rows[i]["user"] == user), key=lambda i: (rows[i]["time"], i))
        left, taken = list(mine), []
        for _ in range(2):
            if left:
                last = left[-1]
                request = rows[last]["request"]
                taken.append([i for i in left if i == last or (request is not None and rows[i]["request"] == request)])
                left = [i for i in left if i not in taken[-1]]
        if user is None or not left:
            train += mine
        else:
            test += taken[0]
            valid += taken[1]
            train += left
    return sorted(train), sorted(valid), sorted(test)


def seen(rows: Sequence[Row], kept: Sequence[int], train: Part, delay: int, ties: str, *, has_history: bool) -> set[int]:
    """Rows that training sees: its own, and the events in their histories."""
    found = set(train)
    if has_history:
        for i in train:
            found.update(history(rows, kept, i, delay, ties))
    return found


def id_counts(rows: Sequence[Row], train: Iterable[int], events: Iterable[int], columns: Sequence[str]) -> Counter[Any]:
    """How often training has each id of columns that share a table."""
    counts: Counter[Any] = Counter()
    for column in columns:
        for i in events if column in EVENT_IDS else train:
            value = rows[i][column]
            counts.update(one for one in (value if isinstance(value, list) else [value]) if one is not None)
    return counts


def numbers(counts: Counter[Any], ids: Sequence[Any], minimum: int) -> dict[Any, int]:
    """The number of each id: 2, 3, ... of those that training has often enough, in the order of the ids; 1 of the rest."""
    often = [one for one in ids if counts[one] >= minimum]
    return {one: 2 + often.index(one) if one in often else 1 for one in ids}


def statistics(values: Iterable[float | None], buckets: int) -> tuple[int, int, float, float, list[float]]:
    """Count, missing, mean, deviation and borders of numbers."""
    values = list(values)
    present = sorted(single(value) for value in values if value is not None and not math.isnan(value))
    missing = len(values) - len(present)
    if not present:
        return 0, missing, 0.0, 0.0, []
    mean = math.fsum(present) / len(present)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in present) / len(present))
    borders = sorted({present[len(present) * i // buckets] for i in range(1, buckets)})
    return len(present), missing, mean, deviation, borders
