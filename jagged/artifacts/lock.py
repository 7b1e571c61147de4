"""One writer at a time in a directory."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOCK = ".lock"


@contextmanager
def lock(directory: Path, busy: Exception) -> Iterator[None]:
    """Hold a directory, which is made where it does not exist; what is then found in it stays as it is but for the holder.

    The lock ends with the process, however that ends; processes that it starts do not inherit it. Its file, `.lock`, stays, but
    for a directory that was made for it and got nothing else, which goes.

    Args:
        directory: to hold.
        busy: raised where another process holds it.

    Raises:
        OSError: the directory cannot be made or locked.
    """
    is_new = not directory.exists()
    descriptor = _locked(directory, busy)
    try:
        yield
    finally:
        with suppress(OSError):
            if is_new and os.listdir(directory) == [LOCK]:
                os.unlink(directory / LOCK)
                os.rmdir(directory)
        os.close(descriptor)


def _locked(directory: Path, busy: Exception) -> int:
    while True:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Its last holder may have removed the file since it was opened: then another process can lock a new one.
            if os.path.samestat(os.fstat(descriptor), os.stat(directory / LOCK)):
                return descriptor
        except (BlockingIOError, PermissionError):
            os.close(descriptor)
            raise busy from None
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
