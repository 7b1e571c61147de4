"""The one error of the data path, and rows that are left out in its place.

No heavy import here: the command line catches it before torch is loaded.
"""

from __future__ import annotations

import os

from jagged.artifacts.errors import message
from jagged.artifacts.errors import shown as shown

MAX_ID_BYTES = 1024
# Of bad rows that are skipped: the share of all rows that is too many, and how many are named.
MAX_SKIPPED = 0.01
_NAMED = 5


class DataError(ValueError):
    """Data that cannot be used; one line: `<file>:<line or row>: found ..., expected ...; <cure>`."""


def refuse(where: str | os.PathLike[str], found: str, expected: str, cure: str = "") -> DataError:
    """Build the error for one place in the input; the caller raises it."""
    return DataError(message(where, found, expected, cure))


def at(path: str | os.PathLike[str], number: int, unit: str = "") -> str:
    """A place in a file: its name and a line number, or `row N` with `unit="row "`."""
    return f"{os.fspath(path)}:{unit}{number}"


class Skipped:
    """Bad rows that were left out: how many, and what is wrong with the first."""

    def __init__(self) -> None:
        self.count = 0
        self.first: list[str] = []

    def add(self, reason: str) -> None:
        """Count a row."""
        self.count += 1
        if len(self.first) < _NAMED:
            self.first.append(reason)

    def check(self, name: str, rows: int) -> None:
        """Refuse a share of bad rows that is too large.

        Raises:
            DataError: with the first of them.
        """
        if self.count > MAX_SKIPPED * (rows + self.count):
            raise refuse(
                name,
                f"{self.count:,} bad rows of {rows + self.count:,} (the first: {self.first[0]})",
                f"at most {MAX_SKIPPED:.0%} of them where on_error is 'skip'",
                "mend what wrote them",
            )
