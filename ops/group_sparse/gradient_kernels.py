"""Gradients of losses over group-sparse linear layers as a Triton kernel, which stores no logits.

It computes a group's logits again, and from them all that depends on the group: the gradients of its weights and biases, and what
it adds to the gradient of the columns that it reads. What losses differ in is the derivative by a logit, their slope. In place of
writing a group's gradients it may update the group by them: they are whole there, and nobody else reads its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged.ops._shared.device import dot, exp_of_difference, load_segment, rounded_at_random
from jagged.ops._shared.launch import Launcher
from jagged.ops._shared.matrices import gpu, products_of
from jagged.ops._shared.sizes import cdiv
from jagged.ops.group_sparse import configurations
from jagged.ops.group_sparse.spec import (
    FeatureGradient,
    LossInputs,
    SoftmaxInputs,
    SoftmaxUpdateInputs,
    UpdateInputs,
    UpdateOptions,
    columns_of_groups,
)
from jagged.ops.group_sparse.tiles import (
    LOG2_E,
    VARYING,
    are_positives,
    load_block,
    load_columns,
    load_positives,
    logits_of_tile,
    signs_of,
)
from jagged.ops.group_sparse.update import may_change, update_by


@triton.jit
def slope_of(z, smoothing):
    """Return the derivative of log(1 + exp(z)) - smoothing / 2 z; of a z below -88 exp(-z) is infinite, and the sigmoid 0."""
    return 1.0 / (1.0 + tl.exp2(z * -LOG2_E)) - 0.5 * smoothing


@triton.jit
def load_rows(row_weight, lse, grad_lse, sample, batch_size):
    """Return what slopes need of rows: for a softmax the log-sum-exp and its gradient, or else twice whether they count."""
    exists = sample < batch_size
    if lse is None:
        counts = tl.load(row_weight + sample, mask=exists, other=0.0) != 0
        of_rows = counts, counts
    else:
        of_rows = tl.load(lse + sample, mask=exists, other=float("inf")), tl.load(grad_lse + sample, mask=exists, other=0.0)
    return of_rows


@triton.jit
def slopes_of_bce(z, bits, any_bit, counts, smoothing, BLOCK_B: tl.constexpr):
    """Return `[LABEL, SAMPLE]`, s sigmoid(s z) - s smoothing / 2, s = -1 for positives and 1 for others; 0 in rows that do not
    count.
    """
    if any_bit:
        signs = signs_of(bits, BLOCK_B)
        slope = slope_of(z * signs, smoothing) * signs
    else:
        slope = slope_of(z, smoothing)
    return tl.where(counts[None, :], slope, 0.0)


@triton.jit
def slopes_of_softmax(
    z, bits, any_bit, lse, grad_lse, grad_target, sample, exists, batch_size, BLOCK_B: tl.constexpr, ACCURATE: tl.constexpr
):
    """Return `[LABEL, SAMPLE]`, grad_lse exp(z - lse), plus grad_target of positives; 0 of labels that do not exist."""
    slope = exp_of_difference(z - lse[None, :], ACCURATE) * grad_lse[None, :]
    if any_bit:
        of_target = tl.load(grad_target + sample, mask=sample < batch_size, other=0.0)
        slope += tl.where(are_positives(bits, BLOCK_B), of_target[None, :], 0.0)
    # Also keeps the compiler from contracting products with a sum over samples, otherwise in every thread that has it.
    return tl.where(exists[:, None], slope, 0.0)


@triton.jit
def load_of_labels(bias, label_weight, bias_momentum, label, end):
    """Return what labels have but for their weights, float32 `[LABEL]`: bias, weight in the loss, and the bias's momentum.

    These are too short for copies ahead, so the loop over groups loads them a group ahead.
    """
    exists = label < end
    none = tl.zeros([label.shape[0]], tl.float32)
    its_bias, its_weight, its_momentum = none, none, none
    if bias is not None:
        its_bias = tl.load(bias + label, mask=exists, other=0.0).to(tl.float32)
    if label_weight is not None:
        its_weight = tl.load(label_weight + label, mask=exists, other=0.0).to(tl.float32)
    if bias_momentum is not None:
        its_momentum = tl.load(bias_momentum + label, mask=exists, other=0.0).to(tl.float32)
    return its_bias, its_weight, its_momentum


@triton.jit
def update_values(values, old, states, old_states, place, first_element, slope, exists, momentum, weight_decay, rate, step):
    """Change old values by their gradients, and momentum at `place` of their states, as `update._change` does.

    What is None is left out: momentum, weight decay, and of the step rounding at random.
    """
    if weight_decay is not None:
        slope += weight_decay * old
    if states is not None:
        slope += momentum * old_states
        tl.store(states + place, slope.to(states.dtype.element_ty), mask=exists)
    new = old - rate * slope
    if step is None:
        tl.store(values, new.to(values.dtype.element_ty), mask=exists)
    else:
        tl.store(values, rounded_at_random(new, first_element + place, step), mask=exists)


@triton.jit
def gradients_of_labels(
    features, weight, supports, positives, rows, row_weight, positive_offsets, bias, label_weight, lse, grad_lse, grad_target,
    grad_weight, grad_bias, updated_bias, weight_momentum, bias_momentum, rate, step, counts, momentum, weight_decay, sums,
    rows_of_tiles, of_labels, scale, unscale, group, first, end, smoothing, num_labels, num_positives, first_block, last_block,
    batch_size, filled_size, num_features, weight_stride, weight_column_stride, WIDTH: tl.constexpr, BLOCK_L: tl.constexpr,
    BLOCK_F: tl.constexpr, BLOCK_B: tl.constexpr, TILES: tl.constexpr, BLOCKS: tl.constexpr, OF_WEIGHT: tl.constexpr, OF_FEATURES:
    tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradients of BLOCK_L labels of a group from `first` on, and add to the sums of the columns they read.

    Samples are those of some blocks, of all where gradients of labels are wanted.
    With a `rate` the labels are updated if `counts` says so, and no gradient is written. `of_labels` is of `load_of_labels`.
    """
    label = first + tl.arange(0, BLOCK_L)
    its_bias, its_weight, its_momentum = of_labels
    of_label = (label < end).to(tl.float32) * scale
    if label_weight is not None:
        of_label *= its_weight
    # Of more slots than a tile has, logits are computed again for each block of slots.
    for slots in tl.range(0, WIDTH, BLOCK_F, num_stages=1):
        slot = slots + tl.arange(0, BLOCK_F)
        column = load_columns(supports, group, slot, num_features, WIDTH)
        left = load_block(weight, label, weight_stride, label < end, slot, weight_column_stride, slot < WIDTH)
        if OF_FEATURES:
            # Loaded once more: of one tile that is a factor in two ways Triton copies nothing ahead.
            transposed = load_block(weight, slot, weight_column_stride, slot < WIDTH, label, weight_stride, label < end)
        of_weight = tl.zeros([BLOCK_L, BLOCK_F], tl.float32)
        of_bias = tl.zeros([BLOCK_L], tl.float32)
        for block in tl.range(0 if BLOCKS else first_block, BLOCKS if BLOCKS else last_block, num_stages=1):
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
                of_rows = rows_of_tiles[tile] if BLOCKS else load_rows(row_weight, lse, grad_lse, sample, batch_size)
                if lse is None:
                    slope = slopes_of_bce(z, bits, any_bit, of_rows[0], smoothing, BLOCK_B)
                else:
                    slope = slopes_of_softmax(
                        z, bits, any_bit, of_rows[0], of_rows[1], grad_target, sample, label < end, batch_size, BLOCK_B,
                        weight.dtype.element_ty == tl.float32,
                    )  # fmt: skip
                # Not the sum of products: threads that hold it, too, would contract them otherwise, to other bits.
                of_bias += tl.sum(slope, 1) * of_label
                rounded = (slope * of_label[:, None]).to(left.dtype)
                if OF_WEIGHT:
                    of_weight = dot(rounded, tl.trans(right), of_weight, PRECISION)
                if OF_FEATURES:
                    product = dot(transposed, rounded, None, PRECISION)
                    tl.atomic_add(
                        sums + column[:, None] * filled_size + sample[None, :], product,
                        mask=(slot < WIDTH)[:, None] & (sample < filled_size)[None, :], sem="relaxed",
                    )  # fmt: skip
        if OF_WEIGHT:
            place = label[:, None] * WIDTH + slot[None, :]
            exists = (label < end)[:, None] & (slot < WIDTH)[None, :]
            if rate is not None:
                # Further blocks of slots would compute logits of weights that have changed.
                tl.static_assert(WIDTH <= BLOCK_F)
                # Loaded again: a factor of a product that is anything else, too, is not copied ahead. This one is, for the next
                # groups, and so is its momentum.
                values, counted = weight + label[:, None] * weight_stride + slot[None, :] * weight_column_stride, exists & counts
                old = tl.load(values, mask=counted, other=0.0).to(tl.float32)
                old_momentum = old
                if weight_momentum is not None:
                    old_momentum = tl.load(weight_momentum + place, mask=counted, other=0.0).to(tl.float32)
                update_values(
                    values, old, weight_momentum, old_momentum, place, 0, of_weight * unscale, counted, momentum, weight_decay,
                    rate, step,
                )  # fmt: skip
                if updated_bias is not None:
                    update_values(
                        updated_bias + label, its_bias, bias_momentum, its_momentum, label, num_labels.to(tl.int64) * WIDTH,
                        of_bias * unscale, (label < end) & counts, momentum, None, rate, step,
                    )  # fmt: skip
            else:
                tl.store(grad_weight + place, (of_weight * unscale).to(grad_weight.dtype.element_ty), mask=exists)
            if grad_bias is not None:
                tl.store(grad_bias + label, (of_bias * unscale).to(grad_bias.dtype.element_ty), mask=(label < end) & (slots == 0))


@triton.jit(do_not_specialize=[*VARYING, "num_positives", "row_programs"])
def group_sparse_loss_backward_kernel(
    features, weight, supports, group_offsets, positives, rows, row_weight, positive_offsets, bias, label_weight, lse, grad_lse,
    grad_target, scales, grad_weight, grad_bias, updated_bias, weight_momentum, bias_momentum, learning_rate, step, counts,
    momentum, weight_decay, sums, smoothing, num_groups, num_labels, num_positives, num_parts, row_programs, batch_size,
    filled_size, num_features, weight_stride, weight_column_stride, WIDTH: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_F:
    tl.constexpr, BLOCK_B: tl.constexpr, TILES: tl.constexpr, BLOCKS: tl.constexpr, OF_WEIGHT: tl.constexpr, OF_FEATURES:
    tl.constexpr, PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """With d[l, b] = label_weight[l] slope[l, b] scales[0], for all labels l of a part's groups g:

    grad_weight[l, f] = scales[1] sum_b d[l, b] features[supports[g, f], b], grad_bias[l] = scales[1] sum_b d[l, b], and
    sums[part, supports[g, f], b] = sum_l weight[l, f] d[l, b].

    With a `learning_rate` weights, `updated_bias` and momentum are changed in place of grad_weight and grad_bias, unless `counts`
    is 0: a part is one program's, so nobody else reads a group's weights, and it does only before.

    Slopes are of binary cross-entropy, or where `lse` is given of a softmax. Samples come in blocks of TILES tiles. BLOCKS is 1
    where there is one block, so that tiles of the next groups can be loaded ahead, and 0 where a program walks several. Without
    OF_WEIGHT `row_programs` programs may share the samples of a part, each with its own blocks.
    A part's sums are in the L2, zeros before; threads add to them there and wait for nothing but each other. Slopes become a
    factor of products through shared memory, so all wait between the sums of two tiles; a sum's terms come in one order, and
    results are the same bits each time. Labels past the first BLOCK_L of a group, which few groups have, come last.
    """
    part, first_block, last_block = tl.program_id(0).to(tl.int64), 0, BLOCKS
    if BLOCKS == 0:
        blocks, own = tl.cdiv(batch_size, BLOCK_B * TILES), (part % row_programs).to(tl.int32)
        part //= row_programs
        first_block, last_block = own * blocks // row_programs, (own + 1) * blocks // row_programs
    scale, unscale = tl.load(scales), tl.load(scales + 1)
    if OF_FEATURES:
        sums += part * num_features * filled_size
    first_group, last_group = part * num_groups // num_parts, (part + 1) * num_groups // num_parts
    # What a loop loads anew in each round, Triton copies ahead anew.
    sample = tl.arange(0, BLOCK_B).to(tl.int64)
    rows_of_tile = load_rows(row_weight, lse, grad_lse, sample, batch_size)
    rows_of_next = load_rows(row_weight, lse, grad_lse, sample + BLOCK_B, batch_size) if TILES == 2 else rows_of_tile
    rows_of_tiles = rows_of_tile, rows_of_next
    # One by one: a tuple may have no None for every version of Triton.
    rate = None if learning_rate is None else tl.load(learning_rate)
    step = None if step is None else tl.load(step)
    counts = None if counts is None else tl.load(counts) != 0
    start, end = load_segment(group_offsets, first_group, num_labels)
    of_next = load_of_labels(bias, label_weight, bias_momentum, start + tl.arange(0, BLOCK_L), end)
    longest = tl.zeros([], tl.int64)
    for group in tl.range(first_group, last_group, num_stages=NUM_STAGES):
        start, end = load_segment(group_offsets, group, num_labels)
        longest = tl.maximum(longest, (end - start).to(tl.int64))
        of_labels = of_next
        next_start, next_end = load_segment(group_offsets, tl.minimum(group + 1, last_group - 1), num_labels)
        of_next = load_of_labels(bias, label_weight, bias_momentum, next_start + tl.arange(0, BLOCK_L), next_end)
        gradients_of_labels(
            features, weight, supports, positives, rows, row_weight, positive_offsets, bias, label_weight, lse, grad_lse,
            grad_target, grad_weight, grad_bias, updated_bias, weight_momentum, bias_momentum, rate, step, counts, momentum,
            weight_decay, sums, rows_of_tiles, of_labels, scale, unscale, group, start, end, smoothing, num_labels, num_positives,
            first_block, last_block, batch_size, filled_size, num_features, weight_stride, weight_column_stride, WIDTH, BLOCK_L,
            BLOCK_F, BLOCK_B, TILES, BLOCKS, OF_WEIGHT, OF_FEATURES, PRECISION,
        )  # fmt: skip
    for skipped in range(BLOCK_L, longest, BLOCK_L):
        for group in range(first_group, last_group):
            start, end = load_segment(group_offsets, group, num_labels)
            if end > start + skipped:
                first = start + skipped
                of_labels = load_of_labels(bias, label_weight, bias_momentum, first + tl.arange(0, BLOCK_L), end)
                tl.debug_barrier()
                gradients_of_labels(
                    features, weight, supports, positives, rows, row_weight, positive_offsets, bias, label_weight, lse, grad_lse,
                    grad_target, grad_weight, grad_bias, updated_bias, weight_momentum, bias_momentum, rate, step, counts,
                    momentum, weight_decay, sums, rows_of_tiles, of_labels, scale, unscale, group, first, end, smoothing,
                    num_labels, num_positives, first_block, last_block, batch_size, filled_size, num_features, weight_stride,
                    weight_column_stride, WIDTH, BLOCK_L, BLOCK_F, BLOCK_B, TILES, BLOCKS, OF_WEIGHT, OF_FEATURES, PRECISION,
                )  # fmt: skip


_launch = Launcher(group_sparse_loss_backward_kernel)


class KernelUpdate(NamedTuple):
    """What the kernel is given to update a layer, in the order of its arguments; what is None is not updated or left out.

    All tensors that change are contiguous. `counts` (int32) is 0 where nothing may change.
    """

    updated_bias: Tensor | None
    weight_momentum: Tensor | None
    bias_momentum: Tensor | None
    learning_rate: Tensor
    step: Tensor | None
    counts: Tensor
    momentum: float
    weight_decay: float | None


def gradients(
    x: LossInputs | SoftmaxInputs,
    columns: Tensor,
    scales: Tensor,
    wanted: Mapping[str, torch.dtype],
    *,
    smoothing: float = 0.0,
    row_weight: Tensor | None = None,
    label_weight: Tensor | None = None,
    rows_of_softmax: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
    update: KernelUpdate | None = None,
) -> dict[str, Tensor]:
    """Launch `group_sparse_loss_backward_kernel` and add up the parts' sums in their order.

    `columns` are the features transposed, without gaps, zeros in rows that do not count; `rows_of_softmax` are `lse`, `grad_lse`
    and `grad_target`. With an `update`, for which groups may have one tile of slots, no gradients of weights and biases are made.
    """
    features, weight = x.features, x.weight
    (batch_size, num_features), (num_labels, width), num_groups = features.shape, weight.shape, x.supports.shape[0]
    device, filled_size = gpu(features.device), columns.shape[1]
    found: dict[str, Tensor] = {}
    if "weight" in wanted or "bias" in wanted:
        found["weight"] = weight.new_empty(num_labels, width, dtype=wanted.get("weight", weight.dtype))
        if x.bias is not None:
            found["bias"] = weight.new_empty(num_labels, dtype=wanted.get("bias", weight.dtype))
    read = [columns_of_groups(x), *(tensor.contiguous() for tensor in (x.group_offsets, x.positives, x.rows))]
    rest = [
        None if tensor is None else tensor.contiguous()
        for tensor in (row_weight, x.positive_offsets, x.bias, label_weight, *rows_of_softmax)
    ]
    sizes = num_labels, num_groups, batch_size, width, features.element_size()
    is_softmax = rows_of_softmax[0] is not None
    choose = configurations.softmax_backward_configuration if is_softmax else configurations.loss_backward_configuration
    chosen = choose(*sizes, device.capability)
    num_tiles = configurations.loss_tiles(batch_size, width, chosen)
    num_blocks = cdiv(batch_size, chosen.block_b * num_tiles)
    programs = configurations.loss_programs(chosen) * device.multiprocessors

    def launch(sums: Tensor | None, num_parts: int, row_programs: int, *, of_weight: bool) -> None:
        of_labels = (found.get("weight"), found.get("bias")) if of_weight else (None, None)
        changes: tuple[Any, ...] = (None,) * len(KernelUpdate._fields) if update is None or not of_weight else update
        _launch(
            (num_parts * row_programs,),
            columns, weight, *read, *rest, scales, *of_labels, *changes, sums, smoothing, num_groups, num_labels,
            x.positives.shape[0], num_parts, row_programs, batch_size, filled_size, num_features, *weight.stride(), WIDTH=width,
            BLOCK_L=chosen.block_l, BLOCK_F=chosen.block_f, BLOCK_B=chosen.block_b, TILES=num_tiles, BLOCKS=int(num_blocks == 1),
            OF_WEIGHT=of_weight, OF_FEATURES=sums is not None, PRECISION=products_of(features.dtype),
            NUM_STAGES=chosen.num_stages, num_warps=chosen.num_warps,
        )  # fmt: skip

    num_parts, row_programs, sums = min(num_groups, programs), 1, None
    of_weight = bool(found) or update is not None
    if "features" in wanted:
        is_alone = 4 * num_parts * num_features * filled_size > configurations.MOST_SUM_BYTES
        if is_alone:
            # Programs that have some samples each have sums of these alone. An update comes after them.
            row_programs = min(num_blocks, programs)
            num_parts = min(num_groups, max(1, programs // row_programs))
        sums = torch.zeros(num_parts, num_features, filled_size, dtype=torch.float32, device=features.device)
        launch(sums, num_parts, row_programs, of_weight=of_weight and not is_alone)
        of_weight = of_weight and is_alone
    if of_weight:
        launch(None, min(num_groups, programs), 1, of_weight=True)
    if sums is not None:
        found["features"] = (sums.sum(0)[:, :batch_size] * scales[1]).t().to(wanted["features"]).contiguous()
    return {name: found[name] for name in wanted}


def update(x: UpdateInputs | SoftmaxUpdateInputs, o: UpdateOptions, make: Callable[..., dict[str, Tensor]]) -> FeatureGradient:
    """Return the gradient of features, and change weights and biases by theirs, inside of the kernel where it can.

    Elsewhere `update_by` does, with gradients that take the memory of the layer in float32: of groups with more slots than a tile
    has, whose logits need all weights as they were. `make` is given what is wanted, and a `KernelUpdate`.
    """
    if not kernel_can_update(x, o):
        return update_by(make, x, o)
    changes = KernelUpdate(
        x.bias if o.changes_bias else None,
        x.weight_momentum,
        x.bias_momentum if o.changes_bias else None,
        x.learning_rate,
        x.step if o.stochastic_rounding and x.weight.dtype == torch.bfloat16 else None,
        may_change(x).to(torch.int32),
        o.momentum,
        # No weight that is infinite meets a decay of 0.
        o.weight_decay or None,
    )
    found = make({"features": x.features.dtype} if o.of_features else {}, changes)
    return FeatureGradient(found["features"] if o.of_features else x.features.new_empty(0))


def kernel_can_update(x: UpdateInputs | SoftmaxUpdateInputs, o: UpdateOptions) -> bool:
    """Return whether there is anything to launch it for, one tile has all slots of a group, and what else changes has no gaps.

    A weight that is expanded goes to PyTorch's operations, which refuse to write it: threads would write one place.
    """
    sizes = x.weight.shape[0], x.supports.shape[0], x.features.shape[0], x.weight.shape[1], x.features.element_size()
    others = (x.weight_momentum, *((x.bias, x.bias_momentum) if o.changes_bias else ()))
    has_no_gaps = all(tensor is None or tensor.is_contiguous() for tensor in others)
    is_one_tile = all(sizes) and configurations.has_one_tile(*sizes, gpu(x.features.device).capability)
    return is_one_tile and 0 not in x.weight.stride() and has_no_gaps
