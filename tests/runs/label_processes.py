"""Runs on sets of labels in two gloo processes and in one. A program of its own: `test_label_runs.py` starts it.

Usage: `python -m tests.runs.label_processes DIRECTORY`; prints JSON.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file

import jagged
from jagged.data import DataError, write_xmc
from jagged.runs.labels import LabelRun
from jagged.runs.labels.evaluating import evaluate_labels
from jagged.runs.labels.rows import LabelRows
from jagged.training import TrainingError
from tests.processes import fork
from tests.runs.test_label_runs import ROWS, TEST, config_of, named
from tests.training.two_processes import distance


def main(root: Path) -> dict[str, Any]:
    """Figures by one process and by two, the names that two keep, also of text, and what they say of a file that is not there."""
    for name, rows in (("train.txt", ROWS), ("test.txt", TEST)):
        write_xmc(rows, root / name)
    names = named(root)

    def train(count: int) -> None:
        data = {"path": str(root / "train.txt"), "test": str(root / "test.txt"), **names}
        training = {"batch_size": 50 // count, "max_epochs": 6}
        jagged.train(config_of(root / f"by {count}", data=data, training=training), progress=False)

    def train_by_plan(plan: str) -> None:
        data = {"path": str(root / "train.txt"), "test": str(root / "test.txt")}
        training = {"batch_size": 25, "max_epochs": 2, "table_optimizer": "adagrad", "table_plan": plan}
        expected = jagged.train(config_of(root / plan, data=data, training=training), progress=False).forecast
        (root / f"{plan}.{torch.distributed.get_rank()}").write_text(json.dumps([expected.parameters, expected.elsewhere]))

    def refused() -> None:
        try:
            jagged.train(config_of(root / "no", data={"path": str(root / "nothing.txt")}), progress=False)
        except (DataError, TrainingError) as error:
            (root / f"refused.{torch.distributed.get_rank()}").write_text(str(error))

    def refused_sgd() -> None:
        config = config_of(root / "sgd", data={"path": str(root / "train.txt")}, head={"fan_in": 8, "optimizer": "sgd"})
        try:
            jagged.train(config, progress=False)
        except TrainingError as error:
            (root / f"sgd.{torch.distributed.get_rank()}").write_text(str(error))

    def train_on_text() -> None:
        config = config_of(root / "text", data={"path": str(root / "text.parquet")}, training={"batch_size": 25, "max_epochs": 1})
        jagged.train(config, progress=False)

    texts = [[f"tag {row * 7 % 31}", f"tag {31 + row % 5}"] for row in range(200)]
    table = pa.table({"labels": texts, "features": [[row % 9] for row in range(200)]})
    pq.write_table(table, root / "text.parquet")
    fork(train_on_text, 2, root / "store-text")
    on_text = LabelRun.open(root / "text")
    fork(lambda: train(1))
    fork(lambda: train(2), 2, root / "store-2")
    for plan in ("replicated", "row-wise"):
        fork(functools.partial(train_by_plan, plan), 2, root / f"store-{plan}")
    fork(refused, 2, root / "store-refused")
    fork(refused_sgd, 2, root / "store-sgd")
    folders = [root / f"by {count}" for count in (1, 2)]
    run = LabelRun.open(folders[1])
    weights = [load_file(root / plan / "model.safetensors") for plan in ("replicated", "row-wise")]
    again = evaluate_labels(run, batch_size=17, progress=False).metrics["labels"]
    return {
        "again": dict(again),
        "distance": distance(*weights),
        "table": next(of.nbytes for name, of in weights[0].items() if "embedding_bags" in name),
        "forecasts": [json.loads((root / f"row-wise.{rank}").read_text()) for rank in (0, 1)],
        "names": None if run.label_names is None else run.label_names.to_pylist(),
        "texts": None if on_text.label_names is None else on_text.label_names.to_pylist(),
        "expected_texts": list(dict.fromkeys(text for row in texts for text in row)),
        "fingerprint_of_text": [on_text.split["fingerprint"], LabelRows.of(table, None, on_text.config.data).fingerprint],
        "metrics": [json.loads((folder / "metrics.json").read_text()) for folder in folders],
        "refused": [(root / f"refused.{rank}").read_text() for rank in (0, 1)],
        "sgd": [(root / f"sgd.{rank}").read_text() for rank in (0, 1)],
        "fingerprints": [json.loads((folder / "split.json").read_text())["fingerprint"] for folder in folders],
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
