"""The benchmark of what masks and biases cost, on a CPU: its pairs, its checks, what it asks, and the table of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import attention, attention_masks, tables
from benchmarks.attention_masks import CAUSAL, HEADS, KINDS, VARIANTS, Case, Variant, Workload, seen, seen_pairs
from jagged.ops import jagged_attention

# As the benchmark's, of samples of a few rows.
SMALL = {
    "causal": Variant(),
    "targets": Variant(targets=4),
    "window": Variant(window=5),
    "a window as long as samples": Variant(window=30),
    "window and prefix": Variant(window=5, global_prefix=3),
    "contextual": Variant(num_contextual=3),
    "all masks": Variant(targets=4, window=3, num_contextual=2, global_prefix=4),
    "relative bias": Variant(distances=9),
    "time bias": Variant(buckets=32),
    "both biases": Variant(distances=9, buckets=32),
    "everything": Variant(targets=4, window=5, num_contextual=2, global_prefix=3, distances=9, buckets=12),
}


def brute_force(rows: int, targets: int, of: Variant) -> list[list[bool]]:
    """Each pair by the words of the page on attention."""
    history = rows - targets

    def sees(query: int, key: int) -> bool:
        if key >= history:
            return key == query
        if query < of.num_contextual:
            return True
        # A target stands right behind the history.
        place = min(query, history)
        in_window = of.window is None or place - key < of.window or key < of.num_contextual or key < of.global_prefix
        return key <= place and in_window

    return [[sees(query, key) for key in range(rows)] for query in range(rows)]


@pytest.mark.parametrize("variant", SMALL.values(), ids=SMALL)
def test_pairs_are_counted(variant: Variant) -> None:
    """By the mask, by its definition pair by pair, and by the operator, whose log-sum-exp of scores 0 is the logarithm."""
    for rows in (0, 1, 2, 6, 17):
        for targets in {0, min(1, rows), min(4, rows), rows}:
            expected = torch.tensor(brute_force(rows, targets, variant), dtype=torch.bool).view(rows, rows)
            assert torch.equal(seen(rows, targets, variant), expected)
            count = seen_pairs(torch.tensor([rows]), torch.tensor([targets]), variant)
            assert count == int(expected.sum())
            options = {name: getattr(variant, name) for name in ("window", "num_contextual", "global_prefix")}
            zeros, offsets = torch.zeros(rows, 1, 1), torch.tensor([0, rows])
            _, lse = jagged_attention(
                *(zeros,) * 3, offsets, causal=True, num_targets=targets, return_lse=True, scale=1.0, **options
            )
            torch.testing.assert_close(lse[0].exp(), expected.sum(1).float())
    lengths, counts = torch.tensor([3, 0, 17]), torch.tensor([1, 0, 2])
    each = [seen_pairs(lengths[i : i + 1], counts[i : i + 1], variant) for i in range(3)]
    assert seen_pairs(lengths, counts, variant) == sum(each)


def test_sizes_of_the_benchmark() -> None:
    """Pairs of causal attention and of a window in closed form, and every case behind the one it is beside."""
    lengths, none = torch.full((2,), 4_096), torch.zeros(2, dtype=torch.long)
    assert seen_pairs(lengths, none, VARIANTS[CAUSAL]) == 2 * 4_096 * 4_097 // 2
    assert seen_pairs(lengths, none, VARIANTS["window of 512"]) == 2 * (4_096 * 512 - 512 * 511 // 2)
    found = attention_masks.cases()
    assert len(found) == 2 * 3 * 2 * len(VARIANTS)
    order = list(found)
    assert all(order.index(case.beside.name) <= order.index(name) for name, case in found.items())
    some = attention_masks.chosen("cuda", ["1024 x 4 x 64 SiLU: time"])
    assert [case.variant for case in some.values()] == [CAUSAL, "time bias"]
    assert attention_masks.chosen("cuda", ["no such case"]) == {}
    assert set(attention_masks.MOST_WITH_BIAS) == set(attention_masks.MOST_WITH_BIAS_NARROW) < set(VARIANTS)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_masks, "VARIANTS", SMALL)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", SMALL)
def test_what_is_timed_is_right(variant: str, kind: str) -> None:
    w = Workload(Case(3, 17, 16, kind, variant), "cpu")
    of = SMALL[variant]
    assert w.errors().keys() == {"output", *w.names}
    tables_of = [name for name, count in (("relative_bias", of.distances), ("time_bias", of.buckets)) if count]
    assert list(w.names[3:]) == tables_of
    assert [gradient.shape for gradient in w.both()] == [x.shape for x in w.inputs]
    assert w.forward().shape == (3 * 17, HEADS, 16)
    if w.times is not None:
        times = w.times.view(3, 17)
        assert bool((times.diff(dim=1) >= 0).all())
        assert 0 <= int(times.min()) <= int(times.max()) < 86_400
    assert int(w.targets.min()) == 0 if not of.targets else 1 <= int(w.targets.min()) <= int(w.targets.max()) <= of.targets


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", ["output", "relative_bias", "time_bias"])
def test_what_is_wrong_gets_no_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Workload._exact
    monkeypatch.setattr(Workload, "_exact", lambda self: {**right(self), name: 1.1 * right(self)[name]})
    case = Case(2, 17, 16, "SiLU", "both biases")
    part = attention_masks.run({case.name: case}, "cpu", lambda call: pytest.fail("it is wrong"))
    (line,) = attention_masks.failed(part)
    assert line.startswith(f"masks, {case.name}: {case.name}: {name} is off by 0.09")
    assert attention.ours_failed({"environment": {}, "masks": part}) == [line]


def timed(microseconds: dict[str, tuple[float, float]], case: Case, pairs: int) -> dict[str, Any]:
    forward, backward = microseconds[case.variant]
    return {"size": case._asdict(), "pairs": pairs, "us": {"forward": forward, "backward": backward}}


def test_what_is_asked() -> None:
    """Masks a pair, biases as a whole and more leniently at narrow heads."""
    us = {CAUSAL: (100.0, 200.0), "window of 512": (55.0, 112.0), "time bias": (130.0, 300.0)}
    rows, found = {}, {}
    for width in (32, 64):
        for variant in us:
            case = Case(1, 2_048, width, "softmax", variant)
            rows[case.name] = timed(us, case, 500 if variant == "window of 512" else 1_000)
            found[width, variant] = attention_masks.compared(rows, case)
    assert found[32, CAUSAL] == {}
    window = found[64, "window of 512"]
    assert window["ratio"] == pytest.approx({"forward": 0.55, "backward": 0.56})
    assert window["per_pair"] == pytest.approx({"forward": 1.1, "backward": 1.12})
    assert (window["asked"], window["met"]) == ({"forward": 1.1, "backward": 1.1}, False)
    assert found[64, "time bias"] == {
        "ratio": {"forward": 1.3, "backward": 1.5},
        "asked": {"forward": 1.25, "backward": 1.4},
        "met": False,
    }
    assert found[32, "time bias"]["met"]
    assert attention_masks.bars(Case(1, 1, 128, "SiLU", "both biases")) == {"forward": 1.35, "backward": 1.6}
    assert attention_masks.bars(Case(1, 1, 32, "SiLU", "both biases")) == {"forward": 1.7, "backward": 2.0}
    assert attention_masks.bars(Case(1, 1, 128, "SiLU", "relative bias")) == {"forward": 1.15, "backward": 1.25}


def in_turn(call: Any) -> dict[str, Any]:
    """What would be timed runs; forward takes 2 us, both 7."""
    return {"median": 7.0 if isinstance(call(), tuple) else 2.0}


@pytest.mark.usefixtures("small")
def test_a_run_and_its_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(attention_masks, "SIZES", {"cpu": ((2, 17),)})
    monkeypatch.setattr(attention_masks, "WIDTHS", {"cpu": (16, 8)})
    found = attention_masks.cases("cpu")
    saved: list[int] = []
    part = attention_masks.run(found, "cpu", in_turn, lambda so_far: saved.append(len(so_far["rows"])), {"of before": {}})
    assert saved == list(range(2, len(found) + 2))
    said = capsys.readouterr().out.splitlines()
    assert len(said) == len(found)
    assert said[0].startswith("masks, 2 x 17 x 4 x 16, SiLU: causal: 2.0 / 5.0 us, 306 pairs; off by ")
    name = "2 x 17 x 4 x 8, softmax: window"
    row = part["rows"][name]
    assert row["us"] == {"forward": 2.0, "backward": 5.0}
    pairs = 306 / row["pairs"]
    assert row["per_pair"] == pytest.approx({"forward": pairs, "backward": pairs})
    assert (
        f"masks, {name}: 2.0 / 5.0 us, {row['pairs']} pairs; 1.00 / 1.00 of causal; {pairs:.2f} / {pairs:.2f} a pair; asked"
        in str(said)
    )
    facts = {"device": "NVIDIA Made-Up", "torch": "2", "triton": "3", "fbgemm_gpu": None, "bf16_matmul_tflops": 700.0}
    result = json.loads(json.dumps({"environment": facts, "masks": part}))
    page = tables.attention_page(result)
    assert page.count(tables.MASKS) == 1
    assert "| 2 samples of 17 rows, softmax | width 8 | width 16 |\n|---|---:|---:|\n| causal | 2.0 / 5.0 | 2.0 / 5.0 |\n" in page
    assert f"| window | 1.00 / 1.00 ({pairs:.2f} / {pairs:.2f}) | " in page
    assert "| both biases | 1.00 / 1.00 | 1.00 / 1.00 |" in page
    del result["masks"]
    assert "masks" not in tables.attention_page(result)


def test_a_run_on_a_cpu_saves_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("benchmarks.common.ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["attention", "--device", "cpu", "--only", "masks", "--cases", "SiLU: both"])
    attention.main()
    said = [line.split(": ")[1] for line in capsys.readouterr().out.splitlines()]
    assert said == ["causal", "both biases"]
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(sys, "argv", ["attention", "--device", "cpu", "--only", "table"])
    with pytest.raises(SystemExit):
        attention.main()
    assert "which has one part beside masks" in capsys.readouterr().err
