"""The exchange in plain PyTorch: what a CPU runs, and any device without Triton."""

from __future__ import annotations

from jagged.ops.host_rows.spec import Inputs, Nothing, Options


def exchange(x: Inputs, o: Options) -> Nothing:
    """Copy the rows that leave to the table, then those that come to their slots."""
    leaves, comes = x.leaving >= 0, x.coming >= 0
    rows, given = x.leaving[leaves], x.cached[x.slots[leaves]]
    x.table[rows.to(x.table.device)] = given.to(x.table.device)
    taken = x.table[x.coming[comes].to(x.table.device)]
    x.cached[x.slots[comes]] = taken.to(x.cached.device)
    return Nothing()
