"""Attention of single samples with plain products, in float64 or the dtype that is tested, which results are checked against."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import silu

from benchmarks.attention_cases import Mask, Workload, offsets_of, time_buckets

# A sample of more scores than this over all heads is not computed in float64, unless all are that long.
REFERENCE_SCORES = 2**28


def reference(w: Workload, samples: Sequence[int], dtype: torch.dtype) -> dict[str, Tensor]:
    """Output and gradients of these samples alone, one sample after another, in `dtype` with plain products."""
    found: dict[str, list[Tensor]] = {name: [] for name in ("output", "q", "k", "v", *w.biases)}
    for sample in samples:
        queries, keys, pairs = (rows_of(of, [sample]) for of in (w.query_lengths, w.key_lengths, w.query_lengths * w.key_lengths))
        biases = [of[:, pairs] if name == "bias" else of for name, of in w.biases.items()]
        # Tables stay float32 at least.
        inputs = [
            x.to(torch.promote_types(x.dtype, dtype)).requires_grad_() for x in (w.q[queries], w.k[keys], w.v[keys], *biases)
        ]
        q, k, v = inputs[0], *(x.repeat_interleave(w.q.shape[1] // w.k.shape[1], 1) for x in inputs[1:3])
        scores = (torch.einsum("qhd,khd->hqk", q, k) * w.scale).to(torch.promote_types(dtype, torch.float32))
        for name, bias in zip(w.biases, inputs[3:], strict=True):
            scores = scores + _of_pairs(w, name, bias, queries, keys)
        weights = _weights(w, scores, queries).to(dtype)
        output = torch.einsum("hqk,khd->qhd", weights, v)
        gradients = torch.autograd.grad(output, inputs, w.upstream[queries].to(dtype))
        for of, x in zip(found.values(), (output.detach(), *gradients), strict=True):
            of.append(x)
    return {
        name: torch.stack(of).sum(0) if name in ("relative_bias", "time_bias") else torch.cat(of, dim=int(name == "bias"))
        for name, of in found.items()
    }


def _of_pairs(w: Workload, name: str, bias: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """`[H, Lq, Lk]`: what a bias adds to the scores of a sample; by tables where its queries are its keys' rows."""
    if name == "bias":
        return bias.view(-1, len(queries), len(keys))
    if name == "relative_bias":
        furthest = bias.shape[1] // 2
        return bias[:, furthest + (queries[:, None] - keys).clamp(-furthest, furthest).to(w.device)]
    times = w.times[keys]
    return bias[:, time_buckets(times[:, None] - times, bias.shape[1])]


def _weights(w: Workload, scores: Tensor, queries: Tensor) -> Tensor:
    """`[H, Lq, Lk]`: the weights of a sample's values."""
    terms, keys = w.size.terms, scores.shape[2]
    hidden = None if w.mask == Mask() else ~w.mask.seen(len(queries), keys, w.device)
    if terms.pointwise:
        weights = silu(scores) / keys
        return weights if hidden is None else weights.masked_fill(hidden, 0)
    weights = (scores if hidden is None else scores.masked_fill(hidden, -torch.inf)).softmax(-1)
    if terms.dropout:
        weights = weights * _kept(w, queries.to(w.device), keys) / (1 - terms.dropout)
    return weights


def _kept(w: Workload, queries: Tensor, keys: int) -> Tensor:
    """`[H, Lq, Lk]`: the weights that dropout leaves, by the hash of `jagged_attention`; the seed's upper half is 0."""

    def mix(x: Tensor) -> Tensor:
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            x = (x ^ (x >> shift)) * factor & 0xFFFFFFFF
        return x ^ (x >> 16)

    head, key = (torch.arange(count, device=w.device) for count in (w.size.heads, keys))
    of_row = mix((mix(queries ^ w.seed) + head[:, None] * 0x9E3779B9) & 0xFFFFFFFF)
    return mix(of_row[:, :, None] ^ mix(key)) >= round(w.size.terms.dropout * 2**32)


def rows_of(lengths: Tensor, samples: Sequence[int]) -> Tensor:
    """Indices of the rows of some samples, on the CPU."""
    offsets = offsets_of(lengths).tolist()
    return torch.cat([torch.arange(offsets[sample], offsets[sample + 1]) for sample in samples])


def some_samples(w: Workload, count: int = 16) -> list[int]:
    """Samples from the shortest that has a key to the longest that float64 has room for, evenly in order of length."""
    scores = w.query_lengths * w.key_lengths * w.size.heads
    order = [sample for sample in w.key_lengths.argsort().tolist() if 0 < scores[sample] <= REFERENCE_SCORES]
    order = order or [int(scores.argmin())]
    places = torch.linspace(0, len(order) - 1, min(count, len(order))).round().long().tolist()
    return [order[place] for place in places]
