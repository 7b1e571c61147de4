"""From a table's rows in DuckDB to a dataset's files: parse, drop, number the ids, order, write; a column after the other."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from jagged.artifacts import write_manifest
from jagged.data.errors import MAX_SKIPPED, DataError, refuse, shown
from jagged.data.expressions import LISTS, Parsed, is_string, parse, plain_type
from jagged.data.histories import TIES, fill_views, fill_views_beside, only
from jagged.data.progress import steps
from jagged.data.records import EVENT_PREFIX, FORMAT_VERSION, PARTS, Dataset, file_names, ids_file, write_column
from jagged.data.schema import SIDED, WITH_IDS, Column, Kind, Schema, shared_tables
from jagged.data.sources import Table, identifier
from jagged.data.values import hint_of_dates, time_form_sql
from jagged.data.vocabulary import Vocabulary, infer_integers

IntArray = npt.NDArray[np.int64]
CodeArray = npt.NDArray[np.int32]
AnyArray = npt.NDArray[Any]

# Of rows that are left out these many are named.
_PLACES = 3
_BATCH_ROWS = 1 << 16
# Batches after which pages of arrays on disk are let go.
_BATCHES = 32
# Ids of lists that are looked up together.
_BATCH_IDS = 1 << 22
# Ids that lie this close are found in a table of as many int32.
_CLOSE = 1 << 24
#: Units of times that are numbers, by the power of 1,000 of which a second has so many.
UNITS = {"s": 0, "ms": 1, "us": 2, "ns": 3}
# Powers of ten from which on numbers are meant as times since 1970 in a unit.
_MAGNITUDES = ((17, "nanoseconds"), (14, "microseconds"), (11, "milliseconds"), (8, "seconds"))
# Types of events that a message names.
_NAMED = 20


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
    event_lists: tuple[str, ...] = ()
    event_types: tuple[str | int, ...] | None = None
    event_weights: str | None = None
    time_units: tuple[str, str] | None = None
    is_beside: bool = False

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
        if self.ties == "before" and self.is_beside:
            raise ValueError(
                "ties='before' with events=: rows and events of one time stand in two tables, without an order; leave it out"
            )
        if self.event_types is not None and (
            not self.event_types or any(type(one) not in (str, int) for one in self.event_types)
        ):
            raise ValueError(f"event_types: got {self.event_types!r}, expected types of events, as texts or whole numbers")
        if self.time_units is not None and (len(self.time_units) != 2 or any(one not in UNITS for one in self.time_units)):
            raise ValueError(
                f"time_units: got {self.time_units!r}, expected the units of the rows' and of the events' times, "
                f"each one of {', '.join(UNITS)}"
            )
        if self.time_units is not None and not self.is_beside:
            raise ValueError("time_units: given without events=, whose times they compare with the rows'")
        for_histories = (
            *(self.history_delay, self.ties != "out", self.event_labels, self.event_lists),
            *(self.event_types is not None, self.event_weights is not None),
        )
        if self.history is None and any(for_histories):
            raise ValueError(
                "history_delay, ties, event_labels, event_lists, event_types, event_weights: given without history='events' or "
                "events=, which they are for"
            )


def fitting(table: Table, schema: Schema, options: Options) -> Schema:
    """The schema of what is stored, after it was compared with the table and the options."""
    if options.split is not None and options.split not in table.types:
        raise refuse(table.name, f"the columns {shown(list(table.types), 200)}", f"a column {shown(options.split)} (split=)")
    stored = Schema(tuple(one for one in schema.columns if one.kind is not Kind.UNUSED and one.name != options.split))
    of_events = [] if not options.history else [Kind.USER, Kind.TIME] if options.is_beside else _OF_EVENTS
    _need(table, stored, "events=" if options.is_beside else "history='events'", of_events)
    _need(table, stored, "min_events", [{"user": Kind.USER, "item": Kind.CANDIDATE}[key] for key in options.min_events])
    if not stored.columns:
        raise refuse(table.name, "a schema without a column that is used", "one at least")
    if options.history and not options.is_beside:
        _fit_log(table, stored, options)
    return stored


def fitting_events(table: Table, schema: Schema, options: Options) -> tuple[Schema, Options]:
    """The schema of the events that are stored beside rows, and the options, in which a column of weights is named."""
    stored = Schema(tuple(one for one in schema.columns if one.kind is not Kind.UNUSED))
    _need(table, stored, "events=", _OF_EVENTS)
    weight = stored.one(Kind.WEIGHT)
    if options.event_weights is None and weight is not None:
        options = replace(options, event_weights=weight.name)
    _fit_log(table, stored, options)
    return stored, options


_OF_EVENTS = [Kind.USER, Kind.CANDIDATE, Kind.TIME]


def _need(table: Table, schema: Schema, word: str, kinds: list[Kind]) -> None:
    for kind in kinds:
        if schema.one(kind) is None:
            raise refuse(f"{table.name}: {word}", f"no column of kind {kind.value}", "one", "name it in the schema")


def _fit_log(table: Table, schema: Schema, options: Options) -> None:
    """Compare what events show with the columns of the table that has them."""
    named = {
        "event_labels": (options.event_labels, "labels", [one.name for one in schema.of_kind(Kind.LABEL)]),
        "event_lists": (options.event_lists, "lists of ids", [one.name for one in schema.of_kind(Kind.IDS)]),
        "event_weights": (
            () if options.event_weights is None else (options.event_weights,),
            "columns of kind number or weight",
            [one.name for one in schema.features(Kind.NUMBER, Kind.WEIGHT)],
        ),
    }
    for word, (names, what, known) in named.items():
        if unknown := [name for name in names if name not in known]:
            raise refuse(f"{table.name}: {word}", f"{shown(unknown[0])}", f"{what}: {shown(known, 200)}")
    if options.event_types is not None:
        _need(table, schema, "event_types", [Kind.EVENT])


class Staged:
    """A table in DuckDB with its schema: how its values are read, and which of its rows are left out.

    Attributes:
        table, schema, options: as they were given.
        is_events: whether it is an event table beside the rows.
        time_kind: what times are.
        parsed: how each column is read.
        counts: of rows after each step.
        bad_places: of the first rows that were left out, with what was wrong.
    """

    def __init__(self, table: Table, schema: Schema, options: Options, *, is_events: bool = False) -> None:
        self.table = table
        self.schema = schema
        self.options = options
        self.is_events = is_events
        self.prefix = EVENT_PREFIX if is_events else ""
        self.dropped = f"dropped_of_{table.rows}"
        self.counts: dict[str, int] = {}
        self.bad_places: list[str] = []
        self.has_dropped = False
        self.time_kind = "none"
        self.has_times = True
        if (time := schema.one(Kind.TIME)) is not None:
            self.time_kind = self._time_kind(time)
        self.parsed = {one.name: self._with_name(one) for one in schema.columns}
        for column in schema.of_kind(Kind.LABEL):
            self._check_threshold(column)
        #: What events are ordered by: times before they were converted.
        self.moment = "" if time is None else self.parsed[time.name].value
        self.table.sql(f"CREATE TABLE {self.dropped} (row BIGINT)")
        self._count("rows", table.num_rows + table.skipped.count)
        if table.skipped.count:
            self._count("bad", table.skipped.count)
        self.bad_places += table.skipped.first[:_PLACES]

    def _count(self, step: str, count: int) -> None:
        step = f"events: {step}" if self.is_events else step
        self.counts[step] = self.counts.get(step, 0) + count

    def _with_name(self, column: Column) -> Parsed:
        try:
            return parse(column, self.table.types[column.name], self.table.is_text, self.time_kind)
        except DataError as error:
            raise DataError(f"{self.table.name}: {error}") from None

    def _check_threshold(self, column: Column) -> None:
        """Refuse what is 0 or 1 already where a label is to be 1 from a larger value on: as a dataset gives its rows back."""
        least = column.positive_from
        if least is None or least <= 1:
            return
        value = self._with_name(replace(column, positive_from=None)).value
        rows = f"(SELECT {value} AS v FROM {self.table.rows})"
        count, other = self.table.sql(f"SELECT count(v), count(v) FILTER (v NOT IN (0, 1)) FROM {rows}")[0]
        if count and not other:
            raise refuse(
                f"{self.table.name}: label {shown(column.name)}",
                "0 and 1 alone",
                f"other values, as it is 1 from {least:g} on",
                "give the values that it was made from, or leave the threshold out",
            )

    def _time_kind(self, column: Column) -> str:
        kind = plain_type(self.table.types[column.name])
        if pa.types.is_timestamp(kind):
            return "zoned" if kind.tz else "naive"
        if pa.types.is_date(kind):
            return "naive"
        if not is_string(kind):
            return "number"
        written = time_form_sql(column, kind)
        first = self.table.sql(f"SELECT {written} FROM {self.table.rows} WHERE {written} IS NOT NULL ORDER BY rowid LIMIT 1")
        self.has_times = bool(first)
        return str(first[0][0]) if first else "number"

    @property
    def _kept(self) -> str:
        return f"WHERE rowid NOT IN (SELECT row FROM {self.dropped})" if self.has_dropped else ""

    def query(self, what: str, extra: str = "") -> str:
        """SQL that asks the rows that are not left out, and for which `extra` holds."""
        where = self._kept
        if extra:
            where = f"{where} AND ({extra})" if where else f"WHERE {extra}"
        return f"SELECT {what} FROM {self.table.rows} {where}"

    @property
    def num_dropped(self) -> int:
        """Rows that are left out."""
        return int(self.table.sql(f"SELECT count(*) FROM {self.dropped}")[0][0])

    @property
    def num_kept(self) -> int:
        """Rows that are stored."""
        return self.table.num_rows - self.num_dropped

    def _drop(self, step: str, query: str) -> int:
        """Leave out the rows that a query names, and count them."""
        before = self.num_dropped
        self.table.sql(f"INSERT INTO {self.dropped} {query}")
        gone = self.num_dropped - before
        self._count(step, gone)
        self.has_dropped |= gone > 0
        return gone

    def drop_bad(self) -> None:
        """Refuse or leave out the rows with a value that is none of its kind."""
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
        weight = self.options.event_weights
        if weight is not None and (self.is_events or not self.options.is_beside) and self.schema[weight].kind is Kind.NUMBER:
            value = self.parsed[weight].value
            bad = f"({value}) IS NULL OR ({value}) < 0 OR isinf({value})"
            checks.append((weight, bad, "a finite number from 0 on, as of a weight of events"))
        if self.options.split is not None and not self.is_events:
            name = identifier(self.options.split)
            checks.append((self.options.split, f"NOT coalesce({_part(name)} >= 0, false)", ", ".join(PARTS)))
        if not checks:
            return
        number = "CASE " + " ".join(f"WHEN {bad} THEN {i}" for i, (_, bad, _) in enumerate(checks)) + " ELSE -1 END"
        is_stop = self.options.on_error == "stop"
        found = f"SELECT row, c FROM (SELECT rowid AS row, {number} AS c FROM {self.table.rows}) WHERE c >= 0 ORDER BY row"
        self.table.sql(f"CREATE TABLE bad AS {found} {'LIMIT 1' if is_stop else ''}")
        places = 1 if is_stop else _PLACES - len(self.bad_places)
        for row, check in self.table.sql(f"SELECT row, c FROM bad ORDER BY row LIMIT {places}"):
            name, _, expected = checks[check]
            value = self.table.sql(f"SELECT CAST({identifier(name)} AS VARCHAR) FROM {self.table.rows} WHERE rowid = {row}")[0][0]
            found = f"{'no value' if value is None else shown(value)} in the column {shown(name)}"
            hint = hint_of_dates(self.table, self.schema[name]) if name in self.schema.names else ""
            if hint and not self.has_times:
                expected = "an ISO 8601 time or a whole number"
            cure = hint or 'correct it, or leave such rows out with on_error="skip"'
            error = refuse(self.table.place(row), found, expected, cure)
            if is_stop:
                raise error
            self.bad_places.append(str(refuse(self.table.place(row), found, expected)))
        unread = self.table.skipped.count
        bad, rows = unread + self.table.sql("SELECT count(*) FROM bad")[0][0], self.table.num_rows + unread
        if bad > MAX_SKIPPED * rows:
            raise refuse(
                self.table.name,
                f"{bad} of {rows} rows with a bad value ({self.bad_places[0]})",
                f"at most {MAX_SKIPPED:.0%}",
                "mend the table or the schema",
            )
        self._drop("bad", "SELECT row FROM bad")
        self.table.sql("DROP TABLE bad")

    def drop_duplicates(self) -> None:
        """Leave out the rows that are equal to an earlier one in all columns."""
        columns = ", ".join(map(identifier, self.table.types))
        # First by a number of each row, so that whole rows are kept only of those that may have an equal.
        hashed = f"SELECT rowid AS row, hash({columns}) AS h FROM {self.table.rows} {self._kept}"
        self.table.sql(
            f"CREATE TABLE alike AS SELECT row FROM ({hashed}) WHERE h IN "
            f"(SELECT h FROM ({hashed}) GROUP BY h HAVING count(*) > 1)"
        )
        first = f"SELECT min(rowid) FROM {self.table.rows} WHERE rowid IN (SELECT row FROM alike) GROUP BY {columns}"
        self._drop("duplicates", f"SELECT row FROM alike WHERE row NOT IN ({first})")
        self.table.sql("DROP TABLE alike")

    def drop_rare(self) -> None:
        """Leave out rows of users and items with too few, until none goes."""
        keys = {key: self.one({"user": Kind.USER, "item": Kind.CANDIDATE}[key]) for key in self.options.min_events}
        values = ", ".join(f"{self.parsed[column.name].value} AS {key}_id" for key, column in keys.items())
        self.table.sql(f"CREATE TABLE keys AS {self.query(f'rowid AS row, {values}')}")
        gone, rounds = 1, 0
        while gone:
            rounds, gone = rounds + 1, 0
            for key, least in self.options.min_events.items():
                kept = f"{key}_id IN (SELECT {key}_id FROM keys GROUP BY 1 HAVING count(*) >= {least})"
                here = self._drop("below_min_events", f"SELECT row FROM keys WHERE NOT coalesce({kept}, false)")
                if here:
                    self.table.sql(f"DELETE FROM keys WHERE row IN (SELECT row FROM {self.dropped})")
                gone += here
        self._count("min_events_rounds", rounds)
        self.table.sql("DROP TABLE keys")

    def tell_sides(self) -> None:
        """Say of each feature whether it is the candidate's, as it is where a request has several values, or the request's.

        Raises:
            DataError: several values of a column that was named as the request's.
        """
        columns = []
        for column in self.schema.columns:
            if column in self.schema.features(*SIDED) and column.of != "candidate":
                varying = self._varying(column)
                if varying and column.of == "request":
                    raise refuse(
                        f"{self.table.name}, column {shown(column.name)}",
                        f"several values in each of {varying:,} requests",
                        "one in each, as of request_columns",
                        "leave it out there",
                    )
                column = replace(column, of="candidate" if varying else "request")
            columns.append(column)
        self.schema = Schema(tuple(columns))

    def _varying(self, column: Column) -> int:
        """Requests with more than one value of a column; missing is one. A request is of one user."""
        kinds = [kind for kind in (Kind.REQUEST, Kind.USER) if self.schema.one(kind) is not None]
        keys = [f"{self.parsed[self.one(kind).name].value} AS {kind.value}_" for kind in kinds]
        rows = self.query(f"{', '.join(keys)}, {self.parsed[column.name].value} AS value")
        several = "min(value) IS DISTINCT FROM max(value) OR count(value) NOT IN (0, count(*))"
        by = ", ".join(f"{kind.value}_" for kind in kinds)
        query = f"SELECT 1 FROM ({rows}) WHERE request_ IS NOT NULL GROUP BY {by} HAVING {several}"
        return int(self.table.sql(f"SELECT count(*) FROM ({query})")[0][0])

    def drop_types(self) -> None:
        """Leave out the events of other types than those that are named."""
        self._drop("of other types", self.query("rowid", f"NOT {self.of_types()}"))

    def drop_strangers(self, rows: Staged, user: str, other: str) -> None:
        """Leave out the events of users who have no row: no view reaches them."""
        known = rows.query(f"{other} AS v")
        self._drop("of users without rows", self.query("rowid", f"NOT coalesce({user} IN ({known}), false)"))

    def of_types(self) -> str:
        """Whether an event is of a type that is named, as SQL: never NULL.

        Raises:
            DataError: no event is of one of them.
        """
        assert self.options.event_types is not None
        value = f"CAST({self.parsed[self.one(Kind.EVENT).name].value} AS VARCHAR)"
        for one in self.options.event_types:
            if not self.table.sql(f"{self.query('1', f'{value} = {_text(one)}')} LIMIT 1"):
                known = self.table.sql(
                    f"SELECT DISTINCT v FROM ({self.query(f'{value} AS v')}) WHERE v IS NOT NULL ORDER BY v LIMIT {_NAMED}"
                )
                raise refuse(
                    f"{self.table.name}: event_types",
                    f"no event of type {shown(str(one))}",
                    f"of {shown([v for (v,) in known], 200)}",
                )
        return f"coalesce({value} IN ({', '.join(map(_text, self.options.event_types))}), false)"

    def to_unit_of(self, rows: Staged) -> None:
        """Convert the times of events into the unit of the rows' times.

        In a finer unit an event stands at the last moment of its own: what a second says has happened when it is over.

        Raises:
            DataError: times of the calendar beside numbers, or of two units that nobody named.
        """
        time, other = self.one(Kind.TIME), rows.one(Kind.TIME)
        where, beside = f"{self.table.name}: column {shown(time.name)}", f"those of {rows.table.name} in {shown(other.name)}"
        # A table without rows says nothing of its times.
        if self.time_kind != rows.time_kind and self.table.num_rows and rows.table.num_rows:
            raise refuse(where, _WAYS[self.time_kind], f"{_WAYS[rows.time_kind]}, as {beside}", "convert one of the two columns")
        if self.options.time_units is None:
            return
        if self.time_kind != "number":
            raise refuse(
                f"{self.table.name}: time_units", _WAYS[self.time_kind], "times that are numbers", "leave time_units out"
            )
        power = UNITS[self.options.time_units[0]] - UNITS[self.options.time_units[1]]
        factor, value = 1000 ** abs(power), f"CAST({self.parsed[time.name].value} AS HUGEINT)"
        if power > 0:
            value = f"{value} * {factor} + {factor - 1}"
        elif power < 0:
            # Down to the unit's beginning, also below 0.
            value = f"({value} - ({value} % {factor} + {factor}) % {factor}) // {factor}"
        value = f"TRY_CAST({value} AS BIGINT)"
        expected = f"{self.parsed[time.name].expected} that has a place in int64 in {self.options.time_units[0]}"
        self.parsed[time.name] = replace(self.parsed[time.name], value=value, bad=f"({value}) IS NULL", expected=expected)

    def compare_units(self, rows: Staged) -> None:
        """Refuse times of events that are numbers of another unit than the rows' times, by what most of them are.

        Raises:
            DataError: the two are of other magnitudes, and apart.
        """
        if self.time_kind != "number" or self.options.time_units is not None:
            return
        found = []
        for one in (self, rows):
            column = one.one(Kind.TIME)
            asked = one.query(f"{one.parsed[column.name].value} AS t")
            # Estimated: exact ones would hold all times in memory.
            ((times,),) = one.table.sql(f"SELECT approx_quantile(t, [0.01, 0.5, 0.99]) FROM ({asked})")
            if times is None:
                return
            lowest, middle, highest = times
            unit = next((name for power, name in _MAGNITUDES if abs(middle) >= 10**power), "numbers below 100,000,000")
            found.append((one, column, unit, lowest, middle, highest))
        (_, column, unit, low, middle, high), (_, other, expected, lowest, usual, highest) = found
        if unit != expected and (high < lowest or low > highest):
            raise refuse(
                f"{self.table.name}: column {shown(column.name)}",
                f"times as {middle}, by their size {unit}",
                f"{expected}, as {usual} in {shown(other.name)} of {rows.table.name}",
                'name both units, as time_units=("s", "ms") where the rows are in seconds and the events in milliseconds',
            )

    def one(self, kind: Kind) -> Column:
        """The column of a kind that the schema has."""
        column = self.schema.one(kind)
        assert column is not None
        return column


class Builder:
    """Fills a directory with a dataset's files, a column after the other; no more than one is in memory."""

    def __init__(
        self,
        table: Table,
        schema: Schema,
        options: Options,
        directory: Path,
        events: tuple[Table, Schema] | None = None,
        *,
        progress: bool = True,
    ) -> None:
        self.progress = progress
        self.options = options
        self.directory = directory
        self.files: dict[str, str] = {}
        self.rows = Staged(table, schema, options)
        self.events = None if events is None else Staged(*events, options, is_events=True)
        self.sides = [self.rows, *([] if self.events is None else [self.events])]
        self.table = table
        self.tables = shared_tables(*(side.schema for side in self.sides))
        self.ids: dict[str, int] = {}
        self.counts: dict[str, int] = {}

    def build(self) -> Dataset:
        """Fill the directory.

        Raises:
            DataError: a value that is none of its kind.
            OSError: no room on the disk.
            duckdb.Error: no room on the disk, or in memory, for the table; who has opened it tells that.
        """
        with steps("Building", self._num_steps, self.progress) as self.step:
            return self._build()

    @property
    def _num_steps(self) -> int:
        for_each = len(self.sides) * (2 + (self.options.duplicates == "drop")) + sum(
            len(side.schema.columns) for side in self.sides
        )
        once = (
            self.options.min_events, self.rows.schema.one(Kind.REQUEST), self.events, self.options.history is not None,
            self.options.split is not None, True,
        )  # fmt: skip
        return for_each + len(self.tables) + sum(map(bool, once))

    def _build(self) -> Dataset:
        self.delay = self._delay()
        for side in self.sides:
            if side is self.events:
                side.to_unit_of(self.rows)
            self.step("bad values")
            side.drop_bad()
            if self.options.duplicates == "drop":
                self.step("equal rows")
                side.drop_duplicates()
            if self.options.min_events and side is self.rows:
                self.step("rare users and items")
                side.drop_rare()
        if self.rows.schema.one(Kind.REQUEST) is not None:
            self.step("whose columns are")
            self.rows.tell_sides()
        if self.events is not None:
            self.step("events of others")
            self.events.compare_units(self.rows)
            if self.options.event_types is not None:
                self.events.drop_types()
            users = [self._value(side, side.one(Kind.USER)) for side in self.sides]
            self.events.drop_strangers(self.rows, users[1], users[0])
        for number, name in enumerate(self.tables):
            self.step(f"ids of {name}")
            self._make_ids(number, name)
        log = None
        if self.events is not None:
            place, *of_events = self._order(self.events)
            self._write_all(self.events, place)
            log = of_events[0], of_events[1]
            del of_events
        place, users_, times = self._order(self.rows)
        if self.options.history is not None:
            self.step("histories")
            self._write_views(users_, times, place, log)
        del users_, times, log
        self._write_all(self.rows, place)
        if self.options.split is not None:
            self.step("parts")
            self._write_parts(place)
        self.step("digests")
        return self._seal()

    def _write_all(self, side: Staged, place: AnyArray) -> None:
        for number, column in enumerate(side.schema.columns):
            self.step(f"column {column.name}")
            self._write(side, f"{side.prefix}column-{number}", column, place)

    def _delay(self) -> int:
        delay = self.options.history_delay
        if not isinstance(delay, timedelta):
            return delay
        if self.rows.time_kind == "number":
            raise refuse(
                f"{self.table.name}: history_delay", f"{delay!r} with times that are numbers", "a number in the times' own unit"
            )
        return delay // timedelta(microseconds=1)

    def _value(self, side: Staged, column: Column) -> str:
        """Ids in the type of their table."""
        parsed = side.parsed[column.name]
        if not parsed.is_integer or column.kind not in WITH_IDS or self._is_integer(column.table_name):
            return parsed.value
        return f"CAST({parsed.value} AS {'VARCHAR[]' if column.kind in LISTS else 'VARCHAR'})"

    def _columns(self, name: str) -> list[tuple[Staged, Column]]:
        """The columns of a table of ids."""
        return [(side, one) for side in self.sides for one in side.schema.of_kind(*WITH_IDS) if one.table_name == name]

    def _is_integer(self, name: str) -> bool:
        return all(side.parsed[column.name].is_integer for side, column in self._columns(name))

    def _make_ids(self, number: int, name: str) -> None:
        """The table's ids and their codes, in the table `ids_N` and in a file."""
        columns = self._columns(name)
        ways = len(columns)
        # Rows come before the events beside them.
        first = {id(side): before for side, before in zip(self.sides, (0, self.rows.table.num_rows), strict=False)}
        pieces = []
        for i, (side, column) in enumerate(columns):
            value, place = self._value(side, column), f"(rowid + {first[id(side)]}) * {ways} + {i}"
            pieces.append(side.query(f"{f'unnest({value})' if column.kind in LISTS else value} AS v, {place} AS p"))
        found = f"SELECT v, min(p) AS p FROM ({' UNION ALL '.join(pieces)}) WHERE v IS NOT NULL GROUP BY v"
        self.table.sql(f"CREATE TABLE found AS {found}")
        # Ids that first appear in one list are told apart by their position in it.
        inside = [
            f"SELECT f.v, f.p, list_position(l.items, f.v) AS i FROM found f JOIN "
            f"(SELECT rowid + {first[id(side)]} AS r, {self._value(side, column)} AS items FROM {side.table.rows}) l "
            f"ON l.r = f.p // {ways} WHERE f.p % {ways} = {i}"
            for i, (side, column) in enumerate(columns)
            if column.kind in LISTS
        ]
        flat = [str(i) for i, (_, column) in enumerate(columns) if column.kind not in LISTS]
        if flat:
            inside.append(f"SELECT v, p, 0 AS i FROM found WHERE p % {ways} IN ({', '.join(flat)})")
        self.table.sql(
            f"CREATE TABLE ids_{number} AS SELECT v, CAST(row_number() OVER (ORDER BY p, i) - 1 AS INTEGER) AS code "
            f"FROM ({' UNION ALL '.join(inside)})"
        )
        self.table.sql("DROP TABLE found")
        is_integer = self._is_integer(name)
        batches = list(_batches(self.table, f"SELECT v FROM ids_{number} ORDER BY code"))
        ids = pa.concat_arrays([batch.column(0) for batch in batches]) if batches else pa.array([], pa.int64())
        ids = ids.cast(pa.int64() if is_integer else pa.large_string())
        if len(ids) >= 2**31 - 1:
            raise refuse(f"{self.table.name}: table {shown(name)}", f"{len(ids)} ids", f"at most {2**31 - 2}")
        # Text that a csv file told says nothing of types; text of a typed source does.
        is_open = all(side.table.is_text or side.parsed[column.name].is_integer for side, column in columns)
        Vocabulary(infer_integers(ids) if not is_integer and is_open and len(ids) else ids).save(
            self.directory / ids_file(number)
        )
        self.ids[name] = number
        self.counts[f"ids of {name}"] = len(ids)

    def _order(self, side: Staged) -> tuple[AnyArray, AnyArray, AnyArray]:
        """Order the rows of a table by user, time and source, and write where in the source they stand.

        Returns:
            The place of each row of the source, -1 of one left out; the users and times of the places.
        """
        self.step("order of the rows")
        user, time = side.schema.one(Kind.USER), side.schema.one(Kind.TIME)
        parts = ["rowid AS row", f"{self._value(side, user)} AS u" if user else "NULL::BIGINT AS u"]
        parts.append(f"{side.parsed[time.name].value} AS t" if time else "0::BIGINT AS t")
        parts.append(f"{side.moment} AS m" if time else "0::BIGINT AS m")
        query = f"SELECT row, -1 AS u, t FROM ({side.query(', '.join(parts))}) ORDER BY m, row"
        if user is not None:
            query = (
                f"SELECT row, coalesce(code, -1) AS u, t FROM ({side.query(', '.join(parts))}) "
                f"LEFT JOIN ids_{self.ids[user.table_name]} ON u = v ORDER BY 2, m, 1"
            )
        kept = side.num_kept
        source, users, times = [_disk_array(self.directory, dtype, kept) for dtype in (np.int64, np.int32, np.int64)]
        position = 0
        for number, batch in enumerate(_batches(self.table, query)):
            here = slice(position, position := position + len(batch))
            source[here], users[here], times[here] = (column.to_numpy(zero_copy_only=False) for column in batch.columns)
            if number % _BATCHES == _BATCHES - 1:
                _unload(source, users, times)
        rows = side.table.num_rows
        place = np.full(rows, -1, dtype=np.int32 if rows < 2**31 else np.int64)
        for begin in range(0, kept, _BATCHES * _BATCH_ROWS):
            some = source[begin : begin + _BATCHES * _BATCH_ROWS]
            place[some] = np.arange(begin, begin + len(some))
        self._save(f"{side.prefix}source", source)
        _unload(users, times)
        return place, users, times

    def _write_views(self, users: AnyArray, times: AnyArray, place: AnyArray, log: tuple[AnyArray, AnyArray] | None) -> None:
        """Which events each row may know."""
        start, stop = (_disk_array(self.directory, np.int64, len(users)) for _ in range(2))

        def after() -> None:
            _unload(users, times, start, stop, *(log or ()))

        if log is not None:
            fill_views_beside(users, times, log[0], log[1], start, stop, delay=self.delay, after=after)
        else:
            fill_views(users, times, start, stop, delay=self.delay, ties=self.options.ties, after=after)
        if self.options.event_types is not None and log is None:
            chosen = np.zeros(len(users), dtype=np.bool_)
            for batch in _batches(self.table, self.rows.query("rowid", self.rows.of_types())):
                chosen[place[batch.column(0).to_numpy()]] = True
            only(start, stop, chosen)
            self._save("events", np.flatnonzero(chosen))
        # Two sums, and no third array.
        self.counts["events in histories"] = int(stop.sum())
        self._save("stop", stop)
        self.counts["events in histories"] -= int(start.sum())
        self._save("start", start)

    def _write(self, side: Staged, key: str, column: Column, place: AnyArray) -> None:
        kept = side.num_kept
        if column.kind in LISTS:
            self._write_lists(side, key, column, place)
        elif column.kind in WITH_IDS:
            query = (
                f"SELECT row, code FROM ({side.query(f'rowid AS row, {self._value(side, column)} AS v')}) "
                f"JOIN ids_{self.ids[column.table_name]} USING (v)"
            )
            self._scatter(key, query, np.int32, -1, place, kept)
        elif column.kind is Kind.REQUEST:
            query = (
                f"WITH r AS ({side.query(f'rowid AS row, {self._value(side, column)} AS v')}), "
                "codes AS (SELECT v, CAST(row_number() OVER (ORDER BY min(row)) - 1 AS INTEGER) AS code FROM r "
                "WHERE v IS NOT NULL GROUP BY v) SELECT row, code FROM r JOIN codes USING (v)"
            )
            self._scatter(key, query, np.int32, -1, place, kept)
        elif column.kind is Kind.TIME:
            self._scatter(key, side.query(f"rowid, {side.parsed[column.name].value}"), np.int64, 0, place, kept)
        else:
            query = side.query(f"rowid, CAST({side.parsed[column.name].value} AS FLOAT)")
            self._scatter(key, query, np.float32, np.nan, place, kept)

    def _scatter(self, key: str, query: str, dtype: type, missing: float, place: AnyArray, kept: int) -> None:
        values = _disk_array(self.directory, dtype, kept)
        values.fill(missing)
        for batch in _batches(self.table, query):
            rows, found = (column.to_numpy(zero_copy_only=False) for column in batch.columns)
            values[place[rows]] = found
        self._save(key, values)

    def _write_parts(self, place: AnyArray) -> None:
        assert self.options.split is not None
        query = self.rows.query(f"rowid, {_part(identifier(self.options.split))}")
        self._scatter("part", query, np.int8, 0, place, self.rows.num_kept)

    def _write_lists(self, side: Staged, key: str, column: Column, place: AnyArray) -> None:
        value = self._value(side, column)
        offsets = _disk_array(self.directory, np.int64, side.num_kept + 1)
        # A missing list is a list of one missing value.
        for batch in _batches(self.table, side.query(f"rowid, CAST(coalesce(len({value}), 1) AS BIGINT)")):
            rows, lengths = (one.to_numpy() for one in batch.columns)
            offsets[place[rows] + 1] = lengths
        np.cumsum(offsets, out=offsets)
        total = int(offsets[-1])
        of_ids = column.kind is Kind.IDS
        values = _disk_array(self.directory, np.int32 if of_ids else np.float32, total)
        encode = self._coder(column) if of_ids else _numbers
        lists_of_rows = side.query(f"rowid, coalesce({value}, [NULL])")
        for number, batch in enumerate(_batches(self.table, lists_of_rows, max(1, _batch_rows(total, len(offsets))))):
            if number % _BATCHES == _BATCHES - 1:
                _unload(values)
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
        batches = list(_batches(self.table, f"SELECT v, code FROM ids_{self.ids[column.table_name]} ORDER BY v"))
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
        _unload(*arrays)

    def _seal(self) -> Dataset:
        history = None
        if self.options.history is not None:
            history = {"delay": self.delay, "ties": self.options.ties}
        of_events = {} if self.events is None else {**self.events.counts, "events: kept": self.events.num_kept}
        counts = {**self.rows.counts, **of_events, **self.counts}
        beside = None
        if self.events is not None:
            beside = {"schema": self.events.schema.to_dict(), "num_rows": self.events.num_kept}
        content: dict[str, Any] = {
            "layout": FORMAT_VERSION,
            "schema": self.rows.schema.to_dict(),
            "counts": {**counts, "kept": self.rows.num_kept},
            "num_rows": self.rows.num_kept,
            "num_tables": len(self.tables),
            "time_kind": self.rows.time_kind,
            "history": history,
            "events": beside,
            "event_labels": list(self.options.event_labels),
            "event_lists": list(self.options.event_lists),
            "event_types": None if self.options.event_types is None else list(self.options.event_types),
            "event_weights": self.options.event_weights,
            "bad_places": [place for side in self.sides for place in side.bad_places],
            "values": self.files,
        }
        return Dataset(self.directory, write_manifest(self.directory, file_names(content), content, bar=self.progress).content)


_WAYS = {
    "none": "no times",
    "number": "times that are numbers",
    "naive": "calendar times without a zone",
    "zoned": "calendar times with a zone",
}


def _text(value: str | int) -> str:
    return "'" + str(value).replace("'", "''") + "'"


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
        # A page for which a full disk has no place would end the process when it is written.
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size * np.dtype(dtype).itemsize)
        return np.memmap(file, dtype=dtype, shape=(size,))


def _unload(*arrays: AnyArray) -> None:
    """Let the pages of arrays of `_disk_array` go from the process; what they hold stays in the file and its cache."""
    for array in arrays:
        mapped = getattr(array, "_mmap", None)
        if mapped is not None and hasattr(mmap, "MADV_DONTNEED"):
            mapped.madvise(mmap.MADV_DONTNEED)
