"""Times in files: whole numbers kept as they are, calendar times as microseconds since 1970."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from jagged.data.errors import refuse, shown

IntArray = npt.NDArray[np.int64]

# Numbers that are times from 1973 to 2286 in seconds, milliseconds, microseconds or nanoseconds: each unit's first and last.
UNITS = ("seconds", "milliseconds", "microseconds", "nanoseconds")
UNIT_BOUNDS = np.array([bound * 1000**power for power in range(4) for bound in (10**8, 10**10)][:-1], dtype=np.int64)

_EXPECTED = "a whole number or an ISO 8601 time"
_DATE = r"[0-9]{4}-[0-9]{2}-[0-9]{2}"
_TIME = r"[ T][0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]{1,6})?)?"
_PATTERNS = {
    "number": r"^-?[0-9]{1,19}(\.0*)?$",
    "naive": f"^{_DATE}({_TIME})?$",
    "zoned": f"^{_DATE}{_TIME}(Z|[+-][0-9]{{2}}:?[0-9]{{2}})$",
}


def is_supported(kind: pa.DataType) -> bool:
    """Whether a parquet column of this type can hold times."""
    types = pa.types
    return bool(
        types.is_integer(kind)
        or types.is_floating(kind)
        or types.is_timestamp(kind)
        or types.is_date(kind)
        or types.is_string(kind)
        or types.is_large_string(kind)
    )


def from_text(texts: pa.Array, place: Callable[[int], str]) -> tuple[IntArray, str]:
    """Times of text fields, int64 `[n]`, and their kind: "number", "naive" or "zoned" (a calendar time without or with zone).

    Raises:
        DataError: an empty field, not a time, mixed kinds, or out of the int64 range.
    """
    first = texts[0].as_py() if len(texts) else "0"
    kind = next((name for name, pattern in _PATTERNS.items() if re.search(pattern, first)), None)
    if kind is None:
        raise refuse(place(0), f"the time {shown(first)}", _EXPECTED, _cure(first))
    good = pc.match_substring_regex(texts, _PATTERNS[kind])
    if (bad := pc.index(good, False).as_py()) >= 0:
        found = texts[bad].as_py()
        raise refuse(place(bad), f"the time {shown(found)}", f"times of one kind, as {shown(first)} before it", _cure(found))
    if kind == "number":
        if pc.any(pc.match_substring(texts, ".")).as_py():
            texts = pc.replace_substring_regex(texts, r"\.0*$", "")
        target = pa.int64()
    else:
        target = pa.timestamp("us") if kind == "naive" else pa.timestamp("us", "UTC")
    try:
        values = texts.cast(target)
    except pa.ArrowInvalid:
        for i, text in enumerate(texts):
            try:
                text.cast(target)
            except pa.ArrowInvalid:
                raise refuse(place(i), f"the time {shown(text.as_py())}", f"{_EXPECTED} in the int64 range") from None
        raise
    return _int64(values), kind


def from_arrow(array: pa.Array, place: Callable[[int], str]) -> tuple[IntArray, str]:
    """Times of a typed column; as `from_text`, and a float must be finite and whole, a nanosecond time whole in microseconds."""
    if array.null_count:
        raise refuse(place(int(pc.index(pc.is_null(array), True).as_py())), "a null time", _EXPECTED)
    kind = array.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return from_text(array, place)
    if pa.types.is_floating(kind):
        values = array.to_numpy(zero_copy_only=False).astype(np.float64)
        wrong = np.flatnonzero(~np.isfinite(values) | (values != np.floor(values)) | (np.abs(values) > 2**53))
        if wrong.size:
            i = int(wrong[0])
            raise refuse(
                place(i), f"the time {values[i]}", "a finite whole number", "multiply fractional seconds by 1000 and round"
            )
        return values.astype(np.int64), "number"
    name = "number"
    target = pa.int64()
    if not pa.types.is_integer(kind):
        zone = getattr(kind, "tz", None)
        name = "zoned" if zone else "naive"
        target = pa.timestamp("us", zone)
    try:
        return _int64(array.cast(target)), name
    except pa.ArrowInvalid:
        for i, value in enumerate(array):
            try:
                value.cast(target)
            except pa.ArrowInvalid:
                expected = (
                    "a number in the int64 range" if name == "number" else "a time in whole microseconds since 1970, in int64"
                )
                raise refuse(place(i), f"the time {_show_scalar(value)}", expected) from None
        raise


def _int64(values: pa.Array) -> IntArray:
    return np.asarray(values.cast(pa.int64()).to_numpy(zero_copy_only=False), dtype=np.int64)


def _show_scalar(value: pa.Scalar) -> str:
    # A nanosecond scalar cannot become a Python datetime without pandas; its number always can.
    return str(value.value) if hasattr(value, "value") else shown(value.as_py())


def _cure(found: str) -> str:
    if re.match(r"[0-9]{1,4}[/.-][0-9]{1,2}[/.-][0-9]{2,4}(?![0-9])", found) and not re.match(_DATE, found):
        return "write dates as 2024-12-31: whether the day or the month comes first is not guessed"
    return (
        "multiply fractional seconds by 1000 and round"
        if "." in found and found.replace(".", "", 1).lstrip("-").isdigit()
        else ""
    )
