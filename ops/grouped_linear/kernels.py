"""Linear layers of groups in one kernel: product, bias and ReLU, written once. And the way back through the ReLU."""

from __future__ import annotations

import triton
import triton.language as tl

from jagged.ops._shared.device import dot

# Blocks of rows whose tiles are neighbours: what they read of weights and rows is in the L2 together.
BAND = tl.constexpr(8)


@triton.jit
def place_of(tile, row_blocks, column_blocks):
    """Return the block of rows and of columns of a tile, in bands of `BAND` blocks of rows."""
    band = tile // (BAND * column_blocks)
    height = tl.minimum(row_blocks - band * BAND, BAND)
    within = tile % (BAND * column_blocks)
    return band * BAND + within % height, within // height


@triton.jit(do_not_specialize=["row_blocks"])
def grouped_linear_kernel(
    x, weight, bias, output, row_blocks, num_groups, OUT: tl.constexpr, IN: tl.constexpr, RELU: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """output[n, g] = relu(weight[g] @ x[n, g] + bias[g]), in tiles of `BLOCK_M` rows and `BLOCK_N` columns of a group.

    Descriptors have x as `[N, G * IN]`, weight as `[G * OUT, IN]` and output as `[N, G * OUT]`; rows past the end are zeros, and
    are not written. While a tile is written, the products of the next begin. Its two halves are written one after the other, from
    half the shared memory.
    """
    COLUMN_BLOCKS: tl.constexpr = OUT // BLOCK_N
    tiles_of_group = row_blocks * COLUMN_BLOCKS
    for tile in tl.range(tl.program_id(0), num_groups * tiles_of_group, tl.num_programs(0), flatten=True, num_stages=NUM_STAGES):
        group = tile // tiles_of_group
        row_block, column_block = place_of(tile % tiles_of_group, row_blocks, COLUMN_BLOCKS)
        row, column = row_block * BLOCK_M, group * OUT + column_block * BLOCK_N
        result = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for inner in range(0, IN, BLOCK_K):
            left = x.load([row, group * IN + inner])
            right = weight.load([column, inner])
            result = dot(left, tl.trans(right), result, "ieee")
        if bias is not None:
            result += tl.load(bias + column + tl.arange(0, BLOCK_N)).to(tl.float32)[None, :]
        if RELU:
            # As torch's: NaN stays.
            result = tl.where(result < 0, 0.0, result)
        first, second = tl.split(tl.permute(tl.reshape(result, [BLOCK_M, 2, BLOCK_N // 2]), [0, 2, 1]))
        output.store([row, column], first.to(output.dtype))
        output.store([row, column + BLOCK_N // 2], second.to(output.dtype))


@triton.jit(do_not_specialize=["num_rows", "rows_of_part"])
def grouped_relu_gradient_kernel(
    grad, kept, before, parts, num_rows, rows_of_part, num_features, row_stride, feature_stride, kept_row_stride,
    kept_feature_stride, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """before = 0 where kept is, else grad; parts[p] = the sum of before over a part of the rows, in float32."""
    first = tl.program_id(0).to(tl.int64) * rows_of_part
    end = tl.minimum(first + rows_of_part, num_rows)
    feature = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    feature_exists = feature < num_features
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(first, end, BLOCK_M):
        row = start + tl.arange(0, BLOCK_M)
        exists = (row < end)[:, None] & feature_exists[None, :]
        gave = tl.load(kept + row[:, None] * kept_row_stride + feature[None, :] * kept_feature_stride, mask=exists, other=0.0)
        tile = tl.load(grad + row[:, None] * row_stride + feature[None, :] * feature_stride, mask=exists, other=0.0)
        # As torch's: the gradient of NaN passes.
        tile = tl.where(gave <= 0, 0.0, tile)
        tl.store(before + row[:, None] * num_features + feature[None, :], tile, mask=exists)
        sums += tile.to(tl.float32)
    tl.store(parts + tl.program_id(0) * num_features + feature, tl.sum(sums, 0), mask=feature_exists)
