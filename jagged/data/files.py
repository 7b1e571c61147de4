"""Finding files of tables and events and reading their bytes in checked blocks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from jagged.data.errors import DataError, at, refuse, shown

TABLES = ("csv", "parquet")
EVENT_FORMATS = ("text", *TABLES)

BLOCK_BYTES = 8 << 20
#: The byte order mark of UTF-8.
MARK = b"\xef\xbb\xbf"
MAX_LINE_BYTES = 64 << 20

_SUFFIXES = {
    ".txt": "text",
    ".text": "text",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".pq": "parquet",
}
#: What unpacks files, by suffix.
COMPRESSION = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}
_PACKED = "(each also .gz, .bz2, .zst, .lz4) or .parquet"
# What is looked for, what a folder holds and how it is named: where text lines are no format, and where they are.
_WORDS = (
    ("a table", "tables", f"a name ending in .csv, .tsv {_PACKED}"),
    ("event data", "data files", f"a name ending in .txt, .csv, .tsv {_PACKED}"),
)

_FORBIDDEN = np.zeros(256, dtype=bool)
_FORBIDDEN[:32] = True
_FORBIDDEN[127] = True
_FORBIDDEN[[9, 10]] = False


@dataclass(frozen=True)
class Found:
    """The files of a table: in name order, of one format.

    Attributes:
        keys: of files in folders named `key=value`, those.
        left_out: what the folder holds beside them, with the reason.
    """

    files: list[Path]
    format: str
    keys: dict[Path, dict[str, str | None]]
    left_out: dict[str, str]


def find_tables(path: str | os.PathLike[str], format: str, formats: Sequence[str] = TABLES) -> Found:
    """The files of one format at `path`: a file, or a folder's files in name order, those of its subfolders too.

    Args:
        path: the file or the folder.
        format: one of `formats`, or "auto", by the files' names.
        formats: those known here, of "text", "csv" and "parquet".

    Raises:
        DataError: nothing there, no table in a folder, an unknown name, files of several formats, or folders whose names have
            other keys than the first one's.
    """
    wanted, tables, expected = _WORDS["text" in formats]
    if not os.fspath(path):
        raise refuse("the path ''", "nothing", "a file or a folder")
    if format not in ("auto", *formats):
        raise refuse(os.fspath(path), f"format {shown(format)}", ", ".join(("auto", *formats[:-1])) + f" or {formats[-1]}")
    root = Path(os.path.abspath(path))
    with reading(root):
        if not _exists(root):
            raise refuse(path, "no file or folder of that name", wanted)
        if root.is_file():
            kind = _format_of(root, formats) if format == "auto" else format
            if kind is None:
                raise refuse(path, f"the unknown suffix {shown(root.suffix)}", expected, "name the format (format=...)")
            return Found([root], kind, {}, {})
        if not root.is_dir():
            raise refuse(path, "neither a file nor a folder", wanted)
        files, left_out = _walk(root, format, formats)
    kinds = sorted(set(files.values()))
    if not files:
        told = f" ({told_left_out(left_out)})" if left_out else ""
        raise refuse(path, f"a folder without {tables}{told}", f"files with {expected}")
    if len(kinds) > 1:
        cure = "name it (format=...) or move the others" if "text" in formats else "name it (format=...)"
        raise refuse(path, f"files of several formats ({', '.join(kinds)})", "one format", cure)
    keys = {file: _keys(file.relative_to(root).parts[:-1]) for file in files}
    first = next(iter(keys))
    for file, found in keys.items():
        if list(found) != list(keys[first]):
            raise refuse(file, f"the keys {shown(list(found))} in folders' names", f"{shown(list(keys[first]))} as in {first}")
    return Found(list(files), kinds[0], keys, left_out)


def _keys(folders: tuple[str, ...]) -> dict[str, str | None]:
    """Values of partitions, as Hive writes them."""
    pairs = [folder.split("=", 1) for folder in folders if "=" in folder]
    return {unquote(key): None if value == "__HIVE_DEFAULT_PARTITION__" else unquote(value) for key, value in pairs}


def _walk(root: Path, format: str, formats: Sequence[str]) -> tuple[dict[Path, str], dict[str, str]]:
    files: dict[Path, str] = {}
    left_out: dict[str, str] = {}

    def failed(error: OSError) -> None:
        left_out[os.path.relpath(error.filename, root)] = error.strerror or "unreadable"

    for folder, folders, names in os.walk(root, onerror=failed):
        folders.sort()
        for name in [name for name in folders if name[0] in "._"]:
            folders.remove(name)
            left_out[os.path.relpath(Path(folder, name), root)] = "hidden"
        for name in [name for name in folders if Path(folder, name).is_symlink()]:
            left_out[os.path.relpath(Path(folder, name), root)] = "a link to a folder"
        for file in sorted(Path(folder, name) for name in names):
            kind = _format_of(file, formats) if format == "auto" else format
            reason = (
                "hidden"
                if file.name[0] in "._"
                else "a broken link"
                if file.is_symlink() and not file.exists()
                else "no file"
                if not file.is_file()
                else f"no suffix of a table ({file.suffix or 'none'})"
                if kind is None
                # Spark writes parts without a row, and without a header.
                else "empty"
                if kind != "parquet" and not file.stat().st_size
                else ""
            )
            if reason:
                left_out[os.path.relpath(file, root)] = reason
            else:
                files[file] = kind or ""
    return dict(sorted(files.items())), left_out


def told_left_out(left_out: dict[str, str]) -> str:
    """What a folder holds beside the files read, for a message: the first three, and how many more."""
    first = ", ".join(f"{name}: {reason}" for name, reason in list(left_out.items())[:3])
    return f"left out: {first}{f' and {len(left_out) - 3} more' if len(left_out) > 3 else ''}"


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an operating-system error while a file is read into a `DataError` that names it."""
    try:
        yield
    except OSError as error:
        raise refuse(path, f"{type(error).__name__}: {error.strerror or error}", "a readable file") from None


def check_file(path: Path, expected: str, cure: str) -> None:
    """Refuse what is no file of that name with what is expected and the cure."""
    with reading(path):
        if not _exists(path):
            raise refuse(path, "no file of that name", expected, cure)
        if path.is_dir():
            raise refuse(path, "a folder", expected, cure)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except ValueError:
        # A name with a NUL byte.
        return False


def _format_of(path: Path, formats: Sequence[str]) -> str | None:
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    packed = bool(suffixes) and suffixes[-1] in COMPRESSION
    kind = _SUFFIXES.get((suffixes[-2] if len(suffixes) > 1 else "") if packed else suffixes[-1]) if suffixes else None
    # Parquet packs its own pages.
    return None if kind not in formats or (packed and kind == "parquet") else kind


def read_blocks(path: Path, advance: Callable[[int], object], *, quoted: bool = False) -> Iterator[tuple[bytes, int]]:
    """Yield `(block, number of its first line)`: whole lines, each ended by `\\n`, in valid UTF-8 without control characters.

    A byte order mark is dropped and `\\r\\n` becomes `\\n`. Memory is bounded by the block size and the longest line allowed.
    `advance` is called with the bytes of the file consumed. Where `quoted`, a block ends where no quote is open.

    Raises:
        DataError: the file cannot be read or decompressed, or a line breaks one of the rules above.
    """
    line = 1
    tail = b""
    for number, data in enumerate(stream(path, advance)):
        if number == 0:
            data = data.removeprefix(MARK)
        if quoted and tail:
            # Where a quote is open is known from the beginning of a line on.
            data, tail = tail + data, b""
        cut = (_closed(data) if quoted else data.rfind(b"\n")) + 1
        check_length(path, line, len(tail) + (cut or len(data)))
        if not cut:
            # A control character is the usual reason for an endless line: say that first.
            checked(path, data, line, partial=True)
            tail += data
            continue
        block, tail = tail + data[:cut], data[cut:]
        block = checked(path, block, line)
        yield block, line
        line += block.count(b"\n")
    if tail:
        if quoted and tail.count(b'"') % 2:
            raise unclosed_quote(path, line)
        yield checked(path, tail, line).removesuffix(b"\n") + b"\n", line


def _closed(data: bytes) -> int:
    """The last line break outside of quotes, or -1."""
    if b'"' not in data:
        return data.rfind(b"\n")
    raw = np.frombuffer(data, dtype=np.uint8)
    ends = np.flatnonzero(raw == 10)
    outside = ends[np.searchsorted(np.flatnonzero(raw == 34), ends) % 2 == 0]
    return int(outside[-1]) if len(outside) else -1


def stream(path: Path, advance: Callable[[int], object]) -> Iterator[bytes]:
    """The bytes of a file, unpacked."""
    try:
        with pa.OSFile(str(path), "rb") as raw:
            compression = COMPRESSION.get(path.suffix.lower())
            stream = raw if compression is None else pa.CompressedInputStream(raw, compression)
            before = 0
            while data := stream.read(BLOCK_BYTES):
                advance(raw.tell() - before)
                before = raw.tell()
                yield data
    except (OSError, pa.ArrowException, ValueError) as error:
        code = getattr(error, "errno", None)
        reason = os.strerror(code) if code else shown(str(error), 160)
        raise refuse(path, f"{type(error).__name__}: {reason}", "a readable file") from None


def checked(path: Path, block: bytes, line: int, *, partial: bool = False) -> bytes:
    """Lines, each ended by `\\n`, after the check that they are text; whether part of a line is UTF-8 is not looked at."""
    if b"\r" in block:
        block = block.replace(b"\r\n", b"\n")
        if partial and block.endswith(b"\r"):
            block = block[:-1]
    bad = forbidden(block)
    if bad.size:
        where = int(bad[0])
        raise control_character(path, line + block.count(b"\n", 0, where), block[where])
    if not partial and not block.isascii():
        try:
            block.decode("utf-8")
        except UnicodeDecodeError as error:
            raise not_utf8(path, line + block.count(b"\n", 0, error.start), block[error.start]) from None
    return block


def forbidden(block: bytes) -> npt.NDArray[np.int64]:
    """Where control characters stand that no text has."""
    return np.flatnonzero(_FORBIDDEN[np.frombuffer(block, dtype=np.uint8)])


def check_length(path: Path, line: int, size: int) -> None:
    """Refuse a line that goes on for too long."""
    if size > MAX_LINE_BYTES + BLOCK_BYTES:
        raise refuse(at(path, line), f"a line of more than {MAX_LINE_BYTES >> 20} MiB", "shorter lines")


def control_character(path: Path, line: int, byte: int) -> DataError:
    """The error of a control character."""
    return refuse(at(path, line), f"the control character 0x{byte:02x}", "text without control characters")


def not_utf8(path: Path, line: int, byte: int) -> DataError:
    """The error of a byte that is no part of a character."""
    cure = "convert the file (iconv -t utf-8)"
    return refuse(at(path, line), f"the byte 0x{byte:02x}, which is not UTF-8", "UTF-8 text", cure)


def unclosed_quote(path: Path, line: int, cure: str = "") -> DataError:
    """The error of a file that ends inside of quotes."""
    return refuse(at(path, line), "a quote that is not closed", 'fields as abc or "abc"', cure)
