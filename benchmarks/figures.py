"""Draw the figures from the result files alone, and the picture of attention's masks.

python -m benchmarks.figures
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import torch

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import NullFormatter

from benchmarks.attention_cases import Mask
from benchmarks.common import ROOT
from benchmarks.embedding_sweep import ratio_of

PANELS = {
    "seconds": "training, seconds",
    "seconds_per_epoch": "an epoch with validation, seconds",
    "peak_reserved_mb": "peak GPU memory, MiB",
    "test_ndcg@10_left_in": "test NDCG@10, seen items left in",
    "test_ndcg@10_taken_out": "test NDCG@10, seen items taken out",
}


def train_sasrec(result: dict[str, Any], path: Path) -> None:
    """Bars of the mean over seeds, with whiskers from the smallest to the largest: a line for each model or head."""
    summary = result["summary"]
    panels = {key: title for key, title in PANELS.items() if key in next(iter(summary.values()))}
    size = (3.1 * len(panels), 1.1 + 0.3 * len(summary))
    figure, axes = plt.subplots(1, len(panels), figsize=size, sharey=True, layout="constrained")
    for axis, (key, title) in zip(axes, panels.items(), strict=True):
        for place, (name, of) in enumerate(summary.items()):
            mean, low, high = (of[key][kind] for kind in ("mean", "min", "max"))
            axis.barh(place, mean, color="#1f6f8b" if name in ("jagged", "cce") else "#b9c4c9")
            axis.errorbar(mean, place, xerr=[[mean - low], [high - mean]], color="black", capsize=3, linewidth=1)
            axis.annotate(f" {mean:.4g}", (high, place), va="center", fontsize=8)
        axis.set_yticks(range(len(summary)), [name.replace("_", " ") for name in summary], fontsize=8)
        axis.set_title(title, fontsize=9)
        axis.margins(x=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    workload = result["workload"]
    seeds = len(next(iter(result["runs"].values())))
    figure.suptitle(f"SASRec on {workload['file']}, {result['environment']['device']}, mean of {seeds} seeds", fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)


COLOURS = {"jagged": "#1f6f8b", "padded": "#b9c4c9", "sll": "#d9a066", "fbgemm": "#a4707c"}


WAYS = {"forward": "forward", "backward": "backward", "forward_backward": "forward and backward"}


def jagged_ops_times(part: str, result: dict[str, Any], path: Path) -> None:
    """Time of each operator and implementation, each direction measured, on a logarithmic scale."""
    by = result[part]["by"]
    ways = [way for way in WAYS if any(way in row.get("jagged", {}) for cases in by.values() for row in cases.values())]
    figure, axes = plt.subplots(len(by), len(ways), figsize=(8 * len(ways), 3.8 * len(by)), layout="constrained", squeeze=False)
    for row, (dtype, cases) in zip(axes, by.items(), strict=True):
        for axis, way in zip(row, ways, strict=True):
            for place, of in enumerate(cases.values()):
                found = {who: _median(of, who, way) for who in COLOURS}
                bars = {who: time for who, time in found.items() if time is not None}
                for k, (who, time) in enumerate(bars.items()):
                    x = place + (k - (len(bars) - 1) / 2) * 0.18
                    axis.bar(x, time, 0.16, color=COLOURS[who])
                    axis.annotate(
                        f"{time:.0f}" if time >= 100 else f"{time:.3g}",
                        (x, time),
                        ha="center",
                        va="bottom",
                        fontsize=6,
                        rotation=90,
                    )
            axis.set_yscale("log")
            axis.set_ylabel("microseconds")
            axis.set_xticks(range(len(cases)), [name.replace("_", " ") for name in cases], fontsize=7, rotation=30, ha="right")
            axis.set_title(f"{WAYS[way]}, {dtype}", fontsize=9)
            axis.margins(y=0.25)
            axis.spines[["top", "right"]].set_visible(False)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    figure.legend(handles, COLOURS, loc="outside right upper", fontsize=8)
    figure.suptitle(f"Jagged operators, {_sizes(result[part])}, {result['environment']['device']}", fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def jagged_ops_savings(result: dict[str, Any], path: Path) -> None:
    """What padding takes in time, memory and FLOPs of the forward pass, as a multiple of ours."""
    dtype, cases = next(iter(result["table"]["by"].items()))
    right = {name: row for name, row in cases.items() if "forward" in row["jagged"] and "forward" in row["padded"]}
    panels: dict[str, Callable[[dict[str, Any]], float]] = {
        "time": lambda row: row["padded"]["forward"]["median"] / row["jagged"]["forward"]["median"],
        "peak memory beyond the inputs": lambda row: row["padded"]["peak_bytes_forward"] / row["jagged"]["peak_bytes_forward"],
        "FLOPs": lambda row: row["padded_flops"] / row["flops"] if row["flops"] else 1.0,
    }
    figure, axes = plt.subplots(1, len(panels), figsize=(4.4 * len(panels), 4.4), layout="constrained", sharey=True)
    for axis, (title, multiple) in zip(axes, panels.items(), strict=True):
        values = [multiple(row) for row in right.values()]
        axis.barh(range(len(values)), values, color=COLOURS["jagged"])
        for place, value in enumerate(values):
            axis.annotate(f" {value:.3g}", (value, place), va="center", fontsize=7)
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set_yticks(range(len(values)), list(right), fontsize=7)
        axis.set_title(title, fontsize=9)
        # One operator's hundreds would hide the others.
        axis.set_xscale("log" if max(values, default=1.0) > 20 else "linear")
        axis.margins(x=0.15)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    machine = result["environment"]["device"]
    figure.suptitle(f"Padding as a multiple of jagged, {dtype}, {_sizes(result['table'])}, {machine}", fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def jagged_ops_sweep(part: str, label: str, result: dict[str, Any], path: Path) -> None:
    """Time of each operator along one size: forward in full lines, backward in dashed ones."""
    sweep = {int(size): of for size, of in result[part]["by"].items()}
    names = list(next(iter(sweep.values())))
    columns = min(4, len(names))
    rows = -(-len(names) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(3.2 * columns, 2.5 * rows), layout="constrained", squeeze=False)
    for axis, name in zip(axes.flat, names, strict=False):
        for who, colour in {**COLOURS, "copy": "#555555"}.items():
            for way, style in (("forward", "-"), ("backward", "--")):
                points = [(size, _median(of[name], who, way)) for size, of in sweep.items()]
                known = [(size, time) for size, time in points if time is not None]
                if known:
                    axis.plot(*zip(*known, strict=True), style, color=colour, marker="o", markersize=2, linewidth=1)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_title(name, fontsize=8)
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in list(axes.flat)[len(names) :]:
        axis.set_visible(False)
    handles = [plt.Line2D([], [], color=colour) for colour in [*COLOURS.values(), "#555555", "black", "black"]]
    handles[-1].set_linestyle("--")
    figure.legend(handles, [*COLOURS, "copy of as many bytes", "forward", "backward"], loc="outside right upper", fontsize=8)
    figure.suptitle(f"{result['environment']['device']}, {next(iter(result[part]['sizes'].values()))['dtype']}", fontsize=9)
    figure.supxlabel(label, fontsize=8)
    figure.supylabel("microseconds", fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _sizes(part: dict[str, Any]) -> str:
    size = next(iter(part["sizes"].values()))
    return f"{size['samples']} samples, lengths {size['lengths']}, D = {size['D']}, T = {size['T']}"


def _median(row: dict[str, Any], who: str, way: str) -> float | None:
    median = row.get(who, {}).get(way, {}).get("median")
    return None if median is None else float(median)


ATTENTION_COLOURS = {
    "jagged": "#1f6f8b",
    "fa2": "#d1495b",
    "fa4": "#8f2d3c",
    "fa4_deterministic": "#e59aa5",
    "sll": "#d9a066",
    "sll_dense": "#a4707c",
    "padded_math": "#8d99ae",
    "padded_flash": "#b9c4c9",
    "padded_efficient": "#adb5bd",
    "padded_cudnn": "#6c757d",
    "padded": "#b9c4c9",
    "flex": "#7a9e7e",
    "nested": "#c9b1d9",
}
ATTENTION_NAMES = {
    "fa2": "FlashAttention-2",
    "fa4": "FlashAttention-4",
    "fa4_deterministic": "FlashAttention-4, deterministic",
    "sll": "FBGEMM sll, flash",
    "sll_dense": "FBGEMM sll, not flash",
    "padded_math": "padded, math (dense)",
    "padded_flash": "padded, flash (dense flash)",
    "padded_efficient": "padded, memory-efficient",
    "padded_cudnn": "padded, cuDNN",
    "flex": "FlexAttention",
    "nested": "nested tensors",
}


def attention_rates(part: str, result: dict[str, Any], path: Path) -> None:
    """TFLOP/s of useful work of each case and implementation, both directions."""
    rows = result[part]["rows"]
    present = _present(rows)
    figure, axes = plt.subplots(2, 1, figsize=(max(7, 1.6 * len(rows)), 7.6), layout="constrained", sharex=True)
    for axis, way in zip(axes, ("forward", "backward"), strict=True):
        for place, row in enumerate(rows.values()):
            rates = {who: row.get(who, {}).get(way, {}).get("tflop_per_s") for who in present}
            known = {who: rate for who, rate in rates.items() if rate is not None}
            for k, (who, rate) in enumerate(known.items()):
                x = place + (k - (len(known) - 1) / 2) * 0.8 / len(present)
                axis.bar(x, rate, 0.72 / len(present), color=ATTENTION_COLOURS[who])
                axis.annotate(f"{rate:.3g}", (x, rate), ha="center", va="bottom", fontsize=6, rotation=90)
        axis.set_title(way, fontsize=9)
        axis.set_ylabel("TFLOP/s of useful work", fontsize=8)
        axis.margins(y=0.15)
        axis.spines[["top", "right"]].set_visible(False)
    labels = [name.replace(": ", ":\n").replace(" causal", "\ncausal").replace(" full", "\nfull") for name in rows]
    axes[1].set_xticks(range(len(rows)), labels, fontsize=7)
    handles: list[Any] = [plt.Rectangle((0, 0), 1, 1, color=ATTENTION_COLOURS[who]) for who in present]
    names = [ATTENTION_NAMES.get(who, who) for who in present]
    figure.legend(handles, names, loc="outside right upper", fontsize=8)
    dtype = next(iter(rows.values()))["size"]["dtype"]
    figure.suptitle(f"Attention, {dtype}, {result['environment']['device']}", fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def attention_biases(result: dict[str, Any], path: Path) -> None:
    """Times of attention with biases, dropout and SiLU weights, of each shape in units of what they are compared with."""
    rows = result["biases"]["rows"]
    shapes = list(dict.fromkeys(name.split(": ")[0] for name in rows))
    figure, axes = plt.subplots(
        1, len(shapes), figsize=(5.2 * len(shapes), 4.2), layout="constrained", sharey=True, squeeze=False
    )
    for axis, shape in zip(axes[0], shapes, strict=True):
        of_shape = {name: row for name, row in rows.items() if name.startswith(f"{shape}: ") and "compared" in row}
        for place, row in enumerate(of_shape.values()):
            for way, side in (("forward", -0.2), ("backward", 0.2)):
                ratio, y = row["compared"]["ratio"][way], place + side
                axis.barh(y, ratio, 0.36, color=ATTENTION_COLOURS["jagged"], alpha=1.0 if way == "forward" else 0.55)
                axis.annotate(f" {ratio:.2f}", (ratio, y), va="center", fontsize=7)
        against = [row["compared"]["with"] for row in of_shape.values()]
        labels = [f"{name.split(': ')[1]}\n/ {other}" for name, other in zip(of_shape, against, strict=True)]
        axis.set_yticks(range(len(of_shape)), labels, fontsize=7)
        axis.set_title(f"{shape} causal", fontsize=9)
        axis.set_xlabel("times as long", fontsize=8)
        axis.margins(x=0.12)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].invert_yaxis()
    colour = ATTENTION_COLOURS["jagged"]
    handles: list[Any] = [plt.Rectangle((0, 0), 1, 1, color=colour), plt.Rectangle((0, 0), 1, 1, color=colour, alpha=0.55)]
    figure.legend(handles, ["forward", "backward"], loc="outside right upper", fontsize=8)
    figure.suptitle(f"Attention with biases, bf16, {result['environment']['device']}", fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def attention_paper(result: dict[str, Any], path: Path) -> None:
    """Time and memory against the maximum length: Figure 2 of the paper, with both directions."""
    rows = {int(length): row for length, row in result["paper"]["rows"].items()}
    figure, axes = plt.subplots(2, 2, figsize=(10.5, 7), layout="constrained", sharex=True)

    def milliseconds(of: dict[str, Any], way: str) -> float | None:
        median = of.get(way, {}).get("median")
        return None if median is None else float(median) / 1e3

    def megabytes(of: dict[str, Any], way: str) -> float | None:
        peak = of.get(f"peak_bytes_{way}")
        return None if peak is None else float(peak + of["input_bytes"]) / 1e6

    panels: list[tuple[str, Callable[[dict[str, Any]], float | None]]] = [
        ("forward, milliseconds", partial(milliseconds, way="forward")),
        ("backward, milliseconds", partial(milliseconds, way="backward")),
        ("memory of a forward pass, inputs counted, MB", partial(megabytes, way="forward")),
        ("memory of both passes, inputs counted, MB", partial(megabytes, way="both")),
    ]
    for axis, (title, value) in zip(axes.flat, panels, strict=True):
        for who in _present(rows):
            points = [(length, value(row.get(who, {}))) for length, row in rows.items()]
            known = [(length, y) for length, y in points if y is not None]
            if known:
                axis.plot(*zip(*known, strict=True), marker="o", markersize=3, linewidth=1.2, color=ATTENTION_COLOURS[who])
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_title(title, fontsize=9)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    present = _present(rows)
    handles = [plt.Line2D([], [], color=ATTENTION_COLOURS[who], marker="o", markersize=3) for who in present]
    figure.legend(handles, [ATTENTION_NAMES.get(who, who) for who in present], loc="outside right upper", fontsize=8)
    figure.supxlabel("maximum length; lengths uniform up to it, 2^18 rows with padding", fontsize=9)
    size = next(iter(rows.values()))["size"]
    machine = result["environment"]["device"]
    figure.suptitle(f"{size['heads']} heads of width {size['width']}, full attention, {size['dtype']}, {machine}", fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _present(rows: dict[Any, dict[str, Any]]) -> list[str]:
    return [who for who in ATTENTION_COLOURS if any(who in row for row in rows.values())]


CROSS_ENTROPY_COLOURS = {
    "jagged": "#1f6f8b",
    "jagged_fused": "#4a94ad",
    "jagged_chunked": "#86bccd",
    "cut": "#d1495b",
    "liger": "#d9a066",
    "compiled": "#8d99ae",
    "eager": "#b9c4c9",
}
CROSS_ENTROPY_NAMES = {
    "jagged_fused": "jagged, fused",
    "jagged_chunked": "jagged, chunked",
    "cut": "cut-cross-entropy",
    "liger": "Liger",
    "compiled": "torch.compile",
    "eager": "PyTorch",
}


def cross_entropy_methods(result: dict[str, Any], path: Path) -> None:
    """Time forward and of both passes, and memory, of each size by method."""
    rows = result["full"]["rows"]
    present = [who for who in CROSS_ENTROPY_COLOURS if any(who in row for row in rows.values())]
    panels: dict[str, tuple[str, Callable[[dict[str, Any]], float | None]]] = {
        "forward": ("forward, milliseconds", partial(_milliseconds, way="forward")),
        "both": ("forward and backward, milliseconds", partial(_milliseconds, way="both")),
        "memory": (
            "both passes, MB beyond inputs and results",
            lambda of: max(1.0, of["beyond_bytes_both"] / 1e6) if "beyond_bytes_both" in of else None,
        ),
    }
    figure, axes = plt.subplots(len(panels), 1, figsize=(8.5, 9), layout="constrained", sharex=True)
    for axis, (title, value) in zip(axes, panels.values(), strict=True):
        for place, row in enumerate(rows.values()):
            for k, who in enumerate(present):
                x = place + (k - (len(present) - 1) / 2) * 0.8 / len(present)
                number = value(row.get(who, {}))
                if number is None:
                    # A stump below the axis' numbers would look like a short time.
                    axis.annotate("no", (x, 0.02), xycoords=("data", "axes fraction"), ha="center", fontsize=6, color="#777777")
                    continue
                axis.bar(x, number, 0.72 / len(present), color=CROSS_ENTROPY_COLOURS[who])
                text = f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
                axis.annotate(text, (x, number), ha="center", va="bottom", fontsize=6, rotation=90)
        axis.set_yscale("log")
        axis.set_title(title, fontsize=9)
        axis.margins(y=0.2)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xticks(range(len(rows)), list(rows), fontsize=8)
    handles: list[Any] = [plt.Rectangle((0, 0), 1, 1, color=CROSS_ENTROPY_COLOURS[who]) for who in present]
    names = [CROSS_ENTROPY_NAMES.get(who, who) for who in present]
    figure.legend(handles, names, loc="outside right upper", fontsize=8)
    figure.suptitle(f"Cross-entropy over all items, N x V x D, bf16, {result['environment']['device']}", fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def cross_entropy_scaling(result: dict[str, Any], path: Path) -> None:
    """Time and memory of both passes along items, width and negatives, beside what the gradients alone take."""
    rows = result["scaling"]["rows"].values()
    axes_of = {"items": "items", "width": "width", "negatives": "negatives of a row"}
    copy = result["environment"].get("copy_gb_per_s")
    figure, axes = plt.subplots(2, len(axes_of), figsize=(11, 6.4), layout="constrained", squeeze=False)
    colours = {
        "jagged": ("#1f6f8b", "all items"),
        "jagged_sampled": ("#d9a066", "sampled"),
        "jagged_sparse": ("#a4707c", "sampled, sparse gradient"),
    }
    for column, (axis_name, label) in enumerate(axes_of.items()):
        along = [row for row in rows if row["along"][0] == axis_name]
        for who, (colour, _) in colours.items():
            points = sorted((row["along"][1], row) for row in along if "both" in row.get(who, {}))
            times = [(x, row[who]["both"]["median"] / 1e3) for x, row in points]
            peaks = [(x, row[who]["peak_bytes_both"] / 1e6) for x, row in points if "peak_bytes_both" in row[who]]
            for axis, known in ((axes[0][column], times), (axes[1][column], peaks)):
                if known:
                    axis.plot(*zip(*known, strict=True), marker="o", markersize=3, linewidth=1.2, color=colour)
        least = sorted({(row["along"][1], row["gradient_bytes"]) for row in along})
        if least:
            x, sizes = zip(*least, strict=True)
            axes[1][column].plot(x, [size / 1e6 for size in sizes], "--", color="black", linewidth=0.9)
            if copy:
                axes[0][column].plot(x, [size / copy / 1e6 for size in sizes], "--", color="black", linewidth=0.9)
        axes[1][column].set_xlabel(label, fontsize=8)
        ticks = sorted({row["along"][1] for row in along})
        for axis in axes[:, column]:
            axis.set_xscale("log")
            axis.set_yscale("log")
            axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks], fontsize=7)
            axis.set_xticks([], minor=True)
            # Less than a decade of numbers would have no labels.
            low, high = axis.get_ylim()
            axis.set_ylim(low / 2, max(high * 2, low * 30))
    for row_of_axes, label in zip(axes, ("both passes, milliseconds", "peak memory of both passes, MB"), strict=True):
        row_of_axes[0].set_ylabel(label, fontsize=8)
        for axis in row_of_axes:
            axis.yaxis.set_minor_formatter(NullFormatter())
            axis.tick_params(labelsize=7)
            axis.spines[["top", "right"]].set_visible(False)
    handles = [plt.Line2D([], [], color=colour, marker="o", markersize=3) for colour, _ in colours.values()]
    handles.append(plt.Line2D([], [], color="black", linestyle="--", linewidth=0.9))
    names = [*(name for _, name in colours.values()), "the gradients' bytes, and a copy of them"]
    figure.legend(handles, names, loc="outside upper right", fontsize=8, ncols=3)
    size = next(iter(rows))["size"]
    machine = result["environment"]["device"]
    figure.suptitle(f"Cross-entropy, {size['rows']:,} rows, {size['dtype']}, {machine}", fontsize=10, x=0.02, ha="left")
    figure.savefig(path, dpi=130)
    plt.close(figure)


# Of the CCE- paper's four losses the colour and the name.
STEPS = {
    "eager": ("#b9c4c9", "CE: PyTorch"),
    "jagged": ("#1f6f8b", "CCE: jagged"),
    "gathered": ("#d9a066", "CE-: PyTorch, gathered rows"),
    "jagged_sampled": ("#d1495b", "CCE-: jagged, sampled"),
}


def cross_entropy_steps(result: dict[str, Any], path: Path) -> None:
    """Time and memory of a training step at the paper's sizes by loss; an empty place is a step that does not fit."""
    rows = result["steps"]["rows"]
    panels: dict[str, Callable[[dict[str, Any]], float | None]] = {
        "milliseconds a step": partial(_milliseconds, way="step"),
        "GB at most in a step": lambda of: of["peak_bytes_step"] / 1e9 if "peak_bytes_step" in of else None,
    }
    figure, axes = plt.subplots(1, len(panels), figsize=(9.5, 5), layout="constrained", sharey=True)
    for axis, (title, value) in zip(axes, panels.items(), strict=True):
        for place, row in enumerate(rows.values()):
            axis.axhline(place, color="#eceff1", linewidth=0.8, zorder=0)
            for who, (colour, _) in STEPS.items():
                number = value(row.get(who, {}))
                if number is not None:
                    axis.plot(number, place, "o", color=colour, markersize=6)
        axis.set_xscale("log")
        axis.set_xlabel(title, fontsize=8)
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right", "left"]].set_visible(False)
    axes[0].set_yticks(range(len(rows)), list(rows), fontsize=7)
    axes[0].invert_yaxis()
    handles = [plt.Line2D([], [], color=colour, marker="o", linestyle="") for colour, _ in STEPS.values()]
    figure.legend(handles, [name for _, name in STEPS.values()], loc="outside lower center", fontsize=8, ncols=4)
    figure.suptitle(
        f"A training step of SASRec; batch x length, negatives, {result['environment']['device']}", fontsize=10, x=0.02, ha="left"
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _milliseconds(of: dict[str, Any], way: str) -> float | None:
    median = of.get(way, {}).get("median")
    return None if median is None else float(median) / 1e3


EMBEDDING_METHODS = {
    "jagged": ("#1f6f8b", "jagged"),
    "fbgemm": ("#d1495b", "FBGEMM"),
    "fbgemm_v2": ("#d9a066", "FBGEMM, second version"),
}


def embedding_bags_model(name: str, result: dict[str, Any], path: Path) -> None:
    """Time of a model by implementation, both directions, with the limit."""
    row = result["models"]["rows"].get(name)
    if row is None:
        return
    ways = {"forward": "forward", "backward": "backward with SGD"}
    figure, axes = plt.subplots(1, len(ways), figsize=(7.2, 3), layout="constrained")
    for axis, (way, words) in zip(axes, ways.items(), strict=True):
        known = {who: of for who in EMBEDDING_METHODS if (of := _milliseconds(row.get(who, {}), way)) is not None}
        for place, (who, number) in enumerate(known.items()):
            axis.barh(place, number, 0.7, color=EMBEDDING_METHODS[who][0])
            axis.annotate(f" {number:.3g}", (number, place), va="center", fontsize=8)
        axis.set_yticks(range(len(known)), [EMBEDDING_METHODS[who][1] for who in known], fontsize=8)
        axis.invert_yaxis()
        if "limit_us" in row:
            axis.axvline(row["limit_us"][way] / 1e3, color="black", linewidth=0.9, linestyle=":")
        axis.set_xlim(left=0)
        axis.margins(x=0.15)
        axis.set_title(f"{words}, milliseconds", fontsize=9)
        axis.tick_params(axis="x", labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    lines = [plt.Line2D([], [], color="black", linewidth=0.9, linestyle=":")]
    figure.legend(lines, ["limit: bytes at the speed of a copy"], loc="outside lower center", fontsize=8)
    machine = result["environment"]["device"]
    figure.suptitle(f"Model {name}: {row['features']:,} features, {row['samples']} samples, {machine}", fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def embedding_bags_sizes(result: dict[str, Any], path: Path) -> None:
    """Time of a forward pass over the number of samples, a panel for each model."""
    rows = [row for part in ("models", "sizes") for row in result.get(part, {}).get("rows", {}).values()]
    names = sorted({row["shape"] for row in rows})
    figure, axes = plt.subplots(
        1, len(names), figsize=(2.6 * len(names) + 1, 3.2), layout="constrained", sharey=True, squeeze=False
    )
    for axis, name in zip(axes[0], names, strict=True):
        of_model = sorted((row for row in rows if row["shape"] == name), key=lambda row: row["samples"])
        for who, (colour, _) in EMBEDDING_METHODS.items():
            points = [(row["samples"], _milliseconds(row.get(who, {}), "forward")) for row in of_model]
            if known := [point for point in points if point[1] is not None]:
                axis.plot(*zip(*known, strict=True), marker="o", markersize=3, linewidth=1.2, color=colour)
        limits = [(row["samples"], row["limit_us"]["forward"] / 1e3) for row in of_model if "limit_us" in row]
        if limits:
            axis.plot(*zip(*limits, strict=True), ":", color="black", linewidth=0.9)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks([row["samples"] for row in of_model], [f"{row['samples']:,}" for row in of_model], fontsize=7)
        axis.set_title(f"model {name}", fontsize=9)
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("forward, milliseconds", fontsize=8)
    handles = [plt.Line2D([], [], color=colour, marker="o", markersize=3) for colour, _ in EMBEDDING_METHODS.values()]
    handles.append(plt.Line2D([], [], color="black", linestyle=":", linewidth=0.9))
    words = [*(label for _, label in EMBEDDING_METHODS.values()), "limit: bytes at the speed of a copy"]
    figure.legend(handles, words, loc="outside lower center", fontsize=8, ncols=4)
    figure.suptitle(f"Embedding bags over the number of samples, {result['environment']['device']}", fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)


SWEPT = {
    "forward": ("#1f6f8b", "forward, the better version of FBGEMM"),
    "sgd": ("#d1495b", "backward with SGD"),
    "rowwise_adagrad": ("#d9a066", "backward with row-wise Adagrad"),
}


def embedding_sweep_ratios(result: dict[str, Any], path: Path) -> None:
    """How many times as fast as FBGEMM, over the number of samples: a panel a shape, seeds as a median and a range."""
    rows = list(result["cases"].values())
    names = list(dict.fromkeys(row["shape"] for row in rows))
    columns = min(4, len(names))
    lines = -(-len(names) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(3.1 * columns + 1, 2.7 * lines + 0.8), layout="constrained", sharey=True, squeeze=False
    )
    for axis, name in zip(axes.flat, names, strict=False):
        for (kind, (colour, _)), (distribution, style) in itertools.product(SWEPT.items(), (("uniform", "-"), ("zipf", "--"))):
            ratios: dict[int, list[float]] = {}
            for row in rows:
                if (row["shape"], row["distribution"]) == (name, distribution) and (ratio := ratio_of(row, kind)) is not None:
                    ratios.setdefault(row["size"], []).append(ratio)
            if not ratios:
                continue
            sizes = sorted(ratios)
            medians = [statistics.median(ratios[size]) for size in sizes]
            ranges = [
                [median - min(ratios[size]) for size, median in zip(sizes, medians, strict=True)],
                [max(ratios[size]) - median for size, median in zip(sizes, medians, strict=True)],
            ]
            axis.errorbar(sizes, medians, ranges, color=colour, linestyle=style, marker="o", markersize=2, linewidth=1, capsize=2)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.set_xticks(shown := [1, 8, 64, 512, 4096], [f"{size:,}" for size in shown])
        axis.set_yscale("log", base=2)
        axis.set_yticks(shown := [0.5, 1, 2, 4, 8], [f"{ratio:g}" for ratio in shown])
        axis.set_title(f"model {name}" if len(name) == 1 else name, fontsize=9)
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in list(axes.flat)[len(names) :]:
        axis.set_axis_off()
    handles = [plt.Line2D([], [], color=colour, marker="o", markersize=3) for colour, _ in SWEPT.values()]
    handles += [plt.Line2D([], [], color="black", linestyle=style) for style in ("-", "--")]
    words = [*(label for _, label in SWEPT.values()), "uniform ids", "Zipf's ids"]
    figure.legend(handles, words, loc="outside lower center", fontsize=8, ncols=5)
    for axis in axes[-1]:
        axis.set_xlabel("samples", fontsize=8)
    figure.supylabel("times as fast as FBGEMM", fontsize=8)
    figure.suptitle(f"Embedding bags over batches, seeds and ids, {result['environment']['device']}", fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)


PASSES = {"forward": ("#1f6f8b", "logits"), "weight": ("#d9a066", "gradient of weights"), "features": ("#d1495b", "of features")}
# Of a curve: what stands below its panel, and the number of a row that it is along.
CURVES: dict[str, tuple[str, Callable[[dict[str, Any]], float]]] = {
    "labels": ("labels", lambda row: row["labels"]),
    "sparsity": (
        "share of the weights that are none, 670,000 labels",
        lambda row: 1 - row["size"]["width"] / row["size"]["features"],
    ),
    "groups": ("labels of a group, 670,000 labels", lambda row: row["size"]["group"]),
}


#: Models of which candidates are drawn; all are in the table.
CANDIDATE_MODELS = ("ranking", "dlrm-hstu", "din", "dlrm", "dcnv2", "wukong")


def many_candidates(result: dict[str, Any], path: Path) -> None:
    """Time and memory of a step over candidates a request, and those of expanded requests; forecast where these do not fit."""
    models = [name for name in CANDIDATE_MODELS if name in result["models"]]
    size = (2.5 * len(models), 5)
    figure, axes = plt.subplots(2, len(models), figsize=size, sharex=True, sharey="row", layout="constrained", squeeze=False)
    for column, name in zip(axes.T, models, strict=True):
        rows = {int(count): row for count, row in result["models"][name].items()}
        for axis, (key, scale) in zip(column, {"gpu_ms": 1.0, "bytes": 1e-9}.items(), strict=True):
            for way, colour in {"jagged": COLOURS["jagged"], "expanded": COLOURS["sll"]}.items():
                found = {count: row[way][key] * scale for count, row in rows.items() if key in row.get(way, ())}
                axis.plot(list(found), list(found.values()), "o-", color=colour, markersize=3, label=way)
                forecast = {count: row[way].get("forecast_bytes") for count, row in rows.items() if way in row}
                if key == "bytes" and (missing := {count: of * scale for count, of in forecast.items() if of is not None}):
                    last = max(found)
                    axis.plot(
                        [last, *missing], [found[last], *missing.values()], "o:", color=colour, markersize=3, fillstyle="none"
                    )
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.set_xticks(list(rows), [f"{count:,}" for count in rows], fontsize=8)
            axis.spines[["top", "right"]].set_visible(False)
        column[0].set_title(name, fontsize=9)
        column[1].set_xlabel("candidates a request", fontsize=8)
    axes[0, 0].set_ylabel("a step on the GPU, ms", fontsize=8)
    axes[1, 0].set_ylabel("its memory at the peak, GB", fontsize=8)
    axes[0, 0].legend(fontsize=8, frameon=False)
    environment = result["environment"]
    title = f"{result['requests']:,} requests on one {environment['device']}; dotted: expanded requests would not fit"
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def sparse_output_curves(result: dict[str, Any], path: Path) -> None:
    """Time of a pass along labels, sparsity and labels of a group, beside dense layers of equal FLOPs; memory along labels."""
    shown = [name for name in CURVES if name in result]
    figure, axes = plt.subplots(1, len(shown) + 1, figsize=(3.1 * len(shown) + 3, 3.2), layout="constrained", squeeze=False)
    for axis, name in zip(axes[0], shown, strict=False):
        words, along = CURVES[name]
        rows = sorted(result[name].values(), key=along)
        for way, (colour, _) in PASSES.items():
            for who, style in (("jagged", "-"), ("dense", "--")):
                points = [(along(row), row[who][way]["median"] / 1e3) for row in rows]
                axis.plot(*zip(*points, strict=True), style, color=colour, marker="o", markersize=3, linewidth=1.2)
        axis.set_yscale("log")
        if name != "sparsity":
            axis.set_xscale("log", base=2 if name == "groups" else 10)
        axis.set_xlabel(words, fontsize=8)
    rows = sorted(result.get("labels", result[shown[0]]).values(), key=lambda row: row["labels"])
    kept = {"weights": ("weight", "-"), "inputs of groups": ("supports", ":"), "a dense layer of all features": ("dense", "--")}
    last = axes[0][-1]
    for words, (name, style) in kept.items():
        points = [(row["labels"], row["bytes"][name] / 1e9) for row in rows]
        last.plot(*zip(*points, strict=True), style, color="#333333", linewidth=1.2, label=words)
    last.set_xscale("log")
    last.set_yscale("log")
    last.set_xlabel("labels", fontsize=8)
    last.set_title("memory, GB", fontsize=9)
    # Room for the legend above the lines.
    last.set_ylim(top=30 * last.get_ylim()[1])
    last.legend(fontsize=7, loc="upper left")
    axes[0][0].set_ylabel("milliseconds", fontsize=8)
    for axis in axes[0]:
        axis.tick_params(which="both", labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    handles = [plt.Line2D([], [], color=colour) for colour, _ in PASSES.values()]
    handles.append(plt.Line2D([], [], color="black", linestyle="--"))
    words_of = [*(label for _, label in PASSES.values()), "dense, as many inputs as a group reads"]
    figure.legend(handles, words_of, loc="outside lower center", fontsize=8, ncols=4)
    figure.suptitle(f"Output layers of groups of labels, bfloat16, {result['environment']['device']}", fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)


# Of a sample of ten keys: what is drawn, the number of queries and what they see.
MASKS = {
    "no mask": (10, Mask()),
    "causal": (10, Mask(causal=True)),
    "window=3": (10, Mask(window=3)),
    "causal, window=3": (10, Mask(causal=True, window=3)),
    "causal, num_targets=3": (10, Mask(causal=True, num_targets=3)),
    "causal, num_contextual=2": (10, Mask(causal=True, num_contextual=2)),
    "all of them together": (10, Mask(causal=True, window=3, num_targets=3, num_contextual=2)),
    "causal, 4 queries": (4, Mask(causal=True)),
}
PICTURE = ROOT.parent / "docs" / "ops" / "attention_masks.svg"
KEYS = {"contextual": "#d9a066", "history": "#1f6f8b", "target": "#d1495b"}


def attention_masks() -> str:
    """SVG of which keys, left to right, the queries, top to bottom, see under each mask."""
    cell, wide, high = 13, 190, 175
    texts: list[str] = []
    squares: dict[str, list[str]] = {"#eceff1": [], **{colour: [] for colour in KEYS.values()}}

    def text(x: int, y: int, words: str) -> None:
        texts.append(f'<text x="{x}" y="{y}">{words}</text>')

    def square(x: int, y: int, colour: str) -> None:
        squares[colour].append(f"M{x} {y}h12v12h-12z")

    for place, (name, (queries, mask)) in enumerate(MASKS.items()):
        left, top = 20 + place % 4 * wide, 30 + place // 4 * high
        text(left, top - 8, name)
        seen = mask.seen(queries, 10, torch.device("cpu")).tolist()
        for row, sees in enumerate(seen):
            for key, visible in enumerate(sees):
                kind = (
                    "contextual" if key < mask.num_contextual else "target" if key >= 10 - (mask.num_targets or 0) else "history"
                )
                square(left + key * cell, top + row * cell, KEYS[kind] if visible else "#eceff1")
    bottom = 30 + 2 * high
    text(20, bottom, "Rows are queries, columns keys, coloured where they are seen:")
    for place, (kind, colour) in enumerate(KEYS.items()):
        square(420 + 100 * place, bottom - 10, colour)
        text(437 + 100 * place, bottom, kind)
    paths = [f'<path fill="{colour}" d="{"".join(of)}"/>' for colour, of in squares.items()]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {4 * wide} {bottom + 15}" font-family="sans-serif" font-size="12">'
    )
    return "\n".join([head, '<rect width="100%" height="100%" fill="#fff"/>', *paths, *texts, "</svg>", ""])


Draw = Callable[[dict[str, Any], Path], None]
# Of each benchmark: the key of a result file without which a figure is not drawn, and what draws it.
DRAWN: dict[str, dict[str, tuple[str, Draw]]] = {
    "train_sasrec": {"train_sasrec": ("summary", train_sasrec)},
    "train_sasrec_heads": {"train_sasrec_heads": ("summary", train_sasrec)},
    "jagged_ops": {
        "jagged_ops": ("table", partial(jagged_ops_times, "table")),
        "jagged_ops_cpu": ("cpu", partial(jagged_ops_times, "cpu")),
        "jagged_ops_savings": ("table", jagged_ops_savings),
        "jagged_ops_mean_length": (
            "mean_length",
            partial(jagged_ops_sweep, "mean_length", "mean length of samples, 65,536 rows in all"),
        ),
        "jagged_ops_batch_size": ("batch_size", partial(jagged_ops_sweep, "batch_size", "samples, lengths uniform on 0..100")),
        "jagged_ops_max_length": (
            "max_length",
            partial(jagged_ops_sweep, "max_length", "maximum length that is declared, the data fixed"),
        ),
    },
    "attention": {
        "attention": ("table", partial(attention_rates, "table")),
        "attention_paper": ("paper", attention_paper),
        "attention_skew": ("skew", partial(attention_rates, "skew")),
        "attention_options": ("options", partial(attention_rates, "options")),
        "attention_biases": ("biases", attention_biases),
        "attention_cpu": ("cpu", partial(attention_rates, "cpu")),
    },
    "cross_entropy": {
        "cross_entropy": ("full", cross_entropy_methods),
        "cross_entropy_scaling": ("scaling", cross_entropy_scaling),
        "cross_entropy_steps": ("steps", cross_entropy_steps),
    },
    "embedding_bags": {
        **{f"embedding_bags_{name}": ("models", partial(embedding_bags_model, name)) for name in "ABCDE"},
        "embedding_bags_sizes": ("sizes", embedding_bags_sizes),
    },
    "embedding_sweep": {"embedding_sweep": ("cases", embedding_sweep_ratios)},
    "many_candidates": {"many_candidates": ("models", many_candidates)},
    "sparse_output": {"sparse_output": ("labels", sparse_output_curves)},
}


# The machines whose figures the pages show; their tables have every machine.
SHOWN = ("cpu-2-threads", "h200")


def main() -> None:
    """Draw every figure of the machines that are shown, and the picture of the masks."""
    for benchmark, figures in DRAWN.items():
        for source in (path for machine in SHOWN if (path := ROOT / f"results/{machine}/{benchmark}.json").exists()):
            result = json.loads(source.read_text())
            for name, (part, draw) in figures.items():
                if part in result:
                    target = ROOT / "figures" / f"{name}-{source.parent.name}.png"
                    target.parent.mkdir(exist_ok=True)
                    draw(result, target)
                    print(target)
    PICTURE.write_text(attention_masks())
    print(PICTURE)


if __name__ == "__main__":
    main()
