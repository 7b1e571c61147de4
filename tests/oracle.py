"""The three-way oracle: float64 reference, the same reference in the tested dtype, ours.

Ours may err at most `factor` times as much as the low-precision reference, plus what one rounding does: of the result, and of the
inputs, measured by moving each to a neighbour in its dtype. Without the latter the error of a few numbers is luck. There are no
other tolerances.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

FORWARD, GRADIENT = 2.0, 3.0


def assert_as_accurate(ours: Tensor, low: Tensor, exact: Tensor, moved: Tensor, *, factor: float, name: str = "output") -> None:
    """Compare largest errors.

    `exact` is the float64 reference, `moved` the same with inputs moved by one rounding, `low` the reference computed in the
    dtype of `ours`.
    """
    assert ours.shape == exact.shape == low.shape, f"{name}: {ours.shape} against {exact.shape}"
    assert ours.dtype == low.dtype, f"{name}: {ours.dtype} against {low.dtype}"
    if not ours.numel():
        return
    assert bool(torch.isfinite(exact).all()), f"{name}: the reference itself is not finite"
    error = (ours.double() - exact).abs().max()
    rounding = torch.finfo(ours.dtype).eps * exact.abs().max() + (moved - exact).abs().max()
    allowed = factor * (low.double() - exact).abs().max() + rounding
    assert bool(error <= allowed), f"{name}: error {error:.3e}, allowed {allowed:.3e} (largest value {exact.abs().max():.3e})"


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
    results = []
    for function, leaves in (
        (reference, [x.detach().double() for x in inputs]),
        (reference, [_moved(x, generator) for x in inputs]),
        (reference, [x.detach().clone() for x in inputs]),
        (ours, [_same_strides(x) for x in inputs]),
    ):
        for leaf, want in zip(leaves, wanted, strict=True):
            leaf.requires_grad_(want)
        output = function(*leaves)
        if cotangent is None:
            cotangent = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(inputs[0].dtype).to(output.device)
        # Of an empty batch a reference may be a constant; ours must still give (empty) gradients.
        if any(wanted) and (output.requires_grad or function is ours):
            output.backward(cotangent.to(output.dtype))
        results.append((output.detach(), [leaf.grad for leaf in leaves]))
    (exact, exact_grads), (moved, moved_grads), (low, low_grads), (got, got_grads) = results
    assert_as_accurate(got, low, exact, moved, factor=FORWARD)
    for index, got_grad in enumerate(got_grads):
        if not wanted[index]:
            assert got_grad is None
            continue
        assert got_grad is not None, f"input {index} got no gradient"
        zero = torch.zeros_like(inputs[index])
        others = [zero if grad is None else grad for grad in (low_grads[index], exact_grads[index], moved_grads[index])]
        low_grad, exact_grad, moved_grad = others[0], others[1].double(), others[2].double()
        assert_as_accurate(got_grad, low_grad, exact_grad, moved_grad, factor=GRADIENT, name=f"gradient of input {index}")


def _moved(x: Tensor, generator: torch.Generator) -> Tensor:
    """Move every number up or down by one rounding of its dtype, in float64."""
    signs = torch.randint(2, x.shape, generator=generator).to(x.device).double() * 2 - 1
    return x.detach().double() * (1 + torch.finfo(x.dtype).eps * signs)


def _same_strides(x: Tensor) -> Tensor:
    copy = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return copy.copy_(x.detach())
