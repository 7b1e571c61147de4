"""The softmax of samples in PyTorch's own operators, for programs that are exported: padded to the longest one."""

from __future__ import annotations

import torch

from jagged.ops._shared.padded import longest, unpad
from jagged.ops._shared.padding import to_dense
from jagged.ops.softmax.spec import Inputs, Options, Weights


def softmax(x: Inputs, o: Options) -> Weights:
    """Softmax over each sample's rows."""
    wide = x.values.to(torch.promote_types(x.values.dtype, torch.float32))
    weights = to_dense(wide, x.offsets, longest(x.offsets), -torch.inf).softmax(1)
    return Weights(unpad(weights, x.offsets, x.values.shape[0]).to(x.values.dtype))
