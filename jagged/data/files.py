"""Finding event files and reading their bytes in checked blocks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa

from jagged.data.errors import DataError, at, refuse, shown

Format = Literal["text", "csv", "parquet"]

BLOCK_BYTES = 8 << 20
MAX_LINE_BYTES = 64 << 20

_SUFFIXES: dict[str, Format] = {
    ".txt": "text",
    ".text": "text",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".pq": "parquet",
}
_COMPRESSION = {".gz": "gzip", ".bz2": "bz2"}
_EXPECTED = "a name ending in .txt, .csv, .tsv (each also .gz, .bz2) or .parquet"

_FORBIDDEN = np.zeros(256, dtype=bool)
_FORBIDDEN[:32] = True
_FORBIDDEN[127] = True
_FORBIDDEN[[9, 10]] = False


def find_files(path: str | os.PathLike[str], format: str) -> tuple[list[Path], Format]:
    """The event files at `path` (a file, or a folder's files in name order, without its subfolders) and their one format.

    In a folder, names that begin with `.` or `_` are left out, as are files of no known format when `format` is "auto".

    Raises:
        DataError: nothing there, no data file in a folder, an unknown name, or a folder of several formats.
    """
    if format not in ("auto", "text", "csv", "parquet"):
        raise refuse(os.fspath(path), f"format {shown(format)}", "auto, text, csv or parquet")
    root = Path(os.path.abspath(path))
    try:
        is_folder = root.is_dir()
        if not is_folder and not root.is_file():
            raise refuse(
                path, "no file or folder of that name" if not root.exists() else "neither a file nor a folder", "event data"
            )
        if not is_folder:
            kind = _format_of(root) if format == "auto" else format
            if kind is None:
                raise refuse(path, f"the unknown suffix {shown(root.suffix)}", _EXPECTED, "name the format (format=...)")
            return [root], kind  # type: ignore[return-value]
        files = sorted(child for child in root.iterdir() if child.name[0] not in "._" and child.is_file())
    except DataError:
        raise
    except (OSError, ValueError) as error:
        raise refuse(path, f"{type(error).__name__}: {error}", "a readable file or folder") from None
    if format != "auto":
        chosen: list[tuple[Path, Format]] = [(file, format) for file in files]  # type: ignore[misc]
    else:
        chosen = [(file, kind) for file in files if (kind := _format_of(file)) is not None]
    if not chosen:
        raise refuse(path, "a folder without data files", f"files with {_EXPECTED}")
    kinds = sorted({kind for _, kind in chosen})
    if len(kinds) > 1:
        raise refuse(
            path, f"files of several formats ({', '.join(kinds)})", "one format", "name it (format=...) or move the others"
        )
    return [file for file, _ in chosen], chosen[0][1]


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an operating-system error while a file is read into a `DataError` that names it."""
    try:
        yield
    except OSError as error:
        raise refuse(path, f"{type(error).__name__}: {error.strerror or error}", "a readable file") from None


def csv_delimiter(path: Path) -> str:
    """A tab for `.tsv` files, else a comma."""
    return "\t" if ".tsv" in _suffixes(path) else ","


def _suffixes(path: Path) -> list[str]:
    return [suffix.lower() for suffix in path.suffixes[-2:]]


def _format_of(path: Path) -> Format | None:
    suffixes = _suffixes(path)
    if suffixes and suffixes[-1] in _COMPRESSION:
        inner = _SUFFIXES.get(suffixes[-2]) if len(suffixes) > 1 else None
        return None if inner == "parquet" else inner
    return _SUFFIXES.get(suffixes[-1]) if suffixes else None


def read_blocks(path: Path, advance: Callable[[int], object]) -> Iterator[tuple[bytes, int]]:
    """Yield `(block, number of its first line)`: whole lines, each ended by `\\n`, in valid UTF-8 without control characters.

    A byte order mark is dropped and `\\r\\n` becomes `\\n`. Memory is bounded by the block size and the longest line allowed.
    `advance` is called with the bytes of the file consumed.

    Raises:
        DataError: the file cannot be read or decompressed, or a line breaks one of the rules above.
    """
    line = 1
    tail = b""
    for number, data in enumerate(_stream(path, advance)):
        if number == 0:
            data = data.removeprefix(b"\xef\xbb\xbf")
        cut = data.rfind(b"\n") + 1
        if len(tail) + (cut or len(data)) > MAX_LINE_BYTES + BLOCK_BYTES:
            raise refuse(at(path, line), f"a line of more than {MAX_LINE_BYTES >> 20} MiB", "shorter lines")
        if not cut:
            # A control character is the usual reason for an endless line: say that first.
            _check(path, data, line, partial=True)
            tail += data
            continue
        block, tail = tail + data[:cut], data[cut:]
        block = _check(path, block, line)
        yield block, line
        line += block.count(b"\n")
    if tail:
        yield _check(path, tail, line) + b"\n", line


def _stream(path: Path, advance: Callable[[int], object]) -> Iterator[bytes]:
    try:
        with pa.OSFile(str(path), "rb") as raw:
            compression = _COMPRESSION.get(path.suffix.lower())
            stream = raw if compression is None else pa.CompressedInputStream(raw, compression)
            before = 0
            while data := stream.read(BLOCK_BYTES):
                advance(raw.tell() - before)
                before = raw.tell()
                yield data
    except (OSError, pa.ArrowException, ValueError) as error:
        raise refuse(path, f"{type(error).__name__}: {shown(str(error), 160)}", "a readable file") from None


def _check(path: Path, block: bytes, line: int, *, partial: bool = False) -> bytes:
    if b"\r" in block:
        block = block.replace(b"\r\n", b"\n")
        if partial and block.endswith(b"\r"):
            block = block[:-1]
    bad = np.flatnonzero(_FORBIDDEN[np.frombuffer(block, dtype=np.uint8)])
    if bad.size:
        where = int(bad[0])
        raise refuse(
            at(path, line + block.count(b"\n", 0, where)),
            f"the control character 0x{block[where]:02x}",
            "text without control characters",
        )
    if not partial and not block.isascii():
        try:
            block.decode("utf-8")
        except UnicodeDecodeError as error:
            raise refuse(
                at(path, line + block.count(b"\n", 0, error.start)),
                f"the byte 0x{block[error.start]:02x}, which is not UTF-8",
                "UTF-8 text",
                "convert the file (iconv -t utf-8)",
            ) from None
    return block
