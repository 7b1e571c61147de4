"""Linear layers of groups and their mixtures, against a product and a sum at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor

from jagged.ops import grouped_linear, mix_groups
from jagged.ops.grouped_linear import torch_impl
from jagged.ops.grouped_linear.configurations import linear_configuration, mix_tile
from jagged.ops.grouped_linear.spec import Inputs, Options
from tests.graphs import captured
from tests.oracle import check_three_way
from tests.places import ONE_ORDER, Place
from tests.reference import grouped_linear as reference
from tests.strategies import float_dtypes, random_tensor, seeds

FLAGS = st.tuples(st.booleans(), st.booleans(), st.booleans())
MATMUL: Any = torch.backends.cuda.matmul


@pytest.fixture
def _precision_is_restored() -> Iterator[None]:
    before = MATMUL.fp32_precision
    yield
    MATMUL.fp32_precision = before


@pytest.fixture
def _is_tf32(_precision_is_restored: None) -> None:
    MATMUL.fp32_precision = "tf32"


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


@pytest.mark.usefixtures("_is_tf32")
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize(("width", "out"), [(80, 512), (256, 384), (64, 48)])
def test_products_in_tf32(place: Place, width: int, out: int, is_shared: bool, relu: bool) -> None:
    """On a GPU the reference's products are TF32, too, by the library. Under the interpreter and on a CPU both are float32.

    Which numbers a ReLU lets pass is another matter, of `test_gradients_behind_a_relu_in_tf32`: near 0 a rounding decides.
    """
    shapes = [(200, width) if is_shared else (200, 2, width), (2, out, width), (2, out)]
    inputs = [random_tensor(shape, torch.float32, seed) for seed, shape in enumerate(shapes)]
    inputs[1] = inputs[1] / width**0.5
    check_linear(place, inputs, relu, [not relu] * 3)


@pytest.mark.usefixtures("_is_tf32")
@pytest.mark.parametrize("is_shared", [False, True])
def test_gradients_behind_a_relu_in_tf32(place: Place, is_shared: bool) -> None:
    """They are those of the layer without it, of what its output lets pass."""
    shapes = [(200, 64) if is_shared else (200, 2, 64), (2, 512, 64), (2, 512)]
    inputs = [random_tensor(shape, torch.float32, seed).requires_grad_() for seed, shape in enumerate(shapes)]
    grad = random_tensor((200, 2, 512), torch.float32, 3)
    output = grouped_linear(*inputs, activation="relu", backend=place.backend)
    found = torch.autograd.grad(output, inputs, grad)
    expected = torch.autograd.grad(grouped_linear(*inputs, backend=place.backend), inputs, grad * (output > 0))
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    torch.testing.assert_close(found[2], expected[2])


@pytest.mark.usefixtures("_precision_is_restored")
@pytest.mark.parametrize("out", [512, 48])
@pytest.mark.parametrize("is_shared", [False, True])
def test_float32_is_exact_unless_tf32_is_asked_for(place: Place, is_shared: bool, out: int) -> None:
    shapes = [(200, 64) if is_shared else (200, 2, 64), (2, out, 64), (2, out)]
    inputs = Inputs(*(random_tensor(shape, torch.float32, seed) for seed, shape in enumerate(shapes)))
    exact = torch_impl.grouped_linear(inputs, Options(relu=True)).output
    errors = {}
    for precision in ("tf32", "ieee"):
        MATMUL.fp32_precision = precision
        found = grouped_linear(*inputs, activation="relu", backend=place.backend)
        errors[precision] = float((found - exact).abs().max() / exact.max())
    assert errors["ieee"] == 0
    # Factors have 11 bits, and what is behind them may be cut off.
    assert errors["tf32"] < 2**-8
    assert (errors["tf32"] > 2**-16) == (place.name == "gpu")


@pytest.mark.usefixtures("_precision_is_restored")
def test_which_products_are_the_kernels(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    if place.backend != "triton":
        pytest.skip("PyTorch has one way")
    from jagged.ops.grouped_linear import launch

    launched, run = [], launch._launch_linear
    monkeypatch.setattr(
        launch, "_launch_linear", lambda *given, **named: (launched.append(named["PRECISION"]), run(*given, **named))
    )

    def kernels_of(dtype: torch.dtype, precision: str, *, widths: tuple[int, int] = (32, 16), wants: bool = False) -> list[str]:
        MATMUL.fp32_precision = precision
        launched.clear()
        inputs = [random_tensor(shape, dtype, 1) for shape in ((5, 2, widths[0]), (2, widths[1], widths[0]))]
        output = grouped_linear(inputs[0].requires_grad_(wants), inputs[1], backend=place.backend)
        if wants:
            output.sum().backward()
        return launched

    assert kernels_of(torch.bfloat16, "ieee", wants=True) == ["ieee", "ieee"]
    assert kernels_of(torch.bfloat16, "tf32") == ["ieee"]
    # The gradient of rows is the library's, which takes the weight as it lies.
    assert kernels_of(torch.float32, "tf32", wants=True) == ["tf32"]
    assert kernels_of(torch.float32, "ieee") == []
    assert kernels_of(torch.float32, "tf32", widths=(32, 8)) == []


@pytest.mark.gpu
@pytest.mark.usefixtures("_precision_is_restored")
def test_compiled_layers_follow_the_precision_of_the_call(place: Place) -> None:
    inputs = [random_tensor(shape, torch.float32, seed) for seed, shape in enumerate([(300, 2, 64), (2, 128, 64), (2, 128)])]

    def layer(*given: Tensor) -> Tensor:
        return grouped_linear(*given, activation="relu")

    compiled, found = torch.compile(layer, fullgraph=True), []
    for precision in ("tf32", "ieee", "tf32"):
        MATMUL.fp32_precision = precision
        found.append(compiled(*inputs))
        assert torch.equal(found[-1], layer(*inputs))
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])


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
    check_three_way(lambda *given: mix_groups(*given, backend=place.backend), reference.mix_groups, inputs)


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

    first = run()
    for _ in range(20):
        assert all(torch.equal(*pair) for pair in zip(first, run(), strict=True))


@pytest.mark.gpu
@pytest.mark.usefixtures("_is_tf32")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_graph_is_captured(place: Place, dtype: torch.dtype) -> None:
    inputs = [random_tensor(of, dtype, 1).requires_grad_() for of in ((300, 64), (4, 128, 64), (4, 128), (300, 2, 4))]

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


@given(st.integers(1, 4096), st.integers(1, 4096), st.sampled_from([2, 4]), st.sampled_from([9, 10]))
def test_tiles_divide_widths(width: int, out: int, itemsize: int, capability: int) -> None:
    chosen = linear_configuration(width, out, itemsize, capability)
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


@pytest.mark.usefixtures("_is_tf32")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tensors_that_begin_anywhere(place: Place, dtype: torch.dtype) -> None:
    """As views of a flat parameter do, which descriptors do not take."""
    shapes = [(20, 3, 32), (3, 16, 32), (3, 16)]
    inputs = []
    for seed, shape in enumerate(shapes):
        whole = random_tensor((torch.Size(shape).numel() + 1,), dtype, seed)
        inputs.append(whole[1:].view(shape))
    found = grouped_linear(*inputs, activation="relu", backend=place.backend)
    expected = grouped_linear(*(of.clone() for of in inputs), activation="relu", backend=place.backend)
    assert torch.equal(found, expected)


def test_rows_of_samples_are_named_with_their_cure(place: Place) -> None:
    rows = JaggedTensor(random_tensor((5, 8), torch.float32, 1), offsets=torch.tensor([0, 2, 5], device=place.device))
    with pytest.raises(TypeError, match=r"^x: expected a tensor \[N, G, in\], got a JaggedTensor"):
        grouped_linear(rows, random_tensor(WEIGHT, torch.float32, 1), backend=place.backend)  # type: ignore[arg-type]
