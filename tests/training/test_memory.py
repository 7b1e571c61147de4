"""Memory of large tensors that are gone, with and without `release_memory`."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from jagged.training import TrainingError
from jagged.training.memory import release_large_blocks
from tests.places import PLACE
from tests.training.support import run, tiny_dataset

ROOT = Path(__file__).parents[2]
HAS_GLIBC = platform.libc_ver()[0] == "glibc"
# Blocks of 8 MB, each held down by a small one behind it, then larger ones that fit no hole: their resident megabytes.
PROGRAM = """
import sys
import torch
from jagged.training.memory import release_large_blocks

torch.set_num_threads(1)
if sys.argv[1] == "released":
    assert release_large_blocks()
# glibc maps a first large block by itself, and takes its size for the bound of the heap once it is gone.
del (first := [torch.zeros(31 * 2**18)])[:]

def resident():
    with open("/proc/self/status") as lines:
        return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024

before, kept = resident(), []
for size in range(20):
    large = [torch.zeros(2**21 + size * 2**14) for _ in range(4)]
    kept.append(torch.zeros(2**10))
    del large[:]
print(resident() - before)
"""

pytestmark = pytest.mark.skipif(PLACE.name != "cpu" or not HAS_GLIBC, reason="malloc of glibc on the CPU")


def resident_after(kind: str) -> float:
    command = [sys.executable, "-c", PROGRAM, kind]
    return float(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)


def test_large_blocks_go_back_to_the_system() -> None:
    assert resident_after("released") < 8 < 24 < resident_after("as it is")


@pytest.mark.parametrize("release_memory", [True, False])
def test_a_run_asks_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release_memory: bool) -> None:
    asked: list[bool] = []
    monkeypatch.setattr("jagged.training.trainer.release_large_blocks", lambda: not asked.append(True))  # type: ignore[func-returns-value]
    run(tmp_path, tiny_dataset(), max_epochs=1, release_memory=release_memory)
    assert asked == [True] * release_memory


def test_a_malloc_that_is_not_glibcs_is_left_alone_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())
    assert not release_large_blocks()
    with pytest.raises(TrainingError) as raised:
        run(tmp_path, tiny_dataset(), max_epochs=1, release_memory=True)
    expected = "release_memory: got another malloc than glibc's, which alone can be told; leave the option out"
    assert str(raised.value) == expected
