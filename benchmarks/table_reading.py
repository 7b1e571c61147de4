"""Time and memory of reading tables: files of drawn rows to datasets, their splits and leak checks.

    python -m benchmarks.table_reading                     # every case; files of 6 GB in a temporary directory
    python -m benchmarks.table_reading --only impressions

Each case is read by a process of its own, three times. Memory is the peak of its resident memory above what it holds after it has
imported the same packages, pages of mapped files included. A case has a bound in seconds and in GB for two cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import torch

from benchmarks.common import environment, other_parts, save
from tests.memory import peak_resident_bytes

ROUNDS = 3
_BLOCK = 250_000
_GB = 1e9


class Case(NamedTuple):
    """What is written, how it is read, and the bounds."""

    file: str
    write: Callable[[Path], None]
    read: str
    seconds: float
    gigabytes: float


def impressions(lists: bool) -> Iterator[pa.RecordBatch]:
    """A million rows of 12 columns; with two columns of lists of 50 ids on average."""
    rng = np.random.default_rng(0)
    for _ in range(4):
        n = _BLOCK
        columns: dict[str, Any] = {
            "user_id": rng.zipf(1.3, n) % 200_000,
            "item_id": _texts("i", rng.zipf(1.2, n) % 100_000),
            "timestamp": 1_700_000_000 + rng.integers(0, 10_000_000, n),
            "click": rng.integers(0, 2, n),
            "device_type": _texts("d", rng.integers(0, 5, n)),
            "price": rng.random(n),
            "age": rng.integers(10, 90, n).astype(float),
            "city": _texts("city ", rng.integers(0, 1_000, n)),
            "is_vip": rng.integers(0, 2, n).astype(bool),
            "ctr": rng.random(n).astype(np.float32),
            "position": rng.integers(0, 50, n),
            "like": rng.integers(0, 2, n),
        }
        if lists:
            offsets = np.concatenate([[0], np.cumsum(rng.poisson(50, n))]).astype(np.int32)
            for name, size in (("clicked_ids", 100_000), ("category_ids", 500)):
                columns[name] = pa.ListArray.from_arrays(offsets, rng.integers(0, size, offsets[-1]))
        yield pa.record_batch(columns)


def events() -> Iterator[pa.RecordBatch]:
    """20 million rows of a million users and 364,000 items, whose ids are texts."""
    rng = np.random.default_rng(0)
    for _ in range(80):
        columns = {
            "user_id": rng.integers(0, 1_000_000, _BLOCK),
            "item_id": _texts("item ", rng.zipf(1.2, _BLOCK) % 364_000),
            "timestamp": 1_600_000_000 + rng.integers(0, 100_000_000, _BLOCK),
        }
        yield pa.record_batch(columns)


def _texts(prefix: str, numbers: Any) -> pa.Array:
    return pa.array([f"{prefix}{number}" for number in numbers.tolist()])


def parquet(rows: Callable[[], Iterator[pa.RecordBatch]]) -> Callable[[Path], None]:
    """What writes rows as one file."""
    return lambda path: _write(rows(), lambda schema: pq.ParquetWriter(path, schema))


def csv(rows: Callable[[], Iterator[pa.RecordBatch]]) -> Callable[[Path], None]:
    """What writes rows as one file."""
    return lambda path: _write(rows(), lambda schema: pa_csv.CSVWriter(path, schema))


def _write(rows: Iterator[pa.RecordBatch], open_file: Callable[[pa.Schema], Any]) -> None:
    first = next(rows)
    with open_file(first.schema) as writer:
        for batch in (first, *rows):
            writer.write_batch(batch)


CASES = {
    "impressions": Case("impressions.parquet", parquet(lambda: impressions(False)), "table", 10, 1.0),
    "impressions with lists": Case("lists.parquet", parquet(lambda: impressions(True)), "table", 40, 1.5),
    "events, parquet": Case("events.parquet", parquet(events), "events", 60, 1.0),
    "events, csv": Case("events.csv", csv(events), "events", 60, 1.0),
    "events as a table, parquet": Case("events.parquet", parquet(events), "table", 60, 1.0),
    "events as a table, csv": Case("events.csv", csv(events), "table", 60, 1.0),
}


def read(path: str, how: str) -> dict[str, Any]:
    """Read a file in this process: seconds and GB, and of a table also those of its split and leak checks."""
    import duckdb  # noqa: F401 - memory is counted from after the imports

    from jagged.data import Dataset, read_events

    result: dict[str, Any] = {}
    # The directory goes when the process ends.
    if how == "events":
        measured(result, "read", lambda: read_events(path, progress=False))
        return result
    dataset = measured(result, "read", lambda: Dataset.from_table(path, history="events", progress=False))
    split = measured(result, "split", lambda: dataset.split(by="time"))
    measured(result, "leaks", split.leaks)
    return result


def measured(result: dict[str, Any], name: str, work: Callable[[], Any]) -> Any:
    """Do a piece of work, and note its seconds and the peak of memory above that before."""
    # From here on the peak counts anew.
    Path("/proc/self/clear_refs").write_text("5")
    before = result.setdefault("before", peak_resident_bytes())
    begun = time.perf_counter()
    found = work()
    result[name] = {"seconds": time.perf_counter() - begun, "gigabytes": (peak_resident_bytes() - before) / _GB}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, help="cases to measure; others that the result file has stay")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="processes a case")
    parser.add_argument("--read", nargs=2, metavar=("FILE", "HOW"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:
        print(json.dumps(read(*options.read)))
        return
    torch.set_num_threads(2)
    facts = environment("cpu")
    result = {"environment": facts, **other_parts("table_reading", facts)}
    with tempfile.TemporaryDirectory() as directory:
        for name in options.only or CASES:
            case = CASES[name]
            path = Path(directory, case.file)
            if not path.exists():
                case.write(path)
            command = [sys.executable, "-W", "ignore", "-m", "benchmarks.table_reading", "--read", str(path), case.read]
            runs = [json.loads(subprocess.run(command, check=True, capture_output=True).stdout) for _ in range(options.rounds)]
            bounds = {"seconds": case.seconds, "gigabytes": case.gigabytes}
            row: dict[str, Any] = {"file_gigabytes": path.stat().st_size / _GB, "asked": bounds}
            for step in (step for step in runs[0] if step != "before"):
                row[step] = {
                    of: {"median": statistics.median(run[step][of] for run in runs), "max": max(run[step][of] for run in runs)}
                    for of in bounds
                }
            result[name] = row
            save("table_reading", result)
            said = "; ".join(
                f"{step} {row[step]['seconds']['median']:.1f} s (at most {row[step]['seconds']['max']:.1f}), "
                f"{row[step]['gigabytes']['max']:.2f} GB"
                for step in ("read", "split", "leaks")
                if step in row
            )
            print(f"{name}: {said}; asked {case.seconds:g} s, {case.gigabytes:g} GB", flush=True)


if __name__ == "__main__":
    main()
