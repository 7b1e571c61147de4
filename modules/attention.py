"""Attention over jagged sequences: of a sample's rows to one another, and of queries to another feature's rows."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from jagged.modules.history_cache import CachedKeys, CachedShape
from jagged.modules.jagged_module import JaggedModule
from jagged.modules.jagged_tensor import check_samples, check_width, with_values
from jagged.modules.linear import apply_layer
from jagged.modules.positions import positions_with_targets, rotate
from jagged.ops import Window, jagged_attention


def bias_parameters(
    num_heads: int, max_distance: int | None, num_time_buckets: int | None, device: torch.device | str | None
) -> tuple[nn.Parameter | None, nn.Parameter | None]:
    """Return learned biases of distances `[H, 2 * max_distance + 1]` and of times `[H, num_time_buckets]`, not yet drawn."""
    if max_distance is not None and max_distance < 0:
        raise ValueError(f"max_distance: expected 0 or more, got {max_distance}; use None for no bias of distances")
    if num_time_buckets is not None and num_time_buckets < 1:
        raise ValueError(f"num_time_buckets: expected 1 or more, got {num_time_buckets}; use None for no bias of times")
    widths = (None if max_distance is None else 2 * max_distance + 1, num_time_buckets)
    relative, time = (None if n is None else nn.Parameter(torch.empty(num_heads, n, device=device)) for n in widths)
    return relative, time


def draw_biases(*biases: nn.Parameter | None) -> None:
    """Draw what there is from a normal distribution of standard deviation 0.02."""
    for bias in biases:
        if bias is not None:
            nn.init.normal_(bias, std=0.02)


def check_times(times: Tensor | None, time_bias: Tensor | None) -> None:
    """Check that there are times where the module has a bias of times, and none where it has not."""
    if time_bias is None and times is not None:
        raise ValueError(f"times: expected None, got {list(times.shape)}; a module built with num_time_buckets takes times")
    if time_bias is not None and times is None:
        raise ValueError(
            "times: expected [sum L], int32 or int64, one for each row, got None; the module was built with "
            f"num_time_buckets={time_bias.shape[1]}"
        )


def _check_dropout(attention_dropout: float) -> None:
    if not 0 <= attention_dropout < 1:
        raise ValueError(f"attention_dropout: expected a probability in [0, 1), got {attention_dropout}")


def _check_heads(embedding_dim: int, num_heads: int, num_key_heads: int) -> None:
    if num_heads < 1 or embedding_dim % num_heads:
        raise ValueError(f"num_heads: expected a divisor of embedding_dim {embedding_dim}, got {num_heads}; heads share it")
    if num_key_heads < 1 or num_heads % num_key_heads:
        raise ValueError(
            f"num_key_heads: expected a divisor of num_heads {num_heads}, got {num_key_heads}; each key head serves as many "
            "query heads"
        )


class JaggedSelfAttention(JaggedModule):
    """Multi-head softmax self-attention within each sample: projections, `jagged_attention`, output projection.

    A sample's last rows may be targets, as candidates to be ranked are: each sees the history before them and itself, and
    nothing sees it. What a target becomes depends neither on the other targets nor on its place among them.

    Args:
        embedding_dim: width D of rows in and out.
        num_heads: attention heads; divides `embedding_dim`.
        num_key_heads: heads of keys and values, each read by as many query heads; divides `num_heads`. None for `num_heads`.
        causal: a row sees itself and the rows before it; otherwise all rows of its sample.
        window: a row sees only rows fewer than `window` places away, or, of a pair `(left, right)`, at most `left` before and
            `right` behind it; None for all.
        num_contextual: the first so many rows of a sample see its whole history and are in everyone's window.
        rotary: turn queries and keys by their rows' positions, so that scores depend on distances. Positions are counted from
            the sample's first row, and all targets stand right behind the history.
        max_distance: add to the scores a learned number for each head and distance between rows (`relative_bias`,
            `[H, 2 * max_distance + 1]`), positions counted as for `rotary`; distances beyond count as `max_distance`. None for
            no such bias.
        num_time_buckets: add to the scores a learned number for each head and bucket of the time between rows (`time_bias`,
            `[H, num_time_buckets]`), two buckets an octave as `jagged_attention` counts them; what lies beyond the last belongs
            to it. None for no such bias.
        attention_dropout: probability with which a weight is set to 0 while training; the others grow by
            `1 / (1 - attention_dropout)`.
        device: where parameters live; `"meta"` allocates nothing.

    Shape:
        JaggedTensor with values `[sum L, D]` in and out. `num_targets`: how many of each sample's last rows are targets, one
        number or a tensor `[B]`, int32 or int64; None for no targets. `times`: int32 or int64 `[sum L]`, in any unit, where there
        are time buckets; None where there are not.

    Raises:
        ValueError: `num_heads` does not divide `embedding_dim`, or `num_key_heads` does not divide `num_heads`; rows of another
            width; a window, contextual rows, targets, distances, buckets or a probability out of range; no times where there
            are time buckets, or times where there are none.

    Source:
        Grouped heads: Ainslie et al., GQA: Training Generalized Multi-Query Transformer Models from Multi-Head Checkpoints, 2023.
        Rotary positions: Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, 2021. Biases of distances:
        Raffel et al., Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer, 2020, one for each
        distance as in Shaw et al., Self-Attention with Relative Position Representations, 2018. Biases of times, and the normal
        distribution of standard deviation 0.02 from which both are drawn: Zhai et al., Actions Speak Louder than Words, 2024,
        and its published implementation.

    Example:
        >>> import torch
        >>> from torchrec.sparse.jagged_tensor import JaggedTensor
        >>> from jagged.modules import JaggedSelfAttention
        >>> x = JaggedTensor(values=torch.randn(7, 32), offsets=torch.tensor([0, 3, 3, 7]))
        >>> attention = JaggedSelfAttention(32, num_heads=4, num_key_heads=2, rotary=True)
        >>> attention(x, num_targets=torch.tensor([1, 0, 2])).values().shape
        torch.Size([7, 32])

        A bias of the time between events, here in seconds:

        >>> attention = JaggedSelfAttention(32, num_heads=4, num_time_buckets=64)
        >>> attention(x, times=torch.tensor([0, 60, 3600, 5, 5, 90, 86400])).values().shape
        torch.Size([7, 32])
    """

    shown = (
        "num_heads", "causal", "num_key_heads", "window", "num_contextual", "rotary", "max_distance", "num_time_buckets",
        "attention_dropout",
    )  # fmt: skip

    def __init__(
        self,
        embedding_dim: int,
        num_heads: int,
        *,
        num_key_heads: int | None = None,
        causal: bool = True,
        window: Window | None = None,
        num_contextual: int = 0,
        rotary: bool = False,
        max_distance: int | None = None,
        num_time_buckets: int | None = None,
        attention_dropout: float = 0.0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        num_key_heads = num_heads if num_key_heads is None else num_key_heads
        _check_heads(embedding_dim, num_heads, num_key_heads)
        _check_dropout(attention_dropout)
        self.num_heads = num_heads
        self.num_key_heads = num_key_heads
        self.causal = causal
        self.window = window
        self.num_contextual = num_contextual
        self.rotary = rotary
        self.max_distance = max_distance
        self.num_time_buckets = num_time_buckets
        self.attention_dropout = attention_dropout
        self.relative_bias, self.time_bias = bias_parameters(num_heads, max_distance, num_time_buckets, device)
        draw_biases(self.relative_bias, self.time_bias)
        projected = embedding_dim // num_heads * (num_heads + 2 * num_key_heads)
        self.qkv_projection = nn.Linear(embedding_dim, projected, device=device)
        self.output_projection = nn.Linear(embedding_dim, embedding_dim, device=device)

    def reset_parameters(self) -> None:
        """Draw new weights: torch's defaults for linear layers, biases of scores with a standard deviation of 0.02."""
        draw_biases(self.relative_bias, self.time_bias)
        super().reset_parameters()

    def cached_shape(self) -> CachedShape:
        """Return what keys a `HistoryCache` keeps for the module.

        Raises:
            ValueError: earlier rows depend on later ones.
        """
        if not self.causal:
            raise ValueError("causal=False: rows see the rows behind them")
        if self.num_contextual:
            raise ValueError(f"num_contextual={self.num_contextual}: contextual rows see the history, which changes")
        weight = self.qkv_projection.weight
        width = self.qkv_projection.in_features // self.num_heads
        return CachedShape(self.num_key_heads, width, weight.dtype, weight.device, self.time_bias is not None, self.rotary)

    def forward(
        self,
        x: JaggedTensor,
        num_targets: int | Tensor | None = None,
        times: Tensor | None = None,
        cached: CachedKeys | None = None,
    ) -> JaggedTensor:
        """Attend within each sample, and to the `cached` rows before it."""
        values, offsets, heads = x.values(), x.offsets(), (self.num_heads, self.num_key_heads, self.num_key_heads)
        check_width("x", values, self.qkv_projection.in_features)
        check_times(times, self.time_bias)
        # [sum L, H + 2 * Hkv, width]: q, k and v are views of one projection, which the kernels take as they stand.
        qkv = apply_layer(self.qkv_projection, values).unflatten(1, (sum(heads), -1))
        if self.rotary:
            qk, v = qkv.split((heads[0] + heads[1], heads[2]), 1)
            positions = positions_with_targets(offsets, values.shape[0], num_targets) if cached is None else cached.positions
            # Where a block is rotary, its cache has them.
            assert positions is not None
            q, k = rotate(qk, positions).split(heads[:2], 1)
        else:
            q, k, v = qkv.split(heads, 1)
        k_offsets = k_times = None
        if cached is not None:
            k, v, k_offsets, k_times = cached.extended(k, v)
        attended = jagged_attention(
            q,
            k,
            v,
            offsets,
            k_offsets,
            causal=self.causal,
            window=self.window,
            num_targets=num_targets,
            num_contextual=self.num_contextual,
            relative_bias=self.relative_bias,
            time_bias=self.time_bias,
            q_times=times,
            k_times=k_times,
            dropout_p=self.attention_dropout if self.training else 0.0,
        )
        return with_values(x, apply_layer(self.output_projection, attended.flatten(1)))


class JaggedCrossAttention(JaggedModule):
    """Multi-head softmax attention of each sample's queries to all of its rows of another feature, the memory.

    Args:
        embedding_dim: width D of queries and of rows out.
        num_heads: attention heads; divides `embedding_dim`.
        key_dim: width of the memory's rows; None for `embedding_dim`.
        num_key_heads: heads of keys and values, each read by as many query heads; divides `num_heads`. None for `num_heads`.
        attention_dropout: probability with which a weight is set to 0 while training; the others grow by
            `1 / (1 - attention_dropout)`.
        device: where parameters live; `"meta"` allocates nothing.

    Shape:
        queries: JaggedTensor with values `[sum Lq, D]`, or a tensor `[B, n, D]` where each sample has n of them; memory:
        JaggedTensor of as many samples with values `[sum Lk, key_dim]`; out: as the queries. A query whose sample has no memory
        gets the bias of the output projection.

    Raises:
        ValueError: `num_heads` does not divide `embedding_dim`, or `num_key_heads` does not divide `num_heads`; a
            probability out of range; queries or memory of other widths, or of different numbers of samples.

    Source:
        Vaswani et al., Attention Is All You Need, NeurIPS 2017, section 3.2.3.

    Example:
        >>> import torch
        >>> from torchrec.sparse.jagged_tensor import JaggedTensor
        >>> from jagged.modules import JaggedCrossAttention
        >>> history = JaggedTensor(values=torch.randn(7, 16), offsets=torch.tensor([0, 3, 3, 7]))
        >>> items = torch.randn(3, 5, 32)
        >>> JaggedCrossAttention(32, num_heads=4, key_dim=16)(items, history).shape
        torch.Size([3, 5, 32])
    """

    shown = ("num_heads", "num_key_heads", "attention_dropout")

    def __init__(
        self,
        embedding_dim: int,
        num_heads: int,
        *,
        key_dim: int | None = None,
        num_key_heads: int | None = None,
        attention_dropout: float = 0.0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        key_dim = embedding_dim if key_dim is None else key_dim
        num_key_heads = num_heads if num_key_heads is None else num_key_heads
        _check_heads(embedding_dim, num_heads, num_key_heads)
        _check_dropout(attention_dropout)
        self.num_heads = num_heads
        self.num_key_heads = num_key_heads
        self.attention_dropout = attention_dropout
        self.q_projection = nn.Linear(embedding_dim, embedding_dim, device=device)
        self.kv_projection = nn.Linear(key_dim, embedding_dim // num_heads * 2 * num_key_heads, device=device)
        self.output_projection = nn.Linear(embedding_dim, embedding_dim, device=device)

    def forward(self, queries: JaggedTensor | Tensor, memory: JaggedTensor) -> JaggedTensor | Tensor:
        """Attend to the memory; the result has the form of the queries."""
        rows, k_offsets, width = memory.values(), memory.offsets(), self.q_projection.in_features
        check_width("memory", rows, self.kv_projection.in_features)
        if isinstance(queries, Tensor):
            check_width("queries", queries, width, "[B, n, D]")
            every = torch.arange(queries.shape[0] + 1, device=k_offsets.device, dtype=k_offsets.dtype)
            values, q_offsets = queries.flatten(0, 1), every * queries.shape[1]
        else:
            values, q_offsets = queries.values(), queries.offsets().to(k_offsets.dtype)
            check_width("queries", values, width)
        check_samples(
            "memory", k_offsets.shape[0] - 1, "queries", q_offsets.shape[0] - 1, "a sample without memory is one of length 0"
        )
        q = apply_layer(self.q_projection, values).unflatten(1, (self.num_heads, -1))
        k, v = apply_layer(self.kv_projection, rows).unflatten(1, (2, self.num_key_heads, -1)).unbind(1)
        dropout = self.attention_dropout if self.training else 0.0
        attended = jagged_attention(q, k, v, q_offsets, k_offsets, dropout_p=dropout)
        output = apply_layer(self.output_projection, attended.flatten(1))
        return output.view(queries.shape) if isinstance(queries, Tensor) else with_values(queries, output)
