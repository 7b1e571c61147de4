"""What functions over group-sparse layers check of a layer."""

from __future__ import annotations

import torch
from torch import Tensor

from jagged.ops._shared.validation import (
    FLOATS,
    check_device,
    check_factors,
    check_offsets,
    check_tensor,
    check_vector,
    holds,
    validation_is_on,
)
from jagged.ops.group_sparse.optimizer import GroupSparseOptimizer


def check_layer(features: Tensor, weight: Tensor, supports: Tensor, group_offsets: Tensor, bias: Tensor | None) -> None:
    """Check shapes, dtypes and devices, and the values of offsets and supports where these are checked."""
    check_tensor("features", features, "[B, H]", FLOATS)
    check_tensor("weight", weight, "[L, F]", FLOATS)
    is_adjacent = isinstance(supports, Tensor) and supports.dim() == 1
    check_tensor("supports", supports, "[K]" if is_adjacent else "[K, F]", (torch.int32, torch.int16))
    check_factors("weight", weight, "features", features)
    check_device("supports", supports, "features", features)
    if not (holds(weight.shape[1] >= 1) and holds(weight.shape[1] <= features.shape[1])):
        raise ValueError(
            f"weight: expected shape [L, F], F from 1 to {features.shape[1]}, the columns of features, got {list(weight.shape)}"
        )
    if not is_adjacent and not holds(supports.shape[1] == weight.shape[1]):
        raise ValueError(
            f"supports: expected shape [K, {weight.shape[1]}], a column of features for each column of weight "
            f"{list(weight.shape)}, got {list(supports.shape)}"
        )
    check_offsets(group_offsets, features, "group_offsets", total=weight.shape[0])
    if not holds(group_offsets.shape[0] == supports.shape[0] + 1):
        raise ValueError(
            f"group_offsets: expected shape [{supports.shape[0] + 1}], one more than the groups of supports "
            f"{list(supports.shape)}, got {list(group_offsets.shape)}"
        )
    if bias is not None:
        check_vector("bias", bias, "[L]", weight.shape[0], "row of weight", weight)
        check_factors("bias", bias, "features", features)
    if validation_is_on(supports) and is_adjacent:
        _validate_first_columns(supports, features.shape[1], weight.shape[1])
    elif validation_is_on(supports):
        _validate_supports(supports, features.shape[1])


def check_optimizer(optimizer: GroupSparseOptimizer, weight: Tensor, bias: Tensor | None) -> None:
    """Check that an optimizer is of this layer, and that the layer may learn."""
    if optimizer.step.device != weight.device:
        raise ValueError(
            f"optimizer: expected its states on the device of weight, {weight.device}, got {optimizer.step.device}; make it for "
            "these weights"
        )
    rows = 0 if bias is None else weight.shape[0]
    if optimizer.rule.momentum and not (
        holds(optimizer.weight_momentum.shape[0] == weight.shape[0])
        and holds(optimizer.weight_momentum.shape[1] == weight.shape[1])
        and holds(optimizer.bias_momentum.shape[0] == rows)
    ):
        raise ValueError(
            f"optimizer: expected momentum of shapes {list(weight.shape)} and [{rows}], those of weight and bias, "
            f"got {list(optimizer.weight_momentum.shape)} and {list(optimizer.bias_momentum.shape)}; make it for these weights"
        )
    if not weight.requires_grad:
        raise ValueError(
            "optimizer: weight does not require a gradient, so nothing would be updated; call weight.requires_grad_(), or leave "
            "the optimizer out"
        )


def _validate_supports(supports: Tensor, num_features: int) -> None:
    """Check that groups read columns that there are, and none of them twice."""
    values = supports.detach().cpu()
    if not values.numel():
        return
    lowest, highest = torch.stack(torch.aminmax(values)).tolist()
    if lowest < 0 or highest >= num_features:
        group, slot = torch.nonzero((values < 0) | (values >= num_features))[0].tolist()
        raise ValueError(
            f"supports[{group}, {slot}]: expected a column of features, from 0 to {num_features - 1}, "
            f"got {int(values[group, slot])}; columns are counted from 0"
        )
    if bool((values[:, 1:] > values[:, :-1]).all()):
        return
    columns = values.sort(1).values
    twice = torch.nonzero(columns[:, 1:] == columns[:, :-1])
    if twice.numel():
        group, slot = twice[0].tolist()
        raise ValueError(
            f"supports[{group}]: expected columns that differ, got {int(columns[group, slot])} twice; "
            "put another in its place, with weights of 0 if none is to count"
        )


def _validate_first_columns(supports: Tensor, num_features: int, width: int) -> None:
    """Check that groups which read adjacent columns read such that there are."""
    last = num_features - width
    wrong = torch.nonzero((supports < 0) | (supports > last))
    if wrong.numel():
        group = int(wrong[0])
        raise ValueError(
            f"supports[{group}]: expected the first of {width} adjacent columns of features, from 0 to {last}, "
            f"got {int(supports[group])}; columns are counted from 0"
        )
