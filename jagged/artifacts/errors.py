"""What can be wrong with files, as named errors of one line each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class ArtifactError(ValueError):
    """A file or directory that cannot be written or must not be read; the message names the file and the cure."""


class CheckpointError(ArtifactError):
    """A checkpoint or run directory that cannot be written or must not be read; the message names the file and the cure."""


@contextmanager
def errors_as(error: type[Exception], *also: type[Exception]) -> Iterator[None]:
    """Give an `ArtifactError`, or one of the kinds in `also`, the caller's name: `error` with the same message."""
    try:
        yield
    except Exception as problem:
        if isinstance(problem, error) or not isinstance(problem, (ArtifactError, *also)):
            raise
        raise error(str(problem)) from None


@contextmanager
def writing(what: str | os.PathLike[str], cure: str, error: type[Exception]) -> Iterator[None]:
    """Turn an operating-system error while `what` is written into `error` with the cure."""
    try:
        yield
    except OSError as problem:
        raise error(one_line(f"{os.fspath(what)}: could not be written: {problem.strerror or problem}; {cure}")) from problem


def message(where: str | os.PathLike[str], found: str, expected: str, cure: str = "") -> str:
    """`<where>: found ..., expected ...; <cure>` on one line."""
    text = f"{os.fspath(where)}: found {found}, expected {expected}"
    return one_line(f"{text}; {cure}" if cure else text)


def shown(value: Any, limit: int = 60) -> str:
    """A value for a message: its repr, shortened in the middle of a long one."""
    text = repr(value[: 4 * limit] if isinstance(value, (str, bytes)) else value)
    return (
        text if len(text) <= limit else f"{text[: limit - 12]}...({len(value) if hasattr(value, '__len__') else len(text)} long)"
    )


def reason(error: BaseException) -> str:
    """What a third party's error says, for a message."""
    return one_line(f"{type(error).__name__}: {shown(str(error), 160)}")


def one_line(text: str) -> str:
    """A text without line breaks: file names and third parties' messages may hold them, and undecodable bytes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode("ascii") for c in text)
