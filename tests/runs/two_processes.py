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
from tests.runs.test_ranking_runs import config, table

# Of a step, in all processes.
REQUESTS = 16


def trained(root: Path, count: int, **changes: Any) -> RankingConfig:
    """A run by so many processes, which share each step's requests."""
    values = config(root, path=str(root / "rows.parquet")).model_dump()
    values["training"] |= {"batch_size": REQUESTS // count, "max_epochs": 3}
    return RankingConfig(**{**values, "output": str(root / f"by {count}"), **changes})


def main(root: Path) -> dict[str, Any]:
    """Figures by one process and by two, what two say of a table that cannot be read, and how a finished run goes on."""
    pyarrow.parquet.write_table(table(), root / "rows.parquet")

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

    fork(lambda: train(1))
    fork(lambda: train(2), 2, root / "store-2")
    fork(refused, 2, root / "store-refused")
    before = (root / "by 2" / "model.safetensors").read_bytes()
    fork(go_on, 2, root / "store-on")
    weights = [RankingRun.open(root / f"by {count}").model.state_dict() for count in (1, 2)]
    # Without biases of keys, which the softmax does not see: AdamW makes whole steps of what rounding leaves as gradient.
    apart = max(
        float((of - weights[1][name]).abs().max()) for name, of in weights[0].items() if not name.endswith("kv_projection.bias")
    )
    return {
        "apart": apart,
        "metrics": [json.loads((root / f"by {count}" / "metrics.json").read_text()) for count in (1, 2)],
        "refused": [(root / f"refused.{rank}").read_text() for rank in (0, 1)],
        "unchanged": before == (root / "by 2" / "model.safetensors").read_bytes(),
        "datasets": sorted(path.name for path in (root / "by 2").iterdir() if path.is_dir()),
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
