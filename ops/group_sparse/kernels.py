"""Group-sparse linear layers as Triton kernels: products of a group's labels with the few features that the group reads.

Features and logits lie transposed, so that what a group gathers and what it writes are rows along the batch, side by side and
aligned however ragged the groups are. A program walks several groups, and while it is at one the first tiles of the next ones are
on their way. Labels past the first BLOCK_L, of groups longer than most, come in an inner loop; Triton loads ahead in a loop that
has another one inside only where that stands behind an `if`.
The gradient of features is added up without atomics: groups are cut into parts, of which each adds to sums of its own.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged.ops._shared.device import dot, load_segment
from jagged.ops._shared.launch import Launcher
from jagged.ops._shared.matrices import aligned, gpu, products_of
from jagged.ops._shared.shared_memory import add_to_columns, set_to_zero, shared_sums, sums_of_program, write_sums
from jagged.ops._shared.sizes import cdiv
from jagged.ops.group_sparse import configurations
from jagged.ops.group_sparse.spec import Inputs, Options, Outputs, columns_of_groups
from jagged.ops.group_sparse.tiles import VARYING, add_to_sums, groups_of, load_block, load_columns, logits_of_tile


@triton.jit
def write_logits(
    features, weight, supports, bias, logits, group, first, end, sample, batch_size, filled_size, num_features, feature_stride,
    weight_stride, weight_column_stride, logit_stride, WIDTH: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_F: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute and write the logits of a tile: BLOCK_L labels of a group from `first` on, and some samples."""
    label = first + tl.arange(0, BLOCK_L)
    result = logits_of_tile(
        features, weight, supports, group, label, end, sample, filled_size, num_features, feature_stride, weight_stride,
        weight_column_stride, WIDTH, BLOCK_L, BLOCK_F, PRECISION,
    )  # fmt: skip
    if bias is not None:
        result += tl.load(bias + label, mask=label < end, other=0.0).to(tl.float32)[:, None]
    addresses = logits + label[:, None] * logit_stride + sample[None, :]
    tl.store(addresses, result.to(logits.dtype.element_ty), mask=(label < end)[:, None] & (sample < batch_size)[None, :])


@triton.jit(do_not_specialize=VARYING)
def group_sparse_forward_kernel(
    features, weight, supports, group_offsets, bias, logits, num_groups, num_labels, batch_size, filled_size, num_features,
    feature_stride, weight_stride, weight_column_stride, logit_stride, WIDTH: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_B: tl.constexpr, PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """logits[l, b] = sum_f weight[l, f] * features[supports[g, f], b] + bias[l], labels l of GROUPS groups g, BLOCK_B samples.

    `features` is `[H, filled_size]`, zeros past the batch: to load them costs less than to ask for each whether it is there.
    """
    blocks = tl.cdiv(batch_size, BLOCK_B)
    first_group, last_group = groups_of(tl.program_id(0) // blocks, num_groups, GROUPS)
    sample = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    for group in tl.range(first_group, last_group, num_stages=NUM_STAGES):
        start, end = load_segment(group_offsets, group, num_labels)
        write_logits(
            features, weight, supports, bias, logits, group, start, end, sample, batch_size, filled_size, num_features,
            feature_stride, weight_stride, weight_column_stride, logit_stride, WIDTH, BLOCK_L, BLOCK_F, PRECISION,
        )  # fmt: skip
        if end > start + BLOCK_L:
            for first in tl.range(start + BLOCK_L, end, BLOCK_L, num_stages=1):
                write_logits(
                    features, weight, supports, bias, logits, group, first, end, sample, batch_size, filled_size, num_features,
                    feature_stride, weight_stride, weight_column_stride, logit_stride, WIDTH, BLOCK_L, BLOCK_F, PRECISION,
                )  # fmt: skip


@triton.jit
def write_weight_gradient(
    grad, features, grad_weight, grad_bias, column, first, end, slot, batch_size, filled_size, grad_stride, grad_column_stride,
    feature_stride, WIDTH: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_B: tl.constexpr, TILES: tl.constexpr,
    BLOCKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute and write the gradients of BLOCK_L labels of a group from `first` on, for some slots; BLOCKS as in the kernel."""
    label = first + tl.arange(0, BLOCK_L)
    result = tl.zeros([BLOCK_L, slot.shape[0]], tl.float32)
    of_bias = tl.zeros([BLOCK_L], tl.float32)
    for block in tl.range(0, tl.cdiv(batch_size, BLOCK_B * TILES) if BLOCKS == 0 else BLOCKS, num_stages=1):
        for tile in tl.static_range(TILES):
            sample = (block * TILES + tile) * BLOCK_B + tl.arange(0, BLOCK_B).to(tl.int64)
            left = load_block(grad, label, grad_column_stride, label < end, sample, grad_stride, sample < batch_size)
            right = load_block(features, column, feature_stride, slot < WIDTH, sample, 1, sample < filled_size)
            result = dot(left, tl.trans(right), result, PRECISION)
            if grad_bias is not None:
                of_bias += tl.sum(left.to(tl.float32), 1)
    addresses = grad_weight + label[:, None] * WIDTH + slot[None, :]
    tl.store(addresses, result.to(grad_weight.dtype.element_ty), mask=(label < end)[:, None] & (slot < WIDTH)[None, :])
    if grad_bias is not None:
        tl.store(grad_bias + label, of_bias.to(grad_bias.dtype.element_ty), mask=(label < end) & (tl.min(slot) == 0))


@triton.jit(do_not_specialize=VARYING)
def group_sparse_weight_gradient_kernel(
    grad, features, supports, group_offsets, grad_weight, grad_bias, num_groups, num_labels, batch_size, filled_size,
    num_features, grad_stride, grad_column_stride, feature_stride, WIDTH: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_B: tl.constexpr, TILES: tl.constexpr, BLOCKS:
    tl.constexpr, PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """grad_weight[l, f] = sum_b grad[b, l] * features[supports[g, f], b], for the labels l of GROUPS groups and BLOCK_F slots.

    The program of the first slots has grad_bias[l] = sum_b grad[b, l] beside it. Samples come in blocks of TILES tiles. BLOCKS is
    1 where there is one block, so that the tiles of the next groups can be loaded ahead, and 0 for larger batches.
    """
    SLOT_BLOCKS: tl.constexpr = (WIDTH + BLOCK_F - 1) // BLOCK_F
    first_group, last_group = groups_of(tl.program_id(0) // SLOT_BLOCKS, num_groups, GROUPS)
    slot = tl.program_id(0) % SLOT_BLOCKS * BLOCK_F + tl.arange(0, BLOCK_F)
    for group in tl.range(first_group, last_group, num_stages=NUM_STAGES):
        start, end = load_segment(group_offsets, group, num_labels)
        column = load_columns(supports, group, slot, num_features, WIDTH)
        write_weight_gradient(
            grad, features, grad_weight, grad_bias, column, start, end, slot, batch_size, filled_size, grad_stride,
            grad_column_stride, feature_stride, WIDTH, BLOCK_L, BLOCK_B, TILES, BLOCKS, PRECISION,
        )  # fmt: skip
        if end > start + BLOCK_L:
            for first in tl.range(start + BLOCK_L, end, BLOCK_L, num_stages=1):
                write_weight_gradient(
                    grad, features, grad_weight, grad_bias, column, first, end, slot, batch_size, filled_size, grad_stride,
                    grad_column_stride, feature_stride, WIDTH, BLOCK_L, BLOCK_B, TILES, BLOCKS, PRECISION,
                )  # fmt: skip


@triton.jit
def load_unit(
    grad, weight, supports, group_offsets, unit, skipped, sample, num_labels, batch_size, num_features, grad_stride,
    grad_column_stride, weight_stride, weight_column_stride, WIDTH: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Load what a block of a group's slots takes: weights and gradients of BLOCK_L labels after some skipped ones; columns.

    Unit u is block `u % SLOT_BLOCKS` of group `u // SLOT_BLOCKS`. Returned are also whether slots exist, and the group's labels.
    """
    SLOT_BLOCKS: tl.constexpr = (WIDTH + BLOCK_F - 1) // BLOCK_F
    group = unit // SLOT_BLOCKS
    slot = unit % SLOT_BLOCKS * BLOCK_F + tl.arange(0, BLOCK_F)
    start, end = load_segment(group_offsets, group, num_labels)
    label = start + skipped + tl.arange(0, BLOCK_L)
    left = load_block(weight, label, weight_stride, label < end, slot, weight_column_stride, slot < WIDTH)
    right = load_block(grad, label, grad_column_stride, label < end, sample, grad_stride, sample < batch_size)
    return left, right, load_columns(supports, group, slot, num_features, WIDTH), slot < WIDTH, end - start


@triton.jit(do_not_specialize=VARYING)
def group_sparse_feature_gradient_kernel(
    grad, weight, supports, group_offsets, sums, num_groups, num_labels, batch_size, num_parts, num_features, grad_stride,
    grad_column_stride, weight_stride, weight_column_stride, sums_stride, WIDTH: tl.constexpr, BLOCK_L: tl.constexpr,
    BLOCK_F: tl.constexpr, BLOCK_B: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """sums[p, supports[g, f], b] += sum_l weight[l, f] * grad[b, l], group by group of part p, for BLOCK_B samples.

    The columns of a group differ, so that no two threads add to one sum at once; between groups, which may share columns, the
    threads wait for each other. Triton loads nothing ahead across such a barrier, so the loop does: unit u + 1, then u's sums.
    """
    SLOT_BLOCKS: tl.constexpr = (WIDTH + BLOCK_F - 1) // BLOCK_F
    blocks = tl.cdiv(batch_size, BLOCK_B)
    part = (tl.program_id(0) // blocks).to(tl.int64)
    sample = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    sums += part * num_features * sums_stride
    first, last = part * num_groups // num_parts * SLOT_BLOCKS, (part + 1) * num_groups // num_parts * SLOT_BLOCKS
    left, right, column, exists, longest = load_unit(
        grad, weight, supports, group_offsets, first, 0, sample, num_labels, batch_size, num_features, grad_stride,
        grad_column_stride, weight_stride, weight_column_stride, WIDTH, BLOCK_L, BLOCK_F,
    )  # fmt: skip
    for unit in tl.range(first, last, num_stages=1):
        next_left, next_right, next_column, next_exists, labels = load_unit(
            grad, weight, supports, group_offsets, tl.minimum(unit + 1, last - 1), 0, sample, num_labels, batch_size,
            num_features, grad_stride, grad_column_stride, weight_stride, weight_column_stride, WIDTH, BLOCK_L, BLOCK_F,
        )  # fmt: skip
        add_to_sums(sums, dot(tl.trans(left), right, None, PRECISION), column, exists, sample, sums_stride)
        left, right, column, exists, longest = next_left, next_right, next_column, next_exists, tl.maximum(longest, labels)
    for skipped in range(BLOCK_L, longest, BLOCK_L):
        for unit in range(first, last):
            left, right, column, exists, labels = load_unit(
                grad, weight, supports, group_offsets, unit, skipped, sample, num_labels, batch_size, num_features,
                grad_stride, grad_column_stride, weight_stride, weight_column_stride, WIDTH, BLOCK_L, BLOCK_F,
            )  # fmt: skip
            if labels > skipped:
                add_to_sums(sums, dot(tl.trans(left), right, None, PRECISION), column, exists, sample, sums_stride)


@triton.jit
def product_of_unit(
    grad, weight, supports, group_offsets, unit, skipped, sample, num_labels, batch_size, num_features, grad_stride,
    grad_column_stride, weight_stride, weight_column_stride, WIDTH: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_F: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return `[SLOT, SAMPLE]`, what a unit as in `load_unit` adds, its columns (int32), whether slots exist, and all labels.

    Weights are loaded transposed: Triton copies nothing ahead that is transposed afterwards.
    """
    SLOT_BLOCKS: tl.constexpr = (WIDTH + BLOCK_F - 1) // BLOCK_F
    group = unit // SLOT_BLOCKS
    slot = unit % SLOT_BLOCKS * BLOCK_F + tl.arange(0, BLOCK_F)
    start, end = load_segment(group_offsets, group, num_labels)
    label = start + skipped + tl.arange(0, BLOCK_L)
    left = load_block(weight, slot, weight_column_stride, slot < WIDTH, label, weight_stride, label < end)
    right = load_block(grad, label, grad_column_stride, label < end, sample, grad_stride, sample < batch_size)
    column = load_columns(supports, group, slot, num_features, WIDTH).to(tl.int32)
    return dot(left, right, None, PRECISION), column, slot < WIDTH, end - start


@triton.jit(do_not_specialize=VARYING)
def group_sparse_feature_gradient_in_shared_memory_kernel(
    grad, weight, supports, group_offsets, sums, buffer, num_groups, num_labels, batch_size, num_parts, num_features, grad_stride,
    grad_column_stride, weight_stride, weight_column_stride, sums_stride, WIDTH: tl.constexpr, BLOCK_L: tl.constexpr,
    BLOCK_F: tl.constexpr, BLOCK_B: tl.constexpr, PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr, SHARED_BYTES: tl.constexpr,
):  # fmt: skip
    """The sums of `group_sparse_feature_gradient_kernel`, which leave shared memory when a part's groups are done.

    Between the sums of two units, which may share columns, all threads wait for the next tiles, and so for each other.
    """
    SLOT_BLOCKS: tl.constexpr = (WIDTH + BLOCK_F - 1) // BLOCK_F
    blocks = tl.cdiv(batch_size, BLOCK_B)
    part = (tl.program_id(0) // blocks).to(tl.int64)
    first_sample = (tl.program_id(0) % blocks) * BLOCK_B
    sample = first_sample.to(tl.int64) + tl.arange(0, BLOCK_B)
    own = sums_of_program(buffer, SHARED_BYTES)
    set_to_zero(own, num_features, BLOCK_B)
    first, last = part * num_groups // num_parts * SLOT_BLOCKS, (part + 1) * num_groups // num_parts * SLOT_BLOCKS
    longest = tl.zeros([], tl.int64)
    for unit in tl.range(first, last, num_stages=NUM_STAGES):
        product, column, exists, labels = product_of_unit(
            grad, weight, supports, group_offsets, unit, 0, sample, num_labels, batch_size, num_features, grad_stride,
            grad_column_stride, weight_stride, weight_column_stride, WIDTH, BLOCK_L, BLOCK_F, PRECISION,
        )  # fmt: skip
        add_to_columns(own, column, product, None if WIDTH % BLOCK_F == 0 else exists)
        longest = tl.maximum(longest, labels)
    # Few groups have more labels than a tile.
    for skipped in range(BLOCK_L, longest, BLOCK_L):
        for unit in tl.range(first, last, num_stages=1):
            start, end = load_segment(group_offsets, unit // SLOT_BLOCKS, num_labels)
            if end - start > skipped:
                tl.debug_barrier()
                product, column, exists, labels = product_of_unit(
                    grad, weight, supports, group_offsets, unit, skipped, sample, num_labels, batch_size, num_features,
                    grad_stride, grad_column_stride, weight_stride, weight_column_stride, WIDTH, BLOCK_L, BLOCK_F, PRECISION,
                )  # fmt: skip
                add_to_columns(own, column, product, None if WIDTH % BLOCK_F == 0 else exists)
    write_sums(own, sums + part * num_features * sums_stride, sums_stride, num_features, first_sample, sums_stride, BLOCK_B)


@triton.jit
def load_of_group(
    grad, weight, segments, group, skipped, slot, sample, num_labels, batch_size, grad_stride, grad_column_stride, weight_stride,
    weight_column_stride, WIDTH: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """Load weights, transposed, and gradients of BLOCK_L labels of a group after some skipped ones; and return all labels."""
    start, end = load_segment(segments, 2 * group, num_labels)
    label = start + skipped + tl.arange(0, BLOCK_L)
    left = load_block(weight, slot, weight_column_stride, slot < WIDTH, label, weight_stride, label < end)
    right = load_block(grad, label, grad_column_stride, label < end, sample, grad_stride, sample < batch_size)
    return left, right, end - start


@triton.jit(do_not_specialize=VARYING)
def group_sparse_adjacent_feature_gradient_kernel(
    grad, weight, first_columns, run_ends, segments, sums, num_groups, num_labels, batch_size, num_parts, num_features,
    grad_stride, grad_column_stride, weight_stride, weight_column_stride, sums_stride, WIDTH: tl.constexpr, BLOCK_L: tl.constexpr,
    BLOCK_F: tl.constexpr, BLOCK_B: tl.constexpr, PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """The sums of `group_sparse_feature_gradient_kernel` where group g reads the columns `first_columns[g]` and WIDTH - 1 more.

    Groups come in the order of their first columns, so that the sum of one block of columns stays in registers until another
    block begins, at `run_ends[g]`; labels of group g are `segments[g, 0]` to `segments[g, 1] - 1`. Blocks may overlap, so one
    program has all slots of its part and samples, a tile of them after the other.
    """
    blocks = tl.cdiv(batch_size, BLOCK_B)
    part = (tl.program_id(0) // blocks).to(tl.int64)
    sample = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    sums += part * num_features * sums_stride
    first, last = part * num_groups // num_parts, (part + 1) * num_groups // num_parts
    while first < last:
        end_of_run = tl.minimum(tl.load(run_ends + first), last)
        # Inside of `[0, H)` whatever supports say.
        column = tl.minimum(tl.maximum(tl.load(first_columns + first).to(tl.int64), 0), num_features - WIDTH)
        for slots in tl.range(0, WIDTH, BLOCK_F, num_stages=1):
            slot = slots + tl.arange(0, BLOCK_F)
            total, longest = tl.zeros([BLOCK_F, BLOCK_B], tl.float32), tl.zeros([], tl.int64)
            for group in tl.range(first, end_of_run, num_stages=NUM_STAGES):
                left, right, labels = load_of_group(
                    grad, weight, segments, group, 0, slot, sample, num_labels, batch_size, grad_stride, grad_column_stride,
                    weight_stride, weight_column_stride, WIDTH, BLOCK_L,
                )  # fmt: skip
                total = dot(left, right, total, PRECISION)
                longest = tl.maximum(longest, labels)
            # Few groups have more labels than a tile.
            for skipped in range(BLOCK_L, longest, BLOCK_L):
                for group in tl.range(first, end_of_run, num_stages=1):
                    left, right, labels = load_of_group(
                        grad, weight, segments, group, skipped, slot, sample, num_labels, batch_size, grad_stride,
                        grad_column_stride, weight_stride, weight_column_stride, WIDTH, BLOCK_L,
                    )  # fmt: skip
                    total = dot(left, right, total, PRECISION)
            add_to_sums(sums, total, column + slot, slot < WIDTH, sample, sums_stride)
        first = end_of_run


_launch_forward = Launcher(group_sparse_forward_kernel)
_launch_weight_gradient = Launcher(group_sparse_weight_gradient_kernel)
_launch_feature_gradient = Launcher(group_sparse_feature_gradient_kernel)
_launch_in_shared_memory = Launcher(group_sparse_feature_gradient_in_shared_memory_kernel)
_launch_of_adjacent = Launcher(group_sparse_adjacent_feature_gradient_kernel)


def forward(x: Inputs, o: Options) -> Outputs:
    """Launch `group_sparse_forward_kernel`."""
    features, weight, _, group_offsets, bias = x
    (batch_size, num_features), (num_labels, width), num_groups = features.shape, weight.shape, x.supports.shape[0]
    if not (batch_size and num_labels and num_groups):
        return Outputs(features.new_zeros(num_labels, batch_size).t())
    logits = features.new_empty(num_labels, batch_size)
    chosen = configurations.forward_configuration(num_labels, num_groups, batch_size, width, features.element_size())
    columns = aligned(features.t())
    _launch_forward(
        (cdiv(num_groups, chosen.groups) * cdiv(batch_size, chosen.block_b),),
        columns, weight, columns_of_groups(x), group_offsets.contiguous(), None if bias is None else bias.contiguous(), logits,
        num_groups, num_labels, batch_size, columns.shape[1], num_features, columns.stride(0), *weight.stride(), batch_size,
        WIDTH=width, GROUPS=chosen.groups, BLOCK_L=chosen.block_l, BLOCK_F=chosen.block_f, BLOCK_B=chosen.block_b,
        PRECISION=products_of(features.dtype), NUM_STAGES=chosen.num_stages, num_warps=chosen.num_warps,
    )  # fmt: skip
    return Outputs(logits.t())


def backward(grads: Outputs, x: Inputs, out: Outputs, o: Options, wanted: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
    """Launch the kernels of the gradients that are wanted."""
    features, weight, supports, group_offsets, _ = x
    grad = grads.logits
    assert grad is not None
    if not (features.shape[0] and weight.shape[0] and supports.shape[0]):
        return {name: torch.zeros_like(getattr(x, name), dtype=dtype) for name, dtype in wanted.items()}
    x = x._replace(supports=supports.contiguous(), group_offsets=group_offsets.contiguous())
    found = {}
    if "features" in wanted:
        make = _feature_gradient if x.supports.dim() == 2 else _feature_gradient_of_adjacent
        found["features"] = make(grad, x, wanted["features"])
    if "weight" in wanted:
        found |= _weight_gradients(grad, x, wanted)
    elif "bias" in wanted:
        found["bias"] = grad.sum(0, dtype=torch.float32).to(wanted["bias"])
    return found


def _weight_gradients(grad: Tensor, x: Inputs, wanted: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
    """Launch `group_sparse_weight_gradient_kernel`; what it has beside is the gradient of a bias."""
    features, weight, _, group_offsets, _ = x
    (batch_size, num_features), (num_labels, width), num_groups = features.shape, weight.shape, x.supports.shape[0]
    found = {"weight": weight.new_empty(num_labels, width, dtype=wanted["weight"])}
    if "bias" in wanted:
        found["bias"] = weight.new_empty(num_labels, dtype=wanted["bias"])
    chosen = configurations.weight_configuration(num_labels, num_groups, batch_size, width, features.element_size())
    num_tiles = configurations.weight_tiles(batch_size, chosen)
    columns = aligned(features.t())
    _launch_weight_gradient(
        (cdiv(num_groups, chosen.groups) * cdiv(width, chosen.block_f),),
        grad, columns, columns_of_groups(x), group_offsets, found["weight"], found.get("bias"), num_groups, num_labels,
        batch_size, columns.shape[1], num_features, *grad.stride(), columns.stride(0), WIDTH=width, GROUPS=chosen.groups,
        BLOCK_L=chosen.block_l, BLOCK_F=chosen.block_f, BLOCK_B=chosen.block_b, TILES=num_tiles,
        BLOCKS=int(batch_size <= chosen.block_b * num_tiles), PRECISION=products_of(features.dtype), NUM_STAGES=chosen.num_stages,
        num_warps=chosen.num_warps,
    )  # fmt: skip
    return found


def _feature_gradient(grad: Tensor, x: Inputs, dtype: torch.dtype) -> Tensor:
    """Launch a kernel of the gradient of features and add up the parts' sums in their order."""
    features, weight, supports, group_offsets, _ = x
    (batch_size, num_features), (num_labels, width), num_groups = features.shape, weight.shape, supports.shape[0]
    device, stride = gpu(features.device), cdiv(batch_size, 16) * 16
    sizes = num_labels, num_groups, batch_size, width, features.element_size()
    chosen, programs = configurations.shared_feature_configuration(*sizes, num_features, device.shared_bytes)
    launch = _launch_in_shared_memory
    if not programs:
        chosen, programs, launch = configurations.feature_configuration(*sizes), configurations.PROGRAMS, _launch_feature_gradient
    blocks = cdiv(batch_size, chosen.block_b)
    # All at once: a program more would run alone at the end.
    num_parts = min(num_groups, max(1, programs * device.multiprocessors // blocks))
    sums = features.new_empty(num_parts, num_features, stride, dtype=torch.float32)
    named = {}
    if launch is _launch_in_shared_memory:
        # Numbers of 16 bits are too short to be copied ahead.
        supports = supports.to(torch.int32)
        named = shared_sums(sums, num_parts * blocks, num_features, chosen.block_b) | {"NUM_STAGES": chosen.num_stages}
    else:
        sums.zero_()
    launch(
        (num_parts * blocks,),
        grad, weight, supports, group_offsets, sums, num_groups=num_groups, num_labels=num_labels, batch_size=batch_size,
        num_parts=num_parts, num_features=num_features, grad_stride=grad.stride(0), grad_column_stride=grad.stride(1),
        weight_stride=weight.stride(0), weight_column_stride=weight.stride(1), sums_stride=stride, WIDTH=width,
        BLOCK_L=chosen.block_l, BLOCK_F=chosen.block_f, BLOCK_B=chosen.block_b, PRECISION=products_of(features.dtype),
        num_warps=chosen.num_warps, **named,
    )  # fmt: skip
    return sums.sum(0)[:, :batch_size].t().to(dtype).contiguous()


def _feature_gradient_of_adjacent(grad: Tensor, x: Inputs, dtype: torch.dtype) -> Tensor:
    """Launch `group_sparse_adjacent_feature_gradient_kernel` and add up the parts' sums in their order."""
    features, weight = x.features, x.weight
    (batch_size, num_features), (num_labels, width), num_groups = features.shape, weight.shape, x.supports.shape[0]
    stride = cdiv(batch_size, 16) * 16
    chosen = configurations.adjacent_feature_configuration(num_labels, num_groups, batch_size, width, features.element_size())
    blocks = cdiv(batch_size, chosen.block_b)
    programs = configurations.PROGRAMS * gpu(features.device).multiprocessors
    num_parts = min(num_groups, max(1, programs // blocks))
    sums = features.new_zeros(num_parts, num_features, stride, dtype=torch.float32)
    first_columns, order = x.supports.sort(stable=True)
    run_ends = torch.searchsorted(first_columns, first_columns, right=True)
    segments = torch.stack([x.group_offsets[order], x.group_offsets[order + 1]], 1)
    _launch_of_adjacent(
        (num_parts * blocks,),
        grad, weight, first_columns, run_ends, segments, sums, num_groups, num_labels, batch_size, num_parts, num_features,
        *grad.stride(), *weight.stride(), stride, WIDTH=width, BLOCK_L=chosen.block_l, BLOCK_F=chosen.block_f,
        BLOCK_B=chosen.block_b, PRECISION=products_of(features.dtype), NUM_STAGES=chosen.num_stages, num_warps=chosen.num_warps,
    )  # fmt: skip
    return sums.sum(0)[:, :batch_size].t().to(dtype).contiguous()
