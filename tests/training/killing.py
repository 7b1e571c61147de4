"""Kill training at random moments, again and again, and see that nothing is lost. A program of its own: `test_kill.py` starts it.

It imports everything once and forks a child for each attempt, so that an attempt takes no longer than its training.
Usage: `python -m tests.training.killing DIRECTORY KILLS SEED`; prints a line of JSON for each run brought to its end.
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
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from jagged.data import SequenceDataset
from jagged.training import checkpoint as checkpoints
from jagged.training import loop
from tests.training.support import outcome, run, tiny_dataset

OPTIONS: dict[str, Any] = {"max_epochs": 4, "checkpoint_every": 2}


def digest(path: Path) -> tuple[int, str]:
    """The step of a verified checkpoint, and a digest of all its tensors by name."""
    tensors, state = checkpoints.load_checkpoint(path)
    steps = {int(value) for name, value in tensors.items() if name.startswith("optimizer.step.")}
    assert steps == {state["step"]}, f"{path}: optimizer at {steps}, state at {state['step']}"
    content = hashlib.sha256()
    for name in sorted(tensors):
        content.update(name.encode() + tensors[name].numpy().tobytes())
    return state["step"], content.hexdigest()


def train_in_child(directory: Path, dataset: SequenceDataset, workers: int) -> int:
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        code = 1
        # The default lock is shared by all children; one that is killed while it holds it would stop the others.
        tqdm.set_lock(threading.RLock())
        try:
            run(directory, dataset, resume=True, num_workers=workers, **OPTIONS)
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    return child


def kill_after(child: int, seconds: float) -> None:
    """Kill a child at a moment, unless it has come to its end by then."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return
        time.sleep(min(left, 0.02))
    os.kill(child, signal.SIGKILL)


def reference(directory: Path, dataset: SequenceDataset) -> tuple[dict[str, Any], dict[int, set[str]], float]:
    """The undisturbed run: what it leaves, the digests of all checkpoints it ever wrote, by step, and how long it takes."""
    run(directory.with_name("warm-up"), dataset, **OPTIONS)
    loop.prune = lambda *_: None  # type: ignore[assignment]
    begin = time.monotonic()
    run(directory, dataset, **OPTIONS)
    seconds = time.monotonic() - begin
    digests: dict[int, set[str]] = {}
    for path in checkpoints.list_checkpoints(directory / "checkpoints"):
        step, content = digest(path)
        digests.setdefault(step, set()).add(content)
    return outcome(directory), digests, seconds


def main() -> None:
    root, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    generator = random.Random(seed)
    dataset = tiny_dataset()
    # In a child, too: the parent must stay without threads and process groups, for its children to be able to fork.
    read, write = os.pipe()
    if os.fork() == 0:
        wanted, known, seconds = reference(root / "undisturbed", dataset)
        os.write(write, json.dumps([wanted, {step: sorted(found) for step, found in known.items()}, seconds]).encode())
        os._exit(0)
    os.close(write)
    with open(read, encoding="utf-8") as pipe:
        wanted, known, seconds = json.load(pipe)
    os.wait()

    done = trial = 0
    while done < kills:
        trial += 1
        directory = root / f"trial-{trial}"
        killed, moments = 0, []
        while True:
            workers = generator.choice((0, 0, 2))
            child = train_in_child(directory, dataset, workers)
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
            newest = checkpoints.latest_checkpoint(directory / "checkpoints")
            moments.append(None if newest is None else newest.name)
            for path in checkpoints.list_checkpoints(directory / "checkpoints"):
                step, content = digest(path)
                assert content in known[str(step)], f"trial {trial}: {path.name} is no state that the undisturbed run was in"
        found = outcome(directory)
        different = {name: [found[name], wanted[name]] for name in wanted if found[name] != wanted[name]}
        print(json.dumps({"killed": killed, "newest": moments, "different": different}), flush=True)
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
