"""Rows that stand for others, which were left out of the table: figures are those of all of them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from jagged.pointwise import PointwiseMetrics

RATE = 0.25


def sample(count: int = 400) -> dict[str, Tensor]:
    """Rows with ties, weights, users and requests, of which some are 1 of 4."""
    generator = torch.Generator().manual_seed(0)
    found = {
        "logits": torch.randint(-6, 7, (count,), generator=generator) / 4,
        "labels": torch.randint(2, (count,), generator=generator),
        "weights": torch.randint(1, 4, (count,), generator=generator).double(),
        "users": torch.randint(9, (count,), generator=generator),
        "requests": torch.randint(90, (count,), generator=generator),
    }
    # Of a label that depends on another one some negatives were kept all.
    left_out = (found["labels"] == 0) & (torch.rand(count, generator=generator) < 0.7)
    return {**found, "rates": torch.where(left_out, RATE, 1.0)}


def whole(rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """The table with each row as often as it stands for."""
    times = (1 / rows["rates"]).round().long()
    return {name: of.repeat_interleave(times, 0) for name, of in rows.items() if name != "rates"}


def measured(rows: dict[str, Tensor], parts: int = 1, **options: int) -> PointwiseMetrics:
    metrics = PointwiseMetrics("click", ks=(2,), training_mean=0.3, **options)
    for part in range(parts):
        of = {name: values[part::parts] for name, values in rows.items()}
        slices = {"device": of["users"] % 2}
        metrics.update(of.pop("logits"), of.pop("labels"), None, of.pop("weights"), slices=slices, **of)
    return metrics


@pytest.mark.parametrize(("parts", "options"), [(1, {}), (3, {"limit": 50}), (2, {"bins": 8})])
def test_figures_are_those_of_all_rows(parts: int, options: dict[str, int]) -> None:
    rows = sample()
    found, expected = measured(rows, parts, **options), measured(whole(rows), **options)
    plain = measured({name: of for name, of in rows.items() if name != "rates"}, **options)
    figures, wanted, others = found.compute(), expected.compute(), plain.compute()
    # The candidates of a request are those that are there.
    of_requests = ("ndcg@2", "mrr", "hit_rate@2", "rows")
    assert list(figures) == list(wanted)
    for name, value in figures.items():
        same = others if name in of_requests else wanted
        assert value == pytest.approx(same[name], rel=1e-12), name
    assert figures["calibration"] < 0.7 * others["calibration"] or figures["calibration"] > 1.3 * others["calibration"]
    for device, of in found.compute_slices().items():
        assert of["logloss"] == pytest.approx(expected.compute_slices()[device]["logloss"], rel=1e-12)
    for one, other in zip(found.calibration_bins(), expected.calibration_bins(), strict=True):
        assert one == pytest.approx(other, rel=1e-12)
    for own, others_own in zip(found.score_histogram(8), expected.score_histogram(8), strict=True):
        assert own == pytest.approx(others_own, rel=1e-12)


def test_batches_change_no_bit() -> None:
    rows = sample()
    assert measured(rows).compute() == measured(rows, 4).compute() == measured(rows, 2, limit=30).compute()


def test_graded_labels_weigh_too() -> None:
    rows = {**sample(), "labels": sample()["labels"] * 3}
    assert measured(rows).compute()["mse"] == pytest.approx(measured(whole(rows)).compute()["mse"], rel=1e-12)


@pytest.mark.parametrize("rate", [0.0, -0.5, 1.5, math.nan])
def test_rates_out_of_range_are_refused(rate: float) -> None:
    metrics = PointwiseMetrics("click")
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole line is compared
        metrics.update(torch.zeros(2), torch.zeros(2), rates=torch.tensor([rate, rate]))
    assert str(error.value) == (
        f"click: rates: got {rate} to {rate}, expected above 0 and at most 1; give 1 for rows of which all were kept"
    )
    metrics.update(torch.zeros(2), torch.tensor([0, 1]), rates=torch.ones(2))
    with pytest.raises(ValueError, match=r"^click: got the ids none, expected those of the batches before: rates$"):
        metrics.update(torch.zeros(2), torch.zeros(2))
