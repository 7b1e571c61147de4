"""Target attention against a padded twin of the same parameters, on empty batches and empty samples too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from jagged.modules import TargetAttention
from tests.oracle import check_three_way
from tests.places import PLACE, Place
from tests.reference.conversion import to_dense
from tests.reference.target_attention import PaddedTargetAttention
from tests.strategies import Jagged, jagged_batches, jagged_of, random_tensor, seeds

DIM = 6

pytestmark = pytest.mark.skipif(PLACE.name == "interpret", reason="modules run on the place's own backend")


def named(layers: tuple[Tensor, ...], names: list[str]) -> dict[str, Tensor]:
    """Parameters from each layer's weight with the bias, if it has one, as a last column."""
    parts = {f"layers.{k}.weight": layer for k, layer in enumerate(layers)}
    for k, layer in enumerate(layers):
        if f"layers.{k}.bias" in names:
            parts |= {f"layers.{k}.weight": layer[:, :-1], f"layers.{k}.bias": layer[:, -1]}
    assert sorted(parts) == sorted(names)
    return parts


def check_twins(
    module: TargetAttention, twin: nn.Module, batch: Jagged, inputs: list[Tensor], counts: list[int] | None = None
) -> None:
    """Check outputs and the gradients of rows, targets and parameters; with counts targets are jagged."""
    names = list(module.state_dict())
    assert names == list(twin.state_dict())
    length = max([1, *batch.lengths])
    filled = to_dense(torch.ones(batch.total, device=PLACE.device), batch.lengths, length, 0.0) > 0

    def ours(rows: Tensor, targets: Tensor, *layers: Tensor) -> Tensor:
        history = JaggedTensor(values=rows, offsets=batch.offsets)
        if counts is not None:
            several = JaggedTensor(values=targets, offsets=jagged_of(counts, batch.offsets.dtype).offsets)
            pairs = sum(n * length for n, length in zip(counts, batch.lengths, strict=True))
            given = (history, several) if pairs % 2 else (history, several, pairs)
            return torch.func.functional_call(module, named(layers, names), given).values()
        return torch.func.functional_call(module, named(layers, names), (history, targets))

    def padded(rows: Tensor, targets: Tensor, *layers: Tensor) -> Tensor:
        dense = to_dense(rows, batch.lengths, length, 0.0)
        if counts is not None:
            # Each target alone beside a copy of its history.
            of = torch.repeat_interleave(torch.tensor(counts, dtype=torch.int64, device=PLACE.device))
            alone = dense[of], filled[of], targets[:, None]
            return torch.func.functional_call(twin, named(layers, names), alone).squeeze(1)
        return torch.func.functional_call(twin, named(layers, names), (dense, filled, targets))

    # The error of a bias of one number would be luck, and with it the oracle's yardstick.
    layers = [torch.cat([x.weight, x.bias[:, None]], 1) if x.bias is not None else x.weight for x in module.layers]
    check_three_way(ours, padded, [*inputs, *(layer.detach() for layer in layers)])


@settings(max_examples=40)
@given(
    jagged_batches(longest=40), seeds(), st.integers(1, 4), st.sampled_from([[3], [16, 5]]),
    st.sampled_from(["relu", "silu", "gelu"]), st.booleans(),
)  # fmt: skip
def test_is_the_padded_one(
    place: Place, batch: Jagged, seed: int, num_targets: int, sizes: list[int], activation: Any, softmax: bool
) -> None:
    # The softmax over one row has no gradient: every batch with rows gets a sample of several.
    batch = jagged_of((*batch.lengths, 6), batch.offsets.dtype) if batch.total else batch
    torch.manual_seed(seed)
    module = TargetAttention(DIM, sizes, activation=activation, softmax=softmax).to(place.device)
    inputs = [
        random_tensor((batch.total, DIM), torch.float32, seed),
        random_tensor((batch.batch_size, num_targets, DIM), torch.float32, seed + 1),
    ]
    check_twins(module, PaddedTargetAttention(DIM, sizes, activation, softmax), batch, inputs)


@settings(max_examples=40)
@given(
    jagged_batches(longest=40), seeds(), st.data(), st.sampled_from([[3], [16, 5]]), st.sampled_from(["relu", "silu", "gelu"]),
    st.booleans(),
)  # fmt: skip
def test_jagged_targets_are_the_padded_ones(
    place: Place, batch: Jagged, seed: int, data: st.DataObject, sizes: list[int], activation: Any, softmax: bool
) -> None:
    """Several for some samples, none for others, and whether or not the number of pairs is given."""
    batch = jagged_of((*batch.lengths, 6), batch.offsets.dtype) if batch.total else batch
    counts = data.draw(st.lists(st.integers(0, 4), min_size=batch.batch_size, max_size=batch.batch_size))
    if batch.total:
        # A target with several rows, without which the parameters have no gradients.
        counts[-1] = 3
    torch.manual_seed(seed)
    module = TargetAttention(DIM, sizes, activation=activation, softmax=softmax).to(place.device)
    inputs = [
        random_tensor((batch.total, DIM), torch.float32, seed),
        random_tensor((sum(counts), DIM), torch.float32, seed + 1),
    ]
    check_twins(module, PaddedTargetAttention(DIM, sizes, activation, softmax), batch, inputs, counts)


@pytest.mark.parametrize("softmax", [False, True])
def test_under_autocast(place: Place, softmax: bool) -> None:
    """Against the twin under autocast, which leaves its float64 alone."""
    torch.manual_seed(0)
    # Wide enough that the largest error, the oracle's yardstick, is no luck.
    batch, width = jagged_of((30, 0, 9, 1)), 64
    module = TargetAttention(width, softmax=softmax).to(place.device)
    inputs = [random_tensor((batch.total, width), torch.float32, 0), random_tensor((4, 3, width), torch.float32, 1)]
    with torch.autocast(place.device.type, torch.bfloat16):
        check_twins(module, PaddedTargetAttention(width, (80, 40), "relu", softmax), batch, inputs)
        # Of a ReLU rounding may turn a unit off, which is luck, too.
        module.activation = "silu"
        several = [inputs[0], random_tensor((8, width), torch.float32, 1)]
        check_twins(module, PaddedTargetAttention(width, (80, 40), "silu", softmax), batch, several, [3, 1, 0, 4])


def test_weights_by_hand(place: Place) -> None:
    """A network that gives the product's sum: unnormalised, a row counts as often as it agrees with the target."""
    module = TargetAttention(2, [2]).to(place.device)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
        module.layers[0].weight[:, 6:] = torch.eye(2)
        module.layers[1].weight.fill_(1.0)
    history = JaggedTensor(
        values=torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 3.0]], device=place.device), offsets=jagged_of((0, 3)).offsets
    )
    out = module(history, torch.tensor([[[1.0, 1.0], [1.0, 0.0]], [[1.0, 0.0], [0.0, 2.0]]], device=place.device))
    assert out.tolist() == [[[0.0, 0.0], [0.0, 0.0]], [[2.0, 0.0], [0.0, 18.0]]]


def test_one_target_and_none(place: Place) -> None:
    module = TargetAttention(DIM).to(place.device)
    history = JaggedTensor(values=torch.randn(5, DIM, device=place.device), offsets=jagged_of((2, 0, 3)).offsets)
    targets = torch.randn(3, DIM, device=place.device)
    torch.testing.assert_close(module(history, targets), module(history, targets[:, None])[:, 0], rtol=0, atol=0)
    assert module(history, targets[:, None][:, :0]).shape == (3, 0, DIM)


def test_meta_device_reset_and_repr() -> None:
    module = TargetAttention(DIM, [8, 3], activation="silu", softmax=True, device="meta")
    assert all(parameter.is_meta for parameter in module.parameters())
    for shown in ("activation='silu', softmax=True", "in_features=24, out_features=8", "in_features=3, out_features=1"):
        assert shown in repr(module)
    module = module.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(torch.nan)
    module.reset_parameters()
    assert all(torch.isfinite(parameter).all() for parameter in module.parameters())


def test_messages() -> None:
    history = JaggedTensor(values=torch.zeros(4, DIM), offsets=torch.tensor([0, 1, 4]))
    module = TargetAttention(DIM)
    with pytest.raises(ValueError, match="layer_sizes: expected the width of at least one hidden layer, got none"):
        TargetAttention(DIM, [])
    with pytest.raises(ValueError, match="activation: got 'dice', expected one of 'relu', 'silu', 'gelu'"):
        TargetAttention(DIM, activation="dice")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"history: expected values \[sum L, D\] with D = 6, got \[4, 5\]"):
        module(JaggedTensor(values=torch.zeros(4, 5), offsets=torch.tensor([0, 1, 4])), torch.zeros(2, DIM))
    with pytest.raises(ValueError, match=r"targets: expected values \[B, D\] with D = 6, got \[2, 5\]"):
        module(history, torch.zeros(2, 5))
    with pytest.raises(ValueError, match=r"targets: expected values \[B, n, D\] with D = 6, got \[6\]"):
        module(history, torch.zeros(DIM))
    with pytest.raises(
        ValueError,
        match="targets: expected 2 samples, as many as history has, got 3; a sample",
    ):
        module(history, torch.zeros(3, DIM))
    three = JaggedTensor(values=torch.zeros(3, DIM), offsets=torch.tensor([0, 1, 2, 3]))
    with pytest.raises(
        ValueError,
        match=r"^targets: expected 2 samples, as many as history has, got 3; a sample without targets is one of length 0$",
    ):
        module(history, three)
    with pytest.raises(ValueError, match=r"^num_pairs: expected None, got 4; only jagged targets, a JaggedTensor, have it$"):
        module(history, torch.zeros(2, DIM), 4)
    with pytest.raises(ValueError, match=r"^num_pairs: expected 0 or more, got -1; None reads it from the offsets$"):
        module(three, three, -1)
