"""The benchmark of bodies on a CPU: what it compares and says, and that what differs is not measured."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor

from benchmarks import hstu, tables

BODIES = ("hstu", "dlrm_v4_hstu", "dlrm_v3")


def test_a_run_on_a_cpu_saves_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(hstu, "save", lambda *_: pytest.fail("a CPU's times are nobody's"))
    monkeypatch.setattr(sys, "argv", ["hstu", "--device", "cpu"])
    hstu.main()
    said = [line.split(": {")[0] for line in capsys.readouterr().out.splitlines() if ": {" in line]
    ways = ("ours", "composed", "recompute", "padded")
    expected = [f"{name}, {way}" for name in BODIES for way in ways if (name, way) != ("hstu", "padded")]
    of_others = [f"{name}, {way}" for name in ("transformer", "requests") for way in ways[:2]]
    assert said == expected + of_others


def test_one_part_and_what_it_takes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["hstu", "--device", "cpu", "--only", "dlrm_v4_hstu"])
    hstu.main()
    first, *others = capsys.readouterr().out.splitlines()
    assert first.startswith("dlrm_v4_hstu has 130 rows in 5 samples: 12 to 40 rows, median 26, mean 26.0; 5 of them targets; ")
    # One target sees what a causal row there sees.
    assert first.endswith(f" {sum(n * (n + 1) // 2 for n in (12, 40, 26, 33, 19)):,} pairs of rows that see one another")
    assert [line.split(":")[0] for line in others] == [
        f"dlrm_v4_hstu, {way}" for way in ("ours", "composed", "recompute", "padded")
    ]


def test_published_shapes() -> None:
    size = hstu.SIZES["cuda"]["dlrm_v4_hstu"]
    lengths = hstu.batch_of(size._replace(width=1), "cpu")[1].diff()
    assert (size.width, size.heads, size.blocks) == (512, 4, 3)
    # 4,086 events, 8 contextual rows and a candidate; 2.727 million rows in 1,024 samples.
    assert hstu.described(lengths) == {"least": 1_231, "median": 2_652.0, "mean": 2_663.0, "most": 4_086 + 8 + 1}
    assert round(float(lengths.float().mean()) * 1_024 / 1e6, 3) == 2.727
    size = hstu.SIZES["cuda"]["dlrm_v3"]
    _, offsets, targets = hstu.batch_of(size._replace(width=1), "cpu")
    assert (size.blocks, offsets.shape[0] - 1, int(offsets[-1]) // 1_000, int(offsets.diff().max())) == (5, 32, 99, 4_020)
    assert targets is not None
    assert targets.unique().tolist() == [2_048]


@pytest.mark.parametrize("name", [*BODIES, "transformer"])
def test_rows_and_targets(name: str) -> None:
    size = hstu.SIZES["cpu"][name]
    rows, offsets, targets = hstu.batch_of(size, "cpu")
    lengths = offsets.diff()
    assert list(rows.shape) == [size.rows, size.width]
    assert int(offsets[-1]) == size.rows
    assert int(lengths.min()) == size.longest if size.is_even else int(lengths.min()) > 0
    assert int(lengths.max()) <= size.longest
    assert (targets is not None) == (name != "transformer")
    if targets is not None:
        assert bool(((targets >= size.fewest) & (targets <= lengths)).all())
    if size.samples:
        assert (len(lengths), int(lengths.min()), int(lengths.max())) == (size.samples, size.least, size.longest)


@pytest.mark.parametrize("scores", [2**29, 1])
@pytest.mark.parametrize("name", ["dlrm_v4_hstu", "dlrm_v3"])
def test_padded_rows_come_to_the_same(name: str, scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All samples at once and each by itself: output, and gradients of rows and of every weight."""
    monkeypatch.setattr(hstu, "MOST_SCORES", scores)
    size = hstu.SIZES["cpu"][name]
    rows, offsets, targets = hstu.batch_of(size, "cpu")
    assert targets is not None
    blocks = hstu.blocks_of(name, size, False, "cpu").double()
    values, upstream = rows.double().requires_grad_(), torch.randn(rows.shape, dtype=torch.float64)
    x = JaggedTensor(values, offsets=offsets)
    padded = hstu.PaddedHSTU(blocks, offsets, targets, size.longest)(x, targets).values()
    for block in blocks:
        x = block(x, targets)
    torch.testing.assert_close(padded, x.values())
    found, expected = (torch.autograd.grad(y, [values, *blocks.parameters()], upstream) for y in (padded, x.values()))
    torch.testing.assert_close(found, expected)


def test_requests() -> None:
    lengths = hstu.request_lengths(hstu.REQUESTS["cuda"])
    # A first step and 90 of which seven in ten have a hundred events.
    assert float(lengths.float().mean()) - 2_049 == pytest.approx(100 + 90 * 0.7 * 100, rel=0.02)
    found = hstu.scored(hstu.REQUESTS["cpu"], "cpu")
    assert 0 < found["ours"]["p50"] <= found["ours"]["p99"]
    assert found["lengths"]["least"] > 1 + 8 + 10


def test_requests_that_differ_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    forward: Any = hstu.ComposedHSTUBlock.forward

    def wrong(self: Any, x: JaggedTensor, num_targets: Tensor | None) -> JaggedTensor:
        return JaggedTensor(1.1 * forward(self, x, num_targets).values(), offsets=x.offsets())

    monkeypatch.setattr(hstu.ComposedHSTUBlock, "forward", wrong)
    with pytest.raises(ArithmeticError, match=r"^requests: ours differs from composed by \d\.\de-\d\d of its norm$"):
        hstu.scored(hstu.REQUESTS["cpu"], "cpu")


def test_the_page_of_bodies() -> None:
    """Of parts with and without what came later, and of requests."""
    time = {"median": 2_000.0, "sustained": {"mean": 3_000.0}}
    row = {"forward": time, "both": time, "eager": {"mean": 4_000.0}, "bytes": 2**30, "error": 0.1, "gradient_error": 0.2}
    facts = {"device": "NVIDIA Made-Up", "torch": "2", "triton": "3", "fbgemm_gpu": None}
    sizes = {name: size._asdict() for name, size in hstu.SIZES["cuda"].items()}
    former = {name: value for name, value in sizes["hstu"].items() if name not in ("least", "fewest", "samples")}
    result: dict[str, Any] = {
        "environment": facts,
        **{name: {"size": size, "samples": 7, "ours": row, "padded": row} for name, size in sizes.items()},
        "requests": {
            **{"requests": 200, "candidates": 2_048, "lengths": {"least": 7_130, "most": 9_788}},
            **{way: {"p50": 1_500.0, "p99": 2_500.0, "mean": 1_600.0} for way in ("ours", "composed")},
        },
    }
    result["hstu"]["size"] = former
    page = tables.bodies_page(result)
    for words in (
        "99,000 rows in 7 samples of 1 to 2,048 rows, of which the last 1 to 20 are targets; milliseconds",
        "340,864 rows in 7 samples of 1,231 to 4,095 rows, the last of which is a target; milliseconds",
        "99,008 rows in 7 samples of 2,168 to 4,020 rows, of which the last 2,048 are targets; milliseconds",
        "44,032 rows in 7 samples of 172 rows; milliseconds",
        "| PyTorch's operations on padded rows | 2.00 / 3.00 | 2.00 / 3.00 | 4.00 | 1.00 GiB | 1.0e-01 | 2.0e-01 |",
        "on 200 requests, one after another, each of 2,048 candidates behind a history, 7,130 to 9,788 rows together",
        "| PyTorch's operations, our attention | 1.50 | 2.50 |",
    ):
        assert words in page
    del result["requests"]
    assert "requests" not in tables.bodies_page(result)


def test_blocks_that_differ_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    forward: Any = hstu.ComposedTransformerBlock.forward

    def wrong(self: Any, x: JaggedTensor, num_targets: Tensor | None) -> JaggedTensor:
        return JaggedTensor(1.1 * forward(self, x, num_targets).values(), offsets=x.offsets())

    # Wrong as the reference, and right as what is compared.
    monkeypatch.setattr(hstu.ComposedTransformerBlock, "forward", wrong)
    with pytest.raises(ArithmeticError, match=r"^transformer, ours: error \d\.\de-\d\d, composed \d\.\de-\d\d$"):
        hstu.measured("transformer", hstu.SIZES["cpu"]["transformer"], "cpu")


def test_the_same_weights_each_time() -> None:
    size = hstu.SIZES["cpu"]["hstu"]
    first, second = (hstu.blocks_of("hstu", size, recompute, "cpu").state_dict() for recompute in (False, True))
    assert all(torch.equal(of, second[name]) for name, of in first.items())
