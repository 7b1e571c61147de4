"""Backward pass of embedding bags: each row's lookups are brought together by a stable sort and summed in that order.

A lookup has a key, its row among those of all tables, and a source, the element of the incoming gradient that its bag begins at.
Sorted by key the lookups of a row are a bag themselves, whose rows are those of the gradient: `pooled` sums them by the schedules
of forward. A program takes some hundred sorted lookups, and the rows whose runs of equal keys begin there. A row's sum is stored
as its gradient, or updates the row at once; a row with thousands of lookups is summed in parts, which another kernel joins.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged.ops._shared.device import rounded_product
from jagged.ops._shared.matrices import gpu
from jagged.ops.embedding_bag.optimizers import STATES
from jagged.ops.embedding_bag.plans import PROGRAMS
from jagged.ops.embedding_bag.schedules import (
    BLOCK_GROUPS,
    MOST_COLUMNS,
    NUM_KINDS,
    NUM_SCHEDULES,
    columns_by,
    columns_of,
    group_of,
    groups_by,
    is_of_many,
    kind_of,
    lanes_by,
    pooled,
    span_of,
    take_unit,
    used_schedules,
)

BLOCK_BAGS, BLOCK_LOOKUPS = 32, 8
# Lookups of a unit, and of a block, a multiple, at whose end a row's sum is cut, so that no program has very many of them.
CHUNK, SPLIT = 256, 4096
# Programs that join what was cut, for each multiprocessor.
JOINING = 4
SAMPLE_BAGS, SAMPLE_LOOKUPS, SAMPLE_COLUMNS = 4, 4, 32


@triton.jit
def bags_of(
    bag, offsets, layout, batches, feature_of_bag, num_lookups, num_all_bags, num_bags, output_stride, FIELDS: tl.constexpr
):  # fmt: skip
    """Return for some bags where their lookups begin and end, their features' fields, and where their output begins."""
    exists = bag < num_all_bags
    begin, end = span_of(offsets, bag, exists, num_lookups)
    if batches is None:
        feature = bag // num_bags
        source = (bag - feature * num_bags) * output_stride
        source += tl.load(layout + feature * FIELDS + 3, mask=exists, other=0)
    else:
        feature = tl.load(feature_of_bag + bag, mask=exists, other=0)
        width = tl.load(layout + feature * FIELDS + 2, mask=exists, other=0)
        source = (bag - tl.load(batches + feature * 3, mask=exists, other=0)) * width
        source += tl.load(batches + feature * 3 + 2, mask=exists, other=0)
    return begin, end, layout + feature * FIELDS, source, exists


@triton.jit(do_not_specialize=["num_lookups", "num_all_bags", "num_bags", "output_stride", "num_rows"])
def embedding_bags_lookups_kernel(
    indices, offsets, scales, layout, batches, feature_of_bag, keys, sources, factors, num_lookups, num_all_bags, num_bags,
    output_stride, num_rows, FIELDS: tl.constexpr, BAGS: tl.constexpr, LOOKUPS: tl.constexpr,
):  # fmt: skip
    """Key, source and factor of every lookup of some bags; an id that its table does not have gets the key `num_rows`."""
    bag = tl.program_id(0).to(tl.int64) * BAGS + tl.arange(0, BAGS)
    begin, end, fields, source, exists = bags_of(
        bag, offsets, layout, batches, feature_of_bag, num_lookups, num_all_bags, num_bags, output_stride, FIELDS
    )
    rows = tl.load(fields + 1, mask=exists, other=0)
    first_row = tl.load(fields + 5, mask=exists, other=0)
    is_mean = tl.load(fields + 4, mask=exists, other=0) != 0
    factor = tl.where(is_mean, 1 / tl.maximum(end - begin, 1).to(tl.float32), 1.0)
    for step in range(0, tl.max(end - begin, 0), LOOKUPS):
        place = begin[:, None] + step + tl.arange(0, LOOKUPS)[None, :]
        is_live = place < end[:, None]
        row = tl.load(indices + place, mask=is_live, other=0).to(tl.int64)
        key = tl.where((row >= 0) & (row < rows[:, None]), first_row[:, None] + row, num_rows)
        tl.store(keys + place, key.to(keys.dtype.element_ty), mask=is_live)
        tl.store(sources + place, (source[:, None] + tl.zeros_like(row)).to(sources.dtype.element_ty), mask=is_live)
        if factors is not None:
            of_place = factor[:, None] + tl.zeros((BAGS, LOOKUPS), tl.float32)
            if scales is not None:
                of_place *= tl.load(scales + place, mask=is_live, other=0.0).to(tl.float32)
            tl.store(factors + place, of_place, mask=is_live)


@triton.jit
def mixed(x):
    """Return 32 bits of a hash of 63-bit integers, as `torch_impl.mixed`."""
    x = (x ^ (x >> 32)) & 0xFFFFFFFF
    x = (x * 0x85EBCA6B) & 0xFFFFFFFF
    x ^= x >> 13
    x = (x * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ (x >> 16)


@triton.jit
def rounded(new, element, step):
    """Round to bfloat16 up or down, by a number that depends on the step and on the element."""
    bits = new.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    cut = (bits + (mixed(element + (step << 40)) & 0xFFFF)) & 0xFFFF0000
    # What is not finite stays as it is.
    cut = tl.where((bits & 0x7F800000) == 0x7F800000, bits, cut)
    return cut.to(tl.uint32).to(tl.float32, bitcast=True).to(tl.bfloat16)


@triton.jit
def decayed(grad, old, weight_decay, KIND: tl.constexpr):
    """Return gradients with the weights' share, which adam takes apart from them."""
    if KIND == "adam" or KIND == "rowwise_adam":
        return grad
    return grad + weight_decay * old


@triton.jit
def updated(
    grad, square, old, first, second, element, row, corrections, rate, numbers, mask, row_mask, KIND: tl.constexpr,
):  # fmt: skip
    """Return new weights and store new states; `grad` has the weights' share, `square` is the mean of its squares by row."""
    eps, beta1, beta2, weight_decay, rest1, rest2 = numbers
    if KIND == "sgd":
        new = old - rate * grad
    elif KIND == "adagrad":
        state = tl.load(first + element, mask=mask, other=0.0) + grad * grad
        tl.store(first + element, state, mask=mask)
        new = old - rate * grad / (tl.sqrt_rn(state) + eps)
    elif KIND == "rowwise_adagrad":
        state = tl.load(first + row, mask=row_mask, other=0.0) + square
        new = old - rate * grad / (tl.sqrt_rn(state) + eps)[:, None]
    else:
        mean = beta1 * tl.load(first + element, mask=mask, other=0.0) + rest1 * grad
        tl.store(first + element, mean, mask=mask)
        unbiased = mean / tl.load(corrections)
        correction = tl.load(corrections + 1)
        if KIND == "adam":
            variance = beta2 * tl.load(second + element, mask=mask, other=0.0) + rest2 * grad * grad
            tl.store(second + element, variance, mask=mask)
            divisor = tl.sqrt_rn(variance / correction) + eps
        else:
            variance = beta2 * tl.load(second + row, mask=row_mask, other=0.0) + rest2 * square
            divisor = (tl.sqrt_rn(variance / correction) + eps)[:, None]
        new = old - rate * (unbiased / divisor + weight_decay * old)
    return new


@triton.jit(do_not_specialize=["num_tables", "num_programs"])
def embedding_bags_rows_map_kernel(
    tables, begins, ends, block_ends, counter, num_tables, num_programs, FIELDS: tl.constexpr, CHUNK: tl.constexpr,
    SPLIT: tl.constexpr, WHOLE_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For each table after how many units of `CHUNK` lookups it ends, and after how many blocks of `SPLIT`."""
    tl.store(counter, num_programs)
    total, total_blocks = tl.zeros((), tl.int64), tl.zeros((), tl.int64)
    for start in range(0, num_tables, BLOCK):
        table = start + tl.arange(0, BLOCK)
        exists = table < num_tables
        lookups = tl.load(begins + table + 1, mask=exists, other=0) - tl.load(begins + table, mask=exists, other=0)
        units = (lookups + CHUNK - 1) // CHUNK
        if not WHOLE_ROWS:
            width = tl.load(tables + table.to(tl.int64) * FIELDS + 2, mask=exists, other=1)
            units *= (width + MOST_COLUMNS - 1) // MOST_COLUMNS
        blocks = (lookups + SPLIT - 1) // SPLIT
        tl.store(ends + table, total + tl.cumsum(units, 0), mask=exists)
        tl.store(block_ends + table, total_blocks + tl.cumsum(blocks, 0), mask=exists)
        total += tl.sum(units, 0)
        total_blocks += tl.sum(blocks, 0)


@triton.jit
def find_runs(keys, runs, offset, size, room, CHUNK: tl.constexpr, SPLIT: tl.constexpr):
    """Store where the runs of equal keys begin that do so in a chunk, and where the last of them ends; return how many.

    Places count from the chunk's first, `keys`; before it the table has `offset` keys, and from it on `room`, of which `size` are
    in the chunk. A run ends at a multiple of `SPLIT` from the table's first key as well.
    """
    place = tl.arange(0, CHUNK)
    exists = place < size
    key = tl.load(keys + place, mask=exists, other=-1)
    before = tl.load(keys + place - 1, mask=exists & ((place > 0) | (offset > 0)), other=-1)
    is_first = exists & ((key != before) | ((place == 0) & (offset % SPLIT == 0)))
    tl.store(runs + tl.cumsum(is_first.to(tl.int32), 0) - 1, place, mask=is_first)
    count = tl.sum(is_first.to(tl.int32), 0)
    # The last run may go on beyond the chunk.
    last_key = tl.load(keys + size - 1)
    limit = tl.minimum(room, SPLIT - offset % SPLIT).to(tl.int32)
    end = size
    found = tl.full((), CHUNK, tl.int32)
    while (found == CHUNK) & (end < limit):
        after = end + tl.arange(0, CHUNK)
        found = tl.sum((tl.load(keys + after, mask=after < limit, other=-1) == last_key).to(tl.int32), 0)
        end += found
    tl.store(runs + count, end)
    return count


@triton.jit
def sum_and_apply(
    values, sources, factors, begin, end, row, element, exists, is_part, slot, parts_of_runs, weights, first, second, step,
    corrections, rate, width, row_stride, only, eps, beta1, beta2, weight_decay, rest1, rest2, KIND: tl.constexpr,
    IS_STOCHASTIC: tl.constexpr, VECTOR: tl.constexpr, SCHEDULE: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of some rows, and store or apply them; sums of a part of a row's lookups are kept in `parts_of_runs`.

    Of wide rows it is the columns of one part, `only`. Numbers of a row as a whole need all columns: these are summed part after
    part, the first one last, and then all but that are summed again.
    """
    COLUMNS: tl.constexpr = columns_by(SCHEDULE)
    BY_ROW: tl.constexpr = KIND == "rowwise_adagrad" or KIND == "rowwise_adam"
    numbers = (eps, beta1, beta2, weight_decay, rest1, rest2)
    parts = (width + COLUMNS - 1) // COLUMNS
    square = tl.zeros(row.shape, tl.float32)
    applies = exists if is_part is None else exists & (is_part == 0)
    for turn in range(0, 2 * parts - 1 if BY_ROW else 1):
        part = tl.abs(parts - 1 - turn) if BY_ROW else only
        columns = (part * COLUMNS).to(tl.int32) + tl.arange(0, COLUMNS)
        in_row = (columns < width)[None, :]
        place = element[:, None] + columns[None, :]
        IDS: tl.constexpr = "stride" if is_part is None else "elements"
        sums = pooled(values, sources, factors, begin, end, 0, width, columns, SCHEDULE, VECTOR, IDS)
        if is_part is not None:
            kept = parts_of_runs + slot[:, None] * row_stride + columns[None, :]
            tl.store(kept, sums, mask=(exists & (is_part != 0))[:, None] & in_row)
        mask = applies[:, None] & in_row
        if KIND == "none":
            new = sums
        else:
            old = tl.load(weights + place, mask=mask, other=0.0).to(tl.float32)
            sums = tl.where(mask, decayed(sums, old, weight_decay, KIND), 0.0)
            if BY_ROW:
                square += tl.where(turn < parts, tl.sum(rounded_product(sums, sums), 1), 0.0)
                mask &= turn >= parts - 1
            new = updated(
                sums, square / width, old, first, second, place, row, corrections, tl.load(rate), numbers, mask, applies, KIND
            )  # fmt: skip
        if IS_STOCHASTIC:
            tl.store(weights + place, rounded(new, place, tl.load(step)), mask=mask)
        else:
            tl.store(weights + place, new.to(weights.dtype.element_ty), mask=mask)
    if KIND == "rowwise_adagrad":
        tl.store(first + row, tl.load(first + row, mask=applies, other=0.0) + square / width, mask=applies)
    if KIND == "rowwise_adam":
        variance = beta2 * tl.load(second + row, mask=applies, other=0.0) + rest2 * (square / width)
        tl.store(second + row, variance, mask=applies)


# Called and not inlined: what one branch computes holds no registers in another.
@triton.jit(noinline=True)
def row_unit(
    grad, sources, factors, runs, num_runs, keys, offset, room, block, parts_of_runs, weights, first, second, step, corrections,
    rate, fields, row_stride, part, eps, beta1, beta2, weight_decay, rest1, rest2, KIND: tl.constexpr,
    IS_STOCHASTIC: tl.constexpr, ALIGNED: tl.constexpr, SCHEDULE: tl.constexpr,
):  # fmt: skip
    """Sum, and store or apply, the gradients of the rows of some runs; places as `find_runs` has them."""
    LANES: tl.constexpr = lanes_by(SCHEDULE)
    GROUPS: tl.constexpr = groups_by(SCHEDULE)
    ROWS: tl.constexpr = GROUPS // LANES
    start, width, first_row = tl.load(fields), tl.load(fields + 2), tl.load(fields + 5)
    for run in range(0, num_runs, ROWS):
        left = num_runs - run
        of_row, own = tl.arange(0, ROWS), tl.arange(0, GROUPS) // LANES
        exists = of_row < left
        begin = tl.load(runs + run + own, mask=own < left, other=0)
        end = tl.load(runs + run + own + 1, mask=own < left, other=0)
        from_ = tl.load(runs + run + of_row, mask=exists, other=0)
        to = tl.load(runs + run + of_row + 1, mask=exists, other=0)
        key = tl.load(keys + from_, mask=exists, other=-1)
        row = key.to(tl.int64)
        element = start + (row - first_row) * width
        goes_on = tl.load(keys + to, mask=exists & (to < room), other=-2) == key
        has_begun = tl.load(keys + from_ - 1, mask=exists & ((from_ > 0) | (offset > 0)), other=-2) == key
        # Of a block the run that came in has the first place, and the one that goes on from here has the second.
        slot = block * 2 + 1 - has_begun.to(tl.int64)
        sum_and_apply(
            grad, sources, factors, begin, end, row, element, exists, (goes_on | has_begun).to(tl.int32), slot, parts_of_runs,
            weights, first, second, step, corrections, rate, width, row_stride, part, eps, beta1, beta2, weight_decay, rest1,
            rest2, KIND, IS_STOCHASTIC, ALIGNED, SCHEDULE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_tables", "row_stride", "eps", "beta1", "beta2", "weight_decay", "rest1", "rest2"])
def embedding_bags_rows_kernel(
    grad, sources, factors, keys, runs, parts_of_runs, weights, first, second, step, corrections, rate, tables, begins, ends,
    block_ends, counter, num_tables, row_stride, eps, beta1, beta2, weight_decay, rest1, rest2, FIELDS: tl.constexpr,
    CHUNK: tl.constexpr, SPLIT: tl.constexpr, KIND: tl.constexpr, IS_STOCHASTIC: tl.constexpr, ALIGNED: tl.constexpr,
    USED: tl.constexpr,
):  # fmt: skip
    """Take units of all tables' sorted lookups; the rows that begin there are this program's."""
    BY_ROW: tl.constexpr = KIND == "rowwise_adagrad" or KIND == "rowwise_adam"
    runs += tl.program_id(0) * (CHUNK + 1)
    num_units = tl.load(ends + num_tables - 1)
    unit = tl.program_id(0).to(tl.int64)
    while unit < num_units:
        following = take_unit(counter)
        table, before = group_of(ends, unit, num_tables)
        fields = tables + table * FIELDS
        width = tl.load(fields + 2)
        parts = 1 if BY_ROW else (width + MOST_COLUMNS - 1) // MOST_COLUMNS
        begin, end = tl.load(begins + table), tl.load(begins + table + 1)
        offset = (unit - before) // parts * CHUNK
        begin += offset
        room = end - begin
        own_factors = factors
        if factors is not None:
            own_factors = factors + begin
        # The runs of the unit before have been read.
        tl.debug_barrier()
        num_runs = find_runs(keys + begin, runs, offset, tl.minimum(room, CHUNK).to(tl.int32), room, CHUNK, SPLIT)
        tl.debug_barrier()
        lookups = tl.load(runs + num_runs) - tl.load(runs)
        _, exponent = columns_of(width)
        found = (exponent * NUM_KINDS + kind_of(lookups, num_runs)) * 2 + (width % 4 == 0).to(tl.int32)
        block = tl.load(block_ends + table - 1, mask=table > 0, other=0) + offset // SPLIT
        for i in tl.static_range(NUM_SCHEDULES):
            if (USED >> i) & 1:  # noqa: SIM102
                if found == i:
                    row_unit(
                        grad, sources + begin, own_factors, runs, num_runs, keys + begin, offset, room, block, parts_of_runs,
                        weights, first, second, step, corrections, rate, fields, row_stride, (unit - before) % parts, eps, beta1,
                        beta2, weight_decay, rest1, rest2, KIND, IS_STOCHASTIC, ALIGNED, i,
                    )  # fmt: skip
        unit = following


@triton.jit(noinline=True)
def joined_run(
    parts_of_runs, first_slot, last_slot, key, weights, first, second, step, corrections, rate, fields, row_stride, eps, beta1,
    beta2, weight_decay, rest1, rest2, KIND: tl.constexpr, IS_STOCHASTIC: tl.constexpr, SCHEDULE: tl.constexpr,
):  # fmt: skip
    """Add the parts of one row's lookups up, in their order, and store or apply the sum."""
    start, width, first_row = tl.load(fields), tl.load(fields + 2), tl.load(fields + 5)
    one = tl.zeros((1,), tl.int64)
    row = one + key.to(tl.int64)
    element = start + (row - first_row) * width
    begin = tl.zeros((groups_by(SCHEDULE),), tl.int64) + first_slot
    end = begin + (last_slot + 1 - first_slot)
    BY_ROW: tl.constexpr = KIND == "rowwise_adagrad" or KIND == "rowwise_adam"
    COLUMNS: tl.constexpr = columns_by(SCHEDULE)
    for part in range(0, 1 if BY_ROW else (width + COLUMNS - 1) // COLUMNS):
        sum_and_apply(
            parts_of_runs, row_stride, None, begin, end, row, element, one == 0, None, one, parts_of_runs, weights, first, second,
            step, corrections, rate, width, row_stride, part, eps, beta1, beta2, weight_decay, rest1, rest2, KIND, IS_STOCHASTIC,
            SCHEDULE % 2, SCHEDULE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_tables", "row_stride", "eps", "beta1", "beta2", "weight_decay", "rest1", "rest2"])
def embedding_bags_join_kernel(
    keys, parts_of_runs, weights, first, second, step, corrections, rate, tables, begins, block_ends, num_tables, row_stride, eps,
    beta1, beta2, weight_decay, rest1, rest2, FIELDS: tl.constexpr, SPLIT: tl.constexpr, KIND: tl.constexpr,
    IS_STOCHASTIC: tl.constexpr, USED: tl.constexpr,
):  # fmt: skip
    """Join the parts of rows that are read by more than a block of lookups: at the first end of a block that each goes across."""
    num_blocks = tl.load(block_ends + num_tables - 1)
    for block in range(tl.program_id(0).to(tl.int64), num_blocks, tl.num_programs(0)):
        table, before = group_of(block_ends, block, num_tables)
        fields = tables + table * FIELDS
        first_place, last_place = tl.load(begins + table), tl.load(begins + table + 1)
        place = first_place + (block - before) * SPLIT
        key = tl.load(keys + place)
        goes_across = (block > before) & (tl.load(keys + place - 1, mask=block > before, other=-2) == key)
        is_later = goes_across & (block > before + 1)
        is_later &= tl.load(keys + place - SPLIT - 1, mask=is_later, other=-2) == key
        if goes_across & (is_later == 0):
            last_block = block
            place += SPLIT
            while (place < last_place) & (tl.load(keys + place, mask=place < last_place, other=-2) == key):
                last_block += 1
                place += SPLIT
            width = tl.load(fields + 2)
            _, exponent = columns_of(width)
            found = (exponent * NUM_KINDS + NUM_KINDS - 1) * 2 + (width % 4 == 0).to(tl.int32)
            for i in tl.static_range(NUM_SCHEDULES):
                if ((USED >> i) & 1) and is_of_many(i):  # noqa: SIM102
                    if found == i:
                        joined_run(
                            parts_of_runs, block * 2 - 1, last_block * 2, key, weights, first, second, step, corrections, rate,
                            fields, row_stride, eps, beta1, beta2, weight_decay, rest1, rest2, KIND, IS_STOCHASTIC, i,
                        )  # fmt: skip


@triton.jit(do_not_specialize=["num_lookups", "num_all_bags", "num_bags", "output_stride"])
def embedding_bags_samples_kernel(
    grad, weights, indices, offsets, layout, batches, feature_of_bag, result, num_lookups, num_all_bags, num_bags, output_stride,
    FIELDS: tl.constexpr, BAGS: tl.constexpr, LOOKUPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Products of the rows of some bags with the gradients of their sums."""
    bag = tl.program_id(0).to(tl.int64) * BAGS + tl.arange(0, BAGS)
    begin, end, fields, source, exists = bags_of(
        bag, offsets, layout, batches, feature_of_bag, num_lookups, num_all_bags, num_bags, output_stride, FIELDS
    )
    table = tl.load(fields, mask=exists, other=0)
    rows = tl.load(fields + 1, mask=exists, other=0)
    width = tl.load(fields + 2, mask=exists, other=0)
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


def _bags(layout: Tensor, offsets: Tensor, batches: Tensor | None, grad: Tensor) -> tuple[Tensor | None, int, int, int]:
    """Return the feature of each bag where batches differ, the bags of all and of one, and the stride of the gradient's rows."""
    num_all = offsets.shape[0] - 1
    if batches is None:
        return None, num_all, max(1, grad.shape[0]), grad.shape[1]
    features = torch.arange(layout.shape[0], dtype=torch.int32, device=grad.device)
    return features.repeat_interleave(batches[:, 1], output_size=num_all), num_all, 1, 0


def _sums_by_row(
    grad: Tensor,
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    device_layout: Tensor,
    layout: Tensor,
    batches: Tensor | None,
    weights: Tensor,
    first: Tensor | None,
    second: Tensor | None,
    step: Tensor | None,
    rate: Tensor | None,
    kind: str,
    numbers: tuple[float, float, float, float],
    *,
    is_stochastic: bool,
) -> None:
    """Sum the gradients of each row that was read, and store them in `weights`, or update weights and states by them."""
    num_features, fields = layout.shape
    num_lookups, device = indices.shape[0], grad.device
    feature_of_bag, num_all, num_bags, stride = _bags(layout, offsets, batches, grad)
    if not num_lookups or not num_all:
        return
    tables = device_layout[num_features:]
    num_tables = tables.shape[0] - 1
    num_rows = int((layout[:, 5] + layout[:, 1]).max())
    narrow, wide = torch.int32, torch.int64
    keys = torch.full((num_lookups,), num_rows, dtype=narrow if num_rows < 2**31 - 1 else wide, device=device)
    sources = torch.empty(num_lookups, dtype=narrow if grad.numel() < 2**31 else wide, device=device)
    has_factors = per_sample_weights is not None or bool(layout[:, 4].any())
    factors = torch.empty(num_lookups, dtype=torch.float32, device=device) if has_factors else None
    embedding_bags_lookups_kernel[(triton.cdiv(num_all, BLOCK_BAGS),)](
        indices, offsets, per_sample_weights, device_layout, batches, feature_of_bag, keys, sources, factors, num_lookups,
        num_all, num_bags, stride, num_rows, FIELDS=fields, BAGS=BLOCK_BAGS, LOOKUPS=BLOCK_LOOKUPS, num_warps=4,
    )  # fmt: skip
    keys, order = keys.sort(stable=True)
    sources = sources[order]
    factors = None if factors is None else factors[order]
    begins = torch.searchsorted(keys, tables[:, 5].to(keys.dtype))
    ends, block_ends = (torch.empty(num_tables, dtype=wide, device=device) for _ in range(2))
    counter = torch.empty(1, dtype=wide, device=device)
    programs = min(PROGRAMS * gpu(device).multiprocessors, num_lookups)
    embedding_bags_rows_map_kernel[(1,)](
        tables, begins, ends, block_ends, counter, num_tables, programs, FIELDS=fields, CHUNK=CHUNK, SPLIT=SPLIT,
        WHOLE_ROWS=kind.startswith("rowwise"), BLOCK=BLOCK_GROUPS, num_warps=8,
    )  # fmt: skip
    corrections = None
    if step is not None and "adam" in kind:
        # Near 0 for betas near 1, which float32 has no digits for.
        corrections = torch.stack([1 - torch.pow(beta, step.double()) for beta in numbers[1:3]]).float()
    runs = torch.empty(programs, CHUNK + 1, dtype=narrow, device=device)
    # Of each block of lookups the part of a row that came in, and of one that goes on. A table's last block may be short.
    row_stride = triton.cdiv(int(layout[:, 2].max()), 4) * 4
    is_split = num_lookups > SPLIT
    parts_of_runs = torch.zeros(2 * (num_lookups // SPLIT + num_tables) if is_split else 0, row_stride, device=device)
    options = {
        "FIELDS": fields,
        "SPLIT": SPLIT,
        "KIND": kind,
        "IS_STOCHASTIC": is_stochastic and weights.dtype == torch.bfloat16,
        "USED": used_schedules(layout),
        "num_warps": 1,
    }
    state = (weights, first, second, step, corrections, rate, tables, begins)
    scalars = (num_tables, row_stride, *numbers, 1 - numbers[1], 1 - numbers[2])
    embedding_bags_rows_kernel[(programs,)](
        grad, sources, factors, keys, runs, parts_of_runs, *state, ends, block_ends, counter, *scalars, CHUNK=CHUNK,
        ALIGNED=not bool((layout[:, 2] % 4).any()), **options,
    )  # fmt: skip
    if is_split:
        embedding_bags_join_kernel[(JOINING * gpu(device).multiprocessors,)](
            keys, parts_of_runs, *state, block_ends, *scalars, **options
        )


def embedding_bags_weights_backward(
    grad: Tensor,
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    device_layout: Tensor,
    layout: Tensor,
    batches: Tensor | None,
    host_batches: Tensor | None,
    num_elements: int,
    weights_dtype: torch.dtype,
) -> Tensor:
    """Return the gradient of the storage, `[num_elements]`."""
    result = grad.new_zeros(num_elements, dtype=weights_dtype)
    _sums_by_row(
        grad, indices, offsets, per_sample_weights, device_layout, layout, batches, result, None, None, None, None, "none",
        (0.0, 0.0, 0.0, 0.0), is_stochastic=False,
    )  # fmt: skip
    return result


def embedding_bags_update(
    weights: Tensor,
    first: Tensor,
    second: Tensor,
    step: Tensor,
    learning_rate: Tensor,
    grad: Tensor,
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    device_layout: Tensor,
    layout: Tensor,
    batches: Tensor | None,
    host_batches: Tensor | None,
    kind: str,
    eps: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    stochastic_rounding: bool,
) -> None:
    """Change the rows that were read, and their states, in place; `step` counts this update already."""
    has_first, has_second = (bool(of) for of in STATES[kind])
    _sums_by_row(
        grad, indices, offsets, per_sample_weights, device_layout, layout, batches, weights, first if has_first else None,
        second if has_second else None, step, learning_rate, kind, (eps, beta1, beta2, weight_decay),
        is_stochastic=stochastic_rounding,
    )  # fmt: skip


def embedding_bags_samples_backward(
    grad: Tensor,
    weights: Tensor,
    indices: Tensor,
    offsets: Tensor,
    device_layout: Tensor,
    layout: Tensor,
    batches: Tensor | None,
    host_batches: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return the gradient of the per-sample weights, `[S]`."""
    result = torch.zeros(indices.shape[0], dtype=dtype, device=grad.device)
    feature_of_bag, num_all, num_bags, stride = _bags(layout, offsets, batches, grad)
    if num_all and len(result):
        embedding_bags_samples_kernel[(triton.cdiv(num_all, SAMPLE_BAGS),)](
            grad, weights, indices, offsets, device_layout, batches, feature_of_bag, result, len(result), num_all, num_bags,
            stride, FIELDS=layout.shape[1], BAGS=SAMPLE_BAGS, LOOKUPS=SAMPLE_LOOKUPS, COLUMNS=SAMPLE_COLUMNS, num_warps=2,
        )  # fmt: skip
    return result
