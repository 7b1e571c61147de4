"""The formats of tables, csv and parquet, as streams of checked blocks of rows whose places in the file are known."""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from jagged.data.errors import DataError, at, refuse, shown
from jagged.data.files import read_blocks

_PARQUET_ROWS = 1 << 14
_DELIMITERS = (",", "\t", ";", "|")
# Lines that tell the delimiter.
_FIRST_LINES = 20

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Block:
    """Some rows of a file, and the line or row (`unit`) in it of each: int64 `[len(rows)]`."""

    rows: pa.RecordBatch
    numbers: IntArray
    file: str
    unit: str


@dataclass(frozen=True)
class CsvLayout:
    """What the first lines of a csv file tell."""

    delimiter: str
    names: tuple[str, ...]


def csv_layout(path: Path, delimiter: str | None = None) -> CsvLayout:
    """Delimiter and column names of a csv file: the delimiter that cuts most of its first lines as it cuts the header.

    Raises:
        DataError: no header, names that are empty or there twice, or a file that cannot be read.
    """
    block, _ = next(read_blocks(path, lambda _: None, quoted=True), (b"", 1))
    lines = block.decode("utf-8").splitlines(keepends=True)[: 10 * _FIRST_LINES]
    if not lines:
        raise refuse(path, "an empty file", "a header and rows")
    chosen = delimiter or _delimiter(lines, ".tsv" in [suffix.lower() for suffix in path.suffixes[-2:]])
    try:
        names = next(csv.reader(lines, delimiter=chosen, strict=True), [])
    except csv.Error as error:
        raise refuse(at(path, 1), f"a header that cannot be parsed ({error})", "column names") from None
    names = [name.strip() for name in names]
    if not all(names):
        raise refuse(at(path, 1), f"the columns {shown(names, 200)}", "a name for each column")
    if twice := [name for name in names if names.count(name) > 1]:
        raise refuse(at(path, 1), f"the column {shown(twice[0])} {names.count(twice[0])} times", "it once")
    return CsvLayout(chosen, tuple(names))


def _delimiter(lines: list[str], is_tsv: bool) -> str:
    best, chosen = (0, 0), "\t" if is_tsv else ","
    for candidate in (chosen, *(one for one in _DELIMITERS if one != chosen)):
        try:
            rows = [len(row) for row, _ in zip(csv.reader(lines, delimiter=candidate), range(_FIRST_LINES), strict=False) if row]
        except csv.Error:
            continue
        if rows and rows[0] > 1:
            score = (sum(length == rows[0] for length in rows), rows[0])
            best, chosen = (score, candidate) if score > best else (best, chosen)
    return chosen


def csv_blocks(path: Path, layout: CsvLayout, advance: Callable[[int], object]) -> Iterator[Block]:
    """Rows of text, each column large_string; an empty field without quotes is null. A quoted field may hold line breaks.

    Raises:
        DataError: with the line: another number of fields than the header's, a stray quote, text that is not UTF-8 or holds
            control characters.
    """
    names = list(layout.names)
    header = True
    for block, first_line in read_blocks(path, advance, quoted=True):
        block, numbers, first = _lines(path, block, first_line, layout.delimiter, header)
        header = False
        if not len(numbers):
            continue
        try:
            table = pa_csv.read_csv(
                pa.BufferReader(block),
                pa_csv.ReadOptions(use_threads=False, block_size=len(block) + 1, column_names=names),
                pa_csv.ParseOptions(delimiter=layout.delimiter, newlines_in_values=True),
                pa_csv.ConvertOptions(
                    column_types=dict.fromkeys(names, pa.large_string()),
                    null_values=[""],
                    strings_can_be_null=True,
                    quoted_strings_can_be_null=False,
                ),
            )
        except pa.ArrowInvalid as error:
            raise _ragged(path, block, first, layout, str(error)) from None
        if table.num_rows != len(numbers):
            raise _ragged(path, block, first, layout, f"{table.num_rows} rows in {len(numbers)} lines")
        yield Block(table.combine_chunks().to_batches()[0], numbers, str(path), "")


def _lines(path: Path, block: bytes, first_line: int, delimiter: str, header: bool) -> tuple[bytes, IntArray, int]:
    """The block without its header, the line in which each row begins, and the line in which the block does."""
    raw = np.frombuffer(block, dtype=np.uint8)
    ends = np.flatnonzero(raw == 10)
    starts = np.concatenate(([0], ends[:-1] + 1))
    if b'"' in block:
        # A line begins a row where the quotes before it are closed.
        begins = np.searchsorted(np.flatnonzero(raw == 34), starts) % 2 == 0
        _check_quotes(path, block, starts[begins], first_line + np.flatnonzero(begins), delimiter)
    else:
        begins = np.ones(len(starts), dtype=bool)
    # Blank lines are no rows; one inside of quotes is.
    begins &= raw[starts] != 10
    numbers = first_line + np.flatnonzero(begins)
    if header and len(numbers):
        second = starts[begins][1] if len(numbers) > 1 else len(block)
        return block[second:], numbers[1:], int(numbers[1]) if len(numbers) > 1 else first_line
    return block, numbers, first_line


def _check_quotes(path: Path, block: bytes, starts: IntArray, numbers: IntArray, delimiter: str) -> None:
    # Each row with its line breaks, and the blank lines behind it.
    offsets = np.append(starts, len(block)).astype(np.int64)
    rows = pa.LargeStringArray.from_buffers(len(starts), pa.py_buffer(offsets), pa.py_buffer(block))
    cut = re.escape(delimiter)
    field = f'(?:"(?:[^"]|"")*"|[^"{cut}\\n]*)'
    good = pc.match_substring_regex(rows, f"^{field}(?:{cut}{field})*\\n+$")
    if (bad := pc.index(good, False).as_py()) >= 0:
        raise refuse(
            at(path, int(numbers[bad])),
            f"a stray quote in {shown(rows[bad].as_py().rstrip())}",
            'fields as abc or "abc"',
            'write a quote inside a quoted field as ""',
        )


def _ragged(path: Path, block: bytes, first_line: int, layout: CsvLayout, reason: str) -> DataError:
    reader = csv.reader(io.StringIO(block.decode("utf-8"), newline=""), delimiter=layout.delimiter)
    before = 0
    try:
        for row in reader:
            if row and len(row) != len(layout.names):
                where = at(path, first_line + before)
                return refuse(
                    where, f"{len(row)} fields in {shown(layout.delimiter.join(row))}", f"{len(layout.names)} as in the header"
                )
            before = reader.line_num
    except csv.Error:
        # A field longer than Python's own limit.
        pass
    return refuse(at(path, first_line + before), f"rows that cannot be parsed ({shown(reason, 160)})", "a csv table")


def parquet_schema(path: Path) -> pa.Schema:
    """The columns of a parquet file.

    Raises:
        DataError: the file is damaged, or a name is there twice.
    """
    with _whole(path), pq.ParquetFile(os.fspath(path)) as file:
        schema = file.schema_arrow
    if twice := [name for name in schema.names if schema.names.count(name) > 1]:
        raise refuse(path, f"the column {shown(twice[0])} {schema.names.count(twice[0])} times", "it once")
    return pa.schema([one.with_metadata(None) for one in schema])


def parquet_blocks(path: Path, advance: Callable[[int], object]) -> Iterator[Block]:
    """All columns of a parquet file; page checksums are verified.

    Raises:
        DataError: the file is damaged, or unpacks to far more than its values can be.
    """
    size, row = path.stat().st_size, 0
    with _whole(path), pq.ParquetFile(os.fspath(path), page_checksum_verification=True, buffer_size=1 << 20) as file:
        total = max(file.metadata.num_rows, 1)
        for group in range(file.metadata.num_row_groups):
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS, row_groups=[group], use_threads=False):
                batch.validate(full=True)
                advance(size * (row + len(batch)) // total - size * row // total)
                yield Block(batch, np.arange(row + 1, row + 1 + len(batch), dtype=np.int64), str(path), "row ")
                row += len(batch)
        if row != file.metadata.num_rows:
            raise refuse(path, f"{row} rows", f"the {file.metadata.num_rows} that its footer names", "write the file again")


@contextmanager
def _whole(path: Path) -> Iterator[None]:
    try:
        yield
    except DataError:
        raise
    except (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        # What a decoder raises of damaged bytes.
        raise refuse(
            path, f"{type(error).__name__}: {shown(str(error), 160)}", "a whole parquet file", "write or copy it again"
        ) from None
