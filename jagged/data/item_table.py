"""Side features of items, from a table with a row for each item: what models of users' items add to the items' own embeddings."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from jagged.artifacts import (
    MANIFEST,
    errors_as,
    new_directory,
    read_tensors,
    save_tensors,
    verify,
    write_manifest,
)
from jagged.artifacts.errors import one_line
from jagged.data.dataset import Notes
from jagged.data.errors import DataError, refuse, shown
from jagged.data.inference import infer
from jagged.data.records import Dataset
from jagged.data.schema import Column, Kind, Schema
from jagged.data.sources import open_table
from jagged.data.vocabulary import Vocabulary

_TENSORS = "item_table.safetensors"
_FEATURES = (Kind.ID, Kind.IDS, Kind.NUMBER, Kind.NUMBERS)
# What columns of other tables are for, and what they are of items.
_PLAIN = {
    Kind.USER: Kind.ID, Kind.REQUEST: Kind.ID, Kind.EVENT: Kind.ID, Kind.CANDIDATE: Kind.ID,
    Kind.WEIGHT: Kind.NUMBER, Kind.LABEL: Kind.NUMBER,
}  # fmt: skip
_REASONS = {Kind.TIME: "times are no features", Kind.UNUSED: "neither ids nor numbers"}

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class ItemIds:
    """A feature of ids: the sets of values that items have; items with the same values share a set, and set 0 is empty.

    Attributes:
        num_values: distinct values, numbered from 0.
        set_of_item: int64 `[I + 1]`, the set of each item; behind them stands a 0, for what is no item.
        offsets: int64 `[U + 1]`, of the sets in `values`.
        values: int64 `[sum L]`.
    """

    num_values: int
    set_of_item: Tensor
    offsets: Tensor
    values: Tensor


@dataclass(frozen=True)
class ItemTable:
    """Side features of a catalogue of I items. Made by `read_item_table` or `load`.

    Attributes:
        ids: by name.
        numbers: float32 `[I + 1, K]`: each with mean 0 and deviation 1 over the items that have it, and 0 where it is missing;
            the last row, of zeros, is for what is no item.
        number_names: of the K numbers.
        without_row: items of which the table has no row: they have no values, and zeros for numbers.
        left_out: columns that say nothing, with the reason.
    """

    ids: dict[str, ItemIds]
    numbers: Tensor
    number_names: tuple[str, ...]
    without_row: int
    left_out: tuple[str, ...] = ()

    @property
    def num_items(self) -> int:
        """Items of the catalogue."""
        return self.numbers.shape[0] - 1

    @property
    def notes(self) -> Notes:
        """What is used: `item_features`, and where there were some `items_without_row` and `item_columns_not_used`."""
        of_ids = [f"{name} ({of.num_values:,} values)" for name, of in self.ids.items()]
        notes: Notes = {"item_features": [one_line(name) for name in [*of_ids, *self.number_names]]}
        if self.without_row:
            notes["items_without_row"] = self.without_row
        if self.left_out:
            notes["item_columns_not_used"] = [one_line(reason) for reason in self.left_out]
        return notes

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write it into a new directory; it appears whole or not at all.

        Raises:
            OSError: it cannot be written, or is there and not empty.
        """
        tensors = {"numbers": self.numbers}
        for place, of in enumerate(self.ids.values()):
            tensors |= {f"{place}.{name}": getattr(of, name) for name in ("set_of_item", "offsets", "values")}
        content = {
            "ids": {name: of.num_values for name, of in self.ids.items()},
            "numbers": list(self.number_names),
            "without_row": self.without_row,
            "left_out": list(self.left_out),
        }
        with new_directory(Path(directory)) as aside:
            save_tensors(aside / _TENSORS, tensors)
            write_manifest(aside, [_TENSORS], content)

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> ItemTable:
        """Read what `save` wrote, after verifying every byte of it.

        Raises:
            DataError: a file is missing or damaged, or holds something else, with its name.
        """
        directory = Path(directory)
        with errors_as(DataError):
            content = verify(directory).content
            tensors = read_tensors(directory / _TENSORS)
        try:
            ids = {
                name: ItemIds(count, *(tensors[f"{place}.{of}"] for of in ("set_of_item", "offsets", "values")))
                for place, (name, count) in enumerate(content["ids"].items())
            }
            return cls(ids, tensors["numbers"], tuple(content["numbers"]), content["without_row"], tuple(content["left_out"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise refuse(directory / MANIFEST, shown(str(error)), "a table of items", "read it again") from None


def read_item_table(
    source: Any,
    items: Vocabulary,
    *,
    item_column: str | None = None,
    columns: Sequence[str] = (),
    on_error: str = "stop",
    progress: bool = True,
) -> ItemTable:
    """Read the side features of a catalogue's items from a table with a row for each item.

    What columns are for is found out as by `Dataset.from_table`: ids, lists of ids (as an item's tags), numbers, and lists of as
    many numbers for each item (as an embedding of its text). What would be a user, an event, a weight or a label of other tables
    is an id or a number here; times are left out. A value of ids that one item alone has says no more than the item does, and is
    left out; so a column of titles goes.

    Args:
        source: a file, a folder, an Arrow table or a frame, as `Dataset.from_table` takes it.
        items: the catalogue, by the model's numbers. Rows of other items are not used, and rows that are equal in all columns are
            one.
        item_column: the column of the items' ids; None for the one that looks like it.
        columns: those to use; empty for all that can be. Others are not looked at.
        on_error: "stop" at a value that is none of its kind, or "skip" the row, of at most 1 % of the rows.
        progress: show a bar for what takes longer than two seconds.

    Raises:
        DataError: malformed input; an item in two rows, or none of the catalogue in any; a column that is not there or no
            feature; lists of numbers of several lengths; or nothing left to use. One line with the place.
    """
    if isinstance(source, (str, os.PathLike)):
        where = str(source)
    else:
        # It is read twice, which what gives its rows once is not.
        where, source = "items", source if isinstance(source, pa.Table) else pa.table(source)
    with open_table(source, progress=progress) as table:
        unread = [name for name in table.types if columns and name not in columns]
        schema, left_out = _features(infer(table, told=unread), item_column, columns, where)
    dataset = Dataset.from_table(source, schema, on_error=on_error, progress=progress)
    key = schema.one(Kind.CANDIDATE)
    assert key is not None
    row_of_item = _rows(dataset, key, items, where)
    ids: dict[str, ItemIds] = {}
    numbers: dict[str, FloatArray] = {}
    for column in schema.features(*_FEATURES):
        if column.kind in (Kind.ID, Kind.IDS):
            of = _sets(*_lists(dataset, column), row_of_item)
            if of.num_values:
                ids[column.name] = of
            else:
                left_out.append(f"{column.name}: no value that two items have")
            continue
        found = _numbers(dataset, column, row_of_item, where, left_out)
        if twice := [name for name in found if name in numbers]:
            cure = "rename one"
            raise refuse(where, f"two numbers called {shown(twice[0])}, of a list and of a column", "names that differ", cure)
        numbers |= found
    if not ids and not numbers:
        reasons = "; ".join(left_out) or "the items' ids alone"
        raise refuse(where, f"no column that says something ({reasons})", "ids that items share, or numbers that differ")
    stacked = np.stack(list(numbers.values()), 1) if numbers else np.zeros((len(items) + 1, 0), np.float32)
    return ItemTable(ids, torch.from_numpy(stacked), tuple(numbers), int((row_of_item < 0).sum()), tuple(left_out))


def _features(found: Schema, item_column: str | None, columns: Sequence[str], where: str) -> tuple[Schema, list[str]]:
    """The schema of the columns that are used, and why others are not."""
    if item_column is None:
        candidate = found.one(Kind.CANDIDATE)
        item_column = None if candidate is None else candidate.name
    if item_column is None or item_column not in found.names:
        expected = "one with the items' ids" if item_column is None else f"a column {shown(item_column)} with the items' ids"
        raise refuse(where, f"the columns {shown(found.names, 200)}", expected, "name yours with item_column=...")
    others = {one.name: one for one in found.columns if one.name != item_column}
    used = {name: replace(one, kind=_PLAIN.get(one.kind, one.kind), positive_from=None) for name, one in others.items()}
    features = [name for name, one in used.items() if one.kind in _FEATURES]
    for name in columns:
        if name not in features:
            what = f"{shown(name)}, {_REASONS[used[name].kind]}" if name in used else shown(name)
            raise refuse(where, f"the feature {what}", f"one of {shown(features, 200)}")
    chosen = set(columns or features)
    left_out = [] if columns else [f"{name}: {_REASONS[one.kind]}" for name, one in used.items() if name not in features]
    # The weights of a list come with it.
    chosen |= {one.weights for name, one in used.items() if name in chosen and one.weights is not None}
    return Schema((Column(item_column, Kind.CANDIDATE), *(one for name, one in used.items() if name in chosen))), left_out


def _rows(dataset: Dataset, key: Column, items: Vocabulary, where: str) -> IntArray:
    """The row of each item, int64 `[I]`; -1 where it has none."""
    codes = dataset.column(key.name)
    # Of a missing id the code is -1, as is the number of what is no item.
    item_of_code = np.append(items.encode(dataset.ids(key.table_name).ids), -1)
    item_of_row = item_of_code[codes]
    known = np.flatnonzero(item_of_row >= 0)
    counts = np.bincount(item_of_row[known], minlength=len(items))
    if (counts > 1).any():
        twice = items.decode([int(counts.argmax())])[0].as_py()
        raise refuse(where, f"{int(counts.max())} rows of the item {shown(twice)}", "one for each item", "keep one of them")
    if not len(known):
        cure = "name the column of the items' ids with item_column=..."
        raise refuse(where, f"no item of the {len(items):,} of the events", f"their ids in the column {shown(key.name)}", cure)
    rows = np.full(len(items), -1, np.int64)
    rows[item_of_row[known]] = known
    return rows


def _lists(dataset: Dataset, column: Column) -> tuple[IntArray, IntArray]:
    """Offsets and codes of a column of ids, a list for each row."""
    if column.kind is Kind.IDS:
        offsets, codes = dataset.list_column(column.name)
    else:
        codes = dataset.column(column.name)
        offsets = np.arange(len(codes) + 1)
    return np.asarray(offsets, np.int64), np.asarray(codes, np.int64)


def _sets(offsets: IntArray, codes: IntArray, row_of_item: IntArray) -> ItemIds:
    """The sets of codes that items have, without missing ones and those of one item alone."""
    item_of_row = np.full(len(offsets) - 1, -1, np.int64)
    item_of_row[row_of_item[row_of_item >= 0]] = np.flatnonzero(row_of_item >= 0)
    item = item_of_row[np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))]
    kept = (item >= 0) & (codes >= 0)
    pairs = np.unique(np.stack([item[kept], codes[kept]], 1), axis=0)
    is_shared = np.bincount(pairs[:, 1])[pairs[:, 1]] > 1 if len(pairs) else np.zeros(0, np.bool_)
    pairs = pairs[is_shared]
    values, numbers = np.unique(pairs[:, 1], return_inverse=True)
    begins = np.searchsorted(pairs[:, 0], np.arange(len(row_of_item) + 1))
    known: dict[bytes, int] = {b"": 0}
    parts: list[IntArray] = [np.zeros(0, np.int64)]
    set_of_item = np.zeros(len(row_of_item) + 1, np.int64)
    for number in np.flatnonzero(np.diff(begins)):
        own = numbers[begins[number] : begins[number + 1]].astype(np.int64)
        place = known.setdefault(own.tobytes(), len(known))
        if place == len(parts):
            parts.append(own)
        set_of_item[number] = place
    ends = np.cumsum([0, *map(len, parts)])
    return ItemIds(len(values), *map(torch.from_numpy, (set_of_item, ends, np.concatenate(parts))))


def _numbers(dataset: Dataset, column: Column, row_of_item: IntArray, where: str, left_out: list[str]) -> dict[str, FloatArray]:
    """The numbers of a column by name, float32 `[I + 1]` each; what is the same for all items goes to `left_out`."""
    found = {}
    for name, of_rows in _columns(dataset, column, where).items():
        own = np.where(row_of_item >= 0, of_rows[row_of_item], np.nan).astype(np.float64)
        present = own[~np.isnan(own)]
        if len(present) and (deviation := present.std()) > 0:
            found[name] = np.append(np.nan_to_num((own - present.mean()) / deviation), 0.0).astype(np.float32)
        else:
            left_out.append(f"{name}: one number for all items")
    return found


def _columns(dataset: Dataset, column: Column, where: str) -> dict[str, FloatArray]:
    """A column of numbers, and one of lists of as many numbers in each row as so many columns, float32 `[n]`."""
    if column.kind is Kind.NUMBER:
        return {column.name: dataset.column(column.name)}
    offsets, values = dataset.list_column(column.name)
    lengths = np.diff(offsets)
    # A missing list stands as one missing number.
    is_there = lengths > 0
    is_there[is_there] = ~((lengths[is_there] == 1) & np.isnan(values[offsets[:-1][is_there]]))
    if not is_there.any():
        return {column.name: np.full(len(lengths), np.nan, np.float32)}
    several = np.unique(lengths[is_there])
    if len(several) > 1:
        found = f"lists of {several[0]} to {several[-1]} numbers in the column {shown(column.name)}"
        raise refuse(where, found, "as many for each item", "leave the column out")
    table = np.full((len(lengths), int(several[0])), np.nan, np.float32)
    table[is_there] = values[np.repeat(is_there, lengths)].reshape(-1, table.shape[1])
    return {f"{column.name}.{place}": of for place, of in enumerate(table.T)}
