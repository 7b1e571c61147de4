"""From rows of events in a DuckDB table to the dataset's files, in bounded memory.

DuckDB numbers the ids, counts and sorts, and goes to its directory with what does not fit; the sorted events are streamed into
the Arrow file. Only the vocabularies and the users' counts are ever in memory as a whole.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from jagged.data.dataset import EVENTS, ITEMS, USERS, Notes, SequenceDataset, sealed, values_file
from jagged.data.errors import refuse
from jagged.data.sources import ROWS, Table
from jagged.data.vocabulary import Vocabulary, digest, infer_integers

_BLOCK_EVENTS = 1 << 18

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class BuildOptions:
    """What is made of the rows.

    Attributes:
        time_kind: of a dataset.
        typed: ids keep the type they come in; otherwise text ids that are all integers become int64.
        drop_duplicates: an event that has user, item and time of an earlier one is left out.
        min_events: of every user and of every item, in the end.
        features: names of the events' side features, whose values are in the columns `feature_0` and so on.
        notes: of the dataset, beside those made here.
    """

    time_kind: str = "none"
    typed: bool = True
    drop_duplicates: bool = False
    min_events: int = 1
    features: tuple[str, ...] = ()
    notes: Notes = field(default_factory=dict)


def build(table: Table, directory: Path, options: BuildOptions, advance: Callable[[int], object]) -> SequenceDataset:
    """Write the files of a dataset into an existing, empty directory.

    Args:
        table: rows of `user`, `item` and, where there are times, `time`; or of a user with lists of items and times. Used up.
        directory: where to.
        options: what is made of the rows.
        advance: called with the events written.

    Raises:
        DataError: there was not one event, or none is left.
    """
    notes = {**options.notes, "duplicate_users": 0, "empty_users": 0}
    timed = options.time_kind != "none"
    rows = _flat(table, timed, notes) if pa.types.is_large_list(table.types["item"]) else ROWS
    if not table.sql(f"SELECT count(*) FROM {rows}")[0][0]:
        raise refuse(table.name, "no events", "at least one user with an item")
    # Ids by their first appearance: a table keeps the order of what is put into it, and its `rowid` is the number of an id.
    for name in ("user", "item"):
        table.sql(f"CREATE TABLE {name}s AS SELECT {name} AS id FROM {rows} GROUP BY {name} ORDER BY min(rowid)")
    # Of a side feature the number 0 is a missing value.
    features = [f"feature_{place}" for place in range(len(options.features))]
    for name in features:
        seen = f"SELECT {name} AS id FROM {rows} WHERE {name} IS NOT NULL GROUP BY {name} ORDER BY min(rowid)"
        table.sql(f"CREATE TABLE {name}s AS {seen}")
    numbers = "".join(f"coalesce({name}s.rowid + 1, 0) AS {name}, " for name in features)
    joined = "".join(f" LEFT JOIN {name}s ON e.{name} = {name}s.id" for name in features)
    table.sql(
        f"CREATE TABLE events AS SELECT users.rowid AS user, items.rowid AS item, {'e.time, ' if timed else ''}{numbers}"
        f"e.rowid AS place FROM {rows} AS e JOIN users ON e.user = users.id JOIN items ON e.item = items.id{joined}"
    )
    table.sql(f"DROP TABLE {rows}")
    if options.drop_duplicates and timed:
        notes |= _without_duplicates(table, features)
    if options.min_events > 1:
        notes |= _core(table, options.min_events)
    vocabularies = []
    for name in ("user", "item", *features):
        parts = [batch.column(0) for batch in table.batches(f"SELECT id FROM {name}s ORDER BY rowid")]
        # A side feature may be missing everywhere.
        ids = pa.chunked_array(parts, None if parts else table.types[name]).combine_chunks()
        ids = ids.cast(pa.int64() if pa.types.is_integer(ids.type) else pa.large_string())
        vocabularies.append(Vocabulary(ids if options.typed else infer_integers(ids)))
    users, items, *values = vocabularies
    offsets = np.zeros(len(users) + 1, dtype=np.int64)
    counts = table.batches("SELECT count(*) FROM events GROUP BY user ORDER BY user")
    np.cumsum(np.concatenate([batch.column(0).to_numpy() for batch in counts]), out=offsets[1:])
    kinds = (*(["time"] if timed else []), *features)
    fingerprint = _write_events(table, directory / EVENTS, offsets, vocabularies, kinds, options.features, advance)
    users.save(directory / USERS)
    items.save(directory / ITEMS)
    for place, of in enumerate(values):
        of.save(directory / values_file(place))
    content = {
        "fingerprint": fingerprint,
        "num_users": len(users),
        "num_items": len(items),
        "num_events": int(offsets[-1]),
        "time_kind": options.time_kind,
        "features": list(options.features),
        "notes": notes,
    }
    return sealed(directory, content)


def _flat(table: Table, timed: bool, notes: Notes) -> str:
    """A row for each event of lists; counts the users that are there more than once, and those without an event."""
    begins = "AND begins" if "begins" in table.types else ""
    several = f"SELECT user FROM {ROWS} WHERE len(item) > 0 {begins} GROUP BY user HAVING count(*) > 1"
    notes["duplicate_users"] = table.sql(f"SELECT count(*) FROM ({several})")[0][0]
    empty = f"SELECT user FROM {ROWS} GROUP BY user HAVING sum(len(item)) = 0"
    notes["empty_users"] = table.sql(f"SELECT count(*) FROM ({empty})")[0][0]
    times = ", unnest(time) AS time" if timed else ""
    table.sql(f"CREATE TABLE flat AS SELECT user, unnest(item) AS item{times} FROM {ROWS}")
    table.sql(f"DROP TABLE {ROWS}")
    return "flat"


def _without_duplicates(table: Table, features: list[str]) -> Notes:
    before = table.sql("SELECT count(*) FROM events")[0][0]
    of_first = "".join(f"arg_min({name}, place) AS {name}, " for name in features)
    table.sql(
        f"CREATE TABLE kept AS SELECT user, item, time, {of_first}min(place) AS place FROM events GROUP BY user, item, time"
    )
    table.sql("DROP TABLE events")
    table.sql("ALTER TABLE kept RENAME TO events")
    dropped = before - table.sql("SELECT count(*) FROM events")[0][0]
    return {"dropped_duplicates": dropped} if dropped else {}


def _core(table: Table, least: int) -> Notes:
    """Leave users and items with at least so many events, each counted among what is left, and number their ids anew."""
    counts = "SELECT count(*), count(DISTINCT user), count(DISTINCT item) FROM events"
    before = table.sql(counts)[0]
    while sum(
        table.sql(f"DELETE FROM events WHERE {one} IN (SELECT {one} FROM events GROUP BY {one} HAVING count(*) < {least})")[0][0]
        for one in ("user", "item")
    ):
        pass
    after = table.sql(counts)[0]
    if not after[0]:
        found = f"no events of users and items that have at least {least} each, of {before[0]:,} events"
        raise refuse(table.name, found, "some", "lower min_events")
    if after == before:
        return {}
    for name in ("user", "item"):
        table.sql(f"CREATE TABLE kept_{name}s AS SELECT {name} AS former FROM events GROUP BY {name} ORDER BY min(place)")
        table.sql(
            f"CREATE TABLE new_{name}s AS SELECT id FROM kept_{name}s AS kept JOIN {name}s AS old ON kept.former = old.rowid "
            "ORDER BY kept.rowid"
        )
    table.sql(
        "CREATE TABLE kept AS SELECT * REPLACE (u.rowid AS user, i.rowid AS item) FROM events AS e "
        "JOIN kept_users AS u ON e.user = u.former JOIN kept_items AS i ON e.item = i.former"
    )
    for former, name in (("users", "new_users"), ("items", "new_items"), ("events", "kept")):
        table.sql(f"DROP TABLE {former}")
        table.sql(f"ALTER TABLE {name} RENAME TO {former}")
    names = ("events", "users", "items")
    return {f"{name}_below_min_events": old - new for name, old, new in zip(names, before, after, strict=True) if old > new}


def _write_events(
    table: Table,
    path: Path,
    offsets: IntArray,
    vocabularies: list[Vocabulary],
    columns: tuple[str, ...],
    features: tuple[str, ...],
    advance: Callable[[int], object],
) -> str:
    """Write the events in order, and return their fingerprint.

    `columns` are those of the table behind `item`.

    torch needs a column in one piece, so the file has one batch: it is written with room for the values, which then are filled in
    as they come.
    """
    timed = "time" in columns
    names = ("item_id", *("timestamp" if name == "time" else name for name in columns))
    places = _write_room(path, names, offsets)
    order = "user, time, place" if timed else "user, place"
    users, items, *values_of = vocabularies
    sha = hashlib.sha256(b"jagged.dataset.1:" + digest(users.ids) + digest(items.ids))
    for name, of in zip(features, values_of, strict=True):
        sha.update(f"{name}:".encode() + digest(of.ids))
    sha.update(offsets.tobytes())
    sha.update(b"item_id")
    written = 0
    with open(path, "r+b") as file:
        for batch in table.batches(f"SELECT {', '.join(('item', *columns))} FROM events ORDER BY {order}", _BLOCK_EVENTS):
            for place, column in zip(places, batch.columns, strict=True):
                values = np.ascontiguousarray(column.to_numpy(), dtype=np.int64)
                file.seek(place + 8 * written)
                file.write(values.data)
                if place == places[0]:
                    sha.update(values.data)
            written += len(batch)
            advance(len(batch))
        for name, place in zip(names[1:], places[1:], strict=True):
            sha.update(name.encode())
            file.seek(place)
            for part in _parts(8 * written):
                sha.update(file.read(part))
    return sha.hexdigest()


def _write_room(path: Path, names: tuple[str, ...], offsets: IntArray) -> list[int]:
    """Write the file with zeros for values, and return the place in it where each column's values begin."""
    size = 8 * int(offsets[-1])
    # Pages that nobody has written to are one page of zeros.
    zeros = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
    values = pa.Array.from_buffers(pa.int64(), size // 8, [None, pa.py_buffer(zeros)])
    lists = pa.LargeListArray.from_arrays(pa.array(offsets), values)
    batch = pa.record_batch([lists] * len(names), names=list(names))
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    with pa.memory_map(str(path)) as source:
        whole = source.read_buffer()
        written = pa.ipc.open_file(whole).get_batch(0)
        return [column.values.buffers()[1].address - whole.address for column in written.columns]


def _parts(size: int) -> Iterator[int]:
    for start in range(0, size, 8 * _BLOCK_EVENTS):
        yield min(8 * _BLOCK_EVENTS, size - start)
