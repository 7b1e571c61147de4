"""The three-way oracle: float64 reference, the same reference in the tested dtype, ours.

Ours may err at most `factor` times as much as the low-precision reference, plus what one rounding does: of the result, and of
the inputs, measured as the most that moving each to a neighbour in its dtype changes in a few draws. Of a few numbers, one
evaluation's error is luck: it may be nothing. Where ours errs more, the low-precision reference is therefore evaluated at moved
inputs too, and its largest error counts. The cotangent is an input of gradients.

In float64 the reference has no error against itself: there it is what it errs in float32, in float64's roundings. There are no
other tolerances.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

FORWARD, GRADIENT = 2.0, 3.0
DRAWS = 64
LOWER = {torch.float64: torch.float32}


def check_three_way(
    ours: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    *,
    requires_grad: Sequence[bool] | None = None,
) -> None:
    """Check outputs and gradients of `ours` against `reference`, both called with `inputs` (floating-point tensors only).

    `requires_grad` says which inputs get a gradient; the others must get none.
    """
    wanted = [True] * len(inputs) if requires_grad is None else list(requires_grad)
    generator = torch.Generator(device="cpu").manual_seed(7)
    cotangent: Tensor | None = None

    def evaluate(function: Callable[..., Tensor], leaves: list[Tensor]) -> list[Tensor | None]:
        nonlocal cotangent
        for leaf, want in zip(leaves, wanted, strict=True):
            leaf.requires_grad_(want)
        output = function(*leaves)
        if cotangent is None:
            cotangent = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(inputs[0].dtype).to(output.device)
        # Of an empty batch a reference may be a constant; ours must still give (empty) gradients.
        if any(wanted) and (output.requires_grad or function is ours):
            output.backward(cotangent.to(output.dtype))
        if function is ours:
            assert [leaf.grad is not None for leaf in leaves] == wanted, "inputs that want a gradient, and only they, get one"
        grads = [
            torch.zeros_like(leaf) if want and leaf.grad is None else leaf.grad for leaf, want in zip(leaves, wanted, strict=True)
        ]
        return [output.detach(), *grads]

    exact = evaluate(reference, [x.detach().double() for x in inputs])
    low = evaluate(reference, [x.detach().clone() for x in inputs])
    got = evaluate(ours, [_same_strides(x) for x in inputs])
    for ours_, low_ in zip(got, low, strict=True):
        assert (ours_ is None) == (low_ is None)
        assert ours_ is None or low_ is None or ours_.dtype == low_.dtype, f"{ours_.dtype} against {low_.dtype}"
    errors = [_error(a, b) for a, b in zip(got, exact, strict=True)]
    of_low = [_error(a, b) for a, b in zip(low, exact, strict=True)]
    of_roundings = [0.0] * len(exact)
    factors = [FORWARD] + [GRADIENT] * len(inputs)
    scale = 2.0**-29 if inputs[0].dtype == torch.float64 else 1.0

    def limits() -> list[float]:
        parts = zip(factors, of_low, map(_rounding, low, exact), of_roundings, strict=True)
        return [factor * of_low_ + rounding + of_roundings_ for factor, of_low_, rounding, of_roundings_ in parts]

    def outside() -> list[int]:
        return [index for index, (error, limit) in enumerate(zip(errors, limits(), strict=True)) if error > limit]

    for _ in range(DRAWS):
        if not outside():
            break
        given = cotangent
        assert given is not None
        lower = [x.detach().to(LOWER.get(x.dtype, x.dtype)) for x in (*inputs, given)]
        *moved, cotangent = (_moved(x, generator).to(x.dtype) for x in lower)
        of_moved = zip(evaluate(reference, moved), evaluate(reference, [x.detach().double() for x in moved]), strict=True)
        of_low = [max(error, scale * _error(*pair)) for error, pair in zip(of_low, of_moved, strict=True)]
        cotangent = _moved(given, generator)
        rounded = evaluate(reference, [_moved(x, generator) for x in inputs])
        cotangent = given
        of_roundings = [
            max(error, _error(*pair)) for error, pair in zip(of_roundings, zip(rounded, exact, strict=True), strict=True)
        ]
    for index in outside():
        name = f"gradient of input {index - 1}" if index else "output"
        raise AssertionError(f"{name}: error {errors[index]:.3e}, allowed {limits()[index]:.3e}")


def _error(result: Tensor | None, exact: Tensor | None) -> float:
    if result is None or exact is None or not exact.numel():
        return 0.0
    assert result.shape == exact.shape, f"{result.shape} against {exact.shape}"
    assert bool(torch.isfinite(exact).all()), "the reference itself is not finite"
    error = float((result.double() - exact).abs().max())
    # NaN compares with nothing.
    return error if error == error else float("inf")


def _rounding(low: Tensor | None, exact: Tensor | None) -> float:
    """One rounding of the largest result in the tested dtype."""
    return 0.0 if low is None or exact is None or not exact.numel() else float(torch.finfo(low.dtype).eps * exact.abs().max())


def _moved(x: Tensor, generator: torch.Generator) -> Tensor:
    """Move every number up or down by one rounding of its dtype, in float64."""
    signs = torch.randint(2, x.shape, generator=generator).to(x.device).double() * 2 - 1
    return x.detach().double() * (1 + torch.finfo(x.dtype).eps * signs)


def _same_strides(x: Tensor) -> Tensor:
    copy = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return copy.copy_(x.detach())
