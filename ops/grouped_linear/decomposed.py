"""Layers of groups in PyTorch's own operators, for programs that are exported."""

from __future__ import annotations

import torch

from jagged.ops.grouped_linear.spec import Inputs, Options, Outputs


def grouped_linear(x: Inputs, o: Options) -> Outputs:
    """One product where all groups read the same rows, else a batched one."""
    rows, weight, bias = x
    if rows.dim() == 2:
        flat = None if bias is None else bias.flatten()
        output = torch.nn.functional.linear(rows, weight.flatten(0, 1), flat).unflatten(1, weight.shape[:2])
    else:
        factors = rows.transpose(0, 1), weight.transpose(1, 2)
        of_groups = torch.bmm(*factors) if bias is None else torch.baddbmm(bias[:, None], *factors)
        # Not transposed: PyTorch would guard on whether there is one row, as that were contiguous.
        output = torch.stack(of_groups.unbind(), 1)
    return Outputs(output.relu() if o.relu else output)
