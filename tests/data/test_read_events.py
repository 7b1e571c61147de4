from __future__ import annotations

import bz2
import datetime
import gzip
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from jagged.data import DataError, SequenceDataset, read_events
from tests.data import oracle

EVENTS = [("u2", "b", 30), ("u1", "a", 10), ("u2", "a", 10), ("u1", "c", 5), ("u2", "b", 30), ("u3", "d", 1), ("u2", "c", 30)]


def random_events(seed: int, count: int, users: int = 20, items: int = 30) -> list[tuple[str, str, int]]:
    rng = random.Random(seed)
    return [(f"u{rng.randrange(users)}", f"i{rng.randrange(items)}", rng.randrange(50)) for _ in range(count)]


def test_text_keeps_order_and_integers(tmp_path: Path) -> None:
    path = oracle.write_text(tmp_path / "e.txt", [(7, 3, 1, 3), (5, 9)])
    dataset = read_events(path)
    assert oracle.histories(dataset) == {7: [(3, None), (1, None), (3, None)], 5: [(9, None)]}
    assert dataset.users.ids.type == pa.int64()
    assert dataset.items.ids.to_pylist() == [3, 1, 9]
    assert (dataset.num_users, dataset.num_items, dataset.num_events, len(dataset)) == (2, 3, 4, 2)
    assert dataset.timestamps is None
    assert dataset.lengths.tolist() == [3, 1]


@pytest.mark.parametrize("write", [oracle.write_csv, oracle.write_parquet], ids=["csv", "parquet"])
def test_tables_sort_by_time_and_keep_ties_in_file_order(tmp_path: Path, write: object) -> None:
    path = write(tmp_path / ("e.csv" if write is oracle.write_csv else "e.parquet"), EVENTS)  # type: ignore[operator]
    dataset = read_events(path, duplicates="keep")
    assert oracle.histories(dataset) == {
        "u2": [("a", 10), ("b", 30), ("b", 30), ("c", 30)],
        "u1": [("c", 5), ("a", 10)],
        "u3": [("d", 1)],
    }
    assert dataset.users.ids.to_pylist() == ["u2", "u1", "u3"]
    assert dataset.notes == {"duplicate_users": 0, "empty_users": 0}


def test_formats_agree_and_so_do_their_fingerprints(tmp_path: Path) -> None:
    events = random_events(0, 500)
    one = read_events(oracle.write_csv(tmp_path / "e.csv", events), duplicates="keep")
    other = read_events(oracle.write_parquet(tmp_path / "e.parquet", events), duplicates="keep")
    assert oracle.histories(one) == oracle.histories(other) == oracle.from_events(events)
    assert one.fingerprint == other.fingerprint
    third = read_events(oracle.write_csv(tmp_path / "f.csv", [*events, ("u0", "i0", 99)]))
    assert third.fingerprint != one.fingerprint


def test_empty_and_duplicate_users_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "e.txt"
    path.write_text("a 1 2\nempty\n\nb 3\na 4\n  \nb\nempty\nc 5\n")
    dataset = read_events(path)
    assert oracle.histories(dataset) == {"a": [(1, None), (2, None), (4, None)], "b": [(3, None)], "c": [(5, None)]}
    assert dataset.notes == {"duplicate_users": 1, "empty_users": 1}


def test_lists_in_parquet(tmp_path: Path) -> None:
    table = pa.table(
        {
            "user_id": [3, 1, 3, 2],
            "item_id": pa.array([["x", "y"], ["z"], ["x"], []]),
            "timestamp": pa.array([[5, 1], [0], [3], []], pa.list_(pa.int32())),
        }
    )
    pq.write_table(table, tmp_path / "e.parquet")
    dataset = read_events(tmp_path / "e.parquet")
    assert oracle.histories(dataset) == {3: [("y", 1), ("x", 3), ("x", 5)], 1: [("z", 0)]}
    assert dataset.notes == {"duplicate_users": 1, "empty_users": 1}
    pq.write_table(table.drop_columns(["timestamp"]), tmp_path / "f.parquet")
    untimed = read_events(tmp_path / "f.parquet", timestamp_column="")
    assert oracle.histories(untimed) == {3: [("x", None), ("y", None), ("x", None)], 1: [("z", None)]}


def test_other_column_names_and_column_order(tmp_path: Path) -> None:
    path = tmp_path / "e.tsv"
    path.write_text("when\tnote\twhat\twho\n2\t\tb\tu\n1\tx\ta\tu\n")
    dataset = read_events(path, user_column="who", item_column="what", timestamp_column="when")
    assert oracle.histories(dataset) == {"u": [("a", 1), ("b", 2)]}


def test_file_order_must_be_stated(tmp_path: Path) -> None:
    path = tmp_path / "e.csv"
    path.write_text("user_id,item_id\n1,9\n1,8\n")
    with pytest.raises(DataError, match=r"e\.csv:1: found the columns .* expected a column 'timestamp'; .*timestamp_column=\"\""):
        read_events(path)
    for stated in (None, ""):
        assert oracle.histories(read_events(path, timestamp_column=stated)) == {1: [(9, None), (8, None)]}


def test_quotes_crlf_bom_and_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "e.csv"
    path.write_bytes('\ufeffuser_id,"item_id",timestamp\r\n"a, ""b""",é,1\r\n\r\n"7",8,2'.encode())
    assert oracle.histories(read_events(path)) == {'a, "b"': [("é", 1)], "7": [("8", 2)]}


@pytest.mark.parametrize(("suffix", "compress"), [(".gz", gzip.compress), (".bz2", bz2.compress)])
def test_compressed(tmp_path: Path, suffix: str, compress: object) -> None:
    path = tmp_path / f"e.txt{suffix}"
    path.write_bytes(compress(b"1 2 3\n") + compress(b"4 5\n"))  # type: ignore[operator]
    assert oracle.histories(read_events(path)) == {1: [(2, None), (3, None)], 4: [(5, None)]}


def test_folder_of_one_format_in_name_order(tmp_path: Path) -> None:
    oracle.write_csv(tmp_path / "b.csv", EVENTS[3:])
    oracle.write_csv(tmp_path / "a.csv", EVENTS[:3])
    (tmp_path / "_SUCCESS").touch()
    (tmp_path / ".hidden.txt").write_text("1 2\n")
    (tmp_path / "readme.md").write_text("no data")
    assert oracle.histories(read_events(tmp_path, duplicates="keep")) == oracle.from_events(EVENTS)
    oracle.write_text(tmp_path / "c.txt", [(1, 2)])
    with pytest.raises(DataError, match="several formats"):
        read_events(tmp_path)


@pytest.mark.parametrize(
    ("ids", "kind"),
    [
        (["1", "-5", "0"], pa.int64()),
        (["1", "007"], pa.large_string()),
        (["1", "+1"], pa.large_string()),
        (["1", "1" * 30], pa.large_string()),
    ],
)
def test_text_ids_are_integers_only_when_all_are(tmp_path: Path, ids: list[str], kind: pa.DataType) -> None:
    dataset = read_events(oracle.write_text(tmp_path / "e.txt", [("u", *ids)]))
    assert dataset.items.ids.type == kind
    assert [str(item) for item in dataset.items.ids.to_pylist()] == ids


def test_parquet_ids_keep_their_type(tmp_path: Path) -> None:
    events = [("1", "2", 3)]
    assert oracle.histories(read_events(oracle.write_parquet(tmp_path / "e.parquet", events))) == {"1": [("2", 3)]}


@pytest.mark.parametrize(
    "column",
    [
        pa.array([2, 1], pa.int8()),
        pa.array([2.0, 1.0]),
        pa.array(["2", "1"]),
        pa.array([2, 1], pa.uint64()),
    ],
    ids=["int8", "float", "text", "uint64"],
)
def test_number_times(tmp_path: Path, column: pa.Array) -> None:
    pq.write_table(pa.table({"user_id": [0, 0], "item_id": [5, 6], "timestamp": column}), tmp_path / "e.parquet")
    dataset = read_events(tmp_path / "e.parquet")
    assert oracle.histories(dataset) == {0: [(6, 1), (5, 2)]}
    assert dataset.time_kind == "number"


MOMENT = datetime.datetime(2024, 2, 29, 12, 30, 15, 250_000)
MICROSECONDS = int(MOMENT.replace(tzinfo=datetime.UTC).timestamp()) * 1_000_000 + 250_000


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        (pa.array([MOMENT], pa.timestamp("us")), "naive"),
        (pa.array([MOMENT], pa.timestamp("ms", "Europe/Berlin")), "zoned"),
        (pa.array([MICROSECONDS * 1000]).cast(pa.timestamp("ns")), "naive"),
        (pa.array(["2024-02-29T12:30:15.25"]), "naive"),
        (pa.array(["2024-02-29 12:30:15.250Z"]), "zoned"),
        (pa.array(["2024-02-29T13:30:15.25+01:00"]), "zoned"),
    ],
)
def test_calendar_times_become_microseconds(tmp_path: Path, column: pa.Array, kind: str) -> None:
    pq.write_table(pa.table({"user_id": [0], "item_id": [5], "timestamp": column}), tmp_path / "e.parquet", version="2.6")
    dataset = read_events(tmp_path / "e.parquet")
    assert dataset.timestamps is not None
    assert dataset.timestamps.tolist() == [MICROSECONDS]
    assert dataset.time_kind == kind


def test_dates(tmp_path: Path) -> None:
    path = tmp_path / "e.csv"
    path.write_text("user_id,item_id,timestamp\n1,1,1970-01-03\n1,2,1970-01-02\n")
    assert oracle.histories(read_events(path)) == {1: [(2, 86_400_000_000), (1, 2 * 86_400_000_000)]}


def test_dotdot_in_names_stays_a_name(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    path = oracle.write_text(tmp_path / "e.txt", [("../../etc", "..", "a/../b")])
    dataset = read_events(tmp_path / "a" / ".." / path.name, cache_directory=tmp_path / "a" / ".." / "cache")
    assert oracle.histories(dataset) == {"../../etc": [("..", None), ("a/../b", None)]}
    dataset.items.save(tmp_path / "items.arrow")
    dataset.save(tmp_path / "saved")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "cache", "e.txt", "items.arrow", "saved"]


def test_what_a_build_leaves_is_the_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    events = random_events(2, 400)
    path = oracle.write_csv(tmp_path / "e.csv", events)
    dataset = read_events(path, duplicates="keep")
    assert oracle.histories(dataset) == oracle.from_events(events)
    assert list((tmp_path / "temporary").iterdir()) == [dataset.directory]
    assert sorted(p.name for p in dataset.directory.iterdir()) == ["events.arrow", "items.arrow", "manifest.json", "users.arrow"]
    cached = read_events(path, duplicates="keep", cache_directory=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == [cached.directory]
    assert cached.fingerprint == dataset.fingerprint


def test_blanks_around_ids_of_csv_are_no_part_of_them(tmp_path: Path) -> None:
    (tmp_path / "e.csv").write_text('user_id,item_id,timestamp\n1, 2,3\n1 ,2,4\n" 1","b c ",5\n')
    dataset = read_events(tmp_path / "e.csv")
    assert oracle.histories(dataset) == {1: [("2", 3), ("2", 4), ("b c", 5)]}
    assert dataset.notes == {"duplicate_users": 0, "empty_users": 0, "trimmed_ids": 4}


SECOND = 1_700_000_000


@pytest.mark.parametrize("other", [1_000, 1_000_000, 1_000_000_000])
def test_times_of_two_units_are_refused(tmp_path: Path, other: int) -> None:
    lines = [f"{user},{user},{SECOND * (other if user == 7 else 1)}" for user in range(9)]
    path = tmp_path / "e.csv"
    path.write_text("\n".join(["user_id,item_id,timestamp", *lines, ""]))
    unit = {1_000: "milliseconds", 1_000_000: "microseconds", 1_000_000_000: "nanoseconds"}[other]
    with pytest.raises(DataError) as caught:
        read_events(path)
    assert str(caught.value) == (
        f"{path}: found times in seconds since 1970 ({SECOND} at {path}:2) and in {unit} ({SECOND * other} at {path}:9), "
        "expected one unit; multiply or divide one of them by a power of 1000"
    )
    # Numbers that are no times of our days say nothing of a unit.
    path.write_text("\n".join(["user_id,item_id,timestamp", *lines, "1,1,5", ""]))
    assert read_events(path).num_events == 10


def test_blocks_join_lines_across_their_borders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = random_events(2, 300)
    lines = [(f"u{u}", *[f"ïtem{i}" for i in range(u % 7)]) for u in range(60)]
    csv_path, text_path = oracle.write_csv(tmp_path / "e.csv", events), oracle.write_text(tmp_path / "e.txt", lines)
    whole = oracle.histories(read_events(csv_path, duplicates="keep")), oracle.histories(read_events(text_path))
    for size in (1, 2, 13, 64):
        monkeypatch.setattr("jagged.data.files.BLOCK_BYTES", size)
        assert (oracle.histories(read_events(csv_path, duplicates="keep")), oracle.histories(read_events(text_path))) == whole
    assert whole == (oracle.from_events(events), oracle.parse_text(text_path.read_bytes()))


def test_progress_is_silent_when_fast(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    read_events(oracle.write_text(tmp_path / "e.txt", [(1, 2)]))
    assert capfd.readouterr() == ("", "")


def test_tensors_are_int64(tmp_path: Path) -> None:
    dataset = read_events(oracle.write_csv(tmp_path / "e.csv", EVENTS), duplicates="keep")
    assert isinstance(dataset, SequenceDataset)
    assert dataset.timestamps is not None
    assert {t.dtype for t in (dataset.offsets, dataset.item_ids, dataset.timestamps)} == {torch.int64}
    assert repr(dataset) == "SequenceDataset(3 users, 4 items, 7 events)"
