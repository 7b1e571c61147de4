"""Sums that do not depend on how rows are cut into chunks: exact ones, and those of rows that follow one another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from jagged.pointwise.storage import AnyArray, Columns

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
Within = Callable[[Columns, IntArray], Columns]

# A double is a whole number of 2**-1074; frexp's fractions, made whole, begin 53 bits lower.
_SCALE = 1_200
_LOW = 27
# From this length on a segment is cheaper summed alone than row by row beside others.
_LONG = 64


class ExactSum:
    """The sum of doubles, rounded once: the same whatever the order of the values and the chunks in which they come."""

    def __init__(self) -> None:
        self._total = 0
        self._not_finite = 0.0

    def add(self, values: FloatArray) -> None:
        """Add values, `[N]`, fewer than 2**25."""
        finite = np.isfinite(values)
        if not finite.all():
            self._not_finite += float(values[~finite].sum())
            values = values[finite]
        if not len(values):
            return
        fractions, exponents = np.frexp(values)
        whole = (fractions * 2.0**53).astype(np.int64)
        least = int(exponents.min())
        # Sums of both halves are whole numbers below 2**53, which doubles add without rounding.
        places = exponents - least
        high, low = (np.bincount(places, half) for half in (whole >> _LOW, whole & ((1 << _LOW) - 1)))
        for place in np.flatnonzero((high != 0) | (low != 0)).tolist():
            self._total += ((int(high[place]) << _LOW) + int(low[place])) << (place + least - 53 + _SCALE)

    @property
    def value(self) -> float:
        """The sum; infinite or NaN where a value was, or where it is beyond a double."""
        if self._not_finite != 0.0:
            return self._not_finite
        try:
            return self._total / (1 << _SCALE)
        except OverflowError:
            return float("inf") if self._total > 0 else float("-inf")


def starts_of(*keys: AnyArray) -> IntArray:
    """Where runs of rows with equal keys begin, int64 `[R]`; keys `[N]` each."""
    changes = np.zeros(len(keys[0]), dtype=bool)
    changes[:1] = True
    for key in keys:
        changes[1:] |= key[1:] != key[:-1]
    return np.flatnonzero(changes)


def running(values: AnyArray, starts: IntArray) -> AnyArray:
    """Sums of each segment's rows from its first on, `[N]`, added one after the other: no other segment rounds them."""
    if not len(values):
        return values
    lengths = np.diff(starts, append=len(values))
    if values.dtype.kind == "i":
        total = np.cumsum(values)
        return total - np.repeat(total[starts] - values[starts], lengths)
    result = values.copy()
    for segment in np.flatnonzero(lengths > _LONG).tolist():
        place = slice(starts[segment], starts[segment] + lengths[segment])
        result[place] = np.cumsum(values[place])
    short = np.flatnonzero((lengths > 1) & (lengths <= _LONG))
    short = short[np.argsort(-lengths[short], kind="stable")]
    at, left = starts[short], lengths[short]
    for row in range(1, int(left[0]) if len(left) else 1):
        # The longest come first, so those that go on are the first ones.
        here = at[: np.searchsorted(-left, -row)] + row
        result[here] += result[here - 1]
    return result


def before(sums: AnyArray, starts: IntArray) -> AnyArray:
    """What `running` had before each row, `[N]`; 0 for the first of a segment."""
    result = np.zeros_like(sums)
    result[1:] = sums[:-1]
    result[starts] = 0
    return result


def folded(chunks: Iterable[Columns], keys: Sequence[str], within: Within | None = None) -> Iterator[Columns]:
    """Rows with equal keys, which follow one another, as one row: its other columns are their sums, added in order.

    The last run of a chunk may go on in the next one. Its sums so far stand before that one's rows, as a row of theirs, so the
    result is that of one chunk bit for bit, and no run has to fit into memory.

    Args:
        chunks: in ascending order of `keys`.
        within: further columns to be summed, `[N]`, from the rows and the places where runs begin.
    """
    opened: Columns | None = None
    for chunk in chunks:
        rows = chunk
        if opened is not None:
            rows = {name: np.concatenate([opened[name], values]) for name, values in chunk.items()}
        starts = starts_of(*(rows[key] for key in keys))
        if not len(starts):
            continue
        further = {} if within is None else within(rows, starts)
        if opened is not None:
            for name, values in further.items():
                values[0] = opened[name][0]
        ends = np.append(starts[1:], len(rows[keys[0]])) - 1
        sums = {
            name: values[ends] if name in keys else running(values, starts)[ends] for name, values in {**rows, **further}.items()
        }
        yield {name: values[:-1] for name, values in sums.items()}
        opened = {name: values[-1:] for name, values in sums.items()}
    if opened is not None:
        yield opened
