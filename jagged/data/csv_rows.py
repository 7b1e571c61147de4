"""Rows of csv, as bytes: which have stray quotes, and what is left of a file when rows that cannot be read are left out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from jagged.data.errors import DataError, at, refuse, shown
from jagged.data.files import (
    BLOCK_BYTES,
    MARK,
    check_length,
    checked,
    control_character,
    forbidden,
    not_utf8,
    stream,
    unclosed_quote,
)

IntArray = npt.NDArray[np.int64]

# Bytes of whole lines that are decoded together: an error keeps a copy of them.
_TOGETHER = 1 << 14
_ESCAPED = 'write a quote inside a quoted field as ""'
_NO_END = f'{_ESCAPED}; on_error="skip" leaves out no such row, because where it ends cannot be told'


def first_stray(block: bytes, starts: IntArray, delimiter: str) -> int:
    """The first of a block's rows that is not made of fields as abc or "abc", or -1. Each has the blank lines behind it."""
    offsets = np.append(starts, len(block)).astype(np.int64)
    # Bytes and no text, which may still be none.
    rows = pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(starts), [None, pa.py_buffer(offsets), pa.py_buffer(block)])
    cut = re.escape(delimiter)
    one = f'(?:"(?:[^"]|"")*"|[^"{cut}\\n]*)'
    return int(pc.index(pc.match_substring_regex(rows, f"^{one}(?:{cut}{one})*\\n+$"), False).as_py())


def stray_quote(path: Path, line: int, row: bytes, cure: str = _ESCAPED) -> DataError:
    """The error of a row that is not made of fields as abc or "abc"."""
    found = f"a stray quote in {shown(row.decode('utf-8', 'replace').rstrip())}"
    return refuse(at(path, line), found, 'fields as abc or "abc"', cure)


def begins_of_rows(raw: npt.NDArray[np.uint8], starts: IntArray) -> npt.NDArray[np.bool_]:
    """Which lines begin a row: those before which quotes are closed."""
    return np.searchsorted(np.flatnonzero(raw == 34), starts) % 2 == 0


@dataclass
class _Rows:
    """Some rows of a file.

    Attributes:
        starts: where each begins, int64.
        stop: where the last one ends.
        strays: those with a stray quote, by their number here.
    """

    starts: IntArray
    stop: int
    strays: list[int] = field(default_factory=list)

    def at(self, positions: Any) -> Any:
        """The number of the row in which a byte stands."""
        return np.searchsorted(self.starts, positions, side="right") - 1

    def span(self, row: int) -> tuple[int, int]:
        """Where a row begins and ends."""
        return int(self.starts[row]), int(self.starts[row + 1]) if row + 1 < len(self.starts) else self.stop


class _Grammar:
    """Where rows end, by regular expressions that look at no byte twice."""

    def __init__(self, delimiter: str) -> None:
        self.delimiter = delimiter
        cut = re.escape(delimiter.encode())
        quoted, plain = rb'"[^"]*+(?:""[^"]*+)*+"', rb'[^"' + cut + rb"\n]*+"
        one = rb"(?:" + quoted + rb"|" + plain + rb")"
        self.good = re.compile(one + rb"(?:" + cut + one + rb")*+\n")
        # A quote in a field that does not begin with one opens nothing, so the row ends with its line. Blanks before a quote
        # may belong to a field that another program wrote in quotes.
        within_line = quoted.replace(rb'[^"]', rb'[^"\n]') + rb"(?=[" + cut + rb"\n])"
        blanks = rb"[" + b" \t".replace(delimiter.encode(), b"") + rb"]*"
        either = rb"(?:" + within_line + rb"|(?!" + blanks + rb'")[^' + cut + rb"\n]*+)"
        self.stray = re.compile(either + rb"(?:" + cut + either + rb")*+\n")
        # What goes on behind the end of what was read.
        self.open = re.compile(rb"(?:" + one + cut + rb")*+(?:" + quoted + rb"?|" + plain + rb")\Z")

    def rows(self, path: Path, data: bytes, line: int, *, is_last: bool) -> _Rows:
        """The whole rows at the beginning of `data`, which begins with one.

        Raises:
            DataError: a row of which cannot be told where it ends.
        """
        raw = np.frombuffer(data, dtype=np.uint8)
        ends = np.flatnonzero(raw == 10) + 1
        starts = np.concatenate(([0], ends))
        if b'"' not in data:
            return _Rows(starts[:-1], int(starts[-1]))
        starts = starts[begins_of_rows(raw, starts)]
        stop = int(starts[-1])
        bad = first_stray(data[:stop], starts[:-1], self.delimiter) if stop else -1
        # From the first row that is odd on, one after the other.
        known = len(starts) - 1 if bad < 0 else bad
        found, position = _Rows(starts[:known], stop), int(starts[known])
        others: list[int] = []
        while data.find(b"\n", position) >= 0:
            row = self.good.match(data, position)
            if row is None:
                row = self.stray.match(data, position)
                if row is not None:
                    found.strays.append(len(found.starts) + len(others))
                elif self.open.match(data, position) is None:
                    end = data.index(b"\n", position)
                    raise stray_quote(path, line + data.count(b"\n", 0, position), data[position:end], _NO_END)
                elif is_last:
                    raise unclosed_quote(path, line + data.count(b"\n", 0, position), _NO_END)
                else:
                    break
            others.append(position)
            position = row.end()
        return _Rows(np.append(found.starts, np.array(others, dtype=np.int64)), position, found.strays)


def readable_blocks(
    path: Path, delimiter: str, advance: Callable[[int], object], skip: Callable[[str], None]
) -> Iterator[tuple[bytes, int]]:
    """As `read_blocks` of a csv file, with blank lines in the place of rows that cannot be read.

    These are rows with control characters or bytes that are not UTF-8, and lines with a quote in a field that begins with none.

    Args:
        path, advance: as of `read_blocks`.
        delimiter: between fields.
        skip: called with what is wrong with each row that is left out.

    Raises:
        DataError: the file cannot be read or decompressed; the header has one of these faults; or a row has a fault and it cannot
            be told where it ends.
    """
    grammar = _Grammar(delimiter)
    line, tail, half, has_header = 1, b"", b"", False
    for number, (data, is_last) in enumerate(_and_last(stream(path, advance))):
        # Once each: of what is left of `\r\r\n` a second time would take both.
        data = (half + data if number else data.removeprefix(MARK)).replace(b"\r\n", b"\n")
        # Half of a line break says nothing yet.
        half = b"\r" if data.endswith(b"\r") and not is_last else b""
        data = tail + data.removesuffix(half)
        if is_last:
            data = data.removesuffix(b"\n") + b"\n"
        rows = grammar.rows(path, data, line, is_last=is_last)
        check_length(path, line, rows.stop or len(data))
        block, tail = data[: rows.stop], data[rows.stop :]
        if not block:
            continue
        faults = _faults(path, block, rows, line)
        if not has_header and (blank := len(block) - len(block.lstrip(b"\n"))) < len(block):
            has_header = True
            header = rows.at(blank)
            if header in faults:
                raise faults[header]
        pieces, kept = [], 0
        for row in sorted(faults):
            skip(str(faults[row]))
            begin, end = rows.span(row)
            pieces += [block[kept:begin], b"\n" * block.count(b"\n", begin, end)]
            kept = end
        yield b"".join([*pieces, block[kept:]]), line
        line += block.count(b"\n")


def _and_last(chunks: Iterator[bytes]) -> Iterator[tuple[bytes, bool]]:
    """Each with whether it is the last one."""
    before = next(chunks, None)
    for chunk in chunks:
        assert before is not None
        yield before, False
        before = chunk
    if before is not None:
        yield before, True


def _faults(path: Path, block: bytes, rows: _Rows, line: int) -> dict[int, DataError]:
    """What is wrong with which rows, one fault of each."""
    ends = np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == 10)
    found: dict[int, DataError] = {}
    kinds = (
        (control_character, forbidden(block)),
        (not_utf8, np.array(list(_not_utf8(block)), dtype=np.int64)),
    )
    for error, positions in kinds:
        of_rows, first = np.unique(rows.at(positions), return_index=True)
        for row, position in zip(of_rows.tolist(), positions[first].tolist(), strict=True):
            found.setdefault(row, error(path, line + int(np.searchsorted(ends, position)), block[position]))
    for row in rows.strays:
        begin, end = rows.span(row)
        found.setdefault(row, stray_quote(path, line + int(np.searchsorted(ends, begin)), block[begin:end]))
    return found


def _not_utf8(block: bytes) -> Iterator[int]:
    """The first byte of each line that is not UTF-8."""
    if block.isascii():
        return
    begin = 0
    while begin < len(block):
        # A line break is no part of any other character.
        end = block.rfind(b"\n", begin, begin + _TOGETHER) + 1 or block.index(b"\n", begin) + 1
        try:
            block[begin:end].decode("utf-8")
            begin = end
        except UnicodeDecodeError as error:
            yield begin + error.start
            begin = block.index(b"\n", begin + error.start) + 1


def first_lines(path: Path, count: int) -> Iterator[tuple[bytes, int]]:
    """As `read_blocks` one block of a file's first lines; behind the first one U+FFFD stands for what is no text.

    Raises:
        DataError: the file cannot be read, or its first line is no text.
    """
    data = b""
    for chunk in stream(path, lambda _: None):
        data += chunk
        if data.count(b"\n") >= count or (b"\n" in data and len(data) >= BLOCK_BYTES):
            break
    first, *others = data.removeprefix(MARK).replace(b"\r\n", b"\n").split(b"\n", count)[:count]
    if data:
        yield b"\n".join([checked(path, first, 1), *others, b""]).decode("utf-8", "replace").encode(), 1
