"""What attention takes and gives: one operator for both kinds of weights, softmax and SiLU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from jagged.ops._shared.operator import Differentiable, operator


class Inputs(NamedTuple):
    """Keys without offsets or times have those of the queries; `bias_offsets` tell where a jagged bias's samples begin.

    Queries and keys share a width, values may have another.
    """

    q: Differentiable
    k: Differentiable
    v: Differentiable
    q_offsets: Tensor
    k_offsets: Tensor | None = None
    num_targets: Tensor | None = None
    relative_bias: Differentiable | None = None
    time_bias: Differentiable | None = None
    q_times: Tensor | None = None
    k_times: Tensor | None = None
    bias: Differentiable | None = None
    bias_offsets: Tensor | None = None
    dropout_seed: Tensor | None = None


class Options(NamedTuple):
    """A `window` of 0 is none; with one a query sees keys less than `window` positions before and less than `reach` behind it.

    Every window holds the keys before `prefix`; where that is 0, contextual keys all stand at position `num_contextual - 1`.
    Softmax alone has a `softcap`, 0 for none, and pointwise weights alone a `normalizer`, 0 for each sample's number of keys.
    """

    causal: bool = False
    window: int = 0
    reach: int = 0
    num_contextual: int = 0
    prefix: int = 0
    scale: float = 1.0
    softcap: float = 0.0
    dropout_p: float = 0.0
    pointwise: bool = False
    normalizer: float = 0.0


class Outputs(NamedTuple):
    """`[Sq, H, Dv]`, and the natural log-sum-exp `[H, Sq]`, float32 or float64; pointwise weights have an empty one."""

    output: Tensor
    lse: Tensor


def _shapes(x: Inputs, o: Options) -> Outputs:
    total, heads, _ = x.q.shape
    lse = x.q.new_empty((0,) if o.pointwise else (heads, total), dtype=torch.promote_types(x.q.dtype, torch.float32))
    return Outputs(x.q.new_empty(total, heads, x.v.shape[2]), lse)


def _gradient_shapes(grads: Outputs, x: Inputs, out: Outputs, o: Options, wanted: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
    # Compiled code reads memory as it is declared: gradients of q, k and v come in the dtype that autocast gave these.
    dtypes = {**wanted, **{name: x.q.dtype for name in ("q", "k", "v") if name in wanted}}
    return {name: x.q.new_empty(getattr(x, name).shape, dtype=dtype) for name, dtype in dtypes.items()}


# Backward computes the weights again, so that memory is linear in the rows; that of pointwise weights needs no output.
ATTENTION = operator(
    "attention",
    Inputs,
    Options,
    Outputs,
    shapes=_shapes,
    torch="jagged.ops.attention.torch_impl:forward,backward",
    triton="jagged.ops.attention.triton.launch:forward,backward",
    saved=lambda o: Inputs._fields + (() if o.pointwise else Outputs._fields),
    autocast=("q", "k", "v"),
    gradient_shapes=_gradient_shapes,
    title=lambda o: "jagged_hstu_attention" if o.pointwise else "jagged_attention",
)
