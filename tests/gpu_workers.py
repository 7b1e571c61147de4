"""Processes of pytest-xdist on GPUs, as a plugin: `pytest -p tests.gpu_workers -m gpu -n 64 --dist load --maxschedchunk 1`.

Each process sees one GPU, in turns. Tests come in a shuffled order, as neighbours compile the same kernels. Of processes that
want one kernel, one compiles it and the others wait, and then find it on disk. With `--done FILE`, tests that passed or were
skipped are written down there, and left out of the next run: one that was stopped goes on.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")
GPUS = len([*Path("/dev").glob("nvidia[0-9]*")])

if WORKER and GPUS > 1:
    # Before anything asks for a GPU.
    os.environ["CUDA_VISIBLE_DEVICES"] = str(int(WORKER.removeprefix("gw")) % GPUS)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--done", type=Path, help="file of the tests that passed or were skipped, which are left out")


def pytest_configure(config: pytest.Config) -> None:
    if WORKER:
        compile_once(Path(tempfile.gettempdir(), "jagged-kernels-being-compiled"))


def compile_once(folder: Path) -> None:
    """Let Triton compile a kernel in one process at a time."""
    import triton
    from triton.compiler import compiler

    folder.mkdir(exist_ok=True)
    for module in (compiler, triton.compiler, triton):
        module.compile = _waiting(compiler.compile, folder)


def _waiting(compile_it: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    if hasattr(compile_it, "__wrapped__"):
        return compile_it

    @functools.wraps(compile_it)
    def compiled(src: Any, target: Any = None, options: Any = None, *rest: Any, **named: Any) -> Any:
        # Of text, as tests of ahead-of-time compilation have it, there is nothing to wait for.
        if not hasattr(src, "hash"):
            return compile_it(src, target, options, *rest, **named)
        key = hashlib.sha256(f"{src.hash()} {target} {sorted((options or {}).items(), key=str)}".encode()).hexdigest()
        with open(folder / key, "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return compile_it(src, target, options, *rest, **named)

    return compiled


# Before conftest.py puts first what compiles for minutes.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    place: Path | None = config.getoption("--done")
    done = set(place.read_text().splitlines()) if place is not None and place.exists() else set()
    items[:] = [item for item in items if item.nodeid not in done]
    # The same order in every process.
    random.Random(0).shuffle(items)


class Writer:
    """Writes down what is done; in the process that hands out the tests."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped or (report.passed and report.when == "call"):
            with self.place.open("a") as file:
                file.write(f"{report.nodeid}\n")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    place: Path | None = session.config.getoption("--done")
    if place is not None and not WORKER:
        session.config.pluginmanager.register(Writer(place))
