"""Attention on padded tensors, in whatever dtype it is given: the oracle of jagged attention."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def visible_keys(
    q_lengths: Tensor,
    k_lengths: Tensor,
    *,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    num_targets: int | Tensor | None = None,
    num_contextual: int = 0,
    global_prefix: int = 0,
    windowed_context: bool = False,
) -> Tensor:
    """Tell which keys a query sees, `[B, longest Lq, longest Lk]`; both are at least 1, and padding neither sees nor is seen."""
    device = q_lengths.device
    query = torch.arange(max([1, *q_lengths.tolist()]), device=device)[None, :, None]
    key = torch.arange(max([1, *k_lengths.tolist()]), device=device)[None, None, :]
    q_lengths, k_lengths = q_lengths[:, None, None], k_lengths[:, None, None]
    targets = torch.as_tensor(0 if num_targets is None else num_targets, device=device).expand(q_lengths.shape[0])
    history = k_lengths - targets[:, None, None].clamp(min=0).minimum(k_lengths)

    position = query + k_lengths - q_lengths
    place = position.minimum(history)
    seen = torch.ones_like(position == key)
    if causal:
        seen = seen & (key <= place)
    if window is not None:
        left, right = window if isinstance(window, tuple) else (window - 1, window - 1)
        stands = key.clamp(min=num_contextual - 1) if windowed_context else key
        near = torch.ones_like(seen)
        if left is not None:
            near = near & (place - stands <= left)
        if right is not None:
            near = near & (key - place <= right)
        seen = seen & (near | (key < (global_prefix if windowed_context else max(num_contextual, global_prefix))))
    if num_contextual:
        seen = seen | (position < num_contextual)
    seen = seen & (key < history)
    if num_targets is not None:
        seen = seen | (position == key)
    return seen & (query < q_lengths) & (key < k_lengths)


def padded(rows: Tensor, lengths: Tensor) -> Tensor:
    """`[S, ...] -> [B, longest, ...]`, the longest at least 1; 0 past a sample's end."""
    return torch.stack(
        [
            torch.cat([part, part.new_zeros(max([1, *lengths.tolist()]) - part.shape[0], *part.shape[1:])])
            for part in rows.split(lengths.tolist())
        ]
        or [rows.new_zeros(1, *rows.shape[1:])]
    )[: lengths.shape[0]]


def time_buckets(times: Tensor) -> Tensor:
    """Two buckets an octave of float32's values: 0 for 0, 1 for [1, 1.5), 2 for [1.5, 2), 3 for [2, 3) and so on."""
    mantissa, exponent = torch.frexp(times.abs().to(torch.float32).double())
    # The mantissa lies from 0.5 to below 1.
    return torch.where(times == 0, 0, 2 * (exponent - 1) + 1 + (mantissa >= 0.75))


def padded_biases(
    shape: torch.Size,
    q_lengths: Tensor,
    k_lengths: Tensor,
    num_targets: int | Tensor | None,
    relative_bias: Tensor | None,
    time_bias: Tensor | None,
    q_times: Tensor | None,
    k_times: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Add up the biases of every pair, `[B, H, longest Lq, longest Lk]`."""
    batch_size, heads, longest_q, longest_k = shape
    device = q_lengths.device
    total = torch.zeros(shape, dtype=dtype, device=device)
    if relative_bias is not None:
        furthest = relative_bias.shape[1] // 2
        targets = torch.as_tensor(0 if num_targets is None else num_targets, device=device).expand(batch_size)
        history = (k_lengths - targets.clamp(min=0).minimum(k_lengths))[:, None, None]
        query = torch.arange(longest_q, device=device)[:, None] + (k_lengths - q_lengths)[:, None, None]
        key = torch.arange(longest_k, device=device)
        distance = query.minimum(history) - key.minimum(history)
        total = total + relative_bias[:, furthest + distance.clamp(-furthest, furthest)].transpose(0, 1)
    if time_bias is not None:
        assert q_times is not None
        between = padded(q_times, q_lengths)[:, :, None] - padded(q_times if k_times is None else k_times, k_lengths)[:, None]
        total = total + time_bias[:, time_buckets(between).clamp(max=time_bias.shape[1] - 1)].transpose(0, 1)
    if bias is not None and bias.dim() == 4:
        dense = bias[:, :, :longest_q, :longest_k]
        total = total + torch.nn.functional.pad(dense, (0, longest_k - dense.shape[3], 0, longest_q - dense.shape[2]))
    elif bias is not None:
        blocks = bias.split((q_lengths * k_lengths).tolist(), 1)
        for sample, (block, rows, columns) in enumerate(zip(blocks, q_lengths.tolist(), k_lengths.tolist(), strict=True)):
            beyond = (0, longest_k - columns, 0, longest_q - rows)
            term = torch.nn.functional.pad(block.reshape(heads, rows, columns), beyond)
            total = total.index_add(0, torch.tensor([sample], device=device), term[None].to(total.dtype))
    return total


def padded_scores(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_lengths: Tensor,
    k_lengths: Tensor,
    mask: dict[str, object],
    biases: dict[str, Tensor | None],
    scale: float | None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores in float32 at least and what is visible, both `[B, H, Lq, Lk]`, and values `[B, H, Lk, D]`."""
    visible = visible_keys(q_lengths, k_lengths, **mask)[:, None]  # type: ignore[arg-type]
    query, key, value = (
        padded(x, lengths).repeat_interleave(q.shape[1] // x.shape[1], 2).transpose(1, 2)
        for x, lengths in ((q, q_lengths), (k, k_lengths), (v, k_lengths))
    )
    scores = query @ key.transpose(2, 3) * (q.shape[2] ** -0.5 if scale is None else scale)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if any(x is not None for x in biases.values()):
        scores = scores + padded_biases(
            scores.shape,
            q_lengths,
            k_lengths,
            mask["num_targets"],
            **biases,
            dtype=scores.dtype,  # type: ignore[arg-type]
        )
    return scores, visible.expand(scores.shape), value


def rows_of(padded_rows: Tensor, lengths: Tensor) -> Tensor:
    """`[B, H, longest, ...] -> [S, H, ...]`."""
    inside = torch.arange(padded_rows.shape[2], device=lengths.device) < lengths[:, None]
    return padded_rows.transpose(1, 2)[inside]


def dropout_mask(seed: int, dropout_p: float, q_lengths: Tensor, k_lengths: Tensor, heads: int) -> Tensor:
    """Tell which weights dropout leaves, `[B, heads, longest Lq, longest Lk]`: lowbias32 of seed, query, head and key."""

    def mix(x: np.ndarray) -> np.ndarray:
        x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
        x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
        return x ^ (x >> np.uint32(16))

    longest_q, longest_k = (max([1, *lengths.tolist()]) for lengths in (q_lengths, k_lengths))
    row = (q_lengths.cumsum(0) - q_lengths).cpu().numpy()[:, None] + np.arange(longest_q)
    head, key = np.arange(heads, dtype=np.uint32), np.arange(longest_k, dtype=np.uint32)
    low, high = np.uint32(seed & 0xFFFFFFFF), np.uint32(seed >> 32 & 0xFFFFFFFF)
    of_row = mix(row.astype(np.uint32) ^ low)[:, None, :] + (head * np.uint32(0x9E3779B9))[:, None]
    of_pair = mix(mix(of_row)[..., None] ^ mix(key + high))
    return torch.from_numpy(of_pair.astype(np.int64) >= min(round(dropout_p * 2**32), 2**32 - 1)).to(q_lengths.device)


def padded_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor | None = None,
    *,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    num_targets: int | Tensor | None = None,
    num_contextual: int = 0,
    global_prefix: int = 0,
    windowed_context: bool = False,
    relative_bias: Tensor | None = None,
    time_bias: Tensor | None = None,
    q_times: Tensor | None = None,
    k_times: Tensor | None = None,
    bias: Tensor | None = None,
    keep: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`[Sq, H, D]`, twice `[Sk, Hkv, D]` -> output `[Sq, H, D]` and log-sum-exp `[H, Sq]`, through `[B, H, Lq, Lk]` scores.

    `keep`, `[B, H, Lq, Lk]`, tells which weights dropout leaves.
    """
    q_lengths = q_offsets.diff()
    k_lengths = q_lengths if k_offsets is None else k_offsets.diff()
    mask = {"causal": causal, "window": window, "num_targets": num_targets, "num_contextual": num_contextual}
    mask |= {"global_prefix": global_prefix, "windowed_context": windowed_context}
    biases = {"relative_bias": relative_bias, "time_bias": time_bias, "q_times": q_times, "k_times": k_times, "bias": bias}
    scores, visible, value = padded_scores(q, k, v, q_lengths, k_lengths, mask, biases, scale, softcap)
    # Where nothing is seen, finite scores keep NaN out of the gradients.
    seeing = visible.any(-1, keepdim=True)
    scores = scores.masked_fill(~visible, -torch.inf).masked_fill(~seeing, 0)
    # The softmax from the log-sum-exp, whose rounding is the price of keeping no probabilities.
    lse = scores.logsumexp(-1, keepdim=True)
    weights = (scores - lse).exp().masked_fill(~seeing, 0)
    if keep is not None:
        weights = weights * keep / (1 - dropout_p)
    lse = lse.masked_fill(~seeing, -torch.inf).squeeze(-1)
    return rows_of(weights.to(value.dtype) @ value, q_lengths), rows_of(lse, q_lengths).t()


def padded_hstu_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    k_offsets: Tensor | None = None,
    *,
    causal: bool = True,
    window: int | tuple[int | None, int | None] | None = None,
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
) -> Tensor:
    """`[Sq, H, D]`, twice `[Sk, Hkv, D]` -> `[Sq, H, D]`, through `[B, H, Lq, Lk]` scores."""
    lengths = offsets.diff()
    k_lengths = lengths if k_offsets is None else k_offsets.diff()
    mask = {"causal": causal, "window": window, "num_targets": num_targets, "num_contextual": num_contextual}
    mask |= {"global_prefix": global_prefix, "windowed_context": windowed_context}
    biases = {"relative_bias": relative_bias, "time_bias": time_bias, "q_times": times, "bias": bias}
    biases |= {"k_times": times if k_times is None else k_times}
    scores, visible, value = padded_scores(q, k, v, lengths, k_lengths, mask, biases, scale)
    weights = torch.nn.functional.silu(scores).masked_fill(~visible, 0)
    divisor = k_lengths.clamp(min=1)[:, None, None, None] if normalizer is None else normalizer
    sums = weights.to(value.dtype) @ value / divisor
    return rows_of(sums, lengths)
