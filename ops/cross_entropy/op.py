"""Linear cross-entropy: the loss of a softmax over all items, computed from hidden states and item weights."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from jagged.ops._shared.autograd import first_order
from jagged.ops._shared.registration import define_operator, resolve_backend
from jagged.ops._shared.validation import FLOATS, check_tensor, compute_dtype_of, validate_ids, validation_is_on
from jagged.ops.cross_entropy import torch_impl

Reduction = Literal["mean", "sum", "none"]


def _accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _forward_fake(hidden: Tensor, weight: Tensor, target: Tensor, ignore_index: int, backend: str) -> tuple[Tensor, Tensor]:
    lse = hidden.new_empty(target.shape, dtype=_accumulator_dtype(hidden.dtype))
    return lse, torch.empty_like(lse)


def _backward_fake(
    grad_loss: Tensor,
    grad_lse: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    lse: Tensor,
    ignore_index: int,
    hidden_grad_dtype: torch.dtype | None,
    weight_grad_dtype: torch.dtype | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    grad_hidden = hidden.new_empty(hidden.shape if hidden_grad_dtype else 0, dtype=hidden_grad_dtype)
    return grad_hidden, hidden.new_empty(weight.shape if weight_grad_dtype else 0, dtype=weight_grad_dtype)


_forward = define_operator(
    "linear_cross_entropy",
    "(Tensor hidden, Tensor weight, Tensor target, int ignore_index, str backend) -> (Tensor lse, Tensor target_logit)",
    torch_impl=torch_impl.linear_cross_entropy_forward,
    triton_impl="jagged.ops.cross_entropy.kernels:linear_cross_entropy_forward",
    fake=_forward_fake,
)

_backward = define_operator(
    "linear_cross_entropy_backward",
    "(Tensor grad_loss, Tensor? grad_lse, Tensor hidden, Tensor weight, Tensor target, Tensor lse, int ignore_index, "
    "ScalarType? hidden_grad_dtype, ScalarType? weight_grad_dtype, str backend) -> (Tensor, Tensor)",
    torch_impl=torch_impl.linear_cross_entropy_backward,
    triton_impl="jagged.ops.cross_entropy.kernels:linear_cross_entropy_backward",
    fake=_backward_fake,
)


class LinearCrossEntropyFunction(torch.autograd.Function):
    """Casts, the operator and the reduction, and their gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        ignore_index: int,
        reduction: Reduction,
        return_lse: bool,
        compute_dtype: torch.dtype,
        backend: str,
    ) -> Tensor | tuple[Tensor, Tensor]:
        ctx.grad_dtypes = hidden.dtype, weight.dtype
        ctx.ignore_index, ctx.reduction, ctx.backend = ignore_index, reduction, backend
        hidden, weight = hidden.to(compute_dtype), weight.to(compute_dtype)
        lse, target_logit = _forward(hidden, weight, target, ignore_index, backend)
        loss, count = lse - target_logit, None
        if reduction != "none":
            loss = loss.sum()
        if reduction == "mean":
            # No valid row gives 0 / 1: a step on an empty batch is no step, rather than a NaN in every weight.
            count = (target != ignore_index).sum().clamp_(min=1)
            loss = loss / count
        ctx.save_for_backward(hidden, weight, target, lse, count)
        return (loss, lse) if return_lse else loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, grad_lse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        hidden, weight, target, lse, count = ctx.saved_tensors
        if count is not None:
            grad_loss = grad_loss / count
        wanted = [dtype if need else None for dtype, need in zip(ctx.grad_dtypes, ctx.needs_input_grad, strict=False)]
        grads = _backward(
            grad_loss.expand(lse.shape), grad_lse, hidden, weight, target, lse, ctx.ignore_index, *wanted, ctx.backend
        )
        grads = first_order("linear_cross_entropy", grads)
        return *(grad if dtype else None for grad, dtype in zip(grads, wanted, strict=True)), *(None,) * 6


@overload
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    ignore_index: int = ...,
    reduction: Reduction = ...,
    return_lse: Literal[False] = ...,
    backend: str | None = ...,
) -> Tensor: ...


@overload
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    ignore_index: int = ...,
    reduction: Reduction = ...,
    return_lse: Literal[True],
    backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Cross-entropy of `hidden @ weight.T` against the target items, without the logits matrix in memory.

    `loss_n = logsumexp_v(hidden_n . weight_v) - hidden_n . weight_target_n`, as `torch.nn.functional.cross_entropy` on
    `torch.nn.functional.linear(hidden, weight)` gives it; backward computes the logits again, tile by tile. Deterministic.

    Args:
        hidden: `[N, D]`, float32, bfloat16, float16 or float64 (computed by PyTorch on every device).
        weight: `[V, D]`, the dtype of hidden. Under `torch.autocast` both are cast to its dtype, and gradients of float32
            master weights are accumulated and returned in float32.
        target: `[N]`, int32 or int64: item of each row, 0 <= item < V, or `ignore_index`. A row with any other value has
            the loss NaN; `JAGGED_VALIDATE=1` refuses it.
        ignore_index: rows with this target have the loss 0, the log-sum-exp 0 and no gradient, whatever hidden holds
            there, and are left out of the mean.
        reduction: `"mean"` over the rows that are not ignored (0 with zero gradients where there is none, unlike PyTorch's
            NaN), `"sum"` or `"none"`.
        return_lse: also return the log-sum-exp of each row's logits; it is differentiable.
        backend: `"torch"`, `"triton"`, or None to choose by device.

    Returns:
        The loss, a scalar or `[N]` for `"none"`, in float32 (float64 for float64); with `return_lse` a pair of it and the
        log-sum-exp `[N]` in the same dtype.

    Raises:
        ValueError: shapes that do not fit, tensors on different devices, an unknown reduction or backend; with
            `JAGGED_VALIDATE=1` also a target out of range, named by its place.
        TypeError: dtypes other than those above.

    Source:
        Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models, ICLR 2025: the loss by recomputed tiles.

    Example:
        >>> import torch
        >>> from jagged.ops import linear_cross_entropy
        >>> hidden = torch.randn(5, 16, requires_grad=True)
        >>> item_weight = torch.randn(1000, 16, requires_grad=True)
        >>> loss = linear_cross_entropy(hidden, item_weight, torch.tensor([3, 999, -100, 0, 41]))
        >>> loss.backward()
        >>> hidden.grad[2].count_nonzero()
        tensor(0)
    """
    check_tensor("hidden", hidden, "[N, D]", FLOATS)
    check_tensor("weight", weight, "[V, D]", FLOATS)
    check_tensor("target", target, "[N]", (torch.int64, torch.int32))
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction: got {reduction!r}, expected 'mean', 'sum' or 'none'")
    if weight.shape[1] != hidden.shape[1]:
        raise ValueError(
            f"weight: expected shape [V, {hidden.shape[1]}], as wide as hidden {list(hidden.shape)}, got {list(weight.shape)}"
        )
    if weight.shape[0] == 0:
        raise ValueError("weight: expected at least one item, got shape " + str(list(weight.shape)))
    if target.shape[0] != hidden.shape[0]:
        raise ValueError(
            f"target: expected shape [{hidden.shape[0]}], one item per row of hidden {list(hidden.shape)}, "
            f"got {list(target.shape)}"
        )
    for name, tensor in (("weight", weight), ("target", target)):
        if tensor.device != hidden.device:
            raise ValueError(f"{name}: expected the device of hidden, {hidden.device}, got {tensor.device}; move one of them")
    compute_dtype = compute_dtype_of(hidden, weight)
    if validation_is_on():
        validate_ids(target, weight.shape[0], name="target", ignore_index=ignore_index)
    resolved = resolve_backend(backend, hidden)
    return LinearCrossEntropyFunction.apply(  # type: ignore[no-any-return,no-untyped-call]
        hidden, weight, target, ignore_index, reduction, return_lse, compute_dtype, resolved
    )
