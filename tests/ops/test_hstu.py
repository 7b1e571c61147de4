"""Projection and output of an HSTU block, against plain operations."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from jagged.ops import hstu_output, hstu_projection
from jagged.ops.hstu import torch_impl
from jagged.ops.hstu.spec import WIDEST, OutputOptions
from tests.graphs import captured
from tests.oracle import check_three_way
from tests.places import ONE_ORDER, PLACE, Place
from tests.repeats import check_repeats
from tests.strategies import float_dtypes, random_tensor, seeds


def projected(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.nn.functional.silu(x @ weight.T + bias)


def normalised(rows: Tensor, weight: Tensor, bias: Tensor | None, groups: int, centred: bool, eps: float) -> Tensor:
    wide = rows.view(rows.shape[0], groups, rows.shape[1] // groups)
    if centred:
        wide = wide - wide.mean(2, keepdim=True)
    normal = (wide / (wide.square().mean(2, keepdim=True) + eps).sqrt()).flatten(1) * weight
    return normal if bias is None else normal + bias


@settings(max_examples=60)
@given(
    st.sampled_from([0, 1, 5, 70, 300]),
    st.sampled_from([8, 16, 48, 64]),
    st.sampled_from([(1, 8), (2, 5), (3, 16), (4, 8), (2, 64)]),
    float_dtypes(),
    seeds(),
    st.tuples(st.booleans(), st.booleans(), st.booleans()),
    st.booleans(),
    st.booleans(),
)
def test_projection(
    place: Place, rows: int, width: int, heads: tuple[int, int], dtype: torch.dtype, seed: int, wanted: tuple[bool, ...],
    strided: bool, recompute: bool,
) -> None:  # fmt: skip
    """Each part is stored by itself, so one that is not read has a gradient of None."""
    num_heads, head_dim = heads
    columns = 4 * num_heads * head_dim
    inputs = [
        random_tensor(of, dtype, seed + at, strided=strided)
        for at, of in enumerate([(rows, width), (columns, width), (columns,)])
    ]
    inputs[1] /= width**0.5

    def ours(*of: Tensor) -> Tensor:
        parts = hstu_projection(*of, num_heads, recompute=recompute, backend=place.backend)
        assert all(part.shape == (rows, num_heads, head_dim) and part.is_contiguous() for part in parts)
        return torch.cat([part.flatten(1) for part in parts], 1)

    check_three_way(ours, projected, inputs, requires_grad=list(wanted))


@pytest.mark.parametrize("used", range(4))
def test_a_part_that_nobody_reads(place: Place, used: int) -> None:
    leaves = [random_tensor(of, torch.float32, at).requires_grad_() for at, of in enumerate([(9, 8), (24, 8), (24,)])]
    ours = hstu_projection(*leaves, 2, backend=place.backend)[used]
    theirs = projected(*leaves).view(9, 4, 2, 3)[:, used]
    torch.testing.assert_close(ours, theirs)
    for found, expected in zip(*(torch.autograd.grad(of.sin().sum(), leaves) for of in (ours, theirs)), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


NORMS = {"layer": (1, True, True), "group": (3, True, True), "rms": (1, False, False), "rms of groups": (3, False, True)}


@settings(max_examples=60)
@given(
    st.sampled_from([0, 1, 5, 70, 300]), st.sampled_from([6, 48, 96, 120]), st.sampled_from([16, 20, 64]), float_dtypes(),
    seeds(), st.sampled_from(list(NORMS)), st.booleans(), st.sampled_from([0.0, 0.3]), st.sampled_from([1e-6, 0.1]),
    st.booleans(), st.lists(st.booleans(), min_size=7, max_size=7),
)  # fmt: skip
def test_output(
    place: Place, rows: int, width: int, out: int, dtype: torch.dtype, seed: int, norm: str, concat: bool, dropout_p: float,
    eps: float, strided: bool, wanted: list[bool],
) -> None:  # fmt: skip
    groups, centred, has_bias = NORMS[norm]
    columns = 3 * width if concat else width
    shapes = [(rows, width), (rows, width), (rows, out), (width,), (out, columns), (out,), (width,)]
    inputs = [random_tensor(of, dtype, seed + at, strided=strided) for at, of in enumerate(shapes)]
    inputs[4] /= columns**0.5
    inputs, wanted = (inputs, wanted) if has_bias else (inputs[:-1], wanted[:-1])
    number = torch.tensor([(seed * 2**33 + 7) % 2**63], device=place.device) if dropout_p else None
    options = {"eps": eps, "num_groups": groups, "centred": centred, "concat": concat, "dropout_p": dropout_p}

    def ours(a: Tensor, u: Tensor, x: Tensor, nw: Tensor, w: Tensor, b: Tensor, nb: Tensor | None = None) -> Tensor:
        return hstu_output(a, u, x, nw, nb, w, b, dropout_seed=number, **options, backend=place.backend)

    # Which places are kept does not depend on the numbers.
    o = OutputOptions(eps, groups, centred, concat, dropout_p)
    kept = torch_impl._kept(torch.ones(rows, columns, dtype=torch.float64, device=place.device), number, o)

    def reference(a: Tensor, u: Tensor, x: Tensor, nw: Tensor, w: Tensor, b: Tensor, nb: Tensor | None = None) -> Tensor:
        gated = normalised(a, nw, nb, groups, centred, eps) * u
        gated = torch.cat([u, a, gated], 1) if concat else gated
        return x + (gated if kept is None else gated * kept.to(a.dtype)) @ w.T + b

    check_three_way(ours, reference, inputs, requires_grad=wanted)


@pytest.mark.parametrize("concat", [False, True])
def test_dropout(place: Place, concat: bool) -> None:
    """About as many numbers are dropped as asked for, in every column, others of another seed, and none without."""
    n, width = 2_000, 6
    columns = 3 * width if concat else width
    a, u, x = (torch.ones(n, of, device=place.device) for of in (width, width, columns))
    parameters = torch.zeros(width, device=place.device), torch.ones(width, device=place.device)
    eye, zeros = torch.eye(columns, device=place.device), torch.zeros(columns, device=place.device)

    def run(p: float, seed: int | None) -> Tensor:
        number = None if seed is None else torch.tensor([seed], device=place.device)
        options: dict[str, Any] = {"concat": concat, "dropout_p": p, "dropout_seed": number}
        return hstu_output(a, u, x, *parameters, eye, zeros, **options, backend=place.backend) - x

    found = run(0.25, 5)
    torch.testing.assert_close(found[found != 0], torch.full_like(found[found != 0], 4 / 3), atol=1e-3, rtol=0)
    shares = (found == 0).float().mean(0)
    assert bool(((shares - 0.25).abs() < 0.05).all())
    assert torch.equal(found, run(0.25, 5))
    assert float((found != run(0.25, 6)).float().mean()) > 0.2
    assert float((found != run(0.25, 5 + 2**40)).float().mean()) > 0.2
    assert not torch.equal(run(0.25, None), run(0.25, None))
    torch.testing.assert_close(run(0.0, None), torch.ones_like(found), atol=1e-3, rtol=0)


@pytest.mark.parametrize("residual_dtype", [torch.float32, torch.bfloat16])
def test_under_autocast(place: Place, residual_dtype: torch.dtype) -> None:
    """Products in autocast's dtype, residuals in their own, and every gradient in that of what it belongs to."""
    x, weight, bias = (random_tensor(of, torch.float32, at).requires_grad_() for at, of in enumerate([(40, 16), (96, 16), (96,)]))
    residual = random_tensor((40, 16), residual_dtype, 3).requires_grad_()
    vector, other = (random_tensor((24,), torch.float32, seed).requires_grad_() for seed in (4, 5))
    last, shift = (random_tensor(of, torch.float32, seed).requires_grad_() for seed, of in ((6, (16, 24)), (7, (16,))))
    leaves = [x, weight, bias, residual, vector, other, last, shift]

    def run(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, *of: Tensor) -> Tensor:
        u, v, q, k = hstu_projection(x, weight, bias, 3, backend=place.backend)
        return hstu_output(v * q * k, u, residual, *of, backend=place.backend)

    with torch.autocast(place.device.type, torch.bfloat16):
        parts = hstu_projection(x, weight, bias, 3, backend=place.backend)
        found = run(*leaves)
    assert {part.dtype for part in parts} == {torch.bfloat16}
    assert found.dtype == residual_dtype
    exact = run(*(of.detach().float().requires_grad_() for of in leaves))
    assert bool((found.float() - exact).norm() < 0.02 * exact.norm())
    for of, leaf in zip(torch.autograd.grad(found.float().sin().sum(), leaves), leaves, strict=True):
        assert of.dtype == leaf.dtype
        assert bool(of.isfinite().all())


@ONE_ORDER
def test_repeats_are_the_same(place: Place) -> None:
    leaves = [random_tensor(of, torch.float32, seed).requires_grad_() for seed, of in enumerate([(3000, 16), (64, 16), (64,)])]
    others = [
        random_tensor(of, torch.float32, seed).requires_grad_() for seed, of in enumerate([(16,), (16,), (16, 48), (16,)], 3)
    ]

    def run() -> list[Tensor]:
        u, v, q, k = hstu_projection(*leaves, 2, backend=place.backend)
        output = hstu_output(v + q + k, u, leaves[0], *others, concat=True, backend=place.backend)
        return [output, *torch.autograd.grad(output, [*leaves, *others], output.detach())]

    check_repeats(run)


def test_no_second_derivatives(place: Place) -> None:
    leaves = [random_tensor(of, torch.float32, at).requires_grad_() for at, of in enumerate([(9, 8), (24, 8), (24,)])]
    u, *_ = hstu_projection(*leaves, 2, backend=place.backend)
    (first,) = torch.autograd.grad(u.sin().sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="hstu_projection"):
        first.sum().backward()


def test_derivatives_of_every_order_on_a_cpu() -> None:
    leaves = [
        torch.randn(of, dtype=torch.float64, requires_grad=True) for of in ((3, 4), (16, 4), (16,), (4,), (4,), (4, 12), (4,))
    ]

    def run(x: Tensor, weight: Tensor, bias: Tensor, *of: Tensor) -> Tensor:
        u, v, q, k = hstu_projection(x, weight, bias, 2)
        return hstu_output(v * q * k, u, x, *of, concat=True)

    assert torch.autograd.gradcheck(run, leaves)
    assert torch.autograd.gradgradcheck(run, leaves)


def test_groups_that_are_too_wide_for_a_program(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    if place.backend != "triton":
        pytest.skip("PyTorch has one way")
    ways: list[str] = []
    for way in ("output", "gate_gradients"):
        theirs = getattr(torch_impl, way)
        noted = lambda *of, way=way, theirs=theirs: (ways.append(way), theirs(*of))[1]  # noqa: E731
        monkeypatch.setattr(torch_impl, way, noted)
    for width, groups in ((WIDEST, 1), (2 * WIDEST, 2), (WIDEST + 1, 1)):
        a, u, weight = (random_tensor(of, torch.float32, 1).requires_grad_() for of in ((3, width), (3, width), (8, width)))
        vectors = random_tensor((width,), torch.float32, 2), random_tensor((width,), torch.float32, 3)
        x, bias = random_tensor((3, 8), torch.float32, 4), random_tensor((8,), torch.float32, 5)
        found = hstu_output(a, u, x, *vectors, weight, bias, num_groups=groups, backend=place.backend)
        expected = x + (normalised(a, *vectors, groups, True, 1e-6) * u) @ weight.T + bias
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
        found.sum().backward()
        assert ways == (["output", "gate_gradients"] if width == WIDEST + 1 else [])


@pytest.mark.skipif(PLACE.name == "interpret", reason="kernels are interpreted outside of PyTorch")
def test_opcheck(place: Place) -> None:
    x, weight, bias = (random_tensor(of, torch.float32, at) for at, of in enumerate([(5, 8), (24, 8), (24,)]))
    a, u = (random_tensor((5, 6), torch.float32, seed) for seed in (3, 4))
    vectors, last = random_tensor((2, 6), torch.float32, 5), random_tensor((8, 18), torch.float32, 6)
    part = random_tensor((5, 2, 3), torch.float32, 7)
    options = 1e-6, 2, True, True, 0.0
    for name, arguments in (
        ("hstu_projection", (x, weight, bias, 2, False)),
        ("hstu_projection", (x, weight, bias, 2, True)),
        ("hstu_projection_gradient", (part, part + 1, part + 2, part + 3, x @ weight.T)),
        ("hstu_output", (a, u, x, *vectors.unbind(), last, bias[:8].clone(), None, *options)),
        ("hstu_gate_gradients", (x @ last, a, u, *vectors.unbind(), None, *options)),
    ):
        torch.library.opcheck(getattr(torch.ops.jagged, name).default, (*arguments, place.backend))


@pytest.mark.gpu
@pytest.mark.parametrize(("width", "heads"), [(512, (4, 128)), (64, (2, 32)), (256, (3, 48))])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernels_of_wide_tiles(place: Place, dtype: torch.dtype, width: int, heads: tuple[int, int]) -> None:
    """Of more rows than tiles at once, so that programs take several; the last tile is a part."""
    num_heads, head_dim = heads
    wide, rows = num_heads * head_dim, 40_003
    shapes = [(rows, width), (4 * wide, width), (4 * wide,), (wide,), (wide,), (width, 3 * wide), (width,)]
    leaves = [random_tensor(of, dtype, at) for at, of in enumerate(shapes)]
    leaves[1] /= width**0.5
    leaves[5] /= (3 * wide) ** 0.5
    leaves = [of.requires_grad_() for of in leaves]

    def run(x: Tensor, weight: Tensor, bias: Tensor, *of: Tensor, backend: str | None) -> Tensor:
        u, v, q, k = hstu_projection(x, weight, bias, num_heads, backend=backend)
        return hstu_output(v * q + k, u, x, *of, concat=True, backend=backend)

    found = run(*leaves, backend=None)
    cotangent = random_tensor((rows, width), dtype, 9)
    gradients = torch.autograd.grad(found, leaves, cotangent)
    exact_leaves = [of.detach().float().requires_grad_() for of in leaves]
    exact = run(*exact_leaves, backend="torch")
    expected = torch.autograd.grad(exact, exact_leaves, cotangent.float())
    low = run(*leaves, backend="torch")
    for ours, theirs, right in zip(
        (found, *gradients), (low, *torch.autograd.grad(low, leaves, cotangent)), (exact, *expected), strict=True
    ):
        error, allowed = ((of.float() - right).norm() / right.norm() for of in (ours, theirs))
        assert error <= 2 * allowed + torch.finfo(dtype).eps


@pytest.mark.gpu
def test_a_graph_is_captured(place: Place) -> None:
    shapes = [(300, 64), (256, 64), (256,), (64,), (64,), (64, 64), (64,)]
    leaves = [random_tensor(of, torch.bfloat16, seed).requires_grad_() for seed, of in enumerate(shapes)]

    def run() -> list[Tensor]:
        u, v, q, k = hstu_projection(*leaves[:3], 2)
        output = hstu_output(v * q * k, u, leaves[0], *leaves[3:])
        return [output.detach(), *torch.autograd.grad(output, leaves, output.detach())]

    graph, found = captured(run)
    with torch.no_grad():
        for of in leaves:
            of.mul_(0.5)
    graph.replay()
    for ours, expected in zip(found, run(), strict=True):
        assert torch.equal(ours, expected)


REFUSED_PROJECTIONS: list[tuple[list[Any], dict[str, Any], type[Exception], str]] = [
    ([(5, 8), (24, 7), (24,)], {}, ValueError, "weight: expected shape [24, 8], as x [5, 8] has columns, got [24, 7]"),
    (
        [(5, 8), (20, 8), (20,)],
        {},
        ValueError,
        "weight: expected rows in a multiple of 4 * num_heads = 8, got [20, 8]; they are gates, values, queries and keys of each "
        "head",
    ),
    ([(5, 8), (24, 8), (23,)], {}, ValueError, "bias: expected shape [24], as weight [24, 8] has rows, got [23]"),
    ([(5, 8), (24, 8), (24,)], {"num_heads": 0}, ValueError, "num_heads: expected 1 or more, got 0"),
]


@pytest.mark.parametrize(
    ("shapes", "options", "kind", "message"), REFUSED_PROJECTIONS, ids=[of[3][:20] for of in REFUSED_PROJECTIONS]
)
def test_what_projection_refuses(shapes: list[Any], options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=f"^{re.escape(message)}$"):
        hstu_projection(*(torch.ones(of) for of in shapes), **{"num_heads": 2, **options})


SHAPES = {
    "attended": (5, 6), "gate": (5, 6), "residual": (5, 8), "norm_weight": (6,), "norm_bias": (6,), "weight": (8, 6),
    "bias": (8,),
}  # fmt: skip
REFUSED_OUTPUTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"gate": (5, 7)}, ValueError, "gate: expected the shape of attended, [5, 6], got [5, 7]"),
    ({"residual": (4, 8)}, ValueError, "residual: expected 5 rows, as attended [5, 6] has, got [4, 8]"),
    ({"weight": (8, 7)}, ValueError, "weight: expected shape [8, 6], from attended [5, 6] to residual [5, 8], got [8, 7]"),
    (
        {"concat": True},
        ValueError,
        "weight: expected shape [8, 18], from attended [5, 6] three times to residual [5, 8], got [8, 6]",
    ),
    ({"bias": (7,)}, ValueError, "bias: expected shape [8], as residual [5, 8] has columns, got [7]"),
    ({"norm_weight": (5,)}, ValueError, "norm_weight: expected shape [6], as attended [5, 6] has columns, got [5]"),
    ({"norm_bias": (5,)}, ValueError, "norm_bias: expected shape [6], as attended [5, 6] has columns, got [5]"),
    ({"eps": 0.0}, ValueError, "eps: expected above 0, got 0.0"),
    ({"num_groups": 4}, ValueError, "num_groups: expected a divisor of the 6 columns, got 4"),
    ({"dropout_p": 1.0}, ValueError, "dropout_p: expected at least 0 and below 1, got 1.0"),
    (
        {"norm_weight": torch.ones(6, dtype=torch.float64)},
        TypeError,
        "norm_weight: got torch.float64, expected torch.float32, as attended has it, or torch.float32",
    ),
    (
        {"norm_bias": torch.ones(6, dtype=torch.float64)},
        TypeError,
        "norm_bias: got torch.float64, expected torch.float32, as attended has it, or torch.float32",
    ),
    (
        {"dropout_p": 0.5, "dropout_seed": torch.ones(2, dtype=torch.int64)},
        ValueError,
        "dropout_seed: expected one number, got shape [2]",
    ),
]


@pytest.mark.parametrize(("given_", "kind", "message"), REFUSED_OUTPUTS, ids=[of[2][:30] for of in REFUSED_OUTPUTS])
def test_what_output_refuses(given_: dict[str, Any], kind: type[Exception], message: str) -> None:
    arguments = {**SHAPES, **given_}
    made = {name: torch.ones(of) if isinstance(of, tuple) else of for name, of in arguments.items()}
    with pytest.raises(kind, match=f"^{re.escape(message)}$"):
        hstu_output(**made)
