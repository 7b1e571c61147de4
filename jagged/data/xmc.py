"""Rows with sparse features and many labels, in the text format of the extreme classification repository."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from tqdm import tqdm

from jagged.artifacts import replacing, writing
from jagged.data.errors import DataError, Skipped, at, refuse, shown
from jagged.data.files import (
    COMPRESSION,
    MARK,
    check_file,
    check_length,
    control_character,
    forbidden,
    not_utf8,
    reading,
    stream,
)
from jagged.data.histories import spread
from jagged.data.progress import DELAY, disabled

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
ByteArray = npt.NDArray[np.uint8]

#: Of features and of labels, at most: ids are int32.
MAX_IDS = 2**31 - 1
# Bytes whose fields are found together: the arrays of them stay in a core's cache.
_PART_BYTES = 1 << 20
# Digits of a whole number, at most: int64 has them all.
_DIGITS = 18
# Rows and fields that are written together, at most.
_ROWS_WRITTEN, _FIELDS_WRITTEN = 1 << 14, 1 << 20

# What a byte does: it belongs to a number (0), ends a field, or is in no row.
_BLANK, _BREAK, _COMMA, _COLON, _ODD = 1, 2, 3, 4, 5
_KINDS = np.full(256, _ODD, dtype=np.uint8)
_KINDS[list(b"0123456789.+-eE")] = 0
for _bytes, _kind in ((b" \t", _BLANK), (b"\n", _BREAK), (b",", _COMMA), (b":", _COLON)):
    _KINDS[list(_bytes)] = _kind

_NUMBER = r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
_COUNT = rf"([0-9]{{1,{_DIGITS}}})"
_HEADER = re.compile(rf"[ \t]*{_COUNT}[ \t]+{_COUNT}[ \t]+{_COUNT}[ \t]*")


@dataclass(frozen=True, eq=False)
class MultiLabelRows:
    """Rows, each with sparse input features and any number of labels, behind each other.

    Row i has the features `feature_offsets[i]` to `feature_offsets[i + 1]` of `feature_ids` and `feature_values`, and the labels
    `label_offsets[i]` to `label_offsets[i + 1]` of `labels`. Both may be none. `len` is the number of rows.

    Attributes:
        feature_ids: int32 `[nnz]`, which features a row has, from 0 on.
        feature_values: float32 `[nnz]`, the value of each; finite.
        feature_offsets: int64 `[N + 1]`, where each row's features begin.
        labels: int32 `[P]`, which labels a row has, from 0 on.
        label_offsets: int64 `[N + 1]`, where each row's labels begin.
        num_features: D, how many features there are.
        num_labels: L, how many labels there are.
        notes: what reading left out: `skipped_rows`, a count, and `skipped_rows_first`, what is wrong with the first five.
        filtered, filtered_offsets: int32 `[F]` and int64 `[N + 1]`, labels that are left out of each row's ranking; None without.

    Raises:
        ValueError: arrays of another dtype or shape, offsets that do not fit them, ids out of range, values that are not finite.
    """

    feature_ids: npt.NDArray[np.int32]
    feature_values: npt.NDArray[np.float32]
    feature_offsets: IntArray
    labels: npt.NDArray[np.int32]
    label_offsets: IntArray
    num_features: int
    num_labels: int
    notes: dict[str, Any] = field(default_factory=dict)
    filtered: npt.NDArray[np.int32] | None = None
    filtered_offsets: IntArray | None = None

    def __post_init__(self) -> None:
        if (self.filtered is None) != (self.filtered_offsets is None):
            raise ValueError("filtered, filtered_offsets: got one of them, expected both or none")
        types: dict[str, Any] = {"feature_ids": np.int32, "feature_values": np.float32, "labels": np.int32}
        types |= {"feature_offsets": np.int64, "label_offsets": np.int64}
        if self.filtered is not None:
            types |= {"filtered": np.int32, "filtered_offsets": np.int64}
        for name, dtype in types.items():
            found = getattr(self, name)
            if found.dtype != dtype or found.ndim != 1:
                raise ValueError(f"{name}: got {found.dtype} {list(found.shape)}, expected one dimension of {np.dtype(dtype)}")
        jagged = [
            ("feature", "features", self.feature_offsets, self.feature_ids, self.num_features),
            ("label", "labels", self.label_offsets, self.labels, self.num_labels),
        ]
        if self.filtered is not None and self.filtered_offsets is not None:
            jagged.append(("filtered", "filtered", self.filtered_offsets, self.filtered, self.num_labels))
        for name, several, offsets, ids, limit in jagged:
            if not len(offsets) or offsets[0] != 0 or offsets[-1] != len(ids) or (np.diff(offsets) < 0).any():
                raise ValueError(f"{name}_offsets: got other numbers, expected ascending ones from 0 to {len(ids)}")
            if not 0 <= limit <= MAX_IDS:
                raise ValueError(f"num_{several}: got {limit}, expected 0 to {MAX_IDS}")
            if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < limit):
                raise ValueError(f"{several}: got {int(ids.min())} to {int(ids.max())}, expected ids from 0 on, under {limit}")
            if len(offsets) != len(self.feature_offsets):
                raise ValueError(f"{name}_offsets: got {len(offsets)}, expected {len(self.feature_offsets)} as for features")
        if len(self.feature_values) != len(self.feature_ids) or not np.isfinite(self.feature_values).all():
            raise ValueError(f"feature_values: got {len(self.feature_values)}, expected {len(self.feature_ids)} finite numbers")

    def __len__(self) -> int:
        return len(self.feature_offsets) - 1

    def __repr__(self) -> str:
        return (
            f"MultiLabelRows({len(self):,} rows, {len(self.feature_ids):,} of {self.num_features:,} features, "
            f"{len(self.labels):,} of {self.num_labels:,} labels)"
        )

    def take(self, rows: IntArray) -> MultiLabelRows:
        """The rows of these numbers, int64 `[n]`, in their order; without notes.

        Raises:
            ValueError: a number that no row has.
        """
        if len(rows) and not (int(rows.min()) >= 0 and int(rows.max()) < len(self)):
            raise ValueError(f"rows: got {int(rows.min())} to {int(rows.max())}, expected numbers from 0 on, under {len(self)}")
        features, feature_offsets = _taken(self.feature_offsets, rows)
        labels, label_offsets = _taken(self.label_offsets, rows)
        filtered: dict[str, Any] = {}
        if self.filtered is not None and self.filtered_offsets is not None:
            places, offsets = _taken(self.filtered_offsets, rows)
            filtered = {"filtered": self.filtered[places], "filtered_offsets": offsets}
        return MultiLabelRows(
            self.feature_ids[features],
            self.feature_values[features],
            feature_offsets,
            self.labels[labels],
            label_offsets,
            self.num_features,
            self.num_labels,
            **filtered,
        )


def _taken(offsets: IntArray, rows: IntArray) -> tuple[IntArray, IntArray]:
    """Where the elements of some rows lie, and their offsets in turn."""
    lengths = offsets[rows + 1] - offsets[rows]
    return spread(offsets[rows], lengths), np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths)))


def read_xmc(
    path: str | os.PathLike[str], *, on_error: Literal["stop", "skip"] = "stop", progress: bool = True
) -> MultiLabelRows:
    """Read a text file of the extreme classification repository: sparse features and labels of each row.

    The first line has three numbers: of rows, of features and of labels. A row is a line `3,7 0:0.5 12:1.25`: its labels,
    separated by commas, then its features, each as `id:value`. Ids count from 0. A row without labels begins with a blank or with
    a feature; a row may have no feature. Labels and features keep their order. Tabs and several blanks separate as one blank
    does, `\\r\\n` ends a line as `\\n` does, a byte order mark is dropped, and the last line may have no end. Blank lines behind
    the last row are none. The file may be compressed (`.gz`, `.bz2`, `.zst`, `.lz4`).

    The file is read in blocks. Beside the result, which grows in place, that takes some 80 MiB and at most an eighth of the
    result; more where single lines are longer than 1 MiB.

    Args:
        path: the file.
        on_error: "stop" at the first row that is malformed, or "skip" it: at most 1 % of the rows may be. What always stops: a
            damaged file, its first line, a line of more than 64 MiB, and more or fewer rows than the first line says.
        progress: show a bar for what takes longer than two seconds.

    Raises:
        DataError: malformed input: one line with the file, the line, what was found, what is expected, and the cure.
        ValueError: `on_error` has no such value.

    Source: K. Bhatia and others, The extreme classification repository: multi-label datasets and code, 2016.
    """
    if on_error not in ("stop", "skip"):
        raise ValueError(f"on_error: got {on_error!r}, expected 'stop' or 'skip'")
    place = Path(path)
    skipped = Skipped() if on_error == "skip" else None
    check_file(place, "a file of rows with features and labels", "name a file with a first line of three numbers, as train.txt")
    with reading(place):
        size = place.stat().st_size
    options: dict[str, Any] = {"disable": disabled(progress), "delay": DELAY, "leave": False}
    with tqdm(total=size, desc="Reading", unit="B", unit_scale=True, **options) as bar:
        result = _read(place, skipped, bar.update)
    if skipped is not None:
        skipped.check(str(place), len(result))
    return result


def _read(path: Path, skipped: Skipped | None, advance: Callable[[int], object]) -> MultiLabelRows:
    parts = _parts(path, advance)
    first = next(parts, b"")
    if not first:
        raise refuse(path, "an empty file", _Header.EXPECTED, "fetch it again")
    cut = first.index(b"\n") + 1
    header = _Header.of(path, first[: cut - 1])
    result, rows, line = _Result(), 0, 1
    for block in itertools.chain([first[cut:]], parts):
        count = block.count(b"\n")
        kept, beyond = _first_lines(block, min(header.rows - rows, count))
        if kept:
            parsed = _Parsed.of(kept, header)
            for error in _faults(path, line + 1, kept, parsed.bad, header):
                if skipped is None:
                    raise error
                skipped.add(str(error))
            result.append(parsed)
        if beyond.strip(b" \t\n"):
            blank = len(beyond) - len(beyond.lstrip(b" \t\n"))
            found = f"a row behind the {header.rows:,} that the first line promises"
            here = line + 1 + block.count(b"\n", 0, len(kept) + blank)
            raise refuse(at(path, here), found, "the end of the file", _CURE_OF_COUNT)
        rows, line = min(header.rows, rows + count), line + count
    if rows < header.rows:
        expected = f"{header.rows:,} as the first line says"
        raise refuse(at(path, line), f"the end of the file behind {_many(rows, 'row')}", expected, _CURE_OF_COUNT)
    return result.whole(header, skipped)


_CURE_OF_COUNT = "fetch the file again, or mend its first line"


@dataclass(frozen=True)
class _Header:
    """The first line: numbers of rows, features and labels."""

    EXPECTED = "a first line of three whole numbers: of rows, of features and of labels"

    rows: int
    features: int
    labels: int

    @staticmethod
    def of(path: Path, line: bytes) -> _Header:
        text = _text(path, 1, line)
        if isinstance(text, DataError):
            raise text
        found = _HEADER.fullmatch(text)
        if found is None:
            raise refuse(at(path, 1), shown(text.strip()), _Header.EXPECTED, "write it above the rows, as 1000 500 200")
        header = _Header(*map(int, found.groups()))
        for count, what in ((header.features, "features"), (header.labels, "labels")):
            if count > MAX_IDS:
                raise refuse(at(path, 1), f"{count:,} {what}", f"at most {MAX_IDS:,}", "mend the first line")
        return header


class _Growing:
    """An array that grows at its end, in place where the allocator can."""

    def __init__(self, dtype: Any, zeros: int = 0) -> None:
        self._array: npt.NDArray[Any] = np.zeros(zeros, dtype=dtype)
        self._size = zeros

    @property
    def last(self) -> int:
        return int(self._array[self._size - 1])

    def append(self, values: npt.NDArray[Any]) -> None:
        size = self._size + len(values)
        if size > len(self._array):
            self._array.resize(max(size, len(self._array) * 9 // 8), refcheck=False)
        self._array[self._size : size] = values
        self._size = size

    def whole(self) -> npt.NDArray[Any]:
        """The array, which is appended to no more."""
        self._array.resize(self._size, refcheck=False)
        return self._array


class _Result:
    """The rows so far."""

    def __init__(self) -> None:
        self._ids, self._values, self._labels = _Growing(np.int32), _Growing(np.float32), _Growing(np.int32)
        self._id_offsets, self._label_offsets = _Growing(np.int64, 1), _Growing(np.int64, 1)

    def append(self, parsed: _Parsed) -> None:
        self._ids.append(parsed.ids)
        self._values.append(parsed.values)
        self._labels.append(parsed.labels)
        self._id_offsets.append(self._id_offsets.last + np.cumsum(parsed.id_counts))
        self._label_offsets.append(self._label_offsets.last + np.cumsum(parsed.label_counts))

    def whole(self, header: _Header, skipped: Skipped | None) -> MultiLabelRows:
        arrays = self._ids, self._values, self._id_offsets, self._labels, self._label_offsets
        ids, values, id_offsets, labels, label_offsets = (array.whole() for array in arrays)
        notes = {"skipped_rows": skipped.count, "skipped_rows_first": skipped.first} if skipped and skipped.count else {}
        return MultiLabelRows(ids, values, id_offsets, labels, label_offsets, header.features, header.labels, notes)


def _parts(path: Path, advance: Callable[[int], object]) -> Iterator[bytes]:
    """Whole lines, each ended by `\\n`."""
    line, tail = 1, b""
    for number, data in enumerate(stream(path, advance)):
        if number == 0:
            data = data.removeprefix(MARK)
        cut = data.rfind(b"\n") + 1
        check_length(path, line, len(tail) + (cut or len(data)))
        if not cut:
            tail += data
            continue
        block, tail = tail + data[:cut], data[cut:]
        yield from _cut(block.replace(b"\r\n", b"\n"))
        line += block.count(b"\n")
    if tail:
        yield tail + b"\n"


def _cut(block: bytes) -> Iterator[bytes]:
    start = 0
    while start < len(block):
        stop = block.rfind(b"\n", start, start + _PART_BYTES) + 1 or block.index(b"\n", start) + 1
        yield block[start:stop]
        start = stop


def _first_lines(block: bytes, count: int) -> tuple[bytes, bytes]:
    """The first lines of a block, and the others."""
    ends = np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == 10) + 1
    if count == len(ends):
        return block, b""
    cut = int(ends[count - 1]) if count else 0
    return block[:cut], block[cut:]


@dataclass(frozen=True)
class _Parsed:
    """What some lines say.

    Attributes:
        bad: numbers of lines with a fault, int64, ascending; nothing else here is theirs.
        ids, values, labels: of the others, int64, float32 and int64.
        id_counts, label_counts: int64, of each of the others.
    """

    bad: IntArray
    ids: IntArray
    values: npt.NDArray[np.float32]
    labels: IntArray
    id_counts: IntArray
    label_counts: IntArray

    @staticmethod
    def of(part: bytes, header: _Header) -> _Parsed:
        raw = np.frombuffer(part, dtype=np.uint8)
        kinds = _KINDS[raw]
        # A field ends where the next byte belongs to no number.
        ends = np.flatnonzero(kinds)
        after = kinds[ends]
        before = np.concatenate((np.array([_BREAK], np.uint8), after[:-1]))
        starts = np.concatenate((np.zeros(1, np.int64), ends[:-1] + 1))
        lengths = ends - starts
        breaks = after == _BREAK
        count = int(np.count_nonzero(breaks))
        row = np.cumsum(breaks) - breaks
        is_empty, is_id, is_value = lengths == 0, after == _COLON, before == _COLON
        # Blanks and line ends are the kinds up to _BREAK.
        opens, closes = before <= _BREAK, after <= _BREAK
        is_label = ~is_id & ~is_value
        faults = np.where(
            is_label,
            np.where(is_empty, ~(opens & closes), before == _BLANK),
            is_empty | np.where(is_id, ~opens, ~closes),
        )
        bad: BoolArray = np.zeros(count, dtype=np.bool_)
        bad[row[faults | (after == _ODD)]] = True
        good = ~bad[row]
        # In a good row a value follows each id.
        at_id, at_label = np.flatnonzero(is_id & good), np.flatnonzero(is_label & ~is_empty & good)
        rows_of_ids, rows_of_labels = row[at_id], row[at_label]
        ids, wrong_ids = _whole_numbers(raw, starts[at_id], lengths[at_id], header.features)
        labels, wrong_labels = _whole_numbers(raw, starts[at_label], lengths[at_label], header.labels)
        values = _numbers(part, starts[at_id + 1], ends[at_id + 1])
        bad[rows_of_ids[wrong_ids | ~np.isfinite(values)]] = True
        bad[rows_of_labels[wrong_labels]] = True
        bad[_with_one_twice(rows_of_ids, ids, header.features)] = True
        bad[_with_one_twice(rows_of_labels, labels, header.labels)] = True
        id_counts, label_counts = np.bincount(rows_of_ids, minlength=count), np.bincount(rows_of_labels, minlength=count)
        if bad.any():
            kept, kept_labels = ~bad[rows_of_ids], ~bad[rows_of_labels]
            ids, values, labels = ids[kept], values[kept], labels[kept_labels]
            id_counts, label_counts = id_counts[~bad], label_counts[~bad]
        return _Parsed(np.flatnonzero(bad), ids, values, labels, id_counts, label_counts)


def _whole_numbers(raw: ByteArray, starts: IntArray, lengths: IntArray, limit: int) -> tuple[IntArray, BoolArray]:
    """Whole numbers from 0 on, int64, and which fields are none or not under the limit; 0 stands for these."""
    numbers = np.zeros(len(starts), dtype=np.int64)
    wrong = lengths > _DIGITS
    alive, place = np.arange(len(starts)), 0
    while len(alive):
        # Bytes under "0" wrap around to large ones.
        digits = raw[starts[alive] + place] - np.uint8(48)
        numbers[alive] = numbers[alive] * 10 + digits
        wrong[alive] |= digits > 9
        place += 1
        alive = alive[lengths[alive] > place] if place < _DIGITS else alive[:0]
    wrong |= numbers >= limit
    numbers[wrong] = 0
    return numbers, wrong


def _numbers(part: bytes, starts: IntArray, ends: IntArray) -> npt.NDArray[np.float32]:
    """Numbers, float32; NaN stands for fields that are none."""
    # Every other string is what stands between two fields.
    offsets = np.stack((starts, ends), axis=1).ravel()
    whole = pa.LargeStringArray.from_buffers(max(len(offsets) - 1, 0), pa.py_buffer(offsets), pa.py_buffer(part))
    fields = whole.take(pa.array(np.arange(0, len(whole), 2)))
    try:
        return np.asarray(fields.cast(pa.float32()).to_numpy(zero_copy_only=False))
    except pa.ArrowInvalid:
        fields = pc.if_else(pc.match_substring_regex(fields, f"^(?:{_NUMBER})$"), fields, "nan")
        return np.asarray(fields.cast(pa.float32()).to_numpy(zero_copy_only=False))


def _with_one_twice(rows: IntArray, ids: IntArray, limit: int) -> IntArray:
    """The rows that have an id twice; ids are under the limit."""
    odd = rows[1:][(ids[1:] <= ids[:-1]) & (rows[1:] == rows[:-1])]
    if not len(odd):
        return odd
    # Rows whose ids do not ascend are few in most files.
    asked = np.zeros(int(rows[-1]) + 1, dtype=np.bool_)
    asked[odd] = True
    chosen = asked[rows]
    keys = np.sort(rows[chosen] * max(limit, 1) + ids[chosen])
    return np.asarray(keys[1:][keys[1:] == keys[:-1]] // max(limit, 1))


def _text(path: Path, line: int, row: bytes) -> str | DataError:
    """A line as text, or why it is none."""
    odd = forbidden(row)
    if odd.size:
        return control_character(path, line, row[int(odd[0])])
    try:
        return row.decode("utf-8")
    except UnicodeDecodeError as error:
        return not_utf8(path, line, row[error.start])


def _faults(path: Path, line: int, part: bytes, bad: IntArray, header: _Header) -> Iterator[DataError]:
    """What is wrong with the lines `bad` of some, of which the first has the number `line`."""
    if not len(bad):
        return
    begins = np.append(0, np.flatnonzero(np.frombuffer(part, dtype=np.uint8) == 10) + 1)
    for row in bad.tolist():
        yield _fault(path, line + row, part[begins[row] : begins[row + 1] - 1], header)


def _fault(path: Path, line: int, row: bytes, header: _Header) -> DataError:
    """What is wrong with a row that has a fault."""
    text = _text(path, line, row)
    if isinstance(text, DataError):
        return text
    place = at(path, line)
    seen: dict[str, set[int]] = {"label": set(), "feature": set()}

    def fault_of_id(what: str, spelled: str, count: int) -> DataError | None:
        number = int(spelled) if re.fullmatch(_COUNT, spelled) else -1
        if not 0 <= number < count:
            expected = f"a whole number from 0 to {count - 1:,}" if count else f"no {what}"
            cure = f"count {what}s from 0, or mend the first line"
            return refuse(place, f"the {what} {shown(spelled)}", f"{expected}, as the first line says {_many(count, what)}", cure)
        if number in seen[what]:
            return refuse(place, f"the {what} {number} twice", f"each {what} once in a row", "leave one of the two out")
        seen[what].add(number)
        return None

    for found in re.finditer(r"[^ \t]+", text):
        field, fault = found[0], None
        spelled, *value = field.split(":")
        if not value and found.start() == 0:
            faults = (fault_of_id("label", label, header.labels) for label in field.split(","))
            fault = next((fault for fault in faults if fault is not None), None)
        elif len(value) != 1:
            cure = "write labels first, separated by commas without blanks, and then the features"
            fault = refuse(place, shown(field), "a feature as 3:0.5", cure)
        else:
            fault = fault_of_id("feature", spelled, header.features)
            if fault is None and not (re.fullmatch(_NUMBER, value[0]) and np.isfinite(_float32(value[0]))):
                told = f"the value {shown(value[0])} of the feature {spelled}"
                fault = refuse(place, told, "a finite number of float32", "write one, or leave the feature out")
        if fault is not None:
            return fault
    raise AssertionError(f"{place}: no fault in {shown(row)}")


def _float32(text: str) -> float:
    return float(pa.scalar(text).cast(pa.float32()).as_py())


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def write_xmc(rows: MultiLabelRows, path: str | os.PathLike[str]) -> None:
    """Write rows as a text file of the extreme classification repository, which `read_xmc` reads again equal.

    Values have as many digits as float32 needs. The file appears whole or not at all; one named `.gz`, `.bz2`, `.zst` or `.lz4`
    is compressed.

    Args:
        rows: what to write.
        path: the file, which is replaced.

    Raises:
        DataError: it cannot be written.
        ValueError: a row has a feature or a label twice, which no reader takes.
    """
    place = Path(path)
    for what, ids, offsets, limit in (
        ("feature", rows.feature_ids, rows.feature_offsets, rows.num_features),
        ("label", rows.labels, rows.label_offsets, rows.num_labels),
    ):
        twice = _with_one_twice(np.repeat(np.arange(len(rows)), np.diff(offsets)), ids.astype(np.int64), limit)
        if len(twice):
            raise ValueError(f"rows: got a {what} twice in row {int(twice[0])}, expected each once")
    compression = COMPRESSION.get(place.suffix.lower())
    with (
        writing(place, "name a file on a disk with room", DataError),
        replacing(place) as aside,
        pa.OSFile(str(aside), "wb") as raw,
    ):
        file = raw if compression is None else pa.CompressedOutputStream(raw, compression)
        file.write(f"{len(rows)} {rows.num_features} {rows.num_labels}\n".encode())
        begin = 0
        while begin < len(rows):
            fields = (
                rows.feature_offsets[begin : begin + _ROWS_WRITTEN + 1] + rows.label_offsets[begin : begin + _ROWS_WRITTEN + 1]
            )
            end = begin + max(1, int(np.searchsorted(fields, fields[0] + _FIELDS_WRITTEN, side="right")) - 1)
            file.write(_lines(rows, begin, end))
            begin = end
        file.close()


def _lines(rows: MultiLabelRows, begin: int, end: int) -> bytes:
    """The lines of some rows."""

    def strings(values: npt.NDArray[Any], offsets: IntArray) -> Any:
        return pa.array(values[offsets[begin] : offsets[end]]).cast(pa.string())

    def joined(values: Any, offsets: IntArray, by: str) -> Any:
        bounds = pa.array(offsets[begin : end + 1] - offsets[begin], pa.int32())
        lists = pa.ListArray.from_arrays(bounds, values)
        return pc.binary_join(lists, by)

    ids, values = strings(rows.feature_ids, rows.feature_offsets), strings(rows.feature_values, rows.feature_offsets)
    features = joined(pc.binary_join_element_wise(ids, values, ":"), rows.feature_offsets, " ")
    labels = joined(strings(rows.labels, rows.label_offsets), rows.label_offsets, ",")
    # A row without labels begins with the blank.
    lines = pc.binary_join_element_wise(labels, features, " ")
    return "".join(f"{line}\n" for line in lines.to_pylist()).encode()
