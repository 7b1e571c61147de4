"""`read_events`: files or frames of events to a `SequenceDataset`, through a cache."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from jagged.artifacts import DAY, new_directory, remove, sweep, writing
from jagged.artifacts.errors import one_line
from jagged.data.build import BuildOptions, build
from jagged.data.dataset import FORMAT_VERSION, KEY, TIME_KEY, Notes, SequenceDataset, own_temporary, temporary_directory
from jagged.data.errors import DataError, Skipped, refuse, shown
from jagged.data.files import EVENT_FORMATS, reading
from jagged.data.intake import Columns, Intake
from jagged.data.sources import Source, find_source, new_table, reading_bar

# What the reader makes of the same files; counted up where that changes, so that no cache has what an older one made.
_READER = 2

_CURE = "set TMPDIR (or cache_directory) to a directory on a disk with room"
_CURE_OF_CACHE = "name another cache_directory, on a disk with room"

logger = logging.getLogger("jagged")


def read_events(
    source: Any,
    *,
    format: str = "auto",
    user_column: str = "user_id",
    item_column: str = "item_id",
    timestamp_column: str | None = "timestamp",
    event_columns: str | Sequence[str] = (),
    duplicates: Literal["drop", "keep"] = "drop",
    min_events: int = 1,
    on_error: Literal["stop", "skip"] = "stop",
    cache_directory: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> SequenceDataset:
    """Read users' events from a file, a folder of files of one format, or a table in memory, streamed, in bounded memory.

    Formats, by name or by `format`: **text** (`.txt`), a user a line, `user item item ...`, oldest first; **csv** (`.csv`,
    `.tsv`), a table with a header and an event a row, separated by `,`, tab, `;` or `|`; **parquet** (`.parquet`), the same, or
    a user a row with lists of items and times. Text and csv may be compressed (`.gz`, `.bz2`, `.zst`, `.lz4`). A table in memory
    is one of Arrow or a frame of pandas, polars or DuckDB; it is not changed. Text and csv ids that are all integers become
    int64, other ids stay strings; ids of parquet and of tables in memory keep their type.

    A user's events are sorted by time; events of one time keep the order of the files, which are read in name order. A user in
    several lines is one user. `notes` of the dataset counts what is left out, and names columns that are not used and files of
    the folder that are not read.

    Args:
        source: the file, the folder, an Arrow table, batch or reader, or anything with `__arrow_c_stream__`.
        format: "auto", "text", "csv" or "parquet", of files.
        user_column, item_column, timestamp_column: names of the columns of a table. Times are whole numbers of any unit or
            calendar times. `timestamp_column` None or "" states that the rows are oldest first; then the dataset has no times.
        event_columns: columns of a table of one event a row that are side features of events, as what a user did to the item:
            ids, which are integers, booleans or strings. An empty text is a missing one, any other word a value.
        duplicates: "drop" leaves out an event with user, item and time of an earlier one; "keep" takes it, as events without
            times always are.
        min_events: users and items with fewer events are left out, counted again until all that are left have so many.
        on_error: "stop" at the first row that is malformed, or "skip" it: at most 1 % of the rows may be. What cannot be cut into
            rows always stops: damaged files, text lines that are no text, and in csv a header that cannot be read, and a stray
            quote in a field that begins with a quote.
        cache_directory: keep the result here; a second call with the same files (name, size, time of change) and options opens
            it at once. A damaged entry is found by its digests and built again. None: a temporary directory, removed with the
            dataset.
        progress: show a bar for what takes longer than two seconds.

    Raises:
        DataError: malformed input: one line with the file, the line or row, what was found and what is expected. Or the result
            cannot be written: one line with the place and the cure.
        ValueError: an option has no such value.
    """
    event_columns = (event_columns,) if isinstance(event_columns, str) else tuple(event_columns)
    columns = Columns(user_column, item_column, timestamp_column or None, event_columns)
    name = os.fspath(source) if isinstance(source, (str, os.PathLike)) else type(source).__name__
    if len(set(columns.names())) != len(columns.names()) or not all(columns.names()):
        raise refuse(name, f"the column names {columns.names()}", "different, non-empty names")
    if taken := {KEY, TIME_KEY}.intersection(event_columns):
        raise refuse(
            name, f"the event column {shown(taken.pop())}", "another name, which batches have for something else", "rename it"
        )
    options = _Options(columns, duplicates, min_events, on_error)
    skipped = Skipped() if on_error == "skip" else None
    found = find_source(
        source, format, formats=EVENT_FORMATS, choose=columns.choose, skip=None if skipped is None else skipped.add
    )
    if cache_directory is not None:
        return _cached(Path(cache_directory), found, options, skipped, progress)
    with temporary_directory(_CURE) as temporary:
        return own_temporary(_build(temporary, found, options, skipped, progress, _CURE))


@dataclass(frozen=True)
class _Options:
    columns: Columns
    duplicates: str
    min_events: int
    on_error: str

    def __post_init__(self) -> None:
        for name, known in (("duplicates", ("drop", "keep")), ("on_error", ("stop", "skip"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}: got {getattr(self, name)!r}, expected {known[0]!r} or {known[1]!r}")
        if isinstance(self.min_events, bool) or not isinstance(self.min_events, int) or self.min_events < 1:
            raise ValueError(f"min_events: got {self.min_events!r}, expected a whole number of at least 1")


def _cached(cache: Path, source: Source, options: _Options, skipped: Skipped | None, progress: bool) -> SequenceDataset:
    if not source.files:
        raise refuse(
            "cache_directory",
            f"a table in memory ({source.name})",
            "files, which tell by name and time whether they changed",
            "keep the dataset with save(directory)",
        )
    with writing(cache, _CURE_OF_CACHE, DataError):
        cache.mkdir(parents=True, exist_ok=True)
        sweep(cache, older_than=DAY)
        target = cache / _key(source, options)
        if target.exists():
            try:
                return SequenceDataset.load(target)
            except DataError as error:
                logger.warning("the cached dataset is damaged and is built again: %s", error)
                # A reader of the damaged entry keeps its files.
                remove(target)
        try:
            with new_directory(target) as built:
                _build(built, source, options, skipped, progress, _CURE_OF_CACHE)
        except OSError:
            # Another process may have published the same entry meanwhile; it is verified like any other.
            if not target.exists():
                raise
    return SequenceDataset.load(target)


def _key(source: Source, options: _Options) -> str:
    stats = [(file, _status(file)) for file in source.files]
    identity: dict[str, Any] = {
        "version": FORMAT_VERSION,
        "reader": _READER,
        "format": source.format,
        "options": asdict(options),
        "files": [[os.fsencode(file).hex(), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns] for file, stat in stats],
        "left_out": source.left_out,
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]


def _build(
    directory: Path, source: Source, options: _Options, skipped: Skipped | None, progress: bool, cure: str
) -> SequenceDataset:
    intake = Intake(source, options.columns, skipped)
    # The events lie beside the dataset until it is whole, on the disk that has room for both.
    with new_table(source.name, intake.schema, directory=directory.parent, cure=cure) as table:
        with reading_bar(source, progress) as advance:
            table.fill(intake.blocks(source.blocks(advance)))
        intake.finish()
        kind = intake.time_kind or "number"
        made = BuildOptions(
            kind, not intake.is_text, options.duplicates == "drop", options.min_events, options.columns.features,
            _notes(source, intake),
        )  # fmt: skip
        # A bar that appears only when the work outlasts two seconds.
        quiet: dict[str, Any] = {"disable": not progress, "delay": 2, "leave": False, "unit_scale": True}
        with tqdm(desc="Sorting", unit=" events", **quiet) as bar, writing(directory.parent, cure, DataError):
            return build(table, directory, made, bar.update)


def _notes(source: Source, intake: Intake) -> Notes:
    notes: Notes = {}
    if intake.trimmed:
        notes["trimmed_ids"] = intake.trimmed
    if intake.skipped and intake.skipped.count:
        notes["skipped_rows"] = intake.skipped.count
        notes["skipped_rows_first"] = intake.skipped.first
    if source.unused:
        notes["columns_not_used"] = [one_line(name) for name in source.unused]
    if source.left_out:
        notes["files_left_out"] = [one_line(f"{name}: {reason}") for name, reason in source.left_out.items()]
    return notes


def _status(file: Path) -> os.stat_result:
    with reading(file):
        return file.stat()
