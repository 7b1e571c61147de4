"""The one error of the data path. No heavy import here: the command line catches it before torch is loaded."""

from __future__ import annotations

import os

from jagged.artifacts.errors import message
from jagged.artifacts.errors import shown as shown

MAX_ID_BYTES = 1024


class DataError(ValueError):
    """Data that cannot be used; one line: `<file>:<line or row>: found ..., expected ...; <cure>`."""


def refuse(where: str | os.PathLike[str], found: str, expected: str, cure: str = "") -> DataError:
    """Build the error for one place in the input; the caller raises it."""
    return DataError(message(where, found, expected, cure))


def at(path: str | os.PathLike[str], number: int, unit: str = "") -> str:
    """A place in a file: its name and a line number, or `row N` with `unit="row "`."""
    return f"{os.fspath(path)}:{unit}{number}"
