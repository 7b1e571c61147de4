"""Interactions: of a jagged feature with its sample's target items, and of the features of a row with one another."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from jagged.modules.jagged_module import JaggedModule
from jagged.modules.jagged_tensor import check_samples, with_values
from jagged.ops import jagged_dense_bmm, jagged_jagged_bmm, jagged_softmax


class JaggedFeatureInteraction(JaggedModule):
    """Score each row of a jagged feature against its sample's target items and sum the rows by their scores.

    With rows `x_i` and targets `y_t` of one sample: `score_it = scale * x_i . y_t`, `out_t = sum_i softmax_i(score_it) x_i`, or
    without the softmax `out_t = sum_i score_it x_i`. Nothing is padded: the scores are `[sum L, T]`.

    Args:
        softmax: normalise the scores over the sample's rows.
        scale: of the scores; None for `1 / sqrt(D)`.

    Shape:
        x: JaggedTensor with values `[sum L, D]`, the looked-up rows of one feature; targets: `[B, T, D]`, or `[B, D]` for one
        target; out: `[B, T, D]` or `[B, D]`. An empty sample gets zeros.

    Raises:
        ValueError: targets of another width or rank than the rows.

    Source:
        Xu et al., Enhancing Performance and Scalability of Large-Scale Recommendation Systems with Jagged Flash Attention, RecSys
        2024, Figure 1.
    """

    shown = ("softmax", "scale")

    def __init__(self, *, softmax: bool = True, scale: float | None = None) -> None:
        super().__init__()
        self.softmax = softmax
        self.scale = scale

    def forward(self, x: JaggedTensor, targets: Tensor) -> Tensor:
        """Return each target's pooled rows."""
        values, offsets = x.values(), x.offsets()
        dim = values.shape[1]
        if targets.dim() not in (2, 3) or targets.shape[-1] != dim:
            raise ValueError(f"targets: expected shape [B, T, {dim}] or [B, {dim}], as wide as rows; got {list(targets.shape)}")
        if targets.dim() == 2:
            return self.forward(x, targets[:, None]).squeeze(1)
        scale = dim**-0.5 if self.scale is None else self.scale
        scores = jagged_dense_bmm(values, offsets, targets.transpose(1, 2) * scale)
        weights = jagged_softmax(scores, offsets) if self.softmax else scores
        return jagged_jagged_bmm(values, weights, offsets).transpose(1, 2)


class CrossNet(JaggedModule):
    """Cross the features of a row with one another: each layer multiplies what it makes of the layer before by the first input.

    With x_0 the input: `x_{l+1} = x_0 * (W_l x_l + b_l) + x_l`. After n layers there are products of up to n + 1 features.

    Args:
        in_features: width D of rows in and out.
        num_layers: layers, at least one.
        rank: r of `W = U V^T`, U and V `[D, r]`, which costs `2 D r` in place of `D^2`; None for whole matrices.
        device: where parameters live; `"meta"` allocates nothing.

    Shape:
        `[*, D]` floats in and out, in the dtype of the input; under `torch.autocast` products are of its dtype and sums of the
        input's.

    Raises:
        ValueError: no layer, a rank below 1; rows of another width.

    Source:
        Wang et al., DCN V2: Improved Deep & Cross Network and Practical Lessons for Web-scale Learning to Rank Systems, WWW
        2021, equations 1 and 2.

    Example:
        >>> import torch
        >>> from jagged.modules import CrossNet
        >>> CrossNet(40, 2, rank=8)(torch.randn(5, 40)).shape
        torch.Size([5, 40])
    """

    shown = ("in_features", "rank")

    def __init__(
        self, in_features: int, num_layers: int = 3, *, rank: int | None = None, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        if num_layers < 1:
            raise ValueError(f"num_layers: expected 1 or more, got {num_layers}; without layers nothing is crossed")
        if rank is not None and rank < 1:
            raise ValueError(f"rank: expected 1 or more, got {rank}; use None for whole matrices")
        self.in_features = in_features
        self.rank = rank
        self.layers = nn.ModuleList(
            nn.Linear(in_features, in_features, device=device)
            if rank is None
            else nn.Sequential(
                nn.Linear(in_features, rank, bias=False, device=device), nn.Linear(rank, in_features, device=device)
            )
            for _ in range(num_layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Cross each row's features."""
        if x.shape[-1] != self.in_features:
            raise ValueError(f"x: expected values [*, D] with D = {self.in_features}, got {list(x.shape)}")
        crossed = x
        for layer in self.layers:
            crossed = x * layer(crossed) + crossed
        return crossed


class DotInteraction(JaggedModule):
    """Scalar products of all pairs of a row's feature vectors, and of these with its sample's.

    Each row has n vectors of width d, X. The pairs are the upper triangle of `X X^T` without the diagonal, row by row. Rows of a
    jagged tensor may have a context, m vectors of each sample, as the user's of candidates: the products with these, `n * m`,
    follow. The context is copied for no row. What its vectors give with one another is `DotInteraction()(context)`, once a
    sample.

    Shape:
        x: `[N, n, d]`, out `[N, n (n - 1) / 2]`; or a JaggedTensor with values `[sum L, n, d]` and context `[B, m, d]` or None,
        out a JaggedTensor with values `[sum L, n (n - 1) / 2 + n m]`. Floats, one dtype.

    Raises:
        ValueError: values of another rank, a context of another width or number of samples, or for rows that are not jagged.

    Source:
        Naumov et al., Deep Learning Recommendation Model for Personalization and Recommendation Systems, 2019, section 2.1.3.

    Example:
        >>> import torch
        >>> from torchrec.sparse.jagged_tensor import JaggedTensor
        >>> from jagged.modules import DotInteraction
        >>> candidates = JaggedTensor(values=torch.randn(7, 3, 8), offsets=torch.tensor([0, 3, 3, 7]))
        >>> users = torch.randn(3, 4, 8)
        >>> DotInteraction()(candidates, users).values().shape, DotInteraction()(users).shape
        (torch.Size([7, 15]), torch.Size([3, 6]))
    """

    def forward(self, x: JaggedTensor | Tensor, context: Tensor | None = None) -> JaggedTensor | Tensor:
        """Return the products of each row."""
        values = x if isinstance(x, Tensor) else x.values()
        if values.dim() != 3:
            raise ValueError(f"x: expected values [sum L, n, d], got {list(values.shape)}; a row has n vectors of one width")
        n, width = values.shape[1:]
        first, second = torch.triu_indices(n, n, 1, device=values.device).unbind()
        pairs = (values @ values.transpose(1, 2)).flatten(1)[:, first * n + second]
        if isinstance(x, Tensor):
            if context is not None:
                raise ValueError(f"context: expected None, got {list(context.shape)}; rows of a JaggedTensor have samples")
            return pairs
        if context is None:
            return with_values(x, pairs)
        offsets = x.offsets()
        if context.dim() != 3 or context.shape[2] != width:
            raise ValueError(
                f"context: expected vectors [B, m, d] with d = {width}, as wide as those of x, got {list(context.shape)}"
            )
        check_samples("context", context.shape[0], "x", offsets.shape[0] - 1, "each sample has its own vectors")
        # A row's vectors as rows of their own: each sample's block meets one matrix.
        products = jagged_dense_bmm(values.flatten(0, 1), offsets * n, context.transpose(1, 2))
        return with_values(x, torch.cat([pairs, products.view(values.shape[0], n * context.shape[1])], 1))
