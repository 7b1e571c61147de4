"""Embedding bags in plain PyTorch: one table after the other, by PyTorch's own pooling where it accumulates in float32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from jagged.ops.embedding_bag.optimizers import Rule


class Feature(NamedTuple):
    """A feature of a batch: its fields of the layout, its lookups, its bags, and where its output lies."""

    start: int
    rows: int
    width: int
    column: int
    is_mean: bool
    first_row: int
    table: int
    places: slice
    bags: slice
    output: Tensor


def features_of(layout: Tensor, offsets: Tensor, batches: Tensor | None, output: Tensor) -> Iterator[Feature]:
    """Walk over the features of a batch, whose `output` is `[B, width]` or, with `batches`, flat."""
    num_features = layout.shape[0]
    if batches is None:
        num_bags = (offsets.shape[0] - 1) // max(1, num_features)
        bags = [(feature * num_bags, num_bags, 0) for feature in range(num_features)]
    else:
        bags = [tuple(of) for of in batches.tolist()]
    edges = offsets[[first for first, _, _ in bags] + [offsets.shape[0] - 1]].tolist() if bags else []
    for feature, fields in enumerate(layout.tolist()):
        start, rows, width, column, is_mean, first_row, table = fields
        first, count, begin = bags[feature]
        flat = batches is not None
        out = output[begin : begin + count * width].view(count, width) if flat else output[:, column : column + width]
        places = slice(edges[feature], edges[feature + 1])
        yield Feature(start, rows, width, column, bool(is_mean), first_row, table, places, slice(first, first + count), out)


def bag_of_places(offsets: Tensor, feature: Feature) -> Tensor:
    """Return for each lookup of a feature its bag, counted from the feature's first."""
    lengths = offsets[feature.bags.start : feature.bags.stop + 1].diff()
    bags = torch.arange(lengths.shape[0], device=offsets.device)
    return torch.repeat_interleave(bags, lengths, output_size=feature.places.stop - feature.places.start)


def factors(offsets: Tensor, feature: Feature, per_sample_weights: Tensor | None, bags: Tensor) -> Tensor | None:
    """Return what each lookup's row is multiplied by, None for 1."""
    if feature.is_mean:
        return offsets[feature.bags.start : feature.bags.stop + 1].diff()[bags].reciprocal()
    return None if per_sample_weights is None else per_sample_weights[feature.places]


def table_of(weights: Tensor, feature: Feature) -> Tensor:
    """Return the table of a feature, a view `[rows, width]`."""
    return weights[feature.start : feature.start + feature.rows * feature.width].view(feature.rows, feature.width)


def embedding_bags_forward(
    weights: Tensor,
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    device_layout: Tensor,
    layout: Tensor,
    batches: Tensor | None,
    host_batches: Tensor | None,
    size: int,
    width: int,
    output_dtype: torch.dtype,
) -> Tensor:
    """Return pooled bags, `[B, width]` or, with batches of their own, flat."""
    output = weights.new_empty((size, width) if batches is None else size, dtype=output_dtype)
    for feature in features_of(layout, offsets, host_batches, output):
        table, ids = table_of(weights, feature), indices[feature.places]
        if weights.dtype in (torch.float32, torch.float64) and weights.device.type == "cpu":
            starts = offsets[feature.bags.start : feature.bags.stop + 1] - feature.places.start
            scales = None if per_sample_weights is None else per_sample_weights[feature.places].to(weights.dtype)
            feature.output.copy_(
                F.embedding_bag(
                    ids, table, starts.to(ids.dtype), mode="mean" if feature.is_mean else "sum", per_sample_weights=scales,
                    include_last_offset=True,
                )
            )  # fmt: skip
            continue
        bags = bag_of_places(offsets, feature)
        rows = table[ids.long()].to(torch.promote_types(weights.dtype, torch.float32))
        scale = factors(offsets, feature, per_sample_weights, bags)
        if scale is not None:
            rows = rows * scale[:, None].to(rows.dtype)
        feature.output.copy_(rows.new_zeros(feature.output.shape).index_add_(0, bags, rows))
    return output


def _gradients_of_places(
    grad: Tensor, offsets: Tensor, per_sample_weights: Tensor | None, layout: Tensor, host_batches: Tensor | None
) -> Iterator[tuple[Feature, Tensor, Tensor]]:
    """Walk over the features with their lookups' bags and gradients of the rows that they read."""
    for feature in features_of(layout, offsets, host_batches, grad):
        bags = bag_of_places(offsets, feature)
        of_rows = feature.output[bags].to(torch.promote_types(grad.dtype, torch.float32))
        scale = factors(offsets, feature, per_sample_weights, bags)
        yield feature, bags, of_rows if scale is None else of_rows * scale[:, None].to(of_rows.dtype)


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
    sums = grad.new_zeros(num_elements, dtype=torch.promote_types(weights_dtype, torch.float32))
    for feature, _, of_rows in _gradients_of_places(grad, offsets, per_sample_weights, layout, host_batches):
        table_of(sums, feature).index_add_(0, indices[feature.places].long(), of_rows.to(sums.dtype))
    return sums.to(weights_dtype)


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
    for feature in features_of(layout, offsets, host_batches, grad):
        rows = table_of(weights, feature)[indices[feature.places].long()].to(wide)
        result[feature.places] = (rows * feature.output[bag_of_places(offsets, feature)].to(wide)).sum(1).to(dtype)
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
    rule = Rule(kind, eps, beta1, beta2, weight_decay, stochastic_rounding)
    parts: dict[int, list[tuple[Feature, Tensor, Tensor]]] = {}
    for feature, _, of_rows in _gradients_of_places(grad, offsets, per_sample_weights, layout, host_batches):
        parts.setdefault(feature.table, []).append((feature, indices[feature.places].long(), of_rows))
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
        count = step.to(grad.dtype)
        unbiased = mean / (1 - rule.beta1**count), variance / (1 - rule.beta2**count)
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
