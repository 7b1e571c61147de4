"""`jagged demo`: train on two built-in samples whose best attainable figures are known, and show what was reached beside them."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from jagged.demo import impressions, sequences
from jagged.demo.impressions import ImpressionResult
from jagged.demo.sequences import SequenceResult


@dataclass(frozen=True)
class DemoResult:
    """What the demo reached and wrote.

    Attributes:
        sequences: SASRec on readers' events.
        impressions: the ranking model on a shop's impressions.
        directory: with a folder of each.
    """

    sequences: SequenceResult
    impressions: ImpressionResult
    directory: Path

    @property
    def ok(self) -> bool:
        """Whether both came near the attainable."""
        return self.sequences.ok and self.impressions.ok

    @property
    def training_seconds(self) -> float:
        """Of training and validation of both."""
        return self.sequences.training_seconds + self.impressions.training_seconds


def demo(output: str | os.PathLike[str] = "runs/demo", *, seed: int = 0) -> DemoResult:
    """Generate both samples, write them as files, train on these, evaluate, recommend, and print how it went.

    The runs are a function of `seed`: on the CPU they use one thread, so that the number of cores changes nothing.

    Args:
        output: directory to write into; where it holds something, the next free name is taken (`demo-2`, ...).
        seed: of the samples and of the training.

    Raises:
        ConfigError: the directory cannot be made or written.
        DataError: nor can a temporary one.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _demo(_free(Path(output)), seed)
    finally:
        torch.set_num_threads(threads)


def _demo(directory: Path, seed: int) -> DemoResult:
    began = time.perf_counter()
    print("1. What users read next, from their events alone\n", flush=True)
    of_events = sequences.show(directory / "sequences", seed)
    print("2. What users click and buy, from a table of impressions\n", flush=True)
    result = DemoResult(of_events, impressions.show(directory / "impressions", seed), directory)
    print("Written")
    for one in (result.sequences, result.impressions):
        files = [("checkpoint", one.checkpoint), ("weights", one.directory / "model.safetensors"), ("metrics", one.metrics)]
        for name, path in [*files, *(("picture", path) for path in one.pictures)]:
            print(f"  {name:<10}  {path}")
    print(f"Trained in {result.training_seconds:.0f} s; all of it took {time.perf_counter() - began:.0f} s.")
    return result


def _free(path: Path) -> Path:
    """The path, or the next free one of `path-2`, `path-3`, ... where it holds something."""
    candidate, number = path, 1
    while candidate.exists() and (not candidate.is_dir() or any(candidate.iterdir())):
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate
