"""From a stream of chunks to the dataset's Arrow file, in bounded memory.

Chunks are encoded to dense ids and appended to one spill file; the users' event counts that fall out give every user's final
place. Then ranges of users that fit in memory are sorted one after another by (user, time, order in the files) and written behind
each other. Only the vocabularies, the users' counts and one range are ever in memory.

The working files have no names: they end with the process, however that ends, and two builds cannot meet. That is why they do not
go through the artifact layer, which makes files that stay.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from jagged.data.dataset import EVENTS, ITEMS, USERS, SequenceDataset, sealed
from jagged.data.errors import MAX_ID_BYTES, refuse, shown
from jagged.data.parsers import Chunk
from jagged.data.vocabulary import Vocabulary, digest, infer_integers

# Events sorted in memory at once, about 80 bytes each.
RANGE_EVENTS = 1 << 22
# Ranges are files open at the same time.
MAX_RANGES = 256
COPY_EVENTS = 1 << 20
# Numbers that are times from 1973 to 2286 in seconds, milliseconds, microseconds or nanoseconds: each unit's first and last.
_UNITS = ("seconds", "milliseconds", "microseconds", "nanoseconds")
_UNIT_BOUNDS = np.array([bound * 1000**power for power in range(4) for bound in (10**8, 10**10)][:-1], dtype=np.int64)

IntArray = npt.NDArray[np.int64]


class _Codes:
    """Dense numbers in order of first appearance."""

    def __init__(self, role: str) -> None:
        self.role = role
        self.codes: dict[int | str, int] = {}
        self.type: pa.DataType | None = None

    def encode(self, values: pa.Array, place: Callable[[int], str]) -> IntArray:
        encoded = self.checked(values, place)
        distinct = encoded.dictionary.to_pylist()
        codes = self.codes
        dense = np.fromiter((codes.setdefault(value, len(codes)) for value in distinct), np.int64, len(distinct))
        return dense[encoded.indices.to_numpy(zero_copy_only=False)]

    def checked(self, values: pa.Array, place: Callable[[int], str]) -> pa.DictionaryArray:
        """The distinct values and where they stand, after the rules that every id keeps."""
        if values.null_count:
            raise refuse(place(int(pc.index(pc.is_null(values), True).as_py())), f"a null {self.role} id", "an id")
        kind = pa.int64() if pa.types.is_integer(values.type) else pa.large_string()
        if self.type is None:
            self.type = kind
        elif kind != self.type:
            raise refuse(place(0), f"{self.role} ids of type {kind}", f"{self.type} as in the files before", "cast the column")
        encoded = values.dictionary_encode()
        distinct = encoded.dictionary
        indices = encoded.indices.to_numpy(zero_copy_only=False)
        if kind == pa.large_string():
            self._check(distinct, indices, place)
        elif pa.types.is_uint64(values.type) and len(distinct) and (worst := pc.max(distinct).as_py()) >= 2**63:
            first = int(np.flatnonzero(indices == pc.index(distinct, pa.scalar(worst, pa.uint64())).as_py())[0])
            raise refuse(place(first), f"the {self.role} id {worst}", "integers below 2**63", "cast the column to strings")
        return encoded

    def _check(self, distinct: pa.Array, indices: IntArray, place: Callable[[int], str]) -> None:
        length = pc.binary_length(distinct)
        bad = pc.or_(
            pc.or_(pc.equal(length, 0), pc.greater(length, MAX_ID_BYTES)), pc.match_substring_regex(distinct, r"[\x00-\x1f\x7f]")
        )
        if (index := pc.index(bad, True).as_py()) >= 0:
            found = distinct[index].as_py()
            raise refuse(
                place(int(np.flatnonzero(indices == index)[0])),
                f"the {self.role} id {shown(found)}" if found else f"an empty {self.role} id",
                f"1 to {MAX_ID_BYTES} bytes without control characters",
            )

    def vocabulary(self, typed: bool) -> Vocabulary:
        ids = pa.array(list(self.codes), type=self.type or pa.large_string())
        return Vocabulary(ids if typed else infer_integers(ids))


class DatasetBuilder:
    """Takes chunks, then writes a dataset's files into `directory`.

    Args:
        directory: an existing, empty directory on a disk with room for about twice the events at 24 bytes each.
        typed: ids keep the type they come in; otherwise text ids that are all integers become int64.
        range_events: events sorted in memory at once.
    """

    def __init__(self, directory: Path, *, typed: bool, range_events: int = RANGE_EVENTS) -> None:
        self.directory = directory
        self.typed = typed
        self.range_events = range_events
        self.notes: dict[str, int] = {}
        self._users = _Codes("user")
        self._items = _Codes("item")
        self._counts = np.zeros(1024, dtype=np.int64)
        self._rows = np.zeros(1024, dtype=np.int64)
        self._without_items: set[int | str] = set()
        self._time_kind = ""
        # Where the first time stands of each unit that numbers since 1970 may have; "" for numbers that are none.
        self._units: dict[str, str] = {}
        self._files = ExitStack()
        self._spill = self._working_file()
        self._width = 2

    def close(self) -> None:
        """Close the working files, which removes them; harmless after `finish`."""
        self._files.close()

    def _working_file(self) -> BinaryIO:
        return self._files.enter_context(TemporaryFile(dir=self.directory))

    def add(self, chunk: Chunk) -> None:
        """Append a chunk's events after those that came before."""
        if len(chunk.users) == 0:
            return
        self._check_time_kind(chunk)
        self._note_units(chunk)
        if chunk.trimmed:
            self.notes["trimmed_ids"] = self.notes.get("trimmed_ids", 0) + chunk.trimmed
        users, counts = chunk.users, chunk.counts
        numbers = chunk
        if counts is not None and (counts == 0).any():
            self._users.checked(users, chunk.user_place)
            self._without_items.update(users.filter(pa.array(counts == 0)).to_pylist())
            keep = np.flatnonzero(counts > 0)
            users, counts = users.take(pa.array(keep)), counts[keep]
            numbers = Chunk(chunk.path, chunk.unit, users, chunk.items, counts, chunk.times, chunk.time_kind, chunk.numbers[keep])
        user = self._users.encode(users, numbers.user_place)
        item = self._items.encode(chunk.items, numbers.item_place)
        if len(user) == 0:
            return
        size = len(self._users.codes)
        self._counts = _grown(self._counts, size)
        self._rows = _grown(self._rows, size)
        if counts is not None:
            self._rows[:size] += np.bincount(user, minlength=size)
            user = np.repeat(user, counts)
        self._counts[:size] += np.bincount(user, minlength=size)
        columns = [user, item] if chunk.times is None else [user, item, chunk.times]
        self._width = len(columns)
        _write(self._spill, np.stack(columns, axis=1))

    def _check_time_kind(self, chunk: Chunk) -> None:
        kinds = {
            "number": "numbers",
            "naive": "calendar times without a zone",
            "zoned": "calendar times with a zone",
            "none": "no times",
        }
        if self._time_kind and chunk.time_kind != self._time_kind:
            raise refuse(
                chunk.user_place(0), kinds[chunk.time_kind], f"{kinds[self._time_kind]} as before", "use one kind of time"
            )
        self._time_kind = chunk.time_kind

    def _note_units(self, chunk: Chunk) -> None:
        if chunk.time_kind != "number" or chunk.times is None or not len(chunk.times):
            return
        unit = np.searchsorted(_UNIT_BOUNDS, chunk.times, side="right")
        for code, first in zip(*np.unique(unit, return_index=True), strict=True):
            # Between two bounds lies a unit at every second place, and no time of our days at the others.
            name = _UNITS[code // 2] if code % 2 else ""
            self._units.setdefault(name, f"{chunk.times[first]} at {chunk.item_place(int(first))}")

    def _check_units(self, source: str) -> None:
        if len(self._units) < 2 or "" in self._units:
            return
        (unit, place), (other, elsewhere) = list(self._units.items())[:2]
        raise refuse(
            source,
            f"times in {unit} since 1970 ({place}) and in {other} ({elsewhere})",
            "one unit",
            "multiply or divide one of them by a power of 1000",
        )

    @property
    def num_events(self) -> int:
        """Events added so far."""
        return int(self._counts.sum())

    def finish(self, source: str, advance: Callable[[int], object]) -> SequenceDataset:
        """Sort, write the Arrow file, the vocabularies and the manifest. `advance` is called twice with every event's count.

        Raises:
            DataError: there was not one event.
        """
        num_users = len(self._users.codes)
        offsets = np.zeros(num_users + 1, dtype=np.int64)
        np.cumsum(self._counts[:num_users], out=offsets[1:])
        if not offsets[-1]:
            raise refuse(source, "no events", "at least one user with an item")
        self._check_units(source)
        users, items = self._users.vocabulary(self.typed), self._items.vocabulary(self.typed)
        self.notes["duplicate_users"] = int((self._rows[:num_users] > 1).sum())
        self.notes["empty_users"] = len(self._without_items - self._users.codes.keys())
        with self._files:
            columns = self._sort(offsets, advance)
            fingerprint = self._write_events(columns, offsets, users, items, advance)
        users.save(self.directory / USERS)
        items.save(self.directory / ITEMS)
        content = {
            "fingerprint": fingerprint,
            "num_users": len(users),
            "num_items": len(items),
            "num_events": int(offsets[-1]),
            "time_kind": self._time_kind,
            "notes": self.notes,
        }
        return sealed(self.directory, content)

    def _sort(self, offsets: IntArray, advance: Callable[[int], object]) -> dict[str, BinaryIO]:
        """Files of the sorted values of each column, by its name."""
        total = int(offsets[-1])
        limit = max(self.range_events, -(-total // MAX_RANGES))
        bounds = [0]
        while bounds[-1] < len(offsets) - 1:
            end = int(np.searchsorted(offsets, offsets[bounds[-1]] + limit, side="right")) - 1
            bounds.append(max(end, bounds[-1] + 1))
        columns = {name: self._working_file() for name in ("item_id", "timestamp")[: self._width - 1]}
        for file in self._distribute(np.array(bounds)):
            with file:
                file.seek(0)
                rows = np.fromfile(file, dtype=np.int64).reshape(-1, self._width)
            keys = (rows[:, 0],) if self._width == 2 else (rows[:, 2], rows[:, 0])
            rows = rows[np.lexsort(keys)]
            for number, column in enumerate(columns.values(), 1):
                _write(column, rows[:, number])
            advance(len(rows))
        return columns

    def _distribute(self, bounds: IntArray) -> list[BinaryIO]:
        if len(bounds) == 2:
            return [self._spill]
        files = [self._working_file() for _ in bounds[1:]]
        with self._spill as spill:
            spill.seek(0)
            while len(rows := np.fromfile(spill, np.int64, COPY_EVENTS * self._width).reshape(-1, self._width)):
                owner = np.searchsorted(bounds, rows[:, 0], side="right") - 1
                order = np.argsort(owner, kind="stable")
                rows, owner = rows[order], owner[order]
                present, starts = np.unique(owner, return_index=True)
                for k, part in zip(present, np.split(rows, starts[1:]), strict=True):
                    _write(files[k], part)
        return files

    def _write_events(
        self,
        columns: dict[str, BinaryIO],
        offsets: IntArray,
        users: Vocabulary,
        items: Vocabulary,
        advance: Callable[[int], object],
    ) -> str:
        sha = hashlib.sha256(b"jagged.dataset.1:" + digest(users.ids) + digest(items.ids))
        sha.update(offsets.tobytes())
        boundaries = pa.array(offsets)
        arrays = []
        for name, file in columns.items():
            file.flush()
            data = pa.py_buffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            sha.update(name.encode())
            for start in range(0, data.size, 8 * COPY_EVENTS):
                piece = memoryview(data)[start : start + 8 * COPY_EVENTS]
                sha.update(piece)
                if name == "item_id":
                    advance(len(piece) // 8)
            values = pa.Array.from_buffers(pa.int64(), data.size // 8, [None, data])
            arrays.append(pa.LargeListArray.from_arrays(boundaries, values))
        batch = pa.record_batch(arrays, names=list(columns))
        with pa.OSFile(str(self.directory / EVENTS), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
            writer.write_batch(batch)
        return sha.hexdigest()


def _write(file: BinaryIO, array: IntArray) -> None:
    # ndarray.tofile writes through a buffer of its own and can lose the error of a full disk.
    file.write(np.ascontiguousarray(array).data)


def _grown(array: IntArray, size: int) -> IntArray:
    if size <= len(array):
        return array
    bigger = np.zeros(max(size, 2 * len(array)), dtype=np.int64)
    bigger[: len(array)] = array
    return bigger
