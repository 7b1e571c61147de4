"""Heads of many labels on rows whose best attainable precision is known: which part of the method does what.

    python -m benchmarks.planted_labels                    # seeds 0 to 2, some four minutes on two cores
    python -m benchmarks.planted_labels --seeds 0 --heads dense semantic

Each seed is a sample of `jagged.data.synthetic_labels`, 20,000 rows and 2,000 labels. Every head is trained by `Trainer` behind
the same encoder, for the same steps, and has the weights of 16 inputs for each label, but for `dense`, which has all 256.
`semantic` is the method: labels grouped by their rows' features, a dense layer for the most frequent 2 %, and new inputs for the
slots that matter least. Others differ from it in one thing, or are what it is compared with: `bottleneck`, a dense layer behind a
narrow one; `fixed-fan-in`, inputs of its own for each label; `block-sparse`, groups that read adjacent features, for good.

Learning rates were chosen for each head among the same three on a sample of another seed; `--choose` does it again. Of each head
are printed P@1 and P@5, what of the best attainable P@1 that is, PSP@5, and seconds.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import environment, save, seconds_of
from jagged.config import TrainerConfig
from jagged.data import LabelTruth, MultiLabelRows, label_loader, synthetic_labels
from jagged.label_metrics import propensities
from jagged.models import MultiLabelTask, SparseEncoder
from jagged.modules import GroupSparseHead
from jagged.training import Rewiring, Trainer

SIZES = {"num_rows": 20_000, "num_test_rows": 4_000}
DIM, FAN_IN, GROUP_SIZE, BATCH_SIZE, EPOCHS = 256, 16, 16, 128, 4
REWIRING = {"fraction": 0.2, "every": 80, "until": 400}
RATES = (0.001, 0.002, 0.005)
CHOSEN_ON = 100


class Head(NamedTuple):
    """How a head differs from `semantic`, and the learning rate that was chosen for it."""

    learning_rate: float
    grouping: str = "semantic"
    rewired: bool = True
    options: Mapping[str, Any] = MappingProxyType({})


HEADS = {
    "dense": Head(0.002, "random", False, {"head": 1.0}),
    "semantic": Head(0.002),
    "frequency": Head(0.002, "frequency"),
    "random": Head(0.002, "random"),
    "without head": Head(0.002, options={"head": 0}),
    "head of 5 %": Head(0.002, options={"head": 0.05}),
    "not rewired": Head(0.002, rewired=False),
    "fixed-fan-in": Head(0.002, "random", options={"group_size": 1}),
    "block-sparse": Head(0.002, "blocks", False),
    # Its two layers have as many weights as the groups.
    "bottleneck": Head(0.002, "random", False, {"head": 1.0, "head_dim": 14}),
}


class Sample(NamedTuple):
    """Rows of training and test, what is true of them, in how many rows each label is, and the mean of its rows' features."""

    rows: MultiLabelRows
    test: MultiLabelRows
    truth: LabelTruth
    counts: Tensor
    embeddings: Tensor


def sample_of(seed: int) -> Sample:
    """Draw a sample."""
    rows, test, truth = synthetic_labels(seed, **SIZES)
    counts = torch.bincount(torch.from_numpy(rows.labels).long(), minlength=rows.num_labels)

    def matrix(offsets: np.ndarray, ids: np.ndarray, values: np.ndarray | None, width: int) -> Tensor:
        row = np.repeat(np.arange(len(rows)), np.diff(offsets))
        dense = np.zeros((len(rows), width), np.float32)
        dense[row, ids] = 1.0 if values is None else values
        return torch.from_numpy(dense)

    features = matrix(rows.feature_offsets, rows.feature_ids, rows.feature_values, rows.num_features)
    labels = matrix(rows.label_offsets, rows.labels, None, rows.num_labels)
    return Sample(rows, test, truth, counts, labels.t() @ torch.nn.functional.normalize(features, dim=1))


def head_of(head: Head, sample: Sample, seed: int) -> GroupSparseHead:
    """Build a head."""
    options = {"fan_in": FAN_IN, "group_size": GROUP_SIZE, "head": 0.02, **head.options}
    grouping: Any = {"semantic": sample.embeddings, "blocks": sample.embeddings}.get(head.grouping, head.grouping)
    is_adjacent = head.grouping == "blocks"
    return GroupSparseHead(DIM, sample.counts, len(sample.rows), grouping=grouping, adjacent=is_adjacent, seed=seed, **options)


def train(head: Head, sample: Sample, seed: int, learning_rate: float) -> dict[str, float]:
    """Train a head behind an encoder; return figures of the test rows, weights of the head, and seconds."""
    torch.manual_seed(seed)
    encoder = SparseEncoder(sample.rows.num_features, DIM)
    made = head_of(head, sample, seed)
    weights = propensities(sample.counts, len(sample.rows))
    task = MultiLabelTask(encoder, made, ks=(1, 3, 5), label_weights=weights)
    with tempfile.TemporaryDirectory() as folder:
        config = TrainerConfig(
            output=folder, max_epochs=EPOCHS, learning_rate=learning_rate, validate_every=f"{EPOCHS} epochs", seed=seed
        )
        trainer = Trainer(task, config, callbacks=[Rewiring(**REWIRING)] if head.rewired else [])
        batches = label_loader(sample.rows, BATCH_SIZE, shuffle=True)
        test = label_loader(sample.test, BATCH_SIZE)
        seconds, result = seconds_of(lambda: trainer.fit(batches, test, test))
    found = result.metrics.test["labels"]
    size = sum(parameter.numel() for name, parameter in made.named_parameters() if "bias" not in name)
    best = sample.truth.figures(sample.test)["p@1"]
    return {**{k: found[k] for k in ("p@1", "p@5", "psp@5")}, "of_best": found["p@1"] / best, "weights": size, "seconds": seconds}


def main() -> None:
    """Measure and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--heads", nargs="*", default=list(HEADS), choices=HEADS)
    parser.add_argument("--choose", action="store_true", help="train with each learning rate on another sample, and save nothing")
    arguments = parser.parse_args()
    if arguments.choose:
        sample = sample_of(CHOSEN_ON)
        for name in arguments.heads:
            found = {rate: train(HEADS[name], sample, CHOSEN_ON, rate)["p@1"] for rate in RATES}
            print(f"{name}: {', '.join(f'{rate} {value:.3f}' for rate, value in found.items())}", flush=True)
        return
    facts = environment()
    results: dict[str, dict[str, dict[str, float]]] = {name: {} for name in arguments.heads}
    for seed in arguments.seeds:
        sample = sample_of(seed)
        for name in arguments.heads:
            found = train(HEADS[name], sample, seed, HEADS[name].learning_rate)
            results[name][str(seed)] = found
            shown = ", ".join(f"{key} {value:.3f}" for key, value in found.items() if key not in ("weights", "seconds"))
            print(f"seed {seed}, {name}: {shown}; {found['weights']:,} weights, {found['seconds']:.1f} s", flush=True)
    for name, by_seed in results.items():
        values = [found["p@1"] for found in by_seed.values()]
        print(f"{name}: P@1 {np.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})")
    print(save("planted_labels", {"environment": facts, "heads": results}))


if __name__ == "__main__":
    main()
