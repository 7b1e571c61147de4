"""The products in plain PyTorch: the CPU path and the float64 path.

For products with one jagged operand rows are laid out in tiles that each hold rows of one sample, for one batched product of all
of them. Over pairs, samples of like lengths lie side by side, in bounded pieces.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from jagged.ops._shared.blocks import chunks, extended
from jagged.ops._shared.offsets import covering, position_of_row, sample_of_row
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

TILE_ROWS = 64
# A tile a sample, as long as the longest, where the tiles then hold at most so many times the rows.
MOST_PADDING = 3


class Tiling(NamedTuple):
    """Rows of a tile, number of tiles, each sample's first tile `[B + 1]` (None: one each) and each row's place in the tiles."""

    rows: int
    num_tiles: int
    first: Tensor | None
    place: Tensor


def jagged_dense_bmm(x: DenseInputs, o: Options) -> Rows:
    """Multiply each sample's rows by its matrix and add its bias."""
    values, offsets, dense, bias = x
    total, (batch_size, _, columns) = values.shape[0], dense.shape
    if total == 0 or batch_size == 0:
        return Rows(values.new_zeros(total, columns))
    if values.shape[1] == 1:
        # Multiples of one row a sample, as the gradient of a sum of rows has them.
        sample = sample_of_row(offsets, total)
        rows = values * dense.squeeze(1).index_select(0, sample)
        return Rows(rows if bias is None else rows.add_(bias.index_select(0, sample)))
    tiling = _tile(offsets, total)
    if tiling.first is not None:
        samples = sample_of_row(tiling.first, tiling.num_tiles)
        dense, bias = dense[samples], None if bias is None else bias[samples]
    rows = _laid_out(values, tiling)
    products = torch.bmm(rows, dense) if bias is None else torch.baddbmm(bias[:, None], rows, dense)
    return Rows(products.flatten(0, 1).index_select(0, tiling.place))


def jagged_jagged_bmm(x: JaggedInputs, o: Options) -> Sums:
    """Add up the outer products of each sample's rows."""
    a, b, offsets = x
    total, batch_size = a.shape[0], offsets.shape[0] - 1
    if total == 0 or batch_size == 0:
        return Sums(a.new_zeros(batch_size, a.shape[1], b.shape[1]))
    if a.is_cpu and a.dtype == torch.float32 and 1 in (a.shape[1], b.shape[1]):
        # A weighted sum of rows is what a lookup of all rows does.
        weights, rows = (a, b) if a.shape[1] == 1 else (b, a)
        ends = covering(offsets, total)
        every = torch.arange(total)
        sums = F.embedding_bag(
            every, rows.contiguous(), ends, mode="sum", per_sample_weights=weights.squeeze(1), include_last_offset=True
        )
        return Sums(sums.view(batch_size, a.shape[1], b.shape[1]))
    tiling = _tile(offsets, total)
    if tiling.first is None:
        return Sums(torch.bmm(_laid_out(a, tiling).transpose(1, 2), _laid_out(b, tiling)))
    accumulator = torch.promote_types(a.dtype, torch.float32)
    left, right = (_laid_out(side.to(accumulator), tiling) for side in (a, b))
    products = torch.bmm(left.transpose(1, 2), right)
    return Sums(torch.segment_reduce(products, "sum", offsets=tiling.first, axis=0, unsafe=True).to(a.dtype))


def pair_scores(x: PairInputs, o: PairOptions) -> Scores:
    """Return the scores of each sample's rows of a against its rows of b, zeros where wrong offsets have none."""
    a, b, a_offsets, b_offsets = x
    dtype = torch.promote_types(a.dtype, torch.float32)
    scores = a.new_zeros(o.num_pairs + 1)
    for chunk in chunks(a_offsets, b_offsets, o.num_pairs, a_total=a.shape[0], b_total=b.shape[0]):
        products = torch.bmm(_gather(a, chunk.a_rows).to(dtype), _gather(b, chunk.b_rows).to(dtype).transpose(1, 2))
        scores.scatter_(0, chunk.pairs, products.flatten().to(scores.dtype))
    return Scores(scores[: o.num_pairs])


def pair_sums(x: WeightedInputs, o: WeightedOptions) -> WeightedSums:
    """Return each sample's rows of values, weighted by its block of scores or by that transposed."""
    scores, values, a_offsets, b_offsets = x
    output_total, transposed = o
    dtype = torch.promote_types(values.dtype, torch.float32)
    a_total, b_total = (values.shape[0], output_total) if transposed else (output_total, values.shape[0])
    # One row more takes what is computed for rows that are not there.
    output = values.new_zeros(output_total + 1, values.shape[1])
    filled = extended(scores, 0)
    for chunk in chunks(a_offsets, b_offsets, scores.shape[0], a_total=a_total, b_total=b_total):
        weights = chunk.blocks(filled).to(dtype)
        sides = (chunk.a_rows, chunk.a_exists), (chunk.b_rows, chunk.b_exists)
        (rows, exists), (output_rows, output_exists) = sides if transposed else sides[::-1]
        # Weights of 0 do not hide an infinity in the row that stands in for missing ones.
        terms = _gather(values, rows).to(dtype).masked_fill_(~exists[:, :, None], 0)
        sums = torch.bmm(weights.transpose(1, 2) if transposed else weights, terms)
        places = torch.where(output_exists, output_rows, output_total)
        output.index_copy_(0, places.flatten(), sums.flatten(0, 1).to(output.dtype))
    return WeightedSums(output[:output_total])


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


def _gather(values: Tensor, rows: Tensor) -> Tensor:
    return values.index_select(0, rows.flatten()).view(*rows.shape, values.shape[1])
