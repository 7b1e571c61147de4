"""Two GPUs over NCCL against one, and both against float64 on the CPU."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from jagged.data import split_leave_one_out
from jagged.models.pretrained import from_pretrained
from jagged.training.checkpoint import load_checkpoint
from jagged.training.processes import process_group
from tests.training.support import outcome, run, tiny_dataset
from tests.training.two_gpus import HANG_SECONDS, RUN, gradient
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
    done = start(directory, "trains")
    assert done.returncode == 0, done.stderr[-8_000:]
    return directory


def start(directory: Path, what: str) -> subprocess.CompletedProcess[str]:
    launch = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [*launch, "-m", "tests.training.two_gpus", str(directory), what],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=400,
    )


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
    num_items = split_leave_one_out(tiny_dataset()).train.num_items
    assert from_pretrained(directory / "mixed").model.item_weight.shape == (num_items, 16)


def test_a_collective_that_the_other_never_enters_ends_the_run_in_the_first_step(tmp_path: Path) -> None:
    done = start(tmp_path, "waits")
    ended = time.time()
    said = sorted(line for line in done.stderr.splitlines() if line.startswith("jagged: "))
    places = r"rank 0 in \w+\.py:\d+ \(\w+\), rank 1 in two_gpus\.py:\d+ \(on_step\)"
    assert len(said) == 2
    for rank, line in enumerate(said):
        assert re.fullmatch(
            rf"jagged: rank {rank} of 2 has stood still for \d+ s, hang_seconds are 20; {places}; there is none yet: start again",
            line,
        )
    assert done.returncode == 1
    # Noticed after 1.2 hang_seconds; the rest is for torchrun.
    assert ended - float((tmp_path / "waits.at").read_text()) < 1.2 * HANG_SECONDS + 20
