"""Softmax cross-entropy over group-sparse layers, against the whole matrix of logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

from jagged.ops import group_sparse_cross_entropy
from jagged.ops.group_sparse import configurations, torch_impl
from tests.graphs import captured
from tests.ops.test_group_sparse import BATCH_SIZES, FLAGS, Layer, layer_of
from tests.ops.test_group_sparse_bce import WIDTHS, positives_of, targets_of
from tests.oracle import check_three_way
from tests.places import ONE_ORDER, PLACE, Place
from tests.reference import group_sparse as reference
from tests.strategies import Jagged, float_dtypes, jagged_batches, jagged_of, random_tensor, seeds

ON_GPU = pytest.mark.gpu


def check(
    place: Place,
    layer: Layer,
    positives: Tensor,
    offsets: Tensor,
    wanted: tuple[bool, bool, bool],
    *,
    has_bias: bool = True,
    parts: bool = False,
    row_mask: Tensor | None = None,
) -> None:
    """Check the loss, or what it is made of, side by side."""

    def ours(features: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
        given = (features, weight, layer.supports, layer.offsets, positives, offsets, *bias)
        if not parts:
            return group_sparse_cross_entropy(*given, row_mask=row_mask, backend=place.backend)
        return torch.cat(group_sparse_cross_entropy(*given, row_mask=row_mask, return_parts=True, backend=place.backend)[1:])

    def expected(features: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
        logits = reference.group_sparse_linear(features, weight, layer.supports, layer.sizes, *bias)
        # As ours: the logits of a dtype are its products, in float32.
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss, *rest = reference.group_sparse_cross_entropy(logits, targets, row_mask)
        return torch.cat(rest) if parts else loss

    targets = targets_of(positives, offsets, layer.weight.shape[0])
    inputs = [layer.features, layer.weight, *([layer.bias] if has_bias else [])]
    check_three_way(ours, expected, inputs, requires_grad=wanted[: len(inputs)])


@given(jagged_batches(), BATCH_SIZES, WIDTHS, float_dtypes(), seeds(), FLAGS, FLAGS)
def test_group_sparse_cross_entropy(
    place: Place,
    groups: Jagged,
    batch_size: int,
    widths: tuple[int, int],
    dtype: torch.dtype,
    seed: int,
    wanted: tuple[bool, bool, bool],
    more: tuple[bool, bool, bool],
) -> None:
    # The yardstick is a largest error, which over few elements may be nothing by luck: there is always a group of some labels.
    groups = jagged_of((*groups.lengths, 9), groups.offsets.dtype)
    width, further = widths
    layer = layer_of(groups, batch_size, width, width + further, dtype, seed, strided=more[2])
    mask = torch.rand(batch_size, generator=torch.Generator().manual_seed(seed)) < 0.7
    row_mask = mask.to(place.device) if more[1] else None
    given = positives_of(batch_size, groups.total, seed)
    check(place, layer, *given, wanted, has_bias=more[2], parts=more[0], row_mask=row_mask)


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("wanted", [(a, b, c) for a in (True, False) for b in (True, False) for c in (True, False)])
def test_every_subset_of_gradients(place: Place, wanted: tuple[bool, bool, bool], parts: bool) -> None:
    """Also of groups longer than a tile, that share columns, in several parts."""
    layer = layer_of(jagged_of((3, 0, 1, 70, 17) * 3), 20, 5, 7)
    check(place, layer, *positives_of(20, layer.weight.shape[0], 3), wanted, parts=parts)


@pytest.mark.parametrize("width", [5, 40, 140])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adjacent_columns(place: Place, dtype: torch.dtype, width: int) -> None:
    layer = layer_of(jagged_of((3, 0, 1, 70, 17) * 3), 20, width, width + 20, dtype, adjacent=True)
    check(place, layer, *positives_of(20, layer.weight.shape[0], 3), (True, True, True))


@pytest.mark.parametrize("sizes", [(), (0,), (0, 0, 0), (1,), (0, 1, 40, 0)])
@pytest.mark.parametrize("batch_size", [0, 3])
@pytest.mark.parametrize("masked", [False, True])
def test_few_labels_and_none(place: Place, sizes: tuple[int, ...], batch_size: int, masked: bool) -> None:
    layer = layer_of(jagged_of(sizes, torch.int32), batch_size, 4, 6)
    positives, offsets = positives_of(batch_size, sum(sizes), 1, most=3 if sum(sizes) else 0)
    leaves = [x.clone().requires_grad_() for x in (layer.features, layer.weight, layer.bias)]
    row_mask = torch.arange(batch_size, device=place.device) != 1 if masked else None
    ours = group_sparse_cross_entropy(
        *leaves[:2], layer.supports, layer.offsets, positives, offsets, leaves[2],
        row_mask=row_mask, return_parts=True, backend=place.backend,
    )  # fmt: skip
    logits = reference.group_sparse_linear(*leaves[:2], layer.supports, sizes, leaves[2])
    expected = reference.group_sparse_cross_entropy(logits, targets_of(positives, offsets, sum(sizes)), row_mask)
    for got, want in zip(ours, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert ours[0].dtype == ours[1].dtype == ours[2].dtype == torch.float32
    if not sum(sizes):
        assert float(ours[0].detach()) == 0
    grads = torch.autograd.grad(ours[0], leaves)
    for got, want in zip(grads, torch.autograd.grad(expected[0], leaves, allow_unused=True), strict=True):
        torch.testing.assert_close(got, torch.zeros_like(got) if want is None else want, rtol=1e-4, atol=1e-5)


def test_one_feature_of_a_whole_step_of_samples(place: Place) -> None:
    """A matrix of one row has whatever stride."""
    check(place, layer_of(jagged_of((9,)), 16, 1, 1), *positives_of(16, 9, 1), (True, True, True))


def test_more_columns_than_a_tile_has(place: Place) -> None:
    """Also of labels and of samples, so that every loop of the kernels runs twice."""
    layer = layer_of(jagged_of((3, 40)), 40, 140, 150)
    check(place, layer, *positives_of(40, 43, 1), (True, True, True))


@pytest.mark.parametrize("width", [48, 80, 144])
@pytest.mark.parametrize("seed", range(4))
def test_probabilities_of_large_logits(place: Place, seed: int, width: int) -> None:
    """At logits of 40, those of the log-sum-exp and of its gradient have to be the same to the bit."""
    layer = layer_of(jagged_of((9,), torch.int32), 1, width, width + 30, torch.float32, seed)
    check(place, layer, *positives_of(1, 9, seed), (False, True, False), has_bias=False)


@pytest.mark.parametrize("width", [5, 140])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_programs_of_some_samples_each(place: Place, dtype: torch.dtype, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a batch for which sums of all samples would take too much memory: groups longer than a tile, too."""
    monkeypatch.setattr(configurations, "MOST_SUM_BYTES", 0)
    layer = layer_of(jagged_of((3, 0, 1, 70, 17) * 3), 150, width, width + 20, dtype)
    check(place, layer, *positives_of(150, layer.weight.shape[0], 3), (True, True, True))
    check(place, layer, *positives_of(150, layer.weight.shape[0], 3), (True, False, False))


def test_pieces_do_not_change_the_result(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of PyTorch's implementation a piece for each group and some samples."""
    monkeypatch.setattr(torch_impl, "PIECE_ELEMENTS", 1)
    monkeypatch.setattr(torch_impl, "PIECE_SAMPLES", 7)
    layer = layer_of(jagged_of((3, 0, 1, 9, 9)), 16, 5, 7)
    check(place, layer, *positives_of(16, 22, 2), (True, True, True))


def logits_as_biases(place: Place, logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A layer of one sample whose logits are its biases, in groups of ten labels."""
    labels = logits.shape[0]
    ones, zeros = logits.new_ones(1, 1), logits.new_zeros(labels, 1)
    offsets = torch.arange(0, labels + 10, 10, device=place.device).clamp(max=labels)
    return ones, zeros, torch.zeros(offsets.shape[0] - 1, 1, dtype=torch.int32, device=place.device), offsets


@pytest.mark.parametrize("order", ["rising", "falling", "mixed"])
@pytest.mark.parametrize("scale", [40, 3e4])
@pytest.mark.parametrize("dtype", PLACE.dtypes, ids=str)
def test_logits_far_from_zero(place: Place, dtype: torch.dtype, scale: float, order: str) -> None:
    """Whatever comes first: maxima rise, fall, or neither."""
    logits = torch.linspace(-scale, scale, 101, device=place.device).to(dtype)
    if order == "falling":
        logits = logits.flip(0)
    elif order == "mixed":
        logits = logits[torch.randperm(101, generator=torch.Generator().manual_seed(0)).to(place.device)]
    for shift in (0.0, -scale / 2):
        bias = (logits + shift).requires_grad_()
        best = int(bias.detach().argmax())
        positives, offsets = torch.tensor([best, 7], device=place.device), torch.tensor([0, 2], device=place.device)
        given = (*logits_as_biases(place, bias.detach()), positives, offsets, bias)
        loss, lse, target = group_sparse_cross_entropy(*given, return_parts=True, backend=place.backend)
        exact = bias.detach().double().requires_grad_()
        expected = exact.logsumexp(0), exact[best] + exact[7]
        for got, want in zip((lse, target), expected, strict=True):
            torch.testing.assert_close(got[0].double(), want, rtol=1e-6, atol=1e-5)
        (found,) = torch.autograd.grad(loss, bias)
        (wanted,) = torch.autograd.grad(expected[0] - expected[1] / 2, exact)
        # The log-sum-exp itself is rounded, and the exponentials are relative to it.
        bound = wanted.abs() * (torch.finfo(dtype).eps + 2 * torch.finfo(lse.dtype).eps * scale) + 1e-7
        assert ((found.double() - wanted).abs() <= bound).all()


def test_logits_that_are_minus_infinity(place: Place) -> None:
    """They have no probability and no gradient; a row that has no others has no maximum to subtract."""
    bias = torch.full((30,), -torch.inf, device=place.device).requires_grad_()
    given = (torch.tensor([4], device=place.device), torch.tensor([0, 1], device=place.device), bias)
    _, lse, _ = group_sparse_cross_entropy(
        *logits_as_biases(place, bias.detach()), *given, return_parts=True, backend=place.backend
    )
    assert float(lse.detach()) == -torch.inf
    assert not torch.autograd.grad(lse.sum(), bias)[0].any()
    with torch.no_grad():
        bias[[4, 25]] = 2.0
    loss = group_sparse_cross_entropy(*logits_as_biases(place, bias.detach()), *given, backend=place.backend)
    torch.testing.assert_close(float(loss.detach()), 0.6931472, rtol=1e-6, atol=0)
    found = torch.autograd.grad(loss, bias)[0]
    assert found[[4, 25]].tolist() == pytest.approx([-0.5, 0.5])
    assert int(found.count_nonzero()) == 2


def test_parts_make_one_softmax_with_other_labels(place: Place) -> None:
    """The log-sum-exp of a head's labels and of the others' is that of all."""
    layer = layer_of(jagged_of((3, 0, 5, 20)), 6, 4, 9)
    head = random_tensor((6, 7), torch.float32, 5)
    positives, offsets = positives_of(6, 28, 1)
    leaves = [x.clone().requires_grad_() for x in (layer.features, layer.weight, layer.bias, head)]
    given = (*leaves[:2], layer.supports, layer.offsets, positives, offsets, leaves[2])
    _, lse, target = group_sparse_cross_entropy(*given, return_parts=True, backend=place.backend)
    ours = torch.logaddexp(lse, leaves[3].logsumexp(1)).sum() - 0.3 * target.sum()
    logits = reference.group_sparse_linear(*leaves[:2], layer.supports, layer.sizes, leaves[2])
    targets = targets_of(positives, offsets, 28)
    expected = torch.cat([logits, leaves[3]], 1).logsumexp(1).sum() - 0.3 * (logits * targets).sum()
    for got, want in zip(
        [ours, *torch.autograd.grad(ours, leaves)], [expected, *torch.autograd.grad(expected, leaves)], strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_rows_that_do_not_count(place: Place) -> None:
    """Whatever their features are, and their positives: the loss is that of the others, and their own gradient is zero."""
    layer = layer_of(jagged_of((3, 5, 20)), 6, 4, 9)
    positives, offsets = positives_of(6, 28, 1)
    mask = torch.tensor([True, False, True, True, False, True], device=place.device)
    bad = torch.where(mask[:, None], layer.features, float("nan"))
    results = []
    for features in (layer.features, bad):
        leaves = [x.clone().requires_grad_() for x in (features, layer.weight, layer.bias)]
        given = (*leaves[:2], layer.supports, layer.offsets, positives, offsets, leaves[2])
        loss, lse, target = group_sparse_cross_entropy(*given, row_mask=mask, return_parts=True, backend=place.backend)
        assert not lse[~mask].any()
        assert not target[~mask].any()
        results.append([loss, lse, target, *torch.autograd.grad(loss + lse.sum() + target.square().sum(), leaves)])
    for ours, expected in zip(*results, strict=True):
        assert torch.equal(ours, expected)
    assert not results[1][3][~mask].any()
    # None at all.
    leaf = layer.weight.clone().requires_grad_()
    given = (layer.features, leaf, layer.supports, layer.offsets, positives, offsets)
    loss = group_sparse_cross_entropy(*given, row_mask=torch.zeros_like(mask), backend=place.backend)
    assert float(loss.detach()) == 0
    assert not torch.autograd.grad(loss, leaf)[0].any()


def test_rows_without_positives_do_not_count(place: Place) -> None:
    """Their features are in no gradient of the loss; their log-sum-exp is there all the same."""
    layer = layer_of(jagged_of((3, 5)), 3, 4, 9)
    positives, offsets = torch.tensor([7, 1, -100], device=place.device), torch.tensor([0, 2, 2, 3], device=place.device)
    features = layer.features.clone().requires_grad_()
    given = (layer.weight, layer.supports, layer.offsets)
    loss, lse, target = group_sparse_cross_entropy(features, *given, positives, offsets, return_parts=True, backend=place.backend)
    alone = group_sparse_cross_entropy(features[:1], *given, positives[:2], offsets[:2], backend=place.backend)
    torch.testing.assert_close(loss, alone)
    assert not torch.autograd.grad(loss, features)[0][1:].any()
    assert target[1:].tolist() == [0, 0]
    assert bool((lse != 0).all())


def test_positives_that_are_no_label_and_labels_twice(place: Place) -> None:
    layer = layer_of(jagged_of((3, 5, 20)), 4, 4, 9)
    given = (layer.features, layer.weight, layer.supports, layer.offsets)
    positives, offsets = torch.tensor([27, 0, 3, 1], device=place.device), torch.tensor([0, 2, 2, 3, 4], device=place.device)
    expected = group_sparse_cross_entropy(*given, positives, offsets, return_parts=True, backend=place.backend)
    for more, of_more in (([-7, 27, 0, 3, -7, 1], [0, 3, 3, 4, 6]), ([27, 0, 27, 0, 27, 3, 1, 1], [0, 5, 5, 6, 8])):
        given_ = (torch.tensor(more, device=place.device), torch.tensor(of_more, device=place.device))
        ours = group_sparse_cross_entropy(*given, *given_, ignore_index=-7, return_parts=True, backend=place.backend)
        for got, want in zip(ours, expected, strict=True):
            assert torch.equal(got, want)


@ONE_ORDER
@pytest.mark.parametrize("width", [40, 96, 160])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits_at_every_repeat(place: Place, dtype: torch.dtype, width: int) -> None:
    layer = layer_of(jagged_of((32, 7, 0, 128, 1) * 20), 100, width, width + 10, dtype)
    positives, offsets = positives_of(100, layer.weight.shape[0], 1)

    def run() -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in (layer.features, layer.weight, layer.bias)]
        given = (*leaves[:2], layer.supports, layer.offsets, positives, offsets, leaves[2])
        loss, *parts = group_sparse_cross_entropy(*given, return_parts=True, backend=place.backend)
        return [loss.detach(), *(part.detach() for part in parts), *torch.autograd.grad(loss, leaves)]

    first = run()
    for _ in range(20):
        for again, expected in zip(run(), first, strict=True):
            assert torch.equal(again, expected)


def test_messages_name_argument_and_cure(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    device = place.device
    right: dict[str, Any] = {
        "features": torch.zeros(2, 6, device=device),
        "weight": torch.zeros(5, 3, device=device),
        "supports": torch.tensor([[0, 1, 2], [3, 4, 5]], dtype=torch.int32, device=device),
        "group_offsets": torch.tensor([0, 2, 5], device=device),
        "positives": torch.tensor([4, 0, 2], device=device),
        "offsets": torch.tensor([0, 1, 3], device=device),
    }
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"weight": right["weight"][0]}, ValueError, "weight: expected shape [L, F], got [3]"),
        (
            {"bias": torch.zeros(4, device=device)},
            ValueError,
            "bias: expected shape [5], one number per row of weight [5, 3], got [4]",
        ),
        (
            {"positives": right["positives"].float()},
            TypeError,
            "positives: expected dtype int32, int64, got float32; convert it with .to(...)",
        ),
        (
            {"offsets": torch.tensor([0, 3], device=device)},
            ValueError,
            "offsets: expected shape [3], one more than the rows of features [2, 6], got [2]",
        ),
        (
            {"row_mask": torch.ones(2, device=device)},
            TypeError,
            "row_mask: expected dtype bool, got float32; convert it with .to(...)",
        ),
        (
            {"row_mask": torch.ones(3, dtype=torch.bool, device=device)},
            ValueError,
            "row_mask: expected shape [2], one for each row of features [2, 6], got [3]",
        ),
        ({"ignore_index": 3}, ValueError, "ignore_index: expected a negative number, which is no label, got 3"),
        ({"backend": "cuda"}, ValueError, "backend: got 'cuda', expected 'torch', 'triton' or None to choose by device"),
    ]
    for wrong, error, message in cases:
        with pytest.raises(error) as raised:
            group_sparse_cross_entropy(**{**right, **wrong})
        assert str(raised.value) == message
    monkeypatch.setenv("JAGGED_VALIDATE", "1")
    for wrong, message in (
        (
            {"positives": torch.tensor([4, 5, 2])},
            "positives[1]: expected an id from 0 to 4, or ignore_index (-100), got 5; map ids to dense ones first",
        ),
        (
            {"offsets": torch.tensor([0, 1, 2])},
            "offsets[2]: expected 3, the number of rows, got 2; the last offset is the total length",
        ),
    ):
        with pytest.raises(ValueError) as raised:  # noqa: PT011
            group_sparse_cross_entropy(**{**right, **{name: value.to(device) for name, value in wrong.items()}})
        assert str(raised.value) == message


@pytest.mark.usefixtures("unchecked")
def test_wrong_values_reach_no_foreign_memory(place: Place) -> None:
    """Positives and offsets that lead outside give some loss, finite, and gradients of their own tensors."""
    features, weight = (
        torch.ones(6, 9, device=place.device).requires_grad_(),
        torch.ones(20, 4, device=place.device).requires_grad_(),
    )
    supports = torch.tensor([[-5, 3, 9, 32767], [0, 1, 2, 3]], dtype=torch.int32, device=place.device)
    for offsets in ([0, 1, 2, 3, 4, 5, 99], [0, 9, 1, 3, 2, 2, 4]):
        for positives in ([-7, 1000, 3, 3], [2**31 - 1, 0, 19, 20]):
            for of_groups in ([0, 10, 20], [0, 30, 5]):
                given = (x.to(place.device) for x in map(torch.tensor, (of_groups, positives, offsets)))
                loss = group_sparse_cross_entropy(features, weight, supports, *given, backend=place.backend)
                assert bool(loss.isfinite())
                of_features, _ = torch.autograd.grad(loss, (features, weight))
                assert bool(of_features.isfinite().all())
    # Positives of no row.
    given_ = (features[:0], weight, supports, torch.tensor([0, 10, 20]), torch.tensor([3, 19]), torch.tensor([0]))
    loss = group_sparse_cross_entropy(*(x.to(place.device) for x in given_), backend=place.backend)
    assert float(loss.detach()) == 0


@ON_GPU
def test_captured(place: Place) -> None:
    layer = layer_of(jagged_of((16, 16, 5)), 64, 32, 64, torch.bfloat16)
    positives, offsets = positives_of(64, 37, 1)

    def run() -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in (layer.features, layer.weight, layer.bias)]
        loss = group_sparse_cross_entropy(*leaves[:2], layer.supports, layer.offsets, positives, offsets, leaves[2])
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]

    graph, results = captured(run)
    for seed in (1, 2):
        changed, _ = positives_of(64, 37, seed, most=9)
        positives.copy_(changed.repeat(20)[: positives.shape[0]])
        graph.replay()
        for ours, expected in zip(results, run(), strict=True):
            assert torch.equal(ours, expected)


@ON_GPU
def test_memory_does_not_grow_with_samples_and_parts(place: Place) -> None:
    """16,384 samples of 128 features: sums of all samples for each part would take 4 GB."""
    labels, batch = 20_000, 16_384
    offsets = torch.arange(0, labels + 1, 32, device=place.device)
    supports = torch.arange(16, dtype=torch.int32, device=place.device).expand(labels // 32, 16).contiguous()
    features = random_tensor((batch, 128), torch.bfloat16, 1).requires_grad_()
    weight = random_tensor((labels, 16), torch.bfloat16, 2).requires_grad_()
    positives, of_rows = positives_of(batch, labels, 3)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    group_sparse_cross_entropy(features, weight, supports, offsets, positives, of_rows).backward()
    assert torch.cuda.max_memory_allocated() - before < 300e6


@ON_GPU
def test_no_buffer_of_all_logits(place: Place) -> None:
    """A batch of 512 with 200,000 labels: its logits would take 205 MB."""
    labels, batch = 200_000, 512
    offsets = torch.arange(0, labels + 1, 32, device=place.device)
    supports = torch.arange(16, dtype=torch.int32, device=place.device).expand(labels // 32, 16).contiguous()
    features = random_tensor((batch, 64), torch.bfloat16, 1).requires_grad_()
    weight = random_tensor((labels, 16), torch.bfloat16, 2).requires_grad_()
    positives, of_rows = positives_of(batch, labels, 3)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    group_sparse_cross_entropy(features, weight, supports, offsets, positives, of_rows).backward()
    assert torch.cuda.max_memory_allocated() - before < 120e6
