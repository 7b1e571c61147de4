"""The operator of binary cross-entropy over a dense layer."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from jagged.ops._shared.label_loss import LossOptions, LossOutputs, loss_dtype
from jagged.ops._shared.operator import Differentiable, Operator, operator
from jagged.ops._shared.sizes import cdiv

# Of the logits that there are at once, in bytes; a gradient of weights before it is rounded has half as many.
CHUNK_BYTES = 2**26


class Inputs(NamedTuple):
    """Features `[B, H]` and weights `[L, H]`; positives, rows and their weights as in `LabelSets`.

    Positives outside of `[0, L)` are none. Bias and `label_weight` are `[L]`.
    """

    features: Differentiable
    weight: Differentiable
    positives: Tensor
    rows: Tensor
    row_weight: Tensor
    bias: Differentiable | None = None
    label_weight: Tensor | None = None


def chunk_of(batch_size: int, num_labels: int, itemsize: int) -> int:
    """Return how many labels come at once: equal chunks, as few as keep logits of one below `CHUNK_BYTES`.

    Where there are as many, they are a multiple of 64: rows of logits begin where fast matrix products need them to.
    """
    most = max(1, CHUNK_BYTES // max(1, batch_size * itemsize))
    step = 64 if most >= 64 else 1
    return cdiv(cdiv(num_labels, max(1, cdiv(num_labels, most // step * step))), step) * step if num_labels else 1


LINEAR_BCE: Operator[Inputs, LossOptions, LossOutputs] = operator(
    "linear_bce",
    Inputs,
    LossOptions,
    LossOutputs,
    shapes=lambda x, o: LossOutputs(x.features.new_empty((), dtype=loss_dtype(x.features.dtype))),
    # Matrix products are the device's library's on every backend; what is between them is a few passes over a chunk.
    torch="jagged.ops.linear_bce.torch_impl:forward,backward",
    triton="jagged.ops.linear_bce.torch_impl:forward,backward",
    saved=Inputs._fields,
    autocast=("features", "weight", "bias"),
    float64_on_triton=True,
)
