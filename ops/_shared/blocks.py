"""Samples' blocks of pairs padded side by side, for the PyTorch implementations that compute on dense blocks.

Samples are sorted by the powers of two above their two lengths and cut into chunks of one such class, each padded to its own
longest sample. So the count of PyTorch calls follows the work, not the number of samples, and padding is less than fourfold.
Lengths are read on the host, which synchronises elsewhere than on the CPU.
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
class Chunk:
    """Samples padded side by side: `n` blocks of `rows x columns` pairs."""

    a_rows: Tensor  # [n, rows] index of each row of a; past the end of a sample its last one
    b_rows: Tensor  # [n, columns] index of each row of b, alike
    a_exists: Tensor  # [n, rows]
    b_exists: Tensor  # [n, columns]
    pairs: Tensor  # [n * rows * columns] index of each pair; where there is none, the place past the last pair

    def blocks(self, pairs: Tensor) -> Tensor:
        """Gather `[n, rows, columns]` out of pairs that have been `extended`."""
        return pairs.index_select(0, self.pairs).view(*self.a_rows.shape, -1)


def extended(pairs: Tensor, fill: float) -> Tensor:
    """Return pairs `[P + 1]`, whose last is what chunks find where there is none."""
    return torch.cat([pairs, pairs.new_full((1,), fill)])


def chunks(
    a_offsets: Tensor,
    b_offsets: Tensor,
    num_pairs: int,
    *,
    a_total: int | None = None,
    b_total: int | None = None,
    pair_offsets: Tensor | None = None,
) -> Iterator[Chunk]:
    """Yield chunks that hold every sample with pairs; wrong offsets leave samples out rather than lead outside the tensors.

    Args:
        a_offsets, b_offsets: `[B + 1]`, int32 or int64: the blocks' rows and columns.
        num_pairs: of which the blocks lie inside.
        a_total, b_total: numbers of rows that `a_rows` and `b_rows` lie inside; None where they are not used.
        pair_offsets: `[B + 1]`, where blocks begin; None computes it.
    """
    a_limits, b_limits = a_offsets.to(torch.int64).clamp(0, a_total), b_offsets.to(torch.int64).clamp(0, b_total)
    # No side of a block is longer than all pairs, so that products of wrong lengths do not overflow.
    lengths = torch.stack([a_limits.diff(), b_limits.diff()]).clamp_(0, num_pairs)
    areas = lengths.prod(0)
    starts = scan_pairs(a_offsets, b_offsets, "torch") if pair_offsets is None else pair_offsets
    starts = torch.stack([a_limits[:-1], b_limits[:-1], starts[:-1].to(torch.int64)])
    kept = ((areas > 0) & (starts[2] >= 0) & (starts[2] <= num_pairs - areas)).nonzero().flatten()
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


def _chunk(lengths: Tensor, starts: Tensor, num_pairs: int) -> Chunk:
    rows, columns = (torch.arange(longest, device=lengths.device) for longest in lengths.amax((1, 2)).tolist())
    a_exists, b_exists = rows < lengths[0], columns < lengths[1]
    # A row or a column that is missing takes the sum past the last pair.
    first_pair = torch.where(a_exists, starts[2] + rows * lengths[1], num_pairs)
    pairs = first_pair[:, :, None] + torch.where(b_exists, columns, num_pairs)[:, None, :]
    return Chunk(
        a_rows=starts[0] + torch.minimum(rows, lengths[0] - 1),
        b_rows=starts[1] + torch.minimum(columns, lengths[1] - 1),
        a_exists=a_exists,
        b_exists=b_exists,
        pairs=pairs.clamp_(max=num_pairs).flatten(),
    )
