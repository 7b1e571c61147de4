"""The formats of tables, csv and parquet, as streams of checked blocks of rows whose places in the file are known."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from jagged.data.csv_rows import begins_of_rows, first_lines, first_stray, readable_blocks, stray_quote
from jagged.data.errors import DataError, at, refuse, shown
from jagged.data.files import read_blocks

_PARQUET_ROWS = 1 << 16
# Texts of a table: the longest one, how long they may be on average, and how much of them is unpacked at once. A small file of
# one long text that a dictionary repeats would be gigabytes.
MAX_TEXT_BYTES = 1 << 20
MEAN_TEXT_BYTES = 1 << 16
_UNPACKED_BYTES = 64 << 20
# Values that are read at once: fewer rows of a table of many columns, or of long lists.
_VALUES = 1 << 20
# What texts that cannot be read as dictionaries may unpack to at once, whatever a damaged or hostile file says.
_PLAIN_BYTES = 1 << 30
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


def csv_layout(path: Path, delimiter: str | None = None, *, skip: bool = False) -> CsvLayout:
    """Delimiter and column names of a csv file: the delimiter that cuts most of its first lines as it cuts the header.

    Where `skip`, the header alone has to be text.

    Raises:
        DataError: no header, or a file that cannot be read.
    """
    blocks = first_lines(path, 10 * _FIRST_LINES) if skip else read_blocks(path, lambda _: None, quoted=True)
    block, _ = next(blocks, (b"", 1))
    lines = block.decode("utf-8").splitlines(keepends=True)[: 10 * _FIRST_LINES]
    if not any(line.strip() for line in lines):
        raise refuse(path, "an empty file", "a header and rows")
    chosen = delimiter or _delimiter(lines, ".tsv" in [suffix.lower() for suffix in path.suffixes[-2:]])
    try:
        # Blank lines are no rows, before the header neither.
        names = next(row for row in csv.reader(lines, delimiter=chosen, strict=True) if row)
    except csv.Error as error:
        raise refuse(at(path, 1), f"a header that cannot be parsed ({error})", "column names") from None
    names = [name.strip() for name in names]
    # An index that a frame was written with has no name.
    return CsvLayout(chosen, tuple(name or f"unnamed_{number}" for number, name in enumerate(names, 1)))


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


def csv_blocks(
    path: Path,
    layout: CsvLayout,
    advance: Callable[[int], object],
    columns: Sequence[str] | None = None,
    skip: Callable[[str], None] | None = None,
) -> Iterator[Block]:
    """Rows of text, each column large_string; an empty field without quotes is null. A quoted field may hold line breaks.

    Args:
        path, layout: the file, and what `csv_layout` says of it.
        advance: called with the bytes of the file that were read.
        columns: names of those to read, each once in the header; None reads all.
        skip: called with what is wrong with a row that has another number of fields than the header, which is left out; None
            refuses it. So are those that `readable_blocks` leaves out.

    Raises:
        DataError: with the line: another number of fields than the header's, a stray quote, text that is not UTF-8 or holds
            control characters.
    """
    # Names that nobody asks for may be there twice.
    numbered = [f"c{index}" for index in range(len(layout.names))]
    chosen = list(layout.names if columns is None else columns)
    included = numbered if columns is None else [numbered[layout.names.index(name)] for name in chosen]
    header = True
    for block, first_line in (
        read_blocks(path, advance, quoted=True) if skip is None else readable_blocks(path, layout.delimiter, advance, skip)
    ):
        block, numbers, first = _lines(path, block, first_line, layout.delimiter, header)
        header = False
        if not len(numbers):
            continue
        ragged: list[int] = []

        def left_out(row: Any, numbers: IntArray = numbers, ragged: list[int] = ragged) -> str:
            # pyarrow counts rows from 1, blank lines aside.
            ragged.append(row.number - 1)
            assert skip is not None
            skip(str(_fields(path, int(numbers[row.number - 1]), row.actual_columns, row.text, len(numbered))))
            return "skip"

        handler = {} if skip is None else {"invalid_row_handler": left_out}
        try:
            table = pa_csv.read_csv(
                pa.BufferReader(block),
                pa_csv.ReadOptions(use_threads=False, block_size=len(block) + 1, column_names=numbered),
                pa_csv.ParseOptions(delimiter=layout.delimiter, newlines_in_values=True, **handler),
                pa_csv.ConvertOptions(
                    column_types=dict.fromkeys(included, pa.large_string()),
                    include_columns=included,
                    null_values=[""],
                    strings_can_be_null=True,
                    quoted_strings_can_be_null=False,
                ),
            )
        except pa.ArrowInvalid as error:
            raise _ragged(path, block, first, layout, str(error)) from None
        numbers = np.delete(numbers, ragged)
        if table.num_rows != len(numbers):
            raise _ragged(path, block, first, layout, f"{table.num_rows} rows in {len(numbers)} lines")
        if len(numbers):
            rows = pa.record_batch([column.combine_chunks() for column in table.columns], names=chosen)
            yield Block(rows, numbers, str(path), "")


def _fields(path: Path, line: int, found: int, text: str, expected: int) -> DataError:
    return refuse(at(path, line), f"{found} fields in {shown(text)}", f"{expected} as in the header")


def _lines(path: Path, block: bytes, first_line: int, delimiter: str, header: bool) -> tuple[bytes, IntArray, int]:
    """The block without its header, the line in which each row begins, and the line in which the block does."""
    raw = np.frombuffer(block, dtype=np.uint8)
    ends = np.flatnonzero(raw == 10)
    starts = np.concatenate(([0], ends[:-1] + 1))
    if b'"' in block:
        # A line begins a row where the quotes before it are closed.
        begins = begins_of_rows(raw, starts)
        rows = starts[begins]
        if (bad := first_stray(block, rows, delimiter)) >= 0:
            end = rows[bad + 1] if bad + 1 < len(rows) else len(block)
            raise stray_quote(path, first_line + int(np.flatnonzero(begins)[bad]), block[rows[bad] : end])
    else:
        begins = np.ones(len(starts), dtype=bool)
    # Blank lines are no rows; one inside of quotes is.
    begins &= raw[starts] != 10
    numbers = first_line + np.flatnonzero(begins)
    if header and len(numbers):
        second = starts[begins][1] if len(numbers) > 1 else len(block)
        return block[second:], numbers[1:], int(numbers[1]) if len(numbers) > 1 else first_line
    return block, numbers, first_line


def _ragged(path: Path, block: bytes, first_line: int, layout: CsvLayout, reason: str) -> DataError:
    reader = csv.reader(io.StringIO(block.decode("utf-8"), newline=""), delimiter=layout.delimiter)
    before = 0
    try:
        for row in reader:
            if row and len(row) != len(layout.names):
                text = layout.delimiter.join(row)
                return _fields(path, first_line + before, len(row), text, len(layout.names))
            before = reader.line_num
    except csv.Error:
        # A field longer than Python's own limit.
        pass
    return refuse(at(path, first_line + before), f"rows that cannot be parsed ({shown(reason, 160)})", "a csv table")


def parquet_schema(path: Path) -> pa.Schema:
    """The columns of a parquet file.

    Raises:
        DataError: the file is damaged.
    """
    with _whole(path), pq.ParquetFile(os.fspath(path)) as file:
        schema = file.schema_arrow
    return pa.schema([one.with_metadata(None) for one in schema])


def parquet_blocks(path: Path, advance: Callable[[int], object], columns: list[str]) -> Iterator[Block]:
    """The named columns of a parquet file; page checksums are verified.

    Raises:
        DataError: the file is damaged, or unpacks to far more than its values can be.
    """
    size, row = path.stat().st_size, 0
    with _whole(path):
        with pq.ParquetFile(os.fspath(path), buffer_size=1 << 20) as file:
            texts = _text_leaves(path, file, columns)
            at_once = [_rows_at_once(file, group, columns, texts) for group in range(file.metadata.num_row_groups)]
        # Texts as dictionaries: a long one that is repeated is then in memory once. A group at a time, because pyarrow cannot
        # join the dictionaries of lists of two groups.
        options = {"page_checksum_verification": True, "read_dictionary": texts, "buffer_size": 1 << 20}
        with pq.ParquetFile(os.fspath(path), **options) as file:
            total = max(file.metadata.num_rows, 1)
            unpacked = 0
            for group in range(file.metadata.num_row_groups):
                for batch in file.iter_batches(batch_size=at_once[group], row_groups=[group], columns=columns, use_threads=False):
                    batch.validate(full=True)
                    advance(size * (row + len(batch)) // total - size * row // total)
                    for part, length in _parts(path, batch, row):
                        yield Block(part, np.arange(row + 1, row + 1 + len(part), dtype=np.int64), str(path), "row ")
                        row, unpacked = row + len(part), unpacked + length
                        # Looked at behind the rows, so that who reads them can say more of a row that is too long.
                        if unpacked > row * MEAN_TEXT_BYTES + _UNPACKED_BYTES:
                            raise refuse(path, f"{unpacked} bytes of text in {row} rows", f"at most {MEAN_TEXT_BYTES} a row")
            if row != file.metadata.num_rows:
                raise refuse(path, f"{row} rows", f"the {file.metadata.num_rows} that its footer names", "write the file again")


def _rows_at_once(file: pq.ParquetFile, group: int, names: list[str], texts: list[str]) -> int:
    """Rows of a group that are read together: fewer where a row holds long lists, or may hold long texts."""
    described = file.metadata.row_group(group)
    # Of the columns that are read alone: to ask for the description of one that was not looked into may end the process.
    paths = [file.schema.column(index).path for index in range(described.num_columns)]
    wanted = [index for index, path in enumerate(paths) if path.split(".")[0] in names]
    chunks = [described.column(index) for index in wanted]
    values = sum(chunk.num_values for chunk in chunks)
    rows = min(_PARQUET_ROWS, _VALUES * max(described.num_rows, 1) // max(values, 1))
    for chunk in chunks:
        if chunk.physical_type == "BYTE_ARRAY" and chunk.path_in_schema not in texts and _is_shared(chunk):
            # Each value may be as long as the chunk.
            rows = min(rows, _PLAIN_BYTES // max(chunk.total_uncompressed_size, 1))
    return max(1, rows)


def _is_shared(chunk: pq.ColumnChunkMetaData) -> bool:
    """Whether values of a chunk can say that they hold what others hold, so that few bytes become many."""
    return any("DICTIONARY" in encoding or encoding == "DELTA_BYTE_ARRAY" for encoding in chunk.encodings)


def _text_leaves(path: Path, file: pq.ParquetFile, names: list[str]) -> list[str]:
    """Paths of the columns, and of those of lists, that hold texts, after a check of how much their pages unpack to."""
    leaves = {
        index: file.schema.column(index).path
        for index in range(len(file.schema))
        if file.schema.column(index).physical_type == "BYTE_ARRAY" and file.schema.column(index).path.split(".")[0] in names
    }
    for group in range(file.metadata.num_row_groups):
        # A chunk whose statistics of sizes do not fit its column: pyarrow raises where it reads a row of it, and ends the process
        # where only its description is asked for.
        next(file.iter_batches(1, row_groups=[group], columns=names, use_threads=False), None)
        for index, name in leaves.items():
            chunk = file.metadata.row_group(group).column(index)
            if chunk.total_uncompressed_size > chunk.num_values * MEAN_TEXT_BYTES + _UNPACKED_BYTES:
                raise refuse(
                    path,
                    f"{chunk.total_uncompressed_size} bytes in {chunk.num_values} values of the column {shown(name)}",
                    f"texts of at most {MEAN_TEXT_BYTES} bytes on average",
                )
    # pyarrow reads no deltas of texts as dictionaries, and makes of those in structs and maps no plain texts again.
    schema = file.schema_arrow
    plain = {one.name for one in schema if not _is_nested(one.type.value_type if is_list(one.type) else one.type)}
    groups = [file.metadata.row_group(group) for group in range(file.metadata.num_row_groups)]
    deltas = {name for index, name in leaves.items() for group in groups if _has_deltas(group.column(index))}
    return [name for name in leaves.values() if name.split(".")[0] in plain and name not in deltas]


def _has_deltas(chunk: pq.ColumnChunkMetaData) -> bool:
    return any(encoding.startswith("DELTA") for encoding in chunk.encodings)


def _parts(path: Path, batch: pa.RecordBatch, row: int) -> Iterator[tuple[pa.RecordBatch, int]]:
    """A batch with texts in place of dictionaries, in parts that do not unpack to too much, each with the bytes of its texts."""
    sizes = np.zeros(len(batch), dtype=np.int64)
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        values = column.flatten() if is_list(column.type) else column
        kind = values.type.value_type if pa.types.is_dictionary(values.type) else values.type
        if not _is_bytes(kind) or not len(values):
            continue
        if pa.types.is_dictionary(values.type):
            lengths = pc.binary_length(values.dictionary).take(values.indices)
        else:
            lengths = pc.binary_length(values)
        lengths = pc.fill_null(lengths, 0)
        lengths = lengths.cast(pa.int64()).to_numpy(zero_copy_only=False)
        counts = np.ones(len(batch), np.int64)
        if is_list(column.type):
            counts = pc.fill_null(pc.list_value_length(column), 0).cast(pa.int64()).to_numpy(zero_copy_only=False)
        owner = np.repeat(np.arange(len(batch)), counts)
        if (long := np.flatnonzero(lengths > MAX_TEXT_BYTES)).size:
            where = at(path, row + int(owner[long[0]]) + 1, "row ")
            raise refuse(where, f"{lengths[long[0]]} bytes in {shown(name)}", f"a text of at most {MAX_TEXT_BYTES}")
        sizes += np.bincount(owner, lengths, len(batch)).astype(np.int64)
    kept = np.cumsum(sizes)
    start = 0
    while start < len(batch):
        before = kept[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(kept, before + _UNPACKED_BYTES, side="right")))
        part = batch.slice(start, stop - start)
        yield pa.record_batch([_plain(column) for column in part.columns], names=batch.schema.names), int(kept[stop - 1] - before)
        start = stop


def _plain(column: pa.Array) -> pa.Array:
    kind = column.type
    if pa.types.is_dictionary(kind) and _is_bytes(kind.value_type):
        return column.cast(_wide(kind.value_type))
    if is_list(kind) and pa.types.is_dictionary(kind.value_type) and _is_bytes(kind.value_type.value_type):
        # pyarrow's own cast unpacks what lies behind a part of the rows, too.
        values = column.flatten().cast(_wide(kind.value_type.value_type))
        counts = pc.fill_null(pc.list_value_length(column), 0).cast(pa.int64()).to_numpy(zero_copy_only=False)
        bounds = np.zeros(len(column) + 1, dtype=np.int64)
        np.cumsum(counts, out=bounds[1:])
        return pa.LargeListArray.from_arrays(pa.array(bounds), values, mask=column.is_null())
    return column


def _wide(kind: pa.DataType) -> pa.DataType:
    return pa.large_string() if pa.types.is_string(kind) or pa.types.is_large_string(kind) else pa.large_binary()


def is_list(kind: pa.DataType) -> bool:
    """Whether values of a type are lists."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _is_nested(kind: pa.DataType) -> bool:
    return bool(pa.types.is_nested(kind))


def _is_bytes(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind))


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
