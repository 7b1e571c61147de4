"""What must not be in a split of a table: rows and requests in two parts, histories that reach too far."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from jagged.data.records import PARTS, Dataset
from jagged.data.schema import Kind

IntArray = npt.NDArray[np.int64]
PartArray = npt.NDArray[np.int8]

#: Of each leak that many are told.
NAMED = 3
# Rows whose histories are looked at together.
_ROWS = 1 << 20


@dataclass(frozen=True)
class Leaks:
    """What `Split.leaks` found: counts, and the first few of each, by name."""

    counts: dict[str, int]
    examples: dict[str, list[str]]

    def add(self, name: str, rows: IntArray, dataset: Dataset) -> None:
        """Put down rows of a dataset, by their numbers in its source."""
        self.counts[name] = len(rows)
        self.examples[name] = [f"row {dataset.source[row]} of the source, from 0" for row in rows[:NAMED]]

    def __bool__(self) -> bool:
        return any(self.counts.values())

    def __str__(self) -> str:
        width = max(map(len, self.counts))
        return "\n".join(
            f"{name:<{width}}  {count:>9,}" + (f"  ({'; '.join(self.examples[name])})" if count else "")
            for name, count in self.counts.items()
        )


def rows_across(dataset: Dataset, part: PartArray) -> IntArray:
    """Rows whose user, candidate and time a row of an earlier part has too; `part` is that of each row, -1 for none."""
    candidate, time, user = (dataset.one(kind) for kind in (Kind.CANDIDATE, Kind.TIME, Kind.USER))
    if not len(part) or candidate is None or time is None or user is None:
        return np.zeros(0, np.int64)
    # Rows are in the order of user and time, so only neighbours can have both alike.
    alike = np.zeros(len(part) + 1, dtype=np.bool_)
    alike[1:-1] = (user[1:] == user[:-1]) & (time[1:] == time[:-1])
    rows = np.flatnonzero((alike[1:] | alike[:-1]) & (part >= 0) & (candidate >= 0) & (user >= 0))
    rows = rows[np.lexsort((candidate[rows], time[rows], user[rows]))]
    if not len(rows):
        return rows
    differs = np.zeros(len(rows) - 1, dtype=np.bool_)
    for values in (candidate, time, user):
        differs |= values[rows[1:]] != values[rows[:-1]]
    begins = np.flatnonzero(np.append(True, differs))
    first = np.repeat(np.minimum.reduceat(part[rows], begins), np.diff(np.append(begins, len(rows))))
    return np.sort(rows[part[rows] > first])


def requests_across(dataset: Dataset, part: PartArray) -> IntArray:
    """The first row of each request with rows in several parts."""
    requests = dataset.one(Kind.REQUEST)
    if requests is None:
        return np.zeros(0, np.int64)
    rows = np.flatnonzero((part >= 0) & (requests >= 0))
    _, first, which = np.unique(requests[rows], return_index=True, return_inverse=True)
    lowest, highest = np.full(len(first), len(PARTS), np.int8), np.full(len(first), -1, np.int8)
    np.minimum.at(lowest, which, part[rows])
    np.maximum.at(highest, which, part[rows])
    return np.sort(rows[first[lowest < highest]])


def too_late(dataset: Dataset) -> IntArray:
    """Rows whose history has an event that they may not know."""
    log = dataset.events
    if log is None:
        return np.zeros(0, np.int64)
    assert dataset.history is not None
    late = []
    for begin in range(0, len(dataset), _ROWS):
        if begin:
            # Mapped anew, the pages of rows that were looked at do not count.
            dataset.release()
            log.table.release()
        user, time = dataset.one(Kind.USER), dataset.one(Kind.TIME)
        # There are no histories without them.
        assert user is not None
        assert time is not None
        event_user, event_time = log.table.column(log.user), log.table.column(log.time)
        start, stop = dataset.start[begin : begin + _ROWS], dataset.stop[begin : begin + _ROWS]
        some = np.flatnonzero(stop > start)
        rows, first, last = some + begin, log.rows(start[some]), log.rows(stop[some] - 1)
        known = (event_user[first] == user[rows]) & (event_user[last] == user[rows])
        if log.is_own:
            known &= last < rows
        if dataset.history["ties"] == "before":
            known &= event_time[last] <= time[rows]
        else:
            # Of times in order the difference cannot be negative; as uint64 it has a place.
            apart = time[rows].astype(np.uint64) - event_time[last].astype(np.uint64)
            known &= (event_time[last] < time[rows]) & (apart > min(dataset.history["delay"], 2**64 - 1))
        late.append(rows[~known])
    return np.concatenate(late) if late else np.zeros(0, np.int64)
