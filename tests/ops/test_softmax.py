"""Softmax over samples' rows, and over rows or columns of samples' blocks, against loops over samples."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jagged import ops
from tests.graphs import captured
from tests.oracle import check_three_way
from tests.places import PLACE, Place
from tests.reference import softmax as reference
from tests.strategies import Jagged, float_dtypes, jagged_batches, jagged_of, random_tensor, seeds

ON_GPU = pytest.mark.gpu
DIMS = st.sampled_from([-1, -2])
# Numbers between what kernels allocate and the rest.
FENCE = 4096


@pytest.fixture(params=["one launch", "long samples split"])
def division(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small batches as they are, and with samples split in chunks of 64 elements."""
    if request.param != "one launch":
        if PLACE.name == "cpu":
            pytest.skip("the kernels' own way")
        from jagged.ops.softmax import kernels

        monkeypatch.setattr(kernels, "SERIAL_ELEMENTS", 0)
        monkeypatch.setattr(kernels, "CHUNK_ELEMENTS", 64)


@pytest.fixture(params=["found in every program", "written down first"])
def starts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where blocks begin, as in small batches and as in large ones."""
    if request.param != "found in every program":
        if PLACE.name == "cpu":
            pytest.skip("the kernels' own way")
        from jagged.ops._shared import kernels

        monkeypatch.setattr(kernels, "SCANNED_SAMPLES", 0)


def rows_of(lengths: tuple[int, ...], like: Jagged) -> Jagged:
    return jagged_of(lengths, like.offsets.dtype)


@given(jagged_batches(), st.sampled_from([1, 3, 4, 20, 64]), float_dtypes(), seeds(), st.booleans())
def test_jagged_softmax(
    place: Place, division: None, batch: Jagged, features: int, dtype: torch.dtype, seed: int, strided: bool
) -> None:
    values = random_tensor((batch.total, features), dtype, seed, strided=strided)
    check_three_way(
        lambda v: ops.jagged_softmax(v, batch.offsets, backend=place.backend),
        lambda v: reference.softmax(v, batch.lengths),
        [values],
    )


@given(jagged_batches(), st.sampled_from([1, 3, 4, 20]), float_dtypes(), seeds())
def test_saturated(place: Place, division: None, batch: Jagged, features: int, dtype: torch.dtype, seed: int) -> None:
    """Where one row has all the weight a gradient is the difference of equal numbers: it errs by a few roundings of those."""
    values, cotangent = (random_tensor((batch.total, features), dtype, seed + k) for k in range(2))
    leaf = (30 * values).requires_grad_()
    exact_leaf = leaf.detach().double().requires_grad_()
    output = ops.jagged_softmax(leaf, batch.offsets, backend=place.backend)
    exact = reference.softmax(exact_leaf, batch.lengths)
    ours = output.detach(), *torch.autograd.grad(output, leaf, cotangent)
    expected = exact.detach(), *torch.autograd.grad(exact, exact_leaf, cotangent.double())
    for got, want, largest in zip(ours, expected, (1.0, float(cotangent.abs().max()) if batch.total else 0.0), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=0, atol=8 * torch.finfo(dtype).eps * largest)


@given(jagged_batches(max_batch=4, longest=40), st.data(), float_dtypes(), seeds(), st.booleans(), DIMS)
def test_jagged2_softmax(
    place: Place, starts: None, batch: Jagged, data: st.DataObject, dtype: torch.dtype, seed: int, strided: bool, dim: int
) -> None:
    way = data.draw(st.sampled_from(["square", "rectangular", "pair offsets given"]))
    columns = batch if way == "square" else rows_of(tuple(data.draw(st.permutations(batch.lengths))), batch)
    total = sum(a * b for a, b in zip(batch.lengths, columns.lengths, strict=True))
    scores = random_tensor((total, 1), dtype, seed, strided=strided)[:, 0]
    given_columns = None if way == "square" else columns.offsets
    pairs = ops.pair_offsets(batch.offsets, given_columns) if way == "pair offsets given" else None
    check_three_way(
        lambda s: ops.jagged2_softmax(s, batch.offsets, given_columns, dim, pair_offsets=pairs, backend=place.backend),
        lambda s: reference.softmax2(s, batch.lengths, columns.lengths, dim),
        [scores],
    )


@pytest.mark.parametrize("dim", [-1, -2])
@pytest.mark.parametrize(
    ("a_lengths", "b_lengths"),
    [
        ((2, 0, 3, 1), (1500, 2, 0, 7)),
        ((1500, 1, 300), (1, 3, 20)),
        ((1,), (5000,)),
        ((70, 5, 130), (128, 33, 64)),
        ((5, 3000, 2), (3, 0, 4)),
    ],
)
def test_long_rows_and_columns(place: Place, a_lengths: tuple[int, ...], b_lengths: tuple[int, ...], dim: int) -> None:
    """Vectors of several tiles, tiles of all widths, blocks of more vectors than a program takes, many vectors without pairs."""
    a, b = jagged_of(a_lengths), jagged_of(b_lengths)
    scores = random_tensor((sum(x * y for x, y in zip(a_lengths, b_lengths, strict=True)),), torch.float32, 0)
    check_three_way(
        lambda s: ops.jagged2_softmax(s, a.offsets, b.offsets, dim, backend=place.backend),
        lambda s: reference.softmax2(s, a_lengths, b_lengths, dim),
        [scores],
    )


@pytest.mark.parametrize("lengths", [(3, 290, 0, 5), (40, 1, 70, 1, 90)])
def test_long_samples(place: Place, division: None, lengths: tuple[int, ...]) -> None:
    batch = jagged_of(lengths)
    check_three_way(
        lambda v: ops.jagged_softmax(v, batch.offsets, backend=place.backend),
        lambda v: reference.softmax(v, lengths),
        [random_tensor((batch.total, 4), torch.float32, 0)],
    )


@pytest.mark.skipif(PLACE.name == "interpret", reason="programs one after the other, thousands of them")
def test_more_samples_than_a_scan_takes(place: Place) -> None:
    """Blocks are found past the first thousand samples, in every program and with PyTorch's offsets."""
    for empty in (500, 1030):
        lengths = (*[0] * empty, 3, 2, *[0] * empty, 4)
        scores = random_tensor((29,), torch.float32, 0)
        ours = ops.jagged2_softmax(scores, jagged_of(lengths).offsets, backend=place.backend)
        torch.testing.assert_close(ours, reference.softmax2(scores, lengths, lengths, -1))


@pytest.mark.parametrize("scores", [-1e4, 3e4, 0.0])
def test_equal_scores_of_any_size(place: Place, division: None, scores: float) -> None:
    batch = jagged_of((4, 0, 16))
    share = torch.tensor([0.25] * 4 + [0.0625] * 16, device=place.device)
    for dtype in place.dtypes:
        values = torch.full((20, 3), scores, dtype=dtype, device=place.device)
        ours = ops.jagged_softmax(values, batch.offsets, backend=place.backend)
        assert torch.equal(ours, share.to(dtype)[:, None].expand(-1, 3))
        for dim in (-1, -2):
            square = ops.jagged2_softmax(values[:, 0], jagged_of((2, 4)).offsets, dim=dim, backend=place.backend)
            assert torch.equal(square, torch.tensor([0.5] * 4 + [0.25] * 16, dtype=dtype, device=place.device))


@pytest.mark.filterwarnings("ignore:.*(invalid value|divide by zero):RuntimeWarning")
def test_minus_infinity_as_torch_takes_it(place: Place, division: None) -> None:
    """A mask of -inf gets weight 0; a vector of -inf alone is NaN, and no other vector with it."""
    lengths = (3, 20)
    values = random_tensor((23, 2), torch.float32, 0)
    values[1, 0] = values[3:12, 1] = values[:3, 1] = -torch.inf
    ours = ops.jagged_softmax(values, jagged_of(lengths).offsets, backend=place.backend)
    torch.testing.assert_close(ours, reference.softmax(values, lengths), equal_nan=True)
    assert bool(ours[:3, 1].isnan().all())
    assert int(ours.isnan().sum()) == 3
    scores = random_tensor((13,), torch.float32, 0)
    scores[3:6] = scores[0] = -torch.inf
    for dim in (-1, -2):
        ours = ops.jagged2_softmax(scores, jagged_of((3, 2)).offsets, dim=dim, backend=place.backend)
        torch.testing.assert_close(ours, reference.softmax2(scores, (3, 2), (3, 2), dim), equal_nan=True)
        assert int(ours.isnan().sum()) == (3 if dim == -1 else 0)


WRONG = (
    [0, 19, 5, 30],
    [-7, 14, 20],
    [0, 100, 200],
    [50, 60, 70],
    [0, 2**31 - 1, -(2**31)],
    [0, 3, 2**31 - 1],
    [4, 2**31 - 1, 9],
)


@pytest.fixture
def fenced(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What kernels allocate lies between fences of 777, in the blocks that the list holds."""
    blocks: list[torch.Tensor] = []

    def empty(*shape: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        size = shape[0] if isinstance(shape[0], tuple) else shape
        blocks.append(torch.full((math.prod(size) + 2 * FENCE,), 777, dtype=dtype, device=device))
        return blocks[-1][FENCE:-FENCE].view(size)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch, "empty_like", lambda x: empty(*x.shape, dtype=x.dtype, device=x.device))
    return blocks


@pytest.mark.usefixtures("unchecked")
@pytest.mark.filterwarnings("ignore:.*(invalid value|divide by zero|overflow):RuntimeWarning")
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_offsets_reach_no_foreign_memory(
    place: Place, division: None, starts: None, fenced: list[torch.Tensor], wrong: list[int]
) -> None:
    """Offsets that decrease, begin before 0 or run past the end give some rows: nothing outside is read or written.

    A score of 1e30 outside would take all weight from those inside; as a gradient or a weight it would make gradients as large.
    """
    fences = [torch.full((60, 4), 1e30, device=place.device) for _ in range(2)]
    values, grad = (fence[20:40].fill_(1.0) for fence in fences)

    def check(result: torch.Tensor, least: float, most: float) -> None:
        written = result[result.isfinite() & (result != 777)]
        assert bool(((written >= least) & (written <= most)).all())

    for dtype in (torch.int32, torch.int64):
        offsets = torch.tensor(wrong, device=place.device, dtype=dtype)
        layout = offsets, place.backend
        check(torch.ops.jagged.jagged_softmax(values, *layout), 1 / 80, 1)
        check(torch.ops.jagged.jagged_softmax_backward(grad, values, *layout), -80, 1)
        small = offsets.clamp(-9, 9)
        for a, b, pairs in (
            (offsets, offsets.flip(0), None),
            (offsets, None, None),
            (small, None, offsets),
            (offsets, small, None),
        ):
            for by_columns in (False, True):
                layout2 = a, b, pairs, by_columns, place.backend
                check(torch.ops.jagged.jagged2_softmax(values.flatten(), *layout2), 1 / 80, 1)
                check(torch.ops.jagged.jagged2_softmax_backward(grad.flatten(), values.flatten(), *layout2), -80, 1)
    assert len(fenced) >= 4 or place.backend == "torch"
    for block in fenced:
        assert bool((block[:FENCE] == 777).all())
        assert bool((block[-FENCE:] == 777).all())
    for fence, inside in zip(fences, (values, grad), strict=True):
        assert bool((inside == 1).all())
        assert bool((fence[:20] == 1e30).all())
        assert bool((fence[40:] == 1e30).all())


def test_strided_offsets(place: Place) -> None:
    """Every second element of a tensor is a tensor of offsets too."""
    values = random_tensor((7, 2), torch.float32, 0)
    wide = torch.tensor([0, 9, 3, 9, 3, 9, 7], device=place.device)
    offsets = wide[::2]
    assert torch.equal(
        ops.jagged_softmax(values, offsets, backend=place.backend),
        ops.jagged_softmax(values, offsets.contiguous(), backend=place.backend),
    )
    scores = random_tensor((25,), torch.float32, 0)
    expected = ops.jagged2_softmax(scores, offsets.contiguous(), backend=place.backend)
    for b_offsets in (None, offsets):
        for pairs in (None, torch.tensor([0, 1, 9, 1, 9, 1, 25], device=place.device)[::2]):
            ours = ops.jagged2_softmax(scores, offsets, b_offsets, pair_offsets=pairs, backend=place.backend)
            assert torch.equal(ours, expected)


def test_messages_name_argument_and_cure(place: Place) -> None:
    values, offsets = torch.zeros(3, 2, device=place.device), torch.tensor([0, 3], device=place.device)
    scores = torch.zeros(9, device=place.device)
    cases = [
        (lambda: ops.jagged_softmax(scores, offsets), ValueError, r"values: expected shape \[S, T\], got \[9\]"),
        (lambda: ops.jagged_softmax(values.int(), offsets), TypeError, "values: expected dtype float32"),
        (lambda: ops.jagged_softmax(values, offsets.float()), TypeError, "offsets: expected dtype int32, int64, got float32"),
        (lambda: ops.jagged_softmax(values, offsets, backend="cuda"), ValueError, "backend: got 'cuda'"),
        (lambda: ops.jagged2_softmax(values, offsets), ValueError, r"scores: expected shape \[P\], got \[3, 2\]"),
        (lambda: ops.jagged2_softmax(scores, offsets, dim=1), ValueError, "dim: expected -1 for the blocks' rows or -2"),
        (lambda: ops.jagged2_softmax(scores, offsets, offsets.int()), TypeError, "b_offsets: expected the dtype of a_offsets"),
        (lambda: ops.jagged2_softmax(scores, offsets, offsets[:1]), ValueError, r"b_offsets: expected \[2\] as a_offsets"),
        (
            lambda: ops.jagged2_softmax(scores, offsets, pair_offsets=offsets[:1]),
            ValueError,
            r"pair_offsets: expected \[2\] as a_offsets, got \[1\]",
        ),
    ]
    for call, error, message in cases:
        with pytest.raises(error, match=message):
            call()


def test_values_of_offsets_are_checked_on_demand(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAGGED_VALIDATE", "1")
    offsets = torch.tensor([0, 2, 3], device=place.device)
    scores = torch.zeros(5, device=place.device)
    ops.jagged2_softmax(scores, offsets, pair_offsets=ops.pair_offsets(offsets), backend=place.backend)
    cases = [
        (lambda: ops.jagged_softmax(scores[:, None], offsets), r"offsets\[2\]: expected 5, the number of rows, got 3"),
        (lambda: ops.jagged2_softmax(scores[:4], offsets), "scores: expected 5, the pairs that a_offsets and b_offsets describe"),
        (lambda: ops.jagged2_softmax(scores, offsets, offsets.flip(0)), r"b_offsets\[0\]: expected 0, got 3"),
        (
            lambda: ops.jagged2_softmax(scores, offsets, pair_offsets=torch.tensor([0, 3, 5], device=place.device)),
            r"pair_offsets\[1\]: expected 4, got 3; compute it by pair_offsets",
        ),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()


def test_opcheck(place: Place) -> None:
    batch = jagged_of((2, 0, 3))
    values, scores = random_tensor((5, 4), torch.float32, 0), random_tensor((13,), torch.float32, 0)
    pairs = ops.pair_offsets(batch.offsets)
    for name, arguments in (
        ("jagged_softmax", (values, batch.offsets)),
        ("jagged_softmax", (values.t().contiguous().t(), batch.offsets)),
        ("jagged_softmax_backward", (values, values, batch.offsets)),
        ("jagged_softmax_backward", (values.t().contiguous().t(), values, batch.offsets)),
        ("jagged2_softmax", (scores, batch.offsets, None, None, False)),
        ("jagged2_softmax", (scores, batch.offsets, batch.offsets, pairs, True)),
        ("jagged2_softmax_backward", (scores, scores, batch.offsets, batch.offsets, None, True)),
        ("jagged2_softmax_backward", (scores, scores, batch.offsets, batch.offsets, pairs, False)),
    ):
        torch.library.opcheck(getattr(torch.ops.jagged, name).default, (*arguments, place.backend))


@pytest.mark.skipif(PLACE.name != "cpu", reason="float64 finite differences are the CPU's work")
def test_gradcheck_to_second_order(place: Place) -> None:
    a, b = jagged_of((2, 0, 3)), jagged_of((1, 2, 2))
    values = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    scores = torch.randn(8, dtype=torch.float64, requires_grad=True)
    for function, leaf in (
        (lambda v: ops.jagged_softmax(v, a.offsets), values),
        (lambda s: ops.jagged2_softmax(s, a.offsets, b.offsets), scores),
        (lambda s: ops.jagged2_softmax(s, a.offsets, b.offsets, -2), scores),
    ):
        assert torch.autograd.gradcheck(function, (leaf,))
        assert torch.autograd.gradgradcheck(function, (leaf,))


def test_second_derivatives_of_kernels(place: Place) -> None:
    batch = jagged_of((2, 0, 11))
    values = random_tensor((13, 3), torch.float32, 0)

    def penalty(softmax: object, leaf: torch.Tensor) -> torch.Tensor:
        leaf = leaf.detach().requires_grad_()
        (grad,) = torch.autograd.grad(softmax(leaf).square().sum(), leaf, create_graph=True)  # type: ignore[operator]
        return torch.autograd.grad(grad.square().sum(), leaf)[0]

    ours = penalty(lambda v: ops.jagged_softmax(v, batch.offsets, backend=place.backend), values)
    exact = penalty(lambda v: reference.softmax(v, batch.lengths), values.double())
    torch.testing.assert_close(ours, exact.float(), rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(PLACE.name == "interpret", reason="interpreted kernels are not compiled")
def test_one_graph_for_all_jagged_shapes(place: Place) -> None:
    graphs = 0

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        nonlocal graphs
        graphs += 1
        return graph.forward

    def function(values: torch.Tensor, scores: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = ops.jagged2_softmax(scores, offsets, dim=-1)
        return ops.jagged_softmax(values, offsets), ops.jagged2_softmax(rows, offsets, dim=-2)

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=count)
    for lengths in ((2, 4, 3), (5, 0, 1, 9), (0, 7), (30, 2, 2, 2, 2)):
        batch = jagged_of(lengths)
        values = random_tensor((batch.total, 13), torch.float32, 0).requires_grad_()
        scores = random_tensor((sum(n * n for n in lengths),), torch.float32, 0).requires_grad_()
        for got, want in zip(compiled(values, scores, batch.offsets), function(values, scores, batch.offsets), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert graphs == 1


@ON_GPU
def test_float64_agrees_with_the_cpu_without_synchronisation(place: Place) -> None:
    """PyTorch computes it on either device, blocks in another way: a CPU reads lengths."""
    a, b = jagged_of((3, 0, 40, 7)), jagged_of((5, 2, 9, 30))
    values = random_tensor((a.total, 3), torch.float64, 0)
    scores = random_tensor((3 * 5 + 40 * 9 + 7 * 30,), torch.float64, 1)

    def step(*inputs: torch.Tensor) -> list[torch.Tensor]:
        *leaves, rows, columns = inputs
        leaves = [x.detach().requires_grad_() for x in leaves]
        outputs = [ops.jagged_softmax(leaves[0], rows)]
        outputs += [ops.jagged2_softmax(leaves[1], rows, columns, dim=dim) for dim in (-1, -2)]
        return [*outputs, *torch.autograd.grad([x.square().sum() for x in outputs], leaves)]

    inputs = values, scores, a.offsets, b.offsets
    step(*inputs)
    torch.cuda.set_sync_debug_mode("error")
    ours = step(*inputs)
    torch.cuda.set_sync_debug_mode("default")
    for got, want in zip(ours, step(*(x.cpu() for x in inputs)), strict=True):
        torch.testing.assert_close(got.cpu(), want)


@ON_GPU
def test_no_synchronisation_and_graph_capture(place: Place, division: None, starts: None) -> None:
    values = random_tensor((60, 8), torch.float32, 0).requires_grad_()
    scores = random_tensor((10 * 10 + 50 * 50,), torch.float32, 0).requires_grad_()
    offsets = jagged_of((10, 0, 50)).offsets

    def step() -> list[torch.Tensor]:
        outputs = [ops.jagged_softmax(values, offsets), *(ops.jagged2_softmax(scores, offsets, dim=dim) for dim in (-1, -2))]
        return [*outputs, *torch.autograd.grad([x.square().sum() for x in outputs], (values, scores))]

    # Without their graph: nodes that remember the stream they were made on would not be captured on another.
    expected = [x.detach() for x in step()]
    graph, results = captured(step)
    for lengths in ((10, 0, 50), (50, 0, 10), (0, 10, 50)):
        offsets.copy_(jagged_of(lengths).offsets)
        graph.replay()
        for got, want in zip(results, step(), strict=True):
            assert torch.equal(got, want)
    offsets.copy_(jagged_of((10, 0, 50)).offsets)
    for got, want in zip(step(), expected, strict=True):
        assert torch.equal(got, want)


@ON_GPU
@pytest.mark.parametrize("features", [1, 4, 64])
def test_one_long_sample_among_short_ones(place: Place, features: int) -> None:
    lengths = (*range(1000), 100_000, *range(1000))
    batch = jagged_of(lengths)
    check_three_way(
        lambda v: ops.jagged_softmax(v, batch.offsets),
        lambda v: reference.softmax(v, lengths),
        [random_tensor((batch.total, features), torch.float32, 0)],
    )


@ON_GPU
@pytest.mark.parametrize("dim", [-1, -2])
@pytest.mark.parametrize("is_tall", [False, True])
def test_one_long_block_among_short_ones(place: Place, is_tall: bool, dim: int) -> None:
    """A block of 100,000 x 3, or 3 x 100,000, among thousands."""
    long = (*(i % 20 for i in range(2000)), 100_000, *(i % 30 for i in range(2000)))
    short = (*(i % 7 for i in range(2000)), 3, *(i % 9 for i in range(2000)))
    a_lengths, b_lengths = (long, short) if is_tall else (short, long)
    a, b = jagged_of(a_lengths), jagged_of(b_lengths)
    check_three_way(
        lambda s: ops.jagged2_softmax(s, a.offsets, b.offsets, dim),
        lambda s: reference.softmax2(s, a_lengths, b_lengths, dim),
        [random_tensor((sum(x * y for x, y in zip(a_lengths, b_lengths, strict=True)),), torch.float32, 0)],
    )


@ON_GPU
def test_addresses_past_2_to_the_31(place: Place) -> None:
    rows, features = 2**21 + 3, 1024
    values = torch.zeros(rows, features, dtype=torch.bfloat16, device=place.device)
    values[-2:] = torch.tensor([[0.0], [1.0]], device=place.device)
    offsets = torch.tensor([0, 4, rows - 2, rows], device=place.device)
    expected = torch.softmax(values[-2:], 0)
    ours = ops.jagged_softmax(values, offsets)
    assert torch.equal(ours[-2:], expected)
    assert torch.equal(ours[:4], torch.full_like(ours[:4], 0.25))
    flat = values.flatten()
    a = torch.tensor([0, rows - 2, rows], device=place.device)
    b = torch.tensor([0, features, 2 * features], device=place.device)
    for dim in (-1, -2):
        ours = ops.jagged2_softmax(flat, a, b, dim)
        torch.testing.assert_close(ours[-2 * features :].view(2, features), torch.softmax(values[-2:], dim))


@pytest.mark.parametrize("is_known", [False, True])
def test_rows_and_columns_of_pairs(place: Place, is_known: bool) -> None:
    """The PyTorch implementation's on a GPU; each named by the place of its first pair."""
    from jagged.ops.softmax.spec import PairInputs
    from jagged.ops.softmax.torch_impl import _vector_of_pair

    a, b = (torch.tensor(offsets, device=place.device) for offsets in ([0, 2, 2, 3], [0, 2, 5, 6]))
    starts = ops.pair_offsets(a, b)
    x = PairInputs(torch.zeros(5, device=place.device), a, b, starts if is_known else None)
    assert _vector_of_pair(x, 5, False).tolist() == [0, 0, 2, 2, 4]
    assert _vector_of_pair(x, 5, True).tolist() == [0, 1, 0, 1, 4]
