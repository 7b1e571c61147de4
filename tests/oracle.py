"""The three-way oracle: float64 reference, the same reference in the tested dtype, ours.

Ours may err at most `factor` times as much as the low-precision reference, plus what one rounding does: of the result, and of
the inputs, measured as the most that moving each to a neighbour in its dtype changes in a few draws. Without the latter the error
of a few numbers is luck. There are no other tolerances, but for float64 itself, in which the two references would be one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

FORWARD, GRADIENT = 2.0, 3.0
DRAWS = 4


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
    factors = [FORWARD] + [GRADIENT] * len(inputs)
    allowed = [_allowed(a, b, factor) for a, b, factor in zip(low, exact, factors, strict=True)]
    if any(error > limit for error, limit in zip(errors, allowed, strict=True)):
        draws = [evaluate(reference, [_moved(x, generator) for x in inputs]) for _ in range(DRAWS)]
        for index, of_exact in enumerate(exact):
            allowed[index] += max(_error(draw[index], of_exact) for draw in draws)
    for index, (error, limit) in enumerate(zip(errors, allowed, strict=True)):
        name = f"gradient of input {index - 1}" if index else "output"
        assert error <= limit, f"{name}: error {error:.3e}, allowed {limit:.3e}"


def check_float64(ours: Callable[..., Tensor], reference: Callable[..., Tensor], inputs: Sequence[Tensor]) -> None:
    """Check outputs and all gradients where both compute in float64, to torch's own tolerance of that dtype."""
    results = []
    for function in (ours, reference):
        leaves = [x.detach().double().requires_grad_() for x in inputs]
        output = function(*leaves)
        cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(output.device)
        # Of an empty batch a reference may be a constant.
        grads = torch.autograd.grad(output, leaves, cotangent, materialize_grads=True) if output.requires_grad else []
        results.append([output, *(grads or map(torch.zeros_like, leaves))])
    torch.testing.assert_close(*results)


def _error(result: Tensor | None, exact: Tensor | None) -> float:
    if result is None or exact is None or not exact.numel():
        return 0.0
    assert result.shape == exact.shape, f"{result.shape} against {exact.shape}"
    assert bool(torch.isfinite(exact).all()), "the reference itself is not finite"
    error = float((result.double() - exact).abs().max())
    # NaN compares with nothing.
    return error if error == error else float("inf")


def _allowed(low: Tensor | None, exact: Tensor | None, factor: float) -> float:
    if low is None or exact is None or not exact.numel():
        return 0.0
    return factor * _error(low, exact) + float(torch.finfo(low.dtype).eps * exact.abs().max())


def _moved(x: Tensor, generator: torch.Generator) -> Tensor:
    """Move every number up or down by one rounding of its dtype, in float64."""
    signs = torch.randint(2, x.shape, generator=generator).to(x.device).double() * 2 - 1
    return x.detach().double() * (1 + torch.finfo(x.dtype).eps * signs)


def _same_strides(x: Tensor) -> Tensor:
    copy = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return copy.copy_(x.detach())
