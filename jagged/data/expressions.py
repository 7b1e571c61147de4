"""How the values of a table's columns are stored, as SQL over its rows, and what is none of its kind.

What a missing value, a number, a list and a time look like is told by `jagged.data.values`, which inference and inspection ask,
too.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from jagged.data.errors import MAX_ID_BYTES
from jagged.data.schema import WITH_IDS, Column, Kind
from jagged.data.sources import identifier
from jagged.data.values import DECIMAL, MISSING_WORDS, element, form, missing_sql, texts_sql, time_form_sql, value_sql

LISTS = (Kind.IDS, Kind.NUMBERS)
_CONTROL = r"[\x00-\x1f\x7f]"
WORDS = "(" + ", ".join(f"'{word}'" for word in MISSING_WORDS) + ")"


@dataclass(frozen=True)
class Parsed:
    """A column's values in SQL over `ROWS`.

    Attributes:
        value: what is stored: BIGINT or VARCHAR ids, FLOAT, BIGINT times, or lists of these; NULL where it is missing.
        bad: whether the source has something that is no value of the kind, never NULL; "" where that cannot be.
        expected: what would be one.
        is_integer: whether ids are BIGINT.
    """

    value: str
    bad: str
    expected: str
    is_integer: bool = False


def parse(column: Column, kind: pa.DataType, is_text: bool, time_kind: str = "") -> Parsed:
    """How a column's values are read, as SQL.

    Args:
        column: with its kind.
        kind: the type in the source.
        is_text: whether the source is text alone, where blanks around a value go and nothing between them is a missing value.
        time_kind: of text times: "number", "naive" or "zoned".

    Raises:
        DataError: a type that the kind cannot be read from.
    """
    raw = identifier(column.name)
    value_sql(column, kind)  # refuses a type that cannot hold the kind
    if column.kind in LISTS:
        return _parse_list(column, kind, raw, is_text)
    if column.kind is Kind.TIME:
        return _parse_time(column, kind, raw, time_kind)
    if column.kind in WITH_IDS or column.kind is Kind.REQUEST:
        value, bad, is_integer = _id(column, kind, raw, is_text)
        expected = f"an id of 1 to {MAX_ID_BYTES} bytes without control characters"
        if is_integer:
            expected = "a whole number in the int64 range"
        if column.encoding == "range":
            expected = f"a whole number from 0 to {(column.size or 0) - 1}"
        return Parsed(value, bad, expected, is_integer)
    value, bad = _number(column, kind, raw)
    if column.kind is Kind.WEIGHT:
        return Parsed(value, f"({value}) IS NULL OR ({value}) < 0 OR isinf({value})", "a finite number from 0 on")
    if column.positive_from is not None:
        # Both as they are stored: 4.1 is not below 4.1.
        least = f"CAST({float(column.positive_from)!r} AS FLOAT)"
        value = f"CASE WHEN ({value}) >= {least} THEN 1 WHEN ({value}) IS NOT NULL THEN 0 END"
    return Parsed(value, bad, "a finite number")


def is_string(kind: pa.DataType) -> bool:
    """Whether values of a type are text; a column without any type is."""
    return form(kind) == "text"


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The type of a value, whatever holds it."""
    if isinstance(kind, pa.BaseExtensionType):
        return plain_type(kind.storage_type)
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return plain_type(kind.value_type)
    return kind


def _id(column: Column, kind: pa.DataType, raw: str, is_text: bool) -> tuple[str, str, bool]:
    kind, types = plain_type(kind), pa.types
    limits = f"NOT BETWEEN 0 AND {(column.size or 0) - 1}"
    if is_string(kind):
        value = f"CASE WHEN lower(trim({raw})) NOT IN ('', '\\n') THEN {f'trim({raw})' if is_text else raw} END"
        if column.encoding == "range":
            number = f"TRY_CAST({value} AS BIGINT)"
            whole = f"regexp_matches({value}, '^(0|[1-9][0-9]*)$')"
            return number, f"coalesce(NOT {whole} OR {number} IS NULL OR {number} {limits}, false)", True
        bad = f"coalesce(strlen({value}) > {MAX_ID_BYTES} OR regexp_matches({value}, '{_CONTROL}'), false)"
        return value, bad, False
    if types.is_integer(kind) or types.is_boolean(kind):
        value = f"TRY_CAST({raw} AS BIGINT)"
        bad = f"({raw} IS NOT NULL AND {value} IS NULL)" if types.is_uint64(kind) else ""
    elif types.is_floating(kind):
        # A frame whose whole numbers have gaps holds them as floats.
        present = f"({raw} IS NOT NULL AND NOT isnan({raw}))"
        good = f"(isfinite({raw}) AND {raw} = floor({raw}) AND abs({raw}) <= 9007199254740992)"
        value, bad = f"CASE WHEN {good} THEN TRY_CAST({raw} AS BIGINT) END", f"({present} AND NOT {good})"
    else:
        return f"CAST({raw} AS VARCHAR)", "", False
    if column.encoding == "range":
        bad = f"({bad or 'false'} OR coalesce({value} {limits}, false))"
    return value, bad, True


def _number(column: Column, kind: pa.DataType, raw: str) -> tuple[str, str]:
    kind, types = plain_type(kind), pa.types
    if is_string(kind):
        text = f"lower(trim({raw}))"
        good = f"regexp_full_match({text}, '{DECIMAL}')"
        value = f"CASE {text} WHEN 'true' THEN 1 WHEN 'false' THEN 0 ELSE CASE WHEN {good} THEN TRY_CAST({text} AS FLOAT) END END"
        return value, f"(coalesce({text} NOT IN {WORDS}, false) AND NOT coalesce(isfinite({value}), false))"
    if types.is_floating(kind):
        # The outer CASE: NaN is a missing number, and only a NULL says so to everybody.
        value = f"CASE WHEN NOT isnan({raw}) THEN TRY_CAST({raw} AS FLOAT) END"
        return value, f"({raw} IS NOT NULL AND NOT isnan({raw}) AND NOT coalesce(isfinite({value}), false))"
    return f"CAST({raw} AS FLOAT)", ""


def _parse_time(column: Column, kind: pa.DataType, raw: str, time_kind: str) -> Parsed:
    kind, types = plain_type(kind), pa.types
    expected = "a whole number or an ISO 8601 time"
    if is_string(kind):
        text = f"trim({raw})"
        value = {
            "number": f"TRY_CAST(regexp_replace({text}, '\\.0*$', '') AS BIGINT)",
            "naive": f"epoch_us(TRY_CAST({text} AS TIMESTAMP))",
            "zoned": f"epoch_us(TRY_CAST({text} AS TIMESTAMPTZ))",
        }[time_kind]
        value = f"CASE WHEN {time_form_sql(column, kind)} = '{time_kind}' THEN {value} END"
        kinds = {"number": "a whole number", "naive": "an ISO 8601 time without a zone", "zoned": "an ISO 8601 time with a zone"}
        expected = f"{kinds[time_kind]}, as the first"
    elif types.is_integer(kind):
        value, expected = f"TRY_CAST({raw} AS BIGINT)", "a whole number in the int64 range"
    elif types.is_floating(kind):
        good = f"(isfinite({raw}) AND {raw} = floor({raw}) AND abs({raw}) <= 9007199254740992)"
        value, expected = f"CASE WHEN {good} THEN TRY_CAST({raw} AS BIGINT) END", "a whole number"
    elif types.is_date(kind) or (types.is_timestamp(kind) and kind.tz is None):
        exact = f"epoch_ns({raw}) % 1000 = 0" if types.is_timestamp(kind) and kind.unit == "ns" else "true"
        value, expected = f"CASE WHEN {exact} THEN epoch_us(TRY_CAST({raw} AS TIMESTAMP)) END", "a time in whole microseconds"
    else:
        value, expected = f"epoch_us({raw})", "a time in microseconds since 1970"
    return Parsed(value, f"({value}) IS NULL", expected)


def _parse_list(column: Column, kind: pa.DataType, raw: str, is_text: bool) -> Parsed:
    kind, types = plain_type(kind), pa.types
    of_ids = column.kind is Kind.IDS
    wrong = ""
    if is_string(kind):
        missing = missing_sql(column, kind)
        raw = f"CASE WHEN NOT {missing} THEN {texts_sql(raw, column.separator)} END"
        wrong = f"(NOT {missing} AND {raw} IS NULL)"
        inside: pa.DataType = pa.large_string()
        is_text = True
    else:
        inside = plain_type(element(kind))
    inner, bad, is_integer = _id(column, inside, "x", is_text) if of_ids else (*_number(column, inside, "x"), False)
    plain = not bad and inner in ("TRY_CAST(x AS BIGINT)", "CAST(x AS FLOAT)")
    target = "BIGINT[]" if is_integer else "FLOAT[]" if not of_ids else "VARCHAR[]"
    if plain:
        value = f"CAST({raw} AS {target})"
    elif not of_ids and types.is_floating(inside):
        # Without a step for each number, of which there may be many.
        value, bad = f"TRY_CAST({raw} AS FLOAT[])", ""
        wrong = (
            f"({raw} IS NOT NULL AND coalesce({value} IS NULL OR list_contains({value}, 'inf'::FLOAT)"
            f" OR list_contains({value}, '-inf'::FLOAT), false))"
        )
    else:
        value = f"list_transform({raw}, lambda x: {inner})"
    if bad:
        bad = f"coalesce(len(list_filter({raw}, lambda x: {bad})) > 0, false)"
    noun = "ids" if of_ids else "finite numbers"
    shape = "" if not is_string(kind) else f" between {column.separator!r}" if column.separator else " as JSON"
    return Parsed(value, " OR ".join(filter(None, (wrong, bad))), f"a list of {noun}{shape}", is_integer)
