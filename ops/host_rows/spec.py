"""The operator that exchanges cached rows for those of a table in the host's memory."""

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
