"""Attention in PyTorch's own operators, for programs that are exported: samples padded to the longest one.

All scores of a batch exist at once, `[B, H, longest, longest]` in float32: batches that are scored are small.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jagged.ops._shared.padded import longest, pad, unpad
from jagged.ops.attention.spec import Inputs, Options, Outputs


def forward(x: Inputs, o: Options) -> Outputs:
    """Return output and log-sum-exp; there is no dropout where nothing is trained."""
    if x.dropout_seed is not None:
        raise ValueError("dropout_p: an exported program has no dropout; export the model in eval mode")
    dtype, k_offsets = torch.promote_types(x.q.dtype, torch.float32), x.q_offsets if x.k_offsets is None else x.k_offsets
    longest_query = longest(x.q_offsets)
    longest_key = longest_query if x.k_offsets is None else longest(k_offsets)
    query = pad(x.q, x.q_offsets, longest_query).to(dtype) * o.scale
    key, value = (pad(rows, k_offsets, longest_key).to(dtype) for rows in (x.k, x.v))
    group, num_samples = x.q.shape[1] // x.k.shape[1], k_offsets.shape[0] - 1
    # [B, Hkv, group * queries, D]: the query heads of a key head stand side by side.
    query = query.unflatten(2, (-1, group)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    key, value = key.transpose(1, 2), value.transpose(1, 2)
    scores = torch.matmul(query, key.transpose(2, 3)).unflatten(2, (group, longest_query))
    if o.softcap:
        scores = torch.tanh(scores / o.softcap) * o.softcap
    lengths = k_offsets.diff().to(torch.int64)
    scores = _biased(scores, x, k_offsets)
    hidden = _hidden(x, o, lengths, longest_query, longest_key)[:, None, None]
    if o.pointwise:
        weights, sums = torch.nn.functional.silu(scores).masked_fill(hidden, 0), None
    else:
        scores = scores.masked_fill(hidden, -torch.inf)
        # Where no key is seen the largest score is minus infinity, from which nothing can be subtracted.
        largest = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(dtype).min)
        weights = (scores - largest).exp()
        total = weights.sum(-1, keepdim=True)
        weights, sums = weights / total.clamp(min=1), total.log() + largest
    output = torch.matmul(weights.flatten(2, 3), value).unflatten(2, (group, longest_query))
    if o.pointwise:
        divisor = lengths.clamp(min=1).to(dtype)
        output = output / (o.normalizer or divisor.view(num_samples, 1, 1, 1, 1))
    # [B, queries, H, D]
    output = unpad(output.permute(0, 3, 1, 2, 4).flatten(2, 3), x.q_offsets, x.q.shape[0]).to(x.q.dtype)
    if sums is None:
        return Outputs(output, output.new_empty(0, dtype=dtype))
    return Outputs(output, unpad(sums.squeeze(-1).permute(0, 3, 1, 2).flatten(2, 3), x.q_offsets, x.q.shape[0]).t().contiguous())


def _history(x: Inputs, lengths: Tensor) -> Tensor:
    """Return of each sample the keys that are no targets, `[B, 1, 1]`."""
    targets = torch.zeros_like(lengths) if x.num_targets is None else x.num_targets.to(torch.int64).clamp(min=0)
    return (lengths - torch.minimum(targets, lengths)).view(-1, 1, 1)


def _positions(x: Inputs, lengths: Tensor, longest_query: int) -> Tensor:
    """Return where queries stand among the keys, `[B, queries, 1]`: the last one where the last key does."""
    shift = lengths - x.q_offsets.diff().to(torch.int64)
    return shift.view(-1, 1, 1) + torch.arange(longest_query, device=lengths.device)[:, None]


def _hidden(x: Inputs, o: Options, lengths: Tensor, longest_query: int, longest_key: int) -> Tensor:
    """Return which keys a query does not see, `[B, queries, keys]`."""
    history, position = _history(x, lengths), _positions(x, lengths, longest_query)
    key = torch.arange(longest_key, device=lengths.device)
    # Targets look back from the end of the history.
    place = position if x.num_targets is None else torch.minimum(position, history)
    end = torch.minimum(place + 1, history) if o.causal else history.expand_as(place)
    begin = torch.zeros_like(place)
    context_end = end.clamp(max=o.prefix)
    if o.window:
        begin, end = place - (o.window - 1), torch.minimum(end, place + o.reach)
        if not o.prefix:
            # Who sees the last contextual key sees them all.
            begin = begin.masked_fill(begin < o.num_contextual, 0)
    if o.num_contextual:
        sees_all = position < o.num_contextual
        end, begin = torch.where(sees_all, history, end), begin.masked_fill(sees_all, 0)
    hidden = (key >= end) | (key < begin)
    if o.window and o.prefix:
        hidden = hidden & (key >= context_end)
    if x.num_targets is not None:
        hidden = hidden & (key != position)
    return hidden | (key >= lengths.view(-1, 1, 1))


def _biased(scores: Tensor, x: Inputs, k_offsets: Tensor) -> Tensor:
    """Return scores `[B, Hkv, group, queries, keys]` with all biases."""
    _, heads, group, longest_query, longest_key = scores.shape
    lengths, key = k_offsets.diff().to(torch.int64), torch.arange(longest_key, device=scores.device)
    columns: list[tuple[Tensor, Tensor]] = []
    if x.relative_bias is not None:
        history, width = _history(x, lengths), x.relative_bias.shape[1]
        distance = torch.minimum(_positions(x, lengths, longest_query), history) - torch.minimum(key, history)
        columns.append((x.relative_bias, (distance + width // 2).clamp(0, width - 1)))
    if x.time_bias is not None:
        assert x.q_times is not None
        q_times = pad(x.q_times, x.q_offsets, longest_query)
        k_times = q_times if x.k_times is None else pad(x.k_times, k_offsets, longest_key)
        between = (q_times[:, :, None] - k_times[:, None]).abs().to(torch.float32)
        # A float's exponent and the first bit of its fraction; 1.0 has 254.
        bucket = (between.view(torch.int32) >> 22) - 253
        columns.append((x.time_bias, bucket.clamp(0, x.time_bias.shape[1] - 1)))
    if x.bias is not None and x.bias_offsets is not None:
        row, own = torch.arange(longest_query, device=scores.device)[:, None], lengths.view(-1, 1, 1)
        place = x.bias_offsets[:-1].view(-1, 1, 1) + row * own + key
        # Behind all pairs stands that of padding, so that there is one.
        of_pairs = torch.cat([x.bias, x.bias.new_zeros(heads * group, 1)], 1)
        columns.append((of_pairs, torch.where(key < own, place, 0).clamp(0, x.bias.shape[1])))
    for table, column in columns:
        of_pairs = table.index_select(1, column.flatten()).view(heads, group, *column.shape)
        scores = scores + of_pairs.permute(2, 0, 1, 3, 4)
    if x.bias is not None and x.bias_offsets is None:
        of_pairs, query = x.bias, torch.arange(longest_query, device=scores.device)
        for dim, place in ((2, query), (3, key)):
            # Past its end a dense bias is 0.
            end = of_pairs.shape[dim]
            of_pairs = torch.nn.functional.pad(of_pairs, (0, 1) if dim == 3 else (0, 0, 0, 1))
            of_pairs = of_pairs.index_select(dim, place.clamp(max=end))
        scores = scores + of_pairs.unflatten(1, (heads, group))
    return scores
