"""Names of labels: a line each, read equal, or refused in one line with the place and the cure."""

from __future__ import annotations

import gzip
from pathlib import Path

import pyarrow as pa
import pytest

from jagged.data import DataError
from jagged.data.label_names import read_label_names, write_label_names

NAMES = ["café", "a, \"b\" <c> & 'd'\t", " blank before", "café", "\u2028 line separator", "日本"]


@pytest.mark.parametrize("block", [5, 16, 1 << 20])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("last", [True, False])
def test_lines_become_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, mark: str, end: str, last: bool) -> None:
    monkeypatch.setattr("jagged.data.files.BLOCK_BYTES", block)
    content = (mark + end.join(NAMES) + end * last).encode()
    (tmp_path / "Y.txt").write_bytes(content)
    (tmp_path / "Y.txt.gz").write_bytes(gzip.compress(content))
    for name in ("Y.txt", "Y.txt.gz"):
        names = read_label_names(tmp_path / name, len(NAMES))
        assert (names.type, names.to_pylist()) == (pa.large_string(), NAMES)


def test_what_is_written_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jagged.data.label_names._WRITTEN", 2)
    for names in (NAMES, NAMES[:4], []):
        write_label_names(pa.array(names, pa.large_string()), tmp_path / "names.txt")
        assert read_label_names(tmp_path / "names.txt", len(names)).to_pylist() == names


NOT_UTF8 = "found the byte 0xe9, which is not UTF-8, expected UTF-8 text; convert the file (iconv -t utf-8)"
EMPTY = "found an empty name, expected the name of a label; write one, its id for example"


@pytest.mark.parametrize("block", [5, 1 << 20])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a\nb\n", ": found 2 names, expected 3, one for each label; name the file of this data set"),
        (b"a\nb\nc\nd", ": found 4 names, expected 3, one for each label; name the file of this data set"),
        (b"a", ": found 1 name, expected 3, one for each label; name the file of this data set"),
        (b"", ": found 0 names, expected 3, one for each label; name the file of this data set"),
        (b"a\n\nc\n", f":2: {EMPTY}"),
        (b"a\r\nb\r\n \t\r\n", f":3: {EMPTY}"),
        (b"a\nb\nc\n\n", f":4: {EMPTY}"),
        (b"a\nb\ncaf\xe9\n", f":3: {NOT_UTF8}"),
        (b"a\ncaf\xe9", f":2: {NOT_UTF8}"),
        (b"a\n\x1b[31m\nc", ":2: found the control character 0x1b, expected text without control characters"),
    ],
)
def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, content: bytes, message: str) -> None:
    monkeypatch.setattr("jagged.data.files.BLOCK_BYTES", block)
    (tmp_path / "Y.txt").write_bytes(content)
    with pytest.raises(DataError) as found:
        read_label_names(tmp_path / "Y.txt", 3)
    assert str(found.value) == f"{tmp_path / 'Y.txt'}{message}"


def test_there_may_be_more_names(tmp_path: Path) -> None:
    (tmp_path / "Y.txt").write_text("a\nb\nc\n")
    for count in (2, 3):
        assert len(read_label_names(tmp_path / "Y.txt", count, or_more=True)) == 3
    with pytest.raises(DataError) as found:
        read_label_names(tmp_path / "Y.txt", 4, or_more=True)
    expected = "found 3 names, expected 4 or more, one for each label; name the file of this data set"
    assert str(found.value) == f"{tmp_path / 'Y.txt'}: {expected}"


def test_what_is_no_file(tmp_path: Path) -> None:
    for path, told in ((tmp_path / "Y.txt", "no file of that name"), (tmp_path, "a folder")):
        with pytest.raises(DataError) as found:
            read_label_names(path, 3)
        expected = "expected a file of names of labels; name a file with a name a line, as Y.txt"
        assert str(found.value) == f"{path}: found {told}, {expected}"
