"""The kernels for long samples on Hopper: what every attention kernel must do, at lengths that are given to these."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from jagged.ops import jagged_attention, jagged_hstu_attention
from jagged.ops.attention import hopper
from jagged.ops.attention.checks import check_mask
from jagged.ops.attention.hopper import INPUTS, OPTIONS, SPECIALISED
from jagged.ops.attention.spec import Inputs, Options, Outputs
from jagged.ops.attention.triton import launch
from tests.graphs import captured
from tests.ops.test_attention import Case, check, inputs_of
from tests.ops.test_hstu_attention import functions
from tests.oracle import check_three_way
from tests.places import PLACE, Place
from tests.reference.attention import visible_keys
from tests.strategies import Jagged, jagged_of, random_tensor, seeds
from tests.test_imports import run

ON_HOPPER = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        PLACE.name == "gpu" and torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0"
    ),
]
# Lengths around the tiles of 64, of 128, and of two.
SHORT = (0, 1, 63, 64, 65, 0, 127, 128, 129, 255, 256, 257)


def long_enough(lengths: tuple[int, ...], dtype: torch.dtype = torch.int64) -> Jagged:
    """Add the sample that brings the mean above the border."""
    return jagged_of((*lengths, max(300, SPECIALISED * (len(lengths) + 1) + 1 - sum(lengths))), dtype)


# At, before and behind the boundaries of tiles, of each kind of mask and of several at once.
MASKS: tuple[dict[str, Any], ...] = (
    {"causal": True, "window": 64},
    {"causal": True, "window": 130, "global_prefix": 65},
    {"causal": True, "window": 129, "num_contextual": 63},
    {"causal": True, "window": 65, "num_contextual": 70, "windowed_context": True},
    {"causal": True, "num_contextual": 128},
    {"window": (63, 128)},
    {"window": 1, "num_contextual": 3},
)


@st.composite
def seen_options(draw: st.DrawFn, batch: Jagged) -> dict[str, Any]:
    """Return options of what queries see, that agree with each other."""
    options: dict[str, Any] = {"causal": draw(st.booleans())}
    sides = st.tuples(st.integers(0, 300), st.none() | st.integers(0, 300))
    options["window"] = window = draw(st.none() | st.integers(1, 300) | sides)
    options["num_contextual"] = draw(st.just(0) | st.integers(1, 200))
    if window is not None:
        options["windowed_context"] = bool(options["num_contextual"]) and draw(st.booleans())
        if options["causal"] and not options["windowed_context"]:
            options["global_prefix"] = draw(st.just(0) | st.integers(1, 200))
    if draw(st.booleans()):
        targets = draw(st.lists(st.integers(-1, 200), min_size=batch.batch_size, max_size=batch.batch_size))
        options["num_targets"] = torch.tensor(targets, dtype=batch.offsets.dtype, device=PLACE.device)
    return options


@pytest.fixture(name="calls")
def _calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Fail unless the forward kernel was launched, and unless no other was than those for Hopper."""
    from jagged.ops.attention.hopper import backward, forward

    calls: list[str] = []

    def record(module: Any, name: str) -> None:
        function = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *arguments: (calls.append(name), function(*arguments))[1])

    record(forward, "forward")
    record(backward, "backward")
    for name in ("forward", "dq", "dkv"):
        monkeypatch.setattr(launch, f"_launch_{name}", None)
    yield calls
    assert "forward" in calls


@pytest.fixture(name="backward_calls")
def _backward_calls(calls: list[str]) -> Iterator[None]:
    """Fail unless the backward kernels were launched as well."""
    yield
    assert "backward" in calls


@pytest.mark.usefixtures("calls")
class TestOnHopper:
    pytestmark = ON_HOPPER

    @pytest.mark.parametrize(("head_dim", "dtype"), [(128, torch.bfloat16), (96, torch.float16)])
    @pytest.mark.usefixtures("backward_calls")
    @settings(max_examples=-(-settings().max_examples // 4))
    @given(data=st.data())
    def test_three_way(self, place: Place, head_dim: int, dtype: torch.dtype, data: st.DataObject) -> None:
        batch = long_enough(data.draw(st.lists(st.integers(0, 400), max_size=5).map(tuple)), torch.int32)
        others = st.lists(st.integers(0, 700), min_size=batch.batch_size, max_size=batch.batch_size).filter(any).map(tuple)
        keys = data.draw(st.none() | others.map(lambda lengths: jagged_of(lengths, torch.int32)))
        case = Case(batch, keys, data.draw(st.integers(1, 3)), 1, head_dim, dtype, data.draw(seeds()), {})
        options = data.draw(seen_options(batch)) | {
            "return_lse": data.draw(st.booleans()),
            "scale": data.draw(st.sampled_from([None, 2 / head_dim**0.5, -(head_dim**-0.5)])),
        }
        check(place, batch, case.inputs(), keys, **options)  # type: ignore[arg-type]

    @pytest.mark.usefixtures("backward_calls")
    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_every_tile_boundary(self, place: Place, dtype: torch.dtype, causal: bool) -> None:
        """In self-attention and across, where some samples have no keys, and each key head serves two."""
        batch = long_enough(SHORT)
        check(place, batch, inputs_of(batch, 2, 128, dtype), return_lse=True, causal=causal)
        keys = jagged_of((64, 0, 300, 127, 0, 5, 129, 1, 65, 512, 255, 384, 257))
        inputs = Case(batch, keys, 1, 2, 128, dtype, 0, {}).inputs()
        check(place, batch, inputs, keys, return_lse=True, causal=causal)

    @pytest.mark.usefixtures("backward_calls")
    @pytest.mark.parametrize("is_pointwise", [False, True])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_targets_at_every_tile_boundary(self, place: Place, dtype: torch.dtype, is_pointwise: bool) -> None:
        """Of none, of all rows and more, and of histories that end in the midst of a tile; in self-attention and across."""
        batch = long_enough(SHORT)
        targets = torch.tensor([3, 1, 63, 0, 70, 2, 64, 1, 128, -3, 129, 200, 130], device=place.device)
        keys = jagged_of((64, 0, 300, 127, 0, 5, 129, 1, 65, 512, 255, 384, 257))
        options: dict[str, Any] = {"causal": True, "num_targets": targets}
        for others, group in ((None, 1), (keys, 2)):
            inputs = Case(batch, others, 2 // group, group, 128, dtype, 0, {}).inputs()
            if is_pointwise:
                check_three_way(*functions(place, batch, [], others, normalizer=1.0, **options), inputs)
            else:
                check(place, batch, inputs, others, return_lse=True, **options)

    @pytest.mark.usefixtures("backward_calls")
    @pytest.mark.parametrize("is_pointwise", [False, True])
    @pytest.mark.parametrize("mask", MASKS, ids=str)
    def test_masks_at_every_tile_boundary(self, place: Place, mask: dict[str, Any], is_pointwise: bool) -> None:
        """With targets and without, in self-attention and across, where each key head serves two."""
        batch = long_enough(SHORT)
        targets = torch.tensor([3, 1, 63, 0, 70, 2, 64, 1, 128, -3, 129, 200, 130], device=place.device)
        keys = jagged_of((64, 0, 300, 127, 0, 5, 129, 1, 65, 512, 255, 384, 257))
        for others, group, num_targets in ((None, 1, None), (None, 1, targets), (keys, 2, targets)):
            options = mask if num_targets is None else mask | {"num_targets": num_targets}
            inputs = Case(batch, others, 2 // group, group, 128, torch.bfloat16, 0, {}).inputs()
            if is_pointwise:
                check_three_way(*functions(place, batch, [], others, normalizer=1.0, **options), inputs)
            else:
                check(place, batch, inputs, others, return_lse=True, **options)

    @pytest.mark.usefixtures("backward_calls")
    @pytest.mark.parametrize(("head_dim", "dtype"), [(128, torch.bfloat16), (96, torch.float16)])
    @settings(max_examples=-(-settings().max_examples // 4))
    @given(data=st.data())
    def test_pointwise_three_way(self, place: Place, head_dim: int, dtype: torch.dtype, data: st.DataObject) -> None:
        batch = long_enough(data.draw(st.lists(st.integers(0, 400), max_size=5).map(tuple)), torch.int32)
        case = Case(batch, None, data.draw(st.integers(1, 3)), 1, head_dim, dtype, data.draw(seeds()), {})
        options = data.draw(seen_options(batch)) | {
            "scale": data.draw(st.sampled_from([None, 2 / head_dim**0.5, -(head_dim**-0.5)])),
            "normalizer": data.draw(st.sampled_from([None, 0.5, 100.0])),
        }
        check_three_way(*functions(place, batch, [], **options), case.inputs())

    @pytest.mark.usefixtures("backward_calls")
    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_pointwise_at_every_tile_boundary(self, place: Place, dtype: torch.dtype, causal: bool) -> None:
        """Sums, for in a mean one key too few is no more than a rounding of what shorter samples have."""
        batch = long_enough(SHORT)
        inputs = Case(batch, None, 1, 2, 128, dtype, 0, {}).inputs()
        check_three_way(*functions(place, batch, [], causal=causal, normalizer=1.0), inputs)

    def test_pointwise_weights_far_below_0_are_none(self, place: Place) -> None:
        batch = long_enough((37, 0, 1))
        q, k, v = inputs_of(batch, 2, 128, torch.bfloat16)
        q[..., 0], k[..., 0] = -128.0, 80.0
        assert not jagged_hstu_attention(q, k, v, batch.offsets, scale=1.0).any()

    @pytest.mark.usefixtures("backward_calls")
    def test_strides(self, place: Place) -> None:
        """Slices of a fused projection, with fewer heads of keys; heads outside of rows; columns between; one head as four."""
        batch = long_enough((130, 0, 1))
        grouped = random_tensor((batch.total, 4 + 2 + 2, 128), torch.bfloat16, 0).split([4, 2, 2], 1)
        heads_first = [random_tensor((4, batch.total, 128), torch.bfloat16, seed).transpose(0, 1) for seed in range(3)]
        wide = [random_tensor((batch.total, 2, 136), torch.bfloat16, seed)[..., 8:] for seed in range(3)]
        narrow = [x[..., :104] for x in wide]
        for inputs in (list(grouped), heads_first, wide, narrow):
            check(place, batch, inputs, causal=True)
        q, *others = heads_first
        shared = [x[:, :1].expand(-1, 4, -1) for x in others]
        outputs = [jagged_attention(q, *keys, batch.offsets) for keys in (shared, [x.contiguous() for x in shared])]
        assert torch.equal(*outputs)

    @pytest.mark.parametrize("sign", [-1.0, 1.0])
    def test_scores_of_ten_thousand_and_none(self, place: Place, sign: float) -> None:
        batch = long_enough((37, 0, 1))
        q, k, v = inputs_of(batch, 2, 128, torch.bfloat16)
        means = jagged_attention(q, k, v, batch.offsets, causal=True, scale=0.0)
        counts = torch.arange(1, batch.lengths[-1] + 1, device=place.device)[:, None, None]
        torch.testing.assert_close(means[38:].float(), v[38:].float().cumsum(0) / counts, rtol=1e-2, atol=1e-3)
        q[..., 0], k[..., 0] = 128.0 * sign, 80.0
        check(place, batch, [q, k, v], wanted=[False] * 3, causal=True, scale=1.0)

    @pytest.mark.usefixtures("backward_calls")
    def test_no_keys_seen(self, place: Place) -> None:
        """Keys too few for a causal query, or none: output 0, log-sum-exp minus infinity, and no gradient."""
        batch, keys = long_enough((300, 2)), jagged_of((140, 0, 1))
        q, k, v = (x.requires_grad_() for x in Case(batch, keys, 2, 1, 128, torch.bfloat16, 0, {}).inputs())
        output, lse = jagged_attention(q, k, v, batch.offsets, keys.offsets, causal=True, return_lse=True)
        sees = torch.cat([torch.arange(n) + m - n >= 0 for n, m in zip(batch.lengths, keys.lengths, strict=True)])
        assert not output[~sees].any()
        assert bool((lse.t()[~sees] == -torch.inf).all())
        assert torch.isfinite(lse.t()[sees]).all()
        assert torch.isfinite(output).all()
        gradients = torch.autograd.grad(output, (q, k, v), torch.ones_like(output))
        assert not gradients[0][~sees].any()
        assert all(torch.isfinite(x).all() for x in gradients)

    @pytest.mark.usefixtures("backward_calls")
    def test_neighbours_are_not_seen(self, place: Place) -> None:
        """Not a number of another sample, another head or what lies around the tensors in memory reaches a result."""
        batch = long_enough((129, 200, 64))
        poisoned = torch.full((4, batch.total + 200, 6, 128), torch.nan, dtype=torch.bfloat16, device=place.device)
        numbers = random_tensor((4, batch.total, 2, 128), torch.bfloat16, 0)
        inputs = [x[100:-100, 2:4].copy_(y) for x, y in zip(poisoned, numbers, strict=True)]

        def step(tensors: list[Tensor], causal: bool) -> list[Tensor]:
            *leaves, upstream = (x.detach().requires_grad_() for x in tensors)
            output = jagged_attention(*leaves, batch.offsets, causal=causal)
            return [output.detach(), *torch.autograd.grad(output, leaves, upstream)]

        for causal in (False, True):
            expected = step([x.contiguous() for x in inputs], causal)
            for got, want in zip(step(inputs, causal), expected, strict=True):
                assert torch.isfinite(want).all()
                assert torch.equal(got, want)
        for x in inputs:
            x[129:329] = torch.nan
        for got, want in zip(step(inputs, True), expected, strict=True):
            assert torch.isnan(got[129:329]).all()
            assert torch.equal(got[:129], want[:129])
            assert torch.equal(got[329:], want[329:])

    def test_pointwise_neighbours_are_not_seen(self, place: Place) -> None:
        batch = long_enough((129, 200, 64))
        poisoned = torch.full((3, batch.total + 200, 6, 128), torch.nan, dtype=torch.bfloat16, device=place.device)
        inputs = [x[100:-100, 2:4].copy_(y) for x, y in zip(poisoned, inputs_of(batch, 2, 128, torch.bfloat16), strict=True)]
        for causal in (False, True):
            expected = jagged_hstu_attention(*(x.contiguous() for x in inputs), batch.offsets, causal=causal)
            assert torch.isfinite(expected).all()
            assert torch.equal(jagged_hstu_attention(*inputs, batch.offsets, causal=causal), expected)
        for x in inputs:
            x[129:329] = torch.nan
        output = jagged_hstu_attention(*inputs, batch.offsets, causal=True)
        assert torch.isnan(output[129:329]).all()
        assert torch.equal(output[:129], expected[:129])
        assert torch.equal(output[329:], expected[329:])

    @pytest.mark.usefixtures("backward_calls")
    def test_wrong_offsets_reach_no_foreign_memory(self, place: Place) -> None:
        fence = torch.full((3, 2 * SPECIALISED + 2_200, 1, 128), 1e30, dtype=torch.bfloat16, device=place.device)
        q, k, v = (x.fill_(value).requires_grad_() for x, value in zip(fence[:, 100:-100], (0.5, 0.25, 1.0), strict=True))
        total = q.shape[0]
        for wrong in ([0, 700, 5, total], [-70, 10, 40], [0, 9_000, 20_000], [0, -(2**40), 2**40], [0, 2**30, 0, 2**31]):
            offsets = torch.tensor(wrong, device=place.device)
            others = torch.arange(len(wrong), device=place.device) * total // (len(wrong) - 1)
            for sides in ((offsets, None), (others, offsets), (offsets, others)):
                output = jagged_attention(q, k, v, *sides, causal=True)
                # Rows that no sample covers may be left unwritten, which here means NaN.
                assert not (output > 1.01).any()
                # Values are all alike, so scores have no gradient; a value has one of at most 1 from each query.
                for gradient in torch.autograd.grad(output, (q, k, v), torch.ones_like(output)):
                    assert not (gradient.abs() > 2 * total).any()
        assert bool((fence[:, :100] == 1e30).all())
        assert bool((fence[:, -100:] == 1e30).all())

    @pytest.mark.usefixtures("backward_calls")
    def test_same_bits_and_graph_capture(self, place: Place) -> None:
        """Programs take tiles in any order. Captured once, replayed with lengths going down, then up."""
        torch.use_deterministic_algorithms(False)
        total = 3 * SPECIALISED + 4_000
        leaves = [x.requires_grad_() for x in inputs_of(jagged_of((total,)), 8, 128, torch.bfloat16)]
        offsets = jagged_of((1_000, 0, total - 1_000)).offsets

        def step() -> list[Tensor]:
            results = []
            for causal in (False, True):
                outputs = jagged_attention(*leaves, offsets, causal=causal, return_lse=True)
                detached = [x.detach() for x in outputs]
                results += [*detached, *torch.autograd.grad(outputs, leaves, detached)]
            return [*results, jagged_hstu_attention(*leaves, offsets).detach()]

        first = step()
        torch.cuda.set_sync_debug_mode("error")
        different = torch.zeros((), dtype=torch.int64, device=place.device)
        for _ in range(200):
            for again, expected in zip(step(), first, strict=True):
                different += (again != expected).sum()
        torch.cuda.set_sync_debug_mode("default")
        assert int(different) == 0
        graph, results = captured(step)
        for lengths in ((total, 0, 0), (1, 2, total - 3), (0, 0, total), (64, 128, total - 192), (500, total - 900, 400)):
            offsets.copy_(jagged_of(lengths).offsets)
            graph.replay()
            for got, want in zip(results, step(), strict=True):
                assert torch.equal(got, want)

    @pytest.mark.usefixtures("backward_calls")
    def test_addresses_past_2_to_the_31(self, place: Place) -> None:
        """Fused inputs, outputs and gradients of more than 2^31 elements; the last sample alone gives the same."""
        heads, last = 8, 2_085
        lengths = (2_048,) * 1_023 + (last,)
        total = sum(lengths)
        fused = torch.empty(total, 3, heads, 128, dtype=torch.bfloat16, device=place.device).normal_()
        tail = fused[-last:].clone()

        def step(rows: Tensor, batch: Jagged) -> list[Tensor]:
            leaves = [x.requires_grad_() for x in rows.unbind(1)]
            output, lse = jagged_attention(*leaves, batch.offsets, causal=True, return_lse=True)
            return [output.detach(), lse.detach().t(), *torch.autograd.grad(output, leaves, output.detach())]

        results = step(fused, jagged_of(lengths))
        assert results[0].numel() > 2**31
        for whole, alone in zip(results, step(tail, jagged_of((last,))), strict=True):
            assert torch.equal(whole[-last:], alone)
        check(place, jagged_of((last,)), list(tail.unbind(1)), causal=True)


VISITED: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    {"causal": True, "targets": True},
    {"targets": True},
    {"causal": True, "window": 3},
    {"causal": True, "window": 5, "targets": True},
    {"window": (1, 6), "targets": True},
    {"causal": True, "window": 2, "global_prefix": 3},
    {"causal": True, "window": 3, "num_contextual": 2, "targets": True},
    {"causal": True, "num_contextual": 5},
    {"causal": True, "window": 4, "num_contextual": 3, "windowed_context": True, "targets": True},
    {"window": 3, "num_contextual": 6},
)
ROWS = 2 * SPECIALISED + 1
Q = torch.zeros(ROWS, 2, 128, dtype=torch.bfloat16)


GIVEN = torch.ones(1, dtype=torch.int64)
GENERATION = "the GPU is of another generation, which has other matrix instructions"
NARROW = "rows are not of 65 to 128 columns of 16 bits, and narrower heads have too little to multiply"
ALIGNED = "rows do not begin at 16 bytes"


@pytest.mark.skipif(PLACE.name == "interpret", reason="interpreted kernels choose alike")
@pytest.mark.parametrize(
    ("reason", "q", "options"),
    [
        (None, Q, {}),
        (None, Q[..., :96].half(), {"causal": False}),
        (None, Q.new_zeros(ROWS, 3, 2, 72)[:, 1], {}),
        (None, Q, {"pointwise": True, "normalizer": 5.0}),
        (None, Q, {"num_targets": GIVEN}),
        (None, Q, {"num_targets": GIVEN, "causal": False}),
        (None, Q, {"window": 3, "reach": 2, "num_contextual": 1, "prefix": 2}),
        (GENERATION, Q, {"capability": (10, 0)}),
        ("there are no keys", Q, {"k": Q[:0], "k_offsets": torch.zeros(3, dtype=torch.int64)}),
        ("samples are short", Q[1:], {}),
        (NARROW, Q[..., :64], {}),
        (NARROW, Q.new_zeros(ROWS, 2, 136), {}),
        (NARROW, Q.float(), {}),
        (ALIGNED, Q.new_zeros(ROWS, 2, 136)[..., 1:129], {}),
        (ALIGNED, Q[..., :100].clone(), {}),
        ("softcap is 2.0", Q, {"softcap": 2.0}),
        ("relative_bias is given", Q, {"relative_bias": torch.zeros(2, 3)}),
        ("time_bias is given", Q, {"time_bias": torch.zeros(2, 3)}),
        ("bias is given", Q, {"bias": torch.zeros(2, 2, 1, 1)}),
        ("dropout_seed is given", Q, {"dropout_p": 0.5, "dropout_seed": GIVEN}),
    ],
)
def test_which_kernels_are_launched(
    monkeypatch: pytest.MonkeyPatch, reason: str | None, q: Tensor, options: dict[str, Any]
) -> None:
    """All but the launch is done on the CPU. Gradients that begin elsewhere have the others."""
    from jagged.ops.attention.hopper import backward, forward

    launched: list[str] = []

    def record_other(*arguments: object, **constants: object) -> None:
        launched.append("other")

    def record(*arguments: object) -> object:
        launched.append("hopper")
        return None

    monkeypatch.setattr(launch, "_launch_prepare_biases", record_other)
    monkeypatch.setattr(launch, "_prepared", lambda *arguments, **constants: record_other)
    capability = options.get("capability", (9, 0))
    for module in (hopper, launch):
        monkeypatch.setattr(module, "capability", lambda device: capability)
    monkeypatch.setattr(forward, "forward", record)
    monkeypatch.setattr(backward, "backward", record)
    tensors = {"k": q, "v": options.get("k", q)} | {name: given for name, given in options.items() if name in Inputs._fields}
    x = Inputs(q=q, q_offsets=torch.tensor([0, 5, q.shape[0]]), **tensors)
    o = Options(**{"causal": True} | {name: given for name, given in options.items() if name in Options._fields})
    assert hopper.supports(x, o) == reason
    launch.forward(x, o)
    assert launched.pop() == ("hopper" if reason is None else "other")
    out = Outputs(q.contiguous(), torch.zeros(q.shape[1], q.shape[0]))
    odd = torch.zeros(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape)
    for grad, of_grad in ((torch.zeros_like(q), None), (odd, ALIGNED)):
        expected = reason or of_grad
        assert hopper.supports(x, o, grad) == expected
        launch.backward(Outputs(grad, None), x, out, o, {})  # type: ignore[arg-type]
        assert launched.pop() == ("hopper" if expected is None else "other")


@pytest.mark.skipif(PLACE.name == "interpret", reason="Gluon is not interpreted")
@pytest.mark.parametrize("mask", VISITED, ids=str)
def test_tiles_that_meet(monkeypatch: pytest.MonkeyPatch, mask: dict[str, Any]) -> None:
    """In tiles of a few rows: each pair that is seen is visited once, and a tile that is said to hide nothing hides none."""
    from jagged.ops.attention.hopper import visits
    from jagged.ops.attention.triton import masks
    from jagged.ops.attention.triton.samples import Sample

    scalars = SimpleNamespace(
        minimum=lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)),
        maximum=lambda a, b: torch.maximum(torch.as_tensor(a), torch.as_tensor(b)),
        where=lambda condition, yes, no: torch.where(torch.as_tensor(condition), yes, no),
        cdiv=lambda a, b: -(-a // b),
        int32=torch.int32,
    )
    for module in (masks, visits):
        monkeypatch.setattr(module, "tl" if module is masks else "gl", scalars)
    monkeypatch.setattr(masks, "reach_of", masks.reach_of.fn)
    monkeypatch.setattr(visits, "edge_tile", masks.edge_tile.fn)
    rows, causal, has_targets = 4, mask.get("causal", False), mask.get("targets", False)
    named = {"window": None, "num_contextual": 0, "global_prefix": 0, "windowed_context": False} | mask
    named.pop("targets", None)
    _, checked = check_mask(torch.tensor([0, 1]), named.pop("causal", False), num_targets=None, **named)
    sight = masks.Sight(*launch.sight_of(Options(**checked)).values(), True if has_targets else None)
    for queries, keys, targets in itertools.product((1, 4, 7, 13), (1, 3, 8, 13, 17), (0, 1, 5, 8, 17)):
        if targets > (keys if has_targets else 0):
            continue
        options = {name: of for name, of in mask.items() if name != "targets"} | ({"num_targets": targets} if has_targets else {})
        seen = visible_keys(torch.tensor([queries]), torch.tensor([keys]), **options)[0]
        history, shift = torch.tensor(keys - targets), keys - queries
        sample = Sample(0, 0, 0, 0, torch.tensor(queries), torch.tensor(keys), torch.tensor(shift), history)
        every_query, every_key = torch.arange(queries)[:, None], torch.arange(keys)
        found = masks.visible.fn(every_query + shift, every_key, history, sight, causal)
        assert torch.equal(seen, found.expand(seen.shape))
        for block, owns_keys in itertools.product((2, 4), (False, True)):
            pairs = seen.T if owns_keys else seen
            visited = torch.zeros_like(pairs, dtype=torch.int64)
            for own in range(0, len(pairs), rows):
                find = masks.query_ranges if owns_keys else masks.key_ranges
                ranges = find.fn(torch.tensor(own), sample, sight, causal, rows, block)
                number = int(visits.number_of_visits.fn(ranges, block))
                for index in range(number):
                    other = int(visits.row_of_visit.fn(torch.tensor(index), ranges, not owns_keys, block))
                    may_hide = bool(visits.may_hide.fn(index, ranges))
                    assert other % block == 0
                    assert pairs[own : own + rows, other : other + block].all() or may_hide
                    visited[own : own + rows, other : other + block] += 1
            assert torch.equal(visited[pairs], torch.ones_like(visited[pairs]))


def test_what_is_new_is_refused() -> None:
    """Kernels serve an input or an option only once it is named as one that they have been taught."""
    assert set(Inputs._fields) >= INPUTS
    assert set(Options._fields) >= OPTIONS
    for name in set(Options._fields) - OPTIONS:
        default = Options._field_defaults[name]
        changed = Options(**{name: not default if isinstance(default, bool) else default + 1})
        assert hopper.supports(Inputs(Q, Q, Q, GIVEN), changed) == f"{name} is {getattr(changed, name)}"
    for name in set(Inputs._fields) - INPUTS:
        x = Inputs(Q, Q, Q, GIVEN)._replace(**{name: GIVEN})
        assert hopper.supports(x, Options()) == f"{name} is given"


def test_other_kernels_serve_without_gluon() -> None:
    code = (
        "import sys\n"
        "sys.modules['triton.experimental.gluon'] = None\n"
        "from jagged.ops.attention import hopper\n"
        "print(hopper._has_gluon())"
    )
    assert run(code).strip() == "False"
    assert run(code.replace("sys.modules", "_ = {}; _")).strip() == "True"
