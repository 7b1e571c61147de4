"""Tables that commands take and write: csv, parquet or JSON lines by the file's name."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as arrow_csv
import pyarrow.parquet as parquet

from jagged.artifacts import reason, replacing, writing
from jagged.config import ConfigError
from jagged.data import DataError
from jagged.data.sources import is_table

logger = logging.getLogger("jagged")


def table_of(source: Any, what: str) -> pa.Table:
    """A table in memory, or of a csv or parquet file."""
    if isinstance(source, pa.Table):
        return source
    if isinstance(source, (str, os.PathLike)):
        readers = {".parquet": parquet.read_table, ".csv": arrow_csv.read_csv}
        path = Path(source)
        if path.suffix not in readers:
            raise ConfigError(f"{what}: got {str(path)!r}, expected a .csv or .parquet file, or a table in memory")
        try:
            return readers[path.suffix](path)
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{what}: {path}: {reason(error)}") from None
    if not is_table(source):
        raise ConfigError(f"{what}: got a {type(source).__name__}, expected a table in memory or a .csv or .parquet file")
    return pa.table(source)


def writer(path: Path) -> Callable[[pa.Table], None]:
    """A function that writes a table in the format of the file's name; the file appears whole or not at all."""
    formats: dict[str, Callable[[pa.Table, Any], None]] = {
        ".csv": arrow_csv.write_csv,
        ".parquet": parquet.write_table,
        ".jsonl": _write_json_lines,
    }
    if path.suffix.lower() not in formats or path.is_dir():
        raise ConfigError(f"output: got {str(path)!r}, expected a file name ending in {', '.join(formats)}")

    def write(table: pa.Table) -> None:
        with writing(f"output: {path}", "make room or choose another output", ConfigError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as aside, open(aside, "wb") as file:
                formats[path.suffix.lower()](table, file)
        if path.suffix.lower() == ".csv" and (formulas := _formulas(table)):
            logger.warning(
                "%s: %d ids or names begin as formulas do (= + - @): spreadsheets run them; write .parquet or .jsonl",
                path,
                formulas,
            )

    return write


def _formulas(table: pa.Table) -> int:
    """How many ids and names a spreadsheet would take for formulas."""
    texts = [column for column in table.columns if pa.types.is_string(column.type) or pa.types.is_large_string(column.type)]
    return sum(pc.sum(pc.match_substring_regex(text, "^[=+@-]")).as_py() or 0 for text in texts)


def _write_json_lines(table: pa.Table, file: Any) -> None:
    for batch in table.to_batches(max_chunksize=1 << 16):
        for row in batch.to_pylist():
            file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
