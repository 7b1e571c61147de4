"""`read_events`: files of events to a `SequenceDataset`, through a cache."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from jagged.artifacts import DAY, new_directory, remove, sweep, writing
from jagged.data.build import DatasetBuilder
from jagged.data.dataset import FORMAT_VERSION, SequenceDataset, own_temporary, temporary_directory
from jagged.data.errors import DataError, refuse
from jagged.data.files import find_files, reading
from jagged.data.parsers import Chunk, Columns, read_csv, read_parquet, read_text

_READERS = {"text": read_text, "csv": read_csv, "parquet": read_parquet}

_CURE = "set TMPDIR (or cache_directory) to a directory on a disk with room"
_CURE_OF_CACHE = "name another cache_directory, on a disk with room"

logger = logging.getLogger("jagged")


def read_events(
    path: str | os.PathLike[str],
    *,
    format: str = "auto",
    user_column: str = "user_id",
    item_column: str = "item_id",
    timestamp_column: str | None = "timestamp",
    cache_directory: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> SequenceDataset:
    """Read users' events from a file or from a folder of files of one format, streamed, in bounded memory.

    Formats, by name or by `format`: **text** (`.txt`), a user a line, `user item item ...`, oldest first; **csv** (`.csv`,
    `.tsv`), a table with a header and an event a row; **parquet** (`.parquet`), the same, or a user a row with lists of items
    and times. Text and csv may be compressed (`.gz`, `.bz2`). Text and csv ids that are all integers become int64, other ids
    stay strings; parquet ids keep their type.

    A user's events are sorted by time; events of one time keep the order of the files, which are read in name order. Repeated
    events stay. A user in several lines is one user. Users without an item are left out and counted in `notes`.

    Args:
        path: the file, or the folder.
        format: "auto", "text", "csv" or "parquet".
        user_column, item_column, timestamp_column: names of the columns of a table. Times are whole numbers of any unit or
            calendar times. `timestamp_column` None or "" states that the rows are oldest first; then the dataset has no times.
        cache_directory: keep the result here; a second call with the same files (name, size, time of change) and options opens
            it at once. A damaged entry is found by its digests and built again. None: a temporary directory, removed with the
            dataset.
        progress: show a bar for what takes longer than two seconds.

    Raises:
        DataError: malformed input: one line with the file, the line or row, what was found and what is expected. Or the result
            cannot be written: one line with the place and the cure.
    """
    files, kind = find_files(path, format)
    columns = Columns(user_column, item_column, timestamp_column or None)
    names = [name for name in (columns.user, columns.item, columns.timestamp) if name is not None]
    if len(set(names)) != len(names) or not all(names):
        raise refuse(os.fspath(path), f"the column names {names}", "different, non-empty names")
    source = os.fspath(path)
    if cache_directory is not None:
        return _cached(Path(cache_directory), source, files, kind, columns, progress)
    with temporary_directory(_CURE) as temporary:
        return own_temporary(_build(temporary, source, files, kind, columns, progress, _CURE))


def _cached(cache: Path, source: str, files: list[Path], kind: str, columns: Columns, progress: bool) -> SequenceDataset:
    with writing(cache, _CURE_OF_CACHE, DataError):
        cache.mkdir(parents=True, exist_ok=True)
        sweep(cache, older_than=DAY)
        target = cache / _key(files, kind, columns)
        if target.exists():
            try:
                return SequenceDataset.load(target)
            except DataError as error:
                logger.warning("the cached dataset is damaged and is built again: %s", error)
                # A reader of the damaged entry keeps its files.
                remove(target)
        try:
            with new_directory(target) as built:
                _build(built, source, files, kind, columns, progress, _CURE_OF_CACHE)
        except OSError:
            # Another process may have published the same entry meanwhile; it is verified like any other.
            if not target.exists():
                raise
    return SequenceDataset.load(target)


def _key(files: list[Path], kind: str, columns: Columns) -> str:
    stats = [(file, _status(file)) for file in files]
    identity: dict[str, Any] = {
        "version": FORMAT_VERSION,
        "format": kind,
        "columns": [columns.user, columns.item, columns.timestamp],
        "files": [[os.fsencode(file).hex(), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns] for file, stat in stats],
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]


def _build(
    directory: Path, source: str, files: list[Path], kind: str, columns: Columns, progress: bool, cure: str
) -> SequenceDataset:
    # A bar that appears only when the work outlasts two seconds.
    quiet: dict[str, Any] = {"disable": not progress, "delay": 2, "leave": False, "unit_scale": True}
    size = sum(_status(file).st_size for file in files)
    # Of what is written alone: a file that cannot be read is named itself.
    place = partial(writing, directory.parent, cure, DataError)
    with place():
        builder = DatasetBuilder(directory, typed=kind == "parquet")
    try:
        with tqdm(total=size, desc="Reading", unit="B", **quiet) as bar:
            for file in files:
                for chunk in _chunks(file, kind, columns, bar.update):
                    with place():
                        builder.add(chunk)
        with tqdm(total=2 * builder.num_events, desc="Sorting", unit=" events", **quiet) as bar, place():
            return builder.finish(source, bar.update)
    finally:
        with place():
            builder.close()


def _chunks(file: Path, kind: str, columns: Columns, advance: Callable[[int], object]) -> Iterator[Chunk]:
    with reading(file):
        yield from _READERS[kind](file, columns, advance)


def _status(file: Path) -> os.stat_result:
    with reading(file):
        return file.stat()
