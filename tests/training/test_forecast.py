"""The forecast against what a run then uses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# In a process of its own, because the peak of resident memory is a process's for good.
PROGRAM = r"""
import json, sys, torch
from pathlib import Path
from jagged.config import TrainConfig
from jagged.data import read_events
from jagged.runs.training import train
from tests.memory import peak_resident_bytes
options = json.loads(sys.argv[1])
items = options.pop("num_items")
lines = [f"{user} " + " ".join(str((user * 400 + k) % items) for k in range(400)) for user in range(options.pop("num_users"))]
text = Path(f"{sys.argv[2]}.{sys.argv[3]}.txt")
text.write_text("\n".join(lines) + "\n")
dataset = read_events(text, progress=False)
processes, rank = options.pop("processes"), int(sys.argv[3])
if processes > 1:
    store = torch.distributed.FileStore(sys.argv[2] + ".store", processes)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=processes)
own = {"output": sys.argv[2], "training.max_epochs": 1, "training.tensorboard": False, "device": "cpu"}
result = train(TrainConfig.load(None, options | own), dataset, progress=False)
f = result.forecast
print(json.dumps({"peak": f.peak, "present": f.present, "measured": peak_resident_bytes(), "steps": result.steps,
                  "forecast_steps": f.steps_per_epoch, "most": f.max_steps, "text": str(f)}))
"""


@pytest.mark.parametrize(
    "options",
    [
        # Most of the memory is the item table, its gradients and moments, and a checkpoint of them.
        {
            "num_users": 50,
            "num_items": 20_000,
            "model.embedding_dim": 512,
            "model.num_heads": 8,
            "training.batch_size": 20,
            "model.num_layers": 1,
            "evaluation.eval_batch_size": 64,
            "processes": 1,
        },
        # The same table, of whose rows a step changes those that it names.
        {
            "num_users": 50,
            "num_items": 20_000,
            "model.embedding_dim": 512,
            "model.num_heads": 8,
            "training.batch_size": 20,
            "training.table_optimizer": "rowwise-adagrad",
            "head.type": "sampled",
            "head.num_negatives": 64,
            "head.negatives_per": "batch",
            "model.num_layers": 1,
            "evaluation.eval_batch_size": 64,
            "processes": 1,
        },
        # Each row draws its own, so few that the table's gradient is in factors.
        {
            "num_users": 50,
            "num_items": 20_000,
            "model.embedding_dim": 512,
            "model.num_heads": 8,
            "training.batch_size": 4,
            "training.table_optimizer": "rowwise-adagrad",
            "head.type": "sampled",
            "head.num_negatives": 64,
            "head.negatives_per": "row",
            "model.num_layers": 1,
            "evaluation.eval_batch_size": 64,
            "processes": 1,
        },
        # A head over all items, of whose gradient a tenth is made at a time.
        {
            "num_users": 50,
            "num_items": 40_000,
            "model.embedding_dim": 512,
            "model.num_heads": 8,
            "training.batch_size": 4,
            "data.max_seq_len": 50,
            "training.table_optimizer": "rowwise-adagrad",
            "training.table_gradient_bytes": 8_192_000,
            "model.num_layers": 1,
            "evaluation.eval_batch_size": 64,
            "processes": 1,
        },
        # Each row draws its own, so many that the update makes the table's gradient.
        {
            "num_users": 60,
            "num_items": 40_000,
            "model.embedding_dim": 768,
            "model.num_heads": 8,
            "training.batch_size": 40,
            "data.max_seq_len": 50,
            "training.table_optimizer": "rowwise-adagrad",
            "head.type": "sampled",
            "head.num_negatives": 128,
            "head.negatives_per": "row",
            "model.num_layers": 1,
            "evaluation.eval_batch_size": 64,
            "processes": 1,
        },
        # A larger table in two halves.
        {
            "num_users": 60,
            "num_items": 60_000,
            "model.embedding_dim": 512,
            "model.num_heads": 8,
            "training.batch_size": 20,
            "data.max_seq_len": 5,
            "model.num_layers": 1,
            "evaluation.eval_batch_size": 64,
            "processes": 2,
        },
        # Most of it is activations.
        {
            "num_users": 100,
            "num_items": 200,
            "model.embedding_dim": 256,
            "model.num_heads": 2,
            "training.batch_size": 100,
            "model.num_layers": 3,
            "processes": 1,
        },
    ],
    ids=["table", "table by rows", "table in factors", "table in slices", "table by its update", "split table", "activations"],
)
def test_memory_is_forecast_within_a_factor(tmp_path: Path, options: dict[str, int]) -> None:
    running = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", PROGRAM, json.dumps(options), str(tmp_path / "run"), str(rank)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(options["processes"])
    ]
    outputs = [process.communicate(timeout=240) for process in running]
    for process, (found_json, errors) in zip(running, outputs, strict=True):
        assert process.returncode == 0, errors[-4_000:]
        found = json.loads(found_json)
        assert found["steps"] == found["forecast_steps"] == found["most"]
        # An eighth of the budget is in work, the rest waits.
        in_slices = " (the item table's in slices, 82% of it twice for its norm), activations"
        assert (in_slices in found["text"]) == ("training.table_gradient_bytes" in options)
        # What training adds to the process: forecast and measured within a factor of 1.6 of one another.
        added, forecast = found["measured"] - found["present"], found["peak"] - found["present"]
        assert added > 100 * 2**20, f"{added} bytes are too few to compare"
        assert 1 / 1.6 < forecast / added < 1.6, f"forecast {forecast / 2**20:.0f} MiB, used {added / 2**20:.0f} MiB"


def test_the_peak_of_a_process_is_not_that_of_the_one_that_started_it() -> None:
    ballast = b"\1" * 2**30
    program = "from tests.memory import peak_resident_bytes; print(peak_resident_bytes())"
    found = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(found.stdout) < len(ballast)
