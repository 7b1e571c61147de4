"""The interaction of a jagged feature with its sample's target items."""

from __future__ import annotations

from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor

from jagged.modules.jagged_module import JaggedModule
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
