"""Group-sparse linear layers, against products with all their zeros."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from jagged.ops import group_sparse_linear, group_sparse_topk, trust_values
from jagged.ops.group_sparse import configurations, torch_impl
from tests.graphs import captured
from tests.oracle import check_three_way
from tests.places import ONE_ORDER, PLACE, Place
from tests.reference import group_sparse as reference
from tests.strategies import Jagged, float_dtypes, jagged_batches, jagged_of, random_tensor, seeds

ON_GPU = pytest.mark.gpu
NOT_INTERPRETED = pytest.mark.skipif(PLACE.name == "interpret", reason="interpreted kernels are not compiled")
INT_DTYPES = st.sampled_from([torch.int32, torch.int16])
# Slots of a group, and how many columns more the features have: one tile, some, a tile and a bit, odd ones.
WIDTHS = st.tuples(st.sampled_from([1, 3, 16, 33, 70]), st.sampled_from([0, 1, 30]))
# Samples: none, one, a tile and a bit.
BATCH_SIZES = st.sampled_from([0, 1, 5, 16, 70])
FLAGS = st.tuples(*[st.booleans()] * 3)


@dataclass(frozen=True)
class Layer:
    """What a call takes, and how many labels each group has."""

    features: Tensor
    weight: Tensor
    supports: Tensor
    offsets: Tensor
    bias: Tensor
    sizes: tuple[int, ...]


def layer_of(
    groups: Jagged,
    batch_size: int,
    width: int,
    num_features: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    *,
    strided: bool = False,
    of_supports: torch.dtype = torch.int32,
    adjacent: bool = False,
) -> Layer:
    """Return random numbers; columns of each group in an order of their own, or adjacent ones."""
    generator = torch.Generator().manual_seed(seed)
    columns = [torch.randperm(num_features, generator=generator)[:width] for _ in range(groups.batch_size)]
    supports = torch.stack(columns) if columns else torch.zeros(0, width)
    if adjacent:
        supports = torch.randint(0, num_features - width + 1, (groups.batch_size,), generator=generator)
    shapes = (batch_size, num_features), (groups.total, width), (groups.total,)
    features, weight, bias = (random_tensor(shape, dtype, seed + k, strided=strided) for k, shape in enumerate(shapes))
    return Layer(features, weight, supports.to(of_supports).to(PLACE.device), groups.offsets, bias, groups.lengths)


def check(place: Place, layer: Layer, wanted: tuple[bool, bool, bool], *, has_bias: bool = True) -> None:
    def ours(features: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
        return group_sparse_linear(features, weight, layer.supports, layer.offsets, *bias, backend=place.backend)

    def expected(features: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
        return reference.group_sparse_linear(features, weight, layer.supports, layer.sizes, *bias)

    inputs = [layer.features, layer.weight, *([layer.bias] if has_bias else [])]
    check_three_way(ours, expected, inputs, requires_grad=wanted[: len(inputs)])


@given(jagged_batches(), BATCH_SIZES, WIDTHS, float_dtypes(), seeds(), st.booleans(), FLAGS, INT_DTYPES)
def test_group_sparse_linear(
    place: Place,
    groups: Jagged,
    batch_size: int,
    widths: tuple[int, int],
    dtype: torch.dtype,
    seed: int,
    strided: bool,
    wanted: tuple[bool, bool, bool],
    of_supports: torch.dtype,
) -> None:
    # The yardstick is a largest error, which over few elements may be nothing by luck: there is always a group of some labels.
    groups = jagged_of((*groups.lengths, 9), groups.offsets.dtype)
    width, more = widths
    layer = layer_of(groups, batch_size, width, width + more, dtype, seed, strided=strided, of_supports=of_supports)
    check(place, layer, wanted)


@given(jagged_batches(), BATCH_SIZES, WIDTHS, float_dtypes(), seeds(), st.booleans(), FLAGS)
def test_without_a_bias(
    place: Place,
    groups: Jagged,
    batch_size: int,
    widths: tuple[int, int],
    dtype: torch.dtype,
    seed: int,
    strided: bool,
    wanted: tuple[bool, bool, bool],
) -> None:
    groups = jagged_of((*groups.lengths, 9), groups.offsets.dtype)
    width, more = widths
    check(place, layer_of(groups, batch_size, width, width + more, dtype, seed, strided=strided), wanted, has_bias=False)


@given(jagged_batches(), BATCH_SIZES, WIDTHS, float_dtypes(), seeds(), st.booleans(), FLAGS, INT_DTYPES)
def test_adjacent_columns(
    place: Place,
    groups: Jagged,
    batch_size: int,
    widths: tuple[int, int],
    dtype: torch.dtype,
    seed: int,
    strided: bool,
    wanted: tuple[bool, bool, bool],
    of_supports: torch.dtype,
) -> None:
    """Blocks of columns that are the same, that overlap, and that have none in common."""
    groups = jagged_of((*groups.lengths, 9, 3, 9), groups.offsets.dtype)
    width, more = widths
    given: dict[str, Any] = {"strided": strided, "of_supports": of_supports, "adjacent": True}
    check(place, layer_of(groups, batch_size, width, width + more, dtype, seed, **given), wanted)


@pytest.mark.parametrize("adjacent", [False, True])
@pytest.mark.parametrize("wanted", [(a, b, c) for a in (True, False) for b in (True, False) for c in (True, False)])
def test_every_subset_of_gradients(place: Place, wanted: tuple[bool, bool, bool], adjacent: bool) -> None:
    """Also where groups share columns, in several parts whose sums are added up."""
    check(place, layer_of(jagged_of((3, 0, 1, 40, 17) * 3), 20, 5, 7, adjacent=adjacent), wanted)


@pytest.mark.parametrize("sizes", [(), (0,), (0, 0, 0), (1,), (1, 1, 1), (0, 1, 128, 0)])
@pytest.mark.parametrize("batch_size", [0, 3])
@pytest.mark.parametrize("adjacent", [False, True])
def test_few_labels_and_none(place: Place, sizes: tuple[int, ...], batch_size: int, adjacent: bool) -> None:
    layer = layer_of(jagged_of(sizes, torch.int32), batch_size, 4, 6, adjacent=adjacent)
    leaves = [x.clone().requires_grad_() for x in (layer.features, layer.weight, layer.bias)]
    out = group_sparse_linear(*leaves[:2], layer.supports, layer.offsets, leaves[2], backend=place.backend)
    expected = reference.group_sparse_linear(*leaves[:2], layer.supports, sizes, leaves[2])
    assert out.shape == (batch_size, sum(sizes))
    for got, want in zip(
        [out, *torch.autograd.grad(out.square().sum(), leaves)],
        [expected, *torch.autograd.grad(expected.square().sum(), leaves)],
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(PLACE.name == "cpu", reason="where sums lie is the kernels' choice")
@pytest.mark.parametrize("kibibytes", [0, 16, 32, 99])
def test_shared_memory_of_any_size(place: Place, kibibytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums in global memory, and of 16, 32 and 64 samples; labels of more than a tile, and a group of none."""
    from jagged.ops.group_sparse import kernels

    chosen = kernels.gpu(PLACE.device)._replace(shared_bytes=(1024 * kibibytes, 1024 * kibibytes))
    monkeypatch.setattr(kernels, "gpu", lambda device: chosen)
    for width in (16, 70):
        layer = layer_of(jagged_of((16, 0, 70, 5, 33), torch.int32), 70, width, 100, torch.bfloat16)
        check(place, layer, (True, False, False))


@pytest.mark.parametrize("samples", [1, 7])
def test_pieces_do_not_change_the_result(place: Place, samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of PyTorch's implementation a piece for each group and some samples."""
    monkeypatch.setattr(torch_impl, "PIECE_ELEMENTS", 1)
    monkeypatch.setattr(torch_impl, "PIECE_SAMPLES", samples)
    check(place, layer_of(jagged_of((3, 0, 1, 9, 9)), 16, 5, 7), (True, True, True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_bias_is_added_before_the_rounding(place: Place, dtype: torch.dtype) -> None:
    """The sum alone, one more than a power of two, would be rounded down, and so would it with 1 more."""
    first = 2.0 / torch.finfo(dtype).eps
    features = torch.tensor([[first, 1.0]], device=place.device).to(dtype)
    ones, offsets = torch.ones(3, 2, dtype=dtype, device=place.device), torch.tensor([0, 3], device=place.device)
    supports = torch.tensor([[1, 0]], dtype=torch.int32, device=place.device)
    out = group_sparse_linear(features, ones, supports, offsets, ones[:, 0], backend=place.backend)
    assert out.tolist() == [[first + 2] * 3]


@pytest.mark.parametrize("of_grad", ["expanded", "transposed"])
def test_gradients_that_are_strided(place: Place, of_grad: str) -> None:
    layer = layer_of(jagged_of((3, 5)), 6, 4, 9)
    leaves = [x.clone().requires_grad_() for x in (layer.features, layer.weight, layer.bias)]
    out = group_sparse_linear(*leaves[:2], layer.supports, layer.offsets, leaves[2], backend=place.backend)
    grad = (
        torch.ones((), device=place.device).expand(6, 8) if of_grad == "expanded" else random_tensor((8, 6), torch.float32, 5).t()
    )
    found = torch.autograd.grad(out, leaves, grad, retain_graph=True)
    for ours, expected in zip(found, torch.autograd.grad(out, leaves, grad.contiguous()), strict=True):
        assert ours.is_contiguous()
        assert torch.equal(ours, expected)


def test_features_in_wider_memory(place: Place) -> None:
    """Rows of the transposed features that need no copy: what lies between them, and past the last, is not theirs."""
    layer = layer_of(jagged_of((3, 5)), 16, 4, 9)
    fence = torch.full((9, 32), float("nan"), device=place.device)
    fence[:, :16] = layer.features.t()
    leaves = [x.clone().requires_grad_() for x in (layer.features, layer.weight)]
    inside = [fence[:, :16].t().requires_grad_(), layer.weight.clone().requires_grad_()]
    outputs = [group_sparse_linear(*x, layer.supports, layer.offsets, backend=place.backend) for x in (leaves, inside)]
    assert torch.equal(*outputs)
    grads = (torch.autograd.grad(out.square().sum(), x) for out, x in zip(outputs, (leaves, inside), strict=True))
    for ours, expected in zip(*grads, strict=True):
        assert torch.equal(ours, expected)


def test_neighbours_that_are_no_numbers_do_not_spread(place: Place) -> None:
    """Zero times NaN is NaN: a group's weights and gradients enter no product of another's."""
    layer = layer_of(jagged_of((3, 5, 20)), 6, 4, 12)
    supports = torch.arange(12, dtype=torch.int32, device=place.device).view(3, 4)

    def run(weight: Tensor, features: Tensor, grad: Tensor) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in (features, weight, layer.bias)]
        out = group_sparse_linear(*leaves[:2], supports, layer.offsets, leaves[2], backend=place.backend)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    given = [layer.weight, layer.features, random_tensor((6, 28), torch.float32, 7)]
    labels, columns = torch.arange(28) >= 8, torch.arange(12) >= 8
    labels[:3], columns[:4] = True, True
    expected = run(*given)
    for place_of_nan, bad in ((0, (slice(3, 8),)), (1, (slice(None), slice(4, 8))), (2, (slice(None), slice(3, 8)))):
        changed = [x.clone() for x in given]
        changed[place_of_nan][bad] = float("nan")
        found = run(*changed)
        assert any(bool(x.isnan().any()) for x in found)
        for ours, before, kept in zip(found, expected, (labels, columns, labels, labels), strict=True):
            axis = 1 if ours.dim() == 2 and ours.shape[0] == 6 else 0
            index = kept.nonzero().flatten().to(place.device)
            torch.testing.assert_close(ours.index_select(axis, index), before.index_select(axis, index))


@pytest.mark.usefixtures("unchecked")
def test_wrong_values_reach_no_foreign_memory(place: Place) -> None:
    """Offsets that fall or lead outside, and columns that are not there, give some numbers, none of foreign memory."""

    def fenced(rows: int, columns: int, value: float) -> Tensor:
        return torch.full((rows + 80, columns), float("nan"), device=place.device)[40:-40].fill_(value)

    features, weight = fenced(6, 9, 1.0).requires_grad_(), fenced(20, 4, 1.0).requires_grad_()
    for wrong in ([0, 19, 5, 130], [-70, 4, 20, 20], [0, 1000, 2000, 3000], [-(2**31), 2**31 - 1, -5, 20]):
        for of_supports in (torch.int32, torch.int16):
            supports = torch.tensor([[-5, 3, 9, 32767], [-32768, 0, 1, 2], [0, 1, 2, 3]], dtype=of_supports, device=place.device)
            for of_offsets in (torch.int32, torch.int64):
                offsets = torch.tensor(wrong, dtype=of_offsets, device=place.device)
                out = group_sparse_linear(features, weight, supports, offsets, backend=place.backend)
                # Labels that no group claims stay unwritten.
                assert set(out[~out.isnan()].tolist()) <= {0.0, 4.0}
                of_features, of_weight = torch.autograd.grad(out, (features, weight), torch.ones_like(out))
                assert bool(of_features.isfinite().all())
                assert set(of_weight[~of_weight.isnan()].tolist()) <= {0.0, 6.0}
                first = torch.tensor([-32768, 9, 32767], dtype=of_supports, device=place.device)
                out = group_sparse_linear(features, weight, first, offsets, backend=place.backend)
                assert set(out[~out.isnan()].tolist()) <= {0.0, 4.0}
                assert bool(torch.autograd.grad(out, features, torch.ones_like(out))[0].isfinite().all())


def test_strided_supports_and_offsets(place: Place) -> None:
    layer = layer_of(jagged_of((3, 5)), 6, 4, 9)
    offsets, supports = torch.stack([layer.offsets, layer.offsets + 100], 1)[:, 0], layer.supports.t().contiguous().t()
    given = layer.features, layer.weight
    expected = group_sparse_linear(*given, layer.supports, layer.offsets, backend=place.backend)
    assert torch.equal(group_sparse_linear(*given, supports, offsets, backend=place.backend), expected)


@ONE_ORDER
@pytest.mark.parametrize("adjacent", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits_at_every_repeat(place: Place, dtype: torch.dtype, adjacent: bool) -> None:
    """Groups that share columns, whose gradients are added up in one order."""
    layer = layer_of(jagged_of((32, 7, 0, 128, 1) * 20), 100, 40, 50, dtype, adjacent=adjacent)

    def run() -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in (layer.features, layer.weight, layer.bias)]
        out = group_sparse_linear(*leaves[:2], layer.supports, layer.offsets, leaves[2], backend=place.backend)
        return [out.detach(), *torch.autograd.grad(out, leaves, out.detach())]

    first = run()
    for _ in range(20):
        for again, expected in zip(run(), first, strict=True):
            assert torch.equal(again, expected)


def test_messages_name_argument_and_cure(place: Place) -> None:
    device = place.device
    features, weight, bias = torch.zeros(2, 6, device=device), torch.zeros(5, 3, device=device), torch.zeros(5, device=device)
    supports = torch.tensor([[0, 1, 2], [3, 4, 5]], dtype=torch.int32, device=device)
    offsets = torch.tensor([0, 2, 5], device=device)
    right: dict[str, Any] = {"features": features, "weight": weight, "supports": supports, "group_offsets": offsets, "bias": bias}
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"features": features[0]}, ValueError, "features: expected shape [B, H], got [6]"),
        (
            {"features": features.int()},
            TypeError,
            "features: expected dtype float32, bfloat16, float16, float64, got int32; convert it with .to(...)",
        ),
        ({"weight": weight[0]}, ValueError, "weight: expected shape [L, F], got [3]"),
        (
            {"weight": weight.half()},
            TypeError,
            "weight: expected the dtype of features, float32, got float16; convert one of them",
        ),
        (
            {"weight": weight[:, :0]},
            ValueError,
            "weight: expected shape [L, F], F from 1 to 6, the columns of features, got [5, 0]",
        ),
        (
            {"features": features[:, :2]},
            ValueError,
            "weight: expected shape [L, F], F from 1 to 2, the columns of features, got [5, 3]",
        ),
        ({"supports": supports[None]}, ValueError, "supports: expected shape [K, F], got [1, 2, 3]"),
        (
            {"supports": supports[0]},
            ValueError,
            "group_offsets: expected shape [4], one more than the groups of supports [3], got [3]",
        ),
        (
            {"supports": supports.long()},
            TypeError,
            "supports: expected dtype int32, int16, got int64; convert it with .to(...)",
        ),
        (
            {"supports": supports[:, :2]},
            ValueError,
            "supports: expected shape [K, 3], a column of features for each column of weight [5, 3], got [2, 2]",
        ),
        (
            {"group_offsets": offsets.float()},
            TypeError,
            "group_offsets: expected dtype int32, int64, got float32; convert it with .to(...)",
        ),
        (
            {"group_offsets": offsets[:0]},
            ValueError,
            "group_offsets: expected shape [B + 1], got [0]; an empty batch has one offset, 0",
        ),
        (
            {"supports": supports[:1]},
            ValueError,
            "group_offsets: expected shape [2], one more than the groups of supports [1, 3], got [3]",
        ),
        ({"bias": bias[None]}, ValueError, "bias: expected shape [L], got [1, 5]"),
        ({"bias": bias.half()}, TypeError, "bias: expected the dtype of features, float32, got float16; convert one of them"),
        ({"bias": bias[:4]}, ValueError, "bias: expected shape [5], one number per row of weight [5, 3], got [4]"),
        ({"backend": "cuda"}, ValueError, "backend: got 'cuda', expected 'torch', 'triton' or None to choose by device"),
    ]
    for wrong, error, message in cases:
        with pytest.raises(error) as raised:
            group_sparse_linear(**{**right, **wrong})
        assert str(raised.value) == message
    meta = {name: value if name == "supports" else value.to("meta") for name, value in right.items()}
    with pytest.raises(ValueError, match=r"^supports: expected the device of features, meta, got \w+(:\d)?; move one of them$"):
        group_sparse_linear(**meta)


def test_values_are_checked_on_demand(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU by default, everywhere by `JAGGED_VALIDATE=1`, where they are trusted not."""
    features, weight = torch.zeros(2, 6, device=place.device), torch.zeros(5, 3, device=place.device)
    right_supports, right_offsets = [[0, 5, 2], [3, 4, 5]], [0, 2, 5]
    cases = [
        (
            [[0, 1, 2], [3, 6, 5]],
            right_offsets,
            "supports[1, 1]: expected a column of features, from 0 to 5, got 6; columns are counted from 0",
        ),
        (
            [[0, 1, -1], [3, 4, 5]],
            right_offsets,
            "supports[0, 2]: expected a column of features, from 0 to 5, got -1; columns are counted from 0",
        ),
        (
            [[0, 1, 2], [3, 4, 3]],
            right_offsets,
            "supports[1]: expected columns that differ, got 3 twice; put another in its place, with weights of 0 if none is to "
            "count",
        ),
        (
            [0, 4],
            right_offsets,
            "supports[1]: expected the first of 3 adjacent columns of features, from 0 to 3, got 4; columns are counted from 0",
        ),
        (
            [-1, 3],
            right_offsets,
            "supports[0]: expected the first of 3 adjacent columns of features, from 0 to 3, got -1; columns are counted from 0",
        ),
        (
            right_supports,
            [0, 3, 2],
            "group_offsets[2]: expected at least 3, the offset before it, got 2; offsets never decrease",
        ),
        (
            right_supports,
            [0, 2, 4],
            "group_offsets[2]: expected 5, the number of rows, got 4; the last offset is the total length",
        ),
    ]
    for supports, offsets, message in cases:
        for dtype in (torch.int32, torch.int16):
            given = torch.tensor(supports, dtype=dtype, device=place.device), torch.tensor(offsets, device=place.device)
            with trust_values():
                group_sparse_linear(features, weight, *given, backend=place.backend)
            with monkeypatch.context() as patch:
                patch.setenv("JAGGED_VALIDATE", "1")
                with pytest.raises(ValueError, match=r"^(supports|group_offsets)\[") as raised:
                    group_sparse_linear(features, weight, *given, backend=place.backend)
                assert str(raised.value) == message
    given = (torch.tensor(right_supports, device=place.device).int(), torch.tensor(right_offsets, device=place.device))
    monkeypatch.setenv("JAGGED_VALIDATE", "1")
    group_sparse_linear(features, weight, *given, backend=place.backend)


@pytest.mark.parametrize("has_bias", [True, False])
def test_opcheck(place: Place, has_bias: bool) -> None:
    layer = layer_of(jagged_of((2, 0, 3)), 4, 3, 5)
    inputs = (layer.features, layer.weight, layer.supports, layer.offsets, layer.bias if has_bias else None)
    torch.library.opcheck(torch.ops.jagged.group_sparse_linear.default, (*inputs, place.backend))
    dtypes = (torch.float32, torch.float32, torch.float32 if has_bias else None)
    grad = random_tensor((4, 5), torch.float32, 9)
    torch.library.opcheck(torch.ops.jagged.group_sparse_linear_backward.default, (grad, *inputs, None, *dtypes, place.backend))


@pytest.mark.skipif(PLACE.name != "cpu", reason="float64 finite differences are the CPU's work")
def test_gradcheck(place: Place) -> None:
    layer = layer_of(jagged_of((2, 0, 3)), 4, 3, 5, torch.float64)
    leaves = tuple(x.requires_grad_() for x in (layer.features, layer.weight, layer.bias))

    def function(features: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return group_sparse_linear(features, weight, layer.supports, layer.offsets, bias)

    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradcheck(function, leaves[:2])


def test_a_second_derivative_is_refused(place: Place) -> None:
    layer = layer_of(jagged_of((2, 0, 3)), 4, 3, 5)
    weight = layer.weight.requires_grad_()
    out = group_sparse_linear(layer.features, weight, layer.supports, layer.offsets, backend=place.backend)
    (grad,) = torch.autograd.grad(out.square().sum(), weight, create_graph=True)
    message = "^group_sparse_linear has no second derivative; for one, use torch's own operations on padded tensors$"
    with pytest.raises(RuntimeError, match=message):
        torch.autograd.grad(grad.square().sum(), weight)


@pytest.mark.parametrize("is_backward_inside", [False, True])
def test_autocast_casts_as_linear_does(place: Place, is_backward_inside: bool) -> None:
    """The dtype of results is autocast's, that of gradients the inputs' own, which keep what a cast would round away."""
    layer = layer_of(jagged_of((6, 0, 20)), 10, 8, 12)
    leaves = [x.requires_grad_() for x in (layer.features, layer.weight, layer.bias)]
    low = [x.detach().bfloat16().requires_grad_() for x in leaves]

    def run(features: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return group_sparse_linear(features, weight, layer.supports, layer.offsets, bias, backend=place.backend)

    with torch.autocast(place.device.type, dtype=torch.bfloat16):
        found = run(*leaves)
    expected = run(*low)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected)
    with torch.autocast(place.device.type, dtype=torch.bfloat16, enabled=is_backward_inside):
        grads = torch.autograd.grad(found, leaves, torch.ones_like(found))
    for ours, theirs in zip(grads, torch.autograd.grad(expected, low, torch.ones_like(found)), strict=True):
        assert ours.dtype == torch.float32
        # The interpreter cuts what it stores in bfloat16.
        torch.testing.assert_close(ours, theirs.float(), rtol=2.0**-7, atol=0)


@NOT_INTERPRETED
def test_one_graph_for_all_sizes(place: Place) -> None:
    graphs = 0

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        nonlocal graphs
        graphs += 1
        return graph.forward

    def function(features: Tensor, weight: Tensor, supports: Tensor, offsets: Tensor, bias: Tensor) -> Tensor:
        return group_sparse_linear(features, weight, supports, offsets, bias) + group_sparse_linear(
            features, weight, supports, offsets
        )

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=count)
    # No two sizes of the first call are equal: the compiler would take them for one.
    for batch_size, sizes in ((6, (2, 4, 3)), (7, (5, 0, 1, 9)), (3, (0, 7)), (130, (30, 2, 2, 2, 2)), (5, (90, 70, 3))):
        layer = layer_of(jagged_of(sizes), batch_size, 5, 13)
        leaves = [x.requires_grad_() for x in (layer.features, layer.weight, layer.bias)]
        given = (*leaves[:2], layer.supports, layer.offsets, leaves[2])
        got, expected = compiled(*given), function(*given)
        assert torch.equal(got, expected)
        for left, right in zip(*(torch.autograd.grad(out.square().sum(), leaves) for out in (got, expected)), strict=True):
            assert torch.equal(left, right)
    assert graphs == 1


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize(
    "choose",
    [configurations.forward_configuration, configurations.weight_configuration, configurations.feature_configuration],
)
def test_tiles_suit_the_matrix_instructions(choose: Callable[..., configurations.Configuration], itemsize: int) -> None:
    for num_labels, num_groups, width in ((1, 1, 1), (100, 7, 17), (10**6, 31_250, 64), (10**6, 8_000, 512)):
        for batch_size in (1, 64, 65):
            chosen = choose(num_labels, num_groups, batch_size, width, itemsize)
            for size in (chosen.block_l, chosen.block_f, chosen.block_b):
                assert size >= 16
                assert size & (size - 1) == 0


@ON_GPU
@pytest.mark.parametrize(
    ("first", "later"), [((64, 17, 1), (16, 33, 48, 5)), ((128, 700, 1024), (129, 256, 257, 2048))], ids=["small", "large"]
)
def test_kernels_are_compiled_for_batches_of_a_kind(place: Place, first: tuple[int, ...], later: tuple[int, ...]) -> None:
    """One of a multiple of 16 samples, one of others, one of a single sample; any later size finds them there."""
    from jagged.ops.group_sparse import kernels

    every = [getattr(kernels, f"group_sparse_{name}_kernel") for name in ("forward", "weight_gradient", "feature_gradient")]
    compiled = []
    for batch_size in first + later:
        layer = layer_of(jagged_of((16, 16, 16)), batch_size, 32, 64, torch.bfloat16)
        leaves = [x.requires_grad_() for x in (layer.features, layer.weight, layer.bias)]
        out = group_sparse_linear(*leaves[:2], layer.supports, layer.offsets, leaves[2])
        torch.autograd.grad(out, leaves, torch.ones_like(out))
        compiled.append([len(kernel.device_caches[0][0]) for kernel in every])
    assert all(counts == compiled[len(first) - 1] for counts in compiled[len(first) :])


@ON_GPU
def test_no_synchronisation_and_graph_capture(place: Place) -> None:
    layer = layer_of(jagged_of((10, 0, 50)), 40, 12, 20)
    leaves = [x.requires_grad_() for x in (layer.features, layer.weight, layer.bias)]

    def step() -> Tensor:
        out = group_sparse_linear(*leaves[:2], layer.supports, layer.offsets, leaves[2])
        return torch.cat([grad.flatten() for grad in torch.autograd.grad(out.square().sum(), leaves)])

    graph, results = captured(step)
    for sizes in ((10, 0, 50), (5, 50, 5), (0, 0, 60)):
        layer.offsets.copy_(jagged_of(sizes).offsets)
        graph.replay()
        assert torch.equal(results, step())


@ON_GPU
def test_addresses_past_2_to_the_31(place: Place) -> None:
    """The last samples and labels of more than 2^31 logits, against the same by themselves."""
    batch_size, groups, width = 2**10, 2**16 + 9, 4
    layer = layer_of(jagged_of((32,)), batch_size, width, 9, torch.bfloat16)
    weight = random_tensor((groups * 32, width), torch.bfloat16, 3)
    supports = layer.supports.expand(groups, width)
    offsets = torch.arange(groups + 1, device=place.device) * 32
    weight.requires_grad_()
    out = group_sparse_linear(layer.features, weight, supports, offsets)
    last = weight[-32:].detach().requires_grad_()
    alone = group_sparse_linear(layer.features, last, supports[:1], offsets[:2])
    assert torch.equal(out[:, -32:], alone)
    grad = out.new_zeros(out.shape)
    grad[:, -32:] = alone.detach()
    assert torch.equal(torch.autograd.grad(out, weight, grad)[0][-32:], torch.autograd.grad(alone, last, alone.detach())[0])


@pytest.mark.parametrize("max_bytes", [2**16, 2**28])
@pytest.mark.parametrize("k", [1, 7, 700])
@pytest.mark.parametrize("dtype", PLACE.dtypes, ids=str)
def test_topk(place: Place, dtype: torch.dtype, k: int, max_bytes: int) -> None:
    """Of all labels at once, or of a few groups at a time."""
    layer = layer_of(jagged_of((32, 7, 0, 128, 1) * 4), 50, 8, 20, dtype)
    scores, labels = group_sparse_topk(
        layer.features, layer.weight, layer.supports, layer.offsets, k, layer.bias, max_bytes=max_bytes, backend=place.backend
    )
    wide = torch.promote_types(dtype, torch.float32)
    given = (layer.features.to(wide), layer.weight.to(wide), layer.supports, layer.sizes, layer.bias.to(wide))
    logits = reference.group_sparse_linear(*given)
    there = min(k, logits.shape[1])
    assert scores.dtype == wide
    torch.testing.assert_close(scores[:, :there], logits.topk(there, 1).values, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scores[:, :there], logits.gather(1, labels[:, :there]), rtol=1e-5, atol=1e-5)
    assert all(len(set(row)) == there for row in labels[:, :there].tolist())
    assert bool((scores[:, there:] == -torch.inf).all())
    assert bool((labels[:, there:] == -1).all())


@pytest.mark.parametrize(("sizes", "batch_size"), [((), 3), ((0, 0), 3), ((5,), 0)])
def test_topk_of_nothing(place: Place, sizes: tuple[int, ...], batch_size: int) -> None:
    layer = layer_of(jagged_of(sizes), batch_size, 4, 6)
    given = (layer.features, layer.weight, layer.supports, layer.offsets)
    scores, labels = group_sparse_topk(*given, 2, backend=place.backend)
    assert scores.shape == labels.shape == (batch_size, 2)
    assert bool((labels == -1).all())
    for wrong, message in (
        ({"k": 0}, "k: expected at least 1, got 0"),
        ({"max_bytes": 5}, "max_bytes: expected at least 65536, got 5"),
    ):
        with pytest.raises(ValueError) as raised:  # noqa: PT011
            group_sparse_topk(*given, **{"k": 1, **wrong})
        assert str(raised.value) == message
