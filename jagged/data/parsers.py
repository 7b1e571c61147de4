"""The three formats: text lines, csv tables and parquet tables, each as a stream of checked chunks."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from jagged.data import times
from jagged.data.errors import MAX_ID_BYTES, DataError, at, refuse, shown
from jagged.data.files import csv_delimiter, read_blocks

_PARQUET_ROWS = 1 << 16

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Columns:
    """Names of the columns that hold users, items and times; no time column means that the file's order is the order."""

    user: str
    item: str
    timestamp: str | None


@dataclass(frozen=True)
class Chunk:
    """Some rows of one file.

    `users` has one id a row; `items` one id an event, `counts[i]` of them in row i (one each when `counts` is None).
    `times` belongs to `items`. `numbers` are the rows' line (or row) numbers in the file. `trimmed` is how many
    ids had blanks around them.
    """

    path: Path
    unit: str
    users: pa.Array
    items: pa.Array
    counts: IntArray | None
    times: IntArray | None
    time_kind: str
    numbers: IntArray
    trimmed: int = 0

    def user_place(self, row: int) -> str:
        """Where row `row` stands in the input."""
        return at(self.path, int(self.numbers[row]), self.unit)

    def item_place(self, event: int) -> str:
        """Where event `event` stands in the input."""
        if self.counts is None:
            return self.user_place(event)
        return self.user_place(int(np.searchsorted(np.cumsum(self.counts), event, side="right")))


def read_text(path: Path, columns: Columns, advance: Callable[[int], object]) -> Iterator[Chunk]:
    """`user item item ...`: one user a line, items oldest first, fields separated by spaces or tabs; blank lines are skipped."""
    for block, first_line in read_blocks(path, advance):
        raw = np.frombuffer(block, dtype=np.uint8)
        newline = raw == 10
        blank = newline | (raw == 32) | (raw == 9)
        inside = ~blank
        edges = np.flatnonzero(inside[1:] != inside[:-1]) + 1
        starts = np.concatenate(([0], edges)) if inside[0] else edges
        # The block ends with a newline, so every token has its end.
        starts, ends = starts[::2], starts[1::2]
        offsets = np.zeros(len(starts) + 1, dtype=np.int64)
        np.cumsum(ends - starts, out=offsets[1:])
        tokens = pa.LargeStringArray.from_buffers(len(starts), pa.py_buffer(offsets), pa.py_buffer(raw[inside].tobytes()))
        lines = np.searchsorted(np.flatnonzero(newline), starts)
        is_user = np.ones(len(starts), dtype=bool)
        is_user[1:] = lines[1:] != lines[:-1]
        heads = np.flatnonzero(is_user)
        yield Chunk(
            path=path,
            unit="",
            users=tokens.filter(pa.array(is_user)),
            items=tokens.filter(pa.array(~is_user)),
            counts=np.diff(np.append(heads, len(starts))) - 1,
            times=None,
            time_kind="none",
            numbers=first_line + lines[heads],
        )


def read_csv(path: Path, columns: Columns, advance: Callable[[int], object]) -> Iterator[Chunk]:
    """A table with a header line; fields with delimiters or quotes in them are quoted, a quoted field holds no line break."""
    delimiter = csv_delimiter(path)
    header: list[str] | None = None
    for block, first_line in read_blocks(path, advance):
        if header is None:
            head, _, block = block.partition(b"\n")
            header = _csv_header(path, head, delimiter, columns)
            first_line += 1
        ends = np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == 10)
        full = np.diff(ends, prepend=-1) > 1
        numbers = first_line + np.flatnonzero(full)
        if not len(numbers):
            continue
        if b'"' in block:
            _check_quotes(path, block, ends, first_line, delimiter)
        names = [f"c{i}" for i in range(len(header))]
        wanted = {name: names[header.index(name)] for name in (columns.user, columns.item, columns.timestamp) if name is not None}
        try:
            table = pa_csv.read_csv(
                pa.BufferReader(block),
                pa_csv.ReadOptions(use_threads=False, block_size=len(block) + 1, column_names=names),
                pa_csv.ParseOptions(delimiter=delimiter),
                pa_csv.ConvertOptions(
                    column_types={name: pa.large_string() for name in wanted.values()},
                    include_columns=list(wanted.values()),
                    strings_can_be_null=False,
                ),
            )
        except pa.ArrowInvalid as error:
            raise _ragged(path, block, first_line, delimiter, header, str(error)) from None
        if table.num_rows != len(numbers):
            raise _ragged(path, block, first_line, delimiter, header, f"{table.num_rows} rows in {len(numbers)} lines")
        parts = {name: table.column(column).combine_chunks() for name, column in wanted.items()}
        stamps, kind = None, "none"
        if columns.timestamp is not None:
            stamps, kind = times.from_text(parts[columns.timestamp], partial(_place, path, numbers, ""))
        ids = [pc.utf8_trim(parts[name], characters=" ") for name in (columns.user, columns.item)]
        found = (parts[columns.user], parts[columns.item])
        trimmed = sum(pc.sum(pc.not_equal(*pair)).as_py() for pair in zip(ids, found, strict=True))
        yield Chunk(path, "", ids[0], ids[1], None, stamps, kind, numbers, trimmed)


def _place(path: Path, numbers: IntArray, unit: str, row: int) -> str:
    return at(path, int(numbers[row]), unit)


def _csv_header(path: Path, head: bytes, delimiter: str, columns: Columns) -> list[str]:
    try:
        header = next(csv.reader([head.decode("utf-8")], delimiter=delimiter, strict=True), [])
    except (csv.Error, UnicodeDecodeError) as error:
        raise refuse(at(path, 1), f"a header that cannot be parsed ({error})", "column names") from None
    _check_columns(at(path, 1), header, columns)
    return header


def _check_columns(where: str, found: list[str], columns: Columns) -> None:
    for option, name in (("user_column", columns.user), ("item_column", columns.item), ("timestamp_column", columns.timestamp)):
        if name is None or found.count(name) == 1:
            continue
        if found.count(name) > 1:
            raise refuse(where, f"the column {shown(name)} {found.count(name)} times", "it once")
        cure = f"name yours with {option}=..."
        if option == "timestamp_column":
            cure += ', or say timestamp_column="" if the rows are oldest first'
        raise refuse(where, f"the columns {shown(found, 200)}", f"a column {shown(name)}", cure)


def _check_quotes(path: Path, block: bytes, ends: IntArray, first_line: int, delimiter: str) -> None:
    offsets = np.concatenate(([0], ends + 1))
    lines = pa.LargeStringArray.from_buffers(len(ends), pa.py_buffer(offsets), pa.py_buffer(block))
    field = f'(?:"(?:[^"\\n]|"")*"|[^"{delimiter}\\n]*)'
    good = pc.match_substring_regex(lines, f"^{field}(?:{delimiter}{field})*\\n$")
    bad = pc.index(good, False).as_py()
    if bad >= 0:
        raise refuse(
            at(path, first_line + bad),
            f"a stray quote in {shown(lines[bad].as_py().rstrip())}",
            'fields as abc or "abc", on one line',
            'write a quote inside a quoted field as ""',
        )


def _ragged(path: Path, block: bytes, first_line: int, delimiter: str, header: list[str], reason: str) -> DataError:
    for number, line in enumerate(block.decode("utf-8").split("\n"), first_line):
        try:
            found = len(next(csv.reader([line], delimiter=delimiter), []))
        except csv.Error:
            # A field longer than Python's own limit; the error below names the rows around it.
            continue
        if line and found != len(header):
            return refuse(at(path, number), f"{found} fields in {shown(line)}", f"{len(header)} as in the header")
    return refuse(at(path, first_line), f"rows that cannot be parsed ({shown(reason, 160)})", "a csv table")


def read_parquet(path: Path, columns: Columns, advance: Callable[[int], object]) -> Iterator[Chunk]:
    """A table with an event a row, or a user a row with lists of items (and of times); page checksums are verified."""
    try:
        with pq.ParquetFile(os.fspath(path)) as file:
            schema = file.schema_arrow
            _check_columns(str(path), schema.names, columns)
            names = [name for name in (columns.user, columns.item, columns.timestamp) if name is not None]
            nested = _check_types(path, columns, {name: schema.field(name).type for name in names})
            texts = _text_leaves(path, file, (columns.user, columns.item))
        # Strings as dictionaries: one long string repeated in a small file then never becomes gigabytes.
        with pq.ParquetFile(os.fspath(path), page_checksum_verification=True, read_dictionary=texts, buffer_size=1 << 20) as file:
            size = path.stat().st_size
            total = max(file.metadata.num_rows, 1)
            row = 0
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS, columns=names, use_threads=False):
                batch.validate(full=True)
                advance(size * (row + batch.num_rows) // total - size * row // total)
                parts = {name: batch.column(batch.schema.get_field_index(name)) for name in names}
                yield _parquet_chunk(path, columns, parts, nested, row)
                row += batch.num_rows
            if row != file.metadata.num_rows:
                raise refuse(path, f"{row} rows", f"the {file.metadata.num_rows} that its footer names", "write the file again")
    except DataError:
        raise
    except Exception as error:  # damaged bytes can make the decoder raise almost anything
        raise refuse(
            path, f"{type(error).__name__}: {shown(str(error), 160)}", "a whole parquet file", "write or copy it again"
        ) from None


def _check_types(path: Path, columns: Columns, fields: dict[str, pa.DataType]) -> bool:
    nested = _is_list(fields[columns.item])
    for name, kind in fields.items():
        if name == columns.user:
            _check_id_type(path, name, kind)
            continue
        if _is_list(kind) != nested:
            raise refuse(path, f"the column {shown(name)} of type {kind}", "items and times both as lists, or neither")
        kind = kind.value_type if nested else kind
        if name == columns.item:
            _check_id_type(path, name, kind)
        elif not times.is_supported(kind):
            raise refuse(path, f"the column {shown(name)} of type {kind}", "whole numbers, timestamps, dates or ISO 8601 text")
    return nested


def _check_id_type(path: Path, name: str, kind: pa.DataType) -> None:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if not (pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise refuse(path, f"the column {shown(name)} of type {kind}", "ids that are integers or strings", "cast the column")


def _parquet_chunk(path: Path, columns: Columns, parts: dict[str, Any], nested: bool, row: int) -> Chunk:
    users, items = parts[columns.user], parts[columns.item]
    stamps = parts[columns.timestamp] if columns.timestamp is not None else None
    numbers = np.arange(row + 1, row + 1 + len(users), dtype=np.int64)
    counts: IntArray | None = None
    place = partial(_place, path, numbers, "row ")
    if nested:
        for name, part in ((columns.item, items), (columns.timestamp, stamps)):
            if part is not None and part.null_count:
                raise refuse(place(_first_null(part)), f"a null in {shown(name)}", "a list")
        counts = pc.list_value_length(items).cast(pa.int64()).to_numpy(zero_copy_only=False)
        owner = np.repeat(np.arange(len(users)), counts)
        place = partial(_place, path, numbers[owner], "row ")
        if stamps is not None:
            other = pc.list_value_length(stamps).cast(pa.int64()).to_numpy(zero_copy_only=False)
            if (wrong := np.flatnonzero(other != counts)).size:
                i = int(wrong[0])
                raise refuse(
                    _place(path, numbers, "row ", i), f"{counts[i]} items and {other[i]} times", "as many times as items"
                )
            stamps = pc.list_flatten(stamps)
        items = pc.list_flatten(items)
    values, kind = (None, "none") if stamps is None else times.from_arrow(stamps, place)
    user_ids = _ids(users, partial(_place, path, numbers, "row "))
    return Chunk(path, "row ", user_ids, _ids(items, place), counts, values, kind, numbers)


def _text_leaves(path: Path, file: pq.ParquetFile, roots: tuple[str, str]) -> list[str]:
    """Paths of the id columns that hold strings, after a check that the pages do not unpack to far more than ids can be."""
    columns = [file.schema.column(index) for index in range(len(file.schema))]
    leaves = {
        index: column.path
        for index, column in enumerate(columns)
        if column.physical_type == "BYTE_ARRAY" and column.path.split(".")[0] in roots
    }
    for group in range(file.metadata.num_row_groups if leaves else 0):
        # A chunk whose statistics of sizes do not fit its column: pyarrow raises where it reads a row of it, and ends the process
        # where only its description is asked for.
        next(file.iter_batches(1, row_groups=[group], columns=list(leaves.values()), use_threads=False), None)
        for index, name in leaves.items():
            chunk = file.metadata.row_group(group).column(index)
            if chunk.total_uncompressed_size > chunk.num_values * (MAX_ID_BYTES + 8) + (1 << 20):
                raise refuse(
                    path,
                    f"{chunk.total_uncompressed_size} bytes in {chunk.num_values} values of the column {shown(name)}",
                    f"ids of up to {MAX_ID_BYTES} bytes",
                )
    return list(leaves.values())


def _ids(array: pa.Array, place: Callable[[int], str]) -> pa.Array:
    if not isinstance(array, pa.DictionaryArray):
        return array
    if pa.types.is_string(array.dictionary.type) or pa.types.is_large_string(array.dictionary.type):
        long = pc.greater(pc.binary_length(array.dictionary), MAX_ID_BYTES)
        used = pc.fill_null(pc.take(long, array.indices), False)
        if (index := pc.index(used, True).as_py()) >= 0:
            raise refuse(place(index), f"the id {shown(array[index].as_py())}", f"1 to {MAX_ID_BYTES} bytes")
    return array.dictionary_decode()


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _first_null(array: pa.Array) -> int:
    return int(pc.index(pc.is_null(array), True).as_py())
