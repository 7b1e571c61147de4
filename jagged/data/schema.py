"""What each column of a table is: its kind, and how its ids become numbers. Printed, edited as TOML, saved with a dataset."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from jagged.artifacts import errors_as, read_bytes, write_file, writing
from jagged.data.errors import DataError, refuse, shown


class Kind(StrEnum):
    """What a column is for."""

    ID = "id"
    IDS = "ids"
    NUMBER = "number"
    NUMBERS = "numbers"
    LABEL = "label"
    WEIGHT = "weight"
    TIME = "time"
    USER = "user"
    REQUEST = "request"
    CANDIDATE = "candidate"
    EVENT = "event"
    UNUSED = "unused"


# Of these a table has one at most.
SINGLE = (Kind.WEIGHT, Kind.TIME, Kind.USER, Kind.REQUEST, Kind.CANDIDATE, Kind.EVENT)
# Their values are ids, which a vocabulary, a hash or a range makes numbers.
WITH_IDS = (Kind.ID, Kind.IDS, Kind.USER, Kind.CANDIDATE, Kind.EVENT)
#: Features of which the table does not say by their kind whose they are: the candidate's or the request's.
SIDED = (Kind.ID, Kind.IDS, Kind.EVENT, Kind.NUMBER, Kind.NUMBERS)
_MOST_DOTS = 1_000
_CANDIDATES = (Kind.CANDIDATE, Kind.LABEL, Kind.WEIGHT)


@dataclass(frozen=True)
class Column:
    """A column and what it is for.

    Attributes:
        name: in the source.
        kind: what it is for.
        table: of ids: columns of one table share its numbers, as a candidate and a history of such do. None: the column's name.
        encoding: of ids: "vocabulary" (those of the training rows), "hash" (into `size` rows) or "range" (whole numbers from 0 to
            `size - 1` that stay as they are).
        size: rows of a hash or a range.
        weights: of "ids": the list column with a number for each id.
        separator: of "ids" and "numbers" in text: what stands between values; None for lists as JSON writes them.
        positive_from: of a label: it is 1 from this value on, and 0 below; None: it is as it stands.
        of: of features: "candidate" where each candidate of a request has a value of its own, "request" where all have the same;
            None where nobody has said it, which counts as the request's.
    """

    name: str
    kind: Kind
    table: str | None = None
    encoding: str = "vocabulary"
    size: int | None = None
    weights: str | None = None
    separator: str | None = None
    of: str | None = None
    positive_from: float | None = None

    def __post_init__(self) -> None:
        where = f"schema, column {shown(self.name)}"
        if not isinstance(self.name, str) or not self.name:
            raise refuse("schema", f"a column named {shown(self.name)}", "a name")
        for key in ("table", "weights", "separator"):
            value = getattr(self, key)
            if value is not None and (not isinstance(value, str) or not value):
                raise refuse(where, f"{key} {shown(value)}", "a text")
        try:
            object.__setattr__(self, "kind", Kind(self.kind))
        except ValueError:
            raise refuse(where, f"kind {shown(self.kind)}", ", ".join(kind.value for kind in Kind)) from None
        if self.encoding not in ("vocabulary", "hash", "range"):
            raise refuse(where, f"encoding {shown(self.encoding)}", "vocabulary, hash or range")
        if (self.size is None) != (self.encoding == "vocabulary"):
            raise refuse(where, f"encoding {self.encoding!r} and size {self.size}", "a size with hash and range alone")
        if self.size is not None and (type(self.size) is not int or not 0 < self.size < 2**31):
            raise refuse(where, f"size {shown(self.size)}", f"1 to {2**31 - 1}")
        of_ids = self.encoding != "vocabulary" or self.table is not None
        if of_ids and self.kind not in WITH_IDS:
            raise refuse(where, f"table or encoding for a column of kind {self.kind.value}", "a column of ids")
        if self.weights is not None and self.kind is not Kind.IDS:
            raise refuse(where, f"weights for a column of kind {self.kind.value}", "kind ids")
        if self.separator is not None and self.kind not in (Kind.IDS, Kind.NUMBERS):
            raise refuse(where, f"a separator for a column of kind {self.kind.value}", "kind ids or numbers")
        if self.positive_from is not None and self.kind is not Kind.LABEL:
            raise refuse(where, f"positive_from for a column of kind {self.kind.value}", "kind label")
        if self.positive_from is not None and not _is_number(self.positive_from):
            raise refuse(where, f"positive_from {shown(self.positive_from)}", "a finite number")
        if self.of not in (None, "candidate", "request"):
            raise refuse(where, f"of {shown(self.of)}", "candidate or request")
        if self.of is not None and self.kind not in SIDED:
            raise refuse(where, f"of {self.of!r} for a column of kind {self.kind.value}", "a feature, of ids or numbers")

    @property
    def is_candidates(self) -> bool:
        """Whether each candidate of a request has a value of its own."""
        return self.of == "candidate" or self.kind in _CANDIDATES

    @property
    def table_name(self) -> str:
        """The table of its ids."""
        return self.table or self.name


@dataclass(frozen=True)
class Schema:
    """The columns of a table, in its order.

    Raises:
        DataError: a name twice, two columns of a kind of which there is one, weights or tables that do not fit.
    """

    columns: tuple[Column, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", tuple(self.columns))
        names = self.names
        if twice := [name for name in names if names.count(name) > 1]:
            raise refuse("schema", f"the column {shown(twice[0])} {names.count(twice[0])} times", "it once")
        for kind in SINGLE:
            if len(found := [column.name for column in self.columns if column.kind is kind]) > 1:
                raise refuse("schema", f"{len(found)} columns of kind {kind.value} ({', '.join(found)})", "one at most")
        for column in self.columns:
            if column.weights is not None and (
                column.weights not in names or self[column.weights].kind is not Kind.NUMBERS or column.weights == column.name
            ):
                raise refuse(
                    f"schema, column {shown(column.name)}", f"weights {shown(column.weights)}", "a column of kind numbers"
                )
        self.tables  # noqa: B018 - refuses columns of one table that are encoded in several ways

    @property
    def names(self) -> list[str]:
        """Of the columns."""
        return [column.name for column in self.columns]

    def __getitem__(self, name: str) -> Column:
        for column in self.columns:
            if column.name == name:
                return column
        raise KeyError(name)

    def of_kind(self, *kinds: Kind) -> list[Column]:
        """The columns of some kinds."""
        return [column for column in self.columns if column.kind in kinds]

    def one(self, kind: Kind) -> Column | None:
        """The column of a kind of which there is one at most."""
        return next(iter(self.of_kind(kind)), None)

    def features(self, *kinds: Kind) -> list[Column]:
        """The columns of some kinds without those that are weights of ids."""
        weights = {column.weights for column in self.of_kind(Kind.IDS)}
        return [column for column in self.of_kind(*kinds) if column.name not in weights]

    @property
    def tables(self) -> dict[str, list[Column]]:
        """The columns of ids, by the table that they share."""
        return shared_tables(self)

    def with_words(
        self,
        *,
        label: str | Sequence[str] | None = None,
        candidate: str | None = None,
        history: str | Sequence[str] | None = None,
        user: str | None = None,
        time: str | None = None,
        request: str | None = None,
        weight: str | None = None,
        event: str | None = None,
        ids: str | Sequence[str] | None = None,
        numbers: str | Sequence[str] | None = None,
        unused: str | Sequence[str] | None = None,
        candidate_columns: str | Sequence[str] | None = None,
        request_columns: str | Sequence[str] | None = None,
    ) -> Schema:
        """The schema with the kinds that a user names; who had a kind of which there is one loses it and is unused.

        `label` replaces what was taken for labels; `"rating>=4"` names the column `rating`, which is 1 from 4 on and 0 below.
        `history` are list columns of candidates' ids, whose table they share. `ids` and `numbers` are lists where the columns
        are. `candidate_columns` are features of which each candidate of a request has a value of its own, `request_columns` those
        of which all have the same.

        Raises:
            DataError: a column that is not there, or is named for two kinds.
        """
        single = {
            Kind.CANDIDATE: candidate, Kind.USER: user, Kind.TIME: time, Kind.REQUEST: request, Kind.WEIGHT: weight,
            Kind.EVENT: event,
        }  # fmt: skip
        chosen: dict[str, Kind] = {}

        def choose(name: str, kind: Kind, word: str) -> None:
            if name not in self.names:
                raise refuse(f"{word}={name!r}", f"the columns {shown(self.names, 200)}", f"a column {shown(name)}")
            if chosen.setdefault(name, kind) is not kind:
                raise refuse(f"{word}={name!r}", f"the column named as {chosen[name].value} too", "one kind for a column")

        for kind, name in single.items():
            if name is not None:
                choose(name, kind, kind.value)
        labels = dict(_threshold(word, self.names) for word in _names(label))
        for name in labels:
            choose(name, Kind.LABEL, "label")
        for name in _names(history):
            choose(name, Kind.IDS, "history")
        is_list = {column.name for column in self.of_kind(Kind.IDS, Kind.NUMBERS)}
        for name in _names(ids):
            choose(name, Kind.IDS if name in is_list else Kind.ID, "ids")
        for name in _names(numbers):
            choose(name, Kind.NUMBERS if name in is_list else Kind.NUMBER, "numbers")
        for name in _names(unused):
            choose(name, Kind.UNUSED, "unused")
        taken = {kind for kind, name in single.items() if name is not None} | ({Kind.LABEL} if label is not None else set())
        candidates = candidate or next((column.name for column in self.of_kind(Kind.CANDIDATE)), None)
        columns = []
        for column in self.columns:
            kind = chosen.get(column.name, Kind.UNUSED if column.kind in taken else column.kind)
            if kind is not column.kind:
                column = _of_kind(column, kind)
            if labels.get(column.name) is not None:
                column = dataclasses.replace(column, positive_from=labels[column.name])
            if column.name in _names(history) and candidates is not None:
                shared = self[candidates] if self[candidates].kind in WITH_IDS else Column(candidates, Kind.CANDIDATE)
                column = dataclasses.replace(column, table=shared.table_name, encoding=shared.encoding, size=shared.size)
            columns.append(column)
        return Schema(tuple(columns))._with_sides({"candidate": _names(candidate_columns), "request": _names(request_columns)})

    def _with_sides(self, sides: Mapping[str, list[str]]) -> Schema:
        told: dict[str, str] = {}
        for side, names in sides.items():
            for name in names:
                where = f"{side}_columns={name!r}"
                if name not in self.names:
                    raise refuse(where, f"the columns {shown(self.names, 200)}", f"a column {shown(name)}")
                if self[name].kind not in SIDED:
                    raise refuse(where, f"a column of kind {self[name].kind.value}", "a feature, of ids or numbers")
                if told.setdefault(name, side) != side:
                    raise refuse(where, f"the column in {told[name]}_columns too", "it in one of them")
        return Schema(tuple(dataclasses.replace(one, of=told.get(one.name, one.of)) for one in self.columns))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON: kind and what differs from its default, by the column's name."""
        defaults = {field.name: field.default for field in dataclasses.fields(Column)}
        found: dict[str, Any] = {}
        for column in self.columns:
            values = {**dataclasses.asdict(column), "kind": column.kind.value}
            found[column.name] = {
                name: value for name, value in values.items() if name != "name" and (name == "kind" or value != defaults[name])
            }
        return found

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Schema:
        """The schema that `to_dict` gave.

        Raises:
            DataError: what is no schema, with the column.
        """
        known = {field.name for field in dataclasses.fields(Column)} - {"name"}
        columns = []
        for name, entry in values.items():
            if not isinstance(entry, Mapping) or "kind" not in entry or (unknown := set(entry) - known):
                found = shown(entry) if not isinstance(entry, Mapping) or "kind" not in entry else f"the keys {sorted(unknown)}"
                raise refuse(
                    f"schema, column {shown(name)}", found, f"a kind and of {', '.join(sorted(known - {'kind'}))} what is needed"
                )
            columns.append(Column(name, **entry))
        return cls(tuple(columns))

    def to_toml(self) -> str:
        """One line a column."""
        lines = []
        for name, entry in self.to_dict().items():
            values = ", ".join(f"{key} = {_quoted(value)}" for key, value in entry.items())
            lines.append(f"{_quoted(name)} = {{ {values} }}")
        return "\n".join(["[columns]", *lines]) + "\n"

    @classmethod
    def from_toml(cls, text: str, where: str = "schema") -> Schema:
        """The schema that a text says.

        Raises:
            DataError: no TOML, or no schema.
        """
        # Reading takes as long as the square of a name's parts.
        if (dots := max((line.count(".") for line in text.splitlines()), default=0)) > _MOST_DOTS:
            raise refuse(where, f"a line with {dots} dots", f"a table [columns], at most {_MOST_DOTS} dots a line")
        try:
            found = tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            # Of a number with thousands of digits and of deep nesting Python itself complains.
            raise refuse(where, f"no TOML ({error})", "a table [columns]") from None
        if set(found) != {"columns"} or not isinstance(found["columns"], dict):
            raise refuse(where, f"the keys {shown(sorted(found))}", "one table, [columns]")
        try:
            return cls.from_dict(found["columns"])
        except DataError as error:
            raise DataError(f"{where}: {error}") from None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Schema:
        """The schema of a TOML file.

        Raises:
            DataError: the file cannot be read, or holds no schema.
        """
        with errors_as(DataError):
            content = read_bytes(Path(path))
        try:
            return cls.from_toml(content.decode("utf-8"), os.fspath(path))
        except UnicodeDecodeError:
            raise refuse(path, "bytes that are not UTF-8", "TOML with a table [columns]") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a TOML file; a schema that is there is replaced, and nothing else.

        Raises:
            DataError: the file cannot be written, or is there and holds no schema.
        """
        target = Path(path)
        with writing(target, "name another file", DataError):
            if target.exists():
                try:
                    Schema.load(target)
                except DataError:
                    raise refuse(target, "a file that holds no schema", "a schema or no file", "name another file") from None
            write_file(target, self.to_toml().encode())


def shared_tables(*schemas: Schema) -> dict[str, list[Column]]:
    """The columns of ids of some schemas, by the table that they share.

    Raises:
        DataError: columns of one table that are encoded in several ways.
    """
    found: dict[str, list[Column]] = {}
    for schema in schemas:
        for column in schema.of_kind(*WITH_IDS):
            found.setdefault(column.table_name, []).append(column)
    for name, columns in found.items():
        ways = {(column.encoding, column.size) for column in columns}
        if len(ways) > 1:
            raise refuse(f"schema, table {shown(name)}", f"the encodings {shown(sorted(map(str, ways)), 200)}", "one")
    return found


def beside(events: Schema, rows: Schema) -> Schema:
    """The schema of events whose ids share the numbers of the rows that they are the history of.

    Users, candidates and event types share the table of the rows' column of that kind; other ids that of the rows' ids of the
    same name. How a shared table is encoded, the rows say, unless an event column says something else than "vocabulary".

    Raises:
        DataError: a user, candidate or event type that names another table than the rows' column of its kind.
    """
    columns, own = [], events.one(Kind.CANDIDATE)
    for column in events.columns:
        of_role = column.kind if column.kind in (Kind.USER, Kind.CANDIDATE, Kind.EVENT) else None
        if column.kind in WITH_IDS and own is not None and column.table == own.table_name != column.name:
            of_role = Kind.CANDIDATE
        partner = None if of_role is None else rows.one(of_role)
        named = column.name in rows.names and rows[column.name].kind in WITH_IDS and column.table is None
        if partner is None and column.kind in WITH_IDS and named:
            partner = rows[column.name]
        if partner is not None:
            if column.kind is of_role and column.table not in (None, partner.table_name):
                raise refuse(
                    f"events: column {shown(column.name)}",
                    f"the table {shown(column.table)}",
                    f"{shown(partner.table_name)}, as of the rows' {column.kind.value} {shown(partner.name)}",
                    "leave table out",
                )
            told = column if column.encoding != "vocabulary" else partner
            column = dataclasses.replace(column, table=partner.table_name, encoding=told.encoding, size=told.size)
        columns.append(column)
    return Schema(tuple(columns))


def _of_kind(column: Column, kind: Kind) -> Column:
    """The column as one of another kind, with what it keeps: ids stay encoded as they were, lists separated."""
    has_ids, is_list = kind in WITH_IDS and column.kind in WITH_IDS, kind in (Kind.IDS, Kind.NUMBERS)
    return dataclasses.replace(
        column,
        kind=kind,
        table=column.table if has_ids else None,
        encoding=column.encoding if has_ids else "vocabulary",
        size=column.size if has_ids else None,
        weights=None,
        separator=column.separator if is_list else None,
        positive_from=column.positive_from if kind is Kind.LABEL else None,
        of=column.of if kind in SIDED else None,
    )


def _threshold(word: str, names: Sequence[str]) -> tuple[str, float | None]:
    """A label's name, and from what value on it is 1, where the word is no column's name and says it."""
    name, sign, number = word.partition(">=")
    if not sign or word in names:
        return word, None
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not _is_number(value):
        raise refuse(f"label={word!r}", shown(number.strip()), "a finite number behind >=, as in 'rating>=4'")
    return name.strip(), value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _quoted(value: Any) -> str:
    """A value in TOML, which takes what JSON writes but for one control character."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _names(words: str | Iterable[str] | None) -> list[str]:
    return [] if words is None else [words] if isinstance(words, str) else list(words)
