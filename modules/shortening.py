"""Shorter histories: the latest events alone, and in training a random part of long ones."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor

from jagged.modules.seeded import SeededModule
from jagged.ops import Draw, drawn_negatives, jagged_slice, sample_of_row

# Rows of a sample stand in the order of such numbers to be chosen from.
_NUMBERS = 2**31 - 1
# Longer than any sample.
_ALL = 2**30
# Numbers of other modules of the same seed are others.
_SALT = 0x2545F4914F6CDD1D


def latest_rows(x: JaggedTensor, length: int, num_targets: int | Tensor | None = None, total: int | None = None) -> JaggedTensor:
    """Keep of each sample its last rows: at most `length` of its history, and its targets.

    Between two blocks this is truncation within the stack: what earlier events were is in the rows that are kept, and later
    blocks cost less. Times, or other rows beside these, are shortened alike by a call of their own.

    Args:
        x: rows `[sum L, *]`.
        length: most rows of a history, 0 or more.
        num_targets: how many of each sample's last rows are targets, all of which are kept: one number or a tensor `[B]`, int32
            or int64; None for none.
        total: how many rows are kept in all; None reads it, which synchronises once.

    Returns:
        JaggedTensor of the kept rows. Gradients of dropped ones are zero.

    Raises:
        ValueError: a length below 0, targets of another shape; no `total` in a compiled or captured call.

    Source:
        The truncation of attention in the published implementation of HSTU, and of ULTRA-HSTU.

    Example:
        >>> import torch
        >>> from torchrec.sparse.jagged_tensor import JaggedTensor
        >>> from jagged.modules import latest_rows
        >>> x = JaggedTensor(torch.arange(9), offsets=torch.tensor([0, 5, 5, 9]))
        >>> latest_rows(x, 2, num_targets=torch.tensor([1, 0, 0])).to_dense()
        [tensor([2, 3, 4]), tensor([], dtype=torch.int64), tensor([7, 8])]
    """
    if length < 0:
        raise ValueError(f"length: expected 0 or more, got {length}")
    offsets = x.offsets()
    lengths = offsets.diff()
    targets = torch.as_tensor(0 if num_targets is None else num_targets, device=offsets.device)
    if targets.dim() and targets.shape != lengths.shape:
        raise ValueError(f"num_targets: expected [{lengths.shape[0]}], one for each sample, got {list(targets.shape)}")
    history = lengths - torch.minimum(targets.clamp(min=0), lengths)
    start = (history - length).clamp(min=0).to(offsets.dtype)
    values, kept = jagged_slice(x.values(), offsets, start, _ALL, total)
    return JaggedTensor(values, offsets=kept)


class KeptRows(NamedTuple):
    """Which rows are kept, `[total]`, int64, in their order, and the offsets `[B + 1]` of what is left."""

    rows: Tensor
    offsets: Tensor


class StochasticLength(SeededModule):
    """Shorten long histories at random in training: attention to half as many rows takes a quarter of the time.

    A sample of n rows, with `n > N^(alpha / 2)`, keeps with probability `1 - N^alpha / n^2` a random `N^(alpha / 2)` of its rows,
    in their order. Others stay whole, and so does every sample in evaluation.

    Which samples are shortened is drawn by `draw`, where their lengths are: in a loader, on the host, the number of rows is then
    known without waiting for a device. Which rows stay is drawn on the device. Both follow torch's random state, so that
    `torch.manual_seed` repeats them.

    Args:
        longest: N, the length that histories are cut at, above 0.
        alpha: from above 0 to 2; 2 shortens nothing.
        seed: of draws in evaluation, of which there are none; as of every module that draws.
        device: where the seed lives.

    Shape:
        JaggedTensor of any rows `[sum L, *]` in; `KeptRows` out, by which rows and all that stands beside them are selected.

    Raises:
        ValueError: numbers out of range, lengths of another shape.

    Source:
        Zhai et al., Actions Speak Louder than Words, ICML 2024, section 3.2, which takes alpha from 1.6 to 2.

    Example:
        >>> import torch
        >>> from torchrec.sparse.jagged_tensor import JaggedTensor
        >>> from jagged.modules import StochasticLength
        >>> shorten = StochasticLength(longest=100, alpha=1.0)
        >>> x = JaggedTensor(torch.arange(60), offsets=torch.tensor([0, 50, 60]))
        >>> lengths = shorten.draw(x.offsets().diff())
        >>> kept = shorten(x, lengths, total=int(lengths.sum()))
        >>> shorter = JaggedTensor(x.values()[kept.rows], offsets=kept.offsets)
        >>> shorter.lengths()[1], bool((shorter.values().diff() > 0).all())
        (tensor(10), True)
    """

    shown = ("longest", "alpha")

    def __init__(self, longest: int, alpha: float = 1.7, *, seed: int = 0, device: torch.device | str | None = None) -> None:
        super().__init__(seed, device)
        if longest < 1:
            raise ValueError(f"longest: expected 1 or more, got {longest}")
        if not 0 < alpha <= 2:
            raise ValueError(f"alpha: expected above 0 and at most 2, got {alpha}")
        self.longest, self.alpha = longest, alpha

    def draw(self, lengths: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return how many rows each sample keeps: `[B]`, of the lengths' dtype and device.

        Args:
            lengths: `[B]`, integers.
            generator: what draws; None for torch's random state.
        """
        if not self.training:
            return lengths
        kept = max(1, int(self.longest ** (self.alpha / 2)))
        whole = self.longest**self.alpha / lengths.clamp(min=1).double().square()
        is_shortened = torch.rand(lengths.shape, dtype=torch.float64, device=lengths.device, generator=generator) >= whole
        return torch.where(is_shortened & (lengths > kept), kept, lengths).to(lengths.dtype)

    def forward(self, x: JaggedTensor, lengths: Tensor | None = None, total: int | None = None) -> KeptRows:
        """Return the rows that are kept: `lengths` of each sample, else as many as `draw` says. Without `total` it is read."""
        offsets = x.offsets()
        lengths = self.draw(offsets.diff()) if lengths is None else lengths
        return drawn_rows(offsets, x.values().shape[0], lengths, total, self.next_seed())


def drawn_rows(offsets: Tensor, num_rows: int, lengths: Tensor, total: int | None, seed: Tensor) -> KeptRows:
    """Draw which rows of each sample are kept, in their order, each as likely as any other.

    Args:
        offsets: `[B + 1]`, of `num_rows` rows.
        num_rows: in all.
        lengths: `[B]`, how many of each sample are kept; of more than it has all are.
        total: the sum of them, that is of what is kept; None reads it, which synchronises once.
        seed: int64 `[1]`, on the offsets' device.

    Raises:
        ValueError: lengths of another shape.
    """
    lengths, before = lengths.to(device=offsets.device, dtype=offsets.dtype), offsets.diff()
    if lengths.shape != before.shape:
        raise ValueError(f"lengths: expected [{before.shape[0]}], one for each sample, got {list(lengths.shape)}")
    lengths = torch.minimum(lengths.clamp(min=0), before)
    kept = torch.nn.functional.pad(lengths.cumsum(0, dtype=offsets.dtype), (1, 0))
    total = int(kept[-1]) if total is None else total
    place = torch.arange(num_rows, device=offsets.device)
    samples = sample_of_row(offsets, num_rows)
    numbers = drawn_negatives(Draw("uniform", 1, seed ^ _SALT), num_rows, _NUMBERS)[:, 0]
    # Within each sample by their numbers; of these the first so many are kept.
    order = torch.argsort(samples * _NUMBERS + numbers, stable=True)
    is_kept = torch.empty_like(place, dtype=torch.bool)
    is_kept[order] = place - offsets[:-1][samples] < lengths[samples]
    # Their places in the result without asking how many there are; what is dropped goes behind its end.
    where = torch.where(is_kept, is_kept.cumsum(0) - 1, total).clamp(max=total)
    rows = place.new_zeros(total + 1).scatter_(0, where, place)
    return KeptRows(rows[:total], kept)
