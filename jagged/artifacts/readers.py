"""Readers that bound what they read and name what is wrong with it."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jagged.artifacts.errors import ArtifactError, message, reason

if TYPE_CHECKING:
    import pyarrow as pa

MAX_JSON_BYTES = 64 * 2**20


def read_bytes(path: Path, limit: int = MAX_JSON_BYTES) -> bytes:
    """Read a file of at most `limit` bytes.

    Raises:
        ArtifactError: unreadable, no regular file, or too large.
    """
    try:
        check_regular(path)
        size = path.stat().st_size
        if size > limit:
            raise ArtifactError(message(path, f"{size} bytes", f"at most {limit}"))
        with open(path, "rb") as file:
            return file.read(size)
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror}") from None


def parse_json(content: bytes, path: Path) -> dict[str, Any]:
    """Read a JSON object from the bytes of `path`.

    Raises:
        ArtifactError: no JSON, or no object.
    """
    try:
        value = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ArtifactError(message(path, f"no JSON ({reason(error)})", "a JSON object", "copy it again")) from None
    if not isinstance(value, dict):
        raise ArtifactError(message(path, f"a {type(value).__name__}", "a JSON object"))
    return value


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of bounded size.

    Raises:
        ArtifactError: unreadable, too large, no JSON, or no object.
    """
    return parse_json(read_bytes(path), path)


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read a file of bounded size with a JSON object a line.

    Raises:
        ArtifactError: unreadable, too large, or a line that is no JSON object.
    """
    return [parse_json(line, path) for line in read_bytes(path).splitlines()]


def read_arrow(path: str | os.PathLike[str], expected: str, *, mapped: bool = False) -> list[pa.RecordBatch]:
    """Read the batches of an Arrow file, their buffers checked against their lengths.

    Args:
        path: the file.
        expected: what it is, for the message.
        mapped: leave the file's pages to the operating system; only what costs no look at them is then checked.

    Raises:
        ArtifactError: no file, or none of Arrow's.
    """
    import pyarrow as pa

    try:
        check_regular(path)
        with (pa.memory_map if mapped else pa.OSFile)(os.fspath(path), "r" if mapped else "rb") as source:
            reader = pa.ipc.open_file(source)
            batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
        reader.schema.names  # noqa: B018  # names that are no UTF-8 are refused when they are read
        for batch in batches:
            batch.validate(full=not mapped)
    except ArtifactError:
        raise
    except Exception as error:  # damaged bytes can make Arrow raise almost anything
        raise ArtifactError(message(path, reason(error), expected, "copy it again")) from None
    return batches


def check_regular(path: str | os.PathLike[str]) -> None:
    """Refuse what is no regular file: reading a pipe may never end.

    Raises:
        ArtifactError: a directory, a pipe, a device.
        OSError: no file.
    """
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        raise ArtifactError(message(path, "a directory" if stat.S_ISDIR(mode) else "a pipe or a device", "a regular file"))
