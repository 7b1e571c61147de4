"""One writer at a time in a directory."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK = ".lock"


@contextmanager
def lock(directory: Path, busy: Exception) -> Iterator[None]:
    """Hold a directory, which is made where it does not exist; what is then found in it stays as it is but for the holder.

    The lock ends with the process, however that ends; processes that it starts do not inherit it. Its file, `.lock`, stays.

    Args:
        directory: to hold.
        busy: raised where another process holds it.

    Raises:
        OSError: the directory cannot be made or locked.
    """
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise busy from None
        yield
    finally:
        os.close(descriptor)
