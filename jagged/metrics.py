"""Ranking metrics over a whole catalogue, kept as integer counts.

Every figure is a function of two histograms: how often the target stood at each rank, and how often each item was shown. Both
are integers, so the result depends neither on how users were batched nor on how they were spread over processes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from jagged.artifacts import CheckpointError, Expected, errors_as, message, read_tensors, save_tensors

#: Rank of a target that the model cannot rank (it is not in its catalogue): beyond every cut-off.
MISS = torch.iinfo(torch.int64).max

#: The protocols by the names that figures have: all items of the catalogue are ranked, or those of a user's history are left out.
ALL_ITEMS, UNSEEN_ITEMS = "all_items", "unseen_items"
#: What people read in their place.
IN_WORDS = {ALL_ITEMS: "seen items left in", UNSEEN_ITEMS: "seen items taken out"}

#: The group of the loss over drawn negatives; before a task's name, `sampled_click`, of its figures.
SAMPLED = "sampled"
#: Figures that drawn negatives have not, and why.
WITHHELD = ("ne", "ne_of_training", "calibration")
WITHHELD_BECAUSE = (
    "ne and calibration are withheld: with drawn negatives the share of positives is what was chosen, not what users do"
)

#: What people read in place of a figure that is not defined.
UNDEFINED = "-"

#: Cut-offs where none are asked for.
DEFAULT_KS = (5, 10, 20)

_COUNTS_FILE = "train_counts.safetensors"

Value = TypeVar("Value", covariant=True)


class _Named(Mapping[str, Value], Generic[Value]):
    """An immutable mapping that says what it holds where it is asked for something else."""

    __slots__ = ("_values",)
    _kind = "metric"

    def __init__(self, values: Mapping[str, Value]) -> None:
        self._values = dict(values)

    def __getitem__(self, name: str) -> Value:
        try:
            return self._values[name]
        except KeyError:
            raise KeyError(self._missing(name)) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._told()})"

    def _told(self) -> str:
        return "{" + ", ".join(f"{name!r}: {self._one_told(value)}" for name, value in self._values.items()) + "}"

    def _one_told(self, value: Any) -> str:
        return repr(value)

    def _missing(self, name: str) -> str:
        return f"{self._kind}: got {name!r}, expected {' or '.join(self) or 'none: there are no figures'}"

    def to_json(self) -> dict[str, Any]:
        """The same as plain dicts."""
        return dict(self._values)


class Group(_Named[float]):
    """Figures of one protocol by metric and cut-off: `group["ndcg@10"]`.

    A figure that is not defined, as the AUC of positives alone, is NaN; in JSON it is null, and people read "-".
    """

    __slots__ = ("_name",)

    def __init__(self, values: Mapping[str, float | None], name: str = "") -> None:
        super().__init__({key: math.nan if value is None else value for key, value in values.items()})
        self._name = name

    def __eq__(self, other: object) -> bool:
        # What is undefined in both is equal, as null is.
        return dict(_without_nan(self)) == dict(_without_nan(other)) if isinstance(other, Mapping) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def to_json(self) -> dict[str, Any]:
        """The same as a plain dict, None in place of NaN."""
        return dict(_without_nan(self))

    def _one_told(self, value: float) -> str:
        return UNDEFINED if is_undefined(value) else repr(value)

    def _missing(self, name: str) -> str:
        withheld = name in WITHHELD and is_sampled_group(self._name)
        return super()._missing(name) + (f"; {WITHHELD_BECAUSE}" if withheld else "")


class Figures(_Named[Group]):
    """Figures by group, and by metric in it: `figures.all_items["ndcg@10"]`, or `figures["all_items"]["ndcg@10"]`.

    A group is a task or a protocol: `all_items` ranks the whole catalogue, `unseen_items` leaves out the user's history. Figures
    over drawn negatives say so: `sampled`, and `sampled_click` of the task `click`. Rows of one value of a slice have a group of
    their own, `figures["click[device=3]"]`. What is not defined is NaN, and null in JSON, which becomes NaN again.
    Immutable; equal to plain dicts of the same content.

    Args:
        groups: by the group's name its figures.

    Raises:
        KeyError, AttributeError: for a group or metric that is not there; the message lists those that are.
    """

    __slots__ = ()
    _kind = "group of figures"

    def __init__(self, groups: Mapping[str, Mapping[str, float | None]]) -> None:
        super().__init__({name: Group(figures, name) for name, figures in groups.items()})

    def _one_told(self, value: Group) -> str:
        return value._told()

    def __getattr__(self, name: str) -> Group:
        # Names of Python's own protocols are asked for before there are values.
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in self._values:
            raise AttributeError(self._missing(name))
        return self._values[name]

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self]

    def to_json(self) -> dict[str, Any]:
        """The same as plain dicts."""
        return {name: group.to_json() for name, group in self.items()}


def sampled_figures(groups: Mapping[str, Mapping[str, float]]) -> Figures:
    """Figures of tasks over drawn negatives: they depend on how many were drawn and how, so their groups say it.

    `all` becomes `sampled`, `click` `sampled_click`. `ne`, `ne_of_training` and `calibration` are left out: drawn negatives have
    the share of positives that was chosen.

    Args:
        groups: by task its figures, under "all" those of all tasks.
    """
    return Figures(
        {
            SAMPLED if name == "all" else f"{SAMPLED}_{name}": {key: of[key] for key in of if key not in WITHHELD}
            for name, of in groups.items()
        }
    )


def slice_group(task: str, value: str) -> str:
    """The name of the group of a task's rows with one value of a slice, `device=3`: `click[device=3]`."""
    return f"{task}[{value}]"


def is_slice_group(name: str) -> bool:
    """Whether a group of figures is one of `slice_group`."""
    return name.endswith("]") and "[" in name


def is_undefined(value: float | None) -> bool:
    """Whether a figure is NaN, or null in JSON."""
    return value is None or value != value


def shown_figure(value: float | None) -> str:
    """A figure with four places, as people read it; "-" where it is not defined."""
    return UNDEFINED if value is None or is_undefined(value) else f"{value:.4f}"


def _without_nan(figures: Mapping[Any, Any]) -> Iterator[tuple[Any, Any]]:
    return ((name, None if isinstance(value, float) and is_undefined(value) else value) for name, value in figures.items())


def is_sampled_group(name: str) -> bool:
    """Whether a group of figures is one of `sampled_figures`."""
    return name == SAMPLED or name.startswith(f"{SAMPLED}_")


def in_words(group: str) -> str:
    """What people read in place of a group's name."""
    if is_sampled_group(group):
        task = group[len(SAMPLED) + 1 :]
        return f"{task}, against drawn negatives" if task else "against drawn negatives"
    return IN_WORDS.get(group, group)


class Best(NamedTuple):
    """The validation that chose a run's weights.

    Attributes:
        epoch, step: when it was, both from 1.
        value: of the monitored metric.
        group: of the figures that it is in: a protocol, or a task.
    """

    epoch: int
    step: int
    value: float
    group: str


@dataclass(frozen=True)
class RunMetrics:
    """What a run reached: the content of `metrics.json`.

    Attributes:
        monitor: the metric that chose the weights; empty after a dry run.
        best: when and what it was; None after a dry run.
        valid, test: the figures of the chosen weights, `metrics.test.all_items["ndcg@10"]`.
    """

    monitor: str = ""
    best: Best | None = None
    valid: Figures = field(default_factory=lambda: Figures({}))
    test: Figures = field(default_factory=lambda: Figures({}))

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> RunMetrics:
        """Read what `to_json` gave."""
        return cls(content["monitor"], Best(**content["best"]), Figures(content["valid"]), Figures(content["test"]))

    def to_json(self) -> dict[str, Any]:
        """The content as plain dicts."""
        return {
            "monitor": self.monitor,
            "best": self.best and self.best._asdict(),
            "valid": self.valid.to_json(),
            "test": self.test.to_json(),
        }


def cut_offs(monitor: str) -> tuple[int, ...]:
    """The usual cut-offs and that of a metric, `ndcg@7`."""
    return tuple(sorted({*DEFAULT_KS, int(monitor.partition("@")[2])}))


@dataclass(frozen=True)
class TrainCounts:
    """How many training users had each item.

    Args:
        users_per_item: `[V]` int64, users with at least one training event of the item.
        num_users: users with at least one training event.
    """

    users_per_item: Tensor
    num_users: int

    @classmethod
    def from_part(cls, part: Any, *, chunk_users: int = 1 << 16) -> TrainCounts:
        """Count a `SequencePart` with one row a user, `chunk_users` rows at a time; a user who had an item twice counts once."""
        num_items = part.num_items
        counts = torch.zeros(num_items, dtype=torch.int64)
        for first in range(0, len(part.user), chunk_users):
            start, end = part.start[first : first + chunk_users], part.end[first : first + chunk_users]
            length = end - start
            before = torch.cumsum(length, 0) - length
            event = torch.arange(int(length.sum())) + torch.repeat_interleave(start - before, length)
            items = part.items(event)
            pairs = torch.repeat_interleave(torch.arange(len(length)), length) * num_items + items
            if part.numbers is not None:
                pairs = pairs[items >= 0]
            counts += torch.bincount(torch.unique(pairs) % max(num_items, 1), minlength=num_items)
        return cls(counts, int((part.end > part.start).sum()))

    def save(self, directory: str | Path) -> None:
        """Write `train_counts.safetensors` into a run's directory.

        Raises:
            OSError: it cannot be written.
        """
        tensors = {"users_per_item": self.users_per_item, "num_users": torch.tensor([self.num_users])}
        save_tensors(Path(directory) / _COUNTS_FILE, tensors)

    @classmethod
    def load(cls, directory: str | Path, num_items: int | None = None) -> TrainCounts | None:
        """Read what `save` wrote; None where the directory has no counts.

        Args:
            directory: of the run.
            num_items: size of its catalogue, where it is known.

        Raises:
            CheckpointError: the file is damaged, or counts another catalogue.
        """
        path = Path(directory) / _COUNTS_FILE
        if not os.path.lexists(path):
            return None
        expected = {"users_per_item": Expected(("I64",), (num_items,)), "num_users": Expected(("I64",), (1,))}
        with errors_as(CheckpointError):
            stored = read_tensors(path, expected)
        counts, num_users = stored["users_per_item"], int(stored["num_users"])
        if bool((counts < 0).any()) or bool((counts > num_users).any()):
            raise CheckpointError(message(path, "counts out of range", f"0 to {num_users}", "copy it again"))
        return cls(counts, num_users)


class RankingMetrics:
    """NDCG, Recall, MRR, Coverage and Surprisal at several cut-offs, for one held-out target a user.

    With `r` the target's rank (0 is best) and means over users:

    * `ndcg@k`: `1 / log2(r + 2)` if `r < k`, else 0 (one relevant item, so the ideal gain is 1).
    * `recall@k`: 1 if `r < k`, else 0. With one target this is the hit rate, HR@k.
    * `mrr@k`: `1 / (r + 1)` if `r < k`, else 0.
    * `coverage@k`: training items shown in at least one user's first k, divided by all training items.
    * `surprisal@k`: mean over all shown slots of `log2(U / u_j) / log2(U)`, where `u_j` of the `U` training users had item j;
      an item without a training user counts 1. 0 is an item everyone had, 1 one that a single user had. (Normalised
      self-information: Kaminskas & Bridge, "Diversity, Serendipity, Novelty, and Coverage", ACM TiiS 7(1), 2016, section 3.)

    Args:
        num_items: size of the catalogue, V.
        train_counts: training users of each item, `TrainCounts`.
        ks: the cut-offs, any; one beyond the catalogue counts all of it.
        device: where the counts live; `update` then runs there without a synchronisation.

    Raises:
        ValueError: a cut-off below 1 or given twice, none given, or counts of another catalogue.
    """

    def __init__(
        self,
        num_items: int,
        train_counts: TrainCounts,
        ks: Sequence[int] = DEFAULT_KS,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        if not ks or min(ks) < 1 or len(set(ks)) != len(ks):
            raise ValueError(f"ks: got {tuple(ks)}, expected distinct cut-offs of at least 1, for example (5, 10, 20)")
        if train_counts.users_per_item.shape != (num_items,):
            raise ValueError(
                f"train_counts.users_per_item: got shape {tuple(train_counts.users_per_item.shape)}, expected ({num_items},); "
                "count the training part of the data set that the model was trained on"
            )
        self.num_items, self.train_counts, self.ks = num_items, train_counts, tuple(sorted(ks))
        #: How many of each user's best items count.
        self.depth = min(self.ks[-1], num_items)
        # Target ranks below the depth, then all others; then how often each item was shown within each cut-off.
        self._ranks = torch.zeros(self.depth + 1, dtype=torch.int64, device=device)
        self._shown = torch.zeros(len(self.ks), num_items + 1, dtype=torch.int64, device=device)

    def update(self, ranks: Tensor, top: Tensor) -> None:
        """Add users.

        Args:
            ranks: `[B]` int64, 0-based rank of each user's target; `MISS` if it was not ranked.
            top: `[B, depth]` or wider, int64, each user's best items in order; -1 where there are fewer.
        """
        if ranks.dim() != 1 or top.dim() != 2 or len(top) != len(ranks) or top.shape[1] < self.depth:
            raise ValueError(
                f"ranks, top: got shapes {tuple(ranks.shape)} and {tuple(top.shape)}, "
                f"expected [B] and [B, {self.depth}] (the largest cut-off, or the catalogue) or wider"
            )
        self._ranks.scatter_add_(0, ranks.clamp(max=self.depth), torch.ones_like(ranks))
        for row, k in zip(self._shown, self.ks, strict=True):
            shown = top[:, :k].flatten()
            row.scatter_add_(0, torch.where(shown < 0, self.num_items, shown), torch.ones_like(shown))

    def merge(self, other: RankingMetrics) -> None:
        """Add the users of another object with the same catalogue and cut-offs."""
        if (other.num_items, other.ks) != (self.num_items, self.ks):
            raise ValueError(
                f"other: got {other.num_items} items and cut-offs {other.ks}, expected {self.num_items} and {self.ks}"
            )
        self._ranks += other._ranks.to(self._ranks.device)
        self._shown += other._shown.to(self._shown.device)

    def all_reduce(self, group: Any = None) -> None:
        """Add up the users of all processes of a `torch.distributed` group; afterwards every one holds the sum."""
        torch.distributed.all_reduce(self._ranks, group=group)
        torch.distributed.all_reduce(self._shown, group=group)

    @property
    def num_users(self) -> int:
        """Users seen so far."""
        return int(self._ranks.sum())

    def compute(self) -> dict[str, float]:
        """All figures, `{"ndcg@5": ..., ...}`, in float64.

        Raises:
            ValueError: no user was added.
        """
        ranks, shown = self._ranks.double().cpu(), self._shown[:, :-1].cpu()
        users = ranks.sum()
        if not users:
            raise ValueError("no user has a held-out target to evaluate; check the split or choose another part")
        position = torch.arange(self.depth, dtype=torch.float64)
        ranks = ranks[: self.depth]
        had = self.train_counts.users_per_item.cpu()
        surprisal = _surprisal(had, self.train_counts.num_users)
        result = {}
        gains = {"ndcg": 1 / torch.log2(position + 2), "recall": torch.ones_like(position), "mrr": 1 / (position + 1)}
        for name, gain in gains.items():
            for k in self.ks:
                result[f"{name}@{k}"] = float((ranks[:k] * gain[:k]).sum() / users)
        for k, row in zip(self.ks, shown, strict=True):
            result[f"coverage@{k}"] = float(((row > 0) & (had > 0)).sum().double() / (had > 0).sum().clamp(min=1))
        for k, row in zip(self.ks, shown, strict=True):
            result[f"surprisal@{k}"] = float((row * surprisal).sum() / row.sum().clamp(min=1))
        return result


def _surprisal(users_per_item: Tensor, num_users: int) -> Tensor:
    """`[V]` float64 normalised self-information of each item."""
    if num_users < 2:
        # One user's items are no surprise to anybody, and log2(1) cannot normalise.
        return (users_per_item == 0).double()
    users = torch.tensor(num_users, dtype=torch.float64)
    return torch.log2(users / users_per_item.clamp(min=1)) / torch.log2(users)
