"""The rows of a run on sets of labels: read, kept in the run's directory, and split."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from jagged.artifacts import MANIFEST, errors_as, new_directory, read_tensors, save_tensors, verify, write_manifest
from jagged.config import ConfigError, LabelDataOptions, MultiLabelConfig
from jagged.data import DataError, MultiLabelRows, label_names_of_table, read_arff, read_label_table, read_xmc, synthetic_labels
from jagged.data.errors import refuse
from jagged.data.label_names import LABEL_NAMES, read_label_names, write_label_names
from jagged.data.sources import is_table
from jagged.data.vocabulary import digest
from jagged.label_metrics import LabelFilter

_FILE = "rows.safetensors"
_ARRAYS = ("feature_ids", "feature_values", "feature_offsets", "labels", "label_offsets")
_FILTERS = ("filtered", "filtered_offsets")


@dataclass(frozen=True, eq=False)
class LabelRows:
    """The rows that a run is given.

    Attributes:
        rows: which are split.
        test: those of a test of their own; None where some of `rows` are the test.
        names: large_string `[L]`, of the labels; None without.
    """

    rows: MultiLabelRows
    test: MultiLabelRows | None = None
    names: pa.LargeStringArray | None = None

    def __post_init__(self) -> None:
        if self.test is not None:
            check_sizes(self.test, self.rows.num_features, self.rows.num_labels, "test")

    @classmethod
    def read(cls, config: MultiLabelConfig, *, progress: bool = True) -> LabelRows:
        """Read the files that a configuration names, or draw the built-in sample.

        Raises:
            ConfigError: names for labels of the sample.
            DataError: malformed files, or two that do not fit one another.
        """
        data = config.data
        if data.path is None:
            # No contradiction of options: rows in memory have names without a path.
            if data.label_names is not None:
                told = "expected none without data.path, whose labels it names"
                raise ConfigError(f"data.label_names: got {data.label_names}, {told}")
            rows, test, _ = synthetic_labels(config.seed)
            return cls(rows, test if config.split.test_fraction is None else None)
        return cls.of(data.path, data.test, data, progress=progress)

    @classmethod
    def of(cls, rows: Any, test: Any, data: LabelDataOptions, *, progress: bool = True) -> LabelRows:
        """Rows of training and, unless None, of test, each as it is, a table in memory, or a file.

        What says no numbers of features and labels has those of both together, and where labels have names as many labels. Labels
        that are text are those of training and, behind them, those that the test alone has.

        Raises:
            ConfigError: names for labels that are text.
            DataError: malformed rows or names, or two that do not fit one another.
        """
        texts = text_labels(rows, data, progress=progress)
        if texts is not None:
            if data.label_names is not None:
                told = "expected none: the labels of the rows are text, and so have names"
                raise ConfigError(f"data.label_names: got {data.label_names}, {told}")
            if isinstance(test, MultiLabelRows):
                raise refuse("test", "labels that are numbers", "text, as the rows of training have", "give a table")
            more = None if test is None else text_labels(test, data, progress=progress)
            texts = texts if more is None else pc.unique(pa.concat_arrays([texts, more]))
        of_rows, counted = read_rows(rows, data, data.filter, names=texts, progress=progress)
        if test is not None:
            of_test, of_test_counted = read_rows(test, data, data.test_filter, names=texts, progress=progress)
            counted = counted & of_test_counted
            of_rows = replace(of_rows, **{name: max(getattr(of_rows, name), getattr(of_test, name)) for name in counted})
        names = texts
        if data.label_names is not None:
            names = read_label_names(data.label_names, of_rows.num_labels, or_more="num_labels" in counted)
            of_rows = replace(of_rows, num_labels=len(names))
        if test is None:
            return cls(of_rows, names=names)
        what = "test" if isinstance(test, MultiLabelRows) or is_table(test) else os.fspath(test)
        sizes = {"num_features": of_rows.num_features, "num_labels": of_rows.num_labels}
        return cls(of_rows, fitted(of_test, of_test_counted, what=what, **sizes), names)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of all rows, and of the labels' names where they have some."""
        sha = hashlib.sha256(f"jagged.labels.1:{self.rows.num_features}:{self.rows.num_labels}:".encode())
        for name, array in sorted(self._arrays()):
            sha.update(f"{name}:{array.dtype}:{len(array)}:".encode())
            sha.update(np.ascontiguousarray(array).data)
        if self.names is not None:
            sha.update(b"names:" + digest(self.names))
        return sha.hexdigest()

    def _arrays(self) -> Iterator[tuple[str, Any]]:
        for part, of in (("rows", self.rows), ("test", self.test)):
            for name in (*_ARRAYS, *_FILTERS) if of is not None else ():
                if (array := getattr(of, name)) is not None:
                    yield f"{part}.{name}", array

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write a new directory; it appears whole or not at all.

        Raises:
            OSError: it cannot be written.
        """
        with new_directory(Path(directory)) as aside:
            save_tensors(aside / _FILE, {name: torch.from_numpy(array) for name, array in self._arrays()})
            notes = {part: of.notes for part, of in (("rows", self.rows), ("test", self.test)) if of is not None}
            content = {"num_features": self.rows.num_features, "num_labels": self.rows.num_labels, "notes": notes}
            if self.names is not None:
                write_label_names(self.names, aside / LABEL_NAMES)
            files = [_FILE] if self.names is None else [_FILE, LABEL_NAMES]
            write_manifest(aside, files, {**content, "fingerprint": self.fingerprint})

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> LabelRows:
        """Open a directory that `save` wrote, after verifying every byte.

        Raises:
            DataError: a file is missing or damaged, or holds no such rows.
        """
        directory = Path(directory)
        with errors_as(DataError):
            files, content = verify(directory, bar=True)
            tensors = read_tensors(directory / _FILE)
        try:
            sizes = {name: content[name] for name in ("num_features", "num_labels")}
            parts = {}
            for part in ("rows", "test"):
                arrays = {name: tensors.get(f"{part}.{name}") for name in (*_ARRAYS, *_FILTERS)}
                if part == "rows" or arrays["labels"] is not None:
                    given: dict[str, Any] = {name: array.numpy() for name, array in arrays.items() if array is not None}
                    parts[part] = MultiLabelRows(**given, **sizes, notes=content["notes"][part])
            found = cls(**parts)
        except (KeyError, TypeError, ValueError) as error:
            raise refuse(directory / _FILE, f"no rows: {error}", "rows of a run on labels", "copy the directory again") from None
        if LABEL_NAMES in files:
            found = replace(found, names=read_label_names(directory / LABEL_NAMES, found.rows.num_labels))
        if found.fingerprint != content.get("fingerprint"):
            raise refuse(directory / MANIFEST, "the fingerprint of other rows", "that of these", "copy the directory again")
        return found

    def split(self, config: MultiLabelConfig) -> LabelSplit:
        """Hold out rows as a configuration says; the rows of a part are in their order.

        Raises:
            DataError: too few rows.
        """
        count = len(self.rows)
        # Sorted uniform numbers, not a library shuffle: the same rows under every numpy version.
        mixed = np.argsort(np.random.Generator(np.random.PCG64(config.seed)).random(count), kind="stable")
        num_valid = max(1, round(config.split.valid_fraction * count))
        num_test = 0 if self.test is not None else max(1, round(config.test_fraction * count))
        if num_valid + num_test >= count or (self.test is not None and not len(self.test)):
            told = f"{count:,} rows" if self.test is None or len(self.test) else "no rows of the test"
            raise DataError(f"data: got {told}, expected some for each of training, validation and test")
        valid, test, train = np.split(mixed, [num_valid, num_valid + num_test])
        return LabelSplit(
            self.rows.take(np.sort(train)),
            self.rows.take(np.sort(valid)),
            self.rows.take(np.sort(test)) if self.test is None else self.test,
        )


class LabelSplit(NamedTuple):
    """Rows of training, validation and test."""

    train: MultiLabelRows
    valid: MultiLabelRows
    test: MultiLabelRows


def fitted(rows: MultiLabelRows, counted: AbstractSet[str], *, num_features: int, num_labels: int, what: str) -> MultiLabelRows:
    """Rows of so many features and labels, which are more than were `counted` (`num_features`, `num_labels`), if any were.

    Raises:
        DataError: rows that do not fit.
    """
    sizes = {"num_features": num_features, "num_labels": num_labels}
    rows = replace(rows, **{name: max(size, getattr(rows, name)) for name, size in sizes.items() if name in counted})
    check_sizes(rows, num_features, num_labels, what)
    return rows


def check_sizes(rows: MultiLabelRows, num_features: int, num_labels: int, what: str) -> None:
    """Refuse rows of other numbers of features or labels.

    Raises:
        DataError: both.
    """
    for name, found, expected in (("features", rows.num_features, num_features), ("labels", rows.num_labels, num_labels)):
        if found != expected:
            cure = "give files of one data set"
            raise refuse(what, f"{found:,} {name}", f"{expected:,}, as the rows of training have them", cure)


def text_labels(source: Any, data: LabelDataOptions, *, progress: bool = True) -> pa.LargeStringArray | None:
    """The labels of a table or a parquet file that has text for them, large_string, each once; None of all else.

    Raises:
        DataError: malformed labels.
    """
    if not is_table(source) and (not isinstance(source, (str, os.PathLike)) or _format(source, data) != "parquet"):
        return None
    return label_names_of_table(source, labels=data.labels_column, progress=progress)


def read_rows(
    source: Any,
    data: LabelDataOptions,
    filter_path: str | None = None,
    *,
    names: pa.LargeStringArray | None = None,
    has_labels: bool = True,
    progress: bool = True,
) -> tuple[MultiLabelRows, AbstractSet[str]]:
    """Rows of a file, of a table in memory, or as they are; and which of `num_features` and `num_labels` were counted.

    Tables need no labels where none are asked for; where they are text they are some of `names`.

    Raises:
        DataError: malformed rows.
    """
    if isinstance(source, MultiLabelRows):
        return source, set()
    columns: dict[str, Any] = {"features": data.features_column, "values": data.values_column}
    columns |= {"labels": data.labels_column if has_labels else None, "embeddings": data.embeddings_column}
    columns |= {"names": names if has_labels else None}
    # Embeddings have the width that they have.
    of_tables = {"num_labels"} if data.embeddings_column is not None else {"num_features", "num_labels"}
    if is_table(source):
        return read_label_table(source, **columns, progress=progress), of_tables
    if not isinstance(source, (str, os.PathLike)):
        raise DataError(f"rows: got a {type(source).__name__}, expected a file, a table in memory, or MultiLabelRows")
    kind = _format(source, data)
    if kind != "text" and data.on_error != "stop":
        raise DataError(f"data.on_error: got {data.on_error}, expected stop: rows of text files alone are skipped")
    if kind != "parquet" and data.embeddings_column is not None:
        raise DataError(f"data.embeddings_column: got {data.embeddings_column}, expected none: parquet files alone have columns")
    if kind != "parquet" and has_labels and names is not None:
        raise refuse(source, "labels that are numbers", "text, as the rows of training have", "write a table")
    counted: AbstractSet[str] = set()
    if kind == "text":
        rows = read_xmc(source, on_error=data.on_error, progress=progress)
    elif kind == "parquet":
        rows, counted = read_label_table(source, **columns, progress=progress), of_tables
    else:
        # What an attribute is stands in the file.
        rows = read_arff(source, data.num_labels, progress=progress)
    if filter_path is None:
        return rows, counted
    try:
        found = LabelFilter.read(filter_path, len(rows), rows.num_labels)
    except OSError as error:
        raise refuse(filter_path, error.strerror or str(error), "a file of pairs of a row and a label") from None
    filtered: dict[str, Any] = {"filtered": found.labels.numpy().astype(np.int32), "filtered_offsets": found.offsets.numpy()}
    return replace(rows, **filtered), counted


def _format(path: str | os.PathLike[str], data: LabelDataOptions) -> str:
    kind = {".parquet": "parquet", ".arff": "arff"}.get(Path(path).suffix.lower(), "text")
    return kind if data.format == "auto" else data.format
