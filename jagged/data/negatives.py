"""Negatives of events without labels: items that training had before an event's time and that its user has not had.

Candidates are drawn from a prefix of an array in the order of time, so that an event's time alone says which items there are:
the items by when training first has them (uniform), or training's events themselves (by popularity, where an item stands as
often as it was had). What the user has had is refused and drawn again; whoever has had nearly everything gets the rest of the
items one by one. All random numbers are a hash of seed, epoch, row and attempt: nothing depends on who draws, and when.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jagged.data.errors import refuse, shown
from jagged.data.histories import spread
from jagged.data.progress import steps
from jagged.data.schema import SIDED, Column, Kind

if TYPE_CHECKING:
    from jagged.data.records import Dataset

IntArray = npt.NDArray[np.int64]
CodeArray = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]
HashArray = npt.NDArray[np.uint64]
AnyArray = npt.NDArray[Any]

UNIFORM, POPULARITY = "uniform", "popularity"

GAMMA = np.uint64(0x9E3779B97F4A7C15)
# Attempts at a time, in multiples of the negatives wanted; after the first ones catalogues below so many are gone through.
_ROUNDS, _SMALL = (4, 16), 32
# Pairs of a row and an item that are gone through together: some 60 bytes each.
_PAIRS = 1 << 21
# The numbers of attempts end before the numbers by which rows go through items begin.
_RACE = np.uint64(1 << 40)


@dataclass(frozen=True)
class Drawing:
    """How negatives are drawn, as `Part.loader` was told.

    Attributes:
        count: negatives of an event.
        by: "uniform" or "popularity".
        seed: of the draws.
        item_columns: the candidate's beside its id: those that `candidate_columns` named.
    """

    count: int
    by: str = UNIFORM
    seed: int = 0
    item_columns: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        dataset: Dataset,
        training: TrainingEvents | None,
        count: int | None,
        by: str,
        seed: int,
    ) -> Drawing | None:
        """What was asked for, checked; None where no negatives are.

        Raises:
            ValueError: a number or name out of range, or options of negatives without any.
            DataError: a table with labels, without what negatives go by, or with a column of which nobody said whose it is;
                rows without a training part.
        """
        if count is None:
            if by != UNIFORM:
                raise ValueError(f"by: got {by!r} without negatives, expected negatives=n beside it")
            return None
        if type(count) is not int or count < 1:
            raise ValueError(f"negatives: got {count!r}, expected a number from 1 on; leave it out for none")
        if by not in (UNIFORM, POPULARITY):
            raise ValueError(f"by: got {by!r}, expected 'uniform' or 'popularity'")
        if type(seed) is not int or not 0 <= seed < 2**64:
            raise ValueError(f"seed: got {seed!r}, expected 0 to 2**64 - 1")
        schema = dataset.schema
        if labels := schema.of_kind(Kind.LABEL):
            raise refuse(
                "negatives",
                f"a table with the label {shown(labels[0].name)}",
                "a table of events without labels",
                "train on its labels, or read it with that column unused",
            )
        for kind in (Kind.USER, Kind.CANDIDATE, Kind.TIME):
            if schema.one(kind) is None:
                raise refuse("negatives", f"no column of kind {kind.value}", "one", "name it in the schema")
        if dataset.events is not None and not dataset.events.is_own:
            raise refuse(
                "negatives",
                "rows with an event table beside them",
                "events alone: what users had there would be drawn for them",
                "read the events as the table, without `events`",
            )
        if training is None:
            raise refuse(
                "negatives",
                f"rows without a training part to draw from (by={by!r})",
                "a part of Dataset.split",
                "split the table, and take the split's train, valid or test",
            )
        for column in schema.features(*SIDED):
            if column.of is None:
                raise refuse(
                    "negatives",
                    f"the column {shown(column.name)} of kind {column.kind.value}",
                    "to be told whose it is: a drawn item must not have another item's value",
                    "name it in candidate_columns or in request_columns when the table is read, or read it unused",
                )
        return cls(count, by, seed, tuple(column.name for column in schema.features(*SIDED) if column.is_candidates))


class _Pool(NamedTuple):
    """What is drawn from: items and their times, by time."""

    items: CodeArray
    times: IntArray


class _Grouped(NamedTuple):
    """Values in groups: those of group i are `values[offsets[i] : offsets[i + 1]]`, and belong to `rows`."""

    offsets: IntArray
    values: CodeArray
    rows: AnyArray


class TrainingEvents:
    """Training's events in the orders that draws need, made when first asked for: 10 to 24 bytes an event.

    Sent to another process it is made there again.

    Args:
        dataset: whose events they are.
        rows: int64 `[n]`, ascending: the training rows. Users' items are those of all rows.
    """

    def __init__(self, dataset: Dataset, rows: IntArray) -> None:
        self.dataset, self.rows = dataset, rows

    def __reduce__(self) -> tuple[Any, ...]:
        return TrainingEvents, (self.dataset, self.rows)

    def prepare(self, drawing: Drawing, *, progress: bool = True) -> int:
        """Make what draws need, so that processes that are forked share it; how many bytes that is.

        Args:
            drawing: how they are drawn.
            progress: show a bar on a terminal for what takes longer than two seconds.
        """
        needed = {
            "events by time": lambda: self._pool(drawing.by),
            "when items came": lambda: self.first_seen,
            "what users have had": lambda: self.had,
            "which pairs there are": lambda: (self._hints.bits,),
        }
        if drawing.item_columns or drawing.by == POPULARITY:
            needed["events by item"] = lambda: self.by_item
        made: list[Any] = []
        with steps("Preparing negatives", len(needed), progress) as step:
            for name, make in needed.items():
                step(name)
                made.append(make())
        return sum({id(array): array.nbytes for of in made for array in of}.values())

    @cached_property
    def events(self) -> _Pool:
        """All events with an item, by time."""
        return self._by_time()

    @cached_property
    def first_seen(self) -> _Pool:
        """Each item once, when training first has it."""
        # Where nothing else needs them, they are not kept.
        items, times = self.__dict__["events"] if "events" in self.__dict__ else self._by_time()
        first = np.full(self._num_items, -1, dtype=np.int64)
        # Of several the last one that is written stays: the earliest.
        first[items[::-1]] = np.arange(len(items))[::-1]
        places = np.sort(first[first >= 0])
        return _Pool(items[places], times[places])

    @cached_property
    def by_item(self) -> _Grouped:
        """Training rows of each item, by time."""
        rows = self.rows[self._items[self.rows] >= 0]
        items = self._items[rows]
        rows = rows[np.lexsort((self._times[rows], items))]
        return _Grouped(_offsets(items, self._num_items), np.zeros(0, np.int32), self._numbered(rows))

    @cached_property
    def had(self) -> _Grouped:
        """Items of each user, in any part, in the order of their codes, and the row of the first time."""
        users, items = self._users, self._items
        rows = np.flatnonzero((users >= 0) & (items >= 0))
        pairs = users[rows].astype(np.int64) * max(self._num_items, 1) + items[rows]
        order = np.argsort(pairs, kind="stable")
        pairs = pairs[order]
        # Rows of a user are in the order of time.
        rows = rows[order[np.append(True, pairs[1:] != pairs[:-1])]] if len(rows) else rows
        return _Grouped(_offsets(users[rows], self._num_users), items[rows], self._numbered(rows))

    @cached_property
    def _hints(self) -> _Hints:
        """Which pairs of `had` there may be: most that there are not need no bisection."""
        offsets, items, _ = self.had
        return _Hints(np.repeat(np.arange(len(offsets) - 1, dtype=np.int32), np.diff(offsets)), items)

    def draw(self, rows: IntArray, drawing: Drawing, epoch: int) -> tuple[IntArray, CodeArray]:
        """Negatives of some rows.

        Args:
            rows: `[R]`, numbers of rows of the dataset.
            drawing: how many, and how.
            epoch: of training; rows that are no training rows have the same negatives in each.

        Returns:
            int64 `[R]`, how many each row has, at most `drawing.count`; and their codes one after the other.
        """
        count, pool = drawing.count, self._pool(drawing.by)
        asked = _Asked(self._users[rows], self._items[rows], self._times[rows], self._keys(rows, drawing.seed, epoch))
        size = np.where(asked.item < 0, 0, _first_at(pool.times, asked.time))
        found = np.full((len(rows), count), -1, dtype=np.int32)
        open_, attempts, one_by_one = np.flatnonzero(size > 0), 0, []
        for width in (count + 2 + count // 2, *(times * count for times in _ROUNDS)):
            if not len(open_):
                break
            self._try(found, open_, asked.some(open_), pool, size[open_], attempts, width)
            left = open_[found[open_, -1] < 0]
            if not attempts and len(left):
                items = np.searchsorted(self.first_seen.times, asked.time[left], side="left")
                one_by_one.append(left[items <= _SMALL * count])
                left = left[items > _SMALL * count]
            open_, attempts = left, attempts + width
        one_by_one.append(open_)
        if len(last := np.concatenate(one_by_one)):
            for some in self._chunks(last, asked.time):
                self._go_through(found, some, asked.some(some), drawing.by)
        drawn = found >= 0
        return drawn.sum(1), found[drawn]

    def latest(self, items: CodeArray, times: IntArray) -> IntArray:
        """The row of each item's latest training event before a time, int64 `[n]`; -1 where there is none."""
        begin, found = self._before(items, times)
        if not len(self.by_item.rows):
            return np.full(len(items), -1, dtype=np.int64)
        rows = self.by_item.rows[np.maximum(found - 1, 0)].astype(np.int64)
        return np.where(found > begin, rows, -1)

    def _try(
        self, found: CodeArray, rows: IntArray, asked: _Asked, pool: _Pool, size: IntArray, attempts: int, width: int
    ) -> None:
        """Draw `width` times for some rows, and write down what is allowed and new."""
        have, number = found[rows], np.arange(attempts, attempts + width, dtype=np.uint64)
        places = (uniform(asked.key[:, None], number[None, :]) * size[:, None]).astype(np.int64)
        drawn = pool.items[places]
        taken = self._taken(np.repeat(np.arange(len(rows)), width), drawn.ravel(), asked)
        tried = np.concatenate((have, np.where(taken.reshape(drawn.shape), np.int32(-1), drawn)), axis=1)
        # Of equal items in a row the first counts.
        order = np.argsort(tried, axis=1, kind="stable")
        in_order = np.take_along_axis(tried, order, axis=1)
        fresh = np.empty(tried.shape, dtype=np.bool_)
        new = np.concatenate((in_order[:, :1] >= 0, (in_order[:, 1:] != in_order[:, :-1]) & (in_order[:, 1:] >= 0)), axis=1)
        np.put_along_axis(fresh, order, new, axis=1)
        rank = np.cumsum(fresh, axis=1)
        fresh &= rank <= found.shape[1]
        row, column = np.nonzero(fresh)
        found[rows[row], rank[row, column] - 1] = tried[row, column]

    def _go_through(self, found: CodeArray, rows: IntArray, asked: _Asked, by: str) -> None:
        """Draw the rest for some rows from all that they may have: a race whose winners are drawn as one after the other."""
        pool = self.first_seen
        lengths = np.searchsorted(pool.times, asked.time, side="left")
        which = np.repeat(np.arange(len(rows)), lengths)
        items = pool.items[spread(np.zeros_like(lengths), lengths)]
        allowed = ~self._taken(which, items, asked)
        for column in range(found.shape[1]):
            allowed &= items != found[rows[which], column]
        which, items = which[allowed], items[allowed]
        finish = -np.log1p(-uniform(asked.key[which], _RACE + items.astype(np.uint64)))
        if by == POPULARITY:
            begin, end = self._before(items, asked.time[which])
            finish /= end - begin
        order = np.lexsort((finish, which))
        which, items = which[order], items[order]
        place = np.arange(len(which)) - np.searchsorted(which, which, side="left") + (found[rows] >= 0).sum(1)[which]
        wins = place < found.shape[1]
        found[rows[which[wins]], place[wins]] = items[wins]

    def _taken(self, which: IntArray, items: CodeArray, asked: _Asked) -> BoolArray:
        """Whether the user of row `which[i]` has had the item by the row's time."""
        offsets, values, first = self.had
        taken = items == asked.item[which]
        users = asked.user[which]
        maybe = np.flatnonzero(self._hints.holds(users, items))
        users, some = users[maybe], items[maybe]
        end = offsets[users + 1]
        place = _bisect(offsets[users], end, lambda middle, open_: values[middle] < some[open_])
        inside = np.flatnonzero(place < end)
        inside = inside[values[place[inside]] == some[inside]]
        taken[maybe[inside]] |= self._times[first[place[inside]]] <= asked.time[which[maybe[inside]]]
        return taken

    def _before(self, items: CodeArray, times: IntArray) -> tuple[IntArray, IntArray]:
        """The range of `by_item` with the item's training events before a time."""
        offsets, _, rows = self.by_item
        begin = offsets[items]
        return begin, _bisect(begin, offsets[items + 1], lambda middle, open_: self._times[rows[middle]] < times[open_])

    def _keys(self, rows: IntArray, seed: int, epoch: int) -> HashArray:
        """A number for each row; the epoch is in that of training rows alone."""
        start = mixed(np.array([seed], dtype=np.uint64) + GAMMA)
        by_epoch = mixed(start + np.array([epoch + 1], dtype=np.uint64) * GAMMA)
        place = np.minimum(_first_at(self.rows, rows), max(len(self.rows) - 1, 0))
        trained = self.rows[place] == rows if len(self.rows) else np.zeros(len(rows), np.bool_)
        return mixed(np.where(trained, by_epoch, start) ^ mixed(rows.astype(np.uint64) + GAMMA))

    def _chunks(self, rows: IntArray, times: IntArray) -> Iterator[IntArray]:
        """Rows whose items together are few enough to be gone through at once; one row at least."""
        pairs = np.cumsum(np.searchsorted(self.first_seen.times, times[rows], side="left"))
        begin = 0
        while begin < len(rows):
            before = pairs[begin - 1] if begin else 0
            end = max(int(np.searchsorted(pairs, before + _PAIRS, side="right")), begin + 1)
            yield rows[begin:end]
            begin = end

    def _by_time(self) -> _Pool:
        rows = self.rows[self._items[self.rows] >= 0]
        rows = rows[np.argsort(self._times[rows], kind="stable")]
        return _Pool(self._items[rows], self._times[rows])

    def _pool(self, by: str) -> _Pool:
        return self.events if by == POPULARITY else self.first_seen

    def _numbered(self, rows: IntArray) -> AnyArray:
        return rows.astype(np.int32) if len(self.dataset) < 2**31 else rows

    @cached_property
    def _num_items(self) -> int:
        return len(self.dataset.ids(self._column(Kind.CANDIDATE).table_name))

    @cached_property
    def _num_users(self) -> int:
        return len(self.dataset.ids(self._column(Kind.USER).table_name))

    @cached_property
    def _items(self) -> CodeArray:
        return self.dataset.column(self._column(Kind.CANDIDATE).name)

    @cached_property
    def _users(self) -> CodeArray:
        return self.dataset.column(self._column(Kind.USER).name)

    @cached_property
    def _times(self) -> IntArray:
        return self.dataset.column(self._column(Kind.TIME).name)

    def _column(self, kind: Kind) -> Column:
        column = self.dataset.schema.one(kind)
        assert column is not None
        return column


class _Asked(NamedTuple):
    """Rows that ask for negatives, each with what its draws depend on."""

    user: CodeArray
    item: CodeArray
    time: IntArray
    key: HashArray

    def some(self, places: IntArray) -> _Asked:
        return _Asked(self.user[places], self.item[places], self.time[places], self.key[places])


class _Hints:
    """A set of pairs by one hash in 8 to 16 bits a pair: tells for sure that a pair is not there, not that it is.

    Args:
        users, items: int32 `[n]`, 0 or more.
    """

    def __init__(self, users: CodeArray, items: CodeArray) -> None:
        size = max(len(users) * 8, 64).bit_length()
        self._shift = np.uint64(64 - size)
        flags = np.zeros(1 << size, dtype=np.bool_)
        for begin in range(0, len(users), _PAIRS):
            flags[self._places(users[begin : begin + _PAIRS], items[begin : begin + _PAIRS])] = True
        self.bits = np.packbits(flags, bitorder="little")

    def holds(self, users: CodeArray, items: CodeArray) -> BoolArray:
        """Whether pairs may be in the set; of a missing user, below 0, none is."""
        places = self._places(users, items)
        byte = self.bits[(places >> np.uint64(3)).view(np.int64)]
        return ((byte >> (places & np.uint64(7)).astype(np.uint8)) & 1).astype(np.bool_) & (users >= 0)

    def _places(self, users: CodeArray, items: CodeArray) -> HashArray:
        pairs = (users.astype(np.uint64) << np.uint64(32)) ^ items.astype(np.uint64)
        pairs = (pairs ^ (pairs >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
        return (pairs ^ (pairs >> np.uint64(32))) * GAMMA >> self._shift


def _first_at(values: IntArray, asked: IntArray) -> IntArray:
    """In ascending values the place of the first that is not below each asked one; in order they are found sooner."""
    order = np.argsort(asked)
    found = np.empty(len(asked), dtype=np.int64)
    found[order] = np.searchsorted(values, asked[order], side="left")
    return found


def _offsets(groups: CodeArray, count: int) -> IntArray:
    # One group at least, so that a place of one can always be asked for.
    return np.append(0, np.cumsum(np.bincount(groups, minlength=max(count, 1))))


def _bisect(low: IntArray, high: IntArray, before: Any) -> IntArray:
    """In each range the first place that does not come before what is looked for, its end if there is none."""
    low, high = low.copy(), high.copy()
    while (open_ := np.flatnonzero(low < high)).size:
        middle = (low[open_] + high[open_]) >> 1
        is_before = before(middle, open_)
        low[open_] = np.where(is_before, middle + 1, low[open_])
        high[open_] = np.where(is_before, high[open_], middle)
    return low


def mixed(x: HashArray) -> HashArray:
    """A bijection of 64-bit numbers whose bits depend on all bits: that of SplitMix64 (Steele, Lea & Flood, 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniform(key: HashArray, number: HashArray) -> npt.NDArray[np.float64]:
    """The numbers of a key's stream at some places, from 0 to below 1."""
    return (mixed(key + (number + np.uint64(1)) * GAMMA) >> np.uint64(11)).astype(np.float64) * 2.0**-53
