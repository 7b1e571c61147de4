"""Binary cross-entropy over group-sparse layers, against the whole matrix of logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from jagged.ops import group_sparse_bce
from jagged.ops.group_sparse import configurations, torch_impl
from tests.graphs import captured
from tests.ops.test_group_sparse import BATCH_SIZES, FLAGS, Layer, layer_of
from tests.oracle import check_three_way
from tests.places import ONE_ORDER, PLACE, Place
from tests.reference import group_sparse as reference
from tests.strategies import Jagged, float_dtypes, jagged_batches, jagged_of, random_tensor, seeds

ON_GPU = pytest.mark.gpu
# Slots of a group, of one tile of the backward pass or two, and how many columns more the features have.
WIDTHS = st.tuples(st.sampled_from([1, 16, 33, 80, 144]), st.sampled_from([0, 1, 30]))


def positives_of(batch_size: int, num_labels: int, seed: int, most: int = 5) -> tuple[Tensor, Tensor]:
    """Labels of each row, in no order, some twice; and offsets."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, most + 1, (batch_size,), generator=generator)
    labels = torch.randint(0, max(num_labels, 1), (int(lengths.sum()),), generator=generator)
    if batch_size and lengths[0] > 1:
        labels[1] = labels[0]
    return labels.to(PLACE.device), torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(PLACE.device)


def targets_of(positives: Tensor, offsets: Tensor, num_labels: int) -> Tensor:
    rows = torch.repeat_interleave(offsets.diff())
    return torch.zeros(offsets.shape[0] - 1, num_labels, device=positives.device).index_put_(
        (rows, positives), torch.ones(()).to(positives.device)
    )


def check(
    place: Place,
    layer: Layer,
    positives: Tensor,
    offsets: Tensor,
    wanted: tuple[bool, bool, bool],
    *,
    has_bias: bool = True,
    **options: Any,
) -> None:
    def ours(features: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
        given = (features, weight, layer.supports, layer.offsets, positives, offsets, *bias)
        return group_sparse_bce(*given, **options, backend=place.backend)

    def expected(features: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
        logits = reference.group_sparse_linear(features, weight, layer.supports, layer.sizes, *bias)
        # As ours: the logits of a dtype are its products, in float32.
        loss = reference.group_sparse_bce(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets, **options)
        return loss

    targets = targets_of(positives, offsets, layer.weight.shape[0])
    inputs = [layer.features, layer.weight, *([layer.bias] if has_bias else [])]
    check_three_way(ours, expected, inputs, requires_grad=wanted[: len(inputs)])


@given(jagged_batches(), BATCH_SIZES, WIDTHS, float_dtypes(), seeds(), FLAGS, FLAGS, st.sampled_from([0.0, 0.2, 1.0]))
def test_group_sparse_bce(
    place: Place,
    groups: Jagged,
    batch_size: int,
    widths: tuple[int, int],
    dtype: torch.dtype,
    seed: int,
    wanted: tuple[bool, bool, bool],
    more: tuple[bool, bool, bool],
    smoothing: float,
) -> None:
    # The yardstick is a largest error, which over few elements may be nothing by luck: there is always a group of some labels.
    groups = jagged_of((*groups.lengths, 9), groups.offsets.dtype)
    width, further = widths
    layer = layer_of(groups, batch_size, width, width + further, dtype, seed, strided=more[2])
    generator = torch.Generator().manual_seed(seed)
    options: dict[str, Any] = {"label_smoothing": smoothing}
    if more[0]:
        options["label_weight"] = torch.rand(groups.total, generator=generator).to(place.device)
    if more[1]:
        options["row_mask"] = (torch.rand(batch_size, generator=generator) < 0.7).to(place.device)
    check(place, layer, *positives_of(batch_size, groups.total, seed), wanted, has_bias=more[2], **options)


@pytest.mark.parametrize("wanted", [(a, b, c) for a in (True, False) for b in (True, False) for c in (True, False)])
def test_every_subset_of_gradients(place: Place, wanted: tuple[bool, bool, bool]) -> None:
    """Also of groups longer than a tile, that share columns, in several parts."""
    layer = layer_of(jagged_of((3, 0, 1, 70, 17) * 3), 20, 5, 7)
    check(place, layer, *positives_of(20, layer.weight.shape[0], 3), wanted)


@pytest.mark.parametrize("width", [5, 40, 140])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adjacent_columns(place: Place, dtype: torch.dtype, width: int) -> None:
    layer = layer_of(jagged_of((3, 0, 1, 70, 17) * 3), 20, width, width + 20, dtype, adjacent=True)
    check(place, layer, *positives_of(20, layer.weight.shape[0], 3), (True, True, True))


@pytest.mark.parametrize("sizes", [(), (0,), (0, 0, 0), (1,), (0, 1, 40, 0)])
@pytest.mark.parametrize("batch_size", [0, 3])
def test_few_labels_and_none(place: Place, sizes: tuple[int, ...], batch_size: int) -> None:
    layer = layer_of(jagged_of(sizes, torch.int32), batch_size, 4, 6)
    positives, offsets = positives_of(batch_size, sum(sizes), 1, most=3 if sum(sizes) else 0)
    leaves = [x.clone().requires_grad_() for x in (layer.features, layer.weight, layer.bias)]
    loss = group_sparse_bce(*leaves[:2], layer.supports, layer.offsets, positives, offsets, leaves[2], backend=place.backend)
    logits = reference.group_sparse_linear(*leaves[:2], layer.supports, sizes, leaves[2])
    expected = reference.group_sparse_bce(logits, targets_of(positives, offsets, sum(sizes)))
    for got, want in zip(
        [loss, *torch.autograd.grad(loss, leaves)], [expected, *torch.autograd.grad(expected, leaves)], strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_one_feature_of_a_whole_step_of_samples(place: Place) -> None:
    """A matrix of one row has whatever stride."""
    check(place, layer_of(jagged_of((9,)), 16, 1, 1), *positives_of(16, 9, 1), (True, True, True))


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
    check(place, layer, *positives_of(16, 22, 2), (True, True, True), label_weight=torch.rand(22, device=place.device))


@pytest.mark.parametrize("dtype", PLACE.dtypes, ids=str)
def test_logits_far_from_zero(place: Place, dtype: torch.dtype) -> None:
    """Losses that vanish keep their digits, large ones do not overflow: of logits from -40 to 40, a label each."""
    logits = torch.linspace(-40, 40, 33, device=place.device).to(dtype)
    ones, zeros = torch.ones(2, 1, dtype=dtype, device=place.device), torch.zeros(33, 1, dtype=dtype, device=place.device)
    supports = torch.zeros(1, 1, dtype=torch.int32, device=place.device)
    bias = logits.clone().requires_grad_()
    for positives in (torch.arange(0), torch.arange(33)):
        offsets = torch.tensor([0, positives.shape[0], positives.shape[0]], device=place.device)
        alone = torch.tensor([True, False], device=place.device)
        given = (ones, zeros, supports, torch.tensor([0, 33], device=place.device), positives.to(place.device), offsets, bias)
        loss = group_sparse_bce(*given, row_mask=alone, backend=place.backend)
        exact = bias.detach().double().requires_grad_()
        signs = 1.0 if positives.shape[0] == 0 else -1.0
        expected = -torch.nn.functional.logsigmoid(-signs * exact).sum()
        (found,), (wanted,) = torch.autograd.grad(loss, bias), torch.autograd.grad(expected, exact)
        torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
        # A float32 logit errs by half a unit of its last place, and its exponential by as much, relatively.
        bound = (4 + exact.detach().abs()) * torch.finfo(dtype).eps * wanted.abs()
        assert ((found.double() - wanted).abs() <= bound + (1e-6 if dtype == torch.float16 else 1e-30)).all()
    # What is nearly nothing is not nothing.
    small = torch.full((1000,), -16.0, device=place.device, dtype=dtype)
    given = (ones[:1], zeros[:1].expand(1000, 1), supports, torch.tensor([0, 1000], device=place.device))
    loss = group_sparse_bce(
        *given, torch.arange(0, device=place.device), torch.tensor([0, 0], device=place.device), small, backend=place.backend
    )
    torch.testing.assert_close(float(loss.detach()), 1000 * 1.1253516163785e-07, rtol=1e-5, atol=0)


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
        loss = group_sparse_bce(*given, row_mask=mask, backend=place.backend)
        results.append([loss, *torch.autograd.grad(loss, leaves)])
    for ours, expected in zip(*results, strict=True):
        assert torch.equal(ours, expected)
    assert not results[1][1][~mask].any()
    # None at all.
    leaf = layer.weight.clone().requires_grad_()
    given = (layer.features, leaf, layer.supports, layer.offsets, positives, offsets)
    loss = group_sparse_bce(*given, row_mask=torch.zeros_like(mask), backend=place.backend)
    assert float(loss.detach()) == 0
    assert not torch.autograd.grad(loss, leaf)[0].any()


def test_positives_that_are_no_label(place: Place) -> None:
    layer = layer_of(jagged_of((3, 5, 20)), 4, 4, 9)
    given = (layer.features, layer.weight, layer.supports, layer.offsets)
    positives, offsets = torch.tensor([27, 0, 3, 1], device=place.device), torch.tensor([0, 2, 2, 3, 4], device=place.device)
    more, of_more = torch.tensor([-7, 27, 0, 3, -7, 1], device=place.device), torch.tensor([0, 3, 3, 4, 6], device=place.device)
    expected = group_sparse_bce(*given, positives, offsets, backend=place.backend)
    assert torch.equal(group_sparse_bce(*given, more, of_more, ignore_index=-7, backend=place.backend), expected)


@ONE_ORDER
@pytest.mark.parametrize("width", [40, 96, 160])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits_at_every_repeat(place: Place, dtype: torch.dtype, width: int) -> None:
    layer = layer_of(jagged_of((32, 7, 0, 128, 1) * 20), 100, width, width + 10, dtype)
    positives, offsets = positives_of(100, layer.weight.shape[0], 1)

    def run() -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in (layer.features, layer.weight, layer.bias)]
        loss = group_sparse_bce(*leaves[:2], layer.supports, layer.offsets, positives, offsets, leaves[2], backend=place.backend)
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]

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
            {"label_weight": torch.ones(4, device=device)},
            ValueError,
            "label_weight: expected shape [5], one number per row of weight [5, 3], got [4]",
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
        ({"label_smoothing": 1.5}, ValueError, "label_smoothing: expected a number in [0, 1], got 1.5"),
        ({"label_smoothing": float("nan")}, ValueError, "label_smoothing: expected a number in [0, 1], got nan"),
        ({"backend": "cuda"}, ValueError, "backend: got 'cuda', expected 'torch', 'triton' or None to choose by device"),
    ]
    for wrong, error, message in cases:
        with pytest.raises(error) as raised:
            group_sparse_bce(**{**right, **wrong})
        assert str(raised.value) == message
    monkeypatch.setenv("JAGGED_VALIDATE", "1")
    for wrong, message in (
        (
            {"positives": torch.tensor([4, 5, 2])},
            "positives[1]: expected an id from 0 to 4, or ignore_index (-100), got 5; map ids to dense ones first",
        ),
        (
            {"positives": torch.tensor([4, 0, -1])},
            "positives[2]: expected an id from 0 to 4, or ignore_index (-100), got -1; map ids to dense ones first",
        ),
        (
            {"offsets": torch.tensor([0, 1, 2])},
            "offsets[2]: expected 3, the number of rows, got 2; the last offset is the total length",
        ),
    ):
        with pytest.raises(ValueError) as raised:  # noqa: PT011
            group_sparse_bce(**{**right, **{name: value.to(device) for name, value in wrong.items()}})
        assert str(raised.value) == message


def test_more_columns_than_a_tile_has(place: Place) -> None:
    """Also of labels and of samples, so that every loop of the kernels runs twice."""
    layer = layer_of(jagged_of((3, 40)), 40, 140, 150)
    check(place, layer, *positives_of(40, 43, 1), (True, True, True))


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
                given = (torch.tensor(of_groups), torch.tensor(positives), torch.tensor(offsets))
                loss = group_sparse_bce(features, weight, supports, *(x.to(place.device) for x in given), backend=place.backend)
                assert bool(loss.isfinite())
                of_features, _ = torch.autograd.grad(loss, (features, weight))
                assert bool(of_features.isfinite().all())


@ON_GPU
def test_captured(place: Place) -> None:
    layer = layer_of(jagged_of((16, 16, 5)), 64, 32, 64, torch.bfloat16)
    positives, offsets = positives_of(64, 37, 1)

    def run() -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in (layer.features, layer.weight, layer.bias)]
        loss = group_sparse_bce(*leaves[:2], layer.supports, layer.offsets, positives, offsets, leaves[2])
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
    group_sparse_bce(features, weight, supports, offsets, positives, of_rows).backward()
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
    group_sparse_bce(features, weight, supports, offsets, positives, of_rows).backward()
    assert torch.cuda.max_memory_allocated() - before < 120e6
