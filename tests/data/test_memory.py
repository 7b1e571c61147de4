"""Mapped pages that are done with are let go: what a process holds does not grow with all that it has looked at."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from jagged.data.records import Dataset
from jagged.data.staging import _disk_array, _unload

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
MIB = 1 << 20


def of_files() -> int:
    """Bytes of mapped files that are in this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssFile"))


def test_arrays_on_disk_keep_their_values_without_their_pages() -> None:
    with tempfile.TemporaryDirectory() as directory:
        values = _disk_array(Path(directory), np.int64, 8 * MIB)
        values[:] = np.arange(8 * MIB)
        before = of_files()
        _unload(values, np.zeros(3))
        assert before - of_files() > 60 * MIB
        assert np.array_equal(values, np.arange(8 * MIB))


def of_files_in(directory: Path) -> int:
    """Bytes of a directory's files that this process has touched; those of libraries come and go as it likes."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith("Rss:"):
            total += 1024 * int(line.split()[1]) * inside
        elif "-" in line.split()[0]:
            inside = line.endswith(".arrow") and str(directory) in line
    return total


@pytest.mark.parametrize("is_beside", [False, True])
def test_a_split_and_its_checks_keep_no_column_mapped(is_beside: bool) -> None:
    rows = 1_000_000
    generator = np.random.default_rng(0)
    table = pa.table(
        {
            "user_id": generator.integers(0, 1000, rows),
            "item_id": generator.integers(0, 1000, rows),
            "timestamp": np.arange(rows),
            "price": generator.random(rows, dtype=np.float32),
        }
    )
    options = {"events": table} if is_beside else {"history": "events"}
    dataset = Dataset.from_table(table, progress=False, **options)
    files = sum(path.stat().st_size for path in dataset.directory.glob("*.arrow"))
    assert files > 36 * MIB
    split = dataset.split()
    assert split.leaks().counts["histories_too_late"] == 0
    held = of_files_in(dataset.directory)
    # Looked at once more, they are there again.
    for name in ("start", "stop"):
        int(getattr(dataset, name).sum())
    for name in ("user_id", "item_id", "timestamp"):
        int(dataset.column(name).sum())
    assert of_files_in(dataset.directory) - held > 28 * MIB
    dataset.release()
    assert abs(of_files_in(dataset.directory) - held) < 4 * MIB
