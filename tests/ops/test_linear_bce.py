"""Binary cross-entropy over a dense layer, against the whole matrix of logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from jagged.ops import linear_bce
from jagged.ops.linear_bce import spec
from tests.graphs import captured
from tests.memory import PeakMemory
from tests.ops.test_group_sparse import BATCH_SIZES, FLAGS
from tests.ops.test_group_sparse_bce import positives_of, targets_of
from tests.oracle import check_three_way
from tests.places import PLACE, Place
from tests.reference import group_sparse as reference
from tests.strategies import float_dtypes, random_tensor, seeds

pytestmark = pytest.mark.skipif(PLACE.name == "interpret", reason="there is no kernel of its own")
ON_GPU = pytest.mark.gpu


def check(
    place: Place, inputs: list[Tensor], positives: Tensor, offsets: Tensor, wanted: tuple[bool, ...] = (True,) * 3, **options: Any
) -> None:
    targets = targets_of(positives, offsets, inputs[1].shape[0])

    def ours(features: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
        return linear_bce(features, weight, positives, offsets, *bias, **options, backend=place.backend)

    def expected(features: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
        logits = features @ weight.T + bias[0] if bias else features @ weight.T
        return reference.group_sparse_bce(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets, **options)

    check_three_way(ours, expected, inputs, requires_grad=list(wanted[: len(inputs)]))


@given(st.integers(0, 60), BATCH_SIZES, st.sampled_from([1, 7, 32]), float_dtypes(), seeds(), FLAGS, FLAGS, st.booleans())
def test_linear_bce(
    place: Place,
    more_labels: int,
    batch_size: int,
    width: int,
    dtype: torch.dtype,
    seed: int,
    wanted: tuple[bool, bool, bool],
    more: tuple[bool, bool, bool],
    in_chunks: bool,
) -> None:
    labels = 9 + more_labels
    shapes = [(batch_size, width), (labels, width), *([(labels,)] if more[2] else [])]
    inputs = [random_tensor(shape, dtype, seed + at, strided=more[2]) for at, shape in enumerate(shapes)]
    generator = torch.Generator().manual_seed(seed)
    options: dict[str, Any] = {"label_smoothing": 0.2 if seed % 2 else 0.0}
    if more[0]:
        options["label_weight"] = torch.rand(labels, generator=generator).to(place.device)
    if more[1]:
        options["row_mask"] = (torch.rand(batch_size, generator=generator) < 0.7).to(place.device)
    with pytest.MonkeyPatch.context() as patch:
        if in_chunks:
            patch.setattr(spec, "CHUNK_BYTES", 8 * max(1, batch_size) * 7)
        check(place, inputs, *positives_of(batch_size, labels, seed), wanted, **options)


@given(st.integers(1, 300), st.integers(1, 100_000), st.sampled_from([4, 8]))
def test_chunks_are_equal_and_below_their_bytes(batch_size: int, num_labels: int, itemsize: int) -> None:
    size = spec.chunk_of(batch_size, num_labels, itemsize)
    assert size * batch_size * itemsize <= spec.CHUNK_BYTES
    assert size % 64 == 0
    # One fewer of 64 labels would be a chunk more.
    assert size == 64 or -(-num_labels // (size - 64)) > -(-num_labels // size)


@pytest.mark.skipif(PLACE.name != "cpu", reason="every device has the same operations")
def test_gradients_take_little_memory_beside_them(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few chunks, also where a row has more features than the batch has rows."""
    monkeypatch.setattr(spec, "CHUNK_BYTES", 2**14)
    features, weight = (random_tensor(shape, torch.float32, 1).requires_grad_() for shape in ((4, 256), (4096, 256)))
    loss = linear_bce(features, weight, *positives_of(4, 4096, 1), backend=place.backend)
    with PeakMemory([features, weight]) as memory:
        _, gradient = torch.autograd.grad(loss, (features, weight))
    assert gradient.nbytes < memory.peak < gradient.nbytes + 16 * spec.CHUNK_BYTES


def test_memory_that_nobody_has_written(place: Place) -> None:
    """PyTorch fills it with what is no number under deterministic algorithms; a number to spare is in no result."""
    inputs = [random_tensor(shape, torch.float32, 1) for shape in ((6, 5), (70, 5), (70,))]
    given, found = positives_of(6, 70, 1), []
    for is_deterministic in (False, True):
        leaves = [x.clone().requires_grad_() for x in inputs]
        torch.use_deterministic_algorithms(is_deterministic)
        try:
            loss = linear_bce(*leaves[:2], *given, leaves[2], backend=place.backend)
            found.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
        finally:
            torch.use_deterministic_algorithms(False)
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected)
        assert bool(ours.isfinite().all())


def test_ignored_positives_and_rows(place: Place) -> None:
    """Numbers that are no label count as none; whatever stands in rows that do not count, neither do they."""
    features, weight = random_tensor((4, 5), torch.float32, 1), random_tensor((6, 5), torch.float32, 2)
    mask = torch.tensor([True, True, False, True], device=place.device)
    bad = torch.where(mask[:, None], features, float("nan"))
    positives, offsets = torch.tensor([5, 0, 3, 1], device=place.device), torch.tensor([0, 2, 2, 3, 4], device=place.device)
    more, of_more = torch.tensor([-7, 5, 0, 0, 3, -7, 1], device=place.device), torch.tensor([0, 4, 4, 5, 7], device=place.device)
    results = []
    for given_features, of_rows, starts in ((features, positives, offsets), (bad, more, of_more)):
        leaves = [x.clone().requires_grad_() for x in (given_features, weight)]
        loss = linear_bce(*leaves, of_rows, starts, row_mask=mask, ignore_index=-7, backend=place.backend)
        results.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    for ours, expected in zip(*results, strict=True):
        assert torch.equal(ours, expected)
    assert not results[1][1][2].any()
    loss = linear_bce(features, weight, positives, offsets, row_mask=torch.zeros_like(mask), backend=place.backend)
    assert float(loss) == 0


def test_messages_name_argument_and_cure(place: Place) -> None:
    device = place.device
    right: dict[str, Any] = {
        "features": torch.zeros(2, 6, device=device),
        "weight": torch.zeros(5, 6, device=device),
        "positives": torch.tensor([4, 0, 2], device=device),
        "offsets": torch.tensor([0, 1, 3], device=device),
    }
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        (
            {"weight": right["weight"][:, :3]},
            ValueError,
            "weight: expected shape [L, 6], as wide as features [2, 6], got [5, 3]",
        ),
        (
            {"weight": right["weight"].half()},
            TypeError,
            "weight: expected the dtype of features, float32, got float16; convert one of them",
        ),
        (
            {"bias": torch.zeros(4, device=device)},
            ValueError,
            "bias: expected shape [5], one number per row of weight [5, 6], got [4]",
        ),
        ({"ignore_index": 3}, ValueError, "ignore_index: expected a negative number, which is no label, got 3"),
        (
            {"offsets": torch.tensor([0, 3], device=device)},
            ValueError,
            "offsets: expected shape [3], one more than the rows of features [2, 6], got [2]",
        ),
    ]
    for wrong, error, message in cases:
        with pytest.raises(error) as raised:
            linear_bce(**{**right, **wrong})
        assert str(raised.value) == message


@ON_GPU
def test_captured(place: Place) -> None:
    features, weight = random_tensor((64, 32), torch.bfloat16, 1), random_tensor((100, 32), torch.bfloat16, 2)
    positives, offsets = positives_of(64, 100, 1)

    def run() -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in (features, weight)]
        loss = linear_bce(*leaves, positives, offsets)
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]

    graph, results = captured(run)
    positives.copy_(positives.flip(0))
    graph.replay()
    for ours, expected in zip(results, run(), strict=True):
        assert torch.equal(ours, expected)
