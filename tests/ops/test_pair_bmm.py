"""Products over the pairs of rows of each sample against loops over samples in float64, in every place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from jagged import ops
from jagged.ops._shared import blocks
from tests.graphs import captured
from tests.oracle import check_three_way
from tests.places import PLACE, Place
from tests.reference import pair_bmm as reference
from tests.strategies import Jagged, jagged_of, random_tensor, seeds
from tests.strategies import lengths as drawn_lengths

ON_GPU = pytest.mark.gpu
WIDTHS = st.sampled_from([1, 2, 7, 16, 31, 64, 100, 128, 130])


@st.composite
def two_batches(draw: st.DrawFn) -> tuple[Jagged, Jagged]:
    """Two batches of as many samples; empty samples on either side, and one sample long on one of them, or on both."""
    first = draw(drawn_lengths())
    second = draw(st.one_of(st.permutations(first), st.lists(st.integers(0, 9), min_size=len(first), max_size=len(first))))
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    return jagged_of(first, dtype), jagged_of(tuple(second), dtype)


def pairs_of(a: Jagged, b: Jagged) -> int:
    return sum(rows * columns for rows, columns in zip(a.lengths, b.lengths, strict=True))


def check_scores(place: Place, a: Jagged, b: Jagged, inputs: list[Tensor], total: int | None, **options: object) -> None:
    check_three_way(
        lambda x, y: ops.jagged_jagged_bmm_jagged_out(x, y, a.offsets, b.offsets, total, backend=place.backend),
        lambda x, y: reference.pair_scores(x, y, a.lengths, b.lengths),
        inputs,
        **options,  # type: ignore[arg-type]
    )


def check_sums(place: Place, a: Jagged, b: Jagged, inputs: list[Tensor], a_total: int | None, **options: object) -> None:
    check_three_way(
        lambda x, y: ops.array_jagged_bmm_jagged_out(x, y, a.offsets, b.offsets, a_total, backend=place.backend),
        lambda x, y: reference.pair_sums(x, y, a.lengths, b.lengths),
        inputs,
        **options,  # type: ignore[arg-type]
    )


@given(
    two_batches(), WIDTHS, st.sampled_from(PLACE.dtypes), seeds(), st.booleans(), st.booleans(),
    st.lists(st.booleans(), min_size=2, max_size=2),
)  # fmt: skip
def test_three_way(
    place: Place,
    batches: tuple[Jagged, Jagged],
    width: int,
    dtype: torch.dtype,
    seed: int,
    strided: bool,
    sync: bool,
    wanted: list[bool],
) -> None:
    # The yardstick is a largest error, which over few elements may be nothing by luck: every batch gets a sample of some rows.
    a, b = (jagged_of((*batch.lengths, length), batch.offsets.dtype) for batch, length in zip(batches, (9, 11), strict=True))
    left, right = (random_tensor((batch.total, width), dtype, seed + k, strided=strided) for k, batch in enumerate((a, b)))
    check_scores(place, a, b, [left, right], None if sync else pairs_of(a, b), requires_grad=wanted)
    scores = random_tensor((pairs_of(a, b), 2), dtype, seed + 2)[:, 0] if strided else random_tensor((pairs_of(a, b),), dtype, 2)
    check_sums(place, a, b, [scores, right], None if sync else a.total, requires_grad=wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_tile_boundary(place: Place, dtype: torch.dtype) -> None:
    """Lengths around the tiles and their halves, for short samples and for long ones, square and not."""
    for lengths in ((15, 0, 16, 17, 1), (31, 32, 33, 64, 65), (1, 128, 129, 0)):
        a = jagged_of(lengths)
        for b in (jagged_of((7,) * len(lengths)), jagged_of(lengths[::-1])):
            check_scores(place, a, b, [random_tensor((x.total, 32), dtype, k) for k, x in enumerate((a, b))], pairs_of(a, b))
            scores = random_tensor((pairs_of(a, b),), dtype, 2)
            check_sums(place, a, b, [scores, random_tensor((b.total, 80), dtype, 3)], a.total)


def test_square_blocks_need_one_list_of_offsets(place: Place) -> None:
    batch = jagged_of((3, 0, 5), torch.int32)
    a, b = (random_tensor((8, 6), torch.float32, k) for k in range(2))
    scores = ops.jagged_jagged_bmm_jagged_out(a, b, batch.offsets, backend=place.backend)
    assert torch.equal(scores, ops.jagged_jagged_bmm_jagged_out(a, b, batch.offsets, batch.offsets, 34, backend=place.backend))
    sums = ops.array_jagged_bmm_jagged_out(scores, b, batch.offsets, backend=place.backend)
    assert torch.equal(sums, ops.array_jagged_bmm_jagged_out(scores, b, batch.offsets, batch.offsets, backend=place.backend))
    starts = ops.pair_offsets(batch.offsets).tolist()
    torch.testing.assert_close(scores[starts[2] :].view(5, 5), a[3:] @ b[3:].T)
    torch.testing.assert_close(sums[:3], (a[:3] @ b[:3].T) @ b[:3])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("batch_size", [0, 1, 1023, 1024, 2500])
def test_pair_offsets_of_many_samples(place: Place, batch_size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    # Products and sums pass 2^31.
    a, b = (
        torch.cat([torch.zeros(1, dtype=dtype), torch.randint(0, 2**18, (batch_size,), generator=generator).cumsum(0).to(dtype)])
        for _ in range(2)
    )
    got = torch.ops.jagged.pair_offsets.default(a.to(place.device), b.to(place.device), place.backend)
    assert got.dtype == torch.int64
    assert torch.equal(got.cpu(), ops.pair_offsets(a, b))


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0, 0)])
def test_batches_without_rows(place: Place, lengths: tuple[int, ...]) -> None:
    """On one side or on both; a sum without terms is 0, and so are gradients without pairs."""
    empty, other = jagged_of(lengths), jagged_of(tuple(k + 2 for k in range(len(lengths))))
    for a, b in ((empty, empty), (empty, other), (other, empty)):
        x, y = (random_tensor((batch.total, 5), torch.float32, 0).requires_grad_() for batch in (a, b))
        scores = ops.jagged_jagged_bmm_jagged_out(x, y, a.offsets, b.offsets, backend=place.backend)
        sums = ops.array_jagged_bmm_jagged_out(scores, y, a.offsets, b.offsets, backend=place.backend)
        assert scores.shape == (0,)
        assert torch.equal(sums, torch.zeros(a.total, 5, device=place.device))
        for grad, leaf in zip(torch.autograd.grad(sums.sum(), (x, y)), (x, y), strict=True):
            assert torch.equal(grad, torch.zeros_like(leaf))


def test_rows_without_columns(place: Place) -> None:
    """D = 0: scores are sums of nothing."""
    batch = jagged_of((2, 3))
    empty = torch.empty(5, 0, device=place.device)
    scores = ops.jagged_jagged_bmm_jagged_out(empty, empty, batch.offsets, backend=place.backend)
    assert torch.equal(scores, torch.zeros(13, device=place.device))
    assert ops.array_jagged_bmm_jagged_out(scores, empty, batch.offsets, backend=place.backend).shape == (5, 0)


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")
def test_infinities_stay_in_their_sample(place: Place) -> None:
    """What is computed for padding touches no number: an infinite row makes its own sample's results infinite, not NaN."""
    a, b = jagged_of((3, 20, 2)), jagged_of((2, 33, 3))
    values = random_tensor((b.total, 8), torch.float32, 0).abs()
    values[34] = torch.inf
    scores = random_tensor((pairs_of(a, b),), torch.float32, 1).abs()
    sums = ops.array_jagged_bmm_jagged_out(scores, values, a.offsets, b.offsets, a.total, backend=place.backend)
    assert bool((sums[3:23] == torch.inf).all())
    assert bool(torch.isfinite(sums[:3]).all())
    assert bool(torch.isfinite(sums[23:]).all())


def test_more_room_than_pairs(place: Place) -> None:
    """As in a CUDA graph whose lengths change: what lies past the last pair is neither read nor anything's gradient."""
    batch, room = jagged_of((3, 0, 20)), 700
    a, b = (random_tensor((23, 8), torch.float32, k).requires_grad_() for k in range(2))
    results = []
    for total in (409, room):
        scores = ops.jagged_jagged_bmm_jagged_out(a, b, batch.offsets, total=total, backend=place.backend)
        sums = ops.array_jagged_bmm_jagged_out(scores, b, batch.offsets, backend=place.backend)
        results.append([scores[:409], sums, *torch.autograd.grad(sums.square().sum(), (a, b))])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


@pytest.mark.skipif(PLACE.name == "cpu", reason="kernels alone find blocks in two ways")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_blocks_are_found_in_either_way(place: Place, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Added up by each program or scanned once; from offsets side by side or strided."""
    from jagged.ops._shared import kernels

    a, b = jagged_of((3, 0, 20, 40, 1), dtype), jagged_of((5, 7, 33, 0, 2), dtype)
    x, y = (random_tensor((batch.total, 8), torch.float32, k).requires_grad_() for k, batch in enumerate((a, b)))
    strided = [torch.stack([batch.offsets, batch.offsets * 0 - 9], 1)[:, 0] for batch in (a, b)]
    results = []
    for offsets, limit in (
        ((a.offsets, b.offsets), kernels.SCANNED_SAMPLES),
        ((a.offsets, b.offsets), 0),
        (strided, 0),
        (strided, 9),
    ):
        monkeypatch.setattr(kernels, "SCANNED_SAMPLES", limit)
        scores = ops.jagged_jagged_bmm_jagged_out(x, y, *offsets, backend=place.backend)
        sums = ops.array_jagged_bmm_jagged_out(scores, y, *offsets, a.total, backend=place.backend)
        results.append([scores, sums, *torch.autograd.grad(sums.square().sum(), (x, y))])
    for result in results[1:]:
        for got, want in zip(result, results[0], strict=True):
            assert torch.equal(got, want)


@pytest.mark.usefixtures("unchecked")
def test_wrong_offsets_reach_no_foreign_memory(place: Place) -> None:
    """Offsets that decrease, begin before 0 or run past the end, and totals too small, mix rows of the tensors alone."""
    fence = torch.full((4, 140, 16), 1e30, device=place.device)
    a, b = (x.fill_(value) for x, value in zip(fence[:2, 50:90], (0.5, 0.25), strict=True))
    pairs = fence[2].view(-1)[300:1900].fill_(1.0)
    for wrong in ([0, 30, 5, 90], [-70, 10, 40], [0, 1000, 2000], [90, 95], [0, -(2**40), 2**40], [0, 2**30, 0, 2**31]):
        first, second = (torch.tensor(x, device=place.device) for x in (wrong, [0, 10, 20, 40][: len(wrong)]))
        for x_offsets, y_offsets, total in ((first, second, 1600), (second, first, 100), (first, first, 1600)):
            x, y, s = (t.detach().requires_grad_() for t in (a, b, pairs))
            scores = ops.jagged_jagged_bmm_jagged_out(x, y, x_offsets, y_offsets, total, backend=place.backend)
            sums = ops.array_jagged_bmm_jagged_out(s[:total], y, x_offsets, y_offsets, 40, backend=place.backend)
            outputs = [scores, sums]
            outputs += torch.autograd.grad(scores, (x, y), torch.ones_like(scores))
            outputs += torch.autograd.grad(sums, (s, y), torch.ones_like(sums))
            # Rows that no sample covers may be left unwritten, which here means NaN.
            assert not any(bool((output.abs() > 1e6).any()) for output in outputs)
    inside = torch.zeros_like(fence, dtype=torch.bool)
    inside[:2, 50:90] = True
    inside[2].view(-1)[300:1900] = True
    assert bool((fence[~inside] == 1e30).all())


@pytest.mark.skipif(PLACE.name != "cpu", reason="the PyTorch implementation's own chunks, and dtype")
@pytest.mark.parametrize("chunk", [1, 60, 500, 2**18])
def test_float64_in_chunks_of_any_size(place: Place, chunk: int) -> None:
    a, b = jagged_of((3, 0, 40, 17, 9, 1, 16, 5, 4)), jagged_of((5, 7, 2, 30, 8, 9, 0, 5, 6))
    x, y, z = (random_tensor((batch.total, 5), torch.float64, k).requires_grad_() for k, batch in enumerate((a, b, b)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "_CHUNK_PAIRS", chunk)
        scores = ops.jagged_jagged_bmm_jagged_out(x, y, a.offsets, b.offsets)
        ours = ops.array_jagged_bmm_jagged_out(scores, z, a.offsets, b.offsets)
        got = [ours, *torch.autograd.grad(ours.square().sum(), (x, y, z))]
    expected = reference.pair_sums(reference.pair_scores(x, y, a.lengths, b.lengths), z, a.lengths, b.lengths)
    want = [expected, *torch.autograd.grad(expected.square().sum(), (x, y, z))]
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.skipif(PLACE.name != "cpu", reason="float64 finite differences are the CPU's work")
def test_gradcheck_to_second_order(place: Place) -> None:
    a, b = jagged_of((2, 0, 3)), jagged_of((1, 2, 2))
    x, y = (torch.randn(batch.total, 3, dtype=torch.float64, requires_grad=True) for batch in (a, b))
    scores = torch.randn(pairs_of(a, b), dtype=torch.float64, requires_grad=True)
    for function, leaves in (
        (lambda x, y: ops.jagged_jagged_bmm_jagged_out(x, y, a.offsets, b.offsets), (x, y)),
        (lambda s, y: ops.array_jagged_bmm_jagged_out(s, y, a.offsets, b.offsets), (scores, y)),
    ):
        assert torch.autograd.gradcheck(function, leaves)
        assert torch.autograd.gradgradcheck(function, leaves)


@pytest.mark.parametrize("dtype", [torch.float32])
def test_third_derivatives(place: Place, dtype: torch.dtype) -> None:
    """Through both functions, in the place's own backend, against PyTorch's derivatives of the loop."""
    a, b = jagged_of((4, 0, 9)), jagged_of((3, 2, 5))
    leaves = [random_tensor((batch.total, 6), dtype, k).double().requires_grad_() for k, batch in enumerate((a, b))]

    def third(function: Callable[[Tensor, Tensor], Tensor], leaves: list[Tensor]) -> list[Tensor]:
        loss = function(*leaves).pow(3).sum()
        for _ in range(2):
            loss = sum((grad.square().sum() for grad in torch.autograd.grad(loss, leaves, create_graph=True)), loss.new_zeros(()))
        return list(torch.autograd.grad(loss, leaves))

    def ours(x: Tensor, y: Tensor) -> Tensor:
        scores = ops.jagged_jagged_bmm_jagged_out(x, y, a.offsets, b.offsets, backend=place.backend)
        return ops.array_jagged_bmm_jagged_out(scores, y, a.offsets, b.offsets, backend=place.backend) * 0.02

    def expected(x: Tensor, y: Tensor) -> Tensor:
        scores = reference.pair_scores(x, y, a.lengths, b.lengths)
        return reference.pair_sums(scores, y, a.lengths, b.lengths) * 0.02

    got = third(ours, [x.detach().to(dtype).requires_grad_() for x in leaves])
    for mine, want in zip(got, third(expected, leaves), strict=True):
        torch.testing.assert_close(mine.double(), want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


@pytest.mark.parametrize("dtype", [PLACE.dtypes[0], PLACE.dtypes[-1]])
def test_opcheck(place: Place, dtype: torch.dtype) -> None:
    a, b = jagged_of((2, 0, 3)), jagged_of((1, 2, 2))
    x, y = (random_tensor((batch.total, 4), dtype, 0) for batch in (a, b))
    torch.library.opcheck(torch.ops.jagged.pair_offsets.default, (a.offsets, b.offsets, place.backend))
    offsets = a.offsets, b.offsets
    torch.library.opcheck(torch.ops.jagged.pair_scores.default, (x, y, *offsets, 8, place.backend))
    scores = random_tensor((8,), dtype, 1)
    for values, total, transposed in ((y, 5, False), (x, 5, True)):
        torch.library.opcheck(torch.ops.jagged.pair_sums.default, (scores, values, *offsets, total, transposed, place.backend))


@pytest.mark.skipif(PLACE.name == "interpret", reason="interpreted kernels are not compiled")
def test_one_graph_for_all_jagged_shapes(place: Place) -> None:
    graphs = 0

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        nonlocal graphs
        graphs += 1
        return graph.forward

    def function(x: Tensor, y: Tensor, a: Tensor, b: Tensor, total: int) -> Tensor:
        scores = ops.jagged_jagged_bmm_jagged_out(x, y, a, b, total)
        return ops.array_jagged_bmm_jagged_out(scores, y, a, b, x.shape[0]) * 2

    torch._dynamo.reset()
    one_graph = torch.compile(function, fullgraph=True, dynamic=True, backend=count)
    traced = torch.compile(function, fullgraph=True, dynamic=True, backend="inductor" if place.name == "gpu" else "aot_eager")
    for lengths in ((2, 4, 3), (5, 0, 1, 9), (0, 7), (30, 2, 2, 2, 2)):
        a, b = jagged_of(lengths), jagged_of(tuple(length + 1 for length in lengths))
        leaves = [random_tensor((batch.total, 13), torch.float32, k).requires_grad_() for k, batch in enumerate((a, b))]
        expected = function(*leaves, a.offsets, b.offsets, pairs_of(a, b))
        wanted = torch.autograd.grad(expected.square().sum(), leaves)
        for compiled in (one_graph, traced):
            ours = compiled(*leaves, a.offsets, b.offsets, pairs_of(a, b))
            torch.testing.assert_close(ours, expected, rtol=0, atol=0)
            for got, want in zip(torch.autograd.grad(ours.square().sum(), leaves), wanted, strict=True):
                torch.testing.assert_close(got, want)
    assert graphs == 1
    for name, call in (
        ("total", lambda x, y: ops.jagged_jagged_bmm_jagged_out(x, y, a.offsets, b.offsets)),
        ("a_total", lambda x, y: ops.array_jagged_bmm_jagged_out(x[:, 0], y, a.offsets, b.offsets)),
    ):
        with pytest.raises(Exception, match=f"{name}: must be given in a compiled or captured call"):
            torch.compile(call, fullgraph=True, backend="eager")(*leaves)


def test_autocast_casts_as_bmm_does(place: Place) -> None:
    batch = jagged_of((6, 0, 20))
    a, b = (random_tensor((26, 8), torch.float32, k).requires_grad_() for k in range(2))
    with torch.autocast(place.device.type, dtype=torch.bfloat16):
        # One of 16 bits already, as a linear layer makes it.
        scores = ops.jagged_jagged_bmm_jagged_out(a.bfloat16(), b, batch.offsets, backend=place.backend)
        sums = ops.array_jagged_bmm_jagged_out(scores.float(), b, batch.offsets, backend=place.backend)
        grads = torch.autograd.grad(sums.sum(), (a, b))
    low = [x.detach().bfloat16().requires_grad_() for x in (a, b)]
    expected = ops.jagged_jagged_bmm_jagged_out(*low, batch.offsets, backend=place.backend)
    expected_sums = ops.array_jagged_bmm_jagged_out(expected, low[1], batch.offsets, backend=place.backend)
    assert torch.equal(scores, expected)
    assert torch.equal(sums, expected_sums)
    for got, want in zip(grads, torch.autograd.grad(expected_sums.sum(), low), strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want.float(), rtol=2e-2, atol=1e-1)


def test_meta_tensors_have_shapes(place: Place) -> None:
    a, b = (torch.empty(rows, 8, device="meta", requires_grad=True) for rows in (5, 7))
    offsets = torch.empty(3, dtype=torch.int64, device="meta")
    scores = ops.jagged_jagged_bmm_jagged_out(a, b, offsets, offsets.clone(), total=20)
    sums = ops.array_jagged_bmm_jagged_out(scores, b, offsets, offsets.clone(), a_total=5)
    sums.sum().backward()
    assert scores.shape == (20,)
    assert sums.shape == a.grad.shape == (5, 8)


def test_messages_name_argument_and_cure(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    a, offsets = torch.zeros(3, 4, device=place.device), torch.tensor([0, 3], device=place.device)
    s, long = torch.zeros(9, device=place.device), torch.tensor([0, 1, 3], device=place.device)
    scores, sums = ops.jagged_jagged_bmm_jagged_out, ops.array_jagged_bmm_jagged_out
    cases: list[tuple[Callable[..., Tensor], tuple[object, ...], dict[str, object], type[Exception], str]] = [
        (scores, (a[0], a, offsets), {}, ValueError, r"a: expected shape \[Sa, D\], got \[4\]"),
        (scores, ("a", a, offsets), {}, TypeError, r"a: expected a tensor \[Sa, D\], got str"),
        (scores, (a, a.half(), offsets), {}, TypeError, r"b: expected the dtype of a, float32, got float16"),
        (scores, (a.long(), a, offsets), {}, TypeError, r"a: expected dtype .*, got int64"),
        (scores, (a, a[:, :2], offsets), {}, ValueError, r"b: expected shape \[Sb, 4\], as wide as a \[3, 4\], got \[3, 2\]"),
        (scores, (a, a[:2], offsets), {}, ValueError, r"b: expected 3 rows as a has, got 2; give b_offsets where lengths differ"),
        (scores, (a, a, offsets.float()), {}, TypeError, r"a_offsets: expected dtype int32, int64, got float32"),
        (scores, (a, a, offsets, offsets.int()), {}, TypeError, r"b_offsets: expected the dtype of a_offsets, int64, got int32"),
        (scores, (a, a, offsets, long), {}, ValueError, r"b_offsets: expected \[2\] as a_offsets, got \[3\]"),
        (sums, (a, a, offsets), {}, ValueError, r"scores: expected shape \[N\], got \[3, 4\]"),
        (sums, (s, a.half(), offsets), {}, TypeError, r"b: expected the dtype of scores, float32, got float16"),
        (sums, (s, a, offsets, None, 4), {}, ValueError, r"a_total: expected 3, the rows of b, got 4; give b_offsets where"),
        (sums, (s, a, offsets, long), {}, ValueError, r"b_offsets: expected \[2\] as a_offsets, got \[3\]"),
        (sums, (s.double(), a.double(), offsets), {"backend": "triton"}, TypeError, r"backend='triton': .* float64"),
    ]
    for function, arguments, options, error, message in cases:
        with pytest.raises(error, match=message):
            function(*arguments, **options)
    monkeypatch.setenv("JAGGED_VALIDATE", "1")
    checked = [
        (
            scores,
            (a, a, offsets - torch.tensor([0, 1], device=place.device)),
            r"a_offsets\[1\]: expected 3, the number of rows, got 2",
        ),
        (scores, (a, a, offsets, offsets + 1), r"b_offsets\[0\]: expected 0, got 1"),
        (scores, (a, a, offsets, None, 8), r"total: expected 9, the number of pairs that the offsets say, got 8"),
        (sums, (s[:8], a, offsets), r"scores: expected 9, the number of pairs that the offsets say, got 8"),
    ]
    for function, arguments, message in checked:
        with pytest.raises(ValueError, match=message):
            function(*arguments, backend=place.backend)


@ON_GPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_synchronisation_and_graph_capture(place: Place, dtype: torch.dtype) -> None:
    """Captured once with room for the most pairs; replayed with lengths going down, then up."""
    a, b = (random_tensor((200, 32), dtype, k).requires_grad_() for k in range(2))
    offsets = jagged_of((100, 0, 100)).offsets

    def step() -> list[Tensor]:
        scores = ops.jagged_jagged_bmm_jagged_out(a, b, offsets, total=200 * 200)
        sums = ops.array_jagged_bmm_jagged_out(scores, b, offsets)
        return [sums, *torch.autograd.grad(sums.square().sum(), (a, b))]

    graph, results = captured(step)
    for lengths in ((100, 0, 100), (200, 0, 0), (1, 2, 197), (0, 0, 200), (64, 128, 8)):
        offsets.copy_(jagged_of(lengths).offsets)
        graph.replay()
        for got, want in zip(results, step(), strict=True):
            assert torch.equal(got, want)


@ON_GPU
def test_one_long_sample_among_thousands(place: Place) -> None:
    """The same bits as by itself, where the tiles are the same, and no more memory than results need."""
    lengths = (*[3] * 2_000, 5_000, *[3] * 2_000)
    a = jagged_of(lengths)
    x, y = (random_tensor((a.total, 64), torch.bfloat16, k) for k in range(2))
    total = pairs_of(a, a)
    scores = ops.jagged_jagged_bmm_jagged_out(x, y, a.offsets, total=total)
    sums = ops.array_jagged_bmm_jagged_out(scores, y, a.offsets)
    block = x[6_000:11_000].float() @ y[6_000:11_000].float().T
    torch.testing.assert_close(scores[18_000 : 18_000 + 5_000**2].view(5_000, 5_000).float(), block, rtol=1e-2, atol=1e-2)
    weighted = scores[18_000 : 18_000 + 5_000**2].view(5_000, 5_000).float() @ y[6_000:11_000].float()
    torch.testing.assert_close(sums[6_000:11_000].float(), weighted, rtol=1e-2, atol=1e-1 * float(weighted.std()))


@ON_GPU
def test_addresses_past_2_to_the_31(place: Place) -> None:
    """More than 2^31 pairs: the last samples' scores, sums and gradients are those of the samples alone."""
    a, b = jagged_of((40_000, 7, 50)), jagged_of((60_000, 9, 50))
    x, y = (random_tensor((batch.total, 16), torch.bfloat16, k).requires_grad_() for k, batch in enumerate((a, b)))
    total = pairs_of(a, b)
    assert total > 2**31
    tails = jagged_of((7, 50)), jagged_of((9, 50))
    tail = [leaf.detach()[-batch.total :].requires_grad_() for leaf, batch in zip((x, y), tails, strict=True)]

    def run(leaves: list[Tensor], first: Jagged, second: Jagged, total: int) -> list[Tensor]:
        scores = ops.jagged_jagged_bmm_jagged_out(*leaves, first.offsets, second.offsets, total)
        sums = ops.array_jagged_bmm_jagged_out(scores, leaves[1], first.offsets, second.offsets, first.total)
        return [scores.detach()[-(63 + 2_500) :], sums, *torch.autograd.grad(sums, leaves, torch.ones_like(sums))]

    for got, want in zip(run([x, y], a, b, total), run(tail, *tails, 63 + 2_500), strict=True):
        torch.testing.assert_close(got[-want.shape[0] :], want, rtol=2e-2, atol=2e-2 * float(want.detach().abs().max()))


@pytest.mark.skipif(PLACE.name == "cpu", reason="Triton kernels")
def test_counting_in_int64_gives_the_same(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a block of 2^31 pairs in a tile takes, on a small one."""
    import triton.language as tl

    from jagged.ops.bmm import pair_kernels

    a, b = jagged_of((20, 0, 70)), jagged_of((33, 2, 5))
    x, y = (random_tensor((batch.total, 16), torch.bfloat16, k).requires_grad_() for k, batch in enumerate((a, b)))
    results = []
    for _ in range(2):
        scores = ops.jagged_jagged_bmm_jagged_out(x, y, a.offsets, b.offsets)
        sums = ops.array_jagged_bmm_jagged_out(scores, y, a.offsets, b.offsets)
        results.append([scores, sums, *torch.autograd.grad(sums, (x, y), torch.ones_like(sums))])
        monkeypatch.setattr(pair_kernels, "_index", lambda *_: tl.int64)
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)
