"""A slow, independent reading of the three formats in plain Python, and the writers that the tests share."""

from __future__ import annotations

import csv
import io
import re
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jagged.data import SequenceDataset
from jagged.data.build import BuildOptions, build
from jagged.data.dataset import own_temporary
from jagged.data.sources import new_table
from jagged.data.tabular import Block

Event = tuple[object, object, int]
Histories = dict[object, list[tuple[object, int | None]]]

INTEGER = re.compile(r"0|-?[1-9][0-9]{0,18}")


def histories(dataset: SequenceDataset) -> Histories:
    """A dataset as `{user: [(item, time), ...]}` in the users' own ids."""
    users, items = dataset.users.ids.to_pylist(), dataset.items.ids.to_pylist()
    offsets, dense = dataset.offsets.tolist(), dataset.item_ids.tolist()
    times = dataset.timestamps.tolist() if dataset.timestamps is not None else [None] * len(dense)
    return {user: [(items[dense[i]], times[i]) for i in range(offsets[u], offsets[u + 1])] for u, user in enumerate(users)}


def from_events(events: Iterable[tuple[object, object, int | None]]) -> Histories:
    """What a dataset of these events in file order must be: users by first appearance, events by time, ties in file order."""
    result: Histories = {}
    for user, item, time in events:
        result.setdefault(user, []).append((item, time))
    for rows in result.values():
        if rows[0][1] is not None:
            rows.sort(key=lambda row: row[1])
    return result


def infer(values: Sequence[str]) -> list[object]:
    """Text ids as integers when all of them are integers' own spelling within int64."""
    if all(INTEGER.fullmatch(value) and -(2**63) <= int(value) < 2**63 for value in values):
        return [int(value) for value in values]
    return list(values)


def parse_text(data: bytes) -> Histories:
    """Text lines; raises anything at all for bytes that are not valid."""
    users, items = [], []
    text = data.decode("utf-8").removeprefix("\ufeff")
    for line in text.replace("\r\n", "\n").split("\n"):
        if any(ord(c) < 32 and c != "\t" for c in line) or "\x7f" in line:
            raise ValueError("control character")
        fields = [field for field in re.split("[ \t]+", line) if field]
        if any(len(field.encode()) > 1024 for field in fields):
            raise ValueError("long id")
        users += fields[:1] * (len(fields) - 1)
        items += fields[1:]
    if not users:
        raise ValueError("no events")
    return from_events(zip(infer(users), infer(items), [None] * len(users), strict=True))


def parse_csv(data: bytes) -> Histories:
    """A csv table with user_id, item_id and integer timestamps, without its exact duplicates."""
    text = data.decode("utf-8").removeprefix("\ufeff").replace("\r\n", "\n")
    if any((ord(c) < 32 and c not in "\t\n") or c == "\x7f" for c in text):
        raise ValueError("control character")
    header, *rows = [row for row in csv.reader(io.StringIO(text, newline=""), strict=True) if row]
    header = [name.strip() for name in header]
    if any(len(row) != len(header) for row in rows) or not rows:
        raise ValueError("ragged")
    if not all(header.count(name) == 1 for name in ("user_id", "item_id", "timestamp")):
        raise ValueError("columns")
    users, items, times = ([row[header.index(name)] for row in rows] for name in ("user_id", "item_id", "timestamp"))
    users, items = ([value.strip(" ") for value in values] for values in (users, items))
    if not all(0 < len(value.encode()) <= 1024 and not re.search("[\t\n]", value) for value in [*users, *items]):
        raise ValueError("ids")
    if not all(re.fullmatch(r"-?[0-9]{1,19}(\.0*)?", value) for value in times):
        raise ValueError("times")
    numbers = [int(value.split(".")[0]) for value in times]
    if not all(-(2**63) <= value < 2**63 for value in numbers):
        raise ValueError("times")
    return from_events(dict.fromkeys(zip(infer(users), infer(items), numbers, strict=True)))


def parse_parquet(path: Path) -> Histories:
    """A parquet table of one event a row, read at once by pyarrow with its checksums, without its exact duplicates."""
    table = pq.read_table(path, page_checksum_verification=True)
    columns = (table.column(name).to_pylist() for name in ("user_id", "item_id", "timestamp"))
    return from_events(dict.fromkeys(zip(*columns, strict=True)))


def write_csv(path: Path, events: Sequence[Event]) -> Path:
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["user_id", "item_id", "timestamp"])
        writer.writerows(events)
    return path


def write_parquet(path: Path, events: Sequence[Event], **options: object) -> Path:
    columns = [pa.array(column) for column in zip(*events, strict=True)]
    pq.write_table(pa.table(columns, names=["user_id", "item_id", "timestamp"]), path, **options)
    return path


def write_text(path: Path, lines: Sequence[Sequence[object]]) -> Path:
    path.write_text("".join(" ".join(map(str, line)) + "\n" for line in lines), encoding="utf-8")
    return path


def dataset(users: Sequence[Sequence[int]], times: Sequence[Sequence[int]] | None = None) -> SequenceDataset:
    """A dataset of these users' items (and times), in a temporary directory; users without items are left out."""
    directory = Path(tempfile.mkdtemp(prefix="jagged-test-"))
    columns = {"user": pa.array(range(len(users)), pa.int64()), "item": pa.array(list(users), pa.large_list(pa.int64()))}
    if times is not None:
        columns["time"] = pa.array(list(times), pa.large_list(pa.int64()))
    rows = pa.record_batch(columns)
    with new_table("test", rows.schema) as table:
        table.fill([Block(rows, np.arange(len(users)), "test", "row ")])
        return own_temporary(build(table, directory, BuildOptions("none" if times is None else "number"), lambda count: None))
