from __future__ import annotations

import errno
import json
import os
import pickle
import re
import tempfile
import warnings
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jagged.data import DataError, sources, staging
from jagged.data.records import Dataset
from jagged.data.schema import Column, Kind, Schema
from tests.conftest import EXAMPLES
from tests.data import brute_force as slow
from tests.data.points import SCHEMA, arrow, tables


def made(source: Any, schema: Schema = SCHEMA, **options: Any) -> Dataset:
    return Dataset.from_table(source, schema, progress=False, **options)


def decoded(dataset: Dataset, name: str) -> list[Any]:
    """The values of a column in the table's own terms."""
    column = dataset.schema[name]
    if column.kind in (Kind.IDS, Kind.NUMBERS):
        offsets, values = dataset.list_column(name)
        flat = plain(dataset, column, values)
        return [flat[offsets[i] : offsets[i + 1]] for i in range(len(dataset))]
    return plain(dataset, column, dataset.column(name))


def plain(dataset: Dataset, column: Column, values: Any) -> list[Any]:
    if values.dtype == np.int32 and column.kind is not Kind.REQUEST:
        ids = dataset.ids(column.table_name).ids.to_pylist()
        return [None if code < 0 else ids[code] for code in values]
    return [None if value != value else value for value in values.tolist()]


@settings(max_examples=EXAMPLES // 4)
@given(rows=tables(), keep=st.booleans(), user=st.integers(0, 3), item=st.integers(0, 3))
def test_what_is_stored_is_what_the_table_says(rows: list[slow.Row], keep: bool, user: int, item: int) -> None:
    least = {key: count for key, count in (("user", user), ("item", item)) if count}
    dataset = made(arrow(rows), duplicates="keep" if keep else "drop", min_events=least or None)
    distinct = list(range(len(rows))) if keep else slow.without_duplicates(rows)
    kept = slow.core(rows, distinct, least)
    users = slow.codes(rows, kept, ["user"])
    order = sorted(kept, key=lambda i: (-1 if rows[i]["user"] is None else users.index(rows[i]["user"]), rows[i]["time"], i))
    assert dataset.source.tolist() == order
    assert dataset.counts["rows"] == len(rows)
    assert dataset.counts.get("duplicates", 0) == len(rows) - len(distinct)
    assert dataset.counts.get("below_min_events", 0) == len(distinct) - len(kept)
    assert dataset.counts["kept"] == len(kept) == len(dataset)
    tables = {"user": ["user"], "item": ["item", "items"], "place": ["place"], "kind": ["kind"]}
    for table, columns in tables.items():
        assert dataset.ids(table).ids.to_pylist() == slow.codes(rows, kept, columns)
    for name in ("user", "item", "time", "place", "kind", "click"):
        assert decoded(dataset, name) == [rows[i][name] for i in order]
    assert decoded(dataset, "price") == [None if (x := rows[i]["price"]) is None else slow.single(x) for i in order]
    for name in ("items", "sizes"):
        assert decoded(dataset, name) == [[None] if rows[i][name] is None else rows[i][name] for i in order]
    requests = slow.codes(rows, kept, ["request"])
    assert decoded(dataset, "request") == [-1 if (x := rows[i]["request"]) is None else requests.index(x) for i in order]


TEXT = """who,what,when,much,click,list,json,weights
 u1 ,a,2024-01-02 10:00:00,1.5,1,x|y,"[""p"", ""q""]",0.5|2
u2,,2024-01-01,,0,,[],
u1,b,2024-01-01 00:00:00.000001,-2e3,true,x,,1
"""
TEXT_SCHEMA = Schema(
    (
        Column("who", Kind.USER),
        Column("what", Kind.CANDIDATE),
        Column("when", Kind.TIME),
        Column("much", Kind.NUMBER),
        Column("click", Kind.LABEL),
        Column("list", Kind.IDS, separator="|", weights="weights"),
        Column("json", Kind.IDS),
        Column("weights", Kind.NUMBERS, separator="|"),
    )
)


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_csv_is_read_by_kinds(tmp_path: Path) -> None:
    dataset = made(written(tmp_path / "t.csv", TEXT), TEXT_SCHEMA, history="events", history_delay=timedelta(hours=1))
    assert dataset.time_kind == "naive"
    assert dataset.source.tolist() == [2, 0, 1]
    day = int((datetime(2024, 1, 1) - datetime(1970, 1, 1)) / timedelta(microseconds=1))
    assert decoded(dataset, "when") == [day + 1, day + 34 * 3_600_000_000, day]
    assert decoded(dataset, "who") == ["u1", "u1", "u2"]
    assert decoded(dataset, "what") == ["b", "a", None]
    assert decoded(dataset, "much") == [-2000.0, 1.5, None]
    assert decoded(dataset, "click") == [1.0, 1.0, 0.0]
    assert decoded(dataset, "list") == [["x"], ["x", "y"], [None]]
    assert decoded(dataset, "json") == [[None], ["p", "q"], []]
    assert decoded(dataset, "weights") == [[1.0], [0.5, 2.0], [None]]
    assert dataset.history == {"delay": 3_600_000_000, "ties": "out"}
    assert dataset.stop.tolist() == [0, 1, 2]


def test_text_ids_that_are_all_integers_are_integers(tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", "u,i,t\n1,01,3\n2,7,2\n")
    schema = Schema((Column("u", Kind.USER), Column("i", Kind.CANDIDATE), Column("t", Kind.TIME)))
    dataset = made(path, schema)
    assert dataset.ids("u").ids.to_pylist() == [1, 2]
    assert dataset.ids("i").ids.to_pylist() == ["01", "7"]
    assert dataset.time_kind == "number"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("-2e3", "3km", ":4: found '3km' in the column 'much', expected a finite number"),
        ("true", "yes", ":4: found 'yes' in the column 'click', expected a finite number"),
        (
            "2024-01-01,,", "1704067200,,",
            ":3: found '1704067200' in the column 'when', expected an ISO 8601 time without a zone, as the first",
        ),
        ("2024-01-01,,", ",,", ":3: found no value in the column 'when', expected an ISO 8601 time without a zone, as the first"),
        ("[]", "[1", ":3: found '[1' in the column 'json', expected a list of ids as JSON"),
        ("0.5|2", "0.5|z", ":2: found '0.5|z' in the column 'weights', expected a list of finite numbers between '|'"),
        ("0.5|2", "0.5", ":2: found '0.5' in the column 'weights', expected a number for each id of 'list'"),
    ],
)  # fmt: skip
def test_a_bad_value_is_named_with_its_place(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = written(tmp_path / "t.csv", TEXT.replace(old, new))
    with pytest.raises(DataError) as caught:
        made(path, TEXT_SCHEMA)
    assert str(caught.value) == f'{path}{message}; correct it, or leave such rows out with on_error="skip"'


TYPED = [
    (pa.array([2**63], pa.uint64()), Column("c", Kind.ID), f"{2**63}", "a whole number in the int64 range"),
    (pa.array([1.5]), Column("c", Kind.ID), "1.5", "a whole number in the int64 range"),
    (pa.array([9]), Column("c", Kind.ID, encoding="range", size=9), "9", "a whole number from 0 to 8"),
    (pa.array(["07"]), Column("c", Kind.ID, encoding="range", size=9), "07", "a whole number from 0 to 8"),
    (pa.array(["a\nb"]), Column("c", Kind.ID), "a\nb", "an id of 1 to 1024 bytes without control characters"),
    (pa.array([float("inf")]), Column("c", Kind.LABEL), "inf", "a finite number"),
    (pa.array([1e300]), Column("c", Kind.NUMBER), "1e+300", "a finite number"),
    (pa.array([-1]), Column("c", Kind.WEIGHT), "-1", "a finite number from 0 on"),
    (pa.array([1.5]), Column("c", Kind.TIME), "1.5", "a whole number"),
    (pa.array([[1.0, float("inf")]]), Column("c", Kind.NUMBERS), "[1.0, inf]", "a list of finite numbers"),
    (pa.array([[1, 9]]), Column("c", Kind.IDS, encoding="range", size=9), "[1, 9]", "a list of ids"),
]


@pytest.mark.parametrize(("values", "column", "found", "expected"), TYPED, ids=lambda value: str(value)[:12])
def test_a_bad_typed_value_is_named_with_its_place(values: pa.Array, column: Column, found: str, expected: str) -> None:
    with pytest.raises(DataError) as caught:
        made(pa.table({"c": values}), Schema((column,)))
    assert str(caught.value) == (
        f"Table:row 0: found {found!r} in the column 'c', expected {expected}; "
        'correct it, or leave such rows out with on_error="skip"'
    ).replace("\n", "\\n")


def test_bad_rows_are_skipped_counted_and_named() -> None:
    values = ["1"] * 400
    values[7] = values[300] = values[20] = values[21] = "x"
    table = pa.table({"c": values, "i": list(range(400))})
    dataset = made(table, Schema((Column("c", Kind.LABEL), Column("i", Kind.ID))), on_error="skip")
    assert dataset.counts["bad"] == 4
    assert len(dataset) == 396
    assert dataset.bad_places == [f"Table:row {i}: found 'x' in the column 'c', expected a finite number" for i in (7, 20, 21)]
    assert 7 not in dataset.ids("i").ids.to_pylist()
    assert f"left out: {dataset.bad_places[0]}" in str(dataset)
    values[0] = "x"
    with pytest.raises(DataError) as caught:
        made(pa.table({"c": values}), Schema((Column("c", Kind.LABEL),)), on_error="skip")
    assert str(caught.value) == (
        "Table: found 5 of 400 rows with a bad value (Table:row 0: found 'x' in the column 'c', expected a finite number), "
        "expected at most 1%; mend the table or the schema"
    )


def test_ids_have_the_type_of_their_table() -> None:
    table = pa.table({"a": [1, 2], "b": ["2", "x"], "c": [[1], None], "d": [1.0, None], "e": [True, False]})
    columns = (
        Column("a", Kind.ID, table="t"), Column("b", Kind.ID, table="t"), Column("c", Kind.IDS, table="t"), Column("d", Kind.ID),
        Column("e", Kind.ID),
    )  # fmt: skip
    dataset = made(table, Schema(columns))
    assert dataset.ids("t").ids.to_pylist() == ["1", "2", "x"]
    assert decoded(dataset, "c") == [["1"], [None]]
    assert decoded(dataset, "d") == [1, None]
    assert decoded(dataset, "e") == [1, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"duplicates": "no"}, "duplicates: got 'no', expected 'drop' or 'keep'"),
        ({"min_events": {"user": 0}}, "min_events: got {'user': 0}, expected counts from 1 on for 'user' and 'item'"),
        ({"history": "events", "history_delay": -1}, "history_delay: got -1, expected 0 or more"),
        ({"history": "events", "history_delay": 1.5}, "history_delay: got 1.5, expected a whole number or a timedelta"),
        (
            {"history": "events", "history_delay": 1, "ties": "before"},
            "ties='before' with a history_delay: events of the row's own time are within the delay; give one of the two",
        ),
        *(
            (
                option,
                "history_delay, ties, event_labels, event_lists, event_types, event_weights: given without history='events' or "
                "events=, which they are for",
            )
            for option in (
                {"ties": "before"},
                {"history_delay": 1},
                {"event_labels": ["a"]},
                {"event_lists": ["a"]},
                {"event_types": "a"},
                {"event_weights": "a"},
            )
        ),
    ],
)
def test_options_out_of_range_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole message is compared
        made(arrow([]), **options)
    assert str(caught.value) == message


ONE = Schema((Column("a", Kind.ID),))
OTHER = Schema((Column("b", Kind.ID),))
ADD = "expected one; name it in the schema"


@pytest.mark.parametrize(
    ("schema", "options", "message"),
    [
        (OTHER, {}, "schema: found the column 'b', expected those of Table: ['a']"),
        (ONE, {"split": "s"}, "Table: found the columns ['a'], expected a column 's' (split=)"),
        (ONE, {"history": "events"}, f"Table: history='events': found no column of kind user, {ADD}"),
        (ONE, {"min_events": {"item": 2}}, f"Table: min_events: found no column of kind candidate, {ADD}"),
        (Schema((Column("a", Kind.UNUSED),)), {}, "Table: found a schema without a column that is used, expected one at least"),
        (
            Schema((Column("a", Kind.NUMBERS),)), {},
            "column 'a': found the type 'int64' for kind numbers, expected a list of ids or numbers, or text of such lists; name "
            "another kind",
        ),
    ],
)  # fmt: skip
def test_a_schema_that_does_not_fit_is_named(schema: Schema, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as caught:
        made(pa.table({"a": [1]}), schema, **options)
    assert str(caught.value) == message


def test_a_split_column_is_no_feature_and_its_values_are_checked() -> None:
    table = pa.table({"a": [1, 2, 3], "s": ["train", " TEST", "valid"]})
    schema = Schema((Column("a", Kind.ID), Column("s", Kind.ID)))
    dataset = made(table, schema, split="s")
    assert dataset.schema.names == ["a"]
    assert dataset.parts is not None
    assert dataset.parts.tolist() == [0, 2, 1]
    with pytest.raises(DataError) as caught:
        made(pa.table({"a": [1], "s": ["dev"]}), schema, split="s")
    assert str(caught.value) == (
        "Table:row 0: found 'dev' in the column 's', expected train, valid, test; "
        'correct it, or leave such rows out with on_error="skip"'
    )


NAMES = ("user", "item", "time", "request", "place", "kind", "items", "price", "sizes", "click")
EXAMPLE = [
    dict(zip(NAMES, row, strict=True))
    for row in ((7, "a", 1, "r", 1, "v", ["a"], 1.0, [], 1), (7, "b", 2, "s", 0, "v", [], None, [2.0], 0))
]


def test_a_dataset_is_kept_opened_saved_and_sent(tmp_path: Path) -> None:
    dataset = made(arrow(EXAMPLE), directory=tmp_path / "d", history="events")
    opened = Dataset.load(tmp_path / "d")
    dataset.save(tmp_path / "copy")
    dataset.save(tmp_path / "copy")
    copied = Dataset.load(tmp_path / "copy")
    for other in (opened, copied, pickle.loads(pickle.dumps(dataset))):
        assert other.fingerprint == dataset.fingerprint
        assert other.counts == dataset.counts
        assert other.schema == dataset.schema
        for name in SCHEMA.names:
            assert decoded(other, name) == decoded(dataset, name)
        assert other.stop.tolist() == [0, 1]
    with pytest.raises(DataError) as caught:
        made(arrow(EXAMPLE), directory=tmp_path / "d")
    assert str(caught.value) == (
        f"{tmp_path / 'd'}: found something there, expected a directory that does not exist yet; name another one"
    )
    with pytest.raises(DataError) as caught:
        made(arrow(EXAMPLE[:1])).save(tmp_path / "d")
    assert (
        str(caught.value)
        == f"{tmp_path / 'd'}: found another dataset, expected a directory that does not exist yet; name another one"
    )


def test_a_temporary_dataset_goes_with_its_object() -> None:
    dataset = made(arrow(EXAMPLE))
    directory = dataset.directory
    assert directory.exists()
    del dataset
    assert not directory.exists()


def test_what_is_counted_on_the_way_takes_no_room_later(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[set[str]] = []
    make_ids = staging.Builder._make_ids

    def spy(self: staging.Builder, number: int, name: str) -> None:
        make_ids(self, number, name)
        left.append({table for (table,) in self.table.sql("SELECT table_name FROM information_schema.tables")})

    monkeypatch.setattr(staging.Builder, "_make_ids", spy)
    twice = [*EXAMPLE, *EXAMPLE]
    dataset = made(arrow(twice), min_events={"user": 1, "item": 1}, on_error="skip")
    assert dataset.counts["duplicates"] >= len(EXAMPLE)
    assert left[-1] == {"rows", "dropped_of_rows", *(f"ids_{number}" for number in range(4))}


def test_nothing_is_left_of_a_table_that_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(DataError):
        made(pa.table({"c": ["x"]}), Schema((Column("c", Kind.LABEL),)), directory=tmp_path / "d")
    with pytest.raises(DataError):
        made(pa.table({"c": ["x"]}), Schema((Column("c", Kind.LABEL),)))
    assert list(tmp_path.iterdir()) == []


def test_every_damaged_file_is_named(tmp_path: Path) -> None:
    directory = tmp_path / "d"
    made(arrow(EXAMPLE), directory=directory, history="events")
    names = sorted(path.name for path in directory.iterdir())
    assert "ids-0.arrow" in names
    for name in names:
        raw = (directory / name).read_bytes()
        for broken in (raw[:-1], raw[: len(raw) // 2] + bytes([raw[len(raw) // 2] ^ 1]) + raw[len(raw) // 2 + 1 :]):
            (directory / name).write_bytes(broken)
            with pytest.raises(DataError, match=str(directory / name)):
                Dataset.load(directory)
        (directory / name).unlink()
        with pytest.raises(DataError, match=str(directory / name)):
            Dataset.load(directory)
        (directory / name).write_bytes(raw)
    Dataset.load(directory)


def sealed_again(directory: Path, name: str, array: np.ndarray[Any, Any] | None = None, **content: Any) -> None:
    """Change a file or the manifest as somebody would who knows how to seal it."""
    from jagged.artifacts import verify, write_manifest
    from jagged.data.records import write_column

    manifest = verify(directory)
    if array is not None:
        write_column(directory / name, array)
    write_manifest(directory, manifest.files, {**manifest.content, **content})


def test_a_manifest_without_a_part_or_with_no_schema_is_refused(tmp_path: Path) -> None:
    from jagged.artifacts import verify, write_manifest

    directory = tmp_path / "d"
    made(arrow(EXAMPLE), directory=directory, history="events")
    manifest = verify(directory)
    for name in ("events", "history", "event_weights"):
        write_manifest(directory, manifest.files, {key: value for key, value in manifest.content.items() if key != name})
        with pytest.raises(DataError) as caught:
            Dataset.load(directory)
        assert str(caught.value) == (
            f"{directory / 'manifest.json'}: found no {name}, expected a dataset of version 2; make the dataset again"
        )
    write_manifest(directory, manifest.files, {**manifest.content, "schema": {"user": {"kind": "king"}}})
    with pytest.raises(DataError) as caught:
        Dataset.load(directory)
    assert str(caught.value).startswith(f"{directory / 'manifest.json'}: schema, column 'user': found kind 'king', expected id, ")


def lists_of(rows: int, length: int) -> Dataset:
    """A dataset of lists alone."""
    values = pa.array(np.arange(rows * length) % 1000)
    lists = pa.LargeListArray.from_arrays(pa.array(np.arange(rows + 1) * length), values)
    table = pa.table({"seen": lists, "click": np.arange(rows) % 2})
    schema = Schema((Column("seen", Kind.IDS, of="request", table="items"), Column("click", Kind.LABEL)))
    found: Dataset = Dataset.from_table(table, schema, duplicates="keep", progress=False)
    return found


def test_lists_of_thousands_have_the_memory_that_they_need() -> None:
    """All values of 2,048 rows at once, several times over: more than the 512 MB that events have."""
    dataset = lists_of(2048, 16_384)
    assert len(dataset) == 2048
    assert len(dataset.ids("items")) == 1000


@pytest.mark.parametrize(("bounds", "expected"), [((0, 600_000_000), 600_000_000), ((2**42, 2**42), 2**42), (None, None)])
def test_a_table_has_a_share_of_the_memory(
    monkeypatch: pytest.MonkeyPatch, bounds: tuple[int, int] | None, expected: int | None
) -> None:
    """Within bounds: what was enough for most tables, and what leaves room for other processes."""
    if bounds is not None:
        monkeypatch.setattr(sources, "_BOUNDS", bounds)
    with sources.open_table(pa.table({"a": [1]})) as table:
        ((text,),) = table.sql("SELECT current_setting('memory_limit')")
    number, unit = text.split()
    found = float(number) * sources._BYTES[unit]
    assert 500_000_000 < found < 8_000_000_001 if expected is None else found == pytest.approx(expected, rel=0.02)


def test_a_memory_that_is_too_little_is_told_as_such(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("jagged.data.sources._MEMORY_OF_TABLES", "20MB")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(DataError) as caught:
        lists_of(2048, 600)
    what = re.sub(r"(?<=Error: ).* \([\d.]+ MiB/19.0 MiB used\)", "...", str(caught.value))
    assert what == (
        f"{tmp_path}: memory is out: 'Out of Memory Error: ...'; take a machine with more, or shorter lists, or set TMPDIR to a "
        "directory on a disk with room"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_for_mapped_pages_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such pages are written without a call that could fail: a process that has none would be ended."""

    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DataError) as caught:
        made(arrow(EXAMPLE), directory=tmp_path / "d", history="events")
    assert str(caught.value) == (
        f"{tmp_path / 'd'}: could not be written: No space left on device; name another directory, on a disk with room"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("column-0.arrow", np.array([0, 5], np.int32), "found codes out of range, expected -1 to 0"),
        ("column-0.arrow", np.array([0], np.int32), "found 1 values, expected 2 rows"),
        (
            "column-0.arrow", np.array([0, 0], np.int64),
            "found type int64 with 0 nulls, expected values of type int32; make the dataset again",
        ),
        ("stop.arrow", np.array([0, 2], np.int64), "found views that reach a row itself, expected views of earlier events"),
        ("stop.arrow", np.array([0, 3], np.int64), "found views out of range, expected views of 2 events"),
        ("stop.arrow", np.array([0], np.int64), "found 1 values, expected 2 rows"),
    ],
)  # fmt: skip
def test_content_of_other_hands_is_refused(tmp_path: Path, name: str, values: Any, message: str) -> None:
    made(arrow(EXAMPLE), directory=tmp_path / "d", history="events")
    sealed_again(tmp_path / "d", name, values)
    with pytest.raises(DataError) as caught:
        Dataset.load(tmp_path / "d")
    assert str(caught.value) == f"{tmp_path / 'd' / name}: {message}"


def test_a_manifest_of_other_hands_is_refused(tmp_path: Path) -> None:
    made(arrow(EXAMPLE), directory=tmp_path / "d")
    content = json.loads((tmp_path / "d" / "manifest.json").read_text())
    for key, value in (
        ("layout", 9),
        ("num_rows", -1),
        ("num_rows", 2**63),
        ("schema", None),
        ("values", {"a": "b"}),
        ("counts", 3),
        ("num_tables", 1),
        ("num_tables", 10**12),
        ("events", 7),
        ("events", {"num_rows": 3}),
        ("events", {"num_rows": -1, "schema": {}}),
        ("history", ["out"]),
        ("history", {"delay": "0", "ties": "out"}),
    ):
        sealed_again(tmp_path / "d", "", None, **{key: value})
        with pytest.raises(DataError, match="expected a dataset of version 2; make the dataset again"):
            Dataset.load(tmp_path / "d")
        sealed_again(tmp_path / "d", "", None, **{key: content[key]})
    Dataset.load(tmp_path / "d")


def test_a_parquet_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    for number in range(3):
        pq.write_table(arrow([{**EXAMPLE[0], "place": number}]), tmp_path / "p" / f"{number}.parquet")
    dataset = made(tmp_path / "p")
    assert decoded(dataset, "place") == [0, 1, 2]


def test_columns_may_be_named_as_anything() -> None:
    names = ["row", "v", "p", "x", "l", "items", "code", 'quo"te', "value", "u", "h", "c"]
    table = pa.table({name: [[1, 2], [1, 2], [2]] if name in ("x", "p", "items") else [1, 1, 2] for name in names})
    schema = Schema(tuple(Column(name, Kind.IDS if name in ("x", "p", "items") else Kind.ID, table="t") for name in names))
    dataset = made(table, schema)
    assert dataset.counts["duplicates"] == 1
    assert dataset.ids("t").ids.to_pylist() == [1, 2]
    assert decoded(dataset, "row") == [1, 2]
    assert decoded(dataset, "p") == [[1, 2], [2]]


def test_no_warning_is_raised() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made(arrow(EXAMPLE), history="events", ties="before")


def test_a_schema_is_inferred_and_words_win_over_it(tmp_path: Path) -> None:
    table = pa.table(
        {
            "user_id": [1, 1, 2],
            "item_id": ["a", "b", "a"],
            "timestamp": [10, 20, 15],
            "seen": [["b"], ["a", "c"], []],
            "price": [1.5, None, 2.5],
            "sold": [0, 1, 0],
        }
    )
    dataset = Dataset.from_table(table, history=["events", "seen"], label="sold", progress=False)
    assert {column.name: column.kind.value for column in dataset.schema.columns} == {
        "user_id": "user", "item_id": "candidate", "timestamp": "time", "seen": "ids", "price": "number", "sold": "label",
    }  # fmt: skip
    assert dataset.schema["seen"].table == "item_id"
    assert dataset.ids("item_id").ids.to_pylist() == ["a", "b", "c"]
    dataset.schema.save(tmp_path / "schema.toml")
    again = Dataset.from_table(table, tmp_path / "schema.toml", history="events", progress=False)
    assert (again.schema, again.fingerprint) == (dataset.schema, dataset.fingerprint)
    with pytest.raises(DataError) as caught:
        Dataset.from_table(table, history="clicked", progress=False)
    names = "['user_id', 'item_id', 'timestamp', 'seen', 'price', 'sold']"
    assert str(caught.value) == f"history='clicked': found the columns {names}, expected a column 'clicked'"


def test_a_column_named_as_the_gathered_history_is_refused() -> None:
    with pytest.raises(DataError) as caught:
        Dataset.from_table(pa.table({"user_id": [1], "events": [[1]]}), history="events", progress=False)
    assert str(caught.value) == (
        "Table: found a column 'events' and history='events', expected another name of the column; rename it"
    )


@pytest.mark.parametrize("history", ["auto", ["auto"], ["auto", "hist_items"], ["hist_items", "auto"]])
def test_auto_gathers_histories_where_rows_have_users_items_and_times(history: str | list[str]) -> None:
    columns = {"user_id": [1, 1, 1], "item_id": [1, 2, 3], "click": [1, 0, 1], "hist_items": [[1], [2], [3]]}
    words = {"label": "click", "candidate": "item_id", "progress": False}
    gathered = Dataset.from_table(pa.table(columns | {"timestamp": [1, 2, 3]}), history=history, **words)
    assert gathered.stop.tolist() == [0, 1, 2]
    without_times = Dataset.from_table(pa.table(columns), history=history, **words)
    assert without_times.events is None
    assert [one.name for one in without_times.schema.columns if one.kind is Kind.IDS] == ["hist_items"]
