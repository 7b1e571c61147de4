"""A process that stands still, is stopped, or is killed ends the run of two with a line that says so; long work does not."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn
from torch.utils.data import DataLoader, Dataset

from jagged.training.watch import _Computing, is_in_torch
from tests.test_docs import ROOT
from tests.training.standing_still import AT_FIRST


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("watch")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.training.standing_still", str(root)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4_000:]
    found: dict[str, Any] = json.loads(done.stdout.replace(str(root), "ROOT"))
    return found


def line(rank: int, name: str, places: str) -> str:
    """A pattern of the whole line."""
    whole = f"the last checkpoint, ROOT/{name}/run/checkpoints/step-00000006, is whole: resume"
    checkpoint = re.escape("there is none yet: start again" if name in AT_FIRST else whole)
    seconds = r"has stood still for \d+ s, hang_seconds are 5; "
    return f"jagged: rank {rank} of 2 {seconds}{places}; {checkpoint}"


@pytest.mark.parametrize("name", ["sleeps", "sleeps at first", "sleeps while the other computes", "loops at first"])
def test_one_stands_still_for_ever(result: dict[str, Any], name: str) -> None:
    """Before the second step, too, for which one that computes has three times as long here; ten times by default."""
    found = result[name]
    assert found["codes"] == {"0": 2, "1": 2}
    assert max(found["seconds"]) < 30
    assert min(found["seconds"]) > (15 if name == "loops at first" else 5)
    where = "compute" if name == "loops at first" else "sleep_for_ever"
    places = rf"rank 0 in \w+\.py:\d+ \(\w+\), rank 1 in standing_still\.py:\d+ \({where}\)"
    for rank, said in enumerate(found["said"]):
        assert len(said) == 1
        assert re.fullmatch(line(rank, name, places), said[0])


def test_one_is_stopped(result: dict[str, Any]) -> None:
    found = result["stopped"]
    assert found["codes"] == {"0": 2}
    assert max(found["seconds"]) < 30
    assert result["left"] == [["stopped", 1]]
    assert found["said"][1] == []
    assert len(found["said"][0]) == 1
    assert re.fullmatch(line(0, "stopped", r"rank 0 in \w+\.py:\d+ \(\w+\), rank 1 does not answer"), found["said"][0][0])


def test_one_is_killed(result: dict[str, Any]) -> None:
    found = result["killed"]
    assert found["codes"] == {"0": 2, "1": -9}
    assert max(found["seconds"]) < 30
    assert len(found["said"][0]) == 1
    assert re.fullmatch(
        r"another process of the run ended or cannot be reached, after step [78]: .*; "
        r"the last checkpoint, ROOT/killed/run/checkpoints/step-00000006, is whole: resume",
        found["said"][0][0],
    )


@pytest.mark.parametrize("name", ["sleeps", "stopped", "killed"])
def test_the_last_checkpoint_is_whole(result: dict[str, Any], name: str) -> None:
    assert (result[name]["checkpoint"], result[name]["step"]) == ("step-00000006", 6)


@pytest.mark.parametrize(("name", "step"), [("writes", 6), ("paused", 18), ("begins slowly", 18), ("validates slowly", 18)])
def test_long_writes_pauses_of_all_and_slow_beginnings_are_no_standing_still(
    result: dict[str, Any], name: str, step: int
) -> None:
    assert result[name]["codes"] == {"0": 0, "1": 0}
    assert result[name]["said"] == [[], []]
    assert result[name]["step"] == step


class Sleepy(Dataset[Any]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, row: int) -> Any:
        time.sleep(1)
        return row


class SleepyModule(nn.Module):
    def forward(self) -> None:
        time.sleep(0.3)


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (lambda: time.sleep(0.3), False),
        (SleepyModule(), False),
        (lambda: threading.Event().wait(0.3), False),
        (lambda: next(iter(DataLoader(Sleepy(), num_workers=1))), True),
    ],
    ids=["sleeps", "sleeps in a module", "waits", "waits in a loader"],
)
def test_who_waits_in_torch_may_wait_for_another(work: Callable[[], Any], expected: bool) -> None:
    found: list[bool] = []
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.02):
            found.append(is_in_torch(threading.main_thread().ident or 0))

    thread = threading.Thread(target=look)
    thread.start()
    work()
    done.set()
    thread.join()
    assert sum(found) > len(found) / 2 if expected else sum(found) < len(found) / 2


def busy(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (busy, True),
        (time.sleep, False),
        (lambda seconds: subprocess.run([sys.executable, "-c", f"import time; time.sleep({seconds})"], check=True), False),
        (lambda seconds: subprocess.run(["sh", "-c", f"timeout {seconds} sh -c 'while :; do :; done' | cat"], check=True), True),
    ],
    ids=["itself", "nobody", "a child sleeps", "a child of a child"],
)
def test_who_computes(work: Callable[[float], Any], expected: bool) -> None:
    computing, done = _Computing(1.0), threading.Event()
    assert computing.lately

    def look() -> None:
        while not done.wait(0.05):
            computing.look()

    thread = threading.Thread(target=look)
    thread.start()
    work(1.8)
    found = computing.lately
    done.set()
    thread.join()
    assert found == expected
