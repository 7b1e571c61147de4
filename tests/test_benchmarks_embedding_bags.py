"""The benchmark of embedding bags at sizes that cost nothing: what is timed is right, what is wrong gets no time.

FBGEMM and TorchRec run on the CPU as they would on a GPU.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import embedding_bags, embedding_cases, embedding_kernels, embedding_models, embedding_plans, figures, tables
from benchmarks.embedding_bags import KERNELS, MODULES, Case, Part, cpu_parts, measure, ours_failed, parts, run, summary
from benchmarks.embedding_cases import METHODS, SHAPES, Batch, Ours, Workload, check_output, check_rows, query_sizes, traffic
from benchmarks.embedding_models import COLLECTIONS
from benchmarks.embedding_plans import PLANS
from jagged.ops import BagLayout
from jagged.tuning import Trial


def at_once(prepare: Callable[[], Callable[[], Any]]) -> dict[str, Any]:
    """Run what would be timed."""
    prepare()()
    return {"median": 2.0, "min": 1.0, "max": 3.0, "captured": True}


def made_up(trials: Sequence[Trial], repeats: int) -> list[list[float]]:
    """Times of a clock for which every schedule of a plan is faster than none."""
    return [[100.0 - sum(code >= 0 for code in trial.codes)] * repeats for trial in trials]


def small(case: Case) -> Case:
    """A case of the same kind that costs nothing."""
    return replace(case, sizes=tuple(min(size, 7) for size in case.sizes[:6]))


def tiny(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Two features of each of the first lines, with few rows and short bags."""
    shorter = {"mean": 3, "sd": 2, "max": 6}
    return [
        {**line, "dims": line["dims"][:2], "rows": min(line["rows"], 50)}
        | {key: min(line[key], 4) for key in ("pooling",) if key in line}
        | {key: value for key, value in shorter.items() if key in line}
        for line in lines[:4]
    ]


@pytest.fixture(autouse=True)
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding_models, "SECONDS", 0)
    monkeypatch.setattr(embedding_models, "LEAST", 1)
    monkeypatch.setattr(embedding_plans, "TIMER", made_up)
    for shape, lines in list(SHAPES.items()):
        monkeypatch.setitem(SHAPES, shape, tiny(lines))


@pytest.mark.parametrize("title", [*parts(), *cpu_parts()])
def test_every_case_is_checked_and_timed(title: str) -> None:
    for case in map(small, {**parts(), **cpu_parts()}[title].values()):
        row = measure(case, "cpu", at_once, copy=1000.0)
        for method in case.methods:
            if (method, case.kind) == ("fbgemm", "adam"):
                # Not on a CPU.
                assert "adam" in row[method]["failed"]
                continue
            assert "failed" not in row[method], row[method]
            ways = [way for way in case.ways if title in ("host", "model", "tuning") or way in METHODS[method].ways]
            assert row[method].keys() >= {"errors", *ways}
            assert row[method]["errors"]["output"] < 1e-6
            assert ("rows" in row[method]["errors"]) == (bool({"backward", "both"} & {*ways}) and title != "queries")
        json.dumps(row)


def test_plans_are_tuned_and_followed() -> None:
    row = measure(small(parts()["tuning"]["D"]), "cpu", at_once)
    features = row["features"]
    for name in ("jagged", "alone"):
        assert row[name]["planned_features"] == features
        assert row[name]["tune_seconds"] > 0
    assert "planned_features" not in row["cost_model"]
    w = Workload("D", [2], "cpu")
    schedules = [PLANS[name].make(w, None).schedules for name in PLANS]  # type: ignore[attr-defined]
    assert [of is not None and bool((of.codes >= 0).all()) for of in schedules] == [True, True, False]


def test_cases_and_asked_numbers() -> None:
    found = parts()
    assert set(found) == {"models", "sizes", "queries", "mlperf", "mixed", "many", "optimizers", "host", "model", "tuning"}
    assert found["models"]["A"].asked == {"forward": 0.26, "backward": 0.95}
    assert {case.sizes for case in found["sizes"].values()} == {(1,), (8,), (64,), (2560,)}
    methods = {name for part in found.values() for case in part.values() for name in case.methods}
    assert methods == {*KERNELS, "fbgemm_checked", *MODULES, *PLANS}
    assert {case.shape for part in found.values() for case in part.values()} == set(SHAPES) - {"production"}
    assert found["host"]["A, 8 samples"].asked == {"host": 0.150}
    assert {ratio.times for ratio in embedding_bags.RATIOS["model"]} == {1.85, 1.5}


def test_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    layouts = {shape: embedding_cases.layout_of(shape) for shape in SHAPES}
    assert [layouts[name].num_features for name in "ABCDE"] == [1000, 1200, 800, 1000, 1000]
    assert layouts["D x 10"].num_features == 10_000
    mlperf, mixed, production = (layouts[name] for name in ("mlperf", "mixed", "production"))
    assert (mlperf.num_features, max(mlperf.rows), {*mlperf.widths}) == (26, 10_000_000, {64})
    assert sum(line["pooling"] for line in SHAPES["mlperf"]) == 214
    assert (mixed.num_features, min(mixed.widths), max(mixed.widths)) == (66, 4, 128)
    assert (production.num_features, min(production.widths), max(production.widths)) == (200, 8, 256)
    assert (min(production.rows), max(production.rows)) == (1000, 5_000_000)
    assert production.num_elements * 4 == pytest.approx(44e9, rel=0.03)
    # FBGEMM takes no other widths.
    assert not any(width % 4 for layout in layouts.values() for width in layout.widths)


def test_sizes_of_queries() -> None:
    sizes = query_sizes()
    assert len(sizes) == 128
    assert sizes.count(512) == 49
    assert sum(size <= 8 for size in sizes) == 32
    assert {*range(9)} < {*sizes}
    assert sizes != sorted(sizes)


def test_bytes() -> None:
    w = Workload("A", [3], "cpu")
    w.layout = BagLayout(rows=(5, 4), widths=(4, 8))
    indices, offsets = torch.tensor([4, 4, 0, 3, 3], dtype=torch.int32), torch.tensor([0, 2, 3, 3, 4, 4, 5], dtype=torch.int32)
    w.batches = [Batch(indices, offsets)]
    rows, output, ids = 4 * (2 * 4 + 8), 4 * 3 * 12, 4 * (5 + 7)
    gathered = 4 * (3 * 4 + 2 * 8)
    assert traffic(w, "sgd") == {
        "forward": {"once": rows + output + ids, "gathered": gathered},
        "backward": {"once": 2 * rows + output + ids, "gathered": gathered},
    }
    assert traffic(w, "adam")["backward"]["once"] == 6 * rows + output + ids
    assert traffic(w, "rowwise_adagrad")["backward"]["once"] == 2 * (rows + 3 * 4) + output + ids
    # A batch after the other, and one of nothing.
    once, several = traffic(w, "sgd")["forward"], Workload("A", [3, 0, 3], "cpu")
    several.layout, several.batches = w.layout, [w.batches[0], Batch(indices[:0], offsets[:1]), w.batches[0]]
    assert traffic(several, "sgd")["forward"] == {name: 2 * number for name, number in once.items()}
    row = measure(small(parts()["models"]["A"]), "cpu", at_once, copy=1000.0)
    forward = row["jagged"]["forward"]
    # Bytes in a nanosecond over a thousand, of two microseconds.
    assert forward["of_limit"] == pytest.approx(row["bytes"]["forward"]["once"] / 1e6 / 2)
    assert forward["gathered_gb_per_s"] == pytest.approx(row["bytes"]["forward"]["gathered"] / 2e3)


class Spoilt(Ours):
    """Ours, with an output or an update that is not right."""

    output, update = 1.0, 0.0

    def forward(self, batch: Batch) -> Tensor:
        found = super().forward(batch)
        return found + (self.output - 1.0) * found.detach()

    def backward(self, output: Tensor, grad: Tensor) -> Any:
        super().backward(output, grad)
        with torch.no_grad():
            self.weights += self.update


@pytest.mark.parametrize(("name", "value", "what"), [("output", 1.001, "output of"), ("update", 0.001, "rows of"),
                                                     ("output", float("nan"), "output of")])  # fmt: skip
def test_what_is_wrong_gets_no_time(name: str, value: float, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Spoilt, name, value)
    case = Case("A", (7,), ("jagged", "fbgemm"))
    monkeypatch.setitem(METHODS, "fbgemm", METHODS["fbgemm"]._replace(make=Spoilt))
    row = measure(case, "cpu", at_once)
    # A right forward pass keeps its time beside a wrong update.
    assert ("forward" in row["fbgemm"], "backward" in row["fbgemm"]) == (name == "update", False)
    assert row["fbgemm"]["failed"].startswith(f"wrong: {what}")
    assert row["jagged"].keys() >= {"forward", "backward"}
    monkeypatch.setitem(METHODS, "jagged", METHODS["jagged"]._replace(make=Spoilt))
    row = measure(case, "cpu", at_once)
    assert ours_failed({"environment": {}, "models": {"rows": {"A": row}}})[0].startswith(f"models, A: wrong: {what}")
    if name == "output":
        row = measure(replace(case, sizes=(0, 7, 3), ways=("forward",)), "cpu", at_once)
        assert row["jagged"]["failed"].startswith("wrong: output of")


def test_what_the_sample_does_not_see_is_compared_with_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere(Ours):
        def forward(self, batch: Batch) -> Tensor:
            found = super().forward(batch)
            found.data[5] += 1.0
            return found

    monkeypatch.setattr(embedding_cases, "CHECKED_BAGS", 2)
    monkeypatch.setitem(METHODS, "fbgemm", METHODS["fbgemm"]._replace(make=Elsewhere))
    row = measure(Case("D", (7,), ("jagged", "fbgemm")), "cpu", at_once)
    assert row["fbgemm"]["failed"].startswith("wrong: differs from ours by")
    w = Workload("D", [7], "cpu")
    with pytest.raises(ArithmeticError, match=r"shape \[7, 3\] in place of"):
        check_output(w, torch.zeros(7, 3))


@pytest.mark.parametrize("kind", ["rowwise_adagrad", "adam"])
def test_updates_of_another_optimizer_are_found(kind: Any) -> None:
    w = Workload("C", [7], "cpu")
    lookup, grad = Ours(w, "sgd"), w.gradient(7)
    lookup.backward(lookup.forward(w.batches[0]), grad)
    assert check_rows(w, grad, "sgd", lookup.table) < 1e-6
    with pytest.raises(ArithmeticError, match="rows of feature"):
        check_rows(w, grad, kind, lookup.table)


def test_peers_that_fail_have_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fbgemm_gpu.split_embedding_configs", None)

    def fails(w: Workload, kind: Any) -> Any:
        raise RuntimeError("first line\nsecond")

    monkeypatch.setitem(METHODS, "fbgemm_v2", METHODS["fbgemm_v2"]._replace(make=fails))
    row = measure(small(parts()["models"]["A"]), "cpu", at_once)
    assert row["fbgemm"] == {"failed": "fbgemm_gpu.split_embedding_configs is not installed"}
    assert row["fbgemm_v2"] == {"failed": "RuntimeError: first line"}
    row = measure(Case("A", (7,), ("jagged", "per_table")), "cpu", at_once)
    assert row["per_table"]["failed"].startswith("NotImplementedError: an update")


def test_collections_that_are_wrong_get_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Another(nn.Module):
        def __init__(self, w: Workload) -> None:
            super().__init__()
            self.inner = COLLECTIONS["jagged"](w)
            self.embedding_bags = self.inner.embedding_bags
            self.calls = 0

        def forward(self, features: Any) -> Any:
            found = self.inner(features)
            self.calls += 1
            # What is checked first is right.
            return found if self.calls == 1 else Doubled(found.values())

    class Doubled:
        def __init__(self, values: Tensor) -> None:
            self.of = 2 * values

        def values(self) -> Tensor:
            return self.of

    monkeypatch.setitem(COLLECTIONS, "torchrec", Another)
    row = measure(Case("D", (7,), ("jagged", "torchrec"), ("forward", "step")), "cpu", at_once)
    assert row["torchrec"]["failed"].startswith("wrong: output differs from ours by")
    assert row["jagged"].keys() == {"errors", "difference", "forward", "step"}
    precision = torch.get_float32_matmul_precision()
    assert precision == "highest"


def test_how_a_gpu_and_modules_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding_bags, "replay_us", lambda prepare, sustained: {"median": prepare()(), "for": sustained})
    assert embedding_bags.time_on_gpu(lambda: lambda: 5.0, 2.0) == {"median": 5.0, "for": 2.0}
    calls: list[int] = []
    w = Workload("D", [2], "cpu")
    monkeypatch.setattr(embedding_models, "LEAST", 3)
    assert embedding_models.host_us(lambda: calls.append(0), w)["median"] > 0
    assert len(calls) == 3 + 3
    calls.clear()
    monkeypatch.setattr(embedding_models, "seconds_of", lambda call: (call(), (0.004, None))[1])
    # Five calls each, of 4 milliseconds together.
    assert embedding_models.wall_us(lambda: calls.append(0))["median"] == pytest.approx(800)
    assert len(calls) == 2 + 3 * 5


def test_how_many_times_as_fast() -> None:
    def of(microseconds: float) -> dict[str, Any]:
        return {"forward": {"median": microseconds}}

    rows: dict[str, Any] = {
        "a": {"group": "g", "jagged": of(2.0), "fbgemm": of(8.0), "fbgemm_v2": of(3.0)},
        "b": {"group": "g", "jagged": of(2.0), "fbgemm": of(4.0), "fbgemm_v2": {"failed": "no"}},
        "c": {"group": "", "jagged": {"failed": "no"}, "fbgemm": of(4.0)},
    }
    found = summary(rows)
    assert found["cases"]["a"] == {"forward": {"fbgemm": 4.0, "fbgemm_v2": 1.5, "better": 1.5}}
    assert found["cases"].keys() == {"a", "b"}
    assert found["means"] == {"g": {"forward": {"fbgemm": 3.0, "fbgemm_v2": 1.5, "better": 1.75}}}


def test_cases_that_are_chosen_join_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A run by its command line: of all cases, of some of them, and without a method."""
    monkeypatch.setattr("benchmarks.common.ROOT", tmp_path)
    monkeypatch.setattr(embedding_bags, "ROOT", tmp_path)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    few = {name: small(case) for name, case in list(cpu_parts()["cpu"].items())[:2]}
    monkeypatch.setattr(embedding_bags, "cpu_parts", lambda: {"cpu": few})

    def saved(*arguments: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["embedding_bags", "--device", "cpu", "--seconds", "0", *arguments])
        embedding_bags.main()
        (path,) = tmp_path.glob("results/*/embedding_bags.json")
        result: dict[str, Any] = json.loads(path.read_text())
        return result

    first = saved()
    a, b = few
    assert list(first["cpu"]["rows"]) == [a, b]
    second = saved("--cases", "B, 32")
    assert second["cpu"]["rows"][a] == first["cpu"]["rows"][a]
    assert second["cpu"]["rows"][b] != first["cpu"]["rows"][b]
    assert list(second["cpu"]["rows"]) == [a, b]
    third = saved("--without", "per_table")
    assert third["cpu"]["rows"][a]["per_table"] == second["cpu"]["rows"][a]["per_table"]
    assert third["cpu"]["rows"][a]["jagged"] != second["cpu"]["rows"][a]["jagged"]
    for wrong in (("--cases", "no such case"), ("--only", "models")):
        with pytest.raises(SystemExit):
            saved(*wrong)
    page = tables.embedding_page(first)
    assert f"| {a} | forward and backward |" in page
    assert "times as fast as PyTorch, table by table: " in page


def test_times_on_a_cpu_are_taken_in_turns() -> None:
    called: list[str] = []
    turns = embedding_bags.InTurns(0.0)
    # A way of two methods, and another one of both.
    all_figures = [turns.later(lambda name=name: lambda: called.append(name)) for name in "aAbB"]
    # Nothing is timed before all are there.
    assert (called, all_figures) == ([], [{}] * 4)
    turns.take(2)
    assert called == list("ab" * 4 + "AB" * 4), "a first call that is left out, and three"
    assert all(0 < of["min"] <= of["median"] <= of["max"] for of in all_figures)
    turns.take(2)
    assert len(called) == 16, "what was taken is not timed again"


def test_fbgemm_checks_ids_where_its_name_says_so() -> None:
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode

    w = Workload("D", [3], "cpu")
    modes = {
        name: BoundsCheckMode(METHODS[name].make(w, "sgd").tables.bounds_check_mode_int).name  # type: ignore[attr-defined]
        for name in ("fbgemm", "fbgemm_checked")
    }
    assert modes == {"fbgemm": "NONE", "fbgemm_checked": "WARNING"}


def test_a_run_that_is_cut_off_leaves_what_it_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut_off(w: Workload, kind: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setitem(METHODS, "fbgemm_v2", METHODS["fbgemm_v2"]._replace(make=cut_off))
    left: list[dict[str, Any]] = []
    part = {"A": small(parts()["models"]["A"])}
    with pytest.raises(KeyboardInterrupt):
        run("models", part, "cpu", at_once, None, {}, lambda result: left.append(json.loads(json.dumps(result))))
    assert "backward" in left[-1]["rows"]["A"]["fbgemm"]


@pytest.fixture(scope="module")
def result() -> Iterator[dict[str, Any]]:
    """What a run on a GPU saves: a peer that is slower, one that is faster, one that fails."""
    facts = {"device": "NVIDIA Made-Up", "copy_gb_per_s": 1000.0, "bf16_matmul_tflops": 700.0, "processor": ""}
    found: dict[str, Any] = {"environment": facts | {"torch": "2", "triton": "3", "fbgemm_gpu": "1", "torchrec": "1"}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embedding_models, "SECONDS", 0)
        patch.setattr(embedding_models, "LEAST", 1)
        for shape, lines in list(SHAPES.items()):
            patch.setitem(SHAPES, shape, tiny(lines))
        patch.setattr(embedding_plans, "TIMER", made_up)
        for title, part in parts().items():
            chosen: Part = {name: small(case) for name, case in part.items()}
            found[title] = run(title, chosen, "cpu", at_once, copy=1000.0)
            for row in found[title]["rows"].values():
                if title not in ("optimizers", "host", "model", "tuning"):
                    row["fbgemm"] = row["jagged"]
    rows = found["models"]["rows"]
    rows["A"]["fbgemm"] = {**rows["A"]["fbgemm"], "forward": {**rows["A"]["jagged"]["forward"], "median": 8.0}}
    rows["B"]["fbgemm_v2"] = {"failed": "RuntimeError: no | kernel"}
    rows["C"]["fbgemm_v2"]["forward"]["median"] = 1.0
    rows["C"]["fbgemm_v2"]["forward"]["captured"] = False
    for of in found["model"]["rows"].values():
        for who in MODULES[:2]:
            of[who]["forward"]["median"] = 2.0 if who == "jagged" else 4.0
    for title in parts():
        found[title]["summary"] = summary(found[title]["rows"])
    saved: dict[str, Any] = json.loads(json.dumps(found))
    return saved


@pytest.mark.parametrize("name", figures.DRAWN["embedding_bags"])
def test_figures_are_drawn(name: str, result: dict[str, Any], tmp_path: Path) -> None:
    part, draw = figures.DRAWN["embedding_bags"][name]
    assert part in result
    draw(result, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_no_figure_of_a_model_that_was_not_measured(result: dict[str, Any], tmp_path: Path) -> None:
    figures.embedding_bags_model("A", {**result, "models": {"rows": {}}}, tmp_path / "figure.png")
    assert not (tmp_path / "figure.png").exists()


def test_a_plan_without_features_counts_as_none(result: dict[str, Any]) -> None:
    found = copy.deepcopy(result)
    found["environment"]["bf16_matmul_tflops"] = 1.0
    for name, row in found["tuning"]["rows"].items():
        for who, took in (("jagged", 100.0), ("alone", 103.0), ("cost_model", 102.0 if name == "B" else 99.0)):
            row[who]["forward"] |= {"median": took, "of_limit": 1.0, "gathered_gb_per_s": 1.0}
        row["jagged"]["planned_features"] = 0 if name == "B" else 2
    found["tuning"]["summary"] = summary(found["tuning"]["rows"])
    lines = tables.embedding_page(found).splitlines()
    assert "- forward, times as fast as jagged, each class tuned alone: 1.03 to 1.03 in 4 cases." in lines
    assert (
        "Speed that a tuned plan adds to calls without a plan, one seed a model: A -1.0%, C -1.0%, D -1.0%, E -1.0%. For B no "
        "schedule was faster: its plan is none, and two timings of the same calls differ by 2.0%."
    ) in lines
    for row in found["tuning"]["rows"].values():
        row["jagged"]["planned_features"] = 0
    assert "one seed a model: none has one. For A no schedule" in tables.embedding_page(found)
    # Nothing is asked of a plan against none.
    assert [ratio.who for ratio in embedding_bags.RATIOS["tuning"]] == ["alone"]


def test_tables(result: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = tables.embedding_page(result)
    rows = result["models"]["rows"]
    of = rows["A"]["jagged"]["forward"]
    cell = f"({of['of_limit']:.0%}, {of['gathered_gb_per_s'] / 1e3:.2g})"
    assert f"| A | forward | {rows['A']['limit_us']['forward'] / 1e3:.2g} | 0.002 {cell} | 0.008 {cell} |" in page
    assert "| - [1] |\n" in page
    assert "1. RuntimeError: no \\| kernel" in page
    assert "[2] |" in page
    assert "- forward, times as fast as FBGEMM: 1.60 on the mean of 512 samples." in page
    assert "times as fast as the better of FBGEMM's: 0.50 to " in page
    assert "- forward, times as fast as TorchRec, fused: 2.00 on the mean of models." in page
    assert "| A, 8 samples | host |" in page
    assert "| A, Adam | backward and update |" in page
    assert "| jagged | jagged, each class tuned alone | jagged, no plan |" in page
    assert "times as fast as jagged, each class tuned alone: 1.00 to 1.00 in 5 cases." in page
    assert "times as fast as jagged, no plan" not in page
    # The page stands without a result, and shows figures where there are some.
    monkeypatch.setattr(tables, "FOLDER", tmp_path / "pages")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    (tmp_path / "results" / "made-up").mkdir(parents=True)
    (tmp_path / "figures").mkdir()
    tables.write_embedding_bags()
    assert (tmp_path / "pages" / "embedding_bag.md").read_text() == tables.UNMEASURED_BAGS
    (tmp_path / "figures" / "embedding_bags_A-made-up.png").touch()
    (tmp_path / "results" / "made-up" / "embedding_bags.json").write_text(json.dumps(result))
    tables.write_embedding_bags()
    written = (tmp_path / "pages" / "embedding_bag.md").read_text()
    assert "(../../benchmarks/figures/embedding_bags_A-made-up.png)" in written
    assert "embedding_bags_sizes-made-up" not in written


def test_constants_are_changed_where_kernels_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from jagged.ops.embedding_bag.triton import counting, launch

    # As they are, again, when this is over.
    for module, name in ((counting, "LONG"), (launch, "FEWEST_TURNS")):
        monkeypatch.setattr(module, name, getattr(module, name))
    for text in ("counting.LONG=64", "launch.FEWEST_TURNS=12"):
        embedding_kernels.change(*embedding_kernels.setting_of(text))
    assert (counting.LONG.value, launch.FEWEST_TURNS) == (64, 12)
    for wrong, words in (
        ("nowhere.LONG=1", "no module nowhere"),
        ("sorting.STREAM=1", "an integer"),
        ("counting.NONE=1", "None"),
    ):
        with pytest.raises(ValueError, match=words):
            embedding_kernels.change(*embedding_kernels.setting_of(wrong))
    for wrong in ("LONG=1", "counting.LONG", "counting.LONG=x"):
        with pytest.raises(argparse.ArgumentTypeError, match="expected module"):
            embedding_kernels.setting_of(wrong)
    assert embedding_kernels.case_of("mlperf:8192") == ("mlperf", 8192)
    assert embedding_kernels.case_of("A") == ("A", 512)
    for wrong in ("F", "A:many"):
        with pytest.raises(argparse.ArgumentTypeError, match="SHAPE:SAMPLES"):
            embedding_kernels.case_of(wrong)


@pytest.mark.parametrize(("way", "kind"), [("forward", "sgd"), ("backward", "sgd"), ("backward", None)])
def test_kernels_of_a_pass_that_is_right(way: str, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is timed was checked, and runs; kernels that take next to nothing of it are not said."""
    monkeypatch.setattr(embedding_kernels, "Workload", lambda shape, sizes, device: Workload(shape, sizes, "cpu"))
    monkeypatch.setattr(embedding_kernels, "replay_us", lambda call: {"median": 1000.0, "ran": call()})
    found = {"embedding_bags_rows_kernel": 700.0, "fill": 299.0, "tiny": 1.0}
    monkeypatch.setattr(embedding_kernels, "kernels_us", lambda call: found if call() is None or way == "forward" else {})
    said = embedding_kernels.line(("D", 7), *embedding_kernels.measure("D", 7, way, kind))
    assert said == "D, 7 samples: 1000.0 us: rows 700.0, fill 299.0"
    spoilt = "check_output" if way == "forward" else "check_rows"
    monkeypatch.setattr(embedding_kernels, spoilt, lambda *_: (_ for _ in ()).throw(ArithmeticError("wrong")))
    with pytest.raises(ArithmeticError, match="wrong"):
        embedding_kernels.measure("D", 7, way, kind)


def test_times_of_kernels_are_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    class Profile:
        def __enter__(self) -> Profile:
            return self

        def __exit__(self, *_: object) -> None: ...

        def key_averages(self) -> list[SimpleNamespace]:
            return [SimpleNamespace(key=key, device_time_total=us) for key, us in (("a", 10.0), ("host", 0.0), ("b", 20.0))]

    called: list[int] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: Profile())
    found = embedding_kernels.kernels_us(lambda: called.append(1))
    assert list(found.items()) == [("b", 20.0 / embedding_kernels.CALLS), ("a", 10.0 / embedding_kernels.CALLS)]
    assert len(called) == 1 + embedding_kernels.CALLS
