"""Embedding bags in plain PyTorch: one table after the other, by PyTorch's own pooling where it accumulates in float32."""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from jagged.ops._shared.offsets import covering
from jagged.ops._shared.rounding import rounded
from jagged.ops.embedding_bag.checks import refuse_wrong_ids
from jagged.ops.embedding_bag.fields import BATCH, FEATURE, OfBatch, OfFeature
from jagged.ops.embedding_bag.optimizers import ADAGRADS, ADAMS, SQUARES
from jagged.ops.embedding_bag.spec import (
    Gradient,
    Inputs,
    Lookups,
    Nothing,
    Options,
    Outputs,
    SamplesInputs,
    SamplesOptions,
    SeparateInputs,
    SeparateOptions,
    UpdateInputs,
    UpdateOptions,
    WeightsInputs,
    WeightsOptions,
    new_output,
)

# From here on glibc gives what is freed back to the kernel at once; smaller blocks are used again as they are.
LARGE_BYTES = 32 << 20
# Numbers of gradients that an update takes at once.
UPDATED_ELEMENTS = 1 << 20
# Lookups for each row of a table from which their gradients are added up in float64.
MANY_LOOKUPS = 8


class Feature(NamedTuple):
    """A feature of a batch: what the layout says of it, where its lookups lie, and its bags' lengths, or their offsets from 0."""

    of: OfFeature
    places: slice
    bags: Tensor


def features_of(x: Lookups, *, with_offsets: bool = False) -> Iterator[Feature]:
    """Walk over the features of a batch with their bags' lengths, or offsets; over none where there is no bag."""
    layout, batches, offsets, total = x.host_layout, x.host_batches, x.offsets, x.indices.shape[0]
    num_features, num_bags = layout.shape[0], offsets.shape[0] - 1
    if not num_bags:
        return
    counts = [num_bags // num_features] * num_features if batches is None else batches[:, BATCH.num_bags].tolist()
    firsts = [0, *accumulate(counts)]
    begins = (offsets[:: counts[0]] if batches is None else offsets[firsts]).tolist()
    lengths = offsets.diff()
    if begins[0] != 0 or begins[-1] != total or int(lengths.min()) < 0:
        offsets = covering(offsets, total).to(offsets.dtype)
        begins, lengths = offsets[firsts].tolist(), offsets.diff()
    of_bags: Sequence[Tensor]
    if not with_offsets:
        of_bags = lengths.split(counts)
    elif batches is None:
        bags = offsets.unfold(0, counts[0] + 1, counts[0])
        of_bags = (bags - bags[:, :1]).unbind()
    else:
        ends = zip(firsts, counts, begins, strict=False)
        of_bags = [offsets[first : first + count + 1] - begin for first, count, begin in ends]
    for number, fields in enumerate(layout.tolist()):
        yield Feature(OfFeature._make(fields), slice(begins[number], begins[number + 1]), of_bags[number])


def parts_of(x: WeightsInputs | SamplesInputs | UpdateInputs) -> Sequence[Tensor]:
    """Return each feature's part `[B, width]` of the output's gradient."""
    if x.host_batches is None:
        return x.grad.split_with_sizes(x.host_layout[:, FEATURE.width].tolist(), 1)
    return bags_in(x.grad, x.host_layout, x.host_batches)


def bags_in(flat: Tensor, layout: Tensor, batches: Tensor) -> list[Tensor]:
    """Return each feature's bags `[B, width]` as a view of the flat output, or of its gradient."""
    widths, begin = layout[:, FEATURE.width].tolist(), flat.storage_offset()
    shapes = zip(map(OfBatch._make, batches.tolist()), widths, strict=True)
    return [flat.as_strided((of.num_bags, width), (of.output_stride, 1), begin + of.output_begin) for of, width in shapes]


def bag_of_places(feature: Feature) -> Tensor:
    """Return for each lookup of a feature its bag, counted from the feature's first."""
    return torch.repeat_interleave(feature.bags, output_size=feature.places.stop - feature.places.start)


def factors(feature: Feature, per_sample_weights: Tensor | None, bags: Tensor) -> Tensor | None:
    """Return what each lookup's row is multiplied by, None for 1."""
    if feature.of.is_mean:
        return feature.bags[bags].double().reciprocal()
    return None if per_sample_weights is None else per_sample_weights[feature.places]


def table_of(weights: Tensor, feature: Feature) -> Tensor:
    """Return the table of a feature, a view `[rows, width]`."""
    return weights.as_strided(
        (feature.of.rows, feature.of.width), (feature.of.width, 1), weights.storage_offset() + feature.of.start
    )


def scales_of(row_scales: Tensor, feature: Feature) -> tuple[Tensor, Tensor]:
    """Return what the integers of a feature's table are multiplied by and what is added, `[rows, 1]` each."""
    scale, bias = row_scales[feature.of.first_row : feature.of.first_row + feature.of.rows].split(1, 1)
    return scale, bias


def forward(x: Inputs, o: Options) -> Outputs:
    """Pool bags; a plan says nothing to PyTorch."""
    # Views of what requires a gradient cost the host twice as much, a graph or none.
    weights = x.weights.detach()
    return _forward(x, o, lambda feature: table_of(weights, feature))


def forward_of_separate(x: SeparateInputs, o: SeparateOptions) -> Outputs:
    """Pool bags of tables that lie anywhere."""
    return _forward(x, o, lambda feature: x.tables[feature.of.table].detach().contiguous())


def _forward(x: Inputs | SeparateInputs, o: Options | SeparateOptions, table_of: Callable[[Feature], Tensor]) -> Outputs:
    samples, outputs = x.per_sample_weights, []
    samples = None if samples is None else samples.detach()
    for number, feature in enumerate(features_of(x, with_offsets=True)):
        scales = None if samples is None else samples[feature.places]
        try:
            outputs.append(_pooled(table_of(feature), x.scales, feature, x.indices[feature.places], scales))
        except (RuntimeError, IndexError):
            # PyTorch says neither which feature it was nor where.
            refuse_wrong_ids(x.indices[feature.places], feature.of.rows, number, feature.places.start)
            raise
    if not outputs:
        return Outputs(new_output(x, o))
    if x.host_batches is None:
        return Outputs(torch.cat(outputs, 1).to(getattr(torch, o.output_dtype)))
    output = new_output(x, o)
    for of_feature, pooled in zip(bags_in(output, x.host_layout, x.host_batches), outputs, strict=True):
        of_feature.copy_(pooled)
    return Outputs(output)


def _pooled(table: Tensor, row_scales: Tensor | None, feature: Feature, ids: Tensor, scales: Tensor | None) -> Tensor:
    """Return the pooled bags of a feature, `[B, width]` in float32, or float64 of tables of it."""
    wide, ends = torch.promote_types(table.dtype, torch.float32), feature.bags
    if table.dtype != wide:
        # PyTorch rounds what it pools to the dtype of the table. Of a table's rows or of the lookups' whichever are fewer.
        scale, bias = (None, None) if row_scales is None else scales_of(row_scales, feature)
        if feature.of.rows > ids.shape[0]:
            table = table.index_select(0, ids)
            scale, bias = (None if of is None else of.index_select(0, ids) for of in (scale, bias))
            ids = torch.arange(ids.shape[0], dtype=ids.dtype, device=ids.device)
        table = table.to(wide)
        if scale is not None and bias is not None:
            table = table.mul_(scale).add_(bias)
    scales = None if scales is None else scales.to(wide)
    ends = ends if ends.dtype == ids.dtype else ends.to(ids.dtype)
    # Not by torch.nn.functional, whose checks take as long as a short feature.
    pooled, *_ = torch.embedding_bag(table, ids, ends, False, feature.of.is_mean, False, scales, True, None)
    return pooled


def _gradients_of_places(x: WeightsInputs | UpdateInputs, dtype: torch.dtype) -> Iterator[tuple[Feature, Tensor, Tensor]]:
    """Walk over the features with the rows that their lookups read and the rows' gradients."""
    for feature, part in zip(features_of(x), parts_of(x), strict=False):
        bags = bag_of_places(feature)
        of_rows = part.index_select(0, bags).to(dtype)
        scale = factors(feature, x.per_sample_weights, bags)
        yield feature, x.indices[feature.places], of_rows if scale is None else of_rows.mul_(scale[:, None].to(dtype))


@functools.cache
def _huge_pages() -> Callable[[int, int], object] | None:
    """Return what asks Linux for huge pages of an address and bytes after it; None elsewhere."""
    if sys.platform != "linux":
        return None
    advise = ctypes.CDLL(None).madvise
    advise.argtypes, advise.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return lambda begin, size: advise(begin, size, mmap.MADV_HUGEPAGE)


def new_in_huge_pages(like: Tensor, num_elements: int, dtype: torch.dtype) -> Tensor:
    """Return a new tensor `[num_elements]`, not filled, on the device of another; large ones in huge pages where Linux has them.

    The kernel takes longer to hand out pages of 4 KiB than to write zeros there, and pages of 2 MiB are 512 times fewer. It is
    advice, which changes no contents and may fail: the tensor's memory and how that is freed remain PyTorch's. PyTorch itself
    gives it for all tensors where THP_MEM_ALLOC_ENABLE is set.
    """
    size = num_elements * dtype.itemsize
    advise = _huge_pages() if size >= LARGE_BYTES and like.device.type == "cpu" else None
    if advise is None:
        return like.new_empty(num_elements, dtype=dtype)
    # A tensor could have been written to: by deterministic algorithms PyTorch fills what is empty.
    storage = torch.UntypedStorage(size, device="cpu")
    # From the start of the first page, without which the kernel would keep that apart and small pages as far as 2 MiB.
    begin = storage.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    advise(begin, storage.data_ptr() + size - begin)
    return like.new_empty(0, dtype=dtype).set_(storage, 0, (num_elements,), (1,))


def weights_backward(x: WeightsInputs, o: WeightsOptions) -> Gradient:
    """Sum the gradients of each row."""
    sums = new_in_huge_pages(x.grad, o.num_elements, torch.promote_types(o.dtype, torch.float32)).zero_()
    for feature, ids, of_rows in _gradients_of_places(x, sums.dtype):
        table, rows = table_of(sums, feature), ids.long()
        if len(rows) < MANY_LOOKUPS * len(table):
            table.index_add_(0, rows, of_rows)
        else:
            # Hundreds of like terms, one after the other, would round the same way each time.
            table += torch.zeros(table.shape, dtype=torch.float64, device=table.device).index_add_(0, rows, of_rows.double())
    if sums.dtype == o.dtype:
        return Gradient(sums)
    return Gradient(new_in_huge_pages(sums, o.num_elements, o.dtype).copy_(sums))


def samples_backward(x: SamplesInputs, o: SamplesOptions) -> Gradient:
    """Multiply the rows that were read with the gradients of their bags."""
    result = x.grad.new_zeros(x.indices.shape[0], dtype=o.dtype)
    wide = torch.promote_types(x.weights.dtype, torch.float32)
    for feature, part in zip(features_of(x), parts_of(x), strict=False):
        rows = table_of(x.weights, feature).index_select(0, x.indices[feature.places]).to(wide)
        result[feature.places] = (rows * part.index_select(0, bag_of_places(feature)).to(wide)).sum(1).to(o.dtype)
    return Gradient(result)


def update(x: UpdateInputs, o: UpdateOptions) -> Nothing:
    """Change the rows that were read, and their states, in place."""
    parts: dict[int, list[tuple[Feature, Tensor, Tensor]]] = {}
    wide = torch.promote_types(torch.promote_types(x.weights.dtype, x.grad.dtype), torch.float32)
    for part in _gradients_of_places(x, wide):
        parts.setdefault(part[0].of.table, []).append(part)
    for of_table in parts.values():
        feature = of_table[0][0]
        rows, place = torch.cat([ids for _, ids, _ in of_table]).unique(return_inverse=True)
        of_rows = torch.cat([of for _, _, of in of_table])
        sums = of_rows.new_zeros(rows.shape[0], feature.of.width).index_add_(0, place, of_rows)
        del of_rows
        # A rule has some numbers for each of its gradient's.
        step = max(1, UPDATED_ELEMENTS // feature.of.width)
        for some_rows, some_sums in zip(rows.split(step), sums.split(step), strict=True):
            _update_table(x, o, feature, some_rows, some_sums)
    return Nothing()


def _update_table(x: UpdateInputs, rule: UpdateOptions, feature: Feature, rows: Tensor, grad: Tensor) -> None:
    weights, first, second, step = x.weights, x.first, x.second, x.step
    table = table_of(weights, feature)
    of_rows = slice(feature.of.first_row, feature.of.first_row + feature.of.rows)
    if rule.kind == SQUARES:
        first[of_rows][rows] = grad.square().sum(1).to(first.dtype)
        return
    old = table[rows].to(grad.dtype)
    rate = x.learning_rate.to(grad.dtype)
    if rule.weight_decay and not rule.is_decoupled:
        grad = grad + rule.weight_decay * old
    is_rowwise = rule.kind.startswith("rowwise_")
    square = grad.square().mean(1, keepdim=True) if is_rowwise else grad.square()
    if rule.kind == "sgd":
        new = old - rate * grad
    elif rule.kind in ADAGRADS:
        state = first[of_rows, None] if is_rowwise else table_of(first, feature)
        now = state[rows].to(grad.dtype) + square
        state[rows] = now.to(state.dtype)
        new = old - rate * grad / (now.sqrt() + rule.eps)
        if rule.is_decoupled:
            new -= rate * rule.weight_decay * old
    else:
        beta1: float | Tensor = rule.beta1
        beta2: float | Tensor = rule.beta2
        if x.last is not None:
            last = x.last[of_rows, None]
            missed = (step - 1 - last[rows]).clamp_(min=0).double()
            last[rows] = step
            beta1, beta2 = ((beta ** (missed + 1)).to(grad.dtype) for beta in (rule.beta1, rule.beta2))
            kept = (1 - x.learning_rate.double() * rule.weight_decay).clamp(min=0)
            old = old * (kept**missed).to(grad.dtype)
        momentum = table_of(first, feature)
        mean = beta1 * momentum[rows].to(grad.dtype) + (1 - rule.beta1) * grad
        momentum[rows] = mean.to(momentum.dtype)
        state = second[of_rows, None] if is_rowwise else table_of(second, feature)
        variance = beta2 * state[rows].to(grad.dtype) + (1 - rule.beta2) * square
        state[rows] = variance.to(state.dtype)
        # In float32 little would be left of the difference to 1.
        first_bias, second_bias = (1 - beta ** step.double() for beta in (rule.beta1, rule.beta2))
        unbiased = mean / first_bias, variance / second_bias
        change = unbiased[0] / (unbiased[1].sqrt() + rule.eps) + rule.weight_decay * old
        new = old - rate * (change if rule.kind in ADAMS else _trust(old, change) * change)
    if rule.max_norm is not None:
        norm = new.norm(dim=1, keepdim=True)
        new = new * torch.where(norm > rule.max_norm, rule.max_norm / norm, 1)
    element = feature.of.start + rows[:, None] * new.shape[1] + torch.arange(new.shape[1], device=new.device)
    table[rows] = rounded(new, weights.dtype, stochastic=rule.stochastic_rounding, step=step, element=element)


def _trust(old: Tensor, change: Tensor) -> Tensor:
    """Return for each row the norm of its weights by that of the change, `[rows, 1]`; 1 where either is 0."""
    of_old, of_change = (x.norm(dim=1, keepdim=True) for x in (old, change))
    return torch.where((of_old > 0) & (of_change > 0), of_old / of_change, 1)
