"""What kernels of group-sparse layers share: tiles of a group's weights and of the features it reads, and sums of columns."""

from __future__ import annotations

import triton
import triton.language as tl

from jagged.ops._shared.device import dot, load_segment

# Arguments that compile nothing anew.
VARYING = ["num_groups", "num_labels", "num_parts"]
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


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


@triton.jit
def groups_of(index, num_groups, GROUPS: tl.constexpr):
    """Return the first group of program `index`, and the one after its last; both are int64."""
    first = index.to(tl.int64) * GROUPS
    return first, tl.minimum(first + GROUPS, num_groups)


@triton.jit
def logits_of_tile(
    features, weight, supports, group, label, end, sample, filled_size, num_features, feature_stride, weight_stride,
    weight_column_stride, WIDTH: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_F: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return `[LABEL, SAMPLE]`, the products of a group's labels and some samples, without a bias."""
    z = tl.zeros([BLOCK_L, sample.shape[0]], tl.float32)
    for slots in tl.range(0, WIDTH, BLOCK_F, num_stages=1):
        slot = slots + tl.arange(0, BLOCK_F)
        column = load_columns(supports, group, slot, num_features, WIDTH)
        left = load_block(weight, label, weight_stride, label < end, slot, weight_column_stride, slot < WIDTH)
        right = load_block(features, column, feature_stride, slot < WIDTH, sample, 1, sample < filled_size)
        z = dot(left, right, z, PRECISION)
    return z


@triton.jit
def add_to_sums(sums, product, column, exists, sample, sums_stride):
    """Add `[COLUMN, SAMPLE]` to sums of some columns in global memory; of those that exist no two are the same."""
    addresses = sums + column[:, None] * sums_stride + sample[None, :]
    mask = exists[:, None] & (sample < sums_stride)[None, :]
    tl.store(addresses, tl.load(addresses, mask=mask, other=0.0) + product, mask=mask)
    # The next group may read the same columns, by other threads.
    tl.debug_barrier()


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
def are_positives(bits, BLOCK_B: tl.constexpr):
    """Return `[LABEL, BLOCK_B]`, which samples are the positives that `load_positives` found."""
    place = tl.arange(0, BLOCK_B).to(tl.int64)
    return ((bits[:, None] >> place[None, :]) & 1) == 1
