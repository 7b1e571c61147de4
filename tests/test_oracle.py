"""The oracle itself: what it must let pass however the numbers fall, and what it must catch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.oracle import check_three_way

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def random(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def accumulated(x: Tensor) -> Tensor:
    """In the dtype that kernels sum in."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def product(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


def one_by_one(a: Tensor, b: Tensor) -> Tensor:
    """The product of a row and a column, its terms added up in order: the least exact way to do it in one pass."""
    terms = accumulated(a)[0] * accumulated(b)[:, 0]
    return terms.cumsum(0)[-1].to(a.dtype).view(1, 1)


def sums(x: Tensor, row: Tensor) -> Tensor:
    return x + row


def sums_one_by_one(x: Tensor, row: Tensor) -> Tensor:
    return OneByOne.apply(x, row)


class OneByOne(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, row: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        return x + row

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
        return grad, accumulated(grad).cumsum(0)[-1].to(grad.dtype)


HONEST: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "a sum of one number": (one_by_one, product, [(1, 300), (300, 1)]),
    "a gradient that no input enters": (sums_one_by_one, sums, [(75, 3), (3,)]),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", HONEST)
def test_no_luck_is_needed(case: str, dtype: torch.dtype) -> None:
    ours, reference, shapes = HONEST[case]
    for seed in range(200):
        check_three_way(ours, reference, [random(*shape, dtype=dtype, seed=seed * 10 + k) for k, shape in enumerate(shapes)])


def narrow(x: Tensor) -> Tensor:
    """Of the next lower precision: float32 for float64, TF32 for float32, two bits for the others."""
    if x.dtype == torch.float32:
        return (x.detach().view(torch.int32) & ~0x1FFF).view(torch.float32) + (x - x.detach())
    return x.to(torch.float32 if x.dtype == torch.float64 else torch.float8_e5m2).to(x.dtype)


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        return grad * 1.05


FAULTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "inputs of lower precision": lambda a, b: narrow(a) @ b,
    "a result of lower precision": lambda a, b: narrow(a @ b),
    "a term left out": lambda a, b: a[:, :-1] @ b[:-1],
    "a gradient of a twentieth more": lambda a, b: WrongGradient.apply(a) @ b,
    "no number": lambda a, b: a @ b / 0,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("shapes", [[(1, 20), (20, 1)], [(9, 20), (20, 7)], [(40, 100), (100, 30)]], ids=str)
def test_a_fault_is_found(fault: str, shapes: list[tuple[int, int]], dtype: torch.dtype) -> None:
    with pytest.raises(AssertionError, match=r"(output|gradient of input [01]): error .*, allowed"):
        check_three_way(FAULTS[fault], product, [random(*shape, dtype=dtype, seed=k) for k, shape in enumerate(shapes)])
