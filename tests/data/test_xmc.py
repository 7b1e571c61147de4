"""Files of the extreme classification repository: read equal, or refused in one line with the place and the cure."""

from __future__ import annotations

import gzip
import io
import itertools
import math
import re
import sys
import tempfile
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jagged.data import DataError, MultiLabelRows, read_xmc, write_xmc
from jagged.data import xmc as module

# Labels and features of a row.
Row = tuple[list[int], list[tuple[int, float]]]
ARRAYS = ("feature_ids", "feature_values", "feature_offsets", "labels", "label_offsets")


def made(rows: list[Row], num_features: int, num_labels: int) -> MultiLabelRows:
    return MultiLabelRows(
        np.array([id for _, features in rows for id, _ in features], dtype=np.int32),
        np.array([value for _, features in rows for _, value in features], dtype=np.float32),
        np.cumsum([0] + [len(features) for _, features in rows], dtype=np.int64),
        np.array([label for labels, _ in rows for label in labels], dtype=np.int32),
        np.cumsum([0] + [len(labels) for labels, _ in rows], dtype=np.int64),
        num_features,
        num_labels,
    )


def same(one: MultiLabelRows, other: MultiLabelRows) -> None:
    assert (len(one), one.num_features, one.num_labels) == (len(other), other.num_features, other.num_labels)
    for name in ARRAYS:
        found, expected = getattr(one, name), getattr(other, name)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected, err_msg=name)


def lines(rows: list[Row]) -> list[str]:
    return [",".join(map(str, labels)) + "".join(f" {id}:{value!r}" for id, value in features) for labels, features in rows]


def refused(path: Path, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        read_xmc(path, progress=False, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(path))
    return message.removeprefix(str(path))


@st.composite
def drawn(draw: st.DrawFn, min_rows: int = 0) -> tuple[list[Row], int, int]:
    num_features, num_labels = draw(st.integers(1, 2000)), draw(st.integers(1, 2000))
    values = st.floats(width=32, allow_nan=False, allow_infinity=False)
    row = st.tuples(
        st.lists(st.integers(0, num_labels - 1), unique=True, max_size=5),
        st.lists(st.tuples(st.integers(0, num_features - 1), values), unique_by=lambda pair: pair[0], max_size=5),
    )
    return draw(st.lists(row, min_size=min_rows, max_size=8)), num_features, num_labels


@given(drawn(), st.data())
def test_what_is_written_is_read(case: tuple[list[Row], int, int], data: st.DataObject) -> None:
    rows, num_features, num_labels = case
    expected = made(rows, num_features, num_labels)
    suffix = data.draw(st.sampled_from(["", "", ".gz", ".zst"]))
    with tempfile.TemporaryDirectory() as folder:
        write_xmc(expected, Path(folder, "e.txt" + suffix))
        same(read_xmc(Path(folder, "e.txt" + suffix)), expected)


@given(drawn(min_rows=1), st.data())
def test_spaces_and_line_ends_are_read_alike(case: tuple[list[Row], int, int], data: st.DataObject) -> None:
    rows, num_features, num_labels = case
    end = data.draw(st.sampled_from(["\n", "\r\n"]))
    gap = data.draw(st.sampled_from([" ", "  ", "\t", " \t "]))
    text = [gap.join(map(str, (len(rows), num_features, num_labels)))]
    for line in lines(rows):
        # A row without labels begins with a blank or with a feature.
        line = line.lstrip(" ") if data.draw(st.booleans()) else line
        text.append(line.replace(" ", gap) + data.draw(st.sampled_from(["", " ", "  "])))
    tail = data.draw(st.sampled_from(["", end, end + end, end + "  " + end])) if text[-1] else end
    content = data.draw(st.sampled_from(["", "\ufeff"])) + end.join(text) + tail
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("jagged.data.files.BLOCK_BYTES", data.draw(st.sampled_from([7, 40, 1 << 20])))
        patch.setattr(module, "_PART_BYTES", data.draw(st.sampled_from([11, 1 << 20])))
        path = Path(folder, "e.txt")
        path.write_bytes(content.encode())
        same(read_xmc(path), made(rows, num_features, num_labels))


NOT_TEXT = "the byte 0xff, which is not UTF-8, expected UTF-8 text; convert the file (iconv -t utf-8)"
# A line with a fault and what is said of it. {L} and {D} are the header's numbers.
FAULTS = {
    "label too large": (
        "{L},0 0:1",
        "found the label '{L}', expected a whole number from 0 to {L-1}, as the first line says {Ls}; "
        "count labels from 0, or mend the first line",
    ),
    "negative label": (
        "0,-1 0:1",
        "found the label '-1', expected a whole number from 0 to {L-1}, as the first line says {Ls}; "
        "count labels from 0, or mend the first line",
    ),
    "label of text": (
        "a 0:1",
        "found the label 'a', expected a whole number from 0 to {L-1}, as the first line says {Ls}; "
        "count labels from 0, or mend the first line",
    ),
    "empty label": (
        "0,,1 0:1",
        "found the label '', expected a whole number from 0 to {L-1}, as the first line says {Ls}; "
        "count labels from 0, or mend the first line",
    ),
    "feature too large": (
        "0 {D}:1",
        "found the feature '{D}', expected a whole number from 0 to {D-1}, as the first line says {Ds}; "
        "count features from 0, or mend the first line",
    ),
    "negative feature": (
        "0 0:1 -0:1",
        "found the feature '-0', expected a whole number from 0 to {D-1}, as the first line says {Ds}; "
        "count features from 0, or mend the first line",
    ),
    "fraction of a feature": (
        "0 0.5:1",
        "found the feature '0.5', expected a whole number from 0 to {D-1}, as the first line says {Ds}; "
        "count features from 0, or mend the first line",
    ),
    "huge feature": (
        "0 99999999999999999999:1",
        "found the feature '99999999999999999999', expected a whole number from 0 to {D-1}, as the first line says {Ds}; "
        "count features from 0, or mend the first line",
    ),
    "nan": (
        "0 0:nan",
        "found the value 'nan' of the feature 0, expected a finite number of float32; write one, or leave the feature out",
    ),
    "infinity": (
        "0 0:-inf",
        "found the value '-inf' of the feature 0, expected a finite number of float32; write one, or leave the feature out",
    ),
    "beyond float32": (
        "0 0:1e39",
        "found the value '1e39' of the feature 0, expected a finite number of float32; write one, or leave the feature out",
    ),
    "no value": (
        "0 0:",
        "found the value '' of the feature 0, expected a finite number of float32; write one, or leave the feature out",
    ),
    "no number": (
        "0 0:1.2.3",
        "found the value '1.2.3' of the feature 0, expected a finite number of float32; write one, or leave the feature out",
    ),
    "hexadecimal": (
        "0 0:0x10",
        "found the value '0x10' of the feature 0, expected a finite number of float32; write one, or leave the feature out",
    ),
    "feature twice": ("0 0:1 0:2", "found the feature 0 twice, expected each feature once in a row; leave one of the two out"),
    "label twice": ("0,0 0:1", "found the label 0 twice, expected each label once in a row; leave one of the two out"),
    "label behind features": (
        "0 0:1 0",
        "found '0', expected a feature as 3:0.5; write labels first, separated by commas without blanks, and then the features",
    ),
    "label behind a blank": (
        " 0 0:1",
        "found '0', expected a feature as 3:0.5; write labels first, separated by commas without blanks, and then the features",
    ),
    "two colons": (
        "0 0:1:2",
        "found '0:1:2', expected a feature as 3:0.5; write labels first, separated by commas without blanks, "
        "and then the features",
    ),
    "control character": (
        "0 0:1\x00",
        "found the control character 0x00, expected text without control characters",
    ),
    "carriage return": ("0 \r0:1", "found the control character 0x0d, expected text without control characters"),
    "not utf-8": ("0 0:\udcff", f"found {NOT_TEXT}"),
}


@pytest.mark.parametrize("kind", FAULTS)
@settings(max_examples=20)
@given(data=st.data())
def test_a_damaged_line_is_refused_with_its_number(kind: str, data: st.DataObject) -> None:
    rows, num_features, num_labels = data.draw(drawn(min_rows=1))
    fault, expected = FAULTS[kind]
    for name, count, what in (("L", num_labels, "label"), ("D", num_features, "feature")):
        many = f"{count:,} {what}" + "s" * (count != 1)
        fault = fault.replace(f"{{{name}}}", str(count))
        expected = expected.replace(f"{{{name}}}", str(count)).replace(f"{{{name}-1}}", f"{count - 1:,}")
        expected = expected.replace(f"{{{name}s}}", many)
    bad = data.draw(st.integers(0, len(rows) - 1))
    text = [f"{len(rows)} {num_features} {num_labels}", *lines(rows)]
    text[bad + 1] = fault
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("jagged.data.files.BLOCK_BYTES", data.draw(st.sampled_from([7, 40, 1 << 20])))
        path = Path(folder, "e.txt")
        path.write_bytes("\n".join([*text, ""]).encode("utf-8", "surrogateescape"))
        assert refused(path) == f":{bad + 2}: {expected}"


_HEADER = "expected a first line of three whole numbers: of rows, of features and of labels"
NO_HEADER = f", {_HEADER}; write it above the rows, as 1000 500 200"
EMPTY = f": found an empty file, {_HEADER}; fetch it again"
MEND = "; fetch the file again, or mend its first line"
FILES = {
    "empty": (b"", EMPTY),
    "only a mark": (b"\xef\xbb\xbf", EMPTY),
    "no header": (
        b"0,1 2:0.5\n",
        ":1: found '0,1 2:0.5'" + NO_HEADER,
    ),
    "header of two": (
        b"3 4\n",
        ":1: found '3 4'" + NO_HEADER,
    ),
    "header of four": (
        b"3 4 5 6\n",
        ":1: found '3 4 5 6'" + NO_HEADER,
    ),
    "negative header": (
        b"1 -4 5\n0 0:1\n",
        ":1: found '1 -4 5'" + NO_HEADER,
    ),
    "blank header": (
        b"\n1 4 5\n0 0:1\n",
        ":1: found ''" + NO_HEADER,
    ),
    "header of no text": (b"1 4 \xff\n", ":1: found " + NOT_TEXT),
    "utf-16": ("1 4 5\n".encode("utf-16-le"), ":1: found the control character 0x00, expected text without control characters"),
    "too many features": (
        b"1 3000000000 5\n",
        ":1: found 3,000,000,000 features, expected at most 2,147,483,647; mend the first line",
    ),
    "fewer rows": (
        b"3 4 5\n0 0:1\n1 1:1\n",
        ":3: found the end of the file behind 2 rows, expected 3 as the first line says" + MEND,
    ),
    "no rows": (
        b"3 4 5\n",
        ":1: found the end of the file behind 0 rows, expected 3 as the first line says" + MEND,
    ),
    "more rows than memory has": (
        b"999999999999999999 4 5\n0 0:1\n",
        ":2: found the end of the file behind 1 row, expected 999,999,999,999,999,999 as the first line says" + MEND,
    ),
    "more rows": (
        b"1 4 5\n0 0:1\n\n \n1 1:1\n",
        ":5: found a row behind the 1 that the first line promises, expected the end of the file" + MEND,
    ),
    "no features": (
        b"1 0 5\n0 0:1 1:2\n",
        ":2: found the feature '0', expected no feature, as the first line says 0 features; "
        "count features from 0, or mend the first line",
    ),
    "no labels": (
        b"1 5 0\n0,1 0:1\n",
        ":2: found the label '0', expected no label, as the first line says 0 labels; "
        "count labels from 0, or mend the first line",
    ),
}


@pytest.mark.parametrize("block", [4, 1 << 20])
@pytest.mark.parametrize("case", FILES)
def test_a_damaged_file(tmp_path: Path, case: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data, expected = FILES[case]
    monkeypatch.setattr("jagged.data.files.BLOCK_BYTES", block)
    (tmp_path / "e.txt").write_bytes(data)
    assert refused(tmp_path / "e.txt") == expected


def test_what_is_no_file(tmp_path: Path) -> None:
    expected = "expected a file of rows with features and labels; name a file with a first line of three numbers, as train.txt"
    assert refused(tmp_path / "e.txt") == f": found no file of that name, {expected}"
    assert refused(tmp_path) == f": found a folder, {expected}"
    with pytest.raises(DataError, match="found no file of that name"):
        read_xmc("a\0b")
    (tmp_path / "e.gz").write_bytes(gzip.compress(b"1 2 3\n0 0:1\n")[:-9])
    assert "expected a readable file" in refused(tmp_path / "e.gz")


def test_an_overlong_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jagged.data.files.BLOCK_BYTES", 1 << 10)
    monkeypatch.setattr("jagged.data.files.MAX_LINE_BYTES", 1 << 20)
    (tmp_path / "e.txt").write_bytes(b"2 4 5\n0 0:1\n1" + b" " * (2 << 20) + b"1:1\n")
    for on_error in ("stop", "skip"):
        assert refused(tmp_path / "e.txt", on_error=on_error) == ":3: found a line of more than 1 MiB, expected shorter lines"


def test_bad_rows_are_skipped_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good: list[Row] = [([i % 7, 8], [(i % 5, 0.5), (6, float(i))]) for i in range(1000)]
    text = lines(good)
    bad = {100: "0 0:x", 101: "0,0 1:1", 250: "\udcff 1:1", 400: "1:2:3", 700: "1:1 1:1", 990: "99 0:1", 999: ","}
    for row, line in bad.items():
        text[row] = line
    path = tmp_path / "e.txt"
    path.write_bytes("\n".join(["1000 7 9", *text]).encode("utf-8", "surrogateescape"))
    monkeypatch.setattr(module, "_PART_BYTES", 200)
    rows = read_xmc(path, on_error="skip")
    same(rows, made([row for number, row in enumerate(good) if number not in bad], 7, 9))
    assert rows.notes["skipped_rows"] == 7
    assert [re.search(r":(\d+): found", first)[1] for first in rows.notes["skipped_rows_first"]] == [
        "102",
        "103",
        "252",
        "402",
        "702",
    ]  # type: ignore[index]
    assert refused(path) == (
        ":102: found the value 'x' of the feature 0, expected a finite number of float32; write one, or leave the feature out"
    )
    path.write_text("100 7 9\n" + "\n".join([*lines(good[:98]), "x", "y"]))
    expected = f"found 2 bad rows of 100 (the first: {path}:100: found the label 'x'"
    assert expected in refused(path, on_error="skip")


def reference(line: str, num_features: int, num_labels: int) -> Row | None:
    """A line read field by field, or none."""
    labels, features, fields = [], [], re.split(r"[ \t]+", line)
    if ":" not in fields[0] and fields[0]:
        if not all(re.fullmatch("[0-9]{1,18}", label) for label in fields[0].split(",")):
            return None
        labels, fields = [int(label) for label in fields[0].split(",")], fields[1:]
    for field in filter(None, fields):
        pair = re.fullmatch(r"([0-9]{1,18}):([-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)", field)
        if pair is None or not math.isfinite(float(pair[2])) or abs(float(pair[2])) > 3.4e38:
            return None
        features.append((int(pair[1]), float(np.float32(pair[2]))))
    ids = [id for id, _ in features]
    if max(labels, default=0) >= num_labels or max(ids, default=0) >= num_features:
        return None
    return None if len(set(labels)) < len(labels) or len(set(ids)) < len(ids) else (labels, features)


PIECES = ["0", "1", "2", "12", "1:1", " 0:1", " 3:.5", ":", ",", " ", "\t", "-", "+", ".", "e", "E3", "nan", "é", " 2:-1e-3", "x"]


@given(st.lists(st.lists(st.sampled_from(PIECES), max_size=8).map("".join), min_size=1, max_size=6), st.integers(1, 13))
def test_any_line_is_read_as_field_by_field(text: list[str], limit: int) -> None:
    expected = [reference(line, limit, limit) for line in text]
    bad = [number for number, row in enumerate(expected) if row is None]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "e.txt")
        path.write_text("\n".join([f"{len(text)} {limit} {limit}", *text, ""]))
        if bad:
            assert refused(path).startswith(f":{bad[0] + 2}: found ")
            path.write_text(
                "\n".join([f"{len(text) - len(bad)} {limit} {limit}", *[text[i] for i in range(len(text)) if i not in bad], ""])
            )
        same(read_xmc(path), made([row for row in expected if row is not None], limit, limit))


def test_every_short_spelling_of_a_number_is_a_value_or_refused(tmp_path: Path) -> None:
    """Every string of up to five of these: what the vectorised reader takes is what the grammar says, and no more."""
    spelled = ["".join(of) for size in range(6) for of in itertools.product("1.+-e", repeat=size)]
    grammar = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[-+]?[0-9]+)?")
    good = [text for text in spelled if grammar.fullmatch(text) and abs(float(text)) < 3.4e38]
    (tmp_path / "e.txt").write_text("\n".join([f"{len(good)} 1 1", *(f"0 0:{text}" for text in good)]))
    np.testing.assert_array_equal(
        read_xmc(tmp_path / "e.txt").feature_values, np.array([float(text) for text in good], np.float32)
    )
    header = module._Header(len(spelled), 1, 1)
    bad = sorted(set(spelled) - set(good))
    together = "".join(f"0 0:{text}\n" for text in spelled).encode()
    assert sorted(spelled[row] for row in module._Parsed.of(together, header).bad) == bad
    # Alone, where nothing else makes the reader look again.
    assert [text for text in bad if not len(module._Parsed.of(f"0 0:{text}\n".encode(), header).bad)] == []


def test_memory_above_the_result_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count, each = 20_000, 50
    rows = MultiLabelRows(
        np.tile(np.arange(each, dtype=np.int32), count),
        np.full(count * each, 0.25, dtype=np.float32),
        np.arange(count + 1, dtype=np.int64) * each,
        np.zeros(count, dtype=np.int32),
        np.arange(count + 1, dtype=np.int64),
        each,
        1,
    )
    write_xmc(rows, tmp_path / "e.txt")
    monkeypatch.setattr("jagged.data.files.BLOCK_BYTES", 1 << 16)
    monkeypatch.setattr(module, "_PART_BYTES", 1 << 16)
    tracemalloc.start()
    try:
        read = read_xmc(tmp_path / "e.txt")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    same(read, rows)
    size = sum(getattr(rows, name).nbytes for name in ARRAYS)
    # A block of 64 KiB takes some 40 times as much; a resize that moves an array has it twice for a moment, which is not counted.
    assert peak < 1.2 * size + 64 * (1 << 16)


def test_rows_are_taken(tmp_path: Path) -> None:
    rows: list[Row] = [([1], [(0, 1.0)]), ([], []), ([0, 2], [(2, -1.0), (1, 0.5)])]
    whole = made(rows, 3, 3)
    same(whole.take(np.array([2, 0, 1, 2])), made([rows[2], rows[0], rows[1], rows[2]], 3, 3))
    filtered = replace(whole, filtered=np.array([2, 0, 1], np.int32), filtered_offsets=np.array([0, 1, 1, 3]))
    some = filtered.take(np.array([2, 1, 0, 2]))
    assert (some.filtered.tolist(), some.filtered_offsets.tolist()) == ([0, 1, 2, 0, 1], [0, 2, 2, 3, 5])  # type: ignore[union-attr]
    for number in (-1, 3):
        with pytest.raises(ValueError, match=f"rows: got {number} to {number}, expected numbers from 0 on, under 3"):
            whole.take(np.array([number]))
    assert repr(whole) == "MultiLabelRows(3 rows, 3 of 3 features, 3 of 3 labels)"
    with pytest.raises(ValueError, match="on_error: got 'no', expected 'stop' or 'skip'"):
        read_xmc(tmp_path, on_error="no")  # type: ignore[arg-type]


def test_what_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rows: got a label twice in row 1, expected each once"):
        write_xmc(made([([], []), ([1, 1], [])], 3, 3), tmp_path / "e.txt")
    with pytest.raises(ValueError, match="rows: got a feature twice in row 0, expected each once"):
        write_xmc(made([([], [(2, 1.0), (2, 1.0)])], 3, 3), tmp_path / "e.txt")
    with pytest.raises(DataError, match="could not be written: No such file or directory; name a file on a disk with room"):
        write_xmc(made([], 3, 3), tmp_path / "none" / "e.txt")
    assert list(tmp_path.iterdir()) == []


def test_many_rows_are_written_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = made([([i % 3], [(j, 0.5) for j in range(i % 5)]) for i in range(100)], 5, 3)
    monkeypatch.setattr(module, "_ROWS_WRITTEN", 7)
    monkeypatch.setattr(module, "_FIELDS_WRITTEN", 4)
    write_xmc(rows, tmp_path / "e.txt")
    same(read_xmc(tmp_path / "e.txt"), rows)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"feature_ids": np.zeros(1, np.int64)}, "feature_ids: got int64 [1], expected one dimension of int32"),
        ({"label_offsets": np.array([0, 2])}, "label_offsets: got other numbers, expected ascending ones from 0 to 1"),
        ({"label_offsets": np.array([0, 1, 1])}, "label_offsets: got 3, expected 2 as for features"),
        ({"num_labels": 1}, "labels: got 1 to 1, expected ids from 0 on, under 1"),
        ({"num_features": -1}, "num_features: got -1, expected 0 to 2147483647"),
        ({"feature_values": np.array([np.nan], np.float32)}, "feature_values: got 1, expected 1 finite numbers"),
        ({"filtered": np.zeros(1, np.int32)}, "filtered, filtered_offsets: got one of them, expected both or none"),
        (
            {"filtered": np.zeros(1, np.int32), "filtered_offsets": np.array([0, 0, 1])},
            "filtered_offsets: got 3, expected 2 as for features",
        ),
        (
            {"filtered": np.full(1, 3, np.int32), "filtered_offsets": np.array([0, 1])},
            "filtered: got 3 to 3, expected ids from 0 on, under 2",
        ),
    ],
)
def test_arrays_that_do_not_fit(change: dict[str, Any], expected: str) -> None:
    good = {
        "feature_ids": np.zeros(1, np.int32),
        "feature_values": np.ones(1, np.float32),
        "feature_offsets": np.array([0, 1]),
        "labels": np.ones(1, np.int32),
        "label_offsets": np.array([0, 1]),
        "num_features": 2,
        "num_labels": 2,
    }
    with pytest.raises(ValueError, match=re.escape(expected)):
        MultiLabelRows(**{**good, **change})


def test_a_bar_shows_on_a_terminal_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(module, "DELAY", 1e-9)
    (tmp_path / "e.txt").write_text("1 2 3\n0 0:1\n")
    for terminal, progress, shows in ((Terminal(), True, True), (Terminal(), False, False), (io.StringIO(), True, False)):
        monkeypatch.setattr(sys, "stderr", terminal)
        read_xmc(tmp_path / "e.txt", progress=progress)
        # It is wiped in the end.
        assert bool(terminal.getvalue()) == shows
