"""Mutated files: valid rows, equal to an independent reading of the same bytes, or a one-line error with its place."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jagged.data import DataError, read_events
from tests.data import oracle
from tests.seeds import generators

COUNT = 2_000 if os.environ.get("JAGGED_TEST_LONG") == "1" else 40
TOKENS = [
    b'"',
    b'""',
    b",",
    b"\n",
    b"\r",
    b"\r\n",
    b"\0",
    b" ",
    b"\t",
    b"\xff",
    b"\xc3",
    b"\xef\xbb\xbf",
    b"-",
    b".",
    b"e9",
    b"nan",
    b"9" * 20,
]
TOKENS += [b"\n\n", b"../", b"\x85", "é".encode(), b"9" * 1100, b"user_id", b",,", b"0", b"\x1f", b"\x7f", b"\xe2\x80\xa8"]


def mutate(data: bytes, rng: random.Random) -> bytes:
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        at = rng.randrange(len(data) + 1)
        until = min(len(data), at + rng.choice([1, 1, 2, 10, 100]))
        kind = rng.randrange(7)
        if kind == 0 and at < len(data):
            data = data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
        elif kind == 1:
            data = data[:at] + data[until:]
        elif kind == 2:
            data = data[:at] + rng.choice(TOKENS) + data[at:]
        elif kind == 3:
            data = data[:at] + rng.choice(TOKENS) + data[until:]
        elif kind == 4:
            data = data[:at] + data[at:until] * rng.randrange(2, 4) + data[until:]
        elif kind == 5:
            data = data[:at]
        else:
            data = data[:at] + rng.randbytes(until - at) + data[until:]
    return data


def outcome(path: Path) -> oracle.Histories | str:
    began = time.monotonic()
    try:
        result: oracle.Histories | str = oracle.histories(read_events(path))
    except DataError as error:
        result = str(error)
        assert "\n" not in result
        assert result.startswith(str(path))
        assert len(result) < 900
    assert time.monotonic() - began < 60
    return result


def expected(parse: object, data: bytes) -> oracle.Histories | None:
    try:
        return parse(data)  # type: ignore[operator, no-any-return]
    except Exception:
        return None


def sample(rng: random.Random) -> list[tuple[object, object, int]]:
    names = rng.choice([["1", "2", "30", "-4"], ["a", "b b", "ünï", "1"], ['q"q', "x,y", "z", "w"]])
    return [(rng.choice(names), rng.choice(names), rng.randrange(-5, 100)) for _ in range(rng.randrange(1, 40))]


def test_csv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accepted = 0
    for number, rng in enumerate(generators(COUNT)):
        monkeypatch.setattr("jagged.data.files.BLOCK_BYTES", rng.choice([16, 1 << 20]))
        path = oracle.write_csv(tmp_path / "e.csv", sample(rng))
        data = mutate(path.read_bytes(), rng)
        path.write_bytes(data)
        got, wanted = outcome(path), expected(oracle.parse_csv, data)
        if isinstance(got, dict):
            accepted += 1
            assert got == wanted, number
        elif b'"' not in data:
            assert wanted is None, (number, got)
    assert 0 < accepted < COUNT


def test_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accepted = 0
    for number, rng in enumerate(generators(COUNT)):
        monkeypatch.setattr("jagged.data.files.BLOCK_BYTES", rng.choice([16, 1 << 20]))
        lines = [[rng.choice(["1", "2", "ü", "-7"]) for _ in range(rng.randrange(1, 9))] for _ in range(rng.randrange(1, 20))]
        path = oracle.write_text(tmp_path / "e.txt", lines)
        data = mutate(path.read_bytes(), rng)
        path.write_bytes(data)
        got, wanted = outcome(path), expected(oracle.parse_text, data)
        if isinstance(got, dict):
            accepted += 1
            assert got == wanted, number
        else:
            assert wanted is None, (number, got)
    assert 0 < accepted < COUNT


def test_parquet(tmp_path: Path) -> None:
    """Pages cannot change unseen; the footer has no checksum, so what it says is compared with pyarrow's own reading."""
    refusals = 0
    for number, rng in enumerate(generators(COUNT)):
        options = {"compression": rng.choice(["none", "snappy", "zstd"]), "use_dictionary": rng.random() < 0.5}
        path = oracle.write_parquet(tmp_path / "e.parquet", sample(rng), write_page_checksum=True, **options)
        original = oracle.histories(read_events(path))
        path.write_bytes(mutate(path.read_bytes(), rng))
        got = outcome(path)
        if isinstance(got, str):
            refusals += 1
        elif got != original:
            assert got == oracle.parse_parquet(path), number
    assert refusals > COUNT // 2


def test_every_bit_of_a_parquet_page_is_checked(tmp_path: Path) -> None:
    count = 64
    schema = pa.schema([pa.field(name, pa.int64(), nullable=False) for name in ("user_id", "item_id", "timestamp")])
    table = pa.table({name: range(count) for name in schema.names}, schema=schema)
    path = tmp_path / "e.parquet"
    pq.write_table(table, path, compression="none", use_dictionary=False, write_page_checksum=True)
    whole = path.read_bytes()
    group = pq.read_metadata(path).row_group(0)
    rng = random.Random(0)
    for column in range(3):
        chunk = group.column(column)
        end = chunk.data_page_offset + chunk.total_compressed_size
        for at in range(end - 8 * count, end, 1 if COUNT > 40 else 29):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << rng.randrange(8))]) + whole[at + 1 :])
            assert isinstance(outcome(path), str), (column, at)


def test_damaged_footers_end_no_process(tmp_path: Path) -> None:
    """Of a schema that does not fit the statistics of sizes pyarrow can only be asked in ways that raise; the others abort."""
    program = (
        "import sys\nfrom pathlib import Path\nfrom tests.data.test_fuzz import flip_footers\nflip_footers(Path(sys.argv[1]))"
    )
    child = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=600)
    assert (child.returncode, child.stderr) == (0, "")
    reason = "Definition level histogram size mismatch, size: 2, expected: 1"
    path = tmp_path / "e.parquet"
    expected = f"{path}: found OSError: '{reason}', expected a whole parquet file; write or copy it again"
    assert expected in child.stdout.splitlines()


def flip_footers(directory: Path) -> None:
    """Read a file as often as its footer's schema, in the long form its whole footer, has bits, with another one flipped."""
    path = oracle.write_parquet(directory / "e.parquet", sample(random.Random(0)), write_page_checksum=True)
    whole = path.read_bytes()
    end = len(whole) - 8
    start = end - int.from_bytes(whole[end : end + 4], "little")
    for at in range(start, start + 60 if COUNT == 40 else end):
        for bit in range(8):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << bit)]) + whole[at + 1 :])
            print(outcome(path))


def test_damaged_statistics_of_a_column_that_is_not_read_end_no_process() -> None:
    """pyarrow ends the process where it describes the chunk of such a column, which nothing needs here."""
    path = Path(__file__).with_name("damaged_statistics.parquet")
    program = (
        "import sys\nfrom jagged.data import read_events\nprint(read_events(sys.argv[1], timestamp_column='', progress=False))"
    )
    child = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, timeout=600)
    assert (child.returncode, child.stdout) == (0, "SequenceDataset(6 users, 18 items, 23 events)\n"), child.stderr
