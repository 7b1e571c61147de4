"""Batches of a table's requests: a part of the rows, and what a loader's worker gathers of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from jagged.data.encoding import Encoders
from jagged.data.errors import refuse, shown
from jagged.data.expressions import LISTS
from jagged.data.histories import spread
from jagged.data.logs import Columns, EventLog
from jagged.data.negatives import UNIFORM, Drawing, TrainingEvents
from jagged.data.packed import COUNTS, Packed
from jagged.data.records import Dataset
from jagged.data.schema import WITH_IDS, Column, Kind, Schema
from jagged.data.slots import copied_to
from jagged.data.unseen import Unseen

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    from jagged.data.plan import Balance
    from jagged.data.table_loader import RequestLoader

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float32]
AnyArray = npt.NDArray[Any]

# The KeyedJaggedTensors of a batch.
_KEYED = (
    "features", "weighted_features", "candidates", "weighted_candidates", "request_number_lists", "candidate_number_lists",
    "history_lists",
)  # fmt: skip
#: Before the names of an event's columns in `Batch.features`.
HISTORY = "history."


@dataclass
class Batch:
    """`R` requests with `S` candidates together; nothing is padded, and what is the request's stands once for it.

    The rows of a user that share a request are its candidates, in the dataset's order. Where the table has no column of requests,
    or a row lacks its request, the row is a request of one candidate: `R = S`. With drawn negatives each row is a request, and
    its candidates are its own item first, then the drawn ones.

    Ids are int64 numbers of the part's encoders. A missing id is 0, and so is the one id of a missing list; an empty list has
    none. Keys are in the schema's order, the same in every batch.

    Attributes:
        features: ids, a sample a request: the request's columns without weights; then the candidates' columns with one id each
            whose table is also read here, with as many ids as the request has candidates; then `history.<column>` for each
            column that the events of the request's history show, oldest first.
        weighted_features: the request's lists of ids that have weights; None where there are none.
        candidate_list_offsets: int64 `[S + 1, C]`: of the candidates' lists of ids whose table others read in `features`, too, in
            their order there. A request has there the ids of all its candidates' lists, and of the key's values those of
            candidate s are from row s to below row s + 1. None where there are no such lists.
        candidates: the other columns of ids of the candidates, a sample a candidate; None where there are none.
        weighted_candidates: their lists of ids that have weights; None where there are none.
        candidate_offsets: int64 `[R + 1]`: the candidates of request r are those from `candidate_offsets[r]` to below
            `candidate_offsets[r + 1]`.
        rows: int64 `[S]`, the number of each candidate's row in the dataset; with drawn negatives that of the request's own row.
        labels: float32 `[S, T]`, 0 where one is missing; of a table without labels `[S, 0]`, which `label` says in words. With
            drawn negatives `[S, 1]`: 1 for the row's own item, 0 for others.
        label_mask: bool, as the labels: where a label is there.
        weights: float32 `[S]`, ones without a column of that kind.
        request_index: int64 `[R]`, a number for each request: that of its first row in the dataset.
        user_index: int64 `[R]`, the code of the request's user in the dataset, -1 where it is missing.
        request_times: int64 `[R]`, of the first row; None without times.
        request_numbers, candidate_numbers: float32 `[R, N]` and `[S, M]`, the columns of kind number in the schema's order, the
            training mean where one is missing.
        request_numbers_missing, candidate_numbers_missing: bool, as these.
        request_number_lists, candidate_number_lists: the lists of numbers by name, a sample a request or candidate: the training
            mean where one is missing, with weights 1, and 0 where one is missing; None where there are none.
        history_times: int64 `[H]`, of the events in the histories; None, as all that follows, without histories.
        history_weights: float32 `[H]`, how much the events count; None where nothing says so.
        history_numbers, history_numbers_missing: `[H, C]`, as of the requests: the columns of kind number that events have.
        history_labels, history_label_mask: `[H, E]`: of the labels that events show.
        history_lists: the lists of ids that events show, by name, a sample an event: so their lengths are `[H]` a column, and
            what pools them gives `[H, D]`; None where events show none.
        sampled: whether there are drawn negatives. Figures of such batches depend on the draws, and say so.
    """

    features: KeyedJaggedTensor
    weighted_features: KeyedJaggedTensor | None
    candidates: KeyedJaggedTensor | None
    weighted_candidates: KeyedJaggedTensor | None
    candidate_offsets: Tensor
    rows: Tensor
    labels: Tensor
    label_mask: Tensor
    weights: Tensor
    request_index: Tensor
    user_index: Tensor
    request_times: Tensor | None
    request_numbers: Tensor
    request_numbers_missing: Tensor
    request_number_lists: KeyedJaggedTensor | None
    candidate_numbers: Tensor
    candidate_numbers_missing: Tensor
    candidate_number_lists: KeyedJaggedTensor | None
    candidate_list_offsets: Tensor | None = None
    history_times: Tensor | None = None
    history_weights: Tensor | None = None
    history_numbers: Tensor | None = None
    history_numbers_missing: Tensor | None = None
    history_labels: Tensor | None = None
    history_label_mask: Tensor | None = None
    history_lists: KeyedJaggedTensor | None = None
    sampled: bool = False

    # The memory of which all tensors are views, and the keys of the KeyedJaggedTensors; None where a field was set.
    _together: ClassVar[tuple[Packed, Mapping[str, list[str]]] | None]

    def __len__(self) -> int:
        return self.request_index.numel()

    def __setattr__(self, name: str, value: Any) -> None:
        # What stands together in memory is not the whole batch any more.
        self.__dict__["_together"] = None
        self.__dict__[name] = value

    def __getstate__(self) -> dict[str, Any]:
        whole = self
        if self._together is not None:
            # torch saves no memory that has several types.
            packed, keys = self._together
            own = {name: value.clone() for name, value in packed.tensors().items()}
            whole = Batch._made(own, packed.counts, keys, sampled=self.sampled)
        return {name: value for name, value in whole.__dict__.items() if name != "_together"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # What came from another process is one for TorchRec's pipelines, too.
        self.__dict__.update({**state, "_together": None})
        _make_known()

    @classmethod
    def of(cls, packed: Packed, keys: Mapping[str, list[str]], *, sampled: bool) -> Batch:
        """The batch of what `Part.collect` gave, in one piece of memory, of which all tensors are views.

        Args:
            packed: the tensors.
            keys: of each KeyedJaggedTensor.
            sampled: whether there are drawn negatives.
        """
        batch = cls._made(packed.tensors(), packed.counts, keys, sampled=sampled)
        batch.__dict__["_together"] = packed, keys
        return batch

    @classmethod
    def _made(
        cls, collected: Mapping[str, Tensor], counts: Mapping[str, list[int]], keys: Mapping[str, list[str]], *, sampled: bool
    ) -> Batch:
        requests, candidates = collected["request_index"].numel(), collected["rows"].numel()
        strides = {"features": requests, "weighted_features": requests, "request_number_lists": requests}
        strides |= {"candidates": candidates, "weighted_candidates": candidates, "candidate_number_lists": candidates}
        if "history_times" in collected:
            strides["history_lists"] = collected["history_times"].numel()
        keyed = {name: _keyed_tensor(of, collected, name, strides[name], counts[name]) for name, of in keys.items()}
        plain = {one.name: collected.get(one.name) for one in fields(cls) if one.name not in (*keyed, "sampled")}
        return cls(**{**plain, **keyed}, sampled=sampled)  # type: ignore[arg-type]

    @property
    def candidate_requests(self) -> Tensor:
        """The place in the batch of each candidate's request, int64 `[S]`: what is the request's is read by it."""
        places = torch.arange(self.candidate_offsets.numel() - 1, device=self.candidate_offsets.device)
        return torch.repeat_interleave(places, self.candidate_offsets.diff(), output_size=self.rows.numel())

    @property
    def pairs(self) -> dict[str, int] | None:
        """Of each key of `features`, how many pairs of a candidate and an id of its request there are.

        The numbers stay on the host, for who makes such pairs would have to wait for the device. None: nobody knows, as of a
        batch of which a field was set.
        """
        if self._together is None:
            return None
        packed, keys = self._together
        return dict(zip(keys["features"], packed.counts["pairs"], strict=True))

    @property
    def candidate_pairs(self) -> int | None:
        """How many pairs of two candidates of one request there are, each with itself, too; None as of `pairs`."""
        return None if self._together is None else self._together[0].counts["candidate_pairs"][0]

    def candidate_ids(self, name: str) -> Tensor:
        """The ids of a column that has one for each candidate, int64 `[S]`, whether it stands in `features` or in `candidates`.

        Raises:
            KeyError: no such column.
        """
        for where in (self.candidates, self.features):
            if where is not None and name in where.keys():  # noqa: SIM118 - it is no mapping
                return where[name].values()
        raise KeyError(name)

    def label(self, place: int = 0) -> tuple[Tensor, Tensor]:
        """A label of the batch and where it is there, float32 and bool `[S]`.

        Raises:
            DataError: the batch does not have it; the message says how it gets one.
        """
        if not 0 <= place < (count := self.labels.shape[1]):
            found = f"{count} label columns" if count else "a table without labels, and no negatives"
            cure = 'name one when the table is read (label="click"), or give the loader negatives=n'
            raise refuse("batch", found, f"the label {place}", "count labels from 0" if count else cure)
        return self.labels[:, place], self.label_mask[:, place]

    def _mapped(self, change: Callable[[Any], Any]) -> Batch:
        if self._together is not None:
            packed, keys = self._together
            return Batch.of(packed.mapped(change), keys, sampled=self.sampled)
        found: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(self)}
        changed: dict[str, Any] = {
            name: value if value is None or isinstance(value, bool) else change(value) for name, value in found.items()
        }
        for value in changed.values():
            # TorchRec keeps what was asked for by key, on the device where that was.
            if getattr(value, "_jt_dict", None) is not None:
                value._jt_dict = None
        return Batch(**changed)

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """The batch on another device."""
        batch = self._mapped(lambda value: value.to(device, non_blocking=non_blocking))
        copied_to(torch.device(device))
        return batch

    def pin_memory(self) -> Batch:
        """The batch in page-locked memory."""
        return self._mapped(lambda value: value.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory until work queued on `stream` is done."""
        if self._together is not None:
            self._together[0].memory.record_stream(stream)
        for one in fields(self):
            value = getattr(self, one.name)
            # Of what lies together KeyedJaggedTensors have more: lengths that are all 1, and what was worked out since.
            if value is not None and not isinstance(value, bool) and (self._together is None or not isinstance(value, Tensor)):
                value.record_stream(stream)


class Layout(NamedTuple):
    """Which columns stand in which tensor of a batch.

    Attributes:
        features: of the rows; the candidates' among them have an id a candidate, or are `candidate_lists`.
        candidate_lists: lists of the candidates whose table is read in `features` by others, too.
        history: of the events.
    """

    features: list[Column]
    candidate_lists: list[Column]
    weighted_features: list[Column]
    candidates: list[Column]
    weighted_candidates: list[Column]
    request_numbers: list[Column]
    candidate_numbers: list[Column]
    request_number_lists: list[Column]
    candidate_number_lists: list[Column]
    history: list[Column]
    history_lists: list[Column]

    @classmethod
    def of(cls, schema: Schema, log: EventLog | None) -> Layout:
        """That of the rows of a schema."""
        ids, history = schema.of_kind(*WITH_IDS), [] if log is None else log.ids
        requests = [column for column in ids if not column.is_candidates]
        read = {column.table_name for column in (*requests, *history) if column.weights is None}
        shared = [one for one in ids if one.is_candidates and one.weights is None and one.table_name in read]
        others = [one for one in ids if one.is_candidates and one not in shared]
        numbers, lists = schema.of_kind(Kind.NUMBER), schema.features(Kind.NUMBERS)
        return cls(
            features=[one for one in ids if one in shared or (one in requests and one.weights is None)],
            candidate_lists=[one for one in shared if one.kind is Kind.IDS],
            weighted_features=[one for one in requests if one.weights is not None],
            candidates=[one for one in others if one.weights is None],
            weighted_candidates=[one for one in others if one.weights is not None],
            request_numbers=[one for one in numbers if not one.is_candidates],
            candidate_numbers=[one for one in numbers if one.is_candidates],
            request_number_lists=[one for one in lists if not one.is_candidates],
            candidate_number_lists=[one for one in lists if one.is_candidates],
            history=history,
            history_lists=[] if log is None else log.lists,
        )

    @property
    def list_histories(self) -> list[Column]:
        """Lists of the request that share a table with an id of its candidates: histories, the latest id last."""
        tables = {one.table_name for one in self.features if one.is_candidates and one.kind is not Kind.IDS}
        lists = [one for one in self.features if one.kind is Kind.IDS and not one.is_candidates]
        return [one for one in lists if one.table_name in tables]


class _Chosen(NamedTuple):
    """The rows of a batch.

    Attributes:
        first: int64 `[R]`, the row that says what is the request's.
        counts: int64 `[R]`, candidates of each request.
        own: int64 `[S]`, the row that a candidate is of.
        values: int64 `[S]`, the row that has the candidate's values.
        items: int32 `[S]`, the candidates' codes; None: as in these rows.
        unseen: which rare ids are given as unseen ones; None: none is.
    """

    first: IntArray
    counts: IntArray
    own: IntArray
    values: IntArray
    items: npt.NDArray[np.int32] | None = None
    unseen: Unseen | None = None


@dataclass(frozen=True, eq=False)
class Part:
    """Rows of a dataset as requests, as a model gets them. Nothing is copied but the rows' numbers.

    A sample is a request: `len` counts them, and loaders take their places.

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
        return len(self.requests[0]) - 1

    def __repr__(self) -> str:
        requests = "" if len(self) == len(self.rows) else f"{len(self):,} requests, "
        return f"Part({requests}{len(self.rows):,} of {len(self.dataset):,} rows)"

    @cached_property
    def requests(self) -> tuple[IntArray, IntArray]:
        """Offsets int64 `[R + 1]`, and the rows of the requests one after the other, int64 `[n]`; by their first rows."""
        codes, users = self.dataset.one(Kind.REQUEST), self.dataset.one(Kind.USER)
        if codes is None or not len(self.rows):
            return np.arange(len(self.rows) + 1), self.rows
        of_row = codes[self.rows].astype(np.int64)
        alone = of_row < 0
        if users is not None:
            own = users[self.rows].astype(np.int64) + 1
            of_row = of_row * (own.max() + 1) + own
        of_row[alone] = np.arange(alone.sum()) + of_row.max(initial=-1) + 1
        _, first, place = np.unique(of_row, return_index=True, return_inverse=True)
        rank = np.empty(len(first), np.int64)
        rank[np.argsort(first)] = np.arange(len(first))
        place = rank[place]
        offsets = np.append(0, np.cumsum(np.bincount(place)))
        return offsets, self.rows[np.argsort(place, kind="stable")]

    @cached_property
    def layout(self) -> Layout:
        """Which columns stand in which tensor of a batch."""
        return Layout.of(self.dataset.schema, self.dataset.events)

    @cached_property
    def label_names(self) -> list[str]:
        """The columns of `Batch.labels`."""
        return [column.name for column in self.dataset.schema.of_kind(Kind.LABEL)]

    def gather(
        self,
        places: Any,
        *,
        max_history: int | None = None,
        negatives: int | None = None,
        by: str = UNIFORM,
        seed: int = 0,
        epoch: int = 0,
    ) -> Batch:
        """The batch of some requests.

        Args:
            places: `[R]` integers, places of requests in this part from 0 on, in any order; with negatives of rows.
            max_history: most events of each history of a request, the latest ones: of the one that is gathered, and of each list
                that shares a table with an id of the candidates. None: all.
            negatives, by, seed: as of `loader`.
            epoch: from 0, whose negatives training rows have.
        """
        if negatives is None and seed:
            raise ValueError(f"seed: got {seed} without negatives, expected negatives=n beside it")
        drawing = Drawing.of(self.dataset, self.training, negatives, by, seed)
        if type(epoch) is not int or epoch < 0:
            raise ValueError(f"epoch: got {epoch!r}, expected 0 or more")
        return self.batch(self.collect(places, max_history=max_history, drawing=drawing, epoch=epoch), drawing)

    def loader(
        self,
        *,
        batch_size: int | None = None,
        max_tokens: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
        max_history: int | None = None,
        negatives: int | None = None,
        by: str = UNIFORM,
        unseen: float = 0.0,
        num_workers: int = 0,
        pin_memory: bool = False,
        rank: int = 0,
        world_size: int = 1,
        balance: Balance = "lengths",
        multiprocessing_context: str | None = None,
        progress: bool = True,
    ) -> RequestLoader:
        """Batches of the part, by a number of requests or by a budget; workers gather them, each with the mapped files.

        With `negatives=n` each row, an event without a label, becomes a request with several candidates: its own item with the
        label 1, and up to n others, no two alike, with the label 0. These are items that a training row has at an earlier time,
        strictly, and that the row's user has not had in any part until the row's time, that time included. Where fewer than n
        are left the request has fewer, and where the row's own item is missing it has none and its label is masked. Draws depend
        on the seed and the row; those of training rows also on the epoch. Nothing else changes them: not batches, workers,
        processes or a resumed run.

        A candidate has the values that `candidate_columns` have in its item's latest training row before the time, the row's own
        item as well, so that a value does not tell them apart; only where there is no such row yet it has the row's own value.

        Args:
            batch_size: requests of a batch and rank; the last batches of an epoch may be smaller. Give this or `max_tokens`.
                With `shuffle` and several ranks it is their mean: a step's requests go to the ranks by their work.
            max_tokens: most events of histories and candidates together for a batch and rank; requests are packed in order up
                to it. As many as the largest request has, or more. A request with negatives counts as if it had all n. Histories
                are those of which `max_history` speaks.
            shuffle: a new order each epoch, and in each batch the requests with the most events first, then those with the most
                candidates; otherwise the order of the part.
            seed: of the order and of draws, 0 to 2**64 - 1.
            max_history: as of `gather`.
            negatives: how many are drawn for each row. None: none, rows have the table's labels.
            by: "uniform": each item that is left is as likely as another; "popularity": as likely as training had it often, by
                the exact count before the row's time. One after the other, without replacement.
            unseen: the share of the places with a rare id, one that training has once, that get the unseen id in its place, so
                that the row of ids that nobody has seen is trained; drawn anew each epoch, by seed, column and place alone. 0:
                none do, as in a held-out part.
            num_workers: processes that build batches; 0 builds them in this one.
            pin_memory: hand batches out in page-locked memory (where there is a CUDA device). With workers it is used again when
                the last tensor of a batch is gone, and `Batch.to` and copies on the current stream are done. Who copies single
                tensors with `non_blocking` on another stream keeps the batch until that is done.
            rank, world_size: this process's share.
            balance: what the work of a request is: its events and candidates, `"lengths"`, or their square, `"squares"`, as
                attention over long histories takes them.
            multiprocessing_context: how workers start ("fork", "spawn", "forkserver"); None for Python's default.
            progress: show a bar on a terminal where making ready to draw negatives takes longer than two seconds.

        Raises:
            DataError: negatives of a table that has labels, or lacks user, candidate or time; of a part without a training part
                (`Dataset.split` has one); or with a column of which the schema does not say whether it is the candidate's or the
                request's.
            ValueError: an argument out of range.
        """
        from jagged.data.table_loader import RequestLoader

        drawing = Drawing.of(self.dataset, self.training, negatives, by, seed)
        if drawing is not None and self.training is not None:
            self.training.prepare(drawing, progress=progress)
        return RequestLoader(
            self, drawing, batch_size=batch_size, max_tokens=max_tokens, max_history=max_history, shuffle=shuffle, seed=seed,
            unseen=unseen, num_workers=num_workers, pin_memory=pin_memory, rank=rank, world_size=world_size,
            balance=balance, multiprocessing_context=multiprocessing_context,
        )  # fmt: skip

    def sizes(self, max_history: int | None, drawing: Drawing | None = None) -> tuple[IntArray, IntArray]:
        """How many events and candidates each request has, int64 `[R]` each, with `drawing` each row."""
        if drawing is None:
            offsets, rows = self.requests
            first, candidates = rows[offsets[:-1]], np.diff(offsets)
        else:
            first, candidates = self.rows, np.full(len(self.rows), 1 + drawing.count)
        start, stop = self._views(first, max_history)
        events = stop - start
        for column in self.layout.list_histories:
            offsets, _ = self.dataset.list_column(column.name)
            lengths = offsets[first + 1] - offsets[first]
            events += lengths if max_history is None else np.minimum(lengths, max_history)
        return events, candidates

    def collect(
        self,
        places: Any,
        *,
        max_history: int | None = None,
        drawing: Drawing | None = None,
        epoch: int = 0,
        unseen: Unseen | None = None,
        allocate: Any = None,
    ) -> Packed:
        """The tensors of which `batch` makes a batch: what a loader's worker does, without torchrec.

        `unseen` says which rare ids are given as unseen ones, None: none is; `allocate` is as of `Packed.of`.
        """
        dataset, layout = self.dataset, self.layout
        places = np.asarray(places, dtype=np.int64)
        rows = self._chosen(places) if drawing is None else self._drawn(self.rows[places], drawing, epoch)
        rows = rows._replace(unseen=unseen)
        found: dict[str, AnyArray] = {
            "candidate_offsets": np.append(0, np.cumsum(rows.counts)),
            "rows": rows.own,
            "request_index": rows.first,
        }
        if drawing is None:
            found["labels"], found["label_mask"] = self._labels(dataset, self.label_names, rows.own)
        else:
            assert rows.items is not None
            found["labels"] = np.zeros((len(rows.own), 1), np.float32)
            found["labels"][found["candidate_offsets"][:-1]] = 1
            found["label_mask"] = rows.items[:, None] >= 0
        users, weights, times = (dataset.one(kind) for kind in (Kind.USER, Kind.WEIGHT, Kind.TIME))
        found["user_index"] = np.full(len(rows.first), -1) if users is None else users[rows.first].astype(np.int64)
        found["weights"] = np.ones(len(rows.own), np.float32) if weights is None else weights[rows.own]
        if times is not None:
            found["request_times"] = times[rows.first]
        for side, of in (("request", rows.first), ("candidate", rows.values)):
            numbers = self._numbers(dataset, getattr(layout, f"{side}_numbers"), of)
            found[f"{side}_numbers"], found[f"{side}_numbers_missing"] = numbers
            self._keyed(found, f"{side}_number_lists", rows)
        for name in ("weighted_features", "candidates", "weighted_candidates"):
            self._keyed(found, name, rows)
        start, stop = self._views(rows.first, max_history)
        self._keyed(found, "features", rows, start, stop, max_history)
        lengths = found["features.lengths"].reshape(len(self._keys("features")), len(rows.counts))
        found[f"pairs{COUNTS}"] = lengths @ rows.counts
        found[f"candidate_pairs{COUNTS}"] = np.array([rows.counts @ rows.counts])
        if (log := dataset.events) is not None:
            self._history(found, log, log.rows(spread(start, stop - start)), unseen)
        return Packed.of({name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in found.items()}, allocate)

    def batch(self, packed: Packed, drawing: Drawing | None = None) -> Batch:
        """The batch of what `collect` gave."""
        keys = {name: self._keys(name) for name in _KEYED if f"{name}.values" in packed.places}
        return Batch.of(packed, keys, sampled=drawing is not None)

    def _keys(self, name: str) -> list[str]:
        keys = [column.name for column in getattr(self.layout, name)]
        return keys + [f"{HISTORY}{column.name}" for column in self.layout.history] if name == "features" else keys

    def _chosen(self, places: IntArray) -> _Chosen:
        """The rows of some requests."""
        offsets, rows = self.requests
        start, counts = offsets[places], offsets[places + 1] - offsets[places]
        own = rows[spread(start, counts)]
        return _Chosen(rows[start], counts, own, own)

    def _drawn(self, chosen: IntArray, drawing: Drawing, epoch: int) -> _Chosen:
        """Each row's own item and its negatives, and the rows whose values the candidates have."""
        item, time = self.dataset.one(Kind.CANDIDATE), self.dataset.one(Kind.TIME)
        # `Drawing.of` has seen to it.
        assert self.training is not None
        assert item is not None
        assert time is not None
        lengths, drawn = self.training.draw(chosen, drawing, epoch)
        own = np.repeat(chosen, lengths + 1)
        is_own = np.zeros(len(own), np.bool_)
        is_own[np.cumsum(lengths + 1) - lengths - 1] = True
        items = np.empty(len(own), np.int32)
        items[is_own], items[~is_own] = item[chosen], drawn
        values = own
        if drawing.item_columns:
            latest = self.training.latest(items, time[own])
            values = np.where(latest < 0, own, latest)
        return _Chosen(chosen, lengths + 1, own, values, items)

    def _views(self, rows: IntArray, max_history: int | None) -> tuple[IntArray, IntArray]:
        """The ranges of the log that rows know; without histories empty."""
        if max_history is not None and max_history < 0:
            raise ValueError(f"max_history: got {max_history}, expected 0 or more")
        if self.dataset.events is None:
            return np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
        start, stop = self.dataset.start[rows], self.dataset.stop[rows]
        return start if max_history is None else np.maximum(start, stop - max_history), stop

    def _history(self, found: dict[str, AnyArray], log: EventLog, rows: IntArray, unseen: Unseen | None) -> None:
        """What events show beside their ids."""
        table = log.table
        found["history_times"] = table.column(log.time)[rows]
        if log.weights is not None:
            found["history_weights"] = table.column(log.weights)[rows]
        found["history_numbers"], found["history_numbers_missing"] = self._numbers(table, log.numbers, rows)
        found["history_labels"], found["history_label_mask"] = self._labels(table, list(log.labels), rows)
        if log.lists:
            _put(found, "history_lists", [self._values(column, table, rows, unseen=unseen) for column in log.lists])

    def _keyed(
        self,
        found: dict[str, AnyArray],
        name: str,
        rows: _Chosen,
        start: IntArray | None = None,
        stop: IntArray | None = None,
        max_history: int | None = None,
    ) -> None:
        """Values, lengths and weights of a tensor of the layout, key by key; nothing where it has no columns."""
        keys: list[_Key] = []
        offsets: list[IntArray] = []
        histories = self.layout.list_histories
        for column in getattr(self.layout, name):
            most = max_history if column in histories else None
            of = rows.values if column.is_candidates else rows.first
            key = self._values(column, self.dataset, of, rows.items, most, rows.unseen)
            if name == "features" and column.is_candidates:
                # Those of all candidates beside what is the request's.
                ends = np.append(0, np.cumsum(key.lengths))
                key = key._replace(lengths=np.diff(ends[np.append(0, np.cumsum(rows.counts))]))
                if column.kind is Kind.IDS:
                    offsets.append(ends)
            keys.append(key)
        if start is not None and stop is not None and (log := self.dataset.events) is not None:
            events = log.rows(spread(start, stop - start))
            of_events = (self._values(column, log.table, events, unseen=rows.unseen) for column in log.ids)
            keys += [key._replace(lengths=stop - start) for key in of_events]
        if keys or name == "features":
            _put(found, name, keys)
        if offsets:
            found["candidate_list_offsets"] = np.stack(offsets, 1)

    def _values(
        self,
        column: Column,
        table: Columns,
        rows: IntArray,
        items: npt.NDArray[np.int32] | None = None,
        most: int | None = None,
        unseen: Unseen | None = None,
    ) -> _Key:
        """A column of some rows: ids as numbers, or lists of numbers.

        `items` are codes of candidates in place of the rows', `most` is how many of a list's last values there are at most, and
        `unseen` says which rare ids are given as unseen ones.
        """

        def encoded(codes: AnyArray, places: IntArray) -> AnyArray:
            numbers = self.maps[column.table_name][codes + 1]
            return numbers if unseen is None else unseen.replaced(numbers, self.encoders[column.table_name], column.name, places)

        if column.kind not in LISTS:
            drawn = items is not None and column.kind is Kind.CANDIDATE
            codes = items if items is not None and drawn else table.column(column.name)[rows]
            places = rows + (codes.astype(np.int64) << 36) if drawn else rows
            return _Key(encoded(codes, places), np.ones(len(rows), np.int64), None)
        offsets, stored = table.list_column(column.name)
        start, stop = offsets[rows], offsets[rows + 1]
        start = start if most is None else np.maximum(start, stop - most)
        lengths = stop - start
        places = spread(start, lengths)
        if column.kind is Kind.NUMBERS:
            missing = np.isnan(stored[places])
            mean = np.float32(self.encoders.statistics[column.name].mean)
            return _Key(np.where(missing, mean, stored[places]), lengths, (~missing).astype(np.float32))
        weights = None
        if column.weights is not None:
            weights = table.list_column(column.weights)[1][places]
            # Only a missing list's one id has no weight.
            weights = np.where(np.isnan(weights), np.float32(1), weights)
        return _Key(encoded(stored[places], places), lengths, weights)

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


class _Key(NamedTuple):
    """A key of a KeyedJaggedTensor."""

    values: AnyArray
    lengths: IntArray
    weights: FloatArray | None


def _put(found: dict[str, AnyArray], name: str, keys: list[_Key]) -> None:
    """Write the keys of a tensor down, one after the other."""
    dtype = np.float32 if name.endswith("number_lists") else np.int64
    found[f"{name}.values"] = np.concatenate([np.zeros(0, dtype), *(key.values for key in keys)], dtype=dtype)
    found[f"{name}.lengths"] = np.concatenate([np.zeros(0, np.int64), *(key.lengths for key in keys)])
    found[f"{name}.counts"] = np.array([len(key.values) for key in keys], np.int64)
    if any(key.weights is not None for key in keys):
        weights = [np.ones(len(key.values), np.float32) if key.weights is None else key.weights for key in keys]
        found[f"{name}.weights"] = np.concatenate(weights)


def _keyed_tensor(
    keys: list[str], collected: Mapping[str, Tensor], name: str, stride: int, counts: list[int]
) -> KeyedJaggedTensor:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    _make_known()
    return KeyedJaggedTensor(
        keys=keys,
        values=collected[f"{name}.values"],
        weights=collected.get(f"{name}.weights"),
        lengths=collected[f"{name}.lengths"],
        stride=stride,
        # Without these, who asks for a key waits until the device has come to the lengths.
        length_per_key=counts,
    )


def _make_known() -> None:
    """Tell TorchRec's pipelines that a batch is `Pipelineable`; who gathers in a worker has no need of torchrec."""
    from torchrec.streamable import Pipelineable

    Pipelineable.register(Batch)
