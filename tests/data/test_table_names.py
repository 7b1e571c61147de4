"""What tables must not be called, and what must not separate them: DuckDB would take another column, or Python's csv fail."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from jagged.data import DataError
from jagged.data.sources import open_table


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["id", "ID"], "found the columns 'id' and 'ID', expected names that differ by more than case; rename one"),
        (["RowID", "b"], "found a column 'RowID', expected another name, which numbers the rows here; rename it"),
        (["", "b"], "found a column without a name, expected a name for each column; name it"),
    ],
)
def test_names_that_sql_would_confuse_are_refused(names: list[str], expected: str) -> None:
    with pytest.raises(DataError) as error, open_table(pa.table([pa.array([1]), pa.array([2])], names=names)):
        pass
    assert str(error.value) == f"Table: {expected}"


@pytest.mark.parametrize("delimiter", ["", "ab", '"', "\n", "é"])
def test_what_cannot_separate_fields_is_refused(tmp_path: Path, delimiter: str) -> None:
    (tmp_path / "a.csv").write_text("a,b\n1,2\n")
    with pytest.raises(DataError) as error, open_table(tmp_path / "a.csv", delimiter=delimiter):
        pass
    expected = "found no delimiter, expected one ASCII character, no quote and no line break"
    assert str(error.value) == f"delimiter={delimiter!r}: {expected}"
