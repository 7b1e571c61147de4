"""The machinery of the operators' benchmarks at sizes that cost nothing: what is timed is right, what is wrong gets no time."""

from __future__ import annotations

import argparse
import copy
import importlib
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import (
    attention,
    attention_cases,
    attention_tiles,
    common,
    cross_entropy,
    embedding_bags,
    figures,
    jagged_ops,
    planted_labels,
    sparse_output,
    sparse_steps,
    table_steps,
    tables,
    train_sasrec,
)
from benchmarks.attention_cases import Implementation, Mask, Terms
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
from benchmarks.train_sasrec import HEADS
from jagged.config import TrainConfig
from jagged.ops.attention.triton import launch


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

    def replay(function: Any = None, *, prepare: Any = None, cold: bool = False, sustained: float = 0.0) -> dict[str, Any]:
        (function or prepare())()
        return {"median": 4.0 if cold else 2.0, "seconds": sustained}

    monkeypatch.setattr(jagged_ops, "replay_us", replay)
    monkeypatch.setattr(jagged_ops, "copy_us", lambda moved, cold: {"median": float(moved)})
    for name, answer in {"synchronize": None, "reset_peak_memory_stats": None, "memory_allocated": 0}.items():
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    case = CASES["jagged_split"](workload)
    needed = case.inputs[0].nbytes
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2 * needed)
    row = measure_on_gpu(case, copy_gb_per_s=1e-3 / 0.82, cold=True, sustained=1.5)
    assert not ours_failed({"table": {"by": {"fp32": {"jagged_split": row}}}})
    ours = row["jagged"]
    assert ours["peak_ratio_forward"] == 3 / 2
    # Inputs and gradients of the results; results and gradients of the inputs.
    assert ours["peak_ratio_both"] == 4 / 4
    ways = ("forward", "forward_cold", "backward", "backward_cold")
    assert [ours[way]["median"] for way in ways] == [2, 4, 2, 4]
    # Ours alone, and not with a cold cache.
    assert [ours[way]["seconds"] for way in ways] == [1.5, 0, 1.5, 0]
    assert {row["padded"][way]["seconds"] for way in ways} == {0}
    assert {row["copy"][way]["median"] for way in ways} == {row["bytes_forward"]} == {2 * needed}
    # A byte a microsecond.
    assert row["ideal_us"]["backward"] == pytest.approx(row["bytes_backward"])
    assert ours["gb_per_s"] == pytest.approx(row["bytes_forward"] / 2000)
    monkeypatch.setattr(jagged_ops, "host_us", partial(common.host_us, calls=2))
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


def small(size: attention_cases.Size, **changes: Any) -> attention_cases.Size:
    """A size of the benchmark with few short samples of narrow heads; 16 targets and windows of 256 shrink with them."""
    mask = size.mask
    mask = replace(mask, window=mask.window and 3, num_targets=mask.num_targets and 2, num_contextual=min(mask.num_contextual, 2))
    return replace(size, **{"samples": 5, "length": 9, "width": 8, "mask": mask, "dtype": "fp32", **changes})


def at_once(prepare: Any) -> dict[str, float]:
    """Run what would be timed; its time is made up."""
    prepare()()
    return {"median": 2.0, "min": 1.0, "max": 3.0}


ATTENTION_SIZES = {name: size for part in attention.parts().values() for name, (size, _) in part.items()}


def test_sizes_of_attention_can_be_made() -> None:
    for size in ATTENTION_SIZES.values():
        lengths = size.draw()
        assert lengths.shape == (size.samples,)
        assert 0 <= int(lengths.min()) <= int(lengths.max()) < 2**17
    peers = {name for part in attention.parts().values() for _, names in part.values() for name in names}
    assert peers | {"padded"} == attention_cases.PEERS.keys()


def test_equal_lengths_do_the_work_of_skewed_ones() -> None:
    skewed = attention_cases.Size(64, 2048, 4, 128, lengths="lognormal")
    works = [int((size.draw() ** 2).sum()) for size in (skewed, attention.same_work(skewed))]
    assert works[1] == pytest.approx(works[0], rel=0.01)


@pytest.mark.parametrize("name", [name for name in ATTENTION_SIZES if ":" in name])
def test_attention_is_checked_and_counted_under_every_option(name: str) -> None:
    # Of fewer numbers the yardstick, the largest error of plain products, may be small by luck.
    w = attention_cases.Workload(small(ATTENTION_SIZES[name], samples=12, length=20), "cpu")
    row = attention.measure(w, (), at_once)
    assert row["jagged"]["errors"].keys() == {"output", "q", "k", "v", *w.biases}, row
    assert row["jagged"]["backward"]["tflop_per_s"] == pytest.approx(2.5 * row["pairs"] * 4 * w.size.heads * 8 / 2e6)
    seen = [w.mask.seen(q, k, w.device).sum() for q, k in zip(w.query_lengths, w.key_lengths, strict=True)]
    assert row["pairs"] == sum(seen) > 0


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@pytest.mark.parametrize(("causal", "peers"), [(False, ("padded", "sll_dense", "nested")), (True, ("padded",))])
def test_peers_of_attention_agree(causal: bool, peers: tuple[str, ...]) -> None:
    pytest.importorskip("fbgemm_gpu")
    w = attention_cases.Workload(attention_cases.Size(5, 9, 2, 8, Mask(causal=causal), dtype="fp32"), "cpu")
    assert 0 in w.key_lengths
    row = attention.measure(w, peers, at_once)
    for name in peers:
        assert row[name]["difference"].keys() == {"output", "q", "k", "v"}, row[name]
        assert max(row[name]["difference"].values()) < 1e-6
        assert row[name]["forward"]["tflop_per_s"] == pytest.approx(row["flops"]["forward"] / 2e6)


@pytest.mark.parametrize(
    "terms", [Terms(distances=7), Terms(buckets=12), Terms(distances=7, buckets=12), Terms(pairs=True)], ids=str
)
def test_padded_attention_agrees_with_biases(terms: Terms) -> None:
    w = attention_cases.Workload(attention_cases.Size(5, 9, 2, 8, Mask(causal=True), dtype="fp32", terms=terms), "cpu")
    row = attention.measure(w, ("padded",), at_once)["padded"]
    assert row["difference"].keys() == {"output", "q", "k", "v", *w.biases}, row
    assert max(row["difference"].values()) < 1e-5
    assert row.keys() == {"difference", "forward", "backward"}


def test_flex_attention_agrees_with_a_relative_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    """The output, not compiled: on a CPU FlexAttention has no backward pass."""
    flex_attention = importlib.import_module("torch.nn.attention.flex_attention")
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(attention_cases, "_flex", lambda: flex_attention.flex_attention)
    size = attention_cases.Size(5, 30, 2, 16, Mask(causal=True), dtype="fp32", terms=Terms(distances=7))
    w = attention_cases.Workload(size, "cpu")
    flex = attention_cases.flex(w)
    output = flex.unpack(flex.call(*(x.detach() for x in flex.inputs)), "output")
    torch.testing.assert_close(output, attention_cases.ours(w).forward())


def test_biases_are_compared() -> None:
    def row(forward: float, backward: float) -> dict[str, Any]:
        return {"jagged": {"forward": {"median": forward}, "backward": {"median": backward}}}

    rows = {
        "1 x 2: plain": row(1000.0, 2000.0),
        "1 x 2: both biases": row(1500.0, 5000.0),
        "1 x 2: HSTU, both biases": row(900.0, 1000.0),
    }
    rows["1 x 2: bias of pairs"] = {"jagged": {"failed": "wrong"}}
    assert attention.compared(rows, "1 x 2: plain") == {}
    assert attention.compared(rows, "1 x 2: both biases") == {
        "compared": {
            "with": "plain",
            "ratio": {"forward": 1.5, "backward": 2.5},
            "asked": {"forward": 1.25, "backward": 1.35},
        },
        "asked_ms": {"forward": 1.25, "backward": 2.7},
    }
    assert attention.compared(rows, "1 x 2: HSTU, both biases")["compared"]["ratio"] == {"forward": 0.6, "backward": 0.2}
    assert attention.compared(rows, "1 x 2: bias of pairs") == {
        "compared": {"with": "plain", "ratio": {}, "asked": {}},
        "asked_ms": {},
    }


def test_attention_that_is_wrong_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    w = attention_cases.Workload(attention_cases.Size(5, 9, 2, 8, dtype="fp32"), "cpu")

    def spoilt(forward: float, backward: float) -> Any:
        def make(w: attention_cases.Workload) -> Implementation:
            right = attention_cases.ours(w)

            def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
                return forward * right.call(q, k, backward * v + (1 - backward) * v.detach())

            return Implementation((w.q, w.k, w.v), w.upstream, call)

        return make

    monkeypatch.setitem(attention_cases.PEERS, "sll", spoilt(1.1, 1.0))
    monkeypatch.setitem(attention_cases.PEERS, "fa2", spoilt(1.0, 1.1))
    row = attention.measure(w, ("sll", "fa2"), at_once)
    assert row["sll"].keys() == {"failed"}
    assert row["sll"]["failed"].startswith("wrong: differs from ours by 0.1 ")
    assert row["fa2"]["forward"]["median"] == 2.0
    assert row["fa2"]["backward"]["failed"].startswith("wrong: differs from ours by 0.1 ")
    monkeypatch.setattr(attention, "ours", spoilt(1.0, 1.001))
    row = attention.measure(w, ("fa2",), at_once)
    assert row["jagged"]["failed"].startswith("wrong: v is off by")
    assert "fa2" not in row
    assert attention.ours_failed({"environment": {}, "table": {"rows": {"small": row}}})[0].startswith("table, small: wrong: v")


@pytest.mark.parametrize("terms", [Terms(distances=7), Terms(pairs=True)], ids=str)
def test_a_wrong_gradient_of_a_bias_is_found(terms: Terms, monkeypatch: pytest.MonkeyPatch) -> None:
    right = attention_cases.ours

    def spoilt(w: attention_cases.Workload) -> Implementation:
        made = right(w)
        call = made.call
        made.call = lambda q, k, v, bias: call(q, k, v, 1.001 * bias - 0.001 * bias.detach())
        return made

    monkeypatch.setattr(attention, "ours", spoilt)
    w = attention_cases.Workload(attention_cases.Size(5, 9, 2, 8, Mask(causal=True), dtype="fp32", terms=terms), "cpu")
    (name,) = w.biases
    assert attention.measure(w, (), at_once)["jagged"]["failed"].startswith(f"wrong: {name} is off by")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block", [4, 16])
def test_blocks_of_the_document_mask(causal: bool, block: int) -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    w = attention_cases.Workload(attention_cases.Size(7, 50, 2, 8, Mask(causal=causal), dtype="fp32"), "cpu")
    found = attention_cases.document_mask(w, block)
    total = w.q.shape[0]
    expected = create_block_mask(found.mask_mod, 1, 1, total, total, device="cpu", BLOCK_SIZE=block)
    assert torch.equal(found.to_dense(), expected.to_dense())
    assert torch.equal(found.full_kv_num_blocks, expected.full_kv_num_blocks)


def test_how_a_gpu_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are replayed for short calls, events lie around long ones, and what takes over a second is left out."""
    monkeypatch.setattr(attention, "replay_us", lambda prepare, sustained: {"median": 1.0, "captured": True, "for": sustained})
    monkeypatch.setattr(attention, "lasting", lambda work, calls_each, seconds: {"sustained": (calls_each, seconds)})
    calls: list[int] = []
    monkeypatch.setattr(attention, "event_us", lambda work, repeats, calls_each: (work(), [8.0] * repeats)[1])

    def timed(seconds: float, sustained: float = 0.0) -> dict[str, Any]:
        calls.clear()
        monkeypatch.setattr(attention, "seconds_of", lambda work: (seconds, work()))
        return attention.time_on_gpu(lambda: lambda: calls.append(0), sustained)

    assert timed(0.9e-3, 2.0) == {"median": 1.0, "captured": True, "for": 2.0}
    long = {"median": 8.0, "min": 8.0, "max": 8.0, "captured": False}
    assert timed(5e-3, 2.0) == {**long, "sustained": (2, 2.0)}
    assert timed(5e-3) == long
    # The first, three that tell how long it takes, two that are timed.
    assert len(calls) == 1 + 3 + 2
    with pytest.raises(TimeoutError, match=r"takes 1\.5 s"):
        timed(1.5)


class MadeUpEvent:
    """An event of a GPU that works for a millisecond of each that its clock has; a call is 10 ms."""

    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = MadeUpEvent.now

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: MadeUpEvent) -> float:
        return end.at - self.at


def test_time_under_work_that_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work is queued in chunks of 50 ms, of which one always waits; clock and power are those of the second half."""
    states = iter([{"sm_mhz": 1980.0, "watts": 100.0}] * 6 + [{"sm_mhz": 1600.0, "watts": 700.0}] * 100)
    monkeypatch.setattr(torch.cuda, "Event", MadeUpEvent)
    monkeypatch.setattr(common, "gpu_state", lambda: next(states))
    queued = []

    def work() -> None:
        queued.append(0)
        MadeUpEvent.now += 10.0

    found = common.lasting(work, 4, 0.5)
    # The first five are timed alone. Then chunks of five, until one ends half a second after the start, and the one that waited.
    assert len(queued) == 5 + 11 * 5
    assert found == {
        "sm_mhz": 1980.0,
        "sustained": {"mean": 2500.0, "seconds": pytest.approx(0.55), "sm_mhz": 1600.0, "watts": 700.0},
    }
    monkeypatch.setattr(common, "gpu_state", dict)
    assert common.lasting(work, 4, 0.5) == {"sustained": {"mean": 2500.0, "seconds": pytest.approx(0.55)}}


def test_table_of_work_that_lasts() -> None:
    lasting = {"mean": 110.0, "seconds": 2.0, "sm_mhz": 1740.0, "watts": 699.6}
    rows = {"case": {"size": {}, "asked": {}, "fa2": {"forward": {"median": 100.0, "sm_mhz": 1980.0, "sustained": lasting}}}}
    rows["case"]["jagged"] = {
        "forward": {"median": 50.0, "sustained": {"mean": 60.0, "seconds": 2.0}},
        "backward": {"median": 1.0},
    }
    found = tables.under_load(rows, tables.ATTENTION)
    assert found[1].splitlines()[2:] == [
        "| case | jagged | forward | 0.05 | - | 0.06 | - | 1.20 | - |",
        "| case | FA2 | forward | 0.1 | 1,980 | 0.11 | 1,740 | 1.10 | 700 |",
    ]
    assert tables.under_load({"case": {"jagged": {"forward": {"median": 1.0}}}}, tables.ATTENTION) == []


def test_clock_and_power_without_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "clock_rate", lambda: 1980)
    monkeypatch.setattr(torch.cuda, "power_draw", lambda: 693_500)
    assert common.gpu_state() == {"sm_mhz": 1980, "watts": 693.5}

    def fails() -> int:
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

    monkeypatch.setattr(torch.cuda, "power_draw", fails)
    assert common.gpu_state() == {}


def test_cases_are_chosen_by_words_of_their_names() -> None:
    found = {"full": {"8,192 x 64": 1, "25,600 x 64": 2}, "topk": {"k = 10": 3}}
    assert common.some_of(found, ["8192", "k = 1"]) == {"full": {"8,192 x 64": 1}, "topk": {"k = 10": 3}}
    assert common.some_of(found, ["nothing"]) == {}
    for module in (attention, cross_entropy, embedding_bags):
        parts = module.parts()
        assert {(title, name) for title, names in module.QUICK.items() for name in names if name not in parts[title]} == set()


def test_memory_of_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    w = attention_cases.Workload(attention_cases.Size(5, 9, 2, 8, dtype="fp32"), "cpu")
    for name, answer in {"synchronize": None, "reset_peak_memory_stats": None, "memory_allocated": 5}.items():
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 12)
    found = attention.memory(attention_cases.ours(w), True)
    assert found == {"input_bytes": 3 * w.q.nbytes, "peak_bytes_forward": 7, "peak_bytes_both": 7}


@pytest.fixture(scope="module")
def attention_result() -> dict[str, Any]:
    """What a run on a GPU saves: a peer that is slower, one that fails, memory that is made up."""
    facts = {"device": "NVIDIA Made-Up", "copy_gb_per_s": 1000.0, "bf16_matmul_tflops": 700.0}
    found: dict[str, Any] = {"environment": facts | {"torch": "2", "triton": "3", "fbgemm_gpu": None}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "ASKED_MS", {(5, 9, 4, 8): (0.001, 0.004)})
        patch.setitem(attention_cases.PEERS, "fa2", attention_cases.ours)
        for title, part in {**attention.parts(), **attention.cpu_parts()}.items():
            chosen = {name: (small(size), ("fa2", "sll", "padded_math")) for name, (size, _) in list(part.items())[:2]}
            found[title] = attention.run(title, chosen, "cpu", at_once)
    memory = {"input_bytes": 2_000_000, "peak_bytes_forward": 1_000_000, "peak_bytes_both": 4_000_000}
    for title in ("table", "paper"):
        for row in found[title]["rows"].values():
            row["jagged"] |= memory
            row["fa2"] |= memory | {"peak_bytes_both": 5_000_000}
            row["padded_math"] |= {name: 4 * value for name, value in memory.items()}
    found["paper"]["summary"] = attention.summary("paper", found["paper"]["rows"])
    saved: dict[str, Any] = json.loads(json.dumps(found))
    return saved


@pytest.mark.parametrize("name", figures.DRAWN["attention"])
def test_figures_of_attention_are_drawn(name: str, attention_result: dict[str, Any], tmp_path: Path) -> None:
    part, draw = figures.DRAWN["attention"][name]
    assert part in attention_result
    draw(attention_result, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_tables_of_attention(attention_result: dict[str, Any]) -> None:
    page = tables.attention_page(attention_result)
    name = "5 x 9 x 4 x 8 full"
    rate = f"{4 * attention_result['table']['rows'][name]['pairs'] * 4 * 8 / 2e6:.2g}"
    assert f"| {name} | forward | 0.002 ({rate}) | 0.002 ({rate}) | - [1] | 0.002 ({rate}) |" in page
    assert "1. NotImplementedError: " in page
    assert "forward time 1, backward time 1, memory forward 4, memory of both ways 4. The paper claims up to 9 times" in page
    assert f"| {name} | both ways | 4 | 5 | - | 16 |" in page
    assert f"Below FA2's in 2 of 4; not: {name}, forward (0.0 MB more); {name[:-4]}causal, forward (0.0 MB more)." in page
    # Both take as long; FlashAttention-2 stands for a peer that can do what it is given.
    assert "| 256 x 1024 x 4 x 64: relative bias | plain | 1.00 | 1.00 |" in page
    (skew,) = attention_result["skew"]["summary"].values()
    assert f"- median 256 full, forward: {skew['forward']:.2f} of the rate of equal lengths" in page


def test_tiles_replace_those_of_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each candidate is timed in place of the shipped tiles, which are there again afterwards; what fails gets a reason."""
    candidates = [attention_tiles.tiles_of(text) for text in ("64,16,4,3", "32,32,4,2,128", "128,128,8,4")]
    timed = []

    def kernel_us(call: object, name: str) -> dict[str, float]:
        chosen = launch.configuration(64, torch.bfloat16, 10_000, 10, allows_tma=False)
        assert chosen._replace(dq=shipped.dq) == shipped
        if chosen.dq.own == 128:
            raise RuntimeError("out of shared memory\nsecond line")
        timed.append(chosen.dq)
        return {"median": 1.0, "min": 1.0, "max": 1.0}

    monkeypatch.setattr(attention_tiles, "kernel_us", kernel_us)
    monkeypatch.setattr(attention_tiles, "Workload", lambda size, device: attention_cases.Workload(size, "cpu"))
    shipped = launch.configuration(64, torch.bfloat16, 10_000, 10, allows_tma=False)
    size = attention_cases.Size(2, 5, 1, 64)
    measured = list(attention_tiles.measure(size, "dq", candidates))
    assert [tiles for tiles, _ in measured] == [shipped.dq, *candidates]
    assert timed == [shipped.dq, *candidates[:2]]
    assert measured[-1][1] == "RuntimeError: out of shared memory"
    assert launch.configuration(64, torch.bfloat16, 10_000, 10, allows_tma=False) == shipped
    beside = attention_tiles.neighbours(shipped.dq)
    assert [tiles for tiles, _ in attention_tiles.measure(size, "dq", [])] == [shipped.dq, *beside]
    assert shipped.dq not in beside
    with pytest.raises(argparse.ArgumentTypeError, match="expected own,visit,warps,stages"):
        attention_tiles.tiles_of("64,32")


def test_time_of_a_kernel_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean of each profile's launches of that kernel alone; a kernel that was not launched has no time."""
    totals = iter([8.0, 2.0, 4.0, 6.0, 10.0])

    class Profile:
        def __enter__(self) -> Profile:
            return self

        def __exit__(self, *_: object) -> None: ...

        def key_averages(self) -> list[SimpleNamespace]:
            of_kernel = SimpleNamespace(key="kernel", device_time_total=next(totals, 0.0), count=2)
            return [SimpleNamespace(key="another", device_time_total=99.0, count=1), of_kernel]

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: Profile())
    assert attention_tiles.kernel_us(lambda: None, "kernel") == {"median": 3.0, "min": 1.0, "max": 5.0}
    with pytest.raises(RuntimeError, match="attention_forward_kernel was not launched"):
        attention_tiles.kernel_us(lambda: None, "attention_forward_kernel")


def test_sasrec_is_trained_with_the_heads_that_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [" ".join([f"u{user}", *(f"i{(user + step) % 12}" for step in range(6))]) for user in range(20)]
    (tmp_path / "events.txt").write_text("\n".join(lines) + "\n")
    saved: dict[str, Any] = {}
    monkeypatch.setattr(train_sasrec, "save", lambda name, result: saved.update({name: result}))
    settings = ["model.embedding_dim=8", "model.num_layers=1", "training.max_epochs=1", "training.batch_size=8", "device=cpu"]
    words = ["--data", str(tmp_path / "events.txt"), "--seeds", "1", *(word for one in settings for word in ("--set", one))]
    monkeypatch.setattr("sys.argv", ["train_sasrec", *words, "--head", "ce,cce,refined,gbce,gbce:2,sce"])
    train_sasrec.main()
    assert list(saved) == ["train_sasrec_heads"]
    assert list(saved["train_sasrec_heads"]["summary"]) == ["ce", "cce", "refined", "gbce", "gbce:2", "sce"]
    assert "test_ndcg@10_left_in" in capsys.readouterr().out
    # Another run of some heads keeps the others, if the machine, the data and the settings are the same.
    former = json.loads(json.dumps(saved["train_sasrec_heads"]))
    facts, workload = {"device": "cpu"}, saved["train_sasrec_heads"]["workload"]
    monkeypatch.setattr(train_sasrec, "other_parts", lambda name, facts: former if facts["device"] == "cpu" else {})
    again = {"gbce": {"seconds": 1}, "bce": {}}
    merged = train_sasrec.with_former(again, "summary", facts, workload)
    assert list(merged) == ["ce", "cce", "refined", "bce", "gbce", "gbce:2", "sce"]
    assert (merged["gbce"], merged["sce"]) == ({"seconds": 1}, former["summary"]["sce"])
    assert train_sasrec.with_former(again, "summary", {"device": "another"}, workload) == again
    assert train_sasrec.with_former(again, "summary", facts, {**workload, "file": "another"}) == again
    figures.train_sasrec(saved["train_sasrec_heads"] | {"environment": {"device": "cpu"}}, tmp_path / "heads.png")
    assert (tmp_path / "heads.png").stat().st_size > 0
    assert train_sasrec.heads("bce, cce-uniform:64") == {
        "bce": HEADS["bce"],
        "cce-uniform:64": {"type": "sampled", "num_negatives": 64},
    }
    for names, message in (
        ("ce,softmax", "got 'softmax', expected some of ce, cce"),
        ("gbce:few", "got 'gbce:few', expected a number of negatives, of cce-uniform"),
        ("in-batch:64", "got 'in-batch:64', expected a number of negatives, of cce-uniform"),
    ):
        monkeypatch.setattr("sys.argv", ["train_sasrec", *words, "--head", names])
        with pytest.raises(SystemExit):
            train_sasrec.main()
        assert message in capsys.readouterr().err
    for options in HEADS.values():
        TrainConfig(head=options)


def test_heads_of_planted_labels_differ_in_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"num_rows": 60, "num_test_rows": 20, "num_labels": 100, "num_features": 200, "num_groups": 5}
    monkeypatch.setattr(planted_labels, "SIZES", small)
    monkeypatch.setattr(planted_labels, "EPOCHS", 1)
    sample = planted_labels.sample_of(0)
    heads = {name: planted_labels.head_of(head, sample, 0) for name, head in planted_labels.HEADS.items()}
    assert (heads["dense"].num_head_labels, heads["without head"].num_head_labels, heads["head of 5 %"].num_head_labels) == (
        100,
        0,
        5,
    )
    assert heads["fixed-fan-in"].group_offsets.diff().unique().tolist() == [1]
    # The first of a group's columns alone.
    assert heads["block-sparse"].supports.shape == (heads["block-sparse"].num_groups,)
    assert not bool((heads["semantic"].supports.diff(dim=1) == 1).all())
    # A label's embedding is the sum of its rows' features, each of length 1.
    assert float(sample.embeddings[sample.counts == 0].abs().sum()) == 0
    alone = int((sample.counts == 1).nonzero()[0])
    torch.testing.assert_close(float(sample.embeddings[alone].norm()), 1.0)
    found = planted_labels.train(planted_labels.HEADS["semantic"], sample, 0, 0.002)
    assert 0 <= found["p@1"] <= 1
    assert found["of_best"] == pytest.approx(found["p@1"] / sample.truth.figures(sample.test)["p@1"])


def test_output_layers_and_their_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every way runs and updates what it says; what does not fit into memory is told, unless it is ours."""

    def timed(*, prepare: Any, sustained: float = 0.0) -> dict[str, Any]:
        call = prepare()
        call()
        call()
        return {"median": 1_000.0}

    monkeypatch.setattr(sparse_output, "replay_us", timed)
    monkeypatch.setattr(sparse_steps, "WORDS", 3)
    for name in ("memory_allocated", "max_memory_allocated", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: 7)
    size = sparse_output.Size(300, 4, 24, 8, 6, (1.0, 2.0, 3.0))
    found = sparse_output.measure(size, device="cpu")
    assert all(error < sparse_output.TOLERANCE for error in found["errors"].values())
    labels, groups = found["labels"], found["groups"]
    assert found["bytes"] == {
        "weight": labels * 12,
        "supports": groups * 24,
        "group_offsets": 8 * groups + 8,
        "dense": labels * 48,
    }
    assert sparse_output.line_of(size, found).startswith(
        "0.0003 M, 4, 24, 8, 6: forward 1.000 (asked 1.0, dense 1.000, 0.00 TB/s); weight 1.000 (asked 2.0"
    )
    assert sparse_output.line_of(size, found).endswith("; loss 1.000 / 1.000, softmax 1.000 / 1.000 ms")
    other = sparse_output.measure(size._replace(labels=100, width=12, group=4), device="cpu")
    blocks = size._replace(adjacent=True)
    assert str(blocks) == f"{size}, adjacent"
    found = sparse_output.measure(blocks, device="cpu")
    assert all(error < sparse_output.TOLERANCE for error in found["errors"].values())
    assert found["bytes"]["supports"] == 4 * found["groups"]
    rows = {"a": found, "b": other}
    for parts_ in ({"labels": rows, "sparsity": rows, "groups": rows}, {"labels": rows}):
        figures.sparse_output_curves({"environment": {"device": "cpu"}, **parts_}, tmp_path / "curves.png")
        assert (tmp_path / "curves.png").stat().st_size > 20_000
    step = sparse_steps.Step(300, 4, 24, 8, 6)
    monkeypatch.setattr(sparse_steps, "HEADS", 2)
    whole = sparse_output.measure_step(step, "cpu")
    assert sparse_output.line_of_step(step, whole) == (
        "0.0003 M, 4, 24, 8, 6: jagged 1.000, encoder 1.000, linear_bce 1.000, unfused 1.000 ms; 50% of a step with the encoder; "
        "a head's step 0.00 / 0.00 GB"
    )
    # The ways of a dense layer are one: their gradients of features agree, before and after an update.
    layer = sparse_output.layer_of(sparse_output.Size(*step), device="cpu")
    ways = sparse_steps.steps_of(step, layer, "cpu")
    gradients = {}
    for name in ("linear_bce", "unfused"):
        torch.manual_seed(0)
        call = ways[name]()
        gradients[name] = [call(), call()]
        assert not torch.equal(*gradients[name])
    for ours, theirs in zip(*gradients.values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.02)

    def full(*, prepare: Any, sustained: float = 0.0) -> dict[str, Any]:
        raise torch.OutOfMemoryError("no memory\nfor it")

    monkeypatch.setattr(sparse_output, "replay_us", full)
    with pytest.raises(torch.OutOfMemoryError):
        sparse_output.measure_step(step, "cpu")
    assert len({str(size) for size in sparse_output.SIZES}) == len(sparse_output.SIZES)
    assert all(size.width <= size.features for curve in sparse_output.CURVES.values() for size in curve)


def test_every_case_of_table_steps_has_options() -> None:
    """An option beside an optimizer that does not take it is an error, and ended the benchmark after its first case."""
    for case in table_steps.CASES.values():
        optimizers = table_steps.fitting(case, table_steps.OPTIMIZERS)
        assert ("adamw" in optimizers) == (case.table_gradient_bytes is None)
        for optimizer in optimizers:
            config = table_steps.config_of(case, optimizer)
            assert (config.table_optimizer, config.table_gradient_bytes) == (optimizer, case.table_gradient_bytes)
