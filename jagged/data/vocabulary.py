"""Ids of any type and their dense numbers."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from jagged.artifacts import errors_as, read_arrow, replacing
from jagged.data.errors import DataError, refuse, shown

_CANONICAL_INTEGER = r"^(0|-?[1-9][0-9]{0,18})$"
_DIGEST = b"jagged.sha256"
#: Rows of a table of features: of a missing value, of one that training has not seen, and the first of those that it has.
MISSING, UNSEEN, FIRST = 0, 1, 2


class Vocabulary:
    """Ids (int64 or string) and their dense numbers `0 .. n - 1`, both ways. There is no padding id.

    Args:
        ids: `[n]` distinct ids without nulls, integers or strings; the id at position i has the dense number i.

    Raises:
        DataError: ids that are null, repeated, or of another type.
    """

    def __init__(self, ids: Any) -> None:
        ids = ids if isinstance(ids, pa.Array) else pa.array(ids)
        if pa.types.is_null(ids.type):
            ids = ids.cast(pa.large_string())
        if pa.types.is_integer(ids.type):
            try:
                ids = ids.cast(pa.int64())
            except pa.ArrowInvalid:
                raise refuse("vocabulary", f"the id {pc.max(ids)}", "integers below 2**63", "cast them to strings") from None
        elif _is_string(ids.type):
            ids = ids.cast(pa.large_string())
        else:
            raise refuse("vocabulary", f"ids of type {ids.type}", "integers or strings")
        if ids.null_count:
            raise refuse("vocabulary", "a null id", "ids without nulls")
        if pc.count_distinct(ids).as_py() != len(ids):
            raise refuse("vocabulary", "a repeated id", "distinct ids")
        self.ids: pa.Array = ids

    def __len__(self) -> int:
        return len(self.ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and bool(self.ids.equals(other.ids))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Vocabulary({len(self)} ids of type {self.ids.type})"

    def encode(self, values: Any) -> npt.NDArray[np.int64]:
        """Dense numbers of `values`, int64 `[len(values)]`; -1 where an id is unknown or null.

        Integers are found in a vocabulary of strings by their decimal spelling, and the other way round.
        """
        if isinstance(values, pa.ChunkedArray):
            values = values.combine_chunks()
        if not isinstance(values, pa.Array):
            try:
                values = pa.array(values)
            except (pa.ArrowException, OverflowError) as error:
                raise refuse("vocabulary", f"{shown(str(error), 100)}", "integers or strings, not both") from None
        if isinstance(values, pa.DictionaryArray):
            values = values.dictionary_decode()
        if len(values) == 0 or len(self) == 0 or pa.types.is_null(values.type):
            return np.full(len(values), -1, dtype=np.int64)
        if pa.types.is_integer(self.ids.type) and _is_string(values.type):
            plain = pc.match_substring_regex(values, _CANONICAL_INTEGER)
            # Nineteen digits may exceed int64; decimal128 holds them, and what does not fit back is unknown.
            wide = pc.if_else(plain, values, None).cast(pa.decimal128(38, 0))
            fits = pc.and_(pc.greater_equal(wide, pa.scalar(-(2**63), wide.type)), pc.less(wide, pa.scalar(2**63, wide.type)))
            values = pc.if_else(fits, wide, None).cast(pa.int64())
        elif pa.types.is_integer(values.type) or _is_string(values.type):
            values = (
                values.cast(self.ids.type, safe=True)
                if not pa.types.is_uint64(values.type)
                else _from_uint64(values, self.ids.type)
            )
        else:
            raise refuse("vocabulary", f"ids of type {values.type}", f"{self.ids.type}")
        found = pc.fill_null(pc.index_in(values, value_set=self.ids, skip_nulls=True), -1)
        return np.asarray(found.to_numpy(zero_copy_only=False), dtype=np.int64)

    def decode(self, dense: Any) -> pa.Array:
        """The ids of dense numbers (any integer sequence, array or tensor), in their own type.

        Raises:
            IndexError: a number outside `0 .. n - 1`.
        """
        numbers = np.asarray(dense, dtype=np.int64).reshape(-1)
        if numbers.size and (numbers.min() < 0 or numbers.max() >= len(self)):
            raise IndexError(f"dense ids from {numbers.min()} to {numbers.max()}, expected 0 to {len(self) - 1}")
        return self.ids.take(pa.array(numbers))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write an Arrow file with one column `id` and a digest of it; the file appears whole or not at all."""
        schema = pa.schema([("id", self.ids.type)], metadata={_DIGEST: digest(self.ids)})
        with (
            replacing(Path(path)) as aside,
            pa.OSFile(str(aside), "wb") as sink,
            pa.ipc.new_file(sink, schema) as writer,
        ):
            writer.write_batch(pa.record_batch([self.ids], schema=schema))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Vocabulary:
        """Read a vocabulary written by `save`.

        Raises:
            DataError: the file is missing, damaged, or not a vocabulary.
        """
        with errors_as(DataError):
            batches = read_arrow(path, "a vocabulary file")
        names = batches[0].schema.names if batches else []
        metadata = (batches[0].schema.metadata if batches else None) or {}
        if names != ["id"] or _DIGEST not in metadata or len(batches) != 1:
            raise refuse(path, f"columns {shown(names)}", "a vocabulary file with the column 'id'")
        ids = batches[0].column(0)
        if ids.type not in (pa.int64(), pa.large_string()) or ids.null_count or metadata[_DIGEST] != digest(ids):
            raise refuse(path, "content that does not fit its digest", "the file as it was written", "copy it again")
        try:
            return cls(ids)
        except DataError as error:
            raise DataError(f"{os.fspath(path)}: {error}") from None


def infer_integers(ids: pa.Array) -> pa.Array:
    """Text ids as int64 when every one of them is an integer's own decimal spelling; otherwise unchanged.

    `007` and `+7` are not the spelling of 7, so a round trip never changes an id.
    """
    if not pc.all(pc.match_substring_regex(ids, _CANONICAL_INTEGER)).as_py():
        return ids
    try:
        return ids.cast(pa.int64())
    except pa.ArrowInvalid:
        return ids


def digest(ids: pa.Array) -> bytes:
    """SHA-256 (hex) of an id array: type, count and values, independent of how Arrow lays it out."""
    sha = hashlib.sha256(f"{ids.type}:{len(ids)}:".encode())
    if len(ids) and pa.types.is_integer(ids.type):
        sha.update(memoryview(ids.to_numpy()))
    elif len(ids):
        _, offsets, data = ids.buffers()
        # As many as there are ids: a damaged file may give the buffer any length that holds them.
        ends = np.frombuffer(offsets, dtype=np.int64, count=len(ids) + 1, offset=8 * ids.offset)
        sha.update(memoryview(ends - ends[0]))
        if data is not None:
            sha.update(memoryview(data)[int(ends[0]) : int(ends[-1])])
    return sha.hexdigest().encode()


def _is_string(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or kind == getattr(pa, "string_view", lambda: None)())


def _from_uint64(values: pa.Array, target: pa.DataType) -> pa.Array:
    if _is_string(target):
        return values.cast(target)
    fits = pc.less(values, pa.scalar(2**63, pa.uint64()))
    return pc.if_else(fits, values, None).cast(pa.int64())
