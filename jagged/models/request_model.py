"""What ranking models of a table's requests have in common: tables, numbers, histories, tasks and their losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from jagged.data import Kind
from jagged.data.moving import moved
from jagged.evaluation import evaluating
from jagged.models.bodies import Vectors, Widths
from jagged.models.features import (
    POOLED,
    HistoryEncoder,
    NumberLists,
    Numbers,
    RankingInputs,
    by_table,
    check_tables,
    collections_of,
    module_names,
    tables_of,
    weighted_mean,
)
from jagged.models.task import Task, TaskOutput, TaskScores
from jagged.models.tasks import LOSSES, REQUEST_LOSSES, LossName, PairwiseLoss, TaskLoss, loss_of, product_logits
from jagged.modules import (
    JaggedModule,
    JaggedPooling,
    ScheduledEmbeddingBagCollection,
    ScheduledEmbeddingCollection,
    with_values,
)
from jagged.modules.linear import apply_layer
from jagged.ops import sample_of_row
from jagged.pointwise import PointwiseMetrics

if TYPE_CHECKING:
    from jagged.data.encoding import Statistics
    from jagged.data.table_batches import Batch, Part
    from jagged.data.table_splits import Split


class RequestModel(Task):
    """Scores of the candidates of requests, for one label or several: what ranking models have in common.

    Ids are looked up: `features` that are the request's are pooled by means, those of candidates and histories row by row, and
    `candidates`, lists of events and lists with weights (sums) in tables of their own. Histories are encoded as
    the model says, or are the means of what is known of their events: ids, lists, numbers and labels. A body makes logits
    of all that.

    Tables begin as TorchRec's do, evenly from -1 to 1 over the root of their rows: of many ids, each of which is seen seldom, the
    rows begin small. Numbers are normalised by training's mean and deviation, and by their rank in training, beside an indicator
    of missing ones; of a list they are the mean. Nothing is padded.

    The loss is a sum over tasks and rows, each by its weight, divided by the weights of the rows with any of the labels: where
    all rows have all labels, the sum of the tasks' means. A row without a label counts 0 for its task, so that batches
    add up exactly over processes and accumulation.

    With the losses `"listwise"` and `"pairwise"` a task's terms are of requests: the candidates of each compete. Where all tasks
    have such losses, their sum is divided by the weights of the requests that a task counts, the mean over tasks; beside a loss
    over rows a request's term counts as a row's does. The logits of such a task are scores, which order the candidates of one
    request and are no log-odds: `predict` gives them as they are, and figures are those of the order alone.

    Args:
        inputs: what batches have; `of` finds it out.
        sizes: rows of each embedding table, as `split.encoders.sizes` has them.
        own: the subclass's arguments, as plain values.
        make_body: makes of `jagged.models.bodies.Widths`, the number of tasks, `config` and a device what makes logits `[S, T]`
            of `jagged.models.bodies.Vectors`.
        encoder: what histories are encoded by, for which `own` has its options; None for their means.
        embedding_dim: width of tables.
        table_dims: widths of single tables.
        tasks: labels to learn; None for all.
        conditional: a label that can be 1 only where another one is, with that one: of `{"buy": "click"}` the logits of buy give
            q, buying after a click, and buy is predicted by `p q`. Its loss, over the rows with both labels, is that of `p q`.
        implied: a row with such a label 1 counts as one with the other 1, too; otherwise it is an error where that is 0.
        loss: `"binary"` (cross entropy), `"focal"`, `"listwise"` or `"pairwise"`, of all tasks, or by task; tasks that a mapping
            leaves out have `"binary"`. `jagged.models.tasks` has them. A conditional label and its condition have probabilities:
            `"binary"` or `"focal"`.
        focal_gamma, focal_alpha: of `FocalLoss`.
        negative_rate: r, above 0 and at most 1, at which rows whose label is 0 were kept when the table was made, all others
            staying; None for 1. The label is that of the one task, or of the one that all others depend on by `conditional`:
            where it is 1 nothing was left out, so that theirs need nothing of their own. Logits are those of the table with all
            rows: the loss, which sees the rows that were kept, is of `logit - log r`. Figures and `label_means` count each such
            row as the 1 / r that it stands for; the loss does not.
        label_means: mean labels in training, by task, for `ne_of_training`; None where they are not known.
        device: where parameters live; `"meta"` allocates nothing.

    Attributes:
        config: the arguments, as plain values.
        inputs: as above.
        losses: by task the name of its loss.
        negative_rate: as above, 1 for none; of a table with another one `evaluate` is right after it was set.

    Shape:
        A `Batch` in; a `TaskOutput` out with `[S]` logits by label. Where negatives are drawn the one task is "next".

    Raises:
        ValueError: nothing to read; a table that two collections need; sizes, tasks, losses, conditions or a rate that do not
            fit; in forward, a conditional label of 1 where the other is 0 (on a GPU: an assertion there).
        DataError: in forward, a batch without the labels.

    Source:
        Conditional labels: Ma et al., Entire Space Multi-Task Model, SIGIR 2018. Rates of negatives: He et al., Practical Lessons
        from Predicting Clicks on Ads at Facebook, ADKDD 2014, section 6.3: q = p / (p + (1 - p) / r).
    """

    def __init__(
        self,
        inputs: RankingInputs | Mapping[str, Any],
        sizes: Mapping[str, int],
        *,
        own: Mapping[str, Any],
        make_body: Callable[[Widths, int, Mapping[str, Any], torch.device | str | None], nn.Module],
        encoder: type[HistoryEncoder] | None = None,
        embedding_dim: int = 16,
        table_dims: Mapping[str, int] | None = None,
        tasks: Sequence[str] | None = None,
        conditional: Mapping[str, str] | None = None,
        implied: bool = False,
        loss: LossName | Mapping[str, LossName] = "binary",
        focal_gamma: float = 2.0,
        focal_alpha: float | None = None,
        negative_rate: float | None = None,
        label_means: Mapping[str, float] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        inputs = inputs if isinstance(inputs, RankingInputs) else RankingInputs(**inputs)
        check_tables(inputs)
        used = tables_of(inputs)
        if missing := [table for table in used if table not in sizes]:
            raise ValueError(f"sizes: got none of the table {missing[0]!r}, expected those of {', '.join(used)}")
        if unknown := [table for table in table_dims or {} if table not in used]:
            raise ValueError(f"table_dims: got the table {unknown[0]!r}, expected some of {', '.join(used)}")
        widths = {table: (table_dims or {}).get(table, embedding_dim) for table in used}
        self.inputs, self.tasks = inputs, _checked_tasks(inputs.labels, tasks)
        self.conditional = _in_order(dict(conditional or {}), self.tasks)
        self.losses = _checked_losses(loss, self.tasks, self.conditional)
        self.config: dict[str, Any] = {
            "inputs": asdict(inputs), "sizes": {table: int(sizes[table]) for table in used}, "embedding_dim": embedding_dim,
            "table_dims": dict(table_dims or {}), **own, "tasks": self.tasks, "conditional": self.conditional,
            "implied": implied, "loss": self.losses, "focal_gamma": focal_gamma, "focal_alpha": focal_alpha,
            "negative_rate": negative_rate, "label_means": dict(label_means or {}),
        }  # fmt: skip
        names = module_names(used)
        where = None if device is None else torch.device(device)

        def options(table: str, keys: list[str]) -> dict[str, Any]:
            return {
                "name": names[table],
                "embedding_dim": widths[table],
                "num_embeddings": int(sizes[table]),
                "feature_names": keys,
            }

        groups = {"features": inputs.pooled, **{name: by_table(getattr(inputs, name)) for name in POOLED}}
        self.bags = nn.ModuleDict()
        for name, tables in groups.items():
            pooling = PoolingType.SUM if POOLED.get(name) else PoolingType.MEAN
            if tables:
                bags = [EmbeddingBagConfig(**options(table, keys), pooling=pooling) for table, keys in tables.items()]
                self.bags[name] = ScheduledEmbeddingBagCollection(bags, is_weighted=POOLED.get(name, False), device=where)
        # TorchRec's collection has one width.
        by_width: dict[int, list[EmbeddingConfig]] = {}
        for table, keys in inputs.sequences.items():
            by_width.setdefault(widths[table], []).append(EmbeddingConfig(**options(table, keys)))
        self.sequences = nn.ModuleList(EmbeddingCollection(tables=of, device=where) for of in by_width.values())
        self.scorer = _Scorer(inputs, widths, self.config, make_body, encoder, device)
        self.negative_rate = 1.0 if negative_rate is None else negative_rate

    @classmethod
    def of(cls, split: Split | Part, *, histories: Sequence[str] | None = None, **options: Any) -> Self:
        """The model of a split's batches, with the training part's tables and statistics of numbers.

        Args:
            split: or a part of one.
            histories: lists of ids that are histories, as of `RankingInputs.of`; None for those that share a table with the
                candidate's ids.
            **options: of the class.

        Raises:
            ValueError: as of the class; or labels that are not from 0 to 1, of tasks over requests below 0, or a conditional one
                larger than its condition; with a rate of negatives, no labels, or others than 0 and 1.
        """
        part = cast("Part", getattr(split, "train", split))
        model = cls(RankingInputs.of(part, histories), part.encoders.sizes, **options)
        model.scorer.normalise(part.encoders.statistics)
        rate = model.negative_rate
        if rate < 1 and not part.label_names:
            raise ValueError(f"negative_rate: got {rate} of a table without labels, expected None; drawn items are no rows of it")
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
            root = labels[_root(model.tasks, model.conditional)] if rate < 1 else None
            if root is not None and (between := root[(root > 0) & (root < 1)]).numel():
                raise ValueError(
                    f"negative_rate: got {rate} of a label with the value {between[0].item():g}, expected 0 and 1 alone; say "
                    "from where on it is 1 when the table is read, or leave the rate out"
                )
            model.config["label_means"] = _means(labels, part, None if root is None else (root == 0, rate))
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

    @property
    def negative_rate(self) -> float:
        """The share of rows with the label 0 that the table has, of which loss and figures are."""
        return self.scorer.negative_rate

    @negative_rate.setter
    def negative_rate(self, rate: float) -> None:
        _check_rate(rate, self.tasks, self.conditional, self.losses, implied=self.config["implied"])
        self.scorer.negative_rate = float(rate)

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
            return self.predictions(self.logits(moved(batch, self.device)))

    def predictions(self, logits: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """By task what `predict` makes of logits."""
        return {name: of.float() if self.losses[name] in REQUEST_LOSSES else of.float().sigmoid() for name, of in logits.items()}

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


def _means(labels: Mapping[str, Tensor], part: Part, thinned: tuple[Tensor, float] | None) -> dict[str, float]:
    """The mean of each label over the rows that have it, by their weights; `thinned` are rows that were kept at a rate."""
    found = part.dataset.one(Kind.WEIGHT)
    weights = None if found is None else torch.from_numpy(found[part.rows]).double()
    means = {}
    for name, values in labels.items():
        counted = (~values.isnan()).double() if weights is None else weights.where(~values.isnan(), 0)
        if thinned is not None:
            counted = torch.where(thinned[0], counted / thinned[1], counted)
        if total := float(counted.sum()):
            means[name] = float((values.double().nan_to_num() * counted).sum() / total)
    return means


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


def _root(tasks: Sequence[str], conditional: Mapping[str, str]) -> str:
    """The first task that depends on no other."""
    return next(name for name in tasks if name not in conditional)


def _check_rate(
    rate: float, tasks: Sequence[str], conditional: Mapping[str, str], losses: Mapping[str, str], *, implied: bool
) -> None:
    """Refuse a rate of negatives out of range, and where it does not say what the probabilities are.

    Raises:
        ValueError: the rate.
    """
    if not 0 < rate <= 1:
        raise ValueError(f"negative_rate: got {rate}, expected a number above 0 and at most 1; None where all rows were kept")
    if rate == 1:
        return
    roots = [name for name in tasks if name not in conditional]
    if len(roots) > 1:
        raise ValueError(
            f"negative_rate: got {rate} with the tasks {', '.join(roots)}, expected one that all others are conditional on, "
            "whose label says which rows were left out; name one task, or say by conditional what depends on it"
        )
    if over_requests := [name for name in tasks if losses[name] in REQUEST_LOSSES]:
        raise ValueError(
            f"negative_rate: got {rate} with the loss {losses[over_requests[0]]!r} of the task {over_requests[0]!r}, expected "
            "binary or focal; its scores are no probabilities: leave the rate out"
        )
    if implied:
        raise ValueError(
            f"negative_rate: got {rate} with implied=True, expected False; whether rows whose label becomes 1 were kept at the "
            "rate is not known"
        )


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


def _wide(logits: Tensor) -> Tensor:
    """Logits in 32 bits or more: under autocast they come in 16."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


class _Scorer(JaggedModule):
    """All that follows the lookups; a leaf where TorchRec's pipelines trace the model."""

    def __init__(
        self,
        inputs: RankingInputs,
        widths: Mapping[str, int],
        config: Mapping[str, Any],
        make_body: Callable[..., nn.Module],
        encoder: type[HistoryEncoder] | None,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        self.inputs, self.tasks, self.conditional = inputs, config["tasks"], config["conditional"]
        self.implied = config["implied"]
        self._places = {name: list(inputs.labels).index(name) for name in self.tasks}
        self.slices: tuple[str, ...] = ()
        self.negative_rate = 1.0
        if config.get("recompute") and not inputs.histories:
            raise ValueError(
                "recompute: got True of inputs without a history, expected False; histories are what is encoded again"
            )
        self._root = _root(self.tasks, self.conditional)
        self._collection = collections_of(inputs, widths)
        dim = config["embedding_dim"]
        # Of lists that events show, which a history that is not encoded is the mean of, too.
        self._list_widths = [widths[table] for table in inputs.history_lists.values()]

        def of(*groups: Mapping[str, str]) -> list[int]:
            return [widths[table] for group in groups for table in group.values()]

        self.numbers, self.number_lists = nn.ModuleDict(), nn.ModuleDict()
        beside = {"request": 0, "candidate": 0, "history": 0}
        for side in beside:
            names, lists = getattr(inputs, f"{side}_numbers"), getattr(inputs, f"{side}_number_lists", ())
            if names:
                self.numbers[side] = Numbers(names, device)
            if lists:
                self.number_lists[side] = NumberLists(lists, device)
            beside[side] = 3 * (len(names) + len(lists))
        requests = of(inputs.features, inputs.weighted_features)
        candidates = of(inputs.candidate_ids, inputs.candidate_lists, inputs.candidates, inputs.weighted_candidates)
        self.mean = JaggedPooling(dim, "mean")
        self.histories = nn.ModuleList()
        known = sum(candidates) + beside["candidate"]
        for keys in inputs.histories:
            if encoder is None:
                continue
            is_gathered = keys is inputs.history
            events = sum(of(keys))
            if is_gathered:
                events += sum(of(inputs.history_lists)) + beside["history"] + 2 * inputs.history_labels
            self.histories.append(encoder(keys, events, config, known > 0, is_gathered, device))
        # One of the candidates' features for all histories, whose attention projects it anew.
        self.query = nn.Linear(known, dim, device=device) if len(self.histories) and known else None
        of_request = beside["request"]
        for keys in inputs.histories:
            requests += [*of(keys), *([dim] if encoder is not None and encoder.has_mean else [])]
            if encoder is None and keys is inputs.history:
                requests += self._list_widths
                of_request += beside["history"] + 2 * inputs.history_labels
        candidates += [dim] * len(self.histories) if self.query is not None else []
        of_body = Widths(requests, of_request, candidates, beside["candidate"])
        self.body = make_body(of_body, len(self.tasks), config, device)
        options = {name: config[name] for name in ("focal_gamma", "focal_alpha")}
        self.losses = nn.ModuleList(loss_of(config["loss"][name], **options) for name in self.tasks)

    def normalise(self, statistics: Mapping[str, Statistics]) -> None:
        """Take over training's means and deviations."""
        for numbers in (*self.numbers.values(), *self.number_lists.values()):
            cast(Numbers, numbers).normalise(statistics)

    def forward(self, batch: Batch, pooled: Mapping[str, KeyedTensor], looked_up: Sequence[Mapping[str, JaggedTensor]]) -> Any:
        """Return a `TaskOutput`."""
        towers = self._towers(batch, pooled, looked_up)
        logits = learnt = self._of_conditions(towers)
        if self.negative_rate < 1:
            # Of the rows that were kept the odds are 1 / r times as large.
            learnt = self._of_conditions({**towers, self._root: _wide(towers[self._root]) - math.log(self.negative_rate)})
        return self._scored(batch, logits, learnt)

    def logits(
        self, batch: Batch, pooled: Mapping[str, KeyedTensor], looked_up: Sequence[Mapping[str, JaggedTensor]]
    ) -> dict[str, Tensor]:
        """Return `[S]` logits of each task, of what the collections gave. Nothing is read of labels and weights of rows."""
        return self._of_conditions(self._towers(batch, pooled, looked_up))

    def _towers(
        self, batch: Batch, pooled: Mapping[str, KeyedTensor], looked_up: Sequence[Mapping[str, JaggedTensor]]
    ) -> dict[str, Tensor]:
        """What the body makes of each task; of a conditional one the logits of it where its condition holds."""
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
        if batch.candidate_list_offsets is not None:
            for place, key in enumerate(inputs.candidate_lists):
                ends = batch.candidate_list_offsets[:, place].contiguous()
                candidates.append(self._mean(JaggedTensor(rows(key).values(), offsets=ends)))
        candidates += [*bags("candidates", inputs.candidates), *bags("weighted_candidates", inputs.weighted_candidates)]
        of_request, of_candidate = self._numbers(batch, "request"), self._numbers(batch, "candidate")
        queries = None
        if self.query is not None:
            parts = [*candidates, *of_candidate]
            own = torch.cat(parts, 1)
            queries = JaggedTensor(apply_layer(self.query, own), offsets=batch.candidate_offsets)
            # Cut again, so that the two gradients are added once and not part by part.
            parts = list(own.split([part.shape[1] for part in parts], 1))
            candidates, of_candidate = parts[: len(candidates)], parts[len(candidates) :]
        for keys in inputs.histories if not len(self.histories) else ():
            ids, is_gathered = [rows(key) for key in keys], keys is inputs.history
            shown, _, weights = self._shown(batch, ids, bags) if is_gathered else (ids[0], None, None)
            widths = [*(one.values().shape[1] for one in ids), *(self._list_widths if is_gathered else [])]
            *vectors, others = weighted_mean(self.mean, shown, weights).split([*widths, shown.values().shape[1] - sum(widths)], 1)
            requests += vectors
            of_request += [others] if others.shape[1] else []
        for history in cast("list[HistoryEncoder]", self.histories):
            ids = [rows(key) for key in history.keys]
            shown, times, weights = self._shown(batch, ids, bags) if history.is_gathered else (ids[0], None, None)
            # On a CPU nobody waits for what offsets say.
            known = None if shown.values().is_cpu else batch.pairs
            num_pairs = None if known is None else known[history.keys[0]]
            mean, read = history.encoded(shown, queries, times, weights, num_pairs)
            # The ids stand first in what is shown, so that nothing is kept for their means that is not kept anyway.
            widths = [one.values().shape[1] for one in ids]
            requests += weighted_mean(self.mean, shown, weights)[:, : sum(widths)].split(widths, 1)
            requests += [] if mean is None else [mean]
            candidates += [] if read is None else [read]
        offsets, of_rows = batch.candidate_offsets, [*candidates, *of_candidate]

        def request_of_candidate() -> Tensor:
            # What is exported has no rows where candidates have columns.
            return sample_of_row(offsets, of_rows[0].shape[0] if of_rows else batch.rows.numel())

        read_by_body = Vectors(requests, of_request, candidates, of_candidate, offsets, request_of_candidate)
        logits = cast(Tensor, self.body(read_by_body))
        return dict(zip(self.tasks, logits.unbind(1), strict=True))

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

    def _ids(self, batch: Batch, name: str) -> Tensor:
        """A column's id of each candidate, int64 `[S]`."""
        if name in self.inputs.features:
            return batch.features[name].values()[batch.candidate_requests]
        return batch.candidate_ids(name)

    def _of_conditions(self, towers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The logits of what is predicted: of a conditional label those of the product."""
        logits = {name: _wide(of) for name, of in towers.items()}
        for child, parent in self.conditional.items():
            logits[child] = product_logits(logits[parent], logits[child])
        return logits

    def _scored(self, batch: Batch, logits: Mapping[str, Tensor], learnt: Mapping[str, Tensor]) -> TaskOutput:
        """Figures are of `logits`, the loss of those that are `learnt` of the batch's rows."""
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
        if self.negative_rate < 1:
            is_negative = masks[self._root] & (labels[self._root] == 0)
            groups["rates"] = torch.ones_like(weights, dtype=torch.float64).masked_fill(is_negative, self.negative_rate)
        scores, totals = {}, []
        for name, loss in zip(self.tasks, cast("Iterable[TaskLoss]", self.losses), strict=True):
            # Without the number of pairs that the host knows, a loss of pairs waits for the device.
            known = {"num_pairs": batch.candidate_pairs} if isinstance(loss, PairwiseLoss) else {}
            total, count = loss(learnt[name], labels[name], batch.candidate_offsets, masks[name], weights, **known)
            totals.append(total)
            counted = count if loss.over_requests else None
            scores[name] = TaskScores(logits[name], labels[name], masks[name], weights, **groups, count=counted)
        total = torch.stack(totals).sum()
        rows = _rows(scores.values())
        return _Output(total / rows.where(rows > 0, 1), scores)
