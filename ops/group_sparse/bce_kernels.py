"""Binary cross-entropy over group-sparse linear layers as Triton kernels, which store no logits.

The forward pass has a sum for each program and changes nothing; the backward pass, with the update, is in `gradient_kernels`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged.ops._shared.device import load_segment
from jagged.ops._shared.label_loss import LossOptions, LossOutputs, slope_scales
from jagged.ops._shared.launch import Launcher
from jagged.ops._shared.matrices import aligned, products_of
from jagged.ops._shared.sizes import cdiv
from jagged.ops.group_sparse import configurations, gradient_kernels
from jagged.ops.group_sparse.gradient_kernels import KernelUpdate, gradients
from jagged.ops.group_sparse.spec import (
    FeatureGradient,
    LossInputs,
    UpdateInputs,
    UpdateOptions,
    UpdatingInputs,
    UpdatingOptions,
    columns_of_groups,
)
from jagged.ops.group_sparse.tiles import LN_2, LOG2_E, VARYING, groups_of, load_positives, logits_of_tile, signs_of
from jagged.ops.group_sparse.update import loss_inputs


@triton.jit
def product_less_1(x, y):
    """Return (1 + x) (1 + y) - 1, of which small x and y keep their digits."""
    return x + y + x * y


@triton.jit
def log1p(x):
    """Return log(1 + x) for float32 x >= 0, small values with all their digits.

    Below 1 it is x times a polynomial of degree 8, fitted to log1p(x) / x on [0, 1] at Chebyshev's nodes, which errs by 1.6e-7 of
    the result.
    """
    # Of large x the powers would be infinite.
    t = tl.minimum(x, 1.0)
    polynomial = t * 0.005253457929939032 - 0.02958850748836994
    polynomial = t * polynomial + 0.07836166769266129
    polynomial = t * polynomial - 0.13674770295619965
    polynomial = t * polynomial + 0.19111430644989014
    polynomial = t * polynomial - 0.24844369292259216
    polynomial = t * polynomial + 0.33319270610809326
    polynomial = t * polynomial - 0.49999502301216125
    polynomial = t * polynomial + 1.0
    return tl.where(x < 1, t * polynomial, tl.log(1.0 + x))


@triton.jit
def losses_of_labels(
    features, weight, supports, positives, rows, positive_offsets, bias, label_weight, group, first, end, first_sample, counts,
    is_plain, smoothing, num_positives, filled_size, num_features, feature_stride, weight_stride, weight_column_stride,
    WIDTH: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_B: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return `[BLOCK_L]`, the losses of a group's labels from `first` on, summed over the samples that count.

    log(1 + exp(z)) = max(z, 0) + log(1 + u), u = exp(-|z|), and the sum of log(1 + u) over samples is the logarithm of a product:
    one logarithm a label. At most 64 factors of at most 2 are within float32. Six instructions a logit are what bounds the
    kernel, so `z` is in powers of two, and masks are met where not all samples count (`is_plain` is False), or smoothing.
    """
    label, sample = first + tl.arange(0, BLOCK_L), first_sample + tl.arange(0, BLOCK_B)
    z = logits_of_tile(
        features, weight, supports, group, label, end, sample, filled_size, num_features, feature_stride, weight_stride,
        weight_column_stride, WIDTH, BLOCK_L, BLOCK_F, PRECISION,
    ) * LOG2_E  # fmt: skip
    if bias is not None:
        z += (tl.load(bias + label, mask=label < end, other=0.0).to(tl.float32) * LOG2_E)[:, None]
    bits, any_bit = load_positives(positives, rows, positive_offsets, group, num_positives, label, first_sample, BLOCK_B)
    if any_bit:
        z *= signs_of(bits, BLOCK_B)
    if is_plain:
        product = tl.reduce(tl.exp2(-tl.abs(z)), 1, product_less_1)
        linear = tl.sum(tl.maximum(z, 0.0), 1)
    else:
        # Of rows that do not count nothing counts, not even what is no number.
        product = tl.reduce(tl.where(counts[None, :], tl.exp2(-tl.abs(z)), 0.0), 1, product_less_1)
        linear = tl.sum(tl.where(counts[None, :], tl.maximum(z, 0.0) - 0.5 * smoothing * z, 0.0), 1)
    losses = log1p(product) + linear * LN_2
    if label_weight is not None:
        losses *= tl.load(label_weight + label, mask=label < end, other=0.0).to(tl.float32)
    return tl.where(label < end, losses, 0.0)


@triton.jit(do_not_specialize=[*VARYING, "num_positives"])
def group_sparse_bce_forward_kernel(
    features, weight, supports, group_offsets, positives, rows, row_weight, positive_offsets, bias, label_weight, sums, smoothing,
    num_groups, num_labels, num_positives, batch_size, filled_size, num_features, feature_stride, weight_stride,
    weight_column_stride, WIDTH: tl.constexpr, GROUPS: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_F: tl.constexpr,
    BLOCK_B: tl.constexpr, PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """sums[p] = sum over the labels l of GROUPS groups and BLOCK_B samples b: row_weight[b] label_weight[l] loss(z[b, l]).

    loss(z) = log(1 + exp(s z)) - smoothing / 2 s z, where s is -1 for positives and 1 for others, and z as
    `group_sparse_forward_kernel` has it. All rows that count weigh the same.
    """
    blocks = tl.cdiv(batch_size, BLOCK_B)
    first_group, last_group = groups_of(tl.program_id(0) // blocks, num_groups, GROUPS)
    first_sample = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_B
    sample = first_sample + tl.arange(0, BLOCK_B)
    of_row = tl.load(row_weight + sample, mask=sample < batch_size, other=0.0)
    is_plain = (tl.min((of_row != 0).to(tl.int32), 0) == 1) & (smoothing == 0)
    total = tl.zeros([BLOCK_L], tl.float32)
    for group in tl.range(first_group, last_group, num_stages=NUM_STAGES):
        start, end = load_segment(group_offsets, group, num_labels)
        total += losses_of_labels(
            features, weight, supports, positives, rows, positive_offsets, bias, label_weight, group, start, end, first_sample,
            of_row != 0, is_plain, smoothing, num_positives, filled_size, num_features, feature_stride, weight_stride,
            weight_column_stride, WIDTH, BLOCK_L, BLOCK_F, BLOCK_B, PRECISION,
        )  # fmt: skip
        if end > start + BLOCK_L:
            for first in tl.range(start + BLOCK_L, end, BLOCK_L, num_stages=1):
                total += losses_of_labels(
                    features, weight, supports, positives, rows, positive_offsets, bias, label_weight, group, first, end,
                    first_sample, of_row != 0, is_plain, smoothing, num_positives, filled_size, num_features, feature_stride,
                    weight_stride, weight_column_stride, WIDTH, BLOCK_L, BLOCK_F, BLOCK_B, PRECISION,
                )  # fmt: skip
    tl.store(sums + tl.program_id(0), tl.sum(total) * tl.max(of_row))


_launch_forward = Launcher(group_sparse_bce_forward_kernel)


def forward(x: LossInputs, o: LossOptions) -> LossOutputs:
    """Launch `group_sparse_bce_forward_kernel` and add up the programs' sums, in float64."""
    (batch_size, num_features), (num_labels, width), num_groups = x.features.shape, x.weight.shape, x.supports.shape[0]
    if not (batch_size and num_labels and num_groups):
        return LossOutputs(x.features.new_zeros((), dtype=torch.float32))
    chosen = configurations.bce_forward_configuration(num_labels, num_groups, batch_size, width, x.features.element_size())
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
    """Make all gradients that are wanted, `gradients`."""
    assert grads.loss is not None
    return _gradients(grads.loss, x, o.label_smoothing, wanted)


def updating_forward(x: UpdatingInputs, o: UpdatingOptions) -> LossOutputs:
    """Compute the loss, as `forward` does."""
    return forward(loss_inputs(x), LossOptions(o.label_smoothing))


def update(x: UpdateInputs, o: UpdateOptions) -> FeatureGradient:
    """Return the gradient of features, and change weights and biases, `gradient_kernels.update`."""
    return gradient_kernels.update(x, o, partial(_gradients, x.grad, loss_inputs(x), o.label_smoothing))


def _gradients(
    grad: Tensor, x: LossInputs, smoothing: float, wanted: Mapping[str, torch.dtype], changes: KernelUpdate | None = None
) -> dict[str, Tensor]:
    """Give `gradients` what it needs; `grad` is that of the loss."""
    if not (x.features.shape[0] and x.weight.shape[0] and x.supports.shape[0]):
        return {name: torch.zeros_like(getattr(x, name), dtype=dtype) for name, dtype in wanted.items()}
    # Of rows that do not count no feature enters a product, where zero times what is no number would. A copy, without gaps.
    columns = aligned(torch.where((x.row_weight != 0)[:, None], x.features, 0).t())
    scales = slope_scales(x.features, x.row_weight, x.label_weight, grad)
    scales[:1] *= x.row_weight.amax()
    return gradients(
        x, columns, scales, wanted, smoothing=smoothing, row_weight=x.row_weight, label_weight=x.label_weight, update=changes
    )


def _read(x: LossInputs) -> tuple[Tensor | None, ...]:
    """Return what the kernel reads after the features, side by side in memory but for the weights."""
    rest = (None if tensor is None else tensor.contiguous() for tensor in x[3:])
    return (x.weight, columns_of_groups(x), *rest)
