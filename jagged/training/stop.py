"""SIGTERM and SIGINT as a wish that the training loop reads between steps."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_GRACE_SECONDS = 20


class StopRequested(Exception):  # noqa: N818 - a message to the training loop, no error
    """Leave the present work at a place where nothing is half done."""


class StopWish:
    """Whether, and by which signal, the run was asked to stop.

    Attributes:
        signal: the signal's number, or None.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._process = os.getpid()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Take note; a second SIGINT does not wait any longer."""
        if os.getpid() != self._process:
            # Loader workers inherit the handler. They must survive a signal to the whole group, for the step to be finished; but
            # one that is stuck must still end when the loader terminates it.
            if number == signal.SIGTERM:
                signal.alarm(_GRACE_SECONDS)
            return
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number

    def watched(self, items: Iterable[Any]) -> Iterator[Any]:
        """The items, with `StopRequested` before the first one after the wish."""
        for item in items:
            if self.signal is not None:
                raise StopRequested
            yield item


@contextmanager
def stop_wish() -> Iterator[StopWish]:
    """Handle SIGTERM and SIGINT by a `StopWish` inside the block; leave them alone in threads other than the main one."""
    wish = StopWish()
    if threading.current_thread() is not threading.main_thread():
        yield wish
        return
    before = {number: signal.signal(number, wish) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield wish
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
