"""The linear layer and sums of columns in plain PyTorch: the CPU path and the float64 path."""

from __future__ import annotations

import torch

from jagged.ops.linear.spec import Inputs, NoOptions, Outputs, Rows, Summing, Sums


def linear(x: Inputs, o: NoOptions) -> Outputs:
    """PyTorch's."""
    bias = None if x.bias is None else x.bias.to(x.x.dtype)
    return Outputs(torch.nn.functional.linear(x.x, x.weight, bias))


def column_sums(x: Rows, o: Summing) -> Sums:
    """PyTorch's sum, which adds 16 bits up in float32."""
    return Sums(x.rows.sum(0, dtype=torch.promote_types(x.rows.dtype, o.dtype)).to(o.dtype))
