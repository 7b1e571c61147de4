"""Evaluate a ranking model on held-out requests: the function behind `jagged evaluate` of a run on a table."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jagged.config import ConfigError
from jagged.data import Kind, Part
from jagged.data.errors import shown
from jagged.metrics import Figures, in_words, is_slice_group, shown_figure
from jagged.models.pretrained import ENCODERS
from jagged.runs.ranking.run import RankingRun

_PARTS = ("train", "valid", "test")


@dataclass(frozen=True)
class RankingEvaluation:
    """Figures and what they are figures of.

    Attributes:
        metrics: by task and metric, `metrics.click["auc"]`; under "all" the loss; of a slice `metrics["click[device=phone]"]`.
        part: "train", "valid" or "test"; "all" of other data.
        split: how the part was held out; "" of other data.
        num_rows, num_requests: evaluated.
    """

    metrics: Figures
    part: str
    split: str
    num_rows: int
    num_requests: int

    def __str__(self) -> str:
        what = f"{self.part} part (by {self.split})" if self.split else "all rows"
        lines = [f"{what}: {self.num_rows:,} rows, {self.num_requests:,} requests"]
        tasks = {name: of for name, of in self.metrics.items() if not is_slice_group(name)}
        wide = max(map(len, map(in_words, tasks)), default=0)
        for name, figures in tasks.items():
            told = [f"{figure} {shown_figure(value)}" for figure, value in figures.items() if figure != "rows"]
            lines.append(f"{in_words(name):<{wide}}  {', '.join(told)}")
        slices = {name: of for name, of in self.metrics.items() if is_slice_group(name)}
        if slices:
            wide = max(map(len, slices))
            columns = ("rows", "auc", "gauc", "logloss", "calibration")
            lines.append("".join([f"{'slice':<{wide}}", *(f"{column:>13}" for column in columns)]))
            for name, figures in slices.items():
                values = [figures.get(column) for column in columns]
                told = [f"{int(values[0] or 0):>13,}", *(f"{shown_figure(value):>13}" for value in values[1:])]
                lines.append("".join([f"{name:<{wide}}", *told]))
        return "\n".join(lines)


def evaluate_run(
    run: RankingRun,
    data: Any = None,
    *,
    part: str = "test",
    slices: Sequence[str] = (),
    events: Any = None,
    negative_rate: float | None = None,
    format: str = "auto",
    batch_size: int | None = None,
    progress: bool = True,
) -> RankingEvaluation:
    """Figures of a held-out part, or of all rows of other data.

    Args:
        run: the run.
        data: rows with labels, as a path or a table in memory; all of them are evaluated. None: the run's own part.
        part: the held-out part of the run's data.
        slices: columns of one id a row, whose values have figures of their own, those with the most rows.
        events: that histories of `data` are gathered from; None for the run's own.
        negative_rate: of `data`, at which rate its rows with the label 0 were kept, so that figures are those of all rows; None
            where all were. For its own part the run has one of its own.
        format: of `data`.
        batch_size: requests at a time; by default the run's `eval_batch_size`.
        progress: show bars after two seconds.

    Raises:
        ConfigError: an unknown part or slice; a directory without data where none is given; a rate that says nothing of the
            run's tasks.
        DataError: the data cannot be used.
    """
    if part not in _PARTS:
        raise ConfigError(f"part: got {part!r}, expected 'train', 'valid' or 'test'")
    check_slices(run, slices)
    if data is None and events is not None:
        raise ConfigError("events: given without data, whose histories they are for")
    if data is None and negative_rate is not None:
        raise ConfigError(f"negative_rate: got {negative_rate} without data, expected none; the run knows that of its own rows")
    rows = None if data is None else run.read(data, events, labels=True, format=format, progress=progress)
    chosen = run.part(part) if rows is None else run.whole(rows)
    rate = run.config.data.negative_rate if data is None else negative_rate
    with thinned(run, rate):
        figures = figures_of(run, chosen, slices, batch_size=batch_size, progress=progress)
    split = "" if data is not None else str(run.opened.split["name"])
    name = part if data is None else "all"
    return RankingEvaluation(figures, name, split, len(chosen.rows), len(chosen))


def figures_of(
    run: RankingRun, part: Part, slices: Sequence[str] = (), *, batch_size: int | None = None, progress: bool = True
) -> Figures:
    """Figures of a part; the values of slices are named by the user's ids."""
    loader = part.loader(
        batch_size=batch_size or run.config.evaluation.eval_batch_size,
        max_history=run.config.data.max_history,
        seed=run.config.seed,
        **run.config.data.drawing(),
    )
    with slicing(run, slices):
        figures = run.model.evaluate(loader, "test", progress=progress, all_processes=False)
    return Figures({named(run, name): dict(of) for name, of in figures.items()})


@contextmanager
def slicing(run: RankingRun, slices: Sequence[str]) -> Iterator[None]:
    """Have the model tell the values of some columns with its scores."""
    before, run.model.slices = run.model.slices, tuple(slices)
    try:
        yield
    finally:
        run.model.slices = before


@contextmanager
def thinned(run: RankingRun, rate: float | None) -> Iterator[None]:
    """Have the model count rows with the label 0 as those of a table that kept them at a rate; None for all.

    Raises:
        ConfigError: the rate is out of range, or says nothing of the model's tasks.
    """
    before = run.model.negative_rate
    try:
        run.model.negative_rate = 1.0 if rate is None else rate
    except ValueError as error:
        raise ConfigError(str(error)) from None
    try:
        yield
    finally:
        run.model.negative_rate = before


def named(run: RankingRun, group: str) -> str:
    """The name of a group of figures with the user's id in the place of its number: `click[device=phone]`."""
    if not is_slice_group(group):
        return group
    task, _, inside = group[:-1].partition("[")
    column, _, number = inside.rpartition("=")
    return f"{task}[{column}={id_of(run, column, int(number))}]"


def id_of(run: RankingRun, column: str, number: int) -> str:
    """The user's id behind a number of a column."""
    encoder = run.encoders[run.schema[column].table_name]
    if number < 2:
        return ("missing", "unseen")[number]
    if encoder.encoding == "vocabulary":
        assert encoder.ids is not None
        return str(encoder.ids.ids[number - 2].as_py())
    return str(number - 2) if encoder.encoding == "range" else f"hash {number - 2}"


def check_slices(run: RankingRun, slices: Sequence[str]) -> None:
    """Refuse what is no column with one id for each row."""
    kinds = (Kind.ID, Kind.USER, Kind.CANDIDATE, Kind.EVENT)
    known = [one.name for one in run.schema.of_kind(*kinds)]
    for name in slices:
        if name not in known:
            raise ConfigError(f"slices: got {shown(name)}, expected columns with one id a row: {shown(known, 200)}")
        if set(name) & set("[]=/"):
            raise ConfigError(f"slices: got {shown(name)}, expected a name without '[', ']', '=' and '/'; rename the column")


def is_ranking_run(directory: str | os.PathLike[str]) -> bool:
    """Whether a directory holds a run on a table."""
    return (Path(directory) / ENCODERS).exists()
