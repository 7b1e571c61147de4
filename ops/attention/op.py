"""Softmax attention within each sample of a jagged batch: public function, autograd and operators."""

from __future__ import annotations

import math
from typing import Any, Literal, overload

import torch
from torch import Tensor

from jagged.ops._shared.autograd import first_order
from jagged.ops._shared.registration import define_operator, resolve_backend
from jagged.ops._shared.validation import FLOATS, check_offsets, check_same, check_tensor
from jagged.ops.attention import torch_impl

MAX_HEAD_DIM = 256
# Rows inside a sample are counted in int32 by the kernels, tiles that reach past the end included.
MAX_ROWS = 2**30


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty(q.shape), lse


def _fake_backward(
    grad: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


_OPTIONS = (
    "Tensor q_offsets, Tensor? k_offsets, Tensor? num_targets, bool causal, int window, int num_contextual, float scale, "
    "str backend"
)
_forward = define_operator(
    "attention_forward",
    f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)",
    torch_impl=torch_impl.forward,
    triton_impl="jagged.ops.attention.kernels:forward",
    fake=_fake_forward,
)
_backward = define_operator(
    "attention_backward",
    f"(Tensor grad, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor output, Tensor lse, {_OPTIONS}) "
    "-> (Tensor, Tensor, Tensor)",
    torch_impl=torch_impl.backward,
    triton_impl="jagged.ops.attention.kernels:backward",
    fake=_fake_backward,
)


class AttentionFunction(torch.autograd.Function):
    """Saves inputs, output and log-sum-exp; the backward computes the probabilities again, so memory is linear in the rows."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_offsets: Tensor,
        k_offsets: Tensor | None,
        num_targets: Tensor | None,
        return_lse: bool,
        *options: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        output, lse = _forward(q, k, v, q_offsets, k_offsets, num_targets, *options)
        ctx.save_for_backward(q, k, v, output, lse, q_offsets, k_offsets, num_targets)
        ctx.options = options
        return (output, lse) if return_lse else output

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_lse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            grads = _backward(grad, grad_lse, *ctx.saved_tensors, *ctx.options)
        grads = first_order("jagged_attention", grads)
        wanted = (x if need else None for x, need in zip(grads, ctx.needs_input_grad, strict=False))
        return *wanted, *(None,) * (4 + len(ctx.options))


@overload
def jagged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor | None = ...,
    *,
    causal: bool = ...,
    window: int | None = ...,
    num_targets: int | Tensor | None = ...,
    num_contextual: int = ...,
    scale: float | None = ...,
    return_lse: Literal[False] = ...,
    backend: str | None = ...,
) -> Tensor: ...


@overload
def jagged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor | None = ...,
    *,
    causal: bool = ...,
    window: int | None = ...,
    num_targets: int | Tensor | None = ...,
    num_contextual: int = ...,
    scale: float | None = ...,
    return_lse: Literal[True],
    backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...


def jagged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor | None = None,
    *,
    causal: bool = False,
    window: int | None = None,
    num_targets: int | Tensor | None = None,
    num_contextual: int = 0,
    scale: float | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Let every query attend to the keys of its own sample: `softmax(q k^T * scale) v`, sample by sample and head by head.

    Nothing is padded: work follows the pairs of a query and a key that it sees, memory the rows. The softmax is computed in
    float32 (float64 for float64 inputs) whatever the inputs' dtype. A query that sees no key has output 0. Under `torch.autocast`
    the inputs are cast to its dtype, as `scaled_dot_product_attention` does. Gradients are deterministic; second derivatives are
    refused with an error.

    Masks go by positions. Of a sample's `Lk` keys, key j stands at position j; of its `Lq` queries, query i stands at position
    `p = i + Lk - Lq`, so that the last query stands at the last key. The last `num_targets` positions are targets, those before
    them the history. A query sees the keys of the history that `causal` and `window` leave it, where a target looks from the
    first position past the history; with `num_targets` it also sees the key at its own position, and no other target.

    Args:
        q: queries `[Sq, H, D]`, with `Sq = sum Lq`, H heads and a head width D of 1 to 256; float32, bfloat16, float16, and on
            CPU float64. Strided tensors work; where the last dimension is contiguous, as in slices of a fused projection
            `[S, 3, H, D]`, the kernels read them in place.
        k: keys `[Sk, Hkv, D]`, of the dtype and device of `q`. Hkv divides H: query head h reads key head `h // (H // Hkv)`.
        v: values `[Sk, Hkv, D]`, of the dtype and device of `q`.
        q_offsets: `[B + 1]`, int32 or int64, from 0; sample b owns the queries `q_offsets[b] .. q_offsets[b + 1] - 1`.
        k_offsets: `[B + 1]`, of the dtype of `q_offsets`: each sample's keys and values; None for those of the queries.
        causal: hide the keys past a query's position.
        window: hide the keys `window` positions away or further; None hides none.
        num_targets: targets at each sample's end: one number, or `[B]`, int32 or int64; what lies outside `0 .. Lk` counts as the
            nearest that does not. None for none.
        num_contextual: the first so many positions are contextual: queries there see the whole history, and keys there are in
            everyone's window.
        scale: factor of the scores; None takes `1 / sqrt(D)`.
        return_lse: return the log-sum-exp of each query's scores as well, as merging outputs over several sets of keys needs.
        backend: `"torch"` or `"triton"` to force one; None takes Triton for CUDA tensors. The PyTorch implementation reads the
            lengths on the host, which for CUDA tensors is a synchronisation; there it is an aid to debugging.

    Returns:
        `[Sq, H, D]`, contiguous, in the dtype of the inputs. With `return_lse` also the natural log-sum-exp `[H, Sq]`, float32
        (float64 for float64 inputs), minus infinity for a query that sees no key; it has a gradient.

    Raises:
        TypeError: a dtype that is not supported, or dtypes that differ.
        ValueError: shapes or devices that do not fit, or a number out of range; with `JAGGED_VALIDATE=1` also offsets with wrong
            values.

    Source:
        Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023, algorithms 1 and 2.
        Targets: Zhai et al., "Actions Speak Louder than Words: Trillion-Parameter Sequential Transducers for Generative
        Recommendations", 2024. Grouped heads: Ainslie et al., "GQA: Training Generalized Multi-Query Transformer Models from
        Multi-Head Checkpoints", 2023.

    Example:
        >>> import torch
        >>> from jagged.ops import jagged_attention
        >>> offsets = torch.tensor([0, 2, 2, 5])
        >>> q, k, v = torch.randn(3, 5, 2, 16)
        >>> jagged_attention(q, k, v, offsets, causal=True).shape
        torch.Size([5, 2, 16])

        Four items to be ranked for each of the three samples, against their histories:

        >>> items = torch.randn(12, 2, 16)
        >>> jagged_attention(items, k, v, torch.tensor([0, 4, 8, 12]), offsets).shape
        torch.Size([12, 2, 16])
    """
    check_tensor("q", q, "[Sq, H, D]", FLOATS)
    check_tensor("k", k, "[Sk, Hkv, D]", FLOATS)
    check_tensor("v", v, "[Sk, Hkv, D]", FLOATS)
    if q.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
    check_same("k", k, "q", q)
    check_same("v", v, "q", q)
    _check_shapes(q, k, v, k_offsets)
    check_offsets(q_offsets, q, "q_offsets", total=q.shape[0])
    batch_size = q_offsets.shape[0] - 1
    if k_offsets is not None:
        check_offsets(k_offsets, q, "k_offsets", total=k.shape[0])
        check_same("k_offsets", k_offsets, "q_offsets", q_offsets)
        if k_offsets.shape != q_offsets.shape:
            raise ValueError(f"k_offsets: expected {list(q_offsets.shape)} as q_offsets, got {list(k_offsets.shape)}")
    if window is not None and window < 1:
        raise ValueError(f"window: expected 1 or more, which is a row itself, got {window}; use None for no window")
    if num_contextual < 0:
        raise ValueError(f"num_contextual: expected 0 or more, got {num_contextual}")
    if isinstance(num_targets, Tensor):
        check_tensor("num_targets", num_targets, "[B]", (torch.int32, torch.int64))
        if num_targets.shape[0] != batch_size:
            raise ValueError(f"num_targets: expected [{batch_size}], one for each sample, got {list(num_targets.shape)}")
        if num_targets.device != q.device:
            raise ValueError(
                f"num_targets: expected the device of q, {q.device}, got {num_targets.device}; move it with .to(...)"
            )
    elif num_targets is not None:
        if num_targets < 0:
            raise ValueError(f"num_targets: expected 0 or more, got {num_targets}; use None for no targets")
        num_targets = q_offsets.new_full((batch_size,), min(num_targets, MAX_ROWS))
    factor = 1 / math.sqrt(q.shape[2]) if scale is None else float(scale)
    if factor <= 0:
        # The kernels find the largest product before they scale it, and hide those of keys out of sight by minus infinity.
        q, factor = (-q, -factor) if factor else (q * 0.0, 1.0)
    result: Tensor | tuple[Tensor, Tensor] = AttentionFunction.apply(
        q,
        k,
        v,
        q_offsets,
        k_offsets,
        num_targets,
        return_lse,
        causal,
        0 if window is None else min(window, MAX_ROWS),
        min(num_contextual, MAX_ROWS),
        factor,
        resolve_backend(backend, q),
    )
    return result


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, k_offsets: Tensor | None) -> None:
    if not 1 <= q.shape[2] <= MAX_HEAD_DIM:
        raise ValueError(f"q: expected a head width D of 1 to {MAX_HEAD_DIM}, got {q.shape[2]}; use more and narrower heads")
    if k.shape[2] != q.shape[2]:
        raise ValueError(f"k: expected the head width of q, {q.shape[2]}, got {k.shape[2]}; project both to one width")
    if not 1 <= k.shape[1] <= q.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"k: expected a number of heads Hkv that divides the {q.shape[1]} of q, got {k.shape[1]}; "
            "each key head serves as many query heads"
        )
    if v.shape != k.shape:
        raise ValueError(f"v: expected the shape of k, {list(k.shape)}, got {list(v.shape)}")
    if k_offsets is None and k.shape[0] != q.shape[0]:
        raise ValueError(
            f"k: expected the {q.shape[0]} rows of q, got {k.shape[0]}; for keys of other lengths give their k_offsets"
        )
    for name, x in (("q", q), ("k", k)):
        if x.shape[0] > MAX_ROWS:
            raise ValueError(f"{name}: expected at most {MAX_ROWS} rows, got {x.shape[0]}; split the batch")
