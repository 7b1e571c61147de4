"""The benchmark of bodies on a CPU: what it compares and says, and that what differs is not measured."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor

from benchmarks import hstu


def test_a_run_on_a_cpu_saves_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(hstu, "save", lambda *_: pytest.fail("a CPU's times are nobody's"))
    monkeypatch.setattr(sys, "argv", ["hstu", "--device", "cpu"])
    hstu.main()
    said = [line.split(": {")[0] for line in capsys.readouterr().out.splitlines() if ": {" in line]
    assert said == ["hstu, ours", "hstu, composed", "hstu, recompute", "transformer, ours", "transformer, composed"]


@pytest.mark.parametrize("name", ["hstu", "transformer"])
def test_rows_and_targets(name: str) -> None:
    size = hstu.SIZES["cpu"][name]
    rows, offsets, targets = hstu.batch_of(size, "cpu")
    lengths = offsets.diff()
    assert list(rows.shape) == [size.rows, size.width]
    assert int(offsets[-1]) == size.rows
    assert int(lengths.min()) == size.longest if size.is_even else int(lengths.min()) > 0
    assert int(lengths.max()) <= size.longest
    assert (targets is not None) == (name == "hstu")
    if targets is not None:
        assert bool(((targets >= 1) & (targets <= lengths)).all())


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
