"""Binary cross-entropy over group-sparse linear layers as Triton kernels, which store no logits.

The forward pass has a sum for each program and changes nothing. The backward pass computes a group's logits again, and from them
all that depends on the group: the gradients of its weights and biases, and what it adds to the gradient of the columns it reads.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged.ops._shared.device import dot, load_segment
from jagged.ops._shared.label_loss import LossOptions, LossOutputs, slope_scales
from jagged.ops._shared.launch import Launcher
from jagged.ops._shared.matrices import aligned, gpu, products_of
from jagged.ops._shared.sizes import cdiv
from jagged.ops.group_sparse import configurations
from jagged.ops.group_sparse.kernels import VARYING, groups_of, load_block, load_columns, logits_of_tile
from jagged.ops.group_sparse.spec import LossInputs


@triton.jit
def softplus(z):
    """Return log(1 + exp(z)) for every float32, small values with all their digits: max(z, 0) + log1p(u), u = exp(-|z|).

    log1p(u) is u times a polynomial of degree 8, fitted to log1p(u) / u on [0, 1] at Chebyshev's nodes; it errs by 1.6e-7 of the
    result. The matrix instructions leave time for its products, while a logarithm is for the unit that has the exponential.
    """
    u = tl.exp(-tl.abs(z))
    polynomial = u * 0.005253457929939032 - 0.02958850748836994
    polynomial = u * polynomial + 0.07836166769266129
    polynomial = u * polynomial - 0.13674770295619965
    polynomial = u * polynomial + 0.19111430644989014
    polynomial = u * polynomial - 0.24844369292259216
    polynomial = u * polynomial + 0.33319270610809326
    polynomial = u * polynomial - 0.49999502301216125
    polynomial = u * polynomial + 1.0
    return tl.maximum(z, 0.0) + u * polynomial


@triton.jit
def sigmoid(z):
    """Return 1 / (1 + exp(-z)) for every float32, small values with all their digits."""
    u = tl.exp(-tl.abs(z))
    return tl.where(z >= 0, 1.0, u) / (1.0 + u)


@triton.jit
def load_signs(positives, rows, positive_offsets, group, num_positives, label, sample):
    """Return `[LABEL, SAMPLE]`: -1 for positives and 1 for others.

    The loss of a logit z is that of `sign z` as a negative's, so that neither a large positive's nor a small negative's is lost.
    """
    start, end = load_segment(positive_offsets, group, num_positives)
    sign = tl.full([label.shape[0], sample.shape[0]], 1.0, tl.float32)
    if end > start:
        for at in tl.range(start, end, num_stages=1):
            is_positive = (label == tl.load(positives + at))[:, None] & (sample == tl.load(rows + at))[None, :]
            sign = tl.where(is_positive, -1.0, sign)
    return sign


@triton.jit
def loss_of_tile(
    features, weight, supports, positives, rows, positive_offsets, bias, label_weight, group, first, end, sample, of_row,
    smoothing, num_positives, filled_size, num_features, feature_stride, weight_stride, weight_column_stride,
    WIDTH: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_F: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the loss of a tile, BLOCK_L labels of a group from `first` on and some samples."""
    label = first + tl.arange(0, BLOCK_L)
    z = logits_of_tile(
        features, weight, supports, group, label, end, sample, filled_size, num_features, feature_stride, weight_stride,
        weight_column_stride, WIDTH, BLOCK_L, BLOCK_F, PRECISION,
    )  # fmt: skip
    if bias is not None:
        z += tl.load(bias + label, mask=label < end, other=0.0).to(tl.float32)[:, None]
    z *= load_signs(positives, rows, positive_offsets, group, num_positives, label, sample)
    terms = (softplus(z) - 0.5 * smoothing * z) * of_row[None, :]
    if label_weight is not None:
        terms *= tl.load(label_weight + label, mask=label < end, other=0.0).to(tl.float32)[:, None]
    # Of rows that do not count nothing counts, not even what is no number.
    return tl.sum(tl.sum(tl.where((label < end)[:, None] & (of_row != 0)[None, :], terms, 0.0), 1))


@triton.jit(do_not_specialize=[*VARYING, "num_positives"])
def group_sparse_bce_forward_kernel(
    features, weight, supports, group_offsets, positives, rows, row_weight, positive_offsets, bias, label_weight, sums, smoothing,
    num_groups, num_labels, num_positives, batch_size, filled_size, num_features, feature_stride, weight_stride,
    weight_column_stride, WIDTH: tl.constexpr, GROUPS: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_F: tl.constexpr,
    BLOCK_B: tl.constexpr, PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """sums[p] = sum over the labels l of GROUPS groups and BLOCK_B samples b: row_weight[b] label_weight[l] loss(z[b, l]).

    loss(z) = log(1 + exp(s z)) - smoothing / 2 s z, where s is -1 for positives and 1 for others, and z as
    `group_sparse_forward_kernel` has it.
    """
    blocks = tl.cdiv(batch_size, BLOCK_B)
    first_group, last_group = groups_of(tl.program_id(0) // blocks, num_groups, GROUPS)
    sample = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    of_row = tl.load(row_weight + sample, mask=sample < batch_size, other=0.0)
    total = tl.zeros([], tl.float32)
    for group in tl.range(first_group, last_group, num_stages=NUM_STAGES):
        start, end = load_segment(group_offsets, group, num_labels)
        total += loss_of_tile(
            features, weight, supports, positives, rows, positive_offsets, bias, label_weight, group, start, end, sample, of_row,
            smoothing, num_positives, filled_size, num_features, feature_stride, weight_stride, weight_column_stride, WIDTH,
            BLOCK_L, BLOCK_F, PRECISION,
        )  # fmt: skip
        if end > start + BLOCK_L:
            for first in tl.range(start + BLOCK_L, end, BLOCK_L, num_stages=1):
                total += loss_of_tile(
                    features, weight, supports, positives, rows, positive_offsets, bias, label_weight, group, first, end, sample,
                    of_row, smoothing, num_positives, filled_size, num_features, feature_stride, weight_stride,
                    weight_column_stride, WIDTH, BLOCK_L, BLOCK_F, PRECISION,
                )  # fmt: skip
    tl.store(sums + tl.program_id(0), total)


@triton.jit(do_not_specialize=[*VARYING, "num_positives"])
def group_sparse_bce_backward_kernel(
    features, weight, supports, group_offsets, positives, rows, row_weight, positive_offsets, bias, label_weight, scales,
    grad_weight, grad_bias, sums, smoothing, num_groups, num_labels, num_positives, num_parts, batch_size, filled_size,
    num_features, weight_stride, weight_column_stride, WIDTH: tl.constexpr, BLOCK_L: tl.constexpr,
    BLOCK_F: tl.constexpr, BLOCK_B: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """With d[l, b] = row_weight[b] label_weight[l] loss'(z[b, l]) scales[0], for all labels l of a part's groups:

    loss'(z) = s sigmoid(s z) - s smoothing / 2, s as in the forward pass;
    grad_weight[l, f] = scales[1] sum_b d[l, b] features[supports[g, f], b], grad_bias[l] = scales[1] sum_b d[l, b], and
    sums[part, supports[g, f], b] += sum_l weight[l, f] d[l, b], as `group_sparse_feature_gradient_kernel` does.
    """
    part = tl.program_id(0).to(tl.int64)
    sums += part * num_features * filled_size
    scale, unscale = tl.load(scales), tl.load(scales + 1)
    for group in tl.range(part * num_groups // num_parts, (part + 1) * num_groups // num_parts, num_stages=1):
        start, end = load_segment(group_offsets, group, num_labels)
        for first in tl.range(start, end, BLOCK_L, num_stages=1):
            label = first + tl.arange(0, BLOCK_L)
            of_label = (label < end).to(tl.float32) * scale
            if label_weight is not None:
                of_label *= tl.load(label_weight + label, mask=label < end, other=0.0).to(tl.float32)
            # Of more slots than a tile has, logits are computed again for each block of slots.
            for slots in tl.range(0, WIDTH, BLOCK_F, num_stages=1):
                slot = slots + tl.arange(0, BLOCK_F)
                column = load_columns(supports, group, slot, num_features, WIDTH)
                left = load_block(weight, label, weight_stride, label < end, slot, weight_column_stride, slot < WIDTH)
                of_weight = tl.zeros([BLOCK_L, BLOCK_F], tl.float32)
                of_bias = tl.zeros([BLOCK_L], tl.float32)
                for samples in tl.range(0, batch_size, BLOCK_B, num_stages=1):
                    sample = samples + tl.arange(0, BLOCK_B).to(tl.int64)
                    right = load_block(features, column, filled_size, slot < WIDTH, sample, 1, sample < filled_size)
                    addresses = sums + column[:, None] * filled_size + sample[None, :]
                    mask = (slot < WIDTH)[:, None] & (sample < filled_size)[None, :]
                    former = tl.load(addresses, mask=mask, other=0.0)
                    if WIDTH <= BLOCK_F:
                        z = dot(left, right, None, PRECISION)
                    else:
                        z = logits_of_tile(
                            features, weight, supports, group, label, end, sample, filled_size, num_features, filled_size,
                            weight_stride, weight_column_stride, WIDTH, BLOCK_L, BLOCK_F, PRECISION,
                        )  # fmt: skip
                    if bias is not None:
                        z += tl.load(bias + label, mask=label < end, other=0.0).to(tl.float32)[:, None]
                    sign = load_signs(positives, rows, positive_offsets, group, num_positives, label, sample)
                    of_row = tl.load(row_weight + sample, mask=sample < batch_size, other=0.0)
                    slope = (sigmoid(z * sign) - 0.5 * smoothing) * sign * of_label[:, None] * of_row[None, :]
                    slope = tl.where((label < end)[:, None] & (of_row != 0)[None, :], slope, 0.0)
                    of_bias += tl.sum(slope, 1)
                    slope = slope.to(left.dtype)
                    of_weight = dot(slope, tl.trans(right), of_weight, PRECISION)
                    tl.store(addresses, former + dot(tl.trans(left), slope, None, PRECISION), mask=mask)
                    # The next tile reads the same sums, by other threads.
                    tl.debug_barrier()
                places = grad_weight + label[:, None] * WIDTH + slot[None, :]
                exists = (label < end)[:, None] & (slot < WIDTH)[None, :]
                tl.store(places, (of_weight * unscale).to(grad_weight.dtype.element_ty), mask=exists)
                if grad_bias is not None:
                    tl.store(
                        grad_bias + label, (of_bias * unscale).to(grad_bias.dtype.element_ty), mask=(label < end) & (slots == 0)
                    )


_launch_forward = Launcher(group_sparse_bce_forward_kernel)
_launch_backward = Launcher(group_sparse_bce_backward_kernel)


def forward(x: LossInputs, o: LossOptions) -> LossOutputs:
    """Launch `group_sparse_bce_forward_kernel` and add up the programs' sums, in float64."""
    (batch_size, num_features), (num_labels, width), num_groups = x.features.shape, x.weight.shape, x.supports.shape[0]
    if not (batch_size and num_labels and num_groups):
        return LossOutputs(x.features.new_zeros((), dtype=torch.float32))
    chosen = configurations.forward_configuration(num_labels, num_groups, batch_size, width, x.features.element_size())
    columns = aligned(x.features.t())
    programs = cdiv(num_groups, chosen.groups) * cdiv(batch_size, chosen.block_b)
    sums = x.features.new_empty(programs, dtype=torch.float32)
    _launch_forward(
        (programs,),
        columns, *_read(x), sums, o.label_smoothing, num_groups, num_labels, x.positives.shape[0], batch_size, columns.shape[1],
        num_features, columns.stride(0), *x.weight.stride(), WIDTH=width, GROUPS=chosen.groups, BLOCK_L=chosen.block_l,
        BLOCK_F=chosen.block_f, BLOCK_B=chosen.block_b, PRECISION=products_of(x.features.dtype), NUM_STAGES=chosen.num_stages,
        num_warps=chosen.num_warps,
    )  # fmt: skip
    return LossOutputs(sums.sum(dtype=torch.float64).float())


def backward(
    grads: LossOutputs, x: LossInputs, out: LossOutputs, o: LossOptions, wanted: Mapping[str, torch.dtype]
) -> dict[str, Tensor]:
    """Launch `group_sparse_bce_backward_kernel` and add up the parts' sums in their order; all gradients are made at once."""
    features, weight = x.features, x.weight
    (batch_size, num_features), (num_labels, width), num_groups = features.shape, weight.shape, x.supports.shape[0]
    if not (batch_size and num_labels and num_groups):
        return {name: torch.zeros_like(getattr(x, name), dtype=dtype) for name, dtype in wanted.items()}
    assert grads.loss is not None
    chosen = configurations.bce_configuration(num_labels, num_groups, batch_size, width, features.element_size())
    # Of rows that do not count no feature enters a product, where zero times what is no number would. A copy, without gaps.
    columns = aligned(torch.where((x.row_weight != 0)[:, None], features, 0).t())
    found = {"weight": weight.new_empty(num_labels, width, dtype=wanted.get("weight", weight.dtype))}
    if x.bias is not None:
        found["bias"] = weight.new_empty(num_labels, dtype=wanted.get("bias", weight.dtype))
    scales = slope_scales(features, x.row_weight, x.label_weight, grads.loss)
    num_parts = min(num_groups, configurations.PROGRAMS * gpu(features.device).multiprocessors)
    sums = features.new_zeros(num_parts, num_features, columns.shape[1], dtype=torch.float32)
    _launch_backward(
        (num_parts,),
        columns, *_read(x), scales, found["weight"], found.get("bias"), sums, o.label_smoothing, num_groups, num_labels,
        x.positives.shape[0], num_parts, batch_size, columns.shape[1], num_features, *weight.stride(),
        WIDTH=width, BLOCK_L=chosen.block_l, BLOCK_F=chosen.block_f, BLOCK_B=chosen.block_b,
        PRECISION=products_of(features.dtype), num_warps=chosen.num_warps,
    )  # fmt: skip
    if "features" in wanted:
        found["features"] = (sums.sum(0)[:, :batch_size] * scales[1]).t().to(wanted["features"]).contiguous()
    return {name: found[name] for name in wanted}


def _read(x: LossInputs) -> tuple[Tensor | None, ...]:
    """Return what both kernels read after the features, side by side in memory but for the weights."""
    rest = (None if tensor is None else tensor.contiguous() for tensor in x[2:])
    return (x.weight, *rest)
