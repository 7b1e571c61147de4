"""Group-sparse linear layers as Triton kernels: products of a group's labels with the few features that the group reads.

Features are transposed once, so that what a group gathers lies side by side along the batch. A program walks the labels of its
group, however many there are; which they are it reads from the offsets. The gradient of features is added up without atomics:
groups are cut into parts of fixed size, of which each adds to sums of its own.
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
from jagged.ops._shared.sizes import cdiv
from jagged.ops.group_sparse import configurations
from jagged.ops.group_sparse.spec import Inputs, Options, Outputs

VARYING = ["num_groups", "num_labels", "batch_size", "num_parts"]


@triton.jit
def load_columns(supports, group, slot, num_features, WIDTH: tl.constexpr):
    """Return the columns of features (int64) that a block of a group's slots reads, inside `[0, H)` whatever supports say."""
    column = tl.load(supports + group * WIDTH + slot, mask=slot < WIDTH, other=0).to(tl.int64)
    return tl.minimum(tl.maximum(column, 0), num_features - 1)


@triton.jit
def load_block(pointer, row, row_stride, row_exists, column, column_stride, column_exists):
    """Load `[ROW, COLUMN]`, zeros where a row or a column is not there; rows are int64."""
    addresses = pointer + row[:, None] * row_stride + column[None, :] * column_stride
    return tl.load(addresses, mask=row_exists[:, None] & column_exists[None, :], other=0.0)


@triton.jit(do_not_specialize=VARYING)
def group_sparse_forward_kernel(
    features, weight, supports, group_offsets, bias, logits, num_labels, batch_size, filled_size, num_features, feature_stride,
    weight_stride, weight_column_stride, WIDTH: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_B: tl.constexpr,
    PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """logits[b, l] = sum_f weight[l, f] * features[supports[g, f], b] + bias[l], labels l of one group g and BLOCK_B samples.

    `features` is `[H, filled_size]`, zeros past the batch: to load them costs less than to ask for each whether it is there.
    """
    blocks = tl.cdiv(batch_size, BLOCK_B)
    group = (tl.program_id(0) // blocks).to(tl.int64)
    sample = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    start, end = load_segment(group_offsets, group, num_labels)
    for first in range(start, end, BLOCK_L):
        label = first + tl.arange(0, BLOCK_L)
        result = tl.zeros([BLOCK_L, BLOCK_B], tl.float32)
        for slots in tl.range(0, WIDTH, BLOCK_F, num_stages=NUM_STAGES):
            slot = slots + tl.arange(0, BLOCK_F)
            column = load_columns(supports, group, slot, num_features, WIDTH)
            left = load_block(weight, label, weight_stride, label < end, slot, weight_column_stride, slot < WIDTH)
            right = load_block(features, column, feature_stride, slot < WIDTH, sample, 1, sample < filled_size)
            result = dot(left, right, result, PRECISION)
        if bias is not None:
            result += tl.load(bias + label, mask=label < end, other=0.0).to(tl.float32)[:, None]
        addresses = logits + sample[None, :] * num_labels + label[:, None]
        tl.store(addresses, result.to(logits.dtype.element_ty), mask=(label < end)[:, None] & (sample < batch_size)[None, :])


@triton.jit(do_not_specialize=VARYING)
def group_sparse_weight_gradient_kernel(
    grad, features, supports, group_offsets, grad_weight, grad_bias, num_labels, batch_size, filled_size, num_features,
    grad_stride, grad_column_stride, feature_stride, WIDTH: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_F: tl.constexpr,
    BLOCK_B: tl.constexpr, PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """grad_weight[l, f] = sum_b grad[b, l] * features[supports[g, f], b], for the labels l of a group g and BLOCK_F slots f.

    The program of the first slots has grad_bias[l] = sum_b grad[b, l] beside it.
    """
    SLOT_BLOCKS: tl.constexpr = (WIDTH + BLOCK_F - 1) // BLOCK_F
    group = (tl.program_id(0) // SLOT_BLOCKS).to(tl.int64)
    slots = tl.program_id(0) % SLOT_BLOCKS * BLOCK_F
    slot = slots + tl.arange(0, BLOCK_F)
    column = load_columns(supports, group, slot, num_features, WIDTH)
    start, end = load_segment(group_offsets, group, num_labels)
    for first in range(start, end, BLOCK_L):
        label = first + tl.arange(0, BLOCK_L)
        result = tl.zeros([BLOCK_L, BLOCK_F], tl.float32)
        of_bias = tl.zeros([BLOCK_L], tl.float32)
        for samples in tl.range(0, batch_size, BLOCK_B, num_stages=NUM_STAGES):
            sample = samples + tl.arange(0, BLOCK_B).to(tl.int64)
            exists = sample < batch_size
            left = load_block(grad, label, grad_column_stride, label < end, sample, grad_stride, exists)
            right = load_block(features, column, feature_stride, slot < WIDTH, sample, 1, sample < filled_size)
            result = dot(left, tl.trans(right), result, PRECISION)
            if grad_bias is not None:
                of_bias += tl.sum(left.to(tl.float32), 1)
        addresses = grad_weight + label[:, None] * WIDTH + slot[None, :]
        tl.store(addresses, result.to(grad_weight.dtype.element_ty), mask=(label < end)[:, None] & (slot < WIDTH)[None, :])
        if grad_bias is not None:
            tl.store(grad_bias + label, of_bias.to(grad_bias.dtype.element_ty), mask=(label < end) & (slots == 0))


@triton.jit(do_not_specialize=VARYING)
def group_sparse_feature_gradient_kernel(
    grad, weight, supports, group_offsets, sums, num_groups, num_labels, batch_size, num_parts, num_features, grad_stride,
    grad_column_stride, weight_stride, weight_column_stride, sums_stride, WIDTH: tl.constexpr, BLOCK_L: tl.constexpr,
    BLOCK_F: tl.constexpr, BLOCK_B: tl.constexpr, PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """sums[p, supports[g, f], b] += sum_l weight[l, f] * grad[b, l], group by group of part p, for BLOCK_B samples.

    The columns of a group differ, so that no two threads add to one sum at once; between groups, which may share columns, the
    threads wait for each other.
    """
    blocks = tl.cdiv(batch_size, BLOCK_B)
    part = (tl.program_id(0) // blocks).to(tl.int64)
    sample = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    exists = sample < batch_size
    sums += part * num_features * sums_stride
    for group in tl.range(part * num_groups // num_parts, (part + 1) * num_groups // num_parts, num_stages=1):
        start, end = load_segment(group_offsets, group, num_labels)
        for slots in range(0, WIDTH, BLOCK_F):
            slot = slots + tl.arange(0, BLOCK_F)
            result = tl.zeros([BLOCK_F, BLOCK_B], tl.float32)
            for first in tl.range(start, end, BLOCK_L, num_stages=NUM_STAGES):
                label = first + tl.arange(0, BLOCK_L)
                left = load_block(weight, label, weight_stride, label < end, slot, weight_column_stride, slot < WIDTH)
                right = load_block(grad, label, grad_column_stride, label < end, sample, grad_stride, exists)
                result = dot(tl.trans(left), right, result, PRECISION)
            column = load_columns(supports, group, slot, num_features, WIDTH)
            addresses = sums + column[:, None] * sums_stride + sample[None, :]
            mask = (slot < WIDTH)[:, None] & (sample < sums_stride)[None, :]
            tl.store(addresses, tl.load(addresses, mask=mask, other=0.0) + result, mask=mask)
        tl.debug_barrier()


_launch_forward = Launcher(group_sparse_forward_kernel)
_launch_weight_gradient = Launcher(group_sparse_weight_gradient_kernel)
_launch_feature_gradient = Launcher(group_sparse_feature_gradient_kernel)


def forward(x: Inputs, o: Options) -> Outputs:
    """Launch `group_sparse_forward_kernel`."""
    features, weight, supports, group_offsets, bias = x
    (batch_size, num_features), (num_labels, width), num_groups = features.shape, weight.shape, supports.shape[0]
    if not (batch_size and num_labels and num_groups):
        return Outputs(features.new_zeros(batch_size, num_labels))
    logits = features.new_empty(batch_size, num_labels)
    chosen = configurations.forward_configuration(num_labels, num_groups, width, features.element_size())
    columns = aligned(features.t())
    _launch_forward(
        (num_groups * cdiv(batch_size, chosen.block_b),),
        columns, weight, supports.contiguous(), group_offsets.contiguous(), None if bias is None else bias.contiguous(), logits,
        num_labels, batch_size, columns.shape[1], num_features, columns.stride(0), *weight.stride(), WIDTH=width,
        BLOCK_L=chosen.block_l, BLOCK_F=chosen.block_f, BLOCK_B=chosen.block_b, PRECISION=products_of(features.dtype),
        NUM_STAGES=chosen.num_stages, num_warps=chosen.num_warps,
    )  # fmt: skip
    return Outputs(logits)


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
        found["features"] = _feature_gradient(grad, x, wanted["features"])
    if "weight" in wanted:
        found |= _weight_gradients(grad, x, wanted)
    elif "bias" in wanted:
        found["bias"] = grad.sum(0, dtype=torch.float32).to(wanted["bias"])
    return found


def _weight_gradients(grad: Tensor, x: Inputs, wanted: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
    """Launch `group_sparse_weight_gradient_kernel`; what it has beside is the gradient of a bias."""
    features, weight, supports, group_offsets, _ = x
    (batch_size, num_features), (num_labels, width), num_groups = features.shape, weight.shape, supports.shape[0]
    found = {"weight": weight.new_empty(num_labels, width, dtype=wanted["weight"])}
    if "bias" in wanted:
        found["bias"] = weight.new_empty(num_labels, dtype=wanted["bias"])
    chosen = configurations.weight_configuration(num_labels, num_groups, width, features.element_size())
    columns = aligned(features.t())
    _launch_weight_gradient(
        (num_groups * cdiv(width, chosen.block_f),),
        grad, columns, supports, group_offsets, found["weight"], found.get("bias"), num_labels, batch_size, columns.shape[1],
        num_features, *grad.stride(), columns.stride(0), WIDTH=width, BLOCK_L=chosen.block_l, BLOCK_F=chosen.block_f,
        BLOCK_B=chosen.block_b, PRECISION=products_of(features.dtype), NUM_STAGES=chosen.num_stages, num_warps=chosen.num_warps,
    )  # fmt: skip
    return found


def _feature_gradient(grad: Tensor, x: Inputs, dtype: torch.dtype) -> Tensor:
    """Launch `group_sparse_feature_gradient_kernel` and add up the parts' sums in their order."""
    features, weight, supports, group_offsets, _ = x
    (batch_size, num_features), (num_labels, width), num_groups = features.shape, weight.shape, supports.shape[0]
    chosen = configurations.feature_configuration(num_labels, num_groups, width, features.element_size())
    blocks = cdiv(batch_size, chosen.block_b)
    num_parts = min(num_groups, cdiv(configurations.PROGRAMS * gpu(features.device).multiprocessors, blocks))
    stride = cdiv(batch_size, 16) * 16
    sums = features.new_zeros(num_parts, num_features, stride, dtype=torch.float32)
    _launch_feature_gradient(
        (num_parts * blocks,),
        grad, weight, supports, group_offsets, sums, num_groups, num_labels, batch_size, num_parts, num_features, *grad.stride(),
        *weight.stride(), stride, WIDTH=width, BLOCK_L=chosen.block_l, BLOCK_F=chosen.block_f, BLOCK_B=chosen.block_b,
        PRECISION=products_of(features.dtype), NUM_STAGES=chosen.num_stages, num_warps=chosen.num_warps,
    )  # fmt: skip
    return sums.sum(0)[:, :batch_size].t().to(dtype).contiguous()
