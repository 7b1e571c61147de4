"""Softmax attention within each sample of a jagged batch; and the checks, autograd and operators of all attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from jagged.ops._shared.autograd import first_order
from jagged.ops._shared.offsets import scan_pairs
from jagged.ops._shared.registration import define_operator, resolve_backend
from jagged.ops._shared.validation import FLOATS, check_offsets, check_same, check_tensor, validation_is_on
from jagged.ops.attention import torch_impl

MAX_HEAD_DIM = 256
# Rows inside a sample are counted in int32 by the kernels, tiles that reach past the end included.
MAX_ROWS = 2**30


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    *_, pointwise, _normalizer, _backend = others
    lse_shape = (0,) if pointwise else (q.shape[1], q.shape[0])
    return q.new_empty(q.shape), q.new_empty(lse_shape, dtype=torch.promote_types(q.dtype, torch.float32))


def _fake_backward(
    grad: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, output: Tensor, lse: Tensor, *others: Any
) -> tuple[Tensor, ...]:
    *_, wanted, _backend = others
    biases = (
        q.new_empty(0) if not want else others[place].new_empty(others[place].shape)
        for want, place in zip(wanted, (3, 4, 7), strict=True)
    )
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), *biases


_TENSORS = (
    "Tensor q_offsets, Tensor? k_offsets, Tensor? num_targets, Tensor? relative_bias, Tensor? time_bias, Tensor? q_times, "
    "Tensor? k_times, Tensor? bias, Tensor? bias_offsets, Tensor? dropout_seed"
)
_OPTIONS = "bool causal, int window, int num_contextual, float scale, float dropout_p, bool pointwise, float normalizer"
_forward = define_operator(
    "attention_forward",
    f"(Tensor q, Tensor k, Tensor v, {_TENSORS}, {_OPTIONS}, str backend) -> (Tensor, Tensor)",
    torch_impl=torch_impl.forward,
    triton_impl="jagged.ops.attention.kernels:forward",
    fake=_fake_forward,
)
# Of a bias whose gradient is not `wanted`, in the order relative_bias, time_bias, bias, comes an empty one.
_backward = define_operator(
    "attention_backward",
    f"(Tensor grad, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor output, Tensor lse, {_TENSORS}, {_OPTIONS}, "
    "bool[] wanted, str backend) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    torch_impl=torch_impl.backward,
    triton_impl="jagged.ops.attention.kernels:backward",
    fake=_fake_backward,
)


class AttentionFunction(torch.autograd.Function):
    """Saves inputs, output and log-sum-exp; the backward computes the weights again, so memory is linear in the rows.

    `arguments` are those of the forward operator: thirteen tensors, then options. The tenth, the keys' times, is None for those
    of the queries, since Torch's compiler takes no tensor twice.
    """

    @staticmethod
    def forward(ctx: Any, return_lse: bool, *arguments: Any) -> Tensor | tuple[Tensor, Tensor]:
        tensors, options = arguments[:13], arguments[13:]
        output, lse = _forward(*_with_k_times(tensors), *options)
        ctx.save_for_backward(*tensors, output, lse)
        ctx.options = options
        return (output, lse) if return_lse else output

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_lse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        *tensors, output, lse = ctx.saved_tensors
        q, k, v, *others = _with_k_times(tensors)
        *options, backend = ctx.options
        # Those of q, k, v, relative_bias, time_bias and bias.
        places = (1, 2, 3, 7, 8, 11)
        wanted = [ctx.needs_input_grad[place] for place in places]
        with torch.no_grad():
            grads = _backward(grad, grad_lse, q, k, v, output, lse, *others, *options, wanted[3:], backend)
        pointwise = options[-2]
        grads = first_order("jagged_hstu_attention" if pointwise else "jagged_attention", grads)
        results: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        for place, want, result in zip(places, wanted, grads, strict=True):
            results[place] = result if want else None
        return tuple(results)


def _with_k_times(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [*tensors[:9], tensors[8] if tensors[9] is None else tensors[9], *tensors[10:]]


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
    relative_bias: Tensor | None = ...,
    time_bias: Tensor | None = ...,
    q_times: Tensor | None = ...,
    k_times: Tensor | None = ...,
    bias: Tensor | None = ...,
    dropout_p: float = ...,
    dropout_seed: Tensor | None = ...,
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
    relative_bias: Tensor | None = ...,
    time_bias: Tensor | None = ...,
    q_times: Tensor | None = ...,
    k_times: Tensor | None = ...,
    bias: Tensor | None = ...,
    dropout_p: float = ...,
    dropout_seed: Tensor | None = ...,
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
    relative_bias: Tensor | None = None,
    time_bias: Tensor | None = None,
    q_times: Tensor | None = None,
    k_times: Tensor | None = None,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    scale: float | None = None,
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
        v: values `[Sk, Hkv, D]`, of the dtype and device of `q`.
        q_offsets: `[B + 1]`, int32 or int64, from 0; sample b owns the queries `q_offsets[b] .. q_offsets[b + 1] - 1`.
        k_offsets: `[B + 1]`, of the dtype of `q_offsets`: each sample's keys and values; None for those of the queries.
        causal: hide the keys past a query's position.
        window: hide the keys `window` positions away or further; None hides none.
        num_targets: targets at each sample's end: one number, or `[B]`, int32 or int64; what lies outside `0 .. Lk` counts as the
            nearest that does not. None for none.
        num_contextual: the first so many positions are contextual: queries there see the whole history, and keys there are in
            everyone's window.
        relative_bias: `[H, 2 * M + 1]`, a number for every distance `-M .. M`: `relative_bias[h, M + d]` with d the query's
            position less the key's, held to `-M .. M`. All targets stand right behind the history, so that d of a target and
            itself is 0.
        time_bias: `[H, T]`, a number for every bucket of the time t between a query and a key: bucket 0 for t = 0, then two
            buckets an octave, `[1, 1.5)`, `[1.5, 2)`, `[2, 3)`, `[3, 4)`, ... of `|t|` in float32; the last for all longer times.
        q_times: `[Sq]`, int64, the queries' times in any unit and any order; needed with `time_bias`. Within a sample times may
            span 2^47 units.
        k_times: `[Sk]`, int64, the keys' times; None, where `k_offsets` is None, for those of the queries.
        bias: a number for every pair of a query and a key. Dense, `[B, H, Lq, Lk]`: by row in the sample; rows and keys past its
            end get 0, and an expanded tensor is read in place, though its gradient is whole. Or jagged, `[H, P]` with
            `P = sum Lq * Lk`: each sample's pairs row by row, from where `pair_offsets(q_offsets, k_offsets)` says. The gradient
            is 0 where a key is hidden.
        dropout_p: chance of each weight to be dropped after the softmax, from 0 to below 1; the others are divided by
            `1 - dropout_p`.
        dropout_seed: int64, one element: the same seed drops the same weights, on every backend. None draws one from torch's
            generator of the device of `q`, without a synchronisation.
        scale: factor of the scores; None takes `1 / sqrt(D)`.
        return_lse: return the log-sum-exp of each query's scores as well, as merging outputs over several sets of keys needs.
        backend: `"torch"` or `"triton"` to force one; None takes Triton for CUDA tensors. The PyTorch implementation reads the
            lengths on the host, which for CUDA tensors is a synchronisation; there it is an aid to debugging.

    Returns:
        `[Sq, H, D]`, contiguous, in the dtype of the inputs. With `return_lse` also the natural log-sum-exp `[H, Sq]`, float32
        (float64 for float64 inputs), minus infinity for a query that sees no key; it has a gradient. Dropout leaves it as it is.

    Raises:
        TypeError: a dtype that is not supported, or dtypes that differ.
        ValueError: shapes or devices that do not fit, or a number out of range; with `JAGGED_VALIDATE=1` also offsets with wrong
            values, and a jagged bias of another length than theirs.

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
    q, k, v = check_rows(q, k, v, k_offsets)
    check_offsets(q_offsets, q, "q_offsets", total=q.shape[0])
    if k_offsets is not None:
        check_offsets(k_offsets, q, "k_offsets", total=k.shape[0])
        check_same("k_offsets", k_offsets, "q_offsets", q_offsets)
        if k_offsets.shape != q_offsets.shape:
            raise ValueError(f"k_offsets: expected {list(q_offsets.shape)} as q_offsets, got {list(k_offsets.shape)}")
    num_targets = check_mask(q, q_offsets, window, num_targets, num_contextual)
    if k_offsets is None and k_times is None:
        k_times = q_times
    chosen = resolve_backend(backend, q)
    bias_offsets = check_biases(
        q, k, q_offsets, k_offsets, relative_bias, time_bias, [("q_times", q_times), ("k_times", k_times)], bias, chosen
    )
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p: expected from 0 to below 1, got {dropout_p}; it is the share of weights that are dropped")
    if dropout_seed is not None:
        check_tensor("dropout_seed", dropout_seed, "[*]", (torch.int64,))
        if dropout_seed.numel() != 1:
            raise ValueError(f"dropout_seed: expected one number, got shape {list(dropout_seed.shape)}")
        check_device("dropout_seed", dropout_seed, q)
    if not dropout_p:
        dropout_seed = None
    elif dropout_seed is None:
        dropout_seed = torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=q.device)
    q, factor = positive_scale(q, scale)
    result: Tensor | tuple[Tensor, Tensor] = AttentionFunction.apply(
        return_lse,
        q,
        k,
        v,
        q_offsets,
        k_offsets,
        num_targets,
        relative_bias,
        time_bias,
        q_times,
        None if k_times is q_times else k_times,
        bias,
        bias_offsets,
        dropout_seed,
        causal,
        0 if window is None else min(window, MAX_ROWS),
        min(num_contextual, MAX_ROWS),
        factor,
        dropout_p,
        False,
        0.0,
        chosen,
    )
    return result


def check_rows(q: Tensor, k: Tensor, v: Tensor, k_offsets: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Check queries, keys and values against one another; under autocast return them in its dtype."""
    check_tensor("q", q, "[Sq, H, D]", FLOATS)
    check_tensor("k", k, "[Sk, Hkv, D]", FLOATS)
    check_tensor("v", v, "[Sk, Hkv, D]", FLOATS)
    if q.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
    check_same("k", k, "q", q)
    check_same("v", v, "q", q)
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
    return q, k, v


def check_mask(
    q: Tensor, offsets: Tensor, window: int | None, num_targets: int | Tensor | None, num_contextual: int
) -> Tensor | None:
    """Check the masks' options, and return the targets of each sample, `[B]`."""
    batch_size = offsets.shape[0] - 1
    if window is not None and window < 1:
        raise ValueError(f"window: expected 1 or more, which is a row itself, got {window}; use None for no window")
    if num_contextual < 0:
        raise ValueError(f"num_contextual: expected 0 or more, got {num_contextual}")
    if isinstance(num_targets, Tensor):
        check_tensor("num_targets", num_targets, "[B]", (torch.int32, torch.int64))
        if num_targets.shape[0] != batch_size:
            raise ValueError(f"num_targets: expected [{batch_size}], one for each sample, got {list(num_targets.shape)}")
        check_device("num_targets", num_targets, q)
        return num_targets
    if num_targets is None:
        return None
    if num_targets < 0:
        raise ValueError(f"num_targets: expected 0 or more, got {num_targets}; use None for no targets")
    return offsets.new_full((batch_size,), min(num_targets, MAX_ROWS))


def check_biases(
    q: Tensor,
    k: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor | None,
    relative_bias: Tensor | None,
    time_bias: Tensor | None,
    times: Sequence[tuple[str, Tensor | None]],
    bias: Tensor | None,
    backend: str,
) -> Tensor | None:
    """Check biases, and the times of queries and keys with their names; return where a jagged bias's samples begin."""
    heads = q.shape[1]
    shapes = {"relative_bias": (relative_bias, "[H, 2M + 1]"), "time_bias": (time_bias, "[H, T]")}
    for name, (table, shape) in shapes.items():
        if table is None:
            continue
        check_tensor(name, table, shape)
        _check_bias_dtype(name, table, q)
        if table.shape[0] != heads:
            raise ValueError(f"{name}: expected {shape} with the {heads} heads of q, got {list(table.shape)}")
    if relative_bias is not None and relative_bias.shape[1] % 2 == 0:
        raise ValueError(
            f"relative_bias: expected an odd number of columns, 2M + 1 for the distances -M to M, got {relative_bias.shape[1]}"
        )
    if time_bias is not None and not time_bias.shape[1]:
        raise ValueError("time_bias: expected [H, T] with one bucket or more, got 0 columns")
    for (name, each), x in zip(times, (q, k), strict=False):
        if each is None:
            if time_bias is not None:
                raise ValueError(f"{name}: expected [{x.shape[0]}] beside time_bias, got None; give the time of every row")
            continue
        if time_bias is None:
            raise ValueError(f"{name}: got times, but no time_bias that reads them; give both or neither")
        check_tensor(name, each, "[S]", (torch.int64,))
        if each.shape[0] != x.shape[0]:
            raise ValueError(f"{name}: expected [{x.shape[0]}], one for each row, got {list(each.shape)}")
        check_device(name, each, q)
    if bias is None:
        return None
    if not isinstance(bias, Tensor) or bias.dim() not in (2, 4):
        got = list(bias.shape) if isinstance(bias, Tensor) else type(bias).__name__
        raise ValueError(f"bias: expected a dense [B, H, Lq, Lk] or a jagged [H, P], got {got}")
    _check_bias_dtype("bias", bias, q)
    if bias.dim() == 4:
        if bias.shape[:2] != (q_offsets.shape[0] - 1, heads):
            raise ValueError(
                f"bias: expected [{q_offsets.shape[0] - 1}, {heads}, Lq, Lk], the samples and the heads of q, "
                f"got {list(bias.shape)}; expand what all share"
            )
        return None
    if bias.shape[0] != heads:
        raise ValueError(f"bias: expected [{heads}, P], the heads of q, got {list(bias.shape)}")
    starts: Tensor = scan_pairs(q_offsets, q_offsets if k_offsets is None else k_offsets, backend)
    # More of them, as for a CUDA graph whose lengths change, are never read.
    if validation_is_on(starts) and int(starts[-1]) > bias.shape[1]:
        raise ValueError(f"bias: expected {int(starts[-1])} columns, one for each pair of a query and a key, got {bias.shape[1]}")
    return starts


def _check_bias_dtype(name: str, bias: Tensor, q: Tensor) -> None:
    if bias.dtype not in FLOATS or (bias.dtype == torch.float64 and q.dtype != torch.float64):
        raise TypeError(
            f"{name}: expected dtype float32, bfloat16 or float16, or float64 beside float64 q, got "
            f"{str(bias.dtype).removeprefix('torch.')}; convert it with .to(...)"
        )
    check_device(name, bias, q)


def check_device(name: str, tensor: Tensor, q: Tensor) -> None:
    """Check that a tensor lies where the queries do."""
    if tensor.device != q.device:
        raise ValueError(f"{name}: expected the device of q, {q.device}, got {tensor.device}; move it with .to(...)")


def positive_scale(q: Tensor, scale: float | None) -> tuple[Tensor, float]:
    """Return queries and a factor above 0 that together scale the scores.

    The kernels find the largest product before they scale it, and hide those of keys out of sight by minus infinity.
    """
    factor = 1 / math.sqrt(q.shape[2]) if scale is None else float(scale)
    # Dynamo, which may hold the factor as a symbol, does not trace math.isfinite.
    if not -math.inf < factor < math.inf:
        raise ValueError(f"scale: expected a finite number, got {scale}; leave it out for 1 / sqrt(D)")
    if factor > 0:
        return q, factor
    return (-q, -factor) if factor else (q * 0.0, 1.0)
