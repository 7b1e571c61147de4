"""Linear layers of groups and their mixtures, against a product and a sum at a time."""

from __future__ import annotations

import math
import re
import sys
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torchrec.sparse.jagged_tensor import JaggedTensor

from jagged.ops import grouped_linear, mix_groups
from jagged.ops.grouped_linear.configurations import linear_configuration, mix_tile
from jagged.ops.grouped_linear.spec import LEAST_ROWS_TF32, _of_weights
from tests.graphs import captured
from tests.oracle import check_three_way
from tests.places import ONE_ORDER, PLACE, Place
from tests.reference import grouped_linear as reference
from tests.repeats import check_repeats
from tests.strategies import float_dtypes, random_tensor, seeds

FLAGS = st.tuples(st.booleans(), st.booleans(), st.booleans())


def check_linear(place: Place, inputs: list[Tensor], relu: bool, wanted: list[bool]) -> None:
    def ours(*given: Tensor) -> Tensor:
        return grouped_linear(*given, activation="relu" if relu else None, backend=place.backend)

    def expected(*given: Tensor) -> Tensor:
        return reference.grouped_linear(*given, relu=relu)

    check_three_way(ours, expected, inputs, requires_grad=wanted[: len(inputs)])


@given(
    st.sampled_from([0, 1, 5, 130, 300]),
    st.sampled_from([1, 2, 5]),
    st.sampled_from([(1, 1), (7, 3), (16, 16), (48, 32), (64, 80), (32, 128)]),
    st.booleans(),
    float_dtypes(),
    seeds(),
    FLAGS,
    FLAGS,
)
def test_grouped_linear(
    place: Place,
    rows: int,
    groups: int,
    widths: tuple[int, int],
    is_shared: bool,
    dtype: torch.dtype,
    seed: int,
    wanted: tuple[bool, bool, bool],
    more: tuple[bool, bool, bool],
) -> None:
    width, out = widths
    has_bias, relu, strided = more
    shapes = [(rows, width) if is_shared else (rows, groups, width), (groups, out, width), *([(groups, out)] if has_bias else [])]
    inputs = [random_tensor(shape, dtype, seed + at, strided=strided) for at, shape in enumerate(shapes)]
    # Products of order one.
    inputs[1] = inputs[1] / width**0.5
    check_linear(place, inputs, relu, list(wanted))


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("out", [512, 384])
def test_tiles_of_wide_layers(place: Place, out: int, is_shared: bool) -> None:
    shape = (200, 64) if is_shared else (200, 2, 64)
    inputs = [random_tensor(shape, torch.bfloat16, 1), random_tensor((2, out, 64), torch.bfloat16, 2) / 8]
    check_linear(place, [*inputs, random_tensor((2, out), torch.bfloat16, 3)], True, [True] * 3)


@pytest.mark.parametrize("shape", [(2, 64, 128), (4, 16, 48), (8, 1, 16), (2, 400, 400)])
def test_gradients_of_weights_over_many_rows(place: Place, shape: tuple[int, int, int]) -> None:
    """Of few narrow groups they are blocks of one product of all columns."""
    groups, _, width = shape
    inputs = [random_tensor((3000, groups, width), torch.bfloat16, 1), random_tensor(shape, torch.bfloat16, 2) / width**0.5]
    check_linear(place, inputs, False, [False, True])


# The package's name is its function's, too.
SPEC = sys.modules[_of_weights.__module__]


class OnGpu(Tensor):
    """What says that it is on a GPU."""

    is_cuda = True


def batched_products(monkeypatch: pytest.MonkeyPatch, rows: int, shape: tuple[int, int, int], dtype: torch.dtype) -> int:
    """Number of batched products in gradients of weights, which are compared with sums."""
    groups, out, width = shape
    grad, x = (random_tensor((rows, groups, of), dtype, of).cpu() for of in (out, width))
    expected = torch.einsum("ngo, ngi -> goi", grad.double(), x.double())
    batched: list[Any] = []
    bmm = torch.bmm
    with monkeypatch.context() as patch:
        patch.setattr(torch, "bmm", lambda *given: batched.append(given) or bmm(*given))
        found = _of_weights(grad.as_subclass(OnGpu), x).as_subclass(Tensor)  # type: ignore[arg-type]
    exact = dtype == torch.float64
    torch.testing.assert_close(found.double(), expected, **({} if exact else {"atol": 0.02 * rows**0.5, "rtol": 0.02}))
    assert found.is_contiguous()
    return len(batched)


@pytest.mark.parametrize("shape", [(2, 5, 3), (4, 1, 7), (2, 400, 400), (1, 3, 2)])
def test_blocks_of_one_product_are_the_batched_product(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int]) -> None:
    """One group has nothing to gain, and all columns of wide groups are too many."""
    monkeypatch.setattr(SPEC, "_least_rows", lambda _: 30)
    is_batched = shape in [(2, 400, 400), (1, 3, 2)]
    assert batched_products(monkeypatch, 30, shape, torch.float64) == is_batched
    assert batched_products(monkeypatch, 29, shape, torch.float64) == 1


@pytest.mark.parametrize("has_tf32", [False, True])
def test_gradients_are_one_product_where_it_is_faster(monkeypatch: pytest.MonkeyPatch, has_tf32: bool) -> None:
    """Of many rows: in 16 bits, and of float32 where TF32 multiplies, whose exact products take as long as their work."""
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(fp32_precision="tf32" if has_tf32 else "none"))
    least = {torch.bfloat16: 16_384, torch.float16: 16_384, torch.float32: 4_096 if has_tf32 else None, torch.float64: None}
    for dtype, rows in least.items():
        if rows is None:
            assert batched_products(monkeypatch, 20_000, (2, 2, 3), dtype) == 1
            continue
        assert batched_products(monkeypatch, rows, (2, 2, 3), dtype) == 0
        assert batched_products(monkeypatch, rows - 1, (2, 2, 3), dtype) == 1


@pytest.mark.parametrize("has_tf32", [False, True])
def test_compiled_gradients_whatever_multiplies_float32(place: Place, monkeypatch: pytest.MonkeyPatch, has_tf32: bool) -> None:
    """What is asked of PyTorch's settings is no part of a graph."""
    monkeypatch.setattr(SPEC, "_least_rows", lambda grad: LEAST_ROWS_TF32 if SPEC._has_tf32() else math.inf)
    torch._dynamo.reset()
    weight, x = random_tensor((2, 4, 3), torch.float32, 1).requires_grad_(), random_tensor((40, 2, 3), torch.float32, 2)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if has_tf32 else "highest")
    try:
        compiled = torch.compile(lambda x: grouped_linear(x, weight, backend=place.backend), backend="aot_eager", fullgraph=True)
        (found,) = torch.autograd.grad(compiled(x).square().sum(), weight)
        (expected,) = torch.autograd.grad(grouped_linear(x, weight, backend=place.backend).square().sum(), weight)
    finally:
        torch.set_float32_matmul_precision(before)
    # A processor has no TF32.
    tolerance = 1e-2 if has_tf32 and PLACE.name == "gpu" else 1e-5
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def test_compiled_gradients_of_rows_that_data_counts(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SPEC, "_least_rows", lambda _: 64)
    torch._dynamo.reset()
    weight, x = random_tensor((2, 4, 3), torch.float32, 1).requires_grad_(), random_tensor((100, 2, 3), torch.float32, 2)
    keep = torch.arange(100, device=x.device) % 5 > 0

    def layer(x: Tensor, keep: Tensor) -> Tensor:
        return grouped_linear(x[keep.nonzero()[:, 0]], weight, backend=place.backend)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
        (found,) = torch.autograd.grad(compiled(x, keep).square().sum(), weight)
    (expected,) = torch.autograd.grad(layer(x, keep).square().sum(), weight)
    torch.testing.assert_close(found, expected)


def test_compiled_gradients_of_few_and_many_rows(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph for each side of the rows from which gradients are one product, and none for each number of rows."""
    monkeypatch.setattr(SPEC, "_least_rows", lambda _: 64)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    weight = random_tensor((2, 4, 3), torch.float32, 1).requires_grad_()
    compiled = torch.compile(
        lambda x: grouped_linear(x, weight, backend=place.backend), backend=counter, fullgraph=True, dynamic=True
    )
    for rows in (40, 50, 63, 64, 80, 100):
        x = random_tensor((rows, 2, 3), torch.float32, rows)
        (found,) = torch.autograd.grad(compiled(x).square().sum(), weight)
        (expected,) = torch.autograd.grad(grouped_linear(x, weight, backend=place.backend).square().sum(), weight)
        torch.testing.assert_close(found, expected)
    assert counter.frame_count <= 2


def test_what_is_not_finite_in_a_group_stays_in_it(place: Place) -> None:
    x, weight = random_tensor((5, 3, 16), torch.bfloat16, 1), random_tensor((3, 8, 16), torch.bfloat16, 2).requires_grad_()
    x[2, 1, 4] = float("inf")
    (found,) = torch.autograd.grad(grouped_linear(x, weight, backend=place.backend).sum(), weight)
    is_finite = torch.ones(3, 8, 16, dtype=torch.bool, device=place.device)
    is_finite[1, :, 4] = False
    assert torch.equal(found.isfinite(), is_finite)


def test_which_products_are_the_kernels(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    if place.backend != "triton":
        pytest.skip("PyTorch has one way")
    from jagged.ops.grouped_linear import launch

    launched, run = [], launch._launch_linear
    monkeypatch.setattr(launch, "_launch_linear", lambda *given, **named: (launched.append(named["RELU"]), run(*given, **named)))

    def kernels_of(dtype: torch.dtype, out: int, activation: Literal["relu"] | None, *, has_bias: bool) -> list[bool]:
        launched.clear()
        x, weight, bias = (random_tensor(shape, dtype, 1).requires_grad_() for shape in ((5, 2, 32), (2, out, 32), (2, out)))
        grouped_linear(x, weight, bias if has_bias else None, activation, backend=place.backend).sum().backward()
        return launched

    assert kernels_of(torch.bfloat16, 16, "relu", has_bias=True) == [True]
    assert kernels_of(torch.float16, 16, "relu", has_bias=False) == [True]
    assert kernels_of(torch.bfloat16, 16, None, has_bias=True) == [False]
    # Of a product alone, as gradients are, nothing is left to do in it.
    assert kernels_of(torch.bfloat16, 16, None, has_bias=False) == []
    assert kernels_of(torch.bfloat16, 8, "relu", has_bias=True) == []
    assert kernels_of(torch.float32, 16, "relu", has_bias=True) == []


@given(
    st.sampled_from([0, 1, 5, 40]),
    st.sampled_from([1, 2, 5]),
    st.sampled_from([1, 2, 4, 5]),
    st.sampled_from([1, 7, 16, 80]),
    float_dtypes(),
    seeds(),
    FLAGS,
    st.booleans(),
)
def test_mix_groups(
    place: Place,
    rows: int,
    groups: int,
    mixtures: int,
    width: int,
    dtype: torch.dtype,
    seed: int,
    wanted: tuple[bool, bool, bool],
    strided: bool,
) -> None:
    inputs = [
        random_tensor(shape, dtype, seed + at, strided=strided)
        for at, shape in enumerate([(rows, groups, width), (rows, mixtures, groups)])
    ]
    check_three_way(
        lambda *given: mix_groups(*given, backend=place.backend), reference.mix_groups, inputs, requires_grad=list(wanted[:2])
    )


@pytest.mark.parametrize("width", [1000, 1100])
def test_mixtures_of_wide_rows(place: Place, width: int) -> None:
    inputs = [random_tensor((3, 2, width), torch.float32, 1), random_tensor((3, 2, 2), torch.float32, 2)]
    # Rows too wide for the kernel are the library's product, whose long sums err more than a sum of parts does.
    expected = reference.mix_groups if mix_tile(width) is not None else lambda groups, weights: weights @ groups
    check_three_way(lambda *given: mix_groups(*given, backend=place.backend), expected, inputs)


def test_groups_as_they_lie_after_a_batched_product(place: Place) -> None:
    groups, weights = random_tensor((3, 40, 32), torch.float32, 1).transpose(0, 1), random_tensor((40, 2, 3), torch.float32, 2)
    found = mix_groups(groups, weights.mT.contiguous().mT, backend=place.backend)
    torch.testing.assert_close(found, reference.mix_groups(groups, weights))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays(place: Place, value: float) -> None:
    x, weight = random_tensor((5, 16), torch.bfloat16, 1), random_tensor((2, 16, 16), torch.bfloat16, 2).abs()
    x[1, 3] = value
    found = grouped_linear(x, weight, activation="relu", backend=place.backend)
    torch.testing.assert_close(found[1], reference.grouped_linear(x, weight, relu=True)[1], equal_nan=True)
    assert bool(found[[0, 2, 3, 4]].isfinite().all())
    x, weight = x.requires_grad_(), weight.requires_grad_()
    outputs = grouped_linear(x, weight, activation="relu", backend=place.backend), reference.grouped_linear(x, weight, relu=True)
    ours, expected = (torch.autograd.grad(output.sum(), x)[0] for output in outputs)
    assert torch.equal(ours.isnan(), expected.isnan())


@ONE_ORDER
@pytest.mark.parametrize("is_shared", [False, True])
def test_repeats_are_the_same(place: Place, is_shared: bool) -> None:
    shape = (3000, 64) if is_shared else (3000, 4, 64)
    inputs = [random_tensor(of, place.dtypes[1], 1).requires_grad_() for of in (shape, (4, 32, 64), (4, 32))]
    gates = random_tensor((3000, 2, 4), place.dtypes[1], 2).requires_grad_()

    def run() -> list[Tensor]:
        hidden = grouped_linear(*inputs, activation="relu", backend=place.backend)
        output = mix_groups(hidden, gates, backend=place.backend)
        return [output, *torch.autograd.grad(output, [*inputs, gates], output.detach())]

    check_repeats(run)


@pytest.mark.gpu
def test_a_graph_is_captured(place: Place) -> None:
    inputs = [random_tensor(of, torch.bfloat16, 1).requires_grad_() for of in ((300, 64), (4, 128, 64), (4, 128), (300, 2, 4))]

    def run() -> list[Tensor]:
        output = mix_groups(grouped_linear(*inputs[:3], activation="relu"), inputs[3])
        return [output.detach(), *torch.autograd.grad(output, inputs, output.detach())]

    graph, found = captured(run)
    with torch.no_grad():
        for of in inputs:
            of.mul_(0.5)
    graph.replay()
    for ours, expected in zip(found, run(), strict=True):
        torch.testing.assert_close(ours, expected)


@given(st.integers(1, 4096), st.integers(1, 4096))
def test_tiles_divide_widths(width: int, out: int) -> None:
    chosen = linear_configuration(width, out)
    assert (chosen is None) == bool(width % 16 or out % 16)
    if chosen is not None:
        assert width % chosen.inner == 0
        assert out % chosen.columns == 0
    tile = mix_tile(width)
    assert (tile is None) == (width > 1024)
    assert tile is None or (tile[1] >= width and tile[0] >= 1)


X, WEIGHT, BIAS = (5, 3, 8), (3, 4, 8), (3, 4)
GROUPS, WEIGHTS = (5, 3, 8), (5, 2, 3)
REFUSED: list[tuple[Any, tuple[Any, ...], dict[str, Any], str]] = [
    (grouped_linear, ((5, 2, 8), WEIGHT), {}, "x: expected shape [N, 8] or [N, 3, 8], as weight [3, 4, 8] has it, got [5, 2, 8]"),
    (grouped_linear, ((5, 7), WEIGHT), {}, "x: expected shape [N, 8] or [N, 3, 8], as weight [3, 4, 8] has it, got [5, 7]"),
    (grouped_linear, (X, WEIGHT, (4, 3)), {}, "bias: expected shape [3, 4], got [4, 3]"),
    (grouped_linear, (X, WEIGHT), {"activation": "silu"}, "activation: got 'silu', expected 'relu' or None"),
    (mix_groups, (GROUPS, (5, 2, 4)), {}, "weights: expected shape [5, T, 3], as groups [5, 3, 8] have it, got [5, 2, 4]"),
    (mix_groups, (GROUPS, (4, 2, 3)), {}, "weights: expected shape [5, T, 3], as groups [5, 3, 8] have it, got [4, 2, 3]"),
]


@pytest.mark.parametrize(("function", "shapes", "options", "message"), REFUSED)
def test_what_does_not_fit_is_refused(
    place: Place, function: Any, shapes: tuple[Any, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        function(*(random_tensor(shape, torch.float32, 1) for shape in shapes), **options, backend=place.backend)


@pytest.mark.parametrize("function", [grouped_linear, mix_groups])
def test_dtypes_agree(place: Place, function: Any) -> None:
    shapes = (X, WEIGHT) if function is grouped_linear else (GROUPS, WEIGHTS)
    given_dtypes = [random_tensor(shape, dtype, 1) for shape, dtype in zip(shapes, (torch.float32, torch.bfloat16), strict=True)]
    name, other = ("weight", "x") if function is grouped_linear else ("weights", "groups")
    message = f"{name}: expected the dtype of {other}, float32, got bfloat16; convert one of them"
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        function(*given_dtypes, backend=place.backend)


def test_tensors_that_begin_anywhere(place: Place) -> None:
    """As views of a flat parameter do, which descriptors do not take."""
    shapes = [(20, 3, 32), (3, 16, 32), (3, 16)]
    inputs = []
    for seed, shape in enumerate(shapes):
        whole = random_tensor((torch.Size(shape).numel() + 1,), torch.bfloat16, seed)
        inputs.append(whole[1:].view(shape))
    found = grouped_linear(*inputs, activation="relu", backend=place.backend)
    expected = grouped_linear(*(of.clone() for of in inputs), activation="relu", backend=place.backend)
    assert torch.equal(found, expected)


def test_rows_of_samples_are_named_with_their_cure(place: Place) -> None:
    rows = JaggedTensor(random_tensor((5, 8), torch.float32, 1), offsets=torch.tensor([0, 2, 5], device=place.device))
    with pytest.raises(TypeError, match=r"^x: expected a tensor \[N, G, in\], got a JaggedTensor"):
        grouped_linear(rows, random_tensor(WEIGHT, torch.float32, 1), backend=place.backend)  # type: ignore[arg-type]
