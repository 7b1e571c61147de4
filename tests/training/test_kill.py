"""SIGKILL at random moments of reading, training and saving: always readable, never mixed, and bit-identical in the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import LONG

ROOT = Path(__file__).parents[2]
# What is imported takes longer than a few kills, so then all jobs have one program.
JOBS = {"sequences": 200, "task": 50, "table": 200, "negatives": 50, "beside": 50}
KILLS = [(kills, (job,)) for job, kills in JOBS.items()] if LONG else [(3, tuple(JOBS))]


@pytest.mark.timeout(3_600 if LONG else 300)
@pytest.mark.parametrize(("kills", "jobs"), KILLS)
def test_killed_at_random_moments(kills: int, jobs: tuple[str, ...], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.training.killing", str(tmp_path), str(kills), "0", *jobs],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4_000:]
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert sum(result["killed"] for result in results) == kills * len(jobs)
    assert [result for result in results if result["different"]] == []
