"""Rows with sparse features and sets of labels from tables with columns of lists: of ids, and of labels also text."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
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

_SOURCE = "a .parquet file, or a table in memory"
_NUMBER_THEM = "number the ids from 0 on"


def read_label_table(
    source: Any,
    *,
    labels: str | None = "labels",
    features: str = "features",
    values: str | None = "values",
    embeddings: str | None = None,
    names: pa.LargeStringArray | None = None,
    progress: bool = True,
) -> MultiLabelRows:
    """Read rows with sets of labels from a parquet file, or a table in memory, with columns of lists.

    Ids are whole numbers from 0 on; a missing list is an empty one. There are as many features and labels as the largest id says:
    `dataclasses.replace(rows, num_labels=...)` gives two tables of one data set the same numbers. Labels may be text, whose ids
    are their places in `names`.

    Args:
        source: a parquet file, or a table in memory, of pandas, polars, DuckDB or Arrow.
        labels: column of lists of whole numbers, or of text; None: rows without labels.
        features: column of lists of whole numbers.
        values: column of lists of numbers, the value of each feature; None, or a table without such a column: all are 1.
        embeddings: column of lists of numbers, as many in each row, in place of `features` and `values`: the rows have all
            features then, with these values. A number takes 8 bytes of memory.
        names: large_string `[L]`, all labels there are, where they are text, as `label_names_of_table` finds them.
        progress: show a bar for what takes longer than two seconds.

    Raises:
        DataError: another file, a column that is not there or has other values, text that is none of `names`, with the row, what
            was found and the cure.

    Example:
        >>> import pyarrow as pa
        >>> from jagged.data import label_names_of_table, read_label_table
        >>> read_label_table(pa.table({"labels": [[3, 0], []], "features": [[1], [0, 2]]}))
        MultiLabelRows(2 rows, 3 of 3 features, 2 of 4 labels)
        >>> table = pa.table({"labels": [["red", "new"], ["new"]], "features": [[1], [0, 2]]})
        >>> read_label_table(table, names=label_names_of_table(table)).labels
        array([0, 1, 1], dtype=int32)
    """
    table = _Table.of(source)
    has_values = embeddings is None and values is not None and values in table.schema.names
    wanted = [name for name in (embeddings or features, values if has_values else None, labels) if name is not None]
    for name in wanted:
        column = table.column(name)
        if name == labels and _is_text(column.type):
            if names is None:
                cure = f"give names, as label_names_of_table finds them, or {_NUMBER_THEM}"
                raise refuse(f"{table.name}: {name}", str(column.type), "lists of whole numbers", cure)
        elif name == labels and names is not None and not _is_empty(column.type):
            raise refuse(f"{table.name}: {name}", str(column.type), "lists of text, as names are for", "leave names out")
        else:
            _check_type(table.name, column, is_number=name == (embeddings or values), is_label=name == labels)
    with _bar(table, progress) as bar:
        parts = list(_lists(table.name, table.batches(wanted, bar.update), wanted))
    if labels is not None and names is not None:
        parts = _numbered(table.name, parts, names)
    if embeddings is not None:
        parts = _all_features(table.name, parts)
    is_dense = embeddings is not None
    rows = _rows(table.name, parts, names, has_values=has_values or is_dense, has_labels=labels is not None, is_dense=is_dense)
    return rows if names is None else replace(rows, num_labels=len(names))


def label_names_of_table(source: Any, *, labels: str = "labels", progress: bool = True) -> pa.LargeStringArray | None:
    """Return the labels of a parquet file, or a table in memory, that has text for them; None where it has whole numbers.

    Args:
        source: as of `read_label_table`.
        labels: column of lists of text.
        progress: show a bar for what takes longer than two seconds.

    Returns:
        large_string `[L]`, each label once, in the order in which rows first have them.

    Raises:
        DataError: another file, no such column, or labels that cannot be names: empty ones, and ones with control characters.

    Example:
        >>> import pyarrow as pa
        >>> from jagged.data import label_names_of_table
        >>> label_names_of_table(pa.table({"labels": [["red", "new"], ["new"]]})).to_pylist()
        ['red', 'new']
    """
    table = _Table.of(source)
    if not _is_text(table.column(labels).type):
        return None
    names, waiting, count = pa.array([], pa.large_string()), list[pa.LargeStringArray](), 0
    with _bar(table, progress) as bar:
        for batch in table.batches([labels], bar.update):
            waiting.append(_decoded(pc.unique(batch.column(0).flatten())).cast(pa.large_string()))
            count += len(waiting[-1])
            # As seldom as the names that wait have become as many as those that are known.
            if count > len(names):
                names, waiting, count = pc.unique(pa.concat_arrays([names, *waiting])), [], 0
    names = pc.drop_null(pc.unique(pa.concat_arrays([names, *waiting])))
    for odd, expected in (
        (pc.equal(pc.utf8_trim_whitespace(names), ""), "a name"),
        (pc.match_substring_regex(names, "[[:cntrl:]]"), "a name without control characters"),
    ):
        if (place := pc.index(odd, True).as_py()) >= 0:
            raise refuse(f"{table.name}: {labels}", f"the label {shown(names[place].as_py())}", expected, "write another one")
    return names


@dataclass(frozen=True)
class _Table:
    """A parquet file, or a table in memory.

    Attributes:
        name: in messages.
        size: bytes of the file, rows of the table.
        batches: the columns that are named, piece by piece; it tells how much of `size` each has been.
    """

    name: str
    schema: pa.Schema
    size: int
    batches: Callable[[list[str], Callable[[int], object]], Iterable[pa.RecordBatch]]

    @classmethod
    def of(cls, source: Any) -> _Table:
        if isinstance(source, (str, os.PathLike)):
            path = Path(source)
            if path.suffix.lower() != ".parquet":
                raise refuse(path, f"the suffix {path.suffix!r}", _SOURCE)
            with reading(path):
                size = path.stat().st_size
            return cls(
                str(path), parquet_schema(path), size, lambda of, told: (one.rows for one in parquet_blocks(path, told, of))
            )
        if not is_table(source):
            raise refuse("table", f"a {type(source).__name__}", _SOURCE)
        whole = pa.table(source)
        return cls("table", whole.schema, len(whole), lambda of, told: _told(whole.select(of).to_batches(), told))

    def column(self, name: str) -> pa.Field:
        if name not in self.schema.names:
            raise refuse(
                self.name, f"the columns {shown(self.schema.names, 200)}", f"a column {shown(name)}", "name the right one"
            )
        return self.schema.field(name)


def _told(batches: Iterable[pa.RecordBatch], told: Callable[[int], object]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield batch
        told(len(batch))


def _bar(table: _Table, progress: bool) -> Any:
    return tqdm(total=table.size, desc="Reading", unit_scale=True, disable=disabled(progress), delay=DELAY, leave=False)


def _is_text(kind: pa.DataType) -> bool:
    item = kind.value_type if is_list(kind) else pa.null()
    item = item.value_type if pa.types.is_dictionary(item) else item
    return bool(pa.types.is_string(item) or pa.types.is_large_string(item) or pa.types.is_string_view(item))


def _decoded(elements: Any) -> Any:
    """Text itself, where it is encoded by a dictionary."""
    return elements.dictionary_decode() if pa.types.is_dictionary(elements.type) else elements


def _is_empty(kind: pa.DataType) -> bool:
    return is_list(kind) and bool(pa.types.is_null(kind.value_type))


def _check_type(name: str, column: pa.Field, *, is_number: bool, is_label: bool) -> None:
    expected = "lists of numbers" if is_number else f"lists of whole numbers{', or of text' if is_label else ''}"
    item = column.type.value_type if is_list(column.type) else pa.null()
    fits = pa.types.is_integer(item) or (is_number and pa.types.is_floating(item)) or pa.types.is_null(item)
    if not is_list(column.type) or not fits:
        numbers = "write numbers" if is_number else _NUMBER_THEM
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
            elements = _decoded(lists.flatten())
            if elements.null_count:
                place = row + _row_of(lengths, elements.is_null())
                expected = "text alone" if _is_text(lists.type) else "numbers alone"
                raise refuse(at(name, place, "row "), f"nothing in the list {shown(column)}", expected, "leave it out")
            found.append((lengths, elements))
        row += len(batch)
        yield found


def _row_of(lengths: IntArray, odd: Any) -> int:
    """The row, from 1 on, that has the first element that is odd."""
    first = int(np.flatnonzero(np.asarray(odd))[0])
    return int(np.searchsorted(np.cumsum(lengths), first, side="right")) + 1


def _numbered(name: str, parts: list[list[tuple[IntArray, Any]]], names: pa.LargeStringArray) -> list[list[tuple[IntArray, Any]]]:
    """The same with places in `names` for the text of the last column."""
    if pc.count_distinct(names).as_py() != len(names):
        counts = pc.value_counts(names)
        repeated = counts.filter(pc.greater(counts.field("counts"), 1))
        raise refuse("names", f"{shown(repeated[0]['values'].as_py())} twice", "each label once", "leave one of them out")
    texts = pa.concat_arrays([pa.array([], names.type), *(elements.cast(names.type) for *_, (_, elements) in parts)])
    ids = pc.index_in(texts, value_set=names)
    if ids.null_count:
        row = _row_of(np.concatenate([lengths for *_, (lengths, _) in parts]), ids.is_null())
        found = shown(texts.filter(ids.is_null())[0].as_py())
        raise refuse(at(name, row, "row "), f"the label {found}", f"one of the {len(names):,} of names", "leave it out")
    result, begin = [], 0
    for *others, (lengths, elements) in parts:
        result.append([*others, (lengths, ids.slice(begin, len(elements)))])
        begin += len(elements)
    return result


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
    name: str,
    parts: list[list[tuple[IntArray, Any]]],
    names: pa.LargeStringArray | None,
    *,
    has_values: bool,
    has_labels: bool,
    is_dense: bool,
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
            row, which = int(np.searchsorted(offsets, twice.min(), side="right")), ids[twice.min()]
            told = which if names is None or what == "feature" else shown(names[int(which)].as_py())
            raise refuse(at(name, row, "row "), f"the {what} {told} twice", "each once", "leave one of them out")
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
