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
from jagged.training import Callback, Trainer, TrainingError, TrainingInterrupted
from jagged.training.processes import Processes
from tests.training.support import outcome
from tests.training.test_tables import Clicks, Next, events_table, impressions_table
from tests.training.two_processes import alone, distance, parallel, with_other_processes

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

    def in_batches(directory: Path, processes: Processes, watched: Callback, batch_size: int = ROWS) -> None:
        """Two epochs of batches as large in each process however many there are, so that the steps are others."""
        split = Dataset.load(root / "ranking").split(by="time", valid=0.2, test=0.2)
        torch.manual_seed(0)
        share = {"max_history": 10, "rank": processes.rank, "world_size": processes.world_size}
        train = split.train.loader(batch_size=batch_size, shuffle=True, **share)
        options = {"max_epochs": 2, "learning_rate": 0.001, "schedule": "cosine", "warmup_steps": 5, "table_optimizer": "adagrad"}
        config = TrainerConfig(output=str(directory), monitor="auc", device="cpu", **options)
        held_out = split.valid.loader(batch_size=100, **share)
        Trainer(RankingModel.of(split), config, callbacks=[watched]).fit(train, held_out, resume=True, progress=False)

    # Four numbers of processes in the second epoch, of 19 steps in one process.
    for name, parts in (("never stopped", [(1, None)]), ("others", [(1, 25), (2, 26), (4, 27), (1, None)])):
        kept = with_other_processes(root, name, parts, RankingModel, lambda batch: batch.rows, in_batches)
        result[name] = {"kept": kept, "history": outcome(root / name)["history"]}

    def too_few(directory: Path, processes: Processes, watched: Callback) -> None:
        """All but three requests are in the first batch."""
        try:
            in_batches(directory, processes, watched, 1197)
        except TrainingInterrupted:
            raise
        except TrainingError as error:
            (root / f"too few.{processes.rank}").write_text(str(error))

    with_other_processes(root, "few", [(1, 1), (4, None)], RankingModel, lambda batch: batch.rows, too_few)
    result["too few"] = [(root / f"too few.{rank}").read_text() for rank in range(4)]
    print(json.dumps(result))


if __name__ == "__main__":
    main()
