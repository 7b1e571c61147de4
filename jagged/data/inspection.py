"""What is in a table, before anything is learned from it: each column's kind and figures, odd values, and what may leak."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from jagged.artifacts.errors import one_line
from jagged.data.errors import MAX_ID_BYTES
from jagged.data.inference import schema_for
from jagged.data.progress import steps
from jagged.data.schema import WITH_IDS, Column, Kind, Schema
from jagged.data.sources import Table, identifier, open_table
from jagged.data.values import element, form, hint_of_dates, missing_sql, time_form_sql, value_sql

_WIDTH = 120
# Places that are shown of what is odd.
_PLACES = 3
# Up to so many distinct values are counted, one by one.
_COUNTED = 50_000
_LISTS = (Kind.IDS, Kind.NUMBERS)
_ROLES = (Kind.USER, Kind.CANDIDATE, Kind.TIME)
# Units of times as numbers, by the power of ten from which on they are meant: between 1973 and 5138 each is told from the others.
_UNITS = ((17, "nanoseconds"), (14, "microseconds"), (11, "milliseconds"), (8, "seconds"))
_FITS = {
    Kind.NUMBER: "a finite number",
    Kind.LABEL: "a number",
    Kind.WEIGHT: "a number",
    Kind.TIME: "a whole number or an ISO 8601 time",
    Kind.IDS: "a list",
    Kind.NUMBERS: "a list",
}


@dataclass(frozen=True)
class ColumnFigures:
    """Figures of a column over all rows.

    Attributes:
        column: its place in the schema.
        type: of the source; "text" in a csv file.
        distinct: values, of lists elements.
        is_exact: whether `distinct` was counted, rather than estimated to some percent.
        present: values that fit the kind.
        missing: values that are missing; an empty list is not.
        mean_length: of lists.
        longest: list.
        example: the first value that fits the kind, as it stands in the source.
    """

    column: Column
    type: str
    distinct: int
    is_exact: bool
    present: int
    missing: int
    mean_length: float | None
    longest: int | None
    example: str


@dataclass(frozen=True)
class OddValues:
    """Values of a column, or rows, that are not as expected.

    Attributes:
        column: the column's name; None for whole rows.
        what: what they are.
        count: of them.
        first: the first places, each with the value, or with the row's first equal.
        expected: in their place.
    """

    column: str | None
    what: str
    count: int
    first: tuple[tuple[str, str], ...]
    expected: str = ""


@dataclass(frozen=True)
class Inspection:
    """What `inspect_table` found; as text, a table of the columns, then what is odd.

    Attributes:
        name: of the source.
        schema: inferred or given, with the user's words.
        rows: of the table.
        columns: figures of each column, by its name.
        odd: values that do not fit, and rows that repeat others.
        leaks: counts of what may leak, by what they count; 0 where nothing was found, and only what the columns allow to count.
        left_out: what a folder holds beside the table's files, with the reason.
    """

    name: str
    schema: Schema
    rows: int
    columns: dict[str, ColumnFigures]
    odd: list[OddValues]
    leaks: dict[str, int]
    left_out: dict[str, str]

    def __str__(self) -> str:
        lines = [*_wrapped(f"{self.name}: {_counted(self.rows, 'row')}, {_counted(len(self.columns), 'column')}", ""), ""]
        lines += _table(list(self.columns.values()))
        if self.odd:
            lines += ["", "Odd:"]
            for odd in self.odd:
                lines += _wrapped(_told(odd), "  ")
        if self.leaks:
            lines += ["", "Counts:"]
            for what, count in self.leaks.items():
                lines += _wrapped(f"{what}: {count:,}", "  ")
        if self.left_out:
            lines += ["", "Left out:"]
            for name, reason in self.left_out.items():
                lines += _wrapped(f"{name}: {reason}", "  ")
        return "\n".join(lines)


def inspect_table(
    source: Any,
    schema: Schema | str | os.PathLike[str] | None = None,
    *,
    format: str = "auto",
    delimiter: str | None = None,
    progress: bool = True,
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
) -> Inspection:
    """Look at all rows of a table: what its columns are taken for, their figures, odd values, and what may leak.

    Args:
        source: csv or parquet files, a folder of them, an Arrow table or a data frame; as in `open_table`.
        schema: what the columns are, or a TOML file that says it; None: inferred. Columns that it does not name are unused.
        format: "auto", "csv" or "parquet", of files.
        delimiter: of csv; None finds it out.
        progress: show a bar on a terminal for what takes longer than two seconds.
        label: the columns that are labels; this and what follows are words that win over the schema, as in `Schema.with_words`.
        candidate: the column of the item that a row is about.
        history: list columns of ids of candidates.
        user: the column of the user.
        time: the column of the time.
        request: the column of the request that rows share.
        weight: the column of the row's weight.
        event: the column of the event's type.
        ids: columns of ids.
        numbers: columns of numbers.
        unused: columns that are not used.
        candidate_columns: features of which each candidate of a request has a value of its own.
        request_columns: features of which all candidates of a request have the same value.

    Raises:
        DataError: malformed input, or a schema or a word that does not fit the table.
    """
    words = {
        "label": label, "candidate": candidate, "history": history, "user": user, "time": time, "request": request,
        "weight": weight, "event": event, "ids": ids, "numbers": numbers, "unused": unused,
        "candidate_columns": candidate_columns, "request_columns": request_columns,
    }  # fmt: skip
    if schema is not None and not isinstance(schema, Schema):
        schema = Schema.load(schema)
    with (
        open_table(source, format=format, delimiter=delimiter, progress=progress) as table,
        steps("Inspecting", len(table.types) + 3, progress) as step,
    ):
        step("what columns are for")
        found = schema_for(table, schema, **words)
        columns, odd = {}, []
        for column in found.columns:
            step(f"column {column.name}")
            columns[column.name], odds = _figures(table, column)
            odd += odds
        if weights := [column for column in found.columns if column.weights is not None]:
            odd += [each for column in weights for each in _unequal(table, found, column)]
        step("equal rows")
        odd += _repeated(table)
        step("leaks")
        return Inspection(table.name, found, table.num_rows, columns, odd, _leaks(table, found), table.left_out)


@dataclass(frozen=True)
class _Test:
    """A condition on a row's value `v`, whether it is missing `m`, and what stands in the source `x`, that makes it odd."""

    what: str
    holds: str
    expected: str = ""


def _figures(table: Table, column: Column) -> tuple[ColumnFigures, list[OddValues]]:
    """Figures and odd values of a column."""
    kind = table.types[column.name]
    is_list = column.kind in _LISTS
    value, missing, name = value_sql(column, kind), missing_sql(column, kind), identifier(column.name)
    values = f"(SELECT rowid, {value} AS v, {missing} AS m, {name} AS x FROM {table.rows})"
    tests = _tests(column, kind, hint_of_dates(table, column))
    asked = ["count(v)", "count(*) FILTER (m)"]
    asked += ["avg(len(v))", "max(len(v))", "NULL"] if is_list else ["NULL", "NULL", "approx_count_distinct(v)"]
    asked += [f"count(*) FILTER ({test.holds}), min(rowid, {_PLACES}) FILTER ({test.holds})" for test in tests]
    ((present, absent, mean, longest, distinct, *found),) = table.sql(f"SELECT {', '.join(asked)} FROM {values}")
    odd = [
        OddValues(column.name, test.what, count, _places(table, column, rows), test.expected)
        for test, count, rows in zip(tests, found[::2], found[1::2], strict=True)
        if count
    ]
    single = "v"
    if is_list:
        values, single = f"(SELECT unnest(v) AS e FROM {values})", "e"
        ((distinct,),) = table.sql(f"SELECT approx_count_distinct(e) FROM {values}")
    if column.kind is Kind.TIME:
        odd += _mixed(table, column)
    is_exact = distinct <= _COUNTED
    if is_exact:
        ((distinct,),) = table.sql(f"SELECT count(DISTINCT {single}) FROM {values}")
    type_name = "text" if table.is_text else _type(kind)
    example = _example(table, column)
    return ColumnFigures(column, type_name, distinct, is_exact, present, absent, mean, longest, example), odd


def _tests(column: Column, kind: pa.DataType, hint: str) -> list[_Test]:
    if column.kind is Kind.UNUSED:
        return []
    tests = []
    if column.kind in _FITS:
        what = {Kind.TIME: "are no times", Kind.IDS: "are no lists", Kind.NUMBERS: "are no lists"}.get(
            column.kind, "are no numbers"
        )
        tests.append(_Test(what, "v IS NULL AND NOT m", f"{_FITS[column.kind]}; {hint}" if hint else _FITS[column.kind]))
    elif column.encoding == "range":
        tests.append(_Test("are outside of the range", "v IS NULL AND NOT m", f"0 to {(column.size or 0) - 1}"))
    elif form(kind) != "text":
        tests.append(_Test("are no ids", "v IS NULL AND NOT m", "a whole number or a text"))
    if column.kind in _ROLES:
        tests.append(_Test("are missing", "m", f"a {column.kind.value} in every row"))
    if column.kind is Kind.LABEL and column.positive_from is None:
        tests.append(_Test("are outside of 0 to 1", "v < 0 OR v > 1", "0, 1 or a number between"))
    if column.kind is Kind.WEIGHT:
        tests.append(_Test("are negative", "v < 0", "a weight of 0 or more"))
    if column.kind in _LISTS:
        what = f"have elements that are missing or no {'numbers' if column.kind is Kind.NUMBERS else 'ids'}"
        tests.append(_Test(what, "len(v) > list_count(v)"))
    if column.kind not in (*_FITS, Kind.UNUSED) and form(kind) == "text":
        tests.append(_Test("have blanks around", "v IS NOT NULL AND x <> trim(x)", "ids without, as such are others"))
        tests.append(_Test(f"are longer than {MAX_ID_BYTES} bytes", f"strlen(x) > {MAX_ID_BYTES}", "shorter ids"))
    return tests


def _mixed(table: Table, column: Column) -> list[OddValues]:
    """Times in several units, or written in several ways: all but the most frequent one are odd."""
    value, form_of = value_sql(column, table.types[column.name]), time_form_sql(column, table.types[column.name])
    units = " ".join(f"WHEN abs(v) >= 1e{power} THEN 'in {name}'" for power, name in _UNITS)
    way = (
        "CASE f WHEN 'naive' THEN 'written as a calendar time without a zone' "
        "WHEN 'zoned' THEN 'written as a calendar time with a zone'"
        f" ELSE CASE {units} ELSE 'below 100,000,000' END END"
    )
    groups = table.sql(
        f"SELECT {way} AS w, count(*), min(rowid, {_PLACES}) FROM (SELECT rowid, {value} AS v, {form_of} AS f FROM {table.rows})"
        f" WHERE v IS NOT NULL GROUP BY w ORDER BY count(*) DESC, w"
    )
    return [
        OddValues(
            column.name,
            f"are {way}",
            count,
            _places(table, column, rows),
            f"one way for all, as the {groups[0][1]:,} {groups[0][0]}",
        )
        for way, count, rows in groups[1:]
    ]


def _unequal(table: Table, schema: Schema, column: Column) -> list[OddValues]:
    """Rows whose ids and weights are not of one length."""
    other = schema[column.weights or ""]
    ids, weights = (value_sql(one, table.types[one.name]) for one in (column, other))
    ((count, rows),) = table.sql(f"SELECT count(*), min(rowid, {_PLACES}) FROM {table.rows} WHERE len({ids}) <> len({weights})")
    what = f"are of another length than its weights in {other.name}"
    return [OddValues(column.name, what, count, _places(table, column, rows), "a weight for each id")] if count else []


def _repeated(table: Table) -> list[OddValues]:
    """Rows that are equal to an earlier one in all columns, by two hashes of 64 bits."""
    names = [identifier(name) for name in table.types]
    hashes = f"SELECT rowid, hash({', '.join(names)}) AS h, hash({', '.join(reversed(names))}, 1) AS g FROM {table.rows}"
    table.connection.execute(
        f"CREATE OR REPLACE TEMP TABLE repeated AS SELECT count(*) AS n, min(rowid) AS a, max(rowid) AS z FROM ({hashes})"
        " GROUP BY h, g HAVING count(*) > 1"
    )
    ((count,),) = table.sql("SELECT coalesce(sum(n - 1), 0) FROM repeated")
    pairs = table.sql(f"SELECT z, a FROM repeated ORDER BY a LIMIT {_PLACES}")
    table.connection.execute("DROP TABLE repeated")
    first = tuple((_place(table, again), f"as {_place(table, before)}") for again, before in pairs)
    return [OddValues(None, "are equal to an earlier one in all columns", int(count), first)] if count else []


def _leaks(table: Table, schema: Schema) -> dict[str, int]:
    """Counts of rows that say two things of one moment, or that a history by time cannot order."""
    one = {kind: schema.one(kind) for kind in _ROLES}
    values = {kind: value_sql(column, table.types[column.name]) for kind, column in one.items() if column is not None}
    labels = [value_sql(column, table.types[column.name]) for column in schema.of_kind(Kind.LABEL)]
    result = {}
    if len(values) == len(_ROLES) and labels:
        keys = ", ".join(f"{value} AS k{i}" for i, value in enumerate(values.values()))
        told = ", ".join(f"{label} AS l{i}" for i, label in enumerate(labels))
        differ = " OR ".join(f"min(l{i}) < max(l{i})" for i in range(len(labels)))
        grouped = f"SELECT count(*) AS n FROM (SELECT {keys}, {told} FROM {table.rows}) WHERE k0 IS NOT NULL AND k1 IS NOT NULL"
        grouped += f" AND k2 IS NOT NULL GROUP BY k0, k1, k2 HAVING {differ}"
        ((count,),) = table.sql(f"SELECT coalesce(sum(n), 0) FROM ({grouped})")
        result["rows of equal user, candidate and time with different labels"] = int(count)
    if Kind.USER in values and Kind.TIME in values:
        keys = f"SELECT {values[Kind.USER]} AS k0, {values[Kind.TIME]} AS k1 FROM {table.rows}"
        grouped = (
            f"SELECT count(*) AS n FROM ({keys}) WHERE k0 IS NOT NULL AND k1 IS NOT NULL GROUP BY k0, k1 HAVING count(*) > 1"
        )
        ((count,),) = table.sql(f"SELECT coalesce(sum(n), 0) FROM ({grouped})")
        result["rows of a user at the time of another row of theirs"] = int(count)
    return result


def _places(table: Table, column: Column, rows: Sequence[int] | None) -> tuple[tuple[str, str], ...]:
    """Places of rows, with their values."""
    if not rows:
        return ()
    numbers = ", ".join(str(row) for row in rows)
    name = identifier(column.name)
    values = dict(
        table.sql(f"SELECT rowid, substr(CAST({name} AS VARCHAR), 1, 200) FROM {table.rows} WHERE rowid IN ({numbers})")
    )
    is_text = form(table.types[column.name]) == "text"
    return tuple((_place(table, row), _value(values[row], is_text)) for row in rows)


def _place(table: Table, row: int) -> str:
    """Where a row stands, by the file's name in the folder that is looked at."""
    path = os.path.abspath(table.name)
    place = table.place(row)
    return place.removeprefix(path + os.sep).removeprefix(os.path.dirname(path) + os.sep)


def _value(text: str | None, is_text: bool = True) -> str:
    return "null" if text is None else repr(_cut(text, 40)) if is_text else _cut(_plain(text), 40)


def _example(table: Table, column: Column) -> str:
    """The first value that fits, else the first that is there."""
    name, kind = identifier(column.name), table.types[column.name]
    for holds in (f"{value_sql(column, kind)} IS NOT NULL", f"NOT {missing_sql(column, kind)}"):
        if found := table.sql(f"SELECT substr(CAST({name} AS VARCHAR), 1, 200) FROM {table.rows} WHERE {holds} LIMIT 1"):
            return _plain(found[0][0])
    return ""


def _told(odd: OddValues) -> str:
    noun = "row" if odd.column is None else "value"
    verb, _, rest = odd.what.partition(" ")
    if odd.count == 1:
        verb, rest = {"are": "is", "have": "has"}[verb], rest.removesuffix("s") if rest.startswith("no ") else rest
    who = "" if odd.column is None else f"{_cut(_plain(odd.column), 40)}: "
    text = f"{who}{_counted(odd.count, noun)} {verb} {rest}: "
    text += ", ".join(f"{place} {value}" if odd.column is None else f"{value} at {place}" for place, value in odd.first)
    text += f" and {odd.count - len(odd.first):,} more" if odd.count > len(odd.first) else ""
    return f"{text}; expected {odd.expected}" if odd.expected else text


def _table(columns: Sequence[ColumnFigures]) -> list[str]:
    """One line a column, aligned, of which the example has what the others leave."""
    head = ("column", "kind", "type", "distinct", "missing", "mean length", "longest", "example")
    rows = [head, *(_cells(figures) for figures in columns)]
    limits = (28, 22, 16, 14, 16, 11, 11)
    widths = [min(max(len(row[i]) for row in rows), limit) for i, limit in enumerate(limits)]
    # Lengths are of lists alone.
    shown = [i for i in range(len(limits)) if i not in (5, 6) or any(row[i] for row in rows[1:])]
    rest = _WIDTH - sum(widths[i] + 2 for i in shown)
    lines = []
    for row in rows:
        cells = [_cut(row[i], widths[i]).rjust(widths[i]) if i > 2 else _cut(row[i], widths[i]).ljust(widths[i]) for i in shown]
        lines.append("  ".join([*cells, _cut(row[7], rest)]).rstrip())
    return lines


def _type(kind: pa.DataType) -> str:
    """The type of values, whatever they are packed into."""
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return _type(kind.value_type)
    inner = element(kind)
    return str(kind) if inner is None else f"list of {_type(inner)}"


def _cells(figures: ColumnFigures) -> tuple[str, ...]:
    column = figures.column
    kind = column.kind.value
    if column.kind in WITH_IDS and column.table not in (None, column.name):
        kind += f" of {_plain(column.table or '')}"
    if column.encoding != "vocabulary":
        kind += f", {column.encoding} {column.size}"
    distinct = f"{figures.distinct:,}" if figures.is_exact else f"~{figures.distinct:,}"
    share = 100 * figures.missing / max(figures.missing + figures.present, 1)
    missing = f"{figures.missing:,} ({share:.1f}%)" if figures.missing else "0"
    example = figures.example
    if not figures.present:
        example = "no value" if column.kind is Kind.UNUSED or not example else f"no value that fits, as {example}"
    elif figures.distinct == 1 and column.kind not in _LISTS:
        example = f"{'only' if figures.missing else 'always'} {example}"
    mean = "" if figures.mean_length is None else f"{figures.mean_length:.1f}"
    longest = "" if figures.longest is None else f"{figures.longest:,}"
    return (_plain(column.name), kind, figures.type, distinct, missing, mean, longest, example)


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _cut(text: str, width: int) -> str:
    """The text, without its middle where it is too long."""
    if len(text) <= width:
        return text
    kept = max(width - 3, 2)
    return f"{text[: (kept + 1) // 2]}...{text[len(text) - kept // 2 :]}"


def _plain(text: str) -> str:
    """The text on one line."""
    return one_line(text)


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(_plain(text), _WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  ", break_on_hyphens=False)
