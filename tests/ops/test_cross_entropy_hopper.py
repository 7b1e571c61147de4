"""The kernels for Hopper: what every cross-entropy must do, at sizes around their tiles, and that they are what runs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from jagged.ops import linear_cross_entropy
from jagged.ops.cross_entropy import hopper
from jagged.ops.cross_entropy.spec import Inputs, Options
from tests.ops.test_cross_entropy import all_outputs, check, inputs_of, targets_of
from tests.oracle import check_three_way
from tests.places import PLACE, Place
from tests.reference.cross_entropy import linear_cross_entropy as reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        PLACE.name == "gpu" and torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0"
    ),
]
HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture(name="calls")
def _calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Fail unless forward was one of these kernels."""
    from jagged.ops.cross_entropy.hopper import logits

    calls: list[str] = []

    def record(name: str) -> None:
        launched = getattr(logits, name)
        monkeypatch.setattr(logits, name, lambda *arguments: (calls.append(name), launched(*arguments))[1])

    record("logits_in_parts")
    record("logit_gradients")
    yield calls
    assert "logits_in_parts" in calls


def split_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every tile a part of its own."""
    from jagged.ops.cross_entropy.hopper import logits

    monkeypatch.setattr(logits, "balanced_parts", lambda steps, *_: (steps, 1))


def check_by(place: Place, strategy: str, inputs: list[torch.Tensor], target: torch.Tensor) -> None:
    """Compare, with chunks as short as they can be."""
    options: dict[str, Any] = {"strategy": strategy, "memory_budget": 0, "backend": place.backend}
    check_three_way(
        lambda h, w: all_outputs(*linear_cross_entropy(h, w, target, return_lse=True, **options)),
        lambda h, w: all_outputs(*reference(h, w, target)),
        inputs,
    )


@pytest.mark.parametrize(
    ("rows", "items", "width", "dtype"),
    [
        (1, 40, 16, HALVES[0]), (63, 127, 64, HALVES[0]), (129, 257, 64, HALVES[1]), (127, 255, 50, HALVES[0]),
        (300, 1000, 65, HALVES[1]), (65, 128, 128, HALVES[0]), (129, 513, 130, HALVES[1]), (127, 256, 256, HALVES[0]),
        (257, 1000, 256, HALVES[1]), (1, 257, 257, HALVES[1]), (128, 255, 320, HALVES[0]), (129, 1000, 2304, HALVES[0]),
    ],
)  # fmt: skip
def test_around_the_tiles(place: Place, calls: list[str], rows: int, items: int, width: int, dtype: torch.dtype) -> None:
    inputs, target = inputs_of(rows, items, width, dtype), targets_of(rows, items, ignored=0.1 if rows > 1 else 0.0)
    check(place, inputs, target, temperature=0.7)
    del calls[:]
    check_by(place, "chunked", inputs, target)
    assert "logit_gradients" in calls


@pytest.mark.parametrize("width", [16, 128, 256, 384])
@pytest.mark.parametrize(("rows", "items"), [(129, 1), (40_000, 300), (70, 70_000)])
def test_log_sum_exp_against_float64(
    place: Place, calls: list[str], monkeypatch: pytest.MonkeyPatch, rows: int, items: int, width: int
) -> None:
    """One item; more blocks of rows than multiprocessors; many parts. In parts or not it is the same, and repeats to the bit."""
    hidden, weight = inputs_of(rows, items, width, torch.bfloat16)
    target = targets_of(rows, items)

    def log_sum_exp() -> torch.Tensor:
        return linear_cross_entropy(hidden, weight, target, temperature=0.5, return_lse=True)[1]

    got = log_sum_exp()
    expected = (F.linear(hidden.double(), weight.double()) / 0.5).logsumexp(1)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(log_sum_exp(), got, rtol=0, atol=0)
    split_everywhere(monkeypatch)
    torch.testing.assert_close(log_sum_exp().double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("width", [64, 256, 320])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_ignored_rows_may_hold_anything(place: Place, calls: list[str], width: int, poison: float) -> None:
    (hidden, weight), target = inputs_of(150, 700, width, torch.bfloat16), targets_of(150, 700, ignored=0.3)

    def step(hidden: torch.Tensor) -> list[torch.Tensor]:
        leaves = [hidden.requires_grad_(), weight.clone().requires_grad_()]
        loss = linear_cross_entropy(*leaves, target)
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]

    expected = step(hidden.clone())
    poisoned = step(hidden.masked_fill((target == -100)[:, None], poison))
    torch.testing.assert_close(poisoned, expected, rtol=0, atol=0)


@pytest.mark.parametrize("width", [64, 256, 320])
def test_nan_shows(place: Place, calls: list[str], width: int) -> None:
    (hidden, weight), target = inputs_of(150, 700, width, torch.bfloat16), targets_of(150, 700)
    weight[333, 3] = math.nan
    assert linear_cross_entropy(hidden, weight, target, reduction="none").isnan().all()
    weight[333, 3] = 1
    hidden[77] = math.nan
    assert linear_cross_entropy(hidden, weight, target, reduction="none").isnan().nonzero().flatten().tolist() == [77]


@pytest.mark.parametrize("level", [-3e4, 3e4])
@pytest.mark.parametrize("strategy", ["fused", "chunked"])
def test_logits_far_from_zero(place: Place, calls: list[str], level: float, strategy: str) -> None:
    """Tiles that end past the last item hold products of 0 there, far above or below all logits."""
    hidden, weight = inputs_of(70, 300, 384, torch.bfloat16)
    hidden[:, 0], weight[:, 0] = 128, level / 128
    check_by(place, strategy, [hidden, weight], targets_of(70, 300))


def test_rows_that_begin_anywhere(place: Place) -> None:
    """Descriptors cannot tell of them; the other kernels can."""
    hidden, weight = inputs_of(40, 50, 64, torch.bfloat16)
    shifted = torch.cat([hidden.new_zeros(1), hidden.flatten()])[1:].view(40, 64)
    target = targets_of(40, 50)
    assert hopper.supports(Inputs(shifted, weight, target), Options()) == "rows overlap, or do not begin at 16 bytes"
    got, expected = (linear_cross_entropy(rows, weight, target, reduction="none") for rows in (shifted, hidden))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_served", [True, False])
def test_parts_that_end_near_2_to_the_31(place: Place, is_served: bool) -> None:
    """The last part's first item and the length of a part add up to more than 32 bits hold, here and in the other kernels."""
    items, width = 2**31 - 300, 16
    if is_served and torch.cuda.mem_get_info()[0] < 3 * items * width:
        pytest.skip("needs 96 GiB of memory")
    hidden, row = torch.ones(2, 4, width, dtype=torch.bfloat16, device=place.device).unbind()
    # Rows that are all the same one take no memory, and no descriptor.
    weight = row[:1].expand(items, width).contiguous() if is_served else row[:1].expand(items, width)
    target = torch.tensor([0, 1, items // 2, items - 1], device=place.device)
    assert (hopper.supports(Inputs(hidden, weight, target), Options()) is None) == is_served
    loss = linear_cross_entropy(hidden, weight, target, reduction="none")
    torch.testing.assert_close(loss, torch.full_like(loss, math.log(items)), rtol=1e-3, atol=0)


def test_one_row_of_any_stride(place: Place) -> None:
    """It counts as contiguous, and nothing copies it; descriptors cannot tell of it."""
    (hidden, weight), target = inputs_of(1, 1, 100, torch.bfloat16), targets_of(1, 1)
    got = linear_cross_entropy(hidden[:, :64], weight[:, :64], target, reduction="none", return_lse=True)[1]
    expected = (hidden[:, :64].double() @ weight[:, :64].double().T)[:, 0]
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)
