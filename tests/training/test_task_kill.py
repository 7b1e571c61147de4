"""SIGKILL at random moments of a task's training: bit-identical in the end, no call of a callback lost or made twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import LONG
from tests.test_docs import ROOT


@pytest.mark.timeout(1_800 if LONG else 300)
def test_killed_at_random_moments(tmp_path: Path) -> None:
    kills = 50 if LONG else 3
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.training.task_killing", str(tmp_path), str(kills), "0"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4_000:]
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert sum(result["killed"] for result in results) == kills
    assert [result for result in results if result["different"]] == []
