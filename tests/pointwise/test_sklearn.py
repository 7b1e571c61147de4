"""Figures of rows against those of scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from jagged.pointwise import PointwiseMetrics

metrics = pytest.importorskip("sklearn.metrics")


@pytest.mark.parametrize("decimals", [0, 1, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_auc_and_logloss(decimals: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(decimals)
    scores = (torch.randn(3_000, generator=generator, dtype=dtype) * 2).round(decimals=decimals)
    labels = (torch.rand(3_000, generator=generator) < scores.sigmoid()).long()
    weights = torch.rand(3_000, generator=generator, dtype=dtype) * 3
    ours = PointwiseMetrics()
    ours.update(scores, labels, None, weights)
    found, score = ours.compute(), scores.double().numpy()
    weight = weights.double().numpy()
    assert found["auc"] == pytest.approx(metrics.roc_auc_score(labels, score, sample_weight=weight), rel=1e-10)
    probability = 1 / (1 + np.exp(-score))
    assert found["logloss"] == pytest.approx(metrics.log_loss(labels, probability, sample_weight=weight), rel=1e-10)


@pytest.mark.parametrize("graded", [False, True])
@pytest.mark.parametrize("decimals", [0, 2, 9])
def test_ndcg_with_ties(graded: bool, decimals: int) -> None:
    generator = torch.Generator().manual_seed(decimals)
    scores = torch.randn(200, 12, generator=generator, dtype=torch.float64).round(decimals=decimals)
    labels = torch.randint(5 if graded else 2, (200, 12), generator=generator)
    labels[:, 0] = 1
    weights = torch.rand(200, generator=generator, dtype=torch.float64)
    ours = PointwiseMetrics(ks=(1, 3, 12, 50))
    request = torch.arange(200).repeat_interleave(12)
    order = torch.randperm(2_400, generator=generator)
    ours.update(
        scores.flatten()[order],
        labels.flatten()[order],
        None,
        weights.repeat_interleave(12)[order],
        requests=request[order],
    )
    found = ours.compute()
    for k in (1, 3, 12, 50):
        wanted = metrics.ndcg_score(labels.numpy(), scores.numpy(), k=k, sample_weight=weights.numpy(), ignore_ties=False)
        assert found[f"ndcg@{k}"] == pytest.approx(wanted, rel=1e-10)
