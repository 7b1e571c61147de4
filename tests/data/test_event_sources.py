"""Events from everything that holds rows: files as other programs write them, frames, folders, and what is left out of them."""

from __future__ import annotations

import datetime
import gzip
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jagged.data import DataError, SequenceDataset, read_events
from jagged.data.sources import open_table
from tests.data import oracle

SECONDS = 1_700_000_000


class Frame:
    """A frame of another library: it has the Arrow stream, and nothing else that is known here."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self.table.__arrow_c_stream__(requested_schema)


def rows(count: int = 5000) -> pa.Table:
    rng = np.random.default_rng(0)
    return pa.table(
        {
            "user_id": [f"u{user}" for user in rng.integers(0, 300, count)],
            "item_id": [f"item {item}" for item in rng.integers(0, 900, count)],
            "timestamp": pa.array(SECONDS + rng.permutation(count)),
        }
    )


def wide(table: pa.Table) -> pa.Table:
    """The same with a user a row."""
    users: dict[str, tuple[list[str], list[int]]] = {}
    for user, item, time in zip(*table.to_pydict().values(), strict=True):
        items, times = users.setdefault(user, ([], []))
        items.append(item)
        times.append(time)
    columns = [list(users), [items for items, _ in users.values()], [times for _, times in users.values()]]
    return pa.table(columns, names=table.schema.names)


def expected(table: pa.Table) -> oracle.Histories:
    return oracle.from_events(zip(*table.to_pydict().values(), strict=True))


WRITERS: dict[str, dict[str, Any]] = {
    **{f"{codec}": {"compression": codec} for codec in ("none", "snappy", "gzip", "zstd", "lz4", "brotli")},
    "many groups": {"row_group_size": 37},
    "version 2 pages": {"data_page_version": "2.0", "data_page_size": 300},
    "plain": {"use_dictionary": False},
    "dictionary that falls back": {"dictionary_pagesize_limit": 500, "data_page_size": 900},
    "delta": {"use_dictionary": False, "column_encoding": {"user_id": "DELTA_BYTE_ARRAY", "timestamp": "DELTA_BINARY_PACKED"}},
    "checksums": {"write_page_checksum": True},
    "no statistics": {"write_statistics": False, "store_schema": False},
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("nested", [False, True], ids=["flat", "lists"])
def test_parquet_of_every_kind(tmp_path: Path, writer: str, nested: bool) -> None:
    options = dict(WRITERS[writer])
    if nested and "column_encoding" in options:
        options["column_encoding"] = {"user_id": "DELTA_BYTE_ARRAY", "item_id.list.element": "DELTA_LENGTH_BYTE_ARRAY"}
    table = rows()
    pq.write_table(wide(table) if nested else table, tmp_path / "e.parquet", **options)
    assert oracle.histories(read_events(tmp_path / "e.parquet")) == expected(table)


TYPES = {
    "int32": pa.int32(),
    "uint32": pa.uint32(),
    "uint64": pa.uint64(),
    "int8": pa.int8(),
    "string": pa.string(),
    "large_string": pa.large_string(),
    "string_view": pa.string_view(),
    "dictionary": pa.dictionary(pa.int8(), pa.string()),
    "dictionary of large_string": pa.dictionary(pa.int32(), pa.large_string()),
    "dictionary of numbers": pa.dictionary(pa.int32(), pa.int64()),
}


def of_type(values: list[int], kind: pa.DataType) -> pa.Array:
    inner = kind.value_type if pa.types.is_dictionary(kind) else kind
    array = pa.array(values).cast(pa.string() if not pa.types.is_integer(inner) else pa.int64()).cast(inner)
    return array.dictionary_encode().cast(kind) if pa.types.is_dictionary(kind) else array


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("source", ["memory", "file"])
@pytest.mark.parametrize("nested", [False, True], ids=["flat", "lists"])
def test_ids_of_every_type(tmp_path: Path, kind: str, source: str, nested: bool) -> None:
    items = of_type([5, 7, 5, 9], TYPES[kind])
    users = of_type([1, 2, 1, 2], TYPES[kind])
    times = pa.array([1, 2, 3, 4], pa.int16())
    if nested:
        users = users.slice(0, 2)
        ends = pa.array([0, 2, 4], pa.int32())
        items = pa.ListArray.from_arrays(ends, items)
        times = pa.ListArray.from_arrays(ends, times)
    table: Any = pa.table({"user_id": users, "item_id": items, "timestamp": times})
    if source == "file":
        pq.write_table(table, tmp_path / "e.parquet")
    got = read_events(tmp_path / "e.parquet" if source == "file" else Frame(table))
    pairs = {1: [(5, 1), (7, 2)], 2: [(5, 3), (9, 4)]} if nested else {1: [(5, 1), (5, 3)], 2: [(7, 2), (9, 4)]}
    is_text = "string" in kind or kind == "dictionary"
    cast: Callable[[int], object] = str if is_text else int
    assert oracle.histories(got) == {cast(user): [(cast(item), time) for item, time in row] for user, row in pairs.items()}
    assert got.items.ids.type == (pa.large_string() if is_text else pa.int64())


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
@pytest.mark.parametrize("zone", [None, "UTC", "Europe/Berlin"])
@pytest.mark.parametrize("source", ["memory", "file"])
def test_times_of_every_unit(tmp_path: Path, unit: str, zone: str | None, source: str) -> None:
    moments = [datetime.datetime(2024, 2, 29, 12, 30, second, tzinfo=datetime.UTC) for second in (7, 5)]
    stamps = pa.array(moments, pa.timestamp("us", "UTC")).cast(pa.timestamp(unit, "UTC"))
    stamps = stamps.cast(pa.timestamp(unit, zone)) if zone else stamps.cast(pa.int64()).cast(pa.timestamp(unit))
    table = pa.table({"user_id": [1, 1], "item_id": [2, 3], "timestamp": stamps})
    if source == "file":
        pq.write_table(table, tmp_path / "e.parquet")
    dataset = read_events(tmp_path / "e.parquet" if source == "file" else table)
    first, second = (int(moment.timestamp()) * 1_000_000 for moment in moments)
    assert oracle.histories(dataset) == {1: [(3, second), (2, first)]}
    assert dataset.time_kind == ("zoned" if zone else "naive")


def test_int96_of_spark_and_dates(tmp_path: Path) -> None:
    moment = datetime.datetime(2024, 2, 29, 12, 30, 5, 250_000)
    table = pa.table({"user_id": [1], "item_id": [2], "timestamp": pa.array([moment], pa.timestamp("us"))})
    pq.write_table(table, tmp_path / "e.parquet", use_deprecated_int96_timestamps=True)
    whole = int(moment.replace(tzinfo=datetime.UTC).timestamp()) * 1_000_000 + 250_000
    assert oracle.histories(read_events(tmp_path / "e.parquet")) == {1: [(2, whole)]}
    for kind in (pa.date32(), pa.date64()):
        dates = table.set_column(2, "timestamp", pa.array([datetime.date(1970, 1, 3)], kind))
        assert oracle.histories(read_events(dates)) == {1: [(2, 2 * 86_400_000_000)]}


@pytest.mark.parametrize("options", ["", ", COMPRESSION zstd, ROW_GROUP_SIZE 2048", ", PARQUET_VERSION v2", ", COMPRESSION gzip"])
@pytest.mark.parametrize("nested", [False, True], ids=["flat", "lists"])
def test_as_duckdb_writes_it(tmp_path: Path, options: str, nested: bool) -> None:
    table = rows(20_000)
    source = wide(table) if nested else table
    with duckdb.connect() as connection:
        connection.register("source", source)
        connection.execute(f"COPY (SELECT * FROM source) TO '{tmp_path}/e.parquet' (FORMAT parquet{options})")
        connection.execute(f"COPY (SELECT * FROM source) TO '{tmp_path}/e.csv' (FORMAT csv, DELIMITER ';')")
    assert oracle.histories(read_events(tmp_path / "e.parquet")) == expected(table)
    if not nested:
        assert oracle.histories(read_events(tmp_path / "e.csv")) == expected(table)


def test_a_relation_of_duckdb(tmp_path: Path) -> None:
    table = rows(100)
    with duckdb.connect() as connection:
        connection.register("source", table)
        assert oracle.histories(read_events(connection.sql("SELECT * FROM source"))) == expected(table)


def test_lists_of_text_over_the_border_of_a_batch_and_a_group(tmp_path: Path) -> None:
    """One batch of rows once met two groups, whose dictionaries pyarrow cannot join for lists."""
    count = 150_000
    items = pa.ListArray.from_arrays(pa.array(range(count + 1), pa.int32()), pa.array([f"i{n % 1000}" for n in range(count)]))
    table = pa.table({"user_id": range(count), "item_id": items})
    pq.write_table(table, tmp_path / "e.parquet", row_group_size=122_880)
    dataset = read_events(tmp_path / "e.parquet", timestamp_column="")
    assert (dataset.num_users, dataset.num_items, dataset.num_events) == (count, 1000, count)
    assert dataset.item_ids.tolist() == [n % 1000 for n in range(count)]


def test_a_folder_as_spark_writes_it(tmp_path: Path) -> None:
    table = rows(300)
    empty = table.slice(0, 0)
    for number, part in enumerate((table.slice(0, 100), empty, table.slice(100))):
        pq.write_table(part, tmp_path / f"part-{number:05}-c0.snappy.parquet", row_group_size=64)
        (tmp_path / f".part-{number:05}-c0.snappy.parquet.crc").write_bytes(b"crc")
    (tmp_path / "_SUCCESS").touch()
    dataset = read_events(tmp_path)
    assert oracle.histories(dataset) == expected(table)
    assert len(dataset.notes["files_left_out"]) == 4  # type: ignore[arg-type]


def test_csv_parts_without_rows(tmp_path: Path) -> None:
    (tmp_path / "a.csv").touch()
    (tmp_path / "b.csv").write_text("user_id,item_id,timestamp\n")
    (tmp_path / "c.csv").write_text("user_id,item_id,timestamp\n1,2,3\n")
    dataset = read_events(tmp_path)
    assert oracle.histories(dataset) == {1: [(2, 3)]}
    assert dataset.notes["files_left_out"] == ["a.csv: empty"]


def test_files_with_other_columns_and_types_that_fit(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"user_id": pa.array([1], pa.int32()), "item_id": ["a"], "timestamp": [1], "x": [1]}), tmp_path / "a.pq"
    )
    other = {"timestamp": pa.array([2], pa.int16()), "item_id": pa.array(["b"]).dictionary_encode(), "user_id": [1]}
    pq.write_table(pa.table(other), tmp_path / "b.pq")
    dataset = read_events(tmp_path)
    assert oracle.histories(dataset) == {1: [("a", 1), ("b", 2)]}
    assert dataset.notes["columns_not_used"] == ["x"]
    (tmp_path / "csv").mkdir()
    (tmp_path / "csv" / "a.csv").write_text("user_id,item_id,timestamp,x\n1,a,1,0\n")
    (tmp_path / "csv" / "b.csv").write_text("timestamp;item_id;user_id\n2;b;1\n")
    assert oracle.histories(read_events(tmp_path / "csv")) == {1: [("a", 1), ("b", 2)]}


def test_partitions_and_subfolders(tmp_path: Path) -> None:
    for day in ("2024-01-02", "2024-01-01"):
        (tmp_path / f"timestamp={day}").mkdir()
        pq.write_table(pa.table({"user_id": [1], "item_id": [day[-1]]}), tmp_path / f"timestamp={day}" / "e.parquet")
    first = int(datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC).timestamp()) * 1_000_000
    assert oracle.histories(read_events(tmp_path)) == {1: [("1", first), ("2", first + 86_400_000_000)]}


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_delimiters(tmp_path: Path, delimiter: str) -> None:
    lines = [["user_id", "item_id", "timestamp", "note"], ["1", "2", "3", '"a,;|\tb"'], ["1", " 4 ", "5", ""]]
    (tmp_path / "e.csv").write_text("\n".join(delimiter.join(line) for line in lines))
    dataset = read_events(tmp_path / "e.csv")
    assert oracle.histories(dataset) == {1: [(2, 3), (4, 5)]}
    assert dataset.notes == {"duplicate_users": 0, "empty_users": 0, "trimmed_ids": 1, "columns_not_used": ["note"]}


def test_the_index_of_a_frame_written_to_csv(tmp_path: Path) -> None:
    (tmp_path / "e.csv").write_text(",user_id,item_id,timestamp\n0,1,2,3\n1,1,4,5\n")
    dataset = read_events(tmp_path / "e.csv")
    assert oracle.histories(dataset) == {1: [(2, 3), (4, 5)]}
    assert dataset.notes["columns_not_used"] == ["unnamed_1"]


@pytest.mark.parametrize("name", ["zst", "lz4", "gz"])
def test_packed_csv(tmp_path: Path, name: str) -> None:
    data = b"user_id,item_id,timestamp\n1,2,3\n"
    codec = {"zst": "zstd", "lz4": "lz4"}.get(name)
    path = tmp_path / f"e.csv.{name}"
    if codec is None:
        path.write_bytes(gzip.compress(data))
    else:
        with pa.CompressedOutputStream(str(path), codec) as sink:
            sink.write(data)
    assert oracle.histories(read_events(path)) == {1: [(2, 3)]}


def test_frames_tables_batches_and_readers(tmp_path: Path) -> None:
    table = rows(400)
    kept = table.to_pydict()
    whole = expected(table)
    for source in (table, table.combine_chunks().to_batches()[0], table.to_reader(30), Frame(table)):
        dataset = read_events(source)
        assert oracle.histories(dataset) == whole
    assert table.to_pydict() == kept
    assert (
        read_events(table).fingerprint == read_events(oracle.write_parquet(tmp_path / "e.parquet", table_rows(table))).fingerprint
    )


def table_rows(table: pa.Table) -> list[tuple[Any, Any, int]]:
    return list(zip(*table.to_pydict().values(), strict=True))


FRAMES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "not a table": (
        [1, 2],
        {},
        "list: found an object of type builtins.list, expected a path, an Arrow table, or a frame of pandas 2.2 or later, "
        "polars or DuckDB (anything with __arrow_c_stream__)",
    ),
    "a column is missing": (
        pa.table({"user": [1]}),
        {},
        "Table: found the columns ['user'], expected a column 'user_id'; name yours with user_column=...",
    ),
    "a null": (
        pa.table({"user_id": [1, None], "item_id": [1, 2], "timestamp": [1, 2]}),
        {},
        "Table:row 1: found a null user id, expected an id",
    ),
    "no rows": (
        pa.table({"user_id": [1], "item_id": [1], "timestamp": [1]}).slice(1),
        {},
        "Table: found no events, expected at least one user with an item",
    ),
    "a cache": (
        pa.table({"user_id": [1], "item_id": [1], "timestamp": [1]}),
        {"cache_directory": "cache"},
        "cache_directory: found a table in memory (Table), expected files, which tell by name and time whether they changed; "
        "keep the dataset with save(directory)",
    ),
}


@pytest.mark.parametrize("case", FRAMES)
def test_frames_that_are_refused(case: str) -> None:
    source, options, message = FRAMES[case]
    with pytest.raises(DataError) as caught:
        read_events(source, **options)
    assert str(caught.value) == message


# What is left out.


def test_duplicates_are_dropped_and_counted(tmp_path: Path) -> None:
    events = [("u", "a", 1), ("u", "b", 1), ("v", "a", 1), ("u", "a", 1), ("u", "a", 2), ("u", "a", 1)]
    path = oracle.write_csv(tmp_path / "e.csv", events)
    dataset = read_events(path)
    assert oracle.histories(dataset) == {"u": [("a", 1), ("b", 1), ("a", 2)], "v": [("a", 1)]}
    assert dataset.notes == {"duplicate_users": 0, "empty_users": 0, "dropped_duplicates": 2}
    assert read_events(path, duplicates="keep").num_events == 6
    # Without times nothing says that an item came twice by mistake.
    assert read_events(path, timestamp_column="").num_events == 6


def core(events: list[tuple[Any, Any, int]], least: int) -> list[tuple[Any, Any, int]]:
    """The slow definition: leave out whoever has too few, until nobody has."""
    while True:
        users, items = ([row[place] for row in events] for place in (0, 1))
        kept = [row for row in events if users.count(row[0]) >= least and items.count(row[1]) >= least]
        if kept == events:
            return kept
        events = kept


@pytest.mark.parametrize("least", [2, 3, 5, 6])
def test_min_events_to_a_fixed_point(tmp_path: Path, least: int) -> None:
    rng = np.random.default_rng(least)
    count = 260
    drawn = (rng.zipf(1.6, count) % 40, rng.zipf(1.5, count) % 50)
    events = [(f"u{user}", f"i{item}", time) for time, (user, item) in enumerate(zip(*drawn, strict=True))]
    rng.shuffle(events)  # type: ignore[arg-type]
    events = [(str(user), str(item), int(time)) for user, item, time in events]
    kept = core(events, least)
    assert 0 < len(kept) < len(events)
    dataset = read_events(oracle.write_csv(tmp_path / "e.csv", events), min_events=least)
    whole = oracle.from_events(kept)
    assert oracle.histories(dataset) == whole
    # Bit for bit what a file of the events that are left gives: numbers of ids included.
    assert dataset.fingerprint == read_events(oracle.write_csv(tmp_path / "f.csv", kept)).fingerprint
    assert dataset.notes["events_below_min_events"] == len(events) - len(kept)
    assert dataset.notes["users_below_min_events"] == len({row[0] for row in events}) - len(whole)


def test_min_events_that_leave_nothing(tmp_path: Path) -> None:
    path = oracle.write_csv(tmp_path / "e.csv", [(1, 2, 3), (1, 3, 4)])
    with pytest.raises(DataError) as caught:
        read_events(path, min_events=3)
    assert str(caught.value) == (
        f"{path}: found no events of users and items that have at least 3 each, of 2 events, expected some; lower min_events"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"duplicates": "all"}, "duplicates: got 'all', expected 'drop' or 'keep'"),
        ({"on_error": "warn"}, "on_error: got 'warn', expected 'stop' or 'skip'"),
        ({"min_events": 0}, "min_events: got 0, expected a whole number of at least 1"),
        ({"min_events": 2.5}, "min_events: got 2.5, expected a whole number of at least 1"),
    ],
)
def test_options_that_are_none(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        read_events(oracle.write_csv(tmp_path / "e.csv", [(1, 2, 3)]), **options)
    assert str(caught.value) == message


def test_bad_rows_are_skipped_counted_and_named(tmp_path: Path) -> None:
    path = tmp_path / "e.csv"
    lines = [f"u{n},i{n % 7},{n}" for n in range(1000)]
    bad = {0: "u0,i0,soon", 100: "u1,i1", 200: ",i2,5", 300: "u3,i3,2024-01-01", 400: "u4,,4", 500: "u5,i5,5,5", 999: "u6,i6,1.5"}
    for line, text in bad.items():
        lines[line] = text
    path.write_text("user_id,item_id,timestamp\n" + "\n".join(lines) + "\n")
    dataset = read_events(path, on_error="skip")
    good = [line.split(",") for number, line in enumerate(lines) if number not in bad]
    assert oracle.histories(dataset) == oracle.from_events([(user, item, int(time)) for user, item, time in good])
    assert dataset.notes["skipped_rows"] == 7
    first = dataset.notes["skipped_rows_first"]
    assert isinstance(first, list)
    assert set(first) == {
        # Rows that do not fit the columns are met first.
        f"{path}:102: found 2 fields in 'u1,i1', expected 3 as in the header",
        f"{path}:502: found 4 fields in 'u5,i5,5,5', expected 3 as in the header",
        f"{path}:2: found the time 'soon', expected a whole number or an ISO 8601 time",
        f"{path}:202: found an empty user id, expected 1 to 1024 bytes without control characters",
        f"{path}:302: found calendar times without a zone, expected numbers as before; use one kind of time",
    }
    with pytest.raises(DataError) as caught:
        read_events(path)
    assert str(caught.value) == f"{path}:102: found 2 fields in 'u1,i1', expected 3 as in the header"


def test_too_many_bad_rows_are_refused(tmp_path: Path) -> None:
    table = pa.table({"user_id": [1, None, 3], "item_id": [[1], [2], [3, None]], "timestamp": [[1], [2], [3, 4]]})
    pq.write_table(table, tmp_path / "e.parquet")
    path = tmp_path / "e.parquet"
    with pytest.raises(DataError) as caught:
        read_events(path, on_error="skip")
    assert str(caught.value) == (
        f"{path}: found 2 bad rows of 3 (the first: {path}:row 2: found a null user id, expected an id), "
        "expected at most 1% of them where on_error is 'skip'; mend what wrote them"
    )


def test_what_a_folder_leaves_out_is_named(tmp_path: Path) -> None:
    oracle.write_csv(tmp_path / "a.csv", [(1, 2, 3)])
    (tmp_path / "b.csv").symlink_to("nowhere.csv")
    (tmp_path / "_c.csv").touch()
    (tmp_path / "part-0").write_text("1 2\n")
    assert read_events(tmp_path).notes["files_left_out"] == [
        "_c.csv: hidden",
        "b.csv: a broken link",
        "part-0: no suffix of a table (none)",
    ]


def test_an_empty_path_is_named() -> None:
    with pytest.raises(DataError) as caught:
        read_events("")
    assert str(caught.value) == "the path '': found nothing, expected a file or a folder"


# What a small file must not unpack to.


def test_one_long_line_takes_little_memory(tmp_path: Path) -> None:
    """20 MiB of items of one user once took 1.5 GB."""
    path = tmp_path / "e.txt"
    path.write_text("u " + "7 " * (10 << 20) + "\nv 1 2\n")
    program = (
        "import resource, sys\nfrom jagged.data import read_events\nimport jagged.data.events, duckdb, torch, pyarrow.csv\n"
        "def high(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = high()\ndataset = read_events(sys.argv[1], progress=False)\n"
        "print(dataset.num_users, dataset.num_events, dataset.notes['duplicate_users'], high() - before)"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program, str(path)], capture_output=True, text=True, check=True)
    *counts, used = map(int, done.stdout.split())
    assert counts == [2, (10 << 20) + 2, 0]
    assert used < 700 << 10


@pytest.mark.parametrize("part", [3, 5, 17, 64])
def test_long_lines_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    text = "a  1 22\t333 \n\n b\nc 4444 5 6 \n a 7\n" + "d" + " 8" * 40 + "\n\t\ne 1234567890123456789012345\nf"
    path = tmp_path / "e.txt"
    path.write_text(text)
    whole = read_events(path)
    monkeypatch.setattr("jagged.data.parsers._PART_BYTES", part)
    cut = read_events(path)
    assert oracle.histories(cut) == oracle.histories(whole) == oracle.parse_text(text.encode())
    assert cut.notes == whole.notes == {"duplicate_users": 1, "empty_users": 2}
    path.write_text(text.replace("4444", "x" * 2000))
    with pytest.raises(DataError, match=r"e\.txt:4: found the item id"):
        read_events(path)


def test_the_dataset_is_one(tmp_path: Path) -> None:
    assert isinstance(read_events(rows(10)), SequenceDataset)


def write_bomb(path: Path, kind: str) -> None:
    long = "x" * (1 << 20)
    repeated = pa.DictionaryArray.from_arrays(pa.array([0] * 20_000, pa.int32()), pa.array([long]))
    if kind == "lists":
        repeated = pa.ListArray.from_arrays(pa.array(range(0, 20_001, 10), pa.int32()), repeated)
    options: dict[str, Any] = {}
    if kind == "deltas":
        # Each value says that it begins as the one before.
        repeated = pa.array([long] * 300)
        options = {"use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}}
    pq.write_table(pa.table({"text": repeated}), path, **options)


@pytest.mark.parametrize("kind", ["flat", "lists", "deltas"])
def test_a_table_whose_texts_unpack_to_gigabytes_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "e.parquet"
    write_bomb(path, kind)
    assert path.stat().st_size < 8 << 20
    with pytest.raises(DataError, match=r"bytes of text in [0-9]+ rows, expected at most 65536 a row"), open_table(path):
        pass


def test_a_text_that_is_too_long_is_named_with_its_row(tmp_path: Path) -> None:
    path = tmp_path / "e.parquet"
    texts = [["a"], [], ["b", "x" * ((1 << 20) + 1)]]
    for column in (["a", "", texts[2][1]], texts):
        pq.write_table(pa.table({"text": column}), path)
        with pytest.raises(DataError) as caught, open_table(path):
            pass
        assert str(caught.value) == f"{path}:row 3: found 1048577 bytes in 'text', expected a text of at most 1048576"


def test_texts_and_lists_of_a_table_are_read_as_they_are(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    texts = [None if n % 7 == 0 else "wörd " * int(n % 50) for n in range(3000)]
    lists = [None if n % 11 == 0 else [f"t{tag}" for tag in rng.integers(0, 9, n % 5)] for n in range(3000)]
    structs = [{"a": f"s{n % 3}", "b": n} for n in range(3000)]
    table = pa.table({"text": texts, "tags": lists, "both": structs, "blob": [bytes([n % 256]) for n in range(3000)]})
    pq.write_table(table, tmp_path / "e.parquet", row_group_size=700)
    with open_table(tmp_path / "e.parquet") as opened:
        assert opened.num_rows == 3000
        assert opened.place(2999) == f"{tmp_path}/e.parquet:row 3000"
        got = pa.Table.from_batches(list(opened.batches("SELECT * FROM rows ORDER BY rowid")))
    assert got.to_pydict() == table.to_pydict()


@pytest.mark.parametrize("before", ["\n", "\r\n\n"])
def test_blank_lines_before_the_header_of_csv(tmp_path: Path, before: str) -> None:
    lines = "user_id,item_id,timestamp\na,b,1\n\na,c,2\n"
    (tmp_path / "events.csv").write_bytes((before + lines).encode())
    found = read_events(tmp_path / "events.csv", progress=False)
    assert (found.num_events, found.items.ids.to_pylist()) == (2, ["b", "c"])
    (tmp_path / "wrong.csv").write_bytes(f"{before}user_id,item_id,timestamp\na,b,x\n".encode())
    with pytest.raises(DataError) as caught:
        read_events(tmp_path / "wrong.csv", progress=False)
    assert str(caught.value).startswith(f"{tmp_path / 'wrong.csv'}:{before.count(chr(10)) + 2}: found ")


def test_a_csv_of_blank_lines_is_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "blank.csv").write_text("\n \n")
    with pytest.raises(DataError) as caught:
        read_events(tmp_path / "blank.csv", progress=False)
    assert str(caught.value) == f"{tmp_path / 'blank.csv'}: found an empty file, expected a header and rows"
