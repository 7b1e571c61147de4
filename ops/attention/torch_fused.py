"""Softmax attention on a CPU by PyTorch's fused kernel, samples of equal lengths side by side: nothing is padded, no score kept.

Samples are taken in order of their lengths, the longest first. Rows that stand in that order already, as those of batches do
whose samples come so, are read where they are; others are copied once. Samples of few keys come last and are left to the caller.
The kernel's backward subtracts products of outputs and upstream gradients, of which rounding leaves more than of the means by
weights that `torch_impl` takes: of few keys too much.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from jagged.ops.attention.spec import Inputs, Options, Outputs

# Samples of at most so many keys are left to the caller.
FEW_KEYS = 8
# The kernel is called once for samples of equal lengths: that pays where so many share a call, or it has so many scores.
_SAMPLES, _SCORES = 4, 2**13
# Which offsets rows have: those of queries (0) or of keys (1).
_SIDES = {"q": 0, "k": 1, "v": 1}
_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass
class Plan:
    """The order of a batch's samples by their lengths, and which of them the kernel takes.

    Attributes:
        orders: rows of queries, and of keys, in the order of their samples; None where they stand so.
        offsets: of queries, and of keys, in that order, int64 `[B + 1]`.
        few: how many samples, the last ones, are the caller's.
        sizes: of each call of the kernel the number of samples and how many queries and keys each has.
    """

    orders: tuple[Tensor | None, Tensor | None]
    offsets: tuple[Tensor, Tensor]
    few: int
    sizes: list[tuple[int, int, int]]

    @classmethod
    def of(cls, x: Inputs, o: Options) -> Plan | None:
        """None where the kernel does not know what is asked, or where it would not pay."""
        if not _is_plain(x, o):
            return None
        offsets = [x.q_offsets.to(torch.int64)]
        if x.k_offsets is not None:
            offsets.append(x.k_offsets.to(torch.int64))
        if not all(_are_right(of, rows.shape[0]) for of, rows in zip(offsets, (x.q, x.k), strict=False)):
            return None
        queries, keys = offsets[0].diff(), offsets[-1].diff()
        # Samples of few keys, and those without queries, are all alike.
        kinds = ((keys << 32) + queries).masked_fill_((keys <= FEW_KEYS) | (queries == 0), 0)
        order = None
        if bool((kinds.diff() > 0).any()):
            kinds, order = kinds.sort(stable=True, descending=True)
        found, counts = (of.tolist() for of in kinds.unique_consecutive(return_counts=True))
        few = counts.pop() if found[-1] == 0 else 0
        sizes = [(count, kind & (2**32 - 1), kind >> 32) for kind, count in zip(found, counts, strict=False)]
        samples, scores = sum(counts), x.q.shape[1] * sum(n * lq * lk for n, lq, lk in sizes)
        if not sizes or (samples < _SAMPLES * len(sizes) and scores < _SCORES * len(sizes)):
            return None
        if order is None:
            return cls((None, None), (offsets[0], offsets[-1]), few, sizes)
        sorted_ = [_sorted(of, order) for of in offsets]
        return cls((sorted_[0][1], sorted_[-1][1]), (sorted_[0][0], sorted_[-1][0]), few, sizes)

    def ordered(self, x: Inputs) -> Inputs:
        """Queries, keys and values in the order of the samples, in the dtype that is computed in."""
        dtype = torch.promote_types(x.q.dtype, torch.float32)
        return x._replace(**{name: self.in_order(getattr(x, name), side).to(dtype) for name, side in _SIDES.items()})

    def in_order(self, rows: Tensor, side: int) -> Tensor:
        """Rows `[S, H, D]` of queries (0) or keys (1) in the order of the samples, numbers of a row side by side."""
        order = self.orders[side]
        if order is not None:
            return rows.flatten(1).index_select(0, order).view(rows.shape)
        # The kernel takes it for granted, and would read others' numbers.
        return rows if rows.stride(-1) == 1 else rows.contiguous()

    def as_given(self, rows: Tensor, side: int) -> Tensor:
        """The rows again as the batch has them."""
        order = self.orders[side]
        if order is None:
            return rows
        place = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order)))
        return rows.flatten(1).index_select(0, place).view(rows.shape)

    def last(self, x: Inputs) -> tuple[slice, slice, Inputs]:
        """The caller's samples, of rows in order: which queries and keys they are, and the inputs."""
        offsets = [of[len(of) - 1 - self.few :] for of in self.offsets]
        queries, keys = (slice(int(of[0]), None) for of in offsets)
        q_offsets, k_offsets = (of - of[0] for of in offsets)
        of_keys = None if x.k_offsets is None else k_offsets
        return queries, keys, Inputs(x.q[queries], x.k[keys], x.v[keys], q_offsets, of_keys)

    def parts(self, *rows: tuple[Tensor, int]) -> Iterator[tuple[Tensor, ...]]:
        """Yield for each call of the kernel views `[n, H, L, ...]` of rows in order, each `(rows, side)`."""
        # Plain numbers, since there may be as many calls as lengths.
        each = [(of, of.storage_offset(), of.shape[1], of.shape[2:], of.stride(), side) for of, side in rows]
        begin = [0, 0]
        for count, *lengths in self.sizes:
            yield tuple(
                [
                    of.as_strided(
                        (count, heads, lengths[side], *width),
                        (lengths[side] * strides[0], strides[1], strides[0], *strides[2:]),
                        first + begin[side] * strides[0],
                    )
                    for of, first, heads, width, strides, side in each
                ]
            )
            begin = [begin[0] + count * lengths[0], begin[1] + count * lengths[1]]


def _is_plain(x: Inputs, o: Options) -> bool:
    """Whether the kernel knows all that is asked: softmax of as many key heads as query heads, of one width, also causal."""
    extras = (x.num_targets, x.relative_bias, x.time_bias, x.bias, x.dropout_seed)
    return (
        x.q.is_cpu
        and not (o.pointwise or o.softcap or o.window or o.num_contextual)
        and all(extra is None for extra in extras)
        and x.q.shape[1:] == x.k.shape[1:] == x.v.shape[1:]
        # Its causal queries begin with their keys.
        and (not o.causal or x.k_offsets is None)
        and x.q_offsets.shape[0] > 1
    )


def _are_right(offsets: Tensor, total: int) -> bool:
    return int(offsets[0]) == 0 and int(offsets[-1]) == total and bool((offsets.diff() >= 0).all())


def _sorted(offsets: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """Offsets of the samples in their order, and the rows in it."""
    lengths = offsets.diff().index_select(0, order)
    found = torch.cat([offsets.new_zeros(1), lengths.cumsum(0)])
    moved = offsets[:-1].index_select(0, order) - found[:-1]
    return found, torch.arange(int(found[-1])) + torch.repeat_interleave(moved, lengths)


def forward(x: Inputs, o: Options, plan: Plan, of_few: Callable[[Inputs, Options], Outputs]) -> Outputs:
    """Return output and log-sum-exp; `of_few` returns those of samples of few keys."""
    dtype = x.q.dtype
    x = plan.ordered(x)
    output, lse = torch.empty_like(x.q, memory_format=torch.contiguous_format), x.q.new_empty(x.q.shape[:2])
    if plan.few:
        queries, _, last = plan.last(x)
        of_last = of_few(last, o)
        output[queries], lse[queries] = of_last.output, of_last.lse.t()
    for q, k, v, *targets in plan.parts((x.q, 0), (x.k, 1), (x.v, 1), (output, 0), (lse, 0)):
        results = _KERNEL(q, k, v, 0.0, o.causal, scale=o.scale)
        for target, result in zip(targets, results, strict=True):
            target.copy_(result)
    return Outputs(plan.as_given(output, 0).to(dtype), plan.as_given(lse, 0).t().contiguous())


def backward(
    grads: Outputs, x: Inputs, out: Outputs, o: Options, plan: Plan, of_few: Callable[..., Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Return the gradients of q, k and v; `of_few` returns those of samples of few keys, as the operator's backward does."""
    x = plan.ordered(x)
    upstream, output, lse = (plan.in_order(rows, 0).to(x.q.dtype) for rows in (grads.output, out.output, out.lse.t()))
    found = {name: torch.empty_like(getattr(x, name), memory_format=torch.contiguous_format) for name in _SIDES}
    if plan.few:
        queries, keys, last = plan.last(x)
        of_last = of_few(grads._replace(output=upstream[queries]), last, Outputs(output[queries], lse[queries].t()), o, {})
        for name, side in _SIDES.items():
            found[name][(queries, keys)[side]] = of_last[name]
    given = (upstream, 0), (x.q, 0), (x.k, 1), (x.v, 1), (output, 0), (lse, 0)
    for views in plan.parts(*given, *((found[name], side) for name, side in _SIDES.items())):
        results = _BACKWARD(*views[:-3], 0.0, o.causal, scale=o.scale)
        for target, result in zip(views[-3:], results, strict=True):
            target.copy_(result)
    return {name: plan.as_given(rows, _SIDES[name]) for name, rows in found.items()}
