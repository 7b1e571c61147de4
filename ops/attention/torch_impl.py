"""Attention in plain PyTorch: samples of like lengths side by side, in pieces of bounded memory.

Samples are sorted by the powers of two above their two lengths and cut into chunks of one such class; a chunk is padded to its
own longest sample, and its queries are taken block by block, with the keys that any of them sees. So the count of PyTorch calls
follows the work, not the number of samples, and no more than `_CHUNK_SCORES` scores exist at a time (or one query row of each
head, if that is more).

The query heads that share a key head lie side by side: queries are `[Sq * Hkv, G * D]`, with `G = H / Hkv`, and pad as keys do.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jagged.ops.attention import torch_fused
from jagged.ops.attention.spec import Inputs, Options, Outputs

# 1 MiB in float32: the scores of a chunk stay in the L2 cache between the passes over them.
_CHUNK_SCORES = 2**18
# Below this length padding costs less than the PyTorch calls of another chunk.
_SHORTEST_CLASS = 8
# SiLU and its derivative are exactly 0 here, as softmax's weight is at minus infinity, where SiLU is not a number.
_SILU_NOTHING = -1e4
_32_BITS = 2**32 - 1


@dataclass
class _Side:
    """The queries or the keys of a chunk, padded side by side."""

    row: Tensor  # [n, longest] index of the row; past a sample's end its last row
    rows: Tensor  # [n * Hkv * longest] index of (row, key head) in the flattened [S * Hkv]
    valid: Tensor  # [rows of the chunk * Hkv] the places of `rows` that hold a row
    longest: int

    def pad(self, x: Tensor, width: int) -> Tensor:
        """`[S * Hkv, G * width] -> [n * Hkv, longest * G, width]`."""
        return x.index_select(0, self.rows).view(-1, self.longest * x.shape[1] // width, width)

    def unpad_into(self, target: Tensor, x: Tensor) -> None:
        """`[n * Hkv, longest * G, width]` into its rows of `[S * Hkv, G * width]`."""
        rows = x.view(-1, target.shape[1])
        target.index_copy_(0, self.rows.index_select(0, self.valid), rows.index_select(0, self.valid))


@dataclass
class _Block:
    """Padded query rows of a chunk, and the keys that any of them sees."""

    queries: slice
    rows: slice  # the same rows of each query head of a group
    keys: slice
    position: Tensor  # [n, 1, queries, 1, 1]
    hidden: Tensor  # [n, 1, queries, 1, keys] keys that a row does not see, or 1 for `queries` where all are alike


@dataclass
class _Chunk:
    """`n` samples of `Hkv` key heads, each with `group` query heads."""

    queries: _Side
    keys: _Side
    sample: Tensor  # [n] place in the batch
    length: Tensor  # [n] number of keys
    shift: Tensor  # [n, 1, 1, 1, 1] position of the first query
    history: Tensor  # [n, 1, 1, 1, 1] number of keys that are no targets
    group: int
    query_block: int

    @property
    def sides(self) -> tuple[_Side, _Side, _Side]:
        """Those of q, k and v."""
        return self.queries, self.keys, self.keys

    def blocks(self, x: Inputs, o: Options) -> Iterator[_Block]:
        """Yield blocks that hold every query."""
        for first in range(0, self.queries.longest, self.query_block):
            last = min(first + self.query_block, self.queries.longest)
            position = self.shift + torch.arange(first, last, device=self.shift.device)[:, None, None]
            # Targets look back from the end of the history.
            place = position if x.num_targets is None else torch.minimum(position, self.history)
            end = torch.minimum(place + 1, self.history) if o.causal else self.history
            if o.window:
                begin, context_end = place - (o.window - 1), end.clamp(max=o.prefix)
                end = torch.minimum(end, place + o.reach)
                if not o.prefix:
                    # Who sees the last contextual key sees them all.
                    begin = begin.masked_fill_(begin < o.num_contextual, 0)
            if o.num_contextual:
                sees_all = position < o.num_contextual
                end = torch.where(sees_all, self.history, end)
                if o.window:
                    begin = begin.masked_fill_(sees_all, 0)
            # The keys that any row sees, and one at least, though it be hidden from all.
            low, high = 0, self.keys.longest
            if o.causal or o.window:
                stop = end if x.num_targets is None else torch.maximum(end, position + 1)
                high = min(max(int(stop.max()), o.prefix, 1), high)
            if o.window and not o.prefix:
                low = min(max(int(begin.min()), 0), high - 1)
            key = torch.arange(low, high, device=self.shift.device)
            hidden = key >= end
            if o.window:
                hidden = hidden | (key < begin)
                if o.prefix:
                    hidden &= key >= context_end
            if x.num_targets is not None:
                hidden = hidden & (key != position)
            rows = slice(first * self.group, last * self.group)
            yield _Block(slice(first, last), rows, slice(low, high), position, hidden)

    def by_head(self, x: Tensor) -> Tensor:
        """`[n * Hkv, queries * group, keys] -> [n, Hkv, queries, group, keys]`."""
        return x.view(self.shift.shape[0], -1, x.shape[1] // self.group, self.group, x.shape[2])

    def scores(
        self, query: Tensor, key: Tensor, block: _Block, biases: _Biases, softcap: float, nothing: float
    ) -> tuple[Tensor, Tensor | None]:
        """Scores of a block of scaled queries, `nothing` where a key is hidden: `[n * Hkv, queries * group, keys]`.

        With a cap also what share of it those are that have no biases yet.
        """
        scores = torch.bmm(query[:, block.rows], key[:, block.keys].transpose(1, 2))
        capped = None
        if softcap:
            capped = scores.div_(softcap).tanh_()
            scores = capped * softcap
        by_head = self.by_head(scores)
        biases.add_to(by_head, self, block)
        # Eight times as fast as to fill the scores themselves.
        limit = scores.new_full(block.hidden.shape, torch.inf).masked_fill_(block.hidden, nothing)
        torch.minimum(by_head, limit, out=by_head)
        return scores, capped


class _Biases:
    """What is added to scores, and its gradients."""

    def __init__(self, x: Inputs, wanted: Mapping[str, torch.dtype]) -> None:
        # Tables `[H, N]`, of which each pair of a query and a key reads one column; a dense bias is none.
        self.tables = {
            "relative_bias": (x.relative_bias, self._distances),
            "time_bias": (x.time_bias, self._buckets),
            "bias": (None if x.bias_offsets is None else x.bias, self._pairs),
        }
        self.times, self.pairs = (x.q_times, x.q_times if x.k_times is None else x.k_times), x.bias_offsets
        self.dense = x.bias if x.bias_offsets is None else None
        # A table's gradient is a sum of millions; a pair's own bias has that of one score, which may be rounded at once.
        self.grads = {
            name: torch.zeros(like.shape, dtype=wanted[name] if name == "bias" else torch.float64, device=like.device)
            for name, like in (("relative_bias", x.relative_bias), ("time_bias", x.time_bias), ("bias", x.bias))
            if like is not None and name in wanted
        }

    def _columns(self, chunk: _Chunk, block: _Block) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield the name of each table, the table, and the column `[n, queries, keys]` that is read for each pair."""
        for name, (table, columns) in self.tables.items():
            # Only wrong offsets have pairs where there is no bias, or more of them.
            if table is not None and table.shape[1]:
                yield name, table, columns(chunk, block, table.shape[1])

    def _distances(self, chunk: _Chunk, block: _Block, width: int) -> Tensor:
        key = torch.arange(block.keys.start, block.keys.stop, device=chunk.shift.device)
        distance = torch.minimum(block.position, chunk.history) - torch.minimum(key, chunk.history)
        return (distance[:, 0, :, 0] + width // 2).clamp_(0, width - 1)

    def _buckets(self, chunk: _Chunk, block: _Block, width: int) -> Tensor:
        q_times, k_times = (
            x[side.row[:, part]]
            for x, side, part in zip(self.times, chunk.sides, (block.queries, block.keys), strict=False)
            if x is not None
        )
        between = (q_times[:, :, None] - k_times[:, None]).abs_().to(torch.float32)
        # A float's exponent and the first bit of its fraction; 1.0 has 254.
        return (between.view(torch.int32) >> 22).sub_(253).clamp_(0, width - 1)

    def _pairs(self, chunk: _Chunk, block: _Block, width: int) -> Tensor:
        assert self.pairs is not None
        query = torch.arange(block.queries.start, block.queries.stop, device=chunk.shift.device)
        key = torch.arange(block.keys.start, block.keys.stop, device=chunk.shift.device)
        length = chunk.length[:, None, None]
        # Past a sample's end stand other samples' pairs, of which no score comes.
        first = self.pairs[chunk.sample][:, None, None]
        return (first + query[:, None] * length + torch.minimum(key, length - 1)).clamp_(0, width - 1)

    def _of_dense(self, x: Tensor, block: _Block) -> tuple[Tensor, tuple[Any, ...]]:
        """Return the block's part of a dense bias, `[B, H, queries, keys]`, and where in the scores by head it belongs."""
        part = x[:, :, block.queries, block.keys]
        return part, (..., slice(0, part.shape[2]), slice(None), slice(0, part.shape[3]))

    def add_to(self, scores: Tensor, chunk: _Chunk, block: _Block) -> None:
        """Add a block's biases to its scores `[n, Hkv, queries, group, keys]`."""
        for _, table, column in self._columns(chunk, block):
            term = table.index_select(1, column.flatten()).view(-1, chunk.group, *column.shape)
            scores += term.permute(2, 0, 3, 1, 4)
        if self.dense is not None:
            part, inside = self._of_dense(self.dense, block)
            term = part.index_select(0, chunk.sample)
            scores[inside] += term.unflatten(1, (-1, chunk.group)).transpose(2, 3)

    def take_gradient(self, grad_scores: Tensor, chunk: _Chunk, block: _Block) -> None:
        """Add a block's scores' gradients `[n, Hkv, queries, group, keys]` to those of the biases."""
        for name, _, column in self._columns(chunk, block):
            grad = self.grads.get(name)
            if grad is not None:
                by_column = grad_scores.permute(1, 3, 0, 2, 4).reshape(grad.shape[0], -1).to(grad.dtype)
                grad.scatter_add_(1, column.flatten().to(torch.int64).expand(grad.shape[0], -1), by_column)
        if self.dense is not None and "bias" in self.grads:
            part, inside = self._of_dense(self.grads["bias"], block)
            by_row = grad_scores[inside].transpose(2, 3).flatten(1, 2)
            part.index_copy_(0, chunk.sample, by_row.to(part.dtype))


@dataclass
class _Dropout:
    """Which weights are dropped, by a hash of the seed, the query's row and head, and the key's place in its sample."""

    seed: Tensor
    probability: float

    def keeps(self, chunk: _Chunk, block: _Block) -> Tensor:
        """Tell which weights of a block are kept, `[n, Hkv, queries, group, keys]`."""
        low, high = self.seed.flatten() & _32_BITS, (self.seed.flatten() >> 32) & _32_BITS
        row = _hash(chunk.queries.row[:, block.queries] ^ low)[:, None, :, None, None]
        key_heads = chunk.keys.rows.numel() // chunk.keys.row.numel()
        head = torch.arange(key_heads * chunk.group, device=row.device).view(-1, 1, chunk.group, 1)
        key = torch.arange(block.keys.start, block.keys.stop, device=row.device)
        mixed = _hash((row + head * 0x9E3779B9) & _32_BITS) ^ _hash((key + high) & _32_BITS)
        return _hash(mixed) >= min(round(self.probability * 2**32), _32_BITS)


def _hash(x: Tensor) -> Tensor:
    """Mix 32 bits, held in int64: lowbias32. The low half of a product is right though the whole overflows."""
    x = x ^ (x >> 16)
    x = x.mul_(0x7FEB352D).bitwise_and_(_32_BITS)
    x ^= x >> 15
    x = x.mul_(0x846CA68B).bitwise_and_(_32_BITS)
    x ^= x >> 16
    return x


def _chunks(x: Inputs) -> Iterator[_Chunk]:
    """Yield chunks that hold every sample with queries and keys."""
    heads, group = x.k.shape[1], x.q.shape[1] // x.k.shape[1]
    sides = [x.q_offsets.to(torch.int64).clamp(0, x.q.shape[0])]
    if x.k_offsets is not None:
        sides.append(x.k_offsets.to(torch.int64).clamp(0, x.k.shape[0]))
    limits = torch.stack(sides)
    lengths, starts = limits.diff(), limits[:, :-1]
    targets = lengths.new_zeros(lengths.shape[1]) if x.num_targets is None else x.num_targets.to(torch.int64)
    history = lengths[-1] - torch.minimum(targets.clamp(min=0), lengths[-1])

    kept = (lengths > 0).all(0).nonzero().flatten()
    order = kept[lengths[-1, kept].argsort(stable=True)]
    powers = _SHORTEST_CLASS << torch.arange(64 - _SHORTEST_CLASS.bit_length(), device=lengths.device)
    classes = torch.searchsorted(powers, lengths[:, order])
    classes, by_class = (classes[0] * 64 + classes[-1]).sort(stable=True)
    order = order[by_class]
    lengths, starts, history = lengths[:, order], starts[:, order], history[order]
    sizes = classes.unique_consecutive(return_counts=True)[1].tolist()
    for low, high in itertools.pairwise([0, *itertools.accumulate(sizes)]):
        bounds = lengths[:, low:high].amax(1).tolist()
        step = max(1, _CHUNK_SCORES // (heads * group * bounds[0] * bounds[-1]))
        for first in range(low, high, step):
            part = slice(first, min(first + step, high))
            padded = [_side(start, length, heads) for start, length in zip(starts[:, part], lengths[:, part], strict=True)]
            row_of_scores = (part.stop - first) * heads * group * padded[-1].longest
            yield _Chunk(
                queries=padded[0],
                keys=padded[-1],
                sample=order[part],
                length=lengths[-1, part],
                shift=(lengths[-1, part] - lengths[0, part]).view(-1, 1, 1, 1, 1),
                history=history[part].view(-1, 1, 1, 1, 1),
                group=group,
                query_block=min(padded[0].longest, max(1, _CHUNK_SCORES // row_of_scores)),
            )


def _side(start: Tensor, length: Tensor, heads: int) -> _Side:
    longest = int(length.max())
    position = torch.arange(longest, device=start.device)
    rows = start[:, None] + torch.minimum(position, length[:, None] - 1)
    exists = (position < length[:, None])[:, None].expand(-1, heads, -1)
    return _Side(
        row=rows,
        rows=(rows[:, None] * heads + torch.arange(heads, device=start.device)[:, None]).flatten(),
        valid=exists.flatten().nonzero().flatten(),
        longest=longest,
    )


def _flat(x: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """`[S, G * Hkv, D] -> [S * Hkv, G * D]`."""
    return x.reshape(x.shape[0] * heads, x.shape[1] // heads * x.shape[2]).to(dtype)


def forward(x: Inputs, o: Options) -> Outputs:
    """Return output and log-sum-exp."""
    plan = torch_fused.Plan.of(x, o)
    return _forward(x, o) if plan is None else torch_fused.forward(x, o, plan, _forward)


def _forward(x: Inputs, o: Options) -> Outputs:
    dtype, (heads, width), value_width = torch.promote_types(x.q.dtype, torch.float32), x.k.shape[1:], x.v.shape[2]
    biases, group = _Biases(x, {}), x.q.shape[1] // heads
    dropout = None if x.dropout_seed is None else _Dropout(x.dropout_seed, o.dropout_p)
    # What sees no key stays as it is here, and so do rows that no sample covers, which only wrong offsets have.
    output = x.q.new_zeros(x.q.shape[0] * heads, group * value_width, dtype=dtype)
    lse = output.new_full((output.shape[0], group), -torch.inf)
    flat = [_flat(rows, heads, dtype) for rows in x[:3]]
    for chunk in _chunks(x):
        widths = width, width, value_width
        query, key, value = (side.pad(rows, of) for side, rows, of in zip(chunk.sides, flat, widths, strict=True))
        query *= o.scale
        result, sums = (query.new_empty(*query.shape[:2], of) for of in (value_width, 1))
        for block in chunk.blocks(x, o):
            if o.pointwise:
                weights = F.silu(chunk.scores(query, key, block, biases, 0.0, _SILU_NOTHING)[0], inplace=True)
                torch.bmm(weights, value[:, block.keys], out=result[:, block.rows])
                continue
            scores, _ = chunk.scores(query, key, block, biases, o.softcap, -torch.inf)
            # Where no key is seen the largest score is minus infinity, from which nothing can be subtracted.
            largest = scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(dtype).min)
            weights = scores.sub_(largest).exp_()
            total = weights.sum(-1, keepdim=True)
            if dropout is not None:
                chunk.by_head(weights).mul_(dropout.keeps(chunk, block))
            torch.bmm(weights, value[:, block.keys], out=result[:, block.rows])
            # A sum has the 1 of its largest score in it, or nothing.
            result[:, block.rows] /= total.clamp(min=1)
            sums[:, block.rows] = total.log_().add_(largest)
        if o.pointwise:
            _normalize(result, chunk, o.normalizer)
        if dropout is not None:
            result /= 1 - o.dropout_p
        chunk.queries.unpad_into(output, result)
        if not o.pointwise:
            chunk.queries.unpad_into(lse, sums)
    lse = output.new_empty(0) if o.pointwise else lse.view(x.q.shape[:2]).t().contiguous()
    return Outputs(output.view(*x.q.shape[:2], value_width).to(x.q.dtype), lse)


def _normalize(x: Tensor, chunk: _Chunk, normalizer: float) -> None:
    """Divide `[n * Hkv, longest * group, width]` by the number, or by each sample's length."""
    x.view(chunk.length.shape[0], -1).div_(normalizer or chunk.length[:, None])


def backward(grads: Outputs, x: Inputs, out: Outputs, o: Options, wanted: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
    """Return the gradients of q, k and v, and of the biases that are wanted."""
    # The kernel's backward has no gradient of log-sum-exp; compiled code gives zeros where nothing reads it.
    is_of_lse = grads.lse is not None and bool(grads.lse.any())
    plan = None if grads.output is None or is_of_lse else torch_fused.Plan.of(x, o)
    if plan is None:
        return _backward(grads, x, out, o, wanted)
    found = torch_fused.backward(grads, x, out, o, plan, _backward)
    return {name: rows.to(x.q.dtype) for name, rows in found.items()}


def _backward(grads: Outputs, x: Inputs, out: Outputs, o: Options, wanted: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
    (heads, width), value_width = x.k.shape[1:], x.v.shape[2]
    dtype = torch.promote_types(x.q.dtype, torch.float32)
    biases = _Biases(x, wanted)
    dropout = None if x.dropout_seed is None else _Dropout(x.dropout_seed, o.dropout_p)
    # A log-sum-exp may be all that has a gradient.
    grad = x.q.new_zeros(()).expand(*x.q.shape[:2], value_width) if grads.output is None else grads.output
    flat = [_flat(rows, heads, dtype) for rows in (x.q, grad, x.k, x.v)]
    sums_of = [torch.zeros_like(rows) for rows in (flat[0], *flat[2:])]
    if not o.pointwise:
        # An infinite log-sum-exp gives no weight to any key: here to rows that see none, below to those past a sample's end.
        flat_lse = _flat(out.lse.t()[..., None], heads, dtype)
        flat_lse = flat_lse.masked_fill(flat_lse == -torch.inf, torch.inf)
        flat_grad_lse = None if grads.lse is None else _flat(grads.lse.t()[..., None], heads, dtype)
    for chunk in _chunks(x):
        query, key = chunk.queries.pad(flat[0], width), chunk.keys.pad(flat[2], width)
        upstream, value = chunk.queries.pad(flat[1], value_width), chunk.keys.pad(flat[3], value_width)
        query *= o.scale
        valid = chunk.queries.valid
        if o.pointwise:
            _normalize(upstream, chunk, o.normalizer)
            inside = torch.zeros_like(upstream[..., :1])
            inside.view(-1, chunk.group)[valid] = 1
            upstream *= inside
        else:
            sums = torch.full_like(query[..., :1], torch.inf)
            sums.view(-1, chunk.group)[valid] = flat_lse[chunk.queries.rows[valid]]
            grad_sums = None if flat_grad_lse is None else chunk.queries.pad(flat_grad_lse, 1)
        if dropout is not None:
            upstream /= 1 - o.dropout_p
        grad_query, grad_key, grad_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        for block in chunk.blocks(x, o):
            rows, keys = block.rows, block.keys
            if o.pointwise:
                scores, capped = chunk.scores(query, key, block, biases, 0.0, _SILU_NOTHING)
                gate = scores.sigmoid()
                weights = scores.mul_(gate)
                slope = gate + weights * (1 - gate)
            else:
                scores, capped = chunk.scores(query, key, block, biases, o.softcap, -torch.inf)
                weights = slope = scores.sub_(sums[:, rows]).exp_()
            grad_scores = torch.bmm(upstream[:, rows], value[:, keys].transpose(1, 2))
            if dropout is not None:
                keeps = dropout.keeps(chunk, block)
                weights = (chunk.by_head(weights) * keeps).view_as(weights)
                chunk.by_head(grad_scores).mul_(keeps)
            grad_value[:, keys].baddbmm_(weights.transpose(1, 2), upstream[:, rows])
            if not o.pointwise:
                # A block has all keys of its queries. Their mean by weights leaves zero where there is one key, which the product
                # of output and upstream does not; by the weights' own sum, because they add up to 1 but for their rounding.
                total = slope.sum(-1, keepdim=True).clamp_(min=torch.finfo(slope.dtype).tiny)
                delta = torch.linalg.vecdot(slope, grad_scores)[..., None] / total
                grad_scores.sub_(delta if grad_sums is None else delta - grad_sums[:, rows])
            grad_scores.mul_(slope)
            biases.take_gradient(chunk.by_head(grad_scores), chunk, block)
            if capped is not None:
                grad_scores.mul_(1 - capped.square_())
            torch.bmm(grad_scores, key[:, keys], out=grad_query[:, rows])
            grad_key[:, keys].baddbmm_(grad_scores.transpose(1, 2), query[:, rows])
        grad_query *= o.scale
        for side, target, part in zip(chunk.sides, sums_of, (grad_query, grad_key, grad_value), strict=True):
            side.unpad_into(target, part)
    inputs = zip(Inputs._fields, sums_of, (x.q, x.k, x.v), strict=False)
    found = {name: rows.view(like.shape).to(like.dtype) for name, rows, like in inputs}
    return found | {name: rows.to(wanted[name]) for name, rows in biases.grads.items()}
