"""Modules against padded torch, on empty batches and empty samples too."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from jagged.modules import CutCrossEntropyHead, JaggedSelfAttention, JaggedTransformerBlock, PositionalEncoding
from tests.oracle import check_three_way
from tests.places import PLACE, Place
from tests.reference.conversion import to_dense, to_jagged
from tests.reference.sasrec import PaddedBlock
from tests.strategies import Jagged, jagged_batches, jagged_of, random_tensor, seeds

DIM, HEADS = 12, 3

pytestmark = pytest.mark.skipif(PLACE.name == "interpret", reason="modules run on the place's own backend")


def jagged(values: torch.Tensor, batch: Jagged) -> JaggedTensor:
    return JaggedTensor(values=values, offsets=batch.offsets)


def padded(block: PaddedBlock, batch: Jagged, causal: bool) -> nn.Module:
    """The padded block as a function of jagged values, in the dtype of its input."""
    length = max(batch.lengths, default=0)
    filled = to_dense(torch.ones(batch.total, device=PLACE.device), batch.lengths, length, 0.0) > 0
    order = torch.arange(length, device=PLACE.device)
    visible = filled[:, None, :] & ((order[:, None] >= order) | (not causal)) | (order[:, None] == order)

    def run(values: torch.Tensor) -> torch.Tensor:
        twin = copy.deepcopy(block).to(values.dtype)
        return to_jagged(twin(to_dense(values, batch.lengths, length, 0.0), visible[:, None]), batch.lengths)

    return run


@settings(max_examples=30)
@given(jagged_batches(longest=40), seeds(), st.booleans())
def test_transformer_block(place: Place, batch: Jagged, seed: int, causal: bool) -> None:
    torch.manual_seed(seed)
    block = JaggedTransformerBlock(DIM, HEADS, causal=causal).to(place.device)
    twin = PaddedBlock(DIM, HEADS, 0.0).to(place.device)
    names = dict(twin.named_parameters())
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            names[name.replace("attention.", "", 1) if name.startswith("attention.") else name].copy_(parameter)
    values = random_tensor((batch.total, DIM), torch.float32, seed)
    check_three_way(lambda v: block(jagged(v, batch)).values(), padded(twin, batch, causal), [values])


@given(jagged_batches(), st.integers(1, 9))
def test_positions_count_from_the_last_row(place: Place, batch: Jagged, max_length: int) -> None:
    encoding = PositionalEncoding(max_length, 4).to(place.device)
    values = random_tensor((batch.total, 4), torch.float32, 0)
    expected = [min(n - 1 - i, max_length - 1) for n in batch.lengths for i in range(n)]
    ours = encoding(jagged(values, batch)).values()
    wanted = values + encoding.weight[torch.tensor(expected, dtype=torch.int64, device=place.device)]
    torch.testing.assert_close(ours, wanted, rtol=0, atol=0)


@given(jagged_batches(), st.integers(1, 9), st.integers(0, 3), st.data())
def test_positions_count_from_the_first_row(
    place: Place, batch: Jagged, max_length: int, targets: int, data: st.DataObject
) -> None:
    """Behind rows that stand before them, and with targets that all stand behind the history."""
    encoding = PositionalEncoding(max_length, 4, from_end=False).to(place.device)
    values = random_tensor((batch.total, 4), torch.float32, 0)
    before = [data.draw(st.integers(0, 9)) for _ in batch.lengths]
    for counts, behind in ((before, torch.tensor(before, dtype=torch.int64, device=place.device)), ([0] * len(before), None)):
        places = [count + min(i, max(n - targets, 0)) for n, count in zip(batch.lengths, counts, strict=True) for i in range(n)]
        rows = torch.tensor(places, dtype=torch.int64, device=place.device).clamp(max=max_length - 1)
        found = encoding(jagged(values, batch), targets, behind).values()
        torch.testing.assert_close(found, values + encoding.weight[rows], rtol=0, atol=0)
    # From the end it makes no difference.
    from_end = PositionalEncoding(max_length, 4).to(place.device)
    behind = torch.tensor(before, dtype=torch.int64, device=place.device)
    assert torch.equal(
        from_end(jagged(values, batch), targets, behind).values(), from_end(jagged(values, batch), targets).values()
    )
    with pytest.raises(ValueError, match=r"^behind: "):
        encoding(jagged(values, batch), None, torch.zeros(batch.batch_size + 1, dtype=torch.int64, device=place.device))


def test_positions_take_rows_of_their_width(place: Place) -> None:
    encoding, batch = PositionalEncoding(3, 4).to(place.device), jagged_of((2, 3))
    message = "x: expected values [sum L, D] with D = 4, got [5, 1]; the module's width is set where it is built"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        encoding(jagged(torch.zeros(5, 1, device=place.device), batch))


@settings(max_examples=30)
@given(jagged_batches(longest=40), seeds(), st.booleans(), st.sampled_from([0.0, 0.2]))
def test_head_is_the_mean_over_rows_that_count(place: Place, batch: Jagged, seed: int, ignore: bool, smoothing: float) -> None:
    head = CutCrossEntropyHead(label_smoothing=smoothing)
    weight = random_tensor((17, DIM), torch.float32, seed)
    targets = torch.randint(17, (batch.total,), generator=torch.Generator().manual_seed(seed)).to(place.device)
    if ignore:
        targets[::2] = -100
    hidden = random_tensor((batch.total, DIM), torch.float32, seed + 1)
    if not (targets >= 0).any():
        loss, _ = head(jagged(hidden, batch), weight, targets)
        assert loss.item() == 0
        return
    check_three_way(
        lambda h, w: head(jagged(h, batch), w, targets).loss,
        lambda h, w: nn.functional.cross_entropy(h @ w.T, targets, label_smoothing=smoothing),
        [hidden, weight],
    )


def test_parts_share_lengths_and_offsets(place: Place) -> None:
    batch = jagged_of((2, 0, 3))
    x = JaggedTensor(values=torch.zeros(5, DIM, device=place.device), lengths=batch.offsets.diff(), offsets=batch.offsets)
    for module in (JaggedSelfAttention(DIM, HEADS), JaggedTransformerBlock(DIM, HEADS), PositionalEncoding(4, DIM)):
        y = module.to(place.device)(x)
        assert y.offsets() is x.offsets()
        assert y.lengths() is x.lengths()


@pytest.mark.parametrize(
    ("module", "shown"),
    [
        (lambda device: JaggedSelfAttention(DIM, HEADS, causal=False, device=device), "num_heads=3, causal=False"),
        (lambda device: JaggedTransformerBlock(DIM, HEADS, hidden_dim=30, device=device), "out_features=30"),
        (lambda device: PositionalEncoding(7, DIM, device=device), "max_length=7, embedding_dim=12, from_end=True"),
        (lambda device: CutCrossEntropyHead(ignore_index=-1), "ignore_index=-1, label_smoothing=0.0"),
    ],
)
def test_meta_device_reset_and_repr(module: object, shown: str) -> None:
    built = module("meta")
    assert shown in repr(built)
    assert all(parameter.is_meta for parameter in built.parameters())
    built = built.to_empty(device="cpu")
    if list(built.parameters()):
        with torch.no_grad():
            for parameter in built.parameters():
                parameter.fill_(torch.nan)
        built.reset_parameters()
        assert all(torch.isfinite(parameter).all() for parameter in built.parameters())


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(ValueError, match="num_heads: expected a divisor of embedding_dim 12, got 5"):
        JaggedSelfAttention(DIM, 5)


def test_smoothing_is_a_share() -> None:
    with pytest.raises(ValueError, match=r"label_smoothing: expected a number in \[0, 1\), got 1"):
        CutCrossEntropyHead(label_smoothing=1)


def test_dropout_is_drawn_in_training_only(place: Place) -> None:
    batch = jagged_of((4, 3))
    block = JaggedTransformerBlock(DIM, HEADS, dropout=0.5).to(place.device)
    x = jagged(random_tensor((7, DIM), torch.float32, 0), batch)
    assert not torch.equal(block(x).values(), block(x).values())
    block.eval()
    assert torch.equal(block(x).values(), block(x).values())
