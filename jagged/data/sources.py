"""Any table, as rows of a DuckDB table on disk: csv and parquet files, folders of them, Arrow tables and data frames.

pyarrow reads the formats, in blocks whose every line is checked; DuckDB keeps the rows and does what does not fit into memory:
counting, sorting, grouping. What it is told is SQL over `ROWS`, whose pseudo-column `rowid` is the number of a row, from 0, in
the order of the source.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from tqdm import tqdm

from jagged.artifacts import writing
from jagged.data.errors import DataError, at, refuse, shown
from jagged.data.files import Found, find_tables
from jagged.data.tabular import Block, csv_blocks, csv_layout, parquet_blocks, parquet_schema

IntArray = npt.NDArray[np.int64]

ROWS = "rows"
# Beside what Python and its libraries take. What does not fit goes to the temporary directory.
_MEMORY, _THREADS = "512MB", 4
_INDEX = re.compile(r"__index_level_\d+__")
_CURE = "set TMPDIR to a directory on a disk with room"


@dataclass
class Table:
    """A source's rows, in the table `ROWS` of a DuckDB connection.

    Attributes:
        connection: where `ROWS` is; whatever else is made there is gone with the table.
        name: of the source, for messages.
        types: of the columns, by name, in the source's order; text alone where `is_text`.
        num_rows: rows.
        is_text: whether nothing but text was told, as by a csv file, so that types are still to be found.
        left_out: what a folder holds beside the table's files, with the reason.
    """

    connection: duckdb.DuckDBPyConnection
    name: str
    types: dict[str, pa.DataType]
    is_text: bool = False
    num_rows: int = 0
    left_out: dict[str, str] = field(default_factory=dict)
    _first: list[int] = field(default_factory=list)
    _blocks: list[tuple[str, str, int | IntArray]] = field(default_factory=list)

    def place(self, row: int) -> str:
        """Where a row stands in the source: a file with a line or row, or a row of a table in memory."""
        if not 0 <= row < self.num_rows:
            raise IndexError(f"row: got {row}, expected 0 to {self.num_rows - 1}")
        block = bisect_right(self._first, row) - 1
        file, unit, numbers = self._blocks[block]
        inside = row - self._first[block]
        return at(file, numbers + inside if isinstance(numbers, int) else int(numbers[inside]), unit)

    def sql(self, query: str, parameters: object = None) -> list[tuple[Any, ...]]:
        """The rows of a query, as Python values; for answers of a few rows."""
        return self.connection.execute(query, parameters).fetchall()

    def batches(self, query: str, rows: int = 1 << 16) -> Iterator[pa.RecordBatch]:
        """The rows of a query, as Arrow batches."""
        self.connection.execute(query)
        yield from cast(pa.RecordBatchReader, self.connection.to_arrow_reader(rows))

    def _remember(self, block: Block) -> None:
        self._first.append(self.num_rows)
        numbers = block.numbers
        # Lines that follow one another are known from the first.
        contiguous = len(numbers) == 0 or numbers[-1] - numbers[0] == len(numbers) - 1
        self._blocks.append((block.file, block.unit, (int(numbers[0]) if len(numbers) else 0) if contiguous else numbers))
        self.num_rows += len(numbers)


@contextmanager
def open_table(source: Any, *, format: str = "auto", delimiter: str | None = None, progress: bool = True) -> Iterator[Table]:
    """Read a table of any size once, into a temporary DuckDB database that is removed afterwards.

    Args:
        source: a csv or parquet file (csv also compressed: .gz, .bz2, .zst, .lz4), a folder of files of one of the two formats,
            with subfolders, whose names `key=value` are columns; or an Arrow table, batch or reader, or anything with
            `__arrow_c_stream__`, as frames of pandas and polars and relations of DuckDB have. A frame is not changed.
        format: "auto", "csv" or "parquet", of files.
        delimiter: of csv; None finds it out from the first lines: one of `,`, tab, `;`, `|`.
        progress: show a bar for what takes longer than two seconds.

    Raises:
        DataError: malformed input, in one line with the file, the line or row, what was found and what is expected; or the
            temporary directory has no room.
    """
    if delimiter is not None and (
        not isinstance(delimiter, str) or len(delimiter) != 1 or delimiter in '"\r\n' or ord(delimiter) > 126
    ):
        raise refuse(f"delimiter={delimiter!r}", "no delimiter", "one ASCII character, no quote and no line break")
    with writing("a temporary directory", _CURE, DataError):
        temporary = TemporaryDirectory(prefix="jagged-")
    with temporary as directory:
        connection = duckdb.connect(os.path.join(directory, "rows.duckdb"))
        try:
            threads = min(_THREADS, os.cpu_count() or 1)
            connection.execute(f"SET memory_limit = '{_MEMORY}'; SET threads = {threads}; SET preserve_insertion_order = true")
            connection.execute(f"SET temp_directory = '{_quoted(os.path.join(directory, 'spill'))}'")
            # Nothing is fetched or loaded because a table or a name asks for it.
            connection.execute("SET enable_external_access = false; SET TimeZone = 'UTC'; SET lock_configuration = true")
            table = _from_files(connection, source, format, delimiter, progress) if _is_path(source) else None
            yield table or _from_arrow(connection, source)
        finally:
            connection.close()


def identifier(name: str) -> str:
    """A column's name in SQL."""
    return '"' + name.replace('"', '""') + '"'


def _quoted(text: str) -> str:
    return text.replace("'", "''")


def _is_path(source: Any) -> bool:
    return isinstance(source, (str, os.PathLike))


def _from_files(connection: duckdb.DuckDBPyConnection, source: Any, format: str, delimiter: str | None, progress: bool) -> Table:
    found = find_tables(source, format)
    name = os.fspath(source)
    is_text = found.format == "csv"
    schema, read = (_csv if is_text else _parquet)(found, delimiter)
    schema = _with_keys(schema, found, name)
    table = Table(connection, name, {one.name: one.type for one in schema}, is_text, left_out=found.left_out)
    size = sum(file.stat().st_size for file in found.files)
    with tqdm(total=size, desc="Reading", unit="B", unit_scale=True, disable=not progress, delay=2, leave=False) as bar:

        def blocks() -> Iterator[Block]:
            for file in found.files:
                keys = found.keys.get(file, {})
                for block in read(file, bar.update):
                    yield Block(_with_values(block.rows, keys, schema, block.file), block.numbers, block.file, block.unit)

        _fill(table, schema, blocks())
    return table


def _csv(found: Found, delimiter: str | None) -> tuple[pa.Schema, Callable[..., Iterator[Block]]]:
    layouts = {file: csv_layout(file, delimiter) for file in found.files}
    first = found.files[0]
    for file, layout in layouts.items():
        if layout.names != layouts[first].names:
            raise refuse(
                at(file, 1), f"the columns {shown(layout.names, 200)}", f"those of {first}: {shown(layouts[first].names, 200)}"
            )
    schema = pa.schema([(name, pa.large_string()) for name in layouts[first].names])
    return schema, lambda file, advance: csv_blocks(file, layouts[file], advance)


def _parquet(found: Found, delimiter: str | None) -> tuple[pa.Schema, Callable[..., Iterator[Block]]]:
    first, schema = found.files[0], None
    for file in found.files:
        found_here = parquet_schema(file)
        if schema is None:
            schema = found_here
        elif found_here.names != schema.names:
            raise refuse(file, f"the columns {shown(found_here.names, 200)}", f"those of {first}: {shown(schema.names, 200)}")
        else:
            schema = _common(schema, found_here, first, file)
    assert schema is not None
    return schema, parquet_blocks


def _common(before: pa.Schema, here: pa.Schema, first: Path, file: Path) -> pa.Schema:
    """The columns of two files: of numbers the wider ones; other types must be equal."""
    try:
        return pa.unify_schemas([before, here], promote_options="permissive")
    except pa.ArrowException:
        different = next(name for name in before.names if before.field(name).type != here.field(name).type)
        raise refuse(
            file,
            f"the column {shown(different)} of type {here.field(different).type}",
            f"{before.field(different).type} as in {first}",
            "cast the column",
        ) from None


def _with_keys(schema: pa.Schema, found: Found, name: str) -> pa.Schema:
    keys = next(iter(found.keys.values()), {})
    for key in keys:
        if key in schema.names:
            raise refuse(name, f"the column {shown(key)} in the files and in the folders' names", "it once")
        schema = schema.append(pa.field(key, pa.large_string()))
    return schema


def _with_values(rows: pa.RecordBatch, keys: dict[str, str | None], schema: pa.Schema, file: str) -> pa.RecordBatch:
    columns = [rows.column(name) for name in rows.schema.names]
    columns += [pa.repeat(pa.scalar(value, pa.large_string()), len(rows)) for value in keys.values()]
    try:
        return pa.record_batch([column.cast(one.type) for column, one in zip(columns, schema, strict=True)], schema=schema)
    except pa.ArrowException as error:
        raise refuse(file, f"{shown(str(error), 160)}", f"values of {shown(str(schema), 200)}") from None


def _from_arrow(connection: duckdb.DuckDBPyConnection, source: Any) -> Table:
    name = type(source).__name__
    if isinstance(source, pa.RecordBatch):
        source = pa.Table.from_batches([source])
    if not hasattr(source, "__arrow_c_stream__"):
        raise refuse(
            name,
            f"an object of type {type(source).__module__}.{name}",
            "a path, an Arrow table, or a frame of pandas 2.2 or later, polars or DuckDB (anything with __arrow_c_stream__)",
        )
    try:
        reader = source if isinstance(source, pa.RecordBatchReader) else pa.RecordBatchReader.from_stream(source)
    except (pa.ArrowException, ValueError, TypeError) as error:
        # pandas says in the last argument which column it is.
        told = shown(str(error.args[-1] if error.args else error), 160)
        raise refuse(name, told, "columns of one type each", "cast them, or drop what is no feature") from None
    # The numbers of a frame of pandas whose index has no name are no column.
    schema = pa.schema([one.with_metadata(None) for one in reader.schema if not _INDEX.fullmatch(one.name)])
    if len(set(schema.names)) != len(schema.names):
        twice = next(one for one in schema.names if schema.names.count(one) > 1)
        raise refuse(name, f"the column {shown(twice)} {schema.names.count(twice)} times", "it once")
    table = Table(connection, name, {one.name: one.type for one in schema})

    def blocks() -> Iterator[Block]:
        row = 0
        for batch in reader:
            yield Block(batch.select(schema.names), np.arange(row, row + len(batch)), name, "row ")
            row += len(batch)

    _fill(table, schema, blocks())
    return table


def _fill(table: Table, schema: pa.Schema, blocks: Iterable[Block]) -> None:
    """Put the blocks into `ROWS`; an error of theirs is raised as it is."""
    problem: list[BaseException] = []

    def batches() -> Iterator[pa.RecordBatch]:
        try:
            for block in blocks:
                table._remember(block)
                yield _decoded(block.rows, stored)
        except BaseException as error:
            problem.append(error)
            raise

    seen: dict[str, str] = {}
    for one in schema.names:
        if not one:
            raise refuse(table.name, "a column without a name", "a name for each column", "name it")
        if one.lower() == "rowid":
            raise refuse(table.name, f"a column {shown(one)}", "another name, which numbers the rows here", "rename it")
        # DuckDB would give the second one another name, and the first one's values by it.
        if seen.setdefault(one.lower(), one) != one:
            raise refuse(
                table.name,
                f"the columns {shown(seen[one.lower()])} and {shown(one)}",
                "names that differ by more than case",
                "rename one",
            )
    stored = pa.schema([pa.field(one.name, _storable(one.type)) for one in schema])
    try:
        table.connection.register("source", pa.RecordBatchReader.from_batches(stored, batches()))
        table.connection.execute(f"CREATE TABLE {ROWS} AS SELECT * FROM source")
        table.connection.unregister("source")
    except duckdb.Error as error:
        if problem:
            raise problem[0] from None
        if isinstance(error, (duckdb.IOException, duckdb.OutOfMemoryException)):
            raise DataError(f"a temporary directory: could not be written: {shown(str(error), 200)}; {_CURE}") from None
        raise refuse(table.name, shown(str(error), 200), "columns that a table can hold") from None


def _storable(kind: pa.DataType) -> pa.DataType:
    """The type as DuckDB takes it: values in place of dictionaries, plain layouts in place of views."""
    if isinstance(kind, pa.BaseExtensionType):
        return _storable(kind.storage_type)
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return _storable(kind.value_type)
    if pa.types.is_null(kind) or pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_float16(kind):
        return pa.float32()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind):
        return pa.large_list(_storable(kind.value_type))
    if pa.types.is_fixed_size_list(kind):
        return pa.large_list(_storable(kind.value_type))
    return kind


def _decoded(rows: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    return pa.record_batch([_stored(column, one.type) for column, one in zip(rows.columns, schema, strict=True)], schema=schema)


def _stored(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """Values in a type of `_storable`; Arrow's own cast takes no dictionaries of views, and none inside of lists."""
    if values.type == kind:
        return values
    if isinstance(values, pa.ExtensionArray):
        return _stored(values.storage, kind)
    if isinstance(values, pa.DictionaryArray):
        return _stored(values.dictionary, kind).take(values.indices)
    if isinstance(values, (pa.ListArray, pa.LargeListArray)):
        mask = values.is_null() if values.null_count else None
        return pa.LargeListArray.from_arrays(values.offsets.cast(pa.int64()), _stored(values.values, kind.value_type), mask=mask)
    return values.cast(kind)
