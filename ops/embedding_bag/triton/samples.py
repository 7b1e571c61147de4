"""Gradients of the weights of lookups: products of the rows that they read with the gradients of their bags."""

from __future__ import annotations

import triton
import triton.language as tl

from jagged.ops._shared.device import rounded_product
from jagged.ops.embedding_bag.triton.columns import FIELDS, ROWS, START, WIDTH
from jagged.ops.embedding_bag.triton.schedules import bags_of


@triton.jit(do_not_specialize=["num_lookups", "num_all_bags", "num_bags", "output_stride"])
def embedding_bags_samples_kernel(
    grad, weights, indices, offsets, layout, batches, feature_of_bag, result, num_lookups, num_all_bags, num_bags, output_stride,
    BAGS: tl.constexpr, LOOKUPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Products of the rows of some bags with the gradients of their sums."""
    bag = tl.program_id(0).to(tl.int64) * BAGS + tl.arange(0, BAGS)
    begin, end, feature, source, exists = bags_of(
        bag, offsets, layout, batches, feature_of_bag, num_lookups, num_all_bags, num_bags, output_stride
    )
    fields = layout + feature * FIELDS
    table = tl.load(fields + START, mask=exists, other=0)
    rows = tl.load(fields + ROWS, mask=exists, other=0)
    width = tl.load(fields + WIDTH, mask=exists, other=0)
    for step in range(0, tl.max(end - begin, 0), LOOKUPS):
        place = begin[:, None] + step + tl.arange(0, LOOKUPS)[None, :]
        is_live = place < end[:, None]
        row = tl.load(indices + place, mask=is_live, other=0).to(tl.int64)
        is_known = is_live & (row >= 0) & (row < rows[:, None])
        of_row = weights + table[:, None] + row * width[:, None]
        total = tl.zeros((BAGS, LOOKUPS), tl.float32)
        for column in range(0, tl.max(width, 0), COLUMNS):
            columns = column + tl.arange(0, COLUMNS)
            in_row = columns[None, :] < width[:, None]
            of_bag = tl.load(grad + source[:, None] + columns[None, :], mask=in_row & exists[:, None], other=0.0).to(tl.float32)
            mask = is_known[:, :, None] & in_row[:, None, :]
            tile = tl.load(of_row[:, :, None] + columns[None, None, :], mask=mask, other=0.0).to(tl.float32)
            total += tl.sum(rounded_product(tile, tl.broadcast_to(of_bag[:, None, :], [BAGS, LOOKUPS, COLUMNS])), 2)
        tl.store(result + place, total.to(result.dtype.element_ty), mask=is_live)
