"""The host's times, and two versions of jagged in one run: what is called and compared, at sizes that cost nothing."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from benchmarks import (
    attention_cases,
    before_after,
    cross_entropy,
    cross_entropy_cases,
    embedding_bags,
    embedding_cases,
    host_time,
    tables,
)
from benchmarks.attention_cases import Mask
from benchmarks.before_after import compared, is_longer, told
from benchmarks.jagged_cases import CASES
from benchmarks.jagged_ops import Size
from benchmarks.trees import HERE, Version, measured, tree_of


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few short samples, few items."""
    attention = attention_cases.Size(3, 4, 2, 8, dtype="fp32")
    monkeypatch.setattr(host_time, "SMALL", Size(3, 4, 4, 2, dtype="fp32"))
    monkeypatch.setattr(host_time, "SMALL_ATTENTION", attention)
    monkeypatch.setattr(host_time, "EAGER_ATTENTION", {"3 x 4": attention})
    losses = {name: (method, cross_entropy_cases.Size(8, 20, 4, "fp32", 3 * ("sampled" in method)))
              for name, (method, _) in host_time.EAGER_LOSSES.items()}  # fmt: skip
    monkeypatch.setattr(host_time, "EAGER_LOSSES", losses)


def test_host_times(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fbgemm_gpu.sll")
    monkeypatch.setattr(host_time, "CALLS", (10, 10))
    monkeypatch.setattr(host_time, "TURNS", 1)
    found = host_time.measure(["operators", "eager"], "cpu", True, [])
    beside = {name: build(host_time.SMALL.workload("cpu")).peers for name, build in CASES.items()}
    assert found["operators"].keys() == {name for name, peers in beside.items() if peers} | {"jagged_attention"}
    for name, row in found["operators"].items():
        assert row["jagged"].keys() == {"forward", "forward_backward", "one_thread"}, row
        assert row.keys() == {"jagged", *beside.get(name, ("sll", "fa2"))}
    assert found["operators"]["jagged_attention"]["fa2"]["failed"].startswith("NotImplementedError: Could not run")
    assert len(found["eager"]) == 4
    for row in found["eager"].values():
        assert row["jagged"]["forward_backward"].keys() == {"mean", "host", "synchronised"}
    # As on a GPU, where there is a graph to compare with.
    monkeypatch.setattr(host_time, "replay_us", lambda call: {"median": 2.0, "captured": True})
    key = ("jagged", "forward")
    on_gpu = host_time.figures_of("eager", {key: lambda: None}, True)[key]
    assert on_gpu["ratio"] == on_gpu["mean"] / 2.0
    # Of three rounds in turns that with the median mean is kept, as a whole.
    monkeypatch.setattr(host_time, "TURNS", 3)
    means, other = [5.0, 30.0, 4.0], ("fa2", "forward")
    asked: list[str] = []

    def timed(call: Any, calls: int) -> dict[str, float]:
        asked.append(call())
        return {"mean": means[len(asked) // 2 - 1] if call() == "other" else 1.0, "host": float(len(asked)), "synchronised": 9.0}

    monkeypatch.setattr(host_time, "eager_us", timed)
    of_both = host_time.figures_of("eager", {key: lambda: "ours", other: lambda: "other"}, True)
    assert asked == ["ours", "other"] * 3
    assert of_both[other] == {"mean": 5.0, "host": 2.0, "synchronised": 9.0, "graph": 2.0, "ratio": 2.5}
    in_turns = host_time.figures_of("operators", {key: lambda: None, ("sll", "forward"): _fail}, True)
    assert in_turns[key].keys() == {"median", "min", "max", "gpu_us"}
    assert in_turns["sll", "forward"] == {"failed": "RuntimeError: no such call"}
    assert host_time.measure(["eager"], "cpu", False, ["nothing"]) == {"eager": {}}


def _fail() -> None:
    raise RuntimeError("no such call")


def test_host_times_of_two_versions() -> None:
    row = {
        "jagged": {"forward": {"median": 10.0, "gpu_us": 3.0}, "forward_backward": {"median": 30.0}},
        "sll": {"forward": {"median": 40.0}, "forward_backward": {"failed": "wrong"}},
        "fbgemm": {"failed": "missing"},
    }
    found: dict[str, Any] = {"operators": {"softmax": row}}
    saved: dict[str, Any] = {"operators": {"rows": found["operators"]}}

    def version(*times: float) -> dict[str, Any]:
        return {"operators": {"softmax": {"jagged": {"forward": {"median": times[0]}, "forward_backward": {"median": times[1]}}}}}

    host_time.with_former(found, [(version(25.0, 60.0), version(12.0, 30.0)), (version(20.0, 65.0), version(10.0, 33.0))])
    assert (row["before"], row["after"]) == (
        {"forward": 20.0, "forward_backward": 60.0},
        {"forward": 10.0, "forward_backward": 30.0},
    )
    row["ratios"] = host_time.ratios(row)
    assert row["ratios"] == {"sll": {"forward": 0.25}, "fbgemm": {}, "before": {"forward": 0.5, "forward_backward": 0.5}}
    assert host_time.line("softmax", row) == (
        "softmax: jagged 10.0 (GPU 3.0) / 30.0; sll 40.0 / wrong; fbgemm missing; before 20.0 / 60.0; after 10.0 / 30.0; "
        "times sll's: 0.25; times fbgemm's: ; times before's: 0.50 / 0.50"
    )
    facts = {"device": "NVIDIA Made-Up", "torch": "2", "triton": "3", "fbgemm_gpu": "1"}
    call = {"mean": 5.0, "host": 4.0, "synchronised": 9.0, "graph": 4.5, "ratio": 1.111}
    of_attention = {"attention": {"jagged": {"forward": call, "one_thread": call}}}
    page = tables.host_page({"environment": facts, **saved, "eager": {"rows": of_attention}})
    assert "microseconds of the host, forward / forward and backward:" in page
    assert "| softmax | 10.0 / 30.0 | 40.0 / - | - | 20.0 / 60.0 |" in page
    assert "| attention | jagged | forward | 5.0 | 4.5 | 1.11 | 9.0 |" in page
    assert "| attention | jagged | the same, on one thread | 5.0 | 4.5 | 1.11 | 9.0 |" in page
    row["jagged"]["one_thread"] = {"median": 20.0}
    page = tables.host_page({"environment": facts, **saved})
    assert "microseconds of the host, forward / forward and backward / the same, on one thread:" in page
    assert "| softmax | 10.0 / 30.0 / 20.0 | 40.0 / - / - | - | 20.0 / 60.0 / - |" in page
    assert host_time.summary({"softmax": row})["before"]["forward"] == {"median": 0.5, "largest": 0.5}


def test_another_version_is_measured_in_a_process_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a folder with jagged, ops and modules"):
        tree_of(str(HERE))
    (tmp_path / "jagged").symlink_to(HERE / "jagged")
    words = ["--device", "cpu", "--only", "operators", "--cases", "jagged_softmax"]
    rows = measured("benchmarks.host_time", tree_of(str(tmp_path)), words)
    assert rows["operators"]["jagged_softmax"].keys() == {"jagged"}


def test_rows_of_both_versions_can_be_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    line = {"kind": "one-hot", "rows": 9, "dims": [4, 8], "coverage": 0.5}
    monkeypatch.setitem(embedding_cases.SHAPES, "tiny", [line])
    loss = cross_entropy.Case(cross_entropy_cases.Size(8, 20, 4, "fp32"), ("jagged",), ("forward", "both", "backward"))
    best = cross_entropy.Case(cross_entropy_cases.Size(8, 20, 4, "fp32", k=3), ("jagged",))
    found = [
        before_after._jagged(Size(3, 4, 4, 2, dtype="fp32"), "jagged_split", "cpu"),
        before_after._attention(attention_cases.Size(3, 4, 2, 8, Mask(causal=True), dtype="fp32"), "cpu"),
        before_after._loss(loss, "jagged", "cpu"),
        before_after._loss(best, "jagged", "cpu"),
        before_after._bags(embedding_bags.Case("tiny", (5,), ("jagged",)), "cpu"),
    ]
    assert [list(ways) for ways in found] == [["forward", "backward"], ["forward", "backward"], ["forward", "both", "backward"],
                                              ["forward"], ["forward", "backward"]]  # fmt: skip
    for ways in found:
        for prepare in ways.values():
            timed = prepare()
            timed()
            timed()
    for family in before_after.FAMILIES:
        every, few = (before_after.rows_of(family, quick) for quick in (False, True))
        assert 0 < len(few) < len(every)
        # To the processes that compile them.
        assert pickle.loads(pickle.dumps(every)).keys() == every.keys()

    def make(device: str) -> before_after.Ways:
        raise NotImplementedError("no such option")

    made = {"good": lambda device: found[0], "bad": make}
    monkeypatch.setitem(before_after.FAMILIES, "jagged_ops", (lambda quick: iter(made.items()), lambda prepare: {"median": 5.0}))
    assert list(before_after.rows_of("jagged_ops", False, ["good"])) == ["good"]
    version = before_after.Rounds(False, "cpu")
    assert version.answer(["make", "jagged_ops", "bad"]) == {"failed": "NotImplementedError: no such option"}
    assert version.answer(["make", "jagged_ops", "good"]) is None
    assert version.answer(["time"]) == {"forward": 5.0, "backward": 5.0}
    assert version.answer(["drop"]) is None
    assert version.answer(["time"]) == {}


class Asked:
    """A version that gives these times, one after the other, and fails where it has none."""

    def __init__(self, *times: tuple[float, float] | str, turns: list[object] | None = None) -> None:
        self.times = list(times)
        self.asked: list[str] = []
        self.turns = turns

    def ask(self, request: list[str]) -> Any:
        self.asked.append(request[0])
        if self.turns is not None:
            self.turns.append(self)
        if request[0] != "time":
            return None
        given = self.times.pop(0)
        return {"failed": given} if isinstance(given, str) else dict(zip(("forward", "backward"), given, strict=True))


def test_rows_are_timed_in_turns() -> None:
    # The first round of each is of a GPU that has rested.
    before, after = Asked((1.0, 1.0), (10.0, 8.0), (11.0, 8.5)), Asked((5.0, 5.0), (9.0, 8.2), (8.0, 8.1))
    assert compared([before, after], "ops", "a") == {  # type: ignore[list-item]
        "forward": {"before": 10.5, "after": 8.5, "ratio": 8.5 / 10.5},
        "backward": {"before": 8.25, "after": pytest.approx(8.15), "ratio": pytest.approx(8.15 / 8.25)},
    }
    assert before.asked == after.asked == ["make", "time", "time", "time", "drop"]
    # What took longer is measured four times more, and then twelve times; the rounds before count too.
    before, after = Asked(*[(10.0, 8.0)] * 7), Asked(*[(10.4, 8.0)] * 3, *[(10.2, 8.0)] * 4)
    assert compared([before, after], "ops", "a")["forward"] == {"before": 10.0, "after": 10.2, "ratio": 1.02}  # type: ignore[list-item]
    before, after = Asked(*[(10.0, 8.0)] * 12, *[(11.0, 9.0)] * 7), Asked(*[(10.4, 8.0)] * 19)
    assert compared([before, after], "ops", "a")["forward"] == {"before": 10.0, "after": 10.4, "ratio": 1.04}  # type: ignore[list-item]
    assert not before.times
    assert not after.times
    for times, asked in (((), ["make", "time", "drop"]), (((1.0, 1.0),), ["make", "time", "time", "drop"])):
        before, after = Asked((10.0, 8.0), (10.0, 8.0)), Asked(*times, "out of memory")
        assert compared([before, after], "ops", "a") == {"failed": {"after": "out of memory"}}  # type: ignore[list-item]
        assert before.asked == after.asked == asked


def test_versions_begin_rounds_in_turns() -> None:
    turns: list[object] = []
    before, after = (Asked(*[(1.0, 1.0)] * 3, turns=turns) for _ in range(2))
    compared([before, after], "ops", "a")  # type: ignore[list-item]
    assert turns == [before, after, before, after, before, after, after, before, before, after]


def test_what_takes_longer_is_told() -> None:
    def of(before: float, after: float) -> dict[str, float]:
        return {"before": before, "after": after, "ratio": after / before}

    rows = {"a": {"forward": of(10.0, 8.0), "backward": of(8.0, 8.8)}, "b": {"failed": {"before": "missing"}}}
    assert list(told("ops", rows)) == [
        "ops: 2 times, 0.938 of those before on the geometric mean",
        "  longer: a, backward: 8.0 to 8.8 us, 1.100",
        "  failed before: b: missing",
    ]
    assert [is_longer(row) for row in rows.values()] == [True, False]
    assert not is_longer({"forward": of(1.0, 1.02)})


def test_versions_answer(tmp_path: Path) -> None:
    (tmp_path / "jagged").symlink_to(HERE / "jagged")
    for tree in (tmp_path, None):
        with Version("tests.answers", tree, ["twice"]) as version:
            assert [version.ask({"a": 1}), version.ask([2])] == [["twice", {"a": 1}], ["twice", [2]]]
    with pytest.raises(RuntimeError, match=r"-P -m tests.answers --serve fail ended with 3$"):
        Version("tests.answers", None, ["fail"])
