"""The block of HSTU: pointwise attention over a jagged sequence, gated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from jagged.modules.attention import bias_parameters, check_times, draw_biases
from jagged.modules.history_cache import CachedKeys, CachedShape
from jagged.modules.jagged_module import JaggedModule
from jagged.modules.jagged_tensor import check_width, with_values
from jagged.modules.layer_norm import LayerNorm
from jagged.modules.linear import apply_layer, are_plain, normalised
from jagged.modules.recompute import computed_again
from jagged.ops import Window, hstu_output, hstu_projection, jagged_hstu_attention

NORMS = ("layer", "group", "rms")
# Added to variances, of numbers that are small.
EPS = 1e-6


class HSTUBlock(JaggedModule):
    """A hierarchical sequential transduction unit: causal attention without softmax, gated, added to its input.

    Each row x of a sample becomes, with one linear layer f1 for all four parts and the attention within the sample,

        u, v, q, k = silu(f1(norm(x)))
        a_i = sum_j silu(q_i . k_j / sqrt(head_dim) + relative_bias + time_bias) v_j / n
        y = x + f2(dropout(norm(a) * u))    or, with `concat_ua`, x + f2(dropout([u, a, norm(a) * u]))

    where j runs over the rows that row i sees, and n is the sample's number of rows or `normalizer`. Weights do not add up to
    one, so that a says how much was found, too.

    A sample's last rows may be targets, as candidates to be ranked are: each sees the history before them and itself, and
    nothing sees it. With a `normalizer` what a target becomes depends neither on the other targets nor on its place among them;
    without, on their number, for they are among the sample's rows.

    Args:
        embedding_dim: width D of rows in and out.
        num_heads: attention heads.
        head_dim: width of a head's queries, keys, values and gates; None for `embedding_dim // num_heads`.
        window: a row sees only rows fewer than `window` places away, or at most `left` of a pair `(left, right)`; None for all
            before it.
        num_contextual: the first so many rows of a sample see its whole history and are in everyone's window.
        global_prefix: with a `window`, the first so many rows are in the window of all rows behind them.
        windowed_context: with `num_contextual` and a `window`, contextual rows are hidden from rows farther away than the window,
            for which they all stand at place `num_contextual - 1`, in place of being in everyone's.
        max_distance: add to the scores a learned number for each head and distance between rows (`relative_bias`,
            `[H, 2 * max_distance + 1]`), where all targets stand right behind the history; distances beyond count as
            `max_distance`. None for no such bias.
        num_time_buckets: add to the scores a learned number for each head and bucket of the time between rows (`time_bias`,
            `[H, num_time_buckets]`), two buckets an octave as `jagged_attention` counts them; what lies beyond the last belongs
            to it. None for no such bias.
        dropout: probability, applied to what f2 reads.
        normalizer: n, for all samples; None for each sample's own number of rows.
        concat_ua: f2 reads u and a, too.
        norm: `"layer"`; `"group"`, where a's heads are normalised by themselves; or `"rms"`, RMSNorm of x and of a.
        recompute: compute f1 again in backward, in place of keeping for it four rows of `num_heads * head_dim` numbers for each
            of x. Nothing is kept of what f2 reads, with or without, where `jagged.ops.hstu_output` has a kernel.
        device: where parameters live; `"meta"` allocates nothing.

    Shape:
        JaggedTensor with values `[sum L, D]` in and out. `num_targets`: how many of each sample's last rows are targets, one
        number or a tensor `[B]`, int32 or int64; None for no targets. `times`: int64 `[sum L]`, in any unit, where there are time
        buckets; None where there are not.

    Raises:
        ValueError: without `head_dim`, `num_heads` does not divide `embedding_dim`; rows of another width; a window, contextual
            rows, targets, distances, buckets or a normalizer out of range; another norm; no times where there are time buckets,
            or times where there are none.

    Source:
        Zhai et al., Actions Speak Louder than Words: Trillion-Parameter Sequential Transducers for Generative Recommendations,
        ICML 2024, equations 1 to 3. As in its published implementation f1 and the biases of scores are drawn from a normal
        distribution of standard deviation 0.02, f2 after Glorot and Bengio (uniform), and the norms, which see small numbers,
        add 1e-6 to the variance. There is a scale, and a bias of f1, which starts from 0, where the implementation has none.
        To it `max_attn_len` is `window - 1` here, with `windowed_context`; its group norm has one scale for a head, here each
        column has one, as `torch.nn.GroupNorm`'s. ULTRA-HSTU's window of K1 rows and prefix of K2 are `window` and
        `global_prefix`.

    Example:
        >>> import torch
        >>> from torchrec.sparse.jagged_tensor import JaggedTensor
        >>> from jagged.modules import HSTUBlock
        >>> x = JaggedTensor(values=torch.randn(7, 32), offsets=torch.tensor([0, 3, 3, 7]))
        >>> block = HSTUBlock(32, num_heads=4, max_distance=50, num_time_buckets=64, normalizer=200)
        >>> seconds = torch.tensor([0, 60, 3600, 5, 5, 90, 86400])
        >>> block(x, num_targets=torch.tensor([1, 0, 2]), times=seconds).values().shape
        torch.Size([7, 32])
    """

    shown = (
        "num_heads", "window", "num_contextual", "global_prefix", "windowed_context", "max_distance", "num_time_buckets",
        "normalizer", "concat_ua", "norm", "recompute",
    )  # fmt: skip

    def __init__(
        self,
        embedding_dim: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        window: Window | None = None,
        num_contextual: int = 0,
        global_prefix: int = 0,
        windowed_context: bool = False,
        max_distance: int | None = None,
        num_time_buckets: int | None = None,
        dropout: float = 0.0,
        normalizer: float | None = None,
        concat_ua: bool = False,
        norm: Literal["layer", "group", "rms"] = "layer",
        recompute: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if norm not in NORMS:
            raise ValueError(f"norm: expected one of {', '.join(NORMS)}, got {norm!r}")
        if num_heads < 1 or (head_dim is None and embedding_dim % num_heads):
            raise ValueError(
                f"num_heads: expected a divisor of embedding_dim {embedding_dim}, got {num_heads}; heads share it, unless "
                "head_dim is given"
            )
        if head_dim is not None and head_dim < 1:
            raise ValueError(f"head_dim: expected 1 or more, got {head_dim}; None takes embedding_dim // num_heads")
        self.num_heads = num_heads
        self.window = window
        self.num_contextual = num_contextual
        self.global_prefix = global_prefix
        self.windowed_context = windowed_context
        self.max_distance = max_distance
        self.num_time_buckets = num_time_buckets
        self.normalizer = normalizer
        self.concat_ua = concat_ua
        self.norm = norm
        self.recompute = recompute
        self.relative_bias, self.time_bias = bias_parameters(num_heads, max_distance, num_time_buckets, device)
        width = num_heads * (embedding_dim // num_heads if head_dim is None else head_dim)
        self.input_norm: nn.Module = _norm("rms" if norm == "rms" else "layer", embedding_dim, 1, device)
        self.uvqk_projection = nn.Linear(embedding_dim, 4 * width, device=device)
        self.attention_norm: nn.Module = _norm(norm, width, num_heads, device)
        self.output_projection = nn.Linear(3 * width if concat_ua else width, embedding_dim, device=device)
        self.dropout = nn.Dropout(dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new weights, as the class's source says."""
        draw_biases(self.relative_bias, self.time_bias)
        for norm in (self.input_norm, self.attention_norm):
            norm.reset_parameters()  # type: ignore[operator]
        nn.init.normal_(self.uvqk_projection.weight, std=0.02)
        nn.init.xavier_uniform_(self.output_projection.weight)
        nn.init.zeros_(self.uvqk_projection.bias)
        nn.init.zeros_(self.output_projection.bias)

    def cached_shape(self) -> CachedShape:
        """Return what keys a `HistoryCache` keeps for the block.

        Raises:
            ValueError: earlier rows depend on later ones.
        """
        if self.num_contextual:
            raise ValueError(f"num_contextual={self.num_contextual}: contextual rows see the history, which changes")
        if self.normalizer is None:
            raise ValueError("normalizer=None: sums are divided by the number of rows, which changes; give it a number")
        weight = self.uvqk_projection.weight
        width = self.uvqk_projection.out_features // (4 * self.num_heads)
        return CachedShape(self.num_heads, width, weight.dtype, weight.device, self.time_bias is not None)

    def forward(
        self,
        x: JaggedTensor,
        num_targets: int | Tensor | None = None,
        times: Tensor | None = None,
        cached: CachedKeys | None = None,
    ) -> JaggedTensor:
        """Attend within each sample, and to the `cached` rows before it; add what the gates let through."""
        values = x.values()
        check_width("x", values, self.uvqk_projection.in_features)
        check_times(times, self.time_bias)
        if self.norm == "rms":
            normal = _normalised(self.input_norm, values)
        else:
            normal, values = normalised(self.input_norm, values)
        u, v, q, k = self._projected(normal)
        k_offsets = k_times = None
        if cached is not None:
            k, v, k_offsets, k_times = cached.extended(k, v)
        attended = jagged_hstu_attention(
            q,
            k,
            v,
            x.offsets(),
            k_offsets,
            window=self.window,
            num_targets=num_targets,
            num_contextual=self.num_contextual,
            global_prefix=self.global_prefix,
            windowed_context=self.windowed_context,
            relative_bias=self.relative_bias,
            time_bias=self.time_bias,
            times=times,
            k_times=k_times,
            normalizer=self.normalizer,
        )
        return with_values(x, self._output(attended, u, values))

    def _projected(self, normal: Tensor) -> Sequence[Tensor]:
        """Return gates, values, queries and keys, `[sum L, H, head_dim]`."""
        layer = self.uvqk_projection
        if are_plain(normal, layer) and layer.bias is not None:
            return hstu_projection(normal, layer.weight, layer.bias, self.num_heads, recompute=self.recompute)

        def project(rows: Tensor) -> Tensor:
            return nn.functional.silu(apply_layer(layer, rows))

        projected = computed_again((layer,), project, normal) if self.recompute else project(normal)
        # Views of one tensor, which the kernels take as they stand.
        parts: Sequence[Tensor] = projected.unflatten(1, (4, self.num_heads, -1)).unbind(1)
        return parts

    def _output(self, attended: Tensor, u: Tensor, values: Tensor) -> Tensor:
        """Add to rows what the gates let through."""
        layer, norm, dropout = self.output_projection, self.attention_norm, self.dropout
        if are_plain(values, layer, norm, dropout) and layer.bias is not None:
            return hstu_output(
                attended,
                u,
                values,
                cast(Tensor, norm.weight),
                cast(Tensor | None, getattr(norm, "bias", None)),
                layer.weight,
                layer.bias,
                eps=EPS,
                num_groups=self.num_heads if self.norm == "group" else 1,
                centred=self.norm != "rms",
                concat=self.concat_ua,
                dropout_p=dropout.p if dropout.training else 0.0,
            )
        attended, u = attended.flatten(1), u.flatten(1)
        gated = _normalised(norm, attended) * u
        if self.concat_ua:
            gated = torch.cat([u, attended, gated], 1)
        return values + apply_layer(layer, dropout(gated))


def _normalised(norm: nn.Module, rows: Tensor) -> Tensor:
    """Return what a norm makes of rows; PyTorch's RMSNorm takes no other dtype than its weight's, and autocast does not cast."""
    if isinstance(norm, nn.RMSNorm):
        rows = rows.to(norm.weight.dtype)
    return cast(Tensor, norm(rows))


def _norm(kind: str, width: int, num_heads: int, device: torch.device | str | None) -> nn.Module:
    if kind == "layer":
        return LayerNorm(width, EPS, autocast_output=True, device=device)
    if kind == "group":
        return nn.GroupNorm(num_heads, width, EPS, device=device)
    return nn.RMSNorm(width, EPS, device=device)
