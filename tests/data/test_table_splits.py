from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jagged.data import DataError
from jagged.data.encoding import Encoders
from jagged.data.records import Dataset
from jagged.data.schema import Column, Kind, Schema
from jagged.data.table_batches import Part
from jagged.data.table_splits import Split, split_rows
from tests.conftest import EXAMPLES
from tests.data import brute_force as slow
from tests.data.points import EXAMPLE, SCHEMA, arrow, made, table_of, tables

TABLES = {"user": ["user"], "item": ["item", "items"], "place": ["place"], "kind": ["kind"]}


def sources(part: Part) -> list[int]:
    """A part's rows by their numbers in the source."""
    return sorted(part.dataset.source[part.rows].tolist())


def check(split: Split, rows: Sequence[slow.Row], kept: list[int], has_history: bool, delay: int, minimum: int) -> None:
    """Every vocabulary and statistic is what the slow definition says of the training rows."""
    train = sources(split.train)
    seen = slow.seen(rows, kept, train, delay, "out", has_history=has_history)
    for table, columns in TABLES.items():
        ids = slow.codes(rows, kept, columns)
        counts = slow.id_counts(rows, train, seen, columns)
        want = slow.numbers(counts, ids, minimum)
        encoder = split.encoders[table]
        assert split.train.maps[table].tolist() == [0, *want.values()]
        assert encoder.distinct == sum(count > 0 for count in counts.values())
        unseen = sum(counts[one] for one in ids if want[one] == 1)
        assert encoder.counts.tolist() == [0, unseen, *(counts[one] for one in ids if want[one] > 1)]
    values = {"price": [rows[i]["price"] for i in seen]}
    values["sizes"] = [one for i in train for one in ([None] if rows[i]["sizes"] is None else rows[i]["sizes"])]
    for name, numbers in values.items():
        found, (count, missing, mean, deviation, borders) = split.statistics[name], slow.statistics(numbers, split.buckets)
        assert (found.count, found.missing, list(found.borders)) == (count, missing, borders)
        assert found.mean == pytest.approx(mean, rel=1e-12)
        assert found.deviation == pytest.approx(deviation, rel=1e-9)
    leaks = split.leaks()
    assert leaks.counts["histories_too_late"] == leaks.counts["unsupported_ids"] == leaks.counts["unsupported_statistics"] == 0


def test_a_split_by_user_keeps_users_whole() -> None:
    dataset = made(table_of(100), history="events")
    split = dataset.split("user", valid=0.25, test=0.25, seed=3)
    users = [set(dataset.column("user")[part.rows].tolist()) for part in (split.train, split.valid, split.test)]
    assert [len(one) for one in users] == [4, 2, 2]
    assert len(set.union(*users)) == 8
    check(split, table_of(100), list(range(100)), True, 0, 1)
    again, other = dataset.split("user", valid=0.25, test=0.25, seed=3), dataset.split("user", valid=0.25, test=0.25, seed=4)
    assert again.test.rows.tolist() == split.test.rows.tolist() != other.test.rows.tolist()
    assert not split.leaks()


def test_a_split_by_order_takes_the_last_rows_of_the_source_with_their_requests() -> None:
    """The dataset's own order is that of users and times; a request that reaches into the test is there as a whole."""
    rng = np.random.default_rng(0)
    request = np.sort(rng.integers(25, size=100))
    users = np.array([f"u{i}" for i in rng.integers(5, size=25)])[request]
    table = pa.table({"request": request, "user": users, "x": rng.random(100)})
    schema = Schema((Column("request", Kind.REQUEST), Column("user", Kind.USER), Column("x", Kind.NUMBER)))
    split = Dataset.from_table(table, schema, progress=False).split("order", valid=0.1, test=0.2)
    last = np.array([np.flatnonzero(request == one).max() for one in request])
    cuts = [int(np.sort(last)[70]), int(np.sort(last)[80])]
    for part, expected in (
        (split.train, last < cuts[0]),
        (split.valid, (last >= cuts[0]) & (last < cuts[1])),
        (split.test, last >= cuts[1]),
    ):
        assert sorted(split.train.dataset.source[part.rows].tolist()) == np.flatnonzero(expected).tolist()
    assert (split.counts["valid_row"], split.counts["test_row"]) == tuple(cuts)
    assert not split.leaks()


ONLY = Schema((Column("place", Kind.ID),))


@pytest.mark.parametrize(
    ("by", "schema", "message"),
    [
        (
            "time", ONLY,
            "split by time: found no column of kind time, expected one; name it in the schema, or split by order or column",
        ),
        (
            "user", ONLY,
            "split by user: found no column of kind user, expected one; name it in the schema, or split by order or column",
        ),
        (
            "column", ONLY,
            "split by column: found a dataset without parts, expected from_table(split=...) with the column that says them",
        ),
        (
            "time", SCHEMA,
            "split by time: found no train row of 2 ({'train': 0, 'valid': 0, 'test': 2, 'valid_time': 1, 'test_time': 1}), "
            "expected one at least; change the shares, or split otherwise",
        ),
    ],
)  # fmt: skip
def test_a_split_that_cannot_be_is_named(by: str, schema: Schema, message: str) -> None:
    dataset = made([{**EXAMPLE[0], "item": "x"}, EXAMPLE[0]], schema)
    with pytest.raises(DataError) as caught:
        split_rows(dataset, by)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"by": "item"}, "by: got 'item', expected one of 'time', 'order', 'user', 'column', 'leave-one-out'"),
        ({"valid": 0.5, "test": 0.5}, "valid, test: got 0.5, 0.5, expected 0 or more with a sum below 1"),
        ({"valid": -0.5}, "valid, test: got -0.5, 0.1, expected 0 or more with a sum below 1"),
        ({"seed": -1}, "seed: got -1, expected 0 to 2**64 - 1"),
        ({"buckets": 0}, "buckets: got 0, expected 1 or more"),
        (
            {"minimum_counts": {"places": 2}},
            "minimum_counts: got {'places': 2}, expected counts from 1 on, "
            "by table of ['user', 'item', 'place', 'kind'] where by table",
        ),
    ],
)  # fmt: skip
def test_options_out_of_range_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole message is compared
        split_rows(made(EXAMPLE), **options)
    assert str(caught.value) == message


def test_hashes_and_ranges_of_a_split() -> None:
    columns = [
        dataclasses.replace(column, encoding="hash", size=50) if column.table_name == "item" else column
        for column in SCHEMA.columns
    ]
    columns[4] = Column("place", Kind.ID, encoding="range", size=3)
    split = made(EXAMPLE, Schema(tuple(columns))).split(valid=0.0, test=0.25, seed=5)
    batch = split.train.gather([0, 1, 2])
    assert batch.features["place"].values().tolist() == [3, 0, 4]
    item = split.encoders["item"]
    assert item.seed == 5
    assert batch.candidate_ids("item").tolist() == item.encode(["a", "b", "a"]).tolist()
    assert split.encoders.sizes == {"user": 3, "item": 52, "place": 5, "kind": 4}
    assert not split.leaks()


@settings(max_examples=EXAMPLES // 2)
@given(
    rows=tables(),
    delay=st.integers(0, 3),
    minimum=st.integers(1, 2),
    history=st.booleans(),
    shares=st.sampled_from([(0.1, 0.1), (0.3, 0.2), (0.0, 0.3)]),
)
def test_a_split_by_time_is_that_of_the_definition(
    rows: list[slow.Row], delay: int, minimum: int, history: bool, shares: tuple[float, float]
) -> None:
    dataset = made(rows, history="events" if history else None, history_delay=delay if history else 0)
    kept = slow.without_duplicates(rows)
    want = slow.by_time(rows, kept, *shares)
    options: dict[str, Any] = {"valid": shares[0], "test": shares[1], "minimum_counts": minimum, "buckets": 3}
    if any(share and not part for share, part in zip((1, *shares), want, strict=True)):
        with pytest.raises(DataError, match="expected one at least; change the shares, or split otherwise"):
            dataset.split(**options)
        return
    split = dataset.split(**options)
    assert (sources(split.train), sources(split.valid), sources(split.test)) == want
    assert [split.counts[name] for name in ("train", "valid", "test")] == [len(part) for part in want]
    check(split, rows, kept, history, delay, minimum)
    leaks = split.leaks()
    assert leaks.counts["requests_across_parts"] == 0
    if all(rows[i]["request"] is None for i in kept):
        assert not leaks


@settings(max_examples=EXAMPLES // 4)
@given(rows=tables(), history=st.booleans())
def test_leaving_one_out_is_that_of_the_definition(rows: list[slow.Row], history: bool) -> None:
    dataset = made(rows, history="events" if history else None)
    kept = slow.without_duplicates(rows)
    # Of a request's rows those of one user alone are held out with it.
    want = slow.leave_one_out(rows, kept)
    if not want[0]:
        with pytest.raises(DataError, match="no train row"):
            dataset.split("leave-one-out")
        return
    split = dataset.split("leave-one-out", buckets=3)
    assert (sources(split.train), sources(split.valid), sources(split.test)) == want
    check(split, rows, kept, history, 0, 1)


@settings(max_examples=EXAMPLES // 4)
@given(rows=tables(), parts=st.lists(st.sampled_from(["train", "valid", "test"]), min_size=15, max_size=15))
def test_parts_by_a_column_and_what_training_sees_of_other_parts(rows: list[slow.Row], parts: list[str]) -> None:
    rows = [{**row, "part": part} for row, part in zip(rows, parts, strict=False)]
    table = arrow(rows).append_column("part", pa.array([row["part"] for row in rows], pa.string()))
    dataset = Dataset.from_table(table, SCHEMA, split="part", history="events", progress=False)
    kept = slow.without_duplicates(rows)
    want = tuple([i for i in kept if rows[i]["part"] == part] for part in ("train", "valid", "test"))
    if not want[0]:
        with pytest.raises(DataError, match="no train row"):
            dataset.split("column")
        return
    split = dataset.split("column", buckets=1)
    assert (sources(split.train), sources(split.valid), sources(split.test)) == want
    check(split, rows, kept, True, 0, 1)
    number = {"train": 0, "valid": 1, "test": 2}

    def is_known(i: int) -> bool:
        return rows[i]["user"] is not None and rows[i]["item"] is not None

    keys = {i: tuple(rows[i][name] for name in ("user", "item", "time")) for i in kept if is_known(i)}
    across = [i for i in keys if any(keys[j] == keys[i] and number[rows[j]["part"]] < number[rows[i]["part"]] for j in keys)]
    leaks = split.leaks()
    assert leaks.counts["rows_across_parts"] == len(across)
    requests = {rows[i]["request"] for i in kept} - {None}
    straddling = [one for one in requests if len({rows[i]["part"] for i in kept if rows[i]["request"] == one}) > 1]
    assert leaks.counts["requests_across_parts"] == len(straddling)
    if across:
        assert set(leaks.examples["rows_across_parts"]) <= {f"row {i} of the source, from 0" for i in across}


def test_a_split_that_goes_on_keeps_numbers_and_statistics() -> None:
    rows = table_of(100)
    before = made(rows, history="events").split("user", valid=0.25, test=0.25, seed=3)
    later = made([{**row, "item": f"new{i}" if i % 3 == 0 else row["item"]} for i, row in enumerate(rows)], history="events")
    split = later.split("user", valid=0.25, test=0.25, seed=4, known=before.encoders, minimum_counts=1)
    assert split.known is before.encoders
    assert split.statistics == before.statistics
    fresh = later.split("user", valid=0.25, test=0.25, seed=4)
    for name, encoder in before.encoders.items():
        old, ids = encoder.ids, split.encoders[name].ids
        assert old is not None
        assert ids is not None
        assert ids.ids[: len(old)].equals(old.ids)
        # All that training has are known, and nobody else is new.
        assert set(ids.ids.to_pylist()) == {*old.ids.to_pylist(), *fresh.encoders[name].ids.ids.to_pylist()}
        assert split.counts[f"ids of {name} that are new"] == len(ids) - len(old)
        unknown = [one for one in later.ids(name).ids.to_pylist() if one not in ids.ids.to_pylist()]
        assert split.counts[f"ids of {name} that training does not have"] == len(unknown)
    assert split.counts["ids of item that are new"] > 0
    found = split.leaks().counts
    assert found["unsupported_ids"] == found["unsupported_statistics"] == 0
    # An id of the table that training does not have is no leak where the one before had it.
    wrong = dataclasses.replace(split, known=None).leaks().counts
    assert wrong["unsupported_statistics"] > 0


def test_encoders_of_other_columns_do_not_go_on() -> None:
    rows = table_of(100)
    dataset = made(rows)
    known = dataset.split("user").encoders
    hashed = [dataclasses.replace(one, encoding="hash", size=5) if one.name == "place" else one for one in SCHEMA.columns]
    other = Dataset.from_table(arrow(rows), Schema(tuple(hashed)), progress=False)
    messages = {
        other: "known: table 'place': found vocabulary with 3 ids, expected hash with 5 ids",
        dataset: "known: table 'place': found hash with 5 ids, expected vocabulary",
    }
    for of, encoders in ((other, known), (dataset, other.split("user").encoders)):
        with pytest.raises(DataError) as error:
            of.split("user", known=encoders)
        assert str(error.value) == messages[of]
    with pytest.raises(DataError) as error:
        dataset.split("user", known=Encoders(dict(known), {}))
    assert str(error.value) == f"known: found statistics of [], expected those of {dataset.with_statistics[0]!r}, too"
    with pytest.raises(DataError) as error:
        dataset.split("user", known=Encoders({}, known.statistics))
    assert str(error.value) == "known: table 'user': found none, expected vocabulary"
