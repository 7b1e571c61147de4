"""Group-sparse linear layers in plain PyTorch: the CPU path and the float64 path.

Groups of like sizes lie side by side, padded to the largest of their piece, and each piece meets pieces of the batch: what is
gathered and multiplied at once is bounded, and the count of PyTorch calls follows the work. Sizes of groups are read on the
host, which synchronises elsewhere than on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from jagged.ops._shared.offsets import covering
from jagged.ops.group_sparse.spec import Inputs, Options, Outputs

# Elements of a piece's gathered features, and of its logits: 4 MiB in float32.
PIECE_ELEMENTS = 2**20
# Samples that meet groups at once.
PIECE_SAMPLES = 256


class Piece(NamedTuple):
    """Groups side by side: their columns `[n, F]`, their labels `[n, G]` (0 where there is none), and which of them exist."""

    columns: Tensor
    labels: Tensor
    exists: Tensor


def forward(x: Inputs, o: Options) -> Outputs:
    """Return the logits, zeros where wrong offsets have no group."""
    features, weight, bias = x.features, x.weight, x.bias
    dtype = torch.promote_types(features.dtype, torch.float32)
    logits = features.new_zeros(features.shape[0], weight.shape[0])
    for piece in _pieces(x):
        labels = piece.labels[piece.exists]
        weights = weight.index_select(0, piece.labels.flatten()).view(*piece.labels.shape, -1).to(dtype)
        for samples in _samples(features):
            products = torch.bmm(weights, _gathered(features[samples], piece, dtype))[piece.exists]
            if bias is not None:
                products += bias.index_select(0, labels).to(dtype)[:, None]
            logits[samples].index_copy_(1, labels, products.t().to(logits.dtype))
    return Outputs(logits)


def backward(grads: Outputs, x: Inputs, out: Outputs, o: Options, wanted: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
    """Return the gradients that are wanted."""
    features, weight, grad = x.features, x.weight, grads.logits
    assert grad is not None
    dtype = torch.promote_types(features.dtype, torch.float32)
    # Of features transposed, so that what is added to one column lies side by side.
    columns = features.new_zeros(features.shape[1], features.shape[0], dtype=dtype) if "features" in wanted else None
    rows = weight.new_zeros(weight.shape, dtype=dtype) if "weight" in wanted else None
    for piece in _pieces(x) if columns is not None or rows is not None else ():
        n, longest = piece.labels.shape
        flat, shape = piece.labels.flatten(), (n, longest, -1)
        weights = None if columns is None else weight.index_select(0, flat).view(shape).to(dtype)
        sums = None if rows is None else rows.new_zeros(n, longest, weight.shape[1])
        for samples in _samples(features):
            # Zero where there is no label: the one that stands in for it adds nothing.
            given = grad[samples].t().index_select(0, flat).view(shape).to(dtype).masked_fill_(~piece.exists[:, :, None], 0)
            if sums is not None:
                sums.baddbmm_(given, _gathered(features[samples], piece, dtype).transpose(1, 2))
            if columns is not None and weights is not None:
                # Nor does a weight that is no number, which a gradient of zero would not hide.
                products = torch.bmm(weights.masked_fill(~piece.exists[:, :, None], 0).transpose(1, 2), given)
                columns[:, samples].index_add_(0, piece.columns.flatten(), products.flatten(0, 1))
        if rows is not None and sums is not None:
            rows.index_copy_(0, piece.labels[piece.exists], sums[piece.exists])
    found = {}
    if columns is not None:
        found["features"] = columns.t().to(wanted["features"]).contiguous()
    if rows is not None:
        found["weight"] = rows.to(wanted["weight"])
    if "bias" in wanted:
        found["bias"] = grad.sum(0, dtype=dtype).to(wanted["bias"])
    return found


def _pieces(x: Inputs) -> Iterator[Piece]:
    """Yield every group that has labels, in the order of their sizes."""
    num_features, num_labels, num_groups = x.features.shape[1], x.weight.shape[0], x.supports.shape[0]
    if not (x.features.shape[0] and num_labels and num_groups):
        return
    limits = covering(x.group_offsets, num_labels)
    sizes, order = limits.diff().sort(stable=True)
    starts, columns = limits[order], x.supports[order].to(torch.int64).clamp_(0, num_features - 1)
    found, samples, width = sizes.tolist(), min(PIECE_SAMPLES, x.features.shape[0]), x.weight.shape[1]
    last = num_groups
    # From the largest on, to which its piece is padded.
    while last and found[last - 1]:
        longest = found[last - 1]
        first = max(0, last - max(1, PIECE_ELEMENTS // (samples * max(width, longest))))
        label = torch.arange(longest, device=sizes.device)
        exists = label < sizes[first:last, None]
        labels = torch.where(exists, starts[first:last, None] + label, 0)
        yield Piece(columns[first:last], labels, exists)
        last = first


def _samples(features: Tensor) -> Iterator[slice]:
    for first in range(0, features.shape[0], PIECE_SAMPLES):
        yield slice(first, first + PIECE_SAMPLES)


def _gathered(features: Tensor, piece: Piece, dtype: torch.dtype) -> Tensor:
    """Return the features that groups read, `[n, F, B]`."""
    gathered = features.t().index_select(0, piece.columns.flatten())
    return gathered.view(*piece.columns.shape, features.shape[0]).to(dtype)
