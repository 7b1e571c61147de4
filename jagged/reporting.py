"""`jagged report`: one self-contained page about a run: curves, data, ranks, metrics with their protocol, and leak checks."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from jagged import charts, page
from jagged.artifacts import read_json_lines, write_file, writing
from jagged.config import ConfigError, TrainConfig, sections
from jagged.versions import installed

if TYPE_CHECKING:
    import torch

    from jagged.data import SequencePart

Counts = npt.NDArray[np.int64]

# What each count of `jagged.data.leaks` would mean.
LEAKS = {
    "targets_in_training": "validation and test targets among the training events",
    "targets_in_both": "events that are targets of both validation and test",
    "targets_in_history": "histories that reach their own target: the future in the past",
    "history_after_target": "histories that end later in time than their target: the future in the past",
    "training_after_cut": "training events from the validation time on: the future in the past",
    "duplicated_users": "users that occur more than once in a part",
    "foreign_events": "samples with events of another user",
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
        lengths: `[U]` events of each user.
        ranks: by model name `[n]` 1-based rank of each held-out item, under the run's own choice about seen items.
        metrics: by protocol, by model name, by metric.
        history: a row for each epoch: "epoch", "loss" and the monitored validation metric.
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
    data_notes: Mapping[str, int]
    lengths: Counts
    ranks: Mapping[str, Counts]
    metrics: Mapping[str, Mapping[str, Mapping[str, float]]]
    history: Sequence[Mapping[str, float]]
    leaks: Mapping[str, int]
    versions: Mapping[str, str] = field(default_factory=dict)


def report(directory: str | os.PathLike[str], output: str | os.PathLike[str] | None = None, *, progress: bool = True) -> Path:
    """Write one self-contained HTML page about a run; the function behind `jagged report`.

    The model and the popularity baseline are evaluated anew on the test part of the run's own data, seen items left in and taken
    out; the split is made anew, too, and checked for leaks.

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
    return write_page(gather(directory, progress=progress), path)


def write_page(facts: RunFacts, path: Path) -> Path:
    """Write the page of a run; it appears whole or not at all. Returns where it is."""
    _write(path, render(facts))
    return path


def write_pictures(facts: RunFacts, directory: Path) -> list[Path]:
    """Write the page's pictures as PNG files: `loss.png`, `metric.png`, `ranks.png`, `lengths.png`."""
    return [charts.to_png(figure, directory / f"{name}.png") for name, (figure, _) in _pictures(facts, charts.LIGHT).items()]


def gather(directory: str | os.PathLike[str], *, part: Literal["valid", "test"] = "test", progress: bool = True) -> RunFacts:
    """Evaluate a run and its popularity baseline, and collect what the page shows. Raises what `report` does."""
    from jagged.data import leaks
    from jagged.evaluation import Popularity, evaluate, popularity_metrics
    from jagged.runs import Run

    run = Run.open(directory)
    config, dataset = run.config, run.read()
    split = run.split(dataset)
    model_metrics = evaluate(directory, dataset, part=part, progress=progress).metrics
    baseline = popularity_metrics(split, part=part, batch_size=config.eval_batch_size, progress=progress)
    held_out = split.test if part == "test" else split.valid
    models = {"model": run.model, "popularity": Popularity(run.train_counts(), device=run.device)}
    return RunFacts(
        directory=Path(directory),
        config=config,
        part=part,
        split=split.name,
        split_notes=_readable(split.notes, dataset.time_kind),
        num_users=dataset.num_users,
        num_items=dataset.num_items,
        num_events=dataset.num_events,
        data_notes=dataset.notes,
        lengths=dataset.lengths.numpy(),
        ranks={name: _target_ranks(model, held_out, config, run.device) for name, model in models.items()},
        metrics={name: {"model": figures, "popularity": baseline[name]} for name, figures in model_metrics.items()},
        history=_read_history(Path(directory) / "history.jsonl", ("epoch", "loss", config.monitor)),
        leaks=leaks(split),
        versions=installed(),
    )


def _target_ranks(model: Any, part: SequencePart, config: TrainConfig, device: torch.device) -> Counts:
    """`[n]` 1-based rank of each held-out item among all items, under the run's own choice about seen items."""
    import torch

    from jagged.data import BatchLoader
    from jagged.scoring import rank_catalogue

    choice = config.filter_viewed
    loader = BatchLoader(
        part, batch_size=config.eval_batch_size, max_seq_len=config.max_seq_len, shuffle=False, seed=0, with_viewed=choice
    )
    ranks = []
    with torch.inference_mode():
        for batch in (batch.to(device) for batch in loader):
            viewed = None if batch.viewed is None else (batch.viewed.values(), batch.viewed.offsets())
            hidden = model.final_hidden(batch.features)
            (ranked,) = rank_catalogue(
                hidden, model.item_weight, 1, targets=batch.targets, viewed=viewed, filter_viewed=(choice,)
            )
            assert ranked.ranks is not None
            ranks.append(ranked.ranks.cpu() + 1)
    return torch.cat(ranks).numpy()


def _read_history(path: Path, keys: tuple[str, ...]) -> list[dict[str, float]]:
    """The numbers under `keys` of each epoch; none where the directory was saved without its history."""
    try:
        rows = read_json_lines(path) if path.exists() else []
        return [{key: float(row[key]) for key in keys} for row in rows]
    except (ValueError, TypeError, KeyError, OSError, RecursionError) as error:
        cure = "delete it for a page without curves"
        raise ConfigError(f"{path}: cannot be read as training history: {type(error).__name__}: {error}; {cure}") from None


def _readable(notes: Mapping[str, int], time_kind: str) -> dict[str, int | str]:
    """Counts as they are, times as times."""
    calendar = {name for name in notes if name.endswith("_time")} if time_kind in ("naive", "zoned") else set()
    return {name: str(np.datetime64(value, "us")) if name in calendar else value for name, value in notes.items()}


def render(facts: RunFacts) -> str:
    """The page as HTML."""
    config = facts.config
    protocol = _protocol(config.filter_viewed)
    num_ranked = len(next(iter(facts.ranks.values())))
    name = str(facts.directory)
    body = [
        f"<h1>{escape(name)}</h1>",
        page.paragraph(
            f"{config.model} trained on {config.data or 'the built-in sample'}: {facts.num_events:,} events of "
            f"{facts.num_users:,} users and {facts.num_items:,} items.",
            "soft",
        ),
        _headline(facts, protocol),
        page.heading("Metrics"),
        page.paragraph(
            f"Protocol: split {facts.split}, {facts.part} part, {num_ranked:,} users with one held-out item each, every one of "
            f"the {facts.num_items:,} items ranked, ties to the smaller item number. Popularity ranks items by their number "
            "of training users, for everybody alike."
        ),
        _metrics_table(facts.metrics),
        page.heading("Training, ranks and lengths"),
        page.charts((charts.to_svg(figure, name), text) for name, (figure, text) in _pictures(facts, charts.PAGE).items()),
        page.heading("Leak checks"),
        *_leak_section(facts),
        page.heading("Data"),
        page.table((), _data_rows(facts), numbers_from=1),
        page.heading("Configuration"),
        page.columns(
            (title, page.table((), [(key, _value(getattr(config, key))) for key in keys])) for title, keys in sections().items()
        ),
        page.heading("Versions of this page's writer"),
        page.table((), [("python", platform.python_version()), *sorted(facts.versions.items())]),
    ]
    return page.page(f"jagged: {name}", body)


def _protocol(filter_viewed: bool) -> str:
    from jagged.evaluation import PROTOCOLS

    return PROTOCOLS[filter_viewed]


def _headline(facts: RunFacts, protocol: str) -> str:
    metric = facts.config.monitor
    by_model = facts.metrics[protocol]
    values = [(f"{figures[metric]:.4f}", f"{metric} of {name}, {protocol}") for name, figures in by_model.items()]
    found = sum(facts.leaks.values())
    values.append(("none" if not found else f"{found:,}", "leaks found"))
    return page.cards(values)


def _metrics_table(metrics: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    columns = [(protocol, name, figures) for protocol, by_model in metrics.items() for name, figures in by_model.items()]
    rows = [[key, *(f"{figures[key]:.4f}" for _, _, figures in columns)] for key in columns[0][2]]
    return page.table(["", *(f"{name}, {protocol}" for protocol, name, _ in columns)], rows, numbers_from=1)


def _pictures(facts: RunFacts, palette: charts.Palette) -> dict[str, tuple[Any, str]]:
    """By name each picture and its caption; a directory without history has no curves."""
    monitor, limit = facts.config.monitor, facts.config.max_seq_len
    protocol = _protocol(facts.config.filter_viewed)
    result = {}
    if facts.history:
        points = {key: [(row["epoch"], row[key]) for row in facts.history] for key in ("loss", monitor)}
        best = max(points[monitor], key=lambda point: point[1])[0]
        loss = charts.curve({"training loss": points["loss"]}, "training loss", palette)
        metric = charts.curve({monitor: points[monitor]}, f"validation {monitor}", palette, mark=best)
        result["loss"] = (loss, "Training loss, mean of each epoch.")
        result["metric"] = (metric, f"Validation {monitor}, {protocol}; the best epoch was kept.")
    medians = ", ".join(f"{name} {np.median(values):,.0f}" for name, values in facts.ranks.items())
    longer = int((facts.lengths > limit).sum())
    result["ranks"] = (
        charts.rank_histogram(facts.ranks, facts.num_items, palette),
        f"Where the held-out item stood, {protocol}. Median rank: {medians}.",
    )
    result["lengths"] = (
        charts.length_histogram(facts.lengths, limit, palette),
        f"Events of each user. {longer:,} users have more than the model sees ({limit}).",
    )
    return result


def _leak_section(facts: RunFacts) -> list[str]:
    rows = [
        (LEAKS.get(name, name.replace("_", " ")), f"{count:,}", "found" if count else "none")
        for name, count in facts.leaks.items()
    ]
    found = [(text, count) for text, count, verdict in rows if verdict == "found"]
    if found:
        listed = "; ".join(f"{count} {text}" for text, count in found)
        verdict = page.paragraph(f"Something leaks, and the metrics above are not to be trusted: {listed}.", "bad")
    else:
        verdict = page.paragraph(
            "Nothing leaks: no held-out event was trained on, and no history holds what it is to predict.", "good"
        )
    return [verdict, page.table(("check", "count", "outcome"), rows, numbers_from=1)]


def _data_rows(facts: RunFacts) -> list[tuple[str, str]]:
    rows: list[tuple[str, int | str]] = [("users", facts.num_users), ("items", facts.num_items), ("events", facts.num_events)]
    rows += [(name.replace("_", " "), count) for name, count in [*facts.data_notes.items(), *facts.split_notes.items()]]
    lengths = facts.lengths if len(facts.lengths) else np.zeros(1, np.int64)
    rows += [("median events of a user", int(np.median(lengths))), ("most events of a user", int(lengths.max()))]
    return [(name, count if isinstance(count, str) else f"{count:,}") for name, count in rows]


def _value(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _write(path: Path, text: str) -> None:
    """Put the whole page in place at once: one that is there is complete."""
    with writing(path, "choose another --output", ConfigError):
        write_file(path, text.encode())
