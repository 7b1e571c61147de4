"""From ids to the numbers that a model has rows for, and what is known of numbers: both from training alone.

A dataset stores ids as codes. An `Encoder` makes a map from codes to numbers that is applied when a batch is gathered, so that a
split rewrites nothing. In every table the number 0 is a missing id and 1 an id that training has not seen.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from jagged.artifacts import MANIFEST, errors_as, new_directory, verify, write_manifest
from jagged.data.errors import DataError, refuse, shown
from jagged.data.records import read_column, write_column
from jagged.data.schema import Column
from jagged.data.vocabulary import FIRST, MISSING, UNSEEN, Vocabulary

IntArray = npt.NDArray[np.int64]
CodeArray = npt.NDArray[np.int32]

FORMAT_VERSION = 1
_NUMBERS = 1 << 20
_LARGEST = float(np.finfo(np.float32).max)


def hashes(ids: pa.Array, seed: int, table: str) -> npt.NDArray[np.uint64]:
    """A 64-bit number for each id, uint64 `[len(ids)]`: BLAKE2b of its text, keyed by a seed and a table's name.

    The integer 7 and the text "7" have one number. It is the same on every machine.
    """
    salt = hashlib.blake2b(table.encode(), digest_size=16).digest()
    fresh = hashlib.blake2b(digest_size=8, key=seed.to_bytes(8, "little"), person=salt)

    def one(text: str) -> bytes:
        state = fresh.copy()
        state.update(text.encode())
        return state.digest()

    return np.frombuffer(b"".join(one(str(value)) for value in ids.to_pylist()), dtype="<u8")


@dataclass(frozen=True, eq=False)
class Encoder:
    """The numbers of one table's ids.

    Attributes:
        table: its name.
        encoding: "vocabulary", "hash" or "range".
        size: numbers that there are, with the two for missing and unseen ids: the rows of an embedding table.
        counts: int64 `[size]`: how often training has each number; of one that goes on, all trainings together.
        distinct: ids that training has; of one that goes on, the last training.
        ids: of a vocabulary: the id of the number i + 2 is at i.
        seed: of a hash.
    """

    table: str
    encoding: str
    size: int
    counts: IntArray
    distinct: int
    ids: Vocabulary | None = None
    seed: int = 0

    @classmethod
    def fit(cls, column: Column, ids: Vocabulary, counts: IntArray, *, minimum: int = 1, seed: int = 0) -> Encoder:
        """The encoder of a table.

        Args:
            column: one of the table's columns: how they are encoded.
            ids: of a dataset, by code.
            counts: int64 `[len(ids)]`: how often training has each code.
            minimum: of a vocabulary: ids that training has less often are unseen.
            seed: of a hash, from 0 to 2**64 - 1.
        """
        kept: Vocabulary | None = None
        if column.encoding == "vocabulary":
            kept = Vocabulary(ids.ids.take(pa.array(np.flatnonzero(counts >= max(minimum, 1)))))
            size = FIRST + len(kept)
        else:
            assert column.size is not None
            size = FIRST + column.size
        bare = cls(column.table_name, column.encoding, size, np.zeros(0, np.int64), int((counts > 0).sum()), kept, seed)
        by_number = np.zeros(size, dtype=np.int64)
        np.add.at(by_number, bare.encode(ids.ids), counts)
        return dataclasses.replace(bare, counts=by_number)

    def grown(self, ids: Vocabulary, counts: IntArray, *, minimum: int = 1) -> Encoder:
        """The encoder of a training that goes on with other rows: every number stays whose it is.

        New ids of a vocabulary get numbers behind those that there are; a hash and a range keep their size.

        Args:
            ids: of the other dataset, by code.
            counts: int64 `[len(ids)]`: how often its training has each code.
            minimum: of a vocabulary: new ids that this training has less often are unseen.
        """
        kept, size = self.ids, self.size
        if kept is not None:
            is_new = (self.encode(ids.ids) == UNSEEN) & (counts >= max(minimum, 1))
            kept = Vocabulary(_joined(kept.ids, ids.ids.take(pa.array(np.flatnonzero(is_new)))))
            size = FIRST + len(kept)
        bare = dataclasses.replace(self, size=size, ids=kept, distinct=int((counts > 0).sum()))
        by_number = np.zeros(size, dtype=np.int64)
        by_number[: self.size] = self.counts
        np.add.at(by_number, bare.encode(ids.ids), counts)
        return dataclasses.replace(bare, counts=by_number)

    def code_map(self, ids: Vocabulary) -> CodeArray:
        """The numbers of a dataset's codes, int32 `[len(ids) + 1]`: that of the code c at c + 1, that of a missing id at 0."""
        return np.concatenate((np.array([MISSING]), self.encode(ids.ids))).astype(np.int32)

    def encode(self, ids: Any, *, strict: bool = False) -> IntArray:
        """The numbers of ids, whether training had them or not.

        Args:
            ids: `[n]` integers or strings, None where one is missing.
            strict: refuse ids out of a range; otherwise they are unseen.

        Returns:
            int64 `[n]`.

        Raises:
            DataError: ids of another type, or with `strict` the first that is out of range.
        """
        ids = ids if isinstance(ids, (pa.Array, pa.ChunkedArray)) else pa.array(ids)
        ids = ids.combine_chunks() if isinstance(ids, pa.ChunkedArray) else ids
        missing = np.asarray(ids.is_null().to_numpy(zero_copy_only=False), dtype=np.bool_)
        if self.encoding == "vocabulary":
            assert self.ids is not None
            found = self.ids.encode(ids)
            numbers = np.where(found < 0, UNSEEN, found + FIRST)
        elif self.encoding == "hash":
            numbers = np.full(len(ids), MISSING, dtype=np.int64)
            rows = np.uint64(self.size - FIRST)
            numbers[~missing] = (hashes(ids.drop_null(), self.seed, self.table) % rows).astype(np.int64) + FIRST
        else:
            plain = Vocabulary(pa.array([], pa.int64()) if pa.types.is_null(ids.type) else ids.drop_null().unique())
            values = _whole(plain.ids)
            inside = (values >= 0) & (values < self.size - FIRST)
            if strict and not inside.all():
                out = plain.ids[int(np.flatnonzero(~inside)[0])].as_py()
                raise refuse(f"table {shown(self.table)}", f"the id {shown(out)}", f"0 to {self.size - FIRST - 1}")
            by_place = np.append(np.where(inside, values + FIRST, UNSEEN), MISSING)
            numbers = by_place[plain.encode(ids)]
        return np.where(missing, MISSING, numbers).astype(np.int64)

    @property
    def expected_collisions(self) -> float:
        """Of a hash: how many of the training ids are expected not to have a number of their own; otherwise 0.

        That is the ids less the rows that so many ids fill on average, n - m (1 - (1 - 1/m)^n) for n ids and m rows.
        """
        rows = self.size - FIRST
        if self.encoding != "hash" or not self.distinct:
            return 0.0
        filled = -rows * np.expm1(self.distinct * np.log1p(-1 / rows)) if rows > 1 else 1.0
        return float(self.distinct - filled)

    def __str__(self) -> str:
        text = f"{self.table}: {self.encoding}, {self.size:,} numbers, {self.distinct:,} ids in training"
        if self.encoding == "hash":
            text += f", {self.expected_collisions:,.1f} of them expected to share a number with one before (seed {self.seed})"
        return text


@dataclass(frozen=True)
class Statistics:
    """What training has of a column of numbers.

    Attributes:
        count: numbers.
        missing: places without one.
        mean: of the numbers, 0 where there are none. It stands for a missing one.
        deviation: the standard deviation, divided by the count; 0 where there are none.
        borders: ascending and distinct: the numbers at the ranks `count * i // buckets` of the sorted ones, for i from 1 to
            `buckets - 1`. Bucket j has those from border j - 1 to below border j.
    """

    count: int
    missing: int
    mean: float
    deviation: float
    borders: tuple[float, ...]

    @classmethod
    def fit(cls, values: npt.NDArray[np.float32], buckets: int) -> Statistics:
        """The statistics of float32 `[n]`, NaN where a number is missing."""
        present = values[~np.isnan(values)]
        count, missing = len(present), len(values) - len(present)
        if not count:
            return cls(0, missing, 0.0, 0.0, ())
        mean = float(present.mean(dtype=np.float64))
        squares = 0.0
        for begin in range(0, count, _NUMBERS):
            squares += float(np.square(present[begin : begin + _NUMBERS].astype(np.float64) - mean).sum())
        present.sort()
        borders = np.unique(present[[count * i // buckets for i in range(1, buckets)]])
        return cls(count, missing, mean, float(np.sqrt(squares / count)), tuple(float(border) for border in borders))


class Encoders(Mapping[str, Encoder]):
    """The encoders of a split, by table, and the statistics of its numbers: what a model has to keep to read other rows.

    Attributes:
        statistics: by column.
    """

    def __init__(self, tables: Mapping[str, Encoder], statistics: Mapping[str, Statistics]) -> None:
        self._tables = dict(tables)
        self.statistics = dict(statistics)

    def __getitem__(self, table: str) -> Encoder:
        return self._tables[table]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)

    def __str__(self) -> str:
        return "\n".join(map(str, self.values()))

    @property
    def sizes(self) -> dict[str, int]:
        """Numbers of each table: the rows that an embedding table needs."""
        return {name: encoder.size for name, encoder in self.items()}

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write them into a new directory; it appears whole or not at all.

        Raises:
            OSError: it cannot be written, or is there and not empty.
        """
        with new_directory(Path(directory)) as aside:
            content = self.write(aside)
            write_manifest(aside, os.listdir(aside), content)

    def write(self, directory: Path, prefix: str = "") -> dict[str, Any]:
        """Write their files among others; what `read` needs beside them is returned, in plain values.

        Args:
            directory: where.
            prefix: before the files' names.
        """
        tables = {}
        for i, (name, encoder) in enumerate(self.items()):
            write_column(directory / f"{prefix}counts-{i}.arrow", encoder.counts)
            if encoder.ids is not None:
                encoder.ids.save(directory / f"{prefix}ids-{i}.arrow")
            tables[name] = {key: getattr(encoder, key) for key in _PLAIN}
        statistics = {name: dataclasses.asdict(one) for name, one in self.statistics.items()}
        return {"layout": FORMAT_VERSION, "tables": tables, "statistics": statistics}

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> Encoders:
        """Read what `save` wrote, after verifying every byte of it.

        Raises:
            DataError: a file is missing or damaged, or holds something else, with its name.
        """
        directory = Path(directory)
        with errors_as(DataError):
            manifest = verify(directory)
        return cls.read(directory, manifest.content, directory / MANIFEST)

    @classmethod
    def read(cls, directory: Path, content: Mapping[str, Any], where: Path, prefix: str = "") -> Encoders:
        """Read what `write` wrote; the files were verified.

        Args:
            directory, prefix: as `write` had them.
            content: what it returned.
            where: the file that `content` was in, for messages.

        Raises:
            DataError: the content fits no files, with `where`.
        """
        tables = {}
        try:
            if content["layout"] != FORMAT_VERSION:
                raise ValueError(f"layout {content['layout']}")
            for i, (name, entry) in enumerate(content["tables"].items()):
                (counts,) = read_column(directory / f"{prefix}counts-{i}.arrow", "int64")
                _check_plain(name, entry)
                is_vocabulary = entry["encoding"] == "vocabulary"
                ids = Vocabulary.load(directory / f"{prefix}ids-{i}.arrow") if is_vocabulary else None
                tables[name] = Encoder(counts=counts, ids=ids, **{key: entry[key] for key in _PLAIN})
                if len(counts) != entry["size"] or (ids is not None and len(ids) + FIRST != entry["size"]):
                    raise ValueError(f"{len(counts)} counts in the table {name}")
            statistics = {}
            for name, entry in content["statistics"].items():
                _check_numbers(name, entry)
                statistics[name] = Statistics(**{**entry, "borders": tuple(entry["borders"])})
        except DataError:
            raise
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            # A manifest made by other hands.
            raise refuse(where, shown(str(error)), f"encoders of version {FORMAT_VERSION}", "save them again") from None
        return cls(tables, statistics)


_PLAIN = ("table", "encoding", "size", "distinct", "seed")


def _check_plain(name: str, entry: Mapping[str, Any]) -> None:
    """Refuse an encoder's description with a value of another type or out of range."""
    bounds = {"size": FIRST + (entry["encoding"] == "hash"), "distinct": 0, "seed": 0}
    numbers = all(type(entry[key]) is int and least <= entry[key] < 2**64 for key, least in bounds.items())
    if not isinstance(entry["table"], str) or entry["encoding"] not in ("vocabulary", "hash", "range") or not numbers:
        raise ValueError(f"the table {name} as {dict(entry)}")


def _check_numbers(name: str, entry: Mapping[str, Any]) -> None:
    """Refuse statistics with a value that is no number."""
    whole, real = [entry["count"], entry["missing"]], [entry["mean"], entry["deviation"], *entry["borders"]]
    if any(type(one) is not int or one < 0 for one in whole) or any(
        type(one) not in (int, float) or not abs(one) <= _LARGEST for one in real
    ):
        raise ValueError(f"the numbers of {name} as {dict(entry)}")


def _joined(ids: pa.Array, others: pa.Array) -> pa.Array:
    """Ids and others behind them, as texts where only some of them are whole numbers."""
    if ids.type != others.type:
        # An empty vocabulary is of the one type or of the other.
        kind = ids.type if not len(others) else others.type if not len(ids) else pa.large_string()
        ids, others = ids.cast(kind), others.cast(kind)
    return pa.concat_arrays([ids, others])


def _whole(ids: pa.Array) -> IntArray:
    """Ids as whole numbers, -1 where one is none."""
    if pa.types.is_integer(ids.type):
        return np.asarray(ids.to_numpy(), dtype=np.int64)
    plain = pc.match_substring_regex(ids, r"^(0|[1-9][0-9]{0,17})$")
    return np.asarray(pc.if_else(plain, ids, "-1").cast(pa.int64()).to_numpy(), dtype=np.int64)
