"""Rows of any table, or text lines, to rows of events: ids and times checked, each in one type."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from jagged.data import times
from jagged.data.errors import MAX_ID_BYTES, DataError, Skipped, at, refuse, shown
from jagged.data.sources import Source
from jagged.data.tabular import Block, is_list

# Bad rows from which on their share is looked at before the end.
_MANY_SKIPPED = 10_000
_KINDS = {
    "number": "numbers",
    "naive": "calendar times without a zone",
    "zoned": "calendar times with a zone",
    "none": "no times",
}
_CONTROL = np.zeros(256, dtype=bool)
_CONTROL[:32] = True
_CONTROL[127] = True

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Columns:
    """Names of the columns that hold users, items and times; no time column means that the file's order is the order.

    `features` are those of the events' side features.
    """

    user: str
    item: str
    timestamp: str | None
    features: tuple[str, ...] = ()

    def names(self) -> list[str]:
        """Those that are read."""
        return [*(name for name in (self.user, self.item, self.timestamp) if name is not None), *self.features]

    def choose(self, where: str, found: list[str]) -> list[str]:
        """As `jagged.data.sources.Choice`.

        Raises:
            DataError: one is missing, or there twice.
        """
        named: list[tuple[str, str | None]] = [("event_columns", name) for name in self.features]
        options = (("user_column", self.user), ("item_column", self.item), ("timestamp_column", self.timestamp), *named)
        for option, name in options:
            if name is None or found.count(name) == 1:
                continue
            if found.count(name) > 1:
                raise refuse(where, f"the column {shown(name)} {found.count(name)} times", "it once")
            if option == "event_columns":
                raise refuse(where, f"the columns {shown(found, 200)}", f"a column {shown(name)}, a side feature of events")
            cure = f"name yours with {option}=..."
            if option == "timestamp_column":
                cure += ', or say timestamp_column="" if the rows are oldest first'
            raise refuse(where, f"the columns {shown(found, 200)}", f"a column {shown(name)}", cure)
        return self.names()


class Intake:
    """Turns a source's blocks into blocks of events: `user` and `item` (int64 or large_string), `time` (int64).

    Side features are `feature_0` and so on (int64 or large_string), null where one is missing. Where a row is a user with lists,
    `item` and `time` are lists, too. `begins`, of text lines, says whether a row begins a line.

    Args:
        source: what is read.
        columns: which of its columns hold users, items and times.
        skipped: takes the rows that are bad; None refuses them.

    Attributes:
        schema: of the rows that it makes.
        nested: whether a row is a user with a list of items.
        time_kind: as of a dataset; known when the first row is.
        trimmed: ids of csv that had blanks around them.

    Raises:
        DataError: columns whose type holds no ids or times.
    """

    def __init__(self, source: Source, columns: Columns, skipped: Skipped | None) -> None:
        self.source, self.columns, self.skipped = source, columns, skipped
        self.is_text = source.format in ("text", "csv")
        if source.format == "text":
            if columns.features:
                cure = "give a table with a header"
                raise refuse(source.name, "lines of text", f"the columns {shown(list(columns.features), 200)}", cure)
            self.columns = Columns("user", "item", None)
        types = {one.name: one.type for one in source.schema}
        self.nested = is_list(types[self.columns.item])
        self._check_types(types)
        user, item = (self._id_type(types[name]) for name in (self.columns.user, self.columns.item))
        fields = [("user", user), ("item", pa.large_list(item) if self.nested else item)]
        if self.columns.timestamp is not None:
            fields.append(("time", pa.large_list(pa.int64()) if self.nested else pa.int64()))
        fields += [(f"feature_{place}", self._id_type(types[name])) for place, name in enumerate(self.columns.features)]
        if source.format == "text":
            fields.append(("begins", pa.bool_()))
        self.schema = pa.schema(fields)
        self.time_kind = "" if self.columns.timestamp is not None else "none"
        self.trimmed = 0
        # Where the first time stands of each unit that numbers since 1970 may have; "" for numbers that are none.
        self._units: dict[str, str] = {}
        self._rows = 0

    def _check_types(self, types: dict[str, pa.DataType]) -> None:
        where = self.source.name
        if self.columns.features and self.nested:
            found = f"the column {shown(self.columns.item)} of type {types[self.columns.item]}"
            raise refuse(where, found, "an event a row, as side features of events have it", "unnest the lists")
        for name, kind in types.items():
            if name in self.columns.features:
                _check_id_type(where, name, pa.string() if pa.types.is_boolean(kind) else kind)
                continue
            if name == self.columns.user:
                _check_id_type(where, name, kind)
            if name in (self.columns.user, "begins"):
                continue
            if is_list(kind) != self.nested:
                raise refuse(where, f"the column {shown(name)} of type {kind}", "items and times both as lists, or neither")
            kind = kind.value_type if self.nested else kind
            if name == self.columns.item:
                _check_id_type(where, name, kind)
            elif not times.is_supported(_decoded_type(kind)):
                raise refuse(
                    where, f"the column {shown(name)} of type {kind}", "whole numbers, timestamps, dates or ISO 8601 text"
                )

    def _id_type(self, kind: pa.DataType) -> pa.DataType:
        kind = _decoded_type(kind.value_type if is_list(kind) else kind)
        return pa.int64() if pa.types.is_integer(kind) else pa.large_string()

    def blocks(self, blocks: Iterator[Block]) -> Iterator[Block]:
        """The events of blocks of the source.

        Raises:
            DataError: a row that is bad where none are skipped, or too many of them.
        """
        for block in blocks:
            for good in self._good(block):
                self._rows += len(good.numbers)
                yield good
            if self.skipped and self.skipped.count >= _MANY_SKIPPED:
                self.skipped.check(self.source.name, self._rows)

    def finish(self) -> None:
        """Check what only all rows tell.

        Raises:
            DataError: times of two units, or too many rows that were skipped.
        """
        if self.skipped:
            self.skipped.check(self.source.name, self._rows)
        if len(self._units) < 2 or "" in self._units:
            return
        (unit, place), (other, elsewhere) = list(self._units.items())[:2]
        raise refuse(
            self.source.name,
            f"times in {unit} since 1970 ({place}) and in {other} ({elsewhere})",
            "one unit",
            "multiply or divide one of them by a power of 1000",
        )

    def _good(self, block: Block) -> Iterator[Block]:
        try:
            yield self._checked(block)
        except DataError as error:
            if self.skipped is None:
                raise
            if len(block.numbers) == 1:
                self.skipped.add(str(error))
                return
            # The error names the first bad row alone: what is good around it is found by halves.
            half = len(block.numbers) // 2
            for part in (slice(0, half), slice(half, None)):
                rows = block.rows.slice(part.start, half if part.stop else None)
                yield from self._good(Block(rows, block.numbers[part], block.file, block.unit))

    def _checked(self, block: Block) -> Block:
        def place(row: int) -> str:
            return at(block.file, int(block.numbers[row]), block.unit)

        users, items = (_decoded(block.rows.column(name)) for name in (self.columns.user, self.columns.item))
        stamps = None if self.columns.timestamp is None else _decoded(block.rows.column(self.columns.timestamp))
        item_place: Callable[[int], str] = place
        bounds = None
        if self.nested:
            for name, part in ((self.columns.item, items), (self.columns.timestamp, stamps)):
                if part is not None and part.null_count:
                    raise refuse(place(_first(pc.is_null(part))), f"a null in {shown(name)}", "a list")
            counts = _lengths(items)
            if stamps is not None:
                other = _lengths(stamps)
                if (wrong := np.flatnonzero(other != counts)).size:
                    i = int(wrong[0])
                    raise refuse(place(i), f"{counts[i]} items and {other[i]} times", "as many times as items")
                stamps = _decoded(stamps.flatten())
            ends = np.cumsum(counts)
            bounds = pa.array(np.concatenate(([0], ends)))
            items = _decoded(items.flatten())
            # The row whose list has an item.
            item_place = lambda event: place(int(np.searchsorted(ends, event, side="right")))  # noqa: E731

        trimmed = 0
        if self.source.format == "csv":
            # A field that is missing is an empty one.
            users, items = (pc.fill_null(ids, "") for ids in (users, items))
            stamps = None if stamps is None else pc.fill_null(stamps, "")
            plain = [pc.utf8_trim(ids, characters=" ") for ids in (users, items)]
            trimmed = sum(pc.sum(pc.not_equal(*pair)).as_py() or 0 for pair in zip(plain, (users, items), strict=True))
            users, items = plain
        values, kind = None, "none"
        if stamps is not None and len(stamps):
            values, kind = times.from_arrow(stamps, item_place)
            if self.time_kind and kind != self.time_kind:
                cure = "use one kind of time"
                raise refuse(item_place(0), _KINDS[kind], f"{_KINDS[self.time_kind]} as before", cure)
        columns = [_checked_ids(users, "user", place), _checked_ids(items, "item", item_place)]
        if values is not None:
            self.time_kind = kind
            self._note_units(values, item_place)
        if self.columns.timestamp is not None:
            columns.append(pa.array(values if values is not None else [], pa.int64()))
        for name in self.columns.features:
            feature, blanks = self._feature(block.rows.column(name), place)
            columns.append(feature)
            trimmed += blanks
        if bounds is not None:
            columns[1:] = [pa.LargeListArray.from_arrays(bounds, column) for column in columns[1:]]
        if "begins" in self.schema.names:
            columns.append(block.rows.column("begins"))
        self.trimmed += trimmed
        return Block(pa.record_batch(columns, schema=self.schema), block.numbers, block.file, block.unit)

    def _feature(self, values: pa.Array, place: Callable[[int], str]) -> tuple[pa.Array, int]:
        """A side feature as ids, and how many had blanks around them.

        It is null where it is missing or an empty text. Truth values are the words that csv has for them.
        """
        values, trimmed = _decoded(values), 0
        if pa.types.is_boolean(values.type):
            values = pc.if_else(values, "true", "false").cast(pa.large_string())
        if self.source.format == "csv":
            plain = pc.utf8_trim(values, characters=" ")
            trimmed = pc.sum(pc.not_equal(plain, values)).as_py() or 0
            lower = pc.utf8_lower(plain)
            values = pc.if_else(pc.is_in(lower, pa.array(["true", "false"], lower.type)), lower, plain)
        if _is_text(values.type):
            values = pc.if_else(pc.equal(values, ""), None, values)
        # The rules of ids are for what is there.
        there = values.is_valid()
        at_row = np.flatnonzero(there.to_numpy(zero_copy_only=False))
        checked = _checked_ids(values.drop_null(), "side feature", lambda row: place(int(at_row[row])))
        return pc.replace_with_mask(pa.nulls(len(values), checked.type), there, checked), trimmed

    def _note_units(self, values: IntArray, place: Callable[[int], str]) -> None:
        if self.time_kind != "number" or (len(self._units) > 1 and "" in self._units):
            return
        unit = np.searchsorted(times.UNIT_BOUNDS, values, side="right")
        for code in np.unique(unit):
            # Between two bounds lies a unit at every second place, and no time of our days at the others.
            name = times.UNITS[code // 2] if code % 2 else ""
            if name not in self._units:
                first = int(np.argmax(unit == code))
                self._units[name] = f"{values[first]} at {place(first)}"


def _check_id_type(where: str, name: str, kind: pa.DataType) -> None:
    plain = _decoded_type(kind)
    if not (pa.types.is_integer(plain) or _is_text(plain)):
        raise refuse(where, f"the column {shown(name)} of type {kind}", "ids that are integers or strings", "cast the column")


def _decoded_type(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _decoded(array: pa.Array) -> pa.Array:
    """Values in place of a dictionary, and text in one layout."""
    if isinstance(array, pa.DictionaryArray):
        array = array.cast(array.type.value_type)
    return array.cast(pa.large_string()) if _is_text(array.type) else array


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _lengths(lists: pa.Array) -> IntArray:
    lengths: IntArray = pc.list_value_length(lists).cast(pa.int64()).to_numpy(zero_copy_only=False)
    return lengths


def _first(mask: pa.Array) -> int:
    return int(pc.index(mask, True).as_py())


def _checked_ids(ids: pa.Array, role: str, place: Callable[[int], str]) -> pa.Array:
    """Ids in their one type, after the rules that every id keeps."""
    if ids.null_count:
        raise refuse(place(_first(pc.is_null(ids))), f"a null {role} id", "an id")
    if pa.types.is_integer(ids.type):
        if pa.types.is_uint64(ids.type) and len(ids) and pc.max(ids).as_py() >= 2**63:
            large = _first(pc.greater_equal(ids, pa.scalar(2**63, pa.uint64())))
            raise refuse(place(large), f"the {role} id {ids[large]}", "integers below 2**63", "cast the column to strings")
        return ids.cast(pa.int64())
    if not len(ids):
        return ids
    _, offsets, data = ids.buffers()
    ends = np.frombuffer(offsets, dtype=np.int64, count=len(ids) + 1, offset=8 * ids.offset)
    lengths = np.diff(ends)
    raw = np.frombuffer(data, dtype=np.uint8)[int(ends[0]) : int(ends[-1])] if data is not None else np.zeros(0, np.uint8)
    bad = np.flatnonzero((lengths == 0) | (lengths > MAX_ID_BYTES))
    control = np.flatnonzero(_CONTROL[raw])
    first = [int(bad[0])] if bad.size else []
    if control.size:
        first.append(int(np.searchsorted(ends, ends[0] + control[0], side="right")) - 1)
    if first:
        found = ids[min(first)].as_py()
        raise refuse(
            place(min(first)),
            f"the {role} id {shown(found)}" if found else f"an empty {role} id",
            f"1 to {MAX_ID_BYTES} bytes without control characters",
        )
    return ids
