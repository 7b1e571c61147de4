"""What a ranking model reads of a batch: its columns and tables, numbers, and histories."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from jagged.data import Kind
from jagged.modules import (
    JaggedCrossAttention,
    JaggedModule,
    JaggedPooling,
    JaggedTransformerBlock,
    LayerNorm,
    PositionalEncoding,
    TimeEncoding,
    with_values,
)
from jagged.modules.linear import apply_layer
from jagged.modules.recompute import computed_again

if TYPE_CHECKING:
    from jagged.data.encoding import Statistics
    from jagged.data.table_batches import Part

#: The task of batches with drawn negatives.
NEXT = "next"
# Between borders of buckets of numbers: ten buckets have so many.
_INTERVALS = 8
# Tensors of a batch whose ids a collection of their own pools, and whether the ids have weights.
POOLED = {"weighted_features": True, "candidates": False, "weighted_candidates": True, "history_lists": False}


@dataclass(frozen=True)
class RankingInputs:
    """What a model reads of a `jagged.data.table_batches.Batch`.

    Attributes:
        features: keys of the request's ids and lists in `batch.features`, each with its table.
        lists: which of these are lists.
        list_histories: keys there of lists that are histories, the latest id last.
        candidate_ids: keys there with an id for each candidate.
        candidate_lists: keys there of the candidates' lists, whose table others read there, too.
        history: keys there with an id for each event of the history that is gathered.
        weighted_features, candidates, weighted_candidates, history_lists: keys of these tensors, each with its table.
        request_numbers, candidate_numbers, history_numbers, request_number_lists, candidate_number_lists: the columns of these,
            all of them and in their order.
        history_labels: how many labels events show.
        history_weights: whether events have weights.
        labels: the columns of `batch.labels`, all of them; `["next"]` where negatives are drawn.
    """

    features: dict[str, str] = field(default_factory=dict)
    lists: Sequence[str] = ()
    list_histories: dict[str, str] = field(default_factory=dict)
    candidate_ids: dict[str, str] = field(default_factory=dict)
    candidate_lists: dict[str, str] = field(default_factory=dict)
    history: dict[str, str] = field(default_factory=dict)
    weighted_features: dict[str, str] = field(default_factory=dict)
    candidates: dict[str, str] = field(default_factory=dict)
    weighted_candidates: dict[str, str] = field(default_factory=dict)
    history_lists: dict[str, str] = field(default_factory=dict)
    request_numbers: Sequence[str] = ()
    candidate_numbers: Sequence[str] = ()
    history_numbers: Sequence[str] = ()
    request_number_lists: Sequence[str] = ()
    candidate_number_lists: Sequence[str] = ()
    history_labels: int = 0
    history_weights: bool = False
    labels: Sequence[str] = (NEXT,)

    @classmethod
    def of(cls, part: Part, histories: Sequence[str] | None = None) -> RankingInputs:
        """Everything that a part's batches have.

        Args:
            part: of a split.
            histories: the lists of ids, of the request and without weights, that are histories, the latest id last; None for
                those that share a table with the candidate's ids, as lists do that `history=` named when the table was read.

        Raises:
            ValueError: `histories` names another column.
        """
        layout, log = part.layout, part.dataset.events
        requests = [column for column in layout.features if not column.is_candidates]
        candidates = {one.name: one.table_name for one in layout.features if one.is_candidates and one.kind is not Kind.IDS}
        lists = [column for column in requests if column.kind is Kind.IDS]
        names = [column.name for column in lists]
        if unknown := [name for name in histories or () if name not in names]:
            raise ValueError(
                f"histories: got {unknown[0]!r}, expected some of the request's lists of ids without weights: "
                f"{', '.join(names) or 'there are none'}"
            )
        if histories is None:
            histories = [column.name for column in layout.list_histories]
        tables = ("candidate_lists", "weighted_features", "candidates", "weighted_candidates", "history_lists")
        numbers = ("request_numbers", "candidate_numbers", "request_number_lists", "candidate_number_lists")
        others: dict[str, Any] = {name: {one.name: one.table_name for one in getattr(layout, name)} for name in tables}
        others |= {name: [column.name for column in getattr(layout, name)] for name in numbers}
        return cls(
            features={column.name: column.table_name for column in requests if column.name not in histories},
            lists=[name for name in names if name not in histories],
            list_histories={column.name: column.table_name for column in lists if column.name in histories},
            candidate_ids=candidates,
            history={f"history.{column.name}": column.table_name for column in layout.history},
            **others,
            # Without an id of events nothing says how many each request has.
            history_numbers=[column.name for column in log.numbers] if log is not None and layout.history else [],
            history_labels=len(log.labels) if log is not None else 0,
            history_weights=log is not None and log.weights is not None,
            labels=part.label_names or [NEXT],
        )

    @property
    def histories(self) -> list[dict[str, str]]:
        """Of each history the keys, with their tables: of the one that is gathered, if there is one, then of each list."""
        gathered = [self.history] if self.history else []
        return gathered + [{key: table} for key, table in self.list_histories.items()]

    @property
    def sequences(self) -> dict[str, list[str]]:
        """Of the tables that are read row by row, the keys: those of candidates and events, and whoever shares their tables."""
        read = {key: table for of in _by_rows(self) for key, table in of.items()}
        named, rows = {**self.features, **read}, set(read.values())
        return by_table({key: table for key, table in named.items() if table in rows})

    @property
    def pooled(self) -> dict[str, list[str]]:
        """The other tables of `features`, with their keys."""
        return by_table({key: table for key, table in self.features.items() if table not in self.sequences})

    @property
    def fields(self) -> list[str]:
        """The batch's fields that scores are made of: all that are read but labels and what only training asks."""
        candidates = ["candidates", "weighted_candidates", "candidate_numbers", "candidate_number_lists"]
        read = ["weighted_features", "request_numbers", "request_number_lists", *candidates]
        if self.history:
            read += ["history_lists", "history_numbers"]
        found = ["candidate_offsets", *(name for name in read if getattr(self, name))]
        found += ["candidate_list_offsets"] if self.candidate_lists else []
        found += [f"{name}_missing" for name in found if name.endswith("_numbers")]
        if self.features or self.sequences:
            found.append("features")
        if self.history:
            found += ["request_times", "history_times"]
            found += ["history_labels", "history_label_mask"] if self.history_labels else []
            found += ["history_weights"] if self.history_weights else []
        if not self.candidate_ids and not self.candidate_lists and not any(getattr(self, name) for name in candidates):
            # Nothing else says how many candidates there are.
            found.append("rows")
        return found

    def keys(self, name: str) -> list[str]:
        """The keys that are read of a KeyedJaggedTensor of the batch, in this order."""
        if name != "features":
            return list(getattr(self, name))
        return [*self.features, *(key for keys in _by_rows(self) for key in keys)]


def by_table(tables: Mapping[str, str]) -> dict[str, list[str]]:
    """By table the keys that read it."""
    return {table: [key for key, of in tables.items() if of == table] for table in dict.fromkeys(tables.values())}


def _by_rows(inputs: RankingInputs) -> list[dict[str, str]]:
    """Keys of `features` that are never pooled before they are encoded, with their tables."""
    return [inputs.candidate_ids, inputs.candidate_lists, *inputs.histories]


def tables_of(inputs: RankingInputs) -> list[str]:
    """The tables that are read."""
    groups = [inputs.features, *_by_rows(inputs), *(getattr(inputs, name) for name in POOLED)]
    return list(dict.fromkeys(table for group in groups for table in group.values()))


def check_tables(inputs: RankingInputs) -> None:
    """Refuse a table that keys of two collections share, and inputs without any."""
    groups = {"features": {key: table for of in (inputs.features, *_by_rows(inputs)) for key, table in of.items()}}
    groups |= {name: getattr(inputs, name) for name in POOLED}
    for table in tables_of(inputs):
        readers = {name: keys for name, of in groups.items() if (keys := by_table(of).get(table))}
        if len(readers) > 1:
            found = " and ".join(f"{name} ({', '.join(keys)})" for name, keys in readers.items())
            cure = "leave the column out of event_lists" if "history_lists" in readers else "give a column another in the schema"
            raise ValueError(f"table {table!r}: read by {found}, expected one of them, as a table is in one collection; {cure}")
    numbers = (inputs.request_numbers, inputs.candidate_numbers, inputs.request_number_lists, inputs.candidate_number_lists)
    if not any(groups.values()) and not any(numbers):
        raise ValueError("inputs: got no column of ids or numbers, expected something to learn from")


def check_histories(inputs: RankingInputs, model: str) -> None:
    """Refuse inputs of a model whose candidates read histories where there is none, or where candidates have no columns.

    Args:
        inputs: of the model.
        model: its registered name.

    Raises:
        ValueError: no history, or no column of the candidates.
    """
    if not inputs.histories:
        raise ValueError(
            f"inputs: got no history, expected one that candidates of {model} read; give the table user, candidate and time with "
            'history="events", or a list of the candidate\'s ids, or take another model'
        )
    names = (
        "candidate_ids",
        "candidate_lists",
        "candidates",
        "weighted_candidates",
        "candidate_numbers",
        "candidate_number_lists",
    )
    if not any(getattr(inputs, name) for name in names):
        raise ValueError(
            f"inputs: got no column of the candidates, expected one by which candidates of {model} read their history; say which "
            "columns are theirs by candidate= or candidate_columns= when the table is read, or take another model"
        )


def module_names(tables: Iterable[str]) -> dict[str, str]:
    """A name for each table that torch takes for a module: without dots, and none of `nn.ModuleDict`'s attributes."""
    names: dict[str, str] = {}
    for table in tables:
        name = table.replace(".", "_")
        while hasattr(nn.ModuleDict, name) or name in ("training", *names.values()):
            name += "_"
        names[table] = name
    return names


def collections_of(inputs: RankingInputs, widths: Mapping[str, int]) -> dict[str, int]:
    """Of each key that is read row by row, the place of its collection: one for each width."""
    places: dict[int, int] = {}
    return {key: places.setdefault(widths[table], len(places)) for table, keys in inputs.sequences.items() for key in keys}


class Numbers(nn.Module):
    """Numbers by their training mean and deviation, by their training rank, and whether they are missing.

    The rank is linear between training's borders of buckets and runs from -0.5 to 0.5, times the root of 12: so it has the
    deviation 1, however skewed the numbers are.
    """

    mean: Tensor
    deviation: Tensor
    low: Tensor
    high: Tensor
    intervals: Tensor

    def __init__(self, names: Sequence[str], device: torch.device | str | None) -> None:
        super().__init__()
        self.names = list(names)
        self.register_buffer("mean", torch.zeros(len(names), device=device))
        self.register_buffer("deviation", torch.ones(len(names), device=device))
        # The intervals between two borders, and how many there are.
        self.register_buffer("low", torch.zeros(len(names), _INTERVALS, device=device))
        self.register_buffer("high", torch.zeros(len(names), _INTERVALS, device=device))
        self.register_buffer("intervals", torch.zeros(len(names), device=device))

    def normalise(self, statistics: Mapping[str, Statistics]) -> None:
        """Take over training's figures; a number that is always the same is divided by 1."""
        for place, name in enumerate(self.names):
            of = statistics[name]
            self.mean[place] = of.mean
            # Of what is always the same the deviation may be what rounding leaves.
            self.deviation[place] = of.deviation if of.deviation > 1e-6 * abs(of.mean) else 1.0
            borders = interval_borders(of.borders)
            count = len(borders) - 1
            if count > 0:
                self.low[place, :count], self.high[place, :count], self.intervals[place] = borders[:-1], borders[1:], count

    def forward(self, values: Tensor, missing: Tensor) -> Tensor:
        """`[N, C]` floats and bools -> `[N, 3 C]`; what is missing is the mean, and in the middle: 0."""
        normal = (values - self.mean) / self.deviation
        exists = torch.arange(_INTERVALS, device=self.low.device) < self.intervals[:, None]
        # In few bits two borders may be one.
        wide = (self.high - self.low).clamp(min=torch.finfo(self.low.dtype).tiny)
        passed = ((values[:, :, None] - self.low) / wide).clamp(0, 1).where(exists, 0).sum(2)
        rank = 12**0.5 * (passed / self.intervals.clamp(min=1) - 0.5 * (self.intervals > 0))
        hidden = [of.masked_fill(missing, 0.0) for of in (normal, rank)]
        return torch.cat([*hidden, missing.to(normal.dtype)], 1)


def interval_borders(borders: Sequence[float]) -> Tensor:
    """The borders between which ranks are linear, float32: training's, or some of these, evenly chosen, where there are more."""
    given = torch.tensor(borders, dtype=torch.float32)
    if len(given) <= _INTERVALS + 1:
        return given
    return given[torch.linspace(0, len(given) - 1, _INTERVALS + 1).round().long()]


class NumberLists(Numbers):
    """The same of lists of numbers: their mean, and whether there is no number."""

    def __init__(self, names: Sequence[str], device: torch.device | str | None) -> None:
        super().__init__(names, device)
        self.pooling = JaggedPooling(2, "sum")

    def forward(self, lists: KeyedJaggedTensor) -> Tensor:  # type: ignore[override]
        """C keys of N samples -> `[N, 3 C]`."""
        values, present = (of.to(self.mean.dtype) for of in (lists.values(), lists.weights()))
        summed = self.pooling(JaggedTensor(torch.stack([values * present, present], 1), offsets=lists.offsets()))
        total, count = summed.view(len(self.names), -1, 2).transpose(0, 1).unbind(2)
        return super().forward(total / count.clamp(min=1), count == 0)


class HistoryEncoder(JaggedModule):
    """What a model makes of one history: a vector of the request, and what each candidate reads of it.

    Args:
        keys: of the ids that events show; the first has as many as there are events.
        in_features: width of all that events show.
        config: of the model.
        has_candidates: whether there are columns of the candidates, and so queries.
        is_gathered: whether it is the history of events, which have times, and not a list of ids.
        device: where parameters live.

    Attributes:
        has_mean: whether there is a vector of the request.
        projection: of what events show, to vectors of width `embedding_dim`.
        recompute: whether `encoded` encodes again in backward.
    """

    has_mean: ClassVar[bool] = True
    # Of encoders that were kept before there was the option.
    recompute: bool = False

    def __init__(
        self,
        keys: Iterable[str],
        in_features: int,
        config: Mapping[str, Any],
        has_candidates: bool,
        is_gathered: bool,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        self.keys, self.is_gathered = list(keys), is_gathered
        self.recompute = bool(config.get("recompute"))
        self.projection = nn.Linear(in_features, config["embedding_dim"], device=device)
        self._build(config, has_candidates, device)

    def _build(self, config: Mapping[str, Any], has_candidates: bool, device: torch.device | str | None) -> None:
        """Make all parts but the projection; the arguments are those of the class."""
        raise NotImplementedError

    def forward(
        self,
        x: JaggedTensor,
        queries: JaggedTensor | None,
        times: tuple[Tensor, Tensor] | None = None,
        weights: Tensor | None = None,
        num_pairs: int | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Encode the events.

        Args:
            x: values `[sum L, in_features]`.
            queries: of the candidates, values `[S, embedding_dim]`; None where there are none.
            times: of the events `[sum L]` and of the requests `[R]`, int64; None where events have none.
            weights: `[sum L]`, how much events count in the mean; None for 1.
            num_pairs: of a candidate and an event of its request, `sum n L` over the requests; None where the host does not know.

        Returns:
            The mean `[R, embedding_dim]`, where there is one, and what each candidate reads, `[S, embedding_dim]` or None.
        """
        raise NotImplementedError

    def encoded(self, x: JaggedTensor, queries: JaggedTensor | None, *others: Any) -> tuple[Tensor | None, Tensor | None]:
        """Call it; with `recompute` nothing but the events and queries stays for backward, which calls it again."""
        if not self.recompute:
            return cast("tuple[Tensor | None, Tensor | None]", self(x, queries, *others))
        # TorchRec's tensors make these when they are first asked for: it is to see the same both times.
        x.offsets()
        if queries is not None:
            queries.offsets()

        def encode(events: Tensor, candidates: Tensor | None) -> Any:
            of_candidates = None if queries is None or candidates is None else with_values(queries, candidates)
            return self(with_values(x, events), of_candidates, *others)

        found = computed_again((self,), encode, x.values(), None if queries is None else queries.values())
        return cast("tuple[Tensor | None, Tensor | None]", found)


class History(HistoryEncoder):
    """Events encoded by transformer blocks: their mean, and what candidates read of them by attention."""

    def _build(self, config: Mapping[str, Any], has_candidates: bool, device: torch.device | str | None) -> None:
        width, heads, buckets = config["embedding_dim"], config["num_heads"], config["num_time_buckets"]
        self.positions = PositionalEncoding(config["max_history"], width, device=device)
        self.times = TimeEncoding(buckets, width, device=device) if self.is_gathered and buckets is not None else None
        self.blocks = nn.ModuleList(
            JaggedTransformerBlock(width, heads, dropout=config["dropout"], recompute=self.recompute, device=device)
            for _ in range(config["num_layers"])
        )
        self.norm = LayerNorm(width, device=device)
        self.mean = JaggedPooling(width, "mean")
        self.attention = JaggedCrossAttention(width, heads, device=device) if has_candidates else None

    def forward(
        self,
        x: JaggedTensor,
        queries: JaggedTensor | None,
        times: tuple[Tensor, Tensor] | None = None,
        weights: Tensor | None = None,
        num_pairs: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the mean and what candidates read."""
        x = self.positions(with_values(x, apply_layer(self.projection, x.values())))
        x = x if self.times is None or times is None else self.times(x, *times)
        for block in self.blocks:
            x = block(x)
        x = with_values(x, self.norm(x.values()))
        read = None if self.attention is None or queries is None else self.attention(queries, x).values()
        return weighted_mean(self.mean, x, weights), read


def weighted_mean(mean: JaggedPooling, x: JaggedTensor, weights: Tensor | None) -> Tensor:
    """The mean of each sample's rows, `[R, width]`, by their weights `[sum L]` where there are some."""
    if weights is None:
        return cast(Tensor, mean(x))
    counts = weights[:, None].to(x.values().dtype)
    summed: Tensor = mean(with_values(x, torch.cat([x.values() * counts, counts], 1)))
    # Rows that all count nothing are as none.
    return summed[:, :-1] / summed[:, -1:].where(summed[:, -1:] > 0, 1)
