"""The layer normalisation of the modules, in place of PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from jagged.modules import HSTUBlock, JaggedTransformerBlock, LayerNorm
from tests.places import PLACE, Place
from tests.strategies import random_tensor

pytestmark = pytest.mark.skipif(PLACE.name == "interpret", reason="modules run on the place's own backend")


def pair(width: int, eps: float = 1e-5, *, autocast_output: bool = False) -> tuple[LayerNorm, nn.LayerNorm]:
    """Ours, and PyTorch's with its parameters."""
    ours = LayerNorm(width, eps, autocast_output=autocast_output, device=PLACE.device)
    theirs = nn.LayerNorm(width, eps, device=PLACE.device)
    with torch.no_grad():
        for seed, parameter in enumerate(ours.parameters()):
            parameter.copy_(random_tensor(tuple(parameter.shape), torch.float32, seed))
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


@pytest.mark.parametrize("shape", [(7, 12), (0, 12), (3, 4, 12), (12,)])
def test_it_is_pytorchs(place: Place, shape: tuple[int, ...]) -> None:
    ours, theirs = pair(12, 1e-3)
    x = random_tensor(shape, torch.float32, 5).requires_grad_()
    assert isinstance(ours, nn.LayerNorm)
    results = []
    for of in (ours, theirs):
        output = of(x)
        results.append((output, *torch.autograd.grad(output.square().sum(), [x, *of.parameters()])))
    torch.testing.assert_close(*results, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("rows_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast(place: Place, dtype: torch.dtype, rows_dtype: torch.dtype) -> None:
    """Where a product reads it, what PyTorch's autocast makes of PyTorch's at the product; else what it makes of it at once."""
    x = random_tensor((9, 12), torch.float32, 5).to(rows_dtype)
    for autocast_output in (True, False):
        ours, theirs = pair(12, autocast_output=autocast_output)
        with torch.autocast(PLACE.device.type, dtype):
            found = ours(x)
        expected = theirs(x.float()).to(dtype if autocast_output else torch.float32)
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=2 * torch.finfo(found.dtype).eps + 1e-6)


def test_float64_stays_under_autocast(place: Place) -> None:
    ours, theirs = (of.double() for of in pair(12, autocast_output=True))
    x = random_tensor((9, 12), torch.float64, 5)
    with torch.autocast(PLACE.device.type, torch.bfloat16):
        found = ours(x)
    torch.testing.assert_close(found, theirs(x))


def test_its_options_are_shown_and_its_parameters_begin_as_pytorchs(place: Place) -> None:
    ours = LayerNorm(4, autocast_output=True, device="meta")
    assert repr(ours) == "LayerNorm(normalized_shape=(4,), eps=1e-05, autocast_output=True)"
    assert ours(torch.ones(2, 4, device="meta")).shape == (2, 4)
    ours = ours.to_empty(device=PLACE.device)
    ours.reset_parameters()
    for name, parameter in nn.LayerNorm(4).named_parameters():
        assert torch.equal(parameter, ours.get_parameter(name).cpu()), name


@pytest.mark.parametrize("rows_dtype", [torch.float32, torch.bfloat16])
def test_a_model_in_half_precision_under_autocast(place: Place, rows_dtype: torch.dtype) -> None:
    """Rows of one block's norm are float32 then, whatever its weights are."""
    block = JaggedTransformerBlock(12, 2, norm="post").to(PLACE.device, torch.bfloat16)
    rows = random_tensor((5, 12), torch.float32, 3).to(rows_dtype)
    offsets = torch.tensor([0, 2, 5], device=PLACE.device)
    with torch.autocast(PLACE.device.type, torch.bfloat16):
        found = block(JaggedTensor(rows, offsets=offsets)).values()
    assert found.dtype == torch.float32
    expected = block.float()(JaggedTensor(rows.float(), offsets=offsets)).values()
    torch.testing.assert_close(found, expected, atol=0.1, rtol=0.1)


def test_a_width_of_numpys(place: Place) -> None:
    assert LayerNorm(np.int64(4), device=PLACE.device).normalized_shape == (4,)  # type: ignore[arg-type]


REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: LayerNorm(0), ValueError, "width: expected the columns of a row, at least 1, got 0"),
    (lambda: LayerNorm((5, 8)), ValueError, "width: expected the columns of a row, at least 1, got (5, 8)"),  # type: ignore[arg-type]
    (lambda: LayerNorm(True), ValueError, "width: expected the columns of a row, at least 1, got True"),
    (
        lambda: LayerNorm(4, device=PLACE.device)(torch.arange(8, device=PLACE.device).view(2, 4)),
        TypeError,
        "x: expected dtype float32, bfloat16, float16, float64, got int64; convert it with .to(...)",
    ),
    (
        lambda: LayerNorm(4, device=PLACE.device)(torch.ones(2, 4, dtype=torch.bool, device=PLACE.device)),
        TypeError,
        "x: expected dtype float32, bfloat16, float16, float64, got bool; convert it with .to(...)",
    ),
    (
        lambda: LayerNorm(4, device=PLACE.device)(torch.ones(2, 5, device=PLACE.device)),
        ValueError,
        "weight: expected shape [5], as x [2, 5] has columns, got [4]",
    ),
    (lambda: LayerNorm(8, 0.0), ValueError, "eps: expected above 0, got 0.0"),
    (
        lambda: LayerNorm(4)(JaggedTensor(torch.ones(2, 4), lengths=torch.tensor([2]))),
        TypeError,
        "x: expected a tensor [..., 4], got JaggedTensor; give its values()",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), REFUSED, ids=[of[2] for of in REFUSED])
def test_what_is_refused(call: Callable[[], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as refused:
        call()
    assert str(refused.value) == message


def test_which_norms_a_product_reads() -> None:
    """Others are residuals, and stay in float32 under autocast."""
    for block, expected in (
        (JaggedTransformerBlock(8, 2), [True, True]),
        (JaggedTransformerBlock(8, 2, norm="post"), [False, False]),
        (HSTUBlock(8, 2), [True, True]),
    ):
        assert [of.autocast_output for of in block.modules() if isinstance(of, LayerNorm)] == expected
