"""The operators of cached rows: which of a batch's are missed, and their exchange with a table in the host's memory."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from jagged.ops._shared.operator import OnHost, operator
from jagged.ops._shared.sizes import cdiv, next_power_of_2

# Rows of a block at least, and how many blocks there are at most, up to rounding: each sums up the counts of those before it.
LEAST_BLOCK, MOST_BLOCKS = 1 << 13, 1 << 12


class Inputs(NamedTuple):
    """Cached rows `[S, W]`; for each exchange its slot, and the lines at which the row that leaves and the one that comes begin.

    These are `[N]` each, lines are those of the table, `[U, A]`. `num_rows` `[1]` says how many of them there are; None: all.
    """

    cached: Tensor
    slots: Tensor
    leaving: Tensor
    coming: Tensor
    num_rows: Tensor | None
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
    Of what is found `rows` and `missed` are `[S]` int32; `found` is int32 zeros, of which the first are the totals, and the
    others as many as `room_of` says.
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
    found: Tensor


class Claiming(NamedTuple):
    """The lookup's number, whether rows may be changed by it, and how many pools there are."""

    number: int
    changes: bool
    num_pools: int


def rows_of_block(num_rows: int) -> int:
    """Rows of a block, whose missed ones are counted together: a power of two, so that there are not too many blocks."""
    return max(LEAST_BLOCK, next_power_of_2(cdiv(num_rows, MOST_BLOCKS)))


def room_of(num_rows: int) -> int:
    """How many numbers the search for missed rows needs: a bit for each row, and a count for each block."""
    return cdiv(num_rows, 32) + cdiv(num_rows, rows_of_block(num_rows))


CLAIM_ROWS = operator(
    "claim_rows",
    Claims,
    Claiming,
    Nothing,
    shapes=lambda x, o: Nothing(),
    torch="jagged.ops.host_rows.torch_impl:claim",
    triton="jagged.ops.host_rows.kernels:claim",
    mutates=("counts", "used", "is_dirty", "rows", "missed", "found"),
)


class Seats(NamedTuple):
    """Slots that may be given away, the rows that come, the tables, the cache's maps of one pool; what the exchange is given.

    `ring` `[K]`: slots. `coming`: rows of all pools, one after the other. `totals` `[2 + 2 * pools]`: as of `claim_rows`; it
    gets the number of rows that were seated. `tables` `[3, T]`: each table's first row, element of the host's storage and row
    among the states of rows. `row_of_slot`, `used` and `is_dirty` begin with the pool's slots. `seated` `[5, N]` int64 is
    what is found, `written` a sum.
    """

    ring: Tensor
    coming: Tensor
    totals: Tensor
    tables: Tensor
    slot_of_row: Tensor
    row_of_slot: Tensor
    used: Tensor
    is_dirty: Tensor
    seated: Tensor
    written: Tensor


class Seating(NamedTuple):
    """The pool; where in the ring slots begin to be given, and the lookup below whose number they are free; the lookup's own
    number, whether rows may be changed by it; elements of a row and of a line of the host's storage."""

    pool: int
    cursor: int
    oldest: int
    number: int
    changes: bool
    width: int
    line: int


SEAT_ROWS = operator(
    "seat_rows",
    Seats,
    Seating,
    Nothing,
    shapes=lambda x, o: Nothing(),
    torch="jagged.ops.host_rows.torch_impl:seat",
    triton="jagged.ops.host_rows.kernels:seat",
    mutates=("totals", "slot_of_row", "row_of_slot", "used", "is_dirty", "seated", "written"),
)
