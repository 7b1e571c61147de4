"""Backward pass of embedding bags: the sums of each row's gradients, and of products with the weights of lookups.

The lookups of each row are brought together, in their order, and summed in that order: tables of few rows by counting
(`counting.py`, `rows.py`), others by a sort (`sorting.py`). What becomes of a sum is in `updates.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged.ops._shared.device import rounded_product
from jagged.ops._shared.matrices import gpu
from jagged.ops._shared.registration import INTERPRETED
from jagged.ops.embedding_bag import counting, sorting
from jagged.ops.embedding_bag.counting import bags_of
from jagged.ops.embedding_bag.layout import MOST_COUNTED
from jagged.ops.embedding_bag.optimizers import STATES
from jagged.ops.embedding_bag.plans import PROGRAMS
from jagged.ops.embedding_bag.rows import embedding_bags_counted_rows_kernel, embedding_bags_long_rows_kernel
from jagged.ops.embedding_bag.schedules import known_of
from jagged.ops.embedding_bag.updates import MOST_COLUMNS, NUM_WIDTHS

# Tables, and lookups of all, below which nothing is counted.
FEWEST_TABLES, FEWEST_LOOKUPS = 128, 1 << 20
# Programs that sum long rows, for each multiprocessor.
LONG_PROGRAMS = 16
SAMPLE_BAGS, SAMPLE_LOOKUPS, SAMPLE_COLUMNS = 4, 4, 32


@triton.jit(do_not_specialize=["num_lookups", "num_all_bags", "num_bags", "output_stride"])
def embedding_bags_samples_kernel(
    grad, weights, indices, offsets, layout, batches, feature_of_bag, result, num_lookups, num_all_bags, num_bags, output_stride,
    FIELDS: tl.constexpr, BAGS: tl.constexpr, LOOKUPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Products of the rows of some bags with the gradients of their sums."""
    bag = tl.program_id(0).to(tl.int64) * BAGS + tl.arange(0, BAGS)
    begin, end, feature, source, exists = bags_of(
        bag, offsets, layout, batches, feature_of_bag, num_lookups, num_all_bags, num_bags, output_stride, FIELDS
    )
    fields = layout + feature * FIELDS
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


class _Lookups(NamedTuple):
    """What a backward pass reads, and what of it the kernels are called with."""

    grad: Tensor
    indices: Tensor
    offsets: Tensor
    scales: Tensor | None
    device_layout: Tensor
    layout: Tensor
    batches: Tensor | None


class _Rows(NamedTuple):
    """What is stored or updated, and how."""

    weights: Tensor
    first: Tensor | None
    second: Tensor | None
    step: Tensor | None
    rate: Tensor | None
    kind: str
    numbers: tuple[float, float, float, float]
    is_stochastic: bool


def most_counted(num_tables: int, num_lookups: int) -> int:
    """Return the most rows of tables whose lookups are counted: not far more than a table has lookups in the mean.

    Counting goes through a table's lookups in order: it takes many tables to be done at once, and much to do beside six launches.
    """
    if num_tables < FEWEST_TABLES or num_lookups < FEWEST_LOOKUPS:
        return 0
    return min(MOST_COUNTED, 2 * num_lookups // num_tables)


def _sums_by_row(of: _Lookups, rows: _Rows) -> None:
    """Sum the gradients of each row that was read, and store them in `weights`, or update weights and states by them."""
    num_features, fields = of.layout.shape
    num_lookups, device = of.indices.shape[0], of.grad.device
    feature_of_bag, num_all, num_bags, stride = _bags(of.layout, of.offsets, of.batches, of.grad)
    if not num_lookups or not num_all:
        return
    corrections = None
    if rows.step is not None and "adam" in rows.kind:
        # Near 0 for betas near 1, which float32 has no digits for.
        corrections = torch.stack([1 - torch.pow(beta, rows.step.double()) for beta in rows.numbers[1:3]]).float()
    is_by_row = rows.kind.startswith("rowwise")
    options = {
        "FIELDS": fields,
        "KIND": rows.kind,
        "IS_STOCHASTIC": rows.is_stochastic and rows.weights.dtype == torch.bfloat16,
        "USED": used_widths(of.layout, is_by_row=is_by_row),
        "num_warps": 1,
    }
    num_tables = of.device_layout.shape[0] - num_features - 1 - known_of(of.layout).num_parts
    tables = of.device_layout[num_features : num_features + num_tables + 1]
    state = (rows.weights, rows.first, rows.second, rows.step, corrections, rows.rate, tables)
    has_factors = of.scales is not None or bool(of.layout[:, 4].any())
    lookups = (num_lookups, num_all, num_bags, stride)
    of_bags = (of.indices, of.offsets, of.scales, of.device_layout, of.batches, feature_of_bag)
    numbers = (*rows.numbers, 1 - rows.numbers[1], 1 - rows.numbers[2])
    most = most_counted(num_tables, num_lookups)
    own_rows = of.layout[:, 1]
    if bool((own_rows <= most).any()):
        _count(of, of_bags, lookups, state, numbers, has_factors, most, options)
    if bool((own_rows > most).any()):
        _sort(of, of_bags, lookups, state, numbers, has_factors, most, options)


def _count(of, of_bags, lookups, state, numbers, has_factors, most_counted, options) -> None:
    """Sum the rows of tables of few rows, whose lookups are counted."""
    (num_features, fields), (num_lookups, num_all, num_bags, _) = of.layout.shape, lookups
    device, tables = of.grad.device, state[-1]
    num_tables = tables.shape[0] - 1
    own_rows = of.layout[:, 1]
    own_rows = own_rows[own_rows <= most_counted]
    place_dtype = torch.int32 if num_lookups < 2**31 else torch.int64
    begins = torch.empty(4, num_features + 1, dtype=torch.int64, device=device)
    counters = torch.empty(2, dtype=torch.int64, device=device)
    programs = PROGRAMS * gpu(device).multiprocessors
    bits = counting.CHUNK_BITS[num_lookups >= counting.MANY_LOOKUPS]
    of_features = (of.offsets, of.device_layout, of.batches)
    counting.embedding_bags_chunks_kernel[(1,)](
        *of_features, *begins, counters, num_lookups, num_features, num_bags, programs, most_counted, bits,
        FIELDS=fields,
        BLOCK=counting.BLOCK_FEATURES, num_warps=16,
    )  # fmt: skip
    # No chunk has less than a quarter as many lookups as its table has rows, but for the last one of each feature.
    most_chunks = (num_lookups >> bits) + len(own_rows)
    most_counts = 4 * num_lookups + int(own_rows.sum()) + 4 * most_chunks
    counts = torch.empty(most_counts, dtype=place_dtype, device=device)
    ranks = torch.empty(num_lookups, dtype=torch.int16, device=device)
    counting.embedding_bags_ranks_kernel[(most_chunks,)](
        of.indices, *of_features, begins[0], begins[3], counts, ranks, num_lookups, num_features, num_bags, bits,
        FIELDS=fields, BLOCK=counting.BLOCK_ROWS, VOTE=not INTERPRETED and torch.version.hip is None, num_warps=1,
    )  # fmt: skip
    num_rows = int((of.layout[:, 5] + of.layout[:, 1]).max())
    bounds = torch.empty(num_rows + num_tables, dtype=place_dtype, device=device)
    most_slices = 2 * (num_lookups // counting.LONG.value)
    long_rows = torch.empty(most_slices, 3, dtype=torch.int64, device=device)
    counting.embedding_bags_bounds_kernel[(num_tables,)](
        tables, of.device_layout, begins[0], begins[3], begins[2], counts, bounds, long_rows, counters, most_counted, FIELDS=fields,
        BLOCK=counting.BLOCK_ROWS, CHUNKS=counting.BLOCK_CHUNKS, num_warps=8,
    )  # fmt: skip
    sources = torch.empty(num_lookups, dtype=torch.int32 if of.grad.numel() < 2**31 else torch.int64, device=device)
    factors = torch.empty(num_lookups, dtype=torch.float32, device=device) if has_factors else None
    most_blocks = num_lookups // counting.BLOCK_PLACES.value + len(own_rows)
    counting.embedding_bags_sources_kernel[(most_blocks,)](
        *of_bags, begins[1], begins[3], counts, ranks, sources, factors, num_features, *lookups, bits, FIELDS=fields,
        num_warps=8,
    )  # fmt: skip
    is_aligned = not bool((of.layout[:, 2] % 4).any())
    embedding_bags_counted_rows_kernel[(programs,)](
        of.grad,
        sources,
        factors,
        bounds,
        *state,
        counters,
        num_lookups,
        of.grad.numel(),
        num_tables,
        most_counted,
        *numbers,
        ALIGNED=is_aligned,
        **options,
    )
    if most_slices:
        row_stride = triton.cdiv(int(of.layout[:, 2].max()), 4) * 4
        sums = torch.empty(most_slices, row_stride, dtype=torch.float32, device=device)
        arrivals = torch.zeros(most_slices, dtype=torch.int32, device=device)
        embedding_bags_long_rows_kernel[(LONG_PROGRAMS * gpu(device).multiprocessors,)](
            of.grad, sources, factors, bounds, long_rows, sums, arrivals, *state, counters, of.grad.numel(), row_stride, *numbers,
            ALIGNED=is_aligned, **options,
        )  # fmt: skip


def _sort(of, of_bags, lookups, state, numbers, has_factors, most_counted, options) -> None:
    """Sum the rows of tables of many rows, whose lookups are sorted."""
    num_lookups, num_all, device, tables = lookups[0], lookups[1], of.grad.device, state[-1]
    num_tables, fields = tables.shape[0] - 1, of.layout.shape[1]
    num_rows = int((of.layout[:, 5] + of.layout[:, 1]).max())
    narrow, wide = torch.int32, torch.int64
    keys = torch.full((num_lookups,), num_rows, dtype=narrow if num_rows < 2**31 - 1 else wide, device=device)
    sources = torch.empty(num_lookups, dtype=narrow if of.grad.numel() < 2**31 else wide, device=device)
    factors = torch.empty(num_lookups, dtype=torch.float32, device=device) if has_factors else None
    sorting.embedding_bags_lookups_kernel[(triton.cdiv(num_all, sorting.BLOCK_BAGS),)](
        *of_bags, keys, sources, factors, *lookups, num_rows, most_counted, FIELDS=fields, BAGS=sorting.BLOCK_BAGS,
        LOOKUPS=sorting.BLOCK_LOOKUPS, num_warps=4,
    )  # fmt: skip
    keys, order = keys.sort(stable=True)
    sources = sources[order]
    factors = None if factors is None else factors[order]
    begins = torch.searchsorted(keys, tables[:, 5].to(keys.dtype))
    ends, block_ends = (torch.empty(num_tables, dtype=wide, device=device) for _ in range(2))
    counter = torch.empty(1, dtype=wide, device=device)
    programs = min(PROGRAMS * gpu(device).multiprocessors, num_lookups)
    is_by_row = options["KIND"].startswith("rowwise")
    sorting.embedding_bags_rows_map_kernel[(1,)](
        tables, begins, ends, block_ends, counter, num_tables, programs, FIELDS=fields, STREAM=sorting.STREAM,
        SPLIT=sorting.SPLIT, WHOLE_ROWS=is_by_row, BLOCK=sorting.BLOCK_TABLES, num_warps=16,
    )  # fmt: skip
    # Of each block of lookups the part of a row that came in, and of one that goes on. A table's last block may be short.
    row_stride = triton.cdiv(int(of.layout[:, 2].max()), 4) * 4
    is_split = num_lookups > sorting.SPLIT
    parts_of_runs = torch.zeros(2 * (num_lookups // sorting.SPLIT + num_tables) if is_split else 0, row_stride, device=device)
    sorting.embedding_bags_rows_kernel[(programs,)](
        of.grad, sources, factors, keys, parts_of_runs, *state, begins, ends, block_ends, counter, num_tables, row_stride, *numbers,
        STREAM=sorting.STREAM, SPLIT=sorting.SPLIT, ALIGNED=not bool((of.layout[:, 2] % 4).any()), **options,
    )  # fmt: skip
    if is_split:
        sorting.embedding_bags_join_kernel[(sorting.JOINING * gpu(device).multiprocessors,)](
            keys, parts_of_runs, *state, begins, block_ends, num_tables, row_stride, *numbers, SPLIT=sorting.SPLIT, **options
        )


def used_widths(layout: Tensor, *, is_by_row: bool) -> int:
    """Return the schedules that rows of a layout `[F, fields]` on the host take, a bit for each."""
    used = 0
    for width in set(layout[:, 2].tolist()):
        exponent = min(max(2, (width - 1).bit_length()), NUM_WIDTHS.value + 1 if is_by_row else 7)
        used |= 1 << ((exponent - 2) * 2 + int(width % 4 == 0))
    return used


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
    rows = _Rows(result, None, None, None, None, "none", (0.0, 0.0, 0.0, 0.0), False)
    of = _Lookups(grad, indices, offsets, per_sample_weights, device_layout, layout, batches)
    _sums_by_row(of, rows)
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
    widest, most = int(layout[:, 2].max()), MOST_COLUMNS.value << (NUM_WIDTHS.value - 6)
    if kind.startswith("rowwise") and widest > most:
        raise ValueError(f"layout: expected at most {most:,} columns for {kind} on a GPU, got {widest:,}; take {kind[8:]}")
    has_first, has_second = (bool(of) for of in STATES[kind])
    rows = _Rows(
        weights, first if has_first else None, second if has_second else None, step, learning_rate, kind,
        (eps, beta1, beta2, weight_decay), stochastic_rounding,
    )  # fmt: skip
    _sums_by_row(_Lookups(grad, indices, offsets, per_sample_weights, device_layout, layout, batches), rows)


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
