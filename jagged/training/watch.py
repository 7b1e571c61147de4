"""A run of several processes that stands still ends, and says where each process stands.

A process that hangs keeps all others waiting inside of a collective, where Python cannot reach them. So a thread of each process
looks whether its main thread goes on, and tells the others through the group's store.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import sys
import sysconfig
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import psutil
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from jagged.training.processes import Processes

_LOOKS = 20
# The first two beats of each kind of work may take so many times as long while the process computes: what comes first is
# compiled, cached, started. With the default of `hang_seconds` that is seven and a half minutes.
_FIRST = 10
# A look finds a process that computes where it or its children have used so much of a core since the last look, or run or wait
# for a disk, which on a busy machine they do without getting a core. A compilation uses one or more; the threads that look,
# show progress and keep connections use a hundredth or two.
_COMPUTES = 0.1
_RUNNING = (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP)
# So many of the looks have to find it.
_OFTEN = 0.25
_PYTHON, _PACKAGES = (sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib"))
# Said in the store by who ends a run.
_END = "end"
_watches = itertools.count()


class Watch:
    """Watches over this process's main thread, where there are several processes; else nothing.

    Args:
        processes: the run's.
        seconds: how long a process may stand still. The first two beats of each kind of work may take ten times as long while the
            process computes or waits for another in torch, what is said to be `patient` as long as it takes.
        advice: what to tell the user at the end of the message; asked for when it is told.
    """

    def __init__(self, processes: Processes, seconds: float, advice: Callable[[], str]) -> None:
        self._processes, self._seconds, self._advice = processes, seconds, advice
        self._work, self._beats = "train", Counter[str]()
        self._beaten, self._patient = time.monotonic(), 0
        self._main = threading.get_ident()
        self._computing = _Computing(seconds)
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Watch:
        self._done.clear()
        self._beaten = time.monotonic()
        if self._processes.world_size > 1:
            # A prefix of its own for each watch: an earlier run's words are no news.
            prefix = f"jagged/watch/{next(_watches)}"
            self._store = PrefixStore(prefix, _get_default_store())
            self._thread = threading.Thread(target=self._watch, name="jagged-watch", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()

    def beat(self) -> None:
        """Say that a piece of work is done, and that the main thread goes on."""
        self._beats[self._work] += 1
        self.goes_on()

    def goes_on(self) -> None:
        """Say that the main thread goes on."""
        self._beaten = time.monotonic()

    @contextlib.contextmanager
    def work(self, kind: str) -> Iterator[None]:
        """Work of another kind than training: "valid", "test"."""
        self._work, before = kind, self._work
        self.goes_on()
        try:
            yield
        finally:
            self._work = before
            self.goes_on()

    def over(self, items: Iterable[Any]) -> Iterator[Any]:
        """The items, with a beat after each."""
        for item in items:
            yield item
            self.beat()

    @contextlib.contextmanager
    def patient(self) -> Iterator[None]:
        """Work of this process alone that may take long, while the others wait."""
        self._patient += 1
        try:
            yield
        finally:
            self._patient -= 1
            self.goes_on()

    def _is_first(self) -> bool:
        return self._beats[self._work] < 2

    def _is_patient(self) -> bool:
        # Not without an end: a process in an endless loop would keep the others waiting for as long as they may wait.
        within = time.monotonic() - self._beaten <= _FIRST * self._seconds
        return self._patient > 0 or (self._is_first() and within and self._computing.lately)

    def _sleeps(self) -> bool:
        """Whether this process does nothing in a first step, and waits for no other: who waits does so in torch."""
        return self._is_first() and not self._computing.lately and not is_in_torch(self._main)

    def _watch(self) -> None:
        interval, number = self._seconds / _LOOKS, 0
        seen: dict[int, tuple[str, float]] = {}
        last = time.monotonic()
        while not self._done.wait(interval):
            number += 1
            # While this thread did not run either, the whole process was stopped, as by Ctrl-Z, and stood still for no fault.
            if (stopped := time.monotonic() - last - 2 * interval) > 0:
                self._beaten += stopped
                self._computing = _Computing(self._seconds)
            last = time.monotonic()
            try:
                self._store.set(str(self._processes.rank), json.dumps([number, self._is_patient(), self._place()]))
                words, ends = self._words(), self._store.check([_END])
            except RuntimeError:
                # The process that keeps the store is gone, which the collectives will say.
                return
            if self._is_first():
                self._computing.look()
            now = time.monotonic()
            seen = {rank: seen[rank] if rank in seen and seen[rank][0] == word else (word, now) for rank, word in words.items()}
            # Who says nothing new is stopped as a whole; a patient one is waited for while it speaks.
            silent = {rank for rank, (_, since) in seen.items() if now - since > self._seconds / 2}
            if ends:
                self._end(words, silent)
            if self._is_patient() or now - self._beaten <= 1.2 * self._seconds:
                continue
            # A process that waits for this one on a GPU computes there, and looks patient.
            if self._sleeps() or not any(json.loads(word)[1] for rank, word in words.items() if rank not in silent):
                self._end(words, silent)

    def _words(self) -> dict[int, str]:
        others = [rank for rank in range(self._processes.world_size) if self._store.check([str(rank)])]
        return {rank: self._store.get(str(rank)).decode() for rank in others}

    def _place(self) -> str:
        """Where the main thread is, in its innermost line outside of torch, or in torch."""
        frame = sys._current_frames().get(self._main)
        innermost = frame
        while frame is not None and f"{os.sep}torch{os.sep}" in frame.f_code.co_filename:
            frame = frame.f_back
        frame = frame or innermost
        if frame is None:
            return "nowhere"
        return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} ({frame.f_code.co_name})"

    def _end(self, words: dict[int, str], silent: set[int]) -> None:
        size = self._processes.world_size
        places = ", ".join(
            f"rank {rank} {'does not answer' if rank in silent or rank not in words else f'in {json.loads(words[rank])[2]}'}"
            for rank in range(size)
        )
        # In one piece: the others write at the same moment.
        sys.stderr.write(
            f"jagged: rank {self._processes.rank} of {size} has stood still for {time.monotonic() - self._beaten:.0f} s, "
            f"hang_seconds are {self._seconds:g}; {places}; {self._advice()}\n"
        )
        sys.stderr.flush()
        self._wait_for_others(silent)
        os._exit(2)

    def _wait_for_others(self, silent: set[int]) -> None:
        """Let all who can say where they stand: who sees a process gone says no more than that."""
        speaking = set(range(self._processes.world_size)) - silent
        until = time.monotonic() + self._seconds / 2
        with contextlib.suppress(RuntimeError):
            self._store.set(_END, "")
            self._store.set(f"{_END}.{self._processes.rank}", "")
            while time.monotonic() < until and not self._store.check([f"{_END}.{rank}" for rank in speaking]):
                time.sleep(0.02)


def is_in_torch(thread: int) -> bool:
    """Whether a thread is in torch or TorchRec, which wait in Python's own modules too."""
    frame = sys._current_frames().get(thread)
    while frame is not None and _is_python(frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None and any(f"{os.sep}{name}{os.sep}" in frame.f_code.co_filename for name in ("torch", "torchrec"))


def _is_python(file: str) -> bool:
    return file.startswith("<frozen") or (file.startswith(_PYTHON) and not file.startswith(_PACKAGES))


class _Computing:
    """Whether this process and its children computed in the last `seconds`, as often as it looks."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._itself = seconds, psutil.Process()
        self._at, self._own, self._children = time.monotonic(), time.process_time(), math.inf
        self._looks: deque[tuple[float, bool]] = deque()

    def look(self) -> None:
        at, own = time.monotonic(), time.process_time()
        since = at - self._at
        computes = own - self._own >= _COMPUTES * since
        # While this process computes its main thread holds the interpreter, and a walk through all processes would take seconds.
        computes = computes or self._runs(self._itself) or self._children_compute(since)
        self._at, self._own = at, own
        self._looks.append((at, computes))
        while self._looks[0][0] < at - self._seconds:
            self._looks.popleft()

    def _children_compute(self, since: float) -> bool:
        children = self._itself.children(recursive=True)
        times = 0.0
        for child in children:
            with contextlib.suppress(psutil.Error):
                # Of children of theirs that have ended, too.
                times += sum(child.cpu_times()[:4])
        used, self._children = times - self._children, times
        return used >= _COMPUTES * since or any(self._runs(child) for child in children)

    @staticmethod
    def _runs(process: psutil.Process) -> bool:
        # The state of a process is that of its main thread.
        with contextlib.suppress(psutil.Error):
            return process.status() in _RUNNING
        return False

    @property
    def lately(self) -> bool:
        if not self._looks or self._looks[-1][0] - self._looks[0][0] < self._seconds / 2:
            return True
        return sum(computes for _, computes in self._looks) >= _OFTEN * len(self._looks)
