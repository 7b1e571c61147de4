"""Pooling and interaction against padded torch, on empty batches and empty samples too."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec.sparse.jagged_tensor import JaggedTensor

from jagged.modules import JaggedFeatureInteraction, JaggedPooling
from jagged.modules.pooling import KINDS
from tests.oracle import check_three_way
from tests.places import PLACE, Place
from tests.reference.conversion import to_dense
from tests.reference.pooling import padded_interaction, padded_pooling
from tests.strategies import Jagged, jagged_batches, random_tensor, seeds

DIM = 10

pytestmark = pytest.mark.skipif(PLACE.name == "interpret", reason="modules run on the place's own backend")


def jagged(values: torch.Tensor, batch: Jagged) -> JaggedTensor:
    return JaggedTensor(values=values, offsets=batch.offsets)


def filled(batch: Jagged) -> torch.Tensor:
    length = max(batch.lengths, default=0)
    return to_dense(torch.ones(batch.total, device=PLACE.device), batch.lengths, length, 0.0) > 0


@settings(max_examples=40)
@given(jagged_batches(longest=40), seeds(), st.sampled_from(KINDS))
def test_pooling(place: Place, batch: Jagged, seed: int, kind: str) -> None:
    torch.manual_seed(seed)
    module = JaggedPooling(DIM, kind).to(place.device)
    values = random_tensor((batch.total, DIM), torch.float32, seed)
    weight = torch.zeros(DIM, device=place.device) if module.score is None else module.score.weight[0].detach()

    def padded(rows: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
        dense = to_dense(rows, batch.lengths, max(batch.lengths, default=0), 0.0)
        return padded_pooling(dense, filled(batch), kind, score)

    def ours(rows: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
        named = {} if module.score is None else {"score.weight": score[None]}
        return torch.func.functional_call(module, named, (jagged(rows, batch),))

    check_three_way(ours, padded, [values, weight], requires_grad=[True, kind == "softmax"])


@settings(max_examples=40)
@given(jagged_batches(longest=40), seeds(), st.integers(1, 5), st.booleans(), st.sampled_from([None, 0.3]))
def test_interaction(place: Place, batch: Jagged, seed: int, targets: int, softmax: bool, scale: float | None) -> None:
    module = JaggedFeatureInteraction(softmax=softmax, scale=scale)
    values = random_tensor((batch.total, DIM), torch.float32, seed)
    wanted = random_tensor((batch.batch_size, targets, DIM), torch.float32, seed + 1)

    def padded(rows: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        dense = to_dense(rows, batch.lengths, max(batch.lengths, default=0), 0.0)
        return padded_interaction(dense, filled(batch), items, softmax, DIM**-0.5 if scale is None else scale)

    check_three_way(lambda v, t: module(jagged(v, batch), t), padded, [values, wanted])


def test_one_target_a_sample(place: Place) -> None:
    module = JaggedFeatureInteraction()
    rows = JaggedTensor(values=torch.randn(5, DIM, device=place.device), offsets=torch.tensor([0, 2, 2, 5], device=place.device))
    targets = torch.randn(3, DIM, device=place.device)
    torch.testing.assert_close(module(rows, targets), module(rows, targets[:, None])[:, 0], rtol=0, atol=0)
    assert not module(rows, targets)[1].any()
    with pytest.raises(ValueError, match=r"targets: expected shape \[B, T, 10\] or \[B, 10\].*got \[3, 4\]"):
        module(rows, targets[:, :4])


def test_options_and_representations() -> None:
    with pytest.raises(ValueError, match="kind: expected one of sum, mean, max, last, softmax, got 'median'"):
        JaggedPooling(4, "median")
    assert repr(JaggedPooling(4, "sum")) == "JaggedPooling(embedding_dim=4, kind='sum')"
    assert repr(JaggedFeatureInteraction()) == "JaggedFeatureInteraction(softmax=True, scale=None)"
    meta = JaggedPooling(4, "softmax", device="meta")
    assert all(p.is_meta for p in meta.parameters())
    module = meta.to_empty(device="cpu")
    module.reset_parameters()
    before = copy.deepcopy(module.state_dict())
    module.reset_parameters()
    assert not torch.equal(before["score.weight"], module.state_dict()["score.weight"])
    assert list(JaggedPooling(4, "max").parameters()) == []
