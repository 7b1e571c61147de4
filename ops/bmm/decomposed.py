"""The products in PyTorch's own operators, for programs that are exported: samples padded to the longest one."""

from __future__ import annotations

import torch
from torch import Tensor

from jagged.ops._shared.offsets import Pairs as PairsOf
from jagged.ops._shared.offsets import Plain, position_of_row, sample_of_row, scan
from jagged.ops._shared.padded import longest, pad, unpad
from jagged.ops.bmm.spec import (
    DenseInputs,
    JaggedInputs,
    Options,
    PairInputs,
    PairOptions,
    Rows,
    Scores,
    Sums,
    WeightedInputs,
    WeightedOptions,
    WeightedSums,
)


def jagged_dense_bmm(x: DenseInputs, o: Options) -> Rows:
    """Multiply each sample's rows by its matrix and add its bias."""
    values, offsets, dense, bias = x
    rows = pad(values, offsets, longest(offsets))
    products = torch.bmm(rows, dense) if bias is None else torch.baddbmm(bias[:, None], rows, dense)
    return Rows(unpad(products, offsets, values.shape[0]))


def jagged_jagged_bmm(x: JaggedInputs, o: Options) -> Sums:
    """Add up the outer products of each sample's rows."""
    length = longest(x.offsets)
    return Sums(torch.bmm(pad(x.a, x.offsets, length).transpose(1, 2), pad(x.b, x.offsets, length)))


def pair_scores(x: PairInputs, o: PairOptions) -> Scores:
    """Return the scores of each sample's rows of a against its rows of b."""
    a_longest, b_longest = longest(x.a_offsets), longest(x.b_offsets)
    dtype = torch.promote_types(x.a.dtype, torch.float32)
    a, b = (pad(*of).to(dtype) for of in ((x.a, x.a_offsets, a_longest), (x.b, x.b_offsets, b_longest)))
    place = _place_of_pair(x.a_offsets, x.b_offsets, o.num_pairs, a_longest, b_longest)
    return Scores(torch.bmm(a, b.transpose(1, 2)).flatten().index_select(0, place).to(x.a.dtype))


def pair_sums(x: WeightedInputs, o: WeightedOptions) -> WeightedSums:
    """Return each sample's rows of values, weighted by its block of scores or by that transposed."""
    scores, values, a_offsets, b_offsets = x
    a_longest, b_longest = longest(a_offsets), longest(b_offsets)
    dtype = torch.promote_types(values.dtype, torch.float32)
    place = _place_of_pair(a_offsets, b_offsets, scores.shape[0], a_longest, b_longest)
    num_samples = a_offsets.shape[0] - 1
    weights = scores.new_zeros(num_samples * a_longest * b_longest, dtype=dtype).index_copy(0, place, scores.to(dtype))
    weights = weights.view(num_samples, a_longest, b_longest)
    if o.transposed:
        sums = torch.bmm(weights.transpose(1, 2), pad(values, a_offsets, a_longest).to(dtype))
        return WeightedSums(unpad(sums, b_offsets, o.output_total).to(values.dtype))
    sums = torch.bmm(weights, pad(values, b_offsets, b_longest).to(dtype))
    return WeightedSums(unpad(sums, a_offsets, o.output_total).to(values.dtype))


def _place_of_pair(a_offsets: Tensor, b_offsets: Tensor, num_pairs: int, a_longest: int, b_longest: int) -> Tensor:
    """Return the place `[P]` of each pair among all of the padded samples."""
    begins = scan(PairsOf(a_offsets, b_offsets), Plain()).starts
    sample = sample_of_row(begins, num_pairs)
    pair = position_of_row(begins, sample)
    columns = b_offsets.diff().to(torch.int64).index_select(0, sample).clamp(min=1)
    row = torch.div(pair, columns, rounding_mode="floor")
    return ((sample * a_longest + row) * b_longest + pair - row * columns).clamp(min=0)
