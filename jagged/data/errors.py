"""The one error of the data path. No heavy import here: the command line catches it before torch is loaded."""

from __future__ import annotations

import os
from typing import Any

MAX_ID_BYTES = 1024


class DataError(ValueError):
    """Data that cannot be used; one line: `<file>:<line or row>: found ..., expected ...; <cure>`."""


def refuse(where: str | os.PathLike[str], found: str, expected: str, cure: str = "") -> DataError:
    """Build the error for one place in the input; the caller raises it."""
    message = f"{os.fspath(where)}: found {found}, expected {expected}"
    return DataError(_one_line(f"{message}; {cure}" if cure else message))


def at(path: str | os.PathLike[str], number: int, unit: str = "") -> str:
    """A place in a file: its name and a line number, or `row N` with `unit="row "`."""
    return f"{os.fspath(path)}:{unit}{number}"


def shown(value: Any, limit: int = 60) -> str:
    """A value for a message: its repr, shortened in the middle of a long one."""
    text = repr(value[: 4 * limit] if isinstance(value, (str, bytes)) else value)
    return (
        text if len(text) <= limit else f"{text[: limit - 12]}...({len(value) if hasattr(value, '__len__') else len(text)} long)"
    )


def _one_line(text: str) -> str:
    # File names and third parties' messages may hold line breaks and undecodable bytes.
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode("ascii") for c in text)
