"""The softmaxes in plain PyTorch: the CPU path and the float64 path.

On a CPU blocks of like sizes are padded side by side, in pieces that stay in the cache. That reads lengths on the host, so on
other devices statistics of blocks are scattered, as those of samples are everywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jagged.ops._shared.blocks import chunks, extended
from jagged.ops._shared.offsets import pair_offsets as offsets_of_pairs
from jagged.ops._shared.offsets import position_of_row, sample_of_row
from jagged.ops.softmax.spec import (
    BackwardInputs,
    Gradient,
    Inputs,
    Options,
    PairBackwardInputs,
    PairInputs,
    PairOptions,
    Weights,
)


def softmax(x: Inputs, o: Options) -> Weights:
    """Softmax over each sample's rows."""
    return Weights(_softmax(x.values, sample_of_row(x.offsets, x.values.shape[0]), x.offsets.shape[0] - 1))


def softmax_backward(x: BackwardInputs, o: Options) -> Gradient:
    """Gradient of the values."""
    samples = sample_of_row(x.offsets, x.weights.shape[0])
    return Gradient(_softmax_backward(x.grad, x.weights, samples, x.offsets.shape[0] - 1))


def pair_softmax(x: PairInputs, o: PairOptions) -> Weights:
    """Softmax over each row or column of samples' blocks."""
    scores = x.values
    if not scores.is_cpu:
        return Weights(_softmax(scores, _vector_of_pair(x, scores.shape[0], o.by_columns), scores.shape[0]))
    wide = torch.promote_types(scores.dtype, torch.float32)
    filled, output = extended(scores, -torch.inf), scores.new_empty(scores.shape[0] + 1)
    for chunk in chunks(x.a_offsets, _columns(x), scores.shape[0], pair_offsets=x.pair_offsets):
        weights = chunk.blocks(filled).softmax(1 if o.by_columns else 2, dtype=wide)
        output.scatter_(0, chunk.pairs, weights.flatten().to(output.dtype))
    return Weights(output[:-1])


def pair_softmax_backward(x: PairBackwardInputs, o: PairOptions) -> Gradient:
    """Gradient of the scores."""
    grad, weights = x.grad, x.weights
    if not weights.is_cpu:
        return Gradient(_softmax_backward(grad, weights, _vector_of_pair(x, weights.shape[0], o.by_columns), weights.shape[0]))
    wide = torch.promote_types(weights.dtype, torch.float32)
    filled, output = (extended(grad, 0), extended(weights, 0)), weights.new_empty(weights.shape[0] + 1)
    for chunk in chunks(x.a_offsets, _columns(x), weights.shape[0], pair_offsets=x.pair_offsets):
        blocks = (chunk.blocks(padded).to(wide) for padded in filled)
        grads = torch.ops.aten._softmax_backward_data(*blocks, 1 if o.by_columns else 2, wide)
        output.scatter_(0, chunk.pairs, grads.flatten().to(output.dtype))
    return Gradient(output[:-1])


def _softmax(values: Tensor, vectors: Tensor, num_vectors: int) -> Tensor:
    """Softmax over the rows that share a vector, in float32 or float64."""
    if not values.numel() or not num_vectors:
        return torch.zeros(values.shape, dtype=values.dtype, device=values.device)
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    shape = (num_vectors, *values.shape[1:])
    index = vectors.view(-1, *[1] * (values.dim() - 1)).expand_as(values)
    largest = wide.new_full(shape, -torch.inf).scatter_reduce_(0, index, wide, "amax")
    # In place on what was gathered: contiguous whatever the strides of the values.
    weights = largest.index_select(0, vectors).neg_().add_(wide).exp_()
    sums = _sums(weights, vectors, num_vectors)
    return weights.div_(sums.index_select(0, vectors)).to(values.dtype)


def _softmax_backward(grad: Tensor, weights: Tensor, vectors: Tensor, num_vectors: int) -> Tensor:
    """`weights * (grad - sum of weights * grad over the rows that share a vector)`."""
    if not weights.numel() or not num_vectors:
        return torch.zeros(weights.shape, dtype=weights.dtype, device=weights.device)
    wide = torch.promote_types(weights.dtype, torch.float32)
    grad, probabilities = grad.to(wide), weights.to(wide)
    sums = _sums(grad * probabilities, vectors, num_vectors)
    return sums.index_select(0, vectors).neg_().add_(grad).mul_(probabilities).to(weights.dtype)


def _sums(values: Tensor, vectors: Tensor, num_vectors: int) -> Tensor:
    """Add up the rows that share a vector; one by one, so that only float64 keeps long sums exact."""
    sums = torch.zeros(num_vectors, *values.shape[1:], dtype=torch.float64, device=values.device)
    return sums.index_add_(0, vectors, values.double()).to(values.dtype)


def _vector_of_pair(x: PairInputs | PairBackwardInputs, total: int, by_columns: bool) -> Tensor:
    """Return the row or column `[total]` (int64) that each pair belongs to, named by the place of its first pair.

    Such a place is below `total`, so that no number of rows or columns needs to be known.
    """
    if not total or x.a_offsets.shape[0] < 2:
        return torch.zeros(total, dtype=torch.int64, device=x.a_offsets.device)
    columns = _columns(x)
    starts = offsets_of_pairs(x.a_offsets, x.b_offsets) if x.pair_offsets is None else x.pair_offsets
    samples = sample_of_row(starts, total)
    position = position_of_row(starts, samples)
    column = position.remainder_(columns.diff().clamp_(min=1)[samples])
    first = starts[:-1].to(torch.int64)[samples] if by_columns else torch.arange(total, device=starts.device)
    return (first.add_(column) if by_columns else first.sub_(column)).clamp_(0, total - 1)


def _columns(x: PairInputs | PairBackwardInputs) -> Tensor:
    return x.a_offsets if x.b_offsets is None else x.b_offsets
