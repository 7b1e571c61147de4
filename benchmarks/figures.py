"""Draw the figures from the result files alone.

python -m benchmarks.figures
"""

from __future__ import annotations

import json
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


def main() -> None:
    for source in sorted(ROOT.glob("results/*/train_sasrec.json")):
        target = ROOT / "figures" / f"train_sasrec-{source.parent.name}.png"
        target.parent.mkdir(exist_ok=True)
        train_sasrec(json.loads(source.read_text()), target)
        print(target)


if __name__ == "__main__":
    main()
