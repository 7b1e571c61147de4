"""The page of a run on rows with sets of labels: metrics, labels by how often training has them, curves, and leak checks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jagged import charts
from jagged.config import MultiLabelConfig
from jagged.data import MultiLabelRows
from jagged.metrics import Figures, shown_figure
from jagged.runs.labels.evaluating import evaluate_labels, table_of_figures
from jagged.runs.labels.run import LabelRun
from jagged.runs.page import TEMPLATES, history_pictures, origin, read_history, unit
from jagged.versions import installed

# Labels of a row that are looked at for the shares by frequency.
_FOUND_AMONG = 10
# Labels of like frequency that are named, at most, and the characters of a name.
_EXAMPLES, _NAME_LENGTH = 3, 60
_CARDS = ("p@1", "p@5", "psp@5", "ndcg@5")
_EDGES = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10_000, 100_000, 2**62)

# What each count of leaks would mean.
LEAKS = {"rows_of_training": "rows with the very features and values of a row of training"}


class Frequency(NamedTuple):
    """Labels of which training has `low` to `high` rows: how many there are, their positives, and the share that is found.

    Args:
        examples: names of the first of these labels; empty where labels have none.
    """

    low: int
    high: int
    labels: int
    positives: int
    found: float
    examples: tuple[str, ...] = ()


@dataclass(frozen=True)
class LabelFacts:
    """What the page is made of.

    Attributes:
        directory: the run's directory.
        config: its resolved configuration.
        split: as it is saved with the model.
        part: the held-out part, "valid" or "test"; num_rows: of it.
        num_parameters: of the head, and those of a dense layer of all inputs.
        metrics: as of `evaluate_labels`.
        frequencies: labels by how often training has them.
        history: a row for each validation.
        leaks: by name of `LEAKS`, how many rows.
        versions: by distribution.
    """

    directory: Path
    config: MultiLabelConfig
    split: Mapping[str, Any]
    part: str
    num_rows: int
    num_parameters: tuple[int, int]
    metrics: Figures
    frequencies: Sequence[Frequency]
    history: Sequence[Mapping[str, float]]
    leaks: Mapping[str, int]
    versions: Mapping[str, str]


def gather_labels(directory: str | os.PathLike[str], *, part: str = "test", progress: bool = True) -> LabelFacts:
    """Evaluate a run anew, and collect what the page shows.

    Raises:
        ConfigError: the directory holds no rows.
        CheckpointError: it is no such run, or a file of it is damaged.
        DataError: the run's rows are damaged.
    """
    run = LabelRun.open(directory)
    rows, head = getattr(run.parts, part), run.model.head
    weights = sum(weight.numel() for weight in head.parameters() if weight.dim() == 2)
    return LabelFacts(
        directory=Path(directory),
        config=run.config,
        split=run.split,
        part=part,
        num_rows=len(rows),
        num_parameters=(weights, head.num_labels * run.config.model.embedding_dim),
        metrics=evaluate_labels(run, part=part, progress=progress).metrics,
        frequencies=_frequencies(run, rows, progress),
        history=read_history(Path(directory) / "history.jsonl", (unit(run.config), "loss", "monitored")),
        leaks=_leaks(run.parts.train, rows),
        versions=installed(),
    )


def _frequencies(run: LabelRun, rows: MultiLabelRows, progress: bool) -> list[Frequency]:
    table = run.predict(rows, k=_FOUND_AMONG, progress=progress)
    keys = table["row"].to_numpy() * rows.num_labels + table["label"].to_numpy()
    row = np.repeat(np.arange(len(rows)), np.diff(rows.label_offsets))
    is_found = np.isin(row * rows.num_labels + rows.labels, keys)
    counts = run.model.label_counts.cpu().numpy()
    names, result = run.label_names, []
    for low, high in pairwise(_EDGES):
        labels = (counts >= low) & (counts < high)
        here = labels[rows.labels]
        if labels.any():
            share = float(is_found[here].mean()) if here.any() else float("nan")
            examples = () if names is None else tuple(names.take(np.flatnonzero(labels)[:_EXAMPLES]).to_pylist())
            numbers = int(labels.sum()), int(here.sum())
            result.append(Frequency(low, min(high - 1, int(counts.max())), *numbers, share, examples))
    return result


def _leaks(train: MultiLabelRows, part: MultiLabelRows) -> dict[str, int]:
    known = set(_features(train))
    return {"rows_of_training": sum(features in known for features in _features(part))}


def _features(rows: MultiLabelRows) -> list[bytes]:
    """The features of each row that has any, in ascending order."""
    row = np.repeat(np.arange(len(rows)), np.diff(rows.feature_offsets))
    order = np.lexsort((rows.feature_ids, row))
    ids, values = rows.feature_ids[order].tobytes(), rows.feature_values[order].tobytes()
    return [ids[a:b] + values[a:b] for a, b in pairwise((4 * rows.feature_offsets).tolist()) if b > a]


def render_labels(facts: LabelFacts) -> str:
    """The page as HTML."""
    figures = facts.metrics["labels"]
    header, *metrics = table_of_figures(figures)
    return TEMPLATES.get_template("labels.html").render(
        facts=facts,
        cards=[(name, shown_figure(figures[name])) for name in _CARDS if name in figures],
        header=header,
        metrics=metrics,
        loss=shown_figure(facts.metrics["all"]["loss"]),
        without=int(figures["samples_without_positives"]),
        frequencies=[
            (
                f"{one.low:,}" if one.low == one.high else f"{one.low:,} to {one.high:,}",
                f"{one.labels:,}",
                f"{one.positives:,}",
                shown_figure(one.found),
                *([", ".join(map(_short, one.examples))] if one.examples else []),
            )
            for one in facts.frequencies
        ],
        among=_FOUND_AMONG,
        pictures=[(charts.to_svg(figure, name), caption) for name, (figure, caption) in _pictures(facts, charts.PAGE).items()],
        leaks=[(LEAKS[name], f"{count:,}", "found" if count else "none") for name, count in facts.leaks.items()],
        data=[
            ("features", f"{facts.split['num_features']:,}"),
            ("labels", f"{facts.split['num_labels']:,}"),
            *((f"rows, {name}", f"{count:,}") for name, count in facts.split["rows"].items()),
            *((f"labels of rows, {name}", f"{count:,}") for name, count in facts.split["labels"].items()),
            ("weights of the head", f"{facts.num_parameters[0]:,}"),
            ("weights of a dense layer", f"{facts.num_parameters[1]:,}"),
        ],
        origin=origin(facts.config, facts.versions, facts.split),
    )


def _short(name: str) -> str:
    return name if len(name) <= _NAME_LENGTH else f"{name[: _NAME_LENGTH - 3]}..."


def _pictures(facts: LabelFacts, palette: charts.Palette) -> dict[str, tuple[Any, str]]:
    """By name each picture and its caption."""
    result: dict[str, tuple[Any, str]] = {}
    shown = [one for one in facts.frequencies if one.positives]
    if shown:
        names = [f"{one.low:,}" if one.low == one.high else f"{one.low:,}-{one.high:,}" for one in shown]
        picture = charts.bars(names, [one.found for one in shown], "rows of training with the label", "share found", palette)
        caption = f"Share of the {facts.part} part's positives that are among a row's {_FOUND_AMONG} best labels."
        result["frequency"] = (picture, caption)
    return result | history_pictures(facts.history, facts.config, palette)
