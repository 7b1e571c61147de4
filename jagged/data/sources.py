"""Any table, as rows of a DuckDB table on disk: csv and parquet files, folders of them, Arrow tables and data frames.

pyarrow reads the formats, in blocks whose every line is checked; DuckDB keeps the rows and does what does not fit into memory:
counting, sorting, grouping. What it is told is SQL over `ROWS`, whose pseudo-column `rowid` is the number of a row, from 0, in
the order of the source.
"""

from __future__ import annotations

import errno
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from tqdm import tqdm

from jagged.artifacts import writing
from jagged.artifacts.errors import one_line
from jagged.data.errors import DataError, Skipped, at, refuse, shown
from jagged.data.files import TABLES, find_tables, reading
from jagged.data.parsers import TEXT, text_blocks
from jagged.data.progress import DELAY, disabled
from jagged.data.tabular import Block, CsvLayout, csv_blocks, csv_layout, parquet_blocks, parquet_schema

IntArray = npt.NDArray[np.int64]

ROWS = "rows"
# Of events, beside what Python and its libraries take. What does not fit goes to the temporary directory.
_MEMORY, _THREADS = "512MB", 4
# Of tables, of all the memory that a process may have, and bytes that it is at least and at most: each thread holds lists of
# 2,048 rows, several times over.
_MEMORY_OF_TABLES, _BOUNDS = "25%", (512_000_000, 8_000_000_000)
_BYTES = {"bytes": 1, **{f"{letter}iB": 1 << 10 * power for power, letter in enumerate("KMGT", 1)}}
_INDEX = re.compile(r"__index_level_\d+__")
_CURE = "set TMPDIR to a directory on a disk with room"
# What a disk that cannot be written says.
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO)
# Rows of a table in memory that are taken at once.
_ARROW_ROWS = 1 << 16


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
        rows: the table's name in SQL: `ROWS`, unless it was added to the database of another table.
        skipped: rows of the source that could not be read.
    """

    connection: duckdb.DuckDBPyConnection
    name: str
    types: dict[str, pa.DataType]
    is_text: bool = False
    num_rows: int = 0
    left_out: dict[str, str] = field(default_factory=dict)
    rows: str = ROWS
    skipped: Skipped = field(default_factory=Skipped)
    _schema: pa.Schema = field(default_factory=lambda: pa.schema([]))
    _directory: str = ""
    _cure: str = ""
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
        reader: Iterator[pa.RecordBatch] = self.connection.sql(query).to_arrow_reader(rows)
        yield from reader

    def fill(self, blocks: Iterable[Block]) -> None:
        """Put blocks into the table `rows`, whose columns are those of the table.

        Raises:
            DataError: the disk or the memory is full, or values that a table cannot hold. What the blocks raise comes as it is.
        """
        problem: list[BaseException] = []

        def batches() -> Iterator[pa.RecordBatch]:
            try:
                for block in blocks:
                    self._remember(block)
                    yield _decoded(block.rows, self._schema)
            except BaseException as error:
                problem.append(error)
                raise

        try:
            with storing(self._directory, self._cure):
                self.connection.register("source", pa.RecordBatchReader.from_batches(self._schema, batches()))
                self.connection.execute(f"CREATE TABLE {self.rows} AS SELECT * FROM source")
                self.connection.unregister("source")
        except (duckdb.Error, DataError) as error:
            if problem:
                raise problem[0] from None
            if isinstance(error, DataError):
                raise
            raise refuse(self.name, shown(str(error), 200), "columns that a table can hold") from None

    def _remember(self, block: Block) -> None:
        self._first.append(self.num_rows)
        numbers = block.numbers
        # Lines that follow one another are known from the first.
        contiguous = len(numbers) == 0 or numbers[-1] - numbers[0] == len(numbers) - 1
        self._blocks.append((block.file, block.unit, (int(numbers[0]) if len(numbers) else 0) if contiguous else numbers))
        self.num_rows += len(numbers)


@dataclass(frozen=True)
class Source:
    """What a table is read from.

    Attributes:
        name: for messages.
        format: "text", "csv", "parquet" or "arrow".
        schema: of the columns that are read, as the source tells it.
        blocks: a function that reads them, and calls another with the bytes of files read.
        files: that are read, and their size in bytes.
        left_out: what a folder holds beside them, with the reason.
        unused: names of the columns that are not read.
    """

    name: str
    format: str
    schema: pa.Schema
    blocks: Callable[[Callable[[int], object]], Iterator[Block]]
    files: tuple[Path, ...] = ()
    size: int = 0
    left_out: dict[str, str] = field(default_factory=dict)
    unused: tuple[str, ...] = ()


# Which columns of a table are read, given where their names stand.
Choice = Callable[[str, list[str]], list[str]]


def all_columns(where: str, names: list[str]) -> list[str]:
    """A `Choice` of all columns.

    Raises:
        DataError: a name is there twice.
    """
    for name in names:
        if names.count(name) > 1:
            raise refuse(where, f"the column {shown(name)} {names.count(name)} times", "it once")
    return names


@contextmanager
def open_table(
    source: Any,
    *,
    format: str = "auto",
    delimiter: str | None = None,
    skipped: Skipped | None = None,
    progress: bool = True,
) -> Iterator[Table]:
    """Read a table of any size once, into a temporary DuckDB database that is removed afterwards.

    Args:
        source: a csv or parquet file (csv also compressed: .gz, .bz2, .zst, .lz4), a folder of files of one of the two formats,
            with subfolders, whose names `key=value` are columns; or an Arrow table, batch or reader, or anything with
            `__arrow_c_stream__`, as frames of pandas and polars and relations of DuckDB have. A frame is not changed.
        format: "auto", "csv" or "parquet", of files.
        delimiter: of csv; None finds it out from the first lines: one of `,`, tab, `;`, `|`.
        skipped: takes the rows of csv that cannot be read, which are then left out; None refuses them.
        progress: show a bar for what takes longer than two seconds.

    Raises:
        DataError: malformed input, in one line with the file, the line or row, what was found and what is expected; or the
            temporary directory has no room.
    """
    found = find_source(source, format, delimiter, skip=None if skipped is None else skipped.add)
    with new_table(found.name, found.schema, memory=_MEMORY_OF_TABLES) as table:
        table.is_text, table.left_out = found.format == "csv", found.left_out
        _read(table, found, skipped, progress)
        yield table


def add_table(table: Table, source: Any, rows: str, *, skipped: Skipped | None = None, progress: bool = True) -> Table:
    """Read another source into the database of a table, where SQL may ask both; it goes with that table.

    Args:
        table: whose database it is.
        source: as `open_table` takes it.
        rows: the name of the new table in SQL. It is what messages call a source that is in memory, too.
        skipped, progress: as of `open_table`.

    Raises:
        DataError: as of `open_table`.
    """
    found = find_source(source, name=rows, skip=None if skipped is None else skipped.add)
    _check_names(found.name, found.schema.names)
    other = Table(
        table.connection,
        found.name,
        {one.name: one.type for one in found.schema},
        is_text=found.format == "csv",
        left_out=found.left_out,
        rows=rows,
        _schema=_stored_schema(found.schema),
        _directory=table._directory,
        _cure=table._cure,
    )
    _read(other, found, skipped, progress)
    return other


def _read(table: Table, source: Source, skipped: Skipped | None, progress: bool) -> None:
    with reading_bar(source, progress) as advance:
        table.fill(source.blocks(advance))
    if skipped is not None:
        skipped.check(source.name, table.num_rows)
        table.skipped = skipped


@contextmanager
def reading_bar(source: Source, progress: bool) -> Iterator[Callable[[int], object]]:
    """A bar of the bytes read, which appears on a terminal when that takes longer than two seconds."""
    quiet = disabled(progress)
    with tqdm(total=source.size, desc="Reading", unit="B", unit_scale=True, disable=quiet, delay=DELAY, leave=False) as bar:
        yield bar.update


def _check_names(table: str, names: Sequence[str]) -> None:
    seen: dict[str, str] = {}
    for name in names:
        if not name:
            raise refuse(table, "a column without a name", "a name for each column", "name it")
        if name.lower() == "rowid":
            raise refuse(table, f"a column {shown(name)}", "another name, which numbers the rows here", "rename it")
        # DuckDB would give the second one another name, and the first one's values by it.
        if seen.setdefault(name.lower(), name) != name:
            found = f"the columns {shown(seen[name.lower()])} and {shown(name)}"
            raise refuse(table, found, "names that differ by more than case", "rename one")


@contextmanager
def new_table(
    name: str, schema: pa.Schema, *, directory: Path | None = None, cure: str = _CURE, memory: str | None = None
) -> Iterator[Table]:
    """An empty table in a new DuckDB database, which lies in a temporary directory and is removed with it.

    Args:
        name: of the source, for messages.
        schema: of its columns.
        directory: where the temporary directory is made, by default where the system has its own.
        cure: what to do where it has no room.
        memory: what DuckDB may take at most, in its own words; what is enough for events without one.

    Raises:
        DataError: the directory cannot be written, or the memory is too little.
    """
    _check_names(name, schema.names)
    with writing("a temporary directory", cure, DataError):
        parent = str(directory or gettempdir())
    with writing(parent, cure, DataError):
        temporary = TemporaryDirectory(prefix="jagged-", dir=parent)
    with temporary as inside, storing(parent, cure):
        connection = duckdb.connect(os.path.join(inside, "rows.duckdb"))
        try:
            threads = min(_THREADS, os.cpu_count() or 1)
            connection.execute(f"SET threads = {threads}; SET preserve_insertion_order = true")
            _limit(connection, _MEMORY if memory is None else memory)
            connection.execute(f"SET temp_directory = '{_quoted(os.path.join(inside, 'spill'))}'")
            # Nobody reads the database after a crash, so nothing waits until the disk has it.
            connection.execute("SET fsync_mode = 'NONE'")
            # Nothing is fetched or loaded because a table or a name asks for it.
            connection.execute("SET enable_external_access = false; SET TimeZone = 'UTC'; SET enable_progress_bar = false")
            connection.execute("SET lock_configuration = true")
            types = {one.name: one.type for one in schema}
            yield Table(connection, name, types, _schema=_stored_schema(schema), _directory=parent, _cure=cure)
        finally:
            connection.close()


def _limit(connection: duckdb.DuckDBPyConnection, memory: str) -> None:
    """Let DuckDB take so much; of a share, which is one of what a container may have, within the bounds."""
    connection.execute(f"SET memory_limit = '{memory}'")
    if memory.endswith("%"):
        (text,) = connection.execute("SELECT current_setting('memory_limit')").fetchall()[0]
        number, unit = text.split()
        least, most = _BOUNDS
        connection.execute(f"SET memory_limit = '{int(min(max(float(number) * _BYTES[unit], least), most))}B'")


def _stored_schema(schema: pa.Schema) -> pa.Schema:
    return pa.schema([pa.field(one.name, storable(one.type)) for one in schema])


@contextmanager
def storing(where: str, cure: str) -> Iterator[None]:
    """Turn what DuckDB says of a disk or a memory that is full into a `DataError` that names the directory."""
    try:
        yield
    except duckdb.Error as error:
        first = shown(str(error).splitlines()[0], 200)
        if isinstance(error, duckdb.OutOfMemoryException):
            raise DataError(
                one_line(f"{where}: memory is out: {first}; take a machine with more, or shorter lists, or {cure}")
            ) from None
        known = next((os.strerror(code) for code in _DISK if os.strerror(code) in str(error)), None)
        if known is None and not isinstance(error, duckdb.IOException):
            raise
        raise DataError(one_line(f"{where}: could not be written: {known or first}; {cure}")) from None


def identifier(name: str) -> str:
    """A column's name in SQL."""
    return '"' + name.replace('"', '""') + '"'


def is_table(source: Any) -> bool:
    """Whether something in memory is a table, and no column of one, which has a stream of its own too."""
    return hasattr(source, "__arrow_c_stream__") and not isinstance(source, pa.ChunkedArray) and not hasattr(source, "to_list")


def _quoted(text: str) -> str:
    return text.replace("'", "''")


def _is_path(source: Any) -> bool:
    return isinstance(source, (str, os.PathLike))


def find_source(
    source: Any,
    format: str = "auto",
    delimiter: str | None = None,
    *,
    formats: Sequence[str] = TABLES,
    choose: Choice = all_columns,
    skip: Callable[[str], None] | None = None,
    name: str | None = None,
) -> Source:
    """What a source holds, before its rows are read.

    Args:
        source, format, delimiter: as of `open_table`.
        formats: the formats of files that are known here.
        choose: which columns are read; it may raise what it finds wrong with the names.
        skip: called with what is wrong with a row of csv that is left out, because it cannot be read or has another number of
            fields than the header; None refuses it.
        name: what messages call a table in memory; None: by its type.

    Raises:
        DataError: no table, or no columns that can be read together.
    """
    if delimiter is not None and (
        not isinstance(delimiter, str) or len(delimiter) != 1 or delimiter in '"\r\n' or ord(delimiter) > 126
    ):
        raise refuse(f"delimiter={delimiter!r}", "no delimiter", "one ASCII character, no quote and no line break")
    if not _is_path(source):
        return _arrow(source, choose, name or type(source).__name__)
    found = find_tables(source, format, formats)
    name = os.fspath(source)
    with reading(Path(name)):
        size = sum(file.stat().st_size for file in found.files)
    if found.format == "text":

        def lines(advance: Callable[[int], object]) -> Iterator[Block]:
            for file in found.files:
                with reading(file):
                    yield from text_blocks(file, advance)

        return Source(name, "text", TEXT, lines, tuple(found.files), size, found.left_out)
    layouts = {file: csv_layout(file, delimiter, skip=skip is not None) for file in found.files} if found.format == "csv" else {}
    schema: pa.Schema | None = None
    unused: dict[str, None] = {}
    chosen: dict[Path, list[str]] = {}
    for file in found.files:
        here = _columns_of(file, layouts, list(found.keys.get(file, {})))
        where = at(file, 1) if layouts else str(file)
        names = choose(where, here.names)
        unused |= dict.fromkeys(one for one in here.names if one not in names)
        keys = found.keys.get(file, {})
        chosen[file] = [one for one in names if one not in keys]
        here = pa.schema([here.field(here.names.index(one)) for one in names])
        schema = here if schema is None else _common(schema, here, found.files[0], where)
    assert schema is not None
    common = schema

    def blocks(advance: Callable[[int], object]) -> Iterator[Block]:
        for file in found.files:
            with reading(file):
                columns = chosen[file]
                rows = (
                    csv_blocks(file, layouts[file], advance, columns, skip) if layouts else parquet_blocks(file, advance, columns)
                )
                for block in rows:
                    yield Block(
                        _with_keys(block.rows, found.keys.get(file, {}), common, block.file),
                        block.numbers,
                        block.file,
                        block.unit,
                    )

    return Source(name, found.format, common, blocks, tuple(found.files), size, found.left_out, tuple(unused))


def _columns_of(file: Path, layouts: dict[Path, CsvLayout], keys: list[str]) -> pa.Schema:
    here = pa.schema([(name, pa.large_string()) for name in layouts[file].names]) if layouts else parquet_schema(file)
    for key in keys:
        if key in here.names:
            raise refuse(file, f"the column {shown(key)} in the file and in the folders' names", "it once")
        here = here.append(pa.field(key, pa.large_string()))
    return here


def _common(before: pa.Schema, here: pa.Schema, first: Path, where: str) -> pa.Schema:
    """The columns of two files: of numbers the wider ones; other types must be equal."""
    if here.names != before.names:
        raise refuse(where, f"the columns {shown(here.names, 200)}", f"those of {first}: {shown(before.names, 200)}")
    fields = []
    for earlier, later in zip(before, here, strict=True):
        if earlier.type == later.type:
            fields.append(earlier)
            continue
        alike = [pa.schema([pa.field(earlier.name, _alike(one.type))]) for one in (earlier, later)]
        try:
            fields.append(pa.unify_schemas(alike, promote_options="permissive").field(0))
        except pa.ArrowException:
            raise refuse(
                where,
                f"the column {shown(earlier.name)} of type {later.type}",
                f"{earlier.type} as in {first}",
                "cast the column",
            ) from None
    return pa.schema(fields)


def _alike(kind: pa.DataType) -> pa.DataType:
    """One type of those that hold the same values in another way."""
    kind = storable(kind)
    return pa.timestamp(kind.unit, "UTC") if pa.types.is_timestamp(kind) and kind.tz else kind


def _with_keys(rows: pa.RecordBatch, keys: dict[str, str | None], schema: pa.Schema, file: str) -> pa.RecordBatch:
    """The columns of the schema: those read, in its types, and the values of the folders' names."""
    columns = []
    for one in schema:
        if one.name in rows.schema.names:
            column = rows.column(one.name)
        else:
            column = pa.repeat(pa.scalar(keys[one.name], pa.large_string()), len(rows))
        kind = one.type if column.type == one.type else storable(one.type)
        try:
            columns.append(_stored(column, kind))
        except pa.ArrowException as error:
            raise refuse(file, f"{shown(str(error), 160)}", f"values of type {one.type} in {shown(one.name)}") from None
    return pa.record_batch(columns, names=schema.names)


def _arrow(source: Any, choose: Choice, name: str) -> Source:
    kind = type(source)
    if isinstance(source, pa.RecordBatch):
        source = pa.Table.from_batches([source])
    if not hasattr(source, "__arrow_c_stream__"):
        raise refuse(
            name,
            f"an object of type {kind.__module__}.{kind.__name__}",
            "a path, an Arrow table, or a frame of pandas 2.2 or later, polars or DuckDB (anything with __arrow_c_stream__)",
        )
    try:
        reader = source if isinstance(source, pa.RecordBatchReader) else pa.RecordBatchReader.from_stream(source)
    except (pa.ArrowException, ValueError, TypeError) as error:
        # pandas says in the last argument which column it is.
        told = shown(str(error.args[-1] if error.args else error), 160)
        raise refuse(name, told, "columns of one type each", "cast them, or drop what is no feature") from None
    # The numbers of a frame of pandas whose index has no name are no column.
    found = [one for one in reader.schema.names if not _INDEX.fullmatch(one)]
    names = choose(name, found)
    places = [reader.schema.names.index(one) for one in names]
    schema = pa.schema([reader.schema.field(place).with_metadata(None) for place in places])

    def blocks(advance: Callable[[int], object]) -> Iterator[Block]:
        row = 0
        for batch in _batches(reader, name):
            for start in range(0, len(batch), _ARROW_ROWS):
                part = batch.slice(start, _ARROW_ROWS)
                rows = pa.record_batch([part.column(place) for place in places], names=names)
                yield Block(rows, np.arange(row, row + len(part)), name, "row ")
                row += len(part)

    unused = tuple(one for one in found if one not in names)
    return Source(name, "arrow", schema, blocks, unused=unused)


def _batches(reader: pa.RecordBatchReader, name: str) -> Iterator[pa.RecordBatch]:
    try:
        yield from reader
    except pa.ArrowException as error:
        raise refuse(name, shown(str(error), 160), "a stream of rows") from None


def storable(kind: pa.DataType) -> pa.DataType:
    """The type as DuckDB takes it: values in place of dictionaries, plain layouts in place of views."""
    if isinstance(kind, pa.BaseExtensionType):
        return storable(kind.storage_type)
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return storable(kind.value_type)
    if pa.types.is_null(kind) or pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_float16(kind):
        return pa.float32()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind):
        return pa.large_list(storable(kind.value_type))
    if pa.types.is_fixed_size_list(kind):
        return pa.large_list(storable(kind.value_type))
    return kind


def _decoded(rows: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    return pa.record_batch([_stored(column, one.type) for column, one in zip(rows.columns, schema, strict=True)], schema=schema)


def _stored(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """Values in a type of `storable`; Arrow's own cast takes no dictionaries of views, and none inside of lists."""
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
