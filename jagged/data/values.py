"""SQL expressions of a column's values by its kind: typed, and NULL where a value is missing or does not fit.

Missing are null, empty text and `\\N`; of numbers and times also NaN and the words of `MISSING_WORDS`. Of ids these words are
values: NA is Namibia. In a list of ids or numbers a missing element is a NULL in its place; an empty list is not missing.
"""

from __future__ import annotations

import re

import pyarrow as pa

from jagged.data.errors import refuse, shown
from jagged.data.schema import Column, Kind
from jagged.data.sources import Table, identifier

# In lower case, as they are compared.
MISSING_WORDS = ("", "na", "n/a", "nan", "null", "none", "\\n", "-")
_LONG = 16
# Whole numbers that a float holds exactly.
_EXACT = 2**53

# What texts look like, as RE2 reads it.
WHOLE = r"[+-]?[0-9]{1,19}"
DECIMAL = r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?"
_DATE = "[0-9]{4}-[0-9]{2}-[0-9]{2}"
_CLOCK = r"[ T][0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]{1,9})?)?"
_ZONE = "(Z|[+-][0-9]{2}:?[0-9]{2})"
CALENDAR = f"{_DATE}({_CLOCK}{_ZONE}?)?"
# Dates that are none of ISO 8601: their parts in another order, or between other signs.
_SIGN = "[/.-]"
_AFTER = "( +[0-9]{1,2}:[0-9]{2}(:[0-9]{2}([.][0-9]+)?)?( *[aApP][mM])?)?"
_YEAR_LAST = f"[0-9]{{1,2}}{_SIGN}[0-9]{{1,2}}{_SIGN}([0-9]{{4}}|[0-9]{{2}}){_AFTER}"
OTHER_DATES = f"({_YEAR_LAST}|[0-9]{{4}}[/.][0-9]{{1,2}}[/.][0-9]{{1,2}}{_AFTER})"
_ZONED = f"{_DATE}{_CLOCK}{_ZONE}"

_NUMERIC = (Kind.NUMBER, Kind.LABEL, Kind.WEIGHT)
_OF_IDS = (Kind.ID, Kind.USER, Kind.CANDIDATE, Kind.EVENT, Kind.REQUEST)


def form(kind: pa.DataType) -> str:
    """What a type holds: "text", "whole", "unsigned" (64 bits), "float", "decimal", "bool", "calendar", "list" or "other"."""
    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return form(kind.storage_type)
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return form(kind.value_type)
    if element(kind) is not None:
        return "list"
    tests = (
        ("text", types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind) or types.is_null(kind)),
        ("unsigned", types.is_uint64(kind)),
        ("whole", types.is_integer(kind)),
        ("float", types.is_floating(kind)),
        ("decimal", types.is_decimal(kind)),
        ("bool", types.is_boolean(kind)),
        ("calendar", types.is_timestamp(kind) or types.is_date(kind)),
    )
    return next((name for name, holds in tests if holds), "other")


def element(kind: pa.DataType) -> pa.DataType | None:
    """The type of a list's elements; None where a column holds no lists."""
    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return element(kind.storage_type)
    lists = (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view, types.is_large_list_view)
    return kind.value_type if any(test(kind) for test in lists) else None


def value_sql(column: Column, kind: pa.DataType) -> str:
    """The value of a column of the table as SQL: NULL where it is missing or does not fit its kind.

    An id is BIGINT where the column holds whole numbers (or floats that are whole), else VARCHAR as it stands; one of the
    encoding "range" is BIGINT. Numbers, labels and weights are DOUBLE and finite. A time is BIGINT: whole numbers as they are,
    calendar times as microseconds since 1970. Lists are lists of these. A column that is not used stays what it is.

    Raises:
        DataError: the type cannot hold the kind.
    """
    name, of, inner = identifier(column.name), form(kind), element(kind)
    if column.kind is Kind.UNUSED:
        return name
    if column.kind in (Kind.IDS, Kind.NUMBERS):
        if of not in ("list", "text") or (inner is not None and form(inner) in ("list", "other", "calendar")):
            raise _unfit(column, kind, "a list of ids or numbers, or text of such lists")
        if of == "list" and column.separator is not None:
            raise _unfit(column, kind, "text where there is a separator")
        return _list(column, name, inner)
    if of in ("list", "other"):
        raise _unfit(column, kind, "single values")
    if column.kind in _OF_IDS:
        return _id(column, name, of, kind)
    if column.kind is Kind.TIME:
        if of in ("bool", "decimal"):
            raise _unfit(column, kind, "whole numbers or calendar times")
        return _time(name, of)
    if of == "calendar":
        raise _unfit(column, kind, "numbers")
    return _number(name, of)


def missing_sql(column: Column, kind: pa.DataType) -> str:
    """Whether a value is missing, as SQL: never NULL."""
    name, of = identifier(column.name), form(kind)
    if of == "text":
        words = MISSING_WORDS if column.kind in (*_NUMERIC, Kind.TIME) else ("", "\\n")
        # What is longer than any of the words, with blanks around, needs no comparison.
        return f"({name} IS NULL OR (strlen({name}) < {_LONG} AND lower(trim({name})) IN {_words(words)}))"
    if of == "float":
        return f"({name} IS NULL OR isnan({name}))"
    return f"({name} IS NULL)"


def time_form_sql(column: Column, kind: pa.DataType) -> str:
    """How a time is written, as SQL: 'number', 'naive' or 'zoned' (a calendar time without or with zone); else NULL."""
    name, of = identifier(column.name), form(kind)
    if of == "calendar":
        return "'zoned'" if getattr(kind, "tz", None) else "'naive'"
    if of != "text":
        return "'number'"
    text = f"trim({name})"
    return (
        f"CASE WHEN regexp_full_match({text}, '{DECIMAL}') THEN 'number' WHEN regexp_full_match({text}, '{_ZONED}') THEN 'zoned' "
        f"WHEN regexp_full_match({text}, '{CALENDAR}') THEN 'naive' END"
    )


def hint_of_dates(table: Table, column: Column) -> str:
    """What to do with a column of times whose texts are dates that are none of ISO 8601; "" where few are.

    Which of day and month comes first is told where a value leaves no doubt, and never guessed.
    """
    if column.kind is not Kind.TIME or form(table.types[column.name]) != "text":
        return ""
    text = f"trim({identifier(column.name)})"
    values = (
        f"SELECT {text} AS t, TRY_CAST(regexp_extract({text}, '^([0-9]+){_SIGN}([0-9]+)', 1) AS INTEGER) AS a, "
        f"TRY_CAST(regexp_extract({text}, '^([0-9]+){_SIGN}([0-9]+)', 2) AS INTEGER) AS b, "
        f"regexp_full_match({text}, '{_YEAR_LAST}') AS l, rowid AS r FROM {table.rows} "
        f"WHERE regexp_full_match({text}, '{OTHER_DATES}')"
    )
    ((count, last, day, month),) = table.sql(
        "SELECT count(*), count(*) FILTER (l), arg_min(t, r) FILTER (l AND a BETWEEN 13 AND 31 AND b <= 12), "
        f"arg_min(t, r) FILTER (l AND b BETWEEN 13 AND 31 AND a <= 12) FROM ({values})"
    )
    if not count:
        return ""
    cure = "write dates as 2024-12-31"
    if not last:
        return cure
    if day is not None and month is not None:
        return f"some dates have the day first, as {shown(day)}, and some the month, as {shown(month)}: {cure}"
    if day is None and month is None:
        return f"no date tells whether its day or its month comes first: find out, and {cure}"
    order, example, ways = ("day", day, ("%d", "%m")) if day is not None else ("month", month, ("%m", "%d"))
    told = f"dates have the {order} first, as {shown(example)}: {cure}"
    plain = re.fullmatch(r"[0-9]+([/.-])[0-9]+([/.-])([0-9]+)", example)
    if plain is None:
        return told
    way = f"{ways[0]}{plain[1]}{ways[1]}{plain[2]}{'%Y' if len(plain[3]) == 4 else '%y'}"
    return f'{told}, in pandas by to_datetime(column, format="{way}")'


def texts_sql(name: str, separator: str | None) -> str:
    """The elements of lists written as text, as SQL: VARCHAR[], NULL where the text is no list.

    Without a separator lists are what JSON, Python's `repr` or numpy's write: `[1, 2]`, `['a', 'b']`, `[1 2]`.
    """
    if separator is not None and not separator.strip():
        return rf"string_split_regex(trim({name}), '\s+')"
    if separator is not None:
        quoted = separator.replace("'", "''")
        # A separator behind the last value is an end, not one more value.
        values = f"string_split(regexp_replace({name}, '{_literal(quoted)}\\s*$', ''), '{quoted}')"
        return f"list_transform({values}, lambda e: trim(e))"
    json = f"""TRY(from_json({name}, '["VARCHAR"]'))"""
    numpy = rf"string_split_regex(trim({name}, ' []'), '\s+')"
    is_numpy = f"NOT contains({name}, ',') AND NOT contains({name}, '''') AND NOT contains({name}, '\"')"
    is_list = f"starts_with(trim({name}), '[') AND ends_with(trim({name}), ']')"
    return (
        f"CASE WHEN {is_list} THEN coalesce({json}, CASE WHEN {is_numpy} THEN {numpy} ELSE TRY_CAST({name} AS VARCHAR[]) END) END"
    )


def _unfit(column: Column, kind: pa.DataType, expected: str) -> Exception:
    return refuse(
        f"column {shown(column.name)}", f"the type {shown(str(kind))} for kind {column.kind.value}", expected, "name another kind"
    )


def _words(words: tuple[str, ...]) -> str:
    return "(" + ", ".join(f"'{word}'" for word in words) + ")"


def _literal(text: str) -> str:
    return "".join(f"\\{one}" if not one.isalnum() and one.isascii() and one != "'" else one for one in text)


def _id(column: Column, name: str, of: str, kind: pa.DataType) -> str:
    if column.encoding == "range":
        if of not in ("whole", "unsigned", "float", "text"):
            raise _unfit(column, kind, "whole numbers for a range")
        value = f"CASE WHEN regexp_full_match({name}, '{WHOLE}') THEN TRY_CAST({name} AS BIGINT) END" if of == "text" else name
        value = _whole(value) if of == "float" else f"TRY_CAST({value} AS BIGINT)"
        return f"CASE WHEN {value} BETWEEN 0 AND {(column.size or 0) - 1} THEN {value} END"
    if of == "text":
        return f"CASE WHEN strlen({name}) >= {_LONG} OR lower(trim({name})) NOT IN ('', '\\n') THEN {name} END"
    if of in ("whole", "bool") or (of == "decimal" and kind.scale == 0 and kind.precision <= 18):
        return f"CAST({name} AS BIGINT)"
    return _whole(name) if of == "float" else f"CAST({name} AS VARCHAR)"


def _whole(value: str) -> str:
    """A float as a whole number, which it must be."""
    return f"CASE WHEN abs({value}) <= {_EXACT} AND {value} = trunc({value}) THEN CAST({value} AS BIGINT) END"


def _number(name: str, of: str) -> str:
    if of == "text":
        text = f"trim({name})"
        number = f"CASE WHEN regexp_full_match({text}, '{DECIMAL}') THEN TRY_CAST({text} AS DOUBLE) END"
        words = "WHEN 'true' THEN 1.0::DOUBLE WHEN 'false' THEN 0.0::DOUBLE"
        return f"CASE lower({text}) {words} ELSE {_finite(number)} END"
    number = f"CAST({name} AS DOUBLE)"
    return _finite(number) if of == "float" else number


def _finite(value: str) -> str:
    return f"CASE WHEN isfinite({value}) THEN {value} END"


def _time(name: str, of: str) -> str:
    if of == "calendar":
        return f"epoch_us({name})"
    if of == "float":
        return _whole(name)
    if of != "text":
        return f"TRY_CAST({name} AS BIGINT)"
    text = f"trim({name})"
    return (
        f"CASE WHEN regexp_full_match({text}, '{WHOLE}(\\.0*)?') THEN TRY_CAST({text} AS BIGINT) "
        f"WHEN regexp_full_match({text}, '{DECIMAL}') THEN {_whole(f'TRY_CAST({text} AS DOUBLE)')} "
        f"WHEN regexp_full_match({text}, '{CALENDAR}') THEN epoch_us(TRY_CAST({text} AS TIMESTAMPTZ)) END"
    )


def _list(column: Column, name: str, inner: pa.DataType | None) -> str:
    values = (
        name
        if inner is not None
        else f"CASE WHEN NOT {missing_sql(column, pa.string())} THEN {texts_sql(name, column.separator)} END"
    )
    of = "text" if inner is None else form(inner)
    if column.kind is Kind.NUMBERS:
        if of in ("text", "float"):
            return f"list_transform({values}, lambda e: {_number('e', of)})"
        return f"CAST({values} AS DOUBLE[])"
    if of in ("whole", "bool") and column.encoding != "range":
        return f"CAST({values} AS BIGINT[])"
    return f"list_transform({values}, lambda e: {_id(column, 'e', of, inner or pa.string())})"
