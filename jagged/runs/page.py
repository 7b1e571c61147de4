"""What pages of runs have in common: templates, curves, and tables of options."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from jagged import charts
from jagged.artifacts import read_json_lines
from jagged.config import ConfigError, JobConfig, spelt
from jagged.metrics import in_words, shown_figure

# All text that comes to a page is escaped, and a name that a template misspells is an error.
TEMPLATES = Environment(
    loader=PackageLoader("jagged.runs"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)
TEMPLATES.filters.update(thousands="{:,}".format, in_words=in_words, shown_figure=shown_figure)


def read_history(path: Path, keys: tuple[str, ...]) -> list[dict[str, float]]:
    """The numbers under `keys` of each validation; none where the directory was saved without its history."""
    try:
        rows = read_json_lines(path) if path.exists() else []
        return [{key: float(row[key]) for key in keys} for row in rows]
    except (ValueError, TypeError, KeyError, OSError, RecursionError) as error:
        cure = "delete it for a page without curves"
        raise ConfigError(f"{path}: cannot be read as training history: {type(error).__name__}: {error}; {cure}") from None


def unit(config: JobConfig) -> str:
    """What validations are counted in: of several in one epoch each has a place of its own."""
    return "epoch" if config.trainer.validation_steps is None else "step"


def history_pictures(
    history: Sequence[Mapping[str, float]], config: JobConfig, palette: charts.Palette, how: str = ""
) -> dict[str, tuple[Any, str]]:
    """The training loss and the monitored metric of each validation, and captions, where there was one.

    Args:
        history: rows with what `unit` says, `loss` and `monitored`.
        config: of the run.
        palette: of the page.
        how: behind the metric's name, how it was taken.
    """
    if not history:
        return {}
    of, monitor = unit(config), config.trainer.monitor
    losses, metrics = ([(row[of], row[key]) for row in history] for key in ("loss", "monitored"))
    choose = min if config.trainer.less_is_better else max
    best = choose(metrics, key=lambda point: point[1])[0]
    metric = charts.curve(metrics, of, f"validation {monitor}", palette, mark=best)
    return {
        "loss": (charts.curve(losses, of, "training loss", palette), "Training loss, mean since the validation before."),
        "metric": (metric, f"Validation {monitor}{how}; the weights of the best {of} were kept."),
    }


def origin(config: JobConfig, versions: Mapping[str, str], split: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What the template `made_of` shows: options, what the run was trained on, where `split` says it, and versions here."""
    return {
        "configuration": configuration_tables(config),
        "trained_on": [] if split is None else sorted({**split["versions"], **split["hardware"]}.items()),
        "versions": [("python", platform.python_version()), *sorted(versions.items())],
    }


def configuration_tables(config: JobConfig) -> list[tuple[str, list[tuple[str, str]]]]:
    """Titles, each with the names and values of its options; those that have no effect are left out."""
    values = config.model_dump()
    run = {name: value for name, value in values.items() if not isinstance(value, dict)}
    sections = {"Run": run, **{name.capitalize(): value for name, value in values.items() if name not in run}}
    return [(title, [(name, spelt(value)) for name, value in of.items()]) for title, of in sections.items()]
