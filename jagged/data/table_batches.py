"""Batches of a table's rows: a part of the rows, what a loader's worker gathers of them, and the loader."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils import data
from torch.utils.data import DataLoader

from jagged.data.encoding import Encoders
from jagged.data.errors import refuse, shown
from jagged.data.expressions import LISTS
from jagged.data.histories import spread
from jagged.data.logs import Columns, EventLog
from jagged.data.negatives import UNIFORM, Drawing, TrainingEvents
from jagged.data.records import Dataset
from jagged.data.schema import WITH_IDS, Column, Kind

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float32]
AnyArray = npt.NDArray[Any]


@dataclass
class Batch:
    """Some rows of a part; nothing is padded. `B` rows, whose histories have `H` events together.

    With drawn negatives each row is a request with several candidates, `N` in the batch: its own item first, then the drawn ones.
    What is the request's stands once for it.

    Attributes:
        rows: int64 `[B]`, their numbers in the dataset.
        features: the columns of ids but the candidate's, by name: int64 numbers of the part's encoders, a sample a row. With
            weights (1 in columns that have none) where a list has some. A missing list has the one number 0, an empty one none.
        candidates: the candidate's column, one number a row; None where there is none. With drawn negatives a sample a candidate,
            `N` in all, and the item's other columns of ids as well.
        numbers: float32 `[B, C]`, the columns of kind number in the schema's order, the training mean where one is missing.
        numbers_missing: bool `[B, C]`.
        number_lists: the lists of numbers by name, the training mean where one is missing, with weights 1, and 0 where one is
            missing; None where there are none.
        labels: float32 `[B, K]`, 0 where one is missing; of a table without labels `[B, 0]`, which `label` says in words. With
            drawn negatives `[N, 1]`: 1 for the row's own item, 0 for others.
        label_mask: bool, as the labels: where a label is there.
        weights: float32 `[B]`, ones without a column of that kind.
        times: int64 `[B]`, or None.
        history: by column what the events show, oldest first: candidate, ids, event type; None without histories. With weights
            where events have some, in each column the same.
        history_lists: the lists of ids that events show, by name: a sample an event, in the order of `history`; so their lengths
            are `[H]` a column, and what pools them gives `[H, D]`. None where events show none.
        history_times: int64 `[H]`.
        history_numbers, history_numbers_missing: `[H, C]`, as of the rows: the columns of kind number that the events have.
        history_labels, history_label_mask: `[H, E]`: of the labels that events show.
        candidate_offsets: int64 `[B + 1]`: the candidates of row i are those from `candidate_offsets[i]` to below
            `candidate_offsets[i + 1]`; None where each row has one.
        candidate_numbers, candidate_numbers_missing, candidate_number_lists: with drawn negatives the item's columns of numbers,
            `[N, C']`, and of lists of numbers, as of the rows.
        sampled: whether there are drawn negatives. Figures of such batches depend on the draws, and say so.
    """

    rows: Tensor
    features: KeyedJaggedTensor
    candidates: KeyedJaggedTensor | None
    numbers: Tensor
    numbers_missing: Tensor
    number_lists: KeyedJaggedTensor | None
    labels: Tensor
    label_mask: Tensor
    weights: Tensor
    times: Tensor | None
    history: KeyedJaggedTensor | None = None
    history_lists: KeyedJaggedTensor | None = None
    history_times: Tensor | None = None
    history_numbers: Tensor | None = None
    history_numbers_missing: Tensor | None = None
    history_labels: Tensor | None = None
    history_label_mask: Tensor | None = None
    candidate_offsets: Tensor | None = None
    candidate_numbers: Tensor | None = None
    candidate_numbers_missing: Tensor | None = None
    candidate_number_lists: KeyedJaggedTensor | None = None
    sampled: bool = False

    def __len__(self) -> int:
        return self.rows.numel()

    @property
    def candidate_rows(self) -> Tensor:
        """The place in the batch of each candidate's row, int64 `[N]`: what is the request's is read by it."""
        places = torch.arange(self.rows.numel(), device=self.rows.device)
        if self.candidate_offsets is None:
            return places
        return torch.repeat_interleave(places, self.candidate_offsets.diff(), output_size=self.labels.shape[0])

    def label(self, place: int = 0) -> tuple[Tensor, Tensor]:
        """A label of the batch and where it is there, float32 and bool, a value a row or candidate.

        Raises:
            DataError: the batch does not have it; the message says how it gets one.
        """
        if not 0 <= place < (count := self.labels.shape[1]):
            found = f"{count} label columns" if count else "a table without labels, and no negatives"
            cure = 'name one when the table is read (label="click"), or give the loader negatives=n'
            raise refuse("batch", found, f"the label {place}", "count labels from 0" if count else cure)
        return self.labels[:, place], self.label_mask[:, place]

    def _mapped(self, change: Callable[[Any], Any]) -> Batch:
        found: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(self)}
        changed: dict[str, Any] = {
            name: value if value is None or isinstance(value, bool) else change(value) for name, value in found.items()
        }
        return Batch(**changed)

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """The batch on another device."""
        return self._mapped(lambda value: value.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """The batch in page-locked memory."""
        return self._mapped(lambda value: value.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory until work queued on `stream` is done."""
        self._mapped(lambda value: value.record_stream(stream))


class _Places(data.Dataset[Any]):
    """A part as DataLoader takes it: all rows of a batch at once."""

    def __init__(self, part: Part, max_history: int | None) -> None:
        self.part, self.max_history = part, max_history

    def __len__(self) -> int:
        return len(self.part)

    def __getitems__(self, places: Sequence[int]) -> dict[str, Tensor]:
        return self.part.collect(places, max_history=self.max_history)


class _Requests(_Places):
    """The same with drawn negatives; each batch comes with the epoch that it is drawn for."""

    def __init__(self, part: Part, max_history: int | None, drawing: Drawing) -> None:
        super().__init__(part, max_history)
        self.drawing = drawing

    def __getitems__(self, places: tuple[int, Sequence[int]]) -> dict[str, Tensor]:  # type: ignore[override]
        epoch, chosen = places
        return self.part.collect(chosen, max_history=self.max_history, drawing=self.drawing, epoch=epoch)


class _OfEpoch:
    """A batch sampler whose batches say their epoch: workers that live on would not hear of the next one."""

    def __init__(self, sampler: Any) -> None:
        self.sampler, self.epoch = sampler, 0

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        epoch = self.epoch
        return ((epoch, places) for places in self.sampler)


class NegativesLoader(DataLoader[Any]):
    """Batches with drawn negatives, as a DataLoader. Made by `Part.loader`.

    `Trainer` calls `set_epoch`. Without it each iteration has the draws of epoch 0.
    """

    def __init__(self, requests: _Requests, collate: Callable[[Any], Batch], **options: Any) -> None:
        of_batches = {name: options[name] for name in _OF_BATCHES if name in options}
        plain: DataLoader[Any] = DataLoader(requests, **of_batches, generator=options.get("generator"))
        if plain.batch_sampler is None:
            raise ValueError("batch_size: got None, expected rows of a batch")
        others = {name: value for name, value in options.items() if name not in _OF_BATCHES}
        self._of_epoch = _OfEpoch(plain.batch_sampler)
        super().__init__(requests, batch_sampler=self._of_epoch, collate_fn=collate, **others)  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Let the next iterations have the draws of an epoch, from 0."""
        self._of_epoch.epoch = epoch


_OF_BATCHES = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")


@dataclass(frozen=True, eq=False)
class Part:
    """Rows of a dataset, as a model gets them. Nothing is copied but the rows' numbers.

    Attributes:
        dataset: whose rows they are.
        rows: int64 `[n]`, ascending numbers of rows of the dataset; None for all.
        encoders: from ids to numbers, of this dataset's own training rows or of another's.
        maps: by table, int32: the numbers of the dataset's codes; None: made of the encoders.
        training: training's events, from which negatives are drawn; None: there are none to draw from.

    Raises:
        DataError: the encoders lack a table or column of the dataset.
        ValueError: rows that the dataset does not have.
    """

    dataset: Dataset
    rows: IntArray = None  # type: ignore[assignment]
    encoders: Encoders = field(default_factory=lambda: Encoders({}, {}))
    maps: Mapping[str, npt.NDArray[np.int32]] = None  # type: ignore[assignment]
    training: TrainingEvents | None = None

    def __post_init__(self) -> None:
        rows = np.arange(len(self.dataset)) if self.rows is None else np.asarray(self.rows, dtype=np.int64)
        if rows.ndim != 1 or (len(rows) and not 0 <= rows.min() <= rows.max() < len(self.dataset)):
            raise ValueError(
                f"rows: got shape {rows.shape}, expected one dimension and numbers from 0 to {len(self.dataset) - 1}"
            )
        object.__setattr__(self, "rows", rows)
        tables = self.dataset.tables
        lacking = [name for name in tables if name not in self.encoders]
        lacking += [name for name in self.dataset.with_statistics if name not in self.encoders.statistics]
        if lacking:
            raise refuse(
                "encoders",
                f"the tables {shown(list(self.encoders), 200)} and numbers {shown(list(self.encoders.statistics), 200)}",
                f"{shown(lacking[0])}, which the dataset has",
                "take the encoders of a split of such a table",
            )
        if self.maps is None:
            maps = {name: self.encoders[name].code_map(self.dataset.ids(name)) for name in tables}
            object.__setattr__(self, "maps", maps)

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return f"Part({len(self):,} of {len(self.dataset):,} rows)"

    @cached_property
    def number_names(self) -> list[str]:
        """The columns of `Batch.numbers`; with drawn negatives without those of the item, which `Batch.candidate_numbers` has."""
        return [column.name for column in self.dataset.schema.of_kind(Kind.NUMBER)]

    @cached_property
    def label_names(self) -> list[str]:
        """The columns of `Batch.labels`."""
        return [column.name for column in self.dataset.schema.of_kind(Kind.LABEL)]

    def gather(
        self,
        rows: Any,
        *,
        max_history: int | None = None,
        negatives: int | None = None,
        by: str = UNIFORM,
        seed: int = 0,
        item_columns: Sequence[str] = (),
        request_columns: Sequence[str] = (),
        epoch: int = 0,
    ) -> Batch:
        """The batch of some rows.

        Args:
            rows: `[B]` integers, places in this part from 0 on, in any order.
            max_history: most events of a row's history: the latest ones. None: all.
            negatives, by, seed, item_columns, request_columns: as of `loader`.
            epoch: from 0, whose negatives training rows have.
        """
        drawing = Drawing.of(self.dataset, self.training, negatives, by, seed, item_columns, request_columns)
        if type(epoch) is not int or epoch < 0:
            raise ValueError(f"epoch: got {epoch!r}, expected 0 or more")
        return self.batch(self.collect(rows, max_history=max_history, drawing=drawing, epoch=epoch), drawing)

    def loader(
        self,
        *,
        max_history: int | None = None,
        negatives: int | None = None,
        by: str = UNIFORM,
        seed: int = 0,
        item_columns: Sequence[str] = (),
        request_columns: Sequence[str] = (),
        **options: Any,
    ) -> DataLoader[Any]:
        """Batches of the part, as a DataLoader; its workers gather, each with the mapped files.

        With `negatives=n` each row, an event without a label, becomes a request with several candidates: its own item with the
        label 1, and up to n others, no two alike, with the label 0. These are items that a training row has at an earlier time,
        strictly, and that the row's user has not had in any part until the row's time, that time included. Where fewer than n
        are left the request has fewer, and where the row's own item is missing it has none and its label is masked. Draws depend
        on the seed and the row; those of training rows also on the epoch. Nothing else changes them: not batches, workers,
        processes or a resumed run.

        Args:
            max_history: as of `gather`.
            negatives: how many are drawn for each row. None: none, rows have the table's labels.
            by: "uniform": each item that is left is as likely as another; "popularity": as likely as training had it often, by
                the exact count before the row's time. One after the other, without replacement.
            seed: of the draws, 0 to 2**64 - 1.
            item_columns: columns that are a property of the item, its category for example. A candidate has the value of its
                item's latest training row before the time, the row's own item as well, so that a value does not tell them
                apart; only where there is no such row yet it has the row's own value.
            request_columns: columns that say something of the request, the same for all of its candidates. Each column of ids
                or numbers, but user and candidate, is the item's or the request's.
            **options: of `torch.utils.data.DataLoader`: `batch_size`, `shuffle`, `sampler`, `num_workers` and so on.

        Raises:
            DataError: negatives of a table that has labels, or lacks user, candidate or time; of a part without a training part
                (`Dataset.split` has one); or a column that is neither the item's nor the request's.
            ValueError: an argument out of range.
        """
        drawing = Drawing.of(self.dataset, self.training, negatives, by, seed, item_columns, request_columns)
        if drawing is None or self.training is None:
            # What is collated is what `__getitems__` gives, which torch's types do not know.
            return DataLoader(_Places(self, max_history), collate_fn=self.batch, **options)  # type: ignore[arg-type]
        self.training.prepare(drawing)
        return NegativesLoader(_Requests(self, max_history, drawing), partial(self.batch, drawing=drawing), **options)

    def collect(
        self, rows: Any, *, max_history: int | None = None, drawing: Drawing | None = None, epoch: int = 0
    ) -> dict[str, Tensor]:
        """The tensors of which `batch` makes a batch: what a loader's worker does, without torchrec."""
        if max_history is not None and max_history < 0:
            raise ValueError(f"max_history: got {max_history}, expected 0 or more")
        dataset = self.dataset
        chosen = self.rows[np.asarray(rows, dtype=np.int64)]
        found: dict[str, AnyArray] = {"rows": chosen}
        columns = self._columns(drawing)
        self._keyed(found, "features", columns["features"], chosen)
        found["numbers"], found["numbers_missing"] = self._numbers(dataset, columns["numbers"], chosen)
        if columns["number_lists"]:
            self._keyed(found, "number_lists", columns["number_lists"], chosen)
        if drawing is None:
            if columns["candidates"]:
                self._keyed(found, "candidates", columns["candidates"], chosen)
            found["labels"], found["label_mask"] = self._labels(dataset, self.label_names, chosen)
        else:
            self._candidates(found, columns, chosen, drawing, epoch)
        weights, times = dataset.one(Kind.WEIGHT), dataset.one(Kind.TIME)
        found["weights"] = np.ones(len(chosen), np.float32) if weights is None else weights[chosen]
        if times is not None:
            found["times"] = times[chosen]
        if (log := dataset.events) is not None:
            self._history(found, log, chosen, max_history)
        return {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in found.items()}

    def batch(self, collected: Mapping[str, Tensor], drawing: Drawing | None = None) -> Batch:
        """The batch of what `collect` gave."""
        columns, count = self._columns(drawing), collected["rows"].numel()
        counts = dict.fromkeys(columns, count)
        if drawing is not None:
            counts["candidates"] = counts["candidate_number_lists"] = collected["labels"].shape[0]
        if "history_times" in collected:
            counts["history_lists"] = collected["history_times"].numel()
        keyed = {
            name: _keyed_tensor([column.name for column in columns[name]], collected, name, counts[name])
            if f"{name}.values" in collected
            else None
            for name in columns
            if not name.endswith("numbers")
        }
        plain = {one.name: collected.get(one.name) for one in fields(Batch) if one.name not in (*keyed, "sampled")}
        return Batch(**{**plain, **keyed}, sampled=drawing is not None)  # type: ignore[arg-type]

    def _columns(self, drawing: Drawing | None) -> dict[str, list[Column]]:
        """What is in which tensor of a batch."""
        schema, log = self.dataset.schema, self.dataset.events
        of_item = () if drawing is None else drawing.item_columns
        ids = [column for column in schema.of_kind(*WITH_IDS) if column.kind is not Kind.CANDIDATE]
        numbers, lists = schema.of_kind(Kind.NUMBER), schema.features(Kind.NUMBERS)
        return {
            "features": [column for column in ids if column.name not in of_item],
            "candidates": [*schema.of_kind(Kind.CANDIDATE), *(column for column in ids if column.name in of_item)],
            "numbers": [column for column in numbers if column.name not in of_item],
            "candidate_numbers": [column for column in numbers if column.name in of_item],
            "number_lists": [column for column in lists if column.name not in of_item],
            "candidate_number_lists": [column for column in lists if column.name in of_item],
            "history": [] if log is None else log.ids,
            "history_lists": [] if log is None else log.lists,
        }

    def _candidates(
        self, found: dict[str, AnyArray], columns: dict[str, list[Column]], chosen: IntArray, drawing: Drawing, epoch: int
    ) -> None:
        """Each row's own item and its negatives, with what is theirs."""
        item, time = self.dataset.one(Kind.CANDIDATE), self.dataset.one(Kind.TIME)
        # `Drawing.of` has seen to it.
        assert self.training is not None
        assert item is not None
        assert time is not None
        lengths, drawn = self.training.draw(chosen, drawing, epoch)
        offsets = np.append(0, np.cumsum(lengths + 1))
        own = offsets[:-1]
        items = np.empty(offsets[-1], np.int32)
        is_own = np.zeros(offsets[-1], np.bool_)
        is_own[own] = True
        items[own], items[~is_own] = item[chosen], drawn
        found["candidate_offsets"] = offsets
        found["labels"] = is_own[:, None].astype(np.float32)
        found["label_mask"] = items[:, None] >= 0
        values = self.maps[columns["candidates"][0].table_name][items + 1]
        if not drawing.item_columns:
            found["candidates.values"], found["candidates.lengths"] = values.astype(np.int64), np.ones(len(items), np.int64)
            found["candidate_numbers"], found["candidate_numbers_missing"] = self._numbers(self.dataset, [], items)
            return
        of_request = np.repeat(chosen, lengths + 1)
        rows = self.training.latest(items, time[of_request])
        rows = np.where(rows < 0, of_request, rows)
        self._keyed(found, "candidates", columns["candidates"], rows)
        numbers = self._numbers(self.dataset, columns["candidate_numbers"], rows)
        found["candidate_numbers"], found["candidate_numbers_missing"] = numbers
        if columns["candidate_number_lists"]:
            self._keyed(found, "candidate_number_lists", columns["candidate_number_lists"], rows)

    def _history(self, found: dict[str, AnyArray], log: EventLog, chosen: IntArray, max_history: int | None) -> None:
        """What the events in the rows' histories show."""
        start, stop = self.dataset.start[chosen], self.dataset.stop[chosen]
        if max_history is not None:
            start = np.maximum(start, stop - max_history)
        events, table = log.rows(spread(start, stop - start)), log.table
        numbers = [self.maps[column.table_name][table.column(column.name)[events] + 1] for column in log.ids]
        found["history.values"] = np.concatenate(numbers, dtype=np.int64)
        found["history.lengths"] = np.tile(stop - start, len(numbers))
        if log.weights is not None:
            found["history.weights"] = np.tile(table.column(log.weights)[events], len(numbers))
        if log.lists:
            self._keyed(found, "history_lists", log.lists, events, table)
        found["history_times"] = table.column(log.time)[events]
        found["history_numbers"], found["history_numbers_missing"] = self._numbers(table, log.numbers, events)
        found["history_labels"], found["history_label_mask"] = self._labels(table, list(log.labels), events)

    def _keyed(
        self, found: dict[str, AnyArray], name: str, columns: list[Column], chosen: IntArray, table: Columns | None = None
    ) -> None:
        """Values, lengths and weights of columns with ids or lists of numbers, key by key."""
        # A table without rows is one, too.
        table = self.dataset if table is None else table
        values: list[AnyArray] = []
        lengths: list[AnyArray] = []
        weights: list[FloatArray] = []
        for column in columns:
            if column.kind not in LISTS:
                values.append(self.maps[column.table_name][table.column(column.name)[chosen] + 1])
                lengths.append(np.ones(len(chosen), np.int64))
                weights.append(np.ones(len(chosen), np.float32))
                continue
            offsets, stored = table.list_column(column.name)
            start = offsets[chosen]
            lengths.append(offsets[chosen + 1] - start)
            places = spread(start, lengths[-1])
            if column.kind is Kind.IDS:
                values.append(self.maps[column.table_name][stored[places] + 1])
                given = None if column.weights is None else table.list_column(column.weights)[1][places]
                # Only a missing list's one id has no weight.
                weights.append(
                    np.ones(len(places), np.float32) if given is None else np.where(np.isnan(given), np.float32(1), given)
                )
            else:
                missing = np.isnan(stored[places])
                values.append(np.where(missing, np.float32(self.encoders.statistics[column.name].mean), stored[places]))
                weights.append((~missing).astype(np.float32))
        of_numbers = name.endswith("number_lists")
        dtype = np.float32 if of_numbers else np.int64
        found[f"{name}.values"] = np.concatenate(values, dtype=dtype) if values else np.zeros(0, dtype)
        found[f"{name}.lengths"] = np.concatenate(lengths) if lengths else np.zeros(0, np.int64)
        if of_numbers or any(column.weights is not None for column in columns):
            found[f"{name}.weights"] = np.concatenate(weights)

    def _numbers(self, table: Columns, columns: list[Column], chosen: AnyArray) -> tuple[FloatArray, BoolArray]:
        shape = (len(chosen), len(columns))
        values, missing = np.empty(shape, np.float32), np.empty(shape, np.bool_)
        for i, column in enumerate(columns):
            here = table.column(column.name)[chosen]
            missing[:, i] = np.isnan(here)
            values[:, i] = np.where(missing[:, i], np.float32(self.encoders.statistics[column.name].mean), here)
        return values, missing

    def _labels(self, table: Columns, names: list[str], chosen: IntArray) -> tuple[FloatArray, BoolArray]:
        values = np.empty((len(chosen), len(names)), np.float32)
        for i, name in enumerate(names):
            values[:, i] = table.column(name)[chosen]
        mask = ~np.isnan(values)
        return np.where(mask, values, np.float32(0)), mask


def _keyed_tensor(keys: list[str], collected: Mapping[str, Tensor], name: str, count: int) -> KeyedJaggedTensor:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    return KeyedJaggedTensor(
        keys=keys,
        values=collected[f"{name}.values"],
        weights=collected.get(f"{name}.weights"),
        lengths=collected[f"{name}.lengths"],
        stride=count,
    )
