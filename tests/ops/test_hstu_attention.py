"""HSTU's pointwise attention against a padded one in float64, in every place; and what that cannot show."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from jagged.ops import jagged_hstu_attention, pair_offsets
from jagged.ops.attention import torch_impl
from jagged.ops.attention.spec import Inputs, Options
from tests.graphs import captured
from tests.ops.test_attention import MASKS, WIDTHS, Case, cases, inputs_of, projected
from tests.ops.test_attention_biases import SMALL_BATCHES, expanded, num_pairs, random_times, terms, with_more_heads
from tests.oracle import check_three_way
from tests.places import PLACE, Place
from tests.reference.attention import padded_hstu_attention, visible_keys
from tests.strategies import Jagged, jagged_of, random_tensor

ON_GPU = pytest.mark.gpu
HEAD_DIMS = [7, 16] if PLACE.name == "interpret" else [1, 7, 16, 48, 64, 100, 128, 256]


def functions(
    place: Place, batch: Jagged, names: list[str], keys: Jagged | None = None, **options: object
) -> tuple[Callable[..., Tensor], ...]:
    """Return ours and the reference, as functions of q, k, v and the biases that are named."""
    sides = batch.offsets, None if keys is None else keys.offsets

    def ours(q: Tensor, k: Tensor, v: Tensor, *biases: Tensor) -> Tensor:
        named = expanded(dict(zip(names, biases, strict=True)), batch)
        backend = place.backend if q.dtype != torch.float64 else "torch"
        return jagged_hstu_attention(q, k, v, *sides, backend=backend, **named, **options)  # type: ignore[arg-type]

    def reference(q: Tensor, k: Tensor, v: Tensor, *biases: Tensor) -> Tensor:
        named = expanded(dict(zip(names, biases, strict=True)), batch)
        return padded_hstu_attention(q, k, v, *sides, **named, **options)  # type: ignore[arg-type]

    return ours, reference


def check(place: Place, batch: Jagged, inputs: list[Tensor], biases: dict[str, Tensor] | None = None, **options: object) -> None:
    ours, reference = functions(place, batch, list(biases or {}), **options)
    check_three_way(ours, reference, [*inputs, *(biases or {}).values()])


@st.composite
def calls(
    draw: st.DrawFn, dtype: torch.dtype, bias_dtype: torch.dtype | None = None
) -> tuple[Case, dict[str, Tensor], dict[str, object]]:
    """Return queries, keys and values, of the same rows or of others, biases, and all other options."""
    case = with_more_heads(draw(cases(dtype, None, HEAD_DIMS, batches=SMALL_BATCHES)))
    biases, others = draw(terms(case, bias_dtype))
    names = {"q_times": "times", "k_times": "k_times"}
    others = {names[name]: value for name, value in others.items() if name in names}
    return case, biases, {**case.options, **others, "normalizer": draw(st.sampled_from([None, 0.5, 100.0]))}


@pytest.mark.parametrize("dtype", PLACE.dtypes, ids=str)
@settings(max_examples=-(-settings().max_examples // (2 * len(PLACE.dtypes) if PLACE.name == "interpret" else len(PLACE.dtypes))))
@given(st.data())
def test_three_way(place: Place, dtype: torch.dtype, data: st.DataObject) -> None:
    case, biases, options = data.draw(calls(dtype))
    wanted = data.draw(st.lists(st.booleans(), min_size=3 + len(biases), max_size=3 + len(biases)))
    ours, reference = functions(place, case.queries, list(biases), case.keys, **options)
    check_three_way(ours, reference, [*case.inputs(), *biases.values()], requires_grad=wanted)


@pytest.mark.skipif(PLACE.name != "cpu", reason="the PyTorch implementation's own chunks, and dtype")
@given(calls(torch.float64, torch.float64), st.integers(1, 3_000))
def test_float64_in_chunks_of_any_size(place: Place, call: tuple[Case, dict[str, Tensor], dict[str, object]], chunk: int) -> None:
    case, biases, options = call
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_impl, "_CHUNK_SCORES", chunk)
        check_three_way(*functions(place, case.queries, list(biases), case.keys, **options), [*case.inputs(), *biases.values()])


@pytest.mark.skipif(PLACE.name != "cpu", reason="float64 finite differences are the CPU's work")
@pytest.mark.parametrize("mask", [MASKS[0], MASKS[1], MASKS[-1]], ids=str)
def test_gradcheck(place: Place, mask: dict[str, object]) -> None:
    batch = jagged_of((3, 0, 5))
    rows = Case(batch, None, 1, 2, 3, torch.float64, 0, {}, 4).inputs()
    biases = [random_tensor(shape, torch.float64, 5) for shape in ((2, 5), (2, 20), (2, num_pairs(batch, None)))]
    options = {"times": random_times(batch.total, 0, 20), **mask}
    ours, _ = functions(place, batch, ["relative_bias", "time_bias", "bias"], **options)
    assert torch.autograd.gradcheck(ours, [x.requires_grad_() for x in (*rows, *biases)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_tile_boundary(place: Place, dtype: torch.dtype) -> None:
    lengths = (31, 0, 32, 33, 1, 65, 1, 2) if dtype == torch.float32 else (63, 64, 65, 129, 1)
    batch = jagged_of(lengths if place.name != "interpret" else lengths[1:4])
    for number, mask in enumerate(MASKS):
        if place.name != "interpret" or number in (1, 9, 10):
            check(place, batch, Case(batch, None, 1, 1 + number % 2, 16, dtype, 0, {}).inputs(), **mask)


@pytest.mark.parametrize("head_dim", [16, 64, 128, 256] if PLACE.name == "gpu" else [64])
def test_tiles_of_longer_samples(place: Place, head_dim: int) -> None:
    batch = jagged_of((300, 0, 97, 130) if place.name != "interpret" else (90, 0, 33))
    for number, mask in enumerate(MASKS if place.name == "gpu" else MASKS[1:2]):
        dtype = (torch.bfloat16, torch.float16)[number % 2]
        check(place, batch, inputs_of(batch, 1, head_dim, dtype), **mask)


@pytest.mark.parametrize(("head_dim", "value_dim"), WIDTHS if PLACE.name != "interpret" else [(16, 40), (40, 7)])
def test_values_of_another_width(place: Place, head_dim: int, value_dim: int) -> None:
    """In place from a projection, alone and with biases by distance and by time."""
    lengths = [(31, 0, 33, 1), (90, 0, 97, 60), (300, 0, 97, 130)] if place.name != "interpret" else [(18, 0, 33, 1)]
    for number, of in enumerate(lengths):
        batch, dtype = jagged_of(of), (torch.float32, torch.bfloat16, torch.float16)[number]
        inputs = projected(batch, 2, head_dim, value_dim, dtype)
        check(place, batch, inputs, num_targets=2)
        biases = {
            "relative_bias": random_tensor((2, 41), torch.float32, 1),
            "time_bias": random_tensor((2, 40), torch.float32, 2),
        }
        check(place, batch, inputs, biases, times=random_times(batch.total, 0, 30))


@pytest.mark.parametrize("kind", ["relative_bias", "time_bias"])
def test_biases_that_whole_tiles_have_alike(place: Place, kind: str) -> None:
    """Beyond the table's last distance, and times of one bucket."""
    batch = jagged_of((90, 0, 33))
    bias = random_tensor((1, 5 if kind == "relative_bias" else 50), torch.float32, 1)
    times = torch.arange(batch.total) // 32 * 5 * 2**18
    options = {"times": times.to(place.device)} if kind == "time_bias" else {}
    check(place, batch, Case(batch, None, 1, 1, 8, torch.float32, 0, {}).inputs(), {kind: bias}, **options)


@pytest.mark.parametrize("lowest", [torch.finfo(torch.float32).min, -1e38])
def test_biases_that_hide(place: Place, lowest: float) -> None:
    """A bias of the least number hides a key, though over the scale it would overflow."""
    batch = jagged_of((70, 3))
    q, k, v = Case(batch, None, 1, 1, 16, torch.float32, 0, {}).inputs()
    bias = torch.zeros(2, 1, 70, 70, device=place.device)
    bias[0, :, :, :35] = lowest
    output = jagged_hstu_attention(q, k, v, batch.offsets, bias=bias, normalizer=1, backend=place.backend)
    of_seen = (x[35:70] for x in (q, k, v))
    expected = jagged_hstu_attention(*of_seen, batch.offsets[:2].clamp(max=35), normalizer=1, backend=place.backend)
    torch.testing.assert_close(output[35:70], expected)
    assert not output[:35].any()


def test_it_is_what_the_paper_says(place: Place) -> None:
    """One sample, no mask: SiLU of the scores, divided by the number of rows or by what is given."""
    batch = jagged_of((6, 0))
    q, k, v = inputs_of(batch, 2, 8, torch.float32)
    weights = F.silu(torch.einsum("ihd,jhd->hij", q, k) / 8**0.5)
    expected = torch.einsum("hij,jhd->ihd", weights, v)
    whole = jagged_hstu_attention(q, k, v, batch.offsets, causal=False, backend=place.backend)
    torch.testing.assert_close(whole, expected / 6)
    for normalizer in (10, 0.25):
        ours = jagged_hstu_attention(q, k, v, batch.offsets, causal=False, normalizer=normalizer, backend=place.backend)
        torch.testing.assert_close(ours, expected / normalizer)
    # By default it is causal.
    expected = torch.einsum("hij,jhd->ihd", weights.tril(), v) / 6
    torch.testing.assert_close(jagged_hstu_attention(q, k, v, batch.offsets, backend=place.backend), expected)


@pytest.mark.parametrize("dtype", PLACE.dtypes, ids=str)
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_scores_of_ten_thousand(place: Place, dtype: torch.dtype, sign: float) -> None:
    """A weight is then its score or nothing, and so is its gradient."""
    batch = jagged_of((37, 0, 1))
    q, k, v = inputs_of(batch, 2, 8, dtype)
    q[..., 0], k[..., 0] = 128.0 * sign, 80.0
    if sign > 0:
        check(place, batch, [q, k, v / 64], scale=1.0)
        return
    leaves = [x.requires_grad_() for x in (q, k, v, random_tensor((2, 5), torch.float32, 0))]
    output = jagged_hstu_attention(*leaves[:3], batch.offsets, scale=1.0, relative_bias=leaves[3], backend=place.backend)
    for result in (output, *torch.autograd.grad(output, leaves, torch.ones_like(output))):
        assert not result.any()


@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_a_scale_that_is_not_positive(place: Place, scale: float) -> None:
    batch = jagged_of((20, 0, 3))
    q, k, v = inputs_of(batch, 2, 8, torch.float32)
    biases = {"relative_bias": random_tensor((2, 9), torch.float32, 1), "bias": random_tensor((3, 2, 15, 15), torch.float32, 2)}
    ours, reference = functions(place, batch, list(biases), scale=scale)
    wanted = [scale != 0, scale != 0, True, True, True]
    check_three_way(ours, reference, [q, k, v, *biases.values()], requires_grad=wanted)


def test_slices_of_a_fused_projection_and_other_strides(place: Place) -> None:
    batch = jagged_of((3, 0, 40, 1))
    check(place, batch, list(random_tensor((batch.total, 3, 2, 24), torch.float32, 5).unbind(1)))
    heads_first = random_tensor((2, batch.total, 24), torch.float32, 5).transpose(0, 1)
    gaps = random_tensor((batch.total, 2, 24), torch.float32, 6, strided=True)
    width_first = random_tensor((24, batch.total, 2), torch.float32, 7).permute(1, 2, 0)
    check(place, batch, [heads_first, gaps, width_first])


@pytest.mark.parametrize("mask", MASKS[1:], ids=str)
def test_hidden_keys_change_nothing(place: Place, mask: dict[str, object]) -> None:
    """Bit for bit, for the first, a middle and the last row; nor do their biases, which get no gradient."""
    options = {"causal": False, **mask}
    batch = jagged_of((33,))
    q, k, v = inputs_of(batch, 1, 16, torch.float32)
    (visible,) = visible_keys(batch.offsets.diff(), batch.offsets.diff(), **mask)  # type: ignore[arg-type]
    bias = random_tensor((1, 1, 33, 33), torch.float32, 1).requires_grad_()
    before = jagged_hstu_attention(q, k, v, batch.offsets, bias=bias, backend=place.backend, **options)  # type: ignore[arg-type]
    (grad,) = torch.autograd.grad(before, bias, torch.ones_like(before))
    assert not grad[0, 0, ~visible].any()
    assert grad[0, 0, visible].all()
    for row in (0, 16, 32):
        hidden = ~visible[row, :, None, None]
        other_k, other_v = torch.where(hidden, -2 * k, k), torch.where(hidden, -2 * v, v)
        other_bias = torch.where(visible, bias, 100.0)
        after = jagged_hstu_attention(
            q, other_k, other_v, batch.offsets, bias=other_bias, backend=place.backend, **options  # type: ignore[arg-type]
        )  # fmt: skip
        assert torch.equal(before[row], after[row])
        assert torch.equal(before, after) == (not hidden.any())


def test_rows_see_their_own_sample_alone(place: Place) -> None:
    batch = jagged_of((20, 33, 7))
    inputs = inputs_of(batch, 2, 16, torch.float32)
    before = jagged_hstu_attention(*inputs, batch.offsets, causal=False, backend=place.backend)
    changed = [x.clone() for x in inputs]
    for x in changed:
        x[20:53] *= -3.0
    after = jagged_hstu_attention(*changed, batch.offsets, causal=False, backend=place.backend)
    assert torch.equal(before[:20], after[:20])
    assert torch.equal(before[53:], after[53:])
    assert not torch.equal(before[20:53], after[20:53])


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0, 0)])
def test_batches_without_rows(place: Place, lengths: tuple[int, ...]) -> None:
    batch = jagged_of(lengths)
    biases = [random_tensor(shape, torch.float16, 1) for shape in ((2, 5), (2, 8), (2, 0))]
    leaves = [x.requires_grad_() for x in (*inputs_of(batch, 2, 8, torch.float32), *biases)]
    ours, _ = functions(place, batch, ["relative_bias", "time_bias", "bias"], times=random_times(0, 0, 3))
    output = ours(*leaves)
    assert output.shape == (0, 2, 8)
    for grad, leaf in zip(torch.autograd.grad(output, leaves, output), leaves, strict=True):
        assert (grad.shape, grad.dtype) == (leaf.shape, leaf.dtype)
        assert not grad.any()


def test_gradients_are_deterministic(place: Place) -> None:
    batch = jagged_of((70, 0, 130, 3) if place.name != "interpret" else (5, 0, 20))
    shapes = {"relative_bias": (4, 33), "time_bias": (4, 64), "bias": (batch.batch_size, 4, 90, 90)}
    biases = [random_tensor(shape, torch.float32, 1) for shape in shapes.values()]
    leaves = [x.requires_grad_() for x in (*Case(batch, None, 2, 2, 16, torch.float32, 0, {}).inputs(), *biases)]
    ours, _ = functions(place, batch, list(shapes), times=random_times(batch.total, 0, 20))
    cotangent = random_tensor((batch.total, 4, 16), torch.float32, 2)
    runs = [torch.autograd.grad(ours(*leaves), leaves, cotangent) for _ in range(2)]
    for first, second in zip(*runs, strict=True):
        assert first.any()
        assert torch.equal(first, second)


def test_autocast_leaves_biases_alone(place: Place) -> None:
    batch = jagged_of((6, 0, 20))
    # Not a number of bfloat16.
    table = (torch.arange(9.0, device=place.device)[None].repeat(2, 1) / 3).requires_grad_()
    inputs = inputs_of(batch, 2, 8, torch.float32)
    with torch.autocast(place.device.type, dtype=torch.bfloat16):
        output = jagged_hstu_attention(*inputs, batch.offsets, relative_bias=table, backend=place.backend)
    low = [x.bfloat16() for x in inputs]
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, jagged_hstu_attention(*low, batch.offsets, relative_bias=table, backend=place.backend))
    assert torch.autograd.grad(output.sum(), table)[0].dtype == torch.float32


def test_second_derivatives_are_refused(place: Place) -> None:
    batch = jagged_of((3, 2))
    q, k, v = (x.requires_grad_() for x in inputs_of(batch, 1, 4, torch.float32))
    output = jagged_hstu_attention(q, k, v, batch.offsets, backend=place.backend)
    (grad,) = torch.autograd.grad(output.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="jagged_hstu_attention has no second derivative"):
        grad.sum().backward()


def test_opcheck(place: Place) -> None:
    batch = jagged_of((2, 0, 3))
    q, k, v = Case(batch, None, 1, 2, 4, torch.bfloat16, 0, {}).inputs()
    bias, starts = random_tensor((2, 13), torch.float16, 1), pair_offsets(batch.offsets)
    times = random_times(batch.total, 0, 9)
    tables = random_tensor((2, 5), torch.float32, 2), random_tensor((2, 8), torch.bfloat16, 3)
    forward, backward = torch.ops.jagged.attention.default, torch.ops.jagged.attention_backward.default
    x = Inputs(q, k, v, batch.offsets, None, None, *tables, times, None, bias, starts)
    o = Options(causal=True, scale=0.5, pointwise=True)
    torch.library.opcheck(forward, (*x, *o, place.backend))
    output, lse = forward(*x, *o, place.backend)
    assert (lse.shape, lse.dtype) == ((0,), torch.float32)
    dtypes = (*[x.q.dtype] * 3, *(table.dtype for table in tables), None)
    torch.library.opcheck(backward, (torch.ones_like(output), None, *x, None, None, *o, *dtypes, place.backend))


def test_meta_tensors_have_shapes(place: Place) -> None:
    offsets = torch.empty(3, dtype=torch.int64, device="meta")
    q, k, v = (torch.empty(5, heads, 8, device="meta", requires_grad=True) for heads in (6, 2, 2))
    table = torch.empty(6, 3, device="meta", requires_grad=True)
    output = jagged_hstu_attention(q, k, v, offsets, relative_bias=table, num_targets=1)
    output.sum().backward()
    assert output.shape == (5, 6, 8)
    assert k.grad is not None
    assert k.grad.shape == k.shape
    assert table.grad is not None
    assert table.grad.shape == table.shape


@pytest.mark.skipif(PLACE.name == "interpret", reason="interpreted kernels are not compiled")
def test_one_graph_for_all_jagged_shapes(place: Place) -> None:
    graphs = 0

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        nonlocal graphs
        graphs += 1
        return graph.forward

    def function(offsets: Tensor, times: Tensor, q: Tensor, k: Tensor, v: Tensor, *biases: Tensor) -> Tensor:
        relative, time, pairs = biases
        output = jagged_hstu_attention(q, k, v, offsets, relative_bias=relative, time_bias=time, times=times, bias=pairs)
        return output * 2 + jagged_hstu_attention(q, k, v, offsets, num_targets=1, window=3, normalizer=7.0)

    torch._dynamo.reset()
    one_graph = torch.compile(function, fullgraph=True, dynamic=True, backend=count)
    traced = torch.compile(function, fullgraph=True, dynamic=True, backend="inductor" if place.name == "gpu" else "aot_eager")
    # Sizes that are equal by chance in the first call would be taken to be equal in all.
    for lengths in ((2, 4, 3, 1), (5, 0, 9), (0, 7), (30, 2, 2, 2, 2)):
        batch = jagged_of(lengths)
        rows = Case(batch, None, 3, 2, 12, torch.float32, 0, {}).inputs()
        biases = [random_tensor(shape, torch.float32, 1) for shape in ((6, 35), (6, 40), (6, num_pairs(batch, None)))]
        leaves = [x.requires_grad_() for x in (*rows, *biases)]
        fixed = batch.offsets, random_times(batch.total, 0, 20)
        expected = function(*fixed, *leaves)
        wanted = torch.autograd.grad(expected.square().sum(), leaves)
        for compiled in (one_graph, traced):
            ours = compiled(*fixed, *leaves)
            torch.testing.assert_close(ours, expected, rtol=0, atol=0)
            for got, want in zip(torch.autograd.grad(ours.square().sum(), leaves), wanted, strict=True):
                torch.testing.assert_close(got, want)
    assert graphs == 1


@pytest.mark.skipif(PLACE.name == "interpret", reason="interpreted kernels are not compiled")
def test_one_graph_for_keys_of_their_own(place: Place) -> None:
    """Queries are the last rows of longer samples, as behind a cache."""
    graphs = 0

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        nonlocal graphs
        graphs += 1
        return graph.forward

    def function(*x: Tensor) -> Tensor:
        q, k, v, offsets, k_offsets, time_bias, times, k_times = x
        return jagged_hstu_attention(
            q, k, v, offsets, k_offsets, num_targets=1, normalizer=7.0, time_bias=time_bias, times=times, k_times=k_times
        )

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=count)
    for lengths, earlier in (((2, 4, 3, 1), (5, 0, 2, 7)), ((1, 0, 9), (8, 6, 3)), ((0, 7), (2, 40))):
        batch, keys = jagged_of(lengths), jagged_of(tuple(map(sum, zip(lengths, earlier, strict=True))))
        rows = Case(batch, keys, 3, 2, 12, torch.float32, 0, {}).inputs()
        of_time = random_tensor((6, 40), torch.float32, 1), random_times(batch.total, 0, 20), random_times(keys.total, 1, 20)
        x = (*rows, batch.offsets, keys.offsets, *of_time)
        torch.testing.assert_close(compiled(*x), function(*x), rtol=0, atol=0)
    assert graphs == 1


def test_keys_of_other_samples_are_refused(place: Place) -> None:
    q, k = torch.zeros(3, 2, 4, device=place.device), torch.zeros(5, 2, 4, device=place.device)
    offsets, k_offsets = (torch.tensor(of, device=place.device) for of in ([0, 1, 3], [0, 5]))
    with pytest.raises(ValueError, match=r"^k_offsets: expected \[3\] as offsets, got \[2\]$"):
        jagged_hstu_attention(q, k, k, offsets, k_offsets)
    with pytest.raises(ValueError, match=r"^k: expected the 3 rows of q, got 5; for keys of other lengths give their k_offsets$"):
        jagged_hstu_attention(q, k, k, offsets)


@pytest.mark.usefixtures("unchecked")
def test_messages_name_argument_and_cure(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.zeros(3, 2, 4, device=place.device)
    offsets = torch.tensor([0, 3], device=place.device)
    table, times = torch.zeros(2, 3, device=place.device), torch.zeros(3, dtype=torch.int64, device=place.device)
    cases: list[tuple[tuple[object, ...], dict[str, object], type[Exception], str]] = [
        ((q[0], q, q, offsets), {}, ValueError, r"q: expected shape \[Sq, H, D\], got \[2, 4\]"),
        ((q, q[:2], q[:2], offsets), {}, ValueError, r"k: expected the 3 rows of q, got 2"),
        ((q, q, q, offsets.float()), {}, TypeError, r"offsets: expected dtype int32, int64, got float32"),
        ((q, q, q, offsets), {"normalizer": 0}, ValueError, r"normalizer: expected above 0, got 0; use None"),
        ((q, q, q, offsets), {"normalizer": -1.0}, ValueError, r"normalizer: expected above 0, got -1.0"),
        ((q, q, q, offsets), {"normalizer": float("nan")}, ValueError, r"normalizer: expected above 0, got nan"),
        ((q, q, q, offsets), {"window": 0}, ValueError, r"window: expected 1 or more"),
        ((q, q, q, offsets), {"num_targets": -1}, ValueError, r"num_targets: expected 0 or more, got -1"),
        ((q, q, q, offsets), {"time_bias": table}, ValueError, r"times: expected \[3\] beside time_bias, got None"),
        ((q, q, q, offsets), {"times": times}, ValueError, r"times: got times, but no time_bias that reads them"),
        ((q, q, q, offsets), {"relative_bias": table[:, :2]}, ValueError, r"relative_bias: expected an odd number of columns"),
        ((q, q, q, offsets), {"bias": table[0]}, ValueError, r"bias: expected a dense .* or a jagged \[H, P\], got \[3\]"),
        ((q, q, q, offsets), {"backend": "cuda"}, ValueError, r"backend: got 'cuda'"),
    ]
    for arguments, options, error, message in cases:
        with pytest.raises(error, match=f"^{message}"):
            jagged_hstu_attention(*arguments, **options)  # type: ignore[arg-type]
    monkeypatch.setenv("JAGGED_VALIDATE", "1")
    with pytest.raises(ValueError, match=r"^offsets\[1\]: expected 3, the number of rows, got 2"):
        jagged_hstu_attention(q, q, q, torch.tensor([0, 2], device=place.device), backend=place.backend)


@ON_GPU
def test_no_synchronisation_and_graph_capture(place: Place) -> None:
    """Captured once; replayed with other lengths and times."""
    total = 200
    shapes = (2, 33), (2, 40), (2, total**2)
    biases = [random_tensor(shape, torch.float32, 1) for shape in shapes]
    leaves = [x.requires_grad_() for x in (*inputs_of(jagged_of((total,)), 2, 32, torch.bfloat16), *biases)]
    offsets, times = jagged_of((100, 0, 100)).offsets, random_times(total, 0, 30)

    def step() -> list[Tensor]:
        output = jagged_hstu_attention(
            *leaves[:3], offsets, relative_bias=leaves[3], time_bias=leaves[4], times=times, bias=leaves[5], num_targets=2
        )
        return [output.detach(), *torch.autograd.grad(output, leaves, output.detach())]

    graph, results = captured(step)
    for number, lengths in enumerate(((100, 0, 100), (200, 0, 0), (1, 2, 197), (0, 0, 200), (64, 128, 8))):
        offsets.copy_(jagged_of(lengths).offsets)
        times.copy_(random_times(total, number, 40))
        graph.replay()
        for got, want in zip(results, step(), strict=True):
            assert torch.equal(got, want)
