"""Which kernels run a call of linear cross-entropy; inputs and options of `spec` become arguments of kernels here."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from jagged.ops._shared.matrices import aligned, inverse_scale_of
from jagged.ops.cross_entropy import hopper
from jagged.ops.cross_entropy.norms import less_radial
from jagged.ops.cross_entropy.spec import Gradient, GradientInputs, Inputs, Options, Outputs, gradient_by
from jagged.ops.cross_entropy.strategy import chunk_items_of
from jagged.ops.cross_entropy.triton.arguments import Items
from jagged.ops.cross_entropy.triton.backward import backward_fused
from jagged.ops.cross_entropy.triton.chunked import backward_chunked
from jagged.ops.cross_entropy.triton.filter import filter_of
from jagged.ops.cross_entropy.triton.forward import forward
from jagged.ops.cross_entropy.triton.rows import prepare_rows

__all__ = ["backward", "forward", "weight_gradient"]


def backward(grads: Outputs, x: Inputs, out: Outputs, o: Options, wanted: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
    """Return the gradients that are wanted, by kernels alone or with the BLAS in chunks of items."""
    width = x.hidden.shape[1]
    grad_lse, grad_target = (torch.zeros_like(out.lse) if grad is None else grad for grad in grads[:2])
    grad_smoothed = None if x.smoothing is None else torch.zeros_like(out.lse) if grads.smoothed is None else grads.smoothed
    inverse_scale = None
    if x.hidden.dtype == torch.float16 and x.target.shape[0]:
        # Of gradients before the temperature, which divides them once more.
        inverse_scale = inverse_scale_of(x.target != o.ignore_index, grad_lse, grad_target, grad_smoothed) / o.temperature
    rows = prepare_rows(x, o, out.lse, grad_lse, grad_target, grad_smoothed, inverse_scale)
    bias, item_scale, smoothing = (None if vector is None else vector.contiguous() for vector in x[3:])
    items = Items(aligned(x.weight), bias, item_scale, smoothing, o.temperature, o.softcap)
    on_hopper = hopper.supports(x._replace(hidden=rows.hidden, weight=items.weight), o) is None
    chunk_items = chunk_items_of(
        x.hidden.shape[0],
        x.weight.shape[0],
        width,
        x.hidden.dtype,
        strategy=o.strategy,
        memory_budget=o.memory_budget,
        is_direct=on_hopper,
    )
    if chunk_items and x.target.shape[0]:
        found = backward_chunked(rows, items, chunk_items, wanted, on_hopper=on_hopper)
    else:
        on_hopper = on_hopper and rows.hidden.shape[1] <= hopper.WIDEST
        filtering = None
        if x.target.shape[0]:
            of_hidden = o.hidden_eps if "hidden" in wanted else None
            of_weight = o.weight_eps if "weight" in wanted or "bias" in wanted else None
            filtering = filter_of(rows, items, of_hidden, of_weight, on_hopper=on_hopper)
        found = backward_fused(rows, items, filtering, wanted, on_hopper=on_hopper)
    found = {name: grad[:, :width].contiguous() if grad.dim() == 2 else grad for name, grad in found.items()}
    if item_scale is not None and "weight" in wanted:
        less_radial(found["weight"], x.weight, item_scale)
    return found


def weight_gradient(x: GradientInputs, o: Options) -> Gradient:
    """Return the gradient of the weights alone, by the same kernels."""
    return gradient_by(backward, x, o)
