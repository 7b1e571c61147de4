"""Layers and mixtures of groups in plain PyTorch: the CPU path and the float64 path, and products that no kernel here takes."""

from __future__ import annotations

import torch

from jagged.ops.grouped_linear.spec import (
    Before,
    Inputs,
    MixGradients,
    MixInputs,
    MixSlopes,
    Mixtures,
    NoOptions,
    Options,
    Outputs,
    Slopes,
)


def grouped_linear(x: Inputs, o: Options) -> Outputs:
    """One product where all groups read the same rows, else a batched one, which takes rows as they lie."""
    rows, weight, bias = x
    if rows.dim() == 2:
        flat = None if bias is None else bias.flatten()
        output = torch.nn.functional.linear(rows, weight.flatten(0, 1), flat).view(rows.shape[0], *weight.shape[:2])
    else:
        output = rows.new_empty(rows.shape[0], *weight.shape[:2])
        factors, place = (rows.transpose(0, 1), weight.transpose(1, 2)), output.transpose(0, 1)
        if bias is None:
            torch.bmm(*factors, out=place)
        else:
            torch.baddbmm(bias[:, None], *factors, out=place)
    return Outputs(output.relu_() if o.relu else output)


def relu_gradient(x: Slopes, o: NoOptions) -> Before:
    """Return the gradient before a ReLU, and its sums over rows."""
    before = x.grad.masked_fill(x.kept <= 0, 0)
    # Of many rows, which in 16 bits would lose digits, and in float32 some.
    return Before(before, before.sum(0, dtype=torch.float64 if before.is_cpu else None).to(before.dtype))


def mix_groups(x: MixInputs, o: NoOptions) -> Mixtures:
    """One batched product, of each row's own matrices."""
    return Mixtures(torch.bmm(x.weights, x.groups))


def mix_gradients(x: MixSlopes, o: NoOptions) -> MixGradients:
    """Two of them."""
    return MixGradients(torch.bmm(x.weights.transpose(1, 2), x.grad), torch.bmm(x.grad, x.groups.transpose(1, 2)))
