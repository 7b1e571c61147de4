"""Tables that commands write: csv, parquet or JSON lines by the file's name."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as arrow_csv
import pyarrow.parquet as parquet

from jagged.artifacts import replacing, writing
from jagged.config import ConfigError

logger = logging.getLogger("jagged")


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
                "%s: %d ids begin as formulas do (= + - @): spreadsheets run them; write .parquet or .jsonl", path, formulas
            )

    return write


def _formulas(table: pa.Table) -> int:
    """How many ids a spreadsheet would take for formulas."""
    texts = [column for column in table.columns if pa.types.is_string(column.type) or pa.types.is_large_string(column.type)]
    return sum(pc.sum(pc.match_substring_regex(text, "^[=+@-]")).as_py() or 0 for text in texts)


def _write_json_lines(table: pa.Table, file: Any) -> None:
    for batch in table.to_batches(max_chunksize=1 << 16):
        for row in batch.to_pylist():
            file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
