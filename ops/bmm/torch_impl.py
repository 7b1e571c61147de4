"""The products of a jagged tensor with a dense or a second jagged one in plain PyTorch: the CPU path and the float64 path.

Rows are laid out in tiles that each hold rows of one sample, for one batched product of all of them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from jagged.ops._shared.offsets import covering, position_of_row, sample_of_row

TILE_ROWS = 64
# A tile a sample, as long as the longest, where the tiles then hold at most so many times the rows.
MOST_PADDING = 3


class Tiling(NamedTuple):
    """Rows of a tile, number of tiles, each sample's first tile `[B + 1]` (None: one each) and each row's place in the tiles."""

    rows: int
    num_tiles: int
    first: Tensor | None
    place: Tensor


def jagged_dense_bmm(values: Tensor, offsets: Tensor, dense: Tensor) -> Tensor:
    """Multiply each sample's rows by its matrix: `[S, D] x [B, D, T] -> [S, T]`."""
    total, (batch_size, _, columns) = values.shape[0], dense.shape
    if total == 0 or batch_size == 0:
        return values.new_zeros(total, columns)
    tiling = _tile(offsets, total)
    matrices = dense if tiling.first is None else dense[sample_of_row(tiling.first, tiling.num_tiles)]
    products = torch.bmm(_laid_out(values, tiling), matrices)
    return products.flatten(0, 1).index_select(0, tiling.place)


def jagged_jagged_bmm(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """Add up the outer products of each sample's rows: `[S, D] x [S, T] -> [B, D, T]`."""
    total, batch_size = a.shape[0], offsets.shape[0] - 1
    if total == 0 or batch_size == 0:
        return a.new_zeros(batch_size, a.shape[1], b.shape[1])
    tiling = _tile(offsets, total)
    if tiling.first is None:
        return torch.bmm(_laid_out(a, tiling).transpose(1, 2), _laid_out(b, tiling))
    accumulator = torch.float64 if a.dtype == torch.float64 else torch.float32
    left, right = (_laid_out(side.to(accumulator), tiling) for side in (a, b))
    products = torch.bmm(left.transpose(1, 2), right)
    return torch.segment_reduce(products, "sum", offsets=tiling.first, axis=0, unsafe=True).to(a.dtype)


def _tile(offsets: Tensor, total: int) -> Tiling:
    """Give every row a place."""
    offsets = covering(offsets, total)
    batch_size = offsets.shape[0] - 1
    sample = sample_of_row(offsets, total)
    position = position_of_row(offsets, sample)
    # Elsewhere than on the CPU, reading the longest length would synchronise.
    longest = int(offsets.diff().max()) if offsets.device.type == "cpu" else total
    if batch_size * longest <= MOST_PADDING * total:
        return Tiling(longest, batch_size, None, position.add_(sample, alpha=longest))
    # That many tiles are enough for sample b, up to `offsets[b + 1] // TILE_ROWS + b`; one to spare stays empty.
    first = offsets // TILE_ROWS + torch.arange(batch_size + 1, device=offsets.device)
    num_tiles = total // TILE_ROWS + batch_size
    return Tiling(TILE_ROWS, num_tiles, first, position.add_(first[sample], alpha=TILE_ROWS))


def _laid_out(rows: Tensor, tiling: Tiling) -> Tensor:
    """Return the tiles `[num_tiles, rows, columns]`, zeros where they have no row."""
    tiles = rows.new_zeros(tiling.num_tiles * tiling.rows, rows.shape[1]).index_copy_(0, tiling.place, rows)
    return tiles.view(tiling.num_tiles, tiling.rows, rows.shape[1])
