"""Pointwise attention of HSTU: public function; autograd and operators are those of softmax attention."""

from __future__ import annotations

from torch import Tensor

from jagged.ops._shared.registration import resolve_backend
from jagged.ops._shared.validation import check_offsets
from jagged.ops.attention.op import MAX_ROWS, AttentionFunction, check_biases, check_mask, check_rows, positive_scale


def jagged_hstu_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    num_targets: int | Tensor | None = None,
    num_contextual: int = 0,
    relative_bias: Tensor | None = None,
    time_bias: Tensor | None = None,
    times: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    normalizer: float | None = None,
    backend: str | None = None,
) -> Tensor:
    """Add up the values of a sample's rows, each weighted by a SiLU of its score: `silu(q k^T * scale + biases) v / n`.

    There is no softmax: a weight depends on its own query and key alone, so that an output grows with how often something was
    seen. Nothing is padded, and memory follows the rows. Scores, weights and sums are float32 (float64 for float64 inputs). A row
    that sees no key has output 0. Under `torch.autocast` q, k and v are cast to its dtype. Gradients are deterministic; second
    derivatives are refused with an error.

    Masks and biases are those of `jagged_attention` for queries and keys of the same rows.

    Args:
        q: queries `[S, H, D]`, with `S = sum L`, H heads and a head width D of 1 to 256; float32, bfloat16, float16, and on CPU
            float64. Strided tensors work; where the last dimension is contiguous the kernels read them in place.
        k: keys `[S, Hkv, D]`, of the dtype and device of `q`. Hkv divides H: query head h reads key head `h // (H // Hkv)`.
        v: values `[S, Hkv, D]`, of the dtype and device of `q`.
        offsets: `[B + 1]`, int32 or int64, from 0; sample b owns the rows `offsets[b] .. offsets[b + 1] - 1`.
        causal: hide the keys past a row's position.
        window: hide the keys `window` positions away or further; None hides none.
        num_targets: targets at each sample's end, which see the history and themselves alone: one number, or `[B]`, int32 or
            int64.
        num_contextual: the first so many positions see the whole history, and are in everyone's window.
        relative_bias: `[H, 2 * M + 1]`, a number for every distance `-M .. M` of positions.
        time_bias: `[H, T]`, a number for every bucket of the time between two rows, two buckets an octave.
        times: `[S]`, int64, the rows' times in any unit and any order; needed with `time_bias`. Within a sample they may span
            2^47 units.
        bias: a number for every pair of a query and a key: dense `[B, H, L, L]`, beyond which it is 0, or jagged `[H, P]` with
            `P = sum L^2`, as `pair_offsets(offsets)` lays it out.
        scale: factor of the scores; None takes `1 / sqrt(D)`.
        normalizer: n, above 0, such as the longest length of all batches; None takes each sample's own number of rows.
        backend: `"torch"` or `"triton"` to force one; None takes Triton for CUDA tensors. The PyTorch implementation reads the
            lengths on the host, which for CUDA tensors is a synchronisation; there it is an aid to debugging.

    Returns:
        `[S, H, D]`, contiguous, in the dtype of the inputs.

    Raises:
        TypeError: a dtype that is not supported, or dtypes that differ.
        ValueError: shapes or devices that do not fit, or a number out of range; with `JAGGED_VALIDATE=1` also offsets with wrong
            values, and a jagged bias of another length than theirs.

    Source:
        Zhai et al., "Actions Speak Louder than Words: Trillion-Parameter Sequential Transducers for Generative Recommendations",
        2024, equation 2, with its biases by position and by time.

    Example:
        >>> import torch
        >>> from jagged.ops import jagged_hstu_attention
        >>> offsets = torch.tensor([0, 2, 2, 5])
        >>> q, k, v = torch.randn(3, 5, 2, 16)
        >>> times = torch.tensor([100, 3700, 20, 80, 90_000])
        >>> jagged_hstu_attention(q, k, v, offsets, time_bias=torch.zeros(2, 32), times=times).shape
        torch.Size([5, 2, 16])
    """
    q, k, v = check_rows(q, k, v, None)
    check_offsets(offsets, q, total=q.shape[0])
    num_targets = check_mask(q, offsets, window, num_targets, num_contextual)
    if normalizer is not None and not normalizer > 0:
        raise ValueError(f"normalizer: expected above 0, got {normalizer}; use None for each sample's own number of rows")
    chosen = resolve_backend(backend, q)
    bias_offsets = check_biases(q, k, offsets, None, relative_bias, time_bias, [("times", times)], bias, chosen)
    q, factor = positive_scale(q, scale)
    output: Tensor = AttentionFunction.apply(
        False,
        q,
        k,
        v,
        offsets,
        None,
        num_targets,
        relative_bias,
        time_bias,
        times,
        None,
        bias,
        bias_offsets,
        None,
        causal,
        0 if window is None else min(window, MAX_ROWS),
        min(num_contextual, MAX_ROWS),
        factor,
        0.0,
        True,
        0.0 if normalizer is None else float(normalizer),
        chosen,
    )
    return output
