"""Text lines, `user item item ...`, as a stream of blocks of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from jagged.data.files import read_blocks
from jagged.data.tabular import Block

# A row for each line. A long line is several rows, so that memory is bounded by its bytes; `begins` is false where the line had
# items in an earlier one.
TEXT = pa.schema([("user", pa.large_string()), ("item", pa.large_list(pa.large_string())), ("begins", pa.bool_())])
# Bytes whose fields are found together: each field takes some 50 bytes then, and may be one byte long.
_PART_BYTES = 1 << 20

# The user of a line that goes on, and whether it had an item so far.
Unfinished = tuple[str, bool] | None
IntArray = npt.NDArray[np.int64]

_BLANK = np.zeros(256, dtype=bool)
_BLANK[[9, 10, 32]] = True


def text_blocks(path: Path, advance: Callable[[int], object]) -> Iterator[Block]:
    """One user a line, items oldest first, fields separated by spaces or tabs; blank lines are skipped.

    Raises:
        DataError: bytes that are no lines of text.
    """
    for block, first_line in read_blocks(path, advance):
        line, start = first_line, 0
        unfinished: Unfinished = None
        while start < len(block):
            stop = _cut(block, start)
            # What follows a cut inside of a line belongs to the line's user.
            rows, numbers, unfinished = _rows(block[start:stop], line, unfinished)
            line += block.count(b"\n", start, stop)
            if len(numbers):
                yield Block(rows, numbers, str(path), "")
            start = stop


def _cut(block: bytes, start: int) -> int:
    """Where a part of the block ends: behind a line, or inside of a long one behind a blank."""
    if len(block) - start <= _PART_BYTES:
        return len(block)
    end = start + _PART_BYTES
    found = block.rfind(b"\n", start, end)
    if found < 0:
        found = max(block.rfind(b" ", start, end), block.rfind(b"\t", start, end))
    if found < 0:
        # One field without an end: no id is so long, which the check of ids will say.
        found = min(place for place in (block.find(mark, end) for mark in (b" ", b"\t", b"\n")) if place >= 0)
    return found + 1


def _rows(part: bytes, line: int, before: Unfinished) -> tuple[pa.RecordBatch, IntArray, Unfinished]:
    """The rows of a part, the line of each, and what is known of a line that is not at its end."""
    raw = np.frombuffer(part, dtype=np.uint8)
    inside = np.concatenate(([False], ~_BLANK[raw], [False]))
    edges = np.flatnonzero(inside[1:] != inside[:-1])
    starts, ends = edges[::2], edges[1::2]
    offsets = np.zeros(len(starts) + 1, dtype=np.int64)
    np.cumsum(ends - starts, out=offsets[1:])
    fields = pa.LargeStringArray.from_buffers(len(starts), pa.py_buffer(offsets), pa.py_buffer(raw[inside[1:-1]].tobytes()))
    lines = np.searchsorted(np.flatnonzero(raw == 10), starts)
    heads = np.ones(len(starts), dtype=bool)
    heads[1:] = lines[1:] != lines[:-1]
    # A part that begins inside of a line begins with items.
    carried = before if len(starts) and lines[0] == 0 else None
    if carried is not None:
        heads[0] = False
    first = np.flatnonzero(heads)
    counts = np.diff(np.append(first, len(starts))) - 1
    users, numbers = fields.filter(pa.array(heads)), line + lines[first]
    begins = np.ones(len(first), dtype=bool)
    if carried is not None:
        user, had_items = carried
        count = int(first[0]) if len(first) else len(starts)
        users = pa.concat_arrays([pa.array([user], pa.large_string()), users])
        counts, numbers = np.concatenate(([count], counts)), np.concatenate(([line], numbers))
        begins = np.concatenate(([not had_items], begins))
    items = fields.filter(pa.array(~heads))
    bounds = pa.array(np.concatenate(([0], np.cumsum(counts))))
    rows = pa.record_batch([users, pa.LargeListArray.from_arrays(bounds, items), pa.array(begins)], schema=TEXT)
    if part.endswith(b"\n"):
        return rows, numbers, None
    if len(users) and int(numbers[-1]) == line + part.count(b"\n"):
        return rows, numbers, (users[-1].as_py(), bool(counts[-1]) or not begins[-1])
    # Of the last line only blanks are in this part.
    return rows, numbers, None if b"\n" in part else before
