from __future__ import annotations

import json
import logging
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
import torch

from jagged.artifacts import MANIFEST, write_manifest
from jagged.data import DataError, SequenceDataset, read_events
from jagged.data import events as events_module
from jagged.data.dataset import EVENTS, ITEMS, USERS
from tests.data import oracle
from tests.seeds import generators

LONG = os.environ.get("JAGGED_TEST_LONG") == "1"
EVENT_ROWS = [(f"u{i % 13}", f"i{i * i % 31}", i) for i in range(200)]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return oracle.write_csv(tmp_path / "e.csv", EVENT_ROWS)


@pytest.fixture
def saved(table: Path, tmp_path: Path) -> Path:
    read_events(table).save(tmp_path / "saved")
    return tmp_path / "saved"


def test_tensors_are_views_of_the_arrow_file(table: Path) -> None:
    dataset = read_events(table)
    with pa.memory_map(str(dataset.directory / EVENTS)) as source:
        batch = pa.ipc.open_file(source).get_batch(0)
    mapped = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(EVENTS)]
    ranges = [tuple(int(end, 16) for end in line[0].split("-")) for line in mapped]
    assert dataset.timestamps is not None
    for tensor, array in (
        (dataset.offsets, batch.column("item_id").offsets),
        (dataset.item_ids, batch.column("item_id").values),
        (dataset.timestamps, batch.column("timestamp").values),
    ):
        assert tensor.tolist() == array.to_pylist()
        assert any(first <= tensor.data_ptr() < last for first, last in ranges)
    assert all(line[1].startswith("r--") for line in mapped)


def test_an_arrow_column_becomes_a_tensor_without_a_copy(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    original = pa.ipc.open_file

    class Spy:
        def __init__(self, source: object) -> None:
            self.reader = original(source)
            self.schema = self.reader.schema

        num_record_batches = 1

        def get_batch(self, index: int) -> pa.RecordBatch:
            seen.append(self.reader.get_batch(index))
            return seen[-1]

    directory = read_events(table, cache_directory=table.parent / "cache").directory
    monkeypatch.setattr("jagged.data.dataset.pa.ipc.open_file", Spy)
    dataset = SequenceDataset(directory, json.loads((directory / MANIFEST).read_text()))
    assert dataset.item_ids.data_ptr() == seen[0].column("item_id").values.buffers()[1].address
    assert dataset.offsets.data_ptr() == seen[0].column("item_id").buffers()[1].address
    assert dataset.timestamps is not None
    assert dataset.timestamps.data_ptr() == seen[0].column("timestamp").values.buffers()[1].address


def test_save_and_load(table: Path, tmp_path: Path) -> None:
    dataset = read_events(table)
    dataset.save(tmp_path / "deep" / "saved")
    again = SequenceDataset.load(tmp_path / "deep" / "saved")
    assert oracle.histories(again) == oracle.histories(dataset)
    assert (again.fingerprint, again.notes, again.time_kind) == (dataset.fingerprint, dataset.notes, "number")
    dataset.save(tmp_path / "deep" / "saved")
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["saved"]
    other = read_events(oracle.write_text(tmp_path / "e.txt", [(1, 2)]))
    with pytest.raises(DataError, match="found another dataset, expected a directory that does not exist yet"):
        other.save(tmp_path / "deep" / "saved")


def test_a_pickle_of_a_dataset_is_the_name_of_its_directory(saved: Path) -> None:
    dataset = SequenceDataset.load(saved)
    sent = pickle.dumps(dataset)
    assert len(sent) < 3000
    assert torch.equal(pickle.loads(sent).item_ids, dataset.item_ids)


def test_every_damaged_byte_is_found_and_its_file_named(saved: Path) -> None:
    files = [saved / name for name in (EVENTS, USERS, ITEMS, MANIFEST)]
    for trial, rng in enumerate(generators(300 if LONG else 60)):
        path = files[trial % 4]
        whole = path.read_bytes()
        at = rng.randrange(len(whole))
        damaged = whole[:at] if trial % 5 == 0 else whole[:at] + bytes([whole[at] ^ (1 << rng.randrange(8))]) + whole[at + 1 :]
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=path.name) as caught:
            SequenceDataset.load(saved)
        assert "\n" not in str(caught.value)
        path.write_bytes(whole)
    SequenceDataset.load(saved)


@pytest.mark.parametrize("name", [EVENTS, USERS, ITEMS, MANIFEST])
def test_a_missing_file_is_named(saved: Path, name: str) -> None:
    (saved / name).unlink()
    with pytest.raises(DataError, match=name):
        SequenceDataset.load(saved)


def test_a_planted_pickle_does_not_run(saved: Path, tmp_path: Path) -> None:
    class Plant:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(tmp_path / "planted"),)

    for name in (EVENTS, USERS, ITEMS, MANIFEST):
        copy = tmp_path / f"copy-{name}"
        shutil.copytree(saved, copy)
        (copy / name).write_bytes(pickle.dumps(Plant()))
        with pytest.raises(DataError, match=name):
            SequenceDataset.load(copy)
    assert not (tmp_path / "planted").exists()


@pytest.mark.parametrize(
    ("offsets", "items", "expected"),
    [
        ([0, 5, 3], [0, 1, 0], "offsets that do not fit"),
        ([1, 2, 3], [0, 1, 0], "offsets that do not fit"),
        ([0, 2, 3], [0, 1, 2], "item ids out of range"),
        ([0, 2, 3], [0, -1, 1], "item ids out of range"),
    ],
)
def test_a_well_sealed_dataset_with_ids_out_of_range_is_refused(
    tmp_path: Path, offsets: list[int], items: list[int], expected: str
) -> None:
    read_events(oracle.write_text(tmp_path / "e.txt", [("a", "x", "y"), ("b", "x")])).save(tmp_path / "d")
    content = json.loads((tmp_path / "d" / MANIFEST).read_text())
    buffers = [None, pa.py_buffer(torch.tensor(offsets).numpy())]
    column = pa.Array.from_buffers(pa.large_list(pa.int64()), 2, buffers, children=[pa.array(items)])
    with (
        pa.OSFile(str(tmp_path / "d" / EVENTS), "wb") as sink,
        pa.ipc.new_file(sink, pa.schema([("item_id", column.type)])) as writer,
    ):
        writer.write_batch(pa.record_batch([column], names=["item_id"]))
    kept = {key: content[key] for key in content if key not in ("format_version", "files", "sha256")}
    write_manifest(tmp_path / "d", content["files"], kept)
    with pytest.raises(DataError, match=expected):
        SequenceDataset.load(tmp_path / "d")


def test_the_cache_is_used_until_a_file_or_an_option_changes(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    first = read_events(table, cache_directory=cache)
    with monkeypatch.context() as patched:
        patched.setattr(events_module, "_build", lambda *args: pytest.fail("built again"))
        second = read_events(table, cache_directory=cache)
        assert second.directory == first.directory
        assert oracle.histories(second) == oracle.histories(first)
    assert read_events(table, cache_directory=cache, timestamp_column="").timestamps is None
    oracle.write_csv(table, [*EVENT_ROWS[:-1], ("u0", "new", 199)])
    assert "new" in read_events(table, cache_directory=cache).items.ids.to_pylist()
    assert len(list(cache.iterdir())) == 3


@pytest.mark.parametrize("name", [EVENTS, USERS, ITEMS, MANIFEST])
def test_a_damaged_cache_is_found_and_built_again(
    table: Path, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "cache"
    first = read_events(table, cache_directory=cache)
    histories, directory = oracle.histories(first), first.directory
    del first
    data = bytearray((directory / name).read_bytes())
    data[len(data) // 2] ^= 1
    (directory / name).write_bytes(data)
    with caplog.at_level(logging.WARNING, "jagged"):
        again = read_events(table, cache_directory=cache)
    assert name in caplog.text
    assert oracle.histories(again) == histories
    assert [p.name for p in cache.iterdir()] == [directory.name]


def test_two_processes_may_fill_one_cache(table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    build = events_module._build

    def slower(*args: object) -> SequenceDataset:
        monkeypatch.setattr(events_module, "_build", build)
        read_events(table, cache_directory=cache)
        return build(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(events_module, "_build", slower)
    assert oracle.histories(read_events(table, cache_directory=cache)) == oracle.from_events(EVENT_ROWS)
    assert len(list(cache.iterdir())) == 1


def test_old_leftovers_of_a_killed_process_are_removed(table: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for name, age in ((".old.77-0123abcd.tmp", 100_000), (".new.78-0123abcd.tmp", 0)):
        (cache / name).mkdir(parents=True)
        then = (cache / name).stat().st_mtime - age
        os.utime(cache / name, (then, then))
    read_events(table, cache_directory=cache)
    assert (cache / ".new.78-0123abcd.tmp").exists()
    assert not (cache / ".old.77-0123abcd.tmp").exists()


BOUNDED = """
import resource, sys
from jagged.data import read_events
path, cache, limit, memory = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
import duckdb, jagged.data.build, jagged.data.events, jagged.data.files, torch
jagged.data.sources._MEMORY, jagged.data.sources._THREADS = memory, 1
jagged.data.files.BLOCK_BYTES = 1 << 20
def anonymous():
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (anonymous() + limit,) * 2)
dataset = read_events(path, cache_directory=cache, progress=False, duplicates="keep")
print(dataset.num_users, dataset.num_items, dataset.num_events, int(dataset.item_ids.sum()), int(dataset.timestamps.sum()))
"""


def run_bounded(path: Path, cache: Path, limit: int, memory: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"}
    # A thread's stack counts as data, 8 MiB where nothing else is said, and how many threads Arrow starts depends on how busy the
    # machine is: with small stacks the limit is on what the reader holds.
    small_stacks = ["sh", "-c", 'ulimit -s 1024 && exec "$@"', "sh"]
    command = [*small_stacks, sys.executable, "-W", "ignore", "-c", BOUNDED, str(path), str(cache), str(limit), memory]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=580, check=False)


def write_large(path: Path, events: int) -> None:
    generator = torch.Generator().manual_seed(0)
    with open(path, "w") as file:
        file.write("user_id,item_id,timestamp\n")
        for start in range(0, events, 1 << 18):
            size = min(1 << 18, events - start)
            rows = torch.randint(0, 1 << 30, (3, size), generator=generator)
            rows[0] %= 5000
            rows[1] %= 2000
            file.write("".join(f"{u},{i},{t}\n" for u, i, t in rows.T.tolist()))


def test_reading_stays_within_a_memory_bound(tmp_path: Path) -> None:
    """The limit is on the process's own memory, and holds for any number of events."""
    events = 20_000_000 if LONG else 1_000_000
    write_large(tmp_path / "e.csv", events)
    done = run_bounded(tmp_path / "e.csv", tmp_path / "cache", 256 << 20, "64MB")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[:3] == ["5000", "2000", str(events)]
    # Where DuckDB has too little, that is said in one line.
    less = run_bounded(tmp_path / "e.csv", tmp_path / "other", 256 << 20, "4MB")
    assert less.returncode == 1
    assert f"DataError: {tmp_path / 'other'}: memory is out: " in less.stderr.splitlines()[-1]
    if LONG:
        # That the limit binds: all events in memory at once break it.
        assert run_bounded(tmp_path / "e.csv", tmp_path / "other", 256 << 20, "8GB").returncode != 0
