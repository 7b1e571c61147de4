"""What losses over sets of labels share, whatever layer the labels have: options, checks, and positives in order."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from jagged.ops._shared.offsets import sample_of_row
from jagged.ops._shared.validation import (
    check_device,
    check_number,
    check_offsets,
    check_tensor,
    check_vector,
    holds,
    validate_ids,
    validation_is_on,
)


class LossOptions(NamedTuple):
    """A label's target is 1 for a positive and 0 otherwise, drawn to 1/2 by `label_smoothing`."""

    label_smoothing: float = 0.0


class LossOutputs(NamedTuple):
    """A number, in float32 or float64."""

    loss: Tensor


class LabelSets(NamedTuple):
    """Positives `[P]` (int64) in rising order, the row of each, rising for one label; and what rows weigh, `[B]`.

    The sum over a row's labels is multiplied with its weight, which is 0 for a row that does not count.
    """

    positives: Tensor
    rows: Tensor
    row_weight: Tensor


def loss_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of losses and sums."""
    return torch.promote_types(dtype, torch.float32)


def check_label_loss(
    features: Tensor,
    weight: Tensor,
    positives: Tensor,
    offsets: Tensor,
    label_weight: Tensor | None,
    row_mask: Tensor | None,
    label_smoothing: float,
    ignore_index: int,
) -> None:
    """Check what a loss takes beside its layer; `weight` has a row for each label."""
    check_tensor("positives", positives, "[P]", (torch.int32, torch.int64))
    check_device("positives", positives, "features", features)
    check_offsets(offsets, features, total=positives.shape[0])
    if not holds(offsets.shape[0] == features.shape[0] + 1):
        raise ValueError(
            f"offsets: expected shape [{features.shape[0] + 1}], one more than the rows of features {list(features.shape)}, "
            f"got {list(offsets.shape)}"
        )
    if label_weight is not None:
        check_vector("label_weight", label_weight, "[L]", weight.shape[0], "row of weight", weight)
        check_device("label_weight", label_weight, "features", features)
    if row_mask is not None:
        check_tensor("row_mask", row_mask, "[B]", (torch.bool,))
        check_device("row_mask", row_mask, "features", features)
        if not holds(row_mask.shape[0] == features.shape[0]):
            raise ValueError(
                f"row_mask: expected shape [{features.shape[0]}], one for each row of features {list(features.shape)}, "
                f"got {list(row_mask.shape)}"
            )
    check_number("label_smoothing", label_smoothing, 0 <= label_smoothing <= 1, "a number in [0, 1]")
    check_number("ignore_index", ignore_index, ignore_index < 0, "a negative number, which is no label")
    if validation_is_on(positives):
        validate_ids(positives, weight.shape[0], name="positives", ignore_index=ignore_index)


def label_sets(features: Tensor, positives: Tensor, offsets: Tensor, row_mask: Tensor | None) -> LabelSets:
    """Sort positives by label, and weigh rows so that the loss is the mean over those that count. Waits for no device."""
    rows = sample_of_row(offsets, positives.shape[0])
    # Rows rise, and so do those of one label in a stable order.
    labels, order = positives.to(torch.int64).sort(stable=True)
    dtype = loss_dtype(features.dtype)
    counts = features.new_ones(features.shape[0], dtype=dtype) if row_mask is None else row_mask.to(dtype)
    return LabelSets(labels, rows[order], counts / counts.sum().clamp_(min=1))


def distinct_labels(sets: LabelSets, num_labels: int) -> Tensor:
    """Return how many labels each row has, `[B]` (int64), of those from 0 to `num_labels` - 1; one that it has twice is one."""
    labels, rows = sets.positives, sets.rows
    # The first is always new, others by the one before. A slice would ask a tracer for its length.
    place = torch.arange(labels.shape[0], device=labels.device)
    before = (place - 1).clamp_(min=0)
    is_new = (place == 0) | (labels != labels.index_select(0, before)) | (rows != rows.index_select(0, before))
    is_new &= (labels >= 0) & (labels < num_labels)
    # Of no row at all, wrong offsets give positives to the first.
    batch_size = sets.row_weight.shape[0]
    return rows.new_zeros(batch_size + 1).index_add_(0, rows, is_new.to(torch.int64))[:batch_size]


def slope_scales(features: Tensor, row_weight: Tensor, label_weight: Tensor | None, grad: Tensor) -> Tensor:
    """Return `[2]`: what slopes are multiplied with, and then their products; float16 has too few small numbers for slopes."""
    if features.dtype != torch.float16:
        return torch.stack([torch.ones_like(grad), grad])
    largest = row_weight.abs().amax()
    if label_weight is not None:
        largest = largest * label_weight.abs().amax()
    scale = 2.0**14 / largest.clamp(min=1e-30)
    return torch.stack([scale, grad / scale])
