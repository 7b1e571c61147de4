"""Label metrics added up over two gloo processes, against one object. `test_label_metrics.py` starts it.

Usage: `python -m tests.label_metrics_processes DIRECTORY`; prints JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from jagged.label_metrics import LabelMetrics, propensities
from tests.processes import fork

PROCESSES, SAMPLES, LABELS, DEPTH = 2, 40, 50, 10


def metrics_of(samples: range) -> LabelMetrics:
    """Of some of the samples, which are the same in every process."""
    chance = torch.Generator().manual_seed(3)
    top = torch.rand(SAMPLES, LABELS, generator=chance).argsort(1)[:, :DEPTH]
    owned = torch.rand(SAMPLES, LABELS, generator=chance) < torch.rand(SAMPLES, 1, generator=chance) - 0.2
    metrics = LabelMetrics(LABELS, propensities(torch.arange(LABELS), 1_000))
    kept = owned[samples]
    metrics.update(top[samples], kept.nonzero()[:, 1], torch.cat([torch.zeros(1), kept.sum(1).cumsum(0)]).long())
    return metrics


def work(root: Path) -> None:
    metrics = metrics_of(range(dist.get_rank(), SAMPLES, PROCESSES))
    metrics.all_reduce()
    (root / f"{dist.get_rank()}.json").write_text(json.dumps(metrics.compute()))


def main() -> None:
    root = Path(sys.argv[1])
    torch.set_num_threads(1)
    fork(lambda: work(root), PROCESSES, root / "store")
    parts = [json.loads((root / f"{rank}.json").read_text()) for rank in range(PROCESSES)]
    print(json.dumps({"parts": parts, "whole": metrics_of(range(SAMPLES)).compute()}))


if __name__ == "__main__":
    main()
