"""A process that stands still, is stopped, or is killed ends the run of two with a line that says so; long work does not."""

from __future__ import annotations

import importlib
import json
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from jagged.training.watch import Watch, compiles
from tests.places import PLACE
from tests.processes import told_by
from tests.training.standing_still import AT_FIRST


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = told_by("tests.training.standing_still", tmp_path_factory.mktemp("watch"))
    return found


def line(rank: int, name: str, places: str) -> str:
    """A pattern of the whole line."""
    whole = f"the last checkpoint, ROOT/{name}/run/checkpoints/step-00000006, is whole: resume"
    checkpoint = re.escape("there is none yet: start again" if name in AT_FIRST else whole)
    seconds = r"has stood still for \d+ s, hang_seconds are 5; "
    return f"jagged: rank {rank} of 2 {seconds}{places}; {checkpoint}"


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("sleeps", "sleep_for_ever"),
        ("sleeps at first", "sleep_for_ever"),
        ("sleeps while the other computes", "sleep_for_ever"),
        ("loops at first", "compute"),
        ("waits at first", "wait_for_the_other"),
        ("makes a group at first", "make_a_group"),
    ],
)
def test_one_stands_still_for_ever(result: dict[str, Any], name: str, where: str) -> None:
    """In the first step as in any other."""
    found = result[name]
    assert found["codes"] == {"0": 2, "1": 2}
    assert max(found["seconds"]) < 30
    assert min(found["seconds"]) > 5
    places = rf"rank 0 in \w+\.py:\d+ \(\w+\), rank 1 in standing_still\.py:\d+ \({where}\)"
    for rank, said in enumerate(found["said"]):
        assert len(said) == 1
        assert re.fullmatch(line(rank, name, places), said[0])


def test_one_is_stopped(result: dict[str, Any]) -> None:
    found = result["stopped"]
    assert found["codes"] == {"0": 2}
    assert max(found["seconds"]) < 30
    assert result["left"] == [["stopped", 1]]
    assert found["said"][1] == []
    assert len(found["said"][0]) == 1
    assert re.fullmatch(line(0, "stopped", r"rank 0 in \w+\.py:\d+ \(\w+\), rank 1 does not answer"), found["said"][0][0])


def test_one_is_killed(result: dict[str, Any]) -> None:
    found = result["killed"]
    assert found["codes"] == {"0": 2, "1": -9}
    assert max(found["seconds"]) < 30
    assert len(found["said"][0]) == 1
    assert re.fullmatch(
        r"another process of the run ended or cannot be reached, after step [78]: .*; "
        r"the last checkpoint, ROOT/killed/run/checkpoints/step-00000006, is whole: resume",
        found["said"][0][0],
    )


@pytest.mark.parametrize("name", ["sleeps", "stopped", "killed"])
def test_the_last_checkpoint_is_whole(result: dict[str, Any], name: str) -> None:
    assert (result[name]["checkpoint"], result[name]["step"]) == ("step-00000006", 6)


@pytest.mark.parametrize(("name", "step"), [("writes", 6), ("paused", 18), ("begins slowly", 18), ("validates slowly", 18)])
def test_long_writes_pauses_of_all_and_slow_beginnings_are_no_standing_still(
    result: dict[str, Any], name: str, step: int
) -> None:
    assert result[name]["codes"] == {"0": 0, "1": 0}
    assert result[name]["said"] == [[], []]
    assert result[name]["step"] == step


def look_at(work: Callable[[], Any]) -> list[bool]:
    """What is found of it, in short intervals."""
    main, within, found, done = threading.get_ident(), sys._getframe().f_code, list[bool](), threading.Event()

    def look() -> None:
        while not done.wait(0.02):
            found.append(compiles(main, within))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        work()
    finally:
        done.set()
        thread.join()
    return found


def busy(seconds: float = 0.5) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


def import_slowly(directory: Path) -> None:
    (directory / "found_slowly.py").write_text("import time\ntime.sleep(0.5)")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(directory)
        importlib.import_module("found_slowly")
        del sys.modules["found_slowly"]


def in_a_thread(work: Callable[[], Any]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@triton.jit
def kernel(x, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, SIZE)
    tl.store(x + at, tl.sort(tl.load(x + at)))


def compile_a_kernel(directory: Path) -> None:
    """As a launch does for a shape that is new."""
    with knobs.cache.scope():
        knobs.cache.dir = str(directory)
        source = ASTSource(kernel, {"x": "*fp32", "SIZE": "constexpr"}, {(1,): 1024})
        triton.compile(source, target=GPUTarget("cuda", 90, 32))


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (lambda directory: busy(), False),
        (lambda directory: time.sleep(0.5), False),
        (import_slowly, True),
        (lambda directory: in_a_thread(lambda: import_slowly(directory)), True),
        (compile_a_kernel, True),
    ],
    ids=["computes", "sleeps", "imports", "imports in a thread", "compiles a kernel"],
)
def test_who_compiles(tmp_path: Path, work: Callable[[Path], Any], expected: bool) -> None:
    if work is compile_a_kernel and PLACE.name == "interpret":
        pytest.skip("interpreted kernels are not compiled")
    found = look_at(lambda: work(tmp_path))
    # A kernel's file is written, and loaded, in the same call.
    assert sum(found) > len(found) / 2 if expected else not any(found)


def test_a_compiled_model_that_waits_does_not_compile() -> None:
    """While it runs, what compiled it is on the stack no more."""

    @torch.compile
    def model(x: torch.Tensor) -> torch.Tensor:
        y = torch.sin(x) * 2
        torch.compiler.disable(busy)()
        return torch.cos(y)

    x = torch.ones(8)
    assert any(look_at(lambda: model(x)))
    assert not any(look_at(lambda: model(x)))


def test_a_pause_in_the_middle_of_a_look_is_no_standing_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole process stands still while its watch speaks with the others: which stands here for its being stopped there."""
    speaks, ended = threading.Event(), []

    class Store:
        said = 0

        def set(self, key: str, word: str) -> None:
            Store.said += 1
            if Store.said == 3:
                speaks.set()
                time.sleep(1.5)

        def check(self, keys: list[str]) -> bool:
            return keys[0].isdigit()

        def get(self, key: str) -> bytes:
            return json.dumps([Store.said, False, "there"]).encode()

    watch = Watch(SimpleNamespace(world_size=2, rank=0), 0.5, lambda: "")  # type: ignore[arg-type]
    monkeypatch.setattr("jagged.training.watch._get_default_store", lambda: SimpleNamespace(clone=Store))
    monkeypatch.setattr("jagged.training.watch.PrefixStore", lambda prefix, store: store)
    monkeypatch.setattr(watch, "_end", lambda words, silent: ended.append(Store.said))
    with watch:
        while not speaks.is_set():
            watch.beat()
            time.sleep(0.01)
        time.sleep(1.5)
        begun = time.monotonic()
        while time.monotonic() - begun < 0.5:
            watch.beat()
            time.sleep(0.01)
        assert ended == []
        # One that stands still by itself is found as before.
        time.sleep(1.0)
    assert ended
