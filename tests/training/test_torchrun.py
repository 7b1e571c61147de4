"""Runs of two processes that torchrun starts: one gets SIGTERM and goes on later, in one a process sleeps for ever."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from jagged.training.checkpoint import latest_checkpoint, load_checkpoint
from tests.test_docs import ROOT
from tests.training.support import outcome
from tests.training.under_torchrun import HANG_SECONDS, SIGNALLED

TORCHRUN = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


class Ended(NamedTuple):
    """Torchrun's exit code, what all said, and when the last word was said."""

    code: int
    said: str
    at: float


def start(root: Path, what: str) -> subprocess.Popen[bytes]:
    with (root / f"{what}.said").open("w") as said:
        return subprocess.Popen(
            [*TORCHRUN, "-m", "tests.training.under_torchrun", str(root), what],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            stdout=said,
            stderr=subprocess.STDOUT,
        )


def ended(root: Path, what: str, torchrun: subprocess.Popen[bytes]) -> Ended:
    code = torchrun.wait(60)
    said = root / f"{what}.said"
    return Ended(code, said.read_text().replace(str(root), "ROOT"), said.stat().st_mtime)


def until(happened: Callable[[], bool], torchrun: subprocess.Popen[bytes], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not happened() and torchrun.poll() is None and time.monotonic() < end:
        time.sleep(0.02)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("torchrun")


@pytest.fixture(scope="module")
def runs(root: Path) -> dict[str, Ended]:
    """All three, the sleeping one beside the others."""
    started: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for what in ("signalled", "asleep"):
            started[what] = start(root, what)
        until(lambda: all((root / f"reached.{rank}").exists() for rank in range(2)), started["signalled"])
        started["signalled"].send_signal(signal.SIGTERM)
        found = {"signalled": ended(root, "signalled", started["signalled"])}
        newest = latest_checkpoint(root / "signalled/checkpoints")
        (root / "newest").write_text("" if newest is None else f"{newest.name} {load_checkpoint(newest)[1]['step']}")
        started["resumed"] = start(root, "resumed")
        return found | {what: ended(root, what, started[what]) for what in ("resumed", "asleep")}
    finally:
        for torchrun in started.values():
            # It ends its processes before itself.
            if torchrun.poll() is None:
                torchrun.terminate()
                torchrun.wait(60)


def lines(ended: Ended, beginning: str) -> list[str]:
    """Torchrun's and torch's own words aside."""
    return [line for line in ended.said.splitlines() if line.startswith(beginning)]


def test_a_signal_leaves_a_whole_checkpoint_and_one_line(root: Path, runs: dict[str, Ended]) -> None:
    assert (root / "newest").read_text() == f"step-0000000{SIGNALLED} {SIGNALLED}"
    assert lines(runs["signalled"], "stopped by") == [
        "stopped by SIGTERM after step 3; a checkpoint is in ROOT/signalled/checkpoints: resume to go on"
    ]
    # Torchrun's own.
    assert runs["signalled"].said.count("Traceback") == 1
    assert runs["signalled"].code == 1


@pytest.mark.parametrize("what", ["signalled", "resumed"])
def test_groups_are_gone_before_the_interpreter_ends(runs: dict[str, Ended], what: str) -> None:
    assert lines(runs[what], "threads of gloo:") == ["threads of gloo: 0"] * 2


def test_the_run_goes_on_as_if_nothing_had_been(root: Path, runs: dict[str, Ended]) -> None:
    assert runs["resumed"].code == 0, runs["resumed"].said[-4_000:]
    assert outcome(root / "signalled") == outcome(root / "undisturbed")


def test_one_sleeps_for_ever(root: Path, runs: dict[str, Ended]) -> None:
    found = runs["asleep"]
    places = r"rank 0 in \w+\.py:\d+ \(\w+\), rank 1 in under_torchrun\.py:\d+ \(sleep_for_ever\)"
    said = lines(found, "jagged:")
    assert len(said) == 2
    for rank, line in enumerate(sorted(said)):
        assert re.fullmatch(
            rf"jagged: rank {rank} of 2 has stood still for \d+ s, hang_seconds are 5; {places}; "
            r"the last checkpoint, ROOT/asleep/checkpoints/step-00000008, is whole: resume",
            line,
        )
    assert found.code == 1
    # Noticed after 1.2 hang_seconds; the rest is for a busy machine, far below the 30 s after which torchrun kills.
    assert found.at - float((root / "asleep.at").read_text()) < 1.2 * HANG_SECONDS + 15
    newest = latest_checkpoint(root / "asleep/checkpoints")
    assert newest is not None
    assert load_checkpoint(newest)[1]["step"] == 8
