"""Attention within each sample of a jagged batch: by softmax, and pointwise as HSTU's."""

from __future__ import annotations

from typing import Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from jagged.ops._shared.backends import resolve_backend
from jagged.ops._shared.validation import check_number, check_tensor
from jagged.ops.attention.checks import Window, check_biases, check_both_offsets, check_mask, check_rows, positive_scale
from jagged.ops.attention.spec import ATTENTION, Inputs, Options


class _Options(TypedDict, total=False):
    """Options of `jagged_attention`, but for the one that its result's type depends on."""

    causal: bool
    window: Window | None
    num_targets: int | Tensor | None
    num_contextual: int
    global_prefix: int
    windowed_context: bool
    relative_bias: Tensor | None
    time_bias: Tensor | None
    q_times: Tensor | None
    k_times: Tensor | None
    bias: Tensor | None
    dropout_p: float
    dropout_seed: Tensor | None
    scale: float | None
    softcap: float | None
    backend: str | None


@overload
def jagged_attention(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor | None = ..., *, return_lse: Literal[True],
    **options: Unpack[_Options],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def jagged_attention(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor | None = ..., *, return_lse: Literal[False] = ...,
    **options: Unpack[_Options],
) -> Tensor: ...  # fmt: skip


def jagged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor | None = None,
    *,
    causal: bool = False,
    window: Window | None = None,
    num_targets: int | Tensor | None = None,
    num_contextual: int = 0,
    global_prefix: int = 0,
    windowed_context: bool = False,
    relative_bias: Tensor | None = None,
    time_bias: Tensor | None = None,
    q_times: Tensor | None = None,
    k_times: Tensor | None = None,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Let every query attend to the keys of its own sample: `softmax(q k^T * scale + biases) v`, sample by sample, head by head.

    Nothing is padded: work follows the pairs of a query and a key that it sees, memory the rows. The softmax is computed in
    float32 (float64 for float64 inputs) whatever the inputs' dtype. A query that sees no key has output 0. Under `torch.autocast`
    the inputs are cast to its dtype, as `scaled_dot_product_attention` does. Gradients are deterministic; second derivatives are
    refused with an error.

    Masks go by positions. Of a sample's `Lk` keys, key j stands at position j; of its `Lq` queries, query i stands at position
    `p = i + Lk - Lq`, so that the last query stands at the last key. The last `num_targets` positions are targets, those before
    them the history. A query sees the keys of the history that `causal` and `window` leave it, where a target looks from the
    first position past the history; with `num_targets` it also sees the key at its own position, and no other target.

    Biases are added to the scores of a query head, in float32 (float64 for float64 inputs), and have gradients in their own shape
    and dtype: float32, bfloat16 or float16, whatever the inputs' (float64 beside float64 inputs). Autocast leaves them alone.

    Args:
        q: queries `[Sq, H, D]`, with `Sq = sum Lq`, H heads and a head width D of 1 to 256; float32, bfloat16, float16, and on
            CPU float64. Strided tensors work; where the last dimension is contiguous, as in slices of a fused projection
            `[S, 3, H, D]`, the kernels read them in place.
        k: keys `[Sk, Hkv, D]`, of the dtype and device of `q`. Hkv divides H: query head h reads key head `h // (H // Hkv)`.
        v: values `[Sk, Hkv, Dv]`, of the dtype and device of `q`; their width Dv, 1 to 256, need not be D.
        q_offsets: `[B + 1]`, int32 or int64, from 0; sample b owns the queries `q_offsets[b] .. q_offsets[b + 1] - 1`.
        k_offsets: `[B + 1]`, of the dtype of `q_offsets`: each sample's keys and values; None for those of the queries.
        causal: hide the keys past a query's position.
        window: hide the keys `window` positions away or further; or a pair `(left, right)`, those more than `left` positions
            before the query's or more than `right` behind it, either None for no bound. None hides none.
        num_targets: targets at each sample's end: one number, or `[B]`, int32 or int64; what lies outside `0 .. Lk` counts as the
            nearest that does not. None for none.
        num_contextual: the first so many positions are contextual: queries there see the whole history, and keys there are in
            everyone's window.
        global_prefix: with `causal` and `window`, keys at the first so many positions are in the window of every query behind
            them; a query sees no more for standing there itself.
        windowed_context: with `num_contextual` and `window`, contextual keys are not in everyone's window; to the window they
            all stand at position `num_contextual - 1`.
        relative_bias: `[H, 2 * M + 1]`, a number for every distance `-M .. M`: `relative_bias[h, M + d]` with d the query's
            position less the key's, held to `-M .. M`. All targets stand right behind the history, so that d of a target and
            itself is 0.
        time_bias: `[H, T]`, a number for every bucket of the time t between a query and a key: bucket 0 for t = 0, then two
            buckets an octave, `[1, 1.5)`, `[1.5, 2)`, `[2, 3)`, `[3, 4)`, ... of `|t|` in float32; the last for all longer times.
        q_times: `[Sq]`, int32 or int64, the queries' times in any unit and any order; needed with `time_bias`. Within a sample
            times may span 2^47 units.
        k_times: `[Sk]`, int32 or int64, the keys' times; None, where `k_offsets` is None, for those of the queries.
        bias: a number for every pair of a query and a key. Dense, `[B, H, Lq, Lk]`: by row in the sample; rows and keys past its
            end get 0, and an expanded tensor is read in place, though its gradient is whole. Or jagged, `[H, P]` with
            `P = sum Lq * Lk`: each sample's pairs row by row, from where `pair_offsets(q_offsets, k_offsets)` says. The gradient
            is 0 where a key is hidden.
        dropout_p: chance of each weight to be dropped after the softmax, from 0 to below 1; the others are divided by
            `1 - dropout_p`.
        dropout_seed: int64, one element: the same seed drops the same weights, on every backend. None draws one from torch's
            generator of the device of `q`, without a synchronisation.
        scale: factor of the scores; None takes `1 / sqrt(D)`.
        softcap: bound of the scores before biases, `softcap * tanh(q k^T * scale / softcap)`; None for none.
        return_lse: return the log-sum-exp of each query's scores as well, as merging outputs over several sets of keys needs.
        backend: `"torch"` or `"triton"` to force one; None takes Triton for CUDA tensors. The PyTorch implementation reads the
            lengths on the host, which for CUDA tensors is a synchronisation; there it is an aid to debugging.

    Returns:
        `[Sq, H, Dv]`, contiguous, in the dtype of the inputs. With `return_lse` also the natural log-sum-exp `[H, Sq]`, float32
        (float64 for float64 inputs), minus infinity for a query that sees no key; it has a gradient. Dropout leaves it as it is.

    Raises:
        TypeError: a dtype that is not supported, or dtypes that differ.
        ValueError: shapes or devices that do not fit, or a number out of range; on a CPU, elsewhere with `JAGGED_VALIDATE=1`,
            also offsets with wrong values, and a jagged bias shorter than theirs.

    Source:
        Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023, algorithms 1 and 2.
        Targets: Zhai et al., "Actions Speak Louder than Words: Trillion-Parameter Sequential Transducers for Generative
        Recommendations", 2024. Grouped heads: Ainslie et al., "GQA: Training Generalized Multi-Query Transformer Models from
        Multi-Head Checkpoints", 2023. Relative bias: Shaw et al., "Self-Attention with Relative Position Representations", 2018,
        as one number for each head and distance in Raffel et al., "Exploring the Limits of Transfer Learning with a Unified
        Text-to-Text Transformer" (T5), 2020, section 2.1. Time bias: Zhai et al., as above, whose buckets are logarithmic too.
        Dropout's hash: Wellons, "Prospecting for Hash Functions" (lowbias32), 2018.

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

        A bias that is learned for each head, by distance up to 8 and by time up to 2^15 seconds:

        >>> by_distance = torch.zeros(2, 17, requires_grad=True)
        >>> by_time = torch.zeros(2, 32, requires_grad=True)
        >>> times = torch.tensor([100, 3700, 20, 80, 90_000])
        >>> output = jagged_attention(q, k, v, offsets, relative_bias=by_distance, time_bias=by_time, q_times=times)
        >>> output.sum().backward()
    """
    check_rows(q, k, v, k_offsets)
    check_both_offsets(q, k, "q_offsets", q_offsets, k_offsets)
    num_targets, mask = check_mask(q_offsets, causal, window, num_targets, num_contextual, global_prefix, windowed_context)
    chosen = resolve_backend(backend, q)
    bias_offsets = check_biases(
        q, k, q_offsets, k_offsets, relative_bias, time_bias, {"q_times": q_times, "k_times": k_times}, bias, chosen
    )
    check_number("softcap", softcap, softcap is None or 0 < softcap < float("inf"), "a number above 0, or None")
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p: expected from 0 to below 1, got {dropout_p}; it is the share of weights that are dropped")
    if dropout_seed is not None:
        check_tensor("dropout_seed", dropout_seed, "[*]", (torch.int64,))
        if dropout_seed.numel() != 1:
            raise ValueError(f"dropout_seed: expected one number, got shape {list(dropout_seed.shape)}")
    if not dropout_p:
        dropout_seed = None
    elif dropout_seed is None:
        dropout_seed = torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=q.device)
    q, factor = positive_scale(q, scale)
    x = Inputs(
        q, k, v, q_offsets, k_offsets, num_targets, relative_bias, time_bias, _in_64_bits(q_times), _in_64_bits(k_times), bias,
        bias_offsets, dropout_seed,
    )  # fmt: skip
    # Without a default: Dynamo makes a symbol of one, for the first call alone.
    cap = 0.0 if softcap is None else float(softcap)
    options = Options(**mask, scale=factor, softcap=cap, dropout_p=dropout_p, pointwise=False, normalizer=0.0)
    results = ATTENTION(x, options, backend)
    return (results.output, results.lse) if return_lse else results.output


def jagged_hstu_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    k_offsets: Tensor | None = None,
    *,
    causal: bool = True,
    window: Window | None = None,
    num_targets: int | Tensor | None = None,
    num_contextual: int = 0,
    global_prefix: int = 0,
    windowed_context: bool = False,
    relative_bias: Tensor | None = None,
    time_bias: Tensor | None = None,
    times: Tensor | None = None,
    k_times: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    normalizer: float | None = None,
    backend: str | None = None,
) -> Tensor:
    """Add up the values that a row sees, each weighted by a SiLU of its score: `silu(q k^T * scale + biases) v / n`.

    There is no softmax: a weight depends on its own query and key alone, so that an output grows with how often something was
    seen. Nothing is padded, and memory follows the rows. Scores, weights and sums are float32 (float64 for float64 inputs). A row
    that sees no key has output 0. Under `torch.autocast` q, k and v are cast to its dtype. Gradients are deterministic; second
    derivatives are refused with an error.

    Masks and biases are those of `jagged_attention`. Queries and keys are the same rows, unless keys have offsets of their own:
    then of a sample's keys the last are those of its queries, behind keys of rows that came before, as a cache keeps them.

    Args:
        q: queries `[Sq, H, D]`, with `Sq = sum Lq`, H heads and a head width D of 1 to 256; float32, bfloat16, float16, and on
            CPU float64. Strided tensors work; where the last dimension is contiguous the kernels read them in place.
        k: keys `[Sk, Hkv, D]`, of the dtype and device of `q`. Hkv divides H: query head h reads key head `h // (H // Hkv)`.
        v: values `[Sk, Hkv, Dv]`, of the dtype and device of `q`; their width Dv, 1 to 256, need not be D.
        offsets: `[B + 1]`, int32 or int64, from 0; sample b owns the queries `offsets[b] .. offsets[b + 1] - 1`.
        k_offsets: `[B + 1]`, of the dtype of `offsets`: each sample's keys and values; None for those of the queries. Query i of
            Lq stands at position `i + Lk - Lq`.
        causal: hide the keys past a row's position.
        window: hide the keys `window` positions away or further, or a pair `(left, right)`; None hides none.
        num_targets: targets at each sample's end, which see the history and themselves alone: one number, or `[B]`, int32 or
            int64.
        num_contextual: the first so many positions see the whole history, and are in everyone's window.
        global_prefix: with `causal` and `window`, the first so many positions are in the window of all behind them.
        windowed_context: with `num_contextual` and `window`, contextual keys all stand at position `num_contextual - 1` to it.
        relative_bias: `[H, 2 * M + 1]`, a number for every distance `-M .. M` of positions.
        time_bias: `[H, T]`, a number for every bucket of the time between two rows, two buckets an octave.
        times: `[Sq]`, int32 or int64, the queries' times in any unit and any order; needed with `time_bias`. Within a sample
            they may span 2^47 units.
        k_times: `[Sk]`, int32 or int64, the keys' times; None, where `k_offsets` is None, for those of the queries.
        bias: a number for every pair of a query and a key: dense `[B, H, Lq, Lk]`, beyond which it is 0, or jagged `[H, P]` with
            `P = sum Lq * Lk`, as `pair_offsets(offsets, k_offsets)` lays it out.
        scale: factor of the scores; None takes `1 / sqrt(D)`.
        normalizer: n, above 0, such as the longest length of all batches; None takes each sample's own number of keys.
        backend: `"torch"` or `"triton"` to force one; None takes Triton for CUDA tensors. The PyTorch implementation reads the
            lengths on the host, which for CUDA tensors is a synchronisation; there it is an aid to debugging.

    Returns:
        `[Sq, H, Dv]`, contiguous, in the dtype of the inputs.

    Raises:
        TypeError: a dtype that is not supported, or dtypes that differ.
        ValueError: shapes or devices that do not fit, or a number out of range; on a CPU, elsewhere with `JAGGED_VALIDATE=1`,
            also offsets with wrong values, and a jagged bias shorter than theirs.

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

        The last row of each sample alone, to the keys of all its rows:

        >>> last = torch.tensor([1, 4])
        >>> jagged_hstu_attention(q[last], k, v, torch.tensor([0, 1, 1, 2]), offsets).shape
        torch.Size([2, 2, 16])
    """
    check_rows(q, k, v, k_offsets)
    check_both_offsets(q, k, "offsets", offsets, k_offsets)
    num_targets, mask = check_mask(offsets, causal, window, num_targets, num_contextual, global_prefix, windowed_context)
    if normalizer is not None and not normalizer > 0:
        raise ValueError(f"normalizer: expected above 0, got {normalizer}; use None for each sample's own number of keys")
    chosen = resolve_backend(backend, q)
    bias_offsets = check_biases(
        q, k, offsets, k_offsets, relative_bias, time_bias, {"times": times, "k_times": k_times}, bias, chosen
    )
    q, factor = positive_scale(q, scale)
    x = Inputs(
        q, k, v, offsets, k_offsets, num_targets, relative_bias, time_bias, _in_64_bits(times), _in_64_bits(k_times), bias,
        bias_offsets,
    )  # fmt: skip
    normalizer = 0.0 if normalizer is None else float(normalizer)
    options = Options(**mask, scale=factor, softcap=0.0, dropout_p=0.0, pointwise=True, normalizer=normalizer)
    return ATTENTION(x, options, backend).output


def _in_64_bits(times: Tensor | None) -> Tensor | None:
    return None if times is None else times.to(torch.int64)
