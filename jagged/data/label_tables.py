"""Rows with sparse features and sets of labels from tables with columns of id lists."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from tqdm import tqdm

from jagged.data.errors import at, refuse, shown
from jagged.data.files import reading
from jagged.data.progress import DELAY, disabled
from jagged.data.sources import is_table
from jagged.data.tabular import is_list, parquet_blocks, parquet_schema
from jagged.data.xmc import MAX_IDS, MultiLabelRows

IntArray = npt.NDArray[np.int64]


def read_label_table(
    source: Any,
    *,
    labels: str | None = "labels",
    features: str = "features",
    values: str | None = "values",
    embeddings: str | None = None,
    progress: bool = True,
) -> MultiLabelRows:
    """Read rows with sets of labels from a parquet file, or a table in memory, with columns of id lists.

    Ids are whole numbers from 0 on; a missing list is an empty one. There are as many features and labels as the largest id says:
    `dataclasses.replace(rows, num_labels=...)` gives two tables of one data set the same numbers.

    Args:
        source: a parquet file, or a table in memory, of pandas, polars, DuckDB or Arrow.
        labels: column of lists of whole numbers; None: rows without labels.
        features: column of lists of whole numbers.
        values: column of lists of numbers, the value of each feature; None, or a table without such a column: all are 1.
        embeddings: column of lists of numbers, as many in each row, in place of `features` and `values`: the rows have all
            features then, with these values. A number takes 8 bytes of memory.
        progress: show a bar for what takes longer than two seconds.

    Raises:
        DataError: another file, a column that is not there or has other values, with the row, what was found and the cure.

    Example:
        >>> import pyarrow as pa
        >>> from jagged.data import read_label_table
        >>> read_label_table(pa.table({"labels": [[3, 0], []], "features": [[1], [0, 2]]}))
        MultiLabelRows(2 rows, 3 of 3 features, 2 of 4 labels)
    """
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        if path.suffix.lower() != ".parquet":
            raise refuse(path, f"the suffix {path.suffix!r}", "a .parquet file, or a table in memory")
        with reading(path):
            size = path.stat().st_size
        name, schema = str(path), parquet_schema(path)
    elif is_table(source):
        name, whole = "table", pa.table(source)
        schema, size = whole.schema, len(whole)
    else:
        raise refuse("table", f"a {type(source).__name__}", "a .parquet file, or a table in memory")
    has_values = embeddings is None and values is not None and values in schema.names
    wanted = [name for name in (embeddings or features, values if has_values else None, labels) if name is not None]
    for column in wanted:
        if column not in schema.names:
            raise refuse(name, f"the columns {shown(schema.names, 200)}", f"a column {shown(column)}", "name the right one")
        _check_type(name, schema.field(column), is_number=column == (embeddings or values))
    options: dict[str, Any] = {"disable": disabled(progress), "delay": DELAY, "leave": False}
    with tqdm(total=size, desc="Reading", unit_scale=True, **options) as bar:
        batches: Iterable[pa.RecordBatch]
        if isinstance(source, (str, os.PathLike)):
            batches = (block.rows for block in parquet_blocks(Path(source), bar.update, wanted))
        else:
            batches = whole.select(wanted).to_batches()
        parts = list(_lists(name, batches, wanted))
    if embeddings is not None:
        parts = _all_features(name, parts)
    is_dense = embeddings is not None
    return _rows(name, parts, has_values=has_values or is_dense, has_labels=labels is not None, is_dense=is_dense)


def _check_type(name: str, column: pa.Field, *, is_number: bool) -> None:
    expected = "lists of numbers" if is_number else "lists of whole numbers"
    item = column.type.value_type if is_list(column.type) else pa.null()
    fits = pa.types.is_integer(item) or (is_number and pa.types.is_floating(item)) or pa.types.is_null(item)
    if not is_list(column.type) or not fits:
        numbers = "write numbers" if is_number else "number the ids from 0 on"
        cure = numbers if is_list(column.type) else "write a list in each row"
        raise refuse(f"{name}: {column.name}", str(column.type), expected, cure)


def _lists(name: str, batches: Iterable[pa.RecordBatch], wanted: list[str]) -> Iterator[list[tuple[IntArray, Any]]]:
    """Lengths and elements of the lists of each column, batch by batch."""
    row = 0
    for batch in batches:
        found = []
        for column in wanted:
            lists = batch.column(batch.schema.get_field_index(column))
            lengths = np.asarray(pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False), dtype=np.int64)
            elements = lists.flatten()
            if elements.null_count:
                first = int(np.flatnonzero(np.asarray(elements.is_null()))[0])
                place = row + int(np.searchsorted(np.cumsum(lengths), first, side="right")) + 1
                raise refuse(at(name, place, "row "), f"nothing in the list {shown(column)}", "numbers alone", "leave it out")
            found.append((lengths, elements))
        row += len(batch)
        yield found


def _all_features(name: str, parts: list[list[tuple[IntArray, Any]]]) -> list[list[tuple[IntArray, Any]]]:
    """Lists of numbers, as many in each row, as the values of features 0 on."""
    row, width, found = 0, None, []
    for (lengths, numbers), *rest in parts:
        width = int(lengths[0]) if width is None and len(lengths) else width
        odd = np.flatnonzero(lengths != width)
        if len(odd):
            cure = "give all rows embeddings of one width"
            expected = f"{width}, as the first row has"
            raise refuse(at(name, row + int(odd[0]) + 1, "row "), f"{lengths[odd[0]]} numbers", expected, cure)
        ids = pa.array(np.tile(np.arange(width or 0, dtype=np.int32), len(lengths)))
        found.append([(lengths, ids), (lengths, numbers), *rest])
        row += len(lengths)
    return found


def _rows(
    name: str, parts: list[list[tuple[IntArray, Any]]], *, has_values: bool, has_labels: bool, is_dense: bool
) -> MultiLabelRows:
    """Rows of lengths and elements; where they are dense features are right as they are."""

    def joined(place: int) -> tuple[IntArray, IntArray]:
        lengths = np.concatenate([np.zeros(1, np.int64), *(part[place][0] for part in parts)])
        elements = [np.asarray(part[place][1].to_numpy(zero_copy_only=False)) for part in parts]
        return np.cumsum(lengths), np.concatenate([np.zeros(0, np.int64), *elements]) if elements else np.zeros(0, np.int64)

    feature_offsets, features = joined(0)
    label_offsets, labels = joined(1 + has_values) if has_labels else (np.zeros_like(feature_offsets), features[:0])
    checked = [("label", label_offsets, labels)] + [("feature", feature_offsets, features)] * (not is_dense)
    for what, offsets, ids in checked:
        wrong = np.flatnonzero((ids < 0) | (ids >= MAX_IDS))
        if len(wrong):
            row = int(np.searchsorted(offsets, wrong[0], side="right"))
            expected = f"a whole number from 0 to {MAX_IDS - 1}"
            raise refuse(at(name, row, "row "), f"the {what} {ids[wrong[0]]}", expected, "number them from 0 on")
        keys = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets)) * (int(ids.max(initial=0)) + 1) + ids
        order = np.argsort(keys, kind="stable")
        twice = order[1:][keys[order[1:]] == keys[order[:-1]]]
        if len(twice):
            row = int(np.searchsorted(offsets, twice.min(), side="right"))
            raise refuse(at(name, row, "row "), f"the {what} {ids[twice.min()]} twice", "each once", "leave one of them out")
    if has_values:
        value_offsets, values = joined(1)
        odd = np.flatnonzero(value_offsets != feature_offsets)
        if len(odd):
            row = int(odd[0])
            counts = [offsets[row] - offsets[row - 1] for offsets in (value_offsets, feature_offsets)]
            raise refuse(at(name, row, "row "), f"{counts[0]} values", f"{counts[1]}, one for each feature")
        with np.errstate(over="ignore"):
            singles = values.astype(np.float32)
        odd = np.flatnonzero(~np.isfinite(singles))
        if len(odd):
            row = int(np.searchsorted(feature_offsets, odd[0], side="right"))
            cure = f"leave the {'row' if is_dense else 'feature'} out"
            raise refuse(at(name, row, "row "), f"the value {values[odd[0]]}", "a finite number of float32", cure)
    else:
        singles = np.ones(len(features), np.float32)
    return MultiLabelRows(
        features.astype(np.int32),
        singles,
        feature_offsets,
        labels.astype(np.int32),
        label_offsets,
        num_features=int(features.max(initial=-1)) + 1,
        num_labels=int(labels.max(initial=-1)) + 1,
    )
