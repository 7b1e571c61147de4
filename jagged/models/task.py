"""What training, evaluation and prediction ask of a model: the protocol `RankingTask`, and `Task`, a base for one's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from jagged.data import DataError
from jagged.data.moving import is_sampled, moved
from jagged.evaluation import bar, evaluating, several
from jagged.metrics import Figures, is_sampled_group, is_slice_group, sampled_figures, slice_group
from jagged.pointwise import PointwiseMetrics


@dataclass(frozen=True)
class TaskScores:
    """What a task says of N rows of a batch.

    Attributes:
        logits: `[N]` scores before any sigmoid.
        labels: `[N]`; for a binary task 0 and 1 in any dtype.
        mask: bool `[N]`, the rows that have a label; None for all.
        weights: `[N]` float, how much each row counts; None for 1.
        users: int64 `[N]`, whose rows they are, for `gauc`; None where it is not known.
        requests: int64 `[N]`, which request's candidates they are, for `ndcg@k`, `mrr` and `hit_rate@k`; None likewise.
        slices: by name int64 `[N]`, for figures of the rows of each value; None for none.
        count: 0-dim, what the task's loss is a mean over where that is not the rows, as of `jagged.models.ListwiseLoss`; None for
            the rows.
        rates: float `[N]`, above 0 and at most 1, at which rate rows like each were kept when the table was made: figures are
            then those of the table with all of them. None for 1.
    """

    logits: Tensor
    labels: Tensor
    mask: Tensor | None = None
    weights: Tensor | None = None
    users: Tensor | None = None
    requests: Tensor | None = None
    slices: Mapping[str, Tensor] | None = None
    count: Tensor | None = None
    rates: Tensor | None = None

    def rows(self) -> int | Tensor:
        """What the mean divides by: `count`, or the number of rows, or the sum of their weights as a 0-dim tensor."""
        if self.count is not None:
            return self.count
        if self.weights is not None:
            # Where there is no label the weight may be anything.
            return (self.weights if self.mask is None else self.weights.where(self.mask.bool(), 0)).sum()
        return self.labels.shape[0] if self.mask is None else self.mask.sum()


class TaskOutput(NamedTuple):
    """What `forward` of a task returns; TorchRec's train pipelines take it as it is.

    Attributes:
        loss: 0-dim; the mean over the rows that the first task counts. On several processes, and where gradients are accumulated,
            batches are weighted by that count.
        scores: by task.
    """

    loss: Tensor
    scores: Mapping[str, TaskScores]

    def rows(self) -> int | Tensor:
        """What the loss is the mean over."""
        return next(iter(self.scores.values())).rows()


@runtime_checkable
class RankingTask(Protocol):
    """A model with its loss, as `jagged.training.Trainer` trains it. It is an `nn.Module`; `Task` has all methods but forward.

    Attributes:
        kept: the module whose weights are saved when training has ended; often the task itself.
    """

    @property
    def kept(self) -> nn.Module:
        """As above."""

    def __call__(self, batch: Any) -> TaskOutput:
        """Loss and scores of a batch."""

    def predict(self, batch: Any) -> Mapping[str, Tensor]:
        """By task what is told to users, probabilities for example."""

    def evaluate(self, batches: Iterable[Any], part: str, *, progress: bool = True, all_processes: bool = True) -> Figures:
        """Figures of a held-out part, "valid" or "test", by group and name."""


class Task(nn.Module):
    """Base of a task of one's own: write `forward(batch) -> TaskOutput`, and the rest is here.

    A batch is what the loader gives: a tensor, TorchRec's types, or dicts, sequences and dataclasses of them. It comes on the
    device of training.

    Example:
        >>> class Clicks(Task):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.linear = nn.Linear(3, 1)
        ...     def forward(self, batch):
        ...         logits = self.linear(batch["x"]).squeeze(1)
        ...         loss = nn.functional.binary_cross_entropy_with_logits(logits, batch["label"])
        ...         return TaskOutput(loss, {"click": TaskScores(logits, batch["label"])})
    """

    @property
    def kept(self) -> nn.Module:
        """The module whose weights are saved: all of the task."""
        return self

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next((tensor.device for tensor in (*self.parameters(), *self.buffers())), torch.device("cpu"))

    def predict(self, batch: Any) -> dict[str, Tensor]:
        """By task the sigmoid of the logits, `[N]`, in eval mode and without gradients."""
        with evaluating(self), torch.no_grad():
            output = explained(self, moved(batch, self.device))
        return {name: scores.logits.float().sigmoid() for name, scores in output.scores.items()}

    def metrics_of(self, name: str) -> PointwiseMetrics:
        """What `evaluate` adds the rows of a task to. Override it for other cut-offs, bins, a training mean or more slices.

        Args:
            name: of the task, as in `TaskOutput.scores`.
        """
        return PointwiseMetrics(name)

    def evaluate(self, batches: Iterable[Any], part: str, *, progress: bool = True, all_processes: bool = True) -> Figures:
        """By task the figures of `jagged.pointwise.PointwiseMetrics`; under "all" the loss, the mean over all rows.

        Where `TaskScores` have slices, `click[device=3]` are the figures of the rows of one value.

        Of batches with drawn negatives (`jagged.data.moving.is_sampled`) they are those of `jagged.metrics.sampled_figures`:
        under "sampled" and `sampled_<task>`, without ne and calibration. One such batch in any process is enough.

        Weights are used in fp32 and in eval mode.

        Args:
            batches: a held-out part; on several processes each one's own.
            part: "valid" or "test", for tasks that treat them differently.
            progress: show a bar after two seconds.
            all_processes: add up over the processes of a `torch.distributed` group.

        Raises:
            ValueError: no rows, scores that are not finite, ids that are not int64 `[N]` or not of every batch, or a task of a
                name that has another meaning here.
            DataError: the temporary directory has no room for rows that do not fit into memory.
        """
        metrics, sums, sampled = self.measure(batches, progress=progress)
        if all_processes and several():
            total = sums.to(self.device)
            torch.distributed.all_reduce(total)
            sums = total.cpu()
            # A process without batches knows of no task.
            known: list[tuple[list[str], bool]] = [([], False)] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(known, (list(metrics), sampled))
            named = dict.fromkeys(name for names, _ in known for name in names)
            sampled = any(of for _, of in known)
            metrics = {name: metrics.get(name) or self.metrics_of(name) for name in named}
            for metric in metrics.values():
                metric.all_gather()
        if not metrics or not sums[1]:
            raise ValueError(f"the {part} part has no rows with a label to evaluate; give more data")
        if reserved := [name for name in metrics if name == "all" or is_sampled_group(name)]:
            raise ValueError(
                f"task: got the name {reserved[0]!r}, expected another: 'all' is the group of the loss, 'sampled' and names that "
                "begin with 'sampled_' are of figures over drawn negatives"
            )
        if reserved := [name for name in metrics if is_slice_group(name)]:
            raise ValueError(f"task: got the name {reserved[0]!r}, expected another: so ends the name of a slice's figures")
        groups = {"all": {"loss": float(sums[0] / sums[1])}, **{name: metric.compute() for name, metric in metrics.items()}}
        for name, metric in metrics.items():
            groups |= {slice_group(name, value): of for value, of in metric.compute_slices().items()}
        return sampled_figures(groups) if sampled else Figures(groups)

    def measure(self, batches: Iterable[Any], *, progress: bool = True) -> tuple[dict[str, PointwiseMetrics], Tensor, bool]:
        """Add up the rows of batches, in eval mode: what `evaluate` takes its figures from.

        Args:
            batches: a held-out part.
            progress: show a bar after two seconds.

        Returns:
            By task what its rows were added to; float64 `[2]`, the sum of the loss over all rows and their number; and whether
            there was a batch with drawn negatives.
        """
        metrics: dict[str, PointwiseMetrics] = {}
        sums, sampled = torch.zeros(2, dtype=torch.float64), False
        with evaluating(self), torch.no_grad():
            for batch in bar(batches, progress):
                sampled = sampled or is_sampled(batch)
                loss, scores = output = explained(self, moved(batch, self.device))
                counted = torch.stack([torch.as_tensor(x).double().cpu() for x in (loss, output.rows())])
                # The mean over no rows is no number.
                sums += torch.stack([counted.prod(), counted[1]]) if counted[1] else 0.0
                for name, of in scores.items():
                    if name not in metrics:
                        metrics[name] = self.metrics_of(name)
                    more: dict[str, Any] = {one: getattr(of, one) for one in ("users", "requests", "slices", "rates")}
                    metrics[name].update(of.logits, of.labels, of.mask, of.weights, **more)
        return metrics, sums, sampled


def explained(task: Callable[[Any], Any], batch: Any) -> Any:
    """What a task returns of a batch. To an index that is out of range a note is added where the batch has no label.

    Who writes `batch.labels[:, 0]` for a table without labels hears of dimension 1 alone.
    """
    try:
        return task(batch)
    except IndexError as error:
        # Whoever has such a batch has loaded this; a model alone needs no tables.
        from jagged.data.table_batches import Batch

        if isinstance(batch, Batch):
            try:
                batch.label()
            except DataError as reason:
                error.add_note(str(reason))
        raise
