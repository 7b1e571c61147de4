"""From a table's rows in DuckDB to a dataset's files: parse, drop, number the ids, order, write; a column after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from jagged.artifacts import write_manifest
from jagged.data.errors import DataError, refuse, shown
from jagged.data.expressions import LISTS, Parsed, is_string, parse, plain_type
from jagged.data.histories import TIES, fill_views
from jagged.data.records import FORMAT_VERSION, PARTS, Dataset, file_names, ids_file, write_column
from jagged.data.schema import WITH_IDS, Column, Kind, Schema
from jagged.data.sources import ROWS, Table, identifier
from jagged.data.values import time_form_sql
from jagged.data.vocabulary import Vocabulary, infer_integers

IntArray = npt.NDArray[np.int64]
CodeArray = npt.NDArray[np.int32]
AnyArray = npt.NDArray[Any]

# Of rows that `on_error="skip"` may leave out.
_SKIPPED_SHARE = 0.01
_PLACES = 3
_BATCH_ROWS = 1 << 16
# Ids of lists that are looked up together.
_BATCH_IDS = 1 << 22
# Ids that lie this close are found in a table of as many int32.
_CLOSE = 1 << 24
CURE = "set TMPDIR (or directory) to a directory on a disk with room"


@dataclass(frozen=True)
class Options:
    """What `from_table` was told, checked as far as it can be without a table."""

    duplicates: str
    min_events: dict[str, int]
    history: str | None
    history_delay: int | timedelta
    ties: str
    event_labels: tuple[str, ...]
    split: str | None
    on_error: str

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("duplicates", self.duplicates, ("drop", "keep")),
            ("history", self.history, (None, "events")),
            ("ties", self.ties, TIES),
            ("on_error", self.on_error, ("stop", "skip")),
        ):
            if value not in allowed:
                raise ValueError(f"{name}: got {value!r}, expected {' or '.join(map(repr, allowed))}")
        for key, count in self.min_events.items():
            if key not in ("user", "item") or type(count) is not int or count < 1:
                raise ValueError(f"min_events: got {self.min_events}, expected counts from 1 on for 'user' and 'item'")
        if not isinstance(self.history_delay, timedelta) and type(self.history_delay) is not int:
            raise ValueError(f"history_delay: got {self.history_delay!r}, expected a whole number or a timedelta")
        delay = self.history_delay
        if (delay < timedelta()) if isinstance(delay, timedelta) else (delay < 0):
            raise ValueError(f"history_delay: got {self.history_delay!r}, expected 0 or more")
        if self.ties == "before" and self.history_delay:
            raise ValueError(
                "ties='before' with a history_delay: events of the row's own time are within the delay; give one of the two"
            )
        if self.history is None and (self.history_delay or self.ties != "out" or self.event_labels):
            raise ValueError("history_delay, ties, event_labels: given without history='events', which they are for")


def fitting(table: Table, schema: Schema, options: Options) -> Schema:
    """The schema of what is stored, after it was compared with the table and the options."""
    if options.split is not None and options.split not in table.types:
        raise refuse(table.name, f"the columns {shown(list(table.types), 200)}", f"a column {shown(options.split)} (split=)")
    stored = Schema(tuple(one for one in schema.columns if one.kind is not Kind.UNUSED and one.name != options.split))
    needed = {
        "history='events'": [Kind.USER, Kind.CANDIDATE, Kind.TIME] if options.history else [],
        "min_events": [{"user": Kind.USER, "item": Kind.CANDIDATE}[key] for key in options.min_events],
    }
    for word, kinds in needed.items():
        for kind in kinds:
            if stored.one(kind) is None:
                raise refuse(f"{table.name}: {word}", f"no column of kind {kind.value}", "one", "name it in the schema")
    labels = [column.name for column in stored.of_kind(Kind.LABEL)]
    if unknown := [name for name in options.event_labels if name not in labels]:
        raise refuse(f"{table.name}: event_labels", f"{shown(unknown[0])}", f"labels: {shown(labels, 200)}")
    if not stored.columns:
        raise refuse(table.name, "a schema without a column that is used", "one at least")
    return stored


class Builder:
    """Fills a directory with a dataset's files, a column after the other; no more than one is in memory."""

    def __init__(self, table: Table, schema: Schema, options: Options, directory: Path) -> None:
        self.table = table
        self.schema = schema
        self.options = options
        self.directory = directory
        self.time_kind = "none"
        self.files: dict[str, str] = {}
        self.counts: dict[str, int] = {"rows": table.num_rows}
        self.bad_places: list[str] = []
        self.has_dropped = False
        if (time := schema.one(Kind.TIME)) is not None:
            self.time_kind = self._time_kind(time)
        self.parsed = {one.name: self._with_name(one) for one in schema.columns}

    def _with_name(self, column: Column) -> Parsed:
        try:
            return parse(column, self.table.types[column.name], self.table.is_text, self.time_kind)
        except DataError as error:
            raise DataError(f"{self.table.name}: {error}") from None

    def build(self) -> Dataset:
        """Fill the directory.

        Raises:
            DataError: a value that is none of its kind, or no room on the disk.
        """
        try:
            return self._build()
        except (duckdb.IOException, duckdb.OutOfMemoryException) as error:
            raise DataError(f"a temporary directory: could not be written: {shown(str(error), 200)}; {CURE}") from None

    def _build(self) -> Dataset:
        self.delay = self._delay()
        self.table.sql("CREATE TABLE dropped (row BIGINT)")
        self._drop_bad()
        if self.options.duplicates == "drop":
            self._drop_duplicates()
        if self.options.min_events:
            self._drop_rare()
        for number, (name, columns) in enumerate(self.schema.tables.items()):
            self._make_ids(number, name, columns)
        place = self._order()
        for number, column in enumerate(self.schema.columns):
            self._write(f"column-{number}", column, place)
        if self.options.split is not None:
            self._write_parts(place)
        return self._seal()

    def _time_kind(self, column: Column) -> str:
        kind = plain_type(self.table.types[column.name])
        if pa.types.is_timestamp(kind):
            return "zoned" if kind.tz else "naive"
        if pa.types.is_date(kind):
            return "naive"
        if not is_string(kind):
            return "number"
        written = time_form_sql(column, kind)
        first = self.table.sql(f"SELECT {written} FROM {ROWS} WHERE {written} IS NOT NULL ORDER BY rowid LIMIT 1")
        return str(first[0][0]) if first else "number"

    def _delay(self) -> int:
        delay = self.options.history_delay
        if not isinstance(delay, timedelta):
            return delay
        if self.time_kind == "number":
            raise refuse(
                f"{self.table.name}: history_delay", f"{delay!r} with times that are numbers", "a number in the times' own unit"
            )
        return delay // timedelta(microseconds=1)

    @property
    def _kept(self) -> str:
        return "WHERE rowid NOT IN (SELECT row FROM dropped)" if self.has_dropped else ""

    def _query(self, what: str, extra: str = "", order: str = "") -> str:
        where = self._kept
        if extra:
            where = f"{where} AND ({extra})" if where else f"WHERE {extra}"
        return f"SELECT {what} FROM {ROWS} {where} {order}"

    def _drop(self, step: str, query: str) -> int:
        """Leave out the rows that a query names, and count them."""
        before = self.table.sql("SELECT count(*) FROM dropped")[0][0]
        self.table.sql(f"INSERT INTO dropped {query}")
        gone = int(self.table.sql("SELECT count(*) FROM dropped")[0][0]) - before
        self.counts[step] = self.counts.get(step, 0) + gone
        self.has_dropped |= gone > 0
        return gone

    def _drop_bad(self) -> None:
        checks = [(name, parsed.bad, parsed.expected) for name, parsed in self.parsed.items() if parsed.bad]
        for column in self.schema.of_kind(Kind.IDS):
            if column.weights is not None:
                ids, weights = self.parsed[column.name].value, self.parsed[column.weights].value
                checks.append(
                    (
                        column.weights,
                        f"(coalesce(len({ids}), -1) <> coalesce(len({weights}), -1) OR coalesce(len({weights}) <> "
                        f"list_count({weights}) OR list_contains({weights}, 'nan'::FLOAT), false))",
                        f"a number for each id of {shown(column.name)}",
                    )
                )
        if self.options.split is not None:
            name = identifier(self.options.split)
            checks.append((self.options.split, f"NOT coalesce({_part(name)} >= 0, false)", ", ".join(PARTS)))
        if not checks:
            return
        number = "CASE " + " ".join(f"WHEN {bad} THEN {i}" for i, (_, bad, _) in enumerate(checks)) + " ELSE -1 END"
        is_stop = self.options.on_error == "stop"
        found = f"SELECT row, c FROM (SELECT rowid AS row, {number} AS c FROM {ROWS}) WHERE c >= 0 ORDER BY row"
        self.table.sql(f"CREATE TABLE bad AS {found} {'LIMIT 1' if is_stop else ''}")
        for row, check in self.table.sql(f"SELECT row, c FROM bad ORDER BY row LIMIT {_PLACES}"):
            name, _, expected = checks[check]
            value = self.table.sql(f"SELECT CAST({identifier(name)} AS VARCHAR) FROM {ROWS} WHERE rowid = {row}")[0][0]
            found = f"{'no value' if value is None else shown(value)} in the column {shown(name)}"
            error = refuse(self.table.place(row), found, expected, 'correct it, or leave such rows out with on_error="skip"')
            if is_stop:
                raise error
            self.bad_places.append(str(refuse(self.table.place(row), found, expected)))
        bad = self.table.sql("SELECT count(*) FROM bad")[0][0]
        if bad > _SKIPPED_SHARE * self.table.num_rows:
            raise refuse(
                self.table.name,
                f"{bad} of {self.table.num_rows} rows with a bad value ({self.bad_places[0]})",
                f"at most {_SKIPPED_SHARE:.0%}",
                "mend the table or the schema",
            )
        self._drop("bad", "SELECT row FROM bad")

    def _drop_duplicates(self) -> None:
        columns = ", ".join(map(identifier, self.table.types))
        # First by a number of each row, so that whole rows are kept only of those that may have an equal.
        hashed = f"SELECT rowid AS row, hash({columns}) AS h FROM {ROWS} {self._kept}"
        self.table.sql(
            f"CREATE TABLE alike AS SELECT row FROM ({hashed}) WHERE h IN "
            f"(SELECT h FROM ({hashed}) GROUP BY h HAVING count(*) > 1)"
        )
        self._drop(
            "duplicates",
            f"SELECT row FROM alike WHERE row NOT IN (SELECT min(rowid) FROM {ROWS} WHERE rowid IN (SELECT row FROM alike) "
            f"GROUP BY {columns})",
        )
        self.table.sql("DROP TABLE alike")

    def _drop_rare(self) -> None:
        self.counts["below_min_events"] = 0
        keys = {key: self._one({"user": Kind.USER, "item": Kind.CANDIDATE}[key]) for key in self.options.min_events}
        values = ", ".join(f"{self.parsed[column.name].value} AS {key}_id" for key, column in keys.items())
        self.table.sql(f"CREATE TABLE keys AS {self._query(f'rowid AS row, {values}')}")
        gone, rounds = 1, 0
        while gone:
            rounds, gone = rounds + 1, 0
            for key, least in self.options.min_events.items():
                kept = f"{key}_id IN (SELECT {key}_id FROM keys GROUP BY 1 HAVING count(*) >= {least})"
                here = self._drop("below_min_events", f"SELECT row FROM keys WHERE NOT coalesce({kept}, false)")
                if here:
                    self.table.sql("DELETE FROM keys WHERE row IN (SELECT row FROM dropped)")
                gone += here
        self.counts["min_events_rounds"] = rounds
        self.table.sql("DROP TABLE keys")

    def _one(self, kind: Kind) -> Column:
        column = self.schema.one(kind)
        assert column is not None
        return column

    def _value(self, column: Column) -> str:
        """Ids in the type of their table."""
        value = self.parsed[column.name].value
        shared = self.schema.tables.get(column.table_name, [column]) if column.kind in WITH_IDS else [column]
        if all(self.parsed[one.name].is_integer for one in shared) or not self.parsed[column.name].is_integer:
            return value
        return f"CAST({value} AS {'VARCHAR[]' if column.kind in LISTS else 'VARCHAR'})"

    def _make_ids(self, number: int, name: str, columns: list[Column]) -> None:
        """The table's ids and their codes, in the table `ids_N` and in a file."""
        ways = len(columns)
        pieces = []
        for i, column in enumerate(columns):
            value, place = self._value(column), f"rowid * {ways} + {i}"
            pieces.append(self._query(f"{f'unnest({value})' if column.kind in LISTS else value} AS v, {place} AS p"))
        found = f"SELECT v, min(p) AS p FROM ({' UNION ALL '.join(pieces)}) WHERE v IS NOT NULL GROUP BY v"
        self.table.sql(f"CREATE TABLE found AS {found}")
        # Ids that first appear in one list are told apart by their position in it.
        inside = [
            f"SELECT f.v, f.p, list_position(l.items, f.v) AS i FROM found f JOIN "
            f"(SELECT rowid AS r, {self._value(column)} AS items FROM {ROWS}) l ON l.r = f.p // {ways} WHERE f.p % {ways} = {i}"
            for i, column in enumerate(columns)
            if column.kind in LISTS
        ]
        flat = [str(i) for i, column in enumerate(columns) if column.kind not in LISTS]
        if flat:
            inside.append(f"SELECT v, p, 0 AS i FROM found WHERE p % {ways} IN ({', '.join(flat)})")
        self.table.sql(
            f"CREATE TABLE ids_{number} AS SELECT v, CAST(row_number() OVER (ORDER BY p, i) - 1 AS INTEGER) AS code "
            f"FROM ({' UNION ALL '.join(inside)})"
        )
        self.table.sql("DROP TABLE found")
        is_integer = all(self.parsed[column.name].is_integer for column in columns)
        batches = list(_batches(self.table, f"SELECT v FROM ids_{number} ORDER BY code"))
        ids = pa.concat_arrays([batch.column(0) for batch in batches]) if batches else pa.array([], pa.int64())
        ids = ids.cast(pa.int64() if is_integer else pa.large_string())
        if len(ids) >= 2**31 - 1:
            raise refuse(f"{self.table.name}: table {shown(name)}", f"{len(ids)} ids", f"at most {2**31 - 2}")
        Vocabulary(infer_integers(ids) if not is_integer and self.table.is_text and len(ids) else ids).save(
            self.directory / ids_file(number)
        )
        self.counts[f"ids of {name}"] = len(ids)

    def _order(self) -> AnyArray:
        """Write what follows from the order of the rows; return the place of each row of the source, -1 of one left out."""
        user, time = self.schema.one(Kind.USER), self.schema.one(Kind.TIME)
        parts = ["rowid AS row", f"{self._value(user)} AS u" if user else "NULL::BIGINT AS u"]
        parts.append(f"{self.parsed[time.name].value} AS t" if time else "0::BIGINT AS t")
        query = f"SELECT row, -1 AS u, t FROM ({self._query(', '.join(parts))}) ORDER BY t, row"
        if user is not None:
            number = list(self.schema.tables).index(user.table_name)
            query = (
                f"SELECT row, coalesce(code, -1) AS u, t FROM ({self._query(', '.join(parts))}) LEFT JOIN ids_{number} ON u = v "
                "ORDER BY 2, 3, 1"
            )
        kept = self.table.num_rows - int(self.table.sql("SELECT count(*) FROM dropped")[0][0])
        self.counts["kept"] = kept
        source, users, times = [_disk_array(self.directory, dtype, kept) for dtype in (np.int64, np.int32, np.int64)]
        position = 0
        for batch in _batches(self.table, query):
            here = slice(position, position := position + len(batch))
            source[here], users[here], times[here] = (column.to_numpy(zero_copy_only=False) for column in batch.columns)
        place = np.full(self.table.num_rows, -1, dtype=np.int32 if self.table.num_rows < 2**31 else np.int64)
        place[source] = np.arange(kept)
        self._save("source", source)
        # Each of these is 8 bytes a row.
        del source
        if self.options.history is not None:
            start, stop = (_disk_array(self.directory, np.int64, kept) for _ in range(2))
            fill_views(users, times, start, stop, delay=self.delay, ties=self.options.ties)
            self._save("start", start)
            self._save("stop", stop)
            # Two sums, and no third array.
            self.counts["events in histories"] = int(stop.sum()) - int(start.sum())
        return place

    def _write(self, key: str, column: Column, place: AnyArray) -> None:
        if column.kind in LISTS:
            self._write_lists(key, column, place)
        elif column.kind in WITH_IDS:
            number = list(self.schema.tables).index(column.table_name)
            query = (
                f"SELECT row, code FROM ({self._query(f'rowid AS row, {self._value(column)} AS v')}) JOIN ids_{number} USING (v)"
            )
            self._scatter(key, query, np.int32, -1, place)
        elif column.kind is Kind.REQUEST:
            value = self._value(column)
            query = (
                f"WITH r AS ({self._query(f'rowid AS row, {value} AS v')}), "
                "codes AS (SELECT v, CAST(row_number() OVER (ORDER BY min(row)) - 1 AS INTEGER) AS code FROM r "
                "WHERE v IS NOT NULL GROUP BY v) SELECT row, code FROM r JOIN codes USING (v)"
            )
            self._scatter(key, query, np.int32, -1, place)
        elif column.kind is Kind.TIME:
            self._scatter(key, self._query(f"rowid, {self.parsed[column.name].value}"), np.int64, 0, place)
        else:
            query = self._query(f"rowid, CAST({self.parsed[column.name].value} AS FLOAT)")
            self._scatter(key, query, np.float32, np.nan, place)

    def _scatter(self, key: str, query: str, dtype: type, missing: float, place: AnyArray) -> None:
        values = _disk_array(self.directory, dtype, self.counts["kept"])
        values.fill(missing)
        for batch in _batches(self.table, query):
            rows, found = (column.to_numpy(zero_copy_only=False) for column in batch.columns)
            values[place[rows]] = found
        self._save(key, values)

    def _write_parts(self, place: AnyArray) -> None:
        assert self.options.split is not None
        query = self._query(f"rowid, {_part(identifier(self.options.split))}")
        self._scatter("part", query, np.int8, 0, place)

    def _write_lists(self, key: str, column: Column, place: AnyArray) -> None:
        value = self._value(column)
        offsets = _disk_array(self.directory, np.int64, self.counts["kept"] + 1)
        # A missing list is a list of one missing value.
        for batch in _batches(self.table, self._query(f"rowid, CAST(coalesce(len({value}), 1) AS BIGINT)")):
            rows, lengths = (one.to_numpy() for one in batch.columns)
            offsets[place[rows] + 1] = lengths
        np.cumsum(offsets, out=offsets)
        total = int(offsets[-1])
        of_ids = column.kind is Kind.IDS
        values = _disk_array(self.directory, np.int32 if of_ids else np.float32, total)
        encode = self._coder(column) if of_ids else _numbers
        for batch in _batches(
            self.table, self._query(f"rowid, coalesce({value}, [NULL])"), max(1, _batch_rows(total, len(offsets)))
        ):
            rows = batch.column(0).to_numpy()
            lists = batch.column(1)
            found = encode(lists.flatten())
            lengths = lists.value_lengths().to_numpy().astype(np.int64)
            begin = offsets[place[rows]]
            before = np.cumsum(lengths) - lengths
            values[np.repeat(begin - before, lengths) + np.arange(len(found))] = found
        self._save(key, offsets, values)

    def _coder(self, column: Column) -> Callable[[pa.Array], AnyArray]:
        """What makes ids of a list column codes."""
        number = list(self.schema.tables).index(column.table_name)
        batches = list(_batches(self.table, f"SELECT v, code FROM ids_{number} ORDER BY v"))
        if not batches:
            return lambda ids: np.full(len(ids), -1, dtype=np.int32)
        table = pa.Table.from_batches(batches).combine_chunks()
        known, codes = table.column(0).combine_chunks(), table.column(1).to_numpy()
        if pa.types.is_integer(known.type):
            return _integer_coder(known.to_numpy(), codes)

        def encode(ids: pa.Array) -> AnyArray:
            distinct = ids.dictionary_encode()
            found = pc.index_in(distinct.dictionary, value_set=known).to_numpy()
            indices = pc.fill_null(distinct.indices, -1).to_numpy()
            return np.append(codes[found], np.int32(-1))[indices]

        return encode

    def _save(self, key: str, *arrays: AnyArray) -> None:
        self.files[key] = write_column(self.directory / f"{key}.arrow", *arrays)

    def _seal(self) -> Dataset:
        history = None
        if self.options.history is not None:
            history = {"delay": self.delay, "ties": self.options.ties}
        content: dict[str, Any] = {
            "layout": FORMAT_VERSION,
            "schema": self.schema.to_dict(),
            "counts": {**{name: count for name, count in self.counts.items() if name != "kept"}, "kept": self.counts["kept"]},
            "num_rows": self.counts["kept"],
            "num_tables": len(self.schema.tables),
            "time_kind": self.time_kind,
            "history": history,
            "event_labels": list(self.options.event_labels),
            "bad_places": self.bad_places,
            "values": self.files,
        }
        return Dataset(self.directory, write_manifest(self.directory, file_names(content), content, bar=True).content)


def _part(name: str) -> str:
    """The number of the part that a column names, -1 where it names none."""
    cases = " ".join(f"WHEN '{part}' THEN {i}" for i, part in enumerate(PARTS))
    return f"CAST(CASE lower(trim(CAST({name} AS VARCHAR))) {cases} ELSE -1 END AS TINYINT)"


def _batch_rows(values: int, rows: int) -> int:
    """Rows of lists that have about as many values as are looked up together."""
    return min(_BATCH_ROWS, _BATCH_IDS * max(rows, 1) // max(values, 1))


def _numbers(values: pa.Array) -> AnyArray:
    return np.asarray(values.to_numpy(zero_copy_only=False), dtype=np.float32)


def _integer_coder(known: IntArray, codes: CodeArray) -> Callable[[pa.Array], AnyArray]:
    lowest, span = int(known[0]), int(known[-1]) - int(known[0]) + 1
    by_distance = None
    if span <= _CLOSE:
        by_distance = np.full(span, -1, dtype=np.int32)
        by_distance[known - lowest] = codes

    def encode(ids: pa.Array) -> AnyArray:
        values = pc.fill_null(ids, lowest).to_numpy()
        found = codes[np.searchsorted(known, values)] if by_distance is None else by_distance[values - lowest]
        if ids.null_count:
            found = np.where(ids.is_null().to_numpy(zero_copy_only=False), np.int32(-1), found)
        return found

    return encode


def _batches(table: Table, query: str, rows: int = _BATCH_ROWS) -> Iterator[pa.RecordBatch]:
    yield from table.connection.sql(query).to_arrow_reader(rows)


def _disk_array(directory: Path, dtype: type, size: int) -> AnyArray:
    """An array of zeros whose pages are the operating system's, in a file without a name."""
    if not size:
        return np.zeros(0, dtype)
    with TemporaryFile(dir=directory) as file:
        return np.memmap(file, dtype=dtype, shape=(size,))
