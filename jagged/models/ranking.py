"""A ranking model of a table's requests: pooled ids, histories that candidates attend to, crossed features, several tasks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from jagged.data import Kind
from jagged.data.moving import moved
from jagged.evaluation import evaluating
from jagged.models.interactions import CrossNet, DotInteraction
from jagged.models.task import Task, TaskOutput, TaskScores
from jagged.models.tasks import LOSSES, REQUEST_LOSSES, LossName, TaskLoss, loss_of, product_logits
from jagged.modules import (
    JaggedCrossAttention,
    JaggedMLP,
    JaggedModule,
    JaggedPooling,
    JaggedTransformerBlock,
    PositionalEncoding,
    ScheduledEmbeddingBagCollection,
    ScheduledEmbeddingCollection,
    TimeEncoding,
    with_values,
)
from jagged.pointwise import PointwiseMetrics

if TYPE_CHECKING:
    from jagged.data.encoding import Statistics
    from jagged.data.table_batches import Batch, Part
    from jagged.data.table_splits import Split

#: The task of batches with drawn negatives.
NEXT = "next"
# Between borders of buckets of numbers: ten buckets have so many.
_INTERVALS = 8
# Tensors of a batch whose ids a collection of their own pools, and whether the ids have weights.
_POOLED = {"weighted_features": True, "candidates": False, "weighted_candidates": True, "history_lists": False}


@dataclass(frozen=True)
class RankingInputs:
    """What a model reads of a `jagged.data.table_batches.Batch`.

    Attributes:
        features: keys of the request's ids and lists in `batch.features`, each with its table.
        lists: which of these are lists.
        list_histories: keys there of lists that are histories, the latest id last.
        candidate_ids: keys there with an id for each candidate.
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
        candidates = {one.name: one.table_name for one in layout.features if one.is_candidates}
        lists = [column for column in requests if column.kind is Kind.IDS]
        names = [column.name for column in lists]
        if unknown := [name for name in histories or () if name not in names]:
            raise ValueError(
                f"histories: got {unknown[0]!r}, expected some of the request's lists of ids without weights: "
                f"{', '.join(names) or 'there are none'}"
            )
        if histories is None:
            histories = [column.name for column in layout.list_histories]
        tables = ("weighted_features", "candidates", "weighted_candidates", "history_lists")
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
        read = {key: table for of in (self.candidate_ids, *self.histories) for key, table in of.items()}
        named, rows = {**self.features, **read}, set(read.values())
        return _by_table({key: table for key, table in named.items() if table in rows})

    @property
    def pooled(self) -> dict[str, list[str]]:
        """The other tables of `features`, with their keys."""
        return _by_table({key: table for key, table in self.features.items() if table not in self.sequences})

    @property
    def fields(self) -> list[str]:
        """The batch's fields that scores are made of: all that are read but labels and what only training asks."""
        candidates = ["candidates", "weighted_candidates", "candidate_numbers", "candidate_number_lists"]
        read = ["weighted_features", "request_numbers", "request_number_lists", *candidates]
        if self.history:
            read += ["history_lists", "history_numbers"]
        found = ["candidate_offsets", *(name for name in read if getattr(self, name))]
        found += [f"{name}_missing" for name in found if name.endswith("_numbers")]
        if self.features or self.sequences:
            found.append("features")
        if self.history:
            found += ["request_times", "history_times"]
            found += ["history_labels", "history_label_mask"] if self.history_labels else []
            found += ["history_weights"] if self.history_weights else []
        if not self.candidate_ids and not any(getattr(self, name) for name in candidates):
            # Nothing else says how many candidates there are.
            found.append("rows")
        return found

    def keys(self, name: str) -> list[str]:
        """The keys that are read of a KeyedJaggedTensor of the batch, in this order."""
        if name != "features":
            return list(getattr(self, name))
        return [*self.features, *self.candidate_ids, *(key for keys in self.histories for key in keys)]


def _by_table(tables: Mapping[str, str]) -> dict[str, list[str]]:
    return {table: [key for key, of in tables.items() if of == table] for table in dict.fromkeys(tables.values())}


class RankingModel(Task):
    """Scores of the candidates of requests, for one label or several, trained by binary cross entropy or another loss.

    1. Ids are looked up: `features` that are the request's are pooled by means, those of candidates and histories row by row, and
       `candidates`, lists of events and lists with weights (sums) in tables of their own.
    2. Each history, the one that is gathered and each list of `list_histories`, with weights of its own: what is known of an
       event makes a vector (ids, numbers and labels; of a list the id), to which its place from the end and the time since, if
       events have times, are added; transformer blocks; the mean of the events, by their weights where they have some; and, with
       the candidate's features as the query, attention of each candidate to its request's events. Beside them the means of the
       events' ids as they were looked up: they lie in the space of the candidate's ids of the same tables, whose products with
       them tell from the first step on how much of the history is alike.
    3. The request's features meet each candidate's in one linear layer, for which they are projected once a request.
       `cross="dcn"` crosses what comes out (`CrossNet`); `cross="dot"` adds to what goes in the products of all pairs of vectors
       (`DotInteraction`); None does neither.
    4. A tower for each label.

    Tables begin as TorchRec's do, evenly from -1 to 1 over the root of their rows: of many ids, each of which is seen seldom, the
    rows begin small.

    Nothing is padded, and nothing of the request is copied for its candidates before that linear layer. Numbers are normalised
    by training's mean and deviation, and by their rank in training, beside an indicator of missing ones; of a list they are the
    mean.

    The loss is a sum over tasks and rows, each by its weight, divided by the weights of the rows with any of the labels: where
    all rows have all labels, the sum of the tasks' means. A row without a label counts 0 for its task, so that batches
    add up exactly over processes and accumulation.

    With the losses `"listwise"` and `"pairwise"` a task's terms are of requests: the candidates of each compete. Where all tasks
    have such losses, their sum is divided by the weights of the requests that a task counts, the mean over tasks; beside a loss
    over rows a request's term counts as a row's does. The logits of such a task are scores, which order the candidates of one
    request and are no log-odds: `predict` gives them as they are, and figures are those of the order alone.

    Args:
        inputs: what batches have; `RankingModel.of` finds it out.
        sizes: rows of each embedding table, as `split.encoders.sizes` has them.
        embedding_dim: width of tables and of histories.
        table_dims: widths of single tables.
        cross: as above.
        cross_layers, cross_rank: of `CrossNet`.
        num_layers: transformer blocks on each history; 0 for none.
        num_heads: attention heads; divides `embedding_dim`.
        max_history: places from the end that have a vector of their own.
        num_time_buckets: of the time since an event (`TimeEncoding`); None for none.
        layer_sizes: the first is the width of the linear layer where request and candidate meet, the others those of each
            tower's hidden layers.
        dropout: probability, in blocks and towers.
        tasks: labels to learn; None for all.
        conditional: a label that can be 1 only where another one is, with that one: of `{"buy": "click"}` the tower of buy gives
            q, buying after a click, and buy is predicted by `p q`. Its loss, over the rows with both labels, is that of `p q`.
        implied: a row with such a label 1 counts as one with the other 1, too; otherwise it is an error where that is 0.
        loss: `"binary"` (cross entropy), `"focal"`, `"listwise"` or `"pairwise"`, of all tasks, or by task; tasks that a mapping
            leaves out have `"binary"`. `jagged.models.tasks` has them. A conditional label and its condition have probabilities:
            `"binary"` or `"focal"`.
        focal_gamma, focal_alpha: of `FocalLoss`.
        label_means: mean labels in training, by task, for `ne_of_training`; None where they are not known.
        device: where parameters live; `"meta"` allocates nothing.

    Attributes:
        config: the arguments, as plain values.
        inputs: as above.
        losses: by task the name of its loss.

    Shape:
        A `Batch` in; a `TaskOutput` out with `[S]` logits by label. Where negatives are drawn the one task is "next".

    Raises:
        ValueError: nothing to read; a table that two collections need; `cross="dot"` of several widths; sizes, tasks, losses or
            conditions that do not fit; in forward, a conditional label of 1 where the other is 0 (on a GPU: an assertion there).
        DataError: in forward, a batch without the labels.

    Source:
        Target attention in place of a fixed vector: Zhou et al., Deep Interest Network for Click-Through Rate Prediction, KDD
        2018, here by scaled products. Conditional labels: Ma et al., Entire Space Multi-Task Model, SIGIR 2018.

    Example:
        >>> from jagged.models import RankingInputs, RankingModel
        >>> inputs = RankingInputs(features={"user": "user"}, candidates={"item": "item"})
        >>> model = RankingModel(inputs, {"user": 9, "item": 5})
        >>> model.tasks
        ['next']
    """

    def __init__(
        self,
        inputs: RankingInputs | Mapping[str, Any],
        sizes: Mapping[str, int],
        *,
        embedding_dim: int = 16,
        table_dims: Mapping[str, int] | None = None,
        cross: Literal["dcn", "dot"] | None = "dcn",
        cross_layers: int = 3,
        cross_rank: int | None = None,
        num_layers: int = 1,
        num_heads: int = 2,
        max_history: int = 50,
        num_time_buckets: int | None = 64,
        layer_sizes: Sequence[int] = (128, 64),
        dropout: float = 0.0,
        tasks: Sequence[str] | None = None,
        conditional: Mapping[str, str] | None = None,
        implied: bool = False,
        loss: LossName | Mapping[str, LossName] = "binary",
        focal_gamma: float = 2.0,
        focal_alpha: float | None = None,
        label_means: Mapping[str, float] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        inputs = inputs if isinstance(inputs, RankingInputs) else RankingInputs(**inputs)
        _check_tables(inputs)
        used = _tables(inputs)
        if missing := [table for table in used if table not in sizes]:
            raise ValueError(f"sizes: got none of the table {missing[0]!r}, expected those of {', '.join(used)}")
        if unknown := [table for table in table_dims or {} if table not in used]:
            raise ValueError(f"table_dims: got the table {unknown[0]!r}, expected some of {', '.join(used)}")
        widths = {table: (table_dims or {}).get(table, embedding_dim) for table in used}
        if cross not in ("dcn", "dot", None):
            raise ValueError(f"cross: got {cross!r}, expected 'dcn', 'dot' or None")
        if cross == "dot" and (other := [table for table, width in widths.items() if width != embedding_dim]):
            raise ValueError(
                f"table_dims: got {widths[other[0]]} for the table {other[0]!r}, expected {embedding_dim}, the width of the "
                "others; cross='dot' multiplies vectors of one width"
            )
        if not layer_sizes:
            raise ValueError("layer_sizes: expected the width of at least one layer, got none")
        self.inputs, self.tasks = inputs, _checked_tasks(inputs.labels, tasks)
        self.conditional = _in_order(dict(conditional or {}), self.tasks)
        self.losses = _checked_losses(loss, self.tasks, self.conditional)
        self.config: dict[str, Any] = {
            "inputs": asdict(inputs), "sizes": {table: int(sizes[table]) for table in used}, "embedding_dim": embedding_dim,
            "table_dims": dict(table_dims or {}), "cross": cross, "cross_layers": cross_layers, "cross_rank": cross_rank,
            "num_layers": num_layers, "num_heads": num_heads, "max_history": max_history, "num_time_buckets": num_time_buckets,
            "layer_sizes": list(layer_sizes), "dropout": dropout, "tasks": self.tasks, "conditional": self.conditional,
            "implied": implied, "loss": self.losses, "focal_gamma": focal_gamma, "focal_alpha": focal_alpha,
            "label_means": dict(label_means or {}),
        }  # fmt: skip
        own = _module_names(used)
        where = None if device is None else torch.device(device)

        def options(table: str, keys: list[str]) -> dict[str, Any]:
            return {
                "name": own[table],
                "embedding_dim": widths[table],
                "num_embeddings": int(sizes[table]),
                "feature_names": keys,
            }

        groups = {"features": inputs.pooled, **{name: _by_table(getattr(inputs, name)) for name in _POOLED}}
        self.bags = nn.ModuleDict()
        for name, tables in groups.items():
            pooling = PoolingType.SUM if _POOLED.get(name) else PoolingType.MEAN
            if tables:
                bags = [EmbeddingBagConfig(**options(table, keys), pooling=pooling) for table, keys in tables.items()]
                self.bags[name] = ScheduledEmbeddingBagCollection(bags, is_weighted=_POOLED.get(name, False), device=where)
        # TorchRec's collection has one width.
        by_width: dict[int, list[EmbeddingConfig]] = {}
        for table, keys in inputs.sequences.items():
            by_width.setdefault(widths[table], []).append(EmbeddingConfig(**options(table, keys)))
        self.sequences = nn.ModuleList(EmbeddingCollection(tables=of, device=where) for of in by_width.values())
        self.scorer = _Scorer(inputs, widths, self.config, device)

    @classmethod
    def of(cls, split: Split | Part, *, histories: Sequence[str] | None = None, **options: Any) -> RankingModel:
        """The model of a split's batches, with the training part's tables and statistics of numbers.

        Args:
            split: or a part of one.
            histories: lists of ids that are histories, as of `RankingInputs.of`; None for those that share a table with the
                candidate's ids.
            **options: of the class.

        Raises:
            ValueError: as of the class; or labels that are not from 0 to 1, of tasks over requests below 0, or a conditional one
                larger than its condition.
        """
        part = cast("Part", getattr(split, "train", split))
        model = cls(RankingInputs.of(part, histories), part.encoders.sizes, **options)
        model.scorer.normalise(part.encoders.statistics)
        if part.label_names:
            labels = {name: torch.from_numpy(part.dataset.column(name)[part.rows]) for name in model.tasks}
            for name, values in labels.items():
                present = values[~values.isnan()]
                if model.losses[name] in REQUEST_LOSSES:
                    if present.numel() and (least := present.min().item()) < 0:
                        raise ValueError(
                            f"tasks: got the label {name!r} with values from {least:g} on, expected 0 or more for the loss "
                            f"{model.losses[name]!r}; add to all of them what makes the smallest one 0"
                        )
                elif present.numel() and not 0 <= (least := present.min().item()) <= (most := present.max().item()) <= 1:
                    raise ValueError(
                        f"tasks: got the label {name!r} with values from {least:g} to {most:g}, expected 0 to 1; say from where "
                        f'on it is 1 when the table is read, label="{name}>={most:g}", or name other tasks'
                    )
            for child, parent in model.conditional.items() if not model.config["implied"] else ():
                # Where one is missing nothing is larger.
                _refuse_unconditional(labels[child] > labels[parent], child, parent)
            model.config["label_means"] = _means(labels, part)
        return model

    @property
    def device(self) -> torch.device:
        """Where scores are made; tables whose rows are cached are in the host's memory."""
        return next(self.scorer.parameters()).device

    @property
    def slices(self) -> tuple[str, ...]:
        """Columns of one id a row by whose values `evaluate` has figures, too; none at first."""
        return self.scorer.slices

    @slices.setter
    def slices(self, names: Sequence[str]) -> None:
        self.scorer.slices = tuple(names)

    def metrics_of(self, name: str) -> PointwiseMetrics:
        """With the mean label in training, where it is known and both labels are there; of scores the figures of their order."""
        if self.losses.get(name) in REQUEST_LOSSES:
            return PointwiseMetrics(name, probabilities=False)
        mean = self.config["label_means"].get(name)
        return PointwiseMetrics(name, training_mean=mean if mean is not None and 0 < mean < 1 else None)

    def forward(self, batch: Batch) -> TaskOutput:
        """Return the loss, and logits by task."""
        return cast(TaskOutput, self.scorer(batch, *self._looked_up(batch)))

    def logits(self, batch: Batch) -> dict[str, Tensor]:
        """By task the logits of the candidates, float `[S]`, without a loss: the batch needs no labels."""
        return self.scorer.logits(batch, *self._looked_up(batch))

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """By task the probabilities of the candidates, float32 `[S]`, in eval mode and without gradients; labels are not read.

        Of tasks with a loss over requests they are scores instead, the logits: of one request's candidates the larger is the
        better, and nothing else can be read from them.
        """
        if not len(batch):
            # TorchRec's collections take no batch without samples.
            return {name: torch.zeros(0, device=self.device) for name in self.tasks}
        with evaluating(self), torch.no_grad():
            found = self.logits(moved(batch, self.device))
        return {name: of.float() if self.losses[name] in REQUEST_LOSSES else of.float().sigmoid() for name, of in found.items()}

    def prefetch(self, batch: Batch) -> None:
        """Bring the rows of the next batch to the device where tables have them cached, as collections' `prefetch` says."""
        for name, bags in self.bags.items():
            assert isinstance(bags, ScheduledEmbeddingBagCollection)
            bags.prefetch(getattr(batch, name))
        for rows in self.sequences:
            if isinstance(rows, ScheduledEmbeddingCollection):
                rows.prefetch(batch.features)

    def _looked_up(self, batch: Batch) -> tuple[dict[str, KeyedTensor], list[dict[str, JaggedTensor]]]:
        """What each collection gives, called once."""
        pooled = {name: collection(getattr(batch, name)) for name, collection in self.bags.items()}
        return pooled, [collection(batch.features) for collection in self.sequences]


def _means(labels: Mapping[str, Tensor], part: Part) -> dict[str, float]:
    """The mean of each label over the rows that have it, by their weights."""
    found = part.dataset.one(Kind.WEIGHT)
    weights = None if found is None else torch.from_numpy(found[part.rows]).double()
    means = {}
    for name, values in labels.items():
        counted = (~values.isnan()).double() if weights is None else weights.where(~values.isnan(), 0)
        if total := float(counted.sum()):
            means[name] = float((values.double().nan_to_num() * counted).sum() / total)
    return means


def _by_rows(inputs: RankingInputs) -> list[dict[str, str]]:
    """Keys of `features` that are never pooled before they are encoded, with their tables."""
    return [inputs.candidate_ids, *inputs.histories]


def _tables(inputs: RankingInputs) -> list[str]:
    """The tables that are read."""
    groups = [inputs.features, *_by_rows(inputs), *(getattr(inputs, name) for name in _POOLED)]
    return list(dict.fromkeys(table for group in groups for table in group.values()))


def _check_tables(inputs: RankingInputs) -> None:
    """Refuse a table that keys of two collections share, and inputs without any."""
    groups = {"features": {key: table for of in (inputs.features, *_by_rows(inputs)) for key, table in of.items()}}
    groups |= {name: getattr(inputs, name) for name in _POOLED}
    for table in _tables(inputs):
        readers = {name: keys for name, of in groups.items() if (keys := _by_table(of).get(table))}
        if len(readers) > 1:
            found = " and ".join(f"{name} ({', '.join(keys)})" for name, keys in readers.items())
            cure = "leave the column out of event_lists" if "history_lists" in readers else "give a column another in the schema"
            raise ValueError(f"table {table!r}: read by {found}, expected one of them, as a table is in one collection; {cure}")
    numbers = (inputs.request_numbers, inputs.candidate_numbers, inputs.request_number_lists, inputs.candidate_number_lists)
    if not any(groups.values()) and not any(numbers):
        raise ValueError("inputs: got no column of ids or numbers, expected something to learn from")


def _checked_tasks(labels: Sequence[str], tasks: Sequence[str] | None) -> list[str]:
    found = list(labels if tasks is None else tasks)
    if not found or len(set(found)) < len(found) or (unknown := [name for name in found if name not in labels]):
        wrong = repr(unknown[0]) if found and len(set(found)) == len(found) else repr(found)
        raise ValueError(f"tasks: got {wrong}, expected some of {', '.join(labels)}")
    return found


def _checked_losses(
    loss: LossName | Mapping[str, LossName], tasks: list[str], conditional: Mapping[str, str]
) -> dict[str, LossName]:
    """The name of each task's loss."""
    if not isinstance(loss, str) and (unknown := [name for name in loss if name not in tasks]):
        raise ValueError(f"loss: expected some of the tasks {', '.join(tasks)}, got {unknown[0]!r}; leave it out")
    named: dict[str, LossName] = {name: loss if isinstance(loss, str) else loss.get(name, "binary") for name in tasks}
    for name, of in named.items():
        if of not in LOSSES:
            raise ValueError(f"loss: expected one of {', '.join(LOSSES)}, got {of!r} for the task {name!r}; choose one of these")
    for child, parent in conditional.items():
        for name in (child, parent):
            if named[name] in REQUEST_LOSSES:
                raise ValueError(
                    f"loss: expected binary or focal for the task {name!r}, got {named[name]!r}; {child!r} is predicted by a "
                    f"product of probabilities, as conditional says, and scores of this loss are none; leave {child!r} out of "
                    "conditional, or choose another loss"
                )
    return named


def _in_order(conditional: dict[str, str], tasks: list[str]) -> dict[str, str]:
    """The conditions, those that others depend on first."""
    for pair in conditional.items():
        if unknown := [name for name in pair if name not in tasks]:
            raise ValueError(f"conditional: got {unknown[0]!r}, expected two of the tasks {', '.join(tasks)}")
    ordered: dict[str, str] = {}
    while len(ordered) < len(conditional):
        ready = {c: p for c, p in conditional.items() if c not in ordered and (p not in conditional or p in ordered)}
        if not ready:
            raise ValueError(f"conditional: got {conditional}, expected no label that is a condition of itself")
        ordered |= ready
    return ordered


def _module_names(tables: Iterable[str]) -> dict[str, str]:
    """A name for each table that torch takes for a module: without dots, and none of `nn.ModuleDict`'s attributes."""
    names: dict[str, str] = {}
    for table in tables:
        name = table.replace(".", "_")
        while hasattr(nn.ModuleDict, name) or name in ("training", *names.values()):
            name += "_"
        names[table] = name
    return names


def _refuse_unconditional(found: Tensor, child: str, parent: str) -> None:
    """Refuse rows where a conditional label is larger than its condition."""
    message = (
        f"label {child!r}: got 1 where {parent!r} is 0, expected 0 there, as conditional says; implied=True counts both as 1"
    )
    if torch.compiler.is_compiling() or not found.is_cpu:
        torch._assert_async(~found.any(), message)
    elif found.any():
        raise ValueError(message)


class _Output(TaskOutput):
    """The loss is the mean over the rows that any task counts; where all tasks are over requests, over these."""

    __slots__ = ()

    def rows(self) -> Tensor:
        """The sum of their weights."""
        return _rows(self.scores.values())


def _rows(scores: Iterable[TaskScores]) -> Tensor:
    masks, weights, counts = zip(*((one.mask, one.weights, one.count) for one in scores), strict=True)
    if None not in counts:
        # Each is a sum over requests, and so is their mean: it is 0 only where no task has a term.
        return torch.stack(counts).mean()
    counted = torch.stack(masks).any(0)
    # All tasks have the batch's weights; where no label is there they may be anything.
    return cast(Tensor, weights[0]).where(counted, 0).sum()


class _Numbers(nn.Module):
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


class _NumberLists(_Numbers):
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


class _History(JaggedModule):
    """Events of a request, encoded: their mean, and what candidates read of them; `keys` have the ids that events show."""

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
        width, heads, buckets = config["embedding_dim"], config["num_heads"], config["num_time_buckets"]
        self.projection = nn.Linear(in_features, width, device=device)
        self.positions = PositionalEncoding(config["max_history"], width, device=device)
        self.times = TimeEncoding(buckets, width, device=device) if is_gathered and buckets is not None else None
        self.blocks = nn.ModuleList(
            JaggedTransformerBlock(width, heads, dropout=config["dropout"], device=device) for _ in range(config["num_layers"])
        )
        self.norm = nn.LayerNorm(width, device=device)
        self.mean = JaggedPooling(width, "mean")
        self.attention = JaggedCrossAttention(width, heads, device=device) if has_candidates else None

    def forward(
        self,
        x: JaggedTensor,
        queries: JaggedTensor | None,
        times: tuple[Tensor, Tensor] | None = None,
        weights: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Encode the events.

        Args:
            x: values `[sum L, in_features]`.
            queries: of the candidates, values `[S, embedding_dim]`; None where there are none.
            times: of the events `[sum L]` and of the requests `[R]`, int64; None where events have none.
            weights: `[sum L]`, how much events count in the mean; None for 1.

        Returns:
            The mean `[R, embedding_dim]`, and what each candidate reads, `[S, embedding_dim]` or None.
        """
        x = self.positions(with_values(x, self.projection(x.values())))
        x = x if self.times is None or times is None else self.times(x, *times)
        for block in self.blocks:
            x = block(x)
        x = with_values(x, self.norm(x.values()))
        read = None if self.attention is None or queries is None else self.attention(queries, x).values()
        return _weighted_mean(self.mean, x, weights), read


def _weighted_mean(mean: JaggedPooling, x: JaggedTensor, weights: Tensor | None) -> Tensor:
    """The mean of each sample's rows, `[R, width]`, by their weights `[sum L]` where there are some."""
    if weights is None:
        return cast(Tensor, mean(x))
    counts = weights[:, None].to(x.values().dtype)
    summed: Tensor = mean(with_values(x, torch.cat([x.values() * counts, counts], 1)))
    # Rows that all count nothing are as none.
    return summed[:, :-1] / summed[:, -1:].where(summed[:, -1:] > 0, 1)


class _Scorer(JaggedModule):
    """All that follows the lookups; a leaf where TorchRec's pipelines trace the model."""

    def __init__(
        self, inputs: RankingInputs, widths: Mapping[str, int], config: Mapping[str, Any], device: torch.device | str | None
    ) -> None:
        super().__init__()
        self.inputs, self.tasks, self.conditional = inputs, config["tasks"], config["conditional"]
        self.implied, self.cross = config["implied"], config["cross"]
        self._places = {name: list(inputs.labels).index(name) for name in self.tasks}
        self.slices: tuple[str, ...] = ()
        self._collection = _collections(inputs, widths)
        dim, dropout = config["embedding_dim"], config["dropout"]

        def width(*groups: Mapping[str, str]) -> int:
            return sum(widths[table] for group in groups for table in group.values())

        self.numbers, self.number_lists = nn.ModuleDict(), nn.ModuleDict()
        beside = {"request": 0, "candidate": 0, "history": 0}
        for side in beside:
            names, lists = getattr(inputs, f"{side}_numbers"), getattr(inputs, f"{side}_number_lists", ())
            if names:
                self.numbers[side] = _Numbers(names, device)
            if lists:
                self.number_lists[side] = _NumberLists(lists, device)
            beside[side] = 3 * (len(names) + len(lists))
        requests = width(inputs.features, inputs.weighted_features) + beside["request"]
        candidates = width(inputs.candidate_ids, inputs.candidates, inputs.weighted_candidates) + beside["candidate"]
        vectors = {
            "request": len(inputs.features) + len(inputs.weighted_features),
            "candidate": len(inputs.candidate_ids) + len(inputs.candidates) + len(inputs.weighted_candidates),
        }
        self.mean = JaggedPooling(dim, "mean")
        self.histories = nn.ModuleList()
        for keys in inputs.histories:
            is_gathered = keys is inputs.history
            events = width(keys)
            if is_gathered:
                events += width(inputs.history_lists) + beside["history"] + 2 * inputs.history_labels
            self.histories.append(_History(keys, events, config, candidates > 0, is_gathered, device))
        # One of the candidates' features for all histories, whose attention projects it anew.
        self.query = nn.Linear(candidates, dim, device=device) if inputs.histories and candidates else None
        for keys in inputs.histories:
            requests, vectors["request"] = requests + dim + width(keys), vectors["request"] + 1 + len(keys)
        if self.query is not None:
            candidates, vectors["candidate"] = candidates + dim * len(self.histories), vectors["candidate"] + len(self.histories)
        self.number_vectors = nn.ModuleDict()
        if self.cross == "dot":
            for side in vectors:
                if beside[side]:
                    self.number_vectors[side] = nn.Linear(beside[side], dim, device=device)
                    vectors[side] += 1
            of_request, of_candidate = vectors.values()
            requests += of_request * (of_request - 1) // 2
            candidates += of_candidate * (of_candidate - 1) // 2 + of_candidate * of_request
        self.dots = DotInteraction()
        first, *hidden = config["layer_sizes"]
        # Where no column is the candidate's, all rows of a request are alike.
        self.meeting: nn.Module = (
            JaggedMLP(candidates, [first], context_features=requests or None, device=device)
            if candidates
            else nn.Linear(requests, first, device=device)
        )
        self.crossed: nn.Module = (
            CrossNet(first, config["cross_layers"], rank=config["cross_rank"], device=device)
            if self.cross == "dcn"
            else nn.ReLU()
        )
        self.towers = nn.ModuleList(_tower([first, *hidden], dropout, device) for _ in self.tasks)
        options = {name: config[name] for name in ("focal_gamma", "focal_alpha")}
        self.losses = nn.ModuleList(loss_of(config["loss"][name], **options) for name in self.tasks)

    def normalise(self, statistics: Mapping[str, Statistics]) -> None:
        """Take over training's means and deviations."""
        for numbers in (*self.numbers.values(), *self.number_lists.values()):
            cast(_Numbers, numbers).normalise(statistics)

    def forward(self, batch: Batch, pooled: Mapping[str, KeyedTensor], looked_up: Sequence[Mapping[str, JaggedTensor]]) -> Any:
        """Return a `TaskOutput`."""
        return self._scored(batch, self.logits(batch, pooled, looked_up))

    def logits(
        self, batch: Batch, pooled: Mapping[str, KeyedTensor], looked_up: Sequence[Mapping[str, JaggedTensor]]
    ) -> dict[str, Tensor]:
        """Return `[S]` logits of each task, of what the collections gave. Nothing is read of labels and weights of rows."""
        inputs = self.inputs
        # All keys are cut at once: the gradient of one that is cut out alone is as wide as all of them, and mostly zeros.
        bags_of = {name: of.to_dict() for name, of in pooled.items()}

        def rows(key: str) -> JaggedTensor:
            return looked_up[self._collection[key]][key]

        def bags(name: str, keys: Iterable[str]) -> list[Tensor]:
            # A sharded collection has them in an order of its own.
            return [bags_of[name][key] for key in keys]

        requests = [
            bags_of["features"][key]
            if key not in self._collection
            else self._mean(rows(key))
            if key in inputs.lists
            else rows(key).values()
            for key in inputs.features
        ]
        requests += bags("weighted_features", inputs.weighted_features)
        candidates = [rows(key).values() for key in inputs.candidate_ids]
        candidates += [*bags("candidates", inputs.candidates), *bags("weighted_candidates", inputs.weighted_candidates)]
        of_request, of_candidate = self._numbers(batch, "request"), self._numbers(batch, "candidate")
        queries = None
        if self.query is not None:
            parts = [*candidates, *of_candidate]
            own = torch.cat(parts, 1)
            queries = JaggedTensor(self.query(own), offsets=batch.candidate_offsets)
            # Cut again, so that the two gradients are added once and not part by part.
            parts = list(own.split([part.shape[1] for part in parts], 1))
            candidates, of_candidate = parts[: len(candidates)], parts[len(candidates) :]
        for history in cast("list[_History]", self.histories):
            ids = [rows(key) for key in history.keys]
            shown, times, weights = self._shown(batch, ids, bags) if history.is_gathered else (ids[0], None, None)
            mean, read = history(shown, queries, times, weights)
            # The ids stand first in what is shown, so that nothing is kept for their means that is not kept anyway.
            widths = [one.values().shape[1] for one in ids]
            requests += [*_weighted_mean(self.mean, shown, weights)[:, : sum(widths)].split(widths, 1), mean]
            candidates += [] if read is None else [read]
        request, candidate = [*requests, *of_request], [*candidates, *of_candidate]
        if self.cross == "dot":
            self._dots(batch.candidate_offsets, (requests, of_request, request), (candidates, of_candidate, candidate))
        context = torch.cat(request, 1) if request else None
        if candidate:
            met = self.meeting(JaggedTensor(torch.cat(candidate, 1), offsets=batch.candidate_offsets), context).values()
        else:
            met = self.meeting(context)[batch.candidate_requests]
        crossed = self.crossed(met)
        return self._of_conditions({name: tower(crossed) for name, tower in zip(self.tasks, self.towers, strict=True)})

    def _mean(self, x: JaggedTensor) -> Tensor:
        return cast(Tensor, self.mean(x))

    def _numbers(self, batch: Batch, side: str) -> list[Tensor]:
        found = []
        if side in self.numbers:
            found.append(self.numbers[side](getattr(batch, f"{side}_numbers"), getattr(batch, f"{side}_numbers_missing")))
        if side in self.number_lists:
            found.append(self.number_lists[side](getattr(batch, f"{side}_number_lists")))
        return found

    def _shown(
        self, batch: Batch, ids: list[JaggedTensor], bags: Any
    ) -> tuple[JaggedTensor, tuple[Tensor, Tensor], Tensor | None]:
        """What is known of each event beside its place, ids first; the times of events and of requests, and events' weights."""
        shown = [*(one.values() for one in ids), *bags("history_lists", self.inputs.history_lists)]
        shown += self._numbers(batch, "history")
        if self.inputs.history_labels:
            assert batch.history_labels is not None
            assert batch.history_label_mask is not None
            shown += [of.to(shown[0].dtype) for of in (batch.history_labels, batch.history_label_mask)]
        assert batch.history_times is not None
        assert batch.request_times is not None
        times = batch.history_times, batch.request_times
        weights = batch.history_weights if self.inputs.history_weights else None
        return with_values(ids[0], torch.cat(shown, 1)) if len(shown) > 1 else ids[0], times, weights

    def _dots(self, offsets: Tensor, request: tuple[list[Tensor], ...], candidate: tuple[list[Tensor], ...]) -> None:
        """Add the products of vectors to what goes into the meeting; those among the request's are made once."""
        stacked = []
        for side, (vectors, numbers, _) in (("request", request), ("candidate", candidate)):
            own = [*vectors, self.number_vectors[side](torch.cat(numbers, 1))] if side in self.number_vectors else vectors
            stacked.append(torch.stack(own, 1) if own else None)
        of_request, of_candidate = stacked
        if of_request is not None:
            request[2].append(self.dots(of_request))
        if of_candidate is not None:
            candidate[2].append(self.dots(JaggedTensor(of_candidate, offsets=offsets), of_request).values())

    def _ids(self, batch: Batch, name: str) -> Tensor:
        """A column's id of each candidate, int64 `[S]`."""
        if name in self.inputs.features:
            return batch.features[name].values()[batch.candidate_requests]
        return batch.candidate_ids(name)

    def _of_conditions(self, towers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The logits of what is predicted: of a conditional label those of the product."""
        # Under autocast they come in 16 bits.
        logits = {name: of.squeeze(1).to(torch.promote_types(of.dtype, torch.float32)) for name, of in towers.items()}
        for child, parent in self.conditional.items():
            logits[child] = product_logits(logits[parent], logits[child])
        return logits

    def _scored(self, batch: Batch, logits: Mapping[str, Tensor]) -> TaskOutput:
        labels, masks = {}, {}
        for name, place in self._places.items():
            labels[name], masks[name] = batch.label(place)
        # What a label implies may imply another.
        for child, parent in reversed(self.conditional.items()) if self.implied else ():
            holds = masks[child] & (labels[child] > 0)
            labels[parent] = torch.where(holds, torch.maximum(labels[parent], labels[child]), labels[parent])
            masks[parent] = masks[parent] | holds
        for child, parent in self.conditional.items():
            masks[child] = masks[child] & masks[parent]
            _refuse_unconditional(masks[child] & (labels[child] > labels[parent]), child, parent)
        weights = batch.weights.to(logits[self.tasks[0]].dtype)
        # Of whom nobody knows who it is, each request is somebody else's.
        users = batch.user_index.where(batch.user_index >= 0, -1 - batch.request_index)
        groups: dict[str, Any] = {
            "users": users[batch.candidate_requests],
            "requests": batch.request_index[batch.candidate_requests],
        }
        if self.slices:
            groups["slices"] = {name: self._ids(batch, name) for name in self.slices}
        scores, totals = {}, []
        for name, loss in zip(self.tasks, cast("Iterable[TaskLoss]", self.losses), strict=True):
            own = logits[name], labels[name]
            total, count = loss(*own, batch.candidate_offsets, masks[name], weights)
            totals.append(total)
            scores[name] = TaskScores(*own, masks[name], weights, **groups, count=count if loss.over_requests else None)
        total = torch.stack(totals).sum()
        rows = _rows(scores.values())
        return _Output(total / rows.where(rows > 0, 1), scores)


def _collections(inputs: RankingInputs, widths: Mapping[str, int]) -> dict[str, int]:
    """Of each key that is read row by row, the place of its collection: one for each width."""
    places: dict[int, int] = {}
    return {key: places.setdefault(widths[table], len(places)) for table, keys in inputs.sequences.items() for key in keys}


def _tower(widths: Sequence[int], dropout: float, device: torch.device | str | None) -> nn.Sequential:
    layers: list[nn.Module] = []
    for wide, narrow in zip(widths, [*widths[1:], 1], strict=True):
        layers += [nn.Linear(wide, narrow, device=device), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers[:-2])
