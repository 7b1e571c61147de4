"""Input that must be refused: one line, the place, what was found, what is expected."""

from __future__ import annotations

import contextlib
import errno
import gzip
import os
import re
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jagged.data import DataError, read_events, synthetic_sessions
from jagged.data.sources import Source, find_source
from jagged.data.tabular import Block, parquet_blocks
from tests.data import oracle

HEADER = b"user_id,item_id,timestamp\n"


def refused(path: Path, **options: object) -> str:
    with pytest.raises(DataError) as caught:
        read_events(path, **options)  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 700
    assert ": found " in message
    assert ", expected " in message
    return message


CSV = {
    "empty": (b"", "e.csv: found an empty file, expected a header and rows"),
    "header only": (HEADER, "e.csv: found no events"),
    "only blank lines": (b"\n\n", r"e.csv: found an empty file, expected a header and rows"),
    "missing column": (
        b"user_id,time\n1,2\n",
        r"e.csv:1: found the columns \['user_id', 'time'\], expected a column 'item_id'; .*item_column",
    ),
    "column twice": (b"user_id,item_id,item_id,timestamp\n1,2,3,4\n", "e.csv:1: found the column 'item_id' 2 times"),
    "short row": (HEADER + b"1,2,3\n\n1,2\n", "e.csv:4: found 2 fields in '1,2', expected 3"),
    "long row": (HEADER + b"1,2,3\n1,2,3,4\n", "e.csv:3: found 4 fields in '1,2,3,4', expected 3"),
    "empty user": (HEADER + b"1,2,3\n,2,4\n", "e.csv:3: found an empty user id"),
    "empty item": (HEADER + b"1,2,3\n1,,4\n", "e.csv:3: found an empty item id"),
    "empty time": (HEADER + b"1,2,3\n1,2,\n", "e.csv:3: found the time ''"),
    "text time": (HEADER + b"1,2,3\n1,2,soon\n", "e.csv:3: found the time 'soon', expected times of one kind, as '3'"),
    "date of no ISO": (
        HEADER + b"1,2,12/31/2024\n",
        "e.csv:2: found the time '12/31/2024', expected a whole number or an ISO 8601 time; write dates as 2024-12-31: whether "
        "the day or the month comes first is not guessed",
    ),
    "first time": (HEADER + b"1,2,soon\n", "e.csv:2: found the time 'soon', expected a whole number or an ISO 8601 time"),
    "nan": (HEADER + b"1,2,3\n1,2,nan\n", "e.csv:3: found the time 'nan'"),
    "inf": (HEADER + b"1,2,3\n1,2,-inf\n", "e.csv:3: found the time '-inf'"),
    "fraction": (HEADER + b"1,2,3\n1,2,3.5\n", "e.csv:3: found the time '3.5'.*multiply fractional seconds"),
    "hexadecimal": (HEADER + b"1,2,0x10\n", "e.csv:2: found the time '0x10'"),
    "huge time": (HEADER + b"1,2,3\n1,2,9999999999999999999\n", "e.csv:3: found the time '9999999999999999999'.*int64"),
    "mixed times": (HEADER + b"1,2,3\n1,2,2024-01-01\n", "e.csv:3: found the time '2024-01-01'"),
    "no such day": (HEADER + b"1,2,2024-01-01\n1,2,2023-02-29\n", "e.csv:3: found the time '2023-02-29'"),
    "not utf-8": (HEADER + b"1,2,3\n\xff,2,4\n", "e.csv:3: found the byte 0xff, which is not UTF-8.*iconv"),
    "utf-16": ("user_id,item_id,timestamp\n".encode("utf-16"), "e.csv:1: found the"),
    "nul": (HEADER + b"1,2\x00,3\n", "e.csv:2: found the control character 0x00"),
    "old mac line ends": (b"user_id,item_id,timestamp\r1,2,3\r", "e.csv:1: found the control character 0x0d"),
    "carriage return at the end": (HEADER + b"1,2,3\n\r", "e.csv:3: found the control character 0x0d"),
    "tab in an id": (HEADER + b"1,2\t,3\n", "e.csv:2: found the item id"),
    "open quote": (HEADER + b'1,"2,3\n1,2,4\n', "e.csv:2: found a quote that is not closed"),
    "quoted line break": (HEADER + b'1,"2\n3",4\n', "e.csv:2: found the item id"),
    "quote inside": (HEADER + b'1,2,3\n1,a"b,4\n', "e.csv:3: found a quote that is not closed"),
    "enormous id": (HEADER + b"1,2,3\n1," + b"9" * 2000 + b",4\n", r"e.csv:3: found the item id '9+...\(2000 long\)"),
}


@pytest.mark.parametrize("case", CSV)
def test_csv(tmp_path: Path, case: str) -> None:
    data, expected = CSV[case]
    (tmp_path / "e.csv").write_bytes(data)
    message = refused(tmp_path / "e.csv")
    assert re.search(expected, message), message
    assert message.startswith(str(tmp_path))


TEXT = {
    "empty": (b"", "e.txt: found no events"),
    "only empty users": (b"a\nb\n", "e.txt: found no events, expected at least one user with an item"),
    "not utf-8": (b"1 2\n1 \xc3\x28\n", "e.txt:2: found the byte 0xc3, which is not UTF-8"),
    "nul": (b"1 2\n\n3 \x004\n", "e.txt:3: found the control character 0x00"),
    "enormous id": (b"1 2\n" + b"u" * 1025 + b" 3\n", "e.txt:2: found the user id"),
    "enormous empty user": (b"1 2\n" + b"u" * 1025 + b"\n", "e.txt:2: found the user id"),
    "enormous item": (b"1 2\n5 6 " + b"u" * 1025 + b" 3\n", "e.txt:2: found the item id"),
}


@pytest.mark.parametrize("case", TEXT)
def test_text(tmp_path: Path, case: str) -> None:
    data, expected = TEXT[case]
    (tmp_path / "e.txt").write_bytes(data)
    assert expected in refused(tmp_path / "e.txt")


def test_the_line_is_right_in_later_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [f"u{i},i{i % 7},{i}\n".encode() for i in range(200)]
    monkeypatch.setattr("jagged.data.files.BLOCK_BYTES", 50)
    for bad in (b"1,2\n", b"1,2,x\n", b"\xff,2,3\n", b'"1,2,3\n', b",2,3\n"):
        (tmp_path / "e.csv").write_bytes(HEADER + b"".join(rows[:150]) + b"\n" + bad + b"".join(rows[150:]))
        assert "e.csv:153: found" in refused(tmp_path / "e.csv")
    (tmp_path / "e.txt").write_bytes(b"1 2\n" * 100 + b"a " + b"b" * 2000 + b"\n" + b"1 2\n")
    assert "e.txt:101: found the item id" in refused(tmp_path / "e.txt")


PARQUET = {
    "null user": ({"user_id": [1, None], "item_id": [1, 2], "timestamp": [1, 2]}, "e.parquet:row 2: found a null user id"),
    "null user without items": (
        {"user_id": [1, None], "item_id": [[1], []], "timestamp": [[1], []]},
        "row 2: found a null user id",
    ),
    "null item": ({"user_id": ["a", "b"], "item_id": ["x", None], "timestamp": [1, 2]}, "e.parquet:row 2: found a null item id"),
    "null time": ({"user_id": [1, 1], "item_id": [1, 2], "timestamp": [1, None]}, "e.parquet:row 2: found a null time"),
    "nan time": ({"user_id": [1, 1], "item_id": [1, 2], "timestamp": [1.0, float("nan")]}, "e.parquet:row 2: found the time nan"),
    "inf time": ({"user_id": [1, 1], "item_id": [1, 2], "timestamp": [1.0, float("inf")]}, "e.parquet:row 2: found the time inf"),
    "fraction": ({"user_id": [1], "item_id": [1], "timestamp": [1.5]}, "e.parquet:row 1: found the time 1.5"),
    "text time": ({"user_id": [1, 1], "item_id": [1, 2], "timestamp": ["1", "one"]}, "e.parquet:row 2: found the time 'one'"),
    "bool time": ({"user_id": [1], "item_id": [1], "timestamp": [True]}, "found the column 'timestamp' of type bool"),
    "float id": ({"user_id": [1.0], "item_id": [1], "timestamp": [1]}, "found the column 'user_id' of type double"),
    "bytes id": ({"user_id": [1], "item_id": [b"1"], "timestamp": [1]}, "found the column 'item_id' of type binary"),
    "struct id": ({"user_id": [1], "item_id": [{"a": 1}], "timestamp": [1]}, "found the column 'item_id' of type struct"),
    "list user": ({"user_id": [[1]], "item_id": [[1]], "timestamp": [[1]]}, "found the column 'user_id' of type list"),
    "time is no list": ({"user_id": [1], "item_id": [[1]], "timestamp": [1]}, "items and times both as lists"),
    "list of lists": ({"user_id": [1], "item_id": [[[1]]], "timestamp": [[1]]}, "found the column 'item_id' of type list"),
    "null list": (
        {"user_id": [1, 2], "item_id": [[1], None], "timestamp": [[1], []]},
        "e.parquet:row 2: found a null in 'item_id'",
    ),
    "null in list": (
        {"user_id": [1, 2], "item_id": [[1], [2, None]], "timestamp": [[1], [2, 3]]},
        "e.parquet:row 2: found a null item id",
    ),
    "list lengths": (
        {"user_id": [1, 2], "item_id": [[1], [2]], "timestamp": [[1], [2, 3]]},
        "e.parquet:row 2: found 1 items and 2 times",
    ),
    "huge id": (
        {"user_id": pa.array([1, 2**63], pa.uint64()), "item_id": [1, 2], "timestamp": [1, 2]},
        "row 2: found the user id 92233",
    ),
    "nul in id": ({"user_id": [1, 2], "item_id": ["a", "a\0"], "timestamp": [1, 2]}, r"row 2: found the item id 'a\x00'"),
    "empty id": ({"user_id": ["a", ""], "item_id": ["a", "b"], "timestamp": [1, 2]}, "row 2: found an empty user id"),
    "long id": ({"user_id": ["a", "b" * 1025], "item_id": ["a", "b"], "timestamp": [1, 2]}, "row 2: found the user id 'bbb"),
    "no rows": (
        {"user_id": pa.array([], pa.int64()), "item_id": pa.array([], pa.int64()), "timestamp": pa.array([], pa.int64())},
        "no events",
    ),
    "missing": ({"user": [1], "item_id": [1], "timestamp": [1]}, "expected a column 'user_id'; name yours with user_column="),
    "nanoseconds": (
        {"user_id": [1], "item_id": [1], "timestamp": pa.array([1]).cast(pa.timestamp("ns"))},
        "e.parquet:row 1: found the time 1, expected a time in whole microseconds",
    ),
}


@pytest.mark.parametrize("case", PARQUET)
def test_parquet(tmp_path: Path, case: str) -> None:
    columns, expected = PARQUET[case]
    pq.write_table(pa.table(columns), tmp_path / "e.parquet", version="2.6")
    assert expected in refused(tmp_path / "e.parquet")


def test_parquet_text_that_is_no_text(tmp_path: Path) -> None:
    offsets = pa.py_buffer(np.array([0, 1, 2], dtype=np.int32))
    broken = pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"a\xff")])
    events = {"user_id": [1, 2], "timestamp": [1, 2]}
    path = tmp_path / "e.parquet"
    pq.write_table(pa.table(events | {"item_id": broken}), path)
    assert refused(path) == (
        f"{path}: found ArrowInvalid: 'In column 1: Invalid: Dictionary array invalid: Invalid: Invalid UTF8 sequence at string "
        "index 1', expected a whole parquet file; write or copy it again"
    )
    # A column that nobody asks for is not read.
    pq.write_table(pa.table(events | {"item_id": [3, 4], "note": broken}), path)
    assert read_events(path).num_events == 2
    (block,) = parquet_blocks(path, lambda _: None, ["item_id"])
    assert block.rows.to_pydict() == {"item_id": [3, 4]}


def test_parquet_row_numbers_count_through_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jagged.data.tabular._PARQUET_ROWS", 16)
    table = pa.table({"user_id": [*range(100), None], "item_id": range(101), "timestamp": range(101)})
    pq.write_table(table, tmp_path / "e.parquet", row_group_size=30)
    assert "e.parquet:row 101: found a null user id" in refused(tmp_path / "e.parquet")


@pytest.mark.parametrize("keep", [0, 3, 4, 100, -20, -1])
def test_truncated_parquet(tmp_path: Path, keep: int) -> None:
    path = oracle.write_parquet(tmp_path / "e.parquet", [(1, 2, 3)] * 50)
    path.write_bytes(path.read_bytes()[:keep])
    assert refused(path).startswith(f"{path}: found Arrow")


def test_truncated_and_damaged_gzip(tmp_path: Path) -> None:
    path = tmp_path / "e.txt.gz"
    whole = gzip.compress(b"".join(b"%d %d\n" % (i, i * i) for i in range(5000)))
    for data in (whole[:-4], whole[: len(whole) // 2], whole[:5], b"not gzip", whole[:200] + b"\xff" * 9 + whole[209:]):
        path.write_bytes(data)
        assert str(path) in refused(path)


def test_gzip_bombs_end_early_with_a_place(tmp_path: Path) -> None:
    path = tmp_path / "e.csv.gz"
    path.write_bytes(gzip.compress(HEADER + b"\0" * (80 << 20), 1))
    assert "e.csv.gz:2: found the control character 0x00" in refused(path)
    path.write_bytes(gzip.compress(b"1," * (40 << 20), 1))
    assert "e.csv.gz:1: found a line of more than 64 MiB" in refused(path)


def test_parquet_bombs_do_not_unpack(tmp_path: Path) -> None:
    long = pa.DictionaryArray.from_arrays(pa.array([0] * 100_000, pa.int32()), pa.array(["x" * (1 << 20)]))
    table = pa.table({"user_id": range(100_000), "item_id": long, "timestamp": range(100_000)})
    pq.write_table(table, tmp_path / "e.parquet")
    assert (tmp_path / "e.parquet").stat().st_size < 3 << 20
    assert "row 1: found the item id 'xxx" in refused(tmp_path / "e.parquet")
    plain = pa.table({"user_id": range(64), "item_id": [f"{i}{'x' * (1 << 20)}" for i in range(64)], "timestamp": range(64)})
    pq.write_table(plain, tmp_path / "f.parquet", compression="gzip", use_dictionary=False)
    assert (tmp_path / "f.parquet").stat().st_size < 1 << 20
    expected = "f.parquet:row 1: found 1048577 bytes in 'item_id', expected a text of at most 1048576"
    assert refused(tmp_path / "f.parquet") == f"{tmp_path}/{expected}"


def test_paths(tmp_path: Path) -> None:
    assert "no file or folder of that name" in refused(tmp_path / "none.csv")
    assert "a folder without data files" in refused(tmp_path)
    (tmp_path / "e.json").write_text("{}")
    assert "found the unknown suffix '.json'" in refused(tmp_path / "e.json")
    assert "a folder without data files" in refused(tmp_path)
    assert "found format 'json'" in refused(tmp_path / "e.json", format="json")
    os.mkfifo(tmp_path / "pipe.csv")
    assert "neither a file nor a folder" in refused(tmp_path / "pipe.csv")
    (tmp_path / "e.parquet.gz").write_bytes(b"")
    assert "unknown suffix" in refused(tmp_path / "e.parquet.gz")
    assert "no file or folder of that name" in refused(Path("a\0b"))
    line_break = oracle.write_text(tmp_path / "a\nb.txt", [("only", "x" * 2000)])
    assert r"a\nb.txt:1: found" in refused(line_break)


def test_columns_must_differ(tmp_path: Path) -> None:
    path = oracle.write_csv(tmp_path / "e.csv", [(1, 2, 3)])
    assert "different, non-empty names" in refused(path, user_column="item_id")
    assert "different, non-empty names" in refused(path, user_column="")


def test_files_of_a_folder_must_agree(tmp_path: Path) -> None:
    oracle.write_parquet(tmp_path / "a.parquet", [(1, 2, 3)])
    oracle.write_parquet(tmp_path / "b.parquet", [("x", 2, 3)])
    first, second = tmp_path / "a.parquet", tmp_path / "b.parquet"
    expected = f"{second}: found the column 'user_id' of type string, expected int64 as in {first}; cast the column"
    assert refused(tmp_path) == expected
    (tmp_path / "b.parquet").unlink()
    pq.write_table(
        pa.table({"user_id": [1], "item_id": [2], "timestamp": pa.array([3], pa.timestamp("s"))}), tmp_path / "b.parquet"
    )
    kind = "timestamp[ms]"  # parquet has no seconds
    expected = f"{second}: found the column 'timestamp' of type {kind}, expected int64 as in {first}; cast the column"
    assert refused(tmp_path) == expected


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "e.csv").write_bytes(HEADER + b"1,2,3\n1,2\n")
    refused(tmp_path / "e.csv")
    refused(tmp_path / "e.csv", cache_directory=tmp_path / "cache")
    assert not list((tmp_path / "temporary").iterdir())
    assert not list((tmp_path / "cache").iterdir())
    (tmp_path / "e.csv").write_bytes(HEADER + b"1,2,3\n")
    dataset = read_events(tmp_path / "e.csv")
    assert list((tmp_path / "temporary").iterdir())
    del dataset
    assert not list((tmp_path / "temporary").iterdir())


@contextlib.contextmanager
def limited(allowed: int) -> Iterator[None]:
    """Files of at most so many bytes: writing beyond the limit is an error like that of a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (allowed, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    path = oracle.write_text(tmp_path / "e.txt", [range(3000)])
    for allowed in (4096, 20_000, 30_000, 47_900):
        with limited(allowed), pytest.raises(DataError) as caught:
            read_events(path, cache_directory=tmp_path / "cache")
        reason = "could not be written: File too large; name another cache_directory, on a disk with room"
        assert str(caught.value) == f"{tmp_path / 'cache'}: {reason}"
        assert not list((tmp_path / "cache").iterdir())
    assert read_events(path, cache_directory=tmp_path / "cache").num_events == 2999


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    path = oracle.write_text(tmp_path / "e.txt", [(1, 2)])
    (tmp_path / "file").touch()
    with pytest.raises(DataError) as caught:
        read_events(path, cache_directory=tmp_path / "file")
    expected = f"{tmp_path / 'file'}: could not be written: File exists; name another cache_directory, on a disk with room"
    assert str(caught.value) == expected


WRITERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "read_events": (read_events, "set TMPDIR (or cache_directory) to a directory on a disk with room"),
    "synthetic_sessions": (lambda path: synthetic_sessions(num_users=300), "set TMPDIR to a directory on a disk with room"),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_temporary_directory_that_cannot_be_made_or_filled_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: str
) -> None:
    write, cure = WRITERS[writer]
    path = oracle.write_text(tmp_path / "e.txt", [range(3000)])
    none, file, room = tmp_path / "none", tmp_path / "file", tmp_path / "room"
    file.touch()
    room.mkdir()
    for place, reason in ((none, "No such file or directory"), (file, "Not a directory")):
        monkeypatch.setattr("tempfile.tempdir", str(place))
        with pytest.raises(DataError) as caught:
            write(path)
        assert str(caught.value) == f"{place}: could not be written: {reason}; {cure}"
    monkeypatch.setattr("tempfile.tempdir", str(room))
    for allowed in (1000, 20_000):
        with limited(allowed), pytest.raises(DataError) as caught:
            write(path)
        assert str(caught.value) == f"{room}: could not be written: File too large; {cure}"
        assert not list(room.iterdir())
    # Where no directory at all serves, tempfile says which ones it has tried.
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: [str(none)])
    with pytest.raises(DataError) as caught:
        write(path)
    tried = f"No usable temporary directory found in ['{none}']"
    assert str(caught.value) == f"a temporary directory: could not be written: {tried}; {cure}"


@pytest.mark.parametrize("cached", [False, True])
def test_a_file_that_goes_before_it_is_read_is_no_failure_of_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached: bool
) -> None:
    path = oracle.write_text(tmp_path / "e.txt", [(1, 2)])

    def found(*arguments: Any, **options: Any) -> Source:
        result = find_source(*arguments, **options)
        path.unlink()
        return result

    monkeypatch.setattr("jagged.data.events.find_source", found)
    with pytest.raises(DataError) as caught:
        read_events(path, cache_directory=tmp_path / "cache" if cached else None)
    assert str(caught.value) == f"{path}: found FileNotFoundError: No such file or directory, expected a readable file"


@pytest.mark.parametrize("cached", [False, True])
def test_what_breaks_while_it_is_read_is_no_failure_of_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached: bool
) -> None:
    def read(*arguments: object) -> Iterator[Block]:
        raise OSError(errno.EIO, os.strerror(errno.EIO))
        yield

    path = oracle.write_text(tmp_path / "e.txt", [(1, 2)])
    monkeypatch.setattr("jagged.data.sources.text_blocks", read)
    with pytest.raises(DataError) as caught:
        read_events(path, cache_directory=tmp_path / "cache" if cached else None)
    assert str(caught.value) == f"{path}: found OSError: Input/output error, expected a readable file"
