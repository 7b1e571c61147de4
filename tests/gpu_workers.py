"""Processes of pytest-xdist on GPUs, as a plugin: `pytest -p tests.gpu_workers -m gpu -n 64 --dist load --maxschedchunk 1`.

Each process sees one GPU, in turns. Tests come in a shuffled order, as neighbours compile the same kernels; `LONGEST` come first,
so that a run does not end with one of them alone. Of processes that want one kernel, one compiles it and the others wait, and
then find it on disk.

With `--done FILE`, tests that passed are written down there, by file of tests with a hash of the files that it reaches, and are
left out of the next run while these, PyTorch, Triton and the kind of GPU are the same: a run that was stopped goes on, also days
later. What was skipped runs again: it may not be on a machine with more GPUs. `tests/done_on_gpu.json` is the record of the whole
suite.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import random
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests import proven

# Tests of a minute and more, by function.
LONGEST = (
    "test_small_steps_launch_every_kernel",
    "test_memory_is_flat",
    "test_repeats_are_bit_for_bit_equal",
    "test_is_the_padded_one",
    "test_transformer_block_with_biases",
    "test_it_learns_which_inputs_labels_have",
    "test_options_three_way",
)
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


class Done:
    """Tests that are done, in a file: `{"gpu": its name, "files": {file of tests: {"of": its hash, "tests": names' hashes}}}`."""

    def __init__(self, place: Path, root: Path) -> None:
        self.place, self.root = place, root
        self.hash_of = functools.cache(lambda path: hashlib.sha256(path.read_bytes()).hexdigest())
        known = json.loads(place.read_text()) if place.exists() else {}
        self.gpu = _gpu()
        files = known["files"] if known.get("gpu") == self.gpu else {}
        now = self._hashes([file for file in files if (root / file).exists()])
        self.of = {file: entry["of"] for file, entry in files.items() if entry["of"] == now.get(file)}
        self.tests = {file: set(files[file]["tests"].split()) for file in self.of}
        self.passed: set[str] = set()

    def _hashes(self, files: list[str]) -> dict[str, str]:
        """Return by file of tests a hash of the files that it reaches, and of what compiles and runs kernels."""
        runs_on = [f"{name} {metadata.version(name).split('+')[0]}" for name in ("torch", "triton")]
        found = {}
        for file in files:
            reached = sorted(proven.reached_by(self.root, self.root / file))
            parts = [*runs_on, *(f"{path.relative_to(self.root)} {self.hash_of(path)}" for path in reached)]
            found[file] = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
        return found

    @staticmethod
    def _parts(test: str) -> tuple[str, str]:
        file, name = test.split("::", 1)
        return file, hashlib.sha256(name.encode()).hexdigest()[:8]

    def has(self, test: str) -> bool:
        file, name = self._parts(test)
        return name in self.tests.get(file, ())

    def add(self, test: str) -> None:
        file, name = self._parts(test)
        self.tests.setdefault(file, set()).add(name)
        told = {file: {"of": self.of[file], "tests": " ".join(sorted(self.tests[file]))} for file in sorted(self.tests)}
        # At once in full: the run may be stopped at any time.
        new = self.place.with_name(f"{self.place.name}.new")
        new.write_text(json.dumps({"gpu": self.gpu, "files": told}, indent=1) + "\n")
        new.replace(self.place)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.pytest_xdist_node_collection_finished([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        # Before anything runs: what is changed meanwhile is not what passed.
        self.of |= self._hashes(sorted({test.split("::")[0] for test in ids} - self.of.keys()))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.passed.add(report.nodeid)
        if report.when == "teardown" and report.passed and report.nodeid in self.passed:
            self.add(report.nodeid)


def _gpu() -> str:
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"


# Before conftest.py puts first what compiles for minutes.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    place: Path | None = config.getoption("--done")
    if place is not None:
        done = Done(place, config.rootpath)
        items[:] = [item for item in items if not done.has(item.nodeid)]
    # The same order in every process.
    random.Random(0).shuffle(items)
    items.sort(key=lambda item: getattr(item, "originalname", item.name) not in LONGEST)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    place: Path | None = session.config.getoption("--done")
    if place is not None and not WORKER:
        session.config.pluginmanager.register(Done(place, session.config.rootpath))
