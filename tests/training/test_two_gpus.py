"""Two GPUs over NCCL against one, and both against float64 on the CPU."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from jagged.models.pretrained import from_pretrained
from jagged.training.checkpoint import load_checkpoint
from jagged.training.processes import process_group
from tests.training.support import outcome, run, tiny_dataset
from tests.training.two_gpus import RUN, gradient
from tests.training.two_processes import CASES, STEPS, started, take_steps

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes left."""
    directory = tmp_path_factory.mktemp("gpus")
    launch = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, "-m", "tests.training.two_gpus", str(directory)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-8_000:]
    return directory


def first_gradient(name: str, device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    with process_group(device) as processes:
        engine = started(CASES[name], processes, dtype)
        take_steps(engine, CASES[name], 0, 1)
        return gradient(engine)


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return math.sqrt(sum(float((a[name] - b[name]).square().sum()) for name in a))


@pytest.mark.parametrize("name", ["plain", "smoothed"])
def test_two_gpus_give_the_gradient_of_one(directory: Path, name: str) -> None:
    exact = first_gradient(name, torch.device("cpu"), torch.float64)
    one = first_gradient(name, torch.device("cuda", 0), torch.float32)
    two = torch.load(directory / name, weights_only=True)
    # Two may err at most three times as much as one, plus one rounding of the gradient: sums in another order, nothing else.
    size = distance(exact, {name: torch.zeros_like(value) for name, value in exact.items()})
    assert size > 1e-3
    assert distance(two, exact) < 3 * distance(one, exact) + torch.finfo(torch.float32).eps * size


def test_steps_wait_for_no_gpu(directory: Path) -> None:
    assert (directory / "waits").read_text() == ""


@pytest.mark.parametrize("name", ["plain", "smoothed"])
def test_a_checkpoint_of_two_gpus_goes_on_on_the_cpu(directory: Path, name: str) -> None:
    tensors, _ = load_checkpoint(directory / "checkpoints" / name)
    with process_group(torch.device("cpu")) as processes:
        engine = started(CASES[name], processes, torch.float32)
        engine.load_state_tensors(tensors, STEPS)
        take_steps(engine, CASES[name])
        assert engine.is_finite()


def test_runs_on_two_gpus(directory: Path, tmp_path: Path) -> None:
    # Batches of 4 users on each of two GPUs are those of 8 on one.
    single = run(tmp_path / "single", tiny_dataset(), precision="32-true", **RUN)
    found = [row["loss"] for row in outcome(directory / "full")["history"]]
    assert found == pytest.approx([row["loss"] for row in single.history], rel=1e-3)
    mixed = [row["loss"] for row in outcome(directory / "mixed")["history"]]
    assert mixed == pytest.approx(found, rel=0.02)
    assert from_pretrained(directory / "mixed").model.item_weight.shape == (tiny_dataset().num_items, 16)
