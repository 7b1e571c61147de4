"""A run on a table that is stopped by a signal or a full disk goes on as if nothing had been: bit for bit."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jagged.config import RankingConfig
from jagged.data import DataError
from jagged.models.pretrained import open_task
from jagged.runs.training import train
from jagged.training import CheckpointError, TrainingError, TrainingInterrupted
from jagged.training import checkpoint as checkpoints
from tests.conftest import LONG
from tests.seeds import generators
from tests.test_docs import ROOT
from tests.training.support import at_step, kill_self
from tests.training.table_runs import STEPS_PER_EPOCH, shop_file, table_outcome, train_table


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shop_file(tmp_path_factory.mktemp("rows") / "shop.csv")


@pytest.fixture(scope="module")
def undisturbed(rows: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What an undisturbed run leaves, and how often it flushes a file or directory to disk."""
    directory = tmp_path_factory.mktemp("undisturbed") / "run"
    with pytest.MonkeyPatch.context() as patch:
        flushes = failing_flushes(patch, from_the=10**9)
        assert train_table(directory, rows).steps == 3 * STEPS_PER_EPOCH
    return {**table_outcome(directory), "flushes": len(flushes)}


def same(directory: Path, undisturbed: dict[str, Any]) -> bool:
    return {**table_outcome(directory), "flushes": undisturbed["flushes"]} == undisturbed


def failing_flushes(monkeypatch: pytest.MonkeyPatch, from_the: int) -> list[int]:
    """Let flushes fail from the given one on, counted from 0, as those of a full disk may; those that were asked for are kept."""
    flush, seen = os.fsync, list[int]()

    def fsync(descriptor: int) -> None:
        seen.append(descriptor)
        if len(seen) > from_the:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return seen


STOPS = [(3, signal.SIGTERM, 2), (11, signal.SIGINT, 0), (STEPS_PER_EPOCH, signal.SIGTERM, 0), (17, signal.SIGINT, 2)]


@pytest.mark.parametrize(
    ("step", "number", "workers"), [*STOPS[:2], *(pytest.param(*stop, marks=pytest.mark.long) for stop in STOPS[2:])]
)
def test_a_signal_stops_after_the_step_and_other_workers_go_on(
    rows: Path,
    undisturbed: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: int,
    number: int,
    workers: int,
) -> None:
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        at_step(patch, step, kill_self(number))
        with pytest.raises(TrainingInterrupted) as caught:
            train_table(run, rows, training={"num_workers": workers})
    assert (
        str(caught.value)
        == f"stopped by {signal.Signals(number).name} after step {step}; a checkpoint is in {run}/checkpoints: resume to go on"
    )
    assert caught.value.exit_code == 128 + number
    assert checkpoints.list_checkpoints(run / "checkpoints")[-1].name == f"step-{step:08d}"
    assert multiprocessing.active_children() == []
    with pytest.raises(CheckpointError) as refused:
        open_task(run)
    assert str(refused.value) == (
        f"{run}: a run that has not ended; go on with it by `jagged train --resume`, or by resume=True of `fit`"
    )
    train_table(run, rows, resume=True, training={"num_workers": 2 - workers})
    assert same(run, undisturbed)


def test_every_failing_flush_is_named_and_the_run_goes_on(
    rows: Path, undisturbed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushes = undisturbed["flushes"]
    assert flushes > 60
    for at in range(flushes) if LONG else {rng.randrange(flushes) for rng in generators(2)}:
        run = tmp_path / f"{at}" / "run"
        with monkeypatch.context() as patch:
            failing_flushes(patch, from_the=at)
            with pytest.raises((CheckpointError, DataError)) as caught:
                train_table(run, rows)
        where, _, cure = str(caught.value).partition(": could not be written: No space left on device; ")
        assert Path(where).is_relative_to(run), str(caught.value)
        assert "\n" not in cure
        assert "room" in cure
        # The last flush is of the directory: by then the run is whole.
        if at < flushes - 1:
            with pytest.raises(CheckpointError):
                open_task(run)
        train_table(run, rows, resume=True)
        assert same(run, undisturbed), at


@pytest.mark.long
@pytest.mark.timeout(1_800)
def test_a_full_disk_is_named_and_the_run_goes_on(tmp_path: Path) -> None:
    """A file system of the size that is too small, where also pages that are written through memory find no place."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        pytest.skip("needs a namespace in which file systems may be mounted")
    program = [sys.executable, "-W", "ignore", "-m", "tests.training.full_disk", str(tmp_path), "60", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["unshare", "-rm", *program], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4_000:]
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == 60
    assert [result for result in results if not result["same"]] == []
    said = [result["said"] for result in results if result["said"]]
    assert len(said) > 30
    line = re.compile(
        rf"{re.escape(str(tmp_path))}/small/run\S*: could not be written: "
        r"(Error writing bytes to file\. Detail: \[errno 28\] )?No space left on device; .*room.*"
    )
    assert [one for one in said if not line.fullmatch(one)] == []


def test_another_column_of_parts_is_another_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a run was stopped before its first checkpoint, which compares options."""
    rows, run = tmp_path / "rows.csv", tmp_path / "run"
    parts = [("train", "valid", "test")[i % 3] for i in range(60)]
    lines = [f"u{i % 7},i{i % 5},{i},{i % 2},{part},{parts[i - 1]}" for i, part in enumerate(parts)]
    rows.write_text("\n".join(["user,item,time,click,first,second", *lines]) + "\n")

    def by(column: str) -> RankingConfig:
        return RankingConfig(output=run, data={"path": rows}, split={"type": "column", "column": column}, device="cpu")

    def fail(_: Any) -> None:
        raise KeyError("power cut")

    at_step(monkeypatch, 1, fail)
    with pytest.raises(KeyError, match="power cut"):
        train(by("first"), progress=False)
    with pytest.raises(TrainingError) as caught:
        train(by("second"), resume=True, progress=False)
    assert str(caught.value) == (
        f"data: {run}/dataset holds another table than the one that is given; choose another output, or delete it"
    )
