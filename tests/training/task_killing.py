"""Kill the training of a task of one's own at random moments, as `killing.py` does with jagged's. `test_task_kill.py` starts it.

Usage: `python -m tests.training.task_killing DIRECTORY KILLS SEED`; prints a line of JSON for each run brought to its end.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from jagged.training import checkpoint as checkpoints
from jagged.training import loop
from tests.processes import in_child
from tests.training.clicks import Told, train
from tests.training.killing import digest, kill_after
from tests.training.support import outcome

# Another number of workers would draw other noise.
OPTIONS: dict[str, Any] = {"max_epochs": 6, "checkpoint_every": 2, "validate_every": "5 steps", "noise": 0.0}


def last_calls(directory: Path) -> list[Any]:
    """What the callback was told in all attempts, from the last checkpoint."""
    newest = checkpoints.list_checkpoints(directory / "checkpoints")[-1]
    [[name, state]] = checkpoints.load_checkpoint(newest)[1]["callbacks"]
    assert name == "Told"
    return list(state["calls"])


def reference(directory: Path, result: Path) -> None:
    """The undisturbed run: what it leaves, the digests of all checkpoints it ever wrote, by step, and how long it takes."""
    train(directory.with_name("warm-up"), Told(), **OPTIONS)
    loop.prune = lambda *_: None  # type: ignore[assignment]
    begin = time.monotonic()
    train(directory, Told(), **OPTIONS)
    seconds = time.monotonic() - begin
    known: dict[int, list[str]] = {}
    for path in checkpoints.list_checkpoints(directory / "checkpoints"):
        step, content = digest(path)
        known.setdefault(step, []).append(content)
    result.write_text(json.dumps([outcome(directory) | {"calls": last_calls(directory)}, known, seconds]))


def main() -> None:
    root, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    generator = random.Random(seed)
    # In a child, too: the parent must stay without threads and process groups, for its children to be able to fork.
    assert os.waitpid(in_child(lambda: reference(root / "undisturbed", root / "reference.json")), 0)[1] == 0
    wanted, known, seconds = json.loads((root / "reference.json").read_text())
    done = trial = 0
    while done < kills:
        trial += 1
        directory, killed = root / f"trial-{trial}", 0
        while True:
            workers = generator.choice((0, 0, 2))
            child = in_child(lambda: train(directory, Told(), resume=True, workers=workers, **OPTIONS))  # noqa: B023 - run at once
            if done < kills and killed < 4:
                kill_after(child, generator.uniform(0.0, 1.2 * seconds))
            _, status = os.waitpid(child, 0)
            # A loader's worker whose parent dies before it has looked for it waits for ever.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            if not os.WIFSIGNALED(status):
                assert os.WEXITSTATUS(status) == 0, f"trial {trial}: the run failed"
                break
            done, killed = done + 1, killed + 1
            for path in checkpoints.list_checkpoints(directory / "checkpoints"):
                step, content = digest(path)
                assert content in known[str(step)], f"trial {trial}: {path.name} is no state that the undisturbed run was in"
        found = outcome(directory) | {"calls": last_calls(directory)}
        different = {name: [found[name], wanted[name]] for name in wanted if found[name] != wanted[name]}
        print(json.dumps({"killed": killed, "different": different}), flush=True)
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
