"""Rows that wait in memory and on disk, and come back sorted; and the sums that chunks do not change."""

from __future__ import annotations

import math
import tempfile
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jagged.data import DataError
from jagged.pointwise import storage
from jagged.pointwise.storage import SortedRows
from jagged.pointwise.sums import ExactSum, before, folded, running, starts_of

TYPES: dict[str, Any] = {"x": np.float64, "id": np.int64}
FINITE = st.floats(allow_nan=False, allow_infinity=False)


def read(rows: SortedRows, *by: str, **options: Any) -> list[tuple[Any, ...]]:
    return [
        row for chunk in rows.chunks(by, **options) for row in zip(*(values.tolist() for values in chunk.values()), strict=True)
    ]


@pytest.mark.parametrize("limit", [1, 5, 7, 100])
@pytest.mark.parametrize("chunk", [1, 3, 1 << 18])
def test_rows_come_back_sorted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, chunk: int) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(storage, "CHUNK", chunk)
    rows = SortedRows(TYPES, limit)
    given_rows = [
        (float(value), key) for value, key in zip([3, -1, 0, 3, 2, -1, 8, 2], [2, 1, 2**62, 2, -5, 0, 1, 1], strict=True)
    ]
    for first, last in ((0, 3), (3, 3), (3, 4), (4, 8)):
        part = given_rows[first:last]
        rows.add({"x": np.array([value for value, _ in part]), "id": np.array([key for _, key in part], np.int64)})
        assert len(rows) == last
    assert rows.is_on_disk is (limit < 8)
    assert bool([*tmp_path.iterdir()]) is rows.is_on_disk
    assert read(rows) == given_rows
    assert read(rows, "x", "id") == sorted(given_rows)
    assert read(rows, "id", "-x") == sorted(given_rows, key=lambda row: (row[1], -row[0]))
    assert read(rows, "id", columns=("x", "id"), where=("id", 2)) == [(3.0, 2), (3.0, 2)]
    assert read(rows, "id", columns=("id",)) == sorted((key,) for _, key in given_rows)
    assert read(rows, "x", columns=("id",), where=("id", 77)) == []
    # More may come after rows were read.
    rows.add({"x": np.array([1.5]), "id": np.array([4])})
    assert read(rows, "x", "id") == sorted([*given_rows, (1.5, 4)])
    rows.close()
    assert [*tmp_path.iterdir()] == []


def test_what_lies_on_disk_goes_with_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    rows = SortedRows(TYPES, 1)
    rows.add({"x": np.zeros(5), "id": np.zeros(5, np.int64)})
    assert len([*tmp_path.iterdir()]) == 1
    del rows
    assert [*tmp_path.iterdir()] == []


def test_a_directory_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    rows = SortedRows(TYPES, 1)
    with pytest.raises(DataError, match=r"set TMPDIR to a directory on a disk with room") as error:
        rows.add({"x": np.zeros(5), "id": np.zeros(5, np.int64)})
    assert str(tmp_path / "none") in str(error.value)


def test_no_rows() -> None:
    assert read(SortedRows(TYPES), "x") == []
    assert read(SortedRows(TYPES), "x", where=("id", 1)) == []


# Sums.


@given(st.lists(FINITE, max_size=20), st.integers(1, 4))
@example([1e308, 1e308, -1e308], 1)
@example([5e-324, 1e300, 5e-324, -1e300], 2)
def test_exact_sums(values: list[float], parts: int) -> None:
    sums = []
    for order in (values, values[::-1]):
        total = ExactSum()
        for part in range(parts):
            total.add(np.array(order[part::parts], np.float64))
        sums.append(total.value)
    exact = sum((Fraction(value) for value in values), Fraction())
    try:
        wanted = float(exact)
    except OverflowError:
        wanted = math.inf if exact > 0 else -math.inf
    assert sums == [wanted, wanted]


def test_exact_sums_of_what_is_not_finite() -> None:
    total = ExactSum()
    total.add(np.array([1.0, math.inf]))
    assert total.value == math.inf
    with np.errstate(invalid="ignore"):
        total.add(np.array([-math.inf]))
    assert math.isnan(total.value)


def test_many_values_are_added_exactly() -> None:
    values = np.random.default_rng(0).standard_cauchy(200_000)
    total = ExactSum()
    total.add(values)
    assert total.value == math.fsum(values)


@given(st.lists(st.tuples(st.integers(0, 3), FINITE.map(lambda x: x % 1e6)), max_size=200), st.booleans())
def test_running_sums(rows: list[tuple[int, float]], whole: bool) -> None:
    rows = sorted(rows, key=lambda row: row[0])
    keys = np.array([key for key, _ in rows], np.int64)
    values = np.array([int(value) if whole else value for _, value in rows], np.int64 if whole else np.float64)
    starts = starts_of(keys)
    assert starts.tolist() == [place for place in range(len(rows)) if place == 0 or keys[place] != keys[place - 1]]
    found, earlier = running(values, starts).tolist(), before(running(values, starts), starts).tolist()
    sums: dict[int, float] = {}
    for place, (key, value) in enumerate(zip(keys.tolist(), values.tolist(), strict=True)):
        assert earlier[place] == sums.get(key, 0)
        # One after the other, to the last bit.
        sums[key] = sums[key] + value if key in sums else value
        assert found[place] == sums[key]


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 2), st.floats(-1e9, 1e9)), max_size=40), st.integers(1, 50))
def test_folded_rows_do_not_depend_on_chunks(rows: list[tuple[int, float]], chunk: int) -> None:
    rows = sorted(rows, key=lambda row: row[0])
    columns = {"key": np.array([key for key, _ in rows], np.int64), "x": np.array([x for _, x in rows], np.float64)}
    chunks = [{name: values[first : first + chunk] for name, values in columns.items()} for first in range(0, len(rows), chunk)]
    found = []
    for given_chunks in (chunks, [columns]):
        pieces = folded(
            iter(given_chunks), ("key",), lambda rows, starts: {"y": rows["x"] + before(running(rows["x"], starts), starts)}
        )
        found.append([row for of in pieces for row in zip(*(of[name].tolist() for name in ("key", "x", "y")), strict=True)])
    assert found[0] == found[1]
    assert [key for key, *_ in found[0]] == sorted({key for key, _ in rows})
