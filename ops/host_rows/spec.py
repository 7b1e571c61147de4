"""The operators of cached rows: which of a batch's are missed, and their exchange with a table in the host's memory."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from jagged.ops._shared.operator import OnHost, operator


class Inputs(NamedTuple):
    """Cached rows `[S, W]`; for each exchange its slot, and the lines at which the row that leaves and the one that comes begin.

    These are `[N]` each, lines are those of the table, `[U, A]`.
    """

    cached: Tensor
    slots: Tensor
    leaving: Tensor
    coming: Tensor
    table: OnHost


class Options(NamedTuple):
    """None."""


class Nothing(NamedTuple):
    """Rows change in place."""


EXCHANGE_ROWS = operator(
    "exchange_rows",
    Inputs,
    Options,
    Nothing,
    shapes=lambda x, o: Nothing(),
    torch="jagged.ops.host_rows.torch_impl:exchange",
    triton="jagged.ops.host_rows.kernels:exchange",
    mutates=("cached", "table"),
    float64_on_triton=True,
)


class Claims(NamedTuple):
    """A batch's ids `[S]`, each feature's last offset `[F]` and what it reads, `[F, 4]` int64; the cache's maps; what is found.

    A feature reads a table: the number of its first row, how many it has, the place of its pool's first slot, and the pool.
    `slot_of_row` `[R + 1]`: -1 for a row that has none, and behind the last; `counts` `[R]`; `used` and `is_dirty` `[slots + 1]`.
    Of what is found `rows` and `missed` are `[S]` int32, `totals` `[2 + pools]` int32 zeros.
    """

    indices: Tensor
    ends: Tensor
    of_features: Tensor
    slot_of_row: Tensor
    counts: Tensor
    used: Tensor
    is_dirty: Tensor
    rows: Tensor
    missed: Tensor
    totals: Tensor


class Claiming(NamedTuple):
    """The lookup's number, and whether rows may be changed by it."""

    number: int
    changes: bool


CLAIM_ROWS = operator(
    "claim_rows",
    Claims,
    Claiming,
    Nothing,
    shapes=lambda x, o: Nothing(),
    torch="jagged.ops.host_rows.torch_impl:claim",
    triton="jagged.ops.host_rows.kernels:claim",
    mutates=("slot_of_row", "counts", "used", "is_dirty", "rows", "missed", "totals"),
)


class Seats(NamedTuple):
    """Slots that may be given away, the rows that come, the tables, the cache's maps of one pool; what the exchange is given.

    `ring`, `is_free` and `order` `[K]`: slots, whether their rows may leave, and how many may up to each. `coming` `[N]`: rows.
    `tables` `[3, T]`: each table's first row, element of the host's storage and row among the states of rows. `row_of_slot`,
    `used` and `is_dirty` begin with the pool's slots. Of what is found all but `written`, a sum, are `[N]` int64.
    """

    ring: Tensor
    is_free: Tensor
    order: Tensor
    coming: Tensor
    tables: Tensor
    slot_of_row: Tensor
    row_of_slot: Tensor
    used: Tensor
    is_dirty: Tensor
    slots: Tensor
    leaving_lines: Tensor
    coming_lines: Tensor
    leaving_rows: Tensor
    coming_rows: Tensor
    written: Tensor


class Seating(NamedTuple):
    """The lookup's number, whether rows may be changed by it, elements of a row and of a line of the host's storage."""

    number: int
    changes: bool
    width: int
    line: int


_FOUND = ("slots", "leaving_lines", "coming_lines", "leaving_rows", "coming_rows", "written")
SEAT_ROWS = operator(
    "seat_rows",
    Seats,
    Seating,
    Nothing,
    shapes=lambda x, o: Nothing(),
    torch="jagged.ops.host_rows.torch_impl:seat",
    triton="jagged.ops.host_rows.kernels:seat",
    mutates=("slot_of_row", "row_of_slot", "used", "is_dirty", *_FOUND),
)
