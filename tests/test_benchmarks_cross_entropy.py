"""The benchmark of cross-entropy at sizes that cost nothing: what is timed is right, what is wrong gets no time."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import cross_entropy, figures, tables, trained_sasrec
from benchmarks.cross_entropy import Case, Part, measure, ours_failed, parts, run, summary
from benchmarks.cross_entropy_cases import METHODS, TOPK, Size, Workload
from benchmarks.sasrec_steps import Step, StepWorkload, measure_step


def at_once(prepare: Callable[[], Callable[[], Any]]) -> dict[str, Any]:
    """Run what would be timed."""
    prepare()()
    return {"median": 2.0, "min": 1.0, "max": 3.0, "captured": True}


def small(case: Case) -> Case:
    """A case of the same kind that costs nothing."""
    size = case.size
    shared = size.rows_per_draw and min(size.rows_per_draw, 4)
    return replace(
        case,
        size=replace(
            size, rows=24, items=200, width=8, negatives=min(size.negatives, 10), rows_per_draw=shared, k=min(size.k, 5)
        ),
        length=min(case.length, 6),
    )


@pytest.fixture(autouse=True)
def peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers that need a GPU, as plain PyTorch with their signatures; nothing is compiled."""

    def cut(e: Tensor, c: Tensor, targets: Tensor, *, filter_eps: float | None) -> Tensor:
        return F.cross_entropy((e @ c.t()).float(), targets)

    class Liger:
        def __call__(self, lin_weight: Tensor, _input: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy((_input @ lin_weight.t()).float(), target)

    monkeypatch.setitem(sys.modules, "cut_cross_entropy", SimpleNamespace(linear_cross_entropy=cut))
    monkeypatch.setitem(sys.modules, "liger_kernel", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", SimpleNamespace(LigerFusedLinearCrossEntropyLoss=Liger))
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(trained_sasrec, "STEPS", 2)


CASES = [(title, name) for title, part in parts().items() for name in part]


@pytest.mark.parametrize(("title", "name"), [case for case in CASES if case[0] != "scaling"])
def test_every_case_is_checked_and_timed(title: str, name: str) -> None:
    case = small(parts()[title][name])
    row = measure(case, "cpu", at_once)
    for method in case.methods:
        assert "failed" not in row[method], row[method]
        is_checked = method.startswith("jagged") and "fil" not in method and not case.length
        assert row[method].keys() >= {*case.ways, "errors" if is_checked else case.ways[0]}
    json.dumps(row)


def test_sizes_and_asked_numbers() -> None:
    found = parts()
    assert set(found) == {"full", "filter", "sampled", "scaling", "papers", "steps", "topk"}
    assert list(found["papers"]) == list(found["steps"])
    assert len(found["steps"]) == 2 * len(cross_entropy.DATASETS) == 12
    of_megamarket = found["steps"]["Megamarket, 5,120 x 320, 1,023"]
    assert (of_megamarket.size.rows, of_megamarket.length) == (5120 * 320, 320)
    assert {name for part in found.values() for case in part.values() if not case.size.k for name in case.methods} == set(METHODS)
    assert {name for case in found["topk"].values() for name in case.methods} == set(TOPK)
    full = found["full"]["25,600 x 1,000,000 x 256"]
    assert full.asked == {"forward": 28.0, "both": 120.0, "memory": 64.0}
    assert cross_entropy.flops(full.size, "all") == {"forward": 13_107_200_000_000, "backward": 26_214_400_000_000,
                                                     "both": 39_321_600_000_000}  # fmt: skip
    sampled = found["sampled"]["25,600 x 1,000,000 x 256: 1,023 a row"].size
    assert cross_entropy.flops(sampled, "sampled")["forward"] == 2 * 25600 * 1023 * 256
    assert {case.along for case in found["scaling"].values() if case.along} >= {
        ("items", 10**7),
        ("width", 512),
        ("negatives", 8192),
    }


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("negatives", [0, 12])
@pytest.mark.parametrize("rows_per_draw", [1, 4, None])
def test_methods_agree_with_float64(dtype: str, negatives: int, rows_per_draw: int | None) -> None:
    """Few items, so that negatives repeat and hit the target."""
    methods = ("jagged_sampled", "gathered") if negatives else ("jagged", "jagged_fused", "eager")
    row = measure(Case(Size(40, 30, 8, dtype, negatives, rows_per_draw), methods), "cpu", at_once)
    for name in methods:
        assert "failed" not in row[name], row[name]
    assert row[methods[0]]["errors"].keys() == {"loss", "hidden", "weight"}
    assert max(row[methods[-1]]["difference"].values()) < (1e-5 if dtype == "fp32" else 0.02)


def test_steps_take_the_loss_down_and_agree() -> None:
    w = StepWorkload(Size(24, 50, 8, "bf16", 10), 6, "cpu")
    assert w.features.lengths().tolist() == [6] * 4
    # The targets are the sequences' next items.
    assert torch.equal(w.target.view(4, 6)[:, :-1], w.features.values().view(4, 6)[:, 1:])
    for name in ("jagged", "eager", "jagged_sampled", "gathered"):
        step = Step(w, METHODS[name])
        losses = [float(step()) for _ in range(60)]
        assert losses[-1] < 0.9 * losses[0]
    spoilt = METHODS["eager"]._replace(make=lambda w: lambda h, x: 1.1 * METHODS["eager"].make(w)(h, x))
    expected: dict[str, float] = {}
    assert "step" in measure_step(w, METHODS["jagged"], expected, at_once)
    with pytest.raises(ArithmeticError, match="a first loss of"):
        measure_step(w, spoilt, expected, at_once)


def test_rows_that_do_not_fill_the_blocks() -> None:
    row = measure(Case(Size(41, 30, 8, "fp32", 12, 4), ("jagged_sampled", "gathered")), "cpu", at_once)
    assert "both" in row["jagged_sampled"]
    assert row["gathered"]["failed"] == "NotImplementedError: lists of negatives for as many rows each"


def test_logits_as_after_training() -> None:
    w = Workload(Size(400, 1000, 64, "fp32", logits="popularity"), "cpu")
    logits = (w.hidden @ w.weight.t()).detach()
    # Most of the probability lies on few items, popular ones are targets more often, and losses are those of a trained model.
    shares = logits.softmax(1).sort(1, descending=True).values
    assert float(shares[:, :100].sum(1).mean()) > 0.8
    assert len(w.target.unique()) < 300
    assert float(F.cross_entropy(logits, w.target)) < 6


def test_logits_in_clusters() -> None:
    """Most of a row's probability lies in the cluster of its target, and rows are of many clusters."""
    w = Workload(Size(400, 2000, 64, "fp32", logits="clustered"), "cpu")
    shares = (w.hidden @ w.weight.t()).detach().softmax(1).sort(1, descending=True).values
    assert float(shares[:, :400].sum(1).mean()) > 0.9
    assert len(w.target.unique()) > 300


def test_a_sasrec_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loss on histories that it has not seen is below that of equal logits, and that of what the loss is given."""
    monkeypatch.setattr(trained_sasrec, "STEPS", 60)
    w = Workload(Size(800, 2000, 32, logits="sasrec"), "cpu")
    assert (w.hidden.shape, w.weight.shape, w.hidden.dtype) == ((800, 32), (2000, 32), torch.bfloat16)
    with torch.no_grad():
        loss = float(F.cross_entropy(w.hidden.float() @ w.weight.float().t(), w.target))
    assert w.loss == pytest.approx(loss, rel=1e-2)
    assert loss < 7.2 < torch.tensor(2000.0).log()


def test_what_is_wrong_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    right = METHODS["jagged"]

    def spoilt(loss: float, weight: float) -> Any:
        def make(w: Workload) -> Any:
            call = right.make(w)
            return lambda h, x: loss * call(h, weight * x + (1 - weight) * x.detach())

        return make

    case = Case(Size(24, 200, 8, "fp32"), ("jagged", "eager", "cut", "liger"))
    monkeypatch.setitem(METHODS, "eager", METHODS["eager"]._replace(make=spoilt(1.1, 1.0)))
    monkeypatch.setitem(METHODS, "cut", METHODS["cut"]._replace(make=spoilt(1.0, 1.3)))
    row = measure(case, "cpu", at_once)
    assert row["eager"]["failed"].startswith("wrong: loss differs from ours by 0.1 ")
    assert row["cut"]["failed"].startswith("wrong: weight differs from ours by 0.3 ")
    assert "both" in row["liger"]
    monkeypatch.setitem(METHODS, "cut", METHODS["cut"]._replace(approximates=True))
    assert "both" in measure(case, "cpu", at_once)["cut"]
    monkeypatch.setitem(METHODS, "cut", METHODS["cut"]._replace(make=spoilt(1.0, float("nan"))))
    assert measure(case, "cpu", at_once)["cut"]["failed"].startswith("wrong: loss differs")
    for make, what in ((spoilt(1.01, 1.0), "the mean loss is off"), (spoilt(1.0, 1.001), "weight is off by")):
        monkeypatch.setitem(METHODS, "jagged", right._replace(make=make))
        row = measure(case, "cpu", at_once)
        assert row["jagged"]["failed"].startswith(f"wrong: {what}")
        assert row["eager"] == {"failed": "ours failed: nothing to compare with"}
    assert ours_failed({"environment": {}, "full": {"rows": {"small": row}}})[0].startswith("full, small, jagged: wrong: weight")


def test_a_gradient_that_is_wrong_in_sampled_items_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = METHODS["jagged_sampled"]
    make = lambda w: lambda h, x: right.make(w)(1.001 * h - 0.001 * h.detach(), x)  # noqa: E731
    monkeypatch.setitem(METHODS, "jagged_sampled", right._replace(make=make))
    row = measure(Case(Size(24, 200, 8, "fp32", 10), ("jagged_sampled",)), "cpu", at_once)
    assert row["jagged_sampled"]["failed"].startswith("wrong: hidden is off by")


def test_peers_that_fail_have_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(error: Exception) -> Any:
        def make(w: Workload) -> Any:
            raise error

        return make

    for name, error in {
        "eager": torch.OutOfMemoryError("CUDA out of memory"),
        "cut": ModuleNotFoundError("No module", name="cut_cross_entropy"),
        "liger": RuntimeError("first line\nsecond"),
    }.items():
        monkeypatch.setitem(METHODS, name, METHODS[name]._replace(make=fails(error)))
    row = measure(Case(Size(24, 200, 8, "fp32"), ("jagged", "eager", "cut", "liger")), "cpu", at_once)
    assert row["eager"] == {"failed": "needs more than 110 GB"}
    assert row["cut"] == {"failed": "cut_cross_entropy is not installed"}
    assert row["liger"] == {"failed": "RuntimeError: first line"}

    def out_of_memory(prepare: Any) -> Any:
        raise torch.OutOfMemoryError

    row = measure(Case(Size(24, 200, 8, "fp32"), ("jagged",)), "cpu", out_of_memory)
    assert row["jagged"].keys() == {"errors", "failed"}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_best_items_are_checked(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(Size(24, 200, 8, dtype, k=5), ("jagged", "plain"), ("forward",))
    row = measure(case, "cpu", at_once)
    assert row["jagged"]["forward"]["tflop_per_s"] == pytest.approx(2 * 24 * 200 * 8 / 2e6)
    assert row["plain"]["errors"].keys() == {"scores", "below"}
    for spoilt, what in (
        (lambda scores, ids: (scores + 0.1, ids), "scores off by"),
        (lambda scores, ids: (scores, ids[:, :1].expand_as(ids)), "ids"),
        (lambda scores, ids: (scores, ids[:, :4]), "ids"),
    ):
        right = TOPK["jagged"]
        with monkeypatch.context() as patch:
            patch.setitem(TOPK, "jagged", lambda w, right=right, spoilt=spoilt: spoilt(*right(w)))
            assert measure(case, "cpu", at_once)["jagged"]["failed"].startswith(f"wrong: {what}")
    # Items that are not the best, with their own scores.
    right = TOPK["jagged"]

    def worst(w: Workload) -> tuple[Tensor, Tensor]:
        scores, ids = (w.hidden @ w.weight.t()).detach().float().topk(5, largest=False)
        return scores, ids

    monkeypatch.setitem(TOPK, "plain", worst)
    assert measure(case, "cpu", at_once)["plain"]["failed"].startswith("wrong: below off by")


def test_how_a_gpu_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are replayed for short calls, events lie around longer ones, and what is slow is called seldom."""
    monkeypatch.setattr(cross_entropy, "replay_us", lambda prepare, sustained: {"median": 1.0, "captured": True})
    monkeypatch.setattr(cross_entropy, "event_us", lambda work, repeats, calls_each: (work(), [8.0] * repeats)[1])
    calls: list[int] = []

    def timed(seconds: float) -> dict[str, Any]:
        calls.clear()
        monkeypatch.setattr(cross_entropy, "seconds_of", lambda work: (seconds, work()))
        return cross_entropy.time_on_gpu(lambda: lambda: calls.append(0))

    assert timed(0.5e-3) == {"median": 1.0, "captured": True}
    assert timed(0.11) == {"median": 8.0, "min": 8.0, "max": 8.0, "captured": False}
    assert len(calls) == 1 + 3 + 1
    assert timed(0.5)["median"] == pytest.approx(0.5e6)
    assert len(calls) == 1 + 3
    assert timed(2.5)["median"] == pytest.approx(2.5e6)
    assert len(calls) == 1
    calls.clear()
    monkeypatch.setattr(cross_entropy, "seconds_of", lambda work: (1e-6, work()))
    assert cross_entropy.time_on_cpu(lambda: lambda: calls.append(0), 4e-6)["median"] == pytest.approx(1.0)
    assert len(calls) == 1 + 4


def test_memory_is_that_beyond_results(monkeypatch: pytest.MonkeyPatch) -> None:
    w = Workload(Size(24, 200, 8, "bf16"), "cpu")
    for name, answer in {"synchronize": None, "reset_peak_memory_stats": None, "memory_allocated": 5}.items():
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 5000)
    found = cross_entropy.memory(w, cross_entropy.Pass(w, METHODS["jagged"].make(w)))
    results = 2 * 8 * (24 + 200)
    assert found == {
        "input_bytes": results + 8 * 24,
        "output_bytes": results,
        "peak_bytes_forward": 4995,
        "peak_bytes_both": 4995,
        "beyond_bytes_both": 4995 - results,
    }


def test_a_backward_is_timed_alone_and_again() -> None:
    w = Workload(Size(24, 200, 8, "fp32"), "cpu")
    passes = cross_entropy.Pass(w, METHODS["jagged"].make(w))
    work = passes.prepare("backward")()
    first, second = work(), work()
    loss = METHODS["eager"].make(w)(w.hidden, w.weight) * 24
    for again, once, right in zip(first, second, torch.autograd.grad(loss, (w.hidden, w.weight)), strict=True):
        assert torch.equal(again, once)
        torch.testing.assert_close(once, right)


def test_how_much_faster_a_filter_is() -> None:
    def of(microseconds: float) -> dict[str, Any]:
        return {"backward": {"median": microseconds}}

    rows = {"a": {"jagged": of(4.0), "jagged_filtered": of(2.0), "cut": {"failed": "no"}, "cut_filtered": of(1.0)}}
    assert summary("filter", rows) == {"a": {"jagged": 2.0}}
    assert summary("full", rows) == {}


def test_cases_that_are_chosen_join_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A run by its command line, twice: of all small cases and of one of them."""
    monkeypatch.setattr("benchmarks.common.ROOT", tmp_path)
    monkeypatch.setattr(cross_entropy, "ROOT", tmp_path)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    tiny = {name: small(case) for name, case in cross_entropy.cpu_parts()["cpu"].items()}
    monkeypatch.setattr(cross_entropy, "cpu_parts", lambda: {"cpu": tiny})

    def saved(*arguments: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["cross_entropy", "--device", "cpu", "--seconds", "0", *arguments])
        cross_entropy.main()
        (path,) = tmp_path.glob("results/*/cross_entropy.json")
        result: dict[str, Any] = json.loads(path.read_text())
        return result

    first = saved()
    assert list(first["cpu"]["rows"]) == list(tiny)
    second = saved("--cases", "20000 x 64: k")
    assert list(second["cpu"]["rows"]) == list(tiny)
    plain, _, best = tiny
    assert second["cpu"]["rows"][plain] == first["cpu"]["rows"][plain]
    assert second["cpu"]["rows"][best] != first["cpu"]["rows"][best]
    third = saved("--without", "eager", "plain")
    assert third["cpu"]["rows"][plain]["eager"] == second["cpu"]["rows"][plain]["eager"]
    assert third["cpu"]["rows"][plain]["jagged"] != second["cpu"]["rows"][plain]["jagged"]
    assert third["cpu"]["rows"][best]["plain"] == second["cpu"]["rows"][best]["plain"]
    with pytest.raises(SystemExit):
        saved("--cases", "no such case")
    with pytest.raises(SystemExit):
        saved("--only", "full")
    for name in tables.CROSS_ENTROPY_PAGES:
        assert "512 x 20,000 x 64" in tables.cross_entropy_page(first, name)


def test_a_run_that_is_cut_off_leaves_what_it_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut_off(w: Workload) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setitem(METHODS, "eager", METHODS["eager"]._replace(make=cut_off))
    left: list[dict[str, Any]] = []
    with pytest.raises(KeyboardInterrupt):
        run(
            "full",
            {"small": Case(Size(24, 200, 8, "fp32"), ("jagged", "liger", "eager"))},
            "cpu",
            at_once,
            {"8,192 x 100,000 x 64": {}, "of a case that is no more": {}},
            lambda result: left.append(json.loads(json.dumps(result))),
        )
    assert left[-1]["rows"].keys() == {"8,192 x 100,000 x 64", "small"}
    assert "both" in left[-1]["rows"]["small"]["liger"]


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    """What a run on a GPU saves: a peer that fails, one that does not fit, memory that is made up."""
    facts = {"device": "NVIDIA Made-Up", "copy_gb_per_s": 1000.0, "bf16_matmul_tflops": 700.0}
    found: dict[str, Any] = {"environment": facts | {"torch": "2", "triton": "3", "fbgemm_gpu": None, "liger": "0.8.5"}}
    bounds = {"forward": 0.001, "both": 0.004, "memory": 64.0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda function, **options: function)
        patch.setattr(trained_sasrec, "STEPS", 2)
        patch.setitem(METHODS, "cut_filtered", METHODS["eager"]._replace(approximates=True))
        patch.setitem(METHODS, "cut", METHODS["eager"])
        for title, part in parts().items():
            chosen: Part = {name: small(case) for name, case in part.items()}
            chosen = {name: replace(case, asked=case.asked and bounds) for name, case in chosen.items()}
            found[title] = run(title, chosen, "cpu", at_once)
            for row in found[title]["rows"].values():
                for name, of in row.items():
                    if name in METHODS and "step" in of:
                        of["peak_bytes_step"] = 3 * 10**9
                    if name in METHODS and "both" in of:
                        of |= {"output_bytes": 10**6, "peak_bytes_both": 33 * 10**6, "beyond_bytes_both": 32 * 10**6}
    full = found["full"]["rows"]
    full["25,600 x 1,000,000 x 256"]["eager"] = {"failed": "needs more than 110 GB"}
    found["steps"]["rows"]["Gowalla, 1,024 x 320, 511"]["gathered"] = {"failed": "needs more than 110 GB"}
    saved: dict[str, Any] = json.loads(json.dumps(found))
    return saved


@pytest.mark.parametrize("name", figures.DRAWN["cross_entropy"])
def test_figures_are_drawn(name: str, result: dict[str, Any], tmp_path: Path) -> None:
    part, draw = figures.DRAWN["cross_entropy"][name]
    assert part in result
    draw(result, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_tables(result: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = tables.cross_entropy_page(result, "cross_entropy")
    rate = f"{2 * 24 * 200 * 8 / 2e6:.2g}"
    cell = f"0.002 ({rate})"
    name = "25,600 x 1,000,000 x 256"
    assert f"| {name} | forward | {cell} | {cell} | {cell} | {cell} | - [1] | {cell} | - [2] |" in page
    assert "1. liger_kernel is not installed" in page
    assert "2. needs more than 110 GB" in page
    assert f"| {name} | 32 | 32 | 32 | 32 | 32 | - |" in page
    said = "1.00 times as fast; gradients of hidden states and weights off by 0 and 0 "
    assert f"- {name}, popularity, jagged, filtered: {said}" in page
    # A byte of the gradients in a nanosecond over a thousand: 8 numbers of 2 bytes for 224 rows.
    assert "| all items, width 32 | forward and backward | 3.58e-06 |" in page
    assert "negatives, width" not in page
    assert "| Megamarket, 5,120 x 320, 1,023 | forward and backward |" in page
    assert "| Gowalla, 1,024 x 320, 511 | 0.002 (3) | 0.002 (3) | - [1] | 0.002 (3) |\n" in page
    assert page.rstrip().endswith("1. needs more than 110 GB")
    page = tables.cross_entropy_page(result, "sampled_cross_entropy")
    assert "1,024 of 128 rows" in page
    assert "all items, width" not in page
    page = tables.cross_entropy_page(result, "catalogue_topk")
    assert "| k = 1,000 | forward |" in page
    assert "Megamarket" not in page
    # Pages stand without a result, and show figures where there are some.
    monkeypatch.setattr(tables, "FOLDER", tmp_path / "pages")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    tables.write_cross_entropy()
    assert (tmp_path / "pages" / "cross_entropy.md").read_text() == tables.UNMEASURED
    (tmp_path / "results" / "made-up").mkdir(parents=True)
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "cross_entropy-made-up.png").touch()
    (tmp_path / "results" / "made-up" / "cross_entropy.json").write_text(json.dumps(result))
    tables.write_cross_entropy()
    written = (tmp_path / "pages" / "cross_entropy.md").read_text()
    assert "(../../benchmarks/figures/cross_entropy-made-up.png)" in written
    assert "cross_entropy_scaling-made-up" not in written


def test_nothing_is_compared_with_what_is_approximate(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(w: Workload) -> Any:
        raise RuntimeError("no")

    monkeypatch.setitem(METHODS, "jagged", METHODS["jagged"]._replace(make=fails))
    row = measure(Case(Size(24, 200, 8, "fp32"), ("jagged", "jagged_filtered", "eager")), "cpu", at_once)
    assert row["jagged_filtered"] == row["eager"] == {"failed": "ours failed: nothing to compare with"}
