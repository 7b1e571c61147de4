"""The page of a run on a table: metrics by task and slice, calibration, scores, coverage of features, and leak checks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jagged import charts
from jagged.config import RankingConfig
from jagged.data import Kind, Part
from jagged.data.expressions import LISTS
from jagged.data.schema import WITH_IDS, Column
from jagged.data.table_leaks import Leaks
from jagged.metrics import Figures, in_words, is_slice_group, sampled_figures, shown_figure, slice_group
from jagged.pointwise.probabilities import CalibrationBin, Histogram
from jagged.runs.page import TEMPLATES, history_pictures, origin, read_history, unit
from jagged.runs.ranking.evaluating import named, slicing
from jagged.runs.ranking.going_on import known_encoders
from jagged.runs.ranking.run import RankingRun, split_dataset
from jagged.versions import installed

# Columns of at most so many ids are slices of their own, so many columns.
_FEW_IDS, _SLICES = 12, 4

# What each count of `Split.leaks` would mean.
LEAKS = {
    "rows_across_parts": "validation and test rows whose user, candidate and time an earlier part has, too",
    "requests_across_parts": "requests with rows in several parts",
    "histories_too_late": "rows whose history has an event that they may not know, or another user's",
    "unsupported_ids": "ids of vocabularies that training does not have as often as it must",
    "unsupported_statistics": "columns of numbers whose statistics are not those of training",
}


@dataclass(frozen=True)
class Coverage:
    """How much of a column there is.

    Attributes:
        column: what it is.
        rows: of its embedding table; None of numbers.
        missing: shares of values that are missing, in training and in the part.
        unseen: the share of the part's ids that training has not seen; None of numbers.
    """

    column: Column
    rows: int | None
    missing: tuple[float, float]
    unseen: float | None


@dataclass(frozen=True)
class RankingFacts:
    """What the page of a run on a table is made of.

    Attributes:
        directory: the run's directory.
        config: its resolved configuration.
        split: as it is saved with the model.
        part: the held-out part, "valid" or "test"; num_rows, num_requests: of it.
        metrics: by task, and by slice with the user's ids.
        calibration, histograms: by task, for pictures; a task whose labels are not 0 and 1, or whose scores are
            no probabilities, has no calibration.
        history: a row for each validation.
        leaks: what `Split.leaks` found.
        coverage: of each column.
        versions: by distribution.
    """

    directory: Path
    config: RankingConfig
    split: Mapping[str, Any]
    part: str
    num_rows: int
    num_requests: int
    metrics: Figures
    calibration: Mapping[str, Sequence[CalibrationBin]]
    histograms: Mapping[str, Histogram]
    history: Sequence[Mapping[str, float]]
    leaks: Leaks
    coverage: Sequence[Coverage]
    versions: Mapping[str, str]

    @property
    def tasks(self) -> dict[str, Mapping[str, float]]:
        """The figures of all rows, by task."""
        return {name: of for name, of in self.metrics.items() if not is_slice_group(name) and "loss" not in of}


def gather_ranking(directory: str | os.PathLike[str], *, part: str = "test", progress: bool = True) -> RankingFacts:
    """Evaluate a run anew, make its split anew, and collect what the page shows.

    Raises:
        ConfigError: the directory holds no rows.
        CheckpointError: it is no run on a table, or a file of it is damaged.
        DataError: the run's rows are damaged.
    """
    run = RankingRun.open(directory)
    split = split_dataset(run.config, run.dataset, known_encoders(run), progress=progress)
    chosen: Part = run.part(part)
    metrics, histograms, bins = _measured(run, chosen, progress)
    return RankingFacts(
        directory=Path(directory),
        config=run.config,
        split=run.opened.split,
        part=part,
        num_rows=len(chosen.rows),
        num_requests=len(chosen),
        metrics=metrics,
        calibration=bins,
        histograms=histograms,
        history=read_history(Path(directory) / "history.jsonl", (unit(run.config), "loss", "monitored")),
        leaks=split.leaks(progress=progress),
        coverage=[_coverage(run, split.train, chosen, column) for column in _features(run)],
        versions=installed(),
    )


def _measured(
    run: RankingRun, part: Part, progress: bool
) -> tuple[Figures, dict[str, Histogram], dict[str, Sequence[CalibrationBin]]]:
    loader = part.loader(
        batch_size=run.config.evaluation.eval_batch_size,
        max_history=run.config.data.max_history,
        seed=run.config.seed,
        **run.config.data.drawing(),
    )
    with slicing(run, _few_valued(run)):
        metrics, sums, sampled = run.model.measure(loader, progress=progress)
    groups: dict[str, Mapping[str, float]] = {"all": {"loss": float(sums[0] / sums[1])}}
    bins: dict[str, Sequence[CalibrationBin]] = {}
    for name, metric in metrics.items():
        groups[name] = metric.compute()
        groups |= {named(run, slice_group(name, value)): of for value, of in metric.compute_slices().items()}
        if "logloss" in groups[name] and not sampled:
            bins[name] = metric.calibration_bins()
    figures = sampled_figures(groups) if sampled else Figures(groups)
    return figures, {name: metric.score_histogram() for name, metric in metrics.items()}, bins


def _features(run: RankingRun) -> list[Column]:
    kinds = (*WITH_IDS, Kind.NUMBER, Kind.NUMBERS)
    return run.schema.of_kind(*kinds)


def _few_valued(run: RankingRun) -> list[str]:
    """The columns of one id a row with few ids: the first ones are shown as slices."""
    columns = run.schema.of_kind(Kind.ID, Kind.EVENT)
    sizes = {one.name: run.encoders[one.table_name].size - 2 for one in columns if not set(one.name) & set("[]=/")}
    return [name for name, size in sizes.items() if size <= _FEW_IDS][:_SLICES]


def _coverage(run: RankingRun, train: Part, part: Part, column: Column) -> Coverage:
    has_ids = column.kind in WITH_IDS
    missing, unseen = [], 0.0
    for of in (train, part):
        stored = of.dataset
        if column.kind in LISTS:
            offsets, values = stored.list_column(column.name)
            here = np.zeros(len(stored), np.bool_)
            here[of.rows] = True
            values = values[np.repeat(here, np.diff(offsets))]
        else:
            values = stored.column(column.name)[of.rows]
        is_missing = values < 0 if has_ids else np.isnan(values)
        missing.append(float(is_missing.mean()) if len(values) else 0.0)
        if has_ids and of is part and len(values):
            unseen = float((part.maps[column.table_name][values + 1] == 1).mean())
    rows = run.encoders[column.table_name].size if has_ids else None
    return Coverage(column, rows, (missing[0], missing[1]), unseen if has_ids else None)


def render_ranking(facts: RankingFacts) -> str:
    """The page as HTML."""
    names = list(dict.fromkeys(name for figures in facts.tasks.values() for name in figures))
    pictures = _pictures(facts, charts.PAGE).items()
    return TEMPLATES.get_template("ranking.html").render(
        facts=facts,
        tasks=[in_words(name) for name in facts.tasks],
        metrics=[[name, *(_figure(name, of.get(name)) for of in facts.tasks.values())] for name in names],
        slices=[
            [name, f"{int(of['rows']):,}", *(shown_figure(of.get(key)) for key in ("auc", "gauc", "logloss", "calibration"))]
            for name, of in facts.metrics.items()
            if is_slice_group(name)
        ],
        pictures=[(charts.to_svg(figure, name), caption) for name, (figure, caption) in pictures],
        leaks=[
            (LEAKS.get(name, name), f"{count:,}", "found" if count else "none", "; ".join(facts.leaks.examples.get(name, ())))
            for name, count in facts.leaks.counts.items()
        ],
        coverage=[
            (
                one.column.name,
                one.column.kind.value,
                one.column.table_name if one.rows is not None else "",
                "" if one.rows is None else f"{one.rows:,}",
                *(f"{share:.2%}" for share in one.missing),
                "" if one.unseen is None else f"{one.unseen:.2%}",
            )
            for one in facts.coverage
        ],
        data=[(name, f"{count:,}") for name, count in {**facts.split["reading"], **facts.split["counts"]}.items()],
        origin=origin(facts.config, facts.versions, facts.split),
    )


def _figure(name: str, value: float | None) -> str:
    return f"{int(value):,}" if value is not None and (name == "rows" or name.startswith("values_left")) else shown_figure(value)


def _pictures(facts: RankingFacts, palette: charts.Palette) -> dict[str, tuple[Any, str]]:
    """By name each picture and its caption."""
    result = history_pictures(facts.history, facts.config, palette)
    for number, (task, histogram) in enumerate(facts.histograms.items()):
        if task in facts.calibration:
            points = [(one.predicted, one.observed) for one in facts.calibration[task]]
            caption = f"Calibration of {task}: bins of the same weight by ascending score."
            result[f"calibration-{number}"] = (charts.calibration(points, palette), caption)
        picture = charts.score_histogram(histogram.edges, histogram.positives, histogram.others, palette)
        result[f"scores-{number}"] = (picture, f"Scores of {task}, of rows with the label 1 and of the others.")
    return result


def write_ranking_pictures(facts: RankingFacts, directory: Path) -> list[Path]:
    """Write the page's pictures as PNG files: `loss.png`, `metric.png`, `calibration-0.png`, `scores-0.png`, ..."""
    return [charts.to_png(figure, directory / f"{name}.png") for name, (figure, _) in _pictures(facts, charts.LIGHT).items()]
