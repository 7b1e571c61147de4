"""Names of labels in a text file, a line for each."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from jagged.data.errors import at, refuse
from jagged.data.files import check_file, read_blocks

#: The file that runs keep them in.
LABEL_NAMES = "label_names.txt"
# Names that are written together, at most.
_WRITTEN = 1 << 16


def read_label_names(path: str | os.PathLike[str], num_labels: int, *, or_more: bool = False) -> pa.LargeStringArray:
    """Read a text file with the name of a label a line, in the order of ids: `Y.txt` of the extreme classification repository.

    The file is UTF-8 without control characters. A byte order mark is dropped, `\\r\\n` ends a line as `\\n` does, and the last
    line may have no end. The file may be compressed (`.gz`, `.bz2`, `.zst`, `.lz4`). Several labels may have one name.

    Args:
        path: the file.
        num_labels: labels that there are, L.
        or_more: there may be more names, of labels that no row has.

    Returns:
        large_string `[L]`, or longer where there may be more; the name of label i at place i, none missing or empty.

    Raises:
        DataError: no such file, one that is no text, an empty name, or another number of names.
    """
    place = Path(path)
    check_file(place, "a file of names of labels", "name a file with a name a line, as Y.txt")
    parts = [pa.array([], pa.large_string())]
    for block, line in read_blocks(place, lambda _: None):
        names = pc.split_pattern(pa.array([block[:-1].decode()], pa.large_string()), "\n").flatten()
        empty = pc.index(pc.utf8_trim_whitespace(names), "").as_py()
        if empty >= 0:
            raise refuse(at(place, line + empty), "an empty name", "the name of a label", "write one, its id for example")
        parts.append(names)
    names = pa.concat_arrays(parts)
    if len(names) != num_labels and not (or_more and len(names) > num_labels):
        found = f"{len(names):,} name{'s' * (len(names) != 1)}"
        expected = f"{num_labels:,}{' or more' * or_more}, one for each label"
        raise refuse(place, found, expected, "name the file of this data set")
    return names


def write_label_names(names: pa.LargeStringArray, path: Path) -> None:
    """Write names as a file that `read_label_names` reads again equal.

    Raises:
        OSError: it cannot be written.
    """
    with open(path, "wb") as file:
        for begin in range(0, len(names), _WRITTEN):
            file.write("".join(f"{name}\n" for name in names[begin : begin + _WRITTEN].to_pylist()).encode())
