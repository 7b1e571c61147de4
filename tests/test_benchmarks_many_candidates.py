"""The benchmark of many candidates a request: what is compared is the same computation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import many_candidates
from benchmarks.figures import DRAWN


@pytest.mark.parametrize("name", list(many_candidates.MODELS))
def test_expanded_requests_give_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores, loss and all gradients."""
    monkeypatch.setattr(many_candidates, "TABLE", 30)
    inputs = many_candidates.inputs_of()
    model = many_candidates.model_of(name, inputs, "cpu")
    batch = many_candidates.batch_of(inputs, 4, 3, 6, "cpu")
    other = many_candidates.expanded(batch, inputs)
    assert len(other) == 12
    results = []
    for given in (batch, other):
        model.zero_grad()
        out = model(given)
        out.loss.backward()
        logits = [out.scores[task].logits for task in model.tasks]
        results.append([out.loss, *logits, *(of.grad.clone() for of in model.parameters() if of.grad is not None)])
    assert len(results[0]) == 3 + len(list(model.parameters()))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)


def test_all_ways_are_measured_and_those_that_would_not_fit_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_candidates, "TABLE", 30)
    monkeypatch.setattr(many_candidates, "measure", lambda model, batch, device: {"ms": len(batch.rows) + 5.0, "bytes": 1000})
    rows = many_candidates.measured("dlrm", 4, 6, "cpu", room=70_000)
    assert list(rows) == ["1", "16", "128", "1024"]
    assert rows["16"]["expanded"] == {"ms": 69.0, "bytes": 1000}
    assert rows["1024"]["expanded"] == {"ms": 4101.0, "bytes": 1000}
    assert {row["of_line"] for row in rows.values()} == {1.0}
    tight = many_candidates.measured("dlrm", 4, 6, "cpu", room=7_999)
    assert tight["128"]["expanded"] == {"forecast_bytes": 128_000}
    assert tight["1024"]["expanded"] == {"forecast_bytes": 1_024_000}


def test_the_figure_is_drawn(tmp_path: Path) -> None:
    """Also where expanded requests would not fit."""
    rows = {
        str(count): {
            "jagged": {"ms": 9.0 + count, "gpu_ms": 1.0 + count, "bytes": 10**8 * count},
            "expanded": {"ms": 9.0 * count, "gpu_ms": 2.0 * count, "bytes": 10**9 * count},
        }
        for count in many_candidates.CANDIDATES
    }
    rows["1024"]["expanded"] = {"forecast_bytes": 10**12}
    result = {"environment": {"device": "a GPU"}, "requests": 8, "models": {"ranking": rows, "din": rows}}
    part, draw = DRAWN["many_candidates"]["many_candidates"]
    assert part in result
    draw(result, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
