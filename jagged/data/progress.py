"""Bars of what takes longer than two seconds: on a terminal alone, and gone when it is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

from tqdm import tqdm

# Seconds before a bar appears, and between two looks at it while a step goes on.
DELAY, INTERVAL = 2.0, 0.5


def disabled(progress: bool) -> bool | None:
    """What tqdm is told as `disable`: no bar, or one on a terminal alone."""
    return None if progress else True


@contextmanager
def steps(doing: str, total: int, progress: bool) -> Iterator[Callable[[str], None]]:
    """A bar of steps that have names; a step of many seconds shows its name while it goes on.

    Args:
        doing: what is done.
        total: steps.
        progress: whether to show one.

    Yields:
        What is called with the name of each step, before it begins.
    """
    bar = tqdm(
        total=total, desc=doing, unit="step", delay=DELAY, leave=False, miniters=0, mininterval=0, disable=disabled(progress)
    )
    if bar.disable:
        yield lambda name: None
        return
    over, begun = Event(), [0]

    def watch() -> None:
        while not over.wait(INTERVAL):
            bar.update(0)

    def step(name: str) -> None:
        bar.set_description_str(f"{doing}: {name}", refresh=False)
        bar.update(min(begun[0], 1))
        begun[0] += 1

    watcher = Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield step
        bar.update(min(begun[0], 1))
    finally:
        over.set()
        watcher.join()
        bar.close()
