"""The events that histories are views of: rows of the dataset itself, or of an event table beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jagged.data.expressions import LISTS
from jagged.data.histories import visible
from jagged.data.schema import Column, Kind, Schema

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
AnyArray = npt.NDArray[Any]

#: What an event of a history shows beside its time and its numbers.
SHOWN = (Kind.CANDIDATE, Kind.ID, Kind.EVENT)


class Columns:
    """Stored columns of a table's rows, which are mapped when they are first asked for.

    Attributes:
        directory: with the files.
        schema: what the columns are.
        kinds: the type of each file, by its key.
        prefix: before the keys of the table's own files.
    """

    def __init__(self, directory: Path, schema: Schema, num_rows: int, kinds: Mapping[str, str], prefix: str = "") -> None:
        self.directory = directory
        self.schema = schema
        self._num_rows = num_rows
        self._kinds = kinds
        self._prefix = prefix
        self._columns: dict[str, tuple[AnyArray, ...]] = {}

    @property
    def num_rows(self) -> int:
        """Rows."""
        return self._num_rows

    def __len__(self) -> int:
        return self._num_rows

    @property
    def source(self) -> IntArray:
        """The number of each row in the source, from 0, int64 `[n]`; rows of csv that cannot be read have none."""
        return self._arrays(f"{self._prefix}source")[0]

    def column(self, name: str) -> AnyArray:
        """The values of a column without lists, `[n]`.

        Ids are int32 codes, -1 where one is missing; numbers, labels and weights float32, NaN where one is missing; times int64.
        """
        if self.schema[name].kind in LISTS:
            raise KeyError(name)
        return self._arrays(self._key(name))[0]

    def one(self, kind: Kind) -> AnyArray | None:
        """The values of the column of a kind of which there is one at most, as `column` gives them; None where there is none."""
        column = self.schema.one(kind)
        return None if column is None else self.column(column.name)

    def list_column(self, name: str) -> tuple[IntArray, AnyArray]:
        """A list column: int64 `[n + 1]` offsets and the values of all rows, int32 codes or float32 numbers.

        A missing list stands as a list of one missing value; an empty one has none.
        """
        offsets, values = self._arrays(self._key(name))
        return offsets, values

    def release(self) -> None:
        """Forget the mapped columns, so that their pages count for nobody; who has an array keeps it."""
        self._columns.clear()

    def _key(self, name: str) -> str:
        return f"{self._prefix}column-{self.schema.names.index(name)}"

    def _arrays(self, key: str) -> tuple[AnyArray, ...]:
        from jagged.data.records import read_column

        if key not in self._columns:
            kind = self._kinds.get(key)
            if kind is None:
                raise AttributeError(f"{key}: the dataset has no such values")
            self._columns[key] = read_column(self.directory / f"{key}.arrow", kind, mapped=True)
        return self._columns[key]


class EventLog:
    """The events that a dataset's views `[start, stop)` are ranges of, in the order of user, time and place in the source.

    Attributes:
        table: whose rows the events are: the dataset, or the event table beside it.
        is_own: whether it is the dataset itself.
        lists: list columns of ids that events show.
        labels: names of labels that events show.
        weights: the name of the column with a weight for each event, or None.
    """

    def __init__(
        self,
        table: Columns,
        *,
        is_own: bool,
        lists: tuple[str, ...] = (),
        labels: tuple[str, ...] = (),
        weights: str | None = None,
        places: IntArray | None = None,
    ) -> None:
        self.table = table
        self.is_own = is_own
        self.lists = [table.schema[name] for name in lists]
        self.labels = labels
        self.weights = weights
        self._places = places

    def __len__(self) -> int:
        return len(self.table) if self._places is None else len(self._places)

    @property
    def ids(self) -> list[Column]:
        """The columns of `Batch.history`."""
        return self.table.schema.of_kind(*SHOWN)

    @property
    def numbers(self) -> list[Column]:
        """The columns of `Batch.history_numbers`."""
        return self.table.schema.of_kind(Kind.NUMBER)

    @property
    def time(self) -> str:
        """The column of times."""
        column = self.table.schema.one(Kind.TIME)
        assert column is not None
        return column.name

    @property
    def user(self) -> str:
        """The column of users."""
        column = self.table.schema.one(Kind.USER)
        assert column is not None
        return column.name

    def shows(self, column: Column) -> bool:
        """Whether batches have a column's values of events, so that training learns from them."""
        return column.kind in (*SHOWN, Kind.NUMBER) or column in self.lists

    def rows(self, events: IntArray) -> IntArray:
        """The table's rows of some events."""
        return events if self._places is None else self._places[events]

    def seen(self, start: IntArray, stop: IntArray, rows: IntArray) -> BoolArray:
        """Which of the table's rows the views of some rows hold, bool `[rows of the table]`."""
        found = visible(start, stop, rows, len(self))
        if self._places is None:
            return found
        of_table = np.zeros(len(self.table), dtype=np.bool_)
        of_table[self._places[found]] = True
        return of_table
