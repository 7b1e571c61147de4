"""The three-way oracle: float64 reference, the same reference in the tested dtype, ours.

Ours may err at most `factor` times as much as the low-precision reference, plus one rounding of the result. There are no other
tolerances.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

FORWARD, GRADIENT = 2.0, 3.0


def assert_as_accurate(
    ours: Tensor, low: Tensor, exact: Tensor, *, factor: float, name: str = "output", scale: float | None = None
) -> None:
    """Compare largest errors; `exact` is float64, `low` the reference computed in the dtype of `ours`.

    The rounding is relative to the largest value of `exact`, or to `scale` where the result is a difference of larger numbers.
    """
    assert ours.shape == exact.shape == low.shape, f"{name}: {ours.shape} against {exact.shape}"
    assert ours.dtype == low.dtype, f"{name}: {ours.dtype} against {low.dtype}"
    if not ours.numel():
        return
    assert bool(torch.isfinite(exact).all()), f"{name}: the reference itself is not finite"
    error = (ours.double() - exact).abs().max()
    rounding = torch.finfo(ours.dtype).eps * (exact.abs().max() if scale is None else scale)
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
    seed = torch.Generator(device="cpu").manual_seed(7)
    cotangent: Tensor | None = None
    results = []
    for function, dtype in ((reference, torch.float64), (reference, None), (ours, None)):
        leaves = [
            x.detach().to(dtype or x.dtype).requires_grad_(want) if dtype else _same_strides(x).requires_grad_(want)
            for x, want in zip(inputs, wanted, strict=True)
        ]
        output = function(*leaves)
        if cotangent is None:
            cotangent = torch.randn(output.shape, generator=seed, dtype=torch.float64).to(inputs[0].dtype).to(output.device)
        # Of an empty batch a reference may be a constant; ours must still give (empty) gradients.
        if any(wanted) and (output.requires_grad or function is ours):
            output.backward(cotangent.to(output.dtype))
        results.append((output.detach(), [leaf.grad for leaf in leaves]))
    (exact, exact_grads), (low, low_grads), (got, got_grads) = results
    assert_as_accurate(got, low, exact, factor=FORWARD)
    for index, (got_grad, low_grad, exact_grad) in enumerate(zip(got_grads, low_grads, exact_grads, strict=True)):
        if not wanted[index]:
            assert got_grad is None
            continue
        zero = torch.zeros_like(inputs[index], dtype=torch.float64)
        exact_grad = zero if exact_grad is None else exact_grad
        low_grad = zero.to(inputs[index].dtype) if low_grad is None else low_grad
        assert got_grad is not None, f"input {index} got no gradient"
        assert_as_accurate(got_grad, low_grad, exact_grad, factor=GRADIENT, name=f"gradient of input {index}")


def _same_strides(x: Tensor) -> Tensor:
    copy = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return copy.copy_(x.detach())
