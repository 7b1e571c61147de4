"""Jagged attention against padded attention in float64, in every place; and everything the padded one cannot show."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from jagged.ops import jagged_attention
from jagged.ops.attention import torch_impl
from tests.oracle import check_three_way
from tests.places import PLACE, Place
from tests.reference.attention import padded_attention
from tests.strategies import Jagged, jagged_batches, jagged_of, random_tensor, seeds

ON_GPU = pytest.mark.gpu
# The oracle's yardstick is the error of a reference in the tested dtype; in float64 that is the reference itself.
DTYPES = [dtype for dtype in PLACE.dtypes if dtype != torch.float64]
HEADS = st.integers(1, 3)
HEAD_DIMS = st.sampled_from([1, 2, 7, 16, 31, 32, 48, 64, 96, 100, 127, 128])


def inputs_of(batch: Jagged, heads: int, head_dim: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    return [random_tensor((batch.total, heads, head_dim), dtype, seed + index) for index in range(3)]


def check(place: Place, batch: Jagged, inputs: list[Tensor], *, wanted: list[bool] | None = None, **options: object) -> None:
    check_three_way(
        lambda q, k, v: jagged_attention(q, k, v, batch.offsets, backend=place.backend, **options),  # type: ignore[arg-type]
        lambda q, k, v: padded_attention(q, k, v, batch.offsets, **options),  # type: ignore[arg-type]
        inputs,
        requires_grad=wanted,
    )


def output_and_gradients(place: Place, batch: Jagged, inputs: list[Tensor], **options: object) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    output = jagged_attention(*leaves, batch.offsets, backend=place.backend, **options)  # type: ignore[arg-type]
    cotangent = random_tensor(tuple(output.shape), output.dtype, 99)
    return [output.detach(), *torch.autograd.grad(output, leaves, cotangent)]


@given(
    jagged_batches(),
    HEADS,
    HEAD_DIMS,
    st.sampled_from(DTYPES),
    seeds(),
    st.booleans(),
    st.sampled_from([None, 0.3, -1.0]),
    st.lists(st.booleans(), min_size=3, max_size=3),
)
def test_three_way(
    place: Place,
    batch: Jagged,
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
    seed: int,
    causal: bool,
    scale: float | None,
    wanted: list[bool],
) -> None:
    # The yardstick is a largest error. Over few elements it may be nothing by luck, and the gradients of samples of one row are
    # exactly nothing in the reference: every batch gets one sample that is neither, and a small one more heads.
    batch = jagged_of((*batch.lengths, 5), batch.offsets.dtype)
    heads += 64 // (head_dim * batch.total)
    check(place, batch, inputs_of(batch, heads, head_dim, dtype, seed), wanted=wanted, causal=causal, scale=scale)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_tile_boundary(place: Place, dtype: torch.dtype, causal: bool) -> None:
    """Lengths around the tiles of both configurations: a mean below their border, and one above."""
    for lengths in ((31, 0, 32, 33, 1, 65, 1, 2), (63, 64, 65, 129, 1)):
        batch = jagged_of(lengths)
        check(place, batch, inputs_of(batch, 1, 16, dtype), causal=causal)


@pytest.mark.parametrize("causal", [False, True])
def test_slices_of_a_fused_projection_and_other_strides(place: Place, causal: bool) -> None:
    batch = jagged_of((3, 0, 40, 1))
    fused = random_tensor((batch.total, 3, 2, 24), torch.float32, 5)
    check(place, batch, list(fused.unbind(1)), causal=causal)
    heads_first = random_tensor((2, batch.total, 24), torch.float32, 5).transpose(0, 1)
    gaps = random_tensor((batch.total, 2, 24), torch.float32, 6, strided=True)
    width_first = random_tensor((24, batch.total, 2), torch.float32, 7).permute(1, 2, 0)
    check(place, batch, [heads_first, gaps, width_first], causal=causal)


def test_gradient_without_strides(place: Place) -> None:
    """The gradient of a sum is one number, expanded."""
    batch = jagged_of((3, 0, 20))
    q, k, v = (x.requires_grad_() for x in inputs_of(batch, 2, 8, torch.float32))
    ours = torch.autograd.grad(jagged_attention(q, k, v, batch.offsets, backend=place.backend).sum(), (q, k, v))
    exact = torch.autograd.grad(padded_attention(q.double(), k.double(), v.double(), batch.offsets).sum(), (q, k, v))
    for got, want in zip(ours, exact, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_scores_of_ten_thousand(place: Place, dtype: torch.dtype, causal: bool, sign: float) -> None:
    """Every score lies near `sign * 1e4`: finite, and the softmax of what is left is right."""
    batch = jagged_of((37, 0, 1, 90))
    q, k, v = inputs_of(batch, 2, 8, dtype)
    # Powers of two on the first column, so that it adds the same to every score without rounding any.
    q[..., 0], k[..., 0] = 128.0 * sign, 80.0
    check(place, batch, [q, k, v], causal=causal, scale=1.0)


def test_one_row_sees_itself(place: Place) -> None:
    batch = jagged_of((1, 0, 1))
    inputs = inputs_of(batch, 2, 7, torch.float32)
    output, grad_q, grad_k, grad_v = output_and_gradients(place, batch, inputs)
    torch.testing.assert_close(output, inputs[2])
    torch.testing.assert_close(grad_v, random_tensor((2, 2, 7), torch.float32, 99))
    torch.testing.assert_close(torch.stack([grad_q, grad_k]), torch.zeros(2, 2, 2, 7, device=place.device))


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0, 0)])
def test_batches_without_rows(place: Place, lengths: tuple[int, ...]) -> None:
    batch = jagged_of(lengths)
    for result in output_and_gradients(place, batch, inputs_of(batch, 2, 8, torch.float32), causal=True):
        assert result.shape == (0, 2, 8)


def test_rows_see_their_own_sample_and_their_past_alone(place: Place) -> None:
    """Bit for bit: what lies outside changes neither an output nor, through the gradients, itself."""
    batch = jagged_of((20, 33, 7))
    inputs = inputs_of(batch, 2, 16, torch.float32)
    before = jagged_attention(*inputs, batch.offsets, causal=True, backend=place.backend)
    changed = [x.clone() for x in inputs]
    for x in changed:
        x[30:53] *= -3.0
    after = jagged_attention(*changed, batch.offsets, causal=True, backend=place.backend)
    assert torch.equal(before[:30], after[:30])
    assert torch.equal(before[53:], after[53:])
    assert not torch.equal(before[30:53], after[30:53])
    leaves = [x.requires_grad_() for x in inputs]
    output = jagged_attention(*leaves, batch.offsets, causal=True, backend=place.backend)
    for grad in torch.autograd.grad(output[20:30].sum(), leaves):
        assert not grad[:20].any()
        assert not grad[30:].any()
        assert grad[20:30].any()


def test_wrong_offsets_reach_no_foreign_memory(place: Place) -> None:
    """Offsets that decrease, begin before 0 or run past the end mix rows of the tensors, never a neighbour's into them."""
    fence = torch.full((3, 140, 1, 16), 1e30, device=place.device)
    q, k, v = (x.fill_(value) for x, value in zip(fence[:, 50:90], (0.5, 0.25, 1.0), strict=True))
    for wrong in ([0, 30, 5, 90], [-70, 10, 40], [0, 1000, 2000], [90, 95], [0, -(2**40), 2**40], [0, 2**30, 0, 2**31]):
        offsets = torch.tensor(wrong, device=place.device)
        for causal in (False, True):
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            output = jagged_attention(*leaves, offsets, causal=causal, backend=place.backend)
            # Rows that no sample covers may be left unwritten, which here means NaN.
            assert not (output.detach() > 1.001).any()
            for grad in torch.autograd.grad(output, leaves, torch.ones_like(output)):
                assert not (grad.abs() > 1e6).any()
    assert bool((fence[:, :50] == 1e30).all())
    assert bool((fence[:, 90:] == 1e30).all())


@pytest.mark.skipif(PLACE.name != "cpu", reason="the PyTorch implementation's own chunks, and dtype")
@given(jagged_batches(), st.integers(1, 3_000), st.booleans(), seeds())
def test_float64_in_chunks_of_any_size(place: Place, batch: Jagged, chunk: int, causal: bool, seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_impl, "_CHUNK_SCORES", chunk)
        inputs = inputs_of(batch, 2, 5, torch.float64, seed)
        ours = output_and_gradients(place, batch, inputs, causal=causal)
    leaves = [x.requires_grad_() for x in inputs]
    expected = padded_attention(*leaves, batch.offsets, causal=causal)
    grads = torch.autograd.grad(expected, leaves, random_tensor(tuple(expected.shape), torch.float64, 99))
    for got, want in zip(ours, (expected, *grads), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.skipif(PLACE.name != "cpu", reason="float64 finite differences are the CPU's work")
@pytest.mark.parametrize("causal", [False, True])
def test_gradcheck(place: Place, causal: bool) -> None:
    batch = jagged_of((3, 0, 4, 1))
    inputs = [x.requires_grad_() for x in inputs_of(batch, 2, 3, torch.float64)]
    assert torch.autograd.gradcheck(lambda q, k, v: jagged_attention(q, k, v, batch.offsets, causal=causal), inputs)


def test_second_derivatives_are_refused(place: Place) -> None:
    batch = jagged_of((3, 2))
    q, k, v = (x.requires_grad_() for x in inputs_of(batch, 1, 4, torch.float32))
    output = jagged_attention(q, k, v, batch.offsets, backend=place.backend)
    # A gradient penalty: what comes in is a constant, what goes out must not be.
    (grad,) = torch.autograd.grad(output.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="jagged_attention has no second derivative"):
        grad.sum().backward()


@pytest.mark.parametrize("dtype", [PLACE.dtypes[0], PLACE.dtypes[-1]])
def test_opcheck(place: Place, dtype: torch.dtype) -> None:
    batch = jagged_of((2, 0, 3))
    q, k, v = random_tensor((batch.total, 3, 2, 4), dtype, 0).unbind(1)
    forward, backward = torch.ops.jagged.attention_forward.default, torch.ops.jagged.attention_backward.default
    arguments = (q, k, v, batch.offsets, True, 0.5, place.backend)
    torch.library.opcheck(forward, arguments)
    output, lse = forward(*arguments)
    assert lse.shape == (2, batch.total)
    torch.library.opcheck(backward, (torch.ones_like(output), q, k, v, output, lse, *arguments[3:]))


def test_log_sum_exp(place: Place) -> None:
    """The forward operator's second output, which masks and cross-attention will combine, is the natural log-sum-exp."""
    batch = jagged_of((2, 0, 40))
    q, k, v = inputs_of(batch, 2, 4, torch.float32)
    _, lse = torch.ops.jagged.attention_forward.default(q, k, v, batch.offsets, False, 0.5, place.backend)
    for first, last in ((0, 2), (2, 42)):
        scores = torch.einsum("mhd,nhd->hmn", q[first:last].double(), k[first:last].double()) * 0.5
        torch.testing.assert_close(lse[:, first:last].double(), scores.logsumexp(-1), rtol=1e-6, atol=1e-6)


@pytest.mark.skipif(PLACE.name == "interpret", reason="interpreted kernels are not compiled")
def test_one_graph_for_all_jagged_shapes(place: Place) -> None:
    graphs = 0

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        nonlocal graphs
        graphs += 1
        return graph.forward

    def function(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
        return jagged_attention(q, k, v, offsets, causal=True) * 2

    torch._dynamo.reset()
    one_graph = torch.compile(function, fullgraph=True, dynamic=True, backend=count)
    traced = torch.compile(function, fullgraph=True, dynamic=True, backend="inductor" if place.name == "gpu" else "aot_eager")
    for lengths in ((2, 4, 3), (5, 0, 1, 9), (0, 7), (30, 2, 2, 2, 2)):
        batch = jagged_of(lengths)
        leaves = [x.requires_grad_() for x in inputs_of(batch, 2, 12, torch.float32)]
        expected = function(*leaves, batch.offsets)
        wanted = torch.autograd.grad(expected.square().sum(), leaves)
        for compiled in (one_graph, traced):
            ours = compiled(*leaves, batch.offsets)
            torch.testing.assert_close(ours, expected, rtol=0, atol=0)
            for got, want in zip(torch.autograd.grad(ours.square().sum(), leaves), wanted, strict=True):
                torch.testing.assert_close(got, want)
    assert graphs == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_autocast_casts_as_sdpa_does(place: Place, dtype: torch.dtype) -> None:
    if dtype not in PLACE.dtypes:
        pytest.skip(f"{dtype} is computed by PyTorch, on the CPU")
    batch = jagged_of((6, 0, 20))
    leaves = [x.requires_grad_() for x in inputs_of(batch, 2, 8, dtype)]
    with torch.autocast(place.device.type, dtype=torch.bfloat16):
        output = jagged_attention(*leaves, batch.offsets, backend=place.backend)
        theirs = F.scaled_dot_product_attention(*(x[None].transpose(1, 2) for x in leaves))
    assert output.dtype == theirs.dtype == (dtype if dtype == torch.float64 else torch.bfloat16)
    expected = jagged_attention(*(x.to(output.dtype) for x in leaves), batch.offsets, backend=place.backend)
    assert torch.equal(output, expected)
    cotangent = torch.ones_like(output)
    with torch.autocast(place.device.type, dtype=torch.bfloat16):
        grads = torch.autograd.grad(output, leaves, cotangent)
    for got, want in zip(grads, torch.autograd.grad(expected, leaves, cotangent), strict=True):
        assert got.dtype == dtype
        assert torch.equal(got, want)


@pytest.mark.skipif(PLACE.name == "interpret", reason="interpreted kernels are not compiled")
def test_autocast_inside_a_compiled_region(place: Place) -> None:
    batch = jagged_of((6, 0, 20))
    leaves = inputs_of(batch, 2, 8, torch.float32)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast(place.device.type, dtype=torch.bfloat16):
            return jagged_attention(q, k, v, batch.offsets)

    torch._dynamo.reset()
    ours = torch.compile(function, fullgraph=True, backend="aot_eager")(*leaves)
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours, function(*leaves))


def test_meta_tensors_have_shapes(place: Place) -> None:
    q, k, v = (torch.empty(5, 2, 8, device="meta", requires_grad=True) for _ in range(3))
    output = jagged_attention(q, k, v, torch.empty(3, dtype=torch.int64, device="meta"))
    output.sum().backward()
    assert output.shape == (5, 2, 8)
    assert k.grad is not None


def test_messages_name_argument_and_cure(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.zeros(3, 2, 4, device=place.device)
    offsets = torch.tensor([0, 3], device=place.device)
    cases: list[tuple[tuple[object, ...], dict[str, object], type[Exception], str]] = [
        ((q[0], q, q, offsets), {}, ValueError, r"q: expected shape \[S, H, D\], got \[2, 4\]"),
        (("q", q, q, offsets), {}, TypeError, r"q: expected a tensor \[S, H, D\], got str"),
        ((q.long(), q, q, offsets), {}, TypeError, r"q: expected dtype .*, got int64"),
        ((q, q.half(), q, offsets), {}, TypeError, r"k: expected the dtype of q, float32, got float16"),
        ((q, q, q[:2], offsets), {}, ValueError, r"v: expected the shape of q, \[3, 2, 4\], got \[2, 2, 4\]"),
        ((q, q[:, :1], q, offsets), {}, ValueError, r"k: expected the shape of q, \[3, 2, 4\], got \[3, 1, 4\]"),
        ((*[q.new_zeros(3, 2, 129)] * 3, offsets), {}, ValueError, r"q: expected a head width D of 1 to 128, got 129"),
        ((*[q.new_zeros(3, 2, 0)] * 3, offsets), {}, ValueError, r"q: expected a head width D of 1 to 128, got 0"),
        ((q, q, q, offsets.float()), {}, TypeError, r"offsets: expected dtype int32, int64, got float32"),
        ((q, q, q, offsets[:0]), {}, ValueError, r"offsets: expected shape \[B \+ 1\], got \[0\]"),
        ((q, q, q, offsets), {"backend": "cuda"}, ValueError, r"backend: got 'cuda'"),
        ((*[q.double()] * 3, offsets), {"backend": "triton"}, TypeError, r"backend='triton': .* float64"),
    ]
    for arguments, options, error, message in cases:
        with pytest.raises(error, match=message):
            jagged_attention(*arguments, **options)  # type: ignore[arg-type]
    if place.name == "cpu":
        with pytest.raises(ValueError, match="backend='triton': needs CUDA tensors"):
            jagged_attention(q, q, q, offsets, backend="triton")
    monkeypatch.setenv("JAGGED_VALIDATE", "1")
    with pytest.raises(ValueError, match=r"offsets\[1\]: expected 3, the number of rows, got 2"):
        jagged_attention(q, q, q, offsets - torch.tensor([0, 1], device=place.device), backend=place.backend)


@ON_GPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_synchronisation_and_graph_capture(place: Place, dtype: torch.dtype) -> None:
    """Captured once; replayed with lengths going down, then up."""
    leaves = [x.requires_grad_() for x in inputs_of(jagged_of((200,)), 2, 32, dtype)]
    offsets = jagged_of((100, 0, 100)).offsets

    def step() -> list[Tensor]:
        output = jagged_attention(*leaves, offsets, causal=True)
        return [output, *torch.autograd.grad(output.square().sum(), leaves)]

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for lengths in ((100, 0, 100), (200, 0, 0), (1, 2, 197), (0, 0, 200), (64, 128, 8)):
        offsets.copy_(jagged_of(lengths).offsets)
        graph.replay()
        for got, want in zip(captured, step(), strict=True):
            assert torch.equal(got, want)


@ON_GPU
def test_addresses_past_2_to_the_31(place: Place) -> None:
    """A fused projection of more than 2^31 elements; its last sample alone gives the same, gradients too."""
    total, heads, head_dim = 2**20 + 37, 8, 128
    fused = torch.empty(total, 3, heads, head_dim, dtype=torch.bfloat16, device=place.device).normal_()
    assert fused.numel() > 2**31
    lengths = torch.full((total // 64,), 64)
    last = total - 64 * (total // 64 - 1)
    lengths[-1] = last
    offsets = torch.zeros(lengths.shape[0] + 1, dtype=torch.int64)
    offsets[1:] = lengths.cumsum(0)
    fused.requires_grad_()
    output = jagged_attention(*fused.unbind(1), offsets.to(place.device), causal=True)
    (grad,) = torch.autograd.grad(output, fused, torch.ones_like(output))
    tail = fused.detach()[-last:].clone().requires_grad_()
    check_three_way(
        lambda x: jagged_attention(*x.unbind(1), jagged_of((last,)).offsets, causal=True),
        lambda x: padded_attention(*x.unbind(1), jagged_of((last,)).offsets, causal=True),
        [tail],
    )
    alone = jagged_attention(*tail.unbind(1), jagged_of((last,)).offsets, causal=True)
    (grad_alone,) = torch.autograd.grad(alone, tail, torch.ones_like(alone))
    torch.testing.assert_close(output[-last:], alone, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(grad[-last:], grad_alone, rtol=2e-2, atol=2e-2)


@ON_GPU
def test_memory_follows_the_rows(place: Place) -> None:
    """Twice the rows in samples twice as long takes twice the memory, not four times."""
    peaks = []
    for rows in (8_192, 16_384):
        batch = jagged_of((rows, rows))
        leaves = [x.requires_grad_() for x in inputs_of(batch, 2, 64, torch.bfloat16)]
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        output = jagged_attention(*leaves, batch.offsets)
        torch.autograd.grad(output, leaves, torch.ones_like(output))
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del output, leaves
    assert peaks[1] < 2.1 * peaks[0]
