"""A dataset's rows in the user's ids, as Arrow; and the events of it that SASRec trains on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from jagged.data.dataset import SequenceDataset
from jagged.data.errors import refuse, shown
from jagged.data.events import read_events
from jagged.data.expressions import LISTS
from jagged.data.logs import SHOWN
from jagged.data.schema import WITH_IDS, Column, Kind, Schema

if TYPE_CHECKING:
    from jagged.data.logs import Columns
    from jagged.data.records import Dataset

_ROWS = 1 << 16
_TIMES = {"number": pa.int64(), "naive": pa.timestamp("us"), "zoned": pa.timestamp("us", "UTC")}


def reader(
    dataset: Dataset, names: Sequence[str] | None = None, positive: str | None = None, table: Columns | None = None
) -> pa.RecordBatchReader:
    """Stream the rows in their order, by user and time; a missing value is a null.

    Ids are the user's own; of requests, whose ids are not kept, each has a number. Numbers, labels and weights are float32.

    Args:
        dataset: whose rows.
        names: columns; None for all.
        positive: a label; only rows in which it is above 0.
        table: the event table beside the rows, in their place; its ids are the dataset's.
    """
    of = table or dataset
    columns = [of.schema[name] for name in names or of.schema.names]
    schema = pa.schema([(column.name, _type(dataset, column)) for column in columns])

    def batches() -> Iterator[pa.RecordBatch]:
        for first in range(0, len(of), _ROWS):
            last = min(first + _ROWS, len(of))
            found = pa.record_batch([_values(dataset, of, column, first, last) for column in columns], schema=schema)
            if positive is not None:
                # A missing label is no number, and not above 0 either.
                found = found.filter(pa.array(of.column(positive)[first:last] > 0))
            yield found

    return pa.RecordBatchReader.from_batches(schema, batches())


def sequences(dataset: Dataset, label: str | None = None, **options: Any) -> SequenceDataset:
    """As `Dataset.sequences`, which documents it."""
    schema = dataset.schema
    user, item, time = (schema.one(kind) for kind in (Kind.USER, Kind.CANDIDATE, Kind.TIME))
    labels = [column.name for column in schema.of_kind(Kind.LABEL)]
    if user is None or item is None or time is None:
        kinds = [str(column.kind.value) for column in schema.columns]
        raise refuse("dataset", f"columns of the kinds {shown(kinds, 200)}", "a user, a candidate and a time among them")
    if label not in (*labels, "") if labels else label is not None:
        cure = f'label="{labels[0]}" takes the rows in which it is above 0, label="" takes all' if labels else "leave label out"
        raise refuse("label", "none" if label is None else shown(label), f"one of {shown([*labels, ''], 200)}", cure)
    missing = int(((dataset.column(user.name) < 0) | (dataset.column(item.name) < 0)).sum())
    if missing and options.get("on_error") != "skip":
        found = f"{missing:,} of {len(dataset):,} rows without {user.name} or {item.name}"
        raise refuse("dataset", found, "both in each", 'on_error="skip" leaves them out, where they are few')
    features = options.get("event_columns", ())
    of_ids = [column.name for column in schema.of_kind(Kind.ID, Kind.EVENT)]
    if others := [name for name in features if name not in of_ids]:
        raise refuse("event_columns", shown(others[0]), f"columns of ids, of {shown(of_ids, 200)}")
    rows = reader(dataset, [user.name, item.name, time.name, *features], label or None)
    names = {"user_column": user.name, "item_column": item.name, "timestamp_column": time.name}
    return read_events(rows, **{"progress": False, **options, **names})


def _type(dataset: Dataset, column: Column) -> pa.DataType:
    kind: pa.DataType = pa.float32()
    if column.kind is Kind.TIME:
        kind = _TIMES[dataset.time_kind]
    elif column.kind in WITH_IDS:
        kind = dataset.ids(column.table_name).ids.type
    elif column.kind is Kind.REQUEST:
        kind = pa.int32()
    return pa.large_list(kind) if column.kind in LISTS else kind


def events(dataset: Dataset) -> tuple[pa.RecordBatchReader, Schema] | None:
    """The events that a dataset's histories are views of, as a table to stand beside other rows; None without histories.

    Its columns are those of `event_columns`.
    """
    log = dataset.events
    if log is None:
        return None
    columns = event_columns(log.table.schema, log.labels, [one.name for one in log.lists], log.weights)
    # Lists are no text any more, and labels are 0 or 1 already.
    schema = Schema(tuple(replace(one, separator=None, positive_from=None) for one in columns))
    return reader(dataset, schema.names, table=log.table), schema


def event_columns(schema: Schema, labels: Sequence[str], lists: Sequence[str], weights: str | None) -> list[Column]:
    """The columns that tell whose an event is and when it was, and those that it shows to later rows.

    Args:
        schema: of the table that has the events.
        labels, lists, weights: what events show beside their ids and numbers.
    """
    named = {*labels, *lists, weights}
    columns = [one for one in schema.columns if one.kind in (Kind.USER, Kind.TIME, *SHOWN, Kind.NUMBER) or one.name in named]
    named |= {one.weights for one in columns}
    return [one for one in schema.columns if one in columns or one.name in named]


def _values(dataset: Dataset, of: Columns, column: Column, first: int, last: int) -> pa.Array:
    if column.kind not in LISTS:
        return _plain(dataset, column, of.column(column.name)[first:last])
    offsets, values = of.list_column(column.name)
    ends = offsets[first : last + 1]
    inner = _plain(dataset, column, values[ends[0] : ends[-1]])
    # A missing list is stored as a list of one missing value.
    single = np.flatnonzero(np.diff(ends) == 1)
    missing = np.zeros(last - first, dtype=bool)
    missing[single] = inner.is_null().to_numpy(zero_copy_only=False)[ends[single] - ends[0]]
    return pa.LargeListArray.from_arrays(pa.array(ends - ends[0]), inner, mask=pa.array(missing))


def _plain(dataset: Dataset, column: Column, values: npt.NDArray[Any]) -> pa.Array:
    if column.kind in WITH_IDS:
        return dataset.ids(column.table_name).ids.take(pa.array(values, mask=values < 0))
    if column.kind is Kind.TIME:
        return pa.array(values).cast(_TIMES[dataset.time_kind])
    return pa.array(values, mask=values < 0 if column.kind is Kind.REQUEST else np.isnan(values))
