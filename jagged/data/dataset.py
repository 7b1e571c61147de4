"""The dataset: users' events in one memory-mapped Arrow file, seen by torch without a copy."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import weakref
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack
from tqdm import tqdm

from jagged.data.errors import refuse, shown
from jagged.data.vocabulary import Vocabulary

EVENTS = "events.arrow"
USERS = "users.arrow"
ITEMS = "items.arrow"
MANIFEST = "manifest.json"
FORMAT_VERSION = 1


class SequenceDataset:
    """Users' events, oldest first. Made by `read_events`, `synthetic_sessions` or `load`, never changed afterwards.

    The tensors are views of the mapped file: they cost no memory of the process, and writing to them in place is not allowed (the
    operating system ends a process that tries). Sending a dataset to another process sends the name of its directory.

    Attributes:
        offsets: int64 `[U + 1]`; user u's events are rows `offsets[u]` to `offsets[u + 1]`.
        item_ids: int64 `[S]`, dense item ids.
        timestamps: int64 `[S]`, ascending within a user, or None; numbers as in the file, calendar times in microseconds since
            1970.
    """

    def __init__(self, directory: str | os.PathLike[str], manifest: dict[str, Any]) -> None:
        self.directory = Path(directory)
        self._manifest = manifest
        self._vocabularies: dict[str, Vocabulary] = {}
        self._keep: object = None
        with pa.memory_map(str(self.directory / EVENTS)) as source:
            batch = pa.ipc.open_file(source).get_batch(0)
        items = batch.column("item_id")
        self.offsets: Tensor = from_dlpack(items.offsets)
        self.item_ids: Tensor = from_dlpack(items.values)
        self.timestamps: Tensor | None = None
        if "timestamp" in batch.schema.names:
            self.timestamps = from_dlpack(batch.column("timestamp").values)

    @property
    def users(self) -> Vocabulary:
        """The users' ids."""
        return self._vocabulary(USERS)

    @property
    def items(self) -> Vocabulary:
        """The items' ids."""
        return self._vocabulary(ITEMS)

    def _vocabulary(self, name: str) -> Vocabulary:
        if name not in self._vocabularies:
            self._vocabularies[name] = Vocabulary.load(self.directory / name)
        return self._vocabularies[name]

    @property
    def notes(self) -> dict[str, int]:
        """What reading met: `duplicate_users` (users in more than one line) and `empty_users` (without an item, left out)."""
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
        """
        target = Path(directory)
        if target.exists() and any(target.iterdir()):
            if SequenceDataset.load(target).fingerprint == self.fingerprint:
                return
            raise refuse(target, "another dataset", "a directory that does not exist yet", "name another one")
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = fresh_directory(target.parent, f".{target.name}.")
        try:
            for name in (EVENTS, USERS, ITEMS, MANIFEST):
                shutil.copyfile(self.directory / name, temporary / name)
            publish(temporary, target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> SequenceDataset:
        """Open a directory written by `save` or kept by `read_events` as its cache, after verifying every byte of it.

        Raises:
            DataError: a file is missing or differs from the manifest's size and SHA-256, with its name.
        """
        directory = Path(directory)
        manifest = _read_manifest(directory)
        for name, expected in manifest["files"].items():
            path = directory / name
            try:
                size = path.stat().st_size
                if size != expected["size"]:
                    raise refuse(path, f"{size} bytes", f"{expected['size']}", "the copy is damaged")
                if file_digest(path) != expected["sha256"]:
                    raise refuse(path, "another SHA-256 than the manifest's", "the file as it was written", "the copy is damaged")
            except OSError as error:
                raise refuse(path, f"{type(error).__name__}: {error}", "a readable file") from None
        dataset = cls(directory, manifest)
        dataset._check_content()
        return dataset

    def _check_content(self) -> None:
        # A dataset made by other hands passes the digests; ids and offsets out of range must not reach a kernel.
        where = self.directory / EVENTS
        lengths = self.lengths
        items = torch.aminmax(self.item_ids) if self.num_events else None
        if (
            self.offsets.shape != (self.num_users + 1,)
            or self.item_ids.shape != (self.num_events,)
            or (self.timestamps is not None and self.timestamps.shape != self.item_ids.shape)
            or int(self.offsets[0]) != 0
            or int(self.offsets[-1]) != self.num_events
            or bool((lengths < 0).any())
        ):
            raise refuse(where, "offsets that do not fit the events", "a dataset of this library")
        if items is None or int(items.min) < 0 or int(items.max) >= self.num_items:
            raise refuse(where, "item ids out of range", f"0 to {self.num_items - 1}")
        for name, count in ((USERS, self.num_users), (ITEMS, self.num_items)):
            if len(self._vocabulary(name)) != count:
                raise refuse(self.directory / name, f"{len(self._vocabulary(name))} ids", f"{count}")


def own_temporary(dataset: SequenceDataset) -> SequenceDataset:
    """Remove the dataset's directory when the dataset is dropped, in the process that made it and in no worker."""
    dataset._keep = weakref.finalize(dataset, _remove, str(dataset.directory), os.getpid())
    return dataset


def _remove(directory: str, process: int) -> None:
    if os.getpid() == process:
        shutil.rmtree(directory, ignore_errors=True)


def write_manifest(directory: Path, content: dict[str, Any]) -> dict[str, Any]:
    """List the data files with size and SHA-256 beside `content`, seal the list with a digest of its own, and return it."""
    files = {
        name: {"size": (directory / name).stat().st_size, "sha256": file_digest(directory / name)}
        for name in (EVENTS, USERS, ITEMS)
    }
    content = {"version": FORMAT_VERSION, "files": files, **content}
    sealed = {**content, "sha256": _seal(content)}
    (directory / MANIFEST).write_text(json.dumps(sealed, indent=2) + "\n", encoding="utf-8")
    return content


def publish(temporary: Path, target: Path) -> None:
    """Flush a directory's files to disk and rename it into place.

    Raises:
        OSError: the target exists and is not empty.
    """
    for path in [*temporary.iterdir(), temporary]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    os.rename(temporary, target)


def file_digest(path: Path) -> str:
    """SHA-256 (hex) of a file, with a bar when it takes longer than two seconds."""
    sha = hashlib.sha256()
    with (
        open(path, "rb") as file,
        tqdm(total=path.stat().st_size, desc=f"Hashing {path.name}", unit="B", unit_scale=True, delay=2, leave=False) as bar,
    ):
        while piece := file.read(1 << 20):
            sha.update(piece)
            bar.update(len(piece))
    return sha.hexdigest()


def fresh_directory(parent: Path, prefix: str) -> Path:
    """Make a new directory with the ordinary permissions, unlike `tempfile`, since it is to be renamed into place."""
    while True:
        path = parent / f"{prefix}{secrets.token_hex(8)}"
        try:
            path.mkdir()
            return path
        except FileExistsError:
            continue


def _seal(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _read_manifest(directory: Path) -> dict[str, Any]:
    path = directory / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise refuse(path, f"{type(error).__name__}: {shown(str(error), 160)}", "the manifest of a dataset") from None
    sealed = isinstance(manifest, dict) and manifest.pop("sha256", None)
    if not sealed or sealed != _seal(manifest):
        raise refuse(path, "content that does not fit its digest", "the manifest as it was written", "the copy is damaged")
    if manifest.get("version") != FORMAT_VERSION or set(manifest.get("files", {})) != {EVENTS, USERS, ITEMS}:
        raise refuse(
            path, f"version {shown(manifest.get('version'))}", f"a dataset of version {FORMAT_VERSION}", "read the events again"
        )
    return manifest
