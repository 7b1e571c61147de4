"""Histories as views: which events of its user a row may know, as a range of the event log. Nothing is copied.

The log is a table's rows in the order of (user, time, order in the source). So the events of a user that lie before a moment
follow one another, and two numbers say which they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

TIES = ("out", "before")
# Rows looked at together: some 40 bytes each.
_ROWS = 1 << 21


def fill_views(
    users: npt.NDArray[np.int32],
    times: IntArray,
    start: IntArray,
    stop: IntArray,
    *,
    delay: int = 0,
    ties: str = "out",
    after: Callable[[], None] = lambda: None,
) -> None:
    """Write the view `[start, stop)` of each row of a log into two arrays.

    A view has the events of the row's user whose time is below the row's time less `delay`. With `ties="before"`, which has no
    delay, it also has those of the row's own time that come before the row in the source. Never the row itself. A row without a
    user (-1) sees nothing.

    Args:
        users: int32 `[n]`, ascending.
        times: int64 `[n]`, ascending within a user.
        start, stop: int64 `[n]`, written.
        delay: 0 or more, in the unit of the times.
        ties: "out" or "before".
        after: called when some rows are done.
    """
    for begin, end in _whole_users(users):
        here, moments = users[begin:end], times[begin:end]
        index = np.arange(begin, end)
        begins = np.ones(end - begin, dtype=np.bool_)
        np.not_equal(here[1:], here[:-1], out=begins[1:])
        first = np.maximum.accumulate(np.where(begins, index, begin))
        if ties == "before":
            last = index
        elif delay == 0:
            begins[1:] |= moments[1:] != moments[:-1]
            last = np.maximum.accumulate(np.where(begins, index, begin))
        else:
            last = _first_at(times, first, index, _earlier(moments, delay))
        nobody = here < 0
        start[begin:end] = np.where(nobody, index, first)
        stop[begin:end] = np.where(nobody, index, last)
        after()


def fill_views_beside(
    users: npt.NDArray[np.int32],
    times: IntArray,
    event_users: npt.NDArray[np.int32],
    event_times: IntArray,
    start: IntArray,
    stop: IntArray,
    *,
    delay: int = 0,
    after: Callable[[], None] = lambda: None,
) -> None:
    """Write the views `[start, stop)` of rows into a log that stands beside them.

    A view has the events of the row's user whose time is below the row's time less `delay`. Who has no user (-1) sees nothing.

    Args:
        users, times: int32 and int64 `[n]`, of the rows: users ascending.
        event_users, event_times: int32 and int64 `[m]`, of the log: users ascending, times ascending within a user.
        start, stop: int64 `[n]`, written.
        delay: 0 or more, in the unit of the times.
        after: called when some rows are done.
    """
    for begin in range(0, len(users), _ROWS):
        here, moments = users[begin : begin + _ROWS], times[begin : begin + _ROWS]
        first = np.searchsorted(event_users, here, side="left")
        end = np.where(here < 0, first, np.searchsorted(event_users, here, side="right"))
        start[begin : begin + len(here)] = first
        stop[begin : begin + len(here)] = _first_at(event_times, first, end, _earlier(moments, delay))
        after()


def only(start: IntArray, stop: IntArray, chosen: BoolArray) -> None:
    """Turn views of a log into views of some of its events, in place: of those that are chosen, bool `[n]`."""
    before = np.zeros(len(chosen) + 1, dtype=np.int64)
    np.cumsum(chosen, out=before[1:])
    for begin in range(0, len(start), _ROWS):
        for ends in (start, stop):
            ends[begin : begin + _ROWS] = before[ends[begin : begin + _ROWS]]


def visible(start: IntArray, stop: IntArray, rows: IntArray, events: int) -> BoolArray:
    """Which of the events of a log the views of some rows hold, bool `[events]`."""
    # No more views begin at an event than there are rows.
    kind = np.int32 if len(rows) < 2**31 else np.int64
    change: npt.NDArray[Any] = np.zeros(events + 1, dtype=kind)
    for begin in range(0, len(rows), _ROWS):
        some = rows[begin : begin + _ROWS]
        np.add.at(change, start[some], 1)
        np.subtract.at(change, stop[some], 1)
    np.cumsum(change, dtype=kind, out=change)
    return np.asarray(change[:-1] > 0)


def spread(start: IntArray, lengths: IntArray) -> IntArray:
    """The numbers `start[i], ... start[i] + lengths[i] - 1` of all i in a row, int64 `[sum lengths]`."""
    before = np.cumsum(lengths) - lengths
    return np.asarray(np.arange(int(lengths.sum())) + np.repeat(start - before, lengths))


def _whole_users(users: npt.NDArray[np.int32]) -> Iterator[tuple[int, int]]:
    """Ranges of rows that hold all rows of each of their users."""
    begin = 0
    while begin < len(users):
        end = min(begin + _ROWS, len(users))
        if end < len(users):
            # Back to where its last user begins, or on to where that user ends.
            before = int(np.searchsorted(users, users[end], side="left"))
            end = before if before > begin else int(np.searchsorted(users, users[end], side="right"))
        yield begin, end
        begin = end


def _earlier(times: IntArray, delay: int) -> IntArray:
    lowest = np.iinfo(np.int64).min
    if delay > np.iinfo(np.int64).max:
        return np.full(len(times), lowest)
    # Where the difference has no place in int64 nothing lies before it.
    return np.where(times < lowest + delay, lowest, times - np.int64(delay))


def _first_at(times: IntArray, low: IntArray, high: IntArray, moments: IntArray) -> IntArray:
    """In each range the first event at or after a moment, its end if there is none: bisection in all ranges at once."""
    low, high = low.copy(), high.copy()
    while (open_ := np.flatnonzero(low < high)).size:
        middle = (low[open_] + high[open_]) // 2
        before = times[middle] < moments[open_]
        low[open_[before]] = middle[before] + 1
        high[open_[~before]] = middle[~before]
    return low
