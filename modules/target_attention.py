"""Attention of target items to a jagged history by a learned activation unit."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from jagged.modules.jagged_module import JaggedModule
from jagged.modules.jagged_tensor import check_samples, check_width, with_values
from jagged.modules.linear import apply_layer
from jagged.ops import (
    ACTIVATIONS,
    Activation,
    array_jagged_bmm_jagged_out,
    jagged2_softmax,
    jagged_dense_bmm,
    jagged_jagged_bmm,
    jagged_jagged_bmm_jagged_out,
    jagged_softmax,
    linear,
    pair_offsets,
    sample_of_row,
)


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
        history: JaggedTensor with values `[sum L, D]`; targets: `[B, n, D]`, or `[B, D]` for one target, or a JaggedTensor with
        values `[sum n, D]` where samples have several numbers of them; out: as the targets. An empty history gives zeros.
        `num_pairs`: of jagged targets the number of pairs of a row and a target, `sum L n` over the samples; None reads it from
        the offsets, which synchronises once with the device.

        Nothing is padded. With `H = layer_sizes[0]` memory follows `sum L n * H`, the first layer of all pairs, and
        `sum n * D * H` for the matrices that multiply each sample's rows. In float32 with layers of 64 and 16 the backward pass
        keeps 640 bytes a pair and, with D = 64, 16 KB a target.

    Raises:
        ValueError: no hidden layer, an unknown activation; rows or targets of another width, or targets for another number of
            samples; `num_pairs` below 0 or beside targets that are not jagged.

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
        >>> candidates = JaggedTensor(values=torch.randn(6, 16), offsets=torch.tensor([0, 1, 4, 6]))
        >>> TargetAttention(16)(history, candidates, num_pairs=11).values().shape
        torch.Size([6, 16])
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

    def forward(
        self, history: JaggedTensor, targets: Tensor | JaggedTensor, num_pairs: int | None = None
    ) -> Tensor | JaggedTensor:
        """Return each target's weighted sum of the history."""
        values, offsets, dim = history.values(), history.offsets(), self.embedding_dim
        check_width("history", values, dim)
        if isinstance(targets, JaggedTensor):
            return with_values(targets, self._of_jagged(history, targets, num_pairs))
        if num_pairs is not None:
            raise ValueError(f"num_pairs: expected None, got {num_pairs}; only jagged targets, a JaggedTensor, have it")
        check_width("targets", targets, dim, "[B, D]" if targets.dim() == 2 else "[B, n, D]")
        check_samples("targets", targets.shape[0], "history", offsets.shape[0] - 1, "a sample without history is one of length 0")
        if targets.dim() == 2:
            return cast(Tensor, self.forward(history, targets[:, None])).squeeze(1)
        first, *others = cast("list[nn.Linear]", self.layers)
        of_row, of_target, of_difference, of_product = first.weight.split(dim, 1)
        # The first layer is linear in the row once its target is fixed, so a matrix for each target multiplies the history as it
        # stands, and what depends on the target alone is added: no row is copied for the targets. The matrix is
        # `(of_row + of_difference + of_product * target).T`, and the sample's targets lie side by side.
        num_targets, width = targets.shape[1], first.out_features
        matrix = (of_product * targets[:, :, None] + (of_row + of_difference)).flatten(1, 2).transpose(1, 2)
        context = linear(targets, of_target - of_difference, first.bias).flatten(1)
        hidden = jagged_dense_bmm(values, offsets, matrix, context).unflatten(1, (num_targets, width))
        weights = self._weights(hidden, others)
        if self.softmax:
            weights = jagged_softmax(weights, offsets)
        return jagged_jagged_bmm(values, weights, offsets).transpose(1, 2)

    def _of_jagged(self, history: JaggedTensor, targets: JaggedTensor, num_pairs: int | None) -> Tensor:
        values, rows, dim = history.values(), targets.values(), self.embedding_dim
        # Numbers of pairs grow with products of lengths.
        offsets, ends = history.offsets().to(torch.int64), targets.offsets().to(torch.int64)
        check_width("targets", rows, dim)
        check_samples(
            "targets", ends.shape[0] - 1, "history", offsets.shape[0] - 1, "a sample without targets is one of length 0"
        )
        starts = pair_offsets(offsets, ends)
        if num_pairs is None:
            num_pairs = cast(int, starts[-1].item())
            if torch.compiler.is_compiling():
                torch._check(num_pairs >= 0)
        elif not torch.compiler.is_compiling() and num_pairs < 0:
            raise ValueError(f"num_pairs: expected 0 or more, got {num_pairs}; None reads it from the offsets")
        first, *others = cast("list[nn.Linear]", self.layers)
        of_row, of_target, of_difference, of_product = first.weight.split(dim, 1)
        # A row of numbers for each target and hidden unit, by which the sample's rows are multiplied as they stand. Its last
        # number depends on the target alone and meets a 1.
        width = first.out_features
        context = linear(rows, of_target - of_difference, first.bias)
        matrix = torch.cat([of_product * rows[:, None] + (of_row + of_difference), context[:, :, None]], 2).flatten(0, 1)
        longer = torch.cat([values, values.new_ones(values.shape[0], 1)], 1)
        # Blocks of a row's hidden units for one target after the other: all units of a pair lie side by side.
        hidden = jagged_jagged_bmm_jagged_out(longer, matrix, offsets, ends * width, num_pairs * width)
        weights = self._weights(hidden.view(num_pairs, width), others)
        # By this selection gradients are added in any order; each weight has one place, so that its gradient is one number.
        weights = weights.index_select(0, _turned(starts, offsets, ends, num_pairs))
        if self.softmax:
            weights = jagged2_softmax(weights, ends, offsets)
        return array_jagged_bmm_jagged_out(weights, values, ends, offsets, rows.shape[0])

    def _weights(self, hidden: Tensor, others: list[nn.Linear]) -> Tensor:
        """The numbers that the network makes of what its first layer gives, `[*, layer_sizes[0]] -> [*]`."""
        for layer in others:
            hidden = apply_layer(layer, ACTIVATIONS[self.activation](hidden))
        return hidden.squeeze(-1)


def _turned(starts: Tensor, offsets: Tensor, ends: Tensor, num_pairs: int) -> Tensor:
    """Return where the pairs of blocks that stand target by target lie in blocks that stand row by row, int64 `[num_pairs]`."""
    samples = sample_of_row(starts, num_pairs)
    first = starts[samples]
    place = torch.arange(num_pairs, device=starts.device) - first
    # A sample with pairs has rows; a wrong number of pairs leads nowhere outside.
    rows = offsets.diff()[samples].clamp(min=1)
    return (first + place % rows * ends.diff()[samples] + place // rows).clamp(max=num_pairs - 1)
