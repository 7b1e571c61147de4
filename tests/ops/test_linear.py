"""The linear layer of rows, and sums of columns, against PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.flop_counter import FlopCounterMode

from jagged.ops._shared import linear as shared
from jagged.ops._shared.linear import COLUMN_SUMS, Rows, Summing, Sums
from jagged.ops.linear import linear
from tests.graphs import captured
from tests.oracle import check_three_way
from tests.places import ONE_ORDER, PLACE, Place
from tests.repeats import check_repeats
from tests.strategies import float_dtypes, random_tensor, seeds


def reference(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x @ weight.T + bias


def column_sums(rows: Tensor, dtype: torch.dtype | None = None, backend: str | None = PLACE.backend) -> Tensor:
    return COLUMN_SUMS(Rows(rows), Summing(dtype or rows.dtype), backend).sums


@given(
    st.sampled_from([0, 1, 5, 70, 700]),
    st.sampled_from([1, 8, 33]),
    st.sampled_from([1, 3, 64, 100, 192]),
    float_dtypes(),
    seeds(),
    st.tuples(st.booleans(), st.booleans(), st.booleans()),
    st.booleans(),
)
def test_linear(
    place: Place, rows: int, wide: int, out: int, dtype: torch.dtype, seed: int, wanted: tuple[bool, ...], strided: bool
) -> None:
    shapes = (rows, wide), (out, wide), (out,)
    inputs = [random_tensor(shape, dtype, seed + at, strided=strided) for at, shape in enumerate(shapes)]
    check_three_way(lambda *of: linear(*of, backend=place.backend), reference, inputs, requires_grad=list(wanted))


@given(
    st.sampled_from([0, 1, 5, 70, 1_500]),
    st.sampled_from([0, 1, 2, 7, 64, 65, 100, 300]),
    float_dtypes(),
    seeds(),
    st.sampled_from(["side by side", "strided", "transposed"]),
)
def test_column_sums(place: Place, rows: int, width: int, dtype: torch.dtype, seed: int, layout: str) -> None:
    """A gradient comes with any strides. Sums of whole numbers are exact in any order."""
    given_ = random_tensor((rows, width), dtype, seed, strided=layout == "strided")
    given_ = random_tensor((width, rows), dtype, seed).T if layout == "transposed" else given_
    # In place, so that strides stay.
    given_.mul_(4).round_()
    exact = torch.promote_types(dtype, torch.float32)
    assert torch.equal(column_sums(given_, exact), given_.double().sum(0).to(exact))


@given(st.sampled_from([0, 1, 5, 70]), st.sampled_from([0, 1, 2, 7, 64, 65]), float_dtypes(), seeds())
def test_column_sums_and_their_gradients(place: Place, rows: int, width: int, dtype: torch.dtype, seed: int) -> None:
    """Of many rows the order of PyTorch's sum is another one than any kernel's, and so is its error."""
    check_three_way(column_sums, lambda of: of.sum(0), [random_tensor((rows, width), dtype, seed)])


def test_a_row_that_is_expanded(place: Place) -> None:
    """As the gradient of a sum is, whose stride is 0."""
    row = random_tensor((1, 70), torch.float32, 1)
    torch.testing.assert_close(column_sums(row.expand(300, 70)), 300 * row[0])
    torch.testing.assert_close(column_sums(row.T.expand(70, 300)), row.sum().expand(300))


@pytest.mark.parametrize("of_sums", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_rounded_once(place: Place, dtype: torch.dtype, of_sums: torch.dtype) -> None:
    rows = random_tensor((2_000, 9), dtype, 1)
    found, exact = column_sums(rows, of_sums), rows.double().sum(0)
    assert found.dtype == of_sums
    torch.testing.assert_close(found.double(), exact, atol=1e-4, rtol=torch.finfo(of_sums).eps)


def test_a_sum_of_ones_in_16_bits(place: Place) -> None:
    """In bfloat16 the sum would stay at 256."""
    assert torch.equal(
        column_sums(torch.ones(4_096, 3, dtype=torch.bfloat16, device=place.device)).cpu(), torch.tensor([4096.0] * 3).bfloat16()
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_column(place: Place, value: float) -> None:
    rows = random_tensor((300, 20), torch.float32, 1)
    rows[7, 3] = value
    assert torch.equal(column_sums(rows).isfinite(), torch.arange(20, device=place.device) != 3)


@pytest.mark.parametrize("shape", [(24,), (2, 3, 24), (0, 3, 24), (2, 1, 3, 24)])
def test_rows_of_any_dimensions(place: Place, shape: tuple[int, ...]) -> None:
    leaves = [random_tensor(of, torch.float32, seed).requires_grad_() for seed, of in enumerate((shape, (7, 24), (7,)))]
    both = linear(*leaves, backend=place.backend), torch.nn.functional.linear(*leaves)
    torch.testing.assert_close(*both)
    torch.testing.assert_close(*(torch.autograd.grad(of.square().sum(), leaves) for of in both), atol=1e-3, rtol=1e-4)
    if len(shape) == 3:
        turned = linear(leaves[0].transpose(0, 1), *leaves[1:], backend=place.backend)
        torch.testing.assert_close(turned, both[1].transpose(0, 1))


def test_no_bias(place: Place) -> None:
    leaves = [random_tensor(of, torch.float32, seed).requires_grad_() for seed, of in enumerate(((9, 8), (7, 8)))]
    both = linear(*leaves, backend=place.backend), torch.nn.functional.linear(*leaves)
    assert torch.equal(*both)
    torch.testing.assert_close(*(torch.autograd.grad(of.square().sum(), leaves) for of in both))


@pytest.mark.parametrize("backend", [None, "torch"])
def test_derivatives_of_every_order(backend: str | None) -> None:
    leaves = [random_tensor(shape, torch.float64, seed).requires_grad_() for seed, shape in enumerate([(5, 4), (3, 4), (3,)])]

    def ours(*of: Tensor) -> Tensor:
        return linear(*of, backend=backend)

    def sums(rows: Tensor) -> Tensor:
        return column_sums(rows, backend="torch")

    for function, given_ in ((ours, leaves), (lambda *of: ours(*of).pow(3), leaves), (sums, leaves[:1])):
        assert torch.autograd.gradcheck(function, given_)
        assert torch.autograd.gradgradcheck(function, given_)


def test_second_derivatives_of_kernels(place: Place) -> None:
    """In float32, as the kernels are not for float64."""
    leaves = [random_tensor(shape, torch.float32, seed).requires_grad_() for seed, shape in enumerate([(30, 12), (7, 12), (7,)])]
    found = []
    for function in (lambda *of: linear(*of, backend=place.backend), reference):
        first = torch.autograd.grad(function(*leaves).tanh().sum(), leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(of.square().sum() for of in first), leaves))
    for of, expected in zip(*found, strict=True):
        torch.testing.assert_close(of, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("rows_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast(place: Place, dtype: torch.dtype, rows_dtype: torch.dtype) -> None:
    """Values, and dtypes of gradients, are PyTorch's; what it rounds to autocast's dtype of the bias' gradient is kept."""
    shapes = ((50, 12), rows_dtype), ((7, 12), torch.float32), ((7,), torch.float32)
    leaves = [random_tensor(*of, seed).requires_grad_() for seed, of in enumerate(shapes)]
    slopes, found = random_tensor((50, 7), dtype, 5), []
    for function in (lambda *of: linear(*of, backend=place.backend), torch.nn.functional.linear):
        with torch.autocast(place.device.type, dtype):
            output = function(*leaves)
        found.append((output, *torch.autograd.grad(output, leaves, slopes)))
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, atol=1e-2, rtol=torch.finfo(dtype).eps)
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][3].double(), slopes.double().sum(0), atol=1e-5, rtol=1e-6)


@pytest.fixture
def many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """What decides between PyTorch's layer and the operator sees enough rows, on a GPU, wherever they are."""
    monkeypatch.setattr(shared, "LEAST_ROWS", 0)
    monkeypatch.setattr(shared, "_is_on_gpu", lambda x: True)


@pytest.mark.usefixtures("many_rows")
def test_float64_stays_under_autocast(place: Place) -> None:
    leaves = [random_tensor(of, torch.float64, seed).requires_grad_() for seed, of in enumerate(((9, 8), (7, 8), (7,)))]
    with torch.autocast(place.device.type, torch.bfloat16):
        assert torch.equal(linear(*leaves), torch.nn.functional.linear(*leaves))


@ONE_ORDER
def test_repeats_are_the_same(place: Place) -> None:
    leaves = [random_tensor(of, torch.float32, seed).requires_grad_() for seed, of in enumerate([(3000, 8), (64, 8), (64,)])]

    def run() -> list[Tensor]:
        output = linear(*leaves, backend=place.backend)
        return [output, *torch.autograd.grad(output, leaves, output.detach())]

    check_repeats(run)


def test_parts_are_added_up_and_one_part_is_written_at_once(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    if place.backend != "triton":
        pytest.skip("PyTorch has one way")
    from jagged.ops._shared import column_sums as kernels

    grids: list[tuple[int, ...]] = []
    launch = kernels._launch
    monkeypatch.setattr(kernels, "_launch", lambda grid, *of, **constants: (grids.append(grid), launch(grid, *of, **constants)))
    for rows in (64, 1_000):
        given_ = random_tensor((rows, 70), torch.float32, 1)
        torch.testing.assert_close(column_sums(given_), given_.sum(0), atol=1e-4, rtol=1e-5)
    assert grids == [(2, 1), (2, kernels.split(1_000, 64, 2, kernels.PROGRAMS, place.device)[0]), (9, 1)]


def test_nothing_to_add_up_is_pytorchs(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    if place.backend != "triton":
        pytest.skip("PyTorch has one way")
    shapes: list[tuple[int, ...]] = []
    theirs = shared.column_sums

    def noted(x: Rows, o: Summing) -> Sums:
        shapes.append(tuple(x.rows.shape))
        return theirs(x, o)

    monkeypatch.setattr(shared, "column_sums", noted)
    for shape in ((0, 5), (5, 0), (1, 1)):
        assert torch.equal(column_sums(torch.zeros(shape, device=place.device)), torch.zeros(shape[1], device=place.device))
    assert shapes == [(0, 5), (5, 0)]


class Subclass(Tensor):
    """As tensors have it that are laid out over processes, or quantised."""


CASES = (
    "no bias", "x", "weight", "bias", "no gradient", "float64", "no GPU", "few rows", "forward mode", "transform", "mode",
    "class",
)  # fmt: skip


@pytest.mark.skipif(PLACE.name == "interpret", reason="without a backend the CPU is PyTorch's")
@pytest.mark.parametrize("case", ["a GPU's", *CASES])
def test_where_no_kernel_is_it_is_pytorchs_own(place: Place, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So it has forward-mode derivatives, keeps what PyTorch's keeps, and is no operator of ours in a program."""
    if case != "few rows":
        monkeypatch.setattr(shared, "LEAST_ROWS", 9)
    if case != "no GPU":
        # One condition by one, on a CPU too.
        monkeypatch.setattr(shared, "_is_on_gpu", lambda x: True)
    dtype = torch.float64 if case == "float64" else torch.float32
    device = torch.device("cpu") if case == "no GPU" else place.device
    named = {
        name: random_tensor(of, dtype, seed).to(device).requires_grad_(case != name)
        for seed, (name, of) in enumerate({"x": (9, 8), "weight": (7, 8), "bias": (7,)}.items())
    }
    if case == "class":
        named["weight"] = named["weight"].detach().as_subclass(Subclass).requires_grad_()  # type: ignore[assignment]
    x, weight, bias = named["x"], named["weight"], None if case == "no bias" else named["bias"]
    counter = FlopCounterMode(display=False)
    with torch.set_grad_enabled(case != "no gradient"), counter if case == "mode" else nullcontext():
        if case in ("forward mode", "transform"):
            both = [
                torch.func.jvp(lambda of, way=way: way(of, weight, bias), (x,), (x,))
                if case == "forward mode"
                else torch.func.vjp(lambda of, way=way: way(of, weight, bias), x)[:1]
                for way in (linear, torch.nn.functional.linear)
            ]
        else:
            both = [(way(x, weight, bias),) for way in (linear, torch.nn.functional.linear)]
    assert all(torch.equal(*pair) for pair in zip(*both, strict=True))
    found = both[0][0].grad_fn
    assert (found is not None and "linear" in found.name()) == (case == "a GPU's")
    if case == "mode":
        assert counter.get_total_flops() == 2 * 2 * 9 * 8 * 7


def test_a_tracer_need_not_know_how_many_rows_there_are() -> None:
    """On a GPU, of which tensors are made up."""
    shapes = ShapeEnv()
    with FakeTensorMode(shape_env=shapes) as mode:
        x, weight, bias = (
            FakeTensor(mode, torch.empty(size, device="meta"), torch.device("cuda:0")).requires_grad_()
            for size in ((shapes.create_unbacked_symint(), 8), (7, 8), (7,))
        )
        assert x.is_cuda
        assert torch._C._len_torch_dispatch_stack()
        assert not shared._has_slow_sum(x, weight, bias)


@pytest.mark.gpu
def test_on_a_gpu_it_is_the_operator(place: Place) -> None:
    leaves = [
        random_tensor(of, torch.float32, seed).requires_grad_() for seed, of in enumerate(((shared.LEAST_ROWS, 8), (7, 8), (7,)))
    ]
    assert "linear" in linear(*leaves).grad_fn.name()  # type: ignore[union-attr]


@pytest.mark.skipif(PLACE.name == "interpret", reason="kernels are interpreted outside of PyTorch")
@pytest.mark.usefixtures("many_rows")
@pytest.mark.parametrize("backend", [None, PLACE.backend])
def test_compiled(place: Place, backend: str | None) -> None:
    """One graph for any number of rows."""
    torch.compiler.reset()
    compiled = torch.compile(lambda *of: linear(*of, backend=backend), fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (5, 9, 30):
        leaves = [random_tensor(of, torch.float32, seed).requires_grad_() for seed, of in enumerate(((rows, 8), (7, 8), (7,)))]
        both = compiled(*leaves), torch.nn.functional.linear(*leaves)
        torch.testing.assert_close(*both)
        torch.testing.assert_close(*(torch.autograd.grad(of.square().sum(), leaves) for of in both), atol=1e-4, rtol=1e-5)


@pytest.mark.skipif(PLACE.name == "interpret", reason="without a backend the CPU is PyTorch's")
@pytest.mark.usefixtures("many_rows")
def test_an_exported_program_has_pytorchs_layer(place: Place) -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = torch.nn.Linear(8, 7, device=place.device)

        def forward(self, x: Tensor) -> Tensor:
            return linear(x, self.line.weight, self.line.bias)

    x = random_tensor((9, 8), torch.float32, 1)
    program = torch.export.export(Layer(), (x,), dynamic_shapes=({0: torch.export.Dim("rows")},))
    called = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert "aten.linear.default" in called
    assert not [name for name in called if "jagged" in name]


@pytest.mark.skipif(PLACE.name == "interpret", reason="kernels are interpreted outside of PyTorch")
def test_opcheck(place: Place) -> None:
    x, weight, bias = (random_tensor(of, torch.float32, seed) for seed, of in enumerate(((5, 8), (7, 8), (7,))))
    for name, arguments in (
        ("linear", (x, weight, bias)),
        ("linear", (x, weight, None)),
        ("column_sums", (x, torch.bfloat16)),
        ("column_sums", (x.T, torch.float32)),
    ):
        torch.library.opcheck(getattr(torch.ops.jagged, name).default, (*arguments, place.backend))


@pytest.mark.gpu
def test_a_graph_is_captured(place: Place) -> None:
    leaves = [
        random_tensor(of, torch.bfloat16, seed).requires_grad_()
        for seed, of in enumerate([(shared.LEAST_ROWS, 64), (96, 64), (96,)])
    ]

    def run() -> list[Tensor]:
        output = linear(*leaves)
        return [output.detach(), *torch.autograd.grad(output, leaves, output.detach())]

    graph, found = captured(run)
    with torch.no_grad():
        for of in leaves:
            of.mul_(0.5)
    graph.replay()
    for ours, expected in zip(found, run(), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2**26 + 5, 64), (3, 2**30), (2**31 + 5, 1)])
def test_addresses_beyond_31_bits(place: Place, shape: tuple[int, int]) -> None:
    """Ones, and threes in the second half, of which every sum is known."""
    rows, half = torch.ones(shape, dtype=torch.bfloat16, device=place.device), shape[0] // 2
    rows[half:] = 3
    for turned in (False, True) if shape[1] == 64 else (False,):
        given_ = rows.T.contiguous().T if turned else rows
        found = column_sums(given_, torch.float32).double()
        torch.testing.assert_close(found, torch.full_like(found, 3 * shape[0] - 2 * half), rtol=1e-6, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [1, 2_000, 5_001])
def test_many_columns(place: Place, width: int) -> None:
    rows = random_tensor((3_000, width), torch.bfloat16, 1)
    torch.testing.assert_close(column_sums(rows, torch.float32).double(), rows.double().sum(0), atol=1e-3, rtol=1e-5)


BF16, F64 = torch.bfloat16, torch.float64
REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: linear([1.0], torch.ones(4, 8)), TypeError, "x: expected a tensor [*, in], got list"),  # type: ignore[arg-type]
    (
        lambda: linear(torch.ones(2, 8, dtype=torch.int64), torch.ones(4, 8)),
        TypeError,
        "x: expected dtype float32, bfloat16, float16, float64, got int64; convert it with .to(...)",
    ),
    (lambda: linear(torch.ones(2, 8), torch.ones(8)), ValueError, "weight: expected shape [out, in], got [8]"),
    (
        lambda: linear(torch.ones(2, 8), torch.ones(4, 7)),
        ValueError,
        "weight: expected shape [out, 8], as x [2, 8] has columns, got [4, 7]",
    ),
    (
        lambda: linear(torch.ones(2, 8), torch.ones(4, 8), torch.ones(8)),
        ValueError,
        "bias: expected shape [4], as weight [4, 8] has rows, got [8]",
    ),
    (
        lambda: linear(torch.ones(2, 8), torch.ones(4, 8, dtype=BF16)),
        TypeError,
        "weight: expected the dtype of x, float32, got bfloat16; convert one of them",
    ),
    (
        lambda: linear(torch.ones(2, 8), torch.ones(4, 8), torch.ones(4, dtype=F64)),
        TypeError,
        "bias: expected the dtype of x, float32, got float64; convert one of them",
    ),
    (
        lambda: linear(torch.ones(2, 8), torch.ones(4, 8, device="meta")),
        ValueError,
        "weight: expected the device of x, cpu, got meta; move one of them",
    ),
    (
        lambda: linear(torch.ones(2, 8), torch.ones(4, 8), backend="cuda"),
        ValueError,
        "backend: got 'cuda', expected 'torch', 'triton' or None to choose by device",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), REFUSED, ids=[of[2] for of in REFUSED])
def test_what_is_refused(call: Callable[[], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as refused:
        call()
    assert str(refused.value) == message
