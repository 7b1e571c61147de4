from __future__ import annotations

from datetime import timedelta

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jagged.data import DataError, histories
from jagged.data.histories import fill_views, spread, visible
from jagged.data.records import Dataset
from jagged.data.schema import Column, Kind, Schema
from tests.conftest import EXAMPLES
from tests.data import brute_force as slow
from tests.data.points import SCHEMA, arrow, tables

EVENTS = Schema((Column("user", Kind.USER), Column("item", Kind.CANDIDATE), Column("time", Kind.TIME)))


@settings(max_examples=EXAMPLES // 2)
@given(rows=tables(), delay=st.integers(0, 4), before=st.booleans())
def test_a_row_knows_what_the_definition_says(rows: list[slow.Row], delay: int, before: bool) -> None:
    ties = "before" if before else "out"
    delay = 0 if before else delay
    dataset = Dataset.from_table(arrow(rows), SCHEMA, history="events", history_delay=delay, ties=ties, progress=False)
    kept = slow.without_duplicates(rows)
    source = dataset.source.tolist()
    for place, row in enumerate(source):
        found = source[dataset.start[place] : dataset.stop[place]]
        assert found == slow.history(rows, kept, row, delay, ties)


@settings(max_examples=EXAMPLES // 2)
@given(
    users=st.lists(st.tuples(st.integers(-1, 3), st.integers(0, 5)), max_size=30),
    delay=st.integers(0, 3),
    before=st.booleans(),
    size=st.integers(1, 8),
)
def test_views_do_not_depend_on_how_many_rows_are_looked_at_together(
    users: list[tuple[int, int]], delay: int, before: bool, size: int
) -> None:
    log = np.array(sorted(users), dtype=np.int64).reshape(-1, 2)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        for together in (1 << 21, size):
            patch.setattr(histories, "_ROWS", together)
            start, stop = np.zeros((2, len(log)), dtype=np.int64)
            options = {"ties": "before"} if before else {"delay": delay}
            fill_views(log[:, 0].astype(np.int32), log[:, 1], start, stop, **options)  # type: ignore[arg-type]
            rows = np.arange(0, len(log), 2)
            found.append((start.tolist(), stop.tolist(), visible(start, stop, rows, len(log)).tolist()))
    assert found[0] == found[1]
    start, stop, seen = found[0]
    assert [i for i, one in enumerate(seen) if one] == sorted(
        {j for i in range(0, len(log), 2) for j in range(start[i], stop[i])}
    )


@pytest.mark.parametrize("delay", [0, 1, 5, 2**63 - 1, 2**70])
def test_times_at_the_ends_of_their_range(delay: int) -> None:
    times = [-(2**63), -(2**63) + 1, 0, 2**63 - 2, 2**63 - 1]
    table = pa.table({"user": [1] * 5, "item": list("abcde"), "time": times})
    dataset = Dataset.from_table(table, EVENTS, history="events", history_delay=delay, progress=False)
    assert dataset.stop.tolist() == [sum(other < time - delay for other in times) for time in times]


def test_an_event_at_the_rows_time_and_one_from_the_future_are_not_found() -> None:
    ordinary = [{"user": 1, "item": f"i{time}", "time": time} for time in (1, 2, 3)]
    planted = [
        {"user": 1, "item": "now", "time": 10},
        {"user": 1, "item": "future", "time": 11},
        {"user": 1, "item": "far", "time": 2**60},
    ]
    row = {"user": 1, "item": "row", "time": 10}
    for rows in ([*planted, *ordinary, row], [row, *ordinary, *planted], [*ordinary, row, *planted[::-1]]):
        table = pa.table({name: [one[name] for one in rows] for name in row})
        dataset = Dataset.from_table(table, EVENTS, history="events", progress=False)
        ids = dataset.ids("item").ids.to_pylist()
        items = [ids[code] for code in dataset.column("item")]
        place = items.index("row")
        assert items[dataset.start[place] : dataset.stop[place]] == ["i1", "i2", "i3"]


def test_events_of_another_table_are_those_of_the_rows_user() -> None:
    rows = pa.table({"user": [5, 4, 9, 4], "item": list("abcd"), "time": [30, 25, 40, 10]})
    # Users and times are other numbers in another order.
    events = pa.table({"user": [4, 5, 4, 5, 7], "item": list("wxyzv"), "time": [20, 12, 9, 31, 1]})
    dataset = Dataset.from_table(rows, EVENTS, events=events, progress=False)
    ids = dataset.ids("item").ids.to_pylist()
    shown = [ids[code] for code in dataset.events.table.column("item")]
    rows_in_order = [ids[code] for code in dataset.column("item")]
    views = {row: shown[start:stop] for row, start, stop in zip(rows_in_order, dataset.start, dataset.stop, strict=True)}
    assert views == {"a": ["x"], "b": ["y", "w"], "c": [], "d": ["y"]}


def test_a_delay_of_calendar_times() -> None:
    times = pa.array([0, 59, 60, 61, 120], pa.timestamp("s"))
    table = pa.table({"user": [1] * 5, "item": list("abcde"), "time": times})
    delay = timedelta(minutes=1)
    dataset = Dataset.from_table(table, EVENTS, history="events", history_delay=delay, progress=False)
    assert dataset.stop.tolist() == [0, 0, 0, 1, 2]
    numbers = pa.table({"user": [1], "item": ["a"], "time": [3]})
    with pytest.raises(DataError) as caught:
        Dataset.from_table(numbers, EVENTS, history="events", history_delay=delay, progress=False)
    assert str(caught.value) == (
        "Table: history_delay: found datetime.timedelta(seconds=60) with times that are numbers, "
        "expected a number in the times' own unit"
    )


def test_nothing_of_a_view_is_copied() -> None:
    rows = 3_000
    table = pa.table({"user": [1] * rows, "item": list(range(rows)), "time": list(range(rows))})
    dataset = Dataset.from_table(table, EVENTS, history="events", progress=False)
    assert dataset.counts["events in histories"] == rows * (rows - 1) // 2
    assert sum(path.stat().st_size for path in dataset.directory.iterdir()) < 200 * rows


def test_ranges_are_spread() -> None:
    assert spread(np.array([5, 0, 9]), np.array([2, 0, 3])).tolist() == [5, 6, 9, 10, 11]
    assert spread(np.zeros(0, np.int64), np.zeros(0, np.int64)).tolist() == []
