"""Runs on tables in two gloo processes against one. A program of its own: `test_two_processes.py` starts it.

Usage: `python -m tests.runs.two_processes DIRECTORY`; prints JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet
import torch

import jagged
from jagged.config import RankingConfig
from jagged.data import DataError
from jagged.runs.ranking import RankingRun
from jagged.training import TrainingError
from tests.processes import fork
from tests.runs.test_going_on import newer
from tests.runs.test_ranking_runs import config, table

# Of a step, in all processes.
REQUESTS = 16
# Runs that begin with another one: plans of tables, and processes.
BEGUN = (("replicated", 1), ("replicated", 2), ("row-wise", 2))


def trained(root: Path, count: int, **changes: Any) -> RankingConfig:
    """A run by so many processes, which share each step's requests."""
    values = config(root, path=str(root / "rows.parquet")).model_dump()
    values["training"] |= {"batch_size": REQUESTS // count, "max_epochs": 3}
    return RankingConfig(**{**values, "output": str(root / f"by {count}"), **changes})


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference of weights.

    Without biases of keys, which the softmax does not see: AdamW makes whole steps of what rounding leaves as gradient.
    """
    return max(float((of - other[name]).abs().max()) for name, of in one.items() if not name.endswith("kv_projection.bias"))


def main(root: Path) -> dict[str, Any]:
    """Figures by one process and by two, what two say of a table that cannot be read, and how a finished run goes on.

    And of a table of which rows were left out; and how another run begins with a finished one on new rows, in two processes with
    whole tables and with shared ones.
    """
    pyarrow.parquet.write_table(table(), root / "rows.parquet")
    pyarrow.parquet.write_table(newer(), root / "newer.parquet")

    def train(count: int) -> None:
        jagged.train(trained(root, count), progress=False)

    def refused() -> None:
        values = trained(root, 2).model_dump()
        missing = RankingConfig(
            **{**values, "data": {**values["data"], "path": str(root / "nothing.csv")}, "output": str(root / "no")}
        )
        try:
            jagged.train(missing, progress=False)
        except (DataError, TrainingError) as error:
            with (root / f"refused.{torch.distributed.get_rank()}").open("w") as file:
                file.write(str(error))

    def go_on() -> None:
        jagged.train(resume=root / "by 2", progress=False)

    def begin(count: int, plan: str) -> None:
        values = trained(root, count).model_dump()
        training = {**values["training"], "table_optimizer": "rowwise-adagrad", "table_plan": plan}
        given = {"data": {"path": str(root / "newer.parquet")}, "training": training, "output": str(root / f"{plan} by {count}")}
        shared = {name: values[name] for name in ("device", "precision", "evaluation")}
        jagged.train(RankingConfig(from_run=str(root / "by 1"), **shared, **given), progress=False)

    def train_thinned(count: int) -> None:
        values = trained(root, count).model_dump()
        thinned = {"data": {**values["data"], "negative_rate": 0.5}, "output": str(root / f"thinned by {count}")}
        jagged.train(
            RankingConfig(**{**values, **thinned, "model": {**values["model"], "conditional": ["buy=click"]}}), progress=False
        )

    fork(lambda: train(1))
    fork(lambda: train(2), 2, root / "store-2")
    fork(lambda: train_thinned(1))
    fork(lambda: train_thinned(2), 2, root / "store-thinned")
    fork(refused, 2, root / "store-refused")
    before = (root / "by 2" / "model.safetensors").read_bytes()
    fork(go_on, 2, root / "store-on")
    for plan, count in BEGUN:
        fork(lambda p=plan, c=count: begin(c, p), count, root / f"store-{plan}" if count > 1 else None)
    begun = [RankingRun.open(root / f"{plan} by {count}").model.state_dict() for plan, count in BEGUN]
    weights = [RankingRun.open(root / f"by {count}").model.state_dict() for count in (1, 2)]
    return {
        "apart": apart(*weights),
        "begun": [apart(begun[0], of) for of in begun[1:]],
        "moved": apart({name: of for name, of in weights[0].items() if of.shape == begun[0][name].shape}, begun[0]),
        "thinned": [json.loads((root / f"thinned by {count}" / "metrics.json").read_text()) for count in (1, 2)],
        "metrics": [json.loads((root / f"by {count}" / "metrics.json").read_text()) for count in (1, 2)],
        "refused": [(root / f"refused.{rank}").read_text() for rank in (0, 1)],
        "unchanged": before == (root / "by 2" / "model.safetensors").read_bytes(),
        "datasets": sorted(path.name for path in (root / "by 2").iterdir() if path.is_dir()),
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
