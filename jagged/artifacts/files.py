"""Files and directories that appear whole, on disk, or not at all.

What is being written stands beside its place as `.NAME.PID-TOKEN.tmp`, and so does what is being removed: no reader takes it
for the whole, and `sweep` finds what a killed process left.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MANIFEST = "manifest.json"

#: Seconds after which what stands aside is taken for left by a killed process, where no lock says so.
DAY = 86_400.0

_LEFT = re.compile(r"\..+\.\d+(-[0-9a-f]+)?\.tmp", re.DOTALL)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the name of an empty file to write; at the end it is flushed to disk and takes the place of `path`.

    It gets the mode that files get in its directory, whatever made it: safetensors' own is for the user alone.

    Raises:
        OSError: it cannot be written; then nothing is left of the attempt. A pipe or a device, which a file would take away from
            everybody, is left in its place.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise FileExistsError(errno.EEXIST, "it is a pipe or a device", str(path))
    aside = _aside(path)
    try:
        with open(aside, "xb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        yield aside
        os.chmod(aside, mode)
        _fsync(aside)
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    _fsync(path.parent)


def write_file(path: Path, content: bytes) -> None:
    """Replace a file by new content: whoever reads it, also after a crash, sees the old or the new content whole.

    Raises:
        OSError: it cannot be written; then nothing is left of the attempt.
    """
    with replacing(path) as aside:
        aside.write_bytes(content)


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yield an empty directory to fill; at the end it is flushed to disk and renamed to `path`.

    Raises:
        OSError: it cannot be written, or `path` is there and not empty; then nothing is left of the attempt.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _filling(_aside(path)) as aside:
        yield aside
        _flush(aside)
        os.rename(aside, path)
        _fsync(path.parent)


@contextmanager
def replacing_files(directory: Path) -> Iterator[Path]:
    """Yield an empty directory to fill; at the end its files are flushed to disk and moved into `directory`, the manifest last.

    Until the end the directory's manifest, if it has one, does not fit its files, so that a mixture is never taken for whole.
    Other files of the directory are left alone.

    Raises:
        OSError: a file cannot be written or moved.
    """
    directory.mkdir(parents=True, exist_ok=True)
    sweep(directory, older_than=DAY)
    with _filling(_aside(directory / "files")) as aside:
        yield aside
        _flush(aside)
        for path in sorted(aside.iterdir(), key=lambda path: path.name == MANIFEST):
            if path.name == MANIFEST:
                _fsync(directory)
            os.replace(path, directory / path.name)
        _fsync(directory)


def remove(path: Path) -> None:
    """Remove a directory. It loses its name before its files go, so that a half removed one is never taken for whole.

    Raises:
        OSError: it cannot be renamed.
    """
    aside = _aside(path)
    os.rename(path, aside)
    shutil.rmtree(aside, ignore_errors=True)


def sweep(directory: Path, *, older_than: float = 0.0) -> None:
    """Remove what killed processes left in a directory while they wrote or removed something.

    Args:
        directory: may be missing.
        older_than: seconds since the last change; 0 where a lock says that nobody else writes.
    """
    with suppress(OSError):
        for entry in list(os.scandir(directory)):
            with suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if not _LEFT.fullmatch(entry.name) or (older_than and time.time() - status.st_mtime < older_than):
                    continue
                if stat.S_ISDIR(status.st_mode):
                    shutil.rmtree(entry.path, ignore_errors=True)
                else:
                    os.unlink(entry.path)


@contextmanager
def _filling(aside: Path) -> Iterator[Path]:
    # Unlike tempfile's, it has the ordinary mode, since it or its files are to be renamed into place.
    aside.mkdir()
    try:
        yield aside
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


def _flush(directory: Path) -> None:
    for path in [*directory.iterdir(), directory]:
        _fsync(path)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
