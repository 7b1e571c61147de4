"""Public exchange of cached rows for rows of a table in the host's memory."""

from __future__ import annotations

import torch
from torch import Tensor

from jagged.ops._shared.validation import check_tensor
from jagged.ops.host_rows.spec import EXCHANGE_ROWS, Inputs, Options

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64)
NUMBERS = (torch.int64, torch.int32)


def exchange_rows(
    cached: Tensor, table: Tensor, slots: Tensor, leaving: Tensor, coming: Tensor, *, backend: str | None = None
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
    if cached.is_cuda and not table.is_pinned():
        raise ValueError("table: expected pinned memory, which a GPU reads, got pageable; pass table.pin_memory()")
    for name, tensor in (("slots", slots), ("leaving", leaving), ("coming", coming)):
        check_tensor(name, tensor, "[N]", NUMBERS)
        if tensor.shape != slots.shape:
            raise ValueError(f"{name}: expected one for each of the {slots.shape[0]} slots, got {tensor.shape[0]}")
    if not slots.shape[0]:
        return
    numbers = (slots.contiguous(), leaving.contiguous(), coming.contiguous())
    EXCHANGE_ROWS(Inputs(cached.detach(), *numbers, table.detach()), Options(), backend)
    # Kernels count no change of their own.
    torch.autograd.graph.increment_version(cached)
    torch.autograd.graph.increment_version(table)
