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
from jagged.ops.embedding_bag.optimizers import Rule

# From here on glibc gives what is freed back to the kernel at once; smaller blocks are used again as they are.
LARGE_BYTES = 32 << 20


class Feature(NamedTuple):
    """A feature of a batch: its fields of the layout, where its lookups lie, and its bags' offsets from 0."""

    start: int
    rows: int
    width: int
    is_mean: bool
    first_row: int
    table: int
    places: slice
    ends: Tensor


def features_of(layout: Tensor, offsets: Tensor, total: int, batches: Tensor | None) -> Iterator[Feature]:
    """Walk over the features of a batch of `total` lookups; over none where there is no bag."""
    num_features, num_bags = layout.shape[0], offsets.shape[0] - 1
    if not num_bags:
        return
    counts = [num_bags // num_features] * num_features if batches is None else batches[:, 1].tolist()
    firsts = [0, *accumulate(counts)]
    edges = offsets[:: counts[0]] if batches is None else offsets[firsts]
    begins = edges.tolist()
    if begins[0] != 0 or begins[-1] != total or bool((offsets[1:] < offsets[:-1]).any()):
        offsets = covering(offsets, total).to(offsets.dtype)
        begins = offsets[firsts].tolist()
    ends: Sequence[Tensor]
    if batches is None:
        bags = offsets.unfold(0, counts[0] + 1, counts[0])
        ends = (bags - bags[:, :1]).unbind()
    else:
        ends = [offsets[first : first + count + 1] - begin for first, count, begin in zip(firsts, counts, begins, strict=False)]
    for feature, (start, rows, width, _, is_mean, first_row, table, _) in enumerate(layout.tolist()):
        places = slice(begins[feature], begins[feature + 1])
        yield Feature(start, rows, width, bool(is_mean), first_row, table, places, ends[feature])


def parts_of(grad: Tensor, layout: Tensor, batches: Tensor | None) -> Sequence[Tensor]:
    """Return each feature's part `[B, width]` of the output's gradient, `[B, width of all]` or, with `batches`, flat."""
    widths = layout[:, 2].tolist()
    if batches is None:
        return grad.split_with_sizes(widths, 1)
    counts = batches[:, 1].tolist()
    sizes = [count * width for count, width in zip(counts, widths, strict=True)]
    return [x.view(count, width) for x, count, width in zip(grad.split_with_sizes(sizes), counts, widths, strict=True)]


def bag_of_places(feature: Feature) -> Tensor:
    """Return for each lookup of a feature its bag, counted from the feature's first."""
    return torch.repeat_interleave(feature.ends.diff(), output_size=feature.places.stop - feature.places.start)


def factors(feature: Feature, per_sample_weights: Tensor | None, bags: Tensor) -> Tensor | None:
    """Return what each lookup's row is multiplied by, None for 1."""
    if feature.is_mean:
        return feature.ends.diff()[bags].double().reciprocal()
    return None if per_sample_weights is None else per_sample_weights[feature.places]


def refuse_wrong_ids(ids: Tensor, rows: int, feature: int, begin: int) -> None:
    """Refuse an id that its feature's table of so many rows does not have; the feature's ids begin at place `begin`.

    Raises:
        ValueError: for the first one.
    """
    wrong = ((ids < 0) | (ids >= rows)).nonzero()
    if wrong.numel():
        place = int(wrong[0])
        raise ValueError(
            f"indices: expected ids from 0 to {rows - 1} for feature {feature}, got {int(ids[place])} at place {begin + place}"
        )


def table_of(weights: Tensor, feature: Feature) -> Tensor:
    """Return the table of a feature, a view `[rows, width]`."""
    return weights.as_strided((feature.rows, feature.width), (feature.width, 1), weights.storage_offset() + feature.start)


def scales_of(row_scales: Tensor, feature: Feature) -> tuple[Tensor, Tensor]:
    """Return what the integers of a feature's table are multiplied by and what is added, `[rows, 1]` each."""
    scale, bias = row_scales[feature.first_row : feature.first_row + feature.rows].split(1, 1)
    return scale, bias


def embedding_bags_forward(
    weights: Tensor,
    row_scales: Tensor | None,
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    device_layout: Tensor,
    layout: Tensor,
    batches: Tensor | None,
    host_batches: Tensor | None,
    plan: Tensor | None,
    programs: int,
    size: int,
    width: int,
    output_dtype: torch.dtype,
) -> Tensor:
    """Return pooled bags, `[B, width]` or, with batches of their own, flat; a plan says nothing to PyTorch."""
    wide, outputs = torch.promote_types(weights.dtype, torch.float32), []
    for number, feature in enumerate(features_of(layout, offsets, indices.shape[0], host_batches)):
        scales = None if per_sample_weights is None else per_sample_weights[feature.places]
        try:
            outputs.append(_pooled(weights, row_scales, feature, indices[feature.places], scales, wide))
        except (RuntimeError, IndexError):
            # PyTorch says neither which feature it was nor where.
            refuse_wrong_ids(indices[feature.places], feature.rows, number, feature.places.start)
            raise
    if not outputs:
        return weights.new_empty((size, width) if batches is None else size, dtype=output_dtype)
    flat = torch.cat(outputs, 1) if batches is None else torch.cat([pooled.view(-1) for pooled in outputs])
    return flat.to(output_dtype)


def _pooled(
    weights: Tensor, row_scales: Tensor | None, feature: Feature, ids: Tensor, scales: Tensor | None, wide: torch.dtype
) -> Tensor:
    """Return the pooled bags of a feature, `[B, width]` in the dtype `wide`."""
    table, ends = table_of(weights, feature), feature.ends
    if weights.dtype != wide:
        # PyTorch rounds what it pools to the dtype of the table. Of a table's rows or of the lookups' whichever are fewer.
        scale, bias = (None, None) if row_scales is None else scales_of(row_scales, feature)
        if feature.rows > ids.shape[0]:
            table = table.index_select(0, ids)
            scale, bias = (None if of is None else of.index_select(0, ids) for of in (scale, bias))
            ids = torch.arange(ids.shape[0], dtype=ids.dtype, device=ids.device)
        table = table.to(wide)
        if scale is not None and bias is not None:
            table = table.mul_(scale).add_(bias)
    scales = None if scales is None else scales.to(wide)
    ends = ends if ends.dtype == ids.dtype else ends.to(ids.dtype)
    # Not by torch.nn.functional, whose checks take as long as a short feature.
    pooled, *_ = torch.embedding_bag(table, ids, ends, False, int(feature.is_mean), False, scales, True, None)
    return pooled


def _gradients_of_places(
    grad: Tensor, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None, layout: Tensor, batches: Tensor | None,
    dtype: torch.dtype,
) -> Iterator[tuple[Feature, Tensor, Tensor]]:  # fmt: skip
    """Walk over the features with the rows that their lookups read and the rows' gradients."""
    parts = parts_of(grad, layout, batches)
    for feature, part in zip(features_of(layout, offsets, indices.shape[0], batches), parts, strict=False):
        bags = bag_of_places(feature)
        of_rows = part.index_select(0, bags).to(dtype)
        scale = factors(feature, per_sample_weights, bags)
        yield feature, indices[feature.places], of_rows if scale is None else of_rows.mul_(scale[:, None].to(dtype))


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
    counted_rows: int | None,
) -> Tensor:
    """Return the gradient of the storage, `[num_elements]`; `counted_rows` says nothing to PyTorch."""
    sums = new_in_huge_pages(grad, num_elements, torch.promote_types(weights_dtype, torch.float32)).zero_()
    for feature, ids, of_rows in _gradients_of_places(
        grad, indices, offsets, per_sample_weights, layout, host_batches, sums.dtype
    ):
        table_of(sums, feature).index_add_(0, ids.long(), of_rows)
    if sums.dtype == weights_dtype:
        return sums
    return new_in_huge_pages(sums, num_elements, weights_dtype).copy_(sums)


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
    result = grad.new_zeros(indices.shape[0], dtype=dtype)
    wide = torch.promote_types(weights.dtype, torch.float32)
    parts = parts_of(grad, layout, host_batches)
    for feature, part in zip(features_of(layout, offsets, indices.shape[0], host_batches), parts, strict=False):
        rows = table_of(weights, feature).index_select(0, indices[feature.places]).to(wide)
        result[feature.places] = (rows * part.index_select(0, bag_of_places(feature)).to(wide)).sum(1).to(dtype)
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
    counted_rows: int | None,
) -> None:
    """Change the rows that were read, and their states, in place; `step` counts this update already.

    `counted_rows` says nothing to PyTorch.
    """
    rule = Rule(kind, eps, beta1, beta2, weight_decay, stochastic_rounding)
    parts: dict[int, list[tuple[Feature, Tensor, Tensor]]] = {}
    wide = torch.promote_types(torch.promote_types(weights.dtype, grad.dtype), torch.float32)
    for part in _gradients_of_places(grad, indices, offsets, per_sample_weights, layout, host_batches, wide):
        parts.setdefault(part[0].table, []).append(part)
    for of_table in parts.values():
        feature = of_table[0][0]
        rows, place = torch.cat([ids for _, ids, _ in of_table]).unique(return_inverse=True)
        of_rows = torch.cat([of for _, _, of in of_table])
        sums = of_rows.new_zeros(rows.shape[0], feature.width).index_add_(0, place, of_rows)
        _update_table(rule, feature, rows, sums, weights, first, second, step, learning_rate)


def _update_table(
    rule: Rule, feature: Feature, rows: Tensor, grad: Tensor, weights: Tensor, first: Tensor, second: Tensor, step: Tensor,
    learning_rate: Tensor,
) -> None:  # fmt: skip
    table = table_of(weights, feature)
    of_rows = slice(feature.first_row, feature.first_row + feature.rows)
    old = table[rows].to(grad.dtype)
    rate = learning_rate.to(grad.dtype)
    is_adam = rule.kind in ("adam", "rowwise_adam")
    if rule.weight_decay and not is_adam:
        grad = grad + rule.weight_decay * old
    if rule.kind == "sgd":
        new = old - rate * grad
    elif not is_adam:
        is_rowwise = rule.kind == "rowwise_adagrad"
        state = first[of_rows] if is_rowwise else table_of(first, feature)
        now = state[rows].to(grad.dtype) + (grad.square().mean(1) if is_rowwise else grad.square())
        state[rows] = now.to(state.dtype)
        new = old - rate * grad / ((now[:, None] if is_rowwise else now).sqrt() + rule.eps)
    else:
        momentum = table_of(first, feature)
        mean = rule.beta1 * momentum[rows].to(grad.dtype) + (1 - rule.beta1) * grad
        momentum[rows] = mean.to(momentum.dtype)
        is_rowwise = rule.kind == "rowwise_adam"
        state = second[of_rows] if is_rowwise else table_of(second, feature)
        square = grad.square().mean(1) if is_rowwise else grad.square()
        variance = rule.beta2 * state[rows].to(grad.dtype) + (1 - rule.beta2) * square
        state[rows] = variance.to(state.dtype)
        variance = variance[:, None] if is_rowwise else variance
        # In float32 little would be left of the difference to 1.
        first_bias, second_bias = (1 - beta ** step.double() for beta in (rule.beta1, rule.beta2))
        unbiased = mean / first_bias, variance / second_bias
        new = old - rate * (unbiased[0] / (unbiased[1].sqrt() + rule.eps) + rule.weight_decay * old)
    table[rows] = rounded(new, weights.dtype, stochastic=rule.stochastic_rounding, step=step, first=feature.start, rows=rows)


def rounded(new: Tensor, dtype: torch.dtype, *, stochastic: bool, step: Tensor, first: int, rows: Tensor) -> Tensor:
    """Return new weights in a dtype; to bfloat16 rounded up or down by a number that depends on the step and on the element."""
    if not stochastic or dtype != torch.bfloat16:
        return new.to(dtype)
    element = first + rows[:, None] * new.shape[1] + torch.arange(new.shape[1], device=new.device)
    bits = new.float().view(torch.int32).long() & 0xFFFFFFFF
    noise = mixed(element + (step << 40)) & 0xFFFF
    cut = (bits + noise) & 0xFFFF0000
    cut = torch.where(new.isfinite(), cut, bits)
    return torch.where(cut >= 2**31, cut - 2**32, cut).to(torch.int32).view(torch.float32).to(dtype)


def mixed(x: Tensor) -> Tensor:
    """Return 32 bits of a hash of 63-bit integers: two rounds of a multiplication by an odd number and a shift (Murmur3's)."""
    x = (x ^ (x >> 32)) & 0xFFFFFFFF
    for factor, shift in ((0x85EBCA6B, 13), (0xC2B2AE35, 16)):
        x = (x * factor) & 0xFFFFFFFF
        x = x ^ (x >> shift)
    return x
