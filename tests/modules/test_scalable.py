"""Cross-entropy over buckets, against loops over buckets and rows and against the cross-entropy that it is of everything."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor

from jagged.modules import ScalableCrossEntropyHead
from tests.oracle import check_three_way
from tests.places import PLACE, Place
from tests.reference.cross_entropy import linear_cross_entropy
from tests.strategies import Jagged, jagged_batches, jagged_of, random_tensor, seeds

DIM, ITEMS = 6, 17

pytestmark = pytest.mark.skipif(PLACE.name == "interpret", reason="modules run on the place's own backend")


def targets_for(batch: Jagged, seed: int, ignore: bool) -> Tensor:
    targets = torch.randint(ITEMS, (batch.total,), generator=torch.Generator().manual_seed(seed)).to(PLACE.device)
    if ignore:
        targets[::3] = -100
    return targets


def jagged(values: Tensor, batch: Jagged) -> JaggedTensor:
    return JaggedTensor(values=values, offsets=batch.offsets)


def written_out(hidden: Tensor, weight: Tensor, targets: Tensor, mixture: Tensor, rows: int, items: int) -> Tensor:
    counted = (targets != -100).nonzero()[:, 0]
    losses: dict[int, list[Tensor]] = {}
    for mixed in mixture:
        centre = (mixed[counted, None] * hidden[counted]).sum(0).detach()
        chosen = counted[(hidden[counted] @ centre).topk(min(rows, len(counted))).indices].tolist()
        best = (weight @ centre).topk(min(items, ITEMS)).indices.tolist()
        for row in chosen:
            target = int(targets[row])
            logits = weight[[target, *(item for item in best if item != target)]] @ hidden[row]
            losses.setdefault(row, []).append(logits.logsumexp(0) - logits[0])
    if not losses:
        return hidden.sum() * 0 + weight.sum() * 0
    return torch.stack([torch.stack(of).max() for of in losses.values()]).mean()


@settings(max_examples=40)
@given(
    jagged_batches(longest=20), seeds(), st.booleans(), st.integers(1, 5), st.integers(1, 9), st.integers(1, 20), st.booleans()
)
def test_agrees_with_loops(
    place: Place, batch: Jagged, seed: int, ignore: bool, buckets: int, rows: int, items: int, in_chunks: bool
) -> None:
    head = ScalableCrossEntropyHead(buckets, rows, items, max_bytes=1 if in_chunks else 2**20)
    targets = targets_for(batch, seed, ignore)
    leaves = [
        random_tensor(shape, torch.float64, seed + i).requires_grad_()
        for i, shape in enumerate([(batch.total, DIM), (ITEMS, DIM)])
    ]
    torch.manual_seed(seed)
    mixture = torch.randn(buckets, batch.total, device=place.device, dtype=torch.float64)
    expected = written_out(*leaves, targets, mixture, rows, items)
    wanted = torch.autograd.grad(expected, leaves)
    torch.manual_seed(seed)
    loss, logits = head(jagged(leaves[0], batch), leaves[1], targets)
    found = torch.autograd.grad(loss, leaves)
    torch.testing.assert_close((loss, *found), (expected, *wanted), rtol=1e-9, atol=1e-12)
    scores = (leaves[0] * leaves[1][targets.clamp(min=0)]).sum(1).detach().masked_fill(targets == -100, 0)
    torch.testing.assert_close(logits, scores, rtol=1e-12, atol=1e-12)


@settings(max_examples=20)
@given(jagged_batches(longest=20), seeds(), st.booleans())
def test_of_everything_it_is_the_cross_entropy(place: Place, batch: Jagged, seed: int, ignore: bool) -> None:
    head, targets = ScalableCrossEntropyHead(1, 1000, 1000), targets_for(batch, seed, ignore)
    inputs = [random_tensor((batch.total, DIM), torch.float32, seed), random_tensor((ITEMS, DIM), torch.float32, seed + 1)]
    check_three_way(
        lambda h, w: head(jagged(h, batch), w, targets).loss,
        lambda h, w: linear_cross_entropy(h, w, targets)[0],
        inputs,
    )


def test_what_stands_in_ignored_rows_does_not_matter(place: Place) -> None:
    head, batch = ScalableCrossEntropyHead(3, 2, 4), jagged_of((4, 5))
    hidden, weight = random_tensor((9, DIM), torch.float32, 0), random_tensor((ITEMS, DIM), torch.float32, 1)
    targets = targets_for(batch, 2, ignore=True)
    losses = []
    for filling in (0.0, 1e30, torch.nan):
        torch.manual_seed(0)
        filled = torch.where((targets == -100)[:, None], filling, hidden)
        losses.append(head(jagged(filled, batch), weight, targets).loss.item())
    assert losses[0] == losses[1] == losses[2]


def test_items_of_a_sequence_are_targets_of_the_rows_before(place: Place) -> None:
    head, batch = ScalableCrossEntropyHead(2, 9, ITEMS), jagged_of((3, 1))
    hidden, weight = random_tensor((4, DIM), torch.float32, 0), random_tensor((ITEMS, DIM), torch.float32, 1)
    items = jagged(torch.arange(4, device=place.device), batch)
    targets = torch.tensor([1, 2, -100, -100], device=place.device)
    results = []
    for given_ in (items, targets):
        torch.manual_seed(0)
        results.append(head(jagged(hidden, batch), weight, given_))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_mixed_precision_and_a_target_out_of_range(place: Place) -> None:
    head, batch = ScalableCrossEntropyHead(2, 9, ITEMS), jagged_of((3, 1))
    hidden, weight = random_tensor((4, DIM), torch.bfloat16, 0), random_tensor((ITEMS, DIM), torch.float32, 1).requires_grad_()
    targets = torch.tensor([1, 2, 3, 4], device=place.device)
    with torch.autocast(place.device.type, torch.bfloat16):
        loss = head(jagged(hidden, batch), weight, targets).loss
    loss.backward()
    assert loss.dtype == torch.float32
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    targets[1] = ITEMS
    assert head(jagged(hidden, batch), weight, targets).loss.isnan()


@pytest.mark.parametrize("name", ["num_buckets", "rows_per_bucket", "items_per_bucket"])
def test_numbers_of_at_least_one(name: str) -> None:
    sizes = {"num_buckets": 1, "rows_per_bucket": 1, "items_per_bucket": 1, name: 0}
    with pytest.raises(ValueError, match=f"{name}: expected at least 1, got 0"):
        ScalableCrossEntropyHead(**sizes)
    assert "rows_per_bucket=3, items_per_bucket=4" in repr(ScalableCrossEntropyHead(2, 3, 4))
