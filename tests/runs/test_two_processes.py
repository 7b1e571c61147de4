"""Two processes train on a table as one does, and end together where it cannot be read."""

from __future__ import annotations

from typing import Any

import pytest

from tests.processes import told_by


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = told_by("tests.runs.two_processes", tmp_path_factory.mktemp("processes"))
    return found


@pytest.mark.parametrize("runs", ["metrics", "thinned"])
def test_two_processes_reach_what_one_does(told: dict[str, Any], runs: str) -> None:
    assert told["apart"] < 1e-3
    one, two = told[runs]
    for task in ("click", "buy"):
        for name, value in one["test"][task].items():
            assert two["test"][task][name] == (value if value is None else pytest.approx(value, abs=1e-3)), (task, name)
    assert told["datasets"] == ["checkpoints", "dataset"]


def test_two_processes_begin_with_what_another_run_has_learnt(told: dict[str, Any]) -> None:
    assert max(told["begun"]) < 1e-3
    assert told["moved"] > 0.02


def test_both_hear_of_a_table_that_is_not_there(told: dict[str, Any]) -> None:
    first, second = told["refused"]
    assert first == second
    assert "ROOT/nothing.csv" in first


def test_a_finished_run_goes_on_to_nothing(told: dict[str, Any]) -> None:
    assert told["unchanged"]
