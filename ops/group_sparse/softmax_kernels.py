"""Softmax cross-entropy over group-sparse linear layers as Triton kernels, which store no logits.

The forward pass walks a part of the groups in each program, and keeps of every row a maximum and a sum of exponentials relative
to it; the parts' are brought together afterwards. The backward pass computes a group's logits again, and from them the gradients
of its weights and biases, and what it adds to the gradient of the columns it reads.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged.ops._shared.device import dot, exp_of_difference, load_segment
from jagged.ops._shared.launch import Launcher
from jagged.ops._shared.matrices import aligned, gpu, inverse_scale_of, products_of
from jagged.ops._shared.sizes import cdiv
from jagged.ops.group_sparse import configurations
from jagged.ops.group_sparse.bce_kernels import load_positives
from jagged.ops.group_sparse.kernels import VARYING, add_to_sums, load_block, load_columns, logits_of_tile
from jagged.ops.group_sparse.spec import Options, SoftmaxInputs, SoftmaxOutputs
from jagged.ops.group_sparse.torch_impl import counting_features, softmax_rows

# Below every logit, and finite: the difference of two infinities is no number.
LOWEST = tl.constexpr(-1.0e38)


@triton.jit
def are_positives(bits, BLOCK_B: tl.constexpr):
    """Return `[LABEL, BLOCK_B]`, which samples are the positives that `load_positives` found."""
    place = tl.arange(0, BLOCK_B).to(tl.int64)
    return ((bits[:, None] >> place[None, :]) & 1) == 1


@triton.jit
def with_labels(
    features, weight, supports, positives, rows, positive_offsets, bias, group, first, end, first_sample, highest, total, target,
    num_positives, filled_size, num_features, feature_stride, weight_stride, weight_column_stride, WIDTH: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_B: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return `highest`, `total` and `target` of the kernel with BLOCK_L more labels of a group, from `first` on.

    One exponential a logit: of the old maximum and the logit one is the new maximum, and the other's is relative to it.
    """
    label, sample = first + tl.arange(0, BLOCK_L), first_sample + tl.arange(0, BLOCK_B)
    z = logits_of_tile(
        features, weight, supports, group, label, end, sample, filled_size, num_features, feature_stride, weight_stride,
        weight_column_stride, WIDTH, BLOCK_L, BLOCK_F, PRECISION,
    )  # fmt: skip
    if bias is not None:
        z += tl.load(bias + label, mask=label < end, other=0.0).to(tl.float32)[:, None]
    bits, any_bit = load_positives(positives, rows, positive_offsets, group, num_positives, label, first_sample, BLOCK_B)
    if any_bit:
        target += tl.sum(tl.where(are_positives(bits, BLOCK_B), z, 0.0), 0)
    z = tl.where((label < end)[:, None], z, float("-inf"))
    smaller = exp_of_difference(-tl.abs(z - highest), weight.dtype.element_ty == tl.float32)
    total = tl.where(z > highest, total * smaller + 1.0, total + smaller)
    return tl.maximum(highest, z), total, target


@triton.jit(do_not_specialize=[*VARYING, "num_positives"])
def group_sparse_softmax_forward_kernel(
    features, weight, supports, group_offsets, positives, rows, positive_offsets, bias, found, num_groups, num_labels,
    num_positives, num_parts, batch_size, filled_size, num_features, feature_stride, weight_stride, weight_column_stride,
    WIDTH: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_B: tl.constexpr, PRECISION: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """With z as `group_sparse_forward_kernel` has it, for the labels l of the groups of part p and BLOCK_B samples b:

    found[p, 0, b] = max_l z[l, b], found[p, 1, b] = sum_l exp(z[l, b] - found[p, 0, b]), and
    found[p, 2, b] = sum of z[l, b] over the positives l of b.

    Every place of a tile has a maximum and a sum of its own, so that threads wait for nothing; at the end they are one of each
    for a sample. A part without labels has the maximum LOWEST and the sum 0.
    """
    blocks = tl.cdiv(batch_size, BLOCK_B)
    part = (tl.program_id(0) // blocks).to(tl.int64)
    first_group, last_group = part * num_groups // num_parts, (part + 1) * num_groups // num_parts
    first_sample = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_B
    highest, total = tl.full([BLOCK_L, BLOCK_B], LOWEST, tl.float32), tl.zeros([BLOCK_L, BLOCK_B], tl.float32)
    target = tl.zeros([BLOCK_B], tl.float32)
    for group in tl.range(first_group, last_group, num_stages=NUM_STAGES):
        start, end = load_segment(group_offsets, group, num_labels)
        highest, total, target = with_labels(
            features, weight, supports, positives, rows, positive_offsets, bias, group, start, end, first_sample, highest, total,
            target, num_positives, filled_size, num_features, feature_stride, weight_stride, weight_column_stride, WIDTH,
            BLOCK_L, BLOCK_F, BLOCK_B, PRECISION,
        )  # fmt: skip
        if end > start + BLOCK_L:
            for first in tl.range(start + BLOCK_L, end, BLOCK_L, num_stages=1):
                highest, total, target = with_labels(
                    features, weight, supports, positives, rows, positive_offsets, bias, group, first, end, first_sample,
                    highest, total, target, num_positives, filled_size, num_features, feature_stride, weight_stride,
                    weight_column_stride, WIDTH, BLOCK_L, BLOCK_F, BLOCK_B, PRECISION,
                )  # fmt: skip
    sample = first_sample + tl.arange(0, BLOCK_B)
    of_sample = tl.max(highest, 0)
    # The choice keeps the compiler from contracting the products with the sum, otherwise in every thread that has it.
    relative = total * exp_of_difference(highest - of_sample[None, :], weight.dtype.element_ty == tl.float32)
    places = found + part * 3 * batch_size + sample
    tl.store(places, of_sample, mask=sample < batch_size)
    tl.store(places + batch_size, tl.sum(tl.where(total == 0.0, 0.0, relative), 0), mask=sample < batch_size)
    tl.store(places + 2 * batch_size, target, mask=sample < batch_size)


@triton.jit
def write_gradients(
    features, weight, supports, positives, rows, positive_offsets, bias, lse, grad_lse, grad_target, grad_weight, grad_bias, sums,
    unscale, group, first, end, num_positives, batch_size, filled_size, num_features, weight_stride, weight_column_stride,
    WIDTH: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_B: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradients of BLOCK_L labels of a group from `first` on, and add to the sums of the columns they read."""
    label = first + tl.arange(0, BLOCK_L)
    if bias is not None:
        its_bias = tl.load(bias + label, mask=label < end, other=0.0).to(tl.float32)
    # Of more slots than a tile has, logits are computed again for each block of slots.
    for slots in tl.range(0, WIDTH, BLOCK_F, num_stages=1):
        slot = slots + tl.arange(0, BLOCK_F)
        column = load_columns(supports, group, slot, num_features, WIDTH)
        left = load_block(weight, label, weight_stride, label < end, slot, weight_column_stride, slot < WIDTH)
        of_weight = tl.zeros([BLOCK_L, BLOCK_F], tl.float32)
        of_bias = tl.zeros([BLOCK_L], tl.float32)
        for block in tl.range(0, tl.cdiv(batch_size, BLOCK_B), num_stages=1):
            first_sample = block * BLOCK_B
            sample = first_sample + tl.arange(0, BLOCK_B).to(tl.int64)
            right = load_block(features, column, filled_size, slot < WIDTH, sample, 1, sample < filled_size)
            if WIDTH <= BLOCK_F:
                z = dot(left, right, None, PRECISION)
            else:
                z = logits_of_tile(
                    features, weight, supports, group, label, end, sample, filled_size, num_features, filled_size, weight_stride,
                    weight_column_stride, WIDTH, BLOCK_L, BLOCK_F, PRECISION,
                )  # fmt: skip
            if bias is not None:
                z += its_bias[:, None]
            shift = tl.load(lse + sample, mask=sample < batch_size, other=float("inf"))
            of_lse = tl.load(grad_lse + sample, mask=sample < batch_size, other=0.0)
            slope = exp_of_difference(z - shift[None, :], weight.dtype.element_ty == tl.float32) * of_lse[None, :]
            bits, any_bit = load_positives(positives, rows, positive_offsets, group, num_positives, label, first_sample, BLOCK_B)
            if any_bit:
                of_target = tl.load(grad_target + sample, mask=sample < batch_size, other=0.0)
                slope += tl.where(are_positives(bits, BLOCK_B), of_target[None, :], 0.0)
            # Also keeps the compiler from contracting products with the sum below, otherwise in every thread that has it.
            slope = tl.where((label < end)[:, None], slope, 0.0)
            of_bias += tl.sum(slope, 1)
            rounded = slope.to(left.dtype)
            of_weight = dot(rounded, tl.trans(right), of_weight, PRECISION)
            add_to_sums(sums, left, rounded, column, slot < WIDTH, sample, filled_size, PRECISION)
        places = grad_weight + label[:, None] * WIDTH + slot[None, :]
        exists = (label < end)[:, None] & (slot < WIDTH)[None, :]
        tl.store(places, (of_weight * unscale).to(grad_weight.dtype.element_ty), mask=exists)
        if grad_bias is not None:
            tl.store(grad_bias + label, (of_bias * unscale).to(grad_bias.dtype.element_ty), mask=(label < end) & (slots == 0))


@triton.jit(do_not_specialize=[*VARYING, "num_positives"])
def group_sparse_softmax_backward_kernel(
    features, weight, supports, group_offsets, positives, rows, positive_offsets, bias, lse, grad_lse, grad_target, inverse_scale,
    grad_weight, grad_bias, sums, num_groups, num_labels, num_positives, num_parts, batch_size, filled_size, num_features,
    weight_stride, weight_column_stride, WIDTH: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_F: tl.constexpr,
    BLOCK_B: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """With d[l, b] = grad_lse[b] exp(z[l, b] - lse[b]), plus grad_target[b] where l is a positive of b:

    grad_weight[l, f] = inverse_scale sum_b d[l, b] features[supports[g, f], b], grad_bias[l] = inverse_scale sum_b d[l, b], and
    sums[part, supports[g, f], b] += sum_l weight[l, f] d[l, b], for all labels l of a part's groups g and all samples b.

    A part's sums are its program's alone. The columns of a group differ, so that no two threads add to one sum at once, and
    between tiles, which may share columns, they wait for each other. So a sum's terms come in one order.
    """
    part = tl.program_id(0).to(tl.int64)
    sums += part * num_features * filled_size
    unscale = tl.load(inverse_scale)
    for group in tl.range(part * num_groups // num_parts, (part + 1) * num_groups // num_parts, num_stages=1):
        start, end = load_segment(group_offsets, group, num_labels)
        for first in tl.range(start, end, BLOCK_L, num_stages=1):
            write_gradients(
                features, weight, supports, positives, rows, positive_offsets, bias, lse, grad_lse, grad_target, grad_weight,
                grad_bias, sums, unscale, group, first, end, num_positives, batch_size, filled_size, num_features, weight_stride,
                weight_column_stride, WIDTH, BLOCK_L, BLOCK_F, BLOCK_B, PRECISION,
            )  # fmt: skip


_launch_forward = Launcher(group_sparse_softmax_forward_kernel)
_launch_backward = Launcher(group_sparse_softmax_backward_kernel)


def forward(x: SoftmaxInputs, o: Options) -> SoftmaxOutputs:
    """Launch `group_sparse_softmax_forward_kernel` and bring the parts together."""
    (batch_size, num_features), (num_labels, width), num_groups = x.features.shape, x.weight.shape, x.supports.shape[0]
    if not (batch_size and num_labels and num_groups):
        lse = x.features.new_full((batch_size,), -torch.inf, dtype=torch.float32)
        return _masked(x, lse, torch.zeros_like(lse))
    chosen = configurations.softmax_forward_configuration(num_labels, num_groups, batch_size, width, x.features.element_size())
    columns, blocks = _columns(x), cdiv(batch_size, chosen.block_b)
    num_parts = min(num_groups, cdiv(configurations.SOFTMAX_PROGRAMS * gpu(x.features.device).multiprocessors, blocks))
    found = x.features.new_empty(num_parts, 3, batch_size, dtype=torch.float32)
    _launch_forward(
        (num_parts * blocks,),
        columns, *_read(x), found, num_groups, num_labels, x.positives.shape[0], num_parts, batch_size, columns.shape[1],
        num_features, columns.stride(0), *x.weight.stride(), WIDTH=width, BLOCK_L=chosen.block_l, BLOCK_F=chosen.block_f,
        BLOCK_B=chosen.block_b, PRECISION=products_of(x.features.dtype), NUM_STAGES=chosen.num_stages, num_warps=chosen.num_warps,
    )  # fmt: skip
    highest, total, target = found.unbind(1)
    of_rows = highest.amax(0)
    lse = (total * (highest - of_rows).exp_()).sum(0).log_().add_(of_rows)
    return _masked(x, lse, target.sum(0))


def backward(
    grads: SoftmaxOutputs, x: SoftmaxInputs, out: SoftmaxOutputs, o: Options, wanted: Mapping[str, torch.dtype]
) -> dict[str, Tensor]:
    """Launch `group_sparse_softmax_backward_kernel` and add up the parts' sums in their order; all gradients are made at once."""
    features, weight = x.features, x.weight
    (batch_size, num_features), (num_labels, width), num_groups = features.shape, weight.shape, x.supports.shape[0]
    if not (batch_size and num_labels and num_groups):
        return {name: torch.zeros_like(getattr(x, name), dtype=dtype) for name, dtype in wanted.items()}
    chosen = configurations.softmax_backward_configuration(num_labels, num_groups, batch_size, width, features.element_size())
    columns = _columns(x)
    found = {"weight": weight.new_empty(num_labels, width, dtype=wanted.get("weight", weight.dtype))}
    if x.bias is not None:
        found["bias"] = weight.new_empty(num_labels, dtype=wanted.get("bias", weight.dtype))
    lse, of_lse, of_target = softmax_rows(grads, x, out)
    unscale = lse.new_ones(())
    if features.dtype == torch.float16:
        unscale = inverse_scale_of(lse != torch.inf, of_lse, of_target)
    num_parts = min(num_groups, configurations.PROGRAMS * gpu(features.device).multiprocessors)
    sums = features.new_zeros(num_parts, num_features, columns.shape[1], dtype=torch.float32)
    _launch_backward(
        (num_parts,),
        columns, *_read(x), lse, of_lse / unscale, of_target / unscale, unscale, found["weight"], found.get("bias"), sums,
        num_groups, num_labels, x.positives.shape[0], num_parts, batch_size, columns.shape[1], num_features, *weight.stride(),
        WIDTH=width, BLOCK_L=chosen.block_l, BLOCK_F=chosen.block_f, BLOCK_B=chosen.block_b,
        PRECISION=products_of(features.dtype), num_warps=chosen.num_warps,
    )  # fmt: skip
    if "features" in wanted:
        found["features"] = (sums.sum(0)[:, :batch_size] * unscale).t().to(wanted["features"]).contiguous()
    return {name: found[name] for name in wanted}


def _columns(x: SoftmaxInputs) -> Tensor:
    """Return features transposed, without gaps between the rows; of masked rows zeros."""
    columns = aligned(counting_features(x).t())
    return columns if columns.stride(0) == columns.shape[1] else columns.contiguous()


def _masked(x: SoftmaxInputs, lse: Tensor, target: Tensor) -> SoftmaxOutputs:
    if x.row_mask is None:
        return SoftmaxOutputs(lse, target)
    return SoftmaxOutputs(lse.masked_fill(~x.row_mask, 0), target.masked_fill(~x.row_mask, 0))


def _read(x: SoftmaxInputs) -> tuple[Tensor | None, ...]:
    """Return what both kernels read after the features, side by side in memory but for the weights."""
    rest = (None if tensor is None else tensor.contiguous() for tensor in x[2:-1])
    return (x.weight, *rest)
