"""Layer normalisation of rows, against PyTorch's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from jagged.ops.layer_norm import layer_norm, layer_norm_and_residual, torch_impl
from tests.graphs import captured
from tests.oracle import check_three_way
from tests.places import ONE_ORDER, PLACE, Place
from tests.repeats import check_repeats
from tests.strategies import float_dtypes, random_tensor, seeds


def reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """In the dtype of the rows, operation by operation."""
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * weight.to(x.dtype) + bias.to(x.dtype)


@given(
    st.sampled_from([0, 1, 5, 70, 700]),
    st.sampled_from([3, 16, 64, 100, 1024, 1030]),
    float_dtypes(),
    seeds(),
    st.tuples(st.booleans(), st.booleans(), st.booleans()),
    st.booleans(),
    st.sampled_from([1e-5, 0.1]),
)
def test_layer_norm(
    place: Place, rows: int, width: int, dtype: torch.dtype, seed: int, wanted: tuple[bool, ...], strided: bool, eps: float
) -> None:
    rows = rows if width < 1000 else min(rows, 5)
    inputs = [
        random_tensor(shape, dtype, seed + at, strided=strided) for at, shape in enumerate([(rows, width), (width,), (width,)])
    ]
    check_three_way(
        lambda *of: layer_norm(*of, eps, backend=place.backend),
        lambda *of: reference(*of, eps),
        inputs,
        requires_grad=list(wanted),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows_dtype", [torch.float32, torch.bfloat16])
def test_the_output_has_the_dtype_that_is_asked_for(place: Place, rows_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """Rounded once: as PyTorch's in float32 that is cast behind. Weights in float32 are those of mixed precision."""
    x, weight, bias = random_tensor((50, 24), rows_dtype, 1), *(random_tensor((24,), torch.float32, seed) for seed in (2, 3))
    leaves = [of.requires_grad_() for of in (x, weight, bias)]
    found = layer_norm(*leaves, dtype=dtype, backend=place.backend)
    expected = torch.nn.functional.layer_norm(x.float(), (24,), weight, bias)
    assert found.dtype == dtype
    precision = {} if dtype == torch.float32 else {"atol": 1e-6, "rtol": torch.finfo(dtype).eps}
    torch.testing.assert_close(found, expected.to(dtype), **precision)
    cotangent = random_tensor((50, 24), dtype, 4)
    pairs = zip(
        torch.autograd.grad(found, leaves, cotangent),
        torch.autograd.grad(expected, leaves, cotangent.float()),
        leaves,
        strict=True,
    )
    for ours, of, leaf in pairs:
        assert ours.dtype == leaf.dtype
        torch.testing.assert_close(ours, of, **({"atol": 2e-5, "rtol": 1e-5} if leaf.dtype == torch.float32 else {}))


@pytest.mark.parametrize("shape", [(24,), (2, 3, 24), (0, 3, 24), (2, 1, 3, 24)])
def test_rows_of_any_dimensions(place: Place, shape: tuple[int, ...]) -> None:
    x, weight, bias = (random_tensor(of, torch.float32, seed) for seed, of in enumerate((shape, (24,), (24,))))
    expected = torch.nn.functional.layer_norm(x, (24,), weight, bias)
    torch.testing.assert_close(layer_norm(x, weight, bias, backend=place.backend), expected)
    if x.dim() == 3:
        turned = x.transpose(0, 1)
        torch.testing.assert_close(layer_norm(turned, weight, bias, backend=place.backend), expected.transpose(0, 1))


def test_rows_of_one_column_are_the_bias(place: Place) -> None:
    x, weight, bias = (random_tensor(of, torch.float32, seed) for seed, of in enumerate(((40, 1), (1,), (1,))))
    torch.testing.assert_close(layer_norm(x, weight, bias, backend=place.backend), bias.expand(40, 1))


def test_rows_far_from_zero(place: Place) -> None:
    """Of the mean of squares less the square of the mean nothing would be left."""
    x = 4096 + random_tensor((40, 64), torch.float32, 1)
    weight, bias = torch.ones(64, device=x.device), torch.zeros(64, device=x.device)
    found = layer_norm(x, weight, bias, backend=place.backend)
    torch.testing.assert_close(found.double(), reference(x.double(), weight, bias), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_row(place: Place, value: float) -> None:
    x = random_tensor((40, 20), torch.float32, 1)
    x[7, 3] = value
    x.requires_grad_()
    # The interpreter is numpy, which warns of infinity less infinity.
    with np.errstate(invalid="ignore"):
        found = layer_norm(x, *torch.ones(2, 20, device=x.device), backend=place.backend)
        (gradient,) = torch.autograd.grad(found.square().sum(), x)
    rows = torch.arange(40, device=x.device) != 7
    for of in (found, gradient):
        assert torch.equal(of.isfinite().all(1), rows)
        assert not of[7].isfinite().any()


def test_derivatives_of_every_order() -> None:
    leaves = [random_tensor(shape, torch.float64, seed).requires_grad_() for seed, shape in enumerate([(5, 4), (4,), (4,)])]

    assert torch.autograd.gradcheck(layer_norm, leaves)
    assert torch.autograd.gradgradcheck(layer_norm, leaves)


def test_second_derivatives_of_kernels(place: Place) -> None:
    """In float32, as the kernels are not for float64."""
    leaves = [random_tensor(shape, torch.float32, seed).requires_grad_() for seed, shape in enumerate([(30, 12), (12,), (12,)])]
    found = []
    for function in (lambda *of: layer_norm(*of, backend=place.backend), reference):
        first = torch.autograd.grad(function(*leaves).pow(3).sum(), leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(of.square().sum() for of in first), leaves))
    for of, expected in zip(*found, strict=True):
        torch.testing.assert_close(of, expected, atol=2e-2, rtol=2e-3)


def test_autocast_changes_nothing(place: Place) -> None:
    x, weight, bias = (random_tensor(shape, torch.float32, seed) for seed, shape in enumerate([(30, 12), (12,), (12,)]))
    expected = layer_norm(x, weight, bias, backend=place.backend)
    with torch.autocast(place.device.type, torch.bfloat16):
        found = layer_norm(x, weight, bias, backend=place.backend)
    assert torch.equal(found, expected)


@ONE_ORDER
def test_repeats_are_the_same(place: Place) -> None:
    leaves = [random_tensor(of, torch.float32, seed).requires_grad_() for seed, of in enumerate([(3000, 64), (64,), (64,)])]

    def run() -> list[Tensor]:
        output = layer_norm(*leaves, backend=place.backend)
        return [output, *torch.autograd.grad(output, leaves, output.detach())]

    check_repeats(run)


def test_which_rows_are_the_kernels(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    if place.backend != "triton":
        pytest.skip("PyTorch has one way")
    wide: list[tuple[str, int]] = []
    for way in ("layer_norm", "gradients"):
        theirs = getattr(torch_impl, way)
        noted = lambda x, o, way=way, theirs=theirs: (wide.append((way, x.x.shape[1])), theirs(x, o))[1]  # noqa: E731
        monkeypatch.setattr(torch_impl, way, noted)
    for width in (1, 1024, 1025):
        leaves = [random_tensor(of, torch.float32, 1).requires_grad_() for of in ((3, width), (width,), (width,))]
        layer_norm(*leaves, backend=place.backend).sum().backward()
    assert wide == [("layer_norm", 1025), ("gradients", 1025)]


@pytest.mark.parametrize("rows_dtype", PLACE.dtypes)
def test_where_no_kernel_is_it_is_pytorchs_own(place: Place, rows_dtype: torch.dtype) -> None:
    """So it has forward-mode derivatives, and is no operator of ours in a program."""
    width = 1025 if PLACE.name == "gpu" and rows_dtype != torch.float64 else 8
    x, weight, bias = (random_tensor(of, rows_dtype, seed) for seed, of in enumerate([(3, width), (width,), (width,)]))

    def theirs(x: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(x, (width,), weight, bias)

    def ours(x: Tensor) -> Tensor:
        return layer_norm(x, weight, bias)

    if PLACE.name != "interpret":
        assert torch.equal(ours(x), theirs(x))
        assert torch.equal(torch.func.jvp(ours, (x,), (x,))[1], torch.func.jvp(theirs, (x,), (x,))[1])
    found = layer_norm(x, weight.float(), bias.float()) if rows_dtype != torch.float64 else ours(x)
    assert found.dtype == rows_dtype


@pytest.mark.skipif(PLACE.name == "interpret", reason="kernels are interpreted outside of PyTorch")
def test_opcheck(place: Place) -> None:
    rows, vector = random_tensor((5, 8), torch.float32, 0), random_tensor((8,), torch.float32, 1)
    for name, arguments in (
        ("layer_norm", (rows, vector, vector, 1e-5, torch.bfloat16)),
        ("layer_norm_gradients", (rows + 1, rows, vector, None, 1e-5)),
        ("layer_norm_gradients", (rows + 1, rows, vector, rows - 1, 1e-5)),
    ):
        torch.library.opcheck(getattr(torch.ops.jagged, name).default, (*arguments, place.backend))


@pytest.mark.gpu
def test_a_graph_is_captured(place: Place) -> None:
    leaves = [random_tensor(of, torch.bfloat16, seed).requires_grad_() for seed, of in enumerate([(300, 64), (64,), (64,)])]

    def run() -> list[Tensor]:
        output = layer_norm(*leaves)
        return [output.detach(), *torch.autograd.grad(output, leaves, output.detach())]

    graph, found = captured(run)
    with torch.no_grad():
        for of in leaves:
            of.mul_(0.5)
    graph.replay()
    for ours, expected in zip(found, run(), strict=True):
        assert torch.equal(ours, expected)


BF16, F64, OR = torch.bfloat16, torch.float64, ", as x has it, or torch.float32"
REFUSED: list[tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
    (((5, 8), (7,), (8,)), {}, ValueError, "weight: expected shape [8], as x [5, 8] has columns, got [7]"),
    (((5, 8), (8,), (9,)), {}, ValueError, "bias: expected shape [8], as x [5, 8] has columns, got [9]"),
    (((5, 8), (8,), (8,)), {"eps": 0.0}, ValueError, "eps: expected above 0, got 0.0"),
    (
        ((5, 8), ((8,), BF16), (8,)),
        {},
        TypeError,
        f"weight: got torch.bfloat16, expected torch.float32{OR}",
    ),
    (
        (((5, 8), F64), (8,), (8,)),
        {},
        TypeError,
        f"weight: got torch.float32, expected torch.float64{OR}",
    ),
    ((((5, 8), BF16), ((8,), BF16), (8,)), {}, TypeError, "bias: got torch.float32, expected torch.bfloat16, as weight has it"),
    (
        ((5, 8), (8,), (8,)),
        {"dtype": torch.int32},
        TypeError,
        "dtype: got torch.int32 for rows in torch.float32, expected torch.float32 or torch.bfloat16 or torch.float16",
    ),
    (
        ((5, 8), (8,), (8,)),
        {"dtype": F64},
        TypeError,
        "dtype: got torch.float64 for rows in torch.float32, expected torch.float32 or torch.bfloat16 or torch.float16",
    ),
    (
        (((5, 8), F64), ((8,), F64), ((8,), F64)),
        {"dtype": torch.float32},
        TypeError,
        "dtype: got torch.float32 for rows in torch.float64, expected torch.float64",
    ),
]


@pytest.mark.parametrize(("given_", "options", "kind", "message"), REFUSED, ids=[of[3].split(",")[0] for of in REFUSED])
def test_what_is_refused(given_: tuple[Any, ...], options: dict[str, Any], kind: type[Exception], message: str) -> None:
    tensors = [torch.ones(of[0], dtype=of[1]) if isinstance(of[0], tuple) else torch.ones(of) for of in given_]
    with pytest.raises(kind) as refused:
        layer_norm(*tensors, **options)
    assert str(refused.value) == message


@given(
    st.sampled_from([0, 1, 70, 700]), st.sampled_from([3, 64, 100, 1030]), float_dtypes(), seeds(), st.booleans(),
    st.sampled_from([("normal", "rows"), ("normal",), ("rows",)]),
)  # fmt: skip
def test_rows_that_are_read_twice(
    place: Place, rows: int, width: int, dtype: torch.dtype, seed: int, strided: bool, used: tuple[str, ...]
) -> None:
    """The gradient of the rows is that of the norm and that of what they are added to, of either alone, too."""
    shapes = [(min(rows, 5) if width > 1000 else rows, width), (width,), (width,), (width,)]
    inputs = [random_tensor(shape, dtype, seed + at, strided=strided) for at, shape in enumerate(shapes)]

    def added(normal: Tensor, x: Tensor, factor: Tensor) -> Tensor:
        # Each has a gradient of its own.
        return sum({"normal": normal * factor, "rows": x * x}[name] for name in used)  # type: ignore[return-value]

    def ours(x: Tensor, weight: Tensor, bias: Tensor, factor: Tensor) -> Tensor:
        return added(*layer_norm_and_residual(x, weight, bias, backend=place.backend), factor)

    def expected(x: Tensor, weight: Tensor, bias: Tensor, factor: Tensor) -> Tensor:
        return added(reference(x, weight, bias), x, factor)

    if used == ("rows",):
        # Nothing of the norm is read, whose parameters have no gradients.
        others = inputs[1:]
        check_three_way(lambda x: ours(x, *(of.to(x.dtype) for of in others)), lambda x: x * x, inputs[:1])
    else:
        check_three_way(ours, expected, inputs)


def test_rows_that_are_read_twice_have_one_gradient(place: Place) -> None:
    """Which is computed once, and is the same with PyTorch's addition; second derivatives too."""
    x, weight, bias = (random_tensor(shape, torch.float64, seed) for seed, shape in enumerate(((2, 3, 5), (5,), (5,))))
    leaves = [of.requires_grad_() for of in (x, weight, bias)]

    def second(both: tuple[Tensor, Tensor]) -> list[Tensor]:
        normal, rows = both
        first = torch.autograd.grad((rows * normal.square()).sum(), leaves, create_graph=True)
        return [*first, *torch.autograd.grad(sum(of.square().sum() for of in first), leaves)]  # type: ignore[arg-type]

    found = second(layer_norm_and_residual(*leaves, backend="torch"))
    torch.testing.assert_close(found, second((torch.nn.functional.layer_norm(x, (5,), weight, bias), x)))
    normal, rows = layer_norm_and_residual(*leaves, backend="torch")
    assert normal.grad_fn is rows.grad_fn
    with torch.no_grad():
        assert layer_norm_and_residual(*leaves, backend="torch")[1] is x


def test_rows_that_are_read_twice_are_compiled_and_transformed(place: Place) -> None:
    x, weight, bias = (random_tensor(shape, torch.float32, seed) for seed, shape in enumerate(((7, 5), (5,), (5,))))

    def loss(x: Tensor) -> Tensor:
        normal, rows = layer_norm_and_residual(x, weight, bias)
        return (rows * normal.square()).sum()

    expected = torch.func.grad(lambda x: (x * torch.nn.functional.layer_norm(x, (5,), weight, bias).square()).sum())(x)
    torch.testing.assert_close(torch.func.grad(loss)(x), expected)
    torch.testing.assert_close(torch.autograd.grad(loss(x.requires_grad_()), x)[0], expected)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(x), x)[0], expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_rows_that_are_read_twice_are_computed_again(place: Place, use_reentrant: bool) -> None:
    """Activation checkpointing around a residual block, under autocast."""
    x, weight, bias = (random_tensor(shape, torch.float32, seed) for seed, shape in enumerate(((70, 16), (16,), (16,))))
    leaves = [of.requires_grad_() for of in (x, weight, bias)]

    def block(x: Tensor) -> Tensor:
        with torch.autocast(place.device.type, torch.bfloat16):
            normal, rows = layer_norm_and_residual(x, weight, bias, dtype=torch.bfloat16, backend=place.backend)
            return rows + torch.nn.functional.linear(normal, torch.eye(16, device=x.device)).square()

    expected = torch.autograd.grad(block(x).sum(), leaves)
    output = checkpoint(block, x, use_reentrant=use_reentrant)
    output.sum().backward()
    for leaf, wanted in zip(leaves, expected, strict=True):
        assert torch.equal(leaf.grad, wanted)
