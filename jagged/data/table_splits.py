"""Splits of a table's rows, and what training knows.

The split comes first: encoders and statistics are made from training rows, and from the events that these may see, alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from jagged.data.encoding import Encoder, Encoders, Statistics
from jagged.data.errors import refuse, shown
from jagged.data.expressions import LISTS
from jagged.data.histories import spread
from jagged.data.logs import Columns
from jagged.data.negatives import TrainingEvents
from jagged.data.progress import steps
from jagged.data.records import PARTS, Dataset
from jagged.data.schema import WITH_IDS, Column, Kind
from jagged.data.table_batches import Part
from jagged.data.table_leaks import NAMED, Leaks, requests_across, rows_across, too_late
from jagged.data.vocabulary import FIRST, UNSEEN

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float32]
AnyArray = npt.NDArray[Any]

_BUCKETS = 10
# Rows whose values are looked at together.
_ROWS = 1 << 20


@dataclass(frozen=True, eq=False)
class Split:
    """Training, validation and test rows of a dataset.

    Attributes:
        encoders: of ids, from what training sees.
        counts: rows of each part, ids that training does not have by table, and by the way of splitting its times or users.
        minimum_counts: of each vocabulary: how often training has an id at least.
        buckets: that borders of numbers make.
        known: the encoders of an earlier training that these go on from; None where there was none.
    """

    train: Part
    valid: Part
    test: Part
    by: str
    encoders: Encoders
    counts: dict[str, int]
    minimum_counts: dict[str, int]
    buckets: int
    known: Encoders | None = None

    @property
    def statistics(self) -> dict[str, Statistics]:
        """Of the columns of numbers, from what training sees."""
        return self.encoders.statistics

    def __str__(self) -> str:
        width = max(map(len, self.counts))
        lines = [f"{name:<{width}}  {count:>13,}" for name, count in self.counts.items()]
        return "\n".join([f"split by {self.by}", *lines, str(self.encoders)])

    def leaks(self, *, progress: bool = True) -> Leaks:
        """Count what must not be in a split.

        * `rows_across_parts`: validation and test rows whose user, candidate and time a row of an earlier part has too;
        * `requests_across_parts`: requests with rows in several parts;
        * `histories_too_late`: rows whose history has an event that they may not know, or another user's;
        * `unsupported_ids`: ids of vocabularies that training does not have as often as it must;
        * `unsupported_statistics`: columns of numbers whose statistics are not those of training.

        The first is a fact of the table where rows are repeated and the split is not by time (or one of the rows belongs to a
        request that ends later), and so is the second where a column says the parts, or a request has several users. The rest is
        zero in splits made here. Of a training that goes on, ids and statistics that it knows from before need no support.

        Args:
            progress: show a bar on a terminal for what takes longer than two seconds.
        """
        dataset = self.train.dataset
        vocabularies = _vocabularies(dataset)
        with steps("Checking", 4 + len(vocabularies) + len(dataset.with_statistics), progress) as step:
            part = np.full(len(dataset), -1, dtype=np.int8)
            for number, one in enumerate((self.train, self.valid, self.test)):
                part[one.rows] = number
            found = Leaks({}, {})
            step("rows in two parts")
            found.add("rows_across_parts", rows_across(dataset, part), dataset)
            step("requests in two parts")
            found.add("requests_across_parts", requests_across(dataset, part), dataset)
            step("histories that reach too far")
            found.add("histories_too_late", too_late(dataset), dataset)
            dataset.release()
            step("what training sees")
            support = _Support(dataset, self.train.rows)
            unsupported: list[str] = []
            for name in vocabularies:
                step(f"ids of {name}")
                known = self.encoders[name].ids
                assert known is not None
                own = known.ids[0 if self.known is None else self.known[name].size - FIRST :]
                counts = np.append(support.counts(name), 0)[dataset.ids(name).encode(own)]
                bad = np.flatnonzero(counts < self.minimum_counts[name])
                unsupported += [f"{shown(own[int(i)].as_py())} of {name}" for i in bad]
            changed = []
            for name in dataset.with_statistics:
                step(f"statistics of {name}")
                expected = (
                    Statistics.fit(support.numbers(name), self.buckets) if self.known is None else self.known.statistics[name]
                )
                if expected != self.encoders.statistics[name]:
                    changed.append(name)
        found.counts["unsupported_ids"] = len(unsupported)
        found.examples["unsupported_ids"] = unsupported[:NAMED]
        found.counts["unsupported_statistics"] = len(changed)
        found.examples["unsupported_statistics"] = changed[:NAMED]
        return found


def split_rows(
    dataset: Dataset,
    by: str = "time",
    *,
    valid: float = 0.1,
    test: float = 0.1,
    seed: int = 0,
    minimum_counts: int | Mapping[str, int] = 1,
    buckets: int = _BUCKETS,
    known: Encoders | None = None,
    progress: bool = True,
) -> Split:
    """Split a dataset's rows, then learn encoders and statistics from what training sees.

    By:

    * "time": at most `1 - valid - test` of the rows lie before the validation time and are training, at most `1 - test` before
      the test time. Equal times stay in one part, and so do the rows of a request: all have the time of its last row.
    * "order": the same by the rows' places in the source, for a table without times whose rows are in their order.
    * "user": users drawn by the seed; `round(share * users)` of them in each part. Rows without a user are training.
    * "column": by the column that `from_table(split=...)` named.
    * "leave-one-out": each user's last row is test, the one before it validation, with the whole requests of the two. A user of
      whom nothing would be left, or who is missing, is training alone.

    Histories of validation and test rows may hold events of earlier parts. What training sees is its rows, and the events in
    their histories, each once. Ids of users and in lists count in rows alone: events do not show them.

    Args:
        dataset: whose rows they are.
        by: how.
        valid, test: shares of "time", "order" and "user", 0 or more, below 1 together.
        seed: of "user", and of hashes of ids; 0 to 2**64 - 1.
        minimum_counts: ids that training sees less often are unseen: for all vocabularies, or by table.
        buckets: that borders of numbers make.
        known: the encoders of an earlier training on a table with these columns, which goes on with this one's rows: ids keep
            their numbers, vocabularies get new ones behind these (`Encoder.grown`), hashes and statistics of numbers stay. None:
            there was none.
        progress: show a bar on a terminal for what takes longer than two seconds.

    Raises:
        DataError: the dataset lacks what the split goes by, a part has no row, or the dataset has tables of ids or numbers that
            `known` does not have, or has encoded otherwise.
        ValueError: an argument out of range.
    """
    if by not in _WAYS:
        raise ValueError(f"by: got {by!r}, expected one of {', '.join(map(repr, _WAYS))}")
    if not (valid >= 0 and test >= 0 and valid + test < 1):
        raise ValueError(f"valid, test: got {valid}, {test}, expected 0 or more with a sum below 1")
    if type(seed) is not int or not 0 <= seed < 2**64:
        raise ValueError(f"seed: got {seed!r}, expected 0 to 2**64 - 1")
    if type(buckets) is not int or buckets < 1:
        raise ValueError(f"buckets: got {buckets!r}, expected 1 or more")
    minimum = _minimum_counts(minimum_counts, _vocabularies(dataset))
    if known is not None:
        _check_known(dataset, known)
    with steps("Splitting", 3 + len(dataset.tables) + len(dataset.with_statistics), progress) as step:
        step(f"by {by}")
        rows, counts = rows_of_parts(dataset, by, valid, test, seed)
        step("what training sees")
        support = _Support(dataset, rows[0])
        tables, statistics = {}, {}
        for name, columns in dataset.tables.items():
            step(f"ids of {name}")
            seen = support.counts(name)
            least = minimum.get(name, 1)
            if known is None:
                tables[name] = Encoder.fit(columns[0], dataset.ids(name), seen, minimum=least, seed=seed)
            else:
                tables[name] = known[name].grown(dataset.ids(name), seen, minimum=least)
        for name in dataset.with_statistics:
            step(f"statistics of {name}")
            # What a model has learnt of scaled numbers holds for this scale alone.
            statistics[name] = Statistics.fit(support.numbers(name), buckets) if known is None else known.statistics[name]
        encoders = Encoders(tables, statistics)
        step("numbers of the ids")
        train = Part(dataset, rows[0], encoders, training=TrainingEvents(dataset, rows[0]))
    for name in minimum:
        unseen = int((train.maps[name] == UNSEEN).sum())
        counts[f"ids of {name} that training does not have"] = unseen
        if known is not None:
            counts[f"ids of {name} that are new"] = encoders[name].size - known[name].size
    return Split(train, replace(train, rows=rows[1]), replace(train, rows=rows[2]), by, encoders, counts, minimum, buckets, known)


def _check_known(dataset: Dataset, known: Encoders) -> None:
    """Refuse encoders of a table with other columns."""
    for name, columns in dataset.tables.items():
        wanted, size = columns[0].encoding, columns[0].size
        found = None if name not in known else known[name].encoding
        if found != wanted or (size is not None and known[name].size != FIRST + size):
            told = "none" if found is None else f"{found} with {known[name].size - FIRST} ids"
            raise refuse(f"known: table {shown(name)}", told, f"{wanted}{'' if size is None else f' with {size} ids'}")
    if lacking := [name for name in dataset.with_statistics if name not in known.statistics]:
        raise refuse("known", f"statistics of {shown(list(known.statistics), 200)}", f"those of {shown(lacking[0])}, too")


def _vocabularies(dataset: Dataset) -> list[str]:
    return [name for name, columns in dataset.tables.items() if columns[0].encoding == "vocabulary"]


def rows_of_parts(dataset: Dataset, by: str, valid: float, test: float, seed: int) -> tuple[list[IntArray], dict[str, int]]:
    """The rows of training, validation and test, and how many there are, with what the way of splitting notes."""
    parts, notes = _WAYS[by](dataset, valid, test, seed)
    # What was looked at is mapped anew where it is needed: a split is no larger than what it keeps and one column.
    dataset.release()
    counts = {name: int((parts == number).sum()) for number, name in enumerate(PARTS)}
    shares = {"train": 1.0, "valid": valid, "test": test} if by in ("time", "order", "user") else {"train": 1.0}
    for name, share in shares.items():
        if share and not counts[name]:
            raise refuse(
                f"split by {by}",
                f"no {name} row of {len(dataset)} ({shown({**counts, **notes}, 200)})",
                "one at least",
                "change the shares, or split otherwise",
            )
    return [np.flatnonzero(parts == number) for number in range(len(PARTS))], {**counts, **notes}


def _minimum_counts(given: int | Mapping[str, int], vocabularies: list[str]) -> dict[str, int]:
    by_table = given if isinstance(given, Mapping) else dict.fromkeys(vocabularies, given)
    unknown = [name for name in by_table if name not in vocabularies]
    found = {name: by_table.get(name, 1) for name in vocabularies}
    if unknown or any(type(count) is not int or count < 1 for count in found.values()):
        raise ValueError(f"minimum_counts: got {given}, expected counts from 1 on, by table of {vocabularies} where by table")
    return found


def _needed(dataset: Dataset, kind: Kind, by: str) -> AnyArray:
    values = dataset.one(kind)
    if values is None:
        others = " or ".join(way for way in _WAYS if way != by and (way == "order" or way == "column"))
        raise refuse(f"split by {by}", f"no column of kind {kind.value}", "one", f"name it in the schema, or split by {others}")
    return values


def _by_time(dataset: Dataset, valid: float, test: float, seed: int) -> tuple[npt.NDArray[np.int8], dict[str, int]]:
    parts, cuts = _last(dataset, _needed(dataset, Kind.TIME, "time"), valid, test)
    return parts, {f"{name}_time": cut for name, cut in cuts.items()}


def _by_order(dataset: Dataset, valid: float, test: float, seed: int) -> tuple[npt.NDArray[np.int8], dict[str, int]]:
    parts, cuts = _last(dataset, dataset.source, valid, test)
    return parts, {f"{name}_row": cut for name, cut in cuts.items()}


def _last(dataset: Dataset, times: IntArray, valid: float, test: float) -> tuple[npt.NDArray[np.int8], dict[str, int]]:
    """The last rows by some times, with the requests that they are of, and where each part begins."""
    requests = dataset.one(Kind.REQUEST)
    if requests is not None and len(times):
        last = np.full(int(requests.max()) + 2, np.iinfo(np.int64).min)
        np.maximum.at(last, requests + 1, times)
        times = np.where(requests < 0, times, last[requests + 1])
    parts: npt.NDArray[np.int8] = np.zeros(len(times), dtype=np.int8)
    notes: dict[str, int] = {}
    # Of decimal shares: 0.1 + 0.2 of 10 rows are 3.
    for number, share in ((1, valid + test), (2, test)):
        rank = int(len(times) * (1 - share) + 1e-9)
        if rank < len(times):
            cut = int(np.partition(times, rank)[rank])
            parts[times >= cut] = number
            notes[PARTS[number]] = cut
    return parts, notes


def _by_user(dataset: Dataset, valid: float, test: float, seed: int) -> tuple[npt.NDArray[np.int8], dict[str, int]]:
    users = _needed(dataset, Kind.USER, "user")
    known = np.unique(users[users >= 0])
    drawn = np.random.default_rng(seed).permutation(known)
    tests, valids = round(test * len(known)), round(valid * len(known))
    of_user = np.zeros(int(known[-1]) + 2 if len(known) else 1, dtype=np.int8)
    of_user[drawn[:tests] + 1] = 2
    of_user[drawn[tests : tests + valids] + 1] = 1
    return of_user[users + 1], {"valid_users": valids, "test_users": tests}


def _by_column(dataset: Dataset, valid: float, test: float, seed: int) -> tuple[npt.NDArray[np.int8], dict[str, int]]:
    if dataset.parts is None:
        raise refuse("split by column", "a dataset without parts", "from_table(split=...) with the column that says them")
    return dataset.parts, {}


def _leave_one_out(dataset: Dataset, valid: float, test: float, seed: int) -> tuple[npt.NDArray[np.int8], dict[str, int]]:
    users = _needed(dataset, Kind.USER, "leave-one-out")
    requests = dataset.one(Kind.REQUEST)
    parts = np.zeros(len(users), dtype=np.int8)
    begins = np.flatnonzero(np.append(True, users[1:] != users[:-1])) if len(users) else np.zeros(0, np.int64)
    counts = np.diff(np.append(begins, len(users)))
    held = users[begins] >= 0 if len(users) else np.zeros(0, np.bool_)
    for number in (2, 1):
        if not len(begins):
            break
        last = np.maximum.reduceat(np.where(parts == 0, np.arange(len(users)), -1), begins)
        held &= last >= 0
        of_row = np.repeat(np.where(held, last, -1), counts)
        chosen = of_row == np.arange(len(users))
        if requests is not None:
            chosen |= (of_row >= 0) & (requests >= 0) & (requests == requests[of_row]) & (parts == 0)
        parts[chosen] = number
    if len(begins):
        left = np.add.reduceat((parts == 0).astype(np.int64), begins)
        held &= left > 0
        parts[np.repeat(~held, counts)] = 0
    return parts, {"users_without_evaluation": int((~held & (users[begins] >= 0)).sum()) if len(begins) else 0}


_WAYS = {"time": _by_time, "order": _by_order, "user": _by_user, "column": _by_column, "leave-one-out": _leave_one_out}


class _Support:
    """What training sees: its rows, and the events in their histories, each once."""

    def __init__(self, dataset: Dataset, rows: IntArray) -> None:
        self.dataset = dataset
        #: Columns, each with its table and which of its rows training sees.
        self.columns: list[tuple[Columns, Column, BoolArray]] = []
        own = np.zeros(len(dataset), dtype=np.bool_)
        own[rows] = True
        log, seen = dataset.events, own
        if log is not None:
            seen = log.seen(dataset.start, dataset.stop, rows)
            dataset.release()
            if log.is_own:
                seen |= own
        for column in dataset.schema.columns:
            self.columns.append((dataset, column, seen if log is not None and log.is_own and log.shows(column) else own))
        if log is not None and not log.is_own:
            self.columns += [(log.table, column, seen) for column in log.table.schema.columns if log.shows(column)]

    def counts(self, table: str) -> IntArray:
        """How often training has each code of a table, int64 `[codes]`."""
        size = len(self.dataset.ids(table))
        counts = np.zeros(size + 1, dtype=np.int64)
        for stored, column, chosen in self.columns:
            if column.kind in WITH_IDS and column.table_name == table:
                for values in _values(stored, column, chosen):
                    counts += np.bincount(values + 1, minlength=size + 1)
                stored.release()
        return counts[1:]

    def numbers(self, name: str) -> FloatArray:
        """What training has of the columns of numbers of a name, float32."""
        found = [np.zeros(0, np.float32)]
        for stored, column, chosen in self.columns:
            if column.name == name and column in stored.schema.features(Kind.NUMBER, Kind.NUMBERS):
                found += _values(stored, column, chosen)
                stored.release()
        return np.concatenate(found)


def _values(stored: Columns, column: Column, chosen: BoolArray) -> Iterator[AnyArray]:
    """The values of the chosen rows, those of lists one after the other; of some rows at a time."""
    together = _ROWS
    if column.kind in LISTS:
        offsets, listed = stored.list_column(column.name)
        together = max(1, min(_ROWS, 4 * _ROWS * len(chosen) // max(len(listed), 1)))
    for begin in range(0, len(chosen), together):
        rows = np.flatnonzero(chosen[begin : begin + together]) + begin
        if column.kind in LISTS:
            yield listed[spread(offsets[rows], offsets[rows + 1] - offsets[rows])]
        else:
            yield stored.column(column.name)[rows]
