"""One process, two processes and the padded twin end with the same weights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from jagged.training import TrainingError
from jagged.training.processes import process_group, resolve_device
from tests.processes import told_by
from tests.training.two_processes import steps_of

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = told_by("tests.training.two_processes", tmp_path_factory.mktemp("two"))
    return found


@pytest.mark.parametrize(
    "case",
    [
        "plain", "smoothed", "empty block", "drawn items", "in-batch items", "empty batch", "checkpoint", "output layer", "hstu",
    ],
)  # fmt: skip
def test_weights_after_four_steps_agree_with_one_process(result: dict[str, Any], case: str) -> None:
    # float64 but for the looked up rows, which are float32. Some gradients are zero but for the order of sums, some 1e-16 (the
    # attention's key biases, which a softmax does not see); AdamW divides them by its eps of 1e-8 and steps by a rate of 1e-2.
    # A real step is 1e-2.
    assert max(result["distances"][case].values()) < 1e-7, result["distances"][case]


def test_each_process_holds_its_rows_alone(result: dict[str, Any]) -> None:
    held = {name: [process.values() for process in processes] for name, processes in result["rows"].items()}
    counts = {name: [set(values) for values in processes] for name, processes in held.items()}
    assert counts == {"one": [{31}], "two": [{16}, {15}], "three": [{2}, {2}, {0}]}


def test_checkpoints_have_the_same_tensors_whatever_the_number_of_processes(result: dict[str, Any]) -> None:
    assert result["shapes agree"]


def test_a_whole_run_on_two_processes(result: dict[str, Any]) -> None:
    assert result["resumed"]
    assert result["output resumed"]
    assert result["sampled resumed"]
    assert result["shorter resumed"]
    assert result["steps"][0] == result["expected_steps"]
    for losses in ("losses", "sampled losses"):
        two, one = result[losses]
        assert two == pytest.approx(one, rel=1e-3), losses


def test_a_run_goes_on_with_any_number_of_processes(result: dict[str, Any]) -> None:
    whole, others = result["never stopped"], result["others"]
    assert [len(part) for part in others["kept"]] == [1, 2, 4, 1]
    # All of a step's users, in each of the steps.
    assert steps_of(others["kept"]) == steps_of(whole["kept"])
    for epoch in range(3):
        assert sorted(user for of, users in steps_of(others["kept"]) if of == epoch for user in users) == list(range(40))
    # Weights and moments are the checkpoint's, bit for bit.
    assert [part[0]["loaded"] for part in others["kept"]] == [[], [True], [True], [True]]
    for one, other in zip(whole["history"], others["history"], strict=True):
        assert [other[name] for name in ("epoch", "step", "learning_rate")] == [
            one[name] for name in ("epoch", "step", "learning_rate")
        ]
        # The sums of a step are in another order.
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-6)
        assert other["monitored"] == pytest.approx(one["monitored"], rel=1e-3)


def test_a_group_is_taken_down_by_who_made_it() -> None:
    assert not torch.distributed.is_initialized()
    with process_group(torch.device("cpu")) as outer:
        assert (outer.rank, outer.world_size, outer.is_first) == (0, 1, True)
        with process_group(torch.device("cpu")):
            pass
        assert torch.distributed.is_initialized()
        assert outer.sum([1.5, 2.0]) == [1.5, 2.0]
        assert outer.any(True)
        assert not outer.any(False)
    assert not torch.distributed.is_initialized()


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == torch.device("cpu")
    with pytest.raises(TrainingError, match="no usable GPU"):
        resolve_device("cuda")


IN_A_CHILD = """
import gc, os, sys

def allocates():
    # As Python's own threading does there, by chance enough for a collection.
    kept = [[] for _ in range(5_000)]

os.register_at_fork(after_in_child=allocates)
from jagged.training.processes import _take_care_of_garbage
_take_care_of_garbage()

class Group:
    def __del__(self):
        os.write(1, b"collected in the child" if os.getpid() != parent else b"collected in the parent")

parent = os.getpid()
gc.collect()
gc.disable()
group = Group()
group.itself = group
del group
if sys.argv[1] == "enabled":
    gc.set_threshold(100)
    gc.enable()
child = os.fork()
if not child:
    os._exit(3 if gc.isenabled() == (sys.argv[1] == "enabled") else 4)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
assert gc.isenabled() == (sys.argv[1] == "enabled")
gc.collect()
"""


@pytest.mark.parametrize("collector", ["enabled", "disabled"])
def test_what_a_run_left_is_not_collected_in_a_child(collector: str) -> None:
    """Nor in the middle of the fork, before what this library does there."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IN_A_CHILD, collector], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "collected in the parent"), done.stderr[-2_000:]
