"""JaggedMLP against a padded one that has the context beside each row."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from jagged.modules import JaggedMLP
from tests.oracle import check_three_way
from tests.places import PLACE, Place
from tests.reference.conversion import to_dense, to_jagged
from tests.reference.mlp import PaddedMLP
from tests.strategies import Jagged, jagged_batches, jagged_of, random_tensor, seeds

WIDTH = 6

pytestmark = pytest.mark.skipif(PLACE.name == "interpret", reason="modules run on the place's own backend")


@settings(max_examples=30)
@given(
    jagged_batches(longest=40), seeds(), st.sampled_from([[3], [9, 1], [16, 5, 4]]), st.integers(0, 3),
    st.sampled_from([None, "silu", "gelu"]),
)  # fmt: skip
def test_is_the_padded_one(
    place: Place, batch: Jagged, seed: int, sizes: list[int], context_features: int, activation: Any
) -> None:
    torch.manual_seed(seed)
    has_context = context_features > 0
    mlp = JaggedMLP(WIDTH, sizes, context_features=context_features or None, activation=activation).to(place.device)
    twin = PaddedMLP(WIDTH, sizes, context_features, activation).to(place.device)
    with torch.no_grad():
        linears = [layer for layer in twin.layers if isinstance(layer, nn.Linear)]
        for ours, theirs in zip(mlp.layers, linears, strict=True):
            theirs.bias.copy_(ours.bias)
            first = ours.weight
            if theirs is linears[0] and mlp.context_projection is not None:
                first = torch.cat([first, mlp.context_projection.weight], 1)
            theirs.weight.copy_(first)
    length = max(batch.lengths, default=0)

    def padded(values: Tensor, context: Tensor) -> Tensor:
        rows = to_dense(values, batch.lengths, length, 0.0)
        return to_jagged(copy.deepcopy(twin).to(values.dtype)(rows, context), batch.lengths)

    def jagged(values: Tensor, context: Tensor) -> Tensor:
        return mlp(JaggedTensor(values=values, offsets=batch.offsets), context if has_context else None).values()

    values = random_tensor((batch.total, WIDTH), torch.float32, seed)
    context = random_tensor((batch.batch_size, context_features), torch.float32, seed + 1)
    check_three_way(jagged, padded, [values, context], requires_grad=[True, has_context])


def test_relu_between_layers_only(place: Place) -> None:
    mlp = JaggedMLP(2, [2, 2], context_features=1).to(place.device)
    with torch.no_grad():
        for layer in mlp.layers:
            layer.weight.copy_(-torch.eye(2))
            layer.bias.zero_()
        mlp.context_projection.weight.fill_(10.0)
    x = JaggedTensor(values=torch.tensor([[1.0, 30.0], [5.0, 1.0]], device=place.device), offsets=jagged_of((1, 1)).offsets)
    y = mlp(x, torch.tensor([[1.0], [0.0]], device=place.device))
    assert y.values().tolist() == [[-9.0, 0.0], [0.0, 0.0]]


def test_lengths_and_offsets_are_shared(place: Place) -> None:
    batch = jagged_of((2, 0, 3))
    x = JaggedTensor(values=torch.zeros(5, WIDTH, device=place.device), lengths=batch.offsets.diff(), offsets=batch.offsets)
    y = JaggedMLP(WIDTH, [3]).to(place.device)(x)
    assert y.offsets() is x.offsets()
    assert y.lengths() is x.lengths()


def test_meta_device_reset_and_repr() -> None:
    mlp = JaggedMLP(WIDTH, [8, 3], context_features=2, activation="gelu", dropout=0.1, device="meta")
    assert all(parameter.is_meta for parameter in mlp.parameters())
    for shown in ("activation='gelu'", "in_features=6, out_features=8", "in_features=2", "p=0.1"):
        assert shown in repr(mlp)
    mlp = mlp.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in mlp.parameters():
            parameter.fill_(torch.nan)
    mlp.reset_parameters()
    assert all(torch.isfinite(parameter).all() for parameter in mlp.parameters())


def test_messages() -> None:
    x = JaggedTensor(values=torch.zeros(2, WIDTH), offsets=torch.tensor([0, 2]))
    with pytest.raises(ValueError, match="layer_sizes: expected the width of at least one layer"):
        JaggedMLP(WIDTH, [])
    with pytest.raises(ValueError, match="activation: got 'tanh', expected one of 'relu', 'silu', 'gelu' or None"):
        JaggedMLP(WIDTH, [3], activation="tanh")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"context: expected \[B, C\], got None"):
        JaggedMLP(WIDTH, [3], context_features=2)(x)
    with pytest.raises(ValueError, match=r"context: expected None, as there are no context_features, got \[1, 2\]"):
        JaggedMLP(WIDTH, [3])(x, torch.zeros(1, 2))


def test_dropout_is_drawn_in_training_only(place: Place) -> None:
    x = JaggedTensor(values=random_tensor((7, WIDTH), torch.float32, 0), offsets=jagged_of((4, 3)).offsets)
    mlp = JaggedMLP(WIDTH, [20, 5], dropout=0.5).to(place.device)
    assert not torch.equal(mlp(x).values(), mlp(x).values())
    mlp.eval()
    assert torch.equal(mlp(x).values(), mlp(x).values())
