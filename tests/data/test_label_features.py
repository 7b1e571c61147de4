"""What labels are like, by their rows' features."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from jagged.data import MultiLabelRows, label_embeddings, synthetic_labels

ROWS, _, TRUTH = synthetic_labels(num_rows=800, num_test_rows=1, num_labels=60, num_features=120, num_groups=6)


def expected(rows: MultiLabelRows) -> torch.Tensor:
    """The same with dense rows, float64."""
    features, labels = np.zeros((len(rows), rows.num_features)), np.zeros((len(rows), rows.num_labels))
    features[np.repeat(np.arange(len(rows)), np.diff(rows.feature_offsets)), rows.feature_ids] = rows.feature_values
    labels[np.repeat(np.arange(len(rows)), np.diff(rows.label_offsets)), rows.labels] = 1
    return torch.from_numpy(labels).t() @ normalize(torch.from_numpy(features), dim=1)


def test_where_features_are_few_it_is_their_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.testing.assert_close(label_embeddings(ROWS).double(), expected(ROWS), rtol=1e-5, atol=1e-5)
    # Some rows at a time, also fewer than one has features.
    for most in (1, 7, 100):
        monkeypatch.setattr("jagged.data.label_features._FEATURES", most)
        monkeypatch.setattr("jagged.data.label_features._PAIRS", most)
        torch.testing.assert_close(label_embeddings(ROWS).double(), expected(ROWS), rtol=1e-5, atol=1e-5)


def test_a_projection_keeps_angles() -> None:
    """Cosines of two labels differ by about the root of one over the width."""
    whole = normalize(expected(ROWS), dim=1)
    errors = []
    for seed in range(8):
        found = label_embeddings(ROWS, dim=64, seed=seed)
        assert found.shape == (60, 64)
        few = normalize(found.double(), dim=1)
        errors.append(few @ few.t() - whole @ whole.t())
    error = torch.stack(errors)
    assert error.square().mean().sqrt() < 64**-0.5
    assert error.mean(0).abs().max() < 4 * 64**-0.5 / 8**0.5
    assert torch.equal(label_embeddings(ROWS, dim=64, seed=3), label_embeddings(ROWS, dim=64, seed=3))


def test_labels_of_a_group_are_alike() -> None:
    few = normalize(label_embeddings(ROWS, dim=64), dim=1)
    alike = few @ few.t()
    same = torch.from_numpy(TRUTH.groups[:, None] == TRUTH.groups) & ~torch.eye(60, dtype=torch.bool)
    assert alike[same].mean() > alike[~same].mean() + 0.1


def test_rows_and_labels_without_anything() -> None:
    none = ROWS.take(np.zeros(0, np.int64))
    assert label_embeddings(none, dim=16).tolist() == torch.zeros(60, 16).tolist()
    bare = ROWS.take(np.array([0, 1, 2]))
    there = np.unique(bare.labels)
    found = label_embeddings(bare)
    assert bool((found[torch.from_numpy(there).long()].norm(dim=1) > 0).all())
    others = torch.ones(60, dtype=torch.bool)
    others[torch.from_numpy(there).long()] = False
    assert not found[others].any()
