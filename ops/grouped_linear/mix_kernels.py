"""Mixtures of groups as Triton kernels: each group's row is read once for all mixtures, in backward for both gradients."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from jagged.ops._shared.device import rounded_product
from jagged.ops._shared.launch import Launcher
from jagged.ops._shared.sizes import cdiv
from jagged.ops.grouped_linear import torch_impl
from jagged.ops.grouped_linear.configurations import MIX_STAGES, MIX_WARPS, MOST_MIXTURES, mix_tile
from jagged.ops.grouped_linear.spec import MixGradients, MixInputs, MixSlopes, Mixtures, NoOptions


@triton.jit(do_not_specialize=["num_rows"])
def mix_groups_kernel(
    groups, weights, output, num_rows, row_stride, group_stride, weight_row_stride, weight_mixture_stride, weight_group_stride,
    GROUPS: tl.constexpr, MIXTURES: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """output[n, t] = sum over g of weights[n, t, g] groups[n, g], of `BLOCK_N` rows, in float32."""
    row = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    column = tl.arange(0, BLOCK_D)
    row_exists = row < num_rows
    exists = row_exists[:, None] & (column < WIDTH)[None, :]
    groups += row[:, None] * row_stride + column[None, :]
    weights += row * weight_row_stride
    sums = (tl.zeros([BLOCK_N, BLOCK_D], tl.float32),) * MIXTURES
    for group in tl.range(0, GROUPS, num_stages=NUM_STAGES):
        tile = tl.load(groups + tl.cast(group, tl.int64) * group_stride, mask=exists, other=0.0).to(tl.float32)
        new_sums = ()
        for mixture in tl.static_range(MIXTURES):
            place = mixture * tl.cast(weight_mixture_stride, tl.int64) + tl.cast(group, tl.int64) * weight_group_stride
            weight = tl.load(weights + place, mask=row_exists, other=0.0).to(tl.float32)
            new_sums += (tl.fma(tl.broadcast_to(weight[:, None], [BLOCK_N, BLOCK_D]), tile, sums[mixture]),)  # type: ignore[assignment]
        sums = new_sums
    output += row[:, None] * (MIXTURES * WIDTH) + column[None, :]
    for mixture in tl.static_range(MIXTURES):
        tl.store(output + mixture * WIDTH, sums[mixture].to(output.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["num_rows"])
def mix_groups_gradients_kernel(
    grad, groups, weights, grad_groups, grad_weights, num_rows, grad_row_stride, grad_mixture_stride, row_stride, group_stride,
    weight_row_stride, weight_mixture_stride, weight_group_stride, GROUPS: tl.constexpr, MIXTURES: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """grad_groups[n, g] = sum over t of weights[n, t, g] grad[n, t]; grad_weights[n, t, g] = grad[n, t] . groups[n, g]."""
    row = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    column = tl.arange(0, BLOCK_D)
    row_exists = row < num_rows
    exists = row_exists[:, None] & (column < WIDTH)[None, :]
    grad += row[:, None] * grad_row_stride + column[None, :]
    groups += row[:, None] * row_stride + column[None, :]
    weights += row * weight_row_stride
    grad_groups += row[:, None] * (GROUPS * WIDTH) + column[None, :]
    grad_weights += row * (MIXTURES * GROUPS)
    grads = ()
    for mixture in tl.static_range(MIXTURES):
        grads += (tl.load(grad + mixture * grad_mixture_stride, mask=exists, other=0.0).to(tl.float32),)  # type: ignore[assignment]
    for group in tl.range(0, GROUPS, num_stages=NUM_STAGES):
        tile = tl.load(groups + tl.cast(group, tl.int64) * group_stride, mask=exists, other=0.0).to(tl.float32)
        into = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        for mixture in tl.static_range(MIXTURES):
            found = tl.sum(rounded_product(grads[mixture], tile), 1)
            tl.store(grad_weights + mixture * GROUPS + group, found.to(grad_weights.dtype.element_ty), mask=row_exists)
            place = mixture * tl.cast(weight_mixture_stride, tl.int64) + tl.cast(group, tl.int64) * weight_group_stride
            weight = tl.load(weights + place, mask=row_exists, other=0.0).to(tl.float32)
            into = tl.fma(tl.broadcast_to(weight[:, None], [BLOCK_N, BLOCK_D]), grads[mixture], into)
        tl.store(grad_groups + group * WIDTH, into.to(grad_groups.dtype.element_ty), mask=exists)


_launch_mix = Launcher(mix_groups_kernel)
_launch_gradients = Launcher(mix_groups_gradients_kernel)


def mix_groups(x: MixInputs, o: NoOptions) -> Mixtures:
    """Launch `mix_groups_kernel`; more mixtures, and wider ones, than a program takes are the library's product."""
    groups, weights = x
    (num_rows, num_groups, width), num_mixtures = groups.shape, weights.shape[1]
    tile = _tile(groups, weights)
    if tile is None:
        return torch_impl.mix_groups(x, o)
    output = groups.new_empty(num_rows, num_mixtures, width)
    groups = _adjacent(groups)
    _launch_mix(
        (cdiv(num_rows, tile[0]),),
        groups, weights, output, num_rows, *groups.stride()[:2], *weights.stride(), GROUPS=num_groups, MIXTURES=num_mixtures,
        WIDTH=width, BLOCK_N=tile[0], BLOCK_D=tile[1], NUM_STAGES=MIX_STAGES, num_warps=MIX_WARPS,
    )  # fmt: skip
    return Mixtures(output)


def mix_gradients(x: MixSlopes, o: NoOptions) -> MixGradients:
    """Launch `mix_groups_gradients_kernel`."""
    grad, groups, weights = _adjacent(x.grad), _adjacent(x.groups), x.weights
    tile = _tile(groups, weights)
    if tile is None:
        return torch_impl.mix_gradients(x, o)
    found = MixGradients(groups.new_empty(groups.shape), weights.new_empty(weights.shape))
    num_rows, num_groups, width = groups.shape
    _launch_gradients(
        (cdiv(num_rows, tile[0]),),
        grad, groups, weights, *found, num_rows, *grad.stride()[:2], *groups.stride()[:2], *weights.stride(), GROUPS=num_groups,
        MIXTURES=weights.shape[1], WIDTH=width, BLOCK_N=tile[0], BLOCK_D=tile[1], NUM_STAGES=MIX_STAGES, num_warps=MIX_WARPS,
    )  # fmt: skip
    return found


def _tile(groups: Tensor, weights: Tensor) -> tuple[int, int] | None:
    """Return rows and columns of a tile; None where the kernels are not for these, or there is nothing to do."""
    return mix_tile(groups.shape[2]) if weights.shape[1] <= MOST_MIXTURES and groups.numel() and weights.numel() else None


def _adjacent(rows: Tensor) -> Tensor:
    return rows if rows.stride(2) == 1 else rows.contiguous()
