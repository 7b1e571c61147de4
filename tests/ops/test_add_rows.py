"""Rows of a table added to rows, against PyTorch's lookup and sum, in every place."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from jagged.ops import add_rows
from tests.graphs import captured
from tests.oracle import check_three_way
from tests.places import ONE_ORDER, PLACE, Place
from tests.repeats import check_repeats
from tests.strategies import float_dtypes, random_tensor, seeds

ROWS = st.sampled_from([0, 1, 5, 70, 300])
WIDTHS = st.sampled_from([1, 3, 16, 64, 130])
PAIRS = list(itertools.product(PLACE.dtypes, PLACE.dtypes))
COMPILED = pytest.mark.skipif(PLACE.name == "interpret", reason="interpreted kernels are not compiled")


def index_of(rows: int, table_rows: int, seed: int, dtype: torch.dtype = torch.int64, *, strided: bool = False) -> Tensor:
    """Rows of a table, of which the first are drawn more often than the others."""
    index = torch.rand(rows, 2, generator=torch.Generator().manual_seed(seed)).square().mul(table_rows).to(dtype).to(PLACE.device)
    return index[:, 0] if strided else index[:, 0].contiguous()


def reference(values: Tensor, table: Tensor, index: Tensor) -> Tensor:
    return values + table[index.long()]


def theirs(values: Tensor, table: Tensor, index: Tensor) -> Tensor:
    return values + torch.nn.functional.embedding(index, table)


@given(
    ROWS, st.sampled_from([1, 4, 200]), WIDTHS, float_dtypes(), st.sampled_from([torch.int32, torch.int64]), seeds(),
    st.booleans(), st.sampled_from([[True, True], [True, False], [False, True], [False, False]]),
)  # fmt: skip
def test_add_rows(
    place: Place, rows: int, table_rows: int, width: int, dtype: torch.dtype, of_index: torch.dtype, seed: int, strided: bool,
    wanted: list[bool],
) -> None:  # fmt: skip
    index = index_of(rows, table_rows, seed, of_index, strided=strided)
    check_three_way(
        lambda v, t: add_rows(v, t, index, backend=place.backend),
        lambda v, t: reference(v, t, index),
        [
            random_tensor((rows, width), dtype, seed, strided=strided),
            random_tensor((table_rows, width), dtype, seed + 1, strided=strided),
        ],
        requires_grad=wanted,
    )


@settings(max_examples=5 if PLACE.name == "interpret" else 40)
@given(ROWS, WIDTHS, float_dtypes(), seeds())
def test_second_derivatives(place: Place, rows: int, width: int, dtype: torch.dtype, seed: int) -> None:
    index = index_of(rows, 9, seed)

    def gradient(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*leaves: Tensor) -> Tensor:
            leaves = tuple(leaf if leaf.requires_grad else leaf.requires_grad_() for leaf in leaves)
            grads = torch.autograd.grad(function(*leaves).square().sum(), leaves, create_graph=True)
            return torch.cat([grad.flatten() for grad in grads])

        return run

    check_three_way(
        gradient(lambda v, t: add_rows(v, t, index, backend=place.backend)),
        gradient(lambda v, t: reference(v, t, index)),
        [random_tensor((rows, width), dtype, seed), random_tensor((9, width), dtype, seed + 1)],
    )


@pytest.mark.parametrize("is_autocast", [False, True])
@pytest.mark.parametrize(("of_values", "of_table"), PAIRS)
def test_two_dtypes_and_autocast(place: Place, of_values: torch.dtype, of_table: torch.dtype, is_autocast: bool) -> None:
    """The sum has the bits of PyTorch's; each gradient has its operand's dtype, and errs no more than PyTorch's."""
    values, table = random_tensor((300, 20), of_values, 0), random_tensor((7, 20), of_table, 1)
    index, leaves = index_of(300, 7, 2), [of.requires_grad_() for of in (values, table)]
    wide = torch.promote_types(of_values, of_table)
    cotangent = random_tensor((300, 20), wide, 3)

    def step(function: Callable[..., Tensor], *leaves: Tensor) -> list[Tensor]:
        with torch.autocast(place.device.type, torch.bfloat16, enabled=is_autocast):
            output = function(*leaves, index)
        return [output.detach(), *torch.autograd.grad(output, leaves, cotangent.to(output.dtype))]

    got, expected = step(lambda *x: add_rows(*x, backend=place.backend), *leaves), step(theirs, *leaves)
    assert [x.dtype for x in got] == [wide, of_values, of_table] == [x.dtype for x in expected]
    # Interpreted kernels cut bfloat16 off where others round it.
    cut = torch.finfo(torch.bfloat16).eps if place.name == "interpret" and wide == torch.bfloat16 else 0
    torch.testing.assert_close(got[0], expected[0], rtol=cut, atol=0)
    assert torch.equal(got[1], expected[1])
    exact = step(theirs, *(leaf.detach().double().requires_grad_() for leaf in leaves))[2]
    errors = [float((of[2].double() - exact).abs().max()) for of in (got, expected)]
    assert errors[0] <= errors[1] + torch.finfo(torch.promote_types(of_table, torch.float32)).eps * float(exact.abs().max())


@pytest.mark.skipif(PLACE.name != "cpu", reason="of tensors on a CPU")
@pytest.mark.parametrize(("of_values", "of_table"), PAIRS)
def test_on_a_cpu_it_is_pytorchs_own(of_values: torch.dtype, of_table: torch.dtype) -> None:
    """So it has forward-mode derivatives, is no operator of ours in a program, and has PyTorch's bits."""
    values, table = (random_tensor(*of).cpu().requires_grad_() for of in (((40, 6), of_values, 0), ((5, 6), of_table, 1)))
    index, found = index_of(40, 5, 2).cpu(), []
    for function in (add_rows, theirs):
        output = function(values, table, index)
        _, tangent = torch.func.jvp(lambda *x, run=function: run(*x, index), (values, table), (values, table))
        found.append([output, tangent, *torch.autograd.grad(output, (values, table), output)])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_gradients_without_memory_of_their_own(place: Place) -> None:
    """A sum's backward hands on one number with strides of zero."""
    values, table = (random_tensor((rows, 3), torch.float32, 0).requires_grad_() for rows in (5, 4))
    index = torch.tensor([3, 0, 3, 3, 1], device=place.device)
    add_rows(values, table, index, backend=place.backend).sum().backward()
    assert table.grad is not None
    assert table.grad.tolist() == [[1.0] * 3, [1.0] * 3, [0.0] * 3, [3.0] * 3]


@pytest.mark.parametrize(("rows", "table_rows", "width"), [(0, 0, 4), (0, 3, 4), (5, 3, 0), (0, 0, 0)])
def test_nothing(place: Place, rows: int, table_rows: int, width: int) -> None:
    leaves = [random_tensor((count, width), torch.float32, 0).requires_grad_() for count in (rows, table_rows)]
    output = add_rows(*leaves, torch.zeros(rows, dtype=torch.int64, device=place.device), backend=place.backend)
    assert output.shape == (rows, width)
    grads = torch.autograd.grad(output.sum(), leaves, create_graph=True)
    assert [grad.shape for grad in grads] == [leaf.shape for leaf in leaves]
    assert not any(grad.any() for grad in grads)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("table_rows", [0, 4])
def test_a_wrong_index_reaches_no_foreign_memory(place: Place, table_rows: int) -> None:
    index = torch.tensor([3, -1, 4, 0, 2**40, -(2**40), 0], device=place.device)
    right = (index >= 0) & (index < table_rows)
    values, fence = random_tensor((7, 3), torch.float32, 0).requires_grad_(), torch.full((20, 3), 1e30, device=place.device)
    table = fence[8 : 8 + table_rows].fill_(1.0).requires_grad_()
    if place.backend == "torch":
        with pytest.raises((IndexError, RuntimeError), match=r"out of range in self|axis dim should be positive"):
            add_rows(values, table, index, backend=place.backend)
        return
    output = add_rows(values, table, index, backend=place.backend)
    assert torch.equal(output, values + right[:, None])
    grads = torch.autograd.grad(output.square().sum() / 2, (values, table), create_graph=True)
    assert torch.equal(grads[0], output)
    expected = table.detach().new_zeros(table_rows, 3).index_add(0, index[right], output[right])
    torch.testing.assert_close(grads[1], expected)
    (again,) = torch.autograd.grad(grads[1].sum(), values)
    assert torch.equal(again, right[:, None].expand(-1, 3).float())


def test_messages_are_whole_lines(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAGGED_VALIDATE", "1")
    values, table = torch.zeros(3, 2, device=place.device), torch.zeros(4, 2, device=place.device)
    index = torch.tensor([0, 3, 1], device=place.device)
    cases: list[tuple[tuple[Any, ...], type[Exception], str]] = [
        ((values[0], table, index), ValueError, "values: expected shape [N, D], got [2]"),
        ((values, table[0], index), ValueError, "table: expected shape [R, D], got [2]"),
        (
            (values.int(), table, index),
            TypeError,
            "values: expected dtype float32, bfloat16, float16, float64, got int32; convert it with .to(...)",
        ),
        (
            (values, table.int(), index),
            TypeError,
            "table: expected dtype float32, bfloat16, float16, float64, got int32; convert it with .to(...)",
        ),
        ((values, table[:, :1], index), ValueError, "table: expected shape [R, 2], as wide as values, got [4, 1]"),
        (
            (values, table.to("meta"), index),
            ValueError,
            f"table: expected the device of values, {values.device}, got meta; move one of them",
        ),
        ((values, table, index[:, None]), ValueError, "index: expected shape [N], got [3, 1]"),
        ((values, table, index[:2]), ValueError, "index: expected shape [3], one for each row of values, got [2]"),
        ((values, table, index.float()), TypeError, "index: expected dtype int32, int64, got float32; convert it with .to(...)"),
        (
            (values, table, index.to("meta")),
            ValueError,
            f"index: expected the device of values, {values.device}, got meta; move one of them",
        ),
        ((values, table[:3], index), ValueError, "index[1]: expected an id from 0 to 2, got 3; map ids to dense ones first"),
        ((values, table, index - 1), ValueError, "index[0]: expected an id from 0 to 3, got -1; map ids to dense ones first"),
    ]
    for arguments, error, message in cases:
        with pytest.raises(error, match=f"^{re.escape(message)}$"):
            add_rows(*arguments)
    for arguments in ((values.double(), table, index), (values, table.double(), index)):
        message = "backend='triton': the kernels accumulate in float32, got float64 tensors; use backend='torch' for float64"
        with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
            add_rows(*arguments, backend="triton")


@pytest.mark.skipif(PLACE.name != "cpu", reason="float64 finite differences are the CPU's work")
@pytest.mark.parametrize("backend", [None, "torch"])
def test_gradcheck_to_third_order(backend: str | None) -> None:
    values, table = (torch.randn(rows, 2, dtype=torch.float64, requires_grad=True) for rows in (5, 3))
    index = torch.tensor([2, 0, 2, 2, 0])

    def run(values: Tensor, table: Tensor) -> Tensor:
        return add_rows(values, table, index, backend=backend).sin()

    def gradient(values: Tensor, table: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(run(values, table).square().sum(), (values, table), create_graph=True)

    assert torch.autograd.gradcheck(run, (values, table))
    assert torch.autograd.gradgradcheck(run, (values, table))
    assert torch.autograd.gradgradcheck(gradient, (values, table))


def test_opcheck(place: Place) -> None:
    values, table = random_tensor((5, 4), torch.float32, 0), random_tensor((3, 4), torch.bfloat16, 1)
    # Transposed memory, so that an output that takes over its input's strides is seen.
    turned = random_tensor((4, 5), torch.bfloat16, 4).T
    index = torch.tensor([2, 0, 2, 2, 0], device=place.device)
    for name, arguments in (
        ("add_rows", (values, table, index)),
        ("add_rows", (turned, table, index)),
        ("add_rows", (turned, table.float(), index)),
        ("add_rows", (None, table, index)),
        ("index_sums", (values, index, 3, torch.bfloat16)),
        ("index_sums", (turned, index, 3, torch.float32)),
    ):
        torch.library.opcheck(getattr(torch.ops.jagged, name).default, (*arguments, place.backend))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap(place: Place) -> None:
    values, table = random_tensor((4, 5, 3), torch.float32, 0), random_tensor((2, 3), torch.float32, 1)
    index = index_of(20, 2, 2).view(4, 5)
    found = torch.vmap(lambda v, i: add_rows(v, table, i, backend=place.backend))(values, index)
    assert torch.equal(found, values + table[index])


@COMPILED
@pytest.mark.parametrize("backend", [None, PLACE.backend])
def test_one_graph_for_all_numbers_of_rows(place: Place, backend: str | None) -> None:
    graphs = 0

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        nonlocal graphs
        graphs += 1
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: add_rows(*x, backend=backend), fullgraph=True, dynamic=True, backend=count)
    for rows in (9, 13, 130):
        inputs = (
            random_tensor((rows, 13), torch.bfloat16, 0),
            random_tensor((rows + 2, 13), torch.float32, 1),
            index_of(rows, 5, 2),
        )
        assert torch.equal(compiled(*inputs), theirs(*inputs))
    assert graphs == 1


@COMPILED
@pytest.mark.parametrize("is_autocast", [False, True])
def test_compiled_gradients(place: Place, is_autocast: bool) -> None:
    leaves = [random_tensor((rows, 8), of, 0).requires_grad_() for rows, of in ((40, torch.bfloat16), (5, torch.float32))]
    index, results = index_of(40, 5, 2), []

    def function(values: Tensor, table: Tensor) -> Tensor:
        with torch.autocast(place.device.type, torch.bfloat16, enabled=is_autocast):
            return add_rows(values, table, index, backend=place.backend)

    for call in (function, torch.compile(function, fullgraph=True, backend="inductor" if place.name == "gpu" else "aot_eager")):
        output = call(*leaves)
        results.append([output, *torch.autograd.grad(output.square().sum(), leaves)])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_meta(place: Place) -> None:
    for backend in (None, "torch"):
        values, table = (torch.zeros(rows, 3, dtype=of, device="meta") for rows, of in ((5, torch.half), (2, torch.float32)))
        output = add_rows(values, table, torch.zeros(5, dtype=torch.int64, device="meta"), backend=backend)
        assert (output.shape, output.dtype, output.device.type) == ((5, 3), torch.float32, "meta")


@ONE_ORDER
@pytest.mark.parametrize("of_values", [torch.float32, torch.bfloat16])
def test_repeats_are_the_same(place: Place, of_values: torch.dtype) -> None:
    # As users run it: the mode would also replace what PyTorch's own operations do by default.
    torch.use_deterministic_algorithms(False)
    leaves = [random_tensor((rows, 64), of, 0).requires_grad_() for rows, of in ((5000, of_values), (9, torch.float32))]
    index = index_of(5000, 9, 2)

    def run() -> list[Tensor]:
        output = add_rows(*leaves, index, backend=place.backend)
        return [output, *torch.autograd.grad(output, leaves, output.detach())]

    check_repeats(run)


@pytest.mark.gpu
def test_no_synchronisation_and_graph_capture(place: Place) -> None:
    leaves = [random_tensor((rows, 64), of, 0).requires_grad_() for rows, of in ((5000, torch.bfloat16), (9, torch.float32))]
    index = index_of(5000, 9, 2)

    def step() -> list[Tensor]:
        output = add_rows(*leaves, index)
        return [output.detach(), *torch.autograd.grad(output, leaves, output.detach())]

    graph, results = captured(step)
    for seed in (3, 4):
        index.copy_(index_of(5000, 9, seed))
        graph.replay()
        torch.testing.assert_close(results, step(), rtol=0, atol=0)


@pytest.mark.gpu
def test_addresses_past_2_to_the_31(place: Place) -> None:
    rows, width = 2**21 + 3, 1024
    values = torch.empty(rows, width, dtype=torch.bfloat16, device=place.device)
    values.copy_(torch.arange(rows, device=place.device)[:, None] % 251)
    index = torch.arange(rows, device=place.device).flip(0)
    # Of a table that is as large.
    output = add_rows(values, values, index)
    places = torch.tensor([0, 1, rows // 2, rows - 2, rows - 1], device=place.device)
    assert torch.equal(output[places], values[places] + values[index[places]])
