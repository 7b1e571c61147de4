"""A table as a dataset on disk: typed columns, ids as codes, and for each row the part of the event log that it may know."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from jagged.artifacts import (
    MANIFEST,
    Manifest,
    errors_as,
    new_directory,
    read_arrow,
    read_json,
    verify,
    writing,
)
from jagged.data.dataset import SequenceDataset, _remove, temporary_directory
from jagged.data.errors import DataError, Skipped, refuse, shown
from jagged.data.expressions import LISTS
from jagged.data.logs import Columns, EventLog
from jagged.data.progress import steps
from jagged.data.schema import WITH_IDS, Column, Kind, Schema, shared_tables
from jagged.data.sources import add_table, open_table
from jagged.data.vocabulary import Vocabulary

IntArray = npt.NDArray[np.int64]
AnyArray = npt.NDArray[Any]

FORMAT_VERSION = 2
#: Before the names of files of an event table that stands beside the rows.
EVENT_PREFIX = "event-"
#: The names of parts in a column that says how a table is split, by the number that stands for each.
PARTS = ("train", "valid", "test")

_CURE = "set TMPDIR (or directory) to a directory on a disk with room"
_DTYPES = {pa.int8(): np.int8, pa.int32(): np.int32, pa.int64(): np.int64, pa.float32(): np.float32}


class Dataset(Columns):
    """The rows of a table at their points in time. Made by `from_table` or `load`, never changed afterwards.

    Rows are in the order of the event log: by user (missing users first), time, and place in the source, as far as there are such
    columns. Everything is a view of mapped files, which cost no memory of the process. Sending a dataset to another process sends
    the name of its directory.

    Attributes:
        schema: what the columns are.
        counts: rows after each step of reading.
    """

    def __init__(self, directory: str | os.PathLike[str], manifest: dict[str, Any]) -> None:
        super().__init__(Path(directory), Schema.from_dict(manifest["schema"]), int(manifest["num_rows"]), manifest["values"])
        self._manifest = manifest
        self.counts: dict[str, int] = dict(manifest["counts"])
        self._vocabularies: dict[str, Vocabulary] = {}
        self._keep: object = None

    @classmethod
    def from_table(
        cls,
        source: Any,
        schema: Schema | str | os.PathLike[str] | None = None,
        *,
        events: Any = None,
        event_schema: Schema | str | os.PathLike[str] | None = None,
        event_words: Mapping[str, Any] | None = None,
        directory: str | os.PathLike[str] | None = None,
        duplicates: str = "drop",
        min_events: Mapping[str, int] | None = None,
        history: str | Sequence[str] | None = None,
        history_delay: int | timedelta = 0,
        ties: str = "out",
        event_labels: str | Sequence[str] = (),
        event_lists: str | Sequence[str] = (),
        event_types: str | int | Sequence[str | int] | None = None,
        event_weights: str | None = None,
        time_units: tuple[str, str] | None = None,
        split: str | None = None,
        on_error: str = "stop",
        format: str = "auto",
        delimiter: str | None = None,
        optional: Sequence[str] = (),
        progress: bool = True,
        **words: Any,
    ) -> Dataset:
        """Read a table into a dataset, in this order: parse, drop duplicates, `min_events`, views.

        Args:
            source: as `open_table` takes it: a file, a folder, an Arrow table, a frame.
            schema: what the columns are, also as a file of TOML; None to infer it. Columns of kind "unused", and those that a
                given schema does not name, are left out.
            events: another table, as `source`, that histories are gathered from: what users did, with user, item and time. Users,
                items and event types have the numbers of the rows' columns of these kinds, other ids those of the rows' ids of
                the same name. `history="events"` need not be said.
            event_schema: as `schema`, of `events`.
            event_words: as `**words`, of `events`: for example `{"candidate": "movie"}`. Where no schema is given, a column with
                the name of the rows' user, candidate, time or event type is of that kind.
            directory: a new directory for the dataset; None: a temporary one, removed with the dataset.
            duplicates: "drop" keeps the first of rows that are equal in all columns of the source, or "keep".
            min_events: `{"user": k, "item": m}`, either or both: only rows whose user has k rows or more and whose candidate has
                m, counted again until no row goes. A missing user or candidate has no rows. Events of `events` do not count, and
                none goes.
            history: "events": a row knows its user's earlier rows. Or a list column, or several, of ids of candidates, whose
                table they share. Or both. "auto" is "events" where the schema has a user, a candidate and a time.
            history_delay: how long it takes until an event is known: a row knows events with time < its own - this. In the unit
                of the rows' times, or a `timedelta` where they are calendar times.
            ties: "out", or "before": a row also knows the rows of its user at its own time that stand before it in the source.
                Without a delay.
            event_labels: labels that events show to later rows. By default none does.
            event_lists: list columns of ids that events show, as an item's tags. By default none does.
            event_types: the types of the events that histories have, by the column of kind event. None: all.
            event_weights: the column of numbers, or of kind weight, that says how much an event counts:
                `Batch.history_weights`. None: of `events` the column of kind weight, if there is one.
            time_units: of `events` whose times are numbers of another unit than the rows': both units, as `("s", "ms")`, of "s",
                "ms", "us" and "ns". None: they have one unit; what is clearly another one is refused.
            split: a column that says which part a row is in: train, valid or test. It is no feature.
            on_error: what to do with a value that is none of its kind, or a row of csv that cannot be read: "stop", or "skip" the
                row, of at most 1 % of the rows. What cannot be cut into rows always stops, such as a stray quote in a field that
                begins with a quote.
            format, delimiter: of files, as `open_table` takes them.
            optional: columns of `schema` that the table may lack.
            progress: show a bar on a terminal for what takes longer than two seconds.
            **words: columns by kind, which win over the schema: as `Schema.with_words` takes them, for example `label="click"`.

        Raises:
            DataError: malformed input, in one line with the place, what was found and what is expected; a schema that does not
                fit the table; or a place that cannot be written.
            ValueError: an argument out of range.
        """
        from jagged.data.inference import events_schema_for, schema_for
        from jagged.data.staging import Builder, Options, fitting, fitting_events

        histories = [history] if isinstance(history, str) else list(history or ())
        is_beside = events is not None
        if is_auto := "auto" in histories:
            histories = [name for name in histories if name != "auto"]
        if not is_beside and (event_schema is not None or event_words is not None):
            raise ValueError("event_schema, event_words: given without events=, which they are for")
        # What is for histories tells that there are some.
        for_them = (history_delay, ties != "out", event_labels, event_lists, event_types is not None, event_weights is not None)
        if is_auto and any(for_them):
            histories.append("events")
        gathered = "events" if is_beside or "events" in histories else None
        options = Options(
            duplicates, dict(min_events or {}), gathered, history_delay, ties, _several(event_labels), split, on_error,
            _several(event_lists),
            (event_types,) if isinstance(event_types, (str, int)) else None if event_types is None else tuple(event_types),
            event_weights, time_units, is_beside,
        )  # fmt: skip
        given = _loaded(schema)
        unread = [Skipped() if on_error == "skip" else None for _ in range(2)]
        with open_table(source, format=format, delimiter=delimiter, skipped=unread[0], progress=progress) as table:
            if "events" in histories and "events" in table.types:
                raise refuse(table.name, "a column 'events' and history='events'", "another name of the column", "rename it")
            histories = [name for name in histories if name != "events"]
            with steps("Inferring", 1, progress) as step:
                step("what columns are for")
                if given is not None:
                    given = Schema(tuple(one for one in given.columns if one.name in table.types or one.name not in optional))
                schema = schema_for(table, given, history=histories or None, **words)
                if is_auto and all(schema.one(kind) for kind in (Kind.USER, Kind.CANDIDATE, Kind.TIME)):
                    options = replace(options, history="events")
                schema = fitting(table, schema, options)
            log = None
            if is_beside:
                beside_it = add_table(table, events, "events", skipped=unread[1], progress=progress)
                with steps("Inferring", 1, progress) as step:
                    step("what columns of events are for")
                    found = events_schema_for(beside_it, _loaded(event_schema), schema, dict(event_words or {}))
                found, options = fitting_events(beside_it, found, options)
                log = beside_it, found
            if directory is None:
                with temporary_directory(_CURE) as temporary, writing(temporary, _CURE, DataError):
                    dataset = Builder(table, schema, options, temporary, log, progress=progress).build()
                    dataset._keep = weakref.finalize(dataset, _remove, str(temporary), os.getpid())
                    return dataset
            target = Path(directory)
            with writing(target, "name another directory, on a disk with room", DataError):
                if target.exists() and (not target.is_dir() or any(target.iterdir())):
                    raise refuse(target, "something there", "a directory that does not exist yet", "name another one")
                with new_directory(target) as aside:
                    manifest = Builder(table, schema, options, aside, log, progress=progress).build()._manifest
            return cls(target, manifest)

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the data files, the schema, and what events are and show."""
        with errors_as(DataError):
            files = read_json(self.directory / MANIFEST)["files"]
        digests = sorted((name, entry["sha256"]) for name, entry in files.items())
        of_events = [self._manifest[name] for name in ("events", "event_labels", "event_lists", "event_weights")]
        return hashlib.sha256(json.dumps([digests, self._manifest["schema"], of_events]).encode()).hexdigest()

    @property
    def time_kind(self) -> str:
        """What the times were: "number", "naive", "zoned" (calendar times, in microseconds since 1970) or "none"."""
        return str(self._manifest["time_kind"])

    @property
    def history(self) -> dict[str, Any] | None:
        """How histories were made: `delay` and `ties`; None where rows have none."""
        found = self._manifest["history"]
        return None if found is None else dict(found)

    @property
    def event_labels(self) -> tuple[str, ...]:
        """Labels that events show to later rows."""
        return tuple(self._manifest["event_labels"])

    @property
    def bad_places(self) -> list[str]:
        """Where the first rows were that `on_error="skip"` left out, each with what was wrong."""
        return list(self._manifest["bad_places"])

    @property
    def start(self) -> IntArray:
        """The first event of each row's history in `events`, int64 `[n]`; without histories there is none."""
        return self._arrays("start")[0]

    @property
    def stop(self) -> IntArray:
        """The event after the last of each row's history, int64 `[n]`."""
        return self._arrays("stop")[0]

    @property
    def parts(self) -> npt.NDArray[np.int8] | None:
        """The part of each row by the column `split`, int8 `[n]`, in the order of `PARTS`; None where none was named."""
        return self._arrays("part")[0] if "part" in self._manifest["values"] else None

    @property
    def tables(self) -> dict[str, list[Column]]:
        """The columns of ids by the table that they share, those of an event table too."""
        return shared_tables(*_schemas(self._manifest))

    @property
    def with_statistics(self) -> list[str]:
        """The columns of numbers that a batch shows, of rows and of events: they have statistics."""
        beside = [] if self.events is None else self.events.numbers
        return list(dict.fromkeys(one.name for one in [*self.schema.features(Kind.NUMBER, Kind.NUMBERS), *beside]))

    @cached_property
    def events(self) -> EventLog | None:
        """The events that histories are views of; None without histories."""
        content = self._manifest
        if content["history"] is None:
            return None
        beside = content["events"]
        table: Columns = self
        if beside is not None:
            schema = Schema.from_dict(beside["schema"])
            table = Columns(self.directory, schema, beside["num_rows"], content["values"], EVENT_PREFIX)
        return EventLog(
            table,
            is_own=beside is None,
            lists=tuple(content["event_lists"]),
            labels=self.event_labels,
            weights=content["event_weights"],
            places=self._arrays("events")[0] if "events" in content["values"] else None,
        )

    def ids(self, table: str) -> Vocabulary:
        """The ids of a table by their code: in the order in which they first appear in the source, then in the events beside."""
        if table not in self._vocabularies:
            names = list(self.tables)
            self._vocabularies[table] = Vocabulary.load(self.directory / ids_file(names.index(table)))
        return self._vocabularies[table]

    def split(self, by: str = "time", **options: Any) -> Any:
        """Training, validation and test rows, with encoders: `jagged.data.table_splits.split_rows` of this dataset."""
        from jagged.data.table_splits import split_rows

        return split_rows(self, by, **options)

    def sequences(self, label: str | None = None, **options: Any) -> SequenceDataset:
        """Each user's candidates in the order of time, as SASRec trains on them: `jagged.train(config, dataset.sequences())`.

        Args:
            label: of a table with labels, one of them, whose rows above 0 are events; "" takes all rows.
            **options: of `read_events`: `duplicates`, `min_events`, `on_error`, `progress`.

        Raises:
            DataError: the table lacks a user, a candidate or a time, or has labels and none is named; a row has no user or
                candidate, and `on_error` is not "skip".
        """
        from jagged.data.rows import sequences

        return sequences(self, label, **options)

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """The rows in the user's ids, in the dataset's order, for pandas, polars, DuckDB and pyarrow: `pa.table(dataset)`."""
        from jagged.data.rows import reader

        return reader(self).__arrow_c_stream__(requested_schema)

    def __repr__(self) -> str:
        return f"Dataset({self.num_rows:,} rows, {len(self.schema.columns)} columns)"

    def __str__(self) -> str:
        width = max(map(len, self.counts))
        lines = [f"{name:<{width}}  {count:>13,}" for name, count in self.counts.items()]
        return "\n".join([repr(self), *lines, *(f"left out: {place}" for place in self.bad_places)])

    def __reduce__(self) -> tuple[Any, ...]:
        # A loader's worker opens the same files; what they hold was verified here.
        return Dataset, (str(self.directory), self._manifest)

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Copy the dataset's files into a new directory; it appears whole or not at all.

        Raises:
            DataError: the directory exists and holds something else than this dataset.
            OSError: it cannot be written.
        """
        target = Path(directory)
        if target.exists() and any(target.iterdir()):
            if Dataset.load(target).fingerprint == self.fingerprint:
                return
            raise refuse(target, "another dataset", "a directory that does not exist yet", "name another one")
        with new_directory(target) as copy:
            for name in (*file_names(self._manifest), MANIFEST):
                shutil.copyfile(self.directory / name, copy / name)

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> Dataset:
        """Open a directory written by `from_table` or `save`, after verifying every byte of it.

        Raises:
            DataError: a file is missing, differs from the manifest's size and SHA-256, or holds no dataset, with its name.
        """
        directory = Path(directory)
        with errors_as(DataError):
            manifest = verify(directory, exact=False, bar=True)
        _check_manifest(manifest, directory / MANIFEST)
        dataset = cls(directory, manifest.content)
        dataset._check_content()
        return dataset

    def _check_content(self) -> None:
        # A dataset made by other hands passes the digests; codes and views out of range must not reach a model.
        rows = self.num_rows
        log = self.events
        for table in (self, None if log is None or log.is_own else log.table):
            if table is not None:
                self._check_columns(table)
        if (parts := self.parts) is not None and rows and (parts.min() < 0 or parts.max() >= len(PARTS)):
            raise refuse(self.directory / "part.arrow", "parts out of range", f"0 to {len(PARTS) - 1}")
        for key in ("start", "stop") if log is not None else ():
            if len(self._arrays(key)[0]) != rows:
                raise refuse(self.directory / f"{key}.arrow", f"{len(self._arrays(key)[0])} values", f"{rows} rows")
        if log is None or not rows:
            return
        if "events" in self._manifest["values"]:
            places = self._arrays("events")[0]
            if len(places) and (places[0] < 0 or places[-1] >= rows or bool((places[1:] <= places[:-1]).any())):
                raise refuse(
                    self.directory / "events.arrow", "rows out of order or range", f"ascending rows from 0 to {rows - 1}"
                )
        start, stop = self.start, self.stop
        if start.min() < 0 or stop.max() > len(log) or bool((start > stop).any()):
            raise refuse(self.directory / "stop.arrow", "views out of range", f"views of {len(log)} events")
        viewing = np.flatnonzero(stop > start)
        if log.is_own and bool((log.rows(stop[viewing] - 1) >= viewing).any()):
            raise refuse(self.directory / "stop.arrow", "views that reach a row itself", "views of earlier events")

    def _check_columns(self, table: Columns) -> None:
        sizes = {column.name: len(self.ids(column.table_name)) for column in table.schema.of_kind(*WITH_IDS)}
        keys = {table._key(name): name for name in table.schema.names} | {f"{table._prefix}source": ""}
        if table is self and self.parts is not None:
            keys["part"] = ""
        for key, name in keys.items():
            arrays, where = table._arrays(key), self.directory / f"{key}.arrow"
            if len(arrays[0]) != len(table) + (len(arrays) == 2):
                raise refuse(where, f"{len(arrays[0])} values", f"{len(table)} rows")
            if len(arrays) == 2 and (
                arrays[0][0] != 0 or arrays[0][-1] != len(arrays[1]) or bool((arrays[0][1:] < arrays[0][:-1]).any())
            ):
                raise refuse(where, "offsets that do not fit the values", "a dataset of this library")
            if name in sizes and len(arrays[-1]) and (arrays[-1].min() < -1 or arrays[-1].max() >= sizes[name]):
                raise refuse(where, "codes out of range", f"-1 to {sizes[name] - 1}")


def _several(names: str | Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _loaded(schema: Schema | str | os.PathLike[str] | None) -> Schema | None:
    return schema if schema is None or isinstance(schema, Schema) else Schema.load(schema)


def write_column(path: Path, *arrays: AnyArray) -> str:
    """Write values, or offsets and the values of lists, as an Arrow file of one batch; return their type."""
    values = arrays[-1]
    kind = next(one for one, dtype in _DTYPES.items() if values.dtype == dtype)
    array = pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])
    if len(arrays) == 2:
        offsets = pa.Array.from_buffers(pa.int64(), len(arrays[0]), [None, pa.py_buffer(arrays[0])])
        array = pa.LargeListArray.from_arrays(offsets, array)
    batch = pa.record_batch([array], names=["value"])
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return str(array.type)


def read_column(path: Path, kind: str, *, mapped: bool = False) -> tuple[AnyArray, ...]:
    """What `write_column` wrote.

    Raises:
        DataError: no such file, or none of this type.
    """
    expected = f"values of type {kind}"
    with errors_as(DataError):
        batches = read_arrow(path, expected, mapped=mapped)
    names = batches[0].schema.names if len(batches) == 1 else None
    if names != ["value"]:
        raise refuse(path, f"columns {shown(names)} in {len(batches)} batches", expected, "make the dataset again")
    array = batches[0].column(0)
    is_list = pa.types.is_large_list(array.type)
    values = array.values if is_list else array
    if str(array.type) != kind or values.type not in _DTYPES or array.null_count or array.offset or values.null_count:
        raise refuse(path, f"type {array.type} with {array.null_count} nulls", expected, "make the dataset again")
    found = values.to_numpy(zero_copy_only=True)
    return (array.offsets.to_numpy(zero_copy_only=True), found) if is_list else (found,)


def ids_file(number: int) -> str:
    """The file with the ids of the schema's table of that number."""
    return f"ids-{number}.arrow"


def file_names(content: Mapping[str, Any]) -> list[str]:
    """The files of a dataset, by its manifest."""
    return [f"{key}.arrow" for key in content["values"]] + [ids_file(i) for i in range(content["num_tables"])]


def _check_manifest(manifest: Manifest, path: Path) -> None:
    content, found = manifest.content, None
    kinds = {str(kind) for kind in _DTYPES} | {str(pa.large_list(kind)) for kind in _DTYPES}
    if content.get("layout") != FORMAT_VERSION:
        found = f"layout {shown(content.get('layout'))}"
    elif not isinstance(files := content.get("values"), dict) or not set(map(str, files.values())) <= kinds:
        found = f"the files {shown(content.get('files'))}"
    # Names are made of the number of tables: it is no larger than the number of files.
    elif not all(_is_count(content.get(name)) for name in ("num_rows", "num_tables")) or (
        content["num_tables"] > len(manifest.files)
    ):
        found = f"num_rows {shown(content.get('num_rows'))} and num_tables {shown(content.get('num_tables'))}"
    elif set(manifest.files) != set(file_names(content)):
        found = f"the files {shown(sorted(manifest.files))}"
    elif not isinstance(content.get("schema"), dict):
        found = f"the schema {shown(content.get('schema'))}"
    elif missing := [name for name in ("events", "history", "event_weights") if name not in content]:
        found = f"no {missing[0]}"
    elif (events := content["events"]) is not None and not (
        isinstance(events, dict) and isinstance(events.get("schema"), dict) and _is_count(events.get("num_rows"))
    ):
        found = f"the events {shown(events)}"
    elif (history := content["history"]) is not None and not (
        isinstance(history, dict) and _is_count(history.get("delay")) and history.get("ties") in ("out", "before")
    ):
        found = f"the history {shown(history)}"
    else:
        try:
            schemas = _schemas(content)
        except DataError as error:
            raise DataError(f"{path}: {error}") from None
        expected = {f"{prefix}column-{i}": _stored(one) for prefix, schema in zip(("", EVENT_PREFIX), schemas, strict=False)
                    for i, one in enumerate(schema.columns)} | {"source": "int64"}  # fmt: skip
        if len(schemas) > 1:
            expected[f"{EVENT_PREFIX}source"] = "int64"
        if content.get("history") is not None:
            expected |= {"start": "int64", "stop": "int64"}
        expected |= {name: kind for name, kind in (("part", "int8"), ("events", "int64")) if name in files}
        log = schemas[-1]
        shown_by_events = [content.get(name) for name in ("event_labels", "event_lists")]
        if files != expected or content["num_tables"] != len(shared_tables(*schemas)):
            found = f"the values {shown(files)}"
        elif not all(isinstance(content.get(name), kind) for name, kind in _OTHERS.items()):
            found = f"counts {shown(content.get('counts'))} and time_kind {shown(content.get('time_kind'))}"
        elif len(schemas) > 1 and history is None:
            found = f"the events {shown(content['events'])} without a history"
        elif any(not set(map(str, names or ())) <= set(log.names) for names in shown_by_events) or (
            content.get("event_weights") is not None and content["event_weights"] not in log.names
        ):
            found = f"the columns of events {shown(shown_by_events)} and {shown(content.get('event_weights'))}"
    if found is not None:
        raise refuse(path, found, f"a dataset of version {FORMAT_VERSION}", "make the dataset again")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


_OTHERS = {"counts": dict, "time_kind": str, "event_labels": list, "event_lists": list, "bad_places": list}


def _schemas(content: Mapping[str, Any]) -> list[Schema]:
    """Of the rows, and of the events where a table of them stands beside."""
    beside = content.get("events")
    return [Schema.from_dict(one["schema"]) for one in (content, *([beside] if isinstance(beside, dict) else []))]


def _stored(column: Column) -> str:
    """The type of a column's file."""
    if column.kind in LISTS:
        return str(pa.large_list(pa.int32() if column.kind is Kind.IDS else pa.float32()))
    if column.kind in WITH_IDS or column.kind is Kind.REQUEST:
        return str(pa.int32())
    return str(pa.int64() if column.kind is Kind.TIME else pa.float32())
