"""The pictures of a run, drawn by matplotlib: as SVG that follows a page's colours, or as PNG files."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jagged.artifacts import replacing

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Palette:
    """Colours of a picture: text and axes, grid, background, first and second series."""

    ink: str
    rule: str
    paper: str
    first: str
    second: str


LIGHT = Palette("#1d2430", "#d5dae2", "#ffffff", "#2563b0", "#c2571a")
# Colours that stand for a page's variables --ink, --rule, --first and --second until `to_svg` puts those in.
PAGE = Palette("#010203", "#040506", "none", "#070809", "#0a0b0c")
_PAGE_VARIABLES = {"#010203": "var(--ink)", "#040506": "var(--rule)", "#070809": "var(--first)", "#0a0b0c": "var(--second)"}


def curve(points: Sequence[tuple[float, float]], xlabel: str, ylabel: str, palette: Palette, *, mark: float | None = None) -> Any:
    """A line through (epoch or step, value) points; `mark` is the epoch or step that was selected."""
    figure, axes = _figure(palette, xlabel, ylabel)
    x, y = zip(*points, strict=True)
    axes.plot(x, y, color=palette.first, linewidth=1.8, marker="o" if len(points) < 30 else None, markersize=3)
    if mark is not None:
        axes.axvline(mark, color=palette.ink, linewidth=1, linestyle=":")
        low, high = axes.get_xlim()
        side = "right" if mark > (low + high) / 2 else "left"
        place = {"xytext": (-4 if side == "right" else 4, 0), "textcoords": "offset points", "ha": side}
        axes.annotate(f"kept: {mark:,.0f}", (mark, 0.02), xycoords=("data", "axes fraction"), color=palette.ink, **place)
    # Long numbers need room.
    axes.xaxis.get_major_locator().set_params(integer=True, nbins=5 if max(x) >= 100_000 else "auto")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    if min(x) == max(x):
        axes.set_xlim(x[0] - 1, x[0] + 1)
    return figure


def length_histogram(lengths: Counts, max_seq_len: int, palette: Palette) -> Any:
    """How many users have a history of each length; the longest that the model sees is marked."""
    figure, axes = _figure(palette, "events of a user", "users")
    longest = int(lengths.max(initial=1))
    few = longest <= 100
    edges = np.arange(1, longest + 2) - 0.5 if few else _log_edges(longest)
    counts, _ = np.histogram(lengths[lengths > 0], edges)
    axes.stairs(counts, edges, fill=True, color=palette.first)
    axes.axvline(max_seq_len, color=palette.second, linewidth=1.5, label=f"max_seq_len = {max_seq_len}")
    if not few:
        _log_axis(axes, int(edges[-1]))
    axes.legend(frameon=False, labelcolor=palette.ink)
    return figure


def rank_histogram(ranks: Mapping[str, Counts], num_items: int, palette: Palette) -> Any:
    """Where the held-out items stood among all items, 1 the best: the share of users, by series name."""
    figure, axes = _figure(palette, "rank of the held-out item (1 is best)", "share of users")
    edges = _log_edges(num_items)
    for (name, values), color, fill in zip(ranks.items(), (palette.first, palette.second), (True, False), strict=False):
        counts, _ = np.histogram(values, edges)
        axes.stairs(
            counts / max(len(values), 1), edges, fill=fill, color=color, alpha=0.75 if fill else 1, linewidth=1.8, label=name
        )
    _log_axis(axes, num_items)
    axes.legend(frameon=False, labelcolor=palette.ink)
    return figure


def calibration(bins: Sequence[tuple[float, float]], palette: Palette) -> Any:
    """Mean prediction and mean label of bins of the same weight; on the line both are alike."""
    figure, axes = _figure(palette, "mean prediction", "mean label")
    predicted, observed = zip(*bins, strict=True)
    largest = 1.05 * max(*predicted, *observed, 1e-6)
    axes.plot([0, largest], [0, largest], color=palette.ink, linewidth=1, linestyle=":")
    axes.plot(predicted, observed, color=palette.first, linewidth=1.8, marker="o", markersize=4)
    axes.set(xlim=(0, largest), ylim=(0, largest))
    return figure


def score_histogram(edges: Sequence[float], positives: Sequence[float], others: Sequence[float], palette: Palette) -> Any:
    """The share of rows by their score before any sigmoid, of those with the label 1 and of the others."""
    figure, axes = _figure(palette, "score (logit)", "share of rows")
    for name, values, color, fill in (("label 0", others, palette.first, True), ("label 1", positives, palette.second, False)):
        shares = np.asarray(values) / max(float(np.sum(values)), 1e-30)
        axes.stairs(shares, edges, fill=fill, color=color, alpha=0.75 if fill else 1, linewidth=1.8, label=name)
    axes.legend(frameon=False, labelcolor=palette.ink)
    return figure


def bars(names: Sequence[str], values: Sequence[float], xlabel: str, ylabel: str, palette: Palette) -> Any:
    """A bar for each name."""
    figure, axes = _figure(palette, xlabel, ylabel)
    axes.bar(range(len(names)), values, color=palette.first, width=0.8)
    turned = {"rotation": 30, "ha": "right"} if len(names) > 6 else {}
    axes.set_xticks(range(len(names)), names, **turned)
    axes.set_ylim(0, max(1e-6, *values) * 1.05)
    return figure


def to_png(figure: Any, path: str | Path) -> Path:
    """Write a figure as PNG; the same figure gives the same bytes."""
    path = Path(path)
    with replacing(path) as aside:
        figure.savefig(aside, format="png", dpi=150, metadata={"Software": None})
    return path


def to_svg(figure: Any, name: str) -> str:
    """A figure drawn in the colours `PAGE` as an SVG element to put into a page, its colours the page's style variables."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<(metadata|style).*?</(metadata|style)>", "", text, flags=re.DOTALL)
    # Several pictures share the page's space of names.
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", text)
    text = re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" role="img">', text, count=1)
    for color, variable in _PAGE_VARIABLES.items():
        text = text.replace(color, variable)
    return text.replace("xlink:href", "href").strip()


def _figure(palette: Palette, xlabel: str, ylabel: str) -> tuple[Any, Any]:
    import matplotlib
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {
        "font.family": "sans-serif",
        "font.size": 10,
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), palette.ink),
        "axes.facecolor": "none",
        "figure.facecolor": palette.paper,
        "grid.color": palette.rule,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(5.6, 3.2), layout="constrained")
        axes = figure.subplots()
        axes.grid(axis="y")
        axes.set_axisbelow(True)
        axes.set(xlabel=xlabel, ylabel=ylabel)
    return figure, axes


def _log_edges(largest: int) -> npt.NDArray[np.float64]:
    """Bin edges from 1 to beyond `largest`, at whole numbers and evenly spaced on a logarithmic axis."""
    return np.unique(np.round(np.geomspace(1, largest + 1, 25)))


def _log_axis(axes: Any, largest: int) -> None:
    from matplotlib.ticker import NullLocator

    axes.set_xscale("log")
    axes.set_xlim(1, max(largest, 2))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.xaxis.set_minor_locator(NullLocator())
