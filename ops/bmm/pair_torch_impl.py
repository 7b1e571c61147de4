"""Products over the pairs of rows of each sample in plain PyTorch: samples of like lengths side by side, in bounded pieces."""

from __future__ import annotations

import torch
from torch import Tensor

from jagged.ops._shared.blocks import chunks, extended


def _gather(values: Tensor, rows: Tensor) -> Tensor:
    return values.index_select(0, rows.flatten()).view(*rows.shape, values.shape[1])


def pair_scores(a: Tensor, b: Tensor, a_offsets: Tensor, b_offsets: Tensor, num_pairs: int) -> Tensor:
    """Return the scores `[num_pairs]` of each sample's rows of a against its rows of b, zeros where wrong offsets have none."""
    dtype = torch.promote_types(a.dtype, torch.float32)
    scores = a.new_zeros(num_pairs + 1)
    with torch.autocast(a.device.type, enabled=False):
        for chunk in chunks(a_offsets, b_offsets, num_pairs, a_total=a.shape[0], b_total=b.shape[0]):
            products = torch.bmm(_gather(a, chunk.a_rows).to(dtype), _gather(b, chunk.b_rows).to(dtype).transpose(1, 2))
            scores.scatter_(0, chunk.pairs, products.flatten().to(scores.dtype))
    return scores[:num_pairs]


def pair_sums(
    scores: Tensor,
    values: Tensor,
    a_offsets: Tensor,
    b_offsets: Tensor,
    output_total: int,
    transposed: bool,
) -> Tensor:
    """Return each sample's rows of values, weighted by its block of scores or by that transposed: `[output_total, D]`."""
    dtype = torch.promote_types(values.dtype, torch.float32)
    a_total, b_total = (values.shape[0], output_total) if transposed else (output_total, values.shape[0])
    # One row more takes what is computed for rows that are not there.
    output = values.new_zeros(output_total + 1, values.shape[1])
    filled = extended(scores, 0)
    with torch.autocast(values.device.type, enabled=False):
        for chunk in chunks(a_offsets, b_offsets, scores.shape[0], a_total=a_total, b_total=b_total):
            weights = chunk.blocks(filled).to(dtype)
            sides = (chunk.a_rows, chunk.a_exists), (chunk.b_rows, chunk.b_exists)
            (rows, exists), (output_rows, output_exists) = sides if transposed else sides[::-1]
            # Weights of 0 do not hide an infinity in the row that stands in for missing ones.
            terms = _gather(values, rows).to(dtype).masked_fill_(~exists[:, :, None], 0)
            sums = torch.bmm(weights.transpose(1, 2) if transposed else weights, terms)
            places = torch.where(output_exists, output_rows, output_total)
            output.index_copy_(0, places.flatten(), sums.flatten(0, 1).to(output.dtype))
    return output[:output_total]
