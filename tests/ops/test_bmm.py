"""Products of a jagged tensor with a dense or a second jagged one, against a loop over samples."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from jagged.ops import (
    array_jagged_bmm_jagged_out,
    jagged_dense_bmm,
    jagged_jagged_bmm,
    jagged_jagged_bmm_jagged_out,
    trust_values,
)
from jagged.ops.bmm import configurations
from tests.graphs import captured
from tests.oracle import check_three_way
from tests.places import PLACE, Place
from tests.reference import bmm as reference
from tests.strategies import Jagged, float_dtypes, jagged_batches, jagged_of, random_tensor, seeds

ON_GPU = pytest.mark.gpu
# Wide and narrow, either way round; widths of one tile, of a tile and a bit, and odd ones.
WIDTHS = st.tuples(*[st.sampled_from([1, 3, 4, 8, 9, 20, 64, 130, 300])] * 2)
WANTED = st.sampled_from([(True, True), (True, False), (False, True), (False, False)])


@pytest.fixture
def _short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split samples of a few rows too."""
    monkeypatch.setattr(configurations, "MIN_CHUNK", 16)
    monkeypatch.setattr(configurations, "WORKSPACE_SHARE", 1e9)


def bmm_inputs(batch: Jagged, d: int, t: int, dtype: torch.dtype, seed: int, strided: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return values `[S, D]`, others `[S, T]` and dense `[B, D, T]`."""
    shapes = (batch.total, d), (batch.total, t), (batch.batch_size, d, t)
    first, second, dense = (random_tensor(shape, dtype, seed + k, strided=strided) for k, shape in enumerate(shapes))
    return first, second, dense


@given(jagged_batches(), WIDTHS, float_dtypes(), seeds(), st.booleans(), WANTED)
def test_jagged_dense_bmm(
    place: Place, batch: Jagged, widths: tuple[int, int], dtype: torch.dtype, seed: int, strided: bool, wanted: tuple[bool, bool]
) -> None:
    values, _, dense = bmm_inputs(batch, *widths, dtype, seed, strided)
    check_three_way(
        lambda values, dense: jagged_dense_bmm(values, batch.offsets, dense, backend=place.backend),
        lambda values, dense: reference.dense_bmm(values, batch.lengths, dense),
        [values, dense],
        requires_grad=wanted,
    )


@given(jagged_batches(), WIDTHS, float_dtypes(), seeds(), st.booleans(), st.tuples(WANTED, st.booleans()))
def test_jagged_dense_bmm_with_a_bias(
    place: Place,
    batch: Jagged,
    widths: tuple[int, int],
    dtype: torch.dtype,
    seed: int,
    strided: bool,
    wanted: tuple[tuple[bool, bool], bool],
) -> None:
    # The yardstick is a largest error, which over few elements may be nothing by luck: every batch gets a sample of some rows.
    batch = jagged_of((*batch.lengths, 9), batch.offsets.dtype)
    values, _, dense = bmm_inputs(batch, *widths, dtype, seed, strided)
    bias = random_tensor((batch.batch_size, widths[1]), dtype, seed + 3, strided=strided)
    check_three_way(
        lambda values, dense, bias: jagged_dense_bmm(values, batch.offsets, dense, bias, backend=place.backend),
        lambda values, dense, bias: reference.dense_bmm(values, batch.lengths, dense, bias),
        [values, dense, bias],
        requires_grad=[*wanted[0], wanted[1]],
    )


@pytest.mark.parametrize("width", [2, 20, 300])
@pytest.mark.parametrize("columns", [1, 3, 40])
@pytest.mark.parametrize(("dtype", "first"), [(torch.bfloat16, 2.0**8), (torch.float16, 2.0**11)])
def test_a_bias_is_added_before_the_rounding(place: Place, dtype: torch.dtype, first: float, columns: int, width: int) -> None:
    """The product alone, one more than a power of two, would be rounded down, and so would its sum with 1."""
    values = torch.zeros(5, width, dtype=dtype, device=place.device)
    values[:, 0], values[:, -1] = first, 1.0
    ones = torch.ones(2, width, columns, dtype=dtype, device=place.device)
    offsets = torch.tensor([0, 2, 5], device=place.device)
    out = jagged_dense_bmm(values, offsets, ones, ones[:, 0], backend=place.backend)
    assert torch.equal(out, torch.full_like(out, first + 2))


def test_one_bias_for_all_samples(place: Place) -> None:
    """Expanded from one row, whose gradient is the sum over all rows."""
    values, offsets = torch.ones(3, 2, device=place.device), torch.tensor([0, 1, 3], device=place.device)
    dense, bias = torch.ones(2, 2, 2, device=place.device), torch.tensor([10.0, 20.0], device=place.device, requires_grad=True)
    out = jagged_dense_bmm(values, offsets, dense, bias.expand(2, 2), backend=place.backend)
    assert out.tolist() == [[12.0, 22.0]] * 3
    (grad,) = torch.autograd.grad(out.sum(), bias)
    assert grad.tolist() == [3.0, 3.0]


@pytest.mark.usefixtures("_short_chunks")
@given(jagged_batches(), WIDTHS, float_dtypes(), seeds(), st.booleans(), WANTED)
def test_jagged_jagged_bmm(
    place: Place, batch: Jagged, widths: tuple[int, int], dtype: torch.dtype, seed: int, strided: bool, wanted: tuple[bool, bool]
) -> None:
    a, b, _ = bmm_inputs(batch, *widths, dtype, seed, strided)
    check_three_way(
        lambda a, b: jagged_jagged_bmm(a, b, batch.offsets, backend=place.backend),
        lambda a, b: reference.jagged_bmm(a, b, batch.lengths),
        [a, b],
        requires_grad=wanted,
    )


@given(st.lists(st.integers(0, 50), max_size=12), st.integers(1, 20))
def test_chunks_cover_every_row_once_in_slots_of_their_own(lengths: list[int], chunk: int) -> None:
    """The arithmetic of `load_chunk` and of the slots, which their docstrings prove."""
    offsets = [sum(lengths[:b]) for b in range(len(lengths) + 1)]
    total = offsets[-1]
    later = total // chunk
    chunks, slots = set(), set()
    for number in range(later):
        sample = max(b for b in range(len(lengths)) if offsets[b] <= (number + 1) * chunk - 1)
        first = offsets[sample] + (number - offsets[sample] // chunk + 1) * chunk
        if offsets[sample] < first < offsets[sample + 1]:
            chunks.add((sample, first))
            slots.add(number)
    for sample, length in enumerate(lengths):
        if length > chunk:
            slots.add(later + offsets[sample] // chunk)
    expected = {(b, first) for b in range(len(lengths)) for first in range(offsets[b] + chunk, offsets[b + 1], chunk)}
    assert chunks == expected
    assert len(slots) == len(expected) + sum(length > chunk for length in lengths)
    assert max(slots, default=0) < max(1, 2 * later)


@pytest.mark.parametrize(("d", "t"), [(1024, 4), (64, 64), (512, 512), (1, 1)])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("total", [0, 100, 51_500, 10**7])
def test_partial_sums_are_small(d: int, t: int, itemsize: int, total: int) -> None:
    chunk = configurations.chunk_of(d, t, total, 1024, itemsize)
    workspace = 2 * (total // chunk) * d * t * 4 if total > chunk else 0
    share = 0.01 * (total * (d + t) + 1024 * d * t) * itemsize
    assert workspace <= share
    # No longer than needed: chunks are what a long sample is divided into.
    assert chunk == configurations.MIN_CHUNK or 2 * total * d * t * 4 / (chunk - 64) > share


@pytest.mark.skipif(PLACE.name == "interpret", reason="minutes under the interpreter")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_long_sample_among_short_ones(place: Place, dtype: torch.dtype) -> None:
    batch = jagged_of((3, 0, 7) * 200 + (100_000,) + (5, 1, 0) * 200, torch.int32)
    a, b, dense = bmm_inputs(batch, 24, 4, dtype, 0, strided=False)
    check_three_way(
        lambda a, b: jagged_jagged_bmm(a, b, batch.offsets, backend=place.backend),
        lambda a, b: reference.jagged_bmm(a, b, batch.lengths),
        [a, b],
    )
    check_three_way(
        lambda a, dense: jagged_dense_bmm(a, batch.offsets, dense, backend=place.backend),
        lambda a, dense: reference.dense_bmm(a, batch.lengths, dense),
        [a, dense],
    )


@pytest.mark.usefixtures("_short_chunks")
def test_neighbours_that_are_no_numbers_do_not_spread(place: Place) -> None:
    """Zero times NaN is NaN: what lies past a sample's end must enter no product of its own."""
    batch = jagged_of((21, 5, 40))
    a, b, dense = bmm_inputs(batch, 20, 4, torch.float32, 0, strided=False)
    bias = random_tensor((3, 4), torch.float32, 3)
    expected = jagged_jagged_bmm(a, b, batch.offsets, backend=place.backend), jagged_dense_bmm(a, batch.offsets, dense, bias)
    for side in (a, b, dense, bias):
        changed = side.clone()
        (changed[21:26] if side is a or side is b else changed[1]).fill_(float("nan"))
        inputs = [changed if tensor is side else tensor for tensor in (a, b, dense, bias)]
        of_jagged = jagged_jagged_bmm(*inputs[:2], batch.offsets, backend=place.backend)
        of_dense = jagged_dense_bmm(inputs[0], batch.offsets, *inputs[2:], backend=place.backend)
        torch.testing.assert_close(of_jagged[[0, 2]], expected[0][[0, 2]])
        for rows in (slice(0, 21), slice(26, 66)):
            torch.testing.assert_close(of_dense[rows], expected[1][rows])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.usefixtures("_short_chunks")
@pytest.mark.parametrize("widths", [(20, 4), (4, 20), (20, 20)])
def test_wrong_offsets_reach_no_foreign_memory(place: Place, widths: tuple[int, int]) -> None:
    """Offsets that decrease, begin before 0 or run past the end give some sums, none of them of a neighbour's rows."""
    d, t = widths
    fences = [torch.full((120, width), float("nan"), device=place.device) for width in widths]
    a, b = (fence[40:80].fill_(1.0) for fence in fences)
    for wrong in ([0, 39, 5, 130], [-70, 4, 40], [0, 1000, 2000], [500, 600, 700], [-(2**31), 2**31 - 1, -5]):
        for dtype in (torch.int32, torch.int64):
            offsets = torch.tensor(wrong, dtype=dtype, device=place.device)
            sums = jagged_jagged_bmm(a, b, offsets, backend=place.backend)
            # Chunks that wrong offsets make overlap may leave a slot unwritten, which holds the NaN of fresh memory.
            assert sums.shape == (len(wrong) - 1, d, t)
            dense_fence = torch.full((len(wrong) + 1, d, t), float("nan"), device=place.device)
            dense = dense_fence[1:-1].fill_(1.0)
            bias_fence = torch.full((len(wrong) + 1, t), float("nan"), device=place.device)
            for bias in (None, bias_fence[1:-1].fill_(2.0)):
                rows = jagged_dense_bmm(a, offsets, dense, bias, backend=place.backend)
                # Rows that no sample claims stay unwritten.
                assert set(rows[~rows.isnan()].tolist()) <= {0.0, float(d if bias is None else d + 2)}
    for fence in fences:
        assert bool(fence[:40].isnan().all())
        assert bool(fence[80:].isnan().all())


def test_strided_offsets(place: Place) -> None:
    offsets = jagged_of((2, 0, 3)).offsets
    strided = torch.stack([offsets, offsets + 100], 1)[:, 0]
    values, other, dense = (random_tensor(shape, torch.float32, 0) for shape in ((5, 6), (5, 4), (3, 6, 4)))
    for function in (
        lambda o: jagged_dense_bmm(values, o, dense, backend=place.backend),
        lambda o: jagged_jagged_bmm(values, other, o, backend=place.backend),
    ):
        assert torch.equal(function(strided), function(offsets))


def test_sizes_of_zero(place: Place) -> None:
    offsets = torch.tensor([0, 2, 3], device=place.device)
    for d, t in ((0, 3), (3, 0), (0, 0)):
        a, b = torch.ones(3, d, device=place.device), torch.ones(3, t, device=place.device)
        assert jagged_jagged_bmm(a, b, offsets, backend=place.backend).shape == (2, d, t)
        dense, bias = torch.ones(2, d, t, device=place.device), torch.full((2, t), 5.0, device=place.device)
        assert torch.equal(jagged_dense_bmm(a, offsets, dense, backend=place.backend), torch.zeros(3, t, device=place.device))
        assert torch.equal(jagged_dense_bmm(a, offsets, dense, bias, backend=place.backend), bias[[0, 0, 1]])


def test_messages_name_argument_and_cure(place: Place) -> None:
    a, offsets = torch.zeros(3, 2, device=place.device), torch.tensor([0, 3], device=place.device)
    dense = torch.zeros(1, 2, 4, device=place.device)
    cases: list[tuple[Callable[[], Tensor], type[Exception], str]] = [
        (lambda: jagged_dense_bmm(a[0], offsets, dense), ValueError, r"values: expected shape \[S, D\], got \[2\]"),
        (lambda: jagged_dense_bmm(a.int(), offsets, dense), TypeError, r"values: expected dtype float32, .* got int32"),
        (lambda: jagged_dense_bmm(a, offsets, dense[0]), ValueError, r"dense: expected shape \[B, D, T\], got \[2, 4\]"),
        (lambda: jagged_dense_bmm(a, offsets, dense[:0]), ValueError, r"dense: expected shape \[1, 2, T\].*got \[0, 2, 4\]"),
        (lambda: jagged_dense_bmm(a, offsets, dense[:, :1]), ValueError, r"dense: expected shape \[1, 2, T\].*got \[1, 1, 4\]"),
        (lambda: jagged_dense_bmm(a, offsets, dense.half()), TypeError, r"dense: expected the dtype of values, float32, got flo"),
        (
            lambda: jagged_dense_bmm(a, offsets, dense, dense[0, :, :1]),
            ValueError,
            r"^bias: expected shape \[1, 4\], a row for each sample, as wide as dense \[1, 2, 4\], got \[2, 1\]; "
            r"expand what all samples share$",
        ),
        (lambda: jagged_dense_bmm(a, offsets, dense, dense[0, 0]), ValueError, r"^bias: expected shape \[B, T\], got \[4\]$"),
        (
            lambda: jagged_dense_bmm(a, offsets, dense, dense[0, :1].half()),
            TypeError,
            "^bias: expected the dtype of values, float32, got float16; convert one of them$",
        ),
        (lambda: jagged_dense_bmm(a, offsets.float(), dense), TypeError, r"offsets: expected dtype int32, int64, got float32"),
        (lambda: jagged_dense_bmm(a, offsets, dense, backend="cuda"), ValueError, r"backend: got 'cuda'"),
        (lambda: jagged_dense_bmm(a.double(), offsets, dense.double(), backend="triton"), TypeError, r"got float64 tensors"),
        (lambda: jagged_jagged_bmm(a, a[:2], offsets), ValueError, r"b: expected shape \[3, T\].*got \[2, 2\]"),
        (lambda: jagged_jagged_bmm(a, a.bfloat16(), offsets), TypeError, r"b: expected the dtype of a, float32, got bfloat16"),
        (lambda: jagged_jagged_bmm(a, a[0], offsets), ValueError, r"b: expected shape \[S, T\], got \[2\]"),
        (lambda: jagged_jagged_bmm(a, a, offsets[:0]), ValueError, r"offsets: expected shape \[B \+ 1\], got \[0\]"),
    ]
    for call, error, message in cases:
        with pytest.raises(error, match=message):
            call()


def test_values_of_offsets_are_checked_on_demand(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    a, offsets = torch.zeros(3, 2, device=place.device), torch.tensor([0, 2, 1, 3], device=place.device)
    dense = torch.zeros(3, 2, 2, device=place.device)
    with trust_values():
        jagged_jagged_bmm(a, a, offsets, backend=place.backend)
    monkeypatch.setenv("JAGGED_VALIDATE", "1")
    for call in (lambda: jagged_jagged_bmm(a, a, offsets), lambda: jagged_dense_bmm(a, offsets, dense)):
        with pytest.raises(ValueError, match=r"offsets\[2\]: expected at least 2, the offset before it, got 1"):
            call()


def test_opcheck(place: Place) -> None:
    batch = jagged_of((2, 0, 3))
    a, b, dense = bmm_inputs(batch, 4, 3, torch.float32, 0, strided=False)
    for bias in (None, dense[:, 0]):
        torch.library.opcheck(torch.ops.jagged.jagged_dense_bmm.default, (a, batch.offsets, dense, bias, place.backend))
    torch.library.opcheck(torch.ops.jagged.jagged_jagged_bmm.default, (a, b, batch.offsets, place.backend))


@pytest.mark.skipif(PLACE.name != "cpu", reason="float64 finite differences are the CPU's work")
def test_gradcheck_to_second_order(place: Place) -> None:
    batch = jagged_of((2, 0, 3))
    a, b, dense = (x.requires_grad_() for x in bmm_inputs(batch, 3, 2, torch.float64, 0, strided=False))
    bias = random_tensor((3, 2), torch.float64, 3).requires_grad_()
    for function, leaves in (
        (lambda a, dense: jagged_dense_bmm(a, batch.offsets, dense), (a, dense)),
        (lambda a, dense, bias: jagged_dense_bmm(a, batch.offsets, dense, bias), (a, dense, bias)),
        (lambda bias: jagged_dense_bmm(a.detach(), batch.offsets, dense.detach(), bias), (bias,)),
        (lambda a, b: jagged_jagged_bmm(a, b, batch.offsets), (a, b)),
    ):
        assert torch.autograd.gradcheck(function, leaves)
        assert torch.autograd.gradgradcheck(function, leaves)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize(
    "name", ["jagged_dense_bmm", "jagged_jagged_bmm", "jagged_jagged_bmm_jagged_out", "array_jagged_bmm_jagged_out"]
)
def test_functional_transforms(place: Place, name: str) -> None:
    """Gradients, those of each of several calls, and none in forward mode, for the products over pairs too."""
    batch = jagged_of((2, 0, 3))
    offsets, backend = batch.offsets, place.backend
    a, b, dense = bmm_inputs(batch, 4, 3, torch.float32, 0, strided=False)
    functions: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
        "jagged_dense_bmm": (lambda x, y, z: jagged_dense_bmm(x, offsets, y, z, backend=backend), (a, dense, dense[:, 0])),
        "jagged_jagged_bmm": (lambda x, y: jagged_jagged_bmm(x, y, offsets, backend=backend), (a, b)),
        "jagged_jagged_bmm_jagged_out": (
            lambda x, y: jagged_jagged_bmm_jagged_out(x, y, offsets, total=13, backend=backend),
            (a, 2 * a),
        ),
        "array_jagged_bmm_jagged_out": (
            lambda x, y: array_jagged_bmm_jagged_out(x, y, offsets, backend=backend),
            (random_tensor((13,), torch.float32, 3), a),
        ),
    }
    function, inputs = functions[name]

    def by_autograd(*inputs: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        return torch.autograd.grad(function(*leaves).square().sum(), leaves)

    gradient = torch.func.grad(lambda *x: function(*x).square().sum(), argnums=tuple(range(len(inputs))))
    several = [torch.stack([x, 2 * x]) for x in inputs]
    one_by_one = [by_autograd(*(x[k] for x in several)) for k in range(2)]
    torch.testing.assert_close(torch.vmap(gradient)(*several), tuple(map(torch.stack, zip(*one_by_one, strict=True))))
    torch.testing.assert_close(gradient(*inputs), by_autograd(*inputs))
    refused = f"^{name} has no forward-mode derivative; take one by backward, as torch.func.vjp does$"
    with pytest.raises(RuntimeError, match=refused):
        torch.func.jvp(function, inputs, inputs)


def under_autocast(place: Place, leaves: list[Tensor], offsets: Tensor) -> list[Tensor]:
    """Both products in bfloat16, of rows of 16 bits too, as a linear layer makes them."""
    a, b, dense = leaves
    with torch.autocast(place.device.type, dtype=torch.bfloat16):
        return [
            jagged_dense_bmm(a, offsets, dense, backend=place.backend),
            jagged_dense_bmm(a.bfloat16(), offsets, dense, dense[:, 0], backend=place.backend),
            jagged_jagged_bmm(a, b.bfloat16(), offsets, backend=place.backend),
            jagged_jagged_bmm(a, b, offsets, backend=place.backend),
        ]


@pytest.mark.parametrize("is_backward_inside", [False, True])
def test_autocast_casts_as_bmm_does(place: Place, is_backward_inside: bool) -> None:
    """The dtype of results is autocast's, that of gradients the inputs' own, also where backward runs outside of autocast."""
    batch = jagged_of((6, 0, 20))
    leaves = [x.requires_grad_() for x in bmm_inputs(batch, 8, 3, torch.float32, 0, strided=False)]
    found = under_autocast(place, leaves, batch.offsets)
    low = [x.detach().bfloat16().requires_grad_() for x in leaves]
    expected = [jagged_dense_bmm(low[0], batch.offsets, low[2], b, backend=place.backend) for b in (None, low[2][:, 0])]
    expected += [jagged_jagged_bmm(*low[:2], batch.offsets, backend=place.backend) for _ in range(2)]
    for got, want in zip(found, expected, strict=True):
        assert torch.equal(got, want)
    for got, want in zip(found, expected, strict=True):
        cotangent = torch.ones_like(want)
        with torch.autocast(place.device.type, dtype=torch.bfloat16, enabled=is_backward_inside):
            grads = torch.autograd.grad(got, leaves, cotangent, allow_unused=True)
        for mine, theirs in zip(grads, torch.autograd.grad(want, low, cotangent, allow_unused=True), strict=True):
            assert (mine is None) == (theirs is None)
            assert mine is None or theirs is None or torch.equal(mine, theirs.float())


@pytest.mark.skipif(PLACE.name != "cpu", reason="float64 is the CPU's work")
def test_autocast_leaves_float64(place: Place) -> None:
    batch = jagged_of((6, 0, 20))
    a, b, dense = bmm_inputs(batch, 8, 3, torch.float64, 0, strided=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert jagged_dense_bmm(a, batch.offsets, dense).dtype == torch.float64
        assert jagged_jagged_bmm(a, b, batch.offsets).dtype == torch.float64
        with pytest.raises(TypeError, match=r"^dense: expected the dtype of values, float64, got float32; convert one of them$"):
            jagged_dense_bmm(a, batch.offsets, dense.float())
        with pytest.raises(TypeError, match=r"^b: expected the dtype of a, float32, got float64; convert one of them$"):
            jagged_jagged_bmm(a.float(), b, batch.offsets)


@pytest.mark.skipif(PLACE.name == "interpret", reason="interpreted kernels are not compiled")
def test_autocast_inside_a_compiled_region(place: Place) -> None:
    batch = jagged_of((6, 0, 20))
    leaves = [x.requires_grad_() for x in bmm_inputs(batch, 8, 3, torch.float32, 0, strided=False)]
    torch._dynamo.reset()
    compiled = torch.compile(under_autocast, fullgraph=True, backend="aot_eager")(place, leaves, batch.offsets)
    eager = under_autocast(place, leaves, batch.offsets)
    for got, want in zip(compiled, eager, strict=True):
        assert torch.equal(got, want)
    for mine, theirs in zip(
        *(torch.autograd.grad(sum(x.float().square().sum() for x in found), leaves) for found in (compiled, eager)), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-1)


@pytest.mark.skipif(PLACE.name == "interpret", reason="interpreted kernels are not compiled")
def test_one_graph_for_all_jagged_shapes(place: Place) -> None:
    graphs = 0

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        nonlocal graphs
        graphs += 1
        return graph.forward

    def function(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
        dense = jagged_jagged_bmm(a, b, offsets)
        return jagged_dense_bmm(a, offsets, dense, dense[:, 0]) + jagged_dense_bmm(a, offsets, dense)

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=count)
    for lengths in ((2, 4, 3), (5, 0, 1, 9), (0, 7), (30, 2, 2, 2, 2), (900, 700, 3)):
        batch = jagged_of(lengths)
        a, b, _ = bmm_inputs(batch, 13, 5, torch.float32, 0, strided=False)
        a.requires_grad_()
        got, expected = compiled(a, b, batch.offsets), function(a, b, batch.offsets)
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
        for left, right in zip(*(torch.autograd.grad(out.square().sum(), a) for out in (got, expected)), strict=True):
            torch.testing.assert_close(left, right, rtol=0, atol=0)
    assert graphs == 1


@ON_GPU
def test_kernels_are_compiled_once_for_all_jagged_shapes(place: Place) -> None:
    from jagged.ops.bmm import kernels

    compiled = []
    for lengths in ((2, 4, 3), (16,), (1,), (900, 700, 3, 16), (0, 0)):
        batch = jagged_of(lengths)
        a, b, dense = bmm_inputs(batch, 64, 4, torch.bfloat16, 0, strided=False)
        jagged_jagged_bmm(a, b, batch.offsets)
        jagged_dense_bmm(a, batch.offsets, dense)
        caches = [kernel.device_caches[0][0] for kernel in (kernels.jagged_dense_bmm_kernel, kernels.jagged_jagged_bmm_kernel)]
        compiled.append([len(cache) for cache in caches])
    assert compiled[0] == compiled[-1]


@ON_GPU
@pytest.mark.usefixtures("_short_chunks")
def test_no_synchronisation_and_graph_capture(place: Place) -> None:
    batch = jagged_of((10, 0, 50))
    a, b, dense = bmm_inputs(batch, 40, 4, torch.float32, 0, strided=False)
    a.requires_grad_()

    def step() -> Tensor:
        out = jagged_dense_bmm(a, batch.offsets, jagged_jagged_bmm(a, b, batch.offsets) + dense, a[:3, :4])
        (grad,) = torch.autograd.grad(out.square().sum(), a)
        return grad

    graph, results = captured(step)
    for lengths in ((10, 0, 50), (5, 50, 5), (0, 0, 60)):
        batch.offsets.copy_(jagged_of(lengths).offsets)
        graph.replay()
        assert torch.equal(results, step())


@ON_GPU
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_addresses_past_2_to_the_31(place: Place, dtype: torch.dtype) -> None:
    """The rows past 2^31 elements, against the same rows by themselves."""
    rows, width = 2**21 + 35, 1024
    values = torch.zeros(rows, width, dtype=dtype, device=place.device)
    values[-40:] = random_tensor((40, width), dtype, 0)
    other = random_tensor((rows, 4), dtype, 1)
    dense = random_tensor((3, width, 4), dtype, 2)
    offsets = torch.tensor([0, 5, rows - 30, rows], device=place.device)
    last = torch.tensor([0, 30], device=place.device)
    assert torch.equal(jagged_dense_bmm(values, offsets, dense)[-30:], jagged_dense_bmm(values[-30:], last, dense[2:]))
    sums = jagged_jagged_bmm(values, other, offsets)
    assert torch.equal(sums[2], jagged_jagged_bmm(values[-30:], other[-30:], last)[0])
    torch.testing.assert_close(sums[1], values[-40:-30].T @ other[-40:-30])
    wide = jagged_dense_bmm(other, offsets, dense.transpose(1, 2))
    assert torch.equal(wide[-30:], jagged_dense_bmm(other[-30:], last, dense[2:].transpose(1, 2)))
