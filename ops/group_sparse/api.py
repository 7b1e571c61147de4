"""Public linear layers over groups of labels that read a few columns of their own, and their losses."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from jagged.ops._shared.label_loss import LossOptions, check_label_loss, distinct_labels, label_sets, loss_dtype
from jagged.ops._shared.offsets import covering
from jagged.ops._shared.validation import autocast_dtype, check_number
from jagged.ops.group_sparse.checks import check_layer, check_optimizer
from jagged.ops.group_sparse.optimizer import GroupSparseOptimizer
from jagged.ops.group_sparse.spec import (
    GROUP_SPARSE,
    GROUP_SPARSE_BCE,
    GROUP_SPARSE_BCE_UPDATING,
    GROUP_SPARSE_SOFTMAX,
    GROUP_SPARSE_SOFTMAX_UPDATING,
    Inputs,
    LossInputs,
    Options,
    SoftmaxInputs,
    SoftmaxUpdatingInputs,
    UpdatingInputs,
    UpdatingOptions,
)


def group_sparse_linear(
    features: Tensor,
    weight: Tensor,
    supports: Tensor,
    group_offsets: Tensor,
    bias: Tensor | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """Compute logits of labels that each read F of H features, the labels of a group the same ones.

    `out[b, l] = sum_f features[b, supports[g, f]] * weight[l, f] + bias[l]`, g the group of label l. Labels of a group lie side
    by side. Under `torch.autocast` features, weight and bias are cast to its dtype, which is then the result's; their gradients
    come back in their own dtypes. Gradients of first order.

    Args:
        features: `[B, H]`, float32, bfloat16, float16 or float64 (computed by PyTorch on every device).
        weight: `[L, F]`, of the dtype and device of `features`; F from 1 to H.
        supports: `[K, F]`, int32 or int16: the columns of features that a group reads, from 0 to H - 1 and none of them twice. On
            a CPU those in rising order are checked fastest. Or `[K]`, of groups that read F adjacent columns the first one, from
            0 to H - F: a block-sparse layer, whose gradient of features takes less time.
        group_offsets: `[K + 1]`, int32 or int64, from 0 to L: labels `group_offsets[g]` to `group_offsets[g + 1] - 1` are those
            of group g, which may have none.
        bias: `[L]`, of the dtype and device of `features`: added to the sums before they are rounded. None adds nothing.
        backend: `"torch"`, `"triton"`, or None to choose by device. The PyTorch implementation reads the offsets on the host.

    Returns:
        `[B, L]` in the dtype of `features`, a label's numbers side by side in memory (strides 1 and B), so that groups of any
        size are written in whole lines; sums are accumulated in float32 (float64 for float64).

    Raises:
        ValueError: shapes that do not fit, tensors on different devices, an unknown backend; on a CPU, unless values are trusted,
            and with `JAGGED_VALIDATE=1` everywhere, also wrong values of offsets or supports.
        TypeError: dtypes other than those above, or different ones outside of autocast.

    Source:
        HASTE: output layers of many labels whose groups share a sparse input of fixed size (group-shared fixed fan-in).

    Example:
        >>> import torch
        >>> from jagged.ops import group_sparse_linear
        >>> features, weight = torch.tensor([[1., 2., 3., 4.]]), torch.tensor([[1., 1.], [1., -1.], [10., 0.]])
        >>> supports = torch.tensor([[0, 3], [1, 2]], dtype=torch.int32)
        >>> group_sparse_linear(features, weight, supports, torch.tensor([0, 2, 3]))
        tensor([[ 5., -3., 20.]])
    """
    check_layer(features, weight, supports, group_offsets, bias)
    return GROUP_SPARSE(Inputs(features, weight, supports, group_offsets, bias), Options(), backend).logits


def group_sparse_bce(
    features: Tensor,
    weight: Tensor,
    supports: Tensor,
    group_offsets: Tensor,
    positives: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    *,
    label_weight: Tensor | None = None,
    row_mask: Tensor | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    optimizer: GroupSparseOptimizer | None = None,
    backend: str | None = None,
) -> Tensor:
    """Compute the binary cross-entropy of all labels, summed over labels and averaged over rows, without storing a logit.

    With `z = group_sparse_linear(features, weight, supports, group_offsets, bias)`, and y = 1 for a row's positives and 0 for its
    other labels, the loss is the mean over rows b of `sum_l label_weight[l] (log(1 + exp(z[b, l])) - y[b, l] z[b, l])`. Backward
    computes the logits again and makes all gradients at once. Under `torch.autocast` features, weight and bias are cast to its
    dtype; their gradients come back in their own dtypes. Gradients of first order.

    Args:
        features: `[B, H]`, as for `group_sparse_linear`, and so are `weight`, `supports`, `group_offsets` and `bias`.
        weight: `[L, F]`.
        supports: `[K, F]` or `[K]`.
        group_offsets: `[K + 1]`.
        positives: `[P]`, int32 or int64: the labels of row 0, then those of row 1, in any order, from 0 to L - 1. A label that a
            row has twice counts once.
        offsets: `[B + 1]`, int32 or int64, from 0 to P: row b has `positives[offsets[b] : offsets[b + 1]]`, also none.
        bias: `[L]`.
        label_weight: `[L]`, floating point, without a gradient: what a label's part of the loss is multiplied with. None is 1.
        row_mask: `[B]`, bool: rows that count; the mean is over these, and 0 where there is none. None counts all.
        label_smoothing: share s of the targets in [0, 1], which become `(1 - s) y + s / 2`.
        ignore_index: a negative number that among positives is no label.
        optimizer: update `weight`, and `bias` where it requires a gradient, in the backward pass, in place, and make no gradients
            of them; `weight` must require one. All is then computed in the dtype of `weight`, also under autocast.
        backend: `"torch"`, `"triton"`, or None to choose by device.

    Returns:
        A number, float32 (float64 for float64).

    Raises:
        ValueError: shapes that do not fit, tensors on different devices, `label_smoothing` outside of [0, 1], an unknown backend;
            an optimizer of another layer, or for weights that require no gradient, where gradients are recorded; on a CPU, unless
            values are trusted, and with `JAGGED_VALIDATE=1` everywhere, also wrong values of offsets, supports or positives.
        TypeError: dtypes other than those above, or different ones outside of autocast.
        RuntimeError: in a backward pass with an optimizer, weights that have changed since the loss was computed.

    Source:
        HASTE: output layers of many labels whose groups share a sparse input of fixed size (group-shared fixed fan-in).

    Example:
        >>> import torch
        >>> from jagged.ops import group_sparse_bce
        >>> features, weight = torch.tensor([[1., 2., 3., 4.]]), torch.tensor([[1., 1.], [1., -1.], [10., 0.]])
        >>> supports = torch.tensor([[0, 3], [1, 2]], dtype=torch.int32)
        >>> positives, offsets = torch.tensor([2, 0]), torch.tensor([0, 2])
        >>> group_sparse_bce(features, weight, supports, torch.tensor([0, 2, 3]), positives, offsets)
        tensor(0.0553)
    """
    if optimizer is not None and autocast_dtype(features.device.type) is not None:
        features = features.to(weight.dtype)
    check_layer(features, weight, supports, group_offsets, bias)
    check_label_loss(features, weight, positives, offsets, label_weight, row_mask, label_smoothing, ignore_index)
    sets = label_sets(features, positives, offsets, row_mask)
    positive_offsets = torch.searchsorted(sets.positives, group_offsets.to(torch.int64).contiguous())
    inputs = LossInputs(features, weight, supports, group_offsets, *sets, positive_offsets, bias, label_weight)
    if optimizer is None or not torch.is_grad_enabled():
        return GROUP_SPARSE_BCE(inputs, LossOptions(label_smoothing), backend).loss
    states, options = _updating(optimizer, weight, bias, label_smoothing)
    return GROUP_SPARSE_BCE_UPDATING(UpdatingInputs(*inputs, *states), options, backend).loss


def _updating(
    optimizer: GroupSparseOptimizer, weight: Tensor, bias: Tensor | None, label_smoothing: float
) -> tuple[tuple[Tensor | None, Tensor | None, Tensor, Tensor, Tensor | None], UpdatingOptions]:
    """Return what a loss with an optimizer is given beside the loss's own: the end of `UpdatingInputs`, and options."""
    check_optimizer(optimizer, weight, bias)
    is_compiling, has_momentum = torch.compiler.is_compiling(), bool(optimizer.rule.momentum)
    states = (
        optimizer.weight_momentum if has_momentum else None,
        optimizer.bias_momentum if has_momentum else None,
        optimizer.step,
        optimizer.learning_rate,
        optimizer.step.clone() if is_compiling else None,
    )
    return states, UpdatingOptions(label_smoothing, *optimizer.rule, None if is_compiling else weight._version)


@overload
def group_sparse_cross_entropy(
    features: Tensor, weight: Tensor, supports: Tensor, group_offsets: Tensor, positives: Tensor, offsets: Tensor,
    bias: Tensor | None = ..., *, row_mask: Tensor | None = ..., ignore_index: int = ...,
    optimizer: GroupSparseOptimizer | None = ..., return_parts: Literal[False] = ..., backend: str | None = ...,
) -> Tensor: ...  # fmt: skip


@overload
def group_sparse_cross_entropy(
    features: Tensor, weight: Tensor, supports: Tensor, group_offsets: Tensor, positives: Tensor, offsets: Tensor,
    bias: Tensor | None = ..., *, row_mask: Tensor | None = ..., ignore_index: int = ...,
    optimizer: GroupSparseOptimizer | None = ..., return_parts: Literal[True], backend: str | None = ...,
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip


def group_sparse_cross_entropy(
    features: Tensor,
    weight: Tensor,
    supports: Tensor,
    group_offsets: Tensor,
    positives: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    *,
    row_mask: Tensor | None = None,
    ignore_index: int = -100,
    optimizer: GroupSparseOptimizer | None = None,
    return_parts: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Compute the cross-entropy of a softmax over all labels, averaged over the rows that have positives, storing no logits.

    With `z = group_sparse_linear(features, weight, supports, group_offsets, bias)` the loss of a row with n positives is
    `logsumexp(z[b]) - sum of its positives' z / n`: they share the probability evenly. Rows without a positive do not count.
    Backward computes the logits again and makes all gradients at once. Under `torch.autocast` features, weight and bias are cast
    to its dtype; their gradients come back in their own dtypes. Gradients of first order.

    Args:
        features: `[B, H]`, as for `group_sparse_linear`, and so are `weight`, `supports`, `group_offsets` and `bias`.
        weight: `[L, F]`.
        supports: `[K, F]` or `[K]`.
        group_offsets: `[K + 1]`.
        positives: `[P]`, int32 or int64: the labels of row 0, then those of row 1, in any order, from 0 to L - 1. A label that a
            row has twice counts once.
        offsets: `[B + 1]`, int32 or int64, from 0 to P: row b has `positives[offsets[b] : offsets[b + 1]]`, also none.
        bias: `[L]`.
        row_mask: `[B]`, bool: rows that count, as far as they have positives; the mean is over these, and 0 where there is none.
            None counts all.
        ignore_index: a negative number that among positives is no label.
        optimizer: as for `group_sparse_bce`.
        return_parts: also return what the loss is made of: with the log-sum-exp of other labels, `torch.logaddexp` of both is
            that of one softmax over all.
        backend: `"torch"`, `"triton"`, or None to choose by device.

    Returns:
        A number, float32 (float64 for float64). With `return_parts` a tuple of it and two of that dtype, `[B]`, which are
        differentiable: each row's log-sum-exp of all logits, and the sum of its positives' logits. Both are 0 in rows that
        `row_mask` leaves out; without labels the log-sum-exp is -inf, and without positives the sum is 0.

    Raises:
        ValueError: shapes that do not fit, tensors on different devices, an unknown backend; an optimizer of another layer, or
            for weights that require no gradient, where gradients are recorded; on a CPU, unless values are trusted, and with
            `JAGGED_VALIDATE=1` everywhere, also wrong values of offsets, supports or positives.
        TypeError: dtypes other than those above, or different ones outside of autocast.
        RuntimeError: in a backward pass with an optimizer, weights that have changed since the loss was computed.

    Source:
        HASTE, as for `group_sparse_linear`; the log-sum-exp of logits that are not stored: Wijmans et al., Cut Your Losses in
        Large-Vocabulary Language Models, ICLR 2025.

    Example:
        >>> import torch
        >>> from jagged.ops import group_sparse_cross_entropy
        >>> features, weight = torch.tensor([[1., 2., 3., 4.]]), torch.tensor([[1., 1.], [1., -1.], [1., 0.]])
        >>> supports = torch.tensor([[0, 3], [1, 2]], dtype=torch.int32)
        >>> positives, offsets = torch.tensor([2, 0]), torch.tensor([0, 2])
        >>> group_sparse_cross_entropy(features, weight, supports, torch.tensor([0, 2, 3]), positives, offsets)
        tensor(1.5489)
    """
    if optimizer is not None and autocast_dtype(features.device.type) is not None:
        features = features.to(weight.dtype)
    check_layer(features, weight, supports, group_offsets, bias)
    check_label_loss(features, weight, positives, offsets, None, row_mask, 0.0, ignore_index)
    sets = label_sets(features, positives, offsets, row_mask)
    positive_offsets = torch.searchsorted(sets.positives, group_offsets.to(torch.int64).contiguous())
    layer = (features, weight, supports, group_offsets)
    inputs = SoftmaxInputs(*layer, sets.positives, sets.rows, positive_offsets, bias, row_mask)
    if optimizer is None or not torch.is_grad_enabled():
        lse, target = GROUP_SPARSE_SOFTMAX(inputs, Options(), backend)
    else:
        states, options = _updating(optimizer, weight, bias, 0.0)
        lse, target = GROUP_SPARSE_SOFTMAX_UPDATING(SoftmaxUpdatingInputs(*inputs, *states), options, backend)
    counts = distinct_labels(sets, weight.shape[0])
    counted = counts > 0 if row_mask is None else (counts > 0) & row_mask
    losses = torch.where(counted, lse - target / counts.clamp(min=1), 0)
    loss = losses.sum() / counted.sum().clamp_(min=1)
    return (loss, lse, target) if return_parts else loss


def group_sparse_topk(
    features: Tensor,
    weight: Tensor,
    supports: Tensor,
    group_offsets: Tensor,
    k: int,
    bias: Tensor | None = None,
    *,
    max_bytes: int = 2**28,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The k best labels of each row by `group_sparse_linear`, without the matrix of logits in memory.

    Higher scores come first; the order of equal ones is not said. Scores are products in float32, whatever the dtype of the
    layer. No gradient flows. Where groups begin is read on the host, once a call.

    Args:
        features: `[B, H]`, as for `group_sparse_linear`, and so are `weight`, `supports`, `group_offsets` and `bias`.
        weight: `[L, F]`.
        supports: `[K, F]` or `[K]`.
        group_offsets: `[K + 1]`.
        k: how many labels, at least 1; may exceed L.
        bias: `[L]`.
        max_bytes: bound on the memory that grows with rows times labels, at least 64 KiB; one group's share is always taken.
        backend: `"torch"`, `"triton"`, or None to choose by device.

    Returns:
        Scores `[B, k]`, float32 (float64 for float64), and labels `[B, k]`, int64. Where there are fewer than k labels a row ends
        in scores -inf and labels -1.

    Raises:
        ValueError: as `group_sparse_linear`; also k or max_bytes out of range.
        TypeError: dtypes other than those above.

    Source:
        HASTE, as for `group_sparse_linear`.

    Example:
        >>> import torch
        >>> from jagged.ops import group_sparse_topk
        >>> features, weight = torch.tensor([[1., 2., 3., 4.]]), torch.tensor([[1., 1.], [1., -1.], [10., 0.]])
        >>> supports = torch.tensor([[0, 3], [1, 2]], dtype=torch.int32)
        >>> group_sparse_topk(features, weight, supports, torch.tensor([0, 2, 3]), k=2)
        (tensor([[20.,  5.]]), tensor([[2, 0]]))
    """
    check_layer(features, weight, supports, group_offsets, bias)
    check_number("k", k, k >= 1, "at least 1")
    check_number("max_bytes", max_bytes, max_bytes >= 2**16, f"at least {2**16}")
    with torch.no_grad(), torch.autocast(features.device.type, enabled=False):
        dtype = loss_dtype(features.dtype)
        batch_size, num_labels, num_groups = features.shape[0], weight.shape[0], supports.shape[0]
        columns = features.to(dtype)
        scores = columns.new_full((batch_size, k), -torch.inf)
        labels = torch.full((batch_size, k), -1, dtype=torch.int64, device=features.device)
        # A logit, its copy for the search, and what a search keeps.
        most = max_bytes // max(1, 4 * batch_size * scores.element_size())
        groups = max(1, most * num_groups // max(1, num_labels))
        firsts = list(range(0, num_groups, groups))
        limits = covering(group_offsets, num_labels)
        bounds = limits[torch.tensor([*firsts, num_groups], device=limits.device)].tolist() if firsts else []
        for first, begin, end in zip(firsts, bounds, bounds[1:], strict=False):
            if end == begin:
                continue
            some = slice(first, first + groups)
            inputs = Inputs(
                columns,
                weight[begin:end].to(dtype),
                supports[some],
                limits[first : first + groups + 1] - begin,
                None if bias is None else bias[begin:end].to(dtype),
            )
            found = GROUP_SPARSE(inputs, Options(), backend).logits
            best, places = found.topk(min(k, end - begin), 1)
            scores, order = torch.cat([scores, best], 1).topk(k, 1)
            labels = torch.cat([labels, places + begin], 1).gather(1, order)
        return scores, labels
