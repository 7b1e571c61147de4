"""A table as a dataset on disk: typed columns, ids as codes, and for each row the part of the event log that it may know."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import weakref
from collections.abc import Mapping, Sequence
from datetime import timedelta
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
from jagged.data.dataset import _remove, temporary_directory
from jagged.data.errors import DataError, refuse, shown
from jagged.data.expressions import LISTS
from jagged.data.schema import WITH_IDS, Column, Kind, Schema
from jagged.data.sources import open_table
from jagged.data.vocabulary import Vocabulary

IntArray = npt.NDArray[np.int64]
AnyArray = npt.NDArray[Any]

FORMAT_VERSION = 1
#: The names of parts in a column that says how a table is split, by the number that stands for each.
PARTS = ("train", "valid", "test")

_DTYPES = {pa.int8(): np.int8, pa.int32(): np.int32, pa.int64(): np.int64, pa.float32(): np.float32}


class Dataset:
    """The rows of a table at their points in time. Made by `from_table` or `load`, never changed afterwards.

    Rows are in the order of the event log: by user (missing users first), time, and place in the source, as far as there are such
    columns. Everything is a view of mapped files, which cost no memory of the process. Sending a dataset to another process sends
    the name of its directory.

    Attributes:
        schema: what the columns are.
        counts: rows after each step of reading.
    """

    def __init__(self, directory: str | os.PathLike[str], manifest: dict[str, Any]) -> None:
        self.directory = Path(directory)
        self._manifest = manifest
        self.schema = Schema.from_dict(manifest["schema"])
        self.counts: dict[str, int] = dict(manifest["counts"])
        self._vocabularies: dict[str, Vocabulary] = {}
        self._columns: dict[str, tuple[AnyArray, ...]] = {}
        self._keep: object = None

    @classmethod
    def from_table(
        cls,
        source: Any,
        schema: Schema | str | os.PathLike[str] | None = None,
        *,
        directory: str | os.PathLike[str] | None = None,
        duplicates: str = "drop",
        min_events: Mapping[str, int] | None = None,
        history: str | Sequence[str] | None = None,
        history_delay: int | timedelta = 0,
        ties: str = "out",
        event_labels: tuple[str, ...] = (),
        split: str | None = None,
        on_error: str = "stop",
        format: str = "auto",
        delimiter: str | None = None,
        progress: bool = True,
        **words: Any,
    ) -> Dataset:
        """Read a table into a dataset, in this order: parse, drop duplicates, `min_events`, views.

        Args:
            source: as `open_table` takes it: a file, a folder, an Arrow table, a frame.
            schema: what the columns are, also as a file of TOML; None to infer it. Columns of kind "unused", and those that a
                given schema does not name, are left out.
            directory: a new directory for the dataset; None: a temporary one, removed with the dataset.
            duplicates: "drop" keeps the first of rows that are equal in all columns of the source, or "keep".
            min_events: `{"user": k, "item": m}`, either or both: only rows whose user has k rows or more and whose candidate has
                m, counted again until no row goes. A missing user or candidate has no rows.
            history: "events": a row knows its user's earlier rows. Or a list column, or several, of ids of candidates, whose
                table they share. Or both.
            history_delay: how long it takes until an event is known: a row knows events with time < its own - this. In the unit
                of the times, or a `timedelta` where they are calendar times.
            ties: "out", or "before": a row also knows the rows of its user at its own time that stand before it in the source.
                Without a delay.
            event_labels: labels that events show to later rows. By default none does.
            split: a column that says which part a row is in: train, valid or test. It is no feature.
            on_error: what to do with a value that is none of its kind: "stop", or "skip" its row, of at most 1 % of the rows.
            format, delimiter: of files, as `open_table` takes them.
            progress: show a bar for what takes longer than two seconds.
            **words: columns by kind, which win over the schema: as `Schema.with_words` takes them, for example `label="click"`.

        Raises:
            DataError: malformed input, in one line with the place, what was found and what is expected; a schema that does not
                fit the table; or a place that cannot be written.
            ValueError: an argument out of range.
        """
        from jagged.data.inference import schema_for
        from jagged.data.staging import CURE, Builder, Options, fitting

        histories = [history] if isinstance(history, str) else list(history or ())
        gathered = "events" if "events" in histories else None
        options = Options(duplicates, dict(min_events or {}), gathered, history_delay, ties, tuple(event_labels), split, on_error)
        given = schema if schema is None or isinstance(schema, Schema) else Schema.load(schema)
        with open_table(source, format=format, delimiter=delimiter, progress=progress) as table:
            if gathered and "events" in table.types:
                raise refuse(table.name, "a column 'events' and history='events'", "another name of the column", "rename it")
            histories = [name for name in histories if name != "events"]
            schema = fitting(table, schema_for(table, given, history=histories or None, **words), options)
            if directory is None:
                with temporary_directory(CURE) as temporary, writing(temporary, CURE, DataError):
                    dataset = Builder(table, schema, options, temporary).build()
                    dataset._keep = weakref.finalize(dataset, _remove, str(temporary), os.getpid())
                    return dataset
            target = Path(directory)
            with writing(target, "name another directory, on a disk with room", DataError):
                if target.exists() and (not target.is_dir() or any(target.iterdir())):
                    raise refuse(target, "something there", "a directory that does not exist yet", "name another one")
                with new_directory(target) as aside:
                    manifest = Builder(table, schema, options, aside).build()._manifest
            return cls(target, manifest)

    @property
    def num_rows(self) -> int:
        """Rows."""
        return int(self._manifest["num_rows"])

    def __len__(self) -> int:
        return self.num_rows

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the data files and the schema."""
        with errors_as(DataError):
            files = read_json(self.directory / MANIFEST)["files"]
        digests = sorted((name, entry["sha256"]) for name, entry in files.items())
        return hashlib.sha256(json.dumps([digests, self._manifest["schema"]]).encode()).hexdigest()

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
    def source(self) -> IntArray:
        """The number of each row in the source, from 0, int64 `[n]`."""
        return self._arrays("source")[0]

    @property
    def start(self) -> IntArray:
        """The first row of each row's history, int64 `[n]`; without histories there is none."""
        return self._arrays("start")[0]

    @property
    def stop(self) -> IntArray:
        """The row after the last of each row's history, int64 `[n]`."""
        return self._arrays("stop")[0]

    @property
    def parts(self) -> npt.NDArray[np.int8] | None:
        """The part of each row by the column `split`, int8 `[n]`, in the order of `PARTS`; None where none was named."""
        return self._arrays("part")[0] if "part" in self._manifest["values"] else None

    def column(self, name: str) -> AnyArray:
        """The values of a column without lists, `[n]`.

        Ids are int32 codes, -1 where one is missing; numbers, labels and weights float32, NaN where one is missing; times int64.
        """
        if self.schema[name].kind in LISTS:
            raise KeyError(name)
        return self._arrays(self._key(name))[0]

    def list_column(self, name: str) -> tuple[IntArray, AnyArray]:
        """A list column: int64 `[n + 1]` offsets and the values of all rows, int32 codes or float32 numbers.

        A missing list stands as a list of one missing value; an empty one has none.
        """
        offsets, values = self._arrays(self._key(name))
        return offsets, values

    def ids(self, table: str) -> Vocabulary:
        """The ids of a table by their code: in the order in which they first appear in the rows of the source."""
        if table not in self._vocabularies:
            names = list(self.schema.tables)
            self._vocabularies[table] = Vocabulary.load(self.directory / ids_file(names.index(table)))
        return self._vocabularies[table]

    def split(self, by: str = "time", **options: Any) -> Any:
        """Training, validation and test rows, with encoders: `jagged.data.parts.split_rows` of this dataset."""
        from jagged.data.parts import split_rows

        return split_rows(self, by, **options)

    def _key(self, name: str) -> str:
        return f"column-{self.schema.names.index(name)}"

    def _arrays(self, key: str) -> tuple[AnyArray, ...]:
        if key not in self._columns:
            kind = self._manifest["values"].get(key)
            if kind is None:
                raise AttributeError(f"{key}: the dataset has no such values")
            self._columns[key] = read_column(self.directory / f"{key}.arrow", kind, mapped=True)
        return self._columns[key]

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
        sizes = {column.name: len(self.ids(column.table_name)) for column in self.schema.of_kind(*WITH_IDS)}
        for key in self._manifest["values"]:
            arrays, where = self._arrays(key), self.directory / f"{key}.arrow"
            if len(arrays[0]) != rows + (len(arrays) == 2):
                raise refuse(where, f"{len(arrays[0])} values", f"{rows} rows")
            name = self.schema.names[int(key.removeprefix("column-"))] if key.startswith("column-") else ""
            if len(arrays) == 2 and (
                arrays[0][0] != 0 or arrays[0][-1] != len(arrays[1]) or bool((arrays[0][1:] < arrays[0][:-1]).any())
            ):
                raise refuse(where, "offsets that do not fit the values", "a dataset of this library")
            if name in sizes and len(arrays[-1]) and (arrays[-1].min() < -1 or arrays[-1].max() >= sizes[name]):
                raise refuse(where, "codes out of range", f"-1 to {sizes[name] - 1}")
        if (parts := self.parts) is not None and rows and (parts.min() < 0 or parts.max() >= len(PARTS)):
            raise refuse(self.directory / "part.arrow", "parts out of range", f"0 to {len(PARTS) - 1}")
        if self.history is not None and rows:
            start, stop = self.start, self.stop
            if start.min() < 0 or bool((start > stop).any()) or bool((stop > np.arange(rows)).any()):
                raise refuse(self.directory / "stop.arrow", "views that reach a row itself", "views of earlier events")


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
    elif any(type(content.get(name)) is not int or content[name] < 0 for name in ("num_rows", "num_tables")):
        found = f"num_rows {shown(content.get('num_rows'))} and num_tables {shown(content.get('num_tables'))}"
    elif set(manifest.files) != set(file_names(content)):
        found = f"the files {shown(sorted(manifest.files))}"
    elif not isinstance(content.get("schema"), dict):
        found = f"the schema {shown(content.get('schema'))}"
    else:
        schema = Schema.from_dict(content["schema"])
        expected = {f"column-{i}": _stored(column) for i, column in enumerate(schema.columns)} | {"source": "int64"}
        if content.get("history") is not None:
            expected |= {"start": "int64", "stop": "int64"}
        if "part" in files:
            expected["part"] = "int8"
        if files != expected or content["num_tables"] != len(schema.tables):
            found = f"the values {shown(files)}"
        elif not all(isinstance(content.get(name), kind) for name, kind in _OTHERS.items()):
            found = f"counts {shown(content.get('counts'))} and time_kind {shown(content.get('time_kind'))}"
    if found is not None:
        raise refuse(path, found, f"a dataset of version {FORMAT_VERSION}", "make the dataset again")


_OTHERS = {"counts": dict, "time_kind": str, "event_labels": list, "bad_places": list}


def _stored(column: Column) -> str:
    """The type of a column's file."""
    if column.kind in LISTS:
        return str(pa.large_list(pa.int32() if column.kind is Kind.IDS else pa.float32()))
    if column.kind in WITH_IDS or column.kind is Kind.REQUEST:
        return str(pa.int32())
    return str(pa.int64() if column.kind is Kind.TIME else pa.float32())
