"""Models of clicks by name on the planted impressions: AUC beside the attainable one, each with the same number of trials.

    python -m benchmarks.click_models                     # some half a minute a training; what is measured already is kept
    python -m benchmarks.click_models --only dlrm --seconds 300

Samples, split and figures are those of `planted_impressions`. Of each model four trials, learning rates and weight decays, are
trained on the sample of seed 3; the one with the best validation, the mean over both tasks of the AUC less the attainable one, is
trained on the samples of seeds 0 to 2 and measured on their test parts. Sizes of the models are fixed.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from typing import Any

import numpy as np
import torch

from benchmarks.common import ROOT, environment, other_parts, save, seconds_of
from benchmarks.planted_impressions import BATCH_SIZE, MAX_HISTORY, TASKS, TRAINING, Sample
from jagged.config import TrainerConfig
from jagged.models import REQUEST_MODELS
from jagged.training import Trainer

TUNED_ON, SEEDS = 3, (0, 1, 2)
TRIALS = [{"learning_rate": rate, "weight_decay": decay} for rate, decay in itertools.product((2e-3, 4e-3), (0.1, 0.3))]
#: Of all models; and of each the options that say how large it is.
COMMON: dict[str, Any] = {"embedding_dim": 48, "conditional": {"buy": "click"}}
MODELS: dict[str, dict[str, Any]] = {
    "ranking": {"cross": "dot", "num_layers": 0, "num_time_buckets": None, "layer_sizes": (32, 16)},
    "dlrm": {"bottom_sizes": (32,), "top_sizes": (32, 16)},
    "dcnv2": {"cross_rank": 16, "cross_layers": 2, "layer_sizes": (32, 16)},
    "wukong": {
        "num_layers": 1, "num_fm_tokens": 4, "num_linear_tokens": 4, "rank": 4, "hidden_sizes": (32,), "top_sizes": (32,)
    },
    "mmoe": {"cross": "dot", "num_layers": 0, "num_time_buckets": None, "layer_sizes": (32, 16), "expert_sizes": (16,)},
    "din": {"attention_sizes": (32, 16), "layer_sizes": (32, 16)},
    "dlrm-hstu": {"cross": "dot", "num_layers": 1, "num_heads": 2, "num_time_buckets": None, "layer_sizes": (32, 16)},
}  # fmt: skip


def trained(name: str, sample: Sample, part: str, options: dict[str, float]) -> dict[str, Any]:
    """AUC by task on a part of a sample, beside the attainable one."""
    torch.manual_seed(sample.seed)
    model = REQUEST_MODELS[name].of(sample.split, **COMMON, **MODELS[name])
    train = sample.split.train.loader(batch_size=BATCH_SIZE, shuffle=True, seed=sample.seed, max_history=MAX_HISTORY)
    valid = sample.split.valid.loader(batch_size=4 * BATCH_SIZE, max_history=MAX_HISTORY)
    with tempfile.TemporaryDirectory() as folder:
        chosen = {**TRAINING, **options, "output": f"{folder}/run", "device": "cpu", "seed": sample.seed, "tensorboard": False}
        seconds, _ = seconds_of(lambda: Trainer(model, TrainerConfig(**chosen)).fit(train, valid, progress=False))
    places: list[Any] = []
    found: dict[str, list[Any]] = {task: [] for task in TASKS}
    for batch in getattr(sample.split, part).loader(batch_size=4 * BATCH_SIZE, max_history=MAX_HISTORY):
        places.append(sample.in_table(batch.rows.numpy()))
        for task, of in model.predict(batch).items():
            found[task].append(of.double().numpy())
    order = np.argsort(np.concatenate(places))
    reached = sample.figures(np.concatenate(places)[order], {task: np.concatenate(of)[order] for task, of in found.items()})
    best = sample.figures(sample.rows(part))
    auc = {task: {"auc": reached[task]["auc"], "attainable": best[task]["auc"]} for task in TASKS}
    return {**options, "part": part, "seconds": round(seconds, 1), **auc}


def shortfall(of: dict[str, Any]) -> float:
    """How far below the attainable AUC, the mean over tasks."""
    return statistics.mean(of[task]["attainable"] - of[task]["auc"] for task in TASKS)


def summary(name: str, of: dict[str, Any]) -> str:
    """A line of the table: the median shortfall of each task over the seeds, and the range."""
    told = []
    for task in TASKS:
        below = [seed[task]["attainable"] - seed[task]["auc"] for seed in of["seeds"].values()]
        told.append(f"{statistics.median(below):.4f} ({min(below):.4f} to {max(below):.4f})")
    best = min(of["trials"], key=shortfall)
    return f"| `{name}` | {' | '.join(told)} | {best['learning_rate']}, {best['weight_decay']} |"


def main() -> None:
    """Train what is not measured yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(MODELS), choices=list(MODELS), help="models")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no training begins after so many")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    facts, begun = environment("cpu"), time.perf_counter()
    rows: dict[str, Any] = other_parts("click_models", facts).get("models", {})
    samples: dict[int, Sample] = {}

    def run(name: str, seed: int, part: str, trial: dict[str, float]) -> dict[str, Any] | None:
        if time.perf_counter() - begun > options.seconds:
            return None
        samples.setdefault(seed, Sample(seed))
        found = trained(name, samples[seed], part, trial)
        print(f"{name}, seed {seed}, {part}: {shortfall(found):.4f} below, {found}", flush=True)
        return found

    def keep() -> None:
        of_all = {"common": COMMON, "options": MODELS, "training": TRAINING, "trials": TRIALS, "tuned on": TUNED_ON}
        result = {"environment": facts, **of_all, "models": rows}
        print(f"saved in {save('click_models', result).relative_to(ROOT)}", flush=True)

    for name in options.only:
        of = rows.setdefault(name, {"trials": [], "seeds": {}})
        for trial in TRIALS[len(of["trials"]) :]:
            if (found := run(name, TUNED_ON, "valid", trial)) is None:
                return
            of["trials"].append(found)
            keep()
        best = min(of["trials"], key=shortfall)
        chosen = {key: best[key] for key in TRIALS[0]}
        for seed in SEEDS:
            if str(seed) not in of["seeds"]:
                if (found := run(name, seed, "test", chosen)) is None:
                    return
                of["seeds"][str(seed)] = found
                keep()
    for name, of in rows.items():
        if len(of["seeds"]) == len(SEEDS):
            print(summary(name, of))


if __name__ == "__main__":
    main()
