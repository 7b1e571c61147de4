"""Softmax attention within each sample of a jagged batch: public function, autograd and operators."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from jagged.ops._shared.autograd import first_order
from jagged.ops._shared.registration import define_operator, resolve_backend
from jagged.ops._shared.validation import FLOATS, check_offsets, check_same, check_tensor
from jagged.ops.attention import torch_impl

MAX_HEAD_DIM = 128
# Rows inside a sample are counted in int32 by the kernels, tiles that reach past the end included.
MAX_ROWS = 2**30


def _fake_forward(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, causal: bool, scale: float, backend: str
) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty(q.shape), lse


def _fake_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    lse: Tensor,
    offsets: Tensor,
    causal: bool,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


_forward = define_operator(
    "attention_forward",
    "(Tensor q, Tensor k, Tensor v, Tensor offsets, bool causal, float scale, str backend) -> (Tensor, Tensor)",
    torch_impl=torch_impl.forward,
    triton_impl="jagged.ops.attention.kernels:forward",
    fake=_fake_forward,
)
_backward = define_operator(
    "attention_backward",
    "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor output, Tensor lse, Tensor offsets, bool causal, float scale, "
    "str backend) -> (Tensor, Tensor, Tensor)",
    torch_impl=torch_impl.backward,
    triton_impl="jagged.ops.attention.kernels:backward",
    fake=_fake_backward,
)


class AttentionFunction(torch.autograd.Function):
    """Saves inputs, output and log-sum-exp; the backward computes the probabilities again, so memory is linear in `S`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, causal: bool, scale: float, backend: str) -> Tensor:
        output, lse = _forward(q, k, v, offsets, causal, scale, backend)
        ctx.save_for_backward(q, k, v, output, lse, offsets)
        ctx.options = causal, scale, backend
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            grads = _backward(grad, *ctx.saved_tensors, *ctx.options)
        grads = first_order("jagged_attention", grads)
        wanted = (x if need else None for x, need in zip(grads, ctx.needs_input_grad[:3], strict=True))
        return *wanted, None, None, None, None


def jagged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    backend: str | None = None,
) -> Tensor:
    """Let every row attend to the rows of its own sample: `softmax(q k^T * scale) v`, sample by sample and head by head.

    Nothing is padded: work follows `sum L_i^2` and memory `S`. The softmax is computed in float32 (float64 for float64 inputs)
    whatever the inputs' dtype. An empty sample has no rows in the output either. Under `torch.autocast` the inputs are cast to
    its dtype, as `scaled_dot_product_attention` does. Gradients are deterministic; second derivatives are refused with an error.

    Args:
        q: queries `[S, H, D]`, with `S = sum L_i`, H heads and a head width D of 1 to 128; float32, bfloat16, float16, and on CPU
            float64. Strided tensors work; where the last dimension is contiguous, as in slices of a fused projection
            `[S, 3, H, D]`, the kernels read them in place.
        k: keys `[S, H, D]`, of the dtype and device of `q`.
        v: values `[S, H, D]`, of the dtype and device of `q`.
        offsets: `[B + 1]`, int32 or int64, from 0; sample b owns rows `offsets[b] .. offsets[b + 1] - 1`.
        causal: let a row attend to itself and the rows before it only.
        scale: factor of the scores; None takes `1 / sqrt(D)`.
        backend: `"torch"` or `"triton"` to force one; None takes Triton for CUDA tensors. The PyTorch implementation reads the
            lengths on the host, which for CUDA tensors is a synchronisation; there it is an aid to debugging.

    Returns:
        `[S, H, D]`, contiguous, in the dtype of the inputs.

    Raises:
        TypeError: a dtype that is not supported, or dtypes that differ.
        ValueError: shapes or devices that do not fit; with `JAGGED_VALIDATE=1` also offsets with wrong values.

    Source:
        Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023, algorithms 1 and 2.

    Example:
        >>> import torch
        >>> from jagged.ops import jagged_attention
        >>> offsets = torch.tensor([0, 2, 2, 5])
        >>> q, k, v = torch.randn(3, 5, 2, 16)
        >>> jagged_attention(q, k, v, offsets, causal=True).shape
        torch.Size([5, 2, 16])
    """
    check_tensor("q", q, "[S, H, D]", FLOATS)
    check_tensor("k", k, "[S, H, D]", FLOATS)
    check_tensor("v", v, "[S, H, D]", FLOATS)
    if q.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
    check_same("k", k, "q", q)
    check_same("v", v, "q", q)
    for name, x in (("k", k), ("v", v)):
        if x.shape != q.shape:
            raise ValueError(f"{name}: expected the shape of q, {list(q.shape)}, got {list(x.shape)}")
    if not 1 <= q.shape[2] <= MAX_HEAD_DIM:
        raise ValueError(f"q: expected a head width D of 1 to {MAX_HEAD_DIM}, got {q.shape[2]}; use more and narrower heads")
    if q.shape[0] > MAX_ROWS:
        raise ValueError(f"q: expected at most {MAX_ROWS} rows, got {q.shape[0]}; split the batch")
    check_offsets(offsets, q, total=q.shape[0])
    chosen = resolve_backend(backend, q)
    result: Tensor = AttentionFunction.apply(
        q, k, v, offsets, causal, 1 / math.sqrt(q.shape[2]) if scale is None else float(scale), chosen
    )
    return result
