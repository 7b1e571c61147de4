"""Rows of numbers that come back sorted, in chunks: they wait in memory up to a limit, beyond it in a DuckDB table on disk."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from tempfile import gettempdir
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from jagged.data.sources import Table

AnyArray = npt.NDArray[Any]
Columns = dict[str, AnyArray]

#: Rows that wait in memory: of eight columns a quarter of a GiB.
LIMIT = 1 << 22
#: Rows that are given back at once.
CHUNK = 1 << 18
# Batches are joined to blocks of about so many rows: small arrays cost more than what is in them.
_BLOCK = 1 << 16
_CURE = "set TMPDIR to a directory on a disk with room"


class SortedRows:
    """Columns of numbers that grow, and are read in an order as often as one likes.

    Args:
        types: of the columns, by name: float64 or int64.
        limit: rows that wait in memory. When there are more, all go to a table in a temporary directory, which is removed by
            `close`, or with this object.
    """

    def __init__(self, types: Mapping[str, type[np.generic]], limit: int = LIMIT) -> None:
        self.types, self._limit = dict(types), limit
        self._arriving: list[Columns] = []
        self._blocks: list[Columns] = []
        self._num_arriving = self._in_memory = self._on_disk = 0
        self._table: Table | None = None
        self._closing = ExitStack()
        self._finalize = weakref.finalize(self, self._closing.close)

    def __len__(self) -> int:
        return self._num_arriving + self._in_memory + self._on_disk

    @property
    def is_on_disk(self) -> bool:
        """Whether there were more rows than the limit."""
        return self._table is not None

    def close(self) -> None:
        """Remove what lies on disk; nothing can be read any more."""
        self._finalize()

    def add(self, columns: Mapping[str, AnyArray]) -> None:
        """Add rows.

        Args:
            columns: by name the values of each, `[N]`.

        Raises:
            DataError: the temporary directory has no room, or cannot be written.
        """
        rows = {name: np.ascontiguousarray(columns[name], dtype=kind) for name, kind in self.types.items()}
        self._arriving.append(rows)
        self._num_arriving += len(next(iter(rows.values())))
        if self._num_arriving >= min(_BLOCK, self._limit + 1):
            self._join()
            if self._in_memory > self._limit:
                self._spill()

    def chunks(
        self, by: Sequence[str] = (), columns: Sequence[str] = (), where: tuple[str, int] | None = None
    ) -> Iterator[Columns]:
        """Rows in ascending order of some columns, in chunks; without `by` in the order in which they came.

        Rows that are equal in `by` come in any order, so what is computed of them must not depend on it.

        Args:
            by: the columns that decide, the first one first; `-score` for a column of floats in descending order.
            columns: those that are read; none for all.
            where: a column, and the value in it of the rows that are read; None for all rows.

        Raises:
            DataError: the temporary directory has no room to sort in.
        """
        names = tuple(columns) or tuple(self.types)
        self._join()
        if self._table is None:
            yield from self._from_memory(by, names, where)
            return
        if self._in_memory:
            self._spill()
        yield from self._from_disk(by, names, where)

    def _from_memory(self, by: Sequence[str], names: Sequence[str], where: tuple[str, int] | None) -> Iterator[Columns]:
        if len(self._blocks) > 1:
            self._blocks = [_joined(self._blocks)]
        if not self._blocks:
            return
        rows = self._blocks[0]
        if where is not None:
            chosen = np.flatnonzero(rows[where[0]] == where[1])
            rows = {name: rows[name][chosen] for name in {*(key.removeprefix("-") for key in by), *names}}
        keys = [-rows[key[1:]] if key.startswith("-") else rows[key] for key in reversed(by)]
        order = np.lexsort(keys) if keys else None
        for first in range(0, len(rows[names[0]]), CHUNK):
            place: Any = slice(first, first + CHUNK) if order is None else order[first : first + CHUNK]
            yield {name: rows[name][place] for name in names}

    def _from_disk(self, by: Sequence[str], names: Sequence[str], where: tuple[str, int] | None) -> Iterator[Columns]:
        from jagged.data.sources import storing

        assert self._table is not None
        query = f"SELECT {', '.join(names)} FROM kept"
        query += f" WHERE {where[0]} = {int(where[1])}" if where is not None else ""
        keys = [f"{key[1:]} DESC" if key.startswith("-") else key for key in by]
        query += f" ORDER BY {', '.join(keys)}" if keys else ""
        batches = self._table.batches(query, CHUNK)
        while True:
            # DuckDB's complaints of the disk come from here; those of whoever takes the chunk are not turned into others.
            with storing(gettempdir(), _CURE):
                batch = next(batches, None)
            if batch is None:
                return
            yield {name: batch.column(place).to_numpy() for place, name in enumerate(names)}

    def _join(self) -> None:
        if self._arriving:
            self._blocks.append(_joined(self._arriving))
            self._in_memory += self._num_arriving
            self._arriving, self._num_arriving = [], 0

    def _spill(self) -> None:
        import pyarrow as pa

        from jagged.data.sources import new_table, storing

        rows = pa.Table.from_batches([pa.record_batch(block) for block in self._blocks])
        if self._table is None:
            self._table = self._closing.enter_context(new_table("rows of metrics", rows.schema, cure=_CURE))
            statement = "CREATE TABLE kept AS SELECT * FROM arriving"
        else:
            statement = "INSERT INTO kept SELECT * FROM arriving"
        with storing(gettempdir(), _CURE):
            self._table.connection.register("arriving", rows)
            self._table.sql(statement)
            self._table.connection.unregister("arriving")
        self._on_disk += self._in_memory
        self._blocks, self._in_memory = [], 0


def _joined(parts: Sequence[Columns]) -> Columns:
    return parts[0] if len(parts) == 1 else {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
