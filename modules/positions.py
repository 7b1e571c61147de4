"""Positions of rows within their sample."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from jagged.modules.jagged_module import JaggedModule
from jagged.modules.jagged_tensor import check_samples, check_width, with_values
from jagged.ops import add_rows, row_positions, sample_of_row


def positions_with_targets(offsets: Tensor, total: int, num_targets: int | Tensor | None, *, from_end: bool = False) -> Tensor:
    """Return the place `[total]` (int64) of each row in its sample, where all targets share the first one behind the history.

    Counted from the end, targets have 0 and the last row of the history has 1.

    Args:
        offsets: `[B + 1]`.
        total: number of rows.
        num_targets: how many of each sample's last rows are targets, or `[B]`; None leaves every row at its own place.
        from_end: count from the last place instead of from the sample's first row.

    Raises:
        ValueError: `num_targets` of another shape, or negative.
    """
    if num_targets is None:
        return row_positions(offsets, total, from_end=from_end)
    lengths = offsets.diff()
    if isinstance(num_targets, Tensor):
        if num_targets.shape != lengths.shape:
            raise ValueError(
                f"num_targets: expected [{lengths.shape[0]}], one for each sample, got {list(num_targets.shape)}; "
                "an int holds for all samples"
            )
        num_targets = num_targets.clamp(min=0)
    elif num_targets < 0:
        raise ValueError(f"num_targets: expected 0 or more, got {num_targets}; use None for no targets")
    samples = sample_of_row(offsets, total)
    history = (lengths - num_targets).clamp(min=0)[samples]
    places = torch.minimum(row_positions(offsets, total), history)
    return history - places if from_end else places


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Turn each pair of neighbouring columns by an angle in proportion to the row's position.

    The scalar product of two rows so turned depends on their positions through the difference alone.

    Args:
        x: `[S, H, D]`; of an odd D the last column stays as it is.
        positions: `[S]`.

    Returns:
        `[S, H, D]` in the dtype of `x`; angles and products are computed in float32 (float64 for float64).

    Source:
        Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, 2021, equations 15 and 34.
    """
    pairs = x.shape[-1] // 2
    exponents = torch.arange(pairs, device=x.device, dtype=torch.promote_types(x.dtype, torch.float32)) / max(pairs, 1)
    angles = (positions[:, None] * 10_000**-exponents)[:, None]
    cosine, sine = angles.cos(), angles.sin()
    even, odd = x[..., : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]
    turned = torch.stack((even * cosine - odd * sine, even * sine + odd * cosine), -1).flatten(-2).to(x.dtype)
    return torch.cat((turned, x[..., 2 * pairs :]), -1) if x.shape[-1] % 2 else turned


class PositionalEncoding(JaggedModule):
    """Add a learned vector for each row's place in its sample, counted from the sample's last row, or from its first.

    Counted from the end, the most recent event always has the same position, however long the history; this is what
    left-padded models do. Rows further back than `max_length` share the last vector. Where a sample's last rows are targets, as
    candidates to be ranked are, they all have the first vector, and the history has the others: it is encoded as it is before
    one target, however many there are.

    Counted from the front, what a row becomes does not depend on how many follow it, so that a `HistoryCache` can keep it. Rows
    from `max_length` on share the last vector, and targets all stand right behind the history.

    Args:
        max_length: number of positions.
        embedding_dim: width D of rows.
        from_end: count from the sample's last row, else from its first.
        device: where parameters live; `"meta"` allocates nothing.

    Shape:
        JaggedTensor with values `[sum L, D]` in and out. `num_targets`: how many of each sample's last rows are targets, one
        number or a tensor `[B]`, int32 or int64; None for no targets. `behind`: int32 or int64 `[B]`, how many rows of each
        sample stand before those that are given, as cached ones do; None for none. From the end it makes no difference.

    Raises:
        ValueError: rows of another width, `num_targets` or `behind` of another shape, or `num_targets` below 0.
    """

    shown = ("max_length", "embedding_dim", "from_end")

    def __init__(
        self, max_length: int, embedding_dim: int, *, from_end: bool = True, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.from_end = from_end
        self.max_length = max_length
        self.embedding_dim = embedding_dim
        self.weight = nn.Parameter(torch.empty(max_length, embedding_dim, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new vectors from a normal distribution of standard deviation 0.02."""
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: JaggedTensor, num_targets: int | Tensor | None = None, behind: Tensor | None = None) -> JaggedTensor:
        """Add the positions' vectors."""
        values, offsets = x.values(), x.offsets()
        check_width("x", values, self.embedding_dim)
        positions = positions_with_targets(offsets, values.shape[0], num_targets, from_end=self.from_end)
        if behind is not None:
            check_samples("behind", behind.shape[0], "x", offsets.shape[0] - 1, "each sample has a number")
            if not self.from_end:
                positions = positions + behind.to(positions.device)[sample_of_row(offsets, values.shape[0])]
        positions = positions.clamp(max=self.max_length - 1)
        return with_values(x, add_rows(values, self.weight, positions))


class TimeEncoding(JaggedModule):
    """Add a learned vector for how long before its sample's own time each row was.

    The time between is counted in buckets, two an octave: 0 for none, then [1, 1.5), [1.5, 2), [2, 3), [3, 4) and so on, as for
    the biases of times in attention. Rows from the last bucket on share it, and rows after the sample's time have the first.

    Args:
        num_buckets: number of buckets. 64 reach 68 years in seconds, 84 in milliseconds.
        embedding_dim: width D of rows.
        device: where parameters live; `"meta"` allocates nothing.

    Shape:
        x: JaggedTensor with values `[sum L, D]`; times: int32 or int64 `[sum L]`, of the rows, in any unit; now: `[B]`, of the
        samples, in the same; out: as x.

    Raises:
        ValueError: rows of another width, no bucket, or times for another number of rows or samples.

    Example:
        >>> import torch
        >>> from torchrec.sparse.jagged_tensor import JaggedTensor
        >>> from jagged.modules import TimeEncoding
        >>> events = JaggedTensor(values=torch.zeros(3, 8), offsets=torch.tensor([0, 2, 3]))
        >>> TimeEncoding(64, 8)(events, torch.tensor([100, 160, 5]), torch.tensor([3_600, 5])).values().shape
        torch.Size([3, 8])
    """

    shown = ("num_buckets", "embedding_dim")

    def __init__(self, num_buckets: int, embedding_dim: int, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        if num_buckets < 1:
            raise ValueError(f"num_buckets: expected 1 or more, got {num_buckets}")
        self.num_buckets = num_buckets
        self.embedding_dim = embedding_dim
        self.weight = nn.Parameter(torch.empty(num_buckets, embedding_dim, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new vectors from a normal distribution of standard deviation 0.02."""
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: JaggedTensor, times: Tensor, now: Tensor) -> JaggedTensor:
        """Add the buckets' vectors."""
        values, offsets = x.values(), x.offsets()
        check_width("x", values, self.embedding_dim)
        check_samples("times", times.shape[0], "x", values.shape[0], "each row has a time", "rows")
        check_samples("now", now.shape[0], "x", offsets.shape[0] - 1, "each sample has a time")
        between = (now[sample_of_row(offsets, values.shape[0])] - times).clamp(min=0).to(torch.float32)
        # The exponent and the first bit of the fraction of a float32 count half octaves; 1.0 is 254, and 0 has no bit.
        buckets = ((between.view(torch.int32) >> 22) - 253).clamp(0, self.num_buckets - 1)
        return with_values(x, add_rows(values, self.weight, buckets))
