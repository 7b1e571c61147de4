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
import threading
import time
from collections.abc import Callable, Iterator
from types import CodeType, FrameType

from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from jagged.training.processes import Processes

_LOOKS = 20
# A process that compiles or imports may take so many times as long as one that stands still: seven and a half minutes with the
# default of `hang_seconds`.
_COMPILING = 10
# Where a thread is while it compiles or imports: ends of files, and the functions there, all where none is named.
_COMPILERS: dict[str, tuple[str, ...]] = {
    "triton/compiler/compiler.py": ("compile", "_init_handles"),
    "torch/_dynamo/convert_frame.py": (),
    "torch/_inductor/compile_fx.py": (),
    "torch/utils/cpp_extension.py": (),
    "<frozen importlib._bootstrap>": ("_find_and_load",),
}
# Said in the store by who ends a run.
_END = "end"
_watches = itertools.count()


class Watch:
    """Watches over this process's main thread, where there are several processes; else nothing.

    Args:
        processes: the run's.
        seconds: how long a process may stand still. Ten times as long has one that compiles or imports, whenever it does; what is
            said to be `patient` may take as long as it takes.
        advice: what to tell the user at the end of the message; asked for when it is told.
    """

    def __init__(self, processes: Processes, seconds: float, advice: Callable[[], str]) -> None:
        self._processes, self._seconds, self._advice = processes, seconds, advice
        self._patient = 0
        self._main = threading.get_ident()
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Watch:
        self._done.clear()
        self._beaten, self._compiled = time.monotonic(), -math.inf
        # A program that is itself being imported is not all its life at an import.
        self._within = sys._getframe(1).f_code
        if self._processes.world_size > 1:
            # A prefix of its own for each watch: an earlier run's words are no news.
            prefix = f"jagged/watch/{next(_watches)}"
            # A connection of its own: a main thread that waits in the store, as for a group that is made, keeps its own busy.
            self._store = PrefixStore(prefix, _get_default_store().clone())  # type: ignore[attr-defined]
            self._thread = threading.Thread(target=self._watch, name="jagged-watch", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()

    def beat(self) -> None:
        """Say that the main thread goes on."""
        self._beaten = time.monotonic()

    @contextlib.contextmanager
    def patient(self) -> Iterator[None]:
        """Work of this process alone that may take long, while the others wait."""
        self._patient += 1
        try:
            yield
        finally:
            self._patient -= 1
            self.beat()

    def _is_patient(self) -> bool:
        """Whether the others are to wait for this process."""
        now = time.monotonic()
        # What was compiled has to run before the others get what they wait for. None may keep them waiting for ever.
        compiled = now - self._compiled <= self._seconds and now - self._beaten <= _COMPILING * self._seconds
        return self._patient > 0 or compiled

    def _watch(self) -> None:
        interval, number = self._seconds / _LOOKS, 0
        seen: dict[int, tuple[str, float]] = {}
        last = time.monotonic()
        while not self._done.wait(interval):
            number += 1
            self._allow_for_pause(last, interval)
            if compiles(self._main, self._within):
                self._compiled = time.monotonic()
            last = time.monotonic()
            try:
                self._store.set(str(self._processes.rank), json.dumps([number, self._is_patient(), self._place()]))
                words, ends = self._words(), self._store.check([_END])
            except RuntimeError:
                # The process that keeps the store is gone, which the collectives will say.
                return
            # It may have been stopped between two lines here, too.
            now = last = self._allow_for_pause(last, interval)
            seen = {rank: seen[rank] if rank in seen and seen[rank][0] == word else (word, now) for rank, word in words.items()}
            # Who says nothing new is stopped as a whole; a patient one is waited for while it speaks.
            silent = {rank for rank, (_, since) in seen.items() if now - since > self._seconds / 2}
            if ends:
                self._end(words, silent)
            if self._is_patient() or now - self._beaten <= 1.2 * self._seconds:
                continue
            if not any(json.loads(word)[1] for rank, word in words.items() if rank not in silent):
                self._end(words, silent)

    def _allow_for_pause(self, last: float, interval: float) -> float:
        """Return the time. While this thread did not run, the process was stopped, as by Ctrl-Z, and stood still for no fault."""
        now = time.monotonic()
        if (stopped := now - last - 2 * interval) > 0:
            self._beaten = min(now, self._beaten + stopped)
        return now

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


def compiles(main: int, within: CodeType) -> bool:
    """Whether the thread `main`, in what `within` calls, or another of this process's threads compiles or imports."""
    return any(
        _compiles(frame, within if thread == main else None)
        for thread, frame in sys._current_frames().items()
        # Autograd compiles in threads of its own.
        if thread != threading.get_ident()
    )


def _compiles(frame: FrameType | None, within: CodeType | None) -> bool:
    while frame is not None and frame.f_code is not within:
        for file, functions in _COMPILERS.items():
            code = frame.f_code
            if code.co_filename.endswith(file) and (not functions or code.co_name in functions):
                return True
        frame = frame.f_back
    return False
