"""Which kernels run a call: those of rows that draw for themselves, or those of rows that share a draw."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from jagged.ops._shared.launch import Launcher, bound
from jagged.ops._shared.losses import side_by_side
from jagged.ops._shared.matrices import gpu
from jagged.ops._shared.sizes import cdiv
from jagged.ops.sampled_cross_entropy.spec import Inputs, Options, Outputs, Pairs, PairsInputs, inputs_of, num_touched
from jagged.ops.sampled_cross_entropy.triton.backward import sampled_backward_rows_kernel, sampled_pairs_kernel
from jagged.ops.sampled_cross_entropy.triton.call import Call, call_of
from jagged.ops.sampled_cross_entropy.triton.configurations import RowConfiguration, row_configuration
from jagged.ops.sampled_cross_entropy.triton.entries import Slices, Slopes, narrowed, weight_gradient
from jagged.ops.sampled_cross_entropy.triton.forward import sampled_forward_rows_kernel
from jagged.ops.sampled_cross_entropy.triton.shared_draws import block_directions, block_results, draw_lists, prepare_rows

ROW_BLOCK, ROW_WIDTH = 8, 256
# Negatives of a row that a program makes pairs of.
PAIRS_PART = 256

_launch_forward_rows = Launcher(sampled_forward_rows_kernel)
_launch_backward_rows = Launcher(sampled_backward_rows_kernel)
_launch_pairs = Launcher(sampled_pairs_kernel)


def forward(x: Inputs, o: Options) -> Outputs:
    """Compute losses, and what backward needs of them, in float32."""
    (num_rows, width), device = x.hidden.shape, x.hidden.device
    losses = torch.empty(num_rows, dtype=torch.float32, device=device)
    of_rows = [losses, *[torch.empty_like(losses) for _ in range(4)]]
    out = Outputs._make([*of_rows, losses.new_empty(*(x.hidden.shape if o.with_direction else (0,)))])
    if num_rows == 0:
        return out
    c = call_of(x, o)
    if c.shares:
        lists = draw_lists(c)
        block_results(c, lists, out)
        if o.with_direction:
            direction = block_directions(c, lists, prepare_rows(c, lists, out)).sum(0)
            out = out._replace(direction=narrowed(direction, width))
        return out
    if o.with_direction and c.width != width:
        out = out._replace(direction=torch.empty(num_rows, c.width, dtype=torch.float32, device=device))
    _forward_rows(c, out, out.direction if o.with_direction else None, None)
    return out._replace(direction=narrowed(out.direction, width)) if o.with_direction else out


def backward(grads: Outputs, x: Inputs, out: Outputs, o: Options, wanted: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
    """Compute gradients; negatives are drawn again. See the PyTorch implementation for sparse ones."""
    (num_rows, width), device = x.hidden.shape, x.hidden.device
    found = {}
    if "hidden" in wanted:
        found["hidden"] = x.hidden.new_empty(*x.hidden.shape, dtype=wanted["hidden"])
    if num_rows == 0:
        if "weight" in wanted:
            num_grads = num_touched(x, o) if o.is_sparse else x.weight.shape[0]
            found["weight"] = torch.zeros(num_grads, width, dtype=wanted["weight"], device=device)
            if o.is_sparse:
                found["touched"] = torch.empty(0, dtype=torch.int64, device=device)
        return found
    c = call_of(x, o)
    lists = draw_lists(c) if c.shares else None
    rows = None if lists is None else prepare_rows(c, lists, out)
    direction, parts, stride = out.direction, 1, width
    if "hidden" in wanted and not o.with_direction:
        stride = c.width
        if lists is not None and rows is not None:
            direction = block_directions(c, lists, rows)
            parts = direction.shape[0]
        else:
            direction = torch.empty(num_rows, stride, dtype=torch.float32, device=device)
            # The kernel's way with a finished statistic, which writes no losses; a filter of 0 leaves out nothing.
            _forward_rows(c, out._replace(losses=out.share, lse=out.share), direction, o.filter_eps or 0.0)
    # A log-sum-exp may be all that has a gradient.
    grad_loss = torch.zeros_like(out.share) if grads.losses is None else grads.losses
    slopes = _slopes_of_rows(c, grad_loss, grads.lse, out, found.get("hidden"), direction, parts, stride)
    if "weight" in wanted:
        found |= weight_gradient(c, lists, rows, slopes, wanted["weight"])
        found["weight"] = narrowed(found["weight"], width)
    return found


def pairs(x: PairsInputs, o: Options) -> Pairs:
    """Compute items and factors; see the PyTorch implementation."""
    num_rows, count = x.target.shape[0], o.num_negatives
    shape, device = (num_rows, count + 1), x.hidden.device
    found = Pairs(torch.empty(shape, dtype=torch.int32, device=device), torch.empty(shape, dtype=torch.float32, device=device))
    if num_rows == 0:
        return found
    c = call_of(inputs_of(x), o)
    slopes = _slopes_of(c, x)
    tile = row_configuration(c.width, x.hidden.dtype, gpu(device).capability)
    _launch_pairs(
        (num_rows, cdiv(count, PAIRS_PART)),
        c.x.hidden, c.x.weight, c.x.target, c.x.ids, c.x.log_q, c.x.probability, c.x.seed, c.x.excluded, c.x.exclude_offsets,
        c.x.sample_weight, *slopes, *found, c.num_items, count, c.num_excluded, c.hidden_stride, c.weight_stride,
        o.rows_per_draw, c.parameter, c.offset, o.scale, o.ignore_index, o.filter_eps, KIND=o.kind, LOSS=o.loss,
        IS_CORRECTED=o.is_corrected, MASK_HITS=o.mask_hits, WIDTH=c.width, PART=PAIRS_PART, BLOCK_J=tile.negatives,
        BLOCK_D=tile.columns, num_warps=tile.num_warps,
    )  # fmt: skip
    return found


def slices(x: PairsInputs, o: Options, room: int | None) -> Slices:
    """Return what makes the gradient of some items' weights; see the PyTorch implementation."""
    c = call_of(inputs_of(x), o, aligns_weight=False)
    return Slices(c, _slopes_of(c, x), x.weight.shape[1], room)


def _slopes_of(c: Call, x: PairsInputs) -> Slopes:
    out = Outputs(x.share, x.share, x.statistic, x.share, x.pull, x.share)
    return _slopes_of_rows(c, x.grad_losses, x.grad_lse, out, None, x.share, 1, c.width)


def _slopes_of_rows(
    c: Call, grad_loss: Tensor, grad_lse: Tensor | None, out: Outputs, grad_hidden: Tensor | None, direction: Tensor,
    num_parts: int, direction_stride: int,
) -> Slopes:  # fmt: skip
    """Launch the kernel of what rows hand on: to their entries, and to the hidden states if these have a gradient."""
    slopes = Slopes(out.statistic, out.share, out.share.new_empty(c.num_rows), out.share.new_empty(c.num_rows))
    grad_loss = side_by_side(grad_loss)
    grad_lse = None if grad_lse is None else side_by_side(grad_lse)
    _launch_backward_rows(
        (cdiv(c.num_rows, ROW_BLOCK),),
        grad_loss, grad_lse, c.x.weight, c.x.target, out.statistic, out.share, out.pull, direction, slopes.grad_logit,
        slopes.grad_statistic, grad_hidden, c.num_rows, c.num_items, num_parts, grad_loss.stride(0),
        0 if grad_lse is None else grad_lse.stride(0), c.weight_stride, direction_stride, c.o.scale, c.o.ignore_index,
        IS_INSIDE=c.o.is_inside, WIDTH=c.width if grad_hidden is None else grad_hidden.shape[1], BLOCK_N=ROW_BLOCK,
        BLOCK_D=ROW_WIDTH,
    )  # fmt: skip
    return slopes


def _forward_rows(c: Call, out: Outputs, direction: Tensor | None, filter_eps: float | None) -> None:
    """Launch the kernel for rows that draw for themselves."""
    x, o = c.x, c.o
    tile = row_configuration(c.width, x.hidden.dtype, gpu(x.hidden.device).capability)
    _forward_launch(o.kind, o.loss, o.is_corrected, o.is_inside, o.mask_hits, o.renormalise, c.width, tile)(
        (c.num_rows, 1 if direction is None else cdiv(c.width, tile.columns)),
        x.hidden, x.weight, x.target, x.ids, x.log_q, x.probability, x.seed, x.target_correction, x.excluded, x.exclude_offsets,
        x.sample_weight, *out[:5], direction, c.num_rows, c.num_items, o.num_negatives, c.num_excluded, c.hidden_stride,
        c.weight_stride, o.rows_per_draw, c.parameter, c.offset, o.scale, o.positive_weight, o.ignore_index, filter_eps,
    )  # fmt: skip


@functools.cache
def _forward_launch(
    kind: str,
    loss: str,
    is_corrected: bool,
    is_inside: bool,
    mask_hits: bool,
    renormalise: bool,
    width: int,
    tile: RowConfiguration,
) -> Callable[..., None]:
    return bound(
        _launch_forward_rows, KIND=kind, LOSS=loss, IS_CORRECTED=is_corrected, IS_INSIDE=is_inside, MASK_HITS=mask_hits,
        RENORMALISE=renormalise, WIDTH=width, BLOCK_J=tile.negatives, BLOCK_D=tile.columns, num_warps=tile.num_warps,
    )  # fmt: skip
