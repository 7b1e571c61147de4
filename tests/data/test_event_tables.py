"""Histories that are gathered from a table of events beside the rows, against the slow definition of them."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import event as noted
from hypothesis import given, settings
from hypothesis import strategies as st

from jagged.data import DataError
from jagged.data.records import Dataset
from jagged.data.schema import Column, Kind, Schema
from tests.conftest import EXAMPLES
from tests.data import brute_force as slow
from tests.data.points import SCHEMA, arrow, or_none, tables

#: Users, items and types are those of the rows by their kind, `place` by its name; the rest is the events' own.
TYPES = {
    "who": pa.int64(),
    "what": pa.string(),
    "at": pa.int64(),
    "type": pa.string(),
    "place": pa.int64(),
    "shop": pa.string(),
    "price": pa.float64(),
    "dwell": pa.float64(),
    "tags": pa.list_(pa.string()),
    "strength": pa.float64(),
    "bought": pa.int64(),
}
EVENTS = Schema(
    (
        Column("who", Kind.USER),
        Column("what", Kind.CANDIDATE),
        Column("at", Kind.TIME),
        Column("type", Kind.EVENT),
        Column("place", Kind.ID),
        Column("shop", Kind.ID),
        Column("price", Kind.NUMBER),
        Column("dwell", Kind.NUMBER),
        Column("tags", Kind.IDS),
        Column("strength", Kind.WEIGHT),
        Column("bought", Kind.LABEL),
    )
)
DRAWN = {
    "who": st.sampled_from([7, 7, 7, -3, 2**62, None]),
    "what": or_none(st.sampled_from("abef")),
    "at": st.integers(-3, 6),
    "type": or_none(st.sampled_from(["view", "buy", "cart"])),
    "place": or_none(st.integers(1, 4)),
    "shop": or_none(st.sampled_from("pq")),
    "price": or_none(st.sampled_from([0.1, 7.5])),
    "dwell": or_none(st.sampled_from([1.0, 2.5])),
    "tags": or_none(st.lists(or_none(st.sampled_from("xyz")), max_size=3)),
    "strength": st.sampled_from([0.0, 0.5, 3.0]),
    "bought": or_none(st.integers(0, 1)),
}
#: The tables of ids: the columns of the rows, and those of the events.
TABLES: dict[str, tuple[list[str], list[str]]] = {
    "user": (["user"], ["who"]),
    "item": (["item", "items"], ["what"]),
    "place": (["place"], ["place"]),
    "kind": (["kind"], ["type"]),
    "shop": ([], ["shop"]),
    "tags": ([], ["tags"]),
}
SHOWN = ("what", "type", "place", "shop", "tags")


@st.composite
def events_of(draw: st.DrawFn) -> list[slow.Row]:
    """Events in any order of time, some of them twice."""
    values = dict(DRAWN)
    if draw(st.booleans()):
        values["who"] = st.just(7)
    rows = draw(st.lists(st.fixed_dictionaries(values), min_size=draw(st.sampled_from([0, 8, 8])), max_size=14))
    for _ in range(draw(st.integers(0, 2)) if rows else 0):
        rows.insert(draw(st.integers(0, len(rows))), dict(draw(st.sampled_from(rows))))
    return rows


def events_table(events: Sequence[slow.Row]) -> pa.Table:
    return arrow(list(events), TYPES)


def made(rows: Sequence[slow.Row], events: Any, schema: Schema = SCHEMA, **options: Any) -> Dataset:
    events = events_table(events) if isinstance(events, list) else events
    return Dataset.from_table(
        arrow(list(rows)), schema, events=events, event_schema=options.pop("event_schema", EVENTS), progress=False, **options
    )


def counts_of(rows: Sequence[slow.Row], places: Sequence[int], columns: Sequence[str]) -> Counter[Any]:
    counts: Counter[Any] = Counter()
    for column in columns:
        for i in places:
            value = rows[i][column]
            counts.update(one for one in (value if isinstance(value, list) else [value]) if one is not None)
    return counts


def listed(value: Any) -> list[Any]:
    """A list as a batch has it: a missing one is a list of one missing id."""
    return value if isinstance(value, list) else [value]


@settings(max_examples=EXAMPLES)
@given(
    rows=tables(least=8),
    events=events_of(),
    delay=st.integers(0, 3),
    types=st.sampled_from([None, None, ("view",), ("buy", "cart")]),
    user=st.sampled_from([0, 0, 1, 2]),
    minimum=st.integers(1, 2),
    latest=st.sampled_from([None, 1, 3]),
)
def test_a_row_knows_of_an_event_table_what_the_definition_says(
    rows: list[slow.Row],
    events: list[slow.Row],
    delay: int,
    types: tuple[str, ...] | None,
    user: int,
    minimum: int,
    latest: int | None,
) -> None:
    least = {"user": user} if user else {}
    kept = slow.core(rows, slow.without_duplicates(rows), least)
    distinct = slow.without_duplicates(events)
    options: dict[str, Any] = {"history_delay": delay, "event_types": types, "min_events": least or None}
    options |= {"event_lists": ["tags"], "event_labels": ["bought"]}
    if types is not None and any(all(events[i]["type"] != one for i in distinct) for one in types):
        with pytest.raises(DataError, match=r"^events: event_types: found no event of type "):
            made(rows, events, **options)
        return
    dataset = made(rows, events, **options)
    users = {rows[i]["user"] for i in kept} - {None}
    typed = [i for i in distinct if types is None or events[i]["type"] in types]
    known = [i for i in typed if events[i]["who"] in users]
    log = dataset.events
    assert log is not None
    assert sorted(log.table.source.tolist()) == known
    assert dataset.counts["events: rows"] == len(events)
    assert dataset.counts["events: duplicates"] == len(events) - len(distinct)
    assert dataset.counts.get("events: of other types", 0) == len(distinct) - len(typed)
    assert dataset.counts["events: of users without rows"] == len(typed) - len(known)
    assert dataset.counts["events: kept"] == len(known) == len(log)
    source, of_log = dataset.source.tolist(), log.table.source.tolist()
    views = {}
    for place, row in enumerate(source):
        views[row] = of_log[dataset.start[place] : dataset.stop[place]]
        assert views[row] == slow.history_beside(rows[row], events, known, delay)
    ids = {
        name: list(dict.fromkeys([*slow.codes(rows, kept, of_rows), *slow.codes(events, known, of_events)]))
        for name, (of_rows, of_events) in TABLES.items()
    }
    assert {name: dataset.ids(name).ids.to_pylist() for name in dataset.tables} == ids
    train = slow.by_time(rows, kept, 0.2, 0.2)[0]
    if not all(slow.by_time(rows, kept, 0.2, 0.2)):
        return
    noted(f"a split with {'some' if any(views.values()) else 'no'} events in histories")
    split = dataset.split(valid=0.2, test=0.2, minimum_counts=minimum, buckets=3)
    assert sorted(dataset.source[split.train.rows].tolist()) == train
    seen = sorted({event for row in train for event in views[row]})
    numbers = {}
    for name, (of_rows, of_events) in TABLES.items():
        counts = counts_of(rows, train, of_rows) + counts_of(events, seen, [one for one in of_events if one in SHOWN])
        numbers[name] = {None: 0, **slow.numbers(counts, ids[name], minimum)}
        assert split.train.maps[name].tolist() == list(numbers[name].values())
    for name, values in {
        "price": [rows[i]["price"] for i in train] + [events[i]["price"] for i in seen],
        "dwell": [events[i]["dwell"] for i in seen],
    }.items():
        count, missing, mean, _, borders = slow.statistics(values, 3)
        found = split.statistics[name]
        assert (found.count, found.missing, list(found.borders)) == (count, missing, borders)
        assert found.mean == pytest.approx(mean, rel=1e-12)
    leaks = split.leaks()
    assert leaks.counts["histories_too_late"] == leaks.counts["unsupported_ids"] == leaks.counts["unsupported_statistics"] == 0
    for part in (split.train, split.valid, split.test):
        batch = part.gather(np.arange(len(part)), max_history=latest)
        told = [
            views[row] if latest is None else views[row][-latest:] for row in dataset.source[batch.request_index.numpy()].tolist()
        ]
        flat = [events[i] for one in told for i in one]
        history = [key for key in batch.features.keys() if key.startswith("history.")]  # noqa: SIM118 - it is no mapping
        assert history == ["history.what", "history.type", "history.place", "history.shop"]
        for column, table in (("what", "item"), ("type", "kind"), ("place", "place"), ("shop", "shop")):
            assert batch.features[f"history.{column}"].lengths().tolist() == [len(one) for one in told]
            assert batch.features[f"history.{column}"].values().tolist() == [numbers[table][event[column]] for event in flat]
        assert batch.history_weights is not None
        assert batch.history_weights.tolist() == [event["strength"] for event in flat]
        assert batch.history_lists is not None
        tags = batch.history_lists["tags"]
        assert tags.lengths().tolist() == [len(listed(event["tags"])) for event in flat]
        assert tags.values().tolist() == [numbers["tags"][one] for event in flat for one in listed(event["tags"])]
        assert batch.history_times is not None
        assert batch.history_times.tolist() == [event["at"] for event in flat]
        assert batch.history_numbers is not None
        assert batch.history_numbers_missing is not None
        assert batch.history_numbers_missing.tolist() == [[e["price"] is None, e["dwell"] is None] for e in flat]
        want = [
            [np.float32(split.statistics[name].mean if event[name] is None else event[name]) for name in ("price", "dwell")]
            for event in flat
        ]
        assert batch.history_numbers.tolist() == want
        assert batch.history_labels is not None
        assert batch.history_labels.tolist() == [[float(event["bought"] or 0)] for event in flat]


@settings(max_examples=EXAMPLES)
@given(
    rows=tables(least=8),
    delay=st.integers(0, 2),
    before=st.booleans(),
    types=st.sampled_from([("view",), ("buy",), ("view", "buy")]),
    latest=st.sampled_from([None, 1]),
)
def test_types_and_weights_of_the_tables_own_events(
    rows: list[slow.Row], delay: int, before: bool, types: tuple[str, ...], latest: int | None
) -> None:
    rows = [{**row, "price": 0.5 if row["price"] is None else abs(row["price"])} for row in rows]
    kept = slow.without_duplicates(rows)
    ties = "before" if before else "out"
    delay = 0 if before else delay
    options: dict[str, Any] = {"history": "events", "history_delay": delay, "ties": ties, "event_types": types}
    options |= {"event_weights": "price", "event_lists": ["items"], "progress": False}
    if any(all(rows[i]["kind"] != one for i in kept) for one in types):
        with pytest.raises(DataError, match=r"^Table: event_types: found no event of type "):
            Dataset.from_table(arrow(rows), SCHEMA, **options)
        return
    dataset = Dataset.from_table(arrow(rows), SCHEMA, **options)
    views = {
        row: [i for i in slow.history(rows, kept, row, delay, ties) if rows[i]["kind"] in types]
        for row in dataset.source.tolist()
    }
    train = slow.by_time(rows, kept, 0.0, 0.3)[0]
    if not train or not slow.by_time(rows, kept, 0.0, 0.3)[2]:
        return
    split = dataset.split(valid=0.0, test=0.3, buckets=3)
    seen = sorted({*train, *(event for row in train for event in views[row])})
    ids = slow.codes(rows, kept, ["item", "items"])
    counts = counts_of(rows, seen, ["item", "items"])
    numbers = {None: 0, **slow.numbers(counts, ids, 1)}
    assert split.train.maps["item"].tolist() == list(numbers.values())
    assert not any(split.leaks().counts[name] for name in ("histories_too_late", "unsupported_ids", "unsupported_statistics"))
    for part in (split.train, split.test):
        batch = part.gather(np.arange(len(part)), max_history=latest)
        told = [
            views[row] if latest is None else views[row][-latest:] for row in dataset.source[batch.request_index.numpy()].tolist()
        ]
        flat = [rows[i] for one in told for i in one]
        assert batch.features["history.item"].lengths().tolist() == [len(one) for one in told]
        assert batch.features["history.item"].values().tolist() == [numbers[event["item"]] for event in flat]
        assert batch.history_weights.tolist() == [slow.single(event["price"]) for event in flat]
        assert batch.history_lists is not None
        assert batch.history_lists["items"].lengths().tolist() == [len(listed(event["items"])) for event in flat]
        assert batch.history_lists["items"].values().tolist() == [numbers[one] for e in flat for one in listed(e["items"])]


ROWS = [
    {"user": 7, "item": "a", "time": time, "request": None, "place": 1, "kind": "view", "items": [], "price": 1.0, "sizes": [],
     "click": time % 2}
    for time in range(100, 110)
]  # fmt: skip
NAMES = tuple(TYPES)


def event(**values: Any) -> slow.Row:
    return {**dict.fromkeys(NAMES), "who": 7, "what": "a", "at": 50, "type": "view", "strength": 1.0, **values}


def test_an_event_later_than_the_training_rows_trains_nothing() -> None:
    # The last training row is of time 107; its own moment is out, and so is what comes later.
    events = [event(what=f"i{time}", at=time, price=float(time)) for time in (99, 106, 107, 108, 500)]
    split = made(ROWS, events).split(valid=0.1, test=0.1)
    assert split.counts["valid_time"] == 108
    item = split.encoders["item"]
    assert item.ids is not None
    assert item.ids.ids.to_pylist() == ["a", "i99", "i106"]
    assert split.statistics["price"].count == 8 + 2
    assert split.statistics["price"].mean == pytest.approx((8 * 1.0 + 99 + 106) / 10)
    batch = split.test.gather([0])
    assert batch.features["history.what"].values().tolist() == [3, 4, 1, 1]


@pytest.mark.parametrize(
    ("units", "times", "found"),
    [
        (("s", "ms"), [99_999, 100_000, 104_999, 105_000], [99, 100, 104, 105]),
        (("s", "ms"), [-1, -1000, -1001], [-1, -1, -2]),
        (("ms", "s"), [0, -1], [999, -1]),
        (("us", "us"), [3], [3]),
        (("s", "ns"), [10**9 - 1, 10**9], [0, 1]),
    ],
)
def test_times_of_another_unit_are_converted_where_both_are_named(
    units: tuple[str, str], times: list[int], found: list[int]
) -> None:
    dataset = made(ROWS, [event(at=time) for time in times], time_units=units)
    assert dataset.events is not None
    by_source = dict(zip(dataset.events.table.source.tolist(), dataset.events.table.column("at").tolist(), strict=True))
    assert [by_source[i] for i in range(len(times))] == found


def test_a_second_is_over_when_an_event_of_it_is_known() -> None:
    rows = [{**ROWS[0], "time": time} for time in (2000, 2500, 2999, 3000)]
    dataset = made(rows, [event(at=2)], time_units=("ms", "s"))
    assert (dataset.stop - dataset.start).tolist() == [0, 0, 0, 1]
    # In the finer unit milliseconds within a second keep their order.
    dataset = made(ROWS, [event(at=50_900, what="z"), event(at=50_100, what="y")], time_units=("s", "ms"))
    assert dataset.events is not None
    assert dataset.events.table.source.tolist() == [1, 0]


SECONDS = 1_700_000_000


@pytest.mark.parametrize(
    ("rows", "events", "message"),
    [
        (
            SECONDS, SECONDS * 1000,
            "events: column 'at': found times as 1700000000000, by their size milliseconds, expected seconds, as 1700000000 in "
            'column "time" of Table; name both units, as time_units=("s", "ms") where the rows are in seconds and the events in '
            "milliseconds",
        ),
        (
            SECONDS, 20_000,
            "events: column 'at': found times as 20000, by their size numbers below 100,000,000, expected seconds, as "
            '1700000000 in column "time" of Table; name both units, as time_units=("s", "ms") where the rows are in seconds and '
            "the events in milliseconds",
        ),
    ],
)  # fmt: skip
def test_times_of_two_units_are_refused(rows: int, events: int, message: str) -> None:
    with pytest.raises(DataError) as caught:
        made([{**ROWS[0], "time": rows}], [event(at=events)])
    assert str(caught.value) == message.replace('column "time"', "'time'")
    assert len(made([{**ROWS[0], "time": rows}], [event(at=events)], time_units=("s", "s"))) == 1


def test_numbers_of_one_range_are_of_one_unit_whatever_their_size() -> None:
    rows = [{**ROWS[0], "time": time} for time in (0, 2 * 10**8, 3 * 10**8)]
    dataset = made(rows, [event(at=10**7)])
    assert (dataset.stop - dataset.start).tolist() == [0, 1, 1]


def test_calendar_times_beside_numbers_are_refused() -> None:
    table = events_table([event()])
    for kind, found in (
        (pa.timestamp("s"), "calendar times without a zone"),
        (pa.timestamp("s", "UTC"), "calendar times with a zone"),
    ):
        calendar = table.set_column(2, "at", pa.array([5], kind))
        with pytest.raises(DataError) as caught:
            made(ROWS, calendar)
        assert str(caught.value) == (
            f"events: column 'at': found {found}, expected times that are numbers, as those of Table in 'time'; "
            "convert one of the two columns"
        )
    with pytest.raises(DataError) as caught:
        Dataset.from_table(
            arrow(ROWS).set_column(2, "time", pa.array(range(10), pa.timestamp("s"))),
            SCHEMA,
            events=table.set_column(2, "at", pa.array([5], pa.timestamp("s"))),
            event_schema=EVENTS,
            time_units=("s", "s"),
            progress=False,
        )
    assert str(caught.value) == (
        "events: time_units: found calendar times without a zone, expected times that are numbers; leave time_units out"
    )


def test_a_time_that_has_no_place_in_the_rows_unit_is_named() -> None:
    with pytest.raises(DataError) as caught:
        made(ROWS, [event(at=2**62)], time_units=("ms", "s"))
    assert str(caught.value) == (
        f"events:row 0: found '{2**62}' in the column 'at', expected a whole number in the int64 range that has a place in int64 "
        'in ms; correct it, or leave such rows out with on_error="skip"'
    )


def without(kind: Kind) -> Schema:
    return Schema(tuple(one for one in EVENTS.columns if one.kind is not kind))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"event_schema": without(Kind.CANDIDATE)},
            "events: events=: found no column of kind candidate, expected one; name it in the schema",
        ),
        (
            {"schema": Schema(SCHEMA.columns[1:])},
            "Table: events=: found no column of kind user, expected one; name it in the schema",
        ),
        (
            {"event_schema": without(Kind.EVENT), "event_types": "view"},
            "events: event_types: found no column of kind event, expected one; name it in the schema",
        ),
        ({"event_types": ("view", "by")}, "events: event_types: found no event of type 'by', expected of ['view']"),
        ({"event_lists": ["place"]}, "events: event_lists: found 'place', expected lists of ids: ['tags']"),
        ({"event_labels": ["click"]}, "events: event_labels: found 'click', expected labels: ['bought']"),
        (
            {"event_weights": "what"},
            "events: event_weights: found 'what', expected columns of kind number or weight: ['price', 'dwell', 'strength']",
        ),
        (
            {"event_weights": "price"},
            "events:row 0: found no value in the column 'price', expected a finite number from 0 on, as of a weight of events; "
            'correct it, or leave such rows out with on_error="skip"',
        ),
        (
            {"event_schema": Schema((Column("who", Kind.USER, table="w"), *EVENTS.columns[1:]))},
            "events: column 'who': found the table 'w', expected 'user', as of the rows' user 'user'; leave table out",
        ),
        (
            {"event_schema": Schema((*EVENTS.columns[:4], Column("place", Kind.ID, encoding="hash", size=9)))},
            """schema, table 'place': found the encodings ["('hash', 9)", "('vocabulary', None)"], expected one""",
        ),
    ],
)  # fmt: skip
def test_events_that_do_not_fit_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as caught:
        made(ROWS, [event()], **options)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"ties": "before"},
            "ties='before' with events=: rows and events of one time stand in two tables, without an order; leave it out",
        ),
        ({"event_types": ()}, "event_types: got (), expected types of events, as texts or whole numbers"),
        ({"event_types": (1.5,)}, "event_types: got (1.5,), expected types of events, as texts or whole numbers"),
        (
            {"time_units": ("s", "h")},
            "time_units: got ('s', 'h'), expected the units of the rows' and of the events' times, each one of s, ms, us, ns",
        ),
        (
            {"events": None, "event_schema": None, "time_units": ("s", "s")},
            "time_units: given without events=, whose times they compare with the rows'",
        ),
        ({"events": None}, "event_schema, event_words: given without events=, which they are for"),
    ],
)
def test_options_out_of_range_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole message is compared
        made(ROWS, **{"events": [event()], **options})
    assert str(caught.value) == message


def test_files_keep_their_places_and_words_find_what_is_inferred(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("member,movie_id,ts,click,genre\n1,a,100,1,x\n2,b,200,0,y\n")
    (tmp_path / "log.csv").write_text("ts,member,film,genre,weight,is_buy\n50,1,b,y,0.5,1\n60,1,c,z,2,0\n70,3,c,z,1,0\n")
    options: dict[str, Any] = {"user": "member", "progress": False, "events": tmp_path / "log.csv"}
    dataset = Dataset.from_table(tmp_path / "rows.csv", event_words={"candidate": "film"}, **options)
    log = dataset.events
    assert log is not None
    assert {one.name: (one.kind.value, one.table) for one in log.table.schema.columns} == {
        "ts": ("time", None), "member": ("user", "member"), "film": ("candidate", "movie_id"), "genre": ("id", "genre"),
        "weight": ("weight", None), "is_buy": ("label", None),
    }  # fmt: skip
    assert log.weights == "weight"
    assert dataset.ids("movie_id").ids.to_pylist() == ["a", "b", "c"]
    assert dataset.ids("genre").ids.to_pylist() == ["x", "y", "z"]
    assert dataset.ids("member").ids.to_pylist() == [1, 2]
    assert (dataset.stop - dataset.start).tolist() == [2, 0]
    (tmp_path / "log.csv").write_text("ts,member,film,genre,weight,is_buy\n50,1,b,y,0.5,1\n60,1,c,z,-2,0\n")
    with pytest.raises(DataError) as caught:
        Dataset.from_table(tmp_path / "rows.csv", event_words={"candidate": "film"}, **options)
    assert str(caught.value) == (
        f"{tmp_path / 'log.csv'}:3: found '-2' in the column 'weight', expected a finite number from 0 on; "
        'correct it, or leave such rows out with on_error="skip"'
    )
    (tmp_path / "log.csv").write_text("ts,member,film\n50,1\n")
    with pytest.raises(DataError, match=rf"^{tmp_path / 'log.csv'}:2: found 2 fields in .*, expected 3 as in the header$"):
        Dataset.from_table(tmp_path / "rows.csv", event_words={"candidate": "film"}, **options)


def test_ids_of_two_types_are_one(tmp_path: Path) -> None:
    pq.write_table(pa.table({"user_id": [1, 2], "item_id": [10, 11], "timestamp": [5, 6]}), tmp_path / "rows.parquet")
    (tmp_path / "log.csv").write_text("user_id,item_id,timestamp\n1,11,1\n2,12,2\n")
    dataset = Dataset.from_table(tmp_path / "rows.parquet", events=tmp_path / "log.csv", progress=False)
    assert dataset.ids("item_id").ids.to_pylist() == [10, 11, 12]
    assert (dataset.stop - dataset.start).tolist() == [1, 1]


def test_bad_events_are_skipped_and_named() -> None:
    events = [event(at=i, strength=-1.0 if i == 3 else 1.0) for i in range(200)]
    dataset = made(ROWS, events, on_error="skip")
    assert dataset.counts["events: bad"] == 1
    assert dataset.bad_places == ["events:row 3: found '-1.0' in the column 'strength', expected a finite number from 0 on"]


def test_a_dataset_with_events_is_kept_opened_saved_and_sent(tmp_path: Path) -> None:
    events = [event(what=f"i{i}", at=i, tags=["x", f"t{i}"]) for i in range(95, 105)]
    dataset = made(ROWS, events, directory=tmp_path / "d", event_lists=["tags"])
    opened = Dataset.load(tmp_path / "d")
    dataset.save(tmp_path / "copy")
    split = dataset.split(valid=0.1, test=0.1)
    want = split.train.collect(np.arange(8)).tensors()
    for other in (opened, Dataset.load(tmp_path / "copy"), pickle.loads(pickle.dumps(dataset))):
        assert other.fingerprint == dataset.fingerprint
        found = other.split(valid=0.1, test=0.1).train.collect(np.arange(8)).tensors()
        assert all(found[name].tolist() == value.tolist() for name, value in want.items())
    for path in sorted((tmp_path / "d").glob("event-*.arrow")):
        raw = path.read_bytes()
        path.write_bytes(raw[:-1])
        with pytest.raises(DataError, match=str(path)):
            Dataset.load(tmp_path / "d")
        path.write_bytes(raw)


def test_views_that_reach_too_far_into_the_events_are_found() -> None:
    dataset = made(ROWS, [event(at=time) for time in range(95, 105)])
    split = dataset.split(valid=0.1, test=0.1)
    stop = dataset.stop.copy()
    stop[2] += 1
    dataset._columns["stop"] = (stop,)
    leaks = split.leaks()
    assert leaks.counts["histories_too_late"] == 1
    assert leaks.examples["histories_too_late"] == ["row 2 of the source, from 0"]


def test_an_event_table_without_rows_has_empty_histories() -> None:
    dataset = made(ROWS, [])
    batch = dataset.split(valid=0.1, test=0.1).train.gather([0, 1])
    assert batch.features["history.what"].lengths().tolist() == [0, 0]


def test_lists_of_numbers_are_no_features_of_events() -> None:
    with pytest.raises(DataError) as caught:
        Dataset.from_table(arrow(ROWS), SCHEMA, history="events", event_lists="sizes", progress=False)
    assert str(caught.value) == "Table: event_lists: found 'sizes', expected lists of ids: ['items']"


def test_what_events_show_tells_datasets_of_equal_files_apart(tmp_path: Path) -> None:
    found = [
        made(ROWS, [event(price=2.0)], **options)
        for options in (
            {},
            {"event_weights": "price"},
            {"event_lists": "tags"},
            {"event_labels": "bought"},
            {"event_types": "view"},
        )
    ]
    # A type alone changes nothing where all events are of it.
    assert len({one.fingerprint for one in found}) == 4
    assert found[0].fingerprint == found[4].fingerprint
    found[0].save(tmp_path / "d")
    with pytest.raises(DataError, match="found another dataset"):
        found[1].save(tmp_path / "d")


def test_a_table_is_its_own_event_table() -> None:
    rows = [{**row, "item": item, "time": 100 + i % 4} for i, (row, item) in enumerate(zip(ROWS, "abcabdeaac", strict=True))]
    beside = Dataset.from_table(arrow(rows), SCHEMA, events=arrow(rows), event_schema=SCHEMA, progress=False)
    own = Dataset.from_table(arrow(rows), SCHEMA, history="events", progress=False)
    assert beside.stop.tolist() == own.stop.tolist()
    want, found = (one.split(valid=0.0, test=0.3).train.collect(np.arange(5)).tensors() for one in (own, beside))
    assert want.keys() == found.keys()
    assert {name for name in want if want[name].tolist() != found[name].tolist()} == set()
