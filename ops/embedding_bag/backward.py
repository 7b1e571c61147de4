"""Backward pass of embedding bags: each row's lookups are brought together by a stable sort and summed in that order.

A lookup has a key, its row among those of all tables, and a source, the element of the incoming gradient that its bag begins at.
Sorted by key the lookups of a row are a bag themselves, whose rows are those of the gradient: `pooled` sums them by the schedules
of forward. A row's sum is stored as its gradient, or updates the row at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged.ops._shared.device import rounded_product
from jagged.ops._shared.matrices import gpu
from jagged.ops.embedding_bag.optimizers import STATES
from jagged.ops.embedding_bag.schedules import (
    BLOCK_GROUPS,
    NUM_SCHEDULES,
    PROGRAMS,
    SCHEDULE_BITS,
    SCHEDULE_MASK,
    columns_by,
    embedding_bags_map_kernel,
    group_of,
    groups_by,
    lanes_by,
    pooled,
    span_of,
    take_unit,
    used_schedules,
)

BLOCK_BAGS, BLOCK_LOOKUPS = 32, 8
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


# Called and not inlined: what one branch computes holds no registers in another.
@triton.jit(noinline=True)
def row_unit(
    grad, sources, factors, starts, keys, weights, first, second, step, corrections, rate, tables, first_segments, table, unit,
    unit_rows, eps, beta1, beta2, weight_decay, rest1, rest2, FIELDS: tl.constexpr, KIND: tl.constexpr,
    IS_STOCHASTIC: tl.constexpr, ALIGNED: tl.constexpr, SCHEDULE: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of the rows of one unit of a table, and store or apply them."""
    COLUMNS: tl.constexpr = columns_by(SCHEDULE)
    LANES: tl.constexpr = lanes_by(SCHEDULE)
    GROUPS: tl.constexpr = groups_by(SCHEDULE)
    ROWS: tl.constexpr = GROUPS // LANES
    BY_ROW: tl.constexpr = KIND == "rowwise_adagrad" or KIND == "rowwise_adam"
    numbers = (eps, beta1, beta2, weight_decay, rest1, rest2)
    fields = tables + table * FIELDS
    start, width, first_row = tl.load(fields), tl.load(fields + 2), tl.load(fields + 5)
    parts = (width + COLUMNS - 1) // COLUMNS
    first_segment, last_segment = tl.load(first_segments + table), tl.load(first_segments + table + 1)
    first_segment += unit // (1 if BY_ROW else parts) * unit_rows
    last_segment = tl.minimum(first_segment + unit_rows, last_segment)
    for segment in range(first_segment, last_segment, ROWS):
        left = (last_segment - segment).to(tl.int32)
        of_row, own = tl.arange(0, ROWS), tl.arange(0, GROUPS) // LANES
        exists = of_row < left
        begin = tl.load(starts + segment + own, mask=own < left, other=0)
        end = tl.load(starts + segment + own + 1, mask=own < left, other=0)
        place_of_key = tl.load(starts + segment + of_row, mask=exists, other=0)
        row = tl.load(keys + place_of_key, mask=exists, other=0).to(tl.int64)
        element = start + (row - first_row) * width
        # Statistics of a row need all of its columns: of more than one part they are summed first, the first part last, and then
        # all but that are summed again.
        square = tl.zeros((ROWS,), tl.float32)
        for turn in range(0, 2 * parts - 1 if BY_ROW else 1):
            part = tl.abs(parts - 1 - turn) if BY_ROW else unit % parts
            columns = (part * COLUMNS).to(tl.int32) + tl.arange(0, COLUMNS)
            mask = exists[:, None] & (columns < width)[None, :]
            place = element[:, None] + columns[None, :]
            sums = pooled(grad, sources, factors, begin, end, 0, width, columns, SCHEDULE, ALIGNED, False)
            if KIND == "none":
                new = sums
            else:
                old = tl.load(weights + place, mask=mask, other=0.0).to(tl.float32)
                sums = tl.where(mask, decayed(sums, old, weight_decay, KIND), 0.0)
                if BY_ROW:
                    square += tl.where(turn < parts, tl.sum(rounded_product(sums, sums), 1), 0.0)
                    mask &= turn >= parts - 1
                new = updated(
                    sums, square / width, old, first, second, place, row, corrections, tl.load(rate), numbers, mask, exists, KIND
                )  # fmt: skip
            if IS_STOCHASTIC:
                tl.store(weights + place, rounded(new, place, tl.load(step)), mask=mask)
            else:
                tl.store(weights + place, new.to(weights.dtype.element_ty), mask=mask)
        if KIND == "rowwise_adagrad":
            tl.store(first + row, tl.load(first + row, mask=exists, other=0.0) + square / width, mask=exists)
        if KIND == "rowwise_adam":
            variance = beta2 * tl.load(second + row, mask=exists, other=0.0) + rest2 * (square / width)
            tl.store(second + row, variance, mask=exists)


@triton.jit(do_not_specialize=["num_tables", "eps", "beta1", "beta2", "weight_decay", "rest1", "rest2"])
def embedding_bags_rows_kernel(
    grad, sources, factors, starts, keys, weights, first, second, step, corrections, rate, tables, first_segments, ends,
    schedules, counter, num_tables, eps, beta1, beta2, weight_decay, rest1, rest2, FIELDS: tl.constexpr, KIND: tl.constexpr,
    IS_STOCHASTIC: tl.constexpr, ALIGNED: tl.constexpr, USED: tl.constexpr,
):  # fmt: skip
    """Take units of all tables' rows that were read."""
    num_units = tl.load(ends + num_tables - 1)
    unit = take_unit(counter)
    while unit < num_units:
        following = take_unit(counter)
        table, before = group_of(ends, unit, num_tables)
        found = tl.load(schedules + table)
        for i in tl.static_range(NUM_SCHEDULES):
            if (USED >> i) & 1:  # noqa: SIM102
                if found & SCHEDULE_MASK == i:
                    row_unit(
                        grad, sources, factors, starts, keys, weights, first, second, step, corrections, rate, tables,
                        first_segments, table, unit - before, found >> SCHEDULE_BITS, eps, beta1, beta2, weight_decay, rest1,
                        rest2, FIELDS, KIND, IS_STOCHASTIC, ALIGNED, i,
                    )  # fmt: skip
        unit = following


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
    starts, first_segments = _segments(keys, tables[:, 5])
    ends = torch.empty(num_tables, dtype=wide, device=device)
    schedules = torch.empty(num_tables, dtype=narrow, device=device)
    counter = torch.empty(1, dtype=wide, device=device)
    embedding_bags_map_kernel[(1,)](
        tables[:, 2], fields, first_segments, starts, ends, schedules, counter, num_tables, 0, BLOCK=BLOCK_GROUPS,
        WHOLE_ROWS=kind.startswith("rowwise"), num_warps=8,
    )  # fmt: skip
    corrections = None
    if step is not None and "adam" in kind:
        # Near 0 for betas near 1, which float32 has no digits for.
        corrections = torch.stack([1 - torch.pow(beta, step.double()) for beta in numbers[1:3]]).float()
    embedding_bags_rows_kernel[(PROGRAMS * gpu(device).multiprocessors,)](
        grad, sources, factors, starts, keys, weights, first, second, step, corrections, rate, tables, first_segments, ends,
        schedules, counter, num_tables, *numbers, 1 - numbers[1], 1 - numbers[2], FIELDS=fields, KIND=kind,
        IS_STOCHASTIC=is_stochastic and weights.dtype == torch.bfloat16, ALIGNED=not bool((layout[:, 2] % 4).any()),
        USED=used_schedules(layout), num_warps=1,
    )  # fmt: skip


def _segments(keys: Tensor, first_rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return where each run of equal keys begins, and the end of the last, and for each table its first run, and that of none."""
    length = keys.shape[0]
    place = torch.arange(length, device=keys.device)
    is_first = torch.ones_like(keys, dtype=torch.bool)
    is_first[1:] = keys[1:] != keys[:-1]
    run = is_first.cumsum(0) - 1
    starts = torch.full((length + 2,), length, device=keys.device)
    # All that begin no run write the same number of no meaning to the last place.
    starts.scatter_(0, torch.where(is_first, run, length + 1), torch.where(is_first, place, length))
    of_table = torch.searchsorted(keys, first_rows.to(keys.dtype))
    after = torch.cat([run, run[-1:] + 1])
    return starts, after[of_table]


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
