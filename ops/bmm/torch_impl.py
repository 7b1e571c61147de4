"""The products of a jagged tensor with a dense or a second jagged one in plain PyTorch: the CPU path and the float64 path.

Rows are cut into tiles of `TILE_ROWS` that stay in one sample, padded at most at its end, so that one long sample costs no more
than many short ones. Sample b's tiles begin at `offsets[b] // TILE_ROWS + b`, which leaves one spare tile a sample at most.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jagged.ops._shared.offsets import position_of_row, sample_of_row

TILE_ROWS = 64


def jagged_dense_bmm(values: Tensor, offsets: Tensor, dense: Tensor) -> Tensor:
    """Multiply each sample's rows by its matrix: `[S, D] x [B, D, T] -> [S, T]`."""
    total, (batch_size, _, columns) = values.shape[0], dense.shape
    if total == 0 or batch_size == 0:
        return values.new_zeros(total, columns)
    offsets = _in_order(offsets, total)
    first_tile, sample_of_tile, rows, _ = _tiles(offsets, total)
    accumulator = _accumulator(values.dtype)
    products = torch.bmm(values[rows].to(accumulator), dense.to(accumulator)[sample_of_tile]).flatten(0, 1)
    sample = sample_of_row(offsets, total)
    place = first_tile[sample] * TILE_ROWS + position_of_row(offsets, sample)
    return products[place].to(values.dtype)


def jagged_jagged_bmm(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """Add up the outer products of each sample's rows: `[S, D] x [S, T] -> [B, D, T]`."""
    total, batch_size = a.shape[0], offsets.shape[0] - 1
    if total == 0 or batch_size == 0:
        return a.new_zeros(batch_size, a.shape[1], b.shape[1])
    offsets = _in_order(offsets, total)
    first_tile, _, rows, outside = _tiles(offsets, total)
    # Both, because what stands in the way of a row outside may be infinite.
    left, right = (side.to(_accumulator(a.dtype))[rows].masked_fill_(outside[..., None], 0) for side in (a, b))
    products = torch.bmm(left.transpose(1, 2), right)
    return torch.segment_reduce(products, "sum", offsets=first_tile, axis=0, unsafe=True).to(a.dtype)


def _tiles(offsets: Tensor, total: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return each sample's first tile `[B + 1]`, each tile's sample `[N]`, its rows `[N, TILE_ROWS]` and which are none."""
    batch_size = offsets.shape[0] - 1
    samples = torch.arange(batch_size + 1, device=offsets.device)
    first_tile = offsets // TILE_ROWS + samples
    sample = sample_of_row(first_tile, total // TILE_ROWS + batch_size)
    tile = torch.arange(sample.shape[0], device=offsets.device)
    begin = offsets[sample] + (tile - first_tile[sample]) * TILE_ROWS
    rows = begin[:, None] + torch.arange(TILE_ROWS, device=offsets.device)
    outside = rows >= offsets[sample + 1][:, None]
    return first_tile, sample, rows.clamp_(max=total - 1), outside


def _in_order(offsets: Tensor, total: int) -> Tensor:
    """Return the offsets in int64; wrong ones are moved so that they never fall and lie inside the rows."""
    return offsets.to(torch.int64).clamp(0, total).cummax(0).values


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
