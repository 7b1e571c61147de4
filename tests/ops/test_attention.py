"""Jagged attention against padded attention in float64, in every place; and everything the padded one cannot show."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from jagged.ops import jagged_attention, jagged_hstu_attention
from jagged.ops.attention import hopper, torch_impl
from jagged.ops.attention.spec import Inputs, Options
from jagged.ops.attention.triton.configurations import TABLE, configuration
from tests.graphs import captured
from tests.oracle import check_three_way
from tests.places import PLACE, Place
from tests.reference.attention import padded_attention, visible_keys
from tests.strategies import Jagged, jagged_batches, jagged_of, random_tensor, seeds

ON_GPU = pytest.mark.gpu
BATCHES = jagged_batches()
HEADS = st.integers(1, 2 if PLACE.name == "interpret" else 3)
HEAD_DIMS = ([1, 2, 7, 16, 31, 32, 48], [64, 96, 100, 127, 128], [129, 192, 255, 256])
# In self-attention and across; a window of one row would leave the reference nothing to err about.
MASKS: list[dict[str, object]] = [
    {},
    {"causal": True},
    {"window": 2},
    {"window": 17, "causal": True},
    {"num_targets": 3},
    {"num_targets": 3, "causal": True},
    {"num_targets": 5, "window": 9},
    {"num_contextual": 2, "causal": True},
    {"num_contextual": 3, "window": 4},
    {"global_prefix": 5, "window": 3, "causal": True},
    {"global_prefix": 18, "num_contextual": 3, "window": 4, "causal": True, "num_targets": 2},
    {"num_contextual": 3, "window": 4, "causal": True, "num_targets": 2},
    {"window": (12, 3), "num_targets": 2},
    {"window": (None, 6), "num_contextual": 3},
    {"num_contextual": 9, "window": 20, "causal": True, "windowed_context": True, "num_targets": 2},
    {"num_contextual": 5, "window": (9, 2), "windowed_context": True},
]


@dataclass(frozen=True)
class Case:
    """Queries and keys, heads of which `group` share a key head, and a call's options; None for values as wide as keys."""

    queries: Jagged
    keys: Jagged | None
    heads: int
    group: int
    head_dim: int
    dtype: torch.dtype
    seed: int
    options: dict[str, object]
    value_dim: int | None = None

    def inputs(self) -> list[Tensor]:
        keys = self.queries if self.keys is None else self.keys
        rows = (self.queries.total, self.heads * self.group), *[(keys.total, self.heads)] * 2
        widths = self.head_dim, self.head_dim, self.value_dim or self.head_dim
        shapes = [(*of, width) for of, width in zip(rows, widths, strict=True)]
        return [random_tensor(shape, self.dtype, self.seed + index) for index, shape in enumerate(shapes)]

    def offsets(self) -> tuple[Tensor, Tensor | None]:
        return self.queries.offsets, None if self.keys is None else self.keys.offsets


@st.composite
def cases(
    draw: st.DrawFn,
    dtype: torch.dtype,
    across: bool | None = None,
    head_dims: list[int] = HEAD_DIMS[0],
    shortest_window: int = 1,
    batches: st.SearchStrategy[Jagged] = BATCHES,
) -> Case:
    queries, group = draw(batches), draw(HEADS)
    keys = None
    # The yardstick is a largest error. Over few elements it may be nothing by luck, and the gradients of queries that see one key
    # are exactly nothing in the reference: every batch gets one sample that is neither, and a small one more heads.
    if across if across is not None else draw(st.booleans()):
        longest = max(queries.lengths, default=0) + 9
        lengths = draw(st.lists(st.integers(0, longest), min_size=queries.batch_size, max_size=queries.batch_size))
        keys = jagged_of((*lengths, 7), queries.offsets.dtype)
    queries = jagged_of((*queries.lengths, 5), queries.offsets.dtype)
    head_dim = draw(st.sampled_from(head_dims))
    value_dim = draw(st.none() | st.sampled_from(head_dims))
    ragged = st.lists(st.integers(-1, 12), min_size=queries.batch_size - 1, max_size=queries.batch_size - 1)
    sides = st.tuples(st.none() | st.integers(shortest_window - 1, 40), st.none() | st.integers(0, 40))
    window = draw(st.none() | st.integers(shortest_window, 40) | sides)
    options: dict[str, object] = {
        "causal": draw(st.booleans()),
        "window": window,
        "num_targets": draw(
            st.none()
            | st.integers(0, 3)
            | ragged.map(lambda each: torch.tensor([*each, 2], dtype=queries.offsets.dtype, device=PLACE.device))
        ),
        "num_contextual": draw(st.just(0) | st.integers(0, 20)),
        # Scores of order one: where one key has all the weight, the reference has nothing to err about either.
        "scale": draw(st.sampled_from([None, 2 / head_dim**0.5, -(head_dim**-0.5)])),
    }
    left, right = window if isinstance(window, tuple) else (window, window)
    if left is not None or (right is not None and not options["causal"]):
        options["windowed_context"] = bool(options["num_contextual"]) and draw(st.booleans())
        if options["causal"] and not options["windowed_context"]:
            options["global_prefix"] = draw(st.integers(0, 40))
    heads = draw(HEADS) + 512 // (min(head_dim, value_dim or head_dim) * queries.total * group)
    return Case(queries, keys, heads, group, head_dim, dtype, draw(seeds()), options, value_dim)


def inputs_of(batch: Jagged, heads: int, head_dim: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    return Case(batch, None, heads, 1, head_dim, dtype, seed, {}).inputs()


def output_and_lse(output: Tensor, lse: Tensor) -> Tensor:
    """One tensor whose gradient reaches both; minus infinity, which has no error, becomes a number."""
    return torch.cat([output.flatten(1), lse.t().masked_fill(lse.t() == -torch.inf, -1e3)], 1)


def check(
    place: Place,
    batch: Jagged,
    inputs: list[Tensor],
    keys: Jagged | None = None,
    *,
    wanted: list[bool] | None = None,
    return_lse: bool = False,
    **options: object,
) -> None:
    offsets = batch.offsets, None if keys is None else keys.offsets

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result = jagged_attention(q, k, v, *offsets, return_lse=return_lse, backend=place.backend, **options)  # type: ignore[call-overload]
        return output_and_lse(*result) if return_lse else result

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result = padded_attention(q, k, v, *offsets, **options)  # type: ignore[arg-type]
        return output_and_lse(*result) if return_lse else result[0]

    check_three_way(ours, reference, inputs, requires_grad=wanted)


def output_and_gradients(
    place: Place, batch: Jagged, inputs: list[Tensor], keys: Jagged | None = None, **options: object
) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    offsets = batch.offsets, None if keys is None else keys.offsets
    output = jagged_attention(*leaves, *offsets, backend=place.backend, **options)  # type: ignore[call-overload]
    return [output.detach(), *torch.autograd.grad(output, leaves, random_tensor(tuple(output.shape), output.dtype, 99))]


# In parts that run side by side: on a GPU it is compilation that takes the time.
PARTS = [(dtype, across, head_dims) for dtype in PLACE.dtypes for across in (False, True) for head_dims in HEAD_DIMS]


@pytest.mark.parametrize(("dtype", "across", "head_dims"), PARTS, ids=str)
@settings(max_examples=-(-settings().max_examples // len(PARTS)))
@given(st.data())
def test_three_way(place: Place, dtype: torch.dtype, across: bool, head_dims: list[int], data: st.DataObject) -> None:
    case = data.draw(cases(dtype, across, head_dims, shortest_window=2))
    wanted, return_lse = data.draw(st.lists(st.booleans(), min_size=3, max_size=3)), data.draw(st.booleans())
    check(place, case.queries, case.inputs(), case.keys, wanted=wanted, return_lse=return_lse, **case.options)


@pytest.mark.parametrize("dtype", PLACE.dtypes[:1], ids=str)
@settings(max_examples=-(-settings().max_examples // 4))
@given(st.data())
def test_a_prefix_that_every_window_keeps(place: Place, dtype: torch.dtype, data: st.DataObject) -> None:
    case = data.draw(cases(dtype))
    options = {
        **case.options,
        "causal": True,
        "window": data.draw(st.integers(2, 9)),
        "windowed_context": False,
        "global_prefix": data.draw(st.integers(1, 40)),
    }
    check(place, case.queries, case.inputs(), case.keys, **options)


@pytest.mark.parametrize("row", [*TABLE, "rows of other widths"], ids=str)
def test_triton_can_make_every_tile(row: Any) -> None:
    """Interpreted kernels take tiles that a GPU's do not, and no number of warps at all."""
    of_others = [
        configuration(width, dtype, total, 1, allows_tma=False, value_dim=value_dim)
        for width, dtype, total in itertools.product((1, 20, 200), (torch.float16, torch.float32), (1, 64, 1_000))
        for value_dim in (None, 48)
    ]
    rows = [TABLE[row]] if row in TABLE else of_others
    for tiles in (tiles for of in rows for tiles in (of.forward, of.dq, of.dkv)):
        for number in (tiles.own, tiles.visit, tiles.num_warps):
            assert number > 0
            assert number & (number - 1) == 0
        assert min(tiles.own, tiles.visit) >= 16
        assert tiles.num_warps <= 8
        assert 1 <= tiles.num_stages <= 4
        assert tiles.max_registers is None or 64 <= tiles.max_registers <= 255


@pytest.mark.parametrize(
    ("mask", "dtype"),
    [
        (mask, dtype)
        for number, mask in enumerate(MASKS)
        for parity, dtype in enumerate((torch.float32, torch.bfloat16))
        # The interpreter is slow: there masks and dtypes take turns.
        if PLACE.name != "interpret" or number < 2 or number % 2 == parity
    ],
    ids=str,
)
def test_every_tile_boundary(place: Place, mask: dict[str, object], dtype: torch.dtype) -> None:
    """Lengths around the tiles of both configurations: a mean below their border, and one above; the same across."""
    short, long = jagged_of((31, 0, 32, 33, 1, 65, 1, 2)), jagged_of((63, 64, 65, 129, 1))
    for batch in (short, long):
        check(place, batch, inputs_of(batch, 1, 16, dtype), **mask)
    keys = jagged_of((65, 31, 0, 64, 33))
    check(place, long, Case(long, keys, 1, 2, 16, dtype, 0, {}).inputs(), keys, **mask)


@pytest.mark.parametrize("lengths", [(90, 0, 97, 60), (300, 0, 97, 130)], ids=["medium", "long"])
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256] if PLACE.name == "gpu" else [64])
def test_tiles_of_longer_samples(place: Place, head_dim: int, lengths: tuple[int, ...]) -> None:
    """Each mask by the tiles of batches of longer samples: as they are, grouped, across, and where rows begin anywhere."""
    batch = jagged_of(lengths)
    keys = jagged_of((lengths[1], lengths[0], *lengths[2:]))
    for number, mask in enumerate(MASKS if place.name == "gpu" else MASKS[1:2]):
        dtype = (torch.bfloat16, torch.float16)[number % 2]
        inputs = inputs_of(batch, 1, head_dim, dtype)
        check(place, batch, inputs, **mask)
        anywhere = [F.pad(x, (1, 0))[..., 1:] for x in inputs]
        check(place, batch, anywhere, return_lse=True, **mask)
        check(place, batch, Case(batch, keys, 1, 2, head_dim, dtype, 0, {}).inputs(), keys, **mask)


@pytest.mark.parametrize("causal", [False, True])
def test_slices_of_a_fused_projection_and_other_strides(place: Place, causal: bool) -> None:
    batch = jagged_of((3, 0, 40, 1))
    fused = random_tensor((batch.total, 3, 2, 24), torch.float32, 5)
    check(place, batch, list(fused.unbind(1)), causal=causal)
    heads_first = random_tensor((2, batch.total, 24), torch.float32, 5).transpose(0, 1)
    gaps = random_tensor((batch.total, 2, 24), torch.float32, 6, strided=True)
    width_first = random_tensor((24, batch.total, 2), torch.float32, 7).permute(1, 2, 0)
    check(place, batch, [heads_first, gaps, width_first], causal=causal)
    grouped = random_tensor((batch.total, 6 + 2 + 2, 24), torch.float32, 8)
    check(place, batch, list(grouped.split([6, 2, 2], 1)), causal=causal, return_lse=True)


def projected(batch: Jagged, heads: int, head_dim: int, value_dim: int, dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys and values of a width of their own as slices of one projection, each with its heads side by side."""
    widths = heads * head_dim, heads * head_dim, heads * value_dim
    parts = random_tensor((batch.total, sum(widths)), dtype, 5).split(widths, 1)
    return [part.unflatten(1, (heads, -1)) for part in parts]


# Keys of queries' width, and values: wider and narrower, of the least and the largest tiles, and where rows begin anywhere.
WIDTHS = [(64, 128), (128, 64), (32, 64), (16, 256), (256, 32), (7, 100), (96, 1)]


@pytest.mark.parametrize(("head_dim", "value_dim"), WIDTHS if PLACE.name != "interpret" else [(16, 40), (40, 7)])
def test_values_of_another_width(place: Place, head_dim: int, value_dim: int) -> None:
    """By the tiles of short, medium and long samples, in place from a projection; grouped heads, and keys of other rows."""
    lengths = [(31, 0, 33, 1), (90, 0, 97, 60), (300, 0, 97, 130)] if place.name != "interpret" else [(31, 0, 33, 1)]
    for number, of in enumerate(lengths):
        dtype = (torch.float32, torch.bfloat16, torch.float16)[number]
        batch, keys = jagged_of(of), jagged_of((of[1], of[0], *of[2:]))
        check(place, batch, projected(batch, 2, head_dim, value_dim, dtype), causal=True)
        grouped = Case(batch, keys, 1, 2, head_dim, dtype, 0, {}, value_dim).inputs()
        check(place, batch, grouped, keys, return_lse=True, window=20, num_targets=2)


def test_values_of_another_width_change_no_weight(place: Place) -> None:
    """Fewer columns of the values give as many of the output, and the same log-sum-exp."""
    batch = jagged_of((31, 0, 33, 1))
    q, k, v = inputs_of(batch, 2, 48, torch.float32)
    whole, whole_lse = jagged_attention(q, k, v, batch.offsets, causal=True, return_lse=True, backend=place.backend)
    for width in (1, 16, 40):
        fewer = v[..., :width]
        output, lse = jagged_attention(q, k, fewer, batch.offsets, causal=True, return_lse=True, backend=place.backend)
        assert output.is_contiguous()
        torch.testing.assert_close((output, lse), (whole[..., :width], whole_lse))


def test_a_gradient_of_log_sum_exp_alone_beside_wider_values(place: Place) -> None:
    batch = jagged_of((9, 0, 20))
    leaves = [x.requires_grad_() for x in Case(batch, None, 2, 1, 16, torch.float32, 0, {}, 40).inputs()]
    _, lse = jagged_attention(*leaves, batch.offsets, return_lse=True, backend=place.backend)
    _, expected = padded_attention(*leaves, batch.offsets)
    slope = random_tensor(tuple(lse.shape), torch.float32, 3)
    found, wanted = (torch.autograd.grad((of * slope).sum(), leaves, materialize_grads=True) for of in (lse, expected))
    torch.testing.assert_close(found, wanted)
    assert not found[2].any()


def test_kernels_for_hopper_leave_values_of_another_width(place: Place) -> None:
    rows = torch.zeros(300, 2, 128, dtype=torch.bfloat16, device=place.device)
    offsets = torch.tensor([0, 300], device=place.device)
    for pointwise in (False, True):
        reason = hopper.supports(Inputs(rows, rows, rows[..., :64], offsets), Options(causal=True, pointwise=pointwise))
        assert reason == "values are of another width than keys"


def test_offsets_and_targets_with_strides(place: Place) -> None:
    """A column of a table, and one number for all samples: views whose elements do not lie side by side."""
    batch, keys = jagged_of((5, 0, 9, 2)), jagged_of((7, 3, 11, 0))
    inputs = [x.requires_grad_() for x in Case(batch, keys, 1, 2, 16, torch.float32, 0, {}).inputs()]
    upstream = random_tensor(inputs[0].shape, torch.float32, 9)

    def results(*offsets: Tensor, num_targets: Tensor) -> list[Tensor]:
        output = jagged_attention(*inputs, *offsets, causal=True, num_targets=num_targets, backend=place.backend)
        return [output, *torch.autograd.grad(output, inputs, upstream)]

    table = torch.stack([batch.offsets, keys.offsets, torch.full_like(batch.offsets, 7)], 1)
    of_views = results(table[:, 0], table[:, 1], num_targets=torch.tensor([2], device=place.device).expand(4))
    expected = results(batch.offsets, keys.offsets, num_targets=torch.full((4,), 2, device=place.device))
    for got, want in zip(of_views, expected, strict=True):
        assert torch.equal(got, want)


def test_gradient_without_strides(place: Place) -> None:
    """The gradient of a sum is one number, expanded."""
    batch = jagged_of((3, 0, 20))
    q, k, v = (x.requires_grad_() for x in inputs_of(batch, 2, 8, torch.float32))
    ours = torch.autograd.grad(jagged_attention(q, k, v, batch.offsets, backend=place.backend).sum(), (q, k, v))
    exact = torch.autograd.grad(padded_attention(q.double(), k.double(), v.double(), batch.offsets)[0].sum(), (q, k, v))
    for got, want in zip(ours, exact, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", PLACE.dtypes)
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_scores_of_ten_thousand(place: Place, dtype: torch.dtype, causal: bool, sign: float) -> None:
    """Every score lies near `sign * 1e4`: finite, and the softmax of what is left is right."""
    batch = jagged_of((37, 0, 1, 90))
    q, k, v = inputs_of(batch, 2, 8, dtype)
    # Powers of two on the first column, so that it adds the same to every score without rounding any.
    q[..., 0], k[..., 0] = 128.0 * sign, 80.0
    check(place, batch, [q, k, v], causal=causal, scale=1.0)


@pytest.mark.parametrize("options", [{"window": 1}, {"window": 1, "causal": True}, {"num_targets": 100}], ids=str)
def test_rows_that_see_themselves_alone(place: Place, options: dict[str, object]) -> None:
    for lengths, chosen in (((1, 0, 1), {}), ((3, 0, 40), options)):
        batch = jagged_of(lengths)
        inputs = inputs_of(batch, 2, 7, torch.float32)
        output, grad_q, grad_k, grad_v = output_and_gradients(place, batch, inputs, **chosen)
        torch.testing.assert_close(output, inputs[2])
        torch.testing.assert_close(grad_v, random_tensor((batch.total, 2, 7), torch.float32, 99))
        torch.testing.assert_close(torch.stack([grad_q, grad_k]), torch.zeros(2, batch.total, 2, 7, device=place.device))


@pytest.mark.parametrize("lengths", [(4, 0, 1, 40), (0, 0, 0, 0)])
def test_queries_that_see_no_key(place: Place, lengths: tuple[int, ...]) -> None:
    """Output 0, log-sum-exp minus infinity, gradients 0; where keys are few, a causal mask hides them from the first queries."""
    batch, keys = jagged_of((3, 2, 35, 0)), jagged_of(lengths)
    leaves = [x.requires_grad_() for x in Case(batch, keys, 1, 2, 8, torch.float32, 0, {}).inputs()]
    for causal in (False, True):
        output, lse = jagged_attention(
            *leaves, batch.offsets, keys.offsets, causal=causal, return_lse=True, backend=place.backend
        )
        sees = visible_keys(batch.offsets.diff(), keys.offsets.diff(), causal=causal).any(-1)
        sees = torch.cat([each[:length] for each, length in zip(sees, batch.lengths, strict=True)])
        assert int((~sees).sum()) > 0
        assert not output[~sees].any()
        assert bool((lse.t()[~sees] == -torch.inf).all())
        assert torch.isfinite(lse.t()[sees]).all()
        grads = torch.autograd.grad((output, lse), leaves, (torch.ones_like(output), torch.ones_like(lse)))
        assert not grads[0][~sees].any()
        assert all(torch.isfinite(grad).all() for grad in grads)
        assert bool(grads[2].any()) == bool(sees.any())


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


@pytest.mark.parametrize("mask", MASKS[1:], ids=str)
def test_hidden_keys_change_nothing(place: Place, mask: dict[str, object]) -> None:
    """Bit for bit, for the first, a middle and the last row, in self-attention and where the keys are other rows."""
    for lengths, others in (((50,), None), ((20,), (45,))):
        batch, keys = jagged_of(lengths), None if others is None else jagged_of(others)
        q, k, v = Case(batch, keys, 1, 1, 16, torch.float32, 0, {}).inputs()
        offsets = batch.offsets, None if keys is None else keys.offsets
        (visible,) = visible_keys(*(x.diff() for x in (offsets[0], offsets[0] if keys is None else keys.offsets)), **mask)  # type: ignore[arg-type]
        before = jagged_attention(q, k, v, *offsets, backend=place.backend, **mask)  # type: ignore[call-overload]
        for row in (0, lengths[0] // 2, lengths[0] - 1):
            hidden = ~visible[row, :, None, None]
            other_k, other_v = torch.where(hidden, -2 * k, k), torch.where(hidden, -2 * v, v)
            after = jagged_attention(q, other_k, other_v, *offsets, backend=place.backend, **mask)  # type: ignore[call-overload]
            assert torch.equal(before[row], after[row])
            assert torch.equal(before, after) == (not hidden.any())


@pytest.mark.usefixtures("unchecked")
def test_wrong_offsets_reach_no_foreign_memory(place: Place) -> None:
    """Offsets that decrease, begin before 0 or run past the end mix rows of the tensors, never a neighbour's into them."""
    fence = torch.full((3, 140, 1, 16), 1e30, device=place.device)
    q, k, v = (x.fill_(value) for x, value in zip(fence[:, 50:90], (0.5, 0.25, 1.0), strict=True))
    for wrong in ([0, 30, 5, 90], [-70, 10, 40], [0, 1000, 2000], [90, 95], [0, -(2**40), 2**40], [0, 2**30, 0, 2**31]):
        offsets = torch.tensor(wrong, device=place.device)
        others = torch.arange(len(wrong), device=place.device) * 40 // (len(wrong) - 1)
        targets = torch.tensor([2**31 - 1, -(2**31), 5], device=place.device)[: len(wrong) - 1]
        everything = {"causal": True, "window": 4, "num_targets": targets, "num_contextual": 2}
        for sides in ((offsets, None), (others, offsets), (offsets, others)):
            for options in ({}, everything):
                leaves = [x.detach().requires_grad_() for x in (q, k, v)]
                output = jagged_attention(*leaves, *sides, backend=place.backend, **options)  # type: ignore[call-overload]
                # Rows that no sample covers may be left unwritten, which here means NaN.
                assert not (output.detach() > 1.001).any()
                for grad in torch.autograd.grad(output, leaves, torch.ones_like(output)):
                    assert not (grad.abs() > 1e6).any()
    assert bool((fence[:, :50] == 1e30).all())
    assert bool((fence[:, 90:] == 1e30).all())


@pytest.mark.skipif(PLACE.name != "cpu", reason="kernels subtract the product of output and upstream")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_of_one_key_have_no_gradient(place: Place, dtype: torch.dtype) -> None:
    queries, keys = jagged_of((3, 75, 5)), jagged_of((1, 1, 7))
    q, k, v = (
        random_tensor((rows, 2, 7), dtype, seed).requires_grad_()
        for seed, rows in enumerate((queries.total, keys.total, keys.total))
    )
    output = jagged_attention(q, k, v, queries.offsets, keys.offsets, backend=place.backend)
    of_q, of_k = torch.autograd.grad(output, (q, k), random_tensor((queries.total, 2, 7), dtype, 3))
    # Whatever its score is, one key has the whole weight.
    assert not of_q[:78].any()
    assert not of_k[:2].any()
    assert of_q[78:].any()


@pytest.mark.skipif(PLACE.name != "cpu", reason="the PyTorch implementation's own chunks, and dtype")
@given(cases(torch.float64, shortest_window=2), st.integers(1, 3_000))
def test_float64_in_chunks_of_any_size(place: Place, case: Case, chunk: int) -> None:
    def output_lse_and_gradients(attention: Callable[..., tuple[Tensor, Tensor]], **options: object) -> list[Tensor]:
        leaves = [x.requires_grad_() for x in case.inputs()]
        results = attention(*leaves, *case.offsets(), **case.options, **options)
        cotangents = [random_tensor(tuple(x.shape), x.dtype, 99) for x in results]
        # The reference cannot take a gradient at minus infinity, where ours is to leave it aside.
        if attention is padded_attention:
            cotangents[1] = cotangents[1].masked_fill(results[1] == -torch.inf, 0)
        return [*results, *torch.autograd.grad(results, leaves, cotangents)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_impl, "_CHUNK_SCORES", chunk)
        ours = output_lse_and_gradients(jagged_attention, return_lse=True)  # type: ignore[arg-type]
    for got, want in zip(ours, output_lse_and_gradients(padded_attention), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.skipif(PLACE.name != "cpu", reason="float64 finite differences are the CPU's work")
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_gradcheck(place: Place, mask: dict[str, object]) -> None:
    batch, keys = jagged_of((3, 0, 4, 1)), jagged_of((3, 2, 6, 1))
    inputs = [x.requires_grad_() for x in Case(batch, keys, 1, 2, 3, torch.float64, 0, {}).inputs()]
    assert torch.autograd.gradcheck(
        lambda q, k, v: jagged_attention(q, k, v, batch.offsets, keys.offsets, return_lse=True, **mask),  # type: ignore[call-overload]
        inputs,
    )


def test_a_scale_of_0_takes_the_mean(place: Place) -> None:
    batch = jagged_of((37, 0, 3))
    q, k, v = (random_tensor((batch.total, 2, 8), torch.float32, seed) for seed in range(3))
    output = jagged_attention(q, k, v, batch.offsets, causal=True, scale=0.0, backend=place.backend)
    counts = torch.arange(1, 38, device=place.device)[:, None, None]
    torch.testing.assert_close(output[:37], v[:37].cumsum(0) / counts)


def test_second_derivatives_are_refused(place: Place) -> None:
    batch = jagged_of((3, 2))
    q, k, v = (x.requires_grad_() for x in inputs_of(batch, 1, 4, torch.float32))
    for result in jagged_attention(q, k, v, batch.offsets, return_lse=True, backend=place.backend):
        # A gradient penalty: what comes in is a constant, what goes out must not be.
        (grad,) = torch.autograd.grad(result.sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match="jagged_attention has no second derivative"):
            grad.sum().backward()


@pytest.mark.parametrize("dtype", [PLACE.dtypes[0], PLACE.dtypes[-1]])
def test_opcheck(place: Place, dtype: torch.dtype) -> None:
    batch, keys = jagged_of((2, 0, 3)), jagged_of((4, 1, 2))
    fused = random_tensor((batch.total, 3, 2, 4), dtype, 0).unbind(1)
    across = Case(batch, keys, 2, 3, 4, dtype, 0, {}, 5).inputs()
    forward, backward = torch.ops.jagged.attention.default, torch.ops.jagged.attention_backward.default
    targets = torch.tensor([1, 0, 2], device=place.device)
    for x, o, with_lse in (
        (Inputs(*fused, batch.offsets), Options(causal=True, scale=0.5), False),
        (Inputs(*across, batch.offsets, keys.offsets, targets), Options(window=2, reach=2, num_contextual=1, scale=0.5), True),
    ):
        torch.library.opcheck(forward, (*x, *o, place.backend))
        output, lse = forward(*x, *o, place.backend)
        assert lse.shape == (x.q.shape[1], batch.total)
        grads = torch.ones_like(output), torch.ones_like(lse) if with_lse else None
        torch.library.opcheck(backward, (*grads, *x, output, lse, *o, *[dtype] * 3, None, None, None, place.backend))


def test_log_sum_exp_merges_sets_of_keys(place: Place) -> None:
    """Attention to the first half of the keys and to the second, weighted by their sums, is attention to all; gradients too."""
    batch, half = jagged_of((5, 0, 40)), jagged_of((7, 3, 33))
    q, *halves = random_tensor((batch.total + 4 * half.total, 2, 4), torch.float32, 0).split([batch.total, *[half.total] * 4])
    leaves = [x.requires_grad_() for x in (q, *halves)]
    both = jagged_of(tuple(2 * length for length in half.lengths))

    def interleaved(a: Tensor, b: Tensor) -> Tensor:
        return torch.cat([x for pair in zip(a.split(half.lengths), b.split(half.lengths), strict=True) for x in pair])

    results = [
        jagged_attention(q, *halves[index : index + 2], batch.offsets, half.offsets, return_lse=True, backend=place.backend)
        for index in (0, 2)
    ]
    lse = torch.stack([lse for _, lse in results])
    weights = lse.softmax(0).transpose(1, 2)[..., None]
    merged = sum(weight * output for weight, (output, _) in zip(weights, results, strict=True))
    keys, values = interleaved(halves[0], halves[2]), interleaved(halves[1], halves[3])
    whole, whole_lse = padded_attention(q, keys, values, batch.offsets, both.offsets)
    torch.testing.assert_close(merged, whole)
    torch.testing.assert_close(lse.logsumexp(0), whole_lse)
    ours = torch.autograd.grad(merged.square().sum(), leaves)  # type: ignore[union-attr]
    for got, want in zip(ours, torch.autograd.grad(whole.square().sum(), leaves), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.skipif(PLACE.name == "interpret", reason="interpreted kernels are not compiled")
@pytest.mark.parametrize("across", [False, True])
def test_one_graph_for_all_jagged_shapes(place: Place, across: bool) -> None:
    graphs = 0

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        nonlocal graphs
        graphs += 1
        return graph.forward

    def function(q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor | None) -> Tensor:
        output = jagged_attention(q, k, v, q_offsets, k_offsets, causal=True)
        masked, lse = jagged_attention(
            q, k, v, q_offsets, k_offsets, window=3, num_targets=1, num_contextual=1, scale=-1.0, return_lse=True
        )
        return output * 2 + masked * lse.t()[..., None].exp()

    torch._dynamo.reset()
    one_graph = torch.compile(function, fullgraph=True, dynamic=True, backend=count)
    traced = torch.compile(function, fullgraph=True, dynamic=True, backend="inductor" if place.name == "gpu" else "aot_eager")
    for lengths in ((2, 4, 3), (5, 0, 1, 9), (0, 7), (30, 2, 2, 2, 2)):
        batch, others = jagged_of(lengths), jagged_of(tuple(length + 3 for length in lengths))
        keys = others if across else None
        case = Case(batch, keys, 3, 2, 12, torch.float32, 0, {}, 20 if across else None)
        leaves = [x.requires_grad_() for x in case.inputs()]
        offsets = batch.offsets, None if keys is None else keys.offsets
        expected = function(*leaves, *offsets)
        wanted = torch.autograd.grad(expected.square().sum(), leaves)
        for compiled in (one_graph, traced):
            ours = compiled(*leaves, *offsets)
            torch.testing.assert_close(ours, expected, rtol=0, atol=0)
            for got, want in zip(torch.autograd.grad(ours.square().sum(), leaves), wanted, strict=True):
                torch.testing.assert_close(got, want)
    assert graphs == 1


@pytest.mark.skipif(PLACE.name == "interpret", reason="interpreted kernels are not compiled")
@pytest.mark.parametrize("strict", [False, True])
def test_exported_outside_of_no_grad(place: Place, strict: bool) -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = torch.nn.Linear(16, 48)

        def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
            q, k, v = self.project(x).view(-1, 3, 2, 8).unbind(1)
            # One tensor twice, too.
            return jagged_attention(q, k, v, offsets, causal=True) + jagged_hstu_attention(q, q, v, offsets)

    net, first, second = Net().to(place.device), jagged_of((3, 0, 7)), jagged_of((2, 5))
    dynamic = torch.export.Dim.DYNAMIC
    shapes = {0: dynamic}, {0: dynamic}
    rows = random_tensor((first.total, 16), torch.float32, 0)
    program = torch.export.export(net, (rows, first.offsets), dynamic_shapes=shapes, strict=strict)
    for batch in (first, second):
        rows = random_tensor((batch.total, 16), torch.float32, 1)
        torch.testing.assert_close(program.module()(rows, batch.offsets), net(rows, batch.offsets))


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
    offsets = torch.empty(3, dtype=torch.int64, device="meta")
    q, k, v = (torch.empty(5, heads, 8, device="meta", requires_grad=True) for heads in (6, 2, 2))
    output, lse = jagged_attention(q, k, v, offsets, num_targets=2, return_lse=True)
    (output.sum() + lse.sum()).backward()
    assert output.shape == (5, 6, 8)
    assert lse.shape == (6, 5)
    assert k.grad is not None
    assert k.grad.shape == k.shape
    assert jagged_attention(q, k[:3], v[:3], offsets, offsets).shape == (5, 6, 8)
    assert jagged_attention(q, k, v.expand(5, 2, 8)[..., :3], offsets).shape == (5, 6, 3)


@pytest.mark.usefixtures("unchecked")
def test_messages_name_argument_and_cure(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.zeros(3, 2, 4, device=place.device)
    offsets = torch.tensor([0, 3], device=place.device)
    cases: list[tuple[tuple[object, ...], dict[str, object], type[Exception], str]] = [
        ((q[0], q, q, offsets), {}, ValueError, r"q: expected shape \[Sq, H, D\], got \[2, 4\]"),
        ((q, q, q, offsets), {"scale": float("nan")}, ValueError, "scale: expected a finite number, got nan"),
        (("q", q, q, offsets), {}, TypeError, r"q: expected a tensor \[Sq, H, D\], got str"),
        ((q.long(), q, q, offsets), {}, TypeError, r"q: expected dtype .*, got int64"),
        ((q, q.half(), q, offsets), {}, TypeError, r"k: expected the dtype of q, float32, got float16"),
        ((q, q, q[0], offsets), {}, ValueError, r"^v: expected shape \[Sk, Hkv, Dv\], got \[2, 4\]$"),
        *(
            (
                (q, q, v, offsets),
                {},
                ValueError,
                rf"^v: expected \[3, 2, Dv\], the rows and heads of k, got \[{got}, 4\]; give every key its value$",
            )
            for v, got in ((q[:2], "2, 2"), (q[:, :1], "3, 1"))
        ),
        *(
            (
                (q, q, q.new_zeros(3, 2, width), offsets),
                {},
                ValueError,
                f"^v: expected a head width Dv of 1 to 256, got {width}; use more and narrower heads$",
            )
            for width in (0, 257)
        ),
        ((q, q[:2], q[:2], offsets), {}, ValueError, "k: expected the 3 rows of q, got 2; .* give their k_offsets"),
        ((q[:, :1], q, q, offsets), {}, ValueError, "k: expected a number of heads Hkv that divides the 1 of q, got 2"),
        ((*[q[:, :0]] * 3, offsets), {}, ValueError, "k: expected a number of heads Hkv that divides the 0 of q, got 0"),
        ((q, q[..., :3], q, offsets), {}, ValueError, "k: expected the head width of q, 4, got 3"),
        ((*[q.new_zeros(3, 2, 257)] * 3, offsets), {}, ValueError, r"q: expected a head width D of 1 to 256, got 257"),
        ((*[q.new_zeros(3, 2, 0)] * 3, offsets), {}, ValueError, r"q: expected a head width D of 1 to 256, got 0"),
        ((q, q, q, offsets.float()), {}, TypeError, r"q_offsets: expected dtype int32, int64, got float32"),
        ((q, q, q, offsets[:0]), {}, ValueError, r"q_offsets: expected shape \[B \+ 1\], got \[0\]"),
        ((q, q, q, offsets, offsets.float()), {}, TypeError, r"k_offsets: expected dtype int32, int64, got float32"),
        ((q, q, q, offsets, offsets.int()), {}, TypeError, "k_offsets: expected the dtype of q_offsets, int64, got int32"),
        ((q, q, q, offsets, offsets[:1]), {}, ValueError, r"k_offsets: expected \[2\] as q_offsets, got \[1\]"),
        ((q, q, q, offsets), {"window": 0}, ValueError, "window: expected 1 or more, .* got 0; use None"),
        (
            (q, q, q, offsets),
            {"window": (3, -1)},
            ValueError,
            r"^window: expected sides of 0 or more, which is the row itself, got \(3, -1\); use None for no bound$",
        ),
        ((q, q, q, offsets), {"window": (3,)}, ValueError, r"^window: expected a number or a pair \(left, right\), got \(3,\)$"),
        (
            (q, q, q, offsets),
            {"window": 2.5},
            TypeError,
            r"^window: expected a number, a pair \(left, right\) or None, got float$",
        ),
        *(
            (
                (q, q, q, offsets),
                {"windowed_context": True, **mask},
                ValueError,
                "^windowed_context: expected False without num_contextual and a window, got True; it has no effect there$",
            )
            for mask in ({"window": 3}, {"num_contextual": 2}, {"num_contextual": 2, "causal": True, "window": (None, 3)})
        ),
        (
            (q, q, q, offsets),
            {"windowed_context": True, "num_contextual": 3, "global_prefix": 2, "window": 1, "causal": True},
            ValueError,
            "^global_prefix: expected 0, or the 3 contextual positions and more, with windowed_context=True, got 2$",
        ),
        ((q, q, q, offsets), {"softcap": 0.0}, ValueError, "^softcap: expected a number above 0, or None, got 0.0$"),
        ((q, q, q, offsets), {"num_contextual": -1}, ValueError, "num_contextual: expected 0 or more, got -1"),
        ((q, q, q, offsets), {"global_prefix": -1}, ValueError, "^global_prefix: expected 0 or more, got -1$"),
        *(
            (
                (q, q, q, offsets),
                {"global_prefix": 2, **mask},
                ValueError,
                "^global_prefix: expected 0 without causal=True and a window, got 2; only these hide keys of a prefix$",
            )
            for mask in ({}, {"causal": True}, {"window": 3})
        ),
        ((q, q, q, offsets), {"num_targets": -1}, ValueError, "num_targets: expected 0 or more, got -1; use None"),
        (
            (q, q, q, offsets),
            {"num_targets": offsets},
            ValueError,
            r"num_targets: expected \[1\], one for each sample, got \[2\]",
        ),
        ((q, q, q, offsets), {"num_targets": q[0, 0]}, TypeError, "num_targets: expected dtype int32, int64, got float32"),
        (
            (q, q, q, offsets),
            {"num_targets": offsets[:1].to("meta")},
            ValueError,
            "num_targets: expected the device of q, .* meta",
        ),
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
    short = offsets - torch.tensor([0, 1], device=place.device)
    for name, sides in (("q", (short, None)), ("q", (short, offsets)), ("k", (offsets, short))):
        with pytest.raises(ValueError, match=rf"^{name}_offsets\[1\]: expected 3, the number of rows, got 2"):
            jagged_attention(q, q, q, *sides, backend=place.backend)


@ON_GPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_synchronisation_and_graph_capture(place: Place, dtype: torch.dtype) -> None:
    """Captured once; replayed with lengths going down, then up."""
    leaves = [x.requires_grad_() for x in inputs_of(jagged_of((200,)), 2, 32, dtype)]
    offsets, others = jagged_of((100, 0, 100)).offsets, jagged_of((60, 60, 80)).offsets

    def step() -> list[Tensor]:
        plain = jagged_attention(*leaves, offsets, causal=True)
        masked = jagged_attention(
            *leaves, others, offsets, window=20, num_targets=3, num_contextual=2, scale=-0.2, return_lse=True
        )
        # Where no key is seen the log-sum-exp is minus infinity.
        results = [plain, masked[0], masked[1].clamp(min=-1e3)]
        return [*results, *torch.autograd.grad(results, leaves, [x.detach() for x in results])]

    graph, results = captured(step)
    for lengths in ((100, 0, 100), (200, 0, 0), (1, 2, 197), (0, 0, 200), (64, 128, 8)):
        offsets.copy_(jagged_of(lengths).offsets)
        graph.replay()
        for got, want in zip(results, step(), strict=True):
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
        lambda x: padded_attention(*x.unbind(1), jagged_of((last,)).offsets, causal=True)[0],
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


def test_values_of_another_width_under_autocast(place: Place) -> None:
    """All three are cast, outputs are as wide as values in autocast's dtype, and gradients come in the inputs' own."""
    batch = jagged_of((3, 0, 40))
    q, k, v = (random_tensor((batch.total, 2, width), torch.float32, seed) for seed, width in enumerate((16, 16, 24)))
    leaves = [of.requires_grad_() for of in (q, k, v)]
    halves = [of.detach().bfloat16().requires_grad_() for of in leaves]
    with torch.autocast(place.device.type, torch.bfloat16):
        found = jagged_attention(*leaves, batch.offsets, causal=True, backend=place.backend)
    expected = jagged_attention(*halves, batch.offsets, causal=True, backend=place.backend)
    assert torch.equal(found, expected)
    assert (found.dtype, found.shape) == (torch.bfloat16, v.shape)
    upstream = torch.ones_like(found)
    for ours, of in zip(
        torch.autograd.grad(found, leaves, upstream), torch.autograd.grad(expected, halves, upstream), strict=True
    ):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, of.float())
