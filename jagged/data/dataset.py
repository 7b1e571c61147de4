"""The dataset: users' events in one memory-mapped Arrow file, seen by torch without a copy."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from jagged.artifacts import MANIFEST, Manifest, errors_as, new_directory, read_arrow, verify, write_manifest, writing
from jagged.data.errors import DataError, refuse, shown
from jagged.data.times import UNIT_BOUNDS, UNITS
from jagged.data.vocabulary import Vocabulary

EVENTS = "events.arrow"
USERS = "users.arrow"
ITEMS = "items.arrow"
# What batches call items and their times; side features of events have their own names.
KEY, TIME_KEY = "item_id", "timestamp"
FORMAT_VERSION = 1

# Counts, and lists of names.
Notes = dict[str, int | list[str]]

_FILES = (EVENTS, USERS, ITEMS)
_COUNTS = ("num_users", "num_items", "num_events")
_TIME_KINDS = ("number", "naive", "zoned", "none")


class SequenceDataset:
    """Users' events, oldest first. Made by `read_events`, `synthetic_sessions` or `load`, never changed afterwards.

    The tensors are views of the mapped file: they cost no memory of the process, and writing to them in place is not allowed (the
    operating system ends a process that tries). Sending a dataset to another process sends the name of its directory.

    Attributes:
        offsets: int64 `[U + 1]`; user u's events are rows `offsets[u]` to `offsets[u + 1]`.
        item_ids: int64 `[S]`, dense item ids.
        timestamps: int64 `[S]`, ascending within a user, or None; numbers as in the file, calendar times in microseconds since
            1970.
        features: by name the side features of events, int64 `[S]`: 0 where a value is missing, else its place in
            `feature_values` and 1.
    """

    def __init__(self, directory: str | os.PathLike[str], manifest: dict[str, Any]) -> None:
        self.directory = Path(directory)
        self._manifest = manifest
        self._vocabularies: dict[str, Vocabulary] = {}
        self._keep: object = None
        names = manifest.get("features", [])
        batch = _read_events(self.directory / EVENTS, len(names))
        items = batch.column("item_id")
        self.offsets: Tensor = from_dlpack(items.offsets)
        self.item_ids: Tensor = from_dlpack(items.values)
        self.timestamps: Tensor | None = None
        if "timestamp" in batch.schema.names:
            self.timestamps = from_dlpack(batch.column("timestamp").values)
        self.features: dict[str, Tensor] = {
            name: from_dlpack(batch.column(f"feature_{place}").values) for place, name in enumerate(names)
        }

    @property
    def users(self) -> Vocabulary:
        """The users' ids."""
        return self._vocabulary(USERS)

    @property
    def items(self) -> Vocabulary:
        """The items' ids."""
        return self._vocabulary(ITEMS)

    def feature_values(self, name: str) -> Vocabulary:
        """The values of a side feature of events; that of the number i + 1 is at i."""
        return self._vocabulary(values_file(list(self.features).index(name)))

    def _vocabulary(self, name: str) -> Vocabulary:
        if name not in self._vocabularies:
            self._vocabularies[name] = Vocabulary.load(self.directory / name)
        return self._vocabularies[name]

    @property
    def notes(self) -> Notes:
        """What reading met.

        `duplicate_users` (users in more than one line) and `empty_users` (without an item, left out). And, where there were some:
        `trimmed_ids` (of csv, with blanks around them), `dropped_duplicates` (events), `events_below_min_events` and the same of
        users and items, `skipped_rows` and `skipped_rows_first` (what is wrong with the first), `columns_not_used` and
        `files_left_out`, with the reason, which are lists of texts.
        """
        return dict(self._manifest["notes"])

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of ids, events and times, the same however they are stored."""
        return str(self._manifest["fingerprint"])

    @property
    def time_kind(self) -> str:
        """What the times were: "number", "naive", "zoned" (calendar times without or with a time zone) or "none"."""
        return str(self._manifest["time_kind"])

    @property
    def time_unit(self) -> str:
        """The unit of the times in a batch: "seconds" of calendar times, that of numbers since 1970; "" of others."""
        if self.timestamps is None or not self.num_events:
            return ""
        if self.time_kind != "number":
            return "seconds"
        # One says it: numbers of several units are refused where events are read.
        code = int(np.searchsorted(UNIT_BOUNDS, int(self.timestamps[0]), side="right"))
        return UNITS[code // 2] if code % 2 else ""

    @property
    def num_users(self) -> int:
        """Users with at least one event."""
        return int(self._manifest["num_users"])

    @property
    def num_items(self) -> int:
        """Distinct items."""
        return int(self._manifest["num_items"])

    @property
    def num_events(self) -> int:
        """Events of all users."""
        return int(self._manifest["num_events"])

    @property
    def lengths(self) -> Tensor:
        """Events a user, int64 `[U]`."""
        return self.offsets.diff()

    def __len__(self) -> int:
        return self.num_users

    def __repr__(self) -> str:
        return f"SequenceDataset({self.num_users:,} users, {self.num_items:,} items, {self.num_events:,} events)"

    def __reduce__(self) -> tuple[Any, ...]:
        # A loader's worker opens the same file; what it holds was verified here.
        return SequenceDataset, (str(self.directory), self._manifest)

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Copy the dataset's files into a new directory; it appears whole or not at all.

        Raises:
            DataError: the directory exists and holds something else than this dataset.
            OSError: it cannot be written.
        """
        target = Path(directory)
        if target.exists() and any(target.iterdir()):
            if SequenceDataset.load(target).fingerprint == self.fingerprint:
                return
            raise refuse(target, "another dataset", "a directory that does not exist yet", "name another one")
        with new_directory(target) as copy:
            for name in (*_files(self._manifest), MANIFEST):
                shutil.copyfile(self.directory / name, copy / name)

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> SequenceDataset:
        """Open a directory written by `save` or kept by `read_events` as its cache, after verifying every byte of it.

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
        # A dataset made by other hands passes the digests; ids and offsets out of range must not reach a kernel.
        where = self.directory / EVENTS
        items = torch.aminmax(self.item_ids) if self.num_events else None
        if (
            self.offsets.shape != (self.num_users + 1,)
            or self.item_ids.shape != (self.num_events,)
            or (self.timestamps is not None and self.timestamps.shape != self.item_ids.shape)
            or int(self.offsets[0]) != 0
            or int(self.offsets[-1]) != self.num_events
            or bool((self.offsets[1:] < self.offsets[:-1]).any())
        ):
            raise refuse(where, "offsets that do not fit the events", "a dataset of this library")
        if items is None or int(items.min) < 0 or int(items.max) >= self.num_items:
            raise refuse(where, "item ids out of range", f"0 to {self.num_items - 1}")
        for place, (name, values) in enumerate(self.features.items()):
            known = len(self._vocabulary(values_file(place)))
            if values.shape != self.item_ids.shape or int(values.min()) < 0 or int(values.max()) > known:
                raise refuse(where, f"values of {shown(name)} out of range", f"0 to {known} for each event")
        for name, count in ((USERS, self.num_users), (ITEMS, self.num_items)):
            if len(self._vocabulary(name)) != count:
                raise refuse(self.directory / name, f"{len(self._vocabulary(name))} ids", f"{count}")


@contextmanager
def temporary_directory(cure: str) -> Iterator[Path]:
    """Yield a new directory for a dataset that is to be given to `own_temporary`; where the block fails it is removed.

    Raises:
        DataError: it cannot be made; one line with the cure.
    """
    with writing("a temporary directory", cure, DataError):
        place = tempfile.gettempdir()
    with writing(place, cure, DataError):
        directory = Path(tempfile.mkdtemp(prefix="jagged-", dir=place))
    try:
        yield directory
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def own_temporary(dataset: SequenceDataset) -> SequenceDataset:
    """Remove the dataset's directory when the dataset is dropped, in the process that made it and in no worker."""
    dataset._keep = weakref.finalize(dataset, _remove, str(dataset.directory), os.getpid())
    return dataset


def _remove(directory: str, process: int) -> None:
    if os.getpid() == process:
        shutil.rmtree(directory, ignore_errors=True)


def sealed(directory: Path, content: dict[str, Any]) -> SequenceDataset:
    """The dataset of the data files in a directory, after `content` was put beside their sizes and SHA-256 in its manifest."""
    return SequenceDataset(directory, write_manifest(directory, _files(content), content, bar=True).content)


def values_file(place: int) -> str:
    """The file of the values of a side feature of events, by its place."""
    return f"values-{place}.arrow"


def _files(content: dict[str, Any]) -> list[str]:
    return [*_FILES, *(values_file(place) for place in range(len(content.get("features", []))))]


def _read_events(path: Path, num_features: int) -> pa.RecordBatch:
    """The one batch of an events file, mapped, a row a user."""
    expected = "the events of a dataset"
    with errors_as(DataError):
        batches = read_arrow(path, expected, mapped=True)
    names = batches[0].schema.names if len(batches) == 1 else None
    features = [f"feature_{place}" for place in range(num_features)]
    if names not in (["item_id", *features], ["item_id", "timestamp", *features]):
        raise refuse(path, f"columns {shown(names)} in {len(batches)} batches", expected, "read the events again")
    for name, column in zip(names, batches[0].columns, strict=True):
        if column.type != pa.large_list(pa.int64()) or column.null_count or column.offset or column.values.null_count:
            raise refuse(path, f"{name} of type {column.type} with {column.null_count} nulls", expected, "read the events again")
    return batches[0]


def _check_manifest(manifest: Manifest, path: Path) -> None:
    content = manifest.content
    found = None
    features = content.get("features", [])
    if not isinstance(features, list) or not all(isinstance(name, str) and name for name in features):
        found = f"features {shown(features)}"
    elif set(manifest.files) != set(_files(content)):
        found = f"the files {shown(sorted(manifest.files))}"
    elif bad := [name for name in _COUNTS if type(content.get(name)) is not int or content[name] < 0]:
        found = f"{bad[0]} {shown(content.get(bad[0]))}"
    elif not isinstance(content.get("fingerprint"), str) or content.get("time_kind") not in _TIME_KINDS:
        found = f"fingerprint {shown(content.get('fingerprint'))} and time_kind {shown(content.get('time_kind'))}"
    elif not isinstance(notes := content.get("notes"), dict) or not all(map(_is_note, notes.values())):
        found = f"notes {shown(content.get('notes'))}"
    if found is not None:
        raise refuse(path, found, f"a dataset of version {FORMAT_VERSION}", "read the events again")


def _is_note(value: Any) -> bool:
    return type(value) is int or (isinstance(value, list) and all(isinstance(text, str) for text in value))
