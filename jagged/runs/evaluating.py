"""Evaluate what training left in a directory: the function behind `jagged evaluate`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from jagged.config import ConfigError
from jagged.evaluation import EvaluationError, evaluate_protocols
from jagged.metrics import DEFAULT_KS, IN_WORDS, Figures, shown_figure
from jagged.runs.labels.evaluating import LabelEvaluation, evaluate_labels
from jagged.runs.labels.run import LabelRun, is_label_run
from jagged.runs.ranking.evaluating import RankingEvaluation, evaluate_run, is_ranking_run
from jagged.runs.ranking.run import RankingRun
from jagged.runs.run import Run
from jagged.scoring import DEFAULT_MAX_BYTES


@dataclass(frozen=True)
class Evaluation:
    """Figures and what they are figures of.

    Attributes:
        metrics: by protocol and metric: `metrics.all_items["ndcg@10"]` where the whole catalogue is ranked,
            `metrics.unseen_items["ndcg@10"]` where the items of a user's history are taken out.
        part: "valid" or "test".
        split: how the part was held out.
        num_users: users evaluated.
        num_items: size of the catalogue; all of it is ranked for each user.
        same_data: whether the events are, by fingerprint, those the model was trained on; None where the run does not know.
        notes: counts: of the split, and `unknown_items`, `unknown_targets` (counted as misses) and `unknown_history_events`
            (left out) where the data has items that the model does not know.
    """

    metrics: Figures
    part: str
    split: str
    num_users: int
    num_items: int
    same_data: bool | None
    notes: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{self.part} part ({self.split}): {self.num_users:,} users, all {self.num_items:,} items ranked for each"]
        if not self.same_data:
            known = "not known to be" if self.same_data is None else "not"
            lines.append(f"note: these events are {known} those the model was trained on")
        if self.notes.get("unknown_items"):
            lines.append(
                f"note: {self.notes['unknown_items']:,} items are unknown to the model: "
                f"{self.notes['unknown_targets']:,} targets count as misses, "
                f"{self.notes['unknown_history_events']:,} events are left out of histories"
            )
        lines.append("".join([f"{'metric':<13}", *(f"{IN_WORDS[protocol]:>24}" for protocol in self.metrics)]))
        for name in next(iter(self.metrics.values())):
            lines.append("".join([f"{name:<13}", *(f"{shown_figure(figures[name]):>24}" for figures in self.metrics.values())]))
        return "\n".join(lines)


def evaluate(
    directory: str | os.PathLike[str],
    data: Any = None,
    *,
    part: Literal["valid", "test"] = "test",
    filter_viewed: bool | None = None,
    ks: Sequence[int] | None = None,
    format: str = "auto",
    user_column: str | None = None,
    item_column: str | None = None,
    timestamp_column: str | None = None,
    device: str = "auto",
    batch_size: int | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
    slices: Sequence[str] = (),
    events: Any = None,
    negative_rate: float | None = None,
    progress: bool = True,
) -> Evaluation | RankingEvaluation | LabelEvaluation:
    """Evaluate what training left in a directory; the function behind `jagged evaluate`.

    Of a run on a table's requests, all rows of other data are evaluated, and `slices`, `events` and `negative_rate` are as of
    `jagged.runs.ranking.evaluating.evaluate_run`, whose result this has; `filter_viewed` and names of columns are for runs on
    events, and `ks` for these and for runs on sets of labels, of which `jagged.runs.labels.evaluating.evaluate_labels` tells.

    Items of other data that the model does not know are left out of histories; as targets they count as misses, since no
    ranking of the model's catalogue can hold them.

    Args:
        directory: a run's directory.
        data: events to evaluate on, as a `SequenceDataset`, a path, or a table in memory (a frame of pandas or polars, an Arrow
            table); split as the run's configuration says; by default those the run was trained on.
        part: the held-out part.
        filter_viewed: whether to take the items of a user's history out of the ranking; None for both, one after the other.
        ks: cut-offs; None for 5, 10 and 20, of a run on sets of labels for its own.
        format: of `data`: "auto" (by name), "text", "csv" or "parquet".
        user_column, item_column, timestamp_column: names of columns of `data`, by default those of the run's configuration.
        device: "auto" (the GPU where there is one), "cpu" or "cuda".
        batch_size: users at a time; by default the run's `eval_batch_size`.
        max_bytes: bound on the memory that grows with users times items.
        slices: of a run on a table: columns of one id a row, whose values have figures of their own.
        events: of a run on a table: that histories of `data` are gathered from; None for the run's own.
        negative_rate: of a run on a table: at which rate rows of `data` with the label 0 were kept; None where all were.
        progress: show progress bars after two seconds.

    Raises:
        ConfigError: an unknown part or device, or an option of the other kind of run.
        EvaluationError: the directory has no data and none is given, nothing is held out, or the model's scores are not finite.
        CheckpointError: the directory is no run, or a file of it is damaged.
        DataError: the data cannot be used.
    """
    of_table = {"slices": slices or None, "events": events, "negative_rate": negative_rate}
    columns = {"user_column": user_column, "item_column": item_column, "timestamp_column": timestamp_column}
    if is_label_run(directory):
        refuse_options(directory, {"filter_viewed": filter_viewed, **columns}, "events")
        refuse_options(directory, of_table, "a table")
        if format != "auto":
            raise ConfigError(f"format: got {format}, expected auto: rows of labels have one format")
        labels = LabelRun.open(directory, device=device)
        return evaluate_labels(labels, data, part=part, ks=ks, batch_size=batch_size, progress=progress)
    if is_ranking_run(directory):
        given = {"filter_viewed": filter_viewed, **columns, "ks": ks}
        refuse_options(directory, given, "events")
        opened = RankingRun.open(directory, device=device)
        told: dict[str, Any] = {**of_table, "slices": slices, "format": format, "batch_size": batch_size, "progress": progress}
        return evaluate_run(opened, data, part=part, **told)
    refuse_options(directory, of_table, "a table")
    if part not in ("valid", "test"):
        raise ConfigError(f"part: got {part!r}, expected 'valid' or 'test'")
    run = Run.open(directory, device=device)
    dataset = run.read(data, format=format, columns=columns, progress=progress)
    split = run.split(dataset)
    held_out = split.test if part == "test" else split.valid
    if not len(held_out):
        # A dataset that was read lies in a temporary directory, whose name says nothing.
        where = os.fspath(data) if isinstance(data, (str, os.PathLike)) else repr(dataset)
        raise EvaluationError(f"{where}: no user has a held-out event in the {part} part; users need at least 3 events")
    protocols = (False, True) if filter_viewed is None else (filter_viewed,)
    run.check_times(dataset)
    loader = run.loader(held_out, with_viewed=True in protocols, batch_size=batch_size)
    metrics = evaluate_protocols(
        run.model,
        loader,
        train_counts=run.train_counts(),
        filter_viewed=protocols,
        ks=DEFAULT_KS if ks is None else ks,
        max_bytes=max_bytes,
        progress=progress,
        all_processes=False,
    )
    notes = split.notes | held_out.unknown()
    same_data = None if run.fingerprint is None else run.fingerprint == dataset.fingerprint
    return Evaluation(metrics, part, split.name, len(held_out), len(run.items), same_data, notes)


def refuse_options(directory: str | os.PathLike[str], given: Mapping[str, Any], kind: str) -> None:
    """Refuse options that are for runs on something else than this one."""
    for name, value in given.items():
        if value is not None:
            raise ConfigError(f"{name}: got {value}, expected none: it is for runs on {kind}, and {directory} is none")
