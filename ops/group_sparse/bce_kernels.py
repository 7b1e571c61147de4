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
from jagged.ops.group_sparse.spec import FeatureGradient, LossInputs, UpdateInputs, UpdateOptions, UpdatingInputs, UpdatingOptions
from jagged.ops.group_sparse.update import loss_inputs, update_by

LOG2_E = tl.constexpr(1.4426950408889634)


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
def load_positives(positives, rows, positive_offsets, group, num_positives, label, first_sample, BLOCK_B: tl.constexpr):
    """Return `[LABEL]` (int64), whose bit b says that sample `first_sample` + b, of at most 64, is a positive; and if any may."""
    tl.static_assert(BLOCK_B <= 64)
    start, end = load_segment(positive_offsets, group, num_positives)
    bits = tl.zeros([label.shape[0]], tl.int64)
    if end > start:
        for at in tl.range(start, end, num_stages=1):
            place = tl.load(rows + at) - first_sample
            bit = tl.where((place >= 0) & (place < BLOCK_B), tl.full([], 1, tl.int64) << (place & 63), 0)
            bits |= tl.where(label == tl.load(positives + at), bit, 0)
    return bits, end > start


@triton.jit
def signs_of(bits, BLOCK_B: tl.constexpr):
    """Return `[LABEL, BLOCK_B]`, -1 for the positives that `load_positives` found and 1 for others.

    The loss of a logit z is that of `sign z` as a negative's, and so is its derivative, times the sign: neither a large
    positive's nor a small negative's is lost.
    """
    place = tl.arange(0, BLOCK_B).to(tl.int64)
    return (1 - 2 * ((bits[:, None] >> place[None, :]) & 1)).to(tl.float32)


@triton.jit
def slope_of(z, smoothing):
    """Return the derivative of log(1 + exp(z)) - smoothing / 2 z; of a z below -88 exp(-z) is infinite, and the sigmoid 0."""
    return 1.0 / (1.0 + tl.exp2(z * -LOG2_E)) - 0.5 * smoothing


@triton.jit
def losses_of_labels(
    features, weight, supports, positives, rows, positive_offsets, bias, label_weight, group, first, end, first_sample, counts,
    smoothing, num_positives, filled_size, num_features, feature_stride, weight_stride, weight_column_stride,
    WIDTH: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_B: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return `[BLOCK_L]`, the losses of a group's labels from `first` on, summed over the samples that count.

    log(1 + exp(z)) = max(z, 0) + log(1 + u), u = exp(-|z|), and the sum of log(1 + u) over samples is the logarithm of a product:
    one logarithm a label. At most 64 factors of at most 2 are within float32.
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
        z *= signs_of(bits, BLOCK_B)
    # Of rows that do not count nothing counts, not even what is no number.
    exists = (label < end)[:, None] & counts[None, :]
    product = tl.reduce(tl.where(exists, tl.exp2(tl.abs(z) * -LOG2_E), 0.0), 1, product_less_1)
    losses = log1p(product) + tl.sum(tl.where(exists, tl.maximum(z, 0.0) - 0.5 * smoothing * z, 0.0), 1)
    if label_weight is not None:
        losses *= tl.load(label_weight + label, mask=label < end, other=0.0).to(tl.float32)
    return losses


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
    total = tl.zeros([BLOCK_L], tl.float32)
    for group in tl.range(first_group, last_group, num_stages=NUM_STAGES):
        start, end = load_segment(group_offsets, group, num_labels)
        total += losses_of_labels(
            features, weight, supports, positives, rows, positive_offsets, bias, label_weight, group, start, end, first_sample,
            of_row != 0, smoothing, num_positives, filled_size, num_features, feature_stride, weight_stride, weight_column_stride,
            WIDTH, BLOCK_L, BLOCK_F, BLOCK_B, PRECISION,
        )  # fmt: skip
        if end > start + BLOCK_L:
            for first in tl.range(start + BLOCK_L, end, BLOCK_L, num_stages=1):
                total += losses_of_labels(
                    features, weight, supports, positives, rows, positive_offsets, bias, label_weight, group, first, end,
                    first_sample, of_row != 0, smoothing, num_positives, filled_size, num_features, feature_stride, weight_stride,
                    weight_column_stride, WIDTH, BLOCK_L, BLOCK_F, BLOCK_B, PRECISION,
                )  # fmt: skip
    tl.store(sums + tl.program_id(0), tl.sum(total) * tl.max(of_row))


@triton.jit
def write_gradients(
    features, weight, supports, positives, rows, row_weight, positive_offsets, bias, label_weight, grad_weight, grad_bias, sums,
    scale, unscale, group, first, end, smoothing, num_positives, batch_size, filled_size, num_features, weight_stride,
    weight_column_stride, WIDTH: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_B: tl.constexpr,
    TILES: tl.constexpr, BLOCKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradients of BLOCK_L labels of a group from `first` on, and add to the sums of the columns they read."""
    label = first + tl.arange(0, BLOCK_L)
    of_label = (label < end).to(tl.float32) * scale
    if label_weight is not None:
        of_label *= tl.load(label_weight + label, mask=label < end, other=0.0).to(tl.float32)
    if bias is not None:
        its_bias = tl.load(bias + label, mask=label < end, other=0.0).to(tl.float32)
    # Of more slots than a tile has, logits are computed again for each block of slots.
    for slots in tl.range(0, WIDTH, BLOCK_F, num_stages=1):
        slot = slots + tl.arange(0, BLOCK_F)
        column = load_columns(supports, group, slot, num_features, WIDTH)
        left = load_block(weight, label, weight_stride, label < end, slot, weight_column_stride, slot < WIDTH)
        of_weight = tl.zeros([BLOCK_L, BLOCK_F], tl.float32)
        of_bias = tl.zeros([BLOCK_L], tl.float32)
        for block in tl.range(0, tl.cdiv(batch_size, BLOCK_B * TILES) if BLOCKS == 0 else BLOCKS, num_stages=1):
            for tile in tl.static_range(TILES):
                first_sample = (block * TILES + tile) * BLOCK_B
                sample = first_sample + tl.arange(0, BLOCK_B).to(tl.int64)
                right = load_block(features, column, filled_size, slot < WIDTH, sample, 1, sample < filled_size)
                if WIDTH <= BLOCK_F:
                    z = dot(left, right, None, PRECISION)
                else:
                    z = logits_of_tile(
                        features, weight, supports, group, label, end, sample, filled_size, num_features, filled_size,
                        weight_stride, weight_column_stride, WIDTH, BLOCK_L, BLOCK_F, PRECISION,
                    )  # fmt: skip
                if bias is not None:
                    z += its_bias[:, None]
                bits, any_bit = load_positives(
                    positives, rows, positive_offsets, group, num_positives, label, first_sample, BLOCK_B
                )  # fmt: skip
                counts = tl.load(row_weight + sample, mask=sample < batch_size, other=0.0) != 0
                if any_bit:
                    slope = slope_of(z * signs_of(bits, BLOCK_B), smoothing) * signs_of(bits, BLOCK_B)
                else:
                    slope = slope_of(z, smoothing)
                slope = tl.where(counts[None, :], slope, 0.0)
                # Not the sum of products: threads that hold it, too, would contract them otherwise, to other bits.
                of_bias += tl.sum(slope, 1) * of_label
                rounded = (slope * of_label[:, None]).to(left.dtype)
                of_weight = dot(rounded, tl.trans(right), of_weight, PRECISION)
                tl.atomic_add(
                    sums + column[:, None] * filled_size + sample[None, :], dot(tl.trans(left), rounded, None, PRECISION),
                    mask=(slot < WIDTH)[:, None] & (sample < filled_size)[None, :], sem="relaxed",
                )  # fmt: skip
        places = grad_weight + label[:, None] * WIDTH + slot[None, :]
        exists = (label < end)[:, None] & (slot < WIDTH)[None, :]
        tl.store(places, (of_weight * unscale).to(grad_weight.dtype.element_ty), mask=exists)
        if grad_bias is not None:
            tl.store(grad_bias + label, (of_bias * unscale).to(grad_bias.dtype.element_ty), mask=(label < end) & (slots == 0))


@triton.jit(do_not_specialize=[*VARYING, "num_positives"])
def group_sparse_bce_backward_kernel(
    features, weight, supports, group_offsets, positives, rows, row_weight, positive_offsets, bias, label_weight, scales,
    grad_weight, grad_bias, sums, smoothing, num_groups, num_labels, num_positives, num_parts, batch_size, filled_size,
    num_features, weight_stride, weight_column_stride, WIDTH: tl.constexpr, BLOCK_L: tl.constexpr,
    BLOCK_F: tl.constexpr, BLOCK_B: tl.constexpr, TILES: tl.constexpr, BLOCKS: tl.constexpr, PRECISION: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """With d[l, b] = label_weight[l] loss'(z[b, l]) scales[0], 0 where row_weight[b] is, for all labels l of a part's groups:

    loss'(z) = s sigmoid(s z) - s smoothing / 2, s as in the forward pass;
    grad_weight[l, f] = scales[1] sum_b d[l, b] features[supports[g, f], b], grad_bias[l] = scales[1] sum_b d[l, b], and
    sums[part, supports[g, f], b] += sum_l weight[l, f] d[l, b].

    A part's sums are its program's alone. Its threads add to them where they lie, in the L2, and wait for nothing but each other:
    slopes become a factor of products through shared memory, so all wait between the sums of two tiles. So a sum's terms come in
    one order, and results are the same bits each time. Samples come in blocks of TILES tiles; BLOCKS is 1 where there is a single
    block, so that tiles of the next groups can be loaded ahead, and 0 for more. Labels past the first BLOCK_L of a group, which
    few groups have, come last.
    """
    part = tl.program_id(0).to(tl.int64)
    sums += part * num_features * filled_size
    scale, unscale = tl.load(scales), tl.load(scales + 1)
    first_group, last_group = part * num_groups // num_parts, (part + 1) * num_groups // num_parts
    longest = tl.zeros([], tl.int64)
    for group in tl.range(first_group, last_group, num_stages=NUM_STAGES):
        start, end = load_segment(group_offsets, group, num_labels)
        longest = tl.maximum(longest, (end - start).to(tl.int64))
        write_gradients(
            features, weight, supports, positives, rows, row_weight, positive_offsets, bias, label_weight, grad_weight, grad_bias,
            sums, scale, unscale, group, start, end, smoothing, num_positives, batch_size, filled_size, num_features,
            weight_stride, weight_column_stride, WIDTH, BLOCK_L, BLOCK_F, BLOCK_B, TILES, BLOCKS, PRECISION,
        )  # fmt: skip
    for skipped in range(BLOCK_L, longest, BLOCK_L):
        for group in range(first_group, last_group):
            start, end = load_segment(group_offsets, group, num_labels)
            if end > start + skipped:
                write_gradients(
                    features, weight, supports, positives, rows, row_weight, positive_offsets, bias, label_weight, grad_weight,
                    grad_bias, sums, scale, unscale, group, start + skipped, end, smoothing, num_positives, batch_size,
                    filled_size, num_features, weight_stride, weight_column_stride, WIDTH, BLOCK_L, BLOCK_F, BLOCK_B, TILES,
                    BLOCKS, PRECISION,
                )  # fmt: skip


_launch_forward = Launcher(group_sparse_bce_forward_kernel)
_launch_backward = Launcher(group_sparse_bce_backward_kernel)


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
    """Launch `group_sparse_bce_backward_kernel` and add up the parts' sums in their order; all gradients are made at once."""
    features, weight = x.features, x.weight
    (batch_size, num_features), (num_labels, width), num_groups = features.shape, weight.shape, x.supports.shape[0]
    if not (batch_size and num_labels and num_groups):
        return {name: torch.zeros_like(getattr(x, name), dtype=dtype) for name, dtype in wanted.items()}
    assert grads.loss is not None
    chosen = configurations.bce_backward_configuration(num_labels, num_groups, batch_size, width, features.element_size())
    # Of rows that do not count no feature enters a product, where zero times what is no number would. A copy, without gaps.
    columns = aligned(torch.where((x.row_weight != 0)[:, None], features, 0).t())
    found = {"weight": weight.new_empty(num_labels, width, dtype=wanted.get("weight", weight.dtype))}
    if x.bias is not None:
        found["bias"] = weight.new_empty(num_labels, dtype=wanted.get("bias", weight.dtype))
    scales = slope_scales(features, x.row_weight, x.label_weight, grads.loss)
    scales[:1] *= x.row_weight.amax()
    tiles = configurations.bce_tiles(batch_size, width, chosen)
    num_parts = min(num_groups, configurations.PROGRAMS * gpu(features.device).multiprocessors)
    sums = features.new_zeros(num_parts, num_features, columns.shape[1], dtype=torch.float32)
    _launch_backward(
        (num_parts,),
        columns, *_read(x), scales, found["weight"], found.get("bias"), sums, o.label_smoothing, num_groups, num_labels,
        x.positives.shape[0], num_parts, batch_size, columns.shape[1], num_features, *weight.stride(),
        WIDTH=width, BLOCK_L=chosen.block_l, BLOCK_F=chosen.block_f, BLOCK_B=chosen.block_b,
        TILES=tiles, BLOCKS=int(batch_size <= chosen.block_b * tiles), PRECISION=products_of(features.dtype),
        NUM_STAGES=chosen.num_stages, num_warps=chosen.num_warps,
    )  # fmt: skip
    if "features" in wanted:
        found["features"] = (sums.sum(0)[:, :batch_size] * scales[1]).t().to(wanted["features"]).contiguous()
    return {name: found[name] for name in wanted}


def updating_forward(x: UpdatingInputs, o: UpdatingOptions) -> LossOutputs:
    """Compute the loss, as `forward` does."""
    return forward(loss_inputs(x), LossOptions(o.label_smoothing))


def update(x: UpdateInputs, o: UpdateOptions) -> FeatureGradient:
    """Return the gradient of features, and change weights and biases by theirs, which take the memory of the layer in float32."""
    return update_by(backward, x, o)


def _read(x: LossInputs) -> tuple[Tensor | None, ...]:
    """Return what both kernels read after the features, side by side in memory but for the weights."""
    rest = (None if tensor is None else tensor.contiguous() for tensor in x[2:])
    return (x.weight, *rest)
