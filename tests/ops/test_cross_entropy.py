"""Linear cross-entropy against the whole matrix of logits in float64, in every place; and what that matrix cannot show."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from jagged.ops import linear_cross_entropy, linear_cross_entropy_strategy
from jagged.ops.cross_entropy import strategy as strategies
from jagged.ops.cross_entropy import torch_impl
from jagged.ops.cross_entropy.spec import Inputs, Options
from jagged.ops.cross_entropy.strategy import chunk_items_of
from tests.graphs import captured
from tests.oracle import check_three_way
from tests.places import PLACE, Place
from tests.reference.cross_entropy import linear_cross_entropy as reference
from tests.strategies import LONGEST, float_dtypes, random_tensor, seeds

ON_GPU = pytest.mark.gpu
ON_TRITON = pytest.mark.skipif(PLACE.name == "cpu", reason="says something of the kernels alone")
ON_CPU = pytest.mark.skipif(PLACE.name != "cpu", reason="says something of the PyTorch implementation alone")
OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
ROWS = st.one_of(st.integers(0, 9), st.integers(LONGEST // 2, LONGEST))
# Over fewer items the low-precision reference is exact by luck too often to be a measure; other tests have them.
ITEMS = st.one_of(st.integers(8, 40), st.integers(2 * LONGEST, 4 * LONGEST))
WIDTHS = st.sampled_from([1, 3, 16, 50, 64, 65, 100, 128, 130, 256] if PLACE.name != "interpret" else [1, 3, 16, 50, 64, 130])


def inputs_of(rows: int, items: int, width: int, dtype: torch.dtype, seed: int = 0, *, strided: bool = False) -> list[Tensor]:
    """Hidden states and weights whose logits are of order one at every width."""
    hidden = random_tensor((rows, width), dtype, seed, strided=strided)
    weight = random_tensor((items, width), torch.float32, seed + 1, strided=strided) / math.sqrt(width)
    return [hidden, weight.to(dtype)]


def targets_of(rows: int, items: int, seed: int = 0, ignored: float = 0.0, ignore_index: int = -100) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(items, (rows,), generator=generator)
    return target.masked_fill(torch.rand(rows, generator=generator) < ignored, ignore_index).to(PLACE.device)


def all_outputs(loss: Tensor, lse: Tensor) -> Tensor:
    """Loss, log-sum-exp and the logit of the target: the loss is their difference, so one rounding of theirs is its own."""
    return torch.cat([loss.reshape(-1), lse, lse - loss])


def check(place: Place, inputs: list[Tensor], target: Tensor, *, wanted: list[bool] | None = None, **options: Any) -> None:
    check_three_way(
        lambda h, w: all_outputs(*linear_cross_entropy(h, w, target, return_lse=True, backend=place.backend, **options)),
        lambda h, w: all_outputs(*reference(h, w, target, **options)),
        inputs,
        requires_grad=wanted,
    )


def loss_and_gradients(place: Place, inputs: list[Tensor], target: Tensor, **options: Any) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    loss = linear_cross_entropy(*leaves, target, backend=place.backend, **options)
    return [loss.detach(), *torch.autograd.grad(loss, leaves, torch.ones_like(loss))]


@given(
    ROWS,
    ITEMS,
    WIDTHS,
    float_dtypes(),
    seeds(),
    st.booleans(),
    st.sampled_from([torch.int32, torch.int64]),
    st.sampled_from([(0.0, -100), (0.3, -100), (0.3, 1), (1.0, -1)]),
    st.sampled_from(["mean", "sum", "none"]),
    st.sampled_from([[True, True], [True, False], [False, True], [False, False]]),
)
def test_three_way(
    place: Place,
    rows: int,
    items: int,
    width: int,
    dtype: torch.dtype,
    seed: int,
    strided: bool,
    index_dtype: torch.dtype,
    ignoring: tuple[float, int],
    reduction: str,
    wanted: list[bool],
) -> None:
    inputs = inputs_of(rows, items, width, dtype, seed, strided=strided)
    target = targets_of(rows, items, seed, *ignoring).to(index_dtype)
    check(place, inputs, target, wanted=wanted, ignore_index=ignoring[1], reduction=reduction)


OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "softcap": st.sampled_from([0.7, 5.0]),
        "temperature": st.sampled_from([0.2, 3.0]),
        "normalize": st.just(True),
        "label_smoothing": st.sampled_from([0.1, 1.0]),
        "z_loss": st.just(0.01),
    },
)


@given(
    st.integers(0, 40),
    st.integers(8, 70),
    st.sampled_from([3, 16, 50, 130]),
    float_dtypes(),
    seeds(),
    OPTIONS,
    st.tuples(st.booleans(), st.booleans(), st.booleans()),
    st.sampled_from(["mean", "sum", "none"]),
    st.sampled_from(["fused", "chunked", "auto"]),
)
# A share of 0.99 at a logit of 13, 5 times a product: a last bit of the product is 12 of the gradient's.
@example(1, 8, 50, torch.float32, 2, {"temperature": 0.2}, (True, False, False), "mean", "fused")
def test_options_three_way(
    place: Place, rows: int, items: int, width: int, dtype: torch.dtype, seed: int, options: dict[str, Any],
    vectors: tuple[bool, bool, bool], reduction: str, strategy: str,
) -> None:  # fmt: skip
    """Every option with every other, in both ways that backward has."""
    has_bias, has_class_weight, has_sample_weight = vectors
    hidden, weight = inputs_of(rows, items, width, dtype, seed)
    target = targets_of(rows, items, seed, 0.2)
    # The mean of one row alone is its loss whatever its weight, whose gradient is the difference of two equal numbers.
    assume(not (reduction == "mean" and has_sample_weight and int((target >= 0).sum()) == 1))
    if has_class_weight:
        options["class_weight"] = random_tensor((items,), torch.float32, seed + 2).abs()
    inputs, names = [hidden, weight], []
    if has_bias:
        inputs, names = [*inputs, random_tensor((items,), dtype, seed + 3)], [*names, "bias"]
    if has_sample_weight:
        inputs, names = [*inputs, random_tensor((rows,), dtype, seed + 4).abs()], [*names, "sample_weight"]

    def ours(h: Tensor, w: Tensor, *others: Tensor) -> Tensor:
        given_ = dict(zip(names, others, strict=True))
        return all_outputs(
            *linear_cross_entropy(
                h, w, target, reduction=reduction, strategy=strategy, return_lse=True, backend=place.backend, **given_, **options
            )  # type: ignore[call-overload]
        )

    def theirs(h: Tensor, w: Tensor, *others: Tensor) -> Tensor:
        return all_outputs(*reference(h, w, target, reduction=reduction, **dict(zip(names, others, strict=True)), **options))

    check_three_way(ours, theirs, inputs)


@pytest.mark.skipif(PLACE.backend != "torch", reason="kernels compute tanh in steps of their own")
def test_the_slope_of_a_cap_that_is_reached_is_that_of_its_tanh() -> None:
    # A logit of 2.6 under a cap of 0.7: the slope is 0.0027, one more rounding was 15 times the reference's error.
    inputs, target = inputs_of(3, 41, 50, torch.float32, 3), targets_of(3, 41, 3, 0.2)

    def gradient(function: Callable[..., Any], dtype: torch.dtype) -> Tensor:
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        output = all_outputs(*function(*leaves, target, softcap=0.7))
        cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
        (found,) = torch.autograd.grad(output, leaves[1], cotangent.to(output.dtype))
        return found.double()

    def ours(*given: Any, **options: Any) -> Any:
        return linear_cross_entropy(*given, return_lse=True, **options)

    exact, low = (gradient(reference, dtype) for dtype in (torch.float64, torch.float32))
    assert (gradient(ours, torch.float32) - exact).abs().max() <= 8 * (low - exact).abs().max()


@given(ROWS, st.integers(2, 40), st.integers(1, 9), float_dtypes(), seeds(), st.sampled_from(["mean", "sum", "none"]))
def test_loss_alone(place: Place, rows: int, items: int, width: int, dtype: torch.dtype, seed: int, reduction: str) -> None:
    """Without `return_lse` the gradient takes another way, and the loss is the same to the bit."""
    inputs, target = inputs_of(rows, items, width, dtype, seed), targets_of(rows, items, seed, 0.2)
    loss, hidden_grad, weight_grad = loss_and_gradients(place, inputs, target, reduction=reduction)
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    other, lse = linear_cross_entropy(*leaves, target, reduction=reduction, return_lse=True, backend=place.backend)
    grads = torch.autograd.grad(other, leaves, torch.ones_like(other))
    for got, want in ((loss, other.detach()), (hidden_grad, grads[0]), (weight_grad, grads[1])):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert loss.dtype == lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0, "temperature": 0.5, "normalize": True, "label_smoothing": 0.1}])
def test_logit_of_the_target(place: Place, options: dict[str, Any]) -> None:
    """It is what softcap, temperature, bias and norms make of it, with a gradient of its own, and comes last."""
    inputs = [*inputs_of(20, 30, 8, torch.float32), random_tensor((30,), torch.float32, 3)]
    target = targets_of(20, 30, ignored=0.2)

    def ours(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return linear_cross_entropy(h, w, target, bias=b, return_target_logit=True, backend=place.backend, **options)[1]

    def theirs(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        shaping = {name: value for name, value in options.items() if name != "label_smoothing"}
        losses, lse = reference(h, w, target, bias=b, reduction="none", **shaping)
        return lse - losses

    check_three_way(ours, theirs, inputs)
    hidden, weight, _ = inputs
    loss, lse, logit = linear_cross_entropy(
        hidden, weight, target, return_lse=True, return_target_logit=True, reduction="none", backend=place.backend
    )
    assert torch.equal(loss, lse - logit)
    assert not logit[target == -100].any()
    target[3] = 30
    assert linear_cross_entropy(hidden, weight, target, return_target_logit=True, backend=place.backend)[1][3].isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "items", "width"), [(129, 65, 64), (64, 129, 128), (33, 63, 257), (65, 130, 384), (65, 130, 512), (17, 31, 600)]
)
def test_around_the_tiles(place: Place, rows: int, items: int, width: int, dtype: torch.dtype) -> None:
    check(place, inputs_of(rows, items, width, dtype), targets_of(rows, items), reduction="mean")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_several_chunks(place: Place, dtype: torch.dtype) -> None:
    """Without a budget a chunk is of 128 items; the last is of fewer."""
    (hidden, weight), bias = inputs_of(70, 300, 40, dtype), random_tensor((300,), dtype, 5)
    target = targets_of(70, 300, ignored=0.2)

    def ours(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        options = {"strategy": "chunked", "memory_budget": 0, "normalize": True, "label_smoothing": 0.2}
        return all_outputs(*linear_cross_entropy(h, w, target, bias=b, return_lse=True, backend=place.backend, **options))  # type: ignore[call-overload]

    check_three_way(
        ours,
        lambda h, w, b: all_outputs(*reference(h, w, target, bias=b, normalize=True, label_smoothing=0.2)),
        [hidden, weight, bias],
    )


@pytest.fixture(name="filtered")
def _filtered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A filter is used for gradients of any size, and whether it pays or not."""
    from jagged.ops.cross_entropy.triton import filter

    monkeypatch.setattr(filter, "LEAST_WORK", 0)
    monkeypatch.setattr(filter, "MARGIN", math.inf)


@ON_TRITON
@pytest.mark.usefixtures("filtered")
@pytest.mark.parametrize("wanted", [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize("filter_eps", [2**-8, (None, 2**-8), (2**-8, None), (None, None)])
def test_filter(place: Place, wanted: tuple[bool, bool], filter_eps: float | tuple[float | None, float | None]) -> None:
    """Items far below every row's best get nothing; what is left out stays within the bound; rows' weights count."""
    rows, items, width = 150, 600, 16
    hidden, weight = inputs_of(rows, items, width, torch.float32)
    target, sample_weight = targets_of(rows, items // 2, ignored=0.1), random_tensor((rows,), torch.float32, 9).abs()
    # Scattered items that no row scores highly; the order brings them together.
    is_far = torch.arange(items, device=place.device) % 2 == 1
    bias = torch.where(is_far, -30.0, 0.0)
    target = torch.where(target >= 0, target * 2, target)

    def gradients(eps: Any) -> list[Tensor]:
        leaves = [x.clone().requires_grad_(want) for x, want in zip((hidden, weight, bias), (*wanted, wanted[1]), strict=True)]
        loss = linear_cross_entropy(
            leaves[0], leaves[1], target, bias=leaves[2], sample_weight=sample_weight, reduction="sum", filter_eps=eps,
            backend=place.backend,
        )  # fmt: skip
        return list(torch.autograd.grad(loss, [leaf for leaf in leaves if leaf.requires_grad]))

    exact, filtered = gradients(None), gradients(filter_eps)
    of_hidden, of_weight = filter_eps if isinstance(filter_eps, tuple) else (filter_eps, filter_eps)
    share = 2**-8 * sample_weight.max()
    bounds = [share * weight.abs().sum(0)] * wanted[0] + [share * hidden.abs().sum(0), share * rows] * wanted[1]
    eps_of_each = [of_hidden] * wanted[0] + [of_weight] * (2 * wanted[1])
    for ours, wanted_grad, bound, eps in zip(filtered, exact, bounds, eps_of_each, strict=True):
        if eps is None:
            torch.testing.assert_close(ours, wanted_grad, rtol=1e-4, atol=1e-5)
        else:
            assert bool(((ours - wanted_grad).abs() <= bound + 1e-5).all())
    if wanted[1]:
        far = filtered[-1][is_far]
        # The tile at the border has items of both kinds.
        assert (far.count_nonzero() < 64) == (of_weight is not None)
        assert exact[-1][is_far].count_nonzero() == len(far)


@ON_TRITON
@pytest.mark.usefixtures("filtered")
def test_filter_lets_no_nan_pass_unseen(place: Place) -> None:
    hidden, weight = inputs_of(20, 90, 8, torch.float32)
    weight[70, 2] = math.nan
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        grads = loss_and_gradients(place, [hidden, weight], targets_of(20, 90), reduction="sum", filter_eps=0.5)[1:]
    assert grads[0].isnan().any()
    assert grads[1].isnan().any()


def test_a_row_of_a_large_bias_may_be_ignored(place: Place) -> None:
    """Its logits are then the biases alone, whose exponentials overflow."""
    hidden, weight = inputs_of(6, 40, 8, torch.float32)
    target = targets_of(6, 40).index_fill_(0, torch.tensor([2], device=place.device), -100)
    for strategy in ("fused", "chunked"):
        bias = torch.full((40,), 500.0, device=place.device)
        grads = loss_and_gradients(place, [hidden, weight], target, bias=bias, strategy=strategy)[1:]
        assert all(bool(grad.isfinite().all()) for grad in grads)


def test_class_weights_and_smoothing_are_those_of_pytorch(place: Place) -> None:
    hidden, weight = inputs_of(30, 20, 8, torch.float32)
    target, class_weight = targets_of(30, 20, ignored=0.2), random_tensor((20,), torch.float32, 4).abs()
    for reduction in ("mean", "sum", "none"):
        options = {"label_smoothing": 0.3, "reduction": reduction}
        ours = linear_cross_entropy(hidden, weight, target, class_weight=class_weight, backend=place.backend, **options)  # type: ignore[call-overload]
        torch.testing.assert_close(
            ours, F.cross_entropy(hidden @ weight.T, target, class_weight, **options), rtol=1e-5, atol=1e-5
        )


def test_weights_of_zero_are_no_step(place: Place) -> None:
    inputs, target = inputs_of(5, 9, 4, torch.float32), targets_of(5, 9)
    for name, length in (("class_weight", 9), ("sample_weight", 5)):
        for part in loss_and_gradients(place, inputs, target, **{name: torch.zeros(length, device=place.device)}):
            assert not part.any()


def test_strategy_goes_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = (8192, 100_000, 512, torch.bfloat16)
    assert linear_cross_entropy_strategy(8192, 100_000, 64, torch.bfloat16) == ("fused", 0, 0)
    name, items, used = linear_cross_entropy_strategy(*wide)
    assert name == "chunked"
    assert items % 128 == 0
    assert items > 0
    assert used <= 256 * 2**20
    assert linear_cross_entropy_strategy(*wide, memory_budget=2**20).name == "fused"
    with pytest.raises(TypeError, match="dtype: expected float32, bfloat16 or float16"):
        linear_cross_entropy_strategy(1, 5, 512, torch.float64)
    assert linear_cross_entropy_strategy(0, 5, 512, torch.bfloat16).chunk_items <= 5
    # Without room for logits of 4 bytes beside their gradients of 2.
    options: Any = {"strategy": "auto", "memory_budget": 2**28}
    direct = chunk_items_of(*wide, **options, is_direct=True)
    assert direct % 256 == 0
    assert 2.5 * items < direct < 3 * items + 256
    monkeypatch.setattr(strategies, "is_hopper", lambda device: device.type == "cuda")
    calls: list[tuple[dict[str, Any], int]] = [
        ({"device": "cuda"}, direct),
        ({"device": "cuda", "is_plain": False}, items),
        ({}, items),
    ]
    for options_of_call, chunk in calls:
        told = linear_cross_entropy_strategy(*wide, **options_of_call)
        assert told.chunk_items == chunk
        assert told.chunk_bytes <= 256 * 2**20
    assert chunk_items_of(*wide, **{**options, "strategy": "chunked", "memory_budget": 0}, is_direct=True) == 256


@ON_CPU
@pytest.mark.parametrize(("tile_bytes", "tile_rows"), [(1, 1), (100, 3), (1000, 1024), (4000, 7)])
def test_tiles_of_any_size(place: Place, monkeypatch: pytest.MonkeyPatch, tile_bytes: int, tile_rows: int) -> None:
    monkeypatch.setattr(torch_impl, "TILE_BYTES", tile_bytes)
    monkeypatch.setattr(torch_impl, "TILE_ROWS", tile_rows)
    check(place, inputs_of(20, 31, 5, torch.float32), targets_of(20, 31, ignored=0.2))


@ON_CPU
def test_reference_is_cross_entropy(place: Place) -> None:
    (hidden, weight), target = inputs_of(30, 11, 5, torch.float64), targets_of(30, 11, ignored=0.3)
    for reduction in ("mean", "sum", "none"):
        expected = F.cross_entropy(F.linear(hidden, weight), target, reduction=reduction)
        torch.testing.assert_close(reference(hidden, weight, target, reduction=reduction)[0], expected)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_ignored_rows_may_hold_anything(place: Place, poison: float) -> None:
    (hidden, weight), target = inputs_of(50, 70, 20, torch.float32), targets_of(50, 70, ignored=0.3)
    ignored = target == -100
    expected = loss_and_gradients(place, [hidden.masked_fill(ignored[:, None], 0), weight], target, reduction="none")
    got = loss_and_gradients(place, [hidden.masked_fill(ignored[:, None], poison), weight], target, reduction="none")
    for ours, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=0, atol=0)
    assert not got[0][ignored].any()
    assert not got[1][ignored].any()


def test_ignored_rows_may_hold_anything_beside_norms(place: Place) -> None:
    (hidden, weight), target = inputs_of(20, 30, 8, torch.float32), targets_of(20, 30, ignored=0.3)
    hidden = hidden.masked_fill((target == -100)[:, None], math.nan)
    for grad in loss_and_gradients(place, [hidden, weight], target, normalize=True)[1:]:
        assert bool(grad.isfinite().all())


@pytest.mark.parametrize("strategy", ["fused", "chunked"])
def test_vectors_of_any_stride(place: Place, strategy: str) -> None:
    (hidden, weight), target = inputs_of(20, 50, 8, torch.float32), targets_of(20, 50)
    columns = random_tensor((50, 2), torch.float32, 3)
    for bias in (columns[:, 0], torch.full((1,), 0.5, device=place.device).expand(50)):
        got, wanted = (
            loss_and_gradients(place, [hidden, weight], target, bias=vector, class_weight=vector.abs(), strategy=strategy)
            for vector in (bias, bias.contiguous())
        )
        for ours, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(ours, other, rtol=0, atol=0)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"return_lse": True}])
def test_gradients_of_any_stride(place: Place, options: dict[str, Any]) -> None:
    (hidden, weight), target = inputs_of(20, 50, 8, torch.float32), targets_of(20, 50)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    outputs = linear_cross_entropy(*leaves, target, reduction="none", backend=place.backend, **options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    columns = random_tensor((20, 2), torch.float32, 3)
    for vector in (columns[:, 0], torch.full((1,), 0.5, device=place.device).expand(20)):
        got, wanted = (
            torch.autograd.grad(outputs, leaves, [upstream] * len(outputs), retain_graph=True)
            for upstream in (vector, vector.contiguous())
        )
        for ours, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(ours, other, rtol=0, atol=0)


@pytest.mark.parametrize("strategy", ["fused", "chunked"])
@pytest.mark.parametrize(("normalize", "temperature", "size"), [(False, 0.05, 1.0), (True, 0.05, 1e-2), (True, 1.0, 1e-2)])
def test_half_gradients_stay_in_range(place: Place, strategy: str, normalize: bool, temperature: float, size: float) -> None:
    """Low temperatures and short rows make gradients of products that float16 does not hold as they are."""
    hidden, weight = inputs_of(40, 60, 16, torch.float32)
    inputs, target = [hidden.half(), (weight * size).half()], targets_of(40, 60)
    options = {"normalize": normalize, "temperature": temperature}
    grads = loss_and_gradients(place, inputs, target, strategy=strategy, **options)
    leaves = [x.double().requires_grad_() for x in inputs]
    exact = torch.autograd.grad(reference(*leaves, target, **options)[0], leaves)  # type: ignore[arg-type]
    for ours, wanted in zip(grads[1:], exact, strict=True):
        assert (ours - wanted).norm() <= 0.01 * wanted.norm()


@pytest.mark.parametrize("rows", [0, 3])
def test_no_valid_row_is_no_step(place: Place, rows: int) -> None:
    target = torch.full((rows,), -100, device=place.device)
    for part in loss_and_gradients(place, inputs_of(rows, 9, 4, torch.float32), target):
        assert not part.any()
        assert part.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_item_is_certain(place: Place, dtype: torch.dtype) -> None:
    # Small integers, so that the logits are exact and the loss is log 1.
    hidden = torch.arange(-12, 12, device=place.device).reshape(6, 4).to(dtype)
    weight = torch.tensor([[1, -2, 3, 5]], device=place.device).to(dtype)
    loss, *grads = loss_and_gradients(place, [hidden, weight], torch.zeros(6, dtype=torch.int64, device=place.device))
    # Of 16 bits the kernels keep logits as powers of two: a rounding of them each way, so much of a row's loss and gradient.
    error = (hidden.float() @ weight.float().T).abs() * 2**-22
    if dtype == torch.float32 or place.backend == "torch":
        error.zero_()
    of_hidden, of_weight = error * weight.float().abs() / 6, (error * hidden.float().abs()).sum(0) / 6
    for got, most in ((loss, error.mean()), (grads[0], of_hidden), (grads[1], of_weight)):
        assert bool((got.float().abs() <= most).all())


@pytest.mark.parametrize("level", [-3e4, -300.0, 300.0, 3e4])
def test_logits_far_from_zero(place: Place, level: float) -> None:
    """Every logit of a row near the same far value: sums neither overflow nor vanish, and no padding leaks in."""
    hidden, weight = inputs_of(5, 37, 3, torch.float32)
    hidden = torch.cat([hidden, torch.full((5, 1), level, device=place.device)], 1)
    weight = torch.cat([weight, torch.ones(37, 1, device=place.device)], 1)
    check(place, [hidden, weight], targets_of(5, 37), reduction="sum")


def test_rows_of_very_different_scales(place: Place) -> None:
    hidden, weight = inputs_of(6, 37, 8, torch.float32)
    check(place, [hidden * torch.logspace(-4, 4, 6, device=place.device)[:, None], weight], targets_of(6, 37), reduction="none")


@pytest.mark.usefixtures("unchecked")
def test_unknown_items_reach_no_foreign_memory(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = inputs_of(6, 9, 4, torch.float32)
    target = torch.tensor([0, 9, -1, 2**40, -(2**62), 8], device=place.device)
    loss, hidden_grad, weight_grad = loss_and_gradients(place, inputs, target, reduction="none")
    assert loss.isnan().tolist() == [False, True, True, True, True, False]
    assert hidden_grad.isfinite().all()
    assert weight_grad.isfinite().all()
    monkeypatch.setenv("JAGGED_VALIDATE", "1")
    with pytest.raises(ValueError, match=r"target\[1\]: expected an id from 0 to 8.*got 9"):
        linear_cross_entropy(*inputs, target, backend=place.backend)
    known = torch.tensor([0, 7, -1, 7, 7, 8], device=place.device)
    linear_cross_entropy(*inputs, known, ignore_index=-1, backend=place.backend)
    with pytest.raises(ValueError, match=r"target\[2\]: .*got -1"):
        linear_cross_entropy(*inputs, known, backend=place.backend)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_master_weights_under_autocast(place: Place, dtype: torch.dtype) -> None:
    """Products in the low dtype, gradients in float32 without its rounding, small ones of float16 included."""
    rows, items = 200, 70
    hidden, weight = inputs_of(rows, items, 16, torch.float32)
    target = targets_of(rows, items)
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    with torch.autocast(place.device.type, dtype=dtype):
        loss = linear_cross_entropy(*leaves, target, backend=place.backend)
    (loss / 4096).backward()
    low = [x.to(dtype).double().requires_grad_() for x in (hidden, weight)]
    expected, _ = reference(*low, target)
    (expected / 4096).backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    for ours, exact in zip(leaves, low, strict=True):
        assert ours.grad is not None
        assert exact.grad is not None
        assert ours.grad.dtype == torch.float32
        assert not torch.equal(ours.grad, ours.grad.to(dtype).float())
        error = (ours.grad - exact.grad).norm() / exact.grad.norm()
        assert error < torch.finfo(dtype).eps, f"error {error:.2e}"


@ON_CPU
def test_autocast_leaves_float64(place: Place) -> None:
    inputs, target = inputs_of(4, 5, 3, torch.float64), targets_of(4, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(*inputs, target)
    torch.testing.assert_close(loss, reference(*inputs, target)[0])


def test_second_derivatives_are_refused(place: Place) -> None:
    hidden, weight = (x.requires_grad_() for x in inputs_of(3, 5, 4, torch.float32))
    loss = linear_cross_entropy(hidden, weight, targets_of(3, 5), backend=place.backend)
    (grad,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="linear_cross_entropy has no second derivative"):
        (grad.square().sum() + loss).backward()


@ON_CPU
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradcheck(place: Place, reduction: str) -> None:
    inputs = [x.requires_grad_() for x in inputs_of(7, 6, 3, torch.float64)]
    target = targets_of(7, 6, ignored=0.3)

    def function(hidden: Tensor, weight: Tensor) -> Any:
        return linear_cross_entropy(hidden, weight, target, reduction=reduction, return_lse=True)  # type: ignore[call-overload]

    assert torch.autograd.gradcheck(function, inputs)


def test_meta_device() -> None:
    hidden, weight = (torch.empty(shape, device="meta", dtype=torch.bfloat16, requires_grad=True) for shape in ((3, 4), (5, 4)))
    loss, lse = linear_cross_entropy(hidden, weight, torch.empty(3, device="meta", dtype=torch.int64), return_lse=True)
    (loss + lse.sum()).backward()
    assert (loss.shape, lse.shape, loss.dtype) == ((), (3,), torch.float32)
    assert hidden.grad is not None
    assert weight.grad is not None
    assert (hidden.grad.shape, weight.grad.dtype) == ((3, 4), torch.bfloat16)


def test_opcheck(place: Place) -> None:
    forward, backward = torch.ops.jagged.linear_cross_entropy.default, torch.ops.jagged.linear_cross_entropy_backward.default
    for dtype in (torch.float32, torch.bfloat16):
        hidden, weight = inputs_of(6, 9, 4, dtype)
        target, rows = targets_of(6, 9, ignored=0.3), random_tensor((6,), torch.float32, 5)
        of_items = random_tensor((9,), torch.float32, 6).abs()
        for vectors, shaping in (((None,) * 3, {}), ((of_items,) * 3, {"temperature": 0.5, "softcap": 3.0})):
            x = Inputs(hidden, weight, target, *vectors)
            torch.library.opcheck(forward, (*x, *Options(**shaping), place.backend))
            grads = rows, rows, None if vectors[2] is None else rows
            of_bias = None if vectors[0] is None else dtype
            for wanted in ((dtype, dtype, of_bias), (None, torch.float32, None), (dtype, None, None)):
                for way in (
                    {"memory_budget": 2**20},
                    {"weight_eps": 0.1, "strategy": "fused"},
                    {"strategy": "chunked", "memory_budget": 0},
                ):
                    torch.library.opcheck(
                        backward,
                        (*grads, *x, rows, None, None, *Options(**shaping, **way), *wanted, place.backend),
                        test_utils=("test_schema", "test_faketensor") if place.name == "interpret" else OPCHECKS,
                    )


HIDDEN, WEIGHT, TARGET = torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: linear_cross_entropy(HIDDEN[0], WEIGHT, TARGET), ValueError, r"hidden: expected shape \[N, D\], got \[4\]"),
        (lambda: linear_cross_entropy(HIDDEN.long(), WEIGHT, TARGET), TypeError, "hidden: expected dtype float32"),
        (
            lambda: linear_cross_entropy(HIDDEN, WEIGHT[:, :3], TARGET),
            ValueError,
            r"weight: expected shape \[V, 4\].*got \[5, 3\]",
        ),
        (lambda: linear_cross_entropy(HIDDEN, WEIGHT[:0], TARGET), ValueError, r"weight: expected from 1 to 2\^31 - 1 items"),
        (
            lambda: linear_cross_entropy(HIDDEN, WEIGHT.bfloat16(), TARGET),
            TypeError,
            "weight: expected the dtype of hidden.*autocast",
        ),
        (
            lambda: linear_cross_entropy(HIDDEN, WEIGHT.to("meta"), TARGET),
            ValueError,
            "weight: expected the device of hidden, cpu",
        ),
        (lambda: linear_cross_entropy(HIDDEN, WEIGHT, TARGET.to("meta")), ValueError, "target: expected the device of hidden"),
        (lambda: linear_cross_entropy(HIDDEN, WEIGHT, TARGET[:2]), ValueError, r"target: expected shape \[3\].*got \[2\]"),
        (
            lambda: linear_cross_entropy(HIDDEN, WEIGHT, TARGET.float()),
            TypeError,
            "target: expected dtype int64, int32, got float32",
        ),
        (lambda: linear_cross_entropy(HIDDEN, WEIGHT, TARGET, bias=TARGET), TypeError, "bias: expected dtype float32"),
        (
            lambda: linear_cross_entropy(HIDDEN, WEIGHT, TARGET, bias=WEIGHT[0]),
            ValueError,
            r"bias: expected shape \[5\].*got \[4\]",
        ),
        (lambda: linear_cross_entropy(HIDDEN, WEIGHT, TARGET, class_weight=WEIGHT), ValueError, r"class_weight: expected.*\[V\]"),
        (
            lambda: linear_cross_entropy(HIDDEN, WEIGHT, TARGET, sample_weight=HIDDEN[0]),
            ValueError,
            r"sample_weight: expected shape \[3\], one number per row.*got \[4\]",
        ),
        (lambda: linear_cross_entropy(HIDDEN, WEIGHT, TARGET, softcap=0.0), ValueError, "softcap: expected a number above 0"),
        (
            lambda: linear_cross_entropy(HIDDEN, WEIGHT, TARGET, temperature=-1.0),
            ValueError,
            "temperature: expected a number above",
        ),
        (
            lambda: linear_cross_entropy(HIDDEN, WEIGHT, TARGET, label_smoothing=1.5),
            ValueError,
            r"label_smoothing: .*\[0, 1\], got 1.5",
        ),
        (
            lambda: linear_cross_entropy(HIDDEN, WEIGHT, TARGET, z_loss=-1.0),
            ValueError,
            "z_loss: expected a number of at least 0",
        ),
        (
            lambda: linear_cross_entropy(HIDDEN, WEIGHT, TARGET, filter_eps=(0.1, -1.0)),
            ValueError,
            r"filter_eps: expected .*got \(0.1, -1.0\)",
        ),
        (
            lambda: linear_cross_entropy(HIDDEN, WEIGHT, TARGET, filter_eps=[0.1, None]),  # type: ignore[call-overload]
            ValueError,
            "filter_eps: expected a number .*a tuple of two",
        ),
        (
            lambda: linear_cross_entropy(HIDDEN, WEIGHT, TARGET, class_weight=torch.ones(5, requires_grad=True)),
            ValueError,
            "class_weight: has no gradient",
        ),
        (
            lambda: linear_cross_entropy(HIDDEN, WEIGHT, TARGET, strategy="chunked", filter_eps=0.1),
            ValueError,
            "strategy: 'chunked' has no filter",
        ),
        (
            lambda: linear_cross_entropy(HIDDEN, WEIGHT, TARGET, strategy="fast"),  # type: ignore[call-overload]
            ValueError,
            "strategy: got 'fast', expected one of 'auto', 'fused', 'chunked'",
        ),
        (
            lambda: linear_cross_entropy(HIDDEN, WEIGHT, TARGET, memory_budget=-1),
            ValueError,
            "memory_budget: expected a number of bytes",
        ),
        (
            lambda: linear_cross_entropy(HIDDEN, WEIGHT, TARGET, reduction="max"),  # type: ignore[call-overload]
            ValueError,
            "reduction: got 'max', expected 'mean', 'sum' or 'none'",
        ),
        (lambda: linear_cross_entropy(HIDDEN, WEIGHT, TARGET, backend="cuda"), ValueError, "backend: got 'cuda'"),
        (lambda: linear_cross_entropy(HIDDEN.double(), WEIGHT.double(), TARGET, backend="triton"), TypeError, "float64"),
    ],
)
def test_messages_name_argument_and_cure(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.skipif(PLACE.name == "interpret", reason="interpreted kernels are not compiled")
@pytest.mark.parametrize("autocast", [False, True])
def test_one_graph_for_all_numbers_of_rows(place: Place, autocast: bool) -> None:
    counter = CompileCounterWithBackend("inductor" if place.name == "gpu" else "aot_eager")

    def function(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        with torch.autocast(place.device.type, dtype=torch.bfloat16, enabled=autocast):
            loss, lse = linear_cross_entropy(hidden, weight, target, return_lse=True, backend=place.backend)
            return loss + lse.mean()

    compiled, first = torch.compile(function, fullgraph=True, dynamic=True, backend=counter), 0
    for rows in (5, 30, 11):
        inputs, target = inputs_of(rows, 40, 8, torch.float32), targets_of(rows, 40, ignored=0.3)
        results = []
        for call in (compiled, function):
            leaves = [x.clone().requires_grad_() for x in inputs]
            loss = call(*leaves, target)
            loss.backward()
            results.append([loss.detach(), *(leaf.grad for leaf in leaves)])
        torch.testing.assert_close(*results)
        # Of a temperature, a float, the compiler learns that it is a constant, and starts once more.
        first = first or counter.frame_count
    assert counter.frame_count == first


@ON_GPU
def test_no_synchronisation_and_graph_capture(place: Place) -> None:
    hidden, weight = (x.requires_grad_() for x in inputs_of(300, 1000, 64, torch.bfloat16))
    target = targets_of(300, 1000, ignored=0.3)

    def step() -> list[Tensor]:
        loss, lse = linear_cross_entropy(hidden, weight, target, return_lse=True)
        return [loss.detach(), *torch.autograd.grad(loss + lse.sum(), [hidden, weight])]

    graph, results = captured(step)
    for ignored in (0.3, 0.9, 0.0):
        target.copy_(targets_of(300, 1000, 1, ignored))
        graph.replay()
        torch.testing.assert_close(results, step(), rtol=0, atol=0)


@ON_GPU
def test_memory_is_that_of_the_gradients(place: Place) -> None:
    rows, items, width = 8192, 100_000, 64
    hidden, weight = (x.requires_grad_() for x in inputs_of(rows, items, width, torch.bfloat16))
    target = targets_of(rows, items)
    linear_cross_entropy(hidden, weight, target).backward()
    hidden.grad = weight.grad = None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    linear_cross_entropy(hidden, weight, target).backward()
    gradients = (rows + items) * width * 2
    # The logits would take 1.6 GB in bfloat16.
    assert torch.cuda.max_memory_allocated() - before < gradients + 64 * 2**20


@ON_GPU
@pytest.mark.parametrize("long_side", ["rows", "items"])
def test_addresses_past_2_to_the_31(place: Place, long_side: str) -> None:
    """One side is zero but for its last rows, so that the rest of the sum is known."""
    width, long, short = 64, 2**25 + 5, 70
    sides = {"rows": (long, short), "items": (short, long)}[long_side]
    hidden = torch.zeros(sides[0], width, dtype=torch.bfloat16, device=place.device)
    weight = torch.zeros(sides[1], width, dtype=torch.bfloat16, device=place.device)
    for matrix, seed in ((hidden, 0), (weight, 1)):
        matrix[-short:] = random_tensor((short, width), torch.bfloat16, seed)
    target = torch.full((sides[0],), -100, device=place.device)
    target[-short:] = targets_of(short, short) + sides[1] - short
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    loss = linear_cross_entropy(*leaves, target, reduction="sum")
    loss.backward()
    ends = [leaf.detach()[-short:].double().requires_grad_() for leaf in leaves]
    logits = F.linear(*ends)
    zeros = math.log(sides[1] - short) if sides[1] > short else -math.inf
    expected = (
        torch.logaddexp(logits.logsumexp(1), logits.new_tensor(zeros)) - logits.gather(1, targets_of(short, short)[:, None])[:, 0]
    ).sum()
    expected.backward()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)
    for leaf, end in zip(leaves, ends, strict=True):
        assert leaf.grad is not None
        assert end.grad is not None
        torch.testing.assert_close(leaf.grad[-short:].double(), end.grad, rtol=0.02, atol=0.02)
