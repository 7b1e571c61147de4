"""Public operators of rows that are cached: claims of those that a batch misses, and their exchange with the host's."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from jagged.ops._shared.validation import check_tensor
from jagged.ops.host_rows.spec import (
    CLAIM_ROWS,
    EXCHANGE_ROWS,
    SEAT_ROWS,
    Claiming,
    Claims,
    Inputs,
    Options,
    Seating,
    Seats,
    room_of,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64)
NUMBERS = (torch.int64, torch.int32)


def exchange_rows(
    cached: Tensor,
    table: Tensor,
    slots: Tensor,
    leaving: Tensor,
    coming: Tensor,
    *,
    num_rows: Tensor | None = None,
    backend: str | None = None,
) -> None:
    """Write cached rows back to a table in the host's memory, and read others into their slots, in one pass over the link.

    On a GPU one kernel reads and writes the host's memory in place, both directions at once; nothing is staged, and nothing
    waits for the host. The host may read the table when the stream has come through.

    Args:
        cached: `[S, W]`, float32, bfloat16, float16, float64 or int64, contiguous: the slots. Changed in place.
        table: `[U, A]` of the same dtype, contiguous, on the CPU; pinned (page-locked) where `cached` is on a GPU. Changed in
            place. A row is `W / A` lines, one after the other, and begins at any: so tables that do not lie side by side are one.
            In the simplest case `A` is `W`.
        slots: `[N]`, int32 or int64: each once.
        leaving: `[N]`, int32 or int64: the line of the table from which the slot's contents are written; below 0: they are not.
        coming: `[N]`, int32 or int64: the line of the table where the row that the slot gets begins; below 0: it stays as it is.
            No row may leave and come in one call.
        num_rows: `[1]` int32: how many of the `N` there are, at most `N`; the others may be anything. None: all. So nobody need
            know on the host how many rows a batch misses.
        backend: `"torch"` or `"triton"`; None takes Triton for CUDA tensors and PyTorch for the rest.

    Raises:
        ValueError: shapes or devices that do not fit, tensors with gaps, a table that is not pinned beside a GPU.
        TypeError: dtypes other than those above, or two of them.

    Example:
        >>> import torch
        >>> from jagged.ops import exchange_rows
        >>> table, cached = torch.arange(8.0).view(4, 2), torch.tensor([[-1.0, -1.0]])
        >>> exchange_rows(cached, table, torch.tensor([0]), torch.tensor([3]), torch.tensor([1]))
        >>> cached.tolist(), table[3].tolist()
        ([[2.0, 3.0]], [-1.0, -1.0])
    """
    for name, tensor in (("cached", cached), ("table", table)):
        check_tensor(name, tensor, "[rows, W]", DTYPES)
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: expected adjacent rows, got stride {list(tensor.stride())}; pass a contiguous tensor")
    if table.dtype != cached.dtype:
        raise TypeError(f"table: expected the dtype of cached, {cached.dtype}, got {table.dtype}")
    if not table.shape[1] or cached.shape[1] % table.shape[1]:
        raise ValueError(
            f"table: expected lines of a width that divides that of cached, {cached.shape[1]}, got {table.shape[1]} columns"
        )
    if not table.is_cpu:
        raise ValueError(f"table: expected rows in the host's memory, got {table.device}")
    for name, tensor in (("slots", slots), ("leaving", leaving), ("coming", coming)):
        check_tensor(name, tensor, "[N]", NUMBERS)
        if tensor.shape != slots.shape:
            raise ValueError(f"{name}: expected one for each of the {slots.shape[0]} slots, got {tensor.shape[0]}")
    if num_rows is not None:
        check_tensor("num_rows", num_rows, "[1]", (torch.int32,))
        if num_rows.shape[0] != 1:
            raise ValueError(f"num_rows: expected shape [1], got {list(num_rows.shape)}")
    if not slots.shape[0]:
        return
    numbers = (slots.contiguous(), leaving.contiguous(), coming.contiguous())
    EXCHANGE_ROWS(Inputs(cached.detach(), *numbers, num_rows, table.detach()), Options(), backend)
    # Kernels count no change of their own.
    torch.autograd.graph.increment_version(cached)
    torch.autograd.graph.increment_version(table)


def claim_rows(
    indices: Tensor,
    ends: Tensor,
    of_features: Tensor,
    slot_of_row: Tensor,
    counts: Tensor,
    used: Tensor,
    is_dirty: Tensor,
    *,
    number: int,
    changes: bool,
    num_pools: int = 1,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Find which rows a batch's lookups read, count them, and list each row that is in no slot once.

    Nothing waits for the device.

    Rows of all tables are numbered from 0 to R; slots lie in pools, each of which has some of the tables.

    Args:
        indices: `[S]`, int32 or int64: ids, feature after feature.
        ends: `[F]`, int32 or int64: where each feature's ids end.
        of_features: `[F, 4]` int64: the number of the first row of the table that it reads, how many rows that has, where the
            slots of its pool begin among all slots, and the pool.
        slot_of_row: `[R + 1]` int32: each row's slot in its pool; -1 for none, and behind the last row.
        counts: `[R]` int32. Changed in place: 1 more for each lookup of a row.
        used: `[slots + 1]` int32. Changed in place: `number` for the slots that are read.
        is_dirty: `[slots + 1]` bool. Changed in place: True for these slots, if rows may be changed.
        number: of this lookup.
        changes: whether rows may be changed by it.
        num_pools: P.
        backend: `"torch"` or `"triton"`; None takes Triton for CUDA tensors and PyTorch for the rest.

    Returns:
        `[S]` int32, each lookup's row, R for an id that its table does not have; `[S]` int32, of which the first are the rows
        that are missed, in their order; and `[2 + 2 * P]` int32: how many are missed, how many lookups found their rows in slots,
        how many rows of each pool are missed, and P zeros, for `seat_rows`.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices that do not fit.

    Example:
        >>> import torch
        >>> from jagged.ops import claim_rows
        >>> slot_of_row, counts = torch.tensor([-1, 0, -1, -1], dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
        >>> used, is_dirty = torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.bool)
        >>> maps = torch.tensor([[0, 3, 0, 0]]), slot_of_row, counts, used, is_dirty
        >>> rows, missed, totals = claim_rows(torch.tensor([2, 1, 2]), torch.tensor([3]), *maps, number=7, changes=True)
        >>> rows.tolist(), missed[:1].tolist(), totals.tolist(), counts.tolist(), used.tolist()
        ([2, 1, 2], [2], [1, 1, 1, 0], [0, 1, 2], [7, 0])
    """
    check_tensor("indices", indices, "[S]", NUMBERS)
    check_tensor("ends", ends, "[F]", NUMBERS)
    check_tensor("of_features", of_features, "[F, 4]", (torch.int64,))
    if of_features.shape != (ends.shape[0], 4) or not ends.shape[0]:
        raise ValueError(
            f"of_features: expected 4 numbers for each of the {ends.shape[0]} features, got {list(of_features.shape)}"
        )
    of_maps = (("slot_of_row", slot_of_row, "[R + 1]"), ("counts", counts, "[R]"), ("used", used, "[slots + 1]"))
    for name, tensor, shape in of_maps:
        check_tensor(name, tensor, shape, (torch.int32,))
    check_tensor("is_dirty", is_dirty, "[slots + 1]", (torch.bool,))
    if counts.shape[0] + 1 != slot_of_row.shape[0] or used.shape != is_dirty.shape:
        raise ValueError(
            f"counts: expected one for each row of slot_of_row but the last, and used and is_dirty of one length, got "
            f"{counts.shape[0]} of {slot_of_row.shape[0]}, and {used.shape[0]} and {is_dirty.shape[0]}"
        )
    rows, missed = (torch.empty_like(indices, dtype=torch.int32) for _ in range(2))
    found = torch.zeros(2 + 2 * num_pools + room_of(counts.shape[0]), dtype=torch.int32, device=indices.device)
    if indices.shape[0]:
        maps = of_features.contiguous(), slot_of_row, counts, used, is_dirty
        claims = Claims(indices.contiguous(), ends.contiguous(), *maps, rows, missed, found)
        CLAIM_ROWS(claims, Claiming(number, changes, num_pools), backend)
    return rows, missed, found[: 2 + 2 * num_pools]


class SeatedRows(NamedTuple):
    """What `exchange_rows` is given, `[N]` int64 each: slots, and the rows that leave and come, as lines and as numbers.

    Of these the first are filled, as many as `num_rows` `[1]` int32 says. -1 for rows that do not leave: those of empty slots,
    and those that were not changed.
    """

    slots: Tensor
    leaving_lines: Tensor
    coming_lines: Tensor
    leaving_rows: Tensor
    coming_rows: Tensor
    num_rows: Tensor


def seat_rows(
    ring: Tensor,
    coming: Tensor,
    totals: Tensor,
    tables: Tensor,
    slot_of_row: Tensor,
    row_of_slot: Tensor,
    used: Tensor,
    is_dirty: Tensor,
    written: Tensor,
    *,
    pool: int,
    cursor: int,
    oldest: int,
    number: int,
    changes: bool,
    width: int,
    line: int,
    backend: str | None = None,
) -> SeatedRows:
    """Give the first free slots of a ring to rows that come, if there are enough, and say which rows leave them.

    Nothing waits for the device, which knows alone how many rows come, and whether they have room.

    Args:
        ring: `[K]` int64: slots of a pool, each once.
        coming: `[S]` int32: rows that are in no slot, each once, those of each pool behind those of the pool before.
        totals: `[2 + 2 * P]` int32: as of `claim_rows`; from the third on how many rows of each pool come. Changed in place: of
            the last P the pool's gets the number of rows that were seated, which is that of those that come, or 0 where there
            are fewer free slots. Then nothing else is changed.
        tables: `[3, T]` int64, contiguous: for each table the number of its first row, the element of the host's storage at
            which it begins, a multiple of `line`, and its first row among the states of rows.
        slot_of_row, used, is_dirty: as of `claim_rows`, the latter two from the pool's first slot on. Changed in place.
        row_of_slot: int32, from the pool's first slot on: each slot's row, -1 for none. Changed in place.
        written: `[]` int64: grows by the number of rows that leave.
        pool: whose rows are seated.
        cursor: the place in the ring from which on slots are given, from 0 to K - 1.
        oldest: slots are free whose `used` is below it.
        number, changes: as of `claim_rows`.
        width, line: elements of a row and of a line.
        backend: `"torch"`, for which the host reads how many rows come, or `"triton"`; None takes Triton for CUDA tensors and
            PyTorch for the rest.

    Returns:
        Of N places, the smaller of K and S.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices that do not fit, a pool or a cursor that is not there.

    Example:
        >>> import torch
        >>> from jagged.ops import seat_rows
        >>> slot_of_row, row_of_slot = torch.tensor([0, -1, -1], dtype=torch.int32), torch.tensor([0], dtype=torch.int32)
        >>> maps = slot_of_row, row_of_slot, torch.zeros(1, dtype=torch.int32), torch.tensor([True])
        >>> coming, totals = torch.tensor([2], dtype=torch.int32), torch.tensor([1, 0, 1, 0], dtype=torch.int32)
        >>> tables, written = torch.zeros(3, 1, dtype=torch.int64), torch.tensor(0)
        >>> options = {"pool": 0, "cursor": 0, "oldest": 1, "number": 1, "changes": False, "width": 8, "line": 4}
        >>> seated = seat_rows(torch.tensor([0]), coming, totals, tables, *maps, written, **options)
        >>> seated.leaving_lines.tolist(), seated.coming_lines.tolist(), slot_of_row.tolist(), row_of_slot.tolist()
        ([0], [4], [-1, -1, 0], [2])
        >>> seated.num_rows.tolist()
        [1]
    """
    of_maps = (("slot_of_row", slot_of_row), ("row_of_slot", row_of_slot), ("used", used), ("coming", coming), ("totals", totals))
    for name, tensor in of_maps:
        check_tensor(name, tensor, "[*]", (torch.int32,))
    check_tensor("ring", ring, "[K]", (torch.int64,))
    check_tensor("is_dirty", is_dirty, "[*]", (torch.bool,))
    check_tensor("tables", tables, "[3, T]", (torch.int64,))
    if tables.shape[0] != 3 or not tables.is_contiguous():
        raise ValueError(f"tables: expected shape [3, T], contiguous, got {list(tables.shape)}")
    num_pools = totals.shape[0] // 2 - 1
    if not 0 <= pool < num_pools or totals.shape[0] % 2:
        raise ValueError(f"totals: expected two numbers, and two for each pool, up to {pool}, got {totals.shape[0]}")
    if not 0 <= cursor < max(1, ring.shape[0]):
        raise ValueError(f"cursor: expected a place in a ring of {ring.shape[0]} slots, got {cursor}")
    if line < 1 or width % line:
        raise ValueError(f"line: expected a number that divides the width, {width}, got {line}")
    seated = torch.empty(5, min(ring.shape[0], coming.shape[0]), dtype=torch.int64, device=ring.device)
    if seated.shape[1]:
        maps = slot_of_row, row_of_slot, used, is_dirty
        inputs = Seats(ring.contiguous(), coming.contiguous(), totals, tables, *maps, seated, written)
        SEAT_ROWS(inputs, Seating(pool, cursor, oldest, number, changes, width, line), backend)
    slots, leaving_lines, coming_lines, leaving_rows, coming_rows = seated
    own = totals.narrow(0, 2 + num_pools + pool, 1)
    return SeatedRows(slots, leaving_lines, coming_lines, leaving_rows, coming_rows, own)
