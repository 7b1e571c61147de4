"""The exchange in plain PyTorch: what a CPU runs, and any device without Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from jagged.ops.host_rows.spec import Inputs, Nothing, Options


def exchange(x: Inputs, o: Options) -> Nothing:
    """Copy the rows that leave to the table, then those that come to their slots."""
    leaves, comes = x.leaving >= 0, x.coming >= 0
    given = x.cached[x.slots[leaves]].view(-1, x.table.shape[1])
    x.table[_lines(x, x.leaving[leaves])] = given.to(x.table.device)
    taken = x.table[_lines(x, x.coming[comes])].view(-1, x.cached.shape[1])
    x.cached[x.slots[comes]] = taken.to(x.cached.device)
    return Nothing()


def _lines(x: Inputs, begins: Tensor) -> Tensor:
    """Return all lines of rows that begin at some."""
    step = torch.arange(x.cached.shape[1] // x.table.shape[1])
    return (begins.to(x.table.device).long()[:, None] + step).flatten()
