"""Linear cross-entropy on a GPU: which of its kernels run."""

from __future__ import annotations

import torch
from torch import Tensor

from jagged.ops._shared.matrices import aligned, inverse_scale_of
from jagged.ops.cross_entropy.strategy import chunk_items_of
from jagged.ops.cross_entropy.triton.arguments import Items, hopper_serves
from jagged.ops.cross_entropy.triton.backward import backward_fused
from jagged.ops.cross_entropy.triton.chunked import backward_chunked
from jagged.ops.cross_entropy.triton.filter import kept_tiles
from jagged.ops.cross_entropy.triton.forward import linear_cross_entropy_forward
from jagged.ops.cross_entropy.triton.rows import prepare_rows

__all__ = ["linear_cross_entropy_backward", "linear_cross_entropy_forward"]


def linear_cross_entropy_backward(
    grad_lse: Tensor,
    grad_target: Tensor,
    grad_smoothed: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    item_scale: Tensor | None,
    smoothing: Tensor | None,
    temperature: float,
    softcap: float | None,
    ignore_index: int,
    hidden_dtype: torch.dtype | None,
    weight_dtype: torch.dtype | None,
    has_grad_bias: bool,
    hidden_eps: float | None,
    weight_eps: float | None,
    strategy: str,
    memory_budget: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of hidden and weight in their dtypes and of bias in float32, empty where none is wanted."""
    width, is_filtered = hidden.shape[1], hidden_eps is not None or weight_eps is not None
    weight = aligned(weight)
    is_direct = hidden.dtype == weight.dtype and hopper_serves((weight,), (bias, item_scale, smoothing, softcap))
    chunk_items = chunk_items_of(
        hidden.shape[0],
        weight.shape[0],
        width,
        hidden.dtype,
        strategy=strategy,
        memory_budget=memory_budget,
        is_filtered=is_filtered,
        is_direct=is_direct,
    )
    inverse_scale = None
    if hidden.dtype == torch.float16 and len(target):
        # Of gradients before the temperature, which divides them once more.
        inverse_scale = inverse_scale_of(target != ignore_index, grad_lse, grad_target, grad_smoothed) / temperature
    rows = prepare_rows(
        hidden, weight.shape[0], target, lse, grad_lse, grad_target, grad_smoothed, temperature, ignore_index, inverse_scale
    )
    bias, item_scale, smoothing = (None if x is None else x.contiguous() for x in (bias, item_scale, smoothing))
    items = Items(weight, bias, item_scale, smoothing, temperature, softcap)
    if chunk_items and len(target):
        grads = backward_chunked(rows, items, chunk_items, hidden_dtype, weight_dtype, has_grad_bias, is_direct=is_direct)
    else:
        kept_hidden = kept_weight = None
        if is_filtered and len(target):
            needs_items = weight_dtype is not None or has_grad_bias
            kept_hidden, kept_weight = kept_tiles(
                rows, items, hidden_eps if hidden_dtype is not None else None, weight_eps if needs_items else None
            )
        grads = backward_fused(rows, items, kept_hidden, kept_weight, hidden_dtype, weight_dtype, has_grad_bias)
    grad_hidden, grad_weight = (
        grad[:, :width].contiguous() if dtype else hidden.new_empty(0)
        for grad, dtype in zip(grads, (hidden_dtype, weight_dtype), strict=False)
    )
    return grad_hidden, grad_weight, grads[2]
