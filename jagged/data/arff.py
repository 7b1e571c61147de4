"""Rows with features and sets of labels from ARFF files, as multi-label data sets of MEKA and Mulan are."""

from __future__ import annotations

import csv
import math
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from jagged.data.errors import at, refuse, shown
from jagged.data.files import check_length, reading
from jagged.data.progress import DELAY, disabled
from jagged.data.xmc import MultiLabelRows

_COUNT = re.compile(r"-C\s+(-?[0-9]{1,9})")
_ATTRIBUTE = re.compile(r"@attribute\s+('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|[^\s{]+)\s*(.+)", re.IGNORECASE)
_NUMERIC = ("numeric", "real", "integer")
_ELEMENT = re.compile(r"\s*([0-9]{1,9})\s+('[^']*'|\"[^\"]*\"|[^\s,]+)\s*")


class _Attribute(NamedTuple):
    name: str
    is_binary: bool


def read_arff(path: str | os.PathLike[str], num_labels: int | None = None, *, progress: bool = True) -> MultiLabelRows:
    """Read an ARFF file whose first or last attributes are labels, each 0 or 1.

    Features are numbers, or have the two values 0 and 1; one that is 0 is none of a row's. Rows are dense, `0,1,2.5`, or sparse,
    `{1 1, 2 2.5}`.

    Args:
        path: the file.
        num_labels: how many of the first attributes are labels, below 0 of the last ones; None: as MEKA writes it into the name
            of the relation, `-C 14`.
        progress: show a bar for what takes longer than two seconds.

    Raises:
        DataError: malformed input: one line with the file, the line, what was found, what is expected, and the cure.

    Source: the format is Weka's; the count of labels in the relation's name is MEKA's.
    """
    place = Path(path)
    with reading(place):
        size = place.stat().st_size
    options = {"disable": disabled(progress), "delay": DELAY, "leave": False, "unit": "B", "unit_scale": True}
    with reading(place), open(place, "rb") as file, tqdm(total=size, desc="Reading", **options) as bar:  # type: ignore[call-overload]
        lines = _lines(place, file, bar.update)
        count, attributes = _header(place, lines)
        count = count if num_labels is None else num_labels
        if not count or abs(count) >= len(attributes):
            found = "no count of labels" if count is None else f"{count} labels of {len(attributes)} attributes"
            expected = f"-C and 1 to {len(attributes) - 1}, or below 0 of the last ones, in the name of the relation"
            raise refuse(place, found, expected, "give num_labels")
        first = 0 if count > 0 else len(attributes) + count
        for attribute in attributes[first : first + abs(count)]:
            if not attribute.is_binary:
                raise refuse(place, f"the label {shown(attribute.name)} as a number", "the values {0, 1}", "is it a label?")
        return _read(place, lines, attributes, first, abs(count))


def _lines(path: Path, file: Iterator[bytes], advance: Callable[[int], object]) -> Iterator[tuple[int, str]]:
    """Lines that are neither blank nor comments, with their numbers."""
    for number, raw in enumerate(file, 1):
        check_length(path, number, len(raw))
        advance(len(raw))
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError as error:
            raise refuse(
                at(path, number), f"the byte 0x{raw[error.start]:02x}, which is not UTF-8", "UTF-8 text", "convert the file"
            ) from None
        if line and not line.startswith("%"):
            yield number, line


def _header(path: Path, lines: Iterator[tuple[int, str]]) -> tuple[int | None, list[_Attribute]]:
    count: int | None = None
    attributes: list[_Attribute] = []
    for number, line in lines:
        word = line.split(None, 1)[0].lower()
        if word == "@data":
            return count, attributes
        if word == "@relation":
            found = _COUNT.search(line)
            count = None if found is None else int(found[1])
        elif word == "@attribute":
            attributes.append(_attribute(path, number, line))
        else:
            raise refuse(at(path, number), shown(line), "@relation, @attribute or @data", "is it an ARFF file?")
    raise refuse(path, "no line @data", "rows behind it", "is it an ARFF file?")


def _attribute(path: Path, number: int, line: str) -> _Attribute:
    parts = _ATTRIBUTE.fullmatch(line)
    if parts is None:
        raise refuse(at(path, number), shown(line), "@attribute, a name and a type")
    name, kind = parts[1].strip("'\""), parts[2].strip()
    if kind.lower() in _NUMERIC:
        return _Attribute(name, False)
    # The first value is what sparse rows leave out.
    values = [value.strip().strip("'\"") for value in kind.strip("{}").split(",")]
    if not kind.startswith("{") or values != ["0", "1"]:
        expected = "numeric, or {0, 1}"
        raise refuse(
            at(path, number), f"{shown(name)} of type {shown(kind)}", expected, "write an attribute 0 or 1 for each value"
        )
    return _Attribute(name, True)


def _read(
    path: Path, lines: Iterator[tuple[int, str]], attributes: list[_Attribute], first: int, num_labels: int
) -> MultiLabelRows:
    ids: list[int] = []
    values: list[float] = []
    labels: list[int] = []
    feature_offsets, label_offsets = [0], [0]
    behind = first + num_labels
    for number, line in lines:
        for place, text in _elements(path, number, line, attributes):
            value = _value(path, number, attributes[place], text)
            if not value:
                continue
            if first <= place < behind:
                labels.append(place - first)
            else:
                ids.append(place if place < first else place - num_labels)
                values.append(value)
        feature_offsets.append(len(ids))
        label_offsets.append(len(labels))
    return MultiLabelRows(
        np.array(ids, dtype=np.int32),
        np.array(values, dtype=np.float32),
        np.array(feature_offsets, dtype=np.int64),
        np.array(labels, dtype=np.int32),
        np.array(label_offsets, dtype=np.int64),
        num_features=len(attributes) - num_labels,
        num_labels=num_labels,
    )


def _elements(path: Path, number: int, line: str, attributes: list[_Attribute]) -> Iterator[tuple[int, str]]:
    """The places of a row's attributes, which ascend, and what stands there."""
    if not line.startswith("{"):
        fields = next(csv.reader([line], quotechar="'", skipinitialspace=True))
        if len(fields) != len(attributes):
            raise refuse(at(path, number), f"{len(fields)} fields", f"{len(attributes)}, one for each attribute")
        yield from enumerate(field.strip() for field in fields)
        return
    if not line.endswith("}"):
        raise refuse(at(path, number), shown(line), "a row between { and }")
    before = -1
    for element in line[1:-1].split(",") if line[1:-1].strip() else ():
        parts = _ELEMENT.fullmatch(element)
        if parts is None or not before < int(parts[1]) < len(attributes):
            expected = f"an attribute's number from {before + 1} to {len(attributes) - 1}, and a value"
            raise refuse(at(path, number), shown(element.strip()), expected)
        before = int(parts[1])
        yield before, parts[2].strip("'\"")


def _value(path: Path, number: int, attribute: _Attribute, text: str) -> float:
    try:
        with np.errstate(over="ignore"):
            value = float(np.float32(float(text)))
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or (attribute.is_binary and value not in (0, 1)):
        expected = "0 or 1" if attribute.is_binary else "a finite number of float32"
        raise refuse(at(path, number), f"{shown(text)} of {shown(attribute.name)}", expected)
    return value
