"""Sums of each row's gradients, which are stored or update the row: which kernels bring a batch's lookups together, and how many.

The lookups of each row are brought together, in their order, and summed in that order: tables of few rows by counting
(`counting.py`, `rows.py`), others by a sort (`sorting.py`; small batches are sorted by `merging.py`). A plan says how few, or
`most_counted`. What becomes of a sum is in `updates.py`.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_right
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jagged.ops._shared.backends import INTERPRETED
from jagged.ops._shared.launch import Launcher
from jagged.ops._shared.matrices import gpu
from jagged.ops._shared.sizes import cdiv, next_power_of_2
from jagged.ops.embedding_bag.fields import BATCH
from jagged.ops.embedding_bag.layout import MOST_COUNTED
from jagged.ops.embedding_bag.optimizers import MOMENTS, SQUARES, STATES
from jagged.ops.embedding_bag.plans import PROGRAMS
from jagged.ops.embedding_bag.spec import (
    Gradient,
    Nothing,
    Order,
    SamplesInputs,
    UpdateInputs,
    UpdateOptions,
    WeightsInputs,
    WeightsOptions,
)
from jagged.ops.embedding_bag.triton import counting, merging, sorting
from jagged.ops.embedding_bag.triton.rows import embedding_bags_counted_rows_kernel, embedding_bags_long_rows_kernel, row_columns
from jagged.ops.embedding_bag.triton.schedules import MOST_COLUMNS, known_of
from jagged.ops.embedding_bag.triton.updates import NUM_WIDTHS, takes_whole_rows

# Tables, and lookups of all, below which nothing is counted, and for each row, whether it is read or not
# (docs/internals/embedding_bag.md, "Which tables are counted").
FEWEST_TABLES, FEWEST_LOOKUPS, LOOKUPS_OF_ROW = 128, 1 << 17, 0.5
# Features, each filled in by a launch of its own, up to which the feature of each bag is not found by PyTorch.
FEW_FEATURES = 8
# Programs that sum long rows, for each multiprocessor.
LONG_PROGRAMS = 16

_launch_chunks = Launcher(counting.embedding_bags_chunks_kernel)
_launch_orders = Launcher(counting.embedding_bags_orders_kernel)
_launch_bounds = Launcher(counting.embedding_bags_bounds_kernel)
_launch_sources = Launcher(counting.embedding_bags_sources_kernel)
_launch_counted_rows = Launcher(embedding_bags_counted_rows_kernel)
_launch_long_rows = Launcher(embedding_bags_long_rows_kernel)
_launch_lookups = Launcher(sorting.embedding_bags_lookups_kernel)
_launch_chunk_sort = Launcher(merging.embedding_bags_chunk_sort_kernel)
_launch_merge = Launcher(merging.embedding_bags_merge_kernel)
_launch_rows = Launcher(sorting.embedding_bags_rows_kernel)
_launch_groups = Launcher(sorting.embedding_bags_groups_kernel)
_launch_join = Launcher(sorting.embedding_bags_join_kernel)


def bags_of_batch(x: WeightsInputs | SamplesInputs | UpdateInputs) -> tuple[int, int, int]:
    """Return the bags of all features and of one, and the stride of the gradient's rows."""
    num_all = x.offsets.shape[0] - 1
    return (num_all, max(1, x.grad.shape[0]), x.grad.shape[1]) if x.batches is None else (num_all, 1, 0)


def feature_of_bags(x: WeightsInputs | SamplesInputs | UpdateInputs) -> Tensor | None:
    """Return the feature of each bag where features differ in their bags."""
    if x.batches is None:
        return None
    num_all, num_features = x.offsets.shape[0] - 1, x.host_layout.shape[0]
    if x.host_batches is None or num_features > FEW_FEATURES:
        features = torch.arange(num_features, dtype=torch.int32, device=x.grad.device)
        return features.repeat_interleave(x.batches[:, BATCH.num_bags], output_size=num_all)
    # A tenth of the time where one has a million bags.
    found = torch.empty(num_all, dtype=torch.int32, device=x.grad.device)
    for feature, own in enumerate(found.split(x.host_batches[:, BATCH.num_bags].tolist())):
        own.fill_(feature)
    return found


def most_counted(num_tables: int, num_lookups: int, num_rows: int, most_rows: int) -> int:
    """Return the most rows of tables whose lookups are counted where no plan says it: of all tables, or of none.

    Counting goes through a table's lookups in order, so it takes many tables to be done at once, and through all of its rows. A
    sort is of all lookups, whichever it is for: to count some of the tables beside it saves little.

    Args:
        num_tables: in all.
        num_lookups: of all of them.
        num_rows: of all of them.
        most_rows: of the largest one.
    """
    if num_tables < FEWEST_TABLES or most_rows > MOST_COUNTED:
        return 0
    return MOST_COUNTED if num_lookups >= max(FEWEST_LOOKUPS, LOOKUPS_OF_ROW * num_rows) else 0


class _Rows(NamedTuple):
    """What is stored or updated, and how."""

    weights: Tensor
    first: Tensor | None
    second: Tensor | None
    last: Tensor | None
    step: Tensor | None
    rate: Tensor | None
    kind: str
    # Epsilon, the betas, and the weights' decay.
    numbers: tuple[float, float, float, float]
    is_stochastic: bool
    is_decoupled: bool
    max_norm: float | None

    @property
    def are_whole(self) -> bool:
        """Whether all columns of a row are updated at once."""
        is_whole: bool = takes_whole_rows(self.kind, self.max_norm is not None, self.last is not None)
        return is_whole

    def corrections(self) -> Tensor | None:
        """Return what running means are divided by, and where updates are missed logarithms of what each multiplies by."""
        if self.kind not in MOMENTS:
            return None
        assert self.step is not None
        assert self.rate is not None
        _, *betas, weight_decay = self.numbers
        steps = self.step.double()
        # Near 0 for betas near 1, which float32 has no digits for.
        found = [1 - torch.pow(beta, steps) for beta in betas]
        if self.last is not None:
            kept = (1 - self.rate.double() * weight_decay).clamp(min=0)
            found += [*(torch.full_like(steps, math.log2(beta) if beta else -math.inf) for beta in betas), kept.log2()]
        return torch.stack(found).float()


class _Sums:
    """Sums of the gradients of each row that was read; launches that bring lookups together, and store or apply the sums."""

    def __init__(
        self, x: WeightsInputs | UpdateInputs, rows: _Rows, counted_rows: int | None, *, is_sorted: bool = False
    ) -> None:
        self.x, self.grad, self.layout = x, x.grad, x.host_layout
        self.known, self.device, self.num_lookups = known_of(self.layout), x.grad.device, x.indices.shape[0]
        self.num_all, self.num_bags, stride = bags_of_batch(x)
        num_features = self.layout.shape[0]
        self.num_tables = x.layout.shape[0] - 2 * num_features - 1 - self.known.num_parts
        if counted_rows is None:
            most_rows = self.known.rows[-1] if self.known.rows else 0
            counted_rows = most_counted(self.num_tables, self.num_lookups, self.known.num_rows, most_rows)
        self.most = min(counted_rows, MOST_COUNTED)
        self.tables = x.layout[num_features : num_features + self.num_tables + 1]
        self.programs = PROGRAMS * gpu(self.device).multiprocessors
        self.row_stride = cdiv(self.known.widest, 4) * 4
        self.has_factors = x.per_sample_weights is not None or self.known.has_means
        self.of_lookups = x.indices, x.offsets, x.per_sample_weights, x.layout, x.batches
        self.sizes = self.num_lookups, self.num_all, self.num_bags, stride
        self.state = rows.weights, rows.first, rows.second, rows.last, rows.step, rows.corrections(), rows.rate, self.tables
        # An update may be given room for the order that the sort finds, or that order.
        self.order: Order | None = None
        if isinstance(x, UpdateInputs) and x.keys is not None and x.sources is not None:
            self.order = Order(x.keys, x.sources, x.factors)
        self.is_sorted = is_sorted
        self.numbers = *rows.numbers, 1 - rows.numbers[1], 1 - rows.numbers[2], rows.max_norm
        self.are_whole = rows.are_whole
        self.widenings = used_widenings(self.known.widths, is_aligned=self.known.is_aligned) if self.are_whole else 1
        self.options: dict[str, Any] = {
            "KIND": rows.kind,
            "IS_STOCHASTIC": rows.is_stochastic and rows.weights.dtype == torch.bfloat16,
            "IS_DECOUPLED": rows.is_decoupled,
            "WHOLE_ROWS": self.are_whole,
            "USED": used_widths(self.known.widths, are_whole=self.are_whole),
            "num_warps": 1,
        }

    def take(self) -> None:
        """Sum, and store or apply the sums."""
        if not self.num_lookups or not self.num_all:
            return
        num_counted = bisect_right(self.known.rows, self.most)
        if num_counted:
            self._count(self.most, num_counted)
        if num_counted < len(self.known.rows):
            self._sort(self.most)

    def _empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def _count(self, most: int, num_counted: int) -> None:
        """Sum the rows of tables of up to `most` rows, which so many features read, by counting."""
        num_features, num_lookups = self.layout.shape[0], self.num_lookups
        is_nvidia = not INTERPRETED and torch.version.hip is None
        place_dtype = torch.int32 if num_lookups < 2**31 else torch.int64
        begins = self._empty(4, num_features + 1, dtype=torch.int64)
        chunk_begins, block_begins, place_begins, count_begins = begins
        counters = self._empty(2, dtype=torch.int64)
        of_features = self.x.offsets, self.x.layout, self.x.batches
        _launch_chunks(
            (1,),
            *of_features, *begins, counters, num_lookups, num_features, self.num_bags, self.programs, most,
            BLOCK=min(counting.BLOCK_FEATURES, next_power_of_2(num_features)), num_warps=16,
        )  # fmt: skip
        # Full chunks and the last ones of features; chunks that are longer have more counts, but no more for each lookup.
        full_chunks = num_lookups >> counting.CHUNK_BITS.value
        most_chunks = full_chunks + num_counted
        largest = min(self.known.rows[num_counted - 1], 16_384)
        num_counts = full_chunks * largest + self.known.sums_of_rows[num_counted] + 4 * most_chunks
        starts, places = self._empty(num_counts, dtype=torch.int16), self._empty(num_counts, dtype=place_dtype)
        positions = self._empty(num_lookups, dtype=torch.int16)
        warps, room = (counting.ORDER_WARPS, counting.MOST_SHARED) if is_nvidia else (1, 0)
        _launch_orders(
            (most_chunks,),
            self.x.indices, *of_features, chunk_begins, count_begins, starts, places, positions, num_lookups, num_features,
            self.num_bags, BLOCK=counting.ORDERED_ROWS, ROOM=room, WARPS=warps, MATCH=is_nvidia, num_warps=warps,
        )  # fmt: skip
        bounds = self._empty(self.known.num_rows + self.num_tables, dtype=place_dtype)
        most_slices = 2 * (num_lookups // counting.LONG.value)
        long_rows = self._empty(most_slices, counting.LONG_FIELDS.value, dtype=torch.int64)
        arrivals = self._empty(most_slices, dtype=torch.int32)
        _launch_bounds(
            (self.num_tables, counting.BOUNDS_PROGRAMS),
            self.tables, self.x.layout, chunk_begins, count_begins, place_begins, starts, places, bounds, long_rows, arrivals,
            counters, most, BLOCK=counting.BLOCK_ROWS, num_warps=counting.BOUNDS_WARPS,
        )  # fmt: skip
        sources = self._empty(num_lookups + 2, dtype=torch.int32 if self.grad.numel() < 2**31 else torch.int64)
        factors = self._empty(num_lookups, dtype=torch.float32) if self.has_factors else None
        _launch_sources(
            (num_lookups // counting.BLOCK_PLACES.value + num_counted,),
            *self.of_lookups, block_begins, count_begins, starts, places, positions, sources, factors, num_lookups, num_features,
            *self.sizes[2:], SHARED=is_nvidia and factors is None and sources.dtype == torch.int32,
            num_warps=counting.PLACES_WARPS,
        )  # fmt: skip
        of_rows = self.grad, sources, factors, bounds
        _launch_counted_rows(
            (self.programs,),
            *of_rows, *self.state, counters, self.grad.numel(), self.num_tables, most, *self.numbers,
            ALIGNED=self.known.is_aligned, **self.options | {"USED": self.widenings},
        )  # fmt: skip
        if most_slices:
            sums = self._empty(most_slices, self.row_stride, dtype=torch.float32)
            _launch_long_rows(
                (LONG_PROGRAMS * gpu(self.device).multiprocessors,),
                *of_rows, long_rows, sums, arrivals, *self.state, counters, self.grad.numel(), self.row_stride, *self.numbers,
                ALIGNED=self.known.is_aligned, **self.options,
            )  # fmt: skip

    def _sorted(self, most: int) -> Order:
        """Return the lookups of tables of more than `most` rows by their rows, those of a row in their order."""
        num_lookups = self.num_lookups
        narrow, wide = torch.int32, torch.int64
        no_row = self.known.num_rows
        keys = self._empty(num_lookups, dtype=narrow if no_row < 2**31 - 1 else wide)
        sources = self._empty(num_lookups, dtype=narrow if self.grad.numel() < 2**31 else wide)
        factors = self._empty(num_lookups, dtype=torch.float32) if self.has_factors else None
        is_single = self.num_all >= sorting.MANY_SINGLES and 2 * num_lookups <= 3 * self.num_all
        of_program = sorting.BLOCK_BAGS * (sorting.BLOCK_LOOKUPS if is_single else 1)
        _launch_lookups(
            (cdiv(self.num_all, of_program),),
            *self.of_lookups, feature_of_bags(self.x), keys, sources, factors, *self.sizes, no_row, most, BAGS=sorting.BLOCK_BAGS,
            LOOKUPS=sorting.BLOCK_LOOKUPS, SINGLES=is_single, num_warps=4,
        )  # fmt: skip
        order = self.order
        if order is None:
            order = Order(
                torch.empty_like(keys), torch.empty_like(sources), None if factors is None else torch.empty_like(factors)
            )
        if merging.is_merged(num_lookups, self.num_tables):
            chunks = cdiv(num_lookups, merging.CHUNK)
            pairs = self._empty(chunks * merging.CHUNK, dtype=wide)
            _launch_chunk_sort((chunks,), keys, pairs, num_lookups, CHUNK=merging.CHUNK, num_warps=merging.WARPS)
            _launch_merge(
                (cdiv(num_lookups, merging.RANKED),),
                pairs, sources, factors, *order, num_lookups, CHUNK=merging.CHUNK, RANKED=merging.RANKED,
                num_warps=merging.WARPS,
            )  # fmt: skip
            return order
        places = self._empty(num_lookups, dtype=wide)
        torch.sort(keys, stable=True, out=(order.keys, places))
        torch.index_select(sources, 0, places, out=order.sources)
        if factors is not None:
            torch.index_select(factors, 0, places, out=order.factors)
        return order

    def _sort(self, most: int) -> None:
        """Sum the rows of tables of more than `most` rows, whose lookups are sorted."""
        keys, sources, factors = self.order if self.is_sorted and self.order is not None else self._sorted(most)
        size = sorting.block_size(self.num_lookups)
        num_blocks = cdiv(self.num_lookups, size)
        of_blocks = self.num_lookups, size, self.known.num_rows
        # Of each block the part of a row that came in, and of one that goes on. Rows that have parts go through all of a block.
        is_split = num_blocks > 2
        parts_of_runs = self._empty(2 * num_blocks if is_split else 0, self.row_stride, dtype=torch.float32)
        _launch_rows(
            (num_blocks,),
            self.grad, sources, factors, keys, parts_of_runs, *self.state, *of_blocks, self.grad.numel(), self.num_tables,
            self.row_stride, *self.numbers, ALIGNED=self.known.is_aligned, MOST=sorting.MOST_LOOKUPS.value,
            **self.options | {"USED": self.widenings},
        )  # fmt: skip
        group = sorting.GROUPED_BLOCKS if num_blocks >= sorting.FEWEST_GROUPED else sorting.NO_GROUP
        if num_blocks >= 2 * group:
            _launch_groups(
                (num_blocks // group,),
                keys, parts_of_runs, self.tables, *of_blocks, self.num_tables, self.row_stride, BLOCKS=group,
                COLUMNS=sorting.GROUPED_COLUMNS, num_warps=sorting.GROUPING_WARPS,
            )  # fmt: skip
        if is_split:
            programs = min(cdiv(num_blocks, sorting.JOINED_BLOCKS), sorting.JOINING * gpu(self.device).multiprocessors)
            _launch_join(
                (programs,),
                keys, parts_of_runs, *self.state, *of_blocks, group, self.num_tables, self.row_stride, *self.numbers,
                BLOCKS=sorting.JOINED_BLOCKS, **self.options | {"num_warps": sorting.JOINING_WARPS},
            )  # fmt: skip


@functools.cache
def used_widths(widths: tuple[int, ...], *, are_whole: bool) -> int:
    """Return the schedules that rows of some widths take, a bit for each."""
    used = 0
    for width in widths:
        exponent = min(max(2, (width - 1).bit_length()), NUM_WIDTHS.value + 1 if are_whole else 7)
        used |= 1 << ((exponent - 2) * 2 + int(width % 4 == 0))
    return used


@functools.cache
def used_widenings(widths: tuple[int, ...], *, is_aligned: bool) -> int:
    """Return by which powers of two rows of some widths are wider than `row_columns`, a bit for each exponent."""
    columns, used = row_columns(is_aligned), 0
    for width in widths:
        used |= 1 << (cdiv(width, columns) - 1).bit_length()
    return used


def weights_backward(x: WeightsInputs, o: WeightsOptions) -> Gradient:
    """Store the sums."""
    result = x.grad.new_zeros(o.num_elements, dtype=o.dtype)
    rows = _Rows(result, None, None, None, None, None, "none", (0.0, 0.0, 0.0, 0.0), False, True, None)
    _Sums(x, rows, o.counted_rows).take()
    return Gradient(result)


def update(x: UpdateInputs, o: UpdateOptions) -> Nothing:
    """Change the rows that were read, and their states, by the sums."""
    has_first, has_second = (bool(of) for of in STATES[o.kind])
    rows = _Rows(
        x.weights, x.first if has_first else None, x.second if has_second else None, x.last, x.step, x.learning_rate, o.kind,
        (o.eps, o.beta1, o.beta2, o.weight_decay), o.stochastic_rounding, o.is_decoupled, o.max_norm,
    )  # fmt: skip
    widest, most = known_of(x.host_layout).widest, MOST_COLUMNS.value << (NUM_WIDTHS.value - 6)
    if rows.are_whole and widest > most:
        needed, cure = o.kind, f"take {'adagrad' if o.kind == 'rowwise_adagrad' else 'adam'}"
        if not takes_whole_rows(o.kind, False, False):
            needed, cure = ("max_norm" if o.max_norm is not None else "decay_missed_steps"), "leave it out"
        if o.kind == SQUARES:
            needed, cure = "the norm of gradients", "leave clipping out"
        raise ValueError(f"layout: expected at most {most:,} columns for {needed} on a GPU, got {widest:,}; {cure}")
    _Sums(x, rows, o.counted_rows, is_sorted=o.is_sorted).take()
    return Nothing()
