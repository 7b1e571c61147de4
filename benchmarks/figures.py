"""Draw the figures from the result files alone.

python -m benchmarks.figures
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from benchmarks.common import ROOT

PANELS = {
    "seconds": "training, seconds",
    "seconds_per_epoch": "an epoch with validation, seconds",
    "peak_memory_mb": "peak GPU memory, MiB",
    "test_ndcg@10_left_in": "test NDCG@10, seen items left in",
    "test_ndcg@10_taken_out": "test NDCG@10, seen items taken out",
}


def train_sasrec(result: dict[str, Any], path: Path) -> None:
    """Bars of the mean over seeds, with whiskers from the smallest to the largest."""
    summary = result["summary"]
    panels = {key: title for key, title in PANELS.items() if key in summary["jagged"]}
    figure, axes = plt.subplots(1, len(panels), figsize=(3.1 * len(panels), 3.2), layout="constrained")
    for axis, (key, title) in zip(axes, panels.items(), strict=True):
        for place, (name, of) in enumerate(summary.items()):
            mean, low, high = (of[key][kind] for kind in ("mean", "min", "max"))
            axis.bar(place, mean, color="#1f6f8b" if name == "jagged" else "#b9c4c9")
            axis.errorbar(place, mean, yerr=[[mean - low], [high - mean]], color="black", capsize=3, linewidth=1)
            axis.annotate(f"{mean:.4g}", (place, high), ha="center", va="bottom", fontsize=8)
        axis.set_xticks(range(len(summary)), [name.replace("_", "\n") for name in summary], fontsize=8)
        axis.set_title(title, fontsize=9)
        axis.margins(y=0.15)
        axis.spines[["top", "right"]].set_visible(False)
    workload = result["workload"]
    seeds = len(result["runs"]["jagged"])
    figure.suptitle(f"SASRec on {workload['file']}, {result['environment']['device']}, mean of {seeds} seeds", fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)


COLOURS = {"jagged": "#1f6f8b", "padded": "#b9c4c9", "sll": "#d9a066", "fbgemm": "#a4707c"}


def jagged_ops_table(result: dict[str, Any], path: Path) -> None:
    """The paper's table: time of each operator and implementation, forward and backward, on a logarithmic scale."""
    table = result["table"]
    dtypes = [name for name in ("bf16", "fp32") if name in table]
    figure, axes = plt.subplots(len(dtypes), 2, figsize=(13, 3.6 * len(dtypes)), layout="constrained", squeeze=False)
    for row, dtype in zip(axes, dtypes, strict=True):
        for axis, way in zip(row, ("forward", "backward"), strict=True):
            names = list(table[dtype])
            for place, name in enumerate(names):
                found = {who: _median(table[dtype][name], who, way) for who in COLOURS}
                bars = {who: time for who, time in found.items() if time is not None}
                for k, (who, time) in enumerate(bars.items()):
                    x = place + (k - (len(bars) - 1) / 2) * 0.22
                    axis.bar(x, time, 0.2, color=COLOURS[who], label=who)
                    axis.annotate(f"{time:.3g}", (x, time), ha="center", va="bottom", fontsize=6, rotation=90)
            axis.set_yscale("log")
            axis.set_ylabel("microseconds")
            axis.set_xticks(range(len(names)), [name.replace("_", " ") for name in names], fontsize=7, rotation=25, ha="right")
            axis.set_title(f"{way}, {dtype}", fontsize=9)
            axis.margins(y=0.25)
            axis.spines[["top", "right"]].set_visible(False)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    figure.legend(handles, COLOURS, loc="outside right upper", fontsize=8)
    sizes = f"{table['samples']} samples, lengths uniform on 0..{table['longest']}, D = {table['D']}, T = {table['T']}"
    figure.suptitle(f"Jagged operators, {sizes}, {result['environment']['device']}", fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def jagged_ops_sweep(part: str, label: str, result: dict[str, Any], path: Path) -> None:
    """Forward time of each operator along one size."""
    sweep = {int(size): of for size, of in result[part]["by"].items() if of}
    names = list(next(iter(sweep.values())))
    columns = min(4, len(names))
    rows = -(-len(names) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(3.2 * columns, 2.5 * rows), layout="constrained", squeeze=False)
    for axis, name in zip(axes.flat, names, strict=False):
        for who, colour in COLOURS.items():
            points = [(size, _median(of[name], who, "forward")) for size, of in sweep.items() if name in of]
            known = [(size, time) for size, time in points if time is not None]
            if known:
                axis.plot(*zip(*known, strict=True), color=colour, marker="o", markersize=3, label=who)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_title(name, fontsize=8)
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in list(axes.flat)[len(names) :]:
        axis.set_visible(False)
    axes[0][0].legend(fontsize=7, frameon=False)
    figure.supxlabel(label, fontsize=8)
    figure.supylabel("forward, microseconds", fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _median(row: dict[str, Any], who: str, way: str) -> float | None:
    median = row.get(who, {}).get(way, {}).get("median")
    return None if median is None else float(median)


DRAWN: dict[str, dict[str, Callable[[dict[str, Any], Path], None]]] = {
    "train_sasrec": {"train_sasrec": train_sasrec},
    "jagged_ops": {
        "jagged_ops": jagged_ops_table,
        "jagged_ops_mean_length": partial(jagged_ops_sweep, "mean_length", "mean length of samples, the rows fixed"),
        "jagged_ops_batch_size": partial(jagged_ops_sweep, "batch_size", "samples, lengths uniform on 0..100"),
        "jagged_ops_max_length": partial(jagged_ops_sweep, "max_length", "maximum length that is declared, the data fixed"),
    },
}


def main() -> None:
    """Draw every figure of every result file."""
    for benchmark, figures in DRAWN.items():
        for source in sorted(ROOT.glob(f"results/*/{benchmark}.json")):
            for name, draw in figures.items():
                target = ROOT / "figures" / f"{name}-{source.parent.name}.png"
                target.parent.mkdir(exist_ok=True)
                draw(json.loads(source.read_text()), target)
                print(target)


if __name__ == "__main__":
    main()
