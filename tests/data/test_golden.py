"""What the reader makes of each format stays the same bit for bit: datasets that runs and caches hold are told by it."""

from __future__ import annotations

import gzip
import hashlib
import random
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jagged.data import SequenceDataset, read_events, synthetic_sessions
from jagged.data.vocabulary import digest
from tests.data import oracle


def events(names: bool) -> list[tuple[object, object, int]]:
    rng = random.Random(7)
    rows: list[tuple[object, object, int]] = []
    for _ in range(3000):
        user, item = rng.randrange(90), int(rng.paretovariate(1)) % 200
        time = rng.randrange(40, 2000)
        rows.append((f"user {user}é", f"i-{item}", time) if names else (user * 7 - 30, item, time))
    return rows


def lists() -> pa.Table:
    users: dict[object, list[tuple[object, int]]] = {}
    for user, item, time in events(True):
        users.setdefault(user, []).append((item, time))
    rows = [(user, part) for user, all_ in users.items() for part in (all_[:9], [], all_[9:])]
    random.Random(3).shuffle(rows)
    kinds = pa.schema(
        [
            ("user_id", pa.string()),
            ("item_id", pa.large_list(pa.string())),
            ("timestamp", pa.large_list(pa.timestamp("ms", "UTC"))),
        ]
    )
    return pa.table(
        [[u for u, _ in rows], [[i for i, _ in r] for _, r in rows], [[t for _, t in r] for _, r in rows]], schema=kinds
    )


def text(path: Path) -> Path:
    table = lists()
    lines = zip(table.column("user_id").to_pylist(), table.column("item_id").to_pylist(), strict=True)
    path.mkdir()
    body = "".join(f"{user.replace(' ', '')}\t{' '.join(items)}\n" for user, items in lines)
    cut = body.index("\n", len(body) // 2) + 1
    (path / "a.txt").write_text(body[:cut])
    (path / "b.txt.gz").write_bytes(gzip.compress(body[cut:].encode()))
    return path


def numbers(path: Path) -> Path:
    rows = [f"{user} {' '.join(str((user * k) % 83) for k in range(user % 11))}\n" for user in range(300)]
    path = path.with_suffix(".txt")
    path.write_text("".join(rows))
    return path


def csv(path: Path) -> Path:
    return oracle.write_csv(path.with_suffix(".csv"), events(False))


def csv_names(path: Path) -> Path:
    path.mkdir()
    rows = events(True)
    oracle.write_csv(path / "b.csv", rows[:100])
    oracle.write_csv(path / "a.csv", rows[100:])
    return path


def parquet(path: Path) -> Path:
    return oracle.write_parquet(path.with_suffix(".parquet"), events(False), row_group_size=700)


def parquet_names(path: Path) -> Path:
    return oracle.write_parquet(path.with_suffix(".parquet"), events(True), row_group_size=700)


def parquet_lists(path: Path) -> Path:
    path = path.with_suffix(".parquet")
    pq.write_table(lists(), path)
    return path


CASES: dict[str, tuple[Callable[[Path], Path], dict[str, str]]] = {
    "text": (text, {}),
    "numbers": (numbers, {}),
    "csv": (csv, {}),
    "csv untimed": (csv, {"timestamp_column": ""}),
    "csv names": (csv_names, {}),
    "parquet": (parquet, {}),
    "parquet names": (parquet_names, {}),
    "parquet names untimed": (parquet_names, {"timestamp_column": ""}),
    "parquet lists": (parquet_lists, {}),
}
GOLDEN = {
    "text": ("50414075f34e1388729fba91a35d7189", 90, 88, 3000, 90, 0),
    "numbers": ("df0fde4dc062e2c551f20e3713dd5ed0", 272, 83, 1488, 0, 28),
    "csv": ("d8cd410b037884e92071585dcb3337a9", 90, 88, 3000, 0, 0),
    "csv untimed": ("1e8ef77993ccf493c7e5992bd076cd3a", 90, 88, 3000, 0, 0),
    "csv names": ("305c0ce93ee44a783faed67440b86d02", 90, 88, 3000, 0, 0),
    "parquet": ("d8cd410b037884e92071585dcb3337a9", 90, 88, 3000, 0, 0),
    "parquet names": ("16efaaa2d5c8efb3f5b5b37ccb7f6a7a", 90, 88, 3000, 0, 0),
    "parquet names untimed": ("f1e9d3b1ff6de3897509ffff579f2e65", 90, 88, 3000, 0, 0),
    "parquet lists": ("e926883277f4258639239bb01961c2d8", 90, 88, 3000, 90, 0),
}


def summary(dataset: SequenceDataset) -> tuple[object, ...]:
    ids = digest(dataset.users.ids) + digest(dataset.items.ids)
    told = hashlib.sha256(dataset.fingerprint.encode() + ids).hexdigest()[:32]
    notes = [dataset.notes[name] for name in ("duplicate_users", "empty_users")]
    return told, dataset.num_users, dataset.num_items, dataset.num_events, *notes


@pytest.mark.parametrize("case", CASES)
def test_every_format(tmp_path: Path, case: str) -> None:
    write, options = CASES[case]
    assert summary(read_events(write(tmp_path / "e"), duplicates="keep", **options)) == GOLDEN[case]  # type: ignore[arg-type]


def test_the_sample() -> None:
    assert synthetic_sessions()[0].fingerprint == "25d8e21579a195073b6e5956ee9e15f2ee6c079199477b71fb73c29be5c8c35a"
    short = synthetic_sessions(5, num_users=300)[0]
    assert short.fingerprint == "c4407d9c2d7f0b315a8aae4bcd8b0129f82afaac916c7b191a913052c95e7706"
