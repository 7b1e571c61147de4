"""Where the tests run, how deep, and with which poison in fresh memory."""

from __future__ import annotations

import fcntl
import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

from tests import proven
from tests.interpreter import make_fast
from tests.places import PLACE, Place
from tests.seeds import SEED, run_in_halves

# Deterministic mode, below, refuses cuBLAS without it; read when CUDA starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

LONG = os.environ.get("JAGGED_TEST_LONG") == "1"
EXAMPLES = {"cpu": (100, 2_000), "interpret": (10, 200), "gpu": (100, 10_000)}[PLACE.name][LONG]

# Coverage doubles the time of the interpreter, so of interpreted tests it watches the one that launches every kernel.
COVERED_INTERPRETED = "test_small_steps_launch_every_kernel"
# What compiles for minutes on a GPU.
LONGEST = ("test_tiles_of_longer_samples", "test_three_way")

hypothesis.settings.register_profile(
    "jagged",
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    # Mutants want to know that a test fails, not the smallest example of it.
    phases=[
        phase for phase in hypothesis.Phase if phase != hypothesis.Phase.shrink or os.environ.get("JAGGED_TEST_SHRINK") != "0"
    ],
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("jagged")

if PLACE.name == "interpret":
    make_fast()


def pytest_addoption(parser: pytest.Parser) -> None:
    proven.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    proven.register(config, PLACE.name)


def pytest_report_header() -> str:
    """Say how to draw again what this run draws."""
    return f"JAGGED_TEST_SEED={SEED} repeats what this run draws"


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Let half of the examples be drawn anew in every run."""
    test = pyfuncitem.obj
    if not hypothesis.is_hypothesis_test(test):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    run_in_halves(getattr(test, "__func__", test), lambda: test(**arguments))
    return True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Op tests follow the place they run in; `long` ones run only in `make test-long`."""
    for item in items:
        only_gpu = item.get_closest_marker("gpu")
        if "place" in getattr(item, "fixturenames", ()) and PLACE.name != "cpu" and not only_gpu:
            item.add_marker(PLACE.name)
        if only_gpu and PLACE.name != "gpu":
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
        if PLACE.name == "interpret" and item.name != COVERED_INTERPRETED:
            item.add_marker(pytest.mark.no_cover)
        if item.get_closest_marker("long") and not LONG:
            item.add_marker(pytest.mark.skip(reason="runs in make test-long"))
    # The longest tests begin first, so that no process is left alone with one.
    longest = (COVERED_INTERPRETED, *(LONGEST if PLACE.name == "gpu" else ()))
    items.sort(key=lambda item: getattr(item, "originalname", item.name) not in longest)
    # Mutants, which have a limit, meet what is quick first; files stay in the order in which they were named.
    if os.environ.get("JAGGED_TEST_DRAWN_LAST") == "1":
        files = list(dict.fromkeys(item.path for item in items))
        items.sort(key=lambda item: (files.index(item.path), hypothesis.is_hypothesis_test(getattr(item, "obj", None))))


def pytest_collection_finish() -> None:
    """Let no garbage collection walk what is imported by now, which stays: with all tests it takes most of a second a time."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def place() -> Place:
    """The device and the backend the op tests run on in this process."""
    return PLACE


@pytest.fixture(autouse=True)
def _fresh_memory_is_nan(request: pytest.FixtureRequest) -> object:
    """Fill every uninitialised tensor with NaN (integers with their largest value), so that an unwritten element is seen."""
    if "place" not in request.fixturenames:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    if PLACE.name == "gpu":
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(autouse=True)
def _gpu_memory_is_shared(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let one process at a time need much of a GPU's memory, and give back what it no longer needs: others run beside it."""
    if PLACE.name != "gpu" or "2_to_the_31" not in request.node.name:
        yield
        return
    with open(Path(tempfile.gettempdir(), "jagged-tests-of-large-tensors"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Leave values unchecked, which on a CPU are checked by default: what kernels make of wrong ones is to be seen."""
    from jagged.ops import trust_values

    with trust_values():
        yield
