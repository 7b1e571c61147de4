"""A training program as users write one, for `test_torchrun.py`.

Usage: `python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.training.under_torchrun DIRECTORY WHAT`.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from pathlib import Path

import torch

from jagged.training import Callback, Progress, TrainingInterrupted
from tests.training.clicks import train

# Far above what a busy machine makes a process wait.
HANG_SECONDS = 5.0
# In the middle of an epoch; and after a checkpoint, between two of them.
SIGNALLED, ASLEEP = 3, 9


class UntilSignalled(Callback):
    """Tells of a step, and lets it end when the signal has come."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def on_step(self, progress: Progress) -> None:
        if progress.state.step == SIGNALLED:
            (self.directory / f"reached.{os.environ['RANK']}").touch()
            while getattr(signal.getsignal(signal.SIGTERM), "signal", None) is None:
                time.sleep(0.02)


class Sleep(Callback):
    """Sleeps in one process, and tells when."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def on_step(self, progress: Progress) -> None:
        if progress.state.step == ASLEEP and os.environ["RANK"] == "1":
            (self.directory / "asleep.at").write_text(str(time.time()))
            sleep_for_ever()


def sleep_for_ever() -> None:
    while True:
        time.sleep(100)


def tell_threads() -> None:
    """Say which threads of process groups are left; they may abort the process when the interpreter ends."""
    names = [thread.read_text().strip() for thread in Path("/proc/self/task").glob("*/comm")]
    # In one piece: the other process writes at the same moment.
    sys.stderr.write(f"threads of gloo: {sum('gloo' in name for name in names)}\n")


def main() -> None:
    # What was registered first comes last.
    atexit.register(tell_threads)
    root, what = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    try:
        if what == "signalled":
            train(root / "undisturbed")
            # A second run in the same processes.
            train(root / "signalled", UntilSignalled(root))
        elif what == "resumed":
            train(root / "signalled", resume=True)
        else:
            train(root / "asleep", Sleep(root), hang_seconds=HANG_SECONDS, checkpoint_every=2)
    except TrainingInterrupted as error:
        if os.environ["RANK"] == "0":
            print(error, file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
