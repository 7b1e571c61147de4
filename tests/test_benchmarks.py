"""The machinery of the operators' benchmark at sizes that cost nothing: what it measures is right, what is wrong gets no time."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import figures, jagged_ops, tables
from benchmarks.jagged_cases import CASES, Case, Workload
from benchmarks.jagged_ops import (
    Part,
    Size,
    check,
    measure,
    measure_on_cpu,
    measure_on_gpu,
    ours_failed,
    parts,
    run,
    time_on_host,
)


@pytest.fixture(scope="module")
def workload() -> Workload:
    workload = Workload.uniform(4, 5, 8, 2, torch.float32, "cpu")
    assert 0 < workload.total < workload.size * workload.longest
    return workload


@pytest.mark.parametrize("name", CASES)
def test_what_is_timed_is_right(name: str, workload: Workload) -> None:
    row, _, right = check(CASES[name](workload))
    assert {"jagged", "padded"} <= set(right), row
    assert row["jagged"] == row["padded"] == {}
    assert row["bytes_forward"] > 0 < row["bytes_backward"]
    assert row["padded_flops"] >= row["flops"]


def test_what_is_wrong_gets_no_time(workload: Workload) -> None:
    case = CASES["jagged_dense_mul [B, F]"](workload)
    row = measure_on_cpu(replace(case, ours=lambda x, y: case.ours(x, y) * 1.001), seconds=0)
    assert row["jagged"]["failed"].startswith("wrong: off by")
    assert row["padded"].keys() == {"forward", "forward_backward"}
    row = measure_on_cpu(replace(case, ours=lambda x, y: case.ours(x, y.detach() * 1.0 + 0 * y)), seconds=0)
    assert row["jagged"].keys() == {"forward", "backward"}
    assert row["jagged"]["backward"]["failed"].startswith("wrong: off by")
    assert ours_failed({"environment": {}, "table": {"by": {"fp32": {"mul": row}}}})[0].startswith("table fp32 mul: wrong")


def test_what_a_gpu_measures(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the GPU's clock and memory, which stand still here: what they are asked to measure runs."""

    def replay(function: Any = None, *, prepare: Any = None, cold: bool = False) -> dict[str, float]:
        (function or prepare())()
        return {"median": 4.0 if cold else 2.0}

    monkeypatch.setattr(jagged_ops, "replay_us", replay)
    monkeypatch.setattr(jagged_ops, "copy_us", lambda moved, cold: {"median": float(moved)})
    for name, answer in {"synchronize": None, "reset_peak_memory_stats": None, "memory_allocated": 0}.items():
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    case = CASES["jagged_split"](workload)
    needed = case.inputs[0].nbytes
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2 * needed)
    row = measure_on_gpu(case, copy_gb_per_s=1e-3 / 0.82, cold=True)
    assert not ours_failed({"table": {"by": {"fp32": {"jagged_split": row}}}})
    ours = row["jagged"]
    assert ours["peak_ratio_forward"] == 3 / 2
    # Inputs and gradients of the results; results and gradients of the inputs.
    assert ours["peak_ratio_both"] == 4 / 4
    ways = ("forward", "forward_cold", "backward", "backward_cold")
    assert [ours[way]["median"] for way in ways] == [2, 4, 2, 4]
    assert {row["copy"][way]["median"] for way in ways} == {row["bytes_forward"]} == {2 * needed}
    # A byte a microsecond.
    assert row["ideal_us"]["backward"] == pytest.approx(row["bytes_backward"])
    assert ours["gb_per_s"] == pytest.approx(row["bytes_forward"] / 2000)
    assert measure(case, time_on_host)["jagged"].keys() == {"forward", "forward_backward"}


def test_every_size_can_be_made_and_every_operator_has_a_page() -> None:
    assert {name.split()[0] for name in CASES} == {name for operators in tables.PAGES.values() for name in operators}
    for part in parts(["bf16", "fp32"]).values():
        assert set(part.cases) <= set(CASES)
        for size in part.sizes.values():
            assert 0 < int(size.workload("cpu").lengths.max()) <= (size.declared or size.longest)


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    """What a run on a GPU saves, with a slower peer, a faster one, one that is wrong and one that synchronises."""
    names = ("jagged_softmax", "jagged_dense_bmm")
    times = {"forward": 2.0, "backward": 3.0, "forward_cold": 4.0, "backward_cold": 5.0}

    def figures_of(factor: float, captured: bool = True) -> dict[str, Any]:
        found = {way: {"median": time * factor, "captured": captured} for way, time in times.items()}
        return {**found, "peak_bytes_forward": 8, "peak_ratio_forward": 1.004, "peak_ratio_both": 1.0}

    def measured(case: Case) -> dict[str, Any]:
        row, *_ = check(case)
        row |= {"jagged": figures_of(1.0), "padded": figures_of(9.0), "sll": figures_of(0.5, captured=False)}
        row |= {"fbgemm": {"failed": "wrong: off by 1, allowed 0.5"}, "copy": figures_of(0.25)}
        return {**row, "ideal_us": {"forward": 1.0, "backward": 2.0}}

    small = Size(4, 5, 8, 2, "fp32")
    facts = {"device": "NVIDIA Made-Up", "copy_gb_per_s": 1000.0, "torch": "2", "triton": "3", "fbgemm_gpu": None}
    found: dict[str, Any] = {"environment": facts}
    for title in ("table", "mean_length", "batch_size", "max_length"):
        key = "fp32" if title == "table" else "8"
        found[title] = run(title, Part("", {key: small}, names), "cpu", measured)
    found["cpu"] = run("cpu", Part("", {"fp32": small}, names), "cpu", partial(measure_on_cpu, seconds=0))
    # As figures and tables read it.
    saved: dict[str, Any] = json.loads(json.dumps(found))
    return saved


@pytest.mark.parametrize("name", figures.DRAWN["jagged_ops"])
def test_figures_are_drawn(name: str, result: dict[str, Any], tmp_path: Path) -> None:
    part, draw = figures.DRAWN["jagged_ops"][name]
    assert part in result
    draw(result, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_tables_say_where_a_peer_is_faster(result: dict[str, Any]) -> None:
    result = {title: part for title, part in result.items() if title != "cpu"}
    page = tables.page(result, ("jagged_softmax",))
    assert "jagged_dense_bmm" not in page
    assert "| `jagged_softmax` | fp32 | 2.0 / 3.0 | 18.0 / 27.0 | 1.0 (1) / 1.5 (1) | wrong (2) / wrong (2) | 0.5 / 0.8 |" in page
    assert f"1. {tables.EAGER}\n2. wrong: off by 1, allowed 0.5" in page
    assert "| `jagged_softmax` | fp32 | 2.00 | 1.50 | 1.004 | 1.000 | 1.004 |" in page
    assert "- `jagged_softmax`, fp32, backward, cold cache: 5.0 µs; FBGEMM `sll` 2.5 (2.00 times)" in page
    assert "- `jagged_softmax`, mean length 8, forward: 2.0 µs; FBGEMM `sll` 1.0 (2.00 times)" in page
    faster = copy.deepcopy(result)
    for part in list(faster.values())[1:]:
        for row in part["by"][next(iter(part["by"]))].values():
            row["sll"] = row["padded"]
    assert "No peer that is right takes less time" in tables.page(faster, ("jagged_softmax",))
