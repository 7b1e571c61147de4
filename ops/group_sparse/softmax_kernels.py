"""Softmax cross-entropy over group-sparse linear layers as Triton kernels, which store no logits.

The forward pass walks a part of the groups in each program, and keeps of every row a maximum and a sum of exponentials relative
to it; the parts' are brought together afterwards. The backward pass is in `gradient_kernels`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged.ops._shared.device import exp_of_difference, load_segment
from jagged.ops._shared.launch import Launcher
from jagged.ops._shared.matrices import aligned, gpu, inverse_scale_of, products_of
from jagged.ops._shared.sizes import cdiv
from jagged.ops.group_sparse import configurations, gradient_kernels
from jagged.ops.group_sparse.gradient_kernels import KernelUpdate, gradients
from jagged.ops.group_sparse.spec import (
    FeatureGradient,
    Options,
    SoftmaxInputs,
    SoftmaxOutputs,
    SoftmaxUpdateInputs,
    SoftmaxUpdatingInputs,
    UpdateOptions,
    UpdatingOptions,
    columns_of_groups,
)
from jagged.ops.group_sparse.tiles import VARYING, are_positives, load_positives, logits_of_tile
from jagged.ops.group_sparse.torch_impl import counting_features, softmax_rows
from jagged.ops.group_sparse.update import softmax_inputs

# Below every logit, and finite: the difference of two infinities is no number.
LOWEST = tl.constexpr(-1.0e38)


@triton.constexpr_function
def unit_of(dtype):
    """Return by what logits are multiplied: log2(e), for which exponentials are one instruction; in float32 that adds errors."""
    return 1.0 if dtype == tl.float32 else 1.4426950408889634


@triton.jit
def exp_of_units(difference, UNIT: tl.constexpr):
    """Return e to the power of a difference of logits in units of `unit_of`, which is not far above 0."""
    return exp_of_difference(difference, True) if UNIT == 1.0 else tl.exp2(difference)


@triton.jit
def with_labels(
    features, weight, supports, positives, rows, positive_offsets, bias, group, first, end, first_sample, highest, total, target,
    num_positives, filled_size, num_features, feature_stride, weight_stride, weight_column_stride, WIDTH: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_B: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return `highest`, `total` and `target` of the kernel with BLOCK_L more labels of a group, from `first` on.

    One exponential a logit: of the old maximum and the logit one is the new maximum, and the other's is relative to it. Logits
    are in units of `unit_of`, and of labels that do not exist -inf, with the bias in one addition.
    """
    UNIT: tl.constexpr = unit_of(weight.dtype.element_ty)
    label, sample = first + tl.arange(0, BLOCK_L), first_sample + tl.arange(0, BLOCK_B)
    z = logits_of_tile(
        features, weight, supports, group, label, end, sample, filled_size, num_features, feature_stride, weight_stride,
        weight_column_stride, WIDTH, BLOCK_L, BLOCK_F, PRECISION,
    )  # fmt: skip
    addend = tl.zeros([BLOCK_L], tl.float32)
    if bias is not None:
        addend = tl.load(bias + label, mask=label < end, other=0.0).to(tl.float32) * UNIT
    z = z * UNIT + tl.where(label < end, addend, float("-inf"))[:, None]
    bits, any_bit = load_positives(positives, rows, positive_offsets, group, num_positives, label, first_sample, BLOCK_B)
    if any_bit:
        bits = tl.where(label < end, bits, 0)
        # Wrong positives may name a label that does not exist.
        bits = tl.where(label < end, bits, 0)
        target += tl.sum(tl.where(are_positives(bits, BLOCK_B), z, 0.0), 0)
    smaller = exp_of_units(-tl.abs(z - highest), UNIT)
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
    UNIT: tl.constexpr = unit_of(weight.dtype.element_ty)
    relative = total * exp_of_units(highest - of_sample[None, :], UNIT)
    places = found + part * 3 * batch_size + sample
    tl.store(places, of_sample / UNIT, mask=sample < batch_size)
    tl.store(places + batch_size, tl.sum(tl.where(total == 0.0, 0.0, relative), 0), mask=sample < batch_size)
    tl.store(places + 2 * batch_size, target / UNIT, mask=sample < batch_size)


_launch_forward = Launcher(group_sparse_softmax_forward_kernel)


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
    """Make all gradients that are wanted, `gradients`."""
    return _gradients(grads, x, out, wanted)


def updating_forward(x: SoftmaxUpdatingInputs, o: UpdatingOptions) -> SoftmaxOutputs:
    """Compute what `forward` does."""
    return forward(softmax_inputs(x), Options())


def update(x: SoftmaxUpdateInputs, o: UpdateOptions) -> FeatureGradient:
    """Return the gradient of features, and change weights and biases, `gradient_kernels.update`."""
    # The sum of the positives' logits is in no gradient.
    given = SoftmaxOutputs(x.grad_lse, x.grad_target), softmax_inputs(x), SoftmaxOutputs(x.lse, x.lse)
    return gradient_kernels.update(x, o, partial(_gradients, *given))


def _gradients(
    grads: SoftmaxOutputs,
    x: SoftmaxInputs,
    out: SoftmaxOutputs,
    wanted: Mapping[str, torch.dtype],
    changes: KernelUpdate | None = None,
) -> dict[str, Tensor]:
    """Give `gradients` what it needs."""
    features = x.features
    if not (features.shape[0] and x.weight.shape[0] and x.supports.shape[0]):
        return {name: torch.zeros_like(getattr(x, name), dtype=dtype) for name, dtype in wanted.items()}
    lse, of_lse, of_target = softmax_rows(grads, x, out)
    unscale = lse.new_ones(())
    if features.dtype == torch.float16:
        unscale = inverse_scale_of(lse != torch.inf, of_lse, of_target)
    scales = torch.stack([torch.ones_like(unscale), unscale])
    rows_of_softmax = lse, of_lse / unscale, of_target / unscale
    return gradients(x, _columns(x), scales, wanted, rows_of_softmax=rows_of_softmax, update=changes)


def _columns(x: SoftmaxInputs) -> Tensor:
    """Return features transposed, without gaps between the rows; of masked rows zeros."""
    columns = aligned(counting_features(x).t())
    return columns if columns.stride(0) == columns.shape[1] else columns.contiguous()


def _masked(x: SoftmaxInputs, lse: Tensor, target: Tensor) -> SoftmaxOutputs:
    if x.row_mask is None:
        return SoftmaxOutputs(lse, target)
    return SoftmaxOutputs(lse.masked_fill(~x.row_mask, 0), target.masked_fill(~x.row_mask, 0))


def _read(x: SoftmaxInputs) -> tuple[Tensor | None, ...]:
    """Return what the kernel reads after the features, side by side in memory but for the weights."""
    rest = (None if tensor is None else tensor.contiguous() for tensor in x[3:-1])
    return (x.weight, columns_of_groups(x), *rest)
