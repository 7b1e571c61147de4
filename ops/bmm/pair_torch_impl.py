"""Products over the pairs of rows of each sample in plain PyTorch: samples of like lengths side by side, in bounded pieces.

Samples are sorted by the powers of two above their two lengths and cut into chunks of one such class, each padded to its own
longest sample. So the count of PyTorch calls follows the work, not the number of samples, and padding is less than fourfold.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from jagged.ops._shared.offsets import scan_pairs

# 1 MiB in float32: the pairs of a chunk stay in the L2 cache between the passes over them.
_CHUNK_PAIRS = 2**18
# Below this length padding costs less than the PyTorch calls of another chunk.
_SHORTEST_CLASS = 8


@dataclass
class _Chunk:
    """Samples padded side by side: `n` blocks of `rows x columns` pairs."""

    a_rows: Tensor  # [n, rows] index of each row of a; past the end of a sample its last one
    b_rows: Tensor  # [n, columns] index of each row of b, alike
    a_exists: Tensor  # [n, rows]
    b_exists: Tensor  # [n, columns]
    pairs: Tensor  # [n * rows * columns] index of each pair's score; where there is none, one of `b_total` places past the scores


def _chunks(a_offsets: Tensor, b_offsets: Tensor, a_total: int, b_total: int, num_pairs: int) -> Iterator[_Chunk]:
    """Yield chunks that hold every sample with pairs; wrong offsets leave samples out rather than lead outside the tensors."""
    a_limits, b_limits = a_offsets.to(torch.int64).clamp(0, a_total), b_offsets.to(torch.int64).clamp(0, b_total)
    lengths = torch.stack([a_limits.diff(), b_limits.diff()]).clamp_(min=0)
    areas = lengths.prod(0)
    starts = torch.stack([a_limits[:-1], b_limits[:-1], scan_pairs(a_offsets, b_offsets, "torch")[:-1]])
    kept = ((areas > 0) & (starts[2] >= 0) & (starts[2] + areas <= num_pairs)).nonzero().flatten()
    powers = _SHORTEST_CLASS << torch.arange(64 - _SHORTEST_CLASS.bit_length(), device=a_offsets.device)
    classes = torch.searchsorted(powers, lengths[:, kept])
    classes = classes[0] * 64 + classes[1]
    # Inside a class by length, so that a chunk's samples are alike.
    order = lengths[0, kept].argsort(stable=True)
    order = order[classes[order].argsort(stable=True)]
    lengths, starts = lengths[:, kept[order]], starts[:, kept[order]]
    sizes = classes[order].unique_consecutive(return_counts=True)[1].tolist()
    for low, high in itertools.pairwise([0, *itertools.accumulate(sizes)]):
        rows, columns = lengths[:, low:high].amax(1).tolist()
        step = max(1, _CHUNK_PAIRS // (rows * columns))
        for first in range(low, high, step):
            part = slice(first, min(first + step, high))
            yield _chunk(lengths[:, part, None], starts[:, part, None], num_pairs)


def _chunk(lengths: Tensor, starts: Tensor, num_pairs: int) -> _Chunk:
    rows, columns = (torch.arange(longest, device=lengths.device) for longest in lengths.amax((1, 2)).tolist())
    a_exists, b_exists = rows < lengths[0], columns < lengths[1]
    first_pair = torch.where(a_exists, starts[2] + rows * lengths[1], num_pairs)
    return _Chunk(
        a_rows=starts[0] + torch.minimum(rows, lengths[0] - 1),
        b_rows=starts[1] + torch.minimum(columns, lengths[1] - 1),
        a_exists=a_exists,
        b_exists=b_exists,
        pairs=(first_pair[:, :, None] + columns).masked_fill_(~b_exists[:, None, :], num_pairs).flatten(),
    )


def _gather(values: Tensor, rows: Tensor) -> Tensor:
    return values.index_select(0, rows.flatten()).view(*rows.shape, values.shape[1])


def pair_scores(a: Tensor, b: Tensor, a_offsets: Tensor, b_offsets: Tensor, num_pairs: int) -> Tensor:
    """Return the scores `[num_pairs]` of each sample's rows of a against its rows of b, zeros where wrong offsets have none."""
    dtype = torch.promote_types(a.dtype, torch.float32)
    scores = a.new_zeros(num_pairs + b.shape[0])
    with torch.autocast(a.device.type, enabled=False):
        for chunk in _chunks(a_offsets, b_offsets, a.shape[0], b.shape[0], num_pairs):
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
    filled = torch.cat([scores, scores.new_zeros(b_total)])
    with torch.autocast(values.device.type, enabled=False):
        for chunk in _chunks(a_offsets, b_offsets, a_total, b_total, scores.shape[0]):
            weights = filled.index_select(0, chunk.pairs).view(*chunk.a_rows.shape, -1).to(dtype)
            sides = (chunk.a_rows, chunk.a_exists), (chunk.b_rows, chunk.b_exists)
            (rows, exists), (output_rows, output_exists) = sides if transposed else sides[::-1]
            # Weights of 0 do not hide an infinity in the row that stands in for missing ones.
            terms = _gather(values, rows).to(dtype).masked_fill_(~exists[:, :, None], 0)
            sums = torch.bmm(weights.transpose(1, 2) if transposed else weights, terms)
            places = torch.where(output_exists, output_rows, output_total)
            output.index_copy_(0, places.flatten(), sums.flatten(0, 1).to(output.dtype))
    return output[:output_total]
