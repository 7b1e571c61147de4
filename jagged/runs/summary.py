"""What `jagged train` says at its end: what was read, what was reached, where it lies, and what to do next."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jagged.artifacts import CheckpointError, errors_as, read_json
from jagged.config import MultiLabelConfig, RankingConfig, load_config
from jagged.metrics import IN_WORDS, RunMetrics, in_words, is_slice_group, shown_figure
from jagged.models.pretrained import CONFIG, METRICS, SPLIT

# What of a dataset's notes says that something was left out, and how it is told.
_LEFT_OUT = {
    "empty_users": "users without events",
    "dropped_duplicates": "duplicates of events",
    "events_below_min_events": "events of users and items that have too few",
    "skipped_rows": "malformed rows",
}
_NAMED = {
    "skipped_rows_first": "malformed:",
    "columns_not_used": "columns not used:",
    "files_left_out": "files not read:",
    "event_features": "side features of events:",
    "item_features": "side features of items:",
    "item_columns_not_used": "columns of items not used:",
}
# The same of a table's rows.
_ROWS_LEFT_OUT = {
    "bad": "malformed rows",
    "duplicates": "duplicates of rows",
    "below min_events": "rows of users and candidates that have too few",
}
_PARTS = {"train": "training", "valid": "validation", "test": "the test"}
_SHOWN_FIGURES = ("auc", "gauc", "logloss", "ne", "calibration")
_LABEL_FIGURES = ("p@1", "p@3", "p@5", "psp@5", "ndcg@5", "recall@10")
_SHOWN = 3


def summary_lines(directory: str | os.PathLike[str]) -> list[str]:
    """Sum up a run that was trained to its end, in lines to print. Reads small files alone, neither model nor events.

    Args:
        directory: the run's directory.

    Raises:
        CheckpointError: the directory holds no finished run.
        ConfigError: its configuration cannot be read.
    """
    path = Path(directory)
    with errors_as(CheckpointError):
        split, metrics = read_json(path / SPLIT), RunMetrics.from_json(read_json(path / METRICS))
    config = load_config(path / CONFIG)
    source = config.data.path or "the built-in sample"
    if isinstance(config, RankingConfig):
        return _of_requests(path, source, split, metrics, config.from_run)
    if isinstance(config, MultiLabelConfig):
        return _of_labels(path, source, split, metrics)
    reached = ", ".join(f"{shown_figure(group[metrics.monitor])} with {IN_WORDS[name]}" for name, group in metrics.test.items())
    best, name = metrics.best, shlex.quote(str(path))
    assert best is not None
    return [
        f"read     {split['users']:,} users, {split['items']:,} items, {split['events']:,} events from {source}",
        *(f"         {line}" for line in notes_lines(split.get("notes", {}))),
        *_unknown_lines(split.get("unknown", {}).get("test", {})),
        f"reached  test {metrics.monitor} {reached}; {split['name']}, {split['test']:,} users, all items ranked for each",
        f"kept     {path}: weights of epoch {best.epoch}, validation {metrics.monitor} {best.value:.4f} "
        f"with {IN_WORDS[best.group]}",
        f"next     jagged evaluate {name}",
        f"         jagged recommend {name} histories.csv",
    ]


def _unknown_lines(counts: Mapping[str, int]) -> list[str]:
    if not counts.get("unknown_items"):
        return []
    told = f"{counts['unknown_items']:,} items have no training event and no place in the model"
    return [f"         {told}; {counts['unknown_targets']:,} test targets are misses for that"]


def _of_requests(path: Path, source: str, split: dict[str, Any], metrics: RunMetrics, begun: str | None) -> list[str]:
    best, name, reading = metrics.best, shlex.quote(str(path)), split["reading"]
    assert best is not None
    left_out = [f"{reading[key]:,} {words}" for key, words in _ROWS_LEFT_OUT.items() if reading.get(key)]
    rows = ", ".join(f"{count:,} for {_PARTS[part]}" for part, count in split["rows"].items())
    reached = []
    for group, figures in metrics.test.items():
        if "auc" in figures and not is_slice_group(group):
            told = [f"{figure} {shown_figure(figures[figure])}" for figure in _SHOWN_FIGURES if figure in figures]
            reached.append(f"{in_words(group)}: {', '.join(told)}")
    return [
        f"read     {reading['rows']:,} rows from {source}",
        *([f"         left out {', '.join(left_out)}"] if left_out else []),
        f"split    by {split['name']}: {rows}",
        *([] if begun is None else [f"began    with {begun}; new ids: {_new_ids(split['counts'])}"]),
        *(f"{'reached' if not number else '':<8} test, {line}" for number, line in enumerate(reached)),
        f"kept     {path}: weights of epoch {best.epoch}, validation {metrics.monitor} {best.value:.4f}",
        f"next     jagged evaluate {name}",
        f"         jagged predict {name} rows.csv --output scores.parquet",
        f"         jagged report {name}",
    ]


def _new_ids(counts: Mapping[str, int]) -> str:
    """How many ids of each vocabulary a run has that the one that it began with had not."""
    before, after = "ids of ", " that are new"
    of = {name: count for name, count in counts.items() if name.startswith(before) and name.endswith(after)}
    told = [f"{count:,} of {name.removeprefix(before).removesuffix(after)}" for name, count in of.items() if count]
    return ", ".join(told) or "none"


def _of_labels(path: Path, source: str, split: dict[str, Any], metrics: RunMetrics) -> list[str]:
    best, name, figures = metrics.best, shlex.quote(str(path)), metrics.test["labels"]
    assert best is not None
    rows = ", ".join(f"{count:,} for {_PARTS[part]}" for part, count in split["rows"].items())
    reached = ", ".join(f"{figure} {shown_figure(figures[figure])}" for figure in _LABEL_FIGURES if figure in figures)
    return [
        f"read     {sum(split['rows'].values()):,} rows with {sum(split['labels'].values()):,} labels of {split['num_labels']:,} "
        f"from {source}",
        *(f"         {line}" for line in notes_lines(split.get("notes", {}))),
        f"split    {rows}",
        f"reached  test {reached}; all labels ranked for each row",
        f"kept     {path}: weights of epoch {best.epoch}, validation {metrics.monitor} {shown_figure(best.value)}",
        f"next     jagged evaluate {name}",
        f"         jagged predict {name} rows.txt --output labels.parquet",
        f"         jagged report {name}",
    ]


def notes_lines(notes: Mapping[str, int | list[str]]) -> list[str]:
    """What reading left out, from a dataset's notes: a line each for events, for columns and for files."""
    left_out = [f"{notes[name]:,} {words}" for name, words in _LEFT_OUT.items() if notes.get(name)]
    lines = [f"left out {', '.join(left_out)}"] if left_out else []
    for name, words in _NAMED.items():
        named = notes.get(name)
        if isinstance(named, list) and named:
            lines.append(f"{words} {shortened(named)}")
    if without := notes.get("items_without_row"):
        lines.append(f"{without:,} items have no row in the table of items, and no side features")
    return lines


def shortened(names: list[str]) -> str:
    """The first of several names, and how many more there are."""
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"
