"""The benchmark of cached histories on a CPU: what it compares and says, and that what differs is not measured."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor

from benchmarks import history_cache
from jagged.modules.history_cache import CachedKeys


def test_a_run_on_a_cpu_saves_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(history_cache, "save", lambda *_: pytest.fail("a CPU's times are nobody's"))
    monkeypatch.setattr(sys, "argv", ["history_cache", "--device", "cpu"])
    history_cache.main()
    said = capsys.readouterr().out.splitlines()
    assert [line.split(": {")[0] for line in said] == ["2 users", "scoring"]


def test_what_it_measures() -> None:
    size = history_cache.SIZES["cpu"]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        row = history_cache.measured_block(size, 3, "cpu")
        scoring = history_cache.measured_scoring(size, "cpu")
    assert row["times"]["eager"] == row["whole"]["eager_us"]["mean"] / row["cached"]["eager_us"]["mean"]
    # Sixty-four rows of two heads of sixteen more than the events, so that no user is given up.
    assert row["cache_bytes"] >= 3 * size.events * (2 * size.width * 2 + 8)
    # Keys and values of 64 events and 4 candidates of three users, in 16 bits, read and written.
    assert row["keys_bytes"] == 2 * 3 * 68 * 2 * size.width * 2
    assert row["keys"]["eager_us"]["mean"] > 0
    assert scoring["users"] == size.users[-1]
    for name in ("cached", "whole"):
        assert 0 < scoring[name]["p50_ms"] <= scoring[name]["p99_ms"]


def test_wrong_keys_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if each key were that of the row before."""
    extended = CachedKeys.extended

    def wrong(self: CachedKeys, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        keys, *others = extended(self, k, v)
        return keys.roll(1, 0), *others

    monkeypatch.setattr(CachedKeys, "extended", wrong)
    message = r"^3 users: cached (nan|\d\.\de[+-]\d\d) from float32, whole histories \d\.\de[+-]\d\d$"
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match=message):
        history_cache.measured_block(history_cache.SIZES["cpu"], 3, "cpu")
