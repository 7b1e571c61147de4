"""Sums, products, differences and linear layers against loops over samples, in every place."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from jagged import ops
from jagged.ops._shared import kernels as _shared
from jagged.ops.elementwise import kernels
from tests.graphs import captured
from tests.oracle import check_three_way
from tests.places import PLACE, Place
from tests.reference import elementwise as reference
from tests.strategies import Jagged, float_dtypes, jagged_batches, jagged_of, random_tensor, seeds

ON_GPU = pytest.mark.gpu
WIDTHS = st.sampled_from([1, 3, 16, 64, 130])
# None is one row a sample.
DENSE_LENGTHS = st.one_of(st.none(), st.integers(0, 12))
# What reads only half of a sample, or of several, shows in chunks that drawn samples have several of.
CHUNKS = st.sampled_from([1, 4, 64, kernels.CHUNK])
PAIRS = [(ops.jagged_dense_add, reference.dense_add), (ops.jagged_dense_mul, reference.dense_mul)]


def dense_of(batch: Jagged, length: int | None, width: int, dtype: torch.dtype, seed: int, strided: bool = False) -> Tensor:
    return random_tensor((batch.batch_size, *(() if length is None else (length,)), width), dtype, seed, strided=strided)


def gradient(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The gradients of a function, flat, as a function that can be differentiated again."""

    def run(*leaves: Tensor) -> Tensor:
        leaves = tuple(leaf if leaf.requires_grad else leaf.requires_grad_() for leaf in leaves)
        output = function(*leaves)
        grads = torch.autograd.grad(output.square().sum(), leaves, create_graph=True, materialize_grads=True)
        return torch.cat([grad.flatten() for grad in grads])

    return run


@given(
    jagged_batches(), DENSE_LENGTHS, WIDTHS, float_dtypes(), seeds(), st.booleans(), st.sampled_from(PAIRS), CHUNKS,
    st.sampled_from([[True, True], [True, False], [False, True], [False, False]]),
)  # fmt: skip
def test_dense_add_and_mul(
    place: Place, batch: Jagged, length: int | None, width: int, dtype: torch.dtype, seed: int, strided: bool,
    pair: tuple[Any, Any], chunk: int, wanted: list[bool],
) -> None:  # fmt: skip
    ours, expected = pair
    values = random_tensor((batch.total, width), dtype, seed, strided=strided)
    dense = dense_of(batch, length, width, dtype, seed + 1, strided)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "CHUNK", chunk)
        check_three_way(
            lambda v, d: ours(v, batch.offsets, d, backend=place.backend),
            lambda v, d: expected(v, batch.lengths, d),
            [values, dense],
            requires_grad=wanted,
        )


@settings(max_examples=5 if PLACE.name == "interpret" else 40)
@given(jagged_batches(longest=20), DENSE_LENGTHS, WIDTHS, float_dtypes(), seeds())
def test_second_derivatives_of_mul(
    place: Place, batch: Jagged, length: int | None, width: int, dtype: torch.dtype, seed: int
) -> None:
    check_three_way(
        gradient(lambda v, d: ops.jagged_dense_mul(v, batch.offsets, d, backend=place.backend)),
        gradient(lambda v, d: reference.dense_mul(v, batch.lengths, d)),
        [random_tensor((batch.total, width), dtype, seed), dense_of(batch, length, width, dtype, seed + 1)],
    )


@given(
    jagged_batches(), st.sampled_from([(0, 3), (1, 1), (3, 0), (16, 32), (50, 100)]), float_dtypes(), seeds(), st.booleans(),
    st.booleans(), CHUNKS, st.lists(st.booleans(), min_size=4, max_size=4),
)  # fmt: skip
def test_cross(
    place: Place, batch: Jagged, widths: tuple[int, int], dtype: torch.dtype, seed: int, strided: bool, has_residual: bool,
    chunk: int, wanted: list[bool],
) -> None:  # fmt: skip
    total, width = batch.total, sum(widths)
    shapes = [(total, width), (batch.batch_size, widths[0]), (total, widths[1]), *([(total, width)] if has_residual else [])]
    inputs = [random_tensor(shape, dtype, seed + at, strided=strided) for at, shape in enumerate(shapes)]

    def with_lengths(*x: Tensor) -> Tensor:
        return reference.cross(x[0], batch.lengths, *x[1:3], x[3] if has_residual else None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "CHUNK", chunk)
        check_three_way(
            lambda *x: ops.jagged_cross(x[0], batch.offsets, *x[1:], backend=place.backend),
            with_lengths,
            inputs,
            requires_grad=wanted[: len(inputs)],
        )


@settings(max_examples=5 if PLACE.name == "interpret" else 40)
@given(jagged_batches(longest=20), float_dtypes(), seeds(), st.booleans())
def test_second_derivatives_of_cross(place: Place, batch: Jagged, dtype: torch.dtype, seed: int, has_residual: bool) -> None:
    shapes = [(batch.total, 7), (batch.batch_size, 3), (batch.total, 4), *([(batch.total, 7)] if has_residual else [])]
    check_three_way(
        gradient(lambda *x: ops.jagged_cross(x[0], batch.offsets, *x[1:], backend=place.backend)),
        gradient(lambda *x: reference.cross(x[0], batch.lengths, *x[1:3], x[3] if has_residual else None)),
        [random_tensor(shape, dtype, seed + at) for at, shape in enumerate(shapes)],
    )


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((3, 4), (1, 1), (3, 3)), "context: expected shape [2, 1], got [1, 1]"),
        (((3, 4), (2, 1), (3, 2)), "own: expected shape [3, 3], got [3, 2]"),
        (((3, 4), (2, 1), (3, 3), (3, 3)), "residual: expected shape [3, 4], got [3, 3]"),
        (((3, 4), (2, 5), (3, 3)), "context: expected at most 4 columns, as many as values [3, 4], got 5"),
    ],
)
def test_a_cross_that_does_not_fit(place: Place, shapes: tuple[tuple[int, int], ...], message: str) -> None:
    values, *others = (torch.zeros(shape, device=place.device) for shape in shapes)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        ops.jagged_cross(values, torch.tensor([0, 2, 3], device=place.device), *others, backend=place.backend)


@given(
    jagged_batches(), DENSE_LENGTHS, WIDTHS, st.sampled_from([torch.int32, torch.int64]), seeds(), st.booleans(),
    st.sampled_from(PAIRS),
)  # fmt: skip
def test_integers_are_exact(
    place: Place, batch: Jagged, length: int | None, width: int, dtype: torch.dtype, seed: int, strided: bool,
    pair: tuple[Any, Any],
) -> None:  # fmt: skip
    ours, expected = pair
    # Sums and products wrap around.
    values = whole_numbers(random_tensor((batch.total, width), torch.float32, seed, strided=strided), dtype)
    dense = whole_numbers(dense_of(batch, length, width, torch.float32, seed + 1, strided), dtype)
    output = ours(values, batch.offsets, dense, backend=place.backend)
    torch.testing.assert_close(output, expected(values, batch.lengths, dense), rtol=0, atol=0)
    scores = values[:, 0]
    pairs = ops.jagged_pairwise_difference(scores, batch.offsets, backend=place.backend)
    torch.testing.assert_close(pairs, reference.pairwise_difference(scores, batch.lengths), rtol=0, atol=0)


def whole_numbers(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Integers of all bits, as far apart in memory as the numbers."""
    bits = values.contiguous().view(torch.int32).to(dtype)
    bits = bits * 2_000_000_011 if dtype == torch.int64 else bits
    return torch.empty_strided(values.shape, values.stride(), dtype=dtype, device=values.device).copy_(bits)


# Where blocks of pairs begin is added up in the kernel, or written down by a scan before it; addresses of 32 bits, or of 64.
@given(
    jagged_batches(), float_dtypes(), seeds(), st.booleans(), st.booleans(), st.sampled_from([0, _shared.SCANNED_SAMPLES]),
    st.booleans(),
)  # fmt: skip
def test_pairwise_difference(
    place: Place, batch: Jagged, dtype: torch.dtype, seed: int, strided: bool, sync: bool, scanned: int, is_far: bool
) -> None:
    values = random_tensor((batch.total, 2), dtype, seed)[:, 0] if strided else random_tensor((batch.total,), dtype, seed)
    total = None if sync else sum(n * n for n in batch.lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_shared, "SCANNED_SAMPLES", scanned)
        if is_far:
            patch.setattr(kernels, "_index", lambda *_: tl.int64)
        check_three_way(
            lambda v: ops.jagged_pairwise_difference(v, batch.offsets, total, backend=place.backend),
            lambda v: reference.pairwise_difference(v, batch.lengths),
            [values],
        )


@given(
    jagged_batches(), st.sampled_from([1, 3, 16, 50]), WIDTHS, float_dtypes(), seeds(), st.booleans(), st.booleans(),
    st.booleans(), st.sampled_from([None, "relu", "silu", "gelu"]), CHUNKS,
)  # fmt: skip
def test_linear(
    place: Place, batch: Jagged, in_features: int, width: int, dtype: torch.dtype, seed: int, has_bias: bool, has_context: bool,
    strided: bool, activation: Any, chunk: int,
) -> None:  # fmt: skip
    inputs = [random_tensor((batch.total, in_features), dtype, seed), random_tensor((width, in_features), dtype, seed + 1)]
    if has_bias:
        inputs.append(random_tensor((width,), dtype, seed + 2))
    if has_context:
        inputs.append(dense_of(batch, None, width, dtype, seed + 3, strided))

    def arguments(tensors: tuple[Tensor, ...]) -> tuple[Any, ...]:
        bias = tensors[2] if has_bias else None
        return tensors[1], bias, tensors[-1] if has_context else None, activation

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "CHUNK", chunk)
        check_three_way(
            lambda *x: ops.jagged_linear(x[0], batch.offsets, *arguments(x), backend=place.backend),
            lambda *x: reference.linear(x[0], batch.lengths, *arguments(x)),
            inputs,
        )


@pytest.mark.parametrize("activation", [None, "relu", "silu", "gelu"])
@pytest.mark.parametrize("has_biases", [True, False])
def test_mlp_is_its_layers(place: Place, activation: Any, has_biases: bool) -> None:
    batch = jagged_of((3, 0, 40, 1))
    sizes = [5, 7, 16, 2]
    values = random_tensor((batch.total, sizes[0]), torch.float32, 0)
    weights = [random_tensor((sizes[k + 1], sizes[k]), torch.float32, k) for k in range(3)]
    biases = [random_tensor((sizes[k + 1],), torch.float32, k) for k in range(3)] if has_biases else None
    context = random_tensor((4, 7), torch.float32, 9)
    ours = ops.jagged_mlp(values, batch.offsets, weights, biases, context, activation, backend=place.backend)
    for k in range(3):
        values = reference.linear(
            values,
            batch.lengths,
            weights[k],
            biases[k] if biases else None,
            None if k else context,
            activation if k < 2 else None,
        )
    torch.testing.assert_close(ours, values, rtol=1e-5, atol=1e-4)


@given(st.lists(st.integers(0, 40), max_size=12), st.integers(1, 9), st.integers(0, 5))
def test_each_chunk_has_a_part_of_its_own(lengths: list[int], chunk: int, unowned: int) -> None:
    """The rule that `sum_rows_kernel` states, with samples that need not begin at row 0."""
    start, parts = unowned, []
    for length in lengths:
        count = -(-length // chunk)
        if count > 1:
            parts += [2 * (start // chunk) + k for k in range(count)]
        start += length
    assert len(set(parts)) == len(parts)
    assert all(0 <= part <= 2 * ((start - 1) // chunk) for part in parts)


def test_long_sample_among_short_ones(place: Place) -> None:
    long, short = {"gpu": (100_000, 3000), "cpu": (100_000, 300), "interpret": (1500, 6)}[place.name]
    lengths = tuple(k % 5 for k in range(short)) + (long, kernels.CHUNK, kernels.CHUNK + 1, 0, 2 * kernels.CHUNK) + (3,) * short
    batch = jagged_of(lengths)
    width = 24
    values = random_tensor((batch.total, width), torch.float32, 0)
    dense = random_tensor((batch.batch_size, width), torch.float32, 1).requires_grad_()
    cotangent = random_tensor((batch.total, width), torch.float32, 2)
    sample = torch.repeat_interleave(torch.tensor(lengths, device=place.device))
    output = ops.jagged_dense_mul(values, batch.offsets, dense, backend=place.backend)
    assert torch.equal(output, values * dense[sample])
    (grad,) = torch.autograd.grad(output, dense, cotangent)
    terms = values.double() * cotangent.double()
    expected = torch.zeros(dense.shape, dtype=torch.float64, device=place.device).index_add_(0, sample, terms)
    torch.testing.assert_close(grad.double(), expected, rtol=1e-4, atol=1e-6 * long)


def test_gradients_without_memory_of_their_own(place: Place) -> None:
    """A sum's backward hands on one number with strides of zero."""
    batch = jagged_of((2, 0, 3))
    values, dense = random_tensor((5, 3), torch.float32, 0), random_tensor((3, 3), torch.float32, 1).requires_grad_()
    ops.jagged_dense_add(values, batch.offsets, dense, backend=place.backend).sum().backward()
    assert dense.grad is not None
    assert dense.grad.tolist() == [[n] * 3 for n in batch.lengths]
    scores = values[:, 1].requires_grad_()
    (grad,) = torch.autograd.grad(ops.jagged_pairwise_difference(scores, batch.offsets, 13, backend=place.backend).sum(), scores)
    assert grad.tolist() == [0] * 5


def test_strided_offsets(place: Place) -> None:
    offsets = jagged_of((2, 0, 3)).offsets
    strided = torch.stack([offsets, offsets + 100], 1)[:, 0]
    values, dense, rows = (random_tensor(shape, torch.float32, 0) for shape in ((5, 4), (3, 2, 4), (3, 4)))

    def run(o: Tensor) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in (values, dense, rows)]
        x = ops.jagged_dense_add(leaves[0], o, leaves[1], backend=place.backend)
        x = ops.jagged_dense_mul(x, o, leaves[2], backend=place.backend)
        y = ops.jagged_pairwise_difference(x[:, 0], o, 13, backend=place.backend)
        return [x.detach(), y.detach(), *torch.autograd.grad((x.square().sum(), y.square().sum()), leaves)]

    torch.testing.assert_close(run(strided), run(offsets), rtol=0, atol=0)


def test_relu_keeps_nan(place: Place) -> None:
    values = torch.tensor([[float("nan"), -1.0, 2.0]], device=place.device)
    identity, context = torch.eye(3, device=place.device), torch.zeros(1, 3, device=place.device)
    values.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    context[0, 0] = float("nan")
    output = ops.jagged_linear(values, jagged_of((1,)).offsets, identity, None, context, "relu", backend=place.backend)
    assert str(output.tolist()) == "[[nan, 0.0, 2.0]]"


@pytest.mark.usefixtures("unchecked")
def test_wrong_offsets_reach_no_foreign_memory(place: Place) -> None:
    """Offsets that decrease, begin before 0 or run past the end mix rows of the tensors, never a neighbour's into them."""
    fence = torch.full((60, 4), 1e30, device=place.device)
    values = fence[20:40].fill_(1.0)
    for wrong in ([0, 9, 5, 30], [-7, 4, 10], [0, 100, 200], [50, 60, 70], [0, -(2**40), 2**40], [0, 2**30, 0, 2**31]):
        offsets = torch.tensor(wrong, device=place.device)
        batch_size = len(wrong) - 1
        fences = torch.full((3 * batch_size, 4), 1e30, device=place.device)
        dense_fences = torch.full((3 * batch_size, 2, 4), 1e30, device=place.device)
        for around in (fences, dense_fences):
            inside = around[batch_size : 2 * batch_size].fill_(1.0)
            leaves = [values.detach().requires_grad_(), inside.requires_grad_()]
            for function in (
                lambda v, d: ops.jagged_dense_add(v, offsets, d, backend=place.backend),  # noqa: B023
                lambda v, d: ops.jagged_dense_mul(v, offsets, d, backend=place.backend),  # noqa: B023
                lambda v, d: ops.jagged_pairwise_difference(v[:, 0], offsets, 50, backend=place.backend) + d.sum() * 0,  # noqa: B023
            ):
                output = function(*leaves)
                # Rows that no sample covers may be left unwritten, which here means NaN.
                assert not (output.detach().abs() > 1e6).any()
                for grad in torch.autograd.grad(output, leaves, torch.ones_like(output)):
                    assert not (grad.abs() > 1e6).any()
            assert bool((around[:batch_size] == 1e30).all())
            assert bool((around[2 * batch_size :] == 1e30).all())
    assert bool((fence[:20] == 1e30).all())
    assert bool((fence[40:] == 1e30).all())


@pytest.mark.usefixtures("unchecked")
def test_messages_name_argument_and_cure(place: Place) -> None:
    values, offsets = torch.zeros(3, 2, device=place.device), torch.tensor([0, 3], device=place.device)
    weight, dense = torch.zeros(4, 2, device=place.device), torch.zeros(1, 2, device=place.device)
    cases: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: ops.jagged_dense_add(values[0], offsets, dense), ValueError, r"values: expected shape \[S, F\], got \[2\]"),
        (
            lambda: ops.jagged_dense_add(values.bool(), offsets, dense),
            TypeError,
            r"^values: expected dtype float32, bfloat16, float16, float64, int32, int64, got bool; convert it with .to\(...\)$",
        ),
        (
            lambda: ops.jagged_dense_add(values.long(), offsets, dense),
            TypeError,
            "^dense: expected the dtype of values, int64, got float32; convert one of them$",
        ),
        (
            lambda: ops.jagged_dense_add(values, offsets, dense.half()),
            TypeError,
            "^dense: expected the dtype of values, float32, got float16; convert one of them$",
        ),
        (lambda: ops.jagged_dense_add(values, offsets.float(), dense), TypeError, "offsets: expected dtype int32, int64"),
        (lambda: ops.jagged_dense_add(values, offsets[:1], dense), ValueError, "offsets: .* samples for the 3 rows"),
        (lambda: ops.jagged_dense_add(values, offsets, dense[0]), ValueError, r"dense: expected shape \[B, F\], got \[2\]"),
        (lambda: ops.jagged_dense_mul(values, offsets, dense.double()), TypeError, "dense: expected the dtype of values"),
        (lambda: ops.jagged_dense_mul(values, offsets, dense[:, :1]), ValueError, r"dense: expected \[1, 2\] or \[1, L, 2\]"),
        (lambda: ops.jagged_dense_mul(values, offsets, values), ValueError, r"dense: expected \[1, 2\].*got \[3, 2\]"),
        (lambda: ops.jagged_dense_mul(values, offsets, dense.to("meta")), ValueError, "dense: expected the device of values"),
        (lambda: ops.jagged_dense_mul(values, offsets, dense, backend="cuda"), ValueError, "backend: got 'cuda'"),
        (lambda: ops.jagged_pairwise_difference(values, offsets), ValueError, r"values: expected shape \[S\]"),
        (lambda: ops.jagged_linear(values, offsets, weight.T), ValueError, r"weight: expected shape \[2, 2\], got \[2, 4\]"),
        (lambda: ops.jagged_linear(values, offsets, weight, weight), ValueError, r"bias: expected shape \[out\], got \[4, 2\]"),
        (lambda: ops.jagged_linear(values, offsets, weight, weight[:2, 0]), ValueError, r"bias: expected shape \[4\], got \[2\]"),
        (lambda: ops.jagged_linear(values, offsets, weight, None, dense), ValueError, r"context: expected shape \[1, 4\]"),
        (lambda: ops.jagged_linear(values, offsets, weight.half()), TypeError, "weight: expected the dtype of values"),
        (
            lambda: ops.jagged_linear(values, offsets, weight, activation="tanh"),  # type: ignore[arg-type]
            ValueError,
            "activation: got 'tanh', expected one of 'relu', 'silu', 'gelu' or None",
        ),
        (lambda: ops.jagged_mlp(values, offsets, []), ValueError, "weights: expected one for each layer, got none"),
        (lambda: ops.jagged_mlp(values, offsets, [weight], []), ValueError, "biases: expected one .* of the 1 layers, got 0"),
        (lambda: ops.jagged_mlp(values, offsets, [weight, weight]), ValueError, r"weights\[1\]: expected shape \[4, 4\]"),
    ]
    for call, error, message in cases:
        with pytest.raises(error, match=message):
            call()
    with pytest.raises(TypeError, match="float64"):
        ops.jagged_dense_add(values.double(), offsets, dense.double(), backend="triton")


def test_values_of_offsets_are_checked_on_demand(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAGGED_VALIDATE", "1")
    wrong = torch.tensor([0, 2, 1, 3], device=place.device)
    values, dense = torch.zeros(3, 2, device=place.device), torch.zeros(3, 2, device=place.device)
    for call in (
        lambda: ops.jagged_dense_add(values, wrong, dense),
        lambda: ops.jagged_dense_mul(values, wrong, dense),
        lambda: ops.jagged_pairwise_difference(values[:, 0], wrong, 9),
        lambda: ops.jagged_linear(values, wrong, dense),
        lambda: ops.jagged_mlp(values, wrong, [dense]),
    ):
        with pytest.raises(ValueError, match=r"offsets\[2\]: expected at least 2, the offset before it, got 1"):
            call()


def test_opcheck(place: Place) -> None:
    offsets = jagged_of((2, 0, 3)).offsets
    values, rows = random_tensor((5, 4), torch.float32, 0), random_tensor((3, 4), torch.float32, 1)
    dense = random_tensor((3, 2, 4), torch.float32, 2)
    pairs = random_tensor((13,), torch.float32, 3)
    # Transposed memory, so that an output that takes over its input's strides is seen.
    turned = random_tensor((4, 5), torch.float32, 4).T
    for name, arguments in (
        ("jagged_dense_combine", (values, rows, offsets, 5, "add")),
        ("jagged_dense_combine", (turned, dense, offsets, 5, "mul")),
        ("jagged_dense_combine", (turned, rows, offsets, 5, "add")),
        ("jagged_dense_combine", (None, dense, offsets, 5, "add")),
        ("jagged_dense_collect", (turned, None, offsets, None)),
        ("jagged_dense_collect", (turned, values, offsets, None)),
        ("jagged_dense_collect", (turned, values, offsets, 2)),
        ("jagged_activate", (turned, rows, offsets, "gelu")),
        ("jagged_activate_backward", (turned, None, rows, offsets, values, "relu", torch.float32, torch.float32)),
        ("jagged_activate_backward", (turned, values, rows, offsets, None, "silu", None, torch.float32)),
        ("jagged_pairwise_difference", (values[:, 0], offsets, 13)),
        ("jagged_pairwise_difference_backward", (pairs, offsets, 5)),
    ):
        torch.library.opcheck(getattr(torch.ops.jagged, name).default, (*arguments, place.backend))


@pytest.mark.skipif(PLACE.name != "cpu", reason="float64 finite differences are the CPU's work")
def test_gradcheck_to_second_order(place: Place) -> None:
    offsets = jagged_of((2, 0, 3)).offsets
    values, rows, dense, weight, bias = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((5, 2), (3, 2), (3, 2, 2), (2, 2), (2,))
    )
    for operand in (rows, dense):
        for function in (ops.jagged_dense_add, ops.jagged_dense_mul):
            run = lambda v, d, function=function: function(v, offsets, d)  # noqa: E731
            assert torch.autograd.gradcheck(run, (values, operand))
            assert torch.autograd.gradgradcheck(run, (values, operand))
            # The gradient of a gradient's gradient goes through every pair of functions.
            assert torch.autograd.gradgradcheck(gradient(run), (values, operand))
    scores = values[:, 0]
    assert torch.autograd.gradcheck(lambda v: ops.jagged_pairwise_difference(v, offsets), (scores,))
    assert torch.autograd.gradgradcheck(lambda v: ops.jagged_pairwise_difference(v, offsets).square(), (scores,))
    leaves = values, weight, bias, rows
    assert torch.autograd.gradgradcheck(lambda v, w, b, c: ops.jagged_linear(v, offsets, w, b, c), leaves)
    for activation in ("relu", "silu", "gelu"):
        assert torch.autograd.gradcheck(
            lambda v, w, b, c, activation=activation: ops.jagged_linear(v, offsets, w, b, c, activation), leaves
        )


def test_second_derivative_of_an_activation_is_refused(place: Place) -> None:
    values, context = (random_tensor(shape, torch.float32, 0).requires_grad_() for shape in ((5, 4), (2, 4)))
    weight = torch.eye(4, device=place.device)
    output = ops.jagged_linear(values, jagged_of((2, 3)).offsets, weight, None, context, "gelu", backend=place.backend)
    grads = torch.autograd.grad(output.sum(), [values, context], create_graph=True)
    for grad in grads:
        with pytest.raises(RuntimeError, match="jagged_linear with context and activation has no second derivative"):
            grad.sum().backward(retain_graph=True)


@pytest.mark.parametrize("function", [ops.jagged_dense_add, ops.jagged_dense_mul])
@pytest.mark.parametrize("length", [None, 3])
@pytest.mark.parametrize(
    ("of_values", "of_dense"),
    [
        (torch.bfloat16, torch.float32), (torch.float32, torch.float16), (torch.float16, torch.bfloat16),
        (torch.float32, torch.float64), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32),
    ],
)  # fmt: skip
def test_autocast_promotes_as_pytorch_does(
    place: Place, function: Callable[..., Tensor], length: int | None, of_values: torch.dtype, of_dense: torch.dtype
) -> None:
    batch = jagged_of((2, 0, 40, 5))
    values = random_tensor((batch.total, 20), of_values, 0).requires_grad_()
    dense = dense_of(batch, length, 20, of_dense, 1).requires_grad_()
    wide = (values[0] * dense.flatten()[:20]).dtype
    # Kernels take no float64.
    backend = None if wide == torch.float64 else place.backend

    def run(dtypes: tuple[torch.dtype, torch.dtype]) -> list[Tensor]:
        output = function(values.to(dtypes[0]), batch.offsets, dense.to(dtypes[1]), backend=backend)
        grads = torch.autograd.grad(output.square().sum(), [values, dense], create_graph=True)
        loss = torch.stack([grad.double().square().sum() for grad in grads]).sum()
        return [output, *grads, *torch.autograd.grad(loss, [values, dense])]

    with torch.autocast(place.device.type, dtype=torch.bfloat16):
        got = run((of_values, of_dense))
    assert [x.dtype for x in got] == [wide, of_values, of_dense, of_values, of_dense]
    torch.testing.assert_close(got, run((wide, wide)), rtol=0, atol=0)


@pytest.mark.skipif(PLACE.name == "interpret", reason="interpreted kernels are not compiled")
def test_autocast_promotes_in_one_graph(place: Place) -> None:
    batch = jagged_of((2, 0, 5))
    values, weight, dense = (
        random_tensor(shape, torch.float32, k).requires_grad_() for k, shape in enumerate(((7, 4), (4, 4), (3, 4)))
    )

    def function(values: Tensor, weight: Tensor, dense: Tensor) -> Tensor:
        with torch.autocast(place.device.type, dtype=torch.bfloat16):
            hidden = torch.nn.functional.linear(values, weight)
            return ops.jagged_dense_mul(ops.jagged_dense_add(hidden, batch.offsets, dense), batch.offsets, hidden[:3])

    results = []
    for call in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        output = call(values, weight, dense)
        results.append([output, *torch.autograd.grad(output.square().sum(), (values, weight, dense))])
    assert results[1][0].dtype == torch.float32
    torch.testing.assert_close(*results)


def test_autocast_takes_no_integers_beside_floats(place: Place) -> None:
    batch = jagged_of((2, 3))
    values, dense = torch.ones(5, 4, device=place.device), torch.ones(2, 4, dtype=torch.int64, device=place.device)
    with torch.autocast(place.device.type, dtype=torch.bfloat16):
        with pytest.raises(TypeError, match=r"^dense: expected the dtype of values, float32, got int64; convert one of them$"):
            ops.jagged_dense_mul(values, batch.offsets, dense, backend=place.backend)
        assert ops.jagged_dense_mul(values.long(), batch.offsets, dense, backend=place.backend).dtype == torch.int64


def test_autocast_casts_the_context_too(place: Place) -> None:
    values, weight, context = (random_tensor(shape, torch.float32, 0).requires_grad_() for shape in ((5, 4), (4, 4), (2, 4)))
    with torch.autocast(place.device.type, dtype=torch.bfloat16):
        output = ops.jagged_linear(values, jagged_of((2, 3)).offsets, weight, None, context, "silu", backend=place.backend)
    assert output.dtype == torch.bfloat16
    grads = torch.autograd.grad(output.float().sum(), [values, weight, context])
    assert {grad.dtype for grad in grads} == {torch.float32}


@pytest.mark.skipif(PLACE.name == "interpret", reason="interpreted kernels are not compiled")
def test_one_graph_for_all_jagged_shapes(place: Place) -> None:
    graphs = 0

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        nonlocal graphs
        graphs += 1
        return graph.forward

    weight = random_tensor((13, 13), torch.float32, 5)

    def function(values: Tensor, offsets: Tensor, rows: Tensor, dense: Tensor, total: int) -> tuple[Tensor, Tensor]:
        x = ops.jagged_dense_add(values, offsets, rows)
        x = ops.jagged_dense_mul(x, offsets, dense)
        x = ops.jagged_mlp(x, offsets, [weight, weight], context=rows, activation="silu")
        return x, ops.jagged_pairwise_difference(x[:, 0], offsets, total)

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=count)
    for lengths in ((2, 4, 3), (5, 0, 1, 9), (3, 7), (30, 2, 2, 2, 2)):
        batch = jagged_of(lengths)
        inputs = [
            random_tensor((batch.total, 13), torch.float32, 0).requires_grad_(),
            batch.offsets,
            *(dense_of(batch, length, 13, torch.float32, 1).requires_grad_() for length in (None, 7)),
            sum(n * n for n in lengths),
        ]
        torch.testing.assert_close(compiled(*inputs), function(*inputs))
    assert graphs == 1
    with pytest.raises(Exception, match="total: must be given in a compiled or captured call"):
        torch.compile(lambda v, o: ops.jagged_pairwise_difference(v, o), fullgraph=True, backend="eager")(
            inputs[0].detach()[:, 0], batch.offsets
        )


@pytest.mark.skipif(PLACE.name == "interpret", reason="interpreted kernels are not compiled")
@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_compiled_gradients(place: Place, activation: Any) -> None:
    def function(values: Tensor, offsets: Tensor, weight: Tensor, context: Tensor, dense: Tensor) -> Tensor:
        x = ops.jagged_linear(values, offsets, weight, None, context, activation)
        return ops.jagged_dense_mul(ops.jagged_dense_add(x, offsets, context), offsets, dense)

    batch = jagged_of((2, 0, 5))
    leaves = [random_tensor(shape, torch.float32, 0).requires_grad_() for shape in ((7, 4), (4, 4), (3, 4), (3, 3, 4))]
    results = []
    for call in (function, torch.compile(function, fullgraph=True, backend="inductor" if place.name == "gpu" else "aot_eager")):
        output = call(leaves[0], batch.offsets, *leaves[1:])
        results.append([output.detach(), *torch.autograd.grad(output.square().sum(), leaves)])
    torch.testing.assert_close(*results)


@ON_GPU
def test_float64_agrees_with_the_cpu_without_synchronisation(place: Place) -> None:
    """PyTorch computes it on either device, pairs in another way: a CPU reads lengths. Some rows lie past the dense ones."""
    batch = jagged_of((3, 0, 40, 7))
    values, dense = random_tensor((50, 3), torch.float64, 0), random_tensor((4, 9, 3), torch.float64, 1)

    def step(*inputs: Tensor) -> list[Tensor]:
        *leaves, offsets = inputs
        leaves = [x.detach().requires_grad_() for x in leaves]
        x = ops.jagged_dense_mul(ops.jagged_dense_add(leaves[0], offsets, leaves[1][:, 0]), offsets, leaves[1])
        outputs = [x, ops.jagged_pairwise_difference(x[:, 0], offsets, 9 + 1600 + 49)]
        return [*outputs, *torch.autograd.grad([x.square().sum() for x in outputs], leaves)]

    inputs = values, dense, batch.offsets
    step(*inputs)
    torch.cuda.set_sync_debug_mode("error")
    ours = step(*inputs)
    torch.cuda.set_sync_debug_mode("default")
    for got, want in zip(ours, step(*(x.cpu() for x in inputs)), strict=True):
        torch.testing.assert_close(got.cpu(), want)


@ON_GPU
def test_no_synchronisation_and_graph_capture(place: Place) -> None:
    values = random_tensor((600, 8), torch.float32, 0).requires_grad_()
    rows, dense = (random_tensor(shape, torch.float32, 1).requires_grad_() for shape in ((3, 8), (3, 20, 8)))
    weight = random_tensor((8, 8), torch.float32, 2).requires_grad_()
    offsets = jagged_of((100, 0, 500)).offsets
    total = 100**2 + 500**2

    def step() -> list[Tensor]:
        x = ops.jagged_dense_mul(ops.jagged_dense_add(values, offsets, rows), offsets, dense)
        x = ops.jagged_linear(x, offsets, weight, None, rows, "gelu")
        y = ops.jagged_pairwise_difference(x[:, 0], offsets, total)
        grads = torch.autograd.grad(x.square().sum() + y.square().sum(), [values, rows, dense, weight])
        return [x.detach(), y.detach(), *grads]

    graph, results = captured(step)
    for lengths in ((100, 0, 500), (500, 0, 100), (500, 100, 0)):
        offsets.copy_(jagged_of(lengths).offsets)
        graph.replay()
        torch.testing.assert_close(results, step(), rtol=0, atol=0)


@ON_GPU
def test_addresses_past_2_to_the_31(place: Place) -> None:
    rows, width = 2**21 + 3, 1024
    values = torch.empty(rows, width, dtype=torch.bfloat16, device=place.device)
    values.copy_(torch.arange(rows, device=place.device)[:, None] % 251)
    offsets = torch.tensor([0, 5, rows - 4, rows], device=place.device)
    dense = torch.tensor([1.0, 2.0, 3.0], device=place.device, dtype=torch.bfloat16)[:, None].expand(3, width).requires_grad_()
    output = ops.jagged_dense_mul(values, offsets, dense)
    assert torch.equal(output[-4:], values[-4:] * 3)
    assert torch.equal(output[5:-4:99_991], values[5:-4:99_991] * 2)
    del output
    (grad,) = torch.autograd.grad(ops.jagged_dense_add(values, offsets, dense), dense, values)
    torch.testing.assert_close(grad[2].float(), values[-4:].float().sum(0), rtol=0.01, atol=0)
    torch.testing.assert_close(grad[1].double(), values[5:-4].sum(0, dtype=torch.float64), rtol=0.01, atol=0)
    per_row = torch.ones(3, 6, width, dtype=torch.bfloat16, device=place.device, requires_grad=True)
    (grad,) = torch.autograd.grad(ops.jagged_dense_add(values, offsets, per_row), per_row, values)
    assert torch.equal(grad[2, :4], values[-4:])


@ON_GPU
@pytest.mark.parametrize("scanned", [0, 10_000])
def test_pairs_of_a_long_sample_among_thousands_of_short_ones(
    place: Place, scanned: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_shared, "SCANNED_SAMPLES", scanned)
    # Of 100,000 rows there would be 20 GB of pairs and as much again for their gradient; one test below has 50,000.
    lengths = (*(k % 5 for k in range(3_000)), 20_000, 0, *(k % 7 for k in range(3_000)))
    batch = jagged_of(lengths)
    scores = random_tensor((batch.total,), torch.bfloat16, 0).requires_grad_()
    starts = ops.pair_offsets(batch.offsets).tolist()
    output = ops.jagged_pairwise_difference(scores, batch.offsets, starts[-1])
    cotangent = random_tensor((starts[-1],), torch.bfloat16, 1)
    (grad,) = torch.autograd.grad(output, scores, cotangent)
    ends = batch.offsets.tolist()
    for b in (1, 2_999, 3_000, 3_002, 5_999):
        of_sample = scores.detach()[ends[b] : ends[b + 1]]
        block = slice(starts[b], starts[b + 1])
        assert torch.equal(output[block], (of_sample[:, None] - of_sample[None]).flatten())
        terms = cotangent[block].view(lengths[b], lengths[b])
        expected = terms.sum(1, dtype=torch.float32) - terms.sum(0, dtype=torch.float32)
        torch.testing.assert_close(grad[ends[b] : ends[b + 1]].float(), expected, rtol=0.01, atol=0.05)


@ON_GPU
def test_pairs_past_2_to_the_31(place: Place) -> None:
    lengths = (5, 50_000, 3)
    scores = random_tensor((sum(lengths),), torch.bfloat16, 0).requires_grad_()
    total = sum(n * n for n in lengths)
    output = ops.jagged_pairwise_difference(scores, jagged_of(lengths).offsets, total)
    last = scores[-3:]
    assert torch.equal(output[-9:], (last[:, None] - last[None]).flatten())
    long = scores[5:-3]
    assert torch.equal(output[-9 - 50_000 : -9], long[-1] - long)
    cotangent = torch.ones(1, dtype=torch.bfloat16, device=place.device).expand(total)
    (grad,) = torch.autograd.grad(output, scores, cotangent)
    assert not grad.any()
