"""Rows of csv that cannot be read, left out: every good row is there, every bad one is counted and placed."""

from __future__ import annotations

import csv
import gzip
import io
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jagged.data import DataError, Dataset, csv_rows, files, read_events
from jagged.data.csv_rows import readable_blocks
from jagged.data.errors import Skipped
from jagged.data.schema import Column, Kind, Schema
from jagged.data.sources import open_table
from tests.conftest import EXAMPLES

HEADER = b"user_id,item_id,timestamp\n"
NO_END = (
    'expected fields as abc or "abc"; write a quote inside a quoted field as ""; '
    'on_error="skip" leaves out no such row, because where it ends cannot be told'
)
STRAY = 'expected fields as abc or "abc"; write a quote inside a quoted field as ""'
# What stands in place of a row of three fields, and what is said of it behind its line; the fault may stand below its first line.
BAD = [
    (b"u\x00,i,1", 0, "found the control character 0x00, expected text without control characters"),
    (b"u,i\r,1", 0, "found the control character 0x0d, expected text without control characters"),
    (b"u,i\xff,1", 0, "found the byte 0xff, which is not UTF-8, expected UTF-8 text; convert the file (iconv -t utf-8)"),
    (b"u,\xe4\xb8,1", 0, "found the byte 0xe4, which is not UTF-8, expected UTF-8 text; convert the file (iconv -t utf-8)"),
    # Control characters are said before other faults of a row.
    (b"\xff,i\x7f,1", 0, "found the control character 0x7f, expected text without control characters"),
    (b'\xffx"y,i,1', 0, "found the byte 0xff, which is not UTF-8, expected UTF-8 text; convert the file (iconv -t utf-8)"),
    (b'"a\nb\x01\nc",i,1', 1, "found the control character 0x01, expected text without control characters"),
    (b'"a\n\nb",i,\xc3', 2, "found the byte 0xc3, which is not UTF-8, expected UTF-8 text; convert the file (iconv -t utf-8)"),
    (b'u,5" disk,1', 0, f"found a stray quote in 'u,5\" disk,1', {STRAY}"),
    (b'u,a"b"c,1', 0, f"found a stray quote in 'u,a\"b\"c,1', {STRAY}"),
    (b'"u, v",5",1', 0, f'found a stray quote in \'"u, v",5",1\', {STRAY}'),
    (b'u,i,1"', 0, f"found a stray quote in 'u,i,1\"', {STRAY}"),
    (b'u,"""i""",x"', 0, f'found a stray quote in \'u,"""i""",x"\', {STRAY}'),
    (b"u,i", 0, "found 2 fields in 'u,i', expected 3 as in the header"),
]


def read(path: Path, **options: Any) -> tuple[list[tuple[str | None, ...]], list[str], Skipped]:
    """Rows as they were read, the place of each, and what was left out."""
    skipped = Skipped()
    with open_table(path, skipped=skipped, progress=False, **options) as table:
        names = ", ".join(f'"{name}"' for name in table.types)
        rows = table.sql(f"SELECT {names} FROM {table.rows} ORDER BY rowid")
        return rows, [table.place(row) for row in range(table.num_rows)], skipped


def good_lines(count: int) -> list[bytes]:
    return [b"u%d,i%d,%d" % (number, number % 7, number) for number in range(count)]


@pytest.mark.parametrize(("bad", "below", "message"), BAD, ids=[repr(bad) for bad, _, _ in BAD])
@pytest.mark.parametrize("at", [0, 57, 199])
@pytest.mark.parametrize("end", [b"\n", b""])
def test_a_bad_row_is_left_out_counted_and_placed(
    tmp_path: Path, bad: bytes, below: int, message: str, at: int, end: bytes
) -> None:
    path, lines = tmp_path / "e.csv", good_lines(200)
    lines[at] = bad
    path.write_bytes(HEADER + b"\n".join(lines) + end)
    rows, places, skipped = read(path)
    assert rows == [tuple(line.decode().split(",")) for number, line in enumerate(lines) if number != at]
    further = bad.count(b"\n")
    assert places == [f"{path}:{number + 2 + further * (number > at)}" for number in range(200) if number != at]
    assert (skipped.count, skipped.first) == (1, [f"{path}:{at + 2 + below}: {message}"])


def test_without_skip_the_first_of_them_stops(tmp_path: Path) -> None:
    path = tmp_path / "e.csv"
    for bad, below, message in BAD:
        path.write_bytes(HEADER + b"u,i,1\n" + bad + b"\nu,i,2\n")
        with pytest.raises(DataError) as caught, open_table(path, progress=False):
            pass
        # Quotes are counted there: an odd one is open.
        told = 'found a quote that is not closed, expected fields as abc or "abc"' if bad.count(b'"') % 2 else message
        assert str(caught.value) == f"{path}:{3 + below}: {told}"


# Faults of which nobody can tell where the row ends.
DOUBTFUL = [
    (b'u,"he said "hi" to me",1', 'found a stray quote in \'u,"he said "hi" to me",1\', '),
    (b'u, "i",1', "found a stray quote in 'u, \"i\",1', "),
    (b'u,"5" disk,1', "found a stray quote in 'u,\"5\" disk,1', "),
    (b'u,"i,1', "found a stray quote in 'u,\"i,1', "),
    (b'u,"a\nb",5",1', "found a stray quote in 'u,\"a', "),
]


@pytest.mark.parametrize(("bad", "message"), DOUBTFUL, ids=[repr(bad) for bad, _ in DOUBTFUL])
def test_a_row_whose_end_cannot_be_told_stops_and_says_why(tmp_path: Path, bad: bytes, message: str) -> None:
    path, lines = tmp_path / "e.csv", good_lines(200)
    lines[100], lines[150] = bad, b'"q",i,1'
    path.write_bytes(HEADER + b"\n".join(lines))
    with pytest.raises(DataError) as caught:
        read(path)
    assert str(caught.value) == f"{path}:102: {message}{NO_END}"


def test_a_quote_that_is_not_closed_stops_and_says_why(tmp_path: Path) -> None:
    path, lines = tmp_path / "e.csv", good_lines(200)
    lines[100] = b'u,"i,1'
    path.write_bytes(HEADER + b"\n".join(lines))
    with pytest.raises(DataError) as caught:
        read(path)
    assert str(caught.value) == f"{path}:102: found a quote that is not closed, {NO_END}"


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"user\x01,i", "1: found the control character 0x01, expected text without control characters"),
        (b"user\xff,i", "1: found the byte 0xff, which is not UTF-8, expected UTF-8 text; convert the file (iconv -t utf-8)"),
        (b'user"s,i', f"1: found a stray quote in 'user\"s,i', {STRAY}"),
        (b'"user\n\x02",i', "2: found the control character 0x02, expected text without control characters"),
    ],
)
def test_a_header_that_cannot_be_read_stops(tmp_path: Path, header: bytes, message: str) -> None:
    path = tmp_path / "e.csv"
    path.write_bytes(header + b"\n" + b"u,1\n" * 300)
    with pytest.raises(DataError) as caught:
        read(path)
    assert str(caught.value) == f"{path}:{message}"


def test_the_first_lines_may_be_bad_where_they_tell_the_delimiter(tmp_path: Path) -> None:
    path = tmp_path / "e.csv.gz"
    text = b"\xef\xbb\xbfuser;items\r\n" + b"\xff,\xff,\x00,\xff\r\n" * 3 + b"\r\n" + b"a;b,c\r\n" * 400
    path.write_bytes(gzip.compress(text))
    rows, places, skipped = read(path)
    assert rows == [("a", "b,c")] * 400
    assert (places[0], places[-1]) == (f"{path}:6", f"{path}:405")
    assert skipped.count == 3


ROWS = st.lists(st.text(st.sampled_from('ab,"\n é'), max_size=4), min_size=3, max_size=3)
FAULTS = [bad for bad, _, _ in BAD]


@settings(max_examples=EXAMPLES)
@given(
    rows=st.lists(ROWS, max_size=30),
    planted=st.lists(st.tuples(st.integers(0, 30), st.sampled_from(FAULTS)), max_size=8),
    size=st.sampled_from([3, 7, 64, 1 << 20]),
    end=st.sampled_from(["\n", "\r\n"]),
)
def test_every_good_row_is_read_and_every_bad_one_is_counted(
    tmp_path_factory: pytest.TempPathFactory, rows: list[list[str]], planted: list[tuple[int, bytes]], size: int, end: str
) -> None:
    """Also where quoted fields hold line breaks, and blocks end anywhere."""
    folder = tmp_path_factory.mktemp("rows")
    path, pieces, line, want, bad_lines = folder / "e.csv", [HEADER.replace(b"\n", end.encode())], 2, [], []
    places = sorted((min(place, len(rows)), number) for number, (place, _) in enumerate(planted))
    for number in range(len(rows) + 1):
        for _, which in (one for one in places if one[0] == number):
            bad = planted[which][1]
            pieces.append(bad + end.encode())
            bad_lines.append(line)
            line += bad.count(b"\n") + 1
        if number < len(rows):
            written = io.StringIO()
            csv.writer(written, quoting=csv.QUOTE_ALL, lineterminator=end).writerow(rows[number])
            want.append((line, tuple(rows[number])))
            pieces.append(written.getvalue().encode())
            line += written.getvalue().count("\n")
    path.write_bytes(b"".join(pieces))
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "BLOCK_BYTES", size)
        skipped = Skipped()
        skipped.check = lambda name, rows: None  # type: ignore[method-assign]
        add, skipped.add = skipped.add, lambda reason: (said.append(reason), add(reason))[1]  # type: ignore[method-assign]
        with open_table(path, delimiter=",", skipped=skipped, progress=False) as table:
            found = table.sql(f"SELECT user_id, item_id, timestamp FROM {table.rows} ORDER BY rowid")
            at = [table.place(row) for row in range(table.num_rows)]
    assert found == [row for _, row in want]
    assert at == [f"{path}:{line}" for line, _ in want]
    assert skipped.count == len(planted)
    # A fault below the first line of its row is placed there.
    told = sorted(int(re.findall(r":(\d+): found", reason)[0]) for reason in said)
    below = {bad: offset for bad, offset, _ in BAD}
    assert told == sorted(first + below[planted[which][1]] for first, (_, which) in zip(bad_lines, places, strict=True))


def slow_rows(data: bytes) -> tuple[list[tuple[int, int]], int] | None:
    """Where good rows begin and end, and how many are bad, a byte after the other; None where an end cannot be told."""
    good, bad, begin = [], 0, 0
    while begin < len(data):
        place, is_stray, has_break = begin, False, False
        while place == begin or data[place - 1 : place] != b"\n":
            stop = place
            if data[place : place + 1] == b'"':
                stop += 1
                while data[stop : stop + 1] not in (b'"', b"") or data[stop : stop + 2] == b'""':
                    stop += 2 if data[stop : stop + 2] == b'""' else 1
                has_break |= b"\n" in data[place:stop]
                stop += 1
                if data[stop : stop + 1] not in (b",", b"\n"):
                    return None
            else:
                while data[stop : stop + 1] not in (b",", b"\n"):
                    stop += 1
                if data[place:stop].lstrip(b" \t")[:1] == b'"':
                    return None
                is_stray |= b'"' in data[place:stop]
            place = stop + 1
        row = data[begin:place]
        if is_stray and has_break:
            return None
        if is_stray or set(row) & {0, 13} or row.decode("utf-8", "ignore").encode() != row:
            bad += 1
        else:
            good.append((begin, place))
        begin = place
    return good, bad


PIECES = [b"a", b",", b'"', b"\n", b'"\n', b'","', b" ", b"\t", b"\r", b"\x00", b"\xc3", b"\xa9"]


@settings(max_examples=EXAMPLES * 4)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=40), size=st.sampled_from([1, 5, 1 << 20]))
@example(pieces=[b'"', b"\r", b"\r", b"\n", b'"'], size=1)
def test_whatever_stands_there_rows_are_those_of_the_definition(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes], size: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "whatever.csv"
    path.write_bytes(b"header\n" + b"".join(pieces))
    data = path.read_bytes().replace(b"\r\n", b"\n").removesuffix(b"\n") + b"\n"
    want, said = slow_rows(data), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "BLOCK_BYTES", size)
        blocks = readable_blocks(path, ",", lambda _: None, said.append)
        if want is None:
            with pytest.raises(DataError, match=re.escape(NO_END)):
                list(blocks)
            return
        found = b"".join(block for block, _ in blocks)
    good, bad = want
    ends = [0, *(end for _, end in good)]
    between = [data[before:begin] for before, (begin, _) in zip(ends, [*good, (len(data), 0)], strict=True)]
    pieces = [b"\n" * gap.count(b"\n") + data[begin:end] for gap, (begin, end) in zip(between, [*good, (0, 0)], strict=True)]
    assert found == b"".join(pieces)
    assert len(said) == bad


def test_blocks_end_where_rows_do_and_blank_lines_stand_for_what_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "e.csv"
    path.write_bytes(b'h,k\n"a\nb",1\n"c\nd\x00",2\nx"y,3\n\nu"v"w,5\n\x01,6\nz,4')
    for size in range(1, 60):
        monkeypatch.setattr(files, "BLOCK_BYTES", size)
        said: list[str] = []
        blocks = list(readable_blocks(path, ",", lambda _: None, said.append))
        assert b"".join(block for block, _ in blocks) == b'h,k\n"a\nb",1\n\n\n\n\n\n\nz,4\n'
        lines = 1
        for block, line in blocks:
            assert (line, block[-1:], block.count(b'"') % 2) == (lines, b"\n", 0)
            lines += block.count(b"\n")
        assert said == [
            f"{path}:5: found the control character 0x00, expected text without control characters",
            f"{path}:6: found a stray quote in 'x\"y,3', {STRAY}",
            f"{path}:8: found a stray quote in 'u\"v\"w,5', {STRAY}",
            f"{path}:9: found the control character 0x01, expected text without control characters",
        ]


def test_long_lines_and_many_are_text_where_they_are(tmp_path: Path) -> None:
    path, lines = tmp_path / "e.csv", [b"\xc3\xa9,%d" % number for number in range(20_000)]
    lines[5] = lines[6] = b"\xc3\xa9" * 30_000 + b",1"
    lines[7], lines[19_000] = b"\xc3\xa9" * 30_000 + b"\xc3,1", b"\xc3,\xa9"
    path.write_bytes(b"h,k\n" + b"\n".join(lines))
    said: list[str] = []
    ((block, _),) = readable_blocks(path, ",", lambda _: None, said.append)
    lines[7] = lines[19_000] = b""
    assert block == b"h,k\n" + b"\n".join(lines) + b"\n"
    assert [reason.partition(", which")[0] for reason in said] == [
        f"{path}:9: found the byte 0xc3",
        f"{path}:19002: found the byte 0xc3",
    ]


def test_a_line_without_an_end_stops_and_a_long_header_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "e.csv"
    path.write_bytes(HEADER + b"u,i,1\n" * 3 + b"u," + b"i" * 200 + b",1\n")
    monkeypatch.setattr(files, "BLOCK_BYTES", 8)
    monkeypatch.setattr(csv_rows, "BLOCK_BYTES", 8)
    assert len(read(path)[0]) == 4
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 64)
    with pytest.raises(DataError) as caught:
        read(path)
    assert str(caught.value) == f"{path}:5: found a line of more than 0 MiB, expected shorter lines"
    # Not when it is read: on the way.
    advanced: list[int] = []
    with pytest.raises(DataError, match="a line of more than 0 MiB"):
        list(readable_blocks(path, ",", advanced.append, print))
    assert sum(advanced) < 150


def test_a_table_counts_unread_rows_with_those_of_bad_values(tmp_path: Path) -> None:
    path, lines = tmp_path / "t.csv", good_lines(500)
    lines[10], lines[20], lines[30], lines[40], lines[50] = b"u\xff,i,1", b"u,i,soon", b'u,5",1', b"u,i", b"u,i,late"
    path.write_bytes(HEADER + b"\n".join(lines) + b"\n")
    schema = Schema((Column("user_id", Kind.USER), Column("item_id", Kind.CANDIDATE), Column("timestamp", Kind.TIME)))
    dataset = Dataset.from_table(path, schema, on_error="skip", progress=False)
    counts = {name: dataset.counts[name] for name in ("rows", "bad", "duplicates", "kept")}
    assert counts == {"rows": 500, "bad": 5, "duplicates": 0, "kept": 495}
    assert dataset.bad_places == [
        f"{path}:12: found the byte 0xff, which is not UTF-8, expected UTF-8 text; convert the file (iconv -t utf-8)",
        f"{path}:32: found a stray quote in 'u,5\",1', {STRAY}",
        f"{path}:42: found 2 fields in 'u,i', expected 3 as in the header",
    ]
    # The share is that of all bad rows.
    lines[60] = b"u,i,never"
    path.write_bytes(HEADER + b"\n".join(lines) + b"\n")
    with pytest.raises(DataError) as caught:
        Dataset.from_table(path, schema, on_error="skip", progress=False)
    assert str(caught.value) == (
        f"{path}: found 6 of 500 rows with a bad value ({dataset.bad_places[0]}), expected at most 1%; "
        "mend the table or the schema"
    )


def test_events_beside_a_table_are_read_as_it_is(tmp_path: Path) -> None:
    path, lines = tmp_path / "events.csv", good_lines(200)
    lines[10], lines[20] = b"u\xff,i,1", b"u1,i1,soon"
    path.write_bytes(HEADER + b"\n".join(lines) + b"\n")
    rows = tmp_path / "rows.csv"
    rows.write_bytes(HEADER + b"\n".join(good_lines(200)) + b"\n")
    dataset = Dataset.from_table(rows, events=path, on_error="skip", progress=False)
    assert (dataset.counts["events: rows"], dataset.counts["events: bad"], dataset.counts["bad"]) == (200, 2, 0)
    with pytest.raises(DataError, match=r"events\.csv:12: found the byte 0xff, which is not UTF-8"):
        Dataset.from_table(rows, events=path, progress=False)


def test_too_many_rows_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(HEADER + b"\n".join([*good_lines(97), b"\xff,i,1", b'u,5",1', b"\x00"]) + b"\n")
    for make in (Dataset.from_table, read_events):
        with pytest.raises(DataError) as caught:
            make(path, on_error="skip", progress=False)
        assert str(caught.value) == (
            f"{path}: found 3 bad rows of 100 (the first: {path}:99: found the byte 0xff, which is not UTF-8, "
            "expected UTF-8 text; convert the file (iconv -t utf-8)), "
            "expected at most 1% of them where on_error is 'skip'; mend what wrote them"
        )


def test_events_are_read_without_what_cannot_be(tmp_path: Path) -> None:
    path, lines = tmp_path / "e.csv", good_lines(600)
    lines[3], lines[99], lines[300] = b"u,i\x01,1", b'u,5",1', b"\xc0,i,1"
    path.write_bytes(HEADER + b"\n".join(lines) + b"\n")
    dataset = read_events(path, on_error="skip", progress=False)
    assert len(dataset.item_ids) == 597
    assert dataset.notes["skipped_rows"] == 3
    assert dataset.notes["skipped_rows_first"] == [
        f"{path}:5: found the control character 0x01, expected text without control characters",
        f"{path}:101: found a stray quote in 'u,5\",1', {STRAY}",
        f"{path}:302: found the byte 0xc0, which is not UTF-8, expected UTF-8 text; convert the file (iconv -t utf-8)",
    ]
