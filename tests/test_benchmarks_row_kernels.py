"""Benchmarks of kernels over many rows: their cases, and what a run on a CPU says."""

from __future__ import annotations

import json
import sys
from types import ModuleType

import pytest

from benchmarks import layer_norm, linear
from benchmarks.common import ROOT

MODULES = {"linear": linear, "layer_norm": layer_norm}


@pytest.mark.parametrize("name", MODULES)
def test_results_have_all_cases(name: str) -> None:
    """In their order, each with both ways and how often PyTorch takes our time."""
    found = json.loads((ROOT / "results" / "h200" / f"{name}.json").read_text())["cases"]
    assert list(found) == list(MODULES[name].cases(True))
    for row in found.values():
        assert row["times"].keys() >= {"forward", "both"}
        for of, times in row["times"].items():
            assert times == row["torch"][of]["median"] / row["jagged"][of]["median"]


@pytest.mark.parametrize("name", MODULES)
def test_a_run_on_a_cpu_saves_nothing(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    module: ModuleType = MODULES[name]
    monkeypatch.setattr("benchmarks.row_kernels.save", lambda *_: pytest.fail("a CPU's times are nobody's"))
    monkeypatch.setattr(sys, "argv", [name, "--device", "cpu"])
    module.main()
    said = capsys.readouterr().out.splitlines()
    assert [line.split(": forward ")[0] for line in said] == list(module.cases(False))
    assert all(line.endswith(" us") == (name == "linear") for line in said)
