"""Gradients of whole tables that are made slice by slice, and the lookups of each slice's rows: every row is updated once."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from jagged.ops._shared.versions import Unchanged
from jagged.ops.embedding_bag.fields import BATCH, FEATURE
from jagged.ops.embedding_bag.layout import BagLayout
from jagged.ops.embedding_bag.spec import WeightsInputs

#: Slices that fill the room for a gradient, where some wait for a second walk.
SLICES_OF_ROOM = 8


class Source(Protocol):
    """The gradient of a table, `[rows, width]`, by slices.

    Attributes:
        row_bytes: of a row.
        room: bytes that there is room for; None for all.
        unchanged: what it is made of, which nobody may write to.
    """

    row_bytes: int
    room: int | None
    unchanged: Unchanged

    def __call__(self, first: int, last: int, behind: int) -> Tensor:
        """Return that of the rows from `first` to before `last`, in float32 or float64.

        Where it can, with room for so many numbers behind (`ops/_shared/room.py`).
        """

    def named(self, first: int, last: int) -> Tensor | None:
        """Return which of these rows it is of, `[last - first]` bool; None for all. The others have zeros, and are nobody's."""

    def is_finite(self) -> Tensor:
        """Return whether what it is made of is finite: `[]` bool on the device."""

    def anew(self) -> Source:
        """Return the same without what it has found out about its tensors, which may have other numbers now."""

    def forget(self) -> None:
        """Let go of what it has found out about its tensors, which it will find out again."""


class Slices(NamedTuple):
    """A table's gradient in slices, the version of the storage of which it is, and the backend of its updates."""

    number: int
    version: int
    backend: str | None
    source: Source


class Slice(NamedTuple):
    """Rows of a table, from `first` to before `last`, and their gradient; the sum of all sources of that table.

    `named` says which of them have one, None that all do.
    """

    number: int
    first: int
    last: int
    gradient: Tensor
    named: Tensor | None


def slices_of(
    given: Sequence[Slices],
    rows: tuple[int, ...],
    kept: dict[tuple[int, int], Tensor],
    *,
    keeps: bool = False,
    behind: int = 0,
) -> Iterator[Slice]:
    """Yield the slices of all tables that have any: one of each, where there is room. Each is let go before the next is made.

    Args:
        given: what tables' gradients are made of.
        rows: of each table.
        kept: gradients by table and first row, which are taken from here and not made again.
        keeps: put there what there is room for beside the slice in work. The smallest room is that of all tables.
        behind: numbers that will be brought behind a gradient, for which one of all rows has room.
    """
    rooms, row_bytes = (of.source.room for of in given), {of.number: of.source.row_bytes for of in given}
    whole = sum(rows[number] * of_row for number, of_row in row_bytes.items())
    room = min((of for of in rooms if of is not None), default=whole)
    steps, left = {number: rows[number] for number in row_bytes}, None
    if whole > room:
        # Small ones leave most of the room to those that wait, and each is some launches. Where none wait, half is for the copy
        # of a slice beside the lookups of its rows.
        pieces = SLICES_OF_ROOM if keeps or kept else 2
        steps = {number: max(1, room // pieces // of_row) for number, of_row in row_bytes.items()}
        left = room - max(steps[number] * row_bytes[number] for number in steps)
    for number, step in steps.items():
        sources = [of.source for of in given if of.number == number]
        for first in range(0, rows[number], step):
            last = min(first + step, rows[number])
            gradient = kept.pop((number, first), None)
            if gradient is None:
                # A slice is copied behind the lookups of its rows: room behind each would take more than the copy does.
                gradient = sources[0](first, last, behind if left is None else 0)
                for source in sources[1:]:
                    gradient += source(first, last, 0)
            if keeps and (left is None or gradient.nbytes <= left):
                kept[number, first] = gradient
                left = None if left is None else left - gradient.nbytes
            named = [of for source in sources if (of := source.named(first, last)) is not None]
            is_all = len(named) < len(sources)
            yield Slice(number, first, last, gradient, None if is_all else functools.reduce(torch.logical_or, named))
            del gradient


class Entries:
    """The lookups of a call, entry by entry, to take those out that read some rows.

    Args:
        layout: in which sequences are bags.
        x: with `batches`.
    """

    def __init__(self, layout: BagLayout, x: WeightsInputs) -> None:
        assert x.batches is not None
        num_bags, device = x.offsets.shape[0] - 1, x.grad.device
        place = torch.arange(x.indices.shape[0], device=device)
        bags = torch.searchsorted(x.offsets[1:].contiguous(), place, right=True)
        # Entries behind the last bag, which kernels leave out, are of a bag of their own.
        self._exists = bags < num_bags
        of_features = torch.arange(layout.num_features, device=device)
        of_bags = of_features.repeat_interleave(x.batches[:, BATCH.num_bags], output_size=num_bags)
        fields = x.layout[torch.nn.functional.pad(of_bags, (0, 1))[bags]]
        self._tables = fields[:, FEATURE.table]
        if layout.has_means:
            # Of fewer entries a mean would be another one.
            lengths = torch.nn.functional.pad(x.offsets.diff(), (0, 1)).clamp(min=1)[bags]
            share = torch.where(fields[:, FEATURE.is_mean] != 0, 1 / lengths, 1.0)
            x = x._replace(per_sample_weights=share if x.per_sample_weights is None else share * x.per_sample_weights)
            layout = _all_sums(layout)
        self.layout = layout
        self._x = x._replace(layout=layout.tensor(device), host_layout=layout.fields)

    @property
    def gradient_size(self) -> int:
        """How many numbers the gradients of the lookups' bags are."""
        return self._x.grad.numel()

    def of_others(self, numbers: Sequence[int]) -> WeightsInputs | None:
        """Return the lookups of all tables but some; None where there are none."""
        assert self.layout.tables is not None
        if not set(self.layout.tables) - set(numbers):
            return None
        return self._only(functools.reduce(torch.logical_and, (self._tables != number for number in numbers)))

    def of_slice(self, of: Slice) -> WeightsInputs:
        """Return the lookups of a slice's rows."""
        ids = self._x.indices
        return self._only((self._tables == of.number) & (ids >= of.first) & (ids < of.last))

    def _only(self, stays: Tensor) -> WeightsInputs:
        x = self._x
        if stays.is_cuda:
            # Of ids that no table has nothing is read, and how many they are the host need not know.
            return x._replace(indices=torch.where(stays, x.indices, -1))
        stays = stays & self._exists
        before = torch.cat([stays.new_zeros(1, dtype=x.offsets.dtype), stays.cumsum(0, dtype=x.offsets.dtype)])
        factors = None if x.per_sample_weights is None else x.per_sample_weights[stays]
        return x._replace(indices=x.indices[stays], offsets=before[x.offsets], per_sample_weights=factors)


@functools.lru_cache(maxsize=64)
def _all_sums(layout: BagLayout) -> BagLayout:
    """Return the same features without means; the same layout every time, for what it keeps on a device."""
    return BagLayout(layout.rows, layout.widths, layout.tables)
