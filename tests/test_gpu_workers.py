"""The plugin for tests on GPUs, on a CPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.gpu_workers import LONGEST, _waiting

ROOT = Path(__file__).parent.parent
TESTS = """
import os, pathlib, pytest

@pytest.mark.parametrize("number", range(8))
def test_passes(number):
    pathlib.Path(__file__).with_name("ran").open("a").write(f"{number}\\n")

def test_fails():
    assert pathlib.Path(__file__).with_name("mended").exists()

@pytest.mark.skip
def test_is_skipped(): ...
"""


def test_what_is_done_is_left_out(tmp_path: Path) -> None:
    """In two processes; what failed runs again. The order is another than that of the file."""
    (tmp_path / "test_some.py").write_text(TESTS)
    done, ran = tmp_path / "done", tmp_path / "ran"

    def run(*options: str) -> str:
        command = [sys.executable, "-m", "pytest", "-p", "tests.gpu_workers", "-q", "-p", "no:cacheprovider", "--done", str(done)]
        # The run is no process of the one that this test runs in.
        own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        found = subprocess.run([*command, *options, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, env=own)
        return found.stdout.splitlines()[-1]

    assert run("-n", "2", "--dist", "load", "--maxschedchunk", "1").startswith("1 failed, 8 passed, 1 skipped")
    assert sorted(ran.read_text().split()) == [*map(str, range(8))]
    assert run().startswith("1 failed, 1 skipped in ")
    (tmp_path / "mended").touch()
    assert run().startswith("1 passed, 1 skipped in ")
    ran.unlink()
    # What changed runs again.
    (tmp_path / "test_some.py").write_text(f"{TESTS}#")
    assert run().startswith("9 passed, 1 skipped")
    order = ran.read_text().split()
    assert order != sorted(order)


def test_the_longest_come_first(tmp_path: Path) -> None:
    """Whatever their parameters, and where they stand."""
    (tmp_path / "test_some.py").write_text(
        """
import pathlib, pytest

@pytest.mark.parametrize("number", range(20))
def test_short(number):
    pathlib.Path(__file__).with_name("ran").open("a").write("short ")

@pytest.mark.parametrize("number", range(3))
def test_memory_is_flat(number):
    pathlib.Path(__file__).with_name("ran").open("a").write("long ")
"""
    )
    command = [sys.executable, "-m", "pytest", "-p", "tests.gpu_workers", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, env=own)
    assert (tmp_path / "ran").read_text().split() == ["long"] * 3 + ["short"] * 20


def test_the_longest_are_there() -> None:
    """A test that is called otherwise now would come in between."""
    found = {
        name for path in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }
    assert set(LONGEST) <= found


def test_one_compiles_and_others_wait(tmp_path: Path) -> None:
    """By a lock for each kernel, taken while it is compiled; two kernels have two, and a kernel has one whatever the process."""
    calls: list[Any] = []
    compiled = _waiting(lambda src, target=None, options=None: calls.append((src.name, target, options)), tmp_path)
    assert _waiting(compiled, tmp_path) is compiled
    first, second = (SimpleNamespace(name=name, hash=lambda name=name: name) for name in ("first", "second"))
    for src, options in ((first, {"num_warps": 4}), (first, {"num_warps": 4}), (second, {"num_warps": 4}), (first, None)):
        compiled(src, "sm_90", options)
    assert [name for name, _, _ in calls] == ["first", "first", "second", "first"]
    assert len(list(tmp_path.iterdir())) == 3
