"""Kill training at random moments, again and again, and see that nothing is lost. A program of its own: `test_kill.py` starts it.

It imports everything once and forks a child for each attempt, so that an attempt takes no longer than its training.
Usage: `python -m tests.training.killing DIRECTORY KILLS SEED JOB...`, of `JOBS`; prints a line of JSON for each run brought to
its end.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

import jagged.runs.ranking.training
import jagged.training.engine  # noqa: F401 - what children need is imported once
from jagged.models.pretrained import from_pretrained, load_task, open_task
from jagged.training import CheckpointError, loop
from jagged.training import checkpoint as checkpoints
from tests.processes import in_child
from tests.training import clicks
from tests.training.support import outcome, run, tiny_dataset
from tests.training.table_runs import DRAWN, shop_file, table_outcome, train_table


class Job(NamedTuple):
    """What is killed.

    Args:
        train: into a directory, from scratch or on from where it stands, with a number of loader workers.
        outcome: of a finished run, what two of them agree in.
        open: as a user opens a finished run, after its bytes were verified.
    """

    train: Callable[[Path, int], object]
    outcome: Callable[[Path], dict[str, Any]]
    open: Callable[[Path], object]


def sequences(root: Path) -> Job:
    """SASRec on events."""
    dataset = tiny_dataset()

    def train(directory: Path, workers: int) -> None:
        run(directory, dataset, resume=True, num_workers=workers, max_epochs=4, checkpoint_every=2)

    return Job(train, outcome, from_pretrained)


def task(root: Path) -> Job:
    """A task of one's own with a callback: no call of it is lost or made twice."""
    # Another number of workers would draw other noise.
    options: dict[str, Any] = {"max_epochs": 6, "checkpoint_every": 2, "validate_every": "5 steps", "noise": 0.0}

    def train(directory: Path, workers: int) -> None:
        clicks.train(directory, clicks.Told(), resume=True, workers=workers, **options)

    def told(directory: Path) -> dict[str, Any]:
        newest = checkpoints.list_checkpoints(directory / "checkpoints")[-1]
        [[name, state]] = checkpoints.load_checkpoint(newest)[1]["callbacks"]
        assert name == "Told"
        return outcome(directory) | {"calls": list(state["calls"])}

    return Job(train, told, partial(load_task, task=clicks.Clicks(dropout=0.3)))


def table(root: Path) -> Job:
    """A ranking model on a table, which is read, too."""
    return _on_rows(shop_file(root / "shop.csv"))


def negatives(root: Path) -> Job:
    """The same on a table without labels, with drawn candidates."""
    return _on_rows(shop_file(root / "drawn.csv", names=("user", "item", "time", "type", "price")), DRAWN)


def beside(root: Path) -> Job:
    """The same with histories of a table of events beside the rows."""
    events = shop_file(root / "events.csv", 1, ("user", "item", "time"))
    return _on_rows(shop_file(root / "rows.csv"), {"events": str(events), "event_labels": ()})


def _on_rows(rows: Path, data: dict[str, Any] | None = None) -> Job:
    def train(directory: Path, workers: int) -> None:
        options = {"training": {"num_workers": workers, "checkpoint_every": 3}, "data": data or {}}
        train_table(directory, rows, resume=True, **options)

    return Job(train, table_outcome, open_task)


JOBS = {"sequences": sequences, "task": task, "table": table, "negatives": negatives, "beside": beside}


def digest(path: Path) -> tuple[int, str]:
    """The step of a verified checkpoint, and a digest of all its tensors by name."""
    tensors, state = checkpoints.load_checkpoint(path)
    steps = {int(value) for name, value in tensors.items() if name.startswith("optimizer.step.")}
    assert steps == {state["step"]}, f"{path}: optimizer at {steps}, state at {state['step']}"
    content = hashlib.sha256()
    for name in sorted(tensors):
        content.update(name.encode() + tensors[name].numpy().tobytes())
    return state["step"], content.hexdigest()


def kill_after(child: int, seconds: float) -> None:
    """Kill a child at a moment, unless it has come to its end by then."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return
        time.sleep(min(left, 0.02))
    os.kill(child, signal.SIGKILL)


def count_flushes(dies_at: int = 0) -> list[int]:
    """Count this process's flushes to disk, of files and directories that are about to be whole; it dies at the given one."""
    flush, seen = os.fsync, [0]

    def fsync(descriptor: int) -> None:
        seen[0] += 1
        if seen[0] == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        flush(descriptor)

    os.fsync = fsync  # type: ignore[assignment]
    return seen


def reference(job: Job, directory: Path, result: Path) -> None:
    """The undisturbed run: its outcome, the digests of its checkpoints by step, how long it takes and how often it flushes."""
    job.train(directory.with_name("warm-up"), 0)
    loop.prune = lambda *_: None  # type: ignore[assignment]
    begin, flushes = time.monotonic(), count_flushes()
    job.train(directory, 0)
    seconds = time.monotonic() - begin
    known: dict[int, list[str]] = {}
    for path in checkpoints.list_checkpoints(directory / "checkpoints"):
        step, content = digest(path)
        known.setdefault(step, []).append(content)
    result.write_text(json.dumps([job.outcome(directory), known, seconds, flushes[0]]))


def attempt(job: Job, directory: Path, workers: int, dies_at: int) -> None:
    # The default lock is shared by all children; one that is killed while it holds it would stop the others.
    tqdm.set_lock(threading.RLock())
    if dies_at:
        count_flushes(dies_at)
    job.train(directory, workers)


def look(job: Job, directory: Path, wanted: dict[str, Any], known: dict[str, list[str]]) -> None:
    """What a kill leaves is refused or the finished run, and its checkpoints are states that the undisturbed run was in."""
    with contextlib.suppress(CheckpointError):
        job.open(directory)
        assert job.outcome(directory) == wanted, f"{directory} was opened, and is not the finished run"
    for path in checkpoints.list_checkpoints(directory / "checkpoints"):
        step, content = digest(path)
        assert content in known[str(step)], f"{path} is no state that the undisturbed run was in"


def kill(job: Job, root: Path, kills: int, generator: random.Random) -> None:
    """Bring runs to their ends that are killed so many times together: half of them at a moment, half at a flush."""
    # In children, too: the parent must stay without threads and process groups, for its children to be able to fork.
    assert succeeds(lambda: reference(job, root / "undisturbed", root / "reference.json"))
    wanted, known, seconds, flushes = json.loads((root / "reference.json").read_text())
    done = trial = 0
    while done < kills:
        trial += 1
        directory, killed, at_flush = root / f"trial-{trial}", 0, 0
        while True:
            to_kill = done < kills and killed < 4
            dies_at = generator.randint(1, flushes) if to_kill and generator.random() < 0.5 else 0
            workers = generator.choice((0, 0, 2))
            child = in_child(lambda: attempt(job, directory, workers, dies_at))  # noqa: B023 - run at once
            if to_kill and not dies_at:
                kill_after(child, generator.uniform(0.0, 1.2 * seconds))
            _, status = os.waitpid(child, 0)
            # A loader's worker whose parent dies before it has looked for it waits for ever.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            if not os.WIFSIGNALED(status):
                assert os.WEXITSTATUS(status) == 0, f"trial {trial}: the run failed"
                break
            done, killed, at_flush = done + 1, killed + 1, at_flush + bool(dies_at)
            assert succeeds(lambda: look(job, directory, wanted, known)), f"trial {trial}"  # noqa: B023 - run at once
        found = job.outcome(directory)
        different = {name: [found[name], wanted[name]] for name in wanted if found[name] != wanted[name]}
        print(json.dumps({"killed": killed, "at_flush": at_flush, "different": different}), flush=True)
        shutil.rmtree(directory)


def succeeds(work: Callable[[], object]) -> bool:
    return os.waitpid(in_child(work), 0)[1] == 0


def main() -> None:
    root, kills, seed, *names = sys.argv[1:]
    torch.set_num_threads(1)
    for name in names:
        (Path(root) / name).mkdir()
        kill(JOBS[name](Path(root) / name), Path(root) / name, int(kills), random.Random(int(seed)))


if __name__ == "__main__":
    main()
