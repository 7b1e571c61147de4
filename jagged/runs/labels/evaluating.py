"""Evaluate a model of rows with sets of labels: the function behind `jagged evaluate` of such a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jagged.config import ConfigError
from jagged.metrics import Figures, shown_figure
from jagged.runs.labels.run import LabelRun

_PARTS = ("train", "valid", "test")
_COLUMN = 9


@dataclass(frozen=True)
class LabelEvaluation:
    """Figures and what they are figures of.

    Attributes:
        metrics: `metrics.labels["p@1"]` and others, and under "all" the loss.
        part: "train", "valid" or "test"; "all" of other rows.
        split: how the part was held out; "" of other rows.
        num_labels: labels that are ranked for each row.
    """

    metrics: Figures
    part: str
    split: str
    num_labels: int

    def __str__(self) -> str:
        figures = self.metrics["labels"]
        without = int(figures["samples_without_positives"])
        what = f"{self.part} part ({self.split})" if self.split else "all rows"
        left_out = f" ({without:,} more without a label are left out)" if without else ""
        head = f"{what}: {int(figures['samples']):,} rows{left_out}, all {self.num_labels:,} labels ranked for each"
        rows = [*table_of_figures(figures), ["loss", shown_figure(self.metrics["all"]["loss"])]]
        return "\n".join([head, *("".join([f"{first:<8}", *(f"{cell:>{_COLUMN}}" for cell in cells)]) for first, *cells in rows)])


def table_of_figures(figures: Mapping[str, float]) -> list[list[str]]:
    """A row of cut-offs, then one for each metric; the first column has its name."""
    by_name: dict[str, dict[int, float]] = {}
    for name, value in figures.items():
        metric, is_cut, k = name.partition("@")
        if is_cut:
            by_name.setdefault(metric, {})[int(k)] = value
    ks = sorted(next(iter(by_name.values())))
    return [["", *(f"@{k}" for k in ks)], *([name, *(shown_figure(of[k]) for k in ks)] for name, of in by_name.items())]


def evaluate_labels(
    run: LabelRun,
    data: Any = None,
    *,
    part: str = "test",
    ks: Sequence[int] | None = None,
    batch_size: int | None = None,
    progress: bool = True,
) -> LabelEvaluation:
    """Figures of a held-out part, or of all other rows that are given.

    Args:
        run: the run.
        data: rows with labels, as `MultiLabelRows` or a file of them; all of them are evaluated. None: the run's own part.
        part: the part of the run's rows.
        ks: cut-offs; None for the run's.
        batch_size: rows at a time; by default the run's `eval_batch_size`.
        progress: show bars after two seconds.

    Raises:
        ConfigError: an unknown part, or a directory without rows where none are given.
        DataError: the rows cannot be used.
    """
    if part not in _PARTS:
        raise ConfigError(f"part: got {part!r}, expected 'train', 'valid' or 'test'")
    rows = getattr(run.parts, part) if data is None else run.read(data, progress=progress)
    if not len(rows):
        raise ConfigError("data: got no rows, expected at least one")
    figures = run.model.evaluate(run.loader(rows, batch_size), "test", ks=ks, progress=progress, all_processes=False)
    return LabelEvaluation(
        figures, part if data is None else "all", "" if data is not None else str(run.split["name"]), run.model.head.num_labels
    )
