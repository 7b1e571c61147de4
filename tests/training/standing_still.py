"""Runs of two processes of which one stands still, is stopped, takes long, or is killed; all at once.

A program of its own: `test_watch.py` starts it. It imports everything once and forks the processes; the store is kept by a
process of its own, as torchrun's is. Usage: `python -m tests.training.standing_still DIRECTORY`; prints JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from jagged.models import TaskOutput
from jagged.training import Callback, Progress, loop
from jagged.training.checkpoint import latest_checkpoint, load_checkpoint
from tests.processes import in_child
from tests.training import clicks
from tests.training.clicks import Clicks, train

# Far above what a busy machine makes a process wait.
HANG_SECONDS = 5.0
STEP = 8


class Event(Callback):
    """Does something in the second process at a step, or in both, and tells when."""

    def __init__(self, directory: Path, action: Callable[[], Any], step: int, both: bool) -> None:
        self.directory, self.action, self.step, self.both = directory, action, step, both

    def on_step(self, progress: Progress) -> None:
        if progress.state.step == self.step and (dist.get_rank() == 1 or self.both):
            (self.directory / "event").write_text(str(time.time()))
            self.action()


def sleep_for_ever() -> None:
    while True:
        time.sleep(100)


def pause() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def take_long() -> None:
    time.sleep(2.5 * HANG_SECONDS)


def compute(seconds: float = 1.6 * HANG_SECONDS) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


def import_something() -> None:
    """For longer than it may stand still: in a process of its own, as an assembler is, then in this one."""
    with tempfile.TemporaryDirectory() as directory:
        lines = (
            "import subprocess",
            f"from {__name__} import compute",
            f"subprocess.run(['sleep', '{1.6 * HANG_SECONDS}'], check=True)",
            "compute()",
        )
        Path(directory, "imported_slowly.py").write_text("\n".join(lines))
        sys.path.insert(0, directory)
        importlib.import_module("imported_slowly")


def wait_for_the_other() -> None:
    """For what the other process never sends."""
    dist.recv(torch.zeros(1), src=0)


def make_a_group() -> None:
    """Which the other process is to make, too: it waits in the store."""
    dist.new_group([0, 1], use_local_synchronization=True)


def slow(*arguments: Any) -> Any:
    take_long()
    return original(*arguments)


class SlowAtFirst(Clicks):
    """Its first batch that is evaluated takes long in one process, as one that is compiled anew without gradients."""

    evaluated = False

    def forward(self, batch: Any) -> TaskOutput:
        if not self.training and not self.evaluated and dist.get_rank() == 1:
            self.evaluated = True
            import_something()
        return super().forward(batch)


original = loop.save_checkpoint
ACTIONS: dict[str, Callable[[], Any]] = {
    "sleeps": sleep_for_ever,
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "writes": lambda: None,
    "paused": pause,
    "sleeps at first": sleep_for_ever,
    "loops at first": lambda: compute(1_000),
    "waits at first": wait_for_the_other,
    "makes a group at first": make_a_group,
    "sleeps while the other computes": lambda: compute(1_000) if dist.get_rank() == 0 else sleep_for_ever(),
    "begins slowly": import_something,
    "validates slowly": lambda: None,
}
# These happen in the first step.
AT_FIRST = (
    "sleeps at first",
    "loops at first",
    "waits at first",
    "makes a group at first",
    "sleeps while the other computes",
    "begins slowly",
)


def keeper() -> tuple[int, int]:
    """The process that keeps the store, and its port."""
    read, write = os.pipe()

    def keep() -> None:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(write, f"{store.port}\n".encode())
        sleep_for_ever()

    child = in_child(keep)
    with open(read) as pipe:
        return child, int(pipe.readline())


def attempt(directory: Path, what: str, rank: int, port: int) -> None:
    os.dup2(os.open(directory / f"said.{rank}", os.O_WRONLY | os.O_CREAT), 2)
    store = dist.PrefixStore(what, dist.TCPStore("127.0.0.1", port, is_master=False))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    if what == "writes":
        loop.save_checkpoint = slow
        options = {"max_epochs": 1}
    else:
        options = {"max_epochs": 3, "checkpoint_every": 2}
    if what == "validates slowly":
        clicks.Clicks = SlowAtFirst  # type: ignore[misc]
    event = Event(
        directory, ACTIONS[what], step=1 if what in AT_FIRST else STEP, both=what in ("paused", "sleeps while the other computes")
    )
    train(directory / "run", event, hang_seconds=HANG_SECONDS, **options)
    dist.destroy_process_group()


def main() -> None:
    root = Path(sys.argv[1])
    torch.set_num_threads(1)
    store, port = keeper()
    children: dict[int, tuple[str, int]] = {}
    ended: dict[str, dict[int, Any]] = {what: {} for what in ACTIONS}
    for what in ACTIONS:
        (root / what).mkdir()
        for rank in range(2):
            children[in_child(lambda what=what, rank=rank: attempt(root / what, what, rank, port))] = (what, rank)  # type: ignore[misc]
    until = time.monotonic() + 60
    stopped = next(child for child, of in children.items() if of == ("stopped", 1))
    while len(children) > 1 and time.monotonic() < until:
        event = root / "paused/event"
        if event.exists() and time.time() - float(event.read_text() or "inf") > 2 * HANG_SECONDS:
            for child in [child for child, of in children.items() if of[0] == "paused"]:
                os.kill(child, signal.SIGCONT)
        child, status = os.waitpid(-1, os.WNOHANG)
        if not child:
            time.sleep(0.02)
            continue
        what, rank = children.pop(child)
        event = root / what / "event"
        after = time.time() - float(event.read_text()) if event.exists() else 0.0
        ended[what][rank] = [os.waitstatus_to_exitcode(status), after]
    left = [children[child] for child in children]
    for child in (*children, store):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    result: dict[str, Any] = {"left": left, "stopped was the last": stopped in children}
    for what, codes in ended.items():
        newest = latest_checkpoint(root / what / "run/checkpoints")
        said = [(root / what / f"said.{rank}").read_text().splitlines() for rank in range(2)]
        result[what] = {
            "codes": {rank: code for rank, (code, _) in codes.items()},
            "seconds": [seconds for _, seconds in codes.values()],
            # torch's own words aside.
            "said": [[line for line in lines if not line.startswith("[rank")] for lines in said],
            "checkpoint": newest and newest.name,
            "step": newest and load_checkpoint(newest)[1]["step"],
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
