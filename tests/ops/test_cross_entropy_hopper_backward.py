"""The gradients' kernel for Hopper: what every cross-entropy must do, at sizes around its tiles, and that it is what runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from jagged.ops import linear_cross_entropy
from jagged.ops._shared.matrices import aligned
from jagged.ops.cross_entropy import hopper
from jagged.ops.cross_entropy.hopper import INPUTS, OPTIONS
from jagged.ops.cross_entropy.spec import Inputs, Options, Outputs
from tests.ops.test_cross_entropy import check, inputs_of, loss_and_gradients, targets_of
from tests.oracle import check_three_way
from tests.places import PLACE, Place
from tests.reference.cross_entropy import linear_cross_entropy as reference

ON_HOPPER = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        PLACE.name == "gpu" and torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0"
    ),
]
HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture(name="calls")
def _calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Fail unless this kernel computed the gradients of both sides, and no other kernel one."""
    from jagged.ops.cross_entropy.hopper import backward
    from jagged.ops.cross_entropy.triton import backward as others

    calls: list[bool] = []
    launched = backward.gradient

    def gradient(*arguments: Any, owns_items: bool, unless: None) -> Tensor:
        calls.append(owns_items)
        return launched(*arguments, owns_items=owns_items, unless=unless)

    monkeypatch.setattr(backward, "gradient", gradient)
    for name in ("hidden", "weight"):
        monkeypatch.setattr(others, f"_launch_{name}", None)
    yield calls
    assert {False, True} <= set(calls)


@pytest.mark.usefixtures("calls")
class TestOnHopper:
    pytestmark = ON_HOPPER

    @pytest.mark.parametrize("dtype", HALVES)
    @pytest.mark.parametrize("sign", [1, -1])
    @pytest.mark.parametrize(
        ("rows", "items", "width"),
        [
            (1, 40, 16), (63, 129, 64), (65, 63, 50), (129, 257, 64), (193, 1000, 64), (63, 65, 100), (129, 129, 128),
            (300, 129, 200), (63, 1000, 256), (129, 65, 256), (700, 513, 256),
        ],
    )  # fmt: skip
    def test_around_the_tiles(self, place: Place, rows: int, items: int, width: int, sign: int, dtype: torch.dtype) -> None:
        """All gradients of log-sum-exps have one sign; in tiles of the other nothing is as it is in most."""
        target = targets_of(rows, items, ignored=0.1 if rows > 1 else 0.0)
        options: dict[str, Any] = {"temperature": 0.7}
        check_three_way(
            lambda h, w: sign * linear_cross_entropy(h, w, target, backend=place.backend, **options).float(),
            lambda h, w: sign * reference(h, w, target, **options)[0],
            inputs_of(rows, items, width, dtype),
        )

    @pytest.mark.parametrize("width", [64, 128, 256])
    @pytest.mark.parametrize(("rows", "items"), [(129, 9), (9000, 70), (70, 9000)])
    def test_both_signs_and_parts(self, place: Place, rows: int, items: int, width: int) -> None:
        """Gradients of losses and log-sum-exps that are random, and walks of many parts, of many tiles and of few."""
        check(place, inputs_of(rows, items, width, torch.bfloat16), targets_of(rows, items, ignored=0.2), reduction="none")

    @pytest.mark.parametrize("width", [64, 128, 256])
    def test_many_walks_of_a_program(self, place: Place, width: int) -> None:
        """More blocks of items than multiprocessors."""
        check(place, inputs_of(70, 60_000, width, torch.bfloat16), targets_of(70, 60_000), reduction="sum")

    @pytest.mark.parametrize("width", [64, 256])
    @pytest.mark.parametrize(("rows", "items"), [(1000, 9000), (9000, 1000)])
    def test_short_walks(self, place: Place, rows: int, items: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of so many parts that own rows are taken some at a time."""
        from jagged.ops.cross_entropy.hopper import backward

        monkeypatch.setattr(backward, "LONGEST", 1)
        monkeypatch.setattr(backward, "TURNS", 2)
        check(place, inputs_of(rows, items, width, torch.bfloat16), targets_of(rows, items, ignored=0.2), reduction="none")

    def test_long_sums_lose_nothing(self, place: Place) -> None:
        """Tensor cores cut off what does not fit into a sum; all terms have one sign here, so that it adds up."""
        from jagged.ops.cross_entropy.hopper.backward import LONGEST

        rows, items, width = 17_000, 1_500_000, 64
        hidden, weight = inputs_of(rows, items, width, torch.float16)
        weight = weight.abs_()
        leaves = [hidden.requires_grad_(), weight.requires_grad_()]
        lse = linear_cross_entropy(*leaves, targets_of(rows, items), return_lse=True, backend=place.backend)[1]
        grad_hidden, _ = torch.autograd.grad(lse.sum(), leaves)
        wide = weight.detach().double()
        exact = (hidden[:16].detach().double() @ wide.t()).softmax(1) @ wide
        share = (grad_hidden[:16].double() * exact).sum() / exact.square().sum()
        # Up to a unit in the last place for each of four additions a tile; one sum of all items would lose a hundredth.
        assert abs(float(share) - 1) < 4 * LONGEST * 2.0**-23 < 5e-4

    @pytest.mark.parametrize("dtype", HALVES)
    def test_ignored_rows(self, place: Place, dtype: torch.dtype) -> None:
        hidden, weight = inputs_of(129, 300, 64, dtype)
        target = targets_of(129, 300, ignored=0.4)
        want = loss_and_gradients(place, [hidden, weight], target)
        dirty = hidden.masked_fill((target < 0)[:, None], float("nan"))
        for got, expected in zip(loss_and_gradients(place, [dirty, weight], target), want, strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=0)

    @pytest.mark.parametrize("dtype", HALVES)
    def test_float32_gradients(self, place: Place, dtype: torch.dtype) -> None:
        """Master weights get what was accumulated, without a rounding but that of the logits' gradients."""
        inputs, target = inputs_of(200, 500, 128, torch.float32), targets_of(200, 500)
        with torch.autocast("cuda", dtype):
            grads = loss_and_gradients(place, inputs, target)[1:]
        hidden, weight = (x.to(dtype).double() for x in inputs)
        of_logits = (F.linear(hidden, weight).softmax(1) - F.one_hot(target, 500)) / 200
        # One rounding of each logit's gradient, by half an eps at most, and sums in float32.
        for got, rounded, other in zip(grads, (of_logits, of_logits.T), (weight, hidden), strict=True):
            assert got.dtype == torch.float32
            bound = (torch.finfo(dtype).eps / 2 + 1e-4) * (rounded.abs() @ other.abs())
            assert ((got.double() - rounded @ other).abs() <= bound).all()
            assert not torch.equal(got, got.to(dtype).float())

    @pytest.mark.parametrize("width", [64, 128, 256])
    def test_small_logits_past_the_end(self, place: Place, width: int) -> None:
        """Log-sum-exps far below 0: the exponential of what TMA fills in, 0, is too large for float32."""
        hidden = torch.ones(129, width, dtype=torch.bfloat16, device=place.device)
        weight = torch.full((129, width), -256 / width, dtype=torch.bfloat16, device=place.device)
        loss, of_hidden, of_weight = loss_and_gradients(place, [hidden, weight], targets_of(129, 129))
        assert loss.isfinite()
        assert of_hidden.isfinite().all()
        assert of_weight.isfinite().all()

    def test_repeats(self, place: Place) -> None:
        inputs, target = inputs_of(3000, 5000, 64, torch.bfloat16), targets_of(3000, 5000)
        first = loss_and_gradients(place, inputs, target)
        for _ in range(3):
            for got, want in zip(loss_and_gradients(place, inputs, target), first, strict=True):
                assert torch.equal(got, want)


HALF = torch.zeros(8, 64, dtype=torch.bfloat16)
TARGET = torch.zeros(8, dtype=torch.int64)
DTYPES, STRIDES = "rows are not of 16 bits, in one dtype", "rows overlap, or do not begin at 16 bytes"


@pytest.mark.skipif(PLACE.name == "interpret", reason="interpreted kernels choose alike")
@pytest.mark.parametrize(
    ("reason", "hidden", "weight", "options"),
    [
        (None, HALF, HALF[:5], {"temperature": 2.0, "ignore_index": 1, "strategy": "chunked"}),
        (None, HALF.half(), HALF.half(), {"hidden_eps": 0.1}),
        # One row is contiguous whatever its stride, so nothing copies it; a descriptor takes multiples of 16 bytes alone.
        (STRIDES, HALF.new_zeros(1, 100)[:, :64], HALF, {}),
        (None, HALF.new_zeros(2, 100)[:, :64], HALF, {}),
        (STRIDES, HALF.new_zeros(513)[1:].view(8, 64), HALF, {}),
        (STRIDES, HALF, HALF[:1].expand(8, 64), {}),
        (DTYPES, HALF, HALF.half(), {}),
        (DTYPES, HALF.float(), HALF.float(), {}),
        ("softcap is 30.0", HALF, HALF, {"softcap": 30.0}),
        ("bias is given", HALF, HALF, {"bias": HALF[:, 0]}),
        ("item_scale is given", HALF, HALF, {"item_scale": HALF[:, 0].float()}),
        ("smoothing is given", HALF, HALF, {"smoothing": HALF[:, 0].float()}),
    ],
)
def test_which_kernels_are_launched(
    monkeypatch: pytest.MonkeyPatch, reason: str | None, hidden: Tensor, weight: Tensor, options: dict[str, Any]
) -> None:
    """All but the launch is done on the CPU. Backward reads a copy of the hidden states, which begins at 16 bytes."""
    from jagged.ops.cross_entropy.hopper import logits
    from jagged.ops.cross_entropy.triton import forward, launch, rows

    launched: list[object] = []
    monkeypatch.setattr(hopper, "is_hopper", lambda device: True)
    monkeypatch.setattr(forward, "_launch_join", lambda *arguments, **constants: None)
    monkeypatch.setattr(forward, "_launch_forward", lambda *arguments, **constants: launched.append(False))
    monkeypatch.setattr(logits, "logits_in_parts", lambda *arguments: (launched.append(True), (TARGET[None], TARGET[None]))[1])
    monkeypatch.setattr(rows, "_launch_rows", lambda *arguments, **constants: None)
    for name in ("backward_chunked", "backward_fused"):
        monkeypatch.setattr(launch, name, lambda *arguments, on_hopper: (launched.append(on_hopper), {})[1])
    monkeypatch.setattr(launch, "filter_of", lambda *arguments, on_hopper: None)
    x = Inputs(hidden, weight, TARGET[: len(hidden)], *(options.pop(name, None) for name in Inputs._fields[3:]))
    o = Options(**options)
    assert hopper.supports(x._replace(hidden=aligned(hidden), weight=aligned(weight)), o) == reason
    lse = launch.forward(x, o).lse
    assert launched.pop() == (reason is None)
    launch.backward(Outputs(lse, lse, None), x, Outputs(lse, lse, lse), o, {})  # type: ignore[arg-type]
    assert launched == [reason is None or (reason == STRIDES and weight is HALF)]


def test_what_is_new_is_refused() -> None:
    """Kernels serve an input or an option only once it is named as one that they have been taught."""
    assert set(Inputs._fields) >= INPUTS
    assert set(Options._fields) >= OPTIONS
    x = Inputs(HALF, HALF, TARGET)
    for name in set(Options._fields) - OPTIONS:
        assert hopper.supports(x, Options()._replace(**{name: 5.0})) == f"{name} is 5.0"
    for name in set(Inputs._fields) - INPUTS:
        assert hopper.supports(x._replace(**{name: TARGET}), Options()) == f"{name} is given"
