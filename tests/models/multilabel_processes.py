"""A task of many labels in two gloo processes against one; run by `test_multilabel`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from jagged.data import MultiLabelRows, label_loader
from jagged.models.pretrained import load_task
from jagged.training import Rewiring, Trainer
from tests.models.test_multilabel import ROWS, TEST, config_of, task_of
from tests.processes import fork

PROCESSES, BATCH = 2, 50


def share(rows: MultiLabelRows, rank: int, count: int) -> MultiLabelRows:
    return rows.take(np.arange(rank, len(rows), count))


def train(output: Path, rank: int, count: int) -> dict[str, Any]:
    """Two epochs on every `count`-th row, in order: the joint batches are those of one process."""
    loaders = [label_loader(share(rows, rank, count), BATCH // count) for rows in (ROWS, TEST, TEST)]
    rewiring = Rewiring(0.1, every=5, until=15, by="gradient")
    trainer = Trainer(task_of(dropout=0.0), config_of(output, max_epochs=2), callbacks=[rewiring])
    figures = trainer.fit(*loaders, progress=False).metrics.test
    return {"loss": figures["all"]["loss"], **dict(figures["labels"])}


def main() -> None:
    root = Path(sys.argv[1])
    torch.set_num_threads(1)
    fork(lambda: (root / "one.json").write_text(json.dumps(train(root / "one", 0, 1))) and None)

    def work() -> None:
        rank = dist.get_rank()
        (root / f"{rank}.json").write_text(json.dumps(train(root / "two", rank, PROCESSES)))

    fork(work, PROCESSES, root / "store")
    one, two = (load_task(root / name, task_of()).state_dict() for name in ("one", "two"))
    distances = {name: float((one[name].double() - value.double()).abs().max()) for name, value in two.items()}
    figures = [json.loads((root / f"{name}.json").read_text()) for name in ("one", 0, 1)]
    print(json.dumps({"distances": distances, "figures": figures, "changed": int((two["head.born"] > 0).sum())}))


if __name__ == "__main__":
    main()
