"""Attention of target items to a jagged history by a learned activation unit."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from jagged.modules.jagged_module import JaggedModule
from jagged.modules.jagged_tensor import check_samples, check_width
from jagged.ops import ACTIVATIONS, Activation, jagged_dense_bmm, jagged_jagged_bmm, jagged_softmax


class TargetAttention(JaggedModule):
    """Sum each sample's history for each of its targets, every row weighted by what a small network makes of row and target.

    With rows `h_i` and a target `t` of one sample: `a_i = MLP([h_i, t, h_i - t, h_i * t])`, a number, and `out = sum_i a_i h_i`.
    As in the paper the weights are not normalised, so that the sum tells how much of the history speaks for the target.

    Args:
        embedding_dim: width D of history rows and targets.
        layer_sizes: widths of the network's hidden layers, at least one; a layer of width 1 follows them.
        activation: `"relu"`, `"silu"` or `"gelu"`, after every hidden layer.
        softmax: normalise the weights over the sample's rows.
        device: where parameters live; `"meta"` allocates nothing.

    Shape:
        history: JaggedTensor with values `[sum L, D]`; targets: `[B, n, D]`, or `[B, D]` for one target; out: as the targets. An
        empty history gives zeros. Nothing is padded: memory follows `sum L * n * layer_sizes[0]`, and `B * n * D *
        layer_sizes[0]` for the matrices that multiply each sample's rows.

    Raises:
        ValueError: no hidden layer, an unknown activation; rows or targets of another width, or targets for another number of
            samples.

    Source:
        Zhou et al., Deep Interest Network for Click-Through Rate Prediction, KDD 2018, section 4.3, equation 3. The difference
        and the product stand for the outer product there, as in the authors' code.

    Example:
        >>> import torch
        >>> from torchrec.sparse.jagged_tensor import JaggedTensor
        >>> from jagged.modules import TargetAttention
        >>> history = JaggedTensor(values=torch.randn(7, 16), offsets=torch.tensor([0, 3, 3, 7]))
        >>> TargetAttention(16)(history, torch.randn(3, 5, 16)).shape
        torch.Size([3, 5, 16])
    """

    shown = ("activation", "softmax")

    def __init__(
        self,
        embedding_dim: int,
        layer_sizes: Sequence[int] = (80, 40),
        *,
        activation: Activation = "relu",
        softmax: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if not layer_sizes:
            raise ValueError("layer_sizes: expected the width of at least one hidden layer, got none")
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation: got {activation!r}, expected one of {', '.join(map(repr, ACTIVATIONS))}")
        self.embedding_dim = embedding_dim
        self.activation = activation
        self.softmax = softmax
        widths = [4 * embedding_dim, *layer_sizes, 1]
        # A last bias would move all weights of a sample alike, which the softmax does not see.
        biases = [True] * len(layer_sizes) + [not softmax]
        self.layers = nn.ModuleList(
            nn.Linear(a, b, bias, device=device) for (a, b), bias in zip(itertools.pairwise(widths), biases, strict=True)
        )

    def forward(self, history: JaggedTensor, targets: Tensor) -> Tensor:
        """Return each target's weighted sum of the history."""
        values, offsets, dim = history.values(), history.offsets(), self.embedding_dim
        check_width("history", values, dim)
        check_width("targets", targets, dim, "[B, D]" if targets.dim() == 2 else "[B, n, D]")
        check_samples("targets", targets.shape[0], "history", offsets.shape[0] - 1, "a sample without history is one of length 0")
        if targets.dim() == 2:
            return self.forward(history, targets[:, None]).squeeze(1)
        first, *others = cast("list[nn.Linear]", self.layers)
        of_row, of_target, of_difference, of_product = first.weight.split(dim, 1)
        # The first layer is linear in the row once its target is fixed, so a matrix for each target multiplies the history as it
        # stands, and what depends on the target alone is added: no row is copied for the targets. The matrix is
        # `(of_row + of_difference + of_product * target).T`, and the sample's targets lie side by side.
        num_targets, width = targets.shape[1], first.out_features
        matrix = (of_product * targets[:, :, None] + (of_row + of_difference)).flatten(1, 2).transpose(1, 2)
        context = nn.functional.linear(targets, of_target - of_difference, first.bias).flatten(1)
        hidden = jagged_dense_bmm(values, offsets, matrix, context).unflatten(1, (num_targets, width))
        for layer in others:
            hidden = layer(ACTIVATIONS[self.activation](hidden))
        weights = hidden.squeeze(2)
        if self.softmax:
            weights = jagged_softmax(weights, offsets)
        return jagged_jagged_bmm(values, weights, offsets).transpose(1, 2)
