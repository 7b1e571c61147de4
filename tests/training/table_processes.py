"""Training on tables in two gloo processes against one. A program of its own: `test_tables.py` starts it.

It imports everything once and forks the processes. Usage: `python -m tests.training.table_processes DIRECTORY`; prints JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from jagged.config import TrainerConfig
from jagged.data import Dataset
from jagged.models import RankingModel
from jagged.training import Trainer
from jagged.training.processes import Processes
from tests.training.test_tables import Clicks, Next, events_table, impressions_table
from tests.training.two_processes import alone, distance, parallel

# Of a step, in all processes.
ROWS = 64
TASKS = {
    "clicks": (Clicks, impressions_table, {}),
    "next": (Next, events_table, {"negatives": 4, "by": "popularity", "seed": 3}),
    "ranking": (RankingModel.of, impressions_table, {}),
}


def train(root: Path, name: str, processes: Processes) -> dict[str, Any]:
    """Three epochs in the order of the rows; each process has every second batch of half the size."""
    kind, _, drawing = TASKS[name]
    count = processes.world_size
    split = Dataset.load(root / name).split(by="time", valid=0.2, test=0.2)
    torch.manual_seed(0)
    task = kind(split)
    parts = [
        getattr(split, part).loader(
            batch_size=ROWS // count,
            max_history=10,
            rank=processes.rank,
            world_size=count,
            **drawing,
        )
        for part in ("train", "valid", "test")
    ]
    config = TrainerConfig(output=str(root / f"{name} by {count}"), max_epochs=3, learning_rate=0.02, monitor="auc", device="cpu")
    found = Trainer(task, config).fit(*parts, progress=False)
    if processes.is_first:
        torch.save({key: value.clone() for key, value in task.state_dict().items()}, root / f"{name}.{count}")
    return found.metrics.to_json()


def moving(weights: dict[str, Any]) -> dict[str, Any]:
    """Without biases of keys, which the softmax does not see: AdamW makes whole steps of what rounding leaves as gradient."""
    return {name: of for name, of in weights.items() if not name.endswith("kv_projection.bias")}


def main() -> None:
    root = Path(sys.argv[1])
    torch.set_num_threads(1)
    result: dict[str, Any] = {}
    for name, (_, write, _) in TASKS.items():
        # DuckDB has threads, which a process that forks must not have.
        (root / f"{name} table").mkdir()
        alone(lambda _, n=name, w=write: w(root / f"{n} table").save(root / n))  # type: ignore[misc]

        def told(processes: Processes, name: str = name) -> None:
            found = train(root, name, processes)
            (root / f"{name}.{processes.world_size}.{processes.rank}").write_text(json.dumps(found))

        parallel(root, name, told)
        alone(told)
        one, two = (moving(torch.load(root / f"{name}.{count}", weights_only=True)) for count in (1, 2))
        figures = [json.loads((root / f"{name}.{place}").read_text()) for place in ("1.0", "2.0", "2.1")]
        result[name] = {"distance": distance(one, two), "figures": figures}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
