"""Directories whose every byte is accounted for: a list of files with sizes and SHA-256, verified before anything is read.

Standard library alone, so that a directory can be verified without torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jagged.training.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT_VERSION = 1
_MAX_JSON_BYTES = 64 * 2**20


def write_manifest(directory: Path, names: Iterable[str]) -> None:
    """Flush the named files of `directory` to disk, then list them in `manifest.json`, which appears whole or not at all.

    Raises:
        OSError: a file cannot be flushed or the manifest not be written.
    """
    files = {}
    for name in sorted(names):
        path = directory / name
        fsync(path)
        files[name] = {"size": path.stat().st_size, "sha256": _digest(path)}
    write_file(directory / MANIFEST, _serialise(files))


def verify(directory: Path, *, exact: bool = True) -> list[str]:
    """Check every file that the manifest lists, and that nothing else is there.

    Args:
        directory: a directory with a `manifest.json`.
        exact: refuse files and folders that are not listed.

    Returns:
        The names of the files, without the manifest's own.

    Raises:
        CheckpointError: a missing, extra, short, long or changed file, an unusable manifest, or a name in it that is no plain
            file name; the message names the file.
    """
    files = _read_manifest(directory / MANIFEST)
    for name, expected in files.items():
        path = directory / name
        try:
            status = path.stat()
        except OSError as error:
            raise CheckpointError(f"{path}: missing or unreadable ({error.strerror}), but listed in {MANIFEST}") from None
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path}: no regular file")
        if status.st_size != expected["size"]:
            raise CheckpointError(f"{path}: damaged: {status.st_size} bytes, expected {expected['size']}")
        try:
            digest = _digest(path)
        except OSError as error:
            raise CheckpointError(f"{path}: unreadable: {error.strerror}") from None
        if digest != expected["sha256"]:
            raise CheckpointError(f"{path}: damaged: SHA-256 {digest[:16]}..., expected {expected['sha256'][:16]}...")
    if exact:
        extra = sorted(set(os.listdir(directory)) - {*files, MANIFEST})
        if extra:
            raise CheckpointError(f"{directory / extra[0]}: not listed in {MANIFEST}; nothing else belongs in this directory")
    return sorted(files)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of bounded size.

    Raises:
        CheckpointError: unreadable, too large, no JSON, or no object.
    """
    try:
        size = path.stat().st_size
        if size > _MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: {size} bytes, expected at most {_MAX_JSON_BYTES}")
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: no JSON: {type(error).__name__}: {str(error)[:160]}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: found a {type(content).__name__}, expected a JSON object")
    return content


def write_file(path: Path, content: bytes) -> None:
    """Replace a file by new content: whoever reads it, also after a crash, sees the old or the new content whole.

    Raises:
        OSError: it cannot be written; then nothing is left of the attempt.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync(path.parent)


def replace_files(source: Path, target: Path) -> None:
    """Move the files of a directory with a manifest into another one, the manifest last.

    Until the end the target's manifest, if it has one, does not fit its files, so that a mixture is never taken for whole.

    Raises:
        OSError: a file cannot be moved.
    """
    for path in sorted(source.iterdir(), key=lambda path: path.name == MANIFEST):
        if path.name == MANIFEST:
            fsync(target)
        os.replace(path, target / path.name)
    fsync(target)


def dump_json(content: Any) -> bytes:
    """Indented JSON; NaN and infinity are refused, because no other reader takes them."""
    return (json.dumps(content, indent=2, allow_nan=False) + "\n").encode()


def fsync(path: Path) -> None:
    """Flush a file or directory to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def writing(what: Path, cure: str) -> Iterator[None]:
    """Turn an operating-system error while `what` is written into a `CheckpointError` with the cure."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(f"{what}: could not be written: {reason}; {cure}") from error


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _serialise(files: dict[str, dict[str, Any]]) -> bytes:
    body: dict[str, Any] = {"format_version": FORMAT_VERSION, "files": files}
    seal = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return dump_json({**body, "sha256": seal})


def _read_manifest(path: Path) -> dict[str, dict[str, Any]]:
    if not path.exists():
        raise CheckpointError(f"{path}: missing: the directory was not written to its end, or is none of this library's")
    content = read_json(path)
    files = content.get("files")
    if content.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(f"{path}: format version {content.get('format_version')!r}, expected {FORMAT_VERSION}")
    if not isinstance(files, dict):
        raise CheckpointError(f"{path}: damaged: no list of files")
    for name, entry in files.items():
        if Path(name).name != name or name in ("", ".", "..", MANIFEST) or "\\" in name or "\0" in name:
            raise CheckpointError(f"{path}: refused: {name!r} is no plain file name")
        if not isinstance(entry, dict) or not isinstance(entry.get("size"), int) or not isinstance(entry.get("sha256"), str):
            raise CheckpointError(f"{path}: damaged: the entry of {name!r} has no size and SHA-256")
    if path.read_bytes() != _serialise(files):
        raise CheckpointError(f"{path}: damaged: its content does not fit its own SHA-256")
    return files
