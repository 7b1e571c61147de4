"""Group-sparse linear layers in plain PyTorch: the CPU path and the float64 path.

Groups of like sizes lie side by side, padded to the largest of their piece, and each piece meets pieces of the batch: what is
gathered and multiplied at once is bounded, and the count of PyTorch calls follows the work. Sizes of groups are read on the
host, which synchronises elsewhere than on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from jagged.ops._shared.label_loss import LossOptions, LossOutputs, loss_dtype
from jagged.ops._shared.offsets import covering
from jagged.ops.group_sparse.spec import (
    FeatureGradient,
    Inputs,
    LossInputs,
    Options,
    Outputs,
    SoftmaxInputs,
    SoftmaxOutputs,
    SoftmaxUpdateInputs,
    SoftmaxUpdatingInputs,
    UpdateInputs,
    UpdateOptions,
    UpdatingInputs,
    UpdatingOptions,
    columns_of_groups,
)
from jagged.ops.group_sparse.update import loss_inputs, softmax_inputs, update_by

Layer = Inputs | LossInputs | SoftmaxInputs

# Elements of a piece's gathered features, and of its logits: 4 MiB in float32.
PIECE_ELEMENTS = 2**20
# Samples that meet groups at once.
PIECE_SAMPLES = 256


class Piece(NamedTuple):
    """Groups side by side: their columns `[n, F]`, their labels `[n, G]` (0 where there is none), and which of them exist.

    `first` is the rank of the first one among all groups, by their sizes.
    """

    columns: Tensor
    labels: Tensor
    exists: Tensor
    first: int


def forward(x: Inputs, o: Options) -> Outputs:
    """Return the logits, zeros where wrong offsets have no group."""
    features, weight, bias = x.features, x.weight, x.bias
    logits = features.new_zeros(weight.shape[0], features.shape[0])
    for piece in _pieces(x):
        labels, weights = piece.labels[piece.exists], _weights_of(piece, weight)
        for samples in _samples(features):
            products = torch.bmm(weights, _gathered(features[samples], piece))[piece.exists]
            if bias is not None:
                products += bias.index_select(0, labels).to(products.dtype)[:, None]
            logits[:, samples].index_copy_(0, labels, products.to(logits.dtype))
    return Outputs(logits.t())


def backward(grads: Outputs, x: Inputs, out: Outputs, o: Options, wanted: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
    """Return the gradients that are wanted."""
    grad = grads.logits
    assert grad is not None
    dtype = loss_dtype(x.features.dtype)

    def given(piece: Piece, samples: slice, weights: Tensor, gathered: Tensor) -> Tensor:
        return grad[samples].t().index_select(0, piece.labels.flatten()).view(*piece.labels.shape, -1).to(dtype)

    found = _gradients(x, wanted.keys() - {"bias"}, given)
    if "bias" in wanted:
        found["bias"] = grad.sum(0, dtype=dtype)
    return _finished(found, wanted)


def bce_forward(x: LossInputs, o: LossOptions) -> LossOutputs:
    """Return the loss."""
    features, weight = x.features, x.weight
    dtype = loss_dtype(features.dtype)
    row_weight = x.row_weight.to(dtype)
    loss, positives = features.new_zeros((), dtype=dtype), _positives(x)
    for piece in _pieces(x):
        weights, counts = _weights_of(piece, weight), _counts_of(piece, x, dtype)
        for samples in _samples(features):
            z = _logits(piece, x, weights, _gathered(features[samples], piece))
            z *= _signs(piece, positives, samples, z)
            terms = -torch.nn.functional.logsigmoid(-z) - 0.5 * o.label_smoothing * z
            # Of rows that do not count, nothing counts, not even what is no number.
            of_rows = torch.where(row_weight[samples] != 0, terms * counts[:, :, None], 0).sum((0, 1))
            loss += of_rows @ row_weight[samples]
    return LossOutputs(loss)


def bce_backward(
    grads: LossOutputs, x: LossInputs, out: LossOutputs, o: LossOptions, wanted: Mapping[str, torch.dtype]
) -> dict[str, Tensor]:
    """Return the gradients that are wanted, of logits that are computed again."""
    features, weight = x.features, x.weight
    dtype = loss_dtype(features.dtype)
    assert grads.loss is not None
    row_weight, positives = x.row_weight.to(dtype) * grads.loss, _positives(x)
    of_bias = features.new_zeros(weight.shape[0], dtype=dtype) if "bias" in wanted else None

    def given(piece: Piece, samples: slice, weights: Tensor, gathered: Tensor) -> Tensor:
        z = _logits(piece, x, weights, gathered)
        signs = _signs(piece, positives, samples, z)
        slopes = (torch.sigmoid(z * signs) - 0.5 * o.label_smoothing) * signs * _counts_of(piece, x, dtype)[:, :, None]
        slopes = torch.where(x.row_weight[samples] != 0, slopes * row_weight[samples], 0)
        if of_bias is not None:
            of_bias.index_add_(0, piece.labels[piece.exists], slopes.sum(2)[piece.exists])
        return slopes

    # Features of rows that do not count enter no product, where zero times what is no number would.
    counting = torch.where((x.row_weight != 0)[:, None], features, 0)
    found = _gradients(x._replace(features=counting), wanted.keys(), given)
    if of_bias is not None:
        found["bias"] = of_bias
    return _finished(found, wanted)


def updating_forward(x: UpdatingInputs, o: UpdatingOptions) -> LossOutputs:
    """Return the loss."""
    return bce_forward(loss_inputs(x), LossOptions(o.label_smoothing))


def bce_update(x: UpdateInputs, o: UpdateOptions) -> FeatureGradient:
    """Return the gradient of features, and change weights and biases."""
    given = LossOutputs(x.grad), loss_inputs(x), LossOutputs(x.loss), LossOptions(o.label_smoothing)
    return update_by(lambda wanted: bce_backward(*given, wanted), x, o)


def softmax_forward(x: SoftmaxInputs, o: Options) -> SoftmaxOutputs:
    """Take the labels piece by piece into each row's maximum and sum of exponentials relative to it."""
    features, weight = counting_features(x), x.weight
    dtype = loss_dtype(features.dtype)
    maximum = features.new_full((features.shape[0],), -torch.inf, dtype=dtype)
    total, target, positives = torch.zeros_like(maximum), torch.zeros_like(maximum), _positives(x)
    for piece in _pieces(x):
        weights = _weights_of(piece, weight)
        for samples in _samples(features):
            z = _logits(piece, x, weights, _gathered(features[samples], piece)).masked_fill_(
                ~piece.exists[:, :, None], -torch.inf
            )
            target[samples] += torch.where(_signs(piece, positives, samples, z) < 0, z, 0).sum((0, 1))
            highest = torch.maximum(maximum[samples], z.amax((0, 1)))
            # A row of -inf alone has no maximum to subtract.
            shift = highest.masked_fill(highest == -torch.inf, 0)
            added = z.sub_(shift).exp_().sum((0, 1))
            total[samples] = total[samples] * (maximum[samples] - shift).exp_() + added
            maximum[samples] = highest
    lse = total.log_().add_(maximum.masked_fill(maximum == -torch.inf, 0))
    if x.row_mask is not None:
        lse, target = (of_rows.masked_fill_(~x.row_mask, 0) for of_rows in (lse, target))
    return SoftmaxOutputs(lse, target)


def softmax_backward(
    grads: SoftmaxOutputs, x: SoftmaxInputs, out: SoftmaxOutputs, o: Options, wanted: Mapping[str, torch.dtype]
) -> dict[str, Tensor]:
    """Return the gradients that are wanted, of logits that are computed again."""
    x = x._replace(features=counting_features(x))
    lse, of_lse, of_target = softmax_rows(grads, x, out)
    positives = _positives(x)
    of_bias = lse.new_zeros(x.weight.shape[0]) if "bias" in wanted else None

    def given(piece: Piece, samples: slice, weights: Tensor, gathered: Tensor) -> Tensor:
        z = _logits(piece, x, weights, gathered)
        is_positive = _signs(piece, positives, samples, z) < 0
        slopes = z.sub_(lse[samples]).exp_().mul_(of_lse[samples]).add_(torch.where(is_positive, of_target[samples], 0))
        if of_bias is not None:
            of_bias.index_add_(0, piece.labels[piece.exists], slopes.sum(2)[piece.exists])
        return slopes

    found = _gradients(x, wanted.keys(), given)
    if of_bias is not None:
        found["bias"] = of_bias
    return _finished(found, wanted)


def softmax_updating_forward(x: SoftmaxUpdatingInputs, o: UpdatingOptions) -> SoftmaxOutputs:
    """Return what the softmax does."""
    return softmax_forward(softmax_inputs(x), Options())


def softmax_update(x: SoftmaxUpdateInputs, o: UpdateOptions) -> FeatureGradient:
    """Return the gradient of features, and change weights and biases."""
    # The sum of the positives' logits is in no gradient.
    given = SoftmaxOutputs(x.grad_lse, x.grad_target), softmax_inputs(x), SoftmaxOutputs(x.lse, x.lse), Options()
    return update_by(lambda wanted: softmax_backward(*given, wanted), x, o)


def softmax_rows(grads: SoftmaxOutputs, x: SoftmaxInputs, out: SoftmaxOutputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return what backward needs of rows, each `[B]`: log-sum-exp, its gradient, and that of `target`.

    Where there is nothing to learn, in masked rows and in rows whose logits are all -inf, the log-sum-exp is inf: exponentials
    relative to it are 0.
    """
    zeros = torch.zeros_like(out.lse)
    of_lse, of_target = (zeros if grad is None else grad for grad in grads)
    lse = out.lse.masked_fill(out.lse == -torch.inf, torch.inf)
    if x.row_mask is None:
        return lse, of_lse, of_target
    return lse.masked_fill(~x.row_mask, torch.inf), of_lse.masked_fill(~x.row_mask, 0), of_target.masked_fill(~x.row_mask, 0)


def counting_features(x: SoftmaxInputs) -> Tensor:
    """Return features, zeros in masked rows: they enter no product, where zero times what is no number would be none."""
    return x.features if x.row_mask is None else torch.where(x.row_mask[:, None], x.features, 0)


def _logits(piece: Piece, x: LossInputs | SoftmaxInputs, weights: Tensor, gathered: Tensor) -> Tensor:
    z = torch.bmm(weights, gathered)
    return z if x.bias is None else z.add_(x.bias[piece.labels].to(z.dtype)[:, :, None])


class Positives(NamedTuple):
    """Positives by the ranks of their groups among all groups by size: rank, place of the label in its group, and row."""

    ranks: Tensor
    places: Tensor
    rows: Tensor


def _positives(x: LossInputs | SoftmaxInputs) -> Positives:
    """Return the positives that are labels of a group."""
    labels, num_groups = x.positives, x.supports.shape[0]
    if not (labels.numel() and num_groups and x.weight.shape[0]):
        return Positives(labels[:0], labels[:0], labels[:0])
    limits = covering(x.group_offsets, x.weight.shape[0])
    groups = torch.searchsorted(limits, labels, right=True) - 1
    exists = (groups >= 0) & (groups < num_groups)
    groups.clamp_(0, num_groups - 1)
    # The order of `_pieces`.
    ranks = torch.argsort(torch.argsort(limits.diff(), stable=True))[groups]
    ranks, order = torch.where(exists, ranks, num_groups).sort()
    return Positives(ranks, (labels - limits[groups])[order], x.rows[order])


def _signs(piece: Piece, positives: Positives, samples: slice, like: Tensor) -> Tensor:
    """Return -1 for positives among a piece's labels and some samples, and 1 for others.

    The loss of a logit z is that of `sign z` as a negative's, so that neither a large positive's nor a small negative's is lost.
    """
    signs = torch.ones_like(like)
    bounds = torch.tensor([piece.first, piece.first + piece.labels.shape[0]], device=like.device)
    begin, end = torch.searchsorted(positives.ranks, bounds).tolist()
    ranks, places, rows = (tensor[begin:end] for tensor in positives)
    among = (rows >= samples.start) & (rows < samples.stop)
    index = (ranks[among] - piece.first, places[among], rows[among] - samples.start)
    return signs.index_put_(index, like.new_full((), -1.0))


def _counts_of(piece: Piece, x: LossInputs, dtype: torch.dtype) -> Tensor:
    """Return what labels weigh, 0 where there is none."""
    if x.label_weight is None:
        return piece.exists.to(dtype)
    return torch.where(piece.exists, x.label_weight[piece.labels].to(dtype), 0)


def _gradients(x: Layer, wanted: Collection[str], given: Callable[[Piece, slice, Tensor, Tensor], Tensor]) -> dict[str, Tensor]:
    """Return gradients of features and weight, as far as wanted, by those of logits that `given` has for a piece and samples."""
    features, weight = x.features, x.weight
    dtype = loss_dtype(features.dtype)
    # Of features transposed, so that what is added to one column lies side by side.
    columns = features.new_zeros(features.shape[1], features.shape[0], dtype=dtype) if "features" in wanted else None
    rows = weight.new_zeros(weight.shape, dtype=dtype) if "weight" in wanted else None
    for piece in _pieces(x) if wanted else ():
        weights = _weights_of(piece, weight)
        sums = None if rows is None else rows.new_zeros(weights.shape)
        for samples in _samples(features):
            gathered = _gathered(features[samples], piece)
            # Zero where there is no label: the one that stands in for it adds nothing.
            slopes = given(piece, samples, weights, gathered).masked_fill(~piece.exists[:, :, None], 0)
            if sums is not None:
                sums.baddbmm_(slopes, gathered.transpose(1, 2))
            if columns is not None:
                # Nor does a weight that is no number, which a gradient of zero would not hide.
                products = torch.bmm(weights.masked_fill(~piece.exists[:, :, None], 0).transpose(1, 2), slopes)
                columns[:, samples].index_add_(0, piece.columns.flatten(), products.flatten(0, 1))
        if rows is not None and sums is not None:
            rows.index_copy_(0, piece.labels[piece.exists], sums[piece.exists])
    found = {}
    if columns is not None:
        found["features"] = columns.t()
    if rows is not None:
        found["weight"] = rows
    return found


def _finished(found: Mapping[str, Tensor], wanted: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
    return {name: found[name].to(dtype).contiguous() for name, dtype in wanted.items()}


def _weights_of(piece: Piece, weight: Tensor) -> Tensor:
    """Return the weights of a piece's labels, `[n, G, F]`."""
    rows = weight.index_select(0, piece.labels.flatten())
    return rows.view(*piece.labels.shape, -1).to(loss_dtype(weight.dtype))


def _pieces(x: Layer) -> Iterator[Piece]:
    """Yield every group that has labels, in the order of their sizes."""
    num_features, num_labels, num_groups = x.features.shape[1], x.weight.shape[0], x.supports.shape[0]
    if not (x.features.shape[0] and num_labels and num_groups):
        return
    limits = covering(x.group_offsets, num_labels)
    sizes, order = limits.diff().sort(stable=True)
    starts, columns = limits[order], columns_of_groups(x)[order].to(torch.int64).clamp_(0, num_features - 1)
    found, samples, width = sizes.tolist(), min(PIECE_SAMPLES, x.features.shape[0]), x.weight.shape[1]
    last = num_groups
    # From the largest on, to which its piece is padded.
    while last and found[last - 1]:
        longest = found[last - 1]
        first = max(0, last - max(1, PIECE_ELEMENTS // (samples * max(width, longest))))
        label = torch.arange(longest, device=sizes.device)
        exists = label < sizes[first:last, None]
        labels = torch.where(exists, starts[first:last, None] + label, 0)
        yield Piece(columns[first:last], labels, exists, first)
        last = first


def _samples(features: Tensor) -> Iterator[slice]:
    for first in range(0, features.shape[0], PIECE_SAMPLES):
        yield slice(first, first + PIECE_SAMPLES)


def _gathered(features: Tensor, piece: Piece) -> Tensor:
    """Return the features that groups read, `[n, F, B]`."""
    gathered = features.t().index_select(0, piece.columns.flatten())
    return gathered.view(*piece.columns.shape, features.shape[0]).to(loss_dtype(features.dtype))
