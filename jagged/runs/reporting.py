"""`jagged report`: one self-contained page about a run: curves, data, ranks, metrics with their protocol, and leak checks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from jagged import charts
from jagged.artifacts import write_file, writing
from jagged.charts import Counts
from jagged.config import ConfigError, TrainConfig
from jagged.data import BatchLoader, leaks
from jagged.evaluation import PROTOCOLS, Popularity, item_table, popularity_metrics, rank_batches
from jagged.metrics import IN_WORDS, cut_offs, shown_figure
from jagged.runs.evaluating import evaluate
from jagged.runs.labels.run import is_label_run
from jagged.runs.page import TEMPLATES, history_pictures, origin, read_history, unit
from jagged.runs.ranking.evaluating import is_ranking_run
from jagged.runs.run import Run
from jagged.runs.summary import shortened
from jagged.versions import installed

if TYPE_CHECKING:
    from jagged.runs.labels.reporting import LabelFacts
    from jagged.runs.ranking.reporting import RankingFacts

# What each count of `jagged.data.leaks` would mean.
LEAKS = {
    "targets_in_training": "validation and test targets among the training events",
    "targets_in_both": "events that are targets of both validation and test",
    "targets_in_history": "histories that reach their own target: the future in the past",
    "history_after_target": "histories that end later in time than their target: the future in the past",
    "training_after_cut": "training events from the validation time on: the future in the past",
    "duplicated_users": "users that occur more than once in a part",
    "foreign_events": "samples with events of another user",
    "unsupported_items": "items of the model that no training event has",
}


@dataclass(frozen=True)
class RunFacts:
    """What the page of a run is made of.

    Attributes:
        directory: the run's directory.
        config: its resolved configuration.
        part: the held-out part that was ranked, "valid" or "test".
        split: the split's name; split_notes: what it counted.
        num_users, num_items, num_events: sizes of the data; data_notes: what reading it met.
        num_ranked: items of the model, all of which are ranked.
        lengths: `[U]` events of each user.
        ranks: by model name `[n]` 1-based rank of each held-out item, under the run's own choice about seen items; of one that
            the model does not have `num_ranked` + 1.
        metrics: by protocol, by model name, by metric.
        history: a row for each validation: "epoch" or, where validations come after steps, "step"; "loss" and "monitored", the
            validation metric.
        leaks: counts of `jagged.data.leaks`.
        versions: by distribution.
    """

    directory: Path
    config: TrainConfig
    part: str
    split: str
    split_notes: Mapping[str, int | str]
    num_users: int
    num_items: int
    num_events: int
    num_ranked: int
    data_notes: Mapping[str, int | list[str]]
    lengths: Counts
    ranks: Mapping[str, Counts]
    metrics: Mapping[str, Mapping[str, Mapping[str, float]]]
    history: Sequence[Mapping[str, float]]
    leaks: Mapping[str, int]
    versions: Mapping[str, str] = field(default_factory=dict)


def report(directory: str | os.PathLike[str], output: str | os.PathLike[str] | None = None, *, progress: bool = True) -> Path:
    """Write one self-contained HTML page about a run; the function behind `jagged report`.

    Of a run on a table: metrics by task and slice, calibration, scores, coverage of features and leak checks, on its test part.
    Of one on sets of labels: metrics, seldom and frequent labels, and leak checks, on its test part.
    Of a run on events the model and the popularity baseline are evaluated anew on the test part of the run's own data, seen items
    left in and taken out; the split is made anew, too, and checked for leaks.

    Args:
        directory: a run's directory.
        output: the page to write, by default `report.html` in the directory; it appears whole or not at all.
        progress: show progress bars after two seconds.

    Returns:
        Where the page is.

    Raises:
        ConfigError: the directory holds no events, or the page cannot be written.
        CheckpointError: the directory is no run, or a file of it is damaged.
        DataError: the run's events are damaged.
        EvaluationError: nothing is held out, or the model's scores are not finite.
    """
    path = Path(directory) / "report.html" if output is None else Path(output)
    if path.is_dir():
        raise ConfigError(f"{path}: is a directory, expected the name of a page to write, for example {path / 'report.html'}")
    if is_label_run(directory):
        from jagged.runs.labels.reporting import gather_labels

        return write_page(gather_labels(directory, progress=progress), path)
    if is_ranking_run(directory):
        from jagged.runs.ranking.reporting import gather_ranking

        return write_page(gather_ranking(directory, progress=progress), path)
    return write_page(gather(directory, progress=progress), path)


def write_page(facts: RunFacts | RankingFacts | LabelFacts, path: Path) -> Path:
    """Write the page of a run; it appears whole or not at all. Returns where it is."""
    from jagged.runs.labels.reporting import LabelFacts, render_labels

    if isinstance(facts, RunFacts):
        page = render(facts).encode()
    elif isinstance(facts, LabelFacts):
        page = render_labels(facts).encode()
    else:
        from jagged.runs.ranking.reporting import render_ranking

        page = render_ranking(facts).encode()
    with writing(path, "choose another --output", ConfigError):
        write_file(path, page)
    return path


def write_pictures(facts: RunFacts, directory: Path) -> list[Path]:
    """Write the page's pictures as PNG files: `loss.png`, `metric.png`, `ranks.png`, `lengths.png`."""
    return [charts.to_png(figure, directory / f"{name}.png") for name, (figure, _) in _pictures(facts, charts.LIGHT).items()]


def gather(directory: str | os.PathLike[str], *, part: Literal["valid", "test"] = "test", progress: bool = True) -> RunFacts:
    """Evaluate a run and its popularity baseline, and collect what the page shows. Raises what `report` does."""
    run = Run.open(directory)
    config, dataset = run.config, run.read()
    split = run.split(dataset)
    ks = cut_offs(config.training.monitor)
    model_metrics = evaluate(directory, dataset, part=part, ks=ks, progress=progress).metrics
    baseline = popularity_metrics(split, part=part, ks=ks, batch_size=config.evaluation.eval_batch_size, progress=progress)
    held_out = split.test if part == "test" else split.valid
    choice = config.evaluation.filter_viewed
    loader = run.loader(held_out, with_viewed=choice)
    models = {"model": run.model, "popularity": Popularity(run.train_counts(), device=run.device)}
    return RunFacts(
        directory=Path(directory),
        config=config,
        part=part,
        split=split.name,
        split_notes=_readable(split.notes | held_out.unknown(), dataset.time_kind),
        num_users=dataset.num_users,
        num_items=dataset.num_items,
        num_events=dataset.num_events,
        num_ranked=len(run.items),
        data_notes=dataset.notes,
        lengths=dataset.lengths.numpy(),
        ranks={name: _target_ranks(model, loader, choice) for name, model in models.items()},
        metrics={name: {"model": figures, "popularity": baseline[name]} for name, figures in model_metrics.items()},
        history=read_history(Path(directory) / "history.jsonl", (unit(config), "loss", "monitored")),
        leaks=leaks(split),
        versions=installed(),
    )


def _target_ranks(model: Any, loader: BatchLoader, filter_viewed: bool) -> Counts:
    """`[n]` 1-based rank of each held-out item among all items; behind all of them where it is none."""
    batches = rank_batches(model, loader, 1, filter_viewed=(filter_viewed,), progress=False)
    num_items = len(item_table(model))
    ranks = [ranked.ranks.clamp(max=num_items) + 1 for (ranked,) in batches if ranked.ranks is not None]
    return torch.cat(ranks).cpu().numpy()


def _readable(notes: Mapping[str, int], time_kind: str) -> dict[str, int | str]:
    """Counts as they are, times as times."""
    calendar = {name for name in notes if name.endswith("_time")} if time_kind in ("naive", "zoned") else set()
    return {name: str(np.datetime64(value, "us")) if name in calendar else value for name, value in notes.items()}


def render(facts: RunFacts) -> str:
    """The page as HTML."""
    pictures = _pictures(facts, charts.PAGE).items()
    columns = [(protocol, name, figures) for protocol, by_model in facts.metrics.items() for name, figures in by_model.items()]
    return TEMPLATES.get_template("report.html").render(
        facts=facts,
        protocol=PROTOCOLS[facts.config.evaluation.filter_viewed],
        columns=["", *(f"{name}, {IN_WORDS[protocol]}" for protocol, name, _ in columns)],
        metrics=[[key, *(shown_figure(figures[key]) for _, _, figures in columns)] for key in columns[0][2]],
        pictures=[(charts.to_svg(figure, name), caption) for name, (figure, caption) in pictures],
        leaks=[
            (LEAKS.get(name, name.replace("_", " ")), f"{count:,}", "found" if count else "none")
            for name, count in facts.leaks.items()
        ],
        data=_data_rows(facts),
        origin=origin(facts.config, facts.versions),
    )


def _pictures(facts: RunFacts, palette: charts.Palette) -> dict[str, tuple[Any, str]]:
    """By name each picture and its caption; a directory without history has no curves."""
    limit = facts.config.data.max_seq_len
    protocol = IN_WORDS[PROTOCOLS[facts.config.evaluation.filter_viewed]]
    result = history_pictures(facts.history, facts.config, palette, f", {protocol}")
    medians = ", ".join(f"{name} {np.median(values):,.0f}" for name, values in facts.ranks.items())
    missed = max(int((values > facts.num_ranked).sum()) for values in facts.ranks.values())
    longer = int((facts.lengths > limit).sum())
    result["ranks"] = (
        charts.rank_histogram(facts.ranks, facts.num_ranked, palette),
        f"Where the held-out item stood, {protocol}. Median rank: {medians}."
        + (f" {missed:,} held-out items, which the model does not have, stand behind all." if missed else ""),
    )
    result["lengths"] = (
        charts.length_histogram(facts.lengths, limit, palette),
        f"Events of each user. {longer:,} users have more than the model sees ({limit}).",
    )
    return result


def _data_rows(facts: RunFacts) -> list[tuple[str, str]]:
    rows: list[tuple[str, int | str | list[str]]] = [
        ("users", facts.num_users),
        ("items", facts.num_items),
        ("events", facts.num_events),
    ]
    rows += [(name.replace("_", " "), count) for name, count in [*facts.data_notes.items(), *facts.split_notes.items()]]
    lengths = facts.lengths if len(facts.lengths) else np.zeros(1, np.int64)
    rows += [("median events of a user", int(np.median(lengths))), ("most events of a user", int(lengths.max()))]
    return [
        (name, shortened(count) if isinstance(count, list) else count if isinstance(count, str) else f"{count:,}")
        for name, count in rows
    ]
