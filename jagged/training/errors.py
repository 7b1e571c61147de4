"""What can go wrong in a run, as named errors of one line each."""

from __future__ import annotations

import signal

from jagged.artifacts.errors import CheckpointError as CheckpointError


class TrainingError(RuntimeError):
    """A run that cannot start or go on; the message says what happened, where, and what to do."""

    #: Exit code of the command line.
    exit_code = 2


class TrainingInterrupted(TrainingError):  # noqa: N818 - nothing went wrong
    """A run stopped by a signal, after its step was finished and a checkpoint written; `resume=True` goes on.

    Attributes:
        exit_code: 128 + the signal's number, as shells have it: 130 for SIGINT, 143 for SIGTERM.
    """

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.signal = signal.Signals(signal_number)
        self.exit_code = 128 + signal_number
