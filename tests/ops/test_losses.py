"""The mean of rows' losses, which is one kernel, against PyTorch's sums in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from jagged.ops._shared.losses import MEAN_LOSS, Options, Rows, side_by_side
from tests.aot import AMD, TARGETS, compile_kernel
from tests.places import PLACE, Place
from tests.strategies import random_tensor

IGNORED = 3


def mean_of(losses: Tensor, less: Tensor | None, target: Tensor, backend: str) -> Tensor:
    return MEAN_LOSS(Rows(losses, less, target), Options(IGNORED), backend).mean


def rows_of(rows: int, dtype: torch.dtype, target_dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Losses and what is subtracted, 0 in ignored rows, of any stride, and targets."""
    target = torch.arange(rows, device=device).remainder(5).to(target_dtype)
    losses, less = (random_tensor((rows, 2), dtype, seed)[:, 0].masked_fill(target == IGNORED, 0) for seed in (1, 2))
    return losses.requires_grad_(), less.requires_grad_(), target


@pytest.mark.parametrize("with_less", [False, True])
@pytest.mark.parametrize("target_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("rows", [0, 1, 4095, 4096, 4097, 20_000])
def test_is_the_mean_of_rows_that_count(place: Place, rows: int, target_dtype: torch.dtype, with_less: bool) -> None:
    losses, less, target = rows_of(rows, torch.float32, target_dtype, place.device)
    inputs = [losses, less] if with_less else [losses]
    got = mean_of(losses, less if with_less else None, target, place.backend)
    counted = max(1, int((target != IGNORED).sum()))
    wanted = (losses.double() - less.double() if with_less else losses.double()).sum() / counted
    torch.testing.assert_close(got.double(), wanted, rtol=1e-6, atol=1e-7)
    for sign, grad in zip((2, -2), torch.autograd.grad(got, inputs, torch.tensor(2.0, device=place.device)), strict=False):
        torch.testing.assert_close(grad, torch.full_like(losses, sign / counted))


def test_derivatives_of_any_order(place: Place) -> None:
    losses, less, target = rows_of(7, torch.float64, torch.int64, place.device)
    assert torch.autograd.gradgradcheck(lambda x, y: mean_of(x, y, target, "torch").square(), (losses, less))


def test_kernels_get_gradients_whose_strides_are_0_or_1() -> None:
    """A column of a wide matrix would lie past what a product of 32 bits reaches."""
    column, one = torch.rand(5, 7)[:, 3], torch.rand(()).expand(5)
    assert side_by_side(column).stride() == (1,)
    assert torch.equal(side_by_side(column), column)
    assert side_by_side(one) is one


@pytest.mark.skipif(PLACE.name != "cpu", reason="compiles ahead of time")
@pytest.mark.parametrize("arch", [*TARGETS, AMD])
def test_kernel_spills_nothing(arch: int | str) -> None:
    from jagged.ops._shared import kernels

    pointers = dict.fromkeys(("losses", "less", "mean", "counted"), "*fp32")
    signature = {**pointers, "target": "*i64", "num_rows": "i32", "ignore_index": "i32"}
    used = compile_kernel(kernels.mean_loss_kernel, signature, {"BLOCK": 4096}, arch=arch, num_warps=16)
    assert used.spills == 0, str(used)
