"""The sweep of embedding bags: what its summary says of made-up times, how it goes on, and tiny tables from end to end."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import embedding_sweep, figures, tables
from benchmarks.embedding_cases import METHODS, SHAPES, Batch, Ours, Workload, batch_of, check_rows, rows_before, zipf_ranks
from benchmarks.embedding_sweep import KINDS, NEIGHBOURS, Case, Tables, cases, lines, measure, missing, run, summary

EVERY = [(kind, method) for kind in KINDS for method in KINDS[kind]]


def made_up(case: Case, **times: dict[str, float]) -> dict[str, dict[str, Any]]:
    """A row with so many microseconds by kind and method; its bytes take 10 at 1,000 GB/s, its lookups are ten a sample."""
    figures_of = {kind: {method: {"median": us, "min": us, "max": us} for method, us in of.items()} for kind, of in times.items()}
    return {case.name: {**case._asdict(), "lookups": 10 * case.size, "bytes": {"forward": 10_000_000}, **figures_of}}


def at_once(prepare: Callable[[], Callable[[], Any]]) -> dict[str, Any]:
    """Run what would be timed."""
    prepare()()
    return {"median": 2.00049, "min": 1.0, "max": 3.0, "captured": True}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    bags = {"kind": "multi-hot", "mean": 3, "sd": 2, "max": 6, "coverage": 0.8}
    lines_of = [{**bags, "rows": 50, "dims": [4, 8]}, {"kind": "zipf", "max": 9, "coverage": 0.7, "rows": 7, "dims": [12]}]
    for shape in SHAPES:
        monkeypatch.setitem(SHAPES, shape, lines_of)


def test_cases() -> None:
    found = cases()
    assert len(found) == len({case.name for case in found}) == 8 * 2 * (14 + 3 * 4)
    few = [Case("A", "zipf", 8, 0), *(Case("A", "zipf", 64, seed) for seed in range(5))]
    assert cases(["A"], ["zipf"], [8, 64]) == few
    assert [case.name for case in cases(["A"], ["uniform"], [1, 1024])] == [
        "A, uniform, 1 sample, seed 0", "A, uniform, 1,024 samples, seed 0"
    ]  # fmt: skip


def test_ids_of_zipf(tiny: None) -> None:
    uniform = torch.linspace(0, 1, 10_001, dtype=torch.float64)
    ranks = zipf_ranks(uniform, 1000)
    assert (int(ranks[0]), int(ranks[-1])) == (0, 999)
    assert bool((ranks.diff() >= 0).all())
    # The share of the first: the integral from 1 to 2 of that from 1 to 1001.
    assert float((ranks == 0).double().mean()) == pytest.approx((1 - 2**-0.05) / (1 - 1001**-0.05), abs=2e-4)
    assert zipf_ranks(uniform, torch.full((10_001,), 1000)).equal(ranks)
    even, skewed = (batch_of("A", 400, zipf=zipf) for zipf in (False, True))
    assert even.offsets.equal(skewed.offsets)
    of_first = slice(0, int(even.offsets[400]))
    assert int(skewed.indices[of_first].max()) < 50
    counts = [torch.bincount(of.indices[of_first], minlength=50).sort(descending=True).values for of in (even, skewed)]
    assert counts[1][0] > 4 * counts[0][0]
    # In order of their frequency the rows do not follow each other.
    assert torch.bincount(skewed.indices[of_first], minlength=50).topk(3).indices.tolist() != [0, 1, 2]


def test_backward_is_held_to_its_median_its_worst_case_and_neighbours() -> None:
    def rows(worst: float, jump: float) -> dict[str, Any]:
        # Ten nanoseconds a lookup, but for two neighbours of Zipf's ids that lie on either side of it.
        found: dict[str, Any] = {}
        for distribution, size in itertools.product(("uniform", "zipf"), NEIGHBOURS):
            us = size / 10 * (jump if (distribution, size) == ("zipf", 544) else 1.0)
            found |= made_up(Case("A", distribution, size, 0), sgd={"jagged": us, "fbgemm": 2 * us})
        return found | made_up(Case("B", "uniform", 1, 0), sgd={"jagged": 10.0, "fbgemm": 10 * worst})

    of = summary(rows(1.1, 1.1))["sgd"]
    assert of["met"]
    assert (of["below"], of["jumps"]) == ({}, [])
    assert of["times_as_fast"]["all"] == {
        "median": 2.0, "worst": 1.1, "worst_case": "B, uniform, 1 sample, seed 0", "best": 2.0, "cases": 15
    }  # fmt: skip
    groups = ["all", "uniform", "zipf", "A", "A, uniform", "A, zipf", "B", "B, uniform"]
    assert list(of["times_as_fast"]) == groups
    assert of["times_as_fast"]["A, zipf"]["worst"] == 2.0
    assert of["changes"] == {
        "A, uniform": {"change": 0.0, "between": "448 and 480"}, "A, zipf": {"change": 0.1, "between": "512 and 544"}
    }  # fmt: skip
    slow = summary(rows(1.09, 1.0))["sgd"]
    assert (slow["met"], slow["below"]) == (False, {"B, uniform, 1 sample, seed 0": 1.09})
    # Down as up.
    for jump in (1.12, 1 / 1.12):
        of = summary(rows(1.1, jump))["sgd"]
        assert (of["met"], of["jumps"]) == (False, ["A, zipf"])
        assert of["changes"]["A, zipf"]["change"] == pytest.approx(0.12)
    assert any("12% in A, zipf" in said for said in lines(summary(rows(1.1, 1.12))))
    low = summary(made_up(Case("A", "zipf", 1, 0), rowwise_adagrad={"jagged": 2.0, "fbgemm": 2.9}))["rowwise_adagrad"]
    assert (low["met"], low["below"]) == (False, {})


def test_forward_is_held_to_more_where_the_better_version_is_far_from_a_copy() -> None:
    def of(ours: float, first: float, second: float) -> dict[str, Any]:
        rows = made_up(Case("A", "uniform", 1, 0), forward={"jagged": ours, "fbgemm": first, "fbgemm_v2": second})
        found: dict[str, Any] = summary(rows, copy=1000.0)["forward"]
        assert found["of_copy"]["all"] == pytest.approx(10 / min(first, second), rel=1e-3)
        return found

    # Bytes take 10: the better version is at 62.5 % of copy speed, then at 80 %.
    (below,) = of(14.0, 30.0, 16.0)["below"].values()
    assert below == {"ratio": 1.143, "asked": 1.2, "of_copy": 0.625}
    assert of(13.3, 30.0, 16.0)["met"]
    assert of(12.5, 12.5, 16.0)["met"]
    (below,) = of(12.6, 12.5, 16.0)["below"].values()
    assert below == {"ratio": 0.9921, "asked": 1.0, "of_copy": 0.8}
    # Without one of the versions it is the other; without both, or ours, nothing is said.
    case = Case("A", "uniform", 1, 0)
    assert summary(made_up(case, forward={"jagged": 1.0, "fbgemm_v2": 3.0}))["forward"]["times_as_fast"]["all"]["median"] == 3.0
    assert summary(made_up(case, forward={"jagged": 1.0})) == {}
    assert summary({case.name: made_up(case)[case.name] | {"forward": {"jagged": {"failed": "no"}}}}) == {}


def test_times_at_512_are_held_to_on_all_seeds() -> None:
    def of(*times: float, distribution: str = "uniform") -> dict[str, Any]:
        rows: dict[str, Any] = {}
        for seed, us in enumerate(times):
            rows |= made_up(Case("B", distribution, 512, seed), sgd={"jagged": us})
        found: dict[str, Any] = summary(rows)["512 samples"]
        return found[f"B, {distribution}"]  # type: ignore[no-any-return]

    assert of(240.0, 246.0, 230.0) == {"median": 0.24, "min": 0.23, "max": 0.246, "seeds": 3, "asked": 0.246, "met": True}
    assert not of(240.0, 246.1)["met"]
    assert of(300.0, distribution="zipf") == {"median": 0.3, "min": 0.3, "max": 0.3, "seeds": 1}


def test_the_page_has_medians_and_the_worst_case_by_shape_and_ids() -> None:
    rows: dict[str, Any] = {}
    for (shape, distribution), ratios in {("A", "uniform"): (2, 3, 4), ("A", "zipf"): (0.5, 2), ("B", "zipf"): (8,)}.items():
        for ratio, size in zip(ratios, (448, 480, 512), strict=False):
            us = float(size)
            times = {"jagged": us, "fbgemm": ratio * us}
            rows |= made_up(Case(shape, distribution, size, 0), forward=times | {"fbgemm_v2": 10 * us}, sgd=times)
    facts = {"device": "NVIDIA Made-Up", "copy_gb_per_s": 1000.0, "torch": "2.11", "triton": "3.6", "fbgemm_gpu": "1.6"}
    page = tables.sweep_page({"environment": facts, "summary": summary(rows), "cases": rows})
    ratios_of = ["3.00 (2.00) | 2.00 (0.50)", "3.00 (2.00) | 1.25 (0.50)", " | 8.00 (8.00)"]
    assert [line for line in page.splitlines() if line.startswith("|")] == [
        "| | forward, uniform | forward, Zipf | backward with SGD, uniform | backward with SGD, Zipf |",
        "|---|---:|---:|---:|---:|",
        f"| all | {ratios_of[0]} | {ratios_of[0]} |",
        f"| A | {ratios_of[1]} | {ratios_of[1]} |",
        f"| B | {ratios_of[2]} | {ratios_of[2]} |",
    ]
    worst = "forward 0.50 (A, zipf, 448 samples, seed 0); backward with SGD 0.50 (A, zipf, 448 samples, seed 0)"
    assert f"The worst of all: {worst}." in page
    assert "from 448 to 640 samples by 32, the time of a lookup changes by 0.0% at most" in page


def test_a_run_that_stopped_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[tuple[str, list[tuple[str, str]]]] = []

    def measure(case: Case, tables: Any, pairs: list[tuple[str, str]], time_it: Any) -> dict[str, Any]:
        measured.append((case.name, pairs))
        row: dict[str, Any] = {**case._asdict(), "lookups": 1}
        for kind, method in pairs:
            row.setdefault(kind, {})[method] = (
                {"failed": "no"} if (method, len(measured)) == ("fbgemm_v2", 1) else {"median": 1.0}
            )
        return row

    made: list[str] = []

    def tables(shape: str, most: int, device: str) -> list[str]:
        made.append(shape)
        return made

    monkeypatch.setattr(embedding_sweep, "measure", measure)
    monkeypatch.setattr(embedding_sweep, "Tables", tables)
    chosen = cases(["A", "B"], ["uniform"], [1, 8])
    rows: dict[str, Any] = {}
    assert run(chosen, EVERY, rows, "cpu", at_once, seconds=0) == 4
    assert (measured, made) == ([], [])
    # The clock is read once for the run and three times a case.
    monkeypatch.setattr(embedding_sweep, "time", SimpleNamespace(perf_counter=itertools.count().__next__))
    kept: list[int] = []
    assert run(chosen, EVERY, rows, "cpu", at_once, seconds=4, keep=lambda: kept.append(len(rows))) == 3
    assert (kept, made) == ([1], ["A"])
    assert run(chosen, EVERY, rows, "cpu", at_once) == 0
    names = [case.name for case in chosen]
    # What failed is tried again, alone.
    assert measured == [(names[0], EVERY), (names[0], [("forward", "fbgemm_v2")]), *((name, EVERY) for name in names[1:])]
    assert made == ["A", "A", "B"]
    assert run(chosen, EVERY, rows, "cpu", at_once) == 0
    assert len(measured) == 5
    # Again, without a method: what it gave stays.
    rows[names[0]]["sgd"]["fbgemm"]["median"] = 7.0
    few = [pair for pair in EVERY if pair[1] != "fbgemm"]
    assert run(chosen[:1], few, rows, "cpu", at_once, again=True) == 0
    assert measured[-1] == (names[0], few)
    assert rows[names[0]]["sgd"] == {"jagged": {"median": 1.0}, "fbgemm": {"median": 7.0}}
    assert missing({}, few) == few


class Spoilt(Ours):
    """Ours, with an output that is not right."""

    def forward(self, batch: Batch) -> torch.Tensor:
        return 1.001 * super().forward(batch)


def test_a_case_is_checked_on_tables_that_all_methods_update(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = Tables("A", 7, "cpu")
    row = measure(Case("A", "zipf", 7, 1), tables, EVERY, at_once)
    assert [(kind, method) for kind in KINDS for method in row[kind]] == EVERY
    assert all(row[kind][method] == {"median": 2.0, "min": 1.0, "max": 3.0} for kind, method in EVERY)
    assert row["lookups"] == int(tables.workload.batches[0].offsets[-1])
    assert row["bytes"].keys() == set(KINDS)
    for method in ("jagged", "fbgemm"):
        lookup = tables.lookup(method, "sgd")
        assert lookup is tables.lookup(method, "sgd")
        assert lookup.table(1).data_ptr() == tables.workload.table(tables.workload.weights, 1).data_ptr()
    monkeypatch.setitem(METHODS, "fbgemm_v2", METHODS["fbgemm_v2"]._replace(make=Spoilt))
    row = measure(
        Case("A", "uniform", 5, 0), Tables("A", 5, "cpu"), EVERY, lambda prepare: at_once(prepare) | {"captured": False}
    )
    assert row["forward"]["fbgemm_v2"]["failed"].startswith("wrong: output of feature")
    assert row["sgd"]["jagged"] == {"median": 2.0, "min": 1.0, "max": 3.0, "captured": False}


def test_updates_of_rows_that_many_lookups_read_are_right(tiny: None) -> None:
    """Sums of thousands of gradients, whose error is that of Adagrad's step, on a row that was near zero."""
    w = Workload("A", [], "cpu", shared=True)
    w.weights.mul_(1e-3)
    w.sizes, w.batches = [4096], [batch_of("A", 4096, zipf=True)]
    lookup, grad = Ours(w, "rowwise_adagrad"), w.gradient(4096)
    before = rows_before(w)
    lookup.backward(lookup.forward(w.batches[0]), grad)
    assert check_rows(w, grad, "rowwise_adagrad", lookup.table, before) < 1e-6
    with pytest.raises(ArithmeticError, match="rows of feature"):
        check_rows(w, grad, "rowwise_adagrad", lookup.table)


def test_a_sweep_of_tiny_tables(tiny: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    """By the command line: tried on a CPU, and on what is taken for a GPU, where its results are saved and drawn."""
    monkeypatch.setattr("benchmarks.common.ROOT", tmp_path)
    monkeypatch.setattr(embedding_sweep, "ROOT", tmp_path)

    def sweep(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["embedding_sweep", *arguments])
        embedding_sweep.main()

    sweep("--device", "cpu")
    assert "0 of 2 cases are left" in capsys.readouterr().out
    assert not [*tmp_path.iterdir()]
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit):
            sweep()
    facts = {"device": "NVIDIA Made-Up", "copy_gb_per_s": 1000.0, "bf16_matmul_tflops": 700.0}
    of_gpu = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: True, empty_cache=lambda: None))
    monkeypatch.setattr(embedding_sweep, "torch", of_gpu)
    monkeypatch.setattr(embedding_sweep, "environment", lambda device: facts)
    monkeypatch.setattr(embedding_sweep, "seconds_of", lambda call: (0.0, call()))
    monkeypatch.setattr("benchmarks.embedding_bags.seconds_of", lambda call: (0.0, call()))
    monkeypatch.setattr(embedding_sweep, "time_on_gpu", at_once)
    monkeypatch.setattr(embedding_sweep, "PAUSE", 0.0)
    on_cpu = embedding_sweep.Tables
    monkeypatch.setattr(embedding_sweep, "Tables", lambda shape, most, device: on_cpu(shape, most, "cpu"))

    def saved(*arguments: str) -> dict[str, Any]:
        sweep(*arguments)
        result: dict[str, Any] = json.loads((tmp_path / "results/made-up/embedding_sweep.json").read_text())
        return result

    first = saved("--shapes", "B", "--sizes", "1", "8", "--without", "fbgemm_v2")
    assert list(first) == ["environment", "summary", "cases"]
    assert list(first["cases"]) == [case.name for case in cases(["B"], sizes=(1, 8))]
    assert first["summary"]["sgd"]["times_as_fast"]["all"]["cases"] == 4
    assert not first["summary"]["sgd"]["met"]
    second = saved("--shapes", "A", "B", "--sizes", "8", "--distributions", "zipf")
    names = [*(case.name for case in cases(["A"], ["zipf"], (8,))), *first["cases"]]
    assert list(second["cases"]) == names
    assert second["cases"][names[-1]]["forward"].keys() == {"jagged", "fbgemm", "fbgemm_v2"}
    assert second["cases"][names[1]] == first["cases"][names[1]]
    (draw,) = (draw for part, draw in figures.DRAWN["embedding_sweep"].values() if part in second)
    draw(second, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    monkeypatch.setitem(METHODS, "jagged", METHODS["jagged"]._replace(make=Spoilt))
    with pytest.raises(SystemExit, match="jagged failed"):
        saved("--shapes", "A", "--sizes", "1", "--kinds", "forward")
